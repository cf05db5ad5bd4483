/*-------------------------------------------------------------------------
 *
 * scan.c
 *		Reading through an index, and code that all ways to read share.
 *
 * A scan reads with the given snapshot.  Without a snapshot it is a dirty
 * scan: it returns rows that other transactions are writing, and reports
 * those transactions, so that the caller can skip the rows or count them.  A
 * dirty scan can miss a row that moves to another index entry meanwhile.  It
 * does not return what this transaction has written since the scan began;
 * otherwise a take could find its own rows again and again.
 *
 * A scan for rows skips any number of dead rows, whole pages of them: an old
 * snapshot can keep vacuum from removing millions.  A scan of entries bounds
 * its work.  It returns each entry of an index, and reports whether the
 * active snapshot sees a row behind it.  It takes no predicate lock, so under
 * SERIALIZABLE data must not depend on its result.
 *
 * A cursor keeps its index open until it reads through another index or is
 * closed.  From the third scan on it also keeps the scan, and uses it again
 * for the same index and number of keys.  After the end of a scan the cursor
 * pins no page, because its caller might sleep.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/itup.h"
#include "access/multixact.h"
#include "access/relscan.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "storage/bufmgr.h"
#include "storage/procarray.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

#include "store/internal.h"
#include "util/compat.h"

/* A cursor keeps its scan from the third scan on. */
#define SCANS_NOT_KEPT	2

static void start(IdemCursor *cursor, IdemRelationId index,
				  Snapshot snapshot, ScanKey keys, int nkeys);
static bool is_running(TransactionId xid);

/*
 * Begin to read through an index, from the first entry that the keys select.
 * Without a snapshot it is a dirty scan, which returns rows that others are
 * writing and rows that this transaction has written before.
 */
void
idem_scan(IdemCursor *cursor, IdemRelationId index, Snapshot snapshot,
		  ScanKey keys, int nkeys)
{
	cursor->kind = IDEM_SCAN_VISIBLE;
	if (snapshot == NULL)
	{
		cursor->kind = IDEM_SCAN_DIRTY;
		InitDirtySnapshot(cursor->dirty);
		cursor->command = GetCurrentCommandId(false);
		snapshot = &cursor->dirty;
	}
	start(cursor, index, snapshot, keys, nkeys);
}

/*
 * Begin to read the rows whose primary key begins with the first "ncolumns"
 * columns of "key", in the table's order.  Reads with any snapshot.
 */
void
idem_scan_key(IdemCursor *cursor, Snapshot snapshot, const Datum *key,
			  int ncolumns)
{
	IdemTable  *table = cursor->table;
	Form_pg_index pkey = table->pkey->rd_index;
	AttrNumber	first = idem_first_key_column(table);
	ScanKeyData keys[INDEX_MAX_KEYS];
	int			nkeys = 0;

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		int			column = pkey->indkey.values[i] - first;

		if (column >= ncolumns)
			continue;
		if (idem_key_type(table, i) == INT8OID)
			idem_key_int8(&keys[nkeys++], i + 1, BTEqualStrategyNumber,
						  DatumGetInt64(key[column]));
		else
			idem_key_text(&keys[nkeys++], i + 1, key[column]);
	}
	cursor->kind = IDEM_SCAN_VISIBLE;
	start(cursor, IDEM_PRIMARY_KEY, snapshot, keys, nkeys);
}

/*
 * Fetch the next row.  Returns false at the end.
 */
bool
idem_scan_next(IdemCursor *cursor, ScanDirection direction)
{
	bool		is_dirty = cursor->kind == IDEM_SCAN_DIRTY;

	do
	{
		if (!idem_cursor_next(cursor, direction, cursor->row))
			return false;
	} while (is_dirty && idem_is_written_since(cursor, cursor->command));
	idem_set_holder(cursor, is_dirty ? &cursor->dirty : NULL);
	slot_getallattrs(cursor->row);
	return true;
}

/*
 * Begin to read the entries of an index, from the first one that the keys
 * select.
 */
void
idem_scan_entries(IdemCursor *cursor, IdemRelationId index, ScanKey keys,
				  int nkeys)
{
	cursor->kind = IDEM_SCAN_ENTRIES;
	start(cursor, index, SnapshotAny, keys, nkeys);
}

/*
 * Step to the next entry.  Returns false at the end.  "value" is set to a
 * column of the entry, counted from 1, which must not be NULL.  "visible" is
 * set to whether there is a row; its columns are not extracted yet.  The
 * server skips entries that an earlier scan has marked as dead to all
 * transactions.
 */
