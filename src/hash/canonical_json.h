/*-------------------------------------------------------------------------
 *
 * canonical_json.h
 *		Canonical JSON, RFC 8785.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CANONICAL_JSON_H
#define IDEMPOTENCY_CANONICAL_JSON_H

#include "lib/stringinfo.h"
#include "utils/jsonb.h"

extern void idem_append_canonical_json(StringInfo out, Jsonb *document);

#endif							/* IDEMPOTENCY_CANONICAL_JSON_H */
