/*-------------------------------------------------------------------------
 *
 * choice.c
 *		Which of its ready messages a sink gets next.
 *
 * Messages that have failed before, at any relay, alternate with the others
 * and have at most half of the places, so that those that run into the timeout
 * leave places to the others.
 *
 * Each of these retries has a turn, some time after its last failure, and they
 * are sent in the order of their turns.  The time is four times as long with
 * each failure, so that a message which failed in an outage comes before those
 * that always fail.  But it is limited, so that each gets its turn.
 *
 * A sink keeps only as many retries as it can send soon.  The others go back
 * to the server for another pause, with the turns that they have.
 *
 * A message is late if it is in flight for much longer than others were.  It
 * is overdue if one that was handed over after it has been delivered since.
 * So the other side has accepted it, but its queue can hang.  A late message
 * takes no place of a window that is searched for the cause of a lost
 * connection.  One that is overdue takes a place for retries, is not the
 * cause, and messages that must be alone do not wait for it.
 *
 * A relay that is killed, perhaps by a message, costs all messages that it
 * holds an attempt.  So for a while after it has begun, a relay holds only one
 * message of a sink that several relays have left without an answer.  The
 * others go back to the server for a short pause.  The relay sees how often a
 * message was taken, and that some of these attempts did not fail.  It does
 * not see whether they were released, which is why this ends after a while.
 *
 * A message that ended a connection while it was in flight alone, or that
 * delays those in flight with it, is handed over alone from then on, and
 * others go between two such messages.
 *
 * This file owns the fields of each RelaySink about retries and messages that
 * go alone.  dispatch.c asks for messages, taker.c adds what is known about
 * them, and sink.c reports the ends of attempts.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <time.h>

#include "clock.h"
#include "sink.h"

#define ALONE_GAP			100 /* between messages that are sent alone */
#define ALONE_SHARE			10	/* those that failed get 1/10 of the time */
#define ATTEMPTS			16	/* a new one changes the mean by 1/16 */
#define RETRY_QUEUE			10000	/* milliseconds of work in retries */
#define RETRY_SHARE			4	/* they get 1/4 of what is free */
#define POSTPONE_UNIT		1000	/* doubled with each failure of a retry */
#define MOST_FAILURES		5	/* that the server keeps */
#define LEFT_OFTEN			3	/* times, without an answer */
#define LATE				200 /* milliseconds, and 10 times the mean */
#define MOST_LOST			4	/* connections that double it */

static int	turn_delay(const RelayMessage *message);
static RelayMessage *choose(const RelaySink *sink, bool shared,
							int64_t now);
static RelayMessage *choose_new(const RelaySink *sink);
static int	retry_places(const RelaySink *sink);
static int64_t late_at(const RelayMessage *message);
static bool is_overdue(const RelayMessage *message, int64_t now);
static bool has_place(RelaySink *sink, int64_t now);
static bool has_retry_place(const RelaySink *sink, int64_t now);
static void postpone(RelayMessage *message, int doublings);

/*
 * Complete what is known about a message that was taken.  Its "failures" are
 * those that the server knows, up to five, of attempts at all relays.  With
 * "began_lately", this relay might have been killed before.
 */
void
relay_sink_recall(RelayMessage *message, bool began_lately)
{
	const RelayRecord *record;
	struct tm	failed_at = {0};

	message->abandoned = began_lately && message->failures < MOST_FAILURES &&
		message->attempt - 1 - message->failures >= LEFT_OFTEN;
	record = relay_records_find(&message->sink->records, message->id);
	if (record && message->failures < record->failures)
		message->failures = record->failures;
	/* Only one that has failed, or is about to, has a record. */
	if (record && message->failures == 0)
		message->failures = 1;
	message->alone = record && record->alone;
	if (message->failures == 0)
		return;
	message->turn = turn_delay(message);
	/* Errors that no relay has written can lack a time. */
	if (message->failed_at &&
		strptime(message->failed_at, "%Y-%m-%dT%H:%M:%SZ", &failed_at))
		message->turn += timegm(&failed_at);
}

/*
 * Return how long after its last failure the turn of a retry is, in seconds.
 */
static int
turn_delay(const RelayMessage *message)
{
	int			failures = message->failures;

	return 1 << 2 * (failures < MOST_FAILURES ? failures : MOST_FAILURES);
}

/*
 * Return an abandoned message that was taken to the server, if its sink holds
 * another one.  One that waits behind another message of its key stays.
 */
void
relay_sink_limit_abandoned(RelayMessage *message)
{
	RelaySink  *sink = message->sink;

	if (!message->abandoned || message->state != RELAY_READY)
		return;
	if (sink->abandoned)
		postpone(message, 0);
	else
		sink->abandoned = message;
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
	const RelayMessage *flying;
	RelayMessage *message;
	int64_t		turn = sink->alone_at + ALONE_GAP;
	bool		must_wait;
	int			count;

	if (!has_place(sink, now))
		return NULL;
	flying = relay_sink_moving(sink, now, &count);
	message = choose(sink, false, now);
	must_wait = message && message->failures > 0 && now < sink->alone_turn;
	if (must_wait && turn < sink->alone_turn)
		turn = sink->alone_turn;
	if (message && message->alone && now < turn)
	{
		RelayMessage *other = choose(sink, true, now);

		if (other || must_wait)
		{
			message = other;
			relay_loop_wake_at(sink->loop, turn);
		}
	}
	if (message && flying && flying->alone)
		return NULL;
	if (message && flying && message->alone)
	{
		if (!relay_sink_is_late(flying, now))
		{
			relay_loop_wake_at(sink->loop, late_at(flying));
			return NULL;
		}
		/* If none were handed over after it, it would never be overdue. */
		message = choose(sink, true, now);
	}
	if (message && message->alone)
		sink->alone_at = now;
	return message;
}

