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

#include "util/compat.h"
#include "util/shared_memory.h"
#include "util/subtransaction.h"
#include "util/times.h"

#define RETRY_SECONDS	1

static bool attach(void *arg);
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
	ErrorData  *error;

	if (likely(piece->memory != NULL))
		return piece->memory;
	if (!IsTransactionState() || IsInParallelMode() ||
		idem_monotonic_time() < piece->retry_at)
		return NULL;

	error = idem_in_subtransaction(attach, piece, is_lack_of_memory);
	if (error != NULL)
		FreeErrorData(error);
	piece->retry_at = idem_monotonic_time() +
		RETRY_SECONDS * INT64CONST(1000000);
	return piece->memory;
}

/*
 * The same, at this moment.
 */
static bool
attach(void *arg)
{
	IdemSharedMemory *piece = arg;
	bool		found;

	IDEM_INJECTION_POINT("idem-attach-memory");
	piece->memory = GetNamedDSMSegment(piece->name, piece->size, piece->init,
									   &found);
	return true;
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
