
--
-- Cleanup
--

CREATE TYPE @extschema@.idem_cleanup_result AS (
	keys_deleted bigint,
	tokens_deleted bigint,
	messages_deleted bigint
);
COMMENT ON TYPE @extschema@.idem_cleanup_result IS
'The result of idem_cleanup.';

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int DEFAULT NULL)
RETURNS @extschema@.idem_cleanup_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_cleanup(int) IS
'Deletes expired request keys (under expired_key_policy reject, after tombstone_retention), expired once-only tokens, and acknowledged messages older than idempotency.outbox_retention: one batch of at most batch_size rows of each kind; NULL: idempotency.cleanup_batch_size. Skips rows that another transaction is writing. Returns how many rows were deleted. Call it again, in a new transaction, until it deletes none. A batch that takes long, because of large responses, ends before it is full. A session continues where its last call ended. Before it reports that nothing is left, it starts from the oldest row, unless that takes long. If the library is in shared_preload_libraries, a background worker does this. Raises 22023 for a batch_size below 1.';

CREATE FUNCTION @extschema@.idem_take_expired(kind text, max_rows int DEFAULT 1000)
RETURNS SETOF jsonb
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 500
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_take_expired(text, int) IS
'Deletes up to max_rows rows that idem_cleanup would delete, and returns them as jsonb, columns of type json as strings; kind: keys, tokens or messages. For INSERT INTO archive SELECT: a rollback restores the rows. Skips rows that another transaction is writing. It can return fewer rows than there are. Call it again, in a new transaction, until it returns none. A LIMIT or WHERE on the result does not restrict the effects. The background worker must not run in this database, or it deletes the rows first. Raises 22004 for a NULL kind, 22023 for another kind and for a max_rows below 1, 54000 for a row that is too large for jsonb.';
