/*-------------------------------------------------------------------------
 *
 * lanes.c
 *		Lanes: the order of messages with the same key.
 *
 * Messages with a key belong to a lane, a hash of topic and key, and leave it
 * in order of their ids.  Only the first pending message, the head, can be
 * taken.  So only the head must be in the indexes that takes scan, which hold
 * the rows that are "ready".  The other messages are parked.
 *
 * A ready row is a signpost: it makes a take look at its lane when the row's
 * available_at is reached.  The take looks for the head itself, so the only
 * cost of a superfluous signpost is time.  A signpost need not be pending;
 * then only takes look at it.  A lane without a signpost would be forgotten,
 * so the invariant is:
 *
 *		There is either no pending message in a lane, or a ready row that is the
 *		head or precedes it, and is due no later than the head.
 *
 * It holds in the state that committed transactions have left, and in each
 * state that the uncommitted ones can still produce.  To keep it, no
 * transaction waits for another, or writes to a message that another relay
 * has leased:
 *
 *	- A call that publishes, takes or requeues parks a message only if an
 *	  earlier one is pending and committed, and no transaction is writing that
 *	  one.  When the message is in the index of its lane, the call checks this
 *	  again (idem_lane_is_blocked()), and makes the message ready if there is
 *	  no such earlier message.  A transaction that writes a message that stays
 *	  parked makes the same check.
 *
 *	- A transaction by which a message departs, acknowledged or dead, looks
 *	  for the next message after it has written that
 *	  (idem_lane_promote_next()).  Unless the next one is ready, and no
 *	  transaction is writing it, the row of the departed message becomes the
 *	  signpost.
 *
 * Both look with a dirty snapshot.  If two such transactions meet, the one
 * that looks last sees what the other has written.  Either the departing one
 * sees the parked message, or the parking one sees that the message before it
 * is being written.  A message that is being written is ignored on both
 * sides, because its transaction might commit or not.  Another transaction's
 * uncommitted message keeps no message parked either, because it might never
 * be committed.  This transaction's own messages do, because no rollback to a
 * savepoint undoes the earlier one and keeps the later.
 *
 * The invariant says nothing about a message behind the head.  So a take
 * parks such a message whether or not the head is ready.  It never writes to
 * the head for this, because a relay might have leased it.  When the head
 * departs, the message is the next one, and is found as above.
 *
 * A dirty scan can miss a row that moves to another index entry.  A row that
 * moves becomes ready, or departs, or stays parked.  In the latter two cases
 * the transaction that moves it looks afterwards, and sees what the scan was
 * for.
 *
 * Messages that are taken together with the head become ready with it, so
 * that acknowledging them one by one need not leave a signpost each time.  If
 * their leases expire instead, takes find them behind a head that has been
 * taken again, and park them.
 *
 * A take removes a signpost that is not pending (see take.c) only if it has
 * found the head ready, and before it no message that is being written or is
 * uncommitted; or no head at all.  If another transaction parks a message
 * later, it checks again, and either finds the same head or makes the message
 * ready.  When a take has moved one signpost, what it has seen before the
 * head also holds for further signposts of that lane.  It looks at the head
 * itself each time.
 *
 * A signpost that cannot be moved waits for other transactions: for one that
 * writes a committed message, which blocks all others, or for those that have
 * published messages.  find_first() returns them, so that takes need not look
 * at the signpost until one of them has ended.  If there is also a parked
 * message that no transaction is writing, the signpost is the only one for
 * that message, too, so the message is made ready.
 *
 * A lane is scanned from its low-water mark on; no message below that is
 * pending, or ever will be (see lane_low_water.c).  Publishers look back to
 * their own mark, with the only risk of a superfluous signpost.
 *
 * idem_repair_outbox() repairs damage that was done to the table by hand,
 * such as a head that was deleted.  It also writes to leased messages.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/skey.h"
#include "access/stratnum.h"
#include "common/int.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "outbox/lane_low_water.h"
#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/times.h"

/* The first message of a lane that matters to a signpost. */
typedef enum First
{
	FIRST_NONE,
	FIRST_FREE,					/* pending; no transaction writes it */
	FIRST_HELD,					/* pending; another transaction writes it */
	FIRST_UNKNOWN,				/* too many transactions hold others */
} First;

static void begin_scan(IdemCursor *outbox, int64 lane, int64 from,
					   int64 until, Snapshot snapshot);
static First find_first(IdemCursor *lanes, int64 lane, int64 from, int64 until,
						IdemBlockers *blockers);
