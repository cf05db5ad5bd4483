/*-------------------------------------------------------------------------
 *
 * cleanup.c
 *		Deletion of what has expired: keys, tokens, acknowledged messages.
 *
 * One batch in one transaction, for idem_cleanup() and for the background
 * worker alike.  Expired rows are found through an index on their time, and
 * deleted by compare and swap without waiting (see store.c).  So a row that
 * somebody is writing is skipped, and one that was claimed again after it was
 * found is not deleted: it has a newer version.
 *
 * No trigger can run with the worker's rights: a table that has one is
 * refused, as everywhere.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "cleanup.h"
#include "idempotency.h"
#include "log_events.h"
#include "settings.h"
#include "stats.h"
#include "store.h"

static int64 delete_until(IdemRelationId relation, IdemRelationId index,
						  TimestampTz until, int limit);

/*
 * idem_cleanup(batch_size) -> keys_deleted, tokens_deleted, messages_deleted
 */
PG_FUNCTION_INFO_V1(idem_cleanup);
Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	static IdemResultType type;
	int			batch_size = idem_cleanup_batch_size;
	IdemCleanup result;
	Datum		values[3];
	bool		nulls[3] = {0};

	if (!PG_ARGISNULL(0))
		batch_size = PG_GETARG_INT32(0);
	if (batch_size < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "batch_size")));

	idem_cleanup_batch(batch_size, &result);

	values[0] = Int64GetDatum(result.keys_deleted);
	values[1] = Int64GetDatum(result.tokens_deleted);
	values[2] = Int64GetDatum(result.messages_deleted);
	PG_RETURN_DATUM(idem_result(fcinfo, &type, values, nulls));
}

/*
 * Delete up to "batch_size" expired rows of each kind.
 */
void
idem_cleanup_batch(int batch_size, IdemCleanup *result)
{
	TimestampTz now = GetCurrentTimestamp();
	double		tombstones = idem_expired_key_policy == IDEM_EXPIRED_REJECT ?
		idem_tombstone_retention : 0;

	result->keys_deleted = delete_until(IDEM_KEYS, IDEM_KEYS_EXPIRES_AT,
										idem_add_ms(now, -tombstones),
										batch_size);
	result->tokens_deleted = delete_until(IDEM_TOKENS, IDEM_TOKENS_EXPIRES_AT,
										  now, batch_size);
	result->messages_deleted = delete_until(IDEM_OUTBOX, IDEM_OUTBOX_ACKED,
											idem_add_ms(now,
														-idem_outbox_retention),
											batch_size);

	idem_log_cleaned_event(result->keys_deleted, result->tokens_deleted,
						   result->messages_deleted);
	idem_count(IDEM_COUNT_KEYS_DELETED, result->keys_deleted);
	idem_count(IDEM_COUNT_TOKENS_DELETED, result->tokens_deleted);
	idem_count(IDEM_COUNT_MESSAGES_DELETED, result->messages_deleted);
	result->more = result->keys_deleted == batch_size ||
		result->tokens_deleted == batch_size ||
		result->messages_deleted == batch_size;
	if (!result->more)
		idem_report_cleanup();
}

/*
 * Delete up to "limit" rows whose time, the first column of "index", is not
 * after "until".  Returns how many.
 */
static int64
delete_until(IdemRelationId relation, IdemRelationId index, TimestampTz until,
			 int limit)
{
	IdemTable	table;
	IdemScan	scan;
	ScanKeyData key;
	Snapshot	snapshot;
	int64		deleted = 0;

	idem_table_open(&table, relation, RowExclusiveLock);
	snapshot = RegisterSnapshot(GetTransactionSnapshot());

	ScanKeyEntryInitialize(&key, 0, 1, BTLessEqualStrategyNumber, InvalidOid,
						   InvalidOid, F_TIMESTAMPTZ_LE,
						   TimestampTzGetDatum(until));
	idem_scan_begin(&scan, &table, index, snapshot, 1);
	idem_scan_restart(&scan, &key);
	while (deleted < limit && idem_scan_next(&scan, ForwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		if (idem_delete(&table, false) == IDEM_WRITE_DONE)
			deleted++;
	}
	idem_scan_end(&scan);

	UnregisterSnapshot(snapshot);
	idem_table_close(&table);
	return deleted;
}
