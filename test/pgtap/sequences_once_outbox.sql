--
-- Client sequences, once-only tokens and outbox: outcomes.  Signatures,
-- privileges and SQLSTATEs are in contract.
--
-- A prepared transaction is the second session: it holds an append, a token,
-- and a message that it has taken.  All of it is gone at the end.
--
SET client_min_messages = error;

\ir include/outcome_of.sql

-- Messages are named by their payloads.
CREATE FUNCTION pg_temp.id(name text) RETURNS bigint
LANGUAGE sql
RETURN (SELECT id FROM idem_outbox WHERE payload = to_jsonb(name));

CREATE FUNCTION pg_temp.publish(VARIADIC names text[]) RETURNS bigint
LANGUAGE sql
RETURN (SELECT count(idem_publish('outcomes', to_jsonb(name), 'key'))
	FROM unnest(names) AS name);

CREATE FUNCTION pg_temp.append(arguments text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE format('SELECT idem_try_append(%s)::text', arguments) INTO answer;
	RETURN answer;
END
$$;

-- The messages of a take, in the order of its result.
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
SELECT plan(24 + 19 + 42 + 1);

--
-- idem_try_append: an assertion a row of the outcomes, and a rule
--
SELECT is(:'held_append', 'appended'::text, 'appended: in another session');
SELECT is(pg_temp.append(arguments), answer, title)
FROM (VALUES
	($$'order', 'phone', 1$$, '(appended,1,1)',
		'appended: the first event of a new aggregate'),
	($$'order', 'phone', 2, 3$$, '(appended,4,4)',
		'appended: a batch moves the sequence and the version on by its size'),
	($$'order', 'phone', 7$$, '(appended,7,5)', 'appended: gaps are allowed'),
	($$'order', 'tablet', 1, 1, 5, false, '1 second'$$, '(appended,1,6)',
		'appended: another client, with all conditions met'),
	($$'order', 'phone', 7$$, '(duplicate,7,6)', 'duplicate: a retry'),
	($$'order', 'phone', 2, 3$$, '(duplicate,7,6)',
		'duplicate: of a batch, all of it'),
	($$'order', 'phone', 6$$, '(duplicate,7,6)',
		'duplicate: what a gap has skipped'),
	($$'order', 'phone', 7, 1, 5$$, '(duplicate,7,6)',
		'duplicate: a retried conditional write is no version conflict'),
	($$'order', 'phone', 5, allow_gaps => false$$, '(duplicate,7,6)',
		'duplicate: nor a gap'),
	($$'order', 'phone', 7, 2$$, '(overlap,7,6)',
		'overlap: a batch that landed in part'),
	($$'order', 'phone', 7, 2, 5, false$$, '(overlap,7,6)',
		'overlap: told before gaps and version conflicts'),
	($$'order', 'phone', 9, allow_gaps => false$$, '(gap,7,6)',
		'gap: where they are not allowed'),
	($$'unknown', 'phone', 2, allow_gaps => false$$, '(gap,0,0)',
		'gap: before the first event'),
	($$'held', 'phone', 1$$, '(in_flight,0,0)',
		'in_flight: another transaction holds the sequence'),
	($$'held', 'phone', 2, 1, 7, false$$, '(in_flight,0,0)',
		'in_flight: told before gaps and version conflicts'),
	($$'held', 'phone', 1, wait => '50 ms'$$, '(in_flight,0,0)',
		'in_flight: when the wait is over'),
	($$'order', 'phone', 8, 1, 5$$, '(version_conflict,7,6)',
		'version_conflict: the aggregate has another version'),
	($$'unknown', 'phone', 1, 1, 1$$, '(version_conflict,0,0)',
		'version_conflict: a new aggregate has version 0')
) AS v (arguments, answer, title);
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
		wait => '10 minutes')$$, 'SET LOCAL lock_timeout = ''50 ms'''), '55P03',
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
SELECT is(idem_outbox_release(
		ARRAY[pg_temp.id('l2'), pg_temp.id('l1'), pg_temp.id('m1'), -1],
		'{1}'), 2, 'give_back: what is held');
SELECT is(idem_outbox_release(
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

\ir include/glance.sql
SELECT is_empty('SELECT * FROM unsaid_errors',
	'each error is in docs/reference.md, in the line of its function');

SELECT * FROM finish();
ROLLBACK;

ROLLBACK PREPARED 'sequences_once_outbox';
DELETE FROM idem_outbox WHERE topic = 'held';
