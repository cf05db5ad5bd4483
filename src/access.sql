
--
-- Access: what an application role may do
--

CREATE FUNCTION @extschema@.idem_application_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 30
BEGIN ATOMIC
	SELECT d.objid::pg_catalog.regprocedure
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d
		ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
		AND d.refobjid OPERATOR(pg_catalog.=) e.oid
		AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
	JOIN pg_catalog.pg_proc AS p ON p.oid OPERATOR(pg_catalog.=) d.objid
	WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'
		AND p.proname OPERATOR(pg_catalog.=) ANY (ARRAY[
			'idem_request_hash', 'idem_canonical_json',
			'idem_key_is_valid', 'idem_claim', 'idem_complete', 'idem_checkpoint',
			'idem_heartbeat', 'idem_fail', 'idem_release', 'idem_lookup', 'idem_run',
			'idem_try_advance', 'idem_toggle', 'idem_set', 'idem_is_active',
			'idem_try_append', 'idem_last_client_seq', 'idem_once', 'idem_once_many',
			'idem_publish', 'idem_outbox_take', 'idem_outbox_ack', 'idem_outbox_nack',
			'idem_outbox_requeue'
		]::pg_catalog.name[]);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_application_functions() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_application_functions() TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_application_functions() IS
'The functions that idem_grant gives to an application role.';

CREATE FUNCTION @extschema@.idem_application_types()
RETURNS SETOF regtype
LANGUAGE sql STABLE PARALLEL SAFE COST 10000 ROWS 7
BEGIN ATOMIC
	SELECT d.objid::pg_catalog.regtype
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d
		ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
		AND d.refobjid OPERATOR(pg_catalog.=) e.oid
		AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_type'::pg_catalog.regclass
	JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) d.objid
	WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'
		AND t.typname OPERATOR(pg_catalog.=) ANY (ARRAY[
			'idem_claim_result', 'idem_lookup_result', 'idem_response', 'idem_run_result',
			'idem_advance_result', 'idem_action_result', 'idem_append_result'
		]::pg_catalog.name[]);
END;
REVOKE ALL ON FUNCTION @extschema@.idem_application_types() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_application_types() TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_application_types() IS
'The types that idem_grant gives to an application role, so that it can create functions and views that return what ours return.';

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
	IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r
			WHERE r.oid OPERATOR(pg_catalog.=) grantee::pg_catalog.oid) THEN
		RAISE EXCEPTION USING ERRCODE = 'undefined_object',
			MESSAGE = pg_catalog.format('role "%s" does not exist', grantee);
	END IF;
END
$$;
REVOKE ALL ON FUNCTION @extschema@.idem_check_grantee(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_check_grantee(regrole) TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_check_grantee(regrole) IS
'Raises an error unless idem_grant and idem_revoke can work on this role.';

-- These two run with the caller's rights, which may be a superuser's, in a
-- schema that may belong to another role: hence the qualified names.

CREATE FUNCTION @extschema@.idem_grant(grantee regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	-- By its present name: another role may have made a schema of the old one.
	home pg_catalog.regnamespace;
	functions pg_catalog.text;
	types pg_catalog.text;
BEGIN
	SELECT e.extnamespace INTO STRICT home
		FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name;
	EXECUTE pg_catalog.format('SELECT %s.idem_check_grantee($1)', home) USING grantee;
	IF NOT pg_catalog.has_schema_privilege(grantee::pg_catalog.oid, home::pg_catalog.oid, 'USAGE') THEN
		EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', home, grantee);
	END IF;
	EXECUTE pg_catalog.format('SELECT pg_catalog.string_agg(f::pg_catalog.text, '', '') FROM %s.idem_application_functions() AS f', home)
		INTO functions;
	EXECUTE pg_catalog.format('SELECT pg_catalog.string_agg(t::pg_catalog.text, '', '') FROM %s.idem_application_types() AS t', home)
		INTO types;
	EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s', functions, grantee);
	EXECUTE pg_catalog.format('GRANT USAGE ON TYPE %s TO %s', types, grantee);
END
$$;
REVOKE ALL ON FUNCTION @extschema@.idem_grant(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_grant(regrole) TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_grant(regrole) IS
'Gives a role the application''s part of the interface: to execute its functions, and USAGE on their types and schema. Not the tables, and not the functions for administrators. For the role that installed the extension, the database owner and superusers. Raises 42501 for others, 22004 for NULL, 42704 for a role that does not exist.';

CREATE FUNCTION @extschema@.idem_revoke(grantee regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	home pg_catalog.regnamespace;
	functions pg_catalog.text;
	types pg_catalog.text;
	remaining pg_catalog.bool;
BEGIN
	SELECT e.extnamespace INTO STRICT home
		FROM pg_catalog.pg_extension AS e
		WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency'::pg_catalog.name;
	EXECUTE pg_catalog.format('SELECT %s.idem_check_grantee($1)', home) USING grantee;
	EXECUTE pg_catalog.format('SELECT pg_catalog.string_agg(f::pg_catalog.text, '', '') FROM %s.idem_application_functions() AS f', home)
		INTO functions;
	EXECUTE pg_catalog.format('SELECT pg_catalog.string_agg(t::pg_catalog.text, '', '') FROM %s.idem_application_types() AS t', home)
		INTO types;
	EXECUTE pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM %s', functions, grantee);
	EXECUTE pg_catalog.format('REVOKE USAGE ON TYPE %s FROM %s', types, grantee);
	EXECUTE pg_catalog.format('SELECT pg_catalog.bool_or(pg_catalog.has_function_privilege($1, f::pg_catalog.oid, ''EXECUTE'')) FROM %s.idem_application_functions() AS f', home)
		INTO remaining USING grantee::pg_catalog.oid;
	IF remaining THEN
		RAISE WARNING USING ERRCODE = '01006',
			MESSAGE = pg_catalog.format('role "%s" may still execute functions of extension "idempotency"', grantee),
			HINT = 'It is a member of a role that may, or another role made the grant: call idem_revoke() as that role.';
	END IF;
END
$$;
REVOKE ALL ON FUNCTION @extschema@.idem_revoke(regrole) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_revoke(regrole) TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_revoke(regrole) IS
'Takes back what idem_grant gave, but for USAGE on the schema, which the role may need for other things. Only what the current role granted; warns if the grantee can still execute functions. Raises 42501, 22004, 42704.';
