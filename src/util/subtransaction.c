/*-------------------------------------------------------------------------
 *
 * subtransaction.c
 *		Running code that can be undone, or fail, before the call continues.
 *
 * Only the rollback of a transaction or a subtransaction releases what an
 * error leaves behind, such as locks and buffers.  So a caller that continues
 * after an error needs a subtransaction for the code that can raise it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "util/subtransaction.h"

/*
 * Call "action" in a subtransaction, which is rolled back if it returns false
 * or raises an error.  Settings that it makes end with it.
 *
 * Returns NULL, or an error that "is_expected", in the caller's memory
 * context.  All other errors are raised; if "is_expected" is NULL, these are
 * all.
 */
ErrorData *
idem_in_subtransaction(IdemAction action, void *arg, bool (*is_expected) (int sqlstate))
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		int			nest = NewGUCNestLevel();
		bool		stays;

		/* Otherwise any error would end the session. */
		if (is_expected != NULL)
			(void) set_config_option("exit_on_error", "off",
									 PGC_USERSET, PGC_S_SESSION,
									 GUC_ACTION_SAVE, true, 0, false);
		stays = action(arg);
		AtEOXact_GUC(true, nest);
		if (stays)
			ReleaseCurrentSubTransaction();
		else
			RollbackAndReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		if (is_expected == NULL || !is_expected(error->sqlerrcode))
			ReThrowError(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return error;
}
