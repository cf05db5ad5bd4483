--
-- The contract: the objects of the extension, who may call and read what, the
-- errors of each call, and whether docs/reference.md says the same
--
-- A new function needs a row in "functions", and each of its errors a row in
-- "refusals".  A new table needs a row in "tables".  Errors that take two
-- sessions are in sequences_once_outbox and in test/isolation.
--
-- Records in each state are committed first, so that a call holds only its own
-- locks.  They are removed at the end.
--
SET client_min_messages = error;
\ir include/outcome_of.sql

-- arguments, result: with the short names of the types
--
-- attributes: the language, the volatility, and "strict" where it applies.
-- A volatile function is parallel-unsafe, every other one is parallel-safe.
--
-- who: "application" has it by idem_grant, "relay" by idem_grant_relay; "monitor" by idem_grant_monitor or
-- as a member of pg_monitor; "pg_monitor" only as a member of pg_monitor;
-- "administrator" is the installer
--
-- access: "read" works in a read-only transaction, "write" raises 25006.  The
-- tables after that word must be unaltered for the call, and a writer locks
-- them.  They are in alphabetical order.
--
-- call: succeeds.  $1 is the scope, $2 a key, $3 its claim token, $4 the id of
-- a message.  The key is live, except for the functions that claim a new one.
-- NULL if the function is only for other functions.
CREATE FUNCTION pg_temp.signature(name text, arguments text) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN name || '(' || regexp_replace(
	regexp_replace(arguments, ',?\s*OUT .*', ''),
	'\w+ (\w+(\[\])?)( DEFAULT [^,]*)?', '\1', 'g') || ')';
CREATE TEMP TABLE functions (
	name text,
	arguments text,
	result text,
	attributes text,
	who text,
	access text,
	call text,
	signature text GENERATED ALWAYS AS (pg_temp.signature(name, arguments))
		STORED,
	tables text[] GENERATED ALWAYS AS
		(string_to_array(regexp_replace(access, '^\w+ ?', ''), ', ')) STORED
);
INSERT INTO functions VALUES
('idem_request_hash', 'method text, path text, body text DEFAULT NULL',
	'bytea', 'c immutable', 'application', 'read',
	$$idem_request_hash('GET', '/')$$),
('idem_request_hash', 'method text, path text, body jsonb',
	'bytea', 'c immutable', 'application', 'read',
	$$idem_request_hash('GET', '/', '{}'::jsonb)$$),
('idem_request_hash', 'method text, path text, body bytea',
	'bytea', 'c immutable', 'application', 'read',
	$$idem_request_hash('GET', '/', '\x00'::bytea)$$),
('idem_canonical_json', 'document jsonb',
	'text', 'c immutable strict', 'application', 'read',
	$$idem_canonical_json('{}')$$),
-- Not immutable: the settings decide.
('idem_key_is_valid', 'key text',
	'boolean', 'c stable', 'application', 'read',
	$$idem_key_is_valid('order-number-live')$$),
('idem_claim',
	'scope text, key text, request_hash bytea DEFAULT NULL,
	 ttl interval DEFAULT NULL, lease interval DEFAULT NULL,
	 wait interval DEFAULT NULL, request jsonb DEFAULT NULL',
	'idem_claim_result', 'c volatile', 'application', 'write idem_keys',
	'idem_claim($1, $2)'),
('idem_complete',
	'scope text, key text, response_status int,
	 response_body text DEFAULT NULL, response_headers json DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile', 'application', 'write idem_keys',
	'idem_complete($1, $2, 200, claim_token => $3)'),
('idem_complete',
	'scope text, key text, response_status int, response_body bytea,
	 response_headers json DEFAULT NULL, claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile', 'application', 'write idem_keys',
	$$idem_complete($1, $2, 200, '\x00'::bytea, claim_token => $3)$$),
('idem_checkpoint',
	'scope text, key text, recovery_point text,
	 recovery_state json DEFAULT NULL, lease interval DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'timestamptz', 'c volatile', 'application', 'write idem_keys',
	$$idem_checkpoint($1, $2, 'point', claim_token => $3)$$),
('idem_heartbeat',
	'scope text, key text, lease interval DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'timestamptz', 'c volatile', 'application', 'write idem_keys',
	'idem_heartbeat($1, $2, claim_token => $3)'),
('idem_fail',
	'scope text, key text, error text DEFAULT NULL,
	 claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile', 'application', 'write idem_keys',
	'idem_fail($1, $2, claim_token => $3)'),
('idem_release', 'scope text, key text, claim_token bigint DEFAULT NULL',
	'boolean', 'c volatile', 'application', 'write idem_keys',
	'idem_release($1, $2, $3)'),
('idem_lookup', 'scope text, key text',
	'idem_lookup_result', 'c stable', 'application', 'read idem_keys',
	'idem_lookup($1, $2)'),
('idem_forget', 'scope text, key text',
	'boolean', 'c volatile', 'administrator', 'write idem_keys',
	'idem_forget($1, $2)'),
('idem_erase', 'scope text, key text',
	'boolean', 'c volatile', 'administrator', 'write idem_keys',
	'idem_erase($1, $2)'),
('idem_resume',
	'max_claims int DEFAULT 10, lease interval DEFAULT NULL,
	 scopes text[] DEFAULT NULL, wait interval DEFAULT NULL, OUT scope text,
	 OUT key text, OUT claim_token bigint, OUT attempt int, OUT request jsonb,
	 OUT recovery_point text, OUT recovery_state json,
	 OUT created_at timestamptz, OUT lease_expires_at timestamptz',
	'SETOF record', 'c volatile', 'application', 'write idem_keys',
	'idem_resume()'),
('idem_run',
	'scope text, key text, handler regprocedure, request jsonb,
	 ttl interval DEFAULT NULL, wait interval DEFAULT ''00:01:00''::interval',
	'idem_run_result', 'c volatile', 'application', 'write idem_keys',
	$$idem_run($1, $2, 'handler(jsonb)', '{}', wait => '0')$$),
('idem_try_advance',
	'user_id text, entity_type text, entity_id text, action_id bigint',
	'idem_advance_result', 'c volatile',
	'application', 'write idem_action_versions',
	$$idem_try_advance('u', 'e', 'i', 1)$$),
('idem_toggle',
	'user_id text, entity_type text, entity_id text, action_type text,
	 action_id bigint',
	'idem_action_result', 'c volatile',
	'application', 'write idem_action_versions, idem_user_actions',
	$$idem_toggle('u', 'e', 'i', 'like', 1)$$),
('idem_set',
	'user_id text, entity_type text, entity_id text, action_type text,
	 active boolean, action_id bigint, excludes text[] DEFAULT NULL',
	'idem_action_result', 'c volatile',
	'application', 'write idem_action_versions, idem_user_actions',
	$$idem_set('u', 'e', 'i', 'like', true, 1)$$),
('idem_is_active',
	'user_id text, entity_type text, entity_id text, action_type text',
	'boolean', 'c stable', 'application', 'read idem_user_actions',
	$$idem_is_active('u', 'e', 'i', 'like')$$),
('idem_action_states',
	'user_id text, entity_type text, entity_ids text[], OUT entity_id text,
	 OUT action_type text, OUT is_active boolean, OUT last_action_id bigint',
	'SETOF record', 'c stable',
	'application', 'read idem_action_versions, idem_user_actions',
	$$idem_action_states('u', 'e', '{i}')$$),
('idem_forget_user', 'user_id text',
	'bigint', 'c volatile',
	'administrator', 'write idem_action_versions, idem_user_actions',
	$$idem_forget_user('u')$$),
('idem_raise_claim_tokens', 'at_least bigint',
	'bigint', 'c volatile', 'administrator', 'write idem_outbox',
	'idem_raise_claim_tokens(0)'),
('idem_repair_outbox', '', 'bigint', 'c volatile', 'administrator',
	'write idem_outbox', 'idem_repair_outbox()'),
('idem_claim_many',
	'scope text, keys text[], request_hashes bytea[] DEFAULT NULL,
	 ttl interval DEFAULT NULL, lease interval DEFAULT NULL',
	'SETOF idem_claim_many_result', 'c volatile',
	'application', 'write idem_keys', 'idem_claim_many($1, ARRAY[$2])'),
('idem_complete_many',
	'scope text, keys text[], response_statuses int[],
	 response_bodies text[] DEFAULT NULL,
	 response_headers json[] DEFAULT NULL, claim_tokens bigint[] DEFAULT NULL',
	'SETOF idem_complete_many_result', 'c volatile',
	'application', 'write idem_keys',
	$$idem_complete_many($1, ARRAY[$2], '{200}',
	claim_tokens => ARRAY[$3])$$),
('idem_try_advance_many',
	'user_ids text[], entity_types text[], entity_ids text[],
	 action_ids bigint[]',
	'SETOF idem_advance_many_result', 'c volatile',
	'application', 'write idem_action_versions',
	$$idem_try_advance_many('{u}', '{e}', '{i}', '{1}')$$),
('idem_set_many',
	'user_ids text[], entity_types text[], entity_ids text[],
	 action_types text[], actives boolean[], action_ids bigint[]',
	'SETOF idem_set_many_result', 'c volatile',
	'application', 'write idem_action_versions, idem_user_actions',
	$$idem_set_many('{u}', '{e}', '{i}', '{like}', '{t}', '{1}')$$),
('idem_try_append',
	'aggregate text, client_id text, client_seq bigint,
	 event_count int DEFAULT 1, expected_version bigint DEFAULT NULL,
	 allow_gaps boolean DEFAULT true, wait interval DEFAULT NULL',
	'idem_append_result', 'c volatile',
	'application', 'write idem_aggregates, idem_client_sequences',
	$$idem_try_append('contract', 'phone', 2)$$),
('idem_last_client_seq', 'aggregate text, client_id text',
	'bigint', 'c stable', 'application', 'read idem_client_sequences',
	$$idem_last_client_seq('contract', 'phone')$$),
('idem_once', 'scope text, token text, ttl interval DEFAULT NULL',
	'boolean', 'c volatile', 'application', 'write idem_tokens',
	$$idem_once('contract', 'token')$$),
('idem_once_many', 'scope text, tokens text[], ttl interval DEFAULT NULL',
	'SETOF text', 'c volatile', 'application', 'write idem_tokens',
	$$idem_once_many('contract', '{a,b}'::text[])$$),
('idem_once_at', 'scope text, token text',
	'timestamptz', 'c stable', 'application', 'read idem_tokens',
	$$idem_once_at('contract', 'token')$$),
('idem_publish',
	'topic text, payload jsonb, message_key text DEFAULT NULL,
	 headers jsonb DEFAULT NULL, deliver_after interval DEFAULT NULL',
	'uuid', 'c volatile', 'application', 'write idem_outbox',
	$$idem_publish('contract', '1')$$),
('idem_publish_many',
	'topics text[], payloads jsonb[], message_keys text[] DEFAULT NULL,
	 headers jsonb[] DEFAULT NULL, deliver_after interval DEFAULT NULL,
	 OUT ordinal int, OUT message_id uuid',
	'SETOF record', 'c volatile', 'application', 'write idem_outbox',
	$$idem_publish_many('{t,u}', '{1}')$$),
