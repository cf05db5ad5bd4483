/*-------------------------------------------------------------------------
 *
 * cleanup.h
 *		Deletion of what has expired.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLEANUP_H
#define IDEMPOTENCY_CLEANUP_H

typedef struct IdemCleanup
{
	int64		keys_deleted;
	int64		tokens_deleted;
	int64		messages_deleted;
	bool		more;			/* there may be another batch */
} IdemCleanup;

extern void idem_cleanup_batch(int batch_size, IdemCleanup *result);

#endif							/* IDEMPOTENCY_CLEANUP_H */
