\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The extension writes to its tables directly, which only works with this access method.
SET LOCAL default_table_access_method = heap;

-- The members of the extension before this script, which can be an update: see install_check.sql.
SELECT pg_catalog.set_config('idempotency_script.members',
		coalesce(pg_catalog.string_agg(pg_catalog.format('%s %s', d.classid, d.objid), ','), ''), true)
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d ON d.refobjid OPERATOR(pg_catalog.=) e.oid
	WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
		AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
		AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char";

-- This script runs with the rights of a superuser, for a role that need not be
-- one. That role, the installer, must be allowed to create objects in the schema
-- and in the tablespace, so it gets nothing that it could not have created.
--
-- Another role that is allowed to create objects in the schema could capture
-- calls with a function that matches better. The owners of the schema and of the
-- database have other ways to do so, so the script only warns about them. It
-- refuses any other role.
--
-- Every operator below is qualified, including those that CASE, IN and IS
-- DISTINCT FROM use implicitly. The installer is read from the catalog, because
-- names that the server substitutes in a script must not be in quotes.
DO $check$
DECLARE
	installer pg_catalog.regrole;
	home pg_catalog.oid;
	home_name pg_catalog.name;
	tablespace pg_catalog.name;
	strangers pg_catalog.text;
	trusted pg_catalog.text;
	own_schema CONSTANT pg_catalog.text := CASE
		WHEN pg_catalog.current_setting('idempotency_script.members') OPERATOR(pg_catalog.=) ''
		THEN 'Use a schema of its own: CREATE SCHEMA idem; CREATE EXTENSION idempotency SCHEMA idem;'
		ELSE 'GRANT CREATE on the schema to the role that has installed the extension, REVOKE it from others, and update again.'
		END;
