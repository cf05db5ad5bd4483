/*-------------------------------------------------------------------------
 *
 * sinks.c
 *		Make the sinks that the configuration describes, and release them.
 *
 * Each section of the configuration is a sink.  To add a kind of sink, write
 * a file that exports a RelaySinkType, and add it to "types".
 *
 * This file allocates and frees the sinks of a RelayRouting.  relay.c calls
 * it, and main.c for --help.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "sink_amqp.h"
#include "sink_command.h"
#include "sink_kafka.h"
#include "sink_nats.h"
#include "sink_outbox.h"
#include "sink_postgres.h"
#include "sink_stdout.h"
#include "sink_webhook.h"
#include "sinks.h"

/* The mean duration of a retry, as long as it is not measured. */
#define FIRST_RETRY_MS	1000

/* The settings of every sink. */
static const RelaySettingDef common_settings[] = {
	{"sink", RELAY_TEXT, NULL,
	"amqp, kafka, nats, webhook, postgres, outbox, command or stdout"},
	{"topics", RELAY_TEXT, "",
	"topics that go there, with commas; * and ? stand for others"},
	{"resume", RELAY_TEXT, "",
		"instead of topics: scopes whose abandoned requests are sent again, "
	"with commas, or *; for webhook and command"},
	{"in_flight", RELAY_NUMBER, "100",
	"how many messages it is given at once, of different keys", 1, 10000},
	{"timeout", RELAY_TIME, "10s",
	"how long a delivery can take", 100, 3600000},
	{"max_size", RELAY_BYTES, "16MB",
	"of a payload; larger ones are refused", 1, INT64_C(1) << 30},
	{"retry", RELAY_TEXT, "",
		"pauses after the first failures, with commas, as 5s, 5m, 2h; empty: "
	"the server's"},
	{"max_age", RELAY_TIME, "0s",
		"of a message that fails: older ones are dead; 0s: no limit",
	0, INT64_C(315360000000)},
	{"grace", RELAY_TIME, "1d",
		"how long failures of a message are free while its sink delivers "
	"nothing", 0, INT64_C(315360000000)},
	{"disable_after", RELAY_TIME, "5d",
		"a sink that has only failed for this long is disabled; 0s: never",
	0, INT64_C(315360000000)},
	{"format", RELAY_TEXT, "payload", "of the body: payload, or cloudevents"},
	{"source", RELAY_TEXT, "/idempotency",
	"of CloudEvents: a URI of the publisher"},
	{NULL}
};

static const RelaySinkType *const types[] = {
	&relay_sink_amqp, &relay_sink_kafka, &relay_sink_nats, &relay_sink_webhook,
	&relay_sink_postgres, &relay_sink_outbox, &relay_sink_command,
	&relay_sink_stdout, NULL
};

static void configure_scopes(RelayConfig *config, RelaySink *sink);
static RelaySink *make_sink(const RelayRouting *routing, RelayConfig *config,
							RelaySection *section);

/*
 * Make all sinks, in a zeroed RelayRouting.  Counts the faults of their
 * settings.  If there are faults, the sinks can only be freed.  Their loop,
 * queue and server can be NULL if they are not used.
 */
void
relay_sinks_configure(RelayRouting *routing, RelayConfig *config,
					  RelayLoop *loop, RelayQueue *queue,
					  struct RelayServer *server)
{
	RelaySection *section;
	RelaySink **end = &routing->first;

	for (section = config->main->next; section; section = section->next)
	{
		*end = make_sink(routing, config, section);
		if (!*end)
			continue;
		(*end)->loop = loop;
		(*end)->queue = queue;
		(*end)->server = server;
		end = &(*end)->next;
	}
	if (!config->main->next)
		relay_config_fault(config, config->main->where, "there is no sink; "
						   "add a section like [out] with \"sink = stdout\" "
						   "and \"topics = *\"");
	else if (config->nfaults == 0)
	{
		relay_routing_configure(routing, config);
		relay_sink_outbox_check(routing, config);
	}
}

/*
 * Return the sink of a section, or NULL after counting a fault if the section
 * does not name a type.  Counts the faults of its settings.
 */
