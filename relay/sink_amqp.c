/*-------------------------------------------------------------------------
 *
 * sink_amqp.c
 *		RabbitMQ, or another broker of AMQP 0-9-1 that confirms.
 *
 * Every message is persistent and mandatory, on one channel in confirm mode.
 * It is delivered when the broker has confirmed it; refused when the broker
 * says so, or returns it because no queue is bound for it.  What is not
 * confirmed when the connection is lost, or in time, is tried again, and may
 * arrive twice.
 *
 * librabbitmq waits while it connects, up to "timeout".  After that a message
 * is handed over only while the socket takes data, and what comes is read as
 * it comes.  For the rest of a message that is larger than what the socket
 * takes librabbitmq waits again, up to the same time.
 *
 * A broker that is short of memory or disk says so, and confirms nothing until
 * that is over.  It is given nothing more, and what it has is left to it.
 *
 *-------------------------------------------------------------------------
 */
#include <amqp.h>
#include <amqp_framing.h>
#include <amqp_ssl_socket.h>
#include <amqp_tcp_socket.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "event.h"
#include "json.h"
#include "loop.h"
#include "sinks.h"
#include "text.h"

#define CHANNEL			1
#define FRAME_MAX		131072
#define HEARTBEAT		10
#define SHORT_TEXT		255		/* bytes of a name, at most */

typedef struct Amqp
{
	amqp_connection_state_t connection;
	int			fd;
	uint64_t	tag;			/* of the last message */
	bool		blocked;		/* by the broker, for want of memory or disk */
	int64_t		unblocked_at;
	bool		returning;		/* a message's properties come next */
	char		returned[512];	/* why */
} Amqp;

