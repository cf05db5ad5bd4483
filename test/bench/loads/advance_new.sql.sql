-- INSERT ... ON CONFLICT DO UPDATE ... WHERE
\set u random(1, :keys)
INSERT INTO hand_versions AS v (last_action_id, user_id, entity_type, entity_id) VALUES (5, 'user-' || :u, 'post', 'entity-1') ON CONFLICT (user_id, entity_type, entity_id) DO UPDATE SET last_action_id = EXCLUDED.last_action_id WHERE v.last_action_id < EXCLUDED.last_action_id RETURNING last_action_id;
