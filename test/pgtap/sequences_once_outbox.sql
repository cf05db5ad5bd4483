--
-- Client sequences, once-only tokens and outbox: signatures, privileges,
-- outcomes, SQLSTATEs
--
-- A prepared transaction is the second session: it holds an append, a token,
-- and a message that it has taken.  All of it is gone at the end.
--
SET client_min_messages = error;

-- Functions as the design writes them; pg_temp.arguments_of() brings the
-- catalog's spelling into this form.
CREATE TEMP TABLE promised (
	signature text,
	arguments text,
	result text,
	attributes text,
	call text
);
INSERT INTO promised VALUES
('idem_try_append(text, text, bigint, int, bigint, boolean, interval)',
	'aggregate text, client_id text, client_seq bigint,
	 event_count int DEFAULT 1, expected_version bigint DEFAULT NULL,
	 allow_gaps boolean DEFAULT true, wait interval DEFAULT NULL',
	'idem_append_result', 'c volatile called-on-null parallel-unsafe',
	$$idem_try_append('order', 'phone', 1)$$),
('idem_last_client_seq(text, text)',
	'aggregate text, client_id text',
	'bigint', 'c stable called-on-null parallel-safe',
	$$idem_last_client_seq('order', 'phone')$$),
('idem_once(text, text, interval)',
	'scope text, token text, ttl interval DEFAULT NULL',
	'boolean', 'c volatile called-on-null parallel-unsafe',
	$$idem_once('form', 'token')$$),
('idem_once_many(text, text[], interval)',
	'scope text, tokens text[], ttl interval DEFAULT NULL',
	'SETOF text', 'c volatile called-on-null parallel-unsafe',
	$$idem_once_many('form', '{a,b}'::text[])$$),
('idem_publish(text, jsonb, text, jsonb, interval)',
	'topic text, payload jsonb, message_key text DEFAULT NULL,
	 headers jsonb DEFAULT NULL, deliver_after interval DEFAULT NULL',
	'uuid', 'c volatile called-on-null parallel-unsafe',
	$$idem_publish('t', '1')$$),
('idem_publish_many(text[], jsonb[], text[], jsonb[], interval)',
	'topics text[], payloads jsonb[], message_keys text[] DEFAULT NULL,
	 headers jsonb[] DEFAULT NULL, deliver_after interval DEFAULT NULL,
	 OUT ordinal int, OUT message_id uuid',
	'SETOF record', 'c volatile called-on-null parallel-unsafe',
	$$idem_publish_many('{t,u}', '{1}')$$),
('idem_outbox_take(int, interval, text[], interval)',
	'max_messages int DEFAULT 100,
	 lease interval DEFAULT ''00:00:30''::interval,
	 topics text[] DEFAULT NULL, wait interval DEFAULT NULL,
	 OUT id bigint, OUT message_id uuid, OUT topic text,
	 OUT message_key text, OUT payload jsonb, OUT headers jsonb,
	 OUT attempt int, OUT created_at timestamptz',
	'SETOF record', 'c volatile called-on-null parallel-unsafe',
	'idem_outbox_take()'),
('idem_outbox_ack(bigint[])',
	'ids bigint[]',
	'int', 'c volatile called-on-null parallel-unsafe',
	$$idem_outbox_ack('{-1}')$$),
('idem_outbox_nack(bigint, text, interval, int)',
	'id bigint, error text DEFAULT NULL,
	 retry_after interval DEFAULT NULL, attempt int DEFAULT NULL',
	'text', 'c volatile called-on-null parallel-unsafe',
	'idem_outbox_nack(-1)'),
('idem_outbox_requeue(bigint[])',
	'ids bigint[] DEFAULT NULL',
	'int', 'c volatile called-on-null parallel-unsafe',
	'idem_outbox_requeue()'),
('idem_outbox_extend(bigint[], interval, int[])',
	'ids bigint[], lease interval DEFAULT ''00:00:30''::interval,
	 attempts int[] DEFAULT NULL',
	'SETOF bigint', 'c volatile called-on-null parallel-unsafe',
	$$idem_outbox_extend('{-1}')$$),
