/*-------------------------------------------------------------------------
 *
 * commit_notify.c
 *		Waiting for what a commit brings, and being woken by it.
 *
 * Who waits for an open transaction sleeps on its lock (see timed_lock.c).  What is
 * committed has no lock: a claim within its lease, an outbox with nothing to
 * take.  Who waits for a change of that sleeps on its latch, and has said so
 * before in shared memory, where the transaction that makes the change finds
 * it after its commit.
 *
 * No wake-up is lost: a waiter enters itself, then looks, then sleeps until
 * its entry is marked as woken, takes that mark away, and looks again.  A
 * transaction's changes are visible before it goes through the entries, so
 * whom it does not find, or finds marked, has yet to look.
 *
 * A claim.  Whoever completes, fails, releases or deletes a record looks, once
 * it has written that and not yet committed it, whether anybody waits for a
 * claim.  If not, its commit has nothing to do, because who comes now sees
 * what has been written and sleeps on the transaction.  All who wait for the
 * key are woken, for all of them have an answer.
 *
 * Messages.  Relays that wait for the same topics are as good as each other,
 * so a commit wakes one of them, and none while one is on its way that has
 * been woken and has not looked yet.  The rest follows where there is more:
 * who leaves with as many messages as it wanted wakes the next one, and so
 * does, whatever it leaves with, who has been woken once more since it looked.
 * An abort, of a subtransaction, too, gives back what it had taken, and wakes
 * as a commit does.
 *
 * Times.  A lease, a delay or a pause comes to its end without a commit.  Of
 * those who wait for the same, one sleeps until then, the timekeeper; the
 * others rely on it, for when it leaves it wakes one that takes its place.
 *
 * Each waiter looks once in IDEM_LOOK_AGAIN_MS, whatever happens.  That is how
 * long it takes to see what no session here has committed by our functions
 * (COMMIT PREPARED, a subscription's, a superuser's changes), to hear of what
 * will become due later than that, and to see anything at all if there is no
 * shared memory, or no free entry in it.
 *
 * Shared memory.  An entry for each process that may wait; servers before 17
 * have FEW_WAITERS if the library is not preloaded.  Entries are chained in
 * buckets: those of claims by a hash of the key, those of relays by database.
 * A relay that listens to one topic is found by the hash of that topic.  Of
 * one that listens to several topics, or of a call that has taken from several,
 * the entry has a bit for each, so a message might wake one relay more than it
 * has to.
 *
 * Locking.  A spinlock for each bucket, held while its chain is gone through;
 * latches are set when it is released.  A bucket's number of entries is read
 * without it.  An entry is removed by its own process alone, at an error when
 * the transaction or subtransaction in which it was made is rolled back.
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

/* How many names a wake-up compares; beyond that, it wakes each waiter. */
#define MAX_NAMES		32

/* What a transaction notes one by one; beyond that, it wakes all. */
#define MAX_CLAIMS		64
#define MAX_TOPICS		16

/* Nobody's place in a chain; nobody's process. */
#define NOBODY			(-1)

/* The bit that tells the name of several topics from that of one. */
#define SEVERAL			UINT64CONST(1)

/* The name of the relays that listen to all topics; no hash is that. */
#define ALL_NAMES		PG_UINT64_MAX

/*
 * Waiters for the same thing have the same name: a hash of the key, or of the
 * topics, that of the topic if it is one.
 */
typedef struct Waiter
{
	pg_atomic_uint32 process;	/* its number, or NOBODY: free */
	int			next;			/* in the bucket */
	Oid			database;
	bool		woken;			/* to be set under the lock only */
	uint64		name;
	uint64		topics;			/* a bit for each topic's hash; 0: a claim's */
	TimestampTz timer;			/* when it looks by itself, if it keeps time */
} Waiter;

typedef struct Bucket
{
	slock_t		mutex;
	int			first;			/* of its chain, or NOBODY */
	pg_atomic_uint32 nwaiters;
} Bucket;

typedef struct Waiters
{
	pg_atomic_uint32 nclaims;	/* in all claims' buckets */
	Bucket		claims[CLAIM_BUCKETS];
	Bucket		relays[RELAY_BUCKETS];
	Waiter		waiters[FLEXIBLE_ARRAY_MEMBER];
} Waiters;

