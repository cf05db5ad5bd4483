/*-------------------------------------------------------------------------
 *
 * routing.c
 *		The sink of each topic, and the topics to take.
 *
 * A message belongs to the first sink that has a pattern for its topic.  The
 * relay takes only topics that have a sink, so it must be able to list them:
 * either the setting "topics" before all sections does, or no sink has a
 * pattern with wildcards, or a sink has "*".
 *
 * A sink is full if it holds as many messages, or bytes, as are free for all
 * sinks.  The relay takes no more of its topics then.  So with n slow sinks,
 * each holds about a share of n + 1, and one share is left for the others.  A
 * sink that holds nothing is never full, because one message can be large.
 *
 * sinks.c makes the RelayRouting from the configuration, taker.c asks what to
 * take, and everyone can iterate over its sinks.
 *
 *-------------------------------------------------------------------------
 */
#include <fnmatch.h>
#include <string.h>

#include "memory.h"
#include "routing.h"
#include "text.h"

static bool takes(const RelayRouting *routing, const RelaySink *sink);
static bool is_full(const RelayRouting *routing, const RelaySink *sink);

/*
 * Count a fault for each pattern of a new sink that can never match, because
 * an earlier sink has one for the same topics.
 */
void
relay_routing_check(const RelayRouting *routing, RelayConfig *config,
					const RelaySink *sink)
{
	int			i;

	for (i = 0; sink->patterns[i]; i++)
	{
		const RelaySink *other = relay_routing_sink(routing,
													sink->patterns[i]);

		if (other)
			relay_section_fault(config, sink->section, "topics",
								"topic \"%s\" goes to section [%s] already; "
								"move [%s] before that, or take it out here",
								sink->patterns[i], other->name, sink->name);
	}
}

/*
 * Determine the topics to take, after all sinks are made.  Counts a fault if a
 * topic has no sink, or if the sinks' patterns do not list all topics.
 */
void
relay_routing_configure(RelayRouting *routing, RelayConfig *config)
{
	const RelaySection *with_pattern = NULL;
	size_t		n = 0;
	size_t		i;
	int			nsinks = 0;
	RelaySink  *sink;

	for (sink = routing->first; sink; sink = sink->next)
		nsinks += !sink->scopes;
	routing->shared = nsinks > 1;
	routing->topics = relay_config_list(relay_section_text(config->main,
														   "topics"));
	for (i = 0; routing->topics[i]; i++)
	{
		if (!relay_routing_sink(routing, routing->topics[i]))
			relay_section_fault(config, config->main, "topics",
								"topic \"%s\" has no sink; name it in "
								"\"topics\" of a section, or take it out here",
								routing->topics[i]);
	}
	if (i > 0)
		return;
	for (sink = routing->first; sink; sink = sink->next)
	{
		for (i = 0; sink->patterns[i]; i++)
		{
			if (strcmp(sink->patterns[i], "*") == 0)
			{
				relay_config_free_list(routing->topics);
				routing->topics = NULL;
				return;
			}
			if (strpbrk(sink->patterns[i], "*?[\\"))
				with_pattern = sink->section;
			routing->topics = relay_resize(routing->topics,
										   (n + 2) * sizeof(char *));
			routing->topics[n++] = relay_copy(sink->patterns[i]);
			routing->topics[n] = NULL;
		}
	}
	if (with_pattern)
		relay_section_fault(config, with_pattern, "topics", "a pattern leaves "
							"topics without a sink; name those to take in "
							"\"topics\" above all sections, or add a sink "
							"for \"*\"");
}

/*
 * Return the sink of a topic, or NULL if it has none.
 */
RelaySink *
relay_routing_sink(const RelayRouting *routing, const char *topic)
{
	RelaySink  *sink;
	int			i;

	for (sink = routing->first; sink; sink = sink->next)
	{
		for (i = 0; sink->patterns[i]; i++)
		{
			if (fnmatch(sink->patterns[i], topic, 0) == 0)
				return sink;
		}
	}
	return NULL;
}

/*
 * Return whether the sink of a topic can take messages now.
 */
bool
relay_routing_takes(const RelayRouting *routing, const char *topic)
{
	const RelaySink *sink = relay_routing_sink(routing, topic);

	return sink && takes(routing, sink);
}

/*
 * Return whether a sink can take messages now.
 */
static bool
takes(const RelayRouting *routing, const RelaySink *sink)
{
	return sink->connected && !sink->held_until && !is_full(routing, sink);
}

/*
 * Return whether a sink holds its share of what the relay can hold.  A single
 * sink has no share, because no other sink can wait for it.
 */
static bool
is_full(const RelayRouting *routing, const RelaySink *sink)
{
	const RelayQueue *queue = sink->queue;

	return routing->shared && sink->held > 0 &&
		(sink->held >= queue->max_count - queue->count ||
		 sink->held_size + queue->size >= queue->max_size);
}

/*
 * Return whether any sink that has topics is full.
 */
bool
relay_routing_full(const RelayRouting *routing)
{
	const RelaySink *sink = routing->first;

	while (sink && (sink->scopes || !is_full(routing, sink)))
		sink = sink->next;
	return sink != NULL;
}

/*
 * Return whether any sink is held or not connected, and not disabled.
 */
bool
relay_routing_recovers(const RelayRouting *routing)
{
	const RelaySink *sink = routing->first;

	while (sink && (sink->scopes || sink->disabled ||
					(sink->connected && !sink->held_until)))
		sink = sink->next;
	return sink != NULL;
}

/*
 * Return whether any sink is held, full or not connected.
 */
bool
relay_routing_held(const RelayRouting *routing)
{
	const RelaySink *sink = routing->first;

	while (sink && (sink->scopes || takes(routing, sink)))
		sink = sink->next;
	return sink != NULL;
}

/*
 * Return the topics to take now as the text of a text[], without those of
 * sinks that are held, full or not connected.  Returns "" for all topics and
 * NULL for none.  If the topics have no list, all sinks can take messages.
 * The caller frees it.
 */
char *
relay_routing_topics(const RelayRouting *routing)
{
	RelayText  *array;
	char	   *topics = NULL;
	int			i;

	if (!routing->topics)
		return relay_copy("");
	array = relay_text_new();
	for (i = 0; routing->topics[i]; i++)
	{
		if (relay_routing_takes(routing, routing->topics[i]))
			relay_text_add_element(array, routing->topics[i]);
	}
	if (array->len)
	{
		relay_text_add_char(array, '}');
		topics = relay_copy(array->data);
	}
	relay_text_free(array);
	return topics;
}
