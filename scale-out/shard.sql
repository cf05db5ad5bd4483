-- The guard of a shard, which knows the scopes that live here.
--
--	psql -v application=app -v slots='{0,4,8}' -f shard.sql
--
-- Run this once on each shard, beside the extension, as a superuser.
-- "application" is the role as which the router and the application connect.
-- "slots" live here at the beginning; a shard that is added later has none.
--
-- Each call of the router calls idem_pin_scope(scope) in its transaction, and each
-- transaction of a client that connects here directly must do so.
-- idempotency.require_pinned_scope checks it in new sessions.  The pin keeps the
-- scope on this shard until that transaction ends, and refuses a scope that lives
-- elsewhere.  So a router with an old, wrong or incomplete map gets an error, and
-- never makes a second record of a key.

\set ON_ERROR_STOP on
-- A database's owner can define functions that an unqualified name would find.
SET search_path = pg_catalog, pg_temp;
BEGIN;
CREATE SCHEMA idem_guard;

-- One of 256 slots, by a hash that partitions also use: it is the same in each
-- version of PostgreSQL, on machines of one byte order.  src/util/pinned_scope.c
-- has the same hash.
CREATE FUNCTION idem_guard.slot(scope text)
RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN hashtextextended(scope COLLATE "C", 0) & 255;

-- The gates.  A scope with a place of its own has a row.  The others follow the row
-- of their slot, whose scope is ''.  A place without a row is elsewhere.  Only the
-- functions below change the table.
CREATE TABLE idem_guard.places (
	slot int NOT NULL CHECK (slot BETWEEN 0 AND 255),
	scope text COLLATE "C" NOT NULL DEFAULT '',
	state text NOT NULL CHECK (state IN ('open', 'leaving', 'arriving', 'away')),
	epoch bigint NOT NULL,		-- of its last change; it never falls
	opened bigint NOT NULL,		-- the last epoch at which it was open
	peer int,					-- the shard to which it leaves
	follows boolean NOT NULL DEFAULT false,	-- it had no gate of its own before it left
	since timestamptz NOT NULL DEFAULT clock_timestamp(),	-- in this state
	here boolean NOT NULL GENERATED ALWAYS AS (state = 'open') STORED,
	PRIMARY KEY (slot, scope)
);
INSERT INTO idem_guard.places (slot, state, epoch, opened)
SELECT s, 'open', 1, 1 FROM unnest(:'slots'::int[]) AS s;

-- Raises an error unless the scope lives here in the snapshot of the statement.
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
			HINT = 'Let the router look for it: SELECT idem_find_shard(scope).',
			SCHEMA = 'idem_guard';        -- Clients recognize the error by it.
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

-- The lock comes first, so seen() sees what the mover of the scope has committed.
-- This needs READ COMMITTED: an older snapshot does not have it.
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

--
-- The steps of a move.  They keep at most one gate of a place open, in front of all
-- its rows: see test/models/gates.pml.  Each step compares the gate with what the
-- mover knows, and raises 55006 if another mover came first.
--
-- "epoch" is the mover's, higher than all epochs that it has seen of this place.
-- So a mover that was overtaken or suspended changes nothing.
--

-- Returns the gate of a place: of a scope without its own gate, that of its slot.
CREATE FUNCTION idem_guard.gate(slot int, scope text,
	OUT state text, OUT epoch bigint, OUT opened bigint, OUT peer int, OUT is_own boolean)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	SELECT p.state, p.epoch, p.opened, p.peer, p.scope = gate.scope INTO state, epoch, opened, peer, is_own
	FROM idem_guard.places AS p
	WHERE p.slot = gate.slot AND p.scope IN ('', gate.scope)
	ORDER BY p.scope DESC
	LIMIT 1;
	IF NOT FOUND THEN
		state := 'away';
		epoch := 0;
		opened := 0;
		is_own := false;
	END IF;
END
$$;

-- Like gate(), for a router that looks for a scope
CREATE FUNCTION idem_guard.whereabouts(scope text,
	OUT state text, OUT epoch bigint, OUT peer int, OUT is_own boolean)
LANGUAGE sql STABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT g.state, g.epoch, g.peer, g.is_own
	FROM idem_guard.gate(idem_guard.slot(scope), scope) AS g
$$;

-- The highest epoch of the gates of a slot and its scopes.  Epochs of scopes count
-- for the slot, and those of the slot for scopes without their own gate.
CREATE FUNCTION idem_guard.highest_epoch(slot int)
RETURNS bigint
LANGUAGE sql VOLATILE
RETURN (SELECT coalesce(max(p.epoch), 0) FROM idem_guard.places AS p WHERE p.slot = highest_epoch.slot);

-- Excludes other movers of the slot, but no calls, until the transaction ends.
CREATE FUNCTION idem_guard.lock_gate(slot int, scope text,
	OUT state text, OUT epoch bigint, OUT opened bigint, OUT peer int, OUT is_own boolean)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(1229211982, slot);
	SELECT g.* INTO state, epoch, opened, peer, is_own FROM idem_guard.gate(slot, scope) AS g;
