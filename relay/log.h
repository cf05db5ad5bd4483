/*-------------------------------------------------------------------------
 *
 * log.h
 *		The relay's log, and the end of the process after a fatal error.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_LOG_H
#define IDEM_RELAY_LOG_H

#include <stdbool.h>

/* Exit statuses.  Where sysexits.h has a suitable one, the number is its. */
#define RELAY_DONE			0	/* stopped; every message is answered */
#define RELAY_USAGE			64	/* unknown option */
#define RELAY_UNAVAILABLE	69	/* not reached: database; broker in --check */
#define RELAY_SYSTEM		71	/* out of memory or of descriptors */
#define RELAY_OUTPUT		74	/* standard output is closed */
#define RELAY_UNANSWERED	75	/* stopped; some messages are still leased */
#define RELAY_CONFIG		78	/* fault in the configuration */

typedef enum RelayLevel
{
	RELAY_DEBUG,				/* callers check the setting "verbose" */
	RELAY_INFO,
	RELAY_WARNING,
	RELAY_ERROR
} RelayLevel;

#define RELAY_FORMAT(f, a)	__attribute__((format(printf, f, a)))

extern void relay_log_as_json(bool on);
extern void relay_log(RelayLevel level, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void relay_exit(int status, const char *format,...)
			RELAY_FORMAT(2, 3) __attribute__((noreturn));

#endif							/* IDEM_RELAY_LOG_H */