static const SettingDef settings[] = {
	{"url", SETTING_TEXT, NULL, 0, 0,
	"of the broker, as amqp://user:password@host:5672/vhost, or amqps://"},
	{"exchange", SETTING_TEXT, "", 0, 0,
	"to publish to; empty: the default one, to the queue of that name"},
	{"routing_key", SETTING_TEXT, "", 0, 0,
	"of all messages; empty: their topic"},
	{"ca_file", SETTING_TEXT, "", 0, 0,
	"certificates to trust, with amqps"},
	{"in_flight", SETTING_NUMBER, "500", 1, 10000,
	"how many messages are unconfirmed at a time"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static bool open_channel(Sink *sink, const struct amqp_connection_info *info,
						 struct timeval limit, char *why, size_t size);
static amqp_rpc_reply_t login(Sink *sink,
							  const struct amqp_connection_info *info);
static bool replied(amqp_rpc_reply_t reply, const char *what, char *why,
					size_t size);
static void socket_ready(void *argument, int fd, int events);
static void read_frames(Sink *sink);
static bool read_method(Sink *sink, const amqp_method_t *method);
static void confirmed(Sink *sink, uint64_t tag, bool multiple, bool ack);
static void note_return(Sink *sink, const amqp_basic_properties_t *properties);
static amqp_table_t make_headers(const Message *message, size_t most,
								 bool *sendable);
static void add_header(amqp_table_t *table, const char *name,
					   const char *value);
static void free_headers(amqp_table_t *table);

static void
amqp_configure(Sink *sink, Config *config)
{
	char	   *url = relay_copy(section_text(sink->section, "url"));
	struct amqp_connection_info info;

	amqp_default_connection_info(&info);
	if (amqp_parse_url(url, &info) != AMQP_STATUS_OK)
		config_fault(config, section_where(sink->section, "url"),
					 "\"url\" is no URL of AMQP; expected one like "
					 "amqp://user:password@localhost:5672/%%2f");
	if (strlen(section_text(sink->section, "routing_key")) > SHORT_TEXT)
		config_fault(config, section_where(sink->section, "routing_key"),
					 "\"routing_key\" is longer than %d bytes", SHORT_TEXT);
	else if (info.ssl && !*section_text(sink->section, "ca_file"))
		config_fault(config, section_where(sink->section, "url"),
					 "amqps needs \"ca_file = ...\", the certificates to "
					 "trust; those of the system may be in "
					 "/etc/ssl/certs/ca-certificates.crt");
	config_check_certificates(config, sink->section, "ca_file");
	free(url);
	sink->state = relay_alloc(sizeof(Amqp));
}

static bool
amqp_connect(Sink *sink, char *why, size_t size)
{
	Amqp	   *amqp = sink->state;
	char	   *url = relay_copy(section_text(sink->section, "url"));
	struct timeval limit = {
		.tv_sec = sink->timeout / 1000,
		.tv_usec = sink->timeout % 1000 * 1000
	};
	unsigned	patience = (unsigned) sink->timeout;
	struct amqp_connection_info info;
	amqp_socket_t *socket;
	bool		done = false;
	int			status;

	amqp_default_connection_info(&info);
	(void) amqp_parse_url(url, &info);
	memset(amqp, 0, sizeof(Amqp));
	amqp->connection = amqp_new_connection();
	socket = !amqp->connection ? NULL :
		info.ssl ? amqp_ssl_socket_new(amqp->connection) :
		amqp_tcp_socket_new(amqp->connection);
	if (!socket)
		relay_exit(RELAY_SYSTEM, "out of memory");
	status = !info.ssl ? AMQP_STATUS_OK :
		amqp_ssl_socket_set_cacert(socket, section_text(sink->section,
														"ca_file"));
	amqp_set_rpc_timeout(amqp->connection, &limit);
	amqp_set_handshake_timeout(amqp->connection, &limit);
	if (status == AMQP_STATUS_OK)
		status = amqp_socket_open_noblock(socket, info.host, info.port,
										  &limit);
	if (status != AMQP_STATUS_OK)
		snprintf(why, size, "%s port %d: %s", info.host, info.port,
				 amqp_error_string2(status));
	else
		done = open_channel(sink, &info, limit, why, size);
	free(url);
	if (!done)
	{
		amqp_destroy_connection(amqp->connection);
		amqp->connection = NULL;
		return false;
	}
	amqp->fd = amqp_get_sockfd(amqp->connection);
	/* A peer that takes nothing for so long is gone. */
	(void) setsockopt(amqp->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience,
					  sizeof(patience));
	loop_watch(amqp->fd, LOOP_READ, socket_ready, sink);
	return true;
}

static bool
open_channel(Sink *sink, const struct amqp_connection_info *info,
			 struct timeval limit, char *why, size_t size)
{
	Amqp	   *amqp = sink->state;
	const char *exchange = section_text(sink->section, "exchange");

	if (!replied(login(sink, info), "login", why, size))
		return false;
	amqp_channel_open(amqp->connection, CHANNEL);
	if (!replied(amqp_get_rpc_reply(amqp->connection), "channel", why, size))
		return false;
	if (*exchange)
	{
		amqp_exchange_declare(amqp->connection, CHANNEL,
							  amqp_cstring_bytes(exchange),
							  amqp_cstring_bytes("direct"), 1, 0, 0, 0,
							  amqp_empty_table);
		if (!replied(amqp_get_rpc_reply(amqp->connection), "exchange", why,
					 size))
			return false;
	}
	amqp_confirm_select(amqp->connection, CHANNEL);
	return replied(amqp_get_rpc_reply(amqp->connection), "confirms", why,
				   size);
}

/*
 * Log in as one that wants to be told when the broker is short of something.
 */
static amqp_rpc_reply_t
login(Sink *sink, const struct amqp_connection_info *info)
{
	Amqp	   *amqp = sink->state;
	amqp_table_entry_t blocked = {
		amqp_cstring_bytes("connection.blocked"),
		{.kind = AMQP_FIELD_KIND_BOOLEAN,.value = {.boolean = 1}}
	};
	amqp_table_entry_t capabilities = {
		amqp_cstring_bytes("capabilities"),
		{.kind = AMQP_FIELD_KIND_TABLE,.value = {.table = {1, &blocked}}}
	};
	const amqp_table_t properties = {1, &capabilities};

	return amqp_login_with_properties(amqp->connection, info->vhost, 0,
									  FRAME_MAX, HEARTBEAT, &properties,
									  AMQP_SASL_METHOD_PLAIN, info->user,
									  info->password);
}

/*
 * Whether the broker has said yes; if not, what it has said.
 */
static bool
replied(amqp_rpc_reply_t reply, const char *what, char *why, size_t size)
{
	if (reply.reply_type == AMQP_RESPONSE_NORMAL)
		return true;
	if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION)
		snprintf(why, size, "%s: %s", what,
				 amqp_error_string2(reply.library_error));
	else if (reply.reply_type == AMQP_RESPONSE_SERVER_EXCEPTION &&
			 reply.reply.id == AMQP_CHANNEL_CLOSE_METHOD)
	{
		const amqp_channel_close_t *close = reply.reply.decoded;

		snprintf(why, size, "%.*s", (int) close->reply_text.len,
				 (const char *) close->reply_text.bytes);
	}
	else if (reply.reply_type == AMQP_RESPONSE_SERVER_EXCEPTION &&
			 reply.reply.id == AMQP_CONNECTION_CLOSE_METHOD)
	{
		const amqp_connection_close_t *close = reply.reply.decoded;

		snprintf(why, size, "%.*s", (int) close->reply_text.len,
				 (const char *) close->reply_text.bytes);
	}
	else
		snprintf(why, size, "%s: no reply", what);
	return false;
}

static bool
amqp_can_take(Sink *sink)
{
	Amqp	   *amqp = sink->state;
	struct pollfd socket = {.fd = amqp->fd,.events = POLLOUT};

	if (poll(&socket, 1, 0) > 0)
		return true;
	loop_watch(amqp->fd, LOOP_READ | LOOP_WRITE, socket_ready, sink);
	return false;
}

static void
amqp_deliver(Sink *sink, Message *message)
{
	Amqp	   *amqp = sink->state;
	const char *exchange = section_text(sink->section, "exchange");
	const char *routing_key = section_text(sink->section, "routing_key");
	Text	   *body = text_new();
	size_t		most = (size_t) amqp_get_frame_max(amqp->connection) / 2;
	amqp_basic_properties_t properties = {
		._flags = AMQP_BASIC_CONTENT_TYPE_FLAG |
		AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_MESSAGE_ID_FLAG |
		AMQP_BASIC_TYPE_FLAG | AMQP_BASIC_APP_ID_FLAG |
		AMQP_BASIC_HEADERS_FLAG,
		.delivery_mode = 2,		/* persistent */
	};
	amqp_bytes_t content;
	bool		sendable = true;
	int			status;

	event_body(message, body);
	content.bytes = body->data;
	content.len = body->len;
	properties.content_type = amqp_cstring_bytes(event_content_type(message));
	properties.message_id = amqp_cstring_bytes(message->message_id);
	properties.type = amqp_cstring_bytes(message->topic);
	properties.app_id = amqp_cstring_bytes("idem-relay");
	properties.headers = make_headers(message, most, &sendable);
	message->delivery = NULL;
	if (strlen(message->topic) > SHORT_TEXT)
		sink_refused(message, -1, "its topic is longer than %d bytes, which "
					 "AMQP does not take", SHORT_TEXT);
	else if (!sendable)
		sink_refused(message, -1, "its headers and key do not fit into a "
					 "frame of AMQP, or have names longer than %d bytes",
					 SHORT_TEXT);
	else
	{
		message->tag = ++amqp->tag;
		if (!*routing_key)
			routing_key = message->topic;
		status = amqp_basic_publish(amqp->connection, CHANNEL,
									amqp_cstring_bytes(exchange),
									amqp_cstring_bytes(routing_key), 1, 0,
									&properties, content);
		if (status != AMQP_STATUS_OK)
			sink_down(sink, "%s", amqp_error_string2(status));
	}
	free_headers(&properties.headers);
	text_free(body);
}

static void
socket_ready(void *argument, int fd, int events)
{
	Sink	   *sink = argument;
	Amqp	   *amqp = sink->state;

	/* Who waits to write says so again. */
	loop_watch(amqp->fd, LOOP_READ, socket_ready, sink);
	read_frames(sink);
}

/*
 * Read all that has come.
 */
static void
read_frames(Sink *sink)
{
	Amqp	   *amqp = sink->state;
	struct timeval none = {0};
	amqp_frame_t frame;
	int			status;

	while ((status = amqp_simple_wait_frame_noblock(amqp->connection, &frame,
													&none)) == AMQP_STATUS_OK)
	{
		if (frame.frame_type == AMQP_FRAME_METHOD)
		{
			if (!read_method(sink, &frame.payload.method))
				return;
		}
		else if (frame.frame_type == AMQP_FRAME_HEADER && amqp->returning)
			note_return(sink, frame.payload.properties.decoded);
		amqp_maybe_release_buffers(amqp->connection);
	}
	if (status != AMQP_STATUS_TIMEOUT)
		sink_down(sink, "%s", amqp_error_string2(status));
}

/*
 * False: the connection is gone.
 */
static bool
read_method(Sink *sink, const amqp_method_t *method)
{
	Amqp	   *amqp = sink->state;

	switch (method->id)
	{
		case AMQP_BASIC_ACK_METHOD:
			{
				const amqp_basic_ack_t *ack = method->decoded;

				confirmed(sink, ack->delivery_tag, ack->multiple, true);
				break;
			}
		case AMQP_BASIC_NACK_METHOD:
			{
				const amqp_basic_nack_t *nack = method->decoded;

				confirmed(sink, nack->delivery_tag, nack->multiple, false);
				break;
			}
		case AMQP_BASIC_RETURN_METHOD:
			{
				const amqp_basic_return_t *back = method->decoded;

				amqp->returning = true;
				snprintf(amqp->returned, sizeof(amqp->returned),
						 "%.*s: no queue is bound to exchange \"%.*s\" for "
						 "routing key \"%.*s\"",
						 (int) back->reply_text.len,
						 (const char *) back->reply_text.bytes,
						 (int) back->exchange.len,
						 (const char *) back->exchange.bytes,
						 (int) back->routing_key.len,
						 (const char *) back->routing_key.bytes);
				break;
			}
		case AMQP_CONNECTION_BLOCKED_METHOD:
			amqp->blocked = true;
			sink_pause(sink, "the broker is short of memory or disk");
			break;
		case AMQP_CONNECTION_UNBLOCKED_METHOD:
			amqp->blocked = false;
			amqp->unblocked_at = relay_now();
			sink_resume(sink);
			break;
		case AMQP_CHANNEL_CLOSE_METHOD:
			{
				const amqp_channel_close_t *close = method->decoded;

				sink_down(sink, "%.*s", (int) close->reply_text.len,
						  (const char *) close->reply_text.bytes);
				return false;
			}
		case AMQP_CONNECTION_CLOSE_METHOD:
			{
				const amqp_connection_close_t *close = method->decoded;

				sink_down(sink, "%.*s", (int) close->reply_text.len,
						  (const char *) close->reply_text.bytes);
				return false;
			}
		default:
			break;
	}
	return true;
}

/*
 * The broker has got that message, or all up to it, or refuses.  A message
 * that it has returned is confirmed, too.
 */
static void
confirmed(Sink *sink, uint64_t tag, bool multiple, bool ack)
{
	Message    *message = sink->flying.first;

	/* In the order of their tags. */
	while (message && message->tag <= tag)
	{
		Message    *next = message->next;
		char	   *returned = message->delivery;

		if (multiple || message->tag == tag)
		{
			message->delivery = NULL;
			if (returned)
				sink_refused(message, -1, "%s", returned);
			else if (ack)
				sink_delivered(message);
			else
				sink_refused(message, -1, "the broker has refused it");
			free(returned);
		}
		message = next;
	}
}

static void
note_return(Sink *sink, const amqp_basic_properties_t *properties)
{
	Amqp	   *amqp = sink->state;
	Message    *message = sink->flying.first;

	amqp->returning = false;
	while (message &&
		   (strlen(message->message_id) != properties->message_id.len ||
			memcmp(message->message_id, properties->message_id.bytes,
				   properties->message_id.len) != 0))
		message = message->next;
	if (message && !message->delivery)
		message->delivery = relay_copy(amqp->returned);
}

/*
 * The message's headers, and what has no property of its own, if that takes no
 * more bytes than that.
 */
static amqp_table_t
make_headers(const Message *message, size_t most, bool *sendable)
{
	amqp_table_t table = {0, NULL};
	const char *at = message->headers;
	size_t		size = 0;

	if (message->key)
	{
		size = strlen(message->key);
		*sendable = size <= most;
		add_header(&table, "message_key", message->key);
	}
	if (at)
	{
		Text	   *name = text_new();
		Text	   *value = text_new();

		while (json_member(&at, name, value))
		{
			size += name->len + value->len + 16;
			if (name->len > SHORT_TEXT || size > most)
			{
				*sendable = false;
				break;
			}
			add_header(&table, name->data, value->data);
		}
		text_free(name);
		text_free(value);
	}
	return table;
}

static void
add_header(amqp_table_t *table, const char *name, const char *value)
{
	amqp_table_entry_t *entry;

	table->entries = relay_resize(table->entries,
								  (size_t) (table->num_entries + 1) *
								  sizeof(amqp_table_entry_t));
	entry = &table->entries[table->num_entries++];
	entry->key = amqp_cstring_bytes(relay_copy(name));
	entry->value.kind = AMQP_FIELD_KIND_UTF8;
	entry->value.value.bytes = amqp_cstring_bytes(relay_copy(value));
}

static void
free_headers(amqp_table_t *table)
{
	int			i;

	for (i = 0; i < table->num_entries; i++)
	{
		free(table->entries[i].key.bytes);
		free(table->entries[i].value.value.bytes.bytes);
	}
	free(table->entries);
}

/*
 * Heartbeats, and confirms that do not come.
 */
static void
amqp_work(Sink *sink, int64_t now)
{
	const Amqp *amqp = sink->state;
	const Message *oldest;
	int64_t		since;

	read_frames(sink);
	oldest = sink->flying.first;
	if (!sink->connected || !oldest || amqp->blocked)
		return;
	since = oldest->handed_at > amqp->unblocked_at ? oldest->handed_at :
		amqp->unblocked_at;
	if (now - since >= sink->timeout)
		sink_down(sink, "no confirm within %g s",
				  (double) sink->timeout / 1000);
	else
		loop_wake_at(since + sink->timeout);
}

static void
amqp_disconnect(Sink *sink)
{
	Amqp	   *amqp = sink->state;
	Message    *message;

	for (message = sink->flying.first; message; message = message->next)
	{
		free(message->delivery);
		message->delivery = NULL;
	}
	loop_forget(amqp->fd);
	amqp_destroy_connection(amqp->connection);
	amqp->connection = NULL;
}

static void
amqp_free(Sink *sink)
{
	free(sink->state);
	sink->state = NULL;
}

const SinkType amqp_sink = {
	"amqp", settings, amqp_configure, amqp_connect, amqp_can_take,
	amqp_deliver, amqp_work, amqp_disconnect, amqp_free
};
