/*-------------------------------------------------------------------------
 *
 * blocked_lanes.c
 *		idem_outbox_blocked(): due messages that no relay can take, and the reason.
 *
 * A lane is blocked if its head cannot be taken, and a message behind the
 * head is due.  The head is leased, or pauses until its available_at, or
 * another transaction is writing or locking it ("held").  A held head that is
 * due is itself blocked, with or without others behind it, and so is a held
 * message without a key.  Also, no take finds a lane to which no row leads
 * (see lanes.c); such a lane is "lost".
 *
 * A call walks through the index of lanes from a random lane on, since key
 * hashes are random, and examines at most MAX_LANES lanes and MAX_ENTRIES
 * entries, including dead ones.  So it sees all lanes if there are no more
 * than that, and otherwise a sample.
 *
 * A sample hardly ever contains the one lane out of a million that is blocked
 * for hours.  That lane has a row in the index of due messages: at the end of
 * the lease or pause or, if its head is held, at the time since when the head
 * has been due.  The rows of other lanes are close together there, near the
 * present or at the times of delays, because relays take what is due, and
 * leases are short.  So the call then looks at NUM_PROBES times on each side
 * of now, at random on a logarithmic scale, and examines the lanes of the
 * next PROBE_ROWS rows.  It finds a row that is far from the others almost
 * certainly.
 *
 * Before that it walks through the index of due messages, from the one that
 * has been due longest, to find held messages without a key, and the rows
 * that lead to the lanes it has seen.  A held message stays at the beginning:
 * relays take the messages behind it, and while its transaction is open,
 * vacuum cannot remove their entries.
 *
 * Then it counts the messages that wait in the lanes that it returns.  Each
 * of these parts examines at most MAX_ENTRIES entries, or MAX_DUE.
 *
 * A lane can begin with many dead entries, of messages that have left it
 * since the last effective vacuum.  Messages leave a lane in order, so its
 * head is then found by bisection.  If the first messages behind a head are
 * not due, such as those that were leased together with it, the last ones are
 * examined.
 *
 * Rows are those that the active snapshot sees.  Nothing here writes, waits,
 * or takes a lock stronger than AccessShareLock, so everything works on a hot
 * standby.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/skey.h"
#include "access/stratnum.h"
#include "access/subtrans.h"
#include "access/transam.h"
#include "access/xlog.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "outbox/outbox_row.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/compat.h"

/*
 * Number of lanes, index entries and entries of due rows that a call
 * examines.
 */
#define MAX_LANES	5000
#define MAX_ENTRIES	50000
#define MAX_DUE		(MAX_ENTRIES / 2)

/*
 * Number of entries that are examined at each end of a lane for one that is
 * due.
 */
#define MAX_FOLLOWERS	1000

/*
 * Number of entries that are examined before a bisection for the head, in
 * each of its steps, and after it if it has found no head.
 */
#define MAX_DEAD		250
#define PROBE_ENTRIES	50
#define MAX_PASSED		(MAX_ENTRIES / 10)

/*
 * Number of times that a call looks at on each side of now, number of rows
 * from there, and the shortest and the longest time from now.
 */
#define NUM_PROBES		100
#define PROBE_ROWS		5
#define FIRST_PROBE_US	1000.0
#define LAST_PROBE_US	(100.0 * 365 * USECS_PER_DAY)

/*
 * Number of pairs of topic and transaction that a call lists for messages
 * without a key.
 */
#define MAX_HELD		250

/* The default of "max_lanes". */
#define DEFAULT_MAX_LANES	100

/* The column of idem_outbox_due, from 1. */
#define DUE_AVAILABLE_AT	1

/* Why a head cannot be taken. */
typedef enum Reason
{
	NOT_BLOCKED,
	LEASED,
	PAUSED,
	HELD,
	LOST,
} Reason;

static const char *const reasons[] = {
	[LEASED] = "leased",
	[PAUSED] = "paused",
	[HELD] = "held",
	[LOST] = "lost",
};

/*
 * A blocked lane, or all messages without a key of one topic that one
 * transaction holds.
 */
