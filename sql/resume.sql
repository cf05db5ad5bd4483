--
-- Work that outlives its client: idem_claim with a request, idem_resume
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql

\pset format unaligned
\pset tuples_only on
\pset null NULL

-- The result of a resume, without tokens and times.
CREATE FUNCTION pg_temp.resumed(max_claims int DEFAULT NULL, scopes text[] DEFAULT NULL) RETURNS SETOF text
LANGUAGE sql AS $$
	SELECT concat_ws(' ', scope, key, attempt, request, recovery_point, recovery_state)
	FROM idem_resume(max_claims, NULL, scopes)
$$;
-- Claims that can be resumed, in this order.
CREATE FUNCTION pg_temp.fail_one(scope text, key text, request jsonb) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	SELECT * INTO claim FROM idem_claim(scope, key, '\x01', request => request);
	PERFORM idem_fail(scope, key, 'no', claim.claim_token);
	RETURN claim.claim_token;
END
$$;
CREATE VIEW pg_temp.stored AS
	SELECT key, state, attempt, request, resume_at IS NOT NULL AS resumable, resume_at = lease_expires_at AS at_lease_end
	FROM idem_keys ORDER BY key;

--
-- What is stored with a claim
--
SELECT outcome FROM idem_claim('shop', 'without-request-1', lease => '0');
SELECT outcome FROM idem_claim('shop', 'with-a-request-01', lease => '1 hour', request => '{"sku": "teapot"}');
SELECT outcome FROM idem_claim('shop', 'with-json-null-01', lease => '1 hour', request => 'null');
SELECT outcome FROM idem_claim('shop', 'with-short-life-1', ttl => '1 minute', lease => '1 hour', request => '1');
SELECT * FROM pg_temp.stored;
-- A claim in its lease is not resumed; nor is one without a request, ever.
SELECT pg_temp.resumed();
-- A claim of another outcome stores nothing.
SELECT outcome FROM idem_claim('shop', 'with-a-request-01', request => '{"sku": "kettle"}');
SELECT request FROM idem_keys WHERE key = 'with-a-request-01';
-- As large as a response
SET idempotency.max_response_size = '100B';
SELECT pg_temp.error_of($$ SELECT idem_claim('shop', 'too-large-request', request => to_jsonb(repeat('x', 100))) $$);
SELECT outcome FROM idem_claim('shop', 'large-request-001', request => to_jsonb(repeat('x', 80)));
RESET idempotency.max_response_size;
DELETE FROM idem_keys;

--
-- A claim that failed is resumed at once, and one whose lease has ended
--
BEGIN;
SELECT claim_token AS token FROM idem_claim('shop', 'failed-request-01', '\x01', lease => '1 hour', request => '{"n": 1}') \gset
COMMIT;
SELECT idem_checkpoint('shop', 'failed-request-01', 'charged', '{"charge": "ch_1"}', '1 hour', :token) IS NOT NULL;
SELECT pg_temp.resumed();
SELECT idem_fail('shop', 'failed-request-01', 'bank: 503', :token);
SELECT * FROM pg_temp.stored;
SELECT created_at AS created, expires_at AS expires FROM idem_lookup('shop', 'failed-request-01') \gset
SELECT scope, key, attempt, request, recovery_point, recovery_state, claim_token AS second,
		claim_token > :token AS higher, created_at = :'created' AS created,
		lease_expires_at BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '2 h' AS lease
	FROM idem_resume(1, '2 hours') \gset
