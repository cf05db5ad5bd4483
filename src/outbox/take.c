/*-------------------------------------------------------------------------
 *
 * take.c
 *		Taking messages of the outbox, in order, by any number of relays.
 *
 * Finding.  A take scans the ready rows in order of the time from which they
 * are available, so all topics, keys and kinds of messages are served in
 * turn.  Delayed, pausing and leased messages are beyond the end of the scan.
 * A message behind another one of its key is not in the index (see lanes.c).
 *
 * Order.  Messages with a key leave their lane in order of their ids.  A take
 * that finds a ready row of a lane scans the lane's pending messages with a
 * new snapshot and locks the first one, and the following ones as long as
 * each is available.  Then it scans the lane again, with a snapshot that is
 * newer than the locks, and hands out what it has locked if no message
 * precedes it.  So no message is handed out while an earlier message of its
 * key is pending, whatever others requeue or commit between the beginning of
 * the call and that scan.  A message in the second half of its attempts is
 * the last one taken from its lane.  Each take counts as an attempt, and a
 * message that keeps failing must not use up the attempts of those behind it.
 *
 * A call can reach a lane twice, through two ready rows, and an earlier
 * message might have been committed in between.  So a call leaves messages
 * that were committed after it began to the next call: it hands out the
 * messages of each lane in order.  Therefore a lane that it has visited has
 * nothing more for it.
 *
 * Progress.  A lane from which nothing can be taken must not delay any other,
 * however many of its rows a take finds, and however many such lanes there
 * are.  If a take can take nothing through a ready row, it does one of these:
 *
 *	- It moves the row out of the way.  A message is parked if another one
 *	  precedes it, even if that one is leased and parked itself.  A row that
 *	  is not pending is removed, or moved to the time of the head.  The number
 *	  of such changes, and of messages that die, is limited for each call, so
 *	  that they are committed soon; see is_within().  Beyond the limit, the
 *	  call continues without changes.
 *
 *	- It leaves the row where it is, if the decision depends on what another
 *	  transaction is writing.  The next takes of this backend skip such a row
 *	  until one of these transactions has ended (see blocked_range.c).  So its
 *	  messages are found as soon as they are committed.
 *
 *	- It leaves the row to the next take, because another take has locked it,
 *	  or its lane has changed meanwhile.
 *
 * Then it continues with the next row.  It remembers the lanes that it has
 * visited.  It does not visit a lane again if all its messages wait for the
 * transaction of the first.  So a take returns less than it was asked for
 * only after it has looked at each due row, or if that takes half of the
 * lease of its first message.
 *
 * Takes never wait for each other or for publishers, and publishers never
 * wait.  A take locks a message that was taken before only if it is the head
 * of its lane or follows the head.  Therefore a relay that still holds a
 * message does not have to wait for this transaction when it answers.
 *
 * Snapshots.  Under READ COMMITTED the ready rows are read with a dirty
 * snapshot, as they are at each moment.  Under REPEATABLE READ and
 * SERIALIZABLE a call sees the rows with a copy of the transaction's
 * snapshot, and takes none that has changed since.  Lanes are read with new
 * snapshots even then, so a message stays if an earlier one has become
 * pending since.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/skey.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "outbox/due_low_water.h"
#include "outbox/lane_low_water.h"
#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/client_text.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/subtransaction.h"
#include "util/times.h"

/* The columns of idem_outbox_take()'s result, in order. */
static const int take_columns[] = {
	OUTBOX_ID,
	OUTBOX_MESSAGE_ID,
	OUTBOX_TOPIC,
	OUTBOX_MESSAGE_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_HEADERS,
	OUTBOX_ATTEMPT,
	OUTBOX_CREATED_AT,
};

/* Columns of idem_outbox_due and idem_outbox_topics, from 1. */
#define DUE_AVAILABLE_AT	1
#define TOPICS_TOPIC		1
#define TOPICS_AVAILABLE_AT	2

