/*-------------------------------------------------------------------------
 *
 * xact_tid_cache.h
 *		The places of the rows that this transaction wrote last.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_XACT_TID_CACHE_H
#define IDEMPOTENCY_XACT_TID_CACHE_H

#include "storage/itemptr.h"
#include "utils/relcache.h"

extern bool idem_has_written(void);
extern void idem_remember_write(Relation table, uint32 hash,
								const ItemPointerData *tid, bool heap_only);
extern bool idem_recall_write(Relation table, uint32 hash, ItemPointer tid,
							  bool *heap_only);

#endif							/* IDEMPOTENCY_XACT_TID_CACHE_H */
