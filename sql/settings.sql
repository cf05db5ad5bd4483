--
-- The settings: defaults, limits, units, who may change them, what they do.
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

--
-- default_ttl and default_lease
--
SET idempotency.default_ttl = '2h';
SET idempotency.default_lease = '10min';
SELECT expires_at BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '2 h',
	lease_expires_at BETWEEN clock_timestamp() + '9 min' AND clock_timestamp() + '10 min' FROM idem_claim('set', 'settings-key-0001');
SELECT expires_at BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '1 h',
	lease_expires_at BETWEEN clock_timestamp() + '19 min' AND clock_timestamp() + '20 min' FROM idem_claim('set', 'settings-key-0002', ttl => '1 h', lease => '20 min');
SELECT claim_token FROM idem_claim('set', 'settings-key-0003') \gset
SELECT idem_heartbeat('set', 'settings-key-0003', claim_token => :claim_token) BETWEEN clock_timestamp() + '9 min' AND clock_timestamp() + '10 min';
SELECT idem_checkpoint('set', 'settings-key-0003', 'x', claim_token => :claim_token) BETWEEN clock_timestamp() + '9 min' AND clock_timestamp() + '10 min';
SELECT outcome, expires_at BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '2 h' FROM idem_claim('set', 'settings-key-0004') AS c, idem_complete('set', 'settings-key-0004', 200);
-- A claim keeps what it was given.
SET idempotency.default_ttl = '1d';
SELECT expires_at < clock_timestamp() + '2 h' FROM idem_lookup('set', 'settings-key-0001');
-- A default lease is capped, too; zero means at once.
SET idempotency.default_ttl = '5min';
SELECT lease_expires_at = expires_at FROM idem_claim('set', 'settings-key-0005');
SET idempotency.default_ttl = 0;
SELECT expires_at <= clock_timestamp() FROM idem_claim('set', 'settings-key-0006');
RESET idempotency.default_ttl;
SET idempotency.default_lease = 0;
SELECT outcome, attempt FROM idem_claim('set', 'settings-key-0007');
SELECT outcome, attempt FROM idem_claim('set', 'settings-key-0007');
RESET idempotency.default_lease;
-- A century is not too long.
SET idempotency.default_ttl = '36525d';
SET idempotency.default_lease = '36525d';
SELECT outcome, expires_at - clock_timestamp() BETWEEN '36524 days' AND '36525 days' FROM idem_claim('set', 'settings-key-0008');
RESET idempotency.default_ttl;
RESET idempotency.default_lease;

--
-- key_min_length and key_max_length
--
SET idempotency.key_min_length = 1;
SET idempotency.key_max_length = 255;
SELECT n, idem_key_is_valid(repeat('k', n)) FROM (VALUES (0), (1), (255), (256)) AS l (n);
SELECT outcome FROM idem_claim('set', 'k');
SELECT outcome FROM idem_claim('set', repeat('k', 255));
SET idempotency.key_max_length = 36;
SET idempotency.key_min_length = 36;
SELECT n, idem_key_is_valid(repeat('k', n)) FROM (VALUES (1), (35), (36), (37), (255)) AS l (n);
SELECT outcome FROM idem_claim('set', 'f81d4fae-7dec-11d0-a765-00a0c91e6bf6');
-- The rules are for new keys: a record is brought to its end although they have
-- changed, by its holder, by another attempt, by an administrator.
SELECT idem_heartbeat('set', 'k', '1 hour', claim_token) > now() AS renewed,
	idem_checkpoint('set', 'k', 'half', '{"paid": 1}', claim_token => claim_token) > now() AS again,
	idem_fail('set', 'k', 'oops', claim_token) AS failed FROM idem_keys WHERE key = 'k';