END
$$;

CREATE FUNCTION idem_guard.set_gate(slot int, scope text, state text, epoch bigint, opened bigint, peer int,
	follows boolean DEFAULT false)
RETURNS void
LANGUAGE sql VOLATILE
BEGIN ATOMIC
	INSERT INTO idem_guard.places AS p (slot, scope, state, epoch, opened, peer, follows)
	VALUES (set_gate.slot, set_gate.scope, set_gate.state, set_gate.epoch, set_gate.opened, set_gate.peer, set_gate.follows)
	ON CONFLICT (slot, scope) DO UPDATE
	SET state = EXCLUDED.state, epoch = EXCLUDED.epoch, opened = EXCLUDED.opened, peer = EXCLUDED.peer,
		follows = EXCLUDED.follows,
		since = CASE WHEN p.state = EXCLUDED.state THEN p.since ELSE EXCLUDED.since END;
END;

-- Markers of moves by logical replication.  The transaction that closes the old
-- gate writes one, which arrives on the new shard after all rows.
CREATE TABLE idem_guard.closed (
	slot int NOT NULL,
	scope text COLLATE "C" NOT NULL,
	epoch bigint NOT NULL,
	claim_token bigint NOT NULL,		-- the last one of the old shard
	PRIMARY KEY (slot, scope, epoch)
);

-- For monitoring.  Calls of a place that is leaving are refused.
CREATE VIEW idem_guard.moves AS
SELECT slot, scope, state, epoch, peer, clock_timestamp() - since AS lasts
FROM idem_guard.places
WHERE state IN ('leaving', 'arriving');
GRANT USAGE ON SCHEMA idem_guard TO pg_monitor;
GRANT SELECT ON idem_guard.moves TO pg_monitor;

CREATE FUNCTION idem_guard.overtaken(slot int, scope text, step text, epoch bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.gate(slot, scope);
	RAISE EXCEPTION USING ERRCODE = 'object_in_use',
		MESSAGE = format('%s is refused at epoch %s: another move came first', step, epoch),
		DETAIL = format('The gate of slot %s, scope "%s" is %s at epoch %s, and was last open at epoch %s.',
			slot, left(scope, 40), gate.state, gate.epoch, gate.opened),
		HINT = 'Nothing has been changed. Run scale-out/move again, which begins with what the gates say.';
END
$$;

-- Runs on the new shard.  The caller deletes rows of an earlier move in the same
-- transaction.  Returns the epoch at which the gate was last open here, for close().
CREATE FUNCTION idem_guard.reserve(slot int, scope text, epoch bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.state NOT IN ('away', 'arriving') OR gate.epoch >= epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'reserving the new shard', epoch);
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'arriving', epoch, gate.opened, NULL);
	RETURN gate.opened;
END
$$;

-- Runs on the old shard, with the exclusive lock of the slot.  Takes over a move to
-- the same shard that was interrupted, unless the new shard has opened since.  "own"
-- are the scopes of a slot that have their own gates, as the mover knows them.
CREATE FUNCTION idem_guard.close(slot int, scope text, epoch bigint, peer int, peer_opened bigint, own text[] DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.epoch >= epoch
		OR NOT (gate.state = 'open'
			OR gate.state = 'leaving' AND gate.is_own AND gate.peer = close.peer AND peer_opened < gate.epoch) THEN
		PERFORM idem_guard.overtaken(slot, scope, 'closing the old shard', epoch);
	END IF;
	IF scope = '' AND own <> ARRAY(SELECT p.scope FROM idem_guard.places AS p
			WHERE p.slot = close.slot AND p.scope <> '' ORDER BY p.scope) THEN
		RAISE EXCEPTION USING ERRCODE = 'object_in_use',
			MESSAGE = format('the scopes of slot %s have changed since the move began', slot),
			HINT = 'Nothing has been changed. Run scale-out/move again.';
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'leaving', epoch, gate.opened, peer,
		CASE WHEN gate.is_own THEN (SELECT p.follows FROM idem_guard.places AS p
				WHERE p.slot = close.slot AND p.scope = close.scope)
			ELSE true END);
END
$$;

