/*-------------------------------------------------------------------------
 *
 * claim_holder.h
 *		Calls of a claim's holder, for callers inside the extension.
 *		extension.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLAIM_HOLDER_H
#define IDEMPOTENCY_CLAIM_HOLDER_H

#include "fmgr.h"
#include "store/store.h"

/* The response that idem_complete() stores. A NULL pointer is an SQL NULL. */
typedef struct IdemResponse
{
	int32		status;
	Datum		headers;		/* json */
	Datum		body;			/* text */
	Datum		bytes;			/* bytea */
} IdemResponse;

extern void idem_remember_claim(int64 token);
extern bool idem_complete_claim(const Datum *key, const IdemResponse *response,
								const int64 *token);
extern bool idem_complete_in(IdemCursor *cursor, const Datum *key,
							 const IdemResponse *response,
							 const int64 *token);

extern Datum idem_check_size(Datum value, const char *name);

#endif							/* IDEMPOTENCY_CLAIM_HOLDER_H */
