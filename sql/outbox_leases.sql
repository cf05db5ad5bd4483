--
-- Transactional outbox: leases, extended and given back.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- Messages are named by their payloads here.
CREATE FUNCTION pg_temp.ids(VARIADIC names text[]) RETURNS bigint[]
LANGUAGE sql AS $$ SELECT array_agg(o.id ORDER BY n.ordinality) FROM unnest(names) WITH ORDINALITY AS n (name, ordinality) JOIN idem_outbox AS o ON o.payload #>> '{}' = n.name $$;
CREATE FUNCTION pg_temp.id(name text) RETURNS bigint
LANGUAGE sql AS $$ SELECT id FROM idem_outbox WHERE payload #>> '{}' = name $$;
-- The messages of a take, with the attempt, by name.
CREATE FUNCTION pg_temp.take(max_messages int DEFAULT 100, lease interval DEFAULT '1 hour', topics text[] DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$ SELECT coalesce(string_agg((payload #>> '{}') || '(' || attempt || ')', ' ' ORDER BY payload), '-') FROM idem_outbox_take($1, $2, $3) $$;
-- The result of an extension, by name, in its order.
CREATE FUNCTION pg_temp.extend(ids bigint[], lease interval DEFAULT '1 hour', attempts int[] DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$
	SELECT coalesce(string_agg(payload #>> '{}', ' ' ORDER BY n), '-') FROM idem_outbox_extend($1, $2, $3) WITH ORDINALITY AS e (id, n) JOIN idem_outbox USING (id)
$$;
CREATE FUNCTION pg_temp.show(VARIADIC names text[]) RETURNS TABLE (name text, state text, attempt int, counted int, leased boolean, available boolean, last_error text)
LANGUAGE sql AS $$
	SELECT payload #>> '{}', state, attempt, attempt - uncounted_attempts, awaiting_ack, available_at <= clock_timestamp(), last_error
	FROM idem_outbox WHERE payload #>> '{}' = ANY (names) ORDER BY id
$$;

--
-- Extend
--
SELECT count(idem_publish('orders', to_jsonb('a' || i))) FROM generate_series(1, 4) AS i;
SELECT pg_temp.take(3, '10 min');
-- From now, longer or shorter; in the order given; an id that comes twice is answered twice.
SELECT pg_temp.extend(pg_temp.ids('a3', 'a1', 'a2', 'a1'), '1 hour');
SELECT bool_and(available_at - clock_timestamp() BETWEEN '59 min' AND '1 hour') FROM idem_outbox WHERE attempt = 1;
SELECT pg_temp.extend(pg_temp.ids('a1'), '1 min');
SELECT available_at - clock_timestamp() BETWEEN '1 s' AND '1 min' FROM idem_outbox WHERE payload = '"a1"';
-- By default for 30 seconds, which NULL stands for, too.
SELECT count(*) FROM idem_outbox_extend(pg_temp.ids('a1'));
SELECT count(*) FROM idem_outbox_extend(pg_temp.ids('a2'), NULL, NULL);
SELECT bool_and(available_at - clock_timestamp() BETWEEN '1 s' AND '30 s') FROM idem_outbox WHERE payload IN ('"a1"', '"a2"');
-- Nothing else of it changes.
SELECT * FROM pg_temp.show('a1', 'a2', 'a3', 'a4');
-- Messages that no relay holds: never taken, acknowledged, refused, or missing.
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_nack(pg_temp.id('a2'), 'no', '1 hour', 1);
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2', 'a3', 'a4') || '{-1, 0, 9223372036854775807}', '2 hours');
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2', 'a3', 'a4'), '2 hours', '{1}');
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2', 'a4'), '2 hours', '{0}');
SELECT payload, available_at - clock_timestamp() > '1 hour' AS extended FROM idem_outbox ORDER BY id;
SELECT pg_temp.extend('{}'), pg_temp.extend('{}', attempts => '{}'), pg_temp.extend('{}', attempts => '{1}');
DELETE FROM idem_outbox;

-- Attempts belong to the ids in their places; those that do not match are not held.
SELECT count(idem_publish('orders', to_jsonb('a' || i))) FROM generate_series(1, 3) AS i;
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '10 min');
SELECT idem_outbox_nack(id, retry_after => '0') FROM unnest(pg_temp.ids('a3')) AS id;
SELECT pg_temp.take(lease => '10 min');
SELECT pg_temp.extend(pg_temp.ids('a3', 'a2', 'a1'), '1 hour', '{3,2,1}');
SELECT payload, available_at - clock_timestamp() > '10 min' AS extended FROM idem_outbox ORDER BY id;
SELECT pg_temp.extend(pg_temp.ids('a3', 'a2', 'a1'), '2 hours', '{2,3,2}');
SELECT payload, available_at - clock_timestamp() > '1 hour' AS extended FROM idem_outbox ORDER BY id;
SELECT pg_temp.extend(pg_temp.ids('a3', 'a2', 'a1'), '3 hours', '{2}');
-- Of the same message with two attempts, one can be right.
SELECT pg_temp.extend(pg_temp.ids('a1', 'a1', 'a2'), '3 hours', '{2,1,2}');
DELETE FROM idem_outbox;

-- A lease that is over: with the attempt it is still the relay's, until another one takes the message; without it, no relay holds the message.
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 2) AS i;
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'));
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'), '0', '{1,1}');
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'), '1 hour', '{1}');
SELECT pg_temp.take();
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'), '0');
SELECT pg_temp.take(lease => '10 min');
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'), '1 hour', '{1}');
SELECT bool_or(available_at - clock_timestamp() > '10 min') AS extended FROM idem_outbox;
-- The current holder can; an extension does not count as an attempt.
SELECT pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{2}');
SELECT * FROM pg_temp.show('a1', 'a2');
DELETE FROM idem_outbox;
-- The same holds after the last attempt. No relay holds a dead message, or one that was requeued.
SET idempotency.outbox_max_attempts = 1;
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.extend(pg_temp.ids('a1'), '0', '{1}');
SELECT pg_temp.take();
SELECT pg_temp.extend(pg_temp.ids('a1')), pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{1}');
SELECT idem_outbox_requeue();
SELECT pg_temp.extend(pg_temp.ids('a1')), pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{1}');
SELECT * FROM pg_temp.show('a1');
SELECT pg_temp.take();
SELECT pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{2}');
RESET idempotency.outbox_max_attempts;
DELETE FROM idem_outbox;
-- A pause is no lease.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '1 hour', 1);
SELECT pg_temp.extend(pg_temp.ids('a1'), '2 hours'), pg_temp.extend(pg_temp.ids('a1'), '2 hours', '{1}');
-- Nor is a delay.
SELECT count(idem_publish('orders', '"b1"', 'b', deliver_after => '1 hour'));
SELECT pg_temp.extend(pg_temp.ids('b1'), '2 hours'), pg_temp.extend(pg_temp.ids('b1'), '2 hours', '{0}');
SELECT bool_or(available_at - clock_timestamp() > '1 hour') FROM idem_outbox;
DELETE FROM idem_outbox;
-- If it was refused without having been taken, no relay holds it, either.
SELECT count(idem_publish('orders', '"a1"'));
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '1 hour');
SELECT pg_temp.extend(pg_temp.ids('a1')), pg_temp.extend(pg_temp.ids('a1'), attempts => '{0}'), idem_outbox_release(pg_temp.ids('a1'));
SELECT * FROM pg_temp.show('a1');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '1 hour', 0);
DELETE FROM idem_outbox;

--
-- Give back
--
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
SELECT pg_temp.take();
-- Available at once, and the attempt does not count; its number is used up.
SELECT idem_outbox_release(pg_temp.ids('a3', 'a2'), '{1}');
SELECT * FROM pg_temp.show('a1', 'a2', 'a3');
-- Twice counts once.
SELECT idem_outbox_release(pg_temp.ids('a3', 'a2'), '{1}'), idem_outbox_release(pg_temp.ids('a3', 'a2'));
SELECT * FROM pg_temp.show('a2', 'a3');
-- Of a key, what was given back stands behind what is still held.
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT pg_temp.take(1);
SELECT pg_temp.take();
-- ... and in front of what comes later.
SELECT idem_outbox_release(pg_temp.ids('a2'), '{2}');
SELECT count(idem_publish('orders', '"a4"', 'a'));
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- A relay that has released a message no longer holds it.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take();
SELECT idem_outbox_release(pg_temp.ids('a1'), '{1}');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'late', '1 hour', 1), pg_temp.extend(pg_temp.ids('a1'), attempts => '{1}');
SELECT * FROM pg_temp.show('a1');
-- Likewise where attempts before it count.
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '0', 2);
SELECT pg_temp.take();
SELECT idem_outbox_release(pg_temp.ids('a1'), '{3}');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'late', '1 hour', 3), idem_outbox_nack(pg_temp.id('a1'), 'late', '1 hour', 2), idem_outbox_nack(pg_temp.id('a1'), 'late', '1 hour', 1);
SELECT pg_temp.extend(pg_temp.ids('a1'), attempts => '{3}'), idem_outbox_release(pg_temp.ids('a1'), '{3}'), idem_outbox_release(pg_temp.ids('a1'), '{2}');
SELECT * FROM pg_temp.show('a1');
-- An acknowledgement counts all the same: it got through.
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_release(pg_temp.ids('a1')), idem_outbox_release(pg_temp.ids('a1'), '{3}');
DELETE FROM idem_outbox;
-- A nack that is repeated stays one.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '1 hour', 1);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '1 hour', 1);
-- What was refused is not untried, and pauses on.
SELECT idem_outbox_release(pg_temp.ids('a1')), idem_outbox_release(pg_temp.ids('a1'), '{1}');
SELECT * FROM pg_temp.show('a1');
DELETE FROM idem_outbox;
-- With another's attempt, or with none that there was, nothing changes.
SELECT count(idem_publish('orders', to_jsonb('a' || i))) FROM generate_series(1, 2) AS i;
SELECT idem_outbox_release(pg_temp.ids('a1', 'a2')), idem_outbox_release(pg_temp.ids('a1', 'a2'), '{0}'), idem_outbox_release('{-1,123456789}');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take();
SELECT idem_outbox_release(pg_temp.ids('a2', 'a1'), '{1,3}'), idem_outbox_release(pg_temp.ids('a2', 'a1'), '{0}');
SELECT * FROM pg_temp.show('a1', 'a2');
SELECT idem_outbox_release(pg_temp.ids('a2', 'a1', 'a2'), '{2,1,2}');
SELECT * FROM pg_temp.show('a1', 'a2');
SELECT idem_outbox_release('{}'), idem_outbox_release('{}', '{}'), idem_outbox_release('{}', '{1}');
DELETE FROM idem_outbox;
-- A lease that is over: as for an extension.
SELECT count(idem_publish('orders', '"a1"'));
SELECT pg_temp.take(lease => '0');
SELECT idem_outbox_release(pg_temp.ids('a1'));
SELECT idem_outbox_release(pg_temp.ids('a1'), '{1}');
SELECT * FROM pg_temp.show('a1');
DELETE FROM idem_outbox;

