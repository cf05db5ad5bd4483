/*-------------------------------------------------------------------------
 *
 * sink_webhook.c
 *		Webhooks: a POST for each message, signed as the Standard Webhooks
 *		specification has it.
 *
 * 2xx: delivered, whatever becomes of the answer's body.  429 and 503, or
 * where nothing could be sent: not now, whatever the message is, and not
 * before Retry-After.  Anything else, or no answer in time: not this message,
 * or nobody knows; it is tried again by itself, after Retry-After if there is
 * one.  Redirections are not followed, as that specification asks.
 *
 *-------------------------------------------------------------------------
 */
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "event.h"
#include "json.h"
#include "loop.h"
#include "signature.h"
#include "sinks.h"
#include "text.h"

#define MAX_SECRETS		4
#define SECRET_SIZE		256
#define LONGEST_RETRY	3600000
#define ANSWER_SIZE		200		/* that is kept */
#define ANSWER_LIMIT	65536	/* that is read */

typedef struct Webhook
{
	CURLM	   *multi;
	int64_t		timer;			/* when libcurl has something to do; -1 */
	unsigned char secrets[MAX_SECRETS][SECRET_SIZE];
	int			secret_lengths[MAX_SECRETS];
	int			nsecrets;
} Webhook;

typedef struct Delivery
{
	Message    *message;
	CURL	   *easy;
	Text	   *body;
	struct curl_slist *headers;
	char		answer[ANSWER_SIZE + 1];
	size_t		length;
	size_t		read;
} Delivery;

static const SettingDef settings[] = {
	{"url", SETTING_TEXT, NULL, 0, 0, "of the endpoint, http or https"},
	{"secret", SETTING_TEXT, "", 0, 0,
	"to sign with, as whsec_ and base64; several with commas, to change it"},
	{"ca_file", SETTING_TEXT, "", 0, 0,
	"certificates to trust, instead of the system's"},
	{"in_flight", SETTING_NUMBER, "10", 1, 1000, "how many at once"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static int	watch_socket(CURL *easy, curl_socket_t socket, int what,
						 void *argument, void *ours);
static int	set_timer(CURLM *multi, long ms, void *argument);
static void socket_ready(void *argument, int fd, int events);
static void end_deliveries(Sink *sink);
static void judge(Delivery *delivery, CURLcode code);
static bool add_headers(Delivery *delivery, const Webhook *webhook);
static bool add_own_headers(Delivery *delivery);
static void add_header(Delivery *delivery, const char *name,
					   const char *value);
static size_t keep_answer(char *data, size_t size, size_t n, void *argument);
static void release(const Webhook *webhook, Delivery *delivery);

/* Of all webhooks, so that a socket's callback finds its own. */
static int	nconfigured = 0;

static void
webhook_configure(Sink *sink, Config *config)
{
	Webhook    *webhook = relay_alloc(sizeof(Webhook));
	const char *url = section_text(sink->section, "url");
	char	  **secrets = config_list(section_text(sink->section, "secret"));
	CURLU	   *parsed;
	char	   *scheme = NULL;
	int			i;

	sink->state = webhook;
	if (nconfigured++ == 0)
		curl_global_init(CURL_GLOBAL_ALL);
	parsed = curl_url();
	if (curl_url_set(parsed, CURLUPART_URL, url, 0) != CURLUE_OK ||
		curl_url_get(parsed, CURLUPART_SCHEME, &scheme, 0) != CURLUE_OK ||
		(strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0))
		config_fault(config, section_where(sink->section, "url"),
					 "\"url\" is no URL of http or https; expected one like "
					 "https://example.com/hooks");
	curl_free(scheme);
	curl_url_cleanup(parsed);
	for (i = 0; secrets[i]; i++)
	{
		if (i == MAX_SECRETS)
		{
			config_fault(config, section_where(sink->section, "secret"),
						 "\"secret\" has more than %d", MAX_SECRETS);
			break;
		}
		webhook->secret_lengths[i] =
			signature_read_secret(secrets[i], webhook->secrets[i],
								  SECRET_SIZE);
		if (webhook->secret_lengths[i] < 16)
			config_fault(config, section_where(sink->section, "secret"),
						 "\"secret\" is to be whsec_ and at least 16 bytes in "
						 "base64; make one with "
						 "echo whsec_$(head -c 32 /dev/urandom | base64)");
		webhook->nsecrets++;
	}
	config_free_list(secrets);
	config_check_certificates(config, sink->section, "ca_file");
}

/*
 * Connections are made as there are messages.
 */
static bool
webhook_connect(Sink *sink, char *why, size_t size)
{
	Webhook    *webhook = sink->state;

	webhook->multi = curl_multi_init();
	if (!webhook->multi)
		relay_exit(RELAY_SYSTEM, "out of memory");
	webhook->timer = -1;
	curl_multi_setopt(webhook->multi, CURLMOPT_SOCKETFUNCTION, watch_socket);
	curl_multi_setopt(webhook->multi, CURLMOPT_SOCKETDATA, sink);
	curl_multi_setopt(webhook->multi, CURLMOPT_TIMERFUNCTION, set_timer);
	curl_multi_setopt(webhook->multi, CURLMOPT_TIMERDATA, webhook);
	curl_multi_setopt(webhook->multi, CURLMOPT_MAXCONNECTS,
					  (long) sink->in_flight);
	return true;
}

static void
webhook_deliver(Sink *sink, Message *message)
{
	Webhook    *webhook = sink->state;
	Delivery   *delivery = relay_alloc(sizeof(Delivery));
	const char *ca_file = section_text(sink->section, "ca_file");
	CURL	   *easy;

	message->delivery = delivery;
	delivery->message = message;
	delivery->body = text_new();
	event_body(message, delivery->body);
	if (!add_headers(delivery, webhook))
	{
		release(webhook, delivery);
		sink_refused(message, -1, "its headers cannot be sent over HTTP, or "
					 "are the relay's own");
		return;
	}
	easy = delivery->easy = curl_easy_init();
	if (!easy)
		relay_exit(RELAY_SYSTEM, "out of memory");
	curl_easy_setopt(easy, CURLOPT_URL, section_text(sink->section, "url"));
	curl_easy_setopt(easy, CURLOPT_PRIVATE, delivery);
	curl_easy_setopt(easy, CURLOPT_POST, 1L);
	curl_easy_setopt(easy, CURLOPT_POSTFIELDS, delivery->body->data);
	curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE,
					 (curl_off_t) delivery->body->len);
	curl_easy_setopt(easy, CURLOPT_HTTPHEADER, delivery->headers);
	curl_easy_setopt(easy, CURLOPT_USERAGENT, "idem-relay/" RELAY_VERSION);
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long) sink->timeout);
	curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, keep_answer);
	curl_easy_setopt(easy, CURLOPT_WRITEDATA, delivery);
	if (*ca_file)
		curl_easy_setopt(easy, CURLOPT_CAINFO, ca_file);
	curl_multi_add_handle(webhook->multi, easy);
}

