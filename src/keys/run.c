/*-------------------------------------------------------------------------
 *
 * run.c
 *		idem_run(): claim, call a handler, complete, in one statement.
 *
 * The handler is called with the caller's rights.  EXECUTE, and USAGE of its
 * schema, are checked for the current user, whom this file never changes.
 * Modules that watch access to objects are called, and track_functions counts
 * the call.  No table is open meanwhile, so the handler can do whatever SQL
 * can do, even to the key itself.  Completing the key afterwards checks that
 * the claim is still valid.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "hash/request_hash.h"
#include "keys/claim_holder.h"
#include "keys/key_record.h"
#include "keys/keys.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/results.h"
#include "util/times.h"

/* The columns of idem_run()'s result, in order. */
enum
{
	RUN_OUTCOME,
	RUN_RESPONSE_STATUS,
	RUN_RESPONSE_HEADERS,
	RUN_RESPONSE_BODY,
	RUN_NUM_COLUMNS,
};

/* The columns of type idem_response, in order. */
enum
{
	RESPONSE_STATUS,
	RESPONSE_HEADERS,
	RESPONSE_BODY,
	RESPONSE_NUM_COLUMNS,
};

/* The types of the columns that idem_run() returns. */
static IdemResultType run_row = {
	.ncolumns = RUN_NUM_COLUMNS,
	.columns = {TEXTOID, INT4OID, JSONOID, TEXTOID},
};

/* The default of "wait": one minute. */
static Interval default_wait = {.time = USECS_PER_MINUTE};

static Oid	check_handler(Oid handler);
static char *handler_name(Oid handler);
static void call_handler(Oid handler, Oid result_type, Datum request,
						 IdemResponse *response);
static void read_response(HeapTupleHeader row, IdemResponse *response);

/*
 * idem_run(scope, key, handler, request, ttl, wait)
 *		-> outcome, response_status, response_headers, response_body
 */
PG_FUNCTION_INFO_V1(idem_run);
Datum
idem_run(PG_FUNCTION_ARGS)
{
	IdemClaimRequest claim = {0};
	IdemClaimResult claimed;
	Oid			handler;
	Oid			result_type;
	Datum		request;
	Datum		values[RUN_NUM_COLUMNS];
	bool		nulls[RUN_NUM_COLUMNS];

	idem_writer_key_args(fcinfo, claim.key);
	handler = DatumGetObjectId(idem_required_arg(fcinfo, 2, "handler"));
	request = idem_required_arg(fcinfo, 3, "request");
	claim.ttl = idem_interval_arg(fcinfo, 4, "ttl");
	claim.wait = PG_ARGISNULL(5) ? &default_wait :
		idem_interval_arg(fcinfo, 5, "wait");
	result_type = check_handler(handler);
	claim.request_hash =
		PointerGetDatum(idem_hash_json_request("RUN", handler_name(handler),
											   DatumGetJsonbP(request)));

	idem_claim_key(&claim, &claimed);

	values[RUN_OUTCOME] = claimed.values[CLAIM_OUTCOME];
	nulls[RUN_OUTCOME] = false;
	if (claimed.outcome == IDEM_CLAIM_NEW)
	{
		IdemResponse response = {0};
		int64		token = DatumGetInt64(claimed.values[CLAIM_TOKEN]);

		IDEM_INJECTION_POINT("idem-run-claimed");
		call_handler(handler, result_type, request, &response);
		IDEM_INJECTION_POINT("idem-run-handled");
		if (!idem_complete_claim(claim.key, &response, &token))
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("handler %s has completed its own key",
							format_procedure(handler)),
					 errhint("Let it return the response; idem_run() stores it.")));

		values[RUN_RESPONSE_STATUS] = Int32GetDatum(response.status);
		nulls[RUN_RESPONSE_STATUS] = false;
		values[RUN_RESPONSE_HEADERS] = response.headers;
		nulls[RUN_RESPONSE_HEADERS] = response.headers == (Datum) 0;
		values[RUN_RESPONSE_BODY] = response.body;
		nulls[RUN_RESPONSE_BODY] = response.body == (Datum) 0;
	}
	else
	{
		values[RUN_RESPONSE_STATUS] = claimed.values[CLAIM_RESPONSE_STATUS];
		nulls[RUN_RESPONSE_STATUS] = claimed.nulls[CLAIM_RESPONSE_STATUS];
		values[RUN_RESPONSE_HEADERS] = claimed.values[CLAIM_RESPONSE_HEADERS];
		nulls[RUN_RESPONSE_HEADERS] = claimed.nulls[CLAIM_RESPONSE_HEADERS];
		values[RUN_RESPONSE_BODY] = claimed.values[CLAIM_RESPONSE_BODY];
		nulls[RUN_RESPONSE_BODY] = claimed.nulls[CLAIM_RESPONSE_BODY];
	}
	PG_RETURN_DATUM(idem_result(fcinfo, &run_row, values, nulls));
}

