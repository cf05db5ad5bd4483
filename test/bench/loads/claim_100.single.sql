-- 100 single calls of idem_claim
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, claim_token FROM idem_claim('scope-1', 'key-new-' || :u || '-1', sha256('request'));
