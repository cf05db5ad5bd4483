# Database encodings other than UTF8: the same request has the same hash, which
# is that of its UTF-8 form, computed here without the server.

use Digest::SHA qw(sha256 sha256_hex);
use IdempotencyTest;

# This file is in UTF-8, and its strings are bytes.
$ENV{PGCLIENTENCODING} = 'UTF8';

my $node = new_node('encoding');
my @databases = ('utf8', 'latin1', 'sql_ascii', 'euc_jp');

foreach my $database (@databases)
{
	$node->safe_psql('postgres',
		"CREATE DATABASE $database ENCODING '$database' LOCALE 'C' TEMPLATE template0");
	$node->safe_psql($database, 'CREATE EXTENSION idempotency');
}

# The hash as a service outside the database would compute it.
sub expected_hash
{
	my ($method, $path, $body) = @_;

	return sha256_hex("$method:$path:$body");
}

# Title, path, body, path and body as they are hashed, databases that have
# all the characters.  SQL_ASCII takes bytes as they come, here UTF-8.
my @requests = (
	[ 'ASCII', '/orders', '{"b": 1.0, "a": [true, null, "x\ty"]}',
		'/orders', '{"a":[true,null,"x\ty"],"b":1}', @databases ],
	[ 'ASCII with escapes', '/a:b', '{"\u0062": "\u0041\u002f\/\u007f"}',
		'/a%3Ab', "{\"b\":\"A//\x7f\"}", @databases ],
	[ 'Latin letters', '/cafés/crème:brûlée', '{"zoë": "naïve", "a": "ÿ", "é": ["ñ", {"ü": "ß"}]}',
		'/cafés/crème%3Abrûlée', '{"a":"ÿ","zoë":"naïve","é":["ñ",{"ü":"ß"}]}',
		'utf8', 'latin1', 'sql_ascii' ],
	[ 'Latin letters, escaped', '/é', '{"zo\u00eb": "na\u00efve", "\u00e9": "\u00ff"}',
		'/é', '{"zoë":"naïve","é":"ÿ"}',
		'utf8', 'latin1' ],
	[ 'control characters of Latin-1', '/', '{"\u0080": "\u009f\u00a0", "\u007f": "\u001f\u0008"}',
		'/', "{\"\x7f\":\"\\u001f\\b\",\"\xc2\x80\":\"\xc2\x9f\xc2\xa0\"}",
		'utf8', 'latin1' ],
	[ 'Japanese', '/注文', '{"数量": 2, "商品": "りんご", "a": "日本語"}',
		'/注文', '{"a":"日本語","商品":"りんご","数量":2}',
		'utf8', 'sql_ascii', 'euc_jp' ],
	[ 'Japanese, escaped', '/', '{"\u6570\u91cf": "\u308a\u3093\u3054"}',
		'/', '{"数量":"りんご"}',
		'utf8', 'euc_jp' ],
	# U+FB33 comes after the emoji in UTF-16, before it in UTF-8.
	[ 'beyond the Basic Multilingual Plane', '/', "{\"\xef\xac\xb3\": 1, \"😀\": 2, \"€\": 3, \"1\": 4}",
		'/', "{\"1\":4,\"€\":3,\"😀\":2,\"\xef\xac\xb3\":1}",
		'utf8', 'sql_ascii' ]);

