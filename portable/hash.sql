-- Request hashes and canonical JSON (RFC 8785).
--
-- The functions do not depend on settings and write nothing.  The search_path of the
-- callers binds their helpers to pg_catalog.

--@ helpers
-- The exact value of a positive double that is an integer.  A cast to numeric would
-- keep only 15 digits.
CREATE FUNCTION @S@.idem_p_exact_integer(value float8)
RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT ((b.bits & 4503599627370495) | 4503599627370496)::numeric
		* 2::numeric ^ ((b.bits >> 52) & 2047)::int::numeric / 2::numeric ^ 1075
	FROM (SELECT ('x' || encode(float8send(abs(value)), 'hex'))::bit(64)::bigint) AS b (bits)
$$;
COMMENT ON FUNCTION @S@.idem_p_exact_integer(float8) IS
'The exact value of a double that is an integer.';

-- The digits of a number are d1 d2 ..., and its value is 0.d1d2... * 10^exponent.  They
-- come from the binary form, because the text of 1e131071 has 131 kB.
CREATE FUNCTION @S@.idem_p_canonical_number(value numeric)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET extra_float_digits = 1
AS $$
DECLARE
	-- Numbers of groups and their weight, sign and scale; then the groups of four digits.
	sent CONSTANT bytea := numeric_send(value);
	weight CONSTANT int := ((get_byte(sent, 2) << 8 | get_byte(sent, 3)) + 32768) % 65536 - 32768;
	plain text;
	digits text;
	count int;
	exponent int;
	double float8;
	scientific text;
	shorter text;
BEGIN
	IF value = 0 THEN
		RETURN '0';
	END IF;
	digits := (SELECT string_agg(lpad((get_byte(sent, i) << 8 | get_byte(sent, i + 1))::text, 4, '0'), '' ORDER BY i)
		FROM generate_series(8, octet_length(sent) - 2, 2) AS g (i));
	exponent := (weight + 1) * 4 - char_length(digits) + char_length(ltrim(digits, '0'));
	digits := trim(both '0' FROM digits);
	count := char_length(digits);

	-- Up to 15 digits are exact in a double, within its range.  Do not convert a number that
	-- is out of range, because a handler of that error would prevent parallel plans.
	IF count <= 17 AND (count > 15 OR exponent NOT BETWEEN -305 AND 308) AND exponent BETWEEN -323 AND 309
		AND abs(value) >= 2.4703282292062328e-324 AND abs(value) < 1.7976931348623159e308
	THEN
		double := abs(value)::float8;
		IF count > exponent OR @S@.idem_p_exact_integer(double) = abs(value) THEN
			scientific := double::text;
			plain := split_part(scientific, 'e', 1);
			exponent := coalesce(nullif(split_part(scientific, 'e', 2), '')::int, 0)
				+ CASE WHEN plain LIKE '0.%' THEN -(char_length(plain) - 2 - char_length(ltrim(substr(plain, 3), '0')))
					ELSE char_length(split_part(plain, '.', 1)) END;
			digits := trim(trailing '0' FROM ltrim(replace(plain, '.', ''), '0'));
			count := char_length(digits);
			-- The server avoids a decimal that is half-way between two doubles; ECMAScript does not.
			IF double >= 18014398509481984 THEN
				FOR i IN 1 .. count - 1 LOOP
					shorter := round(@S@.idem_p_exact_integer(double), i - exponent)::text;
					IF char_length(split_part(shorter, '.', 1)) = exponent AND shorter::float8 = double THEN
						digits := left(shorter, i);
						count := i;
						EXIT;
					END IF;
				END LOOP;
			END IF;
		END IF;
	END IF;

	RETURN CASE WHEN value < 0 THEN '-' ELSE '' END || CASE
		WHEN exponent > 21 OR exponent <= -6 THEN left(digits, 1) || CASE WHEN count > 1 THEN '.' || substr(digits, 2) ELSE '' END
			|| 'e' || CASE WHEN exponent > 0 THEN '+' ELSE '' END || (exponent - 1)
		WHEN exponent <= 0 THEN '0.' || repeat('0', -exponent) || digits
		WHEN exponent >= count THEN digits || repeat('0', exponent - count)
		ELSE left(digits, exponent) || '.' || substr(digits, exponent + 1) END;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_canonical_number(numeric) IS
'A number in canonical JSON: the nearest double as ECMAScript writes it, or, if no double has that value, its own digits.';

