--
-- Versioned user actions: the latest intent wins, whatever the order.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql

--
-- The counter
--
SELECT * FROM idem_try_advance('ann', 'post', '1', 5);
SELECT * FROM idem_try_advance('ann', 'post', '1', 5);
SELECT * FROM idem_try_advance('ann', 'post', '1', 4);
SELECT * FROM idem_try_advance('ann', 'post', '1', 6);
-- One for each user, entity type and entity.
SELECT * FROM idem_try_advance('bob', 'post', '1', 1);
SELECT * FROM idem_try_advance('ann', 'user', '1', 1);
SELECT * FROM idem_try_advance('ann', 'post', '2', 1);
SELECT * FROM idem_try_advance('ann', 'post', '1', 7);
-- Any bigint is an action id.
SELECT a.* FROM unnest('{-9223372036854775808, -1, 0, 9223372036854775807, 9223372036854775807, 0}'::bigint[]) AS i,
	idem_try_advance('ann', 'post', 'ids', i) AS a;
-- Parts of a name do not run together; case counts.
SELECT a.* FROM (VALUES ('a', 'b', 'cd'), ('a', 'bc', 'd'), ('ab', 'c', 'd'), ('A', 'B', 'CD'), (' a', 'b', 'cd'), ('ä', 'ö', 'ü')) AS n (u, t, e),
	idem_try_advance(u, t, e, 1) AS a;
SELECT count(*) FROM idem_action_versions WHERE last_action_id = 1 AND entity_id IN ('cd', 'd', 'CD', 'ü');

--
-- idem_set: the state that is wanted
--
SELECT idem_is_active('ann', 'photo', '1', 'like');
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 10);
SELECT idem_is_active('ann', 'photo', '1', 'like');
-- Stale calls get the current state, whatever they wanted.
SELECT * FROM idem_set('ann', 'photo', '1', 'like', false, 10);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', false, 9);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 9);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', false, 11);
SELECT idem_is_active('ann', 'photo', '1', 'like');
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 10);
-- The action types of an entity share the counter.
SELECT * FROM idem_set('ann', 'photo', '1', 'save', true, 11);
SELECT * FROM idem_set('ann', 'photo', '1', 'save', true, 12);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 12);
SELECT * FROM idem_try_advance('ann', 'photo', '1', 12);
SELECT * FROM idem_try_advance('ann', 'photo', '1', 13);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 13);
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 14);
SELECT action_type, is_active, last_action_id FROM idem_user_actions
	WHERE (user_id, entity_type, entity_id) = ('ann', 'photo', '1') ORDER BY action_type;
-- Setting what is set already still counts.
SELECT * FROM idem_set('ann', 'photo', '1', 'like', true, 15);
SELECT is_active, last_action_id FROM idem_user_actions
	WHERE (user_id, entity_type, entity_id, action_type) = ('ann', 'photo', '1', 'like');

--
-- idem_toggle: the other state
--
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 1);
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 1);
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 2);
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 1);
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 5);
SELECT * FROM idem_toggle('ann', 'film', '1', 'save', 5);
SELECT * FROM idem_toggle('ann', 'film', '1', 'save', 6);
SELECT idem_is_active('ann', 'film', '1', 'like'), idem_is_active('ann', 'film', '1', 'save');
-- Toggle and set see each other's work.
SELECT * FROM idem_set('ann', 'film', '1', 'like', false, 7);
SELECT * FROM idem_toggle('ann', 'film', '1', 'like', 8);

--
-- excludes: what cannot be active beside it
--
SELECT * FROM idem_set('ann', 'song', '1', 'dislike', true, 1);
SELECT * FROM idem_set('ann', 'song', '1', 'hate', true, 2);
SELECT * FROM idem_set('ann', 'song', '1', 'save', true, 3);
SELECT * FROM idem_set('ann', 'song', '2', 'dislike', true, 3);
SELECT * FROM idem_set('ann', 'song', '1', 'like', true, 4, '{dislike,hate,never_set}');
SELECT action_type, is_active, last_action_id FROM idem_user_actions
	WHERE (user_id, entity_type) = ('ann', 'song') AND entity_id = '1' ORDER BY action_type;
