/*-------------------------------------------------------------------------
 *
 * store.c
 *		All access to the tuples of the extension's tables.
 *
 * The functions here do for one row, found by primary key, what the executor
 * does for INSERT ... ON CONFLICT and UPDATE, without planner, executor or
 * SPI.  What the executor would otherwise look after is done here or in
 * relations.c: replica identity, REPEATABLE READ and SERIALIZABLE, all
 * indexes, the command counter.  The permission check is EXECUTE on the
 * SQL function; the read-only, recovery and parallel-mode guards are in
 * idem_table_open().
 *
 * Finding
 *
 * idem_find() reads with a dirty snapshot.  It sees committed rows, our own,
 * and those that other transactions are writing, and says which is which, so
 * that a caller that must not wait can answer from it.  A committed row wins
 * over its uncommitted successor.  One thing a dirty scan cannot promise: a
 * row whose key moves to a new index entry while the scan is between the
 * index page and the heap may be missed in both versions.  IDEM_FIND_NONE is
 * therefore a hint, to be followed by idem_insert(), which is exact.  Callers
 * that need "not there" to be exact use idem_find_latest(), which reads with
 * a new MVCC snapshot.
 *
 * Both begin where this transaction has written the row last, if it has (see
 * own_writes.c), and else with the row's newest version: versions that nobody
 * can remove yet, for somebody's old snapshot, may be thousands.
 *
 * Under REPEATABLE READ and SERIALIZABLE both raise 40001 when the row they
 * would return was committed after the transaction's snapshot.  SERIALIZABLE
 * also needs the SIREAD locks that only a scan with the transaction's own
 * snapshot takes, so there every find is preceded by such a scan.
 *
 * Writing
 *
 * idem_insert() is ExecInsert()'s speculative insertion: the tuple goes into
 * the heap under a speculative token, then into the indexes, where a unique
 * index only reports a conflict; then it is confirmed, or killed.  It never
 * waits for another transaction.  Every ready unique index on the primary
 * key's columns is an arbiter, so REINDEX CONCURRENTLY cannot turn a conflict
 * into a unique violation.
 *
 * Two sessions that insert the same key at once may each see the other's
 * tuple and both kill their own.  They cannot then both report the other as
 * holder: each looks again only after its own tuple is dead, so the later one
 * to die finds nothing of the earlier.
 *
 * idem_update() and idem_delete() compare and swap: they write only if the
 * version that was found is still the newest, and otherwise send the caller
 * back to find.  Where they must not wait they lock the row first, as SKIP
 * LOCKED does: heap_update() cannot be told not to wait.  The slot keeps its
 * buffer pinned from find to write, so that no pruning can reuse the line
 * pointer in between.
 *
 * Each write is followed by CommandCounterIncrement(), so that a later call
 * in the same SQL statement sees it and can update it.  So is what that
 * statement itself, a superuser's DELETE say, has written when a call begins:
 * a dirty snapshot sees it at once, so an MVCC snapshot must, too.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/subtrans.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "idempotency.h"
#include "own_writes.h"
#include "settings.h"
#include "store.h"
#include "wait.h"

/*
 * The index entries of a row's versions come in the order of their places in
 * the table, where later ones mostly lie behind earlier ones.
 */
#define NEWEST_FIRST	BackwardScanDirection

/* So many new rows are inserted together, or so many bytes of them. */
#define MAX_ROWS_AT_ONCE	500
#define MAX_SIZE_AT_ONCE	((Size) 64 * 1024)

static bool find_dirty(IdemTable *table, const Datum *key, IdemFind *result);
static bool find_own_write(IdemTable *table, const Datum *key);
static bool has_key(IdemTable *table, const Datum *key);
static uint32 hash_key(IdemTable *table, const Datum *key);
static void remember_write(IdemTable *table, TupleTableSlot *slot,
						   bool heap_only);
static IndexScanDesc begin_scan(IdemTable *table, const Datum *key,
								Snapshot snapshot);
static bool next_row(IdemTable *table, IndexScanDesc scan,
					 TupleTableSlot *slot);
static void end_scan(IdemTable *table, IndexScanDesc scan);
static Oid	key_type(IdemTable *table, int i);
static void take_siread_locks(IdemTable *table, const Datum *key);
static void accept_row(IdemTable *table);
static bool is_own(TupleTableSlot *row);
static bool is_speculative(TupleTableSlot *row);
static IdemIndexes *open_indexes(IdemTable *table);
static void flush_rows(IdemAppender *appender);
static TupleTableSlot *make_slot(IdemTable *table, Datum *values,
								 bool *nulls);