('idem_outbox_take',
	'max_messages int DEFAULT 100,
	 lease interval DEFAULT ''00:00:30''::interval,
	 topics text[] DEFAULT NULL, wait interval DEFAULT NULL, OUT id bigint,
	 OUT message_id uuid, OUT topic text, OUT message_key text,
	 OUT payload jsonb, OUT headers jsonb, OUT attempt int,
	 OUT created_at timestamptz',
	'SETOF record', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_take()'),
('idem_outbox_ack', 'ids bigint[]',
	'int', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_ack(ARRAY[$4])'),
('idem_outbox_nack',
	'id bigint, error text DEFAULT NULL, retry_after interval DEFAULT NULL,
	 attempt int DEFAULT NULL',
	'text', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_nack($4)'),
('idem_outbox_requeue', 'ids bigint[] DEFAULT NULL',
	'int', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_requeue(ARRAY[$4])'),
('idem_outbox_extend',
	'ids bigint[], lease interval DEFAULT ''00:00:30''::interval,
	 attempts int[] DEFAULT NULL',
	'SETOF bigint', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_extend(ARRAY[$4])'),
('idem_outbox_release', 'ids bigint[], attempts int[] DEFAULT NULL',
	'int', 'c volatile', 'relay', 'write idem_outbox',
	'idem_outbox_release(ARRAY[$4])'),
('idem_outbox_fail',
	'id bigint, attempt int, error text, retry_after interval DEFAULT NULL,
	 counted boolean DEFAULT true, schedule interval[] DEFAULT NULL,
	 max_age interval DEFAULT NULL',
	'text', 'c volatile', 'relay', 'write idem_outbox',
	$$idem_outbox_fail($4, 1, 'error')$$),
('idem_outbox_dead',
	'max_messages int DEFAULT 1000, OUT id bigint, OUT message_id uuid,
	 OUT topic text, OUT message_key text, OUT attempt int,
	 OUT created_at timestamptz, OUT last_error text',
	'SETOF record', 'sql stable', 'relay', 'read', 'idem_outbox_dead()'),
('idem_outbox_last_error', 'id bigint',
	'text', 'sql stable', 'relay', 'read', 'idem_outbox_last_error($4)'),
('idem_outbox_topics', 'max_topics int DEFAULT 10000',
	'SETOF text', 'sql stable', 'relay', 'read', 'idem_outbox_topics()'),
('idem_cleanup', 'batch_size int DEFAULT NULL',
	'idem_cleanup_result', 'c volatile',
	'administrator', 'write idem_keys, idem_outbox, idem_tokens',
	'idem_cleanup()'),
('idem_take_expired', 'kind text, max_rows int DEFAULT 1000',
	'SETOF jsonb', 'c volatile',
	'administrator', 'write idem_keys, idem_outbox, idem_tokens',
	$$idem_take_expired(kind)
		FROM unnest('{keys,tokens,messages}'::text[]) AS kind$$),
('idem_grant', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'write',
	$$idem_grant('idem_test_stranger')$$),
('idem_grant_relay', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'write',
	$$idem_grant_relay('idem_test_stranger')$$),
('idem_grant_monitor', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'write',
	$$idem_grant_monitor('idem_test_stranger')$$),
('idem_revoke', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'write',
	$$idem_revoke('idem_test_stranger')$$),
('idem_outbox_blocked',
	'max_lanes int DEFAULT 100, OUT topic text, OUT first_id bigint,
	 OUT blocked_since timestamptz, OUT waiting bigint, OUT reason text,
	 OUT until timestamptz, OUT pid int',
	'SETOF record', 'c volatile', 'monitor, relay', 'read',
	'idem_outbox_blocked()'),
('idem_stats_reset', '',
	'void', 'c volatile', 'administrator', 'read', 'idem_stats_reset()'),
('idem_metric_samples',
	'OUT name text, OUT labels jsonb, OUT value double precision,
	 OUT type text, OUT help text',
	'SETOF record', 'sql volatile', 'monitor', 'read', 'idem_metric_samples()'),
('idem_metrics', '',
	'text', 'sql volatile', 'monitor', 'read', 'idem_metrics()'),
('idem_health',
	'OUT check_name text, OUT status text, OUT value double precision,
	 OUT threshold double precision, OUT detail text',
	'SETOF record', 'sql volatile', 'monitor', 'read', 'idem_health()'),
('idem_abandoned',
	'older_than interval DEFAULT ''00:05:00''::interval, OUT scope text,
	 OUT key text, OUT age interval, OUT attempt int, OUT recovery_point text,
	 OUT lease_expires_at timestamptz',
	'SETOF record', 'sql volatile', 'pg_monitor', 'read', 'idem_abandoned()'),
-- The extension's own, which the reference does not list.
('idem_many_support', 'request internal',
	'internal', 'c immutable strict', 'administrator', 'read', NULL),
('idem_monitoring_data',
	'OUT source text, OUT counted bigint, OUT due bigint,
	 OUT overdue double precision, OUT complete boolean, OUT fault text',
	'SETOF record', 'c volatile', 'administrator', 'read',
	'idem_monitoring_data()'),
('idem_metric_families',
	'OUT ordinal int, OUT name text, OUT type text, OUT unit text,
	 OUT help text',
	'SETOF record', 'sql immutable', 'administrator', 'read',
	'idem_metric_families()'),
('idem_sample_data',
	'source text, OUT share double precision,
	 OUT live_share double precision, OUT stuck bigint,
	 OUT stuck_pages bigint, OUT newest timestamptz,
	 OUT highest_token bigint, OUT fault text',
	'SETOF record', 'c volatile strict', 'administrator', 'read',
	$$idem_sample_data('keys')$$),
('idem_clock_evidence', 'OUT name text, OUT latest timestamptz',
	'SETOF record', 'c volatile', 'administrator', 'read',
	'idem_clock_evidence()'),
('idem_table_faults', 'OUT table_name text, OUT fault text',
	'SETOF record', 'c volatile', 'administrator', 'read',
	'idem_table_faults()'),
('idem_table_stats',
	'OUT table_name text, OUT live_rows bigint, OUT dead_rows bigint, OUT dead_bytes bigint',
	'SETOF record', 'sql volatile', 'administrator', 'read',
	'idem_table_stats()'),
('idem_cleanup_idle', '',
	'double precision', 'c volatile', 'administrator', 'read',
	'idem_cleanup_idle()'),
('idem_worker_absence', '',
	'text', 'c volatile', 'administrator', 'read', 'idem_worker_absence()'),
('idem_vacuum_holder', '',
	'text', 'sql volatile', 'administrator', 'read', 'idem_vacuum_holder()'),
('idem_unfinished_moves', 'OUT moves bigint, OUT seconds double precision, OUT detail text',
	'SETOF record', 'plpgsql volatile', 'administrator', 'read',
	'idem_unfinished_moves()'),
('idem_redacted_key', 'key text',
	'text', 'c stable strict', 'administrator', 'read',
	$$idem_redacted_key('order-number-live')$$),
('idem_check_interval', 'value interval, name text',
	'void', 'c stable', 'administrator', 'read',
	$$idem_check_interval('0', 'value')$$),
('idem_application_functions', '',
	'SETOF regprocedure', 'sql stable', 'administrator', 'read',
	'idem_application_functions()'),
('idem_application_types', '',
	'SETOF regtype', 'sql stable', 'administrator', 'read',
	'idem_application_types()'),
('idem_relay_functions', '',
	'SETOF regprocedure', 'sql stable', 'administrator', 'read',
	'idem_relay_functions()'),
('idem_granted_functions', '',
	'SETOF regprocedure', 'sql stable', 'administrator', 'read',
	'idem_granted_functions()'),
('idem_blocked_seconds',
	'blocked_since timestamptz, until timestamptz',
	'double precision', 'sql volatile', 'administrator', 'read',
	'idem_blocked_seconds(now(), NULL)'),
('idem_unvacuumed_tables', '',
	'text', 'sql volatile', 'administrator', 'read',
	'idem_unvacuumed_tables()'),
('idem_sequences_behind',
	'highest_token bigint, OUT name text, OUT behind bigint',
	'SETOF record', 'c volatile', 'administrator', 'read',
	'idem_sequences_behind(0)'),
('idem_monitor_functions', '',
	'SETOF regprocedure', 'sql stable', 'administrator', 'read',
	'idem_monitor_functions()'),
('idem_monitor_views', '',
	'SETOF regclass', 'sql stable', 'administrator', 'read',
	'idem_monitor_views()'),
('idem_check_grantee', 'grantee regrole',
	'void', 'c volatile', 'administrator', 'write',
	$$idem_check_grantee('idem_test_stranger')$$),
('idem_execute_grant', 'statement text',
	'void', 'c volatile', 'administrator', 'read', NULL),
('idem_grant_as_owner', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'read', NULL),
('idem_grant_relay_as_owner', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'read', NULL),
('idem_grant_monitor_as_owner', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'read', NULL),
('idem_revoke_as_owner', 'grantee regrole',
	'void', 'sql volatile', 'administrator', 'read', NULL),
('idem_grantor', 'acl aclitem[], owner oid',
	'oid', 'sql stable', 'administrator', 'read', NULL),
('idem_warn_of_rest', 'grantee regrole, remaining boolean',
	'void', 'plpgsql stable', 'administrator', 'read', NULL),
('idem_stats_data',
	'OUT datid oid, OUT claims_new bigint, OUT claims_replay bigint,
	 OUT claims_erased bigint, OUT claims_in_progress bigint,
	 OUT claims_hash_conflict bigint, OUT claims_expired bigint,
	 OUT takeovers bigint, OUT completions bigint, OUT failures bigint,
	 OUT rate_limited bigint, OUT advances bigint, OUT advances_stale bigint,
	 OUT appends_appended bigint, OUT appends_duplicate bigint,
	 OUT appends_overlap bigint, OUT appends_gap bigint,
	 OUT appends_in_flight bigint, OUT appends_version_conflict bigint,
	 OUT once_first bigint, OUT once_seen bigint,
	 OUT messages_published bigint, OUT messages_taken bigint,
	 OUT messages_acked bigint, OUT messages_nacked bigint,
	 OUT messages_dead bigint, OUT keys_deleted bigint,
	 OUT tokens_deleted bigint, OUT messages_deleted bigint,
	 OUT cleanup_passes bigint, OUT last_cleanup timestamptz,
	 OUT stats_reset timestamptz',
	'SETOF record', 'c volatile', 'monitor', 'read', 'idem_stats_data()');

-- The composite types that handlers and functions return.
CREATE TEMP TABLE types (
	name name,
	columns text
);
INSERT INTO types VALUES
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

CREATE TEMP TABLE tables (
	name name,
	columns text,
	primary_key name[],
	indexes name[],
	options text
);
INSERT INTO tables VALUES
('idem_keys',
	'claim_token bigint NOT NULL, created_at timestamptz NOT NULL,
	 completed_at timestamptz, lease_expires_at timestamptz,
	 resume_at timestamptz, expires_at timestamptz NOT NULL,
	 attempt int NOT NULL,
	 response_status int, state text NOT NULL, scope text NOT NULL,
	 key text NOT NULL, request_hash bytea, response_headers json,
	 response_body text, response_bytes bytea, error text,
	 recovery_point text, recovery_state json, request jsonb',
	'{key,scope}',
	'{idem_keys_pkey,idem_keys_expires_at,idem_keys_resumable,idem_keys_resumable_scopes}',
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
	'expires_at timestamptz NOT NULL, used_at timestamptz NOT NULL, scope text NOT NULL,
	 token text NOT NULL',
	'{token,scope}', '{idem_tokens_pkey,idem_tokens_expires_at}',
	'{autovacuum_vacuum_scale_factor=0.05,autovacuum_vacuum_cost_limit=2000}'),
('idem_outbox',
	'id bigint NOT NULL, key_hash bigint, created_at timestamptz NOT NULL,
	 available_at timestamptz NOT NULL, acked_at timestamptz,
	 attempt int NOT NULL, uncounted_attempts int NOT NULL, awaiting_ack boolean,
	 in_due_index boolean NOT NULL, message_id uuid NOT NULL, state text NOT NULL,
	 topic text NOT NULL, message_key text, payload jsonb NOT NULL,
	 headers jsonb, last_error text',
	'{id}',
	'{idem_outbox_pkey,idem_outbox_due,idem_outbox_topics,idem_outbox_lanes,
	 idem_outbox_ended}',
	'{fillfactor=50,autovacuum_vacuum_scale_factor=0.02,autovacuum_vacuum_cost_limit=2000}');


-- The SQLSTATEs of further calls, 00000 for success.  $1 is the scope.  $2 is
-- a new key for the functions that claim one, and for the others a key that
-- the transaction has claimed.  idempotency.max_response_size is 1 kB.
CREATE TEMP TABLE refusals (
	call text,
	sqlstate text
);
INSERT INTO refusals VALUES
($$idem_claim($1, $2, '')$$, '22023'),
($$idem_claim($1, $2, decode(repeat('00', 64), 'hex'))$$, '00000'),
($$idem_claim($1, $2, decode(repeat('00', 65), 'hex'))$$, '22023'),
($$idem_claim($1, $2, ttl => '-1 ms')$$, '22023'),
($$idem_claim($1, $2, lease => '-1 ms')$$, '22023'),
($$idem_claim($1, $2, wait => '-1 ms')$$, '22023'),
($$idem_claim($1, $2, ttl => '1 month -31 days')$$, '22023'),
($$idem_claim($1, $2, ttl => '0', lease => '0', wait => '0')$$, '00000'),
($$idem_claim($1, $2, ttl => '300000 years')$$, '22008'),
($$idem_claim($1, $2, lease => '300000 years')$$, '22023'),
('idem_complete($1, $2, NULL)', '22004'),
($$idem_complete($1, $2, NULL, '\x00'::bytea)$$, '22004'),
('idem_complete($1, $2, 200, NULL::bytea)', '00000'),
($$idem_complete($1, $2, 99)$$, '22023'),
($$idem_complete($1, $2, 600, ''::bytea)$$, '22023'),
($$idem_complete($1, $2, 200, repeat('x', 1024))$$, '00000'),
($$idem_complete($1, $2, 200, repeat('x', 1025))$$, '54000'),
($$idem_complete($1, $2, 200, repeat('é', 513))$$, '54000'),
($$idem_complete($1, $2, 200, decode(repeat('00', 1024), 'hex'))$$, '00000'),
($$idem_complete($1, $2, 200, decode(repeat('00', 1025), 'hex'))$$, '54000'),
($$idem_complete($1, $2, 200, 'x', to_json(repeat('x', 1022)))$$, '00000'),
($$idem_complete($1, $2, 200, 'x', to_json(repeat('x', 1023)))$$, '54000'),
($$idem_complete($1, $2, 200, 'x', '{Location}')$$, '22P02'),
('idem_checkpoint($1, $2, NULL)', '22004'),
($$idem_checkpoint($1, $2, '')$$, '22023'),
($$idem_checkpoint($1, $2, repeat('x', 512))$$, '00000'),
($$idem_checkpoint($1, $2, repeat('é', 257))$$, '22023'),
($$idem_checkpoint($1, $2, 'x', to_json(repeat('x', 1023)))$$, '54000'),
($$idem_checkpoint($1, $2, 'x', lease => '-1 ms')$$, '22023'),
($$idem_checkpoint($1, $2, 'x', lease => '300000 years')$$, '22023'),
($$idem_heartbeat($1, $2, '-1 ms')$$, '22023'),
($$idem_heartbeat($1, $2, '300000 years')$$, '22023'),
($$idem_heartbeat($1, $2, '0')$$, '00000'),
($$idem_fail($1, $2, repeat('é', 10000))$$, '00000'),
($$idem_run($1, $2, 'absent(jsonb)', '{}')$$, '42883'),
($$idem_run($1, $2, NULL, '{}')$$, '22004'),
($$idem_run($1, $2, 0::regprocedure, '{}')$$, '42883'),
($$idem_run($1, $2, 'handler(jsonb)', NULL)$$, '22004'),
($$idem_run($1, $2, 'handler(jsonb)', 'null')$$, '00000'),
($$idem_run($1, $2, 'handler(jsonb)', '{}', '-1 ms')$$, '22023'),
($$idem_run($1, $2, 'handler(jsonb)', '{}', wait => '-1 ms')$$, '22023'),
($$idem_run($1, $2, 'handler(jsonb)', '{}', '300000 years')$$, '22008'),
($$idem_request_hash('POST', '/', ''::text)$$, '00000'),
($$idem_request_hash('POST', '/', ' '::text)$$, '22P02'),
($$idem_request_hash('POST', '/', '{"a": 1'::text)$$, '22P02'),
($$idem_request_hash('POST', '/', '{"a": 1}}'::text)$$, '22P02'),
($$idem_request_hash('POST', '/', 'NaN'::text)$$, '22P02'),
($$idem_request_hash('POST', '/', '"\u0000"'::text)$$, '22P05'),
($$idem_request_hash('POST', '/', '1e200000'::text)$$, '22003'),
($$idem_request_hash('POST', '/',
	repeat('[', 100000) || repeat(']', 100000))$$, '54001'),
($$idem_request_hash('POST', '/',
	repeat('[', 1000) || repeat(']', 1000))$$, '00000'),
($$idem_request_hash('POST', '/', '1e131071'::text)$$, '00000'),
($$idem_try_advance('u', 'e', 'i', NULL)$$, '22004'),
($$idem_toggle('u', 'e', 'i', 'like', NULL)$$, '22004'),
($$idem_set('u', 'e', 'i', 'like', true, NULL)$$, '22004'),
($$idem_set('u', 'e', 'i', 'like', NULL, 1)$$, '22004'),
($$idem_set('u', 'e', 'i', 'like', true, 1, '{dislike,NULL}')$$, '22004'),
($$idem_set('u', 'e', 'i', 'like', true, 1, '{""}')$$, '22023'),
($$idem_set('u', 'e', 'i', 'like', true, 1,
	ARRAY[repeat('x', 513)])$$, '22023'),
($$idem_set('u', 'e', 'i', 'like', true, 1, '{dislike,like}')$$, '22023'),
($$idem_set('u', 'e', 'i', 'like', true, 1, '{Like}')$$, '00000'),
('idem_raise_claim_tokens(NULL)', '22004'),
('idem_raise_claim_tokens(4611686018427387904)', '22023'),
('idem_raise_claim_tokens(-1)', '00000'),
('idem_repair_outbox()', '00000'),
('idem_cleanup(0)', '22023'),
('idem_cleanup(-1)', '22023'),
('idem_cleanup(1)', '00000'),
('idem_cleanup(2147483647)', '00000'),
('idem_cleanup(NULL)', '00000'),
('idem_take_expired(NULL)', '22004'),
($$idem_take_expired('')$$, '22023'),
($$idem_take_expired('Keys')$$, '22023'),
($$idem_take_expired('keys', 0)$$, '22023'),
($$idem_take_expired('keys', -1)$$, '22023'),
($$idem_take_expired('keys', 1)$$, '00000'),
($$idem_take_expired('tokens', 2147483647)$$, '00000'),
($$idem_take_expired('messages', NULL)$$, '00000'),
('idem_stats_data()', '00000'),
('idem_stats_reset()', '00000'),
($$idem_try_append(NULL, 'phone', 1)$$, '22004'),
($$idem_try_append('order', NULL, 1)$$, '22004'),
($$idem_try_append('order', 'phone', NULL)$$, '22004'),
($$idem_try_append('', 'phone', 1)$$, '22023'),
($$idem_try_append('order', repeat('é', 257), 1)$$, '22023'),
($$idem_try_append('order', 'phone', 0)$$, '22023'),
($$idem_try_append('order', 'phone', 8, 0)$$, '22023'),
($$idem_try_append('order', 'phone', 9223372036854775807, 2)$$, '22023'),
($$idem_try_append('order', 'phone', 8, wait => '-1 s')$$, '22023'),
($$idem_try_append('order', 'phone', 8, wait => '300000 years')$$, '22023'),
($$idem_last_client_seq(NULL, 'phone')$$, '22004'),
($$idem_last_client_seq('order', '')$$, '22023'),
($$idem_once(NULL, 'token')$$, '22004'),
($$idem_once('form', NULL::text)$$, '22004'),
($$idem_once('form', '')$$, '22023'),
($$idem_once(repeat('s', 513), 'token')$$, '22023'),
($$idem_once('form', 'token', '-1 s')$$, '22023'),
($$idem_once_at(NULL, 'token')$$, '22004'),
($$idem_once_at('form', NULL)$$, '22004'),
($$idem_once_at('form', '')$$, '22023'),
($$idem_once_at(repeat('s', 513), 'token')$$, '22023'),
($$idem_once_many('form', NULL::text[])$$, '22004'),
($$idem_once_many('form', '{a,NULL}'::text[])$$, '22004'),
($$idem_once_many('form', '{a,""}'::text[])$$, '22023'),
($$idem_once_many('form', '{a}'::text[], '-1 s')$$, '22023'),
($$idem_publish(NULL, '1')$$, '22004'),
($$idem_publish('t', NULL)$$, '22004'),
($$idem_publish('', '1')$$, '22023'),
($$idem_publish('t', '1', '')$$, '22023'),
($$idem_publish('t', to_jsonb(array_fill(1e131071::numeric, '{8200}')))$$,
	'54000'),
($$idem_publish_many('{t}', '{1}', headers =>
	ARRAY[to_jsonb(array_fill(1e131071::numeric, '{8200}'))])$$, '54000'),
($$idem_publish('t', '1', repeat('k', 513))$$, '22023'),
($$idem_publish('t', '1', deliver_after => '-1 s')$$, '22023'),
($$idem_publish('t', '1', deliver_after => '300000 years')$$, '22008'),
($$idem_publish_many(NULL, '{1}')$$, '22004'),
($$idem_publish_many('{t}', '{1,NULL}')$$, '22004'),
($$idem_publish_many('{t,u}', '{1,2,3}')$$, '22023'),
($$idem_publish_many('{t,""}', '{1}')$$, '22023'),
($$idem_publish_many('{t}', '{1}', deliver_after => '-1 s')$$, '22023'),
($$idem_publish_many('{}', '{}')$$, '00000'),
('idem_outbox_take(0)', '22023'),
($$idem_outbox_take(lease => '-1 s')$$, '22023'),
($$idem_outbox_take(topics => '{t,NULL}')$$, '22004'),
($$idem_outbox_take(topics => '{t,""}')$$, '22023'),
($$idem_outbox_take(topics => '{contract,contract}')$$, '00000'),
('idem_outbox_ack(NULL)', '22004'),
($$idem_outbox_ack('{1,NULL}')$$, '22004'),
($$idem_outbox_ack('{{1,2}}')$$, '22023'),
('idem_outbox_nack(NULL)', '22004'),
($$idem_outbox_nack(1, retry_after => '-1 s')$$, '22023'),
($$idem_outbox_nack((SELECT max(id) FROM idem_outbox),
	retry_after => '300000 years')$$, '22008'),
($$idem_outbox_requeue('{1,NULL}')$$, '22004'),
($$idem_outbox_requeue('{{1,2}}')$$, '22023'),
($$idem_outbox_requeue('{}')$$, '00000'),
($$idem_outbox_ack('{}')$$, '00000'),
('idem_outbox_extend(NULL)', '22004'),
($$idem_outbox_extend('{1,NULL}')$$, '22004'),
($$idem_outbox_extend('{1}', attempts => '{NULL}')$$, '22004'),
($$idem_outbox_extend('{1,2}', attempts => '{1,2,3}')$$, '22023'),
($$idem_outbox_extend('{1}', '-1 s')$$, '22023'),
($$idem_outbox_extend('{}', attempts => '{1}')$$, '00000'),
('idem_outbox_release(NULL)', '22004'),
($$idem_outbox_release('{1}', '{NULL}')$$, '22004'),
($$idem_outbox_release('{1,2,3}', '{1,2}')$$, '22023'),
($$idem_outbox_fail(NULL, 1, 'error')$$, '22004'),
($$idem_outbox_fail(1, NULL, 'error')$$, '22004'),
('idem_outbox_fail(1, 1, NULL)', '22004'),
($$idem_outbox_fail(1, 1, 'error', counted => NULL)$$, '22004'),
($$idem_outbox_fail(1, 1, 'error', schedule => '{NULL}')$$, '22004'),
($$idem_outbox_fail(1, 1, 'error', schedule => '{-1 s}')$$, '22023'),
($$idem_outbox_fail(1, 1, 'error', max_age => '-1 s')$$, '22023');

-- Line breaks are for the reader only.
UPDATE functions SET arguments = regexp_replace(arguments, '\s+', ' ', 'g');
UPDATE tables SET columns = regexp_replace(columns, '\s+', ' ', 'g');
UPDATE types SET columns = regexp_replace(columns, '\s+', ' ', 'g');

CREATE TEMP TABLE records (
	state text,
	key text,
	token bigint
);
CREATE FUNCTION pg_temp.create_records() RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	record_state text;
	record_key text;
BEGIN
	DELETE FROM records;
	FOREACH record_state IN ARRAY ARRAY['live', 'abandoned', 'completed',
		'erased', 'failed', 'released', 'expired', 'other']
	LOOP
		record_key := 'order-number-' || record_state;
		INSERT INTO records
			SELECT record_state, record_key, claim_token
			FROM idem_claim('contract', record_key, lease =>
				CASE record_state WHEN 'abandoned' THEN '0' ELSE '1 hour' END
				::interval);
		CASE record_state
			WHEN 'completed', 'erased' THEN
				PERFORM idem_complete('contract', record_key, 200, 'done');
			WHEN 'failed' THEN
				PERFORM idem_fail('contract', record_key);
			WHEN 'released' THEN
				PERFORM idem_release('contract', record_key);
			ELSE
		END CASE;
	END LOOP;
	PERFORM idem_erase('contract', 'order-number-erased');
	UPDATE idem_keys SET expires_at = clock_timestamp() - interval '1 minute'
		WHERE key = 'order-number-expired';
	INSERT INTO records VALUES
		('never claimed', 'order-number-never', NULL);
	PERFORM idem_try_append('contract', 'phone', 1);
	PERFORM idem_publish('contract', '{}');
	INSERT INTO records
		SELECT 'message', NULL, max(id) FROM idem_outbox;
END
$$;
SELECT pg_temp.create_records() \gset

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
		CASE WHEN p.proisstrict THEN 'strict' END,
		CASE WHEN p.proparallel <>
				CASE p.provolatile WHEN 'v' THEN 'u' ELSE 's' END
			THEN 'parallel: ' || p.proparallel::text END)
	FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
	WHERE p.oid = function
);

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
CREATE TEMP VIEW procedures AS
	SELECT p.* FROM pg_proc AS p JOIN members AS m
		ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid;
CREATE TEMP VIEW relations AS
	SELECT c.* FROM pg_class AS c JOIN members AS m
		ON m.classid = 'pg_class'::regclass AND m.objid = c.oid;

-- The calls of "functions", with their arguments.
CREATE TEMP VIEW calls AS
	SELECT f.signature, f.name, f.who, split_part(f.access, ' ', 1) AS mode,
		f.tables, f.call, 'SELECT ' || f.call AS statement,
		CASE WHEN f.name ~ '^idem_(claim|run)' THEN 'order-number-some'
			ELSE r.key END AS key,
		r.token, m.token AS message
	FROM functions AS f, records AS r, records AS m
	WHERE r.state = 'live' AND m.state = 'message' AND f.call IS NOT NULL;

-- The calls with a scope and a key.  They wait for nobody.
CREATE TEMP VIEW key_functions AS
	SELECT signature, call, CASE
		WHEN name IN ('idem_claim', 'idem_run') THEN 'claim'
		WHEN name IN ('idem_checkpoint', 'idem_heartbeat') THEN 'renew'
		WHEN mode = 'read' THEN 'read'
		WHEN who = 'administrator' THEN 'administer'
		ELSE substr(name, 6) END AS kind
	FROM calls WHERE call LIKE '%($1, $2%';

CREATE FUNCTION pg_temp.noop() RETURNS trigger
LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';

BEGIN;
CREATE ROLE idem_test_app;
CREATE ROLE idem_test_stranger;
CREATE ROLE idem_test_installer;
CREATE ROLE idem_test_monitor IN ROLE pg_monitor;
CREATE FUNCTION handler(request jsonb) RETURNS jsonb
LANGUAGE sql RETURN to_jsonb(current_user::text);

-- Each row above makes one or more assertions.  The last number counts those
-- that no row makes.
SELECT plan((
	(SELECT 4 * count(*) FROM functions)
	+ (SELECT 9 * count(*) + sum(cardinality(tables)) FROM calls)
	+ (SELECT count(*) FROM refusals)
	+ (SELECT 14 * count(*) + 30 * count(*) FILTER (
			WHERE kind IN ('complete', 'renew', 'fail', 'release'))
		FROM key_functions)
	+ (SELECT 23 * count(*) FROM tables) + (SELECT 2 * count(*) FROM types)
	+ 331)::int);

--
-- Functions
--
SELECT is(pg_temp.arguments_of(to_regprocedure(signature)),
	arguments, signature || ' has the promised arguments')
FROM functions;
SELECT is(
	pg_temp.short_types(pg_get_function_result(to_regprocedure(signature))),
	result,
	signature || ' has the promised result')
FROM functions;
SELECT is(pg_temp.attributes_of(to_regprocedure(signature)), attributes,
	signature || ' has the promised language and labels')
FROM functions;
SELECT ok(
	length(obj_description(to_regprocedure(signature), 'pg_proc')) > 20,
	signature || ' has a comment')
FROM functions;
SELECT set_eq(
	'SELECT oid FROM procedures',
	'SELECT to_regprocedure(signature)::oid FROM functions',
	'the extension has these functions and no other');
SELECT set_eq(
	'SELECT oid::regprocedure, proconfig FROM procedures WHERE prosecdef',
	$$SELECT name::regprocedure, '{"search_path=pg_catalog, pg_temp"}'::text[]
	FROM (VALUES ('idem_metric_samples()'), ('idem_metrics()'), ('idem_health()'),
		('idem_abandoned(interval)'),
		('idem_outbox_dead(integer)'), ('idem_outbox_last_error(bigint)'),
		('idem_outbox_topics(integer)'),
		('idem_grant_as_owner(regrole)'),
		('idem_grant_relay_as_owner(regrole)'),
		('idem_grant_monitor_as_owner(regrole)'),
		('idem_revoke_as_owner(regrole)')) AS v (name)$$,
	'SECURITY DEFINER is for monitoring, relays, and to grant parts of the interface; '
	'with a safe search_path');
SELECT is_empty(
	'SELECT oid::regprocedure FROM procedures WHERE proleakproof',
	'no function claims to be leakproof');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM procedures
	WHERE prokind <> 'f'$$,
	'all are plain functions');
SELECT is_empty(
	$$SELECT oid::regprocedure, prosrc FROM procedures
	WHERE probin IS NOT NULL AND (probin <> 'idempotency'
		OR prosrc !~ ('^' || proname || '(_(text|jsonb|bytea))?$'))$$,
	'C symbols carry the SQL name');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM procedures
	WHERE pronamespace <> (SELECT extnamespace FROM pg_extension
		WHERE extname = 'idempotency')$$,
	'all functions are in the extension''s schema');
