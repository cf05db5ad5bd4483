# A session that is stopped when it is about to sleep until a lease ends or a
# message arrives. The event happens meanwhile; then the session meets an
# error, a cancel, a terminate or a kill, or continues. Other waiters, and
# later callers, get what is available.
#
# Needs a server with injection points; see test/source_server.

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('waits', conf => <<'CONF');
restart_after_crash = on
idempotency.cleanup_interval = 0
CONF
my $point = 'idem-await-sleeps';

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency; CREATE EXTENSION injection_points');
is_deeply([ injection_points('src/util/commit_notify.c') ], ['await-sleeps'], 'sessions stop at every point that there is');

sub sql
{
	my ($sql) = @_;

	return $node->safe_psql('postgres', "SET statement_timeout = '30s'; $sql");
}

# Two sessions wait for something. The first one is stopped at the point when
# that becomes available, and meets its fault. Returns the results of both, and
# of a third one after them.
sub meet
{
	my ($wait, $end, $fate) = @_;
	my ($victim, $peer) = (session($node), session($node));
	my (@answers, $offset);

	sql("SELECT injection_points_attach('$point', '" . ($fate eq 'error' ? 'error' : 'wait') . "')");
	$victim->send($wait);
	if ($fate eq 'error')
	{
		push @answers, $victim->result;
		sql("SELECT injection_points_detach('$point')");
	}
	else
	{
		until_stopped($node, $point, $victim);
		sql("SELECT injection_points_detach('$point')");
	}
	if ($fate eq 'kill')
	{
		$offset = -s $node->logfile;
		kill('KILL', $victim->pid) == 1 or die 'no such process';
		$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
		push @answers, $victim->result;
	}
	$peer->quit, $peer = session($node) if $fate eq 'kill';
	$peer->send($wait);
	$node->poll_query_until('postgres',
		"SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = " . $peer->pid)
	  or die 'the other does not sleep';
	sql($end);
	if ($fate eq 'resume')
	{
		sql("SELECT injection_points_wakeup('$point')");
		push @answers, $victim->result;
	}
	elsif ($fate eq 'cancel' || $fate eq 'terminate')
	{
		sql("SELECT pg_${fate}_backend(" . $victim->pid . ')');
		push @answers, $victim->result;
	}
	push @answers, $peer->result;
	$_->quit foreach ($victim, $peer);
	return join(', ', @answers);
}

my %ends = (
	error => 'ERROR XX000',
	cancel => 'ERROR 57014',
	terminate => "ERROR 57P01\nERROR lost",
	kill => 'ERROR lost',
	resume => undef);

foreach my $fate (qw(error resume cancel terminate kill))
{
	my $key = "await-$fate-0123456789";
	my $first = $ends{$fate};

	# A claim that is completed: both get the response, if they still exist.
	sql("SELECT FROM idem_claim('shop', '$key', lease => '1 hour')");
	is( meet(
			"SELECT outcome FROM idem_claim('shop', '$key', wait => '10 minutes')",
			"SELECT idem_complete('shop', '$key', 200, 'made', claim_token => claim_token) FROM idem_keys WHERE key = '$key'",
			$fate),
		($first // 'replay') . ', replay', "a claim that is completed, $fate");

	# A claim that is given up: one of them has it, and the other waits for that
	# until it has ended.
	sql("SELECT FROM idem_claim('shop', 'given-up-$key', lease => '1 hour')");
	my $answers = meet(
		"SELECT outcome FROM idem_claim('shop', 'given-up-$key', lease => '0', wait => '10 minutes')",
		"SELECT idem_fail('shop', 'given-up-$key', claim_token => claim_token) FROM idem_keys WHERE key = 'given-up-$key'",
		$fate);
	is($answers, ($first // 'new') . ', new', "a claim that is given up, $fate");

	# As many messages as there are sessions left to take one each.
	my $n = defined $first ? 1 : 2;
	is( meet(
			"SELECT count(*) FROM idem_outbox_take(1, topics => ARRAY['$key'], wait => '10 minutes')",
			"SELECT idem_publish('$key', '1') FROM generate_series(1, $n)",
			$fate),
		($first // '1') . ', 1', "a message, $fate");
	is(sql("SELECT count(*) FROM idem_outbox_take(10, topics => ARRAY['$key'])"), '0', '... which is taken once');
}

$node->stop;
done_testing();
