/*-------------------------------------------------------------------------
 *
 * noop.c
 *		Functions that do nothing but return the same record.
 *
 * They are the bound that the benchmark compares idem_try_advance() and
 * idem_claim() with: what is left is what the server and the connection need
 * for a call of any C function with these result columns.  No argument is
 * looked at, and the row type is looked up once in a session.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type_d.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

PG_MODULE_MAGIC;

static TupleDesc row_type(TupleDesc *cached, FunctionCallInfo fcinfo);

PG_FUNCTION_INFO_V1(noop_try_advance);
PG_FUNCTION_INFO_V1(noop_claim);

/*
 * The result of idem_try_advance() for a stale action.
 */
Datum
noop_try_advance(PG_FUNCTION_ARGS)
{
	static TupleDesc cached = NULL;
	TupleDesc	desc = row_type(&cached, fcinfo);
	Datum		values[2] = {BoolGetDatum(false), Int64GetDatum(INT64CONST(1000000000000))};
	bool		nulls[2] = {false, false};

	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, nulls)));
}

/*
 * The result of idem_claim() for a replay.
 */
Datum
noop_claim(PG_FUNCTION_ARGS)
{
	static TupleDesc cached = NULL;
	TupleDesc	desc = row_type(&cached, fcinfo);
	Datum		values[11] = {0};
	bool		nulls[11] = {
		false, true, true,		/* outcome, claim_token, attempt */
		false, false, false, true,	/* the response */
		true, true, true, false /* ..., expires_at */
	};

	values[0] = CStringGetTextDatum("replay");
	values[3] = Int32GetDatum(201);
	values[4] = CStringGetTextDatum("{\"Content-Type\": \"application/json\"}");
	values[5] = CStringGetTextDatum("{\"order\": 12345, \"status\": \"created\"}");
	values[10] = TimestampTzGetDatum(0);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, nulls)));
}

/*
 * The row type of the function that is being called, from "cached" if it has
 * been called before.
 */
static TupleDesc
row_type(TupleDesc *cached, FunctionCallInfo fcinfo)
{
	if (*cached == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
		TupleDesc	desc;

		if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
			elog(ERROR, "the function returns no row");
		*cached = BlessTupleDesc(desc);
		MemoryContextSwitchTo(old);
	}
	return *cached;
}
