-- bound: that function in our plan node
\set u random(1, 10000)
SELECT * FROM noop_node_try_advance('user-' || :u, 'post', 'entity-1', 5);
