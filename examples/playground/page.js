// The page of the playground: clicks, the network's faults, and their results.
//
// Each click has one plan of faults, which depends on the plan's number and the
// click's number.  All shops get the requests of a click by the same plan: a
// request that is lost, repeated or delayed for one shop is so for the others.
// The network is simulated here, around fetch(); the shops are in "run".

const SIDES = ["without", "unique", "with"];
const NAMES = { without: "Without a guard", unique: "With a unique index", with: "With the extension" };
const TRIES = 5;
// The width of a track of the timeline, in milliseconds from the click on.
const HORIZON = 3000;
const ROWS = 200;
// Shorter waits are not shown: each claim takes a moment.
const NOTABLE_WAIT = 20;
// How a request counts that got no answer because the server is not there.
const NO_SERVER = 503;
const NO_ANSWER = "The server does not answer. Trying again …";
const HAMMER_CLICKS = 20;

// The address of each shop.
const shops = fetch("shops").then((response) => response.json());

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// What was done since the page was loaded or reset.  What belongs to an earlier
// one may still be under way, and then concerns nobody.
let session;

function begin() {
	session = {
		shopper: `shopper-${crypto.randomUUID()}`,
		clicks: 0,
		purchases: 0,
		purchase: null,
		liked: false,
		actionId: 0,
		underWay: 0,
		counts: Object.fromEntries(SIDES.flatMap((side) => [[`orders_${side}`, 0], [`like_${side}`, false]])),
		counting: false,
		countAgain: false,
		failed: "",
	};
	$("timeline").replaceChildren(element("tr", { className: "empty" },
		Object.assign(element("td", {}, "No request yet."), { colSpan: SIDES.length + 1 })));
	show();
}

// The network

/** Numbers from 0 to 1 that depend on the seed alone (mulberry32). */
function randomNumbers(seed) {
	let state = seed >>> 0;
	return () => {
		state = (state + 0x6d2b79f5) >>> 0;
		let mixed = Math.imul(state ^ (state >>> 15), state | 1);
		mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
		return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
	};
}

/** The faults of the network for each try of a click, in milliseconds. */
function planOf(number, click, { delay, loss, repetition, reordering }) {
	const random = randomNumbers(number * 1000003 + click * 7919);
	return Array.from({ length: TRIES }, (_, index) => {
		// The same draws for each try, so that one slider does not move the others' faults.
		const [out, back, fate, which, twice, gap, late, by] = Array.from({ length: 8 }, random);
		const held = late < reordering / 100 ? 300 + 900 * by : 0;
		return {
			out: delay * (0.25 + 0.5 * out) + held,
			back: delay * (0.25 + 0.5 * back),
			lost: fate >= loss / 100 || index === TRIES - 1 ? "" : which < 0.5 ? "request" : "answer",
			copyAfter: twice < repetition / 100 ? 20 + 400 * gap : null,
			patience: 2 * delay + 500,
		};
	});
}

/** Sends one request to one shop, through the network, and shows it in a cell.
 *  Resolves to the status, or to 0 if the request is lost.  If the answer is lost, the
 *  caller knows that from the journey. */
async function travel(mine, side, click, journey, cell) {
	const sent = performance.now() - click.start;
	cell.show("flight", "on its way", []);
	await sleep(journey.out);
	const arrived = performance.now() - click.start;
	const out = ["way", sent, arrived];
	if (journey.lost === "request") {
		cell.show("lost", "request lost", [out, ["end", arrived, arrived]]);
		return 0;
	}

	let response;
	try {
		response = await fetch(`${(await shops)[side]}/${side}/${click.path}`, {
			method: "POST",
			headers: { "Content-Type": "application/json", "X-User": mine.shopper, ...click.headers },
			body: click.body,
		});
		await response.text();
	} catch {
		mine.failed = NO_ANSWER;
		count(mine);
		cell.show("refuse", "no server", [out]);
		return NO_SERVER;
	}
	mine.failed = "";
	const answered = performance.now() - click.start;
	count(mine);
	await sleep(journey.back);

	const timing = (name) => Number(new RegExp(`${name};dur=([\\d.]+)`)
		.exec(response.headers.get("Server-Timing"))?.[1] ?? 0);
	const waited = timing("wait") < NOTABLE_WAIT ? 0 : timing("wait");
	const worked = timing("work");
	const came = performance.now() - click.start;
	const segments = [
		["way", sent, answered - waited - worked],
		["waiting", answered - waited - worked, answered - worked],
		[worked ? "working" : "served", answered - worked, answered],
		["way", answered, came],
	].filter(([name, from, to]) => to > from || name === "served");
	const lost = journey.lost === "answer";
	if (lost) {
		segments.push(["end", came, came]);
	}
	const [kind, word] = judge(side, click, response, waited);
	cell.show(kind, word, segments, lost);
	return response.status;
}

