--
-- The reference: what docs/reference.md says of each function in its first
-- table is so.  Its errors are looked at where they are raised, in sqlstates
-- and sequences_once_outbox.
--
-- Records are committed first, so that a call that is looked at holds nothing
-- but its own locks, and forgotten at the end.
--
SET client_min_messages = error;
CREATE TEMP TABLE errors (
	call text,
	sqlstate text
);
\ir include/glance.sql

CREATE TEMP TABLE held AS
	SELECT claim_token AS token FROM idem_claim('reference', 'key-of-reference');
SELECT idem_try_append('reference', 'phone', 1) \gset
SELECT idem_publish('reference', '{}') AS message_id \gset
SELECT id AS message FROM idem_outbox WHERE message_id = :'message_id' \gset

BEGIN;
CREATE ROLE idem_test_app;
CREATE ROLE idem_test_monitor;
SELECT idem_grant('idem_test_app') \gset
SELECT idem_grant_monitor('idem_test_monitor') \gset

-- A call of each function, which has something to do.
CREATE TEMP TABLE calls (
	name text,
	call text
);
INSERT INTO calls VALUES
('idem_request_hash', $$idem_request_hash('GET', '/')$$),
('idem_canonical_json', $$idem_canonical_json('{}')$$),
('idem_key_is_valid', $$idem_key_is_valid('key-of-reference')$$),
('idem_claim', $$idem_claim('reference', 'key-of-reference-2')$$),
('idem_claim_many',
	$$idem_claim_many('reference', '{key-of-reference-2}')$$),
('idem_complete',
	$$idem_complete('reference', 'key-of-reference', 200, claim_token => $1)$$),
('idem_complete_many',
	$$idem_complete_many('reference', '{key-of-reference}', '{200}',
		claim_tokens => ARRAY[$1])$$),
('idem_checkpoint', $$idem_checkpoint('reference', 'key-of-reference', 'point',
	claim_token => $1)$$),
('idem_heartbeat',
	$$idem_heartbeat('reference', 'key-of-reference', claim_token => $1)$$),
('idem_fail',
	$$idem_fail('reference', 'key-of-reference', claim_token => $1)$$),
('idem_release', $$idem_release('reference', 'key-of-reference', $1)$$),
('idem_lookup', $$idem_lookup('reference', 'key-of-reference')$$),
('idem_run', $$idem_run('reference', 'key-of-reference-2',
	'pg_temp.handler(jsonb)', '{}')$$),
('idem_forget', $$idem_forget('reference', 'key-of-reference')$$),
('idem_erase', $$idem_erase('reference', 'key-of-reference')$$),
('idem_set', $$idem_set('reference', 'post', '1', 'like', true, 1)$$),
('idem_set_many', $$idem_set_many('{reference}', '{post}', '{1}', '{like}',
	'{t}', '{1}')$$),
('idem_toggle', $$idem_toggle('reference', 'post', '1', 'like', 1)$$),
('idem_try_advance', $$idem_try_advance('reference', 'post', '1', 1)$$),
('idem_try_advance_many',
	$$idem_try_advance_many('{reference}', '{post}', '{1}', '{1}')$$),
('idem_is_active', $$idem_is_active('reference', 'post', '1', 'like')$$),
('idem_action_states',
	$$idem_action_states('reference', 'post', '{1}'::text[])$$),
('idem_forget_user', $$idem_forget_user('reference')$$),
('idem_try_append', $$idem_try_append('reference', 'phone', 2)$$),
('idem_last_client_seq', $$idem_last_client_seq('reference', 'phone')$$),
('idem_once', $$idem_once('reference', 'token')$$),
('idem_once_many', $$idem_once_many('reference', '{token}'::text[])$$),
('idem_publish', $$idem_publish('reference', '{}')$$),
('idem_publish_many', $$idem_publish_many('{reference}', '{1}')$$),
('idem_outbox_take', $$idem_outbox_take(topics => '{reference}')$$),
('idem_outbox_ack', $$idem_outbox_ack(ARRAY[$2])$$),
('idem_outbox_nack', $$idem_outbox_nack($2)$$),
('idem_outbox_requeue', $$idem_outbox_requeue(ARRAY[$2])$$),
('idem_outbox_extend', $$idem_outbox_extend(ARRAY[$2])$$),
('idem_outbox_give_back', $$idem_outbox_give_back(ARRAY[$2])$$),
('idem_grant', $$idem_grant('idem_test_app')$$),
('idem_grant_monitor', $$idem_grant_monitor('idem_test_app')$$),
('idem_revoke', $$idem_revoke('idem_test_app')$$),
('idem_metric_samples', $$idem_metric_samples()$$),
('idem_metrics', $$idem_metrics()$$),
('idem_health', $$idem_health()$$),
('idem_stuck', $$idem_stuck()$$),
('idem_stats_reset', $$idem_stats_reset()$$),
('idem_cleanup', $$idem_cleanup()$$),
('idem_raise_claim_tokens', $$idem_raise_claim_tokens(0)$$);
CREATE FUNCTION pg_temp.handler(request jsonb) RETURNS jsonb
LANGUAGE sql RETURN request;

