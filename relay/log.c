/*-------------------------------------------------------------------------
 *
 * log.c
 *		The relay's log, and the end of the process after a fatal error.
 *
 * Each message is one line on standard error.  This file owns the format of
 * the lines.  All other files call it.
 *
 *-------------------------------------------------------------------------
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "log.h"

#define PATIENCE	1000		/* with a slow reader, in milliseconds */

static const char *const level_names[] = {"debug", "info", "warning", "error"};

/* Whether the lines are JSON. */
static bool as_json;

/* Lines that were not written since the last one. */
static int	dropped;

static bool can_write(void);
static void write_line(const char *level, const char *format, va_list args)
			RELAY_FORMAT(2, 0);
static void write_json(const char *date, long ms, const char *level,
					   const char *line);

/*
 * Write all further lines as JSON, or as text.
 */
void
relay_log_as_json(bool on)
{
	as_json = on;
}

/*
 * Write one line to the log.  The line is cut off at 2 kB.
 */
void
relay_log(RelayLevel level, const char *format,...)
{
	va_list		args;

	flockfile(stderr);
	if (dropped > 0 && can_write())
	{
		int			count = dropped;

		dropped = 0;
		relay_log(RELAY_WARNING, "%d line(s) of the log are missing, because "
				  "nothing read the log", count);
	}
	va_start(args, format);
	if (can_write())
		write_line(level_names[level], format, args);
	else
		dropped++;
	va_end(args);
	funlockfile(stderr);
}

/*
 * Return whether standard error accepts a line.  Otherwise a program that has
 * stopped reading it would stop the relay, too.  Only the first line waits.
 */
static bool
can_write(void)
{
	struct pollfd errors = {.fd = STDERR_FILENO,.events = POLLOUT};

	return poll(&errors, 1, dropped > 0 ? 0 : PATIENCE) > 0;
}

/*
 * Write one line to the log and end the process with an exit status.  Does
 * not return.  The messages that the relay holds stay leased until their
 * leases expire.
 */
void
relay_exit(int status, const char *format,...)
{
	va_list		args;

	va_start(args, format);
	if (can_write())
		write_line("fatal", format, args);
	va_end(args);
	exit(status);
}

/*
 * Write one line with the time.  Control characters become blanks, because the
 * text of a broker could otherwise forge further lines.
 */
static void
write_line(const char *level, const char *format, va_list args)
{
	char		line[2048];
	char		date[32];
	struct timespec now;
	struct tm	utc;
	char	   *c;

	vsnprintf(line, sizeof(line), format, args);
	for (c = line; *c; c++)
	{
		if ((unsigned char) *c < ' ' || *c == 0x7f)
			*c = ' ';
		/* Terminals obey U+0080 to U+009F, too. */
		else if ((unsigned char) c[0] == 0xc2 &&
				 ((unsigned char) c[1] & 0xe0) == 0x80)
			c[0] = c[1] = '?';
	}
	clock_gettime(CLOCK_REALTIME, &now);
	gmtime_r(&now.tv_sec, &utc);
	strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
	if (as_json)
		write_json(date, now.tv_nsec / 1000000, level, line);
	else
		fprintf(stderr, "%s.%03ldZ idem-relay: %s: %s\n", date,
				now.tv_nsec / 1000000, level, line);
}

/*
 * Write one line as JSON.  It has no control characters.
 */
static void
write_json(const char *date, long ms, const char *level, const char *line)
{
	char		escaped[4096];
	size_t		length = 0;

	for (; *line; line++)
	{
		if (*line == '"' || *line == '\\')
			escaped[length++] = '\\';
		escaped[length++] = *line;
	}
	escaped[length] = '\0';
	fprintf(stderr, "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\","
			"\"message\":\"%s\"}\n", date, ms, level, escaped);
}
