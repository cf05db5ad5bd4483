/*-------------------------------------------------------------------------
 *
 * due_low_water.c
 *		From where on a take has to look for rows that are ready.
 *
 * Whatever is taken leaves an entry at the beginning of the index, and that
 * stays until vacuum may remove it.  So a backend remembers, of all topics and
 * of some single ones, how far its last scan met nothing but such entries, and
 * begins the next one there.
 *
 * The scan is a dirty one, so a row that another transaction has taken, or has
 * not committed yet, ends that stretch.  Nothing comes to lie in it later.  A
 * publisher reads the clock before it writes a message and again when the
 * message is in the index; if more than IDEM_PUBLISHING_US have passed, it
 * makes the message available from that later time on (see publish.c).  What
 * becomes ready again is available from then on.  What this transaction itself
 * has taken is back if it is rolled back, so then all marks are forgotten, as
 * they are when it is prepared, when the table has changed, and when the clock
 * was set back.
 *
 * A mark can be wrong all the same, where a process was stopped while it made
 * a message ready again, or somebody has written to the table by hand.
 * Therefore a scan begins with the first entry whenever that cannot cost more
 * than a hundredth of the time, all marks together, those of topics without
 * messages, too; and at the latest after MAX_PAUSE_US, or after PAUSE_SHARE
 * times the duration of such a scan.  If there is little to scan, it always
 * begins there.  So a mark decides when a message is found, and never whether.
 *
 * Blocked rows.  A row is blocked if another transaction is writing it, or the
 * messages that it leads to (see lanes.c).  Nobody can take anything by means
 * of it until that transaction ends.  There can be any number of such rows,
 * and no take can move them out of the way.  So a mark also remembers a range
 * of time in which all rows are blocked, and by which transactions, and a scan
 * skips that range.  For each transaction the mark has the time of the first
 * row that waits for it.  When the transaction has ended, the range ends
 * there, so the next scan finds what has become of these rows.  The range
 * begins with the first row of the index, so scans need only one.  It is
 * forgotten as the mark is, and as often as scans begin with the first entry:
 * a row may be free again although the transaction goes on, after a rollback to
 * a savepoint.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/subtrans.h"
#include "common/hashfn.h"
#include "storage/procarray.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "outbox/due_low_water.h"
#include "store/relations.h"
#include "util/compat.h"
#include "util/rollback.h"
#include "util/times.h"

#define NUM_PLACES		1024
#define NUM_PROBES		16		/* places where a mark may be */
#define RESTART_SHARE	100
#define MAX_PAUSE_US	(5 * USECS_PER_SEC)
#define PAUSE_SHARE		10
#define LITTLE_US		20
#define RANGE_PAUSE_US	(100 * 1000)

static IdemDueLowWater marks[NUM_PLACES];
static int	nmarks = 0;			/* places in use */

static IdemDueLowWater *find_place(uint64 hash);
static void check_blockers(const IdemDueScan *scan);
static void extend_range(IdemDueScan *scan, TimestampTz available_at);
static void end_range(IdemDueScan *scan);
static void reached(IdemDueScan *scan, TimestampTz available_at);
static int64 pause_after(int64 spent);
static void add_blocker(IdemDueLowWater *mark, TransactionId xid,
						TimestampTz available_at);
static void forget_marks(void);
static void forget_mark(IdemDueLowWater *mark);

/*
 * Begin to look for rows of a topic, or of all if that is NULL.  Returns a
 * time behind which to begin.
 */
TimestampTz
idem_due_scan_begin(IdemDueScan *scan, const Datum *topic, TimestampTz now)
{
	IdemDueLowWater *mark;
	uint64		hash = 1;

	idem_forget_on_rollback(forget_marks);
	if (topic != NULL)
	{
		text	   *name = DatumGetTextPP(*topic);

		hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(name),
								   VARSIZE_ANY_EXHDR(name), 0);
	}
	mark = find_place(hash);
	scan->mark = mark;
	scan->until = now - IDEM_PUBLISHING_US;
	scan->begin = idem_monotonic_time();
	scan->last = DT_NOBEGIN;

	if (mark->hash != hash ||
		mark->relation_changes != idem_relation_changes ||
		mark->reached > scan->until)
	{
		if (mark->hash == 0)
			nmarks++;
		mark->hash = hash;
		mark->relation_changes = idem_relation_changes;
		forget_mark(mark);
	}
	check_blockers(scan);

	scan->is_at_mark = scan->all_blocked = true;
	scan->restarted = scan->begin >= mark->restart_at;
	if (scan->restarted)
	{
		mark->reached = DT_NOBEGIN;
		mark->restart_at = 0;
		return DT_NOBEGIN;
	}
	if (mark->nblockers > 0)
	{
		scan->is_at_mark = false;
		return mark->blocked_until - 1;
	}
	return mark->reached;
}

/*
 * The place of a mark: its own, or a free one, or another's.
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
 * End the range of blocked rows before those that wait for a transaction that
 * has ended.
 */
