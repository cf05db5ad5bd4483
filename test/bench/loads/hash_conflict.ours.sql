-- idem_claim with another hash
\set u random(1000001, 1010000)
SELECT outcome FROM idem_claim('scope-1', 'key-replay-' || :u || '-12345678', sha256('other'));
