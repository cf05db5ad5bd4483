/*-------------------------------------------------------------------------
 *
 * loop.h
 *		The event loop.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_LOOP_H
#define RELAY_LOOP_H

#include <stdint.h>

#define LOOP_READ	1
#define LOOP_WRITE	2

typedef void (*LoopCallback) (void *argument, int fd, int events);

extern void loop_watch(int fd, int events, LoopCallback callback,
					   void *argument);
extern void loop_forget(int fd);
extern void loop_wake_at(int64_t time);
extern void loop_wait(void);

#endif							/* RELAY_LOOP_H */
