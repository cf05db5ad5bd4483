--
-- Outcomes: a row of the design's tables, or a rule below them, an assertion
--
-- A claim usually finds a committed record, so the records are made and
-- committed first, and forgotten after the assertions are rolled back. Tests
-- of two concurrent sessions are in test/isolation.
--
SET client_min_messages = warning;

CREATE FUNCTION pg_temp.this_hash() RETURNS bytea
LANGUAGE sql
RETURN idem_request_hash('POST', '/orders', '{"amount": 1}');

CREATE FUNCTION pg_temp.other_hash() RETURNS bytea
LANGUAGE sql
RETURN idem_request_hash('POST', '/orders', '{"amount": 2}');

DO $$
DECLARE
	this_hash bytea := pg_temp.this_hash();
	name text;
BEGIN
	FOREACH name IN ARRAY ARRAY['completed-text', 'erased-response',
		'expired-completed', 'expired-erased', 'hash-compared']
	LOOP
		PERFORM idem_claim('outcomes', 'key-of-' || name, this_hash);
		PERFORM idem_checkpoint('outcomes', 'key-of-' || name, 'charged',
			'{"charge": 7}');
		PERFORM idem_complete('outcomes', 'key-of-' || name, 201,
			E'{ "order" :\t1.00 }\n', '{"Location" :  "/orders/1"}');
	END LOOP;
	PERFORM idem_erase('outcomes', 'key-of-erased-response');
	PERFORM idem_erase('outcomes', 'key-of-expired-erased');

	PERFORM idem_claim('outcomes', 'key-of-completed-bytes', this_hash);
	PERFORM idem_complete('outcomes', 'key-of-completed-bytes', 200,
		'\x00ff0a'::bytea);
	PERFORM idem_claim('outcomes', 'key-of-completed-empty', this_hash);
	PERFORM idem_complete('outcomes', 'key-of-completed-empty', 204);
	PERFORM idem_claim('outcomes', 'key-of-hash-not-stored');
	PERFORM idem_complete('outcomes', 'key-of-hash-not-stored', 200, 'done');

	FOREACH name IN ARRAY ARRAY['failed-attempt', 'failed-without-hash',
		'failed-again', 'expired-failed', 'failed-twice']
	LOOP
		PERFORM idem_claim('outcomes', 'key-of-' || name, this_hash);
		PERFORM idem_checkpoint('outcomes', 'key-of-' || name, 'charged',
			'{"charge": 7}');
		PERFORM idem_fail('outcomes', 'key-of-' || name, 'card declined');
	END LOOP;

	FOREACH name IN ARRAY ARRAY['abandoned-claim', 'abandoned-mismatch',
		'abandoned-but-mine', 'abandoned-zombie']
	LOOP
		PERFORM idem_claim('outcomes', 'key-of-' || name, this_hash,
			lease => '0');
		PERFORM idem_checkpoint('outcomes', 'key-of-' || name, 'charged',
			'{"charge": 7}', '0');
	END LOOP;

	FOREACH name IN ARRAY ARRAY['live-claim', 'live-complete', 'live-fail',
		'live-release', 'live-checkpoint', 'live-heartbeat', 'live-forget',
		'live-capped', 'ending-lease', 'expired-claim']
	LOOP
		PERFORM idem_claim('outcomes', 'key-of-' || name, this_hash,
			lease => '1 hour');
	END LOOP;

	PERFORM idem_set('outcomes', 'post', 'committed', 'dislike', true, 9);
	PERFORM idem_set('outcomes', 'post', 'committed', 'like', true, 10);
END
$$;

-- No record need be waited for to expire.
UPDATE idem_keys SET expires_at = clock_timestamp() - interval '1 minute'
	WHERE scope = 'outcomes' AND key LIKE 'key-of-expired-%';

--
-- Answers that write nothing assign no transaction id.  They are asked for
-- in transactions of their own, and judged below.
--
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_new
	FROM idem_claim('outcomes', 'key-of-nobody-at-all') \gset
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_replay
	FROM idem_claim('outcomes', 'key-of-completed-text') \gset
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_erased
	FROM idem_claim('outcomes', 'key-of-erased-response') \gset
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_in_progress
	FROM idem_claim('outcomes', 'key-of-live-claim') \gset
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_hash_conflict
	FROM idem_claim('outcomes', 'key-of-abandoned-claim',
		pg_temp.other_hash()) \gset
SET idempotency.expired_key_policy = reject;
SELECT outcome || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_expired
	FROM idem_claim('outcomes', 'key-of-expired-completed') \gset
RESET idempotency.expired_key_policy;
SELECT should_process || ', '
		|| (pg_current_xact_id_if_assigned() IS NOT NULL) AS xid_advance
	FROM idem_try_advance('outcomes', 'post', 'committed', 10) \gset
SELECT processed || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_toggle
	FROM idem_toggle('outcomes', 'post', 'committed', 'like', 10) \gset
SELECT processed || ', ' || (pg_current_xact_id_if_assigned() IS NOT NULL)
	AS xid_set
	FROM idem_set('outcomes', 'post', 'committed', 'like', true, 9,
		'{dislike}') \gset
SELECT idem_complete('outcomes', 'key-of-completed-text', 500,
		claim_token => claim_token) || ', '
		|| (pg_current_xact_id_if_assigned() IS NOT NULL) AS xid_complete
	FROM idem_keys WHERE key = 'key-of-completed-text' \gset

-- This lease ends a second from now: after the next transaction has begun.
UPDATE idem_keys SET lease_expires_at = clock_timestamp() + interval '1 s'
	WHERE key = 'key-of-ending-lease';

BEGIN;

-- A row of a result without its nulls; times and claim tokens, which differ
-- from run to run, read "set".
CREATE FUNCTION pg_temp.shown(query text) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	result jsonb;
BEGIN
	EXECUTE format('SELECT to_jsonb(r) FROM (%s) AS r', query)
		INTO STRICT result;
	RETURN (SELECT coalesce(jsonb_object_agg(key,
			CASE WHEN key LIKE '%\_at' OR key = 'claim_token'
				THEN '"set"' ELSE value END), '{}')
		FROM jsonb_each(result) WHERE value <> 'null');
END
$$;

CREATE FUNCTION pg_temp.claim(key text, arguments text DEFAULT 'NULL')
RETURNS jsonb
LANGUAGE sql
RETURN pg_temp.shown(format('SELECT * FROM idem_claim(''outcomes'', %L, %s)',
	'key-of-' || key, arguments));

CREATE FUNCTION pg_temp.lookup(key text) RETURNS jsonb
LANGUAGE sql
RETURN pg_temp.shown(format('SELECT * FROM idem_lookup(''outcomes'', %L)',
	'key-of-' || key));

CREATE FUNCTION pg_temp.token(key text) RETURNS bigint
LANGUAGE sql
RETURN (SELECT claim_token FROM idem_keys AS k
	WHERE k.scope = 'outcomes' AND k.key = token.key);

