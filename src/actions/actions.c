/*-------------------------------------------------------------------------
 *
 * actions.c
 *		Versioned user actions: only the latest intent counts.
 *
 * A row of idem_action_versions is the version counter of one (user, entity
 * type, entity id).  A call whose action id is not above the counter is stale
 * and changes nothing.  The rows of idem_user_actions hold, for each action
 * type, whether it is active.  Only the transaction that has just advanced
 * the counter writes them, so the counter's row lock serializes them.
 *
 * The counter only grows.  A committed value at or above the action id is
 * therefore final, whatever other transactions are going to do to the row,
 * and a stale call answers from it without a lock.  It reads the counter once
 * more, together with the state and with one snapshot, so that the two belong
 * together.  A newer call waits for a concurrent writer of the row, and then
 * looks again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "actions/actions.h"
#include "stats/stats.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/errors.h"
#include "util/log_events.h"
#include "util/pinned_scope.h"
#include "util/results.h"
#include "util/settings.h"
#include "util/texts.h"

/* PostgreSQL counts time from 2000, Unix from 1970. */
#define UNIX_EPOCH_LEAD_MS \
	((double) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * 1000)

/* The types of the columns that the functions return. */
static IdemResultType advance_row = {
	.ncolumns = 2,
	.columns = {BOOLOID, INT8OID},
};

static IdemResultType action_row = {
	.ncolumns = 3,
	.columns = {BOOLOID, INT8OID, BOOLOID},
};

static void entity_args(FunctionCallInfo fcinfo, Datum *key);
static int64 action_id_arg(FunctionCallInfo fcinfo, int n);
static void act(const Datum *key, IdemIntent intent, int64 action_id,
				const Datum *excluded, int nexcluded, IdemActionState *state);
static bool read_state(IdemCursor *versions, IdemCursor *actions,
					   const Datum *key, int64 action_id,
					   IdemActionState *state);
static bool write_action(IdemCursor *actions, const Datum *key, IdemIntent intent,
						 int64 action_id);
static bool row_is_active(IdemCursor *actions);
static int64 row_last_action_id(IdemCursor *versions);
static int	excludes_arg(FunctionCallInfo fcinfo, int n, Datum action_type,
						 Datum **excluded);
static Datum state_result(FunctionCallInfo fcinfo, const IdemActionState *state);

/*
 * idem_try_advance(user_id, entity_type, entity_id, action_id)
 *		-> should_process, last_action_id
 */
PG_FUNCTION_INFO_V1(idem_try_advance);
Datum
idem_try_advance(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	int64		action_id;
	int64		last_action_id;
	IdemCursor	versions;
	Datum		values[2];
	bool		nulls[2] = {false, false};
	bool		advanced;

	entity_args(fcinfo, key);
	idem_check_pin(key[KEY_USER_ID]);
	action_id = action_id_arg(fcinfo, 3);

	idem_cursor_open(&versions, IDEM_ACTION_VERSIONS, RowExclusiveLock);
	advanced = idem_advance(&versions, key, action_id, &last_action_id);
	idem_count(advanced ? IDEM_COUNT_ADVANCES : IDEM_COUNT_STALE_ADVANCES, 1);
	idem_cursor_close(&versions);
	if (!advanced)
		idem_log_stale_event(key, action_id, last_action_id);

	values[0] = BoolGetDatum(advanced);
	values[1] = Int64GetDatum(last_action_id);
	PG_RETURN_DATUM(idem_result(fcinfo, &advance_row, values, nulls));
}

/*
 * idem_toggle(user_id, entity_type, entity_id, action_type, action_id)
 *		-> is_active, last_action_id, processed
 */
PG_FUNCTION_INFO_V1(idem_toggle);
Datum
idem_toggle(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	IdemActionState state;

	entity_args(fcinfo, key);
	idem_check_pin(key[KEY_USER_ID]);
	key[KEY_ACTION_TYPE] = idem_name_arg(fcinfo, 3, "action_type");
	act(key, IDEM_INTENT_FLIP, action_id_arg(fcinfo, 4), NULL, 0, &state);
	PG_RETURN_DATUM(state_result(fcinfo, &state));
}

/*
 * idem_set(user_id, entity_type, entity_id, action_type, active, action_id,
 *			excludes) -> is_active, last_action_id, processed
 */
PG_FUNCTION_INFO_V1(idem_set);
Datum
idem_set(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	bool		active;
	int64		action_id;
	Datum	   *excluded;
	int			nexcluded;
	IdemActionState state;

	entity_args(fcinfo, key);
	idem_check_pin(key[KEY_USER_ID]);
	key[KEY_ACTION_TYPE] = idem_name_arg(fcinfo, 3, "action_type");
	active = DatumGetBool(idem_required_arg(fcinfo, 4, "active"));
	action_id = action_id_arg(fcinfo, 5);
	nexcluded = excludes_arg(fcinfo, 6, key[KEY_ACTION_TYPE], &excluded);
	act(key, active ? IDEM_INTENT_ON : IDEM_INTENT_OFF, action_id,
		excluded, active ? nexcluded : 0, &state);
	PG_RETURN_DATUM(state_result(fcinfo, &state));
}

