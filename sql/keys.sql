--
-- Request keys: every outcome, within one transaction and across two.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

-- The columns of an answer that are not NULL, without what differs from run
-- to run: of tokens, hashes and times only the name.
CREATE FUNCTION pg_temp.shown(answer json) RETURNS text
LANGUAGE sql AS $$
	SELECT coalesce(string_agg(name || CASE
			WHEN name ~ '(_token|_hash|_at)$' THEN ''
			ELSE '=' || value END, ' ' ORDER BY place), 'nothing')
	FROM json_each_text(answer) WITH ORDINALITY AS a (name, value, place)
	WHERE value IS NOT NULL
$$;

\i sql/include/error_of.sql

\pset format unaligned
\pset tuples_only on
\pset null NULL

--
-- Key rules
--
SELECT key, idem_key_is_valid(key) FROM (VALUES
	(1, NULL),
	(2, ''),
	(3, '123456789012345'),
	(4, '1234567890123456'),
	(5, 'AZaz09_-:._-:.09azAZ'),
	(6, '123456789 123456'),
	(7, '123456789/123456'),
	(8, '123456789é123456'),
	(9, E'123456789012345\n')) AS k (n, key) ORDER BY n;
SELECT n, idem_key_is_valid(repeat('k', n)) FROM (VALUES (15), (16), (128), (129)) AS l (n);
-- every ASCII character, alone and between good ones
SELECT string_agg(chr(c), '' ORDER BY c) FROM generate_series(1, 127) AS c
	WHERE idem_key_is_valid('12345678' || chr(c) || '12345678');
SELECT string_agg(chr(c), '' ORDER BY c) FROM generate_series(1, 127) AS c
	WHERE idem_key_is_valid(repeat(chr(c), 16));

--
-- One transaction: claim, work, complete
--
BEGIN;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x01') AS c;
-- This transaction's own claim is in progress like any other; no committed lease.
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x01') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x01', wait => '10 minutes') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x02') AS c;
-- No token needed here.
SELECT idem_complete('shop', 'one-transaction-1', 201, 'made', '{"A": 1}');
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x01') AS c;
-- Once more changes nothing.
SELECT idem_complete('shop', 'one-transaction-1', 500, 'other');
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x01') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-1', '\x02') AS c;
-- The same key in another scope is another key; so is another key.
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('Shop', 'one-transaction-1', '\x02') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-2', '\x02') AS c;
-- A rollback undoes everything.
BEGIN;
SELECT outcome FROM idem_claim('shop', 'one-transaction-3', '\x01');
SELECT idem_complete('shop', 'one-transaction-3', 201, 'made');
ROLLBACK;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('shop', 'one-transaction-3') AS l;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-transaction-3', '\x02') AS c;
-- Claim and complete in one SQL statement.
SELECT c.outcome, idem_complete('shop', 'one-statement-0001', 200, 'at once')
	FROM idem_claim('shop', 'one-statement-0001') AS c;
SELECT c.outcome, idem_complete('shop', 'one-statement-0002', 200, 'with token', claim_token => c.claim_token)
	FROM idem_claim('shop', 'one-statement-0002') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-statement-0001') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('shop', 'one-statement-0002') AS c;
-- Many keys in one statement, each claimed twice.
-- In bulk
SELECT c.outcome, count(*), count(DISTINCT c.claim_token)
	FROM generate_series(0, 399) AS i,
		idem_claim('shop', 'many-keys-' || lpad((i % 200)::text, 6, '0')) AS c
	GROUP BY c.outcome ORDER BY c.outcome DESC;
-- One by one
SELECT count(*) FROM idem_keys WHERE key LIKE 'many-keys-%' AND state = 'started';

--
-- Two transactions: the claim commits, then its holder shows the token
--
SELECT outcome, claim_token, attempt,
		lease_expires_at > clock_timestamp() + '30 s' AND lease_expires_at <= clock_timestamp() + '1 min' AS lease,
		expires_at > clock_timestamp() + '23 h' AND expires_at <= clock_timestamp() + '24 h' AS ttl
	FROM idem_claim('job', 'two-transactions-1', '\xaa') \gset first_
\echo :first_outcome :first_attempt :first_lease :first_ttl
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'two-transactions-1', '\xaa') AS c;
-- A wait is for the lease, too, but no longer than it may be.
SELECT pg_temp.shown(to_json(c)), clock_timestamp() - statement_timestamp() >= '50 ms' AS waited
	FROM idem_claim('job', 'two-transactions-1', '\xaa', wait => '50 ms') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'two-transactions-1', '\xbb', wait => '10 minutes') AS c;
