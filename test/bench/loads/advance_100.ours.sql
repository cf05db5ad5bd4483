-- idem_try_advance_many of 100 new counters
\set u random(100000000000000000, 999999999999999999)
SELECT count(*) FROM idem_try_advance_many(ARRAY['user-1'], ARRAY['post'], (SELECT array_agg('entity-' || :u || '-' || i) FROM generate_series(1, 100) AS i), ARRAY[5]) WHERE should_process;