SELECT state, recovery_point, error FROM idem_lookup('set', 'k');
SELECT outcome, attempt, recovery_point FROM idem_claim('set', 'k');
SELECT outcome FROM idem_claim('set', 'k');
SELECT idem_complete('set', 'k', 200, 'done', claim_token => claim_token) FROM idem_keys WHERE key = 'k';
SELECT outcome, response_body FROM idem_claim('set', 'k');
SELECT idem_erase('set', 'k'), idem_forget('set', 'k');
SELECT claim_token FROM idem_keys WHERE key = repeat('k', 255) \gset
SELECT idem_release('set', repeat('k', 255), :claim_token), idem_release('set', repeat('k', 255), :claim_token) AS again;
-- Where there is none, they come first.
SELECT pg_temp.error_of(call) FROM unnest(ARRAY['idem_claim(''set'', ''k'')', 'idem_complete(''set'', ''k'', 200, claim_token => 1)', 'idem_fail(''set'', ''k'')',
	'idem_release(''set'', ''k'')', 'idem_checkpoint(''set'', ''k'', ''x'')', 'idem_heartbeat(''set'', ''k'')', 'idem_lookup(''set'', ''k'')',
	'idem_forget(''set'', ''k'')', 'idem_erase(''set'', ''k'')']) AS c, LATERAL (SELECT 'SELECT ' || c) AS s (call);
-- An expired record counts as absent, and its key as a new one.
SET idempotency.key_min_length = 1;
SELECT outcome FROM idem_claim('set', 'k', ttl => '0');
SET idempotency.key_min_length = 36;
SELECT pg_temp.error_of($$ SELECT idem_claim('set', 'k') $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('set', 'k', 200, claim_token => 1) $$);
SELECT state FROM idem_lookup('set', 'k');
SELECT idem_forget('set', 'k');
RESET idempotency.key_min_length;
RESET idempotency.key_max_length;

--
-- key_format
--
CREATE TABLE pg_temp.formatted (n int, key text);
INSERT INTO pg_temp.formatted VALUES (1, 'order-5d9f4c1e-7a30'), (2, 'F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6'), (3, 'f81d4fae-7dec-11d0-a765-00a0c91e6bf'),
	(4, 'f81d4fae-7dec-11d0-a765-00a0c91e6bf6a'), (5, 'f81d4fae-7dec-11d0-a765-00a0c91e6bg6'), (6, 'f81d4fae07dec-11d0-a765-00a0c91e6bf6'),
	(7, 'f81d4fae-7dec-11d0-a765-00a0c91e6b-6'), (8, '{f81d4fae-7dec-11d0-a765-00a0c91e6bf6}'), (9, 'a "quoted" key, = 1'),
	(10, 'with a tab' || chr(9) || 'in it'), (11, 'a deleted one: ' || chr(127)), (12, 'with umlaut: ' || repeat('é', 8)), (13, 'short & printable'), (14, 'short &');
SET idempotency.key_format = printable;
SELECT n, idem_key_is_valid(key) FROM pg_temp.formatted ORDER BY n;
SELECT outcome FROM idem_claim('format', 'a "quoted" key, = 1');
SELECT pg_temp.error_of($$ SELECT idem_claim('format', 'short &') $$);
SET idempotency.key_format = uuid;
SELECT n, idem_key_is_valid(key) FROM pg_temp.formatted WHERE n < 10 ORDER BY n;
SELECT outcome FROM idem_claim('format', 'F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6');
SELECT pg_temp.error_of($$ SELECT idem_claim('format', 'order-5d9f4c1e-7a30') $$);
SELECT pg_temp.error_of($$ SELECT idem_lookup('format', 'not a UUID at all') $$);
-- A key with a record can be completed.
SELECT idem_complete('format', 'a "quoted" key, = 1', 200, claim_token => claim_token) FROM idem_keys WHERE scope = 'format' AND key LIKE 'a%';
SELECT outcome FROM idem_claim('format', 'a "quoted" key, = 1');
SET idempotency.key_max_length = 35;
SELECT idem_key_is_valid('f81d4fae-7dec-11d0-a765-00a0c91e6bf6');
RESET idempotency.key_max_length;
RESET idempotency.key_format;
SELECT n, idem_key_is_valid(key) FROM pg_temp.formatted ORDER BY n;
SET idempotency.key_format = base64;