-- However often a message is given back, it does not die of that; of the others it does.
SET idempotency.outbox_max_attempts = 2;
SELECT count(idem_publish('orders', to_jsonb(coalesce(k, 'n') || 1), k)) FROM unnest('{a,NULL}'::text[]) AS k;
DO $$
BEGIN
	FOR i IN 1..20 LOOP
		ASSERT (SELECT idem_outbox_release(array_agg(id), array_agg(attempt)) FROM idem_outbox_take()) = 2;
	END LOOP;
END
$$;
SELECT * FROM pg_temp.show('a1', 'n1');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take();
SELECT idem_outbox_release(pg_temp.ids('a1'), '{22}');
SELECT idem_outbox_nack(pg_temp.id('n1'), 'no', '0', 22);
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT * FROM pg_temp.show('a1', 'n1');
-- The pause is that of the attempts that count.
SELECT idem_outbox_requeue();
SELECT pg_temp.take();
SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox;
SELECT pg_temp.take();
SELECT idem_outbox_nack(id) FROM idem_outbox;
SELECT bool_and(available_at - clock_timestamp() < '1 s') AS short FROM idem_outbox;
DELETE FROM idem_outbox;
-- The last attempt that there is can be given back, but not handed out again.
SELECT count(idem_publish('orders', '"a1"'));
UPDATE idem_outbox SET attempt = 2147483646, uncounted_attempts = 2147483646;
SELECT pg_temp.take();
SELECT pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{2147483647}');
SELECT idem_outbox_release(pg_temp.ids('a1'), '{2147483647}');
SELECT attempt, uncounted_attempts FROM idem_outbox;
SELECT pg_temp.take();
SELECT state FROM idem_outbox;
RESET idempotency.outbox_max_attempts;
DELETE FROM idem_outbox;