-- WAL records that a query writes.  Its first run may have to prune a page or
-- to set hint bits, for which it is not to blame, so the second one counts.
CREATE FUNCTION pg_temp.wal_records(query text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE query;
	EXECUTE 'EXPLAIN (ANALYZE, WAL, FORMAT JSON) ' || query INTO plan;
	RETURN plan -> 0 -> 'Plan' ->> 'WAL Records';
END
$$;

CREATE FUNCTION pg_temp.sqlstate_of(query text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE query;
	RETURN '00000';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;

-- The answer to a claim that finds nothing.
CREATE FUNCTION pg_temp.fresh() RETURNS jsonb
LANGUAGE sql
RETURN '{"outcome": "new", "claim_token": "set", "attempt": 1,
	"lease_expires_at": "set", "expires_at": "set"}'::jsonb;

SELECT plan(251);

--
-- idem_claim: found nothing, an expired record, a failed one, an abandoned one
--
SELECT is(pg_temp.claim('own-claim', 'pg_temp.this_hash()'),
	pg_temp.fresh(), 'a claim that finds nothing is new');
SELECT is(pg_temp.claim('expired-completed', 'pg_temp.this_hash()'),
	pg_temp.fresh(),
	'a claim that finds an expired record is new, and starts afresh');
SELECT is(pg_temp.claim('expired-erased', 'pg_temp.other_hash()'),
	pg_temp.fresh(), 'the hash of an expired record is forgotten');
SELECT is(pg_temp.claim('expired-failed'),
	pg_temp.fresh(),
	'attempts and checkpoint of an expired record are forgotten');
SELECT is(pg_temp.lookup('expired-erased'),
	jsonb_build_object('state', 'started', 'attempt', 1,
		'request_hash', pg_temp.other_hash(), 'created_at', 'set',
		'lease_expires_at', 'set', 'expires_at', 'set'),
	'of an expired record nothing is left after a claim');
SELECT is(pg_temp.claim('failed-attempt', 'pg_temp.this_hash()'),
	'{"outcome": "new", "claim_token": "set", "attempt": 2,
		"recovery_point": "charged", "recovery_state": {"charge": 7},
		"lease_expires_at": "set", "expires_at": "set"}',
	'a claim that finds a failed record is new, and resumes');
SELECT is(pg_temp.claim('abandoned-claim', 'pg_temp.this_hash()'),
	'{"outcome": "new", "claim_token": "set", "attempt": 2,
		"recovery_point": "charged", "recovery_state": {"charge": 7},
		"lease_expires_at": "set", "expires_at": "set"}',
	'a claim that finds a lease that ran out is new, and resumes');

--
-- idem_claim: the other rows
--
SELECT is(pg_temp.claim('completed-text', 'pg_temp.this_hash()'),
	jsonb_build_object('outcome', 'replay', 'response_status', 201,
		'response_headers', '{"Location": "/orders/1"}'::jsonb,
		'response_body', E'{ "order" :\t1.00 }\n', 'expires_at', 'set'),
	'completed, same hash: replay of status, headers and body');
SELECT results_eq($$SELECT response_headers::text, response_body
		FROM idem_claim('outcomes', 'key-of-completed-text')$$,
	$$VALUES ('{"Location" :  "/orders/1"}', E'{ "order" :\t1.00 }\n')$$,
	'headers and body are replayed byte for byte');
SELECT is(pg_temp.claim('completed-bytes', 'pg_temp.this_hash()'),
	'{"outcome": "replay", "response_status": 200,
		"response_bytes": "\\x00ff0a", "expires_at": "set"}',
	'a bytea body is replayed in response_bytes');
SELECT is(pg_temp.claim('completed-empty', 'pg_temp.this_hash()'),
	'{"outcome": "replay", "response_status": 204, "expires_at": "set"}',
	'a response without headers and body is replayed so');
SELECT is((SELECT c.expires_at FROM idem_claim('outcomes',
		'key-of-completed-text') AS c),
	(SELECT k.expires_at FROM idem_keys AS k
		WHERE k.key = 'key-of-completed-text'),
	'a replay tells when the record expires');
SELECT is(pg_temp.claim('erased-response', 'pg_temp.this_hash()'),
	'{"outcome": "erased", "response_status": 201, "expires_at": "set"}',
	'completed, then erased: status and expiry only');
SELECT is(pg_temp.claim('own-claim', 'pg_temp.this_hash()'),
	'{"outcome": "in_progress"}',
	'claimed by this transaction, uncommitted: in_progress');
SELECT is(pg_temp.claim('live-claim', 'pg_temp.this_hash()'),
	'{"outcome": "in_progress", "lease_expires_at": "set"}',
	'claimed and committed, within its lease: in_progress until then');
SELECT is((SELECT c.lease_expires_at FROM idem_claim('outcomes',
		'key-of-live-claim') AS c),
	(SELECT k.lease_expires_at FROM idem_keys AS k
		WHERE k.key = 'key-of-live-claim'),
	'in_progress tells when the lease ends');
SELECT is(pg_temp.shown(format($$SELECT * FROM idem_claim('outcomes', %L,
		pg_temp.other_hash())$$, key)),
	'{"outcome": "hash_conflict"}',
	'another hash, ' || state || ': hash_conflict, nothing of the record')
FROM (VALUES ('key-of-completed-text', 'completed'),
	('key-of-erased-response', 'erased'),
	('key-of-live-claim', 'within the lease'),
	('key-of-abandoned-mismatch', 'lease run out'),
	('key-of-failed-again', 'failed'),
	('key-of-own-claim', 'claimed by this transaction')) AS v (key, state);

-- No record expires on its own here: the ones above have been claimed.
UPDATE idem_keys SET expires_at = clock_timestamp() - interval '1 minute'
	WHERE scope = 'outcomes' AND key LIKE 'key-of-expired-%';
SET LOCAL idempotency.expired_key_policy = reject;
SELECT is(pg_temp.claim('expired-completed', 'pg_temp.this_hash()'),
	'{"outcome": "expired"}',
	'expired, policy reject: expired, nothing of the record');
SELECT is(pg_temp.claim('expired-completed', 'pg_temp.other_hash()'),
	'{"outcome": "expired"}',
	'policy reject, another hash: expired, for the record is not live');
SELECT is(pg_temp.claim('expired-claim'),
	'{"outcome": "expired"}',
	'policy reject rejects a record whatever its state was');
SELECT is(pg_temp.claim('completed-text') ->> 'outcome',
	'replay', 'policy reject leaves live records alone');
SELECT is(pg_temp.claim('nobody-before') ->> 'outcome',
	'new', 'policy reject leaves new keys alone');
SET LOCAL idempotency.tombstone_retention = '1h';
SELECT is(pg_temp.claim('expired-completed') ->> 'outcome',
	'expired', 'within tombstone_retention: expired');
SET LOCAL idempotency.tombstone_retention = '59s';
SELECT is(pg_temp.claim('expired-completed') ->> 'outcome',
	'new', 'past tombstone_retention: new');
RESET idempotency.tombstone_retention;
RESET idempotency.expired_key_policy;

--
-- The hash is compared only when both are not NULL
--
SELECT is(pg_temp.shown(format($$SELECT * FROM idem_claim('outcomes', %L,
		%s)$$, key, hash)) ->> 'outcome',
	outcome, description)
