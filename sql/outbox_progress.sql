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
-- Now and then a take begins at the beginning.
SELECT :first > 100 AS first_passes_all, min(pg_temp.pages_of_take()) < 100 AS then_few FROM generate_series(1, 3);
ROLLBACK;
TRUNCATE idem_outbox;

-- The sweep goes on where it has stopped, sixteen lanes at a time, and makes lanes of the take's topics ready only.
SELECT count(idem_publish(t, to_jsonb(i), 'key ' || i)) FROM unnest('{mine,other}'::text[]) AS t, generate_series(1, 16) AS i;
UPDATE idem_outbox SET in_due_index = false;
CREATE TEMP TABLE sweeps (taken int);
DO $$
DECLARE
	n int;
BEGIN
	FOR i IN 1..3000 LOOP
		n := count(*) FROM idem_outbox_take(100, '1 hour', '{mine}');
		IF n > 0 THEN
			INSERT INTO sweeps VALUES (n);
		END IF;
		EXIT WHEN (SELECT sum(taken) FROM sweeps) = 16;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;
SELECT sum(taken), count(*) <= 3 AS in_turn FROM sweeps;
SELECT topic, in_due_index, count(*) FROM idem_outbox GROUP BY topic, in_due_index;
ALTER TABLE idem_outbox RESET (autovacuum_enabled);
