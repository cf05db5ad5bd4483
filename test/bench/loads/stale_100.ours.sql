-- idem_try_advance_many of 100 stale actions
\set u random(100000000000000000, 999999999999999999)
SELECT count(*) FROM idem_try_advance_many((SELECT array_agg('user-' || (:u::bigint % 10000 + i * 100) % 10000 + 1) FROM generate_series(1, 100) AS i), ARRAY['post'], ARRAY['entity-1'], ARRAY[5]) WHERE should_process;
