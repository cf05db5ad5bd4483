# A worker that has much to delete: it blocks no other session for long, and
# can be stopped at any moment.

use Time::HiRes qw(sleep);
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

# Batches are small, so that a worker is busy for much longer than that.
my $node = new_node('busy', conf => <<'CONF');
idempotency.cleanup_interval = 1s
idempotency.cleanup_batch_size = 1
idempotency.databases = 'busy, renamed, copy'
restart_after_crash = on
log_line_prefix = '%m [%p] %b %e '
CONF

my $expired = 250_000;
my $live = 100;
my $left = "SELECT count(*) FROM idem_tokens WHERE scope = 'expired'";

# Statements that return when a worker is deleting in the database.
sub until_busy
{
	my ($database) = @_;

	return <<"SQL";
SET statement_timeout = '60s';
DO \$\$
BEGIN
	LOOP
		PERFORM set_config('test.worker', pid::text, false) FROM pg_stat_activity
		WHERE backend_type = 'idempotency cleanup' AND datname = '$database' AND state = 'active';
		EXIT WHEN FOUND;
		PERFORM pg_sleep(0.001), pg_stat_clear_snapshot();
	END LOOP;
END
\$\$;
SQL
}

# The process id of a worker that is deleting in the database.
sub busy_worker
{
	my ($database) = @_;

	return $node->safe_psql('postgres',
		until_busy($database)
		  . "SELECT current_setting('test.worker')");
}

# Errors that processes of the extension have logged from this offset on.
sub complaints
{
	my ($offset) = @_;

	return join("\n",
		slurp_file($node->logfile, $offset) =~ /^.* idempotency (?:launcher|cleanup) \S+ (?:ERROR|FATAL): .*$/mg);
}

# A new database with a lot to delete, into which a worker goes soon.
sub make_busy
{
	$node->safe_psql('postgres', 'DROP DATABASE IF EXISTS busy');
	return $node->safe_psql('postgres', 'CREATE DATABASE busy TEMPLATE full_of_expired');
}

# Some of it, and not all, has been deleted; what is live is there.
sub is_between
{
	my ($database, $title) = @_;
	my $count = $node->safe_psql($database, $left);

	note("$title: $count of $expired are left");
	ok($count > 0 && $count < $expired, "$title: some is deleted, some is left");
	is($node->safe_psql($database, "SELECT count(*) FROM idem_tokens WHERE scope = 'live'"),
		$live, "$title: what is live is there");
	return $count;
}

$node->safe_psql('postgres', 'CREATE DATABASE full_of_expired');
$node->safe_psql('full_of_expired', <<"SQL");
CREATE EXTENSION idempotency;
CREATE EXTENSION amcheck;
SELECT count(*) FROM generate_series(1, $expired, 1000) AS n,
	idem_once_many('expired', ARRAY(SELECT 'token ' || n + i FROM generate_series(0, 999) AS i), ttl => '0');
SELECT count(*) FROM idem_once_many('live', ARRAY(SELECT 'token ' || i FROM generate_series(1, $live) AS i));
CHECKPOINT;
SQL

#
# Other people's commands get through
#

make_busy();
is( sqlstate_of($node, until_busy('busy') . 'DROP DATABASE busy', 'postgres'),
	'00000', 'drop-database-while-deleting');

make_busy();
is( sqlstate_of($node, until_busy('busy') . 'DROP DATABASE busy WITH (FORCE)', 'postgres'),
	'00000', 'drop-database-while-deleting: by force');

make_busy();
is( sqlstate_of($node, until_busy('busy') . 'ALTER DATABASE busy RENAME TO renamed', 'postgres'),
	'00000', 'rename-database-while-deleting');
my $count = is_between('renamed', 'rename-database-while-deleting');
eventually($node, 'renamed', "SELECT ($left) < $count", 'rename-database-while-deleting: the work goes on');
$node->safe_psql('postgres', 'DROP DATABASE renamed');

make_busy();
is( sqlstate_of($node, until_busy('busy') . 'CREATE DATABASE copy TEMPLATE busy', 'postgres'),
	'00000', 'database-as-template-while-deleting');
$count = is_between('copy', 'database-as-template-while-deleting');
eventually($node, 'copy', "SELECT ($left) < $count", 'database-as-template-while-deleting: the copy is cleaned');
$node->safe_psql('postgres', 'DROP DATABASE copy');
eventually($node, 'busy', "SELECT ($left) < $count", 'database-as-template-while-deleting: so is the original');

$node->safe_psql('postgres', "SET allow_in_place_tablespaces = on; CREATE TABLESPACE elsewhere LOCATION ''");
is( sqlstate_of($node, until_busy('busy') . 'ALTER DATABASE busy SET TABLESPACE elsewhere', 'postgres'),
	'00000', 'set-tablespace-while-deleting');

#
# More than one visit can do
#