\echo :scope :key :attempt :request :recovery_point :recovery_state :higher :created :lease
SELECT * FROM pg_temp.stored;
-- The record keeps its hash and its expiry; this attempt has no error yet.
SELECT state, attempt, request_hash, expires_at = :'expires', error FROM idem_lookup('shop', 'failed-request-01');
-- Nobody gets it twice, and the client sees that it is in progress.
SELECT pg_temp.resumed();
SELECT outcome FROM idem_claim('shop', 'failed-request-01', '\x01');
SELECT outcome FROM idem_claim('shop', 'failed-request-01', '\x02');
-- The first holder is fenced, whatever it calls.
SELECT pg_temp.code_of(format($$ SELECT idem_complete('shop', 'failed-request-01', 200, claim_token => %s) $$, :token));
SELECT pg_temp.code_of(format($$ SELECT idem_fail('shop', 'failed-request-01', claim_token => %s) $$, :token));
-- Completed, it is replayed, and its request is gone.
SELECT idem_complete('shop', 'failed-request-01', 201, 'done', claim_token => :second);
SELECT * FROM pg_temp.stored;
SELECT pg_temp.resumed();
SELECT outcome, response_status, response_body FROM idem_claim('shop', 'failed-request-01', '\x01');
-- The lease that has ended; a heartbeat moves the end.
SELECT claim_token AS token FROM idem_claim('shop', 'lease-has-ended-1', lease => '0', request => '{"n": 2}') \gset
SELECT idem_heartbeat('shop', 'lease-has-ended-1', '1 hour', :token) > now();
SELECT pg_temp.resumed();
SELECT idem_heartbeat('shop', 'lease-has-ended-1', '0', :token) IS NOT NULL;
SELECT pg_temp.resumed();
-- What was released, forgotten or has expired is not resumed.
SELECT claim_token AS token FROM idem_claim('shop', 'released-request1', lease => '0', request => '1') \gset
SELECT idem_release('shop', 'released-request1', :token);
SELECT outcome FROM idem_claim('shop', 'forgotten-request', lease => '0', request => '1');
SELECT idem_forget('shop', 'forgotten-request');
SELECT outcome FROM idem_claim('shop', 'expired-request-1', ttl => '0', request => '1');
SELECT pg_temp.resumed();
-- A new lease does not outlive the record.
SET idempotency.default_ttl = '1h';
SELECT pg_temp.fail_one('shop', 'lease-is-capped-1', '1') > 0;
SELECT r.lease_expires_at = l.expires_at FROM idem_resume(1, '12 hours') AS r, idem_lookup('shop', 'lease-is-capped-1') AS l;
RESET idempotency.default_ttl;
DELETE FROM idem_keys;

--
-- Oldest first, as many as asked for
--
SELECT count(pg_temp.fail_one('shop', 'oldest-first-' || to_char(n, 'FM0000'), to_jsonb(n))) FROM generate_series(1, 15) AS n;
SELECT pg_temp.resumed(2);
SELECT count(*) FROM pg_temp.resumed();
-- Attempts do not matter for the order.
SELECT count(idem_fail(scope, key, claim_token => claim_token)) FROM idem_keys WHERE attempt = 2;
SELECT string_agg(request::text, ' ') FROM idem_resume(100);
DELETE FROM idem_keys;
-- With a lease of zero nothing comes twice in a call.
SELECT count(pg_temp.fail_one('shop', 'only-once-' || to_char(n, 'FM0000000'), to_jsonb(n))) FROM generate_series(1, 5) AS n;
SELECT count(*), count(DISTINCT key) FROM idem_resume(100, '0');
DELETE FROM idem_keys;

--
-- Scopes
--
SELECT count(pg_temp.fail_one(s, 'key-in-a-scope-' || n, to_jsonb(n))) FROM generate_series(1, 3) AS n, unnest('{a,b,c}'::text[]) AS s;
SELECT pg_temp.resumed(scopes => '{}');
SELECT pg_temp.resumed(scopes => '{d}');
SELECT pg_temp.resumed(scopes => '{b}');
SELECT pg_temp.resumed(4, '{c,a,d,a}');
SELECT pg_temp.resumed();
DELETE FROM idem_keys;

--
-- Attempts are limited
--
SET idempotency.max_attempts = 3;
SELECT claim_token AS token FROM idem_claim('shop', 'never-works-00001', lease => '0', request => '1') \gset
SELECT attempt FROM idem_resume(lease => '0');
-- An attempt of the client counts, too.
SELECT outcome, attempt, claim_token AS token FROM idem_claim('shop', 'never-works-00001', lease => '0') \gset
\echo :outcome :attempt
SELECT pg_temp.resumed();
SELECT scope, key, attempt, age < '1 min', lease_expires_at IS NULL FROM idem_abandoned();
SELECT idem_fail('shop', 'never-works-00001', 'no', :token);
SELECT pg_temp.resumed();
SELECT scope, key, attempt, age < '1 min', lease_expires_at IS NULL FROM idem_abandoned();
-- Those with attempts left are not hidden behind it, and are not abandoned.
SELECT pg_temp.fail_one('shop', 'may-work-yet-0001', '2') > 0;
SELECT key FROM idem_abandoned();
SELECT pg_temp.resumed(1);
-- With more attempts it continues; the client may claim it in any case.
SET idempotency.max_attempts = 4;
SELECT pg_temp.resumed();
SELECT idem_fail(scope, key, claim_token => claim_token) FROM idem_keys WHERE key = 'never-works-00001';
SELECT key FROM idem_abandoned();
SELECT outcome, attempt FROM idem_claim('shop', 'never-works-00001');
SELECT key FROM idem_abandoned();
RESET idempotency.max_attempts;
DELETE FROM idem_keys;

