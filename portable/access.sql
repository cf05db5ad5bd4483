-- Grants.  Without a library, the names of the role and of the schema are not
-- locked.  If one of them is renamed meanwhile, the grant fails, or the renamed
-- object gets it.
--
-- A dump that is restored without privileges leaves all functions to PUBLIC, except
-- that nobody has USAGE on their schema.  So each grant revokes these first.

--@ helpers
CREATE FUNCTION @S@.idem_p_open_functions()
RETURNS SETOF regprocedure
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT p.oid::regprocedure
	FROM @S@.idem_p_extension AS e
	JOIN @S@.idem_p_member AS d ON d.classid = 'pg_proc'::regclass
	JOIN pg_proc AS p ON p.oid = d.objid AND p.proowner = e.extowner
	WHERE EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a WHERE a.grantee = 0)
$$;
COMMENT ON FUNCTION @S@.idem_p_open_functions() IS
'The functions that PUBLIC can execute.';

-- Only the owner writes the tables.  A role that can has this from ALTER DEFAULT
-- PRIVILEGES, which apply when a dump is restored.  A role that can only read them
-- can have been granted that on purpose.
CREATE FUNCTION @S@.idem_p_open_tables()
RETURNS TABLE (label text, grantee oid)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT DISTINCT c.oid::regclass::text, a.grantee
	FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
	WHERE c.relnamespace = '@S@'::regnamespace AND c.relkind IN ('r', 'S') AND starts_with(c.relname::text, 'idem_')
		AND (a.grantee = 0 OR ((starts_with(c.relname::text, 'idem_p_') OR a.privilege_type NOT IN ('SELECT', 'MAINTAIN'))
			AND a.grantee <> ALL (ARRAY[c.relowner, 'pg_database_owner'::regrole::oid,
				(SELECT d.datdba FROM pg_database AS d WHERE d.datname = current_database())])))
$$;
COMMENT ON FUNCTION @S@.idem_p_open_tables() IS
'The tables and sequences that a role can write that is not the owner, or that PUBLIC can read, and the tables of the portable edition alone that any other role can read; and these roles, 0 for PUBLIC.';

CREATE FUNCTION @S@.idem_p_close_all()
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	names CONSTANT text := (SELECT string_agg(f::text, ', ') FROM @S@.idem_p_open_functions() AS f);
	open_table record;
BEGIN
	IF names IS NOT NULL THEN
		EXECUTE 'REVOKE ALL ON FUNCTION ' || names || ' FROM PUBLIC';
		GRANT SELECT ON @S@.idem_p_extension, @S@.idem_p_member TO PUBLIC;
	END IF;
	FOR open_table IN SELECT t.label, t.grantee FROM @S@.idem_p_open_tables() AS t LOOP
		EXECUTE format('REVOKE ALL ON %s FROM %s CASCADE', open_table.label,
			CASE WHEN open_table.grantee = 0 THEN 'PUBLIC' ELSE open_table.grantee::regrole::text END);
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_close_all() IS
'Revokes the functions from PUBLIC, which has them after a dump was restored without privileges, and what idem_p_open_tables() finds.';

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
