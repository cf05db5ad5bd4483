--
-- Transactional outbox: publish, take, acknowledge, refuse, requeue.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- Messages are named by their payloads here.
CREATE FUNCTION pg_temp.ids(VARIADIC names text[]) RETURNS bigint[]
LANGUAGE sql AS $$ SELECT array_agg(id ORDER BY id) FROM idem_outbox WHERE payload #>> '{}' = ANY (names) $$;
CREATE FUNCTION pg_temp.id(name text) RETURNS bigint
LANGUAGE sql AS $$ SELECT id FROM idem_outbox WHERE payload #>> '{}' = name $$;
-- The messages of a take, with the attempt: topic by topic, key by key, each
-- key in the order of the result; messages without a key by name.
CREATE FUNCTION pg_temp.take(max_messages int DEFAULT 100, lease interval DEFAULT '1 hour', topics text[] DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$
	SELECT coalesce(string_agg((payload #>> '{}') || '(' || attempt || ')', ' ' ORDER BY topic COLLATE "C", message_key COLLATE "C",
		CASE WHEN message_key IS NULL THEN payload END, n), '-')
	FROM idem_outbox_take($1, $2, $3) WITH ORDINALITY
		AS t (id, message_id, topic, message_key, payload, headers, attempt, created_at, n)
$$;
CREATE FUNCTION pg_temp.show(VARIADIC names text[]) RETURNS TABLE (name text, state text, attempt int, leased_or_pausing boolean, acked boolean, last_error text)
LANGUAGE sql AS $$
	SELECT payload #>> '{}', state, attempt, available_at > clock_timestamp(), acked_at IS NOT NULL, last_error
	FROM idem_outbox WHERE payload #>> '{}' = ANY (names) ORDER BY id
$$;

--
-- Publish
--
SELECT idem_publish('orders', '"p1"') AS message_id \gset
SELECT message_id = :'message_id' AS same_id, topic, message_key, payload, headers, state, attempt,
	created_at BETWEEN now() - interval '1 minute' AND clock_timestamp() AS created_now, available_at = created_at AS available_now, acked_at, last_error
	FROM idem_outbox;
SELECT idem_publish('orders', '"p2"', 'customer 1', '{"trace": [1, 2]}', '1 hour') AS message_id \gset
SELECT message_id = :'message_id' AS same_id, topic, message_key, payload, headers, state, attempt,
	available_at - created_at AS delay FROM idem_outbox WHERE payload = '"p2"';
-- The message id is a random UUID, as RFC 9562 lays it out.
SELECT count(DISTINCT id), bool_and(id::text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$')
	FROM (SELECT idem_publish('uuid', '0') FROM generate_series(1, 100)) AS u (id);
DELETE FROM idem_outbox;
-- The relay gets it all as it was published.
SELECT count(idem_publish('orders', '{"b": 1.00, "a": [null, "ö€😀"]}', 'customer 1', '{"h": "v"}'));
SELECT t.id = o.id AS id, t.message_id = o.message_id AS message_id, t.created_at = o.created_at AS created_at, t.topic, t.message_key, t.payload, t.headers, t.attempt
	FROM idem_outbox_take() AS t JOIN idem_outbox AS o ON o.id = t.id;
SELECT count(*) FROM idem_outbox_take();
DELETE FROM idem_outbox;
-- Any JSON will do; names have up to 512 bytes; a large payload stays whole.
SELECT count(idem_publish(t, p, k, h)) FROM (VALUES ('t', 'null'::jsonb, 'k', 'null'::jsonb), (repeat('t', 512), '[]', repeat('k', 512), '[]'), ('ä ö', '"x"', 'ß€😀', '1'),
	('t', to_jsonb(repeat('payload ', 200000)), 'k', to_jsonb(repeat('header ', 200000)))) AS m (t, p, k, h);
SELECT length(topic), length(message_key), left(payload::text, 12) AS payload, length(payload::text), left(headers::text, 12) AS headers, length(headers::text)
	FROM idem_outbox_take() ORDER BY id;
DELETE FROM idem_outbox;
-- A lane is the beginning of the SHA-256 of topic and key, each behind its length; nobody can choose keys that share one.
CREATE FUNCTION pg_temp.counted(name text) RETURNS bytea
LANGUAGE sql AS $$ SELECT int4send(octet_length(convert_to(name, 'UTF8'))) || convert_to(name, 'UTF8') $$;
CREATE FUNCTION pg_temp.lane(topic text, message_key text) RETURNS bigint
LANGUAGE sql AS $$ SELECT ('x' || encode(substr(sha256(pg_temp.counted(topic) || pg_temp.counted(message_key)), 1, 8), 'hex'))::bit(64)::bigint $$;
SELECT count(idem_publish(t, '1', k)) FROM (VALUES ('orders', 'customer-7'), ('orders', 'cMLpJZRJzTKM'), ('order', 'scustomer-7'), ('ä€', '😀'), (repeat('t', 512), repeat('k', 512)), ('orders', NULL)) AS m (t, k);
SELECT count(*), count(key_hash), count(DISTINCT key_hash), bool_and(key_hash = pg_temp.lane(topic, message_key)) AS as_documented FROM idem_outbox;
SELECT key_hash FROM idem_outbox WHERE message_key = 'customer-7';
DELETE FROM idem_outbox;
-- A message exists if and only if its transaction commits.
BEGIN;
SELECT count(idem_publish('orders', '"never"', k)) FROM unnest('{k,NULL}'::text[]) AS k;
ROLLBACK;
BEGIN;
SELECT count(idem_publish('orders', '"kept"'));
SAVEPOINT s;
SELECT count(idem_publish('orders', '"never"'));
ROLLBACK TO SAVEPOINT s;
COMMIT;
SELECT pg_temp.take();
SELECT payload FROM idem_outbox;
DELETE FROM idem_outbox;

--
-- Take and acknowledge
--
SELECT pg_temp.take();
SELECT count(idem_publish('orders', to_jsonb('a' || i))) FROM generate_series(1, 4) AS i;
SELECT pg_temp.take();
-- What is leased is not handed out twice.
SELECT pg_temp.take();
SELECT * FROM pg_temp.show('a1', 'a4');
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT * FROM pg_temp.show('a1', 'a2');
-- Only what is new counts, and each once.
SELECT idem_outbox_ack(pg_temp.ids('a1', 'a2', 'a3') || pg_temp.ids('a2', 'a3') || '{-1, 0, 9223372036854775807}'::bigint[]);
SELECT idem_outbox_ack('{}');
SELECT idem_outbox_ack('{123456789}');
SELECT name, state, acked FROM pg_temp.show('a1', 'a2', 'a3', 'a4');
-- The time it was acknowledged first stays.
CREATE TEMP TABLE acked AS SELECT id, acked_at FROM idem_outbox WHERE state = 'acked';
SELECT idem_outbox_ack(array_agg(id)) FROM acked;
SELECT bool_and(a.acked_at = o.acked_at) FROM acked AS a JOIN idem_outbox AS o USING (id);
DROP TABLE acked;
-- What was never taken can be acknowledged: an administrator's way to skip it.
SELECT count(idem_publish('orders', '"skipped"'));
SELECT idem_outbox_ack(pg_temp.ids('skipped'));
SELECT pg_temp.take();
-- NULL stands for the default: a hundred messages, 30 seconds.
SELECT count(idem_publish('orders', '0')) FROM generate_series(1, 110);
SELECT count(*) FROM idem_outbox_take(NULL, NULL, NULL);
SELECT bool_and(available_at - clock_timestamp() BETWEEN '1 second' AND '30 seconds') FROM idem_outbox WHERE payload = '0' AND attempt = 1;
DELETE FROM idem_outbox;
-- The default lease is 30 seconds.
SELECT count(idem_publish('orders', '"leased"'));
SELECT count(*) FROM idem_outbox_take();
SELECT available_at - clock_timestamp() BETWEEN '1 second' AND '30 seconds' FROM idem_outbox WHERE payload = '"leased"';
DELETE FROM idem_outbox;

-- A lease that ran out makes the message takeable again; attempts count when
-- taken.
SELECT count(idem_publish('orders', to_jsonb(k || 1), k)) FROM unnest('{a,b}'::text[]) AS k;
SELECT count(idem_publish('orders', '"c1"'));
SELECT pg_temp.take(lease => '0 s');
SELECT pg_temp.take(lease => '20 ms');
DO $$ BEGIN PERFORM pg_sleep(0.03); END $$;
SELECT pg_temp.take(lease => '1 hour');
SELECT pg_temp.take();
-- One that comes late can still acknowledge.
SELECT idem_outbox_ack(pg_temp.ids('a1', 'b1', 'c1'));
DELETE FROM idem_outbox;

--
-- Topics
--
SELECT count(idem_publish(t, to_jsonb(t || coalesce(k, '')), k)) FROM unnest('{red,green,blue,RED}'::text[]) AS t, unnest('{k,NULL}'::text[]) AS k;
SELECT count(idem_publish('blue', '"blue"'));
SELECT pg_temp.take(topics => '{}');
SELECT pg_temp.take(topics => '{black}');
SELECT pg_temp.take(topics => '{red,black}');
SELECT pg_temp.take(topics => '{red}');
SELECT pg_temp.take(topics => '{green,red,blue}');
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- One that is named twice is taken from once.
SELECT count(idem_publish('red', to_jsonb(k || i), k)) FROM unnest('{x,y}'::text[]) AS k, generate_series(1, 2) AS i;
SELECT count(idem_publish('red', '"z1"'));
SELECT pg_temp.take(3, '0', '{red,green,red}') ~ '^\S+ \S+ \S+$' AS three;
UPDATE idem_outbox SET attempt = 0;
SELECT pg_temp.take(100, '0', '{red,green,red}');
SELECT pg_temp.take(topics => '{red,red}');
SELECT pg_temp.take(topics => '{red,red}');
DELETE FROM idem_outbox;
-- Names of topics and keys do not run together.
SELECT count(idem_publish(t, to_jsonb(t || '/' || k || '/' || i), k))
	FROM (VALUES ('a', 'bc'), ('ab', 'c'), ('A', 'bc'), ('a', 'BC'), ('a', ' bc'), ('bc', 'a')) AS n (t, k), generate_series(1, 2) AS i;
SELECT topic, message_key, count(*), max(attempt) FROM (SELECT * FROM idem_outbox_take(6) UNION ALL SELECT * FROM idem_outbox_take(6)) AS t GROUP BY topic, message_key ORDER BY topic COLLATE "C", message_key COLLATE "C";
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- All get their turn: topics, keys (whose lanes lie well apart here), messages with a key and those without.
SET idempotency.outbox_max_attempts = 1000000;
SELECT count(idem_publish(t, '0', k)) FROM unnest('{red,green,blue}'::text[]) AS t, unnest('{g,i,w,NULL}'::text[]) AS k;
-- In bulk
SELECT topic, count(message_key) > 20 AS with_key, count(*) - count(message_key) > 20 AS without_key, count(DISTINCT message_key) AS keys
	FROM generate_series(1, 600) AS i, idem_outbox_take(1 + 0 * i, '0') GROUP BY topic ORDER BY topic COLLATE "C";
SELECT topic, count(*) > 20 AS has_its_turn
	FROM generate_series(1, 200) AS i, idem_outbox_take(1 + 0 * i, '0', '{red,green,blue}') GROUP BY topic ORDER BY topic COLLATE "C";
-- One by one
RESET idempotency.outbox_max_attempts;
DELETE FROM idem_outbox;
-- A hundred thousand names of topics, in no order, are soon gone through.
SELECT count(idem_publish(t, to_jsonb(t))) FROM unnest('{topic 1,topic 77777}'::text[]) AS t;
SELECT array_agg('topic ' || i ORDER BY md5(i::text)) AS many FROM generate_series(1, 100000) AS i \gset
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.take(topics => :'many');
SELECT clock_timestamp() - :'before' < '30 s' AS quick;
DELETE FROM idem_outbox;
-- A thousand topics
-- In bulk
SELECT count(idem_publish('topic ' || i % 1000, to_jsonb(i), CASE WHEN i % 3 > 0 THEN 'k' END)) FROM generate_series(1, 3000) AS i;
SELECT count(*), count(DISTINCT id), count(DISTINCT topic) FROM idem_outbox_take(100000);
-- One by one
DELETE FROM idem_outbox;

--
-- Order: the messages of one topic and key
--
SELECT count(idem_publish('orders', to_jsonb(k || i), k)) FROM generate_series(1, 5) AS i, unnest('{a,b}'::text[]) AS k;
-- A batch takes what follows, in order, up to max_messages.
SELECT pg_temp.take();
SELECT pg_temp.take();
-- Its remainder waits for all of it.
UPDATE idem_outbox SET available_at = now(), attempt = 0;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE message_key = 'b';
SELECT pg_temp.take(3);
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a2', 'a3'));
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT pg_temp.take(1);
SELECT pg_temp.take(1);
SELECT idem_outbox_ack(pg_temp.ids('a4'));
SELECT pg_temp.take(1);
SELECT idem_outbox_ack(pg_temp.ids('a5'));
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- A leased head blocks its key and no other: not another topic's, not what has none.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take();
SELECT count(idem_publish(t, to_jsonb(name), k)) FROM (VALUES ('orders', 'a2', 'a'), ('orders', 'b1', 'b'), ('bills', 'c1', 'a'), ('orders', 'n1', NULL), ('orders', 'n2', NULL)) AS m (t, name, k);
SELECT pg_temp.take();
-- ... until its lease is over.
UPDATE idem_outbox SET available_at = now() WHERE payload = '"a1"';
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- A batch ends before a message that is leased.
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 4) AS i;
SELECT pg_temp.take(3);
SELECT idem_outbox_nack(pg_temp.id('a1'), retry_after => '0');
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id(name), retry_after => '0') FROM unnest('{a1,a3}'::text[]) AS name;
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id(name), retry_after => '0') FROM unnest('{a1,a2}'::text[]) AS name;
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- A delayed message blocks its key until it is due.
SELECT count(idem_publish('orders', '"a1"', 'a', deliver_after => '1 hour'));
SELECT count(idem_publish('orders', to_jsonb(k || 2), k, deliver_after => '0')) FROM unnest('{a,b}'::text[]) AS k;
SELECT count(idem_publish('orders', '"n1"', deliver_after => '1 hour'));
SELECT count(idem_publish('orders', '"n2"'));
SELECT pg_temp.take(lease => '0');
UPDATE idem_outbox SET available_at = now() WHERE attempt = 0;
SELECT pg_temp.take();
DELETE FROM idem_outbox;
SELECT count(idem_publish('orders', to_jsonb(coalesce(k, 'n') || 1), k, deliver_after => '20 ms')) FROM unnest('{a,NULL}'::text[]) AS k;
DO $$ BEGIN PERFORM pg_sleep(0.03); END $$;
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- In the middle it ends the batch.
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a', deliver_after => CASE i WHEN 3 THEN '1 hour'::interval END)) FROM generate_series(1, 4) AS i;
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1', 'a2'));
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- Messages without a key come in the order they became available.
SELECT count(idem_publish('orders', to_jsonb('n' || i))) FROM generate_series(1, 5) AS i;
UPDATE idem_outbox SET available_at = now() - right(payload #>> '{}', 1)::int * interval '1 hour';
-- A take begins where the session's last take found a message, unless that was rolled back.
BEGIN;
SELECT pg_current_xact_id() AS xid \gset
ROLLBACK;
SELECT payload FROM idem_outbox_take(3);
SELECT payload FROM idem_outbox_take(3);
DELETE FROM idem_outbox;

-- Many keys, many batches, of which only the first half gets through: every
-- message comes once, and each key in order.
SET idempotency.outbox_max_attempts = 1000;
-- In bulk
SELECT count(idem_publish('orders', to_jsonb(i), 'key ' || i % 97)) FROM generate_series(1, 1000) AS i;
CREATE TEMP TABLE received (n serial, id bigint, message_key text);
DO $$
DECLARE
	batch bigint[];
	half int;
BEGIN
	FOR i IN 1..10000 LOOP
		SELECT array_agg(id ORDER BY n) INTO batch
			FROM idem_outbox_take(1 + i % 17) WITH ORDINALITY AS t (id, message_id, topic, message_key, payload, headers, attempt, created_at, n);
		EXIT WHEN batch IS NULL;
		half := (cardinality(batch) + 1) / 2;
		INSERT INTO received (id, message_key)
			SELECT id, message_key FROM unnest(batch[:half]) WITH ORDINALITY AS b (id, n) JOIN idem_outbox USING (id) ORDER BY n;
		ASSERT idem_outbox_ack(batch[:half]) = half;
		PERFORM idem_outbox_nack(id, retry_after => '0') FROM unnest(batch[half + 1:]) AS id;
	END LOOP;
END
$$;
-- One by one
SELECT count(*), count(DISTINCT id), count(DISTINCT message_key) FROM received;
SELECT count(*) AS out_of_order FROM (SELECT id < lag(id) OVER (PARTITION BY message_key ORDER BY n) FROM received) AS r (wrong) WHERE wrong;
SELECT state, count(*), max(attempt) > 1 AS refused_before FROM idem_outbox GROUP BY state;
DROP TABLE received;
RESET idempotency.outbox_max_attempts;
DELETE FROM idem_outbox;

--
-- Refuse
--
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
SELECT pg_temp.take(2);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'broker is down', '1 hour');
SELECT * FROM pg_temp.show('a1');
SELECT idem_outbox_ack(pg_temp.ids('a2'));
-- One that pauses blocks its key.
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), retry_after => '0 s');
-- Without an error the last one stays.
SELECT * FROM pg_temp.show('a1');
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), error => 'still down', retry_after => '1 hour');
SELECT available_at - clock_timestamp() BETWEEN '59 min' AND '1 hour', last_error FROM idem_outbox WHERE payload = '"a1"';
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- With the attempt it was handed out as, a relay learns that it lost the message.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '1 hour');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'too late', '0', 1);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'never', '0', 3);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'never', '0', 0);
SELECT * FROM pg_temp.show('a1');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'in time', '0', 2);
SELECT * FROM pg_temp.show('a1');
SELECT pg_temp.take();
-- Nor is there anything to refuse in what was acknowledged, or is not there.
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no'), idem_outbox_nack(pg_temp.id('a1'), 'no', attempt => 3), idem_outbox_nack(123456789, 'no'), idem_outbox_nack(-1, 'no', attempt => 1);
SELECT * FROM pg_temp.show('a1');
DELETE FROM idem_outbox;

