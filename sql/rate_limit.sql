--
-- idempotency.max_new_keys_per_minute: of a scope's keys only new ones are
-- refused, with nothing done.
--
-- For many concurrent sessions, and the end of a minute, see test/t.  Each part
-- has its own scopes, because counts stay.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
DROP ROLE IF EXISTS regress_idem_app;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on

-- A claim's outcome, or what it raises.  How long to wait is a time, so only
-- whether it can be right is shown: each key counts for 60 to 66 seconds, and
-- none has been claimed before now.
SELECT clock_timestamp() AS began \gset
SELECT set_config('regress.began', :'began', false) \gset
CREATE FUNCTION error_of(statement text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	result text;
	detail text;
	hint text;
BEGIN
	EXECUTE statement INTO result;
	RETURN result;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(' | ', SQLSTATE, SQLERRM, nullif(detail, ''),
		CASE WHEN substring(hint FROM '\d+')::int BETWEEN 60 - extract(epoch FROM clock_timestamp() - current_setting('regress.began')::timestamptz) AND 66
			THEN regexp_replace(hint, '\d+', 'so many') ELSE hint END);
END
$$;
CREATE FUNCTION try(scope text, key text, hash bytea DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$
	SELECT error_of(format('SELECT outcome FROM idem_claim(%L, %L, %L)', scope, key, hash))
$$;

--
-- Off
--
SHOW idempotency.max_new_keys_per_minute;
SELECT outcome, count(*) FROM generate_series(1, 100) AS n, idem_claim('off', 'rate-limit-key-' || n) GROUP BY outcome;

--
-- The limit: to the key, and for this scope only
--
SET idempotency.max_new_keys_per_minute = 3;
-- What was claimed while it was off does not count.
SELECT n, try('off', 'rate-limit-more-' || n) FROM generate_series(1, 5) AS n;
SELECT try('other', 'rate-limit-more-1'), try('OFF', 'rate-limit-more-1'), try('off ', 'rate-limit-more-1');
-- What was refused does not count, and is not there.
SET idempotency.max_new_keys_per_minute = 4;
SELECT n, try('off', 'rate-limit-more-' || n) FROM generate_series(4, 6) AS n;
SELECT key FROM idem_keys WHERE scope = 'off' AND key LIKE 'rate-limit-more%' ORDER BY key;
-- A lower limit counts what has been admitted.
SET idempotency.max_new_keys_per_minute = 1;
SELECT try('off', 'rate-limit-more-9');
SELECT try('other', 'rate-limit-more-9');
-- One statement is no way around.
\set VERBOSITY sqlstate
SET idempotency.max_new_keys_per_minute = 3;
SELECT outcome FROM generate_series(1, 4) AS n, idem_claim('statement', 'rate-limit-key-' || n);
\set VERBOSITY default
SELECT count(*) FROM idem_keys WHERE scope = 'statement';

--
-- Nothing is done
--
SET idempotency.max_new_keys_per_minute = 1;
SELECT try('nothing', 'rate-limit-key-1');
SELECT last_value AS token FROM idem_claim_tokens \gset
BEGIN;
SAVEPOINT s;
\set VERBOSITY sqlstate
SELECT outcome FROM idem_claim('nothing', 'rate-limit-key-2');
SELECT 1;
\set VERBOSITY default
ROLLBACK TO s;
SELECT pg_current_xact_id_if_assigned() IS NULL, last_value = :token FROM idem_claim_tokens;
COMMIT;

--
-- A key with a record is not refused
--
SET idempotency.max_new_keys_per_minute = 0;
SELECT try('full', 'rate-limit-claimed', '\x01');
SELECT idem_complete('full', 'rate-limit-completed', 200, 'done') FROM idem_claim('full', 'rate-limit-completed', '\x01');
SELECT idem_complete('full', 'rate-limit-erased', 200, 'done') FROM idem_claim('full', 'rate-limit-erased');
SELECT idem_erase('full', 'rate-limit-erased');
SELECT idem_fail('full', 'rate-limit-failed') FROM idem_claim('full', 'rate-limit-failed');
SELECT outcome FROM idem_claim('full', 'rate-limit-abandoned', lease => '0');
SELECT outcome FROM idem_claim('full', 'rate-limit-expired', ttl => '0');
SELECT claim_token AS released FROM idem_claim('full', 'rate-limit-released') \gset
SELECT claim_token AS finished FROM idem_claim('full', 'rate-limit-finished') \gset
SET idempotency.max_new_keys_per_minute = 1;
SELECT try('full', 'rate-limit-the-only'), try('full', 'rate-limit-refused');
SELECT key, try('full', 'rate-limit-' || key, hash)
	FROM (VALUES (1, 'claimed', '\x01'::bytea), (2, 'claimed', '\x02'), (3, 'completed', '\x01'), (4, 'completed', '\x02'),
		(5, 'erased', '\x01'), (6, 'failed', NULL), (7, 'abandoned', NULL), (8, 'the-only', NULL)) AS v (n, key, hash) ORDER BY n;
SELECT attempt FROM idem_keys WHERE scope = 'full' AND key IN ('rate-limit-failed', 'rate-limit-abandoned');
SELECT idem_complete('full', 'rate-limit-finished', 200, claim_token => :finished);
SELECT idem_release('full', 'rate-limit-released', :released);
SELECT state FROM idem_lookup('full', 'rate-limit-finished');
-- ... and what counts as none is: released, or expired and not rejected.
SELECT try('full', 'rate-limit-released');
SELECT try('full', 'rate-limit-expired');
SELECT attempt, xmax FROM idem_keys WHERE scope = 'full' AND key = 'rate-limit-expired';
SET idempotency.expired_key_policy = reject;
SELECT try('full', 'rate-limit-expired');
RESET idempotency.expired_key_policy;
-- An expired key that is claimed anew counts, a takeover does not.
SET idempotency.max_new_keys_per_minute = 2;
SELECT try('full', 'rate-limit-expired'), try('full', 'rate-limit-refused');

--
-- A claim counts even if it is rolled back
--
BEGIN;
SELECT n, try('rolled back', 'rate-limit-key-' || n) FROM generate_series(1, 2) AS n;
ROLLBACK;
SELECT try('rolled back', 'rate-limit-key-1');

--
-- idem_run
--
CREATE TABLE runs (n int);
CREATE FUNCTION run(request jsonb) RETURNS jsonb LANGUAGE sql AS $$ INSERT INTO runs VALUES (1); SELECT request $$;
SELECT n, error_of(format('SELECT outcome FROM idem_run(%L, %L, %L, %L)', 'run', 'rate-limit-key-' || n, 'run(jsonb)', '{}'))
	FROM (VALUES (1), (2), (3), (1)) AS v (n);
SELECT count(*) FROM runs;

--
-- The error shows up to 64 bytes of a scope, in whole characters
--
SET idempotency.max_new_keys_per_minute = 1;
SELECT try(scope, 'rate-limit-key-1'), try(scope, 'rate-limit-key-2')
	FROM (VALUES (1, repeat('x', 64)), (2, repeat('x', 65)), (3, repeat('x', 63) || 'é')) AS v (n, scope) ORDER BY n;

--
-- For superusers, and whom they let
--
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SET ROLE regress_idem_app;
\set VERBOSITY sqlstate
SET idempotency.max_new_keys_per_minute = 1000;
SET idempotency.log_events = off;
SELECT outcome FROM idem_claim('app', 'rate-limit-key-1');
SELECT outcome FROM idem_claim('app', 'rate-limit-key-2');
\set VERBOSITY default
RESET ROLE;
RESET idempotency.max_new_keys_per_minute;
SELECT try('run', 'rate-limit-key-4');

--
-- More scopes than there are places: those that came last are known, those
-- that came first have made room, in turn.
--
SELECT CASE WHEN current_setting('server_version_num')::int >= 170000 OR current_setting('shared_preload_libraries') ~ 'idempotency'
	THEN 16384 ELSE 512 END AS places \gset
SET idempotency.max_new_keys_per_minute = 1;
BEGIN;
-- In bulk
SELECT count(*) = 2.5 * :places FROM generate_series(1, (2.5 * :places)::int) AS i, idem_claim('turn ' || i, 'rate-limit-key-1') WHERE outcome = 'new';
SELECT count(*) > 0.85 * :places / 2 FROM generate_series(2 * :places, (2.5 * :places)::int) AS i WHERE try('turn ' || i, 'rate-limit-key-2') ~ '^ID002';
-- One by one
ROLLBACK;
RESET idempotency.max_new_keys_per_minute;
DROP OWNED BY regress_idem_app;
DROP ROLE regress_idem_app;
DROP TABLE runs;
DROP FUNCTION run, try, error_of;
