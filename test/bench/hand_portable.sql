-- More of the logic of the functions as an application developer writes it, for
-- test/bench/portable.

CREATE INDEX ON hand_outbox (key_hash, id) WHERE state = 'pending';
CREATE SEQUENCE hand_outbox_ids;

CREATE FUNCTION hand_complete(p_scope text, p_key text, p_status int, p_body text, p_headers json, p_token bigint)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
	r hand_keys;
BEGIN
	UPDATE hand_keys k SET state = 'completed', completed_at = clock_timestamp(), lease_expires_at = NULL,
			response_status = p_status, response_headers = p_headers, response_body = p_body
		WHERE k.key = p_key AND k.scope = p_scope AND k.claim_token = p_token AND k.state = 'started';
	IF FOUND THEN
		RETURN true;
	END IF;
	SELECT k.* INTO r FROM hand_keys k WHERE k.key = p_key AND k.scope = p_scope;
	IF r.claim_token IS DISTINCT FROM p_token THEN
		RAISE EXCEPTION 'claim lost';
	END IF;
	RETURN false;
END
$$;

CREATE FUNCTION hand_publish(p_topic text, p_payload jsonb, p_key text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO hand_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index,
			message_id, state, topic, message_key, payload)
		VALUES (nextval('hand_outbox_ids'), hashtextextended(p_key, 0), clock_timestamp(), clock_timestamp(), 0, 0, true,
			gen_random_uuid(), 'pending', p_topic, p_key, p_payload);
END
$$;

-- The messages of a key in order: one only if none before it is pending.
CREATE FUNCTION hand_take(p_count int, p_lease interval DEFAULT '30 s')
RETURNS SETOF hand_outbox
LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY WITH t AS MATERIALIZED (
			SELECT o.id FROM hand_outbox o
			WHERE o.state = 'pending' AND o.topic = 'orders' AND o.available_at <= clock_timestamp()
				AND NOT EXISTS (SELECT FROM hand_outbox b WHERE b.key_hash = o.key_hash AND b.state = 'pending' AND b.id < o.id)
			ORDER BY o.topic, o.available_at LIMIT p_count FOR UPDATE SKIP LOCKED)
		UPDATE hand_outbox o SET attempt = o.attempt + 1, available_at = clock_timestamp() + p_lease
			FROM t WHERE o.id = t.id RETURNING o.*;
END
$$;

CREATE FUNCTION hand_ack(p_ids bigint[])
RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
	count int;
BEGIN
	UPDATE hand_outbox o SET state = 'acked', acked_at = clock_timestamp() WHERE o.id = ANY (p_ids) AND o.state = 'pending';
	GET DIAGNOSTICS count = ROW_COUNT;
	RETURN count;
END
$$;
