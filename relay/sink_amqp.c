/*-------------------------------------------------------------------------
 *
 * sink_amqp.c
 *		Sink: RabbitMQ, or another AMQP 0-9-1 broker with publisher confirms.
 *
 * Every message is persistent and mandatory, on one channel in confirm mode.
 * It is delivered when the broker has confirmed it.  It is refused when the
 * broker rejects it, or returns it because no queue is bound for it.  If the
 * connection is lost or the confirm is late, the message is tried again, and
 * can arrive twice.
 *
 * librabbitmq waits while it connects, in a thread.  After that a message
 * is handed over only while the socket accepts data, and frames are read as
 * they arrive.  If a message is larger than what the socket accepts at once,
 * librabbitmq waits again for the rest.  deadline.c limits that to "timeout".
 *
 * A broker that is short of memory or disk announces that, and confirms
 * nothing until it announces the end.  Meanwhile the sink is paused, and the
 * messages in flight wait without a timeout.
 *
 * The sink's "state" is an Amqp, which owns the connection.  A message's "tag"
 * is its delivery tag, and its "delivery" is the reason of its return.  The
 * callers are sinks.c, dispatch.c and sink.c, through the RelaySinkType.
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
#include <unistd.h>

#include "clock.h"
#include "deadline.h"
#include "event.h"
#include "json.h"
#include "memory.h"
#include "sink_amqp.h"

#define CHANNEL			1
#define FRAME_MAX		131072	/* bytes */
#define HEARTBEAT		10		/* seconds */
#define SHORT_TEXT		255		/* bytes of a short string, at most */
#define SMALL			16384	/* bytes that fit into a free socket */

typedef struct Amqp
{
	amqp_connection_state_t connection;
	int			fd;
	uint64_t	tag;			/* of the last message */
	bool		blocked;		/* the broker is short of memory or disk */
	int64_t		unblocked_at;
	bool		returning;		/* a returned message's header comes next */
	char		returned[512];	/* why it is returned */
} Amqp;

static const RelaySettingDef settings[] = {
	{"url", RELAY_TEXT, NULL,
	"of the broker, as amqp://user:password@host:5672/vhost, or amqps://"},
	{"exchange", RELAY_TEXT, "",
	"to publish to; empty: the default one, to the queue of that name"},
	{"routing_key", RELAY_TEXT, "", "of all messages; empty: their topic"},
	{"password", RELAY_TEXT, "", "instead of that in the URL"},
	{"password_file", RELAY_TEXT, "",
	"file with it; a relative path names a credential of systemd"},
	{"ca_file", RELAY_TEXT, "",
	"certificates to trust, instead of the system's"},
	{"cert_file", RELAY_TEXT, "", "certificate to show to the broker"},
	{"key_file", RELAY_TEXT, "", "its key"},
	{"in_flight", RELAY_NUMBER, "500",
	"how many messages are unconfirmed at a time", 1, 10000},
	{NULL}
};

/*
 * Headers that the message's own cannot replace.  RabbitMQ also routes to what
 * CC and BCC name, and closes the channel if they are no lists.
 */
static const char *const reserved[] = {
	"message_id", "message_key", "CC", "BCC", NULL
};

static const char *ca_file(const RelaySection *section);
static bool open_channel(RelaySink *sink,
						 const struct amqp_connection_info *info, char *why,
						 size_t size);
static amqp_rpc_reply_t login(RelaySink *sink,
							  const struct amqp_connection_info *info);
static bool replied(amqp_rpc_reply_t reply, const char *what, char *why,
					size_t size);
static const amqp_bytes_t *close_reason(const amqp_method_t *method);
static bool blames_message(const amqp_method_t *method);
static amqp_table_t make_headers(const RelayMessage *message, size_t most,
								 bool *sendable);
static void add_header(amqp_table_t *table, const char *name,
					   const char *value);
