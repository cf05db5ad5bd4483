--
-- idem_take_expired: the rows that the cleanup would delete, to be kept elsewhere
--
-- Sections run in transactions that are rolled back, so that a background
-- worker of the same server never sees their rows.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
CREATE TEMP TABLE archive (kind text, expired jsonb);

-- Nothing to take
SELECT idem_take_expired('keys');
SELECT * FROM idem_take_expired(kind => 'tokens', max_rows => 5);
SELECT * FROM idem_take_expired('messages', NULL);

--
-- A row is returned whole: as to_jsonb() has it, json as a string
--
BEGIN;
SELECT claim_token FROM idem_claim('shop', 'expired-key-00001', '\x0102', request => '{"amount": 1.10}') \gset
SELECT idem_checkpoint('shop', 'expired-key-00001', 'charged', '{"b" : 1, "a": "\u0000", "b": 2}') IS NOT NULL AS checkpointed;
SELECT idem_complete('shop', 'expired-key-00001', 201, E'a\n"b"', '{"n":  1e999999999}');
SELECT outcome FROM idem_claim('shop', 'expired-bytes-001');
SELECT idem_complete('shop', 'expired-bytes-001', 200, '\xdeadbeef'::bytea);
SELECT outcome FROM idem_claim('shop', 'live-key-00000001');
UPDATE idem_keys SET expires_at = clock_timestamp() - '1 hour'::interval WHERE key = 'expired-key-00001';
UPDATE idem_keys SET expires_at = clock_timestamp() - '1 minute'::interval WHERE key = 'expired-bytes-001';
CREATE TEMP TABLE kept ON COMMIT DROP AS SELECT * FROM idem_keys WHERE key LIKE 'expired-%';
INSERT INTO archive SELECT 'keys', t FROM idem_take_expired('keys') AS t;
SELECT key FROM idem_keys;
SELECT outcome, response_body FROM idem_claim('shop', 'expired-key-00001');
SELECT expired ->> 'key' AS key, expired ->> 'scope' AS scope, expired ->> 'state' AS state, expired -> 'response_status' AS status,
		expired ->> 'response_body' AS body, expired ->> 'response_bytes' AS bytes, expired -> 'request' AS request
	FROM archive;
SELECT jsonb_typeof(expired -> 'response_headers') AS type, expired ->> 'response_headers' AS headers, expired ->> 'recovery_state' AS recovery_state
	FROM archive WHERE expired ->> 'key' = 'expired-key-00001';
-- All columns, and each value converts back: json by a cast of the string.
SELECT (SELECT array_agg(c ORDER BY c) FROM jsonb_object_keys(expired) AS c)
		= (SELECT array_agg(attname::text ORDER BY attname::text) FROM pg_attribute WHERE attrelid = 'idem_keys'::regclass AND attnum > 0) AS all_columns
	FROM archive LIMIT 1;
SELECT k.key, (k.response_headers::text, k.recovery_state::text) IS NOT DISTINCT FROM (expired ->> 'response_headers', expired ->> 'recovery_state') AS same_json
	FROM kept AS k JOIN archive ON k.key = expired ->> 'key' ORDER BY 1;
UPDATE kept SET response_headers = NULL, recovery_state = NULL;
SELECT k.key, row(k.*)::text = row(r.*)::text AS same
	FROM kept AS k JOIN archive ON k.key = expired ->> 'key',
		jsonb_populate_record(NULL::idem_keys, expired - '{response_headers,recovery_state}'::text[]) AS r ORDER BY 1;
ROLLBACK;

-- A response that is stored out of line, compressed or not
BEGIN;
SELECT outcome, idem_complete('shop', k, 200, (SELECT string_agg(md5((i * length(k))::text), '') FROM generate_series(1, 3000) AS i))
	FROM (VALUES ('large-response-000')) AS v (k), idem_claim('shop', k, ttl => '1 hour');
SELECT outcome, idem_complete('shop', k, 200, repeat('x', 1000000))
	FROM (VALUES ('large-response-compressed')) AS v (k), idem_claim('shop', k, ttl => '1 hour');
UPDATE idem_keys SET expires_at = now() - '1 hour'::interval;
INSERT INTO archive SELECT 'keys', t FROM idem_take_expired('keys') AS t;
SELECT expired ->> 'key' AS key, md5(expired ->> 'response_body') AS body FROM archive ORDER BY 1;
SELECT md5((SELECT string_agg(md5((i * 18)::text), '') FROM generate_series(1, 3000) AS i)), md5(repeat('x', 1000000));
SELECT count(*) FROM idem_keys;
ROLLBACK;

--
-- Tokens
--
BEGIN;
SELECT count(*) FROM idem_once_many('form', '{expired-1,expired-2,live}'::text[]);
UPDATE idem_tokens SET expires_at = '2020-01-01 00:00:00+00', used_at = '2019-12-25 12:00:00+00' WHERE token = 'expired-2';
UPDATE idem_tokens SET expires_at = '2020-01-02 00:00:00+00', used_at = '2019-12-25 12:00:00+00' WHERE token = 'expired-1';
-- Oldest first
SET LOCAL TimeZone = 'UTC';
SELECT idem_take_expired('tokens');
SELECT token FROM idem_tokens;
ROLLBACK;

--
-- Messages: acknowledged ones only, when the retention is over
--
BEGIN;
SELECT count(idem_publish('orders', format('{"n": %s}', n)::jsonb, k, '{"h": 1}'))
	FROM (VALUES (1, 'a'), (2, 'a'), (3, NULL)) AS v (n, k);
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(2);
SELECT count(*) FROM idem_take_expired('messages');
UPDATE idem_outbox SET acked_at = acked_at - '8 days'::interval;
SELECT t ->> 'topic' AS topic, t ->> 'message_key' AS key, t -> 'payload' AS payload, t -> 'headers' AS headers, t ->> 'state' AS state
	FROM idem_take_expired('messages') AS t;
