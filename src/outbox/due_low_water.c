/*-------------------------------------------------------------------------
 *
 * due_low_water.c
 *		Low-water marks: the time at which a take begins to look for ready rows.
 *
 * idem_resume() uses the same marks for claims, by the time at which they
 * become resumable.
 *
 * Whatever is taken leaves an entry at the beginning of the index, which
 * stays until vacuum can remove it.  So a backend remembers how far its last
 * scan met only such entries, for all topics together and for some single
 * topics.  It begins the next scan there.
 *
 * The scan is dirty, so it ends the mark's stretch at a row that another
 * transaction has taken or has not committed yet.  No row appears in the
 * stretch later:
 *
 *	- A publisher reads the clock before it writes a message, and again when
 *	  the message is in the index.  If more than IDEM_PUBLISHING_US have
 *	  passed, it makes the message available from the later time on (see
 *	  publish.c).
 *
 *	- A message that becomes ready again is available from the current time
 *	  on.
 *
 *	- If a transaction is rolled back, the messages that it has taken are
 *	  available again.  So a rollback makes its backend forget all marks.
 *	  PREPARE TRANSACTION, a change of the table, or a clock that was set back
 *	  do the same.
 *
 * A mark can still be wrong if a process was stopped while it made a message
 * ready again, or if a user has written to the table by hand.  Therefore a
 * scan begins with the first entry if the scans of all marks together spend
 * at most a hundredth of the time on that; and at the latest after
 * MAX_PAUSE_US, or PAUSE_SHARE times the duration of such a scan.  If there
 * is little to scan, it always begins there.  So a mark affects when a
 * message is found, but not whether it is found.
 *
 * A mark also remembers a range of rows that wait for other transactions, and
 * scans skip these; see blocked_range.c.  The range begins with the first row
 * of the index, so one range is enough.  It is forgotten with the mark, and
 * as often as scans begin with the first entry, because a row can become free
 * before its transaction ends, by a rollback to a savepoint.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "outbox/due_low_water.h"
#include "store/relations.h"
#include "util/compat.h"
#include "util/random.h"
#include "util/rollback.h"
#include "util/times.h"

#define NUM_PLACES		1024
#define NUM_PROBES		16		/* entries in which a mark can be */
#define RESTART_SHARE	100
#define MAX_PAUSE_US	(5 * USECS_PER_SEC)
#define PAUSE_SHARE		10
#define LITTLE_US		20
#define RANGE_PAUSE_US	(100 * 1000)

static IdemDueLowWater marks[NUM_PLACES];
static int	nmarks = 0;			/* entries in use */

static IdemDueLowWater *find_place(uint64 hash);
static void extend_range(IdemDueScan *scan, TimestampTz available_at);
static void reached(IdemDueScan *scan, TimestampTz available_at);
static int64 pause_after(int64 spent);
static void forget_marks(void);
static void forget_mark(IdemDueLowWater *mark);

/*
 * Return the hash by which the mark of these rows is found: the rows of a
 * topic ("number" is 0), or the claims of a scope with that number of
 * attempts.  A NULL pointer stands for all topics or all scopes.
 */
uint64
idem_due_hash(Datum name, uint64 number)
{
	text	   *value;

	if (DatumGetPointer(name) == NULL)
		return number + 1;
	value = DatumGetTextPP(name);
	return hash_bytes_extended((unsigned char *) VARDATA_ANY(value),
							   VARSIZE_ANY_EXHDR(value),
							   idem_secret_seed() + number);
}

/*
 * Begin a scan for the rows with this hash.  Returns the time after which to
 * begin.
 */
TimestampTz
idem_due_scan_begin(IdemDueScan *scan, uint64 hash, TimestampTz now)
{
	IdemDueLowWater *mark;

	idem_forget_on_rollback(forget_marks);
	mark = find_place(hash);
	scan->mark = mark;
	scan->until = now - IDEM_PUBLISHING_US;
	scan->begin = idem_monotonic_time();
	scan->last = scan->previous = DT_NOBEGIN;

	if (mark->hash != hash ||
		mark->contents_changes != idem_contents_changes ||
		mark->reached > scan->until)
	{
		if (mark->hash == 0)
			nmarks++;
		mark->hash = hash;
		mark->contents_changes = idem_contents_changes;
		forget_mark(mark);
	}
	if ((mark->look_again_at != 0 && scan->begin >= mark->look_again_at) ||
		mark->range.until - 1 > scan->until)
		idem_range_forget(&mark->range);
	idem_range_begin(&mark->range);

	scan->is_at_mark = scan->extends = true;
	scan->restarted = scan->begin >= mark->restart_at;
	if (scan->restarted)
	{
		mark->reached = DT_NOBEGIN;
		mark->restart_at = 0;
		return DT_NOBEGIN;
	}
	if (idem_range_exists(&mark->range))
	{
		scan->is_at_mark = false;
		return idem_range_next(&mark->range) - 1;
	}
	return mark->reached;
}

