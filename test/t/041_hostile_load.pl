# Load on the server of the extension: a flood of keys, a full disk, no free
# connections, locks and time limits, old snapshots.
#
# FLOOD=n: how many keys the flood has, 60000 by default.

use File::Basename;
use IdempotencyTest;

# No wait below is longer than this.
my $flood = $ENV{FLOOD} || 60000;
$PostgreSQL::Test::Utils::timeout_default = 120 + $flood / 1000;

# A server that reports a full disk on request.
my $dir = PostgreSQL::Test::Utils::tempdir();
my $library = "$dir/disk_full.so";
system_or_bail('gcc', '-shared', '-fPIC', '-o', $library, dirname(__FILE__) . '/disk_full.c', '-ldl');
$ENV{DISK_FULL} = "$dir/full";
my $node = do
{
	local $ENV{LD_PRELOAD} = join(':', grep { defined } $library, $ENV{LD_PRELOAD});
	new_node(
		'load', conf => <<'CONF');
max_connections = 12
log_line_prefix = '%b %e '
max_wal_size = 4GB
CONF
};
$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE EXTENSION amcheck;
CREATE ROLE app LOGIN;
SELECT idem_grant('app');
SQL

# Every table's indexes have each of its rows, and nothing else.
sub check_indexes
{
	my ($title) = @_;
	my $checked = $node->safe_psql('postgres',
		"SELECT count(bt_index_check(indexrelid, true)) FROM pg_index JOIN pg_class ON pg_class.oid = indrelid WHERE relname LIKE 'idem%'");

	return cmp_ok($checked, '>=', 13, "$title: indexes are whole");
}

#
# A flood of distinct keys
#

# Live keys, that must be there afterwards.
my $replays = "SELECT count(*) FROM generate_series(1, 100) AS i, idem_claim('live', 'live-key-' || i + 10000000) AS c WHERE c.outcome = 'replay' AND response_body = 'body ' || i";
$node->safe_psql('postgres',
	"SELECT idem_complete('live', 'live-key-' || i + 10000000, 200, 'body ' || i) FROM generate_series(1, 100) AS i, idem_claim('live', 'live-key-' || i + 10000000)");

# A client's part, in transactions of 100; says how much memory it has, in kB,
# after a tenth and at the end.
$node->safe_psql('postgres', <<'SQL');
CREATE PROCEDURE flood(client int, keys int, INOUT admitted int, INOUT grown bigint) LANGUAGE plpgsql AS $$
DECLARE
	early bigint;
BEGIN
	admitted := 0;
	FOR i IN 1 .. keys LOOP
		BEGIN
			PERFORM idem_claim('flood', client || '-flooding-key-' || i, ttl => '1 s');
			admitted := admitted + 1;
		EXCEPTION WHEN SQLSTATE 'ID002' THEN
			NULL;
		END;
		IF i % 100 = 0 THEN
			COMMIT;
		END IF;
		IF i = keys / 10 THEN
			early := memory();
		END IF;
	END LOOP;
	COMMIT;
	grown := memory() - early;
END
$$;
-- Of the backend alone, without what it shares with others
CREATE FUNCTION memory() RETURNS bigint LANGUAGE sql AS $$
	SELECT substring(pg_read_file('/proc/' || pg_backend_pid() || '/status') FROM 'RssAnon:\s+(\d+)')::bigint
$$;
SQL

sub flood
{
	my ($keys) = @_;
	my @clients = map { session($node) } 1 .. 4;

	$clients[$_]->send('CALL flood(' . join(', ', $_, int($keys / 4), 'NULL', 'NULL') . ')') foreach 0 .. 3;
	my @results = map { $_->result } @clients;
	$_->quit foreach @clients;
	return @results;
}