/*
 * A call parks this number of messages, removes or moves this number of rows
 * that are not pending, and lets this number of messages die.  It skips the
 * others, so that it ends soon and commits its changes.  A relay whose lease
 * has expired might have to wait with its answer for a message that is being
 * parked; no relay waits for a row that is not pending.
 *
 * If a call skips many rows, it changes up to a fifth of them.  Otherwise the
 * remaining rows would be skipped once in each call.
 */
#define MAX_PARKS			500
#define MAX_REMOVALS		10000
#define MAX_DEATHS			1000
#define PASSED_SHARE		4

/*
 * A call continues for half of its lease, but at least this long.
 */
#define MIN_DURATION_MS		1000

/* The default of "max_messages". */
#define DEFAULT_MAX_MESSAGES	100

/* A lane that a call has visited; elements of a table by lane. */
typedef struct Visit
{
	int64		lane;
	int64		head;			/* see idem_lane_move_signpost() */
	int64		earlier;		/* the same, for pending rows */
	IdemBlockers *blockers;		/* that its rows wait for, or NULL */
	bool		is_held;		/* also its pending rows wait */
	bool		signposts_stay; /* others stay, even without blockers */
	char		status;			/* of the table entry */
} Visit;

#define SH_PREFIX			visits
#define SH_ELEMENT_TYPE		Visit
#define SH_KEY_TYPE			int64
#define SH_KEY				lane
#define SH_HASH_KEY(tb, key) ((uint32) idem_lane_hash(key))
#define SH_EQUAL(tb, a, b)	((a) == (b))
#define SH_SCOPE			static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

/* A call of idem_outbox_take(). */
typedef struct Taking
{
	IdemCursor	outbox;			/* to find ready rows */
	IdemCursor	lanes;			/* to look at their lanes */
	visits_hash *visits;		/* NULL: "lanes" is not open */
	Snapshot	snapshot;		/* NULL: a dirty scan */
	Snapshot	begun;			/* of lanes, takes only what it sees */
	CommandId	command;		/* with which the call began */
	TimestampTz now;
	TimestampTz return_by;		/* 0: no message has a lease yet */
	bool		changed;		/* has it changed a row? */
	TimestampTz next_due;		/* only if not "changed" */
	const Interval *lease;
	Datum	   *topics;			/* NULL: all */
	int			ntopics;
	int			wanted;			/* number of messages still wanted */
	bool		is_full;		/* nothing more fits into the result */
	int64		text_size;		/* of returned and locked messages */
	int			passed;			/* rows found and left unchanged */
	int			parks;			/* messages that were parked */
	int			removals;		/* other rows moved or removed */
	int			deaths;			/* messages with no attempt left */
	IdemBlockers found;			/* that the row that was found waits for */
	const IdemBlockers *blockers;	/* "found", or those of its lane */
	ReturnSetInfo *result;
} Taking;

/* A locked message, and its length as text. */
typedef struct Locked
{
	int64		id;
	int64		text_size;
}			Locked;

/*
 * Messages that are being taken from a lane, in order from its head on.  All
 * are locked, and the first "taken" have been handed out.
 */
typedef struct Lane
{
	int64		lane;
	Locked	   *messages;
	int			size;
	int			locked;
	int			dying;			/* of these, with no attempt left */
	int			taken;
	bool		ends;			/* take nothing behind the last of them */
	bool		has_dead;
	int64		dead;			/* the first that died */
} Lane;

/* The result of an attempt to take a row. */
typedef enum Taken
{
	TAKEN,
	TAKEN_DEAD,					/* it has died instead */
	TAKEN_NOT,
} Taken;

static void take_or_wait(Taking *taking, TimestampTz deadline);
static bool try_take(void *arg);
static TimestampTz next_due(Taking *taking);
static bool take(Taking *taking);
static void take_topics(Taking *taking, const Datum *topics, int count);
static void begin_scan(Taking *taking, const Datum *topic,
					   const TimestampTz *after, TimestampTz until,
					   Snapshot snapshot);
