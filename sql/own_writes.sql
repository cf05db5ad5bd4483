--
-- A transaction that writes a row again and again finds its newest version at
-- once, whatever has become of earlier ones.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

-- The values of one row, by short names.
CREATE FUNCTION advance(id text, action_id bigint) RETURNS text
LANGUAGE sql RETURN (SELECT concat(should_process, ' ', last_action_id)
	FROM idem_try_advance('user', 'post', id, action_id));
CREATE FUNCTION append(seq bigint) RETURNS text
LANGUAGE sql RETURN (SELECT concat(outcome, ' ', last_client_seq, ' ', version)
	FROM idem_try_append('order', 'phone', seq));
CREATE FUNCTION set_like(active boolean, action_id bigint) RETURNS text
LANGUAGE sql RETURN (SELECT concat(is_active, ' ', last_action_id, ' ', processed)
	FROM idem_set('user', 'post', 'liked', 'like', active, action_id));

--
-- Savepoints
--
BEGIN;
SELECT advance('1', 10), append(1), set_like(true, 1), idem_once('form', 't');
SAVEPOINT one;
SELECT advance('1', 20), append(2), set_like(false, 2), idem_once('form', 'u');
ROLLBACK TO one;
SELECT advance('1', 15), append(2), set_like(true, 2), idem_once('form', 'u');
-- Into which another has been committed.
SAVEPOINT two;
SAVEPOINT three;
SELECT advance('1', 30), append(3), set_like(false, 3);
RELEASE three;
SELECT advance('1', 29), append(3), set_like(true, 3);
ROLLBACK TO two;
SELECT advance('1', 16), append(3), set_like(false, 3);
RELEASE two;
SELECT advance('1', 17), append(4), set_like(true, 4);
SELECT advance('1', 17), append(4), set_like(false, 4);
-- In bulk
-- Each of many of them, as an application's framework makes them.
DO $$
BEGIN
	FOR i IN 1..200 LOOP
		BEGIN
			ASSERT advance('many', i) = format('t %s', i);
			IF i % 3 = 0 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			ASSERT advance('many', i - 1) = format('f %s', i - 1), i;
		END;
	END LOOP;
END
$$;
SELECT advance('many', 200);
-- One by one
ROLLBACK;
SELECT advance('1', 1), append(1), set_like(true, 1), idem_once('form', 't');

-- The first version was rolled back, or the last, or all.
BEGIN;
SAVEPOINT s;
SELECT advance('2', 5);
ROLLBACK TO s;
SELECT advance('2', 1), advance('2', 2);
SAVEPOINT s;
SELECT advance('2', 3);
ROLLBACK TO s;
SELECT advance('2', 2), advance('2', 3);
COMMIT;
SELECT advance('2', 3), advance('2', 4);

-- Claims
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('shop', 'order-0000000001');
SELECT idem_complete('shop', 'order-0000000001', 200, 'first');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('shop', 'order-0000000001');
SAVEPOINT s;
SELECT idem_complete('shop', 'order-0000000001', 200, 'second');
SELECT outcome, response_body FROM idem_claim('shop', 'order-0000000001');
ROLLBACK TO s;
SELECT outcome, response_body FROM idem_claim('shop', 'order-0000000001');
SELECT idem_checkpoint('shop', 'order-0000000001', 'paid') IS NOT NULL AS renewed;
SELECT idem_complete('shop', 'order-0000000001', 200, 'third');
SELECT outcome, response_body FROM idem_claim('shop', 'order-0000000001');
SELECT idem_forget('shop', 'order-0000000001');
SELECT outcome, attempt FROM idem_claim('shop', 'order-0000000001');
SELECT idem_release('shop', 'order-0000000001');
COMMIT;
SELECT state FROM idem_lookup('shop', 'order-0000000001');

