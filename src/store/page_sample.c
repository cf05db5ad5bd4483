/*-------------------------------------------------------------------------
 *
 * page_sample.c
 *		The rows of some pages of a table.
 *
 * Reading a sample bounds the number of pages that are read: it returns the
 * rows of at most "max_pages" pages, from all parts of the table.
 *
 * Rows are those that the active snapshot sees.  Nothing here writes, waits,
 * or takes a predicate lock, so under SERIALIZABLE data must not depend on
 * the result.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/tableam.h"
#include "common/pg_prng.h"
#include "storage/bufmgr.h"
#include "utils/snapmgr.h"

#include "store/page_sample.h"
#include "util/compat.h"

static void begin_page(IdemSample *sample);

/*
 * Begin to read a sample.  A table of at most "max_pages" pages is read
 * completely.  A larger one is divided into that number of parts, and a
 * random page of each part is read.
 */
void
idem_sample_begin(IdemSample *sample, IdemCursor *cursor, int max_pages)
{
	sample->cursor = cursor;
	sample->first = 0;
	sample->pages = RelationGetNumberOfBlocks(cursor->table->rel);
	sample->wanted = Min(sample->pages, max_pages);
	sample->next = 0;
	sample->share = sample->pages == 0 ? 1 :
		(double) sample->wanted / sample->pages;
	sample->scan = NULL;
}

/*
 * Begin to read the last "max_pages" pages of a table, or all if it has
 * fewer.
 */
void
idem_sample_begin_last(IdemSample *sample, IdemCursor *cursor, int max_pages)
{
	idem_sample_begin(sample, cursor, max_pages);
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
	TupleTableSlot *row = sample->cursor->row;

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
		sample->scan = table_beginscan_tidrange(sample->cursor->table->rel,
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
