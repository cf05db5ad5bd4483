-- The tables of the clients of test/torture. They have no constraints, because
-- the extension must guard them; the oracles look for violations.

CREATE EXTENSION idempotency;
CREATE EXTENSION amcheck;

-- One row for each execution of a request, written with its completion.
CREATE TABLE orders (
	n bigserial,
	intent text COLLATE "C" NOT NULL,	-- what the client wanted
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	claim_token bigint,				-- unknown to a handler of idem_run()
	response text NOT NULL,			-- different for each execution
	expires_at timestamptz NOT NULL DEFAULT 'infinity',
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON orders (key);
CREATE INDEX ON orders (response);

-- One row for each claim that was committed before its work, and its steps.
CREATE TABLE claims (
	n bigserial,
	key text COLLATE "C" NOT NULL,
	claim_token bigint NOT NULL,
	attempt int NOT NULL,
	lease_expires_at timestamptz NOT NULL,
	ended text COLLATE "C",						-- completed, failed or released
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON claims (key);
CREATE TABLE checkpoints (
	n bigserial,
	key text COLLATE "C" NOT NULL,
	state text NOT NULL
);
CREATE INDEX ON checkpoints (key);

-- One row for each action that was processed.
CREATE TABLE actions (
	n bigserial,
	entity_type text COLLATE "C" NOT NULL,
	entity_id text COLLATE "C" NOT NULL,
	action_type text COLLATE "C" NOT NULL,
	action_id bigint NOT NULL,
	active boolean NOT NULL
);
CREATE INDEX ON actions (entity_id);
CREATE INDEX ON actions (action_id);

-- Users who have left.
CREATE TABLE leavers (user_id text COLLATE "C" NOT NULL, nonce text NOT NULL);
CREATE INDEX ON leavers (user_id);

CREATE TABLE events (
	aggregate text COLLATE "C" NOT NULL,
	version bigint NOT NULL,
	client_id text COLLATE "C" NOT NULL,
	client_seq bigint NOT NULL
);
CREATE INDEX ON events (aggregate);

-- What was done once.
CREATE TABLE effects (
	n bigserial,
	scope text COLLATE "C" NOT NULL,
	token text COLLATE "C" NOT NULL,
	expires_at timestamptz NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON effects (token);

-- Messages: what was published, by whom in which order, and what arrived.
CREATE TABLE lanes (lane text COLLATE "C" PRIMARY KEY, seq bigint NOT NULL);
CREATE TABLE sent (
	serial bigint NOT NULL,
	message_id uuid NOT NULL,
	lane text COLLATE "C",
	seq bigint
);
CREATE INDEX ON sent (serial);
CREATE INDEX ON sent (message_id);
CREATE TABLE applied (
	n bigserial,
	serial bigint NOT NULL,
	message_id uuid NOT NULL,
	lane text COLLATE "C",
	seq bigint
);
CREATE INDEX ON applied (serial);
CREATE INDEX ON applied (message_id);

-- The handler of idem_run().
CREATE FUNCTION place_order(request jsonb) RETURNS idem_response
LANGUAGE plpgsql AS $$
DECLARE
	response text := gen_random_uuid();
BEGIN
	INSERT INTO orders (intent, scope, key, response)
		VALUES (request ->> 'key', 'shop', request ->> 'key', response);
	RETURN (201, '{"from": "handler"}', response)::idem_response;
END $$;
