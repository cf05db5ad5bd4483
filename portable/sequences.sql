-- Client sequences.
--
-- Every append writes the aggregate first and then the sequence, so the row of
-- the aggregate protects the sequences.  An append that is not allowed to wait for
-- its twin, an append for the same client, takes an advisory lock of the
-- sequence.  If it does not get the lock, it returns in_flight.  It keeps the lock
-- until the transaction ends only if it has written the sequence.

--@ helpers
CREATE FUNCTION @S@.idem_p_decide_append(p_aggregate text, p_client text, first bigint, last bigint, expected bigint,
	allow_gaps boolean, OUT outcome text, OUT last_seq bigint, OUT version bigint, OUT writer xid)
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
	SELECT coalesce((SELECT c.last_client_seq FROM @S@.idem_client_sequences AS c
				WHERE c.aggregate = p_aggregate AND c.client_id = p_client), 0),
			coalesce(a.version, 0), a.xmax
		INTO last_seq, version, writer
		FROM (SELECT) AS always LEFT JOIN @S@.idem_aggregates AS a ON a.aggregate = p_aggregate;
	outcome := CASE WHEN last <= last_seq THEN 'duplicate'
		WHEN first <= last_seq THEN 'overlap'
		WHEN NOT allow_gaps AND first <> last_seq + 1 THEN 'gap'
		WHEN expected <> version THEN 'version_conflict' END;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_decide_append(text, text, bigint, bigint, bigint, boolean) IS
'The outcome of an append that changes nothing, or NULL; with the sequence and the version that it rests on, and xmax of the row of the aggregate.';

