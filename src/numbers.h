/*-------------------------------------------------------------------------
 *
 * numbers.h
 *		The numbers that the extension's sequences give.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_NUMBERS_H
#define IDEMPOTENCY_NUMBERS_H

#include "relations.h"

/* No sequence is raised further: as many numbers are left for all time. */
#define IDEM_MAX_RAISE	(PG_INT64_MAX / 2)

extern int64 idem_next_number(IdemRelationId sequence);
extern int64 idem_last_number(IdemRelationId sequence);
extern int64 idem_raise_number(IdemRelationId sequence, int64 at_least);

#endif							/* IDEMPOTENCY_NUMBERS_H */
