-- bound: INSERT
INSERT INTO hand_outbox (id, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, payload) VALUES (nextval('hand_outbox_ids'), clock_timestamp(), clock_timestamp(), 0, 0, true, gen_random_uuid(), 'pending', 'orders', '{"order": 1, "status": "created"}');
