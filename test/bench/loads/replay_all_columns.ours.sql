-- idem_claim of a completed key, all columns
\set u random(1000001, 1010000)
SELECT * FROM idem_claim('scope-1', 'key-replay-' || :u || '-12345678', sha256('request'));