# A visit is over after a second; the next one does not wait for the interval.
configure($node, 'idempotency.cleanup_interval' => '1h');
make_busy();
$node->reload;
my @workers = busy_worker('busy');
while (@workers < 4)
{
	my $seen = join(',', @workers);

	eventually($node, 'postgres',
		"SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE backend_type = 'idempotency cleanup' AND datname = 'busy' AND pid NOT IN ($seen))",
		'work-left-is-continued-at-once: visit ' . (@workers + 1))
	  or last;
	push @workers, busy_worker('busy');
}
configure($node, 'idempotency.cleanup_interval' => '1s');

#
# DROP EXTENSION
#

my $offset = -s $node->logfile;
foreach my $round (1 .. 5)
{
	is( sqlstate_of($node, until_busy('busy') . 'DROP EXTENSION idempotency', 'busy'),
		'00000', "drop-extension-while-deleting: round $round");
	is($node->safe_psql('busy', "SELECT count(*) FROM pg_class WHERE relname LIKE 'idem%'"),
		'0', "drop-extension-while-deleting: nothing is left, round $round");
	$node->safe_psql('busy', <<'SQL');
CREATE EXTENSION idempotency;
SELECT count(*) FROM idem_once_many('expired', ARRAY(SELECT 'token ' || i FROM generate_series(1, 20000) AS i), ttl => '0');
SELECT idem_once('live', 'token');
SQL
}
is(complaints($offset), '', 'drop-extension-while-deleting: the worker leaves without a word');
eventually($node, 'busy', "SELECT ($left) < 20000", 'create-extension-again: the new tables are cleaned');
configure($node, 'idempotency.cleanup_batch_size' => 10000);
eventually($node, 'busy', "SELECT ($left) = 0", 'create-extension-again: all of them');
is($node->safe_psql('busy', 'SELECT scope FROM idem_tokens'), 'live', 'create-extension-again: but what is live');
configure($node, 'idempotency.cleanup_batch_size' => 1);

#
# SIGTERM
#

# The worker ends without a word of its own.
sub leaves_silently
{
	my ($code, $title) = @_;
	my $pid = busy_worker('busy');

	$offset = -s $node->logfile;
	$code->($pid);
	return is(complaints($offset), '', "$title: without a word");
}

make_busy();
leaves_silently(
	sub {
		my $ended = '';

		# The one that was busy can have ended before, and the next one not have begun.
		foreach (1 .. 600)
		{
			$ended = $node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
				WHERE backend_type = 'idempotency cleanup' AND datname = 'busy'});
			last if $ended ne '';
		}
		is($ended, 't', 'sigterm-ends-busy-worker');
	},
	'sigterm-ends-busy-worker');
$count = is_between('busy', 'sigterm-ends-busy-worker');
eventually($node, 'busy', "SELECT ($left) < $count", 'sigterm-ends-busy-worker: the next one goes on');

#
# Shutdown
#

foreach my $mode ('fast', 'smart', 'immediate')
{
	leaves_silently(
		sub {
			$node->stop($mode);
			$node->start;
		},
		"shutdown-while-deleting: $mode");
	is_between('busy', "shutdown-while-deleting: $mode");
}

# The postmaster is gone, and nobody tells its children.
busy_worker('busy');
$node->kill9;
# Until the last child has left, the shared memory is in use.
foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	last if $node->start(fail_ok => 1);
	$node->stop('fast', fail_ok => 1);
	sleep(0.1);
}
is_between('busy', 'postmaster-killed-while-deleting');

#
# kill -9 of a worker: the server ends all sessions and recovers.
#

my $pid = busy_worker('busy');
$offset = -s $node->logfile;
kill('KILL', $pid);
$node->wait_for_log(qr/terminated by signal 9.*database system is ready to accept connections/s, $offset);
$node->poll_query_until('postgres', 'SELECT true') or die 'no server';
$count = is_between('busy', 'worker-killed-while-deleting');
eventually($node, 'postgres',
	"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'",
	'worker-killed-while-deleting: the launcher is there again');
eventually($node, 'busy', "SELECT ($left) < $count", 'worker-killed-while-deleting: the next one goes on');
configure($node, 'idempotency.cleanup_batch_size' => 10000);
eventually($node, 'busy', "SELECT ($left) = 0", 'worker-killed-while-deleting: to the end');
is($node->safe_psql('busy', 'SELECT count(*) FROM idem_tokens'), $live,
	'worker-killed-while-deleting: what is live is still there');
is( $node->safe_psql('busy',
		"SELECT count(bt_index_check(indexrelid, true)) > 1 FROM pg_index
		 WHERE indrelid = 'idem_tokens'::regclass"),
	't', 'worker-killed-while-deleting: the indexes are whole');

unlike(slurp_file($node->logfile), qr/PANIC|terminated by signal (?!9)/, 'no other crash');
$node->stop;

done_testing();