--
-- max_response_size: to the byte, each part by itself
--
SET idempotency.max_response_size = 10;
BEGIN;
SELECT outcome FROM idem_claim('set', 'settings-key-0009');
SELECT idem_checkpoint('set', 'settings-key-0009', 'longer than ten bytes', '[12345678]') IS NOT NULL;
\set VERBOSITY sqlstate
SAVEPOINT s;
SELECT idem_checkpoint('set', 'settings-key-0009', 'x', '[123456789]');
ROLLBACK TO s;
SELECT idem_complete('set', 'settings-key-0009', 200, '12345678901');
ROLLBACK TO s;
-- bytes, not characters
SELECT idem_complete('set', 'settings-key-0009', 200, '123456789é');
ROLLBACK TO s;
SELECT idem_complete('set', 'settings-key-0009', 200, '12345678901'::bytea);
ROLLBACK TO s;
SELECT idem_complete('set', 'settings-key-0009', 200, '', '[123456789]');
ROLLBACK TO s;
\set VERBOSITY default
SELECT idem_complete('set', 'settings-key-0009', 200, '1234567890', '[12345678]');
COMMIT;
SELECT response_headers, response_body FROM idem_claim('set', 'settings-key-0009');
SELECT outcome, idem_complete('set', 'settings-key-0010', 200, '1234567890'::bytea) FROM idem_claim('set', 'settings-key-0010');
-- What is compressed counts in full.
SET idempotency.max_response_size = '10kB';
CREATE TEMP TABLE compressed AS SELECT repeat('x', 20000) AS body;
SELECT pg_column_size(body) < 1000 FROM compressed;
BEGIN;
SELECT outcome FROM idem_claim('set', 'settings-key-0011');
\set VERBOSITY sqlstate
SELECT idem_complete('set', 'settings-key-0011', 200, body) FROM compressed;
\set VERBOSITY default
ROLLBACK;
-- What is stored is replayed whatever the limit is now.
SET idempotency.max_response_size = 0;
SELECT response_body FROM idem_claim('set', 'settings-key-0009');
SELECT outcome, idem_complete('set', 'settings-key-0012', 200, '') FROM idem_claim('set', 'settings-key-0012');
SELECT outcome, idem_complete('set', 'settings-key-0013', 204) FROM idem_claim('set', 'settings-key-0013');
-- An error report is cut, between characters, and never refused.
DO $$
BEGIN
	FOR n IN 0..8 LOOP
		PERFORM set_config('idempotency.max_response_size', n::text, false);
		PERFORM idem_claim('set', 'settings-key-003' || n);
		PERFORM idem_fail('set', 'settings-key-003' || n, 'ab€cd');
	END LOOP;
END
$$;
SELECT key, '[' || error || ']', error::bytea FROM idem_keys WHERE key LIKE 'settings-key-003%' ORDER BY key;
RESET idempotency.max_response_size;

-- require_request_hash: no claim without one, alone or among many; nothing else asks for it.
SET idempotency.require_request_hash = on;
SELECT pg_temp.error_of($$ SELECT idem_claim('set', 'settings-key-0051') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim_many('set', '{settings-key-0051}') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim_many('set', '{settings-key-0051,settings-key-0052}', ARRAY['\x01', NULL]::bytea[]) $$);
SELECT count(*) FROM idem_keys WHERE key LIKE 'settings-key-005%';
SELECT outcome FROM idem_claim('set', 'settings-key-0051', '\x01');
SELECT outcome FROM idem_claim_many('set', '{settings-key-0052,settings-key-0053}', '{"\\x01"}');
SELECT idem_complete(k.scope, k.key, 200, claim_token => k.claim_token) FROM idem_keys AS k
	WHERE k.key = 'settings-key-0051';
RESET idempotency.require_request_hash;
SELECT outcome FROM idem_claim('set', 'settings-key-0054');

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
