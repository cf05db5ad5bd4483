-- INSERT ... SELECT unnest ... ON CONFLICT DO UPDATE ... WHERE RETURNING
\set u random(100000000000000000, 999999999999999999)
WITH a AS (INSERT INTO hand_versions AS v (last_action_id, user_id, entity_type, entity_id) SELECT 5, u, 'post', 'entity-1' FROM unnest((SELECT array_agg('user-' || (:u::bigint % 10000 + i * 100) % 10000 + 1) FROM generate_series(1, 100) AS i)) AS u ON CONFLICT (user_id, entity_type, entity_id) DO UPDATE SET last_action_id = EXCLUDED.last_action_id WHERE v.last_action_id < EXCLUDED.last_action_id RETURNING last_action_id) SELECT count(*) FROM a;
