--
-- Callers that mean ill: look-alikes of all that our functions use, NULL in
-- every argument, roles that were granted nothing.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
DROP ROLE IF EXISTS regress_idem_app, regress_idem_stranger;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_stranger;
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

--
-- Look-alikes, in front of everything else
--
CREATE SCHEMA trap;
-- Every function of the server that ours have in their bodies, and ours
-- In bulk
DO $do$
DECLARE
	f record;
	bodies text := (SELECT string_agg(pg_get_functiondef(oid), ' ') FROM pg_proc WHERE pronamespace = 'idem'::regnamespace AND prolang <> (SELECT oid FROM pg_language WHERE lanname = 'c'));
BEGIN
	FOR f IN SELECT DISTINCT ON (proname, proargtypes) proname, pg_get_function_identity_arguments(oid) AS arguments, oidvectortypes(proargtypes) AS types, proretset
			FROM pg_proc WHERE prokind = 'f' AND (pronamespace = 'idem'::regnamespace OR pronamespace = 'pg_catalog'::regnamespace AND bodies ~ ('\m' || proname || '\('))
			AND NOT EXISTS (SELECT FROM unnest(proargtypes) AS a JOIN pg_type AS t ON t.oid = a WHERE t.typtype = 'p' AND t.typname !~ '^any(element|array|nonarray)$')
	LOOP
		EXECUTE format('CREATE FUNCTION trap.%I(%s) RETURNS void LANGUAGE plpgsql AS $f$ BEGIN RAISE ''captured by %s''; END $f$', f.proname, f.types, f.proname);
	END LOOP;
	FOR f IN SELECT oprname, oprleft::regtype AS l, oprright::regtype AS r FROM pg_operator
			WHERE oprkind = 'b' AND oprname IN ('=', '<>', '<', '>', '<=', '>=', '||', '+', '-', '*', '/', '~~')
			AND oprleft = ANY ('{text,name,int4,int8,float8,numeric,oid,timestamptz,interval,"char",bool,bytea,uuid}'::regtype[])
			AND oprright = ANY ('{text,name,int4,int8,float8,numeric,oid,timestamptz,interval,"char",bool,bytea,uuid}'::regtype[])
	LOOP
		EXECUTE format('CREATE FUNCTION trap.%I(%s, %s) RETURNS bool LANGUAGE plpgsql AS $f$ BEGIN RAISE ''captured by %s''; END $f$', 'operator ' || f.oprname, f.l, f.r, f.oprname);
		EXECUTE format('CREATE OPERATOR trap.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = trap.%I)', f.oprname, f.l, f.r, 'operator ' || f.oprname);
	END LOOP;
	-- Every relation of the extension, and those of the server that are in the functions' bodies; types too, which come with them
	FOR f IN SELECT relname, pg_class.oid FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'S', 'i', 'v', 'c')
		OR relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v') AND bodies ~ ('\m' || relname || '\M')
	LOOP
		EXECUTE format('CREATE TABLE trap.%I ()', f.relname);
		EXECUTE format('CREATE TEMP TABLE %I ()', f.relname);
	END LOOP;
	FOR f IN SELECT typname FROM pg_catalog.pg_type WHERE typname = ANY ('{text,name,int4,int8,float8,numeric,oid,regclass,regprocedure,regnamespace,regrole,timestamptz,interval,bool,json,jsonb}'::name[]) AND typnamespace = 'pg_catalog'::regnamespace
	LOOP
		EXECUTE format('CREATE DOMAIN trap.%I AS pg_catalog.bytea', f.typname);
		EXECUTE format('CREATE DOMAIN pg_temp.%I AS pg_catalog.bytea', f.typname);
	END LOOP;
