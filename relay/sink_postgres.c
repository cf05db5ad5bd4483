/*-------------------------------------------------------------------------
 *
 * sink_postgres.c
 *		Sink: a function in another PostgreSQL database, which is called once
 *		for each message.
 *
 * The call and idem_once(group, message_id) are in one transaction.  So each
 * message has its effect exactly once, whichever process dies.
 *
 * The sink's "state" is a RelayPipeline.  The callers are sinks.c, dispatch.c
 * and sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <ctype.h>
#include <string.h>

#include "memory.h"
#include "pipeline.h"
#include "sink_postgres.h"
#include "text.h"

static const RelaySettingDef settings[] = {
	{"database", RELAY_TEXT, NULL, "connection string of the other database"},
	{"password", RELAY_TEXT, "", "of the other database"},
	{"password_file", RELAY_TEXT, "",
	"file with it; a relative path names a credential of systemd"},
	{"function", RELAY_TEXT, NULL,
		"to call with message_id uuid, topic text, message_key text, payload "
	"jsonb, headers jsonb"},
	{"group", RELAY_TEXT, NULL,
	"scope for idem_once; the same for all relays of this consumer"},
	{"batch", RELAY_NUMBER, "100", "messages of a transaction, at most",
	1, 10000},
	{"in_flight", RELAY_NUMBER, "400", "how many at once", 1, 10000},
	{NULL}
};

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	RelayPipeline *pipeline = relay_alloc(sizeof(RelayPipeline));
	const char *function = relay_section_text(sink->section, "function");
	const char *c;
	char	   *message = NULL;
	PQconninfoOption *options;

	sink->state = pipeline;
	pipeline->database = relay_section_text(sink->section, "database");
	relay_config_read_secret(config, sink->section, "password");
	pipeline->password = relay_section_text(sink->section, "password");
	pipeline->batch = (int) relay_section_number(sink->section, "batch");
	options = PQconninfoParse(pipeline->database, &message);
	/* A part that libpq quotes can belong to a password. */
	if (!options)
		relay_section_fault(config, sink->section, "database", "%.*s...",
							message ? (int) strcspn(message, "\n\"'") : 0,
							message ? message : "");
	PQfreemem(message);
	PQconninfoFree(options);
	c = function;
	while (*c && (isalnum((unsigned char) *c) || strchr("_.\"$", *c) ||
				  (unsigned char) *c >= 0x80))
		c++;
	if (!*function || *c)
		relay_section_fault(config, sink->section, "function",
							"\"function\" must be a name, with its schema "
							"and without arguments");
}

/*
 * Implement RelaySinkType.connect.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	RelayText  *statement = relay_text_new();
	bool		done;

	relay_text_addf(statement, "SELECT %s($2::uuid, $3::text, $4::text, "
					"$5::jsonb, $6::jsonb) FROM (SELECT %%s.idem_once"
					"($1::text, $2::text) AS is_first OFFSET 0) AS o "
					"WHERE o.is_first",
					relay_section_text(sink->section, "function"));
	done = relay_pipeline_connect(sink, statement->data, why, size);
	relay_text_free(statement);
	return done;
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	const char *const params[] = {
		relay_section_text(sink->section, "group"), message->message_id,
		message->topic, message->key, message->payload, message->headers
	};

	relay_pipeline_send(sink, message, params, 6);
}

const RelaySinkType relay_sink_postgres = {
	"postgres", settings, configure_sink, connect_sink, relay_pipeline_attach,
	NULL, deliver, relay_pipeline_work, relay_pipeline_disconnect
};
