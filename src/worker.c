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
 * What a worker needs to know of the visits before, and what the next one
 * must know, is in shared memory that needs no lock: there is one worker at a
 * time, and the launcher writes before that starts and reads when it has
 * ended.
 *
 * Each table is cleaned in transactions of its own.  One that fails, because
 * somebody altered or locked the table, is logged, and the table is left alone
 * until the next interval; the other tables and databases do not suffer.  But
 * nothing is logged where the extension has just been dropped, or by a process
 * that is told to end between two rows.
 *
 * The launcher starts when recovery has finished, so on a standby it starts
 * with the promotion.  It is not registered under pg_upgrade, whose servers
 * must not change.
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

/*
 * What is remembered of a database from one visit to the next.
 */
typedef struct Visit
{
	Oid			database;
	bool		work_left;
	bool		failed[IDEM_NUM_CLEANUP_KINDS]; /* in this interval */
	IdemCleanupPosition positions[IDEM_NUM_CLEANUP_KINDS];
} Visit;

typedef struct WorkerState
{
	bool		connected;
	Visit		visit;			/* the one that is going on */
} WorkerState;

static WorkerState *state = NULL;

/* The launcher's; of Visit, in TopMemoryContext. */
static List *visits = NIL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

PGDLLEXPORT void idem_launcher_main(Datum arg);
PGDLLEXPORT void idem_worker_main(Datum arg);

static void request_shmem(void);
static void init_shmem(void);
static void leave_if_told(int exit_code);
static bool visit_databases(bool continued);
static List *update_visits(const List *databases);
static List *list_databases(void);
static bool run_worker(Oid database);
static void wait_for_worker(BackgroundWorkerHandle *handle);
static char *installed_in(void);
static bool clean_all(const char *database);
static bool clean_batch(IdemCleanupKind kind, const char *database);

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
 * The launcher.  When told to end it exits with 1, so that the postmaster
 * starts it again, unless that is shutting down.
 */
