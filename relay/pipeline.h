/*-------------------------------------------------------------------------
 *
 * pipeline.h
 *		A connection of a sink to PostgreSQL that executes a statement for
 *		each message, in pipeline mode.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_PIPELINE_H
#define IDEM_RELAY_PIPELINE_H

#include <libpq-fe.h>

#include "sink.h"

#define RELAY_PIPELINE_PARAMS	6

/* The "state" of a sink.  The sink sets the first four fields. */
typedef struct RelayPipeline
{
	const char *database;		/* connection string */
	const char *password;		/* empty or NULL: as libpq finds it */
	int			batch;			/* messages of a transaction, at most */
	bool		has_outbox;		/* the database has these messages */

	PGconn	   *connection;
	int			first_host;		/* as "next_host" of a RelayDatabase */
	unsigned	timeline;		/* of its server, if it has the outbox; or 0 */
	char		statement[32];	/* the name of the prepared one */
	int			fd;
	uint64_t	number;			/* of the batch that is being sent */
	int			unsynced;		/* its messages */
	uint64_t	received;		/* number of the batch that is received */
	RelayMessage *next;			/* in flight, its result comes next */
	RelayMessage *culprit;		/* of the batch that is received */
	bool		failed;			/* that batch */
	char		state[6];		/* SQLSTATE of the failure */
	char		why[512];
	int64_t		last_result;
} RelayPipeline;

extern bool relay_pipeline_connect(RelaySink *sink, const char *statement,
								   char *why, size_t size);
extern void relay_pipeline_attach(RelaySink *sink);
extern void relay_pipeline_send(RelaySink *sink, RelayMessage *message,
								const char *const *params, int nparams);
extern void relay_pipeline_work(RelaySink *sink, int64_t now);
extern void relay_pipeline_disconnect(RelaySink *sink);

#endif							/* IDEM_RELAY_PIPELINE_H */