bool
idem_scan_entry(IdemCursor *cursor, ScanDirection direction,
				AttrNumber column, Datum *value, bool *visible)
{
	MemoryContext old = MemoryContextSwitchTo(cursor->table->context);
	IndexScanDesc scan = cursor->scan;
	bool		found = index_getnext_tid(scan, direction) != NULL;
	bool		isnull;			/* cppcheck-suppress unassignedVariable */

	*visible = false;
	if (found)
	{
		*value = index_getattr(scan->xs_itup, column, scan->xs_itupdesc,
							   &isnull);

		/* One entry can stand for several versions of a row. */
		do
		{
			if (!index_fetch_heap(scan, cursor->row))
				break;
			*visible = idem_row_is_visible(cursor, GetActiveSnapshot());
		} while (!*visible && scan->xs_heap_continue);
	}
	MemoryContextSwitchTo(old);
	return found;
}

/*
 * Release the pages of a scan that might not have reached its end.  The
 * caller must still hold the scan's snapshot.  Closing the cursor does the
 * same.
 *
 * The first scans are not kept.  Most calls make no more, and releasing the
 * pages of a kept scan would take longer than beginning a new one.
 */
void
idem_scan_end(IdemCursor *cursor)
{
	Assert(cursor->scan != NULL);
	Assert(cursor->scan->xs_snapshot != InvalidSnapshot);
	if (cursor->nscans++ < SCANS_NOT_KEPT)
	{
		index_endscan(cursor->scan);
		cursor->scan = NULL;
		return;
	}
	index_rescan(cursor->scan, NULL, cursor->scan->numberOfKeys, NULL, 0);
	cursor->scan->xs_snapshot = InvalidSnapshot;
}

/*
 * Begin to read through an index, or the primary key, with any snapshot.
 */
static void
start(IdemCursor *cursor, IdemRelationId index, Snapshot snapshot,
	  ScanKey keys, int nkeys)
{
	IdemTable  *table = cursor->table;
	MemoryContext old = MemoryContextSwitchTo(table->context);

	if (cursor->scan != NULL &&
		(cursor->index_id != index || cursor->scan->numberOfKeys != nkeys))
	{
		index_endscan(cursor->scan);
		cursor->scan = NULL;
	}
	if (cursor->index != NULL && cursor->index_id != index)
	{
		if (cursor->index != table->pkey)
			index_close(cursor->index, NoLock);
		cursor->index = NULL;
	}
	if (cursor->index == NULL)
		cursor->index = index == IDEM_PRIMARY_KEY ? table->pkey :
			idem_index_open(index, table->rel);
	cursor->index_id = index;

	if (cursor->scan == NULL)
		cursor->scan = index_beginscan(table->rel, cursor->index, snapshot,
									   NULL, nkeys, 0, SO_NONE);
	cursor->scan->xs_snapshot = snapshot;
	cursor->scan->xs_want_itup = cursor->kind == IDEM_SCAN_ENTRIES;
	index_rescan(cursor->scan, keys, nkeys, NULL, 0);
	MemoryContextSwitchTo(old);
}

/*
 * Fetch the next row into a slot.  The scan's allocations must last as long
 * as the scan.
 */
bool
idem_cursor_next(IdemCursor *cursor, ScanDirection direction,
				 TupleTableSlot *slot)
{
	MemoryContext old = MemoryContextSwitchTo(cursor->table->context);
	bool		found = index_getnext_slot(cursor->scan, direction, slot);

	MemoryContextSwitchTo(old);
	return found;
}

/*
 * Has this transaction written the row?  A frozen row keeps its xmin, but
 * that number is not compared, because it can be in use again.
 */
bool
idem_row_is_own(TupleTableSlot *row)
{
	TransactionId xmin = HeapTupleHeaderGetXmin(idem_row_header(row));

	return TransactionIdIsCurrentTransactionId(xmin);
}

/*
 * Has this transaction written cursor->row in that command or a later one?
 */
bool
idem_is_written_since(IdemCursor *cursor, CommandId command)
{
	return idem_row_is_own(cursor->row) &&
		HeapTupleHeaderGetCmin(idem_row_header(cursor->row)) >= command;
}

/*
 * The header of a row version that is pinned in a slot.
 */
HeapTupleHeader
idem_row_header(TupleTableSlot *row)
{
	bool		shouldFree;
	HeapTuple	tuple = ExecFetchSlotHeapTuple(row, false, &shouldFree);

	Assert(!shouldFree);
	return tuple->t_data;
}

