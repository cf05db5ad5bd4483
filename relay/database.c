/*-------------------------------------------------------------------------
 *
 * database.c
 *		A connection to the database that comes back when it is lost.
 *
 * Nothing here waits.  One query at a time; who has sent it is called with its
 * answer, or with none where the connection is lost or the server refuses.
 * The connection is given up in both cases, and made anew after a pause that
 * gets longer: after a failover the next one leads to the new primary, and one
 * that lacks a right today may have it tomorrow.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "database.h"
#include "loop.h"
#include "relay.h"

#define SHORTEST_BACKOFF	200
#define LONGEST_BACKOFF		15000
#define CONNECT_LIMIT		10000
#define NHOSTS				3
#define FIRST_HOST_VALUE	8	/* of what libpq is told */

/* What libpq is told. */
static const char *database_string = "";

/* Lists of one length, or of a single element. */
static const char *const host_names[NHOSTS] = {"host", "hostaddr", "port"};
static char *host_lists[NHOSTS];
static int	nhosts;

/* With which one to begin, as the relay starts. */
static int	good_host = 0;

static void read_hosts(void);
static char *turn(const char *list, int by);
static void noticed(void *argument, const char *notice);
static void start(Database *database, int64_t now);
static void ready(void *argument, int fd, int events);
static void go_on_connecting(Database *database);
static void go_on_with_query(Database *database);
static void end_setup(Database *database, PGresult *result);
static void watch(Database *database, int events);
static void lose(Database *database, const char *why);

/*
 * Tell a fault of the connection string.
 */
void
database_configure(Config *config)
{
	const char *string = section_text(config->main, "database");
	char	   *why = NULL;
	PQconninfoOption *options = PQconninfoParse(string, &why);

	if (!options)
		config_fault(config, section_where(config->main, "database"), "%.*s",
					 (int) strcspn(why ? why : "out of memory", "\n"),
					 why ? why : "out of memory");
	PQfreemem(why);
	PQconninfoFree(options);
}

/*
 * Connect with that string, as the relay starts, and wait for it.  False: not
 * possible, which has been told.
 */
bool
database_check(const char *string)
{
	Database	database = {.name = "check",.fd = -1};
	bool		reached;
	int			i;

	database_string = string;
	read_hosts();
	for (i = 0; i < nhosts && database.state != DATABASE_IDLE; i++)
	{
		start(&database, relay_now());
		while (database.state == DATABASE_CONNECTING ||
			   database.state == DATABASE_SETUP)
		{
			loop_wake_at(database.deadline);
			loop_wait();
			database_work(&database, relay_now());
		}
	}
	reached = database.state == DATABASE_IDLE;
	good_host = database.first_host;
	database_close(&database);
	return reached;
}

void
database_end(void)
{
	int			i;

	for (i = 0; i < NHOSTS; i++)
	{
		free(host_lists[i]);
		host_lists[i] = NULL;
	}
}

/*
 * Called in each round: connect, or give up what takes too long.
 */
void
database_work(Database *database, int64_t now)
{
	if (database->state == DATABASE_OFF)
	{
		if (now >= database->next_try)
			start(database, now);
		else
			loop_wake_at(database->next_try);
	}
	else if (database->state != DATABASE_IDLE)
	{
		if (now >= database->deadline)
			lose(database, "no answer");
		else
			loop_wake_at(database->deadline);
	}
}

/*
 * Send a query, on an idle connection.  Its answer has to come within so many
 * milliseconds.  A NULL among the parameters is a NULL.
 */
void
database_query(Database *database, int64_t limit, const char *query,
			   int nparams, const char *const *params)
{
	database->state = DATABASE_BUSY;
	database->deadline = relay_now() + limit;
	loop_wake_at(database->deadline);
	if (!PQsendQueryParams(database->connection, query, nparams, NULL, params,
						   NULL, NULL, 0))
		lose(database, PQerrorMessage(database->connection));
	else
		ready(database, -1, 0);
}

/*
 * The server has refused a query.  Give the connection up.
 */
void
database_refused(Database *database, const PGresult *result)
{
	lose(database, PQresultErrorMessage(result));
}

/*
 * Let go of the connection.
 */