BEGIN
	SELECT e.extowner, n.oid, n.nspname INTO STRICT installer, home, home_name
		FROM pg_catalog.pg_extension AS e
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name;

	IF pg_catalog.starts_with(home_name::pg_catalog.text, 'pg_')
		OR home_name OPERATOR(pg_catalog.=) 'information_schema'::pg_catalog.name
	THEN
		RAISE EXCEPTION USING
			ERRCODE = 'reserved_name',
			MESSAGE = pg_catalog.format('schema "%s" belongs to the server', home_name),
			HINT = own_schema;
	END IF;
	IF NOT pg_catalog.has_schema_privilege(installer::pg_catalog.oid, home, 'CREATE') THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for schema %s', home_name),
			DETAIL = pg_catalog.format('Role %s is not allowed to create objects in it.', installer),
			HINT = own_schema;
	END IF;

	SELECT t.spcname INTO tablespace
		FROM pg_catalog.pg_tablespace AS t
		CROSS JOIN pg_catalog.pg_database AS d
		WHERE t.spcname OPERATOR(pg_catalog.=) pg_catalog.current_setting('default_tablespace')::pg_catalog.name
			AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
			AND t.oid OPERATOR(pg_catalog.<>) d.dattablespace
			AND NOT pg_catalog.has_tablespace_privilege(installer::pg_catalog.oid, t.oid, 'CREATE');
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for tablespace %s', tablespace),
			DETAIL = pg_catalog.format('It is the default_tablespace, and role %s is not allowed to create objects in it.', installer),
			HINT = 'SET default_tablespace = '''';';
	END IF;

	SELECT pg_catalog.string_agg(DISTINCT c.role, ', ') FILTER (WHERE NOT c.is_trusted),
			pg_catalog.string_agg(DISTINCT c.role, ', ') FILTER (WHERE c.is_trusted)
		INTO strangers, trusted
		FROM (
			SELECT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC') COLLATE pg_catalog."C" AS role,
				coalesce(r.oid OPERATOR(pg_catalog.=) o.owner
					OR r.oid OPERATOR(pg_catalog.=) d.datdba, false) AS is_trusted
			FROM pg_catalog.pg_namespace AS n
			CROSS JOIN pg_catalog.pg_database AS d
			-- The owner of the database has the rights of pg_database_owner.
			CROSS JOIN LATERAL (SELECT
				CASE WHEN n.nspowner OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid
					THEN d.datdba ELSE n.nspowner END) AS o (owner)
			CROSS JOIN LATERAL (
				SELECT CASE WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid
					THEN d.datdba ELSE a.grantee END
				FROM pg_catalog.aclexplode(n.nspacl) AS a
				WHERE a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'
				UNION ALL
				SELECT o.owner) AS c (creator)
			LEFT JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) c.creator
			WHERE n.oid OPERATOR(pg_catalog.=) home
				AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
				AND NOT coalesce(r.rolsuper
					OR r.oid OPERATOR(pg_catalog.=) installer::pg_catalog.oid, false)
		) AS c;
	IF strangers IS NOT NULL THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format(
				'schema "%s" is not safe for extension "idempotency"', home_name),
			DETAIL = pg_catalog.format(
				'Roles that can create objects in it: %s.', strangers),
			HINT = own_schema;
	END IF;
	IF trusted IS NOT NULL THEN
		RAISE WARNING USING
			MESSAGE = pg_catalog.format(
				'other roles can create objects in schema "%s": %s', home_name, trusted),
			DETAIL = 'A function there can capture calls of functions of extension "idempotency", and runs with the rights of the caller.',
			HINT = 'Unless all callers trust that role, use another schema.';
	END IF;
END
$check$;

--
-- Functions that process many elements
--

CREATE FUNCTION @extschema@.idem_many_support(request internal)
RETURNS internal
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_many_support(internal) IS
'Planner support: estimates the rows of a function that returns one for each element of its arrays.';

--
-- Request identity
--

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body text DEFAULT NULL)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_text';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, text) IS
'SHA-256 of a request whose body is JSON text: METHOD:path:canonical body, in UTF-8. method: an HTTP token (RFC 9110), case ignored. path: each ":" counts as "%3A". body: NULL or empty for none. Raises 22004 for a NULL method or path, 22023 for a bad method, 22P02 for a body that is not JSON, 22P05, 22003, 54000 or 54001 for JSON that jsonb cannot hold or that is nested too deeply.';

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body jsonb)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_jsonb';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, jsonb) IS
'SHA-256 of a request whose body is jsonb: the same as for its text. Raises 22004 for a NULL method or path, 22023 for a bad method, 54001 for a body that is nested too deeply.';

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body bytea)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_bytea';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, bytea) IS
'SHA-256 of a request whose body is not JSON, byte for byte. Raises 22004 for a NULL method or path, 22023 for a bad method.';

CREATE FUNCTION @extschema@.idem_canonical_json(document jsonb)
RETURNS text
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_canonical_json(jsonb) IS
'The document in canonical form, RFC 8785 (JCS), except that a number keeps its digits if it has more than 17, is an integer that an IEEE double would round, or is beyond the range of doubles. Raises 54001 for a document nested too deeply.';

--
-- Request keys
--

CREATE TYPE @extschema@.idem_claim_result AS (
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
COMMENT ON TYPE @extschema@.idem_claim_result IS
'The result of idem_claim.';

CREATE TYPE @extschema@.idem_lookup_result AS (
	state text,
	attempt int,
	request_hash bytea,
	response_status int,
	response_headers json,
	response_body text,
	response_bytes bytea,
	error text,
	recovery_point text,
	recovery_state json,
	created_at timestamptz,
	completed_at timestamptz,
	lease_expires_at timestamptz,
	expires_at timestamptz
);
COMMENT ON TYPE @extschema@.idem_lookup_result IS
'The result of idem_lookup.';

-- Columns are ordered for alignment. The key comes first in the index because
-- it distinguishes most rows at the first comparison. The fill factor leaves
-- space on the page for idem_complete()'s version of the row, a HOT update, and
-- no more: the server prunes dead versions only from pages of which less than a
-- tenth is free. With 75 the table would be twice as large.
-- resume_at is NULL unless the record has a request and can be resumed. It alone
-- decides whether a row is in the two indexes for idem_resume(), so updates of
-- rows without a request stay HOT.
CREATE TABLE @extschema@.idem_keys (
	claim_token bigint NOT NULL,
	created_at timestamptz NOT NULL,
	completed_at timestamptz,
	lease_expires_at timestamptz,
	resume_at timestamptz,
	expires_at timestamptz NOT NULL,
	attempt integer NOT NULL,
	response_status integer,
	state text COLLATE "C" NOT NULL,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	request_hash bytea,
	response_headers json,
	response_body text,
	response_bytes bytea,
	error text,
	recovery_point text,
	recovery_state json,
	request jsonb,
	PRIMARY KEY (key, scope)
) WITH (
	fillfactor = 95,
	-- Rows die as fast as they are inserted: vacuum when a twentieth of the table is dead ...
	autovacuum_vacuum_scale_factor = 0.05,
	-- ... at ten times the default's speed, to keep up.
	autovacuum_vacuum_cost_limit = 2000
);
COMMENT ON TABLE @extschema@.idem_keys IS
'Request keys: one row for each claimed key until it has expired and been cleaned up. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_keys.claim_token IS 'Fencing token of the current or last claim; each new claim of the key has a higher one.';
COMMENT ON COLUMN @extschema@.idem_keys.created_at IS 'When the record was created by its first claim.';
COMMENT ON COLUMN @extschema@.idem_keys.resume_at IS 'When idem_resume can take over the claim; NULL if it has no stored request or is completed.';
COMMENT ON COLUMN @extschema@.idem_keys.request IS 'The request, if the claimant stored it for idem_resume.';
COMMENT ON COLUMN @extschema@.idem_keys.completed_at IS 'When the request was completed; NULL before that.';
COMMENT ON COLUMN @extschema@.idem_keys.lease_expires_at IS 'When the lease of the current claim ends; NULL if the key is not claimed.';
COMMENT ON COLUMN @extschema@.idem_keys.expires_at IS 'When the record expires, and the key can be claimed as a new one.';
COMMENT ON COLUMN @extschema@.idem_keys.attempt IS 'How many times the key has been claimed.';
COMMENT ON COLUMN @extschema@.idem_keys.response_status IS 'HTTP status of the stored response; NULL before the completion.';
COMMENT ON COLUMN @extschema@.idem_keys.state IS 'started, completed, failed or erased.';
COMMENT ON COLUMN @extschema@.idem_keys.scope IS 'Owner of the key: the authenticated user or tenant.';
COMMENT ON COLUMN @extschema@.idem_keys.key IS 'The idempotency key.';
COMMENT ON COLUMN @extschema@.idem_keys.request_hash IS 'Hash that binds the key to one request; NULL if no claim passed one.';
COMMENT ON COLUMN @extschema@.idem_keys.response_headers IS 'Headers of the stored response.';
COMMENT ON COLUMN @extschema@.idem_keys.response_body IS 'Body of the stored response, if it is text.';
COMMENT ON COLUMN @extschema@.idem_keys.response_bytes IS 'Body of the stored response, if it is bytea.';
COMMENT ON COLUMN @extschema@.idem_keys.error IS 'Error text of the last idem_fail.';
COMMENT ON COLUMN @extschema@.idem_keys.recovery_point IS 'Name of the last checkpoint.';
COMMENT ON COLUMN @extschema@.idem_keys.recovery_state IS 'State that the last checkpoint stored.';

CREATE INDEX idem_keys_expires_at ON @extschema@.idem_keys (expires_at);
CREATE INDEX idem_keys_resumable ON @extschema@.idem_keys (attempt, resume_at)
	WHERE resume_at IS NOT NULL;
CREATE INDEX idem_keys_resumable_scopes ON @extschema@.idem_keys (scope, attempt, resume_at)
	WHERE resume_at IS NOT NULL;

CREATE SEQUENCE @extschema@.idem_claim_tokens;
COMMENT ON SEQUENCE @extschema@.idem_claim_tokens IS
'Claim tokens: one sequence for the database, so that tokens keep increasing for a key that was deleted and claimed again.';

SELECT pg_catalog.pg_extension_config_dump('idem_keys', '');
SELECT pg_catalog.pg_extension_config_dump('idem_claim_tokens', '');

CREATE FUNCTION @extschema@.idem_key_is_valid(key text)
RETURNS boolean
LANGUAGE c STABLE PARALLEL SAFE COST 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_key_is_valid(text) IS
'Whether the functions accept this key for a new record: it has idempotency.key_format, and idempotency.key_min_length to idempotency.key_max_length characters. False for NULL.';

CREATE FUNCTION @extschema@.idem_claim(scope text, key text, request_hash bytea DEFAULT NULL,
	ttl interval DEFAULT NULL, lease interval DEFAULT NULL, wait interval DEFAULT NULL, request jsonb DEFAULT NULL)
RETURNS @extschema@.idem_claim_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_claim(text, text, bytea, interval, interval, interval, jsonb) IS
'Claims the right to run a request (IETF draft Idempotency-Key). outcome: new, replay, erased, in_progress, hash_conflict or expired. scope: the authenticated user or tenant. request_hash: see idem_request_hash. ttl: how long the key is remembered. lease: how long the committed claim is protected. wait: how long to wait while another caller holds the claim, until it is completed, failed, released or forgotten, its transaction is rolled back, or its lease ends; NULL or zero: not at all. request: stored with a new claim, for idem_resume; NULL: none, or that of the previous attempt. Raises ID001 for a bad key, ID002 for too many new keys in the scope, 22004 or 22023 for other bad arguments (22004 also for a missing request_hash if idempotency.require_request_hash is on), 54000 for a request above idempotency.max_response_size, 40001 if the record is newer than the transaction''s snapshot, 40P01 if the wait is a deadlock, 55P03 after lock_timeout. Uses a sequence, so lastval() changes.';

CREATE FUNCTION @extschema@.idem_complete(scope text, key text, response_status int,
	response_body text DEFAULT NULL, response_headers json DEFAULT NULL, claim_token bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME', 'idem_complete_text';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, int, text, json, bigint) IS
'Stores the response of a claimed request, to be replayed until the key expires. response_status: 100 to 599. claim_token: required unless this transaction claimed the key. Returns true, or false if this claim was completed before. Raises ID003 if the claim was lost, ID004 if there is no live claim, 54000 for a response above idempotency.max_response_size, 22023 for another response_status.';

CREATE FUNCTION @extschema@.idem_complete(scope text, key text, response_status int,
	response_body bytea, response_headers json DEFAULT NULL, claim_token bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME', 'idem_complete_bytea';
COMMENT ON FUNCTION @extschema@.idem_complete(text, text, int, bytea, json, bigint) IS
'Stores a binary response, which is replayed in response_bytes. Otherwise like the overload for text.';

CREATE FUNCTION @extschema@.idem_checkpoint(scope text, key text, recovery_point text,
	recovery_state json DEFAULT NULL, lease interval DEFAULT NULL, claim_token bigint DEFAULT NULL)
RETURNS timestamptz
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_checkpoint(text, text, text, json, interval, bigint) IS
'Records the progress of a claimed request, for the attempt that resumes it, and renews the lease. recovery_point: 1 to 512 bytes. lease: from now, NULL: idempotency.default_lease; never beyond the key''s expiry. Returns the end of the lease. Raises ID003, ID004.';

CREATE FUNCTION @extschema@.idem_heartbeat(scope text, key text,
	lease interval DEFAULT NULL, claim_token bigint DEFAULT NULL)
RETURNS timestamptz
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_heartbeat(text, text, interval, bigint) IS
'Renews the lease of a claim, or shortens it. lease: from now, NULL: idempotency.default_lease; never beyond the key''s expiry. Returns the end of the lease. Raises ID003, ID004.';

CREATE FUNCTION @extschema@.idem_fail(scope text, key text,
	error text DEFAULT NULL, claim_token bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_fail(text, text, text, bigint) IS
'Gives up a claim after a failure. The record, its hash and its checkpoint stay; the next claim can retry at once. error: for idem_lookup, cut to idempotency.max_response_size. Returns true, or false if this claim failed before. Raises ID003, ID004.';

CREATE FUNCTION @extschema@.idem_release(scope text, key text, claim_token bigint DEFAULT NULL)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_release(text, text, bigint) IS
'Gives up a claim and deletes its record, as if the key had never been claimed. Returns true, or false if the record of this claim token is gone already. Raises ID003, ID004.';

CREATE FUNCTION @extschema@.idem_lookup(scope text, key text)
RETURNS @extschema@.idem_lookup_result
LANGUAGE c STABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_lookup(text, text) IS
'The live record of a key, as this statement''s snapshot sees it; all columns are NULL if there is none. state: started, completed, failed or erased. Reads only; works on a hot standby. Raises ID001, 22004, 22023.';

CREATE FUNCTION @extschema@.idem_forget(scope text, key text)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_forget(text, text) IS
'For administrators: deletes a key''s record in any state, so that the request can run again. Returns whether there was a record.';

CREATE FUNCTION @extschema@.idem_erase(scope text, key text)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_erase(text, text) IS
'For administrators: deletes the stored request, headers and body, the error and the recovery state, but keeps the record that the request ran: scope, key, hash, state, status, attempts, times and the name of the recovery point. A completed request becomes erased; a failed request or a claim stays as it is, but idem_resume does not find it any more. Returns whether there was something to erase.';

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

--
-- Work that outlives its client
--

CREATE FUNCTION @extschema@.idem_resume(max_claims int DEFAULT 10, lease interval DEFAULT NULL, scopes text[] DEFAULT NULL,
	wait interval DEFAULT NULL,
	OUT scope text, OUT key text, OUT claim_token bigint, OUT attempt int, OUT request jsonb,
	OUT recovery_point text, OUT recovery_state json, OUT created_at timestamptz, OUT lease_expires_at timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000 ROWS 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_resume(int, interval, text[], interval) IS
'Takes over up to max_claims claims that stored a request and that failed or whose lease has ended, the oldest first. Each gets a higher claim token and another attempt. Commit, do the work, then complete it with that token. lease: from now, NULL: idempotency.default_lease; never beyond the key''s expiry. scopes: only these; NULL: all scopes, for any caller. wait: how long to wait while there is nothing to resume, until a claim fails or a lease ends; NULL or zero: not at all. Does not wait for other transactions otherwise: skips the claims that they hold. A claim that has had idempotency.max_attempts attempts is not resumed; idem_abandoned lists it. A LIMIT or WHERE on the result does not restrict the effects. Uses a sequence, so lastval() changes. Raises 22004 or 22023 for bad arguments.';

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

--
-- Client sequences
--

CREATE TYPE @extschema@.idem_append_result AS (
	outcome text,
	last_client_seq bigint,
	version bigint
);
COMMENT ON TYPE @extschema@.idem_append_result IS
'The result of idem_try_append.';

CREATE TABLE @extschema@.idem_aggregates (
	version bigint NOT NULL,
	aggregate text COLLATE "C" NOT NULL,
	PRIMARY KEY (aggregate)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_aggregates IS
'Versions: how many events each aggregate has. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_aggregates.version IS 'How many events have been appended to the aggregate.';
COMMENT ON COLUMN @extschema@.idem_aggregates.aggregate IS 'The aggregate.';

CREATE TABLE @extschema@.idem_client_sequences (
	last_client_seq bigint NOT NULL,
	aggregate text COLLATE "C" NOT NULL,
	client_id text COLLATE "C" NOT NULL,
	PRIMARY KEY (aggregate, client_id)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_client_sequences IS
'Client sequences: the last event of each client on each aggregate. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.last_client_seq IS 'Number of the last event that the client has appended.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.aggregate IS 'The aggregate.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.client_id IS 'The client.';

SELECT pg_catalog.pg_extension_config_dump('idem_aggregates', '');
SELECT pg_catalog.pg_extension_config_dump('idem_client_sequences', '');

CREATE FUNCTION @extschema@.idem_try_append(aggregate text, client_id text, client_seq bigint, event_count int DEFAULT 1,
	expected_version bigint DEFAULT NULL, allow_gaps boolean DEFAULT true, wait interval DEFAULT NULL)
RETURNS @extschema@.idem_append_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_try_append(text, text, bigint, int, bigint, boolean, interval) IS
'Appends a client''s events client_seq to client_seq + event_count - 1 to an aggregate, once. outcome: appended, duplicate (all events were appended before), overlap (some were: resend from last_client_seq + 1), gap (allow_gaps is false and earlier events are missing), in_flight (another transaction holds this client''s sequence and has not committed, or waits for its synchronous standby), version_conflict (expected_version is not the aggregate''s). Only appended changes anything; then insert the events in the same transaction. aggregate, client_id: 1 to 512 bytes. client_seq: from 1. wait: how long to wait for that transaction; NULL or zero: not at all. A call waits for other clients'' appends to the aggregate as an UPDATE does. Raises 22004 or 22023 for bad arguments, 40001 if a row is newer than the transaction''s snapshot.';

CREATE FUNCTION @extschema@.idem_last_client_seq(aggregate text, client_id text)
RETURNS bigint
LANGUAGE c STABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_last_client_seq(text, text) IS
'The last event of a client on an aggregate, as this statement''s snapshot sees it; 0 if there is none. A restarted writer resumes after it. Reads only; works on a hot standby. Raises 22004, 22023.';

--
-- Once-only tokens, and the inbox
--

CREATE TABLE @extschema@.idem_tokens (
	expires_at timestamptz NOT NULL,
	used_at timestamptz NOT NULL,
	scope text COLLATE "C" NOT NULL,
	token text COLLATE "C" NOT NULL,
	PRIMARY KEY (token, scope)
) WITH (
	-- Rows die as fast as they are inserted: vacuum when a twentieth of the table is dead ...
	autovacuum_vacuum_scale_factor = 0.05,
	-- ... at ten times the default's speed, to keep up.
	autovacuum_vacuum_cost_limit = 2000
);
COMMENT ON TABLE @extschema@.idem_tokens IS
'Tokens that have been used, until they have expired and been cleaned up. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_tokens.used_at IS 'When the token was used for the first time.';
COMMENT ON COLUMN @extschema@.idem_tokens.expires_at IS 'When the token is forgotten.';
COMMENT ON COLUMN @extschema@.idem_tokens.scope IS 'Owner of the token: a form, a consumer of messages, a tenant.';
COMMENT ON COLUMN @extschema@.idem_tokens.token IS 'A token that has been used.';

CREATE INDEX idem_tokens_expires_at ON @extschema@.idem_tokens (expires_at);

SELECT pg_catalog.pg_extension_config_dump('idem_tokens', '');

CREATE FUNCTION @extschema@.idem_once(scope text, token text, ttl interval DEFAULT NULL)
RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once(text, text, interval) IS
'Whether this is the first use of a token: a form token or, in a consumer''s transaction, the id of a message. scope, token: 1 to 512 bytes. ttl: how long the token is remembered; NULL: idempotency.token_ttl. Waits for another transaction that is using it, because that might be rolled back. Raises 22004 or 22023 for bad arguments, 40001 if the row is newer than the transaction''s snapshot.';

-- With ROWS 1, a call for each row of another table is cheap enough that the
-- planner does not cache its results.
CREATE FUNCTION @extschema@.idem_once_many(scope text, tokens text[], ttl interval DEFAULT NULL)
RETURNS SETOF text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once_many(text, text[], interval) IS
'The tokens that are used for the first time, in the order given, without repeats. Use one call for a whole batch: calls for the same tokens in different orders do not deadlock. A LIMIT or WHERE on the result does not restrict the effects. Otherwise like idem_once.';

CREATE FUNCTION @extschema@.idem_once_at(scope text, token text)
RETURNS timestamptz
LANGUAGE c STABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_once_at(text, text) IS
'When a token was used for the first time, as this statement''s snapshot sees it: when a message was processed. NULL for a token that was not used, or has expired. Reads only; works on a hot standby. Raises 22004, 22023.';

--
-- Transactional outbox
--

-- The columns that takes and answers change come first, so that the WAL of an update is short.
CREATE TABLE @extschema@.idem_outbox (
	id bigint NOT NULL,
	key_hash bigint,
	created_at timestamptz NOT NULL,
	available_at timestamptz NOT NULL,
	acked_at timestamptz,
	attempt integer NOT NULL,
	uncounted_attempts integer NOT NULL,
	awaiting_ack boolean,
	in_due_index boolean NOT NULL,
	message_id uuid NOT NULL,
	state text COLLATE "C" NOT NULL,
	topic text COLLATE "C" NOT NULL,
	message_key text COLLATE "C",
	payload jsonb NOT NULL,
	headers jsonb,
	last_error text,
	PRIMARY KEY (id)
) WITH (
	-- Space for a message's next versions, for the same reason.
	fillfactor = 50,
	-- A take scans the index entries of dead rows; each message leaves three.
	autovacuum_vacuum_scale_factor = 0.02,
	-- Vacuum at ten times the default's speed, to keep up.
	autovacuum_vacuum_cost_limit = 2000
);
COMMENT ON TABLE @extschema@.idem_outbox IS
'Outbox: messages published by committed transactions, until they have been acknowledged and cleaned up. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_outbox.id IS 'Number of the message, in the order of publishing.';
COMMENT ON COLUMN @extschema@.idem_outbox.key_hash IS 'Hash of topic and message_key, which names the lane of the message; NULL if it has no key.';
COMMENT ON COLUMN @extschema@.idem_outbox.created_at IS 'When the message was published.';
COMMENT ON COLUMN @extschema@.idem_outbox.available_at IS 'When the message can be taken: the end of its delay, lease or pause. For an acknowledged message in the due index: when a take examines its lane.';
COMMENT ON COLUMN @extschema@.idem_outbox.acked_at IS 'When the message was acknowledged; NULL before that.';
COMMENT ON COLUMN @extschema@.idem_outbox.attempt IS 'How many times the message has been taken.';
COMMENT ON COLUMN @extschema@.idem_outbox.uncounted_attempts IS 'How many of these attempts do not count toward idempotency.outbox_max_attempts, because the message was requeued or released.';
COMMENT ON COLUMN @extschema@.idem_outbox.awaiting_ack IS 'true from a take until the answer, false after a nack, NULL if no relay has had the message since it was published, requeued or released.';
COMMENT ON COLUMN @extschema@.idem_outbox.in_due_index IS 'Whether a take examines this row when available_at has come; false for a message behind another one of its key.';
COMMENT ON COLUMN @extschema@.idem_outbox.message_id IS 'Random UUID by which consumers recognise repeats.';
COMMENT ON COLUMN @extschema@.idem_outbox.state IS 'pending, acked or dead.';
COMMENT ON COLUMN @extschema@.idem_outbox.topic IS 'What the message is about; relays take by topic.';
COMMENT ON COLUMN @extschema@.idem_outbox.message_key IS 'Messages of one topic and key are delivered in order; NULL: in any order.';
COMMENT ON COLUMN @extschema@.idem_outbox.payload IS 'The message.';
COMMENT ON COLUMN @extschema@.idem_outbox.headers IS 'Headers of the message, for consumers and sinks.';
COMMENT ON COLUMN @extschema@.idem_outbox.last_error IS 'Error text of the last nack.';

CREATE INDEX idem_outbox_due ON @extschema@.idem_outbox (available_at) WHERE in_due_index;
CREATE INDEX idem_outbox_topics ON @extschema@.idem_outbox (topic, available_at) WHERE in_due_index;
CREATE INDEX idem_outbox_lanes ON @extschema@.idem_outbox (key_hash, id)
	WHERE state OPERATOR(pg_catalog.=) 'pending' AND key_hash IS NOT NULL;
CREATE INDEX idem_outbox_ended ON @extschema@.idem_outbox (acked_at)
	WHERE state OPERATOR(pg_catalog.<>) 'pending';

CREATE SEQUENCE @extschema@.idem_outbox_ids;
COMMENT ON SEQUENCE @extschema@.idem_outbox_ids IS
'Ids of outbox messages, in the order of publishing.';

SELECT pg_catalog.pg_extension_config_dump('idem_outbox', '');
SELECT pg_catalog.pg_extension_config_dump('idem_outbox_ids', '');

CREATE FUNCTION @extschema@.idem_publish(topic text, payload jsonb, message_key text DEFAULT NULL, headers jsonb DEFAULT NULL,
	deliver_after interval DEFAULT NULL)
RETURNS uuid
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_publish(text, jsonb, text, jsonb, interval) IS
'Publishes a message if and only if the transaction commits. topic, message_key: 1 to 512 bytes; messages with the same topic and key are handed out in order. deliver_after: the delay before the message is available. Returns the message id, a random UUID (RFC 9562), by which consumers recognise repeats. Never waits. Uses a sequence, so lastval() changes. Raises 22004 or 22023 for bad arguments, 22P05 for a message key that cannot be converted to UTF-8, 23505 if the sequence was set back, 54000 if payload and headers as text exceed idempotency.max_message_size.';

CREATE FUNCTION @extschema@.idem_publish_many(topics text[], payloads jsonb[], message_keys text[] DEFAULT NULL, headers jsonb[] DEFAULT NULL,
	deliver_after interval DEFAULT NULL, OUT ordinal int, OUT message_id uuid)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_publish_many(text[], jsonb[], text[], jsonb[], interval) IS
'Publishes many messages at once, as single calls of idem_publish in the order given, so messages with the same topic and key are handed out in that order. All arrays have the same length; an array of one element applies to all elements; message_keys and headers can contain NULLs. Returns a row for each message, in that order, with its ordinal from 1 and its message id. An error undoes the whole call. Never waits. Uses a sequence, so lastval() changes. Raises 22004 or 22023 for bad arguments, 22P05 for a message key that cannot be converted to UTF-8, 23505 if the sequence was set back, 54000 if payload and headers as text exceed idempotency.max_message_size.';

CREATE FUNCTION @extschema@.idem_outbox_take(max_messages int DEFAULT 100, lease interval DEFAULT '30 seconds', topics text[] DEFAULT NULL,
	wait interval DEFAULT NULL,
	OUT id bigint, OUT message_id uuid, OUT topic text, OUT message_key text, OUT payload jsonb, OUT headers jsonb,
	OUT attempt int, OUT created_at timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000 ROWS 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_take(int, interval, text[], interval) IS
'Takes up to max_messages messages to deliver them. Commit, deliver, then acknowledge them with idem_outbox_ack, or refuse them with idem_outbox_nack, before the lease expires; after that they are handed out again. topics: only these; NULL: all. A message is taken only if no earlier one with the same topic and message_key is pending, leased, pausing or delayed, or together with the earlier ones, in order. wait: how long to wait while there is nothing to take, until a message is published or becomes available; NULL or zero: not at all. Does not wait for other relays or publishers otherwise. A take that only changes messages that it cannot return, for example declares one dead, returns an empty result at once, so that the caller commits the change. A message that was taken idempotency.outbox_max_attempts times without an answer is dead. A LIMIT or WHERE on the result does not restrict the effects. Raises 22004 or 22023 for bad arguments.';

CREATE FUNCTION @extschema@.idem_outbox_ack(ids bigint[])
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_ack(bigint[]) IS
'Acknowledges delivered messages. Returns how many of them had not been acknowledged before; dead messages count. If idempotency.outbox_retention is 0, deletes them. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_nack(id bigint, error text DEFAULT NULL, retry_after interval DEFAULT NULL, attempt int DEFAULT NULL)
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_nack(bigint, text, interval, int) IS
'Refuses a message that could not be delivered. retry_after: how long to pause; NULL: 1 second after the first attempt, doubled with each further one up to an hour, less up to a half at random. attempt: as idem_outbox_take returned it; with it, the call returns lost if another relay has taken the message since. Returns pending, dead (after idempotency.outbox_max_attempts attempts; the message keeps its last error), or lost (taken, requeued or released since, acknowledged or cleaned up; nothing was changed). Waits for a transaction that is writing the message. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_requeue(ids bigint[] DEFAULT NULL)
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_requeue(bigint[]) IS
'Makes dead messages pending again, with all their attempts; the numbers of their attempts continue. ids: NULL: all dead messages. Returns how many. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_extend(ids bigint[], lease interval DEFAULT '30 seconds', attempts int[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_extend(bigint[], interval, int[]) IS
'Extends the leases of messages that are being delivered. lease: how long from now; NULL: 30 seconds. attempts: as idem_outbox_take returned them, one for each id, or one for all. Returns the ids of the messages that are still held, in the order given. Stop delivering the others: they were taken by another relay, answered, requeued or cleaned up. With attempts, a message is still held after its lease has expired, until another relay takes it; without them, it is not. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_release(ids bigint[], attempts int[] DEFAULT NULL)
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_release(bigint[], int[]) IS
'Releases messages that were not tried: they are available at once, and the attempt does not count. attempts: as idem_outbox_take returned them, one for each id, or one for all. Returns how many were released: only those that are still held, as for idem_outbox_extend. If you release a message, also release the later ones with the same topic and message_key. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_fail(id bigint, attempt int, error text, retry_after interval DEFAULT NULL, counted boolean DEFAULT true,
	schedule interval[] DEFAULT NULL, max_age interval DEFAULT NULL)
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_fail(bigint, int, text, interval, boolean, interval[], interval) IS
'Refuses a message like idem_outbox_nack, and keeps its last five errors in last_error, the newest first, each in a line that begins with its time. attempt: as idem_outbox_take returned it. counted: false if the attempt does not count. schedule: the pauses after the first, second, ... counted attempt; after one more failure, the message is dead; NULL: the pauses of idem_outbox_nack. idempotency.outbox_max_attempts also applies. max_age: a message that was published longer ago is dead after any failure. Returns pending, dead or lost, like idem_outbox_nack. Waits for a transaction that is writing the message. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_dead(max_messages int DEFAULT 1000, OUT id bigint, OUT message_id uuid, OUT topic text,
	OUT message_key text, OUT attempt int, OUT created_at timestamptz, OUT last_error text)
RETURNS SETOF record
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 10000 ROWS 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT o.id, o.message_id, o.topic, o.message_key, o.attempt, o.created_at, o.last_error
	FROM @extschema@.idem_outbox AS o
	-- In the index of ended messages, acked_at is NULL for dead ones.
	WHERE o.acked_at IS NULL AND o.state OPERATOR(pg_catalog.<>) 'pending'
		AND o.state OPERATOR(pg_catalog.=) 'dead'
	ORDER BY o.id
	LIMIT CASE WHEN $1 IS NOT NULL THEN greatest($1, 0) END;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_dead(int) IS
'Dead messages, the oldest first, without their payloads and headers. max_messages: how many at most; NULL: all. Reads only; works on a hot standby. Raises no errors of its own.';

CREATE FUNCTION @extschema@.idem_outbox_last_error(id bigint)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 1000
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT o.last_error FROM @extschema@.idem_outbox AS o WHERE o.id OPERATOR(pg_catalog.=) $1;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_last_error(bigint) IS
'The error with which a message was last refused, or its last errors, as idem_outbox_nack and idem_outbox_fail keep them. Returns NULL if there is none, or no such message. So a relay that has taken a message knows whether it failed before, at any relay. Reads only; works on a hot standby. Raises no errors of its own.';

CREATE FUNCTION @extschema@.idem_outbox_topics(max_topics int DEFAULT 10000)
RETURNS SETOF text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 10000 ROWS 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH RECURSIVE found (name) AS (
		(SELECT o.topic FROM @extschema@.idem_outbox AS o WHERE o.in_due_index ORDER BY o.topic LIMIT 1)
		UNION ALL
		SELECT (SELECT o.topic FROM @extschema@.idem_outbox AS o
			WHERE o.in_due_index AND o.topic OPERATOR(pg_catalog.>) f.name ORDER BY o.topic LIMIT 1)
		FROM found AS f WHERE f.name IS NOT NULL
	)
	SELECT f.name FROM found AS f WHERE f.name IS NOT NULL LIMIT CASE WHEN $1 IS NOT NULL THEN greatest($1, 0) END;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_topics(int) IS
'The topics of pending messages, in alphabetical order; topics without pending messages can be among them. max_topics: how many at most; NULL: all. Reads the index once for each topic. Reads only; works on a hot standby. Raises no errors of its own.';
--
-- Storage: large columns are compressed with LZ4 if the server has it, which is
-- much faster. A restore keeps the compression that it finds.
--

DO $storage$
DECLARE
	home pg_catalog.name := pg_catalog.current_schema();
BEGIN
	IF EXISTS (SELECT FROM pg_catalog.pg_settings AS s
		WHERE s.name OPERATOR(pg_catalog.=) 'default_toast_compression'
			AND 'lz4' OPERATOR(pg_catalog.=) ANY (s.enumvals)) THEN
		EXECUTE pg_catalog.format('ALTER TABLE %I.idem_keys '
			'ALTER COLUMN response_headers SET COMPRESSION lz4, '
			'ALTER COLUMN response_body SET COMPRESSION lz4, '
			'ALTER COLUMN response_bytes SET COMPRESSION lz4, '
			'ALTER COLUMN recovery_state SET COMPRESSION lz4, '
			'ALTER COLUMN error SET COMPRESSION lz4', home);
		EXECUTE pg_catalog.format('ALTER TABLE %I.idem_outbox '
			'ALTER COLUMN payload SET COMPRESSION lz4, '
			'ALTER COLUMN headers SET COMPRESSION lz4, '
			'ALTER COLUMN last_error SET COMPRESSION lz4', home);
	END IF;
END
$storage$;

--
-- Cleanup
--

CREATE TYPE @extschema@.idem_cleanup_result AS (
	keys_deleted bigint,
	tokens_deleted bigint,
	messages_deleted bigint
);
COMMENT ON TYPE @extschema@.idem_cleanup_result IS
'The result of idem_cleanup.';

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int DEFAULT NULL)
RETURNS @extschema@.idem_cleanup_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_cleanup(int) IS
'Deletes expired request keys (under expired_key_policy reject, after tombstone_retention), expired once-only tokens, and acknowledged messages older than idempotency.outbox_retention: one batch of at most batch_size rows of each kind; NULL: idempotency.cleanup_batch_size. Skips rows that another transaction is writing. Returns how many rows were deleted. Call it again, in a new transaction, until it deletes none. A batch that takes long, because of large responses, ends before it is full. A session continues where its last call ended. Before it reports that nothing is left, it starts from the oldest row, unless that takes long. If the library is in shared_preload_libraries, a background worker does this. Raises 22023 for a batch_size below 1.';

CREATE FUNCTION @extschema@.idem_take_expired(kind text, max_rows int DEFAULT 1000)
RETURNS SETOF jsonb
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 500
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_take_expired(text, int) IS
'Deletes up to max_rows rows that idem_cleanup would delete, and returns them as jsonb, columns of type json as strings; kind: keys, tokens or messages. For INSERT INTO archive SELECT: a rollback restores the rows. Skips rows that another transaction is writing. It can return fewer rows than there are. Call it again, in a new transaction, until it returns none. A LIMIT or WHERE on the result does not restrict the effects. The background worker must not run in this database, or it deletes the rows first. Raises 22004 for a NULL kind, 22023 for another kind and for a max_rows below 1, 54000 for a row that is too large for jsonb.';

--
-- After a restore, a promotion or a move
--

CREATE FUNCTION @extschema@.idem_raise_claim_tokens(at_least bigint)
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_raise_claim_tokens(bigint) IS
'For administrators, after a restore, a promotion or a move: from now on, claim tokens are above at_least. Never lowers them. The ids of new messages increase by the same number, and at least above the highest existing message. Does not wait or block, and a rollback does not undo it. Returns the number that new claim tokens are above. Raises 22004, and 22023 for more than half of the largest bigint.';

CREATE FUNCTION @extschema@.idem_repair_outbox()
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_repair_outbox() IS
'For administrators, after rows of idem_outbox were deleted or changed by hand: makes sure that idem_outbox_take finds the first pending message of each topic and key. Returns the number of rows that it has written, which need not mean damage. Skips messages that another transaction is writing. Changes nothing else, and never waits.';

--
-- Statistics
--

CREATE FUNCTION @extschema@.idem_stats_data(
	OUT datid oid,
	OUT claims_new bigint, OUT claims_replay bigint, OUT claims_erased bigint,
	OUT claims_in_progress bigint, OUT claims_hash_conflict bigint, OUT claims_expired bigint,
	OUT takeovers bigint, OUT completions bigint, OUT failures bigint, OUT rate_limited bigint,
	OUT advances bigint, OUT advances_stale bigint, OUT appends_appended bigint, OUT appends_duplicate bigint,
	OUT appends_overlap bigint, OUT appends_gap bigint, OUT appends_in_flight bigint,
	OUT appends_version_conflict bigint, OUT once_first bigint, OUT once_seen bigint,
	OUT messages_published bigint, OUT messages_taken bigint, OUT messages_acked bigint,
	OUT messages_nacked bigint, OUT messages_dead bigint, OUT keys_deleted bigint,
	OUT tokens_deleted bigint, OUT messages_deleted bigint, OUT cleanup_passes bigint,
	OUT last_cleanup timestamptz, OUT stats_reset timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stats_data() IS
'The counters of view idem_stats. Members of pg_read_all_stats also see those of other databases.';

CREATE VIEW @extschema@.idem_stats AS
	SELECT d.datname, s.*
	FROM @extschema@.idem_stats_data() AS s
	JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
COMMENT ON VIEW @extschema@.idem_stats IS
'Activity of the functions in each database since stats_reset, or since the server started: calls by outcome, whether or not their transactions committed, and the work of the cleanup, which counts when its transaction has committed. Members of pg_read_all_stats also see other databases. takeovers: claims of failed or abandoned keys, also counted in claims_new. rate_limited: calls that failed because their scope had reached its limit of new keys.';

CREATE FUNCTION @extschema@.idem_cleanup_idle()
RETURNS double precision
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_cleanup_idle() IS
'For how many seconds no cleanup of this database has finished, since the statistics were reset, for idem_health. NULL if there is no space for the statistics.';

CREATE FUNCTION @extschema@.idem_stats_reset()
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stats_reset() IS
'Sets the counters of this database back to zero.';

--
-- Monitoring
--

-- The functions for pg_monitor run with the rights of the tables' owner, who is
-- a superuser, in a schema that might belong to another role. Their bodies are
-- parsed when they are created, so that no name is looked up when they run. From
-- here to the end of the script, all names and operators without our schema's
-- name are the server's own. So no other role can capture them with an overload,
-- including the operators that CASE, IN and others use implicitly.
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE FUNCTION @extschema@.idem_monitoring_data(
	OUT source text, OUT counted bigint, OUT due bigint, OUT overdue double precision,
	OUT complete boolean, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 6
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_monitoring_data() IS
'Expired records and undelivered messages, counted through their indexes, for idem_metric_samples and idem_health. overdue: of the oldest, in seconds; NULL if dead rows hide it. complete: whether all were counted. fault: why the table could not be read.';

CREATE FUNCTION @extschema@.idem_sample_data(source text,
	OUT share double precision, OUT live_share double precision, OUT stuck bigint,
	OUT stuck_pages bigint, OUT newest timestamptz, OUT highest_token bigint, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE COST 10000 ROWS 1
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_sample_data(text) IS
'Estimates from a sample of the table of keys or tokens, for idem_metric_samples and idem_health. share: the part of the table that was read. live_share: the part of the rows that has not expired. stuck: number of abandoned claims, on stuck_pages pages. newest: time of the latest claim. highest_token: the highest claim token. fault: why the table could not be read.';

CREATE FUNCTION @extschema@.idem_clock_evidence(
	OUT name text, OUT latest timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 3
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_clock_evidence() IS
'The latest recorded times, for the clock check of idem_health.';

CREATE FUNCTION @extschema@.idem_table_faults(
	OUT table_name text, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000 ROWS 9
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_table_faults() IS
'The tables and sequences, for idem_metric_samples and idem_health. fault: why calls cannot use it, because it was altered or is locked; NULL if they can.';

CREATE FUNCTION @extschema@.idem_table_stats(
	OUT table_name text, OUT live_rows bigint, OUT dead_rows bigint, OUT dead_bytes bigint)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000 ROWS 7
BEGIN ATOMIC
	-- The size of a locked table cannot be read, so the pages are those of the
	-- last vacuum. They can be out of date, or empty; a row has 100 bytes to 2 kB
	-- in the table itself. A standby, and a server after a crash, have only the
	-- statistics in the catalog.
	SELECT t.table_name, t.live_rows, t.dead_rows,
		greatest(t.dead_rows * 100::int8, least(t.dead_rows * 2048::int8,
			(t.pages * current_setting('block_size')::float8 * t.dead_rows::float8 /
				greatest(t.dead_rows + t.live_rows, 1::int8)::float8)::int8))
	FROM (
		SELECT c.relname::text AS table_name,
			CASE WHEN pg_stat_get_live_tuples(c.oid) = 0::int8
					AND pg_stat_get_tuples_inserted(c.oid) = 0::int8
				THEN greatest(c.reltuples, 0::float4)::int8
				ELSE pg_stat_get_live_tuples(c.oid)
			END AS live_rows,
			pg_stat_get_dead_tuples(c.oid) AS dead_rows,
			c.relpages::float8 AS pages
		FROM pg_extension AS e
		JOIN pg_depend AS d
			ON d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
			AND d.refobjid = e.oid
			AND d.classid = 'pg_catalog.pg_class'::regclass::oid
		JOIN pg_class AS c ON c.oid = d.objid
		WHERE e.extname = 'idempotency'::name
			AND c.relnamespace = e.extnamespace
			AND c.relkind = 'r'::"char"
	) AS t;
END;
COMMENT ON FUNCTION @extschema@.idem_table_stats() IS
'Estimated rows of the extension''s tables, for idem_metric_samples and idem_health. dead_bytes: without values that are stored out of line.';

CREATE FUNCTION @extschema@.idem_outbox_blocked(max_lanes int DEFAULT 100,
	OUT topic text, OUT first_id bigint, OUT blocked_since timestamptz, OUT waiting bigint,
	OUT reason text, OUT until timestamptz, OUT pid int)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_blocked(int) IS
'Due messages that no relay can take, the longest wait first: a row for each topic and message key, without the key; for held messages without a key, a row for each topic and transaction. max_lanes: the maximum number of rows. first_id: the message that blocks the others. blocked_since: when the first waiting message became due. waiting: number of due messages behind first_id. reason: leased, paused (nacked or delayed), held (a transaction writes or locks the message), or lost (no relay finds it; idem_repair_outbox() repairs that). until: when the lease or pause ends. pid: the process of the transaction; NULL if it is prepared. If there are more than 5000 keys, it examines a random sample, and those that are probably blocked for longer than most. Reads only; works on a hot standby. Raises 22023 for a negative max_lanes.';

CREATE FUNCTION @extschema@.idem_blocked_seconds(blocked_since timestamptz, until timestamptz)
RETURNS double precision
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 100
BEGIN ATOMIC
	SELECT CASE WHEN isfinite($1) AND isfinite(coalesce($2, $1))
		THEN EXTRACT(epoch FROM greatest($2, clock_timestamp()) - $1)::float8
		ELSE 'Infinity'::float8 END;
END;
COMMENT ON FUNCTION @extschema@.idem_blocked_seconds(timestamptz, timestamptz) IS
'How long a message waits: from the time it became due to the end of the lease or pause of the one before it, or to now. For idem_metric_samples and idem_health.';

CREATE FUNCTION @extschema@.idem_metric_families(
	OUT ordinal int, OUT name text, OUT type text, OUT unit text, OUT help text)
RETURNS SETOF record
LANGUAGE sql IMMUTABLE PARALLEL SAFE COST 100 ROWS 25
BEGIN ATOMIC
	SELECT v.ordinal, 'idempotency_' || v.name, v.type, v.unit, v.help
	FROM (VALUES
		(1, 'claims', 'counter', NULL, 'Calls of idem_claim and idem_run, by outcome.'),
		(2, 'takeovers', 'counter', NULL, 'Claims of failed or abandoned keys; also counted as claims, outcome new.'),
		(3, 'completions', 'counter', NULL, 'Completed requests.'),
		(4, 'failures', 'counter', NULL, 'Failed requests.'),
		(5, 'rate_limited', 'counter', NULL, 'Claims that were refused because their scope had reached its limit of new keys.'),
		(6, 'advances', 'counter', NULL, 'Calls for user actions, by outcome.'),
		(7, 'appends', 'counter', NULL, 'Calls of idem_try_append, by outcome.'),
		(8, 'once', 'counter', NULL, 'Once-only tokens, by outcome.'),
		(9, 'messages_published', 'counter', NULL, 'Published messages.'),
		(10, 'messages_taken', 'counter', NULL, 'Messages that relays have taken.'),
		(11, 'messages_acked', 'counter', NULL, 'Acknowledged messages.'),
		(12, 'messages_nacked', 'counter', NULL, 'Refused messages.'),
		(13, 'messages_dead', 'counter', NULL, 'Messages that have used up their attempts.'),
		(14, 'rows_deleted', 'counter', NULL, 'Rows that the cleanup has deleted.'),
		(15, 'cleanup_passes', 'counter', NULL, 'Finished cleanups.'),
		(16, 'stats_reset_timestamp_seconds', 'gauge', 'seconds', 'When the counters were reset.'),
		(17, 'last_cleanup_timestamp_seconds', 'gauge', 'seconds', 'When the last cleanup ended.'),
		(18, 'cleanup_lag_seconds', 'gauge', 'seconds', 'How long the oldest expired row has been due for deletion.'),
		(19, 'records', 'gauge', NULL, 'Records of keys and tokens, by state. live is estimated; expired is estimated if there are too many to count.'),
		(20, 'outbox_messages', 'gauge', NULL, 'Unacknowledged messages, by state. due: available, or behind a message with the same key; waiting: leased, pausing or delayed. At most 50000 are counted, or fewer if dead rows hide some; dead is missing if they hide all.'),
		(21, 'outbox_oldest_age_seconds', 'gauge', 'seconds', 'How long the oldest undelivered message has been due, of the messages counted. Missing if dead rows hide them.'),
		(22, 'outbox_blocked_keys', 'gauge', NULL, 'Keys with due messages that no relay can take, because the first one is leased, paused, held by a transaction, or lost (state). Held messages without a key count once for each topic and transaction. If there are more than 5000 keys, a sample is examined.'),
		(23, 'outbox_blocked_seconds', 'gauge', 'seconds', 'The longest time that a due message waits for another one of its key, or for a transaction that holds it: from the time it became due to the end of the other''s lease or pause, or to now. 0 if no message is blocked.'),
		(24, 'table_unusable', 'gauge', NULL, '1 if calls cannot use a table or sequence, because it was altered or is locked. Metrics that depend on it are missing.'),
		(25, 'build', 'info', NULL, 'Version of the extension and of the server.')
	) AS v (ordinal, name, type, unit, help);
END;
COMMENT ON FUNCTION @extschema@.idem_metric_families() IS
'The families of metrics, for idem_metric_samples and idem_metrics. The names of a counter''s samples end in _total, those of an info in _info.';

CREATE FUNCTION @extschema@.idem_metric_samples(
	OUT name text, OUT labels jsonb, OUT value double precision, OUT type text, OUT help text)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 50
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH stats AS (
		SELECT s.*
		FROM @extschema@.idem_stats_data() AS s
		JOIN pg_database AS d ON d.oid = s.datid
		WHERE d.datname = current_database()
	),
	data AS MATERIALIZED (
		SELECT d.source, sum(d.counted) AS counted, sum(d.due) AS due,
			max(d.overdue) AS overdue, bool_and(d.complete) AS complete,
			min(d.fault) AS fault
		FROM @extschema@.idem_monitoring_data() AS d
		GROUP BY d.source
	),
	counters (n, stat, family, label) AS (VALUES
		(1, 'claims_new', 'claims', '{"outcome": "new"}'),
		(2, 'claims_replay', 'claims', '{"outcome": "replay"}'),
		(3, 'claims_erased', 'claims', '{"outcome": "erased"}'),
		(4, 'claims_in_progress', 'claims', '{"outcome": "in_progress"}'),
		(5, 'claims_hash_conflict', 'claims', '{"outcome": "hash_conflict"}'),
		(6, 'claims_expired', 'claims', '{"outcome": "expired"}'),
		(1, 'takeovers', 'takeovers', NULL),
		(1, 'completions', 'completions', NULL),
		(1, 'failures', 'failures', NULL),
		(1, 'rate_limited', 'rate_limited', NULL),
		(1, 'advances', 'advances', '{"outcome": "advanced"}'),
		(2, 'advances_stale', 'advances', '{"outcome": "stale"}'),
		(1, 'appends_appended', 'appends', '{"outcome": "appended"}'),
		(2, 'appends_duplicate', 'appends', '{"outcome": "duplicate"}'),
		(3, 'appends_overlap', 'appends', '{"outcome": "overlap"}'),
		(4, 'appends_gap', 'appends', '{"outcome": "gap"}'),
		(5, 'appends_in_flight', 'appends', '{"outcome": "in_flight"}'),
		(6, 'appends_version_conflict', 'appends', '{"outcome": "version_conflict"}'),
		(1, 'once_first', 'once', '{"outcome": "first"}'),
		(2, 'once_seen', 'once', '{"outcome": "seen"}'),
		(1, 'messages_published', 'messages_published', NULL),
		(1, 'messages_taken', 'messages_taken', NULL),
		(1, 'messages_acked', 'messages_acked', NULL),
		(1, 'messages_nacked', 'messages_nacked', NULL),
		(1, 'messages_dead', 'messages_dead', NULL),
		(1, 'keys_deleted', 'rows_deleted', '{"table": "idem_keys"}'),
		(2, 'tokens_deleted', 'rows_deleted', '{"table": "idem_tokens"}'),
		(3, 'messages_deleted', 'rows_deleted', '{"table": "idem_outbox"}'),
		(1, 'cleanup_passes', 'cleanup_passes', NULL)
	),
	cleaned (n, source, table_name) AS (VALUES
		(1, 'keys', 'idem_keys'), (2, 'tokens', 'idem_tokens'), (3, 'acked', 'idem_outbox')
	),
	records AS (
		SELECT c.n, c.table_name,
			CASE WHEN d.complete THEN greatest(r.live_rows - d.counted, 0::"numeric")
				ELSE round(r.live_rows * r.live_share) END AS live,
			CASE WHEN d.complete THEN d.counted
				ELSE greatest(d.counted, round(r.live_rows *
					(1::"numeric" - r.live_share))) END AS expired
		FROM cleaned AS c
		JOIN data AS d ON d.source = c.source
		JOIN @extschema@.idem_table_stats() AS t ON t.table_name = c.table_name
		LEFT JOIN LATERAL @extschema@.idem_sample_data(CASE WHEN NOT d.complete THEN c.source END) AS s ON true
		CROSS JOIN LATERAL (SELECT t.live_rows::"numeric" AS live_rows,
			coalesce(s.live_share, 0::float8)::"numeric" AS live_share) AS r
		WHERE c.source <> 'acked' AND d.fault IS NULL
	),
	blocked AS MATERIALIZED (
		SELECT b.reason, @extschema@.idem_blocked_seconds(b.blocked_since, b.until) AS seconds
		FROM data AS d
		CROSS JOIN LATERAL @extschema@.idem_outbox_blocked(CASE WHEN d.fault IS NULL THEN 5000 ELSE 0 END) AS b
		WHERE d.source = 'pending'
	),
	samples (n, family, suffix, label, value) AS (
		SELECT c.n, c.family, '_total', c.label::jsonb, v.value::float8
		FROM counters AS c
		JOIN (
			SELECT e.key, e.value
			FROM stats AS s
			CROSS JOIN LATERAL jsonb_each_text(to_jsonb(s)) AS e
		) AS v ON v.key = c.stat
		UNION ALL
		SELECT 1, 'stats_reset_timestamp_seconds', '', NULL, EXTRACT(epoch FROM s.stats_reset)::float8
		FROM stats AS s
		UNION ALL
		SELECT 1, 'last_cleanup_timestamp_seconds', '', NULL, EXTRACT(epoch FROM s.last_cleanup)::float8
		FROM stats AS s
		WHERE s.last_cleanup IS NOT NULL
		UNION ALL
		SELECT c.n, 'cleanup_lag_seconds', '', jsonb_build_object('table', c.table_name), d.overdue
		FROM cleaned AS c
		JOIN data AS d ON d.source = c.source
		WHERE d.fault IS NULL
		UNION ALL
		SELECT 2 * r.n + v.n, 'records', '',
			jsonb_build_object('table', r.table_name, 'state', v.state), v.value::float8
		FROM records AS r
		CROSS JOIN LATERAL (VALUES (1, 'live', r.live), (2, 'expired', r.expired)) AS v (n, state, value)
		UNION ALL
		SELECT s.n, 'outbox_messages', '', jsonb_build_object('state', s.state),
			CASE WHEN s.state = 'due' THEN d.due
				WHEN s.state = 'waiting' THEN d.counted - d.due
				ELSE d.counted END::float8
		FROM data AS d
		JOIN (VALUES (1, 'pending', 'due'), (2, 'pending', 'waiting'), (3, 'dead', 'dead')) AS s (n, source, state)
			ON s.source = d.source
		WHERE d.fault IS NULL AND (d.complete OR d.counted > 0::"numeric" OR d.source <> 'dead')
		UNION ALL
		SELECT 1, 'outbox_oldest_age_seconds', '', NULL, d.overdue
		FROM data AS d
		WHERE d.source = 'pending' AND d.overdue IS NOT NULL
		UNION ALL
		SELECT r.n, 'outbox_blocked_keys', '', jsonb_build_object('state', r.reason),
			(SELECT count(*) FROM blocked AS b WHERE b.reason = r.reason)::float8
		FROM data AS d
		CROSS JOIN (VALUES (1, 'leased'), (2, 'paused'), (3, 'held'), (4, 'lost')) AS r (n, reason)
		WHERE d.source = 'pending' AND d.fault IS NULL
		UNION ALL
		SELECT 1, 'outbox_blocked_seconds', '', NULL,
			coalesce((SELECT max(b.seconds) FROM blocked AS b), 0::float8)
		FROM data AS d
		WHERE d.source = 'pending' AND d.fault IS NULL
		UNION ALL
		SELECT row_number() OVER ()::int4, 'table_unusable', '',
			jsonb_build_object('table', f.table_name),
			CASE WHEN f.fault IS NULL THEN 0 ELSE 1 END::float8
		FROM @extschema@.idem_table_faults() AS f
		UNION ALL
		SELECT 1, 'build', '_info', jsonb_build_object('version', e.extversion,
			'server_version', current_setting('server_version')), 1::float8
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
	)
	SELECT f.name || s.suffix,
		jsonb_build_object('datname', current_database())
			|| coalesce(s.label, '{}'::jsonb),
		s.value, f.type, f.help
	FROM samples AS s
	JOIN @extschema@.idem_metric_families() AS f
		ON f.name = ('idempotency_' || s.family)
	-- The portable edition counts no calls.
	WHERE s.value IS NOT NULL
	ORDER BY f.ordinal, s.n;
END;
COMMENT ON FUNCTION @extschema@.idem_metric_samples() IS
'Metrics of this database, one row for each sample: the counters of idem_stats, live and expired records, outbox depth and age, cleanup lag, tables that were altered or are locked. type: counter, gauge or info. It can be called every few seconds: it reads a bounded part of a few indexes, and no table completely. Reads only; works on a hot standby.';

CREATE FUNCTION @extschema@.idem_metrics()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH samples AS MATERIALIZED (
		SELECT s.*
		FROM @extschema@.idem_metric_samples() WITH ORDINALITY AS s (name, labels, value, type, help, ordinal)
	),
	lines (ordinal, name, text) AS (
		SELECT s.ordinal, s.name, format(E'%s{%s} %s\n', s.name,
			-- datname first, then table before state, and version before server_version.
			(SELECT string_agg(format('%s="%s"', l.key,
					replace(replace(replace(
						l.value, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n')), ','
					ORDER BY l.key = 'datname' DESC, l.key COLLATE "C" DESC)
				FROM jsonb_each_text(s.labels) AS l),
			replace(s.value::text, 'Infinity', '+Inf'))
		FROM samples AS s
	)
	SELECT string_agg(format(E'# TYPE %1$s %2$s\n%3$s# HELP %1$s %4$s\n%5$s',
			f.name, f.type,
			CASE WHEN f.unit IS NOT NULL THEN format(E'# UNIT %s %s\n', f.name, f.unit) END,
			f.help,
			(SELECT string_agg(l.text, '' ORDER BY l.ordinal)
				FROM lines AS l
				WHERE l.name = (f.name ||
					CASE WHEN f.type = 'counter' THEN '_total'
						WHEN f.type = 'info' THEN '_info' ELSE '' END))),
		'' ORDER BY f.ordinal)
		|| '# EOF'
	FROM @extschema@.idem_metric_families() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_metrics() IS
'The result of idem_metric_samples as OpenMetrics 1.0 text.';

CREATE FUNCTION @extschema@.idem_worker_absence()
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_worker_absence() IS
'Why no background worker cleans this database, for idem_health; NULL if one should.';

-- Returns the oldest session, prepared transaction or replication slot that keeps
-- vacuum from removing dead rows here. A session that began to read while an
-- older transaction was open holds back vacuum as much as that transaction, but
-- it is not the cause, so owners of a transaction come first. Holders younger than
-- a minute, or than 10000 transactions if no time is known, do not count.
CREATE FUNCTION @extschema@.idem_vacuum_holder()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000
BEGIN ATOMIC
	SELECT format('vacuum is held back by %s, for %s transactions%s', h.holder, h.age,
		', ' ||
			date_trunc('second', clock_timestamp() - h.since)::text)
	FROM (
		SELECT CASE WHEN a.xact_start IS NULL THEN format('session %s (%s)', a.pid, a.backend_type)
				ELSE format('the transaction of session %s', a.pid) END AS holder,
			greatest(age(a.backend_xid), age(a.backend_xmin)) AS age, a.xact_start AS since,
			-- A session whose own transaction is the oldest comes before those that began later.
			CASE WHEN age(a.backend_xid) >= coalesce(age(a.backend_xmin), 0) THEN 2 ELSE 3 END AS rank
		FROM pg_stat_activity AS a
		WHERE (a.datname IS NULL OR a.datname = current_database())
			-- Vacuums do not hold back other vacuums.
			AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v
				WHERE v.pid = a.pid)
		UNION ALL
		SELECT format('prepared transaction "%s"', p.gid), age(p.transaction), p.prepared, 1
		FROM pg_prepared_xacts AS p
		WHERE p.database = current_database()
		UNION ALL
		SELECT format('replication slot "%s"', s.slot_name), age(s.xmin), NULL, 4
		FROM pg_replication_slots AS s
	) AS h
	WHERE h.age IS NOT NULL
		AND CASE WHEN h.since IS NULL THEN h.age >= 10000
			ELSE h.since <
				(clock_timestamp() - '1 minute'::"interval") END
	ORDER BY h.age DESC, h.rank, h.since
	LIMIT 1;
END;
COMMENT ON FUNCTION @extschema@.idem_vacuum_holder() IS
'The session, prepared transaction or replication slot that keeps vacuum from removing dead rows of this database, for idem_health.';

CREATE FUNCTION @extschema@.idem_unvacuumed_tables()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000
BEGIN ATOMIC
	SELECT CASE WHEN NOT current_setting('autovacuum')::bool THEN 'autovacuum is off'
			WHEN count(*) > 0::int8 THEN format('autovacuum is off for %s',
				string_agg(c.relname::text, ', '::text ORDER BY c.relname)) END
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_class'::regclass::oid
	JOIN pg_class AS c ON c.oid = d.objid
	CROSS JOIN LATERAL pg_options_to_table(c.reloptions) AS o
	WHERE e.extname = 'idempotency'::name
		AND c.relnamespace = e.extnamespace
		AND c.relkind = 'r'::"char"
		AND o.option_name = 'autovacuum_enabled'
		AND NOT o.option_value::bool;
END;
COMMENT ON FUNCTION @extschema@.idem_unvacuumed_tables() IS
'The tables of the extension for which autovacuum is off, for idem_health; NULL if there are none.';

CREATE FUNCTION @extschema@.idem_sequences_behind(highest_token bigint,
	OUT name text, OUT behind bigint)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_sequences_behind(bigint) IS
'The sequences that would repeat numbers, because the last one is below the highest message id, or below this claim token, and by how much. For idem_health.';

-- idem_health() runs this with the rights of the tables' owner. So it reads a
-- table of this name only if a superuser has created it.
CREATE FUNCTION @extschema@.idem_unfinished_moves(
	OUT moves bigint, OUT seconds double precision, OUT detail text)
RETURNS SETOF record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF EXISTS (SELECT FROM pg_class AS c
			JOIN pg_namespace AS n ON n.oid = c.relnamespace
			JOIN pg_roles AS c_owner ON c_owner.oid = c.relowner
			JOIN pg_roles AS n_owner ON n_owner.oid = n.nspowner
			WHERE n.nspname = 'idem_guard' AND c.relname = 'places' AND c.relkind = 'r'
				AND c_owner.rolsuper AND n_owner.rolsuper AND NOT c.relrowsecurity
				AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')) THEN
		RETURN QUERY EXECUTE '
			SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - p.since)), 0)::float8,
				(array_agg(format(''%s is %s'', CASE p.scope WHEN '''' THEN ''slot '' || p.slot
					ELSE ''a scope of slot '' || p.slot END, p.state) ORDER BY p.since))[1]
			FROM idem_guard.places AS p WHERE p.state IN (''leaving'', ''arriving'')';
	END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.idem_unfinished_moves() IS
