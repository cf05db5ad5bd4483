-- Settings, and views that replace the catalogs of extensions.
--
-- Without a library, the server accepts any value for a setting from any session.
-- So the operator's settings are in a table that only idem_configure() writes.
-- For speed, they are read from a function that is made from that table and that
-- the planner replaces by a constant.  A session's own SET works for the defaults
-- of calls, and for all settings if the session's role has the rights of the
-- owner.

--@ first
CREATE TABLE @S@.idem_p_installation (
	seed bytea NOT NULL,
	version text NOT NULL,
	is_only boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (is_only)
);
COMMENT ON TABLE @S@.idem_p_installation IS
'One row: the secret that goes into the numbers of advisory locks, and the version of the portable edition.';
INSERT INTO @S@.idem_p_installation
	SELECT pg_catalog.sha256(pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
			OPERATOR(pg_catalog.||) pg_catalog.uuid_send(pg_catalog.gen_random_uuid())), '@VERSION@';

-- The locks of lanes are locks of rows, because any role of the database can hold
-- an advisory lock.
CREATE TABLE @S@.idem_p_lanes (
	number int NOT NULL PRIMARY KEY
) WITH (fillfactor = 50);
COMMENT ON TABLE @S@.idem_p_lanes IS
'The rows whose locks are those of lanes, that is, of the keys of messages.';
INSERT INTO @S@.idem_p_lanes SELECT n FROM pg_catalog.generate_series(0, 4095) AS g (n);

-- A dump that has only data can be restored into a new installation, which keeps
-- its own rows.  A dump that has only the schema is restored without these rows; then
-- the functions make them when they need one, or those of another dump come later.
CREATE FUNCTION @S@.idem_p_keep_rows()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF TG_TABLE_NAME = 'idem_p_installation' THEN
		RETURN CASE WHEN NOT EXISTS (SELECT FROM @S@.idem_p_installation) THEN NEW END;
	END IF;
	RETURN CASE WHEN NOT EXISTS (SELECT FROM @S@.idem_p_lanes AS l WHERE l.number = NEW.number) THEN NEW END;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_keep_rows() IS
'Ignores new rows of a table whose rows are part of the installation, if it has them.';
CREATE TRIGGER idem_p_keep_rows BEFORE INSERT ON @S@.idem_p_installation
	FOR EACH ROW EXECUTE FUNCTION @S@.idem_p_keep_rows();
CREATE TRIGGER idem_p_keep_rows BEFORE INSERT ON @S@.idem_p_lanes
	FOR EACH ROW EXECUTE FUNCTION @S@.idem_p_keep_rows();
-- Also if a subscription copies the rows.
ALTER TABLE @S@.idem_p_installation ENABLE ALWAYS TRIGGER idem_p_keep_rows;
ALTER TABLE @S@.idem_p_lanes ENABLE ALWAYS TRIGGER idem_p_keep_rows;

CREATE FUNCTION @S@.idem_p_complete_installation()
RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	INSERT INTO @S@.idem_p_installation AS i
		SELECT sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), '@VERSION@'
		ON CONFLICT DO NOTHING;
	INSERT INTO @S@.idem_p_lanes SELECT n FROM generate_series(0, 4095) AS g (n) ON CONFLICT DO NOTHING;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_complete_installation() IS
'Makes the rows of the installation that are missing after a dump was restored without data.';

CREATE TABLE @S@.idem_p_configuration (
	name text COLLATE "C" NOT NULL PRIMARY KEY,
	value text COLLATE "C" NOT NULL
);
COMMENT ON TABLE @S@.idem_p_configuration IS
'The operator''s settings, in their units. Written by idem_configure() only.';

SELECT pg_catalog.pg_extension_config_dump('idem_p_configuration', '');

-- The columns of pg_extension, whether or not this is an extension.
CREATE VIEW @S@.idem_p_extension AS
	SELECT 0::pg_catalog.oid AS oid, 'idempotency'::pg_catalog.name AS extname, c.relowner AS extowner,
		c.relnamespace AS extnamespace, (SELECT i.version FROM @S@.idem_p_installation AS i) AS extversion
	FROM pg_catalog.pg_class AS c WHERE c.oid OPERATOR(pg_catalog.=) '@S@.idem_p_installation'::pg_catalog.regclass::pg_catalog.oid
	-- So that no role can update the catalog through this view, with the rights of its owner
	OFFSET 0;
