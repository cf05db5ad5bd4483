/*-------------------------------------------------------------------------
 *
 * worker.c
 *		A background worker: one visit to one database.
 *
 * A worker leaves at once if the extension is not installed.  Otherwise it
 * deletes one batch per transaction until nothing is left, but for at most
 * VISIT_MS: then it leaves, and the launcher (see launcher.c) sends another
 * one.  After a batch of each table it pauses for idempotency.cleanup_delay.
 * So no database is held for long, and DROP DATABASE, ALTER DATABASE RENAME
 * and CREATE DATABASE ... TEMPLATE, which wait 5 seconds for others to leave,
 * succeed.  From 19 on they end the worker.
 *
 * Each table is cleaned in its own transactions.  If one fails, because a
 * user has altered or locked the table, the error is logged, and the table is
 * skipped until the next interval.  Other tables and databases are not
 * affected.
 *
 * Events that are not errors are not logged as such: the extension was
 * dropped between two steps, the database was dropped or closed before the
 * worker had connected, or the process was asked to end.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/wait_event.h"

#include "stats/stats.h"
#include "store/relations.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/times.h"
#include "worker/worker.h"

/* How long a worker stays in a database. */
#define VISIT_MS		1000L

/*
 * Settings that must not come from the database or the bootstrap superuser.
 * Not all servers have all of them.
 *
 * Nobody waits for the worker's commits, and the only useful time limit is
 * that on waits for locks (see below).
 */
static const char *const settings[][2] = {
	{"default_transaction_deferrable", "off"},
	{"default_transaction_isolation", "read committed"},
	{"default_transaction_read_only", "off"},
	{"exit_on_error", "off"},
	{"idle_in_transaction_session_timeout", "0"},
	{"idle_session_timeout", "0"},
	{"lock_timeout", "0"},
	{"search_path", ""},
	{"statement_timeout", "0"},
	{"synchronous_commit", "off"},
	{"transaction_timeout", "0"},
};

IdemWorkerState *idem_worker_state = NULL;

/* The name of the worker's database; NULL until it is known. */
static char *database = NULL;

/* Is this a worker that has not connected yet? */
static bool connecting = false;

static emit_log_hook_type prev_emit_log_hook = NULL;

PGDLLEXPORT void idem_worker_main(Datum arg);

static void filter_log(ErrorData *edata);
static void enter_database(Oid oid);
static bool pause_between_batches(int64 leave_at);
static bool clean_all(void);
static bool clean_batch(IdemCleanupKind kind);
static void log_pass(void);
static int64 clean_as_owner(IdemCleanupKind kind,
							IdemCleanupPosition *position, bool *more);
static bool is_installed(void);

/*
 * Begin a worker, or the launcher.
 */
void
idem_begin_worker(void)
{
	prev_emit_log_hook = emit_log_hook;
	emit_log_hook = filter_log;

	for (int i = 0; i < lengthof(settings); i++)
	{
		if (GetConfigOption(settings[i][0], true, false) != NULL)
			SetConfigOption(settings[i][0], settings[i][1],
							PGC_SUSET, PGC_S_OVERRIDE);
	}

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
}

/*
 * Log hook: suppress the errors that end a process as intended.  The
 * postmaster's line about its end remains.
 */
static void
filter_log(ErrorData *edata)
{
	if (edata->elevel == FATAL &&
		(edata->sqlerrcode == ERRCODE_ADMIN_SHUTDOWN ||
		 (connecting &&
		  (edata->sqlerrcode == ERRCODE_UNDEFINED_DATABASE ||
		   edata->sqlerrcode == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE))))
		edata->output_to_server = false;
	else if (prev_emit_log_hook)
		prev_emit_log_hook(edata);
}

/*
 * End the process if SIGTERM has requested it.  Otherwise process interrupts.
 */
void
idem_leave_if_told(int exit_code)
{
	if (ProcDiePending)
		proc_exit(exit_code);
	CHECK_FOR_INTERRUPTS();
}

/*
 * A worker: clean up one database.
 */
void
idem_worker_main(Datum arg)
{
	int64		leave_at = idem_monotonic_time() + VISIT_MS * 1000;

	idem_begin_worker();
	enter_database(DatumGetObjectId(arg));
	while (clean_all())
	{
		IDEM_INJECTION_POINT("idem-worker-batch");
		idem_leave_if_told(0);
		if (!pause_between_batches(leave_at))
			break;
	}
	proc_exit(0);
}

/*
 * Sleep for idempotency.cleanup_delay.  Returns false at once if the pause
 * would last beyond "leave_at"; then the launcher makes it.
 */
