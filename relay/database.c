/*-------------------------------------------------------------------------
 *
 * database.c
 *		A connection to the database that is made again after it is lost.
 *
 * No function waits, except relay_database_check() and
 * relay_database_wait(), which other files call.  A connection runs one
 * query at a time.  Its owner is called with the result, or with NULL if the
 * connection is lost.  If a query fails, the owner closes the connection with
 * relay_database_refused().  The next connection is made after a growing
 * pause.  After a failover it reaches the new primary, and an error such as a
 * missing privilege might be granted by then.
 *
 * After a failover, a connection to the old server can still work.  It is lost
 * as soon as another one has reached the new server, and it is not used while
 * that restarts.  But a new cluster can have an older timeline.  So if each
 * try reaches an older one for some time, that is used, and the other
 * connections are lost.
 *
 * A RelayServer holds what all connections share; relay.c owns it.  A
 * RelayDatabase owns its libpq connection; answers.c and taker.c own one each.
 *
 *-------------------------------------------------------------------------
 */
#include <netdb.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "database.h"
#include "memory.h"
#include "text.h"

#define SHORTEST_BACKOFF	200
#define LONGEST_BACKOFF		15000
#define CONNECT_LIMIT		10000
#define LONGEST_LOCK_PAUSE	3000
#define OUTDATED_LIMIT		60000	/* longer than a restart of a server */

/* The order is that of RelayServer.host_lists. */
static const char *const host_names[] = {"host", "hostaddr", "port"};

/*
 * Settings that the relay depends on.  Some do not exist in all major
 * versions.  The parameters are the lock_timeout, and whether to ask for the
 * timeline, which some services that resemble PostgreSQL do not report.
 */
static const char setup_query[] =
"SELECT (" RELAY_SCHEMA_QUERY "),"
" pg_catalog.pg_backend_pid(),"
" pg_catalog.current_setting('idempotency.outbox_max_attempts', true),"
" (SELECT pg_catalog.string_agg(f, ', ') FROM pg_catalog.unnest("
"'{idem_resume,idem_heartbeat,idem_fail,idem_complete}'::pg_catalog.text[])"
" AS f WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_proc AS p"
" WHERE p.proname OPERATOR(pg_catalog.=) f"
" AND pg_catalog.has_function_privilege(p.oid, 'EXECUTE')"
" AND p.pronamespace::pg_catalog.regnamespace::pg_catalog.text"
" OPERATOR(pg_catalog.=) (" RELAY_SCHEMA_QUERY "))),"
" CASE WHEN $2 AND NOT pg_catalog.pg_is_in_recovery()"
" THEN " RELAY_TIMELINE " END,"
" pg_catalog.set_config(name, value, false)"
" FROM (VALUES ('search_path', 'pg_catalog'),"
" ('statement_timeout', '0'), ('lock_timeout', $1::pg_catalog.text),"
" ('idle_session_timeout', '0'), ('transaction_timeout', '0'),"
/* It ends the calls of a relay that is gone, even if they wait for a lock. */
" (CASE WHEN pg_catalog.version() OPERATOR(pg_catalog.~~) '%linux%'"
" THEN 'client_connection_check_interval' END, '5s'),"
" ('default_transaction_isolation', 'read committed'),"
" ('TimeZone', 'UTC')) AS s (name, value)"
" WHERE EXISTS (SELECT FROM pg_catalog.pg_settings p"
" WHERE p.name OPERATOR(pg_catalog.=) s.name)";

static void read_hosts(RelayServer *server);
static void connect_first(RelayDatabase *database);
static PGconn *begin(char **lists, const char *string, const char *password,
					 const char *seconds);
static int	make_lists(const RelayServer *server, int first, char **lists,
					   char *why, size_t size);
static char *rotate(const char *list, int by);
static int	split_first(char **lists, int address, char *why, size_t size);
static void repeat_first(char **list, int count);
static void log_notice(void *argument, const char *notice);
static void socket_ready(void *argument, int fd, int events);
static void continue_connecting(RelayDatabase *database);
static bool send_setup(const RelayDatabase *database);
static void continue_query(RelayDatabase *database);
static void end_setup(RelayDatabase *database, PGresult *result);
static bool is_outdated(const RelayDatabase *database, int64_t since);
static void watch(RelayDatabase *database, int events);
static void lose(RelayDatabase *database, const char *why);

/*
 * Count a fault if libpq does not accept the connection string.
 */