-- Without retry_after the pause is 1 second, doubled with each attempt up to
-- an hour, less up to a half at random.
SET idempotency.outbox_max_attempts = 1000;
CREATE FUNCTION pg_temp.pause_is_right(attempts int) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
	longest interval := least(interval '1 second' * 2 ^ least(attempts - 1, 20), interval '1 hour');
	before timestamptz;
	after timestamptz;
	available timestamptz;
	taken int;
	message bigint;
BEGIN
	PERFORM idem_publish('pause', '0');
	FOR i IN 1..attempts LOOP
		SELECT id, attempt INTO message, taken FROM idem_outbox_take(topics => '{pause}');
		ASSERT taken = i;
		IF i < attempts THEN
			PERFORM idem_outbox_nack(message, retry_after => '0');
		END IF;
	END LOOP;
	before := clock_timestamp();
	PERFORM idem_outbox_nack(message);
	after := clock_timestamp();
	SELECT available_at INTO available FROM idem_outbox WHERE id = message;
	PERFORM idem_outbox_ack(ARRAY[message]);
	RETURN available BETWEEN before + longest / 2 AND after + longest;
END
$$;
-- In bulk
SELECT a AS attempts, bool_and(pg_temp.pause_is_right(a)) AS pause_is_right
	FROM unnest('{1,2,3,4,5,11,12,13,14,15,40,100}'::int[]) AS a, generate_series(1, 5) GROUP BY a ORDER BY a;
