-- The SQL blocks of README.md docs/guide.md docs/reference.md docs/settings.md, in order.
-- Written by test/readme; do not edit, run that again.
\set first_database :DBNAME
CREATE DATABASE regress_idempotency_readme TEMPLATE template0;
\connect regress_idempotency_readme

-- Quick start
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
ALTER DATABASE regress_idempotency_readme SET search_path = public, idem;
\connect

-- Quick start
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text NOT NULL);
CREATE ROLE regress_web_app LOGIN;
GRANT SELECT, INSERT ON orders TO regress_web_app;
SELECT idem_grant('regress_web_app'::regrole);
SET ROLE regress_web_app;

-- Quick start
BEGIN;
SELECT outcome FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30',
	idem_request_hash('POST', '/orders', '{"sku": "teapot"}'));        -- new
INSERT INTO orders (sku) VALUES ('teapot');
SELECT idem_complete('customer-7', 'order-5d9f4c1e-7a30', 201, '{"order": 1}');
COMMIT;

-- Quick start
SELECT outcome, response_status, response_body FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30',
	idem_request_hash('POST', '/orders', '{"sku": "teapot"}'));        -- replay, 201, {"order": 1}

-- Quick start
SELECT outcome FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30',
	idem_request_hash('POST', '/orders', '{"sku": "kettle"}'));        -- hash_conflict
RESET ROLE;

-- An API request with a key
\connect
BEGIN;
SELECT outcome FROM idem_claim('customer-7', 'order-0b7e6f52-41d8',
	idem_request_hash('POST', '/orders', '{"sku": "cup"}'));           -- new
INSERT INTO orders (sku) VALUES ('cup');
ROLLBACK;

SELECT outcome FROM idem_claim('customer-7', 'order-0b7e6f52-41d8',
	idem_request_hash('POST', '/orders', '{"sku": "cup"}'));           -- new again

-- An API request with a key
SELECT outcome FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30', wait => '5 seconds');

-- An API request with a key
BEGIN;
SELECT outcome FROM idem_claim('customer-7', 'payment-e21b87f4-01',
	idem_request_hash('POST', '/payments', '{"amount": 100}'));        -- new
SELECT idem_complete('customer-7', 'payment-e21b87f4-01', 402,
	'{"error": "card declined"}', '{"Content-Type": "application/json"}');
COMMIT;

-- A job with an external call
\connect
SELECT outcome, claim_token, attempt, recovery_point
FROM idem_claim('billing', 'invoice-1001-payment', lease => '2 minutes') \gset

-- A job with an external call
SELECT idem_checkpoint('billing', 'invoice-1001-payment', 'charged', '{"charge": "ch_42"}',
	lease => '2 minutes', claim_token => :claim_token) > now() AS leased;

-- A job with an external call
SELECT idem_heartbeat('billing', 'invoice-1001-payment',
	lease => '2 minutes', claim_token => :claim_token) > now() AS leased;

-- A job with an external call
SELECT idem_complete('billing', 'invoice-1001-payment', 200, 'paid', claim_token => :claim_token);
SELECT idem_complete('billing', 'invoice-1001-payment', 200, 'paid', claim_token => :claim_token);

-- A job with an external call
SELECT outcome, claim_token AS first_token
FROM idem_claim('billing', 'invoice-1002-payment', lease => '0 seconds') \gset
SELECT idem_checkpoint('billing', 'invoice-1002-payment', 'charged', '{"charge": "ch_43"}',
	lease => '0 seconds', claim_token => :first_token) <= clock_timestamp() AS lease_is_over;

-- the successor: new, 2, charged, {"charge": "ch_43"}
SELECT outcome, attempt, recovery_point, recovery_state, claim_token > :first_token AS higher
FROM idem_claim('billing', 'invoice-1002-payment');

-- the first worker wakes up: error ID003
SELECT idem_complete('billing', 'invoice-1002-payment', 200, 'paid', claim_token => :first_token);

-- A job with an external call
SELECT outcome, claim_token FROM idem_claim('billing', 'invoice-1003-payment') \gset
SELECT idem_fail('billing', 'invoice-1003-payment', 'bank is closed', claim_token => :claim_token);
SELECT state, error FROM idem_lookup('billing', 'invoice-1003-payment');      -- failed, bank is closed
SELECT outcome, attempt FROM idem_claim('billing', 'invoice-1003-payment');   -- new, 2

