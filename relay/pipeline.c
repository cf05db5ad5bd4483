/*-------------------------------------------------------------------------
 *
 * pipeline.c
 *		A connection of a sink to PostgreSQL that executes a statement for
 *		each message, in pipeline mode.
 *
 * The messages of a round are a batch: their statements are sent without
 * waiting, and one transaction executes them, which commits at the end of the
 * batch.  Further batches can follow before its result.  All messages of a
 * batch are delivered when its end is confirmed.
 *
 * If a statement fails, its batch is rolled back.  Only its message has
 * failed; the others of the batch are sent again.  If the commit itself fails,
 * they are sent again in halves, until the cause is alone.
 *
 * A RelayPipeline is the "state" of a sink and owns the connection.
 * sink_outbox.c and sink_postgres.c call this file.
 *
 *-------------------------------------------------------------------------
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "database.h"
#include "memory.h"
#include "pipeline.h"
#include "text.h"

#define FEW_SECONDS		5000	/* more than the server's own time limit */

static void log_notice(void *argument, const char *notice);
static bool prepare(RelaySink *sink, const char *statement, char *why,
					size_t size);
static bool read_timeline(RelaySink *sink, char *why, size_t size);
static PGresult *wait_for_result(RelaySink *sink, int sent);
static void describe_failure(const RelaySink *sink, const PGresult *result,
							 char *why, size_t size);
static void socket_ready(void *argument, int fd, int events);
static void end_batch(RelaySink *sink);
static void flush(RelaySink *sink);
static void receive(RelaySink *sink);
static bool process(RelaySink *sink, const PGresult *result);
static void note_failure(RelayPipeline *pipeline, const PGresult *result);
static void finish_batch(RelaySink *sink);
static bool needs_new_connection(const char *state);
static void report(RelayMessage *message, const char *state,
				   const char *why);

/*
 * Connect, and prepare a statement, in which "%s" stands for the schema of the
 * extension.  Returns false and writes the reason if that fails.  Waits up to
 * the sink's "timeout" for each step.
 */
bool
relay_pipeline_connect(RelaySink *sink, const char *statement, char *why,
					   size_t size)
{
	RelayPipeline *pipeline = sink->state;
	char		seconds[32];
	char		options[64];
	PGresult   *result = NULL;
	bool		done;

	snprintf(seconds, sizeof(seconds), "%lld",
			 (long long) (sink->timeout + 1999) / 1000);
	snprintf(options, sizeof(options), "SET statement_timeout = %lld",
			 (long long) sink->timeout);
	pipeline->connection = relay_database_start(pipeline->has_outbox ?
												sink->server : NULL,
												pipeline->first_host,
												pipeline->database,
												pipeline->password, seconds);
	relay_database_wait(pipeline->connection, sink->timeout, log_notice, sink);
	done = PQstatus(pipeline->connection) == CONNECTION_OK;
	if (done)
	{
		result = wait_for_result(sink, PQsendQuery(pipeline->connection,
												   options));
		done = PQresultStatus(result) == PGRES_COMMAND_OK;
	}
	if (!done)
		describe_failure(sink, result, why, size);
	PQclear(result);
	done = done && (!pipeline->has_outbox || read_timeline(sink, why, size)) &&
		prepare(sink, statement, why, size);
	if (!done)
	{
		PQfinish(pipeline->connection);
		pipeline->connection = NULL;
		return false;
	}
	PQenterPipelineMode(pipeline->connection);
	PQsetnonblocking(pipeline->connection, 1);
	pipeline->number = pipeline->received = 1;
	pipeline->unsynced = 0;
	pipeline->next = pipeline->culprit = NULL;
	pipeline->failed = false;
	return true;
}

/*
 * Log a notice of the login or of the called function, if the relay is
 * verbose.  libpq calls this, which would write it to standard error as it is.
 */
static void
log_notice(void *argument, const char *notice)
{
	const RelaySink *sink = argument;

	if (sink->verbose)
		relay_log(RELAY_DEBUG, "sink \"%s\": %.*s", sink->name,
				  (int) strcspn(notice, "\n"), notice);
}

/*
 * Find the extension's schema, and prepare the statement.
 */
