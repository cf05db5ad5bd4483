/*-------------------------------------------------------------------------
 *
 * harness.c
 *		The parsers of the relay, for libFuzzer.
 *
 * The environment variable PARSER names the one to call: configuration, uri,
 * json or response.  Each call gets the fuzzer's bytes as a client of the
 * relay would send them.  A result that is wrong ends the process, as a fault
 * that a sanitizer finds does.  See run.
 *
 *-------------------------------------------------------------------------
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "json.h"
#include "memory.h"
#include "queue.h"
#include "sinks.h"

#define check(condition) \
	do { if (!(condition)) wrong(#condition); } while (0)

typedef void (*Parser) (const char *data, size_t size);

static void parse_configuration(const char *data, size_t size);
static void parse_uri(const char *data, size_t size);
static void parse_json(const char *data, size_t size);
static void parse_response(const char *data, size_t size);
static void configure(int argc, char **argv);
static void begin_responses(void);
static void accept_request(void *argument, int fd, int events);
static void answer_request(void *argument, int fd, int events);
static bool is_utf8(const char *text);
static void wrong(const char *what);

static const struct
{
	const char *name;
	Parser		parse;
}			parsers[] = {
	{"configuration", parse_configuration},
	{"uri", parse_uri},
	{"json", parse_json},
	{"response", parse_response},
};

static Parser parser;
static char file_option[64];	/* of the configuration */
static int	file;

/* Of parse_response(). */
static RelayLoop loop;
static RelayQueue queue;
static RelaySink *webhook;
static const char *response;
static size_t response_size;

extern int	LLVMFuzzerInitialize(int *argc, char ***argv);
extern int	LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/*
 * Choose the parser.  libFuzzer calls this first.
 */
int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
	const char *name = getenv("PARSER");
	size_t		i;

	for (i = 0; i < sizeof(parsers) / sizeof(parsers[0]); i++)
	{
		if (name && strcmp(parsers[i].name, name) == 0)
			parser = parsers[i].parse;
	}
	check(parser);
	signal(SIGPIPE, SIG_IGN);
	file = memfd_create("configuration", 0);
	check(file >= 0 && fchmod(file, 0600) == 0);
	snprintf(file_option, sizeof(file_option), "--config=/proc/self/fd/%d",
			 file);
	if (parser == parse_response)
		begin_responses();
	return 0;
}

/*
 * Parse the fuzzer's bytes.  libFuzzer calls this.
 */
int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	parser((const char *) data, size);
	return 0;
}

/*
 * Read them as the file of a configuration, with all its sinks.
 */
static void
parse_configuration(const char *data, size_t size)
{
	char	   *argv[] = {"idem-relay", file_option, NULL};

	check(ftruncate(file, 0) == 0);
	check(pwrite(file, data, size, 0) == (ssize_t) size);
	configure(2, argv);
}

/*
 * Read them as one setting that has a syntax of its own.  The first byte says
 * which.
 */
static void
parse_uri(const char *data, size_t size)
{
	static const char *const settings[][2] = {
		{"amqp", "url"}, {"nats", "url"}, {"webhook", "url"},
		{"webhook", "secret"}, {"webhook", "retry"}, {"webhook", "topics"},
		{"webhook", "timeout"}, {"webhook", "max_size"}, {"kafka", "brokers"},
		{"postgres", "database"}, {"postgres", "function"},
	};
	const size_t count = sizeof(settings) / sizeof(settings[0]);
	const char *const *chosen;
	char		sink[64];
	char	   *value;
	char	   *argv[] = {
		"idem-relay", sink, "--s.url=http://localhost", "--s.topics=t", NULL,
		NULL
	};

	if (size < 1)
		return;
	chosen = settings[(unsigned char) data[0] % count];
	snprintf(sink, sizeof(sink), "--s.sink=%s", chosen[0]);
	value = malloc(size + 32);
	snprintf(value, size + 32, "--s.%s=%.*s", chosen[1], (int) size - 1,
			 data + 1);
	argv[4] = value;
	configure(5, argv);
	free(value);
}

/*
 * Read a configuration, and release it.
 */
static void
configure(int argc, char **argv)
{
	RelayConfig *config = relay_config_read(argc, argv, 0);
	RelayRouting routing = {0};

	relay_sinks_configure(&routing, config, NULL, NULL, NULL);
	check(config->nfaults >= 0);
	relay_sinks_free(&routing);
	relay_config_free(config);
}

/*
 * Read them as the headers of a message, and write and read each member again.
 */
static void
parse_json(const char *data, size_t size)
{
	char	   *copy = strndup(data, size);
	const char *at = copy;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();
	RelayText  *object = relay_text_new();
	RelayText  *again = relay_text_new();

	while (relay_json_read_member(&at, name, value))
	{
		const char *written;

		check(at <= copy + strlen(copy));
		/* An escaped zero ends a string, which PostgreSQL does not store. */
		if (strlen(value->data) != value->len)
			continue;
		relay_text_clear(object);
		relay_json_add_member(object, '{', "name", value->data);
		relay_text_add_char(object, '}');
		written = object->data;
		check(relay_json_read_member(&written, name, again));
		check(strcmp(again->data, value->data) == 0);
		check(strcmp(written, "}") == 0);
	}
	relay_text_free(name);
	relay_text_free(value);
	relay_text_free(object);
	relay_text_free(again);
	free(copy);
}

