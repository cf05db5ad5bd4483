/*-------------------------------------------------------------------------
 *
 * sink_webhook.c
 *		Sink: webhooks, with a POST for each message that is signed as the
 *		Standard Webhooks specification requires.
 *
 * The response is the outcome:
 *
 *	2xx						delivered, even if the body is cut off
 *	429, 503				deferred, at least for Retry-After
 *	other 5xx, timeout		failed; tried again after Retry-After
 *	410						deferred, and the sink is disabled
 *	other					refused; likewise
 *
 * Redirects are not followed, as the specification requires.
 *
 * The sink's "state" is a Webhook, which owns libcurl's connections.  A
 * message's "delivery" is the Delivery that owns its request.  The callers are
 * sinks.c, dispatch.c and sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "clock.h"
#include "event.h"
#include "json.h"
#include "memory.h"
#include "signature.h"
#include "sink_webhook.h"
#include "version.h"

#define MAX_SECRETS		4
#define MIN_SECRET		16		/* bytes */
#define SECRET_SIZE		256		/* bytes */
#define LONGEST_RETRY	3600	/* seconds of Retry-After */
#define ANSWER_SIZE		200		/* bytes of the response that are kept */
#define ANSWER_LIMIT	65536	/* bytes of the response that are read */
#define RESPONSE_LIMIT	(1 << 20)	/* likewise, if it completes a claim */
#define HEADERS_LIMIT	65536	/* bytes; libcurl fails beyond 1 MB */

typedef struct Webhook
{
	CURLM	   *multi;
	int64_t		timer;			/* when libcurl needs a call; -1: never */
	unsigned char secrets[MAX_SECRETS][SECRET_SIZE];
	int			secret_lengths[MAX_SECRETS];
	int			nsecrets;
} Webhook;

typedef struct Delivery
{
	RelayMessage *message;
	CURL	   *easy;			/* NULL: not begun */
	RelayText  *body;
	struct curl_slist *headers;
	size_t		headers_size;
	char		answer[ANSWER_SIZE + 1];
	size_t		length;			/* of "answer" */
	size_t		read;			/* bytes of the response */
} Delivery;

static const RelaySettingDef settings[] = {
	{"url", RELAY_TEXT, NULL, "of the endpoint, http or https"},
	{"secret", RELAY_TEXT, "",
	"to sign with, as whsec_ and base64; several with commas, to change it"},
	{"secret_file", RELAY_TEXT, "",
	"file with it; a relative path names a credential of systemd"},
	{"ca_file", RELAY_TEXT, "",
	"certificates to trust, instead of the system's"},
	{"cert_file", RELAY_TEXT, "", "certificate to show to the endpoint"},
	{"key_file", RELAY_TEXT, "", "its key"},
	{"in_flight", RELAY_NUMBER, "10", "how many at once", 1, 1000},
	{NULL}
};

static void read_secrets(RelaySink *sink, RelayConfig *config);
static int	watch_socket(CURL *easy, curl_socket_t socket, int events,
						 void *argument, void *unused);
static int	set_timer(CURLM *multi, long ms, void *argument);
static void socket_ready(void *argument, int fd, int events);
static bool add_headers(Delivery *delivery, const Webhook *webhook);
static bool add_message_headers(Delivery *delivery);
static void add_header(Delivery *delivery, const char *name,
					   const char *value);
