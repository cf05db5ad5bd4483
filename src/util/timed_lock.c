/*-------------------------------------------------------------------------
 *
 * timed_lock.c
 *		Sleeping on a lock of the server, with a deadline.
 *
 * All that a call waits for is a lock in the server's lock manager: that of a
 * transaction, of a row, of a key (see store/key_lock.c).  So a waiter is
 * woken, appears in pg_locks, takes part in deadlock detection, and obeys
 * lock_timeout, statement_timeout and cancel requests.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "utils/guc.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "util/compat.h"
#include "util/subtransaction.h"
#include "util/timed_lock.h"

/* As in libpq/libpq.h, which needs Kerberos' headers if the server has it. */
extern bool pq_check_connection(void);

/* A sleep, and its limit in milliseconds. */
typedef struct LimitedSleep
{
	IdemSleep	sleep;
	void	   *arg;
	int			timeout;
} LimitedSleep;

static bool sleep_with_timeout(IdemSleep sleep, void *arg, int timeout);
static bool sleep_limited(void *arg);
static bool is_timeout(int sqlstate);

/*
 * Call "sleep", but do not let it sleep past "deadline".  Returns false if it
 * did not return by then.
 *
 * It can run in a subtransaction, which is released if it returns.  What it
 * acquires then belongs to CurTransactionResourceOwner.
 */
bool
idem_sleep_until(IdemSleep sleep, void *arg, TimestampTz deadline)
{
	long		remaining;

	if (TIMESTAMP_IS_NOEND(deadline))
	{
		sleep(arg);
		return true;
	}

	remaining = TimestampDifferenceMilliseconds(GetCurrentTimestamp(),
												deadline);
	if (remaining <= 0)
		return false;
	if (LockTimeout > 0 && LockTimeout <= remaining)
	{
		/* The user's own limit comes first, and is an error. */
		sleep(arg);
		return true;
	}
	return sleep_with_timeout(sleep, arg, (int) Min(remaining, INT_MAX));
}

/*
 * End the session (FATAL, 08006) if its client has closed the connection:
 * nobody would receive what the wait was for.  The server itself checks this
 * only if client_connection_check_interval is set; this is the same check.
 * Does nothing if there is no client, or if the platform cannot tell.
 */
void
idem_check_client(void)
{
	if (MyProcPort == NULL || !WaitEventSetCanReportClosed() ||
		pq_check_connection())
		return;
	ClientConnectionLost = true;
	InterruptPending = true;
	CHECK_FOR_INTERRUPTS();
}

/*
 * Call "sleep" with a time limit in milliseconds.
 *
 * Only an error ends a wait in the lock manager early.  So the limit is a
 * lock_timeout of our own, whose error is expected.  The caller has checked
 * that the session's lock_timeout is longer, or off.
 */
static bool
sleep_with_timeout(IdemSleep sleep, void *arg, int timeout)
{
	LimitedSleep limited = {sleep, arg, timeout};
	TimestampTz start = GetCurrentTimestamp();
	ErrorData  *error = idem_in_subtransaction(sleep_limited, &limited, is_timeout);

	if (error == NULL)
		return true;
	FreeErrorData(error);

	/* Of two timeouts at once the server reports one, and drops both. */
	if (StatementTimeout > 0 &&
		!get_timeout_active(STATEMENT_TIMEOUT) &&
		get_timeout_finish_time(STATEMENT_TIMEOUT) > start)
		ereport(ERROR,
				(errcode(ERRCODE_QUERY_CANCELED),
				 errmsg("canceling statement due to statement timeout")));
	return false;
}

static bool
sleep_limited(void *arg)
{
	LimitedSleep *limited = arg;
	char		value[16];

	snprintf(value, sizeof(value), "%dms", limited->timeout);
	(void) set_config_option("lock_timeout", value,
							 PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	IDEM_INJECTION_POINT("idem-wait-begins");
	limited->sleep(limited->arg);
	IDEM_INJECTION_POINT("idem-wait-ends");
	CHECK_FOR_INTERRUPTS();		/* the limit might have come with the lock */
	return true;
}

static bool
is_timeout(int sqlstate)
{
	return sqlstate == ERRCODE_LOCK_NOT_AVAILABLE;
}