-- Bytes that sort U+E000 to U+FFFF after the supplementary characters, as UTF-16 does.
CREATE FUNCTION @S@.idem_p_member_order(name text)
RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT CASE WHEN name COLLATE "C" !~ E'[^\\u0001-\\u007f]' THEN convert_to(name, 'UTF8')
		-- A match has whole bytes only.  Thanks to the last one, there is no search for more.
		ELSE decode(left(regexp_replace(encode(convert_to(name, 'UTF8'), 'hex') || 'ee',
			'((?:[0-9a-df].|e[0-9a-d])*)(e[ef])', E'\\1f9\\2', 'g'), -4), 'hex') END
$$;
COMMENT ON FUNCTION @S@.idem_p_member_order(text) IS
'Sort key for the names of members in canonical JSON: the order of UTF-16 code units.';

CREATE TYPE @S@.idem_p_json_level AS (
	containers jsonb[]
);
COMMENT ON TYPE @S@.idem_p_json_level IS
'The objects and arrays at one depth of a JSON document.';

CREATE FUNCTION @S@.idem_p_canonical_scalar(value jsonb)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	-- Numbers of up to 15 digits that ECMAScript writes without an exponent are doubles, so
	-- their digits are canonical.
	SELECT CASE jsonb_typeof(value) WHEN 'number' THEN CASE
			WHEN scale(value::numeric) = 0 AND abs(value::numeric) < 1e15 THEN value::numeric::text
			WHEN scale(value::numeric) <= 6 AND abs(value::numeric) < 1e9 THEN trim_scale(value::numeric)::text
			ELSE @S@.idem_p_canonical_number(value::numeric) END
		WHEN 'object' THEN NULL WHEN 'array' THEN NULL ELSE value::text END
$$;
COMMENT ON FUNCTION @S@.idem_p_canonical_scalar(jsonb) IS
'Canonical JSON of a value; NULL for an object or an array.';

CREATE FUNCTION @S@.idem_p_elements(container jsonb, OUT place bigint, OUT name text, OUT value jsonb)
RETURNS SETOF record
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
	SELECT m.ordinality, m.key, m.value
	FROM jsonb_each(CASE jsonb_typeof(container) WHEN 'object' THEN container END) WITH ORDINALITY AS m
	UNION ALL
	SELECT a.ordinality, NULL, a.value
	FROM jsonb_array_elements(CASE jsonb_typeof(container) WHEN 'array' THEN container END) WITH ORDINALITY AS a
$$;
COMMENT ON FUNCTION @S@.idem_p_elements(jsonb) IS
'The members of an object, or the elements of an array.';

-- Works level by level, down and up again, because a document can be nested more
-- deeply than functions can call each other.  A new plan for each level would take most
-- of the time.
CREATE FUNCTION @S@.idem_p_canonical_by_levels(document jsonb)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
	levels @S@.idem_p_json_level[];
	level @S@.idem_p_json_level;
	depth int := 0;
	texts text[];
BEGIN
	IF document IS NULL OR jsonb_typeof(document) NOT IN ('object', 'array') THEN
		RETURN @S@.idem_p_canonical_scalar(document);
	END IF;
	level.containers := ARRAY[document];
	WHILE level.containers IS NOT NULL LOOP
		depth := depth + 1;
		levels[depth] := level;
		SELECT array_agg(e.value ORDER BY c.number, e.place) INTO level.containers
			FROM unnest(level.containers) WITH ORDINALITY AS c (value, number)
			CROSS JOIN LATERAL @S@.idem_p_elements(c.value) AS e
			WHERE jsonb_typeof(e.value) IN ('object', 'array');
	END LOOP;

	-- The texts of the containers one level below, in the same order.
	WHILE depth > 0 LOOP
		level := levels[depth];
		-- Do not sort the containers themselves, which can be large.
		WITH n AS MATERIALIZED (
			SELECT c.number, jsonb_typeof(c.value) = 'object' AS is_object, e.place, e.name,
				jsonb_typeof(e.value) IN ('object', 'array') AS is_container,
				@S@.idem_p_canonical_scalar(e.value) AS text
			FROM unnest(level.containers) WITH ORDINALITY AS c (value, number)
			LEFT JOIN LATERAL @S@.idem_p_elements(c.value) AS e ON true
		)
		SELECT array_agg(t.text ORDER BY t.number) INTO texts
			FROM (
				SELECT m.number, CASE WHEN m.is_object
					THEN '{' || coalesce(string_agg(to_json(m.name)::text || ':' || m.text, ','
						ORDER BY @S@.idem_p_member_order(m.name)) FILTER (WHERE m.text IS NOT NULL), '') || '}'
					ELSE '[' || coalesce(string_agg(m.text, ',' ORDER BY m.place), '') || ']' END AS text
				FROM (
					SELECT n.number, n.is_object, n.place, n.name, CASE WHEN n.is_container THEN texts[count(*)
						FILTER (WHERE n.is_container) OVER (ORDER BY n.number, n.place)] ELSE n.text END AS text
					FROM n
				) AS m
				GROUP BY m.number, m.is_object
			) AS t;
		depth := depth - 1;
	END LOOP;
	RETURN texts[1];
