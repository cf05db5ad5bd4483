/*-------------------------------------------------------------------------
 *
 * subtransaction.h
 *		Running code that can be undone, or fail, before the call continues.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SUBTRANSACTION_H
#define IDEMPOTENCY_SUBTRANSACTION_H

#include "utils/elog.h"

/* An action; returns whether its changes stay. */
typedef bool (*IdemAction) (void *arg);

extern ErrorData *idem_in_subtransaction(IdemAction action, void *arg,
										 bool (*is_expected) (int sqlstate));

#endif							/* IDEMPOTENCY_SUBTRANSACTION_H */
