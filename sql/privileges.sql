--
-- Access: nothing for PUBLIC, installation by a database owner, the
-- application's part of the interface.
--
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_db;
DROP TABLESPACE IF EXISTS regress_idem_tablespace;
DROP ROLE IF EXISTS regress_idem_superuser, "regress_idem '""$$\x", "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
DROP ROLE IF EXISTS regress_idem_owner, regress_idem_app, "regress_idem ""App""", regress_idem_nobody, regress_idem_monitor;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_app;
CREATE ROLE "regress_idem ""App""";
CREATE ROLE regress_idem_nobody;
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;

SELECT current_database() AS regress_db \gset
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never

--
-- Nothing for PUBLIC, with any installer
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
GRANT SELECT ON idem_stats TO PUBLIC;
SELECT * FROM granted_to_public ORDER BY name COLLATE "C";
ROLLBACK;
-- The row types of the tables and of the view: a stranger's column of such a type would stand in the way of any change.
SELECT relname, has_type_privilege('public', reltype, 'USAGE') AS public, has_type_privilege('regress_idem_monitor', reltype, 'USAGE') AS monitor
	FROM pg_class JOIN members ON oid = objid AND classid = 'pg_class'::regclass WHERE reltype <> 0 ORDER BY relname COLLATE "C";
-- Monitoring runs with the owner's rights, and what grants the application's part; nothing else.
SELECT proname FROM pg_proc JOIN members ON oid = objid AND classid = 'pg_proc'::regclass WHERE prosecdef ORDER BY proname;
SET ROLE regress_idem_nobody;
\set VERBOSITY sqlstate
SELECT idem_key_is_valid('x');
SELECT idem_claim('s', 'privileges-key-01');
SELECT idem_lookup('s', 'privileges-key-01');
SELECT idem_try_advance('u', 'e', 'i', 1);
SELECT idem_request_hash('GET', '/');
SELECT idem_try_append('a', 'c', 1);
SELECT idem_last_client_seq('a', 'c');
SELECT idem_once('s', 't');
SELECT idem_once_many('s', '{t}'::text[]);
SELECT idem_publish('t', '{}');
SELECT idem_publish_many('{t}', '{1}');
SELECT idem_outbox_take();
SELECT idem_outbox_ack('{1}');
SELECT idem_outbox_nack(1);
SELECT idem_outbox_requeue();
SELECT idem_outbox_extend('{1}');
SELECT idem_outbox_release('{1}');
SELECT idem_cleanup();
SELECT idem_stats_data();
SELECT idem_stats_reset();
SELECT * FROM idem_keys;
SELECT * FROM idem_stats;
SELECT nextval('idem_claim_tokens');
SELECT nextval('idem_outbox_ids');
CREATE TEMP TABLE t (k idem_keys);
CREATE TEMP TABLE t (s idem_stats);
CREATE TEMP TABLE t (r idem_response);
SELECT idem_grant('regress_idem_nobody');
SELECT idem_revoke('regress_idem_app');
\set VERBOSITY default
RESET ROLE;
-- The rights of a monitoring role, without idem_grant: the statistics, but not their reset.
SET ROLE regress_idem_monitor;
SELECT count(*) >= 0 FROM idem_stats;
SELECT count(*) >= 0 FROM idem_stats_data();
\set VERBOSITY sqlstate
SELECT idem_stats_reset();
SELECT count(*) FROM idem_outbox;
SELECT idem_lookup('s', 'privileges-key-01');
SELECT idem_cleanup();
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
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency';
-- Its owner is no stranger, but that it is another role than the installer is said.
ALTER SCHEMA regress_idem_schema OWNER TO regress_idem_app;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
DROP EXTENSION idempotency;
-- So it is with several, and a name that has to be quoted; not with superusers.
CREATE ROLE regress_idem_superuser SUPERUSER;
GRANT CREATE ON SCHEMA regress_idem_schema TO regress_idem_superuser, regress_idem_nobody, PUBLIC, "regress_idem ""App""";
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
REVOKE CREATE ON SCHEMA regress_idem_schema FROM regress_idem_nobody, PUBLIC, "regress_idem ""App""";
ALTER SCHEMA regress_idem_schema OWNER TO "regress_idem ""App""";
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
DROP EXTENSION idempotency;
ALTER SCHEMA regress_idem_schema OWNER TO regress_idem_superuser;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
DROP EXTENSION idempotency;
ALTER SCHEMA regress_idem_schema OWNER TO CURRENT_USER;
DROP ROLE regress_idem_superuser;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
SELECT outcome FROM regress_idem_schema.idem_claim('s', 'privileges-key-02');
ALTER EXTENSION idempotency SET SCHEMA public;
DROP SCHEMA regress_idem_schema CASCADE;
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency';

