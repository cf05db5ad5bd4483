/*-------------------------------------------------------------------------
 *
 * key_lock.c
 *		A lock on a key for the duration of a call.
 *
 * A row lock needs a row.  A call that must be alone at a primary key,
 * whether or not the key has a row, takes the key's lock.  It holds the lock
 * for a few steps only, not until the end of the transaction: after that, the
 * row that it has written protects it.
 *
 * The lock is an exclusive lock in the server's lock manager.  So it needs no
 * shared memory of our own, only max_locks_per_transaction limits it, and
 * waiting works as in util/timed_lock.c.  Its tag is that of an advisory
 * lock, with a number in the last field (objsubid in pg_locks) that no SQL
 * function can set.  The tag contains the key as a hash of 64 bits.  The hash
 * depends on a secret of the server, so nobody can choose two keys with the
 * same hash.  Two keys that have the same hash by chance exclude each other,
 * without further effect.
 *
 * idem_key_lock() never waits.  If it fails, another session is working on
 * this key, and the caller answers so, or waits with idem_key_lock_until().
 * That function returns with the lock held: if the caller had to release the
 * lock to look again, two such sessions could alternately find it taken.
 *
 * The lock belongs to the current subtransaction, in which it must be
 * released.  An error releases it together with what was written under it.
 * While it is held, a call can wait for others in rare cases (a unique index
 * of the user, an ALTER SEQUENCE), but never for its own key.  The deadlock
 * detector knows the lock.
 *
 * A nested call, by a function in an index of the user, does not get a lock
 * that its session already holds.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "utils/rel.h"
#include "utils/resowner.h"

#include "store/key_lock.h"
#include "util/compat.h"
#include "util/siphash.h"
#include "util/timed_lock.h"

/* SQL's advisory locks have 1 or 2 here. */
#define KEY_LOCK_FIELD4		0x1DE

static bool acquire(IdemKeyLock *lock, bool wait);
static void sleep_on_lock(void *arg);
static void set_tag(IdemKeyLock *lock, IdemCursor *cursor, const Datum *key);
static uint64 hash_key(IdemTable *table, const Datum *key);

/*
 * Take the lock of a key of this table, unless another session has it.  The
 * key is as for idem_find().  Returns whether the lock was taken.
 */
bool
idem_key_lock(IdemKeyLock *lock, IdemCursor *cursor, const Datum *key)
{
	Assert(!lock->held);
	set_tag(lock, cursor, key);
	lock->held = acquire(lock, false);
	return lock->held;
}

/*
 * Take the lock of a key.  Sleep while another session has it, but not past
 * "deadline".  Returns whether the lock was taken.
 */
bool
idem_key_lock_until(IdemKeyLock *lock, IdemCursor *cursor, const Datum *key,
					TimestampTz deadline)
{
	Assert(!lock->held);
	set_tag(lock, cursor, key);
	if (!idem_sleep_until(sleep_on_lock, lock, deadline))
		lock->held = false;
	return lock->held;
}

/*
 * Release the lock, if it is held.
 */
void
idem_key_unlock(IdemKeyLock *lock)
{
	ResourceOwner owner = CurrentResourceOwner;

	if (!lock->held)
		return;
	CurrentResourceOwner = CurTransactionResourceOwner;
	(void) LockRelease(&lock->tag, ExclusiveLock, false);
	CurrentResourceOwner = owner;
	lock->held = false;
}

/*
 * Take the lock for the subtransaction.  A lock that belongs to a query
 * within it would not be found by the caller of idem_sleep_until().
 */
static bool
acquire(IdemKeyLock *lock, bool wait)
{
	ResourceOwner owner = CurrentResourceOwner;
	LockAcquireResult result;

	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(&lock->tag, ExclusiveLock, false, !wait);
	if (result > LOCKACQUIRE_OK)
	{
		/* An outer call holds the lock, and must continue first. */
		(void) LockRelease(&lock->tag, ExclusiveLock, false);
	}
	CurrentResourceOwner = owner;
	return result == LOCKACQUIRE_OK;
}

static void
sleep_on_lock(void *arg)
{
	IdemKeyLock *lock = arg;

	lock->held = acquire(lock, true);
}

static void
set_tag(IdemKeyLock *lock, IdemCursor *cursor, const Datum *key)
{
	uint64		hash = hash_key(cursor->table, key);

	SET_LOCKTAG_ADVISORY(lock->tag, MyDatabaseId, (uint32) (hash >> 32),
						 (uint32) hash, KEY_LOCK_FIELD4);
}

/*
 * Return a hash of a table and a key that nobody can predict.  No two keys
 * have the same input, because each text is preceded by its length.
 */
static uint64
hash_key(IdemTable *table, const Datum *key)
{
	int			nkeys = IndexRelationGetNumberOfKeyAttributes(table->pkey);
	AttrNumber	first = idem_first_key_column(table);
	IdemSipState state;

	idem_sip_begin(&state);
	idem_sip_add(&state, RelationGetRelid(table->rel));
	for (int i = 0; i < nkeys; i++)
	{
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(table->rel),
											  first - 1 + i);

		if (att->atttypid == INT8OID)
			idem_sip_add(&state, (uint64) DatumGetInt64(key[i]));
		else
		{
			text	   *value = DatumGetTextPP(key[i]);

			idem_sip_add_bytes(&state, VARDATA_ANY(value),
							   VARSIZE_ANY_EXHDR(value));
		}
	}
	return idem_sip_end(&state);
}