END
$$;
COMMENT ON FUNCTION @S@.idem_p_canonical_by_levels(jsonb) IS
'Canonical JSON of a document that can be nested deeply.';

-- Twice as fast as going through the levels.
CREATE FUNCTION @S@.idem_p_canonical(document jsonb, depth int DEFAULT 1)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
	IF depth > 10 THEN
		RETURN @S@.idem_p_canonical_by_levels(document);
	END IF;
	CASE jsonb_typeof(document)
		WHEN 'object' THEN
			RETURN (SELECT '{' || coalesce(string_agg(to_json(m.key)::text || ':'
					|| coalesce(@S@.idem_p_canonical_scalar(m.value), @S@.idem_p_canonical(m.value, depth + 1)), ','
					ORDER BY @S@.idem_p_member_order(m.key)), '') || '}'
				FROM jsonb_each(document) AS m);
		WHEN 'array' THEN
			RETURN (SELECT '[' || coalesce(string_agg(
					coalesce(@S@.idem_p_canonical_scalar(e.value), @S@.idem_p_canonical(e.value, depth + 1)), ','
					ORDER BY e.ordinality), '') || ']'
				FROM jsonb_array_elements(document) WITH ORDINALITY AS e);
		ELSE
			RETURN @S@.idem_p_canonical_scalar(document);
	END CASE;
END
$$;
COMMENT ON FUNCTION @S@.idem_p_canonical(jsonb, int) IS
'Canonical JSON of a document.';

CREATE FUNCTION @S@.idem_p_hash(method text, path text, body bytea)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
	IF method IS NULL THEN
		PERFORM @S@.idem_p_null('method');
	ELSIF path IS NULL THEN
		PERFORM @S@.idem_p_null('path');
	ELSIF method COLLATE "C" !~ '^[a-zA-Z0-9!#$%&''*+.^_`|~-]+$' THEN
		RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'invalid HTTP method',
			HINT = 'Pass GET, POST, PUT or another token of letters, digits and !#$%&''*+-.^_`|~ characters.';
	END IF;
	RETURN sha256(convert_to(upper(method COLLATE "C") || ':' || replace(path, ':', '%3A') || ':', 'UTF8')
		|| coalesce(body, ''));
END
$$;
COMMENT ON FUNCTION @S@.idem_p_hash(text, text, bytea) IS
'SHA-256 of a request whose body is in its final form.';

-- The server's own errors quote the text in DETAIL, and errors go to the server
-- log, which must not contain request bodies.
CREATE FUNCTION @S@.idem_p_parse_body(body text)
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE
AS $$
DECLARE
	state text;
	is_json boolean := true;
BEGIN
	RETURN body::jsonb;
EXCEPTION WHEN data_exception THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE;
	BEGIN
		PERFORM body::json;
	EXCEPTION WHEN data_exception THEN
		is_json := false;
	END;
	IF is_json THEN
		RAISE EXCEPTION USING ERRCODE = state,
			MESSAGE = 'request body has a value that jsonb cannot hold',
			HINT = 'Hash the body as bytea, byte for byte.';
	END IF;
	RAISE EXCEPTION USING ERRCODE = state,
		MESSAGE = CASE state WHEN '22P02' THEN 'request body is not JSON'
			ELSE 'request body has a character that this database cannot hold' END,
		HINT = 'Send JSON, or hash the body as bytea, byte for byte.';
END
$$;
COMMENT ON FUNCTION @S@.idem_p_parse_body(text) IS
'The jsonb of a request body. Raises an error of class 22 that does not show the body.';

--@ idem_request_hash_text plpgsql unsafe
BEGIN
	RETURN @S@.idem_p_hash(method, path,
		CASE WHEN body <> '' AND method IS NOT NULL AND path IS NOT NULL THEN convert_to(@S@.idem_p_canonical(@S@.idem_p_parse_body(body)), 'UTF8') END);
END

--@ idem_request_hash_jsonb plpgsql
BEGIN
	RETURN @S@.idem_p_hash(method, path, convert_to(@S@.idem_p_canonical(body), 'UTF8'));
END

--@ idem_request_hash_bytea plpgsql
BEGIN
	RETURN @S@.idem_p_hash(method, path, body);
END

--@ idem_canonical_json plpgsql
BEGIN
	RETURN @S@.idem_p_canonical(document);
END
