--
-- Many at once: as by single calls, one after another in the order given.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

-- The error of a statement, and its element.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	context text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, context = PG_EXCEPTION_CONTEXT;
	RETURN concat_ws(' | ', SQLSTATE, SQLERRM, nullif(detail, ''), substring(context FROM '^element \d+'));
END
$$;

--
-- Claims
--
SELECT ordinal, key, outcome, attempt, claim_token IS NOT NULL AS token, lease_expires_at IS NOT NULL AS lease, expires_at - lease_expires_at AS longer
	FROM idem_claim_many('s', '{key-0000000000000003,key-0000000000000001,key-0000000000000002}', ttl => '1 h', lease => '10 min');
-- The second of two equal keys gets the result of a second call.
SELECT ordinal, key, outcome, attempt FROM idem_claim_many('s', '{key-0000000000000005,key-0000000000000004,key-0000000000000005,key-0000000000000005}', '{"\\x01","\\x01","\\x01","\\x02"}');
-- One array element for all: of hashes, and of keys.
SELECT ordinal, key, outcome, lease_expires_at IS NOT NULL AS lease FROM idem_claim_many('s', '{key-0000000000000005,key-0000000000000004}', '{"\\x02"}');
SELECT ordinal, key, outcome FROM idem_claim_many('s', '{key-0000000000000006}', '{"\\x01","\\x02",NULL}');
SELECT encode(request_hash, 'hex') FROM idem_keys WHERE key = 'key-0000000000000006';
-- Some have a hash, some do not.
SELECT ordinal, outcome FROM idem_claim_many('s', '{key-0000000000000008,key-0000000000000007}', '{NULL,"\\x01"}');
SELECT key, request_hash IS NULL AS no_hash FROM idem_keys WHERE key IN ('key-0000000000000007', 'key-0000000000000008') ORDER BY key;
-- Scopes are apart.
SELECT ordinal, outcome FROM idem_claim_many('other', '{key-0000000000000008,key-0000000000000007}');
-- Bounds of an array do not matter; empty ones do nothing.
SELECT ordinal, key, outcome FROM idem_claim_many('s', '[5:6]={key-0000000000000009,key-0000000000000008}');
SELECT * FROM idem_claim_many('s', '{}');
SELECT * FROM idem_claim_many('s', '{}', '{"\\x01"}');
SELECT count(*) FROM idem_claim_many('s', '{}', '{}');
-- Where the row type does not say it, the result does.
SELECT (c).ordinal, (c).outcome FROM (SELECT idem_claim_many('s', '{key-0000000000000011,key-0000000000000010}') AS c OFFSET 0) AS s;

-- Every outcome at once.
SET idempotency.expired_key_policy = 'reject';
SELECT count(*) FROM idem_claim_many('all', '{key-expired-00000001,key-replay-000000001,key-bytes-0000000001,key-erased-000000001,key-failed-000000001,key-lease-0000000001}', '{"\\x01"}', '1 h', '0'),
	LATERAL (SELECT 1) AS x;
UPDATE idem_keys SET expires_at = now() - interval '1 min' WHERE key = 'key-expired-00000001';
SELECT idem_complete('all', key, 201, 'body', '{"a": 1}', claim_token) FROM idem_keys WHERE scope = 'all' AND key ~ 'replay|erased' ORDER BY key;
SELECT idem_complete('all', key, 202, '\xff00'::bytea, claim_token => claim_token) FROM idem_keys WHERE key = 'key-bytes-0000000001';
SELECT idem_erase('all', 'key-erased-000000001');
SELECT idem_checkpoint('all', key, 'half', '{"n": 5}', claim_token => claim_token) IS NOT NULL FROM idem_keys WHERE key = 'key-failed-000000001';
SELECT idem_fail('all', key, 'broken', claim_token) FROM idem_keys WHERE key = 'key-failed-000000001';
SELECT ordinal, key, outcome, attempt, response_status AS status, response_headers AS headers, response_body AS body, response_bytes AS bytes, recovery_point, recovery_state, expires_at IS NOT NULL AS expires
	FROM idem_claim_many('all', '{key-replay-000000001,key-replay-000000001,key-absent-000000001,key-failed-000000001,key-expired-00000001,key-bytes-0000000001,key-erased-000000001,key-lease-0000000001}',
		'{"\\x01","\\x02","\\x01","\\x01","\\x01","\\x01","\\x01","\\x01"}');
RESET idempotency.expired_key_policy;

