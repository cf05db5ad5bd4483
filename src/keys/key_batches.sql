
--
-- Many request keys at once
--

CREATE TYPE @extschema@.idem_claim_many_result AS (
	ordinal int,
	key text,
	outcome text,
	claim_token bigint,
	attempt int,
	response_status int,
	response_headers json,
	response_body text,
	response_bytes bytea,
	recovery_point text,
	recovery_state json,
	lease_expires_at timestamptz,
	expires_at timestamptz
);
COMMENT ON TYPE @extschema@.idem_claim_many_result IS
'The result of idem_claim_many.';

CREATE TYPE @extschema@.idem_complete_many_result AS (
	ordinal int,
	key text,
	completed boolean
);
COMMENT ON TYPE @extschema@.idem_complete_many_result IS
'The result of idem_complete_many.';

CREATE FUNCTION @extschema@.idem_claim_many(scope text, keys text[], request_hashes bytea[] DEFAULT NULL,
	ttl interval DEFAULT NULL, lease interval DEFAULT NULL)
RETURNS SETOF @extschema@.idem_claim_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim_many(text, text[], bytea[], interval, interval) IS
'Claims many keys of a scope in one call, with the results and effects of single calls of idem_claim in the order given: of two equal keys, the second is in_progress. All arrays have the same length; an array of one element applies to all elements. Returns a row for each element, in the order given; ordinal counts from 1. A LIMIT or WHERE on the result does not restrict the effects. Never waits for other transactions. An error undoes the whole call; its context names the element. Raises 22004 for a NULL key, 22023 for arrays of different lengths, and the errors of idem_claim.';

CREATE FUNCTION @extschema@.idem_complete_many(scope text, keys text[], response_statuses int[],
	response_bodies text[] DEFAULT NULL, response_headers json[] DEFAULT NULL, claim_tokens bigint[] DEFAULT NULL)
RETURNS SETOF @extschema@.idem_complete_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_complete_many(text, text[], int[], text[], json[], bigint[]) IS
'Stores the responses of many claimed requests of a scope in one call, with the results and effects of single calls of idem_complete in the order given. completed: the result of idem_complete. All arrays have the same length; an array of one element applies to all elements. Returns a row for each element, in the order given; ordinal counts from 1. A LIMIT or WHERE on the result does not restrict the effects. Two calls for the same keys in different orders do not deadlock. An error undoes the whole call; its context names the element. Raises 22004 for a NULL key or status, 22023 for arrays of different lengths or a status outside 100 to 599, and the errors of idem_complete.';
