/*-------------------------------------------------------------------------
 *
 * sink_nats.c
 *		Sink: NATS JetStream.
 *
 * A message is delivered when the stream has confirmed that it is stored.  Its
 * id is the header Nats-Msg-Id, by which the stream recognises a repeat within
 * its duplicate window.  Its other properties are headers, too.
 *
 * The answer to a message arrives at a subject of its own, which ends with the
 * message id.  The library could track these answers, but it would keep each
 * message that is never answered until the connection ends.
 *
 * The library has its own threads.  They put answers into a Mailbox, and wake
 * the event loop through its descriptor.  It does not connect again by itself:
 * connect.c does that.
 *
 * The sink's "state" is a Nats, which owns the connection.  The callers are
 * sinks.c, dispatch.c and sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <nats/nats.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "clock.h"
#include "deadline.h"
#include "event.h"
#include "json.h"
#include "memory.h"
#include "sink_nats.h"
#include "text.h"

#define LONGEST_SUBJECT		1024
#define LONGEST_REPLY		256

/* A confirm, or what went wrong. */
typedef struct Answer
{
	char	   *message_id;
	char	   *error;			/* NULL: confirmed */
	struct Answer *next;
} Answer;

/*
 * Threads can still use a mailbox after their connection is closed, so it is
 * never released.
 */
typedef struct Mailbox
{
	pthread_mutex_t lock;		/* of all that follows, but "fd" */
	Answer	   *first;
	Answer	  **end;
	bool		closed;			/* the connection is lost */
	int			fd;				/* readable if there is something */
	struct Mailbox *next;
} Mailbox;

typedef struct Nats
{
	natsConnection *connection;
	natsSubscription *answers;
	natsInbox  *inbox;			/* the subject before the message id */
	Mailbox    *mailbox;
} Nats;

static const RelaySettingDef settings[] = {
	{"url", RELAY_TEXT, NULL,
	"of the servers, with commas: nats:// or tls://"},
	{"user", RELAY_TEXT, "", "name for the login"},
	{"password", RELAY_TEXT, "", "its password"},
	{"password_file", RELAY_TEXT, "",
	"file with it; a relative path names a credential of systemd"},
	{"credentials_file", RELAY_TEXT, "", "file with a JWT and its key"},
	{"ca_file", RELAY_TEXT, "",
	"certificates to trust, instead of the system's"},
	{"cert_file", RELAY_TEXT, "", "certificate to show to the server"},
	{"key_file", RELAY_TEXT, "", "its key"},
	{"subject", RELAY_TEXT, "", "of all messages; empty: their topic"},
	{"in_flight", RELAY_NUMBER, "500", "how many at once", 1, 10000},
	{"max_size", RELAY_BYTES, "900kB",
	"of a payload; larger ones are refused", 1, INT64_C(1) << 30},
	{NULL}
};

/* Every mailbox, so that none is lost. */
static Mailbox *mailboxes;

static natsStatus set_options(const RelaySection *section,
							  natsOptions *options);
static void connection_closed(natsConnection *connection, void *argument);
static void answered(natsConnection *connection,
					 natsSubscription * subscription, natsMsg *message,
					 void *argument);
static char *answer_error(natsMsg *message);
static bool find_member(const char *object, const char *member,
						RelayText *value);
static void wake(const Mailbox *mailbox);
static void release(Nats *nats);
static void read_mailbox(void *argument, int fd, int events);
static void report(const RelaySink *sink, const Answer *answer);
static bool is_subject(const char *subject);
static bool is_reserved(const char *subject);
static natsStatus add_headers(natsMsg *native, const RelayMessage *message);
static bool is_header(const char *name, const char *value);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	RelaySection *section = sink->section;
	const char *subject = relay_section_text(section, "subject");
	const char *url = relay_section_text(section, "url");

	sink->state = relay_alloc(sizeof(Nats));
	relay_config_read_secret(config, section, "password");
	if (strncmp(url, "nats://", 7) != 0 && strncmp(url, "tls://", 6) != 0)
		relay_section_fault(config, section, "url", "\"url\" is no URL of "
							"NATS; expected one like nats://localhost:4222");
	if (*subject && !is_subject(subject))
		relay_section_fault(config, section, "subject", "\"subject\" is to "
							"be words with full stops between them, without "
							"blanks and wildcards");
	relay_config_check_certificates(config, section, "ca_file");
	relay_config_check_certificates(config, section, "cert_file");
	relay_config_check_certificates(config, section, "key_file");
	if (!*relay_section_text(section, "cert_file") !=
		!*relay_section_text(section, "key_file"))
		relay_section_fault(config, section, "cert_file",
							"set \"cert_file\" and \"key_file\", or neither");
}

