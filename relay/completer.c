/*-------------------------------------------------------------------------
 *
 * completer.c
 *		Complete requests whose clients are gone.
 *
 * A section with the setting "resume" takes over abandoned and failed claims
 * by idem_resume(), and sends the stored request of each to a URL or a
 * command, with its key and its claim token.  A claim is a message in a queue
 * of its own, so the sinks deliver it like any other, with the same pauses.
 *
 *	-	While the request runs, its lease is extended.
 *	-	If it succeeds, the claim is completed with its response.  If the
 *		application has completed the claim itself, with the claim token, that
 *		response stays.  Only the latter makes effect and completion one
 *		transaction.
 *	-	If it fails, the lease ends after a pause, and the claim is resumed
 *		again, until it has no attempts left; see idem_abandoned().
 *	-	If the receiver cannot be reached, the completer keeps the claim for a
 *		pause, because the server would count an attempt.
 *	-	Each call has the claim token.  If another claimant has taken the claim
 *		over, the server refuses the call, and the claim is dropped here.
 *	-	If the application holds the claim's row, or the server refuses a call
 *		for another reason, the claim gets a pause, and the others go on.  An
 *		answer is dropped if that lasts until the claim's lease is over.
 *	-	If the server cannot write, for example because its disk is full, no
 *		claim is dropped, as after the loss of a connection.
 *
 * A RelayCompleter owns two connections, and the claims that it holds.
 * relay.c owns it and calls it in every round.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "completer.h"
#include "json.h"
#include "memory.h"
#include "text.h"

/* All in milliseconds. */
#define ANSWER_LIMIT	30000
#define SLEEP			1000	/* in idem_resume(); a stop waits for it */
#define FIRST_PAUSE		1000
#define LONGEST_PAUSE	300000

#define HELD			10		/* claims for each place in flight, at most */
#define NCOLUMNS		5		/* of the query in resume() */
#define MAX_PARAMS		6

static const struct
{
	const char *query;
	int			nparams;
}			calls[] = {

	[RELAY_CLAIM_EXTEND] = {"SELECT %s.idem_heartbeat($1::text, $2::text, "
	"claim_token => $3::bigint, lease => $4::interval)", 4},
	[RELAY_CLAIM_COMPLETE] = {"SELECT %s.idem_complete($1::text, $2::text, "
		"claim_token => $3::bigint, response_status => $4::int, "
	"response_body => $5::text, response_headers => $6::json)", 6},
	[RELAY_CLAIM_PAUSE] = {"SELECT %s.idem_heartbeat($1::text, $2::text, "
	"claim_token => $3::bigint, lease => $4::interval)", 4},
	[RELAY_CLAIM_RETURN] = {"SELECT %s.idem_fail($1::text, $2::text, "
	"'not tried', claim_token => $3::bigint)", 3},
};

static void work(RelayCompleter *completer, int64_t now);
static void resume(RelayCompleter *completer, int count, int64_t now);
static void resumed(void *owner, PGresult *result);
static void add_claim(RelayCompleter *completer, const PGresult *result,
					  int row);
static void retry_deferred(RelayCompleter *completer, int64_t now);
static bool is_deferred(const RelayCompleter *completer,
						const RelayMessage *message);
static bool extend(RelayCompleter *completer, int64_t now);
static bool answer(RelayCompleter *completer, int64_t now);
static int64_t pause_of(const RelayMessage *message);
static void send_call(RelayCompleter *completer, RelayClaimCall call,
					  RelayMessage *message);
static void answered(void *owner, PGresult *result);
static bool is_refused(const PGresult *result);
static void lose(RelayCompleter *completer, RelayMessage *message,
				 const char *why);

/*
 * Make a completer for each sink that completes claims.  "lease" is how long
 * claims are taken for, in milliseconds.  Returns a list, which the caller
 * releases with relay_completers_free().
 */
RelayCompleter *
relay_completers_begin(const RelayRouting *routing, RelayServer *server,
					   int64_t lease)
{
	RelayCompleter *first = NULL;
	RelaySink  *sink;

	for (sink = routing->first; sink; sink = sink->next)
	{
		RelayCompleter *completer;

		if (!sink->scopes)
			continue;
		completer = relay_alloc(sizeof(RelayCompleter));
		completer->resume.server = completer->answers.server = server;
		completer->resume.name = completer->answers.name = sink->name;
		completer->resume.fd = completer->answers.fd = -1;
		completer->resume.answered = resumed;
		completer->answers.answered = answered;
		completer->answers.lock_timeout = RELAY_LOCK_TIMEOUT;
		completer->resume.owner = completer->answers.owner = completer;
		completer->sink = sink;
		completer->lease = lease;
		sink->queue = &completer->queue;
		completer->next = first;
		first = completer;
	}
	return first;
}

