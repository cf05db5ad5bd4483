-- BEGIN, idem_claim, INSERT, idem_complete, COMMIT
\set u random(100000000000000000, 999999999999999999)
BEGIN;
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-12345678', sha256('request'));
INSERT INTO orders (sku) VALUES ('teapot');
SELECT idem_complete('scope-1', 'key-new-' || :u || '-12345678', 201, '{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}');
COMMIT;