/*
 * Implement RelaySinkType.connect.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Nats	   *nats = sink->state;
	const char *url = relay_section_text(sink->section, "url");
	natsOptions *options = NULL;
	natsStatus	status;
	char		subject[LONGEST_REPLY];
	int64_t		began = relay_now();
	int64_t		limit = sink->timeout * 2;
	timer_t		timer;

	if (!nats->mailbox)
	{
		int			fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

		if (fd < 0)
		{
			snprintf(why, size, "%s", strerror(errno));
			return false;
		}
		nats->mailbox = relay_alloc(sizeof(Mailbox));
		pthread_mutex_init(&nats->mailbox->lock, NULL);
		nats->mailbox->end = &nats->mailbox->first;
		nats->mailbox->fd = fd;
		nats->mailbox->next = mailboxes;
		mailboxes = nats->mailbox;
	}
	nats->mailbox->closed = false;
	/* Time for a TLS handshake, and for the other steps of each server. */
	while ((url = strchr(url, ',')))
	{
		limit += sink->timeout;
		url++;
	}
	/* The library waits for a TLS handshake without limit. */
	if (!relay_deadline_set(&timer, limit, sink->timeout, -1))
	{
		snprintf(why, size, "could not set a timer: %s", strerror(errno));
		return false;
	}
	status = natsOptions_Create(&options);
	if (status == NATS_OK)
		status = set_options(sink->section, options);
	if (status == NATS_OK)
		status = natsOptions_SetTimeout(options, sink->timeout);
	/* Otherwise a server that does not read would block the loop for ever. */
	if (status == NATS_OK)
		status = natsOptions_SetWriteDeadline(options, sink->timeout);
	if (status == NATS_OK)
		status = natsOptions_SetClosedCB(options, connection_closed,
										 nats->mailbox);
	if (status == NATS_OK)
		status = natsConnection_Connect(&nats->connection, options);
	relay_deadline_clear(timer);
	if (status == NATS_SSL_ERROR && relay_now() - began >= limit)
		status = NATS_TIMEOUT;
	natsOptions_Destroy(options);
	if (status == NATS_OK)
		status = natsInbox_Create(&nats->inbox);
	if (status == NATS_OK)
	{
		snprintf(subject, sizeof(subject), "%s.*", nats->inbox);
		status = natsConnection_Subscribe(&nats->answers, nats->connection,
										  subject, answered, nats->mailbox);
	}
	if (status == NATS_OK)
		return true;
	snprintf(why, size, "%s", natsStatus_GetText(status));
	release(nats);
	return false;
}

/*
 * Set the options of a connection that the configuration has.
 */
static natsStatus
set_options(const RelaySection *section, natsOptions *options)
{
	const char *user = relay_section_text(section, "user");
	const char *password = relay_section_text(section, "password");
	const char *credentials = relay_section_text(section, "credentials_file");
	const char *ca_file = relay_section_text(section, "ca_file");
	const char *cert_file = relay_section_text(section, "cert_file");
	char	  **urls = relay_config_list(relay_section_text(section, "url"));
	natsStatus	status;
	int			count = 0;

	while (urls[count])
		count++;
	status = natsOptions_SetServers(options, (const char **) urls, count);
	relay_config_free_list(urls);
	if (status == NATS_OK)
		status = natsOptions_SetAllowReconnect(options, false);
	if (status == NATS_OK)
		status = natsOptions_SetName(options, "idem-relay");
	if (status == NATS_OK)
		status = natsOptions_SetPingInterval(options, 5000);
	if (status == NATS_OK)
		status = natsOptions_SetMaxPingsOut(options, 2);
	if (status == NATS_OK && *user)
		status = natsOptions_SetUserInfo(options, user, password);
	if (status == NATS_OK && *credentials)
		status = natsOptions_SetUserCredentialsFromFiles(options, credentials,
														 NULL);
	if (status == NATS_OK && *ca_file)
		status = natsOptions_LoadCATrustedCertificates(options, ca_file);
	if (status == NATS_OK && *cert_file)
	{
		const char *key_file = relay_section_text(section, "key_file");

		status = natsOptions_LoadCertificatesChain(options, cert_file,
												   key_file);
	}
	return status;
}

/*
 * Implement RelaySinkType.attach.
 */
static void
attach_sink(RelaySink *sink)
{
	const Nats *nats = sink->state;

	relay_loop_watch(sink->loop, nats->mailbox->fd, RELAY_LOOP_READ,
					 read_mailbox, sink);
}