END
$do$;
-- One by one
SET search_path = pg_catalog, pg_temp;
SELECT count(*) > 100, count(*) FILTER (WHERE proname LIKE 'idem\_%') > 30 FROM pg_proc WHERE pronamespace = 'trap'::regnamespace;
SELECT count(*) > 100 FROM pg_operator WHERE oprnamespace = 'trap'::regnamespace;
SELECT relnamespace = 'trap'::regnamespace AS trap, count(*) > 20 FROM pg_class WHERE relname IN (SELECT relname FROM pg_class WHERE relnamespace = 'idem'::regnamespace) AND relnamespace IN ('trap'::regnamespace, pg_my_temp_schema()) GROUP BY 1 ORDER BY 1;
CREATE FUNCTION public.handler(pg_catalog.jsonb) RETURNS pg_catalog.jsonb LANGUAGE sql SET search_path = pg_catalog RETURN $1;
SELECT oid AS handler FROM pg_proc WHERE proname = 'handler' AND pronamespace = 'public'::regnamespace \gset

SET search_path = pg_temp, trap, pg_catalog;
-- The trap works.
\set VERBOSITY terse
SELECT 1 + 1;
SELECT format('x');
SELECT * FROM idem_keys;
\set VERBOSITY default
-- No function of the extension falls into it.
SELECT idem.idem_grant('regress_idem_app');
SELECT idem.idem_key_is_valid('hostile-key-00001'), idem.idem_canonical_json('{"b": [1.0, "x"]}');
SELECT outcome FROM idem.idem_claim('s', 'hostile-key-00001', idem.idem_request_hash('POST', '/', '{"a": 1}'::pg_catalog.text), '1 h', '0', '1 ms');
SELECT outcome, attempt FROM idem.idem_claim('s', 'hostile-key-00001', idem.idem_request_hash('POST', '/', '{"a": 1}'::pg_catalog.jsonb), wait => '1 ms');
BEGIN;
SELECT outcome FROM idem.idem_claim('s', 'hostile-key-00002', idem.idem_request_hash('POST', '/', '{"a": 1}'::pg_catalog.bytea));
SELECT idem.idem_checkpoint('s', 'hostile-key-00002', 'half', '[1]') IS NOT NULL, idem.idem_heartbeat('s', 'hostile-key-00002') IS NOT NULL;
SELECT idem.idem_complete('s', 'hostile-key-00002', 200, 'body'::pg_catalog.text);
SELECT outcome FROM idem.idem_claim('s', 'hostile-key-00003');
SELECT idem.idem_complete('s', 'hostile-key-00003', 200, '\x00'::pg_catalog.bytea, '[]');
SELECT outcome FROM idem.idem_claim('s', 'hostile-key-00004');
SELECT idem.idem_fail('s', 'hostile-key-00004', 'x');
SELECT outcome FROM idem.idem_claim('s', 'hostile-key-00005');
SELECT idem.idem_release('s', 'hostile-key-00005');
COMMIT;
SELECT state, response_body FROM idem.idem_lookup('s', 'hostile-key-00002');
SELECT idem.idem_erase('s', 'hostile-key-00002'), idem.idem_forget('s', 'hostile-key-00002');
SELECT outcome, response_body FROM idem.idem_run('s', 'hostile-key-00006', :handler, '{"a": 1}');
SELECT * FROM idem.idem_try_advance('u', 'e', '1', 1);
SELECT * FROM idem.idem_toggle('u', 'e', '1', 'like', 2);
SELECT * FROM idem.idem_set('u', 'e', '1', 'like', true, 3, '{x}');
SELECT idem.idem_is_active('u', 'e', '1', 'like');
SELECT * FROM idem.idem_try_append('a', 'c', 1, 2, 0, false, '1 ms');
SELECT idem.idem_last_client_seq('a', 'c');
SELECT idem.idem_once('s', 't'::pg_catalog.text, '0'), idem.idem_once_many('s', '{t,u}'::pg_catalog.text[]);
SELECT idem.idem_publish('t', '{}', 'k', '{}', '0') IS NOT NULL, idem.idem_publish('t', '{}') IS NOT NULL;
SELECT ordinal, message_id IS NOT NULL FROM idem.idem_publish_many('{many}', '{1,2}', '{k}', '{1}', '0');
SELECT topic, idem.idem_outbox_nack(id, 'x', '0', attempt) FROM idem.idem_outbox_take(1, '1 s', '{t}');
SELECT topic, idem.idem_outbox_extend(ARRAY[id], '1 s', ARRAY[attempt]) OPERATOR(pg_catalog.=) id, idem.idem_outbox_release(ARRAY[id], ARRAY[attempt]) FROM idem.idem_outbox_take(1, '1 s', '{t}');
SELECT idem.idem_outbox_requeue(), idem.idem_outbox_requeue('{1}');
SELECT idem.idem_outbox_ack('{1,2}') > 0::pg_catalog.int2;
SELECT keys_deleted FROM idem.idem_cleanup();
SELECT idem.idem_stats_reset();
SELECT datname IS NULL FROM idem.idem_stats LIMIT 1;
SELECT pg_catalog.strpos(idem.idem_metrics(), '# EOF') OPERATOR(pg_catalog.>) 0;
SELECT check_name FROM idem.idem_health();
SELECT scope FROM idem.idem_abandoned('0');
SELECT idem.idem_revoke('regress_idem_app');
RESET search_path;
-- All of it was ours; theirs are empty, as they were.
SELECT (SELECT count(*) FROM idem.idem_keys) > 3, (SELECT count(*) FROM idem.idem_outbox), (SELECT count(*) FROM trap.idem_keys) + (SELECT count(*) FROM pg_temp.idem_keys);
-- To install it there is no different.
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
SET search_path = pg_temp, trap, pg_catalog;
CREATE EXTENSION idempotency SCHEMA idem;
SET search_path = pg_catalog, pg_temp;
RESET client_min_messages;
SELECT extnamespace::regnamespace, (SELECT count(*) FROM pg_depend WHERE refobjid = e.oid AND deptype = 'e') > 50 FROM pg_extension AS e WHERE extname = 'idempotency';
SELECT classid::regclass, count(*) FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass AND refobjid = 'trap'::regnamespace AND objid IN (SELECT objid FROM pg_depend WHERE refclassid = 'pg_extension'::regclass) GROUP BY 1;
RESET search_path;
DISCARD TEMP;
SET client_min_messages = warning;
DROP SCHEMA trap CASCADE;
RESET client_min_messages;

