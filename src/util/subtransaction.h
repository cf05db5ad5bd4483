/*-------------------------------------------------------------------------
 *
 * subtransaction.h
 *		What may be undone, or fail, and the call goes on.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SUBTRANSACTION_H
#define IDEMPOTENCY_SUBTRANSACTION_H

#include "utils/elog.h"

/* Does something; returns whether it is to stay. */
typedef bool (*IdemAction) (void *arg);

extern ErrorData *idem_in_subtransaction(IdemAction action, void *arg,
										 bool (*is_expected) (int sqlstate));

#endif							/* IDEMPOTENCY_SUBTRANSACTION_H */