static int
watch_socket(CURL *easy, curl_socket_t socket, int what, void *argument,
			 void *ours)
{
	if (what == CURL_POLL_REMOVE || what == CURL_POLL_NONE)
		loop_forget(socket);
	else
		loop_watch(socket, ((what & CURL_POLL_IN) ? LOOP_READ : 0) |
				   ((what & CURL_POLL_OUT) ? LOOP_WRITE : 0),
				   socket_ready, argument);
	return 0;
}

static int
set_timer(CURLM *multi, long ms, void *argument)
{
	Webhook    *webhook = argument;

	/* Never too early: libcurl would not say it again. */
	webhook->timer = ms < 0 ? -1 : relay_now() + ms + (ms > 0);
	if (ms >= 0)
		loop_wake_at(webhook->timer);
	return 0;
}

static void
socket_ready(void *argument, int fd, int events)
{
	Sink	   *sink = argument;
	Webhook    *webhook = sink->state;
	int			running;

	curl_multi_socket_action(webhook->multi, fd,
							 (events & LOOP_READ ? CURL_CSELECT_IN : 0) |
							 (events & LOOP_WRITE ? CURL_CSELECT_OUT : 0),
							 &running);
	end_deliveries(sink);
}

static void
webhook_work(Sink *sink, int64_t now)
{
	Webhook    *webhook = sink->state;
	int			running;

	if (webhook->timer >= 0 && now >= webhook->timer)
	{
		webhook->timer = -1;
		curl_multi_socket_action(webhook->multi, CURL_SOCKET_TIMEOUT, 0,
								 &running);
		end_deliveries(sink);
	}
	if (webhook->timer >= 0)
		loop_wake_at(webhook->timer);
}

/*
 * Judge all that have come to an end.
 */
static void
end_deliveries(Sink *sink)
{
	Webhook    *webhook = sink->state;
	CURLMsg    *done;
	int			left;

	while ((done = curl_multi_info_read(webhook->multi, &left)))
	{
		Delivery   *delivery;
		CURLcode	code = done->data.result;

		if (done->msg != CURLMSG_DONE)
			continue;
		curl_easy_getinfo(done->easy_handle, CURLINFO_PRIVATE,
						  (char **) &delivery);
		judge(delivery, code);
		release(webhook, delivery);
	}
}

static void
judge(Delivery *delivery, CURLcode code)
{
	Message    *message = delivery->message;
	long		status = 0;
	long		sent = 0;
	curl_off_t	after = 0;
	int64_t		ms;

	curl_easy_getinfo(delivery->easy, CURLINFO_RESPONSE_CODE, &status);
	curl_easy_getinfo(delivery->easy, CURLINFO_REQUEST_SIZE, &sent);
	curl_easy_getinfo(delivery->easy, CURLINFO_RETRY_AFTER, &after);
	ms = after > LONGEST_RETRY / 1000 ? LONGEST_RETRY : (int64_t) after * 1000;
	delivery->answer[delivery->length] = '\0';
	if (status >= 200 && status < 300)
		sink_delivered(message);
	else if (code != CURLE_OK && sent == 0)
		sink_put_off(message, 0, "%s", curl_easy_strerror(code));
	else if (status < 200)
		sink_refused(message, -1, "%s", curl_easy_strerror(code));
	else if (status == 429 || status == 503)
		sink_put_off(message, ms, "status %ld: %s", status, delivery->answer);
	else
		sink_refused(message, after > 0 ? ms : -1, "status %ld: %s", status,
					 delivery->answer);
}