static void
check_blockers(const IdemDueScan *scan)
{
	IdemDueLowWater *mark = scan->mark;
	int			n = 0;

	if (mark->nblockers > 0 &&
		((mark->look_again_at != 0 && scan->begin >= mark->look_again_at) ||
		 mark->blocked_until - 1 > scan->until))
		mark->nblockers = 0;

	/* They are in the order of the rows that wait for them first. */
	while (n < mark->nblockers &&
		   TransactionIdIsInProgress(mark->blockers[n].xid))
		n++;
	if (n < mark->nblockers)
		mark->blocked_until = mark->blockers[n].first;
	mark->nblockers = n;
	while (mark->nblockers > 0 &&
		   mark->blockers[mark->nblockers - 1].first >= mark->blocked_until)
		mark->nblockers--;
}

/*
 * The scan has found a row that is available from that time on: what is it to
 * do?
 */
IdemDueStep
idem_due_scan_found(IdemDueScan *scan, TimestampTz available_at,
					TimestampTz *after)
{
	IdemDueLowWater *mark = scan->mark;

	if (scan->is_at_mark)
		reached(scan, available_at);
	scan->is_at_mark = false;
	if (mark->nblockers > 0 && available_at < mark->blocked_from)
		mark->nblockers = 0;
	if (mark->nblockers > 0 && available_at < mark->blocked_until)
	{
		*after = mark->blocked_until - 1;
		return IDEM_DUE_SKIP;
	}

	if (available_at > scan->last)
		extend_range(scan, available_at);
	scan->last = available_at;
	return IDEM_DUE_LOOK;
}

/*
 * The caller has looked at the row that was found last, without a result, and
 * it waits for these transactions; or has taken something by means of it.
 */
void
idem_due_scan_looked(IdemDueScan *scan, const IdemBlockers *blockers)
{
	if (!scan->all_blocked)
		return;
	for (int i = 0; i < blockers->count && scan->last <= scan->until; i++)
		add_blocker(scan->mark, blockers->xids[i], scan->last);
	if (blockers->count < 0 || scan->last > scan->until ||
		scan->mark->nblockers == 0)
		end_range(scan);
}

/*
 * The scan ends.  Has it been to the end of what is available?
 */
void
idem_due_scan_end(IdemDueScan *scan, bool is_complete)
{
	if (is_complete && scan->is_at_mark)
		reached(scan, DT_NOEND);
	if (is_complete)
		extend_range(scan, DT_NOEND);
	if (scan->all_blocked)
		end_range(scan);
}

/*
 * All rows that are available before that time have been looked at.
 */
static void
extend_range(IdemDueScan *scan, TimestampTz available_at)
{
	IdemDueLowWater *mark = scan->mark;

	if (scan->all_blocked && mark->nblockers > 0)
		mark->blocked_until = Max(mark->blocked_until,
								  Min(available_at, scan->until));
}

/*
 * The range of blocked rows does not grow any more in this scan.
 */
static void
end_range(IdemDueScan *scan)
{
	IdemDueLowWater *mark = scan->mark;

	scan->all_blocked = false;
	if (mark->nblockers > 0 && mark->look_again_at == 0)
	{
		int64		end = idem_monotonic_time();

		mark->look_again_at = end + pause_after(end - scan->begin);
	}
}

/*
 * How long not to begin with the first entry again after a scan that took so
 * long.
 */
static int64
pause_after(int64 spent)
{
	return Min(spent * RESTART_SHARE * nmarks,
			   Max(MAX_PAUSE_US, spent * PAUSE_SHARE));
}

/*
 * The scan has met its first row, which is available from that time on, or
 * none: DT_NOEND.
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
		/* With a range, it is two scans. */
		if (mark->nblockers > 0)
			mark->restart_at = Max(mark->restart_at, end + RANGE_PAUSE_US);
	}
}

/*
 * Remember that a row waits for this transaction, and no row before it does
 * unless that is known.
 */
static void
add_blocker(IdemDueLowWater *mark, TransactionId xid,
			TimestampTz available_at)
{
	for (int i = mark->nblockers - 1; i >= 0; i--)
	{
		if (mark->blockers[i].xid == xid)
			return;
	}

	if (mark->nblockers == 0)
	{
		mark->blocked_from = mark->blocked_until = available_at;
		mark->look_again_at = 0;
	}
	if (mark->nblockers == mark->size)
	{
		int			size = Max(8, 2 * mark->size);

		mark->blockers = mark->blockers == NULL ?
			MemoryContextAlloc(TopMemoryContext, size * sizeof(IdemBlocker)) :
			repalloc(mark->blockers, size * sizeof(IdemBlocker));
		mark->size = size;
	}
	mark->blockers[mark->nblockers].xid = xid;
	mark->blockers[mark->nblockers].first = available_at;
	mark->nblockers++;
}

/*
 * A row waits for this transaction, too, or for the one that it is a part of.
 * Returns false if that are too many.
 */
bool
idem_add_blocker(IdemBlockers *blockers, TransactionId xid)
{
	xid = SubTransGetTopmostTransaction(xid);
	for (int i = 0; i < blockers->count; i++)
	{
		if (blockers->xids[i] == xid)
			return true;
	}
	if (blockers->count == IDEM_ROW_BLOCKERS)
		return false;
	blockers->xids[blockers->count++] = xid;
	return true;
}

/*
 * What has been passed may be there again.
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
	mark->nblockers = 0;
}
