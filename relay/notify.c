/*-------------------------------------------------------------------------
 *
 * notify.c
 *		Notifications for systemd: ready, reloading, stopping, still alive.
 *
 * A notification is a datagram to the socket that NOTIFY_SOCKET names, as
 * sd_notify(3) describes.  If the variable is not set, nothing is sent.  This
 * file owns no state.  relay.c calls it.
 *
 *-------------------------------------------------------------------------
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "notify.h"

/*
 * Send a notification, such as "READY=1".  Errors are ignored: the relay also
 * works without systemd.
 */
void
relay_notify(const char *state)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t		length;
	int			fd;

	length = path ? strlen(path) : 0;
	if (length == 0 || length >= sizeof(address.sun_path) ||
		(path[0] != '/' && path[0] != '@'))
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
 * Send a sign of life if one is due, twice as often as systemd requires.  The
 * caller calls this in every round, and keeps the time of the last sign.
 */
void
relay_notify_watchdog(RelayLoop *loop, int64_t *last_sign)
{
	const char *usec = getenv("WATCHDOG_USEC");
	int64_t		now = relay_now();
	int64_t		every;

	if (!usec || (every = strtoll(usec, NULL, 10) / 2000) <= 0)
		return;
	if (now - *last_sign >= every)
	{
		relay_notify("WATCHDOG=1");
		*last_sign = now;
	}
	relay_loop_wake_at(loop, *last_sign + every);
}