static bool
prepare(RelaySink *sink, const char *statement, char *why, size_t size)
{
	RelayPipeline *pipeline = sink->state;
	RelayText  *query = relay_text_new();
	uint64_t	hash = UINT64_C(14695981039346656037);
	const char *part;
	PGresult   *schema;
	PGresult   *result = NULL;
	bool		done = false;

	schema = wait_for_result(sink, PQsendQuery(pipeline->connection,
											   RELAY_SCHEMA_QUERY));
	if (PQresultStatus(schema) != PGRES_TUPLES_OK)
		describe_failure(sink, schema, why, size);
	else if (PQntuples(schema) != 1)
		snprintf(why, size, "the database lacks the extension; run "
				 "CREATE EXTENSION idempotency in it");
	else
	{
		while ((part = strstr(statement, "%s")))
		{
			relay_text_add_bytes(query, statement,
								 (size_t) (part - statement));
			relay_text_add(query, PQgetvalue(schema, 0, 0));
			statement = part + 2;
		}
		relay_text_add(query, statement);

		/*
		 * A pooler can change the session.  So the statements of different
		 * functions have different names, by FNV-1a.
		 */
		for (part = query->data; *part; part++)
			hash = (hash ^ (unsigned char) *part) * UINT64_C(1099511628211);
		snprintf(pipeline->statement, sizeof(pipeline->statement),
				 "idem_relay_%016llx", (unsigned long long) hash);
		result = wait_for_result(sink, PQsendPrepare(pipeline->connection,
													 pipeline->statement,
													 query->data, 0, NULL));
		done = PQresultStatus(result) == PGRES_COMMAND_OK;
		if (!done)
			describe_failure(sink, result, why, size);
	}
	PQclear(schema);
	PQclear(result);
	relay_text_free(query);
	return done;
}

/*
 * Read the timeline of the server, if it reports one.  A server that has
 * reported it must do so again.
 */
static bool
read_timeline(RelaySink *sink, char *why, size_t size)
{
	RelayPipeline *pipeline = sink->state;
	PGresult   *result = wait_for_result(sink,
										 PQsendQuery(pipeline->connection,
													 "SELECT "
													 RELAY_TIMELINE));
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	bool		done = PQntuples(result) == 1;

	if (done)
		pipeline->timeline = (unsigned) strtoul(PQgetvalue(result, 0, 0), NULL,
												16);
	/* It was never supported, or allowed. */
	else if (state && !pipeline->timeline &&
			 (strncmp(state, "0A", 2) == 0 || strncmp(state, "42", 2) == 0))
		done = true;
	if (!done)
		describe_failure(sink, result, why, size);
	PQclear(result);
	return done;
}

/*
 * Wait up to the sink's "timeout" for the result of a command, whose sending
 * returned "sent".  Returns NULL if there is none, because the connection has
 * failed or is still waiting.  The caller clears the result.
 */
static PGresult *
wait_for_result(RelaySink *sink, int sent)
{
	const RelayPipeline *pipeline = sink->state;
	struct pollfd socket = {PQsocket(pipeline->connection), POLLIN, 0};
	int64_t		end = relay_now() + sink->timeout;
	PGresult   *result = NULL;

	while (sent)
	{
		int64_t		left = end - relay_now();

		if (!PQisBusy(pipeline->connection))
		{
			PGresult   *next = PQgetResult(pipeline->connection);

			if (!next)
				return result;
			PQclear(result);
			result = next;
			continue;
		}
		if (left <= 0)
			break;
		(void) poll(&socket, 1, (int) left);
		sent = PQconsumeInput(pipeline->connection);
	}
	PQclear(result);
	return NULL;
}

/*
 * Write the reason why there is no result, or one that is an error.
 */
static void
describe_failure(const RelaySink *sink, const PGresult *result, char *why,
				 size_t size)
{
	const RelayPipeline *pipeline = sink->state;
	const char *message = PQerrorMessage(pipeline->connection);

	if (!result && PQstatus(pipeline->connection) == CONNECTION_OK)
		message = "no answer";
	snprintf(why, size, "%.*s", (int) strcspn(message, "\n"), message);
}

/*
 * Implement RelaySinkType.attach.
 */
void
relay_pipeline_attach(RelaySink *sink)
{
	RelayPipeline *pipeline = sink->state;

	/* Otherwise messages would be taken there, and not be copied here. */
	if (pipeline->timeline > sink->server->timeline)
		relay_database_use(sink->server, pipeline->timeline);
	pipeline->fd = PQsocket(pipeline->connection);
	relay_loop_watch(sink->loop, pipeline->fd, RELAY_LOOP_READ, socket_ready,
					 sink);
}

