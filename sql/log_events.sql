--
-- idempotency.log_events: what is logged must not change what is answered.
--
-- The lines themselves go to the server log, where test/t/035_log_events.pl looks
-- at them.  Here every kind of line is written, so that "make valgrind" and "make
-- sanitize" see whether it is written from memory that is still there.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
SET idempotency.log_events = on;

-- Claims of an earlier transaction.  Nothing else may hold their page: no scan finds
-- the tokens.
SELECT claim_token FROM idem_claim('log', 'log-completed-001', '\x01') \gset
SELECT idem_complete('log', 'log-completed-001', 201, 'made', claim_token => :claim_token);
SELECT idem_complete('log', 'log-completed-001', 201, 'made', claim_token => :claim_token);
SELECT outcome, response_body FROM idem_claim('log', 'log-completed-001', '\x01');
SELECT outcome FROM idem_claim('log', 'log-completed-001', '\x02');
SELECT claim_token FROM idem_claim('log', 'log-bytes-0000001') \gset
SELECT idem_complete('log', 'log-bytes-0000001', 200, '\x01'::bytea, claim_token => :claim_token);
SELECT claim_token FROM idem_claim('log', 'log-failed-000001') \gset
SELECT idem_fail('log', 'log-failed-000001', 'oops', :claim_token);
SELECT outcome, attempt FROM idem_claim('log', 'log-failed-000001', lease => '0');
SELECT outcome, attempt, claim_token FROM idem_claim('log', 'log-failed-000001') \gset
SELECT :'outcome', :attempt, idem_release('log', 'log-failed-000001', :claim_token);
SELECT outcome FROM idem_claim('log', 'log-expired-00001', ttl => '0');
SELECT outcome FROM idem_claim('log', 'log-expired-00001', ttl => '0');

-- Claims of the same transaction
BEGIN;
SELECT outcome FROM idem_claim('log', 'log-same-complete');
SELECT idem_complete('log', 'log-same-complete', 201, repeat('x', 100000));
SELECT outcome FROM idem_claim('log', 'log-same-failed-1');
SELECT idem_fail('log', 'log-same-failed-1', repeat('x', 100000));
SELECT outcome FROM idem_claim('log', 'log-same-released');
SELECT idem_release('log', 'log-same-released');
COMMIT;
CREATE FUNCTION pg_temp.handler(request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT request';
SELECT outcome, response_body FROM idem_run('log', 'log-run-000000001', 'pg_temp.handler(jsonb)', '{"a": 1}');
SELECT outcome, response_body FROM idem_run('log', 'log-run-000000001', 'pg_temp.handler(jsonb)', '{"a": 1}');

-- The longest names
SET idempotency.key_max_length = 255;
SELECT claim_token FROM idem_claim(repeat('s', 255), repeat('k', 255)) \gset
SELECT idem_complete(repeat('s', 255), repeat('k', 255), 200, claim_token => :claim_token);
RESET idempotency.key_max_length;

-- Messages
SET idempotency.outbox_max_attempts = 1;
SELECT idem_publish('log', '{}') IS NOT NULL, idem_publish('log', '{}', 'key') IS NOT NULL, idem_publish(repeat('t', 255), '{}') IS NOT NULL;
SELECT count(*) FROM idem_outbox_take();
SELECT id FROM idem_outbox WHERE topic = 'log' AND message_key = 'key' \gset
SELECT idem_outbox_nack(:id, 'oops');
SELECT array_agg(id) AS ids FROM idem_outbox WHERE state = 'pending' \gset
SELECT idem_outbox_ack(:'ids');
SELECT idem_outbox_requeue();
RESET idempotency.outbox_max_attempts;
SELECT count(*) FROM idem_outbox_take();
SELECT idem_outbox_nack(:id, 'oops');

-- The cleanup
SELECT idem_once('log', 'expired', ttl => '0');
SET idempotency.outbox_retention = 0;
SELECT * FROM idem_cleanup();

-- A message that nobody answers for, actions that come too late, and a claim in progress
SELECT idem_publish('log', '{}') IS NOT NULL;
SET idempotency.outbox_max_attempts = 1;
SELECT count(*) FROM idem_outbox_take(lease => '0');
SELECT count(*) FROM idem_outbox_take();
SELECT idem_try_advance('u', 'post', '1', 2), idem_try_advance('u', 'post', '1', 1);
SELECT idem_set('u', 'post', '1', 'like', true, 1);
SELECT count(*) FROM idem_try_advance_many('{u}', '{post}', '{1,1}', '{1}');
SELECT count(*) FROM idem_set_many('{u}', '{post}', '{1,1}', '{like}', '{t}', '{1}');
SELECT outcome FROM idem_claim('log', 'log-progress-0001');
SELECT outcome FROM idem_claim('log', 'log-progress-0001');

-- Appends, each outcome that a session alone can bring about
SELECT outcome FROM unnest(ARRAY[1, 1, 2, 9]) AS n, idem_try_append('log', repeat('c', 512), n, 2, allow_gaps => false);
SELECT outcome FROM idem_try_append('log', 'other', 1, expected_version => 7);

-- The route: with a query, all query, the longest, and one that is cut within a character
SET idempotency.route = 'POST /orders/{id}?card=4111';
SELECT outcome FROM idem_claim('log', 'log-progress-0001');
SET idempotency.route = '?a';
SELECT outcome FROM idem_claim('log', 'log-route-00000-1');
SELECT length(set_config('idempotency.route', repeat('r', 100000), false));
SELECT outcome FROM idem_claim('log', 'log-route-00000-2');
SELECT length(set_config('idempotency.route', repeat(U&'\20ac', 100), false));
SELECT outcome FROM idem_claim('log', 'log-route-00000-3');

-- As JSON, and some only
SET idempotency.log_format = json;
SELECT outcome FROM idem_claim(E'log "\\\n\u00e9\U0001F600', repeat('k', 100));
SELECT outcome FROM idem_claim('log', 'log-completed-001', '\x01');
SELECT idem_publish(repeat('t', 255), '{}') IS NOT NULL;
SELECT idem_try_advance('u', 'post', '1', 1);
SELECT count(idem_once('log', 'expired again', ttl => '0')), count(idem_cleanup());
SET idempotency.log_events = stale, dead;
SELECT outcome FROM idem_claim('log', 'log-listed-000001');
SHOW idempotency.log_events;
SET idempotency.log_events = stale, none;
SET idempotency.log_format = xml;
