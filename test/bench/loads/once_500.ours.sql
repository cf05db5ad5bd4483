\set u random(1, 1000000000000)
SELECT count(*) FROM idem_once('consumer', (SELECT array_agg('message-' || :u || '-' || i) FROM generate_series(1, 500) AS i));
