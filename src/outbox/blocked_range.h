/*-------------------------------------------------------------------------
 *
 * blocked_range.h
 *		A range of time in which all ready rows wait for transactions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BLOCKED_RANGE_H
#define IDEMPOTENCY_BLOCKED_RANGE_H

#include "datatype/timestamp.h"

/* How many transactions a single row can be known to wait for. */
#define IDEM_ROW_BLOCKERS	1024

/*
 * The transactions for which a row has to wait: as long as all of them are in
 * progress, nothing can be taken by means of it.
 */
typedef struct IdemBlockers
{
	int			count;			/* 0: the row does not wait for any */
	TransactionId last;			/* the one that was added last, or its part */
	TransactionId xids[IDEM_ROW_BLOCKERS];
} IdemBlockers;

/*
 * Rows that lie together, by the times of the first and of the last one.
 */
typedef struct IdemStretch
{
	TimestampTz first;
	TimestampTz last;
} IdemStretch;

/*
 * A range; all zero where there is none.
 */
typedef struct IdemBlockedRange
{
	TimestampTz from;			/* the time of its first row */
	TimestampTz until;			/* all rows before that have been looked at */
	struct blockers_hash *blockers; /* what they wait for; NULL: nothing */
	int			nstretches;		/* of all blockers */
	IdemStretch *holes;			/* to look at again, in order */
	int			nholes;
	int			size;			/* of the array */
	int			nscanned;		/* holes that a scan goes through */
	int			next;			/* of these, the first it has not passed */
	bool		next_stays;		/* does that one stay, as it is now? */
	MemoryContext context;		/* NULL: there is no range */
} IdemBlockedRange;

static inline bool
idem_range_exists(const IdemBlockedRange *range)
{
	return range->context != NULL;
}

extern bool idem_add_blocker(IdemBlockers *blockers, TransactionId xid);
extern void idem_range_begin(IdemBlockedRange *range);
extern void idem_range_create(IdemBlockedRange *range,
							  TimestampTz available_at);
extern TimestampTz idem_range_next(const IdemBlockedRange *range);
extern void idem_range_pass(IdemBlockedRange *range, TimestampTz available_at);
extern void idem_range_stay(IdemBlockedRange *range, TimestampTz available_at);
extern void idem_range_add_hole(IdemBlockedRange *range,
								TimestampTz available_at, TimestampTz previous);
extern void idem_range_add(IdemBlockedRange *range,
						   const IdemBlockers *blockers,
						   TimestampTz available_at, TimestampTz previous);
extern void idem_range_forget(IdemBlockedRange *range);

#endif							/* IDEMPOTENCY_BLOCKED_RANGE_H */
