/*-------------------------------------------------------------------------
 *
 * blocked_range.c
 *		A range of time in which all ready rows wait for transactions.
 *
 * A row is blocked if another transaction is writing it, or the messages that
 * it leads to (see lanes.c).  Nobody can take anything by means of it until
 * that transaction ends.  There can be any number of such rows, and no take can
 * move them out of the way.  So a backend remembers a range in which it has
 * looked at all rows, and for each transaction the stretches of rows that wait
 * for it.  When the transaction has ended, these are holes of the range: a scan
 * looks at them, and at what comes behind the range, and skips all else.
 *
 * A row that is not blocked, but could not be taken either, is a hole, too.  It
 * stays one until a scan has passed it and has found it blocked, or gone.
 *
 * Rows that do not wait for a transaction may lie in one of its stretches.  A
 * scan looks at them without need then, so it does no harm that the stretches
 * of a range are limited in number, and become longer instead.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "common/hashfn.h"
#include "storage/procarray.h"
#include "utils/memutils.h"

#include "outbox/blocked_range.h"
#include "util/compat.h"

#define MAX_STRETCHES	100000
#define MAX_HOLES		64		/* that one scan adds behind the range */

/* A transaction that rows of a range wait for, and the table by xid. */
typedef struct Blocker
{
	TransactionId xid;
	char		status;			/* of the table's */
	int			nstretches;
	int			size;			/* of the array */
	IdemStretch *stretches;		/* in order, and apart */
}			Blocker;

#define SH_PREFIX			blockers
#define SH_ELEMENT_TYPE		Blocker
#define SH_KEY_TYPE			TransactionId
#define SH_KEY				xid
#define SH_HASH_KEY(tb, key) murmurhash32(key)
#define SH_EQUAL(tb, a, b)	((a) == (b))
#define SH_SCOPE			static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

static void add_stretch(IdemBlockedRange *range, Blocker * blocker,
						TimestampTz available_at, TimestampTz previous);
static void add_hole(IdemBlockedRange *range, IdemStretch hole);
static void merge_holes(IdemBlockedRange *range);
static int	compare_stretches(const void *a, const void *b);

/*
 * A row waits for this transaction, too, or for the one that it is a part of.
 * Returns false if that are too many.
 */
bool
idem_add_blocker(IdemBlockers *blockers, TransactionId xid)
{
	TransactionId top;
	int			i;

	if (blockers->count > 0 && xid == blockers->last)
		return true;
	top = SubTransGetTopmostTransaction(xid);
	for (i = 0; i < blockers->count; i++)
	{
		if (blockers->xids[i] == top)
			break;
	}
	if (i == IDEM_ROW_BLOCKERS)
		return false;
	if (i == blockers->count)
		blockers->xids[blockers->count++] = top;
	blockers->last = xid;
	return true;
}

/*
 * A scan begins: what waited for a transaction that has ended becomes a hole.
 * Without any other transaction there is no range any more.
 */
void
idem_range_begin(IdemBlockedRange *range)
{
	if (range->blockers != NULL)
	{
		blockers_iterator i;
		Blocker    *blocker;

		blockers_start_iterate(range->blockers, &i);
		while ((blocker = blockers_iterate(range->blockers, &i)) != NULL)
		{
			if (TransactionIdIsInProgress(blocker->xid))
				continue;
			for (int k = 0; k < blocker->nstretches; k++)
				add_hole(range, blocker->stretches[k]);
			range->nstretches -= blocker->nstretches;
			pfree(blocker->stretches);
			blockers_delete_item(range->blockers, blocker);
		}
	}
	if (range->blockers == NULL || range->blockers->members == 0)
		idem_range_forget(range);
	merge_holes(range);
	range->nscanned = range->nholes;
	range->next = 0;
	range->next_stays = false;
}

/*
 * There is no range: have one that begins with the row of this time.
 */
void
idem_range_create(IdemBlockedRange *range, TimestampTz available_at)
{
	range->context = AllocSetContextCreate(TopMemoryContext,
										   "idempotency blocked rows",
										   ALLOCSET_SMALL_SIZES);
	range->from = range->until = available_at;
}

/*
 * The time of the next row of the range that a scan has to look at; without
 * one, that at which the range ends.
 */
TimestampTz
idem_range_next(const IdemBlockedRange *range)
{
	return range->next < range->nscanned ?
		Min(range->holes[range->next].first, range->until) : range->until;
}

/*
 * The scan has come to this time: forget the holes before.
 */
void
idem_range_pass(IdemBlockedRange *range, TimestampTz available_at)
{
	while (range->next < range->nscanned &&
		   range->holes[range->next].last < available_at)
	{
		if (!range->next_stays)
			range->holes[range->next].last = DT_NOBEGIN;
		range->next_stays = false;
		range->next++;
	}
}

