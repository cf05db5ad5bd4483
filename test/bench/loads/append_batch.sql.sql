-- both tables in one statement, and the events' INSERT
\set a random(1, 10000)
\set now :now + 100
BEGIN;
WITH s AS (INSERT INTO hand_client_sequences AS s (last_client_seq, aggregate, client_id) VALUES (:now::bigint + 99, 'aggregate-' || :a, 'client-' || :client_id) ON CONFLICT (aggregate, client_id) DO UPDATE SET last_client_seq = EXCLUDED.last_client_seq WHERE s.last_client_seq < EXCLUDED.last_client_seq - 99 RETURNING aggregate) INSERT INTO hand_aggregates AS a (version, aggregate) SELECT 100, aggregate FROM s ON CONFLICT (aggregate) DO UPDATE SET version = a.version + EXCLUDED.version RETURNING version;
INSERT INTO events (aggregate, client_id, client_seq, event) SELECT 'aggregate-' || :a, 'client-' || :client_id, :now::bigint + i, 'something happened' FROM generate_series(0, 99) AS i;
COMMIT;
