/*-------------------------------------------------------------------------
 *
 * rollback.c
 *		Reset a session's cached search positions after a rollback.
 *
 * A session remembers the position in an index from which its searches begin.
 * It might have advanced the position because of what its own transaction has
 * written.  A rollback, also of a part of the transaction, makes those rows
 * visible again, and after PREPARE TRANSACTION one can follow.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"

#include "util/rollback.h"

#define MAX_FORGETS		4

static IdemForget forgets[MAX_FORGETS];
static int	nforgets = 0;

static void end_transaction(XactEvent event, void *arg);
static void end_subtransaction(SubXactEvent event, SubTransactionId id,
							   SubTransactionId parent, void *arg);
static void forget_all(void);

/*
 * From now on, call this function at the end of each transaction or
 * subtransaction that has written something and does not commit.
 */
void
idem_forget_on_rollback(IdemForget forget)
{
	for (int i = 0; i < nforgets; i++)
	{
		if (forgets[i] == forget)
			return;
	}
	if (nforgets == 0)
	{
		RegisterXactCallback(end_transaction, NULL);
		RegisterSubXactCallback(end_subtransaction, NULL);
	}
	Assert(nforgets < MAX_FORGETS);
	forgets[nforgets++] = forget;
}

static void
end_transaction(XactEvent event, void *arg)
{
	if ((event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE) &&
		TransactionIdIsValid(GetTopTransactionIdIfAny()))
		forget_all();
}

static void
end_subtransaction(SubXactEvent event, SubTransactionId id,
				   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB &&
		TransactionIdIsValid(GetCurrentTransactionIdIfAny()))
		forget_all();
}

static void
forget_all(void)
{
	for (int i = 0; i < nforgets; i++)
		forgets[i] ();
}