SELECT idem_is_active('ann', 'song', '2', 'dislike');
-- A stale call clears nothing.
SELECT * FROM idem_set('ann', 'song', '1', 'dislike', true, 4, '{like}');
SELECT idem_is_active('ann', 'song', '1', 'like');
-- It clears when it activates only.
SELECT * FROM idem_set('ann', 'song', '1', 'dislike', false, 5, excludes => '{like}');
SELECT idem_is_active('ann', 'song', '1', 'like');
SELECT * FROM idem_set('ann', 'song', '1', 'dislike', true, 6, excludes => '{like,like}');
SELECT idem_is_active('ann', 'song', '1', 'like'), idem_is_active('ann', 'song', '1', 'save');
-- None is none.
SELECT * FROM idem_set('ann', 'song', '1', 'like', true, 7, '{}');
SELECT * FROM idem_set('ann', 'song', '1', 'like', true, 8, NULL);
SELECT idem_is_active('ann', 'song', '1', 'dislike');

--
-- All orders in which six calls can arrive
--
CREATE TEMP TABLE orders AS
	WITH RECURSIVE o (ids) AS (
		SELECT '{}'::int[]
		UNION ALL
		SELECT ids || i FROM o, generate_series(1, 6) AS i WHERE i <> ALL (ids)
	)
	SELECT row_number() OVER (ORDER BY ids) AS n, ids FROM o WHERE cardinality(ids) = 6;
SELECT count(*), count(DISTINCT ids) FROM orders;
-- How many ids of an order are above all that came before: those are processed.
CREATE FUNCTION pg_temp.records(ids int[]) RETURNS bigint
LANGUAGE sql AS $$
	SELECT count(*) FROM generate_subscripts(ids, 1) AS i
		WHERE ids[i] >= ALL (ids[1:i])
$$;
CREATE TEMP TABLE arrived (n bigint, processed bigint, advanced bigint, toggled bigint);
-- In bulk
DO $$
DECLARE
	o record;
	i int;
	processed bigint;
	advanced bigint;
	toggled bigint;
BEGIN
	FOR o IN SELECT * FROM orders LOOP
		processed := 0;
		advanced := 0;
		toggled := 0;
		FOREACH i IN ARRAY o.ids LOOP
			-- on, off, on, off, on, off
			processed := processed + (SELECT s.processed::int FROM idem_set('u' || o.n, 'even', 'e', 'like', i % 2 = 1, i) AS s);
			-- off, on, off, on, off, on
			PERFORM idem_set('u' || o.n, 'odd', 'e', 'like', i % 2 = 0, i);
			-- like, dislike, like, dislike, like, dislike
			PERFORM idem_set('u' || o.n, 'two', 'e', CASE WHEN i % 2 = 1 THEN 'like' ELSE 'dislike' END, true, i,
				CASE WHEN i % 2 = 1 THEN '{dislike}' ELSE '{like}' END::text[]);
			toggled := toggled + (SELECT s.processed::int FROM idem_toggle('u' || o.n, 'toggle', 'e', 'like', i) AS s);
			advanced := advanced + (SELECT a.should_process::int FROM idem_try_advance('u' || o.n, 'advance', 'e', i) AS a);
		END LOOP;
		INSERT INTO arrived VALUES (o.n, processed, advanced, toggled);
	END LOOP;
END
$$;
-- The sixth intent, in every one of them.
SELECT idem_is_active('u' || n, 'even', 'e', 'like') AS off,
		idem_is_active('u' || n, 'odd', 'e', 'like') AS on,
		idem_is_active('u' || n, 'two', 'e', 'like') AS like,
		idem_is_active('u' || n, 'two', 'e', 'dislike') AS dislike,
		count(*)
	FROM orders GROUP BY 1, 2, 3, 4;
SELECT count(*) FROM orders JOIN arrived USING (n)
	WHERE processed = pg_temp.records(ids) AND advanced = pg_temp.records(ids) AND toggled = pg_temp.records(ids);
SELECT processed, count(*) FROM arrived GROUP BY 1 ORDER BY 1;
SELECT min(last_action_id), max(last_action_id), count(*) FROM idem_action_versions WHERE user_id LIKE 'u%' GROUP BY entity_type ORDER BY entity_type;
-- Six toggles should end where they began. Half of the orders do not.
SELECT idem_is_active('u' || n, 'toggle', 'e', 'like') AS wrong, count(*) FROM orders GROUP BY 1 ORDER BY 1;
-- One by one

