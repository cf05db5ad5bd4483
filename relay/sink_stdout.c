/*-------------------------------------------------------------------------
 *
 * sink_stdout.c
 *		Sink: standard output, with a line of JSON for each message.
 *
 * A message is delivered when its whole line is written.  The reader can still
 * lose it; the sink "command" has a confirmation.  If standard output is
 * closed, the relay ends.  If it is a file on a full disk, the sink is paused.
 * If a relay that restarts leaves a part of a line in a pipe, the next one
 * ends this line first; relay.c passes this on to it.
 *
 * The sink's "state" is an Output, which owns the lines in flight.  A
 * message's "tag" is where its line ends.  The callers are sinks.c, dispatch.c
 * and sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "event.h"
#include "memory.h"
#include "sink_stdout.h"

#define ENOUGH	65536			/* take no more while this is not written */
#define FULL_MS	1000			/* try a full disk again after that time */

typedef struct Output
{
	RelayText  *lines;			/* of all messages in flight */
	size_t		written;
	size_t		delivered;		/* end of the last line that is written */
	bool		watched;		/* the loop can watch it; a file it cannot */
	bool		full;			/* the disk is full */
	int64_t		retry_at;
} Output;

bool		relay_stdout_is_cut = false;

static void write_lines(RelaySink *sink);
static void disk_full(RelaySink *sink, int error);
static bool truncate_part(const Output *output);

/*
 * Implement RelaySinkType.configure: only one sink can be standard output.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	const RelaySection *other = config->main->next;

	for (; other != sink->section; other = other->next)
	{
		if (strcmp(relay_section_text(other, "sink"), "stdout") == 0)
			relay_config_fault(config, sink->section->where, "sections [%s] "
							   "and [%s] both write to standard output; give "
							   "their topics to one", other->name, sink->name);
	}
}

/*
 * Implement RelaySinkType.connect.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Output	   *output = relay_alloc(sizeof(Output));
	struct stat status;
	int			flags = fcntl(STDOUT_FILENO, F_GETFL);

	/* A full pipe must not block the loop. */
	output->watched = fstat(STDOUT_FILENO, &status) == 0 &&
		!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode);
	if (output->watched)
		(void) fcntl(STDOUT_FILENO, F_SETFL, flags | O_NONBLOCK);
	output->lines = relay_text_new();
	if (relay_stdout_is_cut)
		relay_text_add_char(output->lines, '\n');
	sink->state = output;
	return true;
}

/*
 * Implement RelaySinkType.can_take.
 */
static bool
can_take(RelaySink *sink)
{
	return ((Output *) sink->state)->lines->len < ENOUGH;
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	const Output *output = sink->state;

	relay_event_line(message, output->lines);
	message->tag = output->lines->len;
	write_lines(sink);
}

/*
 * Write more lines.  The event loop calls this.
 */
static void
stdout_ready(void *argument, int fd, int events)
{
	write_lines(argument);
}

/*
 * Write as much as possible, and report the messages whose lines are written.
 * Ends the process if standard output is closed.
 */
static void
write_lines(RelaySink *sink)
{
	Output	   *output = sink->state;
	RelayText  *lines = output->lines;

	while (output->written < lines->len)
	{
		ssize_t		n = write(STDOUT_FILENO, lines->data + output->written,
							  lines->len - output->written);

		if (n >= 0)
			output->written += (size_t) n;
		else if (errno == EAGAIN)
			break;
		else if (errno == ENOSPC || errno == EDQUOT)
		{
			disk_full(sink, errno);
			break;
		}
		else if (errno != EINTR)
			relay_exit(RELAY_OUTPUT, "could not write to standard output: %s",
					   strerror(errno));
	}
	if (relay_stdout_is_cut && output->written > 0)
	{
		relay_stdout_is_cut = false;
		output->delivered = 1;
	}
	while (sink->in_flight.first &&
		   sink->in_flight.first->tag <= output->written)
	{
		output->delivered = sink->in_flight.first->tag;
		relay_sink_delivered(sink->in_flight.first);
	}
	if (output->written == lines->len)
	{
		if (output->full)
		{
			output->full = false;
			relay_sink_resume(sink);
		}
		relay_text_clear(lines);
		output->written = output->delivered = 0;
		if (output->watched)
			relay_loop_forget(sink->loop, STDOUT_FILENO);
	}
	else if (output->watched)
		relay_loop_watch(sink->loop, STDOUT_FILENO, RELAY_LOOP_WRITE,
						 stdout_ready, sink);
}

/*
 * Pause the sink until the rest of the lines can be written.
 */
static void
disk_full(RelaySink *sink, int error)
{
	Output	   *output = sink->state;

	if (!output->full)
		relay_sink_pause(sink, strerror(error));
	output->full = true;
	output->retry_at = relay_now() + FULL_MS;
}

/*
 * Implement RelaySinkType.work.
 */
static void
work(RelaySink *sink, int64_t now)
{
	const Output *output = sink->state;

	if (output->full && now >= output->retry_at)
		write_lines(sink);
	if (output->full)
		relay_loop_wake_at(sink->loop, output->retry_at);
}

/*
 * Implement RelaySinkType.disconnect.
 */
static void
disconnect_sink(RelaySink *sink)
{
	Output	   *output = sink->state;

	if (output->watched)
		relay_loop_forget(sink->loop, STDOUT_FILENO);
	if (output->written > output->delivered && !truncate_part(output))
		relay_stdout_is_cut = true;
	relay_text_free(output->lines);
	free(output);
	sink->state = NULL;
}

/*
 * If the end of a file is a part of a line, which a full disk has cut off,
 * remove it.  Otherwise the next relay would append its first line to it.
 * Returns false if that is not possible.
 */
static bool
truncate_part(const Output *output)
{
	off_t		part = (off_t) (output->written - output->delivered);
	off_t		end = lseek(STDOUT_FILENO, 0, SEEK_CUR);
	struct stat status;

	return fstat(STDOUT_FILENO, &status) == 0 &&
		S_ISREG(status.st_mode) && status.st_size == end &&
		ftruncate(STDOUT_FILENO, end - part) == 0 &&
		lseek(STDOUT_FILENO, end - part, SEEK_SET) >= 0;
}

const RelaySinkType relay_sink_stdout = {
	"stdout", NULL, configure_sink, connect_sink, NULL, can_take, deliver,
	work, disconnect_sink
};
