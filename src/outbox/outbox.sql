
--
-- Transactional outbox
--

-- The columns that takes and answers change come first, so that the WAL of an update is short.
CREATE TABLE @extschema@.idem_outbox (
	id bigint NOT NULL,
	key_hash bigint,
	created_at timestamptz NOT NULL,
	available_at timestamptz NOT NULL,
	acked_at timestamptz,
	attempt integer NOT NULL,
	uncounted_attempts integer NOT NULL,
	awaiting_ack boolean,
	in_due_index boolean NOT NULL,
	message_id uuid NOT NULL,
	state text COLLATE "C" NOT NULL,
	topic text COLLATE "C" NOT NULL,
	message_key text COLLATE "C",
	payload jsonb NOT NULL,
	headers jsonb,
	last_error text,
	PRIMARY KEY (id)
) WITH (
	-- Space for a message's next versions, for the same reason.
	fillfactor = 50,
	-- A take scans the index entries of dead rows; each message leaves three.
	autovacuum_vacuum_scale_factor = 0.02,
	-- Vacuum at ten times the default's speed, to keep up.
	autovacuum_vacuum_cost_limit = 2000
);
COMMENT ON TABLE @extschema@.idem_outbox IS
'Outbox: messages published by committed transactions, until they have been acknowledged and cleaned up. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_outbox.id IS 'Number of the message, in the order of publishing.';
COMMENT ON COLUMN @extschema@.idem_outbox.key_hash IS 'Hash of topic and message_key, which names the lane of the message; NULL if it has no key.';
COMMENT ON COLUMN @extschema@.idem_outbox.created_at IS 'When the message was published.';
COMMENT ON COLUMN @extschema@.idem_outbox.available_at IS 'When the message can be taken: the end of its delay, lease or pause. For an acknowledged message in the due index: when a take examines its lane.';
COMMENT ON COLUMN @extschema@.idem_outbox.acked_at IS 'When the message was acknowledged; NULL before that.';
COMMENT ON COLUMN @extschema@.idem_outbox.attempt IS 'How many times the message has been taken.';
COMMENT ON COLUMN @extschema@.idem_outbox.uncounted_attempts IS 'How many of these attempts do not count toward idempotency.outbox_max_attempts, because the message was requeued or released.';
COMMENT ON COLUMN @extschema@.idem_outbox.awaiting_ack IS 'true from a take until the answer, false after a nack, NULL if no relay has had the message since it was published, requeued or released.';
COMMENT ON COLUMN @extschema@.idem_outbox.in_due_index IS 'Whether a take examines this row when available_at has come; false for a message behind another one of its key.';
COMMENT ON COLUMN @extschema@.idem_outbox.message_id IS 'Random UUID by which consumers recognise repeats.';
COMMENT ON COLUMN @extschema@.idem_outbox.state IS 'pending, acked or dead.';
COMMENT ON COLUMN @extschema@.idem_outbox.topic IS 'What the message is about; relays take by topic.';
COMMENT ON COLUMN @extschema@.idem_outbox.message_key IS 'Messages of one topic and key are delivered in order; NULL: in any order.';
COMMENT ON COLUMN @extschema@.idem_outbox.payload IS 'The message.';
COMMENT ON COLUMN @extschema@.idem_outbox.headers IS 'Headers of the message, for consumers and sinks.';
COMMENT ON COLUMN @extschema@.idem_outbox.last_error IS 'Error text of the last nack.';

CREATE INDEX idem_outbox_due ON @extschema@.idem_outbox (available_at) WHERE in_due_index;
CREATE INDEX idem_outbox_topics ON @extschema@.idem_outbox (topic, available_at) WHERE in_due_index;
CREATE INDEX idem_outbox_lanes ON @extschema@.idem_outbox (key_hash, id)
	WHERE state OPERATOR(pg_catalog.=) 'pending' AND key_hash IS NOT NULL;
CREATE INDEX idem_outbox_ended ON @extschema@.idem_outbox (acked_at)
	WHERE state OPERATOR(pg_catalog.<>) 'pending';

CREATE SEQUENCE @extschema@.idem_outbox_ids;
COMMENT ON SEQUENCE @extschema@.idem_outbox_ids IS
'Ids of outbox messages, in the order of publishing.';

SELECT pg_catalog.pg_extension_config_dump('idem_outbox', '');
SELECT pg_catalog.pg_extension_config_dump('idem_outbox_ids', '');

