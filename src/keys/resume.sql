
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
