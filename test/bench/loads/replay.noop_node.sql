-- bound: that function in our plan node
\set u random(1000001, 1010000)
SELECT outcome, response_status, response_headers, response_body FROM noop_node_claim('scope-1', 'key-replay-' || :u || '-12345678', sha256('request'));
