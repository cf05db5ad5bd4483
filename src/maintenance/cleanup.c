/*-------------------------------------------------------------------------
 *
 * cleanup.c
 *		Deleting expired keys and tokens, and old acknowledged messages.
 *
 * A batch runs in one transaction, for idem_cleanup() and for the background
 * worker.  Expired rows are found through an index on their time, and deleted
 * by compare and swap without waiting (store/write.c).  So a row that another
 * transaction is writing is skipped, and a row that was claimed again after
 * it was found is not deleted, because it has a newer version.
 *
 * A batch has a limited number of rows.  It ends earlier if they take long,
 * such as large responses, most of whose time goes into their TOAST tables,
 * and messages on which a lane might depend.
 *
 * The index entries of deleted rows stay until vacuum can remove them, which
 * an old snapshot can delay for hours.  A caller remembers where the last
 * batch ended and starts there, so that it need not scan them again.  Older
 * rows, which were skipped or committed late, are then found later.  So from
 * time to time a batch starts from the oldest row, using at most a hundredth
 * of the time for that.  If there is little to scan, every batch does.  A
 * batch also does so if the remembered position is in the future, because the
 * clock was set back or the retention raised.
 *
 * idem_cleanup() remembers its positions for the session.  A caller that
 * repeats it until nothing is left relies on the result.  So before it
 * reports that, it starts from the oldest row, unless that has recently taken
 * long.  After a rollback it begins anew, also after a rollback to a
 * savepoint.  idem_take_expired() does the same for one kind of rows, and
 * returns the rows.
 *
 * A table into which scale-out/move copies rows is skipped.
 *
 * No trigger can run with the worker's rights: a table with triggers is
 * refused, as everywhere.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/stratnum.h"
#include "catalog/pg_type_d.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "maintenance/cleanup.h"
#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/log_events.h"
#include "util/results.h"
#include "util/rollback.h"
#include "util/settings.h"
#include "util/times.h"

/*
 * Batches that start from the oldest row use at most this fraction of the
 * time.
 */
#define RESTART_SHARE	100

/*
 * A batch ends after this time, which is checked after each TOAST_STEP bytes
 * in TOAST tables.  Looking at a lane counts as LANE_STEP bytes.
 */
#define BATCH_USECS		INT64CONST(50000)
#define TOAST_STEP		((Size) 1024 * 1024)
#define LANE_STEP		((Size) 16 * 1024)

/* A start from the oldest row has taken long if it took longer than this. */
#define LONG_RESTART	INT64CONST(100000)

/* The default of idem_take_expired()'s "max_rows". */
#define DEFAULT_MAX_ROWS	1000

typedef struct CleanupTarget
{
	IdemRelationId table;
	IdemRelationId index;		/* its first column is the time */
	IdemCounter counter;
} CleanupTarget;

static const CleanupTarget targets[IDEM_NUM_CLEANUP_KINDS] = {
	[IDEM_CLEANUP_KEYS] =
	{IDEM_KEYS, IDEM_KEYS_EXPIRES_AT, IDEM_COUNT_KEYS_DELETED},
	[IDEM_CLEANUP_TOKENS] =
	{IDEM_TOKENS, IDEM_TOKENS_EXPIRES_AT, IDEM_COUNT_TOKENS_DELETED},
	[IDEM_CLEANUP_MESSAGES] =
	{IDEM_OUTBOX, IDEM_OUTBOX_ENDED, IDEM_COUNT_MESSAGES_DELETED},
};

const char *const idem_cleanup_names[IDEM_NUM_CLEANUP_KINDS] = {
	[IDEM_CLEANUP_KEYS] = "keys",
	[IDEM_CLEANUP_TOKENS] = "tokens",
	[IDEM_CLEANUP_MESSAGES] = "messages",
};

/*
 * The conversion of rows to jsonb, for idem_take_expired().
 */
typedef struct RowsTaken
{
	TupleDesc	desc;			/* the table's, with text instead of json */
	FmgrInfo	to_jsonb;
	MemoryContext context;		/* for one row */
	Datum		document;		/* the last row */
} RowsTaken;

/* The types of the columns that idem_cleanup() returns. */
static IdemResultType cleanup_row = {
	.ncolumns = IDEM_NUM_CLEANUP_KINDS,
	.columns = {INT8OID, INT8OID, INT8OID},
};

