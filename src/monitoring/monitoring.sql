
--
-- Monitoring
--

-- The functions for pg_monitor run with the rights of the tables' owner, who is
-- a superuser, in a schema that might belong to another role. Their bodies are
-- parsed when they are created, so that no name is looked up when they run. From
-- here to the end of the script, all names and operators without our schema's
-- name are the server's own. So no other role can capture them with an overload,
-- including the operators that CASE, IN and others use implicitly.
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE FUNCTION @extschema@.idem_monitoring_data(
	OUT source text, OUT counted bigint, OUT due bigint, OUT overdue double precision,
	OUT complete boolean, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 6
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_monitoring_data() IS
'Expired records and undelivered messages, counted through their indexes, for idem_metric_samples and idem_health. overdue: of the oldest, in seconds; NULL if dead rows hide it. complete: whether all were counted. fault: why the table could not be read.';

CREATE FUNCTION @extschema@.idem_sample_data(source text,
	OUT share double precision, OUT live_share double precision, OUT stuck bigint,
	OUT stuck_pages bigint, OUT newest timestamptz, OUT highest_token bigint, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE COST 10000 ROWS 1
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_sample_data(text) IS
'Estimates from a sample of the table of keys or tokens, for idem_metric_samples and idem_health. share: the part of the table that was read. live_share: the part of the rows that has not expired. stuck: number of abandoned claims, on stuck_pages pages. newest: time of the latest claim. highest_token: the highest claim token. fault: why the table could not be read.';

CREATE FUNCTION @extschema@.idem_clock_evidence(
	OUT name text, OUT latest timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 3
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_clock_evidence() IS
'The latest recorded times, for the clock check of idem_health.';

CREATE FUNCTION @extschema@.idem_table_faults(
	OUT table_name text, OUT fault text)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000 ROWS 9
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_table_faults() IS
'The tables and sequences, for idem_metric_samples and idem_health. fault: why calls cannot use it, because it was altered or is locked; NULL if they can.';

CREATE FUNCTION @extschema@.idem_table_stats(
	OUT table_name text, OUT live_rows bigint, OUT dead_rows bigint, OUT dead_bytes bigint)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000 ROWS 7
BEGIN ATOMIC
	-- The size of a locked table cannot be read, so the pages are those of the
	-- last vacuum. They can be out of date, or empty; a row has 100 bytes to 2 kB
	-- in the table itself. A standby, and a server after a crash, have only the
	-- statistics in the catalog.
	SELECT t.table_name, t.live_rows, t.dead_rows,
		greatest(t.dead_rows * 100::int8, least(t.dead_rows * 2048::int8,
			(t.pages * current_setting('block_size')::float8 * t.dead_rows::float8 /
				greatest(t.dead_rows + t.live_rows, 1::int8)::float8)::int8))
	FROM (
		SELECT c.relname::text AS table_name,
			CASE WHEN pg_stat_get_live_tuples(c.oid) = 0::int8
					AND pg_stat_get_tuples_inserted(c.oid) = 0::int8
				THEN greatest(c.reltuples, 0::float4)::int8
				ELSE pg_stat_get_live_tuples(c.oid)
			END AS live_rows,
			pg_stat_get_dead_tuples(c.oid) AS dead_rows,
			c.relpages::float8 AS pages
		FROM pg_extension AS e
		JOIN pg_depend AS d
			ON d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
			AND d.refobjid = e.oid
			AND d.classid = 'pg_catalog.pg_class'::regclass::oid
		JOIN pg_class AS c ON c.oid = d.objid
		WHERE e.extname = 'idempotency'::name
			AND c.relnamespace = e.extnamespace
			AND c.relkind = 'r'::"char"
	) AS t;
END;
COMMENT ON FUNCTION @extschema@.idem_table_stats() IS
'Estimated rows of the extension''s tables, for idem_metric_samples and idem_health. dead_bytes: without values that are stored out of line.';

CREATE FUNCTION @extschema@.idem_outbox_blocked(max_lanes int DEFAULT 100,
	OUT topic text, OUT first_id bigint, OUT blocked_since timestamptz, OUT waiting bigint,
	OUT reason text, OUT until timestamptz, OUT pid int)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_blocked(int) IS
'Due messages that no relay can take, the longest wait first: a row for each topic and message key, without the key; for held messages without a key, a row for each topic and transaction. max_lanes: the maximum number of rows. first_id: the message that blocks the others. blocked_since: when the first waiting message became due. waiting: number of due messages behind first_id. reason: leased, paused (nacked or delayed), held (a transaction writes or locks the message), or lost (no relay finds it; idem_repair_outbox() repairs that). until: when the lease or pause ends. pid: the process of the transaction; NULL if it is prepared. If there are more than 5000 keys, it examines a random sample, and those that are probably blocked for longer than most. Reads only; works on a hot standby. Raises 22023 for a negative max_lanes.';

CREATE FUNCTION @extschema@.idem_blocked_seconds(blocked_since timestamptz, until timestamptz)
RETURNS double precision
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 100
BEGIN ATOMIC
	SELECT CASE WHEN isfinite($1) AND isfinite(coalesce($2, $1))
		THEN EXTRACT(epoch FROM greatest($2, clock_timestamp()) - $1)::float8
		ELSE 'Infinity'::float8 END;
END;
COMMENT ON FUNCTION @extschema@.idem_blocked_seconds(timestamptz, timestamptz) IS
'How long a message waits: from the time it became due to the end of the lease or pause of the one before it, or to now. For idem_metric_samples and idem_health.';

CREATE FUNCTION @extschema@.idem_metric_families(
	OUT ordinal int, OUT name text, OUT type text, OUT unit text, OUT help text)
RETURNS SETOF record
LANGUAGE sql IMMUTABLE PARALLEL SAFE COST 100 ROWS 25
BEGIN ATOMIC
	SELECT v.ordinal, 'idempotency_' || v.name, v.type, v.unit, v.help
	FROM (VALUES
		(1, 'claims', 'counter', NULL, 'Calls of idem_claim and idem_run, by outcome.'),
		(2, 'takeovers', 'counter', NULL, 'Claims of failed or abandoned keys; also counted as claims, outcome new.'),
		(3, 'completions', 'counter', NULL, 'Completed requests.'),
		(4, 'failures', 'counter', NULL, 'Failed requests.'),
		(5, 'rate_limited', 'counter', NULL, 'Claims that were refused because their scope had reached its limit of new keys.'),
		(6, 'advances', 'counter', NULL, 'Calls for user actions, by outcome.'),
		(7, 'appends', 'counter', NULL, 'Calls of idem_try_append, by outcome.'),
		(8, 'once', 'counter', NULL, 'Once-only tokens, by outcome.'),
		(9, 'messages_published', 'counter', NULL, 'Published messages.'),
		(10, 'messages_taken', 'counter', NULL, 'Messages that relays have taken.'),
		(11, 'messages_acked', 'counter', NULL, 'Acknowledged messages.'),
		(12, 'messages_nacked', 'counter', NULL, 'Refused messages.'),
		(13, 'messages_dead', 'counter', NULL, 'Messages that have used up their attempts.'),
		(14, 'rows_deleted', 'counter', NULL, 'Rows that the cleanup has deleted.'),
		(15, 'cleanup_passes', 'counter', NULL, 'Finished cleanups.'),
		(16, 'stats_reset_timestamp_seconds', 'gauge', 'seconds', 'When the counters were reset.'),
		(17, 'last_cleanup_timestamp_seconds', 'gauge', 'seconds', 'When the last cleanup ended.'),
		(18, 'cleanup_lag_seconds', 'gauge', 'seconds', 'How long the oldest expired row has been due for deletion.'),
		(19, 'records', 'gauge', NULL, 'Records of keys and tokens, by state. live is estimated; expired is estimated if there are too many to count.'),
		(20, 'outbox_messages', 'gauge', NULL, 'Unacknowledged messages, by state. due: available, or behind a message with the same key; waiting: leased, pausing or delayed. At most 50000 are counted, or fewer if dead rows hide some; dead is missing if they hide all.'),
		(21, 'outbox_oldest_age_seconds', 'gauge', 'seconds', 'How long the oldest undelivered message has been due, of the messages counted. Missing if dead rows hide them.'),
		(22, 'outbox_blocked_keys', 'gauge', NULL, 'Keys with due messages that no relay can take, because the first one is leased, paused, held by a transaction, or lost (state). Held messages without a key count once for each topic and transaction. If there are more than 5000 keys, a sample is examined.'),
		(23, 'outbox_blocked_seconds', 'gauge', 'seconds', 'The longest time that a due message waits for another one of its key, or for a transaction that holds it: from the time it became due to the end of the other''s lease or pause, or to now. 0 if no message is blocked.'),
		(24, 'table_unusable', 'gauge', NULL, '1 if calls cannot use a table or sequence, because it was altered or is locked. Metrics that depend on it are missing.'),
		(25, 'build', 'info', NULL, 'Version of the extension and of the server.')
	) AS v (ordinal, name, type, unit, help);
END;
COMMENT ON FUNCTION @extschema@.idem_metric_families() IS
'The families of metrics, for idem_metric_samples and idem_metrics. The names of a counter''s samples end in _total, those of an info in _info.';

CREATE FUNCTION @extschema@.idem_metric_samples(
	OUT name text, OUT labels jsonb, OUT value double precision, OUT type text, OUT help text)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 50
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH stats AS (
		SELECT s.*
		FROM @extschema@.idem_stats_data() AS s
		JOIN pg_database AS d ON d.oid = s.datid
		WHERE d.datname = current_database()
	),
	data AS MATERIALIZED (
		SELECT d.source, sum(d.counted) AS counted, sum(d.due) AS due,
			max(d.overdue) AS overdue, bool_and(d.complete) AS complete,
			min(d.fault) AS fault
		FROM @extschema@.idem_monitoring_data() AS d
		GROUP BY d.source
	),
	counters (n, stat, family, label) AS (VALUES
		(1, 'claims_new', 'claims', '{"outcome": "new"}'),
		(2, 'claims_replay', 'claims', '{"outcome": "replay"}'),
		(3, 'claims_erased', 'claims', '{"outcome": "erased"}'),
		(4, 'claims_in_progress', 'claims', '{"outcome": "in_progress"}'),
		(5, 'claims_hash_conflict', 'claims', '{"outcome": "hash_conflict"}'),
		(6, 'claims_expired', 'claims', '{"outcome": "expired"}'),
		(1, 'takeovers', 'takeovers', NULL),
		(1, 'completions', 'completions', NULL),
		(1, 'failures', 'failures', NULL),
		(1, 'rate_limited', 'rate_limited', NULL),
		(1, 'advances', 'advances', '{"outcome": "advanced"}'),
		(2, 'advances_stale', 'advances', '{"outcome": "stale"}'),
		(1, 'appends_appended', 'appends', '{"outcome": "appended"}'),
		(2, 'appends_duplicate', 'appends', '{"outcome": "duplicate"}'),
		(3, 'appends_overlap', 'appends', '{"outcome": "overlap"}'),
		(4, 'appends_gap', 'appends', '{"outcome": "gap"}'),
		(5, 'appends_in_flight', 'appends', '{"outcome": "in_flight"}'),
		(6, 'appends_version_conflict', 'appends', '{"outcome": "version_conflict"}'),
		(1, 'once_first', 'once', '{"outcome": "first"}'),
		(2, 'once_seen', 'once', '{"outcome": "seen"}'),
		(1, 'messages_published', 'messages_published', NULL),
		(1, 'messages_taken', 'messages_taken', NULL),
		(1, 'messages_acked', 'messages_acked', NULL),
		(1, 'messages_nacked', 'messages_nacked', NULL),
		(1, 'messages_dead', 'messages_dead', NULL),
		(1, 'keys_deleted', 'rows_deleted', '{"table": "idem_keys"}'),
		(2, 'tokens_deleted', 'rows_deleted', '{"table": "idem_tokens"}'),
		(3, 'messages_deleted', 'rows_deleted', '{"table": "idem_outbox"}'),
		(1, 'cleanup_passes', 'cleanup_passes', NULL)
	),
	cleaned (n, source, table_name) AS (VALUES
		(1, 'keys', 'idem_keys'), (2, 'tokens', 'idem_tokens'), (3, 'acked', 'idem_outbox')
	),
	records AS (
		SELECT c.n, c.table_name,
			CASE WHEN d.complete THEN greatest(r.live_rows - d.counted, 0::"numeric")
				ELSE round(r.live_rows * r.live_share) END AS live,
			CASE WHEN d.complete THEN d.counted
				ELSE greatest(d.counted, round(r.live_rows *
					(1::"numeric" - r.live_share))) END AS expired
		FROM cleaned AS c
		JOIN data AS d ON d.source = c.source
		JOIN @extschema@.idem_table_stats() AS t ON t.table_name = c.table_name
		LEFT JOIN LATERAL @extschema@.idem_sample_data(CASE WHEN NOT d.complete THEN c.source END) AS s ON true
		CROSS JOIN LATERAL (SELECT t.live_rows::"numeric" AS live_rows,
			coalesce(s.live_share, 0::float8)::"numeric" AS live_share) AS r
		WHERE c.source <> 'acked' AND d.fault IS NULL
	),
	blocked AS MATERIALIZED (
		SELECT b.reason, @extschema@.idem_blocked_seconds(b.blocked_since, b.until) AS seconds
		FROM data AS d
		CROSS JOIN LATERAL @extschema@.idem_outbox_blocked(CASE WHEN d.fault IS NULL THEN 5000 ELSE 0 END) AS b
		WHERE d.source = 'pending'
	),
	samples (n, family, suffix, label, value) AS (
		SELECT c.n, c.family, '_total', c.label::jsonb, v.value::float8
		FROM counters AS c
		JOIN (
			SELECT e.key, e.value
			FROM stats AS s
			CROSS JOIN LATERAL jsonb_each_text(to_jsonb(s)) AS e
		) AS v ON v.key = c.stat
		UNION ALL
		SELECT 1, 'stats_reset_timestamp_seconds', '', NULL, EXTRACT(epoch FROM s.stats_reset)::float8
		FROM stats AS s
		UNION ALL
		SELECT 1, 'last_cleanup_timestamp_seconds', '', NULL, EXTRACT(epoch FROM s.last_cleanup)::float8
		FROM stats AS s
		WHERE s.last_cleanup IS NOT NULL
		UNION ALL
		SELECT c.n, 'cleanup_lag_seconds', '', jsonb_build_object('table', c.table_name), d.overdue
		FROM cleaned AS c
		JOIN data AS d ON d.source = c.source
		WHERE d.fault IS NULL
		UNION ALL
		SELECT 2 * r.n + v.n, 'records', '',
			jsonb_build_object('table', r.table_name, 'state', v.state), v.value::float8
		FROM records AS r
		CROSS JOIN LATERAL (VALUES (1, 'live', r.live), (2, 'expired', r.expired)) AS v (n, state, value)
		UNION ALL
		SELECT s.n, 'outbox_messages', '', jsonb_build_object('state', s.state),
			CASE WHEN s.state = 'due' THEN d.due
				WHEN s.state = 'waiting' THEN d.counted - d.due
				ELSE d.counted END::float8
		FROM data AS d
		JOIN (VALUES (1, 'pending', 'due'), (2, 'pending', 'waiting'), (3, 'dead', 'dead')) AS s (n, source, state)
			ON s.source = d.source
		WHERE d.fault IS NULL AND (d.complete OR d.counted > 0::"numeric" OR d.source <> 'dead')
		UNION ALL
		SELECT 1, 'outbox_oldest_age_seconds', '', NULL, d.overdue
		FROM data AS d
		WHERE d.source = 'pending' AND d.overdue IS NOT NULL
		UNION ALL
		SELECT r.n, 'outbox_blocked_keys', '', jsonb_build_object('state', r.reason),
			(SELECT count(*) FROM blocked AS b WHERE b.reason = r.reason)::float8
		FROM data AS d
		CROSS JOIN (VALUES (1, 'leased'), (2, 'paused'), (3, 'held'), (4, 'lost')) AS r (n, reason)
		WHERE d.source = 'pending' AND d.fault IS NULL
		UNION ALL
		SELECT 1, 'outbox_blocked_seconds', '', NULL,
			coalesce((SELECT max(b.seconds) FROM blocked AS b), 0::float8)
		FROM data AS d
		WHERE d.source = 'pending' AND d.fault IS NULL
		UNION ALL
		SELECT row_number() OVER ()::int4, 'table_unusable', '',
			jsonb_build_object('table', f.table_name),
			CASE WHEN f.fault IS NULL THEN 0 ELSE 1 END::float8
		FROM @extschema@.idem_table_faults() AS f
		UNION ALL
		SELECT 1, 'build', '_info', jsonb_build_object('version', e.extversion,
			'server_version', current_setting('server_version')), 1::float8
		FROM pg_extension AS e
		WHERE e.extname = 'idempotency'::name
	)
	SELECT f.name || s.suffix,
		jsonb_build_object('datname', current_database())
			|| coalesce(s.label, '{}'::jsonb),
		s.value, f.type, f.help
	FROM samples AS s
	JOIN @extschema@.idem_metric_families() AS f
		ON f.name = ('idempotency_' || s.family)
	-- The portable edition counts no calls.
	WHERE s.value IS NOT NULL
	ORDER BY f.ordinal, s.n;
END;
COMMENT ON FUNCTION @extschema@.idem_metric_samples() IS
'Metrics of this database, one row for each sample: the counters of idem_stats, live and expired records, outbox depth and age, cleanup lag, tables that were altered or are locked. type: counter, gauge or info. It can be called every few seconds: it reads a bounded part of a few indexes, and no table completely. Reads only; works on a hot standby.';

CREATE FUNCTION @extschema@.idem_metrics()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH samples AS MATERIALIZED (
		SELECT s.*
		FROM @extschema@.idem_metric_samples() WITH ORDINALITY AS s (name, labels, value, type, help, ordinal)
	),
	lines (ordinal, name, text) AS (
		SELECT s.ordinal, s.name, format(E'%s{%s} %s\n', s.name,
			-- datname first, then table before state, and version before server_version.
			(SELECT string_agg(format('%s="%s"', l.key,
					replace(replace(replace(
						l.value, E'\\', E'\\\\'), '"', E'\\"'), E'\n', E'\\n')), ','
					ORDER BY l.key = 'datname' DESC, l.key COLLATE "C" DESC)
				FROM jsonb_each_text(s.labels) AS l),
			replace(s.value::text, 'Infinity', '+Inf'))
		FROM samples AS s
	)
	SELECT string_agg(format(E'# TYPE %1$s %2$s\n%3$s# HELP %1$s %4$s\n%5$s',
			f.name, f.type,
			CASE WHEN f.unit IS NOT NULL THEN format(E'# UNIT %s %s\n', f.name, f.unit) END,
			f.help,
			(SELECT string_agg(l.text, '' ORDER BY l.ordinal)
				FROM lines AS l
				WHERE l.name = (f.name ||
					CASE WHEN f.type = 'counter' THEN '_total'
						WHEN f.type = 'info' THEN '_info' ELSE '' END))),
		'' ORDER BY f.ordinal)
		|| '# EOF'
	FROM @extschema@.idem_metric_families() AS f;
END;
COMMENT ON FUNCTION @extschema@.idem_metrics() IS
'The result of idem_metric_samples as OpenMetrics 1.0 text.';

CREATE FUNCTION @extschema@.idem_worker_absence()
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_worker_absence() IS
'Why no background worker cleans this database, for idem_health; NULL if one should.';

-- Returns the oldest session, prepared transaction or replication slot that keeps
-- vacuum from removing dead rows here. A session that began to read while an
-- older transaction was open holds back vacuum as much as that transaction, but
-- it is not the cause, so owners of a transaction come first. Holders younger than
-- a minute, or than 10000 transactions if no time is known, do not count.
CREATE FUNCTION @extschema@.idem_vacuum_holder()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000
BEGIN ATOMIC
	SELECT format('vacuum is held back by %s, for %s transactions%s', h.holder, h.age,
		', ' ||
			date_trunc('second', clock_timestamp() - h.since)::text)
	FROM (
		SELECT CASE WHEN a.xact_start IS NULL THEN format('session %s (%s)', a.pid, a.backend_type)
				ELSE format('the transaction of session %s', a.pid) END AS holder,
			greatest(age(a.backend_xid), age(a.backend_xmin)) AS age, a.xact_start AS since,
			-- A session whose own transaction is the oldest comes before those that began later.
			CASE WHEN age(a.backend_xid) >= coalesce(age(a.backend_xmin), 0) THEN 2 ELSE 3 END AS rank
		FROM pg_stat_activity AS a
		WHERE (a.datname IS NULL OR a.datname = current_database())
			-- Vacuums do not hold back other vacuums.
			AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS v
				WHERE v.pid = a.pid)
		UNION ALL
		SELECT format('prepared transaction "%s"', p.gid), age(p.transaction), p.prepared, 1
		FROM pg_prepared_xacts AS p
		WHERE p.database = current_database()
		UNION ALL
		SELECT format('replication slot "%s"', s.slot_name), age(s.xmin), NULL, 4
		FROM pg_replication_slots AS s
	) AS h
	WHERE h.age IS NOT NULL
		AND CASE WHEN h.since IS NULL THEN h.age >= 10000
			ELSE h.since <
				(clock_timestamp() - '1 minute'::"interval") END
	ORDER BY h.age DESC, h.rank, h.since
	LIMIT 1;
END;
COMMENT ON FUNCTION @extschema@.idem_vacuum_holder() IS
'The session, prepared transaction or replication slot that keeps vacuum from removing dead rows of this database, for idem_health.';

CREATE FUNCTION @extschema@.idem_unvacuumed_tables()
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE COST 10000
BEGIN ATOMIC
	SELECT CASE WHEN NOT current_setting('autovacuum')::bool THEN 'autovacuum is off'
			WHEN count(*) > 0::int8 THEN format('autovacuum is off for %s',
				string_agg(c.relname::text, ', '::text ORDER BY c.relname)) END
	FROM pg_extension AS e
	JOIN pg_depend AS d
		ON d.refclassid = 'pg_catalog.pg_extension'::regclass::oid
		AND d.refobjid = e.oid
		AND d.classid = 'pg_catalog.pg_class'::regclass::oid
	JOIN pg_class AS c ON c.oid = d.objid
	CROSS JOIN LATERAL pg_options_to_table(c.reloptions) AS o
	WHERE e.extname = 'idempotency'::name
		AND c.relnamespace = e.extnamespace
		AND c.relkind = 'r'::"char"
		AND o.option_name = 'autovacuum_enabled'
		AND NOT o.option_value::bool;
END;
COMMENT ON FUNCTION @extschema@.idem_unvacuumed_tables() IS
'The tables of the extension for which autovacuum is off, for idem_health; NULL if there are none.';

CREATE FUNCTION @extschema@.idem_sequences_behind(highest_token bigint,
	OUT name text, OUT behind bigint)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_sequences_behind(bigint) IS
'The sequences that would repeat numbers, because the last one is below the highest message id, or below this claim token, and by how much. For idem_health.';

-- idem_health() runs this with the rights of the tables' owner. So it reads a
-- table of this name only if a superuser has created it.
CREATE FUNCTION @extschema@.idem_unfinished_moves(
	OUT moves bigint, OUT seconds double precision, OUT detail text)
RETURNS SETOF record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF EXISTS (SELECT FROM pg_class AS c
			JOIN pg_namespace AS n ON n.oid = c.relnamespace
			JOIN pg_roles AS c_owner ON c_owner.oid = c.relowner
			JOIN pg_roles AS n_owner ON n_owner.oid = n.nspowner
			WHERE n.nspname = 'idem_guard' AND c.relname = 'places' AND c.relkind = 'r'
				AND c_owner.rolsuper AND n_owner.rolsuper AND NOT c.relrowsecurity
				AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')) THEN
		RETURN QUERY EXECUTE '
			SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - p.since)), 0)::float8,
				(array_agg(format(''%s is %s'', CASE p.scope WHEN '''' THEN ''slot '' || p.slot
					ELSE ''a scope of slot '' || p.slot END, p.state) ORDER BY p.since))[1]
			FROM idem_guard.places AS p WHERE p.state IN (''leaving'', ''arriving'')';
	END IF;
END
$$;
COMMENT ON FUNCTION @extschema@.idem_unfinished_moves() IS
'On a shard: unfinished moves of slots and scopes, for idem_health. seconds: how long the oldest is in its state. No row in other databases.';

CREATE FUNCTION @extschema@.idem_health(
	OUT check_name text, OUT status text, OUT value double precision,
	OUT threshold double precision, OUT detail text)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 10
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	-- The settings are defined when the C functions below load the library, before this runs.
	WITH settings AS MATERIALIZED (
		SELECT s.name,
			CASE WHEN s.unit = 'ms'
				THEN s.setting::float8 / 1000::float8
				ELSE s.setting::float8 END AS value
		FROM pg_settings AS s
		WHERE starts_with(s.name, 'idempotency.health_')
			OR s.name = 'idempotency.cleanup_interval'
	),
	here AS MATERIALIZED (
		SELECT pg_is_in_recovery() AS is_standby,
			a.absence AS worker_absence,
			@extschema@.idem_cleanup_idle() AS idle,
			(SELECT s.value FROM settings AS s
				WHERE s.name = 'idempotency.cleanup_interval') AS cleanup_interval,
			s.last_cleanup, s.stats_reset
		FROM (SELECT @extschema@.idem_worker_absence() AS absence OFFSET 0) AS a
		-- No row if there is no space for the statistics.
		LEFT JOIN (
			SELECT s.last_cleanup, s.stats_reset
			FROM @extschema@.idem_stats_data() AS s
			JOIN pg_database AS d ON d.oid = s.datid
			WHERE d.datname = current_database()
		) AS s ON true
	),
	data AS MATERIALIZED (
		SELECT d.source, sum(d.counted)::float8 AS counted,
			max(d.overdue) AS overdue, bool_and(d.complete) AS complete,
			min(d.fault) AS fault
		FROM @extschema@.idem_monitoring_data() AS d
		GROUP BY d.source
	),
	tables AS MATERIALIZED (
		SELECT t.* FROM @extschema@.idem_table_stats() AS t
	),
	-- Why dead rows can stay.
	vacuum AS MATERIALIZED (
		SELECT CASE WHEN NOT h.is_standby THEN @extschema@.idem_unvacuumed_tables() END AS missing,
			@extschema@.idem_vacuum_holder() AS holder
		FROM here AS h
	),
	sample AS MATERIALIZED (
		SELECT s.* FROM @extschema@.idem_sample_data('keys') AS s
	),
	evidence AS MATERIALIZED (
		SELECT v.name, v.time
		FROM (
			SELECT c.name, c.latest
			FROM @extschema@.idem_clock_evidence() AS c
			UNION ALL
			SELECT 'the last reset of the statistics', h.stats_reset
			FROM here AS h
			UNION ALL
			SELECT 'the start of the server', pg_postmaster_start_time()
			UNION ALL
			SELECT 'the last transaction replayed', pg_last_xact_replay_timestamp()
			UNION ALL
			SELECT 'a claim', s.newest
			FROM sample AS s
		) AS v (name, time)
		WHERE v.time IS NOT NULL
		ORDER BY v.time DESC
		LIMIT 1
	),
	faults AS MATERIALIZED (
		SELECT count(*)::float8 AS faults,
			string_agg(f.fault, '; ' ORDER BY f.table_name) AS fault
		FROM @extschema@.idem_table_faults() AS f
		WHERE f.fault IS NOT NULL
	),
	-- The longest wait first; "state" is a clause.
	blocked AS MATERIALIZED (
		SELECT b.first_id, b.topic, b.reason, s.seconds,
			CASE WHEN b.reason = 'lost' THEN 'found by no relay: call idem_repair_outbox()'
				WHEN b.reason = 'held' AND b.pid IS NULL THEN 'held by a prepared transaction'
				WHEN b.reason = 'held' THEN 'held by process ' || b.pid
				ELSE format('%s until %s', b.reason, b.until) END AS state,
			count(*) OVER () AS rows, b.n,
			row_number() OVER (PARTITION BY b.reason = ANY (ARRAY['held', 'lost']) ORDER BY b.n) AS n_of_kind
		FROM data AS d
		CROSS JOIN LATERAL @extschema@.idem_outbox_blocked(CASE WHEN d.fault IS NULL THEN 5000 ELSE 0 END)
			WITH ORDINALITY AS b (topic, first_id, blocked_since, waiting, reason, until, pid, n)
		CROSS JOIN LATERAL (SELECT @extschema@.idem_blocked_seconds(b.blocked_since, b.until) AS seconds) AS s
		WHERE d.source = 'pending'
	),
	-- "fault": why the value of a check can be incomplete.
	checks (n, name, value, factor, fault, hint) AS (
		SELECT 1, 'worker',
			CASE WHEN NOT h.is_standby AND h.stats_reset IS NOT NULL THEN h.idle END,
			CASE WHEN h.worker_absence IS NULL AND h.stats_reset IS NOT NULL THEN 5 END, NULL,
			concat_ws('; ',
				CASE WHEN h.last_cleanup IS NOT NULL THEN 'since the last cleanup ended'
					WHEN h.stats_reset IS NOT NULL THEN 'no cleanup has ended yet' END,
				'not judged, because ' || coalesce(
					'no worker visits this database: ' || h.worker_absence,
					CASE WHEN h.stats_reset IS NULL THEN 'there is no space for the statistics of this database' END))
		FROM here AS h
		UNION ALL
		SELECT 2, 'cleanup_lag', d.overdue, 5,
			(SELECT string_agg(DISTINCT f.fault, '; ') FROM data AS f
				WHERE f.source = ANY (ARRAY['keys', 'tokens', 'acked'])),
			CASE WHEN d.overdue > 0::float8
				THEN format('the oldest expired %s is not deleted yet%s',
					CASE WHEN d.source = 'acked' THEN 'message'
						WHEN d.source = 'keys' THEN 'key' ELSE 'token' END,
					CASE WHEN NOT d.complete THEN ', estimated' END)
				ELSE 'no expired row is left' END
		FROM (SELECT d.* FROM data AS d
			WHERE d.source = ANY (ARRAY['keys', 'tokens', 'acked'])
			ORDER BY d.overdue DESC NULLS LAST, d.source LIMIT 1) AS d
		UNION ALL
		SELECT 3, 'outbox_oldest', d.overdue, 5, d.fault,
			CASE WHEN d.overdue > 0::float8
				THEN concat_ws('; ', format('since a message became due; undelivered: %s%s', d.counted,
						CASE WHEN NOT d.complete THEN ' or more' END),
					(SELECT format('message %s, topic "%s", is %s', b.first_id, b.topic, b.state)
						FROM blocked AS b WHERE b.n_of_kind = 1::int8 AND b.reason = ANY (ARRAY['held', 'lost'])))
				WHEN d.overdue IS NULL THEN concat_ws('; ',
					'not known, because vacuum could not remove the dead rows of taken messages',
					@extschema@.idem_vacuum_holder())
				ELSE 'no message is due' END
		FROM data AS d
		WHERE d.source = 'pending'
		UNION ALL
		SELECT 4, 'outbox_blocked', CASE WHEN d.fault IS NULL THEN coalesce(b.seconds, 0::float8) END, 5, d.fault,
			CASE WHEN b.rows > 0::int8
				THEN format('due messages wait, see idem_outbox_blocked() (%s); the longest for message %s, topic "%s", which is %s',
					CASE WHEN b.rows = 1::int8 THEN '1 row' ELSE b.rows || ' rows' END, b.first_id, b.topic, b.state)
				ELSE 'no due message waits for another one of its key, or for a transaction' END
		FROM data AS d
		LEFT JOIN blocked AS b ON b.n = 1::int8
		WHERE d.source = 'pending'
		UNION ALL
		SELECT 5, 'dead_letters',
			CASE WHEN d.complete OR d.counted > 0::float8 THEN d.counted END, 5, d.fault,
			concat_ws('; ', 'messages that have no attempts left; idem_outbox_requeue() makes them pending again',
				CASE WHEN d.complete THEN NULL
					WHEN d.counted > 0::float8 THEN 'there are more'
					ELSE 'not known, because vacuum could not remove the dead rows of requeued messages' END)
		FROM data AS d
		WHERE d.source = 'dead'
		UNION ALL
		-- If this is a sample, a probable lower limit: the number of pages with
		-- a stuck lease in a sample varies by twice its square root.
		SELECT 6, 'stuck_leases',
			CASE WHEN s.share = 1::float8 THEN s.stuck::float8
				WHEN s.stuck_pages <= 4::int8 THEN 0::float8
				ELSE round(s.stuck::float8 / s.share *
					(1::float8 -
						(2::float8 / sqrt(s.stuck_pages::float8))))
				END, 5, s.fault,
			concat_ws('; ', 'claims whose lease expired more than a minute ago, see idem_abandoned()',
				CASE WHEN s.share < 1::float8 THEN
					format('estimated lower limit: %s were found in %s %% of the table', s.stuck,
						round((100::float8 * s.share)::"numeric", 2)) END)
		FROM sample AS s
		UNION ALL
		-- Autovacuum soon removes a few dead rows, unless something prevents it.
		SELECT 7, 'bloat', CASE WHEN NOT h.is_standby THEN coalesce(t.share, 0::float8) END, 5, NULL,
			concat_ws('; ',
				CASE WHEN h.is_standby THEN 'not known on a standby'
					WHEN t.table_name IS NOT NULL THEN format('%s has %s dead and %s live rows', t.table_name, t.dead_rows, t.live_rows)
					WHEN v.missing IS NULL AND v.holder IS NULL THEN 'no table has 16 MB of dead rows'
					ELSE 'no table has 1000 dead rows' END,
				v.missing, v.holder)
		FROM here AS h
		CROSS JOIN vacuum AS v
		LEFT JOIN LATERAL (
			SELECT t.table_name, t.dead_rows, t.live_rows,
				t.dead_rows::float8 /
					(t.dead_rows + t.live_rows)::float8 AS share
			FROM tables AS t
			WHERE t.dead_rows >= 1000::int8
				AND (t.dead_bytes >= 16777216::int8 OR v.missing IS NOT NULL OR v.holder IS NOT NULL)
			ORDER BY 4 DESC LIMIT 1) AS t ON true
		UNION ALL
		SELECT 8, 'clock',
			greatest(EXTRACT(epoch FROM e.time - e.clock), 0::"numeric")::float8, 5, NULL,
			CASE WHEN e.time > e.clock
				THEN e.name || ' is in the future: the clock was set back, or another server''s is ahead; messages wait until then, and block their keys'
				ELSE 'no recorded time is in the future' END
		-- The clock is read after the evidence.
		FROM (SELECT e.*, clock_timestamp() AS clock FROM evidence AS e) AS e
		UNION ALL
		SELECT 9, 'tables', f.faults, 1, NULL,
			coalesce(f.fault || '; calls that need it fail or wait', 'all tables and sequences can be used')
		FROM faults AS f
		UNION ALL
		SELECT 10, 'sequences', coalesce(max(b.behind), 0::int8)::float8, 1, s.fault,
			coalesce(string_agg(format('sequence %s is %s behind its table', b.name, b.behind), '; '::text ORDER BY b.name)
					FILTER (WHERE b.name IS NOT NULL) || '; idem_raise_claim_tokens() raises it',
				'no sequence is behind its table')
		FROM sample AS s
		LEFT JOIN LATERAL @extschema@.idem_sequences_behind(s.highest_token) AS b ON true
		GROUP BY s.fault
		UNION ALL
		SELECT 11, 'moves', m.seconds, 5, NULL,
			CASE WHEN m.moves > 0::int8
				THEN format('unfinished moves: %s; %s; run scale-out/move again, or with --back', m.moves, m.detail)
				ELSE 'no slot and no scope is being moved' END
		FROM @extschema@.idem_unfinished_moves() AS m
	),
	judged AS (
		SELECT c.n, c.name, c.value, c.fault, t.threshold,
			concat_ws('; ',
				CASE WHEN t.threshold = 0::float8 THEN 'switched off' END,
				'incomplete: ' || c.fault,
				CASE WHEN c.fault IS NULL OR c.value IS NOT NULL THEN c.hint END) AS detail,
			-- For a share, the multiple applies to the ratio of dead to live rows.
			CASE WHEN c.name = 'bloat'
				THEN c.factor::float8 * t.threshold /
					(1::float8 +
						((c.factor - 1)::float8 * t.threshold))
				ELSE c.factor::float8 * t.threshold
			END AS critical
		FROM checks AS c
		JOIN settings AS s ON s.name = ('idempotency.health_' || c.name)
		CROSS JOIN here AS h
		-- A cleanup is not late before two intervals have passed.
		CROSS JOIN LATERAL (SELECT
			CASE WHEN c.n <= 2 AND s.value > 0::float8
				THEN greatest(s.value, 2::float8 * h.cleanup_interval)
				ELSE s.value END AS threshold) AS t
	)
	SELECT r.name, r.status, r.value, r.threshold, r.detail
	FROM (
		SELECT j.n, j.name,
			CASE WHEN j.threshold = 0::float8 THEN 'ok'
				WHEN j.fault IS NOT NULL OR j.value >= j.critical THEN 'critical'
				WHEN j.value >= j.threshold AND j.critical IS NOT NULL THEN 'warning'
				WHEN j.value IS NULL AND j.name IN ('outbox_oldest', 'dead_letters') THEN 'warning'
				ELSE 'ok' END AS status,
			j.value, j.threshold, j.detail
		FROM judged AS j
		UNION ALL
		-- The language of the functions decides, not the script.
		SELECT 12, 'edition', 'ok', NULL, NULL, CASE l.lanname WHEN 'c'::name THEN 'C' ELSE 'portable' END
		FROM pg_extension AS e
		JOIN pg_proc AS p ON p.pronamespace = e.extnamespace AND p.proname = 'idem_claim'::name
		JOIN pg_language AS l ON l.oid = p.prolang
		WHERE e.extname = 'idempotency'::name
	) AS r
	ORDER BY r.n;
END;
COMMENT ON FUNCTION @extschema@.idem_health() IS
'Health of this database, one row for each check: worker, cleanup_lag, outbox_oldest, outbox_blocked, dead_letters, stuck_leases, bloat, clock, tables, sequences, moves (on a shard), and edition, whose detail is C or portable. status: ok; warning from the threshold on, which is setting idempotency.health_<check_name>; critical from five times the threshold on (tables: from the threshold on), and if a table that was altered or is locked hides the value. outbox_oldest, dead_letters: also a warning if too many dead rows hide the value, which is then NULL. Times are in seconds. Its cost is bounded: it reads a sample of a large idem_keys. Reads only; works on a hot standby.';

CREATE FUNCTION @extschema@.idem_redacted_key(key text)
RETURNS text
LANGUAGE c STABLE STRICT PARALLEL SAFE COST 10
AS 'MODULE_PATHNAME', 'idem_redacted_key_text';
COMMENT ON FUNCTION @extschema@.idem_redacted_key(text) IS
'A request key as messages show it: its first four characters and its length.';

CREATE FUNCTION @extschema@.idem_check_interval(value interval, name text)
RETURNS void
LANGUAGE c STABLE PARALLEL SAFE COST 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_check_interval(interval, text) IS
'Raises 22004 for NULL, 22023 for a negative interval. name: its name in the message.';

CREATE FUNCTION @extschema@.idem_abandoned(older_than interval DEFAULT '5 minutes',
	OUT scope text, OUT key text, OUT age interval, OUT attempt int, OUT recovery_point text,
	OUT lease_expires_at timestamptz)
RETURNS SETOF record
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 100000 ROWS 10
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT @extschema@.idem_check_interval(coalesce(older_than, '5 minutes'::"interval"), 'older_than'::text);
	SELECT k.scope, @extschema@.idem_redacted_key(k.key),
		-- A time from a dump can be infinite.
		CASE WHEN isfinite(coalesce(k.lease_expires_at, k.resume_at))
			THEN c.clock - coalesce(k.lease_expires_at, k.resume_at) END,
		k.attempt, k.recovery_point, k.lease_expires_at
	FROM (SELECT clock_timestamp() AS clock,
		current_setting('idempotency.max_attempts')::int4 AS max_attempts OFFSET 0) AS c
	CROSS JOIN @extschema@.idem_keys AS k
	WHERE ((k.state = 'started'
				AND k.lease_expires_at <
					(c.clock - coalesce(older_than, '5 minutes'::"interval")))
			-- idem_resume() does not take these, so they stay as they are.
			OR (k.resume_at <= c.clock AND k.attempt >= c.max_attempts))
		AND k.expires_at > c.clock
	ORDER BY coalesce(k.lease_expires_at, k.resume_at), k.claim_token;
END;
COMMENT ON FUNCTION @extschema@.idem_abandoned(interval) IS
'Abandoned claims, oldest first: claims whose lease expired more than older_than ago (NULL: 5 minutes); and, without that delay, claims that stored a request, have had idempotency.max_attempts attempts, and have failed or whose lease has expired, which idem_resume does not take. Expired records are not shown. age: time since the lease expired or the claim failed. key: its first four characters and its length. recovery_point: the last checkpoint. Reads all of idem_keys. Reads only; works on a hot standby. Raises 22023.';
