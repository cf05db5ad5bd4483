-- idem_claim of a new key, a UUID of version 4
\set a random(0, 140737488355327) * 65536 + 16384 + random(0, 4095)
\set b random(0, 4611686018427387903) - 9223372036854775807
SELECT outcome, claim_token FROM idem_claim('scope-1', encode(int8send(:a) || int8send(:b), 'hex')::uuid::text, sha256('request'));
