-- The guard of a shard: which scopes live here.
--
--	psql -v application=app -v slots='{0,4,8}' -f shard.sql
--
-- Beside the extension, once on each shard, as a superuser.  "application" is the
-- role that the router and the application connect as, "slots" are those that
-- live here at the beginning, none for a shard that is added later.
--
-- Every call that comes through the router passes idem_pin_scope(scope) in its own
-- transaction, and so must every transaction of a client that connects here
-- directly.  It holds the scope where it is until that transaction ends, and
-- refuses a scope that lives elsewhere: a router with an old, wrong or
-- incomplete map gets an error, never a second record of the same key.

\set ON_ERROR_STOP on
-- A database's owner can define functions that an unqualified name would find.
SET search_path = pg_catalog, pg_temp;
BEGIN;
CREATE SCHEMA idem_guard;

-- 256 slots, by the first byte of a hash that is the same everywhere.
CREATE FUNCTION idem_guard.slot(scope text)
RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN get_byte(sha256(convert_to(scope, 'UTF8')), 0);

-- A scope of its own place has a row; the others follow their slot's, whose
-- scope is ''.  No row: elsewhere.
CREATE TABLE idem_guard.places (
	slot int NOT NULL CHECK (slot BETWEEN 0 AND 255),
	scope text COLLATE "C" NOT NULL DEFAULT '',
	here boolean NOT NULL,
	PRIMARY KEY (slot, scope)
);
INSERT INTO idem_guard.places (slot, here)
SELECT s, true FROM unnest(:'slots'::int[]) AS s;

-- Whether it lives here as the statement that asks has it, whose snapshot it uses.
CREATE FUNCTION idem_guard.seen(scope text)
RETURNS text
LANGUAGE plpgsql STABLE STRICT PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	is_here boolean;
BEGIN
	SELECT p.here INTO is_here
	FROM idem_guard.places AS p
	WHERE p.slot = idem_guard.slot(seen.scope) AND p.scope IN ('', seen.scope)
	ORDER BY p.scope DESC
	LIMIT 1;
	IF is_here IS NOT TRUE THEN
		RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
			MESSAGE = format('scope "%s" does not live on this shard', left(scope, 40)),
			DETAIL = 'It is being moved, has been moved, or was looked for in the wrong place. Nothing has been done.',
			HINT = 'Ask the router again: SELECT idem_shard(scope).',
			SCHEMA = 'idem_guard';        -- by which clients know it
	END IF;
	RETURN scope;
END
$$;

CREATE FUNCTION idem_guard.seen(scopes text[])
RETURNS text[]
LANGUAGE plpgsql STABLE STRICT PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idem_guard.seen(scope) FROM unnest(scopes) AS scope;
	RETURN scopes;
END
$$;

-- The lock comes first, so seen() sees what whoever moves the scope has
-- committed.  Not so in a transaction with an older snapshot.
CREATE FUNCTION idem_guard.pass(scope text)
RETURNS text
LANGUAGE plpgsql VOLATILE STRICT PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF current_setting('transaction_isolation') <> 'read committed' THEN
		RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
			MESSAGE = 'a scope of a shard cannot be used under this isolation level',
			DETAIL = format('The transaction is %s: its snapshot may be older than the scope''s move to another shard.',
				current_setting('transaction_isolation')),
			HINT = 'Use READ COMMITTED.';
	END IF;
	PERFORM pg_advisory_xact_lock_shared(1229211981, idem_guard.slot(scope));
	RETURN idem_guard.seen(scope);
END
$$;

CREATE FUNCTION idem_guard.pass(scopes text[])
RETURNS text[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idem_guard.pass(s.scope)
	FROM (SELECT DISTINCT scope FROM unnest(scopes) AS scope
		ORDER BY 1) AS s;
	RETURN scopes;
END
$$;

-- Under the name of the interface, for clients.  In a statement that reads, the
-- guard may have opened after its snapshot, in which nothing has arrived; as this
-- becomes a part of that statement, seen() looks again.
SELECT extnamespace::regnamespace::text AS schema
FROM pg_extension WHERE extname = 'idempotency' \gset
CREATE FUNCTION :schema.idem_pin_scope(scope text)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN idem_guard.seen(idem_guard.pass(scope));
COMMENT ON FUNCTION :schema.idem_pin_scope(text) IS
'Keeps a scope on this shard until the end of the transaction, and returns it. Raises 55000 where it lives elsewhere.';
CREATE FUNCTION :schema.idem_pin_scope(scopes text[])
RETURNS text[]
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN idem_guard.seen(idem_guard.pass(scopes));
COMMENT ON FUNCTION :schema.idem_pin_scope(text[]) IS
'Keeps scopes on this shard until the end of the transaction, and returns them. Raises 55000 where one lives elsewhere.';

REVOKE ALL ON FUNCTION idem_guard.slot(text), idem_guard.seen(text), idem_guard.seen(text[]),
	idem_guard.pass(text), idem_guard.pass(text[]),
	:schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) FROM PUBLIC;
GRANT USAGE ON SCHEMA idem_guard TO :"application";
GRANT EXECUTE ON FUNCTION idem_guard.seen(text), idem_guard.seen(text[]),
	idem_guard.pass(text), idem_guard.pass(text[]),
	:schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) TO :"application";
SELECT :schema.idem_grant(quote_ident(:'application')::regrole) \g /dev/null

-- The database's owner, who has the rights of the extension's tables, dumps it.
SELECT pg_get_userbyid(datdba) AS owner
FROM pg_database WHERE datname = current_database() \gset
GRANT USAGE ON SCHEMA idem_guard TO :"owner";
GRANT SELECT ON idem_guard.places TO :"owner";
COMMIT;
