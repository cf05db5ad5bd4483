--
-- Transactional outbox: many messages published at once.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- Messages are named by their payloads here.
CREATE FUNCTION pg_temp.take(max_messages int DEFAULT 100, lease interval DEFAULT '1 hour') RETURNS text
LANGUAGE sql AS $$
	SELECT coalesce(string_agg((payload #>> '{}') || '(' || attempt || ')', ' ' ORDER BY topic COLLATE "C", message_key COLLATE "C", n), '-')
	FROM idem_outbox_take($1, $2) WITH ORDINALITY AS t (id, message_id, topic, message_key, payload, headers, attempt, created_at, n)
$$;
CREATE FUNCTION pg_temp.ids(VARIADIC names text[]) RETURNS bigint[]
LANGUAGE sql AS $$ SELECT array_agg(id ORDER BY id) FROM idem_outbox WHERE payload #>> '{}' = ANY (names) $$;

-- A row for each, in the order given, as single calls would write it.
CREATE TEMP TABLE published AS
	SELECT * FROM idem_publish_many('{orders,mails,orders}', '{"\"a\"","\"b\"","\"c\""}', '{k,NULL,k}', '{NULL,"{\"h\": 1}",NULL}', '1 hour');
SELECT p.ordinal, o.topic, o.message_key, o.payload, o.headers, o.state, o.attempt, o.uncounted_attempts, o.awaiting_ack, o.acked_at, o.last_error,
	o.available_at - o.created_at AS delay, o.created_at BETWEEN now() - interval '1 minute' AND clock_timestamp() AS created_now, o.id - min(o.id) OVER () AS nth
	FROM published AS p JOIN idem_outbox AS o USING (message_id) ORDER BY p.ordinal;
SELECT key_hash IS NOT NULL, count(*), count(DISTINCT key_hash) FROM idem_outbox GROUP BY 1 ORDER BY 1;
DELETE FROM idem_outbox;
-- One key has one lane.
SELECT count(*) FROM idem_publish('orders', '1', 'customer-7'), idem_publish_many('{orders}', '{2}', '{customer-7}');
SELECT count(DISTINCT key_hash) FROM idem_outbox;
DELETE FROM idem_outbox;
-- The message ids are random UUIDs, as RFC 9562 lays them out.
SELECT count(DISTINCT message_id), bool_and(message_id::text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$'), bool_and(ordinal BETWEEN 1 AND 1000)
	FROM idem_publish_many('{uuid}', array_fill('0'::jsonb, '{1000}'));
DELETE FROM idem_outbox;

-- An array of one element stands for all; NULL and NULLs for no key, no headers.
SELECT count(*), max(ordinal) FROM idem_publish_many('{t}', '{1,2,3}');
SELECT count(*), max(ordinal) FROM idem_publish_many('{t,u}', '{1}', '{k}', '{"{}"}');
SELECT count(*), max(ordinal) FROM idem_publish_many('{t}', '{1}', '{k,NULL,l}');
SELECT count(*), max(ordinal) FROM idem_publish_many('{t}', '{1}', NULL, '{1,null,NULL}');
SELECT count(*), max(ordinal) FROM idem_publish_many('{t}', '{1}');
SELECT topic, message_key, payload, headers FROM idem_outbox ORDER BY id;
DELETE FROM idem_outbox;
-- Of none there are none.
SELECT * FROM idem_publish_many('{}', '{}');
SELECT * FROM idem_publish_many('{t}', '{}');
SELECT * FROM idem_publish_many('{}', '{1}', '{k}', '{1}', '1 hour');
SELECT count(*) FROM idem_outbox;

-- Messages of one key come in the order given, among others and behind what is there.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT count(*) FROM idem_publish_many('{orders}', '{"\"b1\"","\"a2\"","\"n1\"","\"a3\"","\"b2\"","\"c1\"","\"a4\""}', '{b,a,NULL,a,b,c,a}');
SELECT count(*) FROM idem_publish_many('{orders}', '{"\"a5\"","\"b3\"","\"a6\""}', '{a,b,a}');
SELECT pg_temp.take(1, '0') ~ '^\w\w\(1\)$' AS one;
SELECT idem_outbox_nack(id, retry_after => '0') FROM idem_outbox WHERE attempt > 0;
SELECT regexp_replace(pg_temp.take(lease => '0'), '\(.\)', '', 'g');
SELECT idem_outbox_ack(pg_temp.ids('a1', 'a2', 'b1'));
SELECT regexp_replace(pg_temp.take(), '\(.\)', '', 'g');
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a3'));
SELECT count(*) FROM idem_publish_many('{orders}', '{"\"a7\"","\"d1\"","\"d2\""}', '{a,d,d}');
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a4', 'a5', 'a6', 'd1'));
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- A key is delivered one message at a time, however the messages were published.
SELECT count(*) FROM idem_publish_many('{orders}', ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 9) AS i), ARRAY['k', 'l', 'k', 'l', 'k', 'k', 'k', 'l', 'k']);
SELECT count(idem_publish('orders', '10', 'k'));
SELECT count(*) FROM idem_publish_many('{orders}', '{11,12}', '{k,l}');
DO $$
DECLARE
	taken record;
	before int[] := '{0,0}';
	lane int;
BEGIN
	FOR i IN 1..12 LOOP
		SELECT id, message_key, payload::int AS n INTO taken FROM idem_outbox_take(1);
		lane := CASE taken.message_key WHEN 'k' THEN 1 ELSE 2 END;
		ASSERT taken.n > before[lane];
		before[lane] := taken.n;
		ASSERT idem_outbox_ack(ARRAY[taken.id]) = 1;
	END LOOP;
	RAISE NOTICE '%', before;
END
$$;
SELECT state, count(*) FROM idem_outbox GROUP BY state;
DELETE FROM idem_outbox;

-- All or nothing, with the transaction, with a savepoint, within one statement.
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', '{1,2}', '{k,NULL}');
ROLLBACK;
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', '{"\"kept\""}', '{k}');
SAVEPOINT s;
SELECT count(*) FROM idem_publish_many('{t}', '{"\"never\"","\"never\""}', '{k,l}');
ROLLBACK TO SAVEPOINT s;
SELECT count(*) FROM idem_publish_many('{t}', '{"\"kept too\""}', '{k}');
SELECT pg_temp.take();
COMMIT;
SELECT payload FROM idem_outbox ORDER BY id;
DELETE FROM idem_outbox;
SELECT count(*) FROM generate_series(1, 3) AS i, idem_publish_many('{t}', ARRAY[to_jsonb(i), to_jsonb(i * 10)], '{k,l}');
SELECT pg_temp.take();
DELETE FROM idem_outbox;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM idem_publish_many('{t}', '{1,2,3}', '{k,NULL,k}');
SELECT pg_temp.take();
COMMIT;
DELETE FROM idem_outbox;

-- Large payloads stay whole; so do many.
-- In bulk
SELECT count(*) FROM idem_publish_many('{t}', (SELECT array_agg(to_jsonb(repeat('payload ', 40 * i) || i)) FROM generate_series(1, 300) AS i), (SELECT array_agg('k' || i % 7) FROM generate_series(1, 300) AS i));
SELECT count(*), count(DISTINCT payload), sum(length(payload #>> '{}')) = 40 * 8 * 300 * 301 / 2 + 9 * 1 + 90 * 2 + 201 * 3 AS whole FROM idem_outbox_take(1000);
SELECT count(*) AS out_of_order FROM (SELECT length(payload::text) < lag(length(payload::text)) OVER (ORDER BY id) FROM idem_outbox) AS o (wrong) WHERE wrong;
DELETE FROM idem_outbox;
SELECT count(*), count(DISTINCT message_id), max(ordinal), bool_and(ordinal = n) AS in_order
	FROM idem_publish_many('{t,u}'::text[], NULL::jsonb[]) WITH ORDINALITY AS p (ordinal, message_id, n) WHERE false;
SELECT count(*), count(DISTINCT message_id), max(ordinal), bool_and(ordinal = n) AS in_order
	FROM idem_publish_many('{t}', (SELECT array_agg(to_jsonb(i)) FROM generate_series(1, 20000) AS i), (SELECT array_agg(CASE WHEN i % 2 = 0 THEN 'k' || i % 500 END) FROM generate_series(1, 20000) AS i))
		WITH ORDINALITY AS p (ordinal, message_id, n);
SELECT bool_and(payload::int = n) FROM (SELECT payload, row_number() OVER (ORDER BY id) AS n FROM idem_outbox) AS o;
SET enable_seqscan = off;
SELECT count(*) FROM idem_outbox WHERE id > 0;
RESET enable_seqscan;
SELECT count(*), count(DISTINCT id) FROM idem_outbox_take(20000);
-- One by one
DELETE FROM idem_outbox;

-- A call is planned for as many rows as there are.
EXPLAIN (COSTS on) SELECT * FROM idem_publish_many('{t}', '{1,2,3,4,5}') \g (tuples_only format=unaligned) |sed 's/cost=[^ ]* //'

--
-- Bad input: nothing is published, and the error shows only the place of the element.
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of($$ SELECT idem_publish_many(NULL, '{1}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t,NULL}', '{1}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t,""}', '{1}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many(ARRAY['t', repeat('t', 513)], '{1}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1}', '{k,""}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1}', ARRAY[repeat('k', 513)]) $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t,u}', '{1,2,3}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1,2}', '{k,l,m}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1,2}', NULL, '{1,2,3}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{{t},{u}}', '{1,2}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1}', deliver_after => '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1,2}', deliver_after => '300000 years') $$);
\pset tuples_only off
\pset format aligned
SELECT count(*) FROM idem_outbox;
BEGIN READ ONLY;
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{1}') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish_many('{}', '{}') $$);
COMMIT;
-- A sequence that was set back, in the middle of the batch
SELECT count(idem_publish('t', '1')) FROM generate_series(1, 3);
SELECT setval('idem_outbox_ids', min(id) - 2) = min(id) - 2 AS set_back FROM idem_outbox;
SELECT left(pg_temp.error_of($$ SELECT idem_publish_many('{t}', '{10,11,12,13,14}') $$), 5) AS error;
SELECT count(*) FROM idem_outbox WHERE payload::int >= 10;
SELECT setval('idem_outbox_ids', max(id)) > 0 AS mended FROM idem_outbox;
SELECT count(*) FROM idem_publish_many('{t}', '{10,11,12,13,14}');
DELETE FROM idem_outbox;
-- A statement that is cancelled leaves nothing.
\set VERBOSITY terse
SET statement_timeout = '20ms';
SELECT count(*) FROM (SELECT array_agg(to_jsonb(i)) AS payloads FROM generate_series(1, 1000) AS i) AS a, generate_series(1, 100000) AS n, idem_publish_many('{t}', a.payloads, ARRAY['k' || n]);
RESET statement_timeout;
\set VERBOSITY default
SELECT count(*) FROM idem_outbox;
-- Additional indexes are kept up to date, and a unique one holds.
CREATE UNIQUE INDEX more ON idem_outbox (payload) WHERE topic = 'unique';
SELECT count(*) FROM idem_publish_many('{unique}', '{1,2,3}');
SELECT left(pg_temp.error_of($$ SELECT idem_publish_many('{unique}', '{4,5,2}') $$), 5) AS error;
SELECT count(*) FROM idem_outbox;
DROP INDEX more;
DELETE FROM idem_outbox;
