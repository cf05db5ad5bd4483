--
-- Cleanup of what has expired: keys, once-only tokens, acknowledged messages.
--
-- Sections run in transactions that are rolled back, so that a background
-- worker of the same server never sees their rows.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- Keys in every state that a record can have.
CREATE FUNCTION pg_temp.make_keys(prefix text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('shop', prefix || '-leased-000000000', lease => '1 hour');
	PERFORM idem_claim('shop', prefix || '-abandoned-000000', lease => '0');
	PERFORM idem_claim('shop', prefix || '-checkpointed-000');
	PERFORM idem_checkpoint('shop', prefix || '-checkpointed-000', 'charged', '{"n": 1}');
	PERFORM idem_claim('shop', prefix || '-failed-000000000');
	PERFORM idem_fail('shop', prefix || '-failed-000000000', 'declined');
	PERFORM idem_claim('shop', prefix || '-completed-000000');
	PERFORM idem_complete('shop', prefix || '-completed-000000', 201, 'made');
	PERFORM idem_claim('shop', prefix || '-erased-000000000');
	PERFORM idem_complete('shop', prefix || '-erased-000000000', 201, 'made');
	PERFORM idem_erase('shop', prefix || '-erased-000000000');
END
$$;
-- Move the expiry of keys, or of tokens, to so long from now.
CREATE FUNCTION pg_temp.expire_keys(pattern text, at interval DEFAULT '0') RETURNS void
LANGUAGE sql AS $$ UPDATE idem_keys SET expires_at = clock_timestamp() + at WHERE key LIKE pattern $$;
CREATE FUNCTION pg_temp.expire_tokens(pattern text, at interval DEFAULT '0') RETURNS void
LANGUAGE sql AS $$ UPDATE idem_tokens SET expires_at = clock_timestamp() + at WHERE token LIKE pattern $$;

-- Nothing to do
SELECT * FROM idem_cleanup();
SELECT * FROM idem_cleanup(batch_size => 5);
SELECT idem_cleanup(NULL);

--
-- Keys
--
BEGIN;
SELECT pg_temp.make_keys('live');
SELECT pg_temp.make_keys('expired');
SELECT pg_temp.make_keys('just-expired');
SELECT pg_temp.make_keys('soon');
SELECT pg_temp.expire_keys('expired-%', '-1 year');
SELECT pg_temp.expire_keys('just-expired-%');
SELECT pg_temp.expire_keys('soon-%', '1 hour');
SELECT outcome FROM idem_claim('shop', 'late-000000000000', ttl => '1000 years');
-- The same keys in another scope are other keys.
SELECT outcome FROM idem_claim('other', 'expired-leased-000000000');
SELECT * FROM idem_cleanup();
SELECT scope, key, state FROM idem_keys ORDER BY scope, key;
-- They still do what they did.
SELECT v.key, c.outcome, c.attempt, c.response_body, c.recovery_point
	FROM (VALUES ('live-leased-000000000'), ('live-abandoned-000000'), ('live-completed-000000'),
		('live-erased-000000000'), ('live-failed-000000000')) AS v (key), idem_claim('shop', v.key) AS c;
SELECT idem_complete('shop', 'soon-checkpointed-000', 200);
-- And those that are gone, begin anew.
SELECT v.key, c.outcome, c.attempt, c.response_body, c.recovery_point
	FROM (VALUES ('expired-leased-000000000'), ('expired-checkpointed-000'), ('expired-completed-000000'),
		('expired-failed-000000000')) AS v (key), idem_claim('shop', v.key) AS c;
SELECT * FROM idem_cleanup();
ROLLBACK;

-- A response that is stored out of line goes, too.
SELECT reltoastrelid::regclass AS toast FROM pg_class WHERE oid = 'idem_keys'::regclass \gset
BEGIN;
SELECT outcome, idem_complete('shop', k, 200, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) AS i))
	FROM (VALUES ('large-response-000')) AS v (k), idem_claim('shop', k);
SELECT pg_temp.expire_keys('large-%');
SELECT count(*) > 0 AS out_of_line FROM :toast;
SELECT keys_deleted FROM idem_cleanup();
SELECT count(*) FROM :toast;
ROLLBACK;

-- A claim that outlives its record has nothing to complete any more.
BEGIN;
SELECT outcome FROM idem_claim('shop', 'claimed-and-cleaned');
SELECT pg_temp.expire_keys('claimed-%');
SELECT keys_deleted FROM idem_cleanup();
SELECT pg_temp.error_of($$ SELECT idem_complete('shop', 'claimed-and-cleaned', 200) $$);
ROLLBACK;

