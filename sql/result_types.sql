--
-- The result types of functions that return one row: each can be used like the
-- row type of a table.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

-- In FROM: columns, none, the row itself, in a subquery, next to others.
SELECT outcome, attempt FROM idem_claim('row', 'key-0000000000000001');
SELECT count(*) FROM idem_claim('row', 'key-0000000000000002');
SELECT a, a.last_action_id, a IS NOT NULL AS is_not_null FROM idem_try_advance('user', 'post', '1', 5) AS a;
SELECT state FROM idem_lookup('row', 'key-0000000000000001') AS c WHERE c IS NOT NULL;
SELECT state FROM idem_lookup('row', 'key-0000000000000001') AS c WHERE length(c::text) > 0;
SELECT o, count(*) FROM (SELECT upper(state) AS o FROM idem_lookup('row', 'key-0000000000000001')) AS s GROUP BY ROLLUP (o) ORDER BY o;
SELECT random() > 2 AS never, outcome FROM idem_claim('row', 'key-0000000000000003') WHERE outcome = 'new' ORDER BY outcome;
SELECT * FROM idem_try_advance('user', 'post', '1', 4) WITH ORDINALITY;
SELECT * FROM ROWS FROM (idem_try_advance('user', 'post', '1', 6), generate_series(1, 2));
SELECT i, a.* FROM generate_series(1, 3) AS i, idem_try_advance('user', 'post', '2', 4 - i) AS a;
SELECT * FROM idem_lookup('row', 'key-of-nobody-00001');

-- As often as the executor's node says, whatever was loaded before.
SELECT x, (SELECT outcome FROM idem_claim('row', 'key-0000000000000004') WHERE outcome <> x) FROM (VALUES ('a'), ('b'), ('c')) AS v (x);
SELECT x, (SELECT outcome FROM idem_claim('row', 'key-000000000000000' || x)) FROM generate_series(5, 7) AS x;

-- What EXPLAIN says, and a cursor that goes back.
EXPLAIN (VERBOSE, COSTS OFF) SELECT outcome FROM idem_claim('row', 'key-0000000000000008') WHERE attempt = 1;
BEGIN;
DECLARE c CURSOR FOR SELECT outcome FROM idem_claim('row', 'key-0000000000000009');
FETCH c;
FETCH c;
FETCH BACKWARD 1 FROM c;
MOVE ABSOLUTE 0 IN c;
FETCH c;
COMMIT;

-- As a value: one column, all of them (a call each), text, JSON, composed, compared.
SELECT idem_try_advance('user', 'post', '3', 1);
SELECT (idem_try_advance('user', 'post', '3', 2)).last_action_id;
SELECT (idem_try_advance('user', 'post', '3', 3)).*;
SELECT idem_set('user', 'post', '3', 'like', true, 4)::text, to_jsonb(idem_set('user', 'post', '3', 'like', true, 5));
SELECT idem_set('user', 'post', '3', 'like', true, 5) = ROW(true, 5, false)::idem_action_result AS same,
	idem_set('user', 'post', '3', 'like', true, 5) = idem_toggle('user', 'post', '3', 'like', 5) AS same_type;
SELECT '(appended,1,1)'::idem_append_result = idem_try_append('a', 'c', 1) AS same;

-- In PL/pgSQL and SQL functions, in tables and views.
CREATE TABLE claims (c idem_claim_result, a idem_action_result);
CREATE FUNCTION claim(key text) RETURNS idem_claim_result LANGUAGE sql RETURN idem_claim('row', key);
CREATE FUNCTION looked_up(key text) RETURNS SETOF idem_lookup_result LANGUAGE plpgsql AS $$
BEGIN
	RETURN NEXT idem_lookup('row', key);
	RETURN QUERY SELECT * FROM idem_lookup('row', key);
	RETURN QUERY SELECT (idem_lookup('row', key)).*;
END
$$;
DO $$
DECLARE
	r record;
	c idem_claim_result;
	verdict boolean;
	counter bigint;
BEGIN
	r := idem_claim('row', 'key-0000000000000010');
	RAISE NOTICE '% %', r.outcome, r.attempt;
	c := idem_claim('row', 'key-0000000000000011');
	RAISE NOTICE '% %', c.outcome, c.attempt;
	c := claim('key-0000000000000012');
	INSERT INTO claims VALUES (c, idem_set('user', 'post', '4', 'like', true, 1));
	c.outcome := 'changed';
	RAISE NOTICE '% %', c.outcome, c.attempt;
	SELECT * INTO r FROM idem_claim('row', 'key-0000000000000012');
	RAISE NOTICE '% %', r.outcome, r.claim_token;
	SELECT * INTO verdict, counter FROM idem_try_advance('user', 'plpgsql', '1', 7);
	RAISE NOTICE '% %', verdict, counter;
