--
-- Access: who takes back what whom has granted
--
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_db;
DROP ROLE IF EXISTS regress_idem_owner, regress_idem_installer, regress_idem_lead, regress_idem_app, regress_idem_team;
CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_installer;
CREATE ROLE regress_idem_lead;
CREATE ROLE regress_idem_team;
CREATE ROLE regress_idem_app;
CREATE DATABASE regress_idem_db OWNER regress_idem_owner;
SELECT current_database() AS regress_db, current_user AS superuser \gset
\c regress_idem_db
SET client_min_messages = warning;
\pset format unaligned
\pset tuples_only on
\set VERBOSITY terse

-- The roles' rights on one function and one type of the application
CREATE FUNCTION grants() RETURNS SETOF text LANGUAGE sql AS $$
	SELECT line FROM (SELECT format('%s: %s%s by %s', privilege_type, grantee::regrole,
		CASE WHEN is_grantable THEN ' with grant option' END, CASE grantor WHEN owner THEN 'the owner' ELSE grantor::regrole::text END)
	FROM (SELECT proacl, proowner FROM pg_proc WHERE proname = 'idem_once'
		UNION ALL SELECT typacl, typowner FROM pg_type WHERE typname = 'idem_response') AS o (acl, owner), aclexplode(acl)
		WHERE grantee NOT IN (owner, 'pg_database_owner'::regrole, 'regress_idem_installer'::regrole)) AS l (line)
	ORDER BY line COLLATE "C"
$$;

--
-- With any installer, a dump can repeat the grants of the database's owner, as
-- the same role: it may use the schema, unless that belongs to a stranger.
--
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT has_schema_privilege('pg_database_owner', 'idem', 'USAGE'), has_schema_privilege('pg_database_owner', 'idem', 'CREATE'),
	has_schema_privilege('pg_database_owner', 'idem', 'USAGE WITH GRANT OPTION');
-- It is in the dump: not part of what the extension begins with.
SELECT count(*) FROM pg_init_privs WHERE classoid = 'pg_namespace'::regclass AND objoid = 'idem'::regnamespace;
DROP EXTENSION idempotency;
DROP SCHEMA idem;
-- The schema's owner
GRANT CREATE ON DATABASE regress_idem_db TO regress_idem_installer;
SET SESSION AUTHORIZATION regress_idem_installer;
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT has_schema_privilege('pg_database_owner', 'idem', 'USAGE');
DROP EXTENSION idempotency;
DROP SCHEMA idem;
RESET SESSION AUTHORIZATION;
-- A guest in it
CREATE SCHEMA idem AUTHORIZATION regress_idem_lead;
GRANT USAGE, CREATE ON SCHEMA idem TO regress_idem_installer;
SET SESSION AUTHORIZATION regress_idem_installer;
SET client_min_messages = error;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT has_schema_privilege('pg_database_owner', 'idem', 'USAGE');
DROP EXTENSION idempotency;
RESET SESSION AUTHORIZATION;
DROP SCHEMA idem;
-- The same, where a superuser installs, as when a dump is restored
CREATE SCHEMA idem AUTHORIZATION regress_idem_lead;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT has_schema_privilege('pg_database_owner', 'idem', 'USAGE');
DROP EXTENSION idempotency;
DROP SCHEMA idem;
-- Nor is it a stranger's schema where it belongs to the owner of the database.
CREATE SCHEMA idem AUTHORIZATION regress_idem_owner;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT has_schema_privilege('pg_database_owner', 'idem', 'USAGE');
DROP EXTENSION idempotency;
DROP SCHEMA idem;
-- And where it may do so anyway
SELECT nspacl AS before FROM pg_namespace WHERE nspname = 'public' \gset
CREATE EXTENSION idempotency SCHEMA public;
SELECT nspacl = :'before' FROM pg_namespace WHERE nspname = 'public';
DROP EXTENSION idempotency;
SET client_min_messages = warning;

