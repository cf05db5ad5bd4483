-- The outbox.
--
-- A message of a key is taken only if no earlier one is pending, or together with
-- it.  A message behind another one is parked: it is not in the index of due
-- messages, so that a blocked key does not slow down takes.  Only takes park.  The
-- calls that end the first message of a key put the next one back into the index.
-- Both do so under a lock of the key (lane), and check again under the lock.  A take does not wait for this lock.  Publishing does not need it, because
-- a new message is in the index.

--@ helpers
-- The planner inlines this function.
CREATE FUNCTION @S@.idem_p_lane(topic text, message_key text)
RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
	SELECT ('x' || encode(substr(sha256(int4send(octet_length(convert_to(topic, 'UTF8'))) || convert_to(topic, 'UTF8')
		|| int4send(octet_length(convert_to(message_key, 'UTF8'))) || convert_to(message_key, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
$$;
COMMENT ON FUNCTION @S@.idem_p_lane(text, text) IS
'The lane of the messages of a topic with one key.';

-- A lane is already a hash.
CREATE FUNCTION @S@.idem_p_lane_lock(lane bigint)
RETURNS int
LANGUAGE sql IMMUTABLE
AS $$
	SELECT (lane & 4095)::int
$$;
COMMENT ON FUNCTION @S@.idem_p_lane_lock(bigint) IS
'The row of idem_p_lanes whose lock is that of a lane.';

CREATE FUNCTION @S@.idem_p_lock_lanes(lanes bigint[])
RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	numbers CONSTANT int[] := ARRAY(SELECT DISTINCT @S@.idem_p_lane_lock(l.lane)
		FROM unnest(lanes) AS l (lane) WHERE l.lane IS NOT NULL);
	count int;
BEGIN
	-- Sorted, so that two calls do not deadlock.
	PERFORM FROM @S@.idem_p_lanes AS l WHERE l.number = ANY (numbers) ORDER BY l.number FOR UPDATE;
	GET DIAGNOSTICS count = ROW_COUNT;
	IF count < cardinality(numbers) THEN
		PERFORM @S@.idem_p_complete_installation();
		PERFORM FROM @S@.idem_p_lanes AS l WHERE l.number = ANY (numbers) ORDER BY l.number FOR UPDATE;
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_lock_lanes(bigint[]) IS
'Locks lanes until the transaction ends.';

-- Sorted, so that two calls do not deadlock.  CASE, so that no index but that of the
-- ids is used, whatever the statistics are.
CREATE FUNCTION @S@.idem_p_lock_held(ids bigint[], attempts int[])
RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
	PERFORM FROM (SELECT u.id, u.attempt FROM unnest(ids, attempts) AS u (id, attempt) ORDER BY u.id) AS a
		CROSS JOIN LATERAL (SELECT FROM @S@.idem_outbox AS o
			WHERE o.id = a.id AND CASE WHEN o.state = 'pending' AND o.awaiting_ack
				THEN CASE WHEN a.attempt IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = a.attempt END END
			FOR NO KEY UPDATE) AS l;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_lock_held(bigint[], int[]) IS
'Locks the messages that callers with these attempts hold, until the transaction ends. Attempt NULL: any, while the lease lasts.';

-- The transaction's snapshot can be older than the lock.  Then the update
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

CREATE FUNCTION @S@.idem_p_try_lock_lane(lane bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
	PERFORM FROM @S@.idem_p_lanes AS l WHERE l.number = @S@.idem_p_lane_lock(lane) FOR UPDATE SKIP LOCKED;
	IF NOT FOUND AND NOT EXISTS (SELECT FROM @S@.idem_p_lanes AS l WHERE l.number = @S@.idem_p_lane_lock(lane)) THEN
		PERFORM @S@.idem_p_complete_installation();
		PERFORM FROM @S@.idem_p_lanes AS l WHERE l.number = @S@.idem_p_lane_lock(lane) FOR UPDATE SKIP LOCKED;
	END IF;
	RETURN FOUND;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_try_lock_lane(bigint) IS
'Locks a lane until the transaction ends, unless another transaction has it.';

-- Checks under the lock that each message is still behind another one before parking it.
CREATE FUNCTION @S@.idem_p_park(ids bigint[], lanes bigint[])
RETURNS int
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	count int;
BEGIN
	lanes := ARRAY(SELECT l.lane FROM unnest(lanes) AS l (lane) WHERE @S@.idem_p_try_lock_lane(l.lane));
	ids := ARRAY(SELECT p.id FROM unnest(ids) AS i (id)
		CROSS JOIN LATERAL (SELECT o.id, o.key_hash FROM @S@.idem_outbox AS o
			-- CASE, so that no index but that of the ids is used, whatever the statistics are.
			WHERE o.id = i.id AND CASE WHEN o.in_due_index THEN o.state = 'pending' END FOR NO KEY UPDATE SKIP LOCKED) AS p
		JOIN (SELECT l.lane, (SELECT f.id FROM @S@.idem_outbox AS f
				WHERE f.key_hash = l.lane AND f.state = 'pending' ORDER BY f.id LIMIT 1) AS head
			FROM unnest(lanes) AS l (lane)) AS h ON h.lane = p.key_hash
		WHERE p.id > h.head);
	IF ids = '{}' THEN
		RETURN 0;
	END IF;
	-- An answer whose snapshot does not show the parked messages gets 40001 from the lock of
	-- the lane, and so does not leave them there.
	UPDATE @S@.idem_p_lanes AS l SET number = l.number WHERE l.number = ANY (ARRAY(
		SELECT @S@.idem_p_lane_lock(o.key_hash) FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids)));
	UPDATE @S@.idem_outbox AS o SET in_due_index = false WHERE o.id = ANY (ids);
	GET DIAGNOSTICS count = ROW_COUNT;
	RETURN count;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_park(bigint[], bigint[]) IS
'Parks the messages that are behind another one of their key; returns their number.';

-- The last five errors, the newest first, each on a line that begins with its time.
CREATE FUNCTION @S@.idem_p_add_error(previous text, error text)
RETURNS text
LANGUAGE sql STABLE
AS $$
	SELECT concat_ws(E'\n', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z "')
			|| translate(@S@.idem_p_clip(error, 500), E'\n\r', '  '),
		array_to_string((string_to_array(previous, E'\n'))[:4], E'\n'))
$$;
COMMENT ON FUNCTION @S@.idem_p_add_error(text, text) IS
'The errors of a message, with this one before the others.';

CREATE FUNCTION @S@.idem_p_refuse(message_id bigint, of_attempt int, error text, retry_after interval, counted boolean,
	schedule interval[], max_age interval, keep_history boolean)
RETURNS text
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	message record;
	tries int;
	allowed CONSTANT bigint := @S@.idem_p_setting('max_response_size')::bigint;
	is_last boolean;
	clock timestamptz;
	pause_end timestamptz;
	errors text;
BEGIN
	SELECT o.* INTO message FROM @S@.idem_outbox AS o WHERE o.id = idem_p_refuse.message_id;
	-- These do not need a lock: a dead message is dead until a requeue commits.
	IF current_setting('transaction_isolation') = 'read committed' THEN
		IF NOT FOUND OR message.state = 'acked' OR of_attempt < message.attempt
			OR (message.state = 'dead' AND of_attempt IS NOT NULL AND (of_attempt <> message.attempt OR message.awaiting_ack IS NULL))
		THEN
			RETURN 'lost';
		ELSIF message.state = 'dead' THEN
			RETURN 'dead';
		END IF;
	END IF;
	PERFORM @S@.idem_p_lock_lanes(ARRAY[message.key_hash]);
	SELECT o.* INTO message FROM @S@.idem_outbox AS o WHERE o.id = idem_p_refuse.message_id FOR NO KEY UPDATE;
	IF NOT FOUND OR message.state = 'acked'
		OR (of_attempt IS NOT NULL AND (of_attempt <> message.attempt OR message.awaiting_ack IS NULL))
	THEN
		RETURN 'lost';
	ELSIF message.state = 'dead' THEN
		RETURN 'dead';
	-- The caller repeats its report, because the answer was lost.
	ELSIF keep_history AND NOT message.awaiting_ack THEN
		RETURN 'pending';
	END IF;
	clock := clock_timestamp();
	tries := message.attempt - message.uncounted_attempts - CASE WHEN counted THEN 0 ELSE 1 END;
	is_last := tries >= @S@.idem_p_setting('outbox_max_attempts')::int
		OR coalesce(message.created_at + max_age <= clock, false)
		OR (counted AND schedule IS NOT NULL AND tries > cardinality(schedule));
	IF schedule IS NULL OR NOT counted THEN
		pause_end := clock + coalesce(retry_after,
			least(2.0::float8 ^ least(greatest(tries, 1) - 1, 20), 3600) * (0.5 + 0.5 * random()) * '1 s'::interval);
	ELSE
		pause_end := greatest(clock + coalesce(retry_after, '0 s'), clock + coalesce(schedule[tries], '0 s'));
	END IF;
	errors := CASE WHEN error IS NULL THEN message.last_error
		WHEN keep_history THEN @S@.idem_p_add_error(message.last_error, error) ELSE error END;
	IF octet_length(errors) > allowed THEN
		errors := @S@.idem_p_clip(errors, allowed::int);
	END IF;
	UPDATE @S@.idem_outbox AS o SET state = CASE WHEN is_last THEN 'dead' ELSE 'pending' END,
			in_due_index = o.in_due_index AND NOT is_last,
			uncounted_attempts = o.uncounted_attempts + CASE WHEN counted THEN 0 ELSE 1 END,
			awaiting_ack = CASE WHEN o.awaiting_ack IS NOT NULL THEN false END, last_error = errors,
			available_at = pause_end
		WHERE o.id = idem_p_refuse.message_id;
	IF is_last THEN
		PERFORM @S@.idem_p_open_lanes(ARRAY[message.key_hash]);
		RETURN 'dead';
	END IF;
	RETURN 'pending';
END
$$;
COMMENT ON FUNCTION @S@.idem_p_refuse(bigint, int, text, interval, boolean, interval[], interval, boolean) IS
'Refuses a message, for idem_outbox_nack and idem_outbox_fail.';

--@ idem_publish plpgsql
DECLARE
	number bigint;
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
	IF getdatabaseencoding() <> 'UTF8' THEN
		PERFORM @S@.idem_p_check_client_text(topic, message_key, payload::text, headers::text);
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	number := nextval('@S@.idem_outbox_ids');
	clock := clock_timestamp();
	INSERT INTO @S@.idem_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index,
			message_id, state, topic, message_key, payload, headers)
		VALUES (number, @S@.idem_p_lane(idem_publish.topic, idem_publish.message_key), clock,
			clock + coalesce(deliver_after, '0 s'), 0, 0, true, message, 'pending', idem_publish.topic,
			idem_publish.message_key, idem_publish.payload, idem_publish.headers);
	-- The delay begins at the write, not before a wait for the table.
	IF @S@.idem_p_has_waited(clock) THEN
		clock := clock_timestamp();
		UPDATE @S@.idem_outbox AS o SET created_at = clock, available_at = clock + coalesce(deliver_after, '0 s')
			WHERE o.id = number;
	END IF;
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
	IF getdatabaseencoding() <> 'UTF8' THEN
		PERFORM @S@.idem_p_check_client_text(e.topic, e.message_key, e.payload::text, e.headers::text)
			FROM unnest(topics, message_keys, payloads, headers) AS e (topic, message_key, payload, headers);
	END IF;
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

-- The statistics of a table that is filled and emptied mislead the planner.  So these
-- settings force it to read the beginning of an index.  Subqueries with LATERAL make it
-- read single messages by the primary key, in the order of the array.
--@ idem_outbox_take plpgsql SET enable_bitmapscan = off SET hash_mem_multiplier = 1000
#variable_conflict use_column
DECLARE
	wanted CONSTANT int := coalesce(max_messages, 100);
	attempts_allowed CONSTANT int := @S@.idem_p_setting('outbox_max_attempts')::int;
	-- The length of the messages of a result, as a client receives them.
	most_text CONSTANT int := 16777216;
	fitting int;
	-- A call that can return messages parks one page at most.  Any other call continues with
	-- larger pages, because due messages can be behind the messages that it must park.
	-- An old snapshot does not show that a message has become the first one of its key, so
	-- a call with such a snapshot parks nothing.
	page int := 200;
	may_park int := CASE WHEN current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN 0 ELSE 20000 END;
	may_die int := 1000;
	is_parking boolean := false;
	seen bigint;
	clock timestamptz := clock_timestamp();
	deadline timestamptz;
	lease_end timestamptz;
	heads bigint[];
	head_lanes bigint[];
	any_exhausted boolean;
	dying bigint[];
	behind bigint[];
	lanes bigint[];
	ids bigint[];
	followers bigint[];
	missing bigint[];
	-- A page begins at the time of the last message of the one before, without the keys of the messages
	-- there that are behind others.
	since timestamptz := '-infinity';
	last timestamptz;
	passed bigint[] := '{}';
	died int;
	parked int;
	changed boolean := false;
	pause float8 := 0.01;
BEGIN
	IF wait IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(wait, 'wait');
		deadline := clock + wait;
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
		-- The due messages: the first ones of their keys, and others, which are parked.  The search for the
		-- first one can pass many messages of open transactions, so it is made once for each key.
		SELECT array_agg(d.id ORDER BY d.available_at, d.id) FILTER (WHERE d.is_head),
				array_agg(d.key_hash ORDER BY d.available_at, d.id) FILTER (WHERE d.is_head),
				bool_or(d.is_head AND d.is_exhausted), array_agg(d.id) FILTER (WHERE NOT d.is_head),
				array_agg(DISTINCT d.key_hash) FILTER (WHERE NOT d.is_head), count(*), max(d.available_at)
			INTO heads, head_lanes, any_exhausted, behind, lanes, seen, last
			FROM (SELECT p.id, p.available_at, p.key_hash, p.is_exhausted, p.key_hash IS NULL OR CASE WHEN p.place = 1 THEN p.id = (
					SELECT f.id FROM @S@.idem_outbox AS f WHERE f.key_hash = p.key_hash AND f.state = 'pending' ORDER BY f.id LIMIT 1)
					ELSE false END AS is_head
				FROM (SELECT c.*, row_number() OVER (PARTITION BY c.key_hash ORDER BY c.id) AS place
					FROM (SELECT o.id, o.available_at, o.key_hash,
							o.attempt - o.uncounted_attempts >= attempts_allowed OR o.attempt = 2147483647 AS is_exhausted
						FROM @S@.idem_outbox AS o
						WHERE o.in_due_index AND o.available_at BETWEEN since AND clock AND o.state = 'pending'
							AND (topics IS NULL OR o.topic = ANY (topics))
							-- Not an anti-join, so that the order of the index is kept
							AND (o.key_hash IS NULL OR o.key_hash NOT IN (SELECT p.lane FROM unnest(passed) AS p (lane)))
						ORDER BY o.available_at LIMIT wanted::bigint + page) AS c) AS p OFFSET 0) AS d;
		-- A call that holds the head of a lane owns the lane.
		ids := NULL;
		IF any_exhausted THEN
			-- Messages without remaining attempts die, and the search for the next ones begins again.  The
			-- next statement must see all answers, so its snapshot has to be newer than the locks of the keys.
			dying := ARRAY(SELECT o.id FROM @S@.idem_outbox AS o
				WHERE o.id = ANY (heads) AND o.state = 'pending' AND o.available_at <= clock
					AND (o.attempt - o.uncounted_attempts >= attempts_allowed OR o.attempt = 2147483647)
					AND (o.key_hash IS NULL OR @S@.idem_p_try_lock_lane(o.key_hash))
				LIMIT may_die);
			WITH candidates AS MATERIALIZED (SELECT r.id, h.key_hash
					FROM (SELECT o.id, o.key_hash FROM @S@.idem_outbox AS o WHERE o.id = ANY (dying)) AS h
					CROSS JOIN LATERAL (
						SELECT h.id WHERE h.key_hash IS NULL
						UNION ALL
						SELECT n.id FROM (
							SELECT m.id, bool_and(m.available_at <= clock AND (m.attempt - m.uncounted_attempts >= attempts_allowed
								OR m.attempt = 2147483647)) OVER (ORDER BY m.id) AS are_all
							FROM (SELECT b.id, b.available_at, b.attempt, b.uncounted_attempts FROM @S@.idem_outbox AS b
								WHERE b.key_hash = h.key_hash AND b.state = 'pending' ORDER BY b.id LIMIT may_die) AS m) AS n
						WHERE n.are_all) AS r (id)
					LIMIT may_die),
				-- The first message of each key that does not die goes into the index.
				followers AS MATERIALIZED (SELECT n.id, c.key_hash FROM (
						SELECT d.key_hash, max(d.id) AS last FROM candidates AS d WHERE d.key_hash IS NOT NULL GROUP BY d.key_hash) AS c
					CROSS JOIN LATERAL (SELECT b.id FROM @S@.idem_outbox AS b
						WHERE b.key_hash = c.key_hash AND b.state = 'pending' AND b.id > c.last ORDER BY b.id LIMIT 1) AS n),
				-- Others can have written a message before it was locked.
				exhausted AS MATERIALIZED (SELECT c.id, c.key_hash FROM candidates AS c
					CROSS JOIN LATERAL (SELECT FROM @S@.idem_outbox AS o WHERE o.id = c.id AND o.state = 'pending' AND o.available_at <= clock
						AND (o.attempt - o.uncounted_attempts >= attempts_allowed OR o.attempt = 2147483647)
						FOR NO KEY UPDATE SKIP LOCKED) AS l),
				locked_followers AS MATERIALIZED (SELECT f.id, f.key_hash FROM followers AS f
					CROSS JOIN LATERAL (SELECT FROM @S@.idem_outbox AS o WHERE o.id = f.id AND o.state = 'pending'
						FOR NO KEY UPDATE SKIP LOCKED) AS l),
				-- If another transaction holds one of them, none of the key dies now, because this call does not wait.
				held AS MATERIALIZED (SELECT c.key_hash FROM candidates AS c
					WHERE c.key_hash IS NOT NULL AND c.id NOT IN (SELECT e.id FROM exhausted AS e)
					UNION ALL
					SELECT f.key_hash FROM followers AS f WHERE f.id NOT IN (SELECT l.id FROM locked_followers AS l)),
				dead AS (UPDATE @S@.idem_outbox AS o SET state = 'dead', in_due_index = false,
						last_error = coalesce(o.last_error, 'The last lease expired.')
					FROM exhausted AS e
					WHERE o.id = e.id AND (e.key_hash IS NULL OR e.key_hash NOT IN (SELECT h.key_hash FROM held AS h))
					RETURNING o.id),
				opened AS (UPDATE @S@.idem_outbox AS o SET in_due_index = true
					FROM locked_followers AS f
					WHERE o.id = f.id AND NOT o.in_due_index AND f.key_hash NOT IN (SELECT h.key_hash FROM held AS h))
			SELECT count(*) INTO died FROM dead;
			IF died > 0 THEN
				may_die := may_die - died;
				changed := true;
				CONTINUE;
			END IF;
		END IF;
		IF heads IS NOT NULL THEN
			-- Do not lock more messages than a result can have.
			fitting := (SELECT count(*) FROM (
				SELECT sum(m.bytes) OVER (ORDER BY h.place) AS size
				FROM unnest(heads[:wanted]) WITH ORDINALITY AS h (id, place)
				CROSS JOIN LATERAL (SELECT octet_length(o.payload::text) + coalesce(octet_length(o.headers::text), 0)
					FROM @S@.idem_outbox AS o WHERE o.id = h.id OFFSET 0) AS m (bytes)) AS c
				WHERE c.size <= most_text);
			-- CASE, so that no index but that of the ids is used, whatever the statistics are.
			SELECT array_agg(h.id), array_agg(h.lane) INTO heads, head_lanes
				FROM (SELECT u.id, u.lane FROM unnest(heads, head_lanes) AS u (id, lane)
					CROSS JOIN LATERAL (SELECT FROM @S@.idem_outbox AS o
						WHERE o.id = u.id AND CASE WHEN o.in_due_index AND o.available_at <= clock AND o.attempt < 2147483647
							AND o.attempt - o.uncounted_attempts < attempts_allowed THEN o.state = 'pending' END
						FOR NO KEY UPDATE SKIP LOCKED) AS l
					LIMIT greatest(fitting, 1)) AS h;
			-- The messages directly behind a locked head, but none behind a message that might die soon.
			SELECT array_agg(f.id), array_agg(f.id) FILTER (WHERE NOT f.is_first) INTO ids, followers FROM (
				SELECT s.id, s.is_first, sum(octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0)) OVER up_to AS size,
					row_number() OVER up_to AS place
				FROM (SELECT n.* FROM (
						SELECT h.place AS lane_place, m.id, m.id = h.id AS is_first, m.payload, m.headers, h.lane IS NULL
							OR (bool_and(m.available_at <= clock) OVER up_to AND first_value(m.id) OVER up_to = h.id
								AND coalesce(bool_and(m.attempt - m.uncounted_attempts < greatest(attempts_allowed / 2, 1)) OVER before, true)) AS follows
						FROM unnest(heads, head_lanes) WITH ORDINALITY AS h (id, lane, place)
						CROSS JOIN LATERAL (
							SELECT o.* FROM @S@.idem_outbox AS o WHERE h.lane IS NULL AND o.id = h.id
							UNION ALL
							(SELECT o.* FROM @S@.idem_outbox AS o
								WHERE o.key_hash = h.lane AND o.state = 'pending' ORDER BY o.id LIMIT wanted)) AS m
						WINDOW up_to AS (PARTITION BY h.place ORDER BY m.id),
							before AS (PARTITION BY h.place ORDER BY m.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS n
					WHERE n.follows
					ORDER BY n.lane_place, n.id LIMIT wanted) AS s
				WINDOW up_to AS (ORDER BY s.lane_place, s.id)
				ORDER BY place) AS f
				WHERE f.place = 1 OR f.size <= most_text;
			missing := ARRAY(SELECT f.id FROM unnest(followers) AS f (id)
				EXCEPT SELECT l.id FROM unnest(followers) AS i (id)
				CROSS JOIN LATERAL (SELECT o.id FROM @S@.idem_outbox AS o
					WHERE o.id = i.id AND CASE WHEN o.available_at <= clock THEN o.state = 'pending' END
					FOR NO KEY UPDATE SKIP LOCKED) AS l);
			-- None behind a message that another call is answering, because that call might return it.
			IF missing <> '{}' THEN
				ids := ARRAY(SELECT i.id FROM unnest(ids) WITH ORDINALITY AS i (id, place)
					CROSS JOIN LATERAL (SELECT m.key_hash FROM @S@.idem_outbox AS m WHERE m.id = i.id OFFSET 0) AS o
					WHERE i.id NOT IN (SELECT s.id FROM unnest(missing) AS s (id))
						AND NOT EXISTS (SELECT FROM unnest(missing) AS s (id) JOIN @S@.idem_outbox AS b ON b.id = s.id
							WHERE b.key_hash = o.key_hash AND b.id < i.id AND b.state = 'pending')
					ORDER BY i.place);
			END IF;
		END IF;

		IF ids <> '{}' THEN
			-- The lease begins now, not before a wait for the table.
			lease_end := clock_timestamp() + coalesce(lease, '30 s');
			RETURN QUERY WITH taken AS (UPDATE @S@.idem_outbox AS o
					SET attempt = o.attempt + 1, awaiting_ack = true, in_due_index = true, available_at = lease_end
					WHERE o.id = ANY (ids) AND o.state = 'pending' AND o.attempt - o.uncounted_attempts < attempts_allowed
						AND o.attempt < 2147483647
					RETURNING o.id, o.message_id, o.topic, o.message_key, o.payload, o.headers, o.attempt, o.created_at)
				SELECT t.id, t.message_id, t.topic, t.message_key, t.payload, t.headers, t.attempt, t.created_at
				FROM taken AS t JOIN unnest(ids) WITH ORDINALITY AS i (id, place) ON i.id = t.id ORDER BY i.place;
			changed := changed OR FOUND;
		END IF;
		-- Park the messages that are behind others, so that due messages are found.
		parked := 0;
		IF changed AND behind <> '{}' THEN
			behind := ARRAY(SELECT b.id FROM unnest(behind) AS b (id) EXCEPT SELECT i.id FROM unnest(ids) AS i (id) LIMIT page);
		END IF;
		IF behind <> '{}' AND may_park > 0 THEN
			parked := @S@.idem_p_park(behind, lanes);
			-- Another transaction has the locks of all these keys, so do not try those of more.
			may_park := CASE WHEN parked > 0 OR cardinality(lanes) < 100 THEN may_park - parked ELSE 0 END;
			is_parking := is_parking OR parked > 0;
		END IF;
		IF changed THEN
			RETURN;
		ELSIF parked > 0 AND may_park > 0 THEN
			page := least(page * 2, 5000);
			CONTINUE;
		-- Messages that other transactions hold, and messages behind others that cannot be parked, can precede
		-- the due ones in the index.
		ELSIF seen = wanted::bigint + page THEN
			passed := CASE WHEN last > since THEN '{}' ELSE passed END || coalesce(lanes, '{}');
			-- More messages than a page can be due at one time.
			page := least(page * 4, CASE WHEN last > since THEN 100000 ELSE 100000000 END);
			since := last;
			CONTINUE;
		END IF;
		-- The parked messages must be committed, so do not wait.
		IF is_parking OR deadline IS NULL OR clock_timestamp() >= deadline THEN
			RETURN;
		END IF;
		since := '-infinity';
		passed := '{}';
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
	-- Also those of dead messages, which another transaction can be requeueing.  A message that is
	-- committed later is not acknowledged, because its key would not be locked.
	SELECT array_agg(o.id), array_agg(DISTINCT o.key_hash) FILTER (WHERE o.key_hash IS NOT NULL) INTO ids, lanes
		FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state <> 'acked';
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
	RETURN @S@.idem_p_refuse(id, attempt, error, retry_after, true, NULL, NULL, false);
END

--@ idem_outbox_fail plpgsql
DECLARE
	clock CONSTANT timestamptz := clock_timestamp();
	pause interval;
BEGIN
	IF id IS NULL THEN
		PERFORM @S@.idem_p_null('id');
	ELSIF attempt IS NULL THEN
		PERFORM @S@.idem_p_null('attempt');
	ELSIF error IS NULL THEN
		PERFORM @S@.idem_p_null('error');
	END IF;
	IF retry_after IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(retry_after, 'retry_after');
	END IF;
	IF counted IS NULL THEN
		PERFORM @S@.idem_p_null('counted');
	END IF;
	IF max_age IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(max_age, 'max_age');
	END IF;
	PERFORM @S@.idem_p_check_array(schedule, 'schedule', schedule IS NOT NULL);
	FOREACH pause IN ARRAY coalesce(schedule, '{}') LOOP
		IF NOT isfinite(pause) OR clock + pause < clock THEN
			RAISE EXCEPTION USING ERRCODE = '22023',
				MESSAGE = format('argument "schedule" must %s', CASE WHEN isfinite(pause) THEN 'not be negative' ELSE 'be finite' END);
		END IF;
	END LOOP;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	-- Nothing has failed if the relay postpones a message.
	RETURN @S@.idem_p_refuse(id, attempt, nullif(error, ''), retry_after, counted, schedule, max_age, true);
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
	PERFORM @S@.idem_p_check_array(attempts, 'attempts', attempts IS NOT NULL);
	count := @S@.idem_p_element_count('{ids,attempts}', ARRAY[cardinality(ids), cardinality(attempts)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_ids := @S@.idem_p_spread(ids, count);
	all_attempts := @S@.idem_p_spread(attempts, count);
	PERFORM @S@.idem_p_lock_held(all_ids, all_attempts);
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
	PERFORM @S@.idem_p_check_array(attempts, 'attempts', attempts IS NOT NULL);
	count := @S@.idem_p_element_count('{ids,attempts}', ARRAY[cardinality(ids), cardinality(attempts)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	all_ids := @S@.idem_p_spread(ids, count);
	all_attempts := @S@.idem_p_spread(attempts, count);
	PERFORM @S@.idem_p_lock_held(all_ids, all_attempts);
	FOR i IN 1 .. count LOOP
		UPDATE @S@.idem_outbox AS o SET uncounted_attempts = o.uncounted_attempts + 1, available_at = clock_timestamp(), awaiting_ack = NULL
			WHERE o.id = all_ids[i] AND o.state = 'pending' AND o.awaiting_ack
				AND CASE WHEN all_attempts[i] IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = all_attempts[i] END;
		released := released + CASE WHEN FOUND THEN 1 ELSE 0 END;
	END LOOP;
	RETURN released;
END
