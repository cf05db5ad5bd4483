-- What the loads work on: our tables, and tables of the same shape that the
-- hand-written SQL uses.

CREATE EXTENSION idempotency;

CREATE TABLE hand_versions (LIKE idem_action_versions INCLUDING ALL);
CREATE TABLE hand_keys (LIKE idem_keys INCLUDING ALL);
CREATE TABLE hand_outbox (LIKE idem_outbox INCLUDING ALL);
CREATE SEQUENCE hand_outbox_ids;
CREATE SEQUENCE hand_claim_tokens;

-- The logic of idem_claim() as an application developer writes it, with the
-- same result.
CREATE FUNCTION hand_claim(p_scope text, p_key text, p_hash bytea,
	OUT outcome text, OUT claim_token bigint, OUT attempt int,
	OUT response_status int, OUT response_headers json, OUT response_body text, OUT response_bytes bytea,
	OUT recovery_point text, OUT recovery_state json,
	OUT lease_expires_at timestamptz, OUT expires_at timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
	r hand_keys;
BEGIN
	SELECT k.* INTO r FROM hand_keys k WHERE k.scope = p_scope AND k.key = p_key;
	IF NOT FOUND THEN
		claim_token := nextval('hand_claim_tokens');
		attempt := 1;
		lease_expires_at := clock_timestamp() + '1 min';
		expires_at := clock_timestamp() + '1 day';
		INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash)
			VALUES (hand_claim.claim_token, clock_timestamp(), hand_claim.lease_expires_at, hand_claim.expires_at, 1, 'started', p_scope, p_key, p_hash)
			ON CONFLICT DO NOTHING;
		outcome := CASE WHEN FOUND THEN 'new' ELSE 'in_progress' END;
		RETURN;
	END IF;
	IF r.expires_at > clock_timestamp() THEN
		IF r.request_hash <> p_hash THEN
			outcome := 'hash_conflict';
			RETURN;
		END IF;
		IF r.state = 'completed' THEN
			outcome := 'replay';
			response_status := r.response_status;
			response_headers := r.response_headers;
			response_body := r.response_body;
			response_bytes := r.response_bytes;
			expires_at := r.expires_at;
			RETURN;
		END IF;
		IF r.state = 'started' AND r.lease_expires_at > clock_timestamp() THEN
			outcome := 'in_progress';
			lease_expires_at := r.lease_expires_at;
			RETURN;
		END IF;
	END IF;
	claim_token := nextval('hand_claim_tokens');
	attempt := r.attempt + 1;
	lease_expires_at := clock_timestamp() + '1 min';
	expires_at := clock_timestamp() + '1 day';
	UPDATE hand_keys k SET state = 'started', claim_token = hand_claim.claim_token, attempt = hand_claim.attempt,
			lease_expires_at = hand_claim.lease_expires_at, expires_at = hand_claim.expires_at, request_hash = p_hash
		WHERE k.scope = p_scope AND k.key = p_key AND k.claim_token = r.claim_token;
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