/* The positions of idem_cleanup() and idem_take_expired(). */
static IdemCleanupPosition places[IDEM_NUM_CLEANUP_KINDS];

static IdemCleanupKind kind_arg(FunctionCallInfo fcinfo, int n);
static int64 clean(IdemCleanupKind kind, int batch_size,
				   ReturnSetInfo *result, bool *more);
static void forget_places(void);
static int64 delete_between(IdemCursor *cursor, IdemRelationId index,
							TimestampTz *from, TimestampTz until, int limit,
							ReturnSetInfo *result, bool *more);
static bool is_signpost(IdemCursor *cursor);
static void take_begin(RowsTaken *taken, IdemCursor *cursor);
static void take_document(RowsTaken *taken, IdemCursor *cursor);
static void take_end(RowsTaken *taken);

/*
 * idem_cleanup(batch_size) -> keys_deleted, tokens_deleted, messages_deleted
 */
PG_FUNCTION_INFO_V1(idem_cleanup);
Datum
idem_cleanup(PG_FUNCTION_ARGS)
{
	int			batch_size = idem_cleanup_batch_size;
	bool		more = false;
	Datum		values[IDEM_NUM_CLEANUP_KINDS];
	bool		nulls[IDEM_NUM_CLEANUP_KINDS] = {0};

	if (!PG_ARGISNULL(0))
		batch_size = PG_GETARG_INT32(0);
	if (batch_size < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "batch_size")));

	for (int kind = 0; kind < IDEM_NUM_CLEANUP_KINDS; kind++)
	{
		bool		kind_more;

		values[kind] = Int64GetDatum(clean(kind, batch_size, NULL,
										   &kind_more));
		more |= kind_more;
	}
	CHECK_FOR_INTERRUPTS();
	if (!more)
		idem_report_cleanup_at_commit();
	PG_RETURN_DATUM(idem_result(fcinfo, &cleanup_row, values, nulls));
}

/*
 * idem_take_expired(kind, max_rows) -> setof jsonb
 */
PG_FUNCTION_INFO_V1(idem_take_expired);
Datum
idem_take_expired(PG_FUNCTION_ARGS)
{
	IdemCleanupKind kind = kind_arg(fcinfo, 0);
	int			max_rows = DEFAULT_MAX_ROWS;
	bool		more;

	if (!PG_ARGISNULL(1))
		max_rows = PG_GETARG_INT32(1);
	if (max_rows < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "max_rows"),
				 errhint("Omit it to take up to %d rows.",
						 DEFAULT_MAX_ROWS)));

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	(void) clean(kind, max_rows, (ReturnSetInfo *) fcinfo->resultinfo, &more);
	CHECK_FOR_INTERRUPTS();
	return (Datum) 0;
}

/*
 * Read argument "n", the name of a kind.  Raises 22004, 22023.
 */
static IdemCleanupKind
kind_arg(FunctionCallInfo fcinfo, int n)
{
	char	   *name = TextDatumGetCString(idem_required_arg(fcinfo, n,
															 "kind"));

	for (int kind = 0; kind < IDEM_NUM_CLEANUP_KINDS; kind++)
	{
		if (strcmp(name, idem_cleanup_names[kind]) == 0)
			return kind;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("argument \"%s\" does not name a kind of rows", "kind"),
			 errhint("Pass 'keys', 'tokens' or 'messages'.")));
}

/*
 * Delete a batch of one kind, from this session's position on.  The rows go
 * to "result", unless it is NULL.
 */
static int64
clean(IdemCleanupKind kind, int batch_size, ReturnSetInfo *result, bool *more)
{
	IdemCleanupPosition *place = &places[kind];
	int64		deleted;
	int64		restart_at = place->restart_at;

	idem_forget_on_rollback(forget_places);
	do
		deleted = idem_cleanup_batch(kind, batch_size, place, result, more);
	while (*more && deleted == 0);

	if (!*more && place->restart_at == restart_at && !ProcDiePending &&
		place->restart_took <= LONG_RESTART)
	{
		place->restart_at = 0;
		deleted += idem_cleanup_batch(kind, batch_size - deleted, place,
									  result, more);
	}
	return deleted;
}

static void
forget_places(void)
{
	memset(places, 0, sizeof(places));
}

