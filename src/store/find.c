/*-------------------------------------------------------------------------
 *
 * find.c
 *		Finding a row by its primary key, written by any transaction.
 *
 * idem_find() reads with a dirty snapshot.  It returns committed rows, our
 * own, and those that other transactions are writing, and says which is
 * which, so that a caller that must not wait can answer from it.  A committed
 * row takes precedence over its uncommitted successor.  A dirty scan can miss
 * both versions of a row whose key moves to a new index entry while the scan
 * is between the index page and the heap.  Therefore IDEM_FIND_NONE is a
 * hint, and idem_insert(), which is exact, must follow it.  Callers that need
 * an exact "not there" use idem_find_latest(), which reads with a new MVCC
 * snapshot.
 *
 * Both begin with the version that this transaction has written, if any (see
 * xact_tid_cache.c), and otherwise with the row's newest version.  Someone's
 * old snapshot can keep thousands of older versions from being removed.
 *
 * Under REPEATABLE READ and SERIALIZABLE both raise 40001 if the row was
 * committed after the transaction's snapshot was taken.  SERIALIZABLE also
 * needs SIREAD locks, which only a scan with the transaction's own snapshot
 * takes, so such a scan precedes every find.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "storage/procarray.h"
#include "utils/snapmgr.h"

#include "store/internal.h"
#include "store/xact_tid_cache.h"
#include "util/compat.h"
#include "util/texts.h"

/*
 * The index entries of a row's versions are in the order of their places in
 * the table.  Newer versions mostly lie behind older ones.
 */
#define NEWEST_FIRST	BackwardScanDirection

static bool find_dirty(IdemCursor *cursor, const Datum *key, IdemFind *result);
static bool find_own_write(IdemCursor *cursor, const Datum *key);
static bool has_key(IdemCursor *cursor, const Datum *key);
static void begin_scan(IdemCursor *cursor, const Datum *key,
					   Snapshot snapshot);
static void take_siread_locks(IdemCursor *cursor, const Datum *key);
static void accept_row(IdemCursor *cursor);

/*
 * Find the current row with this primary key, written by any transaction.  The
 * key's columns are text or bigint, in the table's order.  Fills cursor->row for
 * IDEM_FIND_ROW, and cursor->holder.
 *
 * Raises 40001 if the transaction's snapshot must not see the row.
 */
IdemFind
idem_find(IdemCursor *cursor, const Datum *key)
{
	IdemFind	result = IDEM_FIND_ROW;

	if (!find_own_write(cursor, key))
	{
		take_siread_locks(cursor, key);
		while (!find_dirty(cursor, key, &result))
			CHECK_FOR_INTERRUPTS();

		if (result == IDEM_FIND_ROW)
			accept_row(cursor);
	}
	IDEM_INJECTION_POINT("idem-found");
	return result;
}

/*
 * Find the row with a dirty snapshot.
 *
 * Returns false if the search must be repeated: a transaction can commit the
 * new version of a row after the scan has passed that version and before it
 * reaches the old one.  A row counts as pending only if its transaction is
 * still in progress at the end.
 */
static bool
find_dirty(IdemCursor *cursor, const Datum *key, IdemFind *result)
{
	SnapshotData *dirty = &cursor->dirty;
	TransactionId first_holder = InvalidTransactionId;

	InitDirtySnapshot(*dirty);
	idem_set_holder(cursor, NULL);
	*result = IDEM_FIND_NONE;
	begin_scan(cursor, key, dirty);
	while (idem_cursor_next(cursor, NEWEST_FIRST, cursor->row))
	{
		cursor->held_tid = cursor->row->tts_tid;
		idem_set_holder(cursor, dirty);
		if (!cursor->row_is_pending)
		{
			*result = IDEM_FIND_ROW;
			break;
		}

		if (*result == IDEM_FIND_NONE)
			first_holder = cursor->holder;
		*result = IDEM_FIND_PENDING;
		IDEM_INJECTION_POINT("idem-found-pending");
	}
	idem_scan_end(cursor);

	return *result != IDEM_FIND_PENDING ||
		(TransactionIdIsInProgress(first_holder) &&
		 TransactionIdIsInProgress(cursor->holder));
}

/*
 * Find the newest committed version of the row, or our own.  Ignores what
 * other transactions have not committed.
 *
 * "snapshot" is newer than the transaction's, for a caller that needs rows of
 * the same moment.  NULL takes a new one.
 *
 * Raises 40001 if the transaction's snapshot must not see the row.
 */
