--
-- idem_outbox_blocked: which keys have due messages that wait behind another message
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\i sql/include/error_of.sql
\pset format unaligned
\pset tuples_only on

-- Its result, without times
CREATE FUNCTION pg_temp.blocked(max_lanes int DEFAULT 100) RETURNS TABLE (topic text, first bigint, waiting bigint, reason text, until text, has_pid boolean)
LANGUAGE sql AS $$
	SELECT b.topic, b.first_id, b.waiting, b.reason, CASE WHEN b.until > clock_timestamp() + interval '30 min' THEN round(extract(epoch FROM b.until - clock_timestamp()) / 3600) || ' h' WHEN b.until > clock_timestamp() THEN 'soon' END, b.pid IS NOT NULL
	FROM idem_outbox_blocked(max_lanes) AS b
	WHERE b.blocked_since BETWEEN clock_timestamp() - interval '2 hours' AND clock_timestamp()
$$;
CREATE FUNCTION pg_temp.health() RETURNS text
LANGUAGE sql AS $$
	SELECT concat_ws('|', status, CASE WHEN value > 3600 THEN 'more' WHEN value > 0 THEN 'some' ELSE 'none' END, regexp_replace(detail, 'until .*', 'until ...')) FROM idem_health() WHERE check_name = 'outbox_blocked'
$$;
SELECT * FROM pg_temp.blocked();
SELECT pg_temp.health();

--
-- One key stops all of its messages: the second one is leased for hours, and its thousand followers are due.
--
SELECT count(*) FROM idem_publish_many(ARRAY['hot'], ARRAY(SELECT to_jsonb(i) FROM generate_series(1, 1200) AS i), ARRAY['k']);
SELECT count(*) FROM idem_outbox_take(2000, '0.1 s', '{hot}');
SELECT pg_sleep(0.2);
CREATE TEMP TABLE taken AS SELECT id FROM idem_outbox_take(1, '30 s', '{hot}');
SELECT count(*) FROM idem_outbox_take(10, '30 s');
SELECT * FROM pg_temp.blocked();
SELECT idem_outbox_extend(ARRAY[(SELECT min(id) + 1 FROM taken)], '12 hours', ARRAY[1]) > 0;
SELECT idem_outbox_ack(ARRAY(SELECT id FROM taken));
SELECT * FROM pg_temp.blocked();
SELECT pg_temp.health();
SELECT labels ->> 'state', value > 0 FROM idem_metric_samples() WHERE name ~ 'outbox_blocked';
-- An operator's threshold
SET idempotency.health_outbox_blocked = '10h';
SELECT split_part(pg_temp.health(), '|', 1);
SET idempotency.health_outbox_blocked = '13h';
SELECT split_part(pg_temp.health(), '|', 1);
SET idempotency.health_outbox_blocked = 0;
SELECT split_part(pg_temp.health(), '|', 1);
RESET idempotency.health_outbox_blocked;
-- It is the fault of none if nothing waits behind.
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE id > 2;
SELECT * FROM pg_temp.blocked();
SELECT pg_temp.health();

--
-- A pause, a delay, a message without followers, followers that are not due, one that can be taken, one without a key
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{nacked,nacked,delayed,delayed,alone,later,later,due,due,unkeyed,unkeyed}', '{1}', '{k,k,k,k,k,k,k,k,k,NULL,NULL}');
UPDATE idem_outbox SET available_at = available_at + interval '1 hour' WHERE topic = 'delayed' AND id = 3 OR topic = 'later';
SELECT id, idem_outbox_nack(id, 'busy', '2 hours') FROM idem_outbox_take(1, '1 s', '{nacked}');
SELECT id FROM idem_outbox_take(1, '10 s', '{alone}');
SELECT id FROM idem_outbox_take(1, '10 s', '{unkeyed}');
SELECT * FROM pg_temp.blocked();
SELECT * FROM pg_temp.blocked(1);
SELECT count(*) FROM idem_outbox_blocked(0);
SELECT count(*) FROM idem_outbox_blocked(NULL);
SELECT pg_temp.error_of('SELECT idem_outbox_blocked(-1)');
-- A lease that is over blocks nobody.
UPDATE idem_outbox SET available_at = now() - interval '1 s' WHERE id = 1;
SELECT topic FROM pg_temp.blocked();

