/*-------------------------------------------------------------------------
 *
 * commit_notify.c
 *		Waiting for a commit by another session, and waking the waiters.
 *
 * A call that waits for an open transaction sleeps on its lock (see
 * timed_lock.c).  Committed rows have no lock: a claim within its lease, an
 * outbox without available messages.  A call that waits for a change of these
 * sleeps on its latch.  Before that it makes an entry in shared memory, which
 * the transaction that makes the change finds after its commit.
 *
 * No wake-up is lost.  A waiter makes its entry, then looks, then sleeps
 * until the entry is marked as woken, removes the mark, and looks again.  A
 * transaction's changes are visible before it scans the entries.  So if it
 * does not find a waiter, or finds it marked, that waiter has not looked yet.
 *
 * Claims.  A call that completes, fails, releases or deletes a record writes
 * that, and before its commit checks whether any call waits for the claim.
 * If not, its commit has nothing to do, because a call that comes later sees
 * the uncommitted write and sleeps on the transaction.  All calls that wait
 * for the key are woken, because there is an answer for each of them.
 *
 * Messages.  Relays that wait for the same topics are interchangeable, so a
 * commit wakes one of them, and none if one has been woken and has not looked
 * yet.  A relay that leaves with as many messages as it wanted wakes the next
 * one, because there might be more.  So does a relay that was woken again
 * since it looked, with whatever result it leaves.  An abort makes the
 * messages that it had taken available again, and wakes as a commit does; so
 * does the abort of a subtransaction.
 *
 * Times.  A lease, a delay or a pause ends without a commit.  Of the calls
 * that wait for the same, one sleeps until then, the timekeeper.  The others
 * rely on it: when it leaves, it wakes one that takes its place.
 *
 * Each waiter looks once every IDEM_LOOK_AGAIN_MS in any case.  This limits
 * the delay for changes that no call of our functions in this server has
 * committed (COMMIT PREPARED, a subscription, a superuser's changes), for
 * times that become due later than that, and for all changes if there is no
 * shared memory or no free entry in it.
 *
 * Shared memory.  There is an entry for each process that can wait; servers
 * before 17 have FEW_WAITERS if the library is not preloaded.  Entries are
 * chained in buckets: those of claims by a hash of the key, those of relays
 * by database.  A relay that listens to one topic is found by the hash of
 * that topic.  If a relay listens to several topics, or a call has taken from
 * several, its entry has a bit for each.  So a message can wake one relay
 * more than necessary.
 *
 * Locking.  Each bucket has a spinlock, which is held while its chain is
 * scanned; latches are set after its release.  A bucket's number of entries
 * is read without it.  Only its own process removes an entry; after an error,
 * when the transaction or subtransaction in which it was made is rolled back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/spin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/shared_memory.h"
#include "util/timed_lock.h"

#define FEW_WAITERS		256
#define CLAIM_BUCKETS	128		/* powers of two */
#define RELAY_BUCKETS	16

/*
 * A wake-up compares this number of names; if it finds more, it wakes each
 * waiter.
 */
#define MAX_NAMES		32

/*
 * A transaction notes this number of claims and topics; beyond that, it wakes
 * all.
 */
#define MAX_CLAIMS		64
#define MAX_TOPICS		16

/* No entry in a chain; no process. */
#define NOBODY			(-1)

/* This bit distinguishes the name of several topics from that of one. */
#define SEVERAL			UINT64CONST(1)

/* The name of relays that listen to all topics; no hash has this value. */
#define ALL_NAMES		PG_UINT64_MAX

/*
 * An entry.  Waiters for the same thing have the same name: a hash of the
 * key, or of the topics; the topic's hash if it is a single one.
 */
typedef struct Waiter
{
	pg_atomic_uint32 process;	/* its number, or NOBODY: free */
	int			next;			/* in the bucket */
	Oid			database;
	bool		woken;			/* set only under the lock */
	uint64		name;
	uint64		topics;			/* a bit for each topic's hash; 0: a claim */
	TimestampTz timer;			/* if it is the timekeeper, when it looks */
} Waiter;

typedef struct Bucket
{
	slock_t		mutex;
	int			first;			/* of its chain, or NOBODY */
	pg_atomic_uint32 nwaiters;
} Bucket;

typedef struct Waiters
{
	pg_atomic_uint32 nclaims;	/* in the buckets of all claims */
	Bucket		claims[CLAIM_BUCKETS];
	Bucket		relays[RELAY_BUCKETS];
	Waiter		waiters[FLEXIBLE_ARRAY_MEMBER];
} Waiters;

