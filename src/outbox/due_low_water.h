/*-------------------------------------------------------------------------
 *
 * due_low_water.h
 *		From where on a take has to look for rows that are ready.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DUE_LOW_WATER_H
#define IDEMPOTENCY_DUE_LOW_WATER_H

#include "outbox/blocked_range.h"

/*
 * No scan reaches further than to this time before it begins, so a message is
 * found if it is in the index by this time after it is available.
 */
#define IDEM_PUBLISHING_US	USECS_PER_SEC

/*
 * How far there is nothing to be found; all zero at the beginning.
 */
typedef struct IdemDueLowWater
{
	uint64		hash;			/* see idem_due_hash() */
	uint64		contents_changes;
	TimestampTz reached;
	int64		restart_at;		/* see idem_monotonic_time() */

	IdemBlockedRange range;		/* of rows that need not be looked at */
	int64		look_again_at;	/* forget the range then; 0: not yet known */
} IdemDueLowWater;

/*
 * A scan that begins at a mark, and moves it.
 */
typedef struct IdemDueScan
{
	IdemDueLowWater *mark;
	TimestampTz until;			/* no further than there */
	int64		begin;
	bool		restarted;		/* it begins with the first entry */
	bool		is_at_mark;		/* it has not found a row yet */
	bool		extends;		/* does the range become longer? */
	TimestampTz last;			/* the time of the last row */
	TimestampTz previous;		/* and of the one before */
} IdemDueScan;

/* What a scan is to do with a row that it has found. */
typedef enum IdemDueStep
{
	IDEM_DUE_LOOK,				/* look at it */
	IDEM_DUE_SKIP,				/* go on behind the time that is returned */
} IdemDueStep;

extern uint64 idem_due_hash(Datum name, uint64 number);
extern TimestampTz idem_due_scan_begin(IdemDueScan *scan, uint64 hash,
									   TimestampTz now);
extern IdemDueStep idem_due_scan_found(IdemDueScan *scan,
									   TimestampTz available_at,
									   TimestampTz *after);
extern void idem_due_scan_looked(IdemDueScan *scan,
								 const IdemBlockers *blockers);
extern void idem_due_scan_end(IdemDueScan *scan, bool is_complete);

#endif							/* IDEMPOTENCY_DUE_LOW_WATER_H */
