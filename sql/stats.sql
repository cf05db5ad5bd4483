--
-- Statistics: each call counts once, where it belongs, whether or not its
-- transaction commits.
--
-- Counts of concurrent sessions are tested in test/isolation.
--
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_stats_db;
DROP ROLE IF EXISTS regress_idem_monitor, regress_idem_app, regress_idem_nobody;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

SELECT current_database() AS regress_db \gset
\pset format unaligned
\pset tuples_only on

-- The counters of this database that are not zero.
CREATE FUNCTION counters() RETURNS text
LANGUAGE sql AS $$
	-- A background worker may end a cleanup at any time.
	SELECT coalesce(string_agg(c.name || ' ' || c.value, ', ' ORDER BY c.n), 'nothing')
	FROM idem_stats AS s, json_each_text(row_to_json(s)) WITH ORDINALITY AS c (name, value, n)
	WHERE s.datname = current_database() AND c.value <> '0'
		AND c.name NOT IN ('datid', 'datname', 'cleanup_passes', 'last_cleanup', 'stats_reset')
$$;
-- ... since this was last called.
CREATE FUNCTION counted() RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	result text := counters();
BEGIN
	PERFORM idem_stats_reset();
	RETURN result;
END
$$;
SELECT idem_stats_reset();
SELECT counted();

--
-- Claims, by outcome
--
SELECT outcome FROM idem_claim('stats', 'claimed-once-0001');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'claimed-once-0001');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'claimed-once-0001', wait => '10 ms');
SELECT counted();
SELECT outcome, idem_complete('stats', 'completed-once-01', 200, 'done') FROM idem_claim('stats', 'completed-once-01', '\x01');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'completed-once-01');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'completed-once-01', '\x02');
SELECT counted();
SELECT idem_erase('stats', 'completed-once-01');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'completed-once-01');
SELECT counted();
-- Expired ones, which a background worker must not see.
BEGIN;
SELECT outcome FROM idem_claim('stats', 'expired-at-once-1', ttl => '0');
SELECT counted();
SET LOCAL idempotency.expired_key_policy = reject;
SELECT outcome FROM idem_claim('stats', 'expired-at-once-1');
SELECT counted();
SET LOCAL idempotency.expired_key_policy = reuse;
SELECT outcome, attempt FROM idem_claim('stats', 'expired-at-once-1');
SELECT counted();
ROLLBACK;

-- A takeover is a claim of a failed or an abandoned key.
SELECT outcome, idem_fail('stats', 'failed-once-00001') FROM idem_claim('stats', 'failed-once-00001');
SELECT counted();
SELECT outcome, attempt FROM idem_claim('stats', 'failed-once-00001');
SELECT counted();
SELECT outcome FROM idem_claim('stats', 'abandoned-once-01', lease => '0');
SELECT counted();
SELECT outcome, attempt FROM idem_claim('stats', 'abandoned-once-01');
SELECT counted();
-- ... not of a released or a forgotten one.
SELECT outcome, idem_release('stats', 'released-once-001') FROM idem_claim('stats', 'released-once-001');
SELECT outcome, attempt FROM idem_claim('stats', 'released-once-001');
SELECT idem_forget('stats', 'released-once-001');
SELECT outcome, attempt FROM idem_claim('stats', 'released-once-001');
SELECT counted();

--
-- Completions and failures: the first of each, by either overload
--
SELECT claim_token FROM idem_claim('stats', 'completed-twice-1') \gset
SELECT counted();
SELECT idem_complete('stats', 'completed-twice-1', 200, claim_token => :claim_token);
SELECT counted();
SELECT idem_complete('stats', 'completed-twice-1', 200, claim_token => :claim_token);
SELECT counted();
SELECT outcome, idem_complete('stats', 'completed-bytes-1', 200, '\x00'::bytea) FROM idem_claim('stats', 'completed-bytes-1');
SELECT counted();
SELECT claim_token FROM idem_claim('stats', 'failed-twice-0001') \gset
SELECT counted();
SELECT idem_fail('stats', 'failed-twice-0001', 'oops', :claim_token);
SELECT counted();
SELECT idem_fail('stats', 'failed-twice-0001', 'oops', :claim_token);
SELECT counted();

