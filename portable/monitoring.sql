-- Monitoring, as far as SQL allows it.  There are no counters, because a rollback
-- would lose its calls, and all other calls would wait for one row.

--@ helpers
CREATE FUNCTION @S@.idem_p_seconds_since(moment timestamptz)
RETURNS float8
LANGUAGE sql VOLATILE
AS $$
	SELECT CASE WHEN isfinite(moment) THEN greatest(extract(epoch FROM clock_timestamp() - moment)::float8, 0)
		WHEN moment < 'epoch' THEN 'Infinity' ELSE 0 END
$$;
COMMENT ON FUNCTION @S@.idem_p_seconds_since(timestamptz) IS
'The age of a time in seconds; 0 for NULL.';

--@ idem_stats_data plpgsql
BEGIN
	SELECT d.oid INTO datid FROM pg_database AS d WHERE d.datname = current_database();
	RETURN NEXT;
END

--@ idem_cleanup_idle sql
	SELECT NULL::float8

--@ idem_stats_reset plpgsql
BEGIN
	RAISE EXCEPTION USING ERRCODE = '0A000', MESSAGE = 'the portable edition has no statistics';
END

--@ idem_worker_absence sql
	SELECT 'the portable edition has none; call idem_cleanup() from a scheduler'

--@ idem_monitoring_data plpgsql
#variable_conflict use_column
DECLARE
	clock CONSTANT timestamptz := clock_timestamp();
	most CONSTANT int := 50000;
BEGIN
	RETURN QUERY
		SELECT 'keys', count(*), NULL::bigint, @S@.idem_p_seconds_since(min(k.expires_at) + @S@.idem_p_tombstone()),
			count(*) < most, NULL
		FROM (SELECT e.expires_at FROM @S@.idem_keys AS e WHERE e.expires_at <= clock
			ORDER BY e.expires_at LIMIT most) AS k
		UNION ALL
		SELECT 'tokens', count(*), NULL, @S@.idem_p_seconds_since(min(t.expires_at)), count(*) < most, NULL
		FROM (SELECT e.expires_at FROM @S@.idem_tokens AS e WHERE e.expires_at <= clock ORDER BY e.expires_at LIMIT most) AS t
		UNION ALL
		SELECT 'acked', count(*), NULL, @S@.idem_p_seconds_since(min(o.acked_at) + @S@.idem_p_setting('outbox_retention')::float8 * '1 ms'::interval), count(*) < most, NULL
		FROM (SELECT e.acked_at FROM @S@.idem_outbox AS e WHERE e.state <> 'pending'
			AND e.acked_at <= clock - @S@.idem_p_setting('outbox_retention')::float8 * '1 ms'::interval
			ORDER BY e.acked_at LIMIT most) AS o
		UNION ALL
		SELECT 'pending', count(*), count(*) FILTER (WHERE o.available_at <= clock),
			@S@.idem_p_seconds_since(min(o.available_at) FILTER (WHERE o.available_at <= clock)),
			count(*) < most, NULL
		FROM (SELECT e.available_at FROM @S@.idem_outbox AS e WHERE e.state = 'pending' LIMIT most) AS o
		UNION ALL
		SELECT 'dead', count(*), NULL, NULL, count(*) < most, NULL
		FROM (SELECT FROM @S@.idem_outbox AS e WHERE e.state <> 'pending' AND e.state = 'dead' LIMIT most) AS o;
END

-- A sample is the beginning of the table, not of an index.
--@ idem_sample_data plpgsql SET enable_seqscan = on
#variable_conflict use_column
DECLARE
	clock CONSTANT timestamptz := clock_timestamp();
	most CONSTANT int := 20000;
