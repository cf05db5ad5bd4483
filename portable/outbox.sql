-- The outbox.
--
-- A message of a key is taken only if no earlier one is pending, or together with
-- it.  A message behind another one is parked: it is not in the index of due
-- messages, so that a key that is blocked costs a take nothing.  Only takes park;
-- the calls that end the first message of a key put the next one back into the
-- index.  Both do so under an advisory lock of the key (lane), which a take does
-- not wait for, and under which they look again.  Publishing takes no such lock:
-- a new message is in the index.

--@ helpers
CREATE FUNCTION @S@.idem_p_lane(topic text, message_key text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT ('x' || encode(substr(sha256(int4send(octet_length(b.topic)) || b.topic
		|| int4send(octet_length(b.message_key)) || b.message_key), 1, 8), 'hex'))::bit(64)::bigint
	FROM (SELECT convert_to(topic, 'UTF8'), convert_to(message_key, 'UTF8')) AS b (topic, message_key)
$$;
COMMENT ON FUNCTION @S@.idem_p_lane(text, text) IS
'The lane of the messages of a topic with one key.';

-- A lane is a hash already; the class of these locks is 480.
CREATE FUNCTION @S@.idem_p_lane_lock(lane bigint)
RETURNS int
LANGUAGE sql IMMUTABLE
AS $$
	SELECT (lane >> 32)::int
$$;
COMMENT ON FUNCTION @S@.idem_p_lane_lock(bigint) IS
'The number of the advisory lock of a lane.';

CREATE FUNCTION @S@.idem_p_lock_lanes(lanes bigint[])
RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	number int;
BEGIN
	-- In one order, so that two calls do not deadlock.
	FOR number IN SELECT DISTINCT @S@.idem_p_lane_lock(l.lane) FROM unnest(lanes) AS l (lane) WHERE l.lane IS NOT NULL ORDER BY 1 LOOP
		PERFORM pg_advisory_xact_lock(480, number);
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_lock_lanes(bigint[]) IS
'Locks lanes until the transaction ends.';

-- A snapshot of the transaction can be older than the lock: then the update
-- raises 40001 if the message has been parked since.
CREATE FUNCTION @S@.idem_p_open_lanes(lanes bigint[])
RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	always CONSTANT boolean := current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
	count bigint;
BEGIN
	UPDATE @S@.idem_outbox AS o SET in_due_index = true
		FROM (SELECT DISTINCT l.lane FROM unnest(lanes) AS l (lane) WHERE l.lane IS NOT NULL) AS d
		WHERE o.id = (SELECT f.id FROM @S@.idem_outbox AS f WHERE f.key_hash = d.lane AND f.state = 'pending' ORDER BY f.id LIMIT 1)
			AND (always OR NOT o.in_due_index);
	GET DIAGNOSTICS count = ROW_COUNT;
	RETURN count;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_open_lanes(bigint[]) IS
'Puts the first message of each lane into the index of due messages; the lanes are locked.';

-- What is parked is behind another message now, not only as the caller has seen.
CREATE FUNCTION @S@.idem_p_park(ids bigint[])
RETURNS int
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	lanes bigint[];
	count int;
BEGIN
	lanes := ARRAY(SELECT d.lane FROM (SELECT DISTINCT o.key_hash AS lane FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids)
		LIMIT 500) AS d WHERE pg_try_advisory_xact_lock(480, @S@.idem_p_lane_lock(d.lane)));
	UPDATE @S@.idem_outbox AS o SET in_due_index = false
		WHERE o.id = ANY (ARRAY(SELECT p.id FROM @S@.idem_outbox AS p
			WHERE p.id = ANY (ids) AND p.key_hash = ANY (lanes) AND p.state = 'pending' AND p.in_due_index
				AND p.id > (SELECT f.id FROM @S@.idem_outbox AS f
					WHERE f.key_hash = p.key_hash AND f.state = 'pending' ORDER BY f.id LIMIT 1)
			FOR NO KEY UPDATE SKIP LOCKED));
	GET DIAGNOSTICS count = ROW_COUNT;
	RETURN count;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_park(bigint[]) IS
