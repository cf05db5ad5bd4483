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

/* The maximum number of transactions that a row is known to wait for. */
#define IDEM_ROW_BLOCKERS	1024

/*
 * The transactions that a row waits for.  While all of them are in progress,
 * nothing can be taken through the row.
 */
typedef struct IdemBlockers
{
	int			count;			/* 0: the row does not wait for any */
	TransactionId last;			/* added last, possibly a subtransaction */
	TransactionId xids[IDEM_ROW_BLOCKERS];
} IdemBlockers;

/*
 * Adjacent rows, by the times of the first and the last one.
 */
typedef struct IdemStretch
{
	TimestampTz first;
	TimestampTz last;
} IdemStretch;

/*
 * A range; all zero if there is none.
 */
typedef struct IdemBlockedRange
{
	TimestampTz from;			/* the time of its first row */
	TimestampTz until;			/* all rows before this were looked at */
	struct blockers_hash *blockers; /* NULL: no row is blocked */
	int			nstretches;		/* of all blockers */
	IdemStretch *holes;			/* sorted; to be looked at again */
	int			nholes;
	int			size;			/* size of the array */
	int			nscanned;		/* number of holes that a scan visits */
	int			next;			/* the first of these that it has not passed */
	bool		next_stays;		/* does that one stay a hole? */
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