'On a shard: unfinished moves of slots and scopes, for idem_health. seconds: how long the oldest is in its state. No row in other databases.';

CREATE FUNCTION @extschema@.idem_health(
	OUT check_name text, OUT status text, OUT value double precision,
	OUT threshold double precision, OUT detail text)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 10
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	-- The settings are defined when the C functions below load the library, before this runs.
	WITH settings AS MATERIALIZED (
		SELECT s.name,
			CASE WHEN s.unit = 'ms'
				THEN s.setting::float8 / 1000::float8
				ELSE s.setting::float8 END AS value
		FROM pg_settings AS s
		WHERE starts_with(s.name, 'idempotency.health_')
			OR s.name = 'idempotency.cleanup_interval'
	),
	here AS MATERIALIZED (
		SELECT pg_is_in_recovery() AS is_standby,
			a.absence AS worker_absence,
			@extschema@.idem_cleanup_idle() AS idle,
			(SELECT s.value FROM settings AS s
				WHERE s.name = 'idempotency.cleanup_interval') AS cleanup_interval,
			s.last_cleanup, s.stats_reset
		FROM (SELECT @extschema@.idem_worker_absence() AS absence OFFSET 0) AS a
		-- No row if there is no space for the statistics.
		LEFT JOIN (
			SELECT s.last_cleanup, s.stats_reset
			FROM @extschema@.idem_stats_data() AS s
			JOIN pg_database AS d ON d.oid = s.datid
			WHERE d.datname = current_database()
		) AS s ON true
	),
	data AS MATERIALIZED (
		SELECT d.source, sum(d.counted)::float8 AS counted,
			max(d.overdue) AS overdue, bool_and(d.complete) AS complete,
			min(d.fault) AS fault
		FROM @extschema@.idem_monitoring_data() AS d
		GROUP BY d.source
	),
	tables AS MATERIALIZED (
		SELECT t.* FROM @extschema@.idem_table_stats() AS t
	),
	-- Why dead rows can stay.
	vacuum AS MATERIALIZED (
		SELECT CASE WHEN NOT h.is_standby THEN @extschema@.idem_unvacuumed_tables() END AS missing,
			@extschema@.idem_vacuum_holder() AS holder
		FROM here AS h
	),
	sample AS MATERIALIZED (
		SELECT s.* FROM @extschema@.idem_sample_data('keys') AS s
	),
	evidence AS MATERIALIZED (
		SELECT v.name, v.time
		FROM (
			SELECT c.name, c.latest
			FROM @extschema@.idem_clock_evidence() AS c
			UNION ALL
			SELECT 'the last reset of the statistics', h.stats_reset
			FROM here AS h
			UNION ALL
			SELECT 'the start of the server', pg_postmaster_start_time()
			UNION ALL
			SELECT 'the last transaction replayed', pg_last_xact_replay_timestamp()
			UNION ALL
			SELECT 'a claim', s.newest
			FROM sample AS s
		) AS v (name, time)
		WHERE v.time IS NOT NULL
		ORDER BY v.time DESC
		LIMIT 1
	),
	faults AS MATERIALIZED (
		SELECT count(*)::float8 AS faults,
			string_agg(f.fault, '; ' ORDER BY f.table_name) AS fault
		FROM @extschema@.idem_table_faults() AS f
		WHERE f.fault IS NOT NULL
	),
	-- The longest wait first; "state" is a clause.
	blocked AS MATERIALIZED (
		SELECT b.first_id, b.topic, b.reason, s.seconds,
			CASE WHEN b.reason = 'lost' THEN 'found by no relay: call idem_repair_outbox()'
				WHEN b.reason = 'held' AND b.pid IS NULL THEN 'held by a prepared transaction'
				WHEN b.reason = 'held' THEN 'held by process ' || b.pid
				ELSE format('%s until %s', b.reason, b.until) END AS state,
			count(*) OVER () AS rows, b.n,
			row_number() OVER (PARTITION BY b.reason = ANY (ARRAY['held', 'lost']) ORDER BY b.n) AS n_of_kind
		FROM data AS d
		CROSS JOIN LATERAL @extschema@.idem_outbox_blocked(CASE WHEN d.fault IS NULL THEN 5000 ELSE 0 END)
			WITH ORDINALITY AS b (topic, first_id, blocked_since, waiting, reason, until, pid, n)
		CROSS JOIN LATERAL (SELECT @extschema@.idem_blocked_seconds(b.blocked_since, b.until) AS seconds) AS s
		WHERE d.source = 'pending'
	),
	-- "fault": why the value of a check can be incomplete.
	checks (n, name, value, factor, fault, hint) AS (
		SELECT 1, 'worker',
			CASE WHEN NOT h.is_standby AND h.stats_reset IS NOT NULL THEN h.idle END,
			CASE WHEN h.worker_absence IS NULL AND h.stats_reset IS NOT NULL THEN 5 END, NULL,
			concat_ws('; ',
				CASE WHEN h.last_cleanup IS NOT NULL THEN 'since the last cleanup ended'
					WHEN h.stats_reset IS NOT NULL THEN 'no cleanup has ended yet' END,
				'not judged, because ' || coalesce(
					'no worker visits this database: ' || h.worker_absence,
					CASE WHEN h.stats_reset IS NULL THEN 'there is no space for the statistics of this database' END))
		FROM here AS h
		UNION ALL
		SELECT 2, 'cleanup_lag', d.overdue, 5,
			(SELECT string_agg(DISTINCT f.fault, '; ') FROM data AS f
				WHERE f.source = ANY (ARRAY['keys', 'tokens', 'acked'])),
			CASE WHEN d.overdue > 0::float8
				THEN format('the oldest expired %s is not deleted yet%s',
					CASE WHEN d.source = 'acked' THEN 'message'
						WHEN d.source = 'keys' THEN 'key' ELSE 'token' END,
					CASE WHEN NOT d.complete THEN ', estimated' END)
				ELSE 'no expired row is left' END
		FROM (SELECT d.* FROM data AS d
			WHERE d.source = ANY (ARRAY['keys', 'tokens', 'acked'])
			ORDER BY d.overdue DESC NULLS LAST, d.source LIMIT 1) AS d
		UNION ALL
		SELECT 3, 'outbox_oldest', d.overdue, 5, d.fault,
			CASE WHEN d.overdue > 0::float8
				THEN concat_ws('; ', format('since a message became due; undelivered: %s%s', d.counted,
						CASE WHEN NOT d.complete THEN ' or more' END),
					(SELECT format('message %s, topic "%s", is %s', b.first_id, b.topic, b.state)
						FROM blocked AS b WHERE b.n_of_kind = 1::int8 AND b.reason = ANY (ARRAY['held', 'lost'])))
				WHEN d.overdue IS NULL THEN concat_ws('; ',
					'not known, because vacuum could not remove the dead rows of taken messages',
					@extschema@.idem_vacuum_holder())
				ELSE 'no message is due' END
		FROM data AS d
		WHERE d.source = 'pending'
		UNION ALL
		SELECT 4, 'outbox_blocked', CASE WHEN d.fault IS NULL THEN coalesce(b.seconds, 0::float8) END, 5, d.fault,
			CASE WHEN b.rows > 0::int8
				THEN format('due messages wait, see idem_outbox_blocked() (%s); the longest for message %s, topic "%s", which is %s',
					CASE WHEN b.rows = 1::int8 THEN '1 row' ELSE b.rows || ' rows' END, b.first_id, b.topic, b.state)
				ELSE 'no due message waits for another one of its key, or for a transaction' END
		FROM data AS d
		LEFT JOIN blocked AS b ON b.n = 1::int8
		WHERE d.source = 'pending'
		UNION ALL
		SELECT 5, 'dead_letters',
			CASE WHEN d.complete OR d.counted > 0::float8 THEN d.counted END, 5, d.fault,
			concat_ws('; ', 'messages that have no attempts left; idem_outbox_requeue() makes them pending again',
				CASE WHEN d.complete THEN NULL
					WHEN d.counted > 0::float8 THEN 'there are more'
					ELSE 'not known, because vacuum could not remove the dead rows of requeued messages' END)
		FROM data AS d
		WHERE d.source = 'dead'
		UNION ALL
		-- If this is a sample, a probable lower limit: the number of pages with
		-- a stuck lease in a sample varies by twice its square root.
		SELECT 6, 'stuck_leases',
			CASE WHEN s.share = 1::float8 THEN s.stuck::float8
				WHEN s.stuck_pages <= 4::int8 THEN 0::float8
				ELSE round(s.stuck::float8 / s.share *
					(1::float8 -
						(2::float8 / sqrt(s.stuck_pages::float8))))
				END, 5, s.fault,
			concat_ws('; ', 'claims whose lease expired more than a minute ago, see idem_abandoned()',
				CASE WHEN s.share < 1::float8 THEN
					format('estimated lower limit: %s were found in %s %% of the table', s.stuck,
						round((100::float8 * s.share)::"numeric", 2)) END)
		FROM sample AS s
		UNION ALL
		-- Autovacuum soon removes a few dead rows, unless something prevents it.
		SELECT 7, 'bloat', CASE WHEN NOT h.is_standby THEN coalesce(t.share, 0::float8) END, 5, NULL,
			concat_ws('; ',
				CASE WHEN h.is_standby THEN 'not known on a standby'
					WHEN t.table_name IS NOT NULL THEN format('%s has %s dead and %s live rows', t.table_name, t.dead_rows, t.live_rows)
					WHEN v.missing IS NULL AND v.holder IS NULL THEN 'no table has 16 MB of dead rows'
					ELSE 'no table has 1000 dead rows' END,
				v.missing, v.holder)
		FROM here AS h
		CROSS JOIN vacuum AS v
		LEFT JOIN LATERAL (
			SELECT t.table_name, t.dead_rows, t.live_rows,
				t.dead_rows::float8 /
					(t.dead_rows + t.live_rows)::float8 AS share
			FROM tables AS t
			WHERE t.dead_rows >= 1000::int8
				AND (t.dead_bytes >= 16777216::int8 OR v.missing IS NOT NULL OR v.holder IS NOT NULL)
			ORDER BY 4 DESC LIMIT 1) AS t ON true
		UNION ALL
		SELECT 8, 'clock',
			greatest(EXTRACT(epoch FROM e.time - e.clock), 0::"numeric")::float8, 5, NULL,
			CASE WHEN e.time > e.clock
				THEN e.name || ' is in the future: the clock was set back, or another server''s is ahead; messages wait until then, and block their keys'
				ELSE 'no recorded time is in the future' END
		-- The clock is read after the evidence.
		FROM (SELECT e.*, clock_timestamp() AS clock FROM evidence AS e) AS e
		UNION ALL
		SELECT 9, 'tables', f.faults, 1, NULL,
			coalesce(f.fault || '; calls that need it fail or wait', 'all tables and sequences can be used')
		FROM faults AS f
		UNION ALL
		SELECT 10, 'sequences', coalesce(max(b.behind), 0::int8)::float8, 1, s.fault,
			coalesce(string_agg(format('sequence %s is %s behind its table', b.name, b.behind), '; '::text ORDER BY b.name)
					FILTER (WHERE b.name IS NOT NULL) || '; idem_raise_claim_tokens() raises it',
				'no sequence is behind its table')
		FROM sample AS s
		LEFT JOIN LATERAL @extschema@.idem_sequences_behind(s.highest_token) AS b ON true
		GROUP BY s.fault
		UNION ALL
		SELECT 11, 'moves', m.seconds, 5, NULL,
			CASE WHEN m.moves > 0::int8
				THEN format('unfinished moves: %s; %s; run scale-out/move again, or with --back', m.moves, m.detail)
				ELSE 'no slot and no scope is being moved' END
		FROM @extschema@.idem_unfinished_moves() AS m
	),
	judged AS (
		SELECT c.n, c.name, c.value, c.fault, t.threshold,
			concat_ws('; ',
				CASE WHEN t.threshold = 0::float8 THEN 'switched off' END,
				'incomplete: ' || c.fault,
				CASE WHEN c.fault IS NULL OR c.value IS NOT NULL THEN c.hint END) AS detail,
			-- For a share, the multiple applies to the ratio of dead to live rows.
			CASE WHEN c.name = 'bloat'
				THEN c.factor::float8 * t.threshold /
					(1::float8 +
						((c.factor - 1)::float8 * t.threshold))
				ELSE c.factor::float8 * t.threshold
			END AS critical
		FROM checks AS c
		JOIN settings AS s ON s.name = ('idempotency.health_' || c.name)
		CROSS JOIN here AS h
		-- A cleanup is not late before two intervals have passed.
		CROSS JOIN LATERAL (SELECT
			CASE WHEN c.n <= 2 AND s.value > 0::float8
				THEN greatest(s.value, 2::float8 * h.cleanup_interval)
				ELSE s.value END AS threshold) AS t
	)
	SELECT r.name, r.status, r.value, r.threshold, r.detail
	FROM (
		SELECT j.n, j.name,
			CASE WHEN j.threshold = 0::float8 THEN 'ok'
				WHEN j.fault IS NOT NULL OR j.value >= j.critical THEN 'critical'
				WHEN j.value >= j.threshold AND j.critical IS NOT NULL THEN 'warning'
				WHEN j.value IS NULL AND j.name IN ('outbox_oldest', 'dead_letters') THEN 'warning'
				ELSE 'ok' END AS status,
			j.value, j.threshold, j.detail
		FROM judged AS j
		UNION ALL
		-- The language of the functions decides, not the script.
		SELECT 12, 'edition', 'ok', NULL, NULL, CASE l.lanname WHEN 'c'::name THEN 'C' ELSE 'portable' END
		FROM pg_extension AS e
		JOIN pg_proc AS p ON p.pronamespace = e.extnamespace AND p.proname = 'idem_claim'::name
		JOIN pg_language AS l ON l.oid = p.prolang
		WHERE e.extname = 'idempotency'::name
	) AS r
	ORDER BY r.n;
