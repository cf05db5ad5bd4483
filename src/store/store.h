/*-------------------------------------------------------------------------
 *
 * store.h
 *		Rows of the extension's tables: find, insert, update, delete, wait.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_H
#define IDEMPOTENCY_STORE_H

#include "access/genam.h"
#include "access/sdir.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "store/indexes.h"
#include "nodes/lockoptions.h"
#include "store/relations.h"
#include "storage/itemptr.h"
#include "utils/snapshot.h"

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
	IdemRelationId id;
	Relation	rel;
	Relation	pkey;
	int			ncolumns;		/* without dropped ones at the end */
	MemoryContext context;		/* what lives as long as the table is open */
	IdemIndexes *indexes;		/* to be maintained; NULL until needed */
	TupleTableSlot *row;
	TupleTableSlot *locked;		/* for idem_update() without wait */
	TupleTableSlot *written;	/* for a new row */
	bool		for_many;		/* keep the scan from one find to the next */
	IndexScanDesc scan;			/* the scan that is kept, if there is one */
	bool		row_is_own;
	TransactionId holder;
	uint32		speculative_token;
	ItemPointerData held_tid;
	LockTupleMode lock_mode;	/* what the last write wanted */
} IdemTable;

/*
 * An ordered scan through another index of an open table.  Rows come in
 * table->row, and with a dirty snapshot table->holder tells of an uncommitted
 * transaction that is writing or inserting the row.
 */
typedef struct IdemScan
{
	IdemTable  *table;
	Relation	index;
	IndexScanDesc scan;
	bool		is_dirty;
	SnapshotData dirty;
	CommandId	command;		/* that began a dirty scan */
} IdemScan;

/* How many new rows are inserted together at most. */
#define IDEM_APPEND_ROWS	500

/*
 * New rows that are collected, and inserted when they fill some pages.
 */
typedef struct IdemAppender
{
	IdemTable  *table;
	MemoryContext context;		/* for one flush */
	TupleTableSlot **slots;
	int			nslots;			/* that have been made */
	int			nrows;			/* in them */
	Size		size;			/* of these rows */
} IdemAppender;

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
	IDEM_WRITE_HELD,			/* another transaction has it; only if !wait */
} IdemWrite;

extern void idem_table_open(IdemTable *table, IdemRelationId id,
							LOCKMODE lockmode);
extern void idem_table_close(IdemTable *table);
extern void idem_table_leave(IdemTable *table, LOCKMODE lockmode);
extern AttrNumber idem_first_key_column(IdemTable *table);
extern Size idem_external_size(IdemTable *table);
extern bool idem_row_is_visible(IdemTable *table, Snapshot snapshot);
extern bool idem_rows_arrive(IdemTable *table);

extern IdemFind idem_find(IdemTable *table, const Datum *key);
extern bool idem_find_latest(IdemTable *table, const Datum *key);
extern bool idem_find_as_of(IdemTable *table, const Datum *key,
							Snapshot snapshot);
extern bool idem_find_visible(IdemTable *table, const Datum *key,
							  Snapshot snapshot);

extern void idem_scan_begin(IdemScan *scan, IdemTable *table,
							IdemRelationId index, Snapshot snapshot,
							int nkeys);
extern void idem_scan_begin_key(IdemScan *scan, IdemTable *table,
								Snapshot snapshot, int ncolumns);
extern void idem_scan_restart(IdemScan *scan, ScanKey keys);
extern void idem_scan_restart_key(IdemScan *scan, const Datum *key);
extern bool idem_scan_next(IdemScan *scan, ScanDirection direction);
extern void idem_scan_end(IdemScan *scan);
extern bool idem_is_written_since(IdemTable *table, CommandId command);

extern void idem_append(IdemTable *table, Datum *values, bool *nulls);
extern void idem_append_begin(IdemAppender *appender, IdemTable *table);
extern void idem_append_add(IdemAppender *appender, Datum *values,
							bool *nulls);
extern void idem_append_end(IdemAppender *appender);
extern bool idem_insert(IdemTable *table, Datum *values, bool *nulls);
extern IdemWrite idem_lock(IdemTable *table);
extern IdemWrite idem_update(IdemTable *table, Datum *values, bool *nulls,
							 bool wait);
extern IdemWrite idem_delete(IdemTable *table, bool wait);

extern void idem_wait(IdemTable *table);
extern bool idem_wait_until(IdemTable *table, TimestampTz deadline);

#endif							/* IDEMPOTENCY_STORE_H */
