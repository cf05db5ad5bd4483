# The background worker: which databases it cleans, and when.  Its settings,
# signals, and what can be seen of it.

use Time::HiRes qw(sleep);
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('worker', conf => <<'CONF');
idempotency.cleanup_interval = 1s
log_line_prefix = '%m [%p] %b %e '
CONF

# How often a message is in the log from this offset on.
sub count_log
{
	my ($pattern, $offset) = @_;
	my @found = slurp_file($node->logfile, $offset) =~ /$pattern/g;

	return scalar @found;
}

# The answer to a query, when it has one.
sub observe
{
	my ($query) = @_;

	foreach (1 .. 600)
	{
		my $answer = $node->safe_psql('postgres', $query);

		return $answer if $answer ne '';
		sleep(0.05);
	}
	die "no answer: $query";
}

my $launcher = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'";
my $worker = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency cleanup'";
my $waiting = "$worker AND wait_event_type = 'Lock'";

# Of each kind one that is expired and one that is live.
my $fill = <<'SQL';
SELECT outcome FROM idem_claim('shop', 'expired-key-00001', ttl => '0');
SELECT outcome FROM idem_claim('shop', 'live-key-00000001');
SELECT idem_once('form', 'expired', ttl => '0'), idem_once('form', 'live');
SELECT idem_publish('expired', '{}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take();
UPDATE idem_outbox SET acked_at = acked_at - '8 days'::interval WHERE topic = 'expired';
SELECT idem_publish('live', '{}');
SQL
my $only_live = <<'SQL';
SELECT array(SELECT key FROM idem_keys UNION ALL SELECT token FROM idem_tokens UNION ALL SELECT topic FROM idem_outbox)
	= '{live-key-00000001,live,live}'
SQL
my $expire = "SELECT idem_once('form', 'expired', ttl => '0')";
my $cleaned = "SELECT count(*) = 0 FROM idem_tokens WHERE token LIKE 'expired%'";
my $not_cleaned = "SELECT count(*) = 1 FROM idem_tokens WHERE token = 'expired'";

# Wait until an expired token stays while many sessions come and go, each of
# which takes the server as long as a visit of a worker: the launcher reads its
# new settings with a delay.
sub rests
{
	my ($database, $title) = @_;

	foreach (1 .. 20)
	{
		$node->safe_psql($database, $expire);
		sleep(2.5);
		return pass($title) if $node->safe_psql($database, $not_cleaned) eq 't';
	}
	return fail($title);
}

#
# Two databases are cleaned, one without the extension is left alone
#

foreach my $database ('one', 'two', 'without', 'Mixed "Case"')
{
	my $quoted = $database =~ s/"/""/gr;

	$node->safe_psql('postgres', qq(CREATE DATABASE "$quoted"));
	$node->safe_psql($database, 'CREATE EXTENSION idempotency')
	  if $database ne 'without';
}
$node->safe_psql($_, $fill) foreach 'one', 'two';
eventually($node, $_, $only_live, "cleans-each-database: $_") foreach 'one', 'two';

# A line for each pass that has deleted something, with how much, which may have
# been several while the rows were being made.
sub logged
{
	my ($database) = @_;
	my @sums = (0, 0, 0);

	foreach my $line (slurp_file($node->logfile) =~ /^.*LOG:  cleanup of database "\Q$database\E" deleted (.*)$/mg)
	{
		my @numbers = $line =~ /^(\d+) keys, (\d+) tokens and (\d+) messages$/ or die $line;

		return 'nothing' unless grep { $_ > 0 } @numbers;
		$sums[$_] += $numbers[$_] foreach 0 .. 2;
	}
	return "@sums";
}
foreach my $database ('one', 'two')
{
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		last if logged($database) eq '1 1 1';
		sleep 0.1;
	}
	is(logged($database), '1 1 1', "logs-what-it-deleted: $database");
}
is(logged('without'), '0 0 0', 'logs-what-it-deleted: nothing of where it deletes nothing');

# Each visit to a database is a transaction there.
my $visits = "SELECT xact_commit FROM pg_stat_database WHERE datname = 'without'";
my $visited = $node->safe_psql('postgres', $visits);
eventually($node, 'postgres', "SELECT ($visits) > $visited + 2",
	'visits the database without the extension');
is($node->safe_psql('without', "SELECT count(*) FROM pg_class WHERE relname LIKE 'idem%'"),
	'0', 'and leaves it as it was');

