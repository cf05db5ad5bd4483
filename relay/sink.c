/*-------------------------------------------------------------------------
 *
 * sink.c
 *		The outcomes that a sink reports, and the pauses after a failure.
 *
 * A failure can be the fault of the message or of the sink.  Four rules keep
 * a bad message from harming the others:
 *
 *	-	A message that fails waits by itself, with the messages of its key, for
 *		a pause of its own that grows with its failures in a row.
 *	-	The sink is held only if more messages fail in a row than bad messages
 *		explain; see outage_length().  No attempt counts from the third one on.
 *		After the pause the sink gets two messages, preferably new ones, chosen
 *		at random, and twice as many after each further pause.  It is held
 *		again if all of these fail.  A message is bad if others are delivered
 *		between its failures, and holds nothing then.
 *	-	If the connection ends with several messages in flight, any of them can
 *		be the cause.  They are handed over again, half as many at a time,
 *		until the cause is in flight alone.  Only a message that is in flight
 *		alone when the connection ends has failed.  From then on it is handed
 *		over alone, and others go between two such messages.
 *	-	Messages that have failed before, at any relay, have at most half of
 *		the places, so that those that run into the timeout leave places to
 *		the others.  A sink keeps only as many of them as it can send soon;
 *		the others go back to the server, and each gets a new pause.
 *
 * The end of a connection with one message in flight says nothing of the sink,
 * which accepted the connection.  So the sink connects again at once, or after
 * a short pause that does not grow.  If the sink cannot connect, the pause
 * grows as after any other failure.
 *
 * The first failures of a message are free, because a sink that fails begins
 * with them.  So are its failures while the sink is held, for the time of the
 * setting "grace"; after that they count, so that bad messages which are alone
 * in a sink end, too.  What a sink knows of failed messages it keeps in
 * records, in one of several places for each remainder of an id.  If none of
 * them is free, a random one is replaced, so that of many bad messages some
 * keep theirs and end.
 *
 * While a sink is held, taker.c takes no more of its topics, and dispatch.c
 * releases its ready messages, which the server does not count as attempts,
 * unless the pause is short.  The pause doubles with each failure in a row.
 * After it, each delivery doubles the window until it is as large as the
 * setting "in_flight" allows.
 *
 * A sink that delivers nothing for the time of "disable_after" is disabled: it
 * is held until the relay starts again.
 *
 * This file owns the lists and counters of each RelaySink.  The sink_*.c files
 * report outcomes; connect.c reports failures to connect.
 *
 *-------------------------------------------------------------------------
 */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "sink.h"
#include "text.h"

#define SHORTEST_BACKOFF	500
#define LONGEST_BACKOFF		30000
#define SEVERAL				3	/* failures in a row can be an outage */
#define LONG_RUN			7	/* more per failure of the mean run */
#define LONGEST_RUN			100
#define RUNS				16	/* a new one changes the mean by 1/16 */
#define PROBES				2	/* messages after the first pause */
#define LONGEST_GAP			86400000	/* between failures of a sink */
#define ALONE_GAP			100 /* between messages that are sent alone */
#define ALONE_SHARE			10	/* those that failed get 1/10 of the time */
#define RETRY_QUEUE			10000	/* milliseconds of work in retries */
#define POSTPONE_UNIT		1000	/* doubled with each failure */
#define MOST_DOUBLINGS		5

/* Failures of a message in a row that are free, by RelayFailure. */
static const int free_failures[] = {
	[RELAY_UNSENT] = INT_MAX,
	[RELAY_DEFERRED] = 5,
	[RELAY_FAILED] = 1
};

static void end_connection(RelaySink *sink, bool blamed, char *why);
static void fail(RelayMessage *message, RelayFailure failure, bool ended,
				 int64_t retry_after, const char *why);
static void refuse(RelayMessage *message, int64_t retry_after,
				   const char *why);
