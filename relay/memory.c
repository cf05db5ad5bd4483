/*-------------------------------------------------------------------------
 *
 * memory.c
 *		Allocation that does not fail.
 *
 * If memory runs out, the process ends with RELAY_SYSTEM.  That loses nothing:
 * the leases of its messages expire, and another relay takes them.
 *
 * The caller owns what these functions return, and releases it with free().
 * This file owns no state.  All other files call it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "memory.h"

/*
 * Return zeroed memory of at least one byte.
 */
void *
relay_alloc(size_t size)
{
	void	   *memory = calloc(1, size ? size : 1);

	if (!memory)
		relay_exit(RELAY_SYSTEM, "out of memory");
	return memory;
}

/*
 * Change the size of an allocation, which can move.  "old" can be NULL.  Bytes
 * beyond the old size are not initialized.
 */
void *
relay_resize(void *old, size_t size)
{
	void	   *memory = realloc(old, size ? size : 1);

	if (!memory)
		relay_exit(RELAY_SYSTEM, "out of memory");
	return memory;
}

/*
 * Return a copy of a string, or NULL if it is NULL.
 */
char *
relay_copy(const char *string)
{
	char	   *copy = string ? strdup(string) : NULL;

	if (string && !copy)
		relay_exit(RELAY_SYSTEM, "out of memory");
	return copy;
}