void
database_close(Database *database)
{
	if (database->fd >= 0)
		loop_forget(database->fd);
	database->fd = -1;
	PQclear(database->result);
	database->result = NULL;
	PQfinish(database->connection);
	database->connection = NULL;
	free(database->schema);
	database->schema = NULL;
	database->pid = 0;
	database->state = DATABASE_OFF;
}

/*
 * The hosts that the string leads to, with a service file and PG... variables.
 */
static void
read_hosts(void)
{
	static const char *const names[] = {"dbname", NULL};
	const char *values[] = {database_string, NULL};
	PGconn	   *connection = PQconnectStartParams(names, values, 1);
	PQconninfoOption *options = PQconninfo(connection);
	const PQconninfoOption *option;
	const char *c;
	int			i;

	nhosts = 1;
	for (option = options; option && option->keyword; option++)
	{
		for (i = 0; i < NHOSTS; i++)
		{
			if (strcmp(option->keyword, host_names[i]) == 0)
				host_lists[i] = relay_copy(option->val);
		}
	}
	PQconninfoFree(options);
	PQfinish(connection);
	for (c = host_lists[0] ? host_lists[0] : host_lists[1]; c && *c; c++)
		nhosts += *c == ',';
}

/*
 * A list with commas, beginning with another element; NULL of NULL.
 */
static char *
turn(const char *list, int by)
{
	const char *from = list;
	char	   *turned = relay_copy(list);
	int			i;

	for (i = 0; from && i < by; i++)
	{
		from = strchr(from, ',');
		from = from ? from + 1 : NULL;
	}
	if (from && from > list)
		sprintf(turned, "%s,%.*s", from, (int) (from - list - 1), list);
	return turned;
}

static void
noticed(void *argument, const char *notice)
{
	relay_log(RELAY_DEBUG, "%.*s", (int) strcspn(notice, "\n"), notice);
}

/*
 * What comes first is a default, what comes last holds.  libpq goes from a
 * host to the next one where it is refused, but not where nothing answers, so
 * each try begins with another one.
 */
static void
start(Database *database, int64_t now)
{
	const char *const names[] = {
		"target_session_attrs", "keepalives_idle", "keepalives_interval",
		"keepalives_count", "tcp_user_timeout", "fallback_application_name",
		"dbname", "client_encoding", host_names[0], host_names[1],
		host_names[2], NULL
	};
	char	   *turned[NHOSTS];
	const char *values[] = {
		"read-write", "10", "5", "3", "20000", "idem-relay", database_string,
		"UTF8", NULL, NULL, NULL, NULL
	};
	int			i;

	if (database->losses == 0)
		database->first_host = good_host;
	for (i = 0; i < NHOSTS; i++)
	{
		turned[i] = turn(host_lists[i], database->first_host);
		values[FIRST_HOST_VALUE + i] = turned[i];
	}
	database->connection = PQconnectStartParams(names, values, 1);
	for (i = 0; i < NHOSTS; i++)
		free(turned[i]);
	if (!database->connection)
		relay_exit(RELAY_SYSTEM, "out of memory");
	PQsetNoticeProcessor(database->connection, noticed, NULL);
	database->state = DATABASE_CONNECTING;
	database->deadline = now + CONNECT_LIMIT;
	loop_wake_at(database->deadline);
	if (PQstatus(database->connection) == CONNECTION_BAD)
		lose(database, PQerrorMessage(database->connection));
	else
		watch(database, LOOP_WRITE);
}

/*
 * There is something to be done on the connection.
 */
static void
ready(void *argument, int fd, int events)
{
	Database   *database = argument;

	if (database->state == DATABASE_CONNECTING)
		go_on_connecting(database);
	else if (database->state != DATABASE_OFF)
		go_on_with_query(database);
}