static bool is_leased(IdemCursor *outbox);
static void leave_signpost(IdemCursor *outbox, int64 id,
						   TimestampTz available_at);

/*
 * Begin to scan a lane's pending messages, in order, from its mark on.
 */
void
idem_lane_scan_begin(IdemCursor *outbox, int64 lane, Snapshot snapshot)
{
	begin_scan(outbox, lane, idem_lane_low_water(lane), PG_INT64_MAX,
			   snapshot);
}

/*
 * Begin to scan a lane's pending messages with ids from..until, inclusive.
 */
static void
begin_scan(IdemCursor *outbox, int64 lane, int64 from, int64 until,
		   Snapshot snapshot)
{
	ScanKeyData keys[3];

	idem_key_int8(&keys[0], LANES_LANE, BTEqualStrategyNumber, lane);
	idem_key_int8(&keys[1], LANES_ID, BTGreaterEqualStrategyNumber, from);
	idem_key_int8(&keys[2], LANES_ID, BTLessEqualStrategyNumber, until);
	idem_scan(outbox, IDEM_OUTBOX_LANES, snapshot, keys, 3);
}

/*
 * Insert a new message, ready or parked.  Its commit wakes waiting takes.
 */
void
idem_lane_append(IdemCursor *outbox, IdemOutboxRow *message)
{
	int64		lane = 0;
	int64		id = DatumGetInt64(message->values[OUTBOX_ID]);
	bool		ready = true;

	if (!message->nulls[OUTBOX_KEY_HASH])
	{
		lane = DatumGetInt64(message->values[OUTBOX_KEY_HASH]);
		ready = !idem_lane_is_blocked(outbox, lane, id);
	}
	idem_outbox_set(message, OUTBOX_IN_DUE_INDEX, BoolGetDatum(ready));
	idem_append(outbox, message->values, message->nulls);

	/*
	 * Even for a parked one: an acknowledgement might have left it for this
	 * commit to announce.
	 */
	idem_notify_message(message->values[OUTBOX_TOPIC],
						DatumGetTimestampTz(message->values[OUTBOX_AVAILABLE_AT]),
						false);
	if (!ready)
		idem_lane_recheck(outbox, lane, id);
}

/*
 * Called after writing a message that stays pending, and stays ready or
 * parked.
 */
void
idem_lane_recheck_if_parked(IdemCursor *outbox, const IdemOutboxRow *message)
{
	if (!DatumGetBool(message->values[OUTBOX_IN_DUE_INDEX]))
		idem_lane_recheck(outbox,
						  DatumGetInt64(message->values[OUTBOX_KEY_HASH]),
						  DatumGetInt64(message->values[OUTBOX_ID]));
}

/*
 * Called after parking a message, or writing a parked one.
 */
void
idem_lane_recheck(IdemCursor *outbox, int64 lane, int64 id)
{
	IDEM_INJECTION_POINT("idem-lane-parked");
	if (!idem_lane_is_blocked(outbox, lane, id))
		leave_signpost(outbox, id, DT_NOBEGIN);
}

/*
 * Is an earlier message of the lane pending, and no transaction writing it?
 */