--
-- The owner writes to the table in between
--
BEGIN;
SELECT advance('3', 1), advance('3', 2), advance('3', 3);
UPDATE idem_action_versions SET last_action_id = 10 WHERE entity_id = '3';
SELECT advance('3', 9), advance('3', 11);
DELETE FROM idem_action_versions WHERE entity_id = '3';
SELECT advance('3', 4), advance('3', 5);
SELECT entity_id, last_action_id FROM idem_action_versions WHERE entity_id = '3';
ROLLBACK;

-- The owner truncates the table where the row was, or rewrites it.
BEGIN;
SELECT advance('4', 1), advance('4', 2), append(5), append(6);
TRUNCATE idem_action_versions, idem_aggregates, idem_client_sequences;
SELECT advance('4', 1), advance('4', 2), append(1), append(2);
SAVEPOINT s;
TRUNCATE idem_action_versions;
SELECT advance('4', 1), advance('4', 2);
ROLLBACK TO s;
SELECT advance('4', 2), advance('4', 3);
DELETE FROM idem_action_versions WHERE entity_id <> '4';
CLUSTER idem_action_versions USING idem_action_versions_pkey;
SELECT advance('4', 3), advance('4', 4);
ROLLBACK;
SELECT advance('4', 1), append(2);

-- The owner drops the extension, and creates it again.
BEGIN;
SELECT advance('5', 1), advance('5', 2);
SET LOCAL client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
SELECT should_process FROM idem_try_advance('user', 'post', '5', 1);
SELECT should_process FROM idem_try_advance('user', 'post', '5', 1);
ROLLBACK;
SELECT advance('5', 1);

--
-- Cursors
--
BEGIN;
DECLARE c CURSOR FOR SELECT advance('6', i) FROM generate_series(1, 4) AS i;
FETCH 2 FROM c;
SELECT advance('6', 2), advance('6', 3);
FETCH 2 FROM c;
SELECT advance('6', 4), advance('6', 5);
COMMIT;

-- In bulk
--
-- Several rows of one statement, of two tables each, and more than are remembered
--
BEGIN;
SELECT count(*) FILTER (WHERE advance = format('t %s', turn)) AS as_it_should_be
	FROM generate_series(1, 5) AS turn, generate_series(1, 300) AS id, advance('several ' || id, turn);
SELECT count(*) FILTER (WHERE advance = 'f 5') AS stale
	FROM generate_series(1, 300) AS id, advance('several ' || id, 5);
SELECT count(*) FILTER (WHERE outcome = 'appended' AND version = turn) AS as_it_should_be
	FROM generate_series(1, 5) AS turn, generate_series(1, 100) AS id, idem_try_append('several ' || id, 'phone', turn);
SELECT count(*) FILTER (WHERE processed AND is_active = (turn % 2 = 1)) AS as_it_should_be
	FROM generate_series(1, 5) AS turn, generate_series(1, 100) AS id,
		idem_set('user', 'post', 'several ' || id, 'like', turn % 2 = 1, 100 + turn, excludes => '{dislike}');
COMMIT;

-- One by one
--
-- Rows whose keys hash alike, in one table and in two
--
CREATE TEMP TABLE twins AS
	SELECT min(id) AS a, max(id) AS b FROM
		(SELECT 'twin-' || i AS id FROM generate_series(1, 400000) AS i) AS i
	GROUP BY hashtext(id) HAVING count(*) > 1 ORDER BY 1 LIMIT 1;
BEGIN;
SELECT advance(a, 5) AS a, advance(b, 3) AS b, advance(a, 6) AS a, advance(b, 4) AS b FROM twins;
SELECT advance(a, 6) AS a, advance(b, 4) AS b FROM twins;
ROLLBACK;
BEGIN;
SELECT idem_once('b', 'a');
SELECT outcome FROM idem_try_append('a', 'b', 1);
SELECT idem_once('b', 'a');
SELECT outcome FROM idem_try_append('a', 'b', 1);
ROLLBACK;

