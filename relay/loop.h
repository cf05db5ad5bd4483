/*-------------------------------------------------------------------------
 *
 * loop.h
 *		The event loop.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_LOOP_H
#define IDEM_RELAY_LOOP_H

#include <stdint.h>

#define RELAY_LOOP_READ		1
#define RELAY_LOOP_WRITE	2

/* "events" has RELAY_LOOP_READ, RELAY_LOOP_WRITE or both. */
typedef void (*RelayLoopCallback) (void *argument, int fd, int events);

/* Only loop.c reads and writes the fields. */
typedef struct RelayLoop
{
	int			poller;			/* the epoll descriptor */
	struct RelayWatch *watches; /* by descriptor */
	int			nwatches;
	int64_t		wake_at;		/* when this round ends; 0: not set */
} RelayLoop;

extern void relay_loop_begin(RelayLoop *loop);
extern void relay_loop_end(RelayLoop *loop);
extern void relay_loop_watch(RelayLoop *loop, int fd, int events,
							 RelayLoopCallback callback, void *argument);
extern void relay_loop_forget(RelayLoop *loop, int fd);
extern void relay_loop_wake_at(RelayLoop *loop, int64_t time);
extern void relay_loop_wait(RelayLoop *loop);

#endif							/* IDEM_RELAY_LOOP_H */
