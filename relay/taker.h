/*-------------------------------------------------------------------------
 *
 * taker.h
 *		Take messages from the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_TAKER_H
#define IDEM_RELAY_TAKER_H

#include "answers.h"
#include "routing.h"

/* Other files read the counter and the database. */
typedef struct RelayTaker
{
	RelayDatabase database;
	RelayQueue *queue;
	const RelayRouting *routing;
	RelayAnswers *answers;

	/* Settings. */
	int64_t		lease;
	int64_t		wait;
	int			batch;

	/*
	 * If all topics are taken and a sink is held or full, a list is made each
	 * time.
	 */
	bool		listing;		/* the query that runs makes it */
	char	   *listed;			/* for the next take; NULL: none */
	int64_t		next_list;

	int			limit;			/* of messages in a take; at most "batch" */
	int64_t		began;
	int64_t		nap;			/* the longest sleep while a sink is full */
	int64_t		taken_at;		/* when the leases of the take began */
	int64_t		arrival;		/* how long a result took to arrive, at most */
	int64_t		arrival_end;	/* then a shorter time replaces it */
	size_t		usual_size;		/* estimate of a message's size */
	bool		stopping;
	int64_t		next_cancel;
	uint64_t	taken;			/* messages since the start */
} RelayTaker;

extern void relay_taker_begin(RelayTaker *taker, RelayServer *server,
							  RelayQueue *queue, const RelayRouting *routing,
							  RelayAnswers *answers,
							  const RelaySection *settings);
extern void relay_taker_work(RelayTaker *taker, int64_t now);
extern bool relay_taker_stop(RelayTaker *taker, int64_t now);
extern void relay_taker_end(RelayTaker *taker);

#endif							/* IDEM_RELAY_TAKER_H */
