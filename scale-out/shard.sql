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
-- directly; idempotency.require_pinned_scope sees to it in new sessions.  It holds the scope where it is until that transaction ends, and
-- refuses a scope that lives elsewhere: a router with an old, wrong or
-- incomplete map gets an error, never a second record of the same key.

\set ON_ERROR_STOP on
-- A database's owner can define functions that an unqualified name would find.
SET search_path = pg_catalog, pg_temp;
BEGIN;
CREATE SCHEMA idem_guard;

-- 256 slots, by a hash that partitions use, too: it is the same in each version
-- of PostgreSQL, on machines of one byte order.  src/util/pinned_scope.c has it,
-- too.
CREATE FUNCTION idem_guard.slot(scope text)
RETURNS int
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN hashtextextended(scope COLLATE "C", 0) & 255;

-- A scope of its own place has a row; the others follow their slot's, whose
-- scope is ''.  No row: elsewhere.  The functions below, and nothing else, change
-- it.
CREATE TABLE idem_guard.places (
	slot int NOT NULL CHECK (slot BETWEEN 0 AND 255),
	scope text COLLATE "C" NOT NULL DEFAULT '',
	state text NOT NULL CHECK (state IN ('open', 'leaving', 'arriving', 'away')),
	epoch bigint NOT NULL,		-- of its last change; it never falls
	opened bigint NOT NULL,		-- the last epoch at which it was open
	peer int,					-- where it leaves to
	follows boolean NOT NULL DEFAULT false,	-- had no gate of its own before it left
	since timestamptz NOT NULL DEFAULT clock_timestamp(),	-- in this state
	here boolean NOT NULL GENERATED ALWAYS AS (state = 'open') STORED,
	PRIMARY KEY (slot, scope)
);
INSERT INTO idem_guard.places (slot, state, epoch, opened)
SELECT s, 'open', 1, 1 FROM unnest(:'slots'::int[]) AS s;

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
			HINT = 'Let the router look for it: SELECT idem_find_shard(scope).',
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

-- The lock comes first, so seen() sees what the mover of the scope has
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

--
-- The steps of a move, by which a place has one open gate at most, and its rows
-- are never without one that opens: test/models/gates.pml.  Each compares the gate
-- with what the mover knows, and raises 55006 if another mover came first.
--
-- "epoch" is the mover's: higher than all that it has seen of this place.  So a
-- mover that was overtaken, or has slept, changes nothing.
--

-- The gate of a place; a scope without one of its own has its slot's.
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

-- For a router that looks for a scope.
CREATE FUNCTION idem_guard.whereabouts(scope text,
	OUT state text, OUT epoch bigint, OUT peer int, OUT is_own boolean)
LANGUAGE sql STABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
	SELECT g.state, g.epoch, g.peer, g.is_own
	FROM idem_guard.gate(idem_guard.slot(scope), scope) AS g
$$;

-- Of all gates of a slot, since those of its scopes count for the slot, and
-- the slot's for scopes that have none yet.
CREATE FUNCTION idem_guard.highest_epoch(slot int)
RETURNS bigint
LANGUAGE sql VOLATILE
RETURN (SELECT coalesce(max(p.epoch), 0) FROM idem_guard.places AS p WHERE p.slot = highest_epoch.slot);

-- Excludes other movers of the slot until the transaction ends, and nobody else.
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

-- The markers of moves by logical replication: what the old shard has said when its
-- gate closed arrives on the new one after all rows.
CREATE TABLE idem_guard.closed (
	slot int NOT NULL,
	scope text COLLATE "C" NOT NULL,
	epoch bigint NOT NULL,
	claim_token bigint NOT NULL,		-- the last one of the old shard
	PRIMARY KEY (slot, scope, epoch)
);

-- For monitoring: calls of a place that is leaving are refused.
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

-- On the new shard.  The caller deletes what an earlier move has left, in the
-- same transaction.  Returns when it was last open here, for close().
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

-- On the old shard, with the exclusive lock of the slot.  A move to the same shard
-- that was interrupted is taken over, if the new shard has not opened since.  "own"
-- are the scopes of a slot that do not go with it, as the mover knows them.
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
			MESSAGE = format('a scope of slot %s has come or gone meanwhile', slot),
			HINT = 'Nothing has been changed. Run scale-out/move again.';
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'leaving', epoch, gate.opened, peer,
		CASE WHEN gate.is_own THEN (SELECT p.follows FROM idem_guard.places AS p
				WHERE p.slot = close.slot AND p.scope = close.scope)
			ELSE true END);
END
$$;

-- On the new shard, in the transaction that has all rows.  "own" are the scopes
-- of a slot that do not go with it.
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
				HINT = 'Go on with that first, or run scale-out/move --back for it.';
		END IF;
		-- The others came back to their slot's shard, and go with it now.
		DELETE FROM idem_guard.places AS p
		WHERE p.slot = open_here.slot AND p.scope <> '' AND p.scope <> ALL (own);
		INSERT INTO idem_guard.places (slot, scope, state, epoch, opened)
		SELECT open_here.slot, o, 'away', 0, 0 FROM unnest(own) AS o
		ON CONFLICT DO NOTHING;
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'open', epoch, epoch, NULL);
END
$$;

-- On a shard that it has left, before the rows are deleted in the same transaction.
-- "home_epoch" is that of the open gate.
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

-- A way back begins on the shard that it was to go to: from now on nobody opens
-- it there at this epoch.  Returns whether the rows there are to be deleted.
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
		RETURN false;			-- it is reserved for a later move
	END IF;
	PERFORM idem_guard.set_gate(slot, scope, 'away', greatest(gate.epoch, epoch), gate.opened, NULL);
	RETURN true;
END
$$;

-- The way back ends on the shard that it did not leave.  A scope that had no gate
-- of its own follows its slot again, whose epoch covers the scope's.  Returns the
-- new epoch.
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

-- By hand, after a shard was restored from a backup or lost: opens or closes a gate,
-- whatever it was.  The epoch must be above all others' of this place.
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

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem_guard FROM PUBLIC;
REVOKE ALL ON FUNCTION :schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) FROM PUBLIC;
GRANT USAGE ON SCHEMA idem_guard TO :"application";
GRANT EXECUTE ON FUNCTION idem_guard.seen(text), idem_guard.seen(text[]),
	idem_guard.pass(text), idem_guard.pass(text[]), idem_guard.whereabouts(text),
	:schema.idem_pin_scope(text), :schema.idem_pin_scope(text[]) TO :"application";
SELECT :schema.idem_grant(quote_ident(:'application')::regrole) \g /dev/null

-- In sessions that begin from now on, functions that write demand the pin.
SELECT format('ALTER DATABASE %I SET idempotency.require_pinned_scope = on', current_database()) \gexec

-- The database's owner, who has the rights of the extension's tables, dumps it.
SELECT pg_get_userbyid(datdba) AS owner
FROM pg_database WHERE datname = current_database() \gset
GRANT USAGE ON SCHEMA idem_guard TO :"owner";
GRANT SELECT ON idem_guard.places, idem_guard.closed TO :"owner";
COMMIT;
