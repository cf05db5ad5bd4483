/*-------------------------------------------------------------------------
 *
 * signature.c
 *		Signatures of webhooks: HMAC-SHA-256 (RFC 2104, FIPS 180-4) in base64,
 *		as the Standard Webhooks specification requires.
 *
 * This file owns no state.  sink_webhook.c calls it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdint.h>
#include <string.h>

#include "signature.h"

#define BLOCK	64				/* bytes */
#define DIGEST	32				/* bytes */
#define ROTATE(x, n)	((x) >> (n) | (x) << (32 - (n)))

typedef struct Sha256
{
	uint32_t	state[8];
	uint64_t	length;			/* in bytes */
	unsigned char block[BLOCK];
} Sha256;

/* The hash of nothing. */
static const Sha256 sha256_initial = {
	{
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
		0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
	}
};

static const char base64_digits[] =
"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static const uint32_t round_constants[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
	0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
	0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
	0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
	0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
	0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
	0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
	0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
	0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2
};

static void begin_pass(Sha256 *hash, const unsigned char *key,
					   unsigned char pad);
static void sha256_add(Sha256 *hash, const void *data, size_t length);
static void sha256_end(Sha256 *hash, unsigned char *digest);
static void sha256_block(Sha256 *hash);

/*
 * Read a secret, "whsec_" followed by base64, into "secret", which has room
 * for "size" bytes.  Returns its length, or -1 if the string is not a secret
 * or the secret is longer.
 */
int
relay_signature_read_secret(const char *string, unsigned char *secret,
							int size)
{
	uint32_t	bits = 0;
	int			nbits = 0;
	int			length = 0;

	if (strncmp(string, "whsec_", 6) != 0)
		return -1;
	for (string += 6; *string && *string != '='; string++)
	{
		const char *digit = strchr(base64_digits, *string);

		if (!digit)
			return -1;
		bits = bits << 6 | (uint32_t) (digit - base64_digits);
		nbits += 6;
		if (nbits >= 8)
		{
			if (length == size)
				return -1;
			nbits -= 8;
			secret[length++] = (unsigned char) (bits >> nbits);
		}
	}
	return string[strspn(string, "=")] ? -1 : length;
}

/*
 * Sign strings, joined by full stops.  Writes "v1," and the signature in
 * base64 to "signature", which has RELAY_SIGNATURE_SIZE bytes.
 */
void
relay_signature_make(const unsigned char *secret, int length,
					 const char *const *parts, int nparts, char *signature)
{
	unsigned char key[BLOCK] = {0};
	unsigned char digest[DIGEST + 1] = {0};
	Sha256		hash = sha256_initial;
	int			i;

	if (length > BLOCK)
	{
		sha256_add(&hash, secret, (size_t) length);
		sha256_end(&hash, key);
	}
	else
		memcpy(key, secret, (size_t) length);

	begin_pass(&hash, key, 0x36);
	for (i = 0; i < nparts; i++)
	{
		if (i > 0)
			sha256_add(&hash, ".", 1);
		sha256_add(&hash, parts[i], strlen(parts[i]));
	}
	sha256_end(&hash, digest);
	begin_pass(&hash, key, 0x5c);
	sha256_add(&hash, digest, DIGEST);
	sha256_end(&hash, digest);

	signature = stpcpy(signature, "v1,");
	for (i = 0; i < DIGEST; i += 3)
	{
		uint32_t	bits = (uint32_t) digest[i] << 16 |
			(uint32_t) digest[i + 1] << 8 | digest[i + 2];

		*signature++ = base64_digits[bits >> 18];
		*signature++ = base64_digits[bits >> 12 & 63];
		*signature++ = base64_digits[bits >> 6 & 63];
		*signature++ = i + 2 < DIGEST ? base64_digits[bits & 63] : '=';
	}
	*signature = '\0';
}

/*
 * Begin one of the two passes of HMAC: hash the padded key.
 */
static void
begin_pass(Sha256 *hash, const unsigned char *key, unsigned char pad)
{
	unsigned char block[BLOCK];
	int			i;

	for (i = 0; i < BLOCK; i++)
		block[i] = key[i] ^ pad;
	*hash = sha256_initial;
	sha256_add(hash, block, BLOCK);
}

/*
 * Add bytes to a hash.
 */
static void
sha256_add(Sha256 *hash, const void *data, size_t length)
{
	const unsigned char *from = data;

	while (length > 0)
	{
		size_t		used = hash->length % BLOCK;
		size_t		part = BLOCK - used < length ? BLOCK - used : length;

		memcpy(hash->block + used, from, part);
		hash->length += part;
		from += part;
		length -= part;
		if (hash->length % BLOCK == 0)
			sha256_block(hash);
	}
}

/*
 * Write the hash of all bytes to "digest".  The hash cannot be used further.
 */
static void
sha256_end(Sha256 *hash, unsigned char *digest)
{
	uint64_t	bits = hash->length * 8;
	unsigned char size[8];
	int			i;

	for (i = 0; i < 8; i++)
		size[i] = (unsigned char) (bits >> (56 - 8 * i));
	sha256_add(hash, "\x80", 1);
	while (hash->length % BLOCK != BLOCK - 8)
		sha256_add(hash, "", 1);
	sha256_add(hash, size, 8);
	for (i = 0; i < DIGEST; i++)
		digest[i] = (unsigned char) (hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

/*
 * Add the full block to the state.
 */
static void
sha256_block(Sha256 *hash)
{
	uint32_t	w[64];
	uint32_t	s[8];
	const unsigned char *at = hash->block;
	int			i;

	for (i = 0; i < 16; i++, at += 4)
		w[i] = (uint32_t) at[0] << 24 | (uint32_t) at[1] << 16 |
			(uint32_t) at[2] << 8 | at[3];
	for (; i < 64; i++)
	{
		uint32_t	a = w[i - 15];
		uint32_t	b = w[i - 2];

		w[i] = w[i - 16] + (ROTATE(a, 7) ^ ROTATE(a, 18) ^ a >> 3) +
			w[i - 7] + (ROTATE(b, 17) ^ ROTATE(b, 19) ^ b >> 10);
	}
	memcpy(s, hash->state, sizeof(s));
	for (i = 0; i < 64; i++)
	{
		uint32_t	t1 = s[7] +
			(ROTATE(s[4], 6) ^ ROTATE(s[4], 11) ^ ROTATE(s[4], 25)) +
			((s[4] & s[5]) ^ (~s[4] & s[6])) + round_constants[i] + w[i];
		uint32_t	t2 =
			(ROTATE(s[0], 2) ^ ROTATE(s[0], 13) ^ ROTATE(s[0], 22)) +
			((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));

		memmove(s + 1, s, 7 * sizeof(uint32_t));
		s[4] += t1;
		s[0] = t1 + t2;
	}
	for (i = 0; i < 8; i++)
		hash->state[i] += s[i];
}
