/*-------------------------------------------------------------------------
 *
 * random.c
 *		Random bytes that nobody can predict.
 *
 * The server's strong generator takes thousands of instructions even for a
 * few bytes.  So a backend draws a block and uses it piece by piece.  Used
 * bytes are erased, and a process that inherits a block from its parent draws
 * its own.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "util/random.h"

#define BLOCK_SIZE	1024

static unsigned char block[BLOCK_SIZE];

/* Number of unused bytes at the end of the block. */
static int	unused = 0;

/* The process that has drawn the block. */
static int	drawn_by = 0;

/*
 * Fill "target" with random bytes, at most a block.
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
 * Return a seed for hashes that is not known outside this process, so that
 * nobody can choose names that collide.  It is never 0.
 */
uint64
idem_secret_seed(void)
{
	static uint64 seed = 0;

	while (seed == 0)
		idem_random_bytes((unsigned char *) &seed, sizeof(seed));
	return seed;
}
