--
-- Request identity: canonical JSON (RFC 8785) and the hash over it.
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idempotency;
CREATE EXTENSION idempotency;
RESET client_min_messages;

\pset format unaligned
\pset tuples_only on

--
-- RFC 8785, section 3.2.2: the primitive types; the bytes are those of 3.2.4
--
SELECT idem_canonical_json('{"string": "\u20AC$\u000f\nA''\u0042\"\\\\\"\u002F",
	"numbers":[333333333.33333329,1E+30,45e-1,2E-3,0.1e-26],"literals": [ null , true,false ]}');
SELECT regexp_replace(encode(convert_to(idem_canonical_json('{"literals":[null,true,false],
	"numbers":[333333333.33333329,1e30,4.50,0.002,1e-27],"string":"\u20ac$\u000F\u000aA''B\u0022\u005c\\\"\/"}'), 'UTF8'), 'hex'),
	'(.{40})', E'\\1\n', 'g');

--
-- Section 3.2.3: members by UTF-16 code units; the numbers tell the order
--
CREATE TEMP TABLE sorted AS SELECT idem_canonical_json('{"\u20ac":5, "\ufb33":7, "\ud83d\ude00":6, "\u00f6":4, "1":2, "\r":1, "\u0080":3}') AS canonical;
SELECT array_to_string(regexp_matches(canonical, ':(\d)', 'g'), '') FROM sorted;
SELECT canonical = U&'{"\005Cr":1,"1":2,"\0080":3,"\00F6":4,"\20AC":5,"\+01F600":6,"\FB33":7}' FROM sorted;
-- Surrogates come before U+E000, and after U+D7FF.
SELECT idem_canonical_json('{"\uffff":6, "\ue000":5, "\udbff\udfff":4, "\ud800\udc00":3, "\ud7ff":2, "a":1}')
	= U&'{"a":1,"\D7FF":2,"\+010000":3,"\+10FFFF":4,"\E000":5,"\FFFF":6}';
-- The time is linear in the length of a name.
SET statement_timeout = '1 min';
SELECT length(idem_canonical_json(jsonb_build_object('b', 2, repeat(U&'\E000\FFFF', 60000), 1))) AS length;
RESET statement_timeout;
-- A name comes before those that begin with it; all levels are sorted, arrays are not.
SELECT idem_canonical_json('{"ab": 4, "b": 6, "aa": 3, "a": 2, "": 1, "a ": 2.5, "abc": 5, "B": 0.5}');
SELECT idem_canonical_json('{"z": {"b": [{"d": 1, "c": [ ]}, {"b": { }, "a": 3}, 2, 1], "a": 1}, "y": []}');
-- however many and long they are
SELECT idem_canonical_json(jsonb_object_agg(repeat('k', 40 - i % 3) || i, i)) = '{' || string_agg('"' || repeat('k', 40 - i % 3) || i || '":' || i, ',' ORDER BY (repeat('k', 40 - i % 3) || i) COLLATE "C") || '}'
	FROM generate_series(1, 3000) AS i;

--
-- Strings: the shortest escapes, everything else as it is
--
SELECT c, idem_canonical_json(jsonb_build_object('', chr(c))) FROM generate_series(1, 31) AS c ORDER BY c;
SELECT idem_canonical_json('"\u0022\u005c\u002f\u0008\u0009\u000a\u000c\u000d\u001F\u0020"');
SELECT idem_canonical_json('"\u007f\u0080\u00a0\u2028\u2029\ufeff\uffff\ud83d\ude02"') = U&'"\007F\0080\00A0\2028\2029\FEFF\FFFF\+01F602"';
-- Names are written by the same rules.
SELECT idem_canonical_json('{"\u0041\n\u0001\"": 1}');
-- Nothing is normalised.
SELECT idem_canonical_json('["A\u030a", "\u00c5"]') = U&'["A\030A","\00C5"]';

--
-- Appendix B: IEEE doubles, by their bits, and how ECMAScript writes them
--
CREATE FUNCTION pg_temp.double(bits text) RETURNS float8
LANGUAGE plpgsql AS $$
DECLARE
	b bit(64) := ('x' || bits)::bit(64);
	fraction bigint := substring(b FROM 13)::bit(52)::bigint;
	exponent int := substring(b FROM 2 FOR 11)::bit(11)::int;
	sign float8 := CASE WHEN get_bit(b, 0) = 1 THEN -1 ELSE 1 END;
BEGIN
	IF exponent = 0 THEN
		RETURN sign * (fraction::float8 * 2::float8 ^ (-1074)::float8);
	END IF;
	RETURN sign * ((fraction + 4503599627370496)::float8 * 2::float8 ^ (exponent - 1075)::float8);
END
$$;
-- Its exact value rounded to 17 significant digits, which other writers send
CREATE FUNCTION pg_temp.digits_17(bits text) RETURNS numeric
LANGUAGE plpgsql AS $$
DECLARE
	b bit(64) := ('x' || bits)::bit(64);
	fraction numeric := substring(b FROM 13)::bit(52)::bigint;
	exponent int := substring(b FROM 2 FOR 11)::bit(11)::int;
	value numeric;
	power int;
BEGIN
	IF exponent = 0 THEN
		exponent := 1;
	ELSE
		fraction := fraction + 4503599627370496;
	END IF;
	-- 2 ^ -n is 5 ^ n / 10 ^ n, without a division
	value := CASE WHEN exponent >= 1075 THEN fraction * 2::numeric ^ (exponent - 1075)
		ELSE trim_scale(fraction * trunc(5::numeric ^ (1075 - exponent)) * ('1e' || (exponent - 1075))::numeric) END;
	IF value = 0 THEN
		RETURN 0;
	END IF;
	power := floor(log(value))::int;
	value := round(value, 16 - power);
	RETURN CASE WHEN get_bit(b, 0) = 1 THEN -value ELSE value END;
END
$$;
CREATE TEMP TABLE doubles (n int, bits text, written text);
INSERT INTO doubles VALUES
	(1, '0000000000000000', '0'),
	(2, '8000000000000000', '0'),
	(3, '0000000000000001', '5e-324'),
	(4, '8000000000000001', '-5e-324'),
	(5, '7fefffffffffffff', '1.7976931348623157e+308'),
	(6, 'ffefffffffffffff', '-1.7976931348623157e+308'),
	(7, '4340000000000000', '9007199254740992'),
	(8, 'c340000000000000', '-9007199254740992'),
	(9, '4430000000000000', '295147905179352830000'),
	(10, '44b52d02c7e14af5', '9.999999999999997e+22'),
	(11, '44b52d02c7e14af6', '1e+23'),
	(12, '44b52d02c7e14af7', '1.0000000000000001e+23'),
	(13, '444b1ae4d6e2ef4e', '999999999999999700000'),
	(14, '444b1ae4d6e2ef4f', '999999999999999900000'),
	(15, '444b1ae4d6e2ef50', '1e+21'),
	(16, '3eb0c6f7a0b5ed8c', '9.999999999999997e-7'),
	(17, '3eb0c6f7a0b5ed8d', '0.000001'),
	(18, '41b3de4355555553', '333333333.3333332'),
	(19, '41b3de4355555554', '333333333.33333325'),
	(20, '41b3de4355555555', '333333333.3333333'),
	(21, '41b3de4355555556', '333333333.3333334'),
	(22, '41b3de4355555557', '333333333.33333343'),
	(23, 'becbf647612f3696', '-0.0000033333333333333333'),
	(24, '43143ff3c1cb0959', '1424953923781206.2');
SELECT count(*) FROM doubles WHERE encode(float8send(pg_temp.double(bits)), 'hex') = bits;
-- The table is right: what is written reads back as the double.
SELECT n FROM doubles WHERE written::float8 <> pg_temp.double(bits);
-- What ECMAScript writes is canonical as it is.
SELECT bits, idem_canonical_json(written::jsonb) FROM doubles ORDER BY n;
SELECT n FROM doubles WHERE idem_canonical_json(written::jsonb) <> written;
-- With more zeros and another exponent
SELECT n FROM doubles WHERE idem_canonical_json((CASE WHEN written LIKE '%e%' THEN replace(written, 'e', CASE WHEN written LIKE '%.%' THEN '000E' ELSE '.000E' END)
	WHEN written LIKE '%.%' THEN written || '00e+0' ELSE written || '.00e-0' END)::jsonb) <> written;
-- The server's own spelling of the double. It writes one of them, an integer
-- that no double is, in a way that ECMAScript does not: it keeps its digits.
SHOW extra_float_digits;
SELECT n, pg_temp.double(bits), idem_canonical_json(to_jsonb(pg_temp.double(bits))) FROM doubles
	WHERE idem_canonical_json(to_jsonb(pg_temp.double(bits))) <> written ORDER BY n;
-- Seventeen digits, of those that are no integers
SELECT n, pg_temp.digits_17(bits) FROM doubles WHERE n IN (16, 19, 23, 24) ORDER BY n;
SELECT count(*), count(*) FILTER (WHERE idem_canonical_json(to_jsonb(pg_temp.digits_17(bits))) = written) FROM doubles
	WHERE pg_temp.digits_17(bits) <> trunc(pg_temp.digits_17(bits));
-- What is no JSON number
SELECT to_jsonb('NaN'::float8), to_jsonb('Infinity'::float8);
-- Ten thousand doubles of all sizes: the server's shortest digits survive, in
-- ECMAScript's layout.
SELECT setseed(0.5) \gset
CREATE TEMP TABLE random_doubles AS SELECT (random() * 2 - 1) * 10::float8 ^ (random() * 36 - 18)::int AS d FROM generate_series(1, 10000);
SELECT count(*) FROM random_doubles WHERE idem_canonical_json(to_jsonb(d))::float8 <> d;
SELECT count(*) FROM random_doubles WHERE idem_canonical_json(to_jsonb(d)) !~ '^-?(0|[1-9]\d{0,20}|(0|[1-9]\d*)\.\d*[1-9]|[1-9](\.\d*[1-9])?e[+-]\d+)$';
SELECT count(*) FROM random_doubles WHERE abs(d) >= 1e-6 AND abs(d) < 1e21 AND idem_canonical_json(to_jsonb(d)) LIKE '%e%';
SELECT count(*) FROM random_doubles WHERE abs(d) < 1e-6 AND idem_canonical_json(to_jsonb(d)) NOT LIKE '%e-%';

--
-- Layout, and numbers that keep their digits because no double has written them
--
SELECT written, idem_canonical_json(written::jsonb) FROM (VALUES
	(1, '0'), (2, '-0'), (3, '0.000'), (4, '-0e-10'), (5, '0E999'),
	(6, '1.0'), (7, '1e0'), (8, '100e-2'), (9, '0.1e1'), (10, '1.000000000000000000000000000000'), (11, '-1.50'), (12, '1E2'), (13, '1e+2'),
	(14, '123456789012345680000'), (15, '1000000000000000000000'), (16, '1e21'), (17, '1e20'), (18, '12e20'), (19, '-1e21'),
	(20, '0.000001'), (21, '0.0000001'), (22, '0.00000123'), (23, '0.000000123'), (24, '1.5e-7'), (25, '100.001'),
	-- more than 17 digits
	(26, '0.1000000000000000055511151231257827'), (27, '0.100000000000000005'), (28, '3.14159265358979323846264338327950288'),
	(29, '123456789012345678901'), (30, '1234567890123456789012'), (31, '123456789012345678901234567890'), (32, '-12345678901234567890.123456789'),
	(33, '1.7976931348623157081e308'), (34, '0.00000012345678901234567890'),
	-- integers that a double would round
	(35, '9007199254740991'), (36, '9007199254740992'), (37, '9007199254740993'), (38, '9007199254740994'), (39, '-9007199254740993'),
	(40, '12345678901234567'), (41, '12345678901234568'), (42, '99999999999999999'), (43, '10000000000000000'), (44, '9007199254740993e1'),
	(45, '9223372036854775807'), (46, '18446744073709551615'), (47, '1152921504606846976'),
	-- beyond the doubles
	(48, '1e309'), (49, '-2e400'), (50, '1e-400'), (51, '1.7976931348623159e308'), (52, '1.7976931348623157e308'), (53, '2e-324'), (54, '3e-324'), (55, '1e5000'), (56, '1.5e131071'), (57, '1e-16383'),
	-- fractions of up to 17 digits are the nearest double
	(58, '0.1'), (59, '0.30000000000000004'), (60, '0.29999999999999999'), (61, '333333333.33333329'), (62, '2.2250738585072014e-308'), (63, '4.9406564584124654e-324'), (64, '1234567890.1234567'), (65, '0.5000000000000001'),
	-- integers of up to 17 digits that are a double, which ECMAScript writes with fewer
	(66, '72057594037927936'), (67, '18014398509481992'), (68, '-1e22')
	) AS v (n, written) ORDER BY n;
-- None of these amounts hash alike.
SELECT count(*), count(DISTINCT idem_request_hash('POST', '/', n)) FROM unnest('{9007199254740991,9007199254740992,9007199254740993,9007199254740994,9007199254740995,12345678901234567,12345678901234568,12345678901234569,100000000000000000000,100000000000000000001,100000000000000000000.5,0.1,0.100000000000000001,0.1000000000000000011,1e400,1e401,-1e400,1e-400,1e-401}'::text[]) AS n;

--
-- One document, many spellings, one hash
--
SELECT idem_canonical_json(body::jsonb), count(*), count(DISTINCT idem_request_hash('POST', '/orders', body))
	FROM (VALUES
	('{"amount":100,"items":[1,2.5,"\u20ac"],"note":null,"ok":true}'),
	('{ "ok" : true , "note" : null , "items" : [ 1 , 2.5 , "€" ] , "amount" : 100 }'),
	(E'\n{\t"ok":\ttrue,\r\n"note":null,"items":[1.0,25e-1,"\\u20AC"],"amount":1e2}\n'),
	('{"\u0061mount":100.000,"items":[10E-1,2.50,"€"],"note":null,"ok":true}'),
	('{"amount":0,"note":false,"ok":true,"note":null,"items":[1,2.5,"€"],"amount":1.00E+2}')) AS b (body) GROUP BY 1;
-- The last of duplicate members wins.
SELECT idem_canonical_json('{"a":1,"b":{"c":1,"c":2},"a":[],"a":3}');
-- Others differ.
SELECT count(DISTINCT idem_request_hash('POST', '/', body)), count(*) FROM unnest(ARRAY[NULL, 'null', '{}', '[]', '""', '0', 'false', '"0"', '"null"', '{"":null}', '{"a":1}', '{"a":"1"}', '{"A":1}', '{"a":[1]}', '[{"a":1}]', '[1,2]', '[2,1]', '"\u00c5"', '"A\u030a"', '" "']) AS body;
-- A canonical document is its own canonical form.
SELECT count(*) FROM (SELECT idem_canonical_json(d::jsonb) FROM unnest(ARRAY['{"b":[1e30,0.1,-0,"\u0001\u20ac"],"a":{}}', '"\ud83d\ude00\r"', '[[],{"\uffff":1,"\ud83d\ude00":2}]', '1.10', 'null', '12345678901234567890.50', '1e-7000']) AS d) AS c (canonical)
	WHERE idem_canonical_json(canonical::jsonb) = canonical;
-- Scalars, empty things
SELECT idem_canonical_json(d::jsonb) FROM unnest('{"null",true,false,"\"\"","[]","{}","[[],[[]]]","{\"\":{}}",-1.0}'::text[]) AS d;

--
-- The hash: SHA-256 over METHOD:path:body
--
SELECT encode(idem_request_hash('POST', '/orders', '{"amount": 1.0}'), 'hex');
SELECT encode(idem_request_hash('GET', '/', NULL::text), 'hex');
SELECT encode(idem_request_hash('PUT', '/users/7:avatar', '\x89504e470d0a1a0a'::bytea), 'hex');
SELECT idem_request_hash('POST', '/orders', '{"amount": 1.0}') = sha256('POST:/orders:{"amount":1}');
SELECT idem_request_hash('GET', '/', NULL::text) = sha256('GET:/:');
SELECT idem_request_hash('GET', '/') = sha256('GET:/:'), idem_request_hash('GET', '/', NULL) = sha256('GET:/:'),
	idem_request_hash('GET', '/', NULL::jsonb) = sha256('GET:/:'), idem_request_hash('GET', '/', NULL::bytea) = sha256('GET:/:'), idem_request_hash('GET', '/', ''::bytea) = sha256('GET:/:'),
	idem_request_hash('GET', '/', ''::text) = sha256('GET:/:'), idem_request_hash('GET', '/', '') = sha256('GET:/:');
-- method: ASCII upper case
SELECT idem_request_hash('Post', '/') = sha256('POST:/:'), idem_request_hash('patch', '/') = idem_request_hash('PATCH', '/'),
	idem_request_hash('m-search', '/') = sha256('M-SEARCH:/:'), idem_request_hash('i', '/') = sha256('I:/:'), idem_request_hash('!#$%&''*+-.^_`|~09az', '/') = sha256('!#$%&''*+-.^_`|~09AZ:/:');
SELECT idem_request_hash('POST', '/') = idem_request_hash('PUT', '/');
-- path: case and all the rest count, ":" is "%3A"
SELECT idem_request_hash('GET', '/a:b::c?d=e%20f#g') = sha256('GET:/a%3Ab%3A%3Ac?d=e%20f#g:'), idem_request_hash('GET', '') = sha256('GET::'),
	idem_request_hash('GET', '/A') = idem_request_hash('GET', '/a'), idem_request_hash('GET', '/a') = idem_request_hash('GET', '/a/');
SELECT idem_request_hash('GET', '/é€😀', '"é€😀"') = sha256(convert_to('GET:/é€😀:"é€😀"', 'UTF8'));
-- so that no two requests share a string, but those for one path written in two ways
SELECT idem_request_hash('GET', '/a:b') = idem_request_hash('GET', '/a%3Ab');
SELECT idem_request_hash('GET', '/a:1') = idem_request_hash('GET', '/a', '1'), idem_request_hash('GET', ':', '""') = idem_request_hash('GET', '', '":"');
SELECT idem_request_hash('GET', '/a', '1:"b"'::bytea) = idem_request_hash('GET', '/a:1', '"b"');
-- a parameter without a type, as most drivers bind strings, is text
PREPARE untyped AS SELECT idem_request_hash('POST', '/', $1);
SELECT parameter_types FROM pg_prepared_statements WHERE name = 'untyped';
DEALLOCATE untyped;
-- text and jsonb agree; bytea is byte for byte
SELECT count(*), count(*) FILTER (WHERE idem_request_hash('POST', '/', d) = idem_request_hash('POST', '/', d::jsonb)),
		count(*) FILTER (WHERE idem_request_hash('POST', '/', d) = sha256(convert_to('POST:/:' || idem_canonical_json(d::jsonb), 'UTF8')))
	FROM unnest(ARRAY['{"b":1.0,"a":[1e3]}', 'null', '"é"', '[1,{"\ud83d\ude00":"\uffff"}]', '1e131071', '{"a":1,"a":2}', ' 17 ', '12345678901234567890.10']) AS d;
SELECT idem_request_hash('POST', '/', '{"a": 1}'::bytea) = sha256('POST:/:{"a": 1}'), idem_request_hash('POST', '/', '{"a": 1}'::bytea) = idem_request_hash('POST', '/', '{"a": 1}'::text),
	idem_request_hash('POST', '/', '{"a":1}'::bytea) = idem_request_hash('POST', '/', '{"a": 1}'::jsonb);
SELECT idem_request_hash('POST', '/', string_agg(set_byte('\x00', 0, b), '' ORDER BY b)) = sha256('POST:/:'::bytea || string_agg(set_byte('\x00', 0, b), '' ORDER BY b)) FROM generate_series(0, 255) AS b;
SELECT length(idem_request_hash('GET', '/'));
-- An untyped body is JSON text; named notation
SELECT idem_request_hash('POST', '/', '{"a" : 1}') = sha256('POST:/:{"a":1}'), idem_request_hash(body => '{ }', path => '/', method => 'put') = sha256('PUT:/:{}');
-- large: out of line, compressed, a megabyte of body
CREATE TEMP TABLE bodies AS SELECT '[' || string_agg('"' || md5(i::text) || '"', ' , ') || ']' AS body, repeat('/long', 20000) AS path FROM generate_series(1, 30000) AS i;
SELECT idem_request_hash('POST', path, body) = sha256(('POST:' || path || ':' || replace(body, ' , ', ','))::bytea),
	idem_request_hash('POST', path, body::jsonb) = sha256(('POST:' || path || ':' || replace(body, ' , ', ','))::bytea),
	idem_request_hash('POST', path, body::bytea) = sha256(('POST:' || path || ':' || body)::bytea) FROM bodies;

--
-- Linear in the size of the document, however large its numbers are in full:
-- printed, these would take gigabytes.
--
SELECT length(idem_canonical_json(('[' || repeat('1e131071,', 19999) || '1e131071]')::jsonb));
SELECT length(idem_canonical_json(('[' || repeat('1e-16383,', 99999) || '1e-16383]')::jsonb));
SELECT left(idem_canonical_json(('[' || repeat('-1.5e100000,', 19999) || '0]')::jsonb), 30);
SELECT length(idem_request_hash('POST', '/', '{"a":' || repeat('[1e131071,', 1000) || '1e131071' || repeat(']', 1000) || '}'));
-- a number of a hundred thousand digits
SELECT idem_canonical_json(('1' || repeat('0', 99999) || '1')::jsonb) = '1.' || repeat('0', 99999) || '1e+100000';
SELECT idem_canonical_json(('0.' || repeat('0', 9999) || '1')::jsonb), length(idem_canonical_json(('0.' || repeat('1', 16000))::jsonb));
-- nesting
SELECT idem_canonical_json((repeat('[', 1000) || repeat(']', 1000))::jsonb) = repeat('[', 1000) || repeat(']', 1000);
SELECT idem_canonical_json((repeat('{"a": [', 1000) || '1.0' || repeat(']}', 1000))::jsonb) = repeat('{"a":[', 1000) || '1' || repeat(']}', 1000);

--
-- Fit for an index
--
CREATE TEMP TABLE requests (body jsonb);
INSERT INTO requests VALUES ('{"a":1.0}'), ('{"a":1}'), ('{"a":2}');
CREATE INDEX ON requests (idem_request_hash('POST', '/', body));
-- two of these documents are one
\set VERBOSITY terse
CREATE UNIQUE INDEX unique_body ON requests (idem_canonical_json(body));
\set VERBOSITY default
SELECT count(*) FROM requests WHERE idem_request_hash('POST', '/', body) = idem_request_hash('POST', '/', '{"a": 1e0}');

--
-- A large document can be cancelled.  A call that did not look for that would come to its end, and so would
-- what stands behind it, before the statement is.
--
CREATE TEMP SEQUENCE ended;
CREATE TEMP TABLE large AS SELECT jsonb_agg(n) AS elements, jsonb_object_agg(i, n) AS members
	FROM (SELECT i, ('1.' || 234567890123456 + i || 'e300')::numeric AS n FROM generate_series(1, 100000) AS i) AS numbers;
SET statement_timeout = '50ms';
SELECT length(idem_canonical_json(elements)), nextval('ended') FROM large;
SELECT length(idem_canonical_json(members)), nextval('ended') FROM large;
RESET statement_timeout;
SELECT is_called FROM ended;
DROP TABLE large;
DROP SEQUENCE ended;

--
-- The same in a database of another encoding
--
SELECT encode(idem_request_hash('POST', '/caf\u00e9/café', '{"straße":"naïve", "z":1, "a":"\u00e9", "\u0080":2}'), 'hex') AS utf8_hash \gset
SELECT idem_canonical_json('{"straße":"naïve", "z":1, "a":"\u00e9", "ÿ":2}') AS utf8_canonical \gset
SELECT current_database() AS regress_db \gset
SET client_min_messages = warning;
DROP DATABASE IF EXISTS regress_idem_latin1;
RESET client_min_messages;
CREATE DATABASE regress_idem_latin1 TEMPLATE template0 ENCODING 'LATIN1' LOCALE_PROVIDER libc LOCALE 'C';
\c regress_idem_latin1
CREATE EXTENSION idempotency;
SHOW server_encoding;
SELECT encode(idem_request_hash('POST', '/caf\u00e9/café', '{"straße":"naïve", "z":1, "a":"\u00e9", "\u0080":2}'), 'hex') = :'utf8_hash';
SELECT encode(idem_request_hash('POST', '/caf\u00e9/café', '{"straße":"naïve", "z":1, "a":"\u00e9", "\u0080":2}'::jsonb), 'hex') = :'utf8_hash';
SELECT idem_request_hash('POST', '/é', '"ü"') = sha256('\x504f53543a2fc3a93a22c3bc22');
SELECT idem_request_hash('POST', '/é', 'ü'::bytea) = sha256('\x504f53543a2fc3a93afc'::bytea), convert_to('ü', 'LATIN1');
SELECT idem_canonical_json('{"straße":"naïve", "z":1, "a":"\u00e9", "ÿ":2}') = :'utf8_canonical', octet_length(:'utf8_canonical');
-- Text that the database cannot store is an error, not another hash.
\set VERBOSITY sqlstate
SELECT idem_request_hash('POST', '/', '"\u20ac"');
SELECT idem_request_hash('POST', '/€');
\set VERBOSITY default
-- Keys, scopes, responses
SELECT outcome, idem_complete('größe', 'latin1-request-001', 200, 'schön') FROM idem_claim('größe', 'latin1-request-001');
SELECT outcome, response_body, octet_length(response_body) FROM idem_claim('größe', 'latin1-request-001');
SELECT idem_key_is_valid('schlüssel-0123456789');
\c :regress_db
DROP DATABASE regress_idem_latin1;
