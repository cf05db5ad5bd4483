/*-------------------------------------------------------------------------
 *
 * key_lock.c
 *		One session at a time at a key, for as long as a call takes.
 *
 * A row can be locked only where there is one.  A call that must be alone at a
 * primary key, whether or not it has a row, takes the key's lock.  It keeps it
 * for a few steps of its own only, not to the end of the transaction: what it
 * has written by then speaks for it.
 *
 * The lock is an exclusive one in the server's lock manager, so nothing is
 * shared but what every server has, no number of databases or keys is too
 * large but for max_locks_per_transaction, and who waits does so as in
 * util/timed_lock.c.  Its tag is that of an advisory lock, with a number in its last
 * field (objsubid in pg_locks) that no SQL function can give to one.  The key
 * is in it as a hash of 64 bits.  A secret of the server goes into that, so
 * that nobody can choose two keys with the same one; two keys that have it by
 * chance exclude each other, which is all.
 *
 * idem_key_lock() never waits.  Who does not get the lock knows that another
 * session is at this key at this moment, and answers so, or waits with
 * idem_key_lock_until().  That leaves it with the lock: if it had to let go to
 * look again, two such sessions could take turns in finding the lock taken.
 *
 * The lock belongs to the current subtransaction: an error releases it along
 * with what was written under it.  It must be released in the one that it was
 * taken in.  Under it a call may wait for others as a last resort (a unique
 * index of the user's own, an ALTER SEQUENCE), never for its own key; the
 * deadlock detector knows of it.
 *
 * A call within the call, by a function in an index of the user's, does not
 * get a lock that its session has.
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
 * key is as for idem_find().  Returns whether the caller has it now.
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
 * Take the lock of a key; sleep as long as another session has it, but not
 * past "deadline".  Returns whether the caller has it now.
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
 * Let go of the lock, if it is held.
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
 * Take the lock, on behalf of the subtransaction: not of a query in it, whose
 * locks would not be found again by idem_sleep_until()'s caller.
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
		/* A call that this one is part of has it, and must go on first. */
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
 * A hash of a table and a key that nobody can foretell, and no two of which
 * have the same input: each text is preceded by its length.
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