-- In bulk
--
-- The cost of a call does not depend on how often the row has been written: the
-- indexes searched, and the pages visited
--
CREATE FUNCTION searches() RETURNS bigint
LANGUAGE sql RETURN (SELECT sum(pg_stat_get_xact_numscans(i.indexrelid))
	FROM pg_depend AS d JOIN pg_index AS i ON i.indrelid = d.objid JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'idempotency');
CREATE FUNCTION pages(statement text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, FORMAT json) ' || statement INTO plan;
	RETURN (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::bigint;
END
$$;
CREATE FUNCTION grows(statement text, times int DEFAULT 20000, allowed_searches int DEFAULT 5) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	before bigint := searches();
	early bigint;
	late bigint;
BEGIN
	PERFORM pages(format(statement, 1, 100));
	early := pages(format(statement, 101, 600));
	PERFORM pages(format(statement, 601, times));
	late := pages(format(statement, times + 1, times + 500));
	RETURN CASE WHEN late > 1.2 * early THEN format('from %s to %s pages', early, late)
		WHEN searches() > before + allowed_searches THEN format('%s searches', searches() - before)
		ELSE 'no' END;
END
$$;
BEGIN;
SELECT grows('SELECT count(idem_try_advance(''u'', ''e'', ''1'', i)) FROM generate_series(%s, %s) AS i') AS advances,
	grows('SELECT count(idem_set(''u'', ''e'', ''2'', ''like'', i %% 2 = 0, i)) FROM generate_series(%s, %s) AS i') AS sets,
	grows('SELECT count(idem_try_append(''a'', ''c'', i)) FROM generate_series(%s, %s) AS i') AS appends;
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT grows('SELECT count(idem_try_advance(''u'', ''e'', ''1'', i)) FROM generate_series(%s, %s) AS i') AS serializable;
ROLLBACK;
-- In subtransactions, too, that are committed or, one in a hundred, rolled back.
CREATE FUNCTION in_subtransaction(i int) RETURNS int
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM advance('1', i);
	IF i % 100 = 0 THEN
		RAISE division_by_zero;
	END IF;
	RETURN i;
EXCEPTION WHEN division_by_zero THEN
	RETURN NULL;
END
$$;
BEGIN;
SELECT grows('SELECT count(in_subtransaction(i)) FROM generate_series(%s, %s) AS i', 5000, 100) AS subtransactions;
ROLLBACK;

-- Nor does the cost of a search that passes versions which cannot be pruned:
-- here because this transaction is not over, but has forgotten where it wrote.
BEGIN;
SELECT count(idem_try_advance('u', 'e', '1', i)) FROM generate_series(1, 3000) AS i;
TRUNCATE idem_user_actions;
SELECT pages('SELECT idem_try_advance(''u'', ''e'', ''1'', 1)') < 10 AS begins_with_the_newest;
TRUNCATE idem_user_actions;
SELECT pages('SELECT idem_set(''u'', ''e'', ''1'', ''like'', true, 1)') < 20 AS begins_with_the_newest;
ROLLBACK;

--
-- A completion prunes the page, so that claims leave no dead versions behind
--
TRUNCATE idem_keys;
DO $$
BEGIN
	FOR i IN 1..1000 LOOP
		PERFORM idem_claim('pruning', 'key-' || lpad(i::text, 16, '0'));
		PERFORM idem_complete('pruning', 'key-' || lpad(i::text, 16, '0'), 201, '{"order": 12345, "status": "created"}');
		COMMIT;
	END LOOP;
END
$$;
SELECT pg_relation_size('idem_keys') / 1000 < 250 AS pruned;

-- A cursor that fails in a later savepoint takes its locks with it, but not those on what it has written.
BEGIN;
DECLARE failing CURSOR FOR SELECT last_action_id / (3 - i) FROM generate_series(1, 5) AS i, idem_try_advance('u', 'failing', '1', i);
FETCH 2 FROM failing;
SAVEPOINT later;
FETCH 1 FROM failing;
ROLLBACK TO later;
SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'idem_action_versions'::regclass;
SELECT last_action_id FROM idem_try_advance('u', 'failing', '1', 1);
COMMIT;

SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