--
-- Within one transaction, and within one statement
--
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
BEGIN;
SELECT pg_temp.take(2);
SAVEPOINT s;
SELECT idem_outbox_release(pg_temp.ids('a2', 'a1'), '{1}');
SELECT pg_temp.take(2);
ROLLBACK TO SAVEPOINT s;
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2', 'a3'), '2 hours', '{1}');
SELECT idem_outbox_release(pg_temp.ids('a2'), '{1}'), pg_temp.extend(pg_temp.ids('a1', 'a2'), '2 hours', '{1}');
COMMIT;
SELECT * FROM pg_temp.show('a1', 'a2', 'a3');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.extend(pg_temp.ids('a1', 'a2'), '0', '{1}');
SELECT pg_temp.take(1), idem_outbox_release(pg_temp.ids('a1'), '{2}');
SELECT pg_temp.take();
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_outbox_release(pg_temp.ids('a1')), pg_temp.take(), pg_temp.extend(pg_temp.ids('a1', 'a2', 'a3'), '1 hour', '{2}');
COMMIT;
SELECT * FROM pg_temp.show('a1', 'a2', 'a3');
SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox;
-- Take and give back in one go
SELECT idem_outbox_release(array_agg(id), array_agg(attempt)) FROM idem_outbox_take();
SELECT count(*) FROM idem_outbox_take() AS t, idem_outbox_extend(ARRAY[t.id], '1 hour', ARRAY[t.attempt]);
DELETE FROM idem_outbox;