--
-- Installing lends no rights
--
CREATE DATABASE regress_idem_db OWNER regress_idem_owner;
GRANT CREATE ON DATABASE regress_idem_db TO regress_idem_nobody;
\c regress_idem_db
-- A role that may only create in the database cannot create in another role's schema.
CREATE SCHEMA regress_idem_schema;
GRANT USAGE ON SCHEMA regress_idem_schema TO regress_idem_nobody;
SET SESSION AUTHORIZATION regress_idem_nobody;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
CREATE EXTENSION idempotency SCHEMA public;
\echo :LAST_ERROR_SQLSTATE
RESET SESSION AUTHORIZATION;
GRANT CREATE ON SCHEMA regress_idem_schema TO regress_idem_nobody;
SET SESSION AUTHORIZATION regress_idem_nobody;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
DROP EXTENSION idempotency;
RESET SESSION AUTHORIZATION;
REVOKE CREATE ON SCHEMA regress_idem_schema FROM regress_idem_nobody;
-- A group's right is each member's own, but the others of the group are strangers.
GRANT CREATE ON SCHEMA regress_idem_schema TO regress_idem_app;
GRANT regress_idem_app TO regress_idem_nobody;
SET SESSION AUTHORIZATION regress_idem_nobody;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
RESET SESSION AUTHORIZATION;
REVOKE regress_idem_app FROM regress_idem_nobody;
DROP SCHEMA regress_idem_schema;
-- Nobody installs it among the server's own.
CREATE EXTENSION idempotency SCHEMA information_schema;
\echo :LAST_ERROR_SQLSTATE
CREATE EXTENSION idempotency SCHEMA pg_catalog;
\echo :LAST_ERROR_SQLSTATE
CREATE TEMP TABLE mine ();
SELECT pg_my_temp_schema()::regnamespace AS temporary \gset
\set VERBOSITY sqlstate
CREATE EXTENSION idempotency SCHEMA :temporary;
\set VERBOSITY default
-- Nor do tables go where the installer may put none.
SET allow_in_place_tablespaces = on;
CREATE TABLESPACE regress_idem_tablespace LOCATION '';
SET SESSION AUTHORIZATION regress_idem_nobody;
CREATE SCHEMA regress_idem_schema;
SET default_tablespace = regress_idem_tablespace;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
SET default_tablespace = pg_default;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
DROP EXTENSION idempotency;
RESET SESSION AUTHORIZATION;
GRANT CREATE ON TABLESPACE regress_idem_tablespace TO regress_idem_nobody;
SET SESSION AUTHORIZATION regress_idem_nobody;
SET default_tablespace = regress_idem_tablespace;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
SELECT DISTINCT t.spcname FROM pg_class AS c JOIN pg_tablespace AS t ON t.oid = c.reltablespace WHERE c.relnamespace = 'regress_idem_schema'::regnamespace;
DROP EXTENSION idempotency;
RESET default_tablespace;
RESET SESSION AUTHORIZATION;
DROP TABLESPACE regress_idem_tablespace;
-- Whatever the session would have, they are ordinary tables.
CREATE ACCESS METHOD regress_idem_tables TYPE TABLE HANDLER heap_tableam_handler;
SET default_table_access_method = regress_idem_tables;
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
SELECT DISTINCT a.amname FROM pg_class AS c JOIN pg_am AS a ON a.oid = c.relam WHERE c.relnamespace = 'regress_idem_schema'::regnamespace AND c.relkind = 'r';
SHOW default_table_access_method;
RESET default_table_access_method;
DROP EXTENSION idempotency;
DROP ACCESS METHOD regress_idem_tables;

