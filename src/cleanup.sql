
--
-- Cleanup
--

CREATE FUNCTION @extschema@.idem_cleanup(batch_size int DEFAULT NULL,
	OUT keys_deleted bigint, OUT tokens_deleted bigint, OUT messages_deleted bigint)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME';
REVOKE ALL ON FUNCTION @extschema@.idem_cleanup(int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_cleanup(int) TO @extowner@, pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_cleanup(int) IS
'Deletes what has expired: request keys (under expired_key_policy reject, once tombstone_retention has passed too), once-only tokens, and acknowledged messages older than idempotency.outbox_retention. One batch, at most batch_size rows of each; NULL: idempotency.cleanup_batch_size. Rows that somebody is writing are left for the next call. Returns how many were deleted; call again, in a new transaction, while one of them equals batch_size. With the library in shared_preload_libraries a background worker does this. Raises 22023 for a batch_size below 1.';
