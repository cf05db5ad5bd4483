/*-------------------------------------------------------------------------
 *
 * memory.h
 *		Allocation that does not fail.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_MEMORY_H
#define IDEM_RELAY_MEMORY_H

#include <stddef.h>

extern void *relay_alloc(size_t size);
extern void *relay_resize(void *old, size_t size);
extern char *relay_copy(const char *string);

#endif							/* IDEM_RELAY_MEMORY_H */
