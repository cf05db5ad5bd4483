-- The SQL blocks of docs/drivers.md, in order.
-- Written by test/readme; do not edit, run that again.
\set first_database :DBNAME
CREATE DATABASE regress_idempotency_drivers TEMPLATE template0;
\connect regress_idempotency_drivers

-- From a driver
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
ALTER DATABASE regress_idempotency_drivers SET search_path = public, idem;
\connect

-- Statements
PREPARE claim AS
SELECT outcome, claim_token, response_status, response_headers, response_body, recovery_point
FROM idem_claim($1::text, $2::text, idem_request_hash($3::text, $4::text, $5::text),
	wait => make_interval(secs => $6::float8));

PREPARE complete AS
SELECT idem_complete($1::text, $2::text, $3::int, $4::text, $5::text::json, $6::bigint);

PREPARE publish AS
SELECT idem_publish($1::text, $2::text::jsonb, $3::text) AS message_id;

-- Statements
BEGIN;
EXECUTE claim('customer-7', 'order-5d9f4c1e-7a30', 'POST', '/orders', '{"sku": "teapot"}', 5);      -- new
EXECUTE complete('customer-7', 'order-5d9f4c1e-7a30', 201, '{"order": 1}',
	'{"Content-Type": "application/json"}', NULL);
EXECUTE publish('orders', '{"order": 1}', 'customer-7') \gset
COMMIT;
EXECUTE claim('customer-7', 'order-5d9f4c1e-7a30', 'POST', '/orders', '{"sku": "teapot"}', 5);      -- replay

-- Numbers
\connect
SELECT outcome, last_client_seq FROM idem_try_append('cart-12', 'phone', 1, event_count => 3, allow_gaps => false);
SELECT outcome, last_client_seq FROM idem_try_append('cart-12', 'phone', 31, allow_gaps => false);   -- gap

-- Arrays
\connect
PREPARE seen AS SELECT token FROM idem_once_many($1::text, $2::text[]) AS token;
EXECUTE seen('mails', '{m1,m2}');

-- Transactions
\connect
BEGIN;
SELECT outcome FROM idem_claim('customer-7', 'report-6a0f2c1d-03');
SAVEPOINT response;
-- 54000: larger than idempotency.max_response_size
SELECT idem_complete('customer-7', 'report-6a0f2c1d-03', 200, repeat('x', 1048577));
ROLLBACK TO SAVEPOINT response;
SELECT idem_complete('customer-7', 'report-6a0f2c1d-03', 200, '{"see": "/reports/17"}');
COMMIT;

-- Transactions
SELECT octet_length('{"order": 1}') > pg_size_bytes(current_setting('idempotency.max_response_size')) AS too_large;

-- Leave nothing behind.
\connect :first_database
DROP DATABASE regress_idempotency_drivers;
