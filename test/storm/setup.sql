-- The calls of the load of test/storm/run. Each function knows what was
-- committed before, and raises an error if it gets a wrong result.

CREATE SCHEMA idem;
CREATE EXTENSION idempotency SCHEMA idem;
CREATE EXTENSION amcheck;
CREATE ROLE storm_app LOGIN;
CREATE ROLE storm_other;
ALTER DATABASE :DBNAME SET search_path = public, idem;
-- REINDEX CONCURRENTLY waits for old transactions, which wait behind VACUUM FULL,
-- which waits for REINDEX: let them sort that out soon.
ALTER DATABASE :DBNAME SET deadlock_timeout = '20ms';
SET search_path = public, idem;
SELECT idem_grant('storm_app'), idem_grant_relay('storm_app');

-- Keys and tokens in demand are those of the last moments: some are new, some
-- are running, some are done.
CREATE FUNCTION slot(back int) RETURNS bigint LANGUAGE sql
AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 20)::bigint - back $$;
CREATE FUNCTION action_id(back int) RETURNS bigint LANGUAGE sql
AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - back $$;

--
-- Request keys
--

-- Each request takes effect once.
CREATE TABLE effects (scope text, key text, token bigint NOT NULL, PRIMARY KEY (scope, key));
-- Every claim that was granted, in order.
CREATE TABLE claims (n bigserial PRIMARY KEY, key text NOT NULL, token bigint NOT NULL);

-- Claim and complete in one transaction.
CREATE FUNCTION request(back int, patience interval) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'storm-request-' || slot(back);
	done boolean := EXISTS (SELECT FROM effects WHERE scope = 'one' AND key = k);
	c record;
	l record;
BEGIN
	SELECT * INTO c FROM idem_claim('one', k, sha256(k::bytea), wait => patience);
	IF c.outcome = 'new' AND NOT done THEN
		INSERT INTO effects VALUES ('one', k, c.claim_token);
		IF idem_complete('one', k, 201, 'order ' || c.claim_token, '{"a": 1}') IS NOT TRUE THEN
			RAISE 'not completed: % %', k, c;
		END IF;
	ELSIF c.outcome = 'replay' THEN
		PERFORM FROM effects WHERE scope = 'one' AND key = k AND c.response_body = 'order ' || token
			AND c.response_status = 201 AND c.response_headers::text = '{"a": 1}';
		IF NOT FOUND THEN
			RAISE 'replay of what has not been: % %', k, c;
		END IF;
		SELECT * INTO l FROM idem_lookup('one', k);
		IF l.state <> 'completed' OR l.response_body <> c.response_body THEN
			RAISE 'replay without a record: % %', k, l;
		END IF;
		SELECT * INTO c FROM idem_claim('one', k, sha256('another'));
		IF c.outcome <> 'hash_conflict' THEN
			RAISE 'another request with this key: % %', k, c;
		END IF;
	ELSIF c.outcome <> 'in_progress' OR done THEN
		RAISE 'wrong outcome: % % %', k, c, done;
	END IF;
END
$$;

