/*-------------------------------------------------------------------------
 *
 * sha256.c
 *		SHA-256 by the server's own implementation.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/sha2.h"

#include "util/sha256.h"

/*
 * Set "digest" to the SHA-256 of some bytes; its length is
 * PG_SHA256_DIGEST_LENGTH.
 */
void
idem_sha256(const char *data, size_t length, uint8 *digest)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, (const uint8 *) data, length) < 0 ||
		pg_cryptohash_final(ctx, digest, PG_SHA256_DIGEST_LENGTH) < 0)
		elog(ERROR, "could not compute %s hash: %s", "SHA256",
			 pg_cryptohash_error(ctx));
	pg_cryptohash_free(ctx);
}
