
--
-- Versioned user actions
--

CREATE TYPE @extschema@.idem_advance_result AS (
	should_process boolean,
	last_action_id bigint
);
COMMENT ON TYPE @extschema@.idem_advance_result IS
'The result of idem_try_advance.';

CREATE TYPE @extschema@.idem_action_result AS (
	is_active boolean,
	last_action_id bigint,
	processed boolean
);
COMMENT ON TYPE @extschema@.idem_action_result IS
'The result of idem_set and idem_toggle.';

CREATE TABLE @extschema@.idem_action_versions (
	last_action_id bigint NOT NULL,
	user_id text COLLATE "C" NOT NULL,
	entity_type text COLLATE "C" NOT NULL,
	entity_id text COLLATE "C" NOT NULL,
	PRIMARY KEY (user_id, entity_type, entity_id)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_action_versions IS
'Version counters: the latest action id of each user on each entity. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_action_versions.last_action_id IS 'The highest action id that has been processed.';
COMMENT ON COLUMN @extschema@.idem_action_versions.user_id IS 'The user.';
COMMENT ON COLUMN @extschema@.idem_action_versions.entity_type IS 'Type of the entity, such as post.';
COMMENT ON COLUMN @extschema@.idem_action_versions.entity_id IS 'The entity.';

CREATE TABLE @extschema@.idem_user_actions (
	last_action_id bigint NOT NULL,
	updated_at timestamptz NOT NULL,
	is_active boolean NOT NULL,
	user_id text COLLATE "C" NOT NULL,
	entity_type text COLLATE "C" NOT NULL,
	entity_id text COLLATE "C" NOT NULL,
	action_type text COLLATE "C" NOT NULL,
	PRIMARY KEY (user_id, entity_type, entity_id, action_type)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_user_actions IS
'The state of user actions: likes, bookmarks and so on. last_action_id is the action id that last changed the row. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_user_actions.last_action_id IS 'The action id that set this state.';
COMMENT ON COLUMN @extschema@.idem_user_actions.updated_at IS 'When the state was set.';
COMMENT ON COLUMN @extschema@.idem_user_actions.is_active IS 'The state: whether the action is on.';
COMMENT ON COLUMN @extschema@.idem_user_actions.user_id IS 'The user.';
COMMENT ON COLUMN @extschema@.idem_user_actions.entity_type IS 'Type of the entity, such as post.';
COMMENT ON COLUMN @extschema@.idem_user_actions.entity_id IS 'The entity.';
COMMENT ON COLUMN @extschema@.idem_user_actions.action_type IS 'Type of the action, such as like.';

SELECT pg_catalog.pg_extension_config_dump('idem_action_versions', '');
SELECT pg_catalog.pg_extension_config_dump('idem_user_actions', '');

CREATE FUNCTION @extschema@.idem_try_advance(user_id text, entity_type text, entity_id text, action_id bigint)
RETURNS @extschema@.idem_advance_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_try_advance(text, text, text, bigint) IS
'Advances the version counter of (user_id, entity_type, entity_id), 1 to 512 bytes each, to action_id if that is greater. Returns whether it was, and the counter. A stale call locks and writes nothing. Raises ID005 for an action id beyond idempotency.max_action_id_lead, 22004 or 22023 for bad arguments.';

CREATE FUNCTION @extschema@.idem_toggle(user_id text, entity_type text, entity_id text, action_type text, action_id bigint)
RETURNS @extschema@.idem_action_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_toggle(text, text, text, text, bigint) IS
'Flips action_type if action_id is greater than the counter of (user_id, entity_type, entity_id). Returns the current state and counter, and whether the call was processed. If requests overtake each other, their intent is lost: prefer idem_set. Raises the errors of idem_try_advance.';

CREATE FUNCTION @extschema@.idem_set(user_id text, entity_type text, entity_id text, action_type text,
	active boolean, action_id bigint, excludes text[] DEFAULT NULL)
RETURNS @extschema@.idem_action_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_set(text, text, text, text, boolean, bigint, text[]) IS
'Sets action_type to active if action_id is greater than the counter of (user_id, entity_type, entity_id), so that the latest intent wins in any order of arrival. excludes: action types to clear when it activates. Returns the current state and counter, and whether the call was processed. Raises the errors of idem_try_advance.';

CREATE FUNCTION @extschema@.idem_is_active(user_id text, entity_type text, entity_id text, action_type text)
RETURNS boolean
LANGUAGE c STABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_is_active(text, text, text, text) IS
'Whether a user''s action on an entity is active, as this statement''s snapshot sees it. Reads only; works on a hot standby. Raises 22004 or 22023 for bad arguments.';

CREATE FUNCTION @extschema@.idem_action_states(user_id text, entity_type text, entity_ids text[],
	OUT entity_id text, OUT action_type text, OUT is_active boolean, OUT last_action_id bigint)
RETURNS SETOF record
LANGUAGE c STABLE PARALLEL SAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_action_states(text, text, text[]) IS
'A user''s actions on the entities of a page, as this statement''s snapshot sees them: one row for each action type that was ever set, in the order of entity_id and action_type. last_action_id: the counter of user and entity. Reads only; works on a hot standby. Raises 22004 or 22023 for bad arguments.';

CREATE FUNCTION @extschema@.idem_forget_user(user_id text)
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_forget_user(text) IS
'For administrators: deletes a user''s version counters and actions. Returns the number of rows. Waits for transactions that are writing them; rows that are not committed yet stay. The next action counts as the first, with any action id. Raises 22004, 22023.';