SET lock_timeout = '20 ms';
SELECT pg_temp.error_of($$ SELECT idem_claim('job', 'two-transactions-1', '\xaa', wait => '10 minutes') $$);
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'two-transactions-1', '\xaa', wait => '10 ms') AS c;
RESET lock_timeout;
SET statement_timeout = '20 ms';
SELECT idem_claim('job', 'two-transactions-1', '\xaa', wait => '10 minutes');
RESET statement_timeout;
-- When the lease ends, so does the wait.
SELECT outcome FROM idem_claim('job', 'lease-that-ends-01', lease => '0.1 s');
SELECT outcome, attempt FROM idem_claim('job', 'lease-that-ends-01', wait => '10 minutes');
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'two-transactions-1', '\xbb') AS c;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'two-transactions-1') AS l;
SELECT pg_temp.error_of($$ SELECT idem_complete('job', 'two-transactions-1', 200) $$);
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'two-transactions-1', 200, claim_token => %s) $$, :first_claim_token + 1));
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'two-transactions-9', 200, claim_token => %s) $$, :first_claim_token));
-- A checkpoint, a heartbeat: both renew the lease.
SELECT idem_heartbeat('job', 'two-transactions-1', '1 hour', :first_claim_token) BETWEEN clock_timestamp() + '59 min' AND clock_timestamp() + '1 h';
SELECT idem_checkpoint('job', 'two-transactions-1', 'charged', '{"charge" : "ch_1"}', '2 hours', :first_claim_token) BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '2 h';
SELECT lease_expires_at BETWEEN clock_timestamp() + '119 min' AND clock_timestamp() + '2 h' FROM idem_lookup('job', 'two-transactions-1');
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'two-transactions-1') AS l;
-- A checkpoint without state leaves none; the default lease is a minute.
SELECT idem_checkpoint('job', 'two-transactions-1', 'mailed', claim_token => :first_claim_token) BETWEEN clock_timestamp() + '30 s' AND clock_timestamp() + '1 min';
SELECT idem_heartbeat('job', 'two-transactions-1', claim_token => :first_claim_token) BETWEEN clock_timestamp() + '30 s' AND clock_timestamp() + '1 min';
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'two-transactions-1') AS l;
-- A lease never outlives the record.
SET idempotency.max_lease = '36500d';
SELECT idem_heartbeat('job', 'two-transactions-1', '10 years', :first_claim_token) = expires_at FROM idem_lookup('job', 'two-transactions-1');
RESET idempotency.max_lease;
SELECT lease_expires_at = expires_at FROM idem_claim('job', 'two-transactions-2', ttl => '1 hour', lease => '2 hours');
-- The work is done; a lost acknowledgement can be sent again.
SELECT idem_complete('job', 'two-transactions-1', 200, 'done', claim_token => :first_claim_token);
SELECT idem_complete('job', 'two-transactions-1', 409, 'again', claim_token => :first_claim_token);
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'two-transactions-1', '\xaa') AS c;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'two-transactions-1') AS l;

--
-- Takeover: the lease ran out
--
SELECT outcome, claim_token, attempt, lease_expires_at <= clock_timestamp() AS over
	FROM idem_claim('job', 'takeover-of-lease-1', '\xaa', lease => '0') \gset dead_
\echo :dead_outcome :dead_attempt :dead_over
SELECT idem_checkpoint('job', 'takeover-of-lease-1', 'charged', '{"charge" :"ch_2"}', '0', :dead_claim_token) <= clock_timestamp();
SELECT created_at AS created FROM idem_lookup('job', 'takeover-of-lease-1') \gset
-- Another request does not take it over.
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'takeover-of-lease-1', '\xbb') AS c;
-- Without a hash: the stored one stays.
SELECT outcome, attempt, recovery_point, recovery_state, claim_token,
		claim_token > :dead_claim_token AS higher
	FROM idem_claim('job', 'takeover-of-lease-1') \gset next_
\echo :next_outcome :next_attempt :next_recovery_point :next_recovery_state :next_higher
SELECT request_hash, created_at = :'created', pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'takeover-of-lease-1') AS l;
-- The dead worker wakes up, and is refused.
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'takeover-of-lease-1', 200, claim_token => %s) $$, :dead_claim_token));
SELECT pg_temp.error_of(format($$ SELECT idem_checkpoint('job', 'takeover-of-lease-1', 'x', claim_token => %s) $$, :dead_claim_token));
SELECT pg_temp.error_of(format($$ SELECT idem_heartbeat('job', 'takeover-of-lease-1', claim_token => %s) $$, :dead_claim_token));
SELECT pg_temp.error_of(format($$ SELECT idem_fail('job', 'takeover-of-lease-1', claim_token => %s) $$, :dead_claim_token));
SELECT pg_temp.error_of(format($$ SELECT idem_release('job', 'takeover-of-lease-1', %s) $$, :dead_claim_token));
SELECT idem_complete('job', 'takeover-of-lease-1', 200, 'by the next', claim_token => :next_claim_token);
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'takeover-of-lease-1', 200, claim_token => %s) $$, :dead_claim_token));
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'takeover-of-lease-1', '\xaa') AS c;
-- A claim whose lease ran out is still its holder's until somebody takes it.
SELECT claim_token FROM idem_claim('job', 'takeover-of-lease-2', lease => '0') \gset late_
SELECT idem_heartbeat('job', 'takeover-of-lease-2', claim_token => :late_claim_token) > clock_timestamp();
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'takeover-of-lease-2') AS c;
-- A hash given at the takeover is stored where there was none.
SELECT outcome FROM idem_claim('job', 'takeover-of-lease-3', lease => '0');
SELECT outcome, attempt FROM idem_claim('job', 'takeover-of-lease-3', '\xcc', lease => '0');
SELECT outcome FROM idem_claim('job', 'takeover-of-lease-3', '\xdd');
-- Attempt after attempt, each with a higher token.
DO $$
DECLARE
	previous bigint := 0;
	claim record;
BEGIN
	FOR i IN 1..4 LOOP
		SELECT * INTO claim FROM idem_claim('job', 'takeover-by-fail-001');
		RAISE NOTICE '% % %', claim.outcome, claim.attempt, claim.claim_token > previous;
		previous := claim.claim_token;
		PERFORM idem_fail('job', 'takeover-by-fail-001', 'try ' || i, claim.claim_token);
	END LOOP;
END
$$;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'takeover-by-fail-001') AS l;

--
-- Fail: the next claim retries at once, with the checkpoint
--
SELECT outcome, claim_token, attempt FROM idem_claim('job', 'failed-request-01', '\xaa', lease => '1 hour') \gset failed_
SELECT idem_checkpoint('job', 'failed-request-01', 'charged', '["ch_3"]', claim_token => :failed_claim_token) > clock_timestamp();
SELECT idem_fail('job', 'failed-request-01', 'bank: 503', :failed_claim_token);
SELECT idem_fail('job', 'failed-request-01', 'again', :failed_claim_token);
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'failed-request-01') AS l;
SELECT outcome FROM idem_claim('job', 'failed-request-01', '\xbb');
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'failed-request-01', 200, claim_token => %s) $$, :failed_claim_token));
SELECT pg_temp.shown(to_json(c)), claim_token > :failed_claim_token FROM idem_claim('job', 'failed-request-01', '\xaa') AS c;
-- The new attempt has no error yet.
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'failed-request-01') AS l;
SELECT pg_temp.error_of(format($$ SELECT idem_fail('job', 'failed-request-01', 'x', %s) $$, :failed_claim_token));
-- Fail and claim again in one transaction.
BEGIN;
SELECT attempt FROM idem_claim('job', 'failed-request-02');
SELECT idem_fail('job', 'failed-request-02');
SELECT idem_fail('job', 'failed-request-02');
SELECT outcome, attempt FROM idem_claim('job', 'failed-request-02');
SELECT idem_complete('job', 'failed-request-02', 204);
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'failed-request-02') AS c;