--
-- A rollback undoes everything
--
BEGIN;
SAVEPOINT s;
SELECT * FROM idem_set('sam', 'post', '1', 'like', true, 100);
ROLLBACK TO s;
SELECT * FROM idem_set('sam', 'post', '1', 'like', true, 50);
SAVEPOINT s;
SELECT * FROM idem_set('sam', 'post', '1', 'like', false, 60);
SELECT * FROM idem_set('sam', 'post', '1', 'like', false, 60);
ROLLBACK TO s;
SELECT * FROM idem_set('sam', 'post', '1', 'like', false, 50);
SELECT idem_is_active('sam', 'post', '1', 'like');
COMMIT;
SELECT * FROM idem_try_advance('sam', 'post', '1', 51);
DO $$
BEGIN
	BEGIN
		PERFORM idem_toggle('sam', 'post', '1', 'like', 52);
		RAISE EXCEPTION 'undo';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	PERFORM idem_try_advance('sam', 'post', '1', 52);
END
$$;
SELECT * FROM idem_toggle('sam', 'post', '1', 'like', 52);
-- Several calls in one statement see each other's work.
SELECT i, s.* FROM generate_series(1, 3) AS i, idem_toggle('sam', 'post', '2', 'like', i) AS s;
SELECT i, s.* FROM generate_series(1, 4) AS i, idem_set('sam', 'post', '3', 'like', i % 2 = 1, i / 2) AS s;

--
-- A stale call writes nothing and takes no transaction id
--
SELECT * FROM idem_set('tim', 'post', '1', 'like', true, 5);
CREATE TEMP TABLE before AS
	SELECT 'version' AS what, xmin AS writer, xmax AS locker, ctid AS place FROM idem_action_versions WHERE user_id = 'tim'
	UNION ALL SELECT 'action', xmin, xmax, ctid FROM idem_user_actions WHERE user_id = 'tim';
BEGIN;
SELECT * FROM idem_try_advance('tim', 'post', '1', 5);
SELECT * FROM idem_set('tim', 'post', '1', 'like', false, 4, '{dislike}');
SELECT * FROM idem_toggle('tim', 'post', '1', 'like', 5);
SELECT * FROM idem_toggle('tim', 'post', '1', 'other', 5);
SELECT idem_is_active('tim', 'post', '1', 'like');
SELECT what FROM before JOIN (
		SELECT 'version' AS what, xmin AS x, xmax AS l, ctid AS c FROM idem_action_versions WHERE user_id = 'tim'
		UNION ALL SELECT 'action', xmin, xmax, ctid FROM idem_user_actions WHERE user_id = 'tim') AS after USING (what)
	WHERE writer = x AND locker = l AND place = c ORDER BY what;
SELECT count(*) FROM idem_user_actions WHERE user_id = 'tim';
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
-- ... and this would show it.
SELECT * FROM idem_try_advance('tim', 'post', '1', 6);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
ROLLBACK;

--
-- Rows written: clearing what is not set writes none, all updates are HOT
--
BEGIN;
CREATE FUNCTION pg_temp.written(OUT inserted bigint, OUT updated bigint, OUT hot bigint)
LANGUAGE sql AS $$
	SELECT sum(pg_stat_get_xact_tuples_inserted(t)), sum(pg_stat_get_xact_tuples_updated(t)), sum(pg_stat_get_xact_tuples_hot_updated(t))
	FROM unnest('{idem_action_versions,idem_user_actions}'::regclass[]) AS t
$$;
CREATE FUNCTION pg_temp.written_by(statement text, OUT inserted bigint, OUT updated bigint, OUT hot bigint)
LANGUAGE plpgsql AS $$
DECLARE
	before record;
	after record;
BEGIN
	SELECT * INTO before FROM pg_temp.written();
	EXECUTE statement;
	SELECT * INTO after FROM pg_temp.written();
	inserted := after.inserted - before.inserted;
	updated := after.updated - before.updated;
	hot := after.hot - before.hot;
