# idempotency.log_events: one line for each event, with what it may tell and
# nothing else, and which nobody can forge.

use IdempotencyTest;

my $node = new_node(
	'log', conf => <<'CONF');
log_line_prefix = '<%b> '
log_min_error_statement = error
idempotency.cleanup_interval = 0
CONF

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;
my $uuid = qr/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/;

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

# logged(SQL, DATABASE): the log's lines of a script that has them switched on,
# without the prefix and with the numbers that change replaced.
sub logged
{
	my ($sql, $database) = @_;
	my $offset = -s $node->logfile;

	$node->safe_psql($database || 'postgres', "SET idempotency.log_events = on; $sql");
	my $log = slurp_file($node->logfile, $offset);
	$log =~ s/^<[^>]*> //mg;
	$log =~ s/ token=[1-9]\d*( status=\d+)?$/ ' token=T' . ($1 \/\/ '')/mge;
	$log =~ s/ id=[1-9]\d* message_id=$uuid / id=I message_id=U /mg;
	return $log;
}

my $key = 'abcdefgh-0001-secret';
my $line = "scope=shop key=abcd...(20) attempt=1 token=T\n";
my $replayed = "scope=shop key=abcd...(20) attempt=1 token=T status=201\n";

#
# Keys
#

is(logged("SELECT idem_claim('shop', '$key', '\\x5ec2e7')"), "LOG:  idempotency event=claimed $line", 'claimed');
is(logged("SELECT idem_claim('shop', '$key', '\\x5ec2e7')"), "LOG:  idempotency event=in_progress scope=shop key=abcd...(20)\n", 'in_progress: nothing of the other claim');
is( logged("SELECT idem_complete('shop', '$key', 201, 'confidential', '{\"x\": \"confidential\"}', claim_token)
			FROM idem_keys"),
	"LOG:  idempotency event=completed $line", 'completed');
is( logged("SELECT idem_complete('shop', '$key', 201, claim_token => claim_token) FROM idem_keys"),
	'', 'completed again, with no effect: nothing');
is(logged("SELECT idem_claim('shop', '$key', '\\x5ec2e7')"), "LOG:  idempotency event=replayed $replayed", 'replayed: with its status');
is(logged("SELECT idem_claim('shop', '$key', '\\x0bad')"), "LOG:  idempotency event=hash_conflict $line", 'hash_conflict');
is(logged("SELECT idem_forget('shop', '$key')"), '', 'forgotten: nothing');

is( logged("SELECT idem_claim('shop', '$key'), idem_checkpoint('shop', '$key', 'confidential', '{\"confidential\": 1}')"),
	"LOG:  idempotency event=claimed $line", 'a checkpoint: nothing');
is( logged("SELECT idem_fail('shop', '$key', 'confidential', claim_token) FROM idem_keys"),
	"LOG:  idempotency event=failed $line", 'failed');
$line =~ s/attempt=1/attempt=2/;
is(logged("SELECT idem_claim('shop', '$key', lease => '0')"), "LOG:  idempotency event=taken_over $line", 'taken_over: a failed key');
$line =~ s/attempt=2/attempt=3/;
is(logged("SELECT idem_claim('shop', '$key')"), "LOG:  idempotency event=taken_over $line", 'taken_over: an abandoned one');
is( logged("SELECT idem_release('shop', '$key', claim_token) FROM idem_keys"),
	"LOG:  idempotency event=released $line", 'released');
$line =~ s/attempt=3/attempt=1/;
$node->safe_psql('postgres', "SELECT idem_claim('shop', '$key', lease => '0', request => '\"confidential\"')");
is( logged("SELECT idem_resume()"),
	"LOG:  idempotency event=taken_over scope=shop key=abcd...(20) attempt=2 token=T\n", 'taken_over: by idem_resume');
$node->safe_psql('postgres', "SELECT idem_forget('shop', '$key')");

# An expired key is claimed, not taken over.
is( logged("SELECT idem_claim('shop', '$key', ttl => '0') FROM generate_series(1, 2)"),
	"LOG:  idempotency event=claimed $line" x 2, 'claimed: a key that has expired');

# The numbers are the record's.
$node->safe_psql('postgres', "SELECT idem_forget('shop', '$key')");
my $offset = -s $node->logfile;
my $token = $node->safe_psql('postgres', "SET idempotency.log_events = on; SELECT claim_token FROM idem_claim('shop', '$key')");
like(slurp_file($node->logfile, $offset), qr/ token=$token$/m, 'claimed: with the token that the caller was given');

$node->safe_psql('postgres', <<'SQL');
CREATE FUNCTION handler(request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT request';
SQL
is( logged("SELECT idem_run('shop', 'run-$key', 'handler(jsonb)', '{\"confidential\": 1}') FROM generate_series(1, 2)"),
	join('', map { "LOG:  idempotency event=$_ scope=shop key=run-...(24) attempt=1 token=T" . ($_ eq 'replayed' ? " status=200\n" : "\n") } qw(claimed completed replayed)),
	'idem_run: as if it were two calls');

# A key of four characters would be shown whole.
is( logged("SET idempotency.key_min_length = 1; SELECT idem_claim('shop', 'abcd')"),
	"LOG:  idempotency event=claimed scope=shop key=...(4) attempt=1 token=T\n", 'a short key is not shown at all');

# Whether or not the transaction commits: it has not happened, but the call has.
is( logged("BEGIN; SELECT idem_claim('shop', 'abcdefgh-0002-secret'); ROLLBACK"),
	"LOG:  idempotency event=claimed $line", 'rolled back: a line all the same');

# The route of the session, in each line of a key: without a query, and cut to
# 128 bytes, but not within a character.
my $query = '?card=4111';
foreach my $route (
	[ 'POST /orders/{id}', '"POST /orders/{id}"', 'quoted as all fields' ],
	[ "/orders$query", '/orders', 'without its query' ],
	[ "/orders#4111$query", '/orders', 'without its fragment' ],
	[ $query, '""', 'nothing but a query' ],
	[ "/a\" key=x\n", '"/a\" key=x\x0a"', 'nothing is forged' ],
	[ 'r' x 129, 'r' x 128, 'cut' ],
	[ "\xe2\x82\xac" x 50, '"' . '\xe2\x82\xac' x 42 . '"', 'cut between characters' ])
{
	my ($value, $written, $title) = @$route;

	is( logged("SET idempotency.route = '$value';
				SELECT idem_claim('shop', 'route-$key'); SELECT idem_claim('shop', 'route-$key');
				SELECT idem_release('shop', 'route-$key', claim_token) FROM idem_keys WHERE key = 'route-$key'"),
		join('', map { "LOG:  idempotency event=$_->[0] scope=shop key=rout...(26) route=$written$_->[1]\n" }
			['claimed', ' attempt=1 token=T'], ['in_progress', ''], ['released', ' attempt=1 token=T']),
		"route: $title");
}
is(logged("BEGIN; SET LOCAL idempotency.route = '/a'; ROLLBACK; SELECT idem_claim('shop', 'abcd-$key-r')"),
	"LOG:  idempotency event=claimed scope=shop key=abcd...(27) attempt=1 token=T\n", 'route: only in its transaction');

#
# Appends
#

my $append = 'aggregate=order-1 client=phone client_seq';
is(logged("SELECT idem_try_append('order-1', 'phone', 1, 2)"), "LOG:  idempotency event=appended $append=1 events=2 version=2\n", 'appended');
is( logged("SELECT idem_try_append('order-1', 'phone', n, 2, allow_gaps => false) FROM unnest(ARRAY[1, 2, 9]) AS n"),
	join('', map { "LOG:  idempotency event=not_appended $append=$_ version=2\n" }
		'1 events=2 outcome=duplicate', '2 events=2 outcome=overlap', '9 events=2 outcome=gap'),
	'not_appended: with its outcome');
is( logged("SELECT idem_try_append('order-1', 'phone', 3, expected_version => 7)"),
	"LOG:  idempotency event=not_appended $append=3 events=1 outcome=version_conflict version=2\n", 'not_appended: a version conflict');
is( logged("SET idempotency.log_events = not_appended; SELECT idem_try_append('order-1', 'phone', 3)"), '', 'appended: only if it is listed');

#
# Messages and the cleanup
#

my $message = 'topic=orders id=I message_id=U attempt';
is( logged("SELECT idem_publish('orders', '{\"confidential\": 1}', 'confidential', '{\"confidential\": 1}')"),
	"LOG:  idempotency event=published $message=0\n", 'published');
is(logged('SELECT idem_outbox_take()'), '', 'taken: nothing');
is( logged("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox"),
	"LOG:  idempotency event=relayed $message=1\n", 'relayed: when it is acknowledged');
is(logged("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox"), '', 'acknowledged again, with no effect: nothing');
$offset = -s $node->logfile;
my $ids = $node->safe_psql('postgres', <<'SQL');
SET idempotency.log_events = on;
SELECT idem_publish('orders', '{}');
SELECT id FROM idem_outbox_take();
SQL
my ($message_id, $id) = split /\n/, $ids;
like(slurp_file($node->logfile, $offset), qr/ event=published topic=orders id=$id message_id=$message_id attempt=0$/m,
	'published: with the ids that the relay gets');

$node->safe_psql('postgres', "DELETE FROM idem_outbox WHERE state = 'pending'");
# Refused once, then for the last time; and one whose relay never said a word.
my $refused = q{SELECT idem_publish('orders', '{"confidential": 1}', 'confidential'); SELECT FROM idem_outbox_take();};
my $nack = "SELECT idem_outbox_nack(id, 'confidential', '0') FROM idem_outbox WHERE state = 'pending'";
is(logged("$refused $nack"), join('', map { "LOG:  idempotency event=$_\n" } "published $message=0", "nacked $message=1"), 'nacked');
is( logged("SET idempotency.outbox_max_attempts = 2; SELECT FROM idem_outbox_take(); $nack"),
	join('', map { "LOG:  idempotency event=$_ $message=2\n" } qw(nacked dead)), 'dead: after its last attempt');
is(logged("SELECT idem_outbox_nack(id) FROM idem_outbox WHERE state = 'dead'"), '', 'refused again, with no effect: nothing');
is( logged("SELECT idem_publish('orders', '{}'); SET idempotency.outbox_max_attempts = 1;
			SELECT FROM idem_outbox_take(lease => '0'); SELECT FROM idem_outbox_take()"),
	join('', map { "LOG:  idempotency event=$_\n" } "published $message=0", "dead $message=1"), 'dead: when the last lease ran out');
$node->safe_psql('postgres', 'DELETE FROM idem_outbox WHERE state = \'dead\'');

# An action that came too late, by each of the calls
my $stale = "LOG:  idempotency event=stale user=u entity_type=post entity=1 action_id=3 last_action_id=4\n";
is(logged("SELECT idem_try_advance('u', 'post', '1', 4)"), '', 'advanced: nothing');
foreach my $call ("idem_try_advance('u', 'post', '1', 3)", "idem_toggle('u', 'post', '1', 'like', 3)", "idem_set('u', 'post', '1', 'like', true, 3)",
	"idem_try_advance_many('{u}', '{post}', '{1}', '{3}')", "idem_set_many('{u}', '{post}', '{1}', '{like}', '{t}', '{3}')")
{
	is(logged("SELECT $call"), $stale, "stale: $call");
}

is(logged('SELECT idem_cleanup()'), '', 'cleaned: nothing, where there is nothing');
is( logged("SELECT idem_claim('shop', '$key-' || i, ttl => '0') FROM generate_series(1, 3) AS i;
			SELECT idem_once_many('form', ARRAY['confidential', 'confidential too'], ttl => '0');
			SET idempotency.outbox_retention = 0;
			SELECT idem_cleanup(2); SELECT idem_cleanup(2); SELECT idem_cleanup(2)"),
	"LOG:  idempotency event=claimed scope=shop key=abcd...(22) attempt=1 token=T\n" x 3
	  . join('', map { "LOG:  idempotency event=cleaned $_\n" }
		'kind=keys rows=2', 'kind=tokens rows=2', 'kind=messages rows=1', 'kind=keys rows=1'),
	'cleaned: a line for each kind of which a batch has deleted something');
is( logged("SELECT idem_once('form', 'confidential', ttl => '0'); SELECT idem_take_expired('tokens')"),
	"LOG:  idempotency event=cleaned kind=tokens rows=1\n", 'cleaned: rows that are taken, too, without their content');

#
# Nothing can be forged
#

# The scope of a line, as SQL and as it is written.
my @scopes = (
	[ q('a-b_c.d:e/f@g'), 'a-b_c.d:e/f@g', 'what needs no quotes has none' ],
	[ "'two words'", '"two words"', 'a space' ],
	[ "'s key=abcd...(20) attempt=9 token=9'", '"s key=abcd...(20) attempt=9 token=9"', 'other fields' ],
	[ "'a=b'", '"a=b"', 'an equals sign' ],
	[ "'\" key=x \"'", '"\" key=x \""', 'quotes' ],
	[ "'\\\" key=x '", '"\\\\\" key=x "', 'a quote after a backslash' ],
	[ "'x\\'", '"x\\\\"', 'a backslash at the end' ],
	[ "E's\\nLOG:  idempotency event=claimed'", '"s\x0aLOG:  idempotency event=claimed"', 'a line feed' ],
	[ "E's\\r\\t\\x1b[2J\\x7f'", '"s\x0d\x09\x1b[2J\x7f"', 'control characters' ],
	[ "U&'\\00e9\\2028\\0085'", '"\xc3\xa9\xe2\x80\xa8\xc2\x85"', 'line separators of Unicode' ],
	[ "'%s%n%m'", '%s%n%m', 'formats' ],
	[ "repeat('\"', 255)", '"' . '\"' x 255 . '"', 'the longest' ]);

foreach my $scope (@scopes)
{
	my ($sql, $written, $title) = @$scope;

	is( logged("SELECT idem_claim($sql, '$key')"),
		"LOG:  idempotency event=claimed scope=$written key=abcd...(20) attempt=1 token=T\n", "scope: $title");
	is( logged("SELECT idem_try_append($sql, 'c', 1)"),
		"LOG:  idempotency event=appended aggregate=$written client=c client_seq=1 events=1 version=1\n", "aggregate: $title");
	is( logged("SELECT idem_publish($sql, '{}')"),
		"LOG:  idempotency event=published topic=$written id=I message_id=U attempt=0\n", "topic: $title");
}

# A record that came by replication or from a dump has a key that no rule has seen.
$node->safe_psql('postgres', <<'SQL');
INSERT INTO idem_keys (claim_token, created_at, completed_at, expires_at, attempt, response_status, state, scope, key)
	VALUES (1, now(), now(), now() + interval '1 day', 1, 200, 'completed', 's', ' a=b, not a field of ours');
SQL
is( logged("SELECT idem_claim('s', ' a=b, not a field of ours')"),
	"LOG:  idempotency event=replayed scope=s key=\" a=b...(25)\" attempt=1 token=T status=200\n", 'key: as it may be from elsewhere');

# In a database of another encoding, where a byte alone is a character.
$node->safe_psql('postgres', "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0");
$node->safe_psql('latin', 'CREATE EXTENSION idempotency');
is( logged("SELECT idem_claim(chr(233) || chr(133), '$key')", 'latin'),
	"LOG:  idempotency event=claimed scope=\"\\xe9\\x85\" key=abcd...(20) attempt=1 token=T\n",
	'scope: in another encoding');

#
# Which sessions get the lines
#

my ($code, $stdout, $stderr) = $node->psql('postgres', <<'SQL');
SET client_min_messages = debug5;
SET idempotency.log_events = on;
SELECT outcome FROM idem_claim('shop', 'client-0000000001');
SQL
is($stdout, 'new', 'the client gets its answer');
unlike($stderr, qr/event=/, 'and not the line');

# The statement would show the key, the context even more.
$offset = -s $node->logfile;
$node->safe_psql('postgres', <<"SQL");
SET log_min_error_statement = debug5;
SET idempotency.log_events = on;
SET log_error_verbosity = verbose;
DO \$\$ BEGIN PERFORM idem_claim('shop', '$key-context'); END \$\$;
SQL
my $log = slurp_file($node->logfile, $offset);
like($log, qr/LOG:  00000: idempotency event=claimed scope=shop key=abcd\.\.\.\(28\)/, 'verbose: the line is there');
unlike($log, qr/STATEMENT:|CONTEXT:|\Q$key\E/, 'verbose: and neither statement nor context');

#
# Some of them, and as JSON
#

is( logged("SET idempotency.log_events = 'claimed, failed'; SELECT idem_claim('list', '$key'), idem_claim('list', '$key'), idem_fail('list', '$key')"),
	join('', map { "LOG:  idempotency event=$_ scope=list key=abcd...(20) attempt=1 token=T\n" } qw(claimed failed)), 'a list: these and no others');
is(logged("SET idempotency.log_events = 'all'; SELECT idem_publish('all', '{}')"),
	"LOG:  idempotency event=published topic=all id=I message_id=U attempt=0\n", 'all');
is(logged("SET idempotency.log_events = 'off'; SELECT idem_publish('all', '{}')"), '', 'off, in this session');
like(($node->psql('postgres', 'SET idempotency.log_events = claimed, missing'))[2],
	qr/invalid value for parameter "idempotency.log_events": "claimed, missing".*DETAIL:  There is no event "missing"\..*HINT:  Valid values are off, on, or a list of /s,
	'an unknown event is refused, and the hint lists the known ones');
is(($node->psql('postgres', "SET idempotency.log_events = $_"))[0], 3, "refused: $_") foreach "'claimed,,failed'", "'on, claimed'", "'\"Claimed\"'";

# Read by a parser, whatever is in it.
$offset = -s $node->logfile;
my $scope = q{E'say "hi"\\\\ \n\t\x7f' || U&'\00e9\2028\+01F600' || '<&>'};
$node->safe_psql('postgres', "SET idempotency.log_events = on; SET idempotency.log_format = json;
	SELECT idem_claim($scope, '$key'); SELECT idem_complete($scope, '$key', 404, claim_token => claim_token) FROM idem_keys WHERE scope = $scope;
	SELECT idem_claim($scope, '$key'); SELECT idem_publish('orders', '{}'); SELECT idem_try_advance('u', 'post', '1', 3)");
my @objects = slurp_file($node->logfile, $offset) =~ /LOG:  (.*)$/mg;
is(scalar(@objects), 5, 'json: a line for each');
unlike("@objects", qr/[^ -~]/, 'json: in ASCII');
my @read = map { $node->safe_psql('postgres', 'SELECT o - ARRAY[\'token\', \'id\', \'message_id\'] FROM (SELECT $json$' . $_ . '$json$::jsonb) AS s (o)') } @objects;
my $key_fields = '"event": "%s", "scope": "S", "source": "idempotency", "attempt": 1';
my $written = $node->safe_psql('postgres', "SELECT to_json($scope)");
s/: \Q$written\E/: "S"/ foreach @read;
is($read[0], '{"key": "abcd...(20)", ' . sprintf($key_fields, 'claimed') . '}', 'json: claimed');
is($read[2], '{"key": "abcd...(20)", ' . (sprintf($key_fields, 'replayed') =~ s/"source"/"source"/r =~ s/, "source": "idempotency", "attempt": 1/, "source": "idempotency", "status": 404, "attempt": 1/r) . '}', 'json: replayed, with its status');
is($read[3], '{"event": "published", "topic": "orders", "source": "idempotency", "attempt": 0}', 'json: published');
is($read[4], '{"user": "u", "event": "stale", "entity": "1", "source": "idempotency", "action_id": 3, "entity_type": "post", "last_action_id": 4}', 'json: stale');
$offset = -s $node->logfile;
$node->safe_psql('latin', "SET idempotency.log_events = on; SET idempotency.log_format = json; SELECT idem_claim(chr(233), '$key-json')");
like(slurp_file($node->logfile, $offset), qr/"scope":"\\u00e9"/, 'json: in another encoding');

#
# Off
#

$offset = -s $node->logfile;
$node->safe_psql('postgres', <<'SQL');
SELECT idem_complete('off', 'off-0000000000001', 200) FROM idem_claim('off', 'off-0000000000001', '\x01');
SELECT idem_claim('off', 'off-0000000000001', '\x01'), idem_claim('off', 'off-0000000000001', '\x02');
SELECT idem_fail('off', 'off-0000000000002') FROM idem_claim('off', 'off-0000000000002');
SELECT idem_claim('off', 'off-0000000000002'), idem_release('off', 'off-0000000000002');
SELECT idem_publish('off', '{}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take();
SELECT idem_claim('off', 'off-0000000000003', ttl => '0');
SELECT idem_cleanup();
SQL
is(slurp_file($node->logfile, $offset), '', 'off: nothing is written');

#
# The worker
#

$node->safe_psql('postgres', "SELECT idem_once('form', 'for the worker', ttl => '0')");
$offset = -s $node->logfile;
$node->append_conf('postgresql.conf', "idempotency.log_events = on\nidempotency.cleanup_interval = 1s");
$node->reload;
$node->wait_for_log(qr/^<idempotency cleanup> LOG:  idempotency event=cleaned kind=tokens rows=1$/m, $offset);
# Ten more visits
my $passes = 'SELECT cleanup_passes FROM idem_stats WHERE datname = current_database()';
my $before = $node->safe_psql('postgres', $passes);
$node->poll_query_until('postgres', "SELECT ($passes) > $before + 10") or die 'no visits';
is(scalar(() = slurp_file($node->logfile, $offset) =~ /event=/g), 1, 'worker: a line, and none where nothing was deleted');

# None of what is confidential has ever been logged.
unlike(slurp_file($node->logfile), qr/confidential/, 'no response, payload, token or message key is in the log');
unlike(slurp_file($node->logfile), qr/secret|5ec2e7/, 'nor a whole key or a request hash');

$node->stop;

done_testing();
