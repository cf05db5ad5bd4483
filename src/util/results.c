/*-------------------------------------------------------------------------
 *
 * results.c
 *		Rows that SQL functions return.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/typcache.h"

#include "util/compat.h"
#include "util/results.h"

static void check_row_type(TypeCacheEntry *entry, IdemResultType *type);

/*
 * Return the row that a function returns.  "type" is a static variable of the
 * function.  Raises 55000 if its row type was altered.
 */
Datum
idem_result(FunctionCallInfo fcinfo, IdemResultType *type,
			Datum *values, bool *nulls)
{
	TupleDesc	desc = idem_result_desc(fcinfo, type);

	return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
}

/*
 * Return the description of such a row, which is valid until the row type is
 * altered.
 */
TupleDesc
idem_result_desc(FunctionCallInfo fcinfo, IdemResultType *type)
{
	Oid			row_type = get_fn_expr_rettype(fcinfo->flinfo);
	TypeCacheEntry *entry;

	if (!OidIsValid(row_type))
		row_type = get_func_rettype(fcinfo->flinfo->fn_oid);
	entry = lookup_type_cache(row_type, TYPECACHE_TUPDESC);
	if (unlikely(entry->tupDesc_identifier != type->checked ||
				 entry->tupDesc == NULL))
		check_row_type(entry, type);
	return entry->tupDesc;
}

/*
 * Raise an error unless a row type has the columns that the function fills.
 */
static void
check_row_type(TypeCacheEntry *entry, IdemResultType *type)
{
	TupleDesc	desc = entry->tupDesc;
	bool		same = desc != NULL && desc->natts == type->ncolumns;

	for (int i = 0; same && i < desc->natts; i++)
		same = TupleDescAttr(desc, i)->atttypid == type->columns[i];
	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("type \"%s\" has been altered",
						format_type_be(entry->type_id)),
				 errhint("Restore its columns, or reinstall the extension.")));
	type->checked = entry->tupDesc_identifier;
}
