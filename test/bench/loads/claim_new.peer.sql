\set u random(1, 1000000000000)
INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (1, now(), now() + '1 min', now() + '1 day', 1, 'started', 'scope-1', 'key-new-' || :u || '-12345678', sha256('request')) ON CONFLICT DO NOTHING;
