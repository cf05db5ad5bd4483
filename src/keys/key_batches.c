/*-------------------------------------------------------------------------
 *
 * key_batches.c
 *		Claiming or completing many request keys at once.
 *
 * Each key is claimed or completed as by its own call (keys.c,
 * claim_holder.c), but table, indexes and scans are opened once.  The lock of
 * a key is held while that key is visited, and never two of them.  Keys of
 * one scope are visited in the order of their bytes, so two calls that wait
 * for each other's rows do not deadlock.  Only completing waits for rows.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"

#include "keys/claim_holder.h"
#include "keys/keys.h"
#include "util/arguments.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/pinned_scope.h"
#include "util/results.h"
#include "util/times.h"

/* The types of the columns that the functions return. */
static IdemResultType claim_many_row = {
	.ncolumns = 2 + CLAIM_NUM_COLUMNS,
	.columns = {
		INT4OID, TEXTOID,
		TEXTOID, INT8OID, INT4OID, INT4OID, JSONOID, TEXTOID, BYTEAOID,
		TEXTOID, JSONOID, TIMESTAMPTZOID, TIMESTAMPTZOID
	},
};

static IdemResultType complete_many_row = {
	.ncolumns = 3,
	.columns = {INT4OID, TEXTOID, BOOLOID},
};

static void check_hashes(const IdemArray *hashes);

/*
 * idem_claim_many(scope, keys, request_hashes, ttl, lease) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_claim_many);
Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	enum
	{
		KEYS, HASHES, NUM_ARRAYS
	};
	IdemArray	arrays[NUM_ARRAYS];
	IdemClaimRequest request = {.wait = NULL};
	IdemResultSet rows;
	IdemCursor	cursor;
	IdemBatchIterator batch;
	int			count;

	request.key[0] = idem_name_arg(fcinfo, 0, "scope");
	idem_check_pin(request.key[0]);
	idem_array_arg(fcinfo, 1, "keys", IDEM_ARRAY_REQUIRED, &arrays[KEYS]);
	idem_array_arg(fcinfo, 2, "request_hashes", 0, &arrays[HASHES]);
	check_hashes(&arrays[HASHES]);
	request.ttl = idem_interval_arg(fcinfo, 3, "ttl");
	request.lease = idem_interval_arg(fcinfo, 4, "lease");
	count = idem_array_count(arrays, NUM_ARRAYS);

	idem_result_begin(&rows, fcinfo, &claim_many_row);
	idem_cursor_open(&cursor, IDEM_KEYS, RowExclusiveLock);
	idem_batch_begin(&batch, &arrays[KEYS], 1, count);
	while (idem_batch_next(&batch))
	{
		int			i = batch.element.index;
		IdemClaimResult result;
		Datum		values[2 + CLAIM_NUM_COLUMNS];
		bool		nulls[2 + CLAIM_NUM_COLUMNS] = {0};

		request.key[1] = idem_array_value(&arrays[KEYS], i);
		request.request_hash = idem_array_value(&arrays[HASHES], i);
		idem_check_hash_given(request.request_hash, arrays[HASHES].name);
		idem_claim_in(&cursor, &request, &result);

		values[0] = Int32GetDatum(i + 1);
		values[1] = request.key[1];
		memcpy(&values[2], result.values, sizeof(result.values));
		memcpy(&nulls[2], result.nulls, sizeof(result.nulls));
		idem_result_add(&rows, values, nulls);
		IDEM_INJECTION_POINT("idem-claim-element");
	}
	idem_cursor_close(&cursor);
	idem_result_end(&rows);
	return (Datum) 0;
}

/*
 * Raise 22023 unless all elements are request hashes.
 */
static void
check_hashes(const IdemArray *hashes)
{
	IdemElement element;

	idem_element_begin(&element);
	for (int i = 0; i < hashes->length; i++)
	{
		CHECK_FOR_INTERRUPTS();
		element.index = i;
		if (!idem_array_is_null(hashes, i))
			idem_check_hash(idem_array_value(hashes, i), hashes->name);
	}
	idem_element_end(&element);
}

/*
 * idem_complete_many(scope, keys, response_statuses, response_bodies,
 *					  response_headers, claim_tokens) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_complete_many);
Datum
idem_complete_many(PG_FUNCTION_ARGS)
{
	enum
	{
		KEYS, STATUSES, BODIES, HEADERS, TOKENS, NUM_ARRAYS
	};
	IdemArray	arrays[NUM_ARRAYS];
	Datum		key[2];
	IdemResultSet rows;
	IdemCursor	cursor;
	IdemBatchIterator batch;
	int			count;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	idem_check_pin(key[0]);
	idem_array_arg(fcinfo, 1, "keys", IDEM_ARRAY_REQUIRED, &arrays[KEYS]);
	idem_array_arg(fcinfo, 2, "response_statuses", IDEM_ARRAY_REQUIRED,
				   &arrays[STATUSES]);
	idem_array_arg(fcinfo, 3, "response_bodies", 0, &arrays[BODIES]);
	idem_array_arg(fcinfo, 4, "response_headers", 0, &arrays[HEADERS]);
	idem_array_arg(fcinfo, 5, "claim_tokens", 0, &arrays[TOKENS]);
	count = idem_array_count(arrays, NUM_ARRAYS);

	idem_result_begin(&rows, fcinfo, &complete_many_row);
	idem_cursor_open(&cursor, IDEM_KEYS, RowExclusiveLock);
	idem_batch_begin(&batch, &arrays[KEYS], 1, count);
	while (idem_batch_next(&batch))
	{
		int			i = batch.element.index;
		IdemResponse response = {0};
		Datum		status = idem_array_value(&arrays[STATUSES], i);
		bool		given = !idem_array_is_null(&arrays[TOKENS], i);
		int64		token;
		Datum		values[3];
		bool		nulls[3] = {0};

		key[1] = idem_array_value(&arrays[KEYS], i);
		response.status = DatumGetInt32(status);
		response.body = idem_array_value(&arrays[BODIES], i);
		response.headers = idem_array_value(&arrays[HEADERS], i);
		token = DatumGetInt64(idem_array_value(&arrays[TOKENS], i));

		values[0] = Int32GetDatum(i + 1);
		values[1] = key[1];
		values[2] = BoolGetDatum(idem_complete_in(&cursor, key, &response,
												  given ? &token : NULL));
		idem_result_add(&rows, values, nulls);
		IDEM_INJECTION_POINT("idem-complete-element");
	}
	idem_cursor_close(&cursor);
	idem_result_end(&rows);
	return (Datum) 0;
}