static size_t keep_answer(char *data, size_t size, size_t n, void *argument);
static void end_deliveries(const Webhook *webhook);
static void report_outcome(Delivery *delivery, CURLcode code);
static void end_claim(Delivery *delivery, CURLcode code, long status);
static void release(const Webhook *webhook, Delivery *delivery);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	const char *url = relay_section_text(sink->section, "url");
	CURLU	   *parsed;
	char	   *scheme = NULL;

	sink->state = relay_alloc(sizeof(Webhook));
	/* libcurl counts these calls and the cleanups. */
	curl_global_init(CURL_GLOBAL_ALL);
	parsed = curl_url();
	if (curl_url_set(parsed, CURLUPART_URL, url, 0) != CURLUE_OK ||
		curl_url_get(parsed, CURLUPART_SCHEME, &scheme, 0) != CURLUE_OK ||
		(strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0))
		relay_section_fault(config, sink->section, "url",
							"\"url\" is no URL of http or https; expected one "
							"like https://example.com/hooks");
	curl_free(scheme);
	curl_url_cleanup(parsed);
	curl_global_cleanup();
	read_secrets(sink, config);
	relay_config_check_certificates(config, sink->section, "ca_file");
	relay_config_check_certificates(config, sink->section, "cert_file");
	relay_config_check_certificates(config, sink->section, "key_file");
	if (!*relay_section_text(sink->section, "cert_file") !=
		!*relay_section_text(sink->section, "key_file"))
		relay_section_fault(config, sink->section, "cert_file",
							"set \"cert_file\" and \"key_file\", or neither");
}

/*
 * Read the secrets, and count their faults.
 */
static void
read_secrets(RelaySink *sink, RelayConfig *config)
{
	Webhook    *webhook = sink->state;
	char	  **secrets;
	int			i;

	relay_config_read_secret(config, sink->section, "secret");
	secrets = relay_config_list(relay_section_text(sink->section, "secret"));
	for (i = 0; i < MAX_SECRETS && secrets[i]; i++)
	{
		webhook->secret_lengths[i] =
			relay_signature_read_secret(secrets[i], webhook->secrets[i],
										SECRET_SIZE);
		if (webhook->secret_lengths[i] < MIN_SECRET)
			relay_section_fault(config, sink->section, "secret",
								"\"secret\" must be whsec_ and at least 16 "
								"bytes in base64; make one with echo "
								"whsec_$(head -c 32 /dev/urandom | base64)");
	}
	webhook->nsecrets = i;
	if (secrets[i])
		relay_section_fault(config, sink->section, "secret",
							"\"secret\" has more than %d", MAX_SECRETS);
	relay_config_free_list(secrets);
}

/*
 * Implement RelaySinkType.connect.  libcurl connects for the first request.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Webhook    *webhook = sink->state;

	curl_global_init(CURL_GLOBAL_ALL);
	webhook->multi = curl_multi_init();
	if (!webhook->multi)
		relay_exit(RELAY_SYSTEM, "out of memory");
	webhook->timer = -1;
	curl_multi_setopt(webhook->multi, CURLMOPT_SOCKETFUNCTION, watch_socket);
	curl_multi_setopt(webhook->multi, CURLMOPT_SOCKETDATA, sink);
	curl_multi_setopt(webhook->multi, CURLMOPT_TIMERFUNCTION, set_timer);
	curl_multi_setopt(webhook->multi, CURLMOPT_TIMERDATA, sink);
	curl_multi_setopt(webhook->multi, CURLMOPT_MAXCONNECTS,
					  (long) sink->max_in_flight);
	return true;
}

/*
 * Watch a socket, or stop watching it.  libcurl calls this.
 */
static int
watch_socket(CURL *easy, curl_socket_t socket, int events, void *argument,
			 void *unused)
{
	RelaySink  *sink = argument;

	if (events == CURL_POLL_REMOVE || events == CURL_POLL_NONE)
		relay_loop_forget(sink->loop, socket);
	else
		relay_loop_watch(sink->loop, socket,
						 ((events & CURL_POLL_IN) ? RELAY_LOOP_READ : 0) |
						 ((events & CURL_POLL_OUT) ? RELAY_LOOP_WRITE : 0),
						 socket_ready, sink);
	return 0;
}

/*
 * Set the time of libcurl's next call, or none if "ms" is -1.  libcurl calls
 * this.
 */