COMMENT ON VIEW @S@.idem_p_extension IS
'The installation, with the columns of pg_extension.';

-- Only the tables of both editions.  The constants keep the plans short.
CREATE VIEW @S@.idem_p_member AS
	SELECT 'pg_catalog.pg_extension'::pg_catalog.regclass::pg_catalog.oid AS refclassid, 0::pg_catalog.oid AS refobjid,
		m.classid, m.objid, 'e'::pg_catalog."char" AS deptype
	FROM (
		SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid, p.oid FROM pg_catalog.pg_proc AS p
		WHERE p.pronamespace OPERATOR(pg_catalog.=) '@S@'::pg_catalog.regnamespace::pg_catalog.oid
			AND pg_catalog.starts_with(p.proname::pg_catalog.text, 'idem_')
		UNION ALL
		SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid, c.oid FROM pg_catalog.pg_class AS c
		WHERE c.relnamespace OPERATOR(pg_catalog.=) '@S@'::pg_catalog.regnamespace::pg_catalog.oid
			AND c.relkind OPERATOR(pg_catalog.=) ANY ('{r,S,v}'::pg_catalog."char"[])
			AND pg_catalog.starts_with(c.relname::pg_catalog.text, 'idem_')
			AND (c.relkind OPERATOR(pg_catalog.<>) 'r'::pg_catalog."char"
				OR NOT pg_catalog.starts_with(c.relname::pg_catalog.text, 'idem_p_'))
		UNION ALL
		SELECT 'pg_catalog.pg_type'::pg_catalog.regclass::pg_catalog.oid, t.oid FROM pg_catalog.pg_type AS t
		JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) t.typrelid
		WHERE t.typnamespace OPERATOR(pg_catalog.=) '@S@'::pg_catalog.regnamespace::pg_catalog.oid
			AND c.relkind OPERATOR(pg_catalog.=) 'c'::pg_catalog."char"
			AND pg_catalog.starts_with(t.typname::pg_catalog.text, 'idem_')
	) AS m (classid, objid);
COMMENT ON VIEW @S@.idem_p_member IS
'The objects of the installation, with the columns of pg_depend.';

-- kind is the type of the value; ms and bytes have units.  anyone means that any
-- session can set it for itself.
CREATE VIEW @S@.idem_p_known_settings (name, kind, fallback, anyone, lowest, highest, words) AS
	VALUES
	('default_ttl', 'ms', '86400000', true, 0::pg_catalog.float8, 3155760000000::pg_catalog.float8, NULL::pg_catalog.text[]),
	('default_lease', 'ms', '60000', true, 0, 3155760000000, NULL),
	('max_lease', 'ms', '43200000', false, 0, 3155760000000, NULL),
	('max_wait', 'ms', '600000', false, 0, 3155760000000, NULL),
	('key_min_length', 'int', '16', false, 1, 255, NULL),
	('key_max_length', 'int', '128', false, 1, 255, NULL),
	('key_format', 'word', 'token', false, NULL, NULL, '{token,printable,uuid}'),
	('expired_key_policy', 'word', 'reuse', false, NULL, NULL, '{reuse,reject}'),
	('tombstone_retention', 'ms', '604800000', false, 0, 3155760000000, NULL),
	('max_action_id_lead', 'ms', '0', false, 0, 3155760000000, NULL),
	('max_attempts', 'int', '10', false, 1, 2147483647, NULL),
	('require_request_hash', 'bool', 'off', false, NULL, NULL, NULL),
	('token_ttl', 'ms', '604800000', true, 0, 3155760000000, NULL),
	('outbox_max_attempts', 'int', '10', false, 1, 2147483647, NULL),
	('outbox_retention', 'ms', '604800000', false, 0, 3155760000000, NULL),
	('cleanup_interval', 'ms', '60000', false, 0, 3155760000000, NULL),
	('cleanup_batch_size', 'int', '10000', false, 1, 2147483647, NULL),
	('max_message_size', 'bytes', '16777216', false, 1, 268435456, NULL),
	('max_response_size', 'bytes', '1048576', false, 0, 2147483647, NULL),
	('health_worker', 'ms', '300000', false, 0, 3155760000000, NULL),
	('health_cleanup_lag', 'ms', '600000', false, 0, 3155760000000, NULL),
	('health_outbox_oldest', 'ms', '300000', false, 0, 3155760000000, NULL),
	('health_outbox_blocked', 'ms', '60000', false, 0, 3155760000000, NULL),
	('health_dead_letters', 'int', '1', false, 0, 2147483647, NULL),
	('health_stuck_leases', 'int', '10', false, 0, 2147483647, NULL),
	('health_bloat', 'real', '0.5', false, 0, 1, NULL),
	('health_clock', 'ms', '1000', false, 0, 3155760000000, NULL),
	('health_tables', 'int', '1', false, 0, 2147483647, NULL),
	('health_sequences', 'int', '1', false, 0, 2147483647, NULL),
	('health_moves', 'ms', '60000', false, 0, 3155760000000, NULL);
