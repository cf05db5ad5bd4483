/*-------------------------------------------------------------------------
 *
 * metrics.c
 *		What the relay counts, over HTTP, in the text format of Prometheus.
 *
 * GET /metrics, one request a connection, a few connections at a time, the
 * oldest of which makes room for another.  There is no password, so the
 * address had better be one of this machine.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "answers.h"
#include "loop.h"
#include "metrics.h"
#include "queue.h"
#include "relay.h"
#include "sinks.h"
#include "taker.h"
#include "text.h"

#define MAX_CLIENTS	8

typedef struct Client
{
	int			fd;
	char		request[2048];
	size_t		length;
	Text	   *answer;			/* NULL: still reading */
	size_t		written;
} Client;

static int	listener = -1;

/* From the oldest. */
static Client *clients[MAX_CLIENTS];
static int	nclients = 0;

static struct addrinfo *find_address(const char *text, const char **why);
static int	open_listener(const struct addrinfo *address);
static void accept_client(void *argument, int fd, int events);
static void serve(void *argument, int fd, int events);
static void make_answer(Client *client);
static void end(Client *client);
static void append_figures(Text *text);
static void append_figure(Text *text, const char *name,
						  const char *type, const char *help, double value);
static void append_by_sink(Text *text, const char *name,
						   const char *type, const char *help,
						   double (*value) (const Sink *sink));

/*
 * Tell it if there is no such address.
 */
void
metrics_configure(Config *config)
{
	const char *text = section_text(config->main, "metrics");
	const char *why;
	struct addrinfo *address;

	if (!*text)
		return;
	address = find_address(text, &why);
	if (!address)
		config_fault(config, section_where(config->main, "metrics"),
					 "cannot listen on \"%s\": %s", text, why);
	else
		freeaddrinfo(address);
}

/*
 * Listen where the configuration says, which has been looked at.
 */
void
metrics_begin(Config *config)
{
	const char *text = section_text(config->main, "metrics");
	const char *why;
	struct addrinfo *address;

	if (!*text)
		return;
	address = find_address(text, &why);
	if (!address)
		return;
	listener = open_listener(address);
	freeaddrinfo(address);
	if (listener < 0)
		config_fault(config, section_where(config->main, "metrics"),
					 "cannot listen on \"%s\": %s", text, strerror(errno));
	else
		loop_watch(listener, LOOP_READ, accept_client, NULL);
}

void
metrics_end(void)
{
	while (nclients > 0)
		end(clients[0]);
	if (listener >= 0)
	{
		loop_forget(listener);
		close(listener);
		listener = -1;
	}
}

/*
 * The address that a text names; NULL: none, and why.
 */
static struct addrinfo *
find_address(const char *text, const char **why)
{
	struct addrinfo hints = {
		.ai_socktype = SOCK_STREAM,.ai_flags = AI_PASSIVE
	};
	struct addrinfo *address = NULL;
	char	   *host = relay_copy(text);
	char	   *port = strrchr(host, ':');
	char	   *name = host;
	int			status;

	*why = "expected an address and a port, as 127.0.0.1:9464";
	if (port && port > host && port[1])
	{
		*port++ = '\0';
		if (*name == '[' && name[strlen(name) - 1] == ']')
		{
			name[strlen(name) - 1] = '\0';
			name++;
		}
		status = getaddrinfo(name, port, &hints, &address);
		if (status != 0)
		{
			*why = gai_strerror(status);
			address = NULL;
		}
	}
	free(host);
	return address;
}

static int
open_listener(const struct addrinfo *address)
{
	int			on = 1;
	int			fd;

	fd = socket(address->ai_family,
				SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0)
		(void) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (fd < 0 || bind(fd, address->ai_addr, address->ai_addrlen) < 0 ||
		listen(fd, MAX_CLIENTS) < 0)
	{
		int			error = errno;

		if (fd >= 0)
			close(fd);
		errno = error;
		fd = -1;
	}
	return fd;
}

static void
accept_client(void *argument, int fd, int events)
{
	/* Who calls need not be known. */
	/* cppcheck-suppress nullPointer */
	int			accepted = accept4(listener, NULL, NULL,
								   SOCK_CLOEXEC | SOCK_NONBLOCK);
	Client	   *client;

	if (accepted < 0)
		return;
	/* One that neither asks nor reads is not to keep others out. */
	if (nclients == MAX_CLIENTS)
		end(clients[0]);
	client = relay_alloc(sizeof(Client));
	client->fd = accepted;
	clients[nclients++] = client;
	loop_watch(accepted, LOOP_READ, serve, client);
}

/*
 * Read the request to the end of its head, then write the answer.
 */
static void
serve(void *argument, int fd, int events)
{
	Client	   *client = argument;
	ssize_t		n;

	if (!client->answer)
	{
		n = read(client->fd, client->request + client->length,
				 sizeof(client->request) - 1 - client->length);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0)
		{
			end(client);
			return;
		}
		client->length += (size_t) n;
		client->request[client->length] = '\0';
		if (!strstr(client->request, "\r\n\r\n") &&
			client->length < sizeof(client->request) - 1)
			return;
		make_answer(client);
	}
	n = write(client->fd, client->answer->data + client->written,
			  client->answer->len - client->written);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		n = 0;
	else if (n < 0)
	{
		end(client);
		return;
	}
	client->written += (size_t) n;
	if (client->written == client->answer->len)
		end(client);
	else
		loop_watch(client->fd, LOOP_WRITE, serve, client);
}