static int	outage_length(const RelaySink *sink);
static void note_failure(RelaySink *sink, const char *why);
static void hold(RelaySink *sink, int64_t pause, const char *why);
static void end_attempt(const RelayMessage *message);
static void count_latency(const RelayMessage *message);
static void count_run(RelaySink *sink);
static RelayRecord *find_record(RelayRecord *set, int64_t id);
static RelayRecord *get_record(RelaySink *sink, int64_t id);
static void forget_record(RelaySink *sink, int64_t id);
static RelayMessage *choose(const RelaySink *sink, bool shared);
static RelayMessage *choose_new(const RelaySink *sink);
static int	retry_places(const RelaySink *sink);
static void postpone(RelayMessage *message);

/*
 * Report that the other side has confirmed a message in flight.
 */
void
relay_sink_delivered(RelayMessage *message)
{
	RelaySink  *sink = message->sink;

	forget_record(sink, message->id);
	sink->delivered++;
	sink->delivered_at = relay_now();
	sink->delivery_ms += sink->delivered_at - message->handed_at;
	count_latency(message);
	end_attempt(message);
	count_run(sink);
	sink->failing = 0;
	sink->probes = 0;
	sink->failing_since = 0;
	sink->last_failed = 0;
	/* A message that was in flight when others failed shows that it is up. */
	if (sink->held_until != INT64_MAX)
		sink->held_until = 0;
	sink->backoff = 0;
	if (sink->suspects > 0)
		sink->suspects--;
	else
		sink->window *= 2;
	if (sink->window > sink->max_in_flight)
		sink->window = sink->max_in_flight;
	if (sink->verbose)
		relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is delivered",
				  message->label, message->topic);
	relay_queue_deliver(sink->queue, message);
}

/*
 * Note the end of an attempt.  If the message was in flight alone, leave the
 * time after it to the others.
 */
