/*-------------------------------------------------------------------------
 *
 * scan.c
 *		Going through rows in the order of an index.
 *
 * A scan reads with the snapshot that it is given, or without one as a dirty
 * scan.  That sees what others are writing and says who, so that the caller
 * can pass over it or count with it, and may miss a row that moves to another
 * entry meanwhile.  It does not see what this transaction has written since
 * the scan began, or else a take could go round in circles.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relscan.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation_d.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

#include "store/store.h"
#include "util/compat.h"

/*
 * Begin a scan through another index of the table; idem_scan_restart() tells
 * where, with "nkeys" keys.  Without a snapshot it is a dirty scan: it sees
 * what others are writing, and what this transaction has written before, but
 * may miss a row that moves to another entry meanwhile.
 */
void
idem_scan_begin(IdemScan *scan, IdemTable *table, IdemRelationId index,
				Snapshot snapshot, int nkeys)
{
	scan->table = table;
	scan->index = idem_index_open(index, table->rel);
	scan->is_dirty = snapshot == NULL;
	if (scan->is_dirty)
	{
		InitDirtySnapshot(scan->dirty);
		scan->command = GetCurrentCommandId(false);
		snapshot = &scan->dirty;
	}
	scan->scan = index_beginscan(table->rel, scan->index, snapshot, NULL,
								 nkeys, 0, SO_NONE);
}

/*
 * Begin a scan through the primary key, for rows of which the first "ncolumns"
 * columns of that, in the table's order, have certain values;
 * idem_scan_restart_key() tells which.  The columns are text.
 */
void
idem_scan_begin_key(IdemScan *scan, IdemTable *table, Snapshot snapshot,
					int ncolumns)
{
	scan->table = table;
	scan->index = index_open(RelationGetRelid(table->pkey), AccessShareLock);
	scan->is_dirty = false;
	scan->scan = index_beginscan(table->rel, scan->index, snapshot, NULL,
								 ncolumns, 0, SO_NONE);
}

/*
 * Go to the first row that has this beginning of a key.
 */
void
idem_scan_restart_key(IdemScan *scan, const Datum *key)
{
	Form_pg_index pkey = scan->index->rd_index;
	AttrNumber	first = idem_first_key_column(scan->table);
	ScanKeyData scankeys[INDEX_MAX_KEYS];
	int			nkeys = 0;

	for (int i = 0; i < pkey->indnkeyatts; i++)
	{
		int			column = pkey->indkey.values[i] - first;

		if (column < scan->scan->numberOfKeys)
			ScanKeyEntryInitialize(&scankeys[nkeys++], 0, i + 1,
								   BTEqualStrategyNumber, InvalidOid,
								   C_COLLATION_OID, F_TEXTEQ, key[column]);
	}
	index_rescan(scan->scan, scankeys, nkeys, NULL, 0);
}

/*
 * Go to the first row that the keys select.
 */
void
idem_scan_restart(IdemScan *scan, ScanKey keys)
{
	index_rescan(scan->scan, keys, scan->scan->numberOfKeys, NULL, 0);
}

/*
 * Fetch the next row into table->row.  Returns false at the end.
 */
bool
idem_scan_next(IdemScan *scan, ScanDirection direction)
{
	IdemTable  *table = scan->table;

	do
	{
		if (!index_getnext_slot(scan->scan, direction, table->row))
			return false;
	} while (scan->is_dirty && idem_is_written_since(table, scan->command));
	table->holder = InvalidTransactionId;
	if (scan->is_dirty)
		table->holder = TransactionIdIsValid(scan->dirty.xmin) ?
			scan->dirty.xmin : scan->dirty.xmax;
	table->speculative_token = 0;
	slot_getallattrs(table->row);
	return true;
}

void
idem_scan_end(IdemScan *scan)
{
	index_endscan(scan->scan);
	index_close(scan->index, NoLock);
}