('idem_outbox_give_back(bigint[], int[])',
	'ids bigint[], attempts int[] DEFAULT NULL',
	'int', 'c volatile called-on-null parallel-unsafe',
	$$idem_outbox_give_back('{-1}')$$);

CREATE FUNCTION pg_temp.short_types(text) RETURNS text
LANGUAGE sql
RETURN replace(replace($1, 'timestamp with time zone', 'timestamptz'),
	'integer', 'int');

CREATE FUNCTION pg_temp.arguments_of(function oid) RETURNS text
LANGUAGE sql
RETURN pg_temp.short_types(regexp_replace(pg_get_function_arguments(function),
	'DEFAULT NULL::[a-z]+(\[\])?', 'DEFAULT NULL', 'g'));

CREATE FUNCTION pg_temp.attributes_of(function oid) RETURNS text
LANGUAGE sql
RETURN (
	SELECT concat_ws(' ', l.lanname,
		CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable'
			ELSE 'volatile' END,
		CASE WHEN p.proisstrict THEN 'strict' ELSE 'called-on-null' END,
		CASE p.proparallel WHEN 's' THEN 'parallel-safe'
			WHEN 'r' THEN 'parallel-restricted' ELSE 'parallel-unsafe' END)
	FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
	WHERE p.oid = function
);

-- Every error that sqlstate_of() has seen.
CREATE TEMP TABLE errors (
	call text,
	sqlstate text
);

-- The SQLSTATE that a call ends with, 00000 for none.  Whatever it does is
-- rolled back, and so is what is done before.
CREATE FUNCTION pg_temp.sqlstate_of(call text, before text DEFAULT '')
RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	prepared boolean := false;
BEGIN
	EXECUTE before;
	prepared := true;
	EXECUTE 'SELECT ' || call;
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	IF prepared AND SQLSTATE <> 'ZZ000' THEN
		INSERT INTO errors VALUES (call, SQLSTATE);
	END IF;
	RETURN CASE WHEN SQLSTATE = 'ZZ000' THEN '00000'
		WHEN NOT prepared THEN 'not prepared: ' || SQLERRM
		ELSE SQLSTATE END;
END
$$;

-- Messages are named by their payloads.
CREATE FUNCTION pg_temp.id(name text) RETURNS bigint
LANGUAGE sql
RETURN (SELECT id FROM idem_outbox WHERE payload = to_jsonb(name));

CREATE FUNCTION pg_temp.publish(VARIADIC names text[]) RETURNS bigint
LANGUAGE sql
RETURN (SELECT count(idem_publish('outcomes', to_jsonb(name), 'key'))
	FROM unnest(names) AS name);

-- What a take hands out, in the order of its result.
CREATE FUNCTION pg_temp.taken(max_messages int DEFAULT 100,
	lease interval DEFAULT '1 hour') RETURNS text[]