void
relay_database_configure(RelayConfig *config)
{
	const char *string = relay_section_text(config->main, "database");
	char	   *message = NULL;
	PQconninfoOption *options = PQconninfoParse(string, &message);
	const char *why = message ? message : "out of memory";
	const PQconninfoOption *option;

	/* A part that libpq quotes can belong to a password. */
	if (!options)
		relay_section_fault(config, config->main, "database", "%.*s...",
							(int) strcspn(why, "\n\"'"), why);
	for (option = options; option && option->keyword; option++)
	{
		bool		is_host = strcmp(option->keyword, "host") == 0;
		bool		is_port = strcmp(option->keyword, "port") == 0;

		if (option->val &&
			((is_host && option->val[0] != '@' && strchr(option->val, '@')) ||
			 (is_port && option->val[strspn(option->val, "0123456789,")])))
			relay_section_fault(config, config->main, "database", "\"%s\" is "
								"not valid; in a URI, write an @ of a "
								"password as %%40, and a / as %%2F",
								option->keyword);
	}
	PQfreemem(message);
	PQconninfoFree(options);
}

/*
 * Initialize a zeroed server, whose "loop", "verbose" and "password" are set,
 * with a connection string that lives as long as the server.  Connect once,
 * and wait for the result.  Returns false after logging the reason if no host
 * accepts.
 */
bool
relay_database_check(RelayServer *server, const char *string)
{
	RelayDatabase database = {.server = server,.name = "check",.fd = -1};
	bool		reached;
	int			i;

	server->string = string;
	read_hosts(server);
	for (i = 0; i < server->nhosts * server->naddresses &&
		 database.state != RELAY_DATABASE_IDLE; i++)
	{
		connect_first(&database);
		while (database.state == RELAY_DATABASE_CONNECTING ||
			   database.state == RELAY_DATABASE_SETUP)
		{
			relay_loop_wake_at(server->loop, database.deadline);
			relay_loop_wait(server->loop);
			relay_database_work(&database, relay_now());
		}
	}
	reached = database.state == RELAY_DATABASE_IDLE;
	server->good_try = database.next_host;
	relay_database_close(&database);
	return reached;
}

/*
 * Read the lists of hosts from the connection string, from its service file
 * and from the PG... variables.
 */
static void
read_hosts(RelayServer *server)
{
	static const char *const names[] = {"dbname", NULL};
	const char *values[] = {server->string, NULL};
	PGconn	   *connection = PQconnectStartParams(names, values, 1);
	PQconninfoOption *options = PQconninfo(connection);
	const PQconninfoOption *option;
	const char *c;
	int			i;

	for (option = options; option && option->keyword; option++)
	{
		for (i = 0; i < RELAY_HOST_LISTS; i++)
		{
			if (strcmp(option->keyword, host_names[i]) == 0)
				server->host_lists[i] = relay_copy(option->val);
		}
	}
	PQconninfoFree(options);
	PQfinish(connection);
	server->nhosts = 1;
	server->naddresses = 1;
	c = server->host_lists[0] ? server->host_lists[0] : server->host_lists[1];
	for (; c && *c; c++)
		server->nhosts += *c == ',';
}

/*
 * Release what relay_database_check() allocated.  All connections are closed.
 */
void
relay_database_free(RelayServer *server)
{
	int			i;

	for (i = 0; i < RELAY_HOST_LISTS; i++)
		free(server->host_lists[i]);
	free(server->lacking);
}

/*
 * Connect if it is time to, or close the connection if its deadline has
 * passed.  The owner calls this in every round.
 */
void
relay_database_work(RelayDatabase *database, int64_t now)
{
	if (database->timeline != 0 &&
		database->timeline != database->server->timeline)
		lose(database, "the relay uses a server with another timeline");
	if (database->state == RELAY_DATABASE_OFF)
	{
		if (now >= database->next_try)
			connect_first(database);
		else
			relay_loop_wake_at(database->server->loop, database->next_try);
	}
	else if (database->state != RELAY_DATABASE_IDLE)
	{
		if (now >= database->deadline)
			lose(database, "no answer");
		else
			relay_loop_wake_at(database->server->loop, database->deadline);
	}
}

/*
 * Send a query on an idle connection.  If nothing is received or sent for
 * "limit" milliseconds before its result is complete, the connection is lost.
 * So a large result can take longer on a slow connection.  A NULL pointer
 * among the parameters is an SQL NULL.  The owner can be called before this
 * returns.
 */
