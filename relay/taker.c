/*-------------------------------------------------------------------------
 *
 * taker.c
 *		Take messages from the outbox.
 *
 * One connection sleeps in idem_outbox_take() until there are messages.  It
 * takes no more than the relay is allowed to hold, no topics of sinks that are
 * held or full, and nothing while the other connection cannot send answers.
 * While a sink is held, it sleeps for at most one second, so that it soon
 * takes that sink's topics again.  While a sink is full, the sleeps begin at a
 * few milliseconds, because a fast sink has delivered its messages by then.
 * If a section has the topic "*", the relay asks the server for the topics
 * before each take while a sink is held or full.
 *
 * If a take loses its connection, the next one asks for half as many messages.
 * Otherwise a result that is too large for a slow connection would be asked
 * for again and again.  The same happens if a result arrives slowly, because
 * the messages of other topics wait meanwhile, and if the queue releases most
 * messages of a take, because they are behind retries.  Otherwise takes would
 * be full of such messages, and the others would wait for many takes.
 *
 * The relay measures a lease with the clock of this machine, from before the
 * call.  So a lease expires here before it expires on the server.
 *
 * Leases can expire in an outage, or before a result has arrived on a slow
 * connection.  The next take then waits until they are extended, or answered,
 * because it would take these messages again.  After a slow result, it also
 * asks for longer leases, because other relays would.
 *
 * A RelayTaker owns its connection.  relay.c owns it and calls it in every
 * round.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "memory.h"
#include "taker.h"
#include "text.h"

/* All in milliseconds. */
#define ANSWER_LIMIT	30000	/* for the result, after the sleep */
#define SHORT_WAIT		1000	/* the sleep while a sink is held */
#define FIRST_NAP		5		/* the first one while a sink is full */
#define ARRIVAL_TIME	3600000 /* how long a slow arrival is remembered */
#define CANCEL_AGAIN	200
#define LIST_AGAIN		500		/* while no topic can be taken */

#define MOST_LEASES		10		/* that an arrival counts, at most */
#define SLOW_SHARE		10		/* a result that takes 1/10 of it is slow */
#define NCOLUMNS		11		/* of the query in take() */

static void list_topics(RelayTaker *taker);
static void end_list(RelayTaker *taker, const PGresult *result);
static int	free_places(const RelayTaker *taker);
static void take(RelayTaker *taker, int count, const char *topics,
				 int64_t now);
static void answered(void *owner, PGresult *result);
static void adjust_limit(RelayTaker *taker, bool lower);
static bool note_arrival(RelayTaker *taker, int64_t now);
static void add_message(RelayTaker *taker, const PGresult *result, int row);

/*
 * Initialize a zeroed taker, with the settings before all sections.
 */
void
relay_taker_begin(RelayTaker *taker, RelayServer *server, RelayQueue *queue,
				  const RelayRouting *routing, RelayAnswers *answers,
				  const RelaySection *settings)
{
	taker->database.server = server;
	taker->database.name = "take";
	taker->database.fd = -1;
	taker->database.answered = answered;
	taker->database.owner = taker;
	taker->queue = queue;
	taker->routing = routing;
	taker->answers = answers;
	taker->lease = relay_section_number(settings, "lease");
	taker->wait = relay_section_number(settings, "wait");
	taker->batch = (int) relay_section_number(settings, "batch");
	queue->max_count = (int) relay_section_number(settings, "max_messages");
	queue->max_size = (size_t) relay_section_number(settings, "max_memory");
	taker->usual_size = 1024;
	taker->limit = taker->batch;
	taker->began = relay_now();
}

/*
 * Begin a take, if the connection is idle and the relay can hold more
 * messages.  Called in every round.
 */
void
relay_taker_work(RelayTaker *taker, int64_t now)
{
	int			count;
	char	   *topics = NULL;

	if (taker->stopping && taker->database.state != RELAY_DATABASE_BUSY)
		return;
	relay_database_work(&taker->database, now);
	if (taker->database.state != RELAY_DATABASE_IDLE ||
		!relay_answers_connected(taker->answers))
		return;
	if (relay_queue_has_expired(taker->queue, now))
		return;
	count = free_places(taker);
	if (count == 0)
		return;
	if (!taker->routing->topics && relay_routing_held(taker->routing))
	{
		topics = taker->listed;
		taker->listed = NULL;
		if (!topics && now >= taker->next_list)
			list_topics(taker);
		else if (!topics)
			relay_loop_wake_at(taker->database.server->loop, taker->next_list);
	}
	else
		topics = relay_routing_topics(taker->routing);
	if (topics)
		take(taker, count, topics, now);
	free(topics);
}

/*
 * Ask the server which topics have messages.  The connection is idle.
 */
static void
list_topics(RelayTaker *taker)
{
	RelayText  *query = relay_text_new();

	taker->listing = true;
	relay_text_addf(query,
					"SELECT topic FROM %s.idem_outbox_topics() AS topic",
					taker->database.schema);
	relay_database_query(&taker->database, ANSWER_LIMIT, query->data, 0, NULL);
	relay_text_free(query);
}

