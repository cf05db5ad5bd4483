-- 100 clients, idem_try_advance of one counter, newer actions
SELECT * FROM idem_try_advance('user-hot', 'post', 'entity-1', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);
