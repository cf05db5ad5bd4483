-- The tables and functions of the loads.
--
--	:acked		messages that lie acknowledged in the outbox
--	:pending	messages that take_ack may consume
--	:noop		the library of functions that do nothing

\ir shape.sql

CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text NOT NULL);
CREATE TABLE events (aggregate text NOT NULL, client_id text NOT NULL, client_seq bigint NOT NULL, event text NOT NULL);
CREATE SEQUENCE hand_outbox_ids;

-- The do-nothing functions.
CREATE FUNCTION noop_try_advance(user_id text, entity_type text, entity_id text, action_id bigint)
RETURNS idem_advance_result LANGUAGE c AS :'noop', 'noop_try_advance';
CREATE FUNCTION noop_claim(scope text, key text, request_hash bytea)
RETURNS idem_claim_result LANGUAGE c AS :'noop', 'noop_claim';

\ir hand_claim.sql

-- A whole request as a developer writes it who knows that nothing happens
-- between claim and completion.
CREATE FUNCTION hand_request(p_scope text, p_key text, p_hash bytea, p_sku text,
	OUT outcome text, OUT response_status int, OUT response_headers json, OUT response_body text)
LANGUAGE plpgsql AS $$
DECLARE
	r hand_keys;
BEGIN
	INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash)
		VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', p_scope, p_key, p_hash)
		ON CONFLICT DO NOTHING;
	IF FOUND THEN
		INSERT INTO orders (sku) VALUES (p_sku);
		response_status := 201;
		response_headers := '{"Content-Type": "application/json"}';
		response_body := '{"order": 12345, "status": "created"}';
		UPDATE hand_keys k SET state = 'completed', completed_at = clock_timestamp(), lease_expires_at = NULL,
				response_status = 201, response_headers = hand_request.response_headers, response_body = hand_request.response_body
			WHERE k.key = p_key AND k.scope = p_scope;
		outcome := 'new';
		RETURN;
	END IF;
	SELECT k.* INTO r FROM hand_keys k WHERE k.key = p_key AND k.scope = p_scope;
	outcome := CASE WHEN r.request_hash <> p_hash THEN 'hash_conflict' WHEN r.state = 'completed' THEN 'replay' ELSE 'in_progress' END;
	IF outcome = 'replay' THEN
		response_status := r.response_status;
		response_headers := r.response_headers;
		response_body := r.response_body;
	END IF;
END
$$;

-- The same with our functions, and as a handler of idem_run().
CREATE FUNCTION claim_place_complete(p_scope text, p_key text, p_hash bytea, p_sku text,
	OUT outcome text, OUT response_status int, OUT response_headers json, OUT response_body text)
LANGUAGE plpgsql AS $$
BEGIN
	SELECT c.outcome, c.response_status, c.response_headers, c.response_body
		INTO outcome, response_status, response_headers, response_body
		FROM idem_claim(p_scope, p_key, p_hash) AS c;
	IF outcome = 'new' THEN
		INSERT INTO orders (sku) VALUES (p_sku);
		response_status := 201;
		response_headers := '{"Content-Type": "application/json"}';
		response_body := '{"order": 12345, "status": "created"}';
		PERFORM idem_complete(p_scope, p_key, response_status, response_body, response_headers);
	END IF;
END
$$;

CREATE FUNCTION place_order(request jsonb) RETURNS idem_response LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO orders (sku) VALUES (request ->> 'sku');
	RETURN (201, '{"Content-Type": "application/json"}', '{"order": 12345, "status": "created"}')::idem_response;
END
$$;

-- Ten calls in PL/pgSQL: in FROM, and as a value.
CREATE FUNCTION loop_replay_from() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	FOR i IN 1000001..1000010 LOOP
		SELECT * INTO r FROM idem_claim('scope-1', 'key-replay-' || i || '-12345678', sha256('request'));
	END LOOP;
END
$$;
CREATE FUNCTION loop_replay_value() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	FOR i IN 1000001..1000010 LOOP
		r := idem_claim('scope-1', 'key-replay-' || i || '-12345678', sha256('request'));
	END LOOP;
END
$$;
CREATE FUNCTION loop_stale_from() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	FOR i IN 1..10 LOOP
		SELECT * INTO r FROM idem_try_advance('user-' || i, 'post', 'entity-1', 5);
	END LOOP;
