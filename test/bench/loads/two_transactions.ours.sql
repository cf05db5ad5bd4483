-- idem_claim; idem_complete with the token
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-12345678', sha256('request')) \gset
SELECT idem_complete('scope-1', 'key-new-' || :u || '-12345678', 201, '{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}', :claim_token);
