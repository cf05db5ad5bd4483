/*-------------------------------------------------------------------------
 *
 * worker.c
 *		The background workers that clean up expired rows.
 *
 * With the library in shared_preload_libraries there is one launcher.  It is
 * connected to no database; every idempotency.cleanup_interval it starts a
 * worker for each database in turn and waits for it to end.  A worker leaves
 * at once where the extension is not installed, and otherwise deletes one
 * batch a transaction until nothing is left, but for VISIT_MS at most: then
 * it leaves and the launcher sends another one, after those for the other
 * databases.  So no database is held for long, and DROP DATABASE, ALTER
 * DATABASE RENAME and CREATE DATABASE ... TEMPLATE, which wait 5 seconds for
 * others to leave, get through.
 *
 * Whether a worker left work behind it tells in shared memory, in a flag that
 * needs no lock: there is one worker at a time, and the launcher reads the
 * flag when that has ended.
 *
 * The launcher starts when recovery has finished, so on a standby it starts
 * with the promotion.  It is not registered under pg_upgrade, whose servers
 * must not change.  A worker that fails logs why and is tried again at the
 * next interval.
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
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"

#include "compat.h"
#include "cleanup.h"
#include "idempotency.h"
#include "rate_limit.h"
#include "relations.h"
#include "settings.h"
#include "stats.h"
#include "worker.h"

/*
 * How long a worker stays in a database, how long it may take to get in, and
 * how long the launcher stays away after a failure of its own.
 */
#define VISIT_MS		1000
#define CONNECT_MS		3000
#define RESTART_SECONDS	10

typedef struct WorkerState
{
	bool		connected;
	bool		work_left;
} WorkerState;

static WorkerState *state = NULL;
static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

PGDLLEXPORT void idem_launcher_main(Datum arg);
PGDLLEXPORT void idem_worker_main(Datum arg);

static void request_shmem(void);
static void init_shmem(void);
static List *list_databases(void);
static bool visits(const List *names, const char *database);
static bool visit_databases(void);
static bool run_worker(Oid database);
static void wait_for_worker(BackgroundWorkerHandle *handle);
static bool clean_batch(void);

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
	RequestAddinShmemSpace(MAXALIGN(sizeof(WorkerState)));
	idem_request_stats_memory();
	idem_reserve_rate_limits();
}

static void
init_shmem(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	state = ShmemInitStruct("idempotency worker", sizeof(WorkerState), &found);
	if (!found)
		memset(state, 0, sizeof(WorkerState));
	LWLockRelease(AddinShmemInitLock);
}

/*
 * The launcher.
 */
void
idem_launcher_main(Datum arg)
{
	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	for (;;)
	{
		bool		again = false;
		long		timeout = -1;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		if (idem_cleanup_interval > 0)
		{
			again = visit_databases();
			timeout = again ? 0 :
				(long) Min(Max(idem_cleanup_interval, 1), INT_MAX);
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
 * Send a worker to each database in turn.  Returns whether one of them left
 * work behind.
 *
 * If the table of workers is full, that is logged, and the databases that are
 * left have to wait for the next interval.
 */
static bool
visit_databases(void)
{
	List	   *databases = list_databases();
	ListCell   *cell;
	bool		work_left = false;

	foreach(cell, databases)
	{
		CHECK_FOR_INTERRUPTS();
		state->work_left = false;
		if (!run_worker(lfirst_oid(cell)))
		{
			ereport(LOG,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("could not start a cleanup worker of extension \"%s\"",
							"idempotency"),
					 errhint("Expired keys are kept until the next try; consider raising \"%s\".",
							 "max_worker_processes")));
			break;
		}
		if (state->work_left)
			work_left = true;
	}
	list_free(databases);
	return work_left;
}

/*
 * The databases that accept connections and that the settings name.
 */
static List *
list_databases(void)
{
	MemoryContext context = CurrentMemoryContext;
	List	   *databases = NIL;
	List	   *names;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	StartTransactionCommand();
	if (!SplitIdentifierString(pstrdup(idem_databases), ',', &names))
	{
		ereport(LOG,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid list of names in setting \"%s\"",
						"idempotency.databases")));
		names = NIL;
	}

	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database database = (Form_pg_database) GETSTRUCT(tuple);

		if (database->datallowconn &&
			database->datconnlimit != DATCONNLIMIT_INVALID_DB &&
			visits(names, NameStr(database->datname)))
		{
			MemoryContext old = MemoryContextSwitchTo(context);

			databases = lappend_oid(databases, database->oid);
			MemoryContextSwitchTo(old);
		}
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	MemoryContextSwitchTo(context);
	return databases;
}

/*
 * Does a list of names contain this database, or "*"?
 */
static bool
visits(const List *names, const char *database)
{
	ListCell   *cell;

	foreach(cell, names)
	{
		const char *name = lfirst(cell);

		if (strcmp(name, "*") == 0 || strcmp(name, database) == 0)
			return true;
	}
	return false;
}

/*
 * Start a worker and wait for it to end.  Returns false if there is no place
 * for one.
 */
static bool
run_worker(Oid database)
{
	BackgroundWorker worker = {0};
	BackgroundWorkerHandle *handle;

	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_worker_main", BGW_MAXLEN);
	strlcpy(worker.bgw_name, "idempotency cleanup", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idempotency cleanup", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_notify_pid = MyProcPid;

	state->connected = false;
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
		return false;
	wait_for_worker(handle);
	pfree(handle);
	return true;
}

/*
 * Wait for a worker to end.  One that cannot connect, because somebody has
 * locked the database, must not hold up the others.
 */
static void
wait_for_worker(BackgroundWorkerHandle *handle)
{
	TimestampTz give_up_at = idem_add_ms(GetCurrentTimestamp(), CONNECT_MS);
	pid_t		pid;

	while (GetBackgroundWorkerPid(handle, &pid) != BGWH_STOPPED)
	{
		bool		connected = state->connected;

		CHECK_FOR_INTERRUPTS();
		if (!connected && GetCurrentTimestamp() >= give_up_at)
			TerminateBackgroundWorker(handle);
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_EXIT_ON_PM_DEATH |
						 (connected ? 0 : WL_TIMEOUT),
						 connected ? -1 : CONNECT_MS, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
}

/*
 * A worker: clean up one database.
 */
void
idem_worker_main(Datum arg)
{
	TimestampTz leave_at = idem_add_ms(GetCurrentTimestamp(), VISIT_MS);

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg),
											  InvalidOid, 0);
	state->connected = true;

	/*
	 * Nobody waits for these commits, and we must not wait long for locks.
	 * What is the default in this database must not matter.
	 */
	SetConfigOption("default_transaction_isolation", "read committed",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);

	while (clean_batch())
	{
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		if (GetCurrentTimestamp() >= leave_at)
		{
			state->work_left = true;
			break;
		}
	}
	proc_exit(0);
}

/*
 * Delete one batch.  Returns whether there may be another.
 */
static bool
clean_batch(void)
{
	bool		more = false;

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, "deleting expired rows");

	if (idem_is_installed())
	{
		IdemCleanup result;

		idem_cleanup_batch(idem_cleanup_batch_size, &result);
		more = result.more;
	}

	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
	return more;
}
