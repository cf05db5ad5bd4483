-- Request keys.
--
-- A claim draws and writes its token under an advisory lock of the key, which a call
-- takes for its transaction, and under the lock of the row, if there is a row.  If a
-- call does not get one of these locks, it reports that the claim is in progress,
-- or waits, if it is allowed to.  The unique index decides in any case.  If two
-- keys have the same lock number, a claim of one of them can be reported as in
-- progress without need.  This has no other effect.
--
-- A call detects replays, conflicts and keys in progress without a lock.
--
-- A setting that is local to the transaction has the tokens of the claims that the
-- transaction has taken.  To forge it gains nothing, because a session can also
-- pass the tokens as arguments.

--@ helpers
CREATE FUNCTION @S@.idem_p_redacted(key text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT format('"%s..." (%s characters)', CASE WHEN char_length(key) > 4 THEN left(key, 4) ELSE '' END, char_length(key))
$$;
COMMENT ON FUNCTION @S@.idem_p_redacted(text) IS
'A key as messages show it.';

CREATE FUNCTION @S@.idem_p_key_error(key text)
RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $$
DECLARE
	format CONSTANT text := @S@.idem_p_setting('key_format');
BEGIN
	RETURN CASE
		WHEN key COLLATE "C" ~ CASE format WHEN 'printable' THEN '[^ -~]' ELSE '[^a-zA-Z0-9_:.-]' END
			THEN 'It contains a character that is not allowed.'
		WHEN format = 'uuid' AND key COLLATE "C" !~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$'
			THEN 'It is not a UUID, 8-4-4-4-12 hexadecimal digits.'
		WHEN octet_length(key) < @S@.idem_p_setting('key_min_length')::int THEN 'It is too short.'
		WHEN octet_length(key) > @S@.idem_p_setting('key_max_length')::int THEN 'It is too long.'
		END;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_key_error(text) IS
'What is wrong with a key, as a sentence; NULL if nothing is.';

CREATE FUNCTION @S@.idem_p_check_new_key(key text)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	error CONSTANT text := @S@.idem_p_key_error(key);
	format CONSTANT text := @S@.idem_p_setting('key_format');
BEGIN
	IF error IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID001',
			MESSAGE = 'invalid idempotency key ' || @S@.idem_p_redacted(key),
			DETAIL = error,
			HINT = CASE format WHEN 'uuid' THEN 'Let the client send a UUID.'
				ELSE format('Let the client send a UUID, or any key of %s to %s %s',
					@S@.idem_p_setting('key_min_length'), @S@.idem_p_setting('key_max_length'),
					CASE format WHEN 'printable' THEN 'printable ASCII characters.'
						ELSE 'characters out of A-Z a-z 0-9 _ - : .' END) END;
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_new_key(text) IS
'Raises ID001 for a key that breaks the rules for new ones.';

CREATE FUNCTION @S@.idem_p_check_key_arguments(scope text, key text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	IF key IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID001', MESSAGE = 'idempotency key must not be null';
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_key_arguments(text, text) IS
'Raises 22004 or 22023 for a bad scope, ID001 for a NULL key.';

CREATE FUNCTION @S@.idem_p_check_hash(hash bytea, name text)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	IF octet_length(hash) NOT BETWEEN 1 AND 64 THEN
		RAISE EXCEPTION USING ERRCODE = '22023',
			MESSAGE = format('argument "%s" must have 1 to 64 bytes', name),
			HINT = 'Use idem_request_hash(), or another digest of the request.';
	ELSIF hash IS NULL AND @S@.idem_p_setting('require_request_hash') = 'on' THEN
		RAISE EXCEPTION USING ERRCODE = '22004',
			MESSAGE = format('argument "%s" must not be null', name),
			DETAIL = 'The setting "idempotency.require_request_hash" is on.',
			HINT = 'Pass idem_request_hash(), or another digest of the request.';
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_hash(bytea, text) IS
'Raises 22023 for a request hash of a wrong length, 22004 for a missing one if the operator wants one with each claim.';

CREATE FUNCTION @S@.idem_p_check_size(size bigint, name text)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	IF size > @S@.idem_p_setting('max_response_size')::bigint THEN
		RAISE EXCEPTION USING ERRCODE = '54000',
			MESSAGE = format('argument "%s" is too large', name),
			DETAIL = format('It has %s bytes, %s are allowed.', size, @S@.idem_p_setting('max_response_size')),
			HINT = 'Store a reference to it, or let the owner call idem_configure(''max_response_size'', ...).';
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_size(bigint, text) IS
'Raises 54000 for an argument above idempotency.max_response_size.';

CREATE FUNCTION @S@.idem_p_number_length(document jsonb)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT sum(greatest(4 * (((get_byte(n.sent, 2) << 8 | get_byte(n.sent, 3)) + 32768) % 65536 - 32767), 1)
		+ (get_byte(n.sent, 6) << 8 | get_byte(n.sent, 7)))
	FROM (SELECT numeric_send(v.value::numeric) FROM jsonb_path_query(document, 'strict $.** ? (@.type() == "number")') AS v (value)) AS n (sent)
$$;
COMMENT ON FUNCTION @S@.idem_p_number_length(jsonb) IS
'The number of digits of all numbers of a document as text, a few too many; NULL if it has no numbers.';

-- A call that returns rows of many users must not fail because one row is too long.
CREATE FUNCTION @S@.idem_p_check_text_size(size bigint, document jsonb, second jsonb, name text)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	allowed CONSTANT bigint := least(CASE WHEN name IS NULL THEN @S@.idem_p_setting('max_message_size')::bigint ELSE 268435456 END,
		greatest(4194304, size * 10));
BEGIN
	-- A byte of jsonb becomes less than 10,000 bytes of text.  Do not make a text of up to 1 GB to measure it.
	IF size > allowed / 10000 AND (CASE
		WHEN size > 6000 AND coalesce(@S@.idem_p_number_length(document), 0) + coalesce(@S@.idem_p_number_length(second), 0) > allowed
			THEN true
		ELSE octet_length(document::text) + coalesce(octet_length(second::text), 0) > allowed END)
	THEN
		RAISE EXCEPTION USING ERRCODE = '54000',
			MESSAGE = CASE WHEN name IS NULL THEN 'message is too large' ELSE format('argument "%s" is too large', name) END,
			DETAIL = format(CASE WHEN name IS NULL THEN 'Its payload and headers have more than %s bytes of text.'
				ELSE 'It has more than %s bytes of text.' END, allowed),
			HINT = CASE WHEN name IS NULL THEN 'Publish a reference to the data, or let the owner call idem_configure(''max_message_size'', ...) if that is the limit.' ELSE 'Store a reference to it.' END;
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_text_size(bigint, jsonb, jsonb, text) IS
'Raises 54000 for documents that are far longer as text; without a name, of a message.';

-- Returns the meaning of a record for a claim.  "lapsed" means that the claim can be
-- taken over, unless this transaction holds it.  The planner inlines this function.
CREATE FUNCTION @S@.idem_p_judge(k @S@.idem_keys, hash bytea, clock timestamptz)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT CASE
		WHEN k.expires_at <= clock THEN CASE
			WHEN @S@.idem_p_setting('expired_key_policy') = 'reject'
				AND (@S@.idem_p_setting('tombstone_retention') = '0'
					OR clock < k.expires_at + @S@.idem_p_setting('tombstone_retention')::float8 * '1 ms'::interval)
				THEN 'expired'
			ELSE 'new' END
		WHEN k.request_hash <> hash THEN 'hash_conflict'
		WHEN k.state = 'completed' THEN 'replay'
		WHEN k.state = 'erased' THEN 'erased'
		WHEN k.state = 'failed' THEN 'new'
		WHEN k.state <> 'started' THEN 'unrecognized'
		WHEN clock < k.lease_expires_at THEN 'in_progress'
		ELSE 'lapsed' END
$$;
COMMENT ON FUNCTION @S@.idem_p_judge(@S@.idem_keys, bytea, timestamptz) IS
'What a record means for a claim with this request hash.';

-- The planner inlines these functions.
CREATE FUNCTION @S@.idem_p_ttl(duration interval)
RETURNS interval
LANGUAGE sql STABLE
AS $$
	SELECT coalesce(duration, @S@.idem_p_setting('default_ttl')::float8 * '1 ms'::interval)
$$;
COMMENT ON FUNCTION @S@.idem_p_ttl(interval) IS
'How long a key lives; NULL: idempotency.default_ttl.';

CREATE FUNCTION @S@.idem_p_lease(duration interval)
RETURNS interval
LANGUAGE sql STABLE
AS $$
	SELECT coalesce(duration,
		least(@S@.idem_p_setting('default_lease')::float8, @S@.idem_p_setting('max_lease')::float8) * '1 ms'::interval)
$$;
COMMENT ON FUNCTION @S@.idem_p_lease(interval) IS
'The length of a lease; NULL: idempotency.default_lease, at most idempotency.max_lease.';

CREATE FUNCTION @S@.idem_p_next_token(previous bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	token bigint := nextval('@S@.idem_claim_tokens');
BEGIN
	WHILE token <= previous LOOP
		IF previous > 4611686018427387903 THEN
			RAISE EXCEPTION USING ERRCODE = '2200H',
				MESSAGE = 'no claim token is higher than that of the record',
				HINT = 'Delete the record with idem_forget().';
		END IF;
		PERFORM @S@.idem_p_raise_sequence('@S@.idem_claim_tokens', previous);
		token := nextval('@S@.idem_claim_tokens');
	END LOOP;
	RETURN token;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_next_token(bigint) IS
'A claim token that is higher than this one.';

-- A database can have several installations, whose tokens do not differ.  The planner
-- inlines these functions.
CREATE FUNCTION @S@.idem_p_claims_setting()
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
	SELECT 'idempotency_portable.claims_' || '@S@'::regnamespace::oid::text
$$;
COMMENT ON FUNCTION @S@.idem_p_claims_setting() IS
'The name of the setting that has the tokens of the transaction''s claims.';

-- Of more than some hundred tokens, only the first one is kept.
CREATE FUNCTION @S@.idem_p_remember_claim(token bigint)
RETURNS text
LANGUAGE sql VOLATILE
AS $$
	SELECT set_config(@S@.idem_p_claims_setting(), CASE
		WHEN coalesce(current_setting(@S@.idem_p_claims_setting(), true), '') = '' THEN ',' || token || ','
		WHEN starts_with(current_setting(@S@.idem_p_claims_setting()), '>') THEN current_setting(@S@.idem_p_claims_setting())
		WHEN length(current_setting(@S@.idem_p_claims_setting())) < 4000
			THEN current_setting(@S@.idem_p_claims_setting()) || token || ','
		ELSE '>' || split_part(current_setting(@S@.idem_p_claims_setting()), ',', 2) END, true)
$$;
COMMENT ON FUNCTION @S@.idem_p_remember_claim(bigint) IS
'Remembers that this transaction has taken the claim with this token.';

-- For a transaction that has the locks of about 100 keys, so that a batch does not fill
-- the lock table.  It keeps a shared lock (482) instead of those of its other keys.  While
-- a transaction has that shared lock, all claims insert new keys here, because the
-- insertion might have to wait for that transaction.  If the shared lock is refused, a
-- transaction keeps the locks of some hundred keys and then continues without it, because
-- any role could hold it to let batches fill the lock table.
--
-- The tokens of a key must grow all the same.  If another token was drawn since this claim
-- drew its own, a record of the key that has been deleted since can have had it, so this
-- claim draws again when it has the row.  A claim that has the lock of the key can write a
-- lower token later.  If there is one, before or after the insertion, this claim gives up.
-- It takes the lock and releases it in one expression, because a rollback would not
-- release it.
--
-- The insertion gives up a wait of a millisecond.  If it waited for a transaction that has
-- the key, the context of the error begins with a line that has the place of the row, as
-- (3,14), in all languages of the server.  Otherwise it waited for something else, for
-- example for another session that extends the table, and tries again with a longer wait.
-- After half a second of these, it gives up as well, or earlier with the caller's own
-- lock_timeout, which alone limits a wait for the table.
CREATE FUNCTION @S@.idem_p_insert_claim(p_scope text, p_key text, number int, hash bytea, p_ttl interval, p_lease interval, p_request jsonb)
RETURNS @S@.idem_claim_result
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	timeout CONSTANT text := current_setting('lock_timeout');
	-- In milliseconds
	longest_wait int := 1;
	callers_limit int;
	context text;
	clock timestamptz;
	result @S@.idem_claim_result;
BEGIN
	LOCK TABLE @S@.idem_keys IN ROW EXCLUSIVE MODE;
	LOOP
		IF NOT (pg_try_advisory_lock(478, number) AND pg_advisory_unlock(478, number)) THEN
			RETURN NULL;
		END IF;
		BEGIN
			result.claim_token := nextval('@S@.idem_claim_tokens');
			clock := clock_timestamp();
			result.outcome := 'new';
			result.attempt := 1;
			result.expires_at := clock + @S@.idem_p_ttl(p_ttl);
			result.lease_expires_at := least(result.expires_at, clock + @S@.idem_p_lease(p_lease));
			PERFORM set_config('lock_timeout', longest_wait::text, true);
			INSERT INTO @S@.idem_keys AS k (claim_token, created_at, lease_expires_at, resume_at, expires_at, attempt,
					state, scope, key, request_hash, request)
				VALUES (result.claim_token, clock, result.lease_expires_at, CASE WHEN p_request IS NOT NULL THEN result.lease_expires_at END,
					result.expires_at, 1, 'started', p_scope, p_key, hash, p_request)
				ON CONFLICT ON CONSTRAINT idem_keys_pkey DO NOTHING;
			IF NOT FOUND THEN
				result.outcome := 'exists';
			ELSE
				IF (SELECT t.last_value FROM @S@.idem_claim_tokens AS t) <> result.claim_token THEN
					UPDATE @S@.idem_keys AS k SET claim_token = nextval('@S@.idem_claim_tokens')
						WHERE k.key = p_key AND k.scope = p_scope RETURNING k.claim_token INTO result.claim_token;
				END IF;
				IF NOT (pg_try_advisory_lock(478, number) AND pg_advisory_unlock(478, number)) THEN
					RAISE SQLSTATE 'IDR00';
				END IF;
			END IF;
			PERFORM set_config('lock_timeout', timeout, true);
			RETURN result;
		EXCEPTION
			WHEN SQLSTATE 'IDR00' THEN
				RETURN NULL;
			WHEN lock_not_available THEN
				GET STACKED DIAGNOSTICS context = PG_EXCEPTION_CONTEXT;
				IF context ~ '^[^\n]*[0-9]+, ?[0-9]+' OR longest_wait = 256 THEN
					RETURN NULL;
				END IF;
				callers_limit := (SELECT nullif(s.setting, '0') FROM pg_settings AS s WHERE s.name = 'lock_timeout')::int;
				IF longest_wait = callers_limit THEN
					RAISE;
				END IF;
				longest_wait := least(longest_wait * 2, callers_limit);
		END;
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_insert_claim(text, text, int, bytea, interval, interval, jsonb) IS
'Inserts a claim of a new key, without its lock to the end of the transaction. NULL if another transaction has the key or is claiming it; outcome "exists" if it has been committed.';

CREATE FUNCTION @S@.idem_p_claimed_here(token bigint, writer xid)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	claims CONSTANT text := current_setting(@S@.idem_p_claims_setting(), true);
BEGIN
	IF starts_with(claims, '>') THEN
		RETURN token >= substr(claims, 2)::bigint AND @S@.idem_p_is_own(writer);
	END IF;
	RETURN coalesce(strpos(claims, ',' || token || ',') > 0, false);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_claimed_here(bigint, xid) IS
'Whether this transaction has taken the claim with this token, whose row has this xmin.';

-- As in any wait, the caller's own lock_timeout raises an error.
CREATE FUNCTION @S@.idem_p_await_lock(class int, number int, deadline timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	callers_limit CONSTANT text := current_setting('lock_timeout');
BEGIN
	IF NOT @S@.idem_p_limit_waits(deadline) THEN
		RETURN false;
	END IF;
	PERFORM pg_advisory_xact_lock(class, number);
	PERFORM set_config('lock_timeout', callers_limit, true);
	RETURN true;
EXCEPTION WHEN lock_not_available THEN
	IF clock_timestamp() >= deadline THEN
		RETURN false;
	END IF;
	RAISE;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_await_lock(int, int, timestamptz) IS
'Takes an advisory lock until the transaction ends; false if another transaction has it until the deadline.';

CREATE FUNCTION @S@.idem_p_limit_waits(deadline timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	timeout CONSTANT bigint := (SELECT s.setting FROM pg_settings AS s WHERE s.name = 'lock_timeout')::bigint;
	remaining CONSTANT bigint := ceil(extract(epoch FROM deadline - clock_timestamp()) * 1000);
BEGIN
	IF remaining > 0 AND (timeout = 0 OR timeout > remaining) THEN
		PERFORM set_config('lock_timeout', least(remaining, 2147483647)::text, true);
	END IF;
	RETURN remaining > 0;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_limit_waits(timestamptz) IS
'Lowers lock_timeout to the time until the deadline; false if that is over.';

-- A session is not woken when a committed claim ends, so it polls.
CREATE FUNCTION @S@.idem_p_pause(pause float8, began timestamptz, deadline timestamptz)
RETURNS float8
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	timeout CONSTANT float8 := (SELECT s.setting FROM pg_settings AS s WHERE s.name = 'lock_timeout')::float8;
BEGIN
	IF timeout > 0 AND clock_timestamp() >= began + timeout * '1 ms'::interval THEN
		RAISE EXCEPTION USING ERRCODE = '55P03', MESSAGE = 'canceling statement due to lock timeout';
	END IF;
	PERFORM pg_sleep(greatest(least(pause, extract(epoch FROM deadline - clock_timestamp())::float8), 0.001));
	RETURN least(pause * 1.5, 0.1);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_pause(float8, timestamptz, timestamptz) IS
'Sleeps before looking again, for this number of seconds at most; returns the next number. Raises 55P03 after lock_timeout.';

CREATE FUNCTION @S@.idem_p_claim_lost(key text, token bigint)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	IF token IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID003',
			MESSAGE = 'claim token required for idempotency key ' || @S@.idem_p_redacted(key),
			DETAIL = 'The key was not claimed by this transaction.',
			HINT = 'Pass the claim_token that idem_claim() returned. Without it, claim and complete in one transaction, which is on one connection.';
	END IF;
	RAISE EXCEPTION USING ERRCODE = 'ID003',
		MESSAGE = format('claim of idempotency key %s has been lost', @S@.idem_p_redacted(key)),
		DETAIL = 'The claim token is not the current one.',
		HINT = 'Stop the work: its lease has expired, and another claimant has taken over.';
END
$$;
COMMENT ON FUNCTION @S@.idem_p_claim_lost(text, bigint) IS
'Raises ID003.';

CREATE FUNCTION @S@.idem_p_claim_not_found(key text, state text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = 'ID004',
		MESSAGE = 'no live claim of idempotency key ' || @S@.idem_p_redacted(key),
		DETAIL = CASE WHEN state IS NULL THEN 'It was never claimed, has expired or was released.'
			ELSE format('Its state is "%s".', state) END,
		HINT = 'Claim the key with idem_claim() first, in this transaction or in one that has committed.';
END
$$;
COMMENT ON FUNCTION @S@.idem_p_claim_not_found(text, text) IS
'Raises ID004.';

-- The current record, for the holder of a claim.  This does not lock the record: the
-- caller writes it by compare and swap, and calls this again if that fails.
CREATE FUNCTION @S@.idem_p_check_claim(p_scope text, p_key text, token bigint, OUT state text, OUT current_token bigint)
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	found_key record;
BEGIN
	SELECT k.state, k.claim_token, k.expires_at, k.xmin AS writer INTO found_key
		FROM @S@.idem_keys AS k WHERE k.key = p_key AND k.scope = p_scope;
	IF NOT FOUND THEN
		PERFORM @S@.idem_p_check_new_key(p_key);
		PERFORM @S@.idem_p_claim_not_found(p_key, NULL);
	ELSIF found_key.expires_at <= clock_timestamp() THEN
		PERFORM @S@.idem_p_claim_not_found(p_key, NULL);
	ELSIF NOT coalesce(token = found_key.claim_token,
		@S@.idem_p_claimed_here(found_key.claim_token, found_key.writer))
	THEN
		PERFORM @S@.idem_p_claim_lost(p_key, token);
	ELSIF found_key.state NOT IN ('started', 'completed', 'failed', 'erased') THEN
		RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'unrecognized state in table "idem_keys"';
	END IF;
	state := found_key.state;
	current_token := found_key.claim_token;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_claim(text, text, bigint) IS
'The state and the token of a live claim that the caller holds. Raises ID003, ID004, and ID001 for a key that cannot have a record.';

-- An UPDATE computes its values before it waits for a row.  If it has waited for a
-- transaction that changed nothing, the caller must compute the values again.
CREATE FUNCTION @S@.idem_p_has_waited(written timestamptz)
RETURNS boolean
LANGUAGE sql VOLATILE
AS $$
	SELECT clock_timestamp() > written + '1 ms'::interval
$$;
COMMENT ON FUNCTION @S@.idem_p_has_waited(timestamptz) IS
'Whether a statement has taken so long that it can have waited since this time.';

CREATE FUNCTION @S@.idem_p_complete(p_scope text, p_key text, status int, body text, bytes bytea, headers json, token bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	current_token bigint := token;
	current_state text;
	written timestamptz;
	rounds int := 0;
BEGIN
	IF p_key IS NULL OR octet_length(p_scope) BETWEEN 1 AND 512 IS NOT TRUE THEN
		PERFORM @S@.idem_p_check_key_arguments(p_scope, p_key);
	END IF;
	IF status IS NULL THEN
		PERFORM @S@.idem_p_null('response_status');
	ELSIF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	ELSIF status NOT BETWEEN 100 AND 599 THEN
		RAISE EXCEPTION USING ERRCODE = '22023',
			MESSAGE = format('response status %s is out of range', status),
			HINT = 'Pass an HTTP status code from 100 to 599.';
	END IF;
	IF greatest(octet_length(headers::text), octet_length(body), octet_length(bytes))
		> @S@.idem_p_setting('max_response_size')::int
	THEN
		PERFORM @S@.idem_p_check_size(octet_length(headers::text), 'response_headers');
		PERFORM @S@.idem_p_check_size(octet_length(body), 'response_body');
		PERFORM @S@.idem_p_check_size(octet_length(bytes), 'response_body');
	END IF;

	IF token IS NULL THEN
		SELECT c.state, c.current_token INTO current_state, current_token
			FROM @S@.idem_p_check_claim(p_scope, p_key, NULL) AS c;
	END IF;
	LOOP
		UPDATE @S@.idem_keys AS k SET
				state = 'completed', completed_at = clock_timestamp(), lease_expires_at = NULL, resume_at = NULL, request = NULL,
				response_status = status, response_headers = headers, response_body = body, response_bytes = bytes
			WHERE k.key = p_key AND k.scope = p_scope AND k.state = 'started'
				AND k.claim_token = current_token AND k.expires_at > clock_timestamp()
			RETURNING k.completed_at INTO written;
		IF FOUND THEN
			IF @S@.idem_p_has_waited(written) THEN
				UPDATE @S@.idem_keys AS k SET completed_at = clock_timestamp()
					WHERE k.key = p_key AND k.scope = p_scope AND k.expires_at > clock_timestamp();
				IF NOT FOUND THEN
					PERFORM @S@.idem_p_claim_not_found(p_key, NULL);
				END IF;
			END IF;
			RETURN true;
		END IF;
		SELECT c.state INTO current_state FROM @S@.idem_p_check_claim(p_scope, p_key, token) AS c;
		IF current_state IN ('completed', 'erased') THEN
			RETURN false;
		ELSIF current_state <> 'started' THEN
			PERFORM @S@.idem_p_claim_not_found(p_key, current_state);
		END IF;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_keys');
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_complete(text, text, int, text, bytea, json, bigint) IS
'Stores a response, of which body or bytes is NULL, for both functions idem_complete.';

CREATE FUNCTION @S@.idem_p_renew_lease(p_scope text, p_key text, is_checkpoint boolean, point text, new_state json,
	duration interval, token bigint)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	claim record;
	lease_end timestamptz;
	written timestamptz;
	is_ours boolean := false;
	rounds int := 0;
BEGIN
	IF duration IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(duration, 'lease');
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	LOOP
		claim := @S@.idem_p_check_claim(p_scope, p_key, token);
		IF claim.state <> 'started' THEN
			PERFORM @S@.idem_p_claim_not_found(p_key, claim.state);
		END IF;
		UPDATE @S@.idem_keys AS k SET
				lease_expires_at = least(n.lease_end, k.expires_at),
				resume_at = CASE WHEN k.request IS NOT NULL THEN least(n.lease_end, k.expires_at) END,
				recovery_point = CASE WHEN is_checkpoint THEN point ELSE k.recovery_point END,
				recovery_state = CASE WHEN is_checkpoint THEN new_state ELSE k.recovery_state END
			FROM (SELECT c.clock, c.clock + @S@.idem_p_lease(duration) FROM clock_timestamp() AS c (clock)) AS n (clock, lease_end)
			WHERE k.key = p_key AND k.scope = p_scope AND k.state = 'started'
				AND k.claim_token = claim.current_token AND k.expires_at > n.clock
			RETURNING k.lease_expires_at, n.clock INTO lease_end, written;
		IF FOUND AND (is_ours OR NOT @S@.idem_p_has_waited(written)) THEN
			RETURN lease_end;
		END IF;
		-- This transaction has now written the row, so the next round does not wait.
		is_ours := FOUND;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_keys');
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_renew_lease(text, text, boolean, text, json, interval, bigint) IS
'Begins a new lease, and with is_checkpoint stores a recovery point and its state. Returns the end of the lease.';

CREATE FUNCTION @S@.idem_p_clip(value text, bytes int)
RETURNS text
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
	-- The longest prefix of at most this number of bytes has between low and high characters.
	low int := 0;
	high int := least(char_length(value), bytes);
	middle int;
BEGIN
	WHILE low < high LOOP
		middle := low + (high - low + 1) / 2;
		IF octet_length(left(value, middle)) <= bytes THEN
			low := middle;
		ELSE
			high := middle - 1;
		END IF;
	END LOOP;
	RETURN left(value, low);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_clip(text, int) IS
'The longest beginning of a text that has at most so many bytes.';

--@ idem_key_is_valid plpgsql
BEGIN
	RETURN key IS NOT NULL AND @S@.idem_p_key_error(key) IS NULL;
END

--@ idem_claim plpgsql
DECLARE
	result @S@.idem_claim_result;
	verdict text;
	-- The record that was found; these variables are faster than one of a row.
	writer xid;
	found_token bigint;
	found_attempt int;
	found_lease_end timestamptz;
	found_expiry timestamptz;
	found_status int;
	found_headers json;
	found_body text;
	found_bytes bytea;
	found_point text;
	found_state json;
	is_own boolean;
	is_crowded boolean;
	was_held boolean := false;
	claims text;
	number int;
	token bigint;
	clock timestamptz := clock_timestamp();
	deadline timestamptz;
	limit_end timestamptz;
	callers_limit text;
	-- The beginnings of the waits for another transaction, and for a committed claim.
	began timestamptz;
	committed_began timestamptz;
	pause float8 := 0.002;
	rounds int := 0;
BEGIN
	-- One expression for most calls, because a session prepares each expression again in each transaction.
	IF (key IS NOT NULL AND octet_length(scope) BETWEEN 1 AND 512 AND octet_length(request_hash) BETWEEN 1 AND 64
		AND ttl IS NULL AND lease IS NULL AND wait IS NULL AND request IS NULL
		AND current_setting('transaction_read_only') = 'off') IS NOT TRUE
	THEN
		IF key IS NULL OR octet_length(scope) BETWEEN 1 AND 512 IS NOT TRUE THEN
			PERFORM @S@.idem_p_check_key_arguments(scope, key);
		END IF;
		IF request_hash IS NULL OR octet_length(request_hash) NOT BETWEEN 1 AND 64 THEN
			PERFORM @S@.idem_p_check_hash(request_hash, 'request_hash');
		END IF;
		IF ttl IS NOT NULL THEN
			PERFORM @S@.idem_p_check_interval(ttl, 'ttl');
		END IF;
		IF lease IS NOT NULL THEN
			PERFORM @S@.idem_p_check_interval(lease, 'lease');
		END IF;
		IF wait IS NOT NULL THEN
			PERFORM @S@.idem_p_check_interval(wait, 'wait');
			deadline := clock + wait;
		END IF;
		IF request IS NOT NULL THEN
			PERFORM @S@.idem_p_check_size(pg_column_size(request) - 4, 'request');
			PERFORM @S@.idem_p_check_text_size(pg_column_size(request), request, NULL, 'request');
			IF getdatabaseencoding() <> 'UTF8' THEN
				PERFORM @S@.idem_p_check_client_text(scope, request::text);
			END IF;
		END IF;
		IF current_setting('transaction_read_only') = 'on' THEN
			PERFORM @S@.idem_p_check_writable();
		END IF;
	END IF;

	<<look>>
	LOOP
		clock := clock_timestamp();
		is_own := false;
		SELECT @S@.idem_p_judge(k, idem_claim.request_hash, clock), k.xmin, k.claim_token, k.attempt, k.lease_expires_at, k.expires_at, k.response_status, k.response_headers, k.response_body,
				k.response_bytes, k.recovery_point, k.recovery_state
			INTO verdict, writer, found_token, found_attempt, found_lease_end, found_expiry, found_status, found_headers, found_body,
				found_bytes, found_point, found_state
			FROM @S@.idem_keys AS k WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope;
		IF NOT FOUND THEN
			IF key COLLATE "C" ~ '[^a-zA-Z0-9_:.-]' OR octet_length(key) NOT BETWEEN 16 AND 128
				OR @S@.idem_p_setting('key_format') <> 'token'
				OR @S@.idem_p_setting('key_min_length') <> '16' OR @S@.idem_p_setting('key_max_length') <> '128'
			THEN
				PERFORM @S@.idem_p_check_new_key(key);
			END IF;
			claims := coalesce(current_setting(@S@.idem_p_claims_setting(), true), '');
			is_crowded := (length(claims) > 1000 OR starts_with(claims, '>'))
				AND (pg_try_advisory_xact_lock_shared(482, 0) OR starts_with(claims, '>'));
			IF is_crowded IS NOT TRUE THEN
				-- One statement, for speed.  Look for the lock 482 before taking the lock of the key, because
				-- this keeps it if it inserts nothing, and after it, because a transaction without locks
				-- of its keys can have begun meanwhile.  A key without a row that another transaction has
				-- inserted since the look is left to the next one.
				INSERT INTO @S@.idem_keys AS k (claim_token, created_at, lease_expires_at, resume_at, expires_at, attempt,
						state, scope, key, request_hash, request)
					SELECT n.token, n.clock, least(n.lease_end, n.expiry), CASE WHEN idem_claim.request IS NOT NULL THEN least(n.lease_end, n.expiry) END,
						n.expiry, 1, 'started', idem_claim.scope, idem_claim.key, idem_claim.request_hash, idem_claim.request
					FROM (SELECT t.token, t.clock,
							t.clock + @S@.idem_p_ttl(idem_claim.ttl) AS expiry,
							t.clock + @S@.idem_p_lease(idem_claim.lease) AS lease_end
						FROM (SELECT nextval('@S@.idem_claim_tokens') AS token, clock_timestamp() AS clock
							FROM @S@.idem_p_installation AS i
							WHERE CASE WHEN pg_try_advisory_lock(482, 0) AND pg_advisory_unlock(482, 0)
								THEN CASE WHEN pg_try_advisory_xact_lock(478, @S@.idem_p_lock_number(i.seed, idem_claim.scope, idem_claim.key))
									THEN pg_try_advisory_lock(482, 0) AND pg_advisory_unlock(482, 0) END END OFFSET 0) AS t OFFSET 0) AS n
					ON CONFLICT ON CONSTRAINT idem_keys_pkey DO NOTHING
					RETURNING 'new', k.claim_token, 1, NULL::int, NULL::json, NULL, NULL::bytea, NULL, NULL::json, k.lease_expires_at,
						CASE WHEN @S@.idem_p_remember_claim(k.claim_token) <> '' THEN k.expires_at END INTO result;
				IF FOUND THEN
					RETURN result;
				END IF;
			END IF;
			-- The reason why nothing was inserted.  The rollback of the subtransaction releases the lock.
			BEGIN
				verdict := 'again';
				SELECT @S@.idem_p_lock_number(i.seed, idem_claim.scope, idem_claim.key) INTO number FROM @S@.idem_p_installation AS i;
				IF NOT FOUND THEN
					PERFORM @S@.idem_p_complete_installation();
					CONTINUE look;
				END IF;
				IF NOT (is_crowded IS TRUE OR pg_try_advisory_xact_lock(478, number)) THEN
					verdict := 'locked';
				ELSIF is_crowded OR NOT (pg_try_advisory_lock(482, 0) AND pg_advisory_unlock(482, 0)) THEN
					-- A transaction without a lock of its keys can have inserted this one.
					result := @S@.idem_p_insert_claim(scope, key, number, request_hash, ttl, lease, request);
					IF result.outcome = 'new' THEN
						PERFORM @S@.idem_p_remember_claim(result.claim_token);
						RETURN result;
					END IF;
					verdict := CASE WHEN result.outcome IS NULL THEN 'crowd' ELSE 'again' END;
					result := NULL;
				END IF;
				RAISE SQLSTATE 'IDR00';
			EXCEPTION WHEN SQLSTATE 'IDR00' THEN
				IF verdict = 'again' THEN
					rounds := rounds + 1;
					PERFORM @S@.idem_p_check_rounds(rounds, 'idem_keys');
					CONTINUE look;
				END IF;
			END;
		ELSIF verdict IN ('replay', 'erased') THEN
			RETURN (verdict, NULL, NULL, found_status, found_headers, found_body, found_bytes, NULL, NULL, NULL, found_expiry)::@S@.idem_claim_result;
		END IF;

		IF verdict IN ('in_progress', 'lapsed') THEN
			is_own := @S@.idem_p_is_own(writer);
			IF verdict = 'lapsed' AND is_own THEN
				verdict := 'in_progress';
			END IF;
		END IF;

		IF verdict IN ('new', 'lapsed') THEN
			-- Read again under the lock of the row, and release it if there is nothing to write.
			BEGIN
				SELECT @S@.idem_p_judge(k, idem_claim.request_hash, clock), k.xmin, k.claim_token, k.attempt, k.lease_expires_at, k.expires_at, k.response_status, k.response_headers, k.response_body,
						k.response_bytes, k.recovery_point, k.recovery_state
					INTO verdict, writer, found_token, found_attempt, found_lease_end, found_expiry, found_status, found_headers, found_body,
						found_bytes, found_point, found_state
					FROM @S@.idem_keys AS k WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope
					FOR NO KEY UPDATE SKIP LOCKED;
				IF NOT FOUND THEN
					verdict := 'held';
					RAISE SQLSTATE 'IDR00';
				ELSIF verdict NOT IN ('new', 'lapsed') THEN
					verdict := 'again';
					RAISE SQLSTATE 'IDR00';
				END IF;
			EXCEPTION WHEN SQLSTATE 'IDR00' THEN
				-- A row that is not found has been deleted, unless it is there again.
				IF verdict = 'again' OR NOT was_held THEN
					was_held := verdict = 'held';
					CONTINUE look;
				END IF;
			END;
		END IF;

		-- Another transaction has the key.
		IF verdict IN ('locked', 'crowd', 'held') THEN
			result.outcome := 'in_progress';
			IF deadline > clock IS NOT TRUE THEN
				RETURN result;
			ELSIF verdict <> 'crowd' THEN
				-- Look before releasing the lock.  Otherwise the waiters pass it on, and none of them finds it free.
				BEGIN
					-- Lock the row in this subtransaction, and not in a nested one: another call that waits for a
					-- subtransaction that has been released waits until the transaction ends.  A wait for a row
					-- can consist of three, for other waiters, a subtransaction and its transaction, and
					-- lock_timeout limits each.  So look again after a third of the time, but not before
					-- the server has looked for deadlocks, nor after the caller's lock_timeout.
					IF verdict = 'held' THEN
						clock := clock_timestamp();
						callers_limit := current_setting('lock_timeout');
						limit_end := least(deadline, coalesce(began, clock) + (SELECT nullif(s.setting, '0')::float8 * '1 ms'::interval
								FROM pg_settings AS s WHERE s.name = 'lock_timeout'),
							clock + greatest((deadline - clock) / 3, current_setting('deadlock_timeout')::interval + '0.1 s'));
						IF NOT @S@.idem_p_limit_waits(limit_end) THEN
							RAISE SQLSTATE 'IDR00';
						END IF;
						PERFORM FROM @S@.idem_keys AS k WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope FOR NO KEY UPDATE;
						PERFORM set_config('lock_timeout', callers_limit, true);
						-- It limits each wait alone.
						clock := clock_timestamp();
						began := NULL;
					END IF;
					IF verdict = 'held' OR @S@.idem_p_await_lock(478, number, deadline) THEN
						result := @S@.idem_claim(scope, key, request_hash, ttl, lease, NULL, request);
						IF result.outcome = 'new' THEN
							RETURN result;
						END IF;
					END IF;
					RAISE SQLSTATE 'IDR00';
				EXCEPTION
					WHEN SQLSTATE 'IDR00' THEN
						IF result.outcome <> 'in_progress' OR clock_timestamp() >= deadline THEN
							RETURN result;
						END IF;
					WHEN lock_not_available THEN
						IF verdict <> 'held' OR clock_timestamp() < limit_end THEN
							RAISE;
						ELSIF clock_timestamp() >= deadline THEN
							RETURN result;
						END IF;
				END;
			END IF;
			result := NULL;
			was_held := false;
			-- lock_timeout has limited the wait for the lock.
			began := CASE WHEN verdict <> 'locked' THEN coalesce(began, clock) END;
			pause := @S@.idem_p_pause(pause, began, deadline);
			CONTINUE look;
		END IF;

		IF verdict IN ('new', 'lapsed') THEN
			IF found_expiry <= clock THEN
				PERFORM @S@.idem_p_check_new_key(key);
			END IF;
			token := @S@.idem_p_next_token(found_token);
			-- Drawing a token can wait, and the record can expire meanwhile.
			CONTINUE look WHEN (found_expiry <= clock) <> (found_expiry <= clock_timestamp());
			clock := clock_timestamp();
			result.outcome := 'new';
			result.claim_token := token;
			result.expires_at := clock + @S@.idem_p_ttl(ttl);
			result.lease_expires_at := least(result.expires_at, clock + @S@.idem_p_lease(lease));
			IF found_expiry <= clock THEN
				result.attempt := 1;
				UPDATE @S@.idem_keys AS k SET
						claim_token = token, created_at = clock, completed_at = NULL, lease_expires_at = result.lease_expires_at,
						resume_at = CASE WHEN idem_claim.request IS NOT NULL THEN result.lease_expires_at END,
						expires_at = result.expires_at, attempt = 1, state = 'started', request_hash = idem_claim.request_hash,
						response_status = NULL, response_headers = NULL, response_body = NULL, response_bytes = NULL, error = NULL,
						recovery_point = NULL, recovery_state = NULL, request = idem_claim.request
					WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope;
			ELSE
				IF found_attempt = 2147483647 THEN
					RAISE EXCEPTION USING ERRCODE = '22003',
						MESSAGE = 'too many attempts at idempotency key ' || @S@.idem_p_redacted(key),
						HINT = 'Delete the record with idem_forget().';
				END IF;
				result.attempt := found_attempt + 1;
				result.recovery_point := found_point;
				result.recovery_state := found_state;
				UPDATE @S@.idem_keys AS k SET
						claim_token = token, completed_at = NULL, lease_expires_at = result.lease_expires_at,
						resume_at = CASE WHEN coalesce(idem_claim.request, k.request) IS NOT NULL THEN result.lease_expires_at END,
						expires_at = result.expires_at, attempt = result.attempt, state = 'started',
						request_hash = coalesce(idem_claim.request_hash, k.request_hash),
						response_status = NULL, response_headers = NULL, response_body = NULL, response_bytes = NULL, error = NULL,
						request = coalesce(idem_claim.request, k.request)
					WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope;
			END IF;
			PERFORM @S@.idem_p_remember_claim(token);
			RETURN result;
		END IF;

		-- The transaction's snapshot can be older than the row that determines the answer.
		IF verdict IN ('in_progress', 'hash_conflict') AND NOT is_own
			AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
		THEN
			-- The rollback of the subtransaction releases the row.
			BEGIN
				PERFORM FROM @S@.idem_keys AS k WHERE k.key = idem_claim.key AND k.scope = idem_claim.scope
					FOR SHARE SKIP LOCKED;
				RAISE SQLSTATE 'IDR00';
			EXCEPTION WHEN SQLSTATE 'IDR00' THEN
				NULL;
			END;
		END IF;
		IF verdict = 'in_progress' AND deadline > clock AND NOT is_own THEN
			committed_began := coalesce(committed_began, clock);
			pause := @S@.idem_p_pause(pause, committed_began, least(deadline, found_lease_end));
			CONTINUE look;
		END IF;
		IF verdict = 'unrecognized' THEN
			RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'unrecognized state in table "idem_keys"';
		END IF;
		result.outcome := verdict;
		IF verdict = 'in_progress' AND NOT is_own THEN
			result.lease_expires_at := found_lease_end;
		END IF;
		RETURN result;
	END LOOP;
END

--@ idem_complete_text plpgsql
BEGIN
	RETURN @S@.idem_p_complete(scope, key, response_status, response_body, NULL, response_headers, claim_token);
END

--@ idem_complete_bytea plpgsql
BEGIN
	RETURN @S@.idem_p_complete(scope, key, response_status, NULL, response_body, response_headers, claim_token);
END

--@ idem_checkpoint plpgsql
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	PERFORM @S@.idem_p_check_name(recovery_point, 'recovery_point');
	PERFORM @S@.idem_p_check_size(octet_length(recovery_state::text), 'recovery_state');
	IF getdatabaseencoding() <> 'UTF8' THEN
		PERFORM @S@.idem_p_check_client_text(recovery_point, recovery_state::text);
	END IF;
	RETURN @S@.idem_p_renew_lease(scope, key, true, recovery_point, recovery_state, lease, claim_token);
END

--@ idem_heartbeat plpgsql
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	RETURN @S@.idem_p_renew_lease(scope, key, false, NULL, NULL, lease, claim_token);
END

--@ idem_fail plpgsql
DECLARE
	claim record;
	written timestamptz;
	rounds int := 0;
	clipped CONSTANT text := CASE WHEN octet_length(error) > @S@.idem_p_setting('max_response_size')::int
		THEN @S@.idem_p_clip(error, @S@.idem_p_setting('max_response_size')::int) ELSE error END;
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	LOOP
		claim := @S@.idem_p_check_claim(scope, key, claim_token);
		IF claim.state = 'failed' THEN
			RETURN false;
		ELSIF claim.state <> 'started' THEN
			PERFORM @S@.idem_p_claim_not_found(key, claim.state);
		END IF;
		UPDATE @S@.idem_keys AS k SET
				state = 'failed', lease_expires_at = NULL, error = coalesce(clipped, k.error),
				resume_at = CASE WHEN k.request IS NOT NULL THEN n.clock END
			FROM clock_timestamp() AS n (clock)
			WHERE k.key = idem_fail.key AND k.scope = idem_fail.scope AND k.state = 'started'
				AND k.claim_token = claim.current_token AND k.expires_at > n.clock
			RETURNING n.clock INTO written;
		IF FOUND THEN
			IF @S@.idem_p_has_waited(written) THEN
				UPDATE @S@.idem_keys AS k SET resume_at = CASE WHEN k.request IS NOT NULL THEN clock_timestamp() END
					WHERE k.key = idem_fail.key AND k.scope = idem_fail.scope AND k.expires_at > clock_timestamp();
				IF NOT FOUND THEN
					PERFORM @S@.idem_p_claim_not_found(key, NULL);
				END IF;
			END IF;
			RETURN true;
		END IF;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_keys');
	END LOOP;
END

--@ idem_release plpgsql
DECLARE
	claim record;
	expires timestamptz;
	rounds int := 0;
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	LOOP
		-- The record of the token is gone.  Most likely it was released before, and the
		-- acknowledgement was lost.
		IF claim_token > 0
			AND NOT EXISTS (SELECT FROM @S@.idem_keys AS k WHERE k.key = idem_release.key AND k.scope = idem_release.scope)
			AND claim_token <= (SELECT CASE WHEN t.is_called THEN t.last_value ELSE 0 END FROM @S@.idem_claim_tokens AS t)
		THEN
			RETURN false;
		END IF;
		claim := @S@.idem_p_check_claim(scope, key, claim_token);
		IF claim.state <> 'started' THEN
			PERFORM @S@.idem_p_claim_not_found(key, claim.state);
		END IF;
		DELETE FROM @S@.idem_keys AS k
			WHERE k.key = idem_release.key AND k.scope = idem_release.scope AND k.state = 'started'
				AND k.claim_token = claim.current_token AND k.expires_at > clock_timestamp()
			RETURNING k.expires_at INTO expires;
		IF FOUND THEN
			-- The claim can have expired during the wait for the row.  The error undoes the deletion.
			IF expires <= clock_timestamp() THEN
				PERFORM @S@.idem_p_claim_not_found(key, NULL);
			END IF;
			RETURN true;
		END IF;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_keys');
	END LOOP;
END

--@ idem_lookup plpgsql
DECLARE
	result @S@.idem_lookup_result;
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	SELECT k.state, k.attempt, k.request_hash, k.response_status, k.response_headers, k.response_body, k.response_bytes,
			k.error, k.recovery_point, k.recovery_state, k.created_at, k.completed_at, k.lease_expires_at, k.expires_at
		INTO result FROM @S@.idem_keys AS k WHERE k.key = idem_lookup.key AND k.scope = idem_lookup.scope;
	IF NOT FOUND THEN
		PERFORM @S@.idem_p_check_new_key(key);
	ELSIF result.expires_at <= clock_timestamp() THEN
		result := NULL;
	END IF;
	RETURN result;
END

--@ idem_forget plpgsql
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	DELETE FROM @S@.idem_keys AS k WHERE k.key = idem_forget.key AND k.scope = idem_forget.scope;
	IF FOUND THEN
		RETURN true;
	END IF;
	PERFORM @S@.idem_p_check_new_key(key);
	RETURN false;
END

--@ idem_erase plpgsql
BEGIN
	PERFORM @S@.idem_p_check_key_arguments(scope, key);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	UPDATE @S@.idem_keys AS k SET
			state = CASE k.state WHEN 'completed' THEN 'erased' ELSE k.state END, response_headers = NULL, response_body = NULL,
			response_bytes = NULL, error = NULL, recovery_state = NULL, request = NULL, resume_at = NULL
		WHERE k.key = idem_erase.key AND k.scope = idem_erase.scope
			AND (k.state = 'completed' OR k.response_headers IS NOT NULL OR k.response_body IS NOT NULL
				OR k.response_bytes IS NOT NULL OR k.error IS NOT NULL OR k.recovery_state IS NOT NULL
				OR k.request IS NOT NULL OR k.resume_at IS NOT NULL);
	IF FOUND THEN
		RETURN true;
	END IF;
	IF NOT EXISTS (SELECT FROM @S@.idem_keys AS k WHERE k.key = idem_erase.key AND k.scope = idem_erase.scope) THEN
		PERFORM @S@.idem_p_check_new_key(key);
	END IF;
	RETURN false;
END

--@ idem_claim_many plpgsql
DECLARE
	count int;
	hash bytea;
	all_keys text[];
	all_hashes bytea[];
	claim @S@.idem_claim_result;
	results @S@.idem_claim_many_result[];
	place int;
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	PERFORM @S@.idem_p_check_array(keys, 'keys', true);
	PERFORM @S@.idem_p_check_array(request_hashes, 'request_hashes', false);
	FOREACH hash IN ARRAY coalesce(request_hashes, '{}') LOOP
		IF octet_length(hash) NOT BETWEEN 1 AND 64 THEN
			PERFORM @S@.idem_p_check_hash(hash, 'request_hashes');
		END IF;
	END LOOP;
	IF ttl IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(ttl, 'ttl');
	END IF;
	IF lease IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(lease, 'lease');
	END IF;
	count := @S@.idem_p_element_count('{keys,request_hashes}', ARRAY[cardinality(keys), cardinality(request_hashes)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_keys := @S@.idem_p_spread(keys, count);
	all_hashes := coalesce(@S@.idem_p_spread(request_hashes, count), array_fill(NULL::bytea, ARRAY[count]));
	FOR place IN SELECT e.place FROM unnest(all_keys) WITH ORDINALITY AS e (key, place) ORDER BY e.key COLLATE "C", e.place LOOP
		IF all_hashes[place] IS NULL THEN
			PERFORM @S@.idem_p_check_hash(NULL, 'request_hashes');
		END IF;
		claim := @S@.idem_claim(scope, all_keys[place], all_hashes[place], ttl, lease);
		results[place] := (place, all_keys[place], claim.outcome, claim.claim_token, claim.attempt, claim.response_status,
			claim.response_headers, claim.response_body, claim.response_bytes, claim.recovery_point, claim.recovery_state,
			claim.lease_expires_at, claim.expires_at);
	END LOOP;
	RETURN QUERY SELECT r.* FROM unnest(results) AS r;
END

--@ idem_complete_many plpgsql
DECLARE
	count int;
	all_keys text[];
	all_statuses int[];
	all_bodies text[];
	all_headers json[];
	all_tokens bigint[];
	results boolean[];
	place int;
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	PERFORM @S@.idem_p_check_array(keys, 'keys', true);
	PERFORM @S@.idem_p_check_array(response_statuses, 'response_statuses', true);
	PERFORM @S@.idem_p_check_array(response_bodies, 'response_bodies', false);
	PERFORM @S@.idem_p_check_array(response_headers, 'response_headers', false);
	PERFORM @S@.idem_p_check_array(claim_tokens, 'claim_tokens', false);
	count := @S@.idem_p_element_count('{keys,response_statuses,response_bodies,response_headers,claim_tokens}',
		ARRAY[cardinality(keys), cardinality(response_statuses), cardinality(response_bodies),
			cardinality(response_headers), cardinality(claim_tokens)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_keys := @S@.idem_p_spread(keys, count);
	all_statuses := @S@.idem_p_spread(response_statuses, count);
	all_bodies := @S@.idem_p_spread(response_bodies, count);
	all_headers := @S@.idem_p_spread(response_headers, count);
	all_tokens := @S@.idem_p_spread(claim_tokens, count);
	FOR place IN SELECT e.place FROM unnest(all_keys) WITH ORDINALITY AS e (key, place) ORDER BY e.key COLLATE "C", e.place LOOP
		results[place] := @S@.idem_p_complete(scope, all_keys[place], all_statuses[place], all_bodies[place], NULL,
			all_headers[place], all_tokens[place]);
	END LOOP;
	RETURN QUERY SELECT e.place::int, e.key, e.completed
		FROM unnest(all_keys, results) WITH ORDINALITY AS e (key, completed, place);
END

--@ idem_run plpgsql invoker
DECLARE
	handler_info record;
	claim @S@.idem_claim_result;
	result @S@.idem_run_result;
	response @S@.idem_response;
	body pg_catalog.jsonb;
	is_null boolean;
	caller CONSTANT pg_catalog.name := CURRENT_USER;
	caller_role CONSTANT pg_catalog.text := pg_catalog.current_setting('role');
	handler_role pg_catalog.text;
	is_completed boolean;
BEGIN
	-- This function runs with the caller's rights and search_path.
	IF scope IS NULL OR handler IS NULL OR (request IS NULL AND key IS NOT NULL) THEN
		RAISE EXCEPTION USING ERRCODE = '22004',
			MESSAGE = pg_catalog.format('argument "%s" must not be null',
				CASE WHEN scope IS NULL THEN 'scope' WHEN handler IS NULL THEN 'handler' ELSE 'request' END);
	ELSIF pg_catalog.octet_length(scope) OPERATOR(pg_catalog.<) 1 OR pg_catalog.octet_length(scope) OPERATOR(pg_catalog.>) 512 THEN
		RAISE EXCEPTION USING ERRCODE = '22023',
			MESSAGE = 'argument "scope" must have 1 to 512 bytes',
			DETAIL = pg_catalog.format('It has %s.', pg_catalog.octet_length(scope));
	ELSIF key IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = 'ID001', MESSAGE = 'idempotency key must not be null';
	END IF;
	SELECT p.oid, n.oid AS schema, n.nspname, p.proname, p.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.jsonb'::pg_catalog.regtype::pg_catalog.oid AS returns_jsonb,
			p.prokind OPERATOR(pg_catalog.=) 'f'::pg_catalog."char" AND NOT p.proretset AND p.pronargs OPERATOR(pg_catalog.=) 1::pg_catalog.int2
				AND p.proargtypes[0] OPERATOR(pg_catalog.=) 'pg_catalog.jsonb'::pg_catalog.regtype::pg_catalog.oid
				AND (p.prorettype OPERATOR(pg_catalog.=) 'pg_catalog.jsonb'::pg_catalog.regtype::pg_catalog.oid
					OR t.typtype OPERATOR(pg_catalog.=) 'c'::pg_catalog."char") AS fits,
			-- Not their names, which depend on search_path
			(SELECT pg_catalog.string_agg(CASE WHEN a.attisdropped THEN '-' ELSE a.atttypid::pg_catalog.text END, ','
					ORDER BY a.attnum)
				FROM pg_catalog.pg_attribute AS a
				WHERE a.attrelid OPERATOR(pg_catalog.=) t.typrelid AND a.attnum OPERATOR(pg_catalog.>) 0::pg_catalog.int2) AS columns
		INTO handler_info
		FROM pg_catalog.pg_proc AS p
		JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) p.pronamespace
		JOIN pg_catalog.pg_type AS t ON t.oid OPERATOR(pg_catalog.=) p.prorettype
		WHERE p.oid OPERATOR(pg_catalog.=) handler::pg_catalog.oid;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = '42883',
			MESSAGE = pg_catalog.format('function with OID %s does not exist', handler::pg_catalog.oid);
	ELSIF NOT pg_catalog.has_schema_privilege(handler_info.schema, 'USAGE') THEN
		RAISE EXCEPTION USING ERRCODE = '42501',
			MESSAGE = pg_catalog.format('permission denied for schema %s', handler_info.nspname);
	ELSIF NOT pg_catalog.has_function_privilege(handler_info.oid, 'EXECUTE') THEN
		RAISE EXCEPTION USING ERRCODE = '42501',
			MESSAGE = pg_catalog.format('permission denied for function %s', handler_info.proname);
	ELSIF NOT handler_info.fits THEN
		RAISE EXCEPTION USING ERRCODE = '42804',
			MESSAGE = pg_catalog.format('function %s cannot be a handler', handler),
			HINT = 'Declare it with one argument of type jsonb, to return idem_response or jsonb.';
	END IF;

	claim := @S@.idem_claim(scope, key,
		@S@.idem_request_hash('RUN', pg_catalog.format('%I.%I', handler_info.nspname, handler_info.proname), request),
		ttl, NULL, coalesce(wait, '1 minute'::pg_catalog.interval));
	result.outcome := claim.outcome;
	IF claim.outcome OPERATOR(pg_catalog.<>) 'new' THEN
		result.response_status := claim.response_status;
		result.response_headers := claim.response_headers;
		result.response_body := claim.response_body;
		RETURN result;
	END IF;

	IF handler_info.returns_jsonb THEN
		EXECUTE pg_catalog.format('SELECT %I.%I($1)', handler_info.nspname, handler_info.proname) INTO body USING request;
		is_null := body IS NULL;
		response.status := 200;
		response.body := body::pg_catalog.text;
	ELSIF handler_info.columns OPERATOR(pg_catalog.<>) pg_catalog.format('%s,%s,%s', 'pg_catalog.int4'::pg_catalog.regtype::pg_catalog.oid,
		'pg_catalog.json'::pg_catalog.regtype::pg_catalog.oid, 'pg_catalog.text'::pg_catalog.regtype::pg_catalog.oid)
	THEN
		EXECUTE pg_catalog.format('SELECT %I.%I($1) IS NULL', handler_info.nspname, handler_info.proname) INTO is_null USING request;
		RAISE EXCEPTION USING ERRCODE = '42804',
			MESSAGE = 'handler returned a row of the wrong type',
			HINT = 'Declare it to return idem_response.';
	ELSE
		EXECUTE pg_catalog.format('SELECT (r.r).*, r.r IS NOT DISTINCT FROM NULL FROM (SELECT %I.%I($1) AS r OFFSET 0) AS r',
			handler_info.nspname, handler_info.proname)
			INTO response.status, response.headers, response.body, is_null USING request;
	END IF;
	IF is_null THEN
		RAISE EXCEPTION USING ERRCODE = '22004',
			MESSAGE = pg_catalog.format('handler %s returned null', handler),
			HINT = 'Let it return a response, or raise an error to undo the request.';
	ELSIF response.status IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'handler returned a response without a status';
	END IF;
	-- Complete with the caller's role, if the handler has changed it.
	IF CURRENT_USER OPERATOR(pg_catalog.<>) caller THEN
		handler_role := pg_catalog.current_setting('role');
		PERFORM pg_catalog.set_config('role', caller_role, true);
	END IF;
	is_completed := @S@.idem_complete(scope, key, response.status, response.body, response.headers, claim.claim_token);
	IF handler_role IS NOT NULL THEN
		PERFORM pg_catalog.set_config('role', handler_role, true);
	END IF;
	IF NOT is_completed THEN
		RAISE EXCEPTION USING ERRCODE = '55000',
			MESSAGE = pg_catalog.format('handler %s has completed its own key', handler),
			HINT = 'Let it return the response; idem_run() stores it.';
	END IF;
	result.response_status := response.status;
	result.response_headers := response.headers;
	result.response_body := response.body;
	RETURN result;
END

--@ idem_resume plpgsql
DECLARE
	clock timestamptz := clock_timestamp();
	deadline timestamptz := clock;
	wanted CONSTANT int := coalesce(max_claims, 10);
	attempts_allowed CONSTANT int := @S@.idem_p_setting('max_attempts')::int;
	names text[];
	candidate record;
	-- The number of claims that a call reads, beside those that it wants.
	page int := 200;
	seen int;
	taken int := 0;
	retired int := 0;
	text_size bigint := 0;
	pause float8 := 0.01;
	new_token bigint;
BEGIN
	IF wait IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(wait, 'wait');
		deadline := clock + wait;
	END IF;
	IF wanted < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "max_claims" must be positive';
	END IF;
	IF lease IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(lease, 'lease');
	END IF;
	IF scopes IS NOT NULL THEN
		PERFORM @S@.idem_p_check_names(scopes, 'scopes');
		names := ARRAY(SELECT DISTINCT s.scope FROM unnest(scopes) AS s (scope));
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	LOOP
		clock := clock_timestamp();
		seen := 0;
		-- The index begins with the attempt, so that claims without remaining attempts are not read.
		FOR candidate IN
			WITH RECURSIVE attempts (n) AS (
				(SELECT k.attempt FROM @S@.idem_keys AS k WHERE k.resume_at IS NOT NULL ORDER BY k.attempt LIMIT 1)
				UNION ALL
				SELECT (SELECT k.attempt FROM @S@.idem_keys AS k
					WHERE k.resume_at IS NOT NULL AND k.attempt > a.n ORDER BY k.attempt LIMIT 1)
				FROM attempts AS a WHERE a.n < attempts_allowed
			)
			SELECT c.* FROM attempts AS a
			CROSS JOIN LATERAL (SELECT k.scope, k.key, k.claim_token, k.state, k.resume_at, k.xmin AS writer
				FROM @S@.idem_keys AS k
				WHERE k.attempt = a.n AND k.resume_at <= clock AND k.expires_at > clock AND k.request IS NOT NULL
					AND k.state NOT IN ('completed', 'erased') AND (k.lease_expires_at <= clock OR k.state <> 'started')
					AND (names IS NULL OR k.scope = ANY (names))
				ORDER BY k.resume_at LIMIT wanted::bigint + page) AS c
			WHERE a.n < attempts_allowed
			ORDER BY c.resume_at
		LOOP
			EXIT WHEN taken = wanted;
			seen := seen + 1;
			-- A claim of this transaction cannot be resumed.
			CONTINUE WHEN candidate.state = 'started' AND @S@.idem_p_is_own(candidate.writer);
			IF candidate.state NOT IN ('started', 'failed') THEN
				RAISE EXCEPTION USING ERRCODE = 'XX001', MESSAGE = 'unrecognized state in table "idem_keys"';
			END IF;
			BEGIN
				-- CASE, so that no index but that of the keys is used, whatever the statistics are.
				PERFORM FROM @S@.idem_keys AS k
					WHERE k.key = candidate.key AND k.scope = candidate.scope
						AND CASE WHEN k.resume_at <= clock AND k.expires_at > clock AND k.attempt < attempts_allowed
							THEN k.claim_token = candidate.claim_token END
					FOR NO KEY UPDATE SKIP LOCKED;
				CONTINUE WHEN NOT FOUND;
				-- A result has up to 4 MB of text, unless one request has more.
				text_size := text_size + coalesce((SELECT octet_length(k.request::text) + coalesce(octet_length(k.recovery_state::text), 0)
					FROM @S@.idem_keys AS k WHERE k.key = candidate.key AND k.scope = candidate.scope), 0);
				IF taken > 0 AND text_size > 4000000 THEN
					RAISE SQLSTATE 'IDR00';
				END IF;
			EXCEPTION WHEN SQLSTATE 'IDR00' THEN
				-- The rollback of the subtransaction releases the row.
				EXIT;
			END;
			new_token := @S@.idem_p_next_token(candidate.claim_token);
			UPDATE @S@.idem_keys AS k SET
					claim_token = new_token, state = 'started', attempt = k.attempt + 1, error = NULL,
					lease_expires_at = least(n.lease_end, k.expires_at), resume_at = least(n.lease_end, k.expires_at)
				FROM (SELECT clock_timestamp() + @S@.idem_p_lease(idem_resume.lease) OFFSET 0) AS n (lease_end)
				WHERE k.key = candidate.key AND k.scope = candidate.scope
				RETURNING k.scope, k.key, k.claim_token, k.attempt, k.request, k.recovery_point, k.recovery_state,
					k.created_at, k.lease_expires_at
				INTO idem_resume.scope, idem_resume.key, idem_resume.claim_token, idem_resume.attempt, idem_resume.request,
					idem_resume.recovery_point, idem_resume.recovery_state, idem_resume.created_at, idem_resume.lease_expires_at;
			PERFORM @S@.idem_p_remember_claim(new_token);
			taken := taken + 1;
			RETURN NEXT;
		END LOOP;

		-- Others can hold a page of claims.
		IF taken = 0 AND seen >= wanted::bigint + page AND page < 1000000 THEN
			page := page * 4;
			CONTINUE;
		END IF;
		-- Expired claims wait for the cleanup.  If there are many, remove them from the indexes.
		UPDATE @S@.idem_keys AS k SET resume_at = NULL WHERE k.ctid = ANY (ARRAY(
			SELECT l.ctid FROM @S@.idem_keys AS l
			WHERE l.expires_at <= clock AND l.ctid = ANY (ARRAY(
				SELECT e.ctid FROM @S@.idem_keys AS e
				WHERE e.resume_at <= clock AND e.attempt < attempts_allowed AND e.expires_at <= clock
					AND (names IS NULL OR e.scope = ANY (names))
				ORDER BY e.attempt, e.resume_at OFFSET 100 LIMIT 1000))
			FOR NO KEY UPDATE SKIP LOCKED));
		GET DIAGNOSTICS retired = ROW_COUNT;
		EXIT WHEN taken > 0 OR retired > 0 OR clock_timestamp() >= deadline;
		pause := @S@.idem_p_pause(pause, clock, deadline);
	END LOOP;
END
