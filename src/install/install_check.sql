--
-- Check that all objects are as they were written
--

-- The owner of the schema need not be the installer. In another session it could
-- rename the schema, and give its name to another one, while this script runs.
-- So no function of the extension has been called until now. All new objects must
-- be in the schema that was checked, and refer only to each other and to the
-- server's own objects. In an update, this checks the objects that it has added.
DO $check$
DECLARE
	stray pg_catalog.text;
BEGIN
	WITH RECURSIVE extension AS (
		SELECT e.oid, e.extnamespace
		FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
	),
	part (classid, objid, is_new) AS (
		SELECT d.classid, d.objid, pg_catalog.format('%s %s', d.classid, d.objid) OPERATOR(pg_catalog.<>) ALL (
			pg_catalog.string_to_array(pg_catalog.current_setting('idempotency_script.members'), ','))
		FROM extension AS e
		JOIN pg_catalog.pg_depend AS d
			ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
			AND d.refobjid OPERATOR(pg_catalog.=) e.oid
		WHERE d.deptype OPERATOR(pg_catalog.=) 'e'::pg_catalog."char"
		UNION
		-- Indexes, rules, row types and the like
		SELECT d.classid, d.objid, p.is_new
		FROM part AS p
		JOIN pg_catalog.pg_depend AS d
			ON d.refclassid OPERATOR(pg_catalog.=) p.classid
			AND d.refobjid OPERATOR(pg_catalog.=) p.objid
		WHERE d.deptype OPERATOR(pg_catalog.=) ANY ('{a,i}'::pg_catalog."char"[])
	)
	SELECT pg_catalog.format('%s refers to %s',
			pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid),
			pg_catalog.pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
		INTO stray
		FROM part AS p
		JOIN pg_catalog.pg_depend AS d
			ON d.classid OPERATOR(pg_catalog.=) p.classid
			AND d.objid OPERATOR(pg_catalog.=) p.objid
		WHERE p.is_new
			AND d.deptype OPERATOR(pg_catalog.=) 'n'::pg_catalog."char"
			-- All but objects of initdb, and PL/pgSQL
			AND d.refobjid OPERATOR(pg_catalog.>=) 16384::pg_catalog.oid
			AND d.refclassid OPERATOR(pg_catalog.<>) 'pg_catalog.pg_language'::pg_catalog.regclass::pg_catalog.oid
			AND CASE WHEN d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_namespace'::pg_catalog.regclass::pg_catalog.oid
				THEN d.refobjid OPERATOR(pg_catalog.<>) (SELECT e.extnamespace FROM extension AS e)
				ELSE NOT EXISTS (SELECT FROM part AS r
					WHERE r.classid OPERATOR(pg_catalog.=) d.refclassid
						AND r.objid OPERATOR(pg_catalog.=) d.refobjid)
				END
		LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = 'another session has changed extension "idempotency" while it was installed',
			DETAIL = pg_catalog.format('%s.', stray),
			HINT = 'Install it into a schema in which no other role is allowed to create objects.';
	END IF;
END
$check$;

-- Privileges on all objects that this script has created: none for PUBLIC, all
-- for the owner of the database, and for pg_monitor those for monitoring. Other
-- privileges, which come from ALTER DEFAULT PRIVILEGES, are revoked. Then the
-- installer gets the privileges of the database's owner, unless it is a
-- superuser, who owns the objects.
--
-- Grants by the owner of the database are recorded as grants by
-- pg_database_owner. A dump repeats them in its name, for which it needs USAGE
-- on the schema. So it gets that, if the installer could grant it. If another
-- role owns the schema, it does not, because it would have USAGE only after a
-- superuser has restored a dump.
--
-- These grants, and those on the row types of tables, are not recorded as
-- initial privileges of the extension, but dumped (see access.c).
--
-- No other session can replace a function in this schema.
CREATE FUNCTION pg_temp.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME';
DO $grants$
DECLARE
	for_monitor CONSTANT pg_catalog.name[] := ARRAY['idem_stats', 'idem_stats_data', 'idem_metric_samples',
		'idem_metrics', 'idem_health', 'idem_outbox_blocked', 'idem_abandoned'];
	is_noted pg_catalog.bool;
	statement pg_catalog.text;
