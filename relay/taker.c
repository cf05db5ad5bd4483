/*-------------------------------------------------------------------------
 *
 * taker.c
 *		Taking messages from the outbox.
 *
 * One connection that sleeps in idem_outbox_take() until there is something to
 * take.  It takes no more than the relay may hold, nothing while the other
 * connection could not bring the answers, and nothing for sinks that are held
 * up.  So that those are asked for again soon, it sleeps for a second only
 * while there is one.
 *
 * A lease is counted from before the call, by the clock of this machine, so it
 * is over here before it is there.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answers.h"
#include "database.h"
#include "loop.h"
#include "queue.h"
#include "sinks.h"
#include "taker.h"
#include "text.h"

#define ANSWER_LIMIT	30000
#define SHORT_WAIT		1000
#define CANCEL_AGAIN	200

uint64_t	taker_taken = 0;

static void answered(Database *database, PGresult *result);

static Database database = {.name = "take",.answered = answered,.fd = -1};

static int64_t lease;
static int64_t wait;
static int	batch;
static int	max_messages;
static size_t max_memory;

static int64_t taken_at;		/* from when on leases count */
static size_t usual_size = 1024;	/* of a message, as they have been */
static bool stopping = false;
static int64_t next_cancel = 0;

static int	room(void);
static void take(int want, const char *topics, int64_t now);
static void add_message(const PGresult *result, int row);

/*
 * Begin, with the settings above all sections.
 */
void
taker_begin(const Section *settings)
{
	lease = section_number(settings, "lease");
	wait = section_number(settings, "wait");
	batch = (int) section_number(settings, "batch");
	max_messages = (int) section_number(settings, "max_messages");
	max_memory = (size_t) section_number(settings, "max_memory");
}

void
taker_end(void)
{
	database_close(&database);
}

uint64_t
taker_connections_lost(void)
{
	return database.losses;
}

/*
 * Called in each round: take, if there is nothing against it.
 */
void
taker_work(int64_t now)
{
	int			want;
	char	   *topics;

	if (stopping && database.state != DATABASE_BUSY)
		return;
	database_work(&database, now);
	if (database.state != DATABASE_IDLE || !answers_connected())
		return;
	want = room();
	if (want == 0)
		return;
	topics = sinks_topics();
	if (topics)
		take(want, topics, now);
	free(topics);
}

/*
 * Take nothing from now on.  True: nothing is on its way any more.
 */
bool
taker_stop(int64_t now)
{
	stopping = true;
	if (database.state != DATABASE_BUSY)
		return true;
	/* A cancel that comes before the server begins with the call is lost. */
	if (now >= next_cancel)
	{
		answers_cancel(database.pid);
		next_cancel = now + CANCEL_AGAIN;
	}
	loop_wake_at(next_cancel);
	return false;
}

/*
 * How many messages to take; 0 where there is room for a few only.
 */
static int
room(void)
{
	int			most = batch < max_messages ? batch : max_messages;
	int			left = max_messages - queue_count();
	size_t		memory;

	if (queue_count() == 0)
		memory = max_memory;
	else if (queue_size() >= max_memory)
		return 0;
	else
		memory = max_memory - queue_size();
	if (left < (most + 1) / 2)
		return 0;
	if (left > most)
		left = most;
	if (memory / usual_size < (size_t) left)
	{
		left = (int) (memory / usual_size);
		if (left == 0 && queue_count() == 0)
			left = 1;
	}
	return left;
}

static void
take(int want, const char *topics, int64_t now)
{
	char		count[16];
	char		lease_text[32];
	char		wait_text[32];
	int64_t		ms = sinks_held() && wait > SHORT_WAIT ? SHORT_WAIT : wait;
	const char *params[] = {count, lease_text, *topics ? topics : NULL,
	wait_text};
	Text	   *query = text_new();

	text_addf(query,
			  "SELECT id, message_id, topic, message_key, payload, "
			  "headers, attempt, pg_catalog.to_char(created_at, "
			  "'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') "
			  "FROM %s.idem_outbox_take($1::int, $2::interval, "
			  "$3::text[], $4::interval)", database.schema);
	snprintf(count, sizeof(count), "%d", want);
	snprintf(lease_text, sizeof(lease_text), "%lld ms", (long long) lease);
	snprintf(wait_text, sizeof(wait_text), "%lld ms", (long long) ms);
	taken_at = now;
	database_query(&database, ms + ANSWER_LIMIT, query->data, 4, params);
	text_free(query);
}

/*
 * The take has ended.
 */
static void
answered(Database *from, PGresult *result)
{
	int			row;

	if (!result)
		return;
	if (PQresultStatus(result) != PGRES_TUPLES_OK)
	{
		if (!stopping)
			database_refused(from, result);
	}
	else
	{
		from->backoff = 0;
		taker_taken += (uint64_t) PQntuples(result);
		for (row = 0; row < PQntuples(result); row++)
			add_message(result, row);
	}
	PQclear(result);
}

/*
 * Copy a row into a message, and add it to the queue.
 */
static void
add_message(const PGresult *result, int row)
{
	Message    *message;
	size_t		size = sizeof(Message);
	char	   *end;
	const char *texts[8];
	int			i;

	for (i = 0; i < 8; i++)
		size += (size_t) PQgetlength(result, row, i) + 1;
	message = relay_alloc(size);
	end = (char *) (message + 1);
	for (i = 0; i < 8; i++)
	{
		size_t		length = (size_t) PQgetlength(result, row, i);

		texts[i] = NULL;
		if (PQgetisnull(result, row, i))
			continue;
		memcpy(end, PQgetvalue(result, row, i), length + 1);
		texts[i] = end;
		end += length + 1;
	}
	message->id = strtoll(texts[0], NULL, 10);
	message->message_id = texts[1];
	message->topic = texts[2];
	message->key = texts[3];
	message->payload = texts[4];
	message->payload_length = (size_t) PQgetlength(result, row, 4);
	message->headers = texts[5];
	message->attempt = (int) strtol(texts[6], NULL, 10);
	message->created_at = texts[7];
	message->size = size;
	message->lease_end = taken_at + lease;
	message->sink = sinks_for(message->topic);
	usual_size = (usual_size * 7 + size) / 8;
	if (size > usual_size)
		usual_size = size;
	if (!message->sink)
	{
		relay_log(RELAY_ERROR, "topic \"%s\" has no sink", message->topic);
		free(message);
		return;
	}
	queue_add(message);
}