void
relay_database_query(RelayDatabase *database, int64_t limit,
					 const char *query, int nparams,
					 const char *const *params)
{
	database->state = RELAY_DATABASE_BUSY;
	database->limit = limit;
	database->first_sign = 0;
	database->deadline = relay_now() + limit;
	relay_loop_wake_at(database->server->loop, database->deadline);
	if (!PQsendQueryParams(database->connection, query, nparams, NULL, params,
						   NULL, NULL, 0))
		lose(database, PQerrorMessage(database->connection));
	else
	{
		continue_query(database);
		/* It is answered already, so no event will begin the next round. */
		if (database->state != RELAY_DATABASE_BUSY)
			relay_loop_wake_at(database->server->loop, relay_now());
	}
}

/*
 * Return whether the result of a query has begun to arrive.
 */
bool
relay_database_is_arriving(const RelayDatabase *database)
{
	return database->state == RELAY_DATABASE_BUSY && database->first_sign != 0;
}

/*
 * Close the connection because the server has refused a query.
 */
void
relay_database_refused(RelayDatabase *database, const PGresult *result)
{
	lose(database, PQresultErrorMessage(result));
}

/*
 * Return whether a query has failed because it waited for a lock for too long.
 */
bool
relay_database_is_locked(const PGresult *result)
{
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);

	return state && strcmp(state, "55P03") == 0;
}

/*
 * Return whether a query has failed because the server cannot write now.
 */
bool
relay_database_is_outage(const PGresult *result)
{
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);

	return state && (strcmp(state, "25006") == 0 ||
					 strncmp(state, "53", 2) == 0 ||
					 strncmp(state, "57", 2) == 0 ||
					 strncmp(state, "58", 2) == 0);
}

/*
 * Return how long to wait before the next call about a locked row, in
 * milliseconds, so that a lease can be extended after the lock.
 */
int64_t
relay_database_lock_pause(int64_t lease)
{
	return lease / 10 < LONGEST_LOCK_PAUSE ? lease / 10 : LONGEST_LOCK_PAUSE;
}

/*
 * Close the connection.  The owner is not called.
 */
void
relay_database_close(RelayDatabase *database)
{
	relay_loop_forget(database->server->loop, database->fd);
	database->fd = -1;
	PQclear(database->result);
	database->result = NULL;
	PQfinish(database->connection);
	database->connection = NULL;
	free(database->schema);
	database->schema = NULL;
	database->pid = 0;
	database->timeline = 0;
	database->state = RELAY_DATABASE_OFF;
}

/*
 * Begin to connect to the database of a connection string.  libpq proceeds to
 * the next host if a host refuses, but not if a host does not respond.  So if
 * "server" is not NULL, the string is its own, and "first" is like "next_host"
 * of a RelayDatabase.  The caller waits, or else "seconds" has no effect.
 */
PGconn *
relay_database_start(const RelayServer *server, int first,
					 const char *string, const char *password,
					 const char *seconds)
{
	char	   *lists[RELAY_HOST_LISTS] = {NULL};
	char		why[512];

	/* libpq reports a failure in its turn. */
	if (server)
		(void) make_lists(server, first, lists, why, sizeof(why));
	return begin(lists, string, password, seconds);
}

/*
 * Begin to connect with these lists of hosts, or with those of the string.
 * Releases the lists.
 */
static PGconn *
begin(char **lists, const char *string, const char *password,
	  const char *seconds)
{
	const char *const names[] = {
		"target_session_attrs", "keepalives_idle", "keepalives_interval",
		"keepalives_count", "tcp_user_timeout", "fallback_application_name",
		"connect_timeout",
		/* The string replaces what is before it, but not what follows. */
		"dbname", "client_encoding", host_names[0], host_names[1],
		host_names[2], password && *password ? "password" : NULL, NULL
	};
	const char *const values[] = {
		"read-write", "10", "5", "3", "20000", "idem-relay", seconds, string,
		"UTF8", lists[0], lists[1], lists[2], password, NULL
	};
	PGconn	   *connection = PQconnectStartParams(names, values, 1);
	int			i;

	for (i = 0; i < RELAY_HOST_LISTS; i++)
		free(lists[i]);
	return connection;
}

/*
 * Wait until a connection that was begun is made.  All notices go to
 * "processor", also those of the login, which PQconnectdbParams() would write
 * to standard error.  If that takes longer than "limit" milliseconds, begin
 * again, with the parameter connect_timeout for each host.  The caller checks
 * the status of the connection.
 */