--
-- A prepared transaction holds the first message, and a savepoint's is found, too.
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{held}', '{1,2,3}', '{k}');
SELECT id FROM idem_outbox_take(1, '10 s');
BEGIN;
SAVEPOINT s;
SELECT idem_outbox_ack('{1}');
RELEASE s;
PREPARE TRANSACTION 'regress_blocked';
SELECT * FROM pg_temp.blocked();
SELECT pg_temp.health();
ROLLBACK PREPARED 'regress_blocked';
SELECT reason FROM pg_temp.blocked();
SELECT idem_outbox_ack('{1}');
SELECT * FROM pg_temp.blocked();
-- A message that another transaction has not committed does not wait, and blocks no other.
TRUNCATE idem_outbox;
BEGIN;
SELECT idem_publish('held', '1', 'k') IS NOT NULL;
PREPARE TRANSACTION 'regress_blocked';
SELECT idem_publish('held', '2', 'k') IS NOT NULL;
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'regress_blocked';

--
-- A due message that a transaction holds, with and without a key, and with nothing behind it: taken, and locked by hand
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
CREATE FUNCTION pg_temp.checks() RETURNS SETOF text LANGUAGE sql AS $$
	SELECT concat_ws('|', check_name, status, CASE WHEN value > 0 THEN 'some' END, detail) FROM idem_health() WHERE check_name IN ('outbox_oldest', 'outbox_blocked')
$$;
SELECT count(*) FROM idem_publish_many('{u,u,u,v,keyed}', '{1}', '{NULL,NULL,NULL,NULL,k}');
SELECT * FROM pg_temp.blocked();
BEGIN;
SELECT count(*) FROM idem_outbox_take(10);
PREPARE TRANSACTION 'regress_blocked';
SELECT count(*) FROM idem_outbox_take(10);
SELECT * FROM pg_temp.blocked() ORDER BY first;
SET idempotency.health_outbox_oldest = '1us';
SELECT * FROM pg_temp.checks();
RESET idempotency.health_outbox_oldest;
SELECT labels ->> 'state', value FROM idem_metric_samples() WHERE name = 'idempotency_outbox_blocked_keys';
ROLLBACK PREPARED 'regress_blocked';
SELECT * FROM pg_temp.blocked();
BEGIN;
SELECT id FROM idem_outbox WHERE topic IN ('v', 'keyed') ORDER BY id FOR SHARE;
PREPARE TRANSACTION 'regress_blocked';
BEGIN;
SELECT id FROM idem_outbox WHERE topic = 'keyed' FOR SHARE;
PREPARE TRANSACTION 'regress_blocked_2';
BEGIN;
SELECT id FROM idem_outbox WHERE topic = 'u' ORDER BY id FOR KEY SHARE;
PREPARE TRANSACTION 'regress_blocked_3';
SELECT * FROM pg_temp.blocked() ORDER BY first;
SELECT id FROM idem_outbox_take(10, '0.1 s');
ROLLBACK PREPARED 'regress_blocked';
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'regress_blocked_2';
ROLLBACK PREPARED 'regress_blocked_3';
SELECT * FROM pg_temp.blocked();
-- Behind what was taken since vacuum could last remove anything
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{20000}'));
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(10000);
BEGIN;
SELECT id FROM idem_outbox_take(1);
PREPARE TRANSACTION 'regress_blocked';
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(20000);
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'regress_blocked';