foreach my $request (@requests)
{
	my ($title, $path, $body, $hashed_path, $hashed_body, @where) = @$request;
	my $hash = expected_hash('POST', $hashed_path, $hashed_body);

	foreach my $database (@where)
	{
		is( $node->safe_psql($database,
				"SELECT idem_canonical_json('$body');
				 SELECT encode(idem_request_hash('post', '$path', '$body'), 'hex');
				 SELECT encode(idem_request_hash('post', '$path', '$body'::jsonb), 'hex');"),
			"$hashed_body\n$hash\n$hash", "$database: $title");
		is( $node->safe_psql($database,
				"SELECT encode(idem_request_hash('POST', '$path'), 'hex');
				 SELECT encode(idem_request_hash('POST', '$path', '\\xff00e9'::bytea), 'hex')"),
			expected_hash('POST', $hashed_path, '') . "\n"
			  . expected_hash('POST', $hashed_path, "\xff\x00\xe9"),
			"$database: $title, with no body or bytes");
	}
}

# From a client of another encoding it is the same text.
my $latin = "SET client_encoding = 'LATIN1';
	SELECT encode(idem_request_hash('POST', '/caf\xe9', '{\"\xe9\": \"\xff\"}'), 'hex')";

foreach my $database ('utf8', 'latin1')
{
	is($node->safe_psql($database, $latin),
		expected_hash('POST', '/café', '{"é":"ÿ"}'), "$database: from a LATIN1 client");
}

# Text that the database cannot store, and bytes that are not text, are an
# error that leaves the session unchanged, never another hash.
is(sqlstate_of($node, 'SELECT idem_request_hash(\'POST\', \'/\', \'{"a": "\u20ac"}\')', 'latin1'),
	'22P05', 'latin1: an escaped character that it does not have');
is(sqlstate_of($node, "SELECT idem_request_hash('POST', '/€')", 'latin1'),
	'22P05', 'latin1: a character that it does not have');

# A client of the database's encoding, so that its bytes arrive as they are.
my $raw = session($node, 'sql_ascii');
is( $raw->run("SET client_encoding = 'SQL_ASCII';
		SELECT idem_request_hash('POST', '/caf\xe9')"),
	'ERROR 22021', 'sql_ascii: a path that is not UTF-8');
is($raw->run("SELECT idem_request_hash('POST', '/', '{\"a\": \"\xe9\"}')"),
	'ERROR 22021', 'sql_ascii: a body that is not');
is($raw->run("SELECT idem_request_hash('POST', '/', '{\"\xe9\": 1}'::jsonb)"),
	'ERROR 22021', 'sql_ascii: a member that is not');
is($raw->run("SELECT encode(idem_request_hash('POST', '/', '\\xe9'::bytea), 'hex')"),
	expected_hash('POST', '/', "\xe9"), 'sql_ascii: bytes need not be');

# Any bytes make a scope there.
is( $raw->run(
		"SELECT outcome FROM idem_claim('caf\xe9', 'order-in-another-scope');
		 SELECT outcome FROM idem_claim('caf\xe8', 'order-in-another-scope');
		 SELECT outcome FROM idem_claim('caf\xe9', 'order-in-another-scope')"),
	"new\nnew\nin_progress", 'sql_ascii: scopes of any bytes');
$raw->quit;

# Keys and scopes
foreach my $database (@databases)
{
	my $word = $database eq 'euc_jp' ? '注文番号注文番号注文番号注文番号' : 'clé-très-très-très-étrange';
	my $scope = $database eq 'euc_jp' ? '日本' : 'café';
	my ($code, $stdout, $stderr);

	is( $node->safe_psql($database,
			"SELECT idem_key_is_valid('$word'), idem_key_is_valid('order-0000000000000001')"),
		'f|t', "$database: valid keys");
	($code, $stdout, $stderr) = $node->psql($database,
		"\\set VERBOSITY verbose\nSELECT * FROM idem_claim('shop', '$word')");
	like($stderr, qr/ERROR:  ID001: invalid idempotency key "/, "$database: an invalid one is refused");
	unlike($stderr, qr/ key "\Q$word\E/, "$database: and not shown whole");
	my $start = $database eq 'euc_jp' ? '注文番号' : 'clé-';
	like($stderr, qr/ key "\Q$start\E\.\.\." \((\d+) characters\)/, "$database: but by its first four characters")
	  if $database ne 'sql_ascii';

	is( $node->safe_psql($database,
			"SELECT outcome, idem_complete('$scope', k, 201, '$scope', '{\"x\": \"$scope\"}', claim_token)
			 FROM (VALUES ('order-0000000000000001')) AS v (k), idem_claim('$scope', k);
			 SELECT outcome, response_body, response_headers
			 FROM idem_claim('$scope', 'order-0000000000000001');
			 SELECT outcome FROM idem_claim('cafe', 'order-0000000000000001')"),
		"new|t\nreplay|$scope|{\"x\": \"$scope\"}\nnew", "$database: scopes and responses");
	is( $node->safe_psql($database,
			"SELECT * FROM idem_set('$scope', '$scope', '$scope', '$scope', true, 1);
			 SELECT idem_is_active('$scope', '$scope', '$scope', '$scope'),
				idem_is_active('$scope', '$scope', '$scope', 'cafe')"),
		"t|1|t\nt|f", "$database: users and actions");

	# Of the key's form in UTF-8, so that a dump may change the encoding.
	is( $node->safe_psql($database,
			"SELECT idem_publish('$scope', '1', '$word') IS NOT NULL;
			 SELECT key_hash FROM idem_outbox WHERE message_key = '$word'"),
		"t\n" . unpack('q>', sha256(pack('N/a* N/a*', $scope, $word))),
		"$database: the lane of a message");
}

# Results of calls that serve many users can be converted to UTF-8: a single
# message or claim that cannot would keep all others from every client that
# uses UTF-8.
foreach my $case ([ 'sql_ascii', 'SQL_ASCII', "caf\xe9", '22021' ], [ 'euc_jp', 'EUC_JP', "\xa9\xa1", '22P05' ])
{
	my ($database, $encoding, $bytes, $error) = @$case;

	$raw = session($node, $database);
	$raw->run("SET client_encoding = '$encoding'");
	foreach my $call (
		"idem_publish('$bytes', '1')",
		"idem_publish('t', '1', '$bytes')",
		"idem_publish('t', '{\"$bytes\": 1}')",
		"idem_publish('t', '1', NULL, '{\"a\": \"$bytes\"}')",
		"idem_publish_many('{t}', ARRAY['[\"$bytes\"]'::jsonb])",
		"idem_claim('$bytes', 'order-that-is-stored', request => '1')",
		"idem_claim('shop', 'order-that-is-stored', request => '[\"$bytes\"]')",
		"idem_checkpoint('shop', 'order-0000000000000002', '$bytes')",
		"idem_checkpoint('shop', 'order-0000000000000002', 'paid', '[\"$bytes\"]')")
	{
		is($raw->run("SELECT $call"), "ERROR $error", "$database: $call");
	}
	$raw->quit;
}

# Limits count the bytes that the database stores.
my $long = 'é' x 300;
is(sqlstate_of($node, "SELECT * FROM idem_claim('$long', 'order-of-a-long-scope')", 'latin1'),
	'00000', 'latin1: 300 letters are 300 bytes');
is(sqlstate_of($node, "SELECT * FROM idem_claim('$long', 'order-of-a-long-scope')", 'utf8'),
	'22023', 'utf8: they are 600');

$node->stop;
done_testing();