/*
 * idem_is_active(user_id, entity_type, entity_id, action_type) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_is_active);
Datum
idem_is_active(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	IdemCursor	actions;
	bool		is_active;

	entity_args(fcinfo, key);
	key[KEY_ACTION_TYPE] = idem_name_arg(fcinfo, 3, "action_type");

	idem_cursor_open(&actions, IDEM_USER_ACTIONS, AccessShareLock);
	is_active = idem_find_visible(&actions, key, GetActiveSnapshot()) &&
		row_is_active(&actions);
	idem_cursor_close(&actions);
	PG_RETURN_BOOL(is_active);
}

/*
 * Read the first three arguments: a user and an entity.  Raises 22004, 22023.
 */
static void
entity_args(FunctionCallInfo fcinfo, Datum *key)
{
	key[KEY_USER_ID] = idem_name_arg(fcinfo, 0, "user_id");
	key[KEY_ENTITY_TYPE] = idem_name_arg(fcinfo, 1, "entity_type");
	key[KEY_ENTITY_ID] = idem_name_arg(fcinfo, 2, "entity_id");
}

/*
 * Read argument "n", an action id.  Raises 22004, ID005.
 */
static int64
action_id_arg(FunctionCallInfo fcinfo, int n)
{
	int64		action_id;

	action_id = DatumGetInt64(idem_required_arg(fcinfo, n, "action_id"));
	idem_check_action_id(action_id);
	return action_id;
}

/*
 * Raise ID005 for an action id that is further ahead of the clock than
 * idempotency.max_action_id_lead allows.
 */
void
idem_check_action_id(int64 action_id)
{
	double		lead;

	if (idem_max_action_id_lead <= 0)
		return;

	lead = (double) action_id - UNIX_EPOCH_LEAD_MS -
		(double) GetCurrentTimestamp() / 1000.0;
	if (lead > idem_max_action_id_lead)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_ACTION_ID_AHEAD),
				 errmsg("action id " INT64_FORMAT " is too far ahead of the server's clock",
						action_id),
				 errdetail("As milliseconds since 1970 it is %.0f ms ahead; %.0f ms are allowed.",
						   lead, idem_max_action_id_lead),
				 errhint("Correct the clock of the device, or let a superuser raise \"%s\".",
						 "idempotency.max_action_id_lead")));
}

/*
 * Advance a counter to an action id.  Returns false, having changed nothing,
 * if the id is stale.  Sets the counter's value.
 */
bool
idem_advance(IdemCursor *versions, const Datum *key, int64 action_id,
			 int64 *last_action_id)
{
	Datum		values[VERSIONS_NUM_COLUMNS];
	bool		nulls[VERSIONS_NUM_COLUMNS] = {0};

	values[VERSIONS_LAST_ACTION_ID] = Int64GetDatum(action_id);
	memcpy(&values[VERSIONS_USER_ID], key, KEY_ACTION_TYPE * sizeof(Datum));

	for (;;)
	{
		bool		done = false;

		CHECK_FOR_INTERRUPTS();
		switch (idem_find(versions, key))
		{
			case IDEM_FIND_NONE:
				done = idem_insert(versions, values, nulls);
				break;

			case IDEM_FIND_PENDING:
				idem_wait(versions);
				break;

			case IDEM_FIND_ROW:
				*last_action_id = row_last_action_id(versions);
				if (*last_action_id >= action_id)
					return false;
				done = idem_update(versions, values, nulls,
								   true) == IDEM_WRITE_DONE;
				break;
		}
		if (done)
		{
			*last_action_id = action_id;
			return true;
		}
	}
}

/*
 * Carry out an intent if it is the latest, and clear the excluded action
 * types.  Otherwise report the state that later intents have produced.
 */
static void
act(const Datum *key, IdemIntent intent, int64 action_id,
	const Datum *excluded, int nexcluded, IdemActionState *state)
{
	IdemCursor	versions;
	IdemCursor	actions;

	idem_cursor_open(&versions, IDEM_ACTION_VERSIONS, RowExclusiveLock);
	idem_cursor_open(&actions, IDEM_USER_ACTIONS, RowExclusiveLock);
	idem_act(&versions, &actions, key, intent, action_id, excluded, nexcluded,
			 state);
	idem_cursor_close(&actions);
	idem_cursor_close(&versions);
	idem_count(state->processed ? IDEM_COUNT_ADVANCES :
			   IDEM_COUNT_STALE_ADVANCES, 1);
}

/*
 * The same, with the tables open already, and without counting.
 */
void
idem_act(IdemCursor *versions, IdemCursor *actions, const Datum *key,
		 IdemIntent intent, int64 action_id, const Datum *excluded,
		 int nexcluded, IdemActionState *state)
{
	do
	{
		state->processed = idem_advance(versions, key, action_id,
										&state->last_action_id);
	} while (!state->processed &&
			 !read_state(versions, actions, key, action_id, state));
	if (!state->processed)
	{
		idem_log_stale_event(key, action_id, state->last_action_id);
		return;
	}

	IDEM_INJECTION_POINT("idem-advanced");
	state->is_active = write_action(actions, key, intent, action_id);
	for (int i = 0; i < nexcluded; i++)
	{
		Datum		other[KEY_LENGTH];

		memcpy(other, key, sizeof(other));
		other[KEY_ACTION_TYPE] = excluded[i];
		(void) write_action(actions, other, IDEM_INTENT_OFF, action_id);
	}
}

