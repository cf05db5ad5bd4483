/*-------------------------------------------------------------------------
 *
 * indexes.c
 *		The indexes of a table that is being written.
 *
 * Preparing the predicate of a partial index takes longer than entering a
 * row, so the result is cached for the life of the backend.  It depends only
 * on the index's row in pg_index, of which only a few flags ever change.  A
 * call opens the index through the relation cache anyway, and sees there
 * whether the cached result is still valid.
 *
 * This works for B-trees with plain columns whose predicates consist of the
 * server's own functions and types.  Any other index that a user has added is
 * prepared in each call, as the executor does: a user's function can be
 * replaced, and not everybody is allowed to execute it.
 *
 * Each call opens and locks the indexes.  The exception are partial indexes
 * on "column IS NOT NULL", which stay closed until a row belongs into them.
 * A predicate never changes, and dropping an index changes its table's
 * relation cache entry.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/transam.h"
#include "catalog/index.h"
#include "catalog/pg_am_d.h"
#include "catalog/pg_index.h"
#include "executor/executor.h"
#include "nodes/nodeFuncs.h"
#include "nodes/readfuncs.h"
#include "optimizer/optimizer.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "store/indexes.h"
#include "util/compat.h"

/* Further partial indexes of a table are prepared in each call. */
#define MAX_KNOWN	8

/*
 * The cached preparation of a partial index.
 */
typedef struct KnownIndex
{
	Oid			oid;
	TransactionId xmin;			/* of its row in pg_index */
	uint64		relation_changes;	/* when it was last checked */
	AttrNumber	not_null;		/* rows without this column are not in it; 0:
								 * none */
	IndexInfo  *info;			/* NULL: to be prepared in each call */
	MemoryContext context;		/* of "info" */
} KnownIndex;

/* By position in the table's list of indexes. */
static KnownIndex known_indexes[IDEM_NUM_RELATIONS][MAX_KNOWN];

static const IndexInfo *known_info(KnownIndex *known, Relation index,
								   uint64 changes);
static void learn_index(KnownIndex *known, Relation index);
static void prepare_info(IdemIndexes *indexes, int i, const IndexInfo *known,
						 bool is_arbiter);
static void open_needed(IdemIndexes *indexes, TupleTableSlot *slot);
static AttrNumber not_null_column(const IndexInfo *info);
static IndexInfo *build_index_entry(Relation index);
static bool has_foreign_predicate(Relation index);
static bool uses_user_code(Node *node, void *context);
static bool is_foreign_function(Oid function, void *context);
static bool is_arbiter(Relation index, Relation pkey);
static void enter_unchanged(IdemIndexes *indexes, TupleTableSlot *slot);
static ResultRelInfo *without_unchanged(IdemIndexes *indexes);

/*
 * Open the indexes of a table that is open for writing, as is its primary
 * key.
 */
IdemIndexes *
idem_indexes_open(IdemRelationId id, Relation table, Relation pkey)
{
	IdemIndexes *result = palloc(sizeof(IdemIndexes));
	uint64		changes = idem_relation_changes;
	List	   *oids = RelationGetIndexList(table);
	int			nindexes = list_length(oids);
	ResultRelInfo *all = makeNode(ResultRelInfo);

	result->estate = CreateExecutorState();
	result->all = all;
	result->others = NULL;
	result->pkey = pkey;
	result->unchanged = palloc0_array(bool, nindexes);
	result->oids = oids;
	result->not_null = palloc0_array(AttrNumber, nindexes);
	result->arbiters = NIL;
	InitResultRelInfo(all, table, 0, NULL, 0);
	all->ri_NumIndices = nindexes;
	all->ri_IndexRelationDescs = palloc0_array(Relation, nindexes);
	all->ri_IndexRelationInfo = palloc_array(IndexInfo *, nindexes);
	for (int i = 0; i < nindexes; i++)
	{
		Oid			oid = list_nth_oid(oids, i);
		KnownIndex *known = i < MAX_KNOWN ? &known_indexes[id][i] : NULL;
		const IndexInfo *info = NULL;
		Relation	index;
		bool		arbiter;

		if (known != NULL && known->oid == oid && known->not_null != 0 &&
			known->relation_changes == changes)
		{
			/* open_needed() opens the index, and copies this. */
			result->not_null[i] = known->not_null;
			all->ri_IndexRelationInfo[i] = known->info;
			continue;
		}
		index = oid == RelationGetRelid(pkey) ?
			pkey : index_open(oid, RowExclusiveLock);
		all->ri_IndexRelationDescs[i] = index;
		if (known != NULL &&
			!heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL))
			info = known_info(known, index, changes);
		arbiter = is_arbiter(index, pkey);
		if (arbiter)
			result->arbiters = lappend_oid(result->arbiters, oid);
		prepare_info(result, i, info, arbiter);
		result->unchanged[i] = arbiter &&
			all->ri_IndexRelationInfo[i]->ii_Predicate == NIL;
	}
	return result;
}