/** The mark of an answer, and the word for it. */
function judge(side, click, response, waited) {
	switch (response.headers.get("Playground-Outcome")) {
		case "new":
			click.effects[side] += 1;
			return click.effects[side] > 1 ? ["again", "ran again"] : ["new", "ran"];
		case "found": return waited ? ["wait", "waited, found"] : ["replay", "found"];
		case "replay": return waited ? ["wait", "waited, replay"] : ["replay", "replay"];
		case "in_progress": return ["refuse", "refused, 409"];
		case "stale": return ["stale", "stale"];
		default: return ["refuse", `error ${response.status}, asks again`];
	}
}

/** Brings a click to all shops, by its plan, until each has answered. */
async function carry(mine, click, plan) {
	mine.underWay += 1;
	show();
	const others = [];
	for (const [index, journey] of plan.entries()) {
		const cells = row(mine, click, `try ${index + 1}`, SIDES);
		const answers = SIDES.map((side) => persist(mine, side, click, journey, cells[side]));
		if (journey.copyAfter !== null && journey.lost !== "request") {
			others.push(copy(mine, click, journey));
		}
		if (!journey.lost) {
			await Promise.all(answers);
			break;
		}
		others.push(...answers);
		await sleep(journey.patience);
	}
	await Promise.all(others);
	mine.underWay -= 1;
	await count(mine);
}

/** One try.  If the first request still runs, or the server failed, the client asks again. */
async function persist(mine, side, click, journey, cell) {
	let status = await travel(mine, side, click, journey, cell);
	let pause = 250;
	while (!journey.lost && (status === 409 || status >= 500) && mine === session) {
		await sleep(pause);
		if (status === 409) {
			cell = row(mine, click, "asks again", [side])[side];
		} else {
			pause = Math.min(2 * pause, 2000);
		}
		status = await travel(mine, side, click, { out: journey.out / 2, back: journey.back, lost: "" }, cell);
	}
}

/** The same request once more, which nobody sent. */
async function copy(mine, click, journey) {
	await sleep(journey.copyAfter);
	const cells = row(mine, click, "repeated by the network", SIDES);
	await Promise.all(SIDES.map((side) => travel(mine, side, click, journey, cells[side])));
}

// Clicks

/** A number of a range or of the field of the plan's number. */
const setting = (id) => Number($(id).value) || 0;

function press(click) {
	const mine = session;
	mine.clicks += 1;
	const faults = Object.fromEntries(["delay", "loss", "repetition", "reordering"]
		.map((id) => [id, setting(id)]));
	return carry(mine, { start: performance.now(), ...click },
		planOf(setting("seed"), mine.clicks, faults));
}

/** A click on Buy.  Until the answer is there, it is the same purchase. */
async function buy(purchase = session.purchase) {
	const mine = session;
	if (!purchase) {
		mine.purchases += 1;
		purchase = {
			number: mine.purchases,
			key: `order-${crypto.randomUUID()}`,
			effects: Object.fromEntries(SIDES.map((side) => [side, 0])),
			clicks: 0,
		};
	}
	mine.purchase = purchase;
	purchase.clicks += 1;
	await press({
		name: "Buy", about: `order ${purchase.number}`, path: "orders",
		headers: {
			"Idempotency-Key": `"${purchase.key}"`,
			"Playground-Check": $("check").value,
			"Playground-Wait": $("wait").value,
		},
		body: JSON.stringify({ sku: "teapot" }),
		effects: purchase.effects,
	});
	purchase.clicks -= 1;
	if (mine.purchase === purchase && purchase.clicks === 0) {
		mine.purchase = null;
		show();
	}
}

