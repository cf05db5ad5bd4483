/*-------------------------------------------------------------------------
 *
 * timed_lock.h
 *		Sleeping on a lock of the server, with a deadline.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_TIMED_LOCK_H
#define IDEMPOTENCY_TIMED_LOCK_H

#include "datatype/timestamp.h"

/* Sleeps in the lock manager until the event that "arg" describes. */
typedef void (*IdemSleep) (void *arg);

extern bool idem_sleep_until(IdemSleep sleep, void *arg, TimestampTz deadline);
extern void idem_check_client(void);

#endif							/* IDEMPOTENCY_TIMED_LOCK_H */
