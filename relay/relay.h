/*-------------------------------------------------------------------------
 *
 * relay.h
 *		The relay, from its configuration to its end.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_RELAY_H
#define IDEM_RELAY_RELAY_H

#include <limits.h>
#include <signal.h>

#include "completer.h"
#include "http.h"

typedef enum RelayPhase
{
	RELAY_RUNNING,
	RELAY_STOPPING,				/* begins nothing new */
	RELAY_ABANDONED				/* waits for nothing */
} RelayPhase;

/* The state of the whole process.  main.c owns it. */
typedef struct Relay
{
	int			argc;
	char	  **argv;
	char		program[PATH_MAX];	/* that runs */
	RelayConfig *config;
	RelayLoop	loop;
	RelayQueue	queue;
	RelayRouting routing;
	RelayServer server;
	RelayAnswers answers;
	RelayTaker	taker;
	RelayCompleter *completers;
	RelayHttp	http;

	sigset_t	signals;		/* blocked, and read by the loop */
	int64_t		last_sign;		/* of life, for systemd */
	RelayPhase	phase;
	bool		restart;		/* run the program again at the end */
	int			copy;			/* descriptor of the configuration to start
								 * again with; 0: none */
	int64_t		stop_timeout;
	int64_t		stop_at;		/* when deliveries end at the latest */
} Relay;

extern void relay_begin(Relay *relay, int argc, char **argv, bool check_only);
extern void relay_run(Relay *relay);
extern int	relay_end(Relay *relay);

#endif							/* IDEM_RELAY_RELAY_H */
