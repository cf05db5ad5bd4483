/*-------------------------------------------------------------------------
 *
 * action_batches.c
 *		Many user actions at once: advance counters, set states.
 *
 * Each element is processed as by its own call (actions.c), but tables,
 * indexes and scans are opened once.  Counters are visited in the order of
 * their primary key's bytes: user, entity type, entity.  A state is written
 * only under the row lock of its counter.  So two calls that wait for each
 * other's rows do not deadlock, and neither do such a call and single calls
 * that a transaction makes in this order.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"

#include "actions/actions.h"
#include "stats/stats.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/pinned_scope.h"
#include "util/results.h"

/* The types of the columns that the functions return. */
static IdemResultType advance_many_row = {
	.ncolumns = 3,
	.columns = {INT4OID, BOOLOID, INT8OID},
};

static IdemResultType set_many_row = {
	.ncolumns = 4,
	.columns = {INT4OID, BOOLOID, INT8OID, BOOLOID},
};

static void entity_arrays(FunctionCallInfo fcinfo, IdemArray *arrays);
static void action_ids_arg(FunctionCallInfo fcinfo, int n, IdemArray *array);
static void set_key(Datum *key, const IdemArray *arrays, int length, int i);
static void count_advances(int advances, int count);

/*
 * idem_try_advance_many(user_ids, entity_types, entity_ids, action_ids)
 *		-> setof row
 */
PG_FUNCTION_INFO_V1(idem_try_advance_many);
Datum
idem_try_advance_many(PG_FUNCTION_ARGS)
{
	enum
	{
		ACTION_IDS = KEY_ACTION_TYPE, NUM_ARRAYS
	};
	IdemArray	arrays[NUM_ARRAYS];
	IdemResultSet rows;
	IdemCursor	versions;
	IdemBatchIterator batch;
	int			count;
	int			advances = 0;

	entity_arrays(fcinfo, arrays);
	action_ids_arg(fcinfo, 3, &arrays[ACTION_IDS]);
	count = idem_array_count(arrays, NUM_ARRAYS);

	idem_result_begin(&rows, fcinfo, &advance_many_row);
	idem_cursor_open(&versions, IDEM_ACTION_VERSIONS, RowExclusiveLock);
	idem_batch_begin(&batch, arrays, KEY_ACTION_TYPE, count);
	while (idem_batch_next(&batch))
	{
		int			i = batch.element.index;
		Datum		key[KEY_ACTION_TYPE];
		int64		action_id;
		int64		last_action_id;
		bool		advanced;
		Datum		values[3];
		bool		nulls[3] = {0};

		set_key(key, arrays, lengthof(key), i);
		action_id = DatumGetInt64(idem_array_value(&arrays[ACTION_IDS], i));
		advanced = idem_advance(&versions, key, action_id, &last_action_id);
		if (advanced)
			advances++;
		else
			idem_log_stale_event(key, action_id, last_action_id);

		values[0] = Int32GetDatum(i + 1);
		values[1] = BoolGetDatum(advanced);
		values[2] = Int64GetDatum(last_action_id);
		idem_result_add(&rows, values, nulls);
		IDEM_INJECTION_POINT("idem-advance-element");
	}
	idem_cursor_close(&versions);
	count_advances(advances, count);
	idem_result_end(&rows);
	return (Datum) 0;
}

