--
-- A whole request in one statement: claim, handler, complete.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
DROP ROLE IF EXISTS regress_idem_app, regress_idem_other;
RESET client_min_messages;

\i sql/include/error_of.sql

CREATE SCHEMA shop;
CREATE TABLE shop.orders (item text NOT NULL);
CREATE FUNCTION shop.order_it(request jsonb) RETURNS idem_response
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.orders VALUES (request->>'item');
	RETURN (201, '{"Location" : "/orders/1"}', 'ordered ' || (request->>'item'))::idem_response;
END
$$;

--
-- Once
--
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.order_it(jsonb)', '{"item": "tea", "n": 1.0}');
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.order_it(jsonb)', '{"item": "tea", "n": 1.0}');
-- The same request in another spelling
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.order_it(jsonb)', '{"n":1, "item":"te\u0061"}');
-- Another request; another handler; another scope
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.order_it(jsonb)', '{"n":2, "item":"tea"}');
CREATE FUNCTION shop.other(request jsonb) RETURNS jsonb LANGUAGE sql RETURN '"other"'::jsonb;
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.other(jsonb)', '{"item": "tea", "n": 1.0}');
SELECT * FROM idem_run('bob', 'run-request-00001', 'shop.order_it(jsonb)', '{"item": "milk"}');
SELECT * FROM shop.orders;
-- The input of the hash
SELECT state, attempt, request_hash = idem_request_hash('RUN', 'shop.order_it', '{"item":"tea","n":1}') AS hash,
		response_status, response_headers, response_body, recovery_point
	FROM idem_lookup('ann', 'run-request-00001');
CREATE SCHEMA "a: shop";
CREATE FUNCTION "a: shop"."order:it"(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request;
SELECT outcome FROM idem_run('ann', 'run-request-00002', '"a: shop"."order:it"(jsonb)', '{}');
SELECT request_hash = sha256('RUN:"a%3A shop"."order%3Ait":{}') FROM idem_lookup('ann', 'run-request-00002');
-- idem_run and idem_claim see the same keys.
SELECT outcome, response_status, response_body FROM idem_claim('ann', 'run-request-00001');
SELECT outcome, idem_complete('ann', 'run-request-00003', 202, 'by hand', '[1 ]') FROM idem_claim('ann', 'run-request-00003');
SELECT * FROM idem_run('ann', 'run-request-00003', 'shop.order_it(jsonb)', '{"item": "never"}');

--
-- The other outcomes
--
SELECT outcome FROM idem_claim('ann', 'run-outcomes-0001');
SELECT * FROM idem_run('ann', 'run-outcomes-0001', 'shop.order_it(jsonb)', '{"item": "never"}', wait => '10 ms');
SELECT idem_erase('ann', 'run-request-00001');
SELECT * FROM idem_run('ann', 'run-request-00001', 'shop.order_it(jsonb)', '{"item": "tea", "n": 1.0}');
SELECT outcome, claim_token FROM idem_claim('ann', 'run-outcomes-0002') \gset
SELECT idem_fail('ann', 'run-outcomes-0002', 'oops', :claim_token);
SELECT * FROM idem_run('ann', 'run-outcomes-0002', 'shop.order_it(jsonb)', '{"item": "after a failure"}');
SELECT attempt FROM idem_lookup('ann', 'run-outcomes-0002');
SELECT outcome FROM idem_claim('ann', 'run-outcomes-0003', lease => '0');
SELECT * FROM idem_run('ann', 'run-outcomes-0003', 'shop.order_it(jsonb)', '{"item": "after a lease"}');
SELECT outcome FROM idem_claim('ann', 'run-outcomes-0004', ttl => '0');
SET idempotency.expired_key_policy = reject;
SELECT * FROM idem_run('ann', 'run-outcomes-0004', 'shop.order_it(jsonb)', '{"item": "after its time"}');
RESET idempotency.expired_key_policy;
SELECT * FROM idem_run('ann', 'run-outcomes-0004', 'shop.order_it(jsonb)', '{"item": "after its time"}', ttl => '1 hour', wait => NULL);
SELECT expires_at BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '1 h' AS ttl, lease_expires_at FROM idem_lookup('ann', 'run-outcomes-0004');
SELECT * FROM idem_run(wait => '0', ttl => NULL, request => '{"item": "named"}', handler => 'shop.order_it(jsonb)', key => 'run-outcomes-0005', scope => 'ann');
SELECT item, count(*) FROM shop.orders GROUP BY item ORDER BY item;

--
-- The results that a handler may return
--
CREATE FUNCTION shop.echo(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request;
SELECT * FROM idem_run('ret', 'run-returns-json-1', 'shop.echo(jsonb)', '{"b": [1.00, null],"a":"\u20ac"}');
SELECT * FROM idem_run('ret', 'run-returns-json-1', 'shop.echo(jsonb)', '{"b": [1.00, null],"a":"\u20ac"}');
SELECT * FROM idem_run('ret', 'run-returns-json-2', 'shop.echo(jsonb)', 'null');
SELECT * FROM idem_run('ret', 'run-returns-json-2', 'shop.echo(jsonb)', 'null');
\pset null NULL
CREATE FUNCTION shop.bare(request jsonb) RETURNS idem_response LANGUAGE sql RETURN ROW(204, NULL, NULL)::idem_response;
SELECT * FROM idem_run('ret', 'run-returns-bare-1', 'shop.bare(jsonb)', '{}');
SELECT * FROM idem_run('ret', 'run-returns-bare-1', 'shop.bare(jsonb)', '{}');
CREATE FUNCTION shop.empty(request jsonb) RETURNS idem_response LANGUAGE sql RETURN ROW(100, '{}', '')::idem_response;
SELECT * FROM idem_run('ret', 'run-returns-empty1', 'shop.empty(jsonb)', '{}');
SELECT * FROM idem_run('ret', 'run-returns-empty1', 'shop.empty(jsonb)', '{}');
\pset null ''
-- A row type like idem_response will do.
CREATE TYPE shop.reply AS (s int, h json, b text);
CREATE FUNCTION shop.like_it(request jsonb) RETURNS shop.reply LANGUAGE sql RETURN ROW(200, '[]', 'like it')::shop.reply;
SELECT * FROM idem_run('ret', 'run-returns-like-1', 'shop.like_it(jsonb)', '{}');
-- A large response, byte for byte
CREATE FUNCTION shop.large(request jsonb) RETURNS idem_response LANGUAGE sql
	RETURN ROW(200, NULL, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 32000) AS i))::idem_response;
