-- Grants.  Without a library, the names of the role and of the schema are not
-- locked.  If one of them is renamed meanwhile, the grant fails, or the renamed
-- object gets it.
--
-- A dump that is restored without privileges leaves all functions to PUBLIC, except
-- that nobody has USAGE on their schema, and default privileges can leave all objects to
-- other roles.  So each grant revokes these first.

--@ helpers
CREATE FUNCTION @S@.idem_p_is_owner(role oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT role <> 0 AND bool_or(pg_has_role(role, o.owner, 'MEMBER'))
	FROM (
		SELECT e.extowner FROM @S@.idem_p_extension AS e
		UNION ALL
		SELECT p.extowner FROM pg_extension AS p WHERE p.extname = 'idempotency' AND p.extnamespace = '@S@'::regnamespace
		UNION ALL
		SELECT 'pg_database_owner'::regrole::oid
	) AS o (owner)
$$;
COMMENT ON FUNCTION @S@.idem_p_is_owner(oid) IS
'Whether a role is the owner of the installation or of the database, or a member of these; false for PUBLIC, which is 0.';

-- A role that can execute the helpers, idem_p_*, and grant that, is an administrator.  If
-- it cannot grant that, it can have all functions from ALTER DEFAULT PRIVILEGES, which
-- apply when a dump is restored.  But it can also be the application's role, or an
-- administrator, so idem_health() reports it, and only its operator can revoke that.
CREATE FUNCTION @S@.idem_p_open_functions()
RETURNS TABLE (label text, grantee oid)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
	WITH granted (label, name, grantee, is_grantable) AS MATERIALIZED (
		SELECT p.oid::regprocedure::text, p.proname, a.grantee, a.is_grantable
		FROM @S@.idem_p_extension AS e
		JOIN @S@.idem_p_member AS d ON d.classid = 'pg_proc'::regclass
		JOIN pg_proc AS p ON p.oid = d.objid AND p.proowner = e.extowner
		CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
		WHERE NOT @S@.idem_p_is_owner(a.grantee))
	SELECT DISTINCT g.label, g.grantee FROM granted AS g
	WHERE g.grantee = 0 OR g.grantee IN (SELECT h.grantee FROM granted AS h WHERE starts_with(h.name::text, 'idem_p_') AND NOT h.is_grantable)
$$;
COMMENT ON FUNCTION @S@.idem_p_open_functions() IS
'The functions that PUBLIC can execute, and those of roles that can execute all of them but not grant that; and these roles, 0 for PUBLIC.';

-- Only the owner writes the tables and views.  A role that can has this from default
-- privileges.  A role that can only read them can have been granted that on purpose.
CREATE FUNCTION @S@.idem_p_open_tables()
RETURNS TABLE (label text, grantee oid)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT DISTINCT c.oid::regclass::text, a.grantee
	FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
	WHERE c.relnamespace = '@S@'::regnamespace AND c.relkind IN ('r', 'S', 'v') AND starts_with(c.relname::text, 'idem_')
		AND NOT @S@.idem_p_is_owner(a.grantee)
		AND (a.privilege_type NOT IN ('SELECT', 'MAINTAIN')
			OR (a.grantee = 0 AND c.relname NOT IN ('idem_p_extension', 'idem_p_member'))
			OR (c.relkind = 'r' AND starts_with(c.relname::text, 'idem_p_') AND NOT a.is_grantable))
$$;
COMMENT ON FUNCTION @S@.idem_p_open_tables() IS
'The tables, views and sequences that a role can write that is not the owner, or that PUBLIC can read, and the tables of the portable edition alone that any other role can read; and these roles, 0 for PUBLIC.';

CREATE FUNCTION @S@.idem_p_close_all()
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	open_object record;
BEGIN
	IF NOT EXISTS (SELECT FROM @S@.idem_p_installation) THEN
		PERFORM @S@.idem_p_complete_installation();
	END IF;
	FOR open_object IN
		SELECT format('FUNCTION %s', string_agg(f.label, ', ')) AS labels, f.grantee
			FROM @S@.idem_p_open_functions() AS f WHERE f.grantee = 0 GROUP BY f.grantee
		UNION ALL
		SELECT format('TABLE %s', string_agg(t.label, ', ')), t.grantee FROM @S@.idem_p_open_tables() AS t GROUP BY t.grantee
	LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', open_object.labels,
			CASE WHEN open_object.grantee = 0 THEN 'PUBLIC' ELSE open_object.grantee::regrole::text END);
		GRANT SELECT ON @S@.idem_p_extension, @S@.idem_p_member TO PUBLIC;
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_close_all() IS
'Revokes functions from PUBLIC, which has them after a dump was restored without privileges, and what idem_p_open_tables() finds. Makes the rows of the installation first, so that no call makes them in a long transaction.';

--@ idem_check_grantee plpgsql
DECLARE
	hint CONSTANT text := 'Pass the name of a role, as in ''web''::regrole.';
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	ELSIF grantee IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "grantee" must not be null', HINT = hint;
	ELSIF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.oid = grantee::oid) THEN
		RAISE EXCEPTION USING ERRCODE = '42704', MESSAGE = format('role "%s" does not exist', grantee), HINT = hint;
	END IF;
	PERFORM @S@.idem_p_close_all();
END

--@ idem_execute_grant plpgsql invoker
BEGIN
	IF pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'on' THEN
		RAISE EXCEPTION USING ERRCODE = '25006',
			MESSAGE = CASE WHEN pg_catalog.pg_is_in_recovery() THEN 'cannot execute an idempotency function that writes during recovery'
				ELSE 'cannot execute an idempotency function that writes in a read-only transaction' END;
	ELSIF statement IS NULL THEN
		RETURN;
	-- Names in quotes can have any character.
	ELSIF pg_catalog.regexp_replace(statement, '"([^"]|"")*"', 'name', 'g')
		OPERATOR(pg_catalog.!~) '^(GRANT|REVOKE) .* ON (FUNCTION|TABLE|TYPE|SCHEMA|SEQUENCE) [^;]*$'
	THEN
		RAISE EXCEPTION USING ERRCODE = '42601', MESSAGE = 'statement is neither GRANT nor REVOKE of privileges';
	END IF;
	EXECUTE statement;
END
