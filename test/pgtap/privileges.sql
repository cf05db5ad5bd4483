--
-- Privileges: who may do what, whoever installed the extension
--
BEGIN;
SET LOCAL client_min_messages = error;

CREATE ROLE idem_test_app;
CREATE ROLE idem_test_stranger;
CREATE ROLE idem_test_installer;
CREATE ROLE idem_test_monitor IN ROLE pg_monitor;

-- What a role gets from a statement: "allowed", or the error.  Its effects
-- are rolled back.  throws_ok() would not do: a role that may not write
-- pgTAP's tables makes it take its own failure for the expected one.
CREATE FUNCTION pg_temp.outcome_of(role name, statement text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	EXECUTE statement;
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	RETURN CASE SQLSTATE WHEN 'ZZ000' THEN 'allowed'
		ELSE SQLSTATE || ': ' || SQLERRM END;
END
$$;

CREATE FUNCTION handler(request jsonb) RETURNS jsonb
LANGUAGE sql RETURN to_jsonb(current_user::text);

-- The interface, with calls that work if they are allowed.
CREATE TEMP TABLE calls (
	signature text,
	call text
);
INSERT INTO calls
SELECT signature, CASE WHEN claims THEN
	'SELECT idem_claim(''privileges'', ''key-of-privileges''); ' ELSE '' END
	|| 'SELECT ' || call
FROM (VALUES
	('idem_request_hash(text, text, text)', false,
		$$idem_request_hash('GET', '/')$$),
	('idem_request_hash(text, text, jsonb)', false,
		$$idem_request_hash('GET', '/', '{}'::jsonb)$$),
	('idem_request_hash(text, text, bytea)', false,
		$$idem_request_hash('GET', '/', '\x00'::bytea)$$),
	('idem_canonical_json(jsonb)', false,
		$$idem_canonical_json('{}')$$),
	('idem_key_is_valid(text)', false,
		$$idem_key_is_valid('key-of-privileges')$$),
	('idem_claim(text, text, bytea, interval, interval, interval)', false,
		$$idem_claim('privileges', 'key-of-privileges')$$),
	('idem_complete(text, text, int, text, json, bigint)', true,
		$$idem_complete('privileges', 'key-of-privileges', 200)$$),
	('idem_complete(text, text, int, bytea, json, bigint)', true,
		$$idem_complete('privileges', 'key-of-privileges', 200,
			'\x00'::bytea)$$),
	('idem_checkpoint(text, text, text, json, interval, bigint)', true,
		$$idem_checkpoint('privileges', 'key-of-privileges', 'point')$$),
	('idem_heartbeat(text, text, interval, bigint)', true,
		$$idem_heartbeat('privileges', 'key-of-privileges')$$),
	('idem_fail(text, text, text, bigint)', true,
		$$idem_fail('privileges', 'key-of-privileges')$$),
	('idem_release(text, text, bigint)', true,
		$$idem_release('privileges', 'key-of-privileges')$$),
	('idem_lookup(text, text)', false,
		$$idem_lookup('privileges', 'key-of-privileges')$$),
	('idem_run(text, text, regprocedure, jsonb, interval, interval)', false,
		$$idem_run('privileges', 'key-of-privileges', 'handler(jsonb)',
			'{}')$$),
	('idem_try_advance(text, text, text, bigint)', false,
		$$idem_try_advance('privileges', 'post', '1', 1)$$),
	('idem_toggle(text, text, text, text, bigint)', false,
		$$idem_toggle('privileges', 'post', '1', 'like', 1)$$),
	('idem_set(text, text, text, text, boolean, bigint, text[])', false,
		$$idem_set('privileges', 'post', '1', 'like', true, 1)$$),
	('idem_is_active(text, text, text, text)', false,
		$$idem_is_active('privileges', 'post', '1', 'like')$$),
	('idem_action_states(text, text, text[])', false,
		$$idem_action_states('privileges', 'post', '{1}'::text[])$$),
	('idem_claim_many(text, text[], bytea[], interval, interval)', false,
		$$idem_claim_many('privileges', '{key-of-privileges}')$$),
	('idem_complete_many(text, text[], int[], text[], json[], bigint[])', true,
		$$idem_complete_many('privileges', '{key-of-privileges}', '{200}')$$),
	('idem_try_advance_many(text[], text[], text[], bigint[])', false,
		$$idem_try_advance_many('{privileges}', '{post}', '{1}', '{1}')$$),
	('idem_set_many(text[], text[], text[], text[], boolean[], bigint[])',
		false,
		$$idem_set_many('{privileges}', '{post}', '{1}', '{like}', '{t}',
			'{1}')$$),
	('idem_try_append(text, text, bigint, int, bigint, boolean, interval)',
		false, $$idem_try_append('privileges', 'client', 1)$$),
	('idem_last_client_seq(text, text)', false,
		$$idem_last_client_seq('privileges', 'client')$$),
	('idem_once(text, text, interval)', false,
		$$idem_once('privileges', 'token')$$),
	('idem_once_many(text, text[], interval)', false,
		$$idem_once_many('privileges', '{token}'::text[])$$),
	('idem_publish(text, jsonb, text, jsonb, interval)', false,
		$$idem_publish('privileges', '{}')$$),
	('idem_publish_many(text[], jsonb[], text[], jsonb[], interval)', false,
		$$idem_publish_many('{privileges}', '{1}')$$),
	('idem_outbox_take(int, interval, text[], interval)', false,
		$$idem_outbox_take()$$),
	('idem_outbox_ack(bigint[])', false,
		$$idem_outbox_ack('{1}')$$),
	('idem_outbox_nack(bigint, text, interval, int)', false,
		$$idem_outbox_nack(1)$$),
	('idem_outbox_requeue(bigint[])', false,
		$$idem_outbox_requeue()$$),
	('idem_outbox_extend(bigint[], interval, int[])', false,
		$$idem_outbox_extend('{1}')$$),
	('idem_outbox_give_back(bigint[], int[])', false,
		$$idem_outbox_give_back('{1}')$$)
) AS v (signature, claims, call);

-- What idem_grant() does not give.
CREATE TEMP TABLE administrator_calls (
	signature text,
	call text
);
INSERT INTO administrator_calls VALUES
	('idem_forget(text, text)',
		$$SELECT idem_forget('privileges', 'key-of-privileges')$$),
	('idem_erase(text, text)',
		$$SELECT idem_erase('privileges', 'key-of-privileges')$$),
	('idem_forget_user(text)',
		$$SELECT idem_forget_user('privileges')$$),
	('idem_raise_claim_tokens(bigint)',
		$$SELECT idem_raise_claim_tokens(0)$$),
	('idem_cleanup(int)',
		$$SELECT idem_cleanup()$$),
	('idem_grant(regrole)',
		$$SELECT idem_grant('idem_test_stranger')$$),
	('idem_grant_monitor(regrole)',
		$$SELECT idem_grant_monitor('idem_test_stranger')$$),
	('idem_revoke(regrole)',
		$$SELECT idem_revoke('idem_test_stranger')$$),
	('idem_application_functions()',
		$$SELECT idem_application_functions()$$),
	('idem_application_types()',
		$$SELECT idem_application_types()$$),
	('idem_monitor_functions()',
		$$SELECT idem_monitor_functions()$$),
	('idem_monitor_views()',
		$$SELECT idem_monitor_views()$$),
	('idem_check_grantee(regrole)',
		$$SELECT idem_check_grantee('idem_test_stranger')$$),
	('idem_stats_data()',
		$$SELECT idem_stats_data()$$),
	('idem_stats_reset()',
		$$SELECT idem_stats_reset()$$),
	('idem_metric_families()',
		$$SELECT idem_metric_families()$$),
	('idem_metric_samples()',
		$$SELECT idem_metric_samples()$$),
	('idem_metrics()',
		$$SELECT idem_metrics()$$),
	('idem_health()',
		$$SELECT idem_health()$$),
	('idem_stuck(interval)',
		$$SELECT idem_stuck()$$),
	('idem_monitoring_data()',
		$$SELECT idem_monitoring_data()$$),
	('idem_sample_data(text)',
		$$SELECT idem_sample_data('keys')$$),
	('idem_clock_evidence()',
		$$SELECT idem_clock_evidence()$$),
	('idem_table_stats()',
		$$SELECT idem_table_stats()$$),
	('idem_worker_absence()',
		$$SELECT idem_worker_absence()$$),
	('idem_vacuum_holder()',
		$$SELECT idem_vacuum_holder()$$),
	('idem_redacted_key(text)',
		$$SELECT idem_redacted_key('key-of-privileges')$$),
	('idem_check_interval(interval, text)',
		$$SELECT idem_check_interval('0', 'value')$$);

CREATE TEMP TABLE tables (
	name name,
	any_column name
);
INSERT INTO tables VALUES
	('idem_keys', 'attempt'),
	('idem_action_versions', 'last_action_id'),
	('idem_user_actions', 'last_action_id'),
	('idem_aggregates', 'version'),
	('idem_client_sequences', 'last_client_seq'),
	('idem_tokens', 'expires_at'),
	('idem_outbox', 'attempt');
CREATE TEMP TABLE sequences (
	name name
);
INSERT INTO sequences VALUES ('idem_claim_tokens'), ('idem_outbox_ids');
CREATE TEMP TABLE table_accesses (
	statement text
);
INSERT INTO table_accesses
SELECT format(statement, name, any_column)
FROM tables,
	(VALUES ('SELECT FROM %s'), ('INSERT INTO %s DEFAULT VALUES'),
		('UPDATE %s SET %s = DEFAULT'), ('DELETE FROM %s'),
		('TRUNCATE %s'), ('LOCK %s')) AS s (statement);
INSERT INTO table_accesses
SELECT format(statement, name)
FROM sequences,
	(VALUES ('SELECT FROM %s'), ('SELECT nextval(''%s'')'),
		('SELECT setval(''%s'', 1)')) AS s (statement);
INSERT INTO table_accesses VALUES
	('SELECT FROM idem_stats'),
	('DROP VIEW idem_stats'),
	('ALTER TABLE idem_keys ADD COLUMN tenant text'),
	('DROP TABLE idem_keys'),
	('CREATE INDEX ON idem_keys (claim_token)');

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
-- What the script grants to the installer and to the owner of the database,
-- who may grant it in turn ...
CREATE TEMP VIEW ownership AS
	SELECT p.oid::regprocedure::text AS object, 'EXECUTE' AS privilege_type,
		true AS is_grantable
	FROM pg_proc AS p JOIN members AS m
		ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid
	UNION ALL
	SELECT name, 'SELECT', true
	FROM (SELECT name FROM tables UNION ALL TABLE sequences
		UNION ALL VALUES ('idem_stats')) AS r
	UNION ALL
	SELECT 'type ' || t.typname, 'USAGE', true
	FROM pg_type AS t JOIN members AS m
		ON m.classid = 'pg_type'::regclass AND m.objid = t.oid
	JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'c';
-- What handlers return, and what the functions do that applications call.
CREATE TEMP VIEW application_types AS
	SELECT t.typname
	FROM pg_type AS t
	WHERE t.typtype = 'c' AND (t.typname = 'idem_response'
		OR t.oid IN (SELECT p.prorettype FROM pg_proc AS p JOIN calls
			ON p.oid = calls.signature::regprocedure));
-- ... and to monitoring roles.
CREATE TEMP TABLE monitoring (
	object text,
	privilege_type text,
	is_grantable boolean
);
INSERT INTO monitoring VALUES
	('idem_stats_data()', 'EXECUTE', false),
	('idem_metric_samples()', 'EXECUTE', false),
	('idem_metrics()', 'EXECUTE', false),
	('idem_health()', 'EXECUTE', false),
	('idem_stuck(interval)', 'EXECUTE', false),
	('idem_stats', 'SELECT', false);

SELECT plan(645);

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
	UNION ALL SELECT 'pg_monitor', * FROM monitoring$$,
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

SELECT is(pg_temp.outcome_of('idem_test_stranger', call),
	'42501: permission denied for function '
	|| CASE WHEN call LIKE '%; %' THEN 'idem_claim'
		ELSE split_part(signature, '(', 1) END,
	'without a grant: ' || signature || ': 42501')
FROM (TABLE calls UNION ALL TABLE administrator_calls) AS c;
SELECT ok(NOT has_function_privilege('idem_test_stranger', signature,
	'EXECUTE'), 'without a grant, no EXECUTE: ' || signature)
FROM (TABLE calls UNION ALL TABLE administrator_calls) AS c;

--
-- idem_grant gives the application's part, and nothing else
--
SELECT idem_grant('idem_test_app') \gset
SELECT set_eq(
	$$SELECT object, privilege_type, is_grantable FROM privileges
	WHERE grantee = 'idem_test_app'::regrole$$,
	$$SELECT signature::regprocedure::text AS object,
		'EXECUTE' AS privilege_type, false AS is_grantable FROM calls
	UNION ALL SELECT 'type ' || typname, 'USAGE', false
	FROM application_types$$,
	'idem_grant grants exactly the functions of the interface, and the types '
	'that they return');
SELECT set_eq(
	'SELECT idem_application_functions()',
	'SELECT signature::regprocedure FROM calls',
	'idem_application_functions names them');
SELECT set_eq(
	'SELECT idem_application_types()',
	'SELECT typname::text::regtype FROM application_types',
	'idem_application_types names these');
SELECT ok(has_schema_privilege('idem_test_app',
	(SELECT extnamespace FROM pg_extension WHERE extname = 'idempotency'),
	'USAGE'), 'with idem_grant: USAGE on the schema');
SELECT ok(NOT has_schema_privilege('idem_test_app',
	(SELECT extnamespace FROM pg_extension WHERE extname = 'idempotency'),
	'CREATE'), 'with idem_grant: no CREATE on the schema');
SELECT is(pg_temp.outcome_of('idem_test_app', call), 'allowed',
	'with idem_grant: ' || signature || ' is allowed')
FROM calls;
SELECT is(pg_temp.outcome_of('idem_test_app', call),
	'42501: permission denied for function ' || split_part(signature, '(', 1),
	'with idem_grant: ' || signature || ': 42501')
FROM administrator_calls;
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
		RETURN idem_claim(''privileges'', ''key-of-privileges'')'),
	('CREATE TEMP TABLE t AS SELECT idem_lookup(''privileges'',
		''key-of-privileges'') AS r'),
	('CREATE TEMP VIEW v AS SELECT idem_try_append(''a'', ''c'', 1) AS r')
) AS v (statement);

