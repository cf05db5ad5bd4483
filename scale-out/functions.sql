-- Generate the router's functions from the interface that a shard has installed.
--
--	psql -XAtq -f functions.sql SHARD | psql -v ON_ERROR_STOP=1 ROUTER
--
-- Run this again after each ALTER EXTENSION idempotency UPDATE of the shards.
-- Grants on the functions, and views that use them, remain as long as arguments
-- and results are unchanged.  The first argument of a call that writes names the
-- shard (a scope, user, aggregate or topic).  A batch over an array of those is
-- split.  A function without such an argument runs on any shard if it writes
-- nothing.  The router lacks all others, which are called on a shard:
-- idem_resume(), and those that idem_grant does not grant, as a relay's.

-- The router runs the result as a superuser, and the owner of a shard can add
-- functions to the extension.  So the script quotes all that comes from the shard,
-- and uses only functions and types of the extension's installer.

\set ON_ERROR_STOP on
-- A database's owner can define functions that an unqualified name would find.
SET search_path = pg_catalog, pg_temp;
SELECT extnamespace::regnamespace::text AS schema
FROM pg_extension WHERE extname = 'idempotency' \gset

CREATE TEMP TABLE routed AS
WITH extension AS (
	SELECT oid, extnamespace FROM pg_extension WHERE extname = 'idempotency'
),
part AS (
	SELECT d.classid, d.objid
	FROM extension AS e
	JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	WHERE d.deptype = 'e'
),
installer AS (
	SELECT c.relowner AS role
	FROM part JOIN pg_class AS c ON part.classid = 'pg_class'::regclass AND c.oid = part.objid
	WHERE c.relname = 'idem_keys'
),
known_type AS (
	SELECT t.oid FROM pg_type AS t WHERE t.typnamespace = 'pg_catalog'::regnamespace
	UNION ALL
	SELECT t.oid
	FROM part JOIN pg_type AS t ON part.classid = 'pg_type'::regclass AND t.oid = part.objid
	JOIN installer ON t.typowner = installer.role
),
-- Column names of indexes
indexed AS (
	SELECT DISTINCT a.attname
	FROM part AS t
	JOIN pg_index AS i ON i.indrelid = t.objid
	JOIN pg_attribute AS a ON a.attrelid = i.indexrelid
	WHERE t.classid = 'pg_class'::regclass AND a.atttypid = 'text'::regtype
),
function AS (
	SELECT p.oid, p.proname, p.proargnames[1] AS first_name,
		p.proargtypes[0] = 'text[]'::regtype AS is_split,
		p.provolatile = 'v' AS writes,
		p.proargtypes[0] IN ('text'::regtype, 'text[]'::regtype) AND EXISTS (SELECT FROM indexed AS i
			WHERE i.attname = p.proargnames[1]
				OR i.attname || 's' = p.proargnames[1] AND p.proargtypes[0] = 'text[]'::regtype) AS is_named
	FROM :schema.idem_application_functions() AS f
	JOIN pg_proc AS p ON p.oid = f
	JOIN part ON part.classid = 'pg_proc'::regclass AND part.objid = p.oid
	JOIN installer ON p.proowner = installer.role
	WHERE p.pronargs > 0
		AND p.proargtypes::oid[] || p.prorettype || coalesce(p.proallargtypes, '{}') <@ ARRAY(SELECT oid FROM known_type)
)
SELECT f.*, EXISTS (SELECT FROM function AS g
		WHERE f.is_named AND g.is_named AND g.writes
			AND rtrim(g.first_name, 's') = rtrim(f.first_name, 's')) AS has_key
FROM function AS f;
DELETE FROM routed WHERE NOT has_key AND writes;

CREATE TEMP TABLE argument AS
SELECT r.oid, n AS place, quote_ident(p.proargnames[n]) AS name,
	coalesce(p.proargmodes[n], 'i') AS mode,
	coalesce(p.proallargtypes[n], p.proargtypes[n - 1]) AS type,
	-- OIDs differ between servers.
	CASE WHEN t.typname LIKE 'reg%' THEN 'text' ELSE format_type(t.oid, NULL) END AS type_name,
	format_type(t.oid, NULL) AS remote_type,
	pg_get_function_arg_default(p.oid, n) AS default_value
