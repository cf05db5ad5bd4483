# A session that is stopped while it asks for shared memory.  Who cancels it is
# heard; what the server cannot give now, it may give later, and the session
# works without, and asks again.
#
# Needs a server with injection points; see test/source_server.

use strict;
use warnings FATAL => 'all';

use Time::HiRes qw(sleep);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('memory', conf => <<'CONF');
idempotency.cleanup_interval = 0
idempotency.max_new_keys_per_minute = 5
CONF
my $point = 'idem-attach-memory';
my $claim = 'SELECT outcome FROM idem_claim(pg_backend_pid()::text, gen_random_uuid()::text)';
my $counted = 'SELECT coalesce(sum(claims_new), 0) FROM idem_stats WHERE datname = current_database()';

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency; CREATE EXTENSION injection_points');
is_deeply([ injection_points('src/util/shared_memory.c') ], ['attach-memory'], 'sessions stop at every point that there is');

# Both the limit and the statistics ask for some.
foreach my $fate ('cancel', 'terminate')
{
	my $session = session($node);

	$node->safe_psql('postgres', "SELECT injection_points_attach('$point', 'wait')");
	$session->send($claim);
	until_stopped($node, $point, $session);
	$node->safe_psql('postgres', "SELECT injection_points_detach('$point'); SELECT pg_${fate}_backend(" . $session->pid . ')');
	is($session->result, $fate eq 'cancel' ? 'ERROR 57014' : "ERROR 57P01\nERROR lost", "$fate: it is an error");
	is($session->run($claim), 'new', "$fate: the session goes on") if $fate eq 'cancel';
	$session->quit;
}

# An internal error is what the server has for memory that it could not give once.
my $session = session($node);
my $before = $node->safe_psql('postgres', $counted);
$node->safe_psql('postgres', "SELECT injection_points_attach('$point', 'error')");
is($session->run($claim), 'ERROR 53200', 'no-memory: a limit that cannot be kept refuses');
$session->run('SET idempotency.max_new_keys_per_minute = 0');
is($session->run($claim), 'new', 'no-memory: without one, the call does what it should');
is($session->run($claim), 'new', 'no-memory: again');
$session->run('RESET idempotency.max_new_keys_per_minute');
$node->safe_psql('postgres', "SELECT injection_points_detach('$point')");
is($node->safe_psql('postgres', $counted), $before, 'no-memory: nothing is counted');

my @outcomes;
foreach (1 .. 600)
{
	push @outcomes, $session->run($claim);
	last if $outcomes[-1] eq 'ERROR ID002';
	sleep(0.1);
}
is($outcomes[-1], 'ERROR ID002', 'memory-again: the limit holds');
cmp_ok($node->safe_psql('postgres', $counted), '>', $before, 'memory-again: calls are counted');
$session->quit;

$node->stop;
done_testing();
