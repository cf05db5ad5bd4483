/*-------------------------------------------------------------------------
 *
 * notify.h
 *		What systemd is told.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_NOTIFY_H
#define RELAY_NOTIFY_H

extern void notify(const char *state);
extern void notify_watchdog(void);

#endif							/* RELAY_NOTIFY_H */
