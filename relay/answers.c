/*-------------------------------------------------------------------------
 *
 * answers.c
 *		What the server is told of messages that the relay holds: delivered,
 *		refused, untried, or still on their way.
 *
 * One connection, one statement at a time, each a transaction of its own.
 * While it runs, answers of the same kind gather for the next, so batches are
 * as large as the load makes them, and a single message does not wait.
 *
 * An answer that may not have arrived is given again.  Acknowledging twice
 * does nothing; the others name the attempt, which the server compares, so
 * that nothing is taken from a relay that has the message by now.
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
#include "text.h"

#define ANSWER_LIMIT	30000
#define AT_ONCE			1000

typedef enum Question
{
	NOTHING,
	ACK,
	NACK,
	GIVE_BACK,
	EXTEND,
	CANCEL
} Question;

uint64_t	answers_acked = 0;
uint64_t	answers_nacked = 0;
uint64_t	answers_given_back = 0;
uint64_t	answers_lost = 0;

static void answered(Database *database, PGresult *result);

static Database database = {.name = "answers",.answered = answered,.fd = -1};

/* What the server is being asked, and of which messages. */
static Question question = NOTHING;
static MessageList asked;
static int64_t asked_at;

static int64_t lease_ms;
static char lease_text[32];
static int64_t next_look;		/* for leases to extend */
static int	cancel_pid = 0;		/* to be cancelled; 0: none */

static void ask(MessageList *list, Question what);
static bool ask_extend(int64_t now);
static void ask_cancel(void);
static void send_question(Question what, const char *call, int nparams,
						  const char *const *params);
static void end_nacks(const PGresult *result);
static void end_extend(const PGresult *result);
static void put_back(void);
static void add_id(Text *ids, Text *attempts,
				   const Message *message);

/*
 * Begin, with the lease that messages are taken for.
 */
void
answers_begin(int64_t lease)
{
	lease_ms = lease;
	snprintf(lease_text, sizeof(lease_text), "%lld ms", (long long) lease);
}

void
answers_end(void)
{
	database_close(&database);
}

/*
 * Called in each round: tell the server what there is to tell.
 */
void
answers_work(int64_t now)
{
	database_work(&database, now);
	if (database.state == DATABASE_IDLE && now >= next_look && ask_extend(now))
		return;
	if (database.state == DATABASE_IDLE && cancel_pid)
		ask_cancel();
	if (database.state == DATABASE_IDLE && queue_delivered.first)
		ask(&queue_delivered, ACK);
	if (database.state == DATABASE_IDLE && queue_refused.first)
		ask(&queue_refused, NACK);
	if (database.state == DATABASE_IDLE && queue_untried.first)
		ask(&queue_untried, GIVE_BACK);
	if (queue_count() > 0)
		loop_wake_at(next_look);
}

/*
 * Whether the server can be told anything now.
 */
bool
answers_connected(void)
{
	return database.state == DATABASE_IDLE || database.state == DATABASE_BUSY;
}

uint64_t
answers_connections_lost(void)
{
	return database.losses;
}

/*
 * Whether enough of the lease is left to begin with a delivery.
 */
bool
answers_may_start(const Message *message, int64_t now)
{
	return message->lease_end - now > lease_ms / 6;
}

/*
 * Cancel what another connection is doing.
 */
void
answers_cancel(int pid)
{
	cancel_pid = pid;
}

/*
 * Ask about all messages of that list, or as many as go at once.
 */
static void
ask(MessageList *list, Question what)
{
	Text	   *ids = text_new();
	Text	   *attempts = text_new();
	Text	   *reasons = text_new();
	Text	   *pauses = text_new();
	const char *params[4];

	while (list->first && asked.count < AT_ONCE)
	{
		Message    *message = list->first;

		list_remove(list, message);
		list_append(&asked, message);
		add_id(ids, attempts, message);
		if (what == NACK)
		{
			/* Another encoding may lack any character but these. */
			if (!database.is_utf8)
				text_mend(message->reason, true);
			text_add_element(reasons, message->reason);
			text_add_char(pauses, pauses->len ? ',' : '{');
			if (message->retry_after < 0)
				text_add(pauses, "NULL");
			else
				text_addf(pauses, "%lld ms",
						  (long long) message->retry_after);
		}
	}
	text_add_char(ids, '}');
	text_add_char(attempts, '}');
	text_add_char(reasons, '}');
	text_add_char(pauses, '}');
	params[0] = ids->data;
	params[1] = attempts->data;
	params[2] = reasons->data;
	params[3] = pauses->data;
	if (what == ACK)
		send_question(ACK, "SELECT %s.idem_outbox_ack($1::bigint[])", 1,
					  params);
	else if (what == GIVE_BACK)
		send_question(GIVE_BACK, "SELECT %s.idem_outbox_give_back("
					  "$1::bigint[], $2::int[])", 2, params);
	else
		/* In the order of their ids, as all calls that write several. */
		send_question(NACK, "SELECT m.id, %s.idem_outbox_nack("
					  "m.id, m.error, m.pause, m.attempt) FROM "
					  "(SELECT * FROM ROWS FROM (unnest($1::bigint[]),"
					  " unnest($2::int[]), unnest($3::text[]),"
					  " unnest($4::interval[]))"
					  " AS u (id, attempt, error, pause)"
					  " ORDER BY id OFFSET 0) AS m", 4, params);
	text_free(ids);
	text_free(attempts);
	text_free(reasons);
	text_free(pauses);
}

/*
 * Extend the leases that are half over, and those that are soon.  False: there
 * are none.
 */
