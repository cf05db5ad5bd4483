/*-------------------------------------------------------------------------
 *
 * loop.c
 *		The event loop: what to wait for, and whom to tell.
 *
 * Whoever has a descriptor watches it here.  Whoever has to do something at a
 * time says so with loop_wake_at() in each round, and looks at the clock when
 * its turn comes; there are no timers to be kept.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "loop.h"
#include "relay.h"

#define MAX_EVENTS	64
#define LONGEST_MS	1000		/* watchdog and sinks have their turn */

typedef struct Watch
{
	LoopCallback callback;
	void	   *argument;
	int			events;			/* 0: not watched */
} Watch;

static int	poller = -1;

/* By descriptor. */
static Watch *watches = NULL;
static int	nwatches = 0;

/* When the round ends at the latest; 0: not said yet. */
static int64_t wake_at = 0;

/*
 * Call that function when the descriptor can be read or written, or is in
 * error.  Watching it again replaces what was watched for.
 */
void
loop_watch(int fd, int events, LoopCallback callback, void *argument)
{
	struct epoll_event event;
	int			operation;

	if (poller < 0 && (poller = epoll_create1(EPOLL_CLOEXEC)) < 0)
		relay_exit(RELAY_SYSTEM, "could not create an event loop: %s",
				   strerror(errno));
	if (fd >= nwatches)
	{
		watches = relay_resize(watches, (size_t) (fd + 16) * sizeof(Watch));
		memset(watches + nwatches, 0,
			   (size_t) (fd + 16 - nwatches) * sizeof(Watch));
		nwatches = fd + 16;
	}
	operation = watches[fd].events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
	watches[fd].callback = callback;
	watches[fd].argument = argument;
	watches[fd].events = events;
	memset(&event, 0, sizeof(event));
	event.data.fd = fd;
	event.events = (events & LOOP_READ ? EPOLLIN : 0) |
		(events & LOOP_WRITE ? EPOLLOUT : 0);
	/* A library may have closed it and got the same number again. */
	if (epoll_ctl(poller, operation, fd, &event) < 0 &&
		(errno != ENOENT ||
		 epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0) &&
		(errno != EEXIST ||
		 epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event) < 0))
		relay_exit(RELAY_SYSTEM, "could not wait for a descriptor: %s",
				   strerror(errno));
}

/*
 * Watch it no more; to be said before it is closed.
 */
void
loop_forget(int fd)
{
	if (fd >= 0 && fd < nwatches && watches[fd].events)
	{
		watches[fd].events = 0;
		(void) epoll_ctl(poller, EPOLL_CTL_DEL, fd, NULL);
	}
}

/*
 * This round of the loop is to end at that time, or before.
 */
void
loop_wake_at(int64_t time)
{
	if (!wake_at || time < wake_at)
		wake_at = time;
}

/*
 * Wait for the next event or time, and tell those who watch.
 */
void
loop_wait(void)
{
	struct epoll_event events[MAX_EVENTS];
	int64_t		ms = LONGEST_MS;
	int			n;
	int			i;

	if (wake_at)
	{
		int64_t		left = wake_at - relay_now();

		if (left < ms)
			ms = left < 0 ? 0 : left;
	}
	wake_at = 0;
	n = epoll_wait(poller, events, MAX_EVENTS, (int) ms);
	for (i = 0; i < n; i++)
	{
		int			fd = events[i].data.fd;
		int			what = 0;

		/* One that was called before may have forgotten it. */
		if (!watches[fd].events)
			continue;
		if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
			what |= LOOP_READ;
		if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR))
			what |= LOOP_WRITE;
		watches[fd].callback(watches[fd].argument, fd, what);
	}
}