FROM routed AS r
JOIN pg_proc AS p ON p.oid = r.oid
CROSS JOIN generate_series(1, coalesce(cardinality(p.proallargtypes), p.pronargs)) AS n
JOIN pg_type AS t ON t.oid = coalesce(p.proallargtypes[n], p.proargtypes[n - 1]);

-- The columns of the result; a scalar has none.
CREATE TEMP TABLE result AS
SELECT r.oid, a.place, a.name
FROM routed AS r JOIN argument AS a ON a.oid = r.oid AND a.mode IN ('o', 't')
UNION ALL
SELECT r.oid, c.attnum, quote_ident(c.attname)
FROM routed AS r
JOIN pg_proc AS p ON p.oid = r.oid
JOIN pg_type AS t ON t.oid = p.prorettype AND t.typtype = 'c'
JOIN pg_attribute AS c ON c.attrelid = t.typrelid AND c.attnum > 0 AND NOT c.attisdropped;

CREATE TEMP VIEW definition AS
SELECT r.*,
	'idempotency.' || quote_ident(p.proname) AS name,
	'idempotency.' || quote_ident(p.proname || '_split') AS part_name,
	p.pronamespace::regnamespace || '.' || quote_ident(p.proname) AS remote_name,
	(SELECT string_agg(format('%s %s', a.name, a.type_name)
			|| coalesce(' DEFAULT ' || a.default_value, ''), ', ' ORDER BY a.place)
		FROM argument AS a WHERE a.oid = r.oid AND a.mode = 'i') AS parameters,
	(SELECT string_agg(a.type_name, ', ' ORDER BY a.place)
		FROM argument AS a WHERE a.oid = r.oid AND a.mode = 'i') AS types,
	CASE WHEN EXISTS (SELECT FROM argument AS a WHERE a.oid = r.oid AND a.mode IN ('o', 't'))
		THEN 'TABLE (' || (SELECT string_agg(format('%s %s', a.name, a.type_name), ', ' ORDER BY a.place)
			FROM argument AS a WHERE a.oid = r.oid AND a.mode IN ('o', 't')) || ')'
		ELSE CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END
			|| CASE WHEN t.typtype = 'c' THEN 'idempotency.' || quote_ident(t.typname)
				ELSE format_type(t.oid, NULL) END
		END AS returns,
	-- PL/Proxy requires VOLATILE.
	'VOLATILE' || CASE WHEN p.proisstrict THEN ' STRICT' ELSE '' END AS kind,
	coalesce(obj_description(r.oid, 'pg_proc') || ' ', '') AS comment
FROM routed AS r
JOIN pg_proc AS p ON p.oid = r.oid
JOIN pg_type AS t ON t.oid = p.prorettype;

SELECT format('-- Made by scale-out/functions.sql from idempotency %s; do not edit.', translate(extversion, E'\n\r', ''))
FROM pg_extension WHERE extname = 'idempotency';

SELECT $$BEGIN;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL client_min_messages = warning;
CREATE SCHEMA IF NOT EXISTS idempotency;
GRANT USAGE ON SCHEMA idempotency TO idem_application, idem_router;

-- Replaces a function, if possible, because grants and views depend on it.
CREATE PROCEDURE pg_temp.make(name text, definition text)
LANGUAGE plpgsql
AS $do$
BEGIN
	EXECUTE 'CREATE OR REPLACE FUNCTION ' || definition;
EXCEPTION WHEN invalid_function_definition THEN
	EXECUTE 'DROP FUNCTION ' || name;
	EXECUTE 'CREATE FUNCTION ' || definition;
END
$do$;

CREATE PROCEDURE pg_temp.make_type(name text, columns text)
LANGUAGE plpgsql
AS $do$
DECLARE
	was regtype;
	had text;
	old text;
BEGIN
	SELECT t.oid, string_agg(format('%I %s', c.attname, format_type(c.atttypid, c.atttypmod)), ', ' ORDER BY c.attnum)
	INTO was, had
	FROM pg_type AS t
	JOIN pg_attribute AS c ON c.attrelid = t.typrelid AND c.attnum > 0 AND NOT c.attisdropped
	WHERE t.typnamespace = 'idempotency'::regnamespace AND t.typname = name
	GROUP BY t.oid;
	IF had IS DISTINCT FROM columns THEN
		FOR old IN SELECT p.oid::regprocedure FROM pg_proc AS p
			WHERE p.prorettype = was AND p.proowner = 'idem_router'::regrole
		LOOP
			EXECUTE 'DROP FUNCTION ' || old;
		END LOOP;
		EXECUTE format('DROP TYPE IF EXISTS idempotency.%I', name);
		EXECUTE format('CREATE TYPE idempotency.%I AS (%s)', name, columns);
		EXECUTE format('ALTER TYPE idempotency.%I OWNER TO idem_router', name);
	END IF;