--
-- Release and forget: as if the key had never been claimed, but for tokens
--
SELECT claim_token FROM idem_claim('job', 'released-request-1', '\xaa') \gset released_
SELECT idem_checkpoint('job', 'released-request-1', 'x', '{}', claim_token => :released_claim_token) > clock_timestamp();
SELECT idem_release('job', 'released-request-1', :released_claim_token);
SELECT idem_release('job', 'released-request-1', :released_claim_token);
SELECT pg_temp.error_of($$ SELECT idem_release('job', 'released-request-1') $$);
SELECT pg_temp.error_of($$ SELECT idem_release('job', 'released-request-1', 1000000000) $$);
SELECT pg_temp.error_of($$ SELECT idem_release('job', 'released-request-1', -1) $$);
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('job', 'released-request-1') AS l;
SELECT count(*) FROM idem_keys WHERE key = 'released-request-1';
SELECT pg_temp.shown(to_json(c)), claim_token > :released_claim_token FROM idem_claim('job', 'released-request-1', '\xbb') AS c;
SELECT claim_token AS released_claim_token FROM idem_keys WHERE key = 'released-request-1' \gset
SELECT idem_forget('job', 'released-request-1');
SELECT idem_forget('job', 'released-request-1');
SELECT pg_temp.error_of(format($$ SELECT idem_complete('job', 'released-request-1', 200, claim_token => %s) $$, :released_claim_token));
SELECT pg_temp.shown(to_json(c)), claim_token > :released_claim_token FROM idem_claim('job', 'released-request-1') AS c;
-- Release and forget within the transaction that claimed.
BEGIN;
SELECT claim_token FROM idem_claim('job', 'released-request-2') \gset one_
SELECT idem_release('job', 'released-request-2');
SELECT outcome, claim_token > :one_claim_token FROM idem_claim('job', 'released-request-2');
SELECT idem_forget('job', 'released-request-2');
SELECT outcome, claim_token > :one_claim_token + 1 FROM idem_claim('job', 'released-request-2');
SELECT idem_complete('job', 'released-request-2', 200, 'third');
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('job', 'released-request-2') AS c;
-- A sequence that was set back does not let an old token win.
SELECT claim_token FROM idem_claim('job', 'set-back-sequence-1', lease => '0') \gset old_
SELECT setval('idem_claim_tokens', 1, false);
SELECT outcome, attempt, claim_token = :old_claim_token + 1 FROM idem_claim('job', 'set-back-sequence-1');
-- Nor is one given again that a savepoint took back.
SELECT setval('idem_claim_tokens', 1, false);
SELECT claim_token FROM idem_claim('job', 'set-back-sequence-2', lease => '0') \gset old_
SELECT setval('idem_claim_tokens', :old_claim_token + 1000) > 0;
SELECT claim_token FROM idem_claim('job', 'set-back-sequence-2', lease => '0') \gset old_
SELECT setval('idem_claim_tokens', 1, false);
BEGIN;
SAVEPOINT before_claim;
SELECT claim_token AS lost_token FROM idem_claim('job', 'set-back-sequence-2') \gset
ROLLBACK TO before_claim;
COMMIT;
SELECT outcome, :lost_token > :old_claim_token, claim_token > :lost_token FROM idem_claim('job', 'set-back-sequence-2');
-- Releasing again what is gone draws no token.
SELECT last_value AS last_token FROM idem_claim_tokens \gset
SELECT idem_release('job', 'set-back-sequence-4', :last_token), pg_temp.error_of(format($$ SELECT idem_release('job', 'set-back-sequence-4', %s) $$, :last_token + 1));
SELECT last_value = :last_token FROM idem_claim_tokens;
SELECT setval('idem_claim_tokens', :last_token + 1000) > 0;

