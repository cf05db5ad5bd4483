-- Cleanup, and repairs after a restore.  There is no background worker.  An operator
-- or a scheduler calls idem_cleanup().

--@ helpers
CREATE FUNCTION @S@.idem_p_tombstone()
RETURNS interval
LANGUAGE sql STABLE
AS $$
	SELECT CASE WHEN @S@.idem_p_setting('expired_key_policy') = 'reject'
		THEN @S@.idem_p_setting('tombstone_retention')::float8 ELSE 0 END * '1 ms'::interval
$$;
COMMENT ON FUNCTION @S@.idem_p_tombstone() IS
'For how long an expired key is kept.';

-- setval() could lower a sequence that another session has raised, or let a number be
-- drawn twice.  So only one session raises at a time, and small differences are
-- raised by nextval().  The rollback of the subtransaction releases the row that is
-- locked for this, and does not undo changes of a sequence.
CREATE FUNCTION @S@.idem_p_raise_sequence(sequence regclass, at_least bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	number bigint;
BEGIN
	PERFORM FROM @S@.idem_p_installation AS i FOR UPDATE;
	IF NOT FOUND THEN
		PERFORM @S@.idem_p_complete_installation();
	END IF;
	number := coalesce(pg_sequence_last_value(sequence), 0);
	IF at_least - number > 100000 THEN
		PERFORM setval(sequence, at_least);
	ELSE
		WHILE number < at_least LOOP
			number := nextval(sequence);
		END LOOP;
	END IF;
	RAISE SQLSTATE 'IDR00';
EXCEPTION WHEN SQLSTATE 'IDR00' THEN
	NULL;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_raise_sequence(regclass, bigint) IS
'Raises a sequence, so that its next number is above this one; never lowers it.';

--@ idem_cleanup plpgsql
DECLARE
	result @S@.idem_cleanup_result;
	wanted CONSTANT int := coalesce(batch_size, @S@.idem_p_setting('cleanup_batch_size')::int);
	clock CONSTANT timestamptz := clock_timestamp();
BEGIN
	IF wanted < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "batch_size" must be positive';
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	DELETE FROM @S@.idem_keys AS k WHERE k.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_keys AS e
		WHERE e.expires_at <= clock - @S@.idem_p_tombstone() ORDER BY e.expires_at LIMIT wanted FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS result.keys_deleted = ROW_COUNT;
	DELETE FROM @S@.idem_tokens AS t WHERE t.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_tokens AS e
		WHERE e.expires_at <= clock ORDER BY e.expires_at LIMIT wanted FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS result.tokens_deleted = ROW_COUNT;
	DELETE FROM @S@.idem_outbox AS o WHERE o.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_outbox AS e
		WHERE e.state <> 'pending' AND e.acked_at <= clock - @S@.idem_p_setting('outbox_retention')::float8 * '1 ms'::interval
		ORDER BY e.acked_at LIMIT wanted FOR UPDATE SKIP LOCKED));
	GET DIAGNOSTICS result.messages_deleted = ROW_COUNT;
	RETURN result;
END

--@ idem_take_expired plpgsql
DECLARE
	wanted CONSTANT int := coalesce(max_rows, 1000);
	clock CONSTANT timestamptz := clock_timestamp();
BEGIN
	IF kind IS NULL THEN
		PERFORM @S@.idem_p_null('kind');
	ELSIF kind NOT IN ('keys', 'tokens', 'messages') THEN
		RAISE EXCEPTION USING ERRCODE = '22023',
			MESSAGE = 'argument "kind" does not name a kind of rows',
			HINT = 'Pass ''keys'', ''tokens'' or ''messages''.';
	ELSIF wanted < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "max_rows" must be positive',
			HINT = 'Omit it to take up to 1000 rows.';
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	-- Columns of type json as text, because jsonb cannot hold all numbers of json.
	CASE kind
		WHEN 'keys' THEN
			RETURN QUERY DELETE FROM @S@.idem_keys AS k WHERE k.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_keys AS e
					WHERE e.expires_at <= clock - @S@.idem_p_tombstone() ORDER BY e.expires_at LIMIT wanted FOR UPDATE SKIP LOCKED))
				RETURNING (SELECT to_jsonb(r) FROM (SELECT k.claim_token, k.created_at, k.completed_at, k.lease_expires_at,
					k.resume_at, k.expires_at, k.attempt, k.response_status, k.state, k.scope, k.key, k.request_hash,
					k.response_headers::text AS response_headers, k.response_body, k.response_bytes, k.error, k.recovery_point,
					k.recovery_state::text AS recovery_state, k.request) AS r);
		WHEN 'tokens' THEN
			RETURN QUERY DELETE FROM @S@.idem_tokens AS t WHERE t.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_tokens AS e
					WHERE e.expires_at <= clock ORDER BY e.expires_at LIMIT wanted FOR UPDATE SKIP LOCKED))
				RETURNING to_jsonb(t);
		ELSE
			RETURN QUERY DELETE FROM @S@.idem_outbox AS o WHERE o.ctid = ANY (ARRAY(SELECT e.ctid FROM @S@.idem_outbox AS e
					WHERE e.state <> 'pending' AND e.acked_at <= clock - @S@.idem_p_setting('outbox_retention')::float8 * '1 ms'::interval
					ORDER BY e.acked_at LIMIT wanted FOR UPDATE SKIP LOCKED))
				RETURNING to_jsonb(o);
	END CASE;
END

--@ idem_raise_claim_tokens plpgsql
DECLARE
	highest CONSTANT bigint := 4611686018427387903;
	wanted bigint;
	moved bigint;
	ids bigint;
BEGIN
	IF at_least IS NULL THEN
		PERFORM @S@.idem_p_null('at_least');
	ELSIF at_least > highest THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('argument "at_least" must not be greater than %s', highest);
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	wanted := greatest(at_least, 0);
	moved := greatest(wanted - coalesce(pg_sequence_last_value('@S@.idem_claim_tokens'), 0), 0);
	ids := least(greatest(pg_sequence_last_value('@S@.idem_outbox_ids'), (SELECT max(o.id) FROM @S@.idem_outbox AS o), 0), highest);
	PERFORM @S@.idem_p_raise_sequence('@S@.idem_outbox_ids', ids + least(moved, highest - ids));
	PERFORM @S@.idem_p_raise_sequence('@S@.idem_claim_tokens', wanted);
	RETURN coalesce(pg_sequence_last_value('@S@.idem_claim_tokens'), 0);
END

--@ idem_repair_outbox plpgsql
DECLARE
	repaired bigint;
BEGIN
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	UPDATE @S@.idem_outbox AS o SET in_due_index = true
		WHERE o.id = ANY (ARRAY(SELECT e.id FROM @S@.idem_outbox AS e
			WHERE e.state = 'pending' AND NOT e.in_due_index AND (e.key_hash IS NULL
				OR NOT EXISTS (SELECT FROM @S@.idem_outbox AS b
					WHERE b.key_hash = e.key_hash AND b.state = 'pending' AND b.id < e.id))
			FOR NO KEY UPDATE SKIP LOCKED));
	GET DIAGNOSTICS repaired = ROW_COUNT;
	RETURN repaired;
END
