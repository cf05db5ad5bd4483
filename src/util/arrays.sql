
--
-- Functions that do many things at once
--

CREATE FUNCTION @extschema@.idem_many_support(request internal)
RETURNS internal
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_many_support(internal) IS
'Tells the planner how many rows a function returns that returns one for each element of its arrays.';
