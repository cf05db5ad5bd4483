/*-------------------------------------------------------------------------
 *
 * notify.h
 *		Notifications for systemd.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_NOTIFY_H
#define IDEM_RELAY_NOTIFY_H

#include "loop.h"

extern void relay_notify(const char *state);
extern void relay_notify_watchdog(RelayLoop *loop, int64_t *last_sign);

#endif							/* IDEM_RELAY_NOTIFY_H */