END;
COMMENT ON FUNCTION @extschema@.idem_health() IS
'Health of this database, one row for each check: worker, cleanup_lag, outbox_oldest, outbox_blocked, dead_letters, stuck_leases, bloat, clock, tables, sequences, moves (on a shard), and edition, whose detail is C or portable. status: ok; warning from the threshold on, which is setting idempotency.health_<check_name>; critical from five times the threshold on (tables: from the threshold on), and if a table that was altered or is locked hides the value. outbox_oldest, dead_letters: also a warning if too many dead rows hide the value, which is then NULL. Times are in seconds. Its cost is bounded: it reads a sample of a large idem_keys. Reads only; works on a hot standby.';

CREATE FUNCTION @extschema@.idem_redacted_key(key text)
RETURNS text
LANGUAGE c STABLE STRICT PARALLEL SAFE COST 10
AS 'MODULE_PATHNAME', 'idem_redacted_key_text';
COMMENT ON FUNCTION @extschema@.idem_redacted_key(text) IS
'A request key as messages show it: its first four characters and its length.';

CREATE FUNCTION @extschema@.idem_check_interval(value interval, name text)
RETURNS void
LANGUAGE c STABLE PARALLEL SAFE COST 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_check_interval(interval, text) IS
'Raises 22004 for NULL, 22023 for a negative interval. name: its name in the message.';

