--
-- Access: nothing for PUBLIC, installation by a database owner, the
-- application's part of the interface.
--
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_db;
DROP ROLE IF EXISTS regress_idem_owner, regress_idem_app, "regress_idem ""App""", regress_idem_nobody;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_app;
CREATE ROLE "regress_idem ""App""";
CREATE ROLE regress_idem_nobody;

SELECT current_database() AS regress_db \gset
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

--
-- Nothing for PUBLIC, whoever installs it
--
CREATE VIEW members AS
	SELECT classid, objid, pg_describe_object(classid, objid, 0) AS name
	FROM pg_depend
	WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
		AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency');
SELECT split_part(name, ' ', 1), count(*) > 0 FROM members GROUP BY 1 ORDER BY 1;
CREATE VIEW granted_to_public AS
	SELECT name FROM members WHERE CASE classid
			WHEN 'pg_proc'::regclass THEN has_function_privilege('public', objid, 'EXECUTE')
			-- Types by themselves: whether those of tables are members depends on the version.
			WHEN 'pg_type'::regclass THEN has_type_privilege('public', objid, 'USAGE') AND name NOT LIKE '%[]'
				AND NOT EXISTS (SELECT FROM pg_type JOIN pg_class ON pg_class.oid = typrelid WHERE pg_type.oid = objid AND relkind <> 'c')
			WHEN 'pg_class'::regclass THEN CASE (SELECT relkind FROM pg_class WHERE oid = objid)
				WHEN 'S' THEN has_sequence_privilege('public', objid, 'USAGE, SELECT, UPDATE')
				ELSE has_table_privilege('public', objid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
					OR has_any_column_privilege('public', objid, 'SELECT, INSERT, UPDATE, REFERENCES')
				END
			ELSE true END;
SELECT * FROM granted_to_public;
-- That would find something:
BEGIN;
GRANT EXECUTE ON FUNCTION idem_forget(text, text) TO PUBLIC;
GRANT SELECT (expires_at) ON idem_keys TO PUBLIC;
GRANT USAGE ON TYPE idem_response TO PUBLIC;
GRANT SELECT ON idem_claim_tokens TO PUBLIC;
SELECT * FROM granted_to_public ORDER BY name COLLATE "C";
ROLLBACK;
-- Nothing runs with other rights than its caller's.
SELECT proname FROM pg_proc JOIN members ON oid = objid AND classid = 'pg_proc'::regclass WHERE prosecdef;
SET ROLE regress_idem_nobody;
\set VERBOSITY sqlstate
SELECT idem_key_is_valid('x');
SELECT idem_claim('s', 'privileges-key-01');
SELECT idem_lookup('s', 'privileges-key-01');
SELECT idem_try_advance('u', 'e', 'i', 1);
SELECT idem_request_hash('GET', '/');
SELECT * FROM idem_keys;
SELECT nextval('idem_claim_tokens');
SELECT idem_grant('regress_idem_nobody');
SELECT idem_revoke('regress_idem_app');
\set VERBOSITY default
RESET ROLE;

--
-- A schema where strangers may create objects is refused
--
DROP VIEW granted_to_public, members;
DROP EXTENSION idempotency;
CREATE SCHEMA regress_idem_schema;
GRANT CREATE ON SCHEMA regress_idem_schema TO PUBLIC;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
REVOKE CREATE ON SCHEMA regress_idem_schema FROM PUBLIC;
GRANT USAGE ON SCHEMA regress_idem_schema TO PUBLIC;
GRANT CREATE ON SCHEMA regress_idem_schema TO "regress_idem ""App""";
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
REVOKE CREATE ON SCHEMA regress_idem_schema FROM "regress_idem ""App""";
-- a stranger that owns it
ALTER SCHEMA regress_idem_schema OWNER TO regress_idem_app;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency';
ALTER SCHEMA regress_idem_schema OWNER TO CURRENT_USER;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
SELECT outcome FROM regress_idem_schema.idem_claim('s', 'privileges-key-02');
ALTER EXTENSION idempotency SET SCHEMA public;
DROP SCHEMA regress_idem_schema CASCADE;
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency';

--
-- A database owner installs it, into a schema with an awkward name
--
CREATE DATABASE regress_idem_db OWNER regress_idem_owner;
\c regress_idem_db
-- In his public schema he, not this superuser, may create objects.
CREATE EXTENSION idempotency;
\echo :LAST_ERROR_SQLSTATE
SET SESSION AUTHORIZATION regress_idem_nobody;
CREATE EXTENSION idempotency;
\echo :LAST_ERROR_SQLSTATE
SET SESSION AUTHORIZATION regress_idem_owner;
-- by default into public, which is his
CREATE EXTENSION idempotency;
SELECT extnamespace::regnamespace, extowner::regrole FROM pg_extension WHERE extname = 'idempotency';
DROP EXTENSION idempotency;
CREATE SCHEMA "Idem Schema";
CREATE EXTENSION idempotency SCHEMA "Idem Schema";
SELECT extnamespace::regnamespace, extowner::regrole FROM pg_extension WHERE extname = 'idempotency';
SET search_path = "Idem Schema";
CREATE FUNCTION pg_temp.allowed(statement text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'allowed';
EXCEPTION WHEN insufficient_privilege THEN
	RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;

-- He uses all functions, and reads the tables.
SELECT c.outcome, idem_complete('s', 'privileges-key-01', 200, 'x') FROM idem_claim('s', 'privileges-key-01') AS c;
SELECT idem_erase('s', 'privileges-key-01'), idem_forget('s', 'privileges-key-01');
SELECT outcome FROM idem_claim('s', 'privileges-key-03');
SELECT is_active FROM idem_set('u', 'e', 'i', 'like', true, 1);
SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) FROM idem_action_versions), (SELECT count(*) FROM idem_user_actions), (SELECT last_value > 0 FROM idem_claim_tokens);
-- He writes them through the functions only, and alters nothing.
SELECT statement, pg_temp.allowed(statement) FROM (VALUES
	(1, 'INSERT INTO idem_action_versions VALUES (1, $$u$$, $$e$$, $$j$$)'),
	(2, 'UPDATE idem_keys SET state = $$completed$$'),
	(3, 'DELETE FROM idem_user_actions'),
	(4, 'TRUNCATE idem_keys'),
	(5, 'LOCK TABLE idem_keys IN EXCLUSIVE MODE'),
	(6, 'SELECT setval($$idem_claim_tokens$$, 1)'),
	(7, 'SELECT nextval($$idem_claim_tokens$$)'),
	(8, 'ALTER TABLE idem_keys ADD COLUMN x int'),
	(9, 'CREATE TRIGGER t BEFORE INSERT ON idem_keys EXECUTE FUNCTION suppress_redundant_updates_trigger()'),
	(10, 'CREATE RULE r AS ON INSERT TO idem_keys DO INSTEAD NOTHING'),
	(11, 'ALTER TABLE idem_keys ENABLE ROW LEVEL SECURITY'),
	(12, 'CREATE INDEX ON idem_keys (state)'),
	(13, 'ALTER FUNCTION idem_forget(text, text) SECURITY DEFINER'),
	(14, 'CREATE FUNCTION idem_claim_2() RETURNS void LANGUAGE c AS $$idempotency$$, $$idem_claim$$')) AS s (n, statement) ORDER BY n;