COMMENT ON VIEW @S@.idem_p_known_settings IS
'The settings that the portable edition has, with their defaults.';

CREATE FUNCTION @S@.idem_p_parse_setting(name text, value text)
RETURNS text
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	known @S@.idem_p_known_settings;
	parts text[];
	number float8;
BEGIN
	SELECT k.* INTO known FROM @S@.idem_p_known_settings AS k WHERE k.name = idem_p_parse_setting.name;
	IF NOT FOUND THEN
		RAISE EXCEPTION USING ERRCODE = '42704',
			MESSAGE = format('unrecognized configuration parameter "idempotency.%s"', name);
	END IF;
	-- Without a handler of errors, because calls in parallel plans read settings.
	CASE known.kind
		WHEN 'word' THEN
			IF lower(value) = ANY (known.words) THEN
				RETURN lower(value);
			END IF;
		WHEN 'bool' THEN
			IF lower(value) ~ '^[[:space:]]*(t(r(ue?)?)?|y(es?)?|on|1)[[:space:]]*$' THEN
				RETURN 'on';
			ELSIF lower(value) ~ '^[[:space:]]*(f(a(l(se?)?)?)?|no?|off?|0)[[:space:]]*$' THEN
				RETURN 'off';
			END IF;
		ELSE
			parts := regexp_match(value,
				'^[[:space:]]*(?=[.]?[0-9])([0-9]{0,18}[.]?[0-9]{0,18}(?:[eE][+-]?[0-9]{1,2})?)[[:space:]]*([a-zA-Z]*)[[:space:]]*$');
			number := parts[1]::float8 * CASE parts[2] WHEN '' THEN 1
				ELSE CASE known.kind
					WHEN 'ms' THEN CASE parts[2] WHEN 'us' THEN 0.001 WHEN 'ms' THEN 1 WHEN 's' THEN 1000
						WHEN 'min' THEN 60000 WHEN 'h' THEN 3600000 WHEN 'd' THEN 86400000 END
					WHEN 'bytes' THEN CASE parts[2] WHEN 'B' THEN 1 WHEN 'kB' THEN 1024 WHEN 'MB' THEN 1048576
						WHEN 'GB' THEN 1073741824 WHEN 'TB' THEN 1099511627776 END
					END END;
			IF number BETWEEN known.lowest AND known.highest
				AND (known.kind NOT IN ('int', 'bytes') OR number = trunc(number)) THEN
				RETURN number::numeric::text;
			END IF;
	END CASE;
	RAISE EXCEPTION USING ERRCODE = '22023',
		MESSAGE = format('invalid value for parameter "idempotency.%s": "%s"', name, value);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_parse_setting(text, text) IS
'The value of a setting without its unit: in milliseconds, bytes or the like. Raises 42704 for an unknown setting, 22023 for a bad value.';