static bool
pause_between_batches(int64 leave_at)
{
	int64		begin = idem_monotonic_time();

	for (;;)
	{
		int64		now;
		int64		end;

		idem_leave_if_told(0);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		now = idem_monotonic_time();
		end = begin + (int64) (idem_cleanup_delay * 1000);
		if (Max(now, end) >= leave_at)
		{
			idem_worker_state->visit.work_left = true;
			idem_worker_state->visit.continue_at = end;
			return false;
		}
		if (now >= end)
			return true;
		(void) WaitLatch(MyLatch,
						 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 (long) (end - now + 999) / 1000, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
}

/*
 * Connect to the database.  Does not return if the extension is not installed
 * there.
 *
 * The launcher limits the duration of this wait.
 */
static void
enter_database(Oid oid)
{
	connecting = true;
	BackgroundWorkerInitializeConnectionByOid(oid, InvalidOid, 0);
	connecting = false;
	idem_worker_state->connected = true;
	IDEM_INJECTION_POINT("idem-worker-connected");
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);

	if (!is_installed())
		proc_exit(0);
}

/*
 * Is the extension installed here?  Uses its own transaction, in which it
 * also finds out what needs one.
 */
static bool
is_installed(void)
{
	bool		installed;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	installed = idem_is_installed();
	if (installed && database == NULL)
	{
		database = MemoryContextStrdup(TopMemoryContext,
									   get_database_name(MyDatabaseId));
		idem_attach_stats();
	}
	CommitTransactionCommand();
	return installed;
}

/*
 * Delete one batch of each kind.  Returns whether there might be more to
 * delete.  Reports a pass that has finished, unless it had to skip a table.
 */
static bool
clean_all(void)
{
	bool	   *table_failed = idem_worker_state->visit.failed;
	bool		more = false;
	bool		failed = false;

	for (int kind = 0; kind < IDEM_NUM_CLEANUP_KINDS; kind++)
	{
		idem_leave_if_told(0);
		if (!table_failed[kind])
			more |= clean_batch(kind);
		failed |= table_failed[kind];
	}
	idem_leave_if_told(0);
	if (!more && !failed)
		idem_report_cleanup();
	if (!more)
		log_pass();
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
	return more;
}

/*
 * Delete one batch in one transaction.  Returns whether there might be
 * another.  An error is logged, and noted for the rest of the interval.  Does
 * not return if the extension has been dropped.
 */
static bool
clean_batch(IdemCleanupKind kind)
{
	IdemDatabaseVisit *visit = &idem_worker_state->visit;
	IdemCleanupPosition position = visit->positions[kind];
	bool		more_here = false;
	volatile bool installed = false;
	volatile bool more = false;

	PG_TRY();
	{
		int64		deleted = 0;

		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		pgstat_report_activity(STATE_RUNNING, "deleting expired rows");

		installed = idem_is_installed();
		if (installed)
			deleted = clean_as_owner(kind, &position, &more_here);

		IDEM_INJECTION_POINT("idem-worker-commit");
		PopActiveSnapshot();
		CommitTransactionCommand();
		visit->positions[kind] = position;
		visit->deleted[kind] += deleted;
		more = more_here;
	}
	PG_CATCH();
	{
		errcontext("cleanup of expired %s in database \"%s\"",
				   idem_cleanup_names[kind], database);
		AbortCurrentTransaction();
		visit->failed[kind] = true;
		installed = is_installed();
		if (installed)
			EmitErrorReport();
		FlushErrorState();
	}
	PG_END_TRY();

	if (!installed)
		proc_exit(0);
	return more;
}

/*
 * Log how many rows a pass, which can consist of several visits, has deleted,
 * unless there were none.
 */
static void
log_pass(void)
{
	int64	   *deleted = idem_worker_state->visit.deleted;
	int64		keys = deleted[IDEM_CLEANUP_KEYS];
	int64		tokens = deleted[IDEM_CLEANUP_TOKENS];
	int64		messages = deleted[IDEM_CLEANUP_MESSAGES];

	if (keys + tokens + messages > 0)
		ereport(LOG,
				(errcode(ERRCODE_SUCCESSFUL_COMPLETION),
				 errmsg("cleanup of database \"%s\" deleted " INT64_FORMAT
						" keys, " INT64_FORMAT " tokens and " INT64_FORMAT
						" messages",
						database, keys, tokens, messages),
				 errhidestmt(true)));
	memset(deleted, 0, sizeof(idem_worker_state->visit.deleted));
}

/*
 * Delete one batch as the table's owner, with the restrictions of VACUUM: an
 * index on an expression can call functions of other roles, and the worker's
 * own rights are the bootstrap superuser's.
 */
static int64
clean_as_owner(IdemCleanupKind kind, IdemCleanupPosition *position, bool *more)
{
	Oid			user;
	int			context;
	int64		deleted;

	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(idem_cleanup_owner(kind),
						   context | SECURITY_RESTRICTED_OPERATION);
	deleted = idem_cleanup_batch(kind, idem_cleanup_batch_size, position,
								 NULL, more);
	SetUserIdAndSecContext(user, context);
	return deleted;
}
