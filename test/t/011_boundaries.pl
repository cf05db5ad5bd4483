# A lease, ttl or pause ends at its exact instant, not a microsecond earlier or
# later. The server's clock stands still at a time that the test sets.

use IdempotencyTest;

my $now = 1_800_000_000;

my $node = new_node('boundaries', start => 0, conf => <<'CONF');
idempotency.cleanup_interval = 0
idempotency.outbox_retention = 10s
CONF
start_with_clock($node, "=$now");
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

# Records that were started with ten seconds, read just before these are over,
# and when they are.
sub ends
{
	my ($title, $start, $ask, $before, $after) = @_;

	$node->safe_psql('postgres', $start);
	set_clock(sprintf '=%.6f', $now + 10 - 0.000001);
	is($node->safe_psql('postgres', $ask), $before, "$title: a microsecond before its end");
	$now += 10;
	set_clock("=$now");
	is($node->safe_psql('postgres', $ask), $after, "$title: at its end");
	return;
}

my $claim = "SELECT outcome, attempt FROM idem_claim('edge', '%s-key-00000000'%s)";

ends('a record', sprintf($claim, 'expiring', ", ttl => '10 s'"),
	sprintf($claim, 'expiring', ''), 'in_progress|', 'new|1');
ends('a record, for who reads it', sprintf($claim, 'looked-at', ", ttl => '10 s'"),
	"SELECT state FROM idem_lookup('edge', 'looked-at-key-00000000')", 'started', '');
ends('a lease', sprintf($claim, 'leased', ", lease => '10 s'"),
	sprintf($claim, 'leased', ''), 'in_progress|', 'new|2');

my $heartbeat = <<'SQL';
DO $$
BEGIN
	PERFORM idem_heartbeat('edge', 'held-key-00000000',
		claim_token => (SELECT claim_token FROM idem_keys WHERE key = 'held-key-00000000'));
EXCEPTION WHEN SQLSTATE 'ID004' THEN
	CREATE TABLE refused ();
END
$$;
SELECT to_regclass('refused')
SQL
ends('a claim', sprintf($claim, 'held', ", ttl => '10 s'"), $heartbeat, '', 'refused');

$node->safe_psql('postgres', "ALTER DATABASE postgres SET idempotency.expired_key_policy = 'reject'");
$node->safe_psql('postgres', "ALTER DATABASE postgres SET idempotency.tombstone_retention = '10s'");
ends('a tombstone', sprintf($claim, 'buried', ", ttl => '0'"), sprintf($claim, 'buried', ''), 'expired|', 'new|1');
ends('a tombstone, for the cleanup', sprintf($claim, 'cleaned', ", ttl => '0'"),
	"SELECT keys_deleted FROM idem_cleanup(); SELECT count(*) FROM idem_keys WHERE key LIKE 'cleaned%'",
	"2\n1", "1\n0");
$node->safe_psql('postgres', 'ALTER DATABASE postgres RESET ALL');

ends('a token', "SELECT idem_once('edge', 'token', '10 s')", "SELECT idem_once('edge', 'token')", 'f', 't');

my $take = "SELECT topic FROM idem_outbox_take(1, '10 s')";
ends('the delay of a message', "SELECT idem_publish('free', '1', deliver_after => '10 s')", $take, '', 'free');
ends('the lease of a message', '', $take, '', 'free');
$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
ends('the retention of a message', '', 'SELECT messages_deleted FROM idem_cleanup()', '0', '1');
ends('the delay of a message with a key', "SELECT idem_publish('keyed', '1', 'key', deliver_after => '10 s')", $take, '', 'keyed');
ends('the lease of a message with a key', '', $take, '', 'keyed');

done_testing();
