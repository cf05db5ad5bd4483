/*-------------------------------------------------------------------------
 *
 * answers.c
 *		Answers to the server about the messages that the relay holds:
 *		delivered, refused, untried, or still being delivered.
 *
 * One connection runs one statement at a time, each in its own transaction.
 * While it runs, answers of the same kind collect for the next statement.  So
 * the load sets the size of the batches, and a single message does not wait.
 *
 * If the server might not have received an answer, it is sent again.  That is
 * safe: a second acknowledgement has no effect, and the other calls name the
 * attempt, so they cannot change a message that another relay has taken.
 *
 * After a failover, the server can lack the last transactions, and give the
 * ids of the messages that it has lost to others.  So the relay gives no
 * answer about messages that a server with another timeline had.
 *
 * A call does not wait long for a row that another transaction has locked.
 * The messages of such a call are then answered one by one.  A message whose
 * row is locked gets a pause, and the others go on.
 *
 * A RelayAnswers owns its connection and the messages that the running call
 * answers.  relay.c owns it and calls it in every round.  dispatch.c asks it
 * about leases, and taker.c asks it to cancel the take.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "answers.h"
#include "clock.h"
#include "sink.h"
#include "text.h"

#define CALL_LIMIT		30000	/* milliseconds */
#define BATCH_LIMIT		1000	/* messages of a call */
#define MAX_PARAMS		7

/*
 * The queries of the calls.  "%s" stands for the schema of the extension.
 */
static const struct
{
	const char *query;
	int			nparams;
}			calls[] = {
	[RELAY_CALL_ACK] = {"SELECT %s.idem_outbox_ack($1::bigint[])", 1},
	[RELAY_CALL_RELEASE] = {"SELECT %s.idem_outbox_release("
	"$1::bigint[], $2::int[])", 2},

	/* In the order of ids, as every call that writes several messages. */
	[RELAY_CALL_NACK] = {"SELECT m.id, %s.idem_outbox_fail(m.id, m.attempt, "
		"m.error, m.pause, m.counted, m.schedule::interval[], m.max_age) "
		"FROM (SELECT * FROM ROWS FROM (unnest($1::bigint[]), "
		"unnest($2::int[]), unnest($3::text[]), unnest($4::interval[]), "
		"unnest($5::boolean[]), unnest($6::text[]), unnest($7::interval[])) "
		"AS u (id, attempt, error, pause, counted, schedule, max_age)"
	" ORDER BY id OFFSET 0) AS m", 7},
	[RELAY_CALL_EXTEND] = {"SELECT %s.idem_outbox_extend("
	"$1::bigint[], $3::interval, $2::int[])", 3},
	[RELAY_CALL_CANCEL] = {"SELECT pg_catalog.pg_cancel_backend($1::int)", 1}
};

static void forget_others(RelayAnswers *answers);
static void drop_others(RelayAnswers *answers, RelayMessageList *list);
static void answer_batch(RelayAnswers *answers, RelayMessageList *list,
						 RelayCall call);
static void answer_alone(RelayAnswers *answers, int64_t now);
static void answer(RelayAnswers *answers, RelayMessageList *list,
				   RelayCall call, RelayMessage *message);
static void add_refusal(const RelayAnswers *answers, RelayMessage *message,
						RelayText *const *params);
static bool extend(RelayAnswers *answers, int64_t now);
static void send_extend(RelayAnswers *answers, RelayText *const *params,
						int64_t now);
static void cancel(RelayAnswers *answers);
static void begin_params(RelayText **params);
static void add_id(RelayText *const *params, const RelayMessage *message);
static void send_call(RelayAnswers *answers, RelayCall call,
					  RelayText *const *params);
static void answered(void *owner, PGresult *result);
static void isolate(RelayAnswers *answers);
static void set_alone(RelayAnswers *answers, RelayMessage *message,
					  int64_t blocked_until);
static void requeue(RelayAnswers *answers, bool failed);
static void end_nack(RelayAnswers *answers, const PGresult *result);
static void end_extend(RelayAnswers *answers, const PGresult *result);

/*
 * Initialize zeroed answers.  "lease" is how long messages are taken for, in
 * milliseconds.
 */
void
relay_answers_begin(RelayAnswers *answers, RelayServer *server,
					RelayQueue *queue, int64_t lease)
{
	answers->database.server = server;
	answers->database.name = "answers";
	answers->database.fd = -1;
	answers->database.answered = answered;
	answers->database.lock_timeout = RELAY_LOCK_TIMEOUT;
	answers->database.owner = answers;
	answers->queue = queue;
	answers->lease = lease;
}