--
-- Two have granted the same to one role
--
CREATE SCHEMA idem;
GRANT USAGE ON SCHEMA idem TO PUBLIC;
SET SESSION AUTHORIZATION :superuser;
GRANT CREATE ON SCHEMA idem TO regress_idem_installer;
SET SESSION AUTHORIZATION regress_idem_installer;
SET client_min_messages = error;
CREATE EXTENSION idempotency SCHEMA idem;
SET client_min_messages = warning;
RESET SESSION AUTHORIZATION;
REVOKE CREATE ON SCHEMA idem FROM regress_idem_installer;
SET search_path = idem, public;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_lead WITH GRANT OPTION;
GRANT USAGE ON TYPE idem_response TO regress_idem_lead WITH GRANT OPTION;
SET ROLE regress_idem_owner;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_lead;
GRANT USAGE ON TYPE idem_response TO regress_idem_lead;
RESET ROLE;
SELECT grants();
-- The superuser's REVOKE would take the other grant.
SELECT idem_revoke('regress_idem_lead');
SELECT grants();
-- A REVOKE by the grantor removes it.
SET ROLE regress_idem_owner;
SELECT idem_revoke('regress_idem_lead');
RESET ROLE;
SELECT grants();
-- Nor does it fail where that other has granted on.
SET ROLE regress_idem_lead;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_app;
RESET ROLE;
SET ROLE regress_idem_installer;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_lead;
RESET ROLE;
SELECT idem_revoke('regress_idem_lead');
SELECT grants();
SET ROLE regress_idem_owner;
SELECT idem_revoke('regress_idem_lead');
SET ROLE regress_idem_installer;
SELECT idem_revoke('regress_idem_lead');
RESET ROLE;
SELECT grants();

--
-- A REVOKE takes what the current role has granted, before what one it is a
-- member of has
--
GRANT regress_idem_lead TO regress_idem_team;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem TO regress_idem_team;
SET ROLE regress_idem_team;
SELECT idem_revoke('regress_idem_app');
RESET ROLE;
SELECT grants();
-- With the grant option itself, it grants and revokes by itself.
SET ROLE regress_idem_lead;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_app;
RESET ROLE;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_team WITH GRANT OPTION;
SET ROLE regress_idem_team;
GRANT EXECUTE ON FUNCTION idem_once TO regress_idem_app;
SELECT idem_revoke('regress_idem_app');
RESET ROLE;
SELECT grants();
SELECT idem_grantor(proacl, proowner) = proowner FROM pg_proc WHERE proname = 'idem_once';
-- With several to choose from, and none its own, it leaves that alone.
REVOKE EXECUTE ON FUNCTION idem_once FROM regress_idem_team CASCADE;
GRANT regress_idem_installer TO regress_idem_team;
SET ROLE regress_idem_team;
SELECT idem_grantor(proacl, proowner) IS NULL FROM pg_proc WHERE proname = 'idem_once';
RESET ROLE;

--
-- The owner of the functions keeps his own
--
SELECT count(*) AS functions FROM idem_application_functions() \gset
SET ROLE regress_idem_owner;
SET client_min_messages = error;
SELECT idem_revoke(proowner) FROM pg_proc WHERE proname = 'idem_once';
SET client_min_messages = warning;
RESET ROLE;
SELECT count(*) = :functions FROM idem_application_functions() AS f JOIN pg_proc AS p ON p.oid = f, aclexplode(proacl) AS a WHERE a.grantee = p.proowner;
SELECT count(*) = (SELECT count(*) FROM idem_application_types()) FROM idem_application_types() AS f JOIN pg_type AS t ON t.oid = f, aclexplode(typacl) AS a WHERE a.grantee = t.typowner;

\c :regress_db
SET client_min_messages = warning;
DROP DATABASE regress_idem_db;
DROP ROLE regress_idem_owner, regress_idem_installer, regress_idem_lead, regress_idem_team, regress_idem_app;
