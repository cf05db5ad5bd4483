/*-------------------------------------------------------------------------
 *
 * action_queries.c
 *		Reading and deleting all actions of a user.
 *
 * idem_action_states() reads with the statement's snapshot alone, as
 * idem_lookup() and idem_is_active() do.
 *
 * idem_forget_user() first deletes a pair's counter, and then the pair's
 * actions, as seen by a snapshot taken between the two.  The counter's row
 * lock serializes it with calls that advance the counter.  What such a call
 * committed before is deleted, too.  A call that comes later keeps both its
 * counter and its actions, as does one whose counter was not committed when
 * the user's counters were read.  Actions without a counter, which only a
 * superuser can have left behind, come last.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

#include "actions/actions.h"
#include "util/arguments.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/pinned_scope.h"
#include "util/texts.h"

/* The columns that idem_action_states() returns. */
enum
{
	STATE_ENTITY_ID,
	STATE_ACTION_TYPE,
	STATE_IS_ACTIVE,
	STATE_LAST_ACTION_ID,
	STATE_NUM_COLUMNS,
};

/*
 * The tables of idem_action_states().  "exact" is open if the snapshot might
 * see a row twice; see idem_find_visible().
 */
typedef struct Reading
{
	IdemCursor	versions;
	IdemCursor	actions;
	IdemCursor	exact;
	bool		twice;
	ReturnSetInfo *result;
} Reading;

/* The tables of idem_forget_user(). */
typedef struct Forgetting
{
	IdemCursor	versions;
	IdemCursor	actions;
	int64		deleted;
} Forgetting;

static void entity_states(Reading *reading, Datum *key);
static void forget_pairs(Forgetting *forgetting, Datum *key);
static void forget_actions(Forgetting *forgetting, const Datum *key,
						   int ncolumns);
static bool delete_counter(Forgetting *forgetting, const Datum *key);
static void delete_action(Forgetting *forgetting, const Datum *key);

/*
 * idem_action_states(user_id, entity_type, entity_ids)
 *		-> setof entity_id, action_type, is_active, last_action_id
 */
PG_FUNCTION_INFO_V1(idem_action_states);
Datum
idem_action_states(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	IdemArray	entities;
	int		   *order;
	Reading		reading;

	key[KEY_USER_ID] = idem_name_arg(fcinfo, 0, "user_id");
	key[KEY_ENTITY_TYPE] = idem_name_arg(fcinfo, 1, "entity_type");
	idem_array_arg(fcinfo, 2, "entity_ids",
				   IDEM_ARRAY_REQUIRED | IDEM_ARRAY_NAMES, &entities);
	order = idem_array_order(&entities, 1, entities.length);
	InitMaterializedSRF(fcinfo, 0);
	reading.result = (ReturnSetInfo *) fcinfo->resultinfo;

	idem_cursor_open(&reading.versions, IDEM_ACTION_VERSIONS, AccessShareLock);
	idem_cursor_open(&reading.actions, IDEM_USER_ACTIONS, AccessShareLock);
	reading.twice = IsolationUsesXactSnapshot();
	if (reading.twice)
		idem_cursor_open_beside(&reading.exact, &reading.actions);
	for (int i = 0; i < entities.length; i++)
	{
		CHECK_FOR_INTERRUPTS();
		key[KEY_ENTITY_ID] = entities.values[order[i]];
		if (i == 0 ||
			!idem_text_equal(key[KEY_ENTITY_ID],
							 entities.values[order[i - 1]]))
			entity_states(&reading, key);
	}
	if (reading.twice)
		idem_cursor_close(&reading.exact);
	idem_cursor_close(&reading.actions);
	idem_cursor_close(&reading.versions);
	return (Datum) 0;
}

/*
 * Add a user's actions on one entity to the result.
 */