/*
 * Keep the topics whose sinks can take messages for the next take.  If there
 * are none, ask again after a while.
 */
static void
end_list(RelayTaker *taker, const PGresult *result)
{
	RelayText  *array = relay_text_new();
	int			row;

	for (row = 0; row < PQntuples(result); row++)
	{
		const char *topic = PQgetvalue(result, row, 0);

		if (relay_routing_takes(taker->routing, topic))
			relay_text_add_element(array, topic);
	}
	free(taker->listed);
	taker->listed = NULL;
	if (array->len)
	{
		relay_text_add_char(array, '}');
		taker->listed = relay_copy(array->data);
	}
	else
		taker->next_list = relay_now() + LIST_AGAIN;
	relay_text_free(array);
}

/*
 * Release what the taker owns beside its connection.
 */
void
relay_taker_end(RelayTaker *taker)
{
	free(taker->listed);
	taker->listed = NULL;
}

/*
 * Begin no more takes, and cancel one that is running.  Returns true when none
 * is running; until then, the caller calls it in every round.
 */
bool
relay_taker_stop(RelayTaker *taker, int64_t now)
{
	taker->stopping = true;
	if (taker->database.state != RELAY_DATABASE_BUSY)
		return true;
	/* A cancel has no effect if it arrives before the server begins. */
	if (now >= taker->next_cancel)
	{
		relay_answers_cancel(taker->answers, taker->database.pid);
		taker->next_cancel = now + CANCEL_AGAIN;
	}
	relay_loop_wake_at(taker->database.server->loop, taker->next_cancel);
	return false;
}

/*
 * Return how many messages to take, or 0 if the relay holds enough.  A single
 * sink gets nothing if less than half a batch would fit.  If there are several
 * sinks, a take fills at most half of what is free, so that the messages of
 * one sink never occupy all of it; but one message is always allowed, because
 * the topics are only those of sinks that are not full.
 */
static int
free_places(const RelayTaker *taker)
{
	const RelayQueue *queue = taker->queue;
	bool		shared = taker->routing->shared;
	int			most = taker->limit < queue->max_count ? taker->limit :
		queue->max_count;
	int			left = queue->max_count - queue->count;
	size_t		memory = queue->size < queue->max_size ?
		queue->max_size - queue->size : 0;

	if (!shared && (memory == 0 || left < (most + 1) / 2))
		return 0;
	if (shared)
	{
		left = left > 1 ? left / 2 : 1;
		memory /= 2;
	}
	if (left > most)
		left = most;
	if (memory / taker->usual_size < (size_t) left)
	{
		left = (int) (memory / taker->usual_size);
		/* A single message can be larger than the limit. */
		if (left == 0 && (shared || queue->count == 0))
			left = 1;
	}
	return left;
}

/*
 * Begin a take of up to "count" messages.  The connection is idle.
 */
static void
take(RelayTaker *taker, int count, const char *topics, int64_t now)
{
	char		count_text[16];
	char		lease_text[32];
	char		wait_text[32];
	int64_t		ms = taker->wait;
	const char *params[] = {
		count_text, lease_text, *topics ? topics : NULL, wait_text
	};
	RelayText  *query = relay_text_new();

	if (ms > SHORT_WAIT && (relay_routing_recovers(taker->routing) ||
							(*topics && !taker->routing->topics)))
		ms = SHORT_WAIT;
	if (!relay_routing_full(taker->routing))
		taker->nap = FIRST_NAP;
	else if (ms > taker->nap)
		ms = taker->nap;
	relay_text_addf(query,
					"SELECT id, message_id, topic, message_key, payload, "
					"headers, attempt, pg_catalog.to_char(created_at, "
					"'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'), "
					"(EXTRACT(epoch FROM pg_catalog.clock_timestamp() - "
					"created_at) * 1000)::bigint, "
	/* The texts can be in any encoding, so the server counts their lines. */
					"1 + pg_catalog.length(error) - pg_catalog.length("
					"pg_catalog.replace(error, E'\\n', '')), "
					"pg_catalog.substring(error, '^[0-9]{4}-[0-9]{2}-[0-9]{2}"
					"T[0-9]{2}:[0-9]{2}:[0-9]{2}Z') "
					"FROM %s.idem_outbox_take($1::int, $2::interval, "
					"$3::text[], $4::interval), LATERAL (SELECT CASE WHEN "
					"attempt > 1 THEN %s.idem_outbox_last_error(id) END AS "
					"error OFFSET 0) AS last", taker->database.schema,
					taker->database.schema);
	snprintf(count_text, sizeof(count_text), "%d", count);
	snprintf(lease_text, sizeof(lease_text), "%lld ms",
			 (long long) (taker->lease + 2 * taker->arrival));
	snprintf(wait_text, sizeof(wait_text), "%lld ms", (long long) ms);
	taker->taken_at = now;
	relay_database_query(&taker->database, ms + ANSWER_LIMIT, query->data, 4,
						 params);
	relay_text_free(query);
}