-- The script runs as a superuser.  The owner of the schema, in another session, cannot make it refer to what is his, by giving the schema's name to another half-way through.
-- Newer minor releases keep other sessions from that; so the same is done in this one.
CREATE FUNCTION interfere() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM pg_proc WHERE proname = 'idem_redacted_key') AND NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'checked') THEN
		ALTER SCHEMA regress_idem_schema RENAME TO checked;
		CREATE SCHEMA regress_idem_schema;
		-- Names that monitoring will use
		CREATE FUNCTION regress_idem_schema.idem_redacted_key(text) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''captured''; END';
		CREATE TABLE regress_idem_schema.idem_keys AS TABLE checked.idem_keys;
		CREATE TABLE regress_idem_schema.idem_outbox AS TABLE checked.idem_outbox;
	END IF;
END
$$;
CREATE EVENT TRIGGER regress_idem_trigger ON ddl_command_start WHEN TAG IN ('CREATE FUNCTION') EXECUTE FUNCTION interfere();
SET SESSION AUTHORIZATION regress_idem_nobody;
\set VERBOSITY terse
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
\set VERBOSITY default
RESET SESSION AUTHORIZATION;
DROP EVENT TRIGGER regress_idem_trigger;
DROP FUNCTION interfere();

-- Default privileges open nothing: all rights are what they are without them.
CREATE VIEW rights AS
	SELECT pg_describe_object(classid, objid, 0) AS object, a.grantor::regrole, a.grantee::regrole, a.privilege_type, a.is_grantable
	FROM (
		SELECT tableoid, oid, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE proname LIKE 'idem\_%'
		UNION ALL SELECT tableoid, oid, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)) FROM pg_class WHERE relname LIKE 'idem\_%' AND relkind IN ('r', 'v', 'S')
		UNION ALL SELECT tableoid, oid, coalesce(typacl, acldefault('T', typowner)) FROM pg_type WHERE typname LIKE 'idem\_%' AND typtype = 'c') AS o (classid, objid, acl),
		aclexplode(o.acl) AS a;
CREATE FUNCTION install(installer name) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('SET ROLE %I', installer);
	CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
	RESET ROLE;
