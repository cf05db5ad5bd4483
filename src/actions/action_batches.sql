
--
-- Many user actions at once
--

CREATE TYPE @extschema@.idem_advance_many_result AS (
	ordinal int,
	should_process boolean,
	last_action_id bigint
);
COMMENT ON TYPE @extschema@.idem_advance_many_result IS
'What idem_try_advance_many returns.';

CREATE TYPE @extschema@.idem_set_many_result AS (
	ordinal int,
	is_active boolean,
	last_action_id bigint,
	processed boolean
);
COMMENT ON TYPE @extschema@.idem_set_many_result IS
'What idem_set_many returns.';

CREATE FUNCTION @extschema@.idem_try_advance_many(user_ids text[], entity_types text[], entity_ids text[], action_ids bigint[])
RETURNS SETOF @extschema@.idem_advance_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_try_advance_many(text[], text[], text[], bigint[]) IS
'Advances many version counters in one call, as idem_try_advance does for one after another in the order given. Arrays have one length; one of one element stands for all. A row for each element, in the order given, ordinal from 1; what a LIMIT or a WHERE leaves out of the result is done all the same. Two calls for the same counters do not deadlock, whatever their orders: they visit them in the order of (user_id, entity_type, entity_id). An error undoes all; its context names the element. Raises 22004 for a NULL element, 22023 for arrays that do not match, and otherwise as idem_try_advance.';

CREATE FUNCTION @extschema@.idem_set_many(user_ids text[], entity_types text[], entity_ids text[], action_types text[],
	actives boolean[], action_ids bigint[])
RETURNS SETOF @extschema@.idem_set_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_set_many(text[], text[], text[], text[], boolean[], bigint[]) IS
'Sets many user actions in one call, as idem_set does, without excludes, for one after another in the order given. Arrays have one length; one of one element stands for all. A row for each element, in the order given, ordinal from 1; what a LIMIT or a WHERE leaves out of the result is done all the same. Two calls for the same entities do not deadlock, whatever their orders: they visit them in the order of (user_id, entity_type, entity_id). An error undoes all; its context names the element. Raises 22004 for a NULL element, 22023 for arrays that do not match, and otherwise as idem_set.';
