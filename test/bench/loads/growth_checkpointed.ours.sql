-- idem_claim of a new key
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-12345678', sha256('request'));
