/*-------------------------------------------------------------------------
 *
 * main.c
 *		idem-relay: takes messages from the outbox and delivers them.
 *
 * One thread, one loop.  In each round the answers go to the database, new
 * messages come from it, and sinks get what is ready.  Signals are read from a
 * descriptor like everything else:
 *
 *	SIGTERM, SIGINT		stop: what is delivered is acknowledged, the rest given
 *						back; a second one ends at once
 *	SIGHUP				the same, and start again with the configuration as it
 *						is then, unless it has a fault
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "answers.h"
#include "config.h"
#include "database.h"
#include "loop.h"
#include "metrics.h"
#include "notify.h"
#include "queue.h"
#include "relay.h"
#include "sinks.h"
#include "taker.h"

/* For the last answers, once all deliveries have ended. */
#define ANSWER_TIME	5000

typedef enum Phase
{
	RUNNING,
	STOPPING,					/* nothing new is begun */
	ABANDONED					/* nothing is waited for */
} Phase;

static Phase phase = RUNNING;
static bool again = false;		/* start anew at the end */
static int64_t stop_at;			/* deliveries end at the latest */
static int64_t stop_timeout;

static int	arg_count;
static char **args;

static void print_help(void);
static void print_settings(const char *title, const SettingDef *defs);
static void configure(Config *config);
static void signalled(void *argument, int fd, int events);
static bool is_valid(void);
static void round_of_work(int64_t now);
static bool stop_work(int64_t now);
static void abandon_deliveries(void);
static void block_signals(sigset_t *signals);

int
main(int argc, char **argv)
{
	bool		check_only = false;
	Config	   *config;
	sigset_t	signals;
	int			signal_fd;
	bool		reached;
	int			held;
	int			i;

	arg_count = argc;
	args = argv;
	srand48(time(NULL) ^ getpid());
	for (i = 1; i < argc; i++)
	{
		if (strcmp(argv[i], "--help") == 0)
		{
			print_help();
			return RELAY_DONE;
		}
		if (strcmp(argv[i], "--version") == 0)
		{
			puts("idem-relay " RELAY_VERSION);
			return RELAY_DONE;
		}
		if (strcmp(argv[i], "--check") == 0)
			check_only = true;
		else if (strncmp(argv[i], "--", 2) != 0 || !strchr(argv[i], '='))
			relay_exit(RELAY_USAGE, "%s: expected --name=value, --check, "
					   "--help or --version", argv[i]);
	}

	/* Before a library starts a thread. */
	block_signals(&signals);
	config = config_read(argc, argv);
	configure(config);
	if (config->nfaults == 0 && !check_only)
		metrics_begin(config);
	if (config->nfaults > 0)
		relay_exit(RELAY_CONFIG, "the configuration has %d fault(s)",
				   config->nfaults);
	relay_verbose = section_number(config->main, "verbose");
	stop_timeout = section_number(config->main, "stop_timeout");

	reached = database_check(section_text(config->main, "database"));
	if (!reached)
		relay_log(RELAY_ERROR, "%s: the database cannot be reached, see above",
				  section_where(config->main, "database"));
	if (reached || check_only)
		reached &= sinks_connect();
	if (!reached)
		relay_exit(RELAY_UNAVAILABLE, "start what cannot be reached, or mend "
				   "the configuration");
	if (check_only)
	{
		sinks_free();
		database_end();
		config_free(config);
		puts("The configuration is valid; database and brokers can be "
			 "reached.");
		return RELAY_DONE;
	}

	signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signal_fd < 0)
		relay_exit(RELAY_SYSTEM, "could not wait for signals: %s",
				   strerror(errno));
	loop_watch(signal_fd, LOOP_READ, signalled, &signal_fd);
	answers_begin(section_number(config->main, "lease"));
	taker_begin(config->main);
	relay_log(RELAY_INFO, "started");
	notify("READY=1");

	for (;;)
	{
		int64_t		now = relay_now();

		if (phase != RUNNING && stop_work(now))
			break;
		round_of_work(now);
		notify_watchdog();
		loop_wait();
	}

	held = queue_count();
	if (held > 0)
		relay_log(RELAY_WARNING, "stopped; %d message(s) stay leased until "
				  "their time is over", held);
	else
		relay_log(RELAY_INFO, again ? "starting again" : "stopped");
	abandon_deliveries();
	taker_end();
	answers_end();
	metrics_end();
	sinks_free();
	database_end();
	config_free(config);
	if (again && phase != ABANDONED)
	{
		sigprocmask(SIG_UNBLOCK, &signals, NULL);
		execv("/proc/self/exe", argv);
		relay_exit(RELAY_SYSTEM, "could not start again: %s", strerror(errno));
	}
	while (queue_first())
		queue_drop(queue_first());
	return held > 0 ? RELAY_UNANSWERED : RELAY_DONE;
}