/*
 * Send the next answers, if the connection is idle.  The leases come first,
 * and the lists of answers take turns.  Called in every round.
 */
void
relay_answers_work(RelayAnswers *answers, int64_t now)
{
	const RelayDatabase *database = &answers->database;
	RelayQueue *queue = answers->queue;
	RelayMessageList *const lists[] = {
		&queue->delivered, &queue->refused, &queue->untried
	};
	static const RelayCall list_calls[] = {
		RELAY_CALL_ACK, RELAY_CALL_NACK, RELAY_CALL_RELEASE
	};
	int			i;

	relay_database_work(&answers->database, now);
	if (database->state == RELAY_DATABASE_IDLE)
		forget_others(answers);
	if (database->state == RELAY_DATABASE_IDLE && now >= answers->next_look &&
		extend(answers, now))
		return;
	if (database->state == RELAY_DATABASE_IDLE && answers->cancel_pid)
		cancel(answers);
	if (database->state == RELAY_DATABASE_IDLE && !answers->others_first)
		answer_alone(answers, now);
	for (i = 0; i < 3 && database->state == RELAY_DATABASE_IDLE; i++)
	{
		answers->turn = (answers->turn + 1) % 3;
		answer_batch(answers, lists[answers->turn], list_calls[answers->turn]);
	}
	if (database->state == RELAY_DATABASE_IDLE)
		answer_alone(answers, now);
	if (queue->count > 0)
		relay_loop_wake_at(database->server->loop, answers->next_look);
}

/*
 * Remove the messages that a server with another timeline had, which are not
 * in flight.  The connection is idle, so no call is about them.
 */
static void
forget_others(RelayAnswers *answers)
{
	RelayQueue *queue = answers->queue;
	RelayMessage *message;
	unsigned	timeline = answers->database.timeline;

	if (timeline == 0)
		return;
	if (answers->timeline != 0 && answers->timeline != timeline)
	{
		relay_log(RELAY_WARNING, "the server has another timeline; messages "
				  "of the previous one are not answered");
		answers->has_others = true;
	}
	answers->timeline = timeline;
	if (!answers->has_others)
		return;
	answers->has_others = false;
	for (message = queue->first; message; message = message->held_next)
	{
		if (message->timeline == timeline || !message->timeline)
			continue;
		answers->has_others = true;
		if (message->state == RELAY_READY)
			relay_queue_release(queue, message);
		/* Neither extend its lease, nor send it again. */
		message->lease_end = RELAY_LEASE_LOST;
	}
	drop_others(answers, &queue->delivered);
	drop_others(answers, &queue->refused);
	drop_others(answers, &queue->untried);
}

/*
 * Drop the messages of a list of answers that a server with another timeline
 * had.
 */
static void
drop_others(RelayAnswers *answers, RelayMessageList *list)
{
	RelayMessage *message = list->first;

	while (message)
	{
		RelayMessage *next = message->next;

		if (message->timeline != answers->timeline && message->timeline)
		{
			relay_list_remove(list, message);
			answers->nalone -= message->answer_alone;
			relay_queue_drop(answers->queue, message);
		}
		message = next;
	}
}

/*
 * Return whether the server can receive answers now.
 */
bool
relay_answers_connected(const RelayAnswers *answers)
{
	return answers->database.state == RELAY_DATABASE_IDLE ||
		answers->database.state == RELAY_DATABASE_BUSY;
}

/*
 * Return whether enough of a message's lease is left to begin its delivery.
 * A claim has a token, which the application must pass on, so any is enough.
 * After its lease, another relay can have it.
 */
bool
relay_answers_may_start(const RelayAnswers *answers,
						const RelayMessage *message, int64_t now)
{
	return message->lease_end - now >
		(message->claim_token ? 0 : answers->lease / 6);
}

/*
 * Cancel the query of another connection's server process, soon.
 */
void
relay_answers_cancel(RelayAnswers *answers, int pid)
{
	answers->cancel_pid = pid;
}

/*
 * Send the answer that a call gives to the messages of a list that are not
 * answered alone, if there are any.  The connection is idle.
 */
static void
answer_batch(RelayAnswers *answers, RelayMessageList *list, RelayCall call)
{
	RelayMessage *message = list->first;

	while (message && message->answer_alone)
		message = message->next;
	if (message)
		answer(answers, list, call, message);
}