CREATE FUNCTION @extschema@.idem_abandoned(older_than interval DEFAULT '5 minutes',
	OUT scope text, OUT key text, OUT age interval, OUT attempt int, OUT recovery_point text,
	OUT lease_expires_at timestamptz)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 10
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_interval(coalesce(older_than, '5 minutes'::"interval"), 'older_than'::text);
	SELECT k.scope, @extschema@.idem_redacted_key(k.key),
		-- A time from a dump can be infinite.
		CASE WHEN isfinite(coalesce(k.lease_expires_at, k.resume_at))
			THEN c.clock - coalesce(k.lease_expires_at, k.resume_at) END,
		k.attempt, k.recovery_point, k.lease_expires_at
	FROM (SELECT clock_timestamp() AS clock,
		current_setting('idempotency.max_attempts')::int4 AS max_attempts OFFSET 0) AS c
	CROSS JOIN @extschema@.idem_keys AS k
	WHERE ((k.state = 'started'
				AND k.lease_expires_at <
					(c.clock - coalesce(older_than, '5 minutes'::"interval")))
			-- idem_resume() does not take these, so they stay as they are.
			OR (k.resume_at <= c.clock AND k.attempt >= c.max_attempts))
		AND k.expires_at > c.clock
	ORDER BY coalesce(k.lease_expires_at, k.resume_at), k.claim_token;
