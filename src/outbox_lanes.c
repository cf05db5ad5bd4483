/*-------------------------------------------------------------------------
 *
 * outbox_lanes.c
 *		Which messages of a key a take looks at.
 *
 * Messages with a key belong to a lane, a hash of topic and key, and leave it
 * in order of their ids.  Only the first pending one, the head, can be taken,
 * so only it has to stand in the indexes that takes go through, which hold the
 * rows that are "ready".  The others are parked.
 *
 * A ready row is a signpost: it tells that a take has to look at its lane when
 * the row's available_at has come.  Who finds it looks for the head itself, so
 * a signpost too many costs time and nothing else.  It may even be a row that
 * is pending no more, and then says so for nobody but takes.  One too few
 * would leave a lane forgotten, so there is always
 *
 *		either no pending message in a lane, or a ready row that is the head or
 *		stands before it, and is due no later,
 *
 * as far as committed transactions go, and whichever of the uncommitted ones
 * commit.  Nobody waits for another, or writes to a message that another relay
 * has leased, to keep it so:
 *
 *	- Who parks a message, its publisher or a take, does so behind an earlier
 *	  one that is pending, committed, and not being written.  Then, with the
 *	  message in the index of its lane, he looks again for such a one
 *	  (idem_lane_is_blocked()), and makes the message ready if there is none.
 *	  So does who writes a message that stays parked.
 *
 *	- Whose message leaves a lane, acknowledged or dead, looks for the next one
 *	  after he has written that (idem_lane_left()).  Unless that is ready, and
 *	  nobody is writing it, the row that he has written becomes the signpost.
 *
 * Both look with a dirty snapshot.  Of two that meet, the one who looks last
 * sees what the other has written: either the leaver sees the parked message,
 * or who parked it sees that the message before it is being written.  A
 * message that is being written counts for nothing on either side, for its
 * transaction may commit or not.  Nor does another transaction's message that
 * is not committed keep one parked: it may never be.  This transaction's own
 * messages do, since no savepoint that undoes the earlier one keeps the later.
 *
 * A dirty scan may miss a row that moves to another entry while the scan comes
 * by.  Whatever moves becomes ready, or leaves the lane, or stays parked; and
 * who does the latter two looks after that, and sees what the scan was for.
 *
 * Messages that are taken together with the head become ready with it, so
 * that who acknowledges them one by one need not leave a signpost each time.
 * Where their lease runs out instead, takes meet them behind a head that has
 * been taken again, and park them, a limited number in each call.
 *
 * A take removes a signpost that is not the head (see outbox_take.c) only
 * where it has found the head ready, and nothing before that which is being
 * written or not committed.  A message that another transaction parks later
 * finds, when that looks again, the same head that the take has found, or
 * becomes ready.  What a take has seen before the head, when it removed one
 * signpost, holds for the next ones of that lane, too; that the head is ready,
 * and nobody writes it, it looks at each time.
 *
 * A lane is gone through from its mark on, below which nothing is pending or
 * will be; see outbox_lane_mark.c.  Where publishers look back no further than
 * to their own mark, all that may come of it is a signpost too many.
 *
 * What somebody else does to the table by hand, deleting a head for one, is
 * mended by idem_lanes_sweep(), with which takes walk through the lanes of
 * their topics little by little.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/skey.h"
#include "access/stratnum.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "outbox_lane_mark.h"
#include "outbox_lanes.h"
#include "outbox_row.h"
#include "texts.h"
#include "times.h"
#include "wake.h"

/* How many lanes a sweep looks at, and its share of the time, and pause. */
#define SWEEP_LANES		16
#define SWEEP_SHARE		100
#define SWEEP_PAUSE_US	1000000

/* The columns of idem_outbox_lanes, from 1. */
#define LANES_LANE	1
#define LANES_ID	2

/* Where the next sweep of this backend begins, and when. */
static int64 sweep_from;
static int64 sweep_at = 0;

static void begin_scan(IdemScan *scan, IdemTable *outbox, int64 lane,
					   int64 from, int64 until, Snapshot snapshot);
static bool is_leased(IdemTable *outbox);
static bool is_forgotten(IdemTable *outbox, const Datum *topics, int ntopics);
static void leave_signpost(IdemTable *outbox, int64 id,
						   TimestampTz available_at);

/*
 * Begin to go through a lane's pending messages, in order, from its mark on.
 */
