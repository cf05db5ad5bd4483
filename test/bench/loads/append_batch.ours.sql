-- idem_try_append of 100 events, and their INSERT
\set a random(1, 10000)
\set now :now + 100
BEGIN;
SELECT * FROM idem_try_append('aggregate-' || :a, 'client-' || :client_id, :now, 100);
INSERT INTO events (aggregate, client_id, client_seq, event) SELECT 'aggregate-' || :a, 'client-' || :client_id, :now::bigint + i, 'something happened' FROM generate_series(0, 99) AS i;
COMMIT;
