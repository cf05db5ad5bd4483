
--
-- Access: what an application role may do
--

CREATE FUNCTION @extschema@.idem_application_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 30
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_request_hash', 'idem_canonical_json',
			'idem_key_is_valid', 'idem_claim', 'idem_complete', 'idem_checkpoint',
			'idem_claim_many', 'idem_complete_many',
			'idem_heartbeat', 'idem_fail', 'idem_release', 'idem_lookup', 'idem_run',
			'idem_try_advance', 'idem_toggle', 'idem_set', 'idem_is_active', 'idem_action_states',
			'idem_try_advance_many', 'idem_set_many',
			'idem_try_append', 'idem_last_client_seq', 'idem_once', 'idem_once_many',
			'idem_publish', 'idem_publish_many', 'idem_outbox_take', 'idem_outbox_ack', 'idem_outbox_nack',
			'idem_outbox_requeue', 'idem_outbox_extend', 'idem_outbox_give_back'
		]::name[]);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_application_functions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_application_functions() TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_application_functions() IS
'The functions that idem_grant gives to an application role.';

CREATE FUNCTION @extschema@.idem_application_types()
RETURNS SETOF regtype
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 11
BEGIN ATOMIC
	SELECT d.objid::regtype
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_type'::regclass
	JOIN pg_type AS t ON t.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND t.typnamespace = e.extnamespace
		AND t.typname = ANY (ARRAY[
			'idem_claim_result', 'idem_lookup_result', 'idem_response', 'idem_run_result',
			'idem_advance_result', 'idem_action_result', 'idem_append_result',
			'idem_claim_many_result', 'idem_complete_many_result',
			'idem_advance_many_result', 'idem_set_many_result'
		]::name[]);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_application_types() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_application_types() TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_application_types() IS
'The types that idem_grant gives to an application role, so that it can create functions and views that return what ours return.';

CREATE FUNCTION @extschema@.idem_monitor_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 4
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_stats_data', 'idem_metric_samples', 'idem_metrics', 'idem_health'
		]::name[]);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_monitor_functions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_monitor_functions() TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_monitor_functions() IS
'The functions that idem_grant_monitor gives to a role that watches.';

CREATE FUNCTION @extschema@.idem_monitor_views()
RETURNS SETOF regclass
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 1
BEGIN ATOMIC
	SELECT d.objid::regclass
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_class'::regclass
	JOIN pg_class AS c ON c.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND c.relnamespace = e.extnamespace
		AND c.relname = 'idem_stats';
END;
REVOKE ALL ON FUNCTION @extschema@.idem_monitor_views() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_monitor_views() TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_monitor_views() IS
'The views that idem_grant_monitor gives to a role that watches.';

CREATE FUNCTION @extschema@.idem_check_grantee(grantee regrole)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF grantee IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed',
			MESSAGE = 'argument "grantee" must not be null';
	END IF;
	IF NOT EXISTS (SELECT FROM pg_roles AS r
			WHERE r.oid = grantee::oid) THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_object',
			MESSAGE = format('role "%s" does not exist', grantee);
	END IF;
