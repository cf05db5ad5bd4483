-- 100 single calls of idem_set
\set u random(100000000000000000, 999999999999999999)
\set now :now + 1
SELECT * FROM idem_set('user-' || :u::bigint % 10000 + 1, 'post', 'entity-2', 'like', true, :now);