bool
idem_lane_is_blocked(IdemCursor *outbox, int64 lane, int64 id)
{
	bool		blocked = false;
	int64		buffers = idem_lane_buffers();

	if (id == PG_INT64_MIN)
		return false;
	begin_scan(outbox, lane, idem_lane_free_from(lane, id), id - 1, NULL);
	while (!blocked && idem_scan_next(outbox, BackwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		blocked = !TransactionIdIsValid(outbox->holder);
	}
	idem_scan_end(outbox);
	if (!blocked)
		idem_lane_is_free(lane, id, idem_lane_buffers() - buffers);
	return blocked;
}

/*
 * A message has left its lane, acknowledged or dead, or is the first of
 * several that have: make sure that a take finds the next one.  If the row
 * was deleted, "signpost" is inserted where it is needed; otherwise it is
 * NULL.
 */
void
idem_lane_promote_next(IdemCursor *outbox, int64 lane, int64 id,
					   IdemOutboxRow *signpost)
{
	bool		found;
	Datum	   *next = outbox->row->tts_values;
	TimestampTz available_at = DT_NOBEGIN;

	IDEM_INJECTION_POINT("idem-lane-left");
	if (id == PG_INT64_MAX)
		return;
	begin_scan(outbox, lane, id + 1, PG_INT64_MAX, NULL);
	found = idem_scan_next(outbox, ForwardScanDirection);
	idem_scan_end(outbox);
	if (!found)
		return;
	if (!TransactionIdIsValid(outbox->holder))
	{
		if (DatumGetBool(next[OUTBOX_IN_DUE_INDEX]))
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
 * Move a signpost to where it must be looked at again, after a take has found
 * it and has taken what it could.  A pending signpost is parked if another
 * message precedes it.  Any other is removed if the head of the lane is
 * ready, or if there is no head, and otherwise moved to the time at which the
 * head is available.  Returns whether the signpost was written.
 *
 * Does nothing if the result depends on what another transaction is writing,
 * or on a row that "snapshot" does not see, unless that is NULL.  Sets
 * "blockers" to the transactions that the signpost waits for.
 *
 * "head_id" is IDEM_HEAD_UNKNOWN at first.  The same take passes it again for
 * each signpost of the lane that is pending, or not pending, like this one:
 * no message before it need be looked at.  For a pending signpost it is
 * enough that one message precedes it; for any other, all preceding messages
 * count.
 *
 * "lanes" is a second cursor on the table of "outbox".
 */
bool
idem_lane_move_signpost(IdemCursor *outbox, IdemCursor *lanes,
						Snapshot snapshot, int64 *head_id,
						IdemBlockers *blockers)
{
	Datum	   *found = outbox->row->tts_values;
	Datum	   *head = lanes->row->tts_values;
	int64		lane = DatumGetInt64(found[OUTBOX_KEY_HASH]);
	int64		id = DatumGetInt64(found[OUTBOX_ID]);
	bool		is_pending = idem_outbox_in_state(outbox, "pending");
	First		first;

	if (is_pending && *head_id >= id)
		*head_id = IDEM_HEAD_UNKNOWN;
	first = find_first(lanes, lane, *head_id, is_pending ?
					   Max(id, PG_INT64_MIN + 1) - 1 : PG_INT64_MAX, blockers);
	if (first == FIRST_HELD)
		return false;
	if (first == FIRST_FREE)
	{
		if (is_pending || blockers->count == 0)
			*head_id = DatumGetInt64(head[OUTBOX_ID]);
		if (snapshot != NULL && !idem_row_is_visible(lanes, snapshot))
			first = FIRST_UNKNOWN;
	}

	if (!is_pending && blockers->count > 0)
	{
		/*
		 * If the head is ready, takes find it; otherwise they need this row.
		 */
		if (first == FIRST_FREE && !DatumGetBool(head[OUTBOX_IN_DUE_INDEX]))
		{
			if (!is_leased(lanes) &&
				idem_outbox_set_ready(lanes, true, DT_NOBEGIN))
				return true;
			first = FIRST_UNKNOWN;
		}
		if (first == FIRST_UNKNOWN)
			blockers->count = 0;
		return false;
	}
	blockers->count = 0;
	if (first == FIRST_UNKNOWN || (is_pending && first == FIRST_NONE))
		return false;

	if (!is_pending && first == FIRST_NONE)
		*head_id = PG_INT64_MAX;
	if (!is_pending && first == FIRST_FREE &&
		!DatumGetBool(head[OUTBOX_IN_DUE_INDEX]))
	{
		TimestampTz available_at = DatumGetTimestampTz(head[OUTBOX_AVAILABLE_AT]);

		return available_at > GetCurrentTimestamp() &&
			idem_outbox_set_ready(outbox, true, available_at);
	}
	if (!idem_outbox_set_ready(outbox, false, DT_NOBEGIN))
		return false;
	if (is_pending)
		idem_lane_recheck(lanes, lane, id);
	return true;
}

/*
 * Find the first message of a lane, with an id from "from" to "until", that
 * no other transaction is writing; or the first one that blocks all others.
 * "blockers" are the transactions that hold the messages before it.
 */
static First
find_first(IdemCursor *lanes, int64 lane, int64 from, int64 until,
		   IdemBlockers *blockers)
{
	First		first = FIRST_UNKNOWN;

	blockers->count = 0;
	begin_scan(lanes, lane, Max(from, idem_lane_low_water(lane)), until, NULL);
	while (first == FIRST_UNKNOWN)
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_scan_next(lanes, ForwardScanDirection))
			first = FIRST_NONE;
		else if (!TransactionIdIsValid(lanes->holder))
			first = FIRST_FREE;
		else if (!idem_add_blocker(blockers, lanes->holder))
			break;
		else if (!lanes->row_is_pending)
			first = FIRST_HELD;
	}
	idem_scan_end(lanes);
	return first;
}

/*
 * Prepare to delete a signpost that is not pending: make the head of its lane
 * ready, if there is one.  Returns false if the signpost must stay.
 *
 * "lanes" is a second cursor on the table of "outbox".
 */
bool
idem_lane_remove_signpost(IdemCursor *outbox, IdemCursor *lanes)
{
	Datum	   *found = outbox->row->tts_values;
	bool		has_head;

	idem_lane_scan_begin(lanes, DatumGetInt64(found[OUTBOX_KEY_HASH]), NULL);
	has_head = idem_scan_next(lanes, ForwardScanDirection);
	idem_scan_end(lanes);
	return !has_head ||
		(!TransactionIdIsValid(lanes->holder) &&
		 (DatumGetBool(lanes->row->tts_values[OUTBOX_IN_DUE_INDEX]) ||
		  (!is_leased(lanes) &&
		   idem_outbox_set_ready(lanes, true, DT_NOBEGIN))));
}

/*
 * Does a relay hold the message that was found?  A write to it would delay
 * the relay's answer, and could cost it the lease.
 */
static bool
is_leased(IdemCursor *outbox)
{
	Datum	   *found = outbox->row->tts_values;

	return !outbox->row->tts_isnull[OUTBOX_AWAITING_ACK] &&
		DatumGetBool(found[OUTBOX_AWAITING_ACK]) &&
		DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > GetCurrentTimestamp();
}

/*
 * Make the head of each lane ready, so that takes find it whatever was
 * deleted or changed by hand.  Skips heads that other transactions are
 * writing.  Returns how many heads were not ready, which need not mean
 * damage.
 */
int64
idem_lanes_repair(IdemCursor *outbox)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	int64		repaired = 0;
	int64		lane = PG_INT64_MIN;
	bool		is_last = false;

	while (!is_last)
	{
		Datum	   *head = outbox->row->tts_values;
		ScanKeyData key;

		CHECK_FOR_INTERRUPTS();
		idem_key_int8(&key, LANES_LANE, BTGreaterEqualStrategyNumber, lane);
		idem_scan(outbox, IDEM_OUTBOX_LANES, snapshot, &key, 1);
		if (!idem_scan_next(outbox, ForwardScanDirection))
			break;
		lane = DatumGetInt64(head[OUTBOX_KEY_HASH]);
		is_last = pg_add_s64_overflow(lane, 1, &lane);
		if (!DatumGetBool(head[OUTBOX_IN_DUE_INDEX]) &&
			idem_outbox_set_ready(outbox, true, DT_NOBEGIN))
			repaired++;
	}
	idem_scan_end(outbox);
	UnregisterSnapshot(snapshot);
	return repaired;
}