--
-- A key to which no row leads: somebody has deleted its first message.
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{u,u,u,acked,acked,v,v}', '{1}', '{k,k,k,k,k,NULL,NULL}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1, topics => '{acked}');
SELECT * FROM pg_temp.blocked();
DELETE FROM idem_outbox WHERE id = 1;
SELECT id FROM idem_outbox_take(10, '1 h', '{u}');
SELECT * FROM pg_temp.blocked();
UPDATE idem_outbox SET available_at = available_at - interval '10 min' WHERE topic = 'u';
SELECT * FROM pg_temp.checks();
SELECT idem_repair_outbox();
SELECT * FROM pg_temp.blocked();
SELECT id FROM idem_outbox_take(10, '1 h', '{u}');

--
-- Times from a dump may be infinite.
--
TRUNCATE idem_outbox;
SELECT count(*) FROM idem_publish_many('{t}', '{1,2}', '{k}');
SELECT count(*) FROM idem_outbox_take(1);
UPDATE idem_outbox SET available_at = CASE WHEN awaiting_ack THEN 'infinity' ELSE '-infinity' END::timestamptz;
SELECT blocked_since, until FROM idem_outbox_blocked();
SELECT status, value FROM idem_health() WHERE check_name = 'outbox_blocked';
SELECT value FROM idem_metric_samples() WHERE name = 'idempotency_outbox_blocked_seconds';

--
-- Messages behind more than a thousand that were leased together with the first one
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{batch}', array_fill('1'::jsonb, '{1500}'), '{k}');
SELECT count(*) FROM idem_outbox_take(1500, '12 hours');
SELECT * FROM pg_temp.blocked();
SELECT count(*) FROM idem_publish_many('{batch}', '{1,2,3}', '{k}');
SELECT * FROM pg_temp.blocked();

--
-- A message that became due when the one before it was acknowledged, and that no relay has looked for
--
CREATE FUNCTION pg_temp.oldest() RETURNS text LANGUAGE sql AS $$
	SELECT concat_ws('|', status, value > 500) FROM idem_health() WHERE check_name = 'outbox_oldest'
$$;
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{t}', '{1,2}', '{k}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1);
SELECT id, state, in_due_index FROM idem_outbox ORDER BY id;
SELECT pg_temp.oldest();
UPDATE idem_outbox SET available_at = available_at - interval '10 minutes';
SELECT pg_temp.oldest();
-- A pause of that message, or none behind
UPDATE idem_outbox SET available_at = now() + interval '10 minutes' WHERE id = 2;
SELECT pg_temp.oldest();
DELETE FROM idem_outbox WHERE id = 2;
SELECT pg_temp.oldest();

--
-- A key with many dead entries does not hide others, and its own first message is found.
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
ALTER TABLE idem_outbox SET (autovacuum_enabled = off);
SELECT count(*) FROM idem_publish_many('{hot}', array_fill('1'::jsonb, '{60000}'), '{k}');
SELECT count(*) FROM idem_publish_many('{gone}', array_fill('1'::jsonb, '{2000}'), '{k}');
SELECT count(*) FROM idem_publish_many('{other}', '{1,2}', '{k}');
BEGIN;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(60000, topics => '{hot}') WHERE id < 60000 - 10;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(2000, topics => '{gone}');
UPDATE idem_outbox SET available_at = now() WHERE state = 'pending' AND topic = 'hot' AND id > 60000 - 5;
SELECT count(*) FROM idem_outbox_take(1, topics => '{other}');
SELECT * FROM pg_temp.blocked() ORDER BY topic;
COMMIT;

--
-- Nor do dead entries before the first message of a key and an open transaction's behind it
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
BEGIN;
CREATE TABLE vacuum_removes_nothing ();
PREPARE TRANSACTION 'old';
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{400}'), '{k}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(400);
SELECT count(*) FROM idem_publish_many('{t}', '{1}', '{k}');
SELECT count(*) FROM idem_outbox_take(1);
SELECT count(*) FROM idem_publish_many('{t}', '{1}', '{k}');
SELECT * FROM pg_temp.blocked();
BEGIN;
SELECT count(*) FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{3000}'), '{k}');
PREPARE TRANSACTION 'open';
SELECT * FROM pg_temp.blocked();
SELECT count(*) FROM idem_publish_many('{t}', '{1}', '{k}');
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'open';
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'old';
ALTER TABLE idem_outbox RESET (autovacuum_enabled);