END
$do$;

CREATE OR REPLACE FUNCTION idempotency.idem_shard(scope text)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL SAFE SECURITY DEFINER
RETURN idem_map.connection(scope);
ALTER FUNCTION idempotency.idem_shard(text) OWNER TO idem_router;
REVOKE ALL ON FUNCTION idempotency.idem_shard(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION idempotency.idem_shard(text) TO idem_application;
COMMENT ON FUNCTION idempotency.idem_shard(text) IS
'The connection string of the shard that a scope lives on. Call idem_pin_scope(scope) there, in each transaction. Raises 55000 and 55P03.';

CREATE OR REPLACE FUNCTION idempotency.idem_find_shard(scope text)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
RETURN idem_map.find(scope);
ALTER FUNCTION idempotency.idem_find_shard(text) OWNER TO idem_router;
REVOKE ALL ON FUNCTION idempotency.idem_find_shard(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION idempotency.idem_find_shard(text) TO idem_application;
COMMENT ON FUNCTION idempotency.idem_find_shard(text) IS
'As idem_shard, for a caller that a shard has refused: asks all shards where the scope is, and corrects the map. Raises 55000 and 55P03.';
$$;

SELECT format(E'\nCALL pg_temp.make_type(%L, %L);', t.typname,
	string_agg(format('%I %s', c.attname, format_type(c.atttypid, c.atttypmod)), ', ' ORDER BY c.attnum))
FROM pg_type AS t
JOIN pg_attribute AS c ON c.attrelid = t.typrelid AND c.attnum > 0 AND NOT c.attisdropped
WHERE t.oid IN (SELECT p.prorettype FROM routed JOIN pg_proc AS p USING (oid)) AND t.typtype = 'c'
GROUP BY t.typname
ORDER BY t.typname;

-- Functions that run on one shard.  idem_map.shard(), which runs on the router, is
-- qualified.
SELECT format(E'\nCALL pg_temp.make(%L, %L);', format('%s(%s)', name, types),
	format(E'%s(%s)\nRETURNS %s\nLANGUAGE plproxy %s PARALLEL UNSAFE SECURITY DEFINER\nAS %L', name, parameters, returns, kind,
		format(E'\n\tCLUSTER ''idempotency'';\n\tRUN ON %s;\n\tSELECT %s FROM %s(%s) AS r;\n',
			CASE WHEN has_key THEN 'idem_map.shard($1)' ELSE 'ANY' END,
			coalesce((SELECT string_agg('r.' || c.name, ', ' ORDER BY c.place) FROM result AS c WHERE c.oid = d.oid), 'r'),
			remote_name,
			(SELECT string_agg(
					CASE WHEN a.place = 1 AND has_key THEN CASE WHEN writes THEN 'idem_guard.pass($1::text)'
							ELSE 'idem_guard.seen(idem_guard.pass($1::text))' END
						WHEN a.type_name <> a.remote_type THEN format('$%s::text::%s', a.place, a.remote_type)
						ELSE format('$%s::%s', a.place, a.type_name) END, ', ' ORDER BY a.place)
				FROM argument AS a WHERE a.oid = d.oid AND a.mode = 'i'))))
FROM definition AS d
WHERE NOT (has_key AND is_split)
ORDER BY name, types;

-- Functions that run on several shards: each part has the positions of its elements
-- in the whole.
SELECT format(E'\nCALL pg_temp.make(%1$L, %2$L);\nALTER FUNCTION %1$s OWNER TO idem_router;\nREVOKE ALL ON FUNCTION %1$s FROM PUBLIC;',
		format('%s(int[], %s)', part_name, types),
		format(E'%s(ordinals int[], %s)\nRETURNS %s\nLANGUAGE plproxy %s PARALLEL UNSAFE SECURITY DEFINER\nAS %L',
			part_name, regexp_replace(parameters, ' DEFAULT [^,]*', '', 'g'), returns, kind,
			format(E'\n\tCLUSTER ''idempotency'';\n\tSPLIT ordinals, %s;\n\tRUN ON idem_map.shard($2);\n\tSELECT %s FROM %s(%s) AS r;\n',
				(SELECT string_agg(a.name, ', ' ORDER BY a.place)
					FROM argument AS a WHERE a.oid = d.oid AND a.mode = 'i' AND a.type_name LIKE '%[]'),
				(SELECT string_agg(CASE c.name WHEN 'ordinal' THEN '($1::int[])[r.ordinal] AS ordinal' ELSE 'r.' || c.name END,
						', ' ORDER BY c.place) FROM result AS c WHERE c.oid = d.oid),
				remote_name,
				(SELECT string_agg(format(CASE a.place WHEN 1 THEN 'idem_guard.pass($%s::%s)' ELSE '$%s::%s' END,
						a.place + 1, a.type_name), ', ' ORDER BY a.place)
					FROM argument AS a WHERE a.oid = d.oid AND a.mode = 'i'))))
	|| format(E'\nCALL pg_temp.make(%L, %L);', format('%s(%s)', name, types),
		format(E'%s(%s)\nRETURNS %s\nLANGUAGE sql %s PARALLEL UNSAFE SECURITY DEFINER\nSET search_path = pg_catalog, pg_temp\nAS %L',
			name, parameters, returns, kind,
			format(E'\n\tSELECT r.*\n\tFROM (SELECT CASE max(length) WHEN 1 THEN min(length) ELSE max(length) END\n\t\t\tFROM unnest(ARRAY[%s]) AS length) AS whole (number),\n\t\t%s(ARRAY(SELECT generate_series(1, number)), %s) AS r\n\tORDER BY r.ordinal\n',
				(SELECT string_agg(format('cardinality($%s)', a.place), ', ' ORDER BY a.place)
					FROM argument AS a WHERE a.oid = d.oid AND a.mode = 'i' AND a.type_name LIKE '%[]'),
				part_name,
				-- An argument without a default must not be null.
				(SELECT string_agg(CASE WHEN a.type_name LIKE '%[]' THEN format('idem_map.spread(%L, $%s, number)',
							CASE WHEN a.default_value IS NULL THEN a.name END, a.place)
						ELSE format('$%s', a.place) END, ', ' ORDER BY a.place)
					FROM argument AS a WHERE a.oid = d.oid AND a.mode = 'i'))))
FROM definition AS d
WHERE has_key AND is_split
ORDER BY name, types;

-- Owner, grants, comments
SELECT format(E'\nALTER FUNCTION %1$s(%2$s) OWNER TO idem_router;\nREVOKE ALL ON FUNCTION %1$s(%2$s) FROM PUBLIC;\nGRANT EXECUTE ON FUNCTION %1$s(%2$s) TO idem_application;\nCOMMENT ON FUNCTION %1$s(%2$s) IS %3$L;',
	name, types,
	CASE WHEN NOT has_key THEN 'Runs on any shard. ' WHEN is_split THEN 'Each part runs on its shard, in a transaction of its own. '
		ELSE 'Runs on the shard of its first argument, in a transaction of its own. ' END || comment)
FROM definition
ORDER BY name, types;

-- Drop functions and types of an earlier run that no longer exist on the shard.
SELECT format(E'\nDO %L;\n\nDROP PROCEDURE pg_temp.make, pg_temp.make_type;\nCOMMIT;', format($do$
DECLARE
	old text;
BEGIN
	FOR old IN SELECT 'FUNCTION ' || p.oid::regprocedure FROM pg_proc AS p
		WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proowner = 'idem_router'::regrole
			AND p.oid <> ALL (ARRAY[
				'idempotency.idem_shard(text)',
				'idempotency.idem_find_shard(text)',
				%s
			]::regprocedure[])
	LOOP
		EXECUTE 'DROP ' || old;
	END LOOP;
	FOR old IN SELECT 'TYPE ' || t.oid::regtype FROM pg_type AS t
		WHERE t.typnamespace = 'idempotency'::regnamespace AND t.typowner = 'idem_router'::regrole
			AND t.typtype = 'c' AND NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.prorettype = t.oid)
	LOOP
		EXECUTE 'DROP ' || old;
	END LOOP;
END
$do$,
	string_agg(quote_literal(format('%s(%s)', name, types))
		|| CASE WHEN has_key AND is_split
			THEN E',\n\t\t\t\t' || quote_literal(format('%s(int[], %s)', part_name, types))
			ELSE '' END, E',\n\t\t\t\t' ORDER BY name, types)))
FROM definition;
