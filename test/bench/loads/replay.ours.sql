-- idem_claim of a completed key
\set u random(1000001, 1010000)
SELECT outcome, response_status, response_headers, response_body FROM idem_claim('scope-1', 'key-replay-' || :u || '-12345678', sha256('request'));
