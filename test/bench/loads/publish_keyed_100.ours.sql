-- idem_publish_many of 100 messages, each with a key of its own
\set u random(100000000000000000, 999999999999999999)
SELECT count(*) FROM idem_publish_many('{orders}', (SELECT array_agg('{"order": 1, "status": "created"}'::jsonb) FROM generate_series(1, 100)), (SELECT array_agg('key-' || :u || '-' || i) FROM generate_series(1, 100) AS i));
