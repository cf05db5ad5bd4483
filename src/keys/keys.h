/*-------------------------------------------------------------------------
 *
 * keys.h
 *		Request keys, for callers inside the extension.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_H
#define IDEMPOTENCY_KEYS_H

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "store/store.h"

typedef enum IdemClaimOutcome
{
	IDEM_CLAIM_NEW,
	IDEM_CLAIM_REPLAY,
	IDEM_CLAIM_ERASED,
	IDEM_CLAIM_IN_PROGRESS,
	IDEM_CLAIM_HASH_CONFLICT,
	IDEM_CLAIM_EXPIRED,
} IdemClaimOutcome;

/* The columns of idem_claim()'s result, in order. */
enum
{
	CLAIM_OUTCOME,
	CLAIM_TOKEN,
	CLAIM_ATTEMPT,
	CLAIM_RESPONSE_STATUS,
	CLAIM_RESPONSE_HEADERS,
	CLAIM_RESPONSE_BODY,
	CLAIM_RESPONSE_BYTES,
	CLAIM_RECOVERY_POINT,
	CLAIM_RECOVERY_STATE,
	CLAIM_LEASE_EXPIRES_AT,
	CLAIM_EXPIRES_AT,
	CLAIM_NUM_COLUMNS,
};

typedef struct IdemClaimRequest
{
	Datum		key[2];			/* scope and key, text */
	Datum		request_hash;	/* bytea, or NULL pointer */
	const Interval *ttl;		/* NULL: idempotency.default_ttl */
	const Interval *lease;		/* NULL: idempotency.default_lease */
	const Interval *wait;		/* NULL or zero: do not wait */
	Datum		stored;			/* jsonb to store, or NULL pointer */
} IdemClaimRequest;

typedef struct IdemClaimResult
{
	IdemClaimOutcome outcome;
	Datum		values[CLAIM_NUM_COLUMNS];
	bool		nulls[CLAIM_NUM_COLUMNS];
} IdemClaimResult;

extern void idem_claim_key(const IdemClaimRequest *request,
						   IdemClaimResult *result);
extern void idem_claim_in(IdemCursor *cursor, const IdemClaimRequest *request,
						  IdemClaimResult *result);
extern void idem_check_hash(Datum hash, const char *name);
extern void idem_check_hash_given(Datum hash, const char *name);

#endif							/* IDEMPOTENCY_KEYS_H */
