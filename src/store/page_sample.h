/*-------------------------------------------------------------------------
 *
 * page_sample.h
 *		The rows of some pages of a table.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_PAGE_SAMPLE_H
#define IDEMPOTENCY_PAGE_SAMPLE_H

#include "access/relscan.h"
#include "store/store.h"

/*
 * A sample of the pages of an open table; "share" is the part that is read.
 */
typedef struct IdemSample
{
	IdemCursor *cursor;
	TableScanDesc scan;
	BlockNumber first;			/* the first page, and the number of pages */
	BlockNumber pages;
	BlockNumber wanted;			/* number of pages to read */
	BlockNumber next;			/* number of pages begun */
	double		share;
} IdemSample;

extern void idem_sample_begin(IdemSample *sample, IdemCursor *cursor,
							  int max_pages);
extern void idem_sample_begin_last(IdemSample *sample, IdemCursor *cursor,
								   int max_pages);
extern bool idem_sample_next(IdemSample *sample);
extern void idem_sample_end(IdemSample *sample);

#endif							/* IDEMPOTENCY_PAGE_SAMPLE_H */