typedef struct Blocked
{
	bool		has_key;		/* it is a lane */
	bool		is_led_to;		/* see find_lost() */
	int64		lane;
	int64		head;			/* id of the blocking message */
	Datum		topic;
	TimestampTz since;			/* when the first waiting message was due */
	TimestampTz until;			/* DT_NOEND if held or lost */
	int64		waiting;		/* besides the head */
	Reason		reason;
	TransactionId holder;		/* if held */
	int64		length;			/* from "since" to the later of "until" and
								 * now */
} Blocked;

/* A call of idem_outbox_blocked(). */
typedef struct Search
{
	IdemCursor	outbox;			/* walks from lane to lane */
	TimestampTz now;
	int			entries;		/* number that may still be examined */
	bool		is_within;		/* see next_visible() */
	bool		is_certain;		/* the head was found for certain */
	Blocked    *blocked;
	int			nblocked;
	Blocked    *parked;			/* lanes whose due head is not ready */
	int			nparked;
	int			first_held;		/* index in "blocked" of those without a key */
} Search;

static bool walk_lanes(Search *search);
static void walk_due(Search *search);
static void add_held(Search *search, IdemCursor *due);
static void find_lost(Search *search);
static void probe_times(Search *search);
static void probe_time(Search *search, IdemCursor *due,
					   ScanDirection direction, TimestampTz from);
static bool is_listed(const Search *search, int64 lane);
static void begin_at(Search *search, int64 lane, int64 id);
static bool next_entry(Search *search, ScanDirection direction, int64 *lane,
					   bool *visible);
static bool look_past_dead(Search *search, Blocked *lane);
static bool next_visible(Search *search, ScanDirection direction, int64 lane,
						 int limit);
static bool find_head_past_dead(Search *search, int64 lane);
static int64 found_id(const Search *search);
static void look_at_lane(Search *search, Blocked *lane);
static void add_due_head(Search *search, Blocked *lane);
static void add(Search *search, Blocked *lane, Datum topic);
static TimestampTz available_at(const Search *search);
static void count_waiting(Search *search, Blocked *lane);
static int64 length_of(const Search *search, const Blocked *lane);
static int	compare_lengths(const void *a, const void *b);
static int	compare_lanes(const void *a, const void *b);
static int	process_of(TransactionId holder);

/*
 * idem_outbox_blocked(max_lanes) -> setof (topic, first_id, blocked_since,
 *
 *											waiting, reason, until, pid)
 *
 * Returns the lanes that are blocked longest first.  With max_lanes = 0 it
 * returns none, and does not open the table.
 */
PG_FUNCTION_INFO_V1(idem_outbox_blocked);
Datum
idem_outbox_blocked(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	int			max_lanes = PG_ARGISNULL(0) ? DEFAULT_MAX_LANES :
		PG_GETARG_INT32(0);
	Search		search = {0};
	bool		all_lanes;

	if (max_lanes < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must not be negative", "max_lanes"),
				 errhint("Pass the maximum number of rows.")));
	InitMaterializedSRF(fcinfo, 0);
	if (max_lanes == 0)
		return (Datum) 0;

	search.now = GetCurrentTimestamp();
	search.blocked = palloc_array(Blocked, 2 * MAX_LANES +
								  2 * NUM_PROBES * PROBE_ROWS + MAX_HELD);
	search.parked = palloc_array(Blocked, MAX_LANES);
	idem_cursor_open(&search.outbox, IDEM_OUTBOX, AccessShareLock);
	search.entries = MAX_ENTRIES;
	search.is_certain = true;
	all_lanes = walk_lanes(&search);
	search.entries = MAX_DUE;
	walk_due(&search);
	if (!all_lanes)
	{
		search.entries = MAX_ENTRIES;
		probe_times(&search);
	}
	qsort(search.blocked, search.nblocked, sizeof(Blocked), compare_lengths);

	search.entries = MAX_ENTRIES;
	for (int i = 0; i < Min(search.nblocked, max_lanes); i++)
	{
		Blocked    *lane = &search.blocked[i];
		int			pid = lane->reason == HELD ? process_of(lane->holder) : 0;
		Datum		values[7];
		bool		nulls[7] = {0};

		count_waiting(&search, lane);
		values[0] = lane->topic;
		values[1] = Int64GetDatum(lane->head);
		values[2] = TimestampTzGetDatum(lane->since);
		values[3] = Int64GetDatum(lane->waiting);
		values[4] = CStringGetTextDatum(reasons[lane->reason]);
		values[5] = TimestampTzGetDatum(lane->until);
		nulls[5] = lane->reason == HELD || lane->reason == LOST;
		values[6] = Int32GetDatum(pid);
		nulls[6] = pid == 0;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	idem_cursor_close(&search.outbox);
	return (Datum) 0;
}