/** A click on the heart: says what is wanted, and which click it is. */
function like() {
	const mine = session;
	mine.liked = !mine.liked;
	mine.actionId = Math.max(Date.now(), mine.actionId + 1);
	return press({
		name: mine.liked ? "Like" : "Unlike", about: "", path: "likes",
		headers: {},
		body: JSON.stringify({ active: mine.liked, action_id: mine.actionId }),
		effects: Object.fromEntries(SIDES.map((side) => [side, 0])),
	});
}

/** Double-clicks on Buy, each an order of its own, and clicks on the heart. */
async function hammer() {
	const mine = session;
	for (let click = 0; click < HAMMER_CLICKS && mine === session; click += 1) {
		const second = click % 2 === 1;
		buy(second ? mine.purchase : null);
		like();
		await sleep(second ? 150 : 50);
	}
}

// What is shown

/** An element with properties and children. */
function element(name, properties = {}, ...children) {
	const made = Object.assign(document.createElement(name), properties);
	made.append(...children);
	return made;
}

function icon(name) {
	const template = document.createElement("template");
	template.innerHTML = `<svg aria-hidden="true"><use href="#i-${name}"/></svg>`;
	return template.content.firstChild;
}

/** A mark and a word for it. */
function mark(kind, word) {
	const made = element("span", { className: `kind ${kind}` }, icon(kind === "again" ? "wrong" : kind), word);
	made.dataset.kind = kind;
	return made;
}

/** A row of the timeline for a request; returns a cell for each of the sides. */
function row(mine, click, how, sides) {
	const cells = {};
	const line = element("tr", {}, element("td", {}, click.name,
		element("span", { className: "try" }, [click.about, how].filter(Boolean).join(", "))));
	for (const side of SIDES) {
		const cell = element("td");
		cell.dataset.side = side;
		line.append(cell);
		cells[side] = { show: (...what) => fill(cell, ...what) };
		if (!sides.includes(side)) {
			cell.append("–");
		}
	}
	if (mine === session) {
		const body = $("timeline");
		body.querySelector(".empty")?.remove();
		body.prepend(line);
		while (body.rows.length > ROWS) {
			body.lastElementChild.remove();
		}
	}
	return cells;
}

function fill(cell, kind, word, segments, lost) {
	const track = element("span", { className: "track" });
	track.setAttribute("aria-hidden", "true");
	for (const [name, from, to] of segments) {
		const left = Math.min(from / HORIZON, 0.99) * 100;
		const part = element("i", { className: name });
		part.style.left = `${left}%`;
		part.style.width = `${Math.min((to - from) / HORIZON * 100, 100 - left)}%`;
		track.append(part);
	}
	cell.replaceChildren(mark(kind, word), ...(lost ? [" ", mark("lost", "answer lost")] : []), track);
}

/** Asks what the database holds; one question at a time, and one more if
 *  something happened meanwhile. */
async function count(mine) {
	if (mine.counting) {
		mine.countAgain = true;
		return;
	}
	mine.counting = true;
	do {
		mine.countAgain = false;
		try {
			const response = await fetch("counts", { headers: { "X-User": mine.shopper } });
			if (!response.ok) {
				throw new Error(response.status);
			}
			mine.counts = await response.json();
			mine.failed = "";
		} catch {
			mine.failed = NO_ANSWER;
			mine.countAgain = mine === session;
			await sleep(1000);
		}
		if (mine === session) {
			show();
		}
		if (mine.countAgain) {
			await sleep(mine.underWay ? 100 : 0);
		}
	} while (mine.countAgain);
	mine.counting = false;
	if (mine === session) {
		show();
	}
}