END;
COMMENT ON FUNCTION @extschema@.idem_abandoned(interval) IS
'Abandoned claims, oldest first: claims whose lease expired more than older_than ago (NULL: 5 minutes); and, without that delay, claims that stored a request, have had idempotency.max_attempts attempts, and have failed or whose lease has expired, which idem_resume does not take. Expired records are not shown. age: time since the lease expired or the claim failed. key: its first four characters and its length. recovery_point: the last checkpoint. Reads all of idem_keys. Reads only; works on a hot standby. Raises 22023.';

--
-- Access: the privileges of application roles
--

CREATE FUNCTION @extschema@.idem_application_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 24
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_request_hash', 'idem_canonical_json',
			'idem_key_is_valid', 'idem_claim', 'idem_complete', 'idem_checkpoint',
			'idem_claim_many', 'idem_complete_many', 'idem_resume',
			'idem_heartbeat', 'idem_fail', 'idem_release', 'idem_lookup', 'idem_run',
			'idem_try_advance', 'idem_toggle', 'idem_set', 'idem_is_active', 'idem_action_states',
			'idem_try_advance_many', 'idem_set_many',
			'idem_try_append', 'idem_last_client_seq', 'idem_once', 'idem_once_many', 'idem_once_at',
			'idem_publish', 'idem_publish_many'
		]::name[]);
