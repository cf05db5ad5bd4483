--
-- What the extension is made of: functions, tables, indexes, and nothing else
--
BEGIN;
SET LOCAL client_min_messages = warning;

-- Functions as the design writes them; pg_temp.arguments_of() brings the
-- catalog's spelling into this form.
CREATE TEMP TABLE promised (
	signature text,
	arguments text,
	result text,
	attributes text
);
INSERT INTO promised VALUES
('idem_request_hash(text, text, text)',
	'method text, path text, body text DEFAULT NULL',
	'bytea', 'c immutable called-on-null parallel-safe'),
('idem_request_hash(text, text, jsonb)',
	'method text, path text, body jsonb',
	'bytea', 'c immutable called-on-null parallel-safe'),
('idem_request_hash(text, text, bytea)',
	'method text, path text, body bytea',
	'bytea', 'c immutable called-on-null parallel-safe'),
('idem_canonical_json(jsonb)',
	'document jsonb',
	'text', 'c immutable strict parallel-safe'),
-- Not immutable: the settings decide.
('idem_key_is_valid(text)',
	'key text',
	'boolean', 'c stable called-on-null parallel-safe'),

('idem_claim(text, text, bytea, interval, interval, interval)',
	'scope text, key text, request_hash bytea DEFAULT NULL,
	 ttl interval DEFAULT NULL, lease interval DEFAULT NULL,
	 wait interval DEFAULT NULL',
	'idem_claim_result', 'c volatile called-on-null parallel-unsafe'),
('idem_complete(text, text, int, text, json, bigint)',
	'scope text, key text, response_status int,
	 response_body text DEFAULT NULL, response_headers json DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_complete(text, text, int, bytea, json, bigint)',
	'scope text, key text, response_status int,
	 response_body bytea, response_headers json DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_checkpoint(text, text, text, json, interval, bigint)',
	'scope text, key text, recovery_point text,
	 recovery_state json DEFAULT NULL, lease interval DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'timestamptz', 'c volatile called-on-null parallel-unsafe'),