--
-- The allowed calls: each call, with each token, on a record in each state
--
CREATE FUNCTION pg_temp.verdict(call text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	BEGIN
		EXECUTE 'SELECT ' || call INTO result;
		-- undo it
		RAISE EXCEPTION USING ERRCODE = 'UNDO0';
	EXCEPTION
		WHEN SQLSTATE 'UNDO0' THEN
			RETURN CASE WHEN result IN ('true', 'false') THEN result
				WHEN result IS NULL THEN 'NULL' ELSE 'lease' END;
		WHEN OTHERS THEN
			RETURN SQLSTATE;
	END;
END
$$;
CREATE TEMP TABLE matrix AS
	SELECT n, state, 'state-matrix-' || state AS key, c.claim_token AS token
	FROM (VALUES (1, 'absent'), (2, 'started'), (3, 'completed'), (4, 'failed'),
			(5, 'erased'), (6, 'expired')) AS s (n, state),
		LATERAL idem_claim('matrix', 'state-matrix-' || state,
			ttl => CASE state WHEN 'expired' THEN '0' ELSE '1 day' END::interval) AS c;
SELECT state, CASE state
		WHEN 'absent' THEN idem_release('matrix', key, token)
		WHEN 'completed' THEN idem_complete('matrix', key, 200, 'x', claim_token => token)
		WHEN 'failed' THEN idem_fail('matrix', key, 'x', token)
		WHEN 'erased' THEN idem_complete('matrix', key, 200, 'x', claim_token => token)
	END FROM matrix ORDER BY n;
SELECT idem_erase('matrix', 'state-matrix-erased');
\pset format aligned
\pset tuples_only off
SELECT state, name AS token,
		pg_temp.verdict(format('idem_complete(%L, %L, 200, claim_token => %L)', 'matrix', key, value)) AS complete,
		pg_temp.verdict(format('idem_complete(%L, %L, 200, %L::bytea, claim_token => %L)', 'matrix', key, '', value)) AS bytea,
		pg_temp.verdict(format('idem_checkpoint(%L, %L, %L, claim_token => %L)', 'matrix', key, 'x', value)) AS checkpoint,
		pg_temp.verdict(format('idem_heartbeat(%L, %L, claim_token => %L)', 'matrix', key, value)) AS heartbeat,
		pg_temp.verdict(format('idem_fail(%L, %L, claim_token => %L)', 'matrix', key, value)) AS fail,
		pg_temp.verdict(format('idem_release(%L, %L, %L)', 'matrix', key, value)) AS release
	FROM matrix,
		LATERAL (VALUES (1, 'right', token), (2, 'none', NULL), (3, 'older', token - 1), (4, 'unknown', 9e18::bigint)) AS t (place, name, value)
	WHERE NOT (state = 'absent' AND name = 'older')
	ORDER BY n, place;
SELECT state, (SELECT outcome FROM idem_claim('matrix', key)) AS next_claim
	FROM matrix WHERE state <> 'absent' ORDER BY n;
\pset format unaligned
\pset tuples_only on

--
-- Lookup and administration in every state
--
SELECT claim_token FROM idem_claim('admin', 'key-of-the-admin', '\x0102', ttl => '1 hour') \gset admin_
SELECT pg_temp.shown(to_json(l)), request_hash FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT idem_fail('admin', 'key-of-the-admin', 'oops', :admin_claim_token);
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT claim_token FROM idem_claim('admin', 'key-of-the-admin', '\x0102', ttl => '1 hour') \gset admin_
SELECT idem_checkpoint('admin', 'key-of-the-admin', 'step', '{"name": "Bond"}', claim_token => :admin_claim_token) > clock_timestamp();
SELECT idem_complete('admin', 'key-of-the-admin', 200, 'Dear Mr Bond', '{"X-Name": "Bond"}', :admin_claim_token);
SELECT pg_temp.shown(to_json(l)), completed_at >= created_at FROM idem_lookup('admin', 'key-of-the-admin') AS l;
-- Erasing leaves no personal data, but the fact, the status and the hash.
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT pg_temp.shown(to_json(l)), request_hash FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT to_json(k)::text LIKE '%Bond%' FROM idem_keys AS k WHERE key = 'key-of-the-admin';
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('admin', 'key-of-the-admin', '\x0102') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('admin', 'key-of-the-admin', '\x0103') AS c;
SELECT idem_complete('admin', 'key-of-the-admin', 200, 'Dear Mr Bond', claim_token => :admin_claim_token);
SELECT to_json(k)::text LIKE '%Bond%' FROM idem_keys AS k WHERE key = 'key-of-the-admin';
SELECT idem_forget('admin', 'key-of-the-admin');
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT idem_erase('admin', 'key-of-the-admin');
-- So are the error of a failed request and the state at a checkpoint: who holds a
-- claim keeps it, and the next attempt begins at the point, without the state.
SELECT claim_token FROM idem_claim('admin', 'key-of-the-admin', '\x0102') \gset admin_
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT idem_checkpoint('admin', 'key-of-the-admin', 'charged', '{"name": "Bond"}', claim_token => :admin_claim_token) > clock_timestamp();
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT pg_temp.shown(to_json(l)), request_hash FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT idem_checkpoint('admin', 'key-of-the-admin', 'charged', '{"name": "Bond"}', claim_token => :admin_claim_token) > clock_timestamp();
SELECT idem_fail('admin', 'key-of-the-admin', 'no licence for Mr Bond', :admin_claim_token);
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT to_json(k)::text LIKE '%Bond%' FROM idem_keys AS k WHERE key = 'key-of-the-admin';
SELECT pg_temp.shown(to_json(l)), request_hash FROM idem_lookup('admin', 'key-of-the-admin') AS l;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('admin', 'key-of-the-admin', '\x0102') AS c;
SELECT idem_forget('admin', 'key-of-the-admin');
-- A binary response is erased as well; what has expired, too.
SELECT idem_complete('admin', 'key-of-the-admin', 200, '\x01'::bytea) FROM idem_claim('admin', 'key-of-the-admin');
SELECT idem_erase('admin', 'key-of-the-admin');
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('admin', 'key-of-the-admin') AS c;
SELECT idem_complete('admin', 'expired-personal1', 200, 'Bond') FROM idem_claim('admin', 'expired-personal1');
UPDATE idem_keys SET expires_at = clock_timestamp() WHERE key = 'expired-personal1';
SELECT idem_erase('admin', 'expired-personal1');
SELECT state, response_body FROM idem_keys WHERE key = 'expired-personal1';
SELECT idem_forget('admin', 'expired-personal1');
SELECT count(*) FROM idem_keys WHERE key = 'expired-personal1';

--
-- The lock of a key is kept for the call only
--
BEGIN;
SELECT outcome FROM idem_claim('lock', 'lock-of-a-key-001', lease => '0');
SELECT idem_fail('lock', 'lock-of-a-key-001');
SELECT outcome FROM idem_claim('lock', 'lock-of-a-key-001', wait => '1 minute');
SELECT outcome FROM idem_claim('lock', 'lock-of-a-key-001', wait => '1 minute');
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;

--
-- The last attempt, and the last token: no next one is made up
--
SELECT idem_fail('last', 'last-attempt-0001') FROM idem_claim('last', 'last-attempt-0001');
UPDATE idem_keys SET attempt = 2147483646 WHERE scope = 'last';
SELECT outcome, attempt FROM idem_claim('last', 'last-attempt-0001', lease => '0');
SELECT outcome, attempt FROM idem_claim('last', 'last-attempt-0001');
SELECT last_value AS last_token FROM idem_claim_tokens \gset
UPDATE idem_keys SET attempt = 1, claim_token = 4611686018427387903 WHERE scope = 'last';
SELECT outcome, claim_token FROM idem_claim('last', 'last-attempt-0001', lease => '0');
-- The sequence is not moved further.
SELECT setval('idem_claim_tokens', :last_token) > 0;
SELECT outcome, claim_token FROM idem_claim('last', 'last-attempt-0001');
SELECT attempt, claim_token FROM idem_keys WHERE scope = 'last';
UPDATE idem_keys SET expires_at = now() WHERE scope = 'last';
SELECT outcome, claim_token FROM idem_claim('last', 'last-attempt-0001');
SELECT idem_forget('last', 'last-attempt-0001');
SELECT outcome, claim_token < 4611686018427387903 FROM idem_claim('last', 'last-attempt-0001');

--
-- Replay is byte for byte
--
CREATE TEMP TABLE replies (n int, status int, headers json, body text, bytes bytea);
INSERT INTO replies VALUES
	(1, 200, NULL, NULL, NULL),
	(2, 200, '{}', '', NULL),
	(3, 200, 'null', 'null', NULL),
	(4, 201, E'{"b" : 1.0,\n\t"a":2,  "a":3e0, "\\u00e9" : "\\u0041"}', E'  {"b" : 1.0,\r\n "a":2, "a":3}  \n', NULL),
	(5, 100, '[]', E'quote '' " backslash \\ tab \t bell \007 del \177', NULL),
	(6, 599, '""', U&'gr\00FC\00DFe \+01F600 A\030A \00C5 \200B', NULL),
	(7, 200, NULL, NULL, ''),
	(8, 200, '{"Content-Type": "image/png"}', NULL, (SELECT string_agg(decode(lpad(to_hex(b), 2, '0'), 'hex'), '' ORDER BY b) FROM generate_series(0, 255) AS b));
-- Out of line, compressed or not: up to the limit of a megabyte.
INSERT INTO replies
	SELECT 9, 200, to_json(s), s, NULL FROM (SELECT repeat('compressible ', 80000) AS s) AS s;
INSERT INTO replies
	SELECT 10, 200, to_json(s), s, NULL FROM (SELECT string_agg(md5(i::text), '') AS s FROM generate_series(1, 32760) AS i) AS s;
INSERT INTO replies
	SELECT 11, 200, NULL, NULL, string_agg(sha256(i::text::bytea), '' ORDER BY i) FROM generate_series(1, 32768) AS i;
-- Half of them in the transaction that claims, half in another.
SELECT n, c.outcome, CASE WHEN bytes IS NULL
		THEN idem_complete('replay', key, status, body, headers)
		ELSE idem_complete('replay', key, status, bytes, headers) END
	FROM (SELECT *, 'replay-number-' || lpad(n::text, 2, '0') AS key FROM replies WHERE n % 2 = 0 ORDER BY n) AS r,
		LATERAL idem_claim('replay', key) AS c;
CREATE TEMP TABLE replay_claims AS
	SELECT n, 'replay-number-' || lpad(n::text, 2, '0') AS key, c.claim_token AS token
	FROM replies, LATERAL idem_claim('replay', 'replay-number-' || lpad(n::text, 2, '0')) AS c WHERE n % 2 = 1;
SELECT n, CASE WHEN bytes IS NULL
		THEN idem_complete('replay', key, status, body, headers, token)
		ELSE idem_complete('replay', key, status, bytes, headers, token) END
	FROM replies JOIN replay_claims USING (n) ORDER BY n;
\pset format aligned
\pset tuples_only off
SELECT n, c.outcome, c.response_status,
		c.response_headers::text IS NOT DISTINCT FROM headers::text AS headers,
		c.response_body COLLATE "C" IS NOT DISTINCT FROM body AS body,
		c.response_bytes IS NOT DISTINCT FROM bytes AS bytes,
		octet_length(c.response_body) AS body_size, octet_length(c.response_bytes) AS bytes_size
	FROM replies, LATERAL idem_claim('replay', 'replay-number-' || lpad(n::text, 2, '0')) AS c ORDER BY n;
SELECT n, l.state,
		l.response_headers::text IS NOT DISTINCT FROM headers::text AS headers,
		l.response_body COLLATE "C" IS NOT DISTINCT FROM body AS body,
		l.response_bytes IS NOT DISTINCT FROM bytes AS bytes
	FROM replies, LATERAL idem_lookup('replay', 'replay-number-' || lpad(n::text, 2, '0')) AS l ORDER BY n;
\pset format unaligned
\pset tuples_only on
SELECT pg_relation_size(reltoastrelid) > 1000000 AS out_of_line FROM pg_class WHERE oid = 'idem_keys'::regclass;
SELECT response_headers FROM idem_claim('replay', 'replay-number-04');
-- A large recovery state survives what does not touch it.
SELECT '[' || string_agg('"' || md5(i::text) || '"', ', ' ORDER BY i) || ']' AS state FROM generate_series(1, 20000) AS i \gset large_
SELECT claim_token FROM idem_claim('replay', 'large-recovery-state', lease => '0') \gset large_
SELECT idem_checkpoint('replay', 'large-recovery-state', 'far', :'large_state', '0', :large_claim_token) <= clock_timestamp();
SELECT idem_heartbeat('replay', 'large-recovery-state', '0', :large_claim_token) <= clock_timestamp();
SELECT attempt, recovery_point, recovery_state::text = :'large_state' FROM idem_claim('replay', 'large-recovery-state', lease => '0');
SELECT attempt, recovery_point, recovery_state::text = :'large_state' FROM idem_claim('replay', 'large-recovery-state');
SELECT attempt, recovery_state::text = :'large_state' FROM idem_lookup('replay', 'large-recovery-state');

--
-- The hash is compared where both sides have one
--
SELECT idem_complete('hash', 'hash-was-given-01', 200) FROM idem_claim('hash', 'hash-was-given-01', '\x0102');
SELECT idem_complete('hash', 'hash-not-given-01', 200) FROM idem_claim('hash', 'hash-not-given-01');
SELECT stored, given, outcome FROM (VALUES
	(1, 'hash-was-given-01', '\x0102', NULL::bytea), (2, 'hash-was-given-01', '\x0102', '\x0102'),
	(3, 'hash-was-given-01', '\x0102', '\x0103'), (4, 'hash-was-given-01', '\x0102', '\x01'),
	(5, 'hash-was-given-01', '\x0102', '\x010200'),
	(6, 'hash-not-given-01', NULL, NULL), (7, 'hash-not-given-01', NULL, '\x0102')) AS h (n, key, stored, given),
	LATERAL idem_claim('hash', key, given) ORDER BY n;
-- A replay does not store the hash that came with it.
SELECT outcome FROM idem_claim('hash', 'hash-not-given-01', '\x0104');

--
-- Expiry
--
SHOW idempotency.expired_key_policy;
SELECT outcome, claim_token, expires_at <= clock_timestamp() AS over, lease_expires_at <= expires_at AS lease FROM idem_claim('expiry', 'expired-request-01', '\xaa', ttl => '0') \gset x_
\echo :x_outcome :x_over :x_lease
SELECT count(*) FROM idem_keys WHERE key = 'expired-request-01';
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('expiry', 'expired-request-01') AS l;
SELECT pg_temp.error_of(format($$ SELECT idem_complete('expiry', 'expired-request-01', 200, claim_token => %s) $$, :x_claim_token));
SELECT pg_temp.error_of(format($$ SELECT idem_heartbeat('expiry', 'expired-request-01', claim_token => %s) $$, :x_claim_token));
-- reuse: it starts afresh, whatever the hash; there is still one row.
SELECT pg_temp.shown(to_json(c)), claim_token > :x_claim_token FROM idem_claim('expiry', 'expired-request-01', '\xbb', ttl => '0') AS c;
SELECT count(*), min(request_hash::text) FROM idem_keys WHERE key = 'expired-request-01';
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-01') AS c;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('expiry', 'expired-request-01') AS l;
-- A completed one is never replayed after its expiry, nor is anything of it
-- kept for the claim that follows.
BEGIN;
SELECT outcome FROM idem_claim('expiry', 'expired-request-02', '\xaa');
SELECT idem_checkpoint('expiry', 'expired-request-02', 'step', '{}') IS NOT NULL;
SELECT idem_complete('expiry', 'expired-request-02', 200, 'old', '{"old":1}');
COMMIT;
UPDATE idem_keys SET expires_at = clock_timestamp() WHERE key = 'expired-request-02';
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('expiry', 'expired-request-02') AS l;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-02', '\xbb') AS c;
SELECT pg_temp.shown(to_json(k)) FROM idem_keys AS k WHERE key = 'expired-request-02';
-- Also in the transaction that claimed it.
BEGIN;
SELECT outcome, claim_token FROM idem_claim('expiry', 'expired-request-03', ttl => '0') \gset same_
SELECT outcome, attempt, claim_token > :same_claim_token FROM idem_claim('expiry', 'expired-request-03');
SELECT idem_complete('expiry', 'expired-request-03', 200);
COMMIT;
-- The clock counts, not the start of the transaction.
BEGIN;
SELECT pg_sleep(0.001);
SELECT outcome FROM idem_claim('expiry', 'expired-request-04', ttl => '0');
SELECT expires_at > now(), expires_at < clock_timestamp() FROM idem_keys WHERE key = 'expired-request-04';
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('expiry', 'expired-request-04') AS l;
SELECT outcome FROM idem_claim('expiry', 'expired-request-04');
ROLLBACK;
-- reject: refused as long as the row is there.
SET idempotency.expired_key_policy = reject;
SELECT outcome FROM idem_claim('expiry', 'expired-request-05', '\xaa', ttl => '0');
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-05', '\xaa') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-05', '\xbb') AS c;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('expiry', 'expired-request-05') AS l;
-- With a retention: refused for that long after the expiry.
SET idempotency.tombstone_retention = '1 h';
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-05', '\xaa') AS c;
SELECT pg_sleep(0.01);
SET idempotency.tombstone_retention = '1 ms';
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('expiry', 'expired-request-05', '\xbb', ttl => '0') AS c;
-- Live records are not touched by the policy; forgotten ones are new.
SET idempotency.tombstone_retention = 0;
SELECT outcome FROM idem_claim('expiry', 'expired-request-05', '\xbb');
SELECT outcome FROM idem_claim('shop', 'one-transaction-1', '\x01');
SELECT idem_forget('expiry', 'expired-request-05');
SELECT outcome FROM idem_claim('expiry', 'expired-request-05', '\xcc');
RESET idempotency.expired_key_policy;
RESET idempotency.tombstone_retention;

