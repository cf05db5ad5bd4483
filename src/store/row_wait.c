/*-------------------------------------------------------------------------
 *
 * row_wait.c
 *		Waiting for the holder of a row.
 *
 * All sleeps here are sleeps in the server's lock manager, so the deadlock
 * detector, lock_timeout, statement_timeout and cancel work as in any wait
 * for a row.  After a wait, what was found before is out of date: the caller
 * must find the row again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "storage/lmgr.h"
#include "storage/procarray.h"

#include "store/internal.h"
#include "util/compat.h"
#include "util/timed_lock.h"

static void sleep_on_holder(void *arg);
static void sleep_on_transaction(TransactionId xid);

/*
 * Sleep until cursor->holder has ended, or has given up the insertion that we
 * met.  If there is no holder, sleep until we get the lock on cursor->row
 * that the last write needed.
 */
void
idem_wait(IdemCursor *cursor)
{
	TM_FailureData failure;

	if (cursor->speculative_token != 0)
		SpeculativeInsertionWait(cursor->holder,
								 cursor->speculative_token);
	else if (TransactionIdIsValid(cursor->holder))
		XactLockTableWait(cursor->holder, cursor->table->rel, &cursor->held_tid,
						  XLTW_Lock);
	else
		(void) idem_lock_row(cursor, cursor->lock_mode, LockWaitBlock, &failure);
}

/*
 * Sleep like idem_wait(), but not past "deadline".  Returns false if the
 * holder still had the row then.
 */
bool
idem_wait_until(IdemCursor *cursor, TimestampTz deadline)
{
	(void) idem_spare_slot(cursor); /* must not belong to a subtransaction */
	return idem_sleep_until(sleep_on_holder, cursor, deadline);
}

static void
sleep_on_holder(void *arg)
{
	IdemCursor *cursor = arg;

	if (TransactionIdIsValid(cursor->holder) && cursor->speculative_token == 0)
		sleep_on_transaction(cursor->holder);
	else
		idem_wait(cursor);
}

/*
 * Sleep until a transaction has ended, or a subtransaction has ended or has
 * become part of its parent.  In contrast to XactLockTableWait() this waits
 * for one lock only, because the time limit of a sleep applies to one lock.
 */
static void
sleep_on_transaction(TransactionId xid)
{
	LOCKTAG		tag;

	SET_LOCKTAG_TRANSACTION(tag, xid);
	if (LockAcquire(&tag, ShareLock, false, true) != LOCKACQUIRE_NOT_AVAIL)
	{
		(void) LockRelease(&tag, ShareLock, false);
		if (!TransactionIdIsInProgress(xid))
			return;
		xid = SubTransGetTopmostTransaction(xid);
		SET_LOCKTAG_TRANSACTION(tag, xid);
	}
	(void) LockAcquire(&tag, ShareLock, false, false);
	(void) LockRelease(&tag, ShareLock, false);
}
