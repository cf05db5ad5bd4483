/*-------------------------------------------------------------------------
 *
 * random.h
 *		Random bytes that nobody can predict.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RANDOM_H
#define IDEMPOTENCY_RANDOM_H

extern void idem_random_bytes(unsigned char *target, int length);
extern uint64 idem_secret_seed(void);

#endif							/* IDEMPOTENCY_RANDOM_H */