END;
COMMENT ON FUNCTION @extschema@.idem_application_functions() IS
'The functions that idem_grant grants to an application role.';

CREATE FUNCTION @extschema@.idem_relay_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 10
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND starts_with(p.proname, 'idem_outbox_');
END;
COMMENT ON FUNCTION @extschema@.idem_relay_functions() IS
'The functions that idem_grant_relay grants to the role of a relay.';

CREATE FUNCTION @extschema@.idem_application_types()
RETURNS SETOF regtype
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 11
BEGIN ATOMIC
	SELECT d.objid::regtype
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_type'::regclass
	JOIN pg_type AS t ON t.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND t.typnamespace = e.extnamespace
		AND t.typname = ANY (ARRAY[
			'idem_claim_result', 'idem_lookup_result', 'idem_response', 'idem_run_result',
			'idem_advance_result', 'idem_action_result', 'idem_append_result',
			'idem_claim_many_result', 'idem_complete_many_result',
			'idem_advance_many_result', 'idem_set_many_result'
		]::name[]);
END;
COMMENT ON FUNCTION @extschema@.idem_application_types() IS
'The types that idem_grant grants to an application role, so that it can create functions and views with these result types.';

CREATE FUNCTION @extschema@.idem_monitor_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 4
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_stats_data', 'idem_metric_samples', 'idem_metrics', 'idem_health',
			'idem_outbox_blocked'
		]::name[]);
END;
COMMENT ON FUNCTION @extschema@.idem_monitor_functions() IS
'The functions that idem_grant_monitor grants to a monitoring role.';

CREATE FUNCTION @extschema@.idem_granted_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 50
BEGIN ATOMIC
	SELECT f FROM @extschema@.idem_application_functions() AS f
	UNION
	SELECT f FROM @extschema@.idem_relay_functions() AS f
	UNION
	SELECT f FROM @extschema@.idem_monitor_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_granted_functions() IS
'All functions that idem_revoke revokes.';

CREATE FUNCTION @extschema@.idem_monitor_views()
RETURNS SETOF regclass
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 1
BEGIN ATOMIC
	SELECT d.objid::regclass
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_class'::regclass
	JOIN pg_class AS c ON c.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND c.relnamespace = e.extnamespace
		AND c.relname = 'idem_stats';
END;
COMMENT ON FUNCTION @extschema@.idem_monitor_views() IS
'The views that idem_grant_monitor grants to a monitoring role.';

-- The statements GRANT and REVOKE contain names. The locks keep the schema and
-- the role from being renamed until they have run. Otherwise another schema or
-- role that gets the name could get the privileges.
CREATE FUNCTION @extschema@.idem_check_grantee(grantee regrole)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_check_grantee(regrole) IS
'Raises an error unless idem_grant, idem_grant_relay, idem_grant_monitor and idem_revoke can work on this role. Until the transaction ends, neither this role nor the extension''s schema can be renamed.';

CREATE FUNCTION @extschema@.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_execute_grant(text) IS
'Runs a GRANT or REVOKE with the caller''s rights, for idem_grant, idem_grant_relay, idem_grant_monitor and idem_revoke. NULL does nothing. Raises 42601 for any other statement.';

-- The functions below can be called by a superuser, or run with the rights of
-- one, in a schema that might belong to another role. Therefore their bodies are
-- parsed when they are created.

-- The functions' owner is the grantor, whichever administrator calls. So the
-- privileges stay when that administrator is dropped, any other one can revoke
-- them, and a dump can be restored if the administrator has no privileges there.

CREATE FUNCTION @extschema@.idem_grant_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_application_functions() AS f;
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON TYPE %s TO %s',
			string_agg(t::text, ', '::text), $1))
		FROM @extschema@.idem_application_types() AS t;
END;
COMMENT ON FUNCTION @extschema@.idem_grant_as_owner(regrole) IS
'The part of idem_grant that runs with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_grant_relay_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_relay_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_grant_relay_as_owner(regrole) IS
'The part of idem_grant_relay that runs with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_grant_monitor_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_monitor_functions() AS f;
	SELECT @extschema@.idem_execute_grant(format('GRANT SELECT ON TABLE %s TO %s',
			string_agg(v::text, ', '::text), $1))
		FROM @extschema@.idem_monitor_views() AS v;
END;
COMMENT ON FUNCTION @extschema@.idem_grant_monitor_as_owner(regrole) IS
'The part of idem_grant_monitor that runs with the rights of the functions'' owner.';

-- Does not revoke privileges with grant option, or the owner's own, so that
-- administrators cannot revoke each other's rights.
CREATE FUNCTION @extschema@.idem_revoke_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_granted_functions() AS f
		JOIN pg_proc AS p ON p.oid = f::oid
		CROSS JOIN LATERAL aclexplode(p.proacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor = p.proowner
			AND a.grantee <> p.proowner
			AND NOT a.is_grantable;
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE USAGE ON TYPE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_application_types() AS f
		JOIN pg_type AS t ON t.oid = f::oid
		CROSS JOIN LATERAL aclexplode(t.typacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor = t.typowner
			AND a.grantee <> t.typowner
			AND NOT a.is_grantable;
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE SELECT ON TABLE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_monitor_views() AS f
		JOIN pg_class AS c ON c.oid = f::oid
		CROSS JOIN LATERAL aclexplode(c.relacl) AS a
		WHERE a.grantee = $1::oid
			AND a.privilege_type = 'SELECT'
			AND a.grantor = c.relowner
			AND a.grantee <> c.relowner
			AND NOT a.is_grantable;
END;
COMMENT ON FUNCTION @extschema@.idem_revoke_as_owner(regrole) IS
'The part of idem_revoke that runs with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_warn_of_rest(grantee regrole, remaining boolean)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF remaining AND grantee IS NOT NULL THEN
		RAISE WARNING USING ERRCODE = '01006',
			MESSAGE = format('role "%s" can still execute functions of extension "idempotency"', grantee),
			HINT = 'It administers the extension, is a member of a role that can execute them, or has them from another grantor, who can revoke that.';
	END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.idem_warn_of_rest(regrole, boolean) IS
'Warns the caller of idem_revoke about privileges that it could not revoke.';

-- A REVOKE revokes the grants of one role. For a superuser that is the owner. For
-- other roles it is the first role with the grant option that the server finds,
-- beginning with the current one. If there are several others, it is unknown.
CREATE FUNCTION @extschema@.idem_grantor(acl aclitem[], owner oid)
RETURNS oid
LANGUAGE sql STABLE PARALLEL SAFE COST 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT CASE WHEN r.rolsuper THEN $2
			WHEN bool_or(c.candidate = r.oid) THEN r.oid
			WHEN count(c.candidate) = 1::int8 THEN min(c.candidate)
			END
	FROM pg_roles AS r
	LEFT JOIN (
		SELECT $2
		UNION
		SELECT a.grantee
		FROM aclexplode($1) AS a
		WHERE a.is_grantable
	) AS c (candidate) ON pg_has_role(c.candidate, 'USAGE')
	WHERE r.rolname = CURRENT_USER
	GROUP BY r.oid, r.rolsuper;
END;
COMMENT ON FUNCTION @extschema@.idem_grantor(aclitem[], oid) IS
'The role whose grants on this object a REVOKE by the current role revokes, for idem_revoke; NULL if that is not certain.';

-- The schema is not part of the extension, so the caller grants USAGE on it.
CREATE FUNCTION @extschema@.idem_grant(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON SCHEMA %s TO %s',
			e.extnamespace::regnamespace, $1))
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
			AND NOT has_schema_privilege($1::oid, e.extnamespace, 'USAGE');
	SELECT @extschema@.idem_grant_as_owner($1);
END;
COMMENT ON FUNCTION @extschema@.idem_grant(regrole) IS
'Grants a role the functions for applications, and USAGE on their types and schema. It does not grant the tables, the functions idem_outbox_* for relays, or the functions for administrators. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_grant_relay(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON SCHEMA %s TO %s',
			e.extnamespace::regnamespace, $1))
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
			AND NOT has_schema_privilege($1::oid, e.extnamespace, 'USAGE');
	SELECT @extschema@.idem_grant_relay_as_owner($1);