BEGIN
	IF source = 'keys' THEN
		RETURN QUERY SELECT CASE WHEN count(*) < most THEN 1 ELSE least(1, most / greatest((SELECT c.reltuples FROM pg_class AS c
					WHERE c.oid = '@S@.idem_keys'::regclass), most)) END::float8,
				coalesce(avg((k.expires_at > clock)::int), 1)::float8,
				count(*) FILTER (WHERE k.state = 'started' AND k.expires_at > clock AND k.lease_expires_at < clock - '1 min'::interval),
				count(*) FILTER (WHERE k.state = 'started' AND k.expires_at > clock AND k.lease_expires_at < clock - '1 min'::interval),
				max(k.created_at) FILTER (WHERE isfinite(k.created_at)), max(k.claim_token), NULL::text
			FROM (SELECT e.* FROM @S@.idem_keys AS e LIMIT most) AS k;
	ELSE
		RETURN QUERY SELECT 1::float8, coalesce(avg((t.expires_at > clock)::int), 1)::float8, 0::bigint, 0::bigint, max(t.used_at),
				NULL::bigint, NULL::text
			FROM (SELECT e.* FROM @S@.idem_tokens AS e LIMIT most) AS t;
	END IF;
END

--@ idem_clock_evidence plpgsql
BEGIN
	RETURN QUERY SELECT 'the newest message', o.created_at FROM @S@.idem_outbox AS o WHERE isfinite(o.created_at) ORDER BY o.id DESC LIMIT 1;
END

--@ idem_table_faults plpgsql
BEGIN
	-- One row for each name, because idem_metrics() has one sample for each.
	RETURN QUERY SELECT f.name, string_agg(f.fault, '; ') FROM (
		SELECT 'idem_p_configuration', 'settings differ from "idem_p_configuration": call idem_configure(), with any of them'
			WHERE EXISTS (SELECT FROM @S@.idem_p_known_settings AS k LEFT JOIN @S@.idem_p_configuration AS c ON c.name = k.name
				WHERE coalesce(@S@.idem_p_parse_setting(k.name, c.value), k.fallback) <> @S@.idem_p_configured(k.name))
		UNION ALL
		SELECT 'idem_p_configuration', format('PUBLIC or other roles have privileges on %s: call idem_grant() again',
				string_agg(DISTINCT t.label, ', '))
			FROM @S@.idem_p_open_tables() AS t HAVING count(*) > 0
		UNION ALL
		SELECT 'idem_p_installation', CASE
				WHEN f.grantee = 0 THEN format('PUBLIC can execute %s functions: call idem_grant() again', count(*))
				ELSE format('role "%1$s" can execute %2$s functions: unless it is an administrator, REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %3$s FROM %1$s, and grant again what it needs',
					f.grantee::regrole, count(*), '@S@'::regnamespace) END
			FROM @S@.idem_p_open_functions() AS f GROUP BY f.grantee
		UNION ALL
		-- The bodies call functions by the name of their schema, and run triggers.  A member of the owner's role
		-- has its rights anyway.
		SELECT 'idem_p_installation', format('%s can get all rights of role "%s", which owns the functions: %s',
				coalesce('role "' || nullif(r.oid, 0)::regrole || '"', 'PUBLIC'), CURRENT_USER, c.remedy)
			FROM pg_namespace AS n
			JOIN pg_database AS d ON d.datname = current_database()
			CROSS JOIN LATERAL (
				SELECT n.nspowner, format('ALTER SCHEMA %s OWNER TO %I', n.oid::regnamespace, CURRENT_USER)
				UNION ALL
				SELECT a.grantee, format('REVOKE CREATE ON SCHEMA %s FROM %s', n.oid::regnamespace,
						coalesce(nullif(a.grantee, 0)::regrole::text, 'PUBLIC'))
					FROM aclexplode(n.nspacl) AS a WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
				UNION ALL
				SELECT p.proowner, format('DROP TRIGGER %I ON %s', t.tgname, k.oid::regclass)
					FROM pg_class AS k JOIN pg_trigger AS t ON t.tgrelid = k.oid JOIN pg_proc AS p ON p.oid = t.tgfoid
					WHERE k.relnamespace = n.oid AND starts_with(k.relname::text, 'idem_')
			) AS c (creator, remedy)
			CROSS JOIN LATERAL (SELECT CASE WHEN c.creator = 'pg_database_owner'::regrole THEN d.datdba ELSE c.creator END) AS r (oid)
			WHERE n.oid = '@S@'::regnamespace AND (r.oid = 0 OR NOT pg_has_role(r.oid, CURRENT_USER, 'MEMBER'))
		) AS f (name, fault) GROUP BY f.name;
	RETURN QUERY SELECT t.name, CASE
			WHEN c.oid IS NULL THEN format('"%s" of extension "idempotency" is missing', t.name)
			WHEN c.relpersistence <> 'p' THEN format('%s "%s" is unlogged', CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, t.name)
			ELSE (SELECT format('"%s" of extension "idempotency" is missing', n.name) FROM unnest(t.indexes) AS n (name)
				WHERE NOT EXISTS (SELECT FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid
					WHERE i.indrelid = c.oid AND x.relname = n.name AND i.indisvalid)
				LIMIT 1) END
		FROM (VALUES (1, 'idem_keys', '{idem_keys_pkey,idem_keys_expires_at,idem_keys_resumable,idem_keys_resumable_scopes}'::text[]),
			(2, 'idem_claim_tokens', '{}'),
			(3, 'idem_action_versions', '{idem_action_versions_pkey}'), (4, 'idem_user_actions', '{idem_user_actions_pkey}'),
			(5, 'idem_aggregates', '{idem_aggregates_pkey}'), (6, 'idem_client_sequences', '{idem_client_sequences_pkey}'),
			(7, 'idem_tokens', '{idem_tokens_pkey,idem_tokens_expires_at}'),
			(8, 'idem_outbox', '{idem_outbox_pkey,idem_outbox_due,idem_outbox_topics,idem_outbox_lanes,idem_outbox_ended}'),
			(9, 'idem_outbox_ids', '{}')) AS t (position, name, indexes)
		LEFT JOIN pg_class AS c ON c.relname = t.name AND c.relnamespace = '@S@'::regnamespace
		ORDER BY t.position;
