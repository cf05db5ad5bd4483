/*-------------------------------------------------------------------------
 *
 * relay.c
 *		The relay, from its configuration to its end.
 *
 * One thread runs one loop.  In each round, the sinks get the messages that
 * are ready, the server gets the answers, and new messages are taken.  Signals
 * arrive through a descriptor, like other events:
 *
 *	SIGTERM, SIGINT		stop: acknowledge what is delivered and release the
 *						rest; a second signal ends the relay at once
 *	SIGHUP				stop in the same way, and start again with the new
 *						configuration, unless that has a fault
 *
 * The file can become faulty until the new program reads it.  So that gets a
 * copy of what was checked.  SIGHUP while the relay stops makes another copy.
 * The files that it names are checked again before the new program begins.
 *
 * The caller owns the Relay, which owns all other state.  main.c calls these
 * functions once each.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "dispatch.h"
#include "notify.h"
#include "relay.h"
#include "sink_stdout.h"
#include "sinks.h"

#define ANSWER_TIME	5000		/* for the last answers, in milliseconds */

/* As many descriptors as the relay uses, if it is allowed to. */
#define DESCRIPTORS	65536

/*
 * Set in the environment of a relay that starts again after SIGHUP: the
 * descriptor of the copy of the configuration, or 0, and CUT_LINE if standard
 * output ends with a part of a line.  One variable has both, because a second
 * setenv() could free the list that a connecting thread reads.
 */
#define RESTARTED	"IDEM_RELAY_RESTARTED"
#define CUT_LINE	" cut"

static void raise_limit(void);
static void work(Relay *relay, int64_t now);
static bool can_end(Relay *relay, int64_t now);
static int	count_held(const Relay *relay);
static void signalled(void *argument, int fd, int events);
static bool is_valid(Relay *relay);
static bool check(const Relay *relay, int copy);
static void resume(Relay *relay);
static int	copy_config(const Relay *relay);
static bool copy_text(int from, int to);
static void check_schedules(const Relay *relay);
static bool check_privileges(const Relay *relay);

/*
 * Initialize a zeroed relay: read the configuration, and connect to the
 * database.  Ends the process if the configuration has a fault or the database
 * cannot be reached, after logging all of it.  After SIGHUP, it waits for the
 * database like a relay that was not restarted.  With "check_only", opens no
 * port for metrics, and connects all sinks, too, even if the database cannot
 * be reached.  Otherwise dispatch.c connects them, so that a sink that cannot
 * be reached does not keep the others from starting.
 */