-- He grants the application's part, and takes it back.
SELECT idem_grant('regress_idem_app');
SELECT idem_grant('regress_idem_app');
SELECT idem_grant('"regress_idem ""App"""');
SELECT has_schema_privilege('regress_idem_app', 'Idem Schema', 'USAGE'), has_schema_privilege('regress_idem_app', 'Idem Schema', 'CREATE');
SELECT has_function_privilege('regress_idem_app', oid, 'EXECUTE') AS app,
		has_function_privilege('regress_idem "App"', oid, 'EXECUTE') AS "App",
		has_function_privilege('regress_idem_nobody', oid, 'EXECUTE') AS nobody,
		oid::regprocedure
	FROM pg_proc WHERE pronamespace = '"Idem Schema"'::regnamespace ORDER BY app DESC, oid::regprocedure::text COLLATE "C";
SELECT has_type_privilege('regress_idem_app', 'idem_response', 'USAGE');
SELECT relname FROM pg_class WHERE relnamespace = '"Idem Schema"'::regnamespace AND relkind IN ('r', 'v', 'S')
	AND CASE relkind WHEN 'S' THEN has_sequence_privilege('regress_idem_app', oid, 'USAGE, SELECT, UPDATE')
		ELSE has_table_privilege('regress_idem_app', oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER') END;
-- NULL is nobody.
SELECT idem_grant(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_revoke(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_grant('regress_idem_absent');
\echo :LAST_ERROR_SQLSTATE
SELECT idem_revoke('regress_idem_nobody');

-- The application works, with no search path either.
SET SESSION AUTHORIZATION regress_idem_app;
SET search_path = '';
CREATE FUNCTION pg_temp.handler(request pg_catalog.jsonb) RETURNS "Idem Schema".idem_response LANGUAGE sql AS $$ SELECT ROW(200, NULL, request::text)::"Idem Schema".idem_response $$;
SELECT outcome FROM "Idem Schema".idem_claim('app', 'privileges-key-01', "Idem Schema".idem_request_hash('GET', '/'));
SELECT claim_token FROM "Idem Schema".idem_claim('app', 'privileges-key-02') \gset
SELECT "Idem Schema".idem_checkpoint('app', 'privileges-key-02', 'x', claim_token => :claim_token) > now();
SELECT "Idem Schema".idem_heartbeat('app', 'privileges-key-02', claim_token => :claim_token) > now();
SELECT "Idem Schema".idem_complete('app', 'privileges-key-02', 200, 'x', claim_token => :claim_token);
SELECT outcome, response_body FROM "Idem Schema".idem_claim('app', 'privileges-key-02');
SELECT state FROM "Idem Schema".idem_lookup('app', 'privileges-key-02');
SELECT c.outcome, "Idem Schema".idem_fail('app', 'privileges-key-03') FROM "Idem Schema".idem_claim('app', 'privileges-key-03') AS c;
SELECT c.outcome, "Idem Schema".idem_release('app', 'privileges-key-03') FROM "Idem Schema".idem_claim('app', 'privileges-key-03') AS c;
SELECT c.outcome, "Idem Schema".idem_complete('app', 'privileges-key-03', 200, '\x00'::bytea) FROM "Idem Schema".idem_claim('app', 'privileges-key-03') AS c;
SELECT * FROM "Idem Schema".idem_run('app', 'privileges-key-04', 'pg_temp.handler(jsonb)', '{}');
SELECT * FROM "Idem Schema".idem_try_advance('u', 'e', 'app', 1);
SELECT * FROM "Idem Schema".idem_toggle('u', 'e', 'app', 'like', 2);
SELECT * FROM "Idem Schema".idem_set('u', 'e', 'app', 'like', true, 3, '{x}');
SELECT "Idem Schema".idem_is_active('u', 'e', 'app', 'like');
SELECT "Idem Schema".idem_key_is_valid('x'), "Idem Schema".idem_canonical_json('{"b":1,"a":2}'),
	"Idem Schema".idem_request_hash('GET', '/', '{}'::jsonb) = "Idem Schema".idem_request_hash('GET', '/', '{}'::bytea);
-- ... and that is all it may.
SET search_path = "Idem Schema";
CREATE FUNCTION pg_temp.allowed_to_app(statement text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'allowed';
EXCEPTION WHEN insufficient_privilege THEN
	RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;
SELECT statement, pg_temp.allowed_to_app(statement) FROM (VALUES
	(1, 'SELECT count(*) FROM idem_keys'),
	(2, 'SELECT key FROM idem_keys'),
	(3, 'INSERT INTO idem_keys DEFAULT VALUES'),
	(4, 'DELETE FROM idem_keys'),
	(5, 'SELECT count(*) FROM idem_action_versions'),
	(6, 'UPDATE idem_user_actions SET is_active = true'),
	(7, 'TRUNCATE idem_user_actions'),
	(8, 'SELECT last_value FROM idem_claim_tokens'),
	(9, 'SELECT nextval($$idem_claim_tokens$$)'),
	(10, 'SELECT idem_forget($$app$$, $$privileges-key-01$$)'),
	(11, 'SELECT idem_erase($$app$$, $$privileges-key-01$$)'),
	(12, 'SELECT idem_grant($$regress_idem_nobody$$)'),
	(13, 'SELECT idem_revoke($$regress_idem_app$$)'),
	(14, 'GRANT EXECUTE ON FUNCTION idem_forget(text, text) TO regress_idem_app'),
	(15, 'CREATE FUNCTION "Idem Schema".idem_claim(text, text) RETURNS text LANGUAGE sql AS $$SELECT $1$$'),
	(16, 'CREATE TABLE x (i int)'),
	(17, 'DROP FUNCTION idem_claim'),
	(18, 'DROP EXTENSION idempotency')) AS s (n, statement) ORDER BY n;
-- It cannot pass on what it has: EXECUTE came without the grant option.
SET client_min_messages = error;
GRANT EXECUTE ON FUNCTION idem_key_is_valid(text) TO regress_idem_nobody;
RESET client_min_messages;
SELECT has_function_privilege('regress_idem_nobody', '"Idem Schema".idem_key_is_valid(text)', 'EXECUTE');

-- Who was granted nothing has nothing, and after the revoke the application neither.
SET SESSION AUTHORIZATION regress_idem_nobody;
\set VERBOSITY sqlstate
SELECT "Idem Schema".idem_claim('s', 'privileges-key-01');
SET SESSION AUTHORIZATION regress_idem_owner;
SET search_path = "Idem Schema";
SELECT idem_revoke('regress_idem_app');
SELECT idem_revoke('regress_idem_app');
SELECT count(*) FROM pg_proc WHERE pronamespace = '"Idem Schema"'::regnamespace AND has_function_privilege('regress_idem_app', oid, 'EXECUTE');
SELECT has_type_privilege('regress_idem_app', 'idem_response', 'USAGE');
SELECT count(*) > 0 FROM pg_proc WHERE pronamespace = '"Idem Schema"'::regnamespace AND has_function_privilege('regress_idem "App"', oid, 'EXECUTE');
SET SESSION AUTHORIZATION regress_idem_app;
SELECT idem_claim('s', 'privileges-key-01');
SELECT idem_lookup('s', 'privileges-key-01');
SELECT idem_canonical_json('{}');
SET SESSION AUTHORIZATION "regress_idem ""App""";
SELECT outcome FROM "Idem Schema".idem_claim('s', 'privileges-key-09');

-- He removes it, records and all.
SET SESSION AUTHORIZATION regress_idem_app;
DROP FUNCTION pg_temp.handler(jsonb);
SET SESSION AUTHORIZATION regress_idem_owner;
DROP EXTENSION idempotency;
SELECT count(*) FROM pg_class WHERE relname LIKE 'idem%';
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem%';
\set VERBOSITY default

RESET SESSION AUTHORIZATION;
\c :regress_db
SET client_min_messages = warning;
DROP DATABASE regress_idem_db;
DROP ROLE regress_idem_owner, regress_idem_app, "regress_idem ""App""", regress_idem_nobody;
