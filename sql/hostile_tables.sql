--
-- Whatever their owner does to our tables and indexes: every function that
-- would pass it over refuses (55000, with a hint), until it is undone.
--
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_db;
DROP ROLE IF EXISTS regress_idem_owner;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SELECT current_database() AS regress_db \gset
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

CREATE FUNCTION handler(jsonb) RETURNS jsonb LANGUAGE sql RETURN $1;
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;

-- The calls that use a table, in a temporary table so that they can be run by each alteration.
CREATE TEMP TABLE calls (name text, call text);
INSERT INTO calls VALUES
	('idem_keys', 'idem_claim(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_claim(''s'', ''hostile-key-00001'', wait => ''1 ms'')'),
	('idem_keys', 'idem_complete(''s'', ''hostile-key-00001'', 200)'),
	('idem_keys', 'idem_complete(''s'', ''hostile-key-00001'', 200, ''''::bytea)'),
	('idem_keys', 'idem_checkpoint(''s'', ''hostile-key-00001'', ''x'')'),
	('idem_keys', 'idem_heartbeat(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_fail(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_release(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_lookup(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_forget(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_erase(''s'', ''hostile-key-00001'')'),
	('idem_keys', 'idem_run(''s'', ''hostile-key-00001'', ''handler(jsonb)'', ''{}'')'),
	('idem_action_versions', 'idem_try_advance(''u'', ''e'', ''1'', 1)'),
	('idem_action_versions', 'idem_toggle(''u'', ''e'', ''1'', ''a'', 1)'),
	('idem_action_versions', 'idem_set(''u'', ''e'', ''1'', ''a'', true, 1)'),
	('idem_user_actions', 'idem_toggle(''u'', ''e'', ''1'', ''a'', 1)'),
	('idem_user_actions', 'idem_set(''u'', ''e'', ''1'', ''a'', true, 1)'),
	('idem_user_actions', 'idem_is_active(''u'', ''e'', ''1'', ''a'')'),
	('idem_aggregates', 'idem_try_append(''a'', ''c'', 1)'),
	('idem_client_sequences', 'idem_try_append(''a'', ''c'', 1)'),
	('idem_client_sequences', 'idem_last_client_seq(''a'', ''c'')'),
	('idem_tokens', 'idem_once(''s'', ''t'')'),
	('idem_tokens', 'idem_once_many(''s'', ''{t}''::text[])'),
	('idem_outbox', 'idem_publish(''t'', ''{}'')'),
	('idem_outbox', 'idem_publish_many(''{t}'', ''{1}'')'),
	('idem_outbox', 'idem_outbox_take()'),
	('idem_outbox', 'idem_outbox_ack(''{1}'')'),
	('idem_outbox', 'idem_outbox_nack(1)'),
	('idem_outbox', 'idem_outbox_requeue()'),
	('idem_outbox', 'idem_outbox_requeue(''{1}'')'),
	('idem_outbox', 'idem_outbox_extend(''{1}'')'),
	('idem_outbox', 'idem_outbox_release(''{1}'')');
INSERT INTO calls
	SELECT name, call FROM unnest(ARRAY['idem_keys', 'idem_tokens', 'idem_outbox']) AS name,
		unnest(ARRAY['idem_cleanup()']) AS call;
-- The finding of monitoring is raised here.  Monitoring itself never fails.
CREATE FUNCTION told() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	told text;
BEGIN
	SELECT detail INTO told FROM idem_health() WHERE check_name = 'tables' AND status = 'critical';
	IF FOUND <> (idem_metrics() ~ 'table_unusable\{[^}]*\} 1') THEN
		RAISE 'idem_health() and idem_metrics() do not agree';
	ELSIF FOUND THEN
		RAISE '%', told USING ERRCODE = '55000', HINT = 'as told';
	END IF;
	RETURN 'nothing';
END
$$;
INSERT INTO calls SELECT DISTINCT name, 'told()' FROM calls;

-- For each table: a column that is NOT NULL and not in the primary key, a text column, and its last column.
CREATE TEMP TABLE tables AS
	SELECT relname::text AS name, required, words,
		(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid ORDER BY attnum DESC LIMIT 1) AS last_column,
		(SELECT string_agg(attname, ', ') FROM pg_attribute AS a JOIN pg_index AS i ON attrelid = indrelid WHERE indisprimary AND indrelid = c.oid AND attnum = ANY (indkey)) AS pkey
	FROM (VALUES ('idem_keys', 'claim_token', 'scope'), ('idem_action_versions', 'last_action_id', 'user_id'), ('idem_user_actions', 'is_active', 'user_id'),
		('idem_aggregates', 'version', 'aggregate'), ('idem_client_sequences', 'last_client_seq', 'client_id'), ('idem_tokens', 'expires_at', 'token'),
		('idem_outbox', 'created_at', 'topic')) AS v (name, required, words)
	JOIN pg_class AS c ON c.oid = v.name::regclass;
-- None is forgotten.
SELECT count(*), count(last_column), count(pkey), (SELECT count(*) FROM pg_class WHERE relname LIKE 'idem\_%' AND relkind = 'r') FROM tables;

-- {t}: the table, {r}, {w}, {l}, {k}: as above
CREATE TEMP TABLE alterations (n int GENERATED ALWAYS AS IDENTITY, statement text);
INSERT INTO alterations (statement) VALUES
	('CREATE TRIGGER x BEFORE INSERT ON {t} FOR EACH ROW EXECUTE FUNCTION nothing()'),
	('CREATE TRIGGER x AFTER UPDATE ON {t} FOR EACH STATEMENT EXECUTE FUNCTION nothing()'),
	('CREATE TRIGGER x AFTER DELETE ON {t} REFERENCING OLD TABLE AS o FOR EACH STATEMENT EXECUTE FUNCTION nothing()'),
	('CREATE TRIGGER x BEFORE TRUNCATE ON {t} FOR EACH STATEMENT EXECUTE FUNCTION nothing()'),
	('CREATE CONSTRAINT TRIGGER x AFTER INSERT ON {t} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION nothing()'),
	('CREATE TRIGGER x AFTER INSERT ON {t} FOR EACH ROW EXECUTE FUNCTION nothing(); ALTER TABLE {t} DISABLE TRIGGER ALL'),
	('CREATE RULE x AS ON INSERT TO {t} DO INSTEAD NOTHING'),
	('CREATE RULE x AS ON DELETE TO {t} DO ALSO NOTIFY x'),
	('ALTER TABLE {t} ENABLE ROW LEVEL SECURITY'),
	('ALTER TABLE {t} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; CREATE POLICY x ON {t} USING (true)'),
	('ALTER TABLE {t} ADD CHECK (true)'),
	('ALTER TABLE {t} ADD CHECK (false) NOT VALID'),
	('ALTER TABLE {t} ADD UNIQUE ({k}) DEFERRABLE'),
	('ALTER TABLE {t} ADD EXCLUDE USING btree ({w} WITH =) DEFERRABLE INITIALLY DEFERRED'),
	('ALTER TABLE {t} ADD FOREIGN KEY ({k}) REFERENCES {t}'),
	('CREATE TABLE referencing (LIKE {t}, FOREIGN KEY ({k}) REFERENCES {t})'),
	('ALTER TABLE {t} DROP CONSTRAINT {t}_pkey'),
	('ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY ({k}) DEFERRABLE'),
	('ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY ({k}, {r})'),
	('ALTER TABLE {t} DROP CONSTRAINT {t}_pkey; CREATE UNIQUE INDEX {t}_pkey ON {t} ({k})'),
	('ALTER TABLE {t} ADD COLUMN x int'),
	('ALTER TABLE {t} ADD COLUMN x int GENERATED ALWAYS AS (1) STORED'),
	('ALTER TABLE {t} DROP COLUMN {l}'),
	('ALTER TABLE {t} DROP COLUMN {l} CASCADE, ADD COLUMN {l} text'),
	('ALTER TABLE {t} ALTER COLUMN {r} DROP NOT NULL'),
	('ALTER TABLE {t} ALTER COLUMN {w} TYPE varchar'),
	('CREATE DOMAIN words AS text COLLATE "C"; ALTER TABLE {t} ALTER COLUMN {w} TYPE words'),
	('ALTER TABLE {t} ALTER COLUMN {w} TYPE text COLLATE "POSIX"'),
	('ALTER TABLE {t} SET UNLOGGED'),
	('CREATE TABLE child () INHERITS ({t})'),
	('CREATE TABLE parent (LIKE {t}) PARTITION BY LIST ({w}); ALTER TABLE parent ATTACH PARTITION {t} DEFAULT'),
	('ALTER TABLE {t} RENAME TO elsewhere'),
	('ALTER TABLE {t} RENAME TO elsewhere; CREATE VIEW {t} AS SELECT * FROM elsewhere'),
	('ALTER TABLE {t} RENAME TO elsewhere; CREATE TEMP TABLE {t} AS SELECT * FROM elsewhere'),
	('CREATE SCHEMA x; ALTER EXTENSION idempotency DROP TABLE {t}; ALTER TABLE {t} SET SCHEMA x; CREATE TABLE {t} (LIKE x.{t} INCLUDING ALL, more int)');

-- The effect of an alteration: the calls' errors, counted.  All is undone.
CREATE FUNCTION pg_temp.outcomes(table_name text, alteration text) RETURNS TABLE (outcome text, n bigint)
LANGUAGE plpgsql AS $$
DECLARE
	c text;
	hint text;
	found text[] := '{}';
	undo CONSTANT text := 'UN001';
BEGIN
	BEGIN
		EXECUTE alteration;
		FOR c IN SELECT call FROM calls WHERE name = table_name LOOP
			BEGIN
				EXECUTE 'SELECT ' || c;
				found := found || (c || ' works');
			EXCEPTION WHEN OTHERS THEN
				GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
				found := found || CASE WHEN SQLSTATE = '55000' AND hint <> '' THEN 'refused'
					ELSE concat_ws(' ', c, SQLSTATE, SQLERRM) END;
			END;
		END LOOP;
		RAISE 'undo' USING ERRCODE = undo;
	EXCEPTION WHEN SQLSTATE 'UN001' THEN
		NULL;
	WHEN OTHERS THEN
		found := ARRAY['not altered: ' || SQLERRM];
	END;
	RETURN QUERY SELECT f, count(*) FROM unnest(found) AS f GROUP BY f;
END
$$;

-- Without an alteration, nothing is refused, except for a missing claim.
-- In bulk
SELECT DISTINCT name, outcome FROM calls, pg_temp.outcomes(name, 'SELECT 1') AS o WHERE o.outcome NOT LIKE '% works' AND o.outcome NOT LIKE '% ID004 %' ORDER BY 1, 2;
CREATE TEMP TABLE results AS
	SELECT a.n, t.name, a.statement, o.outcome, o.n AS count
	FROM alterations AS a CROSS JOIN tables AS t
	CROSS JOIN LATERAL pg_temp.outcomes(t.name,
		replace(replace(replace(replace(replace(a.statement, '{t}', t.name), '{r}', t.required), '{w}', t.words), '{l}', t.last_column), '{k}', t.pkey)) AS o;
SELECT name, outcome, sum(count) FROM results WHERE outcome = 'refused' GROUP BY name, outcome ORDER BY name COLLATE "C";
-- The rest
SELECT n, name, statement, outcome, count FROM results WHERE outcome <> 'refused' ORDER BY n, name COLLATE "C", outcome COLLATE "C";
-- Each works again.
SELECT DISTINCT name, outcome FROM calls, pg_temp.outcomes(name, 'SELECT 1') AS o WHERE o.outcome NOT LIKE '% works' AND o.outcome NOT LIKE '% ID004 %' ORDER BY 1, 2;
-- One by one

--
-- The words of those that no other test has
--
\i sql/include/error_of.sql
BEGIN;
ALTER TABLE idem_keys SET UNLOGGED;
SELECT pg_temp.error_of($$ SELECT idem_claim('s', 'hostile-key-00001') $$);
ALTER TABLE idem_keys SET LOGGED;
SELECT outcome FROM idem_claim('s', 'hostile-key-00001');
ROLLBACK;

--
-- Constraints that an index enforces are not passed over: they hold
--
CREATE UNIQUE INDEX x ON idem_keys (scope);
SELECT outcome FROM idem_claim('only one', 'hostile-key-00001');
SELECT pg_temp.error_of($$ SELECT idem_claim('only one', 'hostile-key-00002') $$);
SELECT outcome FROM idem_claim('only one', 'hostile-key-00001');
SELECT outcome FROM idem_claim('another', 'hostile-key-00002');
DROP INDEX x;
ALTER TABLE idem_tokens ADD CONSTRAINT x EXCLUDE USING btree (token WITH =);
SELECT idem_once('s', 'excluded'), idem_once('s', 'excluded');
SELECT pg_temp.error_of($$ SELECT idem_once('s2', 'excluded') $$);
ALTER TABLE idem_tokens DROP CONSTRAINT x;
-- One that takes different keys for the same is no other primary key: it ends the call, and does not keep it looking for the other key.
SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'und-x-icu') AS icu \gset
\if :icu
CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE UNIQUE INDEX x ON idem_keys (key COLLATE any_case, scope);
\else
-- A server without ICU has no such collation; an expression does the same to it.
CREATE UNIQUE INDEX x ON idem_keys (lower(key), scope);
\endif
SET statement_timeout = '1min';
SELECT outcome FROM idem_claim('cases', 'hostile-key-00003');
SELECT split_part(pg_temp.error_of($$ SELECT idem_claim('cases', 'Hostile-Key-00003') $$), ' |', 1);
SELECT outcome FROM idem_claim('cases', 'hostile-key-00003');
RESET statement_timeout;
DROP INDEX x;
SET client_min_messages = warning;
DROP COLLATION IF EXISTS any_case;
RESET client_min_messages;

--
-- Sequences: numbers that might repeat or go down are not drawn, until the statement of the hint has been run
--
CREATE FUNCTION pg_temp.after_alteration(sequence_name text, alteration text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	call text := CASE sequence_name WHEN 'idem_claim_tokens' THEN 'idem_claim(''s'', ''hostile-key-00004'')' ELSE 'idem_publish(''t'', ''{}'')' END;
	refusal text;
	mend text;
	answer text;
BEGIN
	-- The sequence is known by now.
	EXECUTE 'SELECT ' || call;
	PERFORM idem_forget('s', 'hostile-key-00004');
	BEGIN
		EXECUTE format('ALTER SEQUENCE %I %s', sequence_name, alteration);
		refusal := pg_temp.error_of('SELECT ' || call);
		mend := substring(refusal FROM 'ALTER SEQUENCE [^.]*\.[^.]*');
		IF mend IS NOT NULL THEN
			EXECUTE mend;
		END IF;
		answer := pg_temp.error_of('SELECT ' || call);
		RAISE 'undo' USING ERRCODE = 'UN001';
	EXCEPTION WHEN SQLSTATE 'UN001' THEN
		RETURN concat_ws(E'\n', refusal, 'mended: ' || mend, 'then: ' || answer);
	END;
END
$$;
-- In bulk
SELECT string_agg(format('%s %s', name, alteration), E'\n' ORDER BY name COLLATE "C", n), refusal
	FROM unnest(ARRAY['idem_claim_tokens', 'idem_outbox_ids']) AS name,
		unnest(ARRAY['SET UNLOGGED', 'CACHE 50', 'CACHE 2', 'CYCLE', 'INCREMENT -1', 'MAXVALUE 1000000', 'MAXVALUE 1000000 CYCLE', 'AS integer',
			'MAXVALUE 9223372036854775806', 'INCREMENT -1 MINVALUE -10 MAXVALUE 1000000 CACHE 9 CYCLE',
			'RESTART 1000', 'MINVALUE 1 START 3', 'INCREMENT 2', 'OWNED BY NONE', 'RENAME TO elsewhere', 'RENAME TO elsewhere; CREATE TABLE ' || quote_ident(name) || ' ()']) WITH ORDINALITY AS a (alteration, n),
		replace(pg_temp.after_alteration(name, alteration), name, '...') AS refusal
	GROUP BY refusal ORDER BY min(n);
-- One by one

--
-- Indexes that we scan: another one in their place
--
CREATE FUNCTION pg_temp.index_errors() RETURNS TABLE (call text, error text) LANGUAGE sql AS $$
	SELECT c, pg_temp.error_of('SELECT ' || c)
	FROM unnest(ARRAY['idem_cleanup()', 'told()', 'idem_outbox_take()', 'idem_outbox_take(topics => ''{t}'')', 'idem_outbox_requeue()']) AS c
$$;
SELECT idem_publish('t', '{}') IS NOT NULL, idem_publish('t', '{}', 'k') IS NOT NULL;
CREATE FUNCTION pg_temp.replaced(index_name text, definition text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	errors text;
BEGIN
	BEGIN
		EXECUTE format('DROP INDEX %I', index_name);
		EXECUTE definition;
		SELECT string_agg(e, E'\n' ORDER BY e COLLATE "C") INTO errors
			FROM (SELECT concat_ws(': ', string_agg(call, ', ' ORDER BY call COLLATE "C"), error) FROM pg_temp.index_errors() WHERE error <> 'no error' GROUP BY error) AS g (e);
		RAISE SQLSTATE 'UN001';
	EXCEPTION WHEN SQLSTATE 'UN001' THEN
		RETURN errors;
	END;
END
$$;
-- In bulk
SELECT definition, pg_temp.replaced(name, definition) FROM (VALUES
	(1, 'idem_keys_expires_at', 'SELECT 1'),
	(2, 'idem_keys_expires_at', 'CREATE TABLE idem_keys_expires_at ()'),
	(3, 'idem_keys_expires_at', 'CREATE SEQUENCE idem_keys_expires_at'),
	(4, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_tokens (expires_at)'),
	-- It would have the cleanup delete what was claimed long enough ago.
	(5, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (created_at)'),
	(6, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (scope)'),
	(7, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (expires_at DESC)'),
	(8, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (expires_at, scope)'),
	(9, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys ((attempt + 1))'),
	(10, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (expires_at) WHERE attempt = 1'),
	(11, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys USING brin (expires_at)'),
	(12, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys USING hash (expires_at)'),
	(13, 'idem_keys_expires_at', 'CREATE INDEX idem_keys_expires_at ON idem_keys (expires_at) INCLUDE (scope)'),
	(14, 'idem_tokens_expires_at', 'CREATE INDEX idem_tokens_expires_at ON idem_tokens (token)'),
	(15, 'idem_outbox_due', 'CREATE INDEX idem_outbox_due ON idem_outbox (available_at)'),
	(16, 'idem_outbox_due', 'CREATE INDEX idem_outbox_due ON idem_outbox (created_at) WHERE in_due_index'),
	(17, 'idem_outbox_topics', 'CREATE INDEX idem_outbox_topics ON idem_outbox (topic COLLATE "POSIX", available_at) WHERE in_due_index'),
	(18, 'idem_outbox_lanes', 'CREATE INDEX idem_outbox_lanes ON idem_outbox (message_key, id) WHERE state = ''pending'' AND key_hash IS NOT NULL'),
	(19, 'idem_outbox_ended', 'CREATE INDEX idem_outbox_ended ON idem_outbox (payload) WHERE state = ''dead'''),
	(20, 'idem_outbox_ended', 'CREATE INDEX idem_outbox_ended ON idem_outbox (created_at) WHERE state = ''acked''')) AS v (n, name, definition) ORDER BY n;