static int
set_timer(CURLM *multi, long ms, void *argument)
{
	const RelaySink *sink = argument;
	Webhook    *webhook = sink->state;

	/* Never too early, because libcurl would not set it again. */
	webhook->timer = ms < 0 ? -1 : relay_now() + ms + (ms > 0);
	if (ms >= 0)
		relay_loop_wake_at(sink->loop, webhook->timer);
	return 0;
}

/*
 * Proceed with the requests of a socket.  The event loop calls this.
 */
static void
socket_ready(void *argument, int fd, int events)
{
	const RelaySink *sink = argument;
	const Webhook *webhook = sink->state;
	int			ready = (events & RELAY_LOOP_READ ? CURL_CSELECT_IN : 0) |
		(events & RELAY_LOOP_WRITE ? CURL_CSELECT_OUT : 0);
	int			running;

	curl_multi_socket_action(webhook->multi, fd, ready, &running);
	end_deliveries(webhook);
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	const Webhook *webhook = sink->state;
	Delivery   *delivery = relay_alloc(sizeof(Delivery));
	const char *ca_file = relay_section_text(sink->section, "ca_file");
	const char *cert_file = relay_section_text(sink->section, "cert_file");
	CURL	   *easy;

	message->delivery = delivery;
	delivery->message = message;
	delivery->body = relay_text_new();
	relay_event_body(message, delivery->body);
	if (!add_headers(delivery, webhook))
	{
		release(webhook, delivery);
		relay_sink_refused(message, -1, "its headers cannot be sent over "
						   "HTTP, are the relay's own, or are larger than "
						   "%d kB", HEADERS_LIMIT / 1024);
		return;
	}
	easy = delivery->easy = curl_easy_init();
	if (!easy)
		relay_exit(RELAY_SYSTEM, "out of memory");
	curl_easy_setopt(easy, CURLOPT_URL,
					 relay_section_text(sink->section, "url"));
	curl_easy_setopt(easy, CURLOPT_PRIVATE, delivery);
	curl_easy_setopt(easy, CURLOPT_POST, 1L);
	curl_easy_setopt(easy, CURLOPT_POSTFIELDS, delivery->body->data);
	curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE,
					 (curl_off_t) delivery->body->len);
	curl_easy_setopt(easy, CURLOPT_HTTPHEADER, delivery->headers);
	curl_easy_setopt(easy, CURLOPT_USERAGENT, "idem-relay/" RELAY_VERSION);
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long) sink->timeout);
	curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
	/* Otherwise the loop waits for a name server that does not answer. */
	curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
	/* One connection for each request, so that none ends with another. */
	curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);

	/*
	 * If a kept connection ends before the response, libcurl sends the
	 * request again.  The application might have used the claim token
	 * already, and a message that failed might be the cause.  A new
	 * connection must not be kept, because it would occupy a worker of the
	 * endpoint without use.
	 */
	if (message->claim_token || message->failures > 0)
	{
		curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L);
		curl_easy_setopt(easy, CURLOPT_FORBID_REUSE, 1L);
	}
	/* If this message needs a new connection, one that is not used ends. */
	curl_multi_setopt(webhook->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS,
					  (long) sink->in_flight.count);
	curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, keep_answer);
	curl_easy_setopt(easy, CURLOPT_WRITEDATA, delivery);
	if (*ca_file)
		curl_easy_setopt(easy, CURLOPT_CAINFO, ca_file);
	if (*cert_file)
	{
		curl_easy_setopt(easy, CURLOPT_SSLCERT, cert_file);
		curl_easy_setopt(easy, CURLOPT_SSLKEY,
						 relay_section_text(sink->section, "key_file"));
	}
	curl_multi_add_handle(webhook->multi, easy);
}

/*
 * Add the headers of the specification and of the message.  Returns false if
 * the message's headers cannot be sent.
 */