void
relay_database_wait(PGconn *connection, int64_t limit,
					PQnoticeProcessor processor, void *argument)
{
	PostgresPollingStatusType next = PGRES_POLLING_WRITING;
	int64_t		end = relay_now() + limit;
	int64_t		left = limit;

	if (!connection)
		relay_exit(RELAY_SYSTEM, "out of memory");
	PQsetNoticeProcessor(connection, processor, argument);
	while (PQstatus(connection) != CONNECTION_BAD && left > 0 &&
		   (next == PGRES_POLLING_READING || next == PGRES_POLLING_WRITING))
	{
		struct pollfd socket = {
			PQsocket(connection),
			next == PGRES_POLLING_READING ? POLLIN : POLLOUT, 0
		};

		if (poll(&socket, 1, (int) left) > 0)
			next = PQconnectPoll(connection);
		left = end - relay_now();
	}
	/* A host does not answer.  Only PQreset() proceeds to the next one. */
	if (PQstatus(connection) != CONNECTION_BAD && next != PGRES_POLLING_OK)
		PQreset(connection);
}

/*
 * Begin to connect.  Each try begins with another host, and after a round with
 * another address of it.  libpq would not proceed to the next address if one
 * does not respond.
 */
static void
connect_first(RelayDatabase *database)
{
	RelayServer *server = database->server;
	char	   *lists[RELAY_HOST_LISTS];
	char		why[512];
	int			count;
	int			i;

	database->no_timeline = server->no_timeline;
	if (database->losses == 0)
		database->next_host = server->good_try;
	count = make_lists(server, database->next_host, lists, why, sizeof(why));
	if (server->naddresses < count)
		server->naddresses = count;
	database->state = RELAY_DATABASE_CONNECTING;
	if (count == 0)
	{
		for (i = 0; i < RELAY_HOST_LISTS; i++)
			free(lists[i]);
		lose(database, why);
		return;
	}
	database->connection = begin(lists, server->string, server->password,
								 NULL);
	if (!database->connection)
		relay_exit(RELAY_SYSTEM, "out of memory");
	PQsetNoticeProcessor(database->connection, log_notice, server);
	database->deadline = relay_now() + CONNECT_LIMIT;
	relay_loop_wake_at(server->loop, database->deadline);
	if (PQstatus(database->connection) == CONNECTION_BAD)
		lose(database, PQerrorMessage(database->connection));
	else
		watch(database, RELAY_LOOP_WRITE);
}

/*
 * Make the lists of hosts for a try.  "first" is like "next_host" of a
 * RelayDatabase.  Returns like split_first().
 */
static int
make_lists(const RelayServer *server, int first, char **lists, char *why,
		   size_t size)
{
	int			i;

	for (i = 0; i < RELAY_HOST_LISTS; i++)
		lists[i] = rotate(server->host_lists[i], first % server->nhosts);
	return split_first(lists, first / server->nhosts, why, size);
}

/*
 * Return a copy of a list with commas whose first "by" elements are moved to
 * its end, or NULL if it is NULL.  A list with too few elements is unchanged.
 */
static char *
rotate(const char *list, int by)
{
	const char *from = list;
	char	   *rotated = relay_copy(list);
	int			i;

	for (i = 0; from && i < by; i++)
	{
		from = strchr(from, ',');
		from = from ? from + 1 : NULL;
	}
	if (from && from > list)
		sprintf(rotated, "%s,%.*s", from, (int) (from - list - 1), list);
	return rotated;
}

/*
 * Replace the first host of the lists by its addresses, so that libpq takes
 * them for hosts, and begin with the one of this number.  Returns how many it
 * has, or 0 after writing the reason.
 */
