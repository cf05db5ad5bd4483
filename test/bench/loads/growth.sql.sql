-- INSERT ... ON CONFLICT DO NOTHING
\set a random(0, 140737488355327) * 65536 + 16384 + random(0, 4095)
\set b random(0, 4611686018427387903) - 9223372036854775807
INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', encode(int8send(:a) || int8send(:b), 'hex')::uuid::text, sha256('request')) ON CONFLICT DO NOTHING;