END
$$;
SET client_min_messages = error;
SELECT current_user AS superuser, rolname AS bootstrap FROM pg_roles WHERE oid = 10 \gset
CREATE TABLE expected_rights (installer name, LIKE rights);
SELECT install(:'superuser');
INSERT INTO expected_rights SELECT :'superuser', * FROM rights;
-- The rights that dumps omit, because each installation has them, name only the owner and the server's own roles.
SELECT DISTINCT a.grantee::regrole FROM pg_init_privs AS i, aclexplode(i.initprivs) AS a WHERE a.grantee <> a.grantor AND i.objoid >= 16384 ORDER BY 1;
DROP EXTENSION idempotency;
SELECT install('regress_idem_nobody');
INSERT INTO expected_rights SELECT 'regress_idem_nobody', * FROM rights;
SELECT DISTINCT a.grantee::regrole FROM pg_init_privs AS i, aclexplode(i.initprivs) AS a WHERE a.grantee <> a.grantor AND i.objoid >= 16384 ORDER BY 1;
DROP EXTENSION idempotency;
SELECT installer = 'regress_idem_nobody' AS trusted, grantee, privilege_type, is_grantable, count(*) > 1 AS several FROM expected_rights WHERE grantee <> grantor GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3;
CREATE FUNCTION unexpected_rights(installer name, defaults text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	found text;
BEGIN
	EXECUTE defaults;
	PERFORM install(installer);
	SELECT string_agg(u::text, ', ') INTO found FROM (
		(TABLE rights EXCEPT SELECT object, grantor, grantee, privilege_type, is_grantable FROM expected_rights AS e WHERE e.installer = unexpected_rights.installer)
		UNION ALL
		(SELECT object, grantor, grantee, privilege_type, is_grantable FROM expected_rights AS e WHERE e.installer = unexpected_rights.installer EXCEPT TABLE rights)
		UNION ALL
		SELECT pg_describe_object(i.classoid, i.objoid, i.objsubid), a.grantor, a.grantee, a.privilege_type, a.is_grantable
		FROM pg_init_privs AS i, aclexplode(i.initprivs) AS a
		WHERE i.objoid >= 16384 AND a.grantee NOT IN (a.grantor, 'pg_monitor'::regrole, 'pg_database_owner'::regrole)) AS u;
	RAISE SQLSTATE 'UN001';
EXCEPTION WHEN SQLSTATE 'UN001' THEN
	RETURN found;
END
$$;
SELECT e.installer = :'superuser' AS by_superuser, g.grantee, found FROM (SELECT DISTINCT installer FROM expected_rights) AS e,
	unnest('{PUBLIC,regress_idem_app WITH GRANT OPTION,regress_idem_nobody WITH GRANT OPTION,pg_monitor,pg_monitor WITH GRANT OPTION,pg_database_owner WITH GRANT OPTION}'::text[]) AS g (grantee),
	unexpected_rights(e.installer, (SELECT string_agg(format('ALTER DEFAULT PRIVILEGES FOR ROLE %I %s GRANT ALL ON %s TO %s', CASE e.installer WHEN :'superuser' THEN :'superuser' ELSE :'bootstrap' END, place, kind, g.grantee), '; ')
		FROM unnest(ARRAY['', 'IN SCHEMA regress_idem_schema']) AS place, unnest('{TABLES,SEQUENCES,FUNCTIONS,TYPES}'::text[]) AS kind)) AS found ORDER BY 1, g.grantee COLLATE "C";
-- Names that would have to be quoted are no way into the script, either.
CREATE ROLE "regress_idem '""$$\x";
CREATE ROLE "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
GRANT CREATE ON DATABASE regress_idem_db TO "regress_idem '""$$\x", "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
GRANT ALL ON SCHEMA regress_idem_schema TO "regress_idem '""$$\x", "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER" WITH GRANT OPTION;
ALTER SCHEMA regress_idem_schema OWNER TO "regress_idem '""$$\x";
CREATE EXTENSION idempotency SCHEMA regress_idem_schema;
\echo :LAST_ERROR_SQLSTATE
REVOKE CREATE ON SCHEMA regress_idem_schema FROM "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
SELECT install($$regress_idem '"$$ || '$$\x');
SET ROLE "regress_idem '""$$\x";
SELECT regress_idem_schema.idem_grant('"regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER"');
SET ROLE "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
SELECT outcome FROM regress_idem_schema.idem_claim('s', 'privileges-key-01');
RESET ROLE;
SELECT rolname FROM pg_roles WHERE rolname LIKE 'regress\_idem%' AND rolsuper;
DROP OWNED BY "regress_idem '""$$\x", "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
DROP ROLE "regress_idem '""$$\x", "regress_idem $check$; ALTER ROLE regress_idem_app SUPERUSER";
DROP FUNCTION unexpected_rights, install;
DROP VIEW rights CASCADE;
DROP TABLE expected_rights;
REVOKE CREATE ON DATABASE regress_idem_db FROM regress_idem_nobody;
RESET client_min_messages;

--
-- A database owner installs it, into a schema with an awkward name
--
-- A superuser may install it for the owner, even in the public schema, as a restore does: the owner has an installer's rights, except to remove it.
CREATE EXTENSION idempotency;
SELECT extnamespace::regnamespace, extowner = current_user::regrole FROM pg_extension WHERE extname = 'idempotency';
SET SESSION AUTHORIZATION regress_idem_owner;
SELECT outcome FROM idem_claim('s', 'privileges-key-01');
SELECT idem_forget('s', 'privileges-key-01');
SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) >= 0 FROM idem_stats), (SELECT last_value > 0 FROM idem_claim_tokens);
SELECT idem_grant('regress_idem_app');
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem%' AND has_function_privilege('regress_idem_app', oid, 'EXECUTE');
SELECT idem_revoke('regress_idem_app');
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem%' AND has_function_privilege('regress_idem_app', oid, 'EXECUTE');
\set VERBOSITY sqlstate
DELETE FROM idem_keys;
ALTER FUNCTION idem_forget(text, text) SECURITY DEFINER;
DROP EXTENSION idempotency;
\set VERBOSITY default
RESET SESSION AUTHORIZATION;
-- All that goes with the ownership of the database.
SELECT r.rolname, has_function_privilege(r.oid, 'idem_forget(text, text)', 'EXECUTE'), has_table_privilege(r.oid, 'idem_keys', 'SELECT') FROM pg_roles AS r
	WHERE r.rolname IN ('regress_idem_owner', 'regress_idem_nobody') ORDER BY r.rolname COLLATE "C";