/*
 * Answer one of the messages that are answered alone, or extend its lease, if
 * one is due.  The connection is idle.  The message that has waited longest
 * comes first, so that locked rows do not keep the others waiting.
 */
static void
answer_alone(RelayAnswers *answers, int64_t now)
{
	RelayQueue *queue = answers->queue;
	RelayMessage *message = NULL;
	RelayMessage *held = answers->nalone > 0 ? queue->first : NULL;
	RelayText  *params[MAX_PARAMS];

	for (; held; held = held->held_next)
	{
		if (held->answer_alone &&
			(held->state > RELAY_IN_FLIGHT ||
			 held->lease_end - now < answers->lease / 2) &&
			(!message || held->blocked_until < message->blocked_until))
			message = held;
	}
	if (!message)
		return;
	if (message->blocked_until > now)
		relay_loop_wake_at(answers->database.server->loop,
						   message->blocked_until);
	else if (message->state == RELAY_DELIVERED)
		answer(answers, &queue->delivered, RELAY_CALL_ACK, message);
	else if (message->state == RELAY_REFUSED)
		answer(answers, &queue->refused, RELAY_CALL_NACK, message);
	else if (message->state == RELAY_UNTRIED)
		answer(answers, &queue->untried, RELAY_CALL_RELEASE, message);
	else
	{
		begin_params(params);
		add_id(params, message);
		message->extending = true;
		answers->ncalled = 1;
		answers->others_first = true;
		send_extend(answers, params, now);
	}
}

/*
 * Send the answer that a call gives to a message of a list.  If it is not
 * answered alone, answer those behind it, too, up to BATCH_LIMIT.  The
 * connection is idle.
 */
static void
answer(RelayAnswers *answers, RelayMessageList *list, RelayCall call,
	   RelayMessage *message)
{
	RelayText  *params[MAX_PARAMS];
	bool		alone = message->answer_alone;
	int			limit = alone ? 1 : BATCH_LIMIT;
	int			i;

	answers->others_first = alone;
	begin_params(params);
	while (message && answers->called.count < limit)
	{
		RelayMessage *next = message->next;

		if (message->answer_alone == alone)
		{
			relay_list_remove(list, message);
			relay_list_append(&answers->called, message);
			add_id(params, message);
			if (call == RELAY_CALL_NACK)
				add_refusal(answers, message, params);
		}
		message = next;
	}
	answers->ncalled = answers->called.count;
	for (i = 0; i < calls[call].nparams; i++)
		relay_text_add_char(params[i], '}');
	send_call(answers, call, params);
}

/*
 * Add to the parameters why a message was refused, the pause before the next
 * attempt, whether this one counts, and what its sink has set for retries.
 */
static void
add_refusal(const RelayAnswers *answers, RelayMessage *message,
			RelayText *const *params)
{
	const RelaySink *sink = message->sink;

	/* Encodings other than UTF-8 can lack any character outside ASCII. */
	if (!answers->database.is_utf8)
		relay_text_sanitize(message->reason, true);
	relay_text_add_element(params[2], message->reason);
	relay_text_add_char(params[3], params[3]->len ? ',' : '{');
	if (message->retry_after < 0)
		relay_text_add(params[3], "NULL");
	else
		relay_text_addf(params[3], "%lld ms",
						(long long) message->retry_after);
	relay_text_addf(params[4], "%c%c", params[4]->len ? ',' : '{',
					message->counted ? 't' : 'f');
	if (sink->schedule)
		relay_text_add_element(params[5], sink->schedule);
	else
		relay_text_addf(params[5], "%cNULL", params[5]->len ? ',' : '{');
	relay_text_add_char(params[6], params[6]->len ? ',' : '{');
	/* A message that is too old gets its attempt before it ends. */
	if (sink->max_age > 0 && message->handed_at)
		relay_text_addf(params[6], "%lld ms", (long long) sink->max_age);
	else
		relay_text_add(params[6], "NULL");
}

/*
 * If any lease is half over, extend all leases of which a third is over, up to
 * BATCH_LIMIT.  Returns false if none is half over.  Messages that are
 * answered alone do not count.  The connection is idle.
 */
