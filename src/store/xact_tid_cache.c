/*-------------------------------------------------------------------------
 *
 * xact_tid_cache.c
 *		Where this transaction has put the rows that it wrote last.
 *
 * A transaction that writes one row again and again leaves versions behind
 * that nothing can remove before it has ended.  A search by index passes them
 * all, so that the thousandth write would cost hundreds of times the first.
 * Therefore the place of the newest version is remembered, for as many rows
 * as the memory below has places; a row that hashes to the same place takes
 * it over.
 *
 * A row that was deleted is not remembered: who claims and releases one key
 * again and again in one transaction passes all that it has left behind.  To
 * know that the row is gone would save half of that only.  The index of the
 * primary key looks at all entries of a key before it takes another, and must
 * do so: the transaction may have put a row there by other means than ours.
 *
 * What is remembered is a hint about the row, which find.c fetches and
 * judges itself, but the place must lie within the table.  It does for as long
 * as the subtransaction that wrote there has not been rolled back, for until
 * then its lock on the table (see idem_relation_open()) holds everybody off
 * who could cut the table short or put another file in its place, but this
 * transaction itself; and of that the relation cache tells.
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

/* Enough for what a batch claims, and the next call completes; 32 kB. */
#define NUM_PLACES	1024

/*
 * The newest version of a row.  "heap_only" tells that no index entry points
 * to it, but to an older version on its page.
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

/* The transaction that has remembered something last. */
static LocalTransactionId writer = InvalidLocalTransactionId;

/*
 * May there be anything to recall?
 */
bool
idem_has_written(void)
{
	return writer == IdemLocalTransactionId();
}

/*
 * Remember that the current transaction has put a row's newest version there.
 * "hash" is one of its primary key.
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
 * Where is the newest version of a row, if the current transaction wrote it?
 *
 * Returns false if that is not known.  If it returns true, the place exists,
 * but the row there may have been written or deleted since by others means
 * than ours, or be another one.
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
