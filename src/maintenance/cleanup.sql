
--
-- Cleanup
--

CREATE TYPE @extschema@.idem_cleanup_result AS (
	keys_deleted bigint,
	tokens_deleted bigint,
	messages_deleted bigint
);
REVOKE ALL ON TYPE @extschema@.idem_cleanup_result FROM PUBLIC;
GRANT USAGE ON TYPE @extschema@.idem_cleanup_result TO pg_database_owner WITH GRANT OPTION;
COMMENT ON TYPE @extschema@.idem_cleanup_result IS
'What idem_cleanup returns.';

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int DEFAULT NULL)
RETURNS @extschema@.idem_cleanup_result
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
REVOKE ALL ON FUNCTION @extschema@.idem_cleanup(int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_cleanup(int) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_cleanup(int) IS
'Deletes what has expired: request keys (under expired_key_policy reject, once tombstone_retention has passed too), once-only tokens, and acknowledged messages older than idempotency.outbox_retention. One batch, at most batch_size rows of each; NULL: idempotency.cleanup_batch_size. Rows that somebody is writing are left for the next call. Returns how many were deleted; call again, in a new transaction, until nothing is. A batch that takes long, because of large responses, ends before it is full. A session starts where its last call ended, and at the oldest row before it says that nothing is left, unless that takes long. With the library in shared_preload_libraries a background worker does this. Raises 22023 for a batch_size below 1.';
