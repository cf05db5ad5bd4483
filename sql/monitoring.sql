--
-- Monitoring: idem_metrics, idem_health, idem_abandoned
--
-- Tests that need their own server, a parser of metrics, or time, are in
-- test/t/037_monitoring.pl.
--
SET client_min_messages = warning;
DROP ROLE IF EXISTS regress_idem_monitor, regress_idem_app;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

SELECT current_database() AS regress_db \gset
\pset format unaligned
\pset tuples_only on
SELECT idem_stats_reset();

-- The samples of a family, without the database.
CREATE FUNCTION samples(family text) RETURNS SETOF text
LANGUAGE sql AS $$
	SELECT regexp_replace(replace(line, 'datname="' || current_database() || '"', ''), '^idempotency_', '')
	FROM regexp_split_to_table(idem_metrics(), '\n') WITH ORDINALITY AS l (line, n)
	WHERE line ~ ('^idempotency_' || family || '\{')
	ORDER BY n
$$;
CREATE FUNCTION health(name text) RETURNS TABLE (status text, value text, threshold double precision, detail text)
LANGUAGE sql AS $$
	SELECT status, CASE WHEN value = trunc(value) THEN value::text ELSE 'some' END, threshold, detail
	FROM idem_health() WHERE check_name = name
$$;

--
-- The text, without its values
--
SELECT regexp_replace(replace(line, :'regress_db', 'DB'), '\} .*', '}') FROM regexp_split_to_table(idem_metrics(), '\n') AS line
	WHERE line !~ '^idempotency_(build_info|last_cleanup_timestamp_seconds)';
SELECT line ~ '^idempotency_build_info\{datname="[^"]+",version="1.0",server_version="[^"]+"\} 1$' FROM regexp_split_to_table(idem_metrics(), '\n') AS line
	WHERE line ~ '^idempotency_build_info';

-- It is made of the samples, which have no text to be read.
SELECT regexp_replace(line, '.*[}] ', '') = replace(value::text, 'Infinity', '+Inf') AND line LIKE name || '{datname="%' AS same, count(*)
	FROM (SELECT line, row_number() OVER (ORDER BY n) AS n FROM regexp_split_to_table(idem_metrics(), '\n') WITH ORDINALITY AS l (line, n) WHERE line !~ '^#') AS t
	FULL JOIN idem_metric_samples() WITH ORDINALITY AS s (name, labels, value, type, help, n) USING (n) WHERE name !~ 'age|lag' GROUP BY 1;
SELECT type, count(*), count(DISTINCT name), bool_and(help <> '' AND value IS NOT NULL AND labels ->> 'datname' = current_database()) AS whole,
		bool_and(name ~ CASE type WHEN 'counter' THEN '^idempotency_[a-z_]+_total$' WHEN 'info' THEN '_info$' ELSE '^idempotency_[a-z_]+$' END) AS named
	FROM idem_metric_samples() WHERE name <> 'idempotency_last_cleanup_timestamp_seconds' GROUP BY 1 ORDER BY 1;
SELECT labels - 'datname' AS labels FROM idem_metric_samples() WHERE name = 'idempotency_records';
--
-- Each counter has the right name
--
SELECT outcome FROM idem_claim('monitoring', 'claimed-0000000001', lease => '1 h');
SELECT outcome FROM idem_claim('monitoring', 'claimed-0000000001');
SELECT outcome, idem_fail('monitoring', 'failed-00000000001') FROM idem_claim('monitoring', 'failed-00000000001');
SELECT outcome, idem_complete('monitoring', 'failed-00000000001', 200) FROM idem_claim('monitoring', 'failed-00000000001', '\x01');
SELECT count(idem_claim('monitoring', 'failed-00000000001')) FROM generate_series(1, 4);
SELECT count(idem_claim('monitoring', 'failed-00000000001', '\x02')) FROM generate_series(1, 5);
SELECT count(idem_try_advance('monitoring', 'post', '1', 5)) FROM generate_series(1, 7);
SELECT count(idem_try_append('monitoring', 'client', 1)) FROM generate_series(1, 9);
SELECT idem_once('monitoring', 'a'), idem_once('monitoring', 'a'), idem_once('monitoring', 'b');
SELECT samples FROM samples('[a-z_]+_total') WHERE samples !~ '^(cleanup_passes|rows_deleted)';
-- All of idem_stats' counters, and no other.
SELECT array_agg(value ORDER BY value) = (SELECT array_agg(substring(s FROM '(\d+)$')::bigint ORDER BY substring(s FROM '(\d+)$')::bigint) FROM samples('[a-z_]+_total') AS s)
FROM idem_stats AS s, LATERAL (
	SELECT value::bigint FROM json_each_text(row_to_json(s)) WHERE key NOT IN ('datname', 'datid', 'last_cleanup', 'stats_reset')) AS v
