/*-------------------------------------------------------------------------
 *
 * rate_limit.c
 *		idempotency.max_new_keys_per_minute: limiting the new keys of a scope.
 *
 * Windows.  A window counts the new keys of one scope in one database, by
 * slots of 6 seconds: the current one and the ten before it.  Their sum stays
 * within the limit, so no period of 60 seconds has more new keys than that.
 * The error is on the safe side: a key counts for 60 to 66 seconds.  Times
 * are from the monotonic clock, which nobody can set.  A key counts when it
 * is admitted, whether or not its transaction commits.  It is uncounted only
 * if another session was first to insert that very key.
 *
 * Places.  Shared memory has a fixed number of places for windows, in sets of
 * 8.  The set of a scope is chosen by a hash with a secret of the server, so
 * nobody can aim at one.  A scope without a place takes that of an idle
 * window in its set.  If there is none, it takes that of the window with the
 * lowest count; windows with the same count are chosen in turn.  So if more
 * scopes are active within a minute than there are places, scopes with few
 * keys are forgotten first and might get more than their limit.  A scope near
 * its limit keeps its place, and no scope is refused because of others.  Two
 * scopes with the same 64-bit hash count as one; nobody can choose such
 * scopes.
 *
 * There are 16384 places in 1.1 MB.  Servers before 17 have memory for these
 * only if the library is preloaded, and otherwise for 512 places in 33 kB.
 * If that memory is not available either, which any user can cause with
 * locks, new keys are refused: a limit that cannot be enforced must not be
 * ignored.
 *
 * Locking.  Each set has a spinlock, which is held while at most 8 windows
 * are read.  Reading, comparing and counting are one step under it, so
 * concurrent claims cannot exceed the limit together.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/spin.h"
#include "utils/builtins.h"

#include "keys/rate_limit.h"
#include "stats/stats.h"
#include "util/compat.h"
#include "util/errors.h"
#include "util/shared_memory.h"
#include "util/siphash.h"
#include "util/times.h"

#define WINDOW_SECONDS	60
#define SLOT_SECONDS	6
#define SLOT_USECS		(SLOT_SECONDS * INT64CONST(1000000))
#define NUM_SLOTS		(WINDOW_SECONDS / SLOT_SECONDS + 1)

#define SET_SIZE		8
#define MANY_SETS		2048	/* powers of two */
#define FEW_SETS		64

/* The maximum length of a scope in a message, in bytes. */
#define MAX_SHOWN_SCOPE	64

/* A window; without keys if its place was never used. */
typedef struct Window
{
	uint64		scope;			/* hash of scope and database */
	IdemRateSlot slot;			/* the latest one in "counts" */
	uint32		total;			/* sum of "counts" */
	uint32		counts[NUM_SLOTS];	/* slot s is counts[s % NUM_SLOTS] */
} Window;

typedef struct WindowSet
{
	slock_t		mutex;
	int			next;			/* the place to try first */
	Window		windows[SET_SIZE];
} WindowSet;

#define SIZE_OF_SETS(n)	((n) * sizeof(WindowSet))

static WindowSet *sets = NULL;

/* The number of sets; the postmaster decides it if it loads the library. */
static int	nsets = IDEM_MEMORY_ON_DEMAND ? MANY_SETS : FEW_SETS;

static void attach(void);
static void init_sets(void *memory);
static WindowSet *set_of(uint64 scope);
static uint64 hash_scope(Datum scope);
static int64 current_time(void);
static Window *find_window(WindowSet *set, uint64 scope);
static Window *replace_window(WindowSet *set, uint64 scope, IdemRateSlot slot);
static void advance(Window *window, IdemRateSlot slot);
static int	seconds_to_wait(const Window *window, int64 now);
pg_noreturn static void refuse(Datum scope, int wait);

/*
 * Reserve the shared memory; called when the library is preloaded.
 */
void
idem_reserve_rate_limits(void)
{
	nsets = MANY_SETS;
	idem_reserve_shared_memory(SIZE_OF_SETS(nsets));
}

/*
 * Count a new key.  Returns its slot, for idem_uncount_new_key().  Raises
 * ID002, having counted nothing, if the scope has reached its limit, and
 * 53200 if there is no memory to count in.
 */
IdemRateSlot
idem_count_new_key(Datum scope)
{
	uint64		hash;
	int64		now;
	IdemRateSlot slot;
	WindowSet  *set;
	Window	   *window;
	Window		full;
	bool		admitted;

	attach();
	hash = hash_scope(scope);
	now = current_time();
	slot = now / SLOT_USECS;
	set = set_of(hash);

	SpinLockAcquire(&set->mutex);
	window = find_window(set, hash);
	if (window == NULL)
		window = replace_window(set, hash, slot);
	else
		advance(window, slot);
	slot = window->slot;
	admitted = window->total < idem_max_new_keys_per_minute;
	if (admitted)
	{
		window->total++;
		window->counts[slot % NUM_SLOTS]++;
	}
	else
		full = *window;
	SpinLockRelease(&set->mutex);

	if (!admitted)
		refuse(scope, seconds_to_wait(&full, now));
	return slot;
}

/*
 * Undo idem_count_new_key(), unless the slot has passed.
 */
