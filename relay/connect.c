/*-------------------------------------------------------------------------
 *
 * connect.c
 *		Connect sinks without blocking the event loop.
 *
 * librabbitmq and librdkafka wait while they connect.  A thread does that, and
 * the loop continues with the other sinks.  Until the thread has ended, only
 * it uses the sink's "state".  It ends by itself after the sink's "timeout",
 * so a relay that ends does not wait for it; see relay_end().
 *
 * A sink's "connecting" is the RelayConnecting, which belongs to the thread
 * until it has written to "fd".  dispatch.c calls this file.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "connect.h"
#include "memory.h"

typedef struct RelayConnecting
{
	RelaySink  *sink;
	int			fd;				/* readable when the thread is done */
	bool		connected;
	char		why[512];		/* if not connected */
} RelayConnecting;

static void *run(void *argument);
static void done(void *argument, int fd, int events);
static void end(RelaySink *sink, bool connected, const char *why);

/*
 * Begin to connect a sink, which is neither connected nor connecting.
 */
void
relay_connect(RelaySink *sink)
{
	RelayConnecting *connecting = relay_alloc(sizeof(RelayConnecting));
	pthread_t	thread = 0;
	int			error;

	connecting->sink = sink;
	if (!sink->type->attach)
	{
		end(sink, sink->type->connect(sink, connecting->why,
									  sizeof(connecting->why)),
			connecting->why);
		free(connecting);
		return;
	}
	connecting->fd = eventfd(0, EFD_CLOEXEC);
	error = connecting->fd < 0 ? errno :
		pthread_create(&thread, NULL, run, connecting);
	if (error)
	{
		/* The other sinks go on. */
		snprintf(connecting->why, sizeof(connecting->why),
				 "could not start a thread to connect: %s", strerror(error));
		if (connecting->fd >= 0)
			close(connecting->fd);
		end(sink, false, connecting->why);
		free(connecting);
		return;
	}
	sink->connecting = connecting;
	pthread_detach(thread);
	relay_loop_watch(sink->loop, connecting->fd, RELAY_LOOP_READ, done,
					 connecting);
}

/*
 * Connect, and wake the loop.  This is the thread.
 */
static void *
run(void *argument)
{
	RelayConnecting *connecting = argument;
	RelaySink  *sink = connecting->sink;

	connecting->connected = sink->type->connect(sink, connecting->why,
												sizeof(connecting->why));
	eventfd_write(connecting->fd, 1);
	return NULL;
}

/*
 * Take the sink over from its thread.  The event loop calls this.
 */
static void
done(void *argument, int fd, int events)
{
	RelayConnecting *connecting = argument;
	RelaySink  *sink = connecting->sink;
	eventfd_t	value;

	(void) eventfd_read(fd, &value);
	relay_loop_forget(sink->loop, fd);
	close(fd);
	sink->connecting = NULL;
	if (connecting->connected)
		sink->type->attach(sink);
	end(sink, connecting->connected, connecting->why);
	free(connecting);
}

/*
 * Note that a sink is connected, or hold it.
 */
static void
end(RelaySink *sink, bool connected, const char *why)
{
	sink->connected = connected;
	if (!connected)
	{
		relay_sink_back_off(sink, why);
		return;
	}
	relay_sink_connected(sink);
	if (sink->failures > 0)
		relay_log(RELAY_INFO, "sink \"%s\" is connected again", sink->name);
}