END

--@ idem_outbox_blocked plpgsql
#variable_conflict use_column
DECLARE
	clock CONSTANT timestamptz := clock_timestamp();
	-- The maximum number of lanes, and of due messages without a key, that a call reads.
	most CONSTANT int := 5000;
	-- This transaction and its open subtransactions, which can have locked rows.
	own CONSTANT xid[] := CASE WHEN pg_current_xact_id_if_assigned() IS NOT NULL THEN ARRAY(SELECT l.transactionid FROM pg_locks AS l
		WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.pid = pg_backend_pid()) ELSE '{}' END;
BEGIN
	IF max_lanes < 0 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "max_lanes" must not be negative',
			HINT = 'Pass the maximum number of rows.';
	END IF;
	-- A message is held if another transaction is writing or locking its row.
	RETURN QUERY
		WITH RECURSIVE heads AS (
			(SELECT o.*, o.xmax AS holder, 1 AS n FROM @S@.idem_outbox AS o
				WHERE o.key_hash IS NOT NULL AND o.state = 'pending' ORDER BY o.key_hash, o.id LIMIT 1)
			UNION ALL
			SELECT l.* FROM heads AS h CROSS JOIN LATERAL (
				SELECT o.*, o.xmax AS holder, h.n + 1 FROM @S@.idem_outbox AS o
				WHERE o.key_hash > h.key_hash AND o.state = 'pending' ORDER BY o.key_hash, o.id LIMIT 1) AS l
			WHERE h.n < most
		),
		-- A key that is blocked for a long time is at the end of the index of due messages.
		last_ones AS (
			SELECT o.*, o.xmax AS holder FROM @S@.idem_outbox AS o
			WHERE o.in_due_index AND o.state = 'pending' AND o.available_at > clock AND o.key_hash IS NOT NULL
			ORDER BY o.available_at DESC LIMIT 100
		),
		first_ones AS (
			SELECT o.*, o.xmax AS holder FROM @S@.idem_outbox AS o
			WHERE o.in_due_index AND o.state = 'pending' AND o.available_at <= clock
			ORDER BY o.available_at LIMIT most
		),
		seen AS (
			SELECT h.id, h.topic, h.key_hash, h.available_at, h.awaiting_ack, h.in_due_index, h.holder FROM heads AS h
			UNION
			SELECT o.id, o.topic, o.key_hash, o.available_at, o.awaiting_ack, o.in_due_index, o.holder FROM last_ones AS o
			UNION
			SELECT o.id, o.topic, o.key_hash, o.available_at, o.awaiting_ack, o.in_due_index, o.holder FROM first_ones AS o
			WHERE o.holder <> '0'::xid
		),
		judged AS (
			SELECT s.*, CASE WHEN s.holder <> '0'::xid AND s.holder <> ALL (own) AND @S@.idem_p_is_running(s.holder) THEN 'held'
				WHEN s.available_at > clock THEN CASE WHEN s.awaiting_ack THEN 'leased' ELSE 'paused' END
				WHEN NOT s.in_due_index THEN 'lost' END AS reason
			FROM seen AS s
			WHERE s.key_hash IS NULL OR s.id = (SELECT f.id FROM @S@.idem_outbox AS f
				WHERE f.key_hash = s.key_hash AND f.state = 'pending' ORDER BY f.id LIMIT 1)
		),
		blocked AS (
			SELECT j.*, w.*, j.available_at <= clock AS is_due
			FROM judged AS j
			CROSS JOIN LATERAL (SELECT min(o.available_at), count(*) FROM @S@.idem_outbox AS o
				WHERE o.key_hash = j.key_hash AND o.state = 'pending' AND o.id > j.id AND o.available_at <= clock) AS w (since, count)
			WHERE j.reason IS NOT NULL
		)
		SELECT b.topic, b.id, CASE WHEN b.is_due THEN least(b.available_at, b.since) ELSE b.since END, b.count, b.reason,
			CASE WHEN b.reason IN ('leased', 'paused') THEN b.available_at END,
			CASE WHEN b.reason = 'held' THEN (SELECT l.pid FROM pg_locks AS l
				WHERE l.locktype = 'transactionid' AND l.transactionid = b.holder AND l.mode = 'ExclusiveLock' AND l.granted LIMIT 1) END
		FROM (SELECT b.topic, b.id, b.available_at, b.since, b.count, b.reason, b.holder, b.is_due FROM blocked AS b
				WHERE b.key_hash IS NOT NULL
			UNION ALL
			-- One row for the messages without a key that a transaction holds
			SELECT b.topic, min(b.id), min(b.available_at), NULL, count(*) - 1, b.reason, b.holder, true FROM blocked AS b
				WHERE b.key_hash IS NULL AND b.is_due GROUP BY b.topic, b.reason, b.holder) AS b
		WHERE b.count > 0 OR b.is_due
		ORDER BY 3, 2 LIMIT coalesce(max_lanes, 100);
END

--@ idem_sequences_behind plpgsql
BEGIN
	RETURN QUERY SELECT s.name, s.behind
		FROM (SELECT 'idem_claim_tokens', highest_token - t.last_value + (NOT t.is_called)::int FROM @S@.idem_claim_tokens AS t
			UNION ALL
			SELECT 'idem_outbox_ids', (SELECT max(o.id) FROM @S@.idem_outbox AS o) - i.last_value + (NOT i.is_called)::int
			FROM @S@.idem_outbox_ids AS i
		) AS s (name, behind)
		WHERE s.behind > 0;
END

--@ idem_redacted_key_text plpgsql
BEGIN
	RETURN @S@.idem_p_redacted(key);
END

--@ idem_check_interval plpgsql
BEGIN
	IF value IS NULL OR name IS NULL THEN
		PERFORM @S@.idem_p_null(coalesce(name, 'name'));
	END IF;
	PERFORM @S@.idem_p_check_interval(value, name);
END
