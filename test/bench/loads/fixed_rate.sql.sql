-- the same, hand-written SQL as separate statements
\set u random(1, :keys)
BEGIN;
WITH claim AS (INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (1, clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', 'key-' || :start || '-' || :u, sha256('request')) ON CONFLICT DO NOTHING RETURNING 1) SELECT count(*) AS is_new FROM claim \gset
\if :is_new
INSERT INTO orders (sku) VALUES ('teapot');
UPDATE hand_keys SET state = 'completed', completed_at = clock_timestamp(), lease_expires_at = NULL, response_status = 201, response_body = '{"order": 12345, "status": "created"}', response_headers = '{"Content-Type": "application/json"}' WHERE key = 'key-' || :start || '-' || :u AND scope = 'scope-1';
\else
SELECT state, response_status, response_headers, response_body, request_hash = sha256('request') AS same FROM hand_keys WHERE key = 'key-' || :start || '-' || :u AND scope = 'scope-1';
\endif
COMMIT;