-- Messages that failed together are not retried together.
SELECT count(idem_publish('jitter', to_jsonb(i))) FROM generate_series(1, 50) AS i;
SELECT count(*) FROM idem_outbox_take(lease => '0', topics => '{jitter}');
SELECT count(*) FROM idem_outbox_take(lease => '0', topics => '{jitter}');
SELECT count(*) FROM idem_outbox_take(lease => '0', topics => '{jitter}');
SELECT clock_timestamp() AS before \gset
SELECT count(idem_outbox_nack(id)) FROM idem_outbox_take(topics => '{jitter}');
SELECT max(available_at) - min(available_at) >= '2 seconds' AND max(available_at) <= clock_timestamp() + '8 seconds' AND min(available_at) >= :'before'::timestamptz + '4 seconds' AS spread FROM idem_outbox WHERE topic = 'jitter';
-- One by one
RESET idempotency.outbox_max_attempts;
DELETE FROM idem_outbox;

-- A long error is cut, between characters, rather than refused.
SELECT count(idem_publish('orders', '"a1"'));
SET idempotency.max_response_size = '10B';
SELECT idem_outbox_nack(pg_temp.id('a1'), 'broken €€€ pipe', '0');
RESET idempotency.max_response_size;
SELECT last_error FROM idem_outbox;
SELECT idem_outbox_nack(pg_temp.id('a1'), repeat('€', 1000000), '0');
SELECT length(last_error) BETWEEN 349000 AND 349526 AS cut FROM idem_outbox;
DELETE FROM idem_outbox;

