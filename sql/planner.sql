--
-- The planner's estimates for the functions: their rows, their cost, and where
-- they may run.  Results must not depend on them.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on

-- Of no function that returns rows it is the default, 1000, and of none in C that reads or writes a table 1.
SELECT p.oid::regprocedure, procost, prorows FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid
	WHERE d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency') AND d.deptype = 'e' AND d.classid = 'pg_proc'::regclass
	AND (prorows = 1000 OR procost = 1 AND proname <> 'idem_many_support');

-- A message that comes repeatedly is new once, in whatever way it is joined: the server must not keep an answer of a
-- volatile call for the next row with the same token (Memoize), although everything else seems expensive.
CREATE TABLE inbox AS SELECT (i % 20)::text AS message_id, i FROM generate_series(1, 400) AS i;
ANALYZE inbox;
CREATE FUNCTION pg_temp.answers(query text) RETURNS TABLE (answer text, plan text) LANGUAGE plpgsql AS $$
DECLARE
	tuple_cost text;
	operator_cost text;
	line text;
BEGIN
	FOREACH tuple_cost IN ARRAY '{0.01,0,10,0.0001}'::text[] LOOP
		FOREACH operator_cost IN ARRAY '{0.0025,0,0.000001,1}'::text[] LOOP
			PERFORM set_config('cpu_tuple_cost', tuple_cost, true), set_config('cpu_operator_cost', operator_cost, true);
			plan := '';
			FOR line IN EXECUTE 'EXPLAIN (COSTS OFF) ' || query LOOP
				plan := plan || ' ' || coalesce((regexp_match(line, 'Memoize'))[1], '');
			END LOOP;
			BEGIN
				EXECUTE query INTO answer;
				RAISE SQLSTATE 'UN001';
			EXCEPTION WHEN SQLSTATE 'UN001' THEN NULL;
			END;
			plan := btrim(plan);
			RETURN NEXT;
		END LOOP;
	END LOOP;
	PERFORM set_config('cpu_tuple_cost', '0.01', true), set_config('cpu_operator_cost', '0.0025', true);
END
$$;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET enable_material = off;
SELECT 'once_many', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL idem_once_many('inbox', ARRAY[i.message_id]) AS t $$) GROUP BY 1, 2, 3;
SELECT 'once_many, joined', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i JOIN LATERAL idem_once_many('inbox', ARRAY[i.message_id, i.message_id || 'x']) AS t ON t = i.message_id $$) GROUP BY 1, 2, 3;
SELECT 'once', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL idem_once('inbox', i.message_id) AS first WHERE first $$) GROUP BY 1, 2, 3;
SELECT 'claim', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL idem_claim('inbox', 'key-0000000000000000' || i.message_id) AS c WHERE c.outcome = 'new' $$) GROUP BY 1, 2, 3;
SELECT 'advance', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL idem_try_advance('user', 'inbox', i.message_id, 1) AS a WHERE a.should_process $$) GROUP BY 1, 2, 3;
SELECT 'append', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL idem_try_append('inbox', i.message_id, 1) AS a WHERE a.outcome = 'appended' $$) GROUP BY 1, 2, 3;
SELECT 'publish', answer, plan, count(*) FROM pg_temp.answers($$ SELECT count(DISTINCT p) FROM inbox AS i, LATERAL idem_publish(i.message_id, '1') AS p $$) GROUP BY 1, 2, 3;
-- It is there to be met: a function that the server may take for one that returns many rows.
CREATE FUNCTION many(token text) RETURNS SETOF text LANGUAGE sql VOLATILE AS $$ SELECT t FROM idem_once_many('inbox', ARRAY[token]) AS t LIMIT 10 $$;
SELECT 'as it would be', answer, plan FROM pg_temp.answers($$ SELECT count(*) FROM inbox AS i, LATERAL many(i.message_id) AS t $$) WHERE plan <> '' GROUP BY 1, 2, 3;
RESET enable_hashjoin;
RESET enable_mergejoin;
RESET enable_material;
DROP FUNCTION many;

-- A batch of many tokens is known to be one, so that it is hashed rather than compared with each row.
CREATE FUNCTION pg_temp.rows_of(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (FORMAT json) ' || query INTO plan;
	RETURN plan -> 0 -> 'Plan' ->> 'Plan Rows';
END
$$;
SELECT pg_temp.rows_of($$ SELECT * FROM idem_once_many('s', '{a,b,c}') $$), pg_temp.rows_of($$ SELECT * FROM idem_once_many('s', ARRAY['a', lower('B')]) $$),
	pg_temp.rows_of($$ SELECT * FROM idem_once_many('s', string_to_array(repeat('a,', 499), ',')) $$), pg_temp.rows_of($$ SELECT idem_once_many('s', '{a,b,c}') $$),
	pg_temp.rows_of($$ SELECT * FROM inbox, idem_once_many('s', ARRAY[message_id, 'b']) $$);

-- Where a condition costs less, it is asked first, so that no token is used up for a row that it leaves out.
SELECT count(*) FROM inbox WHERE idem_once('condition', message_id) AND i % 100 = 0 AND message_id LIKE '0%';
SELECT count(*) FROM idem_tokens WHERE scope = 'condition';
DROP TABLE inbox;