-- A cleanup that is rolled back to a savepoint has deleted nothing.
BEGIN;
SELECT pg_temp.make_keys('live');
SELECT pg_temp.expire_keys('%-completed-%');
SAVEPOINT s;
SELECT keys_deleted FROM idem_cleanup();
ROLLBACK TO s;
SELECT count(*) FROM idem_keys;
SELECT keys_deleted FROM idem_cleanup();
SELECT count(*) FROM idem_keys;
ROLLBACK;

--
-- Once-only tokens
--
BEGIN;
SELECT count(*) FROM idem_once_many('form', '{live-1,live-2,soon,expired-1,expired-2,expired-3}'::text[]);
SELECT idem_once('inbox', 'expired-1');
SELECT idem_once('inbox', 'zero', ttl => '0');
SELECT pg_temp.expire_tokens('soon', '1 hour');
UPDATE idem_tokens SET expires_at = clock_timestamp() - '1 second'::interval WHERE scope = 'form' AND token LIKE 'expired%';
SELECT * FROM idem_cleanup();
SELECT scope, token FROM idem_tokens ORDER BY scope, token;
SELECT * FROM idem_once_many('form', '{live-1,live-2,soon,expired-1,expired-2,expired-3}'::text[]);
ROLLBACK;

--
-- Messages: acknowledged ones only, when the retention is over
--
-- 7 days by default
SHOW idempotency.outbox_retention;
BEGIN;
CREATE FUNCTION pg_temp.make_messages(prefix text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	which text;
BEGIN
	SET LOCAL idempotency.outbox_max_attempts = 1;
	FOREACH which IN ARRAY ARRAY['acked', 'dead', 'acked when dead']
	LOOP
		PERFORM idem_publish(prefix || ' ' || which, '{}');
		PERFORM CASE WHEN which = 'acked' THEN idem_outbox_ack(ARRAY[id])::text ELSE idem_outbox_nack(id, 'no') END
			FROM idem_outbox_take(topics => ARRAY[prefix || ' ' || which]);
		IF which = 'acked when dead' THEN
			PERFORM idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = prefix || ' ' || which;
		END IF;
	END LOOP;
	SET LOCAL idempotency.outbox_max_attempts = 10;
	PERFORM idem_publish(prefix || ' pending', '{}');
	PERFORM idem_publish(prefix || ' delayed', '{}', deliver_after => '1 hour');
	PERFORM idem_publish(prefix || ' leased', '{}');
	PERFORM idem_outbox_take(topics => ARRAY[prefix || ' leased']);
	PERFORM idem_publish(prefix || ' lease over', '{}');
	PERFORM idem_outbox_take(lease => '0', topics => ARRAY[prefix || ' lease over']);
	PERFORM idem_publish(prefix || ' pausing', '{}');
	PERFORM idem_outbox_nack(id, 'later', '1 hour') FROM idem_outbox_take(topics => ARRAY[prefix || ' pausing']);
END
$$;
SELECT pg_temp.make_messages('new');
SELECT pg_temp.make_messages('old');
UPDATE idem_outbox SET created_at = created_at - '1 year'::interval, available_at = available_at - '1 year'::interval,
		acked_at = acked_at - '167 hours'::interval
	WHERE topic LIKE 'old %';
SELECT * FROM idem_cleanup();
UPDATE idem_outbox SET acked_at = acked_at - '2 hours'::interval WHERE topic LIKE 'old %';
SELECT * FROM idem_cleanup();
SELECT * FROM idem_cleanup();
SET LOCAL idempotency.outbox_retention = '1h';
SELECT messages_deleted FROM idem_cleanup();
SET LOCAL idempotency.outbox_retention = 0;
SELECT messages_deleted FROM idem_cleanup();
SELECT topic, state FROM idem_outbox ORDER BY id;
SELECT idem_outbox_requeue();
SELECT count(*) FROM idem_outbox_take();
ROLLBACK;

--
-- batch_size: the maximum number of each
--
BEGIN;
SELECT count(*) FROM generate_series(1, 5) AS i, idem_claim('shop', 'batch-of-keys-000-' || i);
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 4) AS i));
SELECT count(idem_publish('batch', '{}')) FROM generate_series(1, 3);
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take();
SELECT pg_temp.expire_keys('batch-of-keys-%');
SELECT pg_temp.expire_tokens('token %');
SET LOCAL idempotency.outbox_retention = 0;
SELECT * FROM idem_cleanup(2);
SELECT * FROM idem_cleanup(batch_size => 1);
SELECT * FROM idem_cleanup(2);
SELECT * FROM idem_cleanup(2);
ROLLBACK;
-- Several calls in one statement go on where the last one ended.
BEGIN;
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 5) AS i), '0');
SELECT i, tokens_deleted FROM generate_series(1, 4) AS i, LATERAL (SELECT * FROM idem_cleanup(i - i + 2)) AS c;
ROLLBACK;
-- NULL: idempotency.cleanup_batch_size
SHOW idempotency.cleanup_batch_size;
BEGIN;
-- In bulk
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 10010) AS i), '0');
SELECT tokens_deleted FROM idem_cleanup();
SELECT tokens_deleted FROM idem_cleanup(NULL);
SELECT count(*) FROM idem_once_many('batch', ARRAY(SELECT 'token ' || i FROM generate_series(1, 10010) AS i), '0');
SELECT tokens_deleted FROM idem_cleanup(2147483647);
-- One by one
ROLLBACK;
SELECT size, pg_temp.error_of(format('SELECT idem_cleanup(%s)', size))
	FROM (VALUES (0), (-1), (-2147483648)) AS v (size);

