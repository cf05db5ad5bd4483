-- idem_try_advance of a new counter
\set u random(1, :keys)
SELECT * FROM idem_try_advance('user-' || :u, 'post', 'entity-1', 5);
