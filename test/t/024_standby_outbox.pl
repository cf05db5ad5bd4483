# Hot standby: idem_last_client_seq works there, the other functions of client
# sequences, once-only tokens and the outbox raise 25006. After promotion,
# everything continues from the same state.

use IdempotencyTest;

my $primary = new_node('primary', allows_streaming => 1);
my $standby = new_standby($primary);

$primary->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
SELECT * FROM idem_try_append('cart', 'phone', 1, 5);
SELECT idem_once('form', 'used');
SELECT idem_publish('orders', to_jsonb(n), 'key') FROM generate_series(1, 3) AS n;
SELECT count(*) FROM idem_outbox_take(1, '1 hour');
SET idempotency.outbox_max_attempts = 1;
SELECT idem_publish('dead', '"dead"');
SELECT idem_outbox_nack(id) FROM idem_outbox_take(1, '1 hour', '{dead}');
SQL
$primary->wait_for_catchup($standby);

my $reader = session($standby);
my $last_seqs = "SELECT idem_last_client_seq('cart', 'phone'), idem_last_client_seq('cart', 'laptop')";

is($reader->run($last_seqs), '5|0', 'idem_last_client_seq answers');
is($reader->run("BEGIN ISOLATION LEVEL REPEATABLE READ; $last_seqs; COMMIT"), '5|0',
	'under REPEATABLE READ, too');

# Also if there is nothing to do.
foreach my $call (
	"idem_try_append('cart', 'phone', 6)",
	"idem_try_append('cart', 'phone', 5)",
	"idem_try_append('cart', 'phone', 9, allow_gaps => false)",
	"idem_once('form', 'new')",
	"idem_once('form', 'used')",
	"idem_once_many('form', ARRAY['used'])",
	"idem_once_many('form', '{}'::text[])",
	"idem_publish('orders', '4')",
	"idem_publish_many('{orders}', '{4}')",
	"idem_outbox_take()",
	"idem_outbox_take(1, '1 s', '{nothing there}')",
	"idem_outbox_ack('{1}')",
	"idem_outbox_ack('{}')",
	"idem_outbox_nack(1)",
	"idem_outbox_requeue()",
	"idem_outbox_requeue('{}')",
	"idem_outbox_extend('{1}')",
	"idem_outbox_release('{1}')")
{
	is(sqlstate_of($standby, "SELECT * FROM $call"), '25006', "25006: $call");
}

# A reader sees what has been replayed, statement by statement.
$primary->safe_psql('postgres', "SELECT idem_try_append('cart', 'phone', 6)");
$primary->wait_for_catchup($standby);
is($reader->run($last_seqs), '6|0', 'the standby follows the primary');

#
# Promotion
#

my $max_id = $primary->safe_psql('postgres', 'SELECT last_value FROM idem_outbox_ids');

$primary->stop('immediate');
$standby->promote;

is( $reader->run(
		"SELECT * FROM idem_try_append('cart', 'phone', 6);
		 SELECT * FROM idem_try_append('cart', 'phone', 7, expected_version => 6)"),
	"duplicate|6|6\nappended|7|7", 'promoted: client sequences go on');
is($reader->run("SELECT idem_once('form', 'used'), idem_once('form', 'new')"), 'f|t',
	'promoted: tokens are remembered');
is($reader->run('SELECT payload FROM idem_outbox_take()'), '',
	'promoted: a leased message holds its key');
is( $reader->run(
		"SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE attempt = 1 AND topic = 'orders';
		 SELECT payload, attempt FROM idem_outbox_take()"),
	"1\n2|1\n3|1", 'promoted: until it is acknowledged');
is( $reader->run("SELECT idem_outbox_requeue(); SELECT payload FROM idem_outbox_take()"),
	"1\n\"dead\"", 'promoted: dead messages are put back');
is( $reader->run(
		"SELECT idem_publish('orders', '4', 'key') IS NOT NULL;
		 SELECT id > $max_id FROM idem_outbox WHERE payload = '4'"),
	"t\nt", 'promoted: ids keep increasing');

$reader->quit;
$standby->stop;
done_testing();
