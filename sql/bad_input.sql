--
-- Bad input: a clear error with its SQLSTATE, session and transaction intact.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql
-- One call with another text in place of $1.
CREATE FUNCTION pg_temp.each_call(calls text[], VARIADIC arguments text[]) RETURNS TABLE (call text, error text)
LANGUAGE plpgsql AS $$
DECLARE
	c text;
	a text;
BEGIN
	FOREACH c IN ARRAY calls LOOP
		FOREACH a IN ARRAY arguments LOOP
			call := format(c, coalesce(a, 'NULL'));
			error := pg_temp.error_of('SELECT ' || call);
			RETURN NEXT;
		END LOOP;
	END LOOP;
END
$$;
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

--
-- Keys: ID001
--
SELECT pg_temp.error_of($$ SELECT idem_claim('s', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'k') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', '123456789012345') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', repeat('k', 129)) $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', repeat('k', 1000000)) $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'with blanks in it') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'with/slashes/in/it') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'äöüß€😀 and more of them') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', E'with\nline\nbreaks\n') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', ''';DROP TABLE idem_keys;--') $$);
-- ... in every function that takes one
CREATE FUNCTION pg_temp.handler(jsonb) RETURNS jsonb LANGUAGE sql RETURN $1;
SELECT call, split_part(error, ' |', 1) FROM pg_temp.each_call('{"idem_complete(''s'', %s, 200)","idem_complete(''s'', %s, 200, ''''::bytea)","idem_checkpoint(''s'', %s, ''x'')",
	"idem_heartbeat(''s'', %s)","idem_fail(''s'', %s)","idem_release(''s'', %s)","idem_lookup(''s'', %s)","idem_forget(''s'', %s)","idem_erase(''s'', %s)",
	"idem_run(''s'', %s, ''pg_temp.handler(jsonb)'', ''{}'')"}', NULL, '''too short''');

--
-- Scopes and other names: 22004, 22023
--
SELECT pg_temp.error_of($$ SELECT idem_claim(NULL, 'bad-input-key-001') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('', 'bad-input-key-001') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim(repeat('s', 513), 'bad-input-key-001') $$);
-- bytes, not characters
SELECT pg_temp.error_of($$ SELECT idem_claim(repeat('ä', 257), 'bad-input-key-001') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim(repeat('s', 16384), 'bad-input-key-001') $$);
SELECT outcome FROM idem_claim(repeat('s', 512), 'bad-input-key-001');
-- 128 characters of any script; and bytes that no compression makes fewer, in each part of a key
BEGIN;
SELECT octet_length(n.name), outcome FROM (VALUES (repeat('漢', 128)), (repeat('😀', 128))) AS n (name), idem_claim(n.name, 'bad-input-key-001');
SELECT string_agg(md5(i::text), '' ORDER BY i) AS long FROM generate_series(1, 16) AS i \gset
SELECT length(:'long'), c.outcome, a.is_active, t.outcome AS append, idem_once(:'long', :'long') AS once, idem_publish(:'long', '1', :'long') IS NOT NULL AS publish
	FROM idem_claim(:'long', 'bad-input-key-001', request => '1') AS c, idem_set(:'long', :'long', :'long', :'long', true, 1) AS a,
		idem_try_append(:'long', :'long', 1) AS t;
ROLLBACK;
SELECT outcome FROM idem_claim(repeat('ä', 256), 'bad-input-key-001');
SELECT outcome FROM idem_claim(E' any text \n it''s "fine" \\ € 😀', 'bad-input-key-001');
SELECT call, split_part(error, ' |', 1) FROM pg_temp.each_call('{"idem_complete(%s, ''bad-input-key-001'', 200)","idem_complete(%s, ''bad-input-key-001'', 200, ''''::bytea)",
	"idem_checkpoint(%s, ''bad-input-key-001'', ''x'')","idem_heartbeat(%s, ''bad-input-key-001'')","idem_fail(%s, ''bad-input-key-001'')",
	"idem_release(%s, ''bad-input-key-001'')","idem_lookup(%s, ''bad-input-key-001'')","idem_forget(%s, ''bad-input-key-001'')",
	"idem_erase(%s, ''bad-input-key-001'')","idem_run(%s, ''bad-input-key-001'', ''pg_temp.handler(jsonb)'', ''{}'')"}', NULL, '''''', 'repeat(''s'', 513)');
SELECT call, split_part(error, ' |', 1) FROM pg_temp.each_call('{"idem_try_advance(%s, ''e'', ''1'', 1)","idem_try_advance(''u'', %s, ''1'', 1)","idem_try_advance(''u'', ''e'', %s, 1)",
	"idem_toggle(%s, ''e'', ''1'', ''a'', 1)","idem_toggle(''u'', %s, ''1'', ''a'', 1)","idem_toggle(''u'', ''e'', %s, ''a'', 1)","idem_toggle(''u'', ''e'', ''1'', %s, 1)",
	"idem_set(%s, ''e'', ''1'', ''a'', true, 1)","idem_set(''u'', %s, ''1'', ''a'', true, 1)","idem_set(''u'', ''e'', %s, ''a'', true, 1)","idem_set(''u'', ''e'', ''1'', %s, true, 1)",
	"idem_is_active(%s, ''e'', ''1'', ''a'')","idem_is_active(''u'', %s, ''1'', ''a'')","idem_is_active(''u'', ''e'', %s, ''a'')","idem_is_active(''u'', ''e'', ''1'', %s)"}', NULL, '''''', 'repeat(''x'', 513)');
SELECT pg_temp.error_of($$ SELECT idem_try_advance('u', 'e', '1', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_toggle('u', 'e', '1', 'a', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', true, NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', NULL, 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', true, 1, '{b,NULL}') $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', true, 1, '{b,""}') $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', true, 1, ARRAY['b', repeat('x', 513)]) $$);
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', true, 1, '{b,a}') $$);
-- checked where they have no effect, too
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '1', 'a', false, 1, '{a}') $$);
SELECT count(*) FROM idem_action_versions;
-- An array of any shape will do.
SELECT is_active FROM idem_set('u', 'e', '1', 'a', true, 1, '{{b,c},{d,e}}');
SELECT is_active FROM idem_set('u', 'e', '1', 'a', true, 2, '[5:6]={b,c}');
SELECT pg_temp.error_of($$ SELECT idem_checkpoint('s', 'bad-input-key-001', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_checkpoint('s', 'bad-input-key-001', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_checkpoint('s', 'bad-input-key-001', repeat('x', 513)) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-001', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-001', NULL, ''::bytea) $$);
-- A status that HTTP does not have
CREATE FUNCTION pg_temp.status_is(status int, request jsonb) RETURNS idem_response
LANGUAGE sql RETURN (status, NULL::json, 'x')::idem_response;
CREATE FUNCTION pg_temp.status_600(request jsonb) RETURNS idem_response LANGUAGE sql RETURN pg_temp.status_is(600, request);
BEGIN;
SELECT outcome FROM idem_claim('s', 'bad-input-status-1');
SAVEPOINT s;
SELECT status, pg_temp.error_of(format($$ SELECT idem_complete('s', 'bad-input-status-1', %s) $$, status)) FROM unnest('{-5,0,99,600,1000}'::int[]) AS status;
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-status-1', 600, ''::bytea) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete_many('s', '{bad-input-status-1}', '{99}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('s', 'bad-input-status-2', 'pg_temp.status_600(jsonb)', '{}') $$);
SELECT idem_complete('s', 'bad-input-status-1', 100);
ROLLBACK TO s;
SELECT idem_complete('s', 'bad-input-status-1', 599);
ROLLBACK;

--
-- Hashes, intervals: 22023, 22008
--
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', repeat('x', 65)::bytea) $$);
SELECT outcome FROM idem_claim('s', 'bad-input-key-002', sha512('x'));
SELECT outcome FROM idem_claim('s', 'bad-input-key-002', sha256('x'));
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', ttl => '-1 us') $$);
-- Before 17 there are none that are infinite.
SELECT i, regexp_replace(pg_temp.error_of(format($$ SELECT idem_claim('s', 'bad-input-key-001', ttl => %L) $$, i)),
	'^22007 .*', '22023 | argument "ttl" must be finite') FROM unnest(ARRAY['infinity', '-infinity']) AS i;
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', lease => '-1 day') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', wait => '-1 month') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', ttl => '1 month -31 days') $$);
SELECT pg_temp.error_of($$ SELECT idem_heartbeat('s', 'bad-input-key-001', '-1 us') $$);
SELECT pg_temp.error_of($$ SELECT idem_checkpoint('s', 'bad-input-key-001', 'x', lease => '-1 us') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('s', 'bad-input-key-001', 'pg_temp.handler(jsonb)', '{}', ttl => '-1 us') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('s', 'bad-input-key-001', 'pg_temp.handler(jsonb)', '{}', wait => '-1 us') $$);
-- A year less 364 days is positive as intervals compare, but leads back.
SELECT call, split_part(error, ' |', 1) FROM pg_temp.each_call('{"idem_claim(''s'', ''bad-input-key-001'', ttl => %s)","idem_claim(''s'', ''bad-input-key-001'', lease => %s)",
	"idem_claim(''s'', ''bad-input-key-001'', wait => %s)","idem_heartbeat(''s'', ''bad-input-key-001'', %s)","idem_checkpoint(''s'', ''bad-input-key-001'', ''x'', lease => %s)",
	"idem_run(''s'', ''bad-input-key-001'', ''pg_temp.handler(jsonb)'', ''{}'', ttl => %s)","idem_run(''s'', ''bad-input-key-001'', ''pg_temp.handler(jsonb)'', ''{}'', wait => %s)",
	"idem_once(''s'', ''t'', %s)","idem_once_many(''s'', ''{t}'', %s)","idem_try_append(''a'', ''c'', 1, wait => %s)","idem_publish(''t'', ''1'', deliver_after => %s)",
	"idem_publish_many(''{}'', ''{}'', deliver_after => %s)","idem_outbox_take(lease => %s)","idem_outbox_nack(1, retry_after => %s)","idem_outbox_extend(''{}'', %s)","idem_abandoned(older_than => %s)"}', '''-1 year 364 days''', '''1 year -368 days''');
SELECT outcome FROM idem_claim('s', 'bad-input-mixed-1', ttl => '1 year -359 days', lease => '-1 day 30:00', wait => '-1 day 24:05');
SELECT pg_temp.code_of($$ SELECT idem_claim('s', 'bad-input-key-001', ttl => '300000 years') $$);
SELECT pg_temp.code_of($$ SELECT idem_claim('s', 'bad-input-key-001', lease => '300000 years') $$);
SELECT pg_temp.code_of($$ SELECT idem_claim('s', 'bad-input-key-001', wait => '300000 years') $$);
SELECT pg_temp.code_of($$ SELECT idem_claim('s', 'bad-input-key-001', ttl => '178000000 years') $$);
SELECT count(*) FROM idem_keys WHERE scope = 's' AND key = 'bad-input-key-001';
SELECT outcome FROM idem_claim('s', 'bad-input-key-003', ttl => '200000 years', lease => '0', wait => '10 minutes');

-- A lease is 12 hours at most, and a wait 10 minutes, in every function, as intervals compare and as they are from now on.
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', lease => '12:00:00.000001') $$);
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', wait => '00:10:00.000001') $$);
CREATE FUNCTION pg_temp.over_limit(value text) RETURNS TABLE (call text, error text)
LANGUAGE plpgsql AS $$
BEGIN
	FOR call IN SELECT format('%s(%s)', p.proname, string_agg(format('%s => %L::%s', v.name, CASE WHEN v.n = a.n THEN value WHEN v.name = 'key' THEN 'bad-input-key-001'
			WHEN v.name = 'handler' THEN 'pg_temp.handler(jsonb)' WHEN v.type IN ('text', 'integer', 'bigint', 'jsonb') THEN '1' ELSE '{}' END, v.type), ', ' ORDER BY v.n))
		FROM pg_depend AS d JOIN pg_proc AS p ON p.oid = d.objid CROSS JOIN unnest(p.proargnames[:p.pronargs]) WITH ORDINALITY AS a (name, n)
		JOIN LATERAL unnest(p.proargnames[:p.pronargs], p.proargtypes::regtype[]::text[]) WITH ORDINALITY AS v (name, type, n) ON v.n = a.n OR v.n <= p.pronargs - p.pronargdefaults
		WHERE d.deptype = 'e' AND d.classid = 'pg_proc'::regclass AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency') AND a.name IN ('lease', 'wait')
		GROUP BY p.oid, a.n ORDER BY p.oid::regprocedure::text COLLATE "C", a.n
	LOOP
		error := pg_temp.error_of('SELECT ' || call);
		RETURN NEXT;
	END LOOP;
END
$$;
SELECT call FROM pg_temp.over_limit('12:00:00.000001') WHERE error !~ '^22023 . argument "(lease|wait)" must not be longer than "idempotency.max_(lease|wait)"';
SELECT count(*) >= 9 AS all_of_them FROM pg_temp.over_limit('12:00:00.000001');
-- Months and days of opposite signs
SELECT i, split_part(pg_temp.error_of(format($$ SELECT idem_claim('s', 'bad-input-key-001', wait => %L) $$, i)), ' | ', 2) FROM unnest('{1 mon -29 days,8300 mon -249000 days,-8300 mon 252700 days,8300 mon -252550 days,-1 day 24:10:01,178000000 years}'::text[]) AS i;
SELECT outcome FROM idem_claim('s', 'bad-input-mixed-2', lease => '1 day -12 hours', wait => '-1 day 24:10:00');
BEGIN;
SET LOCAL idempotency.max_lease = '2 d';
SET LOCAL idempotency.max_wait = 0;
SELECT outcome FROM idem_claim('s', 'bad-input-mixed-3', lease => '2 days', wait => '0');
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-001', wait => '1 us') $$);
-- A default lease counts as the limit where it is longer.
SET LOCAL idempotency.default_lease = '3 d';
SELECT lease_expires_at - clock_timestamp() BETWEEN '47:59' AND '48:00' FROM idem_claim('s', 'bad-input-mixed-4', ttl => '4 days');
SET LOCAL idempotency.max_lease = '1 min';
SELECT lease_expires_at - clock_timestamp() BETWEEN '0:00:50' AND '0:01:00' FROM idem_claim('s', 'bad-input-mixed-5');
SET LOCAL idempotency.max_lease = '4 d';
SELECT lease_expires_at - clock_timestamp() BETWEEN '71:59' AND '72:00' FROM idem_claim('s', 'bad-input-mixed-6', ttl => '4 days');
ROLLBACK;

--
-- Tokens: ID003, ID004
--
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-001', 200) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-001', 200, claim_token => 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_release('s', 'bad-input-key-001', 9223372036854775807) $$);
SELECT pg_temp.error_of($$ SELECT idem_release('s', 'bad-input-key-001', -9223372036854775808) $$);
SELECT pg_temp.error_of($$ SELECT idem_release('s', 'bad-input-key-001', 0) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-003', 200) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-003', 200, claim_token => 0) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-003', 200, claim_token => 9223372036854775807) $$);
SELECT pg_temp.error_of($$ SELECT idem_fail('s', 'bad-input-key-003', 'x', -1) $$);

--
-- Requests: 22004, 22023, 22P02; an empty text is no body
--
SELECT pg_temp.error_of($$ SELECT idem_request_hash(NULL, '/') $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash('GET', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash(NULL, '/', '{}'::jsonb) $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash('GET', NULL, '{}'::jsonb) $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash(NULL, '/', ''::bytea) $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash('GET', NULL, ''::bytea) $$);
SELECT pg_temp.error_of($$ SELECT idem_request_hash('', '/') $$);
SELECT n, pg_temp.code_of(format('SELECT idem_request_hash(%L, %L)', method, '/')) FROM (VALUES
	(1, 'GET '), (2, ' GET'), (3, 'GE T'), (4, 'GET:'), (5, 'GÉT'), (6, E'GET\n'), (7, 'GET/1'), (8, 'ﬁ'), (9, 'ı'), (10, '"GET"'), (11, 'GET,PUT'), (12, '(GET)')) AS m (n, method) ORDER BY n;
SELECT string_agg(chr(c), '' ORDER BY c) FROM generate_series(1, 127) AS c WHERE pg_temp.code_of(format('SELECT idem_request_hash(%L, %L)', chr(c), '/')) = 'no error';
SELECT n, pg_temp.code_of(format('SELECT idem_request_hash(%L, %L, %L::text)', 'POST', '/', body)) FROM (VALUES
	(1, ''), (2, ' '), (3, '{'), (4, '{"a":1,}'), (5, '{a:1}'), (6, '''a'''), (7, '[1] [2]'), (8, 'NaN'), (9, '-Infinity'), (10, '01'), (11, '+1'),
	(12, '.5'), (13, '1.'), (14, '0x1'), (15, '1e'), (16, 'nul'), (17, 'TRUE'), (18, '"a'), (19, '"\x"'), (20, '"\u12"'), (21, E'"\t"'), (22, E'[1]\v'), (23, '//c')) AS b (n, body) ORDER BY n;
-- The error has a position, and nothing of the body, which may be a card's number.
CREATE FUNCTION pg_temp.all_of_error(statement text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
	context text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT, context = PG_EXCEPTION_CONTEXT;
	RETURN concat_ws(' | ', SQLSTATE, SQLERRM, nullif(detail, ''), nullif(hint, ''), regexp_replace(context, 'pg_temp_[0-9]+', 'pg_temp'));
END
$$;
SELECT replace(e, statement, '') FROM (VALUES ($$SELECT idem_request_hash('POST', '/', E'{"card":\n "4111", 4111}'::text)$$),
	($$SELECT idem_request_hash('POST', '/', '{"4111": "4111"'::text)$$), ($$SELECT idem_request_hash('POST', '/', '["é4111", x4111]'::text)$$),
	($$SELECT idem_request_hash('POST', '/', '{"4111": 1e4111111}'::text)$$)) AS v (statement), pg_temp.all_of_error(statement) AS e;
CREATE TEMP TABLE bodies AS SELECT * FROM (VALUES (1, '{"4111":'), (2, '"4111\u0000"'), (3, '"4111\ud800"'), (4, '4111e4111111'), (5, '"4111\x"'), (6, '4111x'), (7, '[4111 4111]')) AS b (n, body);
SELECT n, left(e, 5) AS sqlstate, e ~ '4111' AS quoted FROM bodies,
	pg_temp.all_of_error(format('SELECT idem_request_hash(%L, %L, (SELECT body FROM bodies WHERE n = %s))', 'POST', '/', n)) AS e ORDER BY n;
-- Values that jsonb cannot store: half a surrogate pair, the zero character, numbers beyond numeric
SELECT n, pg_temp.code_of(format('SELECT idem_request_hash(%L, %L, %L::text)', 'POST', '/', body)) FROM (VALUES
	(1, '"\ud800"'), (2, '"\udc00"'), (3, '"\ud800\u0041"'), (4, '"\u0000"'), (5, '{"\u0000":1}'), (6, '1e131072'), (7, '1e-16384'), (8, '1e99999999999')) AS b (n, body) ORDER BY n;
SELECT idem_canonical_json(NULL) IS NULL;

--
-- Huge and deeply nested documents
--
SET max_stack_depth = '2MB';
SELECT pg_temp.code_of($$ SELECT idem_request_hash('POST', '/', repeat('[', 100000)) $$);
SELECT pg_temp.code_of($$ SELECT idem_request_hash('POST', '/', repeat('[', 100000) || repeat(']', 100000)) $$);
SELECT pg_temp.code_of($$ SELECT idem_request_hash('POST', '/', repeat('{"a":', 100000) || '1' || repeat('}', 100000)) $$);
RESET max_stack_depth;
-- One that the server could take in, but not with this little stack.
CREATE TEMP TABLE deep AS SELECT (repeat('[{"a":', 2000) || '1' || repeat('}]', 2000))::jsonb AS document;
SELECT length(idem_canonical_json(document)) FROM deep;
SET max_stack_depth = '100kB';
SELECT pg_temp.code_of($$ SELECT idem_canonical_json(document) FROM deep $$);
SELECT pg_temp.code_of($$ SELECT idem_request_hash('POST', '/', document) FROM deep $$);
SELECT pg_temp.code_of($$ SELECT idem_run('s', 'bad-input-key-001', 'pg_temp.handler(jsonb)', document) FROM deep $$);
RESET max_stack_depth;
SELECT outcome, length(response_body) FROM deep, idem_run('s', 'bad-input-key-004', 'pg_temp.handler(jsonb)', document);

--
-- Too large: 54000
--
BEGIN;
SELECT outcome FROM idem_claim('s', 'bad-input-key-005');
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-005', 200, repeat('x', 1048577)) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-005', 200, repeat('x', 1048577)::bytea) $$);
SELECT pg_temp.error_of($$ SELECT idem_complete('s', 'bad-input-key-005', 200, '', to_json(repeat('x', 1048575))) $$);
SELECT pg_temp.error_of($$ SELECT idem_checkpoint('s', 'bad-input-key-005', 'x', to_json(repeat('x', 1048575))) $$);
SELECT idem_complete('s', 'bad-input-key-005', 200, repeat('x', 1048576));
COMMIT;
SELECT outcome, length(response_body) FROM idem_claim('s', 'bad-input-key-005');

--
-- Read-only transactions: 25006, whatever the answer would have been
--
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
SELECT is_active FROM idem_set('u', 'e', '6', 'a', true, 10);
BEGIN READ ONLY;
SELECT call, split_part(error, ' |', 1) FROM pg_temp.each_call('{"idem_claim(''s'', ''bad-input-key-006'')","idem_claim(''s'', ''bad-input-key-005'')",
	"idem_complete(''s'', ''bad-input-key-006'', 200)","idem_complete(''s'', ''bad-input-key-006'', 200, ''''::bytea)",
	"idem_checkpoint(''s'', ''bad-input-key-006'', ''x'')","idem_heartbeat(''s'', ''bad-input-key-006'')","idem_fail(''s'', ''bad-input-key-006'')",
	"idem_release(''s'', ''bad-input-key-006'')","idem_forget(''s'', ''bad-input-key-006'')","idem_erase(''s'', ''bad-input-key-006'')",
	"idem_run(''s'', ''bad-input-key-006'', ''pg_temp.handler(jsonb)'', ''{}'')",
	"idem_try_advance(''u'', ''e'', ''6'', 1)","idem_toggle(''u'', ''e'', ''6'', ''a'', 1)","idem_set(''u'', ''e'', ''6'', ''a'', true, 1)"}', '');
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'bad-input-key-006') $$);
SELECT state FROM idem_lookup('s', 'bad-input-key-006');
SELECT idem_is_active('u', 'e', '6', 'a'), idem_key_is_valid('x'), idem_canonical_json('{}'), length(idem_request_hash('GET', '/'));
COMMIT;