SELECT outcome, octet_length(response_body), md5(response_body) AS hash FROM idem_run('ret', 'run-returns-large1', 'shop.large(jsonb)', '{}') \gset a_
SELECT outcome, octet_length(response_body), md5(response_body) AS hash FROM idem_run('ret', 'run-returns-large1', 'shop.large(jsonb)', '{}') \gset b_
\echo :a_outcome :a_octet_length :b_outcome :b_octet_length
SELECT :'a_hash' = :'b_hash' AS same;
-- A handler may be STRICT, have settings of its own, a default, and any name.
CREATE FUNCTION shop."Über Händler"(request jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE plpgsql STRICT SET search_path = shop AS $$
BEGIN
	INSERT INTO orders VALUES ('quoted');
	RETURN to_jsonb(current_setting('search_path'));
END
$$;
SELECT * FROM idem_run('ret', 'run-returns-quote1', 'shop."Über Händler"(jsonb)', '{}');
SHOW search_path;

--
-- A handler that fails undoes everything
--
\pset format unaligned
\pset tuples_only on
CREATE FUNCTION shop.fails(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.orders VALUES ('undone');
	RAISE EXCEPTION USING ERRCODE = 'SHOP1', MESSAGE = 'out of ' || (request->>'item'), DETAIL = 'None left.', HINT = 'Try tomorrow.';
END
$$;
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-01', 'shop.fails(jsonb)', '{"item": "tea"}') $$);
SELECT state FROM idem_lookup('err', 'run-that-fails-01');
SELECT count(*) FROM shop.orders WHERE item = 'undone';
-- At top level, and within a transaction that continues
\set VERBOSITY sqlstate
SELECT idem_run('err', 'run-that-fails-01', 'shop.fails(jsonb)', '{"item": "tea"}');
SELECT state FROM idem_lookup('err', 'run-that-fails-01');
BEGIN;
INSERT INTO shop.orders VALUES ('kept');
SAVEPOINT s;
SELECT idem_run('err', 'run-that-fails-01', 'shop.fails(jsonb)', '{"item": "tea"}');
ROLLBACK TO s;
SELECT outcome, response_body FROM idem_run('err', 'run-that-fails-01', 'shop.order_it(jsonb)', '{"item": "instead"}');
COMMIT;
\set VERBOSITY default
SELECT item FROM shop.orders WHERE item IN ('undone', 'kept', 'instead') ORDER BY item;
SELECT outcome FROM idem_run('err', 'run-that-fails-01', 'shop.order_it(jsonb)', '{"item": "instead"}');
-- NULL would be nothing to replay.
CREATE FUNCTION shop.null_row(request jsonb) RETURNS idem_response LANGUAGE sql RETURN NULL::idem_response;
CREATE FUNCTION shop.null_json(request jsonb) RETURNS jsonb LANGUAGE sql RETURN NULL::jsonb;
CREATE FUNCTION shop.null_status(request jsonb) RETURNS idem_response LANGUAGE sql RETURN ROW(NULL, NULL, 'x')::idem_response;
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-02', 'shop.null_row(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-02', 'shop.null_json(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-02', 'shop.null_status(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-02', 'shop.order_it(jsonb)', '{"item": null}') $$);
-- Too large
SET idempotency.max_response_size = 100;
SELECT pg_temp.error_of($$ SELECT idem_run('err', 'run-that-fails-02', 'shop.large(jsonb)', '{}') $$);
RESET idempotency.max_response_size;
SELECT count(*) FROM idem_keys WHERE key = 'run-that-fails-02';
-- A handler cannot end the transaction.
CREATE FUNCTION shop.commits(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.orders VALUES ('committed');
	COMMIT;
	RETURN '{}';
END
$$;
CREATE FUNCTION shop.rolls_back(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	ROLLBACK;
	RETURN '{}';
END
$$;
CREATE PROCEDURE shop.committing() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
CREATE FUNCTION shop.calls(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	CALL shop.committing();
	RETURN '{}';
END
$$;
\set VERBOSITY terse
SELECT idem_run('err', 'run-that-fails-03', 'shop.commits(jsonb)', '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT idem_run('err', 'run-that-fails-03', 'shop.rolls_back(jsonb)', '{}');
\echo :LAST_ERROR_SQLSTATE
SELECT idem_run('err', 'run-that-fails-03', 'shop.calls(jsonb)', '{}');
\echo :LAST_ERROR_SQLSTATE
-- ... not even when idem_run is called where it could.
DO $$ BEGIN PERFORM idem_run('err', 'run-that-fails-03', 'shop.commits(jsonb)', '{}'); END $$;
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY default
SELECT count(*) FROM idem_keys WHERE key = 'run-that-fails-03';
SELECT count(*) FROM shop.orders WHERE item = 'committed';

--
-- A handler that uses the very key
--
CREATE FUNCTION shop.again(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	claimed record;
	ran record;
BEGIN
	SELECT * INTO claimed FROM idem_claim('self', 'run-calls-itself-1');
	SELECT * INTO ran FROM idem_run('self', 'run-calls-itself-1', 'shop.again(jsonb)', request);
	RETURN jsonb_build_array(claimed.outcome, ran.outcome, (SELECT state FROM idem_lookup('self', 'run-calls-itself-1')));
END
$$;
SELECT outcome, response_body FROM idem_run('self', 'run-calls-itself-1', 'shop.again(jsonb)', '{}');
SELECT outcome, response_body FROM idem_run('self', 'run-calls-itself-1', 'shop.again(jsonb)', '{}');
-- Another key within: both are done, or none.
CREATE FUNCTION shop.nested(request jsonb) RETURNS jsonb LANGUAGE sql
	RETURN (SELECT to_jsonb(r) FROM idem_run('self', 'run-nested-inner-1', 'shop.order_it(jsonb)', request) AS r);
SELECT outcome, response_body FROM idem_run('self', 'run-nested-outer-1', 'shop.nested(jsonb)', '{"item": "nested"}');
SELECT outcome, response_body FROM idem_run('self', 'run-nested-inner-1', 'shop.order_it(jsonb)', '{"item": "nested"}');
CREATE FUNCTION shop.nested_fails(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_run('self', 'run-nested-inner-2', 'shop.order_it(jsonb)', request);
	RAISE EXCEPTION 'after all';
END
$$;
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-nested-outer-2', 'shop.nested_fails(jsonb)', '{"item": "undone"}') $$);
SELECT count(*) FROM idem_keys WHERE key LIKE 'run-nested-%-2';
-- A checkpoint, a heartbeat within are well.
CREATE FUNCTION shop.beats(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_checkpoint('self', 'run-that-beats-01', 'half', '[1]');
	PERFORM idem_heartbeat('self', 'run-that-beats-01');
	RETURN '"beaten"';
END
$$;
SELECT outcome, response_body FROM idem_run('self', 'run-that-beats-01', 'shop.beats(jsonb)', '{}');
-- A handler that gives the claim up leaves nothing to complete.
CREATE FUNCTION shop.gives_up(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE request->>'how';
	RETURN '{}';
END
$$;
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-gives-up', 'shop.gives_up(jsonb)', '{"how": "SELECT idem_release(''self'', ''run-that-gives-up'')"}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-gives-up', 'shop.gives_up(jsonb)', '{"how": "SELECT idem_forget(''self'', ''run-that-gives-up'')"}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-gives-up', 'shop.gives_up(jsonb)', '{"how": "SELECT idem_fail(''self'', ''run-that-gives-up'')"}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-gives-up', 'shop.gives_up(jsonb)', '{"how": "SELECT idem_fail(''self'', ''run-that-gives-up''), idem_claim(''self'', ''run-that-gives-up'')"}') $$);
SELECT count(*) FROM idem_keys WHERE key = 'run-that-gives-up';
-- One that completes its claim itself would have two answers: one to replay, and one that it returned.
CREATE FUNCTION shop.completes(request jsonb) RETURNS idem_response LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.orders VALUES ('completed twice');
	PERFORM idem_complete('self', 'run-that-completes', 202, 'by the handler', '{"by": "handler"}');
	IF request ? 'erase' THEN
		PERFORM idem_erase('self', 'run-that-completes');
	END IF;
	RETURN (201, NULL, 'returned')::idem_response;
END
$$;
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-completes', 'shop.completes(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('self', 'run-that-completes', 'shop.completes(jsonb)', '{"erase": true}') $$);
SELECT count(*) FROM idem_keys WHERE key = 'run-that-completes';
SELECT count(*) FROM shop.orders WHERE item = 'completed twice';
-- It may complete another key.
CREATE FUNCTION shop.completes_other(request jsonb) RETURNS jsonb LANGUAGE sql
	RETURN (SELECT to_jsonb(idem_complete('self', 'run-another-key-01', 200, 'other')) FROM idem_claim('self', 'run-another-key-01'));
SELECT outcome, response_body FROM idem_run('self', 'run-that-completes', 'shop.completes_other(jsonb)', '{}');
SELECT outcome, response_body FROM idem_claim('self', 'run-another-key-01');

--
-- Functions that cannot be a handler
--
CREATE FUNCTION shop.no_arguments() RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION shop.two_arguments(request jsonb, more int DEFAULT 0) RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION shop.json_argument(request json) RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION shop.text_argument(request text) RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION shop.any_argument(request anyelement) RETURNS jsonb LANGUAGE sql AS $$ SELECT '{}'::jsonb $$;
CREATE FUNCTION shop.variadic_argument(VARIADIC request jsonb[]) RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION shop.returns_text(request jsonb) RETURNS text LANGUAGE sql RETURN 'x';
CREATE FUNCTION shop.returns_json(request jsonb) RETURNS json LANGUAGE sql RETURN '{}'::json;
CREATE FUNCTION shop.returns_void(request jsonb) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION shop.returns_record(request jsonb) RETURNS record LANGUAGE sql AS $$ SELECT 1, '{}'::json, 'x'::text $$;
CREATE FUNCTION shop.returns_out(request jsonb, OUT status int, OUT headers json, OUT body text) LANGUAGE sql AS $$ SELECT 1, '{}'::json, 'x'::text $$;
CREATE FUNCTION shop.returns_set(request jsonb) RETURNS SETOF jsonb LANGUAGE sql AS $$ SELECT request $$;
CREATE FUNCTION shop.returns_rows(request jsonb) RETURNS SETOF idem_response LANGUAGE sql AS $$ SELECT ROW(1, NULL, NULL)::idem_response $$;
CREATE FUNCTION shop.returns_table(request jsonb) RETURNS TABLE (status int, headers json, body text) LANGUAGE sql AS $$ SELECT 1, '{}'::json, 'x'::text $$;
CREATE PROCEDURE shop.a_procedure(request jsonb) LANGUAGE sql AS '';
CREATE AGGREGATE shop.an_aggregate(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
SELECT h, pg_temp.error_of(format('SELECT idem_run(%L, %L, %L, %L)', 'bad', 'run-bad-handler-1', h, '{}')) FROM (VALUES
	(1, 'shop.no_arguments()'), (2, 'shop.two_arguments(jsonb, int)'), (3, 'shop.json_argument(json)'), (4, 'shop.text_argument(text)'),
	(5, 'shop.any_argument(anyelement)'), (6, 'shop.variadic_argument(jsonb[])'), (7, 'shop.returns_text(jsonb)'), (8, 'shop.returns_json(jsonb)'),
	(9, 'shop.returns_void(jsonb)'), (10, 'shop.returns_record(jsonb)'), (11, 'shop.returns_out(jsonb)'), (12, 'shop.returns_set(jsonb)'),
	(13, 'shop.returns_rows(jsonb)'), (14, 'shop.returns_table(jsonb)'), (15, 'shop.a_procedure(jsonb)'), (16, 'shop.an_aggregate(jsonb)')) AS v (n, h) ORDER BY n;
-- Row types that are not like idem_response are found out when it returns.
CREATE TYPE shop.short AS (s int, h json);
CREATE TYPE shop.long AS (s int, h json, b text, x text);
CREATE TYPE shop.wrong AS (s text, h json, b text);
CREATE FUNCTION shop.returns_short(request jsonb) RETURNS shop.short LANGUAGE sql RETURN ROW(200, NULL)::shop.short;
CREATE FUNCTION shop.returns_long(request jsonb) RETURNS shop.long LANGUAGE sql RETURN ROW(200, NULL, 'x', 'x')::shop.long;
CREATE FUNCTION shop.returns_wrong(request jsonb) RETURNS shop.wrong LANGUAGE sql RETURN ROW('200', NULL, 'x')::shop.wrong;
SELECT h, pg_temp.error_of(format('SELECT idem_run(%L, %L, %L, %L)', 'bad', 'run-bad-handler-1', h, '{}')) FROM (VALUES
	(1, 'shop.returns_short(jsonb)'), (2, 'shop.returns_long(jsonb)'), (3, 'shop.returns_wrong(jsonb)')) AS v (n, h) ORDER BY n;
-- Nor one that is not there.
SELECT pg_temp.error_of($$ SELECT idem_run('bad', 'run-bad-handler-1', 'shop.not_there(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('bad', 'run-bad-handler-1', 0::regprocedure, '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('bad', 'run-bad-handler-1', 4294967295::regprocedure, '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('bad', 'run-bad-handler-1', NULL, '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('bad', 'run-bad-handler-1', 'shop.echo(jsonb)', NULL) $$);
SELECT count(*) FROM idem_keys WHERE key = 'run-bad-handler-1';

--
-- Rights: the handler's are the caller's, nothing more
--
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_other;
SELECT idem_grant('regress_idem_app');
GRANT USAGE ON SCHEMA shop TO regress_idem_app;
CREATE FUNCTION shop.who(request jsonb) RETURNS jsonb LANGUAGE sql RETURN jsonb_build_array(current_user, session_user = current_user);
CREATE FUNCTION shop.definer(request jsonb) RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	INSERT INTO shop.orders VALUES ('by definer');
	RETURN to_jsonb(current_user);
END
$$;
ALTER FUNCTION shop.definer(jsonb) OWNER TO regress_idem_other;
GRANT USAGE ON SCHEMA shop TO regress_idem_other;
GRANT INSERT ON shop.orders TO regress_idem_other;
CREATE FUNCTION shop.reads_keys(request jsonb) RETURNS jsonb LANGUAGE sql RETURN (SELECT to_jsonb(count(*)) FROM idem_keys);
CREATE FUNCTION shop.secret(request jsonb) RETURNS jsonb LANGUAGE sql RETURN '{}'::jsonb;
REVOKE EXECUTE ON FUNCTION shop.secret(jsonb) FROM PUBLIC;
SET ROLE regress_idem_app;
SELECT response_body FROM idem_run('app', 'run-rights-00001', 'shop.who(jsonb)', '{}');
SELECT pg_temp.error_of($$ SELECT idem_run('app', 'run-rights-00002', 'shop.order_it(jsonb)', '{"item": "x"}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('app', 'run-rights-00002', 'shop.reads_keys(jsonb)', '{}') $$);
SELECT pg_temp.error_of($$ SELECT idem_run('app', 'run-rights-00002', 'shop.secret(jsonb)', '{}') $$);
SELECT response_body FROM idem_run('app', 'run-rights-00003', 'shop.definer(jsonb)', '{}');
SELECT current_user;
RESET ROLE;
-- A right taken away is gone for replays, too.
REVOKE EXECUTE ON FUNCTION shop.definer(jsonb) FROM PUBLIC;
SET ROLE regress_idem_app;
SELECT pg_temp.error_of($$ SELECT idem_run('app', 'run-rights-00003', 'shop.definer(jsonb)', '{}') $$);
RESET ROLE;
GRANT EXECUTE ON FUNCTION shop.definer(jsonb) TO regress_idem_app;
SET ROLE regress_idem_app;
SELECT outcome, response_body FROM idem_run('app', 'run-rights-00003', 'shop.definer(jsonb)', '{}');
-- The definer's rights do not last.
SELECT pg_temp.error_of($$ INSERT INTO shop.orders VALUES ('x') $$);
RESET ROLE;
SELECT count(*) FROM idem_keys WHERE key = 'run-rights-00002';
SELECT count(*) FROM shop.orders WHERE item = 'by definer';

--
-- A handler's calls are counted as any function's: not a replay's, which makes none.
--
CREATE FUNCTION shop.counted(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN request; END $$;
CREATE FUNCTION pg_temp.calls(track text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	before bigint := coalesce(pg_stat_get_xact_function_calls('shop.counted(jsonb)'::regprocedure), 0);
BEGIN
	PERFORM set_config('track_functions', track, true);
	FOR i IN 1..3 LOOP
		PERFORM idem_run('counted', 'run-counted-' || track || '-' || lpad((i % 2)::text, 8, '0'), 'shop.counted(jsonb)', '{}');
	END LOOP;
	RETURN pg_stat_get_xact_function_calls('shop.counted(jsonb)'::regprocedure) - before;
END
$$;
SELECT pg_temp.calls('pl') AS pl, pg_temp.calls('all') AS "all", pg_temp.calls('none') AS none;

--
-- Many in one statement
--
SELECT outcome, count(*) FROM generate_series(0, 199) AS i,
	idem_run('many', 'run-many-' || lpad((i % 100)::text, 8, '0'), 'shop.order_it(jsonb)', '{"item": "many"}') GROUP BY outcome ORDER BY outcome;
SELECT count(*) FROM shop.orders WHERE item = 'many';

SET client_min_messages = warning;
DROP SCHEMA shop, "a: shop" CASCADE;
DROP OWNED BY regress_idem_app, regress_idem_other;
DROP ROLE regress_idem_app, regress_idem_other;
