/*-------------------------------------------------------------------------
 *
 * outbox_mark.c
 *		From where on a take has to look for rows that are ready.
 *
 * Whatever is taken leaves an entry at the beginning of the index, and that
 * stays until vacuum may remove it.  So a backend remembers, of all topics and
 * of some single ones, how far its last scan met nothing but such entries, and
 * begins the next one there.
 *
 * The scan is a dirty one, so a row that another transaction has taken, or has
 * not committed yet, ends that stretch.  Nothing comes to lie in it later:
 * publishers read the clock before they write, but hardly PUBLISHING_US
 * before; and what becomes ready again is available from then on.  What this
 * transaction itself has taken is back if it is rolled back, so then all marks
 * are forgotten, as they are when it is prepared, when the table has changed,
 * and when the clock was set back.
 *
 * A mark may be wrong all the same, where a publisher was slow, or somebody has
 * written to the table by hand.  Therefore a scan begins with the first entry
 * whenever that cannot cost more than a hundredth of the time, all marks
 * together, those of topics without messages, too; where there is little to go
 * over, always.  So a mark decides when a message is found, and never whether.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "outbox_mark.h"
#include "relations.h"
#include "rollback.h"
#include "times.h"

#define NUM_PLACES		256
#define NUM_PROBES		4		/* places where a mark may be */
#define RESTART_SHARE	100
#define LITTLE_US		20
#define PUBLISHING_US	USECS_PER_SEC

static IdemMark marks[NUM_PLACES];
static int	nmarks = 0;			/* places in use */

static IdemMark *find_place(uint64 hash);
static void forget_marks(void);

/*
 * Begin to look for rows of a topic, or of all if that is NULL.  Returns a
 * time before which, and at which, there are none.
 */
TimestampTz
idem_mark_begin(IdemMarkedScan *scan, const Datum *topic, TimestampTz now)
{
	IdemMark   *mark;
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
	scan->until = now - PUBLISHING_US;
	scan->begin = idem_monotonic_time();
	scan->restarted = mark->hash != hash ||
		mark->relation_changes != idem_relation_changes ||
		mark->reached > scan->until || scan->begin >= mark->restart_at;
	if (!scan->restarted)
		return mark->reached;

	if (mark->hash == 0)
		nmarks++;
	mark->hash = hash;
	mark->relation_changes = idem_relation_changes;
	mark->reached = DT_NOBEGIN;
	mark->restart_at = 0;
	return DT_NOBEGIN;
}

/*
 * The place of a mark: its own, or a free one, or another's.
 */
static IdemMark *
find_place(uint64 hash)
{
	for (int i = 0; i < NUM_PROBES; i++)
	{
		IdemMark   *mark = &marks[(hash + i) % NUM_PLACES];

		if (mark->hash == hash || mark->hash == 0)
			return mark;
	}
	return &marks[hash % NUM_PLACES];
}

/*
 * The scan has met its first row, which is available from that time on, or
 * none: DT_NOEND.
 */
void
idem_mark_reached(IdemMarkedScan *scan, TimestampTz available_at)
{
	IdemMark   *mark = scan->mark;

	if (!TIMESTAMP_IS_NOBEGIN(available_at))
		mark->reached = Max(mark->reached, Min(available_at, scan->until) - 1);
	if (scan->restarted)
	{
		int64		end = idem_monotonic_time();

		mark->restart_at = end - scan->begin <= LITTLE_US ? 0 :
			end + (end - scan->begin) * RESTART_SHARE * nmarks;
	}
}

static void
forget_marks(void)
{
	memset(marks, 0, sizeof(marks));
	nmarks = 0;
}
