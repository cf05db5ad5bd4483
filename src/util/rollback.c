/*-------------------------------------------------------------------------
 *
 * rollback.c
 *		Reset a session's cached search positions after a rollback.
 *
 * A session remembers from where on there is something to be found in an
 * index.  It may have come so far only because of what its own transaction
 * has written.  That is back when the transaction, or a part of it, is rolled
 * back, and may come back when it is prepared.
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
 * Call this function at the end of each transaction that has written something
 * and does not commit, or of such a part of one, from now on.
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
