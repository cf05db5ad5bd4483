/*-------------------------------------------------------------------------
 *
 * key_lock.h
 *		One session at a time at a key, for as long as a call takes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEY_LOCK_H
#define IDEMPOTENCY_KEY_LOCK_H

#include "datatype/timestamp.h"
#include "storage/lock.h"
#include "store/store.h"

/* Zeroed by a call that may want the lock. */
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