/*
 * Note that the connection is lost.  A thread of the library calls this.
 */
static void
connection_closed(natsConnection *connection, void *argument)
{
	Mailbox    *mailbox = argument;

	pthread_mutex_lock(&mailbox->lock);
	mailbox->closed = true;
	pthread_mutex_unlock(&mailbox->lock);
	wake(mailbox);
}

/*
 * Put the answer to a message into the mailbox.  A thread of the library calls
 * this.
 */
static void
answered(natsConnection *connection, natsSubscription * subscription,
		 natsMsg *message, void *argument)
{
	Mailbox    *mailbox = argument;
	Answer	   *answer = relay_alloc(sizeof(Answer));

	answer->message_id = relay_copy(strrchr(natsMsg_GetSubject(message),
											'.') + 1);
	answer->error = answer_error(message);
	natsMsg_Destroy(message);
	pthread_mutex_lock(&mailbox->lock);
	*mailbox->end = answer;
	mailbox->end = &answer->next;
	pthread_mutex_unlock(&mailbox->lock);
	wake(mailbox);
}

/*
 * Return the error in an answer, or NULL if it is the confirm of a stream.
 * The caller frees it.
 */
static char *
answer_error(natsMsg *message)
{
	size_t		length = (size_t) natsMsg_GetDataLength(message);
	RelayText  *json;
	RelayText  *stream;
	RelayText  *error;
	RelayText  *reason;
	char	   *result = NULL;

	if (natsMsg_IsNoResponders(message))
		return relay_copy("no stream has this subject, or JetStream does not "
						  "answer");
	json = relay_text_new();
	stream = relay_text_new();
	error = relay_text_new();
	reason = relay_text_new();
	if (length > 0)
		relay_text_add_bytes(json, natsMsg_GetData(message), length);
	if (find_member(json->data, "error", error) &&
		find_member(error->data, "description", reason))
		result = relay_copy(reason->data);
	/* Somebody else can answer, too, if no stream has the subject. */
	else if (!find_member(json->data, "stream", stream) || stream->len == 0)
		result = relay_copy("the answer is not that of a stream");
	relay_text_free(json);
	relay_text_free(stream);
	relay_text_free(error);
	relay_text_free(reason);
	return result;
}

/*
 * Find a member of a JSON object.  Returns false if it has none of this name.
 */
static bool
find_member(const char *object, const char *member, RelayText *value)
{
	RelayText  *name = relay_text_new();
	bool		found = false;

	while (!found && relay_json_read_member(&object, name, value))
		found = strcmp(name->data, member) == 0;
	relay_text_free(name);
	return found;
}

/*
 * Wake the event loop.
 */
static void
wake(const Mailbox *mailbox)
{
	(void) eventfd_write(mailbox->fd, 1);
}

/*
 * Process what has arrived.  The event loop calls this.
 */
static void
read_mailbox(void *argument, int fd, int events)
{
	RelaySink  *sink = argument;
	const Nats *nats = sink->state;
	Mailbox    *mailbox = nats->mailbox;
	Answer	   *answer;
	eventfd_t	value;
	bool		closed;

	(void) eventfd_read(fd, &value);
	pthread_mutex_lock(&mailbox->lock);
	answer = mailbox->first;
	mailbox->first = NULL;
	mailbox->end = &mailbox->first;
	closed = mailbox->closed;
	pthread_mutex_unlock(&mailbox->lock);
	while (answer)
	{
		Answer	   *next = answer->next;

		report(sink, answer);
		free(answer->message_id);
		free(answer->error);
		free(answer);
		answer = next;
	}
	if (closed && sink->connected)
		relay_sink_down(sink, "connection closed");
}

/*
 * Report the outcome of the message that an answer names, if it is in flight.
 */
static void
report(const RelaySink *sink, const Answer *answer)
{
	RelayMessage *message = sink->in_flight.first;

	while (message && !(answer->message_id &&
						strcmp(message->message_id, answer->message_id) == 0))
		message = message->next;
	if (message && answer->error)
		relay_sink_failed(message, RELAY_FAILED, 0, "%s", answer->error);
	else if (message)
		relay_sink_delivered(message);
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	const Nats *nats = sink->state;
	const char *subject = relay_section_text(sink->section, "subject");
	RelayText  *body;
	char		reply[LONGEST_REPLY];
	natsMsg    *native = NULL;
	natsStatus	status;

	if (!*subject)
		subject = message->topic;
	if (!is_subject(subject) ||
		(subject == message->topic && is_reserved(subject)))
	{
		relay_sink_refused(message, -1, "its topic is no subject of NATS");
		return;
	}
	body = relay_text_new();
	relay_event_body(message, body);
	snprintf(reply, sizeof(reply), "%s.%s", nats->inbox, message->message_id);
	status = natsMsg_Create(&native, subject, reply, body->data,
							(int) body->len);
	relay_text_free(body);
	if (status == NATS_OK)
		status = add_headers(native, message);
	if (status == NATS_INVALID_ARG)
		relay_sink_refused(message, -1, "its headers cannot be sent over "
						   "NATS, or are the relay's own");
	else
	{
		if (status == NATS_OK)
			status = natsConnection_PublishMsg(nats->connection, native);
		if (status == NATS_MAX_PAYLOAD)
			relay_sink_refused(message, -1, "it is larger than the server "
							   "allows");
		else if (status != NATS_OK)
			relay_sink_down(sink, "%s", natsStatus_GetText(status));
	}
	natsMsg_Destroy(native);
}