my @results = flood($flood);
is(join(' ', map { s/\|.*//r } @results), join(' ', (int($flood / 4)) x 4), "flood: $flood keys of four clients are all admitted");
my @grown = sort { $a <=> $b } map { s/.*\|//r } @results;
note("a backend's memory grows by up to $grown[-1] kB");
cmp_ok($grown[-1], '<', 1024, 'flood: no backend grows with the number of keys');
is($node->safe_psql('postgres', $replays), 100, 'flood: live keys are replayed');
is($node->safe_psql('postgres', "SELECT count(*) FROM idem_keys WHERE scope = 'flood'"), 4 * int($flood / 4), 'flood: the keys are there');
$node->safe_psql('postgres', "SELECT pg_sleep(1)");
configure($node, 'idempotency.cleanup_interval' => '1s');
ok($node->poll_query_until('postgres', "SELECT count(*) = 0 FROM idem_keys WHERE scope = 'flood'"), 'flood: the worker gets rid of them');
configure($node, 'idempotency.cleanup_interval' => '0');
is($node->safe_psql('postgres', $replays), 100, 'flood: and only of them');
$node->safe_psql('postgres', 'VACUUM idem_keys');
my $size = $node->safe_psql('postgres', "SELECT pg_relation_size('idem_keys')");
cmp_ok($size, '<', 100 * 1024, "flood: the table is small again after vacuum, $size bytes");
check_indexes('flood');

# With a limit
configure($node, 'idempotency.max_new_keys_per_minute' => 500);
my $admitted = 0;
$admitted += s/\|.*//r foreach flood(20000);
is($admitted, 500, 'limited-flood: as many as the limit says');
is($node->safe_psql('postgres', "SELECT count(*) FROM idem_keys WHERE scope = 'flood'"), 500, 'limited-flood: and no more are there');
is($node->safe_psql('postgres', $replays), 100, 'limited-flood: live keys are replayed');
is($node->safe_psql('postgres', "SELECT outcome FROM idem_claim('live', 'live-key-of-another')"), 'new', 'limited-flood: another scope has room');
is(sqlstate_of($node, "SELECT idem_claim('flood', 'a-key-too-many-01')"), 'ID002', 'limited-flood: this one has not');
configure($node, 'idempotency.max_new_keys_per_minute' => 0);

#
# Disk full
#

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE orders (key text, filler text);
CREATE SEQUENCE turns;
-- One transaction after another, each with a call of every kind, as long as it goes.
CREATE PROCEDURE work(rounds int) LANGUAGE plpgsql AS $$
DECLARE
	n bigint;
	k text;
BEGIN
	FOR i IN 1 .. rounds LOOP
		n := nextval('turns');
		k := 'key-of-the-order-' || n;
		IF (SELECT outcome FROM idem_claim('disk', k)) = 'new' THEN
			INSERT INTO orders VALUES (k, repeat('x', 300));
			PERFORM idem_complete('disk', k, 201, repeat('y', 300));
			PERFORM idem_publish('disk', to_jsonb(k), CASE WHEN n % 2 = 0 THEN k END);
			PERFORM idem_once('disk', k), idem_set('disk', 'order', k, 'a', true, 1), idem_try_append(k, 'disk', 1);
		END IF;
		COMMIT;
	END LOOP;
END
$$;
SQL
my $orders = "SELECT count(*), string_agg(key, ',' ORDER BY key) FROM ";
my @sets = ("$orders orders", "$orders idem_keys WHERE scope = 'disk' AND state = 'completed'",
	"$orders (SELECT payload #>> '{}' AS key FROM idem_outbox WHERE topic = 'disk') AS o",
	"$orders (SELECT token AS key FROM idem_tokens WHERE scope = 'disk') AS t",
	"$orders (SELECT entity_id AS key FROM idem_action_versions WHERE user_id = 'disk') AS v",
	"$orders (SELECT entity_id AS key FROM idem_user_actions WHERE user_id = 'disk') AS a",
	"$orders (SELECT aggregate AS key FROM idem_aggregates) AS a",
	"$orders (SELECT aggregate AS key FROM idem_client_sequences WHERE client_id = 'disk') AS c");

# All is done of an order, or nothing.  Returns how many there are.
sub all_or_nothing
{
	my ($title) = @_;
	my %answers = map { $node->safe_psql('postgres', $_) => 1 } @sets;
	my ($count) = map { s/\|.*//sr } keys %answers;

	is(scalar keys %answers, 1, "$title: all is done of an order, or nothing");
	is($node->safe_psql('postgres', "SELECT count(*) FROM idem_keys WHERE scope = 'disk' AND state <> 'completed'"), 0, "$title: no claim is left");
	return $count;
}

my $offset = -s $node->logfile;
my @workers = map { session($node) } 1 .. 4;
$_->send('CALL work(100000)') foreach @workers;
$node->poll_query_until('postgres', 'SELECT last_value > 500 FROM turns') or die 'no work';
# Where there is no visibility map yet, 19 makes one even to read.
$node->safe_psql('postgres', 'VACUUM');
append_to_file($ENV{DISK_FULL}, '');
is($_->result, 'ERROR 53100', 'disk-full: the error says so') foreach @workers;
my $done = all_or_nothing('disk-full');
cmp_ok($done, '>', 100, "disk-full: $done orders before");

# Existing records are replayed, and calls that need no space still work.
is($node->safe_psql('postgres', $replays), 100, 'disk-full: live keys are replayed');
is($node->safe_psql('postgres', "SELECT outcome FROM orders JOIN LATERAL idem_claim('disk', key) ON true LIMIT 1"), 'replay', 'disk-full: orders, too');
is($node->safe_psql('postgres', "SELECT pg_sleep(1); SELECT keys_deleted FROM idem_cleanup()") =~ s/^\n//r, 500, 'disk-full: the cleanup deletes');
is($node->safe_psql('postgres', "SELECT count(*) > 100 FROM idem_abandoned('0'), idem_health(), (SELECT idem_metrics()) AS m") =~ /^[tf]$/, 1, 'disk-full: monitoring answers');
my %codes;
foreach my $call (
	"idem_claim('new', 'key-' || n || '-0000000000')", "idem_once('new', 'token' || n)", "idem_publish('new', to_jsonb(repeat('z', 1000)))",
	"idem_publish('new', '{}', 'key' || n)", "idem_set('new', 'e', n::text, 'a', true, 1)", "idem_try_append('new' || n, 'c', 1)")
{
	my $code = sqlstate_of($node, "SELECT $call FROM generate_series(1, 5000) AS n");

	$codes{$code}++;
	is($code, '53100', "disk-full: $call");
}
is( $node->safe_psql('postgres',
		"SELECT (SELECT count(*) FROM idem_keys WHERE scope = 'new') + (SELECT count(*) FROM idem_tokens WHERE scope = 'new') + (SELECT count(*) FROM idem_outbox WHERE topic = 'new')
			+ (SELECT count(*) FROM idem_action_versions WHERE user_id = 'new') + (SELECT count(*) FROM idem_aggregates WHERE aggregate LIKE 'new%')"),
	0, 'disk-full: nothing is left of a statement that failed');

# There is room again.
unlink $ENV{DISK_FULL} or die $!;
$_->send('CALL work(50)') foreach @workers;
is($_->result, '', 'room-again: the same sessions go on') foreach @workers;
is(all_or_nothing('room-again') - $done, 200, 'room-again: everything they do is done');
$_->quit foreach @workers;
check_indexes('room-again');
unlike(slurp_file($node->logfile, $offset), qr/PANIC|terminated by signal/, 'disk-full: the server has not stopped');
is($node->safe_psql('postgres', "SELECT count(*) = (SELECT count(*) FROM orders) FROM orders JOIN LATERAL idem_claim('disk', key) AS c ON outcome = 'replay' AND response_body = repeat('y', 300)"),
	't', 'room-again: and replayed');

#
# Out of connections
#

# The sessions that have quit are gone.
$node->poll_query_until('postgres', "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'client backend'")
  or die 'the sessions stay';
my @clients = map { session($node, 'postgres', extra_params => [ '-U', 'app' ]) } 1 .. 9;
$offset = -s $node->logfile;
my ($code, $stdout, $stderr) = $node->psql('postgres', "SELECT idem_claim('s', 'key-without-connection')", connstr => $node->connstr('postgres') . ' user=app');
isnt($code, 0, 'no-connections: one more is refused');
like(slurp_file($node->logfile, $offset), qr/client backend 53300 FATAL: /, 'no-connections: 53300');
is($clients[0]->run("SELECT count(idem_once('form', 'expired ' || i, ttl => '0')) FROM generate_series(1, 100) AS i"), 100, 'no-connections: those who have one work');
configure($node, 'idempotency.cleanup_interval' => '1s');
ok($node->poll_query_until('postgres', "SELECT count(*) = 0 FROM idem_tokens WHERE scope = 'form'"), 'no-connections: the worker needs none');
$_->quit foreach @clients;
ok( $node->poll_query_until('postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'")
	  && $node->safe_psql('postgres', "SELECT outcome FROM idem_claim('s', 'key-without-connection')", connstr => $node->connstr('postgres') . ' user=app') eq 'new',
	'no-connections: and then there are some again');
# Nor does the number that a role or a database may have.
$node->safe_psql('postgres', "ALTER DATABASE postgres CONNECTION LIMIT 1; ALTER ROLE CURRENT_USER CONNECTION LIMIT 1; SELECT idem_once('form', 'expired', ttl => '0')");
ok($node->poll_query_until('postgres', "SELECT count(*) = 0 FROM idem_tokens WHERE scope = 'form'"), 'no-connections: limits are not for the worker');
$node->safe_psql('postgres', 'ALTER DATABASE postgres CONNECTION LIMIT -1; ALTER ROLE CURRENT_USER CONNECTION LIMIT -1');
configure($node, 'idempotency.cleanup_interval' => '0');

#
# Limits of time: a table that is locked, a row that is held
#

$node->safe_psql('postgres', "SELECT idem_claim('t', 'key-of-timeouts-01', lease => '0'); SELECT idem_publish('t', '{}'); SELECT idem_outbox_take(1, '1 h', '{t}'); SELECT idem_try_append('t', 'c', 1); SELECT idem_set('u', 'e', 't', 'a', true, 1)");
my $token = $node->safe_psql('postgres', "SELECT claim_token FROM idem_keys WHERE scope = 't'");
my $message = $node->safe_psql('postgres', "SELECT id FROM idem_outbox WHERE topic = 't'");
my @writers = (
	"idem_claim('t', 'key-of-timeouts-02', ttl => '0')", "idem_heartbeat('t', 'key-of-timeouts-01', '0', $token)",
	"idem_checkpoint('t', 'key-of-timeouts-01', 'x', NULL, '0', $token)", "idem_try_advance('u', 'e', 't', extract(epoch FROM clock_timestamp())::bigint)",
	"idem_toggle('u', 'e', 't', 'a', 1 + extract(epoch FROM clock_timestamp())::bigint)", "idem_set('u', 'e', 't', 'a', true, 2 + extract(epoch FROM clock_timestamp())::bigint)",
	"idem_try_append('t', 'd', extract(epoch FROM clock_timestamp())::bigint)", "idem_once('t', 't', '0')", "idem_once_many('t', '{t}'::text[], '0')",
	"idem_publish('t', '{}')", "idem_publish_many('{t}', '{1,2}')", "idem_outbox_nack($message, NULL, '0')", "idem_outbox_requeue()", "idem_run('t', 'key-of-timeouts-03', 'handler(jsonb)', '{}')",
	"idem_outbox_ack('{$message}')", "idem_outbox_extend('{$message}', attempts => '{1}')", "idem_outbox_release('{$message}')", 'idem_outbox_take()', "idem_cleanup()", "idem_complete('t', 'key-of-timeouts-01', 200, claim_token => $token)",
	"idem_fail('t', 'key-of-timeouts-01', claim_token => $token)", "idem_release('t', 'key-of-timeouts-01', $token)", "idem_erase('t', 'key-of-timeouts-01')",
	"idem_forget('t', 'key-of-timeouts-01')");
my @readers = ("idem_lookup('t', 'key-of-timeouts-01')", "idem_is_active('u', 'e', 't', 'a')", "idem_last_client_seq('t', 'c')", 'idem_abandoned()', 'idem_metrics()', 'idem_health()');
my $holder = session($node);
my $caller = session($node);
$caller->run("CREATE FUNCTION handler(jsonb) RETURNS jsonb LANGUAGE sql RETURN '1'::jsonb");

# outcomes(LIMIT, CALLS): the SQLSTATEs of all calls under a limit, in a
# transaction that is rolled back.
sub outcomes
{
	my ($limit, @calls) = @_;
	my %found;

	foreach my $call (@calls)
	{
		my $answer = $caller->run("BEGIN; SET LOCAL $limit; SELECT $call");

		push @{ $found{ $answer =~ /(ERROR .*)/ ? $1 : 'none' } }, $call =~ s/\(.*//r;
		$caller->run('ROLLBACK');
	}
	return join('; ', map { "$_: " . join(' ', @{ $found{$_} }) } sort keys %found);
}

my $names = join(' ', map { s/\(.*//r } @writers, @readers);
$holder->run("BEGIN; LOCK TABLE idem_keys, idem_action_versions, idem_user_actions, idem_aggregates, idem_client_sequences, idem_tokens, idem_outbox");

# The results of monitoring functions for a locked table.
my $others = $names =~ s/ idem_metrics idem_health$//r;
is(outcomes("lock_timeout = '10ms'", @writers, @readers), "ERROR 55P03: $others; none: idem_metrics idem_health",
	'locked-tables: lock_timeout ends every other call');
is(outcomes("statement_timeout = '10ms'", @writers, @readers), "ERROR 57014: $names", 'locked-tables: statement_timeout does');
$holder->run('ROLLBACK');
like(outcomes("lock_timeout = '10ms'", @writers, @readers), qr/^none: $names$/, 'locked-tables: and then they are done');

# Rows held by a transaction: those that must not wait answer, the others end in time.
$holder->run("BEGIN; SELECT idem_heartbeat('t', 'key-of-timeouts-01', '0', $token); SELECT idem_claim('t', 'key-of-timeouts-02'), idem_claim('t', 'key-of-timeouts-03');
	SELECT idem_try_advance('u', 'e', 't', 1000000000000), idem_try_append('t', 'd', 1), idem_once('t', 't'), idem_outbox_nack($message)");
# There is nothing to erase of a claim.  Those that must not wait may take as
# long as the machine lets them, but not until the holder ends.
my $no_wait = qr/^idem_(?:claim|try_append|publish|publish_many|outbox_requeue|outbox_take|cleanup|erase)\(/;
my @waiting = grep { !/$no_wait/ } @writers;
foreach my $limit ([ "lock_timeout = '30ms'", '55P03' ], [ "statement_timeout = '30ms'", '57014' ])
{
	my $ended = join(' ', map { s/\(.*//r } @waiting);

	is(outcomes($limit->[0], @waiting), "ERROR $limit->[1]: $ended", "held-rows: $limit->[0] ends those that wait");
}
is(outcomes("statement_timeout = '2min'", grep { /$no_wait/ } @writers),
	'none: idem_claim idem_try_append idem_publish idem_publish_many idem_outbox_requeue idem_outbox_take idem_cleanup idem_erase',
	'held-rows: those that must not wait do not');
$holder->run('ROLLBACK');

# A session that sleeps in its transaction is ended, and all that it had claimed is free.
like($holder->run("BEGIN; SELECT idem_claim('t', 'key-of-timeouts-04'), idem_once('t', 'idle'), idem_set('u', 'e', 'idle', 'a', true, 1), idem_try_append('idle', 'c', 1), idem_publish('idle', '{}')"),
	qr/^\(new,/, 'idle-in-transaction: a session with claims');
$holder->send("SET idle_in_transaction_session_timeout = '50ms'");
$node->poll_query_until('postgres', 'SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = ' . $holder->pid . ')') or die 'the session stays';
$holder->quit;
is($caller->run("SELECT c.outcome, idem_once('t', 'idle'), (idem_set('u', 'e', 'idle', 'a', false, 1)).processed, a.outcome, (SELECT count(*) FROM idem_outbox WHERE topic = 'idle') FROM idem_claim('t', 'key-of-timeouts-04') AS c, idem_try_append('idle', 'c', 1) AS a"),
	'new|t|t|appended|0', 'idle-in-transaction: everything is free');

#
# Old snapshots
#

$node->safe_psql('postgres', "SELECT c.outcome, idem_complete('old', 'key-of-snapshots-1', 200, 'first') FROM idem_claim('old', 'key-of-snapshots-1') AS c;
	SELECT idem_claim('old', 'key-of-snapshots-2', lease => '0'), idem_set('old', 'e', '1', 'a', true, 1), idem_try_append('old', 'c', 1), idem_once('old', 'before')");
if ($node->pg_version < 17)
{
	# Since 17 there is no such setting.
	$caller->quit;
	$node->append_conf('postgresql.conf', 'old_snapshot_threshold = 0');
	$node->restart;
	$caller = session($node);
}
my @old = map { session($node) } 1 .. 2;
$old[0]->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem_keys');
$old[1]->run('BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT count(*) FROM idem_keys');
# Everything changes, and nothing of what was is kept, where that is allowed.
$caller->run("SELECT idem_erase('old', 'key-of-snapshots-1'), idem_forget('old', 'key-of-snapshots-1')");
$caller->run("SELECT idem_claim('old', 'key-of-snapshots-2'), idem_set('old', 'e', '1', 'a', false, 5), idem_try_append('old', 'c', 2), idem_once('old', 'since')");
$caller->run("SELECT idem_claim('old', 'key-of-snapshots-3'); SELECT idem_claim('old', 'key-to-fill-pages-' || i) FROM generate_series(1, 500) AS i");
$node->safe_psql('postgres', 'VACUUM idem_keys, idem_action_versions, idem_user_actions, idem_aggregates, idem_client_sequences, idem_tokens');
foreach my $session (@old)
{
	my $title = $session == $old[0] ? 'repeatable-read' : 'serializable';

	# 72000: snapshot too old.
	foreach my $call ("idem_claim('old', 'key-of-snapshots-2')", "idem_claim('old', 'key-of-snapshots-3')", "idem_set('old', 'e', '1', 'a', true, 9)",
		"idem_set('old', 'e', '1', 'a', true, 2)", "idem_try_append('old', 'c', 3)", "idem_once('old', 'since')")
	{
		$session->run('SAVEPOINT s');
		like($session->run("SELECT $call"), qr/^ERROR (?:40001|72000)$/, "old-snapshot: $title: $call: an error to retry");
		$session->run('ROLLBACK TO s');
	}
	foreach my $answer ([ "(idem_lookup('old', 'key-of-snapshots-1')).response_body", 'first' ], [ "(idem_lookup('old', 'key-of-snapshots-3')).state", '' ],
		[ "idem_is_active('old', 'e', '1', 'a')", 't' ], [ "idem_last_client_seq('old', 'c')", '1' ])
	{
		$session->run('SAVEPOINT s');
		like($session->run("SELECT $answer->[0]"), qr/^(?:\Q$answer->[1]\E|ERROR 72000)$/, "old-snapshot: $title: $answer->[0]: what was, or none");
		$session->run('ROLLBACK TO s');
	}
	$session->run('ROLLBACK');
	$session->quit;
}
is($caller->run("SELECT outcome FROM idem_claim('old', 'key-of-snapshots-1')"), 'new', 'old-snapshot: a new one goes on');
$caller->quit;

unlike(slurp_file($node->logfile), qr/PANIC|terminated by signal/, 'no crash');
$node->stop;
done_testing();
