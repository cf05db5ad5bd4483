--
-- Client sequences: each of a client's events is appended once, whatever is
-- retried.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\i sql/include/error_of.sql

--
-- One event at a time
--
SELECT idem_last_client_seq('order-1', 'phone');
SELECT * FROM idem_try_append('order-1', 'phone', 1);
SELECT idem_last_client_seq('order-1', 'phone');
-- A retry is a duplicate, and changes nothing.
SELECT * FROM idem_try_append('order-1', 'phone', 1);
SELECT * FROM idem_try_append('order-1', 'phone', 2);
SELECT * FROM idem_try_append('order-1', 'phone', 1);
SELECT * FROM idem_try_append('order-1', 'phone', 2);
SELECT idem_last_client_seq('order-1', 'phone');
-- Gaps are allowed unless the caller says otherwise.
SELECT * FROM idem_try_append('order-1', 'phone', 5);
-- Then what is skipped is lost.
SELECT * FROM idem_try_append('order-1', 'phone', 3);
SELECT * FROM idem_try_append('order-1', 'phone', 4);

-- Clients of an aggregate count apart and share its version.
SELECT * FROM idem_try_append('order-1', 'tablet', 1);
SELECT * FROM idem_try_append('order-1', 'phone', 6);
SELECT * FROM idem_try_append('order-1', 'tablet', 2);
SELECT idem_last_client_seq('order-1', 'phone') AS phone, idem_last_client_seq('order-1', 'tablet') AS tablet;
-- Aggregates share nothing.
SELECT * FROM idem_try_append('order-2', 'phone', 1);
SELECT * FROM idem_try_append('order-1', 'phone', 7);
SELECT * FROM idem_try_append('order-2', 'phone', 1);
SELECT aggregate, version FROM idem_aggregates ORDER BY aggregate;
SELECT aggregate, client_id, last_client_seq FROM idem_client_sequences ORDER BY aggregate, client_id;

-- Parts of a name do not run together; case counts.
SELECT a.* FROM (VALUES ('a', 'bc'), ('ab', 'c'), ('A', 'BC'), (' a', 'bc'), ('ä', 'ö€😀')) AS n (g, c),
	idem_try_append(g, c, 1) AS a;
SELECT a.* FROM (VALUES (repeat('g', 512), 'c'), ('g', repeat('c', 512)), (repeat('g', 512), repeat('c', 512))) AS n (g, c),
	idem_try_append(g, c, 1) AS a;

--
-- Batches
--
SELECT * FROM idem_try_append('batches', 'phone', 1, 3);
-- Any part of it that has landed whole is a duplicate.
SELECT a.* FROM (VALUES (1, 3), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2)) AS b (seq, n),
	idem_try_append('batches', 'phone', seq, n) AS a;
-- One that has landed in part is an overlap: resend from last_client_seq + 1.
SELECT a.* FROM (VALUES (1, 4), (2, 3), (3, 2), (3, 1000000)) AS b (seq, n),
	idem_try_append('batches', 'phone', seq, n) AS a;
SELECT * FROM idem_try_append('batches', 'phone', 4, 2);
SELECT * FROM idem_try_append('batches', 'phone', 1, 5);
SELECT * FROM idem_try_append('batches', 'phone', 10, 5);
SELECT idem_last_client_seq('batches', 'phone');
SELECT * FROM idem_try_append('batches', 'phone', 9, 7);

--
-- allow_gaps => false
--
SELECT * FROM idem_try_append('gaps', 'phone', 2, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 1, 2, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 4, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 4, 10, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 9223372036854775807, allow_gaps => false);
SELECT idem_last_client_seq('gaps', 'phone');
SELECT * FROM idem_try_append('gaps', 'phone', 3, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 4, allow_gaps => false);
-- Duplicates and overlaps are no gaps.
SELECT * FROM idem_try_append('gaps', 'phone', 4, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 1, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'phone', 4, 2, allow_gaps => false);
-- A gap in one client's sequence is none in another's.
SELECT * FROM idem_try_append('gaps', 'tablet', 5, allow_gaps => false);
SELECT * FROM idem_try_append('gaps', 'tablet', 1, allow_gaps => false);
-- A gap changed nothing, on an aggregate and a client it had not met either.
SELECT * FROM idem_try_append('never met', 'phone', 2, allow_gaps => false);
SELECT count(*) FROM idem_aggregates WHERE aggregate = 'never met';
SELECT count(*) FROM idem_client_sequences WHERE aggregate = 'never met';