static void free_headers(amqp_table_t *table);
static void socket_ready(void *argument, int fd, int events);
static void read_frames(RelaySink *sink);
static bool read_method(RelaySink *sink, const amqp_method_t *method);
static void confirmed(RelaySink *sink, uint64_t tag, bool multiple, bool ack);
static void note_return(RelaySink *sink,
						const amqp_basic_properties_t *properties);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	char	   *url = relay_copy(relay_section_text(sink->section, "url"));
	struct amqp_connection_info info;

	amqp_default_connection_info(&info);
	/* What is taken for a host can be a part of a password. */
	if (amqp_parse_url(url, &info) != AMQP_STATUS_OK || strchr(info.host, '@'))
		relay_section_fault(config, sink->section, "url",
							"\"url\" is no URL of AMQP; expected one like "
							"amqp://user:password@localhost:5672/%%2f");
	if (strlen(relay_section_text(sink->section, "routing_key")) > SHORT_TEXT)
		relay_section_fault(config, sink->section, "routing_key",
							"\"routing_key\" is longer than %d bytes",
							SHORT_TEXT);
	else if (info.ssl && !*ca_file(sink->section))
		relay_section_fault(config, sink->section, "url",
							"the certificates of the system were not found; "
							"set \"ca_file = ...\"");
	relay_config_read_secret(config, sink->section, "password");
	relay_config_check_certificates(config, sink->section, "ca_file");
	relay_config_check_certificates(config, sink->section, "cert_file");
	relay_config_check_certificates(config, sink->section, "key_file");
	if (!*relay_section_text(sink->section, "cert_file") !=
		!*relay_section_text(sink->section, "key_file"))
		relay_section_fault(config, sink->section, "cert_file",
							"set \"cert_file\" and \"key_file\", or neither");
	free(url);
	sink->state = relay_alloc(sizeof(Amqp));
}

/*
 * Return the path of the certificates to trust: those of the configuration, or
 * the system's.  Returns "" if there are none.
 */
static const char *
ca_file(const RelaySection *section)
{
	static const char *const paths[] = {
		"/etc/ssl/certs/ca-certificates.crt",	/* Debian */
		"/etc/pki/tls/certs/ca-bundle.crt", /* Fedora */
		"/etc/ssl/cert.pem",	/* Alpine */
		NULL
	};
	const char *configured = relay_section_text(section, "ca_file");
	const char *environment = getenv("SSL_CERT_FILE");
	int			i;

	if (*configured)
		return configured;
	if (environment && access(environment, R_OK) == 0)
		return environment;
	for (i = 0; paths[i]; i++)
	{
		if (access(paths[i], R_OK) == 0)
			return paths[i];
	}
	return "";
}

/*
 * Implement RelaySinkType.connect.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Amqp	   *amqp = sink->state;
	const RelaySection *section = sink->section;
	const char *cert_file = relay_section_text(section, "cert_file");
	char	   *url = relay_copy(relay_section_text(section, "url"));
	struct timeval limit = {
		.tv_sec = sink->timeout / 1000,
		.tv_usec = sink->timeout % 1000 * 1000
	};
	unsigned	patience = (unsigned) sink->timeout;
	struct amqp_connection_info info;
	amqp_socket_t *socket;
	int			status = AMQP_STATUS_OK;
	bool		done;

	amqp_default_connection_info(&info);
	(void) amqp_parse_url(url, &info);
	memset(amqp, 0, sizeof(Amqp));
	amqp->connection = amqp_new_connection();
	socket = !amqp->connection ? NULL :
		info.ssl ? amqp_ssl_socket_new(amqp->connection) :
		amqp_tcp_socket_new(amqp->connection);
	if (!socket)
		relay_exit(RELAY_SYSTEM, "out of memory");
	if (info.ssl)
		status = amqp_ssl_socket_set_cacert(socket, ca_file(section));
	if (info.ssl && status == AMQP_STATUS_OK && *cert_file)
		status = amqp_ssl_socket_set_key(socket, cert_file,
										 relay_section_text(section,
															"key_file"));
	amqp_set_rpc_timeout(amqp->connection, &limit);
	amqp_set_handshake_timeout(amqp->connection, &limit);
	if (status == AMQP_STATUS_OK)
		status = amqp_socket_open_noblock(socket, info.host, info.port,
										  &limit);
	if (status != AMQP_STATUS_OK)
		snprintf(why, size, "%s port %d: %s", info.host, info.port,
				 amqp_error_string2(status));
	done = status == AMQP_STATUS_OK && open_channel(sink, &info, why, size);
	free(url);
	if (!done)
	{
		amqp_destroy_connection(amqp->connection);
		return false;
	}
	amqp->fd = amqp_get_sockfd(amqp->connection);
	/* Limit the waits while the peer accepts no data. */
	(void) setsockopt(amqp->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &patience,
					  sizeof(patience));
	return true;
}

