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
#include "access/skey.h"
#include "access/stratnum.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "store/indexes.h"
#include "nodes/lockoptions.h"
#include "store/relations.h"
#include "storage/itemptr.h"
#include "utils/snapshot.h"

/*
 * One of our tables, open for one call.  All cursors on it share this.
 */
typedef struct IdemTable
{
	IdemRelationId id;
	int			ncursors;		/* closing the last one closes the table */
	Relation	rel;
	Relation	pkey;
	int			ncolumns;		/* without dropped columns at the end */
	MemoryContext context;		/* lives as long as the table is open */
	IdemIndexes *indexes;		/* for writing; NULL until needed */
	TupleTableSlot *written;	/* for a new row; NULL until needed */
} IdemTable;

/* The rows that a scan returns. */
typedef enum IdemScanKind
{
	IDEM_SCAN_VISIBLE,			/* the rows that a snapshot sees */
	IDEM_SCAN_DIRTY,			/* also rows that others are writing */
	IDEM_SCAN_ENTRIES,			/* all index entries, even dead ones */
} IdemScanKind;

/*
 * A way to read a table, one row at a time: by primary key (find.c), or
 * through an index (scan.c).  A call that needs a second row at the same time
 * opens a second cursor on the table.
 *
 * "row" is the row version that was read last.  It is pinned, and its columns
 * are in tts_values and tts_isnull.  After a find, "row_is_own" says whether
 * this transaction wrote it.  "holder" is the other uncommitted transaction
 * that inserted the row ("row_is_pending") or is replacing or deleting it;
 * InvalidTransactionId if there is none.  Writes and waits refer to this row.
 */
typedef struct IdemCursor
{
	IdemTable  *table;
	TupleTableSlot *row;
	TupleTableSlot *spare;		/* see idem_spare_slot() */
	bool		row_is_own;
	bool		row_is_pending;
	TransactionId holder;
	uint32		speculative_token;
	ItemPointerData held_tid;
	LockTupleMode lock_mode;	/* of the last write */

	/* The index and the scan are kept from one find or scan to the next. */
	Relation	index;			/* NULL: none */
	IdemRelationId index_id;
	IndexScanDesc scan;			/* NULL: none */
	int			nscans;			/* number of scans that have ended */
	IdemScanKind kind;
	SnapshotData dirty;
	CommandId	command;		/* in which a dirty scan began */
} IdemCursor;

/* The table's primary key, which has no name of its own. */
#define IDEM_PRIMARY_KEY	IDEM_NUM_RELATIONS

/* The maximum number of rows that are inserted together. */
#define IDEM_APPEND_ROWS	500

/*
 * New rows that are collected, and inserted when they fill some pages.
 */
typedef struct IdemAppender
{
	IdemTable  *table;
	MemoryContext context;		/* for one flush */
	TupleTableSlot **slots;
	int			nslots;			/* number of slots made */
	int			nrows;			/* number of rows in the slots */
	Size		size;			/* of these rows */
} IdemAppender;

typedef enum IdemFind
{
	IDEM_FIND_NONE,				/* no row has the key */
	IDEM_FIND_ROW,				/* a committed row, or our own */
	IDEM_FIND_PENDING,			/* another transaction is inserting the key */
} IdemFind;

typedef enum IdemWrite
{
	IDEM_WRITE_DONE,
	IDEM_WRITE_STALE,			/* the row has changed since it was found */
	IDEM_WRITE_HELD,			/* another transaction holds it; only if !wait */
} IdemWrite;

extern void idem_cursor_open(IdemCursor *cursor, IdemRelationId id,
							 LOCKMODE lockmode);
extern void idem_cursor_open_beside(IdemCursor *cursor,
									const IdemCursor *other);
extern void idem_cursor_close(IdemCursor *cursor);
extern void idem_cursor_leave(IdemCursor *cursor, LOCKMODE lockmode);
extern AttrNumber idem_first_key_column(IdemTable *table);
extern Size idem_external_size(IdemCursor *cursor);
extern bool idem_rows_arrive(IdemTable *table);

extern IdemFind idem_find(IdemCursor *cursor, const Datum *key);
extern bool idem_find_latest(IdemCursor *cursor, const Datum *key,
							 Snapshot snapshot);
extern bool idem_find_visible(IdemCursor *cursor, const Datum *key,
							  Snapshot snapshot);
extern bool idem_row_is_visible(IdemCursor *cursor, Snapshot snapshot);
extern TransactionId idem_row_writer(IdemCursor *cursor);
extern bool idem_is_written_since(IdemCursor *cursor, CommandId command);

extern void idem_scan(IdemCursor *cursor, IdemRelationId index,
					  Snapshot snapshot, ScanKey keys, int nkeys);
extern void idem_scan_key(IdemCursor *cursor, Snapshot snapshot,
						  const Datum *key, int ncolumns);
extern bool idem_scan_next(IdemCursor *cursor, ScanDirection direction);
extern void idem_scan_entries(IdemCursor *cursor, IdemRelationId index,
							  ScanKey keys, int nkeys);
extern bool idem_scan_entry(IdemCursor *cursor, ScanDirection direction,
							AttrNumber column, Datum *value, bool *visible);
extern void idem_scan_end(IdemCursor *cursor);
extern void idem_key_text(ScanKey key, AttrNumber column, Datum value);
extern void idem_key_int4(ScanKey key, AttrNumber column,
						  StrategyNumber strategy, int32 value);
extern void idem_key_int8(ScanKey key, AttrNumber column,
						  StrategyNumber strategy, int64 value);
extern void idem_key_time(ScanKey key, AttrNumber column,
						  StrategyNumber strategy, TimestampTz value);
extern void idem_key_null(ScanKey key, AttrNumber column);

extern void idem_append(IdemCursor *cursor, Datum *values, bool *nulls);
extern void idem_append_begin(IdemAppender *appender, IdemCursor *cursor);
extern void idem_append_add(IdemAppender *appender, Datum *values,
							bool *nulls);
extern void idem_append_end(IdemAppender *appender);
extern bool idem_insert(IdemCursor *cursor, Datum *values, bool *nulls);
extern IdemWrite idem_lock(IdemCursor *cursor);
extern IdemWrite idem_update(IdemCursor *cursor, Datum *values, bool *nulls,
							 bool wait);
extern IdemWrite idem_delete(IdemCursor *cursor, bool wait);

extern void idem_wait(IdemCursor *cursor);
extern bool idem_wait_until(IdemCursor *cursor, TimestampTz deadline);

#endif							/* IDEMPOTENCY_STORE_H */
