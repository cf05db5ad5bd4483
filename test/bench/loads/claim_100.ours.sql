-- idem_claim_many of 100 new keys
\set u random(100000000000000000, 999999999999999999)
SELECT count(claim_token) FROM idem_claim_many('scope-1', (SELECT array_agg('key-new-' || :u || '-' || i) FROM generate_series(1, 100) AS i), ARRAY[sha256('request')]);
