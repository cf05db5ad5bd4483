-- INSERT ... ON CONFLICT DO NOTHING
\set u random(100000000000000000, 999999999999999999)
INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', 'key-new-' || :u || '-12345678', sha256('request')) ON CONFLICT DO NOTHING;