/*
 * Make the sink, and the endpoint that it calls: this process.
 */
static void
begin_responses(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t	length = sizeof(address);
	int			listener = socket(AF_INET, SOCK_STREAM, 0);
	char		url[64];
	char		why[512];
	char	   *argv[] = {
		"idem-relay", "--w.sink=webhook", "--w.topics=*", "--w.timeout=5s",
		"--w.disable_after=0s", url, NULL
	};
	static RelayRouting routing;
	static RelayConfig *config; /* the sink points into it */

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	check(bind(listener, (struct sockaddr *) &address, length) == 0);
	check(listen(listener, 16) == 0);
	getsockname(listener, (struct sockaddr *) &address, &length);
	snprintf(url, sizeof(url), "--w.url=http://127.0.0.1:%d/",
			 ntohs(address.sin_port));
	relay_loop_begin(&loop);
	config = relay_config_read(6, argv, 0);
	relay_sinks_configure(&routing, config, &loop, &queue, NULL);
	check(config->nfaults == 0);
	webhook = routing.first;
	check(webhook->type->connect(webhook, why, sizeof(why)));
	webhook->connected = true;
	relay_loop_watch(&loop, listener, RELAY_LOOP_READ, accept_request, NULL);
}

/*
 * Send them as the response to a webhook, and see that the message has an
 * outcome.  The first byte decides whether it is a message or a claim.
 */
static void
parse_response(const char *data, size_t size)
{
	static int64_t id;
	RelayMessage *message;
	RelayMessageList *list;
	int64_t		end = relay_now() + 4000;

	if (size < 1)
		return;
	response = data + 1;
	response_size = size - 1;
	message = relay_alloc(sizeof(RelayMessage));
	message->id = ++id;
	message->message_id = message->label = "00000000-0000-0000-0000-000000000000";
	message->topic = "t";
	message->payload = "{}";
	message->payload_length = 2;
	message->created_at = "";
	message->sink = webhook;
	if (data[0] & 1)
	{
		message->claim_token = "1";
		message->response = relay_text_new();
	}
	relay_queue_add(&queue, message);
	relay_queue_hand_over(message, relay_now());
	webhook->type->deliver(webhook, message);
	while (message->state == RELAY_IN_FLIGHT)
	{
		check(relay_now() < end);
		webhook->type->work(webhook, relay_now());
		relay_loop_wait(&loop);
	}
	check(message->state == RELAY_DELIVERED || message->state == RELAY_REFUSED);
	list = message->state == RELAY_DELIVERED ? &queue.delivered :
		&queue.refused;
	check(list->count == 1);
	check(!message->reason || is_utf8(message->reason));
	check(message->retry_after >= -1);
	if (message->state == RELAY_DELIVERED && message->claim_token)
	{
		check(message->status >= 200 && message->status < 300);
		check(is_utf8(message->response->data));
		check(!message->response_type || is_utf8(message->response_type));
	}
	relay_list_remove(list, message);
	relay_queue_drop(&queue, message);
	webhook->disabled = false;
	webhook->held_until = 0;
}

/*
 * Accept a connection of the relay.  The event loop calls this.
 */
static void
accept_request(void *argument, int fd, int events)
{
	int			client = accept4(fd, NULL, NULL, SOCK_NONBLOCK);

	if (client >= 0)
		relay_loop_watch(&loop, client, RELAY_LOOP_READ, answer_request, NULL);
}

/*
 * Respond when the request has arrived, and close the connection.  The request
 * is small, so one read gets all of it.
 */
static void
answer_request(void *argument, int fd, int events)
{
	char		request[4096];

	(void) !read(fd, request, sizeof(request));
	(void) !write(fd, response, response_size);
	shutdown(fd, SHUT_WR);
	relay_loop_forget(&loop, fd);
	close(fd);
}

/*
 * Return whether a text is UTF-8.
 */
static bool
is_utf8(const char *text)
{
	const unsigned char *c = (const unsigned char *) text;

	while (*c)
	{
		int			more = *c < 0x80 ? 0 : *c >= 0xc2 && *c < 0xe0 ? 1 :
			(*c & 0xf0) == 0xe0 ? 2 : *c >= 0xf0 && *c < 0xf5 ? 3 : -1;

		if (more < 0)
			return false;
		if ((*c == 0xe0 && c[1] < 0xa0) || (*c == 0xed && c[1] > 0x9f) ||
			(*c == 0xf0 && c[1] < 0x90) || (*c == 0xf4 && c[1] > 0x8f))
			return false;
		for (c++; more > 0; more--, c++)
		{
			if ((*c & 0xc0) != 0x80)
				return false;
		}
	}
	return true;
}

/*
 * End the process: a result is wrong.
 */
static void
wrong(const char *what)
{
	dprintf(STDOUT_FILENO, "wrong: %s\n", what);
	abort();
}
