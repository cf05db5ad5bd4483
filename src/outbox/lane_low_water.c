/*-------------------------------------------------------------------------
 *
 * lane_low_water.c
 *		Low-water marks of lanes: the id before which no message is pending.
 *
 * Each message that has left its lane leaves entries at the beginning of the
 * lane's part of the index, which stay until vacuum can remove them.  A
 * search for the head of the lane scans all of them.  A backend that has
 * scanned many remembers how far it came, and begins there the next time.  It
 * does so for at most NUM_PLACES lanes.  Lanes whose search costs at most
 * LITTLE_BUFFERS get no mark, so keys with few messages do not displace keys
 * with many.  Publishers choose the lanes, so the place of a lane depends on
 * a secret of the backend.
 *
 * Takes.  Messages leave a lane in order of their ids, so a mark must not
 * pass any message: no message below it is pending, or ever will be.
 *
 *	- A publisher can draw its id long before it commits.  It gets its
 *	  transaction id before it draws (see publish.c).  So when a take finds a
 *	  head, all publishers with a lower id, present or future, have a
 *	  transaction id below the next one to be assigned.  The take notes both.
 *	  A later take, in another transaction, has a snapshot in which all those
 *	  transactions have ended.  If that snapshot sees no pending message below
 *	  the noted head, there will be none, and the head becomes the mark.
 *	  While a transaction that has written something stays open, no mark
 *	  moves.
 *
 *	- A session can requeue a dead message.  It gets its transaction id, then
 *	  counts in shared memory, then writes (idem_lane_low_water_expire()).  A
 *	  mark is valid only while that counter has the value that it had before
 *	  the head was noted.  If the counter has not changed, a session that will
 *	  requeue has not counted yet, and had not committed when the snapshot was
 *	  taken.  A session that the counter includes has a transaction id below
 *	  the noted one, and had ended before the mark was set.  There are
 *	  NUM_COUNTERS counters, by a hash of database and lane, so a requeue
 *	  invalidates the marks of few other lanes, even if it is rolled back.
 *	  Without shared memory there are no marks, and a session that cannot
 *	  count cannot requeue.
 *
 *	- If this transaction is rolled back, the messages that it has
 *	  acknowledged are pending again.  So a rollback makes the backend forget
 *	  all marks, as PREPARE TRANSACTION does.  Messages that others
 *	  acknowledge are pending in the snapshot until they commit.
 *
 * Under REPEATABLE READ and SERIALIZABLE there are no marks, so that a take
 * relies only on what its own transaction has read.
 *
 * Rows written by hand, and ids from a sequence that was set back or has a
 * cache, can be below a mark.  They are found when they are due, because
 * their row is ready, and then the mark is forgotten.  Until then, later
 * messages might overtake them.
 *
 * Publishers.  A publisher looks back from its message for a pending one.  It
 * remembers the last message before which it has found none, and looks back
 * no further than to that.  This need not be exact: the only consequence is a
 * superfluous signpost (see lanes.c).  So a rollback or a requeue does not
 * make the backend forget it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "common/hashfn.h"
#include "executor/instrument.h"
#include "miscadmin.h"
#include "port/atomics.h"

#include "outbox/lane_low_water.h"
#include "store/relations.h"
#include "util/compat.h"
#include "util/random.h"
#include "util/rollback.h"
#include "util/shared_memory.h"

#define NUM_PLACES		1024
#define NUM_PROBES		8		/* places in which a lane can be */
#define NUM_COUNTERS	256
#define LITTLE_BUFFERS	8

/* The marks of a lane; all zero if nothing is known. */
typedef struct Place
{
	bool		is_used;
	int64		lane;
	uint64		contents_changes;

	/* For takes. */
	uint64		requeues;		/* the counter; 0: there is no mark */
	int64		reached;		/* the mark */
	int64		head;			/* the head that was noted */
	uint64		ended_before;	/* the head becomes the mark when all
								 * transactions before this have ended; 0: no
								 * head is noted */

	/* For publishers. */
	bool		is_free;
	int64		free_from;		/* no message before this is pending */
}			Place;

static Place places[NUM_PLACES];

static void init_requeues(void *memory);
static pg_atomic_uint64 *requeues_of(int64 lane);
static Place * find_place(int64 lane);
static Place * make_place(int64 lane);
static Place * find_mark(int64 lane);
static bool is_of(const Place * place, int64 lane);
static void forget_marks(void);

/*
 * Return a hash of a lane that nobody outside this process can compute.
 */
uint64
idem_lane_hash(int64 lane)
{
	return hash_bytes_extended((unsigned char *) &lane, sizeof(lane),
							   idem_secret_seed());
}

/*
 * Return the place of a lane: its own, a free one, or another lane's.
 */
static Place *
find_place(int64 lane)
{
	uint64		hash = idem_lane_hash(lane);

	for (int i = 0; i < NUM_PROBES; i++)
	{
		Place	   *place = &places[(hash + i) % NUM_PLACES];

		if (!place->is_used || place->lane == lane)
			return place;
	}
	return &places[hash % NUM_PLACES];
}

/*
 * Does the place belong to that lane, and is it still valid?
 */
static bool
is_of(const Place * place, int64 lane)
{
	return place->is_used && place->lane == lane &&
		place->contents_changes == idem_contents_changes;
}

