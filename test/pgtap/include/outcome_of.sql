--
-- Functions that report how a statement ends
--
-- The calls that attempt() has seen fail.
CREATE TEMP TABLE errors (
	call text,
	key text,
	sqlstate text,
	message text,
	detail text,
	hint text,
	context text
);

CREATE FUNCTION pg_temp.locked_tables() RETURNS text
LANGUAGE sql
SET search_path = pg_catalog
RETURN (
	SELECT coalesce(string_agg(DISTINCT c.relname, ', '), '')
	FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
	WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
		AND l.mode <> 'AccessShareLock' AND c.relkind = 'r'
		AND c.oid IN (SELECT objid FROM pg_depend
			WHERE classid = 'pg_class'::regclass AND deptype = 'e')
);

-- "allowed", or the SQLSTATE and the message of the error, and our tables that
-- the statement locks more strongly than a reader does.  It gets a scope, a
-- key, a claim token and a message's id as $1 to $4: an error's context shows
-- the statement, and must not show the key.  The effects of the statement, and
-- of the statements to be executed before it, are rolled back.
--
-- throws_ok() cannot do this.  A role that must not write pgTAP's tables, or a
-- read-only transaction, raises the expected error in throws_ok() itself.
CREATE FUNCTION pg_temp.attempt(role name, statement text,
	before text DEFAULT '', scope text DEFAULT 'contract',
	key text DEFAULT 'order-number-some', token bigint DEFAULT NULL,
	message bigint DEFAULT NULL, OUT outcome text, OUT tables text)
LANGUAGE plpgsql AS $$
DECLARE
	e errors;
	prepared boolean := false;
BEGIN
	EXECUTE before;
	EXECUTE format('SET LOCAL ROLE %I', role);
	prepared := true;
	EXECUTE statement USING scope, key, token, message;
	RESET ROLE;
	tables := pg_temp.locked_tables();
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS e.message = MESSAGE_TEXT,
		e.detail = PG_EXCEPTION_DETAIL, e.hint = PG_EXCEPTION_HINT,
		e.context = PG_EXCEPTION_CONTEXT;
	outcome := CASE WHEN SQLSTATE = 'ZZ000' THEN 'allowed'
		WHEN NOT prepared THEN 'not prepared: ' || SQLERRM
		ELSE SQLSTATE || ': ' || SQLERRM END;
	IF prepared AND SQLSTATE <> 'ZZ000' AND statement LIKE 'SELECT idem\_%' THEN
		INSERT INTO errors VALUES (substr(statement, 8), key, SQLSTATE,
			e.message, e.detail, e.hint, e.context);
	END IF;
END
$$;

CREATE FUNCTION pg_temp.outcome_of(role name, statement text) RETURNS text
LANGUAGE sql AS $$
	SELECT outcome FROM pg_temp.attempt(role, statement)
$$;

-- The SQLSTATE that a call ends with, 00000 if it succeeds.
CREATE FUNCTION pg_temp.sqlstate_of(call text, before text DEFAULT '',
	scope text DEFAULT 'contract', key text DEFAULT 'order-number-some',
	token bigint DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$
	SELECT CASE WHEN outcome = 'allowed' THEN '00000'
		WHEN outcome LIKE 'not prepared: %' THEN outcome
		ELSE left(outcome, 5) END
	FROM pg_temp.attempt(current_user, 'SELECT ' || call, before, scope, key,
		token)
$$;
