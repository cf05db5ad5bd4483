--
-- The effects of settings.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\i sql/include/error_of.sql
\pset format unaligned
\pset tuples_only on

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
-- A stored response is replayed, whatever the limit is now.
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
