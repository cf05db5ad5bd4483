/*-------------------------------------------------------------------------
 *
 * function_scan.c
 *		A plan node for SELECT ... FROM one of our functions.
 *
 * The executor's own node for a function in FROM serves every kind of
 * function: it looks the result type up in the catalogs each time it starts,
 * and keeps the result in a tuple store.  For functions that return one row,
 * as ours do, and take a few microseconds, that is a large part of the time
 * of a call.  The node here calls the function, and passes itself as
 * resultinfo; idem_result() then hands the columns over without forming a row.
 *
 * It takes the place of the other where the function is all there is in FROM
 * of a SELECT without FOR UPDATE.  Elsewhere the executor may check the row
 * again, after a concurrent update of a row that it was joined to, and a
 * function that writes must not be called again for that.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_language_d.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type_d.h"
#include "executor/execExpr.h"
#include "executor/executor.h"
#include "nodes/extensible.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "optimizer/optimizer.h"
#include "optimizer/paths.h"
#include "optimizer/restrictinfo.h"
#include "optimizer/tlist.h"
#include "parser/parsetree.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/syscache.h"

#include "function_scan.h"

/* How the functions name their library; see the control file. */
#define LIBRARY		"idempotency"

/*
 * The scan, and the columns of the row that are needed; they live as long as
 * the query, or until the function is called again.
 */
typedef struct FunctionScanRun
{
	CustomScanState css;
	ExprState  *call;
	Datum	   *values;
	bool	   *nulls;
	bool		called;			/* since the arguments have changed? */
	bool		has_row;
	bool		returned;		/* has the row been returned? */
} FunctionScanRun;

static set_rel_pathlist_hook_type prev_set_rel_pathlist_hook = NULL;

static void consider_function(PlannerInfo *root, RelOptInfo *rel, Index rti,
							  RangeTblEntry *rte);
static bool is_only_source(Query *query, Index rti);
static bool is_ours(Oid function);
static Plan *plan_scan(PlannerInfo *root, RelOptInfo *rel, CustomPath *path,
					   List *tlist, List *clauses, List *custom_plans);
static Node *create_state(CustomScan *plan);
static void begin_scan(CustomScanState *node, EState *estate, int eflags);
static TupleTableSlot *exec_scan(CustomScanState *node);
static TupleTableSlot *next_row(ScanState *node);
static bool recheck_row(ScanState *node, TupleTableSlot *slot);
static void call_function(FunctionScanRun *run);
static void drop_row(FunctionScanRun *run);
static void end_scan(CustomScanState *node);
static void rescan(CustomScanState *node);

static const CustomPathMethods path_methods = {
	.CustomName = "Idempotency Function Scan",
	.PlanCustomPath = plan_scan,
};

static const CustomScanMethods scan_methods = {
	.CustomName = "Idempotency Function Scan",
	.CreateCustomScanState = create_state,
};

static const CustomExecMethods exec_methods = {
	.CustomName = "Idempotency Function Scan",
	.BeginCustomScan = begin_scan,
	.ExecCustomScan = exec_scan,
	.EndCustomScan = end_scan,
	.ReScanCustomScan = rescan,
};

/*
 * Make the node known to the planner; called by _PG_init().
 */
void
idem_register_function_scan(void)
{
	RegisterCustomScanMethods(&scan_methods);
	prev_set_rel_pathlist_hook = set_rel_pathlist_hook;
	set_rel_pathlist_hook = consider_function;
}

/*
 * Planner hook: replace the scan of one of our functions.
 */
