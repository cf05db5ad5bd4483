/*-------------------------------------------------------------------------
 *
 * http.c
 *		An HTTP server for the metrics, /metrics, and for the health,
 *		/healthz.
 *
 * Each connection serves one request.  If all places are occupied, a new
 * client replaces the oldest one.  There is no authentication, so the setting
 * "metrics" should name an address that only trusted hosts reach.
 *
 * A RelayHttp owns the listening socket and its clients.  relay.c begins and
 * ends it; the event loop calls the rest.
 *
 *-------------------------------------------------------------------------
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http.h"
#include "memory.h"
#include "metrics.h"

typedef struct RelayHttpClient
{
	RelayHttp  *http;
	int			fd;
	char		request[2048];
	size_t		length;
	RelayText  *answer;			/* NULL: the request is still being read */
	size_t		written;
} RelayHttpClient;

static void report_listen(RelayConfig *config);
static bool has_port(const RelayHttp *http, const struct addrinfo *address);
static struct addrinfo *find_address(RelayConfig *config);
static int	open_listener(const struct addrinfo *address);
static void accept_client(void *argument, int fd, int events);
static int	open_spare(void);
static void serve(void *argument, int fd, int events);
static bool read_request(RelayHttpClient *client);
static bool is_request(const RelayHttpClient *client, const char *path);
static void make_answer(RelayHttpClient *client);
static void end_client(RelayHttpClient *client);

/*
 * Count a fault if the setting "metrics" is not an address.
 */
void
relay_http_configure(RelayConfig *config)
{
	struct addrinfo *address = find_address(config);

	if (address)
		freeaddrinfo(address);
}

/*
 * Serve the metrics of a taker, and of completers, at the address that the
 * configuration names, if it names one.  The RelayHttp is zeroed.  Counts a
 * fault if that fails.
 */
void
relay_http_begin(RelayHttp *http, RelayConfig *config, RelayLoop *loop,
				 const RelayTaker *taker, const RelayCompleter *completers)
{
	struct addrinfo *address = find_address(config);

	if (!address)
		return;
	http->listener = open_listener(address);
	freeaddrinfo(address);
	if (http->listener < 0)
	{
		report_listen(config);
		return;
	}
	http->spare = open_spare();
	http->loop = loop;
	http->taker = taker;
	http->completers = completers;
	relay_loop_watch(loop, http->listener, RELAY_LOOP_READ, accept_client,
					 http);
}

/*
 * Count the fault that a configuration's address cannot be listened on.  The
 * reason is in errno.
 */
static void
report_listen(RelayConfig *config)
{
	relay_section_fault(config, config->main, "metrics",
						"cannot listen on \"%s\": %s",
						relay_section_text(config->main, "metrics"),
						strerror(errno));
}

/*
 * Count a fault if relay_http_begin() would fail with a new configuration
 * after the end of this RelayHttp.
 */
void
relay_http_check(const RelayHttp *http, RelayConfig *config)
{
	struct addrinfo *address = find_address(config);
	int			fd;

	if (!address)
		return;
	fd = open_listener(address);
	if (fd >= 0)
		close(fd);
	else if (errno != EADDRINUSE || !has_port(http, address))
		report_listen(config);
	freeaddrinfo(address);
}

/*
 * Return whether a RelayHttp listens on the port of an address.  Leaves errno
 * unchanged.
 */
static bool
has_port(const RelayHttp *http, const struct addrinfo *address)
{
	struct sockaddr_in6 own = {0};
	struct sockaddr_in6 other = {0};
	socklen_t	length = sizeof(own);
	int			error = errno;
	bool		found;

	/* The port has the same place in the addresses of IPv4 and IPv6. */
	memcpy(&other, address->ai_addr, address->ai_addrlen);
	found = http->loop &&
		getsockname(http->listener, (struct sockaddr *) &own, &length) == 0 &&
		own.sin6_port == other.sin6_port;
	errno = error;
	return found;
}

/*
 * Close all connections and stop listening, if relay_http_begin() listens.
 */
void
relay_http_end(RelayHttp *http)
{
	if (!http->loop)
		return;
	while (http->nclients > 0)
		end_client(http->clients[0]);
	relay_loop_forget(http->loop, http->listener);
	close(http->listener);
	if (http->spare >= 0)
		close(http->spare);
	http->loop = NULL;
}

/*
 * Return the address that the setting "metrics" names, which the caller
 * releases with freeaddrinfo().  Returns NULL if the setting is empty, or
 * after it has counted a fault.
 */
static struct addrinfo *
find_address(RelayConfig *config)
{
	const char *setting = relay_section_text(config->main, "metrics");
	struct addrinfo hints = {
		.ai_socktype = SOCK_STREAM,.ai_flags = AI_PASSIVE
	};
	struct addrinfo *address = NULL;
	char	   *copy = relay_copy(setting);
	char	   *name = copy;
	char	   *port = strrchr(copy, ':');
	const char *why = "expected an address and a port, as 127.0.0.1:9464";

	if (port && port > copy && port[1])
	{
		int			status;

		*port++ = '\0';
		/* getaddrinfo() takes the remainder of a larger number. */
		if (isdigit((unsigned char) *port) && strtol(port, NULL, 10) > 65535)
			port = "";
		if (*name == '[' && name[strlen(name) - 1] == ']')
		{
			name[strlen(name) - 1] = '\0';
			name++;
		}
		status = *port ? getaddrinfo(name, port, &hints, &address) :
			EAI_SERVICE;
		if (status != 0)
		{
			why = gai_strerror(status);
			address = NULL;
		}
	}
	if (*setting && !address)
		relay_section_fault(config, config->main, "metrics",
							"cannot listen on \"%s\": %s", setting, why);
	free(copy);
	return address;
}

