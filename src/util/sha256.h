/*-------------------------------------------------------------------------
 *
 * sha256.h
 *		SHA-256 by the server's own implementation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SHA256_H
#define IDEMPOTENCY_SHA256_H

extern void idem_sha256(const char *data, size_t length, uint8 *digest);

#endif							/* IDEMPOTENCY_SHA256_H */