static void
consider_function(PlannerInfo *root, RelOptInfo *rel, Index rti,
				  RangeTblEntry *rte)
{
	RangeTblFunction *item;
	Path	   *standard;
	CustomPath *path;

	if (prev_set_rel_pathlist_hook)
		prev_set_rel_pathlist_hook(root, rel, rti, rte);

	if (rte->rtekind != RTE_FUNCTION ||
		rte->funcordinality || list_length(rte->functions) != 1 ||
		!is_only_source(root->parse, rti) ||
		list_length(rel->pathlist) != 1)
		return;
	standard = linitial(rel->pathlist);
	item = linitial(rte->functions);

	/* A reference to the whole row would need a row of the right type. */
	if (standard->pathtype != T_FunctionScan ||
		!IsA(item->funcexpr, FuncExpr) ||
		!is_ours(((FuncExpr *) item->funcexpr)->funcid) ||
		!bms_is_empty(rel->attr_needed[0 - rel->min_attr]))
		return;

	path = makeNode(CustomPath);
	path->path.pathtype = T_CustomScan;
	path->path.parent = rel;
	path->path.pathtarget = rel->reltarget;
	path->path.param_info = standard->param_info;
	path->path.rows = standard->rows;
	path->path.startup_cost = standard->startup_cost;
	path->path.total_cost = standard->total_cost;
	path->flags = CUSTOMPATH_SUPPORT_PROJECTION;
	path->custom_private = list_make1(item->funcexpr);
	path->methods = &path_methods;
	rel->pathlist = list_make1(path);
}

/*
 * Is this relation all there is in FROM of a query that only reads?
 */
static bool
is_only_source(Query *query, Index rti)
{
	Node	   *source;

	if (query->commandType != CMD_SELECT || query->rowMarks != NIL ||
		list_length(query->jointree->fromlist) != 1)
		return false;
	source = linitial(query->jointree->fromlist);
	return IsA(source, RangeTblRef) &&
		((RangeTblRef *) source)->rtindex == rti;
}

/*
 * Is this a function of our library that returns one row of OUT columns?
 */
static bool
is_ours(Oid function)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc proc;
	bool		ours = false;

	if (!HeapTupleIsValid(tuple))
		return false;
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc->prolang == ClanguageId && !proc->proretset &&
		!proc->proisstrict && proc->prorettype == RECORDOID)
	{
		bool		isnull;
		Datum		library = SysCacheGetAttr(PROCOID, tuple,
											  Anum_pg_proc_probin, &isnull);

		ours = !isnull && strcmp(TextDatumGetCString(library), LIBRARY) == 0;
	}
	ReleaseSysCache(tuple);
	return ours;
}

/*
 * Path to plan.  The node's own tuples have the columns that are needed, as
 * references to the function's.
 */
static Plan *
plan_scan(PlannerInfo *root, RelOptInfo *rel, CustomPath *path,
		  List *tlist, List *clauses, List *custom_plans)
{
	CustomScan *plan = makeNode(CustomScan);
	List	   *quals = extract_actual_clauses(clauses, false);
	List	   *names = planner_rt_fetch(rel->relid, root)->eref->colnames;
	List	   *columns;
	ListCell   *cell;

	/* "tlist" may be replaced yet, by one that computes from these columns. */
	columns = list_concat_copy(path->path.pathtarget->exprs,
							   pull_var_clause((Node *) quals, 0));
	columns = add_to_flat_tlist(NIL, columns);
	foreach(cell, columns)
	{
		TargetEntry *column = lfirst_node(TargetEntry, cell);
		int			n = castNode(Var, column->expr)->varattno - 1;

		column->resname = strVal(list_nth(names, n));
	}

	plan->scan.plan.targetlist = tlist;
	plan->scan.plan.qual = quals;
	plan->flags = path->flags;
	plan->custom_exprs = path->custom_private;
	plan->custom_scan_tlist = columns;
	plan->methods = &scan_methods;
	return &plan->scan.plan;
}

static Node *
create_state(CustomScan *plan)
{
	FunctionScanRun *run = palloc0(sizeof(FunctionScanRun));

	NodeSetTag(run, T_CustomScanState);
	run->css.methods = &exec_methods;
	return (Node *) run;
}

static void
begin_scan(CustomScanState *node, EState *estate, int eflags)
{
	FunctionScanRun *run = (FunctionScanRun *) node;
	CustomScan *plan = (CustomScan *) node->ss.ps.plan;
	int			ncolumns = list_length(plan->custom_scan_tlist);
	ExprEvalStep *step;

	run->values = palloc(ncolumns * sizeof(Datum));
	run->nulls = palloc(ncolumns * sizeof(bool));
	run->call = ExecInitExpr(linitial(plan->custom_exprs), &node->ss.ps);

	/* After the arguments' steps come the call and the expression's end. */
	step = &run->call->steps[run->call->steps_len - 2];
	Assert(ExecEvalStepOp(run->call, step) == EEOP_FUNCEXPR ||
		   ExecEvalStepOp(run->call, step) == EEOP_FUNCEXPR_FUSAGE);
	step->d.func.fcinfo_data->resultinfo = (Node *) run;
}