-- What becomes of a call: its SQLSTATE, and the tables of ours that it keeps
-- locked against more than others' writing.  Its effects are rolled back.
CREATE FUNCTION pg_temp.outcome_of(call text, read_only boolean, token bigint,
	message bigint, OUT sqlstate text, OUT tables text)
LANGUAGE plpgsql AS $$
BEGIN
	IF read_only THEN
		SET LOCAL transaction_read_only = on;
	END IF;
	EXECUTE 'SELECT count(*) FROM (SELECT ' || call || ') AS c'
		USING token, message;
	SELECT string_agg(DISTINCT c.relname, ', ') INTO tables
	FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
	WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation'
		AND l.mode <> 'AccessShareLock' AND c.relkind = 'r'
		AND c.oid IN (SELECT objid FROM pg_depend
			WHERE classid = 'pg_class'::regclass AND deptype = 'e');
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	outcome_of.sqlstate := CASE SQLSTATE WHEN 'ZZ000' THEN 'yes'
		ELSE SQLSTATE END;
END
$$;

-- All functions of the extension, and who may call them.
CREATE TEMP VIEW functions AS
	SELECT p.oid::regprocedure AS signature, p.proname::text AS name,
		CASE WHEN has_function_privilege('idem_test_app', p.oid, 'EXECUTE')
				THEN 'application'
			WHEN has_function_privilege('idem_test_monitor', p.oid, 'EXECUTE')
				THEN 'monitor'
			WHEN has_function_privilege('pg_monitor', p.oid, 'EXECUTE')
				THEN 'pg_monitor'
			ELSE 'administrator' END AS who
	FROM pg_proc AS p JOIN pg_depend AS d
		ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
		AND d.deptype = 'e'
		AND d.refobjid = (SELECT oid FROM pg_extension
			WHERE extname = 'idempotency');

SELECT plan(5 + (SELECT count(*)::int FROM functions
		WHERE name IN (SELECT name FROM glance))
	+ 2 * (SELECT count(*)::int FROM glance));

-- Functions for administrators that it does not name are the extension's own,
-- of which test/readme has the list.
SELECT is_empty(
	'SELECT name FROM glance GROUP BY name HAVING count(*) > 1',
	'no function has two lines');
SELECT set_eq('SELECT name FROM glance', 'SELECT name FROM calls',
	'each function is called below');
SELECT is_empty(
	'SELECT name FROM glance EXCEPT SELECT name FROM functions',
	'the functions that have a line exist');
SELECT is_empty(
	$$SELECT name FROM functions
	WHERE who <> 'administrator' AND name <> 'idem_stats_data'
	EXCEPT SELECT name FROM glance$$,
	'what is given to an application or a monitor has a line');
SELECT is_empty(
	$$SELECT name FROM glance
	WHERE waits_for = '' OR holds = '' OR errors = '{""}'$$,
	'nothing is left open');

SELECT is(f.who, g.who, format('who may call %s', f.signature))
FROM functions AS f JOIN glance AS g USING (name)
ORDER BY f.name;

SELECT is((pg_temp.outcome_of(call, true, token, :message)).sqlstate,
	g.read_only, name || ' in a read-only transaction')
FROM glance AS g LEFT JOIN calls USING (name), held
ORDER BY name;

-- What is said of rows comes after the tables.
SELECT is(o.sqlstate || ': ' || coalesce(o.tables, '–'), 'yes: '
		|| coalesce((SELECT string_agg(t[1], ', ' ORDER BY t[1])
			FROM regexp_matches(split_part(g.holds, ';', 1), '`(.*?)`', 'g') AS t), '–'),
	name || ' holds what it is said to')
FROM glance AS g LEFT JOIN calls USING (name), held,
	LATERAL pg_temp.outcome_of(call, false, token, :message) AS o
ORDER BY name;

SELECT * FROM finish();
ROLLBACK;

DO $$
BEGIN
	PERFORM idem_forget('reference', 'key-of-reference');
END
$$;
DELETE FROM idem_outbox WHERE topic = 'reference';
DELETE FROM idem_client_sequences WHERE aggregate = 'reference';
DELETE FROM idem_aggregates WHERE aggregate = 'reference';