/*
 * Read the current counter and state of an action with one snapshot.  Returns
 * false if the counter, which was at or above the action id, is gone.
 *
 * Raises 40001 if the transaction's snapshot must not see one of them.
 */
static bool
read_state(IdemCursor *versions, IdemCursor *actions, const Datum *key,
		   int64 action_id, IdemActionState *state)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool		found = idem_find_latest(versions, key, snapshot);

	if (found)
	{
		state->last_action_id = row_last_action_id(versions);
		IDEM_INJECTION_POINT("idem-counter-read");
		state->is_active = idem_find_latest(actions, key, snapshot) &&
			row_is_active(actions);
	}
	UnregisterSnapshot(snapshot);
	return found && state->last_action_id >= action_id;
}

/*
 * Write the state of one action type.  The counter is our own, so only a
 * transaction that bypasses these functions can hold the row.  The time in
 * the row is from after a wait for it.  Returns whether the action is active
 * now.  Clearing an action that is not set writes nothing.
 */
static bool
write_action(IdemCursor *actions, const Datum *key, IdemIntent intent,
			 int64 action_id)
{
	Datum		values[ACTIONS_NUM_COLUMNS];
	bool		nulls[ACTIONS_NUM_COLUMNS] = {0};
	bool		is_active = false;
	bool		done = false;

	values[ACTIONS_LAST_ACTION_ID] = Int64GetDatum(action_id);
	memcpy(&values[ACTIONS_USER_ID], key, KEY_LENGTH * sizeof(Datum));

	while (!done)
	{
		IdemFind	found;

		CHECK_FOR_INTERRUPTS();
		found = idem_find(actions, key);
		is_active = intent == IDEM_INTENT_ON ||
			(intent == IDEM_INTENT_FLIP &&
			 !(found == IDEM_FIND_ROW && row_is_active(actions)));
		values[ACTIONS_IS_ACTIVE] = BoolGetDatum(is_active);
		values[ACTIONS_UPDATED_AT] =
			TimestampTzGetDatum(GetCurrentTimestamp());

		if (found == IDEM_FIND_PENDING)
			idem_wait(actions);
		else if (found == IDEM_FIND_NONE)
			done = !is_active || idem_insert(actions, values, nulls);
		else if (intent == IDEM_INTENT_OFF && !row_is_active(actions))
			done = true;
		else
		{
			IdemWrite	written = idem_update(actions, values, nulls,
											  actions->row_is_own);

			if (written == IDEM_WRITE_HELD)
				idem_wait(actions);
			done = written == IDEM_WRITE_DONE;
		}
	}
	return is_active;
}

static bool
row_is_active(IdemCursor *actions)
{
	return DatumGetBool(actions->row->tts_values[ACTIONS_IS_ACTIVE]);
}

static int64
row_last_action_id(IdemCursor *versions)
{
	return DatumGetInt64(versions->row->tts_values[VERSIONS_LAST_ACTION_ID]);
}

/*
 * Read argument "n", an array of action types that must not be active beside
 * "action_type", or NULL.  Returns their number.  Raises 22004, 22023.
 */
static int
excludes_arg(FunctionCallInfo fcinfo, int n, Datum action_type,
			 Datum **excluded)
{
	int			count;

	*excluded = NULL;
	if (PG_ARGISNULL(n))
		return 0;

	count = idem_text_array(PG_GETARG_DATUM(n), "excludes", excluded);
	for (int i = 0; i < count; i++)
	{
		if (idem_text_equal((*excluded)[i], action_type))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("an action type cannot exclude itself")));
	}
	return count;
}

static Datum
state_result(FunctionCallInfo fcinfo, const IdemActionState *state)
{
	Datum		values[3];
	bool		nulls[3] = {0};

	values[0] = BoolGetDatum(state->is_active);
	values[1] = Int64GetDatum(state->last_action_id);
	values[2] = BoolGetDatum(state->processed);
	return idem_result(fcinfo, &action_row, values, nulls);
}

/*
 * Log a stale action.  "entity" has the columns of the primary key of
 * idem_action_versions.
 */
void
idem_log_stale_event(const Datum *entity, int64 action_id,
					 int64 last_action_id)
{
	StringInfoData line;

	if (!idem_event_is_logged(IDEM_EVENT_STALE))
		return;
	idem_log_begin(&line, IDEM_EVENT_STALE);
	idem_log_text(&line, "user", entity[0]);
	idem_log_text(&line, "entity_type", entity[1]);
	idem_log_text(&line, "entity", entity[2]);
	idem_log_number(&line, "action_id", action_id);
	idem_log_number(&line, "last_action_id", last_action_id);
	idem_log_end(&line);
}
