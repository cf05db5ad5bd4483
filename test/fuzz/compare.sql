-- The database of test/fuzz/compare.
SET client_min_messages = warning;
CREATE EXTENSION idempotency;

CREATE TABLE documents (method text, path text, document text, canonical text, hash text, raw_hash text);

-- The canonical form of a text, or why there is none.
CREATE FUNCTION answer(document text, OUT canonical text, OUT error text) LANGUAGE plpgsql AS $$
BEGIN
	canonical := idem_canonical_json(document::jsonb);
EXCEPTION
	WHEN OTHERS THEN error := SQLSTATE;
END
$$;
CREATE VIEW answers AS
SELECT d.*, a.canonical AS answer, a.error FROM documents AS d, LATERAL (SELECT * FROM answer(d.document) OFFSET 0) AS a;

-- Both take the same documents, but for what no jsonb can hold: "\u0000", lone
-- surrogates, and numbers that no numeric is.
CREATE VIEW differences AS
SELECT 'canonical form: ' || document, canonical, answer, error FROM answers
WHERE answer IS DISTINCT FROM canonical
	AND NOT coalesce(error IN ('22P05', '22P02', '22003') AND document ~ '\\u(0000|[dD][89a-fA-F])|[eE]', false)
UNION ALL
SELECT 'no fixed point: ' || document, answer, idem_canonical_json(answer::jsonb), NULL FROM answers
WHERE idem_canonical_json(answer::jsonb) <> answer
UNION ALL
SELECT 'hash: ' || concat_ws(' ', method, path, document), hash, encode(idem_request_hash(method, path, document), 'hex'), NULL FROM answers
WHERE error IS NULL AND (idem_request_hash(method, path, document) <> decode(hash, 'hex')
	OR idem_request_hash(method, path, document::jsonb) <> decode(hash, 'hex'))
UNION ALL
SELECT 'hash of bytes: ' || document, raw_hash, NULL, NULL FROM documents
WHERE idem_request_hash(method, path, convert_to(document, 'UTF8')) <> decode(raw_hash, 'hex');
