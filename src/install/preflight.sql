\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The direct access path is made for this one.
SET LOCAL default_table_access_method = heap;

-- What is there before this script, which need not be the first: see install_check.sql.
SELECT pg_catalog.set_config('idempotency_script.members',
		coalesce(pg_catalog.string_agg(pg_catalog.format('%s %s', d.classid, d.objid), ','), ''), true)
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d ON d.refobjid OPERATOR(pg_catalog.=) e.oid
	WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
		AND d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
		AND d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char";

-- This script runs with the rights of a superuser, on behalf of a role that
-- need not be one.  That role, the installer, gets nothing from it that it
-- could not have made itself: it must be allowed to create in the schema, and
-- in the tablespace.
--
-- Another role that can create objects in the schema could capture calls with a
-- function that matches better.  The owners of the schema and of the database
-- have all rights there anyway, so they cause a WARNING; other roles are refused.
--
-- Every operator below is qualified, including those that CASE, IN and IS
-- DISTINCT FROM hide.  The installer is read from the catalog, because names
-- that the server puts into a script must not stand between quotes.
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
			DETAIL = pg_catalog.format('Role %s may not create objects in it.', installer),
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
			DETAIL = pg_catalog.format('It is the default_tablespace, and role %s may not create objects in it.', installer),
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
				'%s may create objects in it.', strangers),
			HINT = own_schema;
	END IF;
	IF trusted IS NOT NULL THEN
		RAISE WARNING USING
			MESSAGE = pg_catalog.format(
				'%s may create objects in schema "%s"', trusted, home_name),
			DETAIL = 'Functions put beside those of extension "idempotency" can capture calls of them, and run with the rights of whoever calls.',
			HINT = 'Unless everybody who will call them trusts that role, use a schema of your own.';
	END IF;
END
$check$;
