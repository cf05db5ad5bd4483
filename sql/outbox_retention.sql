--
-- Transactional outbox: where acknowledged messages are not kept, the
-- acknowledgement deletes them.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

CREATE FUNCTION pg_temp.ids(VARIADIC names text[]) RETURNS bigint[]
LANGUAGE sql AS $$ SELECT array_agg(id ORDER BY id) FROM idem_outbox WHERE payload #>> '{}' = ANY (names) $$;
CREATE FUNCTION pg_temp.take(max_messages int DEFAULT 100, lease interval DEFAULT '1 hour') RETURNS text
LANGUAGE sql AS $$ SELECT coalesce(string_agg((payload #>> '{}') || '(' || attempt || ')', ' ' ORDER BY payload), '-') FROM idem_outbox_take($1, $2) $$;

SET idempotency.outbox_retention = 0;
SELECT count(idem_publish('orders', to_jsonb(coalesce(k, 'n') || i), k)) FROM unnest('{a,NULL}'::text[]) AS k, generate_series(1, 4) AS i;
SELECT pg_temp.take();
SELECT array_agg(id ORDER BY id) AS ids FROM idem_outbox \gset
SELECT idem_outbox_ack(pg_temp.ids('a1', 'n1', 'n2') || '{-1}'::bigint[]);
SELECT payload, state FROM idem_outbox ORDER BY id;
-- Each counts once; who comes late has lost the message.
SELECT idem_outbox_ack(:'ids'::bigint[]);
SELECT idem_outbox_ack(:'ids'::bigint[]);
SELECT idem_outbox_nack(id, 'late'), idem_outbox_nack(id, 'late', attempt => 1) FROM unnest(:'ids'::bigint[]) AS id LIMIT 1;
SELECT idem_outbox_requeue(:'ids'::bigint[]), idem_outbox_release(:'ids'::bigint[], '{1}'), count(e) FROM idem_outbox_extend(:'ids'::bigint[]) AS e;
SELECT count(*) FROM idem_outbox;
SELECT messages_deleted FROM idem_cleanup();

-- The next ones of a key are found, in whatever order it is acknowledged.
SELECT count(*) FROM idem_publish_many('{orders}', (SELECT array_agg(to_jsonb('a' || i)) FROM generate_series(1, 6) AS i), '{a}');
SELECT pg_temp.take(1);
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT pg_temp.take(2);
SELECT idem_outbox_ack(pg_temp.ids('a3'));
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a2'));
SELECT pg_temp.take(1);
SELECT idem_outbox_ack(pg_temp.ids('a5', 'a4'));
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a6'));
SELECT count(*) FROM idem_outbox;

-- Dead ones, and those that nobody has taken
SET idempotency.outbox_max_attempts = 1;
SELECT count(idem_publish('orders', to_jsonb(coalesce(k, 'n') || i), k)) FROM unnest('{a,NULL}'::text[]) AS k, generate_series(1, 2) AS i;
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take();
SELECT state, count(*) FROM idem_outbox GROUP BY state;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox;
SELECT count(idem_publish('orders', '"b1"', k)) FROM unnest('{b,NULL}'::text[]) AS k;
SELECT idem_outbox_ack(pg_temp.ids('b1'));
SELECT messages_deleted FROM idem_cleanup();
SELECT count(*) FROM idem_outbox;
RESET idempotency.outbox_max_attempts;

-- With its transaction an acknowledgement is undone.
SELECT count(idem_publish('orders', '"c1"', 'c'));
BEGIN;
SELECT pg_temp.take(), idem_outbox_ack(pg_temp.ids('c1'));
SELECT count(*) FROM idem_outbox;
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.take();
SAVEPOINT s;
SELECT idem_outbox_ack(pg_temp.ids('c1'));
ROLLBACK TO SAVEPOINT s;
SELECT payload, state FROM idem_outbox;
SELECT idem_outbox_ack(pg_temp.ids('c1'));
COMMIT;
SELECT count(*) FROM idem_outbox;
-- What was acknowledged before the setting changed is the cleanup's.
RESET idempotency.outbox_retention;
SELECT count(idem_publish('orders', '"d1"'));
SELECT idem_outbox_ack(pg_temp.ids('d1'));
SET idempotency.outbox_retention = 0;
SELECT idem_outbox_ack(pg_temp.ids('d1'));
SELECT payload, state FROM idem_outbox;
SELECT messages_deleted FROM idem_cleanup();

-- Of one key, acknowledged one by one: nothing stays behind that a take would have to pass.
RESET idempotency.outbox_retention;
SELECT count(idem_publish('one by one', '{}', 'key')) FROM generate_series(1, 200);
CREATE TEMP TABLE taken AS SELECT id FROM idem_outbox_take(200);
SELECT sum(idem_outbox_ack(ARRAY[id])) FROM taken;
SELECT state, in_due_index, count(*) FROM idem_outbox WHERE topic = 'one by one' GROUP BY state, in_due_index;
DELETE FROM idem_outbox;
-- Where their leases have run out, a take parks those behind the first one, a limited number in each call, and hands out what is behind them.
SELECT count(idem_publish('run out', '{}', 'key')) FROM generate_series(1, 1500);
SELECT count(*) FROM idem_outbox_take(1500, '0');
SELECT count(*) FROM idem_outbox_take(1, '1 hour');
SELECT count(idem_publish('behind', '{}'));
SELECT (SELECT count(*) FROM idem_outbox_take(1)) AS taken, count(*) FILTER (WHERE in_due_index) AS in_due_index FROM idem_outbox;
SELECT (SELECT count(*) FROM idem_outbox_take(1)) AS taken, count(*) FILTER (WHERE in_due_index) AS in_due_index FROM idem_outbox;
SELECT (SELECT count(*) FROM idem_outbox_take(1)) AS taken, count(*) FILTER (WHERE in_due_index) AS in_due_index FROM idem_outbox;
SELECT (SELECT count(*) FROM idem_outbox_take(1)) AS taken, count(*) FILTER (WHERE in_due_index) AS in_due_index FROM idem_outbox;
DELETE FROM idem_outbox;