--
-- Dead letters
--
SET idempotency.outbox_max_attempts = 3;
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 2) AS i;
SELECT pg_temp.take(1), idem_outbox_nack(pg_temp.id('a1'), 'error 1', '0');
SELECT pg_temp.take(1), idem_outbox_nack(pg_temp.id('a1'), 'error 2', '0');
SELECT pg_temp.take(1);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'error 3', '0');
SELECT * FROM pg_temp.show('a1', 'a2');
-- It is not handed out any more, and no longer blocks its key.
SELECT pg_temp.take();
-- Refusing it again changes nothing.
SELECT idem_outbox_nack(pg_temp.id('a1'), 'again', '0'), idem_outbox_nack(pg_temp.id('a1'), 'again', '0', 3), idem_outbox_nack(pg_temp.id('a1'), 'again', '0', 2);
SELECT * FROM pg_temp.show('a1');
-- One that got through after all can be acknowledged.
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT * FROM pg_temp.show('a1');
SELECT idem_outbox_requeue(pg_temp.ids('a1'));
DELETE FROM idem_outbox;

-- A message that kills its relay dies too, without a word from anyone.
SELECT count(idem_publish('orders', to_jsonb(name), k)) FROM (VALUES ('a1', 'a'), ('n1', NULL), ('n2', NULL)) AS m (name, k);
SELECT pg_temp.take(lease => '0');
SELECT idem_outbox_nack(pg_temp.id('n2'), 'a word', '0');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT * FROM pg_temp.show('a1', 'n1', 'n2');
SELECT count(idem_publish('orders', to_jsonb(name), k)) FROM (VALUES ('a2', 'a'), ('n3', NULL)) AS m (name, k);
-- It dies when the next take goes past it.
SELECT pg_temp.take();
SELECT * FROM pg_temp.show('a1', 'n1', 'n2', 'a2', 'n3');
DELETE FROM idem_outbox;
-- In the second half of its attempts it goes without those behind it, so it
-- does not use up theirs.
SET idempotency.outbox_max_attempts = 4;
SELECT count(idem_publish('orders', to_jsonb(k || i), k)) FROM unnest('{a,b}'::text[]) AS k, generate_series(1, 3) AS i;
SELECT pg_temp.take(lease => '0');
SELECT idem_outbox_ack(pg_temp.ids('b1', 'b2'));
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT * FROM pg_temp.show('a1', 'a2', 'a3', 'b3');
SELECT count(idem_publish('orders', to_jsonb(k || 4), k)) FROM unnest('{a,b}'::text[]) AS k;
SELECT pg_temp.take(lease => '0');
SELECT idem_outbox_ack(pg_temp.ids('a2'));
SELECT pg_temp.take(lease => '0');
DELETE FROM idem_outbox;
SET idempotency.outbox_max_attempts = 3;
-- The last lease is as good as the others.
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 2) AS i;
SELECT pg_temp.take(1, '0');
SELECT pg_temp.take(1, '0');
SELECT pg_temp.take(1, '1 hour');
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT * FROM pg_temp.show('a1');
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- One attempt only
SET idempotency.outbox_max_attempts = 1;
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
SELECT pg_temp.take(2);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no');
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a2'), 'no', '1 hour');
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- The attempts of a message do not overflow.
SET idempotency.outbox_max_attempts = 2147483647;
SELECT count(idem_publish('orders', '"a1"', 'a'));
UPDATE idem_outbox SET attempt = 2147483646;
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT * FROM pg_temp.show('a1');
DELETE FROM idem_outbox;