LANGUAGE sql
RETURN (
	SELECT coalesce(array_agg((payload #>> '{}') || '/' || attempt
		ORDER BY n), '{}')
	FROM idem_outbox_take(max_messages, lease) WITH ORDINALITY
		AS t (id, message_id, topic, message_key, payload, headers, attempt,
			created_at, n)
);

-- With a trigger on a table that it needs, what does a call end with?  Adding
-- one takes a lock that the prepared transaction would be in the way of.
CREATE FUNCTION pg_temp.noop() RETURNS trigger
LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TEMP TABLE altered AS
SELECT call, relation, pg_temp.sqlstate_of(call,
	format('CREATE TRIGGER t BEFORE UPDATE ON %s FOR EACH ROW
		EXECUTE FUNCTION pg_temp.noop()', relation)) AS sqlstate
FROM promised, unnest(CASE
		WHEN call LIKE 'idem_try_append%' THEN
			'{idem_aggregates,idem_client_sequences}'::text[]
		WHEN call LIKE 'idem_last%' THEN '{idem_client_sequences}'
		WHEN call LIKE 'idem_once%' THEN '{idem_tokens}'
		ELSE '{idem_outbox}' END) AS relation;

DO $$
BEGIN
	PERFORM idem_publish('held', '"held"', 'key');
	PERFORM idem_publish('held', '"behind held"', 'key');
END
$$;
BEGIN;
SELECT outcome AS held_append
	FROM idem_try_append('held', 'phone', 1) \gset
SELECT idem_once('held', 'token') AS held_token \gset
SELECT attempt AS held_message FROM idem_outbox_take(1) \gset
PREPARE TRANSACTION 'sequences_once_outbox';

BEGIN;
-- A wait that nobody ends is a failure.
SET LOCAL lock_timeout = '10 s';
SELECT plan(12 * 4 + 4 + 12 * 4 + 24 + 19 + 42 + 58 + 12 + 13 + 3 + 1);

--
-- Functions
--
SELECT is(pg_temp.arguments_of(to_regprocedure(signature)),
	regexp_replace(arguments, '\s+', ' ', 'g'),
	signature || ' has the promised arguments')
FROM promised;
SELECT is(
	pg_temp.short_types(pg_get_function_result(to_regprocedure(signature))),
	result,
	signature || ' has the promised result')
FROM promised;
SELECT is(pg_temp.attributes_of(to_regprocedure(signature)), attributes,
	signature || ' has the promised language and labels')
FROM promised;
SELECT ok(
	length(obj_description(to_regprocedure(signature), 'pg_proc')) > 20,
	signature || ' has a comment')
FROM promised;
SELECT set_eq(
	$$SELECT oid::regprocedure FROM pg_proc WHERE pronamespace =
		(SELECT extnamespace FROM pg_extension WHERE extname = 'idempotency')
		AND proname ~ '^idem_(try_append|last_client_seq|once|publish|outbox)'
		AND prorettype <> 'internal'::regtype$$,
	'SELECT signature::regprocedure FROM promised',
	'there are no other overloads');
SELECT ok(obj_description(name::regclass, 'pg_class') <> '',
	name || ' has a comment')
FROM (VALUES ('idem_outbox'), ('idem_tokens'), ('idem_aggregates')) AS v (name);

--
-- Privileges
--
CREATE ROLE sequences_once_outbox;
SELECT ok(NOT has_function_privilege('public', signature, 'EXECUTE'),
	'PUBLIC may not execute ' || signature)
FROM promised;
SELECT is(pg_temp.sqlstate_of(call, 'SET LOCAL ROLE sequences_once_outbox'),
	'42501', 'without a grant: ' || signature || ': 42501')
FROM promised;
SELECT idem_grant('sequences_once_outbox') AS granted \gset
SELECT is(pg_temp.sqlstate_of(call, 'SET LOCAL ROLE sequences_once_outbox'),
	'00000', 'with idem_grant: ' || signature || ' is allowed')
FROM promised;
SELECT idem_revoke('sequences_once_outbox') AS revoked \gset
SELECT is(pg_temp.sqlstate_of(call, 'SET LOCAL ROLE sequences_once_outbox'),
	'42501', 'after idem_revoke: ' || signature || ': 42501')
FROM promised;

--
-- idem_try_append: an assertion a row of the outcomes, and a rule
--
SELECT is(:'held_append', 'appended'::text, 'appended: in another session');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 1)$$,
	$$VALUES ('appended', 1::bigint, 1::bigint)$$,
	'appended: the first event of a new aggregate');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 2, 3)$$,
	$$VALUES ('appended', 4::bigint, 4::bigint)$$,
	'appended: a batch moves the sequence and the version on by its size');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 7)$$,
	$$VALUES ('appended', 7::bigint, 5::bigint)$$,
	'appended: gaps are allowed');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'tablet', 1, 1, 5,
		false, '1 second')$$,
	$$VALUES ('appended', 1::bigint, 6::bigint)$$,
	'appended: another client, with all conditions met');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 7)$$,
	$$VALUES ('duplicate', 7::bigint, 6::bigint)$$,
	'duplicate: a retry');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 2, 3)$$,
	$$VALUES ('duplicate', 7::bigint, 6::bigint)$$,
	'duplicate: of a batch, all of it');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 6)$$,
	$$VALUES ('duplicate', 7::bigint, 6::bigint)$$,
	'duplicate: what a gap has skipped');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 7, 1, 5)$$,
	$$VALUES ('duplicate', 7::bigint, 6::bigint)$$,
	'duplicate: a retried conditional write is no version conflict');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 5,
		allow_gaps => false)$$,
	$$VALUES ('duplicate', 7::bigint, 6::bigint)$$,
	'duplicate: nor a gap');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 7, 2)$$,
	$$VALUES ('overlap', 7::bigint, 6::bigint)$$,
	'overlap: a batch that landed in part');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 7, 2, 5,
		false)$$,
	$$VALUES ('overlap', 7::bigint, 6::bigint)$$,
	'overlap: told before gaps and version conflicts');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 9,
		allow_gaps => false)$$,
	$$VALUES ('gap', 7::bigint, 6::bigint)$$,
	'gap: where they are not allowed');
