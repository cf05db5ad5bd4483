/*-------------------------------------------------------------------------
 *
 * request_hash.h
 *		SHA-256 of a normalised request.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REQUEST_HASH_H
#define IDEMPOTENCY_REQUEST_HASH_H

#include "utils/jsonb.h"

extern bytea *idem_hash_json_request(const char *method, const char *path,
									 Jsonb *body);

#endif							/* IDEMPOTENCY_REQUEST_HASH_H */
