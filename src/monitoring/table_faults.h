/*-------------------------------------------------------------------------
 *
 * table_faults.h
 *		Whether the extension's tables can be used, told and not raised.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_TABLE_FAULTS_H
#define IDEMPOTENCY_TABLE_FAULTS_H

#include "store/relations.h"

extern char *idem_table_fault(IdemRelationId id);

#endif							/* IDEMPOTENCY_TABLE_FAULTS_H */