--
-- expected_version
--
-- 0 is that of a new aggregate.
SELECT * FROM idem_try_append('versions', 'phone', 1, expected_version => 1);
SELECT count(*) FROM idem_aggregates WHERE aggregate = 'versions';
SELECT count(*) FROM idem_client_sequences WHERE aggregate = 'versions';
SELECT * FROM idem_try_append('versions', 'phone', 1, expected_version => 0);
SELECT a.* FROM unnest('{0, 2, -1, 9223372036854775807}'::bigint[]) AS v,
	idem_try_append('versions', 'phone', 2, expected_version => v) AS a;
SELECT * FROM idem_try_append('versions', 'phone', 2, 3, expected_version => 1);
SELECT * FROM idem_try_append('versions', 'tablet', 1, expected_version => 1);
SELECT * FROM idem_try_append('versions', 'tablet', 1, expected_version => 4);
-- A retry is a duplicate or an overlap, though the version has moved on.
SELECT * FROM idem_try_append('versions', 'phone', 2, 3, expected_version => 1);
SELECT * FROM idem_try_append('versions', 'phone', 1, expected_version => 0);
SELECT * FROM idem_try_append('versions', 'phone', 4, 2, expected_version => 3);
-- A gap is reported before a version conflict, too.
SELECT * FROM idem_try_append('versions', 'phone', 6, expected_version => 0, allow_gaps => false);
SELECT * FROM idem_try_append('versions', 'phone', 5, expected_version => 0, allow_gaps => false);
-- Conflicts changed nothing.
SELECT version FROM idem_aggregates WHERE aggregate = 'versions';
SELECT client_id, last_client_seq FROM idem_client_sequences WHERE aggregate = 'versions' ORDER BY client_id;

--
-- Within one transaction
--
BEGIN;
SELECT * FROM idem_try_append('inside', 'phone', 1);
-- Its own appends count at once, and are nothing to wait for.
SELECT * FROM idem_try_append('inside', 'phone', 1, wait => '10 minutes');
SELECT * FROM idem_try_append('inside', 'phone', 1, 2);
SELECT * FROM idem_try_append('inside', 'phone', 2, 2, expected_version => 1, allow_gaps => false);
SELECT * FROM idem_try_append('inside', 'phone', 2, 2, expected_version => 1);
SELECT * FROM idem_try_append('inside', 'tablet', 1, expected_version => 3);
SELECT idem_last_client_seq('inside', 'phone') AS phone, idem_last_client_seq('inside', 'tablet') AS tablet;
SAVEPOINT before_more;
SELECT * FROM idem_try_append('inside', 'phone', 4, 7);
SELECT * FROM idem_try_append('inside', 'watch', 1);
SELECT * FROM idem_try_append('other', 'watch', 1);
ROLLBACK TO SAVEPOINT before_more;
-- Events that were rolled back must be sent again.
SELECT idem_last_client_seq('inside', 'phone') AS phone, idem_last_client_seq('inside', 'watch') AS watch;
SELECT * FROM idem_try_append('inside', 'watch', 1, expected_version => 4);
SELECT * FROM idem_try_append('inside', 'phone', 4, allow_gaps => false);
SELECT * FROM idem_try_append('other', 'watch', 1, expected_version => 0);
COMMIT;
SELECT * FROM idem_try_append('inside', 'phone', 4);
SELECT * FROM idem_try_append('inside', 'watch', 1);

BEGIN;
SELECT * FROM idem_try_append('inside', 'phone', 5);
SELECT * FROM idem_try_append('new', 'phone', 1);
ROLLBACK;
SELECT idem_last_client_seq('inside', 'phone') AS inside, idem_last_client_seq('new', 'phone') AS new;
SELECT * FROM idem_try_append('inside', 'phone', 5);
SELECT * FROM idem_try_append('new', 'phone', 1);

-- The append of an exception block that failed is undone; the block may be
-- run again.
DO $$
DECLARE
	answer record;
