/*-------------------------------------------------------------------------
 *
 * sink.c
 *		The outcomes that a sink reports, and what becomes of the message.
 *
 * A failure can be the fault of the message or of the sink.  Four rules keep
 * a bad message from harming the others:
 *
 *	-	A message that fails waits by itself, with the messages of its key, for
 *		a pause of its own that grows with its failures in a row.
 *	-	The sink is held only if more messages fail in a row than bad messages
 *		explain; see pauses.c.  No attempt counts from the third one on.
 *	-	If the connection ends with several messages in flight, any of them can
 *		be the cause.  They are handed over again, half as many at a time,
 *		until the cause is in flight alone.  Only a message that is in flight
 *		alone when the connection ends has failed.  Those that are overdue do
 *		not count; see choice.c.
 *	-	Messages that have failed before leave places to the others; see
 *		choice.c.
 *
 * The first failures of a message are free, because a sink that fails begins
 * with them.  So are its failures while the sink is held, for the time of the
 * setting "grace"; after that they count, so that bad messages which are alone
 * in a sink end, too.
 *
 * This file owns the counters of each RelaySink.  The sink_*.c files report
 * outcomes, and answers.c reports dead messages.
 *
 *-------------------------------------------------------------------------
 */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>

#include "clock.h"
#include "sink.h"
#include "text.h"

/* Failures of a message in a row that are free, by RelayFailure. */
static const int free_failures[] = {
	[RELAY_UNSENT] = INT_MAX,
	[RELAY_DEFERRED] = 5,
	[RELAY_FAILED] = 1
};

static void count_latency(const RelayMessage *message);
static void end_connection(RelaySink *sink, bool blamed, char *why);
static void fail(RelayMessage *message, RelayFailure failure, bool ended,
				 int64_t retry_after, const char *why);
static void defer(RelayMessage *message, int64_t retry_after,
				  const char *why);
static void refuse(RelayMessage *message, int64_t retry_after,
				   const char *why);

/*
 * Report that the other side has confirmed a message in flight.
 */
void
relay_sink_delivered(RelayMessage *message)
{
	RelaySink  *sink = message->sink;

	relay_records_forget(&sink->records, message->id);
	if (sink->passed_at < message->handed_at)
		sink->passed_at = message->handed_at;
	sink->delivered++;
	sink->delivered_at = relay_now();
	sink->delivery_ms += sink->delivered_at - message->handed_at;
	count_latency(message);
	relay_sink_end_attempt(message);
	relay_sink_recover(sink);
	if (sink->verbose)
		relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is delivered",
				  message->label, message->topic);
	relay_queue_deliver(sink->queue, message);
}

/*
 * Count how long a delivered message took since it was published.
 */
static void
count_latency(const RelayMessage *message)
{
	static const int64_t bounds[] = RELAY_LATENCIES;
	RelaySink  *sink = message->sink;
	int64_t		ms = sink->delivered_at - message->published_at;
	int			i = 0;

	if (!message->published_at)
		return;
	if (ms < 0)
		ms = 0;
	while (i < RELAY_NLATENCIES && ms > bounds[i])
		i++;
	sink->latencies[i]++;
	sink->latency_ms += ms;
}

/*
 * Report that the other side rejects a message in flight for what it is.  The
 * server counts the attempt.  It returns the message after "retry_after"
 * milliseconds, or after its own pause if that is -1, until the message has no
 * attempts left and is dead.
 */
void
relay_sink_refused(RelayMessage *message, int64_t retry_after,
				   const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	/* The text can be in any encoding, and vsnprintf() can have cut it off. */
	relay_text_sanitize(why, false);
	relay_sink_end_attempt(message);
	refuse(message, retry_after, why);
}

/*
 * Report that a message in flight failed, for a reason that can be the
 * message's or the sink's.  It waits at least "retry_after" milliseconds.
 */
void
relay_sink_failed(RelayMessage *message, RelayFailure failure,
				  int64_t retry_after, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	/* The text can be in any encoding, and vsnprintf() can have cut it off. */
	relay_text_sanitize(why, false);
	fail(message, failure, false, retry_after, why);
}

/*
 * Hand over a message that is about to fail only alone from now on, because it
 * delays those that are in flight with it.
 */
void
relay_sink_isolate(RelayMessage *message)
{
	relay_records_get(&message->sink->records, message->id)->alone = true;
}

/*
 * Report that the connection has ended.  The other side might have what is in
 * flight.  If that is one message, it has failed.
 */
void
relay_sink_down(RelaySink *sink, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	end_connection(sink, false, why);
}

/*
 * Report that the other side has ended the connection because of a message in
 * flight, without naming it.  If one is in flight, it is refused.
 */
void
relay_sink_closed(RelaySink *sink, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	end_connection(sink, true, why);
}

/*
 * Disconnect, and find the message that caused it.  With "blamed", one of
 * those in flight is certain to be the cause.  "why" is made valid UTF-8.
 */
