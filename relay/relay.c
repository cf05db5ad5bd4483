/*-------------------------------------------------------------------------
 *
 * relay.c
 *		What all files of idem-relay use: its log, its clock, its memory.
 *
 * A line of the log goes to standard error as a whole.  Who runs out of memory
 * ends: the leases of what it held run out, and another relay takes that.
 *
 *-------------------------------------------------------------------------
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "relay.h"

/* Whether RELAY_DEBUG is written, too. */
bool		relay_verbose = false;

static const char *const level_names[] = {"debug", "info", "warning", "error"};

static void write_line(const char *level, const char *format, va_list args)
			RELAY_FORMAT(2, 0);

/*
 * Write a line to the log.
 */
void
relay_log(RelayLevel level, const char *format,...)
{
	va_list		args;

	if (level == RELAY_DEBUG && !relay_verbose)
		return;
	va_start(args, format);
	write_line(level_names[level], format, args);
	va_end(args);
}

/*
 * Write a line to the log, and end.
 */
void
relay_exit(int status, const char *format,...)
{
	va_list		args;

	va_start(args, format);
	write_line("fatal", format, args);
	va_end(args);
	exit(status);
}

/*
 * Control characters, which a broker's message may have, would make two lines
 * of one.
 */
static void
write_line(const char *level, const char *format, va_list args)
{
	char		line[2048];
	char	   *c;

	vsnprintf(line, sizeof(line), format, args);
	for (c = line; *c; c++)
	{
		if ((unsigned char) *c < ' ' || *c == 0x7f)
			*c = ' ';
	}
	fprintf(stderr, "idem-relay: %s: %s\n", level, line);
}

/*
 * Memory, all zero; there always is some.
 */
void *
relay_alloc(size_t size)
{
	void	   *memory = calloc(1, size ? size : 1);

	if (!memory)
		relay_exit(RELAY_SYSTEM, "out of memory");
	return memory;
}

void *
relay_resize(void *old, size_t size)
{
	void	   *memory = realloc(old, size ? size : 1);

	if (!memory)
		relay_exit(RELAY_SYSTEM, "out of memory");
	return memory;
}

/*
 * A copy of a text; NULL of NULL.
 */
char *
relay_copy(const char *text)
{
	char	   *copy = NULL;

	if (text)
	{
		size_t		size = strlen(text) + 1;

		copy = relay_alloc(size);
		memcpy(copy, text, size);
	}
	return copy;
}

/*
 * Milliseconds of a clock that nobody sets, and that goes on while the machine
 * is suspended, as leases do.
 */
int64_t
relay_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/*
 * A time between half of that and all of it, so that many relays that lost the
 * same server do not come back at the same instant.
 */
int64_t
relay_jitter(int64_t ms)
{
	int64_t		half = ms / 2;

	return half + (int64_t) (drand48() * (double) (half + 1));
}
