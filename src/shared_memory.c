/*-------------------------------------------------------------------------
 *
 * shared_memory.c
 *		Shared memory that is there with and without preloading.
 *
 * PostgreSQL 17 and later give it to any backend that asks (the registry of
 * dynamic shared memory).  Before that it comes from the reserve that every
 * server keeps for extensions, about 100 kB, and preloading only makes that
 * reserve larger.  It may be used up, so who asks must be able to go without;
 * and who has not reserved must not ask for much, because the server's tables
 * of locks grow into what is left.
 *
 * A session that got none asks again when RETRY_SECONDS have passed.  It goes
 * without for lack of memory only; a cancel, or whatever else goes wrong, is
 * an error like any other.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "storage/ipc.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "compat.h"
#include "idempotency.h"
#include "shared_memory.h"

#define RETRY_SECONDS	1

static void *attach(const IdemSharedMemory *piece);
static bool is_lack_of_memory(int sqlstate);

/*
 * Have room for "size" bytes; called when the library is preloaded, at the
 * time when the server asks for such requests.
 */
void
idem_reserve_shared_memory(Size size)
{
	IdemReserveNamedDSMSegment(MAXALIGN(size));
}

/*
 * A piece of shared memory, made and initialized by whoever comes first.  NULL
 * if the server does not have it now, or if there is no transaction to ask
 * in; then a later call may succeed.  Raises whatever else goes wrong.
 */
void *
idem_attach_shared_memory(IdemSharedMemory *piece)
{
	if (likely(piece->memory != NULL))
		return piece->memory;
	if (!IsTransactionState() || IsInParallelMode() ||
		idem_monotonic_time() < piece->retry_at)
		return NULL;

	piece->memory = attach(piece);
	piece->retry_at = idem_monotonic_time() +
		RETRY_SECONDS * INT64CONST(1000000);
	return piece->memory;
}

/*
 * The same, at this moment.  The subtransaction is for the locks held at the
 * error.
 */
static void *
attach(const IdemSharedMemory *piece)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	void	   *volatile memory = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		int			nest = NewGUCNestLevel();
		bool		found;

		(void) set_config_option("exit_on_error", "off",
								 PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SAVE, true, 0, false);
		IDEM_INJECTION_POINT("idem-attach-memory");
		memory = GetNamedDSMSegment(piece->name, piece->size, piece->init,
									&found);
		AtEOXact_GUC(true, nest);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		ErrorData  *edata;

		MemoryContextSwitchTo(context);
		edata = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		memory = NULL;

		if (!is_lack_of_memory(edata->sqlerrcode))
			ReThrowError(edata);
		FreeErrorData(edata);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return memory;
}

/*
 * Does the server not have the memory?  It calls it an internal error if
 * there is a piece with this name that an earlier lack of memory has left
 * unfinished, or of another size, which another version of the library made.
 */
static bool
is_lack_of_memory(int sqlstate)
{
	return sqlstate == ERRCODE_INTERNAL_ERROR ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_INSUFFICIENT_RESOURCES;
}
