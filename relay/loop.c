/*-------------------------------------------------------------------------
 *
 * loop.c
 *		The event loop: wait for descriptors and for times.
 *
 * The owner of a descriptor watches it here.  There are no timers: a file that
 * must act at some time calls relay_loop_wake_at() in every round until then,
 * and compares the clock when the round calls it.
 *
 * A RelayLoop owns the epoll descriptor and the table of watches.  relay.c
 * owns the loop and waits in it.  Every file with a descriptor or a deadline
 * calls the other functions.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "clock.h"
#include "log.h"
#include "loop.h"
#include "memory.h"

#define MAX_EVENTS	64
#define LONGEST_MS	1000		/* the watchdog and the sinks need a turn */

typedef struct RelayWatch
{
	RelayLoopCallback callback;
	void	   *argument;
	int			events;			/* 0: not watched */
} RelayWatch;

/*
 * Initialize a zeroed loop.  Ends the process if the system has no descriptor
 * left.
 */
void
relay_loop_begin(RelayLoop *loop)
{
	loop->poller = epoll_create1(EPOLL_CLOEXEC);
	if (loop->poller < 0)
		relay_exit(RELAY_SYSTEM, "could not create an event loop: %s",
				   strerror(errno));
}

/*
 * Release the loop's own resources.  The watched descriptors stay open.
 */
void
relay_loop_end(RelayLoop *loop)
{
	free(loop->watches);
	close(loop->poller);
}

/*
 * Call a function whenever the descriptor can be read or written, or has an
 * error, which counts as both.  A second call replaces the watch.  The caller
 * calls relay_loop_forget() before it closes the descriptor.
 */
void
relay_loop_watch(RelayLoop *loop, int fd, int events,
				 RelayLoopCallback callback, void *argument)
{
	struct epoll_event event = {
		.events = (events & RELAY_LOOP_READ ? EPOLLIN : 0) |
		(events & RELAY_LOOP_WRITE ? EPOLLOUT : 0),
		.data.fd = fd
	};

	if (fd >= loop->nwatches)
	{
		int			count = fd + 16;

		loop->watches = relay_resize(loop->watches,
									 (size_t) count * sizeof(RelayWatch));
		memset(loop->watches + loop->nwatches, 0,
			   (size_t) (count - loop->nwatches) * sizeof(RelayWatch));
		loop->nwatches = count;
	}
	loop->watches[fd].callback = callback;
	loop->watches[fd].argument = argument;
	loop->watches[fd].events = events;

	/*
	 * "watches" cannot tell whether epoll knows the descriptor: a library may
	 * have closed it and received the same number again.
	 */
	if (epoll_ctl(loop->poller, EPOLL_CTL_MOD, fd, &event) < 0 &&
		epoll_ctl(loop->poller, EPOLL_CTL_ADD, fd, &event) < 0)
		relay_exit(RELAY_SYSTEM, "could not wait for a descriptor: %s",
				   strerror(errno));
}

/*
 * Stop watching a descriptor, which the caller has not closed yet.  Does
 * nothing if it is not watched, or is -1.
 */
void
relay_loop_forget(RelayLoop *loop, int fd)
{
	if (fd >= 0 && fd < loop->nwatches && loop->watches[fd].events)
	{
		loop->watches[fd].events = 0;
		(void) epoll_ctl(loop->poller, EPOLL_CTL_DEL, fd, NULL);
	}
}

/*
 * End the current round of the loop at that time, or before.
 */
void
relay_loop_wake_at(RelayLoop *loop, int64_t time)
{
	if (!loop->wake_at || time < loop->wake_at)
		loop->wake_at = time;
}

/*
 * End the round: wait for the next event or time, at most one second, and call
 * the callbacks of the descriptors that are ready.
 */
void
relay_loop_wait(RelayLoop *loop)
{
	struct epoll_event events[MAX_EVENTS];
	int64_t		ms = loop->wake_at - relay_now();
	int			n;
	int			i;

	if (!loop->wake_at || ms > LONGEST_MS)
		ms = LONGEST_MS;
	else if (ms < 0)
		ms = 0;
	loop->wake_at = 0;
	n = epoll_wait(loop->poller, events, MAX_EVENTS, (int) ms);
	for (i = 0; i < n; i++)
	{
		int			fd = events[i].data.fd;
		RelayWatch	watch = loop->watches[fd];
		uint32_t	happened = events[i].events;

		/* An earlier callback might have stopped watching this descriptor. */
		if (watch.events)
			watch.callback(watch.argument, fd,
						   ((happened & ~EPOLLOUT) ? RELAY_LOOP_READ : 0) |
						   ((happened & ~EPOLLIN) ? RELAY_LOOP_WRITE : 0));
	}
}