FROM (VALUES
	('key-of-hash-compared', 'pg_temp.this_hash()', 'replay',
		'same hash: replay'),
	('key-of-hash-compared', 'NULL', 'replay',
		'no hash given: replay'),
	('key-of-hash-not-stored', 'pg_temp.this_hash()', 'replay',
		'no hash stored: replay'),
	('key-of-hash-not-stored', 'NULL', 'replay',
		'no hash on either side: replay'),
	('key-of-hash-compared',
		'substr(pg_temp.this_hash(), 1, 31)', 'hash_conflict',
		'a shorter hash is another hash'),
	('key-of-hash-compared',
		'pg_temp.this_hash() || ''\x00''', 'hash_conflict',
		'a longer hash is another hash')
) AS v (key, hash, outcome, description);
SELECT is(pg_temp.shown($$SELECT * FROM idem_claim('other scope',
		'key-of-completed-text', pg_temp.other_hash())$$) ->> 'outcome',
	'new', 'the same key in two scopes is two keys');

--
-- Waiting: for a lease, and for nobody else here
--
SET LOCAL statement_timeout = '1min';
SELECT is(pg_temp.claim('live-claim', $$wait => '50 ms'$$) ->> 'outcome',
	'in_progress', 'a wait for a lease runs out');
SELECT is(pg_temp.claim('own-claim', $$wait => '10 minutes'$$) ->> 'outcome',
	'in_progress', 'a claim never waits for its own transaction');
SELECT is(pg_temp.claim('live-claim', $$wait => '0'$$) ->> 'outcome',
	'in_progress', 'a wait of zero is none');
RESET statement_timeout;

--
-- Leases and expiry
--
SELECT is(c.expires_at - c.lease_expires_at, '23:59:00'::interval,
	'a key is remembered for 24h, a claim protected for 1min')
FROM idem_claim('outcomes', 'key-of-default-times') AS c;
SELECT is(c.expires_at - c.lease_expires_at, '01:30:00'::interval,
	'ttl and lease count from the same moment')
FROM idem_claim('outcomes', 'key-of-given-times',
	ttl => '2 hours', lease => '30 minutes') AS c;
SELECT is(c.lease_expires_at, c.expires_at,
	'a lease ends with the record at the latest')
FROM idem_claim('outcomes', 'key-of-long-lease',
	ttl => '1 minute', lease => '1 hour') AS c;
SELECT ok(c.expires_at BETWEEN clock_timestamp() + interval '119 minutes'
		AND clock_timestamp() + interval '2 hours',
	'ttl counts from the call')
FROM idem_claim('outcomes', 'key-of-call-times', ttl => '2 hours') AS c;
SELECT is(pg_temp.claim('zero-ttl-01', $$ttl => '0'$$) ->> 'outcome',
	'new', 'a ttl of zero is accepted');
SELECT is(pg_temp.claim('zero-ttl-01', $$ttl => '0'$$),
	pg_temp.fresh(),
	'a ttl of zero expires at once, even for its own transaction');
SELECT is(pg_temp.claim('own-zero-lease', $$lease => '0'$$) ->> 'outcome',
	'new', 'a lease of zero is accepted');
SELECT is(pg_temp.claim('own-zero-lease', $$lease => '0'$$),
	'{"outcome": "in_progress"}',
	'a lease of zero does not open an uncommitted claim to others');
SELECT pg_sleep(greatest(0, extract(epoch FROM
	lease_expires_at - clock_timestamp()) + 0.001))
	AS lease_has_ended
	FROM idem_keys WHERE key = 'key-of-ending-lease' \gset
SELECT is(pg_temp.claim('ending-lease') ->> 'outcome',
	'new', 'a lease ends by the clock, not by the transaction''s start');
UPDATE idem_keys SET expires_at = clock_timestamp()
	WHERE scope = 'outcomes' AND key = 'key-of-ending-lease';
SELECT is(pg_temp.claim('ending-lease') ->> 'outcome',
	'new', 'a record expires by the clock, not by the transaction''s start');
CREATE FUNCTION pg_temp.claim_twice() RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	first text;
	second text;
BEGIN
	first := outcome FROM idem_claim('outcomes', 'key-of-one-statement',
		ttl => '1 ms');
	PERFORM pg_sleep(0.005);
	second := outcome FROM idem_claim('outcomes', 'key-of-one-statement');
	RETURN first || ', ' || second;
END
$$;
SELECT is(pg_temp.claim_twice(), 'new, new',
	'a record expires by the clock, not by the statement''s start');
SELECT is(pg_temp.claim('abandoned-claim'),
	'{"outcome": "in_progress"}',
	'who comes after a takeover finds it in progress');

--
-- Calls that write nothing
--
SELECT is(:'xid_new'::text, 'new, true', 'new assigns a transaction id');
SELECT is(:'xid_replay'::text, 'replay, false',
	'replay assigns no transaction id');
SELECT is(:'xid_erased'::text, 'erased, false',
	'erased assigns no transaction id');
SELECT is(:'xid_in_progress'::text, 'in_progress, false',
	'in_progress assigns no transaction id');
SELECT is(:'xid_hash_conflict'::text, 'hash_conflict, false',
	'hash_conflict assigns no transaction id');
SELECT is(:'xid_expired'::text, 'expired, false',
	'expired assigns no transaction id');
SELECT is(:'xid_complete'::text, 'false, false',
	'a repeated completion assigns no transaction id');
SELECT is(:'xid_advance'::text, 'false, false',
	'a stale advance assigns no transaction id');
SELECT is(:'xid_toggle'::text, 'false, false',
	'a stale toggle assigns no transaction id');
SELECT is(:'xid_set'::text, 'false, false',
	'a stale set assigns no transaction id');

SELECT cmp_ok(pg_temp.wal_records($$SELECT idem_heartbeat('outcomes',
		'key-of-own-claim')$$), '>', 0, 'a heartbeat writes WAL');
SELECT is(pg_temp.wal_records(query), 0, description || ' writes no WAL')
FROM (VALUES
	($$SELECT * FROM idem_claim('outcomes', 'key-of-completed-text')$$,
		'replay'),
	($$SELECT * FROM idem_claim('outcomes', 'key-of-erased-response')$$,
		'erased'),
	($$SELECT * FROM idem_claim('outcomes', 'key-of-live-claim')$$,
		'in_progress'),
	($$SELECT * FROM idem_claim('outcomes', 'key-of-abandoned-mismatch',
		pg_temp.other_hash())$$,
		'hash_conflict'),
	($$SELECT * FROM idem_try_advance('outcomes', 'post', 'committed', 10)$$,
		'a stale advance'),
	($$SELECT * FROM idem_toggle('outcomes', 'post', 'committed', 'like',
		10)$$,
		'a stale toggle'),
	($$SELECT * FROM idem_set('outcomes', 'post', 'committed', 'like', true,
		9, '{dislike}')$$,
		'a stale set')
) AS v (query, description);
SET LOCAL idempotency.expired_key_policy = reject;
SELECT is(pg_temp.wal_records($$SELECT * FROM idem_claim('outcomes',
		'key-of-expired-claim')$$), 0, 'expired writes no WAL');
RESET idempotency.expired_key_policy;

--
-- Claim tokens
--
SELECT cmp_ok(pg_temp.token('key-of-abandoned-claim'), '>',
	pg_temp.token('key-of-live-checkpoint'),
	'claim tokens strictly increase');
