/*-------------------------------------------------------------------------
 *
 * arrays.c
 *		Arguments and results of the functions that process many elements.
 *
 * Element "i" of each array makes up the arguments of one call.  All arrays
 * have the same length, except arrays of one element, which applies to all
 * calls.
 *
 * The result of such a function is that of as many calls in the order given.
 * It can visit elements of different keys in another order, the same in all
 * sessions (idem_array_order()), so that two calls that wait for each other's
 * rows do not deadlock.  An error message names the element by its number,
 * without its values.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_operator_d.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "nodes/supportnodes.h"
#include "optimizer/optimizer.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/selfuncs.h"
#include "utils/tuplestore.h"

#include "util/arguments.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/results.h"
#include "util/texts.h"

/* The keys that compare_elements() compares. */
typedef struct ElementKeys
{
	const IdemArray *keys[4];
	int			nkeys;
} ElementKeys;

static void check_elements(IdemArray *array, int flags);
static int	compare_elements(const void *a, const void *b, void *arg);
static void element_context(void *arg);

/*
 * Read argument "n", a one-dimensional array or NULL.  With
 * IDEM_ARRAY_REQUIRED neither the array nor an element can be NULL.  With
 * IDEM_ARRAY_NAMES its elements are texts of 1 to IDEM_MAX_NAME_LENGTH bytes.
 *
 * Raises 22004 and 22023.  "name" is its name in the message.
 */
void
idem_array_arg(FunctionCallInfo fcinfo, int n, const char *name, int flags,
			   IdemArray *array)
{
	ArrayType  *value;
	int16		typlen;
	bool		typbyval;
	char		typalign;

	array->name = name;
	array->length = 1;
	array->values = NULL;
	array->nulls = NULL;
	if (PG_ARGISNULL(n) && (flags & IDEM_ARRAY_REQUIRED) == 0)
		return;

	value = DatumGetArrayTypeP(idem_required_arg(fcinfo, n, name));
	if (ARR_NDIM(value) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be an array of one dimension",
						name)));
	get_typlenbyvalalign(ARR_ELEMTYPE(value), &typlen, &typbyval, &typalign);
	deconstruct_array(value, ARR_ELEMTYPE(value), typlen, typbyval, typalign,
					  &array->values, &array->nulls, &array->length);
	check_elements(array, flags);
}

/*
 * Check the elements as the flags of idem_array_arg() say.
 */
static void
check_elements(IdemArray *array, int flags)
{
	IdemElement element;

	idem_element_begin(&element);
	for (int i = 0; i < array->length; i++)
	{
		element.index = i;
		CHECK_FOR_INTERRUPTS();
		if (array->nulls[i])
		{
			if ((flags & IDEM_ARRAY_REQUIRED) != 0)
				ereport(ERROR,
						(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
						 errmsg("argument \"%s\" must not contain nulls",
								array->name)));
		}
		else if ((flags & IDEM_ARRAY_NAMES) != 0)
			array->values[i] = idem_check_name(array->values[i],
											   array->name);
	}
	idem_element_end(&element);
}

/*
 * Return the number of elements of a call's arrays, apart from arrays of one
 * element.  Raises 22023 if the arrays differ in length.
 */
int
idem_array_count(const IdemArray *arrays, int narrays)
{
	const IdemArray *longest = &arrays[0];

	for (int i = 1; i < narrays; i++)
	{
		if (arrays[i].length == 1 || arrays[i].length == longest->length)
			continue;
		if (longest->length != 1)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("arrays must have the same number of elements"),
					 errdetail("\"%s\" has %d, \"%s\" has %d.",
							   longest->name, longest->length,
							   arrays[i].name, arrays[i].length),
					 errhint("An array of one element applies to all elements.")));
		longest = &arrays[i];
	}
	return longest->length;
}

/*
 * Return the order in which to visit elements: that of the bytes of their
 * keys, which are one to four arrays of texts, and for equal keys the order
 * given.  It is also the order of a primary key in C collation, so neighbours
 * are close in the index.
 */
int *
idem_array_order(const IdemArray *keys, int nkeys, int count)
{
	int		   *order = palloc_array(int, count);
	ElementKeys sort_by = {.nkeys = 0};

	Assert(nkeys <= lengthof(sort_by.keys));
	for (int i = 0; i < nkeys; i++)
	{
		if (keys[i].length != 1)
			sort_by.keys[sort_by.nkeys++] = &keys[i];
	}
	for (int i = 0; i < count; i++)
		order[i] = i;
	qsort_interruptible(order, count, sizeof(int), compare_elements,
						&sort_by);
	return order;
}

static int
compare_elements(const void *a, const void *b, void *arg)
{
	const ElementKeys *sort_by = arg;
	int			ia = *(const int *) a;
	int			ib = *(const int *) b;

	for (int i = 0; i < sort_by->nkeys; i++)
	{
		const Datum *values = sort_by->keys[i]->values;
		int			order = idem_text_compare(values[ia], values[ib]);

		if (order != 0)
			return order;
	}
	return ia < ib ? -1 : 1;
}

/*
 * Begin an element: from now on, errors name element->index.
 */