--
-- The client itself resumes; its request replaces the one before
--
SELECT pg_temp.fail_one('shop', 'client-is-back-01', '{"n": 1}') > 0;
SELECT outcome, attempt FROM idem_claim('shop', 'client-is-back-01', '\x01', lease => '0');
SELECT request FROM idem_keys;
SELECT outcome, attempt FROM idem_claim('shop', 'client-is-back-01', '\x01', lease => '0', request => '{"n": 2}');
SELECT pg_temp.resumed();
DELETE FROM idem_keys;
-- One that expired begins anew, without its request.
SELECT outcome FROM idem_claim('shop', 'client-is-back-02', ttl => '0', request => '{"n": 1}');
SELECT outcome, attempt FROM idem_claim('shop', 'client-is-back-02', lease => '0');
SELECT * FROM pg_temp.stored;
SELECT pg_temp.resumed();
DELETE FROM idem_keys;

--
-- Erased, the request is gone, and nothing resumes it
--
SELECT pg_temp.fail_one('shop', 'erased-request-01', '{"name": "Ann"}') > 0;
SELECT idem_erase('shop', 'erased-request-01');
SELECT * FROM pg_temp.stored;
SELECT pg_temp.resumed();
SELECT idem_erase('shop', 'erased-request-01');
DELETE FROM idem_keys;

--
-- In the transaction that claimed
--
BEGIN;
SELECT outcome FROM idem_claim('shop', 'one-transaction-1', lease => '0', request => '1');
-- It is in progress for this transaction, too ...
SELECT pg_temp.resumed();
SELECT idem_fail('shop', 'one-transaction-1');
-- ... until it has failed; and what was resumed needs no token here.
SELECT pg_temp.resumed();
SELECT pg_temp.resumed();
SELECT idem_complete('shop', 'one-transaction-1', 200);
COMMIT;
SELECT * FROM pg_temp.stored;
-- A rollback to a savepoint gives it back, with its attempt.
SELECT pg_temp.fail_one('shop', 'one-transaction-2', '1') > 0;
BEGIN;
SAVEPOINT s;
SELECT pg_temp.resumed();
ROLLBACK TO s;
SELECT pg_temp.resumed();
ROLLBACK;
SELECT pg_temp.resumed();
DELETE FROM idem_keys;

--
-- Waiting
--
SELECT clock_timestamp() AS begun \gset
SELECT pg_temp.resumed() FROM idem_resume(wait => '50 ms');
SELECT clock_timestamp() - :'begun' >= '50 ms';
SELECT count(*) FROM idem_resume(wait => '50 ms', scopes => '{}');
-- When the lease ends, so does the wait.
SELECT outcome FROM idem_claim('shop', 'lease-that-ends-1', lease => '0.1 s', request => '1');
SELECT key, attempt FROM idem_resume(wait => '10 minutes');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM idem_resume(wait => '50 ms');
COMMIT;
DELETE FROM idem_keys;

--
-- Higher isolation levels
--
SELECT count(pg_temp.fail_one('shop', 'isolated-' || to_char(n, 'FM00000000'), to_jsonb(n))) FROM generate_series(1, 3) AS n;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.resumed(2, '{shop,shop}');
SELECT pg_temp.resumed();
SELECT pg_temp.resumed();
SELECT count(idem_complete(scope, key, 200)) FROM idem_keys;
COMMIT;
SELECT pg_temp.fail_one('shop', 'serializable-0001', '1') > 0;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.resumed();
SELECT pg_temp.resumed();
COMMIT;
DELETE FROM idem_keys;