--
-- Completions
--
-- In the transaction that claimed, without tokens.
BEGIN;
SELECT count(*) FROM idem_claim_many('c', '{key-0000000000000003,key-0000000000000001,key-0000000000000002}');
SELECT * FROM idem_complete_many('c', '{key-0000000000000002,key-0000000000000001}', '{200,404}', '{two,NULL}', ARRAY[NULL, '{"b": 2}']::json[]);
-- Of equal keys the second finds it done.
SELECT * FROM idem_complete_many('c', '{key-0000000000000003,key-0000000000000001,key-0000000000000003}', '{500,501,502}', '{three,one,"not three"}');
COMMIT;
SELECT ordinal, outcome, response_status AS status, response_headers AS headers, response_body AS body
	FROM idem_claim_many('c', '{key-0000000000000001,key-0000000000000002,key-0000000000000003}');
-- Later, with tokens; a lost acknowledgement may be retried.
SELECT array_agg(claim_token ORDER BY ordinal) AS tokens FROM idem_claim_many('c', '{key-0000000000000005,key-0000000000000004}') \gset
SELECT * FROM idem_complete_many('c', '{key-0000000000000005,key-0000000000000004}', '{200}', '{same}', claim_tokens => :'tokens');
SELECT * FROM idem_complete_many('c', '{key-0000000000000005,key-0000000000000004}', '{200}', '{same}', claim_tokens => :'tokens');
SELECT key, response_status, response_body FROM idem_keys WHERE scope = 'c' AND key > 'key-0000000000000003' ORDER BY key;
SELECT * FROM idem_complete_many('c', '{}', '{200}');
-- Some with a token, some of this transaction.
SELECT array_agg(claim_token ORDER BY ordinal) AS tokens FROM idem_claim_many('c', '{key-0000000000000006}') \gset
BEGIN;
SELECT count(*) FROM idem_claim_many('c', '{key-0000000000000007}');
SELECT * FROM idem_complete_many('c', '{key-0000000000000007,key-0000000000000006}', '{200}', claim_tokens => NULL::bigint || :'tokens'::bigint[]);
COMMIT;
-- All or nothing: one was lost, so none is completed.
SELECT array_agg(claim_token ORDER BY ordinal) AS tokens FROM idem_claim_many('c', '{key-0000000000000008,key-0000000000000009}') \gset
SELECT pg_temp.error_of(format($$SELECT * FROM idem_complete_many('c', '{key-0000000000000009,key-0000000000000008}', '{200}', claim_tokens => %L)$$, :'tokens'));
SELECT pg_temp.error_of(format($$SELECT * FROM idem_complete_many('c', '{key-0000000000000008,key-0000000000000009,key-0000000000000404}', '{200}', claim_tokens => %L::bigint[] || 1::bigint)$$, :'tokens'));
SELECT pg_temp.error_of($$SELECT * FROM idem_complete_many('c', '{key-0000000000000008,key-0000000000000009}', '{200}')$$);
SELECT key, state FROM idem_keys WHERE scope = 'c' AND key > 'key-0000000000000007' ORDER BY key;

--
-- Counters and states
--
SELECT * FROM idem_try_advance_many('{u}', '{post}', '{b,a,b,a,c}', '{1,5,3,4,2}');
SELECT * FROM idem_try_advance_many('{u,v,u}', '{post,post,user}', '{a}', '{6}');
SELECT * FROM idem_try_advance_many('{u}', '{post}', '{a,b,c}', '{5,4,2}');
SELECT * FROM idem_set_many('{u}', '{post}', '{b,a,b,d,d}', '{like,like,like,like,save}', '{t,t,f,t,t}', '{10,11,12,13,13}');
SELECT * FROM idem_set_many('{u}', '{post}', '{b,a,b,d,d}', '{like,like,like,like,save}', '{f}', '{12,11,13,12,14}');
SELECT user_id, entity_id, action_type, is_active, last_action_id FROM idem_user_actions ORDER BY 1, 2, 3;
SELECT * FROM idem_set_many('{}', '{post}', '{}', '{like}', '{t}', '{1}');

--
-- As single calls, whatever the elements are
--
SELECT setseed(0.25);
CREATE TABLE elements AS SELECT i AS n, (random() * 40)::int AS k, (random() * 5)::int AS v, random() < 0.5 AS flag FROM generate_series(1, 400) AS i;
CREATE FUNCTION pg_temp.single(n int, k int, v int, flag boolean, OUT claim text, OUT advance text, OUT set text) LANGUAGE plpgsql AS $$
BEGIN
	claim := (SELECT row(outcome, attempt) FROM idem_claim('single', 'key-00000000000000' || k, CASE WHEN v > 0 THEN decode('0' || v, 'hex') END));
	advance := (SELECT row(a.*) FROM idem_try_advance('single', 'advance', k::text, v) AS a);
	set := (SELECT row(s.*) FROM idem_set('single', 'set', k::text, 'like', flag, v) AS s);
