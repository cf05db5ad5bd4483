-- INSERT ... SELECT unnest ... ON CONFLICT DO NOTHING RETURNING
\set u random(100000000000000000, 999999999999999999)
WITH t AS (INSERT INTO hand_tokens (expires_at, scope, token) SELECT clock_timestamp() + '7 days', 'consumer', token FROM unnest((SELECT array_agg('message-' || :u || '-' || i) FROM generate_series(1, 500) AS i)) AS token ON CONFLICT DO NOTHING RETURNING token) SELECT count(*) FROM t;
