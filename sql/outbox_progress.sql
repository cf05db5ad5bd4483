--
-- Transactional outbox: each due message is found within a few takes, whatever
-- else lies there, and a take does not look twice at what it has passed.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
ALTER TABLE idem_outbox SET (autovacuum_enabled = off);

-- One key whose messages stand behind a leased and parked one stops no other key.
SELECT count(*) FROM idem_publish_many('{hot}', array_fill('1'::jsonb, '{1200}'), '{key}');
SELECT count(*) FROM idem_outbox_take(2000, '0', '{hot}');
SELECT id AS first FROM idem_outbox_take(1, '1 hour', '{hot}') \gset
SELECT count(*) FROM idem_outbox_take(10, '1 hour');
SELECT count(*) FROM idem_outbox_extend(ARRAY[:first + 1], '10 hours', '{1}');
SELECT idem_outbox_ack(ARRAY[:first]);
SELECT count(idem_publish('payments', to_jsonb(i), 'customer ' || i)) FROM generate_series(1, 20) AS i;
SELECT topic, count(*) FROM idem_outbox_take(100) GROUP BY topic;
-- Two takes later its messages are out of the way.
SELECT count(*) FROM idem_outbox_take();
SELECT count(*) FROM idem_outbox_take();
SELECT state, in_due_index, available_at > now() + '9 hours' AS late, count(*) FROM idem_outbox WHERE topic = 'hot' GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
-- They follow when the first one has been delivered.
SELECT idem_outbox_ack(ARRAY[:first + 1]);
SELECT count(*), min(id) - :first AS first FROM idem_outbox_take(100);
TRUNCATE idem_outbox;

-- However many messages a take can do nothing with, it finds those behind them, in a new session, too.
SELECT count(*) FROM idem_publish_many('{many}', array_fill('1'::jsonb, '{51000}'), '{key}');
SELECT count(*) FROM idem_outbox_take(51000, '0');
SELECT count(*) FROM idem_outbox_take(1, '1 hour');
UPDATE idem_outbox SET available_at = '2000-01-01'::timestamptz + id * interval '1 ms' WHERE attempt = 1;
SELECT count(idem_publish('behind', '1'));
\c -
SELECT topic FROM idem_outbox_take();
TRUNCATE idem_outbox;

