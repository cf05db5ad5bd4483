/*-------------------------------------------------------------------------
 *
 * outbox_lane_mark.c
 *		From where on a lane has pending messages.
 *
 * Each message that has left its lane leaves entries at the lane's beginning,
 * in the index of lanes, and these stay until vacuum may remove them.  Who
 * looks for the head of a lane passes them all; a backend that has passed many
 * remembers how far it came, and begins there the next time.  It does so for
 * NUM_PLACES lanes at most.  A lane that costs LITTLE_BUFFERS is none of them,
 * so keys with few messages each do not supplant those with many.
 *
 * Takes.  Messages leave a lane in order of their ids, so here a mark must not
 * pass one message: below it none is pending, and none ever will be.
 *
 *	- A publisher may have drawn its id long ago and commit now.  It has its
 *	  transaction id before it draws (see outbox_publish.c).  So when a take
 *	  finds a head, all who have drawn an id below that one, or will, have a
 *	  transaction id below the next one that is given then.  The take notes
 *	  both.  A later take, of another transaction, has a snapshot in which all
 *	  transactions below that one have ended: if that does not see a pending
 *	  message below the noted head either, there will be none, and the head is
 *	  the mark.  Where a transaction stays open that has written something, no
 *	  mark moves until it ends.
 *
 *	- Somebody may requeue a dead message.  He gets his transaction id, then
 *	  counts in shared memory, then writes (idem_lane_marks_expire()).  A mark
 *	  counts only for as long as that count is what it was before the head was
 *	  noted.  If the count has not changed since, then who will requeue has not
 *	  counted yet, and so not committed when the snapshot was taken; and whom
 *	  the count includes has a transaction id below the noted one, and has
 *	  ended before the mark was set.  Without shared memory there are no marks,
 *	  and who cannot count cannot requeue.
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
 * ready without need is a signpost too many (see outbox_lanes.c).  So it is
 * not forgotten when something is rolled back or requeued.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "executor/instrument.h"
#include "port/atomics.h"

#include "compat.h"
#include "outbox_lane_mark.h"
#include "relations.h"
#include "rollback.h"
#include "shared_memory.h"

#define NUM_PLACES		64		/* a power of two */
#define LITTLE_BUFFERS	8

typedef struct LaneMark
{
	int64		lane;
	uint64		relation_changes;
	uint64		requeues;		/* 0: nothing is known of the lane */
	int64		reached;		/* the mark */
	int64		head;			/* the noted one */
	uint64		ended_before;	/* the mark, once all these have; 0: none is
								 * noted */
} LaneMark;

typedef struct FreeLane
{
	int64		lane;
	uint64		relation_changes;
	int64		id;				/* nothing is pending before it */
} FreeLane;

static LaneMark marks[NUM_PLACES];
static FreeLane free_lanes[NUM_PLACES];

static void init_requeues(void *memory);
static pg_atomic_uint64 *attach_requeues(void);
static LaneMark *find_mark(int64 lane);
static void forget_marks(void);

/*
 * Have room in shared memory; called when the library is preloaded.
 */
void
idem_lane_marks_reserve(void)
{
	idem_reserve_shared_memory(sizeof(pg_atomic_uint64));
}

static void
init_requeues(void *memory)
{
	pg_atomic_init_u64(memory, 1);
}

/*
 * How often messages have been requeued; NULL without shared memory.
 */
static pg_atomic_uint64 *
attach_requeues(void)
{
	static IdemSharedMemory memory = {
		.name = "idempotency requeues",
		.size = sizeof(pg_atomic_uint64),
		.init = init_requeues,
	};

	return idem_attach_shared_memory(&memory);
}

/*
 * The mark of a lane: no message with an id below it is pending.  A snapshot
 * with which the caller goes on from there must be taken before.
 */
int64
idem_lane_mark(int64 lane)
{
	LaneMark   *mark = IsolationUsesXactSnapshot() ? NULL : find_mark(lane);

	return mark == NULL ? PG_INT64_MIN : mark->reached;
}

static LaneMark *
find_mark(int64 lane)
{
	LaneMark   *mark = &marks[lane & (NUM_PLACES - 1)];
	pg_atomic_uint64 *requeues;

	if (mark->lane != lane || mark->requeues == 0 ||
		mark->relation_changes != idem_relation_changes)
		return NULL;
	requeues = attach_requeues();
	if (requeues == NULL || pg_atomic_read_u64(requeues) != mark->requeues)
		return NULL;
	return mark;
}

/*
 * From its mark on, that snapshot has seen this message as the lane's first
 * pending one, which took so many buffers: move the mark, now or the next
 * time.
 */
void
idem_lane_mark_move(int64 lane, int64 head, Snapshot snapshot, int64 buffers)
{
	LaneMark   *mark;
	FullTransactionId next;
	uint64		xmin;

	if (buffers <= LITTLE_BUFFERS || IsolationUsesXactSnapshot())
		return;

	mark = find_mark(lane);
	if (mark == NULL)
	{
		pg_atomic_uint64 *requeues = attach_requeues();

		if (requeues == NULL)
			return;
		idem_forget_on_rollback(forget_marks);
		mark = &marks[lane & (NUM_PLACES - 1)];
		mark->lane = lane;
		mark->relation_changes = idem_relation_changes;
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
idem_lane_mark_found(int64 lane, int64 id)
{
	LaneMark   *mark = &marks[lane & (NUM_PLACES - 1)];

	if (mark->lane == lane && id < mark->reached)
		mark->requeues = 0;
}

/*
 * Messages are about to be pending again that were not any more.  Raises 53200
 * where the other sessions cannot be told.
 */
void
idem_lane_marks_expire(void)
{
	pg_atomic_uint64 *requeues = attach_requeues();

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
	memset(marks, 0, sizeof(marks));
}

/*
 * How far back does a publisher have to look for a message that comes before
 * this one?
 */
int64
idem_lane_free_from(int64 lane, int64 id)
{
	FreeLane   *place = &free_lanes[lane & (NUM_PLACES - 1)];

	return place->lane == lane && place->id < id &&
		place->relation_changes == idem_relation_changes ?
		place->id : PG_INT64_MIN;
}

/*
 * He has found nothing before this one, which took so many buffers.
 */
void
idem_lane_is_free(int64 lane, int64 id, int64 buffers)
{
	FreeLane   *place = &free_lanes[lane & (NUM_PLACES - 1)];

	if (buffers <= LITTLE_BUFFERS)
		return;
	place->lane = lane;
	place->relation_changes = idem_relation_changes;
	place->id = id;
}

/*
 * How many buffers this process has looked at.
 */
int64
idem_lane_buffers(void)
{
	return pgBufferUsage.shared_blks_hit + pgBufferUsage.shared_blks_read;
}
