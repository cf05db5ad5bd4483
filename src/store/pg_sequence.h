/*-------------------------------------------------------------------------
 *
 * pg_sequence.h
 *		The numbers that the extension's sequences give.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_PG_SEQUENCE_H
#define IDEMPOTENCY_PG_SEQUENCE_H

#include "store/relations.h"

/* No sequence is raised further than this, so that enough numbers remain. */
#define IDEM_MAX_RAISE	(PG_INT64_MAX / 2)

extern int64 idem_sequence_next(IdemRelationId sequence);
extern int64 idem_sequence_last(IdemRelationId sequence);
extern int64 idem_sequence_raise(IdemRelationId sequence, int64 at_least);

#endif							/* IDEMPOTENCY_PG_SEQUENCE_H */
