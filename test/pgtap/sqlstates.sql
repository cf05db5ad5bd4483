--
-- SQLSTATEs: how every function refuses what it must refuse
--
-- Records in each state are committed first, and forgotten at the end.
--
SET client_min_messages = error;

CREATE TEMP TABLE records (
	state text,
	key text,
	token bigint
);

DO $$
DECLARE
	record_state text;
	record_key text;
BEGIN
	FOREACH record_state IN ARRAY ARRAY['live', 'abandoned', 'completed',
		'erased', 'failed', 'released', 'expired', 'other']
	LOOP
		record_key := 'order-number-' || record_state;
		INSERT INTO records
			SELECT record_state, record_key, claim_token
			FROM idem_claim('sqlstates', record_key, lease =>
				CASE record_state WHEN 'abandoned' THEN '0' ELSE '1 hour' END
				::interval);
		CASE record_state
			WHEN 'completed', 'erased' THEN
				PERFORM idem_complete('sqlstates', record_key, 200, 'done');
			WHEN 'failed' THEN
				PERFORM idem_fail('sqlstates', record_key);
			WHEN 'released' THEN
				PERFORM idem_release('sqlstates', record_key);
			ELSE
		END CASE;
	END LOOP;
	PERFORM idem_erase('sqlstates', 'order-number-erased');
	INSERT INTO records VALUES
		('never claimed', 'order-number-never', NULL);
END
$$;
UPDATE idem_keys SET expires_at = clock_timestamp() - interval '1 minute'
	WHERE key = 'order-number-expired';

BEGIN;

INSERT INTO records
	SELECT 'own', 'order-number-own', claim_token
	FROM idem_claim('sqlstates', 'order-number-own');

-- Every error that sqlstate_of() has seen.
CREATE TEMP TABLE errors (
	call text,
	key text,
	sqlstate text,
	message text,
	detail text,
	hint text,
	context text
);

-- The SQLSTATE that a call ends with, 00000 for none.  The call gets scope,
-- key and token as $1, $2 and $3, so that they are not part of its text, which
-- the error's context shows.  Whatever it does is rolled back, and so is what
-- is done before.  Unlike throws_ok() it cannot mistake an error of its own,
-- raised by a read-only transaction, say, for one of the call's.
CREATE FUNCTION pg_temp.sqlstate_of(call text,
	scope text DEFAULT 'sqlstates', key text DEFAULT 'order-number-some',
	token bigint DEFAULT NULL, before text DEFAULT '') RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	e errors;
	prepared boolean := false;
BEGIN
	EXECUTE before;
	prepared := true;
	EXECUTE 'SELECT ' || call USING scope, key, token;
	RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
	IF SQLSTATE = 'ZZ000' THEN
		RETURN '00000';
	ELSIF NOT prepared THEN
		RETURN 'not prepared: ' || SQLERRM;
	END IF;
	GET STACKED DIAGNOSTICS e.message = MESSAGE_TEXT,
		e.detail = PG_EXCEPTION_DETAIL, e.hint = PG_EXCEPTION_HINT,
		e.context = PG_EXCEPTION_CONTEXT;
	INSERT INTO errors VALUES (call, key, SQLSTATE, e.message, e.detail,
		e.hint, e.context);
	RETURN SQLSTATE;
END
$$;

CREATE SCHEMA sqlstates;
CREATE FUNCTION sqlstates.handler(request jsonb) RETURNS jsonb
LANGUAGE sql
RETURN request;

-- Functions of a scope and a key; those that take a claim token, with it.  Nobody
-- is waited for: a live key would keep idem_run for a minute.
CREATE TEMP TABLE key_functions (
	name text,
	kind text,
	call text
);
INSERT INTO key_functions VALUES
('idem_claim', 'claim', 'idem_claim($1, $2)'),
('idem_complete', 'complete', 'idem_complete($1, $2, 200, claim_token => $3)'),
('idem_complete, bytea', 'complete',
	$$idem_complete($1, $2, 200, '\x00'::bytea, claim_token => $3)$$),
('idem_checkpoint', 'renew',
	$$idem_checkpoint($1, $2, 'point', claim_token => $3)$$),
('idem_heartbeat', 'renew', 'idem_heartbeat($1, $2, claim_token => $3)'),
('idem_fail', 'fail', 'idem_fail($1, $2, claim_token => $3)'),
('idem_release', 'release', 'idem_release($1, $2, $3)'),
('idem_lookup', 'read', 'idem_lookup($1, $2)'),
('idem_forget', 'administer', 'idem_forget($1, $2)'),
('idem_erase', 'administer', 'idem_erase($1, $2)'),
('idem_run', 'claim',
	$$idem_run($1, $2, 'sqlstates.handler(jsonb)', '{}', wait => '0')$$);

