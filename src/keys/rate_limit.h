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

/* When a new key was counted; IDEM_NOT_COUNTED if it was not. */
typedef int32 IdemRateSlot;

#define IDEM_NOT_COUNTED	0

extern void idem_reserve_rate_limits(void);
extern IdemRateSlot idem_count_new_key(Datum scope);
extern void idem_uncount_new_key(Datum scope, IdemRateSlot slot);

/*
 * A key of this scope is about to be new.  Raises ID002 if that would be one
 * too many.
 */
static inline IdemRateSlot
idem_admit_new_key(Datum scope)
{
	if (likely(idem_max_new_keys_per_minute == 0))
		return IDEM_NOT_COUNTED;
	return idem_count_new_key(scope);
}

/*
 * The key has not become new after all: somebody else was faster.
 */
static inline void
idem_withdraw_new_key(Datum scope, IdemRateSlot slot)
{
	if (unlikely(slot != IDEM_NOT_COUNTED))
		idem_uncount_new_key(scope, slot);
}

#endif							/* IDEMPOTENCY_RATE_LIMIT_H */