SELECT is((SELECT claim_token FROM idem_claim('outcomes',
		'key-of-token-shown')),
	pg_temp.token('key-of-token-shown'),
	'idem_claim returns the token that the record carries');
SELECT cmp_ok((SELECT claim_token FROM idem_claim('outcomes',
		'key-of-failed-twice')), '>', token,
	'each new claim of a key has a higher token')
FROM (SELECT pg_temp.token('key-of-failed-twice') AS token OFFSET 0) AS t;

SELECT is(idem_complete('outcomes', 'key-of-own-claim', 200, 'mine'), true,
	'a claim taken by this transaction needs no token');
SELECT is(idem_complete('outcomes', 'key-of-live-complete', 200, 'first',
	claim_token => pg_temp.token('key-of-live-complete')), true,
	'a committed claim is completed with its token');
SELECT is(idem_complete('outcomes', 'key-of-live-complete', 500, 'second',
	claim_token => pg_temp.token('key-of-live-complete')), false,
	'completing again with the same token returns false');
SELECT is(pg_temp.claim('live-complete'),
	'{"outcome": "replay", "response_status": 200, "response_body": "first",
		"expires_at": "set"}', 'a second completion changes nothing');
SELECT is(idem_complete('outcomes', 'key-of-own-claim', 500, 'again'), false,
	'completing a claim of this transaction again returns false');
SELECT is(idem_complete('outcomes', 'key-of-erased-response', 500, 'again',
	claim_token => pg_temp.token('key-of-erased-response')), false,
	'completing an erased record again returns false');
SELECT is(idem_fail('outcomes', 'key-of-live-fail', 'first',
	pg_temp.token('key-of-live-fail')), true,
	'a committed claim is failed with its token');
SELECT is(idem_fail('outcomes', 'key-of-live-fail', 'second',
	pg_temp.token('key-of-live-fail')), false,
	'failing again with the same token returns false');
SELECT is(error, 'first', 'a second failure changes nothing')
FROM idem_lookup('outcomes', 'key-of-live-fail');
CREATE TEMP TABLE released AS
	SELECT pg_temp.token('key-of-live-release') AS token;
SELECT is(idem_release('outcomes', 'key-of-live-release', token), true,
	'a committed claim is released with its token')
FROM released;
SELECT is(idem_release('outcomes', 'key-of-live-release', token), false,
	'releasing again with the same token returns false')
FROM released;
SELECT is(pg_temp.lookup('live-release'),
	'{}', 'idem_release deletes the record');
SELECT is(pg_temp.claim('live-release', 'pg_temp.other_hash()'),
	pg_temp.fresh(), 'a released key is claimed as if it had never been');
SELECT cmp_ok(pg_temp.token('key-of-live-release'), '>', token,
	'a released key is claimed with a higher token')
FROM released;
SELECT is(pg_temp.sqlstate_of(format($$SELECT idem_release('outcomes',
		'key-of-live-release', %s)$$, token)),
	'ID003', 'its old token releases no more')
FROM released;

SELECT is(pg_temp.sqlstate_of(query), sqlstate, description)
FROM (VALUES
	($$SELECT idem_complete('outcomes', 'key-of-live-claim', 200)$$,
		'ID003', 'a committed claim is not completed without its token'),
	($$SELECT idem_complete('outcomes', 'key-of-live-claim', 200,
		claim_token => pg_temp.token('key-of-live-claim') - 1)$$,
		'ID003', 'a committed claim is not completed with a lower token'),
	($$SELECT idem_complete('outcomes', 'key-of-live-claim', 200,
		claim_token => pg_temp.token('key-of-live-claim') + 1)$$,
		'ID003', 'a committed claim is not completed with a higher token'),
	($$SELECT idem_complete('outcomes', 'key-of-completed-text', 200)$$,
		'ID003', 'a missing token is told whatever the record''s state'),
	($$SELECT idem_complete('outcomes', 'key-of-completed-text', 200,
		claim_token => 0)$$,
		'ID003', 'a wrong token is told whatever the record''s state'),
	($$SELECT idem_complete('outcomes', 'key-of-never-claimed', 200)$$,
		'ID004', 'a key never claimed has no live claim'),
	($$SELECT idem_complete('outcomes', 'key-of-expired-claim', 200,
		claim_token => pg_temp.token('key-of-expired-claim'))$$,
		'ID004', 'an expired key has no live claim'),
	($$SELECT idem_complete('outcomes', 'key-of-failed-again', 200,
		claim_token => pg_temp.token('key-of-failed-again'))$$,
		'ID004', 'a failed key has no live claim')
) AS v (query, sqlstate, description);

-- A worker that wakes up after its lease has run out.
CREATE TEMP TABLE zombie AS
	SELECT pg_temp.token('key-of-abandoned-zombie') AS token;
SELECT is(idem_complete('outcomes', 'key-of-abandoned-but-mine', 200, 'late',
	claim_token => pg_temp.token('key-of-abandoned-but-mine')), true,
	'a lease that ran out does not matter while nobody took over');
SELECT cmp_ok(claim_token, '>', token,
	'a takeover has a higher token')
FROM zombie, idem_claim('outcomes', 'key-of-abandoned-zombie');
SELECT is(pg_temp.sqlstate_of(format(query, token)), 'ID003',
	'the token of the dead worker is refused: ' || name)
FROM zombie, (VALUES
	('idem_complete', $$SELECT idem_complete('outcomes',
		'key-of-abandoned-zombie', 200, claim_token => %s)$$),
	('idem_complete, bytea', $$SELECT idem_complete('outcomes',
		'key-of-abandoned-zombie', 200, ''::bytea, claim_token => %s)$$),
	('idem_checkpoint', $$SELECT idem_checkpoint('outcomes',
		'key-of-abandoned-zombie', 'shipped', claim_token => %s)$$),
	('idem_heartbeat', $$SELECT idem_heartbeat('outcomes',
		'key-of-abandoned-zombie', claim_token => %s)$$),
	('idem_fail', $$SELECT idem_fail('outcomes',
		'key-of-abandoned-zombie', claim_token => %s)$$),
	('idem_release', $$SELECT idem_release('outcomes',
		'key-of-abandoned-zombie', %s)$$)) AS v (name, query);
SELECT is(idem_complete('outcomes', 'key-of-abandoned-zombie', 200, 'done'),
	true, 'its successor completes');

--
-- Checkpoints and heartbeats
--
SELECT is(pg_temp.lookup('live-checkpoint') - '{request_hash}'::text[],
	'{"state": "started", "attempt": 1, "created_at": "set",
		"lease_expires_at": "set", "expires_at": "set"}',
	'a claim begins without a checkpoint');
CREATE TEMP TABLE renewed AS
	SELECT idem_checkpoint('outcomes', 'key-of-live-checkpoint', 'charged',
		'{"charge" : 7}', '2 hours', pg_temp.token('key-of-live-checkpoint'))
		AS lease_expires_at;
SELECT is(k.lease_expires_at, r.lease_expires_at,
	'idem_checkpoint returns when the lease ends')
