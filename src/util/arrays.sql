
--
-- Functions that process many elements
--

CREATE FUNCTION @extschema@.idem_many_support(request internal)
RETURNS internal
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_many_support(internal) IS
'Planner support: estimates the rows of a function that returns one for each element of its arrays.';