-- Work that outlives its client
\connect
SELECT outcome, claim_token
FROM idem_claim('billing', 'invoice-1004-payment', lease => '2 minutes',
	request => '{"invoice": 1004, "amount": "19.90"}') \gset
SELECT idem_checkpoint('billing', 'invoice-1004-payment', 'charged', '{"charge": "ch_44"}',
	claim_token => :claim_token) > now() AS leased;
SELECT idem_fail('billing', 'invoice-1004-payment', 'mail server is down', claim_token => :claim_token);

-- Work that outlives its client
SELECT scope, key, claim_token, attempt, request, recovery_point, recovery_state
FROM idem_resume(max_claims => 1, lease => '2 minutes') \gset
SELECT :'key' AS key, :attempt AS attempt, :'request' AS request, :'recovery_point' AS recovery_point;

-- Work that outlives its client
SELECT idem_complete(:'scope', :'key', 200, 'paid', claim_token => :claim_token);
SELECT outcome, response_body FROM idem_claim('billing', 'invoice-1004-payment');    -- replay, paid

-- A whole request in one statement
\connect
CREATE FUNCTION place_order(request jsonb) RETURNS idem_response LANGUAGE plpgsql AS $$
DECLARE
	order_id bigint;
BEGIN
	INSERT INTO orders (sku) VALUES (request ->> 'sku') RETURNING id INTO order_id;
	RETURN (201, NULL, json_build_object('order', order_id))::idem_response;
END $$;

SELECT * FROM idem_run('customer-8', 'order-7b1c0a52-99fe', 'place_order(jsonb)', '{"sku": "pot"}');
SELECT * FROM idem_run('customer-8', 'order-7b1c0a52-99fe', 'place_order(jsonb)', '{"sku": "pot"}');
SELECT * FROM idem_run('customer-8', 'order-7b1c0a52-99fe', 'place_order(jsonb)', '{"sku": "pan"}');

-- A like button
\connect
SELECT * FROM idem_set('user-1', 'post', '99', 'like', true,  1763690000001);
SELECT * FROM idem_set('user-1', 'post', '99', 'like', false, 1763690000003);
SELECT * FROM idem_set('user-1', 'post', '99', 'like', true,  1763690000002);   -- late: not processed
SELECT idem_is_active('user-1', 'post', '99', 'like');                          -- f

-- A like button
SELECT * FROM idem_set('user-1', 'post', '99', 'dislike', true, 1763690000004);
SELECT * FROM idem_set('user-1', 'post', '99', 'like', true, 1763690000005, excludes => '{dislike}');
SELECT idem_is_active('user-1', 'post', '99', 'dislike');                       -- f

-- A like button
BEGIN;
SELECT should_process FROM idem_try_advance('user-1', 'profile', '1', 1763690000001);   -- t: update
COMMIT;
SELECT should_process FROM idem_try_advance('user-1', 'profile', '1', 1763690000001);   -- f: leave it

-- An event stream with client sequences
\connect
CREATE TABLE events (aggregate text, version bigint, event text, PRIMARY KEY (aggregate, version));

BEGIN;
SELECT outcome, version FROM idem_try_append('cart-12', 'phone', 1);               -- appended, 1
INSERT INTO events VALUES ('cart-12', 1, 'teapot added');
COMMIT;

SELECT outcome, version FROM idem_try_append('cart-12', 'phone', 1);               -- duplicate, 1

-- An event stream with client sequences
BEGIN;
SELECT outcome, version FROM idem_try_append('cart-12', 'phone', 2, event_count => 2);   -- appended, 3
INSERT INTO events VALUES ('cart-12', 2, 'cup added'), ('cart-12', 3, 'teapot removed');
COMMIT;

SELECT outcome, last_client_seq
FROM idem_try_append('cart-12', 'phone', 3, event_count => 4);                     -- overlap, 3

-- An event stream with client sequences
SELECT outcome FROM idem_try_append('cart-14', 'outbox', 8);                       -- appended
SELECT outcome FROM idem_try_append('cart-14', 'outbox', 7);                       -- duplicate: lost

-- An event stream with client sequences
-- the sending side
BEGIN;
SELECT outcome, version FROM idem_try_append('order-15', 'web', 1) \gset
-- insert the event here, and idem_publish() a message with :version, message_key => 'order-15'
COMMIT;

-- the receiving side: appended, then duplicate; a later version that comes first is a gap
SELECT outcome FROM idem_try_append('copy-of-order-15', 'orders', :version, allow_gaps => false);
SELECT outcome FROM idem_try_append('copy-of-order-15', 'orders', :version, allow_gaps => false);
SELECT outcome FROM idem_try_append('copy-of-order-15', 'orders', :version + 2, allow_gaps => false);