/* A topic whose messages a transaction has changed. */
typedef struct TopicNote
{
	uint64		name;
	uint64		topics;
	TimestampTz due;			/* the earliest of the messages */
	bool		was_there;		/* an abort makes a message available again */
	SubTransactionId subid;		/* the latest that changed a message */
} TopicNote;

static bool preloaded = false;
static Waiters *shared = NULL;

/*
 * Our entry, its bucket, the subtransaction in which it was made, and whether
 * it was ever the timekeeper.
 */
static Waiter *self = NULL;
static Bucket *self_bucket;
static SubTransactionId self_subid;
static bool kept_time;

/* The waiters that the current transaction has to wake. */
static uint64 claim_notes[MAX_CLAIMS];
static int	nclaim_notes = 0;
static TopicNote topic_notes[MAX_TOPICS];
static int	ntopic_notes = 0;

/* The processes that a wake-up has found; has space for all that can wait. */
static int *woken_processes;

static bool attach(void);
static int	max_waiters(void);
static void init_waiters(void *memory);
static void at_transaction_end(XactEvent event, void *arg);
static void at_subtransaction_end(SubXactEvent event, SubTransactionId subid,
								  SubTransactionId parent, void *arg);
static void enter(Bucket *bucket, uint64 name, uint64 topics);
static bool is_woken(void);
static void leave_after_error(void);
static bool elect_timekeeper(TimestampTz due);
static void wake(Bucket *bucket, uint64 name, uint64 topics, bool all);
static uint64 name_of(Datum value, uint64 seed);
static uint64 name_of_key(const Datum *key);
static uint64 name_of_topics(const Datum *topics, int ntopics, uint64 *bits);
static uint64 topic_bit(uint64 name);
static Bucket *claim_bucket(uint64 name);
static Bucket *relay_bucket(void);

/*
 * Reserve the shared memory; called when the library is preloaded.
 */
void
idem_reserve_waiters(void)
{
	preloaded = true;
	idem_reserve_shared_memory(offsetof(Waiters, waiters) +
							   max_waiters() * sizeof(Waiter));
}

/*
 * Find the shared memory.  Returns false if there is none now.
 */
static bool
attach(void)
{
	static IdemSharedMemory memory = {
		.name = "idempotency waiters",
		.init = init_waiters,
	};

	if (likely(shared != NULL))
		return true;

	memory.size = offsetof(Waiters, waiters) + max_waiters() * sizeof(Waiter);
	if (woken_processes == NULL)
		woken_processes = MemoryContextAlloc(TopMemoryContext,
											 max_waiters() * sizeof(int));
	shared = idem_attach_shared_memory(&memory);
	if (shared == NULL)
		return false;
	RegisterXactCallback(at_transaction_end, NULL);
	RegisterSubXactCallback(at_subtransaction_end, NULL);
	return true;
}

/*
 * Return the number of entries, which is the same in all processes of a
 * server.
 */
static int
max_waiters(void)
{
	return preloaded || IDEM_MEMORY_ON_DEMAND ? MaxBackends :
		Min(MaxBackends, FEW_WAITERS);
}

static void
init_waiters(void *memory)
{
	Waiters    *new_waiters = memory;

	pg_atomic_init_u32(&new_waiters->nclaims, 0);
	for (int i = 0; i < CLAIM_BUCKETS + RELAY_BUCKETS; i++)
	{
		Bucket	   *bucket = i < CLAIM_BUCKETS ? &new_waiters->claims[i] :
			&new_waiters->relays[i - CLAIM_BUCKETS];

		SpinLockInit(&bucket->mutex);
		bucket->first = NOBODY;
		pg_atomic_init_u32(&bucket->nwaiters, 0);
	}
	for (int i = 0; i < max_waiters(); i++)
		pg_atomic_init_u32(&new_waiters->waiters[i].process, NOBODY);
}

/*
 * From now on until idem_await_end(), wake this process when the claim of a
 * key ends.  The caller must look at the claim once more before it sleeps.
 */
void
idem_await_claim(const Datum *key)
{
	if (attach())
	{
		uint64		name = name_of_key(key);

		enter(claim_bucket(name), name, 0);
	}
}

/*
 * From now on until idem_await_end(), wake this process when there might be a
 * message of these topics to take, or of any topic if "topics" is NULL.  The
 * caller must look for one once more before it sleeps.
 */
void
idem_await_messages(const Datum *topics, int ntopics)
{
	if (attach() && !(topics != NULL && ntopics == 0))
	{
		uint64		bits;
		uint64		name = name_of_topics(topics, ntopics, &bits);

		enter(relay_bucket(), name, bits);
	}
}