SELECT idem_grant('idem_test_app') \gset
SELECT is(count(*), (SELECT count(*) FROM calls)
	+ (SELECT count(*) FROM application_types),
	'idem_grant given twice is given once')
FROM privileges WHERE grantee = 'idem_test_app'::regrole;
CREATE ROLE "Idem test ""app""; --";
SELECT idem_grant('"Idem test ""app""; --"') \gset
SELECT is(count(*), (SELECT count(*) FROM calls)
	+ (SELECT count(*) FROM application_types),
	'idem_grant quotes the role''s name')
FROM privileges WHERE grantee = '"Idem test ""app""; --"'::regrole;

--
-- What pg_monitor has
--
SELECT is(pg_temp.outcome_of('idem_test_monitor', statement), 'allowed',
	'a member of pg_monitor: ' || statement || ' is allowed')
FROM (VALUES ('SELECT FROM idem_stats'), ('SELECT idem_stats_data()'),
	('SELECT idem_metric_samples()'),
	('SELECT idem_metrics()'), ('SELECT idem_health()'),
	('SELECT idem_stuck()')) AS v (statement);
SELECT is(pg_temp.outcome_of('idem_test_monitor', call),
	'42501: permission denied for function '
	|| CASE WHEN call LIKE '%; %' THEN 'idem_claim'
		ELSE split_part(signature, '(', 1) END,
	'a member of pg_monitor: ' || signature || ': 42501')