/*
 * Look at lanes, from a random one to the last one, and then from the first
 * one on, until all have been looked at, or as many as a call examines.
 * Returns whether these were all.
 */
static bool
walk_lanes(Search *search)
{
	int64		start = (int64) pg_prng_uint64(&pg_global_prng_state);
	bool		has_turned = false;

	begin_at(search, start, PG_INT64_MIN);
	for (int n = 0; n < MAX_LANES;)
	{
		Blocked		lane = {0};
		bool		visible;

		if (!next_entry(search, ForwardScanDirection, &lane.lane, &visible))
		{
			if (has_turned || search->entries <= 0)
				return search->entries > 0;
			has_turned = true;
			begin_at(search, PG_INT64_MIN, PG_INT64_MIN);
			continue;
		}
		if (has_turned && lane.lane >= start)
			return true;
		if (visible)
			look_at_lane(search, &lane);
		if (visible || look_past_dead(search, &lane))
			n++;
		if (lane.lane == PG_INT64_MAX)
			begin_at(search, PG_INT64_MAX, PG_INT64_MAX);
		else
			begin_at(search, lane.lane + 1, PG_INT64_MIN);
	}
	return false;
}

/*
 * Scan the index of due messages.  If it is longer than what a call examines,
 * the lost lanes are not known.
 */
static void
walk_due(Search *search)
{
	IdemCursor	due;
	ScanKeyData key;
	Datum		first;
	bool		visible;

	search->first_held = search->nblocked;
	qsort(search->parked, search->nparked, sizeof(Blocked), compare_lanes);
	idem_key_time(&key, DUE_AVAILABLE_AT, BTLessEqualStrategyNumber,
				  search->now);
	idem_cursor_open_beside(&due, &search->outbox);
	idem_scan_entries(&due, IDEM_OUTBOX_DUE, &key, 1);
	while (search->entries > 0 &&
		   idem_scan_entry(&due, ForwardScanDirection, 1, &first, &visible))
	{
		Blocked		row = {0};
		Blocked    *lane;

		CHECK_FOR_INTERRUPTS();
		search->entries--;
		if (!visible)
			continue;
		slot_getallattrs(due.row);
		if (due.row->tts_isnull[OUTBOX_KEY_HASH])
		{
			add_held(search, &due);
			continue;
		}
		row.lane = DatumGetInt64(due.row->tts_values[OUTBOX_KEY_HASH]);
		lane = bsearch(&row, search->parked, search->nparked, sizeof(Blocked),
					   compare_lanes);
		if (lane != NULL)
			lane->is_led_to = true;
	}
	idem_cursor_close(&due);
	if (search->entries > 0)
		find_lost(search);
}

/*
 * The scan has found a due message without a key.  If a transaction holds it,
 * add it to the messages of its topic that this transaction holds.
 */
static void
add_held(Search *search, IdemCursor *due)
{
	const Datum *values = due->row->tts_values;
	TransactionId holder = idem_row_writer(due);
	Datum		topic = values[OUTBOX_TOPIC];
	Blocked		held = {0};

	if (!TransactionIdIsValid(holder) || !idem_outbox_in_state(due, "pending"))
		return;
	for (int i = search->nblocked - 1; i >= search->first_held; i--)
	{
		Blocked    *other = &search->blocked[i];

		if (TransactionIdEquals(other->holder, holder) &&
			datumIsEqual(other->topic, topic, false, -1))
		{
			other->waiting++;
			return;
		}
	}
	if (search->nblocked - search->first_held == MAX_HELD)
		return;
	held.head = DatumGetInt64(values[OUTBOX_ID]);
	held.since = DatumGetTimestampTz(values[OUTBOX_AVAILABLE_AT]);
	held.until = DT_NOEND;
	held.reason = HELD;
	held.holder = holder;
	add(search, &held, topic);
}