/*
 * Raise an error unless "handler" can be called with a jsonb and returns
 * jsonb or a row like idem_response.  Returns its result type.
 *
 * Raises 42883 if there is no such function, 42501 if the caller is not
 * allowed to execute it, 42804 if it has another signature, and the errors of
 * modules that watch access to objects.
 */
static Oid
check_handler(Oid handler)
{
	HeapTuple	tuple;
	Form_pg_proc proc;
	Oid			schema;
	Oid			result_type;
	bool		fits;

	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", handler)));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	schema = proc->pronamespace;
	result_type = proc->prorettype;
	fits = proc->prokind == PROKIND_FUNCTION && !proc->proretset &&
		proc->pronargs == 1 && proc->proargtypes.values[0] == JSONBOID &&
		(result_type == JSONBOID ||
		 get_typtype(result_type) == TYPTYPE_COMPOSITE);
	ReleaseSysCache(tuple);

	/*
	 * A function that is given by OID has not passed the check of its schema.
	 */
	if (object_aclcheck(NamespaceRelationId, schema, GetUserId(),
						ACL_USAGE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_SCHEMA,
					   get_namespace_name(schema));
	if (object_aclcheck(ProcedureRelationId, handler, GetUserId(),
						ACL_EXECUTE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION,
					   get_func_name(handler));
	InvokeFunctionExecuteHook(handler);
	if (!fits)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("function %s cannot be a handler",
						format_procedure(handler)),
				 errhint("Declare it with one argument of type jsonb, to return idem_response or jsonb.")));
	return result_type;
}

/*
 * Return the handler's name, with its schema.
 */
static char *
handler_name(Oid handler)
{
	Oid			schema = get_func_namespace(handler);

	return quote_qualified_identifier(get_namespace_name(schema),
									  get_func_name(handler));
}

/*
 * Call the handler.  A NULL result is an error, because it could not be
 * replayed.  The handler's errors are passed on.
 */
static void
call_handler(Oid handler, Oid result_type, Datum request,
			 IdemResponse *response)
{
	FmgrInfo	flinfo;

	/* cppcheck-suppress unusedStructMember ; one half of a union, to align */
	LOCAL_FCINFO(call, 1);
	PgStat_FunctionCallUsage usage;
	Datum		result;

	fmgr_info(handler, &flinfo);
	InitFunctionCallInfoData(*call, &flinfo, 1, InvalidOid, NULL, NULL);
	call->args[0].value = request;
	call->args[0].isnull = false;
	pgstat_init_function_usage(call, &usage);
	result = FunctionCallInvoke(call);
	pgstat_end_function_usage(&usage, true);
	if (call->isnull)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler %s returned null", format_procedure(handler)),
				 errhint("Let it return a response, or raise an error to undo the request.")));

	if (result_type == JSONBOID)
	{
		Datum		printed = DirectFunctionCall1(jsonb_out, result);

		response->status = 200;
		response->body = CStringGetTextDatum(DatumGetCString(printed));
	}
	else
		read_response(DatumGetHeapTupleHeader(result), response);
}

/*
 * Read a row of type idem_response, or of one with the same columns.
 */
static void
read_response(HeapTupleHeader row, IdemResponse *response)
{
	static const Oid types[RESPONSE_NUM_COLUMNS] = {INT4OID, JSONOID, TEXTOID};
	TupleDesc	desc;
	HeapTupleData tuple;
	Datum		values[RESPONSE_NUM_COLUMNS];
	bool		nulls[RESPONSE_NUM_COLUMNS];

	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(row),
								  HeapTupleHeaderGetTypMod(row));
	for (int i = 0; i < RESPONSE_NUM_COLUMNS; i++)
	{
		if (desc->natts != RESPONSE_NUM_COLUMNS ||
			TupleDescAttr(desc, i)->atttypid != types[i])
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("handler returned a row of the wrong type"),
					 errhint("Declare it to return idem_response.")));
	}

	tuple.t_len = HeapTupleHeaderGetDatumLength(row);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = row;
	heap_deform_tuple(&tuple, desc, values, nulls);
	ReleaseTupleDesc(desc);

	if (nulls[RESPONSE_STATUS])
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("handler returned a response without a status")));
	response->status = DatumGetInt32(values[RESPONSE_STATUS]);
	if (!nulls[RESPONSE_HEADERS])
		response->headers = values[RESPONSE_HEADERS];
	if (!nulls[RESPONSE_BODY])
		response->body = values[RESPONSE_BODY];
}