/** The verdict on a side's orders, and on its like. */
function verdicts(side, settled) {
	const surplus = session.counts[`orders_${side}`] - session.purchases;
	const orders = surplus > 0 ? ["wrong", `${surplus} too many`]
		: !settled ? ["open", "under way"]
		: surplus < 0 ? ["wrong", `${-surplus} missing`] : ["right", "as wanted"];
	const like = !settled ? ["open", "under way"]
		: session.counts[`like_${side}`] === session.liked ? ["right", "as wanted"] : ["wrong", "wrong"];
	return { orders, like };
}

/** The page as the session is now. */
function show() {
	const mine = session;
	const settled = mine.underWay === 0 && !mine.counting;
	document.body.dataset.settled = settled;
	$("purchases").textContent = mine.purchases;
	$("purchases-word").textContent = mine.purchases === 1 ? "order" : "orders";
	$("wanted-like").textContent = mine.liked ? "liked" : "not liked";
	$("like").setAttribute("aria-pressed", mine.liked);
	$("hint").textContent = mine.purchase
		? `Order ${mine.purchase.number} is under way. Click again, as the impatient do: it is the same order.`
		: "If you click Buy again before the answer arrives, the same purchase is sent again.";
	const spokenResults = [];
	for (const side of SIDES) {
		const card = $(side);
		const { orders, like } = verdicts(side, settled);
		card.querySelector(".figure").textContent = mine.counts[`orders_${side}`];
		card.querySelector(".heart").classList.toggle("on", mine.counts[`like_${side}`]);
		card.querySelector(".state").textContent = mine.counts[`like_${side}`] ? "liked" : "not liked";
		for (const [what, [is, words]] of Object.entries({ orders, like })) {
			const place = card.querySelector(`[data-what=${what}] .verdict`);
			if (place.dataset.is !== is || place.textContent !== words) {
				place.dataset.is = is;
				place.replaceChildren(...(is === "open" ? [words] : [icon(is), words]));
			}
			if (mine.clicks === 0) {
				place.replaceChildren();
			}
		}
		const all = [orders[0], like[0]];
		card.dataset.verdict = mine.clicks === 0 ? "none"
			: all.includes("wrong") ? "wrong" : all.includes("open") ? "open" : "right";
		spokenResults.push(`${NAMES[side]}: orders ${orders[1]}, like ${like[1]}.`);
	}
	// Read aloud, so only at the beginning and at the end.
	const status = mine.failed ? mine.failed : mine.clicks === 0 ? ""
		: settled ? "All requests are answered." : "Requests are under way …";
	const spoken = settled && mine.clicks > 0 ? ` ${spokenResults.join(" ")}` : "";
	if ($("status").textContent !== status + spoken) {
		$("status").replaceChildren(status, element("span", { className: "spoken" }, spoken));
	}
}

function showSliders() {
	for (const output of document.querySelectorAll("output")) {
		const input = $(output.htmlFor.value);
		output.textContent = input.id === "delay" ? `${input.value} ms` : `${input.value} %`;
		input.setAttribute("aria-valuetext", output.textContent);
	}
}

async function showStatements() {
	const statements = await (await fetch("sql")).json();
	const fillIn = () => {
		$("sql-order").dataset.sql = $("check").value === "yes" ? "check" : "nothing";
		for (const code of document.querySelectorAll("[data-sql]")) {
			code.textContent = statements[code.dataset.sql];
		}
	};
	$("check").addEventListener("change", fillIn);
	fillIn();
}

$("form").addEventListener("submit", (event) => {
	event.preventDefault();
	buy();
});
$("like").addEventListener("click", like);
$("hammer").addEventListener("click", hammer);
$("reset").addEventListener("click", begin);
document.querySelector(".sliders").addEventListener("input", showSliders);
const number = new URLSearchParams(location.search).get("seed");
if (/^[1-9]\d{0,5}$/.test(number ?? "")) {
	$("seed").value = number;
}
showSliders();
begin();
showStatements();
