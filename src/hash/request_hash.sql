
--
-- Request identity
--

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body text DEFAULT NULL)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_text';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, text) IS
'SHA-256 of a request whose body is JSON text: METHOD:path:canonical body, in UTF-8. method: an HTTP token (RFC 9110), case ignored. path: each ":" counts as "%3A". body: NULL or empty for none. Raises 22004 for a NULL method or path, 22023 for a bad method, 22P02 for a body that is not JSON, 22P05, 22003, 54000 or 54001 for JSON that jsonb cannot hold or that is nested too deeply.';

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body jsonb)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_jsonb';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, jsonb) IS
'SHA-256 of a request whose body is jsonb: the same as for its text. Raises 22004 for a NULL method or path, 22023 for a bad method, 54001 for a body that is nested too deeply.';

CREATE FUNCTION @extschema@.idem_request_hash(method text, path text, body bytea)
RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME', 'idem_request_hash_bytea';
COMMENT ON FUNCTION @extschema@.idem_request_hash(text, text, bytea) IS
'SHA-256 of a request whose body is not JSON, byte for byte. Raises 22004 for a NULL method or path, 22023 for a bad method.';

CREATE FUNCTION @extschema@.idem_canonical_json(document jsonb)
RETURNS text
LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE COST 300
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_canonical_json(jsonb) IS
'The document in canonical form, RFC 8785 (JCS), except that a number keeps its digits if it has more than 17, is an integer that an IEEE double would round, or is beyond the range of doubles. Raises 54001 for a document nested too deeply.';
