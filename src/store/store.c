/*-------------------------------------------------------------------------
 *
 * store.c
 *		The tables of the extension, open for one call.
 *
 * Only the files of this folder access the tables' tuples.  They do for one
 * row, found by primary key, what the executor does for INSERT ... ON
 * CONFLICT and UPDATE, without planner, executor or SPI:
 *
 *		find.c		find it, written by any transaction
 *		scan.c		read rows in the order of an index
 *		write.c		insert, update, delete and lock it
 *		append.c	insert rows whose keys are new
 *		row_wait.c	wait for its holder
 *
 * The other duties of the executor are met there or in relations.c: replica
 * identity, REPEATABLE READ and SERIALIZABLE, all indexes, the command
 * counter.  The permission check is EXECUTE on the SQL function.
 * idem_cursor_open() has the guards for read-only transactions, recovery and
 * parallel mode.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_subscription.h"
#include "catalog/pg_subscription_rel.h"
#include "catalog/pg_type_d.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

#include "store/internal.h"
#include "util/compat.h"
#include "util/settings.h"

/* The prefix of the names of scale-out/move's subscriptions. */
#define MOVE_SUBSCRIPTION	"idem_move_"

static void open_on(IdemCursor *cursor, IdemTable *table);

/*
 * Open a table for one call, and a cursor on it.  idem_cursor_close() or an
 * error closes both.
 *
 * With any lock but AccessShareLock the caller is going to write: raises
 * 25006 in a read-only transaction or during recovery, 25000 in a parallel
 * worker, and 42501 in a session that lacks the operator's settings.
 */
void
idem_cursor_open(IdemCursor *cursor, IdemRelationId id, LOCKMODE lockmode)
{
	IdemTable  *table;

	if (lockmode != AccessShareLock)
	{
		PreventCommandIfReadOnly("an idempotency function that writes");
		PreventCommandIfParallelMode("an idempotency function that writes");
		PreventCommandDuringRecovery("an idempotency function that writes");
		idem_check_settings();
		CommandCounterIncrement();
	}

	table = palloc(sizeof(IdemTable));
	table->id = id;
	table->ncursors = 0;
	table->rel = idem_relation_open(id, lockmode);
	table->pkey = index_open(RelationGetPrimaryKeyIndex(table->rel, false),
							 lockmode);
	table->ncolumns = idem_relation_columns(id);
	table->context = CurrentMemoryContext;
	table->indexes = NULL;
	table->written = NULL;
	open_on(cursor, table);
}

/*
 * Open another cursor on the table of an open one.
 */
void
idem_cursor_open_beside(IdemCursor *cursor, const IdemCursor *other)
{
	MemoryContext old = MemoryContextSwitchTo(other->table->context);

	open_on(cursor, other->table);
	MemoryContextSwitchTo(old);
}