static bool
ask_extend(int64_t now)
{
	Text	   *ids;
	Text	   *attempts;
	const char *params[3];
	Message    *message;
	bool		due = false;
	int			n = 0;

	next_look = now + lease_ms / 20;
	for (message = queue_first(); message && !due;
		 message = message->held_next)
		due = message->state <= MESSAGE_FLYING &&
			message->lease_end - now < lease_ms / 2;
	if (!due)
		return false;

	ids = text_new();
	attempts = text_new();
	for (message = queue_first(); message; message = message->held_next)
	{
		if (message->state <= MESSAGE_FLYING && n < AT_ONCE &&
			message->lease_end - now < lease_ms * 2 / 3)
		{
			message->extending = true;
			add_id(ids, attempts, message);
			n++;
		}
	}
	text_add_char(ids, '}');
	text_add_char(attempts, '}');
	params[0] = ids->data;
	params[1] = lease_text;
	params[2] = attempts->data;
	asked_at = now;
	if (n == AT_ONCE)
		next_look = now;
	send_question(EXTEND, "SELECT %s.idem_outbox_extend($1::bigint[], "
				  "$2::interval, $3::int[])", 3, params);
	text_free(ids);
	text_free(attempts);
	return true;
}

static void
ask_cancel(void)
{
	char		pid[16];
	const char *params[1] = {pid};

	snprintf(pid, sizeof(pid), "%d", cancel_pid);
	cancel_pid = 0;
	send_question(CANCEL, "SELECT pg_catalog.pg_cancel_backend($1::int)", 1,
				  params);
}

/*
 * Send it; a %s in it is the extension's schema.
 */
static void
send_question(Question what, const char *call, int nparams,
			  const char *const *params)
{
	Text	   *query = text_new();
	const char *schema = strstr(call, "%s");

	if (schema)
	{
		text_add_bytes(query, call, (size_t) (schema - call));
		text_add(query, database.schema);
		call = schema + 2;
	}
	text_add(query, call);
	question = what;
	database_query(&database, ANSWER_LIMIT, query->data, nparams, params);
	text_free(query);
}

/*
 * The server has answered, or the connection is lost.
 */
static void
answered(Database *from, PGresult *result)
{
	Question	what = question;

	question = NOTHING;
	if (!result || PQresultStatus(result) != PGRES_TUPLES_OK)
	{
		put_back();
		if (what == CANCEL && result)
			relay_log(RELAY_WARNING, "could not wake the other connection: %s",
					  PQresultErrorMessage(result));
		else if (result)
			database_refused(from, result);
		PQclear(result);
		return;
	}
	from->backoff = 0;
	if (what == ACK)
		answers_acked += (uint64_t) asked.count;
	else if (what == GIVE_BACK)
		answers_given_back += (uint64_t) asked.count;
	else if (what == NACK)
		end_nacks(result);
	else if (what == EXTEND)
		end_extend(result);
	PQclear(result);
	while (asked.first)
	{
		Message    *message = asked.first;

		list_remove(&asked, message);
		queue_drop(message);
	}
}

/*
 * Tell which messages are dead.
 */
static void
end_nacks(const PGresult *result)
{
	int			row;

	answers_nacked += (uint64_t) asked.count;
	for (row = 0; row < PQntuples(result); row++)
	{
		int64_t		id = strtoll(PQgetvalue(result, row, 0), NULL, 10);
		const char *state = PQgetvalue(result, row, 1);
		Message    *message = asked.first;

		while (message && message->id != id)
			message = message->next;
		if (!message)
			continue;
		if (strcmp(state, "dead") == 0)
		{
			message->sink->dead++;
			relay_log(RELAY_ERROR, "message %s of topic \"%s\" is dead after "
					  "attempt %d: %s; put it back with SELECT "
					  "idem_outbox_requeue('{%lld}')", message->message_id,
					  message->topic, message->attempt, message->reason,
					  (long long) id);
		}
		else if (strcmp(state, "lost") == 0)
			answers_lost++;
	}
}

/*
 * Messages that the server has not named are no longer held.
 */
static void
end_extend(const PGresult *result)
{
	Message    *message = queue_first();
	int			row;

	for (row = 0; row < PQntuples(result); row++)
	{
		int64_t		id = strtoll(PQgetvalue(result, row, 0), NULL, 10);
		Message    *held = message;

		/* In the order asked for; some have been answered since. */
		while (held && !(held->extending && held->id == id))
			held = held->held_next;
		if (held)
		{
			held->extending = false;
			held->lease_end = asked_at + lease_ms;
			message = held->held_next;
		}
	}
	for (message = queue_first(); message; message = message->held_next)
	{
		if (!message->extending)
			continue;
		message->extending = false;
		/* It is asked about once more, unless it is answered before. */
		if (message->state <= MESSAGE_FLYING)
		{
			answers_lost++;
			relay_log(RELAY_WARNING, "the lease of message %s of topic \"%s\" "
					  "is lost: another relay has it", message->message_id,
					  message->topic);
			message->lease_end = INT64_MAX;
			queue_lost(message);
		}
	}
}

/*
 * What has been asked about is to be told again.
 */
static void
put_back(void)
{
	Message    *message;

	while ((message = asked.first))
	{
		list_remove(&asked, message);
		list_append(message->state == MESSAGE_DELIVERED ? &queue_delivered :
					message->state == MESSAGE_REFUSED ? &queue_refused :
					&queue_untried, message);
	}
	for (message = queue_first(); message; message = message->held_next)
		message->extending = false;
}

static void
add_id(Text *ids, Text *attempts, const Message *message)
{
	text_addf(ids, "%c%lld", ids->len ? ',' : '{',
			  (long long) message->id);
	text_addf(attempts, "%c%d", attempts->len ? ',' : '{',
			  message->attempt);
}