/*
 * Send the statement of a message in flight.  Its batch ends in the next round
 * of the loop, or when it is full.
 */
void
relay_pipeline_send(RelaySink *sink, RelayMessage *message,
					const char *const *params, int nparams)
{
	RelayPipeline *pipeline = sink->state;

	message->delivery = NULL;
	message->tag = pipeline->number;
	if (!pipeline->next)
	{
		pipeline->next = message;
		pipeline->last_result = relay_now();
	}
	pipeline->unsynced++;
	if (!PQsendQueryPrepared(pipeline->connection, pipeline->statement,
							 nparams, params, NULL, NULL, 0))
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
	else if (pipeline->unsynced >= pipeline->batch)
		end_batch(sink);
	else
		relay_loop_wake_at(sink->loop, relay_now());
}

/*
 * End the batch that is being sent, which is not empty.
 */
static void
end_batch(RelaySink *sink)
{
	RelayPipeline *pipeline = sink->state;

	pipeline->number++;
	pipeline->unsynced = 0;
	if (!PQpipelineSync(pipeline->connection))
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
	else
		flush(sink);
}

/*
 * Send what the socket accepts.
 */
static void
flush(RelaySink *sink)
{
	const RelayPipeline *pipeline = sink->state;
	int			unsent = PQflush(pipeline->connection);

	if (unsent < 0)
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
	else
		relay_loop_watch(sink->loop, pipeline->fd, unsent ?
						 RELAY_LOOP_READ | RELAY_LOOP_WRITE : RELAY_LOOP_READ,
						 socket_ready, sink);
}

/*
 * Implement RelaySinkType.work: end the batch of the last round, end the
 * connection of a sink that is paused, and detect a server that does not
 * respond, or that the relay does not use any more.
 */
void
relay_pipeline_work(RelaySink *sink, int64_t now)
{
	RelayPipeline *pipeline = sink->state;
	const RelayServer *server = sink->server;
	int64_t		limit = pipeline->last_result + sink->timeout + FEW_SECONDS;

	if (pipeline->timeline && server->timeline &&
		pipeline->timeline != server->timeline)
	{
		pipeline->first_host++;
		/* None of those in flight is the cause. */
		pipeline->next = NULL;
		while (sink->in_flight.last)
			relay_queue_return(sink->in_flight.last);
		relay_sink_down(sink, "the relay uses a server with another timeline");
		return;
	}
	if (pipeline->unsynced > 0)
		end_batch(sink);
	/* A call can have changed its session so that all later ones fail. */
	if (sink->connected && sink->held_until > now && !sink->in_flight.first)
	{
		relay_pipeline_disconnect(sink);
		sink->connected = false;
	}
	if (!sink->connected || !sink->in_flight.first)
		return;
	if (now >= limit)
		relay_sink_down(sink, "no answer");
	else
		relay_loop_wake_at(sink->loop, limit);
}

/*
 * Send and receive what the socket allows.  The event loop calls this.
 */
static void
socket_ready(void *argument, int fd, int events)
{
	RelaySink  *sink = argument;
	const RelayPipeline *pipeline = sink->state;

	if (!PQconsumeInput(pipeline->connection))
	{
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
		return;
	}
	flush(sink);
	if (sink->connected)
		receive(sink);
}

/*
 * Process all results that have arrived.  The sink can be down afterwards.
 */
static void
receive(RelaySink *sink)
{
	const RelayPipeline *pipeline = sink->state;
	int			nothing = 0;

	/* A NULL ends the results of a statement.  Two of them are the end. */
	while (nothing < 2 && !PQisBusy(pipeline->connection))
	{
		PGresult   *result = PQgetResult(pipeline->connection);
		bool		going_on = true;

		nothing = result ? 0 : nothing + 1;
		if (result)
			going_on = process(sink, result);
		PQclear(result);
		if (!going_on)
			return;
	}
	if (PQstatus(pipeline->connection) != CONNECTION_OK)
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
}

/*
 * Process a result.  Returns false if the sink is down.
 */
