/*-------------------------------------------------------------------------
 *
 * store.h
 *		Rows of the extension's tables: find, insert, update, delete, wait.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_H
#define IDEMPOTENCY_STORE_H

#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "relations.h"
#include "storage/itemptr.h"
#include "utils/snapshot.h"

/* The widest of our tables has this many columns. */
#define IDEM_MAX_COLUMNS	17

/*
 * One of our tables, open for one call.
 *
 * "row" is the row version that the last find returned, pinned, its columns
 * in tts_values and tts_isnull; "row_is_own" tells that this transaction
 * wrote it.  "holder" is another, uncommitted transaction that inserted the
 * key (IDEM_FIND_PENDING) or is replacing or deleting the row
 * (IDEM_FIND_ROW), or else InvalidTransactionId.
 */
typedef struct IdemTable
{
	Relation	rel;
	Relation	pkey;
	TupleTableSlot *row;
	bool		row_is_own;
	TransactionId holder;
	uint32		speculative_token;
	ItemPointerData held_tid;
} IdemTable;

typedef enum IdemFind
{
	IDEM_FIND_NONE,				/* nobody has the key */
	IDEM_FIND_ROW,				/* a committed row, or one of our own */
	IDEM_FIND_PENDING,			/* another transaction is inserting the key */
} IdemFind;

typedef enum IdemWrite
{
	IDEM_WRITE_DONE,
	IDEM_WRITE_STALE,			/* the row has changed since it was found */
	IDEM_WRITE_HELD,			/* table->holder writes it; only if !wait */
} IdemWrite;

extern void idem_table_open(IdemTable *table, IdemRelationId id,
							LOCKMODE lockmode);
extern void idem_table_close(IdemTable *table);

extern IdemFind idem_find(IdemTable *table, const Datum *key);
extern bool idem_find_latest(IdemTable *table, const Datum *key);
extern bool idem_find_visible(IdemTable *table, const Datum *key,
							  Snapshot snapshot);

extern bool idem_insert(IdemTable *table, Datum *values, bool *nulls);
extern IdemWrite idem_update(IdemTable *table, Datum *values, bool *nulls,
							 bool wait);
extern IdemWrite idem_delete(IdemTable *table, bool wait);

extern void idem_wait(IdemTable *table);
extern bool idem_wait_until(IdemTable *table, TimestampTz deadline);

#endif							/* IDEMPOTENCY_STORE_H */