WHERE datname = current_database();
SELECT idem_stats_reset();
SELECT samples('claims_total');
SELECT count(*) FROM idem_cleanup();
SELECT abs(substring(samples FROM '[0-9.]+$')::float8 - extract(epoch FROM clock_timestamp())) < 60 FROM samples('last_cleanup_timestamp_seconds');
SELECT abs(substring(samples FROM '[0-9.]+$')::float8 - extract(epoch FROM clock_timestamp())) < 60 FROM samples('stats_reset_timestamp_seconds');

--
-- Gauges.  In one transaction, which a background worker does not see.
--
BEGIN;
SELECT count(idem_claim('monitoring', 'expired-0000000000' || i, ttl => '0')) FROM generate_series(1, 3) AS i;
SELECT count(idem_once('monitoring', 'expired' || i, '0')) FROM generate_series(1, 4) AS i;
SELECT samples FROM samples('records') WHERE samples ~ 'expired';
-- How late the oldest of each is
UPDATE idem_keys SET expires_at = clock_timestamp() - i * interval '1000 s' FROM generate_series(1, 3) AS i WHERE key = 'expired-0000000000' || i;
UPDATE idem_tokens SET expires_at = clock_timestamp() - interval '7000 s' WHERE token = 'expired2';
SELECT regexp_replace(samples, '\d\d\d(\.\d+)?$', '_') FROM samples('cleanup_lag_seconds');
SELECT * FROM health('cleanup_lag');
SET LOCAL idempotency.health_cleanup_lag = '2000 s';
SELECT * FROM health('cleanup_lag');
SET LOCAL idempotency.health_cleanup_lag = '9000 s';
SELECT * FROM health('cleanup_lag');
SET LOCAL idempotency.health_cleanup_lag = 0;
SELECT * FROM health('cleanup_lag');
RESET idempotency.health_cleanup_lag;
-- A tombstone has expired, but is not late before its retention is over.
DELETE FROM idem_tokens;
SET LOCAL idempotency.expired_key_policy = reject;
SET LOCAL idempotency.tombstone_retention = '2000 s';
SELECT samples FROM samples('records') WHERE samples ~ 'keys.*expired';
SELECT regexp_replace(samples, '\d\d\d(\.\d+)?$', '_') FROM samples('cleanup_lag_seconds');
SET LOCAL idempotency.tombstone_retention = '3 h';
SELECT samples FROM samples('records') WHERE samples ~ 'keys.*expired';
SELECT samples('cleanup_lag_seconds');
SELECT * FROM health('cleanup_lag');
RESET idempotency.expired_key_policy;
ROLLBACK;

