/*-------------------------------------------------------------------------
 *
 * recovery.c
 *		Functions for administrators after a restore, a promotion or a move.
 *
 * Transactions that were committed after the backup, or had not reached the
 * standby, are lost, but clients might still act on them: a worker with its
 * claim token, a relay with the id of a message.  Their numbers must not be
 * given to others.  Logical replication does not copy sequences at all.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

#include "outbox/lanes.h"
#include "store/pg_sequence.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/compat.h"

static int64 highest_message(void);

/*
 * idem_raise_claim_tokens(at_least) -> bigint
 *
 * Raises the sequence of claim tokens to at least "at_least"; never lowers
 * it.  The ids of new messages move on by the same distance, and at least
 * above the highest existing id.  Returns the number that new tokens are
 * above.
 */
PG_FUNCTION_INFO_V1(idem_raise_claim_tokens);
Datum
idem_raise_claim_tokens(PG_FUNCTION_ARGS)
{
	int64		at_least;
	int64		moved;
	int64		ids;

	at_least = DatumGetInt64(idem_required_arg(fcinfo, 0, "at_least"));
	if (at_least > IDEM_MAX_RAISE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must not be greater than " INT64_FORMAT,
						"at_least", IDEM_MAX_RAISE)));

	ids = highest_message();
	moved = Max(at_least, 0) - idem_sequence_last(IDEM_CLAIM_TOKENS);
	moved = Max(moved, 0);
	ids = Max(ids, idem_sequence_last(IDEM_OUTBOX_IDS));
	ids = Min(ids, IDEM_MAX_RAISE);
	(void) idem_sequence_raise(IDEM_OUTBOX_IDS,
							   ids + Min(moved, IDEM_MAX_RAISE - ids));
	PG_RETURN_INT64(idem_sequence_raise(IDEM_CLAIM_TOKENS, at_least));
}

/*
 * Return the highest id of a message, committed or not, or deleted but not
 * yet vacuumed.
 */
static int64
highest_message(void)
{
	IdemCursor	outbox;
	Datum		first;
	bool		visible;
	int64		highest = 0;

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	idem_scan_entries(&outbox, IDEM_PRIMARY_KEY, NULL, 0);
	if (idem_scan_entry(&outbox, BackwardScanDirection, 1, &first, &visible))
		highest = DatumGetInt64(first);
	idem_cursor_close(&outbox);
	return highest;
}

/*
 * idem_repair_outbox() -> bigint
 *
 * Makes the first pending message of each key ready, so that takes find it
 * whatever was deleted or changed by hand.  Returns the number of rows
 * written.
 */
PG_FUNCTION_INFO_V1(idem_repair_outbox);
Datum
idem_repair_outbox(PG_FUNCTION_ARGS)
{
	IdemCursor	outbox;
	int64		repaired;

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	repaired = idem_lanes_repair(&outbox);
	idem_cursor_close(&outbox);
	PG_RETURN_INT64(repaired);
}
