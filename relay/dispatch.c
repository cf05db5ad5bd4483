/*-------------------------------------------------------------------------
 *
 * dispatch.c
 *		Hand ready messages to their sinks, and connect sinks again.
 *
 * This file owns no state.  relay.c calls it in every round, and when it
 * stops.
 *
 *-------------------------------------------------------------------------
 */
#include "connect.h"
#include "dispatch.h"

/* While a sink is held for longer, other relays can have its messages. */
#define KEEP_LIMIT		1000	/* milliseconds */

/*
 * Give each sink its turn: connect it if its pause is over, and hand it as
 * many ready messages as it can take.  The ready messages of a sink that is
 * held for more than KEEP_LIMIT are released, and those of all sinks if the
 * relay is stopping.  A sink that connects keeps them.
 */
void
relay_dispatch_work(const RelayRouting *routing, const RelayAnswers *answers,
					bool stopping, int64_t now)
{
	RelaySink  *sink;
	RelayMessage *message;

	for (sink = routing->first; sink; sink = sink->next)
	{
		if (stopping)
			relay_sink_release_ready(sink);
		if (!sink->connected && !sink->connecting && !stopping &&
			sink->held_until <= now)
			relay_connect(sink);
		if (sink->held_until > now)
		{
			/* A claim that is returned costs an attempt. */
			if (sink->held_until - now > KEEP_LIMIT &&
				(!sink->scopes || sink->disabled))
				relay_sink_release_ready(sink);
			relay_loop_wake_at(sink->loop, sink->held_until);
		}
		if (!sink->connected || sink->held_until > now)
		{
			if (sink->connected)
				sink->type->work(sink, now);
			continue;
		}
		sink->held_until = 0;
		sink->type->work(sink, now);
		relay_sink_postpone_retries(sink);
		while (sink->connected && !sink->held_until &&
			   (message = relay_sink_next(sink, now)) &&
			   (!sink->type->can_take || sink->type->can_take(sink)))
		{
			bool		may_start = relay_answers_may_start(answers,
															message, now);

			/* Its lease is lost, or cannot be extended now. */
			if (message->lease_end == RELAY_LEASE_LOST ||
				(!may_start && (message->answer_alone ||
								message->blocked_until > now)))
			{
				relay_queue_release(sink->queue, message);
				continue;
			}
			/* It waits for more of its lease. */
			if (!may_start)
				break;
			relay_queue_hand_over(message, now);
			if ((int64_t) message->payload_length > sink->max_size)
				relay_sink_refused(message, -1, "the payload of %zu bytes is "
								   "larger than \"max_size\" of sink \"%s\"",
								   message->payload_length, sink->name);
			else
				sink->type->deliver(sink, message);
		}
	}
}

/*
 * Return whether any sink has messages in flight.
 */
bool
relay_dispatch_in_flight(const RelayRouting *routing)
{
	const RelaySink *sink = routing->first;

	while (sink && sink->in_flight.count == 0)
		sink = sink->next;
	return sink != NULL;
}

/*
 * Return whether a thread connects any sink.
 */
bool
relay_dispatch_connecting(const RelayRouting *routing)
{
	const RelaySink *sink = routing->first;

	while (sink && !sink->connecting)
		sink = sink->next;
	return sink != NULL;
}

/*
 * Release the messages in flight, and disconnect their sinks until
 * relay_dispatch_resume().
 */
void
relay_dispatch_abandon(const RelayRouting *routing)
{
	RelaySink  *sink;

	for (sink = routing->first; sink; sink = sink->next)
	{
		if (sink->in_flight.count == 0)
			continue;
		sink->type->disconnect(sink);
		sink->connected = false;
		while (sink->in_flight.first)
			relay_queue_release(sink->queue, sink->in_flight.first);
		sink->held_until = INT64_MAX;
	}
}

/*
 * Connect the sinks that relay_dispatch_abandon() has disconnected again.
 */
void
relay_dispatch_resume(const RelayRouting *routing)
{
	RelaySink  *sink;

	for (sink = routing->first; sink; sink = sink->next)
	{
		if (!sink->connected && !sink->disabled &&
			sink->held_until == INT64_MAX)
			sink->held_until = 0;
	}
}
