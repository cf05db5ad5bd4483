/*-------------------------------------------------------------------------
 *
 * launcher.h
 *		The process that starts the workers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_H
#define IDEMPOTENCY_LAUNCHER_H

extern void idem_register_launcher(void);

#endif							/* IDEMPOTENCY_LAUNCHER_H */
