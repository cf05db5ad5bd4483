
--
-- A whole request in one statement
--

CREATE TYPE @extschema@.idem_response AS (
	status int,
	headers json,
	body text
);
COMMENT ON TYPE @extschema@.idem_response IS
'The result of a handler of idem_run: HTTP status, headers, body.';

CREATE TYPE @extschema@.idem_run_result AS (
	outcome text,
	response_status int,
	response_headers json,
	response_body text
);
COMMENT ON TYPE @extschema@.idem_run_result IS
'The result of idem_run.';

CREATE FUNCTION @extschema@.idem_run(scope text, key text, handler regprocedure, request jsonb,
	ttl interval DEFAULT NULL, wait interval DEFAULT '1 minute')
RETURNS @extschema@.idem_run_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 2000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_run(text, text, regprocedure, jsonb, interval, interval) IS
'Claims the key, calls handler(request) with the caller''s rights and stores its result, in one statement. handler: a function with one argument of type jsonb that returns idem_response, or jsonb (status 200, its text as body). The request hash is idem_request_hash(''RUN'', schema-qualified handler name, request). ttl, wait: as for idem_claim; NULL: one minute of waiting. outcome: as for idem_claim. The response is returned for new and replay, the status also for erased; a body that was stored as bytea is NULL. An error in the handler undoes everything. Raises 42804 for a function that cannot be a handler, 42501 for a function that the caller is not allowed to execute, and the errors of idem_claim and idem_complete.';