FROM renewed AS r, idem_lookup('outcomes', 'key-of-live-checkpoint') AS k;
SELECT ok(lease_expires_at > clock_timestamp() + interval '119 minutes',
	'idem_checkpoint renews the lease')
FROM renewed;
SELECT results_eq($$SELECT state, attempt, recovery_point,
		recovery_state::text
		FROM idem_lookup('outcomes', 'key-of-live-checkpoint')$$,
	$$VALUES ('started', 1, 'charged', '{"charge" : 7}')$$,
	'idem_checkpoint keeps the recovery point and state, byte for byte');
SELECT isnt(idem_checkpoint('outcomes', 'key-of-live-checkpoint', 'shipped',
	claim_token => pg_temp.token('key-of-live-checkpoint')), NULL,
	'a second checkpoint');
SELECT results_eq($$SELECT recovery_point, recovery_state::text
		FROM idem_lookup('outcomes', 'key-of-live-checkpoint')$$,
	$$VALUES ('shipped', NULL::text)$$,
	'a checkpoint replaces both, recovery point and state');

TRUNCATE renewed;
INSERT INTO renewed SELECT idem_heartbeat('outcomes',
	'key-of-live-heartbeat', '3 hours',
	pg_temp.token('key-of-live-heartbeat'));
SELECT is(k.lease_expires_at, r.lease_expires_at,
	'idem_heartbeat returns when the lease ends')
FROM renewed AS r, idem_lookup('outcomes', 'key-of-live-heartbeat') AS k;
SELECT ok(lease_expires_at > clock_timestamp() + interval '179 minutes',
	'idem_heartbeat renews the lease')
FROM renewed;
SELECT ok(idem_heartbeat('outcomes', 'key-of-live-heartbeat',
		claim_token => pg_temp.token('key-of-live-heartbeat'))
	BETWEEN now() + interval '1 minute'
		AND clock_timestamp() + interval '1 minute',
	'a heartbeat without a lease gives a new one of the default length');
SET LOCAL idempotency.max_lease = '36500 d';
SELECT is(idem_heartbeat('outcomes', 'key-of-live-capped', '10 years',
	pg_temp.token('key-of-live-capped')), expires_at,
	'a renewed lease ends with the record at the latest')
FROM idem_lookup('outcomes', 'key-of-live-capped');
RESET idempotency.max_lease;

--
-- idem_fail and idem_release
--
SELECT is(pg_temp.claim('failed-without-hash') ->> 'attempt',
	'2', 'a failed record is claimed without the hash, too');
SELECT is(
	pg_temp.claim('failed-without-hash', 'pg_temp.other_hash()') ->> 'outcome',
	'hash_conflict', 'a claim without a hash keeps the one that is stored');
SELECT is(idem_fail('outcomes', 'key-of-failed-without-hash'), true,
	'idem_fail needs no error text');
SELECT is(pg_temp.claim('failed-without-hash', 'pg_temp.this_hash()'),
	'{"outcome": "new", "claim_token": "set", "attempt": 3,
		"recovery_point": "charged", "recovery_state": {"charge": 7},
		"lease_expires_at": "set", "expires_at": "set"}',
	'idem_fail lets the next claim retry at once, from its checkpoint');
SELECT is(idem_release('outcomes', 'key-of-failed-without-hash'), true,
	'idem_release gives up a second attempt, too');
SELECT is(pg_temp.claim('failed-without-hash', 'pg_temp.other_hash()'),
	pg_temp.fresh(), 'idem_release forgets hash, attempts and checkpoint');

--
-- idem_lookup
--
SELECT is(pg_temp.shown(format(
		$$SELECT * FROM idem_lookup('outcomes', %L)$$, key)),
	expected::jsonb
		|| jsonb_build_object('request_hash', pg_temp.this_hash()),
	'idem_lookup shows what is ' || (expected::jsonb ->> 'state'))
FROM (VALUES
	('key-of-live-claim', '{"state": "started", "attempt": 1,
		"created_at": "set", "lease_expires_at": "set",
		"expires_at": "set"}'),
	('key-of-hash-compared', '{"state": "completed", "attempt": 1,
		"created_at": "set", "completed_at": "set", "expires_at": "set",
		"response_status": 201,
		"response_headers": {"Location": "/orders/1"},
		"response_body": "{ \"order\" :\t1.00 }\n",
		"recovery_point": "charged", "recovery_state": {"charge": 7}}'),
	('key-of-failed-again', '{"state": "failed", "attempt": 1,
		"created_at": "set", "expires_at": "set", "error": "card declined",
		"recovery_point": "charged", "recovery_state": {"charge": 7}}'),
	('key-of-erased-response', '{"state": "erased", "attempt": 1,
		"created_at": "set", "completed_at": "set", "expires_at": "set",
		"response_status": 201, "recovery_point": "charged"}')
) AS v (key, expected);
SELECT is(pg_temp.shown(format(
		$$SELECT * FROM idem_lookup('outcomes', %L)$$, key)),
	'{}', 'idem_lookup shows one row of nulls: ' || description)
FROM (VALUES ('key-of-never-claimed', 'never claimed'),
	('key-of-expired-claim', 'expired')) AS v (key, description);

--
-- idem_forget and idem_erase
--
SELECT is(idem_erase('outcomes', key), erased,
	'idem_erase, ' || description)
FROM (VALUES ('key-of-completed-text', true, 'completed'),
	('key-of-completed-text', false, 'erased'),
	('key-of-completed-bytes', true, 'completed with bytes'),
	('key-of-live-claim', false, 'started'),
	('key-of-failed-again', true, 'failed, with its error'),
	('key-of-failed-again', false, 'failed, without one'),
	('key-of-never-claimed', false, 'never claimed'))
	AS v (key, erased, description);
SELECT is(pg_temp.claim('completed-bytes', 'pg_temp.this_hash()'),
	'{"outcome": "erased", "response_status": 200, "expires_at": "set"}',
	'a response in bytes is erased as well');
SELECT is(pg_temp.claim('completed-text', 'pg_temp.other_hash()'),
	'{"outcome": "hash_conflict"}', 'idem_erase keeps the hash');
SELECT is(idem_forget('outcomes', key), forgotten,
	'idem_forget, ' || description)
FROM (VALUES ('key-of-hash-compared', true, 'completed'),
	('key-of-hash-compared', false, 'forgotten'),
	('key-of-erased-response', true, 'erased'),
	('key-of-live-forget', true, 'started'),
	('key-of-failed-again', true, 'failed'),
	('key-of-expired-claim', true, 'expired'),
	('key-of-never-claimed', false, 'never claimed'))
	AS v (key, forgotten, description);
SELECT is(pg_temp.claim('hash-compared', 'pg_temp.other_hash()'),
	pg_temp.fresh(), 'a forgotten key is claimed as if it had never been');

--
-- Savepoints
--
SAVEPOINT before_claim;
SELECT outcome AS outcome_before FROM idem_claim('outcomes',
	'key-of-savepoint', pg_temp.this_hash()) \gset
ROLLBACK TO SAVEPOINT before_claim;
SELECT is(:'outcome_before' || ', ' || pg_temp.sqlstate_of(
	$$SELECT idem_complete('outcomes', 'key-of-savepoint', 200)$$),
	'new, ID004', 'a claim rolled back to a savepoint is gone');
