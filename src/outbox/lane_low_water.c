/*-------------------------------------------------------------------------
 *
 * lane_low_water.c
 *		From where on a lane has pending messages.
 *
 * Each message that has left its lane leaves entries at the lane's beginning,
 * in the index of lanes, and these stay until vacuum may remove them.  Who
 * looks for the head of a lane passes them all; a backend that has passed many
 * remembers how far it came, and begins there the next time.  It does so for
 * NUM_PLACES lanes at most.  A lane that costs LITTLE_BUFFERS is none of them,
 * so keys with few messages each do not supplant those with many.  Publishers
 * choose the lanes, so where a lane has its place is each backend's own secret.
 *
 * Takes.  Messages leave a lane in order of their ids, so here a mark must not
 * pass one message: below it none is pending, and none ever will be.
 *
 *	- A publisher may have drawn its id long ago and commit now.  It has its
 *	  transaction id before it draws (see publish.c).  So when a take
 *	  finds a head, all who have drawn an id below that one, or will, have a
 *	  transaction id below the next one that is given then.  The take notes
 *	  both.  A later take, of another transaction, has a snapshot in which all
 *	  transactions below that one have ended: if that does not see a pending
 *	  message below the noted head either, there will be none, and the head is
 *	  the mark.  Where a transaction stays open that has written something, no
 *	  mark moves until it ends.
 *
 *	- A session may requeue a dead message.  It gets its transaction id, then
 *	  counts in shared memory, then writes (idem_lane_low_water_expire()).  A mark
 *	  counts only for as long as that count is what it was before the head was
 *	  noted.  If the count has not changed since, then a session that will
 *	  requeue has not counted yet, and so not committed when the snapshot was
 *	  taken; and one that the count includes has a transaction id below the
 *	  noted one, and has ended before the mark was set.  There are NUM_COUNTERS,
 *	  one for each hash of database and lane, so a requeue costs the marks of
 *	  few other lanes, even if it is rolled back.  Without shared memory there
 *	  are no marks, and a session that cannot count cannot requeue.
 *
 *	- What this transaction itself has acknowledged is back if it is rolled
 *	  back, so then all marks are forgotten, as when it is prepared.  Others'
 *	  messages are pending in the snapshot until they have committed.
 *
 * Under REPEATABLE READ and SERIALIZABLE there are no marks, so that what a
 * take relies on is what its own transaction has read.
 *
 * Rows that somebody writes by hand, and ids that a sequence gives which was
 * set back or has a cache, may come to lie below a mark.  They are found when
 * they are due, as their row is ready, and then the mark is forgotten; until
 * then later ones may overtake them.
 *
 * Publishers.  Who publishes looks from his message backwards for one that is
 * pending.  He remembers the last message before which he has found none, and
 * looks no further than to that.  This need not be exact: a message that is
 * ready without need is a signpost too many (see lanes.c).  So it is
 * not forgotten when something is rolled back or requeued.
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
#define NUM_PROBES		8		/* places where a lane may be */
#define NUM_COUNTERS	256
#define LITTLE_BUFFERS	8

/* What is known of a lane; all zero where that is nothing. */
typedef struct Place
{
	bool		is_used;
	int64		lane;
	uint64		contents_changes;

	/* Takes. */
	uint64		requeues;		/* the counter; 0: there is no mark */
	int64		reached;		/* the mark */
	int64		head;			/* the noted one */
	uint64		ended_before;	/* the mark, once all these have; 0: none is
								 * noted */

	/* Publishers. */
	bool		is_free;
	int64		free_from;		/* nothing is pending before this */
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
 * A hash of a lane that nobody knows outside this process.
 */
uint64
idem_lane_hash(int64 lane)
{
	return hash_bytes_extended((unsigned char *) &lane, sizeof(lane),
							   idem_secret_seed());
}

/*
 * The place of a lane: its own, or a free one, or another's.
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
 * Is this the place of that lane, and still true?
 */
static bool
is_of(const Place * place, int64 lane)
{
	return place->is_used && place->lane == lane &&
		place->contents_changes == idem_contents_changes;
}

/*
 * Have a place for a lane.
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
 * Have room in shared memory; called when the library is preloaded.
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
 * How often messages of a lane, or of others with its hash, have been
 * requeued; NULL without shared memory.
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
 * The mark of a lane: no message with an id below it is pending.  A snapshot
 * with which the caller goes on from there must be taken before.
 */
int64
idem_lane_low_water(int64 lane)
{
	Place	   *mark = IsolationUsesXactSnapshot() ? NULL : find_mark(lane);

	return mark == NULL ? PG_INT64_MIN : mark->reached;
}

/*
 * The place of a lane that has a mark, or NULL.
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
 * From its mark on, that snapshot has seen this message as the lane's first
 * pending one, which took so many buffers: move the mark, now or the next
 * time.
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
 * A pending message has been found, not by means of its lane's mark.
 */
void
idem_lane_low_water_found(int64 lane, int64 id)
{
	Place	   *place = find_place(lane);

	if (is_of(place, lane) && id < place->reached)
		place->requeues = 0;
}

/*
 * A message of this lane is about to be pending again.  Raises 53200 if the
 * other sessions cannot learn of it.
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
 * How far back does a publisher have to look for a message that comes before
 * this one?
 */
int64
idem_lane_free_from(int64 lane, int64 id)
{
	Place	   *place = find_place(lane);

	return is_of(place, lane) && place->is_free && place->free_from < id ?
		place->free_from : PG_INT64_MIN;
}

/*
 * He has found nothing before this one, which took so many buffers.
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
 * How many buffers this process has looked at.
 */
int64
idem_lane_buffers(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}
