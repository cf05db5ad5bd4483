# Crashes: a backend is killed, or the server is stopped without notice, at
# every point between claim and commit. Afterwards a business row exists if and
# only if its key is completed, nothing blocks a retry beyond its lease, and
# every result that a client received is still true.

use Time::HiRes qw(sleep time);
use IdempotencyTest;
use Clients;

my $node = new_node('crash', conf => <<'CONF');
restart_after_crash = on
synchronous_commit = on
max_prepared_transactions = 700
CONF

$node->safe_psql('postgres', $client_schema);

# Kill a backend; the server ends all sessions and recovers.  Returns false if it has
# ended already.
sub kill_backend
{
	my ($pid) = @_;
	my $offset = -s $node->logfile;

	kill('KILL', $pid) == 1 or return 0;
	$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
	return 1;
}

sub stop_immediately
{
	$node->stop('immediate');
	$node->start;
	return;
}

sub is_whole
{
	my ($title) = @_;

	return is($node->safe_psql('postgres', 'SELECT * FROM torn'), '',
		"$title: a business row if and only if a completed record");
}

sub retries
{
	my ($key, $answer, $title) = @_;

	return is($node->safe_psql('postgres', "SELECT retry('$key')"), $answer,
		"$title: the retry's outcome");
}

#
# One transaction: claim, work, complete, commit
#

my @one_steps = (
	[ 'begin', "BEGIN" ],
	[ 'claim', "SELECT outcome FROM idem_claim('shop', 'KEY')" ],
	[ 'work', "INSERT INTO orders VALUES ('KEY', 'first')" ],
	[ 'complete', "SELECT idem_complete('shop', 'KEY', 201, 'first')" ],
	[ 'commit', "COMMIT" ]);

# Two: the claim, and what has been done so far, are committed.  The lease is
# shorter than any recovery that is waited for below.
my $lease = 0.3;
my @two_steps = (
	[ 'claim', "SELECT outcome FROM idem_claim('shop', 'KEY', lease => '$lease seconds')" ],
	[
		'checkpoint',
		"SELECT idem_checkpoint('shop', 'KEY', 'charged', lease => '$lease seconds',
			claim_token => claim_token) > now() FROM idem_keys WHERE key = 'KEY'"
	],
	[ 'work', "BEGIN; INSERT INTO orders VALUES ('KEY', 'first')" ],
	[
		'complete',
		"SELECT idem_complete('shop', 'KEY', 201, 'first', claim_token => claim_token)
		 FROM idem_keys WHERE key = 'KEY'"
	],
	[ 'commit', "COMMIT" ]);

# Take the steps up to the one with this index.
sub take_steps
{
	my ($session, $key, $last, @steps) = @_;

	foreach my $step (@steps[ 0 .. $last ])
	{
		my $answer = $session->run($step->[1] =~ s/KEY/$key/gr);

		like($answer, qr/^(new|t|)$/, "$key: $step->[0]") unless $answer =~ /^(new|t|)$/;
	}
	return;
}

sub after_one
{
	my ($key, $step, $title) = @_;

	is( $node->safe_psql('postgres', "SELECT state FROM idem_lookup('shop', '$key')"),
		$step eq 'commit' ? 'completed' : '', "$title: all or nothing");
	retries($key, $step eq 'commit' ? 'replay first' : 'new 1', $title);
	return;
}