-- A take begins where the last one has found the first row, and passes only once what was taken before that.
CREATE FUNCTION pg_temp.pages_of_take() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT FROM idem_outbox_take(1)' INTO plan;
	plan := plan -> 0 -> 'Plan';
	ASSERT (plan ->> 'Actual Rows')::numeric = 1;
	RETURN (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint;
END
$$;
-- Nothing can be removed before this transaction ends.
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{20000}'));
SELECT count(*) FROM idem_outbox_take(20000, '1 hour');
SELECT count(idem_publish('t', '1')) FROM generate_series(1, 10);
SELECT pg_sleep(1.1);
SELECT pg_temp.pages_of_take() AS first \gset
-- At times a take begins at the beginning.
SELECT :first > 100 AS first_passes_all, min(pg_temp.pages_of_take()) < 100 AS then_few FROM generate_series(1, 3);
ROLLBACK;
TRUNCATE idem_outbox;

-- Nor does one look again at what many open transactions hold, which have many parts each.
SELECT unnest(ARRAY['BEGIN', 'DO $$ BEGIN FOR i IN 1..100 LOOP BEGIN PERFORM idem_publish(''t'', to_jsonb(repeat(''held '', 300))); EXCEPTION WHEN division_by_zero THEN END; END LOOP; END $$',
	format('PREPARE TRANSACTION ''open %s''', i)]) FROM generate_series(1, 40) AS i
\set ECHO none
\gexec
\set ECHO all
SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database();
SELECT pg_sleep(1.1);
SELECT count(idem_publish('t', '"free"')) FROM generate_series(1, 5);
SELECT pg_temp.pages_of_take() AS first \gset
SELECT :first > min(pages) + 50 AS first_passes_all, min(pages) < 60 AS then_few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
SELECT format('COMMIT PREPARED %L', gid) FROM pg_prepared_xacts WHERE database = current_database()
\set ECHO none
\gexec
\set ECHO all
SELECT left(payload::text, 8) AS payload, count(*) FROM idem_outbox_take(5000, '1 hour') GROUP BY payload ORDER BY count(*);
TRUNCATE idem_outbox;

-- Nor where a delayed message waits behind one of an open transaction.
SELECT count(idem_publish('t', '"first"', 'X')) FROM generate_series(1, 1);
SELECT id AS first_id FROM idem_outbox_take(1, '1 hour') \gset
BEGIN;
SELECT count(idem_publish('t', '"held"', 'X')) FROM generate_series(1, 1);
PREPARE TRANSACTION 'second';
SELECT count(idem_publish('t', '"delayed"', 'X', NULL, '1 year')) FROM generate_series(1, 1);
SELECT idem_outbox_ack(ARRAY[:first_id]);
BEGIN;
SELECT count(idem_publish('t', to_jsonb(repeat('held ', 300)))) FROM generate_series(1, 4000);
PREPARE TRANSACTION 'many';
SELECT pg_sleep(1.1);
SELECT count(idem_publish('t', '"free"')) FROM generate_series(1, 5);
SELECT pg_temp.pages_of_take() AS first \gset
SELECT pg_temp.pages_of_take() AS second \gset
SELECT :first > 500 AS first_passes_all, min(pages) < 60 AS then_few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
ROLLBACK PREPARED 'many';
COMMIT PREPARED 'second';
SELECT payload FROM idem_outbox_take(10, '1 hour');
TRUNCATE idem_outbox;

-- Nor does one look again at all of them when one of these transactions ends, or where a message that could not be taken lies among them.
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{2}'), '{lane}');
SELECT array_agg(id) AS lane_ids FROM idem_outbox_take(2, '1 hour') \gset
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"held"'::jsonb, '{12000}'), '{lane}');
PREPARE TRANSACTION 'lane';
SELECT idem_outbox_ack(:'lane_ids');
BEGIN;
SELECT count(idem_publish('t', '"short"'));
PREPARE TRANSACTION 'short';
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"answered"'::jsonb, '{4000}'));
BEGIN;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE payload = '"answered"';
PREPARE TRANSACTION 'answers';
BEGIN;
SELECT count(idem_publish('t', to_jsonb(repeat('held ', 300)))) FROM generate_series(1, 4000);
PREPARE TRANSACTION 'many';
SELECT pg_sleep(1.1);
SELECT count(idem_publish('t', '"free"')) FROM generate_series(1, 11);
SELECT pg_temp.pages_of_take() AS first \gset
SELECT :first > 500 AS first_passes_all, min(pages) < 60 AS then_few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
COMMIT PREPARED 'short';
SELECT pg_temp.pages_of_take() < 60 AS few;
SELECT count(*) FROM idem_outbox WHERE payload = '"short"' AND attempt = 1;
SELECT pg_temp.pages_of_take() < 60 AS few;
COMMIT PREPARED 'answers';
SELECT pg_temp.pages_of_take() AS first \gset
SELECT :first > 100 AS passes_all_once, min(pages) < 60 AS then_few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
ROLLBACK PREPARED 'many';
COMMIT PREPARED 'lane';
SELECT payload, count(*) FROM idem_outbox_take(20000, '1 hour') GROUP BY payload ORDER BY payload;
TRUNCATE idem_outbox;

-- Nor does one look again at all of them where a message that a session has locked by hand lies before them.
SELECT count(idem_publish('t', '"locked"')) FROM generate_series(1, 1);
BEGIN;
SELECT payload FROM idem_outbox FOR UPDATE;
PREPARE TRANSACTION 'locked';
BEGIN;
SELECT count(idem_publish('t', to_jsonb(repeat('held ', 300)))) FROM generate_series(1, 4000);
PREPARE TRANSACTION 'many';
SELECT pg_sleep(1.1);
SELECT count(idem_publish('t', '"free"')) FROM generate_series(1, 5);
SELECT pg_temp.pages_of_take() AS first \gset
SELECT :first > 500 AS first_passes_all, min(pages) < 60 AS then_few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
ROLLBACK PREPARED 'many';
COMMIT PREPARED 'locked';
SELECT payload FROM idem_outbox_take(10, '1 hour') ORDER BY id;
TRUNCATE idem_outbox;

-- Nor does one pass what an open transaction has published once for each message behind it.
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"held"'::jsonb, '{20000}'), '{lane}');
PREPARE TRANSACTION 'lane';
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"parked"'::jsonb, '{1000}'), '{lane}');
SELECT count(*) FROM idem_outbox_take(1000, '0');
SELECT payload FROM idem_outbox_take(1, '1 hour');
SELECT count(idem_publish('other', '"urgent"'));
SELECT pg_temp.pages_of_take() < 100000 AS few;
SELECT count(*) FROM idem_outbox WHERE topic = 'other' AND attempt = 1;
ROLLBACK PREPARED 'lane';
TRUNCATE idem_outbox;

-- Nor once for each message that has left the key, where the first message is leased and parked.
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{100}'), '{lane}');
SELECT array_agg(id) AS lane_ids FROM idem_outbox_take(100, '1 hour') \gset
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"held"'::jsonb, '{20000}'), '{lane}');
PREPARE TRANSACTION 'lane';
SELECT count(*) FROM idem_publish_many('{t}', '{"\"dies\"","\"parked\""}', '{lane}');
DO $$
DECLARE
	next bigint;
BEGIN
	FOR next IN SELECT id FROM idem_outbox WHERE payload = '1' ORDER BY id DESC LOOP
		PERFORM idem_outbox_ack(ARRAY[next]);
		COMMIT;
	END LOOP;
END
$$;
SET idempotency.outbox_max_attempts = 1;
SELECT idem_outbox_nack(id) FROM idem_outbox_take(1);
RESET idempotency.outbox_max_attempts;
SELECT id AS parked FROM idem_outbox_take(1, '0') \gset
SELECT idem_outbox_requeue();
SELECT id AS dies, payload FROM idem_outbox_take(1, '1 hour') \gset
SELECT count(*) FROM idem_outbox_take(1, '1 hour');
SELECT count(*) FROM idem_outbox_extend(ARRAY[:parked], '10 hours', '{1}');
SELECT idem_outbox_ack(ARRAY[:dies]);
SELECT count(idem_publish('other', '"urgent"')) FROM generate_series(1, 3);
SELECT count(*) FROM idem_outbox WHERE in_due_index AND state = 'acked';
SELECT max(pages) < 30000 AS few FROM (SELECT pg_temp.pages_of_take() FROM generate_series(1, 3)) AS later (pages);
ROLLBACK PREPARED 'lane';
TRUNCATE idem_outbox;

-- What is left of the keys of a publisher that has rolled back is gone after two takes.
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{12000}'), ARRAY(SELECT 'key ' || i FROM generate_series(1, 12000) AS i));
SELECT array_agg(id) AS many_ids FROM idem_outbox_take(12000, '1 hour') \gset
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{12000}'), ARRAY(SELECT 'key ' || i FROM generate_series(1, 12000) AS i));
PREPARE TRANSACTION 'bulk';
SELECT idem_outbox_ack(:'many_ids');
ROLLBACK PREPARED 'bulk';
SELECT count(*) FROM idem_outbox WHERE in_due_index;
SELECT count(*) FROM idem_outbox_take();
SELECT count(*) FROM idem_outbox_take();
SELECT count(*) FROM idem_outbox WHERE in_due_index;
TRUNCATE idem_outbox;

-- A few bytes can be a long text: no message can be longer than a relay can be sent, and no take returns too much.
SELECT idem_publish('t', to_jsonb(repeat('x', 16777216)));
SELECT count(idem_publish('small', to_jsonb(repeat('x', 16700000))));
SELECT count(idem_publish('small', to_jsonb(array_fill(repeat('x', 1000), '{15900}'))));
SELECT idem_publish('t', to_jsonb(array_fill(repeat('x', 1000), '{15900}')), NULL, to_jsonb(repeat('x', 1000000)));
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(topics => '{small}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(topics => '{small}');
SET idempotency.max_message_size = '256MB';
SELECT idem_publish('t', to_jsonb(array_fill(1e131071::numeric, '{8200}')));
SELECT idem_publish('t', to_jsonb(array_fill(1e131071::numeric, '{40}')));
SELECT count(idem_publish('small', to_jsonb(array_fill(1e131071::numeric, '{30}'))));
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(topics => '{small}');
SELECT idem_publish('t', '1', NULL, to_jsonb(repeat(chr(1), 50000000)));
SELECT count(idem_publish('t', to_jsonb(repeat('x', 17000000)), k)) FROM unnest('{NULL,NULL,k,k}'::text[]) AS k;
SELECT count(idem_publish('t', to_jsonb(repeat('x', 1000)))) FROM generate_series(1, 200);
SELECT message_key, count(*) FROM idem_outbox_take(1000, '1 hour') GROUP BY message_key;
SELECT message_key, count(*) FROM idem_outbox_take(1000, '1 hour') GROUP BY message_key;
SELECT message_key, count(*) FROM idem_outbox_take(1000, '1 hour') GROUP BY message_key;
SELECT message_key, count(*) FROM idem_outbox_take(1000, '1 hour') GROUP BY message_key ORDER BY message_key;
SELECT message_key, count(*) FROM idem_outbox_take(1000, '1 hour') GROUP BY message_key;
TRUNCATE idem_outbox;

-- A message that a take leaves because it has enough text is not locked by it.
SELECT count(idem_publish('t', to_jsonb(repeat('x', 17000000)), k)) FROM unnest('{a,b}'::text[]) AS k;
BEGIN;
SELECT message_key FROM idem_outbox_take(10, '1 hour');
PREPARE TRANSACTION 'relay';
SELECT message_key FROM idem_outbox_take(10, '1 hour');
COMMIT PREPARED 'relay';
RESET idempotency.max_message_size;
TRUNCATE idem_outbox;

-- A key whose first message somebody has deleted is found again after a repair.
SELECT count(idem_publish('t', to_jsonb(i), 'key ' || i % 3)) FROM generate_series(1, 9) AS i;
DELETE FROM idem_outbox WHERE payload <@ '[1, 2]';
SELECT payload, message_key FROM idem_outbox_take(100, '1 hour');
SELECT payload, in_due_index FROM idem_outbox ORDER BY id;
SELECT idem_repair_outbox();
SELECT payload, in_due_index FROM idem_outbox ORDER BY id;
SELECT payload, message_key FROM idem_outbox_take(100, '1 hour') ORDER BY id;
SELECT idem_repair_outbox();
TRUNCATE idem_outbox;

-- A message whose transaction ends is taken once by a call, even with a lease of 0, when the scan continues behind those that others hold.
BEGIN;
SELECT count(idem_publish('t', '"short"'));
PREPARE TRANSACTION 'short';
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{20000}'));
PREPARE TRANSACTION 'many';
SELECT pg_sleep(1.1);
SELECT count(*) FROM idem_outbox_take();
COMMIT PREPARED 'short';
SELECT payload, attempt FROM idem_outbox_take(10, '0 s');
ROLLBACK PREPARED 'many';
TRUNCATE idem_outbox;

-- A function of an index that rolls back what it has written makes a take forget what it skips, and nothing else.
CREATE TABLE written (i int);
CREATE FUNCTION write_and_undo() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO written VALUES (1);
	RAISE SQLSTATE 'UN001';
EXCEPTION WHEN SQLSTATE 'UN001' THEN
END
$$;
CREATE FUNCTION undoing(attempt int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	PERFORM write_and_undo() WHERE attempt > 0;
	RETURN attempt;
END
$$;
CREATE INDEX undoing ON idem_outbox (undoing(attempt));
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"short"'::jsonb, '{1000}'));
UPDATE idem_outbox SET available_at = now() - interval '2 s' + 2 * (id % 1000) * interval '1 ms';
PREPARE TRANSACTION 'short';
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('"long"'::jsonb, '{1000}'));
UPDATE idem_outbox SET available_at = now() - interval '2 s' + (2 * (id % 1000) + 1) * interval '1 ms' WHERE payload = '"long"';
PREPARE TRANSACTION 'long';
SELECT pg_sleep(2.2);
SELECT count(*) FROM idem_outbox_take(1);
COMMIT PREPARED 'short';
SELECT payload, count(*) FROM idem_outbox_take(200) GROUP BY payload;
SELECT payload, count(*) FROM idem_outbox_take(1000) GROUP BY payload;
ROLLBACK PREPARED 'long';
DROP INDEX undoing;
DROP TABLE written;
DROP FUNCTION undoing, write_and_undo;
TRUNCATE idem_outbox;

-- A call that passes over many messages parks up to a fifth of them, so a few calls park them all.
CREATE PROCEDURE takes_until_parked(INOUT takes int) LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM idem_outbox WHERE in_due_index AND available_at < now() + '1 minute') LOOP
		PERFORM FROM idem_outbox_take();
		COMMIT;
		takes := takes + 1;
	END LOOP;
END
$$;
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', '{1}', ARRAY(SELECT 'key ' || i FROM generate_series(1, 10000) AS i), deliver_after => '1 hour');
PREPARE TRANSACTION 'heads';
SELECT count(*) FROM idem_publish_many('{t}', '{1}', ARRAY(SELECT 'key ' || i FROM generate_series(1, 10000) AS i));
COMMIT PREPARED 'heads';
DO $$
DECLARE
	takes int = 0;
BEGIN
	CALL takes_until_parked(takes);
	ASSERT takes BETWEEN 2 AND 12, takes;
END
$$;
DROP PROCEDURE takes_until_parked;
TRUNCATE idem_outbox;

-- A lease begins when its message is taken, and a call returns before half of the first one is over.
CREATE FUNCTION slow(attempt int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	PERFORM pg_sleep(0.02) WHERE attempt > 0;
	RETURN attempt;
END
$$;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{150}'));
CREATE INDEX slow ON idem_outbox (slow(attempt));
SELECT count(*) BETWEEN 2 AND 90 AS some FROM idem_outbox_take(200, '2 s');
SELECT max(available_at) - min(available_at) > '0.1 s' AS apart FROM idem_outbox WHERE attempt = 1;
DROP INDEX slow;
DROP FUNCTION slow;
TRUNCATE idem_outbox;

-- A take that waits does not look at the times of messages that other transactions hold.
BEGIN;
SELECT count(idem_publish('t', '1', deliver_after => i * interval '5 ms')) FROM generate_series(1, 190) AS i;
PREPARE TRANSACTION 'delayed';
CREATE FUNCTION pg_temp.pages_of_wait() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT FROM idem_outbox_take(1, wait => ''1 s'')' INTO plan;
	plan := plan -> 0 -> 'Plan';
	ASSERT (plan ->> 'Actual Rows')::numeric = 0;
	RETURN (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint;
END
$$;
SELECT pg_temp.pages_of_wait() < 300 AS few;
ROLLBACK PREPARED 'delayed';
TRUNCATE idem_outbox;

-- Of the messages of a key that are requeued, one is in the index that takes read.
SET idempotency.outbox_max_attempts = 1;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{1000}'), '{key}');
SELECT count(*) FROM idem_outbox_take(1000, '0');
SELECT count(*) FROM idem_outbox_take();
SELECT idem_outbox_requeue();
SELECT count(*) FROM idem_outbox WHERE in_due_index;
SELECT count(*), max(id) - min(id) AS last FROM (SELECT id FROM idem_outbox_take(1000)) AS taken;
RESET idempotency.outbox_max_attempts;
TRUNCATE idem_outbox;
ALTER TABLE idem_outbox RESET (autovacuum_enabled);
