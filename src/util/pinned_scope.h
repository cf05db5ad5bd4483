/*-------------------------------------------------------------------------
 *
 * pinned_scope.h
 *		On a shard: is a scope pinned in this transaction?
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_PINNED_SCOPE_H
#define IDEMPOTENCY_PINNED_SCOPE_H

extern void idem_check_pin(Datum scope);

#endif							/* IDEMPOTENCY_PINNED_SCOPE_H */