static void fill_slot(TupleTableSlot *slot, IdemTable *table, Datum *values,
					  bool *nulls);
static TM_Result lock_row(IdemTable *table, LockTupleMode mode,
						  LockWaitPolicy policy, TM_FailureData *failure);
static TupleTableSlot *lock_slot(IdemTable *table);
static IdemWrite finish_write(IdemTable *table, TM_Result result);
static void sleep_on_holder(void *arg);
static void sleep_on_transaction(TransactionId xid);

/*
 * Open a table for one call; idem_table_close() ends it, or an error.
 *
 * With any lock but AccessShareLock the caller means to write: raises 25006
 * in a read-only transaction or during recovery, 25000 in a parallel worker,
 * and 42501 in a session that lacks the operator's settings.
 */
void
idem_table_open(IdemTable *table, IdemRelationId id, LOCKMODE lockmode)
{
	if (lockmode != AccessShareLock)
	{
		PreventCommandIfReadOnly("an idempotency function that writes");
		PreventCommandIfParallelMode("an idempotency function that writes");
		PreventCommandDuringRecovery("an idempotency function that writes");
		idem_check_settings();
		CommandCounterIncrement();
	}

	table->id = id;
	table->rel = idem_relation_open(id, lockmode);
	table->pkey = index_open(RelationGetPrimaryKeyIndex(table->rel, false),
							 lockmode);
	table->ncolumns = idem_relation_columns(id);
	table->row = table_slot_create(table->rel, NULL);
	table->locked = NULL;
	table->written = NULL;
	table->for_many = false;
	table->scan = NULL;
	table->context = CurrentMemoryContext;
	table->indexes = NULL;
	table->holder = InvalidTransactionId;
	table->speculative_token = 0;
	table->lock_mode = LockTupleNoKeyExclusive;
}

/*
 * Release what idem_table_open() took.  The table's lock stays until the
 * transaction ends, as after any statement.
 */
void
idem_table_close(IdemTable *table)
{
	if (table->indexes != NULL)
		idem_indexes_close(table->indexes);
	if (table->scan != NULL)
		index_endscan(table->scan);
	if (table->written != NULL)
		ExecDropSingleTupleTableSlot(table->written);
	if (table->locked != NULL)
		ExecDropSingleTupleTableSlot(table->locked);
	ExecDropSingleTupleTableSlot(table->row);
	index_close(table->pkey, NoLock);
	table_close(table->rel, NoLock);
}

/*
 * The same, and give back its locks, which were taken in the current
 * subtransaction: for a caller that has written nothing since, and is to sleep
 * on something that the deadlock detector does not know of.  Who waits for all
 * who have the table locked, and all who come after him, would wait for the
 * sleeper, and so might those that it sleeps for.  A lock that the transaction
 * had before, it keeps.
 */
void
idem_table_leave(IdemTable *table, LOCKMODE lockmode)
{
	Oid			relid = RelationGetRelid(table->rel);
	Oid			pkey = RelationGetRelid(table->pkey);

	idem_table_close(table);
	UnlockRelationOid(pkey, lockmode);
	idem_relation_unlock(relid, lockmode);
}

/*
 * Find the row with this primary key as it is at this moment, whoever wrote
 * it.  The key is text or a bigint, its columns in the table's order.  Fills
 * table->row for IDEM_FIND_ROW and table->holder.
 *
 * Raises 40001 where the transaction's snapshot must not see the row.
 */
IdemFind
idem_find(IdemTable *table, const Datum *key)
{
	IdemFind	result = IDEM_FIND_ROW;

	if (!find_own_write(table, key))
	{
		take_siread_locks(table, key);
		while (!find_dirty(table, key, &result))
			CHECK_FOR_INTERRUPTS();

		if (result == IDEM_FIND_ROW)
			accept_row(table);
	}
	IDEM_INJECTION_POINT("idem-found");
	return result;
}

/*
 * Find the row with a dirty snapshot.
 *
 * Returns false if it has to be done again: a transaction may commit the new
 * version of a row after we have come by that, and before we come by the old
 * one.  What is found to be pending is so only if it still is in the end.
 */