END
$$;
SELECT (c).outcome, (c).attempt, (a).is_active FROM claims;
SELECT state, attempt FROM looked_up('key-0000000000000012');
CREATE VIEW advances AS SELECT a AS whole, a.last_action_id FROM idem_try_advance('user', 'view', '1', 1) AS a;
SELECT * FROM advances;
SELECT * FROM advances;

-- Two of a nested call are not mixed up.
SELECT * FROM idem_try_advance('user', 'nested', (idem_try_advance('user', 'nested', '1', 7)).last_action_id::text, 8);
SELECT entity_id, last_action_id FROM idem_action_versions WHERE entity_type = 'nested' ORDER BY 1;
-- Of any type, and as an operator.
CREATE FUNCTION as_text(anyelement) RETURNS text LANGUAGE sql AS 'SELECT $1::text';
SELECT as_text(idem_try_advance('user', 'any', '1', 7));
CREATE OPERATOR ^^ (LEFTARG = text, RIGHTARG = text, FUNCTION = idem_lookup);
SELECT ('row' ^^ 'key-0000000000000012').state;
DROP OPERATOR ^^ (text, text);
DROP FUNCTION as_text, claim, looked_up;
DROP VIEW advances;
DROP TABLE claims;

-- Prepared, across DROP EXTENSION.
PREPARE advance(bigint) AS SELECT * FROM idem_try_advance('user', 'prepared', '1', $1);
SET plan_cache_mode = force_generic_plan;
EXECUTE advance(1);
EXECUTE advance(2);
DROP EXTENSION idempotency;
\set VERBOSITY terse
EXECUTE advance(3);
\set VERBOSITY default
CREATE EXTENSION idempotency;
EXECUTE advance(1);
DEALLOCATE advance;
RESET plan_cache_mode;

-- Whatever its owner does to a type: an error, until it is undone.
\set VERBOSITY default
\set SHOW_CONTEXT never
CREATE FUNCTION echo(jsonb) RETURNS jsonb LANGUAGE sql RETURN $1;
CREATE FUNCTION pg_temp.after(alteration text, call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE 'SELECT ' || call INTO answer;
	BEGIN
		EXECUTE alteration;
		EXECUTE 'SELECT ' || call INTO answer;
		RETURN 'answered: ' || answer;
	EXCEPTION WHEN OTHERS THEN
		answer := SQLSTATE || ' ' || SQLERRM;
	END;
	EXECUTE 'SELECT ' || call;
	RETURN answer;
END
$$;
\pset format unaligned
\pset tuples_only on
SELECT format(alteration, type, col), pg_temp.after(format(alteration, type, col), call) FROM (VALUES
	('idem_claim_result', 'expires_at', 'idem_claim(''row'', ''key-0000000000000001'')'),
	('idem_lookup_result', 'expires_at', 'idem_lookup(''row'', ''key-0000000000000001'')'),
	('idem_advance_result', 'should_process', 'idem_try_advance(''u'', ''e'', ''1'', 1)'),
	('idem_action_result', 'is_active', 'idem_set(''u'', ''e'', ''2'', ''a'', true, 1)'),
	('idem_action_result', 'is_active', 'idem_toggle(''u'', ''e'', ''2'', ''a'', 1)'),
	('idem_append_result', 'version', 'idem_try_append(''a'', ''c'', 1)'),
	('idem_run_result', 'response_status', 'idem_run(''row'', ''key-0000000000000002'', ''echo(jsonb)'', ''{}'')'),
	('idem_cleanup_result', 'keys_deleted', 'idem_cleanup()')) AS f (type, col, call)
	CROSS JOIN (VALUES ('ALTER TYPE %s ADD ATTRIBUTE more int'), ('ALTER TYPE %1$s DROP ATTRIBUTE %2$s'), ('ALTER TYPE %1$s ALTER ATTRIBUTE %2$s TYPE bytea')) AS a (alteration)
	ORDER BY type COLLATE "C", call COLLATE "C", alteration COLLATE "C";
\pset format aligned
\pset tuples_only off
BEGIN;
ALTER TYPE idem_advance_result ALTER ATTRIBUTE last_action_id TYPE text;
SELECT * FROM idem_try_advance('u', 'e', '1', 2);
ROLLBACK;
SELECT * FROM idem_try_advance('u', 'e', '1', 2);
BEGIN;
ALTER TYPE idem_advance_result RENAME ATTRIBUTE last_action_id TO renamed;
SELECT * FROM idem_try_advance('u', 'e', '1', 3);
ROLLBACK;
DROP FUNCTION echo;
