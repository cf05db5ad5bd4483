/*-------------------------------------------------------------------------
 *
 * bounded_scan.c
 *		Reading that is bounded by what it looks at, not by what it finds.
 *
 * A scan for rows passes any number of dead ones on its way, whole pages of
 * them, and an old snapshot may keep vacuum from removing millions.  Here the
 * caller gets every entry of an index, told whether there is a row behind it;
 * or the rows of so many pages of a table, taken from all parts of it.
 *
 * Rows are those that the active snapshot sees, and come in table->row.
 * Nothing here writes, waits, or takes a predicate lock: what is found under
 * SERIALIZABLE must not be of consequence for data.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/itup.h"
#include "access/tableam.h"
#include "common/pg_prng.h"
#include "storage/bufmgr.h"
#include "utils/snapmgr.h"

#include "store/bounded_scan.h"
#include "util/compat.h"

static void begin_page(IdemSample *sample);

/*
 * Begin a scan through an index; idem_entries_restart() tells where, with
 * "nkeys" keys.
 */
void
idem_entries_begin(IdemEntryScan *entries, IdemTable *table,
				   IdemRelationId index, int nkeys)
{
	entries->table = table;
	if (index == IDEM_PRIMARY_KEY)
		entries->index = index_open(RelationGetRelid(table->pkey),
									AccessShareLock);
	else
		entries->index = idem_index_open(index, table->rel);
	entries->snapshot = GetActiveSnapshot();
	entries->scan = index_beginscan(table->rel, entries->index, SnapshotAny,
									NULL, nkeys, 0, SO_NONE);
	entries->scan->xs_want_itup = true;
}

/*
 * Go to the first entry that the keys select.
 */
void
idem_entries_restart(IdemEntryScan *entries, ScanKey keys)
{
	index_rescan(entries->scan, keys, entries->scan->numberOfKeys, NULL, 0);
}

/*
 * Step to the next entry.  Returns false at the end.  "first" is the entry's
 * first column, which must not be NULL; "visible" tells whether there is a
 * row.  An entry that a scan before has marked as dead to everybody is not
 * one any more.
 */
bool
idem_entries_next(IdemEntryScan *entries, ScanDirection direction,
				  Datum *first, bool *visible)
{
	IndexScanDesc scan = entries->scan;
	IdemTable  *table = entries->table;
	bool		isnull;			/* cppcheck-suppress unassignedVariable */

	if (index_getnext_tid(scan, direction) == NULL)
		return false;
	*first = index_getattr(scan->xs_itup, 1, scan->xs_itupdesc, &isnull);

	/* An entry may stand for several versions of a row. */
	*visible = false;
	do
	{
		if (!index_fetch_heap(scan, table->row))
			break;
		*visible = table_tuple_satisfies_snapshot(table->rel, table->row,
												  entries->snapshot);
	} while (!*visible && scan->xs_heap_continue);
	return true;
}

void
idem_entries_end(IdemEntryScan *entries)
{
	index_endscan(entries->scan);
	index_close(entries->index, NoLock);
}

/*
 * Begin to read a sample: all pages of a table that has no more than
 * "max_pages"; of a larger one, a page at random out of each of as many parts.
 */
void
idem_sample_begin(IdemSample *sample, IdemTable *table, int max_pages)
{
	sample->table = table;
	sample->first = 0;
	sample->pages = RelationGetNumberOfBlocks(table->rel);
	sample->wanted = Min(sample->pages, max_pages);
	sample->next = 0;
	sample->share = sample->pages == 0 ? 1 :
		(double) sample->wanted / sample->pages;
	sample->scan = NULL;
}

/*
 * Begin to read the last pages of a table, "max_pages" if it has as many.
 */
void
idem_sample_begin_last(IdemSample *sample, IdemTable *table, int max_pages)
{
	idem_sample_begin(sample, table, max_pages);
	sample->first = sample->pages - sample->wanted;
	sample->pages = sample->wanted;
}

/*
 * Fetch the next row; its columns are not extracted yet.  Returns false at the
 * end.
 */
bool
idem_sample_next(IdemSample *sample)
{
	TupleTableSlot *row = sample->table->row;

	while (sample->scan == NULL ||
		   !table_scan_getnextslot_tidrange(sample->scan,
											ForwardScanDirection, row))
	{
		if (sample->next == sample->wanted)
			return false;
		begin_page(sample);
	}
	return true;
}

/*
 * Begin to read the next page.
 */
static void
begin_page(IdemSample *sample)
{
	uint64		pages = sample->pages;
	uint64		from = sample->next * pages / sample->wanted;
	uint64		to = (sample->next + 1) * pages / sample->wanted;
	BlockNumber page = sample->first +
		pg_prng_uint64_range(&pg_global_prng_state, from, to - 1);
	ItemPointerData first;
	ItemPointerData last;

	ItemPointerSet(&first, page, FirstOffsetNumber);
	ItemPointerSet(&last, page, MaxOffsetNumber);
	if (sample->scan == NULL)
		sample->scan = table_beginscan_tidrange(sample->table->rel,
												GetActiveSnapshot(),
												&first, &last, SO_NONE);
	else
		table_rescan_tidrange(sample->scan, &first, &last);
	sample->next++;
}

void
idem_sample_end(IdemSample *sample)
{
	if (sample->scan != NULL)
		table_endscan(sample->scan);
}
