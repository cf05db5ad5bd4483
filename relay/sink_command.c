/*-------------------------------------------------------------------------
 *
 * sink_command.c
 *		A command for each message: its body on standard input, what else it
 *		has in the environment.
 *
 * Exit status 0: delivered.  75 (EX_TEMPFAIL): not now, whatever the message;
 * 126 and 127, where the shell cannot run the command, mean the same.
 * Anything else: not this message; the last line on standard error is the
 * reason.
 *
 * Who takes longer than "timeout" is killed, with all that it has started in
 * its process group.
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
#include "loop.h"
#include "sinks.h"
#include "text.h"

#define TEMPORARY	75
#define LAST_WORDS	500
#define MOST_READS	200			/* as much as a pipe holds */

typedef struct Child
{
	Message    *message;
	pid_t		pid;
	int			pid_fd;			/* readable when it has ended */
	int			errors;			/* what it writes to standard error */
	bool		late;			/* and killed therefore */
	char		words[LAST_WORDS + 1];
	size_t		length;
} Child;

static const SettingDef settings[] = {
	{"command", SETTING_TEXT, NULL, 0, 0,
	"for the shell; it gets the body on standard input"},
	{"in_flight", SETTING_NUMBER, "4", 1, 1000, "how many at once"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static bool spawn(Child *child, int input, int errors, const char *command,
				  char *const *environment);
static char **make_environment(const Message *message);
static void child_writes(void *argument, int fd, int events);
static bool read_words(Child *child);
static void child_ends(void *argument, int fd, int events);
static void end(const Child *child);
static void release(Child *child);

extern char **environ;

static void
command_configure(Sink *sink, Config *config)
{
	if (!*section_text(sink->section, "command"))
		config_fault(config, section_where(sink->section, "command"),
					 "\"command\" is empty");
}

static bool
command_connect(Sink *sink, char *why, size_t size)
{
	return true;
}

static void
command_deliver(Sink *sink, Message *message)
{
	Child	   *child = relay_alloc(sizeof(Child));
	Text	   *body = text_new();
	char	  **environment = make_environment(message);
	int			input = memfd_create("message", MFD_CLOEXEC);
	int			errors[2] = {-1, -1};

	event_body(message, body);
	child->message = message;
	child->pid_fd = -1;
	child->errors = -1;
	message->delivery = child;
	if (input < 0 || pipe2(errors, O_CLOEXEC) < 0 ||
		write(input, body->data, body->len) != (ssize_t) body->len ||
		lseek(input, 0, SEEK_SET) < 0 ||
		!spawn(child, input, errors[1],
			   section_text(sink->section, "command"), environment))
	{
		int			error = errno;

		if (errors[0] >= 0)
			close(errors[0]);
		release(child);
		/* The environment has room for so much only. */
		if (error == E2BIG)
			sink_refused(message, -1, "its headers or its key are too long "
						 "for the environment of a command");
		else
			sink_put_off(message, 0, "could not start the command: %s",
						 strerror(error));
	}
	else
	{
		child->errors = errors[0];
		(void) fcntl(child->errors, F_SETFL, O_NONBLOCK);
		loop_watch(child->errors, LOOP_READ, child_writes, child);
		loop_watch(child->pid_fd, LOOP_READ, child_ends, child);
	}
	if (input >= 0)
		close(input);
	if (errors[1] >= 0)
		close(errors[1]);
	config_free_list(environment);
	text_free(body);
}

/*
 * Start the command, in a process group of its own.
 */
static bool
spawn(Child *child, int input, int errors, const char *command,
	  char *const *environment)
{
	char	   *const arguments[] = {"sh", "-c", (char *) command, NULL};
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
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null",
									 O_WRONLY, 0);
	posix_spawn_file_actions_adddup2(&actions, errors, STDERR_FILENO);
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
 * Ours, and what the message has beside its body.
 */
static char **
make_environment(const Message *message)
{
	const char *const values[][2] = {
		{"IDEM_MESSAGE_ID", message->message_id},
		{"IDEM_TOPIC", message->topic},
		{"IDEM_MESSAGE_KEY", message->key ? message->key : ""},
		{"IDEM_HEADERS", message->headers ? message->headers : "{}"},
		{"IDEM_CREATED_AT", message->created_at},
	};
	size_t		n = 0;
	size_t		count = 0;
	size_t		i;
	char	  **list;

	while (environ[n])
		n++;
	list = relay_alloc((n + 7) * sizeof(char *));
	for (i = 0; i < n; i++)
	{
		if (strncmp(environ[i], "NOTIFY_SOCKET=", 14) != 0 &&
			strncmp(environ[i], "WATCHDOG_", 9) != 0)
			list[count++] = relay_copy(environ[i]);
	}
	for (i = 0; i < sizeof(values) / sizeof(values[0]); i++)
	{
		Text	   *text = text_new();

		text_addf(text, "%s=%s", values[i][0], values[i][1]);
		list[count++] = relay_copy(text->data);
		text_free(text);
	}
	return list;
}

static void
child_writes(void *argument, int fd, int events)
{
	(void) read_words(argument);
}

/*
 * Keep the end of what it writes.  False: there is no more for now.
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
		loop_forget(child->errors);
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

static void
child_ends(void *argument, int fd, int events)
{
	Child	   *child = argument;
	Message    *message = child->message;
	int			reads = MOST_READS;
	int			status;
	char	   *words;

	if (waitpid(child->pid, &status, WNOHANG) != child->pid)
		return;
	child->pid = 0;
	/* What it has started may go on writing. */
	while (child->errors >= 0 && reads-- > 0 && read_words(child))
		;
	while (child->length > 0 && child->words[child->length - 1] == '\n')
		child->length--;
	child->words[child->length] = '\0';
	words = strrchr(child->words, '\n');
	words = words ? words + 1 : child->words;

	if (child->late)
		sink_refused(message, -1, "the command took longer than \"timeout\"");
	else if (WIFSIGNALED(status))
		sink_refused(message, -1, "the command was ended by signal %d",
					 WTERMSIG(status));
	else if (WEXITSTATUS(status) == 0)
		sink_delivered(message);
	else if (WEXITSTATUS(status) == TEMPORARY ||
			 WEXITSTATUS(status) == 126 || WEXITSTATUS(status) == 127)
		sink_put_off(message, 0, "the command ended with status %d: %s",
					 WEXITSTATUS(status), words);
	else
		sink_refused(message, -1, "the command ended with status %d: %s",
					 WEXITSTATUS(status), words);
	release(child);
}

/*
 * Kill who takes too long.
 */
static void
command_work(Sink *sink, int64_t now)
{
	Message    *message;

	for (message = sink->flying.first; message; message = message->next)
	{
		Child	   *child = message->delivery;

		if (child->late)
			continue;
		if (now - message->handed_at >= sink->timeout)
		{
			child->late = true;
			end(child);
		}
		else
			loop_wake_at(message->handed_at + sink->timeout);
	}
}

/*
 * Kill a command with all of its process group, which it may have left.
 */
static void
end(const Child *child)
{
	(void) kill(-child->pid, SIGKILL);
	(void) kill(child->pid, SIGKILL);
}

static void
command_disconnect(Sink *sink)
{
	Message    *message;

	for (message = sink->flying.first; message; message = message->next)
		release(message->delivery);
}

/*
 * Let go of a child; one that runs is killed.
 */
static void
release(Child *child)
{
	if (child->pid > 0)
	{
		end(child);
		(void) waitpid(child->pid, NULL, 0);
	}
	if (child->pid_fd >= 0)
	{
		loop_forget(child->pid_fd);
		close(child->pid_fd);
	}
	if (child->errors >= 0)
	{
		loop_forget(child->errors);
		close(child->errors);
	}
	free(child);
}

static void
command_free(Sink *sink)
{
}

const SinkType command_sink = {
	"command", settings, command_configure, command_connect, NULL,
	command_deliver, command_work, command_disconnect, command_free
};
