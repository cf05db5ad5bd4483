-- hand-written SQL in a PL/pgSQL function
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, response_status, response_headers, response_body FROM hand_request('scope-1', 'key-new-' || :u || '-12345678', sha256('request'), 'teapot');