static bool
find_dirty(IdemTable *table, const Datum *key, IdemFind *result)
{
	SnapshotData dirty;
	IndexScanDesc scan;
	TransactionId first_holder = InvalidTransactionId;

	InitDirtySnapshot(dirty);
	table->holder = InvalidTransactionId;
	table->speculative_token = 0;
	*result = IDEM_FIND_NONE;
	scan = begin_scan(table, key, &dirty);
	while (next_row(table, scan, table->row))
	{
		table->held_tid = table->row->tts_tid;
		if (!TransactionIdIsValid(dirty.xmin))
		{
			*result = IDEM_FIND_ROW;
			table->holder = dirty.xmax;
			table->speculative_token = 0;
			break;
		}

		if (*result == IDEM_FIND_NONE)
			first_holder = dirty.xmin;
		*result = IDEM_FIND_PENDING;
		table->holder = dirty.xmin;
		table->speculative_token = dirty.speculativeToken;
		IDEM_INJECTION_POINT("idem-found-pending");
	}
	end_scan(table, scan);

	return *result != IDEM_FIND_PENDING ||
		(TransactionIdIsInProgress(first_holder) &&
		 TransactionIdIsInProgress(table->holder));
}

/*
 * Find the newest committed version of the row, or our own.  What other
 * transactions have not committed does not exist for it.
 *
 * Raises 40001 where the transaction's snapshot must not see the row.
 */
bool
idem_find_latest(IdemTable *table, const Datum *key)
{
	bool		found = find_own_write(table, key);

	if (!found)
	{
		Snapshot	snapshot;

		take_siread_locks(table, key);

		snapshot = RegisterSnapshot(GetLatestSnapshot());
		found = idem_find_visible(table, key, snapshot);
		UnregisterSnapshot(snapshot);
		if (found)
			accept_row(table);
	}
	IDEM_INJECTION_POINT("idem-found-latest");
	return found;
}

/*
 * Find the row as an MVCC snapshot sees it that is newer than the
 * transaction's: for a caller whose rows must belong together.
 *
 * Raises 40001 where the transaction's snapshot must not see the row.
 */
bool
idem_find_as_of(IdemTable *table, const Datum *key, Snapshot snapshot)
{
	bool		found;

	take_siread_locks(table, key);
	found = idem_find_visible(table, key, snapshot);
	if (found)
		accept_row(table);
	return found;
}

/*
 * Find the version of the row that an MVCC snapshot sees.
 *
 * A transaction's snapshot may see two: one that others have deleted since,
 * and the one that we have put in its place.  Ours counts.
 */
bool
idem_find_visible(IdemTable *table, const Datum *key, Snapshot snapshot)
{
	IndexScanDesc scan = begin_scan(table, key, snapshot);
	bool		found;

	found = next_row(table, scan, table->row);
	if (found && IsolationUsesXactSnapshot() && !is_own(table->row) &&
		TransactionIdIsValid(GetTopTransactionIdIfAny()) &&
		next_row(table, scan, lock_slot(table)))
		ExecCopySlot(table->row, table->locked);
	end_scan(table, scan);

	table->holder = InvalidTransactionId;
	table->speculative_token = 0;
	if (found)
		slot_getallattrs(table->row);
	return found;
}

/*
 * Find the row where this transaction has put its newest version, which saves
 * the search where a claim is completed in its own transaction, and passing
 * all versions where one row is written many times.  A row of our own is the
 * newest version if it is visible at all: nobody else can have touched it.
 * Nor can anybody's write conflict with our reading it, so it needs no SIREAD
 * lock.
 *
 * Where the index has an entry for it, it is fetched as an index scan does,
 * which also prunes a page that is nearly full: without that, completing keys
 * one after the other would leave every claim's dead version behind until
 * vacuum comes.
 */
static bool
find_own_write(IdemTable *table, const Datum *key)
{
	TupleTableSlot *row = table->row;
	ItemPointerData tid;
	bool		heap_only;
	bool		found;

	if (!idem_has_written() ||
		!idem_recall_write(table->rel, hash_key(table, key), &tid, &heap_only))
		return false;

	if (heap_only)
		found = table_tuple_fetch_row_version(table->rel, &tid, SnapshotSelf,
											  row);
	else
	{
		IndexFetchTableData *fetch;
		bool		call_again = false;

		fetch = table_index_fetch_begin(table->rel, SO_NONE);
		found = table_index_fetch_tuple(fetch, &tid, SnapshotSelf, row,
										&call_again, NULL);
		table_index_fetch_end(fetch);
	}
	if (!found)
		return false;
	slot_getallattrs(row);
	if (!has_key(table, key))
		return false;

	Assert(is_own(row));
	table->row_is_own = true;
	table->holder = InvalidTransactionId;
	table->speculative_token = 0;
	table->held_tid = row->tts_tid;
	return true;
}

/*
 * Has table->row this primary key?
 */
static bool
has_key(IdemTable *table, const Datum *key)
{
	Form_pg_index pkey = table->pkey->rd_index;
	AttrNumber	first = idem_first_key_column(table);

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		AttrNumber	column = pkey->indkey.values[i];
		Datum		value = table->row->tts_values[column - 1];

		if (key_type(table, i) == INT8OID ?
			DatumGetInt64(value) != DatumGetInt64(key[column - first]) :
			!idem_text_equal(value, key[column - first]))
			return false;
	}
	return true;
}