BEGIN
	FOR attempt IN 1..2 LOOP
		BEGIN
			SELECT * INTO answer FROM idem_try_append('blocks', 'phone', 1, 2);
			RAISE WARNING 'attempt %: % % %', attempt, answer.outcome, answer.last_client_seq, answer.version;
			IF attempt = 1 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			RAISE WARNING 'failed at %', idem_last_client_seq('blocks', 'phone');
		END;
	END LOOP;
END
$$;
SELECT * FROM idem_try_append('blocks', 'phone', 1, 2);

-- Several calls in one statement see each other.
SELECT i, a.* FROM unnest('{1, 2, 2, 3, 1, 4}'::bigint[]) WITH ORDINALITY AS s (seq, i),
	idem_try_append('statement', 'phone', seq) AS a ORDER BY i;
-- The statement's own snapshot does not.
SELECT outcome, idem_last_client_seq('statement', 'phone') FROM idem_try_append('statement', 'phone', 5);
SELECT idem_last_client_seq('statement', 'phone');

-- The caller's events and the sequence commit together.
CREATE TABLE events (aggregate text, version bigint, event text, PRIMARY KEY (aggregate, version));
CREATE FUNCTION append_event(client text, seq bigint, event text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	answer record;
BEGIN
	SELECT * INTO answer FROM idem_try_append('events', client, seq, allow_gaps => false);
	IF answer.outcome = 'appended' THEN
		INSERT INTO events VALUES ('events', answer.version, event);
	END IF;
	RETURN answer.outcome;
END
$$;
SELECT append_event('phone', 1, 'created'), append_event('phone', 1, 'created'), append_event('phone', 3, 'sent'),
	append_event('tablet', 1, 'paid'), append_event('phone', 2, 'packed'), append_event('phone', 3, 'sent');
SELECT version, event FROM events ORDER BY version;
DROP FUNCTION append_event;
DROP TABLE events;

-- A superuser who deletes a row in the statement that appends gets an answer, too.
SET statement_timeout = '20s';
SELECT outcome FROM idem_try_append('deleted', 'phone', 1);
WITH gone AS (DELETE FROM idem_client_sequences WHERE aggregate = 'deleted' RETURNING aggregate)
	SELECT idem_try_append(aggregate, 'phone', 1) FROM gone;
WITH gone AS (DELETE FROM idem_aggregates WHERE aggregate = 'deleted' RETURNING aggregate)
	SELECT idem_try_append(aggregate, 'phone', 2) FROM gone;
WITH moved AS (UPDATE idem_aggregates SET version = 40 WHERE aggregate = 'deleted' RETURNING aggregate)
	SELECT idem_try_append(aggregate, 'phone', 3) FROM moved;
RESET statement_timeout;

--
-- NULL stands for the default
--
SELECT * FROM idem_try_append('nulls', 'phone', 2, NULL, NULL, NULL, NULL);
SELECT * FROM idem_try_append('nulls', 'phone', 3, NULL);

--
-- wait: nothing to wait for, no waiting
--
SELECT * FROM idem_try_append('waits', 'phone', 1, wait => '0');
SELECT * FROM idem_try_append('waits', 'phone', 1, wait => '10 minutes');
SELECT * FROM idem_try_append('waits', 'phone', 2, wait => '10 minutes');
SELECT * FROM idem_try_append('waits', 'phone', 3, wait => NULL);

--
-- The ends of bigint
--
SELECT * FROM idem_try_append('limits', 'phone', 9223372036854775806);
SELECT * FROM idem_try_append('limits', 'phone', 9223372036854775807, allow_gaps => false);
SELECT * FROM idem_try_append('limits', 'phone', 9223372036854775807);
SELECT idem_last_client_seq('limits', 'phone');
SELECT * FROM idem_try_append('limits', 'tablet', 9223372036854775806, 2);
SELECT * FROM idem_try_append('limits', 'tablet', 9223372036854775805, 3);
SELECT * FROM idem_try_append('limits', 'watch', 9223372034707292161, 2147483647);
SELECT * FROM idem_try_append('limits', 'camera', 1, 2147483647);
SELECT pg_temp.error_of($$ SELECT idem_try_append('limits', 'phone', 9223372036854775807, 2) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('limits', 'robot', 9223372034707292162, 2147483647) $$);
-- The version is a bigint too.  No sum of calls gets there in a lifetime.
UPDATE idem_aggregates SET version = 9223372036854775806 WHERE aggregate = 'limits';
SELECT pg_temp.error_of($$ SELECT idem_try_append('limits', 'robot', 1, 2) $$);
SELECT * FROM idem_try_append('limits', 'robot', 1, expected_version => 9223372036854775806);
SELECT pg_temp.error_of($$ SELECT idem_try_append('limits', 'robot', 2) $$);
SELECT * FROM idem_try_append('limits', 'robot', 1);
SELECT version FROM idem_aggregates WHERE aggregate = 'limits';
SELECT idem_last_client_seq('limits', 'robot');

--
-- Bad input
--
\pset format unaligned
\pset tuples_only on
SELECT pg_temp.error_of($$ SELECT idem_try_append(NULL, 'phone', 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', NULL, 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('', 'phone', 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', '', 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append(repeat('g', 513), 'phone', 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', repeat('ä', 128), 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', repeat('c', 1000000), 1) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', 0) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', -9223372036854775808) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', 1, 0) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', 1, -2147483648) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', 1, wait => '-1 ms') $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('bad', 'phone', 1, wait => '300000 years') $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq(NULL, 'phone') $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq('bad', NULL) $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq('', 'phone') $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq('bad', '') $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq('bad', repeat('c', 513)) $$);
-- Nothing of it got in, and the transaction lives on.
SELECT count(*) FROM idem_aggregates WHERE aggregate = 'bad';
\pset tuples_only off
\pset format aligned

--
-- Read-only transactions
--
BEGIN READ ONLY;
SELECT idem_last_client_seq('order-1', 'phone');
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 1) $$);
COMMIT;