static void
end_attempt(const RelayMessage *message)
{
	RelaySink  *sink = message->sink;
	int64_t		now = relay_now();
	int64_t		duration = now - message->handed_at;

	if (message->failures > 0)
		sink->retry_ms += ((double) duration - sink->retry_ms) / RUNS;
	if (message->alone)
		sink->alone_turn = now + (ALONE_SHARE - 1) * duration;
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
 * Update the mean number of failures between deliveries.  An outage raises it
 * only for a while, because it counts as one short run.
 */
static void
count_run(RelaySink *sink)
{
	int			run = outage_length(sink);

	if (run > sink->failing)
		run = sink->failing;
	sink->mean_run += (run - sink->mean_run) / RUNS;
}

/*
 * Return how many messages must fail in a row to hold the sink.  If m bad
 * messages come between two deliveries on average, a message is bad with the
 * probability m / (m + 1).  The probability that 7 m + 3 messages in a row are
 * bad is below 0.003, unless LONGEST_RUN cuts the length off.
 */
static int
outage_length(const RelaySink *sink)
{
	double		length = SEVERAL + LONG_RUN * sink->mean_run;

	return length < LONGEST_RUN ? (int) length : LONGEST_RUN;
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
	end_attempt(message);
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
	get_record(message->sink, message->id)->alone = true;
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
	RelayMessage *message = sink->in_flight.first;
	int			count = sink->in_flight.count;

	/* The text can be in any encoding, and vsnprintf() can have cut it off. */
	relay_text_sanitize(why, false);
	sink->type->disconnect(sink);
	sink->connected = false;
	/* Nothing can end a pause that the other side requested any more. */
	if (sink->held_until == INT64_MAX && !sink->disabled)
		sink->held_until = 0;
	if (count == 0)
		relay_sink_back_off(sink, why);
	else if (count == 1)
	{
		RelayRecord *record = get_record(sink, message->id);

		record->alone = true;
		sink->suspects = 0;
		sink->window = 1;
		if (blamed)
		{
			if (record->failures == 0)
				record->since = relay_now();
			record->failures++;
			end_attempt(message);
			refuse(message, -1, why);
		}
		else
			fail(message, RELAY_FAILED, true, 0, why);
	}
	else
	{
		while ((message = sink->in_flight.last))
			relay_queue_return(message);
		relay_sink_halve(sink, count);
		relay_log(RELAY_WARNING, "sink \"%s\" has lost its connection: %s; "
				  "the %d messages in flight are sent again, %d at a time",
				  sink->name, why, count, sink->window);
	}
}

/*
 * Find the one of several messages that makes all of them fail.  They have
 * been returned to the queue, and half as many are handed over at a time.
 */
void
relay_sink_halve(RelaySink *sink, int count)
{
	/* The window stays until those that are in flight are delivered, too. */
	sink->suspects = sink->in_flight.count + count;
	sink->window = count > 1 ? count / 2 : 1;
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
	RelayRecord *record = get_record(sink, message->id);
	int64_t		now = relay_now();
	int64_t		pause;
	int			length = outage_length(sink);
	bool		may_hold;

	end_attempt(message);
	if (record->failures == 0)
		record->since = now;
	if (record->failures > 0 && record->delivered != sink->delivered)
		record->is_bad = true;
	record->failures++;
	record->delivered = sink->delivered;
	if (!record->is_bad && sink->last_failed != message->id)
		sink->failing++;
	sink->last_failed = message->id;
	if (failure == RELAY_UNSENT && sink->failing < length)
		sink->failing = length;

	/* The other messages in flight can report the same failure. */
	may_hold = sink->failing >= length && !sink->held_until;
	if (failure == RELAY_UNSENT)
		sink->probes = 0;
	else if (record->is_bad || (may_hold && --sink->probes > 0))
		may_hold = false;
	if (may_hold && ended)
		hold(sink, SHORTEST_BACKOFF, why);
	else if (may_hold)
		relay_sink_back_off(sink, why);
	note_failure(sink, why);
	if ((sink->failing < SEVERAL || now - record->since >= sink->grace) &&
		record->failures > free_failures[failure])
	{
		refuse(message, retry_after > 0 ? retry_after : -1, why);
		return;
	}
	pause = relay_back_off(&record->backoff, SHORTEST_BACKOFF,
						   LONGEST_BACKOFF);
	if (pause < retry_after)
		pause = retry_after;
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
 * Return the record of a message, which is empty if it has not failed.
 */
static RelayRecord *
get_record(RelaySink *sink, int64_t id)
{
	RelayRecord *set = sink->records[id % RELAY_RECORD_SETS];
	RelayRecord *record = find_record(set, id);

	if (record)
		return record;
	record = find_record(set, 0);
	if (!record)
		record = &set[lrand48() % RELAY_RECORD_PLACES];
	memset(record, 0, sizeof(RelayRecord));
	record->id = id;
	return record;
}

/*
 * Return the record of a set that has an id, or NULL.  The id 0 finds a record
 * that is free.
 */
static RelayRecord *
find_record(RelayRecord *set, int64_t id)
{
	int			i;

	for (i = 0; i < RELAY_RECORD_PLACES; i++)
	{
		if (set[i].id == id)
			return &set[i];
	}
	return NULL;
}

/*
 * Forget the failures of a message.
 */
static void
forget_record(RelaySink *sink, int64_t id)
{
	RelayRecord *record;

	record = find_record(sink->records[id % RELAY_RECORD_SETS], id);
	if (record)
		record->id = 0;
}

/*
 * Note that a message is dead.  If an operator requeues it, it begins anew.
 */
void
relay_sink_bury(const RelayMessage *message)
{
	message->sink->dead++;
	forget_record(message->sink, message->id);
}

/*
 * Set what is known about the failures of a message that was taken.  The
 * server keeps up to five errors, each in a line, of attempts at all relays.
 */
void
relay_sink_recall(RelayMessage *message)
{
	int64_t		id = message->id;
	const RelayRecord *record;
	const char *c = message->last_error;

	message->failures = c != NULL;
	for (; c && *c; c++)
		message->failures += *c == '\n';
	record = find_record(message->sink->records[id % RELAY_RECORD_SETS], id);
	if (!record)
		return;
	if (message->failures < record->failures)
		message->failures = record->failures;
	/* Only one that has failed, or is about to, has a record. */
	if (message->failures == 0)
		message->failures = 1;
	message->alone = record->alone;
}

/*
 * Return the ready message to hand over now, or NULL.
 *
 * If a message must be in flight alone, the others come first, except once in
 * each ALONE_GAP, so that neither keeps the other waiting.  One that has
 * failed also waits until those before it have taken no more than a part of
 * the time, even if there are no others yet.
 */
RelayMessage *
relay_sink_next(RelaySink *sink, int64_t now)
{
	const RelayMessage *flying = sink->in_flight.first;
	RelayMessage *message = choose(sink, false);
	int64_t		turn = sink->alone_at + ALONE_GAP;
	bool		must_wait;

	must_wait = message && message->failures > 0 && now < sink->alone_turn;
	if (must_wait && turn < sink->alone_turn)
		turn = sink->alone_turn;
	if (message && message->alone && now < turn)
	{
		RelayMessage *other = choose(sink, true);

		if (other || must_wait)
		{
			message = other;
			relay_loop_wake_at(sink->loop, turn);
		}
	}
	if (message && flying && (message->alone || flying->alone))
		return NULL;
	if (message && message->alone)
		sink->alone_at = now;
	return message;
}

/*
 * Return the ready message that comes next, or NULL if there is none or only
 * retries that must wait.  With "shared", only one that others can be in
 * flight with.
 *
 * Retries alternate with the messages that have not failed, and have at most
 * half of the places.  While messages fail, those that have not failed come
 * first.
 */
static RelayMessage *
choose(const RelaySink *sink, bool shared)
{
	RelayMessage *message = choose_new(sink);
	RelayMessage *retry = sink->retries.first;

	if ((message && (sink->after_retry || sink->failing > 0)) ||
		sink->retrying >= retry_places(sink))
		return message;
	while (retry && shared && retry->alone)
		retry = retry->next;
	return retry ? retry : message;
}

/*
 * Return a message that has not failed, or NULL.  In a fixed order, bad ones
 * that are not known yet could all come before the good ones.  So while
 * messages fail, return a random one.
 */
static RelayMessage *
choose_new(const RelaySink *sink)
{
	RelayMessage *message = sink->ready.first;
	long		n = 0;

	if (message && sink->failing > 0)
		n = lrand48() % sink->ready.count;
	while (n-- > 0)
		message = message->next;
	return message;
}

/*
 * Return how many retries can be in flight.
 */
static int
retry_places(const RelaySink *sink)
{
	return (sink->max_in_flight + 1) / 2;
}

/*
 * Return retries to the server that the sink cannot send soon, those with the
 * most failures first.  Otherwise they could fill the sink, and the relay
 * would take no other messages for it.
 */
void
relay_sink_postpone_retries(RelaySink *sink)
{
	int			places = retry_places(sink);
	double		limit = places * (RETRY_QUEUE / (sink->retry_ms + 1));
	int			share = (sink->queue->max_count - sink->queue->count) / 4;

	if (limit > share)
		limit = share;
	while (sink->retries.count > places && sink->retries.count > limit)
		postpone(sink->retries.last);
}

/*
 * Return a retry to the server for another pause, with its last error again,
 * because that is why it waits.
 */
static void
postpone(RelayMessage *message)
{
	RelaySink  *sink = message->sink;
	const char *error = message->last_error ? message->last_error : "failed";
	int			doublings = message->failures;
	double		pause = POSTPONE_UNIT;
	char		reason[1024];

	/* The server writes the time before it. */
	if (strlen(error) > 20 && error[10] == 'T' && error[19] == 'Z')
		error += 21;
	snprintf(reason, sizeof(reason), "%.*s", (int) strcspn(error, "\n"),
			 error);
	relay_text_sanitize(reason, false);
	if (doublings > MOST_DOUBLINGS)
		doublings = MOST_DOUBLINGS;
	pause *= (double) (1 << doublings) * (0.5 + drand48() / 2);
	sink->postponed++;
	if (sink->verbose)
		relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is postponed for "
				  "%.1f s, because the sink has many retries", message->label,
				  message->topic, pause / 1000);
	relay_queue_refuse(sink->queue, message, (int64_t) pause, false, reason);
}

/*
 * Count a failure of the sink, and hold it for a pause that doubles with each
 * failure in a row.
 */
void
relay_sink_back_off(RelaySink *sink, const char *why)
{
	note_failure(sink, why);
	if (!sink->disabled)
		hold(sink, relay_back_off(&sink->backoff, SHORTEST_BACKOFF,
								  LONGEST_BACKOFF), why);
}

/*
 * Hold the sink, which is not disabled, for a pause in milliseconds.
 */
static void
hold(RelaySink *sink, int64_t pause, const char *why)
{
	sink->failures++;
	sink->held_until = relay_now() + pause;
	/* More after each try, so that a good one is among many bad ones. */
	sink->window = PROBES;
	if (sink->backoff > SHORTEST_BACKOFF)
		sink->window *= (int) (sink->backoff / SHORTEST_BACKOFF);
	sink->probes = sink->window;
	/* Those in flight can take until the timeout.  One of them has failed. */
	if (sink->in_flight.count > 0)
		sink->window += sink->in_flight.count - 1;
	if (sink->window > sink->max_in_flight)
		sink->window = sink->max_in_flight;
	sink->suspects = 0;
	relay_log(RELAY_WARNING, "sink \"%s\" is paused: %s; next try in %.1f s",
			  sink->name, why, (double) pause / 1000);
}

/*
 * Note a failure of a message or of the sink, and disable the sink if it has
 * only failed for too long.  Failures that are far apart begin anew, because a
 * sink that seldom has messages would otherwise end with a bad one.
 */
static void
note_failure(RelaySink *sink, const char *why)
{
	int64_t		now = relay_now();

	if (!sink->failing_since || now - sink->failed_at > LONGEST_GAP)
		sink->failing_since = now;
	sink->failed_at = now;
	if (sink->disable_after > 0 &&
		now - sink->failing_since >= sink->disable_after)
		relay_sink_disable(sink, why);
}

/*
 * Hold the sink until the relay starts again, and report that.
 */
void
relay_sink_disable(RelaySink *sink, const char *why)
{
	if (sink->disabled)
		return;
	sink->disabled = true;
	sink->held_until = INT64_MAX;
	relay_sink_release_ready(sink);
	relay_log(RELAY_ERROR, "sink \"%s\" is disabled: %s; its messages wait. "
			  "Fix the cause, then reload or restart the relay", sink->name,
			  why);
}

/*
 * Hold the sink until relay_sink_resume(), because the other side requests a
 * pause.  The messages in flight stay there, and can still be confirmed.
 */
void
relay_sink_pause(RelaySink *sink, const char *why)
{
	sink->failures++;
	sink->held_until = INT64_MAX;
	relay_sink_release_ready(sink);
	relay_log(RELAY_WARNING, "sink \"%s\" is paused: %s", sink->name, why);
}

/*
 * End the pause that relay_sink_pause() began.
 */
void
relay_sink_resume(RelaySink *sink)
{
	if (sink->disabled)
		return;
	sink->held_until = 0;
	relay_loop_wake_at(sink->loop, relay_now());
	relay_log(RELAY_INFO, "sink \"%s\" continues", sink->name);
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
