# A short run of test/storm/run: right answers while our tables are rewritten
# and everything around them changes.

use strict;
use warnings FATAL => 'all';

use FindBin;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

my $seed = $ENV{SEED} || 1;
my $node = new_node('storm', conf => 'fsync = off');
my ($success, $output) = run_program(
	{
		PGHOST => $node->host,
		PGPORT => $node->port,
		SEED => $seed,
		SECONDS_OF_LOAD => 8
	},
	120,
	"$FindBin::Bin/../storm/run");

ok($success, "storm: no wrong answer, no error (SEED=$seed)") or diag($output);
foreach my $part (qw(load reconnect discard tables indexes catalog))
{
	my ($count) = $output =~ /^$part: (\d+)/m;

	cmp_ok($count || 0, '>=', 5, "storm: $part had its turn");
}
$node->stop;
done_testing();