--
-- Updates of rows without a request are HOT, and leave the indexes alone
--
SELECT outcome FROM idem_claim('shop', 'heap-only-000001');
SELECT pg_relation_size('idem_keys_resumable') + pg_relation_size('idem_keys_resumable_scopes') AS size \gset
BEGIN;
SELECT pg_stat_get_xact_tuples_hot_updated('idem_keys'::regclass) AS hot \gset
SELECT idem_heartbeat(scope, key, claim_token => claim_token) IS NOT NULL FROM idem_keys;
SELECT idem_checkpoint(scope, key, 'charged', claim_token => claim_token) IS NOT NULL FROM idem_keys;
SELECT idem_complete(scope, key, 200, claim_token => claim_token) FROM idem_keys;
SELECT pg_stat_get_xact_tuples_hot_updated('idem_keys'::regclass) - :hot AS hot_updates;
COMMIT;
SELECT count(idem_claim('shop', 'not-indexed-' || to_char(n, 'FM0000'))) FROM generate_series(1, 2000) AS n;
SELECT pg_relation_size('idem_keys_resumable') + pg_relation_size('idem_keys_resumable_scopes') = :size AS same_size;
-- Rows with and without a request in one call: each is found if it has one.
SELECT count(idem_claim('shop', 'mixed-' || to_char(n, 'FM0000000000'), lease => '0', request => CASE WHEN n % 2 = 0 THEN to_jsonb(n) END))
	FROM generate_series(1, 10) AS n;
SELECT string_agg(request::text, ' ') FROM idem_resume();
DELETE FROM idem_keys;

--
-- Statistics: each counts as a claim and as a takeover
--
SELECT count(pg_temp.fail_one('shop', 'counted-00000000-' || n, '1')) FROM generate_series(1, 2) AS n;
SELECT claims_new AS claims, takeovers FROM idem_stats WHERE datname = current_database() \gset
SELECT count(*) FROM idem_resume();
SELECT claims_new - :claims AS claims, takeovers - :takeovers AS takeovers FROM idem_stats WHERE datname = current_database();
DELETE FROM idem_keys;