ALTER DATABASE regress_idem_db OWNER TO regress_idem_nobody;
SELECT r.rolname, has_function_privilege(r.oid, 'idem_forget(text, text)', 'EXECUTE'), has_table_privilege(r.oid, 'idem_keys', 'SELECT') FROM pg_roles AS r
	WHERE r.rolname IN ('regress_idem_owner', 'regress_idem_nobody') ORDER BY r.rolname COLLATE "C";
ALTER DATABASE regress_idem_db OWNER TO regress_idem_owner;
DROP EXTENSION idempotency;
-- Another role's right to create there is refused as everywhere.
GRANT CREATE ON SCHEMA public TO regress_idem_app;
CREATE EXTENSION idempotency;
\echo :LAST_ERROR_SQLSTATE
REVOKE CREATE ON SCHEMA public FROM regress_idem_app;
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

-- The owner uses all functions, and reads the tables.
SELECT c.outcome, idem_complete('s', 'privileges-key-01', 200, 'x') FROM idem_claim('s', 'privileges-key-01') AS c;
SELECT idem_erase('s', 'privileges-key-01'), idem_forget('s', 'privileges-key-01');
SELECT outcome FROM idem_claim('s', 'privileges-key-03');
SELECT is_active FROM idem_set('u', 'e', 'i', 'like', true, 1);
SELECT outcome FROM idem_try_append('a', 'c', 1);
SELECT idem_last_client_seq('a', 'c');
SELECT idem_once('s', 't'), idem_once_many('s', '{t,u}'::text[]);
SELECT idem_publish('privileges', '{}') IS NOT NULL;
SELECT topic, idem_outbox_nack(id, retry_after => '0') FROM idem_outbox_take();
SELECT idem_outbox_requeue();
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take();
SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) FROM idem_action_versions), (SELECT count(*) FROM idem_user_actions), (SELECT last_value > 0 FROM idem_claim_tokens),
	(SELECT count(*) FROM idem_aggregates), (SELECT count(*) FROM idem_client_sequences), (SELECT count(*) FROM idem_tokens), (SELECT count(*) FROM idem_outbox), (SELECT last_value FROM idem_outbox_ids);
SELECT * FROM idem_cleanup();
SELECT idem_stats_reset();
SELECT datname, claims_new, messages_acked FROM idem_stats WHERE datname = current_database();
SELECT datid = (SELECT oid FROM pg_database WHERE datname = current_database()) FROM idem_stats_data() WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database());
SELECT idem_check_grantee('regress_idem_app');
-- The owner writes them through the functions only, and alters nothing.
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
	(14, 'CREATE FUNCTION idem_claim_2() RETURNS void LANGUAGE c AS $$idempotency$$, $$idem_claim$$'),
	(15, 'INSERT INTO idem_tokens VALUES (now(), now(), $$s$$, $$v$$)'),
	(16, 'UPDATE idem_outbox SET state = $$pending$$'),
	(17, 'DELETE FROM idem_client_sequences'),
	(18, 'UPDATE idem_aggregates SET version = 0'),
	(19, 'SELECT nextval($$idem_outbox_ids$$)'),
	(20, 'CREATE OR REPLACE VIEW idem_stats AS SELECT 1')) AS s (n, statement) ORDER BY n;

