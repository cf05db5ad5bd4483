/*-------------------------------------------------------------------------
 *
 * stats.h
 *		Counters of what the functions did.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STATS_H
#define IDEMPOTENCY_STATS_H

#include "datatype/timestamp.h"
#include "port/atomics.h"

/* In the order of idem_stats' columns. */
typedef enum IdemCounter
{
	IDEM_COUNT_CLAIMS,			/* one for each IdemClaimOutcome, in order */
	IDEM_COUNT_TAKEOVERS = IDEM_COUNT_CLAIMS + 6,
	IDEM_COUNT_COMPLETIONS,
	IDEM_COUNT_FAILURES,
	IDEM_COUNT_RATE_LIMITED,
	IDEM_COUNT_ADVANCES,
	IDEM_COUNT_STALE_ADVANCES,
	IDEM_COUNT_APPENDS,			/* one for each outcome, in order */
	IDEM_COUNT_ONCE_FIRST = IDEM_COUNT_APPENDS + 6,
	IDEM_COUNT_ONCE_SEEN,
	IDEM_COUNT_PUBLISHED,
	IDEM_COUNT_TAKEN,
	IDEM_COUNT_ACKED,
	IDEM_COUNT_NACKED,
	IDEM_COUNT_DEAD,
	IDEM_COUNT_KEYS_DELETED,
	IDEM_COUNT_TOKENS_DELETED,
	IDEM_COUNT_MESSAGES_DELETED,
	IDEM_COUNT_CLEANUP_PASSES,
	IDEM_NUM_COUNTERS,
} IdemCounter;

extern pg_atomic_uint64 *idem_counters;

extern void idem_attach_stats(void);
extern TimestampTz idem_latest_clock(void);
extern void idem_request_stats_memory(void);
extern void idem_report_cleanup(void);
extern void idem_report_cleanup_at_commit(void);

/*
 * Count an event that happened "n" times.
 */
static inline void
idem_count(IdemCounter counter, int64 n)
{
	if (unlikely(idem_counters == NULL))
		idem_attach_stats();
	pg_atomic_fetch_add_u64(&idem_counters[counter], n);
}

#endif							/* IDEMPOTENCY_STATS_H */
