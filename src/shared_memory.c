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
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "storage/ipc.h"
#include "utils/resowner.h"

#include "compat.h"
#include "shared_memory.h"

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
 * The piece of shared memory with this name, made and initialized by whoever
 * comes first.  NULL if the server does not have the memory, or has given out
 * the name with another size.  Needs a transaction; the subtransaction is for
 * the locks held at the error.
 */
void *
idem_attach_shared_memory(const char *name, Size size,
						  void (*init) (void *memory))
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	void	   *volatile memory = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		bool		found;

		memory = GetNamedDSMSegment(name, size, init, &found);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return memory;
}
