/*-------------------------------------------------------------------------
 *
 * shared_memory.h
 *		Shared memory that is there with and without preloading.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SHARED_MEMORY_H
#define IDEMPOTENCY_SHARED_MEMORY_H

extern void idem_reserve_shared_memory(Size size);
extern void *idem_attach_shared_memory(const char *name, Size size,
									   void (*init) (void *memory));

#endif							/* IDEMPOTENCY_SHARED_MEMORY_H */