--
-- Tombstones: policy "reject"
--
BEGIN;
SELECT outcome FROM idem_claim('shop', 'tombstone-old-000');
SELECT outcome FROM idem_claim('shop', 'tombstone-new-000');
SELECT outcome FROM idem_claim('shop', 'tombstone-not-yet');
SELECT outcome FROM idem_claim('shop', 'tombstone-week-00');
SELECT idem_once('form', 'tombstone', ttl => '0');
SELECT pg_temp.expire_keys('tombstone-old-%', '-2 hours');
SELECT pg_temp.expire_keys('tombstone-new-%', '-10 minutes');
SELECT pg_temp.expire_keys('tombstone-week-%', '-8 days');
-- The retention counts under this policy only.  By default it is a week.
SET LOCAL idempotency.expired_key_policy = reject;
SELECT * FROM idem_cleanup();
SELECT key FROM idem_keys ORDER BY key;
SET LOCAL idempotency.tombstone_retention = '3h';
SELECT keys_deleted FROM idem_cleanup();
SET LOCAL idempotency.tombstone_retention = '1h';
SELECT keys_deleted FROM idem_cleanup();
SELECT v.key, c.outcome, c.attempt
	FROM (VALUES ('tombstone-old-000'), ('tombstone-new-000'), ('tombstone-not-yet')) AS v (key), idem_claim('shop', v.key) AS c;
SELECT keys_deleted FROM idem_cleanup();
-- Without a retention a tombstone stands until the cleanup comes by.
SET LOCAL idempotency.tombstone_retention = 0;
SELECT outcome FROM idem_claim('shop', 'tombstone-new-000');
SELECT keys_deleted FROM idem_cleanup();
SELECT outcome FROM idem_claim('shop', 'tombstone-new-000');
-- Under "reuse" there are no tombstones.
SELECT pg_temp.expire_keys('tombstone-new-%', '-10 minutes');
SET LOCAL idempotency.tombstone_retention = '1h';
SELECT keys_deleted FROM idem_cleanup();
SET LOCAL idempotency.expired_key_policy = reuse;
SELECT keys_deleted FROM idem_cleanup();
SELECT key FROM idem_keys;
ROLLBACK;

--
-- Expired rows are found by index, and nothing else is read
--
BEGIN;
-- In bulk
SELECT count(*) FROM generate_series(1, 2000) AS i, idem_claim('shop', 'found-by-index-' || i);
SELECT count(*) FROM idem_once_many('form', ARRAY(SELECT 'token ' || i FROM generate_series(1, 2000) AS i));
SELECT count(idem_publish('t', '{}')) FROM generate_series(1, 2000);
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(2000);
-- One by one
SELECT pg_temp.expire_keys('found-by-index-7');
SELECT pg_temp.expire_keys('found-by-index-777');
SELECT pg_temp.expire_tokens('token 77_');
UPDATE idem_outbox SET acked_at = acked_at - '8 days'::interval
	WHERE id IN (SELECT id FROM idem_outbox ORDER BY id OFFSET 1500 LIMIT 4);