-- Many, with large payloads, which stay whole.
-- In bulk
SELECT count(idem_publish('orders', to_jsonb(repeat('payload ', 2000 * (i % 2)) || i), 'k' || i % 10)) FROM generate_series(1, 1000) AS i;
SELECT array_agg(id ORDER BY md5(id::text)) AS many, array_agg(attempt) AS attempts FROM idem_outbox_take(1000) \gset
SELECT array_agg(id ORDER BY n) = :'many' AS in_order FROM idem_outbox_extend(:'many', '1 hour', :'attempts') WITH ORDINALITY AS e (id, n);
SELECT idem_outbox_release(:'many', :'attempts');
SELECT count(*), count(DISTINCT payload), max(length(payload::text)) FROM idem_outbox_take(1000);
-- One by one
DELETE FROM idem_outbox;

--
-- Bad input
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend(NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend('{1,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend('{1}', '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend('{1}', '1 s', '{NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend('{1,2}', '1 s', '{1,2,3}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_extend('{1,2}', '1 s', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_release(NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_release('{1,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_release('{1,2}', '{1,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_release('{1,2,3}', '{1,2}') $$);
\pset tuples_only off
\pset format aligned
-- A lease past the end of time changes nothing either.
SELECT count(idem_publish('orders', '"a1"'));
SELECT pg_temp.take();
SELECT pg_temp.error_of(format('SELECT idem_outbox_extend(%L, ''300000 years'')', pg_temp.ids('a1')));
SELECT available_at - clock_timestamp() < '1 hour' FROM idem_outbox;

-- Read-only transactions
BEGIN READ ONLY;
SELECT f AS call, pg_temp.error_of('SELECT ' || f) FROM unnest(ARRAY['idem_outbox_extend(''{}'')', 'idem_outbox_release(''{}'')']) AS f;
COMMIT;

-- Rows that were restored may have no time at all.
UPDATE idem_outbox SET available_at = 'infinity';
SELECT pg_temp.extend(pg_temp.ids('a1'));
UPDATE idem_outbox SET available_at = '-infinity';
SELECT pg_temp.extend(pg_temp.ids('a1')), pg_temp.extend(pg_temp.ids('a1'), '1 hour', '{1}');
SELECT idem_outbox_release(pg_temp.ids('a1'));
SELECT * FROM pg_temp.show('a1');
DELETE FROM idem_outbox;

-- What is given back from behind is there at once, though the signpost of its key
-- is due when its lease would have ended.
SELECT count(idem_publish('behind', to_jsonb(i), 'k')) FROM generate_series(1, 3) AS i;
SELECT count(*) FROM idem_outbox_take(10, '0');
SELECT payload FROM idem_outbox_take(1, '1 hour');
SELECT count(*) FROM idem_outbox_take(10);
SELECT count(*) FROM idem_outbox_extend((SELECT array_agg(id) FROM idem_outbox WHERE payload = '2'), '1 hour', '{1}');
SELECT idem_outbox_ack((SELECT array_agg(id) FROM idem_outbox WHERE payload = '1'));
SELECT count(*) FROM idem_outbox_take(10);
SELECT idem_outbox_release((SELECT array_agg(id) FROM idem_outbox WHERE payload = '2'), '{1}');
SELECT payload, attempt FROM idem_outbox_take(10) ORDER BY payload;
DELETE FROM idem_outbox;