-- Back to pending, with all attempts, in its place in the order.
SET idempotency.outbox_max_attempts = 1;
SELECT count(idem_publish(t, to_jsonb(t || coalesce(k, 'n') || i), k)) FROM unnest('{x,y}'::text[]) AS t, unnest('{k,NULL}'::text[]) AS k, generate_series(1, 2) AS i;
SELECT pg_temp.take();
SELECT count(idem_outbox_nack(pg_temp.id(name), 'no')) FROM unnest('{xk1,xk2,xn1,yk1,yn1,yn2}'::text[]) AS name;
SELECT idem_outbox_ack(pg_temp.ids('xn2'));
SELECT idem_outbox_requeue('{}'), idem_outbox_requeue('{123456789}');
-- Only the dead ones: yk2 is leased, xn2 acknowledged.
SELECT idem_outbox_requeue(pg_temp.ids('xk1', 'yk2', 'xn2') || pg_temp.ids('xk1'));
SELECT * FROM pg_temp.show('xk1', 'yk2', 'xn2');
SELECT idem_outbox_requeue(pg_temp.ids('xk1'));
SELECT pg_temp.take();
SELECT idem_outbox_requeue();
SELECT * FROM pg_temp.show('xk1', 'xk2', 'xn1', 'yk1', 'yk2', 'yn1', 'yn2');
SELECT idem_outbox_requeue(NULL);
-- xk2 waits for xk1, which is leased; yk1 stands before yk2, which is leased.
SELECT pg_temp.take();
DELETE FROM idem_outbox;
-- Attempts never repeat: who had the message before it died has lost it.
SELECT count(idem_publish('orders', '"a1"', 'a'));
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take();
SELECT idem_outbox_requeue();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'late', '0', 1);
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'late', '0', 1);
SELECT * FROM pg_temp.show('a1');
SELECT idem_outbox_nack(pg_temp.id('a1'), 'in time', '0', 2);
SELECT * FROM pg_temp.show('a1');
-- They are counted from the requeue: for the last one, for the pause, and for taking it without those behind it.
SET idempotency.outbox_max_attempts = 4;
SELECT idem_outbox_requeue();
SELECT count(idem_publish('orders', '"a2"', 'a'));
SELECT pg_temp.take(1);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'first', attempt => 3);
SELECT available_at - clock_timestamp() < '1 s' AS short FROM idem_outbox WHERE payload = '"a1"';
SELECT idem_outbox_nack(pg_temp.id('a1'), 'first', '0');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take(lease => '0');
SELECT pg_temp.take();
SELECT name, state, attempt FROM pg_temp.show('a1', 'a2');
SELECT uncounted_attempts FROM idem_outbox WHERE payload = '"a1"';
-- What was never taken has no attempt that could be over.
SELECT count(idem_publish('orders', '"n1"'));
SELECT idem_outbox_nack(pg_temp.id('n1'), 'never', '0', 0);
DELETE FROM idem_outbox;
-- Not even where there is no higher number: the last attempt there is has been the last.
SELECT count(idem_publish('orders', '"a1"', 'a'));
UPDATE idem_outbox SET attempt = 2147483647, uncounted_attempts = 2147483647;
SELECT pg_temp.take();
SELECT state, attempt FROM idem_outbox;
SELECT idem_outbox_requeue(), pg_temp.take();
SELECT state, attempt FROM idem_outbox;
DELETE FROM idem_outbox;
SET idempotency.outbox_max_attempts = 1;
-- Many
-- In bulk
SELECT count(idem_publish('orders', to_jsonb(i), 'k' || i % 10)) FROM generate_series(1, 500) AS i;
SELECT count(idem_outbox_nack(id)) FROM idem_outbox_take(1000);
-- One by one
SELECT count(*) FROM idem_outbox WHERE state = 'dead';
SELECT idem_outbox_requeue();
SELECT count(*) FROM idem_outbox_take(1000);
DELETE FROM idem_outbox;
RESET idempotency.outbox_max_attempts;

