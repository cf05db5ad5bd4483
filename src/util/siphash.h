/*-------------------------------------------------------------------------
 *
 * siphash.h
 *		Hashes that nobody can predict.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SIPHASH_H
#define IDEMPOTENCY_SIPHASH_H

typedef struct IdemSipState
{
	uint64		v0;
	uint64		v1;
	uint64		v2;
	uint64		v3;
} IdemSipState;

extern void idem_sip_begin(IdemSipState *state);
extern void idem_sip_add(IdemSipState *state, uint64 word);
extern void idem_sip_add_bytes(IdemSipState *state, const char *data,
							   int length);
extern uint64 idem_sip_end(IdemSipState *state);

#endif							/* IDEMPOTENCY_SIPHASH_H */