--
-- Savepoints and subtransactions
--
-- A claim rolled back to a savepoint is gone; the next has a higher token.
BEGIN;
SAVEPOINT s;
SELECT claim_token FROM idem_claim('sub', 'savepoint-request-1', '\xaa') \gset sp_
ROLLBACK TO s;
SELECT pg_temp.shown(to_json(l)) FROM idem_lookup('sub', 'savepoint-request-1') AS l;
SELECT pg_temp.error_of($$ SELECT idem_complete('sub', 'savepoint-request-1', 200) $$);
SELECT outcome, attempt, claim_token > :sp_claim_token FROM idem_claim('sub', 'savepoint-request-1', '\xbb');
SELECT idem_complete('sub', 'savepoint-request-1', 200, 'kept');
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'savepoint-request-1', '\xbb') AS c;
-- A claim in a released savepoint belongs to the transaction.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-2');
RELEASE s;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-2');
SELECT idem_complete('sub', 'savepoint-request-2', 200, 'outside');
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'savepoint-request-2') AS c;
-- A completion rolled back to a savepoint leaves the claim as it was.
BEGIN;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-3');
SAVEPOINT s;
SELECT idem_complete('sub', 'savepoint-request-3', 500, 'undone');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-3');
SELECT idem_complete('sub', 'savepoint-request-3', 200, 'done');
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'savepoint-request-3') AS c;
-- A takeover rolled back to a savepoint leaves the old token in force.
SELECT claim_token FROM idem_claim('sub', 'savepoint-request-4', lease => '0') \gset sp_
BEGIN;
SAVEPOINT s;
SELECT outcome, attempt FROM idem_claim('sub', 'savepoint-request-4');
SELECT pg_temp.error_of(format($$ SELECT idem_complete('sub', 'savepoint-request-4', 200, claim_token => %s) $$, :sp_claim_token));
ROLLBACK TO s;
SELECT pg_temp.error_of($$ SELECT idem_complete('sub', 'savepoint-request-4', 200) $$);
SELECT idem_complete('sub', 'savepoint-request-4', 200, 'by the first', claim_token => :sp_claim_token);
COMMIT;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'savepoint-request-4') AS c;
-- A release, a forget rolled back.
SELECT claim_token FROM idem_claim('sub', 'savepoint-request-5') \gset sp_
BEGIN;
SAVEPOINT s;
SELECT idem_release('sub', 'savepoint-request-5', :sp_claim_token);
SELECT outcome FROM idem_claim('sub', 'savepoint-request-5');
ROLLBACK TO s;
SELECT idem_forget('sub', 'savepoint-request-5');
ROLLBACK TO s;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-5');
COMMIT;
SELECT idem_complete('sub', 'savepoint-request-5', 204, claim_token => :sp_claim_token);
-- An EXCEPTION block is a subtransaction.
DO $$
DECLARE
	token bigint;
	answer record;
