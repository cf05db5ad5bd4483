-- idem_claim_many and idem_complete_many of 100 keys, in one transaction
\set u random(100000000000000000, 999999999999999999)
BEGIN;
SELECT count(claim_token) FROM idem_claim_many('scope-1', (SELECT array_agg('key-new-' || :u || '-' || i) FROM generate_series(1, 100) AS i), ARRAY[sha256('request')]);
SELECT count(*) FROM idem_complete_many('scope-1', (SELECT array_agg('key-new-' || :u || '-' || i) FROM generate_series(1, 100) AS i), '{201}', '{"{\"order\": 12345, \"status\": \"created\"}"}') WHERE completed;
COMMIT;