void
idem_lane_scan_begin(IdemScan *scan, IdemTable *outbox, int64 lane,
					 Snapshot snapshot)
{
	begin_scan(scan, outbox, lane, idem_lane_mark(lane), PG_INT64_MAX,
			   snapshot);
}

/*
 * Begin to go through those of them with these ids, and these two.
 */
static void
begin_scan(IdemScan *scan, IdemTable *outbox, int64 lane, int64 from,
		   int64 until, Snapshot snapshot)
{
	ScanKeyData keys[3];

	ScanKeyEntryInitialize(&keys[0], 0, LANES_LANE, BTEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8EQ,
						   Int64GetDatum(lane));
	ScanKeyEntryInitialize(&keys[1], 0, LANES_ID, BTGreaterEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8GE,
						   Int64GetDatum(from));
	ScanKeyEntryInitialize(&keys[2], 0, LANES_ID, BTLessEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8LE,
						   Int64GetDatum(until));
	idem_scan_begin(scan, outbox, IDEM_OUTBOX_LANES, snapshot, 3);
	idem_scan_restart(scan, keys);
}

/*
 * Insert a new message, ready or parked.  Its commit wakes who waits for one.
 */
void
idem_lane_append(IdemTable *outbox, IdemOutboxRow *message)
{
	int64		lane = 0;
	int64		id = DatumGetInt64(message->values[OUTBOX_ID]);
	bool		ready = true;

	if (!message->nulls[OUTBOX_LANE])
	{
		lane = DatumGetInt64(message->values[OUTBOX_LANE]);
		ready = !idem_lane_is_blocked(outbox, lane, id);
	}
	idem_outbox_set(message, OUTBOX_READY, BoolGetDatum(ready));
	idem_append(outbox, message->values, message->nulls);

	/* Also for a parked one: who acknowledges may have had to leave it so. */
	idem_message_changes(message->values[OUTBOX_TOPIC],
						 DatumGetTimestampTz(message->values[OUTBOX_AVAILABLE_AT]),
						 false);
	if (!ready)
		idem_lane_look_again(outbox, lane, id);
}

/*
 * A message has been written that stays pending, and as ready as it was.
 */
void
idem_lane_kept(IdemTable *outbox, const IdemOutboxRow *message)
{
	if (!DatumGetBool(message->values[OUTBOX_READY]))
		idem_lane_look_again(outbox,
							 DatumGetInt64(message->values[OUTBOX_LANE]),
							 DatumGetInt64(message->values[OUTBOX_ID]));
}

/*
 * A message has been parked, or written while it was.
 */
void
idem_lane_look_again(IdemTable *outbox, int64 lane, int64 id)
{
	IDEM_INJECTION_POINT("idem-lane-parked");
	if (!idem_lane_is_blocked(outbox, lane, id))
		leave_signpost(outbox, id, DT_NOBEGIN);
}

/*
 * Is an earlier message of the lane pending, and nobody writing it?
 */
