-- idem_claim and idem_complete in a PL/pgSQL function
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, response_status, response_headers, response_body FROM claim_place_complete('scope-1', 'key-new-' || :u || '-12345678', sha256('request'), 'teapot');
