-- INSERT ... SELECT unnest ... ON CONFLICT DO UPDATE ... WHERE RETURNING
\set u random(100000000000000000, 999999999999999999)
WITH a AS (INSERT INTO hand_versions AS v (last_action_id, user_id, entity_type, entity_id) SELECT 5, 'user-1', 'post', e FROM unnest((SELECT array_agg('entity-' || :u || '-' || i) FROM generate_series(1, 100) AS i)) AS e ON CONFLICT (user_id, entity_type, entity_id) DO UPDATE SET last_action_id = EXCLUDED.last_action_id WHERE v.last_action_id < EXCLUDED.last_action_id RETURNING last_action_id) SELECT count(*) FROM a;