static bool
add_headers(Delivery *delivery, const Webhook *webhook)
{
	const RelayMessage *message = delivery->message;
	RelayText  *value = relay_text_new();
	char		seconds[32];
	const char *const parts[] = {
		message->message_id, seconds, delivery->body->data
	};
	int			i;

	snprintf(seconds, sizeof(seconds), "%lld", (long long) time(NULL));
	add_header(delivery, "Content-Type", relay_event_content_type(message));
	add_header(delivery, "webhook-id", message->message_id);
	add_header(delivery, "webhook-timestamp", seconds);
	for (i = 0; i < webhook->nsecrets; i++)
	{
		char		signature[RELAY_SIGNATURE_SIZE];

		relay_signature_make(webhook->secrets[i], webhook->secret_lengths[i],
							 parts, 3, signature);
		relay_text_addf(value, i ? " %s" : "%s", signature);
	}
	if (webhook->nsecrets > 0)
		add_header(delivery, "webhook-signature", value->data);
	relay_text_clear(value);
	relay_text_addf(value, "\"%s\"", message->message_id);
	add_header(delivery, "Idempotency-Key", value->data);
	add_header(delivery, "Expect", NULL);
	relay_text_free(value);
	return add_message_headers(delivery);
}

/*
 * Add the message's own headers.  Returns false if one is not valid in HTTP or
 * is reserved for the relay, or if all headers together are too large.
 */
static bool
add_message_headers(Delivery *delivery)
{
	static const char *const reserved[] = {
		"connection", "content-length", "content-type", "expect", "host",
		"idempotency-key", "transfer-encoding", "upgrade", NULL
	};
	static const char token[] = "abcdefghijklmnopqrstuvwxyz"
		"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~";
	const char *at = delivery->message->headers;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();
	bool		all = true;

	while (at && all && relay_json_read_member(&at, name, value))
	{
		const char *const *other = reserved;
		const unsigned char *c = (const unsigned char *) value->data;

		while (*other && strcasecmp(*other, name->data) != 0)
			other++;
		while (*c >= ' ' && *c != 0x7f)
			c++;
		all = !*other && !*c && name->len > 0 &&
			strncasecmp(name->data, "webhook-", 8) != 0 &&
			strspn(name->data, token) == name->len;
		if (all)
			add_header(delivery, name->data, value->data);
	}
	relay_text_free(name);
	relay_text_free(value);
	return all && delivery->headers_size <= HEADERS_LIMIT;
}

/*
 * Add a header to the request.  A NULL value removes a header that libcurl
 * would send by itself.
 */
static void
add_header(Delivery *delivery, const char *name, const char *value)
{
	RelayText  *line = relay_text_new();

	/* libcurl's notation for an empty value is a semicolon. */
	if (value && *value)
		relay_text_addf(line, "%s: %s", name, value);
	else
		relay_text_addf(line, value ? "%s;" : "%s:", name);
	delivery->headers = curl_slist_append(delivery->headers, line->data);
	delivery->headers_size += line->len;
	relay_text_free(line);
}

/*
 * Keep the beginning of the response's body, for the reason of a refusal.
 * Returns 0, which ends the transfer, if the body is too long.  libcurl calls
 * this.
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
	if (delivery->message->claim_token)
	{
		relay_text_add_bytes(delivery->message->response, data, size * n);
		return delivery->read > RESPONSE_LIMIT ? 0 : size * n;
	}
	return delivery->read > ANSWER_LIMIT ? 0 : size * n;
}

/*
 * Implement RelaySinkType.work: call libcurl if its timer has expired.
 */
static void
work(RelaySink *sink, int64_t now)
{
	Webhook    *webhook = sink->state;
	int			running;

	if (webhook->timer >= 0 && now >= webhook->timer)
	{
		webhook->timer = -1;
		curl_multi_socket_action(webhook->multi, CURL_SOCKET_TIMEOUT, 0,
								 &running);
		end_deliveries(webhook);
	}
	if (webhook->timer >= 0)
		relay_loop_wake_at(sink->loop, webhook->timer);
}

/*
 * Report and release all deliveries that have ended.
 */
static void
end_deliveries(const Webhook *webhook)
{
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
		report_outcome(delivery, code);
		release(webhook, delivery);
	}
}

