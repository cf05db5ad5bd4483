# A standby under a random load on its primary, with every page that its
# recovery changes compared with the primary's (wal_consistency_checking): what
# is written past the executor is all in the WAL.  Readers on the standby get
# answers meanwhile.
#
#	LOAD_SECONDS=n			how long, instead of 6
#	IDEMPOTENCY_TEST_SEED=n	to make the same choices again

use IdempotencyTest;
use RandomLoad;

my $seconds = $ENV{LOAD_SECONDS} || 6;
my $seed = $ENV{IDEMPOTENCY_TEST_SEED} || int(rand(1_000_000));
my $replay = "IDEMPOTENCY_TEST_SEED=$seed LOAD_SECONDS=$seconds";

note("$replay repeats the choices");
$PostgreSQL::Test::Utils::timeout_default = 60 + $seconds;

my $primary = new_node('primary', allows_streaming => 1, conf => <<'CONF');
wal_consistency_checking = all
deadlock_timeout = 20ms
idempotency.outbox_max_attempts = 3
idempotency.outbox_retention = 0
CONF
$primary->safe_psql('postgres', "SELECT pg_create_physical_replication_slot('standby')");

my $standby = new_standby($primary, conf => <<'CONF');
primary_slot_name = 'standby'
hot_standby_feedback = on
max_standby_streaming_delay = -1
CONF
my $started = -s $standby->logfile;
$primary->safe_psql('postgres', "CREATE EXTENSION idempotency; CREATE EXTENSION amcheck; $random_calls");
$primary->wait_for_catchup($standby);

# At a rate that a standby can follow: every change logs its whole page.  Where
# that much is too much for the machine, there are more rounds, until each kind of
# cleanup has had something to do, too.
my ($written, $read) = (0, 0);
my ($writes_wanted, $reads_wanted) = (100 * $seconds, 50 * $seconds);
my @deeds = qw(takeovers keys_deleted tokens_deleted messages_deleted);
my $all_happened = 'SELECT least(' . join(', ', @deeds) . ') > 0 FROM idem_stats';
foreach my $round (1 .. 20)
{
	my $writers = start_pgbench($primary, 'postgres', \%random_load,
		'-c', '8', '-j', '2', '-R', '800', '-T', $seconds, '--random-seed', $seed + $round);
	my $readers = start_pgbench($standby, 'postgres',
		{
			reader => <<'PGBENCH' }, '-c', '2', '-R', '200', '-T', $seconds, '--random-seed', $seed + $round);
\set n random(0, 300)
SELECT idem_lookup('load', 'load-key-' || lpad(:n::text, 10, '0')), idem_is_active('u', 'post', :n::text, 'like'),
	idem_last_client_seq('cart ' || :n / 10, 'phone ' || :n % 10);
PGBENCH
	my $written_now = finish_pgbench($writers);
	my $read_now = finish_pgbench($readers);

	last if $written_now < 0 || $read_now < 0;
	$written += $written_now;
	$read += $read_now;
	last if $written > $writes_wanted && $read > $reads_wanted
	  && $primary->safe_psql('postgres', $all_happened) eq 't';
}

cmp_ok($written, '>', $writes_wanted, "a random load ($replay)");
cmp_ok($read, '>', $reads_wanted, 'readers on the standby');

# Each kind of call has been made, and did something.
is( $primary->safe_psql('postgres',
		'SELECT count(DISTINCT name), (SELECT count(DISTINCT name) FROM calls WHERE ok) FROM calls'),
	'26|26', 'every primitive has been called');
cmp_ok($primary->safe_psql('postgres', "SELECT $_ FROM idem_stats"), '>', 0, "and there were $_")
  foreach @deeds;

my $catchup = eval { $primary->wait_for_catchup($standby); 1 };
ok($catchup, "the standby follows ($replay)");
unlike(slurp_file($standby->logfile, $started), qr/inconsistent page|(FATAL|PANIC|ERROR): /,
	"wal_consistency_checking: every page is as on the primary ($replay)");

if ($catchup)
{
	my $contents = join ";\n", map { "SELECT t::text FROM $_ AS t ORDER BY 1" }
	  map { "idem_$_" }
	  qw(keys action_versions user_actions client_sequences aggregates tokens outbox);

	is($standby->safe_psql('postgres', $contents), $primary->safe_psql('postgres', $contents),
		"the same rows ($replay)");
	foreach my $node ($primary, $standby)
	{
		$node->command_ok([ 'pg_amcheck', '--heapallindexed', $node->connstr('postgres') ],
			$node->name . ": heaps and indexes are sound ($replay)");
	}
	$standby->promote;
	my $load = start_pgbench($standby, 'postgres', \%random_load,
		'-c', '4', '-j', '2', '-T', '1', '--random-seed', $seed);
	cmp_ok(finish_pgbench($load), '>', 50, 'promoted: the load goes on');
}

$standby->stop;
$primary->stop;
done_testing();
