/*-------------------------------------------------------------------------
 *
 * sink_stdout.c
 *		Standard output: a line of JSON for each message.
 *
 * A message is delivered when its line has been written as a whole.  Who reads
 * it may still lose it: for what must not be lost there is the sink "command".
 * Where standard output is closed, the relay ends; where it is a file on a
 * full disk, it waits.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "event.h"
#include "loop.h"
#include "sinks.h"
#include "text.h"

/* A message is held up while so much is not written. */
#define ENOUGH	65536
#define FULL_MS	1000			/* after which a full disk is tried again */

typedef struct Output
{
	Text	   *line;			/* of all that is flying */
	size_t		written;
	size_t		delivered;		/* the lines up to there */
	bool		watched;		/* a file cannot be */
	bool		full;			/* the disk is */
	int64_t		retry_at;
} Output;

static const SettingDef settings[] = {
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static void write_lines(Sink *sink);
static void disk_full(Sink *sink, int error);
static void take_back_part(const Output *output);

static void
stdout_configure(Sink *sink, Config *config)
{
	const Sink *other;

	for (other = sinks_first; other; other = other->next)
	{
		if (other->type == sink->type)
			config_fault(config, sink->section->where, "sections [%s] and "
						 "[%s] both write to standard output; give their "
						 "topics to one", other->name, sink->name);
	}
}

/*
 * What else writes to the same pipe is not to be disturbed, but a full one
 * must not stop the loop.
 */
static bool
stdout_connect(Sink *sink, char *why, size_t size)
{
	Output	   *output = relay_alloc(sizeof(Output));
	struct stat status;
	int			flags = fcntl(STDOUT_FILENO, F_GETFL);

	output->watched = fstat(STDOUT_FILENO, &status) == 0 &&
		!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode);
	if (output->watched)
		(void) fcntl(STDOUT_FILENO, F_SETFL, flags | O_NONBLOCK);
	output->line = text_new();
	sink->state = output;
	return true;
}

static bool
stdout_can_take(Sink *sink)
{
	return ((Output *) sink->state)->line->len < ENOUGH;
}

static void
stdout_deliver(Sink *sink, Message *message)
{
	Output	   *output = sink->state;

	event_line(message, output->line);
	message->tag = output->line->len;	/* its end */
	write_lines(sink);
}

static void
stdout_ready(void *argument, int fd, int events)
{
	write_lines(argument);
}

/*
 * Write what can be written; those whose lines are out are delivered.
 */
static void
write_lines(Sink *sink)
{
	Output	   *output = sink->state;

	while (output->written < output->line->len)
	{
		ssize_t		n = write(STDOUT_FILENO,
							  output->line->data + output->written,
							  output->line->len - output->written);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n < 0 && (errno == ENOSPC || errno == EDQUOT))
		{
			disk_full(sink, errno);
			break;
		}
		if (n < 0)
			relay_exit(RELAY_OUTPUT, "could not write to standard output: %s",
					   strerror(errno));
		output->written += (size_t) n;
	}
	while (sink->flying.first && sink->flying.first->tag <= output->written)
	{
		output->delivered = sink->flying.first->tag;
		sink_delivered(sink->flying.first);
	}
	if (output->written == output->line->len)
	{
		if (output->full)
		{
			output->full = false;
			sink_resume(sink);
		}
		text_clear(output->line);
		output->written = output->delivered = 0;
		if (output->watched)
			loop_forget(STDOUT_FILENO);
	}
	else if (output->watched)
		loop_watch(STDOUT_FILENO, LOOP_WRITE, stdout_ready, sink);
}

/*
 * What is not written stays here, and no more comes until it is.
 */
static void
disk_full(Sink *sink, int error)
{
	Output	   *output = sink->state;

	if (!output->full)
		sink_pause(sink, strerror(error));
	output->full = true;
	output->retry_at = relay_now() + FULL_MS;
}

static void
stdout_work(Sink *sink, int64_t now)
{
	const Output *output = sink->state;

	if (output->full && now >= output->retry_at)
		write_lines(sink);
	if (output->full)
		loop_wake_at(output->retry_at);
}

/*
 * A line that was cut off by a full disk is not to be the beginning of what
 * the next relay appends.
 */
static void
take_back_part(const Output *output)
{
	off_t		part = (off_t) (output->written - output->delivered);
	off_t		end = lseek(STDOUT_FILENO, 0, SEEK_CUR);
	struct stat status;

	if (part > 0 && fstat(STDOUT_FILENO, &status) == 0 &&
		S_ISREG(status.st_mode) && status.st_size == end)
		(void) !ftruncate(STDOUT_FILENO, end - part);
}

static void
stdout_disconnect(Sink *sink)
{
	Output	   *output = sink->state;

	if (output->watched)
		loop_forget(STDOUT_FILENO);
	take_back_part(output);
	text_free(output->line);
	free(output);
	sink->state = NULL;
}

static void
stdout_free(Sink *sink)
{
}

const SinkType stdout_sink = {
	"stdout", settings, stdout_configure, stdout_connect, stdout_can_take,
	stdout_deliver, stdout_work, stdout_disconnect, stdout_free
};
