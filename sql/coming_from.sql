-- The SQL blocks of docs/coming-from.md, in order.
-- Written by test/readme; do not edit, run that again.
\set first_database :DBNAME
CREATE DATABASE regress_idempotency_coming_from TEMPLATE template0;
\connect regress_idempotency_coming_from

-- Coming from …
CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
ALTER DATABASE regress_idempotency_coming_from SET search_path = public, idem;
\connect

-- A table of idempotency keys
CREATE TABLE idempotency_keys (
	user_id text, idempotency_key text, request_sha256 bytea, status text NOT NULL,
	response_code int, response_body text, locked_at timestamptz, created_at timestamptz NOT NULL,
	PRIMARY KEY (user_id, idempotency_key)
);
INSERT INTO idempotency_keys VALUES
	('customer-7', 'order-5d9f4c1e-7a30', sha256('{"sku": "teapot"}'), 'finished', 201, '{"order": 1}', NULL, now() - interval '3 hours'),
	('customer-7', 'order-5d9f4c1e-7a31', sha256('{"sku": "kettle"}'), 'started', NULL, NULL, now(), now());

-- A table of idempotency keys
SELECT count(*) FILTER (WHERE completed) AS imported
FROM idempotency_keys AS old
	CROSS JOIN LATERAL idem_claim(old.user_id, old.idempotency_key, old.request_sha256,
		ttl => old.created_at + interval '24 hours' - now()) AS claim
	CROSS JOIN LATERAL (SELECT claim.outcome = 'new' AND idem_complete(old.user_id, old.idempotency_key,
		old.response_code, old.response_body, claim_token => claim.claim_token) AS completed) AS done
WHERE old.status = 'finished' AND old.created_at > now() - interval '24 hours';

SELECT outcome, response_status, response_body
FROM idem_claim('customer-7', 'order-5d9f4c1e-7a30', sha256('{"sku": "teapot"}'));    -- replay, 201

-- A table of idempotency keys
BEGIN;
SELECT outcome FROM idem_claim('customer-8', 'order-5d9f4c1e-7a32');                  -- new: what does the old table know?
INSERT INTO idempotency_keys VALUES ('customer-8', 'order-5d9f4c1e-7a32', NULL, 'started', NULL, NULL, now(), now())
	ON CONFLICT DO NOTHING RETURNING true AS first;
-- a row: run the request, and finish it in both.  None: look what is there.  Finished: complete with that
-- response, and COMMIT.  Started: ROLLBACK, and answer as the old code does
UPDATE idempotency_keys SET status = 'finished', response_code = 201, response_body = '{"order": 2}'
WHERE user_id = 'customer-8' AND idempotency_key = 'order-5d9f4c1e-7a32';
SELECT idem_complete('customer-8', 'order-5d9f4c1e-7a32', 201, '{"order": 2}');
COMMIT;

-- A version table for likes
\connect
CREATE TABLE likes (user_id text, post_id text, liked boolean NOT NULL, version bigint NOT NULL,
	PRIMARY KEY (user_id, post_id));
INSERT INTO likes VALUES ('anna', '1', true, 41), ('anna', '2', false, 7), ('ben', '1', true, 3);

-- A version table for likes
SELECT count(*) FILTER (WHERE processed) AS imported
FROM likes AS old
	CROSS JOIN LATERAL idem_set(old.user_id, 'post', old.post_id, 'like', old.liked, old.version);

SELECT is_active, last_action_id, processed FROM idem_set('anna', 'post', '1', 'like', false, 40);    -- stale: true, 41, false
SELECT entity_id, is_active FROM idem_action_states('anna', 'post', ARRAY['1', '2']) ORDER BY entity_id;

-- A table of processed messages
\connect
CREATE TABLE processed_messages (consumer text, message_id text, processed_at timestamptz NOT NULL,
	PRIMARY KEY (consumer, message_id));
INSERT INTO processed_messages VALUES ('accounting', 'msg-1', now()), ('accounting', 'msg-2', now() - interval '8 days');

-- A table of processed messages
SELECT count(*) AS imported
FROM (SELECT consumer, array_agg(message_id ORDER BY message_id) AS messages
	FROM processed_messages WHERE processed_at > now() - interval '7 days' GROUP BY consumer) AS old
	CROSS JOIN LATERAL idem_once_many(old.consumer, old.messages);

SELECT idem_once('accounting', 'msg-1') AS first;

-- An outbox table
\connect
CREATE TABLE outbox (id bigserial PRIMARY KEY, aggregate_type text, aggregate_id text, event jsonb,
	created_at timestamptz NOT NULL DEFAULT now(), sent_at timestamptz);
INSERT INTO outbox (aggregate_type, aggregate_id, event, sent_at) VALUES
	('orders', '12', '{"placed": 12}', now()), ('orders', '12', '{"paid": 12}', NULL), ('stock', NULL, '{"left": 3}', NULL);

-- An outbox table
CREATE FUNCTION publish_from_outbox() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_publish(NEW.aggregate_type, NEW.event, message_key => NEW.aggregate_id);
	NEW.sent_at := now();
	RETURN NEW;
END $$;

BEGIN;
CREATE TRIGGER publish_from_outbox BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION publish_from_outbox();
WITH unsent AS (
	UPDATE outbox SET sent_at = now() WHERE sent_at IS NULL RETURNING *
)
SELECT count(*) AS imported
FROM (SELECT array_agg(aggregate_type ORDER BY id) AS topics, array_agg(event ORDER BY id) AS payloads,
		array_agg(aggregate_id ORDER BY id) AS keys FROM unsent HAVING count(*) > 0) AS old
	CROSS JOIN LATERAL idem_publish_many(old.topics, old.payloads, message_keys => old.keys);
COMMIT;

INSERT INTO outbox (aggregate_type, aggregate_id, event) VALUES ('orders', '12', '{"packed": 12}');    -- a publisher of old
SELECT topic, message_key, payload FROM idem_outbox_take(10);

-- Leave nothing behind.
\connect :first_database
DROP DATABASE regress_idempotency_coming_from;
