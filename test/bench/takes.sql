-- The cost of a take of ten messages, in a separate database: the loads named
-- "take_..." say what else the outbox contains. Nothing is vacuumed.

CREATE EXTENSION idempotency;
ALTER TABLE idem_outbox SET (autovacuum_enabled = off);

-- Publish messages, take them, and acknowledge them.
CREATE PROCEDURE take_all(topic text, message_key text, messages int) LANGUAGE plpgsql AS $$
DECLARE
	ids bigint[];
BEGIN
	PERFORM count(*) FROM idem_publish_many(ARRAY[topic], array_fill('{"order": 1}'::jsonb, ARRAY[messages]), ARRAY[message_key]);
	COMMIT;
	-- With a lease that is over when the next take comes by, as after a while.
	SELECT array_agg(id) INTO ids FROM idem_outbox_take(messages, '1 millisecond');
	COMMIT;
	ASSERT idem_outbox_ack(ids) = messages;
	COMMIT;
	-- A take passes over what is a second old at least.
	PERFORM pg_sleep(1.5);
END
$$;

-- Publish ten messages by that statement, take ten, and acknowledge them, so
-- often, and keep what each take has cost.
CREATE TABLE costs (take int, us numeric, buffers numeric);
CREATE PROCEDURE measure_takes(publish text, takes int) LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	CREATE TEMP TABLE taken (id bigint);
	TRUNCATE costs;
	COMMIT;
	FOR take IN 1..takes LOOP
		EXECUTE publish;
		COMMIT;
		EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT json) INSERT INTO taken SELECT id FROM idem_outbox_take(10)' INTO plan;
		COMMIT;
		plan := plan -> 0 -> 'Plan' -> 'Plans' -> 0;
		ASSERT plan ->> 'Node Type' = 'Function Scan' AND (plan ->> 'Actual Rows')::numeric = 10, plan;
		INSERT INTO costs VALUES (take, (plan ->> 'Actual Total Time')::numeric * 1000,
			(plan ->> 'Shared Hit Blocks')::numeric + (plan ->> 'Shared Read Blocks')::numeric);
		ASSERT (SELECT idem_outbox_ack(array_agg(id)) FROM taken) = 10;
		DELETE FROM taken;
		COMMIT;
	END LOOP;
END
$$;
