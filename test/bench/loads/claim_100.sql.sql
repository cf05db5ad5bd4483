-- INSERT ... SELECT unnest ... ON CONFLICT DO NOTHING RETURNING
\set u random(100000000000000000, 999999999999999999)
WITH c AS (INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) SELECT nextval('hand_claim_tokens'), clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', key, sha256('request') FROM unnest((SELECT array_agg('key-new-' || :u || '-' || i) FROM generate_series(1, 100) AS i)) AS key ON CONFLICT DO NOTHING RETURNING claim_token) SELECT count(claim_token) FROM c;