--
-- The transaction and the session go on
--
\set VERBOSITY sqlstate
-- An error aborts the transaction, claim included.
BEGIN;
SELECT outcome FROM idem_claim('s', 'bad-input-key-007');
SELECT idem_complete('s', 'bad-input-key-007', NULL);
SELECT idem_complete('s', 'bad-input-key-007', 200);
COMMIT;
SELECT outcome FROM idem_claim('s', 'bad-input-key-007');
-- To a savepoint, and on
BEGIN;
SELECT outcome FROM idem_claim('s', 'bad-input-key-008');
SAVEPOINT s;
SELECT idem_claim('s', 'bad');
SELECT 1;
ROLLBACK TO s;
SELECT idem_complete('s', 'bad-input-key-008', 200, 'x', claim_token => -1);
ROLLBACK TO s;
SELECT idem_set('u', 'e', '8', 'a', true, 1, '{a}');
ROLLBACK TO s;
SELECT idem_request_hash('POST', '/', '{');
ROLLBACK TO s;
SELECT idem_complete('s', 'bad-input-key-008', 200, 'well');
COMMIT;
SELECT outcome, response_body FROM idem_claim('s', 'bad-input-key-008');
-- One bad row in a statement undoes the statement.
SELECT outcome FROM (VALUES ('bad-input-key-009'), ('bad'), ('bad-input-key-010')) AS k (key), idem_claim('s', key);
SELECT count(*) FROM idem_keys WHERE key IN ('bad-input-key-009', 'bad-input-key-010');
-- A prepared statement
PREPARE claim (text) AS SELECT outcome FROM idem_claim('s', $1);
EXECUTE claim ('bad');
EXECUTE claim ('bad-input-key-011');
EXECUTE claim (NULL);
EXECUTE claim ('bad-input-key-011');
DEALLOCATE claim;
-- A thousand errors, caught
\set VERBOSITY default
-- In bulk
DO $$
DECLARE
	caught int := 0;
BEGIN
	PERFORM idem_claim('s', 'bad-input-key-012');
	FOR i IN 1..250 LOOP
		BEGIN
			PERFORM idem_complete('s', 'bad-input-key-012', 200, claim_token => -i);
		EXCEPTION WHEN SQLSTATE 'ID003' THEN
			caught := caught + 1;
		END;
		BEGIN
			PERFORM idem_claim('s', 'bad-input-key-013', ttl => make_interval(secs => -i));
		EXCEPTION WHEN invalid_parameter_value THEN
			caught := caught + 1;
		END;
		BEGIN
			PERFORM idem_toggle('u', 'e', '12', 'a', i), 1 / (i % 1);
		EXCEPTION WHEN division_by_zero THEN
			caught := caught + 1;
		END;
		BEGIN
			PERFORM idem_request_hash('POST', '/', repeat('[', i));
		EXCEPTION WHEN invalid_text_representation THEN
			caught := caught + 1;
		END;
	END LOOP;
	RAISE NOTICE '% %', caught, idem_complete('s', 'bad-input-key-012', 200);
END
$$;
-- One by one
SELECT outcome FROM idem_claim('s', 'bad-input-key-012');
SELECT count(*) FROM idem_action_versions WHERE entity_id = '12';