CREATE VIEW pg_temp.reads AS
	SELECT relname AS "table", seq_scan, seq_tup_read, idx_scan, coalesce(idx_tup_fetch, 0) AS idx_tup_fetch, n_tup_del
	FROM pg_stat_xact_user_tables WHERE relname IN ('idem_keys', 'idem_tokens', 'idem_outbox');
CREATE TEMP TABLE before AS SELECT * FROM pg_temp.reads;
SELECT * FROM idem_cleanup();
SELECT "table", r.seq_scan - b.seq_scan AS seq_scans, r.seq_tup_read - b.seq_tup_read AS read_by_seq_scan,
		r.idx_scan - b.idx_scan AS index_scans, r.idx_tup_fetch - b.idx_tup_fetch AS read_by_index,
		r.n_tup_del - b.n_tup_del AS deleted
	FROM pg_temp.reads AS r JOIN before AS b USING ("table") ORDER BY 1;
-- No more than the batch.  If the last call was slow, this one begins where that
-- ended, and then again with the oldest row.
SELECT pg_temp.expire_keys('found-by-index-1%');
SELECT pg_temp.expire_tokens('token 1%');
TRUNCATE before;
INSERT INTO before SELECT * FROM pg_temp.reads;
SELECT * FROM idem_cleanup(10);
SELECT "table", r.seq_scan - b.seq_scan AS seq_scans, r.idx_scan - b.idx_scan BETWEEN 1 AND 2 AS few_index_scans,
		r.idx_tup_fetch - b.idx_tup_fetch AS read_by_index, r.n_tup_del - b.n_tup_del AS deleted
	FROM pg_temp.reads AS r JOIN before AS b USING ("table") ORDER BY 1;
ROLLBACK;

--
-- Rows that never expire
--
BEGIN;
SELECT should_process FROM idem_try_advance('u', 'post', '1', 1);
SELECT processed FROM idem_set('u', 'post', '2', 'like', true, 1);
SELECT outcome FROM idem_try_append('cart', 'phone', 1);
SELECT * FROM idem_cleanup();
SELECT should_process FROM idem_try_advance('u', 'post', '1', 1);
SELECT idem_is_active('u', 'post', '2', 'like');
SELECT outcome FROM idem_try_append('cart', 'phone', 1);
ROLLBACK;

--
-- The allowed roles and times
--
CREATE ROLE regress_cleanup_app;
SELECT idem_grant('regress_cleanup_app');
SET ROLE regress_cleanup_app;
SELECT pg_temp.error_of('SELECT idem_cleanup()');
RESET ROLE;
SELECT idem_revoke('regress_cleanup_app');
DROP ROLE regress_cleanup_app;

BEGIN READ ONLY;
SELECT pg_temp.error_of('SELECT idem_cleanup()');
ROLLBACK;

-- An altered table is refused, and its trigger is not run.
BEGIN;
SELECT idem_once('form', 'untouched', ttl => '0');
CREATE FUNCTION pg_temp.never() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'trigger has run'; END $$;
CREATE TRIGGER never BEFORE DELETE ON idem_tokens FOR EACH ROW EXECUTE FUNCTION pg_temp.never();
SELECT pg_temp.error_of('SELECT idem_cleanup()');
DROP TRIGGER never ON idem_tokens;
SELECT tokens_deleted FROM idem_cleanup();
ROLLBACK;

--
-- A session continues where its last call ended, and does not read the deleted
-- rows again. It returns zeros only when it has read all entries.
--
BEGIN;
CREATE FUNCTION pg_temp.buffers(query text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) ' || query INTO plan;
	RETURN (plan->0->'Plan'->>'Shared Hit Blocks')::int + (plan->0->'Plan'->>'Shared Read Blocks')::int;
END
$$;
-- In bulk
SELECT count(*) FROM idem_once_many('place', ARRAY(SELECT 'token ' || i FROM generate_series(1, 4000) AS i), '0');
SELECT tokens_deleted FROM idem_cleanup(3985);
SELECT pg_temp.buffers('SELECT idem_cleanup(5)') AS buffers \gset
SELECT :buffers < 60 AS flat;
SELECT tokens_deleted FROM idem_cleanup();
-- One by one
SELECT count(*) FROM idem_tokens WHERE scope = 'place';
-- What is older than that place is found, too.
SELECT count(*) FROM generate_series(1, 3) AS i, idem_once('place', 'late ' || i, '1 hour');
SELECT pg_temp.expire_tokens('late %', '-1 day');
SELECT tokens_deleted FROM idem_cleanup(2);
SELECT tokens_deleted FROM idem_cleanup(2);
SELECT tokens_deleted FROM idem_cleanup(2);
-- What was rolled back is there again.
SELECT idem_once('place', 'again', '0');
SAVEPOINT before;
SELECT tokens_deleted FROM idem_cleanup();
ROLLBACK TO before;
SELECT tokens_deleted FROM idem_cleanup();
ROLLBACK;
SELECT idem_once('place', 'again', '0');
BEGIN;
SELECT tokens_deleted FROM idem_cleanup();
ROLLBACK;
SELECT tokens_deleted FROM idem_cleanup();