--
-- Bad arguments
--
SELECT pg_temp.error_of('SELECT idem_resume(0)');
SELECT pg_temp.error_of('SELECT idem_resume(-1)');
SELECT pg_temp.error_of($$ SELECT idem_resume(lease => '-1 s') $$);
SELECT pg_temp.error_of($$ SELECT idem_resume(wait => '-1 s') $$);
SELECT pg_temp.error_of($$ SELECT idem_resume(scopes => '{a,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_resume(scopes => '{""}') $$);
SELECT count(*) FROM idem_resume(NULL, NULL, NULL, NULL);
BEGIN READ ONLY;
SELECT pg_temp.error_of('SELECT idem_resume()');
COMMIT;
-- A few bytes can be a long text: no request can be longer than a client can be sent, and no call returns too much.
SELECT idem_claim('large', 'key-of-a-large-request', request => to_jsonb(array_fill(1e131071::numeric, '{8200}')));
SELECT count(idem_claim('large', 'key-of-a-large-request' || i, lease => '0 s', request => to_jsonb(array_fill(1e90::numeric, '{20000}')))) FROM generate_series(1, 3) AS i;
SELECT count(*) FROM idem_resume(100, scopes => '{large}');
SELECT count(*) FROM idem_resume(100, scopes => '{large}');
SET idempotency.max_response_size = '100MB';
SELECT count(idem_claim('large', 'key-of-a-huge-request' || i, lease => '0 s', request => to_jsonb(repeat('x', 17000000)))) FROM generate_series(1, 2) AS i;
RESET idempotency.max_response_size;
SELECT count(*) FROM idem_resume(100, scopes => '{large}');
SELECT count(*) FROM idem_resume(100, scopes => '{large}');
SELECT count(*) FROM idem_resume(100, scopes => '{large}');
-- Expired claims that no cleanup has deleted do not make each call read them all.
DELETE FROM idem_keys;
CREATE FUNCTION pg_temp.pages_of_resume() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT FROM idem_resume(1)' INTO plan;
	plan := plan -> 0 -> 'Plan';
	RETURN (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint;
END
$$;
ALTER TABLE idem_keys SET (autovacuum_enabled = off);
SELECT count(idem_claim('flood', 'key-of-a-flood-' || i, lease => '0', request => '1')) FROM generate_series(1, 5000) AS i;
UPDATE idem_keys SET expires_at = clock_timestamp() - interval '1 s';
SELECT count(idem_claim('behind', 'key-behind-a-flood-' || i, lease => '0', request => '1')) FROM generate_series(1, 2) AS i;
SELECT pg_temp.pages_of_resume() > 1000 AS many;
-- A call ends when it has retired some, so that its transaction can commit that.
SELECT count(*) AS retired FROM idem_keys WHERE resume_at IS NULL;
SELECT count(*) FROM idem_resume(wait => '10 min');
SELECT count(*) AS retired FROM idem_keys WHERE resume_at IS NULL;
SELECT count(*) FROM idem_resume(1);
SELECT count(*) FROM generate_series(1, 5) AS i, LATERAL idem_resume(i);
SELECT count(*) <= 300 AS few FROM idem_keys WHERE resume_at IS NOT NULL AND expires_at < now();
VACUUM idem_keys;
SELECT pg_temp.pages_of_resume() >= 0 AS first;
SELECT pg_temp.pages_of_resume() < 200 AS few;
SELECT outcome, attempt FROM idem_claim('flood', 'key-of-a-flood-2000', request => '2');
SELECT resume_at IS NOT NULL AS can_be_resumed FROM idem_keys WHERE key = 'key-of-a-flood-2000';
-- Claims that another transaction holds are read once, and again when it ends.
DELETE FROM idem_keys;
BEGIN;
SELECT count(idem_claim('old', 'key-of-an-old-transaction'));
PREPARE TRANSACTION 'is old';
SELECT count(idem_claim('flood', 'key-that-is-held-' || i, lease => random() * interval '1 s', request => '1')) FROM generate_series(1, 5000) AS i;
SELECT pg_sleep(1.1);
SELECT count(idem_claim('behind', 'key-behind-those-' || i, lease => '0', request => '1')) FROM generate_series(1, 20) AS i;
SELECT pg_sleep(1.1);
BEGIN;
SELECT count(idem_claim('flood', 'key-that-is-held-' || i, lease => '1 h')) FROM generate_series(1, 5000) AS i;
PREPARE TRANSACTION 'holds many';
SELECT pg_temp.pages_of_resume() > 4000 AS many;
SELECT min(pg_temp.pages_of_resume()) < 500 AS few, count(*) FROM generate_series(1, 5);
ROLLBACK PREPARED 'holds many';
SELECT count(*) FROM idem_resume(10000);
-- Nor are dead entries read again that vacuum cannot remove yet.
SELECT count(idem_claim('behind', 'key-far-behind-' || i, lease => '0', request => '1')) FROM generate_series(1, 20) AS i;
SELECT pg_sleep(1.1);
SELECT pg_temp.pages_of_resume() > 4000 AS many;
SELECT min(pg_temp.pages_of_resume()) < 500 AS few, count(*) FROM generate_series(1, 5);
ROLLBACK PREPARED 'is old';
DELETE FROM idem_keys;
ALTER TABLE idem_keys RESET (autovacuum_enabled);
-- A row that a superuser has changed does not confuse it.
SELECT pg_temp.fail_one('shop', 'changed-by-hand-' || n, '1') > 0 FROM generate_series(1, 5) AS n;
UPDATE idem_keys SET state = 'started', lease_expires_at = clock_timestamp() + '1 h' WHERE key LIKE '%1';
UPDATE idem_keys SET state = 'completed' WHERE key LIKE '%2';
UPDATE idem_keys SET request = NULL WHERE key LIKE '%3';
UPDATE idem_keys SET resume_at = '-infinity' WHERE key LIKE '%4';
UPDATE idem_keys SET resume_at = 'infinity' WHERE key LIKE '%5';
-- A rollback makes a session forget up to where it has found nothing.
BEGIN;
SELECT count(idem_claim('shop', 'rolled-back-00001'));
ROLLBACK;
SELECT pg_temp.resumed();
UPDATE idem_keys SET state = 'x';
SELECT pg_temp.error_of('SELECT idem_resume()');
DROP EXTENSION idempotency CASCADE;
