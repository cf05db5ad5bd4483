-- the logic of idem_claim in PL/pgSQL
\set u random(1000001, 1010000)
SELECT outcome FROM hand_claim('scope-1', 'key-replay-' || :u || '-12345678', sha256('other'));
