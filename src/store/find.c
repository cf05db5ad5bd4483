/*-------------------------------------------------------------------------
 *
 * find.c
 *		Finding a row by its primary key, whoever wrote it.
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
 * xact_tid_cache.c), and else with the row's newest version: versions that nobody
 * can remove yet, for somebody's old snapshot, may be thousands.
 *
 * Under REPEATABLE READ and SERIALIZABLE both raise 40001 when the row they
 * would return was committed after the transaction's snapshot.  SERIALIZABLE
 * also needs the SIREAD locks that only a scan with the transaction's own
 * snapshot takes, so there every find is preceded by such a scan.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

#include "store/internal.h"
#include "store/xact_tid_cache.h"
#include "util/compat.h"
#include "util/texts.h"

/*
 * The index entries of a row's versions come in the order of their places in
 * the table, where later ones mostly lie behind earlier ones.
 */
#define NEWEST_FIRST	BackwardScanDirection

static bool find_dirty(IdemTable *table, const Datum *key, IdemFind *result);
static bool find_own_write(IdemTable *table, const Datum *key);
static bool has_key(IdemTable *table, const Datum *key);
static IndexScanDesc begin_scan(IdemTable *table, const Datum *key,
								Snapshot snapshot);
static bool next_row(IdemTable *table, IndexScanDesc scan,
					 TupleTableSlot *slot);
static void end_scan(IdemTable *table, IndexScanDesc scan);
static void take_siread_locks(IdemTable *table, const Datum *key);
static void accept_row(IdemTable *table);
static bool is_own(TupleTableSlot *row);
static bool is_speculative(TupleTableSlot *row);

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
		next_row(table, scan, idem_spare_slot(table)))
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
		!idem_recall_write(table->rel, idem_hash_key(table, key), &tid,
						   &heap_only))
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

		if (idem_key_type(table, i) == INT8OID ?
			DatumGetInt64(value) != DatumGetInt64(key[column - first]) :
			!idem_text_equal(value, key[column - first]))
			return false;
	}
	return true;
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
							   idem_key_type(table, i) == INT8OID ?
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
 * Is the row version that was found visible to "snapshot"?
 */
bool
idem_row_is_visible(IdemTable *table, Snapshot snapshot)
{
	return table_tuple_satisfies_snapshot(table->rel, table->row, snapshot);
}
