/*-------------------------------------------------------------------------
 *
 * sink_outbox.c
 *		Sink: other topics of the same outbox, so that a message goes to
 *		several destinations, each with its own order, retries and dead
 *		letters.
 *
 * One statement acknowledges the message and publishes its copies.  So each
 * copy is published exactly once, whichever process dies.  The acknowledgement
 * that answers.c sends afterwards has no effect.  After a failover, another
 * message can have the id of one that is lost; see answers.c.  So the
 * statement runs only on a server with the timeline of the one that had the
 * message.
 *
 * The sink's "state" is a RelayPipeline.  The callers are sinks.c, dispatch.c
 * and sink.c, through the RelaySinkType; sinks.c also calls the check.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>

#include "memory.h"
#include "pipeline.h"
#include "sink_outbox.h"
#include "text.h"

static const RelaySettingDef settings[] = {
	{"copies", RELAY_TEXT, NULL, "topics of the copies, with commas"},
	{"batch", RELAY_NUMBER, "100", "messages of a transaction, at most",
	1, 10000},
	{"in_flight", RELAY_NUMBER, "400", "how many at once", 1, 10000},
	{NULL}
};

/* The acknowledgement decides; see idem_outbox_ack(). */
static const char statement[] =
"SELECT CASE WHEN %s.idem_outbox_ack(ARRAY[$1::bigint])"
" OPERATOR(pg_catalog.=) 1 THEN (SELECT pg_catalog.count(*)"
" FROM %s.idem_publish_many($2::text[],"
" ARRAY[$3::jsonb], ARRAY[$4::text], ARRAY[$5::jsonb])) END";

static bool is_endless(const RelayRouting *routing, const RelaySink *sink,
					   RelayConfig *config);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	RelayPipeline *pipeline = relay_alloc(sizeof(RelayPipeline));
	char	  **copies;

	sink->state = pipeline;
	pipeline->database = relay_section_text(config->main, "database");
	pipeline->password = relay_section_text(config->main, "password");
	pipeline->batch = (int) relay_section_number(sink->section, "batch");
	pipeline->has_outbox = true;
	copies = relay_config_list(relay_section_text(sink->section, "copies"));
	if (!copies[0])
		relay_section_fault(config, sink->section, "copies",
							"\"copies\" is empty; expected names with commas");
	relay_config_free_list(copies);
}

/*
 * Count a fault for each section whose copies are copied without end, after
 * all sinks are made.
 */
void
relay_sink_outbox_check(const RelayRouting *routing, RelayConfig *config)
{
	RelaySink  *sink;
	bool		changed;

	do
	{
		changed = false;
		for (sink = routing->first; sink; sink = sink->next)
		{
			if (sink->type == &relay_sink_outbox && !sink->ends &&
				!is_endless(routing, sink, NULL))
				sink->ends = changed = true;
		}
	} while (changed);
	for (sink = routing->first; sink; sink = sink->next)
	{
		if (sink->type == &relay_sink_outbox && !sink->ends)
			(void) is_endless(routing, sink, config);
	}
}

/*
 * Return whether a copy of a section goes to a section of this type that is
 * not known to end.  Count that as a fault, if "config" is not NULL.
 */
static bool
is_endless(const RelayRouting *routing, const RelaySink *sink,
		   RelayConfig *config)
{
	char	  **copies = relay_config_list(relay_section_text(sink->section,
															  "copies"));
	const RelaySink *next = NULL;
	bool		endless;
	int			i;

	for (i = 0; copies[i]; i++)
	{
		next = relay_routing_sink(routing, copies[i]);
		if (next && next->type == &relay_sink_outbox && !next->ends)
			break;
	}
	endless = copies[i] != NULL;
	if (endless && config)
		relay_section_fault(config, sink->section, "copies", "topic \"%s\" "
							"goes to section [%s], which would copy it "
							"without end; use another name", copies[i],
							next->name);
	relay_config_free_list(copies);
	return endless;
}

/*
 * Implement RelaySinkType.connect.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	return relay_pipeline_connect(sink, statement, why, size);
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	const RelayPipeline *pipeline = sink->state;
	unsigned	timeline = pipeline->timeline;
	char	  **copies;
	RelayText  *topics;
	char		id[32];
	const char *params[] = {
		id, NULL, message->payload, message->key, message->headers
	};
	int			i;

	if (timeline && message->timeline && timeline != message->timeline)
	{
		relay_queue_release(sink->queue, message);
		return;
	}
	copies = relay_config_list(relay_section_text(sink->section, "copies"));
	topics = relay_text_new();
	for (i = 0; copies[i]; i++)
		relay_text_add_element(topics, copies[i]);
	relay_text_add_char(topics, '}');
	snprintf(id, sizeof(id), "%lld", (long long) message->id);
	params[1] = topics->data;
	relay_pipeline_send(sink, message, params, 5);
	relay_text_free(topics);
	relay_config_free_list(copies);
}

const RelaySinkType relay_sink_outbox = {
	"outbox", settings, configure_sink, connect_sink, relay_pipeline_attach,
	NULL, deliver, relay_pipeline_work, relay_pipeline_disconnect
};