/*
 * The headers of a webhook, and the message's.  False: those cannot be sent.
 */
static bool
add_headers(Delivery *delivery, const Webhook *webhook)
{
	const Message *message = delivery->message;
	Text	   *text = text_new();
	char		seconds[32];
	const char *const parts[] = {
		message->message_id, seconds, delivery->body->data
	};
	bool		all;
	int			i;

	snprintf(seconds, sizeof(seconds), "%lld", (long long) time(NULL));
	add_header(delivery, "Content-Type", event_content_type(message));
	add_header(delivery, "webhook-id", message->message_id);
	add_header(delivery, "webhook-timestamp", seconds);
	for (i = 0; i < webhook->nsecrets; i++)
	{
		char		signature[SIGNATURE_SIZE];

		signature_make(webhook->secrets[i], webhook->secret_lengths[i],
					   parts, 3, signature);
		text_addf(text, i ? " %s" : "%s", signature);
	}
	if (webhook->nsecrets > 0)
		add_header(delivery, "webhook-signature", text->data);
	text_clear(text);
	text_addf(text, "\"%s\"", message->message_id);
	add_header(delivery, "Idempotency-Key", text->data);
	add_header(delivery, "Expect", NULL);
	text_free(text);
	all = add_own_headers(delivery);
	return all;
}

static bool
add_own_headers(Delivery *delivery)
{
	static const char *const ours[] = {
		"connection", "content-length", "content-type", "expect", "host",
		"idempotency-key", "transfer-encoding", "upgrade", NULL
	};
	const char *at = delivery->message->headers;
	Text	   *name;
	Text	   *value;
	bool		all = true;

	if (!at)
		return true;
	name = text_new();
	value = text_new();
	while (all && json_member(&at, name, value))
	{
		const char *const *own = ours;
		const unsigned char *c = (const unsigned char *) value->data;

		while (*own && strcasecmp(*own, name->data) != 0)
			own++;
		while (*c >= ' ' && *c != 0x7f)
			c++;
		all = !*own && !*c && name->len > 0 &&
			strncasecmp(name->data, "webhook-", 8) != 0 &&
			strspn(name->data, "abcdefghijklmnopqrstuvwxyz"
				   "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~") ==
			name->len;
		if (all)
			add_header(delivery, name->data, value->data);
	}
	text_free(name);
	text_free(value);
	return all;
}

/*
 * Add a header; without a value it is one that libcurl is not to send.
 */
static void
add_header(Delivery *delivery, const char *name, const char *value)
{
	Text	   *line = text_new();

	/* What libcurl takes for an empty one ends in a semicolon. */
	if (value && *value)
		text_addf(line, "%s: %s", name, value);
	else
		text_addf(line, value ? "%s;" : "%s:", name);
	delivery->headers = curl_slist_append(delivery->headers, line->data);
	text_free(line);
}

/*
 * Keep the beginning of the answer, for the reason of a refusal.  One that
 * does not end is cut off.
 */
static size_t
keep_answer(char *data, size_t size, size_t n, void *argument)
{
	Delivery   *delivery = argument;
	size_t		keep = ANSWER_SIZE - delivery->length;

	if (keep > size * n)
		keep = size * n;
	memcpy(delivery->answer + delivery->length, data, keep);
	delivery->length += keep;
	delivery->read += size * n;
	return delivery->read > ANSWER_LIMIT ? 0 : size * n;
}

static void
webhook_disconnect(Sink *sink)
{
	Webhook    *webhook = sink->state;
	Message    *message;

	for (message = sink->flying.first; message; message = message->next)
		release(webhook, message->delivery);
	curl_multi_cleanup(webhook->multi);
	webhook->multi = NULL;
}

static void
release(const Webhook *webhook, Delivery *delivery)
{
	if (delivery->easy)
	{
		curl_multi_remove_handle(webhook->multi, delivery->easy);
		curl_easy_cleanup(delivery->easy);
	}
	curl_slist_free_all(delivery->headers);
	text_free(delivery->body);
	free(delivery);
}

static void
webhook_free(Sink *sink)
{
	/* A section with a fault was not configured. */
	if (sink->state && --nconfigured == 0)
		curl_global_cleanup();
	free(sink->state);
	sink->state = NULL;
}

const SinkType webhook_sink = {
	"webhook", settings, webhook_configure, webhook_connect, NULL,
	webhook_deliver, webhook_work, webhook_disconnect, webhook_free
};
