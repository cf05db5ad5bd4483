-- idem_once of one new token
\set u random(100000000000000000, 999999999999999999)
SELECT idem_once('consumer', 'message-' || :u);