-- Outbox: one of each kind
BEGIN;
SELECT count(idem_publish('monitoring', to_jsonb(i))) FROM generate_series(1, 2) AS i;
SELECT count(idem_publish('keyed', to_jsonb(i), 'key')) FROM generate_series(3, 5) AS i;
SELECT count(idem_publish('monitoring', '6', deliver_after => '1 h'));
SELECT samples('outbox_messages');
SELECT count(*) FROM idem_outbox_take(1, topics => '{monitoring}');
SELECT samples('outbox_messages');
UPDATE idem_outbox SET available_at = clock_timestamp() - interval '5000 s' WHERE payload = '3';
SELECT regexp_replace(samples, '\d\d\d(\.\d+)?$', '_') FROM samples('outbox_oldest_age_seconds');
SELECT * FROM health('outbox_oldest');
SET LOCAL idempotency.health_outbox_oldest = '2000s';
SELECT * FROM health('outbox_oldest');
SET LOCAL idempotency.outbox_max_attempts = 1;
SELECT count(*) FROM idem_outbox_take();
SELECT count(idem_outbox_nack(id)) FROM idem_outbox WHERE attempt > 0;
SELECT samples('outbox_messages');
SELECT samples('outbox_oldest_age_seconds');
SELECT * FROM health('outbox_oldest');
SELECT * FROM health('dead_letters');
SET LOCAL idempotency.health_dead_letters = 2;
SELECT * FROM health('dead_letters');
SET LOCAL idempotency.health_dead_letters = 6;
SELECT * FROM health('dead_letters');
SET LOCAL idempotency.health_dead_letters = 0;
SELECT * FROM health('dead_letters');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox;
SELECT samples('outbox_messages');
-- An acknowledged message is late when its retention is over.
UPDATE idem_outbox SET acked_at = acked_at - interval '7 days 5000 seconds' WHERE payload = '1';
SELECT regexp_replace(samples, '\d\d\d(\.\d+)?$', '_') FROM samples('cleanup_lag_seconds') WHERE samples ~ 'outbox';
SET LOCAL idempotency.health_cleanup_lag = '2000s';
SELECT * FROM health('cleanup_lag');
ROLLBACK;

--
-- Abandoned claims
--
BEGIN;
SELECT outcome FROM idem_claim('monitoring', 'abandoned-00000001', lease => '0');
SELECT outcome FROM idem_claim('monitoring', 'abandoned-00000002', lease => '0');
SELECT outcome FROM idem_claim('monitoring', 'leased-00000000001', lease => '1 h');
SELECT outcome FROM idem_claim('monitoring', 'gone-000000000001', ttl => '0');
SELECT outcome, idem_fail('monitoring', 'failed-0000000001') FROM idem_claim('monitoring', 'failed-0000000001', lease => '0');
SELECT outcome, idem_complete('monitoring', 'completed-0000001', 200) FROM idem_claim('monitoring', 'completed-0000001', lease => '0');
SELECT idem_checkpoint('monitoring', 'abandoned-00000002', 'charged', lease => '0') IS NOT NULL;
UPDATE idem_keys SET lease_expires_at = clock_timestamp() - interval '10 h' WHERE key LIKE '%2';
UPDATE idem_keys SET lease_expires_at = clock_timestamp() - interval '6 h', attempt = 7 WHERE key LIKE '%1' AND key NOT LIKE 'leased%';
SELECT scope, key, date_trunc('hour', age), attempt, recovery_point, clock_timestamp() - lease_expires_at - age < '1 min' FROM idem_abandoned();
SELECT key FROM idem_abandoned('8 h');
SELECT key FROM idem_abandoned('20 h');
SELECT count(*) FROM idem_abandoned('0');
-- The key looks as it does in messages.
SELECT key FROM idem_abandoned(older_than => '8 h');
SAVEPOINT s;
SELECT idem_complete('monitoring', 'abandoned-00000002', 200, claim_token => 0);
ROLLBACK TO s;
SELECT * FROM health('stuck_leases');
SET LOCAL idempotency.health_stuck_leases = 2;
SELECT * FROM health('stuck_leases');
UPDATE idem_keys SET lease_expires_at = clock_timestamp() - interval '30 s' WHERE key LIKE '%1';
SELECT * FROM health('stuck_leases');
-- NULL stands for the default.
SELECT count(*), (SELECT count(*) FROM idem_abandoned('0')) FROM idem_abandoned(NULL);
-- Completed, it is not abandoned any more.
SELECT count(*) FROM idem_abandoned();
SELECT idem_complete('monitoring', 'abandoned-00000002', 200);
SELECT count(*) FROM idem_abandoned();
ROLLBACK;

SELECT * FROM idem_abandoned('-1 microsecond');
SELECT * FROM idem_abandoned('100000000 years');