--
-- NULL in every argument, and in all: an answer or a proper error, from every function that there is
--
SET search_path = idem, public, pg_catalog;
-- Its lease is over, so that nobody waits for it.
SELECT outcome FROM idem_claim('s', 'hostile-key-00001', lease => '0');
CREATE FUNCTION pg_temp.null_calls() RETURNS TABLE (call text, error text)
LANGUAGE plpgsql AS $$
DECLARE
	f record;
	valid text;
	arguments text;
BEGIN
	FOR f IN SELECT p.oid, proname, proargtypes::oid[] AS types, pronargs FROM pg_proc AS p WHERE pronamespace = 'idem'::regnamespace AND prorettype <> 'internal'::regtype AND proname !~ '^idem_p_' ORDER BY oid::regprocedure::text COLLATE "C" LOOP
		FOR n IN 0 .. f.pronargs LOOP
			SELECT string_agg(CASE WHEN n IN (0, i) THEN 'NULL' ELSE CASE f.types[i - 1]::regtype
					WHEN 'text'::regtype THEN CASE WHEN i = 2 THEN '''hostile-key-00001''' ELSE '''s''' END
					WHEN 'bytea'::regtype THEN '''x'''
					WHEN 'bigint'::regtype THEN '1' WHEN 'int'::regtype THEN '200' WHEN 'boolean'::regtype THEN 'true'
					WHEN 'interval'::regtype THEN '''0''' WHEN 'timestamptz'::regtype THEN '''2020-01-01''' WHEN 'json'::regtype THEN '''{}''' WHEN 'jsonb'::regtype THEN '''{}'''
					WHEN 'text[]'::regtype THEN '''{t}''' WHEN 'bigint[]'::regtype THEN '''{1}'''
					WHEN 'int[]'::regtype THEN '''{200}''' WHEN 'boolean[]'::regtype THEN '''{t}''' WHEN 'bytea[]'::regtype THEN '''{x}''' WHEN 'json[]'::regtype THEN '''{null}'''
					WHEN 'jsonb[]'::regtype THEN '''{1}''' WHEN 'interval[]'::regtype THEN '''{0}'''
					WHEN 'aclitem[]'::regtype THEN '''{}''' WHEN 'oid'::regtype THEN '1' WHEN 'regrole'::regtype THEN '''regress_idem_app''' WHEN 'regprocedure'::regtype THEN '''public.handler(jsonb)''' END END
				|| '::' || (f.types[i - 1])::regtype, ', ' ORDER BY i)
				INTO arguments FROM generate_series(1, f.pronargs) AS i;
			call := format('%I(%s)', f.proname, arguments);
			BEGIN
				EXECUTE 'SELECT ' || call;
				error := 'none';
				RAISE SQLSTATE 'UN001';
			EXCEPTION WHEN SQLSTATE 'UN001' THEN NULL;
			WHEN OTHERS THEN
				error := SQLSTATE;
			END;
			RETURN NEXT;
		END LOOP;
	END LOOP;