-- An event stream with client sequences
SELECT outcome FROM idem_try_append('cart-13', 'phone', 2, allow_gaps => false);        -- gap
SELECT outcome FROM idem_try_append('cart-13', 'phone', 1, allow_gaps => false);        -- appended
SELECT outcome FROM idem_try_append('cart-13', 'phone', 2, allow_gaps => false);        -- appended

-- An event stream with client sequences
-- version_conflict, 2
SELECT outcome, version FROM idem_try_append('cart-13', 'tablet', 1, expected_version => 1);
-- appended, 3
SELECT outcome, version FROM idem_try_append('cart-13', 'tablet', 1, expected_version => 2);
-- duplicate, 3
SELECT outcome, version FROM idem_try_append('cart-13', 'tablet', 1, expected_version => 2);

-- An event stream with client sequences
SELECT idem_last_client_seq('cart-13', 'phone');                                   -- 2

-- A form token or an inbox
\connect
BEGIN;
SELECT idem_once('contact-form', 'f3a9c0d1-77be');   -- t: handle it
COMMIT;

SELECT idem_once('contact-form', 'f3a9c0d1-77be');   -- f: sent twice, just show the result

-- A form token or an inbox
CREATE TABLE payments (message_id text, amount numeric);

INSERT INTO payments
SELECT message_id, amount
FROM idem_once_many('accounting', ARRAY['msg-1', 'msg-2']) AS message_id
	JOIN (VALUES ('msg-1', 10), ('msg-2', 20)) AS batch (message_id, amount) USING (message_id);

-- msg-2 comes again
INSERT INTO payments
SELECT message_id, amount
FROM idem_once_many('accounting', ARRAY['msg-2', 'msg-3']) AS message_id
	JOIN (VALUES ('msg-2', 20), ('msg-3', 30)) AS batch (message_id, amount) USING (message_id);

SELECT message_id, amount FROM payments ORDER BY message_id;

-- An outbox
\connect
BEGIN;
INSERT INTO orders (sku) VALUES ('teapot');
SELECT idem_publish('orders', '{"sku": "teapot"}', message_key => 'customer-7') AS message_id \gset
COMMIT;

-- An outbox
SELECT id, topic, message_key, payload, attempt FROM idem_outbox_take(100, lease => '30 seconds', wait => '10 seconds');
SELECT idem_outbox_extend('{1}', '30 seconds', attempts => '{1}');   -- 1: still held
SELECT idem_outbox_ack('{1}');

-- An outbox
BEGIN;
SELECT idem_once('warehouse', :'message_id');   -- t: apply it
COMMIT;
SELECT idem_once('warehouse', :'message_id');   -- f: seen, just confirm it

-- An outbox
SELECT idem_publish('mails', '{"to": "ann@example.com"}') AS message_id \gset
SELECT id, attempt FROM idem_outbox_take(topics => '{mails}') \gset
-- pending
SELECT idem_outbox_nack(:id, 'mailbox full', retry_after => '0 seconds', attempt => :attempt);

-- An outbox
SET idempotency.outbox_max_attempts = 2;
SELECT id, attempt FROM idem_outbox_take(topics => '{mails}') \gset
SELECT idem_outbox_nack(:id, 'mailbox still full', attempt => :attempt);   -- dead
SELECT topic, payload, attempt, last_error FROM idem_outbox WHERE state = 'dead';
SELECT idem_outbox_requeue();                                              -- 1
RESET idempotency.outbox_max_attempts;

-- An outbox
SELECT idem_publish('mails', '{"to": "bob@example.com"}', deliver_after => '1 hour') AS message_id \gset
SELECT payload FROM idem_outbox_take(topics => '{mails}');   -- Ann's, not yet Bob's

-- An outbox
SELECT ordinal FROM idem_publish_many('{stock}', ARRAY['{"sku": "teapot"}', '{"sku": "cup"}']::jsonb[],
                                      message_keys => '{shelf-4}');

-- Rights by topic and scope
\connect
CREATE ROLE regress_invoice_gate;
SELECT idem_grant('regress_invoice_gate'::regrole), idem_grant_relay('regress_invoice_gate'::regrole);
GRANT SELECT ON idem_outbox TO regress_invoice_gate;
CREATE SCHEMA invoices AUTHORIZATION regress_invoice_gate;