--
-- Within one transaction, and within one statement
--
BEGIN;
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
COMMIT;
BEGIN;
SELECT pg_temp.take(2);
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT idem_outbox_nack(pg_temp.id('a2'), 'no', '0');
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a2', 'a3'));
-- With its transaction a take is undone, the attempt as well.
ROLLBACK;
SELECT * FROM pg_temp.show('a1', 'a2', 'a3');
BEGIN;
SELECT pg_temp.take(1);
SAVEPOINT s;
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT pg_temp.take();
ROLLBACK TO SAVEPOINT s;
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '0', 1);
SELECT pg_temp.take(1);
COMMIT;
SELECT * FROM pg_temp.show('a1', 'a2', 'a3');
DELETE FROM idem_outbox;

-- Two calls in one statement do not get the same message.
SELECT count(idem_publish('orders', to_jsonb(i), 'k' || i)) FROM generate_series(1, 6) AS i;
SELECT i, count(*), max(attempt) FROM generate_series(1, 4) AS i, idem_outbox_take(i) GROUP BY i ORDER BY i;
UPDATE idem_outbox SET available_at = now(), attempt = 0;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT i, count(*), max(attempt) FROM generate_series(1, 4) AS i, idem_outbox_take(i) GROUP BY i ORDER BY i;
COMMIT;
UPDATE idem_outbox SET available_at = now(), attempt = 0;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT i, count(*), max(attempt) FROM generate_series(1, 4) AS i, idem_outbox_take(i) GROUP BY i ORDER BY i;
COMMIT;
UPDATE idem_outbox SET available_at = now(), attempt = 0;
-- Take and acknowledge in one go
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(4);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(4);
COMMIT;
SELECT count(*) FROM idem_outbox WHERE state = 'acked' AND attempt = 1;
DELETE FROM idem_outbox;
-- A call does not hand out what it has taken itself, not even where the lease is over at once.
SELECT count(idem_publish('orders', to_jsonb(i), CASE WHEN i <= 100 THEN 'k' || i % 7 END)) FROM generate_series(1, 600) AS i;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*), count(DISTINCT id) FROM idem_outbox_take(10000, '0');
SELECT count(*), count(DISTINCT id), max(attempt) FROM idem_outbox_take(10000, '0');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*), count(DISTINCT id) FROM idem_outbox_take(10000, '0');
COMMIT;
SELECT count(*), count(DISTINCT id) FROM idem_outbox_take(10000, '0');
DELETE FROM idem_outbox;
-- Under any isolation level a transaction's own work is no conflict.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(idem_publish('orders', to_jsonb('a' || i), 'a')) FROM generate_series(1, 3) AS i;
SELECT pg_temp.take(2);
SELECT idem_outbox_nack(pg_temp.id('a1'), 'no', '0', 1);
SELECT pg_temp.take(2, '0');
SELECT idem_outbox_ack(pg_temp.ids('a1'));
SELECT pg_temp.take();
COMMIT;
DELETE FROM idem_outbox;

-- Rows that were restored may have no time at all.
SELECT count(idem_publish('orders', to_jsonb(k || i), k)) FROM unnest('{a,b}'::text[]) AS k, generate_series(1, 2) AS i;
UPDATE idem_outbox SET available_at = CASE payload #>> '{}' WHEN 'a1' THEN '-infinity' ELSE 'infinity' END::timestamptz WHERE payload #>> '{}' IN ('a1', 'b1');
-- A take begins where the session's last take found a message, unless that was rolled back.
BEGIN;
SELECT pg_current_xact_id() AS xid \gset
ROLLBACK;
SELECT pg_temp.take();
SELECT idem_outbox_nack(pg_temp.id('b1'), 'no', '0');
SELECT pg_temp.take();
SELECT idem_outbox_ack(pg_temp.ids('a1', 'a2', 'b1'));
UPDATE idem_outbox SET acked_at = CASE payload #>> '{}' WHEN 'a1' THEN '-infinity' ELSE 'infinity' END::timestamptz WHERE state = 'acked' AND payload #>> '{}' <> 'b1';
SELECT messages_deleted FROM idem_cleanup();
SELECT payload, state FROM idem_outbox ORDER BY id;
DELETE FROM idem_outbox;

-- All that is wanted is taken, however many rows the caller fetches.
SELECT count(idem_publish('orders', to_jsonb(i))) FROM generate_series(1, 5) AS i;
SELECT count(*) FROM (SELECT FROM idem_outbox_take(4) LIMIT 1) AS t;
SELECT count(*) FROM idem_outbox_take();
DELETE FROM idem_outbox;

