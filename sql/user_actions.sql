--
-- All that a user has done: idem_action_states and idem_forget_user.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on
CREATE FUNCTION pg_temp.code_of(statement text) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN '00000';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ' ' || SQLERRM;
END
$$;

SELECT processed FROM idem_set('ann', 'post', '1', 'like', true, 10);
SELECT processed FROM idem_set('ann', 'post', '1', 'save', true, 11);
SELECT processed FROM idem_set('ann', 'post', '2', 'like', true, 12);
SELECT processed FROM idem_set('ann', 'post', '2', 'like', false, 13);
SELECT processed FROM idem_set('ann', 'post', '3', 'like', false, 14);	-- the counter only
SELECT processed FROM idem_set('ann', 'page', '1', 'like', true, 15);
SELECT processed FROM idem_set('anna', 'post', '1', 'like', true, 16);
SELECT processed FROM idem_set('Ann', 'post', '1', 'like', true, 17);

--
-- idem_action_states
--
SELECT * FROM idem_action_states('ann', 'post', '{1,2,3,4}');
SELECT * FROM idem_action_states('ann', 'post', '{2,1,2,1,1}');
SELECT * FROM idem_action_states(entity_ids => '{1}', entity_type => 'page', user_id => 'ann');
SELECT count(*) FROM idem_action_states('ann', 'post', '{}');
SELECT count(*) FROM idem_action_states('bob', 'post', '{1}');
-- The counter goes with the pair, not with the action type.
SELECT last_action_id, action_type FROM idem_user_actions WHERE (user_id, entity_type, entity_id) = ('ann', 'post', '1') ORDER BY action_type;
-- A counter that a superuser has deleted
BEGIN;
DELETE FROM idem_action_versions WHERE user_id = 'ann' AND entity_id = '2';
SELECT * FROM idem_action_states('ann', 'post', '{1,2}');
ROLLBACK;
SELECT call, pg_temp.code_of('SELECT count(*) FROM ' || call) FROM unnest(ARRAY[
	'idem_action_states(NULL, ''post'', ''{1}'')', 'idem_action_states(''ann'', NULL, ''{1}'')', 'idem_action_states(''ann'', ''post'', NULL)',
	'idem_action_states(''ann'', ''post'', ''{1,NULL}'')', 'idem_action_states(''ann'', ''post'', ''{1,""}'')',
	'idem_action_states('''', ''post'', ''{1}'')', 'idem_action_states(''ann'', '''', ''{1}'')',
	'idem_action_states(''ann'', ''post'', ''{{1}}'')', 'idem_action_states(''ann'', ''post'', ARRAY[repeat(''x'', 513)])']) AS call;
-- Whatever the order of columns in the primary key
BEGIN;
ALTER TABLE idem_user_actions DROP CONSTRAINT idem_user_actions_pkey;
ALTER TABLE idem_user_actions ADD PRIMARY KEY (action_type, entity_id, user_id, entity_type);
SELECT * FROM idem_action_states('ann', 'post', '{2,1}');
SELECT idem_forget_user('ann');
ROLLBACK;
-- It reads only: no transaction id; and as much as it is asked for.
BEGIN READ ONLY;
SELECT count(*) FROM idem_action_states('ann', 'post', '{1,2}');
SELECT pg_current_xact_id_if_assigned() IS NULL;
COMMIT;
SELECT count(*) FROM generate_series(1, 5000) AS n, idem_set('many', 'post', n::text, 'like', true, n) WHERE processed;
ANALYZE idem_user_actions, idem_action_versions;
CREATE FUNCTION pg_temp.buffers(query text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE query;
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) ' || query INTO plan;
	RETURN (plan->0->'Plan'->>'Shared Hit Blocks')::int + (plan->0->'Plan'->>'Shared Read Blocks')::int;
END
$$;
SELECT pg_temp.buffers($$ SELECT * FROM idem_action_states('many', 'post', '{1}') $$) < 30;
SELECT pg_temp.buffers($$ SELECT * FROM idem_action_states('many', 'post', '{1,10,100,1000,2000,3000,4000,5000,6000,7000}') $$) < 150;
SELECT count(*), sum(last_action_id) FROM idem_action_states('many', 'post', ARRAY(SELECT n::text FROM generate_series(1, 10000) AS n));


--
-- idem_forget_user
--
SELECT idem_forget_user('nobody');
SELECT idem_forget_user('ann');
SELECT idem_forget_user('ann');
SELECT count(*) FROM idem_action_versions WHERE user_id = 'ann';
SELECT count(*) FROM idem_user_actions WHERE user_id = 'ann';
-- Nobody else's, however alike the name
SELECT user_id, is_active FROM idem_user_actions WHERE user_id <> 'many' ORDER BY user_id;
-- The next call is the first one, with any id.
SELECT * FROM idem_set('ann', 'post', '1', 'like', true, 1);
SELECT * FROM idem_action_states('ann', 'post', '{1,2}');
-- Actions without a counter, and a counter without actions
SELECT processed FROM idem_set('ann', 'post', '2', 'like', true, 2);
SELECT should_process FROM idem_try_advance('ann', 'post', '3', 2);
DELETE FROM idem_action_versions WHERE user_id = 'ann' AND entity_id IN ('1', '2');
SELECT idem_forget_user('ann');
SELECT count(*) FROM idem_user_actions WHERE user_id = 'ann';
-- Others' actions without a counter are not his.
SELECT processed FROM idem_set('zoe', 'post', '1', 'like', true, 2);
DELETE FROM idem_action_versions WHERE user_id = 'zoe';
SELECT idem_forget_user('ann');
SELECT idem_forget_user('zoe');
-- Its own writes, too; and it can be undone.
BEGIN;
SELECT processed FROM idem_set('ann', 'post', '1', 'like', true, 3);
SELECT idem_forget_user('ann');
SELECT * FROM idem_action_states('ann', 'post', '{1}');
SELECT processed FROM idem_set('ann', 'post', '1', 'like', true, 2);
SELECT * FROM idem_action_states('ann', 'post', '{1}');
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_forget_user('anna');
SELECT processed FROM idem_set('anna', 'post', '1', 'like', true, 1);
SELECT * FROM idem_action_states('anna', 'post', '{1}');
ROLLBACK;
SELECT * FROM idem_action_states('anna', 'post', '{1}');
SELECT idem_forget_user('many');
SELECT count(*) FROM idem_user_actions;
SELECT call, pg_temp.code_of('SELECT ' || call) FROM unnest(ARRAY['idem_forget_user(NULL)', 'idem_forget_user('''')',
	'idem_forget_user(repeat(''x'', 513))']) AS call;
BEGIN READ ONLY;
SELECT pg_temp.code_of('SELECT idem_forget_user(''ann'')');
ROLLBACK;

-- The owner of the extension need not be a superuser.
SET client_min_messages = warning;
DROP EXTENSION idempotency;
CREATE ROLE regress_idem_owner;
DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO regress_idem_owner', current_database()); END $$;
CREATE SCHEMA regress_idem_forget AUTHORIZATION regress_idem_owner;
SET ROLE regress_idem_owner;
CREATE EXTENSION idempotency SCHEMA regress_idem_forget;
SELECT processed FROM regress_idem_forget.idem_set('ann', 'post', '1', 'like', true, 1);
SELECT regress_idem_forget.idem_forget_user('ann');
RESET ROLE;
DROP EXTENSION idempotency;
DROP SCHEMA regress_idem_forget;
DO $$ BEGIN EXECUTE format('REVOKE CREATE ON DATABASE %I FROM regress_idem_owner', current_database()); END $$;
DROP ROLE regress_idem_owner;
