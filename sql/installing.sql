--
-- Whatever a session has set that installs the extension, it is the same.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
DROP SCHEMA IF EXISTS idem CASCADE;
CREATE SCHEMA idem;
RESET client_min_messages;
\pset format unaligned
\pset tuples_only on

-- All that the catalogs say of it, but for numbers that differ each time.
CREATE FUNCTION pg_temp.installation() RETURNS TABLE (description text) LANGUAGE sql
SET standard_conforming_strings = on SET quote_all_identifiers = off SET IntervalStyle = postgres SET DateStyle = ISO SET extra_float_digits = 1 SET search_path = pg_catalog AS $$
	SELECT ROW(pg_get_functiondef(p.oid), p.procost, p.prorows, p.proacl, obj_description(p.oid, 'pg_proc'))::text FROM pg_proc AS p WHERE pronamespace = 'idem'::regnamespace
	UNION ALL SELECT ROW(c.relname, c.relkind, c.relpersistence, c.reloptions, c.relacl, c.reltablespace, obj_description(c.oid, 'pg_class'), (SELECT amname FROM pg_am WHERE oid = c.relam))::text
		FROM pg_class AS c WHERE relnamespace = 'idem'::regnamespace
	UNION ALL SELECT ROW(c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnum, a.attnotnull, a.attstorage, a.attcompression, a.attcollation)::text
		FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = attrelid WHERE relnamespace = 'idem'::regnamespace
	UNION ALL SELECT pg_get_viewdef(c.oid) FROM pg_class AS c WHERE relnamespace = 'idem'::regnamespace AND relkind = 'v'
	UNION ALL SELECT pg_get_indexdef(i.indexrelid) FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid WHERE relnamespace = 'idem'::regnamespace
	UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'idem'::regnamespace
	UNION ALL SELECT ROW(t.typname, t.typacl, obj_description(t.oid, 'pg_type'))::text FROM pg_type AS t WHERE typnamespace = 'idem'::regnamespace AND typname LIKE 'idem\_%'
	UNION ALL SELECT ROW(c.relname, s.seqstart, s.seqincrement, s.seqmax, s.seqcache, s.seqcycle)::text FROM pg_sequence AS s JOIN pg_class AS c ON c.oid = seqrelid WHERE relnamespace = 'idem'::regnamespace
	UNION ALL SELECT ROW(relation::regclass, condition)::text FROM pg_extension, unnest(extconfig, extcondition) AS u (relation, condition) WHERE extname = 'idempotency'
$$;
CREATE EXTENSION idempotency SCHEMA idem;
CREATE TEMP TABLE usual AS SELECT * FROM pg_temp.installation();
SELECT count(*) > 200, count(*) FILTER (WHERE description IS NULL) FROM usual;
DROP EXTENSION idempotency;

-- Some of these are gone in later servers, or have one value.
DO $$
DECLARE
	setting record;
BEGIN
	FOR setting IN SELECT * FROM (VALUES ('escape_string_warning', 'off'), ('backslash_quote', 'off'), ('transform_null_equals', 'on'), ('array_nulls', 'off'),
			('quote_all_identifiers', 'on'), ('IntervalStyle', 'sql_standard'), ('DateStyle', 'German, DMY'), ('bytea_output', 'escape'), ('extra_float_digits', '-15'),
			('xmloption', 'document'), ('check_function_bodies', 'off'), ('row_security', 'off'), ('default_transaction_isolation', 'serializable'),
			('default_transaction_deferrable', 'on'), ('plpgsql.extra_errors', 'all'), ('plpgsql.variable_conflict', 'use_column'), ('enable_seqscan', 'off'),
			('enable_indexscan', 'off'), ('standard_conforming_strings', 'off')) AS v (name, value) LOOP
		BEGIN
			PERFORM set_config(setting.name, setting.value, false);
		EXCEPTION WHEN undefined_object OR feature_not_supported OR invalid_parameter_value THEN NULL;
		END;
	END LOOP;
END
$$;
SET search_path = pg_temp, public, pg_catalog;
CREATE EXTENSION idempotency SCHEMA idem;
-- Nothing is there or missing that usually is not or is.
SELECT left(description, 300) FROM ((TABLE usual EXCEPT SELECT * FROM pg_temp.installation()) UNION ALL (SELECT * FROM pg_temp.installation() EXCEPT TABLE usual)) AS difference LIMIT 5;
-- Its messages do not depend on it, either.
SELECT count(*) FROM regexp_split_to_table(idem.idem_metrics(), E'\n') AS line WHERE line !~ E'^(# (TYPE|UNIT|HELP|EOF)|idempotency_[a-z_]+\\{.*\\} [-+0-9.e]+$)';
SELECT idem.idem_metrics() LIKE '%{datname="' || current_database() || '"} %';
SELECT count(*) > 5 FROM idem.idem_health();
DROP EXTENSION idempotency;
DROP SCHEMA idem;
\c
