-- idem_run with a PL/pgSQL handler
\set u random(100000000000000000, 999999999999999999)
SELECT outcome, response_status, response_headers, response_body FROM idem_run('scope-1', 'key-new-' || :u || '-12345678', 'place_order(jsonb)', '{"sku": "teapot"}');