--
-- Nothing of keys and payloads; bounded, whatever there is: 20000 keys, and dead rows that nobody can remove
--
SELECT string_agg(a, ', ' ORDER BY o) FROM unnest((SELECT proargnames FROM pg_proc WHERE proname = 'idem_outbox_blocked')) WITH ORDINALITY AS u (a, o);
TRUNCATE idem_outbox;
SELECT count(*) FROM idem_publish_many('{many}', '{1}', (SELECT array_agg('key ' || i / 2) FROM generate_series(0, 39999) AS i));
UPDATE idem_outbox SET available_at = available_at + interval '1 hour' WHERE (payload::text, message_key, id) IN (SELECT payload::text, message_key, min(id) FROM idem_outbox GROUP BY payload::text, message_key);
SELECT count(*) BETWEEN 5000 AND 6000 AS a_sample, min(waiting), max(waiting) FROM idem_outbox_blocked(100000);
CREATE FUNCTION pg_temp.pages() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	line json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json, COSTS off, TIMING off, SUMMARY off) SELECT idem_outbox_blocked(1)' INTO line;
	RETURN (line -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::bigint + (line -> 0 -> 'Plan' ->> 'Shared Read Blocks')::bigint;
END
$$;
SELECT pg_temp.pages() < 60000 AS bounded;

--
-- One key among 20000 others that is blocked for longer than these: leased for hours, held for an hour.  The others are due, leased, or delayed.
--
TRUNCATE idem_outbox;
ALTER SEQUENCE idem_outbox_ids RESTART;
SELECT count(*) FROM idem_publish_many('{leased,leased,held,held}', '{1}', '{k}');
SELECT count(*) FROM idem_outbox_take(1, '6 hours', '{leased}');
UPDATE idem_outbox SET available_at = available_at - interval '1 hour' WHERE topic = 'held';
BEGIN;
SELECT idem_outbox_nack(min(id)) FROM idem_outbox WHERE topic = 'held';
PREPARE TRANSACTION 'held';
SELECT count(*) FROM idem_publish_many('{many}', '{1}', ARRAY(SELECT 'key ' || i FROM generate_series(1, 20000) AS i));
SELECT * FROM idem_health() WHERE check_name = 'outbox_blocked' AND (status <> 'critical' OR value NOT BETWEEN 6 * 3600 AND 6 * 3600 + 3600);
SELECT * FROM pg_temp.blocked();
SELECT count(*) FROM idem_outbox_take(20000, '1 minute', '{many}');
SELECT * FROM pg_temp.blocked();
UPDATE idem_outbox SET available_at = available_at + interval '10 hours', awaiting_ack = NULL WHERE topic = 'many';
SELECT * FROM pg_temp.blocked();
ROLLBACK PREPARED 'held';

--
-- Behind 60000 dead letters that were requeued and delivered, and that vacuum cannot remove: one that died last is found; without it, the number is not known.
--
TRUNCATE idem_outbox;
CREATE FUNCTION pg_temp.dead_letters() RETURNS text LANGUAGE sql AS $$
	SELECT concat_ws('|', status, coalesce(value::text, 'NULL'), substring(detail FROM '; ([^;]*(not known|more).*)'))
		|| coalesce((SELECT ' metric ' || value FROM idem_metric_samples() WHERE labels ->> 'state' = 'dead'), ' no metric')
	FROM idem_health() WHERE check_name = 'dead_letters'
$$;
SELECT pg_temp.dead_letters();
BEGIN;
CREATE TABLE vacuum_removes_nothing ();
PREPARE TRANSACTION 'old';
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{60000}'));
UPDATE idem_outbox SET state = 'dead', in_due_index = false;
UPDATE idem_outbox SET state = 'acked', acked_at = now();
SELECT pg_temp.dead_letters();
SELECT count(*) FROM idem_publish_many('{u}', '{2}');
UPDATE idem_outbox SET state = 'dead', in_due_index = false WHERE payload = '2';
SELECT pg_temp.dead_letters();
ROLLBACK PREPARED 'old';
VACUUM idem_outbox;
SELECT pg_temp.dead_letters();

--
-- A backlog behind 60000 taken messages that vacuum cannot remove is seen, without keys, with a key, and behind a message that was left; see IdempotencyOutboxDeep.
--
TRUNCATE idem_outbox;
BEGIN;
CREATE TABLE vacuum_removes_nothing ();
PREPARE TRANSACTION 'old';
CREATE FUNCTION pg_temp.due() RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(labels ->> 'state' || CASE WHEN value > 10000 THEN ' more' WHEN value > 0 THEN ' some' ELSE ' none' END, ', ') FROM idem_metric_samples() WHERE name ~ 'outbox_messages' AND labels ->> 'state' IN ('due', 'waiting')
$$;
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{60000}'));
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(60000) WHERE id % 60000 <> 1;
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{13000}'));
SELECT pg_temp.due();
UPDATE idem_outbox SET available_at = now() - interval '1 h' WHERE awaiting_ack AND state = 'pending';
SELECT pg_temp.due();
TRUNCATE idem_outbox;
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{60000}'), '{k}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(60000);
SELECT count(*) FROM idem_publish_many('{u}', array_fill('1'::jsonb, '{13000}'), '{k}');
SELECT pg_temp.due();
ROLLBACK PREPARED 'old';

--
-- A sequence behind its table: publishing fails with a hint, and idem_health tells.
--
TRUNCATE idem_outbox;
SELECT count(*) FROM idem_publish_many('{t}', '{1,2,3}');
SELECT count(*) FROM generate_series(1, 4) AS i, idem_claim('s', 'key-000000000000000' || i);
CREATE FUNCTION pg_temp.sequences() RETURNS text
LANGUAGE sql AS $$ SELECT concat_ws('|', status, value, detail) FROM idem_health() WHERE check_name = 'sequences' $$;
SELECT pg_temp.sequences();
SELECT setval('idem_outbox_ids', (SELECT min(id) FROM idem_outbox), false) > 0;
SELECT pg_temp.sequences();
SELECT pg_temp.error_of($$SELECT idem_publish('t', '4')$$) ~ 'HINT|idem_raise_claim_tokens\(0\)';
SELECT pg_temp.error_of($$SELECT idem_publish_many('{t}', '{4}')$$) ~ 'idem_raise_claim_tokens\(0\)';
SELECT setval('idem_claim_tokens', 1) > 0;
SELECT pg_temp.sequences();
SET idempotency.health_sequences = 0;
SELECT split_part(pg_temp.sequences(), '|', 1);
RESET idempotency.health_sequences;
SELECT idem_raise_claim_tokens(4) = 4;
SELECT pg_temp.sequences();
SELECT idem_publish('t', '4') IS NOT NULL;
-- An index of the user's own
CREATE UNIQUE INDEX ON idem_outbox (topic) WHERE topic = 'mine';
SELECT idem_publish('mine', '1') IS NOT NULL;
SELECT pg_temp.code_of($$SELECT idem_publish('mine', '2')$$);

--
-- A table that autovacuum does not visit
--
SELECT detail ~ 'autovacuum' FROM idem_health() WHERE check_name = 'bloat';
ALTER TABLE idem_tokens SET (autovacuum_enabled = off);
ALTER TABLE idem_keys SET (autovacuum_enabled = false);
ALTER TABLE idem_outbox SET (autovacuum_enabled = on);
SELECT substring(detail FROM 'autovacuum[^;]*') FROM idem_health() WHERE check_name = 'bloat';

DROP EXTENSION idempotency;
