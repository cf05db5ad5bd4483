/*-------------------------------------------------------------------------
 *
 * relay.h
 *		What all files of idem-relay use: its log, its clock, its memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_H
#define RELAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RELAY_VERSION "1.0"

/* Exit statuses, where there is one those of sysexits.h. */
#define RELAY_DONE			0	/* stopped, all messages answered */
#define RELAY_USAGE			64	/* options that there are not */
#define RELAY_UNAVAILABLE	69	/* no database, no broker at the start */
#define RELAY_SYSTEM		71	/* out of memory, of descriptors */
#define RELAY_OUTPUT		74	/* standard output is gone */
#define RELAY_UNANSWERED	75	/* stopped, some messages still leased */
#define RELAY_CONFIG		78	/* a fault in the configuration */

typedef enum RelayLevel
{
	RELAY_DEBUG,
	RELAY_INFO,
	RELAY_WARNING,
	RELAY_ERROR
} RelayLevel;

#define RELAY_FORMAT(f, a)	__attribute__((format(printf, f, a)))

extern bool relay_verbose;

extern void relay_log(RelayLevel level, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void relay_exit(int status, const char *format,...)
			RELAY_FORMAT(2, 3) __attribute__((noreturn));
extern void *relay_alloc(size_t size);
extern void *relay_resize(void *old, size_t size);
extern char *relay_copy(const char *text);
extern int64_t relay_now(void);
extern int64_t relay_jitter(int64_t ms);

#endif							/* RELAY_H */
