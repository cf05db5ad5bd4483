-- 100 single calls of idem_publish
SELECT idem_publish('orders', '{"order": 1, "status": "created"}');
