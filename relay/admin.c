/*-------------------------------------------------------------------------
 *
 * admin.c
 *		Commands for an operator: list dead messages, put them back, and show
 *		what is blocked.
 *
 * They run beside a relay, with its configuration and its rights, and wait for
 * the server's answer.  main.c calls this file, which owns no state.
 *
 *-------------------------------------------------------------------------
 */
#include <libpq-fe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin.h"
#include "config.h"
#include "database.h"
#include "memory.h"
#include "text.h"

#define MAX_COLUMNS	8
#define LONGEST		60			/* characters of a column that are padded */
#define CONNECT_LIMIT	10000	/* milliseconds; see connect_timeout, too */

/* The conditions that select dead messages; NULL: none. */
enum
{
	OPTION_ID,
	OPTION_TOPIC,
	OPTION_REASON,
	OPTION_LIMIT,
	NOPTIONS
};

static const char *const option_names[] = {"id", "topic", "reason", "limit"};

/*
 * The dead messages that the options select.  "reason" is the last error
 * without its time, and without what differs between messages of one cause.
 */
#define SELECTED \
	"(SELECT d.*, pg_catalog.regexp_replace(pg_catalog.regexp_replace(" \
	"pg_catalog.split_part(coalesce(d.last_error, 'no answer'), E'\\n', 1), " \
	"'^\\d{4}-\\d\\d-\\d\\dT[0-9:.]+Z ', ''), " \
	"'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', '...', 'g') AS reason " \
	"FROM %s.idem_outbox_dead(NULL) AS d) AS s " \
	"WHERE ($1::bigint[] IS NULL OR s.id = ANY ($1::bigint[])) " \
	"AND ($2::text IS NULL OR s.topic = $2::text) " \
	"AND ($3::text IS NULL OR pg_catalog.strpos(s.reason, $3::text) > 0)"

static const struct
{
	const char *name;
	int			nparams;
	bool		needs_selection;	/* or --all */
	const char *query;
}			commands[] = {

	{"dead", 4, false,
		"SELECT s.id, s.topic, s.message_key AS key, s.attempt AS attempts, "
		"pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() - "
		"s.created_at) AS age, s.reason FROM " SELECTED
	" ORDER BY s.id LIMIT coalesce($4::bigint, 1000)"},
	{"groups", 4, false,
		"SELECT pg_catalog.count(*) AS messages, s.topic, "
		"pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() - "
		"pg_catalog.min(s.created_at)) AS oldest, s.reason FROM " SELECTED
		" GROUP BY s.topic, s.reason ORDER BY 1 DESC, 2, 4 "
	"LIMIT coalesce($4::bigint, 1000)"},
	{"requeue", 4, true,
		"SELECT coalesce(%s.idem_outbox_requeue(pg_catalog.array_agg(l.id)), "
		"0) AS requeued FROM (SELECT s.id FROM " SELECTED
		" ORDER BY s.id LIMIT $4::bigint) AS l "
	"HAVING pg_catalog.count(*) > 0"},
	{"status", 0, false,
		"SELECT b.topic, b.waiting, pg_catalog.date_trunc('second', "
		"pg_catalog.clock_timestamp() - b.blocked_since) AS blocked_for, "
		"b.reason AS \"by\", b.first_id AS message, "
		"pg_catalog.date_trunc('second', b.until) AS until, b.pid "
	"FROM %s.idem_outbox_blocked(1000) AS b"},
};

static int	find_command(const char *word);
static RelayConfig *read_config(int argc, char **argv, const char **values,
								bool *all);
static PGconn *connect_database(RelayConfig *config);
static void log_notice(void *argument, const char *notice);
static char *make_query(PGconn *connection, const char *query);
static void print_table(const PGresult *result);
static int	width_of(const char *text);

/*
 * Return whether a word of the command line is one of these commands.
 */
bool
relay_admin_is_command(const char *word)
{
	return find_command(word) >= 0;
}

/*
 * Return the number of a command, or -1.
 */
