/*-------------------------------------------------------------------------
 *
 * results.h
 *		Rows that SQL functions return.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RESULTS_H
#define IDEMPOTENCY_RESULTS_H

#include "fmgr.h"
#include "funcapi.h"

/* The maximum number of columns that a function returns. */
#define IDEM_MAX_RESULT_COLUMNS	14

/*
 * The row that a function returns: the types of its columns, and the last
 * version of its row type that was checked.
 */
typedef struct IdemResultType
{
	int			ncolumns;
	Oid			columns[IDEM_MAX_RESULT_COLUMNS];
	uint64		checked;
} IdemResultType;

extern Datum idem_result(FunctionCallInfo fcinfo, IdemResultType *type,
						 Datum *values, bool *nulls);
extern TupleDesc idem_result_desc(FunctionCallInfo fcinfo,
								  IdemResultType *type);

#endif							/* IDEMPOTENCY_RESULTS_H */