SELECT results_eq($$SELECT * FROM idem_try_append('unknown', 'phone', 2,
		allow_gaps => false)$$,
	$$VALUES ('gap', 0::bigint, 0::bigint)$$,
	'gap: before the first event');
SELECT results_eq($$SELECT * FROM idem_try_append('held', 'phone', 1)$$,
	$$VALUES ('in_flight', 0::bigint, 0::bigint)$$,
	'in_flight: another transaction holds the sequence');
SELECT results_eq($$SELECT * FROM idem_try_append('held', 'phone', 2, 1, 7,
		false)$$,
	$$VALUES ('in_flight', 0::bigint, 0::bigint)$$,
	'in_flight: told before gaps and version conflicts');
SELECT results_eq($$SELECT * FROM idem_try_append('held', 'phone', 1,
		wait => '50 ms')$$,
	$$VALUES ('in_flight', 0::bigint, 0::bigint)$$,
	'in_flight: when the wait is over');
SELECT results_eq($$SELECT * FROM idem_try_append('order', 'phone', 8, 1,
		5)$$,
	$$VALUES ('version_conflict', 7::bigint, 6::bigint)$$,
	'version_conflict: the aggregate has another version');
SELECT results_eq($$SELECT * FROM idem_try_append('unknown', 'phone', 1, 1,
		1)$$,
	$$VALUES ('version_conflict', 0::bigint, 0::bigint)$$,
	'version_conflict: a new aggregate has version 0');
SELECT results_eq($$SELECT version FROM idem_aggregates
		WHERE aggregate = 'order'$$,
	'VALUES (6::bigint)', 'only appended changes the version');
SELECT results_eq($$SELECT client_id, last_client_seq
		FROM idem_client_sequences WHERE aggregate = 'order' ORDER BY 1$$,
	$$VALUES ('phone' COLLATE "C", 7::bigint), ('tablet', 1)$$,
	'only appended changes the sequence');
SELECT is_empty($$SELECT FROM idem_aggregates WHERE aggregate = 'unknown'$$,
	'what was refused leaves no aggregate behind');
SELECT is(idem_last_client_seq('order', 'phone'), 7::bigint,
	'idem_last_client_seq: where a restarted writer resumes');
SELECT is(idem_last_client_seq('held', 'phone'), 0::bigint,
	'idem_last_client_seq: 0 where nothing has committed');

--
-- idem_once
--
SELECT ok(:'held_token', 'true: in another session');
SELECT ok(idem_once('form', 'token'), 'true: the first time');
SELECT ok(NOT idem_once('form', 'token'), 'false: the second time');
SELECT ok(idem_once('other form', 'token'), 'true: in another scope');
SELECT results_eq(
	$$SELECT * FROM idem_once_many('form', '{c,token,a,c,b,a}'::text[])$$,
	$$VALUES ('c'), ('a'), ('b')$$,
	'an array: those seen for the first time, in its order, no repeats');