# A visit to where nothing is expired writes nothing.
my $xid = $node->safe_psql('postgres', 'SELECT pg_snapshot_xmax(pg_current_snapshot())');
$visited = $node->safe_psql('postgres', $visits =~ s/without/one/r);
eventually($node, 'postgres', 'SELECT (' . ($visits =~ s/without/one/r) . ") > $visited + 10",
	'nothing-expired-nothing-written: ten visits');
is($node->safe_psql('postgres', 'SELECT pg_snapshot_xmax(pg_current_snapshot())'),
	$xid, 'nothing-expired-nothing-written: no transaction id');
is(join("\n", slurp_file($node->logfile) =~ /^.*(?:WARNING|ERROR|FATAL|PANIC): .*$/mg), '',
	'nothing-to-report: no error in the log');

#
# The worker as users see it
#

is( $node->safe_psql('postgres',
		"SELECT backend_type, datname IS NULL FROM pg_stat_activity WHERE pid IN ($launcher)"),
	'idempotency launcher|t', 'the launcher is in pg_stat_activity, in no database');

# A lock on a table holds a worker up, for a second.
my $holder = session($node, 'one');
$holder->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
is( observe("SELECT backend_type, datname, state, query FROM pg_stat_activity WHERE pid IN ($waiting)"),
	'idempotency cleanup|one|active|deleting expired rows',
	'worker-is-in-pg_stat_activity: with its database and what it does');
$node->safe_psql('two', $expire);
eventually($node, 'two', $cleaned, 'a table that is locked in one database does not keep the worker from others');
like(slurp_file($node->logfile), qr/idempotency cleanup 55P03 ERROR:  canceling statement due to lock timeout/,
	'the worker gives up on the lock, and says so');
$holder->run("ROLLBACK; $expire");
eventually($node, 'one', $cleaned, 'and comes again');

