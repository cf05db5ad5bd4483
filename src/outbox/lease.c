/*-------------------------------------------------------------------------
 *
 * lease.c
 *		Extending and releasing the leases of messages.
 *
 * A relay holds a message from the take until it answers, or until another
 * relay takes the message.  No attempt of a message has the same number.  So
 * a caller that passes the attempt that idem_outbox_take() returned can only
 * mean its own lease.  Even after that lease has expired, it still holds the
 * message, because no other relay has taken it.  An id alone does not
 * identify a lease.  So without the attempt, a message is held only until its
 * lease expires.
 *
 * Messages are visited in order of their ids, as by all calls that write
 * several, so that two such calls do not deadlock.  The calls wait for the
 * holder of a row, and then check the row again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/times.h"

/* An element of a call's arrays, and its result. */
typedef struct Lease
{
	int64		id;
	bool		has_attempt;
	int			attempt;
	bool		held;
} Lease;

static int	leases_arg(FunctionCallInfo fcinfo, int attempts_arg,
					   Lease **leases, Lease ***sorted);
static int	compare_leases(const void *a, const void *b, void *arg);
static bool extend(IdemCursor *outbox, const Lease *lease,
				   const Interval *interval);
static bool release(IdemCursor *outbox, const Lease *lease);
static bool find_held(IdemCursor *outbox, const Lease *lease,
					  TimestampTz *now);

/*
 * idem_outbox_extend(ids, lease, attempts) -> setof bigint
 */
PG_FUNCTION_INFO_V1(idem_outbox_extend);
Datum
idem_outbox_extend(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Interval   *interval;
	IdemCursor	outbox;
	Lease	   *leases;
	Lease	  **sorted;
	int			count;

	count = leases_arg(fcinfo, 2, &leases, &sorted);
	interval = idem_interval_arg(fcinfo, 1, "lease");

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (int i = 0; i < count; i++)
		sorted[i]->held = extend(&outbox, sorted[i], interval);
	idem_cursor_close(&outbox);

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	for (int i = 0; i < count; i++)
	{
		Datum		id = Int64GetDatum(leases[i].id);
		bool		isnull = false;

		CHECK_FOR_INTERRUPTS();
		if (leases[i].held)
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, &id,
								 &isnull);
	}
	return (Datum) 0;
}

/*
 * idem_outbox_release(ids, attempts) -> int
 */
PG_FUNCTION_INFO_V1(idem_outbox_release);
Datum
idem_outbox_release(PG_FUNCTION_ARGS)
{
	IdemCursor	outbox;
	Lease	   *leases;
	Lease	  **sorted;
	int			count;
	int			given_back = 0;

	count = leases_arg(fcinfo, 1, &leases, &sorted);
	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (int i = 0; i < count; i++)
	{
		if (release(&outbox, sorted[i]))
			given_back++;
	}
	idem_cursor_close(&outbox);
	PG_RETURN_INT32(given_back);
}

/*
 * Read the leases from argument 0, "ids", and argument "attempts_arg": in the
 * order given, and "sorted" by id.  Returns their number.  Raises 22004,
 * 22023.
 */
static int
leases_arg(FunctionCallInfo fcinfo, int attempts_arg, Lease **leases,
		   Lease ***sorted)
{
	IdemArray	arrays[2];
	IdemArray  *ids = &arrays[0];
	IdemArray  *attempts = &arrays[1];
	int			count;

	idem_array_arg(fcinfo, 0, "ids", IDEM_ARRAY_REQUIRED, ids);
	idem_array_arg(fcinfo, attempts_arg, "attempts",
				   PG_ARGISNULL(attempts_arg) ? 0 : IDEM_ARRAY_REQUIRED,
				   attempts);
	count = idem_array_count(arrays, lengthof(arrays));

	*leases = MemoryContextAllocHuge(CurrentMemoryContext,
									 count * sizeof(Lease));
	*sorted = palloc_array(Lease *, count);
	for (int i = 0; i < count; i++)
	{
		Lease	   *lease = &(*leases)[i];

		lease->id = DatumGetInt64(idem_array_value(ids, i));
		lease->has_attempt = !idem_array_is_null(attempts, i);
		lease->attempt = DatumGetInt32(idem_array_value(attempts, i));
		(*sorted)[i] = lease;
	}
	qsort_interruptible(*sorted, count, sizeof(Lease *), compare_leases, NULL);
	return count;
}

/*
 * Order leases by their ids.
 */
static int
compare_leases(const void *a, const void *b, void *arg)
{
	const Lease *la = *(const Lease *const *) a;
	const Lease *lb = *(const Lease *const *) b;

	return (la->id > lb->id) - (la->id < lb->id);
}

/*
 * Extend a lease to "interval" from now.  Returns whether it was held.
 */
static bool
extend(IdemCursor *outbox, const Lease *lease, const Interval *interval)
{
	IdemOutboxRow row;
	TimestampTz now;

	do
	{
		if (!find_held(outbox, lease, &now))
			return false;
		idem_outbox_copy(outbox, &row);
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(idem_add_interval(now, interval,
															  IDEM_OUTBOX_LEASE_MS)));
	} while (!idem_outbox_write(outbox, &row));
	idem_lane_recheck_if_parked(outbox, &row);
	return true;
}

/*
 * Make a message available as if it had not been taken.  The number of its
 * attempt is not used again.  Returns whether the message was held.
 */
static bool
release(IdemCursor *outbox, const Lease *lease)
{
	IdemOutboxRow row;
	TimestampTz now;

	do
	{
		int			before;

		if (!find_held(outbox, lease, &now))
			return false;
		idem_outbox_copy(outbox, &row);
		before = DatumGetInt32(row.values[OUTBOX_UNCOUNTED_ATTEMPTS]);
		idem_outbox_set(&row, OUTBOX_UNCOUNTED_ATTEMPTS,
						Int32GetDatum(before + 1));
		idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(true));
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT, TimestampTzGetDatum(now));
		row.nulls[OUTBOX_AWAITING_ACK] = true;
	} while (!idem_outbox_write(outbox, &row));
	return true;
}

/*
 * Find a message, and return whether the lease still holds it at "now".
 */
static bool
find_held(IdemCursor *outbox, const Lease *lease, TimestampTz *now)
{
	Datum	   *found = outbox->row->tts_values;

	if (!idem_outbox_find(outbox, lease->id) ||
		!idem_outbox_in_state(outbox, "pending") ||
		outbox->row->tts_isnull[OUTBOX_AWAITING_ACK] ||
		!DatumGetBool(found[OUTBOX_AWAITING_ACK]))
		return false;

	*now = GetCurrentTimestamp();
	if (lease->has_attempt)
		return lease->attempt == DatumGetInt32(found[OUTBOX_ATTEMPT]);
	return DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > *now;
}
