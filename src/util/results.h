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

/* A function returns at most this many columns. */
#define IDEM_MAX_RESULT_COLUMNS	14

/*
 * The row that a function returns: its columns' types, and the last form of
 * its row type that was seen to have them.
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