static void
make_answer(Client *client)
{
	Text	   *text = text_new();
	bool		found = strncmp(client->request, "GET /metrics ", 13) == 0 ||
		strncmp(client->request, "GET /metrics?", 13) == 0;

	if (found)
		append_figures(text);
	else
		text_add(text, "see /metrics\n");
	client->answer = text_new();
	text_addf(client->answer, "HTTP/1.1 %s\r\nContent-Type: "
			  "text/plain; version=0.0.4; charset=utf-8\r\n"
			  "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
			  found ? "200 OK" : "404 Not Found", text->len,
			  text->data);
	text_free(text);
}

static void
end(Client *client)
{
	int			i = 0;

	while (clients[i] != client)
		i++;
	nclients--;
	memmove(clients + i, clients + i + 1,
			(size_t) (nclients - i) * sizeof(clients[0]));
	loop_forget(client->fd);
	close(client->fd);
	text_free(client->answer);
	free(client);
}

static double
delivered(const Sink *sink)
{
	return (double) sink->delivered;
}

static double
refused(const Sink *sink)
{
	return (double) sink->refused;
}

static double
put_off(const Sink *sink)
{
	return (double) sink->put_off;
}

static double
failures(const Sink *sink)
{
	return (double) sink->failures;
}

static double
dead(const Sink *sink)
{
	return (double) sink->dead;
}

static double
in_flight(const Sink *sink)
{
	return sink->flying.count;
}

static double
ready(const Sink *sink)
{
	return sink->ready.count;
}

static double
up(const Sink *sink)
{
	return sink->connected && !sink->held_until;
}

static double
delivery_seconds(const Sink *sink)
{
	return (double) sink->delivery_ms / 1000;
}

static void
append_figures(Text *text)
{
	append_figure(text, "idem_relay_taken_total", "counter",
				  "Messages taken from the outbox.", (double) taker_taken);
	append_figure(text, "idem_relay_acked_total", "counter",
				  "Messages acknowledged.", (double) answers_acked);
	append_figure(text, "idem_relay_nacked_total", "counter",
				  "Messages refused.", (double) answers_nacked);
	append_figure(text, "idem_relay_given_back_total", "counter",
				  "Messages given back untried.", (double) answers_given_back);
	append_figure(text, "idem_relay_lost_total", "counter",
				  "Messages that another relay had taken by then.",
				  (double) answers_lost);
	append_figure(text, "idem_relay_held_messages", "gauge",
				  "Messages that the relay holds.", queue_count());
	append_figure(text, "idem_relay_held_bytes", "gauge",
				  "Memory that they take.", (double) queue_size());
	append_figure(text, "idem_relay_database_failures_total", "counter",
				  "Connections to the database lost, or not made.",
				  (double) (taker_connections_lost() +
							answers_connections_lost()));
	append_figure(text, "idem_relay_database_up", "gauge",
				  "1 while answers can be given.", answers_connected());
	append_by_sink(text, "idem_relay_sink_delivered_total", "counter",
				   "Messages that the sink has confirmed.", delivered);
	append_by_sink(text, "idem_relay_sink_delivery_seconds_total", "counter",
				   "Time that took, from handing each over.",
				   delivery_seconds);
	append_by_sink(text, "idem_relay_sink_refused_total", "counter",
				   "Attempts that failed.", refused);
	append_by_sink(text, "idem_relay_sink_put_off_total", "counter",
				   "Messages that the sink had no use for at that time.",
				   put_off);
	append_by_sink(text, "idem_relay_sink_failures_total", "counter",
				   "How often the sink was held up.", failures);
	append_by_sink(text, "idem_relay_sink_dead_total", "counter",
				   "Messages dead after an attempt of this relay.", dead);
	append_by_sink(text, "idem_relay_sink_in_flight", "gauge",
				   "Messages handed over and not confirmed.", in_flight);
	append_by_sink(text, "idem_relay_sink_ready", "gauge",
				   "Messages waiting to be handed over.", ready);
	append_by_sink(text, "idem_relay_sink_up", "gauge",
				   "1 unless the sink is held up.", up);
}

static void
append_figure(Text *text, const char *name, const char *type,
			  const char *help, double value)
{
	text_addf(text, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", name,
			  help, name, type, name, value);
}

static void
append_by_sink(Text *text, const char *name, const char *type,
			   const char *help, double (*value) (const Sink *sink))
{
	const Sink *sink;

	text_addf(text, "# HELP %s %s\n# TYPE %s %s\n", name, help, name,
			  type);
	for (sink = sinks_first; sink; sink = sink->next)
	{
		const char *c;

		text_addf(text, "%s{sink=\"", name);
		for (c = sink->name; *c; c++)
		{
			if (*c == '"' || *c == '\\')
				text_add_char(text, '\\');
			text_add_char(text, *c);
		}
		text_addf(text, "\",kind=\"%s\"} %.17g\n", sink->type->name,
				  value(sink));
	}
}
