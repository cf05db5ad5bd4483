# A short run of test/outbox_run: publishers, relays and consumers that abort
# and are killed, and yet every message is applied exactly once and in order.

use strict;
use warnings FATAL => 'all';

use FindBin;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

my $messages = 5000;
my $node = new_node('outbox', conf => 'restart_after_crash = on');
my ($success, $output) = run_program(
	{
		PGHOST => $node->host,
		PGPORT => $node->port,
		MESSAGES => $messages
	},
	300,
	$^X, "$FindBin::Bin/../outbox_run");

is(join('', $output =~ /^(?:VIOLATION|FAILED).*\n/mg), '',
	'outbox-delivery: no violation');
my ($applied) = $output =~ /^ *(\d+)  messages: applied$/m;
cmp_ok($applied || 0, '>=', $messages, 'outbox-delivery: of so many messages');
like($output, qr/, 0 violations$/m, 'outbox-delivery: all checks were made');
ok($success, 'outbox-delivery: success');

$node->stop;
done_testing();