void
idem_launcher_main(Datum arg)
{
	bool		work_left = false;
	TimestampTz next_pass = 0;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	for (;;)
	{
		long		timeout = -1;

		leave_if_told(1);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			work_left = false;
		}

		if (idem_cleanup_interval > 0)
		{
			TimestampTz now = GetCurrentTimestamp();
			bool		continued = work_left && now < next_pass;

			if (!continued)
				next_pass = idem_add_ms(now, idem_cleanup_interval);
			work_left = visit_databases(continued);
			timeout = work_left ? 0 :
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
 * End the process if SIGTERM has asked for that, and otherwise do what
 * interrupts ask for.  Not a word is logged, where CHECK_FOR_INTERRUPTS()
 * would call it a FATAL error.
 */
static void
leave_if_told(int exit_code)
{
	if (ProcDiePending)
		proc_exit(exit_code);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Send a worker to each database in turn, or, if this pass is continued within
 * the interval, to those where work was left.  Returns whether one of them
 * left work behind.
 *
 * If the table of workers is full, that is logged, and the databases that are
 * left have to wait for the next interval.
 */
static bool
visit_databases(bool continued)
{
	List	   *databases = list_databases();
	ListCell   *cell;
	bool		work_left = false;

	visits = update_visits(databases);
	list_free(databases);
	IDEM_INJECTION_POINT("idem-launcher-pass");

	foreach(cell, visits)
	{
		Visit	   *visit = lfirst(cell);

		leave_if_told(1);
		if (!continued)
			memset(visit->failed, 0, sizeof(visit->failed));
		else if (!visit->work_left)
			continue;

		visit->work_left = false;
		state->visit = *visit;
		if (!run_worker(visit->database))
		{
			ereport(LOG,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("could not start a cleanup worker of extension \"%s\"",
							"idempotency"),
					 errhint("Expired keys are kept until the next try; consider raising \"%s\".",
							 "max_worker_processes")));
			break;
		}
		*visit = state->visit;
		work_left |= visit->work_left;
	}
	return work_left;
}

/*
 * A list with what is remembered of each of these databases, to replace
 * "visits".
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
		Visit	   *visit = palloc0(sizeof(Visit));

		visit->database = lfirst_oid(cell);
		foreach(known, visits)
		{
			if (((Visit *) lfirst(known))->database == visit->database)
				*visit = *(Visit *) lfirst(known);
		}
		result = lappend(result, visit);
	}
	list_free_deep(visits);
	MemoryContextSwitchTo(old);
	return result;
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
			idem_is_listed(names, NameStr(database->datname)))
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
bool
idem_is_listed(const List *names, const char *database)
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
 * locked the database, must not hold up the others, and if we are told to end,
 * it must not meet the next launcher's.
 */
static void
wait_for_worker(BackgroundWorkerHandle *handle)
{
	TimestampTz give_up_at = idem_add_ms(GetCurrentTimestamp(), CONNECT_MS);
	pid_t		pid;

	while (GetBackgroundWorkerPid(handle, &pid) != BGWH_STOPPED)
	{
		bool		connected = state->connected;

		IDEM_INJECTION_POINT("idem-launcher-wait");
		if (ProcDiePending ||
			(!connected && GetCurrentTimestamp() >= give_up_at))
			TerminateBackgroundWorker(handle);
		leave_if_told(1);
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
	char	   *database;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg),
											  InvalidOid, 0);
	state->connected = true;
	IDEM_INJECTION_POINT("idem-worker-connected");

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

	database = installed_in();
	if (database == NULL)
		proc_exit(0);
	while (clean_all(database))
	{
		IDEM_INJECTION_POINT("idem-worker-batch");
		leave_if_told(0);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		if (GetCurrentTimestamp() >= leave_at)
		{
			state->visit.work_left = true;
			break;
		}
	}
	proc_exit(0);
}

/*
 * The name of this database, if the extension is installed here; otherwise
 * NULL.
 */
static char *
installed_in(void)
{
	char	   *name = NULL;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	if (idem_is_installed())
		name = MemoryContextStrdup(TopMemoryContext,
								   get_database_name(MyDatabaseId));
	CommitTransactionCommand();
	return name;
}

/*
 * Delete one batch of each kind.  Returns whether there may be more to delete.
 * A pass that has come to its end is reported, but not one that had to leave
 * a table out.
 */
static bool
clean_all(const char *database)
{
	bool		more = false;
	bool		failed = false;

	for (int kind = 0; kind < IDEM_NUM_CLEANUP_KINDS; kind++)
	{
		leave_if_told(0);
		if (!state->visit.failed[kind])
			more |= clean_batch(kind, database);
		failed |= state->visit.failed[kind];
	}
	leave_if_told(0);
	if (!more && !failed)
		idem_report_cleanup();
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
	return more;
}

/*
 * Delete one batch, in one transaction.  Returns whether there may be another.
 * An error is logged, and noted in state->visit.
 */
static bool
clean_batch(IdemCleanupKind kind, const char *database)
{
	IdemCleanupPosition position = state->visit.positions[kind];
	int			batch_size = idem_cleanup_batch_size;
	volatile int64 deleted = 0;

	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		pgstat_report_activity(STATE_RUNNING, "deleting expired rows");

		if (idem_is_installed())
			deleted = idem_cleanup_batch(kind, batch_size, &position);

		IDEM_INJECTION_POINT("idem-worker-commit");
		PopActiveSnapshot();
		CommitTransactionCommand();
		state->visit.positions[kind] = position;
	}
	PG_CATCH();
	{
		errcontext("cleanup of expired %s in database \"%s\"",
				   idem_cleanup_names[kind], database);
		AbortCurrentTransaction();
		state->visit.failed[kind] = true;
		if (installed_in() != NULL)
			EmitErrorReport();
		FlushErrorState();
	}
	PG_END_TRY();
	return deleted == batch_size;
}