sub after_two
{
	my ($key, $step, $title) = @_;
	my $old_token = $node->safe_psql('postgres',
		"SELECT claim_token FROM idem_keys WHERE key = '$key'");

	is( $node->safe_psql('postgres',
			"SELECT state, coalesce(lease_expires_at <= now() + interval '$lease seconds', true)
			 FROM idem_lookup('shop', '$key')"),
		$step eq 'commit' ? 'completed|t' : 'started|t', "$title: the claim is as committed");
	$node->poll_query_until('postgres',
		"SELECT coalesce(lease_expires_at < clock_timestamp(), true) FROM idem_keys WHERE key = '$key'");
	is( $node->safe_psql('postgres', "SELECT recovery_point FROM idem_lookup('shop', '$key')"),
		$step eq 'claim' ? '' : 'charged', "$title: so is the checkpoint");
	retries($key, $step eq 'commit' ? 'replay first' : 'new 2', $title);
	is( sqlstate_of($node, "SELECT idem_complete('shop', '$key', 200, 'late', claim_token => $old_token)"),
		$step eq 'commit' ? '00000' : 'ID003', "$title: a late worker changes nothing");
	return;
}

foreach my $mode ([ 'one', \@one_steps, \&after_one ], [ 'two', \@two_steps, \&after_two ])
{
	my ($name, $steps, $after) = @$mode;

	foreach my $last (0 .. $#$steps)
	{
		my $step = $steps->[$last][0];
		my $key = "$name-transaction-killed-after-$step";
		my $session = session($node);

		take_steps($session, $key, $last, @$steps);
		kill_backend($session->pid) or die "the session has ended";
		is($session->run('SELECT 1'), 'ERROR lost', "$key: the connection is lost");
		$session->quit;
		is_whole($key);
		$after->($key, $step, $key);
		is_whole("$key, retried");
	}
}

# An immediate stop finds one session at each of these points.
my @sessions;

foreach my $mode ([ 'one', \@one_steps ], [ 'two', \@two_steps ])
{
	my ($name, $steps) = @$mode;

	foreach my $last (0 .. $#$steps)
	{
		push @sessions, session($node);
		take_steps($sessions[-1], "$name-transaction-stopped-after-$steps->[$last][0]",
			$last, @$steps);
	}
}

# And a claim whose lease has a long way to go.
my $long_lease = "'shop', 'lease-outlives-the-crash'";
my $claimed = $node->safe_psql('postgres',
	"SELECT claim_token, lease_expires_at FROM idem_claim($long_lease, lease => '1 hour')");
my ($token, $until) = split /\|/, $claimed;

stop_immediately();
$_->quit foreach @sessions;
is_whole('immediate stop');
foreach my $step (@one_steps)
{
	my $key = "one-transaction-stopped-after-$step->[0]";

	after_one($key, $step->[0], $key);
}
foreach my $step (@two_steps)
{
	my $key = "two-transaction-stopped-after-$step->[0]";

	after_two($key, $step->[0], $key);
}
is_whole('immediate stop, retried');
is( $node->safe_psql('postgres', "SELECT outcome, lease_expires_at FROM idem_claim($long_lease)"),
	"in_progress|$until", 'lease-outlives-the-crash: to the same instant');
is( $node->safe_psql('postgres',
		"BEGIN;
		 INSERT INTO orders VALUES ('lease-outlives-the-crash', 'first');
		 SELECT idem_complete($long_lease, 200, 'first', claim_token => $token);
		 COMMIT"),
	't', 'lease-outlives-the-crash: its holder completes');

#
# Prepared transactions survive, and hold their claims
#

foreach my $crash ('killed', 'stopped')
{
	foreach my $end ('COMMIT', 'ROLLBACK')
	{
		my $key = "prepared-$crash-\L$end";
		my $two = "$key-complete-only";
		my $session = session($node);

		$node->safe_psql('postgres', "SELECT * FROM idem_claim('shop', '$two', lease => '0.1 seconds')");
		take_steps($session, $key, 3, @one_steps);
		is($session->run("PREPARE TRANSACTION '$key'"), '', "$key: prepared");
		is( $session->run(
				"BEGIN;
				 INSERT INTO orders VALUES ('$two', 'first');
				 SELECT idem_complete('shop', '$two', 201, 'first', claim_token => claim_token)
				 FROM idem_keys WHERE key = '$two';
				 PREPARE TRANSACTION '$two'"),
			't', "$two: prepared");
		if ($crash eq 'killed')
		{
			kill_backend($session->pid) or die "the session has ended";
		}
		else
		{
			stop_immediately();
		}
		$session->quit;
		is_whole($key);

		is( $node->safe_psql('postgres',
				"SELECT outcome, lease_expires_at FROM idem_claim('shop', '$key');
				 SELECT outcome FROM idem_claim('shop', '$key', wait => '0.1 seconds');
				 SELECT state FROM idem_lookup('shop', '$key')"),
			"in_progress|\nin_progress\n", "$key: still holds its claim");
		is( $node->safe_psql('postgres',
				"SELECT lease_expires_at < now() FROM idem_lookup('shop', '$two');
				 SELECT outcome FROM idem_claim('shop', '$two')"),
			"t\nin_progress", "$two: even beyond the lease");
		$node->safe_psql('postgres', "$end PREPARED '$key'; $end PREPARED '$two'");
		is_whole("$key, ended");
		retries($key, $end eq 'COMMIT' ? 'replay first' : 'new 1', $key);
		retries($two, $end eq 'COMMIT' ? 'replay first' : 'new 2', $two);
	}
}
is_whole('prepared, retried');

#
# Random crashes under load
#

my $seed = $ENV{IDEMPOTENCY_TEST_SEED} || int(rand(1_000_000));
srand($seed);
note("random crashes: seed $seed (set IDEMPOTENCY_TEST_SEED to repeat)");

my $began = time();
my $round = 0;
my (%told, @wrong);
my %met = (done => 0, seen => 0, prepared => 0, open => 0);

while ((time() - $began < 12 || $round < 5 || grep { $_ == 0 } values %met) && $round < 40 && !@wrong)
{
	my @clients;
	my $how;

	$round++;
	@clients = start_clients($node, 'client', 8, map { sprintf('random-round-%03d-%04d', $round, $_) } 1 .. 600);
	until_busy($node, 20, $round);
	sleep(rand(0.25));
	if (rand() < 0.3)
	{
		$how = 'immediate stop';
		stop_immediately();
	}
	else
	{
		my $pid = $node->safe_psql('postgres',
			"SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'
				AND pid <> pg_backend_pid() ORDER BY pid OFFSET "
			  . int(rand(8)) . " LIMIT 1");

		$how = $pid ne '' && kill_backend($pid) ? 'kill' : 'nobody left to kill';
	}

	push @wrong, finish_clients(\%told, \%met, @clients);
	push @wrong, end_prepared($node, \%met);
	push @wrong, broken_promises($node, \%told);

	# No lease is older than the crash, so all of them end soon.
	$met{open} += $node->safe_psql('postgres',
		"SELECT count(*) FROM idem_keys WHERE state = 'started' AND key LIKE 'random-%'");
	sleep(0.06);
	push @wrong, retry_all($node);
	push @wrong, "round $round, $how" if @wrong;
}
is(join("\n", @wrong), '', "random crashes: nothing torn, nothing forgotten, nothing stuck (seed $seed)");
note("$round rounds; clients were told $met{done} times done, $met{seen} times the response;"
	  . " $met{prepared} prepared transactions, $met{open} open claims survived");
cmp_ok($round, '>=', 5, 'random crashes: enough rounds');
foreach my $what (sort keys %met)
{
	cmp_ok($met{$what}, '>', 0, "random crashes: some $what");
}

is( $node->safe_psql('postgres',
		"CREATE EXTENSION amcheck;
		 SELECT count(bt_index_check(indexrelid, true)) FROM pg_index
		 WHERE indrelid = 'idem_keys'::regclass;
		 SELECT count(*) FROM verify_heapam('idem_keys')"),
	"4\n0", 'and the table is sound');

#
# Claim tokens that were raised stay so.
#
$node->safe_psql('postgres', 'SELECT idem_claim(\'shop\', \'before-raising-0001\'); CHECKPOINT; SELECT idem_raise_claim_tokens(7000000)');
stop_immediately();
is($node->safe_psql('postgres', 'SELECT idem_raise_claim_tokens(0)'), 7000000, 'raised claim tokens: stay so');

$node->stop;
done_testing();