-- Runs as the owner, because only the owner can replace the function.  Another role can
-- make a trigger of its own table call this, whose row has types with casts of that role.
CREATE FUNCTION @S@.idem_p_apply_configuration()
RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF TG_RELID <> '@S@.idem_p_configuration'::regclass THEN
		RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'trigger function of another table';
	END IF;
	EXECUTE format('CREATE OR REPLACE FUNCTION %I.idem_p_configured(name text) RETURNS text'
		' LANGUAGE sql STABLE PARALLEL SAFE COST 1 AS %L', TG_TABLE_SCHEMA,
		(SELECT format('SELECT CASE $1 %s END', string_agg(format('WHEN %L THEN %L', k.name,
				coalesce(@S@.idem_p_parse_setting(k.name, c.value), k.fallback)), ' '))
			FROM @S@.idem_p_known_settings AS k
			LEFT JOIN @S@.idem_p_configuration AS c ON c.name = k.name));
	RETURN NULL;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_apply_configuration() IS
'Makes idem_p_configured() from the operator''s settings.';
-- For each row, because a subscription executes no triggers for statements.
CREATE TRIGGER idem_p_apply_configuration AFTER INSERT OR UPDATE OR DELETE ON @S@.idem_p_configuration
	FOR EACH ROW EXECUTE FUNCTION @S@.idem_p_apply_configuration();
CREATE TRIGGER idem_p_apply_truncation AFTER TRUNCATE ON @S@.idem_p_configuration
	FOR EACH STATEMENT EXECUTE FUNCTION @S@.idem_p_apply_configuration();

-- A new value replaces the old one, also in a dump that is restored.
CREATE FUNCTION @S@.idem_p_replace_setting()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF TG_RELID <> '@S@.idem_p_configuration'::regclass THEN
		RAISE EXCEPTION USING ERRCODE = '42501', MESSAGE = 'trigger function of another table';
	END IF;
	DELETE FROM @S@.idem_p_configuration AS c WHERE c.name = NEW.name;
	RETURN NEW;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_replace_setting() IS
'Deletes the old value of a setting.';
CREATE TRIGGER idem_p_replace_setting BEFORE INSERT ON @S@.idem_p_configuration
	FOR EACH ROW EXECUTE FUNCTION @S@.idem_p_replace_setting();
-- Also if a subscription copies the rows.
ALTER TABLE @S@.idem_p_configuration ENABLE ALWAYS TRIGGER idem_p_apply_configuration;
ALTER TABLE @S@.idem_p_configuration ENABLE ALWAYS TRIGGER idem_p_replace_setting;

-- The trigger replaces the body.
CREATE FUNCTION @S@.idem_p_configured(name text)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE COST 1
AS 'SELECT NULL::pg_catalog.text';
COMMENT ON FUNCTION @S@.idem_p_configured(text) IS
'The operator''s value of a setting, or its default, without unit.';
TRUNCATE @S@.idem_p_configuration;

-- The session's own value if it has effect, otherwise the operator's.
CREATE FUNCTION @S@.idem_p_session_setting(name text)
RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 10
AS $$
DECLARE
	value CONSTANT pg_catalog.text := pg_catalog.current_setting('idempotency.' OPERATOR(pg_catalog.||) name, true);
	known record;
	parsed pg_catalog.text;
BEGIN
	SELECT k.anyone, k.fallback INTO known
		FROM @S@.idem_p_known_settings AS k WHERE k.name OPERATOR(pg_catalog.=) $1;
	IF value OPERATOR(pg_catalog.<>) '' AND (known.anyone OR pg_catalog.pg_has_role(SESSION_USER, CURRENT_USER, 'MEMBER')) THEN
		parsed := @S@.idem_p_parse_setting(name, value);
		-- If the server has loaded the library of the C edition, which has this other setting, the
		-- default is a value that no session has set.
		IF parsed OPERATOR(pg_catalog.<>) known.fallback OR pg_catalog.current_setting('idempotency.log_events', true) IS NULL THEN
			RETURN parsed;
		END IF;
	END IF;
	RETURN @S@.idem_p_configured(name);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_session_setting(text) IS
'The value of a setting in this session, called with the rights of the owner: what the session has SET counts for the defaults of calls, and for sessions of the owner or a superuser.';

-- The planner inlines this function.
CREATE FUNCTION @S@.idem_p_setting(name text)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE COST 1
AS $$
	SELECT CASE WHEN pg_catalog.current_setting('idempotency.' OPERATOR(pg_catalog.||) $1, true) IS NULL
		THEN @S@.idem_p_configured($1) ELSE @S@.idem_p_session_setting($1) END
