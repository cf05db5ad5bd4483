-- 100 clients, whole requests
\set u random(1, :keys)
BEGIN;
SELECT outcome = 'new' AS is_new FROM idem_claim('scope-1', 'key-' || :start || '-' || :u, sha256('request')) \gset
\if :is_new
INSERT INTO orders (sku) VALUES ('teapot');
SELECT idem_complete('scope-1', 'key-' || :start || '-' || :u, 201, '{"order": 12345, "status": "created"}', '{"Content-Type": "application/json"}');
\endif
COMMIT;