/*
 * Add the lanes to which no due row leads.
 */
static void
find_lost(Search *search)
{
	for (int i = 0; i < search->nparked; i++)
	{
		Blocked    *lane = &search->parked[i];

		if (lane->is_led_to)
			continue;
		lane->since = lane->until;
		lane->until = DT_NOEND;
		lane->reason = LOST;
		add(search, lane, lane->topic);
	}
}

/*
 * Look at the lanes of rows that were due before random times in the past,
 * and that will be due after random times in the future.
 */
static void
probe_times(Search *search)
{
	double		scale = log(LAST_PROBE_US / FIRST_PROBE_US);
	IdemCursor	due;

	idem_cursor_open_beside(&due, &search->outbox);
	for (int n = 0; n < NUM_PROBES; n++)
	{
		int64		offset = FIRST_PROBE_US *
			exp(scale * pg_prng_double(&pg_global_prng_state));

		probe_time(search, &due, BackwardScanDirection, search->now - offset);
		probe_time(search, &due, ForwardScanDirection, search->now + offset);
	}
	idem_cursor_close(&due);
}

/*
 * Look at the lanes of the next rows before or after a time.
 */
static void
probe_time(Search *search, IdemCursor *due, ScanDirection direction,
		   TimestampTz from)
{
	const TupleTableSlot *row = due->row;
	ScanKeyData key;

	idem_key_time(&key, DUE_AVAILABLE_AT, ScanDirectionIsForward(direction) ?
				  BTGreaterEqualStrategyNumber : BTLessEqualStrategyNumber,
				  from);
	idem_scan_entries(due, IDEM_OUTBOX_DUE, &key, 1);
	for (int n = 0, nrows = 0; n < PROBE_ENTRIES && nrows < PROBE_ROWS; n++)
	{
		Blocked		lane = {0};
		Datum		first;
		bool		visible;

		CHECK_FOR_INTERRUPTS();
		if (search->entries-- <= 0 ||
			!idem_scan_entry(due, direction, 1, &first, &visible))
			return;
		if (!visible)
			continue;
		slot_getallattrs(due->row);
		nrows++;
		if (row->tts_isnull[OUTBOX_KEY_HASH])
			continue;
		lane.lane = DatumGetInt64(row->tts_values[OUTBOX_KEY_HASH]);
		if (is_listed(search, lane.lane))
			continue;
		begin_at(search, lane.lane, PG_INT64_MIN + 1);
		(void) look_past_dead(search, &lane);
	}
}

/*
 * Is this lane known to be blocked?
 */
static bool
is_listed(const Search *search, int64 lane)
{
	for (int i = 0; i < search->nblocked; i++)
	{
		if (search->blocked[i].has_key && search->blocked[i].lane == lane)
			return true;
	}
	return false;
}

/*
 * Begin at the first entry of this lane from this id on.  With the lowest id,
 * scan the whole index from there, and otherwise only the lane.
 */
static void
begin_at(Search *search, int64 lane, int64 id)
{
	ScanKeyData keys[2];
	bool		within = id != PG_INT64_MIN;

	idem_key_int8(&keys[0], LANES_LANE, within ? BTEqualStrategyNumber :
				  BTGreaterEqualStrategyNumber, lane);
	idem_key_int8(&keys[1], LANES_ID, BTGreaterEqualStrategyNumber, id);
	idem_scan_entries(&search->outbox, IDEM_OUTBOX_LANES, keys, 2);
}

/*
 * Step to the next entry.  Returns false at the end, or if enough entries
 * have been examined.
 */
