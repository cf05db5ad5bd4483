/*-------------------------------------------------------------------------
 *
 * shared_memory.c
 *		Shared memory that is available with and without preloading.
 *
 * PostgreSQL 17 and later give it to any backend that asks (the registry of
 * dynamic shared memory).  Earlier servers have a reserve for extensions,
 * about 100 kB, which preloading makes larger.  The reserve can be used up,
 * so callers must work without the memory.  A library that has not reserved
 * memory must not ask for much, because the server's lock tables use the same
 * reserve.
 *
 * A session that got no memory asks again after RETRY_SECONDS.  Only a lack
 * of memory is handled this way; a cancel, or any other failure, is an error
 * as usual.
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
 * Reserve "size" bytes.  Called when the library is preloaded, at the time
 * when the server asks for such requests.
 */
void
idem_reserve_shared_memory(Size size)
{
	IdemReserveNamedDSMSegment(MAXALIGN(size));
}

/*
 * Return a piece of shared memory; the first caller creates and initializes
 * it.  NULL if the server has no memory now, or if there is no transaction to
 * ask in; a later call might succeed.  Raises all other errors.
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
 * The same, without trying again later.
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
 * Is this a lack of memory?  The server reports an internal error if an
 * earlier lack of memory has left a piece with this name unfinished, or if
 * another version of the library has created a piece of another size.
 */
static bool
is_lack_of_memory(int sqlstate)
{
	return sqlstate == ERRCODE_INTERNAL_ERROR ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_INSUFFICIENT_RESOURCES;
}