SELECT is_empty(
	$$SELECT oid::regprocedure FROM procedures
	WHERE proargnames IS NULL AND pronargs > 0 OR '' = ANY (proargnames)$$,
	'every argument has a name');

--
-- Tables: columns in an order that needs no padding, primary keys
--
SELECT is(pg_temp.columns_of(name::text::regclass),
	columns, name || ' has the promised columns')
FROM (SELECT name, columns FROM tables UNION ALL TABLE types) AS r;
SELECT col_is_pk(name, primary_key, name || ' has its primary key')
FROM tables;
SELECT indexes_are(name, indexes, name || ' has these indexes and no other')
FROM tables;

SELECT is(pg_temp.columns_of('idem_stats'),
	'datname name, ' || replace(arguments, 'OUT ', ''),
	'idem_stats shows idem_stats_data, and the name of the database')
FROM functions WHERE name = 'idem_stats_data';

--
-- Storage
--
SELECT is(pg_get_indexdef(index::regclass),
	'CREATE INDEX ' || index || ' ON public.' || definition,
	index || ': ' || description)
FROM (VALUES
	('idem_keys_expires_at', 'idem_keys USING btree (expires_at)',
		'expires_at is indexed for the cleanup'),
	('idem_keys_resumable', 'idem_keys USING btree (attempt, resume_at) '
		'WHERE (resume_at IS NOT NULL)',
		'claims with a request by when they can be resumed'),
	('idem_keys_resumable_scopes',
		'idem_keys USING btree (scope, attempt, resume_at) '
		'WHERE (resume_at IS NOT NULL)',
		'those of a scope by when they can be resumed'),
	('idem_tokens_expires_at', 'idem_tokens USING btree (expires_at)',
		'expires_at is indexed for the cleanup'),
	('idem_outbox_due', 'idem_outbox USING btree (available_at) '
		'WHERE in_due_index',
		'messages to be looked at by when they are due'),
	('idem_outbox_topics', 'idem_outbox USING btree (topic, available_at) '
		'WHERE in_due_index',
		'those of a topic by when they are due'),
	('idem_outbox_lanes', 'idem_outbox USING btree (key_hash, id) '
		'WHERE ((state = ''pending''::text) AND (key_hash IS NOT NULL))',
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
	$$SELECT name, options COLLATE "default" FROM tables
	ORDER BY name$$,
	'fill factors leave room for updates in place, autovacuum keeps up');
SELECT set_eq(
	'SELECT relname, relkind FROM relations',
	$$SELECT name, 'r'::"char" FROM tables
	UNION ALL VALUES ('idem_claim_tokens'::name, 'S'::"char"),
		('idem_outbox_ids', 'S'), ('idem_stats', 'v')$$,
	'the extension has these tables, sequences and view and no other');
SELECT is_empty(
	$$SELECT pg_describe_object(classid, objid, 0) FROM members
	WHERE classid NOT IN ('pg_proc'::regclass, 'pg_class'::regclass)
		AND NOT (classid = 'pg_type'::regclass AND objid IN (
			SELECT name::regtype FROM types))$$,
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
	$$SELECT name, '' COLLATE "default" FROM (SELECT name FROM tables
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
	$$SELECT attrelid::regclass, attname FROM pg_attribute JOIN tables
		ON attrelid = name::regclass
	WHERE attnum > 0 AND NOT attisdropped
		AND col_description(attrelid, attnum) IS NULL$$,
	'each column of each table has a comment');

--
-- Types and extension
--
SELECT is((SELECT typtype::text FROM pg_type WHERE typname = name),
	'c', name || ' is a composite type')
FROM types;
SELECT is((SELECT extrelocatable FROM pg_extension
	WHERE extname = 'idempotency'), false,
	'the extension is not relocatable');
SELECT matches((SELECT extversion FROM pg_extension WHERE extname = 'idempotency'),
	'^[0-9]+\.[0-9]+(-portable)?$', 'its version has two numbers');
SELECT isnt((SELECT obj_description(oid, 'pg_extension') FROM pg_extension
	WHERE extname = 'idempotency'), NULL,
	'the extension has a comment');
SELECT throws_ok('ALTER EXTENSION idempotency SET SCHEMA tap', '0A000',
	NULL, 'it cannot be moved to another schema');
SELECT throws_ok('DROP TABLE idem_keys', '2BP01', NULL,
	'its tables cannot be dropped without it');

--
-- The reference: the table of docs/reference.md that has a line for each
-- function, and what the server does.  Functions for administrators that have
-- no line are the extension's own, of which test/readme has the list.
--
\ir include/glance.sql
SELECT is_empty(
	'SELECT name FROM glance GROUP BY name HAVING count(*) > 1',
	'no function has two lines');
SELECT is_empty(
	'SELECT name FROM glance EXCEPT SELECT name FROM calls',
	'the functions that have a line exist, and are called below');
SELECT is_empty(
	$$SELECT name FROM functions
	WHERE who <> 'administrator' AND name <> 'idem_stats_data'
	EXCEPT SELECT name FROM glance$$,
	'what is given to an application or a monitor has a line');
SELECT is_empty(
	$$SELECT name FROM glance
	WHERE waits_for = '' OR holds = '' OR errors = '{""}'$$,
	'nothing is left open');
-- What is said of rows comes after the tables.
SELECT is_empty($$SELECT g.name, g.who, g.read_only, g.holds, c.who, c.mode,
		c.tables
	FROM glance AS g JOIN calls AS c USING (name)
	WHERE g.who <> c.who
		OR g.read_only <> CASE c.mode WHEN 'read' THEN 'yes' ELSE '25006' END
		OR ARRAY(SELECT t[1]
			FROM regexp_matches(split_part(g.holds, ';', 1), '`(.*?)`', 'g') AS t
			ORDER BY 1)
		<> CASE c.mode WHEN 'write' THEN c.tables ELSE '{}' END$$,
	'who may call it, whether it writes, and which tables it locks is in its '
	'line');
SELECT is(o.outcome || ': ' || o.tables, 'allowed: ' || CASE c.mode
		WHEN 'write' THEN array_to_string(c.tables, ', ') ELSE '' END,
	signature || ' locks these tables and no other')
FROM calls AS c, LATERAL pg_temp.attempt(current_user, statement,
	key => key, token => token, message => message) AS o;
SELECT is(left(o.outcome, 6),
	CASE c.mode WHEN 'read' THEN 'allowe' ELSE '25006:' END,
	format('%s of a %s key in a read-only transaction', signature, v.state))
FROM calls AS c, (VALUES ('new', 'order-number-some'),
		('live', 'order-number-live')) AS v (state, key),
	LATERAL pg_temp.attempt(current_user, statement,
		'SET LOCAL transaction_read_only = on', key => v.key, token => token,
		message => message) AS o
WHERE v.key = c.key OR c.call LIKE '%($1, $2%';
SELECT is(left(o.outcome, 6), '55000:',
	format('%s, trigger on %s: 55000', signature, relation))
FROM calls AS c, unnest(tables) AS relation,
	LATERAL pg_temp.attempt(current_user, statement,
		format('CREATE TRIGGER t BEFORE UPDATE ON %s FOR EACH ROW
			EXECUTE FUNCTION pg_temp.noop()', relation),
		key => key, token => token, message => message) AS o;

--
-- Scope and key
--
SELECT is(pg_temp.sqlstate_of(call, scope => scope, key => key), sqlstate,
	signature || ': ' || description || ': ' || sqlstate)
FROM key_functions, (VALUES
	(NULL, 'order-number-good', '22004', 'NULL scope'),
	('', 'order-number-good', '22023', 'empty scope'),
	(repeat('é', 257), 'order-number-good', '22023', 'scope of 514 bytes'),
	(repeat('s', 16384), 'order-number-good', '22023', 'scope of 16 kB'),
	('contract', NULL, 'ID001', 'NULL key'),
	('contract', '', 'ID001', 'empty key'),
	('contract', 'key-of-15-chars', 'ID001', 'key too short'),
	('contract', repeat('k', 129), 'ID001', 'key too long'),
	('contract', 'key with blanks in it', 'ID001', 'key with blanks'),
	('contract', 'schlüssel-mit-umlaut', 'ID001', 'key with an umlaut')
) AS v (scope, key, sqlstate, description);

--
-- Claim tokens: what each state of the record answers to each token
--
SELECT is(
	pg_temp.sqlstate_of(f.call, key => r.key, token => CASE v.token
		WHEN 'right token' THEN r.token
		WHEN 'other token' THEN
			(SELECT o.token FROM records AS o WHERE o.state = 'other')
		WHEN 'future token' THEN 9223372036854775807
		WHEN 'token zero' THEN 0 END),
	e.sqlstate,
	format('%s: %s, %s: %s', f.signature, v.state, v.token, e.sqlstate))
FROM (VALUES
	--				complete, checkpoint and heartbeat, fail, release
	('never claimed', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('never claimed', 'future token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('never claimed', 'token zero', 'ID004', 'ID004', 'ID004', 'ID004'),
	('released', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('released', 'right token', 'ID004', 'ID004', 'ID004', '00000'),
	('released', 'future token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'right token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'other token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('live', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'right token', '00000', '00000', '00000', '00000'),
	('live', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'future token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'token zero', 'ID003', 'ID003', 'ID003', 'ID003'),
	('abandoned', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('abandoned', 'right token', '00000', '00000', '00000', '00000'),
	('abandoned', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('completed', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('completed', 'right token', '00000', 'ID004', 'ID004', 'ID004'),
	('completed', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('erased', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('erased', 'right token', '00000', 'ID004', 'ID004', 'ID004'),
	('erased', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('failed', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('failed', 'right token', 'ID004', 'ID004', '00000', 'ID004'),
	('failed', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('own', 'no token', '00000', '00000', '00000', '00000'),
	('own', 'right token', '00000', '00000', '00000', '00000'),
	('own', 'other token', 'ID003', 'ID003', 'ID003', 'ID003')
) AS v (state, token, complete, renew, fail, release)
JOIN records AS r ON r.state = v.state
JOIN key_functions AS f
	ON f.kind IN ('complete', 'renew', 'fail', 'release')
CROSS JOIN LATERAL (VALUES (CASE f.kind WHEN 'complete' THEN v.complete
	WHEN 'renew' THEN v.renew WHEN 'fail' THEN v.fail
	WHEN 'release' THEN v.release END)) AS e (sqlstate);

-- A claim that this transaction has renewed is not one that it has taken.
SELECT is(pg_temp.sqlstate_of(f.call, key => r.key,
		before => format('SELECT idem_heartbeat(''contract'', %L,
			claim_token => %s)', r.key, r.token)), 'ID003',
	f.signature || ': live, renewed in this transaction, no token: ID003')
FROM records AS r JOIN key_functions AS f
	ON f.kind IN ('complete', 'renew', 'fail', 'release')
WHERE r.state = 'live';

--
-- The other arguments
--
INSERT INTO records
	SELECT 'own', 'order-number-own', claim_token
	FROM idem_claim('contract', 'order-number-own');
SET LOCAL idempotency.max_response_size = '1kB';
SELECT is(pg_temp.sqlstate_of(call, key => CASE WHEN call ~ '^idem_(claim|run)'
		THEN 'order-number-some' ELSE 'order-number-own' END), sqlstate,
	call || ': ' || sqlstate)
FROM refusals;
SELECT idem_fail('contract', 'order-number-own',
	'x' || repeat('é', 10000)) AS failed \gset
SELECT is(error, 'x' || repeat('é', 511),
	'idem_fail: a long error text is cut between characters')
FROM idem_lookup('contract', 'order-number-own');

--
-- Handlers of idem_run
--
CREATE TYPE other_response AS (
	status bigint,
	headers json,
	body text
);
CREATE DOMAIN document AS jsonb;
SELECT is(pg_temp.sqlstate_of(
		'idem_run($1, $2, ''h''::regproc::regprocedure, ''{}'')',
		format('CREATE %s LANGUAGE sql AS %L', h, body)), sqlstate,
	'idem_run: handler ' || description || ': ' || sqlstate)
FROM (VALUES
	('FUNCTION h() RETURNS jsonb', $$SELECT '{}'::jsonb$$, '42804',
		'without an argument'),
	('FUNCTION h(a jsonb, b jsonb DEFAULT NULL) RETURNS jsonb', 'SELECT a',
		'42804', 'with two arguments'),
	('FUNCTION h(a json) RETURNS jsonb', 'SELECT a::jsonb', '42804',
		'with an argument of another type'),
	('FUNCTION h(a jsonb) RETURNS text', 'SELECT a::text', '42804',
		'that returns text'),
	('FUNCTION h(a jsonb) RETURNS void', '', '42804', 'that returns nothing'),
	('FUNCTION h(a jsonb) RETURNS record',
		$$SELECT 200, NULL::json, 'x'::text$$, '42804',
		'that returns any record'),
	('FUNCTION h(a jsonb) RETURNS document', 'SELECT a', '42804',
		'that returns a domain'),
	('FUNCTION h(a jsonb) RETURNS SETOF jsonb', 'SELECT a', '42804',
		'that returns a set'),
	('FUNCTION h(a jsonb) RETURNS other_response',
		$$SELECT 200::bigint, NULL::json, 'x'::text$$, '42804',
		'that returns another row'),
	('PROCEDURE h(a jsonb)', '', '42804', 'that is a procedure'),
	('FUNCTION h(a jsonb) RETURNS jsonb', 'SELECT NULL::jsonb', '22004',
		'that returned NULL'),
	('FUNCTION h(a jsonb) RETURNS idem_response',
		'SELECT NULL::idem_response', '22004', 'that returned a NULL row'),
	('FUNCTION h(a jsonb) RETURNS idem_response',
		$$SELECT NULL::int, NULL::json, 'x'$$, '22004',
		'that returned no status'),
	('FUNCTION h(a jsonb) RETURNS idem_response',
		'SELECT 204, NULL::json, NULL', '00000',
		'that returned nothing but a status'),
	('FUNCTION h(a jsonb) RETURNS jsonb STRICT', 'SELECT a', '00000',
		'that is STRICT'),
	('FUNCTION h(a jsonb) RETURNS idem_response',
		$$SELECT 200, NULL::json, repeat('x', 1025)$$, '54000',
		'that returned a body too large'),
	('FUNCTION h(a jsonb) RETURNS jsonb',
		$$SELECT to_jsonb(repeat('x', 1023))$$, '54000',
		'that returned a jsonb too large'),
	('FUNCTION h(a jsonb) RETURNS idem_response',
		$$SELECT 200, to_json(repeat('x', 1023)), 'x'$$, '54000',
		'that returned headers too large')
) AS v (h, body, sqlstate, description);
SELECT is(pg_temp.sqlstate_of(
		'idem_run($1, $2, ''h(jsonb)'', ''{}'')',
		format('CREATE FUNCTION h(a jsonb) RETURNS jsonb LANGUAGE sql AS %L',
			replace(body, 'KEY', $$'contract', 'order-number-some'$$))),
	sqlstate, format('idem_run: handler that %s itself: %s', does, sqlstate))
FROM (VALUES
	('SELECT to_jsonb(idem_forget(KEY))', 'ID004', 'forgot the key'),
	('SELECT to_jsonb(idem_fail(KEY))', 'ID004', 'failed the key'),
	('SELECT to_jsonb(idem_release(KEY))', 'ID004', 'released the key'),
	('SELECT to_jsonb(idem_complete(KEY, 200))', '55000', 'completed the key'),
	('SELECT to_jsonb(idem_complete(KEY, 200));
		SELECT to_jsonb(idem_erase(KEY))', '55000',
		'completed and erased the key'),
	('SELECT idem_fail(KEY);
		SELECT to_jsonb(claim_token) FROM idem_claim(KEY)', 'ID003',
		'failed and claimed the key')
) AS v (body, sqlstate, does);
RESET idempotency.max_response_size;

--
-- Request identity
--
SELECT is(pg_temp.sqlstate_of(format('idem_request_hash(%s, %s, %s)',
		method, path, body)), sqlstate,
	format('idem_request_hash: %s, %s: %s', description, body, sqlstate))
FROM (VALUES ('NULL::text'), ('NULL::jsonb'), ('''{}''::text'),
		('''{}''::jsonb'), ('''\x00''::bytea')) AS b (body),
	(VALUES ('NULL', '''/''', '22004', 'NULL method'),
		('''GET''', 'NULL', '22004', 'NULL path'),
		('''''', '''/''', '22023', 'empty method'),
		('''GE T''', '''/''', '22023', 'method with a blank'),
		('''GET:''', '''/''', '22023', 'method with a colon'),
		('''GÉT''', '''/''', '22023', 'method beyond ASCII'),
		('''!#$%%&''''*+-.^_`|~09''', '''/''', '00000', 'any HTTP token'))
	AS v (method, path, sqlstate, description);
SELECT is(idem_canonical_json(NULL), NULL,
	'idem_canonical_json: NULL of NULL');
SELECT is(pg_column_size(idem_request_hash('POST', '/', '1e131071')), 36,
	'a hash of 32 bytes, whatever the number');

--
-- User actions
--
SELECT is(pg_temp.sqlstate_of(format(f.call, VARIADIC
		CASE WHEN p.n IS NULL THEN a.arguments
			ELSE a.arguments[:p.n - 1] || v.value || a.arguments[p.n + 1:]
		END)),
	v.sqlstate,
	format('%s: %s %s: %s', split_part(f.call, '(', 1), p.name,
		v.description, v.sqlstate))
FROM (VALUES ('idem_try_advance(%L, %L, %L, 1)', 3),
		('idem_toggle(%L, %L, %L, %L, 1)', 4),
		('idem_set(%L, %L, %L, %L, true, 1)', 4),
		('idem_is_active(%L, %L, %L, %L)', 4),
		('idem_action_states(%L, %L, ARRAY[%L])', 3),
		('idem_forget_user(%L)', 1)) AS f (call, names),
	(VALUES (1, 'user_id'), (2, 'entity_type'), (3, 'entity_id'),
		(4, 'action_type')) AS p (n, name),
	(VALUES (ARRAY['contract', 'post', '42', 'like'])) AS a (arguments),
	(VALUES (NULL, '22004', 'NULL'),
		('', '22023', 'empty'),
		(repeat('é', 257), '22023', 'of 514 bytes'),
		(repeat('s', 16384), '22023', 'of 16 kB'),
		(repeat('s', 512), '00000', 'of 512 bytes'))
	AS v (value, sqlstate, description)
WHERE p.n <= f.names;
SET LOCAL idempotency.max_action_id_lead = '1h';
SELECT is(pg_temp.sqlstate_of(call), 'ID005',
	split_part(call, '(', 1) || ': an action id ahead of the clock: ID005')
FROM (VALUES
	($$idem_try_advance('u', 'e', 'i', 9223372036854775807)$$),
	($$idem_toggle('u', 'e', 'i', 'like', 9223372036854775807)$$),
	($$idem_set('u', 'e', 'i', 'like', true, 9223372036854775807)$$)
) AS v (call);
RESET idempotency.max_action_id_lead;

--
-- Too many new keys
--
SET LOCAL idempotency.max_new_keys_per_minute = 1;
SELECT is(outcome, 'new', 'a first new key')
FROM idem_claim('contract', 'order-number-first');
SELECT is(pg_temp.sqlstate_of(call, key => key, token => token), sqlstate,
	format('%s: too many new keys, %s: %s', signature, key, sqlstate))
FROM key_functions, LATERAL (
	SELECT 'order-number-some', NULL::bigint,
		CASE kind WHEN 'claim' THEN 'ID002' WHEN 'read' THEN '00000'
			WHEN 'administer' THEN '00000' ELSE 'ID004' END
	UNION ALL
	SELECT key, records.token, '00000' FROM records WHERE state = 'live'
) AS v (key, token, sqlstate);
RESET idempotency.max_new_keys_per_minute;

--
-- Grants
--
SELECT is(pg_temp.sqlstate_of(format('%s(%s)', function, grantee)), sqlstate,
	format('%s(%s): %s', function, grantee, sqlstate))
FROM (VALUES ('idem_grant'), ('idem_revoke'), ('idem_check_grantee'))
	AS f (function),
	(VALUES ('NULL', '22004'),
		('''idem_test_no_role''', '42704'),
		('''public''', '42704'),
		('0', '42704'),
		('''-''', '42704'),
		('4294967295::oid', '42704'),
		('current_user::regrole', '00000')) AS v (grantee, sqlstate);

--
-- Numbers that cannot rise
--
SELECT is(pg_temp.sqlstate_of(call,
		'UPDATE idem_aggregates SET version = 9223372036854775807'),
	sqlstate, call || ' at the last version: ' || sqlstate)
FROM (VALUES
	($$idem_try_append('contract', 'phone', 2)$$, '22003'),
	($$idem_try_append('contract', 'phone', 1)$$, '00000'),
	($$idem_try_append('contract', 'phone', 2, expected_version => 1)$$,
		'00000')
) AS v (call, sqlstate);

--
-- Altered tables: what a direct write would skip is refused
--
SELECT is(pg_temp.sqlstate_of('idem_claim($1, $2)', before => change),
	'55000', 'idem_claim, ' || description || ': 55000')
FROM (VALUES
	('CREATE TRIGGER t BEFORE INSERT ON idem_keys
		FOR EACH ROW EXECUTE FUNCTION pg_temp.noop()',
		'trigger on idem_keys'),
	('CREATE TRIGGER t AFTER UPDATE ON idem_keys
		FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.noop()',
		'statement trigger on idem_keys'),
	('CREATE TABLE child (scope text, key text,
		FOREIGN KEY (scope, key) REFERENCES idem_keys)',
		'foreign key to idem_keys'),
	('ALTER TABLE idem_keys ENABLE ROW LEVEL SECURITY',
		'row security on idem_keys'),
	('ALTER TABLE idem_keys ADD CHECK (attempt < 10)',
		'check constraint on idem_keys'),
	('CREATE RULE r AS ON INSERT TO idem_keys DO INSTEAD NOTHING',
		'rule on idem_keys'),
	('CREATE TABLE heir () INHERITS (idem_keys)',
		'table that inherits idem_keys'),
	('ALTER TABLE idem_keys ADD COLUMN tenant int',
		'column added to idem_keys'),
	('ALTER TABLE idem_keys DROP COLUMN error',
		'column dropped from idem_keys'),
	('ALTER TABLE idem_keys ALTER response_status TYPE bigint',
		'column of idem_keys of another type'),
	('UPDATE idem_keys SET request_hash = ''\x00'';
		ALTER TABLE idem_keys ALTER request_hash SET NOT NULL',
		'column of idem_keys made NOT NULL'),
	('ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey',
		'primary key of idem_keys dropped')
) AS v (change, description);
SELECT is(pg_temp.sqlstate_of(call, key => key,
		token => (SELECT token FROM records AS r WHERE r.key = v.key),
		before => 'CREATE PUBLICATION contract FOR TABLE idem_keys;
			ALTER TABLE idem_keys REPLICA IDENTITY NOTHING'),
	sqlstate, description || ': ' || sqlstate)
FROM (VALUES
	('idem_claim($1, $2)', 'order-number-failed', '55000',
		'a takeover that a subscriber could not follow'),
	('idem_complete($1, $2, 200, claim_token => $3)', 'order-number-live',
		'55000', 'a completion that a subscriber could not follow'),
	('idem_forget($1, $2)', 'order-number-live', '55000',
		'a deletion that a subscriber could not follow'),
	('idem_claim($1, $2)', 'order-number-some', '00000',
		'an insertion, which it can')
) AS v (call, key, sqlstate, description);
SELECT is(pg_temp.sqlstate_of(call, key => 'order-number-live',
		token => (SELECT token FROM records WHERE state = 'live')),
	'00000', signature || ' works on the table as it was')
FROM key_functions;

--
-- The messages of errors
--
SELECT cmp_ok(count(*), '>', 300::bigint,
	'the errors above have been looked at')
FROM errors;
CREATE TEMP VIEW said AS
	SELECT *, concat_ws(E'\n', message, detail, hint, context) AS everything
	FROM errors;
-- The server shows a row that a constraint of the operator's refuses.
SELECT is_empty($$SELECT call, message, detail FROM said
	WHERE length(key) > 4 AND position(key IN everything) > 0 AND sqlstate <> '23502'$$,
	'no error shows a whole key');
SELECT is_empty($$SELECT call, message, detail FROM said
	WHERE sqlstate LIKE 'ID%' AND length(key) > 4
		AND position(left(key, 5) IN everything) > 0$$,
	'no error of class ID shows more than four characters of a key');
SELECT is_empty($$SELECT call, message FROM said
	WHERE length(key) > 4 AND sqlstate IN ('ID001', 'ID003', 'ID004')
		AND (position(left(key, 4) IN message) = 0
			OR message !~ ('\m' || length(key) || '\M'))$$,
	'errors about a key show four characters and the length');
SELECT is_empty($$SELECT call, sqlstate, message FROM said
	WHERE sqlstate LIKE 'ID%' AND (detail IS NULL OR hint IS NULL)
		AND key IS NOT NULL$$,
	'errors of class ID have a detail and a hint');
SELECT is_empty($$SELECT DISTINCT sqlstate, message FROM said
	WHERE message ~ '^[A-Z][a-z]' OR message ~ '\.$'$$,
	'messages begin in lower case and end without a full stop');
SELECT is_empty($$SELECT DISTINCT sqlstate, detail, hint FROM said
	WHERE sqlstate NOT IN ('22P02', '22P05')
		AND (detail <> '' AND detail !~ '^[A-Z"].*\.$'
			OR hint <> '' AND hint !~ '^[A-Z].*\.$')$$,
	'details and hints are sentences');
SELECT is_empty($$SELECT call, message FROM said
	WHERE message ~ 'idem_[a-z_]+\('$$,
	'messages name no function');
SELECT is_empty('SELECT * FROM unsaid_errors',
	'each error is in docs/reference.md, in the line of its function');

-- A key of four characters or less is a key, too.
SELECT is_empty($$SELECT key, message FROM said
	WHERE sqlstate = 'ID001' AND key = ANY (ARRAY['zq', 'zqxj'])
		AND position(key IN everything) > 0$$,
	'a short key is not shown whole either: ' || string_agg(
		pg_temp.sqlstate_of('idem_claim($1, $2)', key => key), ', '))
FROM (VALUES ('zq'), ('zqxj')) AS v (key);

--
-- Privileges
--
-- Every privilege on the extension's objects.  A table's or a view's row type
-- counts with it, whether it is a member by itself or not.
CREATE TEMP VIEW privileges AS
	SELECT o.object, a.grantee, a.privilege_type, a.is_grantable
	FROM (
		SELECT p.oid::regprocedure::text,
			coalesce(p.proacl, acldefault('f', p.proowner)), p.proowner
		FROM pg_proc AS p JOIN members AS m
			ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
		UNION ALL
		SELECT c.relname, coalesce(c.relacl, acldefault(
			CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char",
			c.relowner)), c.relowner
		FROM pg_class AS c JOIN members AS m
			ON m.classid = 'pg_class'::regclass AND m.objid = c.oid
		UNION ALL
		SELECT 'type ' || t.typname,
			coalesce(t.typacl, acldefault('T', t.typowner)), t.typowner
		FROM pg_type AS t JOIN members AS m
			ON m.classid = 'pg_type'::regclass AND m.objid = t.oid
				OR m.classid = 'pg_class'::regclass AND m.objid = t.typrelid
	) AS o (object, acl, owner),
	aclexplode(o.acl) AS a
	WHERE a.grantee <> o.owner;
-- The script's grants to the installer and to the owner of the database, with
-- grant option ...
CREATE TEMP VIEW ownership AS
	SELECT oid::regprocedure::text AS object, 'EXECUTE' AS privilege_type,
		true AS is_grantable
	FROM procedures
	UNION ALL
	SELECT relname, 'SELECT', true FROM relations
	UNION ALL
	SELECT 'type ' || name, 'USAGE', true FROM types;
-- ... to monitoring roles ...
CREATE TEMP VIEW monitoring AS
	SELECT to_regprocedure(signature)::text AS object,
		'EXECUTE' AS privilege_type, false AS is_grantable, who
	FROM functions WHERE who IN ('monitor', 'pg_monitor', 'monitor, relay')
	UNION ALL VALUES ('idem_stats', 'SELECT', false, 'monitor');
-- ... and to applications: the functions, what they return, and what handlers
-- return.
CREATE TEMP VIEW application AS
	SELECT to_regprocedure(signature)::text AS object,
		'EXECUTE' AS privilege_type, false AS is_grantable
	FROM functions WHERE who = 'application'
	UNION
	SELECT 'type ' || name, 'USAGE', false
	FROM types
	WHERE name = 'idem_response' OR EXISTS (SELECT FROM functions
		WHERE who = 'application' AND result ~ (types.name || '$'));
CREATE TEMP TABLE table_accesses (
	statement text
);
INSERT INTO table_accesses
SELECT format(statement, name, split_part(columns, ' ', 1))
FROM tables,
	(VALUES ('SELECT FROM %s'), ('INSERT INTO %s DEFAULT VALUES'),
		('UPDATE %s SET %s = DEFAULT'), ('DELETE FROM %s'),
		('TRUNCATE %s'), ('LOCK %s')) AS s (statement);
INSERT INTO table_accesses
SELECT format(statement, name)
FROM (VALUES ('idem_claim_tokens'), ('idem_outbox_ids')) AS n (name),
	(VALUES ('SELECT FROM %s'), ('SELECT nextval(''%s'')'),
		('SELECT setval(''%s'', 1)')) AS s (statement);
INSERT INTO table_accesses VALUES
	('SELECT FROM idem_stats'),
	('DROP VIEW idem_stats'),
	('ALTER TABLE idem_keys ADD COLUMN tenant text'),
	('DROP TABLE idem_keys'),
	('CREATE INDEX ON idem_keys (claim_token)');

-- The role can call the functions of these groups, and no others.
CREATE FUNCTION pg_temp.may_call(role name, who text[], title text)
RETURNS SETOF text
LANGUAGE sql AS $$
	SELECT is((pg_temp.attempt(role, statement, key => key,
			token => token, message => message)).outcome,
		CASE WHEN calls.who = ANY (may_call.who) THEN 'allowed'
			ELSE '42501: permission denied for function ' || name END,
		title || ': ' || signature)
	FROM calls
$$;

--
-- Nobody but the installer has anything
--
SELECT is_empty(
	'SELECT * FROM privileges WHERE grantee = 0',
	'nothing is granted to PUBLIC');
SELECT set_eq(
	$$SELECT grantee::regrole, object, privilege_type, is_grantable
	FROM privileges
	WHERE grantee <> (SELECT extowner FROM pg_extension
		WHERE extname = 'idempotency')$$,
	$$SELECT 'pg_database_owner'::regrole AS grantee, * FROM ownership
	UNION ALL SELECT 'pg_monitor', object, privilege_type, is_grantable
	FROM monitoring$$,
	'nothing is granted to anybody but the installing role and the owner of '
	'the database, and the statistics to pg_monitor');
SELECT is_empty(
	$$SELECT a.attrelid::regclass, a.attname
	FROM pg_attribute AS a JOIN members AS m
		ON m.classid = 'pg_class'::regclass AND m.objid = a.attrelid
	WHERE a.attacl IS NOT NULL$$,
	'no column is granted to anybody');
-- A stranger's table with a column of a row type would stand in the way of
-- DROP EXTENSION, and of any change to the table.
SELECT results_eq(
	format($$SELECT has_type_privilege('idem_test_stranger', %L, 'USAGE'),
		has_type_privilege('idem_test_monitor', %L, 'USAGE')$$, name, name),
	'VALUES (false, false)',
	'the row type of ' || name || ' is granted to nobody')
FROM (SELECT name FROM tables UNION ALL VALUES ('idem_stats')) AS r;
SELECT is_empty(
	$$SELECT pg_describe_object(classid, objid, 0) FROM members
	WHERE obj_description(objid, classid::regclass::name) IS NULL$$,
	'every object has a comment');

SELECT pg_temp.may_call('idem_test_stranger', '{}', 'without a grant');

--
-- idem_grant gives the application's part, and nothing else
--
SELECT idem_grant('idem_test_app') \gset
SELECT set_eq(
	$$SELECT object, privilege_type, is_grantable FROM privileges
	WHERE grantee = 'idem_test_app'::regrole$$,
	'TABLE application',
	'idem_grant grants exactly the functions of the interface, and the types '
	'that they return');
SELECT set_eq(
	'SELECT idem_application_functions()',
	$$SELECT object::regprocedure FROM application
	WHERE privilege_type = 'EXECUTE'$$,
	'idem_application_functions names them');
SELECT set_eq(
	'SELECT idem_application_types()',
	$$SELECT substr(object, 6)::regtype FROM application
	WHERE privilege_type = 'USAGE'$$,
	'idem_application_types names these');
SELECT ok(has_schema_privilege('idem_test_app',
	(SELECT extnamespace FROM pg_extension WHERE extname = 'idempotency'),
	'USAGE'), 'with idem_grant: USAGE on the schema');
SELECT ok(NOT has_schema_privilege('idem_test_app',
	(SELECT extnamespace FROM pg_extension WHERE extname = 'idempotency'),
	'CREATE'), 'with idem_grant: no CREATE on the schema');
SELECT pg_temp.may_call('idem_test_app', '{application}', 'with idem_grant');
SELECT is(left(pg_temp.outcome_of('idem_test_app', statement), 6), '42501:',
	'with idem_grant: ' || statement || ': 42501')
FROM table_accesses;
SELECT is(left(pg_temp.outcome_of('idem_test_app',
	format('CREATE TEMP TABLE t (r %s)', name)), 6), '42501:',
	'with idem_grant: a column of type ' || name || ': 42501')
FROM (SELECT name FROM tables UNION ALL VALUES ('idem_stats')) AS r;
SELECT is(pg_temp.outcome_of('idem_test_app',
	'CREATE FUNCTION pg_temp.h(jsonb) RETURNS idem_response
	LANGUAGE sql AS ''SELECT (200, NULL, NULL)::idem_response'''),
	'allowed', 'with idem_grant: a function that returns idem_response');
SELECT is(left(pg_temp.outcome_of('idem_test_stranger',
	'CREATE FUNCTION pg_temp.h(jsonb) RETURNS idem_response
	LANGUAGE sql AS ''SELECT (200, NULL, NULL)::idem_response'''), 6),
	'42501:', 'without a grant, a function that returns it: 42501');
SELECT is(pg_temp.outcome_of('idem_test_app', statement), 'allowed',
	'with idem_grant: ' || statement)
FROM (VALUES
	('CREATE FUNCTION pg_temp.f() RETURNS idem_claim_result LANGUAGE sql
		RETURN idem_claim(''contract'', ''key-of-contract-1'')'),
	('CREATE TEMP TABLE t AS SELECT idem_lookup(''contract'',
		''key-of-contract-1'') AS r'),
	('CREATE TEMP VIEW v AS SELECT idem_try_append(''a'', ''c'', 1) AS r')
) AS v (statement);

SELECT idem_grant('idem_test_app') \gset
SELECT is(count(*), (SELECT count(*) FROM application),
	'idem_grant given twice is given once')
FROM privileges WHERE grantee = 'idem_test_app'::regrole;
CREATE ROLE "Idem test ""app""; --";
SELECT idem_grant('"Idem test ""app""; --"') \gset
SELECT is(count(*), (SELECT count(*) FROM application),
	'idem_grant quotes the role''s name')
FROM privileges WHERE grantee = '"Idem test ""app""; --"'::regrole;

--
-- idem_grant_relay gives the functions of a relay, and nothing else
--
SELECT idem_grant_relay('idem_test_stranger') \gset
SELECT set_eq(
	$$SELECT object::regprocedure, privilege_type, is_grantable FROM privileges
	WHERE grantee = 'idem_test_stranger'::regrole$$,
	$$SELECT to_regprocedure(signature), 'EXECUTE' AS privilege_type,
		false AS is_grantable
	FROM functions WHERE who LIKE '%relay'$$,
	'idem_grant_relay grants exactly the functions of a relay');
SELECT set_eq(
	'SELECT idem_relay_functions()',
	$$SELECT to_regprocedure(signature) FROM functions WHERE who LIKE '%relay'$$,
	'idem_relay_functions names them');
SELECT pg_temp.may_call('idem_test_stranger', '{relay,"monitor, relay"}',
	'with idem_grant_relay');
SELECT idem_revoke('idem_test_stranger') \gset
SELECT is_empty($$SELECT FROM privileges
	WHERE grantee = 'idem_test_stranger'::regrole$$,
	'idem_revoke takes back what idem_grant_relay gave');

--
-- The rights of pg_monitor
--
SELECT pg_temp.may_call('idem_test_monitor',
	'{monitor,pg_monitor,"monitor, relay"}',
	'a member of pg_monitor');
SELECT is(pg_temp.outcome_of('idem_test_monitor',
	'SELECT FROM idem_stats'), 'allowed',
	'a member of pg_monitor reads idem_stats');
SELECT is(left(pg_temp.outcome_of('idem_test_monitor', statement), 6),
	'42501:', 'a member of pg_monitor: ' || statement || ': 42501')
FROM table_accesses WHERE statement <> 'SELECT FROM idem_stats';
-- idem_grant_monitor gives the same, without functions that show scopes.
SELECT idem_grant_monitor('idem_test_stranger') \gset
SELECT set_eq(
	$$SELECT object, privilege_type, is_grantable FROM privileges
	WHERE grantee = 'idem_test_stranger'::regrole$$,
	$$SELECT object, privilege_type, is_grantable FROM monitoring
	WHERE who LIKE 'monitor%'$$,
	'idem_grant_monitor gives statistics, metrics and health');
SELECT idem_revoke('idem_test_stranger') \gset
SELECT is_empty($$SELECT FROM privileges
	WHERE grantee = 'idem_test_stranger'::regrole$$,
	'idem_revoke takes that back');
-- The view does not lend its owner's rights.
SELECT is(pg_temp.outcome_of(session_user, 'GRANT SELECT ON idem_stats
		TO idem_test_stranger; SET LOCAL ROLE idem_test_stranger;
		SELECT FROM idem_stats'),
	'42501: permission denied for function idem_stats_data',
	'SELECT on idem_stats alone shows nothing');

--
-- Handlers of idem_run have the caller's rights
--
SET LOCAL ROLE idem_test_app;
SELECT response_body AS handler_ran_as FROM idem_run('contract',
	'key-of-handler-run', 'handler(jsonb)', '{}') \gset
RESET ROLE;
SELECT is(:'handler_ran_as', '"idem_test_app"'::text,
	'a handler runs as the caller');
CREATE TABLE secrets ();
CREATE FUNCTION reads_secrets(request jsonb) RETURNS jsonb
LANGUAGE sql AS 'SELECT to_jsonb(count(*)) FROM secrets';
CREATE FUNCTION secret_handler(request jsonb) RETURNS jsonb
LANGUAGE sql RETURN request;
REVOKE ALL ON FUNCTION secret_handler(jsonb) FROM PUBLIC;
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('contract',
		'key-of-handler-01', 'secret_handler(jsonb)', '{}')$$),
	'42501: permission denied for function secret_handler',
	'a handler needs EXECUTE');
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('contract',
		'key-of-handler-01', 'reads_secrets(jsonb)', '{}')$$),
	'42501: permission denied for table secrets',
	'a handler reaches what the caller reaches');
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('contract',
		'key-of-handler-01', 'idem_erase(text, text)', '{}')$$),
	'42501: permission denied for function idem_erase',
	'whatever the function that is called a handler');

--
-- idem_revoke
--
SELECT idem_revoke('idem_test_app') \gset
SELECT is_empty($$SELECT * FROM privileges
	WHERE grantee = 'idem_test_app'::regrole$$,
	'idem_revoke takes back what idem_grant gave');
SELECT pg_temp.may_call('idem_test_app', '{}', 'after idem_revoke');
SELECT isnt_empty($$SELECT FROM privileges
	WHERE grantee = '"Idem test ""app""; --"'::regrole$$,
	'others keep theirs');
SELECT is(pg_temp.outcome_of(session_user, 'SELECT
		idem_revoke(''idem_test_stranger'')'),
	'allowed', 'idem_revoke of nothing is no error');

--
-- Installation: safe schemas only
--
DROP EXTENSION idempotency;
CREATE SCHEMA shared_with_public;
GRANT CREATE ON SCHEMA shared_with_public TO PUBLIC;
CREATE SCHEMA shared_with_stranger;
GRANT CREATE ON SCHEMA shared_with_stranger TO idem_test_stranger;
CREATE SCHEMA owned_by_stranger AUTHORIZATION idem_test_stranger;
CREATE SCHEMA readable;
GRANT USAGE ON SCHEMA readable TO PUBLIC;
CREATE ROLE idem_test_superuser SUPERUSER;
CREATE SCHEMA owned_by_superuser AUTHORIZATION idem_test_superuser;
SELECT is(pg_temp.outcome_of(session_user,
	'CREATE EXTENSION idempotency SCHEMA ' || name), outcome, description)
FROM (VALUES
	('shared_with_public',
		'42501: schema "shared_with_public" is not safe for extension '
		'"idempotency"',
		'no installation where PUBLIC may create'),
	('shared_with_stranger',
		'42501: schema "shared_with_stranger" is not safe for extension '
		'"idempotency"',
		'no installation where a stranger may create'),
	('owned_by_stranger', 'allowed',
		'the owner of a schema is no stranger to it'),
	('information_schema', '42939: schema "information_schema" belongs to '
		'the server', 'no installation among the server''s own: SQL'),
	('pg_catalog', '42939: schema "pg_catalog" belongs to the server',
		'no installation among the server''s own: system catalogs'),
	('pg_toast', '42939: schema "pg_toast" belongs to the server',
		'no installation among the server''s own: TOAST tables'),
	('owned_by_superuser', 'allowed',
		'superusers may create there anyway'),
	('readable', 'allowed', 'USAGE for all does no harm')
) AS v (name, outcome, description);

--
-- Installation by a role that is no superuser but may create in the database
--
SELECT is(left(pg_temp.outcome_of('idem_test_stranger',
		'CREATE EXTENSION idempotency SCHEMA owned_by_stranger'), 6),
	'42501:', 'not everybody may install');
DO $$
BEGIN
	EXECUTE format('GRANT CREATE ON DATABASE %I TO idem_test_installer',
		current_database());
END
$$;
SET LOCAL ROLE idem_test_installer;
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
SELECT idem.idem_grant('idem_test_app') \gset
RESET ROLE;
SELECT is_empty('SELECT * FROM privileges WHERE grantee = 0',
	'trusted installation: nothing is granted to PUBLIC');
-- The tables and functions are the bootstrap superuser's.
SELECT results_eq(
	$$SELECT DISTINCT r.rolsuper FROM members AS m JOIN pg_proc AS p
		ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
	JOIN pg_roles AS r ON r.oid = p.proowner$$,
	'VALUES (true)', 'the installer owns none of the functions');

SET LOCAL search_path = public, tap, idem;
SELECT set_eq(
	$$SELECT grantee::regrole, object, privilege_type, is_grantable
	FROM privileges WHERE grantee <> 'idem_test_app'::regrole$$,
	$$SELECT grantee, ownership.* FROM ownership, (VALUES
		('idem_test_installer'::regrole), ('pg_database_owner')) AS g (grantee)
	UNION ALL SELECT 'pg_monitor', object, privilege_type, is_grantable
	FROM monitoring$$,
	'the installer may call and read everything, and let others');
SELECT ok(has_schema_privilege('idem_test_app', 'idem', 'USAGE')
	AND NOT has_schema_privilege('idem_test_stranger', 'idem', 'USAGE')
	AND NOT has_schema_privilege('idem_test_app', 'idem', 'CREATE'),
	'the installer''s idem_grant gives USAGE on the schema');
SELECT pg_temp.create_records() \gset
SELECT pg_temp.may_call('idem_test_app', '{application}',
	'granted by the installer');
SELECT pg_temp.may_call('idem_test_installer',
	'{application,relay,"monitor, relay",monitor,pg_monitor,administrator}',
	'the installer');
SELECT is(left(pg_temp.outcome_of('idem_test_installer', statement), 7),
	CASE WHEN statement LIKE 'SELECT FROM%' THEN 'allowed'
		ELSE '42501: ' END,
	'the installer reads the tables and never writes them: ' || statement)
FROM table_accesses
-- The owner of the schema might drop it, if the extension did not need it.
WHERE statement NOT LIKE 'DROP%';
SELECT is(pg_temp.outcome_of('idem_test_installer',
	'GRANT SELECT ON idem_keys TO idem_test_stranger'),
	'allowed', 'the installer may let others read them');
SELECT is(left(pg_temp.outcome_of('idem_test_installer', statement), 6),
	'42501:', 'the installer gains no more: ' || statement)
FROM (VALUES
	('ALTER FUNCTION idem_forget(text, text) SECURITY DEFINER'),
	('CREATE OR REPLACE FUNCTION idem_forget(scope text, key text)
		RETURNS boolean LANGUAGE sql AS ''SELECT true'''),
	('CREATE FUNCTION f(text, text) RETURNS boolean LANGUAGE c
		AS ''$libdir/idempotency'', ''idem_forget'''),
	('ALTER TYPE idem_response OWNER TO idem_test_installer')
) AS v (statement);
SET LOCAL ROLE idem_test_installer;
SELECT idem_revoke('idem_test_app') \gset
RESET ROLE;
SELECT is_empty($$SELECT * FROM privileges
	WHERE grantee = 'idem_test_app'::regrole$$,
	'the installer''s idem_revoke takes it back');

SELECT is(pg_temp.outcome_of('idem_test_installer',
	'DROP EXTENSION idempotency'), 'allowed', 'the installer may drop it');

-- The installer owns the schema, and may put better matches for unqualified
-- calls into it.  What superusers run must not take them.  The extension is
-- installed again, for what has run already has found its functions.
DROP EXTENSION idempotency;
SET LOCAL ROLE idem_test_installer;
CREATE EXTENSION idempotency SCHEMA idem;
CREATE FUNCTION idem.has_schema_privilege(regrole, regnamespace, text)
RETURNS boolean LANGUAGE plpgsql
AS 'BEGIN RAISE ''captured'' USING ERRCODE = ''CA001''; END';
CREATE FUNCTION idem.format(text, regnamespace, regrole)
RETURNS text LANGUAGE plpgsql
AS 'BEGIN RAISE ''captured'' USING ERRCODE = ''CA001''; END';
CREATE FUNCTION idem.format(text, text, regrole)
RETURNS text LANGUAGE plpgsql
AS 'BEGIN RAISE ''captured'' USING ERRCODE = ''CA001''; END';
CREATE FUNCTION idem.format(text, regrole)
RETURNS text LANGUAGE plpgsql
AS 'BEGIN RAISE ''captured'' USING ERRCODE = ''CA001''; END';
CREATE FUNCTION idem.idem_check_grantee(oid)
RETURNS void LANGUAGE plpgsql
AS 'BEGIN RAISE ''captured'' USING ERRCODE = ''CA001''; END';
RESET ROLE;
SELECT is(pg_temp.outcome_of(session_user,
	'SELECT idem_grant(''idem_test_app'')'), 'allowed',
	'the owner of the schema cannot capture calls in idem_grant');
SELECT is(pg_temp.outcome_of(session_user,
	'SELECT idem_revoke(''idem_test_app'')'), 'allowed',
	'the owner of the schema cannot capture calls in idem_revoke');

DROP EXTENSION idempotency;
SELECT is(pg_temp.outcome_of('idem_test_installer',
	format('CREATE FUNCTION idem.captures(%1$s, %2$s)
		RETURNS boolean LANGUAGE plpgsql
		AS ''BEGIN RAISE ''''captured'''' USING ERRCODE = ''''CA001''''; END'';
		CREATE OPERATOR idem.%3$s (LEFTARG = %1$s, RIGHTARG = %2$s,
			FUNCTION = idem.captures);
		CREATE EXTENSION idempotency SCHEMA idem',
		left_type, right_type, operator)),
	'allowed', format('the owner of the schema cannot capture %s %s %s in '
		'the installation', left_type, operator, right_type))
FROM (VALUES ('oid', 'regrole', '='), ('oid', 'regclass', '='),
	('oid', 'int', '='), ('name', 'text', '='))
	AS v (left_type, right_type, operator);
-- Functions that run with the rights of a superuser meet operators of another
-- role, and use none.
SELECT is(pg_temp.outcome_of('idem_test_installer', $test$
	DO $$
	DECLARE
		l text;
		r text;
		operator text;
	BEGIN
		FOREACH l IN ARRAY '{oid,name,text,int,bigint,real,double precision,
			numeric,"\"char\"",timestamptz,interval,text[]}'::text[] LOOP
			FOREACH r IN ARRAY '{oid,regclass,name,text,int,bigint,
				double precision,numeric,timestamptz,interval,
				text[]}'::text[] LOOP
				EXECUTE format('CREATE FUNCTION idem.captures(%1$s, %2$s)
					RETURNS boolean LANGUAGE plpgsql AS $f$
					BEGIN
						RAISE ''captured by %1$s, %2$s''
							USING ERRCODE = ''CA001'';
					END $f$', l, r);
				FOREACH operator IN ARRAY
					'{=,<>,<,>,<=,>=,||,+,-,*,/}'::text[] LOOP
					EXECUTE format('CREATE OPERATOR idem.%s (LEFTARG = %s,
						RIGHTARG = %s, FUNCTION = idem.captures)',
						operator, l, r);
				END LOOP;
			END LOOP;
		END LOOP;
	END
	$$;
	CREATE EXTENSION idempotency SCHEMA idem;
	SELECT idem.idem_claim('s', 'key-of-contract-1', lease => '0'),
		idem.idem_publish('t', '{}');
	SELECT idem.idem_metrics(), idem.idem_health(), idem.idem_abandoned('0')
	$test$), 'allowed',
	'the owner of the schema cannot capture an operator in monitoring');
SELECT matches(pg_temp.outcome_of('idem_test_installer', statement || ';
		CREATE EXTENSION idempotency SCHEMA idem'), '^42(P07|723|710): ',
	'what is there already is not taken over: ' || statement)
FROM (VALUES
	('CREATE TABLE idem.idem_keys (scope text, key text)'),
	('CREATE TABLE idem.idem_outbox (id bigint)'),
	('CREATE SEQUENCE idem.idem_claim_tokens'),
	('CREATE VIEW idem.idem_stats AS SELECT 1'),
	('CREATE TYPE idem.idem_response AS (status int)'),
	('CREATE FUNCTION idem.idem_forget(scope text, key text)
		RETURNS boolean LANGUAGE sql AS ''SELECT true''')
) AS v (statement);

SELECT * FROM finish();
ROLLBACK;

DO $$
BEGIN
	PERFORM idem_forget(scope, key) FROM idem_keys WHERE scope = 'contract';
END
$$;
DELETE FROM idem_outbox WHERE topic = 'contract';
DELETE FROM idem_client_sequences WHERE aggregate = 'contract';
DELETE FROM idem_aggregates WHERE aggregate = 'contract';
