--
-- Once-only tokens: form tokens, and the inbox of a message consumer.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- For how long a token is remembered, to the nearest minute.
CREATE FUNCTION pg_temp.remembered_for(which text) RETURNS interval
LANGUAGE sql AS $$ SELECT justify_hours(date_trunc('minute', expires_at - clock_timestamp() + '30 seconds')) FROM idem_tokens WHERE token = which $$;

--
-- One token
--
SELECT idem_once('form', 'token-1');
SELECT idem_once('form', 'token-1');
SELECT idem_once('form', 'token-1');
SELECT idem_once('form', 'token-2');
-- The same token in another scope is another token.
SELECT idem_once('inbox', 'token-1');
SELECT idem_once('inbox', 'token-1');
-- Parts of a name do not run together; case counts.
SELECT s, t, idem_once(s, t) AS first, idem_once(s, t) AS second
	FROM (VALUES ('a', 'bc'), ('ab', 'c'), ('A', 'BC'), (' a', 'bc'), ('ä', 'ö€😀')) AS n (s, t);
SELECT idem_once(repeat('s', 512), repeat('t', 512)) AS first, idem_once(repeat('s', 512), repeat('t', 512)) AS second,
	idem_once(repeat('s', 512), repeat('t', 511)) AS other;
-- Several calls in one statement see each other.
SELECT i, idem_once('form', 'statement') FROM generate_series(1, 3) AS i;
-- A literal without a type is one token, whatever it looks like.
SELECT idem_once('form', '{a,b}');
SELECT token FROM idem_tokens WHERE token LIKE '{%';