/*
 * Do what a round has to do before it waits.
 */
void
relay_completers_work(RelayCompleter *completers, int64_t now)
{
	for (; completers; completers = completers->next)
		work(completers, now);
}

/*
 * Take no more claims.  Returns true when no call is running and no claim is
 * held; until then, the caller calls it in every round.
 */
bool
relay_completers_stop(RelayCompleter *completers)
{
	bool		done = true;

	for (; completers; completers = completers->next)
	{
		completers->stopping = true;
		done &= completers->resume.state != RELAY_DATABASE_BUSY &&
			completers->queue.count == 0;
	}
	return done;
}

/*
 * Return how many claims are held.  A result that is arriving counts as one.
 */
int
relay_completers_held(const RelayCompleter *completers)
{
	int			held = 0;

	for (; completers; completers = completers->next)
		held += completers->queue.count +
			relay_database_is_arriving(&completers->resume);
	return held;
}

/*
 * Release completers, and the claims that they hold.  No sink has one in
 * flight.
 */
void
relay_completers_free(RelayCompleter *completers)
{
	while (completers)
	{
		RelayCompleter *next = completers->next;

		relay_database_close(&completers->resume);
		relay_database_close(&completers->answers);
		while (completers->queue.first)
			relay_queue_drop(&completers->queue, completers->queue.first);
		free(completers);
		completers = next;
	}
}

/*
 * Send the next call on each connection that is idle.  Leases come first,
 * except after a call that waited for a locked row.
 */
static void
work(RelayCompleter *completer, int64_t now)
{
	RelaySink  *sink = completer->sink;
	RelayQueue *queue = &completer->queue;
	const RelayDatabase *answers = &completer->answers;
	int			left = sink->window - sink->ready.count -
		sink->in_flight.count;

	/* The server would return those that have expired again. */
	if (queue->count >= HELD * sink->max_in_flight ||
		relay_queue_has_expired(queue, now))
		left = 0;
	retry_deferred(completer, now);
	relay_database_work(&completer->answers, now);
	if (!completer->stopping ||
		completer->resume.state == RELAY_DATABASE_BUSY)
		relay_database_work(&completer->resume, now);
	if (answers->state == RELAY_DATABASE_IDLE &&
		!(completer->waited && answer(completer, now)) &&
		!extend(completer, now))
		answer(completer, now);
	if (completer->resume.state == RELAY_DATABASE_IDLE &&
		!completer->stopping && left > 0 && sink->connected &&
		!sink->held_until && (answers->state == RELAY_DATABASE_IDLE ||
							  answers->state == RELAY_DATABASE_BUSY))
		resume(completer, left, now);
	if (queue->count > 0)
		relay_loop_wake_at(sink->loop, now + completer->lease / 20);
}

/*
 * Begin to take over up to "count" claims.  The connection is idle.
 */
static void
resume(RelayCompleter *completer, int count, int64_t now)
{
	char		count_text[16];
	char		lease_text[32];
	char		wait_text[32];
	RelayText  *query = relay_text_new();
	RelayText  *scopes = relay_text_new();
	const char *params[] = {count_text, lease_text, NULL, wait_text};
	int			i;

	for (i = 0; completer->sink->scopes[i]; i++)
		relay_text_add_element(scopes, completer->sink->scopes[i]);
	relay_text_add_char(scopes, '}');
	if (strcmp(completer->sink->scopes[0], "*") != 0)
		params[2] = scopes->data;
	snprintf(count_text, sizeof(count_text), "%d", count);
	snprintf(lease_text, sizeof(lease_text), "%lld ms",
			 (long long) completer->lease);
	snprintf(wait_text, sizeof(wait_text), "%d ms", SLEEP);
	relay_text_addf(query, "SELECT scope, key, claim_token, attempt, request "
					"FROM %s.idem_resume($1::int, $2::interval, "
					"$3::text[], $4::interval)", completer->resume.schema);
	completer->resumed_at = now;
	relay_database_query(&completer->resume, SLEEP + ANSWER_LIMIT,
						 query->data, 4, params);
	relay_text_free(query);
	relay_text_free(scopes);
}

/*
 * Add the claims that were taken over to the queue, or process the failure of
 * the call.
 */
static void
resumed(void *owner, PGresult *result)
{
	RelayCompleter *completer = owner;
	int			row;

	if (!result)
		return;
	if (PQresultStatus(result) == PGRES_TUPLES_OK)
	{
		completer->resume.backoff = 0;
		completer->resumed += (uint64_t) PQntuples(result);
		for (row = 0; row < PQntuples(result); row++)
			add_claim(completer, result, row);
	}
	else
		relay_database_refused(&completer->resume, result);
	PQclear(result);
}

