--@ idem_cleanup plpgsql
#variable_conflict use_column
DECLARE r @S@.idem_cleanup_result; n int := coalesce($1, @S@.idem_p_setting('cleanup_batch_size')::int); t timestamptz := clock_timestamp(); kt timestamptz;
BEGIN
	IF n < 1 THEN RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "batch_size" must be positive'; END IF;
	kt := t - CASE WHEN @S@.idem_p_setting('expired_key_policy') = 'reject' THEN @S@.idem_p_setting('tombstone_retention')::float8 ELSE 0 END * interval '1 ms';
	DELETE FROM @S@.idem_keys WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM @S@.idem_keys AS k WHERE k.expires_at <= kt ORDER BY k.expires_at LIMIT n FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS r.keys_deleted = ROW_COUNT;
	DELETE FROM @S@.idem_tokens WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM @S@.idem_tokens AS k WHERE k.expires_at <= t ORDER BY k.expires_at LIMIT n FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS r.tokens_deleted = ROW_COUNT;
	DELETE FROM @S@.idem_outbox WHERE ctid = ANY (ARRAY(SELECT k.ctid FROM @S@.idem_outbox AS k WHERE k.state <> 'pending' AND NOT k.in_due_index
		AND k.acked_at <= t - @S@.idem_p_setting('outbox_retention')::float8 * interval '1 ms' ORDER BY k.acked_at LIMIT n FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS r.messages_deleted = ROW_COUNT;
	RETURN r;
END

--@ idem_raise_claim_tokens plpgsql
#variable_conflict use_column
DECLARE before bigint; n bigint; top bigint;
BEGIN
	IF $1 IS NULL THEN PERFORM @S@.idem_p_null('at_least'); END IF;
	IF $1 > 4611686018427387903 THEN RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "at_least" is too large'; END IF;
	PERFORM pg_advisory_xact_lock(hashtextextended('idem_raise_claim_tokens', 480));
	before := nextval('@S@.idem_claim_tokens');
	n := greatest(before, $1);
	PERFORM setval('@S@.idem_claim_tokens', n);
	top := greatest(nextval('@S@.idem_outbox_ids') + n - before, (SELECT max(o.id) FROM @S@.idem_outbox AS o));
	PERFORM setval('@S@.idem_outbox_ids', top);
	RETURN n;
END

--@ idem_take_expired plpgsql
BEGIN
	RETURN;
END

--@ idem_repair_outbox plpgsql
BEGIN
	RETURN 0;
END
