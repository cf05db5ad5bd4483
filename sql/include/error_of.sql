\set ECHO none
-- Included by those tests that show what statements raise.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	detail text;
	hint text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN concat_ws(' | ', SQLSTATE, SQLERRM, nullif(detail, ''), nullif(hint, ''));
END
$$;
-- The SQLSTATE alone
CREATE FUNCTION pg_temp.code_of(statement text) RETURNS text
LANGUAGE sql AS $$ SELECT split_part(pg_temp.error_of(statement), ' |', 1) $$;
\set ECHO all
