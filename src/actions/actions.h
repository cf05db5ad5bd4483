/*-------------------------------------------------------------------------
 *
 * actions.h
 *		Versioned user actions, for callers inside the extension.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ACTIONS_H
#define IDEMPOTENCY_ACTIONS_H

#include "store/store.h"

/* The columns of idem_action_versions, in order. */
enum
{
	VERSIONS_LAST_ACTION_ID,
	VERSIONS_USER_ID,
	VERSIONS_ENTITY_TYPE,
	VERSIONS_ENTITY_ID,
	VERSIONS_NUM_COLUMNS,
};

/* The columns of idem_user_actions, in order. */
enum
{
	ACTIONS_LAST_ACTION_ID,
	ACTIONS_UPDATED_AT,
	ACTIONS_IS_ACTIVE,
	ACTIONS_USER_ID,
	ACTIONS_ENTITY_TYPE,
	ACTIONS_ENTITY_ID,
	ACTIONS_ACTION_TYPE,
	ACTIONS_NUM_COLUMNS,
};

/* A primary key of idem_user_actions; its first part is a counter's. */
enum
{
	KEY_USER_ID,
	KEY_ENTITY_TYPE,
	KEY_ENTITY_ID,
	KEY_ACTION_TYPE,
	KEY_LENGTH,
};

/* A call's intent for an action type. */
typedef enum IdemIntent
{
	IDEM_INTENT_OFF,
	IDEM_INTENT_ON,
	IDEM_INTENT_FLIP,
} IdemIntent;

/* The state of a user's action on an entity. */
typedef struct IdemActionState
{
	bool		is_active;
	bool		processed;
	int64		last_action_id;
} IdemActionState;

extern void idem_check_action_id(int64 action_id);
extern bool idem_advance(IdemCursor *versions, const Datum *key,
						 int64 action_id, int64 *last_action_id);
extern void idem_act(IdemCursor *versions, IdemCursor *actions,
					 const Datum *key, IdemIntent intent, int64 action_id,
					 const Datum *excluded, int nexcluded,
					 IdemActionState *state);

extern void idem_log_stale_event(const Datum *entity, int64 action_id,
								 int64 last_action_id);

#endif							/* IDEMPOTENCY_ACTIONS_H */