('idem_heartbeat(text, text, interval, bigint)',
	'scope text, key text, lease interval DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'timestamptz', 'c volatile called-on-null parallel-unsafe'),
('idem_fail(text, text, text, bigint)',
	'scope text, key text, error text DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_release(text, text, bigint)',
	'scope text, key text, claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_lookup(text, text)',
	'scope text, key text',
	'idem_lookup_result', 'c stable called-on-null parallel-safe'),
('idem_forget(text, text)',
	'scope text, key text',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_erase(text, text)',
	'scope text, key text',
	'boolean', 'c volatile called-on-null parallel-unsafe'),
('idem_run(text, text, regprocedure, jsonb, interval, interval)',
	'scope text, key text, handler regprocedure, request jsonb,
	 ttl interval DEFAULT NULL,
	 wait interval DEFAULT ''00:01:00''::interval',
	'idem_run_result', 'c volatile called-on-null parallel-unsafe'),

('idem_try_advance(text, text, text, bigint)',
	'user_id text, entity_type text, entity_id text, action_id bigint',
	'idem_advance_result', 'c volatile called-on-null parallel-unsafe'),
('idem_toggle(text, text, text, text, bigint)',
	'user_id text, entity_type text, entity_id text, action_type text,
	 action_id bigint',
	'idem_action_result', 'c volatile called-on-null parallel-unsafe'),
('idem_set(text, text, text, text, boolean, bigint, text[])',
	'user_id text, entity_type text, entity_id text, action_type text,
	 active boolean, action_id bigint, excludes text[] DEFAULT NULL',
	'idem_action_result', 'c volatile called-on-null parallel-unsafe'),
('idem_is_active(text, text, text, text)',
	'user_id text, entity_type text, entity_id text, action_type text',
	'boolean', 'c stable called-on-null parallel-safe'),

('idem_action_states(text, text, text[])',
	'user_id text, entity_type text, entity_ids text[], OUT entity_id text,
	 OUT action_type text, OUT is_active boolean, OUT last_action_id bigint',
	'SETOF record', 'c stable called-on-null parallel-safe'),
('idem_forget_user(text)',
	'user_id text',
	'bigint', 'c volatile called-on-null parallel-unsafe'),
('idem_raise_claim_tokens(bigint)',
	'at_least bigint',
	'bigint', 'c volatile called-on-null parallel-unsafe'),
('idem_claim_many(text, text[], bytea[], interval, interval)',
	'scope text, keys text[], request_hashes bytea[] DEFAULT NULL,
	 ttl interval DEFAULT NULL, lease interval DEFAULT NULL',
	'SETOF idem_claim_many_result',
	'c volatile called-on-null parallel-unsafe'),
('idem_complete_many(text, text[], int[], text[], json[], bigint[])',
	'scope text, keys text[], response_statuses int[],
	 response_bodies text[] DEFAULT NULL, response_headers json[] DEFAULT NULL,
	 claim_tokens bigint[] DEFAULT NULL',
	'SETOF idem_complete_many_result',
	'c volatile called-on-null parallel-unsafe'),
('idem_try_advance_many(text[], text[], text[], bigint[])',
	'user_ids text[], entity_types text[], entity_ids text[],
	 action_ids bigint[]',
	'SETOF idem_advance_many_result',
	'c volatile called-on-null parallel-unsafe'),
('idem_set_many(text[], text[], text[], text[], boolean[], bigint[])',
	'user_ids text[], entity_types text[], entity_ids text[],
	 action_types text[], actives boolean[], action_ids bigint[]',
	'SETOF idem_set_many_result',
	'c volatile called-on-null parallel-unsafe'),

('idem_cleanup(int)',
	'batch_size int DEFAULT NULL',
	'idem_cleanup_result', 'c volatile called-on-null parallel-unsafe'),
('idem_grant(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_grant_monitor(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_revoke(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_stats_reset()',
	'',
	'void', 'c volatile called-on-null parallel-unsafe'),
('idem_metric_samples()',
	'OUT name text, OUT labels jsonb, OUT value double precision,
	 OUT type text, OUT help text',
	'SETOF record', 'sql volatile called-on-null parallel-unsafe'),
('idem_metrics()',
	'',
	'text', 'sql volatile called-on-null parallel-unsafe'),
('idem_health()',
	'OUT check_name text, OUT status text, OUT value double precision,
	 OUT threshold double precision, OUT detail text',
	'SETOF record', 'sql volatile called-on-null parallel-unsafe'),
('idem_stuck(interval)',
	'older_than interval DEFAULT ''00:05:00''::interval,
	 OUT scope text, OUT key text, OUT age interval, OUT attempt int,
	 OUT recovery_point text, OUT lease_expires_at timestamptz',
	'SETOF record', 'sql volatile called-on-null parallel-unsafe'),
-- Not in the design: what idem_grant and idem_revoke work on, and on whom,
-- what monitoring is made of, and what view idem_stats shows.
('idem_monitoring_data()',
	'OUT source text, OUT counted bigint, OUT due bigint,
	 OUT overdue double precision, OUT complete boolean, OUT fault text',
	'SETOF record', 'c volatile called-on-null parallel-unsafe'),
('idem_metric_families()',
	'OUT ordinal int, OUT name text, OUT type text, OUT unit text,
	 OUT help text',
	'SETOF record', 'sql immutable called-on-null parallel-safe'),
('idem_sample_data(text)',
	'source text, OUT share double precision, OUT live_share double precision,
	 OUT stuck bigint, OUT stuck_pages bigint, OUT newest timestamptz,
	 OUT fault text',
	'SETOF record', 'c volatile strict parallel-unsafe'),
('idem_clock_evidence()',
	'OUT name text, OUT latest timestamptz',
	'SETOF record', 'c volatile called-on-null parallel-unsafe'),
('idem_table_faults()',
	'OUT table_name text, OUT fault text',
	'SETOF record', 'c volatile called-on-null parallel-unsafe'),
('idem_table_stats()',
	'OUT table_name text, OUT live_rows bigint, OUT dead_rows bigint',
	'SETOF record', 'sql volatile called-on-null parallel-unsafe'),
('idem_cleanup_idle()',
	'',
	'double precision', 'c volatile called-on-null parallel-unsafe'),
('idem_worker_absence()',
	'',
	'text', 'c volatile called-on-null parallel-unsafe'),
('idem_vacuum_holder()',
	'',
	'text', 'sql volatile called-on-null parallel-unsafe'),
('idem_redacted_key(text)',
	'key text',
	'text', 'c stable strict parallel-safe'),
('idem_check_interval(interval, text)',
	'value interval, name text',
	'void', 'c stable called-on-null parallel-safe'),
('idem_application_functions()',
	'',
	'SETOF regprocedure', 'sql stable called-on-null parallel-safe'),
('idem_application_types()',
	'',
	'SETOF regtype', 'sql stable called-on-null parallel-safe'),
('idem_monitor_functions()',
	'',
	'SETOF regprocedure', 'sql stable called-on-null parallel-safe'),
('idem_monitor_views()',
	'',
	'SETOF regclass', 'sql stable called-on-null parallel-safe'),
('idem_check_grantee(regrole)',
	'grantee regrole',
	'void', 'plpgsql stable called-on-null parallel-safe'),
('idem_execute_grant(text)',
	'statement text',
	'void', 'c volatile called-on-null parallel-unsafe'),
('idem_grant_as_owner(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_grant_monitor_as_owner(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_revoke_as_owner(regrole)',
	'grantee regrole',
	'void', 'sql volatile called-on-null parallel-unsafe'),
('idem_grantor(aclitem[], oid)',
	'acl aclitem[], owner oid',
	'oid', 'sql stable called-on-null parallel-safe'),
('idem_warn_of_rest(regrole, boolean)',
	'grantee regrole, remaining boolean',
	'void', 'plpgsql stable called-on-null parallel-safe'),
('idem_stats_data()',
	'OUT datid oid,
	 OUT claims_new bigint, OUT claims_replay bigint,
	 OUT claims_erased bigint, OUT claims_in_progress bigint,
	 OUT claims_hash_conflict bigint, OUT claims_expired bigint,
	 OUT takeovers bigint, OUT completions bigint, OUT failures bigint,
	 OUT rate_limited bigint,
	 OUT advances bigint, OUT advances_stale bigint,
	 OUT appends_appended bigint, OUT appends_duplicate bigint,
	 OUT appends_overlap bigint, OUT appends_gap bigint,
	 OUT appends_in_flight bigint, OUT appends_version_conflict bigint,
	 OUT once_first bigint, OUT once_seen bigint,
	 OUT messages_published bigint, OUT messages_taken bigint,
	 OUT messages_acked bigint, OUT messages_nacked bigint,
	 OUT messages_dead bigint,
	 OUT keys_deleted bigint, OUT tokens_deleted bigint,
	 OUT messages_deleted bigint, OUT cleanup_passes bigint,
	 OUT last_cleanup timestamptz, OUT stats_reset timestamptz',
	'SETOF record', 'c volatile called-on-null parallel-unsafe');

-- Those of sequences, once and outbox, which have a test of their own.
CREATE TEMP TABLE others (
	signature text
);
INSERT INTO others VALUES
('idem_try_append(text, text, bigint, int, bigint, boolean, interval)'),
('idem_last_client_seq(text, text)'),
('idem_once(text, text, interval)'),
('idem_once_many(text, text[], interval)'),
('idem_many_support(internal)'),
('idem_publish(text, jsonb, text, jsonb, interval)'),
('idem_publish_many(text[], jsonb[], text[], jsonb[], interval)'),
('idem_outbox_take(int, interval, text[], interval)'),
('idem_outbox_ack(bigint[])'),
('idem_outbox_nack(bigint, text, interval, int)'),
('idem_outbox_requeue(bigint[])'),
('idem_outbox_extend(bigint[], interval, int[])'),
('idem_outbox_give_back(bigint[], int[])');

-- What a handler returns, and what functions do that return one row.
CREATE TEMP TABLE promised_types (
	name name,
	columns text
);
INSERT INTO promised_types VALUES
('idem_response', 'status int, headers json, body text'),
('idem_claim_result',
	'outcome text, claim_token bigint, attempt int, response_status int,
	 response_headers json, response_body text, response_bytes bytea,
	 recovery_point text, recovery_state json,
	 lease_expires_at timestamptz, expires_at timestamptz'),
('idem_lookup_result',
	'state text, attempt int, request_hash bytea, response_status int,
	 response_headers json, response_body text, response_bytes bytea,
	 error text, recovery_point text, recovery_state json,
	 created_at timestamptz, completed_at timestamptz,
	 lease_expires_at timestamptz, expires_at timestamptz'),
('idem_run_result',
	'outcome text, response_status int, response_headers json,
	 response_body text'),
('idem_advance_result', 'should_process boolean, last_action_id bigint'),
('idem_action_result',
	'is_active boolean, last_action_id bigint, processed boolean'),
('idem_append_result',
	'outcome text, last_client_seq bigint, version bigint'),
('idem_claim_many_result',
	'ordinal int, key text, outcome text, claim_token bigint, attempt int,
	 response_status int, response_headers json, response_body text,
	 response_bytes bytea, recovery_point text, recovery_state json,
	 lease_expires_at timestamptz, expires_at timestamptz'),
('idem_complete_many_result', 'ordinal int, key text, completed boolean'),
('idem_advance_many_result',
	'ordinal int, should_process boolean, last_action_id bigint'),
('idem_set_many_result',
	'ordinal int, is_active boolean, last_action_id bigint,
	 processed boolean'),
('idem_cleanup_result',
	'keys_deleted bigint, tokens_deleted bigint, messages_deleted bigint');

-- Tables, as the design's storage chapter and its names of columns have them.
CREATE TEMP TABLE promised_tables (
	name name,
	columns text,
	primary_key name[],
	indexes name[],
	options text
);
INSERT INTO promised_tables VALUES
('idem_keys',
	'claim_token bigint NOT NULL, created_at timestamptz NOT NULL,
	 completed_at timestamptz, lease_expires_at timestamptz,
	 expires_at timestamptz NOT NULL, attempt int NOT NULL,
	 response_status int, state text NOT NULL, scope text NOT NULL,
	 key text NOT NULL, request_hash bytea, response_headers json,
	 response_body text, response_bytes bytea, error text,
	 recovery_point text, recovery_state json',
	'{key,scope}', '{idem_keys_pkey,idem_keys_expires_at}',
	'{fillfactor=95,autovacuum_vacuum_scale_factor=0.05,autovacuum_vacuum_cost_limit=2000}'),
('idem_action_versions',
	'last_action_id bigint NOT NULL, user_id text NOT NULL,
	 entity_type text NOT NULL, entity_id text NOT NULL',
	'{user_id,entity_type,entity_id}', '{idem_action_versions_pkey}',
	'{fillfactor=80}'),
('idem_user_actions',
	'last_action_id bigint NOT NULL, updated_at timestamptz NOT NULL,
	 is_active boolean NOT NULL, user_id text NOT NULL,
	 entity_type text NOT NULL, entity_id text NOT NULL,
	 action_type text NOT NULL',
	'{user_id,entity_type,entity_id,action_type}',
	'{idem_user_actions_pkey}', '{fillfactor=80}'),
('idem_aggregates',
	'version bigint NOT NULL, aggregate text NOT NULL',
	'{aggregate}', '{idem_aggregates_pkey}', '{fillfactor=80}'),
('idem_client_sequences',
	'last_client_seq bigint NOT NULL, aggregate text NOT NULL,
	 client_id text NOT NULL',
	'{aggregate,client_id}', '{idem_client_sequences_pkey}',
	'{fillfactor=80}'),
-- A token's row is rarely written again, and a message's not in place: its
-- state and its times are indexed.
('idem_tokens',
	'expires_at timestamptz NOT NULL, scope text NOT NULL,
	 token text NOT NULL',
	'{token,scope}', '{idem_tokens_pkey,idem_tokens_expires_at}',
	'{autovacuum_vacuum_scale_factor=0.05,autovacuum_vacuum_cost_limit=2000}'),
('idem_outbox',
	'id bigint NOT NULL, lane bigint, created_at timestamptz NOT NULL,
	 available_at timestamptz NOT NULL, acked_at timestamptz,
	 attempt int NOT NULL, attempts_before int NOT NULL, leased boolean,
	 ready boolean NOT NULL, message_id uuid NOT NULL, state text NOT NULL,
	 topic text NOT NULL, message_key text, payload jsonb NOT NULL,
	 headers jsonb, last_error text',
	'{id}',
	'{idem_outbox_pkey,idem_outbox_due,idem_outbox_topics,idem_outbox_lanes,
	 idem_outbox_ended}',
	'{fillfactor=50,autovacuum_vacuum_scale_factor=0.02,autovacuum_vacuum_cost_limit=2000}');

CREATE FUNCTION pg_temp.short_types(text) RETURNS text
LANGUAGE sql
RETURN replace(replace($1, 'timestamp with time zone', 'timestamptz'),
	'integer', 'int');

CREATE FUNCTION pg_temp.arguments_of(function oid) RETURNS text
LANGUAGE sql
RETURN pg_temp.short_types(regexp_replace(pg_get_function_arguments(function),
	'DEFAULT NULL::[a-z]+(\[\])?', 'DEFAULT NULL', 'g'));

CREATE FUNCTION pg_temp.attributes_of(function oid) RETURNS text
LANGUAGE sql
RETURN (
	SELECT concat_ws(' ', l.lanname,
		CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable'
			ELSE 'volatile' END,
		CASE WHEN p.proisstrict THEN 'strict' ELSE 'called-on-null' END,
		CASE p.proparallel WHEN 's' THEN 'parallel-safe'
			WHEN 'r' THEN 'parallel-restricted' ELSE 'parallel-unsafe' END)
	FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
	WHERE p.oid = function
);

-- From 17 on, array types and the tables' row types are members as well.
CREATE TEMP VIEW members AS
	SELECT d.classid, d.objid
	FROM pg_depend AS d
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		AND d.refobjid = (SELECT oid FROM pg_extension
			WHERE extname = 'idempotency')
		AND NOT (d.classid = 'pg_type'::regclass AND d.objid IN (
			SELECT t.oid
			FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
			WHERE t.typelem <> 0 OR c.relkind <> 'c'));
CREATE TEMP VIEW functions AS
	SELECT p.* FROM pg_proc AS p JOIN members AS m
		ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid;
CREATE TEMP VIEW relations AS
	SELECT c.* FROM pg_class AS c JOIN members AS m
		ON m.classid = 'pg_class'::regclass AND m.objid = c.oid;

SELECT plan(59 * 4 + 8 + 7 * 3 + 1 + 6 + 17 + 12 * 3 + 5);

--
-- Functions
--
SELECT is(pg_temp.arguments_of(to_regprocedure(signature)),
	regexp_replace(arguments, '\s+', ' ', 'g'),
	signature || ' has the promised arguments')
FROM promised;

SELECT is(
	pg_temp.short_types(pg_get_function_result(to_regprocedure(signature))),
	result,
	signature || ' has the promised result')
FROM promised;

SELECT is(pg_temp.attributes_of(to_regprocedure(signature)), attributes,
	signature || ' has the promised language and labels')
FROM promised;

SELECT ok(
	length(obj_description(to_regprocedure(signature), 'pg_proc')) > 20,
	signature || ' has a comment')
FROM promised;

SELECT set_eq(
	'SELECT oid FROM functions',
	'SELECT to_regprocedure(signature)::oid
	FROM (SELECT signature FROM promised UNION ALL TABLE others) AS p',
	'the extension has these functions and no other');
SELECT set_eq(
	'SELECT oid::regprocedure, proconfig FROM functions WHERE prosecdef',
	$$SELECT name::regprocedure, '{"search_path=pg_catalog, pg_temp"}'::text[]
	FROM (VALUES ('idem_metric_samples()'), ('idem_metrics()'), ('idem_health()'),
		('idem_stuck(interval)'),
		('idem_grant_as_owner(regrole)'),
		('idem_grant_monitor_as_owner(regrole)'),
		('idem_revoke_as_owner(regrole)')) AS v (name)$$,
	'SECURITY DEFINER is for monitoring, and to grant parts of the interface; '
	'with a safe search_path');
SELECT is_empty(
	'SELECT oid::regprocedure FROM functions WHERE proleakproof',
	'no function claims to be leakproof');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM functions
	WHERE prokind <> 'f'$$,
	'all are plain functions');
SELECT set_eq(
	$$SELECT oid::regprocedure FROM functions WHERE proretset$$,
	$$VALUES ('idem_once_many(text, text[], interval)'::regprocedure),
		('idem_action_states(text, text, text[])'),
		('idem_claim_many(text, text[], bytea[], interval, interval)'),
		('idem_complete_many(text, text[], int[], text[], json[], bigint[])'),
		('idem_try_advance_many(text[], text[], text[], bigint[])'),
		('idem_set_many(text[], text[], text[], text[], boolean[], bigint[])'),
		('idem_publish_many(text[], jsonb[], text[], jsonb[], interval)'),
		('idem_outbox_take(int, interval, text[], interval)'),
		('idem_outbox_extend(bigint[], interval, int[])'),
		('idem_stats_data()'), ('idem_application_functions()'),
		('idem_application_types()'), ('idem_monitor_functions()'),
		('idem_monitor_views()'), ('idem_metric_families()'),
		('idem_metric_samples()'),
		('idem_monitoring_data()'), ('idem_table_stats()'),
		('idem_table_faults()'),
		('idem_sample_data(text)'), ('idem_clock_evidence()'),
		('idem_health()'), ('idem_stuck(interval)')$$,
	'single-row functions return no sets');
SELECT is_empty(
	$$SELECT oid::regprocedure, prosrc FROM functions
	WHERE probin IS NOT NULL AND (probin <> 'idempotency'
		OR prosrc !~ ('^' || proname || '(_(text|jsonb|bytea))?$'))$$,
	'C symbols carry the SQL name');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM functions
	WHERE pronamespace <> (SELECT extnamespace FROM pg_extension
		WHERE extname = 'idempotency')$$,
	'all functions are in the extension''s schema');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM functions
	WHERE proargnames IS NULL AND pronargs > 0 OR '' = ANY (proargnames)$$,
	'every argument has a name');

--
-- Tables: columns in an order that needs no padding, primary keys
--
CREATE FUNCTION pg_temp.columns_of(relation regclass) RETURNS text
LANGUAGE sql
RETURN (
	SELECT string_agg(attname || ' '
		|| pg_temp.short_types(format_type(atttypid, atttypmod))
		|| CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END,
		', ' ORDER BY attnum)
	FROM pg_attribute
	WHERE attrelid = relation AND attnum > 0 AND NOT attisdropped
);

SELECT is(pg_temp.columns_of(name::text::regclass),
	regexp_replace(columns, '\s+', ' ', 'g'),
	name || ' has the promised columns')
FROM promised_tables;
SELECT col_is_pk(name, primary_key, name || ' has its primary key')
FROM promised_tables;
SELECT indexes_are(name, indexes, name || ' has these indexes and no other')
FROM promised_tables;

SELECT is(pg_temp.columns_of('idem_stats'),
	'datname name, ' || replace(arguments, 'OUT ', ''),
	'idem_stats shows idem_stats_data, and the name of the database')
FROM (SELECT regexp_replace(arguments, '\s+', ' ', 'g') FROM promised
	WHERE signature = 'idem_stats_data()') AS p (arguments);

--
-- Storage
--
SELECT is(pg_get_indexdef(index::regclass),
	'CREATE INDEX ' || index || ' ON public.' || definition,
	index || ': ' || description)
FROM (VALUES
	('idem_keys_expires_at', 'idem_keys USING btree (expires_at)',
		'expires_at is indexed for the cleanup'),
	('idem_tokens_expires_at', 'idem_tokens USING btree (expires_at)',
		'expires_at is indexed for the cleanup'),
	('idem_outbox_due', 'idem_outbox USING btree (available_at) WHERE ready',
		'messages to be looked at by when they are due'),
	('idem_outbox_topics', 'idem_outbox USING btree (topic, available_at) '
		'WHERE ready',
		'those of a topic by when they are due'),
	('idem_outbox_lanes', 'idem_outbox USING btree (lane, id) '
		'WHERE ((state = ''pending''::text) AND (lane IS NOT NULL))',
		'messages with a key in their order'),
	('idem_outbox_ended', 'idem_outbox USING btree (acked_at) '
		'WHERE (state <> ''pending''::text)',
		'acknowledged messages for the cleanup, and dead ones')
) AS v (index, definition, description);
SELECT is_empty(
	$$SELECT i.indexrelid::regclass
	FROM pg_index AS i JOIN relations AS r ON r.oid = i.indrelid
	JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum = ANY (i.indkey)
	WHERE r.relname = 'idem_keys' AND a.attname IN ('state', 'completed_at',
		'response_status', 'response_headers', 'response_body',
		'response_bytes', 'lease_expires_at', 'error', 'recovery_point',
		'recovery_state')$$,
	'no index covers a column that idem_complete changes');
SELECT is_empty(
	$$SELECT i.indexrelid::regclass
	FROM pg_index AS i JOIN relations AS r ON r.oid = i.indrelid
	JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum = ANY (i.indkey)
	WHERE r.relname <> 'idem_keys' AND a.attname IN ('last_action_id',
		'updated_at', 'is_active')$$,
	'no index covers a column that a user action changes');
SELECT is_empty(
	$$SELECT i.indexrelid::regclass
	FROM pg_index AS i JOIN relations AS r ON r.oid = i.indrelid
	JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum = ANY (i.indkey)
	WHERE a.attname IN ('version', 'last_client_seq')$$,
	'no index covers a column that an append changes');
SELECT is_empty(
	$$SELECT i.indexrelid::regclass, a.attname
	FROM pg_index AS i JOIN relations AS r ON r.oid = i.indrelid
	JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum = ANY (i.indkey)
	WHERE a.atttypid = 'text'::regtype
		AND a.attcollation <> 'pg_catalog."C"'::regcollation$$,
	'text columns in keys have collation "C"');
SELECT is_empty(
	$$SELECT i.indexrelid::regclass
	FROM pg_index AS i JOIN relations AS r ON r.oid = i.indrelid
	WHERE EXISTS (SELECT FROM unnest(i.indcollation) AS c (id)
		WHERE c.id NOT IN (0, 'pg_catalog."C"'::regcollation))$$,
	'no index has a collation but "C"');
SELECT results_eq(
	$$SELECT relname, reloptions::text COLLATE "default" FROM relations
	WHERE relkind = 'r' ORDER BY relname$$,
	$$SELECT name, options COLLATE "default" FROM promised_tables
	ORDER BY name$$,
	'fill factors leave room for updates in place, autovacuum keeps up');
SELECT set_eq(
	'SELECT relname, relkind FROM relations',
	$$SELECT name, 'r'::"char" FROM promised_tables
	UNION ALL VALUES ('idem_claim_tokens'::name, 'S'::"char"),
		('idem_outbox_ids', 'S'), ('idem_stats', 'v')$$,
	'the extension has these tables, sequences and view and no other');
SELECT is_empty(
	$$SELECT pg_describe_object(classid, objid, 0) FROM members
	WHERE classid NOT IN ('pg_proc'::regclass, 'pg_class'::regclass)
		AND NOT (classid = 'pg_type'::regclass AND objid IN (
			SELECT name::regtype FROM promised_types))$$,
	'beside them the extension has these types only');
SELECT is_empty(
	$$SELECT relname FROM relations AS r
	LEFT JOIN pg_am AS a ON a.oid = r.relam
	WHERE relpersistence <> 'p' OR relkind = 'r' AND a.amname <> 'heap'$$,
	'all are ordinary logged heap tables');
SELECT is_empty(
	$$SELECT relname FROM relations
	WHERE relkind = 'r' AND relreplident <> 'd'$$,
	'logical replication identifies rows by primary key');
SELECT is_empty(
	$$SELECT relname FROM relations
	WHERE relkind = 'r'
		AND (relhastriggers OR relhasrules OR relrowsecurity OR relchecks > 0
			OR relispartition OR relhassubclass)$$,
	'tables carry nothing that direct access would skip');
SELECT is_empty(
	$$SELECT r.relname, a.attname FROM relations AS r
	JOIN pg_attribute AS a ON a.attrelid = r.oid
	WHERE r.relkind = 'r' AND a.attnum > 0
		AND (a.atthasdef OR a.attidentity <> '' OR a.attgenerated <> '')$$,
	'columns have no default that direct access would skip');
-- An uuid is as long as two bigints, but aligned like a char.
SELECT is_empty(
	$$SELECT relname, attname, attlen, attalign
	FROM (
		SELECT r.relname, a.attname, a.attlen, a.attalign,
			position(a.attalign IN 'csid') AS alignment,
			lag(a.attlen) OVER columns AS previous_length,
			lag(position(a.attalign IN 'csid')) OVER columns
				AS previous_alignment
		FROM relations AS r JOIN pg_attribute AS a ON a.attrelid = r.oid
		WHERE r.relkind = 'r' AND a.attnum > 0
		WINDOW columns AS (PARTITION BY r.oid ORDER BY a.attnum)
	) AS c
	WHERE attlen > 0 AND (previous_length < 0
		OR alignment > previous_alignment)$$,
	'fixed-length columns come first, those of the widest alignment before '
	'all');
SELECT results_eq(
	$$SELECT c.relname, condition COLLATE "default"
	FROM pg_extension AS e,
		unnest(e.extconfig, e.extcondition) AS config (relation, condition)
	JOIN pg_class AS c ON c.oid = config.relation
	WHERE e.extname = 'idempotency' ORDER BY c.relname$$,
	$$SELECT name, '' COLLATE "default" FROM (SELECT name FROM promised_tables
		UNION ALL VALUES ('idem_claim_tokens'::name), ('idem_outbox_ids'))
		AS d ORDER BY name$$,
	'pg_dump dumps all rows of all tables, and the counters of both sequences');
SELECT results_eq(
	format($$SELECT format_type(seqtypid, NULL), seqincrement, seqcache,
		seqcycle FROM pg_sequence WHERE seqrelid = %L::regclass$$, sequence),
	$$VALUES ('bigint', 1::bigint, 1::bigint, false)$$,
	what || ' increase across sessions and never start again')
FROM (VALUES ('idem_claim_tokens', 'claim tokens'),
	('idem_outbox_ids', 'ids of messages')) AS v (sequence, what);
SELECT is_empty(
	$$SELECT relname FROM relations
	WHERE obj_description(oid, 'pg_class') IS NULL$$,
	'every table, sequence and view has a comment');

--
-- Types and extension
--
SELECT is(pg_temp.columns_of(name::text::regclass),
	regexp_replace(columns, '\s+', ' ', 'g'),
	name || ' has the promised columns')
FROM promised_types;
SELECT is((SELECT typtype::text FROM pg_type WHERE typname = name),
	'c', name || ' is a composite type')
FROM promised_types;
SELECT isnt(obj_description(name::text::regtype, 'pg_type'), NULL,
	name || ' has a comment')
FROM promised_types;
SELECT is((SELECT extrelocatable FROM pg_extension
	WHERE extname = 'idempotency'), false,
	'the extension is not relocatable');
SELECT is((SELECT extversion FROM pg_extension WHERE extname = 'idempotency'),
	'1.0', 'its version is 1.0');
SELECT isnt((SELECT obj_description(oid, 'pg_extension') FROM pg_extension
	WHERE extname = 'idempotency'), NULL,
	'the extension has a comment');
SELECT throws_ok('ALTER EXTENSION idempotency SET SCHEMA tap', '0A000',
	NULL, 'it cannot be moved to another schema');
SELECT throws_ok('DROP TABLE idem_keys', '2BP01', NULL,
	'its tables cannot be dropped without it');

SELECT * FROM finish();
ROLLBACK;
