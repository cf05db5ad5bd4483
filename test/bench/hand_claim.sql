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
