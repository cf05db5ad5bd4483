# A background worker, or the launcher, that is stopped in the middle of a pass:
# by an error, a cancel, a terminate or a kill.  Another one comes, deletes what
# has expired, and what is live stays.
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

# A batch is one row, so that a pass has several.  A process that ends while it
# waits outside a transaction looks back at what it waited for when dynamic
# shared memory has been unmapped already: so that must be part of the main one.
my $node = new_node('worker', conf => <<'CONF');
restart_after_crash = on
min_dynamic_shared_memory = 1MB
idempotency.cleanup_interval = 1s
idempotency.cleanup_batch_size = 1
idempotency.databases = 'postgres'
log_line_prefix = '%m [%p] %b %e '
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE EXTENSION injection_points;
SELECT count(*) FROM generate_series(1, 20) AS n, idem_claim('live', 'live-key-' || n + 10000000);
SELECT count(*) FROM generate_series(1, 20) AS n, idem_once('live', 'token ' || n);
SQL

my $expire = <<'SQL';
SELECT count(*) FROM generate_series(1, 3) AS n, idem_claim('expired', 'expired-key-' || n + 10000000, ttl => '0');
SELECT count(*) FROM generate_series(1, 3) AS n, idem_once('expired', 'token ' || n, ttl => '0');
SQL
my $rows = <<'SQL';
SELECT count(*) FILTER (WHERE scope = 'expired'), count(*) FILTER (WHERE scope = 'live')
FROM (SELECT scope FROM idem_keys UNION ALL SELECT scope FROM idem_tokens) AS r;
SQL

sub meet
{
	my ($who, $place, $fate) = @_;
	my $point = "idem-$place";
	my $title = "$who at $place: $fate";
	my $offset = -s $node->logfile;
	my $pid;

	$node->safe_psql('postgres',
		"SELECT injection_points_attach('$point', '" . ($fate eq 'error' ? 'error' : 'wait') . "'); $expire");
	if ($fate eq 'error')
	{
		$node->wait_for_log(qr/idempotency $who XX000 ERROR:  error triggered for injection point $point/, $offset);
	}
	else
	{
		my $waits = "backend_type = 'idempotency $who' AND wait_event = '$point'";

		$node->poll_query_until('postgres',
			"SELECT count(*) = 1 FROM pg_stat_activity WHERE $waits")
		  or die "$title: not there";
		$pid = $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE $waits");
	}
	$node->safe_psql('postgres', "SELECT injection_points_detach('$point')");
	if ($fate eq 'kill')
	{
		kill('KILL', $pid) == 1 or die "$title: no process $pid";
		$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
	}
	elsif ($fate ne 'error')
	{
		$node->safe_psql('postgres', "SELECT pg_${fate}_backend($pid)");
	}

	$node->poll_query_until('postgres', $rows, '0|40');
	return is($node->safe_psql('postgres', $rows), '0|40',
		"$title: what has expired is deleted, and nothing else");
}

# As in 001_sessions.pl, the kill clears what the others leave behind.  The
# launcher rests for ten seconds after each of its ends.
my @points = (
	[ 'cleanup', 'worker-connected' ],
	[ 'cleanup', 'cleanup-found' ],
	[ 'cleanup', 'deleted' ],
	[ 'cleanup', 'worker-commit' ],
	[ 'cleanup', 'worker-batch' ],
	[ 'launcher', 'launcher-pass' ],
	[ 'launcher', 'launcher-wait' ]);

my %stopped_at = map { $_->[1] => 1 } @points;
is_deeply([ grep { !$stopped_at{$_} } injection_points('src/worker/launcher.c', 'src/worker/worker.c', 'src/maintenance/cleanup.c') ], [],
	'workers stop at every point of theirs');

foreach my $point (@points)
{
	diag("== $point->[0], $point->[1]");
	meet(@$point, $_) foreach qw(error cancel terminate kill);
}

$node->command_ok(
	[ 'pg_amcheck', '--install-missing', '--heapallindexed', '--rootdescend', 'postgres' ],
	'tables and indexes are sound');

$node->stop;
done_testing();
