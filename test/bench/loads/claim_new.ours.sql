\set u random(1, 1000000000000)
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-12345678', sha256('request'));