SET ROLE regress_invoice_gate;
CREATE FUNCTION invoices.take(max_messages int DEFAULT 100, lease interval DEFAULT '30 seconds', wait interval DEFAULT NULL)
RETURNS TABLE (id bigint, message_id uuid, message_key text, payload jsonb, attempt int)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT m.id, m.message_id, m.message_key, m.payload, m.attempt
	FROM idem_outbox_take(max_messages, lease, '{invoices}', wait) AS m;
END;
CREATE FUNCTION invoices.ack(ids bigint[]) RETURNS int
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
RETURN idem_outbox_ack(ARRAY(SELECT o.id FROM idem_outbox AS o WHERE o.id = ANY (ids) AND o.topic = 'invoices'));
CREATE FUNCTION invoices.claim(key text, request_hash bytea DEFAULT NULL, wait interval DEFAULT NULL) RETURNS idem_claim_result
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
RETURN idem_claim('invoices', key, request_hash, wait => wait);
CREATE FUNCTION invoices.complete(key text, response_status int, response_body text, claim_token bigint DEFAULT NULL) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
RETURN idem_complete('invoices', key, response_status, response_body, claim_token => claim_token);
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA invoices FROM PUBLIC;
RESET ROLE;

CREATE ROLE regress_invoice_sender LOGIN;
GRANT USAGE ON SCHEMA invoices TO regress_invoice_sender;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA invoices TO regress_invoice_sender;
GRANT USAGE ON TYPE idem_claim_result TO regress_invoice_sender;

-- Rights by topic and scope
SELECT idem_publish('invoices', '{"invoice": 1}') AS message_id \gset
SELECT idem_publish('salaries', '{"salary": 1}') AS message_id \gset
SELECT id AS salary FROM idem_outbox WHERE topic = 'salaries' \gset
SET ROLE regress_invoice_sender;
SELECT payload FROM invoices.take();
SELECT invoices.ack(ARRAY[:salary]) AS acknowledged;                       -- 0
SELECT (invoices.claim('invoice-0000000001')).outcome;
RESET ROLE;
SELECT has_function_privilege('regress_invoice_sender', 'idem_outbox_take(int, interval, text[], interval)', 'EXECUTE') AS takes_others;   -- f

-- idem_request_hash
\connect
SELECT idem_request_hash('post', '/orders', '{"b": 1.0, "a": []}')
	= sha256('POST:/orders:{"a":[],"b":1}') AS same;

-- idem_canonical_json
SELECT idem_canonical_json('{"sum": 1e2, "list": [1.50, "\u0070ot"], "big": 12345678901234567891}');

-- idem_key_is_valid
SELECT idem_key_is_valid('order-5d9f4c1e-7a30') AS valid, idem_key_is_valid('order 1') AS invalid;

-- idem_release
\connect
BEGIN;
SELECT outcome FROM idem_claim('billing', 'invoice-1006-payment');
SELECT idem_release('billing', 'invoice-1006-payment') AS released;
COMMIT;

-- idem_claim_many
BEGIN;
SELECT ordinal, outcome FROM idem_claim_many('importer',
	ARRAY['row-2025-11-20-01', 'row-2025-11-20-02', 'row-2025-11-20-01']);     -- new, new, in_progress
SELECT ordinal, completed FROM idem_complete_many('importer',
	ARRAY['row-2025-11-20-01', 'row-2025-11-20-02'], '{200}');
COMMIT;

-- idem_lookup
SELECT state, attempt, response_status FROM idem_lookup('customer-7', 'order-5d9f4c1e-7a30');

-- idem_forget
SELECT idem_erase('customer-7', 'order-5d9f4c1e-7a30');
SELECT outcome, response_status, response_body FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30');
SELECT idem_forget('customer-7', 'order-5d9f4c1e-7a30');

-- idem_toggle
\connect
SELECT * FROM idem_toggle('user-2', 'post', '98', 'bookmark', 1763690000001);

-- idem_set_many
SELECT * FROM idem_set_many('{user-1,user-2}', '{post}', '{99}', '{like}', '{true}', '{1763690000009,1763690000010}');

-- idem_try_advance_many
SELECT * FROM idem_try_advance_many('{user-3}', '{profile}', '{1,2}', '{1763690000001}');

-- idem_is_active
SELECT idem_is_active('user-2', 'post', '98', 'bookmark');

-- idem_action_states
SELECT * FROM idem_action_states('user-1', 'post', ARRAY['98', '99']);