-- Ours, made anew
SELECT count(*), count(pg_temp.replaced(indexname, indexdef)) FROM pg_indexes WHERE tablename LIKE 'idem\_%' AND indexname NOT LIKE '%\_pkey';

-- One by one
-- A function in an index of the owner's, called between drawing a token and writing it, that claims the very same key: the claim within the claim does
-- not come in between.
CREATE FUNCTION claims_again(scope text, key text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF scope <> 'nested' OR current_setting('nested.depth', true) = '1' THEN
		RETURN key;
	END IF;
	PERFORM set_config('nested.depth', '1', true);
	RAISE NOTICE 'within: %, and with wait: %', (SELECT outcome FROM idem_claim(scope, key)), (SELECT outcome FROM idem_claim(scope, key, wait => '10 minutes'));
	PERFORM set_config('nested.depth', '', true);
	RETURN key;
END $$;
CREATE INDEX claims_again ON idem_keys (claims_again(scope, key));
BEGIN;
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD CONSTRAINT idem_keys_pkey PRIMARY KEY (scope, key);
SELECT outcome, attempt FROM idem_claim('nested', 'hostile-key-00003');
SELECT count(*) FROM idem_keys WHERE scope = 'nested';
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
ROLLBACK;
DROP INDEX claims_again;
DROP FUNCTION claims_again(text, text);

-- The same for a row that is still being inserted: refused, or the insertion would end with a row that points to itself.
CREATE FUNCTION call_again(name text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
DECLARE
	call text := current_setting('nested.call', true);
BEGIN
	IF call <> '' THEN
		PERFORM set_config('nested.call', '', true);
		EXECUTE call;
	END IF;
	RETURN name;
END $$;
CREATE FUNCTION pg_temp.nested(within text, call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
BEGIN
	PERFORM set_config('nested.call', within, true);
	EXECUTE call;
	RETURN 'done';
EXCEPTION WHEN object_not_in_prerequisite_state THEN
	RETURN SQLERRM;
END $$;
CREATE INDEX call_again ON idem_action_versions (call_again(entity_id));
CREATE INDEX call_again_1 ON idem_aggregates (call_again(aggregate));
CREATE INDEX call_again_2 ON idem_tokens (call_again(token));
CREATE INDEX call_again_3 ON idem_keys (call_again(key));
SELECT pg_temp.nested(within, call) FROM (VALUES
	('SELECT idem_try_advance(''u'', ''e'', ''nested'', 100)', 'SELECT idem_try_advance(''u'', ''e'', ''nested'', 5)'),
	('SELECT idem_set(''u'', ''e'', ''nested'', ''like'', true, 100)', 'SELECT idem_toggle(''u'', ''e'', ''nested'', ''like'', 5)'),
	('SELECT idem_try_append(''nested'', ''b'', 1)', 'SELECT idem_try_append(''nested'', ''a'', 1)'),
	('SELECT idem_once(''nested'', ''token'')', 'SELECT idem_once(''nested'', ''token'')'),
	('SELECT idem_forget(''nested'', ''hostile-key-00004'')', 'SELECT idem_claim(''nested'', ''hostile-key-00004'')')) AS v (within, call);
SELECT last_action_id FROM idem_try_advance('u', 'e', 'nested', 6);
DROP INDEX call_again, call_again_1, call_again_2, call_again_3;
DROP FUNCTION call_again(text);

-- A started record without a lease is one that was abandoned.
INSERT INTO idem_keys (claim_token, created_at, expires_at, attempt, state, scope, key)
	VALUES (1, now() - interval '1 hour', now() + interval '1 day', 1, 'started', 's', 'hostile-no-lease-1');
SELECT outcome, attempt FROM idem_claim('s', 'hostile-no-lease-1');

-- Objects that the installer adds to the extension under its names are not used.
SELECT count(*) AS samples FROM regexp_split_to_table(idem_metrics(), E'\n') \gset
CREATE SCHEMA added;
CREATE TABLE added.idem_keys (a int);
CREATE FUNCTION added.idem_claim(text) RETURNS text LANGUAGE sql RETURN 'not ours';
CREATE TYPE added.idem_claim_result AS (a int);
REVOKE ALL ON FUNCTION added.idem_claim FROM PUBLIC;
REVOKE ALL ON TYPE added.idem_claim_result FROM PUBLIC;
ALTER EXTENSION idempotency ADD TABLE added.idem_keys;
ALTER EXTENSION idempotency ADD FUNCTION added.idem_claim(text);
ALTER EXTENSION idempotency ADD TYPE added.idem_claim_result;
SELECT count(*) > 0 FROM idem_health();
SELECT count(*) = :samples FROM regexp_split_to_table(idem_metrics(), E'\n');
CREATE ROLE regress_idem_added;
SELECT idem_grant('regress_idem_added');
SELECT has_function_privilege('regress_idem_added', 'added.idem_claim(text)', 'EXECUTE') AS function,
	has_type_privilege('regress_idem_added', 'added.idem_claim_result', 'USAGE') AS type;
SELECT idem_revoke('regress_idem_added');
ALTER EXTENSION idempotency DROP TABLE added.idem_keys;
ALTER EXTENSION idempotency DROP FUNCTION added.idem_claim(text);
ALTER EXTENSION idempotency DROP TYPE added.idem_claim_result;
DROP TABLE added.idem_keys;
DROP FUNCTION added.idem_claim(text);
DROP TYPE added.idem_claim_result;
DROP SCHEMA added;
DROP ROLE regress_idem_added;

-- A database owner who has no right to our tables can do that, where the schema is his: his index of another table must not be read as ours.
SET client_min_messages = warning;
CREATE ROLE regress_idem_owner;
CREATE DATABASE regress_idem_db OWNER regress_idem_owner;
\c regress_idem_db
SET client_min_messages = warning;
SET SESSION AUTHORIZATION regress_idem_owner;
CREATE SCHEMA idem;
SET search_path = idem;
CREATE EXTENSION idempotency;
SELECT outcome FROM idem_claim('s', 'hostile-key-00001', ttl => '0');
SELECT count(idem_publish('t', '{}', CASE WHEN i > 1 THEN 'k' END)) FROM generate_series(1, 2) AS i;
DROP INDEX idem_keys_expires_at, idem_outbox_due, idem_outbox_topics, idem_outbox_lanes, idem_outbox_ended;
CREATE TABLE mine (words text);
INSERT INTO mine SELECT repeat('x', 100) FROM generate_series(1, 100);
CREATE INDEX idem_keys_expires_at ON mine (words);
CREATE INDEX idem_outbox_due ON mine (words) WHERE words IS NOT NULL;
CREATE INDEX idem_outbox_topics ON mine (words, words) WHERE words IS NOT NULL;
CREATE INDEX idem_outbox_lanes ON mine (words, words) WHERE words IS NOT NULL;
CREATE INDEX idem_outbox_ended ON mine (words) WHERE words IS NOT NULL;
\set VERBOSITY sqlstate
SELECT * FROM idem_cleanup();
SELECT told();
SELECT * FROM idem_outbox_take();
SELECT * FROM idem_outbox_take(topics => '{t}');
SELECT idem_outbox_requeue();
\set VERBOSITY terse
-- Calls that need no index still work.
SELECT outcome FROM idem_claim('s', 'hostile-key-00002');
SELECT outcome FROM idem_claim('s', 'hostile-key-00001');
-- The owner cannot drop anything else of the extension.
DROP TABLE idem_keys;
DROP INDEX idem_keys_pkey;
DROP SEQUENCE idem_claim_tokens;
DROP FUNCTION idem_claim;
ALTER EXTENSION idempotency DROP TABLE idem_keys;
ALTER EXTENSION idempotency DROP FUNCTION idem_claim(text, text, bytea, interval, interval, interval, jsonb);
ALTER TABLE idem_keys RENAME TO x;
ALTER INDEX idem_keys_pkey RENAME TO x;

-- Under another name of the schema all works; a new schema of the old name, with functions that would be called, is not used.
RESET search_path;
ALTER SCHEMA idem RENAME TO "other schema";
CREATE SCHEMA idem;
CREATE FUNCTION idem.idem_check_grantee(regrole) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured by idem_check_grantee'; END $$;
CREATE FUNCTION idem.idem_application_functions() RETURNS SETOF regprocedure LANGUAGE plpgsql AS $$ BEGIN RAISE 'captured by idem_application_functions'; END $$;
RESET SESSION AUTHORIZATION;
CREATE ROLE regress_idem_app;
SELECT "other schema".idem_grant('regress_idem_app');
SELECT count(*) > 20 FROM pg_proc WHERE proname LIKE 'idem%' AND has_function_privilege('regress_idem_app', oid, 'EXECUTE');
SELECT "other schema".idem_revoke('regress_idem_app');
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem%' AND has_function_privilege('regress_idem_app', oid, 'EXECUTE') AND pronamespace <> 'idem'::regnamespace;
SELECT outcome FROM "other schema".idem_claim('s', 'hostile-key-00002');
SELECT count(*) FROM "other schema".idem_abandoned('0');

\c :regress_db
SET client_min_messages = warning;
DROP DATABASE regress_idem_db;
DROP ROLE regress_idem_owner, regress_idem_app;
DROP FUNCTION handler(jsonb), nothing();
