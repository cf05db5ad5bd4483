/*-------------------------------------------------------------------------
 *
 * times.c
 *		Checking and adding intervals, and a clock that nobody can set.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "portability/instr_time.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/timestamp.h"

#include "util/compat.h"
#include "util/settings.h"
#include "util/times.h"

/* The arguments, of any function, that have an upper limit. */
static const struct
{
	const char *argument;
	const double *limit;		/* in milliseconds */
	const char *setting;
}			limits[] = {
	{"lease", &idem_max_lease, "idempotency.max_lease"},
	{"wait", &idem_max_wait, "idempotency.max_wait"},
};

static void check_limit(const Interval *interval, const char *name);
static bool is_longer(const Interval *interval, double ms);
static TimestampTz add_interval(TimestampTz time, const Interval *interval);

/*
 * Return argument "n", an interval, or NULL.  Raises 22023, with the
 * argument's "name", if it is infinite; negative as intervals compare, with
 * months of 30 days; or if it leads back from now, as "-1 mon 30 days" does
 * if that month had 31.  A "lease" or "wait" must also not be above its
 * limit.
 */
Interval *
idem_interval_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	Interval   *interval;

	if (PG_ARGISNULL(n))
		return NULL;
	interval = PG_GETARG_INTERVAL_P(n);
	idem_check_interval_arg(interval, name);
	return interval;
}

/*
 * Raise 22023 unless the interval, of the argument with this name, is finite,
 * not negative and not above the argument's limit.
 */
void
idem_check_interval_arg(const Interval *interval, const char *name)
{
	static const Interval zero = {0};
	TimestampTz now;

	if (INTERVAL_NOT_FINITE(interval))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be finite", name)));
	check_limit(interval, name);
	if (interval->month >= 0 && interval->day >= 0 && interval->time >= 0)
		return;

	now = GetCurrentTimestamp();
	if (DatumGetBool(DirectFunctionCall2(interval_lt,
										 IntervalPGetDatum(interval),
										 IntervalPGetDatum(&zero))) ||
		add_interval(now, interval) < now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must not be negative", name)));
}

/*
 * Raise 22023 if the argument has an upper limit and is above it.
 */
static void
check_limit(const Interval *interval, const char *name)
{
	for (int i = 0; i < lengthof(limits); i++)
	{
		if (strcmp(name, limits[i].argument) == 0 &&
			is_longer(interval, *limits[i].limit))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("argument \"%s\" must not be longer than \"%s\"",
							name, limits[i].setting),
					 errdetail("The limit is %s.",
							   GetConfigOptionByName(limits[i].setting,
													 NULL, false)),
					 errhint("Pass a shorter interval, or let a superuser raise \"%s\".",
							 limits[i].setting)));
	}
}

/*
 * Is an interval longer than that many milliseconds, as intervals compare, or
 * from now on?  Neither check is enough: if months and days have opposite
 * signs, either can be far less than the other.
 */
static bool
is_longer(const Interval *interval, double ms)
{
	double		days = interval->month * (double) DAYS_PER_MONTH +
		interval->day;
	TimestampTz now;

	if (days * USECS_PER_DAY + interval->time > ms * 1000)
		return true;
	if (interval->month == 0 && interval->day == 0)
		return false;
	now = GetCurrentTimestamp();
	return add_interval(now, interval) - now > ms * 1000;
}

/*
 * Return a time plus a setting's milliseconds.
 */
TimestampTz
idem_add_ms(TimestampTz time, double ms)
{
	return time + (TimestampTz) (ms * 1000);
}

/*
 * Return a time plus an interval, or plus a setting if the interval is NULL.
 * Raises 22008 if the sum is not a timestamp, 22023 if it is earlier.
 */
TimestampTz
idem_add_interval(TimestampTz time, const Interval *interval,
				  double default_ms)
{
	TimestampTz sum;

	if (interval == NULL)
		return idem_add_ms(time, default_ms);
	sum = add_interval(time, interval);
	if (sum < time)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("interval must not be negative"),
				 errdetail("From %s, it leads back to %s.",
						   pstrdup(timestamptz_to_str(time)),
						   pstrdup(timestamptz_to_str(sum)))));
	return sum;
}

static TimestampTz
add_interval(TimestampTz time, const Interval *interval)
{
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(time),
												   IntervalPGetDatum(interval)));
}

/*
 * Return microseconds of a clock that nobody can set, and that all processes
 * of the server share.  It measures how long something takes.
 */
int64
idem_monotonic_time(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}