--
-- When a token was used
--
SELECT idem_once_at('form', 'token-1') BETWEEN now() - interval '1 h' AND clock_timestamp(), idem_once_at('form', 'never-used'), idem_once_at('other', 'token-1');
SELECT clock_timestamp() AS before \gset
SELECT idem_once('at', 'a'), clock_timestamp() AS between \gset
SELECT count(*) FROM idem_once_many('at', '{a,b}');
SELECT used_at FROM idem_tokens WHERE (scope, token) = ('at', 'a') \gset
-- A later use does not change it.
SELECT idem_once('at', 'a'), idem_once_at('at', 'a') = :'used_at', :'used_at' BETWEEN :'before'::timestamptz AND :'between', idem_once_at('at', 'b') > :'between';
-- Used again after it has expired, it was used then; expired, never.
UPDATE idem_tokens SET expires_at = clock_timestamp() WHERE (scope, token) = ('at', 'a');
SELECT idem_once_at('at', 'a');
SELECT idem_once('at', 'a', '0');
SELECT idem_once_at('at', 'a');
SELECT idem_once('at', 'a');
SELECT idem_once_at('at', 'a') > :'between';
-- As the snapshot sees it, in a read-only transaction, too; what was rolled back was not used.
BEGIN READ ONLY;
SELECT idem_once_at('at', 'b') IS NOT NULL;
COMMIT;
BEGIN;
SELECT idem_once('at', 'c'), idem_once_at('at', 'c') IS NULL;
SELECT idem_once_at('at', 'c') IS NOT NULL;
ROLLBACK;
SELECT idem_once_at('at', 'c');
SELECT pg_temp.error_of($$ SELECT idem_once_at(NULL, 'token') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_at('form', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_at('form', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_at(repeat('s', 513), 'token') $$);

--
-- An array: those seen for the first time, in the order given, without repeats
--
SELECT * FROM idem_once_many('array', '{c,a,b}'::text[]);
SELECT * FROM idem_once_many('array', '{c,a,b}'::text[]);
SELECT * FROM idem_once_many('array', '{b,z,a,y,c,x}'::text[]);
SELECT * FROM idem_once_many('array', '{r,q,r,q,q,p,r}'::text[]);
-- Neither the order nor what is a repeat is a matter of language.
SELECT * FROM idem_once_many('array', '{ä,Z,a,ÿ,Ä,A,z,"a ",€,ä}'::text[]);
SELECT * FROM idem_once_many('array', '{€,Z,ÿ,aa,Ä,A,"a ",ä}'::text[]);
-- Nothing in, nothing out.
SELECT * FROM idem_once_many('array', '{}'::text[]);
SELECT count(*) FROM idem_once_many('array', '{}'::text[]);
SELECT * FROM idem_once_many('array', '{one}'::text[]);
SELECT * FROM idem_once_many('array', '{one}'::text[]);
-- Dimensions do not matter.
SELECT * FROM idem_once_many('array', '{{m,l},{l,k}}'::text[]);
-- Scope by scope.
SELECT * FROM idem_once_many('array 2', '{c,a,b}'::text[]);
-- One token and an array are two ways to the same.
SELECT idem_once('array', 'c') AS c, idem_once('array', 'single') AS single;
SELECT * FROM idem_once_many('array', '{double,single}'::text[]);
SELECT idem_once('array', 'double');

-- A broker's batch
CREATE TABLE batch AS SELECT 'message ' || (i * 7919) % 500 AS message_id, i FROM generate_series(1, 500) AS i;
SELECT array_agg(t ORDER BY n) = (SELECT array_agg(message_id ORDER BY i) FROM batch) AS all_in_order
	FROM idem_once_many('broker', ARRAY(SELECT message_id FROM batch ORDER BY i)) WITH ORDINALITY AS o (t, n);
SELECT count(*) FROM idem_once_many('broker', ARRAY(SELECT message_id FROM batch ORDER BY random()));
SELECT * FROM idem_once_many('broker', ARRAY(SELECT message_id FROM batch ORDER BY i) || '{message 500}' || ARRAY(SELECT message_id FROM batch ORDER BY i DESC));
DROP TABLE batch;

-- All are used, however many rows the caller fetches, wherever the call is.
SELECT * FROM idem_once_many('fetch', '{a,b,c}'::text[]) LIMIT 1;
SELECT * FROM idem_once_many('fetch', '{a,b,c,d}'::text[]);
SELECT idem_once_many('fetch', '{f,e,d}'::text[]);
SELECT idem_once_many('fetch', '{h,g}'::text[]) LIMIT 1;
SELECT idem_once('fetch', 'g'), idem_once('fetch', 'h');
SELECT i, t FROM generate_series(1, 3) AS i, idem_once_many('lateral', ARRAY['t' || i, 't' || i + 1]) AS t;

--
-- ttl
--
SELECT idem_once('ttl', 'default');
SELECT pg_temp.remembered_for('default');
SELECT idem_once('ttl', 'null', NULL);
SELECT pg_temp.remembered_for('null');
SELECT idem_once('ttl', 'hour', '1 hour');
SELECT pg_temp.remembered_for('hour');
SET idempotency.token_ttl = '90min';
SELECT idem_once('ttl', 'setting');
SELECT pg_temp.remembered_for('setting');
SELECT * FROM idem_once_many('ttl', '{setting-array}'::text[]);
SELECT pg_temp.remembered_for('setting-array');
SELECT idem_once('ttl', 'longer', ttl => '720 hours');
SELECT pg_temp.remembered_for('longer');
RESET idempotency.token_ttl;
SELECT * FROM idem_once_many('ttl', '{array-1,array-2}'::text[], ttl => '2 hours');
SELECT pg_temp.remembered_for('array-1'), pg_temp.remembered_for('array-2');

-- A repeat does not change how long.
SELECT idem_once('ttl', 'hour', '1 day');
SELECT * FROM idem_once_many('ttl', '{hour}'::text[], '0');
SELECT pg_temp.remembered_for('hour');

-- A token that has expired is new again, cleaned up or not.
SELECT idem_once('ttl', 'zero', '0 s');
SELECT idem_once('ttl', 'zero', '0 s');
SELECT idem_once('ttl', 'zero', '1 hour');
SELECT idem_once('ttl', 'zero', '0 s');
SELECT pg_temp.remembered_for('zero');
SELECT count(*) FROM idem_tokens WHERE token = 'zero';
SELECT * FROM idem_once_many('ttl', '{e,f,g}'::text[], ttl => '0 s');
SELECT * FROM idem_once_many('ttl', '{f,hour,e}'::text[]);
SELECT * FROM idem_once_many('ttl', '{g,f,e}'::text[]);
-- In one call even a token that expires at once is seen once.
SELECT * FROM idem_once_many('ttl', '{i,i,i}'::text[], '0 s');
-- Time is the clock at the call, not the start of the transaction.
BEGIN;
SELECT idem_once('ttl', 'clock', '20 ms');
SELECT idem_once('ttl', 'long clock', '1 hour');
DO $$ BEGIN PERFORM pg_sleep(0.03); END $$;
SELECT idem_once('ttl', 'clock'), idem_once('ttl', 'long clock');
COMMIT;
-- A transaction that renews an expired token and aborts leaves it expired.
BEGIN;
SELECT idem_once('ttl', 'aborted', '0 s');
COMMIT;
BEGIN;
SELECT idem_once('ttl', 'aborted');
SELECT idem_once('ttl', 'aborted');
ROLLBACK;
SELECT idem_once('ttl', 'aborted');
SELECT idem_once('ttl', 'aborted');

-- Rows that were restored may have no time at all.
SELECT count(idem_once('infinite', t)) FROM unnest('{for ever,never}'::text[]) AS t;
UPDATE idem_tokens SET expires_at = CASE token WHEN 'never' THEN '-infinity' ELSE 'infinity' END::timestamptz WHERE scope = 'infinite';
SELECT t, idem_once('infinite', t), idem_once('infinite', t) AS again FROM unnest('{for ever,never}'::text[]) AS t;
UPDATE idem_tokens SET expires_at = '-infinity' WHERE scope = 'infinite' AND token = 'never';
SELECT tokens_deleted > 0 AS deleted FROM idem_cleanup();
SELECT token FROM idem_tokens WHERE scope = 'infinite';
DELETE FROM idem_tokens WHERE scope = 'infinite';

--
-- An abort takes the use back
--
BEGIN;
SELECT idem_once('abort', 'form');
SELECT * FROM idem_once_many('abort', '{b,a}'::text[]);
SELECT idem_once('abort', 'form'), idem_once('abort', 'a');
ROLLBACK;
SELECT idem_once('abort', 'form'), idem_once('abort', 'a');
BEGIN;
SELECT idem_once('abort', 'before');
SAVEPOINT s;
SELECT idem_once('abort', 'inside');
SELECT * FROM idem_once_many('abort', '{d,before,c}'::text[]);
ROLLBACK TO SAVEPOINT s;
SELECT idem_once('abort', 'inside'), idem_once('abort', 'before');
SELECT * FROM idem_once_many('abort', '{d,before,c}'::text[]);
SAVEPOINT s;
SELECT idem_once('abort', 'released');
RELEASE SAVEPOINT s;
SELECT idem_once('abort', 'released');
COMMIT;
SELECT * FROM idem_once_many('abort', '{inside,before,c,d,released,new}'::text[]);

-- The inbox: the message's effect and its token commit together.
CREATE TABLE balances (account text PRIMARY KEY, amount int CHECK (amount >= 0));
INSERT INTO balances VALUES ('a', 10), ('b', 0);
CREATE FUNCTION consume(message_id text, account_from text, account_to text, amount_moved int) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	IF NOT idem_once('balances', message_id) THEN
		RETURN 'seen';
	END IF;
	UPDATE balances SET amount = amount + amount_moved WHERE account = account_to;
	UPDATE balances SET amount = amount - amount_moved WHERE account = account_from;
	RETURN 'applied';
EXCEPTION WHEN check_violation THEN
	RETURN 'failed';
END
$$;
SELECT consume('m1', 'a', 'b', 4);
SELECT consume('m1', 'a', 'b', 4);
SELECT consume('m2', 'a', 'b', 7);
SELECT consume('m3', 'b', 'a', 4);
SELECT consume('m2', 'a', 'b', 7);
SELECT consume('m2', 'a', 'b', 7);
SELECT * FROM balances ORDER BY account;
DROP FUNCTION consume;
DROP TABLE balances;

-- Its own uses are no conflict under any isolation level.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_once('level', 'a'), idem_once('level', 'a');
SELECT * FROM idem_once_many('level', '{a,b}'::text[]);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_once('level', 'a'), idem_once('level', 'c'), idem_once('level', 'c');
SELECT * FROM idem_once_many('level', '{b,c,d}'::text[]);
COMMIT;

--
-- Bad input
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of($$ SELECT idem_once(NULL, 'token') $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', NULL::text) $$);
SELECT pg_temp.error_of($$ SELECT idem_once('', 'token') $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_once(repeat('s', 513), 'token') $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', repeat('ä', 128)) $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', repeat('t', 1000000)) $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', 'token', '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_once('bad', 'token', '300000 years') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many(NULL, '{a}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', NULL::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('', '{a}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many(repeat('s', 513), '{a}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', '{NULL}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', '{a,b,NULL,c}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', '{a,"",c}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', ARRAY['a', repeat('t', 513)]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', '{a}'::text[], '-1 s') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('bad', '{}'::text[], '-1 s') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many(NULL, '{}'::text[]) $$);
-- Nothing of it got in.
SELECT count(*) FROM idem_tokens WHERE scope = 'bad';
\pset tuples_only off
\pset format aligned

-- Read-only transactions
BEGIN READ ONLY;
SELECT pg_temp.error_of($$ SELECT idem_once('form', 'token-1') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('form', '{token-1}'::text[]) $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('form', '{}'::text[]) $$);
COMMIT;

-- A table that somebody altered
BEGIN;
CREATE FUNCTION pg_temp.noop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER t BEFORE INSERT ON idem_tokens FOR EACH ROW EXECUTE FUNCTION pg_temp.noop();
SELECT pg_temp.error_of($$ SELECT idem_once('form', 'altered') $$);
SELECT pg_temp.error_of($$ SELECT idem_once_many('form', '{altered}'::text[]) $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem_tokens ALTER COLUMN expires_at DROP NOT NULL;
SELECT pg_temp.error_of($$ SELECT idem_once('form', 'altered') $$);
ROLLBACK;
BEGIN;
CREATE RULE r AS ON INSERT TO idem_tokens DO ALSO NOTIFY tokens;
SELECT pg_temp.error_of($$ SELECT idem_once('form', 'altered') $$);
ROLLBACK;
SELECT idem_once('form', 'altered');

-- Additional indexes are welcome, and are kept up to date.
CREATE INDEX more_1 ON idem_tokens (token DESC) WHERE scope = 'indexed';
SELECT count(*) FROM idem_once_many('indexed', ARRAY(SELECT 'token ' || i FROM generate_series(1, 300) AS i), '0 s');
SELECT count(*) FROM idem_once_many('indexed', ARRAY(SELECT 'token ' || i FROM generate_series(1, 300) AS i));
SELECT count(*) FROM idem_once_many('indexed', ARRAY(SELECT 'token ' || i FROM generate_series(1, 300) AS i));
SET enable_seqscan = off;
SELECT count(*) FROM idem_tokens WHERE scope = 'indexed' AND token > 'token';
SELECT count(*) FROM idem_tokens WHERE scope = 'indexed' AND expires_at > now() + '1 day';
RESET enable_seqscan;
DROP INDEX more_1;

-- A seen token writes nothing: it takes no transaction id.
BEGIN;
SELECT idem_once('form', 'token-1');
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
SELECT idem_once('form', 'token-3');
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;
