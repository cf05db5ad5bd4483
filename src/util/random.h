/*-------------------------------------------------------------------------
 *
 * random.h
 *		Random bytes that nobody can foretell.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RANDOM_H
#define IDEMPOTENCY_RANDOM_H

extern void idem_random_bytes(unsigned char *target, int length);

#endif							/* IDEMPOTENCY_RANDOM_H */