FROM (TABLE calls UNION ALL TABLE administrator_calls) AS c
WHERE signature NOT IN (SELECT object FROM monitoring);
SELECT is(left(pg_temp.outcome_of('idem_test_monitor', statement), 6),
	'42501:', 'a member of pg_monitor: ' || statement || ': 42501')
FROM table_accesses WHERE statement <> 'SELECT FROM idem_stats';
-- What idem_grant_monitor gives is that, but for what shows scopes.
SELECT idem_grant_monitor('idem_test_stranger') \gset
SELECT set_eq(
	$$SELECT object, privilege_type, is_grantable FROM privileges
	WHERE grantee = 'idem_test_stranger'::regrole$$,
	$$SELECT * FROM monitoring WHERE object <> 'idem_stuck(interval)'$$,
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
SELECT response_body AS handler_ran_as FROM idem_run('privileges',
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
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('privileges',
		'key-of-handler-01', 'secret_handler(jsonb)', '{}')$$),
	'42501: permission denied for function secret_handler',
	'a handler needs EXECUTE');
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('privileges',
		'key-of-handler-01', 'reads_secrets(jsonb)', '{}')$$),
	'42501: permission denied for table secrets',
	'a handler reaches what the caller reaches');
SELECT is(pg_temp.outcome_of('idem_test_app', $$SELECT idem_run('privileges',
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
SELECT is(pg_temp.outcome_of('idem_test_app', call),
	'42501: permission denied for function '
	|| CASE WHEN call LIKE '%; %' THEN 'idem_claim'
		ELSE split_part(signature, '(', 1) END,
	'after idem_revoke: ' || signature || ': 42501')
FROM calls;
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
	UNION ALL SELECT 'pg_monitor', * FROM monitoring$$,
	'the installer may call and read everything, and let others');
SELECT ok(has_schema_privilege('idem_test_app', 'idem', 'USAGE')
	AND NOT has_schema_privilege('idem_test_stranger', 'idem', 'USAGE')
	AND NOT has_schema_privilege('idem_test_app', 'idem', 'CREATE'),
	'the installer''s idem_grant gives USAGE on the schema');
SELECT is(pg_temp.outcome_of('idem_test_app', call), 'allowed',
	'granted by the installer: ' || signature || ' is allowed')
FROM calls;
SELECT is(pg_temp.outcome_of('idem_test_app', call),
	'42501: permission denied for function ' || split_part(signature, '(', 1),
	'granted by the installer: ' || signature || ': 42501')
FROM administrator_calls;
SELECT is(pg_temp.outcome_of('idem_test_installer', call), 'allowed',
	'the installer may call ' || signature)
FROM (TABLE calls UNION ALL TABLE administrator_calls) AS c;
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
-- What runs with the rights of a superuser is offered all sorts of operators,
-- and takes none.
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
	SELECT idem.idem_claim('s', 'key-of-privileges', lease => '0'),
		idem.idem_publish('t', '{}');
	SELECT idem.idem_metrics(), idem.idem_health(), idem.idem_stuck('0')
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
