/*-------------------------------------------------------------------------
 *
 * shared_memory.h
 *		Shared memory that is available with and without preloading.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SHARED_MEMORY_H
#define IDEMPOTENCY_SHARED_MEMORY_H

/*
 * A piece of shared memory.  "init" fills it when it is new.  The last two
 * members are zero at first.
 */
typedef struct IdemSharedMemory
{
	const char *name;
	Size		size;
	void		(*init) (void *memory);
	void	   *memory;			/* NULL until available */
	int64		retry_at;		/* see idem_monotonic_time() */
} IdemSharedMemory;

extern void idem_reserve_shared_memory(Size size);
extern void *idem_attach_shared_memory(IdemSharedMemory *piece);

#endif							/* IDEMPOTENCY_SHARED_MEMORY_H */
