-- User actions.
--
-- A transaction writes a state only after it has advanced the counter, so the row
-- lock of the counter protects the state.  A stale call only reads.

--@ helpers
CREATE FUNCTION @S@.idem_p_check_action_id(action_id bigint)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	allowed CONSTANT float8 := @S@.idem_p_setting('max_action_id_lead')::float8;
	lead CONSTANT float8 := action_id::float8 - extract(epoch FROM clock_timestamp())::float8 * 1000;
BEGIN
	IF action_id IS NULL THEN
		PERFORM @S@.idem_p_null('action_id');
	ELSIF allowed > 0 AND lead > allowed THEN
		RAISE EXCEPTION USING ERRCODE = 'ID005',
			MESSAGE = format('action id %s is too far ahead of the server''s clock', action_id),
			DETAIL = format('As milliseconds since 1970 it is %s ms ahead; %s ms are allowed.',
				round(lead::numeric), round(allowed::numeric)),
			HINT = 'Correct the clock of the device, or let the owner call idem_configure(''max_action_id_lead'', ...).';
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_action_id(bigint) IS
'Raises 22004, and ID005 for an action id beyond idempotency.max_action_id_lead.';

CREATE FUNCTION @S@.idem_p_check_entity(user_id text, entity_type text, entity_id text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	PERFORM @S@.idem_p_check_name(user_id, 'user_id');
	PERFORM @S@.idem_p_check_name(entity_type, 'entity_type');
	PERFORM @S@.idem_p_check_name(entity_id, 'entity_id');
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_entity(text, text, text) IS
'Raises 22004 or 22023 for the names of a user and an entity.';

CREATE FUNCTION @S@.idem_p_advance(p_user text, p_type text, p_entity text, p_action_id bigint,
	OUT advanced boolean, OUT latest bigint)
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	rounds int := 0;
BEGIN
	LOOP
		SELECT v.last_action_id INTO latest FROM @S@.idem_action_versions AS v
			WHERE v.user_id = p_user AND v.entity_type = p_type AND v.entity_id = p_entity;
		IF latest >= p_action_id THEN
			advanced := false;
			RETURN;
		END IF;
		INSERT INTO @S@.idem_action_versions AS v (last_action_id, user_id, entity_type, entity_id)
			VALUES (p_action_id, p_user, p_type, p_entity)
			ON CONFLICT ON CONSTRAINT idem_action_versions_pkey
			DO UPDATE SET last_action_id = EXCLUDED.last_action_id WHERE v.last_action_id < EXCLUDED.last_action_id;
		IF FOUND THEN
			advanced := true;
			latest := p_action_id;
			RETURN;
		END IF;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_action_versions');
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_advance(text, text, text, bigint) IS
'Advances a version counter; returns whether it did, and the counter.';

-- If p_active is NULL, the state is inverted.  Clearing an inactive state writes nothing.
CREATE FUNCTION @S@.idem_p_write_action(p_user text, p_type text, p_entity text, p_action text, p_active boolean, p_action_id bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	will_be boolean := false;
	written timestamptz;
BEGIN
	IF NOT p_active THEN
		UPDATE @S@.idem_user_actions AS a SET is_active = false, last_action_id = p_action_id, updated_at = clock_timestamp()
			WHERE a.user_id = p_user AND a.entity_type = p_type AND a.entity_id = p_entity AND a.action_type = p_action
				AND a.is_active
			RETURNING a.updated_at INTO written;
	ELSE
		INSERT INTO @S@.idem_user_actions AS a (last_action_id, updated_at, is_active, user_id, entity_type, entity_id, action_type)
			VALUES (p_action_id, clock_timestamp(), true, p_user, p_type, p_entity, p_action)
			ON CONFLICT ON CONSTRAINT idem_user_actions_pkey DO UPDATE SET
				last_action_id = EXCLUDED.last_action_id, updated_at = clock_timestamp(), is_active = coalesce(p_active, NOT a.is_active)
			RETURNING a.is_active, a.updated_at INTO will_be, written;
	END IF;
	-- The time of an action is the time of its write, not the time before a wait for the row.
	IF @S@.idem_p_has_waited(written) THEN
		UPDATE @S@.idem_user_actions AS a SET updated_at = clock_timestamp()
			WHERE a.user_id = p_user AND a.entity_type = p_type AND a.entity_id = p_entity AND a.action_type = p_action;
	END IF;
	RETURN will_be;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_write_action(text, text, text, text, boolean, bigint) IS
'Writes the state of an action, whose counter this transaction has advanced; returns the new state.';

CREATE FUNCTION @S@.idem_p_act(p_user text, p_type text, p_entity text, p_action text, p_active boolean, p_action_id bigint,
	p_excludes text[])
RETURNS @S@.idem_action_result
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	counter record;
	result @S@.idem_action_result;
	excluded text;
BEGIN
	LOOP
		counter := @S@.idem_p_advance(p_user, p_type, p_entity, p_action_id);
		IF counter.advanced THEN
			result.is_active := @S@.idem_p_write_action(p_user, p_type, p_entity, p_action, p_active, p_action_id);
			IF p_active THEN
				FOREACH excluded IN ARRAY coalesce(p_excludes, '{}') LOOP
					PERFORM @S@.idem_p_write_action(p_user, p_type, p_entity, excluded, false, p_action_id);
				END LOOP;
			END IF;
			result.last_action_id := p_action_id;
			result.processed := true;
			RETURN result;
		END IF;
		-- Counter and state of one snapshot.
		SELECT coalesce(a.is_active, false), v.last_action_id, false INTO result
			FROM @S@.idem_action_versions AS v
			LEFT JOIN @S@.idem_user_actions AS a ON a.user_id = v.user_id AND a.entity_type = v.entity_type
				AND a.entity_id = v.entity_id AND a.action_type = p_action
			WHERE v.user_id = p_user AND v.entity_type = p_type AND v.entity_id = p_entity;
		IF result.last_action_id >= p_action_id THEN
			RETURN result;
		END IF;
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_act(text, text, text, text, boolean, bigint, text[]) IS
'Sets an action, or flips it if the state is NULL, and clears excluded ones, if the action id is the latest.';

--@ idem_try_advance plpgsql
DECLARE
	counter record;
BEGIN
	PERFORM @S@.idem_p_check_entity(user_id, entity_type, entity_id);
	PERFORM @S@.idem_p_check_action_id(action_id);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	counter := @S@.idem_p_advance(user_id, entity_type, entity_id, action_id);
	RETURN (counter.advanced, counter.latest)::@S@.idem_advance_result;
END

--@ idem_toggle plpgsql
BEGIN
	PERFORM @S@.idem_p_check_entity(user_id, entity_type, entity_id);
	PERFORM @S@.idem_p_check_name(action_type, 'action_type');
	PERFORM @S@.idem_p_check_action_id(action_id);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	RETURN @S@.idem_p_act(user_id, entity_type, entity_id, action_type, NULL, action_id, NULL);
END

--@ idem_set plpgsql
BEGIN
	PERFORM @S@.idem_p_check_entity(user_id, entity_type, entity_id);
	PERFORM @S@.idem_p_check_name(action_type, 'action_type');
	IF active IS NULL THEN
		PERFORM @S@.idem_p_null('active');
	END IF;
	PERFORM @S@.idem_p_check_action_id(action_id);
	IF excludes IS NOT NULL THEN
		PERFORM @S@.idem_p_check_names(excludes, 'excludes');
		IF action_type = ANY (excludes) THEN
			RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'an action type cannot exclude itself';
		END IF;
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	RETURN @S@.idem_p_act(user_id, entity_type, entity_id, action_type, active, action_id, excludes);
END

--@ idem_is_active plpgsql
BEGIN
	PERFORM @S@.idem_p_check_entity(user_id, entity_type, entity_id);
	PERFORM @S@.idem_p_check_name(action_type, 'action_type');
	RETURN coalesce((SELECT a.is_active FROM @S@.idem_user_actions AS a
		WHERE a.user_id = idem_is_active.user_id AND a.entity_type = idem_is_active.entity_type
			AND a.entity_id = idem_is_active.entity_id AND a.action_type = idem_is_active.action_type), false);
END

--@ idem_action_states plpgsql
BEGIN
	PERFORM @S@.idem_p_check_name(user_id, 'user_id');
	PERFORM @S@.idem_p_check_name(entity_type, 'entity_type');
	PERFORM @S@.idem_p_check_array(entity_ids, 'entity_ids', true);
	PERFORM @S@.idem_p_check_names(entity_ids, 'entity_ids');
	RETURN QUERY SELECT a.entity_id, a.action_type, a.is_active, v.last_action_id
		FROM @S@.idem_user_actions AS a
		LEFT JOIN @S@.idem_action_versions AS v ON v.user_id = a.user_id AND v.entity_type = a.entity_type AND v.entity_id = a.entity_id
		WHERE a.user_id = idem_action_states.user_id AND a.entity_type = idem_action_states.entity_type
			AND a.entity_id = ANY (entity_ids)
		ORDER BY a.entity_id, a.action_type;
END

--@ idem_forget_user plpgsql
DECLARE
	deleted bigint := 0;
	count bigint;
	counter record;
BEGIN
	PERFORM @S@.idem_p_check_name(user_id, 'user_id');
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	-- The counter first, because its row lock blocks other writers of its actions.
	FOR counter IN SELECT v.entity_type, v.entity_id FROM @S@.idem_action_versions AS v
		WHERE v.user_id = idem_forget_user.user_id ORDER BY v.entity_type, v.entity_id
	LOOP
		DELETE FROM @S@.idem_action_versions AS v
			WHERE v.user_id = idem_forget_user.user_id AND v.entity_type = counter.entity_type AND v.entity_id = counter.entity_id;
		CONTINUE WHEN NOT FOUND;
		deleted := deleted + 1;
		DELETE FROM @S@.idem_user_actions AS a
			WHERE a.user_id = idem_forget_user.user_id AND a.entity_type = counter.entity_type AND a.entity_id = counter.entity_id;
		GET DIAGNOSTICS count = ROW_COUNT;
		deleted := deleted + count;
	END LOOP;
	-- Actions without a counter.  The lock of the row makes sure that there is still none.
	FOR counter IN SELECT a.entity_type, a.entity_id, a.action_type FROM @S@.idem_user_actions AS a
		WHERE a.user_id = idem_forget_user.user_id ORDER BY a.entity_type, a.entity_id, a.action_type
	LOOP
		PERFORM FROM @S@.idem_user_actions AS a
			WHERE a.user_id = idem_forget_user.user_id AND a.entity_type = counter.entity_type
				AND a.entity_id = counter.entity_id AND a.action_type = counter.action_type FOR UPDATE;
		DELETE FROM @S@.idem_user_actions AS a
			WHERE a.user_id = idem_forget_user.user_id AND a.entity_type = counter.entity_type
				AND a.entity_id = counter.entity_id AND a.action_type = counter.action_type
				AND NOT EXISTS (SELECT FROM @S@.idem_action_versions AS v
					WHERE v.user_id = a.user_id AND v.entity_type = a.entity_type AND v.entity_id = a.entity_id);
		GET DIAGNOSTICS count = ROW_COUNT;
		deleted := deleted + count;
	END LOOP;
	RETURN deleted;
END

--@ idem_try_advance_many plpgsql
DECLARE
	count int;
	element record;
	counter record;
	results @S@.idem_advance_many_result[];
BEGIN
	PERFORM @S@.idem_p_check_array(user_ids, 'user_ids', true);
	PERFORM @S@.idem_p_check_names(user_ids, 'user_ids');
	PERFORM @S@.idem_p_check_array(entity_types, 'entity_types', true);
	PERFORM @S@.idem_p_check_names(entity_types, 'entity_types');
	PERFORM @S@.idem_p_check_array(entity_ids, 'entity_ids', true);
	PERFORM @S@.idem_p_check_names(entity_ids, 'entity_ids');
	PERFORM @S@.idem_p_check_array(action_ids, 'action_ids', true);
	PERFORM @S@.idem_p_check_action_id(a.id) FROM unnest(action_ids) AS a (id);
	count := @S@.idem_p_element_count('{user_ids,entity_types,entity_ids,action_ids}',
		ARRAY[cardinality(user_ids), cardinality(entity_types), cardinality(entity_ids), cardinality(action_ids)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	FOR element IN SELECT e.* FROM unnest(@S@.idem_p_spread(user_ids, count), @S@.idem_p_spread(entity_types, count),
			@S@.idem_p_spread(entity_ids, count), @S@.idem_p_spread(action_ids, count))
		WITH ORDINALITY AS e (user_id, entity_type, entity_id, action_id, place)
		ORDER BY e.user_id COLLATE "C", e.entity_type COLLATE "C", e.entity_id COLLATE "C", e.place
	LOOP
		counter := @S@.idem_p_advance(element.user_id, element.entity_type, element.entity_id, element.action_id);
		results[element.place] := (element.place, counter.advanced, counter.latest);
	END LOOP;
	RETURN QUERY SELECT r.* FROM unnest(results) AS r;
END

--@ idem_set_many plpgsql
DECLARE
	count int;
	element record;
	state @S@.idem_action_result;
	results @S@.idem_set_many_result[];
BEGIN
	PERFORM @S@.idem_p_check_array(user_ids, 'user_ids', true);
	PERFORM @S@.idem_p_check_names(user_ids, 'user_ids');
	PERFORM @S@.idem_p_check_array(entity_types, 'entity_types', true);
	PERFORM @S@.idem_p_check_names(entity_types, 'entity_types');
	PERFORM @S@.idem_p_check_array(entity_ids, 'entity_ids', true);
	PERFORM @S@.idem_p_check_names(entity_ids, 'entity_ids');
	PERFORM @S@.idem_p_check_array(action_types, 'action_types', true);
	PERFORM @S@.idem_p_check_names(action_types, 'action_types');
	PERFORM @S@.idem_p_check_array(actives, 'actives', true);
	PERFORM @S@.idem_p_check_array(action_ids, 'action_ids', true);
	PERFORM @S@.idem_p_check_action_id(a.id) FROM unnest(action_ids) AS a (id);
	count := @S@.idem_p_element_count('{user_ids,entity_types,entity_ids,action_types,actives,action_ids}',
		ARRAY[cardinality(user_ids), cardinality(entity_types), cardinality(entity_ids), cardinality(action_types),
			cardinality(actives), cardinality(action_ids)]);
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	FOR element IN SELECT e.* FROM unnest(@S@.idem_p_spread(user_ids, count), @S@.idem_p_spread(entity_types, count),
			@S@.idem_p_spread(entity_ids, count), @S@.idem_p_spread(action_types, count), @S@.idem_p_spread(actives, count),
			@S@.idem_p_spread(action_ids, count))
		WITH ORDINALITY AS e (user_id, entity_type, entity_id, action_type, active, action_id, place)
		ORDER BY e.user_id COLLATE "C", e.entity_type COLLATE "C", e.entity_id COLLATE "C", e.place
	LOOP
		state := @S@.idem_p_act(element.user_id, element.entity_type, element.entity_id, element.action_type,
			element.active, element.action_id, NULL);
		results[element.place] := (element.place, state.is_active, state.last_action_id, state.processed);
	END LOOP;
	RETURN QUERY SELECT r.* FROM unnest(results) AS r;
END