-- The owner grants the application's part, and revokes it.
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
-- Nor are these anybody.
SELECT idem_grant(0);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_grant('-');
\echo :LAST_ERROR_SQLSTATE
SELECT idem_revoke(0);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_grant(4294967295::oid);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_check_grantee(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_check_grantee('-');
\echo :LAST_ERROR_SQLSTATE
SELECT acl.grantee::regrole, count(*) FROM pg_proc, aclexplode(proacl) AS acl
	WHERE pronamespace = '"Idem Schema"'::regnamespace AND acl.grantee NOT IN (proowner, 'regress_idem_owner'::regrole, 'pg_database_owner'::regrole) GROUP BY 1 ORDER BY acl.grantee::regrole::text COLLATE "C";
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
SELECT * FROM "Idem Schema".idem_try_append('a', 'app', 1, expected_version => 1);
SELECT "Idem Schema".idem_last_client_seq('a', 'app');
SELECT "Idem Schema".idem_once('app', 't'), "Idem Schema".idem_once_many('app', '{t,u}'::text[]);
SELECT "Idem Schema".idem_publish('app', '{}', 'k') IS NOT NULL;
SELECT ordinal, message_id IS NOT NULL FROM "Idem Schema".idem_publish_many('{app many}', '{1,2}');
SELECT "Idem Schema".idem_outbox_take();
SET SESSION AUTHORIZATION regress_idem_owner;
SELECT "Idem Schema".idem_grant_relay('regress_idem_app'::regrole);
SET SESSION AUTHORIZATION regress_idem_app;
SELECT topic, message_key, attempt, "Idem Schema".idem_outbox_nack(id, retry_after => '0') FROM "Idem Schema".idem_outbox_take(topics => '{app}');
SELECT "Idem Schema".idem_outbox_requeue();
SELECT "Idem Schema".idem_outbox_release(array_agg(id), array_agg(attempt)) FROM "Idem Schema".idem_outbox_take(topics => '{app}');
SELECT e = t.id FROM "Idem Schema".idem_outbox_take(topics => '{app}') AS t, "Idem Schema".idem_outbox_extend(ARRAY[t.id], '0', ARRAY[t.attempt]) AS e;
SELECT "Idem Schema".idem_outbox_ack(array_agg(id)) FROM "Idem Schema".idem_outbox_take(topics => '{app}');
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
	(18, 'DROP EXTENSION idempotency'),
	(19, 'SELECT count(*) FROM idem_aggregates'),
	(20, 'UPDATE idem_client_sequences SET last_client_seq = 0'),
	(21, 'DELETE FROM idem_tokens'),
	(22, 'SELECT payload FROM idem_outbox'),
	(23, 'INSERT INTO idem_outbox DEFAULT VALUES'),
	(24, 'SELECT nextval($$idem_outbox_ids$$)'),
	(25, 'SELECT count(*) FROM idem_stats'),
	(26, 'SELECT count(*) FROM idem_stats_data()'),
	(27, 'SELECT idem_stats_reset()'),
	(28, 'SELECT idem_cleanup()'),
	(29, 'SELECT idem_application_functions()'),
	(30, 'SELECT idem_check_grantee($$regress_idem_app$$)'),
	(31, 'CREATE TEMP TABLE t (k idem_keys)'),
	(32, 'CREATE TEMP TABLE t (o idem_outbox)'),
	(33, 'CREATE TEMP TABLE t (s idem_stats)')) AS s (n, statement) ORDER BY n;
-- It cannot pass on what it has: EXECUTE came without the grant option.
SET client_min_messages = error;
GRANT EXECUTE ON FUNCTION idem_key_is_valid(text) TO regress_idem_nobody;
RESET client_min_messages;
SELECT has_function_privilege('regress_idem_nobody', '"Idem Schema".idem_key_is_valid(text)', 'EXECUTE');

-- A claim and a message draw numbers, and so change what lastval() answers: nothing, for who may not read it.
\set VERBOSITY sqlstate
CREATE TEMP SEQUENCE own;
SELECT nextval('own'), lastval();
SELECT outcome FROM idem_claim('s', 'privileges-key-10');
SELECT lastval();
SELECT nextval('own') + 1, lastval() + 1, idem_publish('t', '1') IS NOT NULL;
SELECT lastval();
SELECT currval('own');
-- A call that draws no number leaves it unchanged.
SELECT nextval('own'), idem_once('s', 't'), (idem_try_advance('u', 'e', '1', 1)).should_process, (idem_try_append('a', 'c', 1)).outcome,
	(idem_claim('s', 'privileges-key-10')).outcome, lastval();
DROP SEQUENCE own;

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

-- A tenant's role gets everything but idem_resume, from an owner who is no superuser.
-- A REVOKE alone changes nothing: the grant is the functions' owner's.
SET SESSION AUTHORIZATION regress_idem_owner;
SELECT idem_grant('regress_idem_app');
REVOKE EXECUTE ON FUNCTION idem_resume FROM regress_idem_app;
SELECT has_function_privilege('regress_idem_app', 'idem_resume(int, interval, text[], interval)', 'EXECUTE');
SELECT idem_revoke('regress_idem_app');
SELECT format('GRANT EXECUTE ON FUNCTION %s TO regress_idem_app', string_agg(f::text, ', ' ORDER BY f::text COLLATE "C")) FROM idem_application_functions() AS f
	WHERE f <> 'idem_resume(int, interval, text[], interval)'::regprocedure \gexec
