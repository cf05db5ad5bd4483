--@ idem_publish plpgsql
#variable_conflict use_column
DECLARE m uuid := gen_random_uuid(); t timestamptz;
BEGIN
	IF $1 IS NULL OR octet_length($1) NOT BETWEEN 1 AND 512 THEN PERFORM @S@.idem_p_check_name($1, 'topic'); END IF;
	IF $2 IS NULL THEN PERFORM @S@.idem_p_null('payload'); END IF;
	IF octet_length($3) NOT BETWEEN 1 AND 512 THEN PERFORM @S@.idem_p_check_name($3, 'message_key'); END IF;
	IF $5 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($5, 'deliver_after'); END IF;
	t := clock_timestamp();
	INSERT INTO @S@.idem_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, message_key, payload, headers)
		VALUES (nextval('@S@.idem_outbox_ids'), CASE WHEN $3 IS NOT NULL THEN @S@.idem_p_lane($1, $3) END, t, t + coalesce($5, '0 s'), 0, 0, true,
			m, 'pending', $1, $3, $2, $4);
	RETURN m;
END

--@ idem_publish_many plpgsql
#variable_conflict use_column
DECLARE n int; t timestamptz;
BEGIN
	PERFORM @S@.idem_p_check_names($1, 'topics');
	IF $2 IS NULL THEN PERFORM @S@.idem_p_null('payloads'); END IF;
	IF array_position($2, NULL) IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "payloads" must not contain nulls'; END IF;
	IF $3 IS NOT NULL THEN PERFORM @S@.idem_p_check_names(array_remove($3, NULL), 'message_keys'); END IF;
	IF $5 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($5, 'deliver_after'); END IF;
	n := @S@.idem_p_element_count(ARRAY['topics', 'payloads', 'message_keys', 'headers'], ARRAY[cardinality($1), cardinality($2), cardinality($3), cardinality($4)]);
	t := clock_timestamp();
	RETURN QUERY WITH m AS (SELECT o, gen_random_uuid() AS u, $1[CASE WHEN cardinality($1) = 1 THEN 1 ELSE o END] AS topic,
			$2[CASE WHEN cardinality($2) = 1 THEN 1 ELSE o END] AS payload, $3[CASE WHEN cardinality($3) = 1 THEN 1 ELSE o END] AS k,
			$4[CASE WHEN cardinality($4) = 1 THEN 1 ELSE o END] AS h
			FROM generate_series(1, n) AS o),
		i AS (INSERT INTO @S@.idem_outbox (id, key_hash, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, message_key, payload, headers)
			SELECT nextval('@S@.idem_outbox_ids'), CASE WHEN m.k IS NOT NULL THEN @S@.idem_p_lane(m.topic, m.k) END, t, t + coalesce($5, '0 s'), 0, 0, true,
				m.u, 'pending', m.topic, m.k, m.payload, m.h FROM m ORDER BY m.o)
		SELECT m.o, m.u FROM m ORDER BY m.o;
END

--@ idem_outbox_take plpgsql
#variable_conflict use_column
DECLARE
	wanted int := coalesce($1, 100); most int := @S@.idem_p_setting('outbox_max_attempts')::int; t timestamptz; lease_end timestamptz;
	heads bigint[]; ids bigint[]; dead int; until timestamptz; pause float8 := 0.01; lanes boolean;
