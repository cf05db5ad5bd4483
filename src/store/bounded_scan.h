/*-------------------------------------------------------------------------
 *
 * bounded_scan.h
 *		Reading that is bounded by what it looks at, not by what it finds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BOUNDED_SCAN_H
#define IDEMPOTENCY_BOUNDED_SCAN_H

#include "access/relscan.h"
#include "access/skey.h"
#include "store/store.h"

/* Stands for the table's primary key, which has no name of its own. */
#define IDEM_PRIMARY_KEY	IDEM_NUM_RELATIONS

/*
 * The entries of an index of an open table, one by one.
 */
typedef struct IdemEntryScan
{
	IdemTable  *table;
	Relation	index;
	IndexScanDesc scan;
	Snapshot	snapshot;
} IdemEntryScan;

/*
 * A sample of the pages of an open table.  "share" of them are read.
 */
typedef struct IdemSample
{
	IdemTable  *table;
	TableScanDesc scan;
	BlockNumber first;			/* of the table's, and how many from there on */
	BlockNumber pages;
	BlockNumber wanted;			/* how many are read */
	BlockNumber next;			/* how many have been begun */
	double		share;
} IdemSample;

extern void idem_entries_begin(IdemEntryScan *entries, IdemTable *table,
							   IdemRelationId index, int nkeys);
extern void idem_entries_restart(IdemEntryScan *entries, ScanKey keys);
extern bool idem_entries_next(IdemEntryScan *entries, ScanDirection direction,
							  Datum *first, bool *visible);
extern void idem_entries_end(IdemEntryScan *entries);

extern void idem_sample_begin(IdemSample *sample, IdemTable *table,
							  int max_pages);
extern void idem_sample_begin_last(IdemSample *sample, IdemTable *table,
								   int max_pages);
extern bool idem_sample_next(IdemSample *sample);
extern void idem_sample_end(IdemSample *sample);

#endif							/* IDEMPOTENCY_BOUNDED_SCAN_H */
