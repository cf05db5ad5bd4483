-- INSERT ... ON CONFLICT DO NOTHING
\set u random(100000000000000000, 999999999999999999)
INSERT INTO hand_tokens (expires_at, scope, token) VALUES (clock_timestamp() + '7 days', 'consumer', 'message-' || :u) ON CONFLICT DO NOTHING;
