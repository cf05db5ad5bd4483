-- 100 times idem_claim and idem_complete in a transaction
\set u random(100000000000000000, 999999999999999999)
BEGIN;
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-1', sha256('request'));
SELECT idem_complete('scope-1', 'key-new-' || :u || '-1', 201, '{"order": 12345, "status": "created"}');
COMMIT;
