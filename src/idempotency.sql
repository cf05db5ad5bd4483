\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- Whoever may create objects beside ours could capture calls with a function
-- that matches better, so only superusers, the database owner and the
-- installing role may.  That role need not be a superuser, but this script runs as one: every operator
-- below is qualified, including those that CASE, IN and IS DISTINCT FROM hide.
DO $check$
DECLARE
	target pg_catalog.name := pg_catalog.current_schema();
	stranger pg_catalog.text;
BEGIN
	SELECT CASE WHEN acl.grantee OPERATOR(pg_catalog.=) 0 THEN 'PUBLIC'
			ELSE acl.grantee::pg_catalog.regrole::pg_catalog.text END
		INTO stranger
		FROM pg_catalog.pg_namespace AS n
		CROSS JOIN LATERAL pg_catalog.aclexplode(
			coalesce(n.nspacl, pg_catalog.acldefault('n', n.nspowner))) AS acl
		CROSS JOIN pg_catalog.pg_database AS d
		LEFT JOIN pg_catalog.pg_roles AS r
			ON r.oid OPERATOR(pg_catalog.=)
				CASE WHEN acl.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole
					THEN d.datdba ELSE acl.grantee
				END
		WHERE n.nspname OPERATOR(pg_catalog.=) target
			AND d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
			AND acl.privilege_type OPERATOR(pg_catalog.=) 'CREATE'
			AND NOT coalesce(r.rolsuper, false)
			AND NOT coalesce(r.oid OPERATOR(pg_catalog.=) '@extowner@'::pg_catalog.regrole, false)
			AND NOT coalesce(r.oid OPERATOR(pg_catalog.=) d.datdba, false)
		LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = pg_catalog.format(
				'schema "%s" is not safe for extension "idempotency"', target),
			DETAIL = pg_catalog.format(
				'%s may create objects in it.', stranger),
			HINT = 'Use a schema of its own: CREATE SCHEMA idem; '
				'CREATE EXTENSION idempotency SCHEMA idem;';
	END IF;
END
$check$;