static uint32
hash_key(IdemTable *table, const Datum *key)
{
	Form_pg_index pkey = table->pkey->rd_index;
	AttrNumber	first = idem_first_key_column(table);
	uint32		hash = 0;

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		Datum		value = key[pkey->indkey.values[i] - first];
		uint32		part;

		if (key_type(table, i) == INT8OID)
		{
			int64		number = DatumGetInt64(value);

			part = hash_bytes((unsigned char *) &number, sizeof(number));
		}
		else
		{
			text	   *string = DatumGetTextPP(value);

			part = hash_bytes((unsigned char *) VARDATA_ANY(string),
							  VARSIZE_ANY_EXHDR(string));
		}
		hash = hash_combine(hash, part);
	}
	return hash;
}

/*
 * Remember where the row in "slot" has been written.
 */
static void
remember_write(IdemTable *table, TupleTableSlot *slot, bool heap_only)
{
	AttrNumber	first = idem_first_key_column(table);
	uint32		hash = hash_key(table, &slot->tts_values[first - 1]);

	idem_remember_write(table->rel, hash, &slot->tts_tid, heap_only);
}

static IndexScanDesc
begin_scan(IdemTable *table, const Datum *key, Snapshot snapshot)
{
	Form_pg_index pkey = table->pkey->rd_index;
	int			nkeys = pkey->indnkeyatts;
	AttrNumber	first = idem_first_key_column(table);
	ScanKeyData scankeys[INDEX_MAX_KEYS];
	IndexScanDesc scan;
	MemoryContext old;

	for (int i = 0; i < nkeys; i++)
	{
		ScanKeyEntryInitialize(&scankeys[i], 0, i + 1,
							   BTEqualStrategyNumber, InvalidOid,
							   C_COLLATION_OID,
							   key_type(table, i) == INT8OID ?
							   F_INT8EQ : F_TEXTEQ,
							   key[pkey->indkey.values[i] - first]);
	}

	old = MemoryContextSwitchTo(table->context);
	if (table->scan == NULL)
	{
		scan = index_beginscan(table->rel, table->pkey, snapshot, NULL, nkeys,
							   0, SO_NONE);
		if (table->for_many)
			table->scan = scan;
	}
	else
	{
		scan = table->scan;
		scan->xs_snapshot = snapshot;
	}
	index_rescan(scan, scankeys, nkeys, NULL, 0);
	MemoryContextSwitchTo(old);
	return scan;
}

/*
 * The next version of the row, newest first.  What a scan allocates on its way
 * has to last for as long as the scan.
 */
static bool
next_row(IdemTable *table, IndexScanDesc scan, TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(table->context);
	bool		found = index_getnext_slot(scan, NEWEST_FIRST, slot);

	MemoryContextSwitchTo(old);
	return found;
}

/*
 * End a scan, or keep it for the next, but none of the pages that it is at:
 * the caller may sleep.
 */
static void
end_scan(IdemTable *table, IndexScanDesc scan)
{
	if (table->scan == NULL)
		index_endscan(scan);
	else
	{
		index_rescan(scan, NULL, scan->numberOfKeys, NULL, 0);
		scan->xs_snapshot = InvalidSnapshot;
	}
}

/*
 * The type of a column of the primary key, counted from 0 in its order.
 */
static Oid
key_type(IdemTable *table, int i)
{
	return TupleDescAttr(RelationGetDescr(table->pkey), i)->atttypid;
}

/*
 * The first column of the primary key in the table's order.
 */
AttrNumber
idem_first_key_column(IdemTable *table)
{
	Form_pg_index pkey = table->pkey->rd_index;
	AttrNumber	first = pkey->indkey.values[0];

	for (int i = 1; i < pkey->indnkeyatts; i++)
		first = Min(first, pkey->indkey.values[i]);
	return first;
}

/*
 * How many bytes of the found row are in the TOAST table.
 */
Size
idem_external_size(IdemTable *table)
{
	TupleDesc	desc = RelationGetDescr(table->rel);
	Size		size = 0;

	for (int i = 0; i < table->ncolumns; i++)
	{
		struct varatt_external toast;
		struct varlena *value;

		if (TupleDescAttr(desc, i)->attlen != -1 ||
			table->row->tts_isnull[i])
			continue;
		value = (struct varlena *) DatumGetPointer(table->row->tts_values[i]);
		if (!VARATT_IS_EXTERNAL_ONDISK(value))
			continue;
		VARATT_EXTERNAL_GET_POINTER(toast, value);
		size += VARATT_EXTERNAL_GET_EXTSIZE(toast);
	}
	return size;
}