/*
 * Return the place of a lane.  If it has none, it gets one.
 */
static Place *
make_place(int64 lane)
{
	Place	   *place = find_place(lane);

	if (!is_of(place, lane))
	{
		memset(place, 0, sizeof(*place));
		place->is_used = true;
		place->lane = lane;
		place->contents_changes = idem_contents_changes;
	}
	return place;
}

/*
 * Reserve shared memory; called when the library is preloaded.
 */
void
idem_lane_low_water_reserve(void)
{
	idem_reserve_shared_memory(NUM_COUNTERS * sizeof(pg_atomic_uint64));
}

static void
init_requeues(void *memory)
{
	pg_atomic_uint64 *counters = memory;

	for (int i = 0; i < NUM_COUNTERS; i++)
		pg_atomic_init_u64(&counters[i], 1);
}

/*
 * Return the counter of requeued messages of a lane, which other lanes with
 * the same hash share; NULL without shared memory.
 */
static pg_atomic_uint64 *
requeues_of(int64 lane)
{
	static IdemSharedMemory memory = {
		.name = "idempotency requeues",
		.size = NUM_COUNTERS * sizeof(pg_atomic_uint64),
		.init = init_requeues,
	};
	pg_atomic_uint64 *counters = idem_attach_shared_memory(&memory);

	return counters == NULL ? NULL :
		&counters[hash_combine64(MyDatabaseId, lane) % NUM_COUNTERS];
}

/*
 * Return the mark of a lane: no message with an id below it is pending.  The
 * caller must have taken its snapshot before.
 */
int64
idem_lane_low_water(int64 lane)
{
	Place	   *mark = IsolationUsesXactSnapshot() ? NULL : find_mark(lane);

	return mark == NULL ? PG_INT64_MIN : mark->reached;
}

/*
 * Return the place of a lane that has a mark, or NULL.
 */
static Place *
find_mark(int64 lane)
{
	Place	   *place = find_place(lane);
	pg_atomic_uint64 *requeues;

	if (!is_of(place, lane) || place->requeues == 0)
		return NULL;
	requeues = requeues_of(lane);
	if (requeues == NULL || pg_atomic_read_u64(requeues) != place->requeues)
		return NULL;
	return place;
}

/*
 * Scanning the lane from its mark on, "snapshot" has seen "head" as the first
 * pending message; the scan took that number of buffers.  Move the mark, now
 * or the next time.
 */
void
idem_lane_low_water_raise(int64 lane, int64 head, Snapshot snapshot, int64 buffers)
{
	Place	   *mark;
	FullTransactionId next;
	uint64		xmin;

	if (buffers <= LITTLE_BUFFERS || IsolationUsesXactSnapshot())
		return;

	mark = find_mark(lane);
	if (mark == NULL)
	{
		pg_atomic_uint64 *requeues = requeues_of(lane);

		if (requeues == NULL)
			return;
		idem_forget_on_rollback(forget_marks);
		mark = make_place(lane);
		mark->requeues = pg_atomic_read_u64(requeues);
		mark->reached = PG_INT64_MIN;
		mark->ended_before = 0;
	}

	next = ReadNextFullTransactionId();
	xmin = U64FromFullTransactionId(next) -
		(TransactionId) (XidFromFullTransactionId(next) - snapshot->xmin);
	if (mark->ended_before > xmin)
		return;
	if (mark->ended_before != 0)
		mark->reached = Min(mark->head, head);
	mark->head = head;
	mark->ended_before = U64FromFullTransactionId(next);
}

/*
 * A pending message has been found by other means than its lane's mark.
 */
void
idem_lane_low_water_found(int64 lane, int64 id)
{
	Place	   *place = find_place(lane);

	if (is_of(place, lane) && id < place->reached)
		place->requeues = 0;
}

/*
 * A message of this lane is going to be pending again.  Raises 53200 if other
 * sessions cannot be informed.
 */
void
idem_lane_low_water_expire(int64 lane)
{
	pg_atomic_uint64 *requeues = requeues_of(lane);

	if (requeues == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("could not requeue messages for lack of shared memory"),
				 errhint("Try again later, or add idempotency to \"shared_preload_libraries\".")));
	(void) GetTopTransactionId();
	pg_atomic_fetch_add_u64(requeues, 1);
}

static void
forget_marks(void)
{
	for (int i = 0; i < NUM_PLACES; i++)
		places[i].requeues = 0;
}

/*
 * Return the id to which a publisher must look back for a message that comes
 * before this one.
 */
int64
idem_lane_free_from(int64 lane, int64 id)
{
	Place	   *place = find_place(lane);

	return is_of(place, lane) && place->is_free && place->free_from < id ?
		place->free_from : PG_INT64_MIN;
}

/*
 * A publisher has found no pending message before this one; the scan took
 * that number of buffers.
 */
void
idem_lane_is_free(int64 lane, int64 id, int64 buffers)
{
	Place	   *place;

	if (buffers <= LITTLE_BUFFERS)
		return;
	place = make_place(lane);
	place->is_free = true;
	place->free_from = id;
}

/*
 * Return how many buffers this process has read.
 */
int64
idem_lane_buffers(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}