# It runs at READ COMMITTED, whatever is the default there: otherwise its scan
# could make transactions of the application fail.
$node->safe_psql('one', "ALTER DATABASE one SET default_transaction_isolation = 'serializable'");
$holder->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
my $earlier = observe($waiting);
is( observe("SELECT (SELECT count(*) FROM pg_locks WHERE pid = w.pid AND mode = 'SIReadLock')
		FROM ($waiting) AS w WHERE pid <> $earlier"),
	'0', 'worker-is-read-committed: it takes no predicate locks');
$holder->run('ROLLBACK');
$node->safe_psql('one', 'ALTER DATABASE one RESET default_transaction_isolation');

# Nor does it matter that transactions there begin read-only.
$node->safe_psql('postgres', 'ALTER DATABASE one SET default_transaction_read_only = on');
$holder->run($expire);
is($node->safe_psql('one', 'SHOW transaction_read_only'), 'on', 'transactions begin read-only');
eventually($node, 'one', $cleaned, 'read-only-default: the worker deletes all the same');
$node->safe_psql('postgres', 'ALTER DATABASE one RESET default_transaction_read_only');

# A retention that a database sets for itself is the worker's, too.
$node->safe_psql('two', <<'SQL');
ALTER DATABASE two SET idempotency.expired_key_policy = 'reject';
ALTER DATABASE two SET idempotency.tombstone_retention = '1h';
SQL
configure($node, 'idempotency.cleanup_interval' => 0);
rests('two', 'a pause');
$node->safe_psql('two', <<'SQL');
SELECT outcome FROM idem_claim('shop', 'tombstone-fresh-01', ttl => '0');
SELECT outcome FROM idem_claim('shop', 'tombstone-old-0001', ttl => '0');
UPDATE idem_keys SET expires_at = expires_at - '2 hours'::interval WHERE key = 'tombstone-old-0001';
SQL
configure($node, 'idempotency.cleanup_interval' => '1s');
eventually($node, 'two', $cleaned, 'a pass');
eventually($node, 'two', $cleaned, 'another one') if $node->safe_psql('two', $expire);
is( $node->safe_psql('two', "SELECT key FROM idem_keys WHERE key LIKE 'tombstone%'"),
	'tombstone-fresh-01', 'tombstones-are-kept: as long as the database sets');

#
# SIGHUP changes the interval
#

configure($node, 'idempotency.cleanup_interval' => '1h');
rests('one', 'sighup-changes-interval: from a second to an hour');
configure($node, 'idempotency.cleanup_interval' => '1s');
eventually($node, 'one', $cleaned, 'sighup-changes-interval: and back');

configure($node, 'idempotency.cleanup_interval' => 0);
rests('one', 'zero-sleeps: interval 0');
configure($node, 'idempotency.cleanup_interval' => '1s');
eventually($node, 'one', $cleaned, 'zero-sleeps: and awakes');

# More milliseconds than an int holds, which would be one when cut short.
configure($node, 'idempotency.cleanup_interval' => '4294967297ms');
rests('one', 'long-interval-is-long: fifty days');

# While a worker is at work, the launcher waits for it; a reload must reach it
# all the same.
configure($node, 'idempotency.cleanup_interval' => '1h');
rests('one', 'a pause');
$holder->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
$node->reload;
my $pid = observe($waiting);
configure($node, 'idempotency.cleanup_interval' => '1s');
$node->poll_query_until('postgres', "SELECT NOT EXISTS ($waiting AND pid = $pid)")
  or die 'a worker waits for too long';
$holder->run("ROLLBACK; $expire");
eventually($node, 'one', $cleaned, 'sighup-is-not-lost: sent while a worker was at work');

#
# Which databases
#

sub cleans_only
{
	my ($setting, $in, $out, $title) = @_;

	configure($node, 'idempotency.cleanup_interval' => 0);
	rests($out, "$title: a pause");
	$node->safe_psql($in, $expire);
	configure($node, 'idempotency.databases' => $setting, 'idempotency.cleanup_interval' => '1s');
	eventually($node, $in, $cleaned, "$title: cleaned");

	# When it is cleaned once more, the pass that cleaned it before is over.
	$node->safe_psql($in, $expire);
	eventually($node, $in, $cleaned, "$title: again");
	is($node->safe_psql($out, $not_cleaned), 't', "$title: the other one is not");
	return;
}

cleans_only('one', 'one', 'two', 'databases-restricts: a name');
cleans_only('postgres, two ,absent', 'two', 'one', 'databases-restricts: a list');
cleans_only('ONE', 'one', 'two', 'databases-restricts: a name is in lower case');
cleans_only('"Mixed ""Case"""', 'Mixed "Case"', 'one', 'databases-restricts: a quoted name');
configure($node, 'idempotency.databases' => '');
rests('one', 'databases-restricts: an empty list is none');
foreach my $list ('one,,two', '"', 'one two', ',')
{
	my ($status, undef, $error) = $node->psql('postgres', "ALTER SYSTEM SET idempotency.databases = '$list'");
	ok($status != 0 && $error =~ /DETAIL:  It is not a list of names\./ && $error =~ /HINT:  Separate names/,
		"invalid-list-of-databases: \"$list\" is refused, with a hint");
}
foreach my $interval ('100us', '999ms', '-1')
{
	isnt($node->psql('postgres', "ALTER SYSTEM SET idempotency.cleanup_interval = '$interval'"), 0,
		"interval-is-a-second-at-least: $interval is refused");
}
# Each reload reports once which names match no database.
my $offset = -s $node->logfile;
my $unknown = qr/LOG:  setting "idempotency\.databases" names databases that do not exist: "absent", "One"\n.*HINT:  Correct/;
configure($node, 'idempotency.databases' => 'absent, one, "One"', 'idempotency.cleanup_interval' => '1s');
$node->wait_for_log($unknown, $offset);
$node->safe_psql('one', $expire);
eventually($node, 'one', $cleaned, 'unknown-database: the others are cleaned');
$node->safe_psql('one', $expire);
eventually($node, 'one', $cleaned, 'unknown-database: again');
is(count_log($unknown, $offset), 1, 'unknown-database: one line in the log');
$offset = -s $node->logfile;
$node->reload;
$node->wait_for_log($unknown, $offset);
pass('unknown-database: and one after each reload');
configure($node, 'idempotency.databases' => '*', 'idempotency.cleanup_interval' => '1s');
eventually($node, $_, $cleaned, "databases-restricts: * is all, $_ among them")
  foreach 'one', 'two', 'Mixed "Case"';

#
# A pause between batches
#

my $none_paused = "SELECT NOT EXISTS (SELECT FROM idem_tokens WHERE token LIKE 'paused%')";

# Delete $rows rows one by one, and return how many seconds that took.
sub seconds_for
{
	my ($rows, $delay) = @_;

	configure($node, 'idempotency.cleanup_interval' => 0, 'idempotency.cleanup_delay' => $delay, 'idempotency.cleanup_batch_size' => 1);
	rests('two', "a pause before that of $delay");
	my $begin = $node->safe_psql('one', "SELECT idem_once('form', 'paused ' || n, ttl => '0') FROM generate_series(1, $rows) AS n; SELECT extract(epoch FROM clock_timestamp())");
	configure($node, 'idempotency.cleanup_interval' => '1s');
	$node->poll_query_until('one', $none_paused) or die 'not cleaned';
	return $node->safe_psql('one', 'SELECT extract(epoch FROM clock_timestamp())') - (split /\n/, $begin)[-1];
}

cmp_ok(seconds_for(20, '100ms'), '>', 1.9, 'pause-between-batches: as long as it is set');
cmp_ok(seconds_for(3, '1500ms'), '>', 3, 'pause-between-batches: also a pause that is longer than a visit');

# In a pause, no worker is in the database, others are cleaned, and a reload ends it.
configure($node, 'idempotency.cleanup_delay' => '1h', 'idempotency.cleanup_batch_size' => 2);
$node->safe_psql('one', "SELECT idem_once('form', 'paused ' || n, ttl => '0') FROM generate_series(1, 5) AS n");
$node->poll_query_until('one', "SELECT count(*) = 3 FROM idem_tokens WHERE token LIKE 'paused%'") or die 'no batch';
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idempotency cleanup' AND datname = 'one')")
  or die 'a worker stays';
foreach (1 .. 2)
{
	$node->safe_psql('two', $expire);
	eventually($node, 'two', $cleaned, 'pause-between-batches: other databases are cleaned meanwhile');
}
is($node->safe_psql('one', "SELECT count(*) FROM idem_tokens WHERE token LIKE 'paused%'"), 3, 'pause-between-batches: this one rests');
configure($node, 'idempotency.cleanup_delay' => 0, 'idempotency.cleanup_batch_size' => 10000);
eventually($node, 'one', $none_paused, 'pause-between-batches: a reload ends it');

#
# Signals
#

# Have a worker that waits for a lock end, by this query on its process id.  The
# log says so in this message; in both there is its process id.
sub end_worker
{
	my ($query, $message, $title) = @_;
	my $worker_pid;

	# The worker may just have ended by itself.
	foreach (1 .. 10)
	{
		$offset = -s $node->logfile;
		$holder->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
		$worker_pid = observe($waiting);
		$node->safe_psql('postgres', sprintf $query, $worker_pid);
		$node->poll_query_until('postgres', "SELECT NOT EXISTS ($worker AND pid = $worker_pid)") or last;
		$holder->run('ROLLBACK');
		last if count_log(qr/\[$worker_pid\] idempotency cleanup 55P03/, $offset) == 0;
	}
	$message = sprintf $message, $worker_pid;
	$node->wait_for_log(qr/$message/, $offset);
	return is(count_log(qr/$message/, $offset), 1, "$title: at once, and is logged");
}

# The end of a worker on request is not an error.
my $ended = '00000 LOG:  background worker "idempotency cleanup" \(PID %d\) exited with exit code 1';

foreach my $signal ([ 'TERM', 'pg_terminate_backend', $ended ],
	[ 'INT', 'pg_cancel_backend', '\[%d\] idempotency cleanup 57014 ERROR' ])
{
	my ($name, $function, $message) = @$signal;

	end_worker("SELECT $function(%d)", $message, "sig$name-ends-worker");
	$node->safe_psql('one', $expire);
	eventually($node, 'one', $cleaned, "sig$name-ends-worker: the next one does the work");
}

# The launcher takes its worker along, and comes again, by itself, after some
# seconds.
$pid = $node->safe_psql('postgres', $launcher);
end_worker("SELECT pg_terminate_backend(pid) FROM ($launcher) AS l -- its worker: %d", $ended, 'launcher-ends-worker');
$holder->quit;
$node->safe_psql('two', $expire);
eventually($node, 'postgres', "SELECT EXISTS ($launcher AND pid <> $pid)", 'launcher-is-restarted');
eventually($node, 'two', $cleaned, 'launcher-is-restarted: and cleans');
is(count_log(qr/FATAL: /, 0), 0, 'launcher-is-restarted: nobody left with an error');

# Nothing of this has harmed anything.
is($node->safe_psql('one', $only_live), 't', 'what is live is still there');
unlike(slurp_file($node->logfile), qr/PANIC|terminated by signal/, 'no crash');
$node->stop;

done_testing();