/*
 * Under SERIALIZABLE, read the key with the transaction's own snapshot for
 * the sake of the predicate locks; what it finds does not matter here.
 */
static void
take_siread_locks(IdemTable *table, const Datum *key)
{
	if (unlikely(IsolationIsSerializable()))
		(void) idem_find_visible(table, key, GetActiveSnapshot());
}

/*
 * Take note of who wrote table->row, and refuse it under REPEATABLE READ and
 * SERIALIZABLE if it is too new, as INSERT ... ON CONFLICT does.
 *
 * Also refuse a row of ours that is still being inserted: a function in an
 * index has called us.  Whatever that call did to the row, the end of the
 * insertion would overwrite.
 */
static void
accept_row(IdemTable *table)
{
	table->row_is_own = is_own(table->row);

	if (unlikely(table->row_is_own && is_speculative(table->row)))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("row of table \"%s\" is still being inserted",
						RelationGetRelationName(table->rel)),
				 errdetail("A function in an index of the table has called an idempotency function for the same row.")));

	if (IsolationUsesXactSnapshot() && !table->row_is_own &&
		!table_tuple_satisfies_snapshot(table->rel, table->row,
										GetActiveSnapshot()))
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errhint("The transaction might succeed if retried.")));

	slot_getallattrs(table->row);
}

/*
 * Has this transaction written the row?  A frozen one keeps its xmin, which
 * then says nothing: the number may come again.
 */
static bool
is_own(TupleTableSlot *row)
{
	bool		shouldFree;
	HeapTuple	tuple = ExecFetchSlotHeapTuple(row, false, &shouldFree);
	TransactionId xmin = HeapTupleHeaderGetXmin(tuple->t_data);

	Assert(!shouldFree);
	return TransactionIdIsCurrentTransactionId(xmin);
}

/*
 * Has the row been put into the table speculatively, and not been confirmed?
 */
static bool
is_speculative(TupleTableSlot *row)
{
	bool		shouldFree;
	HeapTuple	tuple = ExecFetchSlotHeapTuple(row, false, &shouldFree);

	Assert(!shouldFree);
	return HeapTupleHeaderIsSpeculative(tuple->t_data);
}

/*
 * Has this transaction written table->row in or after that command?
 */
bool
idem_is_written_since(IdemTable *table, CommandId command)
{
	bool		shouldFree;
	HeapTuple	tuple;

	if (!is_own(table->row))
		return false;
	tuple = ExecFetchSlotHeapTuple(table->row, false, &shouldFree);
	return HeapTupleHeaderGetCmin(tuple->t_data) >= command;
}

/*
 * Begin a scan through another index of the table; idem_scan_restart() tells
 * where, with "nkeys" keys.  Without a snapshot it is a dirty scan: it sees
 * what others are writing, and what this transaction has written before, but
 * may miss a row that moves to another entry meanwhile.
 */
void
idem_scan_begin(IdemScan *scan, IdemTable *table, IdemRelationId index,
				Snapshot snapshot, int nkeys)
{
	scan->table = table;
	scan->index = idem_index_open(index, table->rel);
	scan->is_dirty = snapshot == NULL;
	if (scan->is_dirty)
	{
		InitDirtySnapshot(scan->dirty);
		scan->command = GetCurrentCommandId(false);
		snapshot = &scan->dirty;
	}
	scan->scan = index_beginscan(table->rel, scan->index, snapshot, NULL,
								 nkeys, 0, SO_NONE);
}

/*
 * Begin a scan through the primary key, for rows of which the first "ncolumns"
 * columns of that, in the table's order, have certain values;
 * idem_scan_restart_key() tells which.  The columns are text.
 */
void
idem_scan_begin_key(IdemScan *scan, IdemTable *table, Snapshot snapshot,
					int ncolumns)
{
	scan->table = table;
	scan->index = index_open(RelationGetRelid(table->pkey), AccessShareLock);
	scan->is_dirty = false;
	scan->scan = index_beginscan(table->rel, scan->index, snapshot, NULL,
								 ncolumns, 0, SO_NONE);
}

/*
 * Go to the first row that has this beginning of a key.
 */