/*
 * Report the outcome of a delivery that has ended.
 */
static void
report_outcome(Delivery *delivery, CURLcode code)
{
	RelayMessage *message = delivery->message;
	long		status = 0;
	long		sent = 0;
	long		proxy = 0;
	curl_off_t	after = 0;
	int64_t		ms;

	curl_easy_getinfo(delivery->easy, CURLINFO_RESPONSE_CODE, &status);
	curl_easy_getinfo(delivery->easy, CURLINFO_REQUEST_SIZE, &sent);
	curl_easy_getinfo(delivery->easy, CURLINFO_HTTP_CONNECTCODE, &proxy);
	curl_easy_getinfo(delivery->easy, CURLINFO_RETRY_AFTER, &after);
	ms = (int64_t) (after > LONGEST_RETRY ? LONGEST_RETRY : after) * 1000;
	delivery->answer[delivery->length] = '\0';
	if (message->claim_token && status >= 200 && status < 300)
		end_claim(delivery, code, status);
	else if (status >= 200 && status < 300)
		relay_sink_delivered(message);
	else if (status == 0 && proxy >= 300)
		relay_sink_failed(message, RELAY_UNSENT, 0, "the proxy answered with "
						  "status %ld", proxy);
	else if (code != CURLE_OK && sent == 0)
		relay_sink_failed(message, RELAY_UNSENT, 0, "%s",
						  curl_easy_strerror(code));
	else if (status < 200)
		relay_sink_failed(message, RELAY_FAILED, 0, "%s",
						  curl_easy_strerror(code));
	else if (status == 410)
	{
		relay_sink_disable(message->sink, "status 410");
		relay_sink_failed(message, RELAY_UNSENT, 0, "status 410: %s",
						  delivery->answer);
	}
	else if (status == 429 || status >= 500)
		relay_sink_failed(message, status == 429 || status == 503 ?
						  RELAY_DEFERRED : RELAY_FAILED, ms, "status %ld: %s",
						  status, delivery->answer);
	else
		relay_sink_refused(message, after > 0 ? ms : -1, "status %ld: %s",
						   status, delivery->answer);
}

/*
 * Report the outcome of a request that has completed a claim.  The whole
 * response must be known, because it will be replayed.
 */
static void
end_claim(Delivery *delivery, CURLcode code, long status)
{
	RelayMessage *message = delivery->message;
	const char *type = NULL;

	if (code != CURLE_OK)
	{
		relay_sink_failed(message, RELAY_FAILED, 0, "the response is not "
						  "complete, or larger than 1 MB: %s",
						  curl_easy_strerror(code));
		return;
	}
	curl_easy_getinfo(delivery->easy, CURLINFO_CONTENT_TYPE, &type);
	message->status = status;
	message->response_type = relay_copy(type);
	/* The text can be in any encoding. */
	relay_text_sanitize(message->response->data, false);
	if (message->response_type)
		relay_text_sanitize(message->response_type, false);
	relay_sink_delivered(message);
}

/*
 * Implement RelaySinkType.disconnect.
 */
static void
disconnect_sink(RelaySink *sink)
{
	const Webhook *webhook = sink->state;
	RelayMessage *message;

	for (message = sink->in_flight.first; message; message = message->next)
		release(webhook, message->delivery);
	curl_multi_cleanup(webhook->multi);
	curl_global_cleanup();
}

/*
 * Release a delivery.  If it has not ended, its request is cut off.
 */
static void
release(const Webhook *webhook, Delivery *delivery)
{
	if (delivery->easy)
	{
		curl_multi_remove_handle(webhook->multi, delivery->easy);
		curl_easy_cleanup(delivery->easy);
	}
	curl_slist_free_all(delivery->headers);
	relay_text_free(delivery->body);
	free(delivery);
}

const RelaySinkType relay_sink_webhook = {
	"webhook", settings, configure_sink, connect_sink, NULL, NULL,
	deliver, work, disconnect_sink
};