/*
 * In the hole that the scan is in, the row of this time may have to be looked
 * at again, and those that come behind it.
 */
void
idem_range_stay(IdemBlockedRange *range, TimestampTz available_at)
{
	if (range->next < range->nscanned && !range->next_stays)
	{
		IdemStretch *hole = &range->holes[range->next];

		hole->first = Max(hole->first, available_at);
		range->next_stays = true;
	}
}

/*
 * The next row behind the range has to be looked at again: it is a hole.
 * "previous" is the time of the row before it.  If there are too many holes, the
 * last one becomes longer.
 */
void
idem_range_add_hole(IdemBlockedRange *range, TimestampTz available_at,
					TimestampTz previous)
{
	IdemStretch hole = {available_at, available_at};
	int			count = range->nholes - range->nscanned;

	if (count == MAX_HOLES ||
		(count > 0 && range->holes[range->nholes - 1].last >= previous))
		range->holes[range->nholes - 1].last = available_at;
	else
		add_hole(range, hole);
}

/*
 * The row of this time waits for these transactions; "previous" is the time of
 * the one that the scan has looked at before.
 */
void
idem_range_add(IdemBlockedRange *range, const IdemBlockers *blockers,
			   TimestampTz available_at, TimestampTz previous)
{
	if (range->blockers == NULL)
		range->blockers = blockers_create(range->context, 8, NULL);
	for (int i = 0; i < blockers->count; i++)
	{
		bool		found;
		Blocker    *blocker = blockers_insert(range->blockers,
											  blockers->xids[i], &found);

		if (!found)
		{
			blocker->nstretches = 0;
			blocker->size = 0;
			blocker->stretches = NULL;
		}
		add_stretch(range, blocker, available_at, previous);
	}
}

static void
add_stretch(IdemBlockedRange *range, Blocker * blocker,
			TimestampTz available_at, TimestampTz previous)
{
	bool		is_full = range->nstretches >= MAX_STRETCHES;
	int			low = 0;
	int			high = blocker->nstretches;

	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (blocker->stretches[middle].first <= available_at)
			low = middle + 1;
		else
			high = middle;
	}

	if (low > 0)
	{
		IdemStretch *before = &blocker->stretches[low - 1];

		if (before->last >= previous || is_full)
			before->last = Max(before->last, available_at);
		if (before->last >= available_at)
			return;
	}
	else if (is_full && blocker->nstretches > 0)
	{
		blocker->stretches[0].first = available_at;
		return;
	}

	if (blocker->nstretches == blocker->size)
	{
		blocker->size = Max(1, 2 * blocker->size);
		blocker->stretches = blocker->stretches == NULL ?
			MemoryContextAlloc(range->context,
							   blocker->size * sizeof(IdemStretch)) :
			repalloc(blocker->stretches,
					 blocker->size * sizeof(IdemStretch));
	}
	memmove(&blocker->stretches[low + 1], &blocker->stretches[low],
			(blocker->nstretches - low) * sizeof(IdemStretch));
	blocker->stretches[low] = (IdemStretch)
	{
		available_at, available_at
	};
	blocker->nstretches++;
	range->nstretches++;
}

static void
add_hole(IdemBlockedRange *range, IdemStretch hole)
{
	if (range->nholes == range->size)
	{
		range->size = Max(8, 2 * range->size);
		range->holes = range->holes == NULL ?
			MemoryContextAlloc(range->context,
							   range->size * sizeof(IdemStretch)) :
			repalloc(range->holes, range->size * sizeof(IdemStretch));
	}
	range->holes[range->nholes++] = hole;
}

/*
 * Put the holes in order, without those that have been passed, and those
 * together that overlap.
 */
static void
merge_holes(IdemBlockedRange *range)
{
	int			n = 0;

	qsort(range->holes, range->nholes, sizeof(IdemStretch),
		  compare_stretches);
	for (int i = 0; i < range->nholes; i++)
	{
		IdemStretch hole = range->holes[i];

		if (hole.last < hole.first)
			continue;
		if (n > 0 && hole.first <= range->holes[n - 1].last)
			range->holes[n - 1].last = Max(range->holes[n - 1].last, hole.last);
		else
			range->holes[n++] = hole;
	}
	range->nholes = n;
}

static int
compare_stretches(const void *a, const void *b)
{
	TimestampTz x = ((const IdemStretch *) a)->first;
	TimestampTz y = ((const IdemStretch *) b)->first;

	return x < y ? -1 : x > y;
}

/*
 * Forget the range, and what a scan knows of its holes.
 */
void
idem_range_forget(IdemBlockedRange *range)
{
	if (idem_range_exists(range))
		MemoryContextDelete(range->context);
	memset(range, 0, sizeof(*range));
}
