# A short run of test/torture/outbox_run: publishers, relays and consumers that abort
# and are killed, and yet every message is applied exactly once and in order.
# Then the relay of examples/shop, which does as the README says.

use FindBin;
use IPC::Run;
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
	$^X, "$FindBin::Bin/../torture/outbox_run");

is(join('', $output =~ /^(?:VIOLATION|FAILED).*\n/mg), '',
	'outbox-delivery: no violation');
my ($applied) = $output =~ /^ *(\d+)  messages: applied$/m;
cmp_ok($applied || 0, '>=', $messages, 'outbox-delivery: of so many messages');
like($output, qr/, 0 violations$/m, 'outbox-delivery: all checks were made');
ok($success, 'outbox-delivery: success');

#
# The relay of the example.  Its consumer refuses some messages for good, and is
# too slow for a whole batch within the relay's lease; what the relay has not
# tried must not die of it.
#

my $examples = "$FindBin::Bin/../../examples/shop";

$node->safe_psql('postgres', 'CREATE DATABASE shop; CREATE DATABASE warehouse');
$node->safe_psql('shop', slurp_file("$examples/schema.sql"));
$node->safe_psql('warehouse', slurp_file("$examples/warehouse.sql") . <<'SQL');
CREATE TABLE deliveries (n bigserial, message_id uuid, payload jsonb, open_transactions int);
GRANT ALL ON deliveries, deliveries_n_seq TO shop_app;
CREATE OR REPLACE FUNCTION receive(message_id uuid, payload jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO deliveries (message_id, payload, open_transactions)
		SELECT receive.message_id, receive.payload, count(*) FROM pg_stat_activity
		WHERE datname = 'shop' AND usename = 'shop_app' AND xact_start IS NOT NULL;
	PERFORM pg_sleep(0.02);
	RETURN CASE WHEN payload ? 'bad' THEN 'refused' WHEN idem_once('warehouse', message_id::text) THEN 'applied'
		ELSE 'ignored' END;
END $$;
SQL

# publish(KEY, COUNT): a message that is refused, and COUNT messages that are
# not
sub publish
{
	my ($key, $count) = @_;

	$node->safe_psql('shop',
		"SELECT idem_publish('orders', jsonb_build_object('key', '$key', CASE n WHEN 0 THEN 'bad' ELSE 'good' END, n), '$key')
		 FROM generate_series(0, $count) AS n");
	return;
}

# Run the relay until nothing is pending.  It has one second for a batch; its
# patience is longer than any delivery here takes on a slow machine.
sub relay
{
	my ($title, $max_attempts) = @_;
	my $world = PostgreSQL::Test::Utils::tempdir;
	local %ENV = (%ENV, PGHOST => $node->host, PGPORT => $node->port, PGDATABASE => 'shop',
		LEASE => 121_000, PATIENCE => 120_000);

	$node->safe_psql('postgres',
		"ALTER DATABASE shop SET idempotency.outbox_max_attempts = $max_attempts");
	my $relay = IPC::Run::start([ "$examples/relay", 1, $world ], '<', \'', '>&', \my $output,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));

	ok( $node->poll_query_until('shop',
			"SELECT NOT EXISTS (SELECT FROM idem_outbox WHERE state = 'pending')"),
		"$title: all is answered");
	append_to_file("$world/closed", '');
	# It would wait for half a lease, a minute, before it looks for that file.
	$node->safe_psql('shop', "SELECT idem_publish('closing', '{}')");
	ok($relay->finish, "$title: the relay succeeds") or diag($output);
	$node->safe_psql('shop', "DELETE FROM idem_outbox WHERE topic = 'closing'");
	like(slurp_file("$world/relay.1"), qr/untried/, "$title: it had to give some back");
	return slurp_file("$world/relay.1");
}

publish("customer-$_", 20) foreach 1 .. 3;
my $notes = relay('one attempt', 1);
like($notes, qr/extended/, 'one attempt: it had to extend its lease');
is( $node->safe_psql('shop',
		"SELECT state, payload ? 'bad', last_error, count(*) FROM idem_outbox GROUP BY 1, 2, 3 ORDER BY 1, 2"),
	"acked|f||60\ndead|t|refused|3", 'one attempt: only what was tried and refused is dead');

# Those behind have used up more of their attempts than a head that was requeued.
publish('customer-4', 20);
$node->safe_psql('postgres', 'ALTER DATABASE shop SET idempotency.outbox_max_attempts = 3');
$node->safe_psql('shop', <<'SQL');
SELECT idem_outbox_nack(id, 'no', '0', attempt) FROM idem_outbox_take(1000);
SELECT idem_outbox_nack(id, 'no', '0', attempt) FROM idem_outbox_take(1);
SELECT idem_outbox_nack(id, 'no', '0', attempt) FROM idem_outbox_take(1);
SELECT idem_outbox_requeue(array_agg(id)) FROM idem_outbox WHERE payload ? 'bad' AND message_key = 'customer-4';
UPDATE idem_outbox SET attempt = 2 WHERE state = 'pending' AND payload ? 'good';
SQL
relay('after a requeue', 3);
is( $node->safe_psql('shop',
		"SELECT state, payload ? 'bad', last_error, count(*) FROM idem_outbox
		 WHERE message_key = 'customer-4' GROUP BY 1, 2, 3 ORDER BY 1, 2"),
	"acked|f|no|20\ndead|t|refused|1",
	'after a requeue: only what was tried and refused is dead, and no error is overwritten');

is( $node->safe_psql('warehouse', "SELECT sum(open_transactions) FROM deliveries"), '0',
	'the relay has no transaction open while it delivers');
is( $node->safe_psql('warehouse',
		"SELECT count(*) FROM (
			SELECT (payload -> 'good')::int AS nth, lag((payload -> 'good')::int) OVER (PARTITION BY payload -> 'key' ORDER BY n) AS previous
			FROM deliveries WHERE payload ? 'good') AS d
		 WHERE nth < previous"),
	'0', 'the relay delivers in order');

$node->stop;
done_testing();