--
-- Large responses: however many batches, all of them go.
--
CREATE FUNCTION pg_temp.make_large(many int, size int) RETURNS bigint
LANGUAGE sql AS $$
	SELECT count(idem_complete('large', 'large-response-' || i, 200,
		(SELECT decode(string_agg(md5(random()::text || i || j), ''), 'hex') FROM generate_series(1, size / 16) AS j)))
	FROM generate_series(1, many) AS i, idem_claim('large', 'large-response-' || i, ttl => '1 hour')
$$;
SELECT pg_temp.make_large(40, 100000);
SELECT pg_temp.expire_keys('large-%');
DO $$
DECLARE
	deleted bigint;
	total bigint := 0;
BEGIN
	LOOP
		SELECT keys_deleted INTO deleted FROM idem_cleanup();
		EXIT WHEN deleted = 0;
		total := total + deleted;
		COMMIT;
	END LOOP;
	RAISE NOTICE '%', total;
END
$$;
SELECT count(*) FROM idem_keys WHERE scope = 'large';

--
-- So do messages that stand for the next ones of their keys, and not all at one go.
--
CREATE FUNCTION pg_temp.publish_of_each(messages int, deliver_after interval) RETURNS bigint
LANGUAGE sql AS $$
	SELECT count(*) FROM idem_publish_many('{keys}', '{1}', (SELECT array_agg('key ' || i) FROM generate_series(1, messages) AS i), deliver_after => deliver_after)
$$;
SELECT pg_temp.publish_of_each(20000, '0');
SELECT pg_temp.publish_of_each(20000, '1 hour');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(20000, topics => '{keys}');
SELECT count(*) FROM idem_outbox WHERE topic = 'keys' AND state = 'acked' AND in_due_index;
SET idempotency.outbox_retention = '1 ms';
SELECT pg_sleep(0.01);
SELECT messages_deleted BETWEEN 1 AND 19999 AS some FROM idem_cleanup(100000);
DO $$
BEGIN
	WHILE (SELECT messages_deleted FROM idem_cleanup(100000)) > 0 LOOP
		COMMIT;
	END LOOP;
END
$$;
SELECT state, in_due_index, count(*) FROM idem_outbox WHERE topic = 'keys' GROUP BY state, in_due_index;
RESET idempotency.outbox_retention;

--
-- A cleanup ends, even if it can delete none of many messages that were acknowledged at the same time.
--
SELECT count(*) FROM idem_publish_many('{held}', array(SELECT to_jsonb(i) FROM generate_series(1, 1000) AS i), '{key}');
SELECT count(*) FROM idem_outbox_take(1000, topics => '{held}');
BEGIN;
SELECT idem_publish('held', '1', 'key') IS NOT NULL AS published;
PREPARE TRANSACTION 'regress_cleanup';
DO $$
DECLARE
	message bigint;
BEGIN
	FOR message IN SELECT id FROM idem_outbox WHERE topic = 'held' ORDER BY id DESC LOOP
		PERFORM idem_outbox_ack(ARRAY[message]);
	END LOOP;
END
$$;
UPDATE idem_outbox SET acked_at = '2020-01-01' WHERE topic = 'held';
SELECT idem_publish('later', '1', 'key') IS NOT NULL AS published;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1, topics => '{later}');
UPDATE idem_outbox SET acked_at = '2020-01-02' WHERE topic = 'later';
SET statement_timeout = '100s';
SELECT messages_deleted > 0 AS later_one_is_deleted FROM idem_cleanup();
SELECT messages_deleted FROM idem_cleanup();
RESET statement_timeout;
ROLLBACK PREPARED 'regress_cleanup';
DO $$
BEGIN
	WHILE (SELECT messages_deleted FROM idem_cleanup()) > 0 LOOP
		COMMIT;
	END LOOP;
END
$$;
SELECT count(*) FROM idem_outbox WHERE topic = 'held';

DROP EXTENSION idempotency;