CREATE FUNCTION @S@.idem_p_is_appending(p_aggregate text, p_client text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	writer xid;
BEGIN
	IF p_client IS NOT NULL THEN
		RETURN EXISTS (SELECT FROM @S@.idem_client_sequences AS c
			WHERE c.aggregate = p_aggregate AND c.client_id = p_client AND c.xmax <> '0'::xid AND @S@.idem_p_is_running(c.xmax));
	END IF;
	SELECT a.xmax INTO writer FROM @S@.idem_aggregates AS a WHERE a.aggregate = p_aggregate AND a.xmax <> '0'::xid;
	IF NOT FOUND OR @S@.idem_p_is_running(writer) THEN
		RETURN FOUND;
	END IF;
	-- An append locks the row in a subtransaction and writes it outside of that, so xmax is often
	-- the number of a MultiXact.  If it is not, there can be another MultiXact with this number.
	RETURN EXISTS (SELECT FROM pg_get_multixact_members(writer) AS m WHERE @S@.idem_p_is_running(m.xid));
EXCEPTION WHEN internal_error OR invalid_parameter_value THEN
	-- It is the number of no MultiXact.
	RETURN false;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_is_appending(text, text) IS
'Whether another transaction is writing the row of a sequence, or, without a client, might be writing the row of an aggregate.';

--@ idem_try_append plpgsql
DECLARE
	count CONSTANT int := coalesce(event_count, 1);
	last bigint;
	deadline timestamptz := '-infinity';
	decision record;
	result @S@.idem_append_result;
	lock_number int;
	is_locked boolean;
	rounds int := 0;
BEGIN
	PERFORM @S@.idem_p_check_name(aggregate, 'aggregate');
	PERFORM @S@.idem_p_check_name(client_id, 'client_id');
	IF client_seq IS NULL THEN
		PERFORM @S@.idem_p_null('client_seq');
	ELSIF client_seq < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "client_seq" must be positive',
			HINT = 'Number a client''s events from 1.';
	ELSIF count < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "event_count" must be positive';
	ELSIF client_seq > 9223372036854775807 - (count - 1) THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'client sequence out of range';
	END IF;
	last := client_seq + (count - 1);
	IF wait IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(wait, 'wait');
		deadline := clock_timestamp() + wait;
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;

	<<look>>
	LOOP
		decision := @S@.idem_p_decide_append(aggregate, client_id, client_seq, last, expected_version, coalesce(allow_gaps, true));
		-- A committed number is final.  A twin could still change the other outcomes.
		IF decision.outcome = 'duplicate' THEN
			RETURN (decision.outcome, decision.last_seq, decision.version)::@S@.idem_append_result;
		END IF;
		BEGIN
			SELECT n.number, pg_try_advisory_xact_lock(479, n.number) INTO lock_number, is_locked
				FROM (SELECT @S@.idem_p_lock_number(i.seed, aggregate, client_id) FROM @S@.idem_p_installation AS i OFFSET 0) AS n (number);
			IF NOT FOUND THEN
				PERFORM @S@.idem_p_complete_installation();
				CONTINUE look;
			END IF;
			-- If this transaction has written the aggregate's row, all other appends wait for it.
			is_locked := is_locked OR coalesce((SELECT @S@.idem_p_is_own(a.xmin) FROM @S@.idem_aggregates AS a
				WHERE a.aggregate = idem_try_append.aggregate), false);
			-- The update compares the version, so an append that need not wait for others looks once.  One that
			-- locks the row first creates a MultiXact.
			IF is_locked AND (decision.outcome IS NOT NULL OR decision.writer <> '0'::xid) THEN
				decision := @S@.idem_p_decide_append(aggregate, client_id, client_seq, last, expected_version, coalesce(allow_gaps, true));
				IF decision.outcome IS NULL
					OR (decision.outcome = 'version_conflict' AND @S@.idem_p_is_appending(aggregate, NULL))
				THEN
					-- Wait for other clients' appends.  One of them can be a twin that needed no lock.
					PERFORM FROM @S@.idem_aggregates AS a WHERE a.aggregate = idem_try_append.aggregate FOR NO KEY UPDATE;
					decision := @S@.idem_p_decide_append(aggregate, client_id, client_seq, last, expected_version, coalesce(allow_gaps, true));
				END IF;
				IF decision.outcome IS NOT NULL THEN
					RAISE SQLSTATE 'IDR00';
				END IF;
			END IF;
		EXCEPTION WHEN SQLSTATE 'IDR00' THEN
			RETURN (decision.outcome, decision.last_seq, decision.version)::@S@.idem_append_result;
		END;
		IF NOT is_locked THEN
			-- An outcome needs no lock if no transaction is changing the number that it depends on.
			IF decision.outcome IN ('overlap', 'gap') AND decision.last_seq > 0
				AND NOT @S@.idem_p_is_appending(aggregate, client_id)
			THEN
				RETURN (decision.outcome, decision.last_seq, decision.version)::@S@.idem_append_result;
			END IF;
			result := ('in_flight', decision.last_seq, decision.version)::@S@.idem_append_result;
			IF deadline > clock_timestamp() THEN
				-- Look before releasing the lock, as idem_claim() does.
				BEGIN
					IF @S@.idem_p_await_lock(479, lock_number, deadline) THEN
						result := @S@.idem_try_append(aggregate, client_id, client_seq, count, expected_version, allow_gaps);
						IF result.outcome = 'appended' THEN
							RETURN result;
						END IF;
					END IF;
					RAISE SQLSTATE 'IDR00';
				EXCEPTION WHEN SQLSTATE 'IDR00' THEN
					NULL;
				END;
			END IF;
			RETURN result;
		END IF;

		IF decision.version > 9223372036854775807 - count THEN
			RAISE EXCEPTION USING ERRCODE = '22003', MESSAGE = 'aggregate version out of range';
		END IF;
		-- Do not wait here, because this would keep the lock of the row if another append comes first.
		UPDATE @S@.idem_aggregates AS a SET version = a.version + count
			WHERE a.aggregate = (SELECT l.aggregate FROM @S@.idem_aggregates AS l
				WHERE l.aggregate = idem_try_append.aggregate AND l.version = decision.version FOR NO KEY UPDATE SKIP LOCKED)
			RETURNING a.version INTO decision.version;
		IF NOT FOUND THEN
			INSERT INTO @S@.idem_aggregates AS a (version, aggregate) VALUES (count, idem_try_append.aggregate)
				ON CONFLICT ON CONSTRAINT idem_aggregates_pkey DO NOTHING
				RETURNING a.version INTO decision.version;
		END IF;
		-- Another client's append came first.
		IF NOT FOUND THEN
			rounds := rounds + 1;
			PERFORM @S@.idem_p_check_rounds(rounds, 'idem_aggregates');
			CONTINUE look;
		END IF;
		INSERT INTO @S@.idem_client_sequences AS c (last_client_seq, aggregate, client_id)
			VALUES (last, idem_try_append.aggregate, idem_try_append.client_id)
			ON CONFLICT ON CONSTRAINT idem_client_sequences_pkey DO UPDATE SET last_client_seq = EXCLUDED.last_client_seq;
		RETURN ('appended', last, decision.version)::@S@.idem_append_result;
	END LOOP;
END

--@ idem_last_client_seq plpgsql
BEGIN
	PERFORM @S@.idem_p_check_name(aggregate, 'aggregate');
	PERFORM @S@.idem_p_check_name(client_id, 'client_id');
	RETURN coalesce((SELECT c.last_client_seq FROM @S@.idem_client_sequences AS c
		WHERE c.aggregate = idem_last_client_seq.aggregate AND c.client_id = idem_last_client_seq.client_id), 0);
END
