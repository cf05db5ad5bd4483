/*-------------------------------------------------------------------------
 *
 * database.h
 *		Connections to the database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_DATABASE_H
#define RELAY_DATABASE_H

#include <libpq-fe.h>
#include <stdbool.h>
#include <stdint.h>

#include "config.h"

typedef enum DatabaseState
{
	DATABASE_OFF,				/* until "next_try" */
	DATABASE_CONNECTING,
	DATABASE_SETUP,				/* the first query */
	DATABASE_IDLE,
	DATABASE_BUSY				/* with a query of its user */
} DatabaseState;

typedef struct Database
{
	const char *name;			/* for the log */

	/* The answer to a query; NULL: it is lost, and so is the connection. */
	void		(*answered) (struct Database *database, PGresult *result);

	DatabaseState state;
	PGconn	   *connection;
	int			fd;				/* that is watched; -1: none */
	PGresult   *result;			/* that has come so far */
	int64_t		deadline;		/* of what it is doing */
	int64_t		next_try;
	int64_t		backoff;		/* 0 after an answer: its user says so */
	int			pid;			/* of the server's process */
	char	   *schema;			/* of the extension, quoted */
	bool		is_utf8;		/* the encoding of the database */
	int			first_host;		/* to be tried, of those that there are */
	uint64_t	losses;
} Database;

extern void database_configure(Config *config);
extern bool database_check(const char *string);
extern void database_end(void);
extern void database_work(Database *database, int64_t now);
extern void database_query(Database *database, int64_t limit,
						   const char *query, int nparams,
						   const char *const *params);
extern void database_refused(Database *database, const PGresult *result);
extern void database_close(Database *database);

#endif							/* RELAY_DATABASE_H */