static void take_ready(Taking *taking, const Datum *topic);
static bool is_late(const Taking *taking);
static bool has_room(Taking *taking, int64 text_size);
static void forget_locked(Taking *taking, Lane *lane, int from);
static void take_found(Taking *taking);
static void take_lane(Taking *taking);
static void move_signpost(Taking *taking, Visit *visit);
static bool is_within(const Taking *taking, int changes, int limit);
static bool take_locked(Taking *taking, Lane *lane);
static bool lock_next(Taking *taking, Lane *lane);
static bool is_failing(const Datum *message);
static bool is_dying(const Datum *message);
static Taken take_row(Taking *taking, IdemCursor *outbox, bool is_locked);
static int64 found_text_size(IdemCursor *outbox);
static TimestampTz lease_end(Taking *taking);

/*
 * idem_outbox_take(max_messages, lease, topics, wait) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_outbox_take);
Datum
idem_outbox_take(PG_FUNCTION_ARGS)
{
	Taking		taking = {0};
	Interval   *wait = idem_interval_arg(fcinfo, 3, "wait");
	TimestampTz start = GetCurrentTimestamp();
	TimestampTz deadline = idem_add_interval(start, wait, 0);

	taking.lease = idem_interval_arg(fcinfo, 1, "lease");
	taking.wanted = PG_ARGISNULL(0) ? DEFAULT_MAX_MESSAGES :
		PG_GETARG_INT32(0);
	if (taking.wanted < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "max_messages")));
	InitMaterializedSRF(fcinfo, 0);
	taking.result = (ReturnSetInfo *) fcinfo->resultinfo;
	taking.next_due = DT_NOEND;
	if (!PG_ARGISNULL(2))
		taking.ntopics = idem_distinct_texts(PG_GETARG_DATUM(2), "topics",
											 &taking.topics);

	if (deadline > start)
		take_or_wait(&taking, deadline);
	else
		(void) take(&taking);

	/* There might be more messages. */
	if (taking.wanted == 0 || taking.is_full)
		idem_wake_next(taking.topics, taking.ntopics);
	return (Datum) 0;
}

/*
 * Take available messages, or sleep until there are some, or until
 * "deadline".
 *
 * A take that finds nothing to hand out, but changes a row, also ends the
 * wait, so that its transaction can commit the change.
 *
 * A snapshot of REPEATABLE READ or SERIALIZABLE sees no new messages, so a
 * commit does not wake these calls.  They look again when something becomes
 * due.
 */
static void
take_or_wait(Taking *taking, TimestampTz deadline)
{
	bool		entered = IsolationUsesXactSnapshot();

	for (;;)
	{
		(void) idem_in_subtransaction(try_take, taking, NULL);
		if (taking->changed || taking->now >= deadline)
			break;
		if (entered)
			idem_await_change(taking->next_due, deadline);
		else
			idem_await_messages(taking->topics, taking->ntopics);
		entered = true;
	}
	idem_await_end();
}

/*
 * Take what is available now.  If there is nothing, find out when something
 * will be, and leave no row locked.
 */
static bool
try_take(void *arg)
{
	Taking	   *taking = arg;

	taking->changed = take(taking);
	if (!taking->changed)
		taking->next_due = next_due(taking);
	return taking->changed;
}

/*
 * Return the time of the next row that a take would look at; DT_NOEND if it
 * is not within IDEM_LOOK_AGAIN_MS, after which a waiter looks again anyway.
 * Later entries include the leases of messages that were acknowledged since,
 * which need not be scanned.  A row that another transaction holds does not
 * count, because the end of that transaction wakes a waiter.
 */
