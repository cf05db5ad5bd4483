/*-------------------------------------------------------------------------
 *
 * random.c
 *		Random bytes that nobody can foretell.
 *
 * The server's strong generator takes thousands of instructions however
 * little is asked of it, so a backend draws a block and gives it out in
 * pieces.  What has been given out is wiped, and a process that inherits a
 * block from its parent draws its own.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "util/random.h"

#define BLOCK_SIZE	1024

static unsigned char block[BLOCK_SIZE];

/* How many bytes at the end of the block have not been given out. */
static int	unused = 0;

/* The process that has drawn it. */
static int	drawn_by = 0;

/*
 * Fill "target" with random bytes, a block at most.
 */
void
idem_random_bytes(unsigned char *target, int length)
{
	unsigned char *source;

	Assert(length <= BLOCK_SIZE);
	if (unused < length || drawn_by != MyProcPid)
	{
		unused = 0;
		if (!pg_strong_random(block, BLOCK_SIZE))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate random values")));
		unused = BLOCK_SIZE;
		drawn_by = MyProcPid;
	}

	source = block + BLOCK_SIZE - unused;
	memcpy(target, source, length);
	explicit_bzero(source, length);
	unused -= length;
}

/*
 * A seed for hashes that is not known outside this process, so that nobody can
 * choose names that collide.  It is never 0.
 */
uint64
idem_secret_seed(void)
{
	static uint64 seed = 0;

	while (seed == 0)
		idem_random_bytes((unsigned char *) &seed, sizeof(seed));
	return seed;
}