/*
 * Return the entry of a mark: its own, a free one, or another mark's.
 */
static IdemDueLowWater *
find_place(uint64 hash)
{
	for (int i = 0; i < NUM_PROBES; i++)
	{
		IdemDueLowWater *mark = &marks[(hash + i) % NUM_PLACES];

		if (mark->hash == hash || mark->hash == 0)
			return mark;
	}
	return &marks[hash % NUM_PLACES];
}

/*
 * The scan has found a row that is available from that time on.  Returns how
 * to continue.
 */
IdemDueStep
idem_due_scan_found(IdemDueScan *scan, TimestampTz available_at,
					TimestampTz *after)
{
	IdemDueLowWater *mark = scan->mark;
	IdemBlockedRange *range = &mark->range;

	if (scan->is_at_mark)
		reached(scan, available_at);
	scan->is_at_mark = false;
	if (idem_range_exists(range) && available_at < range->from)
		idem_range_forget(range);
	if (idem_range_exists(range))
	{
		TimestampTz next;

		idem_range_pass(range, available_at);
		next = idem_range_next(range);
		if (available_at < next)
		{
			*after = next - 1;
			return IDEM_DUE_SKIP;
		}
	}

	if (available_at > scan->last)
		extend_range(scan, available_at);
	scan->previous = scan->last;
	scan->last = available_at;
	return IDEM_DUE_LOOK;
}

/*
 * The caller has looked at the row that was found last.  Either nothing could
 * be taken through it, and "blockers" are the transactions that it waits for;
 * or something was taken.
 */
void
idem_due_scan_looked(IdemDueScan *scan, const IdemBlockers *blockers)
{
	IdemBlockedRange *range = &scan->mark->range;
	bool		is_new = scan->last > scan->until;
	bool		is_blocked = blockers->count > 0 && !is_new;

	if (idem_range_exists(range) && scan->last < range->until)
	{
		if (is_blocked)
			idem_range_add(range, blockers, scan->last, scan->previous);
		else
			idem_range_stay(range, scan->last);
		return;
	}
	if (is_new)
		scan->extends = false;
	if (!scan->extends)
		return;

	if (!idem_range_exists(range))
	{
		idem_range_create(range, scan->last);
		scan->mark->look_again_at = 0;
	}
	if (is_blocked)
		idem_range_add(range, blockers, scan->last, scan->previous);
	else
		idem_range_add_hole(range, scan->last, scan->previous);
}

/*
 * End a scan.  "is_complete" says whether it has reached the end of the
 * available rows.
 */
void
idem_due_scan_end(IdemDueScan *scan, bool is_complete)
{
	IdemDueLowWater *mark = scan->mark;

	if (is_complete)
	{
		if (scan->is_at_mark)
			reached(scan, DT_NOEND);
		idem_range_pass(&mark->range, DT_NOEND);
		extend_range(scan, DT_NOEND);
	}
	else if (idem_range_exists(&mark->range) &&
			 scan->last < mark->range.until)
		idem_range_stay(&mark->range, scan->last);

	if (idem_range_exists(&mark->range) && mark->look_again_at == 0)
	{
		int64		end = idem_monotonic_time();

		mark->look_again_at = end + pause_after(end - scan->begin);
	}
}

/*
 * All rows that are available before that time have been looked at.
 */
static void
extend_range(IdemDueScan *scan, TimestampTz available_at)
{
	IdemBlockedRange *range = &scan->mark->range;

	if (scan->extends && idem_range_exists(range))
		range->until = Max(range->until, Min(available_at, scan->until));
}

/*
 * After a scan of that duration, how long not to begin with the first entry?
 */
static int64
pause_after(int64 spent)
{
	return Min(spent * RESTART_SHARE * nmarks,
			   Max(MAX_PAUSE_US, spent * PAUSE_SHARE));
}

/*
 * The scan has met its first row, available from that time on, or none:
 * DT_NOEND.
 */
static void
reached(IdemDueScan *scan, TimestampTz available_at)
{
	IdemDueLowWater *mark = scan->mark;

	if (!TIMESTAMP_IS_NOBEGIN(available_at))
		mark->reached = Max(mark->reached, Min(available_at, scan->until) - 1);
	if (scan->restarted)
	{
		int64		end = idem_monotonic_time();
		int64		spent = end - scan->begin;

		mark->restart_at = spent <= LITTLE_US ? 0 : end + pause_after(spent);
		/* If there is a range, a restart makes two scans. */
		if (idem_range_exists(&mark->range))
			mark->restart_at = Max(mark->restart_at, end + RANGE_PAUSE_US);
	}
}

/*
 * Rows before the marks might be available again.
 */
static void
forget_marks(void)
{
	for (int i = 0; i < NUM_PLACES && nmarks > 0; i++)
		forget_mark(&marks[i]);
}

static void
forget_mark(IdemDueLowWater *mark)
{
	mark->reached = DT_NOBEGIN;
	mark->restart_at = 0;
	idem_range_forget(&mark->range);
}
