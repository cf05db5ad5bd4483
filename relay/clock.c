/*-------------------------------------------------------------------------
 *
 * clock.c
 *		The clock of leases and timeouts, and pauses after failures.
 *
 * All times in the relay are milliseconds of this clock.  This file owns no
 * state.  Every file that waits or measures calls it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <time.h>

#include "clock.h"

/*
 * Return the time in milliseconds.  No administrator can set this clock, and
 * it continues while the machine is suspended, as leases do.
 */
int64_t
relay_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/*
 * Return the pause after a failure, in milliseconds.  "backoff" is 0 before
 * the first failure, and doubles with each failure in a row, from "shortest"
 * to "longest".  The pause is a random time from half of it to all of it, so
 * that relays that lose the same server do not all return at the same instant.
 * The caller has seeded drand48().
 */
int64_t
relay_back_off(int64_t *backoff, int64_t shortest, int64_t longest)
{
	int64_t		half;

	*backoff = *backoff ? *backoff * 2 : shortest;
	if (*backoff > longest)
		*backoff = longest;
	half = *backoff / 2;
	return half + (int64_t) (drand48() * (double) (half + 1));
}
