-- INSERT ... ON CONFLICT DO NOTHING, then SELECT
\set u random(1000001, 1010000)
INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', 'key-replay-' || :u || '-12345678', sha256('request')) ON CONFLICT DO NOTHING;
SELECT state, response_status, response_headers, response_body, request_hash = sha256('request') AS same FROM hand_keys WHERE key = 'key-replay-' || :u || '-12345678' AND scope = 'scope-1';