CREATE FUNCTION @extschema@.idem_publish(topic text, payload jsonb, message_key text DEFAULT NULL, headers jsonb DEFAULT NULL,
	deliver_after interval DEFAULT NULL)
RETURNS uuid
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_publish(text, jsonb, text, jsonb, interval) IS
'Publishes a message if and only if the transaction commits. topic, message_key: 1 to 512 bytes; messages with the same topic and key are handed out in order. deliver_after: the delay before the message is available. Returns the message id, a random UUID (RFC 9562), by which consumers recognise repeats. Never waits. Uses a sequence, so lastval() changes. Raises 22004 or 22023 for bad arguments, 22P05 for a message key that cannot be converted to UTF-8, 23505 if the sequence was set back, 54000 if payload and headers as text exceed idempotency.max_message_size.';

CREATE FUNCTION @extschema@.idem_publish_many(topics text[], payloads jsonb[], message_keys text[] DEFAULT NULL, headers jsonb[] DEFAULT NULL,
	deliver_after interval DEFAULT NULL, OUT ordinal int, OUT message_id uuid)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 1 SUPPORT @extschema@.idem_many_support
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_publish_many(text[], jsonb[], text[], jsonb[], interval) IS
'Publishes many messages at once, as single calls of idem_publish in the order given, so messages with the same topic and key are handed out in that order. All arrays have the same length; an array of one element applies to all elements; message_keys and headers can contain NULLs. Returns a row for each message, in that order, with its ordinal from 1 and its message id. An error undoes the whole call. Never waits. Uses a sequence, so lastval() changes. Raises 22004 or 22023 for bad arguments, 22P05 for a message key that cannot be converted to UTF-8, 23505 if the sequence was set back, 54000 if payload and headers as text exceed idempotency.max_message_size.';

CREATE FUNCTION @extschema@.idem_outbox_take(max_messages int DEFAULT 100, lease interval DEFAULT '30 seconds', topics text[] DEFAULT NULL,
	wait interval DEFAULT NULL,
	OUT id bigint, OUT message_id uuid, OUT topic text, OUT message_key text, OUT payload jsonb, OUT headers jsonb,
	OUT attempt int, OUT created_at timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000 ROWS 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_take(int, interval, text[], interval) IS
'Takes up to max_messages messages to deliver them. Commit, deliver, then acknowledge them with idem_outbox_ack, or refuse them with idem_outbox_nack, before the lease expires; after that they are handed out again. topics: only these; NULL: all. A message is taken only if no earlier one with the same topic and message_key is pending, leased, pausing or delayed, or together with the earlier ones, in order. wait: how long to wait while there is nothing to take, until a message is published or becomes available; NULL or zero: not at all. Does not wait for other relays or publishers otherwise. A take that only changes messages that it cannot return, for example declares one dead, returns an empty result at once, so that the caller commits the change. A message that was taken idempotency.outbox_max_attempts times without an answer is dead. A LIMIT or WHERE on the result does not restrict the effects. Raises 22004 or 22023 for bad arguments.';

CREATE FUNCTION @extschema@.idem_outbox_ack(ids bigint[])
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_ack(bigint[]) IS
'Acknowledges delivered messages. Returns how many of them had not been acknowledged before; dead messages count. If idempotency.outbox_retention is 0, deletes them. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_nack(id bigint, error text DEFAULT NULL, retry_after interval DEFAULT NULL, attempt int DEFAULT NULL)
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_nack(bigint, text, interval, int) IS
'Refuses a message that could not be delivered. retry_after: how long to pause; NULL: 1 second after the first attempt, doubled with each further one up to an hour, less up to a half at random. attempt: as idem_outbox_take returned it; with it, the call returns lost if another relay has taken the message since. Returns pending, dead (after idempotency.outbox_max_attempts attempts; the message keeps its last error), or lost (taken, requeued or released since, acknowledged or cleaned up; nothing was changed). Waits for a transaction that is writing the message. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_requeue(ids bigint[] DEFAULT NULL)
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_requeue(bigint[]) IS
'Makes dead messages pending again, with all their attempts; the numbers of their attempts continue. ids: NULL: all dead messages. Returns how many. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_extend(ids bigint[], lease interval DEFAULT '30 seconds', attempts int[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_extend(bigint[], interval, int[]) IS
'Extends the leases of messages that are being delivered. lease: how long from now; NULL: 30 seconds. attempts: as idem_outbox_take returned them, one for each id, or one for all. Returns the ids of the messages that are still held, in the order given. Stop delivering the others: they were taken by another relay, answered, requeued or cleaned up. With attempts, a message is still held after its lease has expired, until another relay takes it; without them, it is not. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_release(ids bigint[], attempts int[] DEFAULT NULL)
RETURNS int
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_release(bigint[], int[]) IS
'Releases messages that were not tried: they are available at once, and the attempt does not count. attempts: as idem_outbox_take returned them, one for each id, or one for all. Returns how many were released: only those that are still held, as for idem_outbox_extend. If you release a message, also release the later ones with the same topic and message_key. Waits for transactions that are writing them. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_fail(id bigint, attempt int, error text, retry_after interval DEFAULT NULL, counted boolean DEFAULT true,
	schedule interval[] DEFAULT NULL, max_age interval DEFAULT NULL)
