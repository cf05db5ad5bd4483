/*-------------------------------------------------------------------------
 *
 * main.c
 *		The command line of idem-relay, which takes messages from the outbox
 *		and delivers them.
 *
 * This file owns the Relay, on the stack of main().
 *
 *-------------------------------------------------------------------------
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "admin.h"
#include "relay.h"
#include "sinks.h"
#include "version.h"

static void print_help(void);
static void print_settings(const char *title, const RelaySettingDef *defs);

/*
 * Run the relay, or answer --help, --version or --check.  Returns one of the
 * exit statuses of log.h.
 */
int
main(int argc, char **argv)
{
	bool		check_only = false;
	Relay		relay = {0};
	int			i;

	/*
	 * The threads of librdkafka and libnats would have heaps of their own,
	 * which keep what is freed.
	 */
	mallopt(M_ARENA_MAX, 1);
	srand48(time(NULL) ^ getpid());
	if (argc > 1 && relay_admin_is_command(argv[1]))
		return relay_admin_run(argc, argv);
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
	relay_begin(&relay, argc, argv, check_only);
	if (check_only)
		puts("The configuration is valid; database and brokers can be "
			 "reached.");
	else
		relay_run(&relay);
	return relay_end(&relay);
}

/*
 * Print the options and all settings.
 */
static void
print_help(void)
{
	puts("idem-relay takes messages from the outbox of the extension\n"
		 "\"idempotency\" and delivers them.\n\n"
		 "  idem-relay --config=FILE           settings of a file\n"
		 "  idem-relay --NAME=VALUE            a setting\n"
		 "  idem-relay --SECTION.NAME=VALUE    a setting of a sink\n"
		 "  idem-relay --check ...             say what is wrong, and end\n\n"
		 "  idem-relay dead ...                list dead messages\n"
		 "  idem-relay groups ...              count them by topic and cause\n"
		 "  idem-relay requeue ...             put them back\n"
		 "  idem-relay status ...              "
		 "show what is blocked, and by what\n"
		 "      --id=NUMBER,... --topic=NAME --reason=PART "
		 "--limit=NUMBER --all\n\n"
		 "A first one, that prints all messages:\n\n"
		 "  idem-relay --database=dbname=shop --out.sink=stdout "
		 "'--out.topics=*'");
	print_settings("Settings:", relay_main_settings);
	relay_sinks_describe(print_settings);
	puts("\nMore of them is in README.md, which is installed beside a sample\n"
		 "of the file.\n\n"
		 "Exit status: 0 stopped, 64 unknown option, 69 database not reached\n"
		 "at the start, or a broker with --check, 71 out of memory or\n"
		 "descriptors, 74 standard output closed, 75 stopped with messages\n"
		 "unanswered, 78 fault in the configuration.");
}

/*
 * Print an array of settings under a title.
 */
static void
print_settings(const char *title, const RelaySettingDef *defs)
{
	printf("\n%s\n\n", title);
	for (; defs->name; defs++)
	{
		bool		optional = defs->standard && *defs->standard;

		printf("  %-14s %s%s%s%s\n", defs->name, defs->help,
			   optional ? " (" : defs->standard ? "" : " (required)",
			   optional ? defs->standard : "", optional ? ")" : "");
	}
}
