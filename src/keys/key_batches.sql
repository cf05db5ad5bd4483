
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
'What idem_claim_many returns.';

CREATE TYPE @extschema@.idem_complete_many_result AS (
	ordinal int,
	key text,
	completed boolean
);
COMMENT ON TYPE @extschema@.idem_complete_many_result IS
'What idem_complete_many returns.';

CREATE FUNCTION @extschema@.idem_claim_many(scope text, keys text[], request_hashes bytea[] DEFAULT NULL,
	ttl interval DEFAULT NULL, lease interval DEFAULT NULL)
RETURNS SETOF @extschema@.idem_claim_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim_many(text, text[], bytea[], interval, interval) IS
'Claims many keys of a scope in one call, with the answers and effects of idem_claim for one after another in the order given: of two equal keys the second is in_progress. Arrays have one length; one of one element stands for all. A row for each element, in the order given, ordinal from 1; what a LIMIT or a WHERE leaves out of the result is done all the same. Never waits for other transactions. An error undoes all; its context names the element. Raises 22004 for a NULL key, 22023 for arrays that do not match, and otherwise as idem_claim.';

CREATE FUNCTION @extschema@.idem_complete_many(scope text, keys text[], response_statuses int[],
	response_bodies text[] DEFAULT NULL, response_headers json[] DEFAULT NULL, claim_tokens bigint[] DEFAULT NULL)
RETURNS SETOF @extschema@.idem_complete_many_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_complete_many(text, text[], int[], text[], json[], bigint[]) IS
'Stores the responses of many claimed requests of a scope in one call, as idem_complete does for one after another in the order given. completed: what that returns. Arrays have one length; one of one element stands for all. A row for each element, in the order given, ordinal from 1; what a LIMIT or a WHERE leaves out of the result is done all the same. Two calls for the same keys do not deadlock, whatever their orders. An error undoes all; its context names the element. Raises 22004 for a NULL key or status, 22023 for arrays that do not match or a status outside 100 to 599, and otherwise as idem_complete.';
