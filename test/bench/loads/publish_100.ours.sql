-- idem_publish_many of 100 messages
SELECT count(*) FROM idem_publish_many('{orders}', (SELECT array_agg('{"order": 1, "status": "created"}'::jsonb) FROM generate_series(1, 100)));