void
idem_element_begin(IdemElement *element)
{
	element->index = 0;
	element->callback.callback = element_context;
	element->callback.arg = element;
	element->callback.previous = error_context_stack;
	error_context_stack = &element->callback;
}

/*
 * Pop the error context.
 */
void
idem_element_end(IdemElement *element)
{
	error_context_stack = element->callback.previous;
}

static void
element_context(void *arg)
{
	const IdemElement *element = arg;

	errcontext("element %d", element->index + 1);
}

/*
 * Begin to visit "count" elements in the order of idem_array_order().
 */
void
idem_batch_begin(IdemBatchIterator *batch, const IdemArray *keys, int nkeys,
				 int count)
{
	batch->count = count;
	batch->visited = 0;
	batch->order = idem_array_order(keys, nkeys, count);
	batch->context = AllocSetContextCreate(CurrentMemoryContext,
										   "idempotency element",
										   ALLOCSET_DEFAULT_SIZES);
	batch->caller = MemoryContextSwitchTo(batch->context);
	idem_element_begin(&batch->element);
}

/*
 * Go to the next element, number batch->element.index.  The next call, which
 * returns false after the last element, frees its memory.
 */
bool
idem_batch_next(IdemBatchIterator *batch)
{
	CHECK_FOR_INTERRUPTS();
	if (batch->visited == batch->count)
	{
		idem_element_end(&batch->element);
		MemoryContextSwitchTo(batch->caller);
		MemoryContextDelete(batch->context);
		pfree(batch->order);
		return false;
	}
	MemoryContextReset(batch->context);
	batch->element.index = batch->order[batch->visited++];
	return true;
}

/*
 * Begin the result of a function that returns a set of rows.  The caller adds
 * rows with tuplestore_putvalues().  "type" is a static variable of the
 * function.  Raises 55000 if its row type was altered.
 */
void
idem_result_set(FunctionCallInfo fcinfo, IdemResultType *type)
{
	InitMaterializedSRF(fcinfo, 0);
	(void) idem_result_desc(fcinfo, type);
}

/*
 * The same for rows that come in another order than that of their first
 * column, the ordinal, in which they are returned.  They use at most work_mem
 * of memory.
 */
void
idem_result_begin(IdemResultSet *result, FunctionCallInfo fcinfo,
				  IdemResultType *type)
{
	AttrNumber	column = 1;
	Oid			less_than = Int4LessOperator;
	Oid			collation = InvalidOid;
	bool		nulls_first = false;
	TupleDesc	desc;

	idem_result_set(fcinfo, type);
	result->rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	desc = result->rsinfo->setDesc;
	result->rows = tuplesort_begin_heap(desc, 1, &column, &less_than,
										&collation, &nulls_first, work_mem,
										NULL, TUPLESORT_NONE);
	result->slot = MakeSingleTupleTableSlot(desc, &TTSOpsMinimalTuple);
}

/*
 * Add a row.
 */
void
idem_result_add(IdemResultSet *result, const Datum *values, const bool *nulls)
{
	TupleTableSlot *slot = result->slot;
	int			ncolumns = slot->tts_tupleDescriptor->natts;

	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, ncolumns * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, ncolumns * sizeof(bool));
	ExecStoreVirtualTuple(slot);
	tuplesort_puttupleslot(result->rows, slot);
}

/*
 * End the result, after all rows have been added.
 */
void
idem_result_end(IdemResultSet *result)
{
	tuplesort_performsort(result->rows);
	while (tuplesort_gettupleslot(result->rows, true, false, result->slot,
								  NULL))
	{
		CHECK_FOR_INTERRUPTS();
		tuplestore_puttupleslot(result->rsinfo->setResult, result->slot);
	}
	ExecDropSingleTupleTableSlot(result->slot);
	tuplesort_end(result->rows);
}

/*
 * idem_many_support(internal) -> internal
 *
 * Planner support: a function returns as many rows as its longest array has
 * elements, so that a batch is joined efficiently.  If an array comes from
 * another table, the executor can call the function once for each row, or
 * keep its results with Memoize, which would repeat a "first time".  It uses
 * Memoize only if that costs less, which is not so for calls that return a
 * single row.
 */
PG_FUNCTION_INFO_V1(idem_many_support);
Datum
idem_many_support(PG_FUNCTION_ARGS)
{
	Node	   *node = (Node *) PG_GETARG_POINTER(0);
	SupportRequestRows *request;
	ListCell   *cell;

	if (!IsA(node, SupportRequestRows))
		PG_RETURN_POINTER(NULL);
	request = (SupportRequestRows *) node;
	if (!is_funcclause(request->node))
		PG_RETURN_POINTER(NULL);

	request->rows = 1;
	foreach(cell, ((FuncExpr *) request->node)->args)
	{
		Node	   *arg = lfirst(cell);
		double		length;

		if (!OidIsValid(get_element_type(exprType(arg))))
			continue;
		if (contain_var_clause(arg))
		{
			request->rows = 1;
			break;
		}
		arg = estimate_expression_value(request->root, arg);
		length = estimate_array_length(request->root, arg);
		request->rows = Max(request->rows, length);
	}
	PG_RETURN_POINTER(request);
}