static void
entity_states(Reading *reading, Datum *key)
{
	Snapshot	snapshot = GetActiveSnapshot();
	TupleTableSlot *row = reading->actions.row;
	Datum		values[STATE_NUM_COLUMNS];
	bool		nulls[STATE_NUM_COLUMNS] = {0};
	bool		counter_read = false;

	values[STATE_ENTITY_ID] = key[KEY_ENTITY_ID];
	idem_scan_key(&reading->actions, snapshot, key, KEY_ENTITY_ID + 1);
	while (idem_scan_next(&reading->actions, ForwardScanDirection))
	{
		Datum	   *action = &row->tts_values[ACTIONS_USER_ID];

		if (reading->twice &&
			!(idem_find_visible(&reading->exact, action, snapshot) &&
			  ItemPointerEquals(&reading->exact.row->tts_tid,
								&row->tts_tid)))
			continue;
		if (!counter_read)
		{
			IDEM_INJECTION_POINT("idem-action-read");
			nulls[STATE_LAST_ACTION_ID] =
				!idem_find_visible(&reading->versions, key, snapshot);
			values[STATE_LAST_ACTION_ID] =
				reading->versions.row->tts_values[VERSIONS_LAST_ACTION_ID];
			counter_read = true;
		}
		values[STATE_ACTION_TYPE] = action[KEY_ACTION_TYPE];
		values[STATE_IS_ACTIVE] = row->tts_values[ACTIONS_IS_ACTIVE];
		tuplestore_putvalues(reading->result->setResult,
							 reading->result->setDesc, values, nulls);
	}
}

/*
 * idem_forget_user(user_id) -> bigint
 */
PG_FUNCTION_INFO_V1(idem_forget_user);
Datum
idem_forget_user(PG_FUNCTION_ARGS)
{
	Datum		key[KEY_LENGTH];
	Forgetting	forgetting;

	key[KEY_USER_ID] = idem_name_arg(fcinfo, 0, "user_id");
	idem_check_pin(key[KEY_USER_ID]);

	idem_cursor_open(&forgetting.versions, IDEM_ACTION_VERSIONS,
					 RowExclusiveLock);
	idem_cursor_open(&forgetting.actions, IDEM_USER_ACTIONS, RowExclusiveLock);
	forgetting.deleted = 0;

	forget_pairs(&forgetting, key);
	IDEM_INJECTION_POINT("idem-pairs-forgotten");
	forget_actions(&forgetting, key, KEY_USER_ID + 1);

	idem_cursor_close(&forgetting.actions);
	idem_cursor_close(&forgetting.versions);
	PG_RETURN_INT64(forgetting.deleted);
}

/*
 * Delete the user's counters, each with its actions.
 */
static void
forget_pairs(Forgetting *forgetting, Datum *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	IdemCursor	seen;

	idem_cursor_open_beside(&seen, &forgetting->versions);
	idem_scan_key(&seen, snapshot, key, KEY_USER_ID + 1);
	while (idem_scan_next(&seen, ForwardScanDirection))
	{
		key[KEY_ENTITY_TYPE] = seen.row->tts_values[VERSIONS_ENTITY_TYPE];
		key[KEY_ENTITY_ID] = seen.row->tts_values[VERSIONS_ENTITY_ID];
		if (delete_counter(forgetting, key))
			forget_actions(forgetting, key, KEY_ENTITY_ID + 1);
	}
	idem_cursor_close(&seen);
	UnregisterSnapshot(snapshot);
}

/*
 * Delete the actions with the first "ncolumns" columns of a key that have no
 * counter now.
 */
static void
forget_actions(Forgetting *forgetting, const Datum *key, int ncolumns)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	IdemCursor	seen;

	idem_cursor_open_beside(&seen, &forgetting->actions);
	idem_scan_key(&seen, snapshot, key, ncolumns);
	while (idem_scan_next(&seen, ForwardScanDirection))
		delete_action(forgetting, &seen.row->tts_values[ACTIONS_USER_ID]);
	idem_cursor_close(&seen);
	UnregisterSnapshot(snapshot);
}

/*
 * Delete a counter, as it is now.  Returns whether there was one.  Waits for
 * the writer of its row.  Raises 40001 if the transaction's snapshot must not
 * see it.
 */
static bool
delete_counter(Forgetting *forgetting, const Datum *key)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_find_latest(&forgetting->versions, key, NULL))
			return false;
	} while (idem_delete(&forgetting->versions, true) != IDEM_WRITE_DONE);
	forgetting->deleted++;
	return true;
}

/*
 * Delete an action that has no counter.  Another transaction's uncommitted
 * counter counts.  The action was there before the counter was looked for.
 * Waits and raises errors as delete_counter() does.
 */
static void
delete_action(Forgetting *forgetting, const Datum *key)
{
	do
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_find_latest(&forgetting->actions, key, NULL) ||
			idem_find(&forgetting->versions, key) != IDEM_FIND_NONE ||
			idem_find_latest(&forgetting->versions, key, NULL))
			return;
	} while (idem_delete(&forgetting->actions, true) != IDEM_WRITE_DONE);
	forgetting->deleted++;
}