static void
open_on(IdemCursor *cursor, IdemTable *table)
{
	table->ncursors++;
	cursor->table = table;
	cursor->row = table_slot_create(table->rel, NULL);
	cursor->spare = NULL;
	cursor->row_is_own = false;
	idem_set_holder(cursor, NULL);
	ItemPointerSetInvalid(&cursor->held_tid);
	cursor->lock_mode = LockTupleNoKeyExclusive;
	cursor->index = NULL;
	cursor->scan = NULL;
	cursor->nscans = 0;
	cursor->kind = IDEM_SCAN_VISIBLE;
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
 * Close a cursor, and with the last one the table.  The table's lock stays
 * until the transaction ends, as after any statement.
 */
void
idem_cursor_close(IdemCursor *cursor)
{
	IdemTable  *table = cursor->table;

	if (cursor->scan != NULL)
		index_endscan(cursor->scan);
	if (cursor->index != NULL && cursor->index != table->pkey)
		index_close(cursor->index, NoLock);
	if (cursor->spare != NULL)
		ExecDropSingleTupleTableSlot(cursor->spare);
	ExecDropSingleTupleTableSlot(cursor->row);

	if (--table->ncursors > 0)
		return;
	if (table->indexes != NULL)
		idem_indexes_close(table->indexes);
	if (table->written != NULL)
		ExecDropSingleTupleTableSlot(table->written);
	index_close(table->pkey, NoLock);
	table_close(table->rel, NoLock);
	pfree(table);
}

/*
 * Close the only cursor on a table and release the table's locks, which were
 * taken in the current subtransaction.  A caller uses this if it has written
 * nothing since, and is going to sleep on something that the deadlock
 * detector does not know.  Otherwise a session that waits for all holders of
 * the table's lock, and all sessions that queue behind it, would wait for the
 * sleeper, and the sleeper might wait for one of them.  A lock that the
 * transaction held before stays.
 */
void
idem_cursor_leave(IdemCursor *cursor, LOCKMODE lockmode)
{
	Oid			relid = RelationGetRelid(cursor->table->rel);
	Oid			pkey = RelationGetRelid(cursor->table->pkey);

	Assert(cursor->table->ncursors == 1);
	idem_cursor_close(cursor);
	UnlockRelationOid(pkey, lockmode);
	idem_relation_unlock(relid, lockmode);
}

/*
 * Return the first column of the primary key in the table's order.
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
 * Return the type of a column of the primary key, counted from 0 in its
 * order.
 */
Oid
idem_key_type(IdemTable *table, int i)
{
	return TupleDescAttr(RelationGetDescr(table->pkey), i)->atttypid;
}

/*
 * Return a hash of a whole primary key, whose columns are in the table's
 * order.
 */
uint32
idem_hash_key(IdemTable *table, const Datum *key)
{
	Form_pg_index pkey = table->pkey->rd_index;
	AttrNumber	first = idem_first_key_column(table);
	uint32		hash = 0;

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		Datum		value = key[pkey->indkey.values[i] - first];
		uint32		part;

		if (idem_key_type(table, i) == INT8OID)
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
 * Return the size of cursor->row's values that are in the TOAST table.
 */
Size
idem_external_size(IdemCursor *cursor)
{
	TupleDesc	desc = RelationGetDescr(cursor->table->rel);
	Size		size = 0;

	for (int i = 0; i < cursor->table->ncolumns; i++)
	{
		struct varatt_external toast;
		struct varlena *value;

		if (TupleDescAttr(desc, i)->attlen != -1 ||
			cursor->row->tts_isnull[i])
			continue;
		value = (struct varlena *) DatumGetPointer(cursor->row->tts_values[i]);
		if (!VARATT_IS_EXTERNAL_ONDISK(value))
			continue;
		VARATT_EXTERNAL_GET_POINTER(toast, value);
		size += VARATT_EXTERNAL_GET_EXTSIZE(toast);
	}
	return size;
}

/*
 * Return the table's indexes, open for writing.  The first use opens them.
 */
IdemIndexes *
idem_open_indexes(IdemTable *table)
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
 * Return a slot that holds a new row, until ExecClearTuple().
 */
TupleTableSlot *
idem_new_row(IdemTable *table, Datum *values, bool *nulls)
{
	if (table->written == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(table->context);

		table->written = MakeSingleTupleTableSlot(RelationGetDescr(table->rel),
												  &TTSOpsHeapTuple);
		MemoryContextSwitchTo(old);
	}
	idem_fill_row(table->written, table, values, nulls);
	return table->written;
}

/*
 * Put another new row into a slot.
 */
void
idem_fill_row(TupleTableSlot *slot, IdemTable *table, Datum *values,
			  bool *nulls)
{
	TupleDesc	desc = slot->tts_tupleDescriptor;

	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, desc->natts * sizeof(bool));
	memcpy(slot->tts_values, values, table->ncolumns * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, table->ncolumns * sizeof(bool));
	slot->tts_tableOid = RelationGetRelid(table->rel);
	ExecStoreVirtualTuple(slot);
	ExecMaterializeSlot(slot);	/* otherwise each access would form it again */
}

/*
 * Return a second slot, for idem_lock_row(), which ignores the row that it
 * gets there, and for idem_find_visible().
 */
TupleTableSlot *
idem_spare_slot(IdemCursor *cursor)
{
	if (cursor->spare == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(cursor->table->context);

		cursor->spare = table_slot_create(cursor->table->rel, NULL);
		MemoryContextSwitchTo(old);
	}
	return cursor->spare;
}

/*
 * Does scale-out/move copy rows into the table by logical replication?  If
 * one of these rows were deleted here, its next update would not find it, and
 * would be lost.
 *
 * The caller's snapshot is older than the answer, so it contains no row of a
 * copy that begins later.
 */
bool
idem_rows_arrive(IdemTable *table)
{
	Relation	catalog = table_open(SubscriptionRelRelationId,
									 AccessShareLock);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	bool		found = false;

	ScanKeyInit(&key, Anum_pg_subscription_rel_srrelid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(RelationGetRelid(table->rel)));
	scan = systable_beginscan(catalog, SubscriptionRelSrrelidSrsubidIndexId,
							  true, snapshot, 1, &key);
	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_subscription_rel row =
			(Form_pg_subscription_rel) GETSTRUCT(tuple);
		char	   *name = get_subscription_name(row->srsubid, true);

		found = name != NULL &&
			strncmp(name, MOVE_SUBSCRIPTION, strlen(MOVE_SUBSCRIPTION)) == 0;
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(catalog, AccessShareLock);
	return found;
}