/*
 * Return whether a string is a subject to publish to: words with full stops
 * between them, without blanks and wildcards.
 */
static bool
is_subject(const char *subject)
{
	const char *c;

	if (strlen(subject) > LONGEST_SUBJECT)
		return false;
	for (c = subject; *c; c++)
	{
		if ((unsigned char) *c <= ' ' || *c == 0x7f || *c == '*' ||
			*c == '>' || (*c == '.' && (c == subject || c[1] == '.')))
			return false;
	}
	return c > subject && c[-1] != '.';
}

/*
 * Return whether a subject belongs to the server, as those of JetStream's API
 * do, or to a client that waits for a reply.  A publisher must not choose it.
 */
static bool
is_reserved(const char *subject)
{
	return subject[0] == '$' || strncmp(subject, "_INBOX.", 7) == 0;
}

/*
 * Add the relay's headers and the message's own.  Returns NATS_INVALID_ARG if
 * one of the latter is not valid or is reserved for the relay.
 */
static natsStatus
add_headers(natsMsg *native, const RelayMessage *message)
{
	const char *at = message->headers;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();
	natsStatus	status;

	status = natsMsgHeader_Set(native, "Nats-Msg-Id", message->message_id);
	if (status == NATS_OK)
		status = natsMsgHeader_Set(native, "content-type",
								   relay_event_content_type(message));
	if (status == NATS_OK)
		status = natsMsgHeader_Set(native, "topic", message->topic);
	if (status == NATS_OK && message->key && is_header("k", message->key))
		status = natsMsgHeader_Set(native, "message_key", message->key);
	while (at && status == NATS_OK &&
		   relay_json_read_member(&at, name, value))
		status = is_header(name->data, value->data) ?
			natsMsgHeader_Set(native, name->data, value->data) :
			NATS_INVALID_ARG;
	relay_text_free(name);
	relay_text_free(value);
	return status;
}

/*
 * Return whether a header can be sent, and is not the relay's.
 */
static bool
is_header(const char *name, const char *value)
{
	static const char *const reserved[] = {
		"content-type", "topic", "message_id", "message_key", NULL
	};
	const unsigned char *c;
	int			i;

	for (i = 0; reserved[i]; i++)
	{
		if (strcasecmp(name, reserved[i]) == 0)
			return false;
	}
	for (c = (const unsigned char *) name; *c; c++)
	{
		if (*c <= ' ' || *c >= 0x7f || *c == ':')
			return false;
	}
	return *name && strncasecmp(name, "nats-", 5) != 0 &&
		!value[strcspn(value, "\r\n")];
}

/*
 * Implement RelaySinkType.work: detect late confirms.
 */
static void
work(RelaySink *sink, int64_t now)
{
	RelayMessage *oldest = sink->in_flight.first;

	if (!oldest)
		return;
	if (now - oldest->handed_at < sink->timeout)
		relay_loop_wake_at(sink->loop, oldest->handed_at + sink->timeout);
	else if (sink->delivered_at > oldest->handed_at)
	{
		/* Others are confirmed, so it is its subject or its stream. */
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
	Nats	   *nats = sink->state;

	relay_loop_forget(sink->loop, nats->mailbox->fd);
	release(nats);
}

/*
 * Close the connection, and release what belongs to it.
 */
static void
release(Nats *nats)
{
	natsSubscription_Destroy(nats->answers);
	natsConnection_Destroy(nats->connection);
	natsInbox_Destroy(nats->inbox);
	nats->answers = NULL;
	nats->connection = NULL;
	nats->inbox = NULL;
}

const RelaySinkType relay_sink_nats = {
	"nats", settings, configure_sink, connect_sink, attach_sink, NULL,
	deliver, work, disconnect_sink
};
