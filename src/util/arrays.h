/*-------------------------------------------------------------------------
 *
 * arrays.h
 *		Arguments and results of the functions that process many elements.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ARRAYS_H
#define IDEMPOTENCY_ARRAYS_H

#include "fmgr.h"
#include "funcapi.h"
#include "util/results.h"
#include "utils/tuplesort.h"

/* Requirements of an array argument; see idem_array_arg(). */
#define IDEM_ARRAY_REQUIRED		0x01	/* neither it nor an element is NULL */
#define IDEM_ARRAY_NAMES		0x02	/* its texts pass idem_check_name() */

/*
 * An array argument.  If it is NULL, all its elements are.
 */
typedef struct IdemArray
{
	const char *name;
	int			length;
	Datum	   *values;
	bool	   *nulls;
} IdemArray;

/*
 * The current element of a function, for the context of errors.
 */
typedef struct IdemElement
{
	ErrorContextCallback callback;
	int			index;			/* counted from 0 */
} IdemElement;

/*
 * A visit to all elements; "element" is the current one.
 */
typedef struct IdemBatchIterator
{
	IdemElement element;
	int			count;
	int			visited;
	int		   *order;
	MemoryContext context;		/* freed after each element */
	MemoryContext caller;
} IdemBatchIterator;

/*
 * The result of a function that returns a row for each element.
 */
typedef struct IdemResultSet
{
	ReturnSetInfo *rsinfo;
	Tuplesortstate *rows;
	TupleTableSlot *slot;
} IdemResultSet;

extern void idem_array_arg(FunctionCallInfo fcinfo, int n, const char *name,
						   int flags, IdemArray *array);
extern int	idem_array_count(const IdemArray *arrays, int narrays);
extern int *idem_array_order(const IdemArray *keys, int nkeys, int count);
extern void idem_element_begin(IdemElement *element);
extern void idem_element_end(IdemElement *element);
extern void idem_batch_begin(IdemBatchIterator *batch, const IdemArray *keys,
							 int nkeys, int count);
extern bool idem_batch_next(IdemBatchIterator *batch);

extern void idem_result_set(FunctionCallInfo fcinfo, IdemResultType *type);
extern void idem_result_begin(IdemResultSet *result, FunctionCallInfo fcinfo,
							  IdemResultType *type);
extern void idem_result_add(IdemResultSet *result, const Datum *values,
							const bool *nulls);
extern void idem_result_end(IdemResultSet *result);

/*
 * Is element "i" NULL?
 */
static inline bool
idem_array_is_null(const IdemArray *array, int i)
{
	return array->values == NULL || array->nulls[array->length == 1 ? 0 : i];
}

/*
 * Return element "i"; if it is NULL, zero, which is a NULL pointer.
 */
static inline Datum
idem_array_value(const IdemArray *array, int i)
{
	if (idem_array_is_null(array, i))
		return (Datum) 0;
	return array->values[array->length == 1 ? 0 : i];
}

#endif							/* IDEMPOTENCY_ARRAYS_H */