static TimestampTz
next_due(Taking *taking)
{
	TimestampTz due = DT_NOEND;
	TimestampTz until = idem_add_ms(taking->now, IDEM_LOOK_AGAIN_MS);
	Snapshot	snapshot = IsolationUsesXactSnapshot() ?
		GetTransactionSnapshot() : NULL;
	int			count = taking->topics == NULL ? 1 : taking->ntopics;

	idem_cursor_open(&taking->outbox, IDEM_OUTBOX, AccessShareLock);
	for (int i = 0; i < count; i++)
	{
		CHECK_FOR_INTERRUPTS();
		begin_scan(taking, taking->topics == NULL ? NULL : &taking->topics[i],
				   &taking->now, Min(due, until), snapshot);
		while (idem_scan_next(&taking->outbox, ForwardScanDirection))
		{
			Datum	   *found = taking->outbox.row->tts_values;

			CHECK_FOR_INTERRUPTS();
			if (TransactionIdIsValid(taking->outbox.holder))
				continue;
			due = DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]);
			break;
		}
	}
	idem_cursor_close(&taking->outbox);
	return due;
}

/*
 * Take what is available now.  Returns whether this has changed anything.
 * Leaves no memory allocated except the result, because a waiting take looks
 * many times.
 */
static bool
take(Taking *taking)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency take",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);

	idem_cursor_open(&taking->outbox, IDEM_OUTBOX, RowExclusiveLock);
	taking->visits = NULL;
	taking->passed = 0;
	taking->parks = 0;
	taking->removals = 0;
	taking->deaths = 0;
	taking->now = GetCurrentTimestamp();
	taking->return_by = 0;
	taking->is_full = false;
	taking->text_size = 0;

	/* The transaction's own snapshot would see what the call itself writes. */
	taking->snapshot = NULL;
	taking->command = GetCurrentCommandId(false);
	if (IsolationUsesXactSnapshot())
	{
		PushCopiedSnapshot(GetTransactionSnapshot());
		taking->snapshot = GetActiveSnapshot();
	}
	taking->begun = RegisterSnapshot(taking->snapshot != NULL ?
									 taking->snapshot : GetLatestSnapshot());
	IDEM_INJECTION_POINT("idem-take-begun");

	if (taking->topics == NULL)
		take_ready(taking, NULL);
	else
		take_topics(taking, taking->topics, taking->ntopics);

	if (taking->visits != NULL)
		idem_cursor_close(&taking->lanes);
	idem_cursor_close(&taking->outbox);
	UnregisterSnapshot(taking->begun);
	if (taking->snapshot != NULL)
		PopActiveSnapshot();
	MemoryContextSwitchTo(old);
	MemoryContextDelete(context);
	return GetCurrentCommandId(false) != taking->command;
}

/*
 * Take from some topics.  The first is chosen at random, so that each is
 * served.
 */
static void
take_topics(Taking *taking, const Datum *topics, int count)
{
	int			start = 0;

	if (count > 0)
		start = pg_prng_uint64_range(&pg_global_prng_state, 0, count - 1);
	for (int i = 0; i < count && taking->wanted > 0 && !taking->is_full; i++)
	{
		CHECK_FOR_INTERRUPTS();
		take_ready(taking, &topics[(start + i) % count]);
	}
}

/*
 * Begin to scan the ready rows of one topic, or of all, in order of time:
 * those that become available after "after" and no later than "until".
 */
static void
begin_scan(Taking *taking, const Datum *topic, const TimestampTz *after,
		   TimestampTz until, Snapshot snapshot)
{
	AttrNumber	available_at = topic != NULL ? TOPICS_AVAILABLE_AT :
		DUE_AVAILABLE_AT;
	ScanKeyData keys[3];
	int			nkeys = 0;

	if (topic != NULL)
		idem_key_text(&keys[nkeys++], TOPICS_TOPIC, *topic);
	if (after != NULL)
		idem_key_time(&keys[nkeys++], available_at, BTGreaterStrategyNumber,
					  *after);
	idem_key_time(&keys[nkeys++], available_at, BTLessEqualStrategyNumber,
				  until);
	idem_scan(&taking->outbox, topic != NULL ? IDEM_OUTBOX_TOPICS :
			  IDEM_OUTBOX_DUE, snapshot, keys, nkeys);
}

