-- 100 single calls of idem_try_advance
\set u random(100000000000000000, 999999999999999999)
SELECT * FROM idem_try_advance('user-1', 'post', 'entity-' || :u || '-1', 5);
