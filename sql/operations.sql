-- The SQL blocks of docs/operations.md, in order.
-- Written by test/readme; do not edit, run that again.
\set first_database :DBNAME
CREATE DATABASE regress_idempotency_operations TEMPLATE template0;
\connect regress_idempotency_operations

-- Operations
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
ALTER DATABASE regress_idempotency_operations SET search_path = public, idem;
\connect

-- Sizing
SET synchronous_commit = off;
DO $$
DECLARE
	key text;
BEGIN
	FOR i IN 1 .. 10000 LOOP
		key := 'order-' || md5(i::text);
		PERFORM idem_claim('customer-7', key, sha256(key::bytea));
		PERFORM idem_complete('customer-7', key, 201, '{"order": 4711, "state": "accepted"}');
		COMMIT;
	END LOOP;
END
$$;
RESET synchronous_commit;
-- to the nearest 50
SELECT round(pg_total_relation_size('idem_keys') / count(*)::numeric / 50) * 50 AS bytes_per_key FROM idem_keys;

-- Cleanup and vacuum
\connect
SELECT relname, unnest(reloptions) AS setting FROM pg_class
WHERE relname LIKE 'idem\_%' AND relkind = 'r' AND reloptions::text LIKE '%autovacuum%'
ORDER BY relname, setting;

-- Cleanup and vacuum
ALTER TABLE idem_keys SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000);

-- Cleanup and vacuum
SELECT pid, usename, state, now() - xact_start AS open_for, left(query, 40) AS query
FROM pg_stat_activity
WHERE datname = current_database() AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
	AND xact_start < now() - '30 minutes'::interval
ORDER BY xact_start;
SELECT gid, prepared FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < now() - '30 minutes'::interval;
-- Standbys with hot_standby_feedback hold it back through their connection, or through its slot.
SELECT application_name, age(backend_xmin) AS transactions FROM pg_stat_replication
WHERE age(backend_xmin) > 10000;
SELECT slot_name, active, age(xmin) AS transactions FROM pg_replication_slots WHERE age(xmin) > 10000;

-- Cleanup and vacuum
REINDEX TABLE CONCURRENTLY idem_keys;

-- Cleanup and vacuum
SELECT indexrelid::regclass FROM pg_index WHERE NOT indisvalid;

-- Archive instead of delete
CREATE TABLE expired_records (
	archived_at timestamptz NOT NULL DEFAULT now(),
	kind text NOT NULL,
	record jsonb NOT NULL
);
CREATE PROCEDURE archive_expired_records()
LANGUAGE plpgsql AS $$
DECLARE
	of_kind text;
	archived bigint;
BEGIN
	FOREACH of_kind IN ARRAY ARRAY['keys', 'tokens', 'messages'] LOOP
		LOOP
			INSERT INTO expired_records (kind, record)
				SELECT of_kind, taken FROM idem_take_expired(of_kind) AS taken;
			GET DIAGNOSTICS archived = ROW_COUNT;
			COMMIT;
			EXIT WHEN archived = 0;
		END LOOP;
	END LOOP;
END
$$;
SELECT outcome FROM idem_claim('customer-7', 'order-to-archive-1', ttl => '0 seconds');
CALL archive_expired_records();
SELECT kind, record ->> 'scope' AS scope, record ->> 'key' AS key, record ->> 'state' AS state FROM expired_records;

-- Monitoring
\connect
CREATE ROLE regress_exporter LOGIN;
SELECT idem_grant_monitor('regress_exporter'::regrole);
SELECT claims_new, claims_replay, completions, takeovers, claims_hash_conflict FROM idem_stats
WHERE datname = current_database();

-- Monitoring
SELECT check_name, status, detail FROM idem_health() WHERE status <> 'ok';

-- Monitoring
SELECT scope, key, age, attempt, recovery_point FROM idem_abandoned(older_than => '5 minutes') LIMIT 20;

-- Monitoring
SELECT topic, first_id, blocked_since, waiting, reason, until, pid FROM idem_outbox_blocked();

-- Monitoring
SELECT topic, count(*), now() - min(available_at) AS waiting FROM idem_outbox
WHERE state = 'pending' AND available_at < now() - '5 minutes'::interval
GROUP BY topic ORDER BY topic;

-- Monitoring
SELECT topic, count(*), (array_agg(last_error ORDER BY id DESC))[1] AS last_error FROM idem_outbox
WHERE state = 'dead' GROUP BY topic ORDER BY topic;

-- Monitoring
SELECT left(idem_metrics(), 7) AS metrics;

-- IdempotencyOutboxOld
SELECT o.id, o.topic, o.available_at, a.pid, p.gid
FROM idem_outbox AS o
LEFT JOIN pg_stat_activity AS a ON a.backend_xid = o.xmax
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = o.xmax
WHERE o.state = 'pending' AND o.in_due_index AND o.available_at < clock_timestamp() AND (a.pid IS NOT NULL OR p.gid IS NOT NULL)
ORDER BY o.available_at LIMIT 10;

-- Upgrades
\connect
ALTER EXTENSION idempotency UPDATE;

-- Backup and restore
\connect
UPDATE pg_extension AS e SET extconfig = extconfig || lost, extcondition = extcondition || array_fill(''::text, ARRAY[cardinality(lost)])
FROM (SELECT refobjid, array_agg(c.oid) AS lost FROM pg_depend AS d JOIN pg_class AS c ON c.oid = d.objid
	WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_extension'::regclass AND deptype = 'e' AND relkind IN ('r', 'S')
		AND NOT EXISTS (SELECT FROM pg_extension WHERE c.oid = ANY (extconfig))
	GROUP BY refobjid) AS d
WHERE e.extname = 'idempotency' AND d.refobjid = e.oid
RETURNING lost::regclass[] AS marked_again;

-- Restores without sequences
SELECT idem_raise_claim_tokens((SELECT coalesce(max(claim_token), 0) FROM idem_keys)) >= 0 AS raised;
SELECT status FROM idem_health() WHERE check_name = 'sequences';

-- Failover
\connect
BEGIN;
SET LOCAL synchronous_commit = on;   -- and synchronous_standby_names is set
SELECT outcome FROM idem_claim('billing', 'invoice-1001-payment');
COMMIT;

-- Failover
SELECT idem_raise_claim_tokens(1000000 + greatest(idem_raise_claim_tokens(0),
	(SELECT max(claim_token) FROM idem_keys))) >= 1000000 AS beyond;

-- Clocks
\connect
UPDATE idem_outbox SET created_at = clock_timestamp(), available_at = clock_timestamp() + (available_at - created_at)
WHERE state = 'pending' AND created_at > clock_timestamp();
-- acknowledged and dead ones from which takes find the next message of a key
UPDATE idem_outbox SET available_at = clock_timestamp()
WHERE state <> 'pending' AND in_due_index AND available_at > clock_timestamp();
-- leases and pauses that began during the jump: longer than any that your relays use
UPDATE idem_outbox SET available_at = clock_timestamp()
WHERE state = 'pending' AND awaiting_ack IS NOT NULL AND available_at > clock_timestamp() + interval '12 hours';

-- Leave nothing behind.
\connect :first_database
DROP DATABASE regress_idempotency_operations;
DROP ROLE regress_exporter;