BEGIN
	BEGIN
		SELECT claim_token INTO token FROM idem_claim('sub', 'exception-request-1');
		PERFORM idem_complete('sub', 'exception-request-1', 200, 'undone');
		RAISE EXCEPTION 'undo';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	SELECT * INTO answer FROM idem_claim('sub', 'exception-request-1');
	RAISE NOTICE '% %', answer.outcome, answer.claim_token > token;
	BEGIN
		PERFORM idem_complete('sub', 'exception-request-1', 200, 'kept');
	EXCEPTION WHEN OTHERS THEN
		RAISE NOTICE 'not reached: %', SQLERRM;
	END;
	FOR i IN 1..100 LOOP
		BEGIN
			PERFORM idem_claim('sub', 'exception-request-2');
			IF i < 100 THEN
				RAISE EXCEPTION 'undo';
			END IF;
		EXCEPTION WHEN raise_exception THEN
			NULL;
		END;
	END LOOP;
	RAISE NOTICE '%', idem_complete('sub', 'exception-request-2', 200, 'the hundredth');
END
$$;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'exception-request-1') AS c;
SELECT pg_temp.shown(to_json(c)) FROM idem_claim('sub', 'exception-request-2') AS c;
-- Another transaction's claim does not become this one's by writing its row.
SELECT claim_token FROM idem_claim('sub', 'savepoint-request-6') \gset sp_
BEGIN;
SELECT idem_heartbeat('sub', 'savepoint-request-6', claim_token => :sp_claim_token) > now();
SELECT pg_temp.error_of($$ SELECT idem_complete('sub', 'savepoint-request-6', 200) $$);
SELECT idem_complete('sub', 'savepoint-request-6', 200, claim_token => :sp_claim_token);
COMMIT;
-- Nobody, not even this transaction, takes over from it, lease or not.
BEGIN;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-9', lease => '0');
SELECT outcome FROM idem_claim('sub', 'savepoint-request-9');
SELECT idem_complete('sub', 'savepoint-request-9', 200);
COMMIT;
-- Claims of one transaction are distinguished from those of the previous one.
BEGIN;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-7');
COMMIT;
BEGIN;
SELECT outcome FROM idem_claim('sub', 'savepoint-request-8');
SELECT pg_temp.error_of($$ SELECT idem_complete('sub', 'savepoint-request-7', 200) $$);
SELECT idem_complete('sub', 'savepoint-request-8', 200);
COMMIT;

