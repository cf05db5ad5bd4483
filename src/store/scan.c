/*-------------------------------------------------------------------------
 *
 * scan.c
 *		Reading through an index, and what all ways to read have in common.
 *
 * A scan reads with the snapshot that it is given, or without one as a dirty
 * scan.  That sees what others are writing and says who, so that the caller
 * can pass over it or count with it, and may miss a row that moves to another
 * entry meanwhile.  It does not see what this transaction has written since
 * the scan began, or else a take could go round in circles.
 *
 * A scan for rows passes any number of dead ones on its way, whole pages of
 * them, and an old snapshot may keep vacuum from removing millions.  A scan of
 * entries is bounded by what it looks at: the caller gets every entry of an
 * index, and is told whether there is a row behind it that the active snapshot
 * sees.  It takes no predicate lock, so what it finds under SERIALIZABLE must
 * not be of consequence for data.
 *
 * A cursor keeps the index that it has opened until it reads through another
 * one, or is closed, and after some scans the scan, too: the next one of that
 * index, with as many keys, uses it again.  When a scan has ended, the cursor
 * holds no page, since its caller may sleep.
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

/* A cursor keeps its scan after so many. */
#define SCANS_NOT_KEPT	2

static void start(IdemCursor *cursor, IdemRelationId index,
				  Snapshot snapshot, ScanKey keys, int nkeys);
static bool is_running(TransactionId xid);

/*
 * Begin to read through an index, from the first entry that the keys select.
 * Without a snapshot it is a dirty scan: it sees what others are writing, and
 * what this transaction has written before.
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
 * Step to the next entry.  Returns false at the end.  "value" is a column of
 * the entry, counted from 1, which must not be NULL; "visible" tells whether
 * there is a row, whose columns are not extracted yet.  An entry that a scan before has
 * marked as dead to everybody is not one any more.
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

		/* An entry may stand for several versions of a row. */
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
 * Release the pages that a scan holds, if it is not at its end.  Before a
 * cursor is closed this is not needed.
 *
 * The first ones are not kept: most calls make no more, and to release pages
 * takes longer than what is saved then.
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
 * Fetch the next row into a slot.  What a scan allocates on its way has to
 * last for as long as the scan.
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
 * Set the holder of the row that was read with a dirty snapshot.  A row that
 * was read with another snapshot, or no row (NULL), has none.
 */
void
idem_set_holder(IdemCursor *cursor, const SnapshotData *dirty)
{
	cursor->row_is_pending = dirty != NULL &&
		TransactionIdIsValid(dirty->xmin);
	cursor->speculative_token = 0;
	if (cursor->row_is_pending)
	{
		cursor->holder = dirty->xmin;
		cursor->speculative_token = dirty->speculativeToken;
	}
	else
		cursor->holder = dirty != NULL ? dirty->xmax : InvalidTransactionId;
}

/*
 * Has this transaction written the row?  A frozen one keeps its xmin, which
 * then says nothing: the number may come again.
 */
bool
idem_row_is_own(TupleTableSlot *row)
{
	TransactionId xmin = HeapTupleHeaderGetXmin(idem_row_header(row));

	return TransactionIdIsCurrentTransactionId(xmin);
}

/*
 * Has this transaction written cursor->row in or after that command?
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
 * Is the row version that was found visible to "snapshot"?
 */
bool
idem_row_is_visible(IdemCursor *cursor, Snapshot snapshot)
{
	return table_tuple_satisfies_snapshot(cursor->table->rel, cursor->row, snapshot);
}

/*
 * The other transaction that keeps a take from locking the row version that
 * was found: it is replacing, deleting or locking the row, and has not ended.
 * InvalidTransactionId if there is none.  A dirty scan knows nothing of locks.
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
 * Is this another transaction, which has not ended?
 */
static bool
is_running(TransactionId xid)
{
	return !TransactionIdIsCurrentTransactionId(xid) &&
		TransactionIdIsInProgress(xid);
}

/*
 * The conditions of a scan; columns are counted from 1.  A text is equal, a
 * number or time is compared as the strategy says.
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
