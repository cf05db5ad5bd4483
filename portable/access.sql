-- Grants.  Without a library, the names of the role and of the schema are not
-- locked.  If one of them is renamed meanwhile, the grant fails, or the renamed
-- object gets it.

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