SELECT payload, state FROM idem_outbox;
-- The first of its key has gone, and the next one is found.
SELECT payload FROM idem_outbox_take();
ROLLBACK;

--
-- The same rule of "expired" as the cleanup's
--
BEGIN;
SELECT outcome FROM idem_claim('shop', 'tombstone-old-000');
SELECT outcome FROM idem_claim('shop', 'tombstone-new-000');
UPDATE idem_keys SET expires_at = clock_timestamp() - '2 hours'::interval WHERE key LIKE 'tombstone-old-%';
UPDATE idem_keys SET expires_at = clock_timestamp() - '10 minutes'::interval WHERE key LIKE 'tombstone-new-%';
SET LOCAL idempotency.expired_key_policy = reject;
SET LOCAL idempotency.tombstone_retention = '1h';
SELECT t ->> 'key' AS key FROM idem_take_expired('keys') AS t;
SELECT keys_deleted FROM idem_cleanup();
SET LOCAL idempotency.expired_key_policy = reuse;
SELECT t ->> 'key' AS key FROM idem_take_expired('keys') AS t;
ROLLBACK;

--
-- max_rows: the maximum number; 1000 by default
--
BEGIN;
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 2010) AS i), '0');
SELECT count(*) FROM idem_take_expired('tokens', 3);
SELECT count(*) FROM idem_take_expired('tokens', NULL);
SELECT count(*) FROM idem_take_expired('tokens');
SELECT count(*) FROM idem_take_expired('tokens', 2147483647);
SELECT count(*) FROM idem_tokens;
ROLLBACK;
-- It continues where the session's last call ended, even if that was a cleanup, and also finds older rows.
BEGIN;
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 6) AS i), '0');
SELECT tokens_deleted FROM idem_cleanup(2);
SELECT count(*) FROM idem_take_expired('tokens', 2);
SELECT idem_once('batch', 'late', '0');
UPDATE idem_tokens SET expires_at = expires_at - '1 day'::interval WHERE token = 'late';
SELECT count(*) FROM idem_take_expired('tokens', 10);
SELECT count(*) FROM idem_tokens;
ROLLBACK;
-- Rows that a query leaves out of the result are deleted nevertheless.
BEGIN;
SELECT count(*) FROM idem_once_many('batch', '{1,2,3}'::text[], '0');
SELECT count(*) FROM (SELECT FROM idem_take_expired('tokens') LIMIT 1) AS t;
SELECT count(*) FROM idem_tokens;
ROLLBACK;

--
-- Nothing is lost in a rollback, of a part of a transaction or of all of it
--
BEGIN;
SELECT count(*) FROM idem_once_many('batch', '{1,2,3}'::text[], '0');
SAVEPOINT before;
SELECT count(*) FROM idem_take_expired('tokens');
ROLLBACK TO before;
SELECT pg_temp.error_of($$ INSERT INTO archive SELECT 'tokens', to_jsonb(1 / (length(t ->> 'token') - 1)) FROM idem_take_expired('tokens') AS t $$);
SELECT count(*) FROM idem_tokens;
WITH taken AS (INSERT INTO archive SELECT 'tokens', t FROM idem_take_expired('tokens') AS t RETURNING expired ->> 'token' AS token)
SELECT token FROM taken ORDER BY 1;
SELECT count(*) FROM idem_tokens;
ROLLBACK;
SELECT count(*) FROM archive;

-- The rows count as deleted.
BEGIN;
SELECT tokens_deleted AS before FROM idem_stats WHERE datname = current_database() \gset
SELECT count(*) FROM idem_once_many('batch', '{1,2,3}'::text[], '0');
SELECT count(*) FROM idem_take_expired('tokens');
SELECT tokens_deleted - :before AS deleted FROM idem_stats WHERE datname = current_database();
ROLLBACK;

--
-- Wrong arguments; who may, and when
--
SELECT call, pg_temp.error_of('SELECT ' || call)
	FROM (VALUES ('idem_take_expired(NULL)'), ($$idem_take_expired('')$$), ($$idem_take_expired('Keys')$$), ($$idem_take_expired('outbox')$$),
		($$idem_take_expired('keys', 0)$$), ($$idem_take_expired('keys', -1)$$)) AS v (call);
CREATE ROLE regress_take_expired_app;
SELECT idem_grant('regress_take_expired_app'), idem_grant_relay('regress_take_expired_app');
SET ROLE regress_take_expired_app;
SELECT pg_temp.error_of($$SELECT idem_take_expired('keys')$$);
RESET ROLE;
SELECT idem_revoke('regress_take_expired_app');
DROP ROLE regress_take_expired_app;
BEGIN READ ONLY;
SELECT pg_temp.error_of($$SELECT idem_take_expired('keys')$$);
ROLLBACK;

-- An altered table is refused, and its trigger is not run.
BEGIN;
SELECT idem_once('form', 'untouched', ttl => '0');
CREATE FUNCTION pg_temp.never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'trigger has run'; END $$;
CREATE TRIGGER never BEFORE DELETE ON idem_tokens FOR EACH ROW EXECUTE FUNCTION pg_temp.never();
SELECT pg_temp.code_of($$SELECT idem_take_expired('tokens')$$);
ROLLBACK;

DROP EXTENSION idempotency;