/*
 * Add the claim of a row to the queue.  The key is its message id, and the
 * scope its topic.
 */
static void
add_claim(RelayCompleter *completer, const PGresult *result, int row)
{
	RelayText  *headers = relay_text_new();
	const char *values[NCOLUMNS + 1];
	size_t		size = sizeof(RelayMessage);
	RelayMessage *message;
	char	   *end;
	int			i;

	for (i = 0; i < NCOLUMNS; i++)
		values[i] = PQgetvalue(result, row, i);
	relay_json_add_member(headers, '{', "Idempotency-Scope", values[0]);
	relay_json_add_member(headers, ',', "Idempotency-Claim-Token", values[2]);
	relay_json_add_member(headers, ',', "Idempotency-Attempt", values[3]);
	relay_text_add_char(headers, '}');
	values[NCOLUMNS] = headers->data;

	for (i = 0; i <= NCOLUMNS; i++)
		size += strlen(values[i]) + 1;
	message = relay_alloc(size);
	end = (char *) (message + 1);
	for (i = 0; i <= NCOLUMNS; i++)
	{
		size_t		length = strlen(values[i]) + 1;

		memcpy(end, values[i], length);
		values[i] = end;
		end += length;
	}
	message->topic = values[0];
	message->message_id = values[1];
	message->claim_token = message->label = values[2];
	message->id = strtoll(values[2], NULL, 10);
	message->attempt = (int) strtol(values[3], NULL, 10);
	message->payload = values[4];
	message->payload_length = strlen(values[4]);
	message->headers = values[5];
	message->created_at = "";
	message->size = size;
	message->lease_end = completer->resumed_at + completer->lease;
	message->sink = completer->sink;
	message->response = relay_text_new();
	relay_queue_add(&completer->queue, message);
	relay_text_free(headers);
}

/*
 * Make the deferred claims ready whose pause is over.
 */
static void
retry_deferred(RelayCompleter *completer, int64_t now)
{
	RelayMessage *message = completer->queue.refused.first;

	while (message)
	{
		RelayMessage *next = message->next;

		if (is_deferred(completer, message) && message->due <= now)
			relay_queue_retry(&completer->queue, message);
		else if (is_deferred(completer, message))
			relay_loop_wake_at(completer->sink->loop, message->due);
		message = next;
	}
}

/*
 * Return whether a claim waits for its next attempt here.
 */
static bool
is_deferred(const RelayCompleter *completer, const RelayMessage *message)
{
	return message->state == RELAY_REFUSED && !message->counted &&
		!completer->stopping && message->lease_end != RELAY_LEASE_LOST;
}

/*
 * Extend the lease of one claim whose lease is half over, of those that were
 * not blocked if there are any.  Returns false if there is none.  The
 * connection is idle.
 */
static bool
extend(RelayCompleter *completer, int64_t now)
{
	RelayMessage *message = NULL;
	RelayMessage *held;

	for (held = completer->queue.first; held; held = held->held_next)
	{
		if ((held->state <= RELAY_IN_FLIGHT ||
			 is_deferred(completer, held)) && held->blocked_until <= now &&
			held->lease_end - now < completer->lease / 2 &&
			(!message || held->blocked_until < message->blocked_until))
			message = held;
	}
	if (!message)
		return false;
	completer->called_at = now;
	/* An answer can be reported meanwhile; the token says which claim. */
	send_call(completer, RELAY_CLAIM_EXTEND, message);
	return true;
}

/*
 * Answer for a claim that is not blocked.  The lists of answers take turns.
 * Returns false if there is none.  The connection is idle.
 */
static bool
answer(RelayCompleter *completer, int64_t now)
{
	RelayQueue *queue = &completer->queue;
	RelayMessageList *const lists[] = {
		&queue->delivered, &queue->refused, &queue->untried
	};
	static const RelayClaimCall list_calls[] = {
		RELAY_CLAIM_COMPLETE, RELAY_CLAIM_PAUSE, RELAY_CLAIM_RETURN
	};
	int			i;

	for (i = 0; i < 3; i++)
	{
		RelayMessageList *list;
		RelayMessage *message;

		completer->turn = (completer->turn + 1) % 3;
		list = lists[completer->turn];
		message = list->first;
		while (message && (message->blocked_until > now ||
						   is_deferred(completer, message)))
			message = message->next;
		if (message)
		{
			RelayClaimCall call = list_calls[completer->turn];

			/* Another relay can have a claim that was kept. */
			if (call == RELAY_CLAIM_PAUSE && !message->counted)
			{
				message->state = RELAY_UNTRIED;
				call = RELAY_CLAIM_RETURN;
			}
			relay_list_remove(list, message);
			send_call(completer, call, message);
			return true;
		}
	}
	return false;
}

