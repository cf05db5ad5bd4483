/*-------------------------------------------------------------------------
 *
 * rate_limit.h
 *		idempotency.max_new_keys_per_minute.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RATE_LIMIT_H
#define IDEMPOTENCY_RATE_LIMIT_H

#include "util/settings.h"

/* The slot in which a new key was counted. */
typedef int32 IdemRateSlot;

#define IDEM_NOT_COUNTED	0

extern void idem_reserve_rate_limits(void);
extern IdemRateSlot idem_count_new_key(Datum scope);
extern void idem_uncount_new_key(Datum scope, IdemRateSlot slot);

/*
 * Count a key that is going to be new.  Raises ID002 if it exceeds the limit.
 */
static inline IdemRateSlot
idem_admit_new_key(Datum scope)
{
	if (likely(idem_max_new_keys_per_minute == 0))
		return IDEM_NOT_COUNTED;
	return idem_count_new_key(scope);
}

/*
 * Uncount a key that is not new after all, because another session was
 * faster.
 */
static inline void
idem_withdraw_new_key(Datum scope, IdemRateSlot slot)
{
	if (unlikely(slot != IDEM_NOT_COUNTED))
		idem_uncount_new_key(scope, slot);
}

#endif							/* IDEMPOTENCY_RATE_LIMIT_H */