static void
end_connection(RelaySink *sink, bool blamed, char *why)
{
	int64_t		now = relay_now();
	int			count;
	RelayMessage *message = relay_sink_moving(sink, now, &count);
	RelayMessage *overdue;

	/* The text can be in any encoding, and vsnprintf() can have cut it off. */
	relay_text_sanitize(why, false);
	sink->type->disconnect(sink);
	sink->connected = false;
	/* Nothing can end a pause that the other side requested any more. */
	if (sink->held_until == INT64_MAX && !sink->disabled)
		sink->held_until = 0;
	/* Those that are overdue are not the cause, and can be so again. */
	while ((overdue = sink->in_flight.first) != message)
		defer(overdue, 0, why);
	if (count == 0)
		relay_sink_back_off(sink, why);
	else if (count == 1)
	{
		RelayRecord *record = relay_records_get(&sink->records, message->id);

		record->alone = true;
		sink->suspects = 0;
		sink->window = 1;
		if (blamed)
		{
			if (record->failures == 0)
				record->since = now;
			record->failures++;
			relay_sink_end_attempt(message);
			refuse(message, -1, why);
		}
		else
			fail(message, RELAY_FAILED, true, 0, why);
	}
	else
	{
		int			recent = 0;

		/* The cause is likely to be among those that are not late. */
		for (message = sink->in_flight.last;
			 message && !relay_sink_is_late(message, now);
			 message = message->prev)
			recent++;
		if (recent == 1)
		{
			message = sink->in_flight.last;
			relay_sink_isolate(message);
			relay_queue_release(sink->queue, message);
		}
		while ((message = sink->in_flight.last))
			relay_queue_return(message);
		relay_sink_halve(sink, count);
		sink->lost++;
		if (recent > 0)
			sink->window = recent > 1 ? recent / 2 : 1;
		relay_log(RELAY_WARNING, "sink \"%s\" has lost its connection: %s; "
				  "the %d messages in flight are sent again, %d at a time",
				  sink->name, why, count, sink->window);
	}
}

/*
 * Record a failure of a message in flight, hold the sink if several fail, and
 * decide whether the attempt counts.  With "ended", the connection ended while
 * the message was in flight alone.
 */
static void
fail(RelayMessage *message, RelayFailure failure, bool ended,
	 int64_t retry_after, const char *why)
{
	RelaySink  *sink = message->sink;
	RelayRecord *record = relay_records_get(&sink->records, message->id);
	int64_t		now = relay_now();

	relay_sink_end_attempt(message);
	if (record->failures == 0)
		record->since = now;
	if (record->failures > 0 && record->delivered != sink->delivered)
		record->is_bad = true;
	record->failures++;
	record->delivered = sink->delivered;
	relay_sink_suspect(sink, record, failure, ended, why);
	/* A request that was sent can still run.  Its token is not used again. */
	if ((message->claim_token && failure != RELAY_UNSENT) ||
		(record->failures > free_failures[failure] &&
		 (!relay_sink_can_be_down(sink) ||
		  now - record->since >= sink->grace)))
	{
		refuse(message, retry_after > 0 ? retry_after : -1, why);
		return;
	}
	defer(message, retry_after, why);
}

/*
 * Return a message in flight to the server for a pause of its own, without
 * counting the attempt.
 */
static void
defer(RelayMessage *message, int64_t retry_after, const char *why)
{
	RelaySink  *sink = message->sink;
	RelayRecord *record = relay_records_get(&sink->records, message->id);
	int64_t		pause = relay_back_off(&record->backoff,
									   RELAY_SHORTEST_BACKOFF,
									   RELAY_LONGEST_BACKOFF);

	if (pause < retry_after)
		pause = retry_after;
	message->due = relay_now() + pause;
	sink->deferred++;
	relay_log(RELAY_WARNING, "message %s of topic \"%s\" is deferred for "
			  "%.1f s: %s", message->label, message->topic,
			  (double) pause / 1000, why);
	relay_queue_refuse(sink->queue, message, pause, false, why);
}

/*
 * Count an attempt at a message in flight that has failed.
 */
static void
refuse(RelayMessage *message, int64_t retry_after, const char *why)
{
	message->sink->refused++;
	relay_log(RELAY_WARNING, "message %s of topic \"%s\" failed at attempt "
			  "%d: %s", message->label, message->topic, message->attempt,
			  why);
	relay_queue_refuse(message->sink->queue, message, retry_after, true, why);
}

/*
 * Note that a message is dead.  If an operator requeues it, it begins anew.
 */
void
relay_sink_bury(const RelayMessage *message)
{
	message->sink->dead++;
	relay_records_forget(&message->sink->records, message->id);
}

/*
 * Release all messages that are ready for the sink.
 */
void
relay_sink_release_ready(RelaySink *sink)
{
	while (sink->ready.first)
		relay_queue_release(sink->queue, sink->ready.first);
	while (sink->retries.first)
		relay_queue_release(sink->queue, sink->retries.first);
}