void
idem_scan_restart_key(IdemScan *scan, const Datum *key)
{
	Form_pg_index pkey = scan->index->rd_index;
	AttrNumber	first = idem_first_key_column(scan->table);
	ScanKeyData scankeys[INDEX_MAX_KEYS];
	int			nkeys = 0;

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		int			column = pkey->indkey.values[i] - first;

		if (column < scan->scan->numberOfKeys)
			ScanKeyEntryInitialize(&scankeys[nkeys++], 0, i + 1,
								   BTEqualStrategyNumber, InvalidOid,
								   C_COLLATION_OID, F_TEXTEQ, key[column]);
	}
	index_rescan(scan->scan, scankeys, nkeys, NULL, 0);
}

/*
 * Go to the first row that the keys select.
 */
void
idem_scan_restart(IdemScan *scan, ScanKey keys)
{
	index_rescan(scan->scan, keys, scan->scan->numberOfKeys, NULL, 0);
}

/*
 * Fetch the next row into table->row.  Returns false at the end.
 */
bool
idem_scan_next(IdemScan *scan, ScanDirection direction)
{
	IdemTable  *table = scan->table;

	do
	{
		if (!index_getnext_slot(scan->scan, direction, table->row))
			return false;
	} while (scan->is_dirty && idem_is_written_since(table, scan->command));
	table->holder = InvalidTransactionId;
	if (scan->is_dirty)
		table->holder = TransactionIdIsValid(scan->dirty.xmin) ?
			scan->dirty.xmin : scan->dirty.xmax;
	table->speculative_token = 0;
	slot_getallattrs(table->row);
	return true;
}

void
idem_scan_end(IdemScan *scan)
{
	index_endscan(scan->scan);
	index_close(scan->index, NoLock);
}

/*
 * Insert a row whose key is new by construction: it comes from a sequence.
 */
void
idem_append(IdemTable *table, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = make_slot(table, values, nulls);
	IdemIndexes *indexes = open_indexes(table);

	table_tuple_insert(table->rel, slot, GetCurrentCommandId(true), 0, NULL);
	IDEM_INJECTION_POINT("idem-append-heap");
	idem_indexes_append(indexes, slot);
	ExecClearTuple(slot);
	CommandCounterIncrement();
}

/*
 * Begin to insert rows as idem_append() does, but many.  They are there when
 * idem_append_end() has returned.
 */
void
idem_append_begin(IdemAppender *appender, IdemTable *table)
{
	appender->table = table;
	appender->context = AllocSetContextCreate(table->context,
											  "idempotency rows",
											  ALLOCSET_DEFAULT_SIZES);
	appender->slots = MemoryContextAlloc(table->context, MAX_ROWS_AT_ONCE *
										 sizeof(TupleTableSlot *));
	appender->nslots = 0;
	appender->nrows = 0;
	appender->size = 0;
}

/*
 * Add a row, which is copied.
 */
void
idem_append_add(IdemAppender *appender, Datum *values, bool *nulls)
{
	TupleTableSlot *slot;
	bool		shouldFree;
	MemoryContext old;

	old = MemoryContextSwitchTo(appender->table->context);
	if (appender->nrows == appender->nslots)
		appender->slots[appender->nslots++] =
			MakeSingleTupleTableSlot(RelationGetDescr(appender->table->rel),
									 &TTSOpsHeapTuple);
	slot = appender->slots[appender->nrows++];
	fill_slot(slot, appender->table, values, nulls);
	appender->size += ExecFetchSlotHeapTuple(slot, true, &shouldFree)->t_len;
	MemoryContextSwitchTo(old);
	if (appender->nrows == MAX_ROWS_AT_ONCE ||
		appender->size >= MAX_SIZE_AT_ONCE)
		flush_rows(appender);
}

void
idem_append_end(IdemAppender *appender)
{
	flush_rows(appender);
	for (int i = 0; i < appender->nslots; i++)
		ExecDropSingleTupleTableSlot(appender->slots[i]);
	pfree(appender->slots);
	MemoryContextDelete(appender->context);
	CommandCounterIncrement();
}

/*
 * Insert the rows that have been collected.
 */
static void
flush_rows(IdemAppender *appender)
{
	IdemTable  *table = appender->table;
	IdemIndexes *indexes = open_indexes(table);
	MemoryContext old;

	if (appender->nrows == 0)
		return;
	old = MemoryContextSwitchTo(appender->context);
	table_multi_insert(table->rel, appender->slots, appender->nrows,
					   GetCurrentCommandId(true), 0, NULL);
	IDEM_INJECTION_POINT("idem-append-heap");
	for (int i = 0; i < appender->nrows; i++)
	{
		CHECK_FOR_INTERRUPTS();
		idem_indexes_append(indexes, appender->slots[i]);
	}
	MemoryContextSwitchTo(old);
	MemoryContextReset(appender->context);
	appender->nrows = 0;
	appender->size = 0;
}

