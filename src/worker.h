/*-------------------------------------------------------------------------
 *
 * worker.h
 *		The background workers that clean up.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WORKER_H
#define IDEMPOTENCY_WORKER_H

extern void idem_register_launcher(void);

#endif							/* IDEMPOTENCY_WORKER_H */