/*
 * Set up the executor's information about an open index, for this call.
 */
static void
prepare_info(IdemIndexes *indexes, int i, const IndexInfo *known,
			 bool is_arbiter)
{
	ResultRelInfo *all = indexes->all;
	IndexInfo  *info;

	if (known == NULL)
		info = BuildIndexInfo(all->ri_IndexRelationDescs[i]);
	else
	{
		/*
		 * A copy for this call; only members that nobody writes to are
		 * shared.
		 */
		info = memcpy(palloc(sizeof(IndexInfo)), known, sizeof(IndexInfo));
		info->ii_Context = CurrentMemoryContext;
	}

	/* The executor would look for the UPDATE's columns in its plan. */
	info->ii_CheckedUnchanged = true;
	info->ii_IndexUnchanged = is_arbiter;
	all->ri_IndexRelationInfo[i] = info;
}

/*
 * Close the indexes, except the primary key, which belongs to the caller.
 */
void
idem_indexes_close(IdemIndexes *indexes)
{
	ResultRelInfo *all = indexes->all;

	for (int i = 0; i < all->ri_NumIndices; i++)
	{
		Relation	index = all->ri_IndexRelationDescs[i];

		if (index == NULL)
			continue;
		index_insert_cleanup(index, all->ri_IndexRelationInfo[i]);
		if (index != indexes->pkey)
			index_close(index, RowExclusiveLock);
	}
	FreeExecutorState(indexes->estate);
}

/*
 * Enter a new row.  Raises 23505 if a unique index has an equal one.
 */
void
idem_indexes_append(IdemIndexes *indexes, TupleTableSlot *slot)
{
	const uint32 flags = 0;

	open_needed(indexes, slot);
	(void) ExecInsertIndexTuples(indexes->all, indexes->estate, flags, slot,
								 NIL, NULL);
	ResetPerTupleExprContext(indexes->estate);
}

/*
 * Enter a new row that has been put into the table speculatively.  Returns
 * false if another row has its primary key; the row is then in some of the
 * indexes only.  Raises 23505 for an equal row in any other unique index.
 */
bool
idem_indexes_insert(IdemIndexes *indexes, TupleTableSlot *slot)
{
	bool		conflict = false;

	open_needed(indexes, slot);
	(void) ExecInsertIndexTuples(indexes->all, indexes->estate,
								 EIIT_NO_DUPE_ERROR, slot, indexes->arbiters,
								 &conflict);
	ResetPerTupleExprContext(indexes->estate);
	return !conflict;
}

/*
 * Enter a new version of a row with the same primary key into all indexes, or
 * into summarizing ones only.  Raises 23505 as above.
 */
void
idem_indexes_update(IdemIndexes *indexes, TupleTableSlot *slot,
					bool only_summarizing)
{
	if (!only_summarizing)
	{
		open_needed(indexes, slot);
		enter_unchanged(indexes, slot);
	}
	if (indexes->others == NULL)
		indexes->others = without_unchanged(indexes);
	(void) ExecInsertIndexTuples(indexes->others, indexes->estate,
								 only_summarizing ?
								 EIIT_IS_UPDATE | EIIT_ONLY_SUMMARIZING :
								 EIIT_IS_UPDATE,
								 slot, NIL, NULL);
	ResetPerTupleExprContext(indexes->estate);
}