/*
 * Implement RelaySinkType.attach.
 */
static void
attach_sink(RelaySink *sink)
{
	const Amqp *amqp = sink->state;

	relay_loop_watch(sink->loop, amqp->fd, RELAY_LOOP_READ, socket_ready,
					 sink);
}

/*
 * Log in on an open socket, and open the channel in confirm mode.  Returns
 * false and writes the reason if the broker refuses.
 */
static bool
open_channel(RelaySink *sink, const struct amqp_connection_info *info,
			 char *why, size_t size)
{
	const Amqp *amqp = sink->state;
	const char *exchange = relay_section_text(sink->section, "exchange");

	if (!replied(login(sink, info), "login", why, size))
		return false;
	amqp_channel_open(amqp->connection, CHANNEL);
	if (!replied(amqp_get_rpc_reply(amqp->connection), "channel", why, size))
		return false;
	if (*exchange)
	{
		/* Passive: check that the exchange exists. */
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
 * Log in, and ask the broker to announce when it is short of resources.
 */
static amqp_rpc_reply_t
login(RelaySink *sink, const struct amqp_connection_info *info)
{
	const Amqp *amqp = sink->state;
	const char *password = relay_section_text(sink->section, "password");
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
									  *password ? password :
									  info->password);
}

/*
 * Return whether the broker has agreed.  If not, write what it has replied.
 */
static bool
replied(amqp_rpc_reply_t reply, const char *what, char *why, size_t size)
{
	const amqp_bytes_t *reason = NULL;

	if (reply.reply_type == AMQP_RESPONSE_NORMAL)
		return true;
	if (reply.reply_type == AMQP_RESPONSE_SERVER_EXCEPTION)
		reason = close_reason(&reply.reply);
	if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION)
		snprintf(why, size, "%s: %s", what,
				 amqp_error_string2(reply.library_error));
	else if (reason)
		snprintf(why, size, "%.*s", (int) reason->len,
				 (const char *) reason->bytes);
	else
		snprintf(why, size, "%s: no reply", what);
	return false;
}

/*
 * Return the reason if a method closes the channel or the connection, or NULL
 * if it does not.
 */
static const amqp_bytes_t *
close_reason(const amqp_method_t *method)
{
	if (method->id == AMQP_CHANNEL_CLOSE_METHOD)
		return &((const amqp_channel_close_t *) method->decoded)->reply_text;
	if (method->id == AMQP_CONNECTION_CLOSE_METHOD)
		return &((const amqp_connection_close_t *)
				 method->decoded)->reply_text;
	return NULL;
}

/*
 * Return whether the broker closes the channel or the connection because of
 * what was published, whatever the state of the broker.
 */
static bool
blames_message(const amqp_method_t *method)
{
	uint16_t	code;

	if (method->id == AMQP_CHANNEL_CLOSE_METHOD)
		code = ((const amqp_channel_close_t *) method->decoded)->reply_code;
	else
		code = ((const amqp_connection_close_t *)
				method->decoded)->reply_code;
	return code == AMQP_CONTENT_TOO_LARGE || code == AMQP_SYNTAX_ERROR ||
		code == AMQP_PRECONDITION_FAILED;
}

/*
 * Implement RelaySinkType.can_take: return whether the socket accepts data.
 */
