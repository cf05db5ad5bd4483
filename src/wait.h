/*-------------------------------------------------------------------------
 *
 * wait.h
 *		Sleeping on a lock of the server, with a deadline.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WAIT_H
#define IDEMPOTENCY_WAIT_H

#include "datatype/timestamp.h"

/* Sleeps in the lock manager until what "arg" says is over. */
typedef void (*IdemSleep) (void *arg);

extern bool idem_sleep_until(IdemSleep sleep, void *arg, TimestampTz deadline);
extern void idem_check_client(void);

#endif							/* IDEMPOTENCY_WAIT_H */