--
-- The clock
--
BEGIN;
SELECT * FROM health('clock');
SELECT outcome FROM idem_claim('monitoring', 'from-the-future-1');
SELECT idem_publish('monitoring', '{}') IS NOT NULL, idem_publish('monitoring', '{}') IS NOT NULL;
UPDATE idem_outbox SET created_at = clock_timestamp() + interval '1 h' WHERE id = (SELECT max(id) FROM idem_outbox);
SELECT * FROM health('clock');
SET LOCAL idempotency.health_clock = '1 h';
SELECT status FROM health('clock');
SET LOCAL idempotency.health_clock = '15 min';
SELECT status FROM health('clock');
UPDATE idem_keys SET created_at = clock_timestamp() + interval '2 h' WHERE key = 'from-the-future-1';
SELECT status, detail FROM health('clock');
ROLLBACK;

--
-- Times from a dump may be infinite: what has been due since ever is late, what
-- is due never is not, and neither tells anything of the clock.
--
BEGIN;
SELECT outcome FROM generate_series(1, 4) AS i, idem_claim('monitoring', 'infinite-000000000' || i, lease => '0');
UPDATE idem_keys SET expires_at = 'infinity', lease_expires_at = '-infinity', created_at = 'infinity' WHERE key LIKE 'infinite%1';
UPDATE idem_keys SET expires_at = 'infinity', lease_expires_at = 'infinity', created_at = '-infinity' WHERE key LIKE 'infinite%2';
UPDATE idem_keys SET expires_at = '-infinity' WHERE key LIKE 'infinite%3';
UPDATE idem_keys SET expires_at = 'infinity', lease_expires_at = clock_timestamp() - interval '6 h' WHERE key LIKE 'infinite%4';
SELECT count(idem_publish('monitoring', to_jsonb(i))) FROM generate_series(1, 4) AS i;
UPDATE idem_outbox SET created_at = 'infinity', available_at = '-infinity' WHERE payload = '1';
UPDATE idem_outbox SET created_at = '-infinity', available_at = 'infinity' WHERE payload = '2';
UPDATE idem_outbox SET state = 'acked', acked_at = '-infinity' WHERE payload = '3';
UPDATE idem_outbox SET state = 'acked', acked_at = 'infinity' WHERE payload = '4';
SELECT key, date_trunc('hour', age), lease_expires_at = '-infinity' FROM idem_abandoned();
SELECT count(*) FROM idem_abandoned('0');
SELECT check_name, status, CASE WHEN check_name IN ('cleanup_lag', 'outbox_oldest', 'stuck_leases') THEN value END AS value, detail
FROM idem_health() WHERE check_name NOT IN ('worker', 'bloat');
SELECT samples FROM samples('(cleanup_lag|outbox_oldest_age)_seconds');
SELECT samples('outbox_messages');
SELECT * FROM idem_cleanup();
SELECT samples FROM samples('cleanup_lag_seconds');
SELECT count(*) FROM idem_health();
ROLLBACK;

--
-- An altered table stops the calls that need it, but not monitoring, which
-- reports it.  The other values are as usual.
--
BEGIN;
SELECT idem_once('monitoring', 'before') AS before;
ALTER TABLE idem_outbox ADD COLUMN note text;
SELECT check_name, status, value, detail FROM idem_health() WHERE check_name IN ('cleanup_lag', 'outbox_oldest', 'dead_letters', 'stuck_leases', 'tables');
SELECT samples FROM samples('(table_unusable|cleanup_lag_seconds|outbox_messages|outbox_oldest_age_seconds|records)') WHERE samples !~ 'live';
SELECT count(*) > 20 AS counters FROM samples('[a-z_]+_total');
-- Switched off, they are quiet.
SET LOCAL idempotency.health_tables = 0;
SET LOCAL idempotency.health_dead_letters = 0;
SELECT check_name, status, value, detail FROM idem_health() WHERE check_name IN ('tables', 'dead_letters');
RESET idempotency.health_tables;
RESET idempotency.health_dead_letters;
-- Tables, indexes, sequences: whatever calls would refuse
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t AFTER INSERT ON idem_keys FOR EACH ROW EXECUTE FUNCTION nothing();
ALTER INDEX idem_tokens_expires_at RENAME TO elsewhere;
ALTER TABLE idem_aggregates RENAME TO elsewhere_too;
ALTER TABLE idem_action_versions SET UNLOGGED;
ALTER SEQUENCE idem_claim_tokens CYCLE;
SELECT * FROM idem_table_faults();
SELECT check_name, status, value, detail FROM idem_health() WHERE check_name NOT IN ('worker', 'bloat');
SELECT samples FROM samples('[a-z_]+') WHERE samples !~ '^(stats_|last_cleanup|build)' AND samples !~ '_total';
ROLLBACK;
SELECT count(fault) FROM idem_table_faults();

