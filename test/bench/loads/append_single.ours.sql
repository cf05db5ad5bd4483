-- idem_try_append of one event
\set a random(1, 10000)
\set now :now + 100
SELECT * FROM idem_try_append('aggregate-' || :a, 'client-' || :client_id, :now);