-- idem_forget_user
SELECT idem_forget_user('user-1') > 0 AS forgotten;

-- idem_once
\connect
SELECT idem_once('accounting', 'msg-4');

-- idem_once_at
SELECT idem_once_at('accounting', 'msg-4') <= clock_timestamp() AS used, idem_once_at('accounting', 'msg-5') AS unused;

-- idem_outbox_fail
\connect
SELECT idem_publish('reports', '{"report": 1}') AS message_id \gset
SELECT id, attempt FROM idem_outbox_take(topics => '{reports}') \gset
SELECT idem_outbox_fail(:id, :attempt, 'no route', schedule => '{1 minute,1 hour,1 day}');

-- idem_outbox_release
SELECT idem_publish('letters', '{"letter": 1}') AS message_id \gset
SELECT id, attempt FROM idem_outbox_take(topics => '{letters}') \gset
SELECT idem_outbox_release(ARRAY[:id], ARRAY[:attempt]) AS released;

-- idem_outbox_dead
SELECT topic, attempt, last_error FROM idem_outbox_dead();

-- idem_outbox_last_error
SELECT idem_outbox_last_error(id) FROM idem_outbox_take(topics => '{letters}');

-- idem_outbox_topics
SELECT * FROM idem_outbox_topics(3);

-- idem_grant
\connect
CREATE ROLE regress_publisher;
GRANT USAGE ON SCHEMA idem TO regress_publisher;
GRANT EXECUTE ON FUNCTION idem_publish TO regress_publisher;

-- idem_revoke
SELECT idem_revoke('regress_publisher'::regrole);

-- Tables
\connect
SELECT key, state, attempt, response_status FROM idem_keys WHERE scope = 'billing' ORDER BY key;
SELECT topic, state, count(*) FROM idem_outbox GROUP BY topic, state ORDER BY topic, state;

-- Statistics
\connect
SELECT claims_new > 0 AS claims, completions > 0 AS completions FROM idem_stats
WHERE datname = current_database();

-- idem_metric_samples
\connect
SELECT count(*) > 0 AS samples FROM idem_metric_samples();

-- idem_health
SELECT check_name, status FROM idem_health() WHERE check_name <> 'worker' ORDER BY check_name;

-- idem_outbox_blocked
SELECT topic, first_id, waiting, reason FROM idem_outbox_blocked();

-- idem_abandoned
SELECT outcome FROM idem_claim('billing', 'invoice-1005-payment', lease => '0 seconds');
SELECT scope, key, attempt, recovery_point FROM idem_abandoned(older_than => '0 seconds');

-- idem_cleanup
\connect
SELECT * FROM idem_cleanup();

-- idem_take_expired
SELECT taken ->> 'topic' AS topic, taken -> 'payload' AS payload FROM idem_take_expired('messages', max_rows => 10) AS taken;

-- idem_raise_claim_tokens
\connect
SELECT idem_raise_claim_tokens(1000) >= 1000 AS raised;

-- idem_repair_outbox
SELECT idem_repair_outbox() AS repaired;

-- All settings
\connect
SET idempotency.default_ttl = '36h';
SELECT outcome FROM idem_claim('customer-9', 'order-c3d2a1f0-5e4b');
SELECT expires_at - created_at AS ttl FROM idem_lookup('customer-9', 'order-c3d2a1f0-5e4b');
RESET idempotency.default_ttl;

-- Rate limit
\connect
SET idempotency.max_new_keys_per_minute = 1;
SELECT outcome FROM idem_claim('customer-10', 'order-1b7e6a90-33d1');
DO $$
BEGIN
	PERFORM idem_claim('customer-10', 'order-1b7e6a90-33d2');
EXCEPTION WHEN SQLSTATE 'ID002' THEN
	RAISE NOTICE '%', SQLERRM;
END
$$;
SELECT outcome FROM idem_claim('customer-10', 'order-1b7e6a90-33d1');
RESET idempotency.max_new_keys_per_minute;

-- Events in the server log
\connect
BEGIN;
SET LOCAL idempotency.route = 'POST /orders/{id}';
SELECT outcome FROM idem_claim('customer-9', 'order-5b0c7a1e-9d24');
COMMIT;

-- Leave nothing behind.
\connect :first_database
DROP DATABASE regress_idempotency_readme;
DROP ROLE regress_web_app;
DROP ROLE regress_invoice_gate;
DROP ROLE regress_invoice_sender;
DROP ROLE regress_publisher;
