/*-------------------------------------------------------------------------
 *
 * launcher.c
 *		The launcher: starts a cleanup worker in each database in turn.
 *
 * With the library in shared_preload_libraries there is one launcher.  It is
 * connected to no database.  Every idempotency.cleanup_interval it starts a
 * worker for each database in turn and waits for it to end; see worker.c.  If
 * a worker reports that there is more to do, the launcher sends another one,
 * after those for the other databases, and after the pause of
 * idempotency.cleanup_delay.
 *
 * Only the time, or new settings, begin a pass over the databases, although
 * other events wake the launcher: any DROP DATABASE wakes all processes.
 * Times are from the monotonic clock, here and in worker.c, so that setting
 * the clock neither stops a process nor keeps a worker in its database.
 *
 * The launcher starts when recovery has finished, so on a standby it starts
 * with the promotion.  It is not registered under pg_upgrade, whose servers
 * must not change.  When it ends, for whatever reason, its worker is asked to
 * end, too, so that it does not meet a worker of the next launcher.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/varlena.h"
#include "utils/wait_event.h"

#include "keys/rate_limit.h"
#include "outbox/lane_low_water.h"
#include "stats/stats.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/times.h"
#include "worker/launcher.h"
#include "worker/worker.h"

/*
 * The time a worker has to connect, and the time before a failed launcher is
 * started again.
 */
#define CONNECT_MS		3000L
#define RESTART_SECONDS	10

/* A list of IdemDatabaseVisit, in TopMemoryContext. */
static List *visits = NIL;

/* Might idempotency.databases have changed since list_databases() read it? */
static bool names_are_new = true;

/* The worker that might be running. */
static BackgroundWorkerHandle *current_worker = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

PGDLLEXPORT void idem_launcher_main(Datum arg);

static void request_shmem(void);
static void init_shmem(void);
static void take_worker_along(int code, Datum arg);
static long ms_until(int64 time);
static void forget_pauses(void);
static int64 visit_databases(bool continued);
static List *update_visits(const List *databases);
static List *list_databases(void);
static void report_unknown_names(const List *names, const List *known);
static bool run_worker(Oid database);
static void wait_for_worker(void);
static void report_no_entry(Oid database);

/*
 * Register the launcher; called by _PG_init() when the postmaster loads the
 * library.
 */
void
idem_register_launcher(void)
{
	BackgroundWorker worker = {0};

	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shmem;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = init_shmem;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = RESTART_SECONDS;
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_launcher_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idempotency launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idempotency launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

static void
request_shmem(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(IdemWorkerState)));
	idem_request_stats_memory();
	idem_reserve_rate_limits();
	idem_reserve_waiters();
	idem_lane_low_water_reserve();
}

static void
init_shmem(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	idem_worker_state = ShmemInitStruct("idempotency worker",
										sizeof(IdemWorkerState), &found);
	if (!found)
		memset(idem_worker_state, 0, sizeof(IdemWorkerState));
	LWLockRelease(AddinShmemInitLock);
}

/*
 * The launcher.  When it is asked to end it exits with 1, so that the
 * postmaster starts it again, unless that is shutting down.
 */
void
idem_launcher_main(Datum arg)
{
	int64		next_pass = 0;
	int64		continue_at = PG_INT64_MAX;

	idem_begin_worker();
	before_shmem_exit(take_worker_along, (Datum) 0);
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	for (;;)
	{
		long		timeout = -1;

		idem_leave_if_told(1);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			names_are_new = true;
			forget_pauses();
			next_pass = 0;
		}

		if (idem_cleanup_interval > 0)
		{
			int64		interval = (int64) (idem_cleanup_interval * 1000);
			int64		now = idem_monotonic_time();
			bool		continued = now < next_pass;

			if (now >= continue_at || !continued)
			{
				if (!continued)
					next_pass = now + interval;
				continue_at = visit_databases(continued);
				if (continue_at == PG_INT64_MAX)
					next_pass = idem_monotonic_time() + interval;
			}
			timeout = ms_until(Min(continue_at, next_pass));
		}

		/* A signal that came while a worker was running has lost its latch. */
		if (ConfigReloadPending)
			continue;

		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH |
						 (timeout >= 0 ? WL_TIMEOUT : 0),
						 timeout, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
}

/*
 * Exit callback: end the worker that might be running.
 */
static void
take_worker_along(int code, Datum arg)
{
	if (current_worker != NULL)
		TerminateBackgroundWorker(current_worker);
}

/*
 * Return the milliseconds to sleep until a time: 0 if it has come, and
 * otherwise at least 1.
 */
static long
ms_until(int64 time)
{
	int64		us = time - idem_monotonic_time();

	return us <= 0 ? 0 : (long) Min((us + 999) / 1000, INT_MAX);
}

/*
 * End all pauses of idempotency.cleanup_delay.
 */
static void
forget_pauses(void)
{
	ListCell   *cell;

	foreach(cell, visits)
		((IdemDatabaseVisit *) lfirst(cell))->continue_at = 0;
}

/*
 * Send a worker to each database in turn or, if this pass is "continued"
 * within the interval, to those where work was left.  Skips databases in a
 * pause of idempotency.cleanup_delay.  Returns when to continue, or
 * PG_INT64_MAX if no worker left work behind.
 *
 * If the server has no free worker slot, that is logged, and the remaining
 * databases, or those where work is left, have to wait for the next interval.
 */