/*
 * Does "snapshot" see cursor->row?
 */
bool
idem_row_is_visible(IdemCursor *cursor, Snapshot snapshot)
{
	return table_tuple_satisfies_snapshot(cursor->table->rel, cursor->row, snapshot);
}

/*
 * Return the other transaction that keeps a take from locking cursor->row: it
 * is replacing, deleting or locking the row, and has not ended.
 * InvalidTransactionId if there is none.  A dirty scan does not report
 * lockers.
 */
TransactionId
idem_row_writer(IdemCursor *cursor)
{
	Buffer		buffer = ((BufferHeapTupleTableSlot *) cursor->row)->buffer;
	HeapTupleHeader row = idem_row_header(cursor->row);
	TransactionId xmax;
	uint16		infomask;
	MultiXactMember *members;
	TransactionId writer = InvalidTransactionId;
	int			nmembers;

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	xmax = HeapTupleHeaderGetRawXmax(row);
	infomask = row->t_infomask;
	LockBuffer(buffer, BUFFER_LOCK_UNLOCK);

	if ((infomask & HEAP_XMAX_INVALID) || HEAP_LOCKED_UPGRADED(infomask))
		return InvalidTransactionId;
	if (!(infomask & HEAP_XMAX_IS_MULTI))
		return !HEAP_XMAX_IS_KEYSHR_LOCKED(infomask) && is_running(xmax) ?
			xmax : InvalidTransactionId;

	nmembers = GetMultiXactIdMembers(xmax, &members, false,
									 HEAP_XMAX_IS_LOCKED_ONLY(infomask));
	for (int i = 0; i < nmembers; i++)
	{
		if (members[i].status != MultiXactStatusForKeyShare &&
			is_running(members[i].xid))
			writer = members[i].xid;
	}
	if (nmembers > 0)
		pfree(members);
	return writer;
}

/*
 * Is this another transaction that has not ended?
 */
static bool
is_running(TransactionId xid)
{
	return !TransactionIdIsCurrentTransactionId(xid) &&
		TransactionIdIsInProgress(xid);
}

/*
 * The conditions of a scan.  Columns are counted from 1.  A text is compared
 * for equality, a number or time as the strategy says.
 */
void
idem_key_text(ScanKey key, AttrNumber column, Datum value)
{
	ScanKeyEntryInitialize(key, 0, column, BTEqualStrategyNumber, InvalidOid,
						   C_COLLATION_OID, F_TEXTEQ, value);
}

void
idem_key_int4(ScanKey key, AttrNumber column, StrategyNumber strategy,
			  int32 value)
{
	static const RegProcedure functions[] = {
		[BTLessStrategyNumber] = F_INT4LT,
		[BTEqualStrategyNumber] = F_INT4EQ,
		[BTGreaterStrategyNumber] = F_INT4GT,
	};

	ScanKeyEntryInitialize(key, 0, column, strategy, InvalidOid, InvalidOid,
						   functions[strategy], Int32GetDatum(value));
}

void
idem_key_int8(ScanKey key, AttrNumber column, StrategyNumber strategy,
			  int64 value)
{
	static const RegProcedure functions[] = {
		[BTEqualStrategyNumber] = F_INT8EQ,
		[BTGreaterEqualStrategyNumber] = F_INT8GE,
		[BTLessEqualStrategyNumber] = F_INT8LE,
	};

	ScanKeyEntryInitialize(key, 0, column, strategy, InvalidOid, InvalidOid,
						   functions[strategy], Int64GetDatum(value));
}

void
idem_key_time(ScanKey key, AttrNumber column, StrategyNumber strategy,
			  TimestampTz value)
{
	static const RegProcedure functions[] = {
		[BTGreaterStrategyNumber] = F_TIMESTAMPTZ_GT,
		[BTGreaterEqualStrategyNumber] = F_TIMESTAMPTZ_GE,
		[BTLessEqualStrategyNumber] = F_TIMESTAMPTZ_LE,
	};

	ScanKeyEntryInitialize(key, 0, column, strategy, InvalidOid, InvalidOid,
						   functions[strategy], TimestampTzGetDatum(value));
}

/*
 * The column is NULL.
 */
void
idem_key_null(ScanKey key, AttrNumber column)
{
	ScanKeyEntryInitialize(key, SK_ISNULL | SK_SEARCHNULL, column,
						   InvalidStrategy, InvalidOid, InvalidOid,
						   InvalidOid, (Datum) 0);
}