END;
COMMENT ON FUNCTION @extschema@.idem_grant_relay(regrole) IS
'Grants the role of a relay all idem_outbox_* functions, which read, acknowledge and requeue messages, and USAGE on their schema; nothing else. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_grant_monitor(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON SCHEMA %s TO %s',
			e.extnamespace::regnamespace, $1))
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
			AND NOT has_schema_privilege($1::oid, e.extnamespace, 'USAGE');
	SELECT @extschema@.idem_grant_monitor_as_owner($1);
END;
COMMENT ON FUNCTION @extschema@.idem_grant_monitor(regrole) IS
'Grants a role the view and functions for monitoring: idem_stats, idem_metric_samples, idem_metrics, idem_health and idem_outbox_blocked, and USAGE on their schema. They show no key, scope or payload. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_revoke(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	-- Also revoke what the caller has granted without these functions.
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_granted_functions() AS f
		JOIN pg_proc AS p ON p.oid = f::oid
		CROSS JOIN LATERAL aclexplode(p.proacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor <> p.proowner
			AND a.grantor = @extschema@.idem_grantor(p.proacl, p.proowner);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE USAGE ON TYPE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_application_types() AS f
		JOIN pg_type AS t ON t.oid = f::oid
		CROSS JOIN LATERAL aclexplode(t.typacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor <> t.typowner
			AND a.grantor = @extschema@.idem_grantor(t.typacl, t.typowner);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE SELECT ON TABLE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_monitor_views() AS f
		JOIN pg_class AS c ON c.oid = f::oid
		CROSS JOIN LATERAL aclexplode(c.relacl) AS a
		WHERE a.grantee = $1::oid
			AND a.privilege_type = 'SELECT'
			AND a.grantor <> c.relowner
			AND a.grantor = @extschema@.idem_grantor(c.relacl, c.relowner);
	SELECT @extschema@.idem_revoke_as_owner($1);
	SELECT @extschema@.idem_warn_of_rest($1,
			bool_or(has_function_privilege($1::oid, f::oid, 'EXECUTE')))
		FROM @extschema@.idem_granted_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_revoke(regrole) IS
'Revokes what idem_grant, idem_grant_relay and idem_grant_monitor have granted, by any caller, and what the current role has granted by other means; but not USAGE on the schema, which the role might need for other objects. Warns if the grantee can still execute functions. Raises 42501, 22004, 42704.';
--
-- Check that all objects are as they were written
--

-- The owner of the schema need not be the installer. In another session it could
-- rename the schema, and give its name to another one, while this script runs.
-- So no function of the extension has been called until now. All new objects must
-- be in the schema that was checked, and refer only to each other and to the
-- server's own objects. In an update, this checks the objects that it has added.
DO $check$
DECLARE
	stray pg_catalog.text;
BEGIN
	WITH RECURSIVE extension AS (
		SELECT e.oid, e.extnamespace
		FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
	),
	part (classid, objid, is_new) AS (
		SELECT d.classid, d.objid, pg_catalog.format('%s %s', d.classid, d.objid) OPERATOR(pg_catalog.<>) ALL (
			pg_catalog.string_to_array(pg_catalog.current_setting('idempotency_script.members'), ','))
		FROM extension AS e
		JOIN pg_catalog.pg_depend AS d
			ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
			AND d.refobjid OPERATOR(pg_catalog.=) e.oid
		WHERE d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char"
		UNION
		-- Indexes, rules, row types and the like
		SELECT d.classid, d.objid, p.is_new
		FROM part AS p
		JOIN pg_catalog.pg_depend AS d
			ON d.refclassid OPERATOR(pg_catalog.=) p.classid
			AND d.refobjid OPERATOR(pg_catalog.=) p.objid
		WHERE d.deptype OPERATOR(pg_catalog.=) ANY ('{a,i}'::pg_catalog."char"[])
	)
	SELECT pg_catalog.format('%s refers to %s',
			pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid),
			pg_catalog.pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
		INTO stray
		FROM part AS p
		JOIN pg_catalog.pg_depend AS d
			ON d.classid OPERATOR(pg_catalog.=) p.classid
			AND d.objid OPERATOR(pg_catalog.=) p.objid
		WHERE p.is_new
			AND d.deptype OPERATOR(pg_catalog.=) 'n'::pg_catalog."char"
			-- All but objects of initdb, and PL/pgSQL
			AND d.refobjid OPERATOR(pg_catalog.>=) 16384::pg_catalog.oid
			AND d.refclassid OPERATOR(pg_catalog.<>) 'pg_catalog.pg_language'::pg_catalog.regclass::pg_catalog.oid
			AND CASE WHEN d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'::pg_catalog.regclass::pg_catalog.oid
				THEN d.refobjid OPERATOR(pg_catalog.<>) (SELECT e.extnamespace FROM extension AS e)
				ELSE NOT EXISTS (SELECT FROM part AS r
					WHERE r.classid OPERATOR(pg_catalog.=) d.refclassid
						AND r.objid OPERATOR(pg_catalog.=) d.refobjid)
				END
		LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = 'another session has changed extension "idempotency" while it was installed',
			DETAIL = pg_catalog.format('%s.', stray),
			HINT = 'Install it into a schema in which no other role is allowed to create objects.';
	END IF;
END
$check$;

-- Privileges on all objects that this script has created: none for PUBLIC, all
-- for the owner of the database, and for pg_monitor those for monitoring. Other
-- privileges, which come from ALTER DEFAULT PRIVILEGES, are revoked. Then the
-- installer gets the privileges of the database's owner, unless it is a
-- superuser, who owns the objects.
--
-- Grants by the owner of the database are recorded as grants by
-- pg_database_owner. A dump repeats them in its name, for which it needs USAGE
-- on the schema. So it gets that, if the installer could grant it. If another
-- role owns the schema, it does not, because it would have USAGE only after a
-- superuser has restored a dump.
--
-- These grants, and those on the row types of tables, are not recorded as
-- initial privileges of the extension, but dumped (see access.c).
--
-- No other session can replace a function in this schema.
CREATE FUNCTION pg_temp.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME';
DO $grants$
DECLARE
	for_monitor CONSTANT pg_catalog.name[] := ARRAY['idem_stats', 'idem_stats_data', 'idem_metric_samples',
		'idem_metrics', 'idem_health', 'idem_outbox_blocked', 'idem_abandoned'];
	is_noted pg_catalog.bool;
	statement pg_catalog.text;
BEGIN
	FOR is_noted, statement IN
		WITH extension AS (
			SELECT e.oid, e.extowner, e.extnamespace
			FROM pg_catalog.pg_extension AS e
			WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
		),
		-- Privileges on older objects are not changed.
		member (classid, objid) AS (
			SELECT d.classid, d.objid
			FROM extension AS e
			JOIN pg_catalog.pg_depend AS d ON d.refobjid OPERATOR(pg_catalog.=) e.oid
			WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
				AND pg_catalog.format('%s %s', d.classid, d.objid) OPERATOR(pg_catalog.<>) ALL (
					pg_catalog.string_to_array(pg_catalog.current_setting('idempotency_script.members'), ','))
		),
		object (kind, name, label, privilege, acl, owner) AS (
			SELECT 'FUNCTION', p.proname, p.oid::pg_catalog.regprocedure::pg_catalog.text, 'EXECUTE',
				coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner)), p.proowner
			FROM member AS d
			JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) d.objid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid
				AND p.pronamespace OPERATOR(pg_catalog.<>) pg_catalog.pg_my_temp_schema()
			UNION ALL
			SELECT CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S'::pg_catalog."char" THEN 'SEQUENCE' ELSE 'TABLE' END,
				c.relname, c.oid::pg_catalog.regclass::pg_catalog.text, 'SELECT',
				coalesce(c.relacl, pg_catalog.acldefault(
					CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S'::pg_catalog."char" THEN 's' ELSE 'r' END::pg_catalog."char",
					c.relowner)), c.relowner
			FROM member AS d
			JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) d.objid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
				-- A composite type counts as a type only.
				AND c.relkind OPERATOR(pg_catalog.<>) 'c'::pg_catalog."char"
			UNION ALL
			SELECT 'TYPE', t.typname, t.oid::pg_catalog.regtype::pg_catalog.text, 'USAGE',
				coalesce(t.typacl, pg_catalog.acldefault('T', t.typowner)), t.typowner
			FROM member AS d
			JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) d.objid
			JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) t.typrelid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_type'::pg_catalog.regclass::pg_catalog.oid
				-- A table counts as a table only.
				AND c.relkind OPERATOR(pg_catalog.=) 'c'::pg_catalog."char"
		)
		SELECT true, pg_catalog.format('REVOKE %s%s ON %s %s FROM %s CASCADE',
				CASE WHEN named.is_named THEN 'GRANT OPTION FOR ' END, a.privilege_type, o.kind, o.label,
				CASE WHEN a.grantee OPERATOR(pg_catalog.=) 0::pg_catalog.oid THEN 'PUBLIC'
					ELSE a.grantee::pg_catalog.regrole::pg_catalog.text END)
		FROM object AS o
		CROSS JOIN LATERAL pg_catalog.aclexplode(o.acl) AS a
		CROSS JOIN LATERAL (SELECT a.privilege_type OPERATOR(pg_catalog.=) o.privilege AND CASE
				WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid THEN true
				WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_monitor'::pg_catalog.regrole::pg_catalog.oid
				THEN o.name OPERATOR(pg_catalog.=) ANY (for_monitor)
				ELSE false END) AS named (is_named)
		WHERE a.grantee OPERATOR(pg_catalog.<>) o.owner
			AND NOT (named.is_named AND (NOT a.is_grantable
				OR a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid))
		UNION ALL
		SELECT true, pg_catalog.format('GRANT %s ON %s %s TO pg_database_owner WITH GRANT OPTION',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text))
		FROM object AS o
		GROUP BY o.kind, o.privilege
		UNION ALL
		SELECT true, pg_catalog.format('GRANT %s ON %s %s TO pg_monitor',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text))
		FROM object AS o
		WHERE o.name OPERATOR(pg_catalog.=) ANY (for_monitor)
		GROUP BY o.kind, o.privilege
		UNION ALL
		SELECT false, pg_catalog.format('GRANT %s ON %s %s TO %s WITH GRANT OPTION',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text), r.oid::pg_catalog.regrole)
		FROM object AS o
		CROSS JOIN extension AS e
		JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) e.extowner
		WHERE NOT r.rolsuper
		GROUP BY o.kind, o.privilege, r.oid
		UNION ALL
		SELECT false, pg_catalog.format('GRANT USAGE ON SCHEMA %s TO pg_database_owner', e.extnamespace::pg_catalog.regnamespace)
		FROM extension AS e
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
		JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) n.nspowner
		JOIN pg_catalog.pg_database AS d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
		WHERE (r.rolsuper OR r.oid OPERATOR(pg_catalog.=) e.extowner OR r.oid OPERATOR(pg_catalog.=) d.datdba)
			AND pg_catalog.has_schema_privilege(e.extowner, e.extnamespace, 'USAGE WITH GRANT OPTION')
			AND NOT pg_catalog.has_schema_privilege('pg_database_owner', e.extnamespace, 'USAGE')
			AND pg_catalog.current_setting('idempotency_script.members') OPERATOR(pg_catalog.=) ''
		UNION ALL
		-- A column of such a type in a user's table would prevent changes of the table.
		SELECT false, pg_catalog.format('REVOKE ALL ON TYPE %s FROM PUBLIC', c.reltype::pg_catalog.regtype)
		FROM member AS d
		JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) d.objid
		WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
			AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,v}'::pg_catalog."char"[])
	LOOP
		IF is_noted THEN
			EXECUTE statement;
		ELSE
			PERFORM pg_temp.idem_execute_grant(statement);
		END IF;
	END LOOP;
END
$grants$;
DROP FUNCTION pg_temp.idem_execute_grant(text);
