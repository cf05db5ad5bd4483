/*-------------------------------------------------------------------------
 *
 * due_low_water.h
 *		From where on a take has to look for rows that are ready.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DUE_LOW_WATER_H
#define IDEMPOTENCY_DUE_LOW_WATER_H

#include "datatype/timestamp.h"

/* How many transactions a single row can be known to wait for. */
#define IDEM_ROW_BLOCKERS	1024

/*
 * The transactions for which a row has to wait: as long as all of them are in
 * progress, nothing can be taken by means of it.
 */
typedef struct IdemBlockers
{
	int			count;			/* -1: the row does not wait for any */
	TransactionId xids[IDEM_ROW_BLOCKERS];
} IdemBlockers;

/*
 * No scan reaches further than to this time before it begins, so a message is
 * found if it is in the index by this time after it is available.
 */
#define IDEM_PUBLISHING_US	USECS_PER_SEC

/*
 * A transaction that rows in a range wait for.
 */
typedef struct IdemBlocker
{
	TransactionId xid;
	TimestampTz first;			/* no row before this time waits for it */
}			IdemBlocker;

/*
 * How far there is nothing to be found; all zero at the beginning.
 */
typedef struct IdemDueLowWater
{
	uint64		hash;			/* of the topic */
	uint64		relation_changes;
	TimestampTz reached;
	int64		restart_at;		/* see idem_monotonic_time() */

	/* All rows from blocked_from on, before blocked_until, are blocked. */
	TimestampTz blocked_from;
	TimestampTz blocked_until;
	int64		look_again_at;	/* forget that then */
	int			nblockers;		/* 0: there are no such rows */
	int			size;			/* of the array */
	IdemBlocker *blockers;
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
	bool		all_blocked;	/* nor one that is not blocked */
	TimestampTz last;			/* the time of the last row */
} IdemDueScan;

/* What a scan is to do with a row that it has found. */
typedef enum IdemDueStep
{
	IDEM_DUE_LOOK,				/* look at it */
	IDEM_DUE_SKIP,				/* go on behind the time that is returned */
} IdemDueStep;

extern TimestampTz idem_due_scan_begin(IdemDueScan *scan, const Datum *topic,
									   TimestampTz now);
extern IdemDueStep idem_due_scan_found(IdemDueScan *scan,
									   TimestampTz available_at,
									   TimestampTz *after);
extern void idem_due_scan_looked(IdemDueScan *scan,
								 const IdemBlockers *blockers);
extern bool idem_add_blocker(IdemBlockers *blockers, TransactionId xid);
extern void idem_due_scan_end(IdemDueScan *scan, bool is_complete);

#endif							/* IDEMPOTENCY_DUE_LOW_WATER_H */
