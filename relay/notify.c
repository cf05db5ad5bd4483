/*-------------------------------------------------------------------------
 *
 * notify.c
 *		What systemd is told: ready, stopping, still alive.
 *
 * A datagram to the socket that NOTIFY_SOCKET names, as sd_notify(3) describes
 * it.  Where there is none, nothing is told.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "loop.h"
#include "notify.h"
#include "relay.h"

/* The time of the last sign of life. */
static int64_t last_sign = 0;

/*
 * Tell that, for one "READY=1".  Nobody may be there to hear it.
 */
void
notify(const char *state)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t		length;
	int			fd;

	if (!path || (path[0] != '/' && path[0] != '@'))
		return;
	length = strlen(path);
	if (length >= sizeof(address.sun_path))
		return;
	memcpy(address.sun_path, path, length);
	if (path[0] == '@')
		address.sun_path[0] = '\0'; /* an abstract socket */
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return;
	(void) sendto(fd, state, strlen(state), MSG_NOSIGNAL,
				  (struct sockaddr *) &address,
				  (socklen_t) (offsetof(struct sockaddr_un, sun_path) +
							   length));
	close(fd);
}

/*
 * Called in each round: a sign of life, twice as often as systemd asks for.
 */
void
notify_watchdog(void)
{
	const char *usec = getenv("WATCHDOG_USEC");
	int64_t		now = relay_now();
	int64_t		every;

	if (!usec || (every = strtoll(usec, NULL, 10) / 2000) <= 0)
		return;
	if (now - last_sign >= every)
	{
		notify("WATCHDOG=1");
		last_sign = now;
	}
	loop_wake_at(last_sign + every);
}