'Parks those of the messages that are behind another one of their key; returns how many.';

--@ idem_publish plpgsql
DECLARE
	number CONSTANT bigint := nextval('@S@.idem_outbox_ids');
	message CONSTANT uuid := gen_random_uuid();
	clock timestamptz;
BEGIN
	PERFORM @S@.idem_p_check_name(topic, 'topic');
	IF payload IS NULL THEN
		PERFORM @S@.idem_p_null('payload');
	END IF;
	IF message_key IS NOT NULL THEN
		PERFORM @S@.idem_p_check_name(message_key, 'message_key');
	END IF;
	IF deliver_after IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(deliver_after, 'deliver_after');
	END IF;
	PERFORM @S@.idem_p_check_text_size(pg_column_size(payload) + coalesce(pg_column_size(headers), 0), payload, headers, NULL);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	clock := clock_timestamp();
	INSERT INTO @S@.idem_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index,
			message_id, state, topic, message_key, payload, headers)
		VALUES (number, @S@.idem_p_lane(idem_publish.topic, idem_publish.message_key), clock,
			clock + coalesce(deliver_after, '0 s'), 0, 0, true, message, 'pending', idem_publish.topic,
			idem_publish.message_key, idem_publish.payload, idem_publish.headers);
	RETURN message;
END

--@ idem_publish_many plpgsql
#variable_conflict use_column
DECLARE
	count int;
	clock timestamptz;
