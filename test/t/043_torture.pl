# A short run of test/torture: a server that is crashed in three ways, and
# clients whose results must all be true. And proof that the test finds errors:
# clients that make a mistake, each of which is found.

use FindBin;
use IdempotencyTest;

my $seed = $ENV{IDEMPOTENCY_TEST_SEED} || 1;
# The portable edition makes fewer calls in the same time.
my $is_slower = ($ENV{EDITION} || '') eq 'portable';

# torture(OPTION ...): whether it found nothing, and what it printed.
sub torture
{
	return run_program({}, 300, "$FindBin::Bin/../torture/run", "SEED=$seed", @_);
}

my ($success, $output) = torture('KILLS=15', 'STOPS=5', 'POSTMASTERS=3');

is(join('', $output =~ /^VIOLATION:.*\n/mg), '', 'torture: no violation');
ok($success, 'torture: all checks were made');
like($output, qr/; 0 violations$/m, 'torture: to the end');
# From the last line: where it takes long, there were lines on the way.
my ($calls, $lost, $kills, $stops, $postmasters) = $output =~
  /^seed .* (\d+) calls, (\d+) lost .* (\d+) kills \(.* (\d+) immediate stops, (\d+) kills of the/m;
cmp_ok($calls || 0, '>', $is_slower ? 150 : 500, 'torture: calls');
cmp_ok($lost || 0, '>', 20, 'torture: lost answers');
cmp_ok($kills || 0, '>=', 15, 'torture: kills of backends and the worker');
cmp_ok($stops || 0, '>=', 5, 'torture: immediate stops');
cmp_ok($postmasters || 0, '>=', 3, 'torture: kills of the postmaster');
like($output, qr/^# met: .*\n# told: /m, 'torture: what it met');
unlike($output, qr/^# (?:met|told): .* 0(?:,|$)/m, 'torture: and that it met all of it') if !$is_slower;

my %mistakes = (
	'asynchronous' => qr/told, but not true: |acknowledged, but not so/,
	'effect-outside' => qr/an order without its completed key|more than one order/,
	'new-key' => qr/more than one order for one intent/,
	'early-answer' => qr/told, but not true: response/,
	'no-fence' => qr/an order without its completed key|more than one order/,
	'ack-first' => qr/an acknowledged message that was not applied|a transaction without its message/);

foreach my $mistake (sort keys %mistakes)
{
	($success, $output) = torture("WRONG=$mistake", 'MINUTES=2');
	ok(!$success, "wrong-client-is-found: $mistake");
	like($output, qr/^VIOLATION: (?:$mistakes{$mistake})/m, "wrong-client-is-found: $mistake, for what it does");
}

done_testing();
