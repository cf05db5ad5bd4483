-- Once-only tokens.
--
-- The unique index decides which call is the first.  The INSERT waits for another
-- transaction that is using the token.

--@ helpers
CREATE FUNCTION @S@.idem_p_use_token(p_scope text, p_token text, ttl interval)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	expires timestamptz;
	started timestamptz;
	rounds int := 0;
BEGIN
	LOOP
		started := clock_timestamp();
		SELECT t.expires_at INTO expires FROM @S@.idem_tokens AS t WHERE t.token = p_token AND t.scope = p_scope;
		IF expires > clock_timestamp() THEN
			RETURN false;
		ELSIF NOT FOUND THEN
			INSERT INTO @S@.idem_tokens AS t (expires_at, used_at, scope, token)
				SELECT c.clock + coalesce(ttl, @S@.idem_p_setting('token_ttl')::float8 * '1 ms'::interval), c.clock, p_scope, p_token
				FROM clock_timestamp() AS c (clock)
				ON CONFLICT ON CONSTRAINT idem_tokens_pkey DO NOTHING;
		ELSE
			UPDATE @S@.idem_tokens AS t SET used_at = clock_timestamp(),
					expires_at = clock_timestamp() + coalesce(ttl, @S@.idem_p_setting('token_ttl')::float8 * '1 ms'::interval)
				WHERE t.token = p_token AND t.scope = p_scope AND t.expires_at <= clock_timestamp();
		END IF;
		IF FOUND THEN
			-- After a wait for another writer, take the current time.
			IF @S@.idem_p_has_waited(started) THEN
				UPDATE @S@.idem_tokens AS t SET used_at = clock_timestamp(),
						expires_at = clock_timestamp() + coalesce(ttl, @S@.idem_p_setting('token_ttl')::float8 * '1 ms'::interval)
					WHERE t.token = p_token AND t.scope = p_scope;
			END IF;
			RETURN true;
		END IF;
		rounds := rounds + 1;
		PERFORM @S@.idem_p_check_rounds(rounds, 'idem_tokens');
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_use_token(text, text, interval) IS
'Uses a token; returns whether this is the first time.';

--@ idem_once plpgsql
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	PERFORM @S@.idem_p_check_name(token, 'token');
	IF ttl IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(ttl, 'ttl');
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	RETURN @S@.idem_p_use_token(scope, token, ttl);
END

--@ idem_once_many plpgsql
DECLARE
	element record;
	first_places bigint[] := '{}';
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	PERFORM @S@.idem_p_check_names(tokens, 'tokens');
	IF ttl IS NOT NULL THEN
		PERFORM @S@.idem_p_check_interval(ttl, 'ttl');
	END IF;
	IF current_setting('transaction_read_only') = 'on' THEN
		PERFORM @S@.idem_p_check_writable();
	END IF;
	-- Sorted, so that two calls for the same tokens do not deadlock.
	FOR element IN SELECT DISTINCT ON (e.token COLLATE "C") e.token, e.place
		FROM unnest(tokens) WITH ORDINALITY AS e (token, place) ORDER BY e.token COLLATE "C", e.place
	LOOP
		IF @S@.idem_p_use_token(scope, element.token, ttl) THEN
			first_places := first_places || element.place;
		END IF;
	END LOOP;
	RETURN QUERY SELECT e.token FROM unnest(tokens) WITH ORDINALITY AS e (token, place)
		WHERE e.place = ANY (first_places) ORDER BY e.place;
END

--@ idem_once_at plpgsql
BEGIN
	PERFORM @S@.idem_p_check_name(scope, 'scope');
	PERFORM @S@.idem_p_check_name(token, 'token');
	RETURN (SELECT t.used_at FROM @S@.idem_tokens AS t
		WHERE t.token = idem_once_at.token AND t.scope = idem_once_at.scope AND t.expires_at > clock_timestamp());
END