SELECT is_empty($$SELECT * FROM idem_once_many('form', '{b,a,c}'::text[])$$,
	'an array: nothing the second time');
SELECT is_empty($$SELECT * FROM idem_once_many('form', '{}'::text[])$$,
	'an empty array: nothing');
SELECT ok(NOT idem_once('form', 'b'), 'an array uses single tokens');
SELECT ok(idem_once('form', 'brief', '0 s') AND idem_once('form', 'brief'),
	'true again after the ttl');
SELECT ok(NOT idem_once('form', 'brief'), 'the ttl of the second use counts');
SELECT results_eq($$SELECT * FROM idem_once_many('form', '{x,y}'::text[], '0 s')
	UNION ALL SELECT * FROM idem_once_many('form', '{y,x}'::text[])$$,
	$$VALUES ('x'), ('y'), ('y'), ('x')$$,
	'an array: all again after the ttl');
SELECT is(justify_hours(date_trunc('minute',
		expires_at - clock_timestamp() + '30 seconds')), '7 days'::interval,
	'the default is idempotency.token_ttl')
FROM idem_tokens WHERE scope = 'other form';
SAVEPOINT before;
SELECT idem_once('form', 'undone') AS once_undone \gset
SELECT count(*) AS array_undone FROM idem_once_many('form', '{p,q}'::text[]) \gset
ROLLBACK TO SAVEPOINT before;
SELECT ok(:'once_undone' AND idem_once('form', 'undone'),
	'true again after an abort');
SELECT is(:array_undone + count(*), 4::bigint,
	'an array: all again after an abort')
