\set u random(1, 1000000000000)
SELECT idem_once('consumer', 'message-' || :u || '-1');
