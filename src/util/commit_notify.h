/*-------------------------------------------------------------------------
 *
 * commit_notify.h
 *		Waiting for a commit by another session, and waking the waiters.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_COMMIT_NOTIFY_H
#define IDEMPOTENCY_COMMIT_NOTIFY_H

#include "datatype/timestamp.h"

/* The maximum delay for changes that wake no waiter. */
#define IDEM_LOOK_AGAIN_MS	1000

extern void idem_reserve_waiters(void);

/* For waiters. */
extern void idem_await_claim(const Datum *key);
extern void idem_await_messages(const Datum *topics, int ntopics);
extern void idem_await_change(TimestampTz due, TimestampTz deadline);
extern void idem_await_end(void);

/* For sessions that wake waiters. */
extern void idem_notify_claim_end(const Datum *key);
extern void idem_notify_message(Datum topic, TimestampTz due,
								bool was_there);
extern void idem_wake_next(const Datum *topics, int ntopics);

#endif							/* IDEMPOTENCY_COMMIT_NOTIFY_H */