void
relay_begin(Relay *relay, int argc, char **argv, bool check_only)
{
	RelayConfig *config;
	const RelaySection *settings;
	const char *restarted = check_only ? NULL : getenv(RESTARTED);
	int			copy = restarted ? (int) strtol(restarted, NULL, 10) : 0;
	bool		reached;

	relay->argc = argc;
	relay->argv = argv;
	(void) !readlink("/proc/self/exe", relay->program,
					 sizeof(relay->program) - 1);
	/* First, because the threads of libraries inherit the mask. */
	sigemptyset(&relay->signals);
	sigaddset(&relay->signals, SIGTERM);
	sigaddset(&relay->signals, SIGINT);
	sigaddset(&relay->signals, SIGHUP);
	if (!check_only)
		sigprocmask(SIG_BLOCK, &relay->signals, NULL);
	signal(SIGPIPE, SIG_IGN);
	/* A parent can have passed on that it is ignored. */
	signal(SIGCHLD, SIG_DFL);

	raise_limit();
	relay_loop_begin(&relay->loop);
	/* Versions without a copy have set another number. */
	if (copy <= STDERR_FILENO)
		copy = 0;
	config = relay->config = relay_config_read(argc, argv, copy);
	if (copy)
		close(copy);
	relay_stdout_is_cut = restarted && strstr(restarted, CUT_LINE);
	unsetenv(RESTARTED);
	settings = config->main;
	relay_log_as_json(strcmp(relay_section_text(settings, "log_format"),
							 "json") == 0);
	relay_database_configure(config);
	relay_http_configure(config);
	relay_sinks_configure(&relay->routing, config, &relay->loop,
						  &relay->queue, &relay->server);
	relay->server.loop = &relay->loop;
	relay->server.password = relay_section_text(settings, "password");
	relay->server.verbose = relay_section_number(settings, "verbose");
	relay_answers_begin(&relay->answers, &relay->server, &relay->queue,
						relay_section_number(settings, "lease"));
	relay_taker_begin(&relay->taker, &relay->server, &relay->queue,
					  &relay->routing, &relay->answers, settings);
	relay->completers = relay_completers_begin(&relay->routing, &relay->server,
											   relay_section_number(settings,
																	"lease"));
	relay->stop_timeout = relay_section_number(settings, "stop_timeout");
	if (config->nfaults == 0 && !check_only)
		relay_http_begin(&relay->http, config, &relay->loop, &relay->taker,
						 relay->completers);
	if (config->nfaults > 0)
		relay_exit(RELAY_CONFIG, "the configuration has %d fault(s)",
				   config->nfaults);

	reached = relay_database_check(&relay->server,
								   relay_section_text(settings, "database"));
	if (!reached)
		relay_log(RELAY_ERROR, "%s: the database cannot be reached, see above",
				  relay_section_where(settings, "database"));
	else
	{
		check_schedules(relay);
		if (!check_privileges(relay) && check_only)
			reached = false;
	}
	if (check_only)
		reached &= relay_sinks_connect(&relay->routing);
	if (!reached && !restarted)
		relay_exit(RELAY_UNAVAILABLE, "start what cannot be reached, or fix "
				   "the configuration");
}

/*
 * Raise the soft limit on descriptors, which is 1024 by default.  Endpoints
 * that do not answer occupy one for each request, and the other sinks need
 * theirs.  Commands inherit the limit.
 */
static void
raise_limit(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
		limit.rlim_cur >= DESCRIPTORS)
		return;
	limit.rlim_cur = limit.rlim_max < DESCRIPTORS ? limit.rlim_max :
		DESCRIPTORS;
	(void) setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * Warn if a sink's list of pauses is longer than the attempts that the server
 * allows.  The database has been reached.
 */
static void
check_schedules(const Relay *relay)
{
	const RelaySink *sink;

	for (sink = relay->routing.first; sink; sink = sink->next)
	{
		const char *c = sink->schedule;
		int			pauses = 1;

		while (c && (c = strchr(c, ',')))
		{
			pauses++;
			c++;
		}
		if (sink->schedule && pauses >= relay->server.max_attempts)
			relay_log(RELAY_WARNING, "%s: \"retry\" has %d pauses, but the "
					  "server ends a message after %d attempts; set "
					  "idempotency.outbox_max_attempts to at least %d",
					  relay_section_where(sink->section, "retry"), pauses,
					  relay->server.max_attempts, pauses + 1);
	}
}

/*
 * Return whether the role can call the functions of completers, if there are
 * any.  Otherwise report how to grant that.  The database has been reached.
 */
static bool
check_privileges(const Relay *relay)
{
	if (!relay->completers || !relay->server.lacking)
		return true;
	relay_log(RELAY_ERROR, "%s: the role lacks privileges on %s; run GRANT "
			  "EXECUTE ON FUNCTION idem_resume, idem_heartbeat, idem_fail, "
			  "idem_complete(text, text, int, text, json, bigint) TO it",
			  relay_section_where(relay->completers->sink->section, "resume"),
			  relay->server.lacking);
	return false;
}

/*
 * Deliver messages until a signal stops the relay.  relay_begin() has
 * succeeded.
 */