--
-- Tables that somebody altered
--
BEGIN;
CREATE FUNCTION pg_temp.noop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE TRIGGER t BEFORE INSERT ON idem_aggregates FOR EACH ROW EXECUTE FUNCTION pg_temp.noop();
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
SELECT idem_last_client_seq('order-1', 'phone');
ROLLBACK;
BEGIN;
ALTER TABLE idem_client_sequences ADD CHECK (last_client_seq > 0);
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
SELECT pg_temp.error_of($$ SELECT idem_last_client_seq('order-1', 'phone') $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem_client_sequences ADD COLUMN note text;
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem_aggregates ENABLE ROW LEVEL SECURITY;
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
ROLLBACK;
BEGIN;
ALTER TABLE idem_aggregates DROP CONSTRAINT idem_aggregates_pkey;
SELECT pg_temp.error_of($$ SELECT idem_try_append('order-1', 'phone', 100) $$);
ROLLBACK;
SELECT * FROM idem_try_append('order-1', 'phone', 100);

-- Additional indexes are welcome, and are kept up to date.
CREATE INDEX more_1 ON idem_client_sequences (last_client_seq);
CREATE INDEX more_2 ON idem_aggregates ((version % 2), aggregate) WHERE version > 1;
SELECT count(*) FROM (SELECT i, a.* FROM generate_series(1, 300) AS i,
	idem_try_append('indexed ' || i % 10, 'phone', i) AS a) AS answers WHERE outcome = 'appended';
SET enable_seqscan = off;
SELECT count(*), sum(last_client_seq) FROM idem_client_sequences WHERE last_client_seq BETWEEN 291 AND 300;
SELECT count(*), sum(version) FROM idem_aggregates WHERE version % 2 = 0 AND version > 1 AND aggregate LIKE 'indexed %';
SET enable_seqscan = on;
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SELECT count(*), sum(last_client_seq) FROM idem_client_sequences WHERE last_client_seq BETWEEN 291 AND 300;
SELECT count(*), sum(version) FROM idem_aggregates WHERE version % 2 = 0 AND version > 1 AND aggregate LIKE 'indexed %';
RESET enable_seqscan;
RESET enable_indexscan;
RESET enable_bitmapscan;
DROP INDEX more_1, more_2;

-- Answers other than "appended" write nothing: they take no transaction id.
BEGIN;
SELECT outcome FROM idem_try_append('order-1', 'phone', 100);
SELECT outcome FROM idem_try_append('order-1', 'phone', 100, 2);
SELECT outcome FROM idem_try_append('order-1', 'phone', 102, allow_gaps => false);
SELECT outcome FROM idem_try_append('order-1', 'phone', 101, expected_version => 1);
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
SELECT outcome FROM idem_try_append('order-1', 'phone', 101);
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;
