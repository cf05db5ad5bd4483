/*-------------------------------------------------------------------------
 *
 * answers.h
 *		Answers to the server about the messages that the relay holds.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_ANSWERS_H
#define IDEM_RELAY_ANSWERS_H

#include "database.h"
#include "queue.h"

/* The call that is running. */
typedef enum RelayCall
{
	RELAY_CALL_NONE,
	RELAY_CALL_ACK,
	RELAY_CALL_NACK,
	RELAY_CALL_RELEASE,
	RELAY_CALL_EXTEND,
	RELAY_CALL_CANCEL
} RelayCall;

/* Other files read the counters and the database. */
typedef struct RelayAnswers
{
	RelayDatabase database;
	RelayQueue *queue;
	int64_t		lease;			/* in milliseconds */
	unsigned	timeline;		/* of the server */
	bool		has_others;		/* messages of another timeline are held */

	RelayCall	call;
	RelayMessageList called;	/* the messages that it answers */
	int			ncalled;		/* their number, or of leases to extend */
	int64_t		called_at;
	int			turn;			/* the list that was answered last */
	int			nalone;			/* messages with "answer_alone" */
	bool		others_first;	/* the last call was about a message alone, or
								 * waited for a locked row */
	int64_t		next_look;		/* for leases to extend */
	int			cancel_pid;		/* process to cancel; 0: none */

	/* Messages since the start. */
	uint64_t	acked;
	uint64_t	nacked;
	uint64_t	released;
	uint64_t	lost;			/* another relay had taken them */
} RelayAnswers;

extern void relay_answers_begin(RelayAnswers *answers, RelayServer *server,
								RelayQueue *queue, int64_t lease);
extern void relay_answers_work(RelayAnswers *answers, int64_t now);
extern bool relay_answers_connected(const RelayAnswers *answers);
extern bool relay_answers_may_start(const RelayAnswers *answers,
									const RelayMessage *message, int64_t now);
extern void relay_answers_cancel(RelayAnswers *answers, int pid);

#endif							/* IDEM_RELAY_ANSWERS_H */
