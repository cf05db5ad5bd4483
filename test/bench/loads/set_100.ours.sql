-- idem_set_many of 100 newer actions
\set u random(100000000000000000, 999999999999999999)
\set now :now + 1
SELECT count(*) FROM idem_set_many((SELECT array_agg('user-' || (:u::bigint % 10000 + i * 100) % 10000 + 1) FROM generate_series(1, 100) AS i), '{post}', '{entity-2}', '{like}', '{true}', ARRAY[:now::bigint]) WHERE processed;