/* A topic of which a transaction has changed messages. */
typedef struct TopicNote
{
	uint64		name;
	uint64		topics;
	TimestampTz due;			/* the earliest of the messages */
	bool		was_there;		/* an abort makes it available again */
	SubTransactionId subid;		/* the latest that has changed one */
} TopicNote;

static bool preloaded = false;
static Waiters *shared = NULL;

/*
 * Our entry, the bucket that it is in, and since which subtransaction; has it
 * ever been the timekeeper's?
 */
static Waiter *self = NULL;
static Bucket *self_bucket;
static SubTransactionId self_subid;
static bool kept_time;

/* What the current transaction has to wake for. */
static uint64 claim_notes[MAX_CLAIMS];
static int	nclaim_notes = 0;
static TopicNote topic_notes[MAX_TOPICS];
static int	ntopic_notes = 0;

/* The processes that a wake-up has found: room for all that may wait. */
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
 * Find the shared memory.  Returns false if there is none at the moment.
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
 * How many entries there are: the same in all processes of a server.
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
 * From now on until idem_await_end(), be woken when the claim of a key is
 * ended.  The caller is to look at it once more before it sleeps.
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
 * From now on until idem_await_end(), be woken when there may be a message
 * to take of these topics, or of any if "topics" is NULL.  The caller is to
 * look for one once more before it sleeps.
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
 * Enter ourselves.  Without a free entry, or within another wait, because an
 * index of the user's calls us, there is nothing to be done: who waits looks
 * now and then anyway.
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
 * Sleep until there may be a change, until "due", when there will be one
 * without a commit, or until "deadline".  Obeys cancel requests and all time
 * limits but lock_timeout.
 *
 * The deadlock detector does not know of this sleep, so the caller must have
 * given back every lock of its own: on a table, too, or whoever waits for that
 * keeps those away that would end the sleep.
 *
 * The caller is to look again afterwards in any case.
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

	/* While we are marked as woken, so that another is if we go. */
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
 * Who sets it sets our latch afterwards, so that it is seen without the lock.
 */
static bool
is_woken(void)
{
	return self != NULL && *(volatile bool *) &self->woken;
}

/*
 * Is it we who shall look at this time, because nobody who waits for the same
 * does so at that time or before?
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
 * The wait is over.  Whatever we were woken for since we looked last, and the
 * times that others rely on us for, become another's.
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
	pg_memory_barrier();		/* before others may have it */
	pg_atomic_write_u32(&waiter->process, (uint32) NOBODY);

	if (kept_time || (woken && topics != 0))
		wake(bucket, name, topics, false);
}

/*
 * An error has ended the wait, perhaps behind a sleep and before the look that
 * it was for: wake another one in any case.
 */
static void
leave_after_error(void)
{
	kept_time = true;
	idem_await_end();
}

/*
 * The caller has written the end of a key's claim: when the transaction
 * commits, wake who waits for it.  Who comes from now on sees what has been
 * written, so if nobody waits yet, nobody will have to be woken.
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
		nclaim_notes++;			/* one more means: all */
	}
}

/*
 * The caller has written a message of this topic, so that there may be one to
 * take from "due" on: when the transaction commits, wake a relay.  Likewise
 * when it aborts, if the message "was there" before.
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
		/* Too many: the last place stands for them all. */
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
 * There may be more messages than the caller could take of these topics, or
 * of any if "topics" is NULL: wake the next one, if one waits.
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
 * Wake for what has been noted.  At these events all other sessions see that
 * the transaction has ended.
 *
 * A prepared one has not, but who waits for a claim is woken, too: it will see
 * that the transaction has the row, and sleep on that.
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
		/* What comes later will have been seen by then. */
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
 * Leave, if an error has ended the wait.  Wake for what has been given back: at
 * this event all other sessions see that the subtransaction has ended.
 *
 * Those that began after it are its own, and have ended, too.  What its parents
 * have noted of the same topic stays noted.
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
 * Wake the waiters of a bucket for this name, or for these bits of topics: all
 * of them, or as few as will do.  Of those with the same name one will do, and
 * of all one that is sure to listen to the name.  Bits decide only where one
 * side has several topics.
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
 * A hash of a text, without the bit SEVERAL.
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
 * The name of the relays that listen to some topics, and the bits of these.
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
