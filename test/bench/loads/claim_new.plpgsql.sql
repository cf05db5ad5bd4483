-- the logic of idem_claim in PL/pgSQL
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, claim_token FROM hand_claim('scope-1', 'key-new-' || :u || '-12345678', sha256('request'));
