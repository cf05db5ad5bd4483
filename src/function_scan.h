/*-------------------------------------------------------------------------
 *
 * function_scan.h
 *		A plan node for SELECT ... FROM one of our functions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_FUNCTION_SCAN_H
#define IDEMPOTENCY_FUNCTION_SCAN_H

extern void idem_register_function_scan(void);

#endif							/* IDEMPOTENCY_FUNCTION_SCAN_H */