static bool
can_take(RelaySink *sink)
{
	const Amqp *amqp = sink->state;
	struct pollfd socket = {.fd = amqp->fd,.events = POLLOUT};

	if (poll(&socket, 1, 0) > 0)
		return true;
	relay_loop_watch(sink->loop, amqp->fd, RELAY_LOOP_READ | RELAY_LOOP_WRITE,
					 socket_ready, sink);
	return false;
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	Amqp	   *amqp = sink->state;
	const char *exchange = relay_section_text(sink->section, "exchange");
	const char *routing_key = relay_section_text(sink->section, "routing_key");
	RelayText  *body;
	size_t		most = (size_t) amqp_get_frame_max(amqp->connection) / 2;
	bool		sendable = true;
	amqp_basic_properties_t properties = {
		._flags = AMQP_BASIC_CONTENT_TYPE_FLAG |
		AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_MESSAGE_ID_FLAG |
		AMQP_BASIC_TYPE_FLAG | AMQP_BASIC_APP_ID_FLAG |
		AMQP_BASIC_HEADERS_FLAG,
		.content_type = amqp_cstring_bytes(relay_event_content_type(message)),
		.delivery_mode = 2,		/* persistent */
		.message_id = amqp_cstring_bytes(message->message_id),
		.type = amqp_cstring_bytes(message->topic),
		.app_id = amqp_cstring_bytes("idem-relay"),
	};
	amqp_bytes_t content;
	int			status;

	message->delivery = NULL;
	if (relay_event_refuse_header(message, reserved))
		return;
	properties.headers = make_headers(message, most, &sendable);
	body = relay_text_new();
	relay_event_body(message, body);
	content.bytes = body->data;
	content.len = body->len;
	if (strlen(message->topic) > SHORT_TEXT)
		relay_sink_refused(message, -1, "its topic is longer than %d bytes, "
						   "which AMQP does not take", SHORT_TEXT);
	else if (!sendable)
		relay_sink_refused(message, -1, "its headers and key do not fit into "
						   "a frame of AMQP, or have names longer than %d "
						   "bytes", SHORT_TEXT);
	else
	{
		timer_t		timer;
		bool		is_limited = content.len > SMALL &&
			relay_deadline_set(&timer, sink->timeout, 0, amqp->fd);

		message->tag = ++amqp->tag;
		if (!*routing_key)
			routing_key = message->topic;
		status = amqp_basic_publish(amqp->connection, CHANNEL,
									amqp_cstring_bytes(exchange),
									amqp_cstring_bytes(routing_key), 1, 0,
									&properties, content);
		if (is_limited)
			relay_deadline_clear(timer);
		if (status != AMQP_STATUS_OK)
			relay_sink_down(sink, "%s", amqp_error_string2(status));
	}
	free_headers(&properties.headers);
	relay_text_free(body);
}

/*
 * Return a message's headers, with its key, which has no property of its own.
 * The caller releases them with free_headers().  If they need more than "most"
 * bytes or a name is too long, "sendable" becomes false, and headers can be
 * missing.
 */
static amqp_table_t
make_headers(const RelayMessage *message, size_t most, bool *sendable)
{
	amqp_table_t table = {0, NULL};
	const char *at = message->headers;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();
	size_t		size = 0;

	if (message->key)
	{
		size = strlen(message->key);
		*sendable = size <= most;
		add_header(&table, "message_key", message->key);
	}
	while (at && *sendable && relay_json_read_member(&at, name, value))
	{
		size += name->len + value->len + 16;
		*sendable = name->len <= SHORT_TEXT && size <= most;
		add_header(&table, name->data, value->data);
	}
	relay_text_free(name);
	relay_text_free(value);
	return table;
}

/*
 * Append a header with copies of its name and value.
 */
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

/*
 * Release the headers that make_headers() returned.
 */
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
 * Read what has arrived.  The event loop calls this.
 */
static void
socket_ready(void *argument, int fd, int events)
{
	RelaySink  *sink = argument;

	/* Stop waiting to write; can_take() starts that again if necessary. */
	relay_loop_watch(sink->loop, fd, RELAY_LOOP_READ, socket_ready, sink);
	read_frames(sink);
}

/*
 * Process all frames that have arrived.  The sink can be down afterwards.
 */
static void
read_frames(RelaySink *sink)
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
		relay_sink_down(sink, "%s", amqp_error_string2(status));
}

/*
 * Process a method.  Returns false if the sink is down afterwards.
 */
