/*-------------------------------------------------------------------------
 *
 * database.h
 *		Connections to the database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_DATABASE_H
#define IDEM_RELAY_DATABASE_H

#include <libpq-fe.h>

#include "config.h"
#include "loop.h"

#define RELAY_HOST_LISTS	3	/* "host", "hostaddr", "port" */

/*
 * How long a call about messages or claims waits for a lock.  Other calls wait
 * meanwhile.
 */
#define RELAY_LOCK_TIMEOUT	"200ms"

/*
 * The schema of the functions, as SQL writes it.  The portable edition need
 * not be an extension.  Then an owner of the database or a superuser has
 * installed it, so that no other role can make the relay call its functions.
 */
#define RELAY_SCHEMA_QUERY \
	"WITH trusted AS (SELECT r.oid FROM pg_catalog.pg_roles r" \
	" JOIN pg_catalog.pg_database d" \
	" ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()" \
	" WHERE r.rolsuper OR r.oid OPERATOR(pg_catalog.=) d.datdba)," \
	" extension AS (SELECT e.extnamespace, e.extowner" \
	" FROM pg_catalog.pg_extension e" \
	" WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency')" \
	" SELECT pg_catalog.quote_ident(n.nspname)" \
	" FROM pg_catalog.pg_namespace n" \
	" WHERE n.oid OPERATOR(pg_catalog.=) coalesce(" \
	"(SELECT e.extnamespace FROM extension e" \
	" JOIN trusted t ON t.oid OPERATOR(pg_catalog.=) e.extowner)," \
	" (SELECT c.relnamespace FROM pg_catalog.pg_class c" \
	" JOIN trusted t ON t.oid OPERATOR(pg_catalog.=) c.relowner" \
	" WHERE c.relname OPERATOR(pg_catalog.=) 'idem_p_installation')," \
	" (SELECT e.extnamespace FROM extension e))"

/*
 * The timeline of a server that is not a standby.  Some services that resemble
 * PostgreSQL do not report it.
 */
#define RELAY_TIMELINE \
	"pg_catalog.left(pg_catalog.pg_walfile_name(" \
	"pg_catalog.pg_current_wal_lsn()), 8)"

/* How connections are made, for all of them. */
typedef struct RelayServer
{
	RelayLoop  *loop;
	bool		verbose;		/* log notices */
	const char *string;			/* the connection string */
	const char *password;		/* empty: as libpq finds it */

	/* From the string; each has "nhosts" elements, or one, or is NULL. */
	char	   *host_lists[RELAY_HOST_LISTS];
	int			nhosts;
	int			naddresses;		/* of a host, at most, as far as known */
	int			good_try;		/* the "next_host" that worked at start */

	unsigned	timeline;		/* the last that was used; 0: unknown */
	int64_t		outdated_since; /* each try reached an older one; or 0 */
	int			max_attempts;	/* idempotency.outbox_max_attempts */
	bool		no_timeline;	/* it does not report one */
	bool		has_timeline;	/* it has reported one, so it can again */
	char	   *lacking;		/* functions of completer.c that the role
								 * cannot call; NULL: none */
} RelayServer;

typedef enum RelayDatabaseState
{
	RELAY_DATABASE_OFF,			/* until "next_try" */
	RELAY_DATABASE_CONNECTING,
	RELAY_DATABASE_SETUP,		/* the first query runs */
	RELAY_DATABASE_IDLE,
	RELAY_DATABASE_BUSY			/* a query of the owner runs */
} RelayDatabaseState;

/* A connection.  Its owner sets the first fields, and the others to zero. */
typedef struct RelayDatabase
{
	RelayServer *server;
	const char *name;			/* for the log */
	int			fd;				/* watched by the loop; -1: none */
	const char *lock_timeout;	/* NULL: calls wait for locks */

	/*
	 * Called with the result of a query, which the callee clears, or with
	 * NULL after the connection is lost.
	 */
	void		(*answered) (void *owner, PGresult *result);
	void	   *owner;

	/* The owner reads these, and resets "backoff". */
	RelayDatabaseState state;
	PGconn	   *connection;
	PGresult   *result;			/* received so far */
	int64_t		deadline;		/* of the current state */
	int64_t		limit;			/* of a query, from each sign of life */
	int64_t		first_sign;		/* of life since the query; 0: none */
	int64_t		next_try;
	int64_t		backoff;		/* 0: a query has succeeded since */
	int			pid;			/* of the server process */
	char	   *schema;			/* of the extension, quoted */
	bool		is_utf8;		/* the database's encoding */
	unsigned	timeline;		/* of the server; 0: unknown */
	bool		no_timeline;	/* this connection does not ask for it */
	int			next_host;		/* number of the host to try first, and
								 * "nhosts" more for its next address */
	uint64_t	losses;			/* connections lost, or not made */
} RelayDatabase;

extern void relay_database_configure(RelayConfig *config);
extern bool relay_database_check(RelayServer *server, const char *string);
extern PGconn *relay_database_start(const RelayServer *server, int first,
									const char *string, const char *password,
									const char *seconds);
extern void relay_database_wait(PGconn *connection, int64_t limit,
								PQnoticeProcessor processor, void *argument);
extern void relay_database_free(RelayServer *server);
extern void relay_database_work(RelayDatabase *database, int64_t now);
extern void relay_database_query(RelayDatabase *database, int64_t limit,
								 const char *query, int nparams,
								 const char *const *params);
extern bool relay_database_is_arriving(const RelayDatabase *database);
extern void relay_database_use(RelayServer *server, unsigned timeline);
extern void relay_database_refused(RelayDatabase *database,
								   const PGresult *result);
extern bool relay_database_is_locked(const PGresult *result);
extern bool relay_database_is_outage(const PGresult *result);
extern int64_t relay_database_lock_pause(int64_t lease);
extern void relay_database_close(RelayDatabase *database);

#endif							/* IDEM_RELAY_DATABASE_H */
