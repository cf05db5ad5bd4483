/*-------------------------------------------------------------------------
 *
 * xact_tid_cache.c
 *		The places of the rows that this transaction wrote last.
 *
 * A transaction that writes one row again and again leaves versions behind
 * that cannot be removed before it ends.  A search by index scans them all,
 * so the thousandth write would cost hundreds of times the first.  Therefore
 * this file remembers the place of the newest version, for a fixed number of
 * rows.  A row that hashes to the same entry takes it over.
 *
 * A deleted row is not remembered.  A transaction that claims and releases
 * one key again and again therefore scans all versions that it has left.
 * Remembering that the row is gone would save only half of that: an insertion
 * into the primary key's index reads all entries of the key anyway, and must
 * do so, because the transaction might have inserted a row there by other
 * means.
 *
 * The remembered place is a hint.  find.c fetches and checks the row, but the
 * place must exist in the table.  It does until the subtransaction that wrote
 * it is rolled back: until then its lock on the table (see
 * idem_relation_open()) keeps all others from truncating the table or
 * replacing its file.  If this transaction itself does so, the relation cache
 * reports it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "storage/proc.h"
#include "utils/rel.h"

#include "store/relations.h"
#include "store/xact_tid_cache.h"
#include "util/compat.h"

/* Enough for a batch of claims that the next call completes; 32 kB. */
#define NUM_PLACES	1024

/*
 * The newest version of a row.  If "heap_only", no index entry points to it,
 * only to an older version on its page.
 */
typedef struct OwnWrite
{
	TransactionId xid;			/* of the subtransaction, or 0 */
	uint64		relation_changes;
	Oid			relid;
	uint32		hash;
	ItemPointerData tid;
	bool		heap_only;
} OwnWrite;

static OwnWrite places[NUM_PLACES];

/* The transaction that has last remembered something. */
static LocalTransactionId writer = InvalidLocalTransactionId;

/*
 * Can there be anything to recall?
 */
bool
idem_has_written(void)
{
	return writer == IdemLocalTransactionId();
}

/*
 * Remember that the current transaction has put a row's newest version there.
 * "hash" is a hash of the row's primary key.
 */
void
idem_remember_write(Relation table, uint32 hash,
					const ItemPointerData *tid, bool heap_only)
{
	OwnWrite   *place = &places[hash % NUM_PLACES];

	writer = IdemLocalTransactionId();
	place->xid = GetCurrentTransactionId();
	place->relation_changes = idem_relation_changes;
	place->relid = RelationGetRelid(table);
	place->hash = hash;
	place->tid = *tid;
	place->heap_only = heap_only;
}

/*
 * Return the place of a row's newest version, if the current transaction
 * wrote it.
 *
 * Returns false if it is not known.  If it returns true, the place exists,
 * but the row there might have been written or deleted since by other means,
 * or might be another row.
 */
bool
idem_recall_write(Relation table, uint32 hash, ItemPointer tid,
				  bool *heap_only)
{
	OwnWrite   *place = &places[hash % NUM_PLACES];

	if (place->hash != hash ||
		place->relid != RelationGetRelid(table) ||
		place->relation_changes != idem_relation_changes ||
		!TransactionIdIsCurrentTransactionId(place->xid))
		return false;
	*tid = place->tid;
	*heap_only = place->heap_only;
	return true;
}