SELECT plan(642);

--
-- Scope and key
--
SELECT is(pg_temp.sqlstate_of(call, scope, key), sqlstate,
	name || ': ' || description || ': ' || sqlstate)
FROM key_functions, (VALUES
	(NULL, 'order-number-good', '22004', 'NULL scope'),
	('', 'order-number-good', '22023', 'empty scope'),
	(repeat('é', 128), 'order-number-good', '22023', 'scope of 256 bytes'),
	(repeat('s', 16384), 'order-number-good', '22023', 'scope of 16 kB'),
	('sqlstates', NULL, 'ID001', 'NULL key'),
	('sqlstates', '', 'ID001', 'empty key'),
	('sqlstates', 'key-of-15-chars', 'ID001', 'key too short'),
	('sqlstates', repeat('k', 129), 'ID001', 'key too long'),
	('sqlstates', 'key with blanks in it', 'ID001', 'key with blanks'),
	('sqlstates', 'schlüssel-mit-umlaut', 'ID001', 'key with an umlaut')
) AS v (scope, key, sqlstate, description);

--
-- Claim tokens: what each state of the record answers to each token
--
SELECT is(
	pg_temp.sqlstate_of(f.call, key => r.key, token => CASE v.token
		WHEN 'right token' THEN r.token
		WHEN 'other token' THEN
			(SELECT o.token FROM records AS o WHERE o.state = 'other')
		WHEN 'future token' THEN 9223372036854775807
		WHEN 'token zero' THEN 0 END),
	e.sqlstate, format('%s: %s, %s: %s', f.name, v.state, v.token, e.sqlstate))
