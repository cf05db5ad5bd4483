--
-- Settings: defaults, units, bounds, and who may set them
--
BEGIN;
SET LOCAL client_min_messages = error;

CREATE ROLE idem_test_app;
SELECT idem_grant('idem_test_app') \gset

-- The result of a statement of a role: "allowed", or the SQLSTATE. Its effects
-- are rolled back. (throws_ok() needs rights that the role does not have.)
CREATE FUNCTION pg_temp.outcome_of(role name, statement text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('SET LOCAL ROLE %I', role);
	EXECUTE statement;
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	RETURN CASE SQLSTATE WHEN 'ZZ000' THEN 'allowed' ELSE SQLSTATE END;
END
$$;

-- The design's table, as far as it is implemented.  "user" settings are
-- defaults of a call, "superuser" ones protect the operator, "sighup" ones are
-- the worker's.  "other" is a value to be set; a century is the longest time.
CREATE TEMP TABLE promised (
	name text,
	shown text,
	boot_value text,
	type text,
	unit text,
	context text,
	least text,
	greatest text,
	other text
);
INSERT INTO promised VALUES
	('idempotency.default_ttl', '1d', '8.64e+07', 'real', 'ms', 'user',
		'0', '36525d', '90min'),
	('idempotency.default_lease', '1min', '60000', 'real', 'ms', 'user',
		'0', '36525d', '500ms'),
	('idempotency.max_lease', '12h', '4.32e+07', 'real', 'ms', 'superuser',
		'0', '36525d', '1h'),
	('idempotency.max_wait', '10min', '600000', 'real', 'ms', 'superuser',
		'0', '36525d', '1min'),
	('idempotency.token_ttl', '7d', '6.048e+08', 'real', 'ms', 'user',
		'0', '36525d', '1h'),
	('idempotency.outbox_retention', '7d', '6.048e+08', 'real', 'ms',
		'superuser', '0', '36525d', '30d'),
	('idempotency.outbox_max_attempts', '10', '10', 'integer', NULL,
		'superuser', '1', '2147483647', '3'),
	('idempotency.key_min_length', '16', '16', 'integer', NULL, 'superuser',
		'1', '255', '20'),
	('idempotency.key_max_length', '128', '128', 'integer', NULL,
		'superuser', '1', '255', '64'),
	('idempotency.key_format', 'token', 'token', 'enum', NULL, 'superuser',
		NULL, NULL, 'uuid'),
	('idempotency.expired_key_policy', 'reuse', 'reuse', 'enum', NULL,
		'superuser', NULL, NULL, 'reject'),
	('idempotency.tombstone_retention', '7d', '6.048e+08', 'real', 'ms',
		'superuser', '0', '36525d', '30d'),
	('idempotency.max_action_id_lead', '0', '0', 'real', 'ms', 'superuser',
		'0', '36525d', '1h'),
	('idempotency.max_new_keys_per_minute', '0', '0', 'integer', NULL,
		'superuser', '0', '2147483647', '100'),
	('idempotency.require_request_hash', 'off', 'off', 'bool', NULL,
		'superuser', NULL, NULL, 'on'),
	('idempotency.require_pinned_scope', 'off', 'off', 'bool', NULL,
		'superuser', NULL, NULL, 'on'),
	('idempotency.max_attempts', '10', '10', 'integer', NULL, 'superuser',
		'1', '2147483647', '3'),
	('idempotency.log_events', 'off', 'off', 'string', NULL, 'superuser',
		NULL, NULL, 'on'),
	('idempotency.log_format', 'logfmt', 'logfmt', 'enum', NULL, 'superuser',
		NULL, NULL, 'json'),
	('idempotency.route', '', '', 'string', NULL, 'user', NULL, NULL,
		'POST /orders'),
	('idempotency.max_response_size', '1MB', '1048576', 'integer', 'B',
		'superuser', '0', '2147483647', '64kB'),
	('idempotency.max_message_size', '16MB', '16777216', 'integer', 'B',
		'superuser', '1', '268435456', '64kB'),
	('idempotency.health_worker', '5min', '300000', 'real', 'ms',
		'superuser', '0', '36525d', '1h'),
	('idempotency.health_cleanup_lag', '10min', '600000', 'real', 'ms',
		'superuser', '0', '36525d', '1h'),
	('idempotency.health_outbox_oldest', '5min', '300000', 'real', 'ms',
		'superuser', '0', '36525d', '1h'),
	('idempotency.health_outbox_blocked', '1min', '60000', 'real', 'ms',
		'superuser', '0', '36525d', '1h'),
	('idempotency.health_moves', '1min', '60000', 'real', 'ms', 'superuser',
		'0', '36525d', '5s'),
	('idempotency.health_sequences', '1', '1', 'integer', NULL,
		'superuser', '0', '2147483647', '10'),
	('idempotency.cleanup_delay', '0', '0', 'real', 'ms', 'sighup',
		'0', '36525d', '1s'),
	('idempotency.health_dead_letters', '1', '1', 'integer', NULL,
		'superuser', '0', '2147483647', '10'),
	('idempotency.health_stuck_leases', '10', '10', 'integer', NULL,
		'superuser', '0', '2147483647', '100'),
	('idempotency.health_bloat', '0.5', '0.5', 'real', NULL, 'superuser',
		'0', '1', '0.25'),
	('idempotency.health_clock', '1s', '1000', 'real', 'ms', 'superuser',
		'0', '36525d', '250ms'),
	('idempotency.health_tables', '1', '1', 'integer', NULL, 'superuser',
		'0', '2147483647', '2'),
	('idempotency.cleanup_interval', '1min', '60000', 'real', 'ms', 'sighup',
		'0', '36525d', '5min'),
	('idempotency.cleanup_batch_size', '10000', '10000', 'integer', NULL,
		'sighup', '1', '2147483647', '500'),
	('idempotency.databases', '*', '*', 'string', NULL, 'sighup', NULL, NULL,
		'shop');

SELECT plan(721);

-- The library may be loaded by the first call only.
SELECT idem_key_is_valid('key-of-settings-0') AS loaded \gset

SELECT set_eq(
	$$SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%'$$,
	'SELECT name FROM promised',
	'there are these settings and no other');
-- The server's configuration may say otherwise of the worker's.
SELECT is(current_setting(name), shown, name || ' is ' || shown)
FROM promised WHERE context <> 'sighup';
SELECT is(s.boot_val, p.boot_value, name || ' is so by default')
FROM promised AS p LEFT JOIN pg_settings AS s USING (name);
SELECT is(s.vartype, p.type, name || ' has type ' || p.type)
FROM promised AS p LEFT JOIN pg_settings AS s USING (name);
SELECT is(s.unit, p.unit, name || ' counts in ' || coalesce(p.unit, 'ones'))
FROM promised AS p LEFT JOIN pg_settings AS s USING (name);
SELECT is(s.context, p.context, name || ' is for ' || p.context)
FROM promised AS p LEFT JOIN pg_settings AS s USING (name);
SELECT is(row(s.min_val, s.max_val), row(CASE p.least WHEN '36525d'
		THEN '3.15576e+12' ELSE p.least END, CASE p.greatest WHEN '36525d'
		THEN '3.15576e+12' ELSE p.greatest END),
	format('%s is from %s to %s', name, coalesce(p.least, 'anything'),
		coalesce(p.greatest, 'anything')))
FROM promised AS p LEFT JOIN pg_settings AS s USING (name);
SELECT ok(length(short_desc) > 20, name || ' has a description')
FROM promised LEFT JOIN pg_settings USING (name);
SELECT is((SELECT enumvals FROM pg_settings
	WHERE name = 'idempotency.expired_key_policy'), '{reuse,reject}',
	'idempotency.expired_key_policy is reuse or reject');
SELECT is((SELECT enumvals FROM pg_settings
	WHERE name = 'idempotency.key_format'), '{token,printable,uuid}',
	'idempotency.key_format is token, printable or uuid');

--
-- Bounds
--
SELECT is(pg_temp.outcome_of(session_user,
		format('SET LOCAL %s = %L', name, value)), outcome,
	format('%s = %s: %s', name, value, outcome))
FROM promised, LATERAL (VALUES (least, 'allowed'), (greatest, 'allowed'),
	(other, 'allowed'), ('no such value', '22023')) AS v (value, outcome)
WHERE value IS NOT NULL AND context <> 'sighup'
	-- A route is any text.
	AND (name, value) <> ('idempotency.route', 'no such value');
SELECT is(pg_temp.outcome_of(session_user,
		format('SET LOCAL %s = %L', name, value)), '22023',
	format('%s = %s: 22023', name, value))
FROM promised, LATERAL (VALUES
	(CASE least WHEN '0' THEN '-1' WHEN '1' THEN '0' END),
	(CASE greatest WHEN '36525d' THEN '36526d' WHEN '255' THEN '256'
		WHEN '2147483647' THEN '2147483648' WHEN '1' THEN '1.1' END)) AS v (value)
WHERE value IS NOT NULL AND context <> 'sighup';
SELECT is(pg_temp.outcome_of(session_user,
		'SET LOCAL idempotency.expired_key_policy = ' || value), '22023',
	'idempotency.expired_key_policy = ' || value || ': 22023')
FROM (VALUES ('accept'), ('on')) AS v (value);
SELECT is(pg_temp.outcome_of(session_user,
		'SET LOCAL idempotency.default_tll = 1'), '42602',
	'a misspelt setting is refused');

SELECT is(set_config(name, value, true), shown,
	format('%s = %s reads %s', name, value, shown))
FROM (VALUES
	('idempotency.default_ttl', '24h', '1d'),
	('idempotency.default_ttl', '90 min', '90min'),
	('idempotency.default_ttl', '1.5h', '90min'),
	('idempotency.default_ttl', '1000', '1s'),
	('idempotency.default_lease', '500ms', '500ms'),
	('idempotency.tombstone_retention', '7d', '7d'),
	('idempotency.token_ttl', '168h', '7d'),
	('idempotency.outbox_retention', '0.5h', '30min'),
	('idempotency.max_action_id_lead', '1h', '1h'),
	('idempotency.max_response_size', '1MB', '1MB'),
	('idempotency.max_response_size', '65536', '64kB'),
	('idempotency.expired_key_policy', 'REJECT', 'reject')
) AS v (name, value, shown);
RESET idempotency.default_ttl;
RESET idempotency.default_lease;
RESET idempotency.tombstone_retention;
RESET idempotency.token_ttl;
RESET idempotency.outbox_retention;
RESET idempotency.max_action_id_lead;
RESET idempotency.max_response_size;
RESET idempotency.expired_key_policy;

--
-- The roles that may set them
--
SELECT is(pg_temp.outcome_of('idem_test_app', format(statement, name, other)),
	outcome, 'the application, ' || format(statement, name, other) || ': '
		|| outcome)
FROM promised,
	(VALUES ('SET %s = %L'), ('SET LOCAL %s = %L'),
		('SELECT set_config(%L, %L, true)'),
		('ALTER ROLE idem_test_app SET %s = %L')) AS v (statement),
	LATERAL (VALUES (CASE context WHEN 'user' THEN 'allowed'
		WHEN 'superuser' THEN '42501' ELSE '55P02' END)) AS o (outcome);
SELECT is(pg_temp.outcome_of(session_user, format('SET %s = %L', name, other)),
	'55P02', 'no session can set ' || name)
FROM promised WHERE context = 'sighup';
SELECT is(pg_temp.outcome_of('idem_test_app', format('
	CREATE FUNCTION pg_temp.f() RETURNS void LANGUAGE sql SET %s = %L
		AS ''''; SELECT pg_temp.f()', name, other)), '42501',
	'the application cannot set it by way of a function: ' || name)
FROM promised WHERE context = 'superuser';
SELECT is(pg_temp.outcome_of('idem_test_app', format('SHOW %s', name)),
	'allowed', 'the application can see ' || name)
FROM promised;
SELECT is(pg_temp.outcome_of(session_user, format('
	GRANT SET ON PARAMETER %1$s TO idem_test_app;
	SET LOCAL ROLE idem_test_app; SET LOCAL %1$s = %2$L', name, other)),
	'allowed', 'a role with SET on it can set ' || name)
FROM promised WHERE context = 'superuser';

--
-- Their effects
--
SET LOCAL idempotency.default_ttl = '2h';
SET LOCAL idempotency.default_lease = '30min';
SELECT is(expires_at - lease_expires_at, '01:30:00'::interval,
	'default_ttl and default_lease stand in for what a call does not say')
FROM idem_claim('settings', 'key-of-settings-1');
SELECT is(expires_at - lease_expires_at, '00:10:00'::interval,
	'default_ttl and default_lease do not override a call')
FROM idem_claim('settings', 'key-of-settings-2',
	ttl => '20 min', lease => '10 min');
SELECT is(idem_heartbeat('settings', 'key-of-settings-2', '12 hours'),
	expires_at, 'a longer lease is cut to the ttl')
FROM idem_lookup('settings', 'key-of-settings-2');
SET LOCAL idempotency.default_ttl = 0;
SELECT is(expires_at, lease_expires_at, 'default_ttl may be zero')
FROM idem_claim('settings', 'key-of-settings-3');
RESET idempotency.default_ttl;
RESET idempotency.default_lease;

SET LOCAL idempotency.key_min_length = 3;
SET LOCAL idempotency.key_max_length = 5;
SELECT is(idem_key_is_valid(key), valid,
	format('keys of 3 to 5 characters: %s is %s', key,
		CASE WHEN valid THEN 'valid' ELSE 'invalid' END))
FROM (VALUES ('12', false), ('123', true), ('12345', true),
	('123456', false)) AS v (key, valid);
SELECT is(outcome, 'new', 'a key that has become valid can be claimed')
FROM idem_claim('settings', '123');
SELECT throws_ok($$SELECT idem_claim('settings', '123456')$$, 'ID001', NULL,
	'a key that has become invalid cannot');
SET LOCAL idempotency.key_max_length = 255;
SELECT is(outcome, 'new', 'the longest key with the longest scope')
FROM idem_claim(repeat('s', 255), repeat('k', 255));
SET LOCAL idempotency.key_min_length = 64;
SET LOCAL idempotency.key_max_length = 32;
SELECT is(idem_key_is_valid(repeat('k', 48)), false,
	'a minimum above the maximum refuses all keys');
RESET idempotency.key_min_length;
RESET idempotency.key_max_length;
SELECT is(array(SELECT idem_key_is_valid(key) FROM (VALUES
		(1, 'key-of-settings-7'), (2, 'key of settings~7'),
		(3, 'f81d4fae-7dec-11d0-a765-00a0c91e6bf6')) AS k (n, key),
		set_config('idempotency.key_format', format, true) ORDER BY n),
	valid, 'key_format = ' || format)
FROM (VALUES ('token', '{t,f,t}'::boolean[]), ('printable', '{t,t,t}'),
	('uuid', '{f,f,t}')) AS v (format, valid);
RESET idempotency.key_format;

SET LOCAL idempotency.token_ttl = '2h';
SELECT idem_once('settings', 'default'),
	idem_once('settings', 'given', '20 min'),
	(SELECT idem_once_many('settings', '{array}'::text[])) \gset
SELECT ok(expires_at - clock_timestamp() BETWEEN '01:59:00' AND '02:00:00',
	'token_ttl stands in for what a call does not say: ' || token)
FROM idem_tokens WHERE scope = 'settings' AND token <> 'given';
SELECT ok(expires_at - clock_timestamp() BETWEEN '00:19:00' AND '00:20:00',
	'token_ttl does not override a call')
FROM idem_tokens WHERE scope = 'settings' AND token = 'given';
SET LOCAL idempotency.token_ttl = 0;
SELECT is(idem_once('settings', 'forgotten'), true,
	'token_ttl may be zero: ' || time)
FROM (VALUES ('the first time'), ('again')) AS v (time);
RESET idempotency.token_ttl;

SET LOCAL idempotency.outbox_max_attempts = 2;
SELECT idem_publish('settings', '{}') AS message_id \gset
SELECT is(idem_outbox_nack(id, retry_after => '0'), 'pending',
	'outbox_max_attempts of two: pending after the first')
FROM idem_outbox_take(topics => '{settings}');
SELECT is(idem_outbox_nack(id, retry_after => '0'), 'dead',
	'outbox_max_attempts of two: dead after the second')
FROM idem_outbox_take(topics => '{settings}');
RESET idempotency.outbox_max_attempts;

SET LOCAL idempotency.outbox_retention = '1h';
SELECT idem_publish('settings-acked', '1') AS message_id \gset
SELECT idem_outbox_ack(array_agg(id)) AS acked
	FROM idem_outbox_take(topics => '{settings-acked}') \gset
SELECT idem_cleanup() AS within_retention \gset
SELECT isnt_empty($$SELECT FROM idem_outbox WHERE topic = 'settings-acked'$$,
	'within outbox_retention an acknowledged message is kept');
SET LOCAL idempotency.outbox_retention = 0;
SELECT idem_cleanup() AS past_retention \gset
SELECT is_empty($$SELECT FROM idem_outbox WHERE topic = 'settings-acked'$$,
	'past outbox_retention it is deleted');
RESET idempotency.outbox_retention;

SET LOCAL idempotency.max_response_size = 0;
SELECT throws_ok($$SELECT idem_complete('settings', 'key-of-settings-1', 200,
		'x')$$, '54000', NULL,
	'max_response_size of zero: no body');
SELECT is(idem_complete('settings', 'key-of-settings-1', 204), true,
	'max_response_size of zero: a response without a body');
RESET idempotency.max_response_size;
SELECT is(idem_complete('settings', 'key-of-settings-2', 200,
		repeat('x', 1048576)), true,
	'max_response_size by default: a body of 1MB');
SELECT is(length(response_body), 1048576, 'a body of 1MB is replayed in full')
FROM idem_claim('settings', 'key-of-settings-2');
SELECT outcome FROM idem_claim('settings', 'key-of-settings-4') \gset
SELECT throws_ok($$SELECT idem_complete('settings', 'key-of-settings-4', 200,
		repeat('x', 1048577))$$, '54000', NULL,
	'max_response_size by default: no byte more');

SET LOCAL idempotency.max_new_keys_per_minute = 1;
SELECT is(outcome, 'new', 'max_new_keys_per_minute of one: one')
FROM idem_claim('settings-limit', 'key-of-settings-1');
SELECT throws_ok($$SELECT idem_claim('settings-limit', 'key-of-settings-2')$$,
	'ID002', NULL, 'max_new_keys_per_minute of one: and no other');
SELECT is(outcome, 'in_progress',
	'max_new_keys_per_minute of one: the first is still answered')
FROM idem_claim('settings-limit', 'key-of-settings-1');
RESET idempotency.max_new_keys_per_minute;
SELECT is(outcome, 'new', 'max_new_keys_per_minute by default: no limit')
FROM idem_claim('settings-limit', 'key-of-settings-2');

SELECT * FROM finish();
ROLLBACK;