--
-- The cost of a take does not depend on one key's backlog, nor on acknowledged
-- messages.
--
-- The pages that a take of ten messages looks at.
CREATE FUNCTION pg_temp.pages_of_take(topics text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE format('EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT * FROM idem_outbox_take(100, ''1 hour'', %L)', topics) INTO plan;
	plan := plan -> 0 -> 'Plan';
	ASSERT (plan ->> 'Actual Rows')::numeric = 10;
	RETURN (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint;
END
$$;
-- In bulk
VACUUM (INDEX_CLEANUP on) idem_outbox;
SELECT count(idem_publish(t, to_jsonb(i), 'hot')) FROM unnest('{small,big}'::text[]) AS t, generate_series(1, CASE t WHEN 'big' THEN 20000 ELSE 1 END) AS i;
SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{small}');
SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{big}');
SELECT count(idem_publish(t, to_jsonb(i), 'cold ' || i)) FROM unnest('{small,big}'::text[]) AS t, generate_series(1, 10) AS i;
SELECT pg_temp.pages_of_take('{small}') AS small, pg_temp.pages_of_take('{big}') AS big \gset
SELECT :small < 200 AS small_is_cheap, :big - :small < 100 AS so_is_big;
-- Likewise where it has to find the topics, and to look at all keys that wait.
SELECT count(idem_publish('big', to_jsonb(i), 'warm ' || i)) FROM generate_series(1, 10) AS i;
SELECT pg_temp.pages_of_take(NULL) AS all_topics \gset
SELECT :all_topics < 400 AS so_are_all_topics;
DELETE FROM idem_outbox;
-- Ten thousand messages that were acknowledged
SELECT count(idem_publish('done', to_jsonb(i), CASE WHEN i % 2 = 0 THEN 'key ' || i % 20 END)) FROM generate_series(1, 10000) AS i;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(10000);
VACUUM (INDEX_CLEANUP on) idem_outbox;
SELECT count(idem_publish('done', to_jsonb(i), CASE WHEN i % 2 = 0 THEN 'key ' || i END)) FROM generate_series(1, 10) AS i;
SELECT pg_temp.pages_of_take('{done}') AS done \gset
SELECT :done - :small < 100 AS so_is_done;
SELECT count(idem_publish('done', to_jsonb(i), CASE WHEN i % 2 = 0 THEN 'keys ' || i END)) FROM generate_series(1, 10) AS i;
SELECT pg_temp.pages_of_take(NULL) AS done \gset
SELECT :done - :small < 100 AS so_is_done;
DELETE FROM idem_outbox;
-- Likewise of one key, and before a vacuum: they are passed only once, or twice.
ALTER TABLE idem_outbox SET (autovacuum_enabled = off);
SELECT count(*) FROM idem_publish_many('{hot}', array_fill('1'::jsonb, '{20000}'), '{key}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(20000, '0');
SELECT pg_sleep(1.1);
CREATE FUNCTION pg_temp.pages_of_publish() RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT idem_publish(''hot'', ''1'', ''key'')' INTO plan;
	plan := plan -> 0 -> 'Plan';
	RETURN (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint;
END
$$;
CREATE PROCEDURE pg_temp.publish_and_take(INOUT publish bigint, INOUT take bigint) LANGUAGE plpgsql AS $$
BEGIN
	publish := pg_temp.pages_of_publish();
	COMMIT;
	PERFORM count(idem_publish('hot', '1', 'key')) FROM generate_series(2, 10);
	COMMIT;
	take := pg_temp.pages_of_take('{hot}');
	COMMIT;
	PERFORM idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE state = 'pending';
	COMMIT;
END
$$;
CALL pg_temp.publish_and_take(0, 0) \gset first_
CALL pg_temp.publish_and_take(0, 0) \gset second_
CALL pg_temp.publish_and_take(0, 0) \gset hot_
SELECT :first_publish > 150 AND :first_take > 300 AS at_first_all, :hot_publish < 50 AS then_publish_is_cheap, :hot_take - :small < 100 AS so_is_take;
-- Nor after a requeue of another key.  Two keys might share a counter, so one cheap take of three is enough.
CREATE PROCEDURE pg_temp.requeue_publish_and_take(key text, INOUT publish bigint, INOUT take bigint) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_publish('dead', '1', key);
	COMMIT;
	PERFORM set_config('idempotency.outbox_max_attempts', '1', false), idem_outbox_nack(id) FROM idem_outbox_take(1, '1 hour', '{dead}');
	PERFORM set_config('idempotency.outbox_max_attempts', '10', false);
	COMMIT;
	ASSERT idem_outbox_requeue() = 1;
	COMMIT;
	CALL pg_temp.publish_and_take(publish, take);
END
$$;
CALL pg_temp.requeue_publish_and_take('a', 0, 0) \gset a_
CALL pg_temp.requeue_publish_and_take('b', 0, 0) \gset b_
CALL pg_temp.requeue_publish_and_take('c', 0, 0) \gset c_
RESET idempotency.outbox_max_attempts;
SELECT least(:a_take, :b_take, :c_take) - :small < 100 AS a_take_of_other_keys_is_cheap;
-- Nor for each message of a batch whose leases ran out, while the first of them is held again: here nothing can be removed
-- before the transaction ends.
BEGIN;
SELECT count(*) FROM idem_publish_many('{lease}', array_fill('1'::jsonb, '{3000}'), '{key}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(2700, '0', '{lease}');
SELECT count(*) FROM idem_outbox_take(200, '0', '{lease}');
SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{lease}');
SELECT count(idem_publish('lease', to_jsonb(i), 'cold ' || i)) FROM generate_series(1, 10) AS i;
SELECT pg_temp.pages_of_take('{lease}') AS batch \gset
SELECT :batch < 10000 AS so_is_a_batch;
SELECT state, in_due_index, count(*) FROM idem_outbox WHERE topic = 'lease' GROUP BY state, in_due_index ORDER BY state, in_due_index;
ROLLBACK;
-- Nor does it add up where many of one key die at once, a thousand in a call; those behind them are taken with the last.
SET idempotency.outbox_max_attempts = 1;
BEGIN;
SELECT count(*) FROM idem_publish_many('{lease}', array_fill('1'::jsonb, '{2500}'), '{key}');
SELECT count(*) FROM idem_outbox_take(2500, '0', '{lease}');
SELECT count(*) FROM idem_publish_many('{lease}', '{2,3}', '{key}');
CREATE FUNCTION pg_temp.pages_of_deaths() RETURNS TABLE (few_pages boolean, taken jsonb, dead bigint)
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	CREATE TEMP TABLE last_words AS SELECT payload FROM idem_outbox LIMIT 0;
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) INSERT INTO last_words SELECT payload FROM idem_outbox_take(2)' INTO plan;
	plan := plan -> 0 -> 'Plan' -> 'Plans' -> 0;
	RETURN QUERY SELECT (plan ->> 'Shared Hit Blocks')::bigint + (plan ->> 'Shared Read Blocks')::bigint < 20000,
		(SELECT jsonb_agg(w.payload) FROM last_words AS w), (SELECT count(*) FROM idem_outbox WHERE state = 'dead');
	DROP TABLE last_words;
END
$$;
SELECT * FROM pg_temp.pages_of_deaths();
SELECT * FROM pg_temp.pages_of_deaths();
SELECT * FROM pg_temp.pages_of_deaths();
ROLLBACK;
-- So it is without a key.
BEGIN;
SELECT count(*) FROM idem_publish_many('{lease}', array_fill('1'::jsonb, '{1500}'));
SELECT count(*) FROM idem_outbox_take(1500, '0', '{lease}');
SELECT count(idem_publish('lease', '2'));
SELECT jsonb_agg(payload) FROM idem_outbox_take(2);
SELECT count(*) FROM idem_outbox WHERE state = 'dead';
SELECT jsonb_agg(payload) FROM idem_outbox_take(2);
SELECT count(*) FROM idem_outbox WHERE state = 'dead';
ROLLBACK;
RESET idempotency.outbox_max_attempts;
ALTER TABLE idem_outbox RESET (autovacuum_enabled);
DELETE FROM idem_outbox;

--
-- Bad input
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of($$ SELECT idem_publish(NULL, '1') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('', '1') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish(repeat('t', 513), '1') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish(repeat('ä', 128), '1') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', '1', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', '1', repeat('k', 513)) $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', '1', repeat('k', 1000000)) $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', '1', deliver_after => '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_publish('bad', '1', deliver_after => '300000 years') $$);
-- Nothing of it got in.
SELECT count(*) FROM idem_outbox;
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(0) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(-2147483648) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(lease => '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(lease => '300000 years') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(topics => '{a,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(topics => '{a,""}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(topics => ARRAY[repeat('t', 513)]) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_take(2147483647) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_ack(NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_ack('{1,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_nack(NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_nack(NULL, 'no', '1 second', 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_nack(1, retry_after => '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_outbox_requeue('{1,NULL}') $$);
\pset tuples_only off
\pset format aligned
-- A pause past the end of time changes nothing either.
SELECT count(idem_publish('orders', '"a1"'));
SELECT pg_temp.take();
SELECT pg_temp.error_of(format('SELECT idem_outbox_nack(%s, ''no'', ''300000 years'')', pg_temp.id('a1')));
SELECT * FROM pg_temp.show('a1');

-- Read-only transactions
BEGIN READ ONLY;
SELECT f AS call, pg_temp.error_of('SELECT ' || f) FROM unnest(ARRAY['idem_publish(''orders'', ''1'')', 'idem_outbox_take()', 'idem_outbox_take(topics => ''{}'')', 'idem_outbox_ack(''{}'')',
	'idem_outbox_nack(1)', 'idem_outbox_requeue()', 'idem_outbox_requeue(''{}'')']) AS f;
COMMIT;

-- A table that somebody altered
CREATE FUNCTION pg_temp.noop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
BEGIN;
CREATE TRIGGER t AFTER UPDATE ON idem_outbox FOR EACH ROW EXECUTE FUNCTION pg_temp.noop();
SELECT f AS call, pg_temp.error_of('SELECT ' || f) FROM unnest(ARRAY['idem_publish(''orders'', ''1'')', 'idem_outbox_take()', 'idem_outbox_ack(''{}'')',
	'idem_outbox_nack(1)', 'idem_outbox_requeue()']) AS f;
ROLLBACK;
BEGIN;
ALTER TABLE idem_outbox ADD CHECK (attempt < 10);
SELECT pg_temp.error_of($$ SELECT idem_publish('orders', '1') $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem_outbox ALTER COLUMN payload TYPE json;
SELECT pg_temp.error_of($$ SELECT idem_publish('orders', '1') $$);
ROLLBACK;
SELECT count(idem_publish('orders', '"a2"'));
SELECT pg_temp.take();
DELETE FROM idem_outbox;

-- Additional indexes are welcome, and are kept up to date.
CREATE UNIQUE INDEX more_1 ON idem_outbox (message_id);
CREATE INDEX more_2 ON idem_outbox (attempt, topic);
CREATE INDEX more_3 ON idem_outbox ((payload #>> '{}')) WHERE state = 'acked';
SELECT count(idem_publish('orders', to_jsonb(i), CASE WHEN i % 2 = 0 THEN 'key ' || i % 10 END)) FROM generate_series(1, 300) AS i;
SELECT count(*) FROM idem_outbox_take(1000, '0');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1000) WHERE attempt = 2 AND id % 3 = 0;
SET enable_seqscan = off;
SELECT count(*) FROM idem_outbox WHERE attempt = 2 AND topic = 'orders';
SELECT count(*) FROM idem_outbox WHERE state = 'acked' AND payload #>> '{}' > '';
SELECT count(*) FROM idem_outbox AS a JOIN idem_outbox AS b USING (message_id);
RESET enable_seqscan;
DROP INDEX more_1, more_2, more_3;
-- The extension's own ones as well
SELECT count(idem_outbox_nack(id)) FROM idem_outbox WHERE state = 'pending';
SET enable_seqscan = off;
SELECT count(*) FROM idem_outbox WHERE topic = 'orders' AND state = 'pending' AND key_hash IS NULL;
SELECT count(*) FROM idem_outbox WHERE topic = 'orders' AND state = 'pending' AND key_hash IS NOT NULL;
SET enable_seqscan = on;
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SELECT count(*) FROM idem_outbox WHERE topic = 'orders' AND state = 'pending' AND key_hash IS NULL;
SELECT count(*) FROM idem_outbox WHERE topic = 'orders' AND state = 'pending' AND key_hash IS NOT NULL;
RESET enable_seqscan;
RESET enable_indexscan;
RESET enable_bitmapscan;
DELETE FROM idem_outbox;