static TupleTableSlot *
exec_scan(CustomScanState *node)
{
	return ExecScan(&node->ss, next_row, recheck_row);
}

/*
 * The function's row, or an empty slot if it has been returned.
 */
static TupleTableSlot *
next_row(ScanState *node)
{
	FunctionScanRun *run = (FunctionScanRun *) node;
	TupleTableSlot *slot = node->ss_ScanTupleSlot;

	ExecClearTuple(slot);
	if (run->returned)
		return slot;
	if (!run->called)
		call_function(run);
	if (run->has_row)
	{
		int			ncolumns = slot->tts_tupleDescriptor->natts;

		memcpy(slot->tts_values, run->values, ncolumns * sizeof(Datum));
		memcpy(slot->tts_isnull, run->nulls, ncolumns * sizeof(bool));
		ExecStoreVirtualTuple(slot);
	}
	else
		ExecStoreAllNullTuple(slot);
	run->returned = true;
	return slot;
}

/*
 * Would the row be returned again?  See the file's comment: nobody asks.
 */
static bool
recheck_row(ScanState *node, TupleTableSlot *slot)
{
	return true;
}

/*
 * Call the function, and keep its row until the next call.
 */
static void
call_function(FunctionScanRun *run)
{
	bool		isnull;

	drop_row(run);
	(void) ExecEvalExprSwitchContext(run->call, run->css.ss.ps.ps_ExprContext,
									 &isnull);
	if (!isnull && !run->has_row)
		elog(ERROR, "function returned no columns");
	run->called = true;
}

/*
 * Take the columns that a function of ours is about to return, if it was
 * called by this node.  Returns false if it was not.
 */
bool
idem_hand_over(FunctionCallInfo fcinfo, const Datum *values, const bool *nulls)
{
	FunctionScanRun *run = (FunctionScanRun *) fcinfo->resultinfo;
	CustomScan *plan;
	TupleDesc	desc;
	MemoryContext old;
	ListCell   *cell;

	if (run == NULL || !IsA(run, CustomScanState) ||
		run->css.methods != &exec_methods)
		return false;

	plan = (CustomScan *) run->css.ss.ps.plan;
	desc = run->css.ss.ss_ScanTupleSlot->tts_tupleDescriptor;
	old = MemoryContextSwitchTo(run->css.ss.ps.state->es_query_cxt);
	foreach(cell, plan->custom_scan_tlist)
	{
		TargetEntry *column = lfirst_node(TargetEntry, cell);
		int			from = castNode(Var, column->expr)->varattno - 1;
		int			to = foreach_current_index(cell);
		Form_pg_attribute att = TupleDescAttr(desc, to);

		run->nulls[to] = nulls[from];
		if (!nulls[from])
			run->values[to] = datumCopy(values[from],
										att->attbyval, att->attlen);
	}
	MemoryContextSwitchTo(old);
	run->has_row = true;
	return true;
}

/*
 * Free the row of the previous call.
 */
static void
drop_row(FunctionScanRun *run)
{
	TupleDesc	desc = run->css.ss.ss_ScanTupleSlot->tts_tupleDescriptor;

	for (int i = 0; run->has_row && i < desc->natts; i++)
	{
		if (!run->nulls[i] && !TupleDescAttr(desc, i)->attbyval)
			pfree(DatumGetPointer(run->values[i]));
	}
	run->has_row = false;
}

static void
end_scan(CustomScanState *node)
{
}

/*
 * Return the row again; call the function again only if its arguments may
 * have changed.
 */
static void
rescan(CustomScanState *node)
{
	FunctionScanRun *run = (FunctionScanRun *) node;

	if (node->ss.ps.chgParam != NULL)
		run->called = false;
	run->returned = false;
	ExecScanReScan(&node->ss);
}