END
$$;
CREATE TABLE singles AS SELECT n, s.* FROM (SELECT * FROM elements ORDER BY n) AS e, LATERAL pg_temp.single(n, k, v, flag) AS s;
CREATE TABLE arrays AS SELECT array_agg('key-00000000000000' || k ORDER BY n) AS keys, array_agg(CASE WHEN v > 0 THEN decode('0' || v, 'hex') END ORDER BY n) AS hashes,
	array_agg(k::text ORDER BY n) AS ks, array_agg(v::bigint ORDER BY n) AS vs, array_agg(flag ORDER BY n) AS flags FROM elements;
SELECT count(*), count(DISTINCT s.claim) > 1 AS several FROM arrays, idem_claim_many('many', keys, hashes) AS m, singles AS s WHERE s.n = m.ordinal AND s.claim = row(m.outcome, m.attempt)::text AND m.key = keys[m.ordinal];
SELECT count(*), count(DISTINCT s.advance) > 1 AS several FROM arrays, idem_try_advance_many('{many}', '{advance}', ks, vs) AS m, singles AS s WHERE s.n = m.ordinal AND s.advance = row(m.should_process, m.last_action_id)::text;
SELECT count(*), count(DISTINCT s.set) > 1 AS several FROM arrays, idem_set_many('{many}', '{set}', ks, '{like}', flags, vs) AS m, singles AS s WHERE s.n = m.ordinal AND s.set = row(m.is_active, m.last_action_id, m.processed)::text;
SELECT key, request_hash FROM idem_keys WHERE scope = 'single' EXCEPT SELECT key, request_hash FROM idem_keys WHERE scope = 'many';
SELECT entity_type, entity_id, last_action_id FROM idem_action_versions WHERE user_id = 'single' EXCEPT SELECT entity_type, entity_id, last_action_id FROM idem_action_versions WHERE user_id = 'many';
SELECT entity_id, is_active, last_action_id FROM idem_user_actions WHERE user_id = 'single' EXCEPT SELECT entity_id, is_active, last_action_id FROM idem_user_actions WHERE user_id = 'many';
DROP TABLE elements, singles, arrays;

-- A call in a transaction that wrote the rows before, and a savepoint that goes.
BEGIN;
SELECT count(*) FROM idem_try_advance_many('{w}', '{post}', '{a,b,c}', '{1}');
SAVEPOINT s;
SELECT count(*) FROM idem_try_advance_many('{w}', '{post}', '{c,b,a}', '{5}') WHERE should_process;
SELECT outcome FROM idem_claim_many('savepoint', '{key-0000000000000001,key-0000000000000002}');
ROLLBACK TO s;
SELECT * FROM idem_try_advance_many('{w}', '{post}', '{c,b,a}', '{2}');
SELECT outcome FROM idem_claim_many('savepoint', '{key-0000000000000001,key-0000000000000002}');
COMMIT;