static bool
process(RelaySink *sink, const PGresult *result)
{
	RelayPipeline *pipeline = sink->state;
	ExecStatusType status = PQresultStatus(result);
	RelayMessage *message = pipeline->next;
	bool		of_message = message && message->tag == pipeline->received;

	pipeline->last_result = relay_now();
	if (PQstatus(pipeline->connection) != CONNECTION_OK)
	{
		relay_sink_down(sink, "%s", PQerrorMessage(pipeline->connection));
		return false;
	}
	if (status == PGRES_PIPELINE_SYNC)
	{
		finish_batch(sink);
		return sink->connected;
	}
	if (status == PGRES_FATAL_ERROR && !pipeline->failed)
	{
		note_failure(pipeline, result);
		/* Otherwise the commit has failed. */
		if (of_message)
			pipeline->culprit = message;
	}
	if (of_message)
		pipeline->next = message->next;
	return true;
}

/*
 * Keep the reason why the batch that is received has failed.
 */
static void
note_failure(RelayPipeline *pipeline, const PGresult *result)
{
	const char *state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	const char *message = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);

	pipeline->failed = true;
	snprintf(pipeline->state, sizeof(pipeline->state), "%s",
			 state ? state : "");
	snprintf(pipeline->why, sizeof(pipeline->why), "%s (SQLSTATE %s)",
			 message ? message : "error", state ? state : "unknown");
}

/*
 * The end of a batch is confirmed: report the outcome of its messages.  The
 * sink can be down afterwards.
 */
static void
finish_batch(RelaySink *sink)
{
	RelayPipeline *pipeline = sink->state;
	RelayMessage *message = sink->in_flight.first;
	RelayMessage *last = NULL;
	bool		only = message && !(message->next &&
									message->next->tag == message->tag);

	if (pipeline->failed && needs_new_connection(pipeline->state))
	{
		relay_sink_down(sink, "%s", pipeline->why);
		return;
	}
	if (!pipeline->failed)
	{
		while (message && message->tag == pipeline->received)
		{
			RelayMessage *next = message->next;

			relay_sink_delivered(message);
			message = next;
		}
	}
	else
	{
		RelayMessage *culprit = only ? message : pipeline->culprit;
		int			count = 0;

		for (; message && message->tag == pipeline->received;
			 message = message->next)
		{
			last = message;
			count++;
		}
		/* From the last one, so that they are ready in their order. */
		while (last)
		{
			message = last->prev;
			if (last != culprit)
				relay_queue_return(last);
			last = message;
		}
		if (!culprit)
			relay_sink_halve(sink, count);
		/* Otherwise its next attempt would make others fail again. */
		else if (!pipeline->culprit)
			relay_sink_isolate(culprit);
		if (culprit)
			report(culprit, pipeline->state, pipeline->why);
	}
	pipeline->failed = false;
	pipeline->culprit = NULL;
	pipeline->received++;
}

/*
 * Return whether an error can be the fault of the connection, so that all
 * calls would fail: its prepared statement does not fit a function that has
 * been replaced (0A000) or is gone (26000), or the server has become a standby
 * (25006).
 */
static bool
needs_new_connection(const char *state)
{
	return strcmp(state, "0A000") == 0 || strcmp(state, "26000") == 0 ||
		strcmp(state, "25006") == 0;
}

/*
 * Report the failure of a message.  Errors of its data are its own; others can
 * be the fault of the database.
 */
static void
report(RelayMessage *message, const char *state, const char *why)
{
	static const char *const deferring[] = {"40", "53", "55", NULL};
	static const char *const failing[] =
	{"08", "25", "42", "57", "58", "XX", NULL};
	int			i;

	/* The statement took longer than "timeout", and all others waited. */
	if (strcmp(state, "57014") == 0)
		relay_sink_isolate(message);
	for (i = 0; deferring[i]; i++)
	{
		if (strncmp(state, deferring[i], 2) == 0)
		{
			relay_sink_failed(message, RELAY_DEFERRED, 0, "%s", why);
			return;
		}
	}
	for (i = 0; failing[i]; i++)
	{
		if (strncmp(state, failing[i], 2) == 0)
		{
			relay_sink_failed(message, RELAY_FAILED, 0, "%s", why);
			return;
		}
	}
	relay_sink_refused(message, -1, "%s", why);
}

/*
 * Implement RelaySinkType.disconnect.
 */
void
relay_pipeline_disconnect(RelaySink *sink)
{
	RelayPipeline *pipeline = sink->state;

	relay_loop_forget(sink->loop, pipeline->fd);
	PQfinish(pipeline->connection);
	pipeline->connection = NULL;
}