SELECT f AS left_out FROM idem_application_functions() AS f WHERE NOT has_function_privilege('regress_idem_app', f, 'EXECUTE');
SET SESSION AUTHORIZATION regress_idem_app;
SELECT outcome FROM "Idem Schema".idem_claim('s', 'privileges-key-77');
SELECT "Idem Schema".idem_resume();
SET SESSION AUTHORIZATION regress_idem_owner;
SELECT format('REVOKE EXECUTE ON FUNCTION %s FROM regress_idem_app', string_agg(f::text, ', ' ORDER BY f::text COLLATE "C")) FROM idem_application_functions() AS f \gexec
SELECT idem_revoke('regress_idem_app');

-- A role that watches sees figures, may do nothing, and loses all of it again.
SET SESSION AUTHORIZATION regress_idem_owner;
\set VERBOSITY default
SELECT idem_grant_monitor('regress_idem_nobody');
SELECT idem_grant_monitor('regress_idem_nobody');
SELECT oid::regprocedure FROM pg_proc
	WHERE pronamespace = '"Idem Schema"'::regnamespace AND has_function_privilege('regress_idem_nobody', oid, 'EXECUTE') ORDER BY oid::regprocedure::text COLLATE "C";
SELECT relname FROM pg_class WHERE relnamespace = '"Idem Schema"'::regnamespace AND relkind IN ('r', 'v', 'S')
	AND CASE relkind WHEN 'S' THEN has_sequence_privilege('regress_idem_nobody', oid, 'USAGE, SELECT, UPDATE')
		ELSE has_table_privilege('regress_idem_nobody', oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER') END;
SELECT has_schema_privilege('regress_idem_nobody', 'Idem Schema', 'CREATE'), has_type_privilege('regress_idem_nobody', 'idem_response', 'USAGE');
SELECT grantor = proowner AND NOT is_grantable AS as_owner FROM pg_proc, aclexplode(proacl)
	WHERE proname = 'idem_health' AND grantee = 'regress_idem_nobody'::regrole;
SELECT idem_grant_monitor(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_grant_monitor(0);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_grant_monitor('regress_idem_absent');
\echo :LAST_ERROR_SQLSTATE
SET SESSION AUTHORIZATION regress_idem_nobody;
SET search_path = '';
SELECT count(*) FROM "Idem Schema".idem_stats;
SELECT count(*) > 40 FROM "Idem Schema".idem_metric_samples();
SELECT length("Idem Schema".idem_metrics()) > 5000;
SELECT count(*) FROM "Idem Schema".idem_health();
RESET search_path;
\set VERBOSITY sqlstate
SELECT "Idem Schema".idem_abandoned();
SELECT "Idem Schema".idem_stats_reset();
SELECT "Idem Schema".idem_grant_monitor('regress_idem_app');
SELECT "Idem Schema".idem_grant_monitor_as_owner('regress_idem_app');
SELECT FROM "Idem Schema".idem_keys;
\set VERBOSITY default
-- So does what the caller granted without our help; but not what is held with the grant option.
SET SESSION AUTHORIZATION regress_idem_owner;
SET search_path = "Idem Schema";
SELECT idem_revoke('regress_idem_nobody');
GRANT SELECT ON idem_stats TO regress_idem_app;
SELECT idem_grant_monitor('regress_idem_app');
SELECT count(*) FROM pg_proc WHERE pronamespace = '"Idem Schema"'::regnamespace AND has_function_privilege('regress_idem_nobody', oid, 'EXECUTE');
SELECT has_table_privilege('regress_idem_nobody', 'idem_stats', 'SELECT');
SELECT has_table_privilege('regress_idem_app', 'idem_stats', 'SELECT');
SELECT idem_revoke('regress_idem_app');
SELECT has_table_privilege('regress_idem_app', 'idem_stats', 'SELECT');
SET client_min_messages = error;
SELECT idem_revoke('regress_idem_owner');
RESET client_min_messages;
SELECT has_table_privilege('regress_idem_owner', 'idem_stats', 'SELECT WITH GRANT OPTION');
SET SESSION AUTHORIZATION regress_idem_nobody;
\set VERBOSITY sqlstate
SELECT "Idem Schema".idem_metrics();

-- The owner removes it, with all records.
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
DROP ROLE regress_idem_owner, regress_idem_app, "regress_idem ""App""", regress_idem_nobody, regress_idem_monitor;