SELECT is(pg_temp.claim('savepoint', 'pg_temp.other_hash()'),
	pg_temp.fresh(), 'a claim rolled back to a savepoint leaves the key free');
SAVEPOINT before_complete;
SELECT idem_complete('outcomes', 'key-of-savepoint', 200) AS completed \gset
ROLLBACK TO SAVEPOINT before_complete;
SELECT is(pg_temp.claim('savepoint'),
	'{"outcome": "in_progress"}',
	'a completion rolled back to a savepoint leaves the claim');
SELECT is(idem_complete('outcomes', 'key-of-savepoint', 200), true,
	'the claim needs no token after ROLLBACK TO SAVEPOINT');
SAVEPOINT claim_is_kept;
SELECT outcome AS outcome_inside FROM idem_claim('outcomes',
	'key-of-kept-savepoint') \gset
RELEASE SAVEPOINT claim_is_kept;
SELECT is(idem_complete('outcomes', 'key-of-kept-savepoint', 200), true,
	'a claim taken inside a savepoint that was kept needs no token');

--
-- idem_run
--
CREATE SCHEMA outcomes;
CREATE TABLE outcomes.orders (request jsonb);
CREATE FUNCTION outcomes.place_order(request jsonb) RETURNS idem_response
LANGUAGE sql AS $$
	INSERT INTO outcomes.orders VALUES (request);
	SELECT (201, '{"Location" :  "/orders/1"}', E'created\n')::idem_response;
$$;
CREATE FUNCTION outcomes.echo(request jsonb) RETURNS jsonb
LANGUAGE sql
RETURN request || '{"seen": true}';
CREATE FUNCTION outcomes.refuse(request jsonb) RETURNS jsonb
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO outcomes.orders VALUES (request);
	RAISE EXCEPTION 'out of stock' USING ERRCODE = 'P0042';
END
$$;

SELECT results_eq($$SELECT outcome, response_status,
		response_headers::text, response_body
		FROM idem_run('outcomes', 'key-of-idem-run-01',
			'outcomes.place_order(jsonb)', '{"a": 1, "b": 2}')$$,
	$$VALUES ('new', 201, '{"Location" :  "/orders/1"}', E'created\n')$$,
	'idem_run returns what the handler returned');
SELECT results_eq($$SELECT outcome, response_status,
		response_headers::text, response_body
		FROM idem_run('outcomes', 'key-of-idem-run-01',
			'outcomes.place_order(jsonb)', '{"b": 2.0, "a": 1e0}')$$,
	$$VALUES ('replay', 201, '{"Location" :  "/orders/1"}', E'created\n')$$,
	'idem_run replays the same request in another spelling');
SELECT results_eq('SELECT request FROM outcomes.orders',
	$$VALUES ('{"a": 1, "b": 2}'::jsonb)$$,
	'idem_run calls the handler once, with the request');
SELECT is(request_hash, idem_request_hash('RUN', 'outcomes.place_order',
	'{"a": 1, "b": 2}'::jsonb),
	'the hash is that of the handler''s name and the canonical request')
FROM idem_lookup('outcomes', 'key-of-idem-run-01');
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-idem-run-01', 'outcomes.place_order(jsonb)',
		'{"a": 1, "b": 3}')$$),
	'{"outcome": "hash_conflict"}',
	'idem_run of another request: hash_conflict');
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-idem-run-01', 'outcomes.echo(jsonb)',
		'{"a": 1, "b": 2}')$$),
	'{"outcome": "hash_conflict"}',
	'idem_run of another handler: hash_conflict');
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-idem-run-02', 'outcomes.echo(jsonb)', '{"a":1.0}')$$),
	'{"outcome": "new", "response_status": 200,
		"response_body": "{\"a\": 1.0, \"seen\": true}"}',
	'idem_run of a handler that returns jsonb: status 200, text as body');
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-idem-run-02', 'outcomes.echo(jsonb)', '{"a":1.0}')$$),
	'{"outcome": "replay", "response_status": 200,
		"response_body": "{\"a\": 1.0, \"seen\": true}"}',
	'idem_run replays it');
SELECT is(pg_temp.sqlstate_of($$SELECT idem_run('outcomes',
		'key-of-idem-run-03', 'outcomes.refuse(jsonb)', '{"a": 1}')$$),
	'P0042', 'an error in the handler goes through');
SELECT is(count(*)::text || pg_temp.shown($$SELECT * FROM
		idem_lookup('outcomes', 'key-of-idem-run-03')$$),
	'1{}', 'an error in the handler aborts everything, with the claim')
FROM outcomes.orders;
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-default-times', 'outcomes.echo(jsonb)', '{}')$$),
	'{"outcome": "in_progress"}',
	'idem_run of a key claimed by this transaction: in_progress');
SELECT is(pg_temp.shown($$SELECT * FROM idem_run('outcomes',
		'key-of-savepoint', 'outcomes.echo(jsonb)', '{}')$$),
	'{"outcome": "hash_conflict"}',
	'idem_run of a key claimed for something else: hash_conflict');
SELECT outcome AS outcome_run FROM idem_run('outcomes', 'key-of-idem-run-04',
	'outcomes.echo(jsonb)', '{}', '2 hours') \gset
SELECT is(expires_at - created_at, '2 hours'::interval,
	'the ttl of idem_run is that of the record')
FROM idem_lookup('outcomes', 'key-of-idem-run-04');

--
-- Key and scope rules
--
SELECT is(idem_key_is_valid(key), valid,
	'idem_key_is_valid: ' || description)
FROM (VALUES
	('0123456789abcdef', true, '16 characters'),
	('0123456789abcde', false, '15 characters'),
	(repeat('k', 128), true, '128 characters'),
	(repeat('k', 129), false, '129 characters'),
	('ABCXYZabcxyz0189_-:.', true, 'every kind of character'),
	('', false, 'empty'),
	(NULL, false, 'NULL'),
	('key of 16 letters', false, 'a space'),
	(E'key-of-16-letters\n', false, 'a line feed'),
	('key/of/16/letters', false, 'a slash'),
	('key+of+16+letters', false, 'a plus'),
	('"key-of-16-letters"', false, 'quotes'),
	('key-of-16-lettérs', false, 'a letter beyond ASCII')
) AS v (key, valid, description);
SELECT is(pg_temp.sqlstate_of(format($$SELECT idem_claim(%L,
		'key-of-scope-rules')$$, scope)), sqlstate,
	'a scope of ' || description)
FROM (VALUES
	('s', '00000', '1 byte'),
	(repeat('s', 512), '00000', '512 bytes'),
	(repeat('é', 256), '00000', '256 two-byte characters'),
	(E' any\ttext ''"\\ é', '00000', 'any text'),
	(repeat('é', 257), '22023', '257 two-byte characters'),
	(repeat('s', 513), '22023', '513 bytes'),
	('', '22023', 'no bytes')
) AS v (scope, sqlstate, description);

--
-- Request identity
--
CREATE FUNCTION pg_temp.sha256_of(request text) RETURNS text
LANGUAGE sql
RETURN encode(sha256(convert_to(request, 'UTF8')), 'hex');

