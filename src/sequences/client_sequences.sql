
--
-- Client sequences
--

CREATE TYPE @extschema@.idem_append_result AS (
	outcome text,
	last_client_seq bigint,
	version bigint
);
COMMENT ON TYPE @extschema@.idem_append_result IS
'The result of idem_try_append.';

CREATE TABLE @extschema@.idem_aggregates (
	version bigint NOT NULL,
	aggregate text COLLATE "C" NOT NULL,
	PRIMARY KEY (aggregate)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_aggregates IS
'Versions: how many events each aggregate has. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_aggregates.version IS 'How many events have been appended to the aggregate.';
COMMENT ON COLUMN @extschema@.idem_aggregates.aggregate IS 'The aggregate.';

CREATE TABLE @extschema@.idem_client_sequences (
	last_client_seq bigint NOT NULL,
	aggregate text COLLATE "C" NOT NULL,
	client_id text COLLATE "C" NOT NULL,
	PRIMARY KEY (aggregate, client_id)
) WITH (fillfactor = 80);
COMMENT ON TABLE @extschema@.idem_client_sequences IS
'Client sequences: the last event of each client on each aggregate. Written by the functions only.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.last_client_seq IS 'Number of the last event that the client has appended.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.aggregate IS 'The aggregate.';
COMMENT ON COLUMN @extschema@.idem_client_sequences.client_id IS 'The client.';

SELECT pg_catalog.pg_extension_config_dump('idem_aggregates', '');
SELECT pg_catalog.pg_extension_config_dump('idem_client_sequences', '');

CREATE FUNCTION @extschema@.idem_try_append(aggregate text, client_id text, client_seq bigint, event_count int DEFAULT 1,
	expected_version bigint DEFAULT NULL, allow_gaps boolean DEFAULT true, wait interval DEFAULT NULL)
RETURNS @extschema@.idem_append_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_try_append(text, text, bigint, int, bigint, boolean, interval) IS
'Appends a client''s events client_seq to client_seq + event_count - 1 to an aggregate, once. outcome: appended, duplicate (all events were appended before), overlap (some were: resend from last_client_seq + 1), gap (allow_gaps is false and earlier events are missing), in_flight (another transaction holds this client''s sequence and has not committed, or waits for its synchronous standby), version_conflict (expected_version is not the aggregate''s). Only appended changes anything; then insert the events in the same transaction. aggregate, client_id: 1 to 512 bytes. client_seq: from 1. wait: how long to wait for that transaction; NULL or zero: not at all. A call waits for other clients'' appends to the aggregate as an UPDATE does. Raises 22004 or 22023 for bad arguments, 40001 if a row is newer than the transaction''s snapshot.';

CREATE FUNCTION @extschema@.idem_last_client_seq(aggregate text, client_id text)
RETURNS bigint
LANGUAGE c STABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_last_client_seq(text, text) IS
'The last event of a client on an aggregate, as this statement''s snapshot sees it; 0 if there is none. A restarted writer resumes after it. Reads only; works on a hot standby. Raises 22004, 22023.';
