/*-------------------------------------------------------------------------
 *
 * sink_command.c
 *		Sink: a command for each message, which gets the body on standard
 *		input and the other properties in the environment.
 *
 * The exit status is the outcome:
 *
 *	0				delivered
 *	75, 126, 127	deferred: EX_TEMPFAIL, or the shell cannot run the command
 *	other			refused; the reason is the last line on standard error
 *
 * A command that takes longer than "timeout" is killed, with all processes of
 * its process group.
 *
 * The sink has no state.  A message's "delivery" is the Child that owns the
 * process and its descriptors.  The callers are sinks.c, dispatch.c and
 * sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "event.h"
#include "memory.h"
#include "sink_command.h"

#define TEMPORARY	75			/* EX_TEMPFAIL */
#define LAST_WORDS	500			/* bytes of standard error that are kept */
#define MOST_READS	200			/* enough to empty a pipe */
#define RESPONSE_LIMIT	(1 << 20)	/* bytes of a response that are kept */

typedef struct Child
{
	RelayMessage *message;
	pid_t		pid;			/* 0: not running */
	int			pid_fd;			/* readable when it has ended; -1: none */
	int			errors;			/* its standard error; -1: none */
	int			output;			/* file with a claim's response; -1: none */
	bool		late;			/* killed because of "timeout" */
	char		words[LAST_WORDS + 1];
	size_t		length;
} Child;

static const RelaySettingDef settings[] = {
	{"command", RELAY_TEXT, NULL,
	"for the shell; it gets the body on standard input"},
	{"in_flight", RELAY_NUMBER, "4", "how many at once", 1, 1000},
	{NULL}
};

static bool spawn(Child *child, int input, int errors, const char *command);
static char **make_environment(const RelayMessage *message);
static void child_writes(void *argument, int fd, int events);
static bool read_words(Child *child);
static void child_ends(void *argument, int fd, int events);
static void read_response(const Child *child);
static const char *last_line(Child *child);
static void kill_group(const Child *child);
static void release(Child *child);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	if (!*relay_section_text(sink->section, "command"))
		relay_section_fault(config, sink->section, "command",
							"\"command\" is empty");
}

/*
 * Implement RelaySinkType.connect: there is nothing to connect to.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	return true;
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	Child	   *child = relay_alloc(sizeof(Child));
	RelayText  *body = relay_text_new();
	int			input = memfd_create("message", MFD_CLOEXEC);
	int			errors[2] = {-1, -1};

	relay_event_body(message, body);
	child->message = message;
	child->pid_fd = -1;
	child->errors = -1;
	child->output = message->claim_token ?
		memfd_create("response", MFD_CLOEXEC) : -1;
	message->delivery = child;
	if (input < 0 || pipe2(errors, O_CLOEXEC) < 0 ||
		write(input, body->data, body->len) != (ssize_t) body->len ||
		lseek(input, 0, SEEK_SET) < 0 ||
		!spawn(child, input, errors[1],
			   relay_section_text(sink->section, "command")))
	{
		int			error = errno;

		if (errors[0] >= 0)
			close(errors[0]);
		release(child);
		/* The system limits the size of an environment. */
		if (error == E2BIG)
			relay_sink_refused(message, -1, "its headers or its key are too "
							   "long for the environment of a command");
		else
			relay_sink_failed(message, RELAY_UNSENT, 0, "could not start the "
							  "command: %s", strerror(error));
	}
	else
	{
		child->errors = errors[0];
		(void) fcntl(child->errors, F_SETFL, O_NONBLOCK);
		relay_loop_watch(sink->loop, child->errors, RELAY_LOOP_READ,
						 child_writes, child);
		relay_loop_watch(sink->loop, child->pid_fd, RELAY_LOOP_READ,
						 child_ends, child);
	}
	if (input >= 0)
		close(input);
	if (errors[1] >= 0)
		close(errors[1]);
	relay_text_free(body);
}