END
$$;
SELECT * FROM pg_temp.written_by($$ SELECT idem_try_advance('una', 'post', '1', 1) $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_try_advance('una', 'post', '1', 1) $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_try_advance('una', 'post', '1', 2) $$);
-- off, and no row: the counter only
SELECT * FROM pg_temp.written_by($$ SELECT idem_set('una', 'post', '1', 'like', false, 3) $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_set('una', 'post', '1', 'like', true, 4, '{dislike,hate}') $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_set('una', 'post', '1', 'like', true, 4) $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_set('una', 'post', '1', 'dislike', true, 5, '{like,hate}') $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_toggle('una', 'post', '1', 'dislike', 6) $$);
-- off already: the counter only
SELECT * FROM pg_temp.written_by($$ SELECT idem_set('una', 'post', '1', 'dislike', false, 7) $$);
SELECT * FROM pg_temp.written_by($$ SELECT idem_toggle('una', 'post', '1', 'hate', 8) $$);
SELECT action_type, is_active, last_action_id, updated_at BETWEEN now() AND clock_timestamp() AS updated
	FROM idem_user_actions WHERE user_id = 'una' ORDER BY action_type;
SELECT last_action_id FROM idem_action_versions WHERE user_id = 'una';
COMMIT;

--
-- The lead guard: action ids as milliseconds since 1970
--
SHOW idempotency.max_action_id_lead;
-- off
SELECT * FROM idem_try_advance('dan', 'post', 'far', 9223372036854775807);
SET idempotency.max_action_id_lead = '1h';
CREATE FUNCTION pg_temp.ms(ahead interval) RETURNS bigint
LANGUAGE sql AS $$ SELECT (extract(epoch FROM clock_timestamp() + ahead) * 1000)::bigint $$;
SELECT pg_temp.code_of($$ SELECT idem_try_advance('dan', 'post', '1', pg_temp.ms('61 min')) $$);
SELECT pg_temp.code_of($$ SELECT idem_set('dan', 'post', '1', 'like', true, pg_temp.ms('61 min')) $$);
SELECT pg_temp.code_of($$ SELECT idem_toggle('dan', 'post', '1', 'like', pg_temp.ms('61 min')) $$);
SELECT pg_temp.code_of($$ SELECT idem_try_advance('dan', 'post', '1', 9223372036854775807) $$);
-- microseconds instead of milliseconds
SELECT pg_temp.code_of($$ SELECT idem_try_advance('dan', 'post', '1', pg_temp.ms('0') * 1000) $$);
SELECT count(*) FROM idem_action_versions WHERE (user_id, entity_id) = ('dan', '1');
SELECT should_process FROM idem_try_advance('dan', 'post', '1', -9223372036854775808);
SELECT should_process FROM idem_try_advance('dan', 'post', '1', 0);
SELECT should_process FROM idem_try_advance('dan', 'post', '1', pg_temp.ms('-1 year'));
SELECT should_process FROM idem_try_advance('dan', 'post', '1', pg_temp.ms('0'));
SELECT should_process FROM idem_try_advance('dan', 'post', '1', pg_temp.ms('59 min'));
-- The message names the distance; a minute is allowed to this test.
DO $$
DECLARE
	detail text;
	hint text;
BEGIN
	PERFORM idem_try_advance('dan', 'post', '1', pg_temp.ms('2 hours'));
EXCEPTION WHEN SQLSTATE 'ID005' THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RAISE NOTICE '%', regexp_replace(SQLERRM, '\d{13}', 'N');
	RAISE NOTICE '%', regexp_replace(detail, '\d{7} ms ahead', 'N ms ahead');
	RAISE NOTICE '%', substring(detail FROM '(\d+) ms ahead')::int BETWEEN 7140000 AND 7200001;
	RAISE NOTICE '%', hint;
END
$$;
-- A stale id that is too far ahead raises the same error.
SELECT pg_temp.code_of($$ SELECT idem_try_advance('dan', 'post', 'far', 9223372036854775807) $$);
RESET idempotency.max_action_id_lead;

--
-- Named notation
--
SELECT * FROM idem_try_advance(action_id => 1, entity_id => '1', entity_type => 'post', user_id => 'eve');
SELECT * FROM idem_toggle(action_id => 2, action_type => 'like', entity_id => '1', entity_type => 'post', user_id => 'eve');
SELECT * FROM idem_set(excludes => NULL, action_id => 3, active => true, action_type => 'like', entity_id => '1', entity_type => 'post', user_id => 'eve');
SELECT idem_is_active(action_type => 'like', entity_id => '1', entity_type => 'post', user_id => 'eve');