static bool
extend(RelayAnswers *answers, int64_t now)
{
	int64_t		lease = answers->lease;
	RelayMessage *message = answers->queue->first;
	RelayText  *params[MAX_PARAMS];
	int			n = 0;

	answers->next_look = now + lease / 20;
	while (message && !(message->state <= RELAY_IN_FLIGHT &&
						!message->answer_alone &&
						message->lease_end - now < lease / 2))
		message = message->held_next;
	if (!message)
		return false;

	begin_params(params);
	for (message = answers->queue->first; message && n < BATCH_LIMIT;
		 message = message->held_next)
	{
		if (message->state > RELAY_IN_FLIGHT || message->answer_alone ||
			message->lease_end - now >= lease * 2 / 3)
			continue;
		message->extending = true;
		add_id(params, message);
		n++;
	}
	answers->ncalled = n;
	if (n == BATCH_LIMIT)
		answers->next_look = now;
	send_extend(answers, params, now);
	return true;
}

/*
 * Extend the leases of the messages in the parameters, which are marked as
 * "extending".  The connection is idle.
 */
static void
send_extend(RelayAnswers *answers, RelayText *const *params, int64_t now)
{
	relay_text_add_char(params[0], '}');
	relay_text_add_char(params[1], '}');
	relay_text_addf(params[2], "%lld ms", (long long) answers->lease);
	answers->called_at = now;
	send_call(answers, RELAY_CALL_EXTEND, params);
}

/*
 * Send the cancel that relay_answers_cancel() requested.  The connection is
 * idle.
 */
static void
cancel(RelayAnswers *answers)
{
	RelayText  *params[MAX_PARAMS];

	begin_params(params);
	relay_text_addf(params[0], "%d", answers->cancel_pid);
	answers->cancel_pid = 0;
	send_call(answers, RELAY_CALL_CANCEL, params);
}

/*
 * Make empty parameters, which send_call() releases.
 */
static void
begin_params(RelayText **params)
{
	int			i;

	for (i = 0; i < MAX_PARAMS; i++)
		params[i] = relay_text_new();
}

/*
 * Add a message to the first two parameters, the arrays of ids and attempts.
 */
static void
add_id(RelayText *const *params, const RelayMessage *message)
{
	char		separator = params[0]->len ? ',' : '{';

	relay_text_addf(params[0], "%c%lld", separator, (long long) message->id);
	relay_text_addf(params[1], "%c%d", separator, message->attempt);
}

/*
 * Send a call, and release its parameters.  The connection is idle.
 */
static void
send_call(RelayAnswers *answers, RelayCall call, RelayText *const *params)
{
	RelayText  *query = relay_text_new();
	const char *rest = calls[call].query;
	const char *schema;
	const char *values[MAX_PARAMS];
	int			i;

	while ((schema = strstr(rest, "%s")))
	{
		relay_text_add_bytes(query, rest, (size_t) (schema - rest));
		relay_text_add(query, answers->database.schema);
		rest = schema + 2;
	}
	relay_text_add(query, rest);
	for (i = 0; i < MAX_PARAMS; i++)
		values[i] = params[i]->data;
	answers->call = call;
	relay_database_query(&answers->database, CALL_LIMIT, query->data,
						 calls[call].nparams, values);
	for (i = 0; i < MAX_PARAMS; i++)
		relay_text_free(params[i]);
	relay_text_free(query);
}

/*
 * Process the result of a call, or the loss of its connection.
 */
static void
answered(void *owner, PGresult *result)
{
	RelayAnswers *answers = owner;
	RelayCall	call = answers->call;

	answers->call = RELAY_CALL_NONE;
	if (result && relay_database_is_locked(result))
	{
		isolate(answers);
		PQclear(result);
		return;
	}
	if (!result || PQresultStatus(result) != PGRES_TUPLES_OK)
	{
		requeue(answers, result && !relay_database_is_outage(result));
		if (call == RELAY_CALL_CANCEL && result)
			relay_log(RELAY_WARNING, "could not wake the other connection: %s",
					  PQresultErrorMessage(result));
		else if (result)
			relay_database_refused(&answers->database, result);
		PQclear(result);
		return;
	}
	answers->database.backoff = 0;
	if (call == RELAY_CALL_ACK)
		answers->acked += (uint64_t) answers->called.count;
	else if (call == RELAY_CALL_RELEASE)
		answers->released += (uint64_t) answers->called.count;
	else if (call == RELAY_CALL_NACK)
		end_nack(answers, result);
	else if (call == RELAY_CALL_EXTEND)
		end_extend(answers, result);
	PQclear(result);
	while (answers->called.first)
	{
		RelayMessage *message = answers->called.first;

		relay_list_remove(&answers->called, message);
		answers->nalone -= message->answer_alone;
		relay_queue_drop(answers->queue, message);
	}
}