BEGIN
	FOR is_noted, statement IN
		WITH extension AS (
			SELECT e.oid, e.extowner, e.extnamespace
			FROM pg_catalog.pg_extension AS e
			WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name
		),
		-- Privileges on older objects are not changed.
		member (classid, objid) AS (
			SELECT d.classid, d.objid
			FROM extension AS e
			JOIN pg_catalog.pg_depend AS d ON d.refobjid OPERATOR(pg_catalog.=) e.oid
			WHERE d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid
				AND pg_catalog.format('%s %s', d.classid, d.objid) OPERATOR(pg_catalog.<>) ALL (
					pg_catalog.string_to_array(pg_catalog.current_setting('idempotency_script.members'), ','))
		),
		object (kind, name, label, privilege, acl, owner) AS (
			SELECT 'FUNCTION', p.proname, p.oid::pg_catalog.regprocedure::pg_catalog.text, 'EXECUTE',
				coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner)), p.proowner
			FROM member AS d
			JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) d.objid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid
				AND p.pronamespace OPERATOR(pg_catalog.<>) pg_catalog.pg_my_temp_schema()
			UNION ALL
			SELECT CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S'::pg_catalog."char" THEN 'SEQUENCE' ELSE 'TABLE' END,
				c.relname, c.oid::pg_catalog.regclass::pg_catalog.text, 'SELECT',
				coalesce(c.relacl, pg_catalog.acldefault(
					CASE WHEN c.relkind OPERATOR(pg_catalog.=) 'S'::pg_catalog."char" THEN 's' ELSE 'r' END::pg_catalog."char",
					c.relowner)), c.relowner
			FROM member AS d
			JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) d.objid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
				-- A composite type counts as a type only.
				AND c.relkind OPERATOR(pg_catalog.<>) 'c'::pg_catalog."char"
			UNION ALL
			SELECT 'TYPE', t.typname, t.oid::pg_catalog.regtype::pg_catalog.text, 'USAGE',
				coalesce(t.typacl, pg_catalog.acldefault('T', t.typowner)), t.typowner
			FROM member AS d
			JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) d.objid
			JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) t.typrelid
			WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_type'::pg_catalog.regclass::pg_catalog.oid
				-- A table counts as a table only.
				AND c.relkind OPERATOR(pg_catalog.=) 'c'::pg_catalog."char"
		)
		SELECT true, pg_catalog.format('REVOKE %s%s ON %s %s FROM %s CASCADE',
				CASE WHEN named.is_named THEN 'GRANT OPTION FOR ' END, a.privilege_type, o.kind, o.label,
				CASE WHEN a.grantee OPERATOR(pg_catalog.=) 0::pg_catalog.oid THEN 'PUBLIC'
					ELSE a.grantee::pg_catalog.regrole::pg_catalog.text END)
		FROM object AS o
		CROSS JOIN LATERAL pg_catalog.aclexplode(o.acl) AS a
		CROSS JOIN LATERAL (SELECT a.privilege_type OPERATOR(pg_catalog.=) o.privilege AND CASE
				WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid THEN true
				WHEN a.grantee OPERATOR(pg_catalog.=) 'pg_monitor'::pg_catalog.regrole::pg_catalog.oid
				THEN o.name OPERATOR(pg_catalog.=) ANY (for_monitor)
				ELSE false END) AS named (is_named)
		WHERE a.grantee OPERATOR(pg_catalog.<>) o.owner
			AND NOT (named.is_named AND (NOT a.is_grantable
				OR a.grantee OPERATOR(pg_catalog.=) 'pg_database_owner'::pg_catalog.regrole::pg_catalog.oid))
		UNION ALL
		SELECT true, pg_catalog.format('GRANT %s ON %s %s TO pg_database_owner WITH GRANT OPTION',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text))
		FROM object AS o
		GROUP BY o.kind, o.privilege
		UNION ALL
		SELECT true, pg_catalog.format('GRANT %s ON %s %s TO pg_monitor',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text))
		FROM object AS o
		WHERE o.name OPERATOR(pg_catalog.=) ANY (for_monitor)
		GROUP BY o.kind, o.privilege
		UNION ALL
		SELECT false, pg_catalog.format('GRANT %s ON %s %s TO %s WITH GRANT OPTION',
				o.privilege, o.kind, pg_catalog.string_agg(o.label, ', '::pg_catalog.text), r.oid::pg_catalog.regrole)
		FROM object AS o
		CROSS JOIN extension AS e
		JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) e.extowner
		WHERE NOT r.rolsuper
		GROUP BY o.kind, o.privilege, r.oid
		UNION ALL
		SELECT false, pg_catalog.format('GRANT USAGE ON SCHEMA %s TO pg_database_owner', e.extnamespace::pg_catalog.regnamespace)
		FROM extension AS e
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) e.extnamespace
		JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) n.nspowner
		JOIN pg_catalog.pg_database AS d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
		WHERE (r.rolsuper OR r.oid OPERATOR(pg_catalog.=) e.extowner OR r.oid OPERATOR(pg_catalog.=) d.datdba)
			AND pg_catalog.has_schema_privilege(e.extowner, e.extnamespace, 'USAGE WITH GRANT OPTION')
			AND NOT pg_catalog.has_schema_privilege('pg_database_owner', e.extnamespace, 'USAGE')
			AND pg_catalog.current_setting('idempotency_script.members') OPERATOR(pg_catalog.=) ''
		UNION ALL
		-- A column of such a type in a user's table would prevent changes of the table.
		SELECT false, pg_catalog.format('REVOKE ALL ON TYPE %s FROM PUBLIC', c.reltype::pg_catalog.regtype)
		FROM member AS d
		JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) d.objid
		WHERE d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid
			AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,v}'::pg_catalog."char"[])
	LOOP
		IF is_noted THEN
			EXECUTE statement;
		ELSE
			PERFORM pg_temp.idem_execute_grant(statement);
		END IF;
	END LOOP;
END
$grants$;
DROP FUNCTION pg_temp.idem_execute_grant(text);