bool
idem_lane_is_blocked(IdemTable *outbox, int64 lane, int64 id)
{
	IdemScan	scan;
	bool		blocked = false;
	int64		buffers = idem_lane_buffers();

	if (id == PG_INT64_MIN)
		return false;
	begin_scan(&scan, outbox, lane, idem_lane_free_from(lane, id), id - 1,
			   NULL);
	while (!blocked && idem_scan_next(&scan, BackwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		blocked = !TransactionIdIsValid(outbox->holder);
	}
	idem_scan_end(&scan);
	if (!blocked)
		idem_lane_is_free(lane, id, idem_lane_buffers() - buffers);
	return blocked;
}

/*
 * A message has left its lane, acknowledged or dead, or several messages have,
 * of which this one is the first: see to it that the next one is found.
 * "signpost" is inserted where one is needed and the message is deleted; NULL
 * where it is there.
 */
void
idem_lane_left(IdemTable *outbox, int64 lane, int64 id,
			   IdemOutboxRow *signpost)
{
	IdemScan	scan;
	bool		found;
	Datum	   *next = outbox->row->tts_values;
	TimestampTz available_at = DT_NOBEGIN;

	IDEM_INJECTION_POINT("idem-lane-left");
	if (id == PG_INT64_MAX)
		return;
	begin_scan(&scan, outbox, lane, id + 1, PG_INT64_MAX, NULL);
	found = idem_scan_next(&scan, ForwardScanDirection);
	idem_scan_end(&scan);
	if (!found)
		return;
	if (!TransactionIdIsValid(outbox->holder))
	{
		if (DatumGetBool(next[OUTBOX_READY]))
			return;
		available_at = DatumGetTimestampTz(next[OUTBOX_AVAILABLE_AT]);
	}
	if (signpost == NULL)
		leave_signpost(outbox, id, available_at);
	else
	{
		available_at = Max(available_at, GetCurrentTimestamp());
		idem_outbox_set(signpost, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(available_at));
		idem_outbox_set(signpost, OUTBOX_PAYLOAD,
						DirectFunctionCall1(jsonb_in,
											CStringGetDatum("null")));
		idem_append(outbox, signpost->values, signpost->nulls);
	}
}

/*
 * A take has found a signpost that is not the head of its lane, or is pending
 * no more, and has taken what it could: remove it where the head is one
 * itself, and else have it stand where it has to be looked at again.  Leaves
 * everything as it is where the head, or what may come to be it, is another
 * transaction's, or is not what "snapshot" sees, unless that is NULL.
 *
 * "head_id" is what a call for the same lane and by the same take has left
 * there, before which there is nothing to look for, or IDEM_HEAD_UNKNOWN.
 *
 * "lanes" is the same table as "outbox", for another row.
 */
void
idem_lane_move_signpost(IdemTable *outbox, IdemTable *lanes,
						Snapshot snapshot, int64 *head_id)
{
	Datum	   *found = outbox->row->tts_values;
	int64		lane = DatumGetInt64(found[OUTBOX_LANE]);
	int64		id = DatumGetInt64(found[OUTBOX_ID]);
	bool		is_pending = idem_outbox_in_state(outbox, "pending");
	TimestampTz now = GetCurrentTimestamp();
	IdemScan	scan;
	bool		has_head;

	begin_scan(&scan, lanes, lane, Max(*head_id, idem_lane_mark(lane)),
			   PG_INT64_MAX, NULL);
	has_head = idem_scan_next(&scan, ForwardScanDirection);
	idem_scan_end(&scan);
	if (!has_head)
		*head_id = PG_INT64_MAX;
	else
	{
		Datum	   *head = lanes->row->tts_values;
		TimestampTz available_at;

		if (TransactionIdIsValid(lanes->holder))
			return;
		*head_id = DatumGetInt64(head[OUTBOX_ID]);
		if (*head_id == id ||
			(snapshot != NULL &&
			 !table_tuple_satisfies_snapshot(lanes->rel, lanes->row,
											 snapshot)))
			return;

		available_at = DatumGetTimestampTz(head[OUTBOX_AVAILABLE_AT]);
		if (!DatumGetBool(head[OUTBOX_READY]))
		{
			if (available_at <= now)
				return;
			if (!is_pending)
			{
				(void) idem_outbox_set_ready(outbox, true, available_at);
				return;
			}
			if (is_leased(lanes) ||
				!idem_outbox_set_ready(lanes, true, DT_NOBEGIN))
				return;
		}
	}

	if (idem_outbox_set_ready(outbox, false, DT_NOBEGIN) && is_pending)
		idem_lane_look_again(lanes, lane, id);
}

/*
 * A signpost that is pending no more is to be deleted: have its head be one,
 * if there is one.  Returns false if it has to stay.
 *
 * "lanes" is the same table as "outbox", for another row.
 */
bool
idem_lane_give_up_signpost(IdemTable *outbox, IdemTable *lanes)
{
	Datum	   *found = outbox->row->tts_values;
	IdemScan	scan;
	bool		has_head;

	idem_lane_scan_begin(&scan, lanes, DatumGetInt64(found[OUTBOX_LANE]),
						 NULL);
	has_head = idem_scan_next(&scan, ForwardScanDirection);
	idem_scan_end(&scan);
	return !has_head ||
		(!TransactionIdIsValid(lanes->holder) &&
		 (DatumGetBool(lanes->row->tts_values[OUTBOX_READY]) ||
		  (!is_leased(lanes) &&
		   idem_outbox_set_ready(lanes, true, DT_NOBEGIN))));
}

/*
 * Does a relay hold the message that was found?  Whoever writes to it then
 * makes that one wait with its answer, and may cost it the lease.
 */
static bool
is_leased(IdemTable *outbox)
{
	Datum	   *found = outbox->row->tts_values;

	return !outbox->row->tts_isnull[OUTBOX_LEASED] &&
		DatumGetBool(found[OUTBOX_LEASED]) &&
		DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > GetCurrentTimestamp();
}

/*
 * Make the heads of some lanes ready, if it is time: a few lanes each second,
 * the next ones each time.  Only those that are available, and only of these
 * topics, which are sorted, or of any if "topics" is NULL: so that the caller
 * takes what it has written to.
 */
void
idem_lanes_sweep(IdemTable *outbox, const Datum *topics, int ntopics)
{
	int64		begin = idem_monotonic_time();
	int64		first;
	Snapshot	snapshot;
	IdemScan	scan;
	bool		has_turned = false;

	if (begin < sweep_at)
		return;
	if (sweep_at == 0)
		sweep_from = (int64) pg_prng_uint64(&pg_global_prng_state);
	first = sweep_from;

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	idem_scan_begin(&scan, outbox, IDEM_OUTBOX_LANES, snapshot, 1);
	for (int i = 0; i < SWEEP_LANES; i++)
	{
		ScanKeyData key;
		int64		lane;

		CHECK_FOR_INTERRUPTS();
		ScanKeyEntryInitialize(&key, 0, LANES_LANE,
							   BTGreaterEqualStrategyNumber, InvalidOid,
							   InvalidOid, F_INT8GE,
							   Int64GetDatum(sweep_from));
		idem_scan_restart(&scan, &key);
		if (!idem_scan_next(&scan, ForwardScanDirection))
		{
			if (has_turned)
				break;
			has_turned = true;
			sweep_from = PG_INT64_MIN;
			continue;
		}
		lane = DatumGetInt64(outbox->row->tts_values[OUTBOX_LANE]);
		if (has_turned && lane >= first)
			break;
		if (is_forgotten(outbox, topics, ntopics))
			(void) idem_outbox_set_ready(outbox, true, DT_NOBEGIN);
		sweep_from = lane == PG_INT64_MAX ? PG_INT64_MIN : lane + 1;
	}
	idem_scan_end(&scan);
	UnregisterSnapshot(snapshot);
	sweep_at = idem_monotonic_time();
	sweep_at += Max((sweep_at - begin) * SWEEP_SHARE, SWEEP_PAUSE_US);
}

/*
 * May the head that was found be one that no signpost leads to, and that the
 * sweep is for?
 */
static bool
is_forgotten(IdemTable *outbox, const Datum *topics, int ntopics)
{
	Datum	   *found = outbox->row->tts_values;
	int			low = 0;
	int			high = ntopics;

	if (DatumGetBool(found[OUTBOX_READY]) ||
		DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > GetCurrentTimestamp())
		return false;
	if (topics == NULL)
		return true;
	while (low < high)
	{
		int			middle = low + (high - low) / 2;
		int			order = idem_text_compare(topics[middle],
											  found[OUTBOX_TOPIC]);

		if (order == 0)
			return true;
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return false;
}

/*
 * Make a row ready that this transaction has written: from that time on, but
 * not before now.
 */
static void
leave_signpost(IdemTable *outbox, int64 id, TimestampTz available_at)
{
	Datum		key = Int64GetDatum(id);

	if (!idem_find_latest(outbox, &key) ||
		!idem_outbox_set_ready(outbox, true, available_at))
		elog(ERROR, "message " INT64_FORMAT " has vanished", id);
}

/*
 * Make the row that was found ready, or park it.  A row that is made ready is
 * available from its own time on, if it is pending, and else from the one that
 * is given; but not before now.  Returns false if another transaction has it.
 */
bool
idem_outbox_set_ready(IdemTable *outbox, bool ready, TimestampTz available_at)
{
	IdemOutboxRow row;

	idem_outbox_copy(outbox, &row);
	idem_outbox_set(&row, OUTBOX_READY, BoolGetDatum(ready));
	if (ready)
	{
		if (idem_outbox_in_state(outbox, "pending"))
			available_at =
				DatumGetTimestampTz(row.values[OUTBOX_AVAILABLE_AT]);
		available_at = Max(available_at, GetCurrentTimestamp());
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(available_at));
	}
	return idem_update(outbox, row.values, row.nulls,
					   false) == IDEM_WRITE_DONE;
}
