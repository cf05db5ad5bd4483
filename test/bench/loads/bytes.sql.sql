-- INSERT ... ON CONFLICT with a token from a sequence, UPDATE in one transaction
\set u random(100000000000000000, 999999999999999999)
BEGIN;
INSERT INTO hand_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash) VALUES (nextval('hand_claim_tokens'), clock_timestamp(), clock_timestamp() + '1 min', clock_timestamp() + '1 day', 1, 'started', 'scope-1', 'key-new-' || :u || '-12345678', sha256('request')) ON CONFLICT DO NOTHING;
UPDATE hand_keys SET state = 'completed', completed_at = clock_timestamp(), lease_expires_at = NULL, response_status = 201, response_body = '{"order": 12345, "status": "created"}', response_headers = '{"Content-Type": "application/json"}' WHERE key = 'key-new-' || :u || '-12345678' AND scope = 'scope-1';
COMMIT;