SELECT is(encode(idem_request_hash(method, path, body), 'hex'),
	pg_temp.sha256_of(request),
	'idem_request_hash: ' || description)
FROM (VALUES
	('POST', '/orders', '{"b":2,"a":[1,null]}',
		'POST:/orders:{"a":[1,null],"b":2}', 'METHOD:path:body'),
	('post', '/orders', '{ "b" : 2.0, "a" : [1e0, null] }',
		'POST:/orders:{"a":[1,null],"b":2}', 'canonical body, upper case'),
	('GET', '/a:b::c', NULL,
		'GET:/a%3Ab%3A%3Ac:', 'colons in the path'),
	('GET', '', NULL, 'GET::', 'an empty path'),
	('DELETE', '/orders/1', NULL,
		'DELETE:/orders/1:', 'no body is the empty string'),
	('M-SEARCH', '/Äpfel', '"ü"',
		'M-SEARCH:/Äpfel:"ü"', 'text is UTF-8'),
	('POST', '/orders', 'null', 'POST:/orders:null',
		'a JSON null is a body'),
	('POST', '/orders', '{"a":1,"a":2}', 'POST:/orders:{"a":2}',
		'of duplicate members the last wins')
) AS v (method, path, body, request, description);
SELECT is(idem_request_hash('GET', '/orders'),
	idem_request_hash('GET', '/orders', NULL::text),
	'the body may be left out');
SELECT is(idem_request_hash('POST', '/orders', '{"b":2,"a":1.0}'::jsonb),
	idem_request_hash('POST', '/orders', '{"a":1,"b":2e0}'::text),
	'text and jsonb hash alike');
SELECT is(encode(idem_request_hash('PUT', '/f:1', '\x003aff'::bytea), 'hex'),
	encode(sha256('PUT:/f%3A1:'::bytea || '\x003aff'), 'hex'),
	'any other body counts byte for byte');
SELECT is(idem_request_hash('PUT', '/f', NULL::bytea),
	idem_request_hash('PUT', '/f', NULL::jsonb),
	'no body is no body of any type');
SELECT isnt(idem_request_hash('GET', '/a:', '1'::bytea),
	idem_request_hash('GET', '/a', ':1'::bytea),
	'a colon is no way from the path into the body');

SELECT is(idem_canonical_json(document::jsonb), canonical,
	'idem_canonical_json: ' || description)
FROM (VALUES
	-- RFC 8785, section 3.2.2
	($${
		"numbers": [333333333.33333329, 1E30, 4.50, 2e-3,
			0.000000000000000000000000001],
		"string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
		"literals": [null, true, false]
	}$$,
	'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,'
	'0.002,1e-27],"string":"€$\u000f\nA''B\"\\\\\"/"}',
		'the example of RFC 8785'),
	-- RFC 8785, section 3.2.3
	($${"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\ud83d\ude00": 5,
		"\u0080": 6, "\u00f6": 7}$$,
	E'{"\\r":2,"1":4,"\u0080":6,"ö":7,"€":1,"😀":5,"\ufb33":3}',
		'members in the order of UTF-16 code units'),
	('[1.0, 1.00, 10e-1, -0, 1e21, 1e20, 1e-6, 1e-7]',
	'[1,1,1,0,1e+21,100000000000000000000,0.000001,1e-7]',
		'numbers as ECMAScript writes them'),
	('[9007199254740992, 9007199254740993, 123456789012345678901234567890]',
	'[9007199254740992,9007199254740993,1.2345678901234567890123456789e+29]',
		'integers that a double would round keep all digits'),
	('[0.1000000000000000055511151231257827, 12345678901234567890.12]',
	'[0.1000000000000000055511151231257827,12345678901234567890.12]',
		'more than 17 significant digits are kept'),
	('[1e400, 1e-400]', '[1e+400,1e-400]',
		'numbers beyond the range of doubles are kept'),
	('"a\/b\u00e9\u001f\u2028"', E'"a/bé\\u001f\u2028"',
		'escapes only where they must be')
) AS v (document, canonical, description);

--
-- User actions: the version counter
--
SELECT results_eq(format($$SELECT * FROM idem_try_advance('outcomes', 'post',
		'advance', %s)$$, action_id),
	format('VALUES (%L::boolean, %L::bigint)', processed, last),
	'idem_try_advance: ' || description)
FROM (VALUES (10, true, 10, 'no row: created, processed'),
	(11, true, 11, 'greater: advanced, processed'),
	(11, false, 11, 'equal: nothing changes'),
	(10, false, 11, 'lower: nothing changes'),
	(9223372036854775807, true, 9223372036854775807, 'the greatest of all'),
	(1, false, 9223372036854775807, 'nothing goes beyond it'))
	AS v (action_id, processed, last, description);
SELECT results_eq($$SELECT * FROM idem_try_advance('outcomes', 'post',
		'negative', -5)$$,
	'VALUES (true, -5::bigint)', 'an action id is any number');
SELECT results_eq(format($$SELECT * FROM idem_try_advance(%L, %L, %L, 1)$$,
		user_id, entity_type, entity_id),
	'VALUES (true, 1::bigint)', 'another ' || other || ': another counter')
FROM (VALUES ('somebody', 'post', 'advance', 'user'),
	('outcomes', 'comment', 'advance', 'entity type'),
	('outcomes', 'post', 'another', 'entity id'))
	AS v (user_id, entity_type, entity_id, other);

--
-- User actions: toggle, set, is_active
--
SELECT results_eq(format($$SELECT * FROM idem_toggle('outcomes', 'post',
		'toggle', 'like', %s)$$, action_id),
	format('VALUES (%L::boolean, %L::bigint, %L::boolean)',
		active, last, processed),
	'idem_toggle: ' || description)
FROM (VALUES (10, true, 10, true, 'no row: active'),
	(11, false, 11, true, 'greater: flipped'),
	(11, false, 11, false, 'equal: the current state and counter'),
	(20, true, 20, true, 'greater: flipped back'),
	(15, true, 20, false, 'lower: the current state and counter'))
	AS v (action_id, active, last, processed, description);
SELECT results_eq(format($$SELECT * FROM idem_set('outcomes', 'post',
		'set', 'like', %L, %s)$$, wanted, action_id),
	format('VALUES (%L::boolean, %L::bigint, %L::boolean)',
		active, last, processed),
	'idem_set: ' || description)
FROM (VALUES (false, 10, false, 10, true, 'no row, off: processed'),
	(true, 11, true, 11, true, 'greater, on: on'),
	(true, 12, true, 12, true, 'greater, on again: on'),
	(false, 12, true, 12, false, 'equal: the current state and counter'),
	(false, 11, true, 12, false, 'lower: the current state and counter'),
	(false, 13, false, 13, true, 'greater, off: off'),
	(true, 12, false, 13, false, 'lower: off it stays'))
	AS v (wanted, action_id, active, last, processed, description);
SELECT results_eq($$SELECT * FROM idem_toggle('outcomes', 'post', 'set',
		'bookmark', 13)$$,
	'VALUES (false, 13::bigint, false)',
	'action types of an entity share the counter');
SELECT results_eq($$SELECT * FROM idem_try_advance('outcomes', 'post', 'set',
		14)$$,
	'VALUES (true, 14::bigint)', 'idem_try_advance shares it, too');