static void
print_help(void)
{
	puts("idem-relay takes messages from the outbox of the extension\n"
		 "\"idempotency\" and delivers them.\n\n"
		 "  idem-relay --config=FILE           settings of a file\n"
		 "  idem-relay --NAME=VALUE            a setting\n"
		 "  idem-relay --SECTION.NAME=VALUE    a setting of a sink\n"
		 "  idem-relay --check ...             say what is wrong, and end\n\n"
		 "A first one, that prints all messages:\n\n"
		 "  idem-relay --database=dbname=shop --out.sink=stdout "
		 "'--out.topics=*'");
	print_settings("Settings:", main_settings);
	sinks_describe(print_settings);
	puts("\nMore of them is in README.md, which is installed beside a sample\n"
		 "of the file.\n\n"
		 "Exit status: 0 stopped, 64 unknown option, 69 database or broker\n"
		 "not reached at the start, 71 out of memory or descriptors, 74\n"
		 "standard output closed, 75 stopped with messages unanswered, 78\n"
		 "fault in the configuration.");
}

static void
print_settings(const char *title, const SettingDef *defs)
{
	printf("\n%s\n\n", title);
	for (; defs->name; defs++)
	{
		bool		optional = defs->standard && *defs->standard;

		printf("  %-14s %s%s%s%s\n", defs->name, defs->help,
			   optional ? " (" : defs->standard ? "" : " (has to be set)",
			   optional ? defs->standard : "", optional ? ")" : "");
	}
}

/*
 * Tell all faults that can be seen without reaching anything.
 */
static void
configure(Config *config)
{
	database_configure(config);
	metrics_configure(config);
	sinks_configure(config);
}

static void
block_signals(sigset_t *signals)
{
	sigemptyset(signals);
	sigaddset(signals, SIGTERM);
	sigaddset(signals, SIGINT);
	sigaddset(signals, SIGHUP);
	sigprocmask(SIG_BLOCK, signals, NULL);
	signal(SIGPIPE, SIG_IGN);
}

static void
signalled(void *argument, int fd, int events)
{
	struct signalfd_siginfo info;

	while (read(*(int *) argument, &info, sizeof(info)) == sizeof(info))
	{
		bool		reload = info.ssi_signo == SIGHUP;

		if (reload && (phase != RUNNING || !is_valid()))
			continue;
		if (phase == RUNNING)
		{
			relay_log(RELAY_INFO, reload ? "reloading" : "stopping");
			notify(reload ? "RELOADING=1" : "STOPPING=1");
			phase = STOPPING;
			again = reload;
			stop_at = relay_now() + stop_timeout;
		}
		else if (again)
			again = false;
		else
			phase = ABANDONED;
	}
}

/*
 * Whether the configuration, as it is now, has no fault.
 */
static bool
is_valid(void)
{
	Config	   *config = config_read(arg_count, args);
	bool		valid;

	database_configure(config);
	metrics_configure(config);
	sinks_try(config);
	valid = config->nfaults == 0;
	config_free(config);
	if (!valid)
		relay_log(RELAY_ERROR, "the configuration has faults; going on with "
				  "the one from before");
	return valid;
}

static void
round_of_work(int64_t now)
{
	Sink	   *sink;

	if (phase != RUNNING)
	{
		for (sink = sinks_first; sink; sink = sink->next)
			queue_give_back_ready(sink);
	}
	sinks_work(now);
	answers_work(now);
	taker_work(now);
}

/*
 * Whether the relay can end.
 */
static bool
stop_work(int64_t now)
{
	bool		flying = false;
	bool		taken = taker_stop(now);
	Sink	   *sink;

	if (phase == ABANDONED)
		return true;
	for (sink = sinks_first; sink; sink = sink->next)
		flying |= sink->flying.count > 0;
	if (flying && now >= stop_at)
	{
		abandon_deliveries();
		flying = false;
	}
	if (!flying && taken && queue_count() == 0)
		return true;
	loop_wake_at(now < stop_at ? stop_at : now + 100);
	return now >= stop_at + ANSWER_TIME;
}

/*
 * Give back what sinks have not finished.
 */
static void
abandon_deliveries(void)
{
	Sink	   *sink;

	for (sink = sinks_first; sink; sink = sink->next)
	{
		if (sink->flying.count == 0)
			continue;
		sink->type->disconnect(sink);
		sink->connected = false;
		while (sink->flying.first)
			queue_give_back(sink->flying.first);
		sink->held_until = INT64_MAX;
	}
}
