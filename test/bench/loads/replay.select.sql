-- bound: SELECT by primary key
\set u random(1000001, 1010000)
SELECT state, response_status, response_headers, response_body FROM hand_keys WHERE key = 'key-replay-' || :u || '-12345678' AND scope = 'scope-1';
