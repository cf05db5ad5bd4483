/*-------------------------------------------------------------------------
 *
 * event.c
 *		What a message looks like to who consumes it: its payload, or a
 *		CloudEvent 1.0 in structured mode.
 *
 *-------------------------------------------------------------------------
 */
#include "event.h"
#include "json.h"
#include "sinks.h"
#include "text.h"

static void cloudevent(const Message *message, Text *body);

/*
 * Append the body that the sink's format asks for.
 */
void
event_body(const Message *message, Text *body)
{
	if (message->sink->cloudevents)
		cloudevent(message, body);
	else
		text_add_bytes(body, message->payload,
					   message->payload_length);
}

/*
 * Append a line that has all of a message, where there are no properties
 * beside the body.
 */
void
event_line(const Message *message, Text *line)
{
	if (message->sink->cloudevents)
		cloudevent(message, line);
	else
	{
		text_add(line, "{\"message_id\":");
		json_string(line, message->message_id);
		text_add(line, ",\"topic\":");
		json_string(line, message->topic);
		text_add(line, ",\"message_key\":");
		json_string(line, message->key);
		text_addf(line, ",\"attempt\":%d,\"created_at\":\"%s\","
				  "\"headers\":%s,\"payload\":", message->attempt,
				  message->created_at,
				  message->headers ? message->headers : "null");
		text_add_bytes(line, message->payload,
					   message->payload_length);
		text_add_char(line, '}');
	}
	text_add_char(line, '\n');
}

const char *
event_content_type(const Message *message)
{
	return message->sink->cloudevents ?
		"application/cloudevents+json; charset=utf-8" : "application/json";
}

/*
 * The topic is the type, the key the subject and, by the extension for that,
 * what events are to be partitioned by.
 */
static void
cloudevent(const Message *message, Text *body)
{
	text_add(body, "{\"specversion\":\"1.0\",\"id\":");
	json_string(body, message->message_id);
	text_add(body, ",\"source\":");
	json_string(body, message->sink->source);
	text_add(body, ",\"type\":");
	json_string(body, message->topic);
	if (message->key)
	{
		text_add(body, ",\"subject\":");
		json_string(body, message->key);
		text_add(body, ",\"partitionkey\":");
		json_string(body, message->key);
	}
	text_addf(body, ",\"time\":\"%s\",\"datacontenttype\":"
			  "\"application/json\",\"data\":", message->created_at);
	text_add_bytes(body, message->payload, message->payload_length);
	text_add_char(body, '}');
}
