/*-------------------------------------------------------------------------
 *
 * indexes.h
 *		The indexes of a table that is being written.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_INDEXES_H
#define IDEMPOTENCY_INDEXES_H

#include "nodes/execnodes.h"
#include "store/relations.h"

/*
 * The indexes of a table, open for one call.  "arbiters" are the indexes
 * whose conflicts an insertion reports: the primary key, and those with the
 * same columns.  "unchanged" are the indexes in which a new version of a row
 * changes only the row's place.  "others" are the rest; NULL until needed.
 * An index with a "not_null" column is opened for the first row that has a
 * value in it.
 */
typedef struct IdemIndexes
{
	EState	   *estate;
	ResultRelInfo *all;
	ResultRelInfo *others;
	Relation	pkey;			/* the caller's */
	bool	   *unchanged;
	AttrNumber *not_null;		/* of an index that is opened on demand */
	List	   *oids;
	List	   *arbiters;
} IdemIndexes;

extern IdemIndexes *idem_indexes_open(IdemRelationId id, Relation table,
									  Relation pkey);
extern void idem_indexes_close(IdemIndexes *indexes);
extern void idem_indexes_append(IdemIndexes *indexes, TupleTableSlot *slot);
extern bool idem_indexes_insert(IdemIndexes *indexes, TupleTableSlot *slot);
extern void idem_indexes_update(IdemIndexes *indexes, TupleTableSlot *slot,
								bool only_summarizing);

#endif							/* IDEMPOTENCY_INDEXES_H */