/*
 * Return whether another message can be in flight.
 */
static bool
has_place(RelaySink *sink, int64_t now)
{
	const RelayMessage *message = sink->in_flight.first;
	int			count = sink->in_flight.count;

	if (count >= sink->max_in_flight)
		return false;
	/* While a pause ends, as few as possible are tried. */
	if (count < sink->window || sink->probes > 0)
		return count < sink->window;
	for (; message && relay_sink_is_late(message, now);
		 message = message->next)
		count--;
	if (count < sink->window)
		return true;
	relay_loop_wake_at(sink->loop, late_at(message));
	return false;
}

/*
 * Return the ready message that comes next, or NULL if there is none or only
 * retries that must wait.  With "shared", only one that others can be in
 * flight with.
 */
static RelayMessage *
choose(const RelaySink *sink, bool shared, int64_t now)
{
	RelayMessage *message = choose_new(sink);
	RelayMessage *retry = sink->retries.first;

	if ((message && sink->after_retry) || !has_retry_place(sink, now))
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
 * Return whether another retry can be in flight.
 */
static bool
has_retry_place(const RelaySink *sink, int64_t now)
{
	const RelayMessage *message = sink->in_flight.first;
	int			taken = sink->retrying;

	/* At least one, so that they end. */
	if (taken == 0)
		return true;
	for (; message && is_overdue(message, now); message = message->next)
		taken += message->failures == 0;
	return taken < retry_places(sink);
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
 * Return the first message in flight that is not overdue, or NULL, and set
 * "count" to how many there are from it on.
 */
RelayMessage *
relay_sink_moving(const RelaySink *sink, int64_t now, int *count)
{
	RelayMessage *message = sink->in_flight.first;

	/* They are in the order in which they were handed over. */
	*count = sink->in_flight.count;
	for (; message && is_overdue(message, now); message = message->next)
		(*count)--;
	return message;
}

/*
 * Return whether a message in flight is overdue.
 */
static bool
is_overdue(const RelayMessage *message, int64_t now)
{
	return message->handed_at < message->sink->passed_at &&
		relay_sink_is_late(message, now);
}

/*
 * Return whether a message in flight is late.
 */
bool
relay_sink_is_late(const RelayMessage *message, int64_t now)
{
	return now >= late_at(message);
}

/*
 * Return from when on a message in flight is late.  The time doubles with each
 * connection that is lost, because one that is late can be the cause, too.
 */
static int64_t
late_at(const RelayMessage *message)
{
	const RelaySink *sink = message->sink;
	int			doublings = sink->lost < MOST_LOST ? sink->lost : MOST_LOST;
	int64_t		mean = sink->delivered > 0 ?
		sink->delivery_ms / (int64_t) sink->delivered : 0;

	return message->handed_at + ((LATE + 10 * mean) << doublings);
}

/*
 * Return retries to the server that the sink cannot send soon, and those that
 * are too large, the ones with the latest turns first.  Otherwise they could
 * fill the sink, and the relay would take no other messages for it.
 */
void
relay_sink_postpone_retries(RelaySink *sink)
{
	const RelayQueue *queue = sink->queue;
	int			places = retry_places(sink);
	double		limit = places * (RETRY_QUEUE / (sink->retry_ms + 1));
	int			share = (queue->max_count - queue->count) / RETRY_SHARE;
	size_t		memory = queue->max_size < queue->size ? 0 :
		(queue->max_size - queue->size) / RETRY_SHARE;

	if (limit > share)
		limit = share;
	while (sink->retries.count > places && sink->retries.count > limit)
		postpone(sink->retries.last, sink->retries.last->failures);
	/* One of any size is allowed. */
	while (sink->retries.count > (sink->retrying == 0) &&
		   sink->retries.size + sink->retrying_size > memory)
		postpone(sink->retries.last, sink->retries.last->failures);
}

/*
 * Return a ready message to the server for another pause.
 */
static void
postpone(RelayMessage *message, int doublings)
{
	RelaySink  *sink = message->sink;
	double		pause = POSTPONE_UNIT;

	if (doublings > MOST_FAILURES)
		doublings = MOST_FAILURES;
	pause *= (double) (1 << doublings) * (0.5 + drand48() / 2);
	sink->postponed++;
	if (sink->verbose)
		relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is postponed for "
				  "%.1f s, because the sink holds enough others like it",
				  message->label, message->topic, pause / 1000);
	/* It has not failed again, so it keeps its errors. */
	relay_queue_refuse(sink->queue, message, (int64_t) pause, false, "");
}

/*
 * Note the end of an attempt.  If the message was in flight alone, leave the
 * time after it to the others.
 */
void
relay_sink_end_attempt(const RelayMessage *message)
{
	RelaySink  *sink = message->sink;
	int64_t		now = relay_now();
	int64_t		duration = now - message->handed_at;

	if (message->failures > 0)
		sink->retry_ms += ((double) duration - sink->retry_ms) / ATTEMPTS;
	if (message->alone)
		sink->alone_turn = now + (ALONE_SHARE - 1) * duration;
}
