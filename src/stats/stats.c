/*-------------------------------------------------------------------------
 *
 * stats.c
 *		Counters in shared memory, one set for each database.
 *
 * A backend finds the set of its database once, and from then on counts with
 * one atomic addition and no lock.  Calls count when they are made, whether
 * or not their transaction commits.  The counters begin at zero when the
 * server starts.
 *
 * Each set has the counters in several stripes, which do not share cache
 * lines.  A backend counts in the stripe of its process number, and a reader
 * adds the stripes up.  So up to MANY_STRIPES backends seldom write to the
 * same cache line, and only a reader of the statistics reads a line that
 * others write.
 *
 * The shared memory exists with and without preloading (see
 * util/shared_memory.c), and has space for MAX_DATABASES sets: 265 kB, or 19
 * kB with one stripe on a server before 17 that has not preloaded the
 * library.  Without it, a session counts for itself, visible to nobody, and
 * tries again after RETRY_SECONDS, between two transactions.  So only
 * statistics must depend on the counters.
 *
 * Locking.  A set belongs to the database whose OID it has, and a database
 * never has more than one.  OIDs are written only under "mutex", a spinlock
 * that is held while the OIDs are read and one set is cleared.  Counting
 * needs no lock, because a set changes its owner only when its database has
 * been dropped, after all sessions in it have ended.  The dropped databases
 * are looked up without the lock.  The set of one is taken under the lock
 * only if it still has that OID.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_authid_d.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "storage/spin.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "stats/stats.h"
#include "util/compat.h"
#include "util/shared_memory.h"
#include "util/times.h"

#define MAX_DATABASES	64
#define RETRY_SECONDS	1
#define MANY_STRIPES	16
#define FEW_STRIPES		1

typedef union Stripe
{
	pg_atomic_uint64 counters[IDEM_NUM_COUNTERS];
	/* cppcheck-suppress unusedStructMember ; a line of the cache for each */
	char		padding[CACHELINEALIGN(IDEM_NUM_COUNTERS * sizeof(uint64))];
} Stripe;

typedef struct DatabaseStats
{
	pg_atomic_uint32 database;	/* InvalidOid: free */
	pg_atomic_uint64 last_cleanup;	/* TimestampTz; 0: never */
	pg_atomic_uint64 idle_since;	/* or time of the reset, if later; see
									 * idem_monotonic_time() */
	pg_atomic_uint64 latest_clock;	/* TimestampTz; see idem_latest_clock() */
	pg_atomic_uint64 stats_reset;	/* TimestampTz */
} DatabaseStats;

typedef struct SharedStats
{
	slock_t		mutex;			/* for writing any "database" */
	DatabaseStats databases[MAX_DATABASES];
	/* The stripes of each set follow, from the beginning of a cache line. */
} SharedStats;

#define SIZE_OF_STATS(nstripes) \
	(sizeof(SharedStats) + PG_CACHE_LINE_SIZE + \
	 sizeof(Stripe) * MAX_DATABASES * (nstripes))

/* This backend's counters; NULL until something is counted. */
pg_atomic_uint64 *idem_counters = NULL;

/* Their set; "nowhere" if there is none in shared memory. */
static DatabaseStats *database_stats = NULL;
static DatabaseStats nowhere;
static Stripe nowhere_stripe;

/* The number of stripes; the postmaster decides it if it loads the library. */
static int	nstripes = IDEM_MEMORY_ON_DEMAND ? MANY_STRIPES : FEW_STRIPES;

/*
 * The nesting level of the transaction in which a cleanup has finished that
 * is not reported yet; or 0.
 */
static int	cleanup_level = 0;

/* The time to look for a set again; see idem_monotonic_time(). */
static int64 retry_at;

static SharedStats *attach_shared_memory(void);
static void init_shared_memory(void *memory);
static DatabaseStats *find_database(SharedStats *stats);
static DatabaseStats *assign_set(SharedStats *stats, const Oid *gone);
static void find_gone(SharedStats *stats, Oid *gone);
static Stripe *stripes_of(SharedStats *stats, const DatabaseStats *set);
static uint64 sum(const Stripe *stripes, IdemCounter counter);
static void clear(DatabaseStats *set, Stripe *stripes, int count,
				  TimestampTz now);
static void leave_nowhere(XactEvent event, void *arg);
static void end_transaction(XactEvent event, void *arg);
static void end_subtransaction(SubXactEvent event, SubTransactionId subxact,
							   SubTransactionId parent, void *arg);

/*
 * Reserve the shared memory; called when the library is preloaded.
 */
void
idem_request_stats_memory(void)
{
	nstripes = MANY_STRIPES;
	idem_reserve_shared_memory(SIZE_OF_STATS(nstripes));
}

/*
 * Find this database's counters.  Outside a transaction, that might have to
 * wait until the next one has ended; until then, "nowhere" is used.
 */