END
$$;
-- In bulk
CREATE TEMP TABLE null_calls AS SELECT * FROM pg_temp.null_calls();
-- One by one
SELECT count(DISTINCT split_part(call, '(', 1)) = (SELECT count(DISTINCT proname) FROM pg_proc WHERE pronamespace = 'idem'::regnamespace AND prorettype <> 'internal'::regtype AND proname !~ '^idem_p_'), count(*) FILTER (WHERE call IS NULL) FROM null_calls;
SELECT error, count(*) FROM null_calls WHERE call IS NOT NULL GROUP BY error ORDER BY error COLLATE "C";
SELECT call, error FROM null_calls WHERE error NOT IN ('none', '22004', 'ID001') ORDER BY call COLLATE "C";
SELECT idem_check_interval(NULL, NULL);
SELECT idem_check_interval('1 s', NULL);

--
-- Who was granted nothing learns nothing
--
SELECT idem_grant('regress_idem_app');
SELECT outcome, idem_complete('s', 'hostile-secret-01', 200, 'secret') FROM idem_claim('s', 'hostile-secret-01', 'secret');
SELECT idem_publish('secret', '"secret"', 'secret') IS NOT NULL, idem_once('secret', 'secret'), (idem_set('secret', 'e', '1', 'like', true, 1)).is_active;
SELECT last_client_seq FROM idem_try_append('secret', 'secret', 1);
ANALYZE idem_keys, idem_outbox, idem_tokens, idem_action_versions, idem_user_actions, idem_aggregates, idem_client_sequences;
GRANT USAGE ON SCHEMA idem TO regress_idem_stranger;
SET ROLE regress_idem_stranger;
-- The message is the server's, and the same for all arguments: no code of the extension has read them.
CREATE FUNCTION pg_temp.words(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
	context text;
	answer text;
BEGIN
	EXECUTE statement INTO answer;
	RETURN 'answered: ' || coalesce(answer, 'nothing');
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(' | ', SQLSTATE, SQLERRM, nullif(detail, ''), nullif(hint, ''));
END
$$;
RESET ROLE;
GRANT SELECT ON null_calls TO regress_idem_stranger, regress_idem_app;
SET ROLE regress_idem_stranger;
-- The call of a STRICT function with NULL is not even made.
SELECT regexp_replace(pg_temp.words('SELECT ' || call), 'function idem\w+', 'function ...'), count(*) FROM null_calls WHERE call !~ '^idem_(canonical_json|redacted_key)' GROUP BY 1;
SELECT pg_temp.words(s || ' ' || t) FROM unnest('{idem_keys,idem_action_versions,idem_user_actions,idem_aggregates,idem_client_sequences,idem_tokens,idem_outbox,idem_stats}'::text[]) AS t,
	unnest('{SELECT * FROM,SELECT 1 FROM,EXPLAIN SELECT * FROM,EXPLAIN DELETE FROM,TABLE}'::text[]) AS s WHERE s !~ 'DELETE' OR t <> 'idem_stats'
	EXCEPT SELECT '42501 | permission denied for table ' || t FROM unnest('{idem_keys,idem_action_versions,idem_user_actions,idem_aggregates,idem_client_sequences,idem_tokens,idem_outbox}'::text[]) AS t
	EXCEPT SELECT '42501 | permission denied for view idem_stats';
SELECT pg_temp.words('EXPLAIN SELECT idem_claim(''s'', ''hostile-secret-01'')'), pg_temp.words('EXPLAIN ANALYZE SELECT idem_claim(''s'', ''hostile-secret-01'')');
SELECT pg_temp.words('CREATE TEMP TABLE t (LIKE idem_keys INCLUDING ALL)'), pg_temp.words('CREATE TEMP TABLE t () INHERITS (idem_keys)'), pg_temp.words('LOCK TABLE idem_keys IN ACCESS SHARE MODE'),
	pg_temp.words('CREATE TEMP VIEW v AS SELECT * FROM idem_keys; SELECT * FROM v'), pg_temp.words('CREATE STATISTICS st ON scope, key FROM idem_keys');
SELECT count(*) FROM pg_stats WHERE schemaname = 'idem';
SELECT last_value IS NULL FROM pg_sequences WHERE schemaname = 'idem';
RESET ROLE;
-- The application neither, but for the answers of its functions.
SELECT count(*) > 0 FROM pg_stats WHERE schemaname = 'idem';
SET ROLE regress_idem_app;
SELECT count(*) FROM pg_stats WHERE schemaname = 'idem';
SELECT last_value IS NULL FROM pg_sequences WHERE schemaname = 'idem';
SELECT pg_temp.words(s || ' ' || t) FROM unnest('{idem_keys,idem_action_versions,idem_user_actions,idem_aggregates,idem_client_sequences,idem_tokens,idem_outbox,idem_stats}'::text[]) AS t,
	unnest('{SELECT * FROM,SELECT 1 FROM,EXPLAIN SELECT * FROM,EXPLAIN DELETE FROM,TABLE}'::text[]) AS s WHERE s !~ 'DELETE' OR t <> 'idem_stats'
	EXCEPT SELECT '42501 | permission denied for table ' || t FROM unnest('{idem_keys,idem_action_versions,idem_user_actions,idem_aggregates,idem_client_sequences,idem_tokens,idem_outbox}'::text[]) AS t
	EXCEPT SELECT '42501 | permission denied for view idem_stats';
SELECT pg_temp.words('SELECT ' || f) FROM unnest('{idem_metrics(),idem_health(),idem_abandoned(),idem_stats_data(),idem_stats_reset(),idem_monitoring_data(),idem_sample_data(''keys''),idem_clock_evidence(),idem_table_stats(),idem_worker_absence(),idem_vacuum_holder(),idem_cleanup()}'::text[]) AS f;
-- One of another key's holder: the error only shows that the key is held.
SELECT pg_temp.words('SELECT idem_complete(''s'', ''hostile-secret-01'', 200, claim_token => 1)'), pg_temp.words('SELECT idem_release(''s'', ''hostile-secret-01'', 1)');
SELECT outcome, claim_token, response_status, response_body, expires_at FROM idem_claim('s', 'hostile-secret-01', 'guess');
RESET ROLE;

RESET search_path;
SET client_min_messages = warning;
DROP FUNCTION public.handler(jsonb);
DROP SCHEMA idem CASCADE;
DROP OWNED BY regress_idem_app, regress_idem_stranger;
DROP ROLE regress_idem_app, regress_idem_stranger;
