/*-------------------------------------------------------------------------
 *
 * cleanup.h
 *		Deleting expired rows.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLEANUP_H
#define IDEMPOTENCY_CLEANUP_H

#include "datatype/timestamp.h"
#include "nodes/execnodes.h"

/* The kinds of rows, in the order of idem_cleanup()'s result. */
typedef enum IdemCleanupKind
{
	IDEM_CLEANUP_KEYS,
	IDEM_CLEANUP_TOKENS,
	IDEM_CLEANUP_MESSAGES,
} IdemCleanupKind;

#define IDEM_NUM_CLEANUP_KINDS	(IDEM_CLEANUP_MESSAGES + 1)

/*
 * The position of a sequence of batches; all zero at the beginning.  It is
 * valid only after the batch has been committed.
 */
typedef struct IdemCleanupPosition
{
	Oid			table;
	TimestampTz reached;		/* time of the last row that was found */
	int64		restart_at;		/* start from the oldest row again then; see
								 * idem_monotonic_time() */
	int64		restart_took;	/* duration of the last one, in microseconds */
} IdemCleanupPosition;

extern const char *const idem_cleanup_names[];

extern Oid	idem_cleanup_owner(IdemCleanupKind kind);
extern double idem_cleanup_retention(IdemCleanupKind kind);
extern int64 idem_cleanup_batch(IdemCleanupKind kind, int batch_size,
								IdemCleanupPosition *position,
								ReturnSetInfo *result, bool *more);

#endif							/* IDEMPOTENCY_CLEANUP_H */
