-- INSERT, UPDATE ... FOR UPDATE SKIP LOCKED of 100, UPDATE
\set u random(100000000000000000, 999999999999999999)
INSERT INTO hand_outbox (id, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, payload) VALUES (nextval('hand_outbox_ids'), clock_timestamp(), clock_timestamp(), 0, 0, true, gen_random_uuid(), 'pending', 'orders', jsonb_build_object('note', repeat(:u::text, 55)));