$$;
COMMENT ON FUNCTION @S@.idem_p_setting(text) IS
'The value of a setting: times in milliseconds, sizes in bytes.';

CREATE VIEW @S@.idem_p_settings AS
	SELECT 'idempotency.' OPERATOR(pg_catalog.||) k.name AS name, @S@.idem_p_setting(k.name) AS setting,
		CASE k.kind WHEN 'ms' THEN 'ms' END AS unit
	FROM @S@.idem_p_known_settings AS k;
COMMENT ON VIEW @S@.idem_p_settings IS
'The settings in this session, with the columns of pg_settings.';

CREATE FUNCTION @S@.idem_configure(name text, value text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER COST 10000
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	short_name CONSTANT text := regexp_replace(name, '^idempotency[.]', '');
BEGIN
	IF name IS NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = 'argument "name" must not be null';
	END IF;
	PERFORM @S@.idem_p_parse_setting(short_name, coalesce(value, (SELECT k.fallback
		FROM @S@.idem_p_known_settings AS k WHERE k.name = short_name), ''));
	-- One call at a time, because each one makes the function from all settings.
	LOCK TABLE @S@.idem_p_configuration IN SHARE ROW EXCLUSIVE MODE;
	IF value IS NULL THEN
		DELETE FROM @S@.idem_p_configuration AS c WHERE c.name = short_name;
	ELSE
		INSERT INTO @S@.idem_p_configuration (name, value) VALUES (short_name, idem_configure.value);
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_configure(text, text) IS
'For administrators, portable edition only: sets a setting for all sessions, as ALTER DATABASE does in the C edition. name: with or without "idempotency."; value: with its unit, NULL for the default. Raises 42704 for an unknown setting, 22023 for a bad value.';

--@ helpers
CREATE FUNCTION @S@.idem_p_check_writable()
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	IF pg_catalog.pg_is_in_recovery() THEN
		RAISE EXCEPTION USING ERRCODE = '25006',
			MESSAGE = 'cannot execute an idempotency function that writes during recovery';
	END IF;
	RAISE EXCEPTION USING ERRCODE = '25006',
		MESSAGE = 'cannot execute an idempotency function that writes in a read-only transaction';
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_writable() IS
'Raises 25006, for callers that have found the transaction to be read-only.';

-- An object that was added to the table, such as a trigger, can prevent writes of a row.
CREATE FUNCTION @S@.idem_p_check_rounds(rounds int, table_name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	IF rounds > 1000 THEN
		RAISE EXCEPTION USING ERRCODE = '55000', MESSAGE = format('table "%s" has been altered', table_name),
			DETAIL = 'A row that was written is not there.',
			HINT = 'Remove what was added with ALTER TABLE, DROP TRIGGER or DROP RULE; to react to changes, use logical replication.';
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_rounds(int, text) IS
'Raises 55000 for a loop that has looked at a row too often.';

CREATE FUNCTION @S@.idem_p_null(name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = pg_catalog.format('argument "%s" must not be null', name);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_null(text) IS
'Raises 22004 for this argument.';

CREATE FUNCTION @S@.idem_p_check_name(value text, name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	IF value IS NULL THEN
		PERFORM @S@.idem_p_null(name);
	ELSIF octet_length(value) NOT BETWEEN 1 AND 512 THEN
		RAISE EXCEPTION USING ERRCODE = '22023',
			MESSAGE = format('argument "%s" must have 1 to 512 bytes', name),
			DETAIL = format('It has %s.', octet_length(value));
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_name(text, text) IS
'Raises 22004 or 22023 unless the argument is a text of 1 to 512 bytes.';

CREATE FUNCTION @S@.idem_p_check_client_text(VARIADIC texts text[])
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
	PERFORM convert_to(t.value, 'UTF8') FROM unnest(texts) AS t (value);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_client_text(text[]) IS
'Raises 22P05 or 22021 for a text that no client with another encoding could receive, and that would block the rows returned with it. For databases that are not in UTF8.';

CREATE FUNCTION @S@.idem_p_check_names(elements text[], name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
	element text;
BEGIN
	IF elements IS NULL THEN
		PERFORM @S@.idem_p_null(name);
	END IF;
	FOREACH element IN ARRAY elements LOOP
		IF element IS NULL THEN
			RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = format('argument "%s" must not contain nulls', name);
		END IF;
		PERFORM @S@.idem_p_check_name(element, name);
	END LOOP;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_names(text[], text) IS
'Raises 22004 or 22023 unless the argument is an array of texts of 1 to 512 bytes.';

CREATE FUNCTION @S@.idem_p_check_interval(value interval, name text)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
DECLARE
	start CONSTANT timestamptz := clock_timestamp();
	allowed float8;
	is_longer boolean;
	is_negative boolean := false;
BEGIN
	IF NOT isfinite(value) THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('argument "%s" must be finite', name);
	END IF;
	-- If months and days have opposite signs, a comparison and an addition can disagree.
	IF name IN ('lease', 'wait') THEN
		allowed := @S@.idem_p_setting('max_' || name)::float8;
		is_longer := extract(year FROM value)::float8 * 31104000000 + extract(month FROM value)::float8 * 2592000000
			+ extract(day FROM value)::float8 * 86400000 + extract(hour FROM value)::float8 * 3600000
			+ extract(minute FROM value)::float8 * 60000 + extract(milliseconds FROM value)::float8 > allowed;
		IF NOT is_longer THEN
			BEGIN
				is_longer := extract(epoch FROM start + value - start)::float8 * 1000 > allowed;
			EXCEPTION WHEN datetime_field_overflow THEN
				is_longer := value > '0 s'::interval;
			END;
		END IF;
		IF is_longer THEN
			RAISE EXCEPTION USING ERRCODE = '22023',
				MESSAGE = format('argument "%s" must not be longer than "idempotency.max_%s"', name, name),
				DETAIL = format('The limit is %s.', @S@.idem_p_with_unit(allowed)),
				HINT = format('Pass a shorter interval, or let the owner call idem_configure(''max_%s'', ...).', name);
		END IF;
	END IF;
	IF value < '0 s'::interval THEN
		is_negative := true;
	ELSIF extract(year FROM value) < 0 OR extract(month FROM value) < 0 OR extract(day FROM value) < 0
		OR extract(epoch FROM value - date_trunc('day', value)) < 0 THEN
		is_negative := start + value < start;
	END IF;
	IF is_negative THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('argument "%s" must not be negative', name);
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_interval(interval, text) IS
'Raises 22023 for an interval that is infinite, negative, or longer than its limit.';

CREATE FUNCTION @S@.idem_p_with_unit(value float8)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
	SELECT CASE WHEN value = 0 THEN '0' ELSE (
		SELECT round(value::numeric / u.ms) || u.unit
		FROM (VALUES ('d', 86400000), ('h', 3600000), ('min', 60000), ('s', 1000), ('ms', 1), ('us', 0.001)) AS u (unit, ms)
		WHERE mod(value::numeric, u.ms) = 0
		ORDER BY u.ms DESC LIMIT 1) END
$$;
COMMENT ON FUNCTION @S@.idem_p_with_unit(float8) IS
'Milliseconds as the server shows them.';

-- Arrays of batch functions.
CREATE FUNCTION @S@.idem_p_check_array(elements anyarray, name text, required boolean)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
	IF elements IS NULL THEN
		IF required THEN
			PERFORM @S@.idem_p_null(name);
		END IF;
	ELSIF array_ndims(elements) > 1 THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = format('argument "%s" must be an array of one dimension', name);
	ELSIF required AND array_position(elements, NULL) IS NOT NULL THEN
		RAISE EXCEPTION USING ERRCODE = '22004', MESSAGE = format('argument "%s" must not contain nulls', name);
	END IF;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_check_array(anyarray, text, boolean) IS
'Raises 22004 or 22023 unless the argument is an array of one dimension, and, if it is required, neither NULL nor with NULL elements.';

CREATE FUNCTION @S@.idem_p_element_count(names text[], lengths int[])
RETURNS int
LANGUAGE plpgsql IMMUTABLE
AS $$
DECLARE
	longest int := 1;
BEGIN
	FOR i IN 1 .. cardinality(names) LOOP
		lengths[i] := coalesce(lengths[i], 1);
		CONTINUE WHEN i = 1 OR lengths[i] = 1 OR lengths[i] = lengths[longest];
		IF lengths[longest] <> 1 THEN
			RAISE EXCEPTION USING ERRCODE = '22023',
				MESSAGE = 'arrays must have the same number of elements',
				DETAIL = format('"%s" has %s, "%s" has %s.', names[longest], lengths[longest], names[i], lengths[i]),
				HINT = 'An array of one element applies to all elements.';
		END IF;
		longest := i;
	END LOOP;
	RETURN lengths[longest];
END
$$;
COMMENT ON FUNCTION @S@.idem_p_element_count(text[], int[]) IS
'The number of elements of the longest of several arrays; a length of NULL is that of a missing argument. Raises 22023 if they differ, except for arrays of one element.';

-- The elements, numbered from 1.  An array of one element is repeated "count" times.
CREATE FUNCTION @S@.idem_p_spread(elements anyarray, count int)
RETURNS anyarray
LANGUAGE sql IMMUTABLE
AS $$
	SELECT CASE WHEN elements IS NULL THEN NULL
		WHEN cardinality(elements) = 1 AND count <> 1 THEN array_fill(elements[array_lower(elements, 1)], ARRAY[count])
		ELSE elements[:] END
$$;
COMMENT ON FUNCTION @S@.idem_p_spread(anyarray, int) IS
'An array with this number of elements, numbered from 1.';

-- Whether this transaction, or a subtransaction that was not rolled back, has written
-- the row version with this xmin.  The row must be visible to its snapshot.
CREATE FUNCTION @S@.idem_p_is_own(writer xid)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	own CONSTANT bigint := pg_current_xact_id_if_assigned()::text::bigint;
	ahead bigint;
BEGIN
	IF own IS NULL THEN
		RETURN false;
	END IF;
	-- Subtransactions have higher ids than their transaction.
	ahead := (writer::text::bigint - own) & 4294967295;
	RETURN ahead = 0 OR @S@.idem_p_is_in_progress(own + ahead);
END
$$;
COMMENT ON FUNCTION @S@.idem_p_is_own(xid) IS
'Whether the current transaction has written a row version, of which this is xmin.';

CREATE FUNCTION @S@.idem_p_is_in_progress(id bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
	-- A number far above the snapshot is that of a MultiXact, or that of an old transaction
	-- with another epoch.
	IF id < 0 OR id > pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 1048576 THEN
		RETURN false;
	END IF;
	RETURN pg_xact_status(id::text::xid8) = 'in progress' IS TRUE;
EXCEPTION WHEN invalid_parameter_value THEN
	-- It is in the future.
	RETURN false;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_is_in_progress(bigint) IS
'Whether the transaction with this id, which includes the epoch, has not ended.';

CREATE FUNCTION @S@.idem_p_is_running(writer xid)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
	next CONSTANT bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
BEGIN
	-- The transaction with these 32 bits that is nearest to the snapshot
	RETURN @S@.idem_p_is_in_progress(next + (((writer::text::bigint - next + 2147483648) & 4294967295) - 2147483648));
END
$$;
COMMENT ON FUNCTION @S@.idem_p_is_running(xid) IS
'Whether the transaction that is xmax of a visible row version has not ended: another one, which is changing or locking the row, or this one, if it only locks the row.';

-- Each table has one class of locks, which no other program should use.  The number
-- depends on a secret, so that a client can neither choose two keys with the same
-- number nor predict the number of a key.
-- The planner inlines this function.
CREATE FUNCTION @S@.idem_p_lock_number(seed bytea, first text, second text)
RETURNS int
LANGUAGE sql STABLE
AS $$
	SELECT ('x' || encode(substr(sha256(seed || int4send(octet_length(first))
		|| convert_to(first, getdatabaseencoding()) || convert_to(second, getdatabaseencoding())), 1, 4), 'hex'))::bit(32)::int
$$;
COMMENT ON FUNCTION @S@.idem_p_lock_number(bytea, text, text) IS
'The number of the advisory lock for two texts, with the secret of the installation.';