/*
 * Take messages of one topic, or of all.  Those that have been available
 * longest come first.
 */
static void
take_ready(Taking *taking, const Datum *topic)
{
	bool		is_marked = taking->snapshot == NULL;
	TimestampTz after = DT_NOBEGIN;
	bool		is_complete = false;
	IdemDueScan marked;

	if (is_marked)
		after = idem_due_scan_begin(&marked,
									idem_due_hash(topic != NULL ? *topic : (Datum) 0, 0),
									taking->now);
	begin_scan(taking, topic, TIMESTAMP_IS_NOBEGIN(after) ? NULL : &after,
			   taking->now, taking->snapshot);
	while (taking->wanted > 0 && !taking->is_full)
	{
		Datum	   *found = taking->outbox.row->tts_values;
		IdemDueStep step = IDEM_DUE_LOOK;

		CHECK_FOR_INTERRUPTS();
		is_complete = !idem_scan_next(&taking->outbox, ForwardScanDirection);
		if (is_complete)
			break;
		if (is_marked)
			step = idem_due_scan_found(&marked,
									   DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]),
									   &after);
		if (step == IDEM_DUE_SKIP)
		{
			begin_scan(taking, topic, &after, taking->now, NULL);
			continue;
		}
		taking->is_full = is_late(taking);
		if (taking->is_full)
			break;
		take_found(taking);
		if (is_marked)
			idem_due_scan_looked(&marked, taking->blockers);
	}
	if (is_marked)
		idem_due_scan_end(&marked, is_complete);
}

/*
 * Is it time to return what was taken?
 */
static bool
is_late(const Taking *taking)
{
	return taking->return_by != 0 &&
		GetCurrentTimestamp() >= taking->return_by;
}

/*
 * Does a message with this much text fit into the result?  If so, count it.
 * The first one always fits.
 */
static bool
has_room(Taking *taking, int64 text_size)
{
	taking->is_full = taking->text_size > 0 &&
		taking->text_size + text_size > IDEM_MAX_RESULT_SIZE;
	if (!taking->is_full)
		taking->text_size += text_size;
	return !taking->is_full;
}

/*
 * Take the ready row that was found, or from its lane, unless another
 * transaction holds it or the call has been there.  Sets taking->blockers.
 */
static void
take_found(Taking *taking)
{
	IdemCursor *outbox = &taking->outbox;

	taking->found.count = 0;
	taking->blockers = &taking->found;
	taking->passed++;

	/*
	 * Another transaction holds the row.  If the snapshot is old, another one
	 * has changed it since, or this one has.
	 */
	if (TransactionIdIsValid(outbox->holder))
	{
		(void) idem_add_blocker(&taking->found, outbox->holder);
		return;
	}
	if (taking->snapshot != NULL &&
		!idem_row_is_visible(outbox, SnapshotSelf))
		return;

	/*
	 * A scan that restarts after a range can find what the call has taken, if
	 * the clock was set back meanwhile and the lease is short.
	 */
	if (idem_is_written_since(outbox, taking->command))
		return;

	if (!outbox->row->tts_isnull[OUTBOX_KEY_HASH])
		take_lane(taking);
	else if (!idem_outbox_in_state(outbox, "pending"))
		move_signpost(taking, NULL);
	else if (!is_dying(outbox->row->tts_values) ||
			 is_within(taking, taking->deaths, MAX_DEATHS))
		(void) take_row(taking, outbox, false);
}

/*
 * Take from the lane of the row that was found, which can be any signpost,
 * unless the call has visited that lane.
 *
 * The take locks no message before it knows that it is the head of its lane:
 * another relay might answer for it, and would wait for this transaction.
 */