void
relay_run(Relay *relay)
{
	int			fd = signalfd(-1, &relay->signals,
							  SFD_CLOEXEC | SFD_NONBLOCK);
	int			held;

	if (fd < 0)
		relay_exit(RELAY_SYSTEM, "could not wait for signals: %s",
				   strerror(errno));
	relay_loop_watch(&relay->loop, fd, RELAY_LOOP_READ, signalled, relay);
	relay_log(RELAY_INFO, "started");
	relay_notify("READY=1");

	for (;;)
	{
		int64_t		now = relay_now();

		if (relay->phase != RELAY_RUNNING && can_end(relay, now))
		{
			if (!relay->restart || relay->phase == RELAY_ABANDONED ||
				check(relay, relay->copy))
				break;
			resume(relay);
		}
		work(relay, now);
		relay_notify_watchdog(&relay->loop, &relay->last_sign);
		relay_loop_wait(&relay->loop);
	}
	held = count_held(relay);
	if (held > 0)
		relay_log(RELAY_WARNING, "stopped; %d message(s) stay leased until "
				  "their leases end", held);
	else
		relay_log(RELAY_INFO, relay->restart ? "starting again" : "stopped");
}

/*
 * Do what a round has to do before it waits.
 */
static void
work(Relay *relay, int64_t now)
{
	relay_dispatch_work(&relay->routing, &relay->answers,
						relay->phase != RELAY_RUNNING, now);
	relay_answers_work(&relay->answers, now);
	relay_taker_work(&relay->taker, now);
	relay_completers_work(relay->completers, now);
}

/*
 * Return whether a relay that is stopping can end: all messages are answered,
 * or there is no more time to wait for that.
 */
static bool
can_end(Relay *relay, int64_t now)
{
	bool		resumed = relay_completers_stop(relay->completers);
	bool		taken = relay_taker_stop(&relay->taker, now) && resumed;
	bool		in_flight = relay_dispatch_in_flight(&relay->routing);

	if (relay->phase == RELAY_ABANDONED)
		return true;
	if (in_flight && now >= relay->stop_at)
	{
		relay_dispatch_abandon(&relay->routing);
		in_flight = false;
	}
	if (!in_flight && taken && relay->queue.count == 0)
		return true;
	relay_loop_wake_at(&relay->loop,
					   now < relay->stop_at ? relay->stop_at : now + 100);
	return now >= relay->stop_at + ANSWER_TIME;
}

/*
 * Return how many messages and claims would stay leased if the relay ended
 * now.  A result that is arriving counts as one.
 */
static int
count_held(const Relay *relay)
{
	const RelayTaker *taker = &relay->taker;

	return relay->queue.count + relay_completers_held(relay->completers) +
		(!taker->listing && relay_database_is_arriving(&taker->database));
}

/*
 * Read the signals that have arrived.  The event loop calls this.
 */
static void
signalled(void *argument, int fd, int events)
{
	Relay	   *relay = argument;
	struct signalfd_siginfo info;

	while (read(fd, &info, sizeof(info)) == sizeof(info))
	{
		bool		reload = info.ssi_signo == SIGHUP;

		if (reload)
		{
			bool		begun = relay->phase != RELAY_RUNNING;

			/* A second one replaces the copy.  SIGTERM comes first. */
			if ((begun && !relay->restart) || !is_valid(relay) || begun)
				continue;
		}
		if (relay->phase == RELAY_RUNNING)
		{
			relay_log(RELAY_INFO, reload ? "reloading" : "stopping");
			relay_notify(reload ? "RELOADING=1" : "STOPPING=1");
			relay->phase = RELAY_STOPPING;
			relay->restart = reload;
			relay->stop_at = relay_now() + relay->stop_timeout;
		}
		else if (relay->restart)
			relay->restart = false;
		else
			relay->phase = RELAY_ABANDONED;
	}
}

/*
 * Return whether the configuration file and the options have no fault now, and
 * keep a copy of the file if so.  The configuration in use does not change.
 */
static bool
is_valid(Relay *relay)
{
	int			copy = copy_config(relay);
	bool		valid = check(relay, copy);

	if (valid)
	{
		int			old = relay->copy;

		relay->copy = copy;
		copy = old;
	}
	if (copy)
		close(copy);
	return valid;
}

/*
 * Return whether a copy of the configuration file, or the file itself if
 * "copy" is 0, and the options have no fault.  Otherwise report that.
 */
