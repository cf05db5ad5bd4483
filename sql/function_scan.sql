--
-- SELECT ... FROM one of our functions has a plan node of its own.  It must
-- call the function as often as the executor's node would, and no oftener:
-- a second call of idem_claim() for a key would say in_progress.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

EXPLAIN (COSTS OFF) SELECT outcome FROM idem_claim('scan', 'key-0000000000000001') WHERE attempt = 1;

-- Columns in any order, twice, in expressions, filtered, not at all.
SELECT attempt, outcome, outcome || attempt AS both, attempt FROM idem_claim('scan', 'key-0000000000000002') WHERE attempt = 1;
SELECT outcome FROM idem_claim('scan', 'key-0000000000000003') WHERE attempt = 2;
SELECT count(*) FROM idem_claim('scan', 'key-0000000000000004');
SELECT 'called' AS result FROM idem_claim('scan', 'key-0000000000000005');
SELECT outcome FROM idem_claim('scan', 'key-0000000000000006') LIMIT 0;
SELECT key, state FROM idem_keys WHERE scope = 'scan' ORDER BY key;

-- All columns, some NULL.
SELECT * FROM idem_try_advance('user', 'post', '1', 5);
SELECT * FROM idem_try_advance('user', 'post', '1', 4);
SELECT * FROM idem_lookup('scan', 'key-of-nobody-00001');

-- The whole row, WITH ORDINALITY and ROWS FROM go the executor's way.
EXPLAIN (COSTS OFF) SELECT a FROM idem_try_advance('user', 'post', '1', 6) AS a;
SELECT a FROM idem_try_advance('user', 'post', '1', 6) AS a;
SELECT * FROM idem_try_advance('user', 'post', '1', 7) WITH ORDINALITY;
SELECT * FROM ROWS FROM (idem_try_advance('user', 'post', '1', 8), generate_series(1, 2));

-- So does a join, where each outer row calls the function once.
EXPLAIN (COSTS OFF) SELECT * FROM generate_series(1, 3) AS i, idem_try_advance('user', 'join', '1', i);
SELECT * FROM generate_series(1, 3) AS i, idem_try_advance('user', 'join', '1', i);
SELECT i, outcome FROM generate_series(1, 3) AS i, idem_claim('scan', 'key-0000000000000007');

-- A subquery is evaluated again for each row it depends on, and only then.
SELECT i, (SELECT last_action_id FROM idem_try_advance('user', 'post', 'sub', i)) FROM generate_series(1, 3) AS i;
SELECT i, (SELECT outcome FROM idem_claim('scan', 'key-0000000000000008')) FROM generate_series(1, 3) AS i;
SELECT i, outcome FROM generate_series(1, 3) AS i, (SELECT outcome FROM idem_claim('scan', 'key-0000000000000009') LIMIT 1) AS c;
SELECT i, (SELECT sum(last_action_id) FROM (SELECT last_action_id FROM idem_try_advance('user', 'post', 'deep', i) LIMIT 1) AS s)
	FROM generate_series(1, 3) AS i;
WITH c AS MATERIALIZED (SELECT outcome FROM idem_claim('scan', 'key-0000000000000010'))
	SELECT a.outcome, b.outcome FROM c AS a, c AS b;
SELECT outcome FROM idem_claim('scan', 'key-0000000000000011') UNION ALL SELECT outcome FROM idem_claim('scan', 'key-0000000000000011');

-- Views, and statements that write.
CREATE VIEW advance_view AS SELECT should_process, last_action_id FROM idem_try_advance('user', 'view', '1', 1);
SELECT * FROM advance_view;
SELECT * FROM advance_view;
DROP VIEW advance_view;
CREATE TABLE scan_effects (outcome text, attempt int);
INSERT INTO scan_effects SELECT outcome, attempt FROM idem_claim('scan', 'key-0000000000000012') WHERE outcome = 'new' RETURNING *;
UPDATE scan_effects AS e SET attempt = 10 FROM idem_claim('scan', 'key-0000000000000013') AS c WHERE c.outcome = e.outcome RETURNING e.*;
DROP TABLE scan_effects;

-- Cursors: forward, backward, again.
BEGIN;
DECLARE c SCROLL CURSOR FOR SELECT outcome FROM idem_claim('scan', 'key-0000000000000015');
FETCH c;
FETCH c;
FETCH BACKWARD 1 FROM c;
MOVE ABSOLUTE 0 IN c;
FETCH c;
COMMIT;

-- More shapes of queries.
SELECT DISTINCT outcome FROM idem_claim('scan', 'key-0000000000000020') ORDER BY 1 DESC;
SELECT outcome, count(*) FROM idem_claim('scan', 'key-0000000000000021') GROUP BY outcome HAVING count(*) = 1;
SELECT outcome, generate_series(1, attempt + 1) AS n FROM idem_claim('scan', 'key-0000000000000022');
SELECT i FROM generate_series(1, 3) AS i WHERE EXISTS (SELECT FROM idem_try_advance('user', 'post', 'exists', i) WHERE should_process AND last_action_id <> 2);
SELECT i FROM generate_series(1, 3) AS i WHERE i IN (SELECT last_action_id FROM idem_try_advance('user', 'post', 'in', 2));
SELECT l.state, w.rank FROM idem_claim('scan', 'key-0000000000000023') AS c
	LEFT JOIN idem_lookup('scan', 'key-0000000000000023') AS l ON true, (SELECT rank() OVER (ORDER BY attempt) FROM idem_claim('scan', 'key-0000000000000024')) AS w;

-- Prepared, with plans of both kinds, and across DROP EXTENSION.
PREPARE advance(bigint) AS SELECT * FROM idem_try_advance('user', 'prepared', '1', $1);
SET plan_cache_mode = force_generic_plan;
EXECUTE advance(1);
EXECUTE advance(2);
SET plan_cache_mode = force_custom_plan;
EXECUTE advance(2);
RESET plan_cache_mode;
DROP EXTENSION idempotency;
EXECUTE advance(3);
CREATE EXTENSION idempotency;
EXECUTE advance(1);
DEALLOCATE advance;

-- The right to EXECUTE is checked.
CREATE ROLE regress_idem_scan;
SET ROLE regress_idem_scan;
SELECT outcome FROM idem_claim('scan', 'key-0000000000000016');
RESET ROLE;
DROP ROLE regress_idem_scan;

-- Arguments: volatile ones, parameters of PL/pgSQL, none that is an error.
SELECT outcome FROM idem_claim('scan', 'key-' || gen_random_uuid());
DO $$
DECLARE
	verdict record;
BEGIN
	FOR i IN 1..3 LOOP
		SELECT * INTO verdict FROM idem_try_advance('user', 'plpgsql', '1', i % 2);
		RAISE NOTICE '% %', verdict.should_process, verdict.last_action_id;
	END LOOP;
END
$$;
SELECT outcome FROM idem_claim('scan', NULL);

-- A call of the same function among the arguments returns a row, the outer one
-- its columns.  Compiled expressions do as interpreted ones.
SELECT * FROM idem_try_advance('user', 'nested', (idem_try_advance('user', 'nested', '1', 7)).last_action_id::text, 8);
SELECT entity_id, last_action_id FROM idem_action_versions WHERE entity_type = 'nested' ORDER BY 1;
SET jit_above_cost = 0;
SELECT outcome, attempt FROM idem_claim('scan', 'key-' || repeat('0', 15) || 9) WHERE attempt > 0;
RESET jit_above_cost;