END
$$;
CREATE FUNCTION loop_stale_value() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	FOR i IN 1..10 LOOP
		r := idem_try_advance('user-' || i, 'post', 'entity-1', 5);
	END LOOP;
END
$$;

-- 10,000 counters, actions with theirs, and completed keys.
SELECT count(idem_try_advance('user-' || i, 'post', 'entity-1', 1000000000000))
	FROM generate_series(1, 10000) AS i;
SELECT count(idem_set('user-' || i, 'post', 'entity-2', 'like', true, 1))
	FROM generate_series(1, 10000) AS i;
INSERT INTO hand_versions SELECT * FROM idem_action_versions;
INSERT INTO hand_user_actions SELECT * FROM idem_user_actions;
SELECT count(idem_complete('scope-1', 'key-replay-' || i || '-12345678', 201,
		'{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}'))
	FROM generate_series(1000001, 1010000) AS i,
		LATERAL idem_claim('scope-1', 'key-replay-' || i || '-12345678', sha256('request'), '7 days') AS c;
INSERT INTO hand_keys SELECT * FROM idem_keys;

-- Acknowledged messages lie in the outbox already.
INSERT INTO idem_outbox (id, created_at, available_at, acked_at, attempt, uncounted_attempts, awaiting_ack, in_due_index, message_id, state, topic, payload)
	SELECT i, now(), now(), now(), 1, 0, true, false, gen_random_uuid(), 'acked', 'orders', '{"order": 1, "status": "created"}'
	FROM generate_series(-:acked, -1) AS i;
SELECT count(*) FROM idem_publish_many('{orders}', array_fill('{"order": 1, "status": "created"}'::jsonb, ARRAY[:pending]));
INSERT INTO hand_outbox SELECT * FROM idem_outbox;
SELECT setval('hand_outbox_ids', max(id)) FROM hand_outbox;

-- JSON bodies of about a size: orders of many items, on one line as sent.
CREATE TABLE bodies (size int PRIMARY KEY, body text NOT NULL);
ALTER TABLE bodies ALTER body SET STORAGE EXTERNAL;
INSERT INTO bodies
	SELECT size, '{"customer":"c-4711","items":[' || string_agg(item, ',' ORDER BY i) || ']}'
	FROM unnest('{100,1000,10000,100000,1000000}'::int[]) AS size,
		generate_series(1, greatest(1, (size - 31) / 76)) AS i,
		format('{"sku":"AB-%s","quantity":%s,"price":%s,"gift":false,"note":"for grandma"}',
			lpad(i::text, 6, '0'), i % 9 + 1, (i % 100 + 0.5)::numeric(5, 2)) AS item
	GROUP BY size;

-- The loads are what they are taken for.
DO $$
DECLARE
	replayed text := 'key-replay-1000001-12345678';
BEGIN
	ASSERT (SELECT outcome FROM idem_claim('scope-1', replayed, sha256('request'))) = 'replay';
	ASSERT (SELECT outcome FROM hand_claim('scope-1', replayed, sha256('request'))) = 'replay';
	ASSERT (SELECT outcome FROM idem_claim('scope-1', replayed, sha256('other'))) = 'hash_conflict';
	ASSERT (SELECT outcome FROM hand_claim('scope-1', replayed, sha256('other'))) = 'hash_conflict';
	ASSERT (SELECT row(c.*)::text FROM (SELECT outcome, response_status, response_headers, response_body FROM idem_claim('scope-1', replayed, sha256('request'))) c)
		= (SELECT row(c.*)::text FROM (SELECT outcome, response_status, response_headers, response_body FROM noop_claim('scope-1', replayed, sha256('request'))) c);
	ASSERT (SELECT row(a.*)::text FROM idem_try_advance('user-1', 'post', 'entity-1', 5) a) = '(f,1000000000000)';
	ASSERT (SELECT row(a.*)::text FROM noop_try_advance('user-1', 'post', 'entity-1', 5) a) = '(f,1000000000000)';
	ASSERT (SELECT bool_and(abs(octet_length(body) - size) < 50 + size / 10) FROM bodies), 'sizes of the bodies';
END
$$;

VACUUM ANALYZE;
