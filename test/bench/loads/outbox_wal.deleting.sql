-- with a retention of 0
\set u random(100000000000000000, 999999999999999999)
SELECT idem_publish('orders', jsonb_build_object('note', repeat(:u::text, 55)));