SELECT results_eq($$SELECT * FROM idem_set('outcomes', 'post', 'set', 'like',
		true, 14)$$,
	'VALUES (false, 14::bigint, false)',
	'idem_set is stale after idem_try_advance');

SELECT is(idem_is_active('outcomes', 'post', entity_id, action_type), active,
	'idem_is_active: ' || description)
FROM (VALUES ('toggle', 'like', true, 'on'),
	('set', 'like', false, 'off'),
	('toggle', 'bookmark', false, 'no row'),
	('committed', 'like', true, 'on, in spite of a stale toggle'),
	('committed', 'dislike', true, 'on, though a stale set excludes it'))
	AS v (entity_id, action_type, active, description);

-- excludes
SELECT idem_set('outcomes', 'post', 'poll', 'dislike', true, 1),
	idem_set('outcomes', 'post', 'poll', 'angry', true, 2),
	idem_set('outcomes', 'post', 'poll', 'bookmark', true, 3) \gset
SELECT results_eq($$SELECT * FROM idem_set('outcomes', 'post', 'poll', 'like',
		false, 4, '{dislike}')$$,
	'VALUES (false, 4::bigint, true)', 'excludes beside active => false');
SELECT is(idem_is_active('outcomes', 'post', 'poll', 'dislike'), true,
	'excludes clears nothing when it does not activate');
SELECT results_eq($$SELECT * FROM idem_set('outcomes', 'post', 'poll', 'like',
		true, 4, '{dislike}')$$,
	'VALUES (false, 4::bigint, false)', 'excludes in a stale call');
SELECT is(idem_is_active('outcomes', 'post', 'poll', 'dislike'), true,
	'excludes clears nothing when the call is stale');
SELECT results_eq($$SELECT * FROM idem_set('outcomes', 'post', 'poll', 'like',
		true, 5, '{dislike,angry,sad,sad}')$$,
	'VALUES (true, 5::bigint, true)', 'excludes beside active => true');
SELECT results_eq($$SELECT idem_is_active('outcomes', 'post', 'poll', a)
		FROM unnest('{like,dislike,angry,sad,bookmark}'::text[]) AS a$$,
	'VALUES (true), (false), (false), (false), (true)',
	'excludes clears those action types and no other when it activates');
SELECT results_eq($$SELECT * FROM idem_set('outcomes', 'post', 'poll',
		'dislike', true, 6, '{}')$$,
	'VALUES (true, 6::bigint, true)', 'an empty array excludes nothing');

-- All 120 orders in which five calls may arrive.
CREATE TEMP TABLE orders AS
	WITH RECURSIVE arrivals (sequence) AS (
		VALUES ('{}'::int[])
		UNION ALL
		SELECT sequence || i FROM arrivals, generate_series(1, 5) AS i
		WHERE i <> ALL (sequence)
	)
	SELECT row_number() OVER () AS id, sequence FROM arrivals
	WHERE cardinality(sequence) = 5;
CREATE TEMP TABLE arrived AS
	SELECT (idem_set('outcomes', 'set-orders', id::text, 'like',
			action_id % 2 = 1, action_id)).processed AS set_processed,
		(idem_toggle('outcomes', 'toggle-orders', id::text, 'like',
			action_id)).processed AS toggle_processed
	FROM (SELECT id, action_id FROM orders, unnest(sequence)
			WITH ORDINALITY AS u (action_id, position)
		ORDER BY id, position OFFSET 0) AS calls;
SELECT is(count(*), 600::bigint, 'five calls arrived in 120 orders')
FROM arrived;
SELECT is(count(*), 120::bigint,
	'idem_set ends in the latest intent whatever the order')
FROM orders WHERE idem_is_active('outcomes', 'set-orders', id::text, 'like');
SELECT isnt(count(*), 120::bigint, 'idem_toggle does not')
FROM orders
WHERE idem_is_active('outcomes', 'toggle-orders', id::text, 'like');

-- The guard against a device clock that runs ahead.
SELECT is(pg_temp.sqlstate_of(format($$SELECT idem_try_advance('outcomes',
		'post', 'lead', (extract(epoch FROM clock_timestamp()) * 1000)::bigint
			+ %s)$$, ahead)), '00000',
	'without max_action_id_lead any action id goes: ' || ahead || ' ms ahead')
FROM (VALUES (0), (31536000000)) AS v (ahead);
SET LOCAL idempotency.max_action_id_lead = '1h';
SELECT is(pg_temp.sqlstate_of(format($$SELECT idem_set('outcomes',
		'post', 'guarded', 'like', true,
		(extract(epoch FROM clock_timestamp()) * 1000)::bigint + %s)$$,
		ahead)), sqlstate,
	'max_action_id_lead of an hour: ' || ahead || ' ms ahead')
FROM (VALUES (-7200000, '00000'), (0, '00000'), (3590000, '00000'),
	(3610000, 'ID005')) AS v (ahead, sqlstate);
SELECT results_eq($$SELECT is_active, processed FROM idem_set('outcomes',
		'post', 'guarded', 'like', false,
		(extract(epoch FROM clock_timestamp()) * 1000)::bigint + 3595000)$$,
	'VALUES (false, true)', 'a refused action id has not counted');
RESET idempotency.max_action_id_lead;

--
-- Storage
--
CREATE TEMP TABLE updates AS
	SELECT pg_stat_get_xact_tuples_updated('idem_keys'::regclass) AS updated,
		pg_stat_get_xact_tuples_hot_updated('idem_keys'::regclass) AS hot;
SELECT outcome AS outcome_hot FROM idem_claim('outcomes',
	'key-of-hot-update', pg_temp.this_hash()) \gset
SELECT idem_complete('outcomes', 'key-of-hot-update', 201,
	repeat('response ', 20), '{"Location": "/orders/1"}') AS complete_hot \gset
SELECT results_eq($$SELECT
		pg_stat_get_xact_tuples_updated('idem_keys'::regclass) - updated,
		pg_stat_get_xact_tuples_hot_updated('idem_keys'::regclass) - hot
		FROM updates$$,
	'VALUES (1::bigint, 1::bigint)', 'idem_complete is a HOT update');

-- Indexes of the operator's own are kept up to date.
CREATE INDEX ON idem_keys (upper(state)) WHERE attempt = 1;
SELECT outcome AS outcome_indexed FROM idem_claim('outcomes',
	'key-of-indexed-record') \gset
SELECT idem_complete('outcomes', 'key-of-indexed-record', 200)
	AS complete_indexed \gset
SET LOCAL enable_seqscan = off;
SELECT is(count(*), 1::bigint, 'an additional index is maintained')
FROM idem_keys
WHERE upper(state) = 'COMPLETED' AND attempt = 1
	AND key = 'key-of-indexed-record';
RESET enable_seqscan;

SELECT * FROM finish();
ROLLBACK;

DO $$
BEGIN
	PERFORM idem_forget(scope, key) FROM idem_keys WHERE scope = 'outcomes';
	DELETE FROM idem_user_actions WHERE user_id = 'outcomes';
	DELETE FROM idem_action_versions WHERE user_id = 'outcomes';
END
$$;
