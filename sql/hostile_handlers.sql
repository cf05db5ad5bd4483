--
-- Handlers of idem_run that mean ill: to rights, to the key, to the extension
-- itself.  What run.sql has of the kind is not repeated here.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
DROP ROLE IF EXISTS regress_idem_app, regress_idem_other;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_other;
SELECT idem_grant('regress_idem_app');
CREATE SCHEMA shop;
GRANT USAGE ON SCHEMA shop TO PUBLIC;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

-- Does what the request says, and answers by what the last of it answers.
CREATE FUNCTION shop.does(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	statement text;
	answer text;
BEGIN
	FOR statement IN SELECT jsonb_array_elements_text(request) LOOP
		IF statement ILIKE 'select%' THEN
			EXECUTE statement INTO answer;
		ELSE
			EXECUTE statement;
		END IF;
	END LOOP;
	RETURN to_jsonb(answer);
END
$$;
-- NULL would be refused: "done" where nothing was selected.
CREATE FUNCTION shop.does_it(request jsonb) RETURNS jsonb LANGUAGE sql RETURN coalesce(shop.does(request), '"done"');

-- Runs it under a new key; what it answered, or raised, and what is left of the key.
CREATE SEQUENCE shop.runs;
GRANT USAGE ON shop.runs TO PUBLIC;
CREATE FUNCTION pg_temp.run(VARIADIC statements text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	k text := 'hostile-run-' || lpad(nextval('shop.runs')::text, 4, '0');
	answer text;
BEGIN
	SELECT outcome || ' ' || response_body INTO answer
		FROM public.idem_run('h', k, to_regprocedure('shop.does_it(jsonb)'), to_jsonb(statements));
	RETURN concat_ws(' ', answer, (SELECT state FROM public.idem_lookup('h', k)));
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
	RETURN concat_ws(' ', SQLSTATE, SQLERRM, (SELECT state FROM public.idem_lookup('h', k)));
END
$$;
-- The key of the run under way
CREATE FUNCTION shop.key() RETURNS text LANGUAGE sql RETURN 'hostile-run-' || lpad((SELECT last_value FROM shop.runs)::text, 4, '0');
GRANT SELECT ON shop.runs TO PUBLIC;
SELECT pg_temp.run('SELECT 1');

--
-- Rights
--
SET ROLE regress_idem_app;
SELECT pg_temp.run('SELECT current_user');
SELECT pg_temp.run('CREATE EXTENSION amcheck');
SELECT pg_temp.run('DROP EXTENSION idempotency');
SELECT pg_temp.run('ALTER EXTENSION idempotency UPDATE');
SELECT pg_temp.run('ALTER FUNCTION public.idem_claim(text, text, bytea, interval, interval, interval, jsonb) SECURITY DEFINER');
SELECT pg_temp.run('CREATE OR REPLACE FUNCTION public.idem_key_is_valid(key text) RETURNS boolean LANGUAGE sql AS ''SELECT true''');
SELECT pg_temp.run('CREATE FUNCTION pg_temp.f() RETURNS void LANGUAGE c AS ''idempotency'', ''idem_forget''');
SELECT pg_temp.run('DELETE FROM public.idem_keys');
SELECT pg_temp.run('SELECT count(*) FROM public.idem_keys');
SELECT pg_temp.run('SELECT public.idem_forget(''h'', shop.key())');
SELECT pg_temp.run('SELECT public.idem_grant(''regress_idem_other'')');
SELECT pg_temp.run('GRANT EXECUTE ON FUNCTION public.idem_forget(text, text) TO regress_idem_app');
SELECT pg_temp.run('SET idempotency.max_response_size = ''1GB''');
SELECT pg_temp.run('ALTER SYSTEM SET idempotency.key_min_length = 1');
SELECT current_user;
RESET ROLE;
-- A role that may become another: as with any function, it stays what it became; the claim is completed all the same.
GRANT regress_idem_other TO regress_idem_app;
SET SESSION AUTHORIZATION regress_idem_app;
BEGIN;
SELECT outcome, response_body FROM idem_run('h', 'hostile-role-0001', 'shop.does_it(jsonb)', '["SET LOCAL ROLE regress_idem_other", "SELECT current_user"]');
SELECT current_user;
COMMIT;
SELECT current_user;
RESET SESSION AUTHORIZATION;
SELECT state, response_body FROM idem_lookup('h', 'hostile-role-0001');
REVOKE regress_idem_other FROM regress_idem_app;
SET SESSION AUTHORIZATION regress_idem_app;
SELECT idem_run('h', 'hostile-role-0002', 'shop.does_it(jsonb)', '["SET LOCAL ROLE regress_idem_other"]');
RESET SESSION AUTHORIZATION;
-- A handler in a schema that the caller may not use: not by its name, and not by its OID either.
CREATE SCHEMA private;
CREATE FUNCTION private.secret(request jsonb) RETURNS jsonb LANGUAGE sql SECURITY DEFINER RETURN '"secret"'::jsonb;
SELECT 'private.secret(jsonb)'::regprocedure::oid AS secret \gset
SET ROLE regress_idem_app;
SELECT response_body FROM idem_run('h', 'hostile-secret-01', 'private.secret(jsonb)', '{}');
SELECT response_body FROM idem_run('h', 'hostile-secret-01', :secret, '{}');
RESET ROLE;
SELECT state FROM idem_lookup('h', 'hostile-secret-01');
GRANT USAGE ON SCHEMA private TO regress_idem_app;
SET ROLE regress_idem_app;
SELECT response_body FROM idem_run('h', 'hostile-secret-01', :secret, '{}');
RESET ROLE;
-- A definer's rights end with its handler, even by an error.
CREATE FUNCTION shop.definer(request jsonb) RETURNS jsonb LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF request ? 'fail' THEN
		RAISE EXCEPTION 'as %', current_user;
	END IF;
	RETURN to_jsonb(current_user = session_user);
END
$$;
SET ROLE regress_idem_app;
SELECT response_body FROM idem_run('h', 'hostile-definer-1', 'shop.definer(jsonb)', '{}');
DO $$
BEGIN
	PERFORM idem_run('h', 'hostile-definer-2', 'shop.definer(jsonb)', '{"fail": 1}');
EXCEPTION WHEN raise_exception THEN
	RAISE NOTICE '%', current_user;
END
$$;
SELECT current_user;
RESET ROLE;

--
-- The key itself: the calls that the handler may not make of it are in run.sql
--
SELECT pg_temp.run('SELECT outcome FROM idem_claim(''h'', shop.key(), wait => ''10 minutes'')');
SELECT pg_temp.run('SELECT outcome FROM idem_run(''h'', shop.key(), ''shop.does_it(jsonb)'', ''[]'', wait => ''10 minutes'')');
SELECT pg_temp.run('SELECT idem_complete(''h'', shop.key(), 200)');
SELECT pg_temp.run('SELECT idem_complete(''h'', shop.key(), 200, claim_token => 1)');
SELECT pg_temp.run('SELECT idem_release(''h'', shop.key())', 'SELECT outcome FROM idem_claim(''h'', shop.key())');
SELECT pg_temp.run('SELECT idem_release(''h'', shop.key())', 'SELECT outcome FROM idem_run(''h'', shop.key(), ''shop.does_it(jsonb)'', ''[]'')');
SELECT pg_temp.run('SELECT idem_forget(''h'', shop.key())', 'INSERT INTO idem_keys SELECT 1, now(), NULL, now(), now(), 1, NULL, ''started'', ''h'', shop.key()');
SELECT pg_temp.run('SELECT idem_heartbeat(''h'', shop.key(), lease => ''0'')', 'SELECT outcome FROM idem_claim(''h'', shop.key())');
SELECT pg_temp.run('SELECT idem_cleanup()');
SELECT pg_temp.run('UPDATE idem_keys SET state = ''failed'' WHERE key = shop.key()');
SELECT pg_temp.run('UPDATE idem_keys SET state = ''nonsense'' WHERE key = shop.key()');
SELECT pg_temp.run('UPDATE idem_keys SET claim_token = 0 WHERE key = shop.key()');
SELECT pg_temp.run('UPDATE idem_keys SET expires_at = now() - interval ''1 day'' WHERE key = shop.key()');
SELECT pg_temp.run('TRUNCATE idem_keys');
SELECT pg_temp.run('UPDATE idem_keys SET attempt = 7 WHERE key = shop.key()');
SELECT attempt FROM idem_lookup('h', shop.key());
-- A rollback inside it does not reach the claim.
CREATE FUNCTION shop.undoes(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idem_release('h', 'hostile-undoes-01');
		PERFORM idem_claim('h', 'hostile-inner-001');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
		RETURN '"undone"';
	END;
END
$$;
SELECT outcome, response_body FROM idem_run('h', 'hostile-undoes-01', 'shop.undoes(jsonb)', '{}');
SELECT state FROM idem_lookup('h', 'hostile-inner-001');

--
-- The transaction: it cannot be ended, nor made one that does not write
--
SELECT pg_temp.run('COMMIT');
SELECT pg_temp.run('ROLLBACK');
SELECT pg_temp.run('SAVEPOINT s');
SELECT pg_temp.run('PREPARE TRANSACTION ''x''');
SELECT pg_temp.run('DO ''BEGIN COMMIT; END''');
SELECT pg_temp.run('VACUUM idem_keys');
CREATE PROCEDURE shop.commits() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
SELECT pg_temp.run('CALL shop.commits()');
BEGIN;
SELECT idem_run('h', 'hostile-readonly-1', 'shop.does_it(jsonb)', '["SET LOCAL transaction_read_only = on"]');
ROLLBACK;
SELECT state FROM idem_lookup('h', 'hostile-readonly-1');

--
-- The extension: dropped, replaced, altered under its own call
--
SELECT pg_temp.run('DROP EXTENSION idempotency CASCADE');
SELECT pg_temp.run('DROP EXTENSION idempotency CASCADE', 'CREATE EXTENSION idempotency');
SELECT pg_temp.run('DROP EXTENSION idempotency CASCADE', 'CREATE EXTENSION idempotency', 'SELECT outcome FROM idem_claim(''h'', shop.key())');
SELECT pg_temp.run('ALTER TABLE idem_keys ADD CHECK (attempt < 100)');
SELECT pg_temp.run('ALTER TABLE idem_keys DROP COLUMN error');
SELECT pg_temp.run('CREATE TRIGGER x BEFORE UPDATE ON idem_keys EXECUTE FUNCTION suppress_redundant_updates_trigger()');
BEGIN;
SELECT pg_temp.run('ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey');
ROLLBACK;
SELECT pg_temp.run('ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD PRIMARY KEY (scope, key)');
SELECT pg_temp.run('REINDEX TABLE idem_keys', 'CLUSTER idem_keys USING idem_keys_pkey', 'ANALYZE idem_keys');
SELECT pg_temp.run('ALTER TABLE idem_keys SET UNLOGGED');
SELECT pg_temp.run('LOCK TABLE idem_keys IN ACCESS EXCLUSIVE MODE');
SELECT pg_temp.run('DROP FUNCTION shop.does_it(jsonb)');
CREATE OR REPLACE FUNCTION shop.does_it(request jsonb) RETURNS jsonb LANGUAGE sql RETURN coalesce(shop.does(request), '"done"');
SELECT pg_temp.run('SELECT 1');
SELECT count(*) FROM idem_keys WHERE state = 'started';

--
-- Errors of every kind, ours too: raised to the caller as they are, and nothing is left
--
CREATE FUNCTION shop.raises(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.effects VALUES (request->>0);
	RAISE EXCEPTION USING ERRCODE = request->>0, MESSAGE = 'raised';
END
$$;
CREATE TABLE shop.effects (code text);
CREATE FUNCTION pg_temp.raised(code text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_run('h', 'hostile-raises-01', 'shop.raises(jsonb)', jsonb_build_array(code), wait => '1 s');
	RETURN 'no error';
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
	RETURN concat_ws(' ', SQLSTATE, SQLERRM);
END
$$;
SELECT pg_temp.raised(code) FROM unnest('{ID001,ID002,ID003,ID004,ID005,40001,40P01,55P03,57014,57P01,P0004,23505,25006,42501,54000,53100,XX000,XX001,XX002,22P02,01000,P0001,UN001}'::text[]) AS code;
SELECT count(*) FROM shop.effects;
SELECT state FROM idem_lookup('h', 'hostile-raises-01');

--
-- Results: see run.sql; and some that only look like a response
--
CREATE TYPE shop.reply AS (status int, gone int, headers json, body text);
ALTER TYPE shop.reply DROP ATTRIBUTE gone;
CREATE FUNCTION shop.with_gap(request jsonb) RETURNS shop.reply LANGUAGE sql RETURN ROW(200, NULL, 'x')::shop.reply;
CREATE FUNCTION shop.out_columns(request jsonb, OUT status int, OUT headers json, OUT body text) LANGUAGE sql RETURN ROW(200, NULL, 'x');
CREATE DOMAIN shop.reply_domain AS idem_response;
CREATE FUNCTION shop.domain(request jsonb) RETURNS shop.reply_domain LANGUAGE sql RETURN ROW(200, NULL, 'x')::idem_response;
CREATE DOMAIN shop.jsonb_domain AS jsonb CHECK (VALUE <> '1');
CREATE FUNCTION shop.jsonb_domain(request jsonb) RETURNS shop.jsonb_domain LANGUAGE sql RETURN request::shop.jsonb_domain;
CREATE FUNCTION shop.of_domain(request shop.jsonb_domain) RETURNS jsonb LANGUAGE sql RETURN request::jsonb;
CREATE FUNCTION shop.as_record(request jsonb) RETURNS record LANGUAGE sql RETURN ROW(200, NULL::json, 'x'::text);
CREATE FUNCTION shop.lowest(request jsonb) RETURNS idem_response LANGUAGE sql RETURN ROW(100, 'null', '')::idem_response;
SELECT outcome, response_status, response_headers, response_body FROM generate_series(1, 2), idem_run('h', 'hostile-reply-000', 'shop.lowest(jsonb)', '{}');
\set VERBOSITY sqlstate
SELECT idem_run('h', 'hostile-reply-001', 'shop.with_gap(jsonb)', '{}');
SELECT outcome FROM idem_run('h', 'hostile-reply-002', 'shop.out_columns(jsonb)', '{}');
SELECT idem_run('h', 'hostile-reply-003', 'shop.domain(jsonb)', '{}');
SELECT idem_run('h', 'hostile-reply-004', 'shop.jsonb_domain(jsonb)', '{}');
SELECT idem_run('h', 'hostile-reply-005', 'shop.of_domain(shop.jsonb_domain)', '{}');
SELECT idem_run('h', 'hostile-reply-006', 'shop.as_record(jsonb)', '{}');
\set VERBOSITY default
-- Values that lie outside of their row, compressed, or as plpgsql keeps them
CREATE FUNCTION shop.toasted(request jsonb) RETURNS idem_response LANGUAGE plpgsql AS $$
DECLARE
	r idem_response;
BEGIN
	SELECT 200, to_json(repeat('h', 100000)), string_agg(md5(i::text), '') INTO r FROM generate_series(1, 3000) AS i;
	CREATE TEMP TABLE kept AS SELECT r AS response;
	r := NULL;
	SELECT (response).* INTO r FROM kept;
	DROP TABLE kept;
	RETURN r;
END
$$;
SELECT outcome, length(response_headers::text), length(response_body), md5(response_body) FROM generate_series(1, 2), idem_run('h', 'hostile-toasted-1', 'shop.toasted(jsonb)', '{}');

--
-- What is left open or set
--
SELECT pg_temp.run('SET search_path = shop', 'SET idempotency.default_ttl = ''1 h''', 'SET lock_timeout = ''1 s''', 'SET statement_timeout = ''1 h''');
-- As after any function; none of it changes what idem_run does.
SELECT current_setting('search_path'), current_setting('idempotency.default_ttl'), current_setting('lock_timeout');
RESET search_path;
RESET idempotency.default_ttl;
RESET lock_timeout;
RESET statement_timeout;
-- Types of the caller's with the names of those of a response
CREATE SCHEMA names
	CREATE TABLE text (a int)
	CREATE TABLE json (a int)
	CREATE TABLE int4 (a int);
CREATE FUNCTION names.handler(request jsonb) RETURNS public.idem_response LANGUAGE sql AS $$SELECT 201, NULL::pg_catalog.json, 'made'$$;
SET search_path = names, pg_catalog, public;
SELECT outcome, response_status, response_body FROM idem_run('h', 'hostile-names-0001', 'names.handler(jsonb)', '{}');
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA names CASCADE;
RESET client_min_messages;
-- Its own settings end with it, also after an error.
CREATE FUNCTION shop.with_settings(request jsonb) RETURNS jsonb LANGUAGE plpgsql SET search_path = shop SET idempotency.default_ttl = '5 h' AS $$
BEGIN
	RETURN to_jsonb(current_setting(request->>0)::text);
END
$$;
SELECT response_body FROM idem_run('h', 'hostile-settings-1', 'shop.with_settings(jsonb)', '["idempotency.default_ttl"]');
DO $$ BEGIN PERFORM idem_run('h', 'hostile-settings-2', 'shop.with_settings(jsonb)', '["no.such.setting"]'); EXCEPTION WHEN undefined_object THEN NULL; END $$;
SELECT current_setting('search_path'), current_setting('idempotency.default_ttl');
CREATE FUNCTION shop.opens_cursor(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	c refcursor := 'left_open';
	k record;
BEGIN
	OPEN c FOR SELECT * FROM idem_keys WHERE key = 'hostile-cursor-01' FOR UPDATE;
	FETCH c INTO k;
	RETURN to_jsonb(k.state);
END
$$;
BEGIN;
SELECT outcome, response_body FROM idem_run('h', 'hostile-cursor-01', 'shop.opens_cursor(jsonb)', '{}');
SELECT name FROM pg_cursors;
MOVE ALL IN left_open;
COMMIT;
SELECT outcome, response_body FROM idem_run('h', 'hostile-cursor-01', 'shop.opens_cursor(jsonb)', '{}');
SELECT pg_temp.run('PREPARE left_over AS SELECT 1', 'LISTEN left_over', 'CREATE TEMP TABLE left_over ()', 'SELECT pg_advisory_lock(1)');
DEALLOCATE left_over;
DROP TABLE left_over;
SELECT pg_advisory_unlock(1);
UNLISTEN *;

--
-- Recursion: as deep as the stack is, and then an error that undoes all of it
--
CREATE FUNCTION shop.recurses(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	depth int := request->>'depth';
BEGIN
	IF depth = 0 THEN
		RETURN '0';
	END IF;
	RETURN (SELECT (response_body::int + 1)::text FROM idem_run('deep', 'hostile-depth-' || lpad(depth::text, 4, '0'), 'shop.recurses(jsonb)', jsonb_build_object('depth', depth - 1)));
END
$$;
SELECT outcome, response_body FROM idem_run('deep', 'hostile-recursion', 'shop.recurses(jsonb)', '{"depth": 10}');
SELECT count(*), count(*) FILTER (WHERE state = 'completed') FROM idem_keys WHERE scope = 'deep';
SET max_stack_depth = '400kB';
\set VERBOSITY sqlstate
SELECT outcome, response_body FROM idem_run('deep', 'hostile-too-deep1', 'shop.recurses(jsonb)', '{"depth": 1000}');
\set VERBOSITY default
RESET max_stack_depth;
SELECT count(*) FROM idem_keys WHERE scope = 'deep';
CREATE FUNCTION shop.endless(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
	SELECT to_jsonb(r) FROM public.idem_run('deep', 'hostile-endless-' || (request->>0), 'shop.endless(jsonb)', to_jsonb(ARRAY[(request->>0)::int + 1])) AS r
$$;
\set VERBOSITY sqlstate
-- In bulk
SELECT outcome FROM idem_run('deep', 'hostile-endless-x', 'shop.endless(jsonb)', '[1]');
-- One by one
\set VERBOSITY default
SELECT count(*) FROM idem_keys WHERE scope = 'deep';
SELECT outcome FROM idem_claim('deep', 'hostile-too-deep1');

SET client_min_messages = warning;
DROP SCHEMA shop, private CASCADE;
DROP OWNED BY regress_idem_app, regress_idem_other;
DROP ROLE regress_idem_app, regress_idem_other;