RETURNS text
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_outbox_fail(bigint, int, text, interval, boolean, interval[], interval) IS
'Refuses a message like idem_outbox_nack, and keeps its last five errors in last_error, the newest first, each in a line that begins with its time. attempt: as idem_outbox_take returned it. counted: false if the attempt does not count. schedule: the pauses after the first, second, ... counted attempt; after one more failure, the message is dead; NULL: the pauses of idem_outbox_nack. idempotency.outbox_max_attempts also applies. max_age: a message that was published longer ago is dead after any failure. Returns pending, dead or lost, like idem_outbox_nack. Waits for a transaction that is writing the message. Raises 22004, 22023.';

CREATE FUNCTION @extschema@.idem_outbox_dead(max_messages int DEFAULT 1000, OUT id bigint, OUT message_id uuid, OUT topic text,
	OUT message_key text, OUT attempt int, OUT created_at timestamptz, OUT last_error text)
RETURNS SETOF record
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 10000 ROWS 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT o.id, o.message_id, o.topic, o.message_key, o.attempt, o.created_at, o.last_error
	FROM @extschema@.idem_outbox AS o
	-- In the index of ended messages, acked_at is NULL for dead ones.
	WHERE o.acked_at IS NULL AND o.state OPERATOR(pg_catalog.<>) 'pending'
		AND o.state OPERATOR(pg_catalog.=) 'dead'
	ORDER BY o.id
	LIMIT CASE WHEN $1 IS NOT NULL THEN greatest($1, 0) END;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_dead(int) IS
'Dead messages, the oldest first, without their payloads and headers. max_messages: how many at most; NULL: all. Reads only; works on a hot standby. Raises no errors of its own.';

CREATE FUNCTION @extschema@.idem_outbox_last_error(id bigint)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 1000
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	SELECT o.last_error FROM @extschema@.idem_outbox AS o WHERE o.id OPERATOR(pg_catalog.=) $1;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_last_error(bigint) IS
'The error with which a message was last refused, or its last errors, as idem_outbox_nack and idem_outbox_fail keep them. Returns NULL if there is none, or no such message. So a relay that has taken a message knows whether it failed before, at any relay. Reads only; works on a hot standby. Raises no errors of its own.';

CREATE FUNCTION @extschema@.idem_outbox_topics(max_topics int DEFAULT 10000)
RETURNS SETOF text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER COST 10000 ROWS 100
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
	WITH RECURSIVE found (name) AS (
		(SELECT o.topic FROM @extschema@.idem_outbox AS o WHERE o.in_due_index ORDER BY o.topic LIMIT 1)
		UNION ALL
		SELECT (SELECT o.topic FROM @extschema@.idem_outbox AS o
			WHERE o.in_due_index AND o.topic OPERATOR(pg_catalog.>) f.name ORDER BY o.topic LIMIT 1)
		FROM found AS f WHERE f.name IS NOT NULL
	)
	SELECT f.name FROM found AS f WHERE f.name IS NOT NULL LIMIT CASE WHEN $1 IS NOT NULL THEN greatest($1, 0) END;
END;
COMMENT ON FUNCTION @extschema@.idem_outbox_topics(int) IS
'The topics of pending messages, in alphabetical order; topics without pending messages can be among them. max_topics: how many at most; NULL: all. Reads the index once for each topic. Reads only; works on a hot standby. Raises no errors of its own.';
