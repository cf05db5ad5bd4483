\set u random(1, 10000)
SELECT outcome, response_status, response_headers, response_body FROM hand_claim('scope-1', 'key-replay-' || lpad((:u)::text, 8, '0'), sha256('request'));
