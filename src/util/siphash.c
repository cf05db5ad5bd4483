/*-------------------------------------------------------------------------
 *
 * siphash.c
 *		Hashes that nobody can predict.
 *
 * SipHash-2-4 is short and fast.  Its results are as good as random to
 * anybody who does not know the key, which is a secret of the server.  So a
 * user who chooses the input cannot find two inputs with the same hash.  All
 * sessions of a server compute the same hash; two servers need not, so no
 * hash must be stored.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"

#include "util/siphash.h"

static void rounds(IdemSipState *state, int count);

/*
 * Begin with the server's secret.  initdb chooses it at random for another
 * purpose, and only the owner of the server's files can see it.
 */
void
idem_sip_begin(IdemSipState *state)
{
	uint64		secret[2];

	memcpy(secret, GetMockAuthenticationNonce(), sizeof(secret));
	state->v0 = secret[0] ^ UINT64CONST(0x736f6d6570736575);
	state->v1 = secret[1] ^ UINT64CONST(0x646f72616e646f6d);
	state->v2 = secret[0] ^ UINT64CONST(0x6c7967656e657261);
	state->v3 = secret[1] ^ UINT64CONST(0x7465646279746573);
}

void
idem_sip_add(IdemSipState *state, uint64 word)
{
	state->v3 ^= word;
	rounds(state, 2);
	state->v0 ^= word;
}

/*
 * Add a length and that number of bytes, so that no two sequences of inputs
 * are equal.
 */
void
idem_sip_add_bytes(IdemSipState *state, const char *data, int length)
{
	idem_sip_add(state, length);
	while (length > 0)
	{
		uint64		word = 0;
		int			size = Min(length, (int) sizeof(word));

		memcpy(&word, data, size);
		idem_sip_add(state, word);
		data += size;
		length -= size;
	}
}

uint64
idem_sip_end(IdemSipState *state)
{
	state->v2 ^= 0xff;
	rounds(state, 4);
	return state->v0 ^ state->v1 ^ state->v2 ^ state->v3;
}

static void
rounds(IdemSipState *state, int count)
{
	uint64		v0 = state->v0;
	uint64		v1 = state->v1;
	uint64		v2 = state->v2;
	uint64		v3 = state->v3;

#define ROTATE(x, n)	(((x) << (n)) | ((x) >> (64 - (n))))

	while (count-- > 0)
	{
		v0 += v1;
		v1 = ROTATE(v1, 13) ^ v0;
		v0 = ROTATE(v0, 32);
		v2 += v3;
		v3 = ROTATE(v3, 16) ^ v2;
		v0 += v3;
		v3 = ROTATE(v3, 21) ^ v0;
		v2 += v1;
		v1 = ROTATE(v1, 17) ^ v2;
		v2 = ROTATE(v2, 32);
	}

#undef ROTATE

	state->v0 = v0;
	state->v1 = v1;
	state->v2 = v2;
	state->v3 = v3;
}
