
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
