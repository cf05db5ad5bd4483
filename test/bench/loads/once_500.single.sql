-- 500 single calls of idem_once
\set u random(100000000000000000, 999999999999999999)
SELECT idem_once('consumer', 'message-' || :u || '-1');
