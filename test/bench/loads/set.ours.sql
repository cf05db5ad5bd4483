-- idem_set with a newer action
\set u random(1, 10000)
\set now :now + 1
SELECT * FROM idem_set('user-' || :u, 'post', 'entity-2', 'like', true, :now);