static int64
visit_databases(bool continued)
{
	List	   *databases = list_databases();
	ListCell   *cell;
	int64		continue_at = PG_INT64_MAX;

	visits = update_visits(databases);
	list_free(databases);
	IDEM_INJECTION_POINT("idem-launcher-pass");

	foreach(cell, visits)
	{
		IdemDatabaseVisit *visit = lfirst(cell);

		idem_leave_if_told(1);
		if (!continued)
			memset(visit->failed, 0, sizeof(visit->failed));
		else if (!visit->work_left)
			continue;
		if (visit->work_left &&
			visit->continue_at > idem_monotonic_time())
		{
			continue_at = Min(continue_at, visit->continue_at);
			continue;
		}

		visit->work_left = false;
		idem_worker_state->visit = *visit;
		if (!run_worker(visit->database))
		{
			ereport(LOG,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("could not start a cleanup worker of extension \"%s\"",
							"idempotency"),
					 errhint("Expired keys are kept until the next attempt; consider raising \"%s\".",
							 "max_worker_processes")));
			return PG_INT64_MAX;
		}
		*visit = idem_worker_state->visit;
		if (visit->work_left)
			continue_at = Min(continue_at, visit->continue_at);
	}
	return continue_at;
}

/*
 * Return a list of visits of these databases that keeps what "visits" says
 * about them, to replace "visits".
 */
static List *
update_visits(const List *databases)
{
	MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
	List	   *result = NIL;
	ListCell   *cell;
	ListCell   *known;

	foreach(cell, databases)
	{
		IdemDatabaseVisit *visit = palloc0(sizeof(IdemDatabaseVisit));

		visit->database = lfirst_oid(cell);
		foreach(known, visits)
		{
			if (((IdemDatabaseVisit *) lfirst(known))->database == visit->database)
				*visit = *(IdemDatabaseVisit *) lfirst(known);
		}
		result = lappend(result, visit);
	}
	list_free_deep(visits);
	MemoryContextSwitchTo(old);
	return result;
}

/*
 * Return the databases that accept connections and that the settings name.
 */
static List *
list_databases(void)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *databases = NIL;
	List	   *known = NIL;
	List	   *names;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	StartTransactionCommand();
	(void) SplitIdentifierString(pstrdup(idem_databases), ',', &names);

	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);

		known = lappend(known, pstrdup(NameStr(database->datname)));
		if (database->datallowconn &&
			database->datconnlimit != DATCONNLIMIT_INVALID_DB &&
			idem_is_listed(names, NameStr(database->datname)))
		{
			MemoryContext old = MemoryContextSwitchTo(context);

			databases = lappend_oid(databases, database->oid);
			MemoryContextSwitchTo(old);
		}
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	if (names_are_new)
		report_unknown_names(names, known);
	names_are_new = false;
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return databases;
}

/*
 * Log the names in idempotency.databases that are no database's.
 */
static void
report_unknown_names(const List *names, const List *known)
{
	StringInfoData unknown;
	ListCell   *cell;

	initStringInfo(&unknown);
	foreach(cell, names)
	{
		const char *name = lfirst(cell);
		bool		found = strcmp(name, "*") == 0;
		ListCell   *other;

		foreach(other, known)
			found |= strcmp(name, lfirst(other)) == 0;
		if (!found)
			appendStringInfo(&unknown, "%s\"%s\"",
							 unknown.len > 0 ? ", " : "", name);
	}
	if (unknown.len > 0)
		ereport(LOG,
				(errcode(ERRCODE_UNDEFINED_DATABASE),
				 errmsg("setting \"%s\" names databases that do not exist: %s",
						"idempotency.databases", unknown.data),
				 errhint("Correct the setting, or create the database. A name that is not in lower case needs double quotes.")));
}

/*
 * Start a worker and wait for it to end.  Returns false if there is no free
 * worker slot.
 */
static bool
run_worker(Oid database)
{
	BackgroundWorker worker = {0};

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION | BGWORKER_INTERRUPTIBLE;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_worker_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idempotency cleanup", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idempotency cleanup", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_notify_pid = MyProcPid;

	idem_worker_state->connected = false;
	if (!RegisterDynamicBackgroundWorker(&worker, &current_worker))
	{
		current_worker = NULL;
		return false;
	}
	wait_for_worker();
	pfree(current_worker);
	current_worker = NULL;
	if (!idem_worker_state->connected)
		report_no_entry(database);
	return true;
}

/*
 * Wait for the worker to end.  If it cannot connect because a session has
 * locked the database, it must not delay the others.
 */
static void
wait_for_worker(void)
{
	int64		give_up_at = idem_monotonic_time() + CONNECT_MS * 1000;
	pid_t		pid;

	while (GetBackgroundWorkerPid(current_worker, &pid) != BGWH_STOPPED)
	{
		IDEM_INJECTION_POINT("idem-launcher-wait");
		if (!idem_worker_state->connected &&
			idem_monotonic_time() >= give_up_at)
			TerminateBackgroundWorker(current_worker);
		idem_leave_if_told(1);

		/* Its end sets the latch; polling as well costs nothing. */
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 CONNECT_MS, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
}

/*
 * A worker has ended without connecting to the database.  Log that, unless
 * the database has been dropped or closed meanwhile.
 */
static void
report_no_entry(Oid database)
{
	List	   *databases = list_databases();
	char	   *name;

	StartTransactionCommand();
	name = get_database_name(database);
	if (name != NULL && list_member_oid(databases, database))
		ereport(LOG,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("a cleanup worker of extension \"%s\" could not connect to database \"%s\"",
						"idempotency", name),
				 errdetail("The database is locked, or does not allow connections."),
				 errhint("Expired keys are kept until the next attempt.")));
	CommitTransactionCommand();
	list_free(databases);
}
