--
-- Failures with a history, a schedule of pauses and a maximal age; dead letters; topics
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
CREATE FUNCTION pg_temp.id(name text) RETURNS bigint
LANGUAGE sql AS $$ SELECT id FROM idem_outbox WHERE payload #>> '{}' = name $$;
-- Take a message whose pause is over, and report a failure of this attempt.
CREATE FUNCTION pg_temp.fail(name text, error text, retry_after interval DEFAULT NULL, counted boolean DEFAULT true,
	schedule interval[] DEFAULT NULL, max_age interval DEFAULT NULL) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	UPDATE idem_outbox SET available_at = clock_timestamp() WHERE id = pg_temp.id(name);
	RETURN (SELECT idem_outbox_fail(t.id, t.attempt, error, retry_after, counted, schedule, max_age)
		FROM idem_outbox_take() AS t WHERE t.payload #>> '{}' = name);
END $$;
CREATE VIEW pg_temp.pauses AS
	SELECT payload #>> '{}' AS name, state, attempt - uncounted_attempts AS counted,
		date_trunc('minute', available_at - clock_timestamp() + interval '1 second') AS pause
	FROM idem_outbox ORDER BY id;

-- The pauses of the schedule, and death after one more attempt.
SELECT idem_publish('t', '"scheduled"') IS NOT NULL AS published;
SELECT pg_temp.fail('scheduled', 'first', schedule => '{5 minutes,1 hour}') AS state;
SELECT * FROM pg_temp.pauses;
-- An attempt that does not count does not advance it; retry_after is its pause.
SELECT pg_temp.fail('scheduled', 'free', '2 minutes', counted => false, schedule => '{5 minutes,1 hour}') AS state;
SELECT * FROM pg_temp.pauses;
-- The longer one of retry_after and the schedule counts.
SELECT pg_temp.fail('scheduled', E'second\nline', '3 hours', schedule => '{5 minutes,1 hour}') AS state;
SELECT * FROM pg_temp.pauses;
SELECT pg_temp.fail('scheduled', 'third', schedule => '{5 minutes,1 hour}') AS state;
SELECT regexp_replace(last_error, '\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ', 'TIME', 'g') AS last_error FROM idem_outbox;
SELECT split_part(last_error, 'Z', 1)::timestamp
	BETWEEN (now() AT TIME ZONE 'UTC') - interval '1 minute' AND (now() AT TIME ZONE 'UTC') + interval '1 minute' AS in_utc FROM idem_outbox;
-- Requeued: as before, with the history.
SELECT idem_outbox_requeue(ARRAY[pg_temp.id('scheduled')]);
SELECT pg_temp.fail('scheduled', 'fourth', schedule => '{}') AS state;
SELECT regexp_replace(last_error, '\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ', 'TIME', 'g') AS last_error FROM idem_outbox;
SELECT idem_outbox_last_error(id) = last_error AS is_last FROM idem_outbox;
SELECT idem_outbox_last_error(0), idem_outbox_last_error(NULL);
SELECT idem_outbox_requeue(ARRAY[pg_temp.id('scheduled')]);
SELECT pg_temp.fail('scheduled', repeat('x', 2000)) AS state;
SELECT max(length(line)) AS longest, count(*) AS lines FROM idem_outbox, regexp_split_to_table(last_error, '\n') AS line;
SELECT pg_temp.fail('scheduled', 'sixth') AS state;
SELECT count(*) AS lines FROM idem_outbox, regexp_split_to_table(last_error, '\n') AS line;
-- A relay that only postpones a message adds no error.
SELECT pg_temp.fail('scheduled', '', counted => false) AS state;
SELECT last_error ~ '^\S+ sixth\n' AS last FROM idem_outbox;

-- Age: any failure is the last one.
SELECT idem_publish('u', '"old"', 'k') IS NOT NULL AND idem_publish('u', '"behind"', 'k') IS NOT NULL AS published;
SELECT pg_temp.fail('old', 'young', '0 s', counted => false, max_age => '1 hour') AS state;
UPDATE idem_outbox SET created_at = created_at - interval '1 hour' WHERE id = pg_temp.id('old');
SELECT pg_temp.fail('old', 'late', counted => false, max_age => '1 hour') AS state;
UPDATE idem_outbox SET available_at = clock_timestamp() WHERE id = pg_temp.id('behind');
SELECT payload FROM idem_outbox_take(topics => '{u}');
SELECT id = pg_temp.id('old') AS id, topic, message_key, attempt, split_part(last_error, ' ', 2) LIKE 'late%' AS is_last FROM idem_outbox_dead();
SELECT count(*) FROM idem_outbox_dead(0);
SELECT count(*) FROM idem_outbox_dead(NULL);
-- A message that was only taken has none.
SELECT idem_outbox_last_error(pg_temp.id('behind'));

-- The server's limit remains.
SET idempotency.outbox_max_attempts = 1;
SELECT idem_publish('v', '"limited"') IS NOT NULL AS published;
SELECT pg_temp.fail('limited', 'only', schedule => '{1 s,1 s}') AS state;
RESET idempotency.outbox_max_attempts;

-- Another attempt, or none.
SELECT idem_publish('w', '"lost"') IS NOT NULL AS published;
SELECT idem_outbox_fail(pg_temp.id('lost'), 1, 'x') AS not_taken;
SELECT attempt FROM idem_outbox_take(topics => '{w}');
SELECT idem_outbox_fail(pg_temp.id('lost'), 2, 'x') AS other_attempt, idem_outbox_fail(-1, 1, 'x') AS no_message;
SELECT idem_outbox_ack(ARRAY[pg_temp.id('lost')]);
SELECT idem_outbox_fail(pg_temp.id('lost'), 1, 'x') AS acknowledged;

-- A report that is repeated, as after a lost answer, changes nothing.
SELECT idem_publish('x', '"repeated"') IS NOT NULL AS published;
SELECT attempt FROM idem_outbox_take(topics => '{x}');
SELECT idem_outbox_fail(pg_temp.id('repeated'), 1, 'once', '0 s', counted => false) AS state FROM generate_series(1, 3);
SELECT attempt, uncounted_attempts, count(*) AS lines FROM idem_outbox, regexp_split_to_table(last_error, '\n') AS line
	WHERE id = pg_temp.id('repeated') GROUP BY 1, 2;
SELECT pg_temp.fail('repeated', 'counts', schedule => '{5 minutes}') AS state;
SELECT pause FROM pg_temp.pauses WHERE name = 'repeated';
SELECT idem_outbox_fail(pg_temp.id('repeated'), 2, 'counts', schedule => '{-1 s}');
SELECT idem_outbox_fail(pg_temp.id('repeated'), 2, 'counts', schedule => '{1 s,NULL}');
-- A pause of no time is not negative.
SELECT DISTINCT idem_outbox_fail(-i, 1, 'x', schedule => '{0 s,1 s}') AS state FROM generate_series(1, 300) AS i;

-- Dead messages are found among many that were acknowledged.
INSERT INTO idem_outbox (id, message_id, topic, payload, state, in_due_index, acked_at, attempt, uncounted_attempts, created_at, available_at)
	SELECT 1000000 + i, gen_random_uuid(), 'z', 'null', 'acked', false, now(), 1, 0, now(), now() FROM generate_series(1, 20000) AS i;
ANALYZE idem_outbox;
SELECT count(*) FROM idem_outbox_dead(NULL);
CREATE FUNCTION pg_temp.buffers(query text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) ' || query INTO plan;
	RETURN (plan #>> '{0,Plan,Shared Hit Blocks}')::int + (plan #>> '{0,Plan,Shared Read Blocks}')::int;
END $$;
SELECT pg_temp.buffers('SELECT count(*) FROM idem_outbox_dead(NULL)') < 100 AS few_buffers;

-- Topics.
SELECT * FROM idem_outbox_topics();
SELECT * FROM idem_outbox_topics(1);
SELECT count(*) FROM idem_outbox_topics(NULL);
TRUNCATE idem_outbox;
SELECT * FROM idem_outbox_topics();
