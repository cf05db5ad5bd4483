-- INSERT ... ON CONFLICT DO UPDATE ... WHERE
\set u random(1, 10000)
\set now :now + 1
INSERT INTO hand_versions AS v (last_action_id, user_id, entity_type, entity_id) VALUES (:now, 'user-' || :u, 'post', 'entity-1') ON CONFLICT (user_id, entity_type, entity_id) DO UPDATE SET last_action_id = EXCLUDED.last_action_id WHERE v.last_action_id < EXCLUDED.last_action_id RETURNING last_action_id;
