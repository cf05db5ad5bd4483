/*-------------------------------------------------------------------------
 *
 * blocked_range.c
 *		A range of time in which all ready rows wait for transactions.
 *
 * A row is blocked if another transaction is writing the row, or the messages
 * to which it leads (see lanes.c).  Until that transaction ends, no take can
 * take anything through the row, or move it out of the way.  There can be any
 * number of such rows.  So a backend remembers a range in which it has looked
 * at all rows and, for each transaction, the stretches of rows that wait for
 * it.  When the transaction ends, its stretches become holes of the range.  A
 * scan looks at the holes, and at the rows after the range, and skips all
 * others.
 *
 * A row that is not blocked, but could not be taken either, is also a hole.
 * It stays one until a scan has passed it and has found it blocked or gone.
 *
 * A stretch can include rows that do not wait for its transaction.  A scan
 * looks at these without need, which does no harm.  Therefore the number of a
 * range's stretches can be limited: beyond the limit, stretches become
 * longer.
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
#define MAX_HOLES		64		/* added after the range by one scan */

/* A transaction that rows of a range wait for; elements of a table by xid. */
typedef struct Blocker
{
	TransactionId xid;
	char		status;			/* of the table entry */
	int			nstretches;
	int			size;			/* size of the array */
	IdemStretch *stretches;		/* in order, not adjacent */
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
 * Add a transaction that a row waits for, or the top-level transaction of a
 * subtransaction.  Returns false if the row has too many.
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
 * Begin a scan: the stretches of transactions that have ended become holes.
 * If no transaction is left, there is no range any more.
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
 * Create the range; its first row has this time.
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
 * Return the time of the next row in the range that a scan must look at; if
 * there is none, the time at which the range ends.
 */
TimestampTz
idem_range_next(const IdemBlockedRange *range)
{
	return range->next < range->nscanned ?
		Min(range->holes[range->next].first, range->until) : range->until;
}

/*
 * The scan has reached this time: forget the holes before it.
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
 * The row of this time, and later ones in the scan's current hole, must be
 * looked at again.
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
 * Make the next row after the range a hole, because it must be looked at
 * again.  "previous" is the time of the row before it.  If there are too many
 * holes, extend the last one.
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
 * Note that the row of this time waits for these transactions.  "previous" is
 * the time of the row that the scan has looked at before.
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
 * Sort the holes, drop those that were passed, and merge those that overlap.
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
 * Forget the range and its holes.
 */
void
idem_range_forget(IdemBlockedRange *range)
{
	if (idem_range_exists(range))
		MemoryContextDelete(range->context);
	memset(range, 0, sizeof(*range));
}
