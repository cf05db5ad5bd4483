
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
