-- idem_try_advance with a newer action
\set u random(1, 10000)
\set now :now + 1
SELECT * FROM idem_try_advance('user-' || :u, 'post', 'entity-1', :now);