FROM (VALUES
	--				complete, checkpoint and heartbeat, fail, release
	('never claimed', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('never claimed', 'future token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('never claimed', 'token zero', 'ID004', 'ID004', 'ID004', 'ID004'),
	('released', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('released', 'right token', 'ID004', 'ID004', 'ID004', '00000'),
	('released', 'future token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'no token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'right token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('expired', 'other token', 'ID004', 'ID004', 'ID004', 'ID004'),
	('live', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'right token', '00000', '00000', '00000', '00000'),
	('live', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'future token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('live', 'token zero', 'ID003', 'ID003', 'ID003', 'ID003'),
	('abandoned', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('abandoned', 'right token', '00000', '00000', '00000', '00000'),
	('abandoned', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('completed', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('completed', 'right token', '00000', 'ID004', 'ID004', 'ID004'),
	('completed', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('erased', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('erased', 'right token', '00000', 'ID004', 'ID004', 'ID004'),
	('erased', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('failed', 'no token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('failed', 'right token', 'ID004', 'ID004', '00000', 'ID004'),
	('failed', 'other token', 'ID003', 'ID003', 'ID003', 'ID003'),
	('own', 'no token', '00000', '00000', '00000', '00000'),
	('own', 'right token', '00000', '00000', '00000', '00000'),
	('own', 'other token', 'ID003', 'ID003', 'ID003', 'ID003')
) AS v (state, token, complete, renew, fail, release)
JOIN records AS r ON r.state = v.state
JOIN key_functions AS f
	ON f.kind IN ('complete', 'renew', 'fail', 'release')
CROSS JOIN LATERAL (VALUES (CASE f.kind WHEN 'complete' THEN v.complete
	WHEN 'renew' THEN v.renew WHEN 'fail' THEN v.fail
	WHEN 'release' THEN v.release END)) AS e (sqlstate);

-- A claim that this transaction has renewed is not one that it has taken.
SELECT is(pg_temp.sqlstate_of(f.call, key => r.key,
		before => format('SELECT idem_heartbeat(''sqlstates'', %L,
			claim_token => %s)', r.key, r.token)), 'ID003',
	f.name || ': live, renewed in this transaction, no token: ID003')
FROM records AS r JOIN key_functions AS f
	ON f.kind IN ('complete', 'renew', 'fail', 'release')
WHERE r.state = 'live';

--
-- The other arguments of the key functions
--
SET LOCAL idempotency.max_response_size = '1kB';
SELECT is(pg_temp.sqlstate_of(call, key => 'order-number-own'), sqlstate,
	split_part(call, '(', 1) || ': ' || description || ': ' || sqlstate)
FROM (VALUES
	($$idem_claim($1, 'order-number-new', '')$$, '22023',
		'empty hash'),
	($$idem_claim($1, 'order-number-new',
		decode(repeat('00', 64), 'hex'))$$, '00000',
		'hash of 64 bytes'),
	($$idem_claim($1, 'order-number-new',
		decode(repeat('00', 65), 'hex'))$$, '22023',
		'hash of 65 bytes'),
	($$idem_claim($1, 'order-number-new', ttl => '-1 ms')$$, '22023',
		'negative ttl'),
	($$idem_claim($1, 'order-number-new', lease => '-1 ms')$$, '22023',
		'negative lease'),
	($$idem_claim($1, 'order-number-new', wait => '-1 ms')$$, '22023',
		'negative wait'),
	($$idem_claim($1, 'order-number-new', ttl => '1 month -31 days')$$,
		'22023', 'a ttl that comes out negative'),
	($$idem_claim($1, 'order-number-new', ttl => '0', lease => '0',
		wait => '0')$$, '00000', 'intervals of zero'),
	($$idem_claim($1, 'order-number-new', ttl => '300000 years')$$,
		'22008', 'a ttl beyond the last timestamp'),
	($$idem_claim($1, 'order-number-new', lease => '300000 years')$$,
		'22008', 'a lease beyond the last timestamp'),

	($$idem_complete($1, $2, NULL)$$, '22004', 'NULL status'),
	($$idem_complete($1, $2, NULL, '\x00'::bytea)$$, '22004',
		'NULL status, bytea'),
	($$idem_complete($1, $2, 200, NULL::bytea)$$, '00000',
		'NULL body'),
	($$idem_complete($1, $2, 200, repeat('x', 1024))$$, '00000',
		'largest body'),
	($$idem_complete($1, $2, 200, repeat('x', 1025))$$, '54000',
		'body too large'),
	($$idem_complete($1, $2, 200, repeat('é', 513))$$, '54000',
		'body too large in bytes'),
	($$idem_complete($1, $2, 200, decode(repeat('00', 1024), 'hex'))$$,
		'00000', 'largest bytea body'),
	($$idem_complete($1, $2, 200, decode(repeat('00', 1025), 'hex'))$$,
		'54000', 'bytea body too large'),
	($$idem_complete($1, $2, 200, 'x',
		to_json(repeat('x', 1022)))$$, '00000', 'largest headers'),
	($$idem_complete($1, $2, 200, 'x',
		to_json(repeat('x', 1023)))$$, '54000', 'headers too large'),
	($$idem_complete($1, $2, 200, 'x', '{Location}')$$, '22P02',
		'headers that are no JSON'),

	($$idem_checkpoint($1, $2, NULL)$$, '22004', 'NULL recovery point'),
	($$idem_checkpoint($1, $2, '')$$, '22023', 'empty recovery point'),
	($$idem_checkpoint($1, $2, repeat('x', 255))$$, '00000',
		'longest recovery point'),
	($$idem_checkpoint($1, $2, repeat('é', 128))$$, '22023',
		'recovery point of 256 bytes'),
	($$idem_checkpoint($1, $2, 'x', to_json(repeat('x', 1023)))$$, '54000',
		'recovery state too large'),
	($$idem_checkpoint($1, $2, 'x', lease => '-1 ms')$$, '22023',
		'negative lease'),
	($$idem_checkpoint($1, $2, 'x', lease => '300000 years')$$, '22008',
		'a lease beyond the last timestamp'),
	($$idem_heartbeat($1, $2, '-1 ms')$$, '22023', 'negative lease'),
	($$idem_heartbeat($1, $2, '300000 years')$$, '22008',
		'a lease beyond the last timestamp'),
	($$idem_heartbeat($1, $2, '0')$$, '00000', 'lease of zero'),
	($$idem_fail($1, $2, repeat('é', 10000))$$, '00000',
		'a long error text is no error')
) AS v (call, sqlstate, description);

SELECT idem_fail('sqlstates', 'order-number-own',
	'x' || repeat('é', 10000)) AS failed \gset
SELECT is(error, 'x' || repeat('é', 511),
	'idem_fail: a long error text is cut between characters')
FROM idem_lookup('sqlstates', 'order-number-own');

--
-- idem_run
--
CREATE TYPE sqlstates.other_response AS (
	status bigint,
	headers json,
	body text
);
CREATE DOMAIN sqlstates.domain AS jsonb;
CREATE FUNCTION sqlstates.no_arguments() RETURNS jsonb
LANGUAGE sql RETURN '{}'::jsonb;
CREATE FUNCTION sqlstates.two_arguments(a jsonb, b jsonb DEFAULT NULL)
RETURNS jsonb LANGUAGE sql RETURN a;
CREATE FUNCTION sqlstates.json_argument(a json) RETURNS jsonb
LANGUAGE sql RETURN a::jsonb;
CREATE FUNCTION sqlstates.returns_text(a jsonb) RETURNS text
LANGUAGE sql RETURN a::text;
CREATE FUNCTION sqlstates.returns_void(a jsonb) RETURNS void
LANGUAGE sql AS '';
CREATE FUNCTION sqlstates.returns_record(a jsonb) RETURNS record
LANGUAGE sql RETURN (200, NULL::json, 'x'::text);
CREATE FUNCTION sqlstates.returns_domain(a jsonb) RETURNS sqlstates.domain
LANGUAGE sql RETURN a;
CREATE FUNCTION sqlstates.returns_set(a jsonb) RETURNS SETOF jsonb
LANGUAGE sql AS 'SELECT a';
CREATE FUNCTION sqlstates.returns_other(a jsonb)
RETURNS sqlstates.other_response
LANGUAGE sql RETURN (200, NULL, 'x')::sqlstates.other_response;
CREATE FUNCTION sqlstates.returns_null(a jsonb) RETURNS jsonb
LANGUAGE sql RETURN NULL::jsonb;
CREATE FUNCTION sqlstates.returns_null_response(a jsonb) RETURNS idem_response
LANGUAGE sql RETURN NULL::idem_response;
CREATE FUNCTION sqlstates.strict(a jsonb) RETURNS jsonb
LANGUAGE sql STRICT RETURN a;
CREATE FUNCTION sqlstates.no_status(a jsonb) RETURNS idem_response
LANGUAGE sql RETURN (NULL, NULL, 'x')::idem_response;
CREATE FUNCTION sqlstates.status_only(a jsonb) RETURNS idem_response
LANGUAGE sql RETURN (204, NULL, NULL)::idem_response;
CREATE FUNCTION sqlstates.large(a jsonb) RETURNS idem_response
LANGUAGE sql RETURN (200, NULL, repeat('x', 1025))::idem_response;
CREATE FUNCTION sqlstates.large_jsonb(a jsonb) RETURNS jsonb
LANGUAGE sql RETURN to_jsonb(repeat('x', 1023));
CREATE FUNCTION sqlstates.large_headers(a jsonb) RETURNS idem_response
LANGUAGE sql RETURN (200, to_json(repeat('x', 1023)), 'x')::idem_response;
CREATE FUNCTION sqlstates.forgets(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT to_jsonb(idem_forget('sqlstates', 'order-number-some'));
$$;
CREATE FUNCTION sqlstates.fails(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT to_jsonb(idem_fail('sqlstates', 'order-number-some'));
$$;
CREATE FUNCTION sqlstates.releases(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT to_jsonb(idem_release('sqlstates', 'order-number-some'));
$$;
CREATE FUNCTION sqlstates.completes(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT to_jsonb(idem_complete('sqlstates', 'order-number-some', 200));
$$;
CREATE FUNCTION sqlstates.erases(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT to_jsonb(idem_complete('sqlstates', 'order-number-some', 200));
	SELECT to_jsonb(idem_erase('sqlstates', 'order-number-some'));
$$;
CREATE FUNCTION sqlstates.takes_over(a jsonb) RETURNS jsonb
LANGUAGE sql AS $$
	SELECT idem_fail('sqlstates', 'order-number-some');
	SELECT to_jsonb(c.claim_token)
	FROM idem_claim('sqlstates', 'order-number-some') AS c;
$$;
CREATE PROCEDURE sqlstates.procedure(a jsonb)
LANGUAGE sql AS '';

SELECT is(pg_temp.sqlstate_of(format(
		'idem_run($1, $2, ''sqlstates.%s'', ''{}'')', handler)), sqlstate,
	'idem_run: handler ' || description || ': ' || sqlstate)
FROM (VALUES
	('absent(jsonb)', '42883', 'that does not exist'),
	('no_arguments()', '42804', 'without an argument'),
	('two_arguments(jsonb, jsonb)', '42804', 'with two arguments'),
	('json_argument(json)', '42804', 'with an argument of another type'),
	('returns_text(jsonb)', '42804', 'that returns text'),
	('returns_void(jsonb)', '42804', 'that returns nothing'),
	('returns_record(jsonb)', '42804', 'that returns any record'),
	('returns_domain(jsonb)', '42804', 'that returns a domain'),
	('returns_set(jsonb)', '42804', 'that returns a set'),
	('returns_other(jsonb)', '42804', 'that returns another row'),
	('procedure(jsonb)', '42804', 'that is a procedure'),
	('returns_null(jsonb)', '22004', 'that returned NULL'),
	('returns_null_response(jsonb)', '22004', 'that returned a NULL row'),
	('no_status(jsonb)', '22004', 'that returned no status'),
	('status_only(jsonb)', '00000', 'that returned nothing but a status'),
	('strict(jsonb)', '00000', 'that is STRICT'),
	('large(jsonb)', '54000', 'that returned a body too large'),
	('large_jsonb(jsonb)', '54000', 'that returned a jsonb too large'),
	('large_headers(jsonb)', '54000', 'that returned headers too large'),
	('forgets(jsonb)', 'ID004', 'that forgot the key itself'),
	('fails(jsonb)', 'ID004', 'that failed the key itself'),
	('releases(jsonb)', 'ID004', 'that released the key itself'),
	('takes_over(jsonb)', 'ID003', 'that failed and claimed the key itself'),
	('completes(jsonb)', '55000', 'that completed the key itself'),
	('erases(jsonb)', '55000', 'that completed and erased the key itself')
) AS v (handler, sqlstate, description);
SELECT is(pg_temp.sqlstate_of(call), sqlstate,
	'idem_run: ' || description || ': ' || sqlstate)
FROM (VALUES
	('idem_run($1, $2, NULL, ''{}'')', '22004', 'NULL handler'),
	('idem_run($1, $2, 0::regprocedure, ''{}'')', '42883',
		'OID of no function'),
	('idem_run($1, $2, ''sqlstates.handler(jsonb)'', NULL)', '22004',
		'NULL request'),
	('idem_run($1, $2, ''sqlstates.handler(jsonb)'', ''null'')', '00000',
		'a JSON null is a request'),
	('idem_run($1, $2, ''sqlstates.handler(jsonb)'', ''{}'', ''-1 ms'')',
		'22023', 'negative ttl'),
	('idem_run($1, $2, ''sqlstates.handler(jsonb)'', ''{}'',
		wait => ''-1 ms'')',
		'22023', 'negative wait'),
	('idem_run($1, $2, ''sqlstates.handler(jsonb)'', ''{}'',
		''300000 years'')',
		'22008', 'a ttl beyond the last timestamp')
) AS v (call, sqlstate, description);
RESET idempotency.max_response_size;

--
-- Request identity
--
SELECT is(pg_temp.sqlstate_of(format('idem_request_hash(%s, %s, %s)',
		method, path, body)), sqlstate,
	format('idem_request_hash: %s, %s: %s', description, body, sqlstate))
FROM (VALUES ('NULL::text'), ('NULL::jsonb'), ('''{}''::text'),
		('''{}''::jsonb'), ('''\x00''::bytea')) AS b (body),
	(VALUES ('NULL', '''/''', '22004', 'NULL method'),
		('''GET''', 'NULL', '22004', 'NULL path'),
		('''''', '''/''', '22023', 'empty method'),
		('''GE T''', '''/''', '22023', 'method with a blank'),
		('''GET:''', '''/''', '22023', 'method with a colon'),
		('''GÉT''', '''/''', '22023', 'method beyond ASCII'),
		('''!#$%%&''''*+-.^_`|~09''', '''/''', '00000', 'any HTTP token'))
	AS v (method, path, sqlstate, description);
SELECT is(pg_temp.sqlstate_of(format('idem_request_hash(''POST'', ''/'',
		%s::text)', body)), sqlstate,
	'idem_request_hash: ' || description || ': ' || sqlstate)
FROM (VALUES
	('''''', '00000', 'an empty text is no body'),
	(''' ''', '22P02', 'a blank is no JSON'),
	('''{"a": 1''', '22P02', 'cut JSON'),
	('''{"a": 1}}''', '22P02', 'JSON with more behind it'),
	('''NaN''', '22P02', 'no JSON number'),
	('''"\u0000"''', '22P05', 'a character that text cannot hold'),
	('''1e200000''', '22003', 'a number that numeric cannot hold'),
	('repeat(''['', 100000) || repeat('']'', 100000)', '54001',
		'JSON nested too deeply'),
	('repeat(''['', 1000) || repeat('']'', 1000)', '00000',
		'JSON nested a thousand deep'),
	('''1e131071''', '00000', 'a number of 131072 digits')
) AS v (body, sqlstate, description);
SELECT is(idem_canonical_json(NULL), NULL,
	'idem_canonical_json: NULL of NULL');
SELECT is(pg_column_size(idem_request_hash('POST', '/', '1e131071')), 36,
	'a hash of 32 bytes, whatever the number');

--
-- User actions
--
SELECT is(pg_temp.sqlstate_of(format(f.call, VARIADIC
		CASE WHEN p.n IS NULL THEN a.arguments
			ELSE a.arguments[:p.n - 1] || v.value || a.arguments[p.n + 1:]
		END)),
	v.sqlstate,
	format('%s: %s %s: %s', split_part(f.call, '(', 1), p.name,
		v.description, v.sqlstate))
FROM (VALUES ('idem_try_advance(%L, %L, %L, 1)', 3),
		('idem_toggle(%L, %L, %L, %L, 1)', 4),
		('idem_set(%L, %L, %L, %L, true, 1)', 4),
		('idem_is_active(%L, %L, %L, %L)', 4),
		('idem_action_states(%L, %L, ARRAY[%L])', 3),
		('idem_forget_user(%L)', 1)) AS f (call, names),
	(VALUES (1, 'user_id'), (2, 'entity_type'), (3, 'entity_id'),
		(4, 'action_type')) AS p (n, name),
	(VALUES (ARRAY['sqlstates', 'post', '42', 'like'])) AS a (arguments),
	(VALUES (NULL, '22004', 'NULL'),
		('', '22023', 'empty'),
		(repeat('é', 128), '22023', 'of 256 bytes'),
		(repeat('s', 16384), '22023', 'of 16 kB'),
		(repeat('s', 255), '00000', 'of 255 bytes'))
	AS v (value, sqlstate, description)
WHERE p.n <= f.names;
SELECT is(pg_temp.sqlstate_of(call), sqlstate,
	split_part(call, '(', 1) || ': ' || description || ': ' || sqlstate)
FROM (VALUES
	($$idem_try_advance('u', 'e', 'i', NULL)$$, '22004', 'NULL action id'),
	($$idem_toggle('u', 'e', 'i', 'like', NULL)$$, '22004',
		'NULL action id'),
	($$idem_set('u', 'e', 'i', 'like', true, NULL)$$, '22004',
		'NULL action id'),
	($$idem_set('u', 'e', 'i', 'like', NULL, 1)$$, '22004', 'NULL active'),
	($$idem_set('u', 'e', 'i', 'like', true, 1, '{dislike,NULL}')$$, '22004',
		'NULL among the excluded'),
	($$idem_set('u', 'e', 'i', 'like', true, 1, '{""}')$$, '22023',
		'empty among the excluded'),
	($$idem_set('u', 'e', 'i', 'like', true, 1,
		ARRAY[repeat('x', 256)])$$, '22023',
		'256 bytes among the excluded'),
	($$idem_set('u', 'e', 'i', 'like', true, 1, '{dislike,like}')$$, '22023',
		'itself among the excluded'),
	($$idem_set('u', 'e', 'i', 'like', true, 1, '{Like}')$$, '00000',
		'itself in other letters')
) AS v (call, sqlstate, description);
SET LOCAL idempotency.max_action_id_lead = '1h';
SELECT is(pg_temp.sqlstate_of(call), 'ID005',
	split_part(call, '(', 1) || ': an action id ahead of the clock: ID005')
FROM (VALUES
	($$idem_try_advance('u', 'e', 'i', 9223372036854775807)$$),
	($$idem_toggle('u', 'e', 'i', 'like', 9223372036854775807)$$),
	($$idem_set('u', 'e', 'i', 'like', true, 9223372036854775807)$$)
) AS v (call);
RESET idempotency.max_action_id_lead;

--
-- Too many new keys
--
SET LOCAL idempotency.max_new_keys_per_minute = 1;
SELECT is(outcome, 'new', 'a first new key')
FROM idem_claim('sqlstates', 'order-number-first');
SELECT is(pg_temp.sqlstate_of(call, key => key, token => token), sqlstate,
	format('%s: too many new keys, %s: %s', name, key, sqlstate))
FROM key_functions, LATERAL (
	SELECT 'order-number-some', NULL::bigint,
		CASE kind WHEN 'claim' THEN 'ID002' WHEN 'read' THEN '00000'
			WHEN 'administer' THEN '00000' ELSE 'ID004' END
	UNION ALL
	SELECT key, records.token, '00000' FROM records WHERE state = 'live'
) AS v (key, token, sqlstate);
RESET idempotency.max_new_keys_per_minute;

--
-- Grants
--
SELECT is(pg_temp.sqlstate_of(format('%s(%s)', function, grantee)), sqlstate,
	format('%s(%s): %s', function, grantee, sqlstate))
FROM (VALUES ('idem_grant'), ('idem_revoke'), ('idem_check_grantee'))
	AS f (function),
	(VALUES ('NULL', '22004'),
		('''sqlstates_no_role''', '42704'),
		('''public''', '42704'),
		('0', '42704'),
		('''-''', '42704'),
		('4294967295::oid', '42704'),
		('current_user::regrole', '00000')) AS v (grantee, sqlstate);

--
-- Cleanup and statistics
--
SELECT is(pg_temp.sqlstate_of(call), sqlstate, call || ': ' || sqlstate)
FROM (VALUES
	('idem_raise_claim_tokens(NULL)', '22004'),
	('idem_raise_claim_tokens(4611686018427387904)', '22023'),
	('idem_raise_claim_tokens(-1)', '00000'),
	('idem_cleanup(0)', '22023'),
	('idem_cleanup(-1)', '22023'),
	('idem_cleanup(1)', '00000'),
	('idem_cleanup(2147483647)', '00000'),
	('idem_cleanup(NULL)', '00000'),
	('idem_stats_data()', '00000'),
	('idem_stats_reset()', '00000')
) AS v (call, sqlstate);

--
-- Read-only transactions
--
SELECT is(pg_temp.sqlstate_of(call, key => 'order-number-live',
		before => 'SET LOCAL transaction_read_only = on'), sqlstate,
	name || ' in a read-only transaction: ' || sqlstate)
FROM (
	SELECT name, call,
		CASE kind WHEN 'read' THEN '00000' ELSE '25006' END AS sqlstate
	FROM key_functions
	UNION ALL
	SELECT split_part(call, '(', 1), call, sqlstate
	FROM (VALUES
		($$idem_try_advance('u', 'e', 'i', 1)$$, '25006'),
		($$idem_toggle('u', 'e', 'i', 'like', 1)$$, '25006'),
		($$idem_set('u', 'e', 'i', 'like', true, 1)$$, '25006'),
		($$idem_is_active('u', 'e', 'i', 'like')$$, '00000'),
		($$idem_action_states('u', 'e', '{i}')$$, '00000'),
		($$idem_forget_user('u')$$, '25006'),
		($$idem_cleanup()$$, '25006'),
		($$idem_raise_claim_tokens(0)$$, '25006'),
		($$idem_stats_data()$$, '00000'),
		($$idem_stats_reset()$$, '00000'),
		($$idem_key_is_valid('order-number-live')$$, '00000'),
		($$idem_request_hash('GET', '/')$$, '00000'),
		($$idem_canonical_json('{}')$$, '00000')
	) AS v (call, sqlstate)
) AS calls;

--
-- Altered tables: what a direct write would skip is refused
--
CREATE FUNCTION sqlstates.trigger() RETURNS trigger
LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
SELECT is(pg_temp.sqlstate_of('idem_claim($1, $2)', before => change),
	'55000', 'idem_claim, ' || description || ': 55000')
FROM (VALUES
	('CREATE TRIGGER t BEFORE INSERT ON idem_keys
		FOR EACH ROW EXECUTE FUNCTION sqlstates.trigger()',
		'trigger on idem_keys'),
	('CREATE TRIGGER t AFTER UPDATE ON idem_keys
		FOR EACH STATEMENT EXECUTE FUNCTION sqlstates.trigger()',
		'statement trigger on idem_keys'),
	('CREATE TABLE sqlstates.child (scope text, key text,
		FOREIGN KEY (scope, key) REFERENCES idem_keys)',
		'foreign key to idem_keys'),
	('ALTER TABLE idem_keys ENABLE ROW LEVEL SECURITY',
		'row security on idem_keys'),
	('ALTER TABLE idem_keys ADD CHECK (attempt < 10)',
		'check constraint on idem_keys'),
	('CREATE RULE r AS ON INSERT TO idem_keys DO INSTEAD NOTHING',
		'rule on idem_keys'),
	('CREATE TABLE sqlstates.heir () INHERITS (idem_keys)',
		'table that inherits idem_keys'),
	('ALTER TABLE idem_keys ADD COLUMN tenant int',
		'column added to idem_keys'),
	('ALTER TABLE idem_keys DROP COLUMN error',
		'column dropped from idem_keys'),
	('ALTER TABLE idem_keys ALTER response_status TYPE bigint',
		'column of idem_keys of another type'),
	('UPDATE idem_keys SET request_hash = ''\x00'';
		ALTER TABLE idem_keys ALTER request_hash SET NOT NULL',
		'column of idem_keys made NOT NULL'),
	('ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey',
		'primary key of idem_keys dropped')
) AS v (change, description);
SELECT is(pg_temp.sqlstate_of(call, before => format('CREATE TRIGGER t
		BEFORE UPDATE ON %s FOR EACH ROW
		EXECUTE FUNCTION sqlstates.trigger()', relation)),
	'55000', format('%s, trigger on %s: 55000',
		split_part(call, '(', 1), relation))
FROM (VALUES
	($$idem_try_advance('u', 'e', 'i', 1)$$, 'idem_action_versions'),
	($$idem_toggle('u', 'e', 'i', 'like', 1)$$, 'idem_action_versions'),
	($$idem_toggle('u', 'e', 'i', 'like', 1)$$, 'idem_user_actions'),
	($$idem_set('u', 'e', 'i', 'like', true, 1)$$, 'idem_user_actions'),
	($$idem_cleanup()$$, 'idem_keys'),
	($$idem_cleanup()$$, 'idem_tokens'),
	($$idem_cleanup()$$, 'idem_outbox')
) AS v (call, relation);
SELECT is(pg_temp.sqlstate_of(call, key => 'order-number-live',
		token => (SELECT token FROM records WHERE state = 'live'),
		before => 'ALTER TABLE idem_keys ENABLE ROW LEVEL SECURITY'),
	'55000', name || ', row security on idem_keys: 55000')
FROM key_functions;
SELECT is(pg_temp.sqlstate_of(call, key => key,
		token => (SELECT token FROM records AS r WHERE r.key = v.key),
		before => 'CREATE PUBLICATION sqlstates FOR TABLE idem_keys;
			ALTER TABLE idem_keys REPLICA IDENTITY NOTHING'),
	sqlstate, description || ': ' || sqlstate)
FROM (VALUES
	('idem_claim($1, $2)', 'order-number-failed', '55000',
		'a takeover that a subscriber could not follow'),
	('idem_complete($1, $2, 200, claim_token => $3)', 'order-number-live',
		'55000', 'a completion that a subscriber could not follow'),
	('idem_forget($1, $2)', 'order-number-live', '55000',
		'a deletion that a subscriber could not follow'),
	('idem_claim($1, $2)', 'order-number-some', '00000',
		'an insertion, which it can')
) AS v (call, key, sqlstate, description);
SELECT is(pg_temp.sqlstate_of(call, key => 'order-number-live',
		token => (SELECT token FROM records WHERE state = 'live')),
	'00000', name || ' works on the table as it was')
FROM key_functions;

--
-- What errors say
--
SELECT cmp_ok(count(*), '>', 300::bigint,
	'the errors above have been looked at')
FROM errors;
CREATE TEMP VIEW said AS
	SELECT *, concat_ws(E'\n', message, detail, hint, context) AS everything
	FROM errors;
SELECT is_empty($$SELECT call, message, detail FROM said
	WHERE length(key) > 4 AND position(key IN everything) > 0$$,
	'no error shows a whole key');
SELECT is_empty($$SELECT call, message, detail FROM said
	WHERE sqlstate LIKE 'ID%' AND length(key) > 4
		AND position(left(key, 5) IN everything) > 0$$,
	'no error of class ID shows more than four characters of a key');
SELECT is_empty($$SELECT call, message FROM said
	WHERE length(key) > 4 AND sqlstate IN ('ID001', 'ID003', 'ID004')
		AND (position(left(key, 4) IN message) = 0
			OR message !~ ('\m' || length(key) || '\M'))$$,
	'errors about a key show four characters and the length');
SELECT is_empty($$SELECT call, sqlstate, message FROM said
	WHERE sqlstate LIKE 'ID%' AND (detail IS NULL OR hint IS NULL)
		AND key IS NOT NULL$$,
	'errors of class ID have a detail and a hint');
SELECT is_empty($$SELECT DISTINCT sqlstate, message FROM said
	WHERE message ~ '^[A-Z][a-z]' OR message ~ '\.$'$$,
	'messages begin in lower case and end without a full stop');
SELECT is_empty($$SELECT DISTINCT sqlstate, detail, hint FROM said
	WHERE sqlstate NOT IN ('22P02', '22P05')
		AND (detail <> '' AND detail !~ '^[A-Z].*\.$'
			OR hint <> '' AND hint !~ '^[A-Z].*\.$')$$,
	'details and hints are sentences');
SELECT is_empty($$SELECT call, message FROM said
	WHERE message ~ 'idem_[a-z_]+\('$$,
	'messages name no function');
\ir include/glance.sql
SELECT is_empty('SELECT * FROM unsaid_errors',
	'each error is in docs/reference.md, in the line of its function');

-- A key of four characters or less is a key, too.
SELECT is_empty($$SELECT key, message FROM said
	WHERE sqlstate = 'ID001' AND key = ANY (ARRAY['zq', 'zqxj'])
		AND position(key IN everything) > 0$$,
	'a short key is not shown whole either: ' || string_agg(
		pg_temp.sqlstate_of('idem_claim($1, $2)', key => key), ', '))
FROM (VALUES ('zq'), ('zqxj')) AS v (key);

SELECT * FROM finish();
ROLLBACK;

DO $$
BEGIN
	PERFORM idem_forget(scope, key) FROM idem_keys WHERE scope = 'sqlstates';
END
$$;