static int
split_first(char **lists, int address, char *why, size_t size)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
	struct addrinfo *found;
	const struct addrinfo *at;
	RelayText  *addresses;
	const char *given = lists[1] && *lists[1] ? lists[1] : NULL;
	const char *c;
	char		number[128];
	char	   *host;
	int			count = 0;
	int			error;
	int			i;

	/* A directory of sockets, libpq's default, or a host with its address. */
	if (!lists[0] || strchr("/@,", lists[0][0]) || (given && *given != ','))
		return 1;
	host = relay_copy(lists[0]);
	host[strcspn(host, ",")] = '\0';
	error = getaddrinfo(host, NULL, &hints, &found);
	if (error)
		snprintf(why, size, "could not translate host name \"%s\" to "
				 "address: %s", host, gai_strerror(error));
	free(host);
	if (error)
		return 0;
	for (at = found; at; at = at->ai_next)
		count++;
	addresses = relay_text_new();
	for (i = 0, at = found; i < address % count; i++)
		at = at->ai_next;
	for (i = 0; i < count; i++)
	{
		(void) getnameinfo(at->ai_addr, at->ai_addrlen, number, sizeof(number),
						   NULL, 0, NI_NUMERICHOST);
		relay_text_addf(addresses, i > 0 ? ",%s" : "%s", number);
		at = at->ai_next ? at->ai_next : found;
	}
	freeaddrinfo(found);
	/* The other hosts have as many commas, and perhaps addresses. */
	for (c = given ? given : lists[0]; *c; c++)
	{
		if (given || *c == ',')
			relay_text_add_char(addresses, *c);
	}
	free(lists[1]);
	lists[1] = relay_copy(addresses->data);
	relay_text_free(addresses);
	repeat_first(&lists[0], count);
	/* One port is that of all hosts. */
	if (lists[2] && strchr(lists[2], ','))
		repeat_first(&lists[2], count);
	return count;
}

/*
 * Repeat the first element of a list with commas, so that it is there "count"
 * times.
 */
static void
repeat_first(char **list, int count)
{
	RelayText  *repeated = relay_text_new();

	while (count-- > 1)
		relay_text_addf(repeated, "%.*s,", (int) strcspn(*list, ","), *list);
	relay_text_add(repeated, *list);
	free(*list);
	*list = relay_copy(repeated->data);
	relay_text_free(repeated);
}

/*
 * Log a notice, if the relay is verbose.  libpq calls this.
 */
static void
log_notice(void *argument, const char *notice)
{
	const RelayServer *server = argument;

	if (server->verbose)
		relay_log(RELAY_DEBUG, "%.*s", (int) strcspn(notice, "\n"), notice);
}

/*
 * Proceed with what the connection does.  The event loop calls this.
 */
static void
socket_ready(void *argument, int fd, int events)
{
	RelayDatabase *database = argument;

	if (database->state == RELAY_DATABASE_CONNECTING)
		continue_connecting(database);
	else if (database->state != RELAY_DATABASE_OFF)
	{
		int64_t		now = relay_now();

		if (database->state == RELAY_DATABASE_BUSY)
			database->deadline = now + database->limit;
		if (!database->first_sign)
			database->first_sign = now;
		continue_query(database);
	}
}

/*
 * Proceed with connecting, and send the setup query once connected.
 */
static void
continue_connecting(RelayDatabase *database)
{
	PGconn	   *connection = database->connection;
	PostgresPollingStatusType status = PQconnectPoll(connection);

	if (status == PGRES_POLLING_READING)
		watch(database, RELAY_LOOP_READ);
	else if (status == PGRES_POLLING_WRITING)
		watch(database, RELAY_LOOP_WRITE);
	else if (status != PGRES_POLLING_OK ||
			 PQsetnonblocking(connection, 1) < 0 || !send_setup(database))
		lose(database, PQerrorMessage(connection));
	else
	{
		database->state = RELAY_DATABASE_SETUP;
		continue_query(database);
	}
}

/*
 * Send the setup query.  Returns false if that fails.
 */
static bool
send_setup(const RelayDatabase *database)
{
	const char *params[] = {
		database->lock_timeout ? database->lock_timeout : "0",
		database->no_timeline ? "f" : "t"
	};

	return PQsendQueryParams(database->connection, setup_query, 2, NULL,
							 params, NULL, NULL, 0) != 0;
}

/*
 * Send and receive what the socket allows.  If a query has ended, process its
 * result.
 */
static void
continue_query(RelayDatabase *database)
{
	PGconn	   *connection = database->connection;
	int			unsent = PQflush(connection);
	PGresult   *result;

	if (unsent < 0 || !PQconsumeInput(connection))
	{
		lose(database, PQerrorMessage(connection));
		return;
	}
	watch(database, unsent ? RELAY_LOOP_READ | RELAY_LOOP_WRITE :
		  RELAY_LOOP_READ);
	if (database->state == RELAY_DATABASE_IDLE)
	{
		/* An idle server sends only a notice, or its end. */
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
		else if (database->state == RELAY_DATABASE_SETUP)
			end_setup(database, result);
		else
		{
			database->state = RELAY_DATABASE_IDLE;
			database->answered(database->owner, result);
		}
		return;
	}
}

/*
 * Read and clear the result of the setup query.
 */
