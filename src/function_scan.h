/*-------------------------------------------------------------------------
 *
 * function_scan.h
 *		A plan node for SELECT ... FROM one of our functions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_FUNCTION_SCAN_H
#define IDEMPOTENCY_FUNCTION_SCAN_H

#include "fmgr.h"

extern void idem_register_function_scan(void);
extern bool idem_hand_over(FunctionCallInfo fcinfo, const Datum *values,
						   const bool *nulls);

#endif							/* IDEMPOTENCY_FUNCTION_SCAN_H */