/*
 * Start the command in its own process group.  Returns false and sets errno if
 * that fails; the process can exist even so.
 */
static bool
spawn(Child *child, int input, int errors, const char *command)
{
	char	   *const arguments[] = {"sh", "-c", (char *) command, NULL};
	char	  **environment = make_environment(child->message);
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t	none;
	sigset_t	pipe_signal;
	int			error;

	sigemptyset(&none);
	sigemptyset(&pipe_signal);
	sigaddset(&pipe_signal, SIGPIPE);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
	if (child->output >= 0)
		posix_spawn_file_actions_adddup2(&actions, child->output,
										 STDOUT_FILENO);
	else
		posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null",
										 O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, errors, STDERR_FILENO);
	/* Libraries open sockets that a command would inherit. */
	posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setsigdefault(&attributes, &pipe_signal);
	posix_spawnattr_setpgroup(&attributes, 0);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK |
							 POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
	error = posix_spawn(&child->pid, "/bin/sh", &actions, &attributes,
						arguments, environment);
	posix_spawn_file_actions_destroy(&actions);
	posix_spawnattr_destroy(&attributes);
	relay_config_free_list(environment);
	if (error)
	{
		child->pid = 0;
		errno = error;
		return false;
	}
	child->pid_fd = pidfd_open(child->pid, 0);
	return child->pid_fd >= 0;
}

/*
 * Return the relay's environment, without the variables of systemd and the
 * password of the database, and with the message's properties.  The caller
 * releases the array.
 */
static char **
make_environment(const RelayMessage *message)
{
	const char *const values[][2] = {
		{"IDEM_MESSAGE_ID", message->message_id},
		{"IDEM_TOPIC", message->topic},
		{"IDEM_MESSAGE_KEY", message->key ? message->key : ""},
		{"IDEM_HEADERS", message->headers ? message->headers : "{}"},
		{"IDEM_CREATED_AT", message->created_at},
		{"IDEM_CLAIM_TOKEN", message->claim_token ? message->claim_token : ""},
	};
	const size_t nvalues = sizeof(values) / sizeof(values[0]);
	RelayText  *variable = relay_text_new();
	size_t		n = 0;
	size_t		count = 0;
	size_t		i;
	char	  **list;

	while (environ[n])
		n++;
	list = relay_alloc((n + nvalues + 1) * sizeof(char *));
	for (i = 0; i < n; i++)
	{
		if (strncmp(environ[i], "NOTIFY_SOCKET=", 14) != 0 &&
			strncmp(environ[i], "PGPASSWORD=", 11) != 0 &&
			strncmp(environ[i], "WATCHDOG_", 9) != 0)
			list[count++] = relay_copy(environ[i]);
	}
	for (i = 0; i < nvalues; i++)
	{
		relay_text_clear(variable);
		relay_text_addf(variable, "%s=%s", values[i][0], values[i][1]);
		list[count++] = relay_copy(variable->data);
	}
	relay_text_free(variable);
	return list;
}

/*
 * Read what a command writes to standard error.  The event loop calls this.
 */
static void
child_writes(void *argument, int fd, int events)
{
	(void) read_words(argument);
}

/*
 * Read standard error, and keep its last bytes.  Returns false if there is
 * nothing more to read now.
 */
static bool
read_words(Child *child)
{
	char		part[LAST_WORDS];
	ssize_t		n = read(child->errors, part, sizeof(part));
	size_t		keep;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (n <= 0)
	{
		relay_loop_forget(child->message->sink->loop, child->errors);
		close(child->errors);
		child->errors = -1;
		return false;
	}
	keep = LAST_WORDS - (size_t) n;
	if (child->length > keep)
	{
		memmove(child->words, child->words + child->length - keep, keep);
		child->length = keep;
	}
	memcpy(child->words + child->length, part, (size_t) n);
	child->length += (size_t) n;
	return true;
}

/*
 * Report the outcome of a command that has ended.  The event loop calls this.
 */