--
-- Arguments
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of('SELECT * FROM ' || call) FROM unnest(ARRAY[
	$$idem_claim_many(NULL, '{key-0000000000000001}')$$,
	$$idem_claim_many('', '{key-0000000000000001}')$$,
	$$idem_claim_many('e', NULL)$$,
	$$idem_claim_many('e', '{key-0000000000000001,NULL}')$$,
	$$idem_claim_many('e', '{{key-0000000000000001},{key-0000000000000002}}')$$,
	$$idem_claim_many('e', '{key-0000000000000001,key-0000000000000002}', '{"\\x01","\\x02","\\x03"}')$$,
	$$idem_claim_many('e', '{key-0000000000000001,key-0000000000000002}', '{}')$$,
	$$idem_claim_many('e', '{key-0000000000000001,key-0000000000000002}', '{"\\x01",""}')$$,
	$$idem_claim_many('e', '{key-0000000000000001,key-0000000000000002}', ttl => '-1 s')$$,
	$$idem_claim_many('e', '{key-0000000000000001,key-0000000000000002,"a secret key with spaces"}')$$,
	$$idem_claim_many('e', '{key-0000000000000001,short,key-0000000000000002}')$$,
	$$idem_complete_many('e', '{key-0000000000000001}', NULL)$$,
	$$idem_complete_many('e', '{key-0000000000000001}', '{200,NULL}')$$,
	$$idem_complete_many('e', '{key-0000000000000001}', '{}')$$,
	$$idem_complete_many('e', '{NULL}', '{200}')$$,
	$$idem_complete_many('e', '{key-0000000000000001,key-0000000000000002}', '{200}', '{a,b,c}')$$,
	$$idem_complete_many('e', '{key-0000000000000001,key-0000000000000002}', '{200,200,200}', '{a,b}')$$,
	$$idem_complete_many('all', '{key-absent-000000001}', '{200}', ARRAY[repeat('x', 2000000)], claim_tokens => '{1}')$$,
	$$idem_try_advance_many('{u}', '{post}', '{a,b}', NULL)$$,
	$$idem_try_advance_many('{u}', '{post}', '{a,b}', '{1,NULL}')$$,
	$$idem_try_advance_many('{u}', '{post}', '{a,""}', '{1}')$$,
	$$idem_try_advance_many('{u}', '{NULL}', '{a}', '{1}')$$,
	$$idem_try_advance_many(ARRAY['u', repeat('u', 513)], '{post}', '{a}', '{1}')$$,
	$$idem_try_advance_many('{u,v}', '{post}', '{a,b,c}', '{1}')$$,
	$$idem_set_many('{u}', '{post}', '{a,b}', '{like}', '{t,NULL}', '{1}')$$,
	$$idem_set_many('{u}', '{post}', '{a,b}', '{like}', NULL, '{1}')$$,
	$$idem_set_many('{u}', '{post}', '{a,b}', '{like,""}', '{t}', '{1}')$$,
	$$idem_set_many('{u}', '{post}', '{a,b}', '{like}', '{t}', '{1,2,3}')$$,
	$$idem_set_many('{u}', '{post}', '{a,b}', '{{like}}', '{t}', '{1,2}')$$]) AS call;
\pset format aligned
\pset tuples_only off
SELECT count(*) FROM idem_keys WHERE scope = 'e';
-- Limits hold for each element, and for all that is done.
SET idempotency.max_action_id_lead = '1 h';
SELECT regexp_replace(pg_temp.error_of($$SELECT * FROM idem_try_advance_many('{lead}', '{post}', '{a,b}', '{1,9999999999999}')$$), 'it is \d+', 'it is N');
SELECT regexp_replace(pg_temp.error_of($$SELECT * FROM idem_set_many('{lead}', '{post}', '{a,b}', '{like}', '{t}', '{9999999999999}')$$), 'it is \d+', 'it is N');
RESET idempotency.max_action_id_lead;
SELECT count(*) FROM idem_action_versions WHERE user_id = 'lead';
SET idempotency.max_new_keys_per_minute = 3;
SELECT outcome FROM idem_claim_many('limited', '{key-0000000000000001,key-0000000000000002,key-0000000000000002}');
SELECT split_part(pg_temp.error_of($$SELECT * FROM idem_claim_many('limited', '{key-0000000000000004,key-0000000000000003}')$$), ' | ', 1);
SELECT count(*) FROM idem_keys WHERE scope = 'limited';
RESET idempotency.max_new_keys_per_minute;
BEGIN READ ONLY;
SELECT pg_temp.error_of($$SELECT * FROM idem_claim_many('s', '{key-0000000000000001}')$$);
SELECT pg_temp.error_of($$SELECT * FROM idem_complete_many('s', '{key-0000000000000001}', '{200}')$$);
SELECT pg_temp.error_of($$SELECT * FROM idem_try_advance_many('{u}', '{post}', '{a}', '{1}')$$);
SELECT pg_temp.error_of($$SELECT * FROM idem_set_many('{u}', '{post}', '{a}', '{like}', '{t}', '{1}')$$);
COMMIT;

--
-- Many: more than fits into work_mem, in order
--
SET work_mem = '64kB';
CREATE TABLE many AS SELECT array_agg('key-' || md5(i::text) ORDER BY i) AS keys FROM generate_series(1, 5000) AS i;
BEGIN;
SELECT count(*), bool_and(ordinal = n AND key = keys[n]), count(DISTINCT claim_token) FROM many, idem_claim_many('big', keys) WITH ORDINALITY
	AS c (ordinal, key, outcome, claim_token, a, s, h, b, y, p, r, l, e, n) WHERE outcome = 'new';
SELECT count(*), bool_and(ordinal = n AND key = keys[n]) FROM many, idem_complete_many('big', keys, '{200}', ARRAY(SELECT 'body ' || i || repeat('.', 1000) FROM generate_series(1, 5000) AS i)) WITH ORDINALITY AS c (ordinal, key, completed, n) WHERE completed;
COMMIT;
SELECT count(*), bool_and(ordinal = n AND key = keys[n] AND body = 'body ' || n || repeat('.', 1000)) FROM many, idem_claim_many('big', keys) WITH ORDINALITY
	AS c (ordinal, key, outcome, t, a, s, h, body, y, p, r, l, e, n) WHERE outcome = 'replay';
