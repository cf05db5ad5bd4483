-- both tables in one statement, ON CONFLICT DO UPDATE
\set a random(1, 10000)
\set now :now + 100
WITH s AS (INSERT INTO hand_client_sequences AS s (last_client_seq, aggregate, client_id) VALUES (:now::bigint, 'aggregate-' || :a, 'client-' || :client_id) ON CONFLICT (aggregate, client_id) DO UPDATE SET last_client_seq = EXCLUDED.last_client_seq WHERE s.last_client_seq < EXCLUDED.last_client_seq RETURNING aggregate) INSERT INTO hand_aggregates AS a (version, aggregate) SELECT 1, aggregate FROM s ON CONFLICT (aggregate) DO UPDATE SET version = a.version + EXCLUDED.version RETURNING version;
