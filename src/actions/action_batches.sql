
--
-- Many user actions at once
--

CREATE TYPE @extschema@.idem_advance_many_result AS (
	ordinal int,
	should_process boolean,
	last_action_id bigint
);
COMMENT ON TYPE @extschema@.idem_advance_many_result IS
'The result of idem_try_advance_many.';

CREATE TYPE @extschema@.idem_set_many_result AS (
	ordinal int,
	is_active boolean,
	last_action_id bigint,
	processed boolean
);
COMMENT ON TYPE @extschema@.idem_set_many_result IS
'The result of idem_set_many.';

CREATE FUNCTION @extschema@.idem_try_advance_many(user_ids text[], entity_types text[], entity_ids text[], action_ids bigint[])
RETURNS SETOF @extschema@.idem_advance_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_try_advance_many(text[], text[], text[], bigint[]) IS
'Advances many version counters in one call, with the results and effects of single calls of idem_try_advance in the order given. All arrays have the same length; an array of one element applies to all elements. Returns a row for each element, in the order given; ordinal counts from 1. A LIMIT or WHERE on the result does not restrict the effects. Two calls for the same counters in different orders do not deadlock: they visit them in the order of (user_id, entity_type, entity_id). An error undoes the whole call; its context names the element. Raises 22004 for a NULL element, 22023 for arrays of different lengths, and the errors of idem_try_advance.';

CREATE FUNCTION @extschema@.idem_set_many(user_ids text[], entity_types text[], entity_ids text[], action_types text[],
	actives boolean[], action_ids bigint[])
RETURNS SETOF @extschema@.idem_set_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_set_many(text[], text[], text[], text[], boolean[], bigint[]) IS
'Sets many user actions in one call, with the results and effects of single calls of idem_set without excludes in the order given. All arrays have the same length; an array of one element applies to all elements. Returns a row for each element, in the order given; ordinal counts from 1. A LIMIT or WHERE on the result does not restrict the effects. Two calls for the same entities in different orders do not deadlock: they visit them in the order of (user_id, entity_type, entity_id). An error undoes the whole call; its context names the element. Raises 22004 for a NULL element, 22023 for arrays of different lengths, and the errors of idem_set.';
