
--
-- Cleanup
--

CREATE TYPE @extschema@.idem_cleanup_result AS (
	keys_deleted bigint,
	tokens_deleted bigint,
	messages_deleted bigint
);
COMMENT ON TYPE @extschema@.idem_cleanup_result IS
'What idem_cleanup returns.';

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int DEFAULT NULL)
RETURNS @extschema@.idem_cleanup_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_cleanup(int) IS
'Deletes what has expired: request keys (under expired_key_policy reject, once tombstone_retention has passed too), once-only tokens, and acknowledged messages older than idempotency.outbox_retention. One batch, at most batch_size rows of each; NULL: idempotency.cleanup_batch_size. Rows that somebody is writing are left for the next call. Returns how many were deleted; call again, in a new transaction, until nothing is. A batch that takes long, because of large responses, ends before it is full. A session starts where its last call ended, and at the oldest row before it says that nothing is left, unless that takes long. With the library in shared_preload_libraries a background worker does this. Raises 22023 for a batch_size below 1.';

CREATE FUNCTION @extschema@.idem_take_expired(kind text, max_rows int DEFAULT 1000)
RETURNS SETOF jsonb
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000 ROWS 500
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_take_expired(text, int) IS
'Deletes up to max_rows rows that idem_cleanup would delete, and returns them as jsonb, columns of type json as strings; kind: keys, tokens or messages. For INSERT INTO archive SELECT: if the transaction is rolled back, the rows are there again. Skips rows that another transaction is writing. It can return fewer rows than there are; call again, in a new transaction, until it returns none. What a LIMIT or a WHERE leaves out of the result is deleted all the same. The background worker of the database must not run, or it deletes the rows first. Raises 22004 for a NULL kind, 22023 for another kind and for a max_rows below 1, 54000 for a row that is too large for jsonb.';