static int
find_command(const char *word)
{
	size_t		i;

	for (i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
	{
		if (strcmp(commands[i].name, word) == 0)
			return (int) i;
	}
	return -1;
}

/*
 * Run the command that argv[1] names, and print its result.  Returns the exit
 * status.
 */
int
relay_admin_run(int argc, char **argv)
{
	int			command = find_command(argv[1]);
	const char *values[NOPTIONS] = {0};
	char	   *ids = NULL;
	bool		all = false;
	RelayConfig *config = read_config(argc, argv, values, &all);
	PGconn	   *connection;
	PGresult   *result;
	char	   *query;
	int			status = RELAY_DONE;

	if (commands[command].needs_selection && !all && !values[OPTION_ID] &&
		!values[OPTION_TOPIC] && !values[OPTION_REASON])
		relay_exit(RELAY_USAGE, "%s: expected --id=..., --topic=..., "
				   "--reason=... or --all", argv[1]);
	if (commands[command].nparams == 0 &&
		(all || values[OPTION_ID] || values[OPTION_TOPIC] ||
		 values[OPTION_REASON] || values[OPTION_LIMIT]))
		relay_exit(RELAY_USAGE, "%s takes only settings", argv[1]);
	if (values[OPTION_ID])
	{
		RelayText  *array = relay_text_new();

		relay_text_addf(array, "{%s}", values[OPTION_ID]);
		values[OPTION_ID] = ids = relay_copy(array->data);
		relay_text_free(array);
	}
	connection = connect_database(config);
	query = make_query(connection, commands[command].query);
	result = PQexecParams(connection, query, commands[command].nparams, NULL,
						  values, NULL, NULL, 0);
	if (PQresultStatus(result) != PGRES_TUPLES_OK)
	{
		relay_log(RELAY_ERROR, "%.*s",
				  (int) strcspn(PQresultErrorMessage(result), "\n"),
				  PQresultErrorMessage(result));
		status = RELAY_UNAVAILABLE;
	}
	else if (commands[command].needs_selection)
		printf("%s\n", PQntuples(result) ? PQgetvalue(result, 0, 0) : "0");
	else
		print_table(result);
	PQclear(result);
	PQfinish(connection);
	free(query);
	free(ids);
	relay_config_free(config);
	return status;
}

/*
 * Read the options of the command into "values", and all others as the
 * configuration.  Ends the process if that has a fault.
 */
static RelayConfig *
read_config(int argc, char **argv, const char **values, bool *all)
{
	char	  **rest = relay_alloc((size_t) (argc + 1) * sizeof(char *));
	RelayConfig *config;
	int			count = 1;
	int			i;
	int			option;

	for (i = 2; i < argc; i++)
	{
		const char *argument = argv[i];
		const char *value = strchr(argument, '=');

		for (option = 0; option < NOPTIONS; option++)
		{
			size_t		length = strlen(option_names[option]);

			if (value && strncmp(argument, "--", 2) == 0 &&
				value == argument + 2 + length &&
				strncmp(argument + 2, option_names[option], length) == 0)
				break;
		}
		if (strcmp(argument, "--all") == 0)
			*all = true;
		else if (option < NOPTIONS && value[1])
			values[option] = value + 1;
		else if (option < NOPTIONS || strncmp(argument, "--", 2) != 0 ||
				 !value)
			relay_exit(RELAY_USAGE, "%s: expected --id=NUMBER,..., "
					   "--topic=NAME, --reason=PART, --limit=NUMBER, --all or "
					   "a setting", argument);
		else
			rest[count++] = argv[i];
	}
	rest[0] = argv[0];
	config = relay_config_read(count, rest, 0);
	free(rest);
	if (config->nfaults > 0)
		relay_exit(RELAY_CONFIG, "the configuration has %d fault(s)",
				   config->nfaults);
	return config;
}

/*
 * Connect to the relay's database.  Ends the process if that fails.
 */
static PGconn *
connect_database(RelayConfig *config)
{
	const char *password = relay_section_text(config->main, "password");
	const char *const names[] = {
		"target_session_attrs", "fallback_application_name",
		"connect_timeout", "dbname", *password ? "password" : NULL, NULL
	};
	const char *const values[] = {
		"read-write", "idem-relay", "10",
		relay_section_text(config->main, "database"), password, NULL
	};
	PGconn	   *connection = PQconnectStartParams(names, values, 1);

	relay_database_wait(connection, CONNECT_LIMIT, log_notice, config);
	if (PQstatus(connection) != CONNECTION_OK)
		relay_exit(RELAY_UNAVAILABLE, "database: %.*s",
				   (int) strcspn(PQerrorMessage(connection), "\n"),
				   PQerrorMessage(connection));
	/* A database without an encoding can have any bytes. */
	if (strcmp(PQparameterStatus(connection, "server_encoding"),
			   "SQL_ASCII") != 0)
		PQsetClientEncoding(connection, "UTF8");
	return connection;
}

/*
 * Log a notice, if that is configured.  libpq calls this.
 */
static void
log_notice(void *argument, const char *notice)
{
	const RelayConfig *config = argument;

	if (relay_section_number(config->main, "verbose"))
		relay_log(RELAY_DEBUG, "%.*s", (int) strcspn(notice, "\n"), notice);
}

/*
 * Return a query with the extension's schema in place of each "%s".  The
 * caller frees it.
 */
static char *
make_query(PGconn *connection, const char *query)
{
	RelayText  *text = relay_text_new();
	const char *part;
	char	   *made;
	PGresult   *schema;

	PQclear(PQexec(connection, "SET search_path = pg_catalog"));
	schema = PQexec(connection, RELAY_SCHEMA_QUERY);
	if (PQntuples(schema) != 1)
		relay_exit(RELAY_UNAVAILABLE, "the database lacks the extension; run "
				   "CREATE EXTENSION idempotency in it");
	while ((part = strstr(query, "%s")))
	{
		relay_text_add_bytes(text, query, (size_t) (part - query));
		relay_text_add(text, PQgetvalue(schema, 0, 0));
		query = part + 2;
	}
	relay_text_add(text, query);
	made = relay_copy(text->data);
	relay_text_free(text);
	PQclear(schema);
	return made;
}

/*
 * Print a result in columns.  Control characters become blanks, because
 * publishers and endpoints choose parts of it.
 */
static void
print_table(const PGresult *result)
{
	int			widths[MAX_COLUMNS] = {0};
	int			row;
	int			column;

	for (column = 0; column < PQnfields(result); column++)
	{
		widths[column] = width_of(PQfname(result, column));
		for (row = 0; row < PQntuples(result); row++)
		{
			int			width = width_of(PQgetvalue(result, row, column));

			if (width > widths[column])
				widths[column] = width > LONGEST ? LONGEST : width;
		}
	}
	for (row = -1; row < PQntuples(result); row++)
	{
		for (column = 0; column < PQnfields(result); column++)
		{
			char	   *text = relay_copy(row < 0 ? PQfname(result, column) :
										  PQgetvalue(result, row, column));
			bool		is_last = column == PQnfields(result) - 1;
			int			padding = widths[column] - width_of(text);
			const char *c;

			relay_text_sanitize(text, false);
			for (c = text; *c; c++)
			{
				/* Terminals obey U+0080 to U+009F, too. */
				bool		is_c1 = (unsigned char) c[0] == 0xc2 &&
					((unsigned char) c[1] & 0xe0) == 0x80;

				c += is_c1;
				putchar(is_c1 || (unsigned char) *c < ' ' || *c == 0x7f ?
						' ' : *c);
			}
			printf("%*s", is_last ? 0 : padding > 0 ? padding + 2 : 2, "");
			free(text);
		}
		putchar('\n');
	}
}

/*
 * Return the number of characters of a UTF-8 string.
 */
static int
width_of(const char *text)
{
	int			width = 0;

	for (; *text; text ++)
		width += ((unsigned char) *text &0xc0) !=0x80;
	return width;
}
