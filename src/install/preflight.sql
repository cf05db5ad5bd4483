\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The extension writes to its tables directly, which only works with this access method.
SET LOCAL default_table_access_method = heap;

-- The members of the extension before this script, which can be an update: see install_check.sql.
SELECT pg_catalog.set_config('idempotency_script.members',
		coalesce(pg_catalog.string_agg(pg_catalog.format('%s %s', d.classid, d.objid), ','), ''), true)
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d ON d.refobjid OPERATOR(pg_catalog.=) e.oid
	WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
		AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
		AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char";

-- This script runs with the rights of a superuser, for a role that need not be
-- one. That role, the installer, must be allowed to create objects in the schema
-- and in the tablespace, so it gets nothing that it could not have created.
--
-- Another role that is allowed to create objects in the schema could capture
-- calls with a function that matches better. The owners of the schema and of the
-- database have other ways to do so, so the script only warns about them. It
-- refuses any other role.
--
-- Every operator below is qualified, including those that CASE, IN and IS
-- DISTINCT FROM use implicitly. The installer is read from the catalog, because
-- names that the server substitutes in a script must not be in quotes.
DO $check$
DECLARE
	installer pg_catalog.regrole;
	home pg_catalog.oid;
	home_name pg_catalog.name;
	tablespace pg_catalog.name;
	strangers pg_catalog.text;
	trusted pg_catalog.text;
	own_schema CONSTANT pg_catalog.text := CASE
		WHEN pg_catalog.current_setting('idempotency_script.members') OPERATOR(pg_catalog.=) ''
		THEN 'Use a schema of its own: CREATE SCHEMA idem; CREATE EXTENSION idempotency SCHEMA idem;'
		ELSE 'GRANT CREATE on the schema to the role that has installed the extension, REVOKE it from others, and update again.'
		END;
BEGIN
	SELECT e.extowner, n.oid, n.nspname INTO STRICT installer, home, home_name
		FROM pg_catalog.pg_extension AS e
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name;

	IF pg_catalog.starts_with(home_name::pg_catalog.text, 'pg_')
		OR home_name OPERATOR(pg_catalog.=) 'information_schema'::pg_catalog.name
	THEN
		RAISE EXCEPTION USING
			ERRCODE = 'reserved_name',
			MESSAGE = pg_catalog.format('schema "%s" belongs to the server', home_name),
			HINT = own_schema;
	END IF;
	IF NOT pg_catalog.has_schema_privilege(installer::pg_catalog.oid, home, 'CREATE') THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for schema %s', home_name),
			DETAIL = pg_catalog.format('Role %s is not allowed to create objects in it.', installer),
			HINT = own_schema;
	END IF;

	SELECT t.spcname INTO tablespace
		FROM pg_catalog.pg_tablespace AS t
		CROSS JOIN pg_catalog.pg_database AS d
		WHERE t.spcname OPERATOR(pg_catalog.=) pg_catalog.current_setting('default_tablespace')::pg_catalog.name
			AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
			AND t.oid OPERATOR(pg_catalog.<>) d.dattablespace
			AND NOT pg_catalog.has_tablespace_privilege(installer::pg_catalog.oid, t.oid, 'CREATE');
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format('permission denied for tablespace %s', tablespace),
			DETAIL = pg_catalog.format('It is the default_tablespace, and role %s is not allowed to create objects in it.', installer),
			HINT = 'SET default_tablespace = '''';';
	END IF;

	SELECT pg_catalog.string_agg(DISTINCT c.role, ', ') FILTER (WHERE NOT c.is_trusted),
			pg_catalog.string_agg(DISTINCT c.role, ', ') FILTER (WHERE c.is_trusted)
		INTO strangers, trusted
		FROM (
			SELECT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC') COLLATE pg_catalog."C" AS role,
				coalesce(r.oid OPERATOR(pg_catalog.=) o.owner
					OR r.oid OPERATOR(pg_catalog.=) d.datdba, false) AS is_trusted
			FROM pg_catalog.pg_namespace AS n
			CROSS JOIN pg_catalog.pg_database AS d
			-- The owner of the database has the rights of pg_database_owner.
			CROSS JOIN LATERAL (SELECT
				CASE WHEN n.nspowner OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid
					THEN d.datdba ELSE n.nspowner END) AS o (owner)
			CROSS JOIN LATERAL (
				SELECT CASE WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid
					THEN d.datdba ELSE a.grantee END
				FROM pg_catalog.aclexplode(n.nspacl) AS a
				WHERE a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'
				UNION ALL
				SELECT o.owner) AS c (creator)
			LEFT JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) c.creator
			WHERE n.oid OPERATOR(pg_catalog.=) home
				AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
				AND NOT coalesce(r.rolsuper
					OR r.oid OPERATOR(pg_catalog.=) installer::pg_catalog.oid, false)
		) AS c;
	IF strangers IS NOT NULL THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format(
				'schema "%s" is not safe for extension "idempotency"', home_name),
			DETAIL = pg_catalog.format(
				'Roles that can create objects in it: %s.', strangers),
			HINT = own_schema;
	END IF;
	IF trusted IS NOT NULL THEN
		RAISE WARNING USING
			MESSAGE = pg_catalog.format(
				'other roles can create objects in schema "%s": %s', home_name, trusted),
			DETAIL = 'A function there can capture calls of functions of extension "idempotency", and runs with the rights of the caller.',
			HINT = 'Unless all callers trust that role, use another schema.';
	END IF;
END
$check$;