--
-- All checks, in order.  With nothing to complain about; and switched off.
--
SELECT check_name, status, threshold FROM idem_health();
DO $$
DECLARE
	name text;
BEGIN
	FOR name IN SELECT check_name FROM idem_health() WHERE threshold IS NOT NULL LOOP
		EXECUTE format('SET idempotency.health_%I = 0', name);
	END LOOP;
END
$$;
SELECT check_name, status, threshold, detail ~ '^switched off; .' FROM idem_health();
RESET idempotency.health_worker;
RESET idempotency.health_cleanup_lag;
RESET idempotency.health_outbox_oldest;
RESET idempotency.health_dead_letters;
RESET idempotency.health_stuck_leases;
RESET idempotency.health_bloat;
RESET idempotency.health_clock;
RESET idempotency.health_tables;

--
-- For members of pg_monitor, also in read-only transactions; not for the application
--
CREATE ROLE regress_idem_monitor IN ROLE pg_monitor;
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SELECT outcome FROM idem_claim('monitoring', 'abandoned-00000001', lease => '0');
SET ROLE regress_idem_monitor;
SET default_transaction_read_only = on;
SELECT count(*) FROM samples('claims_total');
SELECT count(*) FROM idem_health();
SELECT scope, key FROM idem_abandoned('0');
RESET default_transaction_read_only;
\set VERBOSITY sqlstate
SELECT count(*) FROM idem_keys;
SELECT idem_monitoring_data();
SELECT idem_table_stats();
SELECT idem_table_faults();
SELECT idem_vacuum_holder();
SELECT idem_worker_absence();
SELECT idem_cleanup_idle();
SET idempotency.health_clock = 0;
SET ROLE regress_idem_app;
SELECT idem_metrics();
SELECT idem_metric_samples();
SELECT idem_metric_families();
SELECT idem_health();
SELECT idem_abandoned();
\set VERBOSITY default
RESET ROLE;
-- Their settings do not change the findings.
CREATE SCHEMA captured;
CREATE FUNCTION captured.replace(text, text, text) RETURNS text LANGUAGE sql RETURN 'captured';
CREATE FUNCTION captured.cat(text, text) RETURNS text LANGUAGE sql RETURN 'captured';
CREATE OPERATOR captured.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = captured.cat);
CREATE TABLE captured.idem_keys ();
SET search_path = captured, pg_catalog;
SELECT count(*) FROM public.idem_metric_samples() WHERE name ~ 'captured' OR labels::text ~ 'captured';
SELECT strpos(public.idem_metrics(), 'captured'), count(*) FROM public.idem_abandoned('0');
RESET search_path;

-- pg_upgrade writes them out and reads them in again.
DO $$
DECLARE
	definition text;
BEGIN
	FOR definition IN SELECT pg_get_functiondef(oid) FROM pg_proc WHERE prosqlbody IS NOT NULL AND proname ~ '^idem_' LOOP
		EXECUTE definition;
	END LOOP;
END
$$;
SELECT length(idem_metrics()) > 5000, (SELECT count(*) FROM idem_health()), (SELECT count(*) FROM idem_abandoned('0'));

SET client_min_messages = warning;
DROP SCHEMA captured CASCADE;
DROP FUNCTION samples(text);
DROP FUNCTION health(text);
DROP OWNED BY regress_idem_app;
DROP ROLE regress_idem_monitor, regress_idem_app;