-- idem_run claims and completes.
CREATE FUNCTION handler(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request;
SELECT outcome FROM idem_run('stats', 'run-to-be-counted', 'handler(jsonb)', '{}');
SELECT counted();
SELECT outcome FROM idem_run('stats', 'run-to-be-counted', 'handler(jsonb)', '{}');
SELECT counted();
SELECT outcome FROM idem_run('stats', 'run-to-be-counted', 'handler(jsonb)', '{"a": 1}');
SELECT counted();

--
-- User actions: advanced or stale, whichever function was called
--
SELECT should_process FROM idem_try_advance('stats', 'post', '1', 5);
SELECT counted();
SELECT should_process FROM idem_try_advance('stats', 'post', '1', 6);
SELECT counted();
SELECT should_process FROM idem_try_advance('stats', 'post', '1', 6);
SELECT counted();
SELECT processed FROM idem_toggle('stats', 'post', '1', 'like', 7);
SELECT counted();
SELECT processed FROM idem_toggle('stats', 'post', '1', 'like', 7);
SELECT counted();
SELECT processed FROM idem_set('stats', 'post', '1', 'dislike', true, 8, '{like,angry}');
SELECT counted();
SELECT processed FROM idem_set('stats', 'post', '1', 'dislike', true, 1, '{like,angry}');
SELECT counted();

--
-- Appends, by outcome: calls, not events
--
SELECT outcome FROM idem_try_append('stats', 'client', 1, 10);
SELECT counted();
SELECT outcome FROM idem_try_append('stats', 'client', 5);
SELECT counted();
SELECT outcome FROM idem_try_append('stats', 'client', 10, 2);
SELECT counted();
SELECT outcome FROM idem_try_append('stats', 'client', 12, allow_gaps => false);
SELECT counted();
SELECT outcome FROM idem_try_append('stats', 'client', 12, expected_version => 9);
SELECT counted();
SELECT outcome FROM idem_try_append('stats', 'client', 12, expected_version => 10);
SELECT counted();

--
-- Once: tokens, not calls
--
SELECT idem_once('stats', 't1');
SELECT counted();
SELECT idem_once('stats', 't1');
SELECT counted();
SELECT count(*) FROM idem_once_many('stats', '{t1,t2,t3,t3}'::text[]);
SELECT counted();
SELECT count(*) FROM idem_once_many('stats', (SELECT array_agg('n' || i) FROM generate_series(1, 500) AS i));
SELECT counted();
SELECT count(*) FROM idem_once_many('stats', (SELECT array_agg('n' || i) FROM generate_series(1, 500) AS i));
SELECT counted();
SELECT count(*) FROM idem_once_many('stats', '{}'::text[]);
SELECT counted();
-- One that has expired is used for the first time again.
BEGIN;
SELECT idem_once('stats', 'short-lived', '0'), idem_once('stats', 'short-lived');
SELECT counted();
ROLLBACK;

--
-- Outbox: messages, not calls
--
SELECT count(idem_publish('stats', to_jsonb(i), CASE WHEN i > 3 THEN 'k' END)) FROM generate_series(1, 5) AS i;
SELECT counted();
SELECT count(*) FROM idem_outbox_take(2, '1 hour');
SELECT counted();
SELECT count(*) FROM idem_outbox_take(lease => '1 hour');
SELECT counted();
SELECT count(*) FROM idem_outbox_take(lease => '1 hour');
SELECT counted();
SELECT idem_outbox_ack('{1,2,99}');
SELECT counted();
SELECT idem_outbox_ack('{1,2}');
SELECT counted();
SELECT idem_outbox_nack(3, retry_after => '0');
SELECT counted();
-- Nothing was refused where it was lost.
SELECT idem_outbox_nack(3, attempt => 7), idem_outbox_nack(1), idem_outbox_nack(99);
SELECT counted();
SET idempotency.outbox_max_attempts = 1;
-- Refused for the last time
SELECT idem_outbox_nack(4);
SELECT counted();
SELECT idem_outbox_nack(4);
SELECT counted();
-- Taken too often, and so not taken again
SELECT count(*) FROM idem_outbox_take();
SELECT counted();
SELECT count(*) FROM idem_outbox_take();
SELECT counted();
RESET idempotency.outbox_max_attempts;
SELECT idem_outbox_requeue(), idem_outbox_requeue('{1}');
SELECT counted();
-- A dead message that got through after all is acknowledged.
SET idempotency.outbox_max_attempts = 1;
SELECT idem_outbox_nack(5), idem_outbox_ack('{5}');
SELECT counted();
RESET idempotency.outbox_max_attempts;

--
-- Rows that the cleanup deletes
--
BEGIN;
SELECT count(idem_claim('stats', 'to-be-deleted-00' || i, ttl => '0')) FROM generate_series(1, 3) AS i;
SELECT count(idem_once('stats', 'd' || i, '0')) FROM generate_series(1, 4) AS i;
SET LOCAL idempotency.outbox_retention = 0;
SELECT counted();
SELECT * FROM idem_cleanup(2);
SELECT counted();
SELECT * FROM idem_cleanup();
SELECT counted();
SELECT * FROM idem_cleanup();
SELECT counted();
ROLLBACK;

--
-- Reads and refused calls are not counted
--
SELECT (idem_lookup('stats', 'completed-once-01')).state, idem_is_active('stats', 'post', '1', 'like'), idem_last_client_seq('stats', 'client'),
	idem_key_is_valid('completed-once-01'), idem_request_hash('GET', '/') IS NOT NULL, idem_canonical_json('{}');
BEGIN;
SELECT outcome FROM idem_claim('stats', 'held-and-renewed1');
SELECT counted();
SELECT idem_checkpoint('stats', 'held-and-renewed1', 'half') > now(), idem_heartbeat('stats', 'held-and-renewed1') > now(), idem_release('stats', 'held-and-renewed1');
SELECT counted();
COMMIT;
\set VERBOSITY sqlstate
SELECT idem_claim('stats', 'short');
SELECT idem_claim('stats', 'refused-ttl-00001', ttl => '-1 s');
SELECT idem_complete('stats', 'completed-once-01', 200);
SELECT idem_fail('stats', 'never-claimed-001');
SELECT idem_run('stats', 'refused-handler-1', 'counters()', '{}');
SET idempotency.max_action_id_lead = '1h';
SELECT idem_try_advance('stats', 'post', '1', 9223372036854775807);
RESET idempotency.max_action_id_lead;
SELECT idem_try_append('stats', 'client', 0);
SELECT idem_once('stats', '');
SELECT idem_once_many('stats', '{new,NULL}'::text[]);
SELECT idem_publish('', '{}');
SELECT idem_outbox_take(0);
SELECT idem_outbox_ack('{NULL}');
SELECT idem_cleanup(0);
BEGIN READ ONLY;
SELECT idem_once('stats', 'read-only');
ROLLBACK;
\set VERBOSITY default
SELECT counted();

--
-- A call counts when it is made, whether or not its transaction commits
--
BEGIN;
SELECT outcome, idem_complete('stats', 'rolled-back-00001', 200) FROM idem_claim('stats', 'rolled-back-00001');
SELECT should_process FROM idem_try_advance('stats', 'post', '2', 1);
SELECT outcome FROM idem_try_append('stats', 'another', 1);
SELECT idem_once('stats', 'rolled-back');
SELECT idem_publish('stats', '{}') IS NOT NULL;
SAVEPOINT s;
SELECT outcome, idem_fail('stats', 'rolled-back-00002') FROM idem_claim('stats', 'rolled-back-00002');
ROLLBACK TO s;
ROLLBACK;
SELECT counters();
-- A reset is not undone either.
BEGIN;
SELECT idem_stats_reset();
ROLLBACK;
SELECT counted();

--
-- Reset: from a moment on, and of all counters
--
SELECT outcome FROM idem_claim('stats', 'before-the-reset1');
SELECT stats_reset AS earlier FROM idem_stats WHERE datname = :'regress_db' \gset
SELECT idem_stats_reset();
SELECT stats_reset > :'earlier', stats_reset BETWEEN now() - interval '1 minute' AND clock_timestamp() FROM idem_stats WHERE datname = :'regress_db';
SELECT counters();

--
-- Each database has counters of its own, and another session adds to them.
--
SELECT outcome FROM idem_claim('stats', 'of-this-database1');
\c -
\pset format unaligned
\pset tuples_only on
SELECT counters();
SELECT outcome FROM idem_claim('stats', 'of-this-database2');
SELECT counters();
CREATE DATABASE regress_idem_stats_db;
-- It has no row before it has the extension.
SELECT count(*) FROM idem_stats WHERE datname = 'regress_idem_stats_db';
\c regress_idem_stats_db
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT idem.idem_once('stats', 'of-the-other-database');
SELECT datname = :'regress_db', claims_new, once_first, once_seen FROM idem.idem_stats
	WHERE datname IN (:'regress_db', current_database()) ORDER BY claims_new;
SELECT count(*), count(DISTINCT datid), bool_and(datid = (SELECT oid FROM pg_database AS d WHERE d.datname = s.datname)) FROM idem.idem_stats AS s
	WHERE datname IN (:'regress_db', current_database());
SELECT idem.idem_stats_reset();
SELECT datname = :'regress_db', claims_new, once_first, once_seen FROM idem.idem_stats
	WHERE datname IN (:'regress_db', current_database()) ORDER BY claims_new;
SELECT idem.idem_once('stats', 'of-the-other-database');
-- A role that may read them here reads those of other databases only as a member of pg_read_all_stats.
CREATE ROLE regress_idem_installer;
GRANT ALL ON SCHEMA idem TO regress_idem_installer;
DROP EXTENSION idempotency;
GRANT CREATE ON DATABASE regress_idem_stats_db TO regress_idem_installer;
SET ROLE regress_idem_installer;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT datname, once_seen FROM idem.idem_stats;
SELECT datid = (SELECT oid FROM pg_database WHERE datname = current_database()), once_seen FROM idem.idem_stats_data();
SELECT idem.idem_metrics() ~ 'idempotency_once_total{datname="regress_idem_stats_db",outcome="seen"} 1\n';
RESET ROLE;
GRANT pg_read_all_stats TO regress_idem_installer;
SET ROLE regress_idem_installer;
SELECT datname = :'regress_db' AS other FROM idem.idem_stats WHERE datname IN (:'regress_db', current_database()) ORDER BY other;
RESET ROLE;
\c :regress_db
SELECT datname = :'regress_db', claims_new, once_first, once_seen FROM idem_stats
	WHERE datname IN (:'regress_db', 'regress_idem_stats_db') ORDER BY claims_new;
SELECT counted();
-- The row goes with its database.
DROP DATABASE regress_idem_stats_db;
SELECT count(*) FROM idem_stats WHERE datname = 'regress_idem_stats_db';

--
-- A cleanup has ended when its transaction is committed, and not before
--
CREATE FUNCTION passes() RETURNS text LANGUAGE sql AS $$
	SELECT cleanup_passes || CASE WHEN last_cleanup IS NULL THEN '' ELSE ', the last known' END FROM idem_stats WHERE datname = current_database()
$$;
SELECT idem_stats_reset();
BEGIN;
SELECT count(*) FROM idem_cleanup();
SELECT passes();
ROLLBACK;
SELECT passes();
-- Nor in a subtransaction that is rolled back
BEGIN;
SAVEPOINT a;
SELECT count(*) FROM idem_cleanup();
ROLLBACK TO a;
SAVEPOINT b;
SAVEPOINT c;
SELECT count(*) FROM idem_cleanup();
RELEASE c;
ROLLBACK TO b;
COMMIT;
SELECT passes();
-- But in one that is not, or before one
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SELECT count(*) FROM idem_cleanup();
RELEASE b;
RELEASE a;
SAVEPOINT c;
ROLLBACK TO c;
COMMIT;
SELECT passes();
BEGIN;
SELECT count(*) FROM idem_cleanup();
SAVEPOINT a;
SELECT count(*) FROM idem_cleanup();
ROLLBACK TO a;
SELECT passes();
COMMIT;
SELECT passes();
SELECT count(*) FROM idem_cleanup();
SELECT passes();
SELECT passes(), idem_cleanup_idle() BETWEEN 0 AND 600;
DROP FUNCTION passes();

--
-- For members of pg_monitor to see, and for the owner to reset
--
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_nobody;
SELECT idem_grant('regress_idem_app');
SELECT outcome FROM idem_claim('stats', 'to-be-monitored-1');
\set VERBOSITY sqlstate
SET ROLE regress_idem_monitor;
SELECT datname = current_database(), claims_new FROM idem_stats WHERE datname = current_database();
SELECT claims_new FROM idem_stats_data() WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database());
SELECT idem_stats_reset();
SET ROLE regress_idem_app;
SELECT once_first FROM idem_stats;
SELECT once_first FROM idem_stats_data();
SELECT idem_stats_reset();
-- Its calls are counted all the same.
SELECT outcome FROM idem_claim('stats', 'to-be-monitored-1');
SET ROLE regress_idem_nobody;
SELECT once_first FROM idem_stats;
SELECT once_first FROM idem_stats_data();
SELECT idem_stats_reset();
RESET ROLE;
\set VERBOSITY default
SELECT counted();

SET client_min_messages = warning;
DROP FUNCTION handler(jsonb);
DROP FUNCTION counted();
DROP FUNCTION counters();
DROP OWNED BY regress_idem_app;
DROP ROLE regress_idem_monitor, regress_idem_app, regress_idem_nobody, regress_idem_installer;