static void
take_lane(Taking *taking)
{
	Datum	   *found = taking->outbox.row->tts_values;
	int64		id = DatumGetInt64(found[OUTBOX_ID]);
	Lane		lane = {0};
	Visit	   *visit;
	bool		is_pending = idem_outbox_in_state(&taking->outbox, "pending");
	bool		is_new;

	if (is_pending &&
		!idem_row_is_visible(&taking->outbox, taking->begun))
		return;
	if (taking->visits == NULL)
	{
		idem_cursor_open_beside(&taking->lanes, &taking->outbox);
		taking->visits = visits_create(CurrentMemoryContext, 32, NULL);
	}

	lane.lane = DatumGetInt64(found[OUTBOX_KEY_HASH]);
	visit = visits_lookup(taking->visits, lane.lane);
	if (visit != NULL &&
		(!is_pending || Max(visit->head, visit->earlier) < id))
	{
		move_signpost(taking, visit);
		return;
	}

	if (is_pending)
		idem_lane_low_water_found(lane.lane, id);
	lane.size = 8;
	lane.messages = palloc_array(Locked, lane.size);
	while (take_locked(taking, &lane))
		;
	forget_locked(taking, &lane, lane.taken);
	pfree(lane.messages);

	if (lane.has_dead)
		idem_lane_promote_next(&taking->lanes, lane.lane, lane.dead, NULL);
	if (is_pending && lane.taken > 0)
		return;

	visit = visits_insert(taking->visits, lane.lane, &is_new);
	visit->head = IDEM_HEAD_UNKNOWN;
	visit->earlier = IDEM_HEAD_UNKNOWN;
	visit->blockers = NULL;
	visit->signposts_stay = false;
	if (!is_pending || !lane.has_dead)
		move_signpost(taking, visit);
}

/*
 * Move the row that was found out of the way, because nothing can be taken
 * through it, unless the call has moved enough.  "visit" is that of its lane;
 * NULL if it has none.  Sets taking->blockers.
 */
static void
move_signpost(Taking *taking, Visit *visit)
{
	IdemCursor *outbox = &taking->outbox;
	bool		is_pending = idem_outbox_in_state(outbox, "pending");
	bool		moved;

	if (visit != NULL && visit->blockers != NULL &&
		(visit->is_held || !is_pending))
	{
		taking->blockers = visit->blockers;
		return;
	}
	if (visit != NULL && visit->signposts_stay && !is_pending)
		return;
	if (!(is_pending ? is_within(taking, taking->parks, MAX_PARKS) :
		  is_within(taking, taking->removals, MAX_REMOVALS)))
		return;
	if (visit == NULL)
		moved = idem_outbox_set_ready(outbox, false, DT_NOBEGIN);
	else
		moved = idem_lane_move_signpost(outbox, &taking->lanes,
										taking->snapshot,
										is_pending ? &visit->earlier :
										&visit->head, &taking->found);
	if (moved)
	{
		taking->passed--;
		if (is_pending)
			taking->parks++;
		else
			taking->removals++;
	}

	if (visit != NULL && taking->found.count > 0)
	{
		Size		size = offsetof(IdemBlockers, xids) +
			taking->found.count * sizeof(TransactionId);

		visit->blockers = palloc(size);
		memcpy(visit->blockers, &taking->found, size);
		visit->is_held = is_pending;
	}

	/* Otherwise each signpost would scan the lane up to the same row. */
	if (visit != NULL && !is_pending && !moved &&
		visit->head == IDEM_HEAD_UNKNOWN)
		visit->signposts_stay = true;
}

/*
 * Can a call that has made that number of changes of a kind make another one?
 */
static bool
is_within(const Taking *taking, int changes, int limit)
{
	return changes < limit || changes < taking->passed / PASSED_SHARE;
}

/*
 * Take the messages that have been locked, up to the first that is now
 * preceded by another, and lock the next ones that can be taken.  Returns
 * whether there are any.
 */
