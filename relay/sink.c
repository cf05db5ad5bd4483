/*-------------------------------------------------------------------------
 *
 * sink.c
 *		The outcomes that a sink reports, and the pauses after a failure.
 *
 * After a failure a sink is held: the relay hands nothing over until a pause
 * has passed, which doubles with each failure in a row.  Meanwhile its ready
 * messages are released, which the server does not count as attempts, and
 * taker.c takes no more of its topics.  After the pause the sink gets one
 * message.  Each delivery then doubles the window until it is as large as the
 * setting "in_flight" allows.
 *
 * This file owns the lists and counters of each RelaySink.  The sink_*.c files
 * report outcomes; dispatch.c reports failures to connect.
 *
 *-------------------------------------------------------------------------
 */
#include <stdarg.h>
#include <stdio.h>

#include "clock.h"
#include "sink.h"
#include "text.h"

#define SHORTEST_BACKOFF	500
#define LONGEST_BACKOFF		30000

/*
 * Report that the other side has confirmed a message in flight.
 */
void
relay_sink_delivered(RelayMessage *message)
{
	RelaySink  *sink = message->sink;

	sink->delivered++;
	sink->delivery_ms += relay_now() - message->handed_at;
	sink->backoff = 0;
	sink->window *= 2;
	if (sink->window > sink->max_in_flight)
		sink->window = sink->max_in_flight;
	if (sink->verbose)
		relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is delivered",
				  message->message_id, message->topic);
	relay_queue_deliver(sink->queue, message);
}

/*
 * Report that the attempt at a message in flight failed: the other side
 * rejects it, or may or may not have it.  The server counts the attempt.  It
 * returns the message after "retry_after" milliseconds, or after its own pause
 * if that is -1, until the message has no attempts left and is dead.
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
	/* The text may be in any encoding, and vsnprintf() may have cut it off. */
	relay_text_sanitize(why, false);
	message->sink->refused++;
	relay_log(RELAY_WARNING, "message %s of topic \"%s\" failed at attempt "
			  "%d: %s", message->message_id, message->topic, message->attempt,
			  why);
	relay_queue_refuse(message->sink->queue, message, retry_after, why);
}

/*
 * Report that the other side accepts no messages now, and does not have this
 * one, which is in flight.  Release it, and hold the sink for at least
 * "retry_after" milliseconds.
 */
void
relay_sink_deferred(RelayMessage *message, int64_t retry_after,
					const char *format,...)
{
	RelaySink  *sink = message->sink;
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	sink->deferred++;
	relay_queue_release(sink->queue, message);
	/* The other messages in flight report the same failure. */
	if (!sink->held_until)
		relay_sink_back_off(sink, retry_after, why);
}

/*
 * Report that the connection is lost.  Disconnect and hold the sink, and
 * refuse the messages in flight, because the other side may have them.
 */
void
relay_sink_down(RelaySink *sink, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	sink->type->disconnect(sink);
	sink->connected = false;
	relay_sink_back_off(sink, 0, why);
	while (sink->in_flight.first)
		relay_sink_refused(sink->in_flight.first,
						   sink->held_until - relay_now(), "no confirm: %s",
						   why);
}

/*
 * Count a failure, and hold the sink for a pause that doubles with each
 * failure in a row, but lasts "at_least" that number of milliseconds.
 */
void
relay_sink_back_off(RelaySink *sink, int64_t at_least, const char *why)
{
	int64_t		pause;

	sink->failures++;
	pause = relay_back_off(&sink->backoff, SHORTEST_BACKOFF, LONGEST_BACKOFF);
	if (pause < at_least)
		pause = at_least;
	sink->held_until = relay_now() + pause;
	sink->window = 1;
	relay_sink_release_ready(sink);
	relay_log(RELAY_WARNING, "sink \"%s\" is held up: %s; next try in %.1f s",
			  sink->name, why, (double) pause / 1000);
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
	relay_log(RELAY_WARNING, "sink \"%s\" is held up: %s", sink->name, why);
}

/*
 * End the pause that relay_sink_pause() began.
 */
void
relay_sink_resume(RelaySink *sink)
{
	sink->held_until = 0;
	relay_loop_wake_at(sink->loop, relay_now());
	relay_log(RELAY_INFO, "sink \"%s\" goes on", sink->name);
}

/*
 * Release all messages that are ready for the sink.
 */
void
relay_sink_release_ready(RelaySink *sink)
{
	while (sink->ready.first)
		relay_queue_release(sink->queue, sink->ready.first);
}
