/*-------------------------------------------------------------------------
 *
 * http.h
 *		An HTTP server for the metrics.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_HTTP_H
#define IDEM_RELAY_HTTP_H

#include "completer.h"
#include "taker.h"

#define RELAY_HTTP_CLIENTS	8

/* Only http.c reads and writes the fields. */
typedef struct RelayHttp
{
	RelayLoop  *loop;			/* NULL: not listening */
	int			listener;
	int			spare;			/* a descriptor for a client, or -1 */
	const RelayTaker *taker;	/* its metrics are shown */
	const RelayCompleter *completers;	/* likewise */
	struct RelayHttpClient *clients[RELAY_HTTP_CLIENTS];	/* oldest first */
	int			nclients;
} RelayHttp;

extern void relay_http_configure(RelayConfig *config);
extern void relay_http_begin(RelayHttp *http, RelayConfig *config,
							 RelayLoop *loop, const RelayTaker *taker,
							 const RelayCompleter *completers);
extern void relay_http_check(const RelayHttp *http, RelayConfig *config);
extern void relay_http_end(RelayHttp *http);

#endif							/* IDEM_RELAY_HTTP_H */
