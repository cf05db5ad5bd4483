# Other sessions must not disturb the workers: they drop the objects that a
# worker uses, set limits for its database, or set the clock.

use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('undisturbed', start => 0, conf => <<'CONF');
idempotency.cleanup_interval = 1s
log_line_prefix = '%m [%p] %b %e '
CONF

my $hour = 3600;
start_with_clock($node, -5 * $hour);

my $expire = "SELECT idem_once('form', clock_timestamp()::text, ttl => '0')";
my $cleaned = 'SELECT count(*) = 0 FROM idem_tokens';

# Errors that processes of the extension have logged from this offset on.
sub complaints
{
	my ($offset) = @_;

	return join("\n",
		slurp_file($node->logfile, $offset) =~ /^.* idempotency (?:launcher|cleanup) \S+ (?:ERROR|FATAL): .*$/mg);
}

foreach my $database ('one', 'two')
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, "CREATE EXTENSION idempotency; $expire");
	eventually($node, $database, $cleaned, "cleans database $database");
}

#
# Objects in use by a worker are dropped
#

# Databases come and go, some by force.
my $offset = -s $node->logfile;
foreach my $round (1 .. 10)
{
	my $force = $round % 2 ? '' : 'WITH (FORCE)';

	$node->safe_psql('postgres', 'CREATE DATABASE storm TEMPLATE two');
	$node->safe_psql('postgres', "DROP DATABASE storm $force");
}
$node->safe_psql('two', $expire);
eventually($node, 'two', $cleaned, 'storm-of-drop-database: the work goes on');
is(complaints($offset), '', 'storm-of-drop-database: no errors');

# The worker waits to see whether the extension is there.  When it has seen that,
# the extension is dropped, before it comes to the first table.
configure($node, 'idempotency.databases' => 'one');
$offset = -s $node->logfile;
foreach my $round (1 .. 3)
{
	my $lock = 'BEGIN; LOCK TABLE pg_extension IN ACCESS EXCLUSIVE MODE';
	my $waiting = "SELECT count(*) = %d FROM pg_locks WHERE relation = 'pg_extension'::regclass AND NOT granted";
	my $first = session($node, 'one');
	my $second = session($node, 'one');

	$first->run($lock);
	$node->poll_query_until('postgres', sprintf $waiting, 1) or die 'no worker';
	$second->send("$lock; DROP EXTENSION idempotency; COMMIT");
	$node->poll_query_until('postgres', sprintf $waiting, 2) or die 'no DROP EXTENSION';
	$first->run('COMMIT');
	is($second->result, '', "drop-extension-between-steps: round $round");
	$node->safe_psql('one', "CREATE EXTENSION idempotency; $expire");
	eventually($node, 'one', $cleaned, "drop-extension-between-steps: what is there again is cleaned, round $round");
	$_->quit foreach $first, $second;
}

# It may have waited for too long, for its own taste.
is(join("\n", grep { !/ 55P03 / } split /\n/, complaints($offset)), '', 'drop-extension-between-steps: no errors');
configure($node, 'idempotency.databases' => '*');

#
# What is set for the database, and for those that work there
#

my @limits = qw(statement_timeout lock_timeout idle_in_transaction_session_timeout);
push @limits, 'transaction_timeout' if $node->pg_version >= 17;
$node->safe_psql('postgres', join ';', map { "ALTER DATABASE one SET $_" }
	  (map { "$_ = '1ms'" } @limits), "default_transaction_isolation = 'serializable'",
	'default_transaction_deferrable = on', 'default_transaction_read_only = on',
	"search_path = 'nowhere'", "role = 'pg_monitor'", "session_replication_role = 'replica'");
$offset = -s $node->logfile;
{
	local $ENV{PGOPTIONS} = join ' ', (map { "-c $_=0" } @limits),
	  qw(-c default_transaction_read_only=off -c search_path=public -c role=none);

	$node->safe_psql('one', "SELECT count(*) FROM idem_once_many('form', ARRAY(SELECT 'token ' || i FROM generate_series(1, 20000) AS i), ttl => '0')");
	eventually($node, 'one', $cleaned, 'settings-of-the-database: the worker goes by its own');
}
is(complaints($offset), '', 'settings-of-the-database: no errors');
$node->safe_psql('postgres', 'ALTER DATABASE one RESET ALL');

#
# The clock is set back
#

# The server, its statistics and everything else are five hours old by now.
set_clock(0);
$node->safe_psql('two', "SELECT idem_publish('keyed', '1', 'key'); $expire");
eventually($node, 'two', $cleaned, 'clock-set-back: before');
set_clock(-2 * $hour);
$node->safe_psql('two', $expire);
eventually($node, 'two', $cleaned, 'clock-set-back: what expires then is deleted');

# A message from the future waits, and holds its key.
my $take = 'SELECT payload FROM idem_outbox_take()';
my $clock_check = "SELECT status, value BETWEEN 7000 AND 7200, detail FROM idem_health() WHERE check_name = 'clock'";
$node->safe_psql('two', "SELECT idem_publish('keyed', '2', 'key'), idem_publish('other', '3')");
is($node->safe_psql('two', $take), '3', 'clock-set-back: a message waits, and so does the next one of its key');
$node->safe_psql('two', "SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'other'");
like($node->safe_psql('two', $clock_check), qr/^critical\|t\|.* is in the future: the clock was set back/,
	'clock-set-back: idem_health tells');
is($node->safe_psql('two', "SELECT status FROM idem_health() WHERE check_name = 'worker'"),
	'ok', 'clock-set-back: the worker is well');

set_clock(0);
is($node->safe_psql('two', $take), "1\n2", 'clock-set-back: until that time has come');
is($node->safe_psql('two', $clock_check), 'ok|f|no recorded time is in the future', 'clock-set-back: and all is well');

# Nor is anything left to tell when the statistics are reset.
set_clock(-2 * $hour);
$node->safe_psql('two', 'TRUNCATE idem_outbox; SELECT idem_stats_reset()');
is($node->safe_psql('two', $clock_check), 'ok|f|no recorded time is in the future', 'clock-set-back: idem_stats_reset() forgets it');
set_clock(0);

# A visit lasts for a second, whatever the clock says.
configure($node, 'idempotency.cleanup_interval' => 0);
$node->safe_psql('two', "SELECT count(*) FROM idem_once_many('form', ARRAY(SELECT 'token ' || i FROM generate_series(1, 100000) AS i), ttl => '0');
	UPDATE idem_tokens SET expires_at = expires_at - '2 hours'::interval");
configure($node, 'idempotency.databases' => 'two', 'idempotency.cleanup_batch_size' => 1, 'idempotency.cleanup_interval' => '1h');
my $worker = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency cleanup' AND datname = 'two'";
$node->poll_query_until('postgres', "SELECT EXISTS ($worker)") or die 'no worker';
set_clock(-$hour);
my %workers;
foreach (1 .. 600)
{
	last if $node->safe_psql('two', $cleaned) eq 't';
	$workers{$_} = 1 foreach split /\n/, $node->safe_psql('postgres', $worker);
}
cmp_ok(scalar keys %workers, '>', 1, 'clock-set-back: no worker stays for longer than it may');

$node->stop;

done_testing();