-- The first of two transactions; returns the token, 0 where there is none.
CREATE FUNCTION job_start(slot bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	k text := 'storm-job-' || slot;
	done boolean := EXISTS (SELECT FROM effects WHERE scope = 'two' AND key = k);
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('two', k, lease => '20 milliseconds');
	IF c.outcome = 'new' AND NOT done THEN
		INSERT INTO claims (key, token) VALUES (k, c.claim_token);
		RETURN c.claim_token;
	ELSIF c.outcome = 'replay' THEN
		PERFORM FROM effects WHERE scope = 'two' AND key = k AND c.response_body = 'job ' || token;
		IF NOT FOUND THEN
			RAISE 'replay of what has not been: % %', k, c;
		END IF;
	ELSIF c.outcome <> 'in_progress' OR done THEN
		RAISE 'wrong outcome: % % %', k, c, done;
	END IF;
	RETURN 0;
END
$$;

-- The second, whose claim may have been taken over meanwhile.
CREATE FUNCTION job_end(slot bigint, held bigint, what int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'storm-job-' || slot;
BEGIN
	IF what <= 10 THEN
		PERFORM idem_fail('two', k, 'no', held);
	ELSIF what <= 20 THEN
		PERFORM idem_release('two', k, held);
	ELSIF what <= 30 THEN
		PERFORM idem_heartbeat('two', k, '20 milliseconds', held);
	ELSIF what <= 90 THEN
		PERFORM idem_checkpoint('two', k, 'point ' || held, NULL, '20 milliseconds', held);
		IF idem_complete('two', k, 201, 'job ' || held, claim_token => held) THEN
			INSERT INTO effects VALUES ('two', k, held);
		END IF;
	END IF;
EXCEPTION
	WHEN SQLSTATE 'ID003' OR SQLSTATE 'ID004' THEN
		IF NOT EXISTS (SELECT FROM claims WHERE key = k AND token > held) THEN
			RAISE 'nobody took % over, and yet % was lost', k, held;
		END IF;
END
$$;

-- Keys that expire, and are cleaned up: new again after that, but not before.
CREATE TABLE brief (key text PRIMARY KEY, expires_at timestamptz NOT NULL);

CREATE FUNCTION brief_request(slot int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'storm-brief-request-' || slot;
	started timestamptz := clock_timestamp();
	c record;
BEGIN
	IF slot % 2 = 0 THEN
		SELECT * INTO c FROM idem_claim_many('brief', ARRAY[k], ttl => '100 milliseconds');
	ELSE
		SELECT * INTO c FROM idem_claim('brief', k, ttl => '100 milliseconds');
	END IF;
	IF c.outcome = 'new' THEN
		PERFORM FROM brief WHERE key = k AND expires_at > clock_timestamp();
		IF FOUND THEN
			RAISE 'new before it expired: % %', k, c;
		END IF;
		INSERT INTO brief VALUES (k, c.expires_at)
			ON CONFLICT (key) DO UPDATE SET expires_at = excluded.expires_at;
		BEGIN
			IF slot % 3 = 0 THEN
				PERFORM idem_complete_many('brief', ARRAY[k], ARRAY[200], ARRAY[c.expires_at::text]);
			ELSE
				PERFORM idem_complete('brief', k, 200, c.expires_at::text);
			END IF;
		EXCEPTION WHEN SQLSTATE 'ID004' THEN
			-- It may have expired meanwhile, but not before.
			IF clock_timestamp() < c.expires_at THEN
				RAISE;
			END IF;
		END;
	ELSIF c.outcome = 'replay' THEN
		IF c.expires_at <= started OR c.response_body <> c.expires_at::text THEN
			RAISE 'wrong replay: % %', k, c;
		END IF;
	ELSIF c.outcome <> 'in_progress' THEN
		RAISE 'wrong outcome: % %', k, c;
	END IF;
END
$$;

CREATE FUNCTION handle(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effects VALUES ('run', 'storm-run-' || (request ->> 'slot'), 0);
	RETURN request;
END
$$;

CREATE FUNCTION run(slot bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'storm-run-' || slot;
	r record;
BEGIN
	SELECT * INTO r FROM idem_run('run', k, 'public.handle(jsonb)', jsonb_build_object('slot', slot));
	PERFORM FROM effects WHERE scope = 'run' AND key = k;
	IF NOT FOUND OR r.outcome NOT IN ('new', 'replay') OR (r.response_body::jsonb ->> 'slot')::bigint <> slot THEN
		RAISE 'wrong answer: % %', k, r;
	END IF;
END
$$;

--
-- User actions
--

-- Every one that was processed, in order.
CREATE TABLE intents (n bigserial PRIMARY KEY, entity text NOT NULL, action_id bigint NOT NULL, type text, active boolean);
CREATE INDEX ON intents (entity, action_id);

CREATE FUNCTION act(what text, number int, back int, wanted boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	e text := what || number;
	id bigint := action_id(back);
	type text := CASE id % 2 WHEN 0 THEN 'like' ELSE 'dislike' END;
	other text := CASE id % 2 WHEN 0 THEN 'dislike' ELSE 'like' END;
	highest bigint := (SELECT max(action_id) FROM intents WHERE entity = e);
	a record;
BEGIN
	IF what = 'set' THEN
		SELECT * INTO a FROM idem_set('u', 'post', e, type, wanted, id, ARRAY[other]);
	ELSIF what = 'toggle' THEN
		SELECT * INTO a FROM idem_toggle('u', 'post', e, 'like', id);
	ELSIF id % 3 = 0 THEN
		-- Of two equal ids at once the first is processed, if any.
		SELECT NULL::boolean AS is_active, min(last_action_id) AS last_action_id,
				bool_or(should_process AND ordinal = 1) AND NOT bool_or(should_process AND ordinal = 2) AS processed INTO a
			FROM idem_try_advance_many('{u}', '{post}', ARRAY[e], ARRAY[id, id]);
	ELSE
		SELECT NULL::boolean AS is_active, last_action_id, should_process AS processed INTO a
			FROM idem_try_advance('u', 'post', e, id);
	END IF;
	IF a.last_action_id < id OR a.last_action_id < highest
		OR a.processed AND (a.last_action_id <> id OR highest >= id OR what = 'set' AND a.is_active <> wanted)
	THEN
		RAISE 'wrong answer to % after %: %', id, highest, a;
	END IF;
	IF a.processed THEN
		INSERT INTO intents (entity, action_id, type, active) VALUES (e, id, type, a.is_active);
	END IF;
END
$$;

--
-- Client sequences
--

CREATE TABLE events (aggregate text, client text, seq bigint, PRIMARY KEY (aggregate, client, seq));

CREATE FUNCTION append(aggregate_number int, client_number int, back int, events int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	a text := 'aggregate ' || aggregate_number;
	c text := 'client ' || client_number;
	first bigint := greatest(1, idem_last_client_seq(a, c) + 1 - back);
	last bigint := first + events - 1;
	highest bigint;
	r record;
BEGIN
	SELECT * INTO r FROM idem_try_append(a, c, first, events, allow_gaps => false);
	IF r.outcome = 'appended' THEN
		INSERT INTO events SELECT a, c, generate_series(first, last);
		IF r.last_client_seq <> last THEN
			RAISE 'wrong answer to % %: %', first, last, r;
		END IF;
		RETURN;
	END IF;
	SELECT max(seq) INTO highest FROM events WHERE aggregate = a AND client = c;
	IF (r.outcome = 'duplicate' AND highest >= last
		OR r.outcome = 'overlap' AND highest >= first AND r.last_client_seq BETWEEN first AND last - 1
		OR r.outcome = 'in_flight') IS NOT TRUE
	THEN
		RAISE 'wrong answer to % %, where there is %: %', first, last, highest, r;
	END IF;
END
$$;

--
-- Tokens
--

CREATE TABLE seen (token text PRIMARY KEY);

CREATE FUNCTION use_tokens(slot bigint, count int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	tokens text[] := ARRAY(SELECT 'storm-token-' || slot + (hashtext(i::text || slot) & 7) FROM generate_series(1, count) AS i);
	fresh text[];
	t text;
BEGIN
	IF count = 1 THEN
		fresh := CASE WHEN idem_once('form', tokens[1]) THEN tokens ELSE '{}' END;
	ELSE
		fresh := ARRAY(SELECT idem_once_many('form', tokens));
	END IF;
	INSERT INTO seen SELECT unnest(fresh);
	SELECT token INTO t FROM unnest(tokens) AS token WHERE token NOT IN (SELECT s.token FROM seen AS s WHERE s.token = ANY (tokens));
	IF FOUND THEN
		RAISE '% was called seen, and is not', t;
	END IF;
END
$$;

--
-- Outbox and inbox
--

-- The number of each key's last message, and of the last one applied.
CREATE TABLE published (key text PRIMARY KEY, seq bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE applied (key text PRIMARY KEY, seq bigint NOT NULL) WITH (fillfactor = 50);
INSERT INTO published SELECT i, 0 FROM generate_series(1, 50) AS i;
INSERT INTO applied SELECT key, 0 FROM published;
CREATE TABLE in_hand (relay int, place bigint, id bigint, message_id uuid, key text, seq bigint);

CREATE FUNCTION publish(number int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	s bigint;
BEGIN
	UPDATE published SET seq = seq + 1 + number % 3 WHERE key = number::text RETURNING seq INTO s;
	IF number % 3 = 0 THEN
		PERFORM idem_publish('storm', jsonb_build_object('seq', s), number::text);
	ELSE
		PERFORM idem_publish_many('{storm}', array_agg(jsonb_build_object('seq', n) ORDER BY n), ARRAY[number::text])
			FROM generate_series(s - number % 3, s) AS n;
	END IF;
END
$$;

CREATE FUNCTION take(relay int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO in_hand SELECT relay, place, id, message_id, message_key, (payload ->> 'seq')::bigint
		FROM idem_outbox_take(50, '30 seconds') WITH ORDINALITY
			AS m (id, message_id, topic, message_key, payload, headers, attempt, created_at, place);
END
$$;

CREATE FUNCTION deliver(this_relay int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	m record;
BEGIN
	-- A message that another relay has taken over is not delivered here.
	DELETE FROM in_hand WHERE relay = this_relay AND id NOT IN (SELECT idem_outbox_extend(ARRAY(
		SELECT h.id FROM in_hand AS h WHERE h.relay = this_relay ORDER BY h.id)));
	FOR m IN SELECT * FROM in_hand WHERE relay = this_relay ORDER BY place LOOP
		IF idem_once('inbox', m.message_id::text) THEN
			UPDATE applied SET seq = m.seq WHERE key = m.key AND seq = m.seq - 1;
			IF NOT FOUND THEN
				RAISE 'out of order: %', m;
			END IF;
		END IF;
	END LOOP;
	PERFORM idem_outbox_ack(ARRAY(SELECT id FROM in_hand WHERE relay = this_relay));
	DELETE FROM in_hand WHERE relay = this_relay;
END
$$;

GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO storm_app;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO storm_app;

-- For the sessions that rewrite the extension's tables meanwhile.
CREATE TABLE our_tables AS SELECT row_number() OVER (ORDER BY relname)::int AS n, relname AS t
	FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r';

-- An application may not clean up by itself.
CREATE FUNCTION cleanup() RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = idem
AS $$ SELECT idem_cleanup(100) $$;

-- A REINDEX CONCURRENTLY that ends in a deadlock leaves its new indexes.  VACUUM
-- FULL makes them valid and the next REINDEX doubles them: soon hundreds.
CREATE FUNCTION drop_leftovers(number int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	leftover regclass;
BEGIN
	FOR leftover IN
		SELECT indexrelid FROM our_tables AS o JOIN pg_class AS c ON c.oid = ('idem.' || o.t)::regclass
			JOIN pg_index ON indrelid = c.oid OR indrelid = c.reltoastrelid AND NOT indisvalid
		WHERE n = number AND indexrelid::regclass::text ~ '_cc(new|old)[0-9]*$'
	LOOP
		EXECUTE 'DROP INDEX ' || leftover;
	END LOOP;
END
$$;
