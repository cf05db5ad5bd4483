--
-- A session's memory of indexes is valid only as long as it is correct: whatever
-- their owner adds, alters and drops, rows are in all of them.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
CREATE EXTENSION IF NOT EXISTS amcheck;
RESET client_min_messages;
\set VERBOSITY terse

-- A row of each table, new and changed, and one that is taken, refused and acknowledged.
CREATE FUNCTION use_all(round int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	key text := format('key-of-round-%s-12345678', round);
	message bigint;
BEGIN
	PERFORM idem_claim('s', key);
	PERFORM idem_complete('s', key, 200, 'body');
	PERFORM idem_set('u', 'e', key, 'like', true, 1), idem_set('u', 'e', 'same', 'like', round % 2 = 0, round);
	PERFORM idem_try_append('a', key, 1), idem_try_append('a', 'c', round);
	PERFORM idem_once('s', key);
	PERFORM idem_publish('t', '{}'), idem_publish('t', '{}', 'k'), idem_publish('u', '{}', 'l');
	SELECT id INTO message FROM idem_outbox_take(10, '0 seconds', '{t}');
	PERFORM idem_outbox_nack(message, 'error', '0 seconds');
	PERFORM idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(10, '1 minute', '{t}');
END
$$;
-- All rows are at the right place in all B-trees of the extension, once each.
CREATE FUNCTION check_all() RETURNS TABLE (indexes bigint) LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY SELECT count(*) FROM (
		SELECT bt_index_check(i.indexrelid, true)
		FROM pg_depend AS d JOIN pg_index AS i ON i.indrelid = d.objid JOIN pg_extension AS e ON e.oid = d.refobjid
			JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_am AS m ON m.oid = c.relam AND m.amname = 'btree'
		WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'idempotency'
		OFFSET 0) AS checked;
END
$$;
SELECT use_all(1);
SELECT check_all() > 7 AS checked;

-- In bulk
--
-- Other indexes, of all kinds, one after another in place of the last
--
CREATE TABLE definitions (n serial, definition text);
INSERT INTO definitions (definition) VALUES
	('idem_keys (scope, created_at)'),
	('idem_keys (scope) WHERE state = ''completed'''),
	('idem_keys (scope) WHERE state IN (''started'', ''failed'')'),
	('idem_keys (attempt) WHERE NOT (attempt = 1 AND request_hash IS NULL) OR response_body IS NOT NULL'),
	('idem_keys (length(response_body))'),
	('idem_keys USING brin (created_at)'),
	('idem_keys USING gin (to_tsvector(''simple'', response_body))'),
	('idem_keys USING hash (state)'),
	('idem_user_actions (updated_at) WHERE is_active'),
	('idem_user_actions (entity_id) WHERE is_active IS NOT TRUE'),
	('idem_user_actions (user_id, entity_type, entity_id, action_type) INCLUDE (is_active) WHERE is_active'),
	('idem_action_versions (entity_type, user_id, entity_id) INCLUDE (last_action_id)'),
	('idem_action_versions USING brin (last_action_id)'),
	('idem_aggregates (version)'),
	('idem_client_sequences (last_client_seq) WHERE last_client_seq > 3'),
	('idem_tokens (expires_at) WHERE scope || token > ''s'''),
	('idem_outbox (message_key) WHERE state = ''pending'' AND attempt > 0'),
	('idem_outbox (attempt) WHERE payload @> ''{}'''),
	('idem_outbox (topic) WHERE (idem_outbox).state <> ''acked''');
DO $$
DECLARE
	d definitions;
BEGIN
	FOR d IN SELECT * FROM definitions ORDER BY n LOOP
		EXECUTE format('CREATE %s INDEX other ON %s',
			CASE WHEN d.definition LIKE '%INCLUDE%' THEN 'UNIQUE' END, d.definition);
		PERFORM use_all(100 + 2 * d.n);
		PERFORM check_all();
		COMMIT;
		PERFORM use_all(101 + 2 * d.n);
		PERFORM check_all();
		DROP INDEX other;
		COMMIT;
	END LOOP;
END
$$;
SELECT use_all(200);

-- The one that is not a B-tree has all rows, too.
CREATE INDEX other ON idem_keys USING gin (to_tsvector('simple', response_body));
SELECT use_all(201);
SET enable_seqscan = off;
SELECT count(*) = (SELECT count(*) FROM idem_keys) AS all_there FROM idem_keys WHERE to_tsvector('simple', response_body) @@ 'body';
RESET enable_seqscan;
DROP INDEX other;

-- One by one
--
-- Rebuilt
--
REINDEX TABLE idem_outbox;
SELECT use_all(202);
REINDEX TABLE CONCURRENTLY idem_outbox;
REINDEX TABLE CONCURRENTLY idem_keys;
SELECT use_all(203);
BEGIN;
REINDEX TABLE idem_keys;
SELECT use_all(204);
ROLLBACK;
SELECT use_all(205);
SELECT check_all() > 7 AS checked;
-- In its place, another of the same name and another predicate.
BEGIN;
ALTER EXTENSION idempotency DROP TABLE idem_outbox;
DROP INDEX idem_outbox_ended;
CREATE INDEX idem_outbox_ended ON idem_outbox (acked_at) WHERE state = 'pending';
ALTER EXTENSION idempotency ADD TABLE idem_outbox;
SELECT use_all(206);
SELECT check_all() > 7 AS checked;
ROLLBACK;
SELECT use_all(207);
SELECT check_all() > 7 AS checked;

--
-- A unique index of the owner's keeps its promise
--
CREATE UNIQUE INDEX other ON idem_tokens (token) WHERE scope LIKE 'unique%';
SELECT idem_once('unique 1', 'token'), idem_once('unique 2', 'token 2'), idem_once('s', 'token');
SELECT idem_once('unique 2', 'token');
SELECT idem_once('unique 1', 'token');
DROP INDEX other;
SELECT idem_once('unique 2', 'token');

--
-- A predicate with a function that may be replaced, and that not everybody may call
--
CREATE FUNCTION wanted(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN $1 = 'one'; END $$;
CREATE INDEX other ON idem_tokens (token) WHERE wanted(scope);
SELECT idem_once('one', '1'), idem_once('two', '2');
SELECT bt_index_check('other', true);
CREATE OR REPLACE FUNCTION wanted(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN $1 = 'two'; END $$;
DELETE FROM idem_tokens;
SELECT idem_once('one', '3'), idem_once('two', '4');
SELECT bt_index_check('other', true);
CREATE ROLE regress_idem_app;
GRANT USAGE ON SCHEMA public TO regress_idem_app;
SELECT idem_grant('regress_idem_app');
REVOKE EXECUTE ON FUNCTION wanted(text) FROM PUBLIC;
SET ROLE regress_idem_app;
SELECT idem_once('two', '5');
RESET ROLE;
DROP FUNCTION wanted(text) CASCADE;
SET ROLE regress_idem_app;
SELECT idem_once('two', '5');
RESET ROLE;

SET client_min_messages = warning;
REVOKE ALL ON SCHEMA public FROM regress_idem_app;
DROP EXTENSION idempotency CASCADE;
DROP EXTENSION amcheck;
DROP ROLE regress_idem_app;
