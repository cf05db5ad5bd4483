--
-- Random requests, with the canonical form and the hashes that an independent
-- implementation gives them: the output of test/fuzz/documents.js generate 7 400.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency CASCADE;
SET client_encoding = 'UTF8';
\set ECHO none
\i test/fuzz/compare.sql
\set ECHO all
\copy documents FROM 'test/fuzz/documents.copy'
SELECT count(*) AS documents, count(error) AS refused FROM answers;
SELECT * FROM differences;
DROP VIEW differences, answers;
DROP FUNCTION answer(text);
DROP TABLE documents;
