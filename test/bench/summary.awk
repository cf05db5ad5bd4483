# Summarize what "run" has measured.
#
#	awk -f summary.awk goals DESCRIPTIONS CSV
#
# DESCRIPTIONS has lines of load, side and description of the side, with tabs
# between. Prints a line for each comparison of the extension with another
# side, with tabs between: load, side, unit, medians of the extension and of
# the other, median, minimum and maximum of the rounds' ratios, kind of the
# goal, operator, goal, "yes" or "no", and the description of the other side.
# "-" stands for a missing value.

BEGIN { OFS = "\t" }

FNR == 1 { input++ }

input == 1 && /^[^#]/ && NF == 5 {
	goal[$1, $2] = $3 "\t" $4 "\t" $5
	if ($2 == "-" || $2 ~ /:/)
		extra[++extras] = $1 "\t" $2
}

input == 2 {
	split($0, field, "\t")
	what[field[1], field[2]] = field[3]
}

input == 3 && FNR > 1 {
	split($0, field, ",")
	if (!((field[1], field[2]) in rounds)) {
		order[++measured] = field[1] "\t" field[2]
		unit[field[1]] = field[5]
	}
	rounds[field[1], field[2]]++
	value[field[1], field[2], field[3]] = field[4]
}

END {
	# One batch call does the work of 500 single calls.
	times["once_500", "single"] = 500
	times["claim_100", "single"] = 100
	times["advance_100", "single"] = 100
	times["stale_100", "single"] = 100
	times["set_100", "single"] = 100
	times["complete_100", "single"] = 100
	times["publish_100", "single"] = 100
	times["publish_keyed_100", "single"] = 100

	for (i = 1; i <= measured; i++) {
		split(order[i], field, "\t")
		if (field[2] != "ours")
			compare(field[1], field[2], field[1], field[2])
	}
	for (i = 1; i <= extras; i++) {
		split(extra[i], field, "\t")
		if (!((field[1], "ours") in rounds))
			continue
		if (field[2] == "-")
			alone(field[1])
		else {
			split(field[2], other, ":")
			compare(field[1], field[2], other[1], other[2])
		}
	}
}

function compare(load, side, other_load, other_side,   n, r, a, b, factor, ours, theirs, ratio)
{
	factor = (load, side) in times ? times[load, side] : 1
	for (r = 1; r <= rounds[load, "ours"]; r++) {
		if (!((load, "ours", r) in value) || !((other_load, other_side, r) in value))
			continue
		a = value[load, "ours", r]
		b = value[other_load, other_side, r] / factor
		n++
		ours[n] = a
		theirs[n] = b
		ratio[n] = b > 0 ? a / b : a > 0 ? 1e9 : 1
	}
	if (n == 0)
		return
	a = median(ours, n)
	b = median(theirs, n)
	r = median(ratio, n)
	print load, side, unit[load], a, b, r, ratio[1], ratio[n],
		verdict(load, side, r), describe(load, side)
}

# Our figure itself: the worst round counts, that is, the highest.
function alone(load,   r, n, ours)
{
	for (r = 1; r <= rounds[load, "ours"]; r++)
		if ((load, "ours", r) in value)
			ours[++n] = value[load, "ours", r]
	median(ours, n)
	print load, "-", unit[load], ours[n], "-", "-", "-", "-",
		verdict(load, "-", ours[n]), "the worst round"
}

# The goal's kind, operator and number, and whether it is met.
function verdict(load, side, figure,   part, met)
{
	if (!((load, side) in goal))
		return "-\t-\t-\t-"
	split(goal[load, side], part, "\t")
	figure = sprintf("%.2f", figure) + 0	# as it is printed
	met = part[2] == ">=" ? figure >= part[3] + 0 : figure <= part[3] + 0
	return goal[load, side] "\t" (met ? "yes" : "no")
}

# Sort the array, and return its median.
function median(list, n,   i, j, x)
{
	for (i = 2; i <= n; i++) {
		x = list[i] + 0
		for (j = i - 1; j > 0 && list[j] + 0 > x; j--)
			list[j + 1] = list[j]
		list[j + 1] = x
	}
	return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
}

# A load's description is that of its file: LOAD@NUMBER and LOAD_METRIC.
function describe(load, side)
{
	if (side ~ /:/)
		return "ours under that load"
	sub(/@.*/, "", load)
	while (!((load, side) in what) && sub(/_[^_]*$/, "", load))
		;
	return (load, side) in what ? what[load, side] : "-"
}