BEGIN
	IF $4 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($4, 'wait'); until := clock_timestamp() + $4; END IF;
	IF $2 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($2, 'lease'); END IF;
	IF wanted < 1 THEN RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'argument "max_messages" must be positive'; END IF;
	IF $3 IS NOT NULL THEN PERFORM @S@.idem_p_check_names($3, 'topics'); END IF;
	LOOP
		t := clock_timestamp();
		lease_end := t + coalesce($2, '30 s');
		-- Heads of lanes and messages without one: what is locked here is this relay's, and with a head its lane.
		IF $3 IS NULL THEN
			SELECT array_agg(h.id), bool_or(h.key_hash IS NOT NULL) INTO heads, lanes FROM (
				SELECT o.id, o.key_hash FROM @S@.idem_outbox AS o
				WHERE o.in_due_index AND o.available_at <= t AND o.state = 'pending'
					AND (o.key_hash IS NULL OR o.id = (SELECT e.id FROM @S@.idem_outbox AS e WHERE e.key_hash = o.key_hash AND e.state = 'pending' ORDER BY e.id LIMIT 1))
				ORDER BY o.available_at LIMIT wanted FOR NO KEY UPDATE SKIP LOCKED) AS h;
		ELSE
			SELECT array_agg(h.id), bool_or(h.key_hash IS NOT NULL) INTO heads, lanes FROM (
				SELECT o.id, o.key_hash FROM @S@.idem_outbox AS o
				WHERE o.in_due_index AND o.available_at <= t AND o.state = 'pending' AND o.topic = ANY ($3)
					AND (o.key_hash IS NULL OR o.id = (SELECT e.id FROM @S@.idem_outbox AS e WHERE e.key_hash = o.key_hash AND e.state = 'pending' ORDER BY e.id LIMIT 1))
				ORDER BY o.available_at LIMIT wanted FOR NO KEY UPDATE SKIP LOCKED) AS h;
		END IF;
		ids := heads;
		IF lanes THEN
			-- With a snapshot newer than these locks: the run at the head of each key_hash, unless another has come to stand before it.
			SELECT array_agg(o.id) INTO ids FROM @S@.idem_outbox AS o WHERE o.id IN (
				SELECT o.id FROM @S@.idem_outbox AS o WHERE o.id = ANY (heads) AND o.key_hash IS NULL
				UNION ALL
				SELECT f.id FROM @S@.idem_outbox AS h CROSS JOIN LATERAL (
					SELECT r.id, r.attempt - r.uncounted_attempts AS tries, r.available_at,
						bool_and(r.available_at <= t) OVER w AND first_value(r.id) OVER w = h.id
							AND coalesce(bool_and(r.attempt - r.uncounted_attempts < greatest(most / 2, 1)) OVER before, true) AS runs
					FROM (SELECT e.id, e.attempt, e.uncounted_attempts, e.available_at FROM @S@.idem_outbox AS e WHERE e.key_hash = h.key_hash AND e.state = 'pending'
						ORDER BY e.id LIMIT wanted) AS r
					WINDOW w AS (ORDER BY r.id), before AS (ORDER BY r.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS f
				WHERE h.id = ANY (heads) AND h.key_hash IS NOT NULL AND f.runs);
			SELECT array_agg(x.id) INTO ids FROM (SELECT o.id FROM @S@.idem_outbox AS o WHERE o.id = ANY (ids) AND o.state = 'pending' AND o.available_at <= t
				ORDER BY o.id LIMIT wanted FOR NO KEY UPDATE SKIP LOCKED) AS x;
		END IF;
		dead := 0;
		IF ids IS NOT NULL THEN
			UPDATE @S@.idem_outbox AS o SET state = 'dead', in_due_index = false, last_error = coalesce(o.last_error, 'The last lease ran out.')
				WHERE o.id = ANY (ids) AND o.attempt - o.uncounted_attempts >= most;
			GET DIAGNOSTICS dead = ROW_COUNT;
			RETURN QUERY WITH u AS (UPDATE @S@.idem_outbox AS o SET attempt = o.attempt + 1, awaiting_ack = true, in_due_index = true, available_at = lease_end
					WHERE o.id = ANY (ids) AND o.state = 'pending' AND o.attempt - o.uncounted_attempts < most
					RETURNING o.id, o.message_id, o.topic, o.message_key, o.payload, o.headers, o.attempt, o.created_at)
				SELECT u.id, u.message_id, u.topic::text, u.message_key::text, u.payload, u.headers, u.attempt, u.created_at FROM u ORDER BY array_position(ids, u.id);
			IF FOUND OR dead > 0 THEN RETURN; END IF;
		END IF;
		IF until IS NULL OR clock_timestamp() >= until THEN RETURN; END IF;
		PERFORM pg_sleep(least(pause, greatest(extract(epoch FROM until - clock_timestamp()), 0.001)));
		pause := least(pause * 1.5, 0.25);
	END LOOP;
END

--@ idem_outbox_ack plpgsql
#variable_conflict use_column
DECLARE n int;
BEGIN
	IF $1 IS NULL THEN PERFORM @S@.idem_p_null('ids'); END IF;
	IF array_position($1, NULL) IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "ids" must not contain nulls'; END IF;
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY ($1) AND o.state <> 'acked' ORDER BY o.id FOR NO KEY UPDATE;
	IF @S@.idem_p_setting('outbox_retention')::float8 = 0 THEN
		DELETE FROM @S@.idem_outbox AS o WHERE o.id = ANY ($1) AND o.state <> 'acked';
	ELSE
		UPDATE @S@.idem_outbox AS o SET state = 'acked', acked_at = clock_timestamp(), in_due_index = false
			WHERE o.id = ANY ($1) AND o.state <> 'acked';
	END IF;
	GET DIAGNOSTICS n = ROW_COUNT;
	RETURN n;
END

--@ idem_outbox_nack plpgsql
#variable_conflict use_column
DECLARE r record; tries int; most int := @S@.idem_p_setting('outbox_max_attempts')::int; s text;
BEGIN
	IF $1 IS NULL THEN PERFORM @S@.idem_p_null('id'); END IF;
	IF $3 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($3, 'retry_after'); END IF;
	SELECT o.* INTO r FROM @S@.idem_outbox AS o WHERE o.id = $1 FOR NO KEY UPDATE;
	IF NOT FOUND OR r.state = 'acked' OR ($4 IS NOT NULL AND ($4 <> r.attempt OR r.awaiting_ack IS NULL)) THEN RETURN 'lost'; END IF;
	IF r.state = 'dead' THEN RETURN 'dead'; END IF;
	tries := r.attempt - r.uncounted_attempts;
	s := CASE WHEN tries < most THEN 'pending' ELSE 'dead' END;
	UPDATE @S@.idem_outbox AS o SET state = s, in_due_index = tries < most, awaiting_ack = CASE WHEN o.awaiting_ack IS NOT NULL THEN false END,
			available_at = clock_timestamp() + coalesce($3, least(power(2, least(greatest(tries, 1) - 1, 20)), 3600) * (0.5 + 0.5 * random()) * interval '1 s'),
			last_error = coalesce(left($2, @S@.idem_p_setting('max_response_size')::int), o.last_error)
		WHERE o.id = $1;
	RETURN s;
END

--@ idem_outbox_requeue plpgsql
#variable_conflict use_column
DECLARE n int;
BEGIN
	IF array_position($1, NULL) IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "ids" must not contain nulls'; END IF;
	PERFORM FROM @S@.idem_outbox AS o WHERE o.state = 'dead' AND ($1 IS NULL OR o.id = ANY ($1)) ORDER BY o.id FOR NO KEY UPDATE;
	UPDATE @S@.idem_outbox AS o SET state = 'pending', uncounted_attempts = o.attempt, awaiting_ack = NULL, in_due_index = true, available_at = clock_timestamp()
		WHERE o.state = 'dead' AND ($1 IS NULL OR o.id = ANY ($1));
	GET DIAGNOSTICS n = ROW_COUNT;
	RETURN n;
END

--@ idem_outbox_extend plpgsql
#variable_conflict use_column
DECLARE i int; n int; a int;
BEGIN
	IF $1 IS NULL THEN PERFORM @S@.idem_p_null('ids'); END IF;
	IF array_position($1, NULL) IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "ids" must not contain nulls'; END IF;
	IF $2 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($2, 'lease'); END IF;
	n := @S@.idem_p_element_count(ARRAY['ids', 'attempts'], ARRAY[cardinality($1), cardinality($3)]);
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY ($1) AND o.state = 'pending' ORDER BY o.id FOR NO KEY UPDATE;
	FOR i IN 1 .. n LOOP
		a := $3[CASE WHEN cardinality($3) = 1 THEN 1 ELSE i END];
		UPDATE @S@.idem_outbox AS o SET available_at = clock_timestamp() + coalesce($2, '30 s')
			WHERE o.id = $1[CASE WHEN cardinality($1) = 1 THEN 1 ELSE i END] AND o.state = 'pending' AND o.awaiting_ack
				AND CASE WHEN a IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = a END;
		IF FOUND THEN RETURN NEXT $1[CASE WHEN cardinality($1) = 1 THEN 1 ELSE i END]; END IF;
	END LOOP;
END

--@ idem_outbox_release plpgsql
#variable_conflict use_column
DECLARE i int; n int; a int; c int := 0;
BEGIN
	IF $1 IS NULL THEN PERFORM @S@.idem_p_null('ids'); END IF;
	IF array_position($1, NULL) IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "ids" must not contain nulls'; END IF;
	n := @S@.idem_p_element_count(ARRAY['ids', 'attempts'], ARRAY[cardinality($1), cardinality($2)]);
	PERFORM FROM @S@.idem_outbox AS o WHERE o.id = ANY ($1) AND o.state = 'pending' ORDER BY o.id FOR NO KEY UPDATE;
	FOR i IN 1 .. n LOOP
		a := $2[CASE WHEN cardinality($2) = 1 THEN 1 ELSE i END];
		UPDATE @S@.idem_outbox AS o SET uncounted_attempts = o.uncounted_attempts + 1, available_at = clock_timestamp(), awaiting_ack = NULL, in_due_index = true
			WHERE o.id = $1[CASE WHEN cardinality($1) = 1 THEN 1 ELSE i END] AND o.state = 'pending' AND o.awaiting_ack
				AND CASE WHEN a IS NULL THEN o.available_at > clock_timestamp() ELSE o.attempt = a END;
		IF FOUND THEN c := c + 1; END IF;
	END LOOP;
	RETURN c;
END

--@ helpers
CREATE FUNCTION @S@.idem_p_lane(topic text, message_key text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT ('x' || encode(substr(sha256(int4send(octet_length(b.topic)) || b.topic
		|| int4send(octet_length(b.message_key)) || b.message_key), 1, 8), 'hex'))::bit(64)::bigint
	FROM (SELECT convert_to(topic, 'UTF8'), convert_to(message_key, 'UTF8')) AS b (topic, message_key)
$$;