/*
 * Delete up to "batch_size" expired rows of one kind.  Returns their number,
 * and whether there might be "more".  Also stops if the process has been
 * asked to end, which the caller must check.  The rows go to "result" as
 * jsonb, unless it is NULL.
 *
 * Starts at "position", and moves it.
 */
int64
idem_cleanup_batch(IdemCleanupKind kind, int batch_size,
				   IdemCleanupPosition *position, ReturnSetInfo *result,
				   bool *more)
{
	const CleanupTarget *target = &targets[kind];
	IdemCursor	cursor;
	int64		begin;
	TimestampTz from = DT_NOBEGIN;
	TimestampTz until;
	bool		resume;
	int64		deleted;

	idem_cursor_open(&cursor, target->table, RowExclusiveLock);
	begin = idem_monotonic_time();
	until = idem_add_ms(GetCurrentTimestamp(), -idem_cleanup_retention(kind));
	if (position->table != RelationGetRelid(cursor.table->rel))
		memset(position, 0, sizeof(*position));
	position->table = RelationGetRelid(cursor.table->rel);
	resume = begin < position->restart_at && position->reached <= until;
	if (resume)
		from = position->reached;
	deleted = delete_between(&cursor, target->index, &from, until, batch_size,
							 result, more);
	idem_cursor_close(&cursor);
	idem_count(target->counter, deleted);

	if (deleted > 0 && idem_event_is_logged(IDEM_EVENT_CLEANED))
	{
		StringInfoData line;

		idem_log_begin(&line, IDEM_EVENT_CLEANED);
		idem_log_text(&line, "kind",
					  CStringGetTextDatum(idem_cleanup_names[kind]));
		idem_log_number(&line, "rows", deleted);
		idem_log_end(&line);
	}
	if (*more || from > position->reached || position->reached > until)
		position->reached = from;
	if (!resume)
	{
		int64		end = idem_monotonic_time();

		position->restart_took = end - begin;
		position->restart_at = end + position->restart_took * RESTART_SHARE;
	}
	return deleted;
}

/*
 * Return the owner of the table of a kind.
 */
Oid
idem_cleanup_owner(IdemCleanupKind kind)
{
	IdemCursor	cursor;
	Oid			owner;

	idem_cursor_open(&cursor, targets[kind].table, RowExclusiveLock);
	owner = cursor.table->rel->rd_rel->relowner;
	idem_cursor_close(&cursor);
	return owner;
}

/*
 * Return how long rows are kept beyond their time, in milliseconds.
 */
double
idem_cleanup_retention(IdemCleanupKind kind)
{
	switch (kind)
	{
		case IDEM_CLEANUP_KEYS:
			return idem_expired_key_policy == IDEM_EXPIRED_REJECT ?
				idem_tombstone_retention : 0;
		case IDEM_CLEANUP_TOKENS:
			return 0;
		case IDEM_CLEANUP_MESSAGES:
			return idem_outbox_retention;
	}
	return 0;					/* keep compiler quiet */
}

/*
 * Delete up to "limit" rows whose time is from "from" to "until".  Sets
 * "from" to the time of the last row that was found, deleted or not.  Returns
 * the number of deleted rows, and whether there might be "more": if so, some
 * were deleted, or "from" has moved on.  So a caller that repeats this
 * reaches the end, even if many rows with the same time cannot be deleted.
 */