static bool
next_entry(Search *search, ScanDirection direction, int64 *lane, bool *visible)
{
	Datum		first;

	CHECK_FOR_INTERRUPTS();
	if (search->entries <= 0 ||
		!idem_scan_entry(&search->outbox, direction, 1, &first, visible))
		return false;
	search->entries--;
	*lane = DatumGetInt64(first);
	if (*visible)
		slot_getallattrs(search->outbox.row);
	return true;
}

/*
 * A lane begins with dead entries, or with those of an open transaction.
 * Look at the lane with the head that follows them.  Returns whether it has
 * one.
 *
 * If there are many of these entries, they are not examined one by one.  Only
 * if the bisection finds no head, or one that blocks nothing, some more are
 * examined, because it fails if there are such entries behind the head, too.
 */
static bool
look_past_dead(Search *search, Blocked *lane)
{
	int			nblocked = search->nblocked;
	bool		found = next_visible(search, ForwardScanDirection, lane->lane,
									 MAX_DEAD);
	bool		is_within = search->is_within;

	search->is_certain = found;
	if (!found && is_within)
		found = find_head_past_dead(search, lane->lane);
	if (found)
		look_at_lane(search, lane);
	search->is_certain = true;
	if (is_within && search->nblocked == nblocked)
	{
		begin_at(search, lane->lane, PG_INT64_MIN + 1);
		if (!next_visible(search, ForwardScanDirection, lane->lane,
						  MAX_PASSED))
			return found;
		*lane = (Blocked)
		{
			.lane = lane->lane
		};
		look_at_lane(search, lane);
		found = true;
	}
	return found;
}

/*
 * Step to the next message of the lane, skipping at most this number of
 * entries.  search->is_within says whether the lane had that many.
 */
static bool
next_visible(Search *search, ScanDirection direction, int64 lane, int limit)
{
	int64		other;
	bool		visible;

	search->is_within = false;
	for (int n = 0; n < limit; n++)
	{
		if (!next_entry(search, direction, &other, &visible) || other != lane)
			return false;
		if (visible)
			return true;
	}
	search->is_within = true;
	return false;
}

/*
 * The same if the lane begins with too many dead entries.  Ids are positive,
 * unless a user has altered their sequence; then the last message counts.
 */
static bool
find_head_past_dead(Search *search, int64 lane)
{
	int64		low = 0;
	int64		high;

	begin_at(search, lane, PG_INT64_MIN + 1);
	if (!next_visible(search, BackwardScanDirection, lane, MAX_FOLLOWERS))
		return false;
	high = found_id(search);
	while (low < high)
	{
		int64		middle = low + (high - low) / 2;

		begin_at(search, lane, middle);
		if (next_visible(search, ForwardScanDirection, lane, PROBE_ENTRIES) &&
			found_id(search) < high)
			high = found_id(search);
		else
			low = middle + 1;
	}
	begin_at(search, lane, high);
	return next_visible(search, ForwardScanDirection, lane, PROBE_ENTRIES);
}

static int64
found_id(const Search *search)
{
	return DatumGetInt64(search->outbox.row->tts_values[OUTBOX_ID]);
}

/*
 * The scan has found the head of a lane.  If the lane is blocked, add it; if
 * that depends on walk_due(), add it to the parked ones.
 */
static void
look_at_lane(Search *search, Blocked *lane)
{
	const TupleTableSlot *head = search->outbox.row;
	const Datum *values = head->tts_values;
	int64		other;
	bool		visible;

	lane->has_key = true;
	lane->head = found_id(search);
	lane->until = available_at(search);
	lane->holder = idem_row_writer(&search->outbox);
	if (lane->until <= search->now)
	{
		add_due_head(search, lane);
		return;
	}
	lane->reason = !head->tts_isnull[OUTBOX_AWAITING_ACK] &&
		DatumGetBool(values[OUTBOX_AWAITING_ACK]) ? LEASED : PAUSED;
	if (TransactionIdIsValid(lane->holder))
	{
		lane->reason = HELD;
		lane->until = DT_NOEND;
	}

	for (int n = 0; n < 2 * MAX_FOLLOWERS; n++)
	{
		bool		from_end = n >= MAX_FOLLOWERS;

		if (n == MAX_FOLLOWERS)
			begin_at(search, lane->lane, lane->head + 1);
		if (!next_entry(search, from_end ? BackwardScanDirection :
						ForwardScanDirection, &other, &visible) ||
			other != lane->lane)
			break;
		if (!visible || available_at(search) > search->now)
			continue;

		lane->since = available_at(search);
		lane->waiting = 1;
		add(search, lane, values[OUTBOX_TOPIC]);
		return;
	}
}