static bool
read_method(RelaySink *sink, const amqp_method_t *method)
{
	Amqp	   *amqp = sink->state;
	const amqp_bytes_t *reason = close_reason(method);
	const amqp_basic_ack_t *ack = method->decoded;
	const amqp_basic_nack_t *nack = method->decoded;
	const amqp_basic_return_t *back = method->decoded;

	if (reason)
	{
		(blames_message(method) ? relay_sink_closed : relay_sink_down)
			(sink, "%.*s", (int) reason->len, (const char *) reason->bytes);
		return false;
	}
	switch (method->id)
	{
		case AMQP_BASIC_ACK_METHOD:
			confirmed(sink, ack->delivery_tag, ack->multiple, true);
			break;
		case AMQP_BASIC_NACK_METHOD:
			confirmed(sink, nack->delivery_tag, nack->multiple, false);
			break;
		case AMQP_BASIC_RETURN_METHOD:
			amqp->returning = true;
			snprintf(amqp->returned, sizeof(amqp->returned),
					 "%.*s: no queue is bound to exchange \"%.*s\" for "
					 "routing key \"%.*s\"", (int) back->reply_text.len,
					 (const char *) back->reply_text.bytes,
					 (int) back->exchange.len,
					 (const char *) back->exchange.bytes,
					 (int) back->routing_key.len,
					 (const char *) back->routing_key.bytes);
			break;
		case AMQP_CONNECTION_BLOCKED_METHOD:
			amqp->blocked = true;
			relay_sink_pause(sink, "the broker is short of memory or disk");
			break;
		case AMQP_CONNECTION_UNBLOCKED_METHOD:
			amqp->blocked = false;
			amqp->unblocked_at = relay_now();
			relay_sink_resume(sink);
			break;
		default:
			break;
	}
	return true;
}

/*
 * Process a confirm of the message with that tag, or of all up to it.  With
 * "ack" false, the broker has rejected it.  A returned message is confirmed,
 * too, but refused.
 */
static void
confirmed(RelaySink *sink, uint64_t tag, bool multiple, bool ack)
{
	RelayMessage *message = sink->in_flight.first;

	/* They are in the order of their tags. */
	while (message && message->tag <= tag)
	{
		RelayMessage *next = message->next;
		char	   *returned = message->delivery;

		if (multiple || message->tag == tag)
		{
			message->delivery = NULL;
			if (returned)
				relay_sink_refused(message, -1, "%s", returned);
			else if (ack)
				relay_sink_delivered(message);
			else
				relay_sink_refused(message, -1, "the broker has refused it");
			free(returned);
		}
		message = next;
	}
}

/*
 * Store the reason of a return with the message that these properties name.
 */
static void
note_return(RelaySink *sink, const amqp_basic_properties_t *properties)
{
	Amqp	   *amqp = sink->state;
	RelayMessage *message = sink->in_flight.first;

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
 * Implement RelaySinkType.work: read heartbeats, and detect late confirms.
 */
static void
work(RelaySink *sink, int64_t now)
{
	const Amqp *amqp = sink->state;
	RelayMessage *oldest;
	int64_t		since;

	read_frames(sink);
	oldest = sink->in_flight.first;
	if (!sink->connected || !oldest || amqp->blocked)
		return;
	since = oldest->handed_at > amqp->unblocked_at ? oldest->handed_at :
		amqp->unblocked_at;
	if (now - since < sink->timeout)
		relay_loop_wake_at(sink->loop, since + sink->timeout);
	else if (sink->delivered_at > since)
	{
		/* Others are confirmed, so it is its queue.  Ignore a late confirm. */
		free(oldest->delivery);
		relay_sink_failed(oldest, RELAY_FAILED, 0, "no confirm within %g s",
						  (double) sink->timeout / 1000);
		relay_loop_wake_at(sink->loop, now);
	}
	else
		relay_sink_down(sink, "no confirm within %g s",
						(double) sink->timeout / 1000);
}

/*
 * Implement RelaySinkType.disconnect.
 */
static void
disconnect_sink(RelaySink *sink)
{
	const Amqp *amqp = sink->state;
	RelayMessage *message;

	for (message = sink->in_flight.first; message; message = message->next)
	{
		free(message->delivery);
		message->delivery = NULL;
	}
	relay_loop_forget(sink->loop, amqp->fd);
	amqp_destroy_connection(amqp->connection);
}

const RelaySinkType relay_sink_amqp = {
	"amqp", settings, configure_sink, connect_sink, attach_sink, can_take,
	deliver, work, disconnect_sink
};