static void
end_setup(RelayDatabase *database, PGresult *result)
{
	RelayServer *server = database->server;
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	int64_t		since = server->outdated_since ? server->outdated_since :
		relay_now();

	if (state && !database->no_timeline && !server->has_timeline &&
		(strncmp(state, "0A", 2) == 0 || strncmp(state, "42", 2) == 0))
	{
		/* Not supported, or not allowed; or the next one fails, too. */
		database->no_timeline = true;
		if (!send_setup(database))
			lose(database, PQerrorMessage(database->connection));
	}
	else if (PQresultStatus(result) != PGRES_TUPLES_OK)
		lose(database, PQresultErrorMessage(result));
	else if (PQgetisnull(result, 0, 0))
		lose(database, "the database lacks the extension; run "
			 "CREATE EXTENSION idempotency in it");
	else
	{
		const char *encoding = PQparameterStatus(database->connection,
												 "server_encoding");

		database->schema = relay_copy(PQgetvalue(result, 0, 0));
		database->pid = (int) strtol(PQgetvalue(result, 0, 1), NULL, 10);
		database->is_utf8 = strcmp(encoding, "UTF8") == 0;
		/* NULL if the library is not loaded, which then has its default. */
		server->max_attempts = PQgetisnull(result, 0, 2) ? 10 :
			(int) strtol(PQgetvalue(result, 0, 2), NULL, 10);
		free(server->lacking);
		server->lacking = PQgetisnull(result, 0, 3) ? NULL :
			relay_copy(PQgetvalue(result, 0, 3));
		database->timeline = (unsigned) strtoul(PQgetvalue(result, 0, 4), NULL,
												16);
		if (database->no_timeline && !server->no_timeline)
			relay_log(RELAY_WARNING, "the server does not report its "
					  "timeline; a failover that loses transactions can lose "
					  "later messages");
		/* For all connections, because messages of others are not answered. */
		server->no_timeline = database->no_timeline;
		server->has_timeline |= database->timeline != 0;
		/* In this state, the next try begins with another host. */
		if (is_outdated(database, since))
		{
			lose(database, "another server has a newer timeline");
			server->outdated_since = since;
		}
		else
		{
			if (database->timeline != 0)
				relay_database_use(server, database->timeline);
			database->state = RELAY_DATABASE_IDLE;
			if (database->losses > 0 && database->backoff > 0)
				relay_log(RELAY_INFO, "connected to the database again (%s)",
						  database->name);
		}
	}
	PQclear(result);
}

/*
 * Return whether a connection has reached a server with a newer timeline,
 * unless each try "since" this time has reached an older one, for a while.
 */
static bool
is_outdated(const RelayDatabase *database, int64_t since)
{
	return database->timeline != 0 &&
		database->timeline < database->server->timeline &&
		relay_now() - since < OUTDATED_LIMIT;
}

/*
 * Use a server with this timeline, which is not 0.  The connections to others
 * are lost.
 */
void
relay_database_use(RelayServer *server, unsigned timeline)
{
	server->timeline = timeline;
	server->outdated_since = 0;
}

/*
 * Watch the connection's socket, which libpq can replace while it connects.
 */
static void
watch(RelayDatabase *database, int events)
{
	RelayLoop  *loop = database->server->loop;
	int			fd = PQsocket(database->connection);

	if (database->fd != fd)
		relay_loop_forget(loop, database->fd);
	database->fd = fd;
	if (fd >= 0)
		relay_loop_watch(loop, fd, events, socket_ready, database);
}

/*
 * Close the connection because of an error, log it, and schedule the next
 * try.  If a query of the owner was running, call the owner.
 */
static void
lose(RelayDatabase *database, const char *why)
{
	bool		busy = database->state == RELAY_DATABASE_BUSY;

	if (database->state == RELAY_DATABASE_CONNECTING ||
		database->state == RELAY_DATABASE_SETUP)
	{
		/* The server that it did not reach can be the newest. */
		database->server->outdated_since = 0;
		database->next_host++;
	}
	if (!*why)
		why = "connection lost";
	database->losses++;
	database->next_try = relay_now() +
		relay_back_off(&database->backoff, SHORTEST_BACKOFF, LONGEST_BACKOFF);
	relay_loop_wake_at(database->server->loop, database->next_try);
	relay_log(RELAY_WARNING, "database (%s): %.*s; next try in %.1f s",
			  database->name, (int) strcspn(why, "\n"), why,
			  (double) (database->next_try - relay_now()) / 1000);
	relay_database_close(database);
	if (busy)
		database->answered(database->owner, NULL);
}