/*
 * Make our entry.  If there is no free entry, or if this is a nested wait, in
 * a function in an index of the user, do nothing: waiters look again
 * periodically.
 */
static void
enter(Bucket *bucket, uint64 name, uint64 topics)
{
	int			n = max_waiters();
	int			place = IdemProcNumber() % n;

	if (self != NULL)
		return;

	for (int i = 0; i < n && self == NULL; i++, place = (place + 1) % n)
	{
		Waiter	   *waiter = &shared->waiters[place];
		uint32		expected = (uint32) NOBODY;

		if (!pg_atomic_compare_exchange_u32(&waiter->process, &expected,
											IdemProcNumber()))
			continue;
		waiter->database = MyDatabaseId;
		waiter->woken = false;
		waiter->name = name;
		waiter->topics = topics;
		waiter->timer = DT_NOEND;

		SpinLockAcquire(&bucket->mutex);
		waiter->next = bucket->first;
		bucket->first = place;
		SpinLockRelease(&bucket->mutex);

		self = waiter;
		self_bucket = bucket;
		self_subid = GetCurrentSubTransactionId();
		kept_time = false;
		pg_atomic_fetch_add_u32(&bucket->nwaiters, 1);
		if (topics == 0)
			pg_atomic_fetch_add_u32(&shared->nclaims, 1);
	}
	pg_memory_barrier();		/* before looking */
}

/*
 * Sleep until there might be a change; until "due", when there will be one
 * without a commit; or until "deadline".  Obeys cancel requests and all time
 * limits except lock_timeout.
 *
 * The deadlock detector does not know this sleep.  So the caller must have
 * released all its locks, including those on tables.  Otherwise a session
 * that waits for one of them could block the sessions that would end the
 * sleep.
 *
 * The caller must look again afterwards in any case.
 */
void
idem_await_change(TimestampTz due, TimestampTz deadline)
{
	static uint32 wait_event = 0;
	TimestampTz until = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													IDEM_LOOK_AGAIN_MS);

	until = Min(until, deadline);
	if (wait_event == 0)
		wait_event = IdemWaitEvent("IdempotencyChange");
	if (due < until && elect_timekeeper(due))
		until = due;
	IDEM_INJECTION_POINT("idem-await-sleeps");

	for (;;)
	{
		long		left;

		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
		if (is_woken())
			break;
		left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), until);
		if (left <= 0)
			break;
		if (WaitLatch(MyLatch,
					  WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					  Min(left, IDEM_LOOK_AGAIN_MS), wait_event) & WL_TIMEOUT)
			break;
	}

	/*
	 * While the entry is marked as woken, so that another process is woken if
	 * this one ends.
	 */
	idem_check_client();
	CHECK_FOR_INTERRUPTS();

	if (self != NULL)
	{
		SpinLockAcquire(&self_bucket->mutex);
		self->woken = false;
		self->timer = DT_NOEND;
		SpinLockRelease(&self_bucket->mutex);
		pg_memory_barrier();	/* before looking */
	}
}

/*
 * A waker sets our latch after this, so it can be read without the lock.
 */
static bool
is_woken(void)
{
	return self != NULL && *(volatile bool *) &self->woken;
}

/*
 * Become the timekeeper if no other waiter for the same looks at this time or
 * before.  Returns whether we are.
 */
static bool
elect_timekeeper(TimestampTz due)
{
	bool		elected = true;

	if (self == NULL)
		return true;

	SpinLockAcquire(&self_bucket->mutex);
	for (int i = self_bucket->first; i != NOBODY && elected;)
	{
		Waiter	   *waiter = &shared->waiters[i];

		if (waiter->timer <= due && waiter->database == self->database &&
			(waiter->name == self->name || waiter->name == ALL_NAMES))
			elected = false;
		i = waiter->next;
	}
	if (elected)
		self->timer = due;
	SpinLockRelease(&self_bucket->mutex);
	kept_time |= elected;
	return elected;
}

/*
 * End the wait.  If we were woken since the last look, or others rely on us
 * as timekeeper, wake another waiter.
 */