/*
 * The head is due.  It is blocked if a transaction holds it.  If it is
 * certainly the head, but not ready, it is blocked if no row leads to it.
 */
static void
add_due_head(Search *search, Blocked *lane)
{
	const Datum *head = search->outbox.row->tts_values;

	if (TransactionIdIsValid(lane->holder))
	{
		lane->since = lane->until;
		lane->until = DT_NOEND;
		lane->reason = HELD;
		add(search, lane, head[OUTBOX_TOPIC]);
	}
	else if (search->is_certain && search->nparked < MAX_LANES &&
			 !DatumGetBool(head[OUTBOX_IN_DUE_INDEX]))
	{
		lane->topic = datumCopy(head[OUTBOX_TOPIC], false, -1);
		search->parked[search->nparked++] = *lane;
	}
}

/*
 * Add a blocked lane.
 */
static void
add(Search *search, Blocked *lane, Datum topic)
{
	lane->topic = datumCopy(topic, false, -1);
	lane->length = length_of(search, lane);
	search->blocked[search->nblocked++] = *lane;
}

/*
 * Return the time from which the message that was found can be taken.
 */
static TimestampTz
available_at(const Search *search)
{
	return DatumGetTimestampTz(search->outbox.row->tts_values[OUTBOX_AVAILABLE_AT]);
}

/*
 * Count the messages that are due and wait behind the head of a lane.
 */
static void
count_waiting(Search *search, Blocked *lane)
{
	int64		waiting = 0;
	int64		other;
	bool		visible;

	if (!lane->has_key || lane->head == PG_INT64_MAX)
		return;
	begin_at(search, lane->lane, lane->head + 1);
	while (next_entry(search, ForwardScanDirection, &other, &visible))
	{
		if (!visible || available_at(search) > search->now)
			continue;
		waiting++;
		lane->since = Min(lane->since, available_at(search));
	}

	/*
	 * One might have been found before, even if no more entries are examined.
	 */
	lane->waiting = Max(lane->waiting, waiting);
}

/*
 * Return how long a lane is blocked, in microseconds: until the end of the
 * lease or pause, or as far as known.  Times from a dump can be infinite.
 */
static int64
length_of(const Search *search, const Blocked *lane)
{
	bool		has_end = lane->reason == LEASED || lane->reason == PAUSED;
	TimestampTz until = has_end ? lane->until : search->now;

	if (TIMESTAMP_NOT_FINITE(lane->since) || TIMESTAMP_NOT_FINITE(until))
		return PG_INT64_MAX;
	return until - lane->since;
}

/*
 * Compare lanes by how long they are blocked, and then by their heads.
 */
static int
compare_lengths(const void *a, const void *b)
{
	const Blocked *lane_a = a;
	const Blocked *lane_b = b;

	if (lane_a->length != lane_b->length)
		return lane_a->length < lane_b->length ? 1 : -1;
	return (lane_a->head > lane_b->head) - (lane_a->head < lane_b->head);
}

/*
 * Compare lanes by their hashes.
 */
static int
compare_lanes(const void *a, const void *b)
{
	int64		lane_a = ((const Blocked *) a)->lane;
	int64		lane_b = ((const Blocked *) b)->lane;

	return (lane_a > lane_b) - (lane_a < lane_b);
}

/*
 * Return the process of a transaction.  0: it is prepared, has ended, or runs
 * on the primary of this standby.
 */
static int
process_of(TransactionId holder)
{
	if (RecoveryInProgress())
		return 0;
	return BackendXidGetPid(SubTransGetTopmostTransaction(holder));
}