--
-- Answers other than "new" write nothing
--
SELECT outcome FROM idem_claim('quiet', 'quiet-in-progress-1', '\xaa', lease => '1 hour');
SELECT idem_complete('quiet', 'quiet-completed-01', 200, 'x') FROM idem_claim('quiet', 'quiet-completed-01', '\xaa');
SELECT idem_complete('quiet', 'quiet-erased-00001', 200, 'x') FROM idem_claim('quiet', 'quiet-erased-00001', '\xaa');
SELECT idem_erase('quiet', 'quiet-erased-00001');
SELECT outcome FROM idem_claim('quiet', 'quiet-expired-0001', ttl => '0');
CREATE TEMP TABLE before AS SELECT key, xmin AS writer, xmax AS locker, ctid AS place FROM idem_keys WHERE scope = 'quiet';
SET idempotency.expired_key_policy = reject;
BEGIN;
SELECT outcome FROM idem_claim('quiet', 'quiet-completed-01', '\xaa');
SELECT outcome FROM idem_claim('quiet', 'quiet-completed-01', '\xbb');
SELECT outcome FROM idem_claim('quiet', 'quiet-completed-01', '\xaa', wait => '10 minutes');
SELECT outcome FROM idem_claim('quiet', 'quiet-in-progress-1', '\xaa');
SELECT outcome FROM idem_claim('quiet', 'quiet-in-progress-1', '\xaa', wait => '10 ms');
SELECT outcome FROM idem_claim('quiet', 'quiet-in-progress-1', '\xbb');
SELECT outcome FROM idem_claim('quiet', 'quiet-erased-00001', '\xaa');
SELECT outcome FROM idem_claim('quiet', 'quiet-expired-0001');
SELECT state FROM idem_lookup('quiet', 'quiet-completed-01');
SELECT idem_forget('quiet', 'quiet-not-there-01'), idem_erase('quiet', 'quiet-not-there-01');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
-- ... and this would show it.
SELECT outcome FROM idem_claim('quiet', 'quiet-not-there-01');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
COMMIT;
RESET idempotency.expired_key_policy;
SELECT count(*) FROM before JOIN idem_keys AS k USING (key)
	WHERE writer = k.xmin AND locker = k.xmax AND place = k.ctid;

