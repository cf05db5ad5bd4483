/*-------------------------------------------------------------------------
 *
 * rollback.h
 *		Reset a session's cached search positions after a rollback.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ROLLBACK_H
#define IDEMPOTENCY_ROLLBACK_H

typedef void (*IdemForget) (void);

extern void idem_forget_on_rollback(IdemForget forget);

#endif							/* IDEMPOTENCY_ROLLBACK_H */
