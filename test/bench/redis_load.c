/*-------------------------------------------------------------------------
 *
 * redis_load.c
 *		A client that asks Redis, or this extension, whether a request is new.
 *
 *	redis_load MODE THREADS SECONDS
 *
 * Each thread has a connection of its own to each server that MODE needs, and
 * handles one request after the other for SECONDS.  Prints "tps = N", as
 * pgbench does.
 *
 *	redis			SET key NX EX, SET key response EX: no business write
 *	redis_insert	the same, with an INSERT in PostgreSQL in between
 *	redis_replay	SET key NX EX, which finds the key, and GET
 *	ours			idem_run(), whose handler does that INSERT
 *	ours_replay		idem_run() of requests that have run
 *
 * PostgreSQL is where libpq's environment variables say, Redis on the socket
 * REDIS.  Any answer that is not the expected one ends the program.
 *
 *-------------------------------------------------------------------------
 */
#include <hiredis/hiredis.h>
#include <libpq-fe.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RESPONSE	"{\"order\": 12345, \"status\": \"created\"}"
#define REPLAYED_KEYS	1000	/* a thread */
#define KEY_LENGTH	64

typedef struct Client
{
	int			number;
	PGconn	   *pg;
	redisContext *redis;
	unsigned long handled;
	pthread_t	thread;
} Client;

static bool uses_redis;
static bool uses_postgres;
static bool replays;
static long started;			/* makes keys differ from those of other runs */
static volatile bool over = false;

static void open_connections(Client *client);
static void *work(void *argument);
static void handle(Client *client, unsigned long n, bool repeated);
static void handle_redis(Client *client, const char *key, bool repeated);
static void handle_ours(Client *client, const char *key, bool repeated);
static void expect_ok(redisReply *reply, const char *command);
static void fail(const char *format,...);

int
main(int argc, char **argv)
{
	const char *mode = argc == 4 ? argv[1] : "";
	int			threads = argc == 4 ? atoi(argv[2]) : 0;
	int			seconds = argc == 4 ? atoi(argv[3]) : 0;
	Client	   *clients;
	struct timespec begin;
	struct timespec end;
	unsigned long handled = 0;

	uses_redis = strncmp(mode, "redis", 5) == 0;
	uses_postgres = strncmp(mode, "ours", 4) == 0 ||
		strcmp(mode, "redis_insert") == 0;
	replays = strstr(mode, "_replay") != NULL;
	if ((!uses_redis && !uses_postgres) || threads < 1 || seconds < 1)
		fail("usage: redis_load redis|redis_insert|redis_replay|ours|ours_replay THREADS SECONDS");

	started = (long) time(NULL) * 100000 + getpid() % 100000;
	clients = calloc(threads, sizeof(Client));
	for (int i = 0; i < threads; i++)
	{
		clients[i].number = i;
		open_connections(&clients[i]);
		for (int n = 0; replays && n < REPLAYED_KEYS; n++)
			handle(&clients[i], n, false);
	}

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (int i = 0; i < threads; i++)
		if (pthread_create(&clients[i].thread, NULL, work, &clients[i]) != 0)
			fail("could not start a thread");
	sleep(seconds);
	over = true;
	for (int i = 0; i < threads; i++)
	{
		pthread_join(clients[i].thread, NULL);
		handled += clients[i].handled;
	}
	clock_gettime(CLOCK_MONOTONIC, &end);

	printf("tps = %.1f\n", handled /
		   ((end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9));
	return 0;
}

/*
 * Connect to the servers that the mode needs, and prepare the statement.
 */
static void
open_connections(Client *client)
{
	if (uses_redis)
	{
		const char *path = getenv("REDIS");

		client->redis = redisConnectUnix(path ? path : "");
		if (client->redis == NULL || client->redis->err != 0)
			fail("could not connect to Redis on \"%s\"", path ? path : "");
	}
	if (uses_postgres)
	{
		PGresult   *result;

		client->pg = PQconnectdb("");
		if (PQstatus(client->pg) != CONNECTION_OK)
			fail("%s", PQerrorMessage(client->pg));
		result = PQprepare(client->pg, "handle", uses_redis ?
						   "INSERT INTO orders (sku) VALUES ($1)" :
						   "SELECT outcome, response_status, response_body"
						   " FROM idem_run('scope-1', $1, 'place_order(jsonb)', '{\"sku\": \"teapot\"}')",
						   0, NULL);
		if (PQresultStatus(result) != PGRES_COMMAND_OK)
			fail("%s", PQerrorMessage(client->pg));
		PQclear(result);
	}
}

static void *
work(void *argument)
{
	Client	   *client = argument;

	for (; !over; client->handled++)
	{
		if (replays)
			handle(client, client->handled % REPLAYED_KEYS, true);
		else
			handle(client, client->handled, false);
	}
	return NULL;
}

/*
 * Handle the n-th request of a client, which has been sent before or not.
 */
static void
handle(Client *client, unsigned long n, bool repeated)
{
	char		key[KEY_LENGTH];

	snprintf(key, sizeof(key), "key-%ld-%d-%012lu", started, client->number, n);
	if (uses_redis)
		handle_redis(client, key, repeated);
	else
		handle_ours(client, key, repeated);
}

static void
handle_redis(Client *client, const char *key, bool repeated)
{
	redisReply *reply = redisCommand(client->redis,
									 "SET %s %s NX EX 86400", key, "in_progress");

	if (repeated)
	{
		if (reply == NULL || reply->type != REDIS_REPLY_NIL)
			fail("SET NX did not find the key");
		freeReplyObject(reply);
		reply = redisCommand(client->redis, "GET %s", key);
		if (reply == NULL || reply->type != REDIS_REPLY_STRING ||
			strcmp(reply->str, RESPONSE) != 0)
			fail("GET did not return the response");
		freeReplyObject(reply);
		return;
	}
	expect_ok(reply, "SET NX");

	if (uses_postgres)
	{
		const char *values[1] = {"teapot"};
		PGresult   *result = PQexecPrepared(client->pg, "handle", 1, values,
											NULL, NULL, 0);

		if (PQresultStatus(result) != PGRES_COMMAND_OK)
			fail("%s", PQerrorMessage(client->pg));
		PQclear(result);
	}
	expect_ok(redisCommand(client->redis, "SET %s %s EX 86400", key, RESPONSE),
			  "SET");
}

static void
handle_ours(Client *client, const char *key, bool repeated)
{
	const char *values[1] = {key};
	PGresult   *result = PQexecPrepared(client->pg, "handle", 1, values,
										NULL, NULL, 0);

	if (PQresultStatus(result) != PGRES_TUPLES_OK)
		fail("%s", PQerrorMessage(client->pg));
	if (strcmp(PQgetvalue(result, 0, 0), repeated ? "replay" : "new") != 0)
		fail("idem_run returned \"%s\"", PQgetvalue(result, 0, 0));
	PQclear(result);
}

static void
expect_ok(redisReply *reply, const char *command)
{
	if (reply == NULL || reply->type != REDIS_REPLY_STATUS ||
		strcmp(reply->str, "OK") != 0)
		fail("%s was not answered with OK", command);
	freeReplyObject(reply);
}

static void
fail(const char *format,...)
{
	va_list		arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(1);
}
