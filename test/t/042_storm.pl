# A short run of test/storm/run: right answers while our tables are rewritten
# and everything around them changes.

use FindBin;
use IdempotencyTest;

my $seed = $ENV{SEED} || 1;
my $node = new_node('storm', conf => 'fsync = off');
my @parts = qw(load reconnect discard tables indexes catalog);
my ($success, $output, %turns);

# Where that is too short on a busy machine, it lasts longer.
foreach my $seconds (8, 30, 120)
{
	($success, $output) = run_program(
		{
			PGHOST => $node->host,
			PGPORT => $node->port,
			SEED => $seed,
			SECONDS_OF_LOAD => $seconds
		},
		120 + 3 * $seconds,
		"$FindBin::Bin/../storm/run");
	%turns = $output =~ /^(\w+): (\d+)/mg;
	last if !$success || !grep { ($turns{$_} || 0) < 5 } @parts;
}
ok($success, "storm: no wrong answer, no error (SEED=$seed)") or diag($output);
cmp_ok($turns{$_} || 0, '>=', 5, "storm: $_ had its turn") foreach @parts;
$node->stop;
done_testing();