/*
 * Open the indexes that idem_indexes_open() has left closed and that this row
 * belongs into.
 */
static void
open_needed(IdemIndexes *indexes, TupleTableSlot *slot)
{
	ResultRelInfo *all = indexes->all;

	for (int i = 0; i < all->ri_NumIndices; i++)
	{
		MemoryContext old;

		if (all->ri_IndexRelationDescs[i] != NULL ||
			slot_attisnull(slot, indexes->not_null[i]))
			continue;
		old = MemoryContextSwitchTo(indexes->estate->es_query_cxt);
		all->ri_IndexRelationDescs[i] =
			index_open(list_nth_oid(indexes->oids, i), RowExclusiveLock);
		prepare_info(indexes, i, all->ri_IndexRelationInfo[i], false);
		MemoryContextSwitchTo(old);
		if (indexes->others != NULL)
			indexes->others->ri_IndexRelationDescs[i] =
				all->ri_IndexRelationDescs[i];
	}
}

/*
 * Enter a new version of a row into the indexes on its primary key.
 *
 * The previous version was live and ours to replace, so there is no other row
 * with the same key.  A search for one would take longer with each version of
 * this row.
 */
static void
enter_unchanged(IdemIndexes *indexes, TupleTableSlot *slot)
{
	ResultRelInfo *all = indexes->all;

	for (int i = 0; i < all->ri_NumIndices; i++)
	{
		IndexInfo  *info = all->ri_IndexRelationInfo[i];
		Datum		values[INDEX_MAX_KEYS];
		bool		nulls[INDEX_MAX_KEYS];

		if (!indexes->unchanged[i] || !info->ii_ReadyForInserts)
			continue;
		FormIndexDatum(info, slot, indexes->estate, values, nulls);
		(void) index_insert(all->ri_IndexRelationDescs[i], values, nulls,
							&slot->tts_tid, all->ri_RelationDesc,
							UNIQUE_CHECK_NO, true, info);
	}
}

/*
 * The indexes that enter_unchanged() leaves to the executor.
 */
static ResultRelInfo *
without_unchanged(IdemIndexes *indexes)
{
	MemoryContext old = MemoryContextSwitchTo(indexes->estate->es_query_cxt);
	ResultRelInfo *all = indexes->all;
	ResultRelInfo *others = memcpy(palloc(sizeof(ResultRelInfo)), all,
								   sizeof(ResultRelInfo));

	others->ri_IndexRelationDescs = palloc_array(Relation,
												 all->ri_NumIndices);
	for (int i = 0; i < all->ri_NumIndices; i++)
		others->ri_IndexRelationDescs[i] = indexes->unchanged[i] ? NULL :
			all->ri_IndexRelationDescs[i];
	MemoryContextSwitchTo(old);
	return others;
}

/*
 * Return how rows are entered into an open partial index, or NULL.
 */
static const IndexInfo *
known_info(KnownIndex *known, Relation index, uint64 changes)
{
	if (known->oid != RelationGetRelid(index) ||
		known->xmin != HeapTupleHeaderGetRawXmin(index->rd_indextuple->t_data) ||
		(known->info != NULL &&
		 (known->info->ii_Unique != index->rd_index->indisunique ||
		  known->info->ii_ReadyForInserts != index->rd_index->indisready)))
		learn_index(known, index);
	known->relation_changes = changes;
	return known->info;
}

