--
-- The settings: defaults, limits, units, who may change them.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
DROP ROLE IF EXISTS regress_idem_app;
RESET client_min_messages;
\i sql/include/error_of.sql
-- The library is loaded by now, preloaded or not.
SELECT idem_key_is_valid('a-key-of-20-letters-');

SELECT name, boot_val, unit, context, vartype, min_val, max_val, enumvals
	FROM pg_settings WHERE name LIKE 'idempotency.%' ORDER BY name COLLATE "C";
-- The server's configuration may say otherwise of the worker's.
SELECT count(*) FROM pg_settings WHERE name LIKE 'idempotency.%'
	AND (setting IS DISTINCT FROM boot_val AND context <> 'sighup' OR short_desc IS NULL);
SHOW idempotency.default_ttl;
SHOW idempotency.default_lease;
SHOW idempotency.max_response_size;
SHOW idempotency.token_ttl;
SHOW idempotency.outbox_retention;

--
-- Values: units, limits, nonsense
--
CREATE FUNCTION pg_temp.set_to(name text, value text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	shown text;
BEGIN
	PERFORM set_config(name, value, false);
	shown := current_setting(name);
	EXECUTE 'RESET ' || name;
	RETURN shown;
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
\pset format unaligned
\pset tuples_only on
SELECT name, value, pg_temp.set_to(name, value) FROM (VALUES
	(1, 'idempotency.default_ttl', '24h'),
	(2, 'idempotency.default_ttl', '7d'),
	(3, 'idempotency.default_ttl', '90min'),
	(4, 'idempotency.default_ttl', '1500'),
	(5, 'idempotency.default_ttl', '1.5s'),
	(6, 'idempotency.default_ttl', '0'),
	(7, 'idempotency.default_ttl', '36525d'),
	(8, 'idempotency.default_ttl', '36526d'),
	(9, 'idempotency.default_ttl', '-1'),
	(10, 'idempotency.default_ttl', '1 month'),
	(11, 'idempotency.default_ttl', 'NaN'),
	(12, 'idempotency.default_ttl', ''),
	(13, 'idempotency.default_lease', '500ms'),
	(14, 'idempotency.default_lease', '1MB'),
	(15, 'idempotency.key_min_length', '1'),
	(16, 'idempotency.key_min_length', '0'),
	(17, 'idempotency.key_min_length', '255'),
	(18, 'idempotency.key_max_length', '256'),
	(19, 'idempotency.expired_key_policy', 'reject'),
	(20, 'idempotency.expired_key_policy', 'REUSE'),
	(21, 'idempotency.expired_key_policy', 'refuse'),
	(22, 'idempotency.tombstone_retention', '30d'),
	(23, 'idempotency.max_action_id_lead', '5min'),
	(24, 'idempotency.max_action_id_lead', '-1ms'),
	(25, 'idempotency.max_response_size', '2MB'),
	(26, 'idempotency.max_response_size', '100'),
	(27, 'idempotency.max_response_size', '100kB'),
	(28, 'idempotency.max_response_size', '0'),
	(29, 'idempotency.max_response_size', '2GB'),
	(30, 'idempotency.max_response_size', '-1'),
	(31, 'idempotency.no_such_setting', '1'),
	(32, 'idempotency.token_ttl', '90d'),
	(33, 'idempotency.token_ttl', '36526d'),
	(34, 'idempotency.token_ttl', '-1'),
	(35, 'idempotency.outbox_retention', '0'),
	(36, 'idempotency.outbox_retention', '30d'),
	(37, 'idempotency.outbox_retention', '-1s'),
	(38, 'idempotency.outbox_max_attempts', '1'),
	(39, 'idempotency.outbox_max_attempts', '0'),
	(40, 'idempotency.outbox_max_attempts', '2147483647'),
	(41, 'idempotency.outbox_max_attempts', '10min')) AS v (n, name, value) ORDER BY n;
SET idempotency.key_format = base64;
-- The worker's settings are not a session's to change, and the server's configuration takes no nonsense either.
\set VERBOSITY sqlstate
SET idempotency.cleanup_interval = '5min';
SET idempotency.cleanup_batch_size = 1;
SET idempotency.databases = 'shop';
ALTER SYSTEM SET idempotency.cleanup_interval = '-1';
ALTER SYSTEM SET idempotency.cleanup_interval = '36526d';
ALTER SYSTEM SET idempotency.cleanup_interval = '1MB';
ALTER SYSTEM SET idempotency.cleanup_batch_size = 0;
ALTER SYSTEM SET idempotency.cleanup_batch_size = 2147483648;
ALTER SYSTEM SET idempotency.cleanup_batch_size = '1kB';
\set VERBOSITY default

--
-- An application role sets defaults of its calls, not the operator's limits
--
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SET ROLE regress_idem_app;
SELECT name, pg_temp.set_to(name, boot_val) FROM pg_settings WHERE name LIKE 'idempotency.%' ORDER BY name COLLATE "C";
RESET ROLE;
-- ... nor by way of a function of its own
SET ROLE regress_idem_app;
CREATE FUNCTION pg_temp.lift() RETURNS void LANGUAGE sql SET idempotency.max_response_size = '1GB' AS '';
\echo :LAST_ERROR_SQLSTATE
-- ... nor in the server's configuration
\set VERBOSITY sqlstate
ALTER SYSTEM SET idempotency.cleanup_interval = 0;
ALTER SYSTEM SET idempotency.outbox_retention = 0;
\set VERBOSITY default
RESET ROLE;

-- require_pinned_scope: no call that writes for a scope without the lock of idem_pin_scope(), see make scale-out.
SET idempotency.require_pinned_scope = on;
SELECT pg_temp.error_of($$ SELECT idem_once('set', 'settings-token') $$);
BEGIN;
SELECT FROM pg_advisory_xact_lock_shared(1229211981, (hashtextextended('set' COLLATE "C", 0) & 255)::int);
SELECT idem_once('set', 'settings-token');
SELECT idem_once(repeat('€', 20), 'settings-token');
ROLLBACK;
RESET idempotency.require_pinned_scope;

-- expired_key_policy and tombstone_retention: see keys; max_action_id_lead: see actions;
-- token_ttl: see once; outbox_max_attempts: see outbox; outbox_retention, cleanup_batch_size: see cleanup
DROP OWNED BY regress_idem_app;
DROP ROLE regress_idem_app;