static bool
take_locked(Taking *taking, Lane *lane)
{
	IdemCursor *lanes = &taking->lanes;
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	int			n = 0;
	bool		more = false;
	bool		has_head = false;
	int64		buffers = idem_lane_buffers();

	idem_lane_scan_begin(lanes, lane->lane, snapshot);
	while (idem_scan_next(lanes, ForwardScanDirection))
	{
		int64		id = DatumGetInt64(lanes->row->tts_values[OUTBOX_ID]);

		CHECK_FOR_INTERRUPTS();
		if (!has_head)
			idem_lane_low_water_raise(lane->lane, id, snapshot,
									  idem_lane_buffers() - buffers);
		has_head = true;
		if (n < lane->locked && id != lane->messages[n].id)
		{
			if (lane->taken > 0)
				break;

			/*
			 * The first message that was locked is not the head of its lane.
			 */
			forget_locked(taking, lane, 0);
			lane->dying = 0;
			lane->ends = false;
		}

		if (n >= lane->locked)
		{
			if (!lock_next(taking, lane))
				break;
			more = true;
			n++;
		}
		else if (n < lane->taken)
			n++;
		else
		{
			Taken		result = take_row(taking, lanes, true);

			if (result == TAKEN_NOT)
				break;
			if (result == TAKEN)
			{
				lane->taken++;
				n++;
				continue;
			}

			lane->locked--;
			lane->dying--;
			memmove(&lane->messages[n], &lane->messages[n + 1],
					(lane->locked - n) * sizeof(Locked));
			if (!lane->has_dead)
				lane->dead = id;
			lane->has_dead = true;
		}
	}
	idem_scan_end(lanes);
	UnregisterSnapshot(snapshot);
	return more;
}

/*
 * The messages of a lane from this one on are not returned, so they do not
 * count.
 */
static void
forget_locked(Taking *taking, Lane *lane, int from)
{
	for (int i = from; i < lane->locked; i++)
		taking->text_size -= lane->messages[i].text_size;
	lane->locked = from;
}

/*
 * Lock the message that has been found in a lane, if it can be taken together
 * with those before it, or is to die, and note it.  A message that the call
 * cannot return is not locked: it would be withheld from others until this
 * transaction ends.
 */
static bool
lock_next(Taking *taking, Lane *lane)
{
	IdemCursor *lanes = &taking->lanes;
	Datum	   *found = lanes->row->tts_values;
	bool		dies = is_dying(found);
	Locked		message = {DatumGetInt64(found[OUTBOX_ID])};

	if (lane->ends || taking->is_full ||
		lane->locked - lane->taken - lane->dying >= taking->wanted ||
		(dies && !is_within(taking, taking->deaths + lane->dying,
							MAX_DEATHS)) ||
		DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > taking->now ||
		idem_is_written_since(lanes, taking->command) ||
		!idem_row_is_visible(lanes, taking->begun))
		return false;

	taking->is_full = is_late(taking);
	if (taking->is_full)
		return false;
	if (!dies)
	{
		message.text_size = found_text_size(lanes);
		if (!has_room(taking, message.text_size))
			return false;
	}
	if (idem_lock(lanes) != IDEM_WRITE_DONE)
	{
		taking->text_size -= message.text_size;
		return false;
	}

	lane->ends = is_failing(found);
	if (lane->locked == lane->size)
	{
		lane->size *= 2;
		lane->messages = repalloc_huge(lane->messages,
									   lane->size * sizeof(Locked));
	}
	lane->messages[lane->locked++] = message;
	lane->dying += dies;
	return true;
}

/*
 * Is a message in the second half of its attempts, but not beyond them?
 */
static bool
is_failing(const Datum *message)
{
	return !is_dying(message) &&
		idem_outbox_attempts(message) >= Max(idem_outbox_max_attempts / 2, 1);
}