/*
 * Return the messages of a call that found a locked row to the queue.  They
 * are answered alone from now on.  If the call had only one, that is the
 * locked one, and it gets a pause.
 */
static void
isolate(RelayAnswers *answers)
{
	RelayMessage *message;
	int64_t		until = 0;

	answers->database.backoff = 0;
	answers->others_first = true;
	if (answers->ncalled == 1)
		until = relay_now() + relay_database_lock_pause(answers->lease);
	for (message = answers->called.first; message; message = message->next)
		set_alone(answers, message, until);
	for (message = answers->queue->first; message;
		 message = message->held_next)
	{
		if (message->extending)
			set_alone(answers, message, until);
	}
	requeue(answers, false);
}

/*
 * Answer a message alone, and not before "blocked_until", which is 0 if it is
 * not known whether its row is locked.
 */
static void
set_alone(RelayAnswers *answers, RelayMessage *message, int64_t blocked_until)
{
	if (blocked_until && !message->blocked_until)
		relay_log(RELAY_WARNING, "message %s of topic \"%s\" cannot be "
				  "answered while another transaction has locked its row",
				  message->message_id, message->topic);
	answers->nalone += !message->answer_alone;
	message->answer_alone = true;
	message->blocked_until = blocked_until;
}

/*
 * Return the messages of a call to the queue, to be answered again.  "failed"
 * says that the server has refused it.  Messages whose failure the server does
 * not count can be taken again after their leases, which counts, too.
 */
static void
requeue(RelayAnswers *answers, bool failed)
{
	RelayQueue *queue = answers->queue;
	RelayMessage *message;

	while ((message = answers->called.first))
	{
		message->call_failed = failed && message->state == RELAY_REFUSED &&
			message->counted;
		relay_list_remove(&answers->called, message);
		relay_list_append(message->state == RELAY_DELIVERED ?
						  &queue->delivered :
						  message->state == RELAY_REFUSED ?
						  &queue->refused : &queue->untried, message);
	}
	for (message = queue->first; message; message = message->held_next)
		message->extending = false;
}

/*
 * Count the refused messages, and log those that are dead.
 */
static void
end_nack(RelayAnswers *answers, const PGresult *result)
{
	int			row;

	answers->nacked += (uint64_t) answers->called.count;
	for (row = 0; row < PQntuples(result); row++)
	{
		int64_t		id = strtoll(PQgetvalue(result, row, 0), NULL, 10);
		const char *state = PQgetvalue(result, row, 1);
		RelayMessage *message = answers->called.first;

		while (message && message->id != id)
			message = message->next;
		if (message && strcmp(state, "dead") == 0)
		{
			relay_sink_bury(message);
			relay_log(RELAY_ERROR, "message %s of topic \"%s\" is dead after "
					  "attempt %d: %s; to requeue it, run SELECT "
					  "idem_outbox_requeue('{%lld}')", message->message_id,
					  message->topic, message->attempt, message->reason,
					  (long long) id);
		}
		else if (message && strcmp(state, "lost") == 0)
			answers->lost++;
	}
}

/*
 * Note the new ends of leases.  The server returns the ids of the messages
 * whose leases it has extended.  Another relay has taken the others.
 */
static void
end_extend(RelayAnswers *answers, const PGresult *result)
{
	RelayMessage *message = answers->queue->first;
	int			row;

	for (row = 0; row < PQntuples(result); row++)
	{
		int64_t		id = strtoll(PQgetvalue(result, row, 0), NULL, 10);
		RelayMessage *held = message;

		/* Same order as in the call; some might have been answered since. */
		while (held && !(held->extending && held->id == id))
			held = held->held_next;
		if (held)
		{
			held->extending = false;
			answers->nalone -= held->answer_alone;
			held->answer_alone = false;
			held->lease_end = answers->called_at + answers->lease;
			message = held->held_next;
		}
	}
	for (message = answers->queue->first; message;
		 message = message->held_next)
	{
		if (!message->extending)
			continue;
		message->extending = false;
		if (message->state <= RELAY_IN_FLIGHT)
		{
			answers->lost++;
			relay_log(RELAY_WARNING, "the lease of message %s of topic \"%s\" "
					  "is lost: another relay has it", message->message_id,
					  message->topic);
			/* Do not extend it again. */
			message->lease_end = RELAY_LEASE_LOST;
			relay_queue_lose(answers->queue, message);
		}
	}
}
