-- The router's map: which shard a scope lives on.
--
--	psql -v application=app -v servers="p0 '...', p1 '...'" -f router.sql
--
-- Run this once in the router's database, as a superuser.  "servers" are the
-- connection strings of the shards.  "application" is the role on the shards as
-- which the router connects.  Then make the functions: see functions.sql.

\set ON_ERROR_STOP on
-- A database's owner can define functions that an unqualified name would find.
SET search_path = pg_catalog, pg_temp;
BEGIN;
CREATE EXTENSION IF NOT EXISTS plproxy SCHEMA pg_catalog;

-- The owner of all functions, and the role that is allowed to call them
SELECT format('CREATE ROLE %I NOLOGIN', role)
FROM (VALUES ('idem_router'), ('idem_application')) AS wanted (role)
WHERE to_regrole(role) IS NULL \gexec

CREATE SERVER idempotency FOREIGN DATA WRAPPER plproxy
	OPTIONS (modular_mapping '1', :servers);
GRANT USAGE ON FOREIGN SERVER idempotency TO idem_router;
CREATE USER MAPPING FOR idem_router SERVER idempotency OPTIONS (user :'application');

CREATE SCHEMA idem_map;
GRANT USAGE ON SCHEMA idem_map TO idem_router;

CREATE FUNCTION idem_map.slot(scope text)
RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN hashtextextended(scope COLLATE "C", 0) & 255;

-- PL/Proxy requires numbers without gaps.  So the number of a shard that was removed
-- remains, with the connection string of another shard, until a shard is added or
-- all higher numbers are removed.
CREATE TABLE idem_map.removed (shard int PRIMARY KEY);

CREATE VIEW idem_map.shards AS
SELECT substr(o.option_name, 2)::int AS shard, o.option_value AS connection
FROM pg_foreign_server AS s, pg_options_to_table(s.srvoptions) AS o
WHERE s.srvname = 'idempotency' AND o.option_name ~ '^p[0-9]+$'
	AND substr(o.option_name, 2)::int NOT IN (SELECT r.shard FROM idem_map.removed AS r);

CREATE TABLE idem_map.slots (
	slot int PRIMARY KEY CHECK (slot BETWEEN 0 AND 255),
	shard int NOT NULL,
	moving_to int,
	epoch bigint NOT NULL DEFAULT 1		-- of the last step of a move that the map knows
);
INSERT INTO idem_map.slots (slot, shard)
SELECT slot, slot % (SELECT count(*) FROM idem_map.shards)
FROM generate_series(0, 255) AS slot;

-- Scopes with a place of their own
CREATE TABLE idem_map.scopes (
	scope text COLLATE "C" PRIMARY KEY CHECK (scope <> ''),
	shard int NOT NULL,
	moving_to int,
	epoch bigint NOT NULL DEFAULT 1
);

-- Returns the shard's number.  Raises an error if there is none, or the scope is
-- being moved.
CREATE FUNCTION idem_map.shard(scope text)
RETURNS int
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	place record;
BEGIN
	SELECT s.shard, s.moving_to INTO place
	FROM idem_map.scopes AS s
	WHERE s.scope = shard.scope;
	IF NOT FOUND THEN
		SELECT s.shard, s.moving_to INTO place
		FROM idem_map.slots AS s
		WHERE s.slot = idem_map.slot(shard.scope);
	END IF;
	IF scope IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed',
			MESSAGE = 'the first argument, by which the shard is found, must not be null';
	ELSIF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
			MESSAGE = format('no shard is known for scope "%s"', left(scope, 40)),
			DETAIL = format('Table idem_map.slots has no row for slot %s.', idem_map.slot(scope)),
			HINT = 'Insert the row that is missing, with the shard on which idem_guard.places has this slot.';
	ELSIF place.moving_to IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'lock_not_available',
			MESSAGE = format('scope "%s" is being moved to another shard', left(scope, 40)),
			DETAIL = format('From shard %s to shard %s. The call has done nothing.', place.shard, place.moving_to),
			HINT = 'Try again in a second. If the error persists, run scale-out/move again, or with --back.';
	END IF;
	RETURN place.shard;
END
$$;

-- Returns the connection string for a transaction with this scope.
CREATE FUNCTION idem_map.connection(scope text)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	number CONSTANT int := idem_map.shard(scope);
	found text;
BEGIN
	SELECT s.connection INTO found
	FROM idem_map.shards AS s
	WHERE s.shard = number;
	IF found IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
			MESSAGE = format('shard %s, where scope "%s" lives, has no connection string', number, left(scope, 40)),
			HINT = format('ALTER SERVER idempotency OPTIONS (ADD p%s ''...'')', number);
	END IF;
	RETURN found;
END
$$;

CREATE FUNCTION idem_map.ask(number int, scope text)
RETURNS TABLE (state text, epoch bigint, peer int, is_own boolean)
LANGUAGE plproxy
AS $$
	CLUSTER 'idempotency';
	RUN ON number;
	SELECT g.state, g.epoch, g.peer, g.is_own FROM idem_guard.whereabouts($2) AS g;
$$;