bool
idem_find_latest(IdemCursor *cursor, const Datum *key, Snapshot snapshot)
{
	bool		found = find_own_write(cursor, key);

	if (!found)
	{
		take_siread_locks(cursor, key);

		snapshot = RegisterSnapshot(snapshot != NULL ? snapshot :
									GetLatestSnapshot());
		found = idem_find_visible(cursor, key, snapshot);
		UnregisterSnapshot(snapshot);
		if (found)
			accept_row(cursor);
	}
	IDEM_INJECTION_POINT("idem-found-latest");
	return found;
}

/*
 * Find the version of the row that an MVCC snapshot sees.
 *
 * A transaction's snapshot can see two versions: one that others have deleted
 * since, and the one that we have inserted in its place.  Return ours.
 */
bool
idem_find_visible(IdemCursor *cursor, const Datum *key, Snapshot snapshot)
{
	bool		found;

	begin_scan(cursor, key, snapshot);
	found = idem_cursor_next(cursor, NEWEST_FIRST, cursor->row);
	if (found && IsolationUsesXactSnapshot() && !idem_row_is_own(cursor->row) &&
		TransactionIdIsValid(GetTopTransactionIdIfAny()) &&
		idem_cursor_next(cursor, NEWEST_FIRST, idem_spare_slot(cursor)))
		ExecCopySlot(cursor->row, cursor->spare);
	idem_scan_end(cursor);

	idem_set_holder(cursor, NULL);
	if (found)
		slot_getallattrs(cursor->row);
	return found;
}

/*
 * Find the row at the place where this transaction has put its newest
 * version.  This saves the index search if a claim is completed in its own
 * transaction, and the scan of all versions if one row is written many times.
 * If our own version is visible at all, it is the newest, because nobody else
 * can have changed it.  For the same reason reading it needs no SIREAD lock.
 *
 * If an index entry points to the version, fetch it as an index scan does.
 * That also prunes a page that is nearly full: otherwise, completing one key
 * after the other would leave every claim's dead version behind until the
 * next vacuum.
 */
static bool
find_own_write(IdemCursor *cursor, const Datum *key)
{
	IdemTable  *table = cursor->table;
	TupleTableSlot *row = cursor->row;
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
	if (!has_key(cursor, key))
		return false;

	Assert(idem_row_is_own(row));
	cursor->row_is_own = true;
	cursor->held_tid = row->tts_tid;
	idem_set_holder(cursor, NULL);
	return true;
}

/*
 * Does cursor->row have this primary key?
 */
static bool
has_key(IdemCursor *cursor, const Datum *key)
{
	Form_pg_index pkey = cursor->table->pkey->rd_index;
	AttrNumber	first = idem_first_key_column(cursor->table);

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		AttrNumber	column = pkey->indkey.values[i];
		Datum		value = cursor->row->tts_values[column - 1];

		if (idem_key_type(cursor->table, i) == INT8OID ?
			DatumGetInt64(value) != DatumGetInt64(key[column - first]) :
			!idem_text_equal(value, key[column - first]))
			return false;
	}
	return true;
}

/*
 * Begin to read the versions of a row, newest first.
 */
static void
begin_scan(IdemCursor *cursor, const Datum *key, Snapshot snapshot)
{
	idem_scan_key(cursor, snapshot, key,
				  cursor->table->pkey->rd_index->indnkeyatts);
}

/*
 * Under SERIALIZABLE, read the key with the transaction's own snapshot to
 * take the predicate locks.  The result does not matter.
 */
static void
take_siread_locks(IdemCursor *cursor, const Datum *key)
{
	if (unlikely(IsolationIsSerializable()))
		(void) idem_find_visible(cursor, key, GetActiveSnapshot());
}

/*
 * Set row_is_own.  Under REPEATABLE READ and SERIALIZABLE refuse cursor->row
 * if it is too new, as INSERT ... ON CONFLICT does.
 *
 * Also refuse our own row while it is being inserted: a function in an index
 * has called us, and the end of the insertion would overwrite what that call
 * does to the row.
 */
static void
accept_row(IdemCursor *cursor)
{
	cursor->row_is_own = idem_row_is_own(cursor->row);

	if (unlikely(cursor->row_is_own &&
				 HeapTupleHeaderIsSpeculative(idem_row_header(cursor->row))))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("row of table \"%s\" is still being inserted",
						RelationGetRelationName(cursor->table->rel)),
				 errdetail("A function in an index of the table has called an idempotency function for the same row.")));

	if (IsolationUsesXactSnapshot() && !cursor->row_is_own &&
		!table_tuple_satisfies_snapshot(cursor->table->rel, cursor->row,
										GetActiveSnapshot()))
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errhint("The transaction might succeed if retried.")));

	slot_getallattrs(cursor->row);
}