void
idem_await_end(void)
{
	Waiter	   *waiter = self;
	Bucket	   *bucket = self_bucket;
	uint64		name;
	uint64		topics;
	bool		woken;
	int		   *link;

	if (waiter == NULL)
		return;

	SpinLockAcquire(&bucket->mutex);
	link = &bucket->first;
	while (&shared->waiters[*link] != waiter)
		link = &shared->waiters[*link].next;
	*link = waiter->next;
	woken = waiter->woken;
	SpinLockRelease(&bucket->mutex);

	self = NULL;
	name = waiter->name;
	topics = waiter->topics;
	pg_atomic_fetch_sub_u32(&bucket->nwaiters, 1);
	if (topics == 0)
		pg_atomic_fetch_sub_u32(&shared->nclaims, 1);
	pg_memory_barrier();		/* before others can have the entry */
	pg_atomic_write_u32(&waiter->process, (uint32) NOBODY);

	if (kept_time || (woken && topics != 0))
		wake(bucket, name, topics, false);
}

/*
 * An error has ended the wait, possibly after a sleep and before the
 * following look, so wake another waiter in any case.
 */
static void
leave_after_error(void)
{
	kept_time = true;
	idem_await_end();
}

/*
 * The caller has written the end of a key's claim.  When the transaction
 * commits, wake its waiters.  Calls that come later see the write, so if
 * there is no waiter yet, there will be none to wake.
 */
void
idem_notify_claim_end(const Datum *key)
{
	if (!attach())
		return;
	pg_memory_barrier();		/* after writing */
	if (likely(pg_atomic_read_u32(&shared->nclaims) == 0))
		return;
	if (nclaim_notes <= MAX_CLAIMS)
	{
		if (nclaim_notes < MAX_CLAIMS)
			claim_notes[nclaim_notes] = name_of_key(key);
		nclaim_notes++;			/* one more stands for all */
	}
}

/*
 * The caller has written a message of this topic, so that there might be one
 * to take from "due" on.  When the transaction commits, wake a relay.  Do the
 * same when it aborts, if the message "was there" before.
 */
void
idem_notify_message(Datum topic, TimestampTz due, bool was_there)
{
	uint64		name;
	int			i = 0;

	if (!attach())
		return;

	name = name_of(topic, MyDatabaseId);
	while (i < ntopic_notes && topic_notes[i].name != name)
		i++;
	if (i == MAX_TOPICS)
	{
		/* Too many: the last note stands for all topics. */
		i = MAX_TOPICS - 1;
		topic_notes[i].name = ALL_NAMES;
		topic_notes[i].topics = ~UINT64CONST(0);
	}
	else if (i == ntopic_notes)
	{
		ntopic_notes++;
		topic_notes[i].name = name;
		topic_notes[i].topics = topic_bit(name);
		topic_notes[i].due = DT_NOEND;
		topic_notes[i].was_there = false;
		topic_notes[i].subid = InvalidSubTransactionId;
	}
	topic_notes[i].due = Min(topic_notes[i].due, due);
	topic_notes[i].was_there |= was_there;
	topic_notes[i].subid = Max(topic_notes[i].subid,
							   GetCurrentSubTransactionId());
}

/*
 * There might be more messages than the caller could take, of these topics,
 * or of any if "topics" is NULL: wake the next waiter.
 */
void
idem_wake_next(const Datum *topics, int ntopics)
{
	uint64		bits;
	uint64		name;

	if (!attach() ||
		pg_atomic_read_u32(&relay_bucket()->nwaiters) == 0)
		return;
	name = name_of_topics(topics, ntopics, &bits);
	wake(relay_bucket(), name, bits, false);
}

/*
 * Wake the waiters that have been noted.  At these events all other sessions
 * see that the transaction has ended.
 *
 * A prepared transaction has not ended, but the waiters for a claim are
 * woken, too: they see that the transaction has the row, and sleep on it.
 */
static void
at_transaction_end(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT &&
		event != XACT_EVENT_PREPARE)
		return;

	if (unlikely(self != NULL))
		leave_after_error();
	if (likely(nclaim_notes == 0 && ntopic_notes == 0))
		return;

	pg_memory_barrier();		/* after ending */
	if (event != XACT_EVENT_ABORT)
	{
		for (int i = 0; i < Min(nclaim_notes, MAX_CLAIMS); i++)
			wake(claim_bucket(claim_notes[i]), claim_notes[i], 0, true);
		for (int i = 0; nclaim_notes > MAX_CLAIMS && i < CLAIM_BUCKETS; i++)
			wake(&shared->claims[i], ALL_NAMES, 0, true);
	}
	nclaim_notes = 0;

	if (ntopic_notes > 0 && event != XACT_EVENT_PREPARE &&
		pg_atomic_read_u32(&relay_bucket()->nwaiters) > 0)
	{
		/* Waiters look before anything later becomes due. */
		TimestampTz soon = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   IDEM_LOOK_AGAIN_MS);

		for (int i = 0; i < ntopic_notes; i++)
		{
			TopicNote  *note = &topic_notes[i];

			if (event == XACT_EVENT_COMMIT ? note->due <= soon :
				note->was_there)
				wake(relay_bucket(), note->name, note->topics, false);
		}
	}
	ntopic_notes = 0;
}

