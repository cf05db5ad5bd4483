/*-------------------------------------------------------------------------
 *
 * errors.h
 *		SQLSTATEs of class ID, for conditions that a client must distinguish.
 *
 * Everything else is reported with PostgreSQL's own codes.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ERRORS_H
#define IDEMPOTENCY_ERRORS_H

#include "utils/elog.h"

/* idempotency_key_invalid: the key breaks the key rules */
#define ERRCODE_IDEM_KEY_INVALID		MAKE_SQLSTATE('I','D','0','0','1')

/* idempotency_rate_limited: too many new keys in this scope */
#define ERRCODE_IDEM_RATE_LIMITED		MAKE_SQLSTATE('I','D','0','0','2')

/* idempotency_claim_lost: the claim token is not the current one */
#define ERRCODE_IDEM_CLAIM_LOST			MAKE_SQLSTATE('I','D','0','0','3')

/* idempotency_claim_not_found: never claimed, expired or released */
#define ERRCODE_IDEM_CLAIM_NOT_FOUND	MAKE_SQLSTATE('I','D','0','0','4')

/* idempotency_action_id_ahead: the action id lies too far in the future */
#define ERRCODE_IDEM_ACTION_ID_AHEAD	MAKE_SQLSTATE('I','D','0','0','5')

#endif							/* IDEMPOTENCY_ERRORS_H */