FROM idem_once_many('form', '{p,q}'::text[]);
SELECT is(pg_temp.sqlstate_of($$idem_once('held', 'token')$$,
		'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'it waits for an uncommitted twin, as long as lock_timeout');
SELECT is(pg_temp.sqlstate_of($$idem_once_many('held', '{a,token}'::text[])$$,
		'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'so does an array');
SELECT ok(idem_once('held', 'a'), 'which then has used nothing');
SELECT is(pg_temp.sqlstate_of($$idem_try_append('held', 'phone', 1,
		wait => '1 hour')$$, 'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'idem_try_append with wait: as long as lock_timeout');
SELECT is(pg_temp.sqlstate_of($$idem_try_append('held', 'tablet', 1)$$,
		'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'other clients'' appends queue, as long as lock_timeout');

--
-- The outbox
--
SELECT is(:'held_message', '1'::text, 'one message is held');
SELECT is(pg_temp.taken(), '{}'::text[],
	'a key whose head another relay holds: nothing, and no waiting');
SELECT is(pg_temp.sqlstate_of('idem_outbox_ack(ARRAY[pg_temp.id(''held'')])',
		'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'its acknowledgement waits, as long as lock_timeout');
SELECT is(pg_temp.sqlstate_of('idem_outbox_nack(pg_temp.id(''held''))',
		'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
	'so does its refusal');
SELECT is(pg_temp.sqlstate_of(
		'idem_outbox_extend(ARRAY[pg_temp.id(''held'')])',
		'SET LOCAL lock_timeout = ''50 ms'''), '00000',
	'nobody who asks for it has a lease yet: no waiting');
SELECT idem_publish('outcomes', '"m1"', 'key', '{"h": 1}') AS message_id \gset
SELECT is(message_id, :'message_id', 'idem_publish returns the message id')
FROM idem_outbox WHERE payload = '"m1"';
SELECT is(pg_temp.publish('m2', 'm3', 'm4'), 3::bigint, 'three more');
SELECT results_eq('SELECT * FROM idem_outbox_take(1)',
	$$SELECT id, message_id, 'outcomes', 'key', '"m1"'::jsonb,
		'{"h": 1}'::jsonb, 1, created_at
	FROM idem_outbox WHERE payload = '"m1"'$$,
	'a take returns the message as it was published');
SELECT is(pg_temp.taken(), '{}'::text[], 'a leased head blocks its key');
SELECT is(idem_outbox_ack(ARRAY[pg_temp.id('m1')]), 1, 'ack: counts');
SELECT is(idem_outbox_ack(ARRAY[pg_temp.id('m1'), -1]), 0,
	'ack: not what has been acknowledged, or does not exist');
SELECT is(pg_temp.taken(2, '0 s'), '{m2/1,m3/1}'::text[],
	'an acknowledged head frees its key, for a batch in order');
SELECT is(pg_temp.taken(2), '{m2/2,m3/2}'::text[],
	'after the lease they are handed out again, and the attempt counts');
SELECT is(idem_outbox_nack(pg_temp.id('m2'), 'no', '0 s', 1), 'lost',
	'nack: lost, when another relay has taken it since');
SELECT is(idem_outbox_nack(pg_temp.id('m2'), 'no', '1 hour', 2), 'pending',
	'nack: pending');
SELECT is(idem_outbox_ack(ARRAY[pg_temp.id('m3')]), 1, 'm3 got through');
SELECT is(pg_temp.taken(), '{}'::text[],
	'a message that backs off blocks its key');
SELECT is(idem_outbox_nack(pg_temp.id('m3'), 'no'), 'lost',
	'nack: lost, when it has been acknowledged');
SELECT is(idem_outbox_nack(-1, 'no'), 'lost',
	'nack: lost, when it does not exist');
SET LOCAL idempotency.outbox_max_attempts = 2;
SELECT is(idem_outbox_nack(pg_temp.id('m2'), 'too much'), 'dead',
	'nack: dead, after the last attempt');
SELECT is(idem_outbox_nack(pg_temp.id('m2'), 'again'), 'dead',
	'nack: dead, when it is dead');
SELECT results_eq(
	$$SELECT state, attempt, last_error FROM idem_outbox
	WHERE payload = '"m2"'$$,
	$$VALUES ('dead' COLLATE "C", 2, 'too much')$$,
	'a dead message keeps its last error');
SELECT is(pg_temp.taken(lease => '0 s'), '{m4/1}'::text[],
	'a dead message does not block its key');
SELECT is(pg_temp.taken(lease => '0 s'), '{m4/2}'::text[], 'the last attempt');
SELECT is(pg_temp.taken(), '{}'::text[],
	'a message that kills its relay dies too');
SELECT is((SELECT state FROM idem_outbox WHERE payload = '"m4"'), 'dead',
	'without a word from it');
SELECT is(idem_outbox_requeue(ARRAY[pg_temp.id('m4'), pg_temp.id('m3'), -1]),
	1, 'requeue: dead ones only');
SELECT is(idem_outbox_requeue(), 1, 'requeue: all dead ones');
SELECT is(pg_temp.taken(), '{m2/3,m4/3}'::text[],
	'requeued messages are in their old places, with all their attempts');
SELECT is(idem_outbox_ack(ARRAY[pg_temp.id('m2'), pg_temp.id('m4')]), 2,
	'and get through');
SELECT idem_publish('outcomes', '"later"', 'key', deliver_after => '1 hour')
	AS message_id \gset
SELECT is(pg_temp.publish('after later') + cardinality(pg_temp.taken()),
	1::bigint, 'a message for later blocks its key until then');
SELECT results_eq($$SELECT ordinal, o.topic, o.message_key, o.payload #>> '{}',
		o.headers, rank() OVER (ORDER BY id)
	FROM idem_publish_many('{outcomes}', '{"\"l1\"","\"l2\""}', '{leases}',
		'{NULL,1}') AS p, LATERAL (SELECT * FROM idem_outbox AS o
		WHERE o.message_id = p.message_id OFFSET 0) AS o$$,
	$$SELECT NULL::int, ''::text, ''::text, ''::text, '1'::jsonb, 1::bigint
	WHERE false$$,
	'publish_many: a statement does not see what it publishes');
SELECT results_eq($$SELECT topic, message_key, payload, headers
	FROM idem_outbox WHERE message_key = 'leases' ORDER BY id$$,
	$$VALUES ('outcomes' COLLATE "C", 'leases' COLLATE "C", '"l1"'::jsonb,
			NULL::jsonb),
		('outcomes', 'leases', '"l2"', '1')$$,
	'publish_many: messages as single calls would write them, in order');
SELECT is(pg_temp.taken(lease => '1 min'), '{l1/1,l2/1}'::text[],
	'both are held');
SELECT results_eq($$SELECT * FROM idem_outbox_extend(
		ARRAY[pg_temp.id('l2'), -1, pg_temp.id('l1')], '1 hour', '{1,1,2}')$$,
	$$SELECT pg_temp.id('l2')$$, 'extend: those still held, with the attempt');
SELECT results_eq($$SELECT available_at > clock_timestamp() + '1 min'
	FROM idem_outbox WHERE payload IN ('"l1"', '"l2"') ORDER BY id$$,
	'{false,true}'::bool[], 'extend: from now, nobody else''s');
SELECT is(idem_outbox_give_back(
		ARRAY[pg_temp.id('l2'), pg_temp.id('l1'), pg_temp.id('m1'), -1],
		'{1}'), 2, 'give_back: what is held');
SELECT is(idem_outbox_give_back(
		ARRAY[pg_temp.id('l2'), pg_temp.id('l1')], '{1}'), 0,
	'give_back: twice counts once');
SELECT is(idem_outbox_nack(pg_temp.id('l1'), 'late', attempt => 1), 'lost',
	'nack: lost, when it was given back');
SELECT is(pg_temp.taken(lease => '0 s'), '{l1/2,l2/2}'::text[],
	'given back is available at once, in order, with a number of its own');
SELECT is(pg_temp.taken(lease => '0 s'), '{l1/3}'::text[],
	'and did not count: this is the last of two attempts');
SELECT is(pg_temp.taken(lease => '0 s'), '{l2/3}'::text[],
	'as it is of the second');
RESET idempotency.outbox_max_attempts;

--
-- SQLSTATEs
--
SELECT idem_publish('some', '"some"', 'key') AS message_id \gset
SELECT is(pg_temp.sqlstate_of(call), sqlstate, call || ': ' || sqlstate)
FROM (VALUES
	($$idem_try_append(NULL, 'phone', 1)$$, '22004'),
	($$idem_try_append('order', NULL, 1)$$, '22004'),
	($$idem_try_append('order', 'phone', NULL)$$, '22004'),
	($$idem_try_append('', 'phone', 1)$$, '22023'),
	($$idem_try_append('order', repeat('é', 128), 1)$$, '22023'),
	($$idem_try_append('order', 'phone', 0)$$, '22023'),
	($$idem_try_append('order', 'phone', 8, 0)$$, '22023'),
	($$idem_try_append('order', 'phone', 9223372036854775807, 2)$$, '22023'),
	($$idem_try_append('order', 'phone', 8, wait => '-1 s')$$, '22023'),
	($$idem_try_append('order', 'phone', 8, wait => '300000 years')$$,
		'22008'),
	($$idem_last_client_seq(NULL, 'phone')$$, '22004'),
	($$idem_last_client_seq('order', '')$$, '22023'),
	($$idem_once(NULL, 'token')$$, '22004'),
	($$idem_once('form', NULL::text)$$, '22004'),
	($$idem_once('form', '')$$, '22023'),
	($$idem_once(repeat('s', 256), 'token')$$, '22023'),
	($$idem_once('form', 'token', '-1 s')$$, '22023'),
	($$idem_once_many('form', NULL::text[])$$, '22004'),
	($$idem_once_many('form', '{a,NULL}'::text[])$$, '22004'),
	($$idem_once_many('form', '{a,""}'::text[])$$, '22023'),
	($$idem_once_many('form', '{a}'::text[], '-1 s')$$, '22023'),
	($$idem_publish(NULL, '1')$$, '22004'),
	($$idem_publish('t', NULL)$$, '22004'),
	($$idem_publish('', '1')$$, '22023'),
	($$idem_publish('t', '1', '')$$, '22023'),
	($$idem_publish('t', '1', repeat('k', 256))$$, '22023'),
	($$idem_publish('t', '1', deliver_after => '-1 s')$$, '22023'),
	($$idem_publish('t', '1', deliver_after => '300000 years')$$, '22008'),
	($$idem_publish_many(NULL, '{1}')$$, '22004'),
	($$idem_publish_many('{t}', '{1,NULL}')$$, '22004'),
	($$idem_publish_many('{t,u}', '{1,2,3}')$$, '22023'),
	($$idem_publish_many('{t,""}', '{1}')$$, '22023'),
	($$idem_publish_many('{t}', '{1}', deliver_after => '-1 s')$$, '22023'),
	($$idem_publish_many('{}', '{}')$$, '00000'),
	('idem_outbox_take(0)', '22023'),
	($$idem_outbox_take(lease => '-1 s')$$, '22023'),
	($$idem_outbox_take(topics => '{t,NULL}')$$, '22004'),
	($$idem_outbox_take(topics => '{t,""}')$$, '22023'),
	($$idem_outbox_take(topics => '{some,some}')$$, '00000'),
	('idem_outbox_ack(NULL)', '22004'),
	($$idem_outbox_ack('{1,NULL}')$$, '22004'),
	($$idem_outbox_ack('{{1,2}}')$$, '22023'),
	('idem_outbox_nack(NULL)', '22004'),
	($$idem_outbox_nack(1, retry_after => '-1 s')$$, '22023'),
	($$idem_outbox_nack(pg_temp.id('some'),
		retry_after => '300000 years')$$, '22008'),
	($$idem_outbox_requeue('{1,NULL}')$$, '22004'),
	($$idem_outbox_requeue('{{1,2}}')$$, '22023'),
	($$idem_outbox_requeue('{}')$$, '00000'),
	($$idem_outbox_ack('{}')$$, '00000'),
	('idem_outbox_extend(NULL)', '22004'),
	($$idem_outbox_extend('{1,NULL}')$$, '22004'),
	($$idem_outbox_extend('{1}', attempts => '{NULL}')$$, '22004'),
	($$idem_outbox_extend('{1,2}', attempts => '{1,2,3}')$$, '22023'),
	($$idem_outbox_extend('{1}', '-1 s')$$, '22023'),
	($$idem_outbox_extend('{}', attempts => '{1}')$$, '00000'),
	('idem_outbox_give_back(NULL)', '22004'),
	($$idem_outbox_give_back('{1}', '{NULL}')$$, '22004'),
	($$idem_outbox_give_back('{1,2,3}', '{1,2}')$$, '22023')
) AS v (call, sqlstate);
SELECT is(pg_temp.sqlstate_of(call, 'SET LOCAL transaction_read_only = on'),
	CASE WHEN call LIKE 'idem_last%' THEN '00000' ELSE '25006' END,
	call || ' in a read-only transaction')
FROM promised;
SELECT is(sqlstate, '55000',
	format('%s, trigger on %s: 55000', split_part(call, '(', 1), relation))
FROM altered;
SELECT is(pg_temp.sqlstate_of(call,
		'UPDATE idem_aggregates SET version = 9223372036854775807'),
	sqlstate, call || ' at the last version: ' || sqlstate)
FROM (VALUES
	($$idem_try_append('order', 'phone', 8)$$, '22003'),
	($$idem_try_append('order', 'phone', 7)$$, '00000'),
	($$idem_try_append('order', 'phone', 8, expected_version => 1)$$, '00000')
) AS v (call, sqlstate);

\ir include/glance.sql
SELECT is_empty('SELECT * FROM unsaid_errors',
	'each error is in docs/reference.md, in the line of its function');

SELECT * FROM finish();
ROLLBACK;

ROLLBACK PREPARED 'sequences_once_outbox';
DELETE FROM idem_outbox WHERE topic = 'held';