static bool
check(const Relay *relay, int copy)
{
	RelayConfig *config = relay_config_read(relay->argc, relay->argv, copy);
	RelayRouting routing = {0};
	bool		valid;

	relay_database_configure(config);
	relay_http_check(&relay->http, config);
	relay_sinks_configure(&routing, config, NULL, NULL, NULL);
	relay_sinks_free(&routing);
	valid = config->nfaults == 0;
	relay_config_free(config);
	if (!valid)
		relay_log(RELAY_ERROR, "the configuration has errors; the relay "
				  "keeps the old one");
	return valid;
}

/*
 * Continue with the old configuration, instead of starting again.
 */
static void
resume(Relay *relay)
{
	RelayCompleter *completer = relay->completers;

	relay->phase = RELAY_RUNNING;
	relay->restart = false;
	relay->taker.stopping = false;
	for (; completer; completer = completer->next)
		completer->stopping = false;
	relay_dispatch_resume(&relay->routing);
	relay_notify("READY=1");
}

/*
 * Return the descriptor of a copy of the configuration file, or 0 if there is
 * none, or it cannot be copied.
 */
static int
copy_config(const Relay *relay)
{
	const char *path = NULL;
	struct stat status;
	int			from;
	int			copy;
	int			i;

	for (i = 1; i < relay->argc; i++)
	{
		if (strncmp(relay->argv[i], "--config=", 9) == 0)
			path = relay->argv[i] + 9;
	}
	from = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (from < 0)
		return 0;
	copy = memfd_create("configuration", MFD_CLOEXEC);
	/* The mode is checked, too. */
	if (copy >= 0 &&
		(fstat(from, &status) != 0 || !copy_text(from, copy) ||
		 fchmod(copy, status.st_mode & 0777) != 0))
	{
		close(copy);
		copy = -1;
	}
	close(from);
	return copy < 0 ? 0 : copy;
}

/*
 * Append all of one file to another.  Returns false if that fails.
 */
static bool
copy_text(int from, int to)
{
	char		buffer[4096];
	ssize_t		length;

	while ((length = read(from, buffer, sizeof(buffer))) > 0)
	{
		if (write(to, buffer, (size_t) length) != length)
			return false;
	}
	return length == 0;
}

/*
 * Release everything that relay_begin() acquired.  If the relay is to start
 * again, or a thread still connects a sink, does not return.  Otherwise
 * returns the exit status.
 */
int
relay_end(Relay *relay)
{
	int			status = count_held(relay) > 0 ? RELAY_UNANSWERED : RELAY_DONE;
	char		restarted[32];
	bool		connecting;

	relay_dispatch_abandon(&relay->routing);
	relay_database_close(&relay->taker.database);
	relay_database_close(&relay->answers.database);
	relay_taker_end(&relay->taker);
	relay_completers_free(relay->completers);
	relay_http_end(&relay->http);
	while (relay->queue.first)
		relay_queue_drop(&relay->queue, relay->queue.first);
	connecting = relay_dispatch_connecting(&relay->routing);
	if (!connecting)
	{
		relay_sinks_free(&relay->routing);
		relay_database_free(&relay->server);
		relay_config_free(relay->config);
		relay_loop_end(&relay->loop);
	}
	if (relay->restart && relay->phase != RELAY_ABANDONED)
	{
		snprintf(restarted, sizeof(restarted), "%d%s", relay->copy,
				 relay_stdout_is_cut ? CUT_LINE : "");
		setenv(RESTARTED, restarted, 1);
		/* Libraries have sockets that would stay open in the new program. */
		(void) close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
		if (relay->copy)
			(void) fcntl(relay->copy, F_SETFD, 0);
		/* The path has the new program after an upgrade. */
		execv(relay->program, relay->argv);
		execv("/proc/self/exe", relay->argv);
		relay_exit(RELAY_SYSTEM, "could not start again: %s", strerror(errno));
	}
	if (connecting)
		_exit(status);
	return status;
}
