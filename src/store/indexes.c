/*-------------------------------------------------------------------------
 *
 * indexes.c
 *		The indexes of a table that is being written.
 *
 * The predicate of a partial index, ready to be evaluated, takes longer to put
 * together than a row to enter, so what a write needs to know of such an index
 * is remembered for the life of the backend.  It depends on nothing but the
 * index's row in pg_index, of which only a few flags ever change.  So the
 * relation cache, from which a call opens the index anyway, tells whether what
 * is remembered of it still holds.
 *
 * That can be said of B-trees whose columns are plain ones and whose
 * predicates consist of the server's own functions and types.  Whatever else
 * somebody has added is looked at anew in each call, as the executor does: a
 * function of his may be replaced, and not everybody may execute it.
 *
 * The indexes themselves are opened and locked in each call, but for partial
 * ones on "column IS NOT NULL": such an index is left alone until a row comes
 * that belongs into it.  A predicate never changes, and whoever drops an index
 * changes its table's relation cache entry.
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

/* Partial indexes of a table beyond these are looked at in each call. */
#define MAX_KNOWN	8

/*
 * What is remembered of a partial index.
 */
typedef struct KnownIndex
{
	Oid			oid;
	TransactionId xmin;			/* of its row in pg_index */
	uint64		relation_changes;	/* when it was last looked at */
	AttrNumber	not_null;		/* only rows with this column are in it; 0:
								 * all */
	IndexInfo  *info;			/* NULL: to be looked at in each call */
	MemoryContext context;		/* of that */
} KnownIndex;

/* By their place in the table's list of indexes. */
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
			/* open_needed() opens it, and copies this. */
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
 * What the executor is to know of an open index, in this call.
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
		/* This call's own, but for what nobody writes to. */
		info = memcpy(palloc(sizeof(IndexInfo)), known, sizeof(IndexInfo));
		info->ii_Context = CurrentMemoryContext;
	}

	/* The executor would look for the columns of an UPDATE in its plan. */
	info->ii_CheckedUnchanged = true;
	info->ii_IndexUnchanged = is_arbiter;
	all->ri_IndexRelationInfo[i] = info;
}

/*
 * Close them, but for the primary key, which belongs to the caller.
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
 * false if another row has its primary key; then it is in some of the indexes
 * only.  Raises 23505 for an equal row in any other unique index.
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
 * Enter a new version of a row, whose primary key is the same: into all
 * indexes, or into summarizing ones only.  Raises 23505 as above.
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
 * Open those indexes that idem_indexes_open() has left alone and that this row
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
 * The version before it was live, and ours to replace, so there is no other
 * row of the same key.  To look for one would take the longer the more
 * versions this one has.
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
 * How rows are entered into a partial index that is open, or NULL.
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

	/* A call further up may be using it: an index may call our functions. */
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
 * The column without which a row is not in an index, if that is all that its
 * predicate says; otherwise 0.
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
 * How rows are entered into a partial index; NULL if that cannot be remembered.
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
 * Is there anything in an index's predicate but columns, constants and the
 * server's own functions?  It is looked at as it was written, before functions
 * are replaced by what they consist of.
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
 * Does an index know two rows as equal if and only if the primary key does?
 * It has the same columns, in whatever order, and no collation that takes
 * different texts for equal.
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