static int64
delete_between(IdemCursor *cursor, IdemRelationId index,
			   TimestampTz *from, TimestampTz until, int limit,
			   ReturnSetInfo *result, bool *more)
{
	ScanKeyData keys[2];
	Snapshot	snapshot;
	IdemCursor	lanes;			/* a second cursor, to look at lanes */
	bool		lanes_are_open = false;
	RowsTaken	taken;
	bool		is_null = false;
	int			column;
	int64		deleted = 0;
	int64		begin = idem_monotonic_time();
	TimestampTz start = *from;
	Size		work = 0;
	bool		end = false;

	snapshot = RegisterSnapshot(GetTransactionSnapshot());
	if (idem_rows_arrive(cursor->table))
	{
		UnregisterSnapshot(snapshot);
		*more = false;
		return 0;
	}

	idem_key_time(&keys[0], 1, BTGreaterEqualStrategyNumber, *from);
	idem_key_time(&keys[1], 1, BTLessEqualStrategyNumber, until);
	idem_scan(cursor, index, snapshot, keys, 2);
	column = cursor->index->rd_index->indkey.values[0] - 1;
	if (result != NULL)
		take_begin(&taken, cursor);

	while (deleted < limit && !end &&
		   idem_scan_next(cursor, ForwardScanDirection))
	{
		/* The caller checks this, too. An error would go to the server log. */
		if (ProcDiePending)
			break;
		CHECK_FOR_INTERRUPTS();
		*from = DatumGetTimestampTz(cursor->row->tts_values[column]);
		IDEM_INJECTION_POINT("idem-cleanup-found");
		work += idem_external_size(cursor);
		if (is_signpost(cursor))
			work += LANE_STEP;
		if (work >= TOAST_STEP)
		{
			work = 0;
			end = idem_monotonic_time() - begin >= BATCH_USECS &&
				(deleted > 0 || *from > start);
		}
		if (is_signpost(cursor))
		{
			if (!lanes_are_open)
				idem_cursor_open_beside(&lanes, cursor);
			lanes_are_open = true;
			if (!idem_lane_remove_signpost(cursor, &lanes))
				continue;
		}
		if (result != NULL)
			take_document(&taken, cursor);
		if (idem_delete(cursor, false) == IDEM_WRITE_DONE)
		{
			deleted++;
			if (result != NULL)
				tuplestore_putvalues(result->setResult, result->setDesc,
									 &taken.document, &is_null);
		}
	}
	if (result != NULL)
		take_end(&taken);
	if (lanes_are_open)
		idem_cursor_close(&lanes);
	*more = end || deleted == limit;

	idem_scan_end(cursor);
	UnregisterSnapshot(snapshot);
	return deleted;
}

/*
 * Might a lane depend on the row that was found?  See outbox/lanes.c.
 */
static bool
is_signpost(IdemCursor *cursor)
{
	return cursor->table->id == IDEM_OUTBOX &&
		!cursor->row->tts_isnull[OUTBOX_KEY_HASH] &&
		DatumGetBool(cursor->row->tts_values[OUTBOX_IN_DUE_INDEX]);
}

/*
 * Prepare to convert rows of an open table to jsonb.
 *
 * The conversion is that of to_jsonb(), except that columns of type json
 * become strings.  jsonb cannot hold every json value, and a row that cannot
 * be converted would stay forever.
 */
static void
take_begin(RowsTaken *taken, IdemCursor *cursor)
{
	Const	   *row = makeNullConst(RECORDOID, -1, InvalidOid);

	taken->desc = CreateTupleDescCopy(RelationGetDescr(cursor->table->rel));
	taken->desc->tdtypeid = RECORDOID;
	taken->desc->tdtypmod = -1;
	for (int i = 0; i < taken->desc->natts; i++)
	{
		Form_pg_attribute column = TupleDescAttr(taken->desc, i);

		if (column->atttypid == JSONOID)
			column->atttypid = TEXTOID;
	}
	BlessTupleDesc(taken->desc);

	/* The function finds the type of its argument in the expression. */
	fmgr_info(F_TO_JSONB, &taken->to_jsonb);
	fmgr_info_set_expr((Node *) makeFuncExpr(F_TO_JSONB, JSONBOID,
											 list_make1(row), InvalidOid,
											 InvalidOid,
											 COERCE_EXPLICIT_CALL),
					   &taken->to_jsonb);
	taken->context = AllocSetContextCreate(CurrentMemoryContext,
										   "idempotency expired row",
										   ALLOCSET_DEFAULT_SIZES);
}

/*
 * Convert the row that was found.  It has not been deleted yet, so its values
 * in the TOAST table are there.
 */
static void
take_document(RowsTaken *taken, IdemCursor *cursor)
{
	MemoryContext old;
	HeapTuple	row;

	MemoryContextReset(taken->context);
	old = MemoryContextSwitchTo(taken->context);
	slot_getallattrs(cursor->row);
	row = heap_form_tuple(taken->desc, cursor->row->tts_values,
						  cursor->row->tts_isnull);
	taken->document = FunctionCall1(&taken->to_jsonb,
									HeapTupleGetDatum(row));
	MemoryContextSwitchTo(old);
}

static void
take_end(RowsTaken *taken)
{
	MemoryContextDelete(taken->context);
	FreeTupleDesc(taken->desc);
}