/*
 * Add the messages of a take to the queue, or process its failure.
 */
static void
answered(void *owner, PGresult *result)
{
	RelayTaker *taker = owner;
	const RelayMessage *last = taker->queue->last;
	RelayMessage *message;
	bool		listing = taker->listing;
	int			released = taker->queue->untried.count;
	bool		slow = false;
	int			row;

	taker->listing = false;
	if (!result)
	{
		adjust_limit(taker, true);
		return;
	}
	if (PQresultStatus(result) == PGRES_TUPLES_OK && listing)
	{
		taker->database.backoff = 0;
		end_list(taker, result);
	}
	else if (PQresultStatus(result) == PGRES_TUPLES_OK)
	{
		taker->database.backoff = 0;
		taker->taken += (uint64_t) PQntuples(result);
		if (PQntuples(result) > 0)
			slow = note_arrival(taker, relay_now());
		if (PQntuples(result) == 0 && taker->nap < SHORT_WAIT)
			taker->nap *= 2;
		for (row = 0; row < PQntuples(result); row++)
			add_message(taker, result, row);
		released = taker->queue->untried.count - released;
		adjust_limit(taker, slow || released > PQntuples(result) / 2);
		/* Only now do those of a key wait behind each other. */
		message = last ? last->held_next : taker->queue->first;
		for (; message; message = message->held_next)
			relay_sink_limit_abandoned(message);
	}
	else if (!taker->stopping)
	{
		/* The lease can be too long. */
		taker->arrival = 0;
		relay_database_refused(&taker->database, result);
	}
	PQclear(result);
}

/*
 * Let the next take ask for half as many messages, or for some more.
 */
static void
adjust_limit(RelayTaker *taker, bool lower)
{
	if (lower)
		taker->limit = (taker->limit + 1) / 2;
	else
		taker->limit += taker->limit / 4 + 1;
	if (taker->limit > taker->batch)
		taker->limit = taker->batch;
}

/*
 * Note how long the result of a take took to arrive, if that is the longest
 * time of the last hour.  Returns whether that was long.
 */
static bool
note_arrival(RelayTaker *taker, int64_t now)
{
	int64_t		first_sign = taker->database.first_sign;
	int64_t		arrival = first_sign ? now - first_sign : 0;

	/* The machine can have been asleep. */
	if (arrival > MOST_LEASES * taker->lease)
		arrival = MOST_LEASES * taker->lease;
	if (arrival >= taker->arrival || now >= taker->arrival_end)
	{
		taker->arrival = arrival;
		taker->arrival_end = now + ARRIVAL_TIME;
	}
	return arrival > taker->lease / SLOW_SHARE;
}

/*
 * Add the message of a row to the queue.
 */
static void
add_message(RelayTaker *taker, const PGresult *result, int row)
{
	RelayMessage *message;
	size_t		size = sizeof(RelayMessage);
	char	   *end;
	const char *columns[NCOLUMNS];
	int			i;

	for (i = 0; i < NCOLUMNS; i++)
		size += (size_t) PQgetlength(result, row, i) + 1;
	message = relay_alloc(size);
	end = (char *) (message + 1);
	for (i = 0; i < NCOLUMNS; i++)
	{
		size_t		length = (size_t) PQgetlength(result, row, i);

		columns[i] = NULL;
		if (PQgetisnull(result, row, i))
			continue;
		memcpy(end, PQgetvalue(result, row, i), length + 1);
		columns[i] = end;
		end += length + 1;
	}
	message->id = strtoll(columns[0], NULL, 10);
	message->message_id = message->label = columns[1];
	message->topic = columns[2];
	message->key = columns[3];
	message->payload = columns[4];
	message->payload_length = (size_t) PQgetlength(result, row, 4);
	message->headers = columns[5];
	message->attempt = (int) strtol(columns[6], NULL, 10);
	message->created_at = columns[7];
	message->published_at = relay_now() - strtoll(columns[8], NULL, 10);
	message->failures = columns[9] ? (int) strtol(columns[9], NULL, 10) : 0;
	message->failed_at = columns[10];
	message->size = size;
	message->timeline = taker->database.timeline;
	if (message->timeline &&
		message->timeline != taker->answers->timeline)
		taker->answers->has_others = true;
	message->lease_end = taker->taken_at + taker->lease;
	message->sink = relay_routing_sink(taker->routing, message->topic);
	/* Follow an increase at once, and a decrease slowly. */
	taker->usual_size = (taker->usual_size * 7 + size) / 8;
	if (size > taker->usual_size)
		taker->usual_size = size;
	if (!message->sink)
	{
		relay_log(RELAY_ERROR, "topic \"%s\" has no sink", message->topic);
		free(message);
		return;
	}
	relay_sink_recall(message, relay_now() - taker->began < 2 * taker->lease);
	relay_queue_add(taker->queue, message);
}