/*
 * End the wait, if an error has ended it.  Wake the waiters for what was
 * given back: at this event all other sessions see that the subtransaction
 * has ended.
 *
 * Subtransactions that began after it are its children, and have ended, too.
 * Notes that its parents have made about the same topic stay.
 */
static void
at_subtransaction_end(SubXactEvent event, SubTransactionId subid,
					  SubTransactionId parent, void *arg)
{
	if (event != SUBXACT_EVENT_ABORT_SUB)
		return;

	if (unlikely(self != NULL && subid == self_subid))
		leave_after_error();
	if (likely(ntopic_notes == 0))
		return;

	pg_memory_barrier();		/* after ending */
	for (int i = 0; i < ntopic_notes; i++)
	{
		TopicNote  *note = &topic_notes[i];

		if (note->subid < subid)
			continue;
		note->subid = parent;
		if (note->was_there)
			wake(relay_bucket(), note->name, note->topics, false);
	}
}

/*
 * Wake the waiters of a bucket for this name, or for these bits of topics:
 * all of them, or as few as necessary.  One waiter is enough for each name,
 * and one that certainly listens to the name is enough for all.  Bits decide
 * only if one side has several topics.
 *
 * The chain is scanned once, and the latches are set afterwards.
 */
static void
wake(Bucket *bucket, uint64 name, uint64 topics, bool all)
{
	uint64		names[MAX_NAMES];
	int			nnames = 0;
	int			nwoken = 0;
	bool		done = false;

	if (pg_atomic_read_u32(&bucket->nwaiters) == 0)
		return;

	SpinLockAcquire(&bucket->mutex);
	for (int i = bucket->first; i != NOBODY && !done;)
	{
		Waiter	   *waiter = &shared->waiters[i];
		bool		sure = waiter->name == name || waiter->name == ALL_NAMES ||
			(all && name == ALL_NAMES);

		i = waiter->next;
		if (waiter->database != MyDatabaseId || waiter == self ||
			!(sure || (((waiter->name | name) & SEVERAL) != 0 &&
					   (waiter->topics & topics) != 0)))
			continue;

		if (!all)
		{
			int			n = 0;

			while (n < nnames && names[n] != waiter->name)
				n++;
			if (n < nnames)
				continue;
			if (nnames < MAX_NAMES)
				names[nnames++] = waiter->name;
			done = sure;
		}
		if (!waiter->woken)
		{
			waiter->woken = true;
			woken_processes[nwoken++] =
				(int) pg_atomic_read_u32(&waiter->process);
		}
	}
	SpinLockRelease(&bucket->mutex);

	for (int i = 0; i < nwoken; i++)
		SetLatch(&GetPGProcByNumber(woken_processes[i])->procLatch);
}

/*
 * Return a hash of a text, without the bit SEVERAL.
 */
static uint64
name_of(Datum value, uint64 seed)
{
	text	   *string = DatumGetTextPP(value);

	return hash_bytes_extended((unsigned char *) VARDATA_ANY(string),
							   VARSIZE_ANY_EXHDR(string), seed) & ~SEVERAL;
}

static uint64
name_of_key(const Datum *key)
{
	return name_of(key[1], name_of(key[0], MyDatabaseId));
}

/*
 * Return the name of relays that listen to some topics, and the topics' bits.
 */
static uint64
name_of_topics(const Datum *topics, int ntopics, uint64 *bits)
{
	uint64		name = ALL_NAMES;

	*bits = ~UINT64CONST(0);
	if (topics == NULL)
		return ALL_NAMES;

	*bits = 0;
	for (int i = 0; i < ntopics; i++)
	{
		uint64		topic = name_of(topics[i], MyDatabaseId);

		*bits |= topic_bit(topic);
		name = i == 0 ? topic : hash_combine64(name, topic) | SEVERAL;
	}
	return name == ALL_NAMES && ntopics > 0 ? SEVERAL : name;
}

static uint64
topic_bit(uint64 name)
{
	return UINT64CONST(1) << (name >> 58);
}

static Bucket *
claim_bucket(uint64 name)
{
	return &shared->claims[name % CLAIM_BUCKETS];
}

static Bucket *
relay_bucket(void)
{
	return &shared->relays[MyDatabaseId % RELAY_BUCKETS];
}
