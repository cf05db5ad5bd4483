/*-------------------------------------------------------------------------
 *
 * pauses.c
 *		When a sink is held, and for how long.
 *
 * A failure can be the fault of the message or of the sink.  So a sink is held
 * only if more messages fail in a row than bad messages explain; see
 * outage_length().  After the pause, the sink gets two messages, and twice as
 * many after each further pause.  It is held again if all of these fail.  A
 * delivery ends the pause.  After that, each delivery doubles the window until
 * it is as large as the setting "in_flight" allows.
 *
 * A message is bad if others are delivered between its failures.  From then on
 * it holds nothing.
 *
 * The end of a connection with one message in flight says nothing of the sink,
 * which accepted the connection.  So the sink connects again at once, or after
 * a short pause that does not grow.  If the sink cannot connect, the pause
 * grows as after any other failure.
 *
 * While a sink is held, taker.c takes no more of its topics, and dispatch.c
 * releases its ready messages, which the server does not count as attempts,
 * unless the pause is short.  The pause doubles with each failure in a row.
 *
 * A sink that delivers nothing for the time of "disable_after" is disabled: it
 * is held until the relay starts again.  If no message has failed, the time
 * begins again with each connection, because there might be no messages.
 *
 * This file owns the window of each RelaySink and the fields that tell a bad
 * message from a sink that is down.  sink.c reports failures and deliveries,
 * connect.c reports failures to connect, and some sinks hold themselves.
 *
 *-------------------------------------------------------------------------
 */
#include "clock.h"
#include "sink.h"

#define SEVERAL				3	/* failures in a row can be an outage */
#define LONG_RUN			7	/* more per failure of the mean run */
#define LONGEST_RUN			100
#define RUNS				16	/* a new one changes the mean by 1/16 */
#define PROBES				2	/* messages after the first pause */
#define LONGEST_GAP			86400000	/* between failures of a sink */

static void count_run(RelaySink *sink);
static int	outage_length(const RelaySink *sink);
static void note_failure(RelaySink *sink, const char *why);
static void hold(RelaySink *sink, int64_t pause, const char *why);

/*
 * End the pause of a sink that has delivered a message, and let it have more
 * messages in flight.
 */
void
relay_sink_recover(RelaySink *sink)
{
	count_run(sink);
	sink->failing = 0;
	sink->probes = 0;
	sink->failing_since = 0;
	sink->last_failed = 0;
	sink->lost = 0;
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
}

/*
 * Note that the sink is connected.
 */
void
relay_sink_connected(RelaySink *sink)
{
	if (sink->failing == 0)
		sink->failing_since = 0;
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
 * Return whether enough messages failed in a row that the sink can be down.
 */
bool
relay_sink_can_be_down(const RelaySink *sink)
{
	return sink->failing >= SEVERAL;
}

/*
 * Count a failure of a message, whose record has it, and hold the sink if it
 * seems to be down.  With "ended", the connection ended while the message was
 * in flight alone.
 */
void
relay_sink_suspect(RelaySink *sink, const RelayRecord *record,
				   RelayFailure failure, bool ended, const char *why)
{
	int			length = outage_length(sink);
	bool		may_hold;

	if (!record->is_bad && sink->last_failed != record->id)
		sink->failing++;
	sink->last_failed = record->id;
	if (failure == RELAY_UNSENT && sink->failing < length)
		sink->failing = length;

	/* The other messages in flight can report the same failure. */
	may_hold = sink->failing >= length && !sink->held_until;
	if (failure == RELAY_UNSENT)
		sink->probes = 0;
	else if (record->is_bad || (may_hold && --sink->probes > 0))
		may_hold = false;
	if (may_hold && ended)
		hold(sink, RELAY_SHORTEST_BACKOFF, why);
	else if (may_hold)
		relay_sink_back_off(sink, why);
	note_failure(sink, why);
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
		hold(sink, relay_back_off(&sink->backoff, RELAY_SHORTEST_BACKOFF,
								  RELAY_LONGEST_BACKOFF), why);
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
 * Hold the sink, which is not disabled, for a pause in milliseconds.
 */
static void
hold(RelaySink *sink, int64_t pause, const char *why)
{
	sink->failures++;
	sink->held_until = relay_now() + pause;
	/* More after each try, so that a good one is among many bad ones. */
	sink->window = PROBES;
	if (sink->backoff > RELAY_SHORTEST_BACKOFF)
		sink->window *= (int) (sink->backoff / RELAY_SHORTEST_BACKOFF);
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
