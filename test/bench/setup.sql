-- What the loads work on: our tables, and tables of the same shape that the
-- hand-written SQL uses.

CREATE EXTENSION idempotency;

CREATE TABLE hand_versions (LIKE idem_action_versions INCLUDING ALL);
CREATE TABLE hand_keys (LIKE idem_keys INCLUDING ALL);
CREATE TABLE hand_outbox (LIKE idem_outbox INCLUDING ALL);
CREATE SEQUENCE hand_outbox_ids;

-- The logic of idem_claim() as an application developer writes it.
CREATE FUNCTION hand_claim(p_scope text, p_key text, p_hash bytea,
	OUT outcome text, OUT response_status int, OUT response_headers json, OUT response_body text)
LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	SELECT k.state, k.request_hash, k.response_status, k.response_headers,
			k.response_body, k.expires_at, k.lease_expires_at
		INTO r FROM hand_keys k WHERE k.scope = p_scope AND k.key = p_key;
	IF NOT FOUND THEN
		INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash)
			VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', p_scope, p_key, p_hash)
			ON CONFLICT DO NOTHING;
		outcome := CASE WHEN FOUND THEN 'new' ELSE 'in_progress' END;
		RETURN;
	END IF;
	IF r.expires_at > clock_timestamp() THEN
		IF r.request_hash IS DISTINCT FROM p_hash THEN
			outcome := 'hash_conflict';
			RETURN;
		END IF;
		IF r.state = 'completed' THEN
			outcome := 'replay';
			response_status := r.response_status;
			response_headers := r.response_headers;
			response_body := r.response_body;
			RETURN;
		END IF;
		IF r.lease_expires_at > clock_timestamp() THEN
			outcome := 'in_progress';
			RETURN;
		END IF;
	END IF;
	UPDATE hand_keys SET state = 'started', attempt = attempt + 1, request_hash = p_hash,
			lease_expires_at = clock_timestamp() + '1 min', expires_at = clock_timestamp() + '1 day'
		WHERE scope = p_scope AND key = p_key AND expires_at = r.expires_at;
	outcome := CASE WHEN FOUND THEN 'new' ELSE 'in_progress' END;
END
$$;

INSERT INTO hand_versions (last_action_id, user_id, entity_type, entity_id)
	SELECT 1000000000000, 'user-' || i, 'post', 'entity-1' FROM generate_series(1, 10000) AS i;
SELECT count(idem_try_advance('user-' || i, 'post', 'entity-1', 1000000000000))
	FROM generate_series(1, 10000) AS i;

SELECT count(idem_complete('scope-1', 'key-replay-' || lpad(i::text, 8, '0'), 201,
		'{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}'))
	FROM generate_series(1, 10000) AS i,
		LATERAL idem_claim('scope-1', 'key-replay-' || lpad(i::text, 8, '0'), sha256('request')) AS c;
INSERT INTO hand_keys SELECT * FROM idem_keys;

-- A million acknowledged messages lie in the outbox already.
INSERT INTO idem_outbox (id, created_at, available_at, acked_at, attempt, message_id, state, topic, payload)
	SELECT i, now(), now(), now(), 1, gen_random_uuid(), 'acked', 'orders', '{"order": 1, "status": "created"}'
	FROM generate_series(-:acked, -1) AS i;
INSERT INTO hand_outbox SELECT * FROM idem_outbox;
SELECT count(idem_publish('orders', '{"order": 1, "status": "created"}'))
	FROM generate_series(1, :pending);
INSERT INTO hand_outbox SELECT * FROM idem_outbox WHERE state = 'pending';
SELECT setval('hand_outbox_ids', max(id)) FROM hand_outbox;

VACUUM ANALYZE;
CHECKPOINT;