/*
 * Insert a row unless another with the same primary key is there, committed
 * or not.  Returns false in that case, having left nothing behind but a dead
 * tuple; the caller goes back to find.
 */
bool
idem_insert(IdemTable *table, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = make_slot(table, values, nulls);
	IdemIndexes *indexes = open_indexes(table);
	TransactionId xid = GetCurrentTransactionId();
	bool		inserted;
	uint32		token;

	token = SpeculativeInsertionLockAcquire(xid);
	table_tuple_insert_speculative(table->rel, slot, GetCurrentCommandId(true),
								   0, NULL, token);
	IDEM_INJECTION_POINT("idem-insert-heap");
	inserted = idem_indexes_insert(indexes, slot);
	IDEM_INJECTION_POINT("idem-insert-index");
	table_tuple_complete_speculative(table->rel, slot, token, inserted);
	SpeculativeInsertionLockRelease(xid);
	IDEM_INJECTION_POINT("idem-inserted");
	if (inserted)
		remember_write(table, slot, false);

	ExecClearTuple(slot);
	CommandCounterIncrement();
	return inserted;
}

/*
 * Lock table->row, as an update would, until the transaction ends.  Does not
 * wait; an update "with wait" need not, either, from then on.
 */
IdemWrite
idem_lock(IdemTable *table)
{
	TM_FailureData failure;
	TM_Result	result;

	result = lock_row(table, LockTupleNoKeyExclusive, LockWaitSkip, &failure);
	return finish_write(table, result);
}

/*
 * Replace table->row.  With "wait", sleeps until no other transaction holds
 * the row; without it, answers IDEM_WRITE_HELD.
 */
IdemWrite
idem_update(IdemTable *table, Datum *values, bool *nulls, bool wait)
{
	TupleTableSlot *slot;
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes indexes;
	TM_Result	result;

	CheckCmdReplicaIdentity(table->rel, CMD_UPDATE);

	/* An update cannot but wait; a row lock need not. */
	if (!wait)
	{
		result = lock_row(table, LockTupleNoKeyExclusive, LockWaitSkip,
						  &failure);
		if (result != TM_Ok)
			return finish_write(table, result);
		IDEM_INJECTION_POINT("idem-update-locked");
	}

	slot = make_slot(table, values, nulls);
	result = table_tuple_update(table->rel, &table->row->tts_tid, slot,
								GetCurrentCommandId(true), 0,
								GetActiveSnapshot(), InvalidSnapshot, true,
								&failure, &lockmode, &indexes);
	IDEM_INJECTION_POINT("idem-update-heap");
	if (result == TM_Ok)
	{
		bool		heap_only = (indexes == TU_None ||
								 IdemOnlySummarizing(indexes));

		if (indexes != TU_None)
			idem_indexes_update(open_indexes(table), slot, heap_only);
		remember_write(table, slot, heap_only);
	}
	ExecClearTuple(slot);
	return finish_write(table, result);
}

/*
 * Lock table->row, with or without waiting for others.  Where that is
 * refused, idem_wait() waits for the same.  This uses up no command id: whoever
 * asks whether his call has written anything is told no.
 */
static TM_Result
lock_row(IdemTable *table, LockTupleMode mode, LockWaitPolicy policy,
		 TM_FailureData *failure)
{
	TM_Result	result;

	table->lock_mode = mode;
	result = table_tuple_lock(table->rel, &table->row->tts_tid,
							  GetActiveSnapshot(), lock_slot(table),
							  GetCurrentCommandId(false), mode, policy, 0,
							  failure);
	ExecClearTuple(table->locked);
	return result;
}

/*
 * A second slot, for lock_row(), which has no use for what it is given in it,
 * and for idem_find_visible().
 */
static TupleTableSlot *
lock_slot(IdemTable *table)
{
	if (table->locked == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(table->context);

		table->locked = table_slot_create(table->rel, NULL);
		MemoryContextSwitchTo(old);
	}
	return table->locked;
}

/*
 * Delete table->row; "wait" as for idem_update().
 */
IdemWrite
idem_delete(IdemTable *table, bool wait)
{
	TM_FailureData failure;
	TM_Result	result;

	CheckCmdReplicaIdentity(table->rel, CMD_DELETE);

	result = table_tuple_delete(table->rel, &table->row->tts_tid,
								GetCurrentCommandId(true), 0,
								GetActiveSnapshot(), InvalidSnapshot, wait,
								&failure);

	/* Without wait, it gives up for a mere row lock too, even one of ours. */
	if (result == TM_BeingModified)
	{
		result = lock_row(table, LockTupleExclusive, LockWaitSkip, &failure);
		if (result == TM_Ok)
			result = table_tuple_delete(table->rel, &table->row->tts_tid,
										GetCurrentCommandId(true), 0,
										GetActiveSnapshot(), InvalidSnapshot,
										true, &failure);
	}
	IDEM_INJECTION_POINT("idem-deleted");
	return finish_write(table, result);
}

