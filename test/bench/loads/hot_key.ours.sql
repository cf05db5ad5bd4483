-- 100 clients, whole requests; each key 1,000 times
\set now :now + 1
\set bucket :now / 10
BEGIN;
SELECT outcome = 'new' AS is_new FROM idem_claim('scope-1', 'key-hot-' || :bucket, sha256('request')) \gset
\if :is_new
INSERT INTO orders (sku) VALUES ('teapot');
SELECT idem_complete('scope-1', 'key-hot-' || :bucket, 201, '{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}');
\endif
COMMIT;
