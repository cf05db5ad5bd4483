/*-------------------------------------------------------------------------
 *
 * times.h
 *		Checking and adding intervals, and a clock that nobody can set.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_TIMES_H
#define IDEMPOTENCY_TIMES_H

#include "datatype/timestamp.h"
#include "fmgr.h"

extern Interval *idem_interval_arg(FunctionCallInfo fcinfo, int n,
								   const char *name);
extern void idem_check_interval_arg(const Interval *interval,
									const char *name);
extern TimestampTz idem_add_ms(TimestampTz time, double ms);
extern TimestampTz idem_add_interval(TimestampTz time,
									 const Interval *interval,
									 double default_ms);
extern int64 idem_monotonic_time(void);

#endif							/* IDEMPOTENCY_TIMES_H */