static void
go_on_connecting(Database *database)
{
	static const char setup[] =
		"SELECT (SELECT pg_catalog.quote_ident(n.nspname)"
		" FROM pg_catalog.pg_extension e"
		" JOIN pg_catalog.pg_namespace n"
		" ON n.oid OPERATOR(pg_catalog.=) e.extnamespace"
		" WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'),"
		" pg_catalog.pg_backend_pid(),"
		" pg_catalog.set_config(name, value, false)"
		" FROM (VALUES ('search_path', 'pg_catalog'),"
		" ('statement_timeout', '0'), ('lock_timeout', '0'),"
		" ('idle_session_timeout', '0'), ('transaction_timeout', '0'),"
		" ('default_transaction_isolation', 'read committed'),"
		" ('TimeZone', 'UTC')) AS s (name, value)"
	/* Not every server has all of them. */
		" WHERE EXISTS (SELECT FROM pg_catalog.pg_settings p"
		" WHERE p.name OPERATOR(pg_catalog.=) s.name)";

	switch (PQconnectPoll(database->connection))
	{
		case PGRES_POLLING_READING:
			watch(database, LOOP_READ);
			return;
		case PGRES_POLLING_WRITING:
			watch(database, LOOP_WRITE);
			return;
		case PGRES_POLLING_OK:
			break;
		default:
			lose(database, PQerrorMessage(database->connection));
			return;
	}
	if (PQsetnonblocking(database->connection, 1) < 0 ||
		!PQsendQuery(database->connection, setup))
	{
		lose(database, PQerrorMessage(database->connection));
		return;
	}
	database->state = DATABASE_SETUP;
	go_on_with_query(database);
}

/*
 * Send what is to be sent, read what has come.
 */
static void
go_on_with_query(Database *database)
{
	PGconn	   *connection = database->connection;
	int			unsent = PQflush(connection);
	PGresult   *result;

	if (unsent < 0 || !PQconsumeInput(connection))
	{
		lose(database, PQerrorMessage(connection));
		return;
	}
	watch(database, unsent ? LOOP_READ | LOOP_WRITE : LOOP_READ);
	if (database->state == DATABASE_IDLE)
	{
		/* What comes then is an end, or a notice. */
		if (PQstatus(connection) != CONNECTION_OK)
			lose(database, PQerrorMessage(connection));
		return;
	}
	while (!PQisBusy(connection))
	{
		result = PQgetResult(connection);
		if (result)
		{
			PQclear(database->result);
			database->result = result;
			continue;
		}
		result = database->result;
		database->result = NULL;
		if (PQstatus(connection) != CONNECTION_OK || !result)
		{
			PQclear(result);
			lose(database, PQerrorMessage(connection));
		}
		else if (database->state == DATABASE_SETUP)
			end_setup(database, result);
		else
		{
			database->state = DATABASE_IDLE;
			database->answered(database, result);
		}
		return;
	}
}

static void
end_setup(Database *database, PGresult *result)
{
	if (PQresultStatus(result) != PGRES_TUPLES_OK)
		lose(database, PQresultErrorMessage(result));
	else if (PQgetisnull(result, 0, 0))
		lose(database, "the database lacks the extension; run "
			 "CREATE EXTENSION idempotency in it");
	else
	{
		database->schema = relay_copy(PQgetvalue(result, 0, 0));
		database->pid = (int) strtol(PQgetvalue(result, 0, 1), NULL, 10);
		database->is_utf8 = strcmp(PQparameterStatus(database->connection,
													 "server_encoding"),
								   "UTF8") == 0;
		database->state = DATABASE_IDLE;
		if (database->losses > 0 && database->backoff > 0)
			relay_log(RELAY_INFO, "connected to the database again (%s)",
					  database->name);
	}
	PQclear(result);
}

/*
 * libpq may change its socket while it connects.
 */
static void
watch(Database *database, int events)
{
	int			fd = PQsocket(database->connection);

	if (database->fd >= 0 && database->fd != fd)
		loop_forget(database->fd);
	database->fd = fd;
	if (fd >= 0)
		loop_watch(fd, events, ready, database);
}

/*
 * The connection is of no use any more.
 */
static void
lose(Database *database, const char *why)
{
	bool		busy = database->state == DATABASE_BUSY;

	if (database->state == DATABASE_CONNECTING ||
		database->state == DATABASE_SETUP)
		database->first_host = (database->first_host + 1) % nhosts;
	if (!*why)
		why = "connection lost";
	database->losses++;
	database->backoff = database->backoff ? database->backoff * 2 :
		SHORTEST_BACKOFF;
	if (database->backoff > LONGEST_BACKOFF)
		database->backoff = LONGEST_BACKOFF;
	database->next_try = relay_now() + relay_jitter(database->backoff);
	loop_wake_at(database->next_try);
	relay_log(RELAY_WARNING, "database (%s): %.*s; next try in %.1f s",
			  database->name, (int) strcspn(why, "\n"), why,
			  (double) (database->next_try - relay_now()) / 1000);
	database_close(database);
	if (busy)
		database->answered(database, NULL);
}
