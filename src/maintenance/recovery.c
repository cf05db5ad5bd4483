/*-------------------------------------------------------------------------
 *
 * recovery.c
 *		What an administrator does after a restore, a promotion or a move.
 *
 * What was committed after the backup, or had not reached the standby, is
 * lost, but who was told of it may still be there: a worker with its claim
 * token, a relay with the id of a message.  The numbers they hold must not be
 * given to others.  Logical replication does not move sequences at all.
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
 * Lets the tokens of new claims be above "at_least"; never lowers them.  The
 * ids of new messages move on by as many, and in any case above the highest
 * there is.  Returns what new tokens are above.
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
 * The highest id of a message that there is, committed or not; or was, if it
 * has not been vacuumed.
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
 * Lets the first pending message of each key be found again, whatever was
 * deleted or changed by hand.  Returns how many it has written to.
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
