/*-------------------------------------------------------------------------
 *
 * table_faults.h
 *		Checking whether the extension's tables can be used, without an error.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_TABLE_FAULTS_H
#define IDEMPOTENCY_TABLE_FAULTS_H

#include "store/relations.h"

extern char *idem_table_fault(IdemRelationId id);

#endif							/* IDEMPOTENCY_TABLE_FAULTS_H */