static void
child_ends(void *argument, int fd, int events)
{
	Child	   *child = argument;
	RelayMessage *message = child->message;
	int			result = 0;
	pid_t		ended = waitpid(child->pid, &result, WNOHANG);
	int			status = WEXITSTATUS(result);

	if (ended == 0)
		return;
	child->pid = 0;
	/* Its descriptor stays readable, so this is an end, too. */
	if (ended < 0)
		relay_sink_failed(message, RELAY_FAILED, 0, "the status of the "
						  "command is lost: %s", strerror(errno));
	else if (child->late)
		relay_sink_refused(message, -1, "the command took longer than "
						   "\"timeout\"");
	else if (WIFSIGNALED(result))
		relay_sink_refused(message, -1, "the command was ended by signal %d",
						   WTERMSIG(result));
	else if (status == 0)
	{
		read_response(child);
		relay_sink_delivered(message);
	}
	else if (status == TEMPORARY || status == 126 || status == 127)
		relay_sink_failed(message, RELAY_DEFERRED, 0, "the command ended with "
						  "status %d: %s", status, last_line(child));
	else
		relay_sink_refused(message, -1, "the command ended with status %d: %s",
						   status, last_line(child));
	release(child);
}

/*
 * If a command has completed a claim, its standard output is the response.
 */
static void
read_response(const Child *child)
{
	RelayText  *response = child->message->response;
	char		part[4096];
	off_t		at = 0;
	ssize_t		n;

	while (child->output >= 0 && at < RESPONSE_LIMIT &&
		   (n = pread(child->output, part, sizeof(part), at)) > 0)
	{
		relay_text_add_bytes(response, part, (size_t) n);
		at += n;
	}
	/* The text can be in any encoding. */
	if (response)
		relay_text_sanitize(response->data, false);
}

/*
 * Return the last line that a command has written to standard error, or "".
 */
static const char *
last_line(Child *child)
{
	int			reads = MOST_READS;
	const char *newline;

	/* A process that it has started can write without end. */
	while (child->errors >= 0 && reads-- > 0 && read_words(child))
		;
	while (child->length > 0 && child->words[child->length - 1] == '\n')
		child->length--;
	child->words[child->length] = '\0';
	newline = strrchr(child->words, '\n');
	return newline ? newline + 1 : child->words;
}

/*
 * Implement RelaySinkType.work: kill the commands that take too long.
 */
static void
work(RelaySink *sink, int64_t now)
{
	RelayMessage *message;

	for (message = sink->in_flight.first; message; message = message->next)
	{
		Child	   *child = message->delivery;

		if (child->late)
			continue;
		if (now - message->handed_at >= sink->timeout)
		{
			child->late = true;
			kill_group(child);
		}
		else
			relay_loop_wake_at(sink->loop, message->handed_at + sink->timeout);
	}
}

/*
 * Kill a running command and its process group, which it can have left.
 */
static void
kill_group(const Child *child)
{
	(void) kill(-child->pid, SIGKILL);
	(void) kill(child->pid, SIGKILL);
}

/*
 * Implement RelaySinkType.disconnect: kill all commands.
 */
static void
disconnect_sink(RelaySink *sink)
{
	RelayMessage *message;

	for (message = sink->in_flight.first; message; message = message->next)
		release(message->delivery);
}

/*
 * Release a child.  If its command is running, kill it.
 */
static void
release(Child *child)
{
	int			descriptors[] = {child->pid_fd, child->errors};
	int			i;

	if (child->pid > 0)
	{
		kill_group(child);
		(void) waitpid(child->pid, NULL, 0);
	}
	for (i = 0; i < 2; i++)
	{
		if (descriptors[i] < 0)
			continue;
		relay_loop_forget(child->message->sink->loop, descriptors[i]);
		close(descriptors[i]);
	}
	if (child->output >= 0)
		close(child->output);
	free(child);
}

const RelaySinkType relay_sink_command = {
	"command", settings, configure_sink, connect_sink, NULL, NULL,
	deliver, work, disconnect_sink
};