END
$$;
REVOKE ALL ON FUNCTION @extschema@.idem_check_grantee(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_check_grantee(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_check_grantee(regrole) IS
'Raises an error unless idem_grant, idem_grant_monitor and idem_revoke can work on this role.';

CREATE FUNCTION @extschema@.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
REVOKE ALL ON FUNCTION @extschema@.idem_execute_grant(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_execute_grant(text) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_execute_grant(text) IS
'Runs a GRANT or REVOKE with the caller''s rights, for idem_grant, idem_grant_monitor and idem_revoke; NULL: none. Raises 42601 for any other statement.';

-- What follows may be called by a superuser, or runs with the rights of one,
-- in a schema that may belong to another role.  Hence the bodies are parsed
-- here and now, and every operator is qualified.

-- Whoever gives or takes back a part of the interface, the functions' owner is
-- the one who grants it: so it stays when that role goes, any administrator can
-- take it back, and a dump can be restored where that role has nothing to give.

CREATE FUNCTION @extschema@.idem_grant_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_application_functions() AS f;
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON TYPE %s TO %s',
			string_agg(t::text, ', '::text), $1))
		FROM @extschema@.idem_application_types() AS t;
END;
REVOKE ALL ON FUNCTION @extschema@.idem_grant_as_owner(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grant_as_owner(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grant_as_owner(regrole) IS
'What idem_grant does with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_grant_monitor_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_monitor_functions() AS f;
	SELECT @extschema@.idem_execute_grant(format('GRANT SELECT ON TABLE %s TO %s',
			string_agg(v::text, ', '::text), $1))
		FROM @extschema@.idem_monitor_views() AS v;
END;
REVOKE ALL ON FUNCTION @extschema@.idem_grant_monitor_as_owner(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grant_monitor_as_owner(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grant_monitor_as_owner(regrole) IS
'What idem_grant_monitor does with the rights of the functions'' owner.';

-- Not from those who hold it with the grant option, nor the owner's own:
-- administrators do not take each other's rights.
CREATE FUNCTION @extschema@.idem_revoke_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM (
			SELECT a FROM @extschema@.idem_application_functions() AS a
			UNION ALL
			SELECT m FROM @extschema@.idem_monitor_functions() AS m
		) AS f (f)
		JOIN pg_proc AS p ON p.oid = f::oid
		CROSS JOIN LATERAL aclexplode(p.proacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor = p.proowner
			AND a.grantee <> p.proowner
			AND NOT a.is_grantable;
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE USAGE ON TYPE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_application_types() AS f
		JOIN pg_type AS t ON t.oid = f::oid
		CROSS JOIN LATERAL aclexplode(t.typacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor = t.typowner
			AND a.grantee <> t.typowner
			AND NOT a.is_grantable;
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE SELECT ON TABLE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_monitor_views() AS f
		JOIN pg_class AS c ON c.oid = f::oid
		CROSS JOIN LATERAL aclexplode(c.relacl) AS a
		WHERE a.grantee = $1::oid
			AND a.privilege_type = 'SELECT'
			AND a.grantor = c.relowner
			AND a.grantee <> c.relowner
			AND NOT a.is_grantable;
END;
REVOKE ALL ON FUNCTION @extschema@.idem_revoke_as_owner(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_revoke_as_owner(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_revoke_as_owner(regrole) IS
'What idem_revoke does with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_warn_of_rest(grantee regrole, remaining boolean)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF remaining AND grantee IS NOT NULL THEN
		RAISE WARNING USING ERRCODE = '01006',
			MESSAGE = format('role "%s" may still execute functions of extension "idempotency"', grantee),
			HINT = 'It administers the extension, is a member of a role that may, or was granted them by another role, who can revoke that.';
	END IF;
END
$$;
REVOKE ALL ON FUNCTION @extschema@.idem_warn_of_rest(regrole, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_warn_of_rest(regrole, boolean) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_warn_of_rest(regrole, boolean) IS
'Tells the caller of idem_revoke what it could not take back.';

-- A REVOKE takes what one role has granted.  For a superuser that is the owner,
-- and for others the first role with the grant option that the server comes
-- upon, beginning with themselves: where there are several others, who knows.
CREATE FUNCTION @extschema@.idem_grantor(acl aclitem[], owner oid)
RETURNS oid
LANGUAGE sql STABLE PARALLEL SAFE COST 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT CASE WHEN r.rolsuper THEN $2
			WHEN bool_or(c.candidate = r.oid) THEN r.oid
			WHEN count(c.candidate) = 1::int8 THEN min(c.candidate)
			END
	FROM pg_roles AS r
	LEFT JOIN (
		SELECT $2
		UNION
		SELECT a.grantee
		FROM aclexplode($1) AS a
		WHERE a.is_grantable
	) AS c (candidate) ON pg_has_role(c.candidate, 'USAGE')
	WHERE r.rolname = CURRENT_USER
	GROUP BY r.oid, r.rolsuper;
END;
REVOKE ALL ON FUNCTION @extschema@.idem_grantor(aclitem[], oid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grantor(aclitem[], oid) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grantor(aclitem[], oid) IS
'The role whose grants a REVOKE of the current role takes from this object of ours, for idem_revoke; NULL if that is not certain.';

-- The schema is not the extension's, so USAGE on it is the caller's to give.
CREATE FUNCTION @extschema@.idem_grant(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON SCHEMA %s TO %s',
			e.extnamespace::regnamespace, $1))
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
			AND NOT has_schema_privilege($1::oid, e.extnamespace, 'USAGE');
	SELECT @extschema@.idem_grant_as_owner($1);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_grant(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grant(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grant(regrole) IS
'Gives a role the application''s part of the interface: to execute its functions, and USAGE on their types and schema. Not the tables, and not the functions for administrators. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_grant_monitor(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT USAGE ON SCHEMA %s TO %s',
			e.extnamespace::regnamespace, $1))
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
			AND NOT has_schema_privilege($1::oid, e.extnamespace, 'USAGE');
	SELECT @extschema@.idem_grant_monitor_as_owner($1);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_grant_monitor(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grant_monitor(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grant_monitor(regrole) IS
'Gives a role what watching takes: view idem_stats, idem_metric_samples, idem_metrics and idem_health, and USAGE on their schema; no key, scope or payload. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_revoke(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	-- What the caller has granted without our help, too.
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM (
			SELECT a FROM @extschema@.idem_application_functions() AS a
			UNION ALL
			SELECT m FROM @extschema@.idem_monitor_functions() AS m
		) AS f (f)
		JOIN pg_proc AS p ON p.oid = f::oid
		CROSS JOIN LATERAL aclexplode(p.proacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor <> p.proowner
			AND a.grantor = @extschema@.idem_grantor(p.proacl, p.proowner);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE USAGE ON TYPE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_application_types() AS f
		JOIN pg_type AS t ON t.oid = f::oid
		CROSS JOIN LATERAL aclexplode(t.typacl) AS a
		WHERE a.grantee = $1::oid
			AND a.grantor <> t.typowner
			AND a.grantor = @extschema@.idem_grantor(t.typacl, t.typowner);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE SELECT ON TABLE %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_monitor_views() AS f
		JOIN pg_class AS c ON c.oid = f::oid
		CROSS JOIN LATERAL aclexplode(c.relacl) AS a
		WHERE a.grantee = $1::oid
			AND a.privilege_type = 'SELECT'
			AND a.grantor <> c.relowner
			AND a.grantor = @extschema@.idem_grantor(c.relacl, c.relowner);
	SELECT @extschema@.idem_revoke_as_owner($1);
	SELECT @extschema@.idem_warn_of_rest($1,
			bool_or(has_function_privilege($1::oid, f::oid, 'EXECUTE')))
		FROM (
			SELECT a FROM @extschema@.idem_application_functions() AS a
			UNION ALL
			SELECT m FROM @extschema@.idem_monitor_functions() AS m
		) AS f (f);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_revoke(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_revoke(regrole) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_revoke(regrole) IS
'Takes back what idem_grant and idem_grant_monitor gave, whoever called it, and what the current role granted without it; but not USAGE on the schema, which the role may need for other things. Warns if the grantee can still execute functions. Raises 42501, 22004, 42704.';

--
-- All is there: see to it that it is as it was written
--

-- The owner of the schema need not be the installer, or sits in another
-- session, where he could give its name to a schema of his own half-way through.
-- So nothing of ours has been called until now; and what has been put together
-- must lie in the schema that was checked, and refer to nothing but ourselves
-- and the server.
DO $check$
DECLARE
	stray text;
BEGIN
	WITH RECURSIVE extension AS (
		SELECT e.oid, e.extnamespace
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
	),
	part (classid, objid) AS (
		SELECT d.classid, d.objid
		FROM extension AS e
		JOIN pg_depend AS d
			ON d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
			AND d.refobjid = e.oid
		WHERE d.deptype = 'e'::"char"
		UNION
		-- Indexes, rules, row types and the like
		SELECT d.classid, d.objid
		FROM part AS p
		JOIN pg_depend AS d
			ON d.refclassid = p.classid
			AND d.refobjid = p.objid
		WHERE d.deptype = ANY ('{a,i}'::"char"[])
	)
	SELECT format('%s refers to %s',
			pg_describe_object(d.classid, d.objid, d.objsubid),
			pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
		INTO stray
		FROM part AS p
		JOIN pg_depend AS d
			ON d.classid = p.classid
			AND d.objid = p.objid
		WHERE d.deptype = 'n'::"char"
			-- What initdb has made, and PL/pgSQL wherever it comes from
			AND d.refobjid >= 16384::oid
			AND d.refclassid <> 'pg_catalog.pg_language'::regclass::oid
			AND CASE WHEN d.refclassid = 'pg_catalog.pg_namespace'::regclass::oid
				THEN d.refobjid <> (SELECT e.extnamespace FROM extension AS e)
				ELSE NOT EXISTS (SELECT FROM part AS r
					WHERE r.classid = d.refclassid
						AND r.objid = d.refobjid)
				END
		LIMIT 1;
	IF FOUND THEN
		RAISE EXCEPTION USING
			ERRCODE = 'insufficient_privilege',
			MESSAGE = 'extension "idempotency" has been interfered with while it was installed',
			DETAIL = format('%s.', stray),
			HINT = 'Install it into a schema where nobody else may create objects.';
	END IF;
END
$check$;

-- Default privileges, lying in wait, may have granted more than this script:
-- what it did not name is taken back.  Then the installer gets what the owner
-- of the database has, unless it is a superuser, who owns all of this.
--
-- What the owner of the database grants, pg_database_owner is noted to have
-- granted, and a dump has it do so again, which takes USAGE on the schema.  So
-- it gets that, if the installer could give it; but not from a stranger who owns
-- the schema, lest it has it only where a superuser has restored a dump.
--
-- That is not noted as what the extension begins with, but dumped (see
-- access.c); nor is what concerns the row types of tables, where pg_dump does
-- not expect it.
--
-- This function is in a place where no other session can put another.
CREATE FUNCTION pg_temp.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME';
DO $grants$
DECLARE
	is_noted bool;
	statement text;
BEGIN
	FOR is_noted, statement IN
		WITH extension AS (
			SELECT e.oid, e.extowner, e.extnamespace
			FROM pg_extension AS e
			WHERE e.extname = 'idempotency'::name
		),
		object (kind, name, label, privilege, acl, owner) AS (
			SELECT 'FUNCTION', p.proname, p.oid::regprocedure::text, 'EXECUTE',
				coalesce(p.proacl, acldefault('f', p.proowner)), p.proowner
			FROM extension AS e
			JOIN pg_depend AS d ON d.refobjid = e.oid
			JOIN pg_proc AS p ON p.oid = d.objid
			WHERE d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
				AND d.classid = 'pg_catalog.pg_proc'::regclass::oid
				AND p.pronamespace <> pg_my_temp_schema()
			UNION ALL
			SELECT CASE WHEN c.relkind = 'S'::"char" THEN 'SEQUENCE' ELSE 'TABLE' END,
				c.relname, c.oid::regclass::text, 'SELECT',
				coalesce(c.relacl, acldefault(
					CASE WHEN c.relkind = 'S'::"char" THEN 's' ELSE 'r' END::"char",
					c.relowner)), c.relowner
			FROM extension AS e
			JOIN pg_depend AS d ON d.refobjid = e.oid
			JOIN pg_class AS c ON c.oid = d.objid
			WHERE d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
				AND d.classid = 'pg_catalog.pg_class'::regclass::oid
				-- Of composite types there is only the type.
				AND c.relkind <> 'c'::"char"
			UNION ALL
			SELECT 'TYPE', t.typname, t.oid::regtype::text, 'USAGE',
				coalesce(t.typacl, acldefault('T', t.typowner)), t.typowner
			FROM extension AS e
			JOIN pg_depend AS d ON d.refobjid = e.oid
			JOIN pg_type AS t ON t.oid = d.objid
			JOIN pg_class AS c ON c.oid = t.typrelid
			WHERE d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
				AND d.classid = 'pg_catalog.pg_type'::regclass::oid
				-- Of tables there is only the table.
				AND c.relkind = 'c'::"char"
		)
		SELECT true, format('REVOKE %s%s ON %s %s FROM %s CASCADE',
				CASE WHEN named.is_named THEN 'GRANT OPTION FOR ' END, a.privilege_type, o.kind, o.label,
				CASE WHEN a.grantee = 0::oid THEN 'PUBLIC'
					ELSE a.grantee::regrole::text END)
		FROM object AS o
		CROSS JOIN LATERAL aclexplode(o.acl) AS a
		CROSS JOIN LATERAL (SELECT a.privilege_type = o.privilege AND CASE
				WHEN a.grantee = 'pg_database_owner'::regrole::oid THEN true
				WHEN a.grantee = 'pg_monitor'::regrole::oid
				THEN o.name = ANY (ARRAY[
					'idem_stats', 'idem_stats_data', 'idem_metric_samples', 'idem_metrics', 'idem_health', 'idem_stuck']::name[])
				ELSE false END) AS named (is_named)
		WHERE a.grantee <> o.owner
			AND NOT (named.is_named AND (NOT a.is_grantable
				OR a.grantee = 'pg_database_owner'::regrole::oid))
		UNION ALL
		SELECT false, format('GRANT %s ON %s %s TO %s WITH GRANT OPTION',
				o.privilege, o.kind, string_agg(o.label, ', '::text), r.oid::regrole)
		FROM object AS o
		CROSS JOIN extension AS e
		JOIN pg_roles AS r ON r.oid = e.extowner
		WHERE NOT r.rolsuper
		GROUP BY o.kind, o.privilege, r.oid
		UNION ALL
		SELECT false, format('GRANT USAGE ON SCHEMA %s TO pg_database_owner', e.extnamespace::regnamespace)
		FROM extension AS e
		JOIN pg_namespace AS n ON n.oid = e.extnamespace
		JOIN pg_roles AS r ON r.oid = n.nspowner
		JOIN pg_database AS d ON d.datname = current_database()
		WHERE (r.rolsuper OR r.oid = e.extowner OR r.oid = d.datdba)
			AND has_schema_privilege(e.extowner, e.extnamespace, 'USAGE WITH GRANT OPTION')
			AND NOT has_schema_privilege('pg_database_owner', e.extnamespace, 'USAGE')
		UNION ALL
		-- A stranger's column of such a type would be in the way of changes.
		SELECT false, format('REVOKE ALL ON TYPE %s FROM PUBLIC', c.reltype::regtype)
		FROM extension AS e
		JOIN pg_depend AS d ON d.refobjid = e.oid
		JOIN pg_class AS c ON c.oid = d.objid
		WHERE d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
			AND d.classid = 'pg_catalog.pg_class'::regclass::oid
			AND c.relkind = ANY ('{r,v}'::"char"[])
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
