/*-------------------------------------------------------------------------
 *
 * due_low_water.h
 *		Low-water marks: the time at which a take begins to look for ready rows.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DUE_LOW_WATER_H
#define IDEMPOTENCY_DUE_LOW_WATER_H

#include "outbox/blocked_range.h"

/*
 * No mark is later than this time before its scan begins.  So a message is
 * found if it is in the index by this time after it becomes available.
 */
#define IDEM_PUBLISHING_US	USECS_PER_SEC

/*
 * A mark: before "reached", there is no row.  All zero at the beginning.
 */
typedef struct IdemDueLowWater
{
	uint64		hash;			/* see idem_due_hash() */
	uint64		contents_changes;
	TimestampTz reached;
	int64		restart_at;		/* see idem_monotonic_time() */

	IdemBlockedRange range;		/* of rows that need not be looked at */
	int64		look_again_at;	/* when to forget the range; 0: not known */
} IdemDueLowWater;

/*
 * A scan that begins at a mark and moves it.
 */
typedef struct IdemDueScan
{
	IdemDueLowWater *mark;
	TimestampTz until;			/* the mark does not move past this */
	int64		begin;
	bool		restarted;		/* it began with the first entry */
	bool		is_at_mark;		/* it has not found a row yet */
	bool		extends;		/* does it extend the range? */
	TimestampTz last;			/* time of the last row */
	TimestampTz previous;		/* time of the row before it */
} IdemDueScan;

/* How a scan continues after a row that it has found. */
typedef enum IdemDueStep
{
	IDEM_DUE_LOOK,				/* look at it */
	IDEM_DUE_SKIP,				/* continue after the returned time */
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
