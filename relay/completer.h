/*-------------------------------------------------------------------------
 *
 * completer.h
 *		Complete requests whose clients are gone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_COMPLETER_H
#define IDEM_RELAY_COMPLETER_H

#include "database.h"
#include "routing.h"

/* The call that the connection for answers runs. */
typedef enum RelayClaimCall
{
	RELAY_CLAIM_NONE,
	RELAY_CLAIM_EXTEND,
	RELAY_CLAIM_COMPLETE,
	RELAY_CLAIM_PAUSE,
	RELAY_CLAIM_RETURN
} RelayClaimCall;

/* Of one section.  Other files read the counters and the databases. */
typedef struct RelayCompleter
{
	RelayDatabase resume;		/* sleeps in idem_resume() */
	RelayDatabase answers;
	RelayQueue	queue;			/* the claims, as messages */
	RelaySink  *sink;
	int64_t		lease;			/* in milliseconds */
	int64_t		resumed_at;		/* when the leases of the call began */
	bool		stopping;

	RelayClaimCall call;
	RelayMessage *called;		/* answered by the call; NULL: none */
	int64_t		called_at;
	bool		waited;			/* the last call waited for a locked row */
	int			turn;			/* the list of answers that was last */

	/* Claims since the start. */
	uint64_t	resumed;
	uint64_t	completed;
	uint64_t	postponed;
	uint64_t	lost;			/* another claimant had them */
	struct RelayCompleter *next;
} RelayCompleter;

extern RelayCompleter *relay_completers_begin(const RelayRouting *routing,
											  RelayServer *server,
											  int64_t lease);
extern void relay_completers_work(RelayCompleter *completers, int64_t now);
extern bool relay_completers_stop(RelayCompleter *completers);
extern int	relay_completers_held(const RelayCompleter *completers);
extern void relay_completers_free(RelayCompleter *completers);

#endif							/* IDEM_RELAY_COMPLETER_H */
