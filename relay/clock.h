/*-------------------------------------------------------------------------
 *
 * clock.h
 *		The clock of leases and timeouts, and pauses after failures.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_CLOCK_H
#define IDEM_RELAY_CLOCK_H

#include <stdint.h>

extern int64_t relay_now(void);
extern int64_t relay_back_off(int64_t *backoff, int64_t shortest,
							  int64_t longest);

#endif							/* IDEM_RELAY_CLOCK_H */