/*
 * idem_set_many(user_ids, entity_types, entity_ids, action_types, actives,
 *				 action_ids) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_set_many);
Datum
idem_set_many(PG_FUNCTION_ARGS)
{
	enum
	{
		ACTIVES = KEY_LENGTH, ACTION_IDS, NUM_ARRAYS
	};
	IdemArray	arrays[NUM_ARRAYS];
	IdemResultSet rows;
	IdemCursor	versions;
	IdemCursor	actions;
	IdemBatchIterator batch;
	int			count;
	int			advances = 0;

	entity_arrays(fcinfo, arrays);
	idem_array_arg(fcinfo, 3, "action_types",
				   IDEM_ARRAY_REQUIRED | IDEM_ARRAY_NAMES,
				   &arrays[KEY_ACTION_TYPE]);
	idem_array_arg(fcinfo, 4, "actives", IDEM_ARRAY_REQUIRED,
				   &arrays[ACTIVES]);
	action_ids_arg(fcinfo, 5, &arrays[ACTION_IDS]);
	count = idem_array_count(arrays, NUM_ARRAYS);

	idem_result_begin(&rows, fcinfo, &set_many_row);
	idem_cursor_open(&versions, IDEM_ACTION_VERSIONS, RowExclusiveLock);
	idem_cursor_open(&actions, IDEM_USER_ACTIONS, RowExclusiveLock);
	idem_batch_begin(&batch, arrays, KEY_ACTION_TYPE, count);
	while (idem_batch_next(&batch))
	{
		int			i = batch.element.index;
		Datum		key[KEY_LENGTH];
		bool		active;
		int64		action_id;
		IdemActionState state;
		Datum		values[4];
		bool		nulls[4] = {0};

		set_key(key, arrays, lengthof(key), i);
		active = DatumGetBool(idem_array_value(&arrays[ACTIVES], i));
		action_id = DatumGetInt64(idem_array_value(&arrays[ACTION_IDS], i));
		idem_act(&versions, &actions, key,
				 active ? IDEM_INTENT_ON : IDEM_INTENT_OFF, action_id,
				 NULL, 0, &state);
		if (state.processed)
			advances++;

		values[0] = Int32GetDatum(i + 1);
		values[1] = BoolGetDatum(state.is_active);
		values[2] = Int64GetDatum(state.last_action_id);
		values[3] = BoolGetDatum(state.processed);
		idem_result_add(&rows, values, nulls);
		IDEM_INJECTION_POINT("idem-set-element");
	}
	idem_cursor_close(&actions);
	idem_cursor_close(&versions);
	count_advances(advances, count);
	idem_result_end(&rows);
	return (Datum) 0;
}

/*
 * Read the first three arguments: users and entities.  Raises 22004, 22023,
 * and 55000 for a user who is not pinned.
 */
static void
entity_arrays(FunctionCallInfo fcinfo, IdemArray *arrays)
{
	static const char *const names[] = {
		[KEY_USER_ID] = "user_ids",
		[KEY_ENTITY_TYPE] = "entity_types",
		[KEY_ENTITY_ID] = "entity_ids",
	};

	for (int i = 0; i < lengthof(names); i++)
		idem_array_arg(fcinfo, i, names[i],
					   IDEM_ARRAY_REQUIRED | IDEM_ARRAY_NAMES, &arrays[i]);
	/* cppcheck-suppress uninitvar ; "names" is not empty */
	for (int i = 0; i < arrays[KEY_USER_ID].length; i++)
		idem_check_pin(idem_array_value(&arrays[KEY_USER_ID], i));
}

/*
 * Read argument "n", action ids.  Raises 22004, 22023, ID005.
 */
static void
action_ids_arg(FunctionCallInfo fcinfo, int n, IdemArray *array)
{
	IdemElement element;

	idem_array_arg(fcinfo, n, "action_ids", IDEM_ARRAY_REQUIRED, array);
	idem_element_begin(&element);
	for (int i = 0; i < array->length; i++)
	{
		CHECK_FOR_INTERRUPTS();
		element.index = i;
		idem_check_action_id(DatumGetInt64(idem_array_value(array, i)));
	}
	idem_element_end(&element);
}

/*
 * Set the first "length" columns of element "i"'s primary key.
 */
static void
set_key(Datum *key, const IdemArray *arrays, int length, int i)
{
	for (int k = 0; k < length; k++)
		key[k] = idem_array_value(&arrays[k], i);
}

/*
 * Count the results of "count" calls.
 */
static void
count_advances(int advances, int count)
{
	idem_count(IDEM_COUNT_ADVANCES, advances);
	idem_count(IDEM_COUNT_STALE_ADVANCES, count - advances);
}