/*
 * Make a row ready that this transaction has written, from "available_at" on,
 * but not before now.
 */
static void
leave_signpost(IdemCursor *outbox, int64 id, TimestampTz available_at)
{
	Datum		key = Int64GetDatum(id);

	if (!idem_find_latest(outbox, &key, NULL) ||
		!idem_outbox_set_ready(outbox, true, available_at))
		elog(ERROR, "message " INT64_FORMAT " has vanished", id);
}

/*
 * Make the row that was found ready, or park it.  A pending row that is made
 * ready is available from its own time on, any other from "available_at" on,
 * but not before now.  Returns false if another transaction holds the row.
 *
 * Other relays skip the row until this transaction ends.  So its end wakes
 * one of them, if something will be available through the row then.
 */
bool
idem_outbox_set_ready(IdemCursor *outbox, bool ready, TimestampTz available_at)
{
	IdemOutboxRow row;
	bool		is_pending = idem_outbox_in_state(outbox, "pending");
	TimestampTz due = DT_NOEND;

	idem_outbox_copy(outbox, &row);
	idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(ready));
	if (ready)
	{
		if (is_pending)
			available_at =
				DatumGetTimestampTz(row.values[OUTBOX_AVAILABLE_AT]);
		available_at = Max(available_at, GetCurrentTimestamp());
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(available_at));
	}
	if (ready || is_pending)
		due = DatumGetTimestampTz(row.values[OUTBOX_AVAILABLE_AT]);
	if (idem_update(outbox, row.values, row.nulls, false) != IDEM_WRITE_DONE)
		return false;
	idem_notify_message(row.values[OUTBOX_TOPIC], due, true);
	return true;
}