/*
 * Return the pause before the next attempt at a claim, in milliseconds.
 */
static int64_t
pause_of(const RelayMessage *message)
{
	int64_t		pause = FIRST_PAUSE;
	int			i;

	for (i = 1; i < message->attempt && pause < LONGEST_PAUSE; i++)
		pause *= 2;
	if (pause > LONGEST_PAUSE)
		pause = LONGEST_PAUSE;
	return message->retry_after > pause ? message->retry_after : pause;
}

/*
 * Send a call about a claim.  The connection is idle.
 */
static void
send_call(RelayCompleter *completer, RelayClaimCall call,
		  RelayMessage *message)
{
	RelayText  *query = relay_text_new();
	RelayText  *headers = relay_text_new();
	char		number[32];
	const char *params[MAX_PARAMS] = {
		message->topic, message->message_id, message->claim_token, number
	};

	if (call == RELAY_CLAIM_COMPLETE)
	{
		snprintf(number, sizeof(number), "%ld",
				 message->status ? message->status : 200L);
		params[4] = message->response->data;
		if (message->response_type)
		{
			relay_json_add_member(headers, '{', "content-type",
								  message->response_type);
			relay_text_add_char(headers, '}');
			params[5] = headers->data;
		}
	}
	else
		snprintf(number, sizeof(number), "%lld ms", (long long)
				 (call == RELAY_CLAIM_PAUSE ? pause_of(message) :
				  completer->lease));
	relay_text_addf(query, "%.*s%s%s", 7, calls[call].query,
					completer->answers.schema,
					calls[call].query + 9);
	completer->call = call;
	completer->called = message;
	relay_database_query(&completer->answers, ANSWER_LIMIT, query->data,
						 calls[call].nparams, params);
	relay_text_free(query);
	relay_text_free(headers);
}

/*
 * Process the result of a call, or the loss of its connection.
 */
static void
answered(void *owner, PGresult *result)
{
	RelayCompleter *completer = owner;
	RelayClaimCall call = completer->call;
	RelayMessage *message = completer->called;
	RelayQueue *queue = &completer->queue;
	int64_t		now = relay_now();
	bool		lost = !result || relay_database_is_outage(result);
	bool		done = !lost && PQresultStatus(result) == PGRES_TUPLES_OK;
	bool		locked = !lost && relay_database_is_locked(result);
	bool		again = lost || (!done && !is_refused(result));

	/* The claim is resumed after its lease. */
	if (!lost && call != RELAY_CLAIM_EXTEND && now >= message->lease_end)
		again = false;
	if (!lost && again)
		message->blocked_until = now +
			relay_database_lock_pause(completer->lease);
	completer->call = RELAY_CLAIM_NONE;
	completer->called = NULL;
	completer->waited = locked;
	if (done || locked)
		completer->answers.backoff = 0;
	if (call == RELAY_CLAIM_EXTEND)
	{
		if (done)
			message->lease_end = completer->called_at + completer->lease;
		else if (!again)
			lose(completer, message, PQresultErrorMessage(result));
	}
	else if (again)
		relay_list_append(call == RELAY_CLAIM_COMPLETE ? &queue->delivered :
						  call == RELAY_CLAIM_PAUSE ? &queue->refused :
						  &queue->untried, message);
	else
	{
		completer->completed += done && call == RELAY_CLAIM_COMPLETE;
		completer->postponed += done && call == RELAY_CLAIM_PAUSE;
		if (!done)
			lose(completer, message, PQresultErrorMessage(result));
		relay_queue_drop(queue, message);
	}
	if (result && !done && !locked && !is_refused(result))
		relay_database_refused(&completer->answers, result);
	PQclear(result);
}

/*
 * Return whether the server refuses a call for what it says: the claim is
 * lost, or its response cannot be stored.  Otherwise the call is repeated.
 */
static bool
is_refused(const PGresult *result)
{
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);

	return state && (strncmp(state, "ID", 2) == 0 ||
					 strncmp(state, "22", 2) == 0 ||
					 strncmp(state, "54", 2) == 0);
}

/*
 * Note that a claim cannot be answered for.  If it is not in flight, it is
 * dropped, or is being dropped by the caller.
 */
static void
lose(RelayCompleter *completer, RelayMessage *message, const char *why)
{
	if (message->lease_end == RELAY_LEASE_LOST)
		return;
	completer->lost++;
	relay_log(RELAY_WARNING, "claim %s of scope \"%s\" is lost: %.*s",
			  message->label, message->topic, (int) strcspn(why, "\n"), why);
	/* Do not extend it again. */
	message->lease_end = RELAY_LEASE_LOST;
	if (message->state == RELAY_READY)
		relay_queue_release(&completer->queue, message);
}