/*
 * Return a listening socket, or -1 with errno set.
 */
static int
open_listener(const struct addrinfo *address)
{
	int			on = 1;
	int			fd;

	fd = socket(address->ai_family,
				SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -1;
	(void) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(fd, address->ai_addr, address->ai_addrlen) < 0 ||
		listen(fd, RELAY_HTTP_CLIENTS) < 0)
	{
		int			error = errno;

		close(fd);
		errno = error;
		return -1;
	}
	return fd;
}

/*
 * Accept a connection.  The event loop calls this for the listening socket.
 */
static void
accept_client(void *argument, int fd, int events)
{
	RelayHttp  *http = argument;
	RelayHttpClient *client;
	int			accepted;

	/* The client's address is not needed. */
	/* cppcheck-suppress nullPointer */
	accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (accepted < 0 && (errno == EMFILE || errno == ENFILE))
	{
		/* The metrics are needed most then. */
		if (http->spare < 0 && http->nclients > 0)
			end_client(http->clients[0]);
		if (http->spare >= 0)
			close(http->spare);
		http->spare = -1;
		/* cppcheck-suppress nullPointer */
		accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	}
	if (accepted < 0)
		return;
	/* A client that neither sends nor reads must not block the others. */
	if (http->nclients == RELAY_HTTP_CLIENTS)
		end_client(http->clients[0]);
	client = relay_alloc(sizeof(RelayHttpClient));
	client->http = http;
	client->fd = accepted;
	http->clients[http->nclients++] = client;
	relay_loop_watch(http->loop, accepted, RELAY_LOOP_READ, serve, client);
}

/*
 * Return a descriptor that accept_client() closes if none is left, or -1.
 */
static int
open_spare(void)
{
	return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/*
 * Read the request of a client, or write its answer, as far as the socket
 * allows.  The event loop calls this for each client.
 */
static void
serve(void *argument, int fd, int events)
{
	RelayHttpClient *client = argument;
	ssize_t		n;

	if (!client->answer)
	{
		if (!read_request(client))
			return;
		make_answer(client);
	}
	n = write(fd, client->answer->data + client->written,
			  client->answer->len - client->written);
	if (n > 0)
		client->written += (size_t) n;
	if ((n < 0 && errno != EAGAIN && errno != EINTR) ||
		client->written == client->answer->len)
		end_client(client);
	else
		relay_loop_watch(client->http->loop, fd, RELAY_LOOP_WRITE, serve,
						 client);
}

/*
 * Read more of a request.  Returns true when its head is complete or the
 * buffer is full.  Ends the client if the connection is lost.
 */
static bool
read_request(RelayHttpClient *client)
{
	ssize_t		n = read(client->fd, client->request + client->length,
						 sizeof(client->request) - 1 - client->length);

	if (n <= 0)
	{
		if (n == 0 || (errno != EAGAIN && errno != EINTR))
			end_client(client);
		return false;
	}
	client->length += (size_t) n;
	client->request[client->length] = '\0';
	return strstr(client->request, "\r\n\r\n") ||
		client->length == sizeof(client->request) - 1;
}

/*
 * Return whether a request is a GET of that path.
 */
static bool
is_request(const RelayHttpClient *client, const char *path)
{
	size_t		length = strlen(path);

	return strncmp(client->request, "GET ", 4) == 0 &&
		strncmp(client->request + 4, path, length) == 0 &&
		(client->request[4 + length] == ' ' ||
		 client->request[4 + length] == '?');
}

/*
 * Compose the answer to a request.
 */
static void
make_answer(RelayHttpClient *client)
{
	RelayText  *page = relay_text_new();
	const char *status = "200 OK";

	if (is_request(client, "/metrics"))
		relay_metrics_write(client->http->taker,
							client->http->completers, page);
	else if (is_request(client, "/healthz"))
	{
		if (!relay_metrics_health(client->http->taker,
								  client->http->completers, page))
			status = "503 Service Unavailable";
	}
	else
	{
		relay_text_add(page, "see /metrics and /healthz\n");
		status = "404 Not Found";
	}
	client->answer = relay_text_new();
	relay_text_addf(client->answer, "HTTP/1.1 %s\r\nContent-Type: "
					"text/plain; version=0.0.4; charset=utf-8\r\n"
					"Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
					status, page->len, page->data);
	relay_text_free(page);
}

/*
 * Close the connection of a client and free it.
 */
static void
end_client(RelayHttpClient *client)
{
	RelayHttp  *http = client->http;
	int			i = 0;

	while (http->clients[i] != client)
		i++;
	http->nclients--;
	memmove(http->clients + i, http->clients + i + 1,
			(size_t) (http->nclients - i) * sizeof(http->clients[0]));
	relay_loop_forget(http->loop, client->fd);
	close(client->fd);
	if (http->spare < 0)
		http->spare = open_spare();
	relay_text_free(client->answer);
	free(client);
}
