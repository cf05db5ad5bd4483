--
-- What ends at some instant has ended at that instant, and not a moment later.
--
-- The clock cannot be stopped, so each test tries until a call happens to read
-- it in the very microsecond in which something ends.  What a call has read
-- shows in the times that it wrote.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;
SET synchronous_commit = off;

-- "start" starts something that ends after the interval $1, and returns when;
-- "ask" returns what the clock was if it finds that ended, or else NULL.  $2
-- is a number for the name of it.  Each try lasts a little longer than the one
-- before if that was asked too late, and a little less if it was too early, and
-- so comes near the time that asking takes.
CREATE PROCEDURE pg_temp.meet(start text, ask text, INOUT met boolean DEFAULT false)
LANGUAGE plpgsql AS $$
DECLARE
	give_up timestamptz := clock_timestamp() + '5 minutes';
	lasts interval := '0';
	step int := 0;
	n int := 1000000;
	ends timestamptz;
	asked timestamptz;
BEGIN
	WHILE NOT met AND clock_timestamp() < give_up LOOP
		n := n + 1;
		EXECUTE start INTO STRICT ends USING lasts, n;
		COMMIT;
		EXECUTE ask INTO asked USING n;
		COMMIT;
		met := coalesce(asked = ends, false);
		step := CASE WHEN asked IS NULL THEN least(step, 0) - 1 ELSE greatest(step, 0) + 1 END;
		lasts := greatest(lasts + step * '1 microsecond'::interval, '0');
	END LOOP;
END
$$;

-- A record, with its key
CALL pg_temp.meet(
	$$SELECT expires_at FROM idem_claim('edge', 'key-expires-' || $2, ttl => $1)$$,
	$$SELECT CASE WHEN outcome = 'new' THEN expires_at - '1 hour'::interval END
		FROM idem_claim('edge', 'key-expires-' || $1, ttl => '1 hour')$$);

-- The lease of a claim that is committed
CALL pg_temp.meet(
	$$SELECT lease_expires_at FROM idem_claim('edge', 'key-leased-' || $2, lease => $1)$$,
	$$SELECT CASE WHEN outcome = 'new' THEN lease_expires_at - '1 hour'::interval END
		FROM idem_claim('edge', 'key-leased-' || $1, lease => '1 hour')$$);

-- A once-only token; only the table tells its times.
CREATE FUNCTION pg_temp.use_token(name text, ttl interval) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
	IF idem_once('edge', name, ttl) THEN
		RETURN (SELECT expires_at FROM idem_tokens WHERE scope = 'edge' AND token = name);
	END IF;
	RETURN NULL;
END
$$;
CALL pg_temp.meet($$SELECT pg_temp.use_token($2::text, $1)$$,
	$$SELECT pg_temp.use_token($1::text, '1 hour') - '1 hour'::interval$$);

-- The delay of a message, without a key and with one
CREATE FUNCTION pg_temp.publish(name text, message_key text, delay interval) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_publish(name, '1', publish.message_key, deliver_after => delay);
	RETURN (SELECT available_at FROM idem_outbox WHERE topic = name AND state = 'pending');
END
$$;
CREATE FUNCTION pg_temp.take(name text) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM idem_outbox_take(1, '1 hour', ARRAY[name])) THEN
		RETURN (SELECT available_at - '1 hour'::interval FROM idem_outbox WHERE topic = name AND state = 'pending');
	END IF;
	RETURN NULL;
END
$$;
CALL pg_temp.meet($$SELECT pg_temp.publish('free ' || $2, NULL, $1)$$, $$SELECT pg_temp.take('free ' || $1)$$);
CALL pg_temp.meet($$SELECT pg_temp.publish('keyed ' || $2, 'key', $1)$$, $$SELECT pg_temp.take('keyed ' || $1)$$);