/*
 * Translate the outcome of an update or delete.
 */
static IdemWrite
finish_write(IdemTable *table, TM_Result result)
{
	switch (result)
	{
		case TM_Ok:
			CommandCounterIncrement();
			return IDEM_WRITE_DONE;

		case TM_Updated:
		case TM_Deleted:
			return IDEM_WRITE_STALE;

		case TM_BeingModified:
		case TM_WouldBlock:
			return IDEM_WRITE_HELD;

		default:
			elog(ERROR, "unexpected result %d of writing to table \"%s\"",
				 (int) result, RelationGetRelationName(table->rel));
			return IDEM_WRITE_STALE;	/* keep compiler quiet */
	}
}

/*
 * Sleep until table->holder has ended, or has given up the insertion that we
 * ran into; or, where there is no holder, until nobody has a lock on
 * table->row that the last write ran into, and that lock is ours.  The
 * deadlock detector, lock_timeout, statement_timeout and cancel work as in
 * any wait for a row.
 */
void
idem_wait(IdemTable *table)
{
	TM_FailureData failure;

	if (table->speculative_token != 0)
		SpeculativeInsertionWait(table->holder, table->speculative_token);
	else if (TransactionIdIsValid(table->holder))
		XactLockTableWait(table->holder, table->rel, &table->held_tid,
						  XLTW_Lock);
	else
		(void) lock_row(table, table->lock_mode, LockWaitBlock, &failure);
}

/*
 * Sleep like idem_wait(), but not past "deadline".  Returns false if the
 * holder was still there by then.
 */
bool
idem_wait_until(IdemTable *table, TimestampTz deadline)
{
	(void) lock_slot(table);	/* must not belong to a subtransaction */
	return idem_sleep_until(sleep_on_holder, table, deadline);
}

static void
sleep_on_holder(void *arg)
{
	IdemTable  *table = arg;

	if (TransactionIdIsValid(table->holder) && table->speculative_token == 0)
		sleep_on_transaction(table->holder);
	else
		idem_wait(table);
}

/*
 * Sleep until a transaction has ended, or a subtransaction has ended or become
 * its parent's.  In contrast to XactLockTableWait() it waits for one lock
 * only, because that is what the time limit of a sleep is for.
 */
static void
sleep_on_transaction(TransactionId xid)
{
	LOCKTAG		tag;

	SET_LOCKTAG_TRANSACTION(tag, xid);
	if (LockAcquire(&tag, ShareLock, false, true) != LOCKACQUIRE_NOT_AVAIL)
	{
		(void) LockRelease(&tag, ShareLock, false);
		if (!TransactionIdIsInProgress(xid))
			return;
		xid = SubTransGetTopmostTransaction(xid);
		SET_LOCKTAG_TRANSACTION(tag, xid);
	}
	(void) LockAcquire(&tag, ShareLock, false, false);
	(void) LockRelease(&tag, ShareLock, false);
}

/*
 * The table's indexes, opened for writing when a call first needs them.
 */
static IdemIndexes *
open_indexes(IdemTable *table)
{
	if (table->indexes == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(table->context);

		table->indexes = idem_indexes_open(table->id, table->rel,
										   table->pkey);
		MemoryContextSwitchTo(old);
	}
	return table->indexes;
}

/*
 * A slot that holds a new row, until ExecClearTuple().
 */
static TupleTableSlot *
make_slot(IdemTable *table, Datum *values, bool *nulls)
{
	if (table->written == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(table->context);

		table->written = MakeSingleTupleTableSlot(RelationGetDescr(table->rel),
												  &TTSOpsHeapTuple);
		MemoryContextSwitchTo(old);
	}
	fill_slot(table->written, table, values, nulls);
	return table->written;
}

/*
 * Have a slot hold another new row.
 */
static void
fill_slot(TupleTableSlot *slot, IdemTable *table, Datum *values, bool *nulls)
{
	TupleDesc	desc = slot->tts_tupleDescriptor;

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, desc->natts * sizeof(bool));
	memcpy(slot->tts_values, values, table->ncolumns * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, table->ncolumns * sizeof(bool));
	slot->tts_tableOid = RelationGetRelid(table->rel);
	ExecStoreVirtualTuple(slot);
	ExecMaterializeSlot(slot);	/* or else each access forms it anew */
}