static void
learn_index(KnownIndex *known, Relation index)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency index",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext old = MemoryContextSwitchTo(context);
	IndexInfo  *info = build_index_entry(index);

	MemoryContextSwitchTo(old);

	/*
	 * An outer call might be using it, because an index can call our
	 * functions.
	 */
	if (known->context != NULL)
		MemoryContextSetParent(known->context, TopTransactionContext);
	MemoryContextSetParent(context, CacheMemoryContext);
	known->oid = RelationGetRelid(index);
	known->xmin = HeapTupleHeaderGetRawXmin(index->rd_indextuple->t_data);
	known->not_null = info != NULL && !info->ii_Unique ?
		not_null_column(info) : 0;
	known->info = info;
	known->context = context;
}

/*
 * Return the column that must not be NULL, if that is the whole predicate of
 * the index; otherwise 0.
 */
static AttrNumber
not_null_column(const IndexInfo *info)
{
	NullTest   *test;

	if (list_length(info->ii_Predicate) != 1 ||
		!IsA(linitial(info->ii_Predicate), NullTest))
		return 0;
	test = linitial_node(NullTest, info->ii_Predicate);
	if (test->nulltesttype != IS_NOT_NULL || !IsA(test->arg, Var))
		return 0;
	return ((Var *) test->arg)->varattno;
}

/*
 * Return how rows are entered into a partial index; NULL if that cannot be
 * cached.
 */
static IndexInfo *
build_index_entry(Relation index)
{
	IndexInfo  *info = BuildIndexInfo(index);
	Expr	   *qual;

	if (info->ii_Am != BTREE_AM_OID || info->ii_Expressions != NIL ||
		info->ii_ExclusionOps != NULL || has_foreign_predicate(index))
		return NULL;

	qual = expression_planner((Expr *) info->ii_Predicate);
	info->ii_PredicateState = ExecInitQual((List *) qual, NULL);
	return info;
}

/*
 * Does an index's predicate contain anything but columns, constants and the
 * server's own functions?  This looks at the predicate as it was written,
 * before functions are inlined.
 */
static bool
has_foreign_predicate(Relation index)
{
	Datum		predicate;
	bool		isnull;

	predicate = SysCacheGetAttr(INDEXRELID, index->rd_indextuple,
								Anum_pg_index_indpred, &isnull);
	return isnull ||
		uses_user_code(stringToNode(TextDatumGetCString(predicate)), NULL);
}

static bool
uses_user_code(Node *node, void *context)
{
	if (node == NULL)
		return false;

	switch (nodeTag(node))
	{
		case T_Var:
			return ((Var *) node)->varattno <= 0;
		case T_NullTest:
			if (((NullTest *) node)->argisrow)
				return true;
			break;
		case T_Const:
		case T_List:
		case T_OpExpr:
		case T_FuncExpr:
		case T_ScalarArrayOpExpr:
		case T_BoolExpr:
		case T_BooleanTest:
		case T_RelabelType:
			break;
		default:
			return true;
	}
	return check_functions_in_node(node, is_foreign_function, context) ||
		expression_tree_walker(node, uses_user_code, context);
}

static bool
is_foreign_function(Oid function, void *context)
{
	return function >= FirstUnpinnedObjectId;
}

/*
 * Does an index treat two rows as equal if and only if the primary key does?
 * It must have the same columns, in any order, and deterministic collations.
 */
static bool
is_arbiter(Relation index, Relation pkey)
{
	Bitmapset  *columns = NULL;
	Bitmapset  *pkey_columns = NULL;

	if (RelationGetRelid(index) == RelationGetRelid(pkey))
		return true;
	if (!index->rd_index->indisunique || !index->rd_index->indimmediate)
		return false;
	for (int i = 0; i < index->rd_index->indnkeyatts; i++)
	{
		if (OidIsValid(index->rd_indcollation[i]) &&
			!get_collation_isdeterministic(index->rd_indcollation[i]))
			return false;
		columns = bms_add_member(columns, index->rd_index->indkey.values[i]);
	}
	for (int i = 0; i < pkey->rd_index->indnkeyatts; i++)
		pkey_columns = bms_add_member(pkey_columns,
									  pkey->rd_index->indkey.values[i]);
	return bms_equal(columns, pkey_columns);
}
