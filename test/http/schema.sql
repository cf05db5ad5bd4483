--
-- test/http/schema.sql
--
-- The tables of the shop that the conformance suite speaks to, in an empty
-- database, and the role that shops connect as.  test/http/README.md says what each
-- route does with them.
--
CREATE EXTENSION IF NOT EXISTS idempotency;

-- POST /payments: key is the client's Idempotency-Key, unquoted.
CREATE TABLE payments (
	id bigserial PRIMARY KEY,
	owner text NOT NULL,
	amount bigint NOT NULL,
	currency text NOT NULL,
	key text
);

-- POST /jobs: written by the bank, on a connection of its own.
CREATE TABLE charges (
	key text PRIMARY KEY,
	calls int NOT NULL DEFAULT 1
);

-- POST /blobs and POST /streams: bytes is how many.
CREATE TABLE blobs (
	id bigserial PRIMARY KEY,
	owner text NOT NULL,
	bytes int NOT NULL
);

-- GET /form: the tokens that have been handed out.
CREATE TABLE forms (
	token text PRIMARY KEY,
	owner text NOT NULL
);

-- POST /form: those that have been sent.
CREATE TABLE submissions (
	token text PRIMARY KEY,
	owner text NOT NULL
);

-- An application's role: no more than a real one would have.
DO $$
BEGIN
	CREATE ROLE shop LOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
	NULL;
END
$$;
SELECT idem_grant('shop');
GRANT SELECT, INSERT, UPDATE ON payments, charges, blobs, forms, submissions TO shop;
GRANT USAGE ON SEQUENCE payments_id_seq, blobs_id_seq TO shop;
-- GET /effects counts the likes that are active.
GRANT SELECT ON idem_user_actions TO shop;
