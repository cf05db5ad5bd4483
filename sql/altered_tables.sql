--
-- Tables that somebody has altered are refused (55000), until that is undone
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\i sql/include/error_of.sql
\pset format unaligned
\pset tuples_only on
\set SHOW_CONTEXT never
CREATE FUNCTION pg_temp.both() RETURNS text LANGUAGE sql AS $$
	SELECT concat_ws(E'\n', pg_temp.error_of('SELECT idem_claim($_$s$_$, $_$bad-input-key-006$_$)'), pg_temp.code_of('SELECT idem_lookup($_$s$_$, $_$bad-input-key-006$_$)'))
$$;
CREATE FUNCTION pg_temp.nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
SELECT pg_temp.both();

CREATE TRIGGER t BEFORE INSERT ON idem_keys FOR EACH ROW EXECUTE FUNCTION pg_temp.nothing();
SELECT pg_temp.both();
ALTER TABLE idem_keys DISABLE TRIGGER t;
SELECT pg_temp.code_of($$ SELECT idem_claim('s', 'bad-input-key-006') $$);
DROP TRIGGER t ON idem_keys;
SELECT pg_temp.both();

CREATE RULE r AS ON DELETE TO idem_keys DO INSTEAD NOTHING;
SELECT pg_temp.both();
DROP RULE r ON idem_keys;
SELECT pg_temp.both();

ALTER TABLE idem_keys ENABLE ROW LEVEL SECURITY;
SELECT pg_temp.both();
ALTER TABLE idem_keys DISABLE ROW LEVEL SECURITY;
SELECT pg_temp.both();

ALTER TABLE idem_keys ADD CONSTRAINT c CHECK (attempt < 1000);
SELECT pg_temp.both();
ALTER TABLE idem_keys DROP CONSTRAINT c;
SELECT pg_temp.both();

CREATE TABLE referencing (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idem_keys);
SELECT pg_temp.both();
DROP TABLE referencing;
SELECT pg_temp.both();

UPDATE idem_keys SET error = '' WHERE error IS NULL;
ALTER TABLE idem_keys ALTER COLUMN error SET NOT NULL;
SELECT pg_temp.both();
ALTER TABLE idem_keys ALTER COLUMN error DROP NOT NULL;
SELECT pg_temp.both();

ALTER TABLE idem_keys ALTER COLUMN created_at DROP NOT NULL;
SELECT pg_temp.both();
ALTER TABLE idem_keys ALTER COLUMN created_at SET NOT NULL;
SELECT pg_temp.both();

ALTER TABLE idem_keys ALTER COLUMN error TYPE varchar(10);
SELECT pg_temp.both();
ALTER TABLE idem_keys ALTER COLUMN error TYPE text;
SELECT pg_temp.both();

ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey;
SELECT pg_temp.both();
ALTER TABLE idem_keys ADD PRIMARY KEY (scope, key);
SELECT pg_temp.both();

-- The other tables
CREATE TRIGGER t AFTER UPDATE ON idem_action_versions FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.nothing();
SELECT pg_temp.error_of($$ SELECT idem_try_advance('u', 'e', '6', 11) $$);
DROP TRIGGER t ON idem_action_versions;
SELECT * FROM idem_try_advance('u', 'e', '6', 11);
ALTER TABLE idem_user_actions ENABLE ROW LEVEL SECURITY;
SELECT pg_temp.error_of($$ SELECT idem_set('u', 'e', '6', 'a', false, 12) $$);
SELECT pg_temp.error_of($$ SELECT idem_is_active('u', 'e', '6', 'a') $$);
ALTER TABLE idem_user_actions DISABLE ROW LEVEL SECURITY;
SELECT * FROM idem_set('u', 'e', '6', 'a', false, 12);

-- Harmless changes are accepted.
CREATE INDEX ON idem_keys (state);
CREATE INDEX ON idem_keys (lower(recovery_point)) WHERE state = 'failed';
CREATE STATISTICS regress_idem_statistics (dependencies) ON scope, state FROM idem_keys;
ALTER TABLE idem_keys SET (fillfactor = 90);
ALTER TABLE idem_keys ALTER COLUMN attempt SET DEFAULT 5;
ALTER TABLE idem_keys REPLICA IDENTITY FULL;
SELECT c.outcome, attempt, idem_checkpoint('s', 'bad-input-key-014', 'STEP') IS NOT NULL, idem_fail('s', 'bad-input-key-014') FROM idem_claim('s', 'bad-input-key-014') AS c;
SET enable_seqscan = off;
SELECT count(*) FROM idem_keys WHERE lower(recovery_point) = 'step' AND state = 'failed';
SELECT count(*) FROM idem_keys WHERE state = 'failed' AND key = 'bad-input-key-014';
RESET enable_seqscan;
SELECT outcome, attempt, recovery_point FROM idem_claim('s', 'bad-input-key-014');

-- A published table without replica identity: no updates, as by UPDATE.
SET client_min_messages = error;
CREATE PUBLICATION regress_idem_publication FOR TABLE idem_keys;
RESET client_min_messages;
ALTER TABLE idem_keys REPLICA IDENTITY NOTHING;
BEGIN;
SELECT outcome FROM idem_claim('s', 'bad-input-key-016');
SELECT pg_temp.code_of($$ SELECT idem_complete('s', 'bad-input-key-016', 200) $$);
SELECT pg_temp.code_of($$ UPDATE idem_keys SET error = 'x' WHERE key = 'bad-input-key-016' $$);
SELECT pg_temp.code_of($$ SELECT idem_release('s', 'bad-input-key-016') $$);
COMMIT;
DROP PUBLICATION regress_idem_publication;
ALTER TABLE idem_keys REPLICA IDENTITY DEFAULT;

-- A change that leaves a trace in the catalogs is accepted again, too, once it is undone.
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SELECT pg_temp.both();
CREATE TABLE child () INHERITS (idem_keys);
SELECT pg_temp.both();
DROP TABLE child;
SELECT pg_temp.both();
SELECT outcome FROM idem_claim('s', 'bad-input-key-015');
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
ALTER TABLE idem_keys ADD COLUMN x int;
SELECT pg_temp.both();
ALTER TABLE idem_keys DROP COLUMN x;
SELECT pg_temp.both();
SELECT outcome, idem_complete('s', 'bad-input-key-015', 200, 'x') FROM idem_claim('s', 'bad-input-key-015');
SELECT outcome, response_body FROM idem_claim('s', 'bad-input-key-015');

-- A primary key over other columns is not the one to find a key by.
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
CREATE FUNCTION pg_temp.both_codes() RETURNS text LANGUAGE sql AS $$
	SELECT pg_temp.code_of('SELECT idem_claim($_$s$_$, $_$bad-input-key-006$_$)') || ' | ' || pg_temp.code_of('SELECT idem_lookup($_$s$_$, $_$bad-input-key-006$_$)')
$$;
SET statement_timeout = '1min';
-- The order of its columns does not matter, which they are does.
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD PRIMARY KEY (scope, key);
SELECT pg_temp.both_codes();
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD PRIMARY KEY (scope, key, state);
SELECT pg_temp.both_codes();
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD PRIMARY KEY (claim_token);
SELECT pg_temp.both_codes();
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD PRIMARY KEY (scope, key);
SELECT pg_temp.both_codes();
RESET statement_timeout;

-- A new session finds an altered table by itself.
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
ALTER TABLE idem_keys ADD CONSTRAINT c CHECK (attempt < 1000);
\c
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
ALTER TABLE idem_keys DROP CONSTRAINT c;
SELECT outcome FROM idem_claim('s', 'bad-input-key-006');
