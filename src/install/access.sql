
--
-- Access: the privileges of application roles
--

CREATE FUNCTION @extschema@.idem_application_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 24
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_request_hash', 'idem_canonical_json',
			'idem_key_is_valid', 'idem_claim', 'idem_complete', 'idem_checkpoint',
			'idem_claim_many', 'idem_complete_many', 'idem_resume',
			'idem_heartbeat', 'idem_fail', 'idem_release', 'idem_lookup', 'idem_run',
			'idem_try_advance', 'idem_toggle', 'idem_set', 'idem_is_active', 'idem_action_states',
			'idem_try_advance_many', 'idem_set_many',
			'idem_try_append', 'idem_last_client_seq', 'idem_once', 'idem_once_many', 'idem_once_at',
			'idem_publish', 'idem_publish_many'
		]::name[]);
END;
COMMENT ON FUNCTION @extschema@.idem_application_functions() IS
'The functions that idem_grant grants to an application role.';

CREATE FUNCTION @extschema@.idem_relay_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 10
BEGIN ATOMIC
	SELECT d.objid::regprocedure
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_proc'::regclass
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND starts_with(p.proname, 'idem_outbox_');
END;
COMMENT ON FUNCTION @extschema@.idem_relay_functions() IS
'The functions that idem_grant_relay grants to the role of a relay.';

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
COMMENT ON FUNCTION @extschema@.idem_application_types() IS
'The types that idem_grant grants to an application role, so that it can create functions and views with these result types.';

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
		AND d.deptype = 'e'
	JOIN pg_proc AS p ON p.oid = d.objid
	WHERE e.extname = 'idempotency'
		AND p.pronamespace = e.extnamespace
		AND p.proname = ANY (ARRAY[
			'idem_stats_data', 'idem_metric_samples', 'idem_metrics', 'idem_health',
			'idem_outbox_blocked'
		]::name[]);
END;
COMMENT ON FUNCTION @extschema@.idem_monitor_functions() IS
'The functions that idem_grant_monitor grants to a monitoring role.';

CREATE FUNCTION @extschema@.idem_granted_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 50
BEGIN ATOMIC
	SELECT f FROM @extschema@.idem_application_functions() AS f
	UNION
	SELECT f FROM @extschema@.idem_relay_functions() AS f
	UNION
	SELECT f FROM @extschema@.idem_monitor_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_granted_functions() IS
'All functions that idem_revoke revokes.';

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
COMMENT ON FUNCTION @extschema@.idem_monitor_views() IS
'The views that idem_grant_monitor grants to a monitoring role.';

-- The statements GRANT and REVOKE contain names. The locks keep the schema and
-- the role from being renamed until they have run. Otherwise another schema or
-- role that gets the name could get the privileges.
CREATE FUNCTION @extschema@.idem_check_grantee(grantee regrole)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_check_grantee(regrole) IS
'Raises an error unless idem_grant, idem_grant_relay, idem_grant_monitor and idem_revoke can work on this role. Until the transaction ends, neither this role nor the extension''s schema can be renamed.';

CREATE FUNCTION @extschema@.idem_execute_grant(statement text)
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_execute_grant(text) IS
'Runs a GRANT or REVOKE with the caller''s rights, for idem_grant, idem_grant_relay, idem_grant_monitor and idem_revoke. NULL does nothing. Raises 42601 for any other statement.';

-- The functions below can be called by a superuser, or run with the rights of
-- one, in a schema that might belong to another role. Therefore their bodies are
-- parsed when they are created.

-- The functions' owner is the grantor, whichever administrator calls. So the
-- privileges stay when that administrator is dropped, any other one can revoke
-- them, and a dump can be restored if the administrator has no privileges there.

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
COMMENT ON FUNCTION @extschema@.idem_grant_as_owner(regrole) IS
'The part of idem_grant that runs with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_grant_relay_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(format('GRANT EXECUTE ON FUNCTION %s TO %s',
			string_agg(f::text, ', '::text), $1))
		FROM @extschema@.idem_relay_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_grant_relay_as_owner(regrole) IS
'The part of idem_grant_relay that runs with the rights of the functions'' owner.';

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
COMMENT ON FUNCTION @extschema@.idem_grant_monitor_as_owner(regrole) IS
'The part of idem_grant_monitor that runs with the rights of the functions'' owner.';

-- Does not revoke privileges with grant option, or the owner's own, so that
-- administrators cannot revoke each other's rights.
CREATE FUNCTION @extschema@.idem_revoke_as_owner(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_granted_functions() AS f
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
COMMENT ON FUNCTION @extschema@.idem_revoke_as_owner(regrole) IS
'The part of idem_revoke that runs with the rights of the functions'' owner.';

CREATE FUNCTION @extschema@.idem_warn_of_rest(grantee regrole, remaining boolean)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF remaining AND grantee IS NOT NULL THEN
		RAISE WARNING USING ERRCODE = '01006',
			MESSAGE = format('role "%s" can still execute functions of extension "idempotency"', grantee),
			HINT = 'It administers the extension, is a member of a role that can execute them, or has them from another grantor, who can revoke that.';
	END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.idem_warn_of_rest(regrole, boolean) IS
'Warns the caller of idem_revoke about privileges that it could not revoke.';

-- A REVOKE revokes the grants of one role. For a superuser that is the owner. For
-- other roles it is the first role with the grant option that the server finds,
-- beginning with the current one. If there are several others, it is unknown.
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
COMMENT ON FUNCTION @extschema@.idem_grantor(aclitem[], oid) IS
'The role whose grants on this object a REVOKE by the current role revokes, for idem_revoke; NULL if that is not certain.';

-- The schema is not part of the extension, so the caller grants USAGE on it.
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
COMMENT ON FUNCTION @extschema@.idem_grant(regrole) IS
'Grants a role the functions for applications, and USAGE on their types and schema. It does not grant the tables, the functions idem_outbox_* for relays, or the functions for administrators. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_grant_relay(grantee regrole)
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
	SELECT @extschema@.idem_grant_relay_as_owner($1);
END;
COMMENT ON FUNCTION @extschema@.idem_grant_relay(regrole) IS
'Grants the role of a relay all idem_outbox_* functions, which read, acknowledge and requeue messages, and USAGE on their schema; nothing else. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

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
COMMENT ON FUNCTION @extschema@.idem_grant_monitor(regrole) IS
'Grants a role the view and functions for monitoring: idem_stats, idem_metric_samples, idem_metrics, idem_health and idem_outbox_blocked, and USAGE on their schema. They show no key, scope or payload. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_revoke(grantee regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_grantee($1);
	-- Also revoke what the caller has granted without these functions.
	SELECT @extschema@.idem_execute_grant(CASE WHEN count(*) > 0::int8
			THEN format('REVOKE EXECUTE ON FUNCTION %s FROM %s', string_agg(f::text, ', '::text), $1) END)
		FROM @extschema@.idem_granted_functions() AS f
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
		FROM @extschema@.idem_granted_functions() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_revoke(regrole) IS
'Revokes what idem_grant, idem_grant_relay and idem_grant_monitor have granted, by any caller, and what the current role has granted by other means; but not USAGE on the schema, which the role might need for other objects. Warns if the grantee can still execute functions. Raises 42501, 22004, 42704.';