static RelaySink *
make_sink(const RelayRouting *routing, RelayConfig *config,
		  RelaySection *section)
{
	const RelaySetting *setting = relay_section_setting(section, "sink");
	const RelaySinkType *const *type = types;
	const char *format;
	RelaySink  *sink = relay_alloc(sizeof(RelaySink));
	int			nfaults = config->nfaults;

	while (*type && !(setting && strcmp((*type)->name, setting->value) == 0))
		type++;
	sink->type = *type;
	if (!sink->type)
	{
		relay_section_fault(config, section, "sink", "section [%s] needs "
							"\"sink = ...\", one of amqp, kafka, nats, "
							"webhook, postgres, outbox, command, stdout",
							section->name);
		free(sink);
		return NULL;
	}
	/* A type can replace the default of a common setting. */
	section->defs[0] = sink->type->settings;
	section->defs[1] = common_settings;
	relay_config_check(config, section);

	sink->section = section;
	sink->name = section->name;
	sink->patterns = relay_config_list(relay_section_text(section, "topics"));
	format = relay_section_text(section, "format");
	sink->cloudevents = strcmp(format, "cloudevents") == 0;
	if (!sink->cloudevents && strcmp(format, "payload") != 0)
		relay_section_fault(config, section, "format",
							"\"format\" must be payload or cloudevents");
	sink->source = relay_section_text(section, "source");
	configure_scopes(config, sink);
	if (!sink->patterns[0] && !sink->scopes)
		relay_section_fault(config, section, "topics", "\"topics\" is %s; "
							"expected names with commas, or *",
							relay_section_setting(section, "topics") ?
							"empty" : "missing");
	sink->schedule = relay_config_pauses(config, section, "retry");
	relay_routing_check(routing, config, sink);
	if (config->nfaults == nfaults)
	{
		sink->verbose = relay_section_number(config->main, "verbose");
		sink->max_in_flight = (int) relay_section_number(section, "in_flight");
		sink->retry_ms = FIRST_RETRY_MS;
		sink->timeout = relay_section_number(section, "timeout");
		sink->max_size = relay_section_number(section, "max_size");
		sink->max_age = relay_section_number(section, "max_age");
		sink->grace = relay_section_number(section, "grace");
		sink->disable_after = relay_section_number(section, "disable_after");
		sink->window = sink->max_in_flight;
		sink->type->configure(sink, config);
	}
	return sink;
}

/*
 * Read the scopes of a section that completes claims, and count the faults.
 */
static void
configure_scopes(RelayConfig *config, RelaySink *sink)
{
	RelaySection *section = sink->section;
	char	  **scopes;

	scopes = relay_config_list(relay_section_text(section, "resume"));
	if (!scopes[0])
	{
		relay_config_free_list(scopes);
		return;
	}
	sink->scopes = scopes;
	if (sink->patterns[0])
		relay_section_fault(config, section, "resume", "a section has "
							"\"topics\" or \"resume\"; make another section");
	if (sink->type != &relay_sink_webhook && sink->type != &relay_sink_command)
		relay_section_fault(config, section, "resume",
							"\"resume\" needs the sink webhook or command");
	if (scopes[1] && strcmp(scopes[0], "*") == 0)
		relay_section_fault(config, section, "resume",
							"\"*\" stands for all scopes; remove the others");
}

/*
 * Call a function with the common settings, then with those of each type.
 */
void
relay_sinks_describe(RelaySinksCallback describe)
{
	const RelaySinkType *const *type;

	describe("Of each sink:", common_settings);
	for (type = types; *type; type++)
	{
		char		title[64];

		snprintf(title, sizeof(title), "Of the sink \"%s\":", (*type)->name);
		if ((*type)->settings)
			describe(title, (*type)->settings);
	}
}

/*
 * Connect all sinks, one after another, for --check.  Returns false if any
 * cannot connect, after logging each of them.
 */
bool
relay_sinks_connect(const RelayRouting *routing)
{
	bool		all = true;
	RelaySink  *sink;
	char		why[512];

	for (sink = routing->first; sink; sink = sink->next)
	{
		sink->connected = sink->type->connect(sink, why, sizeof(why));
		if (sink->connected && sink->type->attach)
			sink->type->attach(sink);
		if (!sink->connected)
		{
			relay_log(RELAY_ERROR, "%s: sink \"%s\" cannot be reached: %s",
					  relay_section_where(sink->section, "url"), sink->name,
					  why);
			all = false;
		}
	}
	return all;
}

/*
 * Disconnect and release all sinks.
 */
void
relay_sinks_free(RelayRouting *routing)
{
	while (routing->first)
	{
		RelaySink  *sink = routing->first;

		routing->first = sink->next;
		if (sink->connected)
			sink->type->disconnect(sink);
		relay_config_free_list(sink->patterns);
		relay_config_free_list(sink->scopes);
		free(sink->state);
		free(sink->schedule);
		free(sink);
	}
	relay_config_free_list(routing->topics);
	routing->topics = NULL;
}
