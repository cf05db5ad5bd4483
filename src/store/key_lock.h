/*-------------------------------------------------------------------------
 *
 * key_lock.h
 *		A lock on a key for the duration of a call.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEY_LOCK_H
#define IDEMPOTENCY_KEY_LOCK_H

#include "datatype/timestamp.h"
#include "storage/lock.h"
#include "store/store.h"

/* A call that might need the lock sets this to zero. */
typedef struct IdemKeyLock
{
	LOCKTAG		tag;
	bool		held;
} IdemKeyLock;

extern bool idem_key_lock(IdemKeyLock *lock, IdemCursor *cursor,
						  const Datum *key);
extern bool idem_key_lock_until(IdemKeyLock *lock, IdemCursor *cursor,
								const Datum *key, TimestampTz deadline);
extern void idem_key_unlock(IdemKeyLock *lock);

#endif							/* IDEMPOTENCY_KEY_LOCK_H */
