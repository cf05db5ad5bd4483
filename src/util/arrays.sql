
--
-- Functions that do many things at once
--

CREATE FUNCTION @extschema@.idem_many_support(request internal)
RETURNS internal
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME';
REVOKE ALL ON FUNCTION @extschema@.idem_many_support(internal) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION @extschema@.idem_many_support(internal) TO pg_database_owner WITH GRANT OPTION;
COMMENT ON FUNCTION @extschema@.idem_many_support(internal) IS
'Tells the planner how many rows a function returns that returns one for each element of its arrays.';