SELECT count(*), bool_and(ordinal = n) FROM many, idem_set_many('{big}', '{post}', keys, '{like}', '{t}', '{1}') WITH ORDINALITY AS c (ordinal, active, last, processed, n) WHERE processed AND active;
RESET work_mem;
-- The token sequence ascends, whatever the keys' order.
SELECT count(*) FROM (SELECT claim_token, lag(claim_token) OVER (ORDER BY key COLLATE "C") AS before FROM idem_keys WHERE scope = 'big') AS t WHERE claim_token <= before;
DROP TABLE many;

--
-- Statistics count what became of each element
--
SELECT idem_stats_reset();
SELECT count(*) FROM idem_claim_many('s', '{key-0000000000000001,key-000000000000stat,key-000000000000stat}');
SELECT count(*) FROM idem_try_advance_many('{u}', '{stats}', '{b,a,b}', '{2,2,1}');
SELECT count(*) FROM idem_set_many('{u}', '{stats}', '{b,a,b}', '{like}', '{t}', '{2,3,4}');
BEGIN;
SELECT count(*) FROM idem_claim_many('stats', '{key-000000000000sta1,key-000000000000sta2}');
SELECT count(*) FROM idem_complete_many('stats', '{key-000000000000sta1,key-000000000000sta2,key-000000000000sta1}', '{200}');
COMMIT;
SELECT claims_new, claims_in_progress, completions, advances, advances_stale FROM idem_stats WHERE datname = current_database();

-- A row type that somebody altered: an error, until it is undone.
BEGIN;
ALTER TYPE idem_set_many_result ALTER ATTRIBUTE last_action_id TYPE int;
SELECT pg_temp.error_of($$SELECT * FROM idem_set_many('{u}', '{post}', '{a}', '{like}', '{t}', '{1}')$$);
ROLLBACK;
SELECT pg_temp.error_of($$SELECT * FROM idem_set_many('{u}', '{post}', '{a}', '{like}', '{t}', '{1}')$$);
-- Planned for as many rows as there are elements.
CREATE FUNCTION pg_temp.rows_of(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (FORMAT json) ' || query INTO plan;
	RETURN plan -> 0 -> 'Plan' ->> 'Plan Rows';
END
$$;
SELECT pg_temp.rows_of($$SELECT * FROM idem_claim_many('s', '{a,b,c}')$$) AS claim, pg_temp.rows_of($$SELECT * FROM idem_try_advance_many('{u}', '{post}', ARRAY['a', lower('B')], '{1}')$$) AS advance,
	pg_temp.rows_of($$SELECT * FROM idem_complete_many('s', string_to_array(repeat('a,', 499), ','), '{200}')$$) AS complete;

-- A transaction with more keys than the portable edition locks one by one does not
-- wait for other claims, and they do not wait for it.  After its rollback, its keys are new.
\pset format unaligned
\pset tuples_only on
CREATE FUNCTION large_batch(first int, last int) RETURNS text[]
	LANGUAGE sql RETURN (SELECT array_agg('key-of-a-large-batch-' || lpad(i::text, 4, '0')) FROM generate_series(first, last) AS i);
BEGIN;
SELECT outcome, count(*) FROM idem_claim_many('large', large_batch(101, 700)) GROUP BY outcome;
SELECT outcome, count(*) FROM idem_claim_many('large', large_batch(401, 500)) GROUP BY outcome;
SELECT completed, count(*) FROM idem_complete_many('large', large_batch(101, 110), '{200}') GROUP BY completed;
SELECT completed, count(*) FROM idem_complete_many('large', large_batch(690, 700), '{200}') GROUP BY completed;
SELECT count(*) < 400 AS few_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
PREPARE TRANSACTION 'large batch';
SET statement_timeout = '1 min';
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0101');
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0700');
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0700', wait => '50 ms');
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0701');
SELECT outcome, count(*) FROM idem_claim_many('large', large_batch(1, 800)) GROUP BY outcome ORDER BY outcome;
ROLLBACK PREPARED 'large batch';
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0101');
SELECT outcome FROM idem_claim('large', 'key-of-a-large-batch-0700', wait => '50 ms');
SELECT outcome, count(*) FROM idem_claim_many('large', large_batch(501, 701)) GROUP BY outcome ORDER BY outcome;
RESET statement_timeout;
DROP FUNCTION large_batch;
