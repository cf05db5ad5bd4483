/*-------------------------------------------------------------------------
 *
 * internal.h
 *		Declarations that the files of the store share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_INTERNAL_H
#define IDEMPOTENCY_STORE_INTERNAL_H

#include "access/tableam.h"
#include "store/store.h"

extern Oid	idem_key_type(IdemTable *table, int i);
extern uint32 idem_hash_key(IdemTable *table, const Datum *key);
extern IdemIndexes *idem_open_indexes(IdemTable *table);
extern TupleTableSlot *idem_new_row(IdemTable *table, Datum *values,
									bool *nulls);
extern void idem_fill_row(TupleTableSlot *slot, IdemTable *table,
						  Datum *values, bool *nulls);
extern TupleTableSlot *idem_spare_slot(IdemCursor *cursor);
extern void idem_set_holder(IdemCursor *cursor, const SnapshotData *dirty);
extern bool idem_cursor_next(IdemCursor *cursor, ScanDirection direction,
							 TupleTableSlot *slot);
extern bool idem_row_is_own(TupleTableSlot *row);
extern HeapTupleHeader idem_row_header(TupleTableSlot *row);
extern TM_Result idem_lock_row(IdemCursor *cursor, LockTupleMode mode,
							   LockWaitPolicy policy,
							   TM_FailureData *failure);

#endif							/* IDEMPOTENCY_STORE_INTERNAL_H */
