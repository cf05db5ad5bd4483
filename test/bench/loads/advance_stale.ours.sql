-- idem_try_advance with a stale action
\set u random(1, 10000)
SELECT * FROM idem_try_advance('user-' || :u, 'post', 'entity-1', 5);