void
idem_uncount_new_key(Datum scope, IdemRateSlot slot)
{
	uint64		hash = hash_scope(scope);
	WindowSet  *set = set_of(hash);
	Window	   *window;

	SpinLockAcquire(&set->mutex);
	window = find_window(set, hash);
	if (window != NULL && window->slot - slot < NUM_SLOTS &&
		window->counts[slot % NUM_SLOTS] > 0)
	{
		window->total--;
		window->counts[slot % NUM_SLOTS]--;
	}
	SpinLockRelease(&set->mutex);
}

/*
 * Find the shared memory.  Raises 53200 if there is none.
 */
static void
attach(void)
{
	static IdemSharedMemory memory = {
		.name = "idempotency rate limits",
		.init = init_sets,
	};

	if (likely(sets != NULL))
		return;

	memory.size = SIZE_OF_SETS(nsets);
	sets = idem_attach_shared_memory(&memory);
	if (sets == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("could not count new idempotency keys"),
				 errdetail("\"%s\" is set, and there is no shared memory left to count in.",
						   "idempotency.max_new_keys_per_minute"),
				 errhint("Add \"idempotency\" to \"%s\", and restart the server.",
						 "shared_preload_libraries")));
}

static void
init_sets(void *memory)
{
	WindowSet  *new_sets = memory;

	memset(new_sets, 0, SIZE_OF_SETS(nsets));
	for (int i = 0; i < nsets; i++)
		SpinLockInit(&new_sets[i].mutex);
}

/*
 * Return a hash that identifies a scope of this database.
 */
static uint64
hash_scope(Datum scope)
{
	text	   *name = DatumGetTextPP(scope);
	IdemSipState state;

	idem_sip_begin(&state);
	idem_sip_add(&state, MyDatabaseId);
	idem_sip_add_bytes(&state, VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name));
	return idem_sip_end(&state);
}

static WindowSet *
set_of(uint64 scope)
{
	return &sets[scope & (nsets - 1)];
}

/*
 * Return microseconds of a clock that all sessions share.  It begins late
 * enough for the slots of a whole window to be positive.
 */
static int64
current_time(void)
{
	return NUM_SLOTS * SLOT_USECS + idem_monotonic_time();
}

/*
 * Return the window of a scope, NULL if it has none.  Here and below, the
 * caller has locked the set.
 */
static Window *
find_window(WindowSet *set, uint64 scope)
{
	for (int i = 0; i < SET_SIZE; i++)
	{
		if (set->windows[i].scope == scope)
			return &set->windows[i];
	}
	return NULL;
}

/*
 * Begin a window of a scope.  It replaces the one with the lowest count.
 */
static Window *
replace_window(WindowSet *set, uint64 scope, IdemRateSlot slot)
{
	int			lowest = -1;

	for (int i = 0; i < SET_SIZE; i++)
	{
		int			n = (set->next + i) % SET_SIZE;

		advance(&set->windows[n], slot);
		if (lowest < 0 || set->windows[n].total < set->windows[lowest].total)
			lowest = n;
	}

	set->next = (lowest + 1) % SET_SIZE;
	memset(&set->windows[lowest], 0, sizeof(Window));
	set->windows[lowest].scope = scope;
	set->windows[lowest].slot = slot;
	return &set->windows[lowest];
}

/*
 * Move the window to end with "slot", and forget the slots before it.  Does
 * nothing if a session that read the clock later has moved it further.
 */
static void
advance(Window *window, IdemRateSlot slot)
{
	if (slot - window->slot >= NUM_SLOTS)
	{
		window->total = 0;
		memset(window->counts, 0, sizeof(window->counts));
		window->slot = slot;
	}
	while (window->slot < slot)
	{
		int			oldest = ++window->slot % NUM_SLOTS;

		window->total -= window->counts[oldest];
		window->counts[oldest] = 0;
	}
}

/*
 * Return after how many seconds a full window will have room for another key.
 */
static int
seconds_to_wait(const Window *window, int64 now)
{
	IdemRateSlot slot = window->slot - (NUM_SLOTS - 1);
	uint32		left = window->total - window->counts[slot % NUM_SLOTS];
	int64		wait;

	while (left >= idem_max_new_keys_per_minute && slot < window->slot)
		left -= window->counts[++slot % NUM_SLOTS];

	wait = (slot + NUM_SLOTS) * SLOT_USECS - now;
	return Max((wait + 999999) / 1000000, 1);
}

/*
 * Raise ID002, and count the refusal.
 */
static void
refuse(Datum scope, int wait)
{
	text	   *name = DatumGetTextPP(scope);
	int			length = VARSIZE_ANY_EXHDR(name);
	int			shown;

	idem_count(IDEM_COUNT_RATE_LIMITED, 1);
	shown = pg_mbcliplen(VARDATA_ANY(name), length, MAX_SHOWN_SCOPE);
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_RATE_LIMITED),
			 errmsg("too many new idempotency keys in scope \"%.*s%s\"",
					shown, VARDATA_ANY(name), shown < length ? "..." : ""),
			 errdetail_plural("At most %d is accepted in a minute.",
							  "At most %d are accepted in a minute.",
							  idem_max_new_keys_per_minute,
							  idem_max_new_keys_per_minute),
			 errhint_plural("Retry in %d second.", "Retry in %d seconds.",
							wait, wait)));
}