--
-- Completing is a HOT update, and so is all else that moves no index entry
--
CREATE FUNCTION pg_temp.hot_updates() RETURNS bigint
LANGUAGE sql AS $$ SELECT pg_stat_get_xact_tuples_hot_updated('idem_keys'::regclass) $$;
CREATE FUNCTION pg_temp.updates() RETURNS bigint
LANGUAGE sql AS $$ SELECT pg_stat_get_xact_tuples_updated('idem_keys'::regclass) $$;
TRUNCATE idem_keys;
BEGIN;
SELECT pg_temp.hot_updates() AS hot, pg_temp.updates() AS updates \gset before_
-- In bulk
SELECT c.outcome, idem_complete('hot', 'hot-update-' || lpad(i::text, 6, '0'), 200, 'forty bytes of a response, more or less'), count(*)
	FROM generate_series(1, 500) AS i, idem_claim('hot', 'hot-update-' || lpad(i::text, 6, '0')) AS c GROUP BY 1, 2;
-- One by one
SELECT pg_temp.hot_updates() - :before_hot AS hot, pg_temp.updates() - :before_updates AS updates;
SELECT pg_temp.hot_updates() AS hot \gset before_
SELECT outcome FROM idem_claim('hot', 'hot-update-others1');
SELECT idem_checkpoint('hot', 'hot-update-others1', 'x') IS NOT NULL, idem_heartbeat('hot', 'hot-update-others1') IS NOT NULL, idem_fail('hot', 'hot-update-others1');
-- A call of the portable edition that takes a millisecond writes its row again.
SELECT pg_temp.hot_updates() - :before_hot >= 3 AS hot;
-- A takeover moves expires_at, which is indexed.
SELECT pg_temp.hot_updates() AS hot \gset before_
SELECT outcome FROM idem_claim('hot', 'hot-update-others1');
SELECT pg_temp.hot_updates() - :before_hot AS hot;
COMMIT;
-- Completing what an earlier transaction claimed; erasing.
SELECT claim_token FROM idem_claim('hot', 'hot-update-later-1') \gset hot_
BEGIN;
SELECT pg_temp.hot_updates() AS hot \gset before_
SELECT idem_complete('hot', 'hot-update-later-1', 200, 'x', claim_token => :hot_claim_token);
SELECT idem_erase('hot', 'hot-update-later-1');
SELECT pg_temp.hot_updates() - :before_hot >= 2 AS hot;
COMMIT;
-- The primary key and expires_at are all that is indexed.
SELECT indexrelid::regclass FROM pg_index WHERE indrelid = 'idem_keys'::regclass ORDER BY indexrelid::regclass::text COLLATE "C";

--
-- Named notation, in any schema's search path; NULL for what has a default
--
SELECT outcome, attempt FROM idem_claim(lease => NULL, wait => NULL, ttl => NULL, request_hash => NULL,
	key => 'named-notation-01', scope => 'named');
SELECT claim_token FROM idem_keys WHERE key = 'named-notation-01' \gset named_
SELECT idem_checkpoint(claim_token => :named_claim_token, recovery_point => 'x', recovery_state => NULL, lease => NULL, key => 'named-notation-01', scope => 'named') IS NOT NULL;
SELECT idem_heartbeat(claim_token => :named_claim_token, key => 'named-notation-01', lease => NULL, scope => 'named') IS NOT NULL;
SELECT idem_complete(claim_token => :named_claim_token, response_headers => NULL, response_body => NULL::text, response_status => 204, key => 'named-notation-01', scope => 'named');
SELECT state FROM idem_lookup(key => 'named-notation-01', scope => 'named');
SELECT idem_erase(key => 'named-notation-01', scope => 'named'), idem_forget(key => 'named-notation-01', scope => 'named');
SELECT claim_token FROM idem_claim('named', 'named-notation-02') \gset named_
SELECT idem_fail(error => NULL, claim_token => :named_claim_token, key => 'named-notation-02', scope => 'named');
SELECT claim_token FROM idem_claim('named', 'named-notation-02') \gset named_
SELECT idem_release(claim_token => :named_claim_token, key => 'named-notation-02', scope => 'named');

-- A claim that was just made is not searched for.  It must be found, and not
-- found, as if it were.
BEGIN;
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0001');
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0002');
SELECT idem_complete('shortcut', 'key-shortcut-0001', 200, 'first');
SELECT idem_checkpoint('shortcut', 'key-shortcut-0002', 'half') IS NOT NULL AS renewed;
SELECT idem_complete('shortcut', 'key-shortcut-0002', 200, 'second');
COMMIT;
SELECT key, response_body, recovery_point FROM idem_keys WHERE scope = 'shortcut' ORDER BY key;
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0003');
ROLLBACK TO a;
SELECT pg_temp.error_of($$SELECT idem_complete('shortcut', 'key-shortcut-0003', 200)$$);
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0003');
RELEASE a;
SELECT idem_complete('shortcut', 'key-shortcut-0003', 200);
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0004');
CLUSTER idem_keys USING idem_keys_pkey;
SELECT idem_complete('shortcut', 'key-shortcut-0004', 200);
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0005');
TRUNCATE idem_keys;
SELECT idem_complete('shortcut', 'key-shortcut-0005', 200);
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('shortcut', 'key-shortcut-0006');
SELECT idem_release('shortcut', 'key-shortcut-0006');
SELECT idem_complete('shortcut', 'key-shortcut-0006', 200);
ROLLBACK;

-- A body without a type, as most drivers bind strings, is text.
PREPARE untyped AS SELECT idem_complete('shortcut', 'key-shortcut-0007', 200, $1, claim_token => $2);
SELECT parameter_types FROM pg_prepared_statements WHERE name = 'untyped';
DEALLOCATE untyped;