/*
 * Does a message have no attempt left, so that it dies instead of being
 * taken?
 */
static bool
is_dying(const Datum *message)
{
	return idem_outbox_attempts(message) >= idem_outbox_max_attempts ||
		DatumGetInt32(message[OUTBOX_ATTEMPT]) == PG_INT32_MAX;
}

/*
 * Take the row that was found, unless another transaction holds it, and add
 * it to the result; the size of a locked message has been counted already.  A
 * message without attempts left, whose last relay did not answer, is declared
 * dead instead.
 */
static Taken
take_row(Taking *taking, IdemCursor *outbox, bool is_locked)
{
	Datum	   *found = outbox->row->tts_values;
	int			attempt = DatumGetInt32(found[OUTBOX_ATTEMPT]);
	IdemOutboxRow row;
	int64		text_size = 0;
	Datum		values[lengthof(take_columns)];
	bool		nulls[lengthof(take_columns)];

	idem_outbox_copy(outbox, &row);
	if (is_dying(found))
	{
		idem_outbox_set(&row, OUTBOX_STATE, CStringGetTextDatum("dead"));
		idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(false));
		if (row.nulls[OUTBOX_LAST_ERROR])
			idem_outbox_set(&row, OUTBOX_LAST_ERROR,
							CStringGetTextDatum("The last lease expired."));
		if (idem_update(outbox, row.values, row.nulls,
						is_locked) != IDEM_WRITE_DONE)
			return TAKEN_NOT;
		taking->deaths++;
		idem_outbox_changes(&row);
		idem_count(IDEM_COUNT_DEAD, 1);
		idem_log_message_event(IDEM_EVENT_DEAD, row.values);
		return TAKEN_DEAD;
	}

	if (is_late(taking))
	{
		taking->is_full = true;
		/* Other takes skip it until this transaction ends. */
		if (is_locked)
			idem_notify_message(row.values[OUTBOX_TOPIC], taking->now, true);
		return TAKEN_NOT;
	}
	if (!is_locked)
	{
		text_size = found_text_size(outbox);
		if (!has_room(taking, text_size))
			return TAKEN_NOT;
	}

	idem_outbox_set(&row, OUTBOX_ATTEMPT, Int32GetDatum(attempt + 1));
	idem_outbox_set(&row, OUTBOX_AWAITING_ACK, BoolGetDatum(true));
	idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(true));
	idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
					TimestampTzGetDatum(lease_end(taking)));
	if (idem_update(outbox, row.values, row.nulls,
					is_locked) != IDEM_WRITE_DONE)
	{
		taking->text_size -= text_size;
		return TAKEN_NOT;
	}
	idem_outbox_changes(&row);

	IDEM_INJECTION_POINT("idem-taken");
	for (int i = 0; i < lengthof(take_columns); i++)
	{
		values[i] = row.values[take_columns[i]];
		nulls[i] = row.nulls[take_columns[i]];
	}
	tuplestore_putvalues(taking->result->setResult, taking->result->setDesc,
						 values, nulls);
	taking->wanted--;
	idem_count(IDEM_COUNT_TAKEN, 1);
	return TAKEN;
}

/*
 * Return the length of the message that was found, as text.
 */
static int64
found_text_size(IdemCursor *outbox)
{
	IdemOutboxRow row;

	idem_outbox_copy(outbox, &row);
	return idem_outbox_text_size(&row, IDEM_MAX_RESULT_SIZE);
}

/*
 * Return the end of the lease of a message that is taken now.  The first
 * lease decides when the call returns, so that its relay has at least half of
 * the lease left to deliver the message.
 */
static TimestampTz
lease_end(Taking *taking)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz end = idem_add_interval(now, taking->lease,
										IDEM_OUTBOX_LEASE_MS);

	if (taking->return_by == 0 && end > now)
		taking->return_by = Max(now + (end - now) / 2,
								idem_add_ms(now, MIN_DURATION_MS));
	return end;
}
