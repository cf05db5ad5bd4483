--
-- The editions: a database changes from one to the other in place, with its
-- records, claims, messages and grants; and what a script has installed becomes
-- an extension.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
DROP ROLE IF EXISTS regress_idem_editions;
CREATE SCHEMA editions;
CREATE EXTENSION idempotency SCHEMA editions;
SET search_path = editions, public;
CREATE ROLE regress_idem_editions;
SELECT extversion AS version, extversion || '-portable' AS portable_version FROM pg_extension WHERE extname = 'idempotency' \gset
SELECT idem_grant('regress_idem_editions');
\pset format unaligned
\pset tuples_only on

SELECT outcome FROM idem_claim('s', 'editions-claimed-1', idem_request_hash('POST', '/x', '{"a":1.0}'), lease => '1 h');
SELECT claim_token FROM idem_claim('s', 'editions-complete', idem_request_hash('POST', '/x', '{"a":2}')) \gset
SELECT idem_complete('s', 'editions-complete', 201, '{"ok":1}', claim_token => :claim_token);
SELECT count(idem_publish('t', to_jsonb(i), 'k' || i % 2)) FROM generate_series(1, 6) AS i;
SELECT idem_once('s', 'token'), idem_set('u', 'post', '1', 'like', true, 5), outcome FROM idem_try_append('a', 'c', 1);
SELECT id FROM idem_outbox_take(2);

-- The settings of the database are copied.  Those of idem_configure() have an effect
-- although the server has loaded the library, which defines settings of these names.
ALTER DATABASE :"DBNAME" SET idempotency.key_min_length = 17;
\connect -
SET client_min_messages = warning;
SET search_path = editions, public;
ALTER EXTENSION idempotency UPDATE TO :'portable_version';
ALTER DATABASE :"DBNAME" RESET idempotency.key_min_length;
SELECT idem_key_is_valid(repeat('k', 16)), idem_key_is_valid(repeat('k', 17));
SELECT idem_configure('default_ttl', '1 h'), idem_configure('outbox_retention', '5 h');
SELECT count(*) FILTER (WHERE name = 'idempotency.default_ttl' AND setting = '3600000'),
	count(*) FILTER (WHERE name = 'idempotency.outbox_retention' AND setting = '18000000') FROM idem_p_settings;
SET ROLE regress_idem_editions;
SELECT expires_at < clock_timestamp() + '61 min'::interval FROM idem_claim('s', 'editions-configured');
SET idempotency.default_ttl = '3 h';
SELECT expires_at > clock_timestamp() + '179 min'::interval FROM idem_claim('s', 'editions-set-by-session');
RESET idempotency.default_ttl;
RESET ROLE;
SELECT detail FROM idem_health() WHERE check_name = 'edition';
SELECT outcome FROM idem_claim('s', 'editions-claimed-1', idem_request_hash('POST', '/x', '{"a":1}'));
SELECT outcome, response_status, response_body FROM idem_claim('s', 'editions-complete', idem_request_hash('POST', '/x', '{"a":2.0}'));
SELECT idem_once('s', 'token'), idem_set('u', 'post', '1', 'like', false, 4), outcome FROM idem_try_append('a', 'c', 1);
SELECT idem_complete('s', 'editions-complete', 201, '{"ok":1}', claim_token => :claim_token);
-- Another key: that of the first two is leased.
SELECT id, message_key FROM idem_outbox_take(2);
SET ROLE regress_idem_editions;
SELECT outcome FROM idem_claim('s', 'editions-claimed-2');
RESET ROLE;

-- It warns if the server's settings are not the defaults.
SET client_min_messages = error;
ALTER EXTENSION idempotency UPDATE TO :'version';
RESET client_min_messages;
SELECT detail FROM idem_health() WHERE check_name = 'edition';
SELECT count(*) FROM pg_proc WHERE pronamespace = 'editions'::regnamespace AND proname LIKE 'idem\_p\_%';
SET ROLE regress_idem_editions;
SELECT outcome FROM idem_claim('s', 'editions-claimed-2');
RESET ROLE;
SELECT outcome, response_status, response_body FROM idem_claim('s', 'editions-complete', idem_request_hash('POST', '/x', '{"a":2.0}'));
SELECT idem_outbox_ack(ARRAY[1, 2, 3, 4]);
SELECT id, message_key FROM idem_outbox_take();
SELECT check_name FROM idem_health() WHERE status = 'critical';

-- The objects of the script
DROP EXTENSION idempotency;
DROP SCHEMA editions CASCADE;
\setenv PGDATABASE :DBNAME
\! psql -X -q -v schema=editions -f portable/build/idempotency.sql >results/editions.log 2>&1
RESET client_min_messages;
SELECT editions.idem_once('s', 'kept'), (SELECT count(*) FROM pg_extension WHERE extname = 'idempotency');
CREATE EXTENSION idempotency SCHEMA editions VERSION 'unpackaged';
ALTER EXTENSION idempotency UPDATE TO :'portable_version';
ALTER EXTENSION idempotency UPDATE TO :'version';
SELECT editions.idem_once('s', 'kept'), detail FROM editions.idem_health() WHERE check_name = 'edition';
DROP EXTENSION idempotency;
DROP SCHEMA editions;
DROP ROLE regress_idem_editions;
