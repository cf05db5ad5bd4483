--
-- How large values are stored: compressed once, the fast way where there is
-- one, and not at all where that gains nothing.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
CREATE EXTENSION idempotency;
RESET client_min_messages;

-- Some servers are built without LZ4.
SELECT CASE WHEN 'lz4' = ANY (enumvals) THEN 'lz4' ELSE 'pglz' END AS fast FROM pg_settings WHERE name = 'default_toast_compression' \gset
SELECT bool_and(attcompression = CASE :'fast' WHEN 'lz4' THEN 'l' ELSE '' END) AS fast, count(*)
	FROM pg_attribute WHERE attrelid IN ('idem_keys'::regclass, 'idem_outbox'::regclass)
		AND attname IN ('response_headers', 'response_body', 'response_bytes', 'recovery_state', 'error', 'payload', 'headers', 'last_error');

SELECT string_agg(md5(i::text), '') AS text, '["' || repeat('compressible ', 20000) || '"]' AS json FROM generate_series(1, 2000) AS i \gset
CREATE TEMP TABLE incompressible AS SELECT string_agg(sha512(i::text::bytea), '') AS bytes FROM generate_series(1, 2000) AS i;

-- A response, its headers, a recovery state
SELECT claim_token AS token FROM idem_claim('storage', 'key-0000000000001') \gset
SELECT idem_checkpoint('storage', 'key-0000000000001', 'far', :'json', claim_token => :token) IS NOT NULL AS kept;
-- A compressed value is not decompressed and compressed again when another column is written.
ALTER TABLE idem_keys ALTER COLUMN recovery_state SET COMPRESSION pglz;
SELECT idem_complete('storage', 'key-0000000000001', 200, :'json', :'json', claim_token => :token);
SELECT pg_column_compression(recovery_state) = :'fast' AS state, pg_column_compression(response_headers) = :'fast' AS headers,
	pg_column_compression(response_body) = :'fast' AS body, pg_column_size(response_body) < 5000 AS small
	FROM idem_keys;
SELECT response_body = :'json' AS body, response_headers::text = :'json' AS headers FROM idem_claim('storage', 'key-0000000000001');

-- What does not become smaller stays as it is: a picture, or what the client has compressed.
SELECT outcome, idem_complete('storage', 'key-0000000000002', 200, bytes) FROM incompressible, idem_claim('storage', 'key-0000000000002');
SELECT pg_column_compression(response_bytes) AS compression, pg_column_size(response_bytes) = length(response_bytes) AS as_it_is
	FROM idem_keys WHERE key = 'key-0000000000002';
SELECT response_bytes = bytes AS bytes FROM incompressible, idem_claim('storage', 'key-0000000000002');

-- A message, which is written anew when it is taken, refused and acknowledged
SELECT idem_publish('t', :'json', headers => :'json') IS NOT NULL AS published;
ALTER TABLE idem_outbox ALTER COLUMN payload SET COMPRESSION pglz, ALTER COLUMN headers SET COMPRESSION pglz;
SELECT id, payload = :'json' AS payload, headers = :'json' AS headers FROM idem_outbox_take() \gset
SELECT idem_outbox_nack(:id, :'text', '0 seconds');
SELECT payload = :'json' AS payload, headers = :'json' AS headers FROM idem_outbox_take();
SELECT idem_outbox_ack(ARRAY[:id]);
SELECT pg_column_compression(payload) = :'fast' AS payload, pg_column_compression(headers) = :'fast' AS headers,
	last_error = :'text' AS error FROM idem_outbox;

DROP EXTENSION idempotency CASCADE;
