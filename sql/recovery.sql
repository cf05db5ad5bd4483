--
-- After a restore, a promotion or a move: idem_raise_claim_tokens.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on

-- In a new database; NULL, and less than there is, change nothing.
SELECT idem_raise_claim_tokens(0), idem_raise_claim_tokens(-5), idem_raise_claim_tokens(-9223372036854775808);
SELECT claim_token FROM idem_claim('s', 'raised-token-00001');
SELECT idem_raise_claim_tokens(0), idem_raise_claim_tokens(1);
SELECT idem_raise_claim_tokens(NULL);
SELECT claim_token FROM idem_claim('s', 'raised-token-00002');

-- What is given afterwards is above it, however often it is called.
SELECT idem_raise_claim_tokens(100), idem_raise_claim_tokens(100), idem_raise_claim_tokens(50);
SELECT claim_token FROM idem_claim('s', 'raised-token-00003');
SELECT idem_raise_claim_tokens(at_least => 101), idem_raise_claim_tokens(102);
SELECT claim_token FROM idem_claim('s', 'raised-token-00004');

-- The ids of messages move on by as many.
SELECT idem_publish('t', '"first"', 'key') IS NOT NULL, idem_raise_claim_tokens(103), idem_publish('t', '"second"', 'key') IS NOT NULL;
SELECT idem_raise_claim_tokens(203), idem_publish('t', '"third"', 'key') IS NOT NULL;
SELECT id, payload FROM idem_outbox ORDER BY id;
-- And where their sequence was set back, above the highest there is.
SELECT setval('idem_outbox_ids', 1, false);
SELECT idem_raise_claim_tokens(0), idem_publish('t', '"fourth"', 'key') IS NOT NULL;
SELECT id, payload FROM idem_outbox_take();
SELECT setval('idem_outbox_ids', 1, false), setval('idem_claim_tokens', 1, false);
SELECT idem_raise_claim_tokens(0), idem_publish('t', '"fifth"', 'key') IS NOT NULL;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox;
SELECT id, payload FROM idem_outbox_take();

-- The recipe of the operations guide, where the sequences say nothing
UPDATE idem_keys SET claim_token = 5000 WHERE key = 'raised-token-00004';
SELECT setval('idem_claim_tokens', 1, false);
SELECT idem_raise_claim_tokens(1000000 + greatest(idem_raise_claim_tokens(0), (SELECT max(claim_token) FROM idem_keys)));
SELECT claim_token FROM idem_claim('s', 'raised-token-00005');

-- Rolled back, it stays: numbers that were drawn in between cannot be taken back.
BEGIN;
SELECT idem_raise_claim_tokens(2000000);
ROLLBACK;
SELECT idem_raise_claim_tokens(0);

-- There are limits, so that a slip does not use up all that there are.
SELECT idem_raise_claim_tokens(4611686018427387904);
SELECT idem_raise_claim_tokens(0);
SELECT idem_raise_claim_tokens(4611686018427387903);
SELECT claim_token FROM idem_claim('s', 'raised-token-00006');
SELECT idem_raise_claim_tokens(4611686018427387903);
SELECT last_value <= 4611686018427387903 FROM idem_outbox_ids;
-- Even where ids are beyond already
SELECT setval('idem_outbox_ids', 4611686018427387950);
SELECT idem_raise_claim_tokens(0), last_value FROM idem_outbox_ids;
BEGIN READ ONLY;
SELECT idem_raise_claim_tokens(1);
ROLLBACK;

DROP EXTENSION idempotency;
