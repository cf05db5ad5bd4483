/*-------------------------------------------------------------------------
 *
 * write.c
 *		Inserting, updating, deleting and locking one row.
 *
 * idem_insert() makes a speculative insertion, as ExecInsert() does.  The
 * tuple goes into the heap under a speculative token, then into the indexes,
 * where a unique index only reports a conflict.  Then the insertion is
 * confirmed or killed.  It never waits for another transaction.  Every ready
 * unique index on the primary key's columns is an arbiter, so REINDEX
 * CONCURRENTLY cannot turn a conflict into a unique violation.
 *
 * Two sessions that insert the same key at once can each see the other's
 * tuple and both kill their own.  They cannot then both report the other as
 * holder: each looks again only after its own tuple is dead, so the later one
 * to die finds nothing of the earlier.
 *
 * idem_update() and idem_delete() compare and swap: they write only if the
 * version that was found is still the newest; otherwise the caller must find
 * the row again.  If they must not wait, they first lock the row, as SKIP
 * LOCKED does, because heap_update() always waits.  The slot keeps its buffer
 * pinned from find to write, so pruning cannot reuse the line pointer in
 * between.
 *
 * CommandCounterIncrement() follows each write, so that a later call in the
 * same SQL statement sees it and can update it.  It also precedes each call,
 * for what the statement itself has written, such as a superuser's DELETE: a
 * dirty snapshot sees that at once, so an MVCC snapshot must, too.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/tableam.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "storage/lmgr.h"
#include "utils/snapmgr.h"

#include "store/internal.h"
#include "store/xact_tid_cache.h"
#include "util/compat.h"

static void remember_write(IdemTable *table, TupleTableSlot *slot,
						   bool heap_only);
static IdemWrite finish_write(IdemTable *table, TM_Result result);

/*
 * Insert a row unless another row with the same primary key exists, committed
 * or not.  Returns false in that case, having left only a dead tuple; the
 * caller must find the row again.
 */
bool
idem_insert(IdemCursor *cursor, Datum *values, bool *nulls)
{
	Relation	rel = cursor->table->rel;
	TupleTableSlot *slot = idem_new_row(cursor->table, values, nulls);
	IdemIndexes *indexes = idem_open_indexes(cursor->table);
	TransactionId xid = GetCurrentTransactionId();
	bool		inserted;
	uint32		token;

	token = SpeculativeInsertionLockAcquire(xid);
	table_tuple_insert_speculative(rel, slot, GetCurrentCommandId(true), 0, NULL,
								   token);
	IDEM_INJECTION_POINT("idem-insert-heap");
	inserted = idem_indexes_insert(indexes, slot);
	IDEM_INJECTION_POINT("idem-insert-index");
	table_tuple_complete_speculative(rel, slot, token, inserted);
	SpeculativeInsertionLockRelease(xid);
	IDEM_INJECTION_POINT("idem-inserted");
	if (inserted)
		remember_write(cursor->table, slot, false);

	ExecClearTuple(slot);
	CommandCounterIncrement();
	return inserted;
}

/*
 * Lock cursor->row, as an update would, until the transaction ends.  Does not
 * wait.  After it, an update "with wait" does not wait either.
 */
IdemWrite
idem_lock(IdemCursor *cursor)
{
	TM_FailureData failure;
	TM_Result	result;

	result = idem_lock_row(cursor, LockTupleNoKeyExclusive, LockWaitSkip,
						   &failure);
	return finish_write(cursor->table, result);
}

/*
 * Replace cursor->row.  With "wait", sleeps until no other transaction holds
 * the row; without it, returns IDEM_WRITE_HELD.
 */
IdemWrite
idem_update(IdemCursor *cursor, Datum *values, bool *nulls, bool wait)
{
	Relation	rel = cursor->table->rel;
	TupleTableSlot *slot;
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes indexes;
	TM_Result	result;

	CheckCmdReplicaIdentity(rel, CMD_UPDATE);

	/* An update always waits; a row lock need not. */
	if (!wait)
	{
		result = idem_lock_row(cursor, LockTupleNoKeyExclusive, LockWaitSkip,
							   &failure);
		if (result != TM_Ok)
			return finish_write(cursor->table, result);
		IDEM_INJECTION_POINT("idem-update-locked");
	}

	slot = idem_new_row(cursor->table, values, nulls);
	result = table_tuple_update(rel, &cursor->row->tts_tid, slot,
								GetCurrentCommandId(true), 0,
								GetActiveSnapshot(), InvalidSnapshot, true,
								&failure, &lockmode, &indexes);
	IDEM_INJECTION_POINT("idem-update-heap");
	if (result == TM_Ok)
	{
		bool		heap_only = (indexes == TU_None ||
								 IdemOnlySummarizing(indexes));

		if (indexes != TU_None)
			idem_indexes_update(idem_open_indexes(cursor->table), slot,
								heap_only);
		remember_write(cursor->table, slot, heap_only);
	}
	ExecClearTuple(slot);
	return finish_write(cursor->table, result);
}

/*
 * Delete cursor->row; "wait" as for idem_update().
 */
IdemWrite
idem_delete(IdemCursor *cursor, bool wait)
{
	Relation	rel = cursor->table->rel;
	TM_FailureData failure;
	TM_Result	result;

	CheckCmdReplicaIdentity(rel, CMD_DELETE);

	result = table_tuple_delete(rel, &cursor->row->tts_tid,
								GetCurrentCommandId(true), 0,
								GetActiveSnapshot(), InvalidSnapshot, wait,
								&failure);

	/* Without wait, it fails even for a row lock, including our own. */
	if (result == TM_BeingModified)
	{
		result = idem_lock_row(cursor, LockTupleExclusive, LockWaitSkip,
							   &failure);
		if (result == TM_Ok)
			result = table_tuple_delete(rel, &cursor->row->tts_tid,
										GetCurrentCommandId(true), 0,
										GetActiveSnapshot(), InvalidSnapshot,
										true, &failure);
	}
	IDEM_INJECTION_POINT("idem-deleted");
	return finish_write(cursor->table, result);
}

/*
 * Lock cursor->row, with or without waiting for others.  If the lock is
 * refused, idem_wait() waits for it.  This uses no command id, so a caller
 * that compares command ids sees that nothing was written.
 */
TM_Result
idem_lock_row(IdemCursor *cursor, LockTupleMode mode, LockWaitPolicy policy,
			  TM_FailureData *failure)
{
	TM_Result	result;

	cursor->lock_mode = mode;
	result = table_tuple_lock(cursor->table->rel, &cursor->row->tts_tid,
							  GetActiveSnapshot(), idem_spare_slot(cursor),
							  GetCurrentCommandId(false), mode, policy, 0,
							  failure);
	ExecClearTuple(cursor->spare);
	return result;
}

/*
 * Remember where the row in "slot" has been written.
 */
static void
remember_write(IdemTable *table, TupleTableSlot *slot, bool heap_only)
{
	AttrNumber	first = idem_first_key_column(table);
	uint32		hash = idem_hash_key(table, &slot->tts_values[first - 1]);

	idem_remember_write(table->rel, hash, &slot->tts_tid, heap_only);
}

/*
 * Translate the result of an update or delete.
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