-- Asks the gates of all shards, for a caller that a shard has refused because the
-- map is old, or was restored.  Corrects the map's row of this scope, unless the map
-- knows a later move, and returns the connection string.  A map that was ahead of the
-- gates of all shards before they were asked knows a move that was lost: each step of a
-- move changes a gate first.
CREATE FUNCTION idem_map.find(scope text)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	number int;
	gate record;
	home int;
	target int;
	last bigint := 0;
	has_own boolean;
	newest bigint := 0;
	is_silent boolean := false;
	of_scope CONSTANT bigint := (SELECT s.epoch FROM idem_map.scopes AS s WHERE s.scope = find.scope);
	of_slot CONSTANT bigint := (SELECT s.epoch FROM idem_map.slots AS s WHERE s.slot = idem_map.slot(find.scope));
BEGIN
	FOR number IN SELECT s.shard FROM idem_map.shards AS s ORDER BY s.shard LOOP
		BEGIN
			SELECT a.* INTO gate FROM idem_map.ask(number, find.scope) AS a;
			IF gate.state <> 'arriving' THEN
				newest := greatest(newest, gate.epoch);
			END IF;
			IF (gate.state IN ('open', 'leaving') AND gate.epoch > last)
				OR (gate.state = 'open' AND gate.epoch = last) THEN
				home := number;
				target := CASE WHEN gate.state = 'leaving' THEN gate.peer END;
				last := gate.epoch;
				has_own := gate.is_own;
			END IF;
		EXCEPTION WHEN OTHERS THEN
			is_silent := true;			-- The shard is down.  Ask the others.
		END;
	END LOOP;
	IF home IS NULL THEN
		RETURN idem_map.connection(find.scope);
	END IF;
	-- Writers of both rows of a scope lock its slot's row first.
	PERFORM FROM idem_map.slots AS s WHERE s.slot = idem_map.slot(find.scope) FOR UPDATE;
	-- A move of this epoch can have ended since its old shard answered "leaving".
	IF has_own THEN
		-- And the scope can follow its slot again.  Then the mover writes both rows.
		SELECT a.* INTO gate FROM idem_map.ask(home, find.scope) AS a;
		IF NOT gate.is_own OR gate.epoch <> last THEN
			RETURN idem_map.connection(find.scope);
		END IF;
		INSERT INTO idem_map.scopes AS m (scope, shard, moving_to, epoch)
		VALUES (find.scope, home, target, last)
		ON CONFLICT ON CONSTRAINT scopes_pkey DO UPDATE
		SET shard = EXCLUDED.shard, moving_to = EXCLUDED.moving_to, epoch = EXCLUDED.epoch
		WHERE m.epoch < EXCLUDED.epoch OR (m.epoch = EXCLUDED.epoch AND EXCLUDED.moving_to IS NULL)
			OR (NOT is_silent AND m.epoch = of_scope AND m.epoch > newest);
	ELSE
		DELETE FROM idem_map.scopes AS m
		WHERE m.scope = find.scope AND (m.epoch <= last OR (NOT is_silent AND m.epoch = of_scope AND m.epoch > newest));
		INSERT INTO idem_map.slots AS m (slot, shard, moving_to, epoch)
		VALUES (idem_map.slot(find.scope), home, target, last)
		ON CONFLICT ON CONSTRAINT slots_pkey DO UPDATE
		SET shard = EXCLUDED.shard, moving_to = EXCLUDED.moving_to, epoch = EXCLUDED.epoch
		WHERE (m.epoch < EXCLUDED.epoch OR (m.epoch = EXCLUDED.epoch AND EXCLUDED.moving_to IS NULL)
				OR (NOT is_silent AND m.epoch = of_slot AND m.epoch > newest))
			AND (m.shard, coalesce(m.moving_to, -1)) <> (EXCLUDED.shard, coalesce(EXCLUDED.moving_to, -1));
	END IF;
	RETURN idem_map.connection(find.scope);
END
$$;

-- Returns an array of this length: an array of one element is repeated, and a null
-- array becomes nulls.  If it has a name, the array is required.
CREATE FUNCTION idem_map.spread(name text, elements anyarray, number int)
RETURNS anyarray
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF elements IS NULL AND name IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed',
			MESSAGE = format('argument "%s" must not be null', name);
	ELSIF array_ndims(elements) > 1 THEN
		RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
			MESSAGE = 'an argument of a batch must be an array of one dimension';
	ELSIF elements IS NULL THEN
		RETURN array_fill(elements[1], ARRAY[number]);
	ELSIF cardinality(elements) = 1 THEN
		RETURN array_fill(elements[array_lower(elements, 1)], ARRAY[number]);
	ELSIF cardinality(elements) <> number THEN
		RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
			MESSAGE = 'arrays must have the same number of elements',
			HINT = 'An array of one element applies to all elements.';
	END IF;
	RETURN elements;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem_map FROM PUBLIC;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem_map TO idem_router;
GRANT SELECT ON ALL TABLES IN SCHEMA idem_map TO idem_router;
GRANT INSERT, UPDATE, DELETE ON idem_map.slots, idem_map.scopes TO idem_router;
ALTER FUNCTION idem_map.connection(text) OWNER TO idem_router;
ALTER FUNCTION idem_map.find(text) OWNER TO idem_router;
COMMIT;
