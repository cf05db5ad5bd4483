/*-------------------------------------------------------------------------
 *
 * pinned_scope.c
 *		On a shard: is a scope pinned in this transaction?
 *
 * scale-out/shard.sql installs idem_pin_scope(), which locks the slot of a
 * scope until the transaction ends, so that no move takes the scope away.
 * ROLLBACK TO SAVEPOINT releases a lock that was taken after the savepoint.
 * So each function that writes checks the lock itself.
 *
 * The lock manager's local table has all locks of this session, and follows
 * subtransactions.  Nothing here takes a lock or reads shared memory.
 *
 * There are 256 slots, and the lock is that of a slot.  So a missing pin is
 * not noticed if another scope of the same slot is pinned.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/hashfn.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"

#include "util/compat.h"
#include "util/pinned_scope.h"
#include "util/settings.h"

/* Must be equal to those of scale-out/shard.sql: pass(), slot(). */
#define PIN_LOCK_CLASS	1229211981
#define NUM_SLOTS		256

/* The length of a scope in an error message, in bytes. */
#define SHOWN_LENGTH	40

/*
 * Raise 55000 if idempotency.require_pinned_scope is on, and this session
 * does not hold the lock of the slot of "scope", a detoasted text.
 */
void
idem_check_pin(Datum scope)
{
	text	   *name;
	uint64		hash;
	LOCKTAG		tag;

	if (likely(!idem_require_pinned_scope))
		return;

	name = (text *) DatumGetPointer(scope);
	hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(name),
							   VARSIZE_ANY_EXHDR(name), 0);
	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, PIN_LOCK_CLASS,
						 (uint32) (hash % NUM_SLOTS), 2);
	if (LockHeldByMe(&tag, ShareLock, false))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("scope \"%.*s\" is not pinned in this transaction",
					pg_mbcliplen(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name),
								 SHOWN_LENGTH),
					VARDATA_ANY(name)),
			 errdetail("This database is a shard, which a scope can leave between two transactions."),
			 errhint("Call idem_pin_scope(scope) first in the transaction, and again after ROLLBACK TO SAVEPOINT.")));
}
