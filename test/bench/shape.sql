-- Tables of the same shape as the extension's, for the hand-written SQL: the
-- same columns, indexes and fill factors. LIKE copies all but the settings.
-- The outbox has the indexes that the hand-written SQL needs.

CREATE EXTENSION idempotency;

CREATE TABLE hand_keys (LIKE idem_keys INCLUDING ALL);
CREATE TABLE hand_versions (LIKE idem_action_versions INCLUDING ALL);
CREATE TABLE hand_user_actions (LIKE idem_user_actions INCLUDING ALL);
CREATE TABLE hand_client_sequences (LIKE idem_client_sequences INCLUDING ALL);
CREATE TABLE hand_aggregates (LIKE idem_aggregates INCLUDING ALL);
CREATE TABLE hand_tokens (LIKE idem_tokens INCLUDING ALL);
CREATE TABLE hand_outbox (LIKE idem_outbox INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (id));
CREATE INDEX ON hand_outbox (topic, available_at) WHERE state = 'pending';
CREATE INDEX ON hand_outbox (acked_at) WHERE state <> 'pending';
CREATE SEQUENCE hand_claim_tokens;

SELECT format('ALTER TABLE %s SET (%s)', hand, array_to_string(reloptions, ', '))
	FROM pg_class JOIN (VALUES
		('idem_keys', 'hand_keys'),
		('idem_action_versions', 'hand_versions'),
		('idem_user_actions', 'hand_user_actions'),
		('idem_client_sequences', 'hand_client_sequences'),
		('idem_aggregates', 'hand_aggregates'),
		('idem_tokens', 'hand_tokens'),
		('idem_outbox', 'hand_outbox')) AS t (ours, hand) ON relname = ours
	WHERE reloptions IS NOT NULL \gexec
