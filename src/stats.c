/*-------------------------------------------------------------------------
 *
 * stats.c
 *		Counters in shared memory, one set for each database.
 *
 * A backend finds the set of its database once, and from then on counts with
 * one atomic addition and no lock.  Calls count when they are made, whether or
 * not their transaction commits.  The counters start again with the server.
 *
 * The shared memory is there with and without preloading (see
 * shared_memory.c).  Should it be used up, nothing is counted, and nothing
 * fails.
 *
 * Sets are given out for good, by compare and swap on the database's OID; the
 * set of a dropped database is given out again when no other is left.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_authid_d.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "idempotency.h"
#include "shared_memory.h"
#include "stats.h"

#define MAX_DATABASES	64

typedef struct DatabaseStats
{
	pg_atomic_uint32 database;	/* InvalidOid: free */
	pg_atomic_uint64 last_cleanup;	/* TimestampTz; 0: never */
	pg_atomic_uint64 stats_reset;	/* TimestampTz */
	pg_atomic_uint64 counters[IDEM_NUM_COUNTERS];
} DatabaseStats;

typedef struct SharedStats
{
	DatabaseStats databases[MAX_DATABASES];
} SharedStats;

/* The counters of this database; NULL until something is counted. */
pg_atomic_uint64 *idem_counters = NULL;

/* Where they belong to; "nowhere" if there is no place in shared memory. */
static DatabaseStats *database_stats = NULL;
static DatabaseStats nowhere;
static SharedStats *shared_stats = NULL;

static void attach_shared_memory(void);
static void init_shared_memory(void *memory);
static DatabaseStats *find_database(Oid database);
static void reset(DatabaseStats *stats);

/*
 * Reserve the shared memory; called when the library is preloaded.
 */
void
idem_request_stats_memory(void)
{
	idem_reserve_shared_memory(sizeof(SharedStats));
}

/*
 * Find this database's counters.
 */
void
idem_attach_stats(void)
{
	attach_shared_memory();
	if (shared_stats != NULL)
		database_stats = find_database(MyDatabaseId);
	if (database_stats == NULL)
	{
		reset(&nowhere);
		database_stats = &nowhere;
	}
	idem_counters = database_stats->counters;
}

/*
 * A cleanup of this database has come to its end.
 */
void
idem_report_cleanup(void)
{
	idem_count(IDEM_COUNT_CLEANUP_PASSES, 1);
	pg_atomic_write_u64(&database_stats->last_cleanup,
						(uint64) GetCurrentTimestamp());
}

/*
 * idem_stats_data() -> setof row
 *
 * Other databases only for who may see what others do anyway.
 */
PG_FUNCTION_INFO_V1(idem_stats_data);
Datum
idem_stats_data(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	bool		see_all = has_privs_of_role(GetUserId(),
											ROLE_PG_READ_ALL_STATS);

	InitMaterializedSRF(fcinfo, 0);
	attach_shared_memory();
	for (int i = 0; shared_stats != NULL && i < MAX_DATABASES; i++)
	{
		DatabaseStats *stats = &shared_stats->databases[i];
		Oid			database = pg_atomic_read_u32(&stats->database);
		TimestampTz last_cleanup;
		Datum		values[IDEM_NUM_COUNTERS + 3];
		bool		nulls[IDEM_NUM_COUNTERS + 3] = {0};
		int			n = 0;

		if (!OidIsValid(database) || !(see_all || database == MyDatabaseId))
			continue;
		values[n++] = ObjectIdGetDatum(database);
		for (int j = 0; j < IDEM_NUM_COUNTERS; j++)
			values[n++] = Int64GetDatum(pg_atomic_read_u64(&stats->counters[j]));
		last_cleanup = (TimestampTz) pg_atomic_read_u64(&stats->last_cleanup);
		nulls[n] = last_cleanup == 0;
		values[n++] = TimestampTzGetDatum(last_cleanup);
		values[n++] =
			TimestampTzGetDatum((TimestampTz) pg_atomic_read_u64(&stats->stats_reset));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	return (Datum) 0;
}

/*
 * idem_stats_reset() -> void
 */
PG_FUNCTION_INFO_V1(idem_stats_reset);
Datum
idem_stats_reset(PG_FUNCTION_ARGS)
{
	if (idem_counters == NULL)
		idem_attach_stats();
	reset(database_stats);
	PG_RETURN_VOID();
}

/*
 * Set shared_stats, if the server has the memory.  If not, go without, and do
 * not ask again.
 */
static void
attach_shared_memory(void)
{
	static bool tried = false;

	if (tried)
		return;
	tried = true;
	shared_stats = idem_attach_shared_memory("idempotency statistics",
											 sizeof(SharedStats),
											 init_shared_memory);
}

static void
init_shared_memory(void *memory)
{
	SharedStats *stats = memory;

	for (int i = 0; i < MAX_DATABASES; i++)
	{
		pg_atomic_init_u32(&stats->databases[i].database, InvalidOid);
		reset(&stats->databases[i]);
	}
}

/*
 * The set of a database, given out now if it has none.  NULL if there is no
 * free one.
 */
static DatabaseStats *
find_database(Oid database)
{
	for (int i = 0; i < MAX_DATABASES; i++)
	{
		DatabaseStats *stats = &shared_stats->databases[i];
		uint32		owner = InvalidOid;

		if (pg_atomic_compare_exchange_u32(&stats->database, &owner, database))
		{
			reset(stats);
			return stats;
		}
		if (owner == database)
			return stats;
	}

	for (int i = 0; i < MAX_DATABASES; i++)
	{
		DatabaseStats *stats = &shared_stats->databases[i];
		uint32		owner = pg_atomic_read_u32(&stats->database);

		if (get_database_name(owner) == NULL &&
			pg_atomic_compare_exchange_u32(&stats->database, &owner, database))
		{
			reset(stats);
			return stats;
		}
	}
	return NULL;
}

static void
reset(DatabaseStats *stats)
{
	pg_atomic_write_u64(&stats->last_cleanup, 0);
	pg_atomic_write_u64(&stats->stats_reset, (uint64) GetCurrentTimestamp());
	for (int i = 0; i < IDEM_NUM_COUNTERS; i++)
		pg_atomic_write_u64(&stats->counters[i], 0);
}