void
idem_attach_stats(void)
{
	static bool callback_registered = false;
	SharedStats *stats = attach_shared_memory();

	if (stats != NULL && IsTransactionState())
		database_stats = find_database(stats);
	if (database_stats == NULL)
	{
		if (!callback_registered)
			RegisterXactCallback(leave_nowhere, NULL);
		callback_registered = true;
		retry_at = IsTransactionState() ? idem_monotonic_time() +
			RETRY_SECONDS * INT64CONST(1000000) : 0;
		clear(&nowhere, &nowhere_stripe, 1, GetCurrentTimestamp());
		database_stats = &nowhere;
		idem_counters = nowhere_stripe.counters;
	}
	else
	{
		int			process = MyProc - ProcGlobal->allProcs;

		idem_counters = stripes_of(stats, database_stats)[process % nstripes].counters;
	}
}

/*
 * If there was no set in shared memory some time ago, look for one again.
 */
static void
leave_nowhere(XactEvent event, void *arg)
{
	if (database_stats == &nowhere && idem_monotonic_time() >= retry_at)
	{
		database_stats = NULL;
		idem_counters = NULL;
	}
}

/*
 * Return the highest time that the clock has shown to a cleanup of this
 * database, or to a caller of this function, since the statistics were reset.
 * It is in the future if the clock has been set back.
 */
TimestampTz
idem_latest_clock(void)
{
	TimestampTz now = GetCurrentTimestamp();
	uint64		latest;

	if (idem_counters == NULL)
		idem_attach_stats();
	latest = pg_atomic_read_u64(&database_stats->latest_clock);
	while ((TimestampTz) latest < now &&
		   !pg_atomic_compare_exchange_u64(&database_stats->latest_clock,
										   &latest, (uint64) now))
		;
	return Max((TimestampTz) latest, now);
}

/*
 * Record that a cleanup of this database has finished.
 */
void
idem_report_cleanup(void)
{
	idem_count(IDEM_COUNT_CLEANUP_PASSES, 1);
	pg_atomic_write_u64(&database_stats->last_cleanup,
						(uint64) GetCurrentTimestamp());
	pg_atomic_write_u64(&database_stats->idle_since,
						(uint64) idem_monotonic_time());
	(void) idem_latest_clock();
}

/*
 * The same when this transaction commits: if it is rolled back, the cleanup
 * has deleted nothing.  Does nothing if it is prepared.
 */
void
idem_report_cleanup_at_commit(void)
{
	static bool callbacks_registered = false;
	int			level = GetCurrentTransactionNestLevel();

	if (!callbacks_registered)
	{
		RegisterXactCallback(end_transaction, NULL);
		RegisterSubXactCallback(end_subtransaction, NULL);
		callbacks_registered = true;
	}
	if (cleanup_level == 0 || level < cleanup_level)
		cleanup_level = level;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if (cleanup_level == 0)
		return;
	if (event == XACT_EVENT_COMMIT)
		idem_report_cleanup();
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
		cleanup_level = 0;
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId subxact,
				   SubTransactionId parent, void *arg)
{
	if (cleanup_level < GetCurrentTransactionNestLevel())
		return;
	if (event == SUBXACT_EVENT_COMMIT_SUB)
		cleanup_level--;
	else if (event == SUBXACT_EVENT_ABORT_SUB)
		cleanup_level = 0;
}

/*
 * idem_cleanup_idle() -> double precision
 *
 * Returns for how many seconds no cleanup of this database has finished,
 * since the statistics were reset, by a clock that nobody can set.  NULL
 * without space for the statistics.
 */
PG_FUNCTION_INFO_V1(idem_cleanup_idle);
Datum
idem_cleanup_idle(PG_FUNCTION_ARGS)
{
	int64		since;

	if (idem_counters == NULL)
		idem_attach_stats();
	if (database_stats == &nowhere)
		PG_RETURN_NULL();
	since = (int64) pg_atomic_read_u64(&database_stats->idle_since);
	PG_RETURN_FLOAT8(Max(idem_monotonic_time() - since, 0) / 1e6);
}

/*
 * idem_stats_data() -> setof row
 *
 * Shows other databases only to roles that can see other sessions'
 * statistics.  This database is included, unless there is no space for its
 * counters.
 */