BEGIN
	PERFORM @S@.idem_p_check_array(topics, 'topics', true);
	PERFORM @S@.idem_p_check_names(topics, 'topics');
	PERFORM @S@.idem_p_check_array(payloads, 'payloads', true);
	PERFORM @S@.idem_p_check_array(message_keys, 'message_keys', false);
	PERFORM @S@.idem_p_check_names(array_remove(coalesce(message_keys, '{}'), NULL), 'message_keys');
	PERFORM @S@.idem_p_check_array(headers, 'headers', false);
	IF deliver_after IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(deliver_after, 'deliver_after');
	END IF;
	count := @S@.idem_p_element_count('{topics,payloads,message_keys,headers}',
		ARRAY[cardinality(topics), cardinality(payloads), cardinality(message_keys), cardinality(headers)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	PERFORM @S@.idem_p_check_text_size(pg_column_size(e.payload) + coalesce(pg_column_size(e.headers), 0), e.payload, e.headers, NULL)
		FROM unnest(@S@.idem_p_spread(payloads, count), @S@.idem_p_spread(headers, count)) AS e (payload, headers);
	clock := clock_timestamp();
	RETURN QUERY WITH message AS MATERIALIZED (
			SELECT e.*, nextval('@S@.idem_outbox_ids') AS id, gen_random_uuid() AS message_id
			FROM unnest(@S@.idem_p_spread(topics, count), @S@.idem_p_spread(payloads, count), @S@.idem_p_spread(message_keys, count),
				@S@.idem_p_spread(headers, count)) WITH ORDINALITY AS e (topic, payload, message_key, headers, place)
			ORDER BY e.place),
		written AS (
			INSERT INTO @S@.idem_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index,
					message_id, state, topic, message_key, payload, headers)
				SELECT m.id, @S@.idem_p_lane(m.topic, m.message_key), clock, clock + coalesce(deliver_after, '0 s'), 0, 0, true,
					m.message_id, 'pending', m.topic, m.message_key, m.payload, m.headers
				FROM message AS m ORDER BY m.place)
		SELECT m.place::int, m.message_id FROM message AS m ORDER BY m.place;
END

--@ idem_outbox_take plpgsql
#variable_conflict use_column
DECLARE
	wanted CONSTANT int := coalesce(max_messages, 100);
	attempts_allowed CONSTANT int := @S@.idem_p_setting('outbox_max_attempts')::int;
	-- Of one call, parking must not take long.
	may_park int := 1000;
	clock timestamptz := clock_timestamp();
	deadline CONSTANT timestamptz := clock + wait;
	lease_end timestamptz;
	heads bigint[];
	behind bigint[];
	ids bigint[];
	ended bigint[];
	parked int;
	changed boolean := false;
	pause float8 := 0.01;
BEGIN
	IF wait IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(wait, 'wait');
	END IF;
	IF wanted < 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "max_messages" must be positive';
	END IF;
	IF lease IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(lease, 'lease');
	END IF;
	IF topics IS NOT NULL THEN
		PERFORM @S@.idem_p_check_names(topics, 'topics');
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	LOOP
		clock := clock_timestamp();
		lease_end := clock + coalesce(lease, '30 s');
		-- The due messages: those that are the first of their key, and others, to be parked.
		SELECT array_agg(d.id ORDER BY d.available_at, d.id) FILTER (WHERE d.is_head),
				array_agg(d.id) FILTER (WHERE NOT d.is_head)
			INTO heads, behind
			FROM (SELECT c.id, c.available_at, c.key_hash IS NULL OR c.id = (SELECT f.id FROM @S@.idem_outbox AS f
					WHERE f.key_hash = c.key_hash AND f.state = 'pending' ORDER BY f.id LIMIT 1) AS is_head
				FROM (SELECT o.id, o.available_at, o.key_hash FROM @S@.idem_outbox AS o
					WHERE o.in_due_index AND o.available_at <= clock AND o.state = 'pending'
						AND (topics IS NULL OR o.topic = ANY (topics))
					ORDER BY o.available_at LIMIT wanted + least(may_park, 500)) AS c) AS d;
		-- With a head, its lane is this call's.
		ids := NULL;
		IF heads IS NOT NULL THEN
			heads := ARRAY(SELECT o.id FROM unnest(heads) WITH ORDINALITY AS h (id, place)
				JOIN @S@.idem_outbox AS o ON o.id = h.id
				WHERE o.in_due_index AND o.available_at <= clock AND o.state = 'pending'
				ORDER BY h.place LIMIT wanted FOR NO KEY UPDATE OF o SKIP LOCKED);
			-- Those that follow it directly, as they are now that it is locked; none behind one that may be about to die.
			ids := ARRAY(SELECT r.id FROM unnest(heads) WITH ORDINALITY AS h (id, place)
				JOIN @S@.idem_outbox AS o ON o.id = h.id
				CROSS JOIN LATERAL (
					SELECT o.id WHERE o.key_hash IS NULL
					UNION ALL
					SELECT n.id FROM (
						SELECT e.id, bool_and(e.available_at <= clock) OVER up_to AND first_value(e.id) OVER up_to = o.id
								AND coalesce(bool_and(e.attempt - e.uncounted_attempts < greatest(attempts_allowed / 2, 1)) OVER before, true) AS follows
						FROM (SELECT m.id, m.available_at, m.attempt, m.uncounted_attempts FROM @S@.idem_outbox AS m
							WHERE m.key_hash = o.key_hash AND m.state = 'pending' ORDER BY m.id LIMIT wanted) AS e
						WINDOW up_to AS (ORDER BY e.id), before AS (ORDER BY e.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS n
					WHERE n.follows) AS r (id)
				ORDER BY h.place, r.id LIMIT wanted);
			ids := ARRAY(SELECT o.id FROM unnest(ids) WITH ORDINALITY AS i (id, place)
				JOIN @S@.idem_outbox AS o ON o.id = i.id
				WHERE o.state = 'pending' AND o.available_at <= clock
				ORDER BY i.place FOR NO KEY UPDATE OF o SKIP LOCKED);
		END IF;

		IF ids <> '{}' THEN
			WITH dead AS (UPDATE @S@.idem_outbox AS o SET state = 'dead', in_due_index = false,
					last_error = coalesce(o.last_error, 'The last lease ran out.')
				WHERE o.id = ANY (ids) AND o.attempt - o.uncounted_attempts >= attempts_allowed
					AND (o.key_hash IS NULL OR pg_try_advisory_xact_lock(480, @S@.idem_p_lane_lock(o.key_hash)))
				RETURNING o.key_hash)
			SELECT array_agg(coalesce(d.key_hash, 0)) INTO ended FROM dead AS d;
			IF ended IS NOT NULL THEN
				PERFORM @S@.idem_p_open_lanes(ended);
				changed := true;
			END IF;
			RETURN QUERY WITH taken AS (UPDATE @S@.idem_outbox AS o
					SET attempt = o.attempt + 1, awaiting_ack = true, in_due_index = true, available_at = lease_end
					WHERE o.id = ANY (ids) AND o.state = 'pending' AND o.attempt - o.uncounted_attempts < attempts_allowed
					RETURNING o.id, o.message_id, o.topic, o.message_key, o.payload, o.headers, o.attempt, o.created_at)
				SELECT t.id, t.message_id, t.topic, t.message_key, t.payload, t.headers, t.attempt, t.created_at
				FROM taken AS t ORDER BY array_position(ids, t.id);
			changed := changed OR FOUND;
		END IF;
		-- Whatever is behind others makes way for what is due.
		parked := 0;
		IF behind IS NOT NULL AND may_park > 0 THEN
			parked := @S@.idem_p_park(behind);
			may_park := may_park - parked;
		END IF;
		IF changed THEN
			RETURN;
		ELSIF parked > 0 AND may_park > 0 THEN
			CONTINUE;
		END IF;
		-- What has been parked is to be committed.
		IF may_park < 1000 OR deadline IS NULL OR clock_timestamp() >= deadline THEN
			RETURN;
		END IF;
		pause := @S@.idem_p_pause(pause, NULL, deadline);
	END LOOP;
END

--@ idem_outbox_ack plpgsql
DECLARE
	lanes bigint[];
	count int;
BEGIN
	PERFORM @S@.idem_p_check_array(ids, 'ids', true);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	lanes := ARRAY(SELECT DISTINCT o.key_hash FROM @S@.idem_outbox AS o
		WHERE o.id = ANY (ids) AND o.state = 'pending' AND o.key_hash IS NOT NULL);
	PERFORM @S@.idem_p_lock_lanes(lanes);
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state <> 'acked' ORDER BY o.id FOR NO KEY UPDATE;
	IF @S@.idem_p_setting('outbox_retention') = '0' THEN
		DELETE FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state <> 'acked';
	ELSE
		UPDATE @S@.idem_outbox AS o SET state = 'acked', acked_at = clock_timestamp(), in_due_index = false
			WHERE o.id = ANY (ids) AND o.state <> 'acked';
	END IF;
	GET DIAGNOSTICS count = ROW_COUNT;
	IF lanes <> '{}' THEN
		PERFORM @S@.idem_p_open_lanes(lanes);
	END IF;
	RETURN count;
END

--@ idem_outbox_nack plpgsql
DECLARE
	message record;
	tries int;
	attempts_allowed CONSTANT int := @S@.idem_p_setting('outbox_max_attempts')::int;
	clipped text;
BEGIN
	IF id IS NULL THEN
		PERFORM @S@.idem_p_null('id');
	END IF;
	IF retry_after IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(retry_after, 'retry_after');
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	PERFORM @S@.idem_p_lock_lanes(ARRAY(SELECT o.key_hash FROM @S@.idem_outbox AS o WHERE o.id = idem_outbox_nack.id));
	SELECT o.* INTO message FROM @S@.idem_outbox AS o WHERE o.id = idem_outbox_nack.id FOR NO KEY UPDATE;
	IF NOT FOUND OR message.state = 'acked'
		OR (attempt IS NOT NULL AND (attempt <> message.attempt OR message.awaiting_ack IS NULL))
	THEN
		RETURN 'lost';
	ELSIF message.state = 'dead' THEN
		RETURN 'dead';
	END IF;
	tries := message.attempt - message.uncounted_attempts;
	clipped := CASE WHEN octet_length(error) > @S@.idem_p_setting('max_response_size')::int
		THEN @S@.idem_p_clip(error, @S@.idem_p_setting('max_response_size')::int) ELSE error END;
	IF tries >= attempts_allowed THEN
		UPDATE @S@.idem_outbox AS o SET state = 'dead', in_due_index = false,
				awaiting_ack = CASE WHEN o.awaiting_ack IS NOT NULL THEN false END, last_error = coalesce(clipped, o.last_error)
			WHERE o.id = idem_outbox_nack.id;
		PERFORM @S@.idem_p_open_lanes(ARRAY[message.key_hash]);
		RETURN 'dead';
	END IF;
	UPDATE @S@.idem_outbox AS o SET awaiting_ack = CASE WHEN o.awaiting_ack IS NOT NULL THEN false END,
			available_at = clock_timestamp() + coalesce(retry_after,
				least(2.0::float8 ^ least(greatest(tries, 1) - 1, 20), 3600) * (0.5 + 0.5 * random()) * '1 s'::interval),
			last_error = coalesce(clipped, o.last_error)
		WHERE o.id = idem_outbox_nack.id;
	RETURN 'pending';
END

--@ idem_outbox_requeue plpgsql
DECLARE
	count int;
BEGIN
	PERFORM @S@.idem_p_check_array(ids, 'ids', ids IS NOT NULL);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	PERFORM FROM @S@.idem_outbox AS o WHERE o.state = 'dead' AND (ids IS NULL OR o.id = ANY (ids)) ORDER BY o.id FOR NO KEY UPDATE;
	UPDATE @S@.idem_outbox AS o SET state = 'pending', uncounted_attempts = o.attempt, awaiting_ack = NULL,
			in_due_index = true, available_at = clock_timestamp()
		WHERE o.state = 'dead' AND (ids IS NULL OR o.id = ANY (ids));
	GET DIAGNOSTICS count = ROW_COUNT;
	RETURN count;
END

--@ idem_outbox_extend plpgsql
DECLARE
	count int;
	all_ids bigint[];
	all_attempts int[];
	held bigint;
BEGIN
	PERFORM @S@.idem_p_check_array(ids, 'ids', true);
	IF lease IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(lease, 'lease');
	END IF;
	PERFORM @S@.idem_p_check_array(attempts, 'attempts', false);
	count := @S@.idem_p_element_count('{ids,attempts}', ARRAY[cardinality(ids), cardinality(attempts)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_ids := @S@.idem_p_spread(ids, count);
	all_attempts := @S@.idem_p_spread(attempts, count);
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state = 'pending' ORDER BY o.id FOR NO KEY UPDATE;
	FOR i IN 1 .. count LOOP
		UPDATE @S@.idem_outbox AS o SET available_at = clock_timestamp() + coalesce(lease, '30 s')
			WHERE o.id = all_ids[i] AND o.state = 'pending' AND o.awaiting_ack
				AND CASE WHEN all_attempts[i] IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = all_attempts[i] END
			RETURNING o.id INTO held;
		IF FOUND THEN
			RETURN NEXT held;
		END IF;
	END LOOP;
END

--@ idem_outbox_release plpgsql
DECLARE
	count int;
	released int := 0;
	all_ids bigint[];
	all_attempts int[];
BEGIN
	PERFORM @S@.idem_p_check_array(ids, 'ids', true);
	PERFORM @S@.idem_p_check_array(attempts, 'attempts', false);
	count := @S@.idem_p_element_count('{ids,attempts}', ARRAY[cardinality(ids), cardinality(attempts)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_ids := @S@.idem_p_spread(ids, count);
	all_attempts := @S@.idem_p_spread(attempts, count);
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state = 'pending' ORDER BY o.id FOR NO KEY UPDATE;
	FOR i IN 1 .. count LOOP
		UPDATE @S@.idem_outbox AS o SET uncounted_attempts = o.uncounted_attempts + 1, available_at = clock_timestamp(), awaiting_ack = NULL
			WHERE o.id = all_ids[i] AND o.state = 'pending' AND o.awaiting_ack
				AND CASE WHEN all_attempts[i] IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = all_attempts[i] END;
		released := released + CASE WHEN FOUND THEN 1 ELSE 0 END;
	END LOOP;
	RETURN released;
END