-- Runs on the new shard, in the transaction that has all rows.  "own" are the scopes
-- of a slot that do not move with it.
CREATE FUNCTION idem_guard.open_here(slot int, scope text, epoch bigint, own text[] DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
	other text;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.state <> 'arriving' OR gate.epoch <> epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'opening the new shard', epoch);
	END IF;
	IF scope = '' THEN
		SELECT p.scope INTO other
		FROM idem_guard.places AS p
		WHERE p.slot = open_here.slot AND p.scope <> '' AND p.scope <> ALL (own) AND p.state <> 'away'
		LIMIT 1;
		IF FOUND THEN
			RAISE EXCEPTION USING ERRCODE = 'object_in_use',
				MESSAGE = format('scope "%s", which is in slot %s, is being moved here', left(other, 40), slot),
				HINT = 'Continue that move first, or run scale-out/move --back for it.';
		END IF;
		-- The others returned to their slot's shard, and follow it now.
		DELETE FROM idem_guard.places AS p
		WHERE p.slot = open_here.slot AND p.scope <> '' AND p.scope <> ALL (own);
		INSERT INTO idem_guard.places (slot, scope, state, epoch, opened)
		SELECT open_here.slot, o, 'away', 0, 0 FROM unnest(own) AS o
		ON CONFLICT DO NOTHING;
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'open', epoch, epoch, NULL);
END
$$;

-- Runs on a shard that the place has left, before the caller deletes the rows in the
-- same transaction.  "home_epoch" is that of the open gate.
CREATE FUNCTION idem_guard.clear(slot int, scope text, home_epoch bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.state = 'open' OR gate.state <> 'away' AND gate.epoch > home_epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'deleting what has left', home_epoch);
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'away', greatest(gate.epoch, home_epoch), gate.opened, NULL);
END
$$;

-- The first step of a way back, on the shard that the move leads to: from now on,
-- no mover opens the gate there at this epoch.  Returns whether the caller must
-- delete the rows there.
CREATE FUNCTION idem_guard.refuse(slot int, scope text, epoch bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.state NOT IN ('away', 'arriving') OR gate.opened >= epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'going back', epoch);
	END IF;
	IF gate.state = 'arriving' AND gate.epoch > epoch THEN
		RETURN false;			-- A later move has reserved it.
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'away', greatest(gate.epoch, epoch), gate.opened, NULL);
	RETURN true;
END
$$;

-- The last step of a way back, on the old shard.  A scope that had no gate of its own
-- follows its slot again.  The slot gets an epoch above the scope's, so that maps
-- accept it.  Returns the new epoch.
CREATE FUNCTION idem_guard.reopen(slot int, scope text, epoch bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	IF gate.state <> 'leaving' OR NOT gate.is_own OR gate.epoch <> epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'going back', epoch);
	END IF;
	UPDATE idem_guard.places AS p
	SET epoch = greatest(p.epoch, reopen.epoch + 1), opened = greatest(p.opened, reopen.epoch + 1)
	FROM idem_guard.places AS own
	WHERE p.slot = reopen.slot AND p.scope = '' AND p.state = 'open'
		AND own.slot = p.slot AND own.scope = reopen.scope AND own.scope <> '' AND own.follows;
	IF FOUND THEN
		DELETE FROM idem_guard.places AS p WHERE p.slot = reopen.slot AND p.scope = reopen.scope;
	ELSE
		PERFORM idem_guard.set_gate(slot, scope, 'open', epoch + 1, epoch + 1, NULL);
	END IF;
	RETURN epoch + 1;
END
$$;

-- For administrators, after a shard was restored from a backup or lost: opens or
-- closes a gate in any state.  The epoch must be above all others of this place.
CREATE FUNCTION idem_guard.force(slot int, scope text, is_open boolean, epoch bigint DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	gate record;
BEGIN
	SELECT * INTO gate FROM idem_guard.lock_gate(slot, scope);
	epoch := coalesce(epoch, idem_guard.highest_epoch(slot) + 1);
	IF gate.epoch >= epoch THEN
		PERFORM idem_guard.overtaken(slot, scope, 'a change by hand', epoch);
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, CASE WHEN is_open THEN 'open' ELSE 'away' END, epoch,
		CASE WHEN is_open THEN epoch ELSE gate.opened END, NULL);
	RETURN epoch;
END
$$;

-- The guard under the name of the interface, for clients.  The gate can have opened
-- after the snapshot of a statement that reads, which then lacks the rows that have
-- arrived.  seen() runs with the snapshot of that statement, and refuses this.
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

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem_guard FROM PUBLIC;
REVOKE ALL ON FUNCTION :schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) FROM PUBLIC;
GRANT USAGE ON SCHEMA idem_guard TO :"application";
GRANT EXECUTE ON FUNCTION idem_guard.seen(text), idem_guard.seen(text[]),
	idem_guard.pass(text), idem_guard.pass(text[]), idem_guard.whereabouts(text),
	:schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) TO :"application";
SELECT :schema.idem_grant(quote_ident(:'application')::regrole) \g /dev/null

-- In new sessions, functions that write demand the pin.
SELECT format('ALTER DATABASE %I SET idempotency.require_pinned_scope = on', current_database()) \gexec

-- The owner of the database needs these rights to dump it.
SELECT pg_get_userbyid(datdba) AS owner
FROM pg_database WHERE datname = current_database() \gset
GRANT USAGE ON SCHEMA idem_guard TO :"owner";
GRANT SELECT ON idem_guard.places, idem_guard.closed TO :"owner";
COMMIT;
