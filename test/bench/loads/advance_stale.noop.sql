-- bound: C function that does nothing
\set u random(1, 10000)
SELECT * FROM noop_try_advance('user-' || :u, 'post', 'entity-1', 5);
