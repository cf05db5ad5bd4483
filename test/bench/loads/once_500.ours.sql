-- idem_once_many of 500 new tokens
\set u random(100000000000000000, 999999999999999999)
SELECT count(*) FROM idem_once_many('consumer', (SELECT array_agg('message-' || :u || '-' || i) FROM generate_series(1, 500) AS i));
