/*-------------------------------------------------------------------------
 *
 * event.c
 *		The form in which consumers receive a message: its payload, or a
 *		CloudEvent 1.0 in structured mode.
 *
 * The sink's setting "format" decides.  This file owns no state.  The sinks
 * call it.
 *
 *-------------------------------------------------------------------------
 */
#include <strings.h>

#include "event.h"
#include "json.h"
#include "sink.h"

static void add_cloudevent(const RelayMessage *message, RelayText *to);

/*
 * Append the body of a message.
 */
void
relay_event_body(const RelayMessage *message, RelayText *to)
{
	if (message->sink->cloudevents)
		add_cloudevent(message, to);
	else
		relay_text_add_bytes(to, message->payload, message->payload_length);
}

/*
 * Append a line of JSON that contains the whole message, for a sink that has
 * no place for properties beside the body.
 */
void
relay_event_line(const RelayMessage *message, RelayText *to)
{
	if (message->sink->cloudevents)
		add_cloudevent(message, to);
	else
	{
		relay_json_add_member(to, '{', "message_id", message->message_id);
		relay_json_add_member(to, ',', "topic", message->topic);
		relay_json_add_member(to, ',', "message_key", message->key);
		relay_text_addf(to, ",\"attempt\":%d,\"created_at\":\"%s\","
						"\"headers\":%s,\"payload\":", message->attempt,
						message->created_at,
						message->headers ? message->headers : "null");
		relay_text_add_bytes(to, message->payload, message->payload_length);
		relay_text_add_char(to, '}');
	}
	relay_text_add_char(to, '\n');
}

/*
 * Return the media type of the body.
 */
const char *
relay_event_content_type(const RelayMessage *message)
{
	return message->sink->cloudevents ?
		"application/cloudevents+json; charset=utf-8" : "application/json";
}

/*
 * Refuse a message in flight that has one of the "reserved" headers, in any
 * case, because a consumer could take it for the relay's own.  Returns false
 * if it has none.
 */
bool
relay_event_refuse_header(RelayMessage *message, const char *const *reserved)
{
	const char *at = message->headers;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();
	bool		found = false;
	int			i;

	while (at && !found && relay_json_read_member(&at, name, value))
	{
		for (i = 0; reserved[i] && !found; i++)
			found = strcasecmp(reserved[i], name->data) == 0;
	}
	if (found)
		relay_sink_refused(message, -1, "its header \"%s\" is the relay's own",
						   name->data);
	relay_text_free(name);
	relay_text_free(value);
	return found;
}

/*
 * Append a message as a CloudEvent.  The type is the topic.  The subject is
 * the key, and so is "partitionkey" of the partitioning extension.
 */
static void
add_cloudevent(const RelayMessage *message, RelayText *to)
{
	relay_json_add_member(to, '{', "specversion", "1.0");
	relay_json_add_member(to, ',', "id", message->message_id);
	relay_json_add_member(to, ',', "source", message->sink->source);
	relay_json_add_member(to, ',', "type", message->topic);
	if (message->key)
	{
		relay_json_add_member(to, ',', "subject", message->key);
		relay_json_add_member(to, ',', "partitionkey", message->key);
	}
	relay_text_addf(to, ",\"time\":\"%s\",\"datacontenttype\":"
					"\"application/json\",\"data\":", message->created_at);
	relay_text_add_bytes(to, message->payload, message->payload_length);
	relay_text_add_char(to, '}');
}
