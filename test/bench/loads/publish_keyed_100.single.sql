-- 100 single calls of idem_publish with a key
\set u random(100000000000000000, 999999999999999999)
SELECT idem_publish('orders', '{"order": 1, "status": "created"}', 'key-' || :u);
