/*-------------------------------------------------------------------------
 *
 * deadline.h
 *		End a call of a library that can wait without limit.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_DEADLINE_H
#define IDEM_RELAY_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

extern bool relay_deadline_set(timer_t *timer, int64_t limit, int64_t again,
							   int fd);
extern void relay_deadline_clear(timer_t timer);

#endif							/* IDEM_RELAY_DEADLINE_H */