PG_FUNCTION_INFO_V1(idem_stats_data);
Datum
idem_stats_data(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	bool		see_all = has_privs_of_role(GetUserId(),
											ROLE_PG_READ_ALL_STATS);
	SharedStats *shared;

	InitMaterializedSRF(fcinfo, 0);
	if (idem_counters == NULL)
		idem_attach_stats();
	shared = attach_shared_memory();
	for (int i = 0; shared != NULL && i < MAX_DATABASES; i++)
	{
		DatabaseStats *stats = &shared->databases[i];
		Oid			database = pg_atomic_read_u32(&stats->database);
		TimestampTz last_cleanup;
		Datum		values[IDEM_NUM_COUNTERS + 3];
		bool		nulls[IDEM_NUM_COUNTERS + 3] = {0};
		int			n = 0;

		if (!OidIsValid(database) || !(see_all || database == MyDatabaseId))
			continue;
		values[n++] = ObjectIdGetDatum(database);
		for (int j = 0; j < IDEM_NUM_COUNTERS; j++)
			values[n++] = Int64GetDatum((int64) sum(stripes_of(shared, stats), j));
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
	if (database_stats == &nowhere)
		clear(&nowhere, &nowhere_stripe, 1, GetCurrentTimestamp());
	else
		clear(database_stats,
			  stripes_of(attach_shared_memory(), database_stats), nstripes,
			  GetCurrentTimestamp());
	PG_RETURN_VOID();
}

/*
 * Return the shared memory; NULL if the server does not have it.
 */
static SharedStats *
attach_shared_memory(void)
{
	static IdemSharedMemory memory = {
		.name = "idempotency statistics",
		.init = init_shared_memory,
	};

	memory.size = SIZE_OF_STATS(nstripes);
	return idem_attach_shared_memory(&memory);
}

static void
init_shared_memory(void *memory)
{
	SharedStats *stats = memory;

	memset(stats, 0, SIZE_OF_STATS(nstripes));
	SpinLockInit(&stats->mutex);
	for (int i = 0; i < MAX_DATABASES; i++)
	{
		DatabaseStats *set = &stats->databases[i];

		pg_atomic_init_u32(&set->database, InvalidOid);
		pg_atomic_init_u64(&set->last_cleanup, 0);
		pg_atomic_init_u64(&set->idle_since, 0);
		pg_atomic_init_u64(&set->latest_clock, 0);
		pg_atomic_init_u64(&set->stats_reset, 0);
		for (int j = 0; j < nstripes * IDEM_NUM_COUNTERS; j++)
			pg_atomic_init_u64(&stripes_of(stats, set)[j / IDEM_NUM_COUNTERS].counters[j % IDEM_NUM_COUNTERS],
							   0);
	}
}

/*
 * Return the set of this database.  If it has none, assign one.  NULL if all
 * belong to other databases.
 */
static DatabaseStats *
find_database(SharedStats *stats)
{
	Oid			gone[MAX_DATABASES];
	DatabaseStats *set;

	memset(gone, 0, sizeof(gone));
	set = assign_set(stats, gone);
	if (set == NULL)
	{
		find_gone(stats, gone);
		set = assign_set(stats, gone);
	}
	return set;
}

/*
 * Return the set of this database or, if it has none, assign the set of a
 * database in "gone", which has an OID for each set; InvalidOid matches free
 * sets.  NULL if there is no such set either.
 */
static DatabaseStats *
assign_set(SharedStats *stats, const Oid *gone)
{
	DatabaseStats *own = NULL;
	DatabaseStats *vacant = NULL;
	TimestampTz now = GetCurrentTimestamp();

	SpinLockAcquire(&stats->mutex);
	for (int i = 0; i < MAX_DATABASES && own == NULL; i++)
	{
		DatabaseStats *set = &stats->databases[i];
		Oid			owner = pg_atomic_read_u32(&set->database);

		if (owner == MyDatabaseId)
			own = set;
		else if (owner == gone[i] && vacant == NULL)
			vacant = set;
	}
	if (own == NULL && vacant != NULL)
	{
		clear(vacant, stripes_of(stats, vacant), nstripes, now);
		pg_atomic_write_u32(&vacant->database, MyDatabaseId);
		own = vacant;
	}
	SpinLockRelease(&stats->mutex);
	return own;
}

/*
 * Fill "gone" with the OIDs of sets whose databases have been dropped.
 * Leaves its other elements unchanged.
 */
static void
find_gone(SharedStats *stats, Oid *gone)
{
	/* Otherwise an existing database might be cached as missing. */
	AcceptInvalidationMessages();
	for (int i = 0; i < MAX_DATABASES; i++)
	{
		Oid			owner = pg_atomic_read_u32(&stats->databases[i].database);

		if (OidIsValid(owner) && get_database_name(owner) == NULL)
			gone[i] = owner;
	}
}

/*
 * Return the stripes of a set; there are "nstripes".
 */
static Stripe *
stripes_of(SharedStats *stats, const DatabaseStats *set)
{
	Stripe	   *first = (Stripe *) CACHELINEALIGN(stats + 1);

	return first + (set - stats->databases) * nstripes;
}

/*
 * Return the sum of a counter over the stripes of a set.
 */
static uint64
sum(const Stripe *stripes, IdemCounter counter)
{
	uint64		total = 0;

	for (int i = 0; i < nstripes; i++)
		total += pg_atomic_read_u64(unconstify(pg_atomic_uint64 *,
											   &stripes[i].counters[counter]));
	return total;
}

/*
 * Start counting at zero.
 */
static void
clear(DatabaseStats *set, Stripe *stripes, int count, TimestampTz now)
{
	pg_atomic_write_u64(&set->last_cleanup, 0);
	pg_atomic_write_u64(&set->idle_since, (uint64) idem_monotonic_time());
	pg_atomic_write_u64(&set->latest_clock, (uint64) now);
	pg_atomic_write_u64(&set->stats_reset, (uint64) now);
	for (int i = 0; i < count; i++)
	{
		for (int j = 0; j < IDEM_NUM_COUNTERS; j++)
			pg_atomic_write_u64(&stripes[i].counters[j], 0);
	}
}
