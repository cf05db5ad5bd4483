# pg_dump and restore of client sequences, once-only tokens and the outbox:
# everything goes on afterwards where it was.

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

my $node = new_node('dump');
my $dumps = $node->basedir;

# One message in each state, a key whose head is leased, a key that is due; text
# that a dump could spoil.  The highest id belongs to no message.
my $fill = <<'SQL';
SELECT * FROM idem_try_append('cart 1', 'phone', 1, 5);
SELECT * FROM idem_try_append('cart 1', 'laptop', 1);
SELECT * FROM idem_try_append(E'cart\t2 \\ "x"', 'phone', 7);
SELECT idem_once('form', 'used');
SELECT idem_once('form', 'expired', ttl => '0');
SELECT count(*) FROM idem_once('inbox', ARRAY['m1', 'm2', E'tab\t\\.']);

SET idempotency.outbox_max_attempts = 1;
SELECT idem_publish('dead', '"dead"') IS NOT NULL;
SELECT idem_outbox_nack(id, E'no\tsuch \\ host\n', attempt => attempt) FROM idem_outbox_take(1, '1 hour', '{dead}');
RESET idempotency.outbox_max_attempts;
SELECT idem_publish('acked', '"acked"') IS NOT NULL;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1, '1 hour', '{acked}');
SELECT idem_publish('leased', '"leased"') IS NOT NULL;
SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{leased}');
SELECT idem_publish('abandoned', '"abandoned"', headers => '{"a": [1.50, "\u00e9"]}') IS NOT NULL;
SELECT count(*) FROM idem_outbox_take(1, '0', '{abandoned}');
SELECT idem_publish('pausing', '"pausing"') IS NOT NULL;
SELECT idem_outbox_nack(id, 'busy', '1 hour') FROM idem_outbox_take(1, '1 hour', '{pausing}');
SELECT idem_publish('delayed', '"delayed"', deliver_after => '1 hour') IS NOT NULL;
SELECT idem_publish('pending', '"pending"') IS NOT NULL;

SELECT idem_publish('held', to_jsonb(n), 'k') IS NOT NULL FROM generate_series(1, 4) AS n;
SELECT count(*) FROM idem_outbox_take(2, '1 hour', '{held}');
SELECT idem_publish('free', to_jsonb(n), E'key\t\\') IS NOT NULL FROM generate_series(1, 3) AS n;

BEGIN;
SELECT idem_publish('free', '"never"', E'key\t\\') IS NOT NULL;
SELECT idem_once('form', 'never');
ROLLBACK;
SQL

# All the rows, and everything a caller can be told.  The calls are rolled
# back, so that the rows stay as they are.
my $answers = <<'SQL';
SET timezone = 'UTC';
SELECT * FROM idem_outbox ORDER BY id;
SELECT * FROM idem_tokens ORDER BY scope, token;
SELECT * FROM idem_aggregates ORDER BY aggregate;
SELECT *, idem_last_client_seq(aggregate, client_id) FROM idem_client_sequences ORDER BY aggregate, client_id;
SELECT last_value, is_called FROM idem_outbox_ids;
BEGIN;
SELECT * FROM idem_outbox_take() ORDER BY id;
SELECT idem_outbox_requeue();
SELECT * FROM idem_outbox_take() ORDER BY id;
ROLLBACK;
SQL

# The answers must be the right ones, not only the same ones.
my $taken = <<'SQL';
BEGIN;
SELECT topic, payload, headers, attempt FROM idem_outbox_take() ORDER BY id;
ROLLBACK;
SELECT state, count(*) FROM idem_outbox GROUP BY state ORDER BY state;
SQL
my $expected_taken = <<'TAKEN';
abandoned|"abandoned"|{"a": [1.50, "é"]}|2
pending|"pending"||1
free|1||1
free|2||1
free|3||1
acked|1
dead|1
pending|12
TAKEN
chomp $expected_taken;

sub create_database
{
	my ($database) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $database TEMPLATE template0");
	return;
}

# All the tests of one restored database.
sub check_restored
{
	my ($title, $database) = @_;
	my $max_id = $node->safe_psql('source', 'SELECT last_value FROM idem_outbox_ids');

	is($node->safe_psql($database, $answers), $node->safe_psql('source', $answers),
		"$title: everything answers the same");

	# Client sequences
	is( $node->safe_psql($database,
			"SELECT * FROM idem_try_append('cart 1', 'phone', 4, 2);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 4, 4);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 6, expected_version => 5);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 7, allow_gaps => false);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 6, expected_version => 6);
			 SELECT * FROM idem_try_append(E'cart\\t2 \\\\ \"x\"', 'phone', 7)"),
		"duplicate|5|6\noverlap|5|6\nversion_conflict|5|6\ngap|5|6\nappended|6|7\nduplicate|7|1",
		"$title: client sequences go on");

	# Tokens
	is( $node->safe_psql($database,
			"SELECT idem_once('form', 'used'), idem_once('form', 'expired'), idem_once('form', 'never');
			 SELECT * FROM idem_once('inbox', ARRAY['m3', E'tab\\t\\\\.', 'm1'])"),
		"f|t|t\nm3", "$title: tokens are remembered");

	# Outbox
	is($node->safe_psql($database, $taken), $expected_taken, "$title: what is due is handed out");
	is( $node->safe_psql($database,
			"SELECT count(*) FROM idem_outbox_take(100, '1 hour', '{free}');
			 SELECT idem_publish('free', '4', E'key\\t\\\\') IS NOT NULL;
			 SELECT count(*) FROM idem_outbox_take(100, '1 hour', '{free}');
			 SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'free' AND payload < '4';
			 SELECT payload, id > $max_id FROM idem_outbox_take(100, '1 hour', '{free}')"),
		"3\nt\n0\n3\n4|t",
		"$title: a new message queues behind the restored ones of its key, with a higher id");
	is( $node->safe_psql($database,
			"SELECT count(*) FROM idem_outbox_take(100, '1 hour', '{held}');
			 SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'held' AND attempt = 1;
			 SELECT payload, attempt FROM idem_outbox_take(100, '1 hour', '{held}')"),
		"0\n2\n3|1\n4|1", "$title: a leased head holds its key until it is acknowledged");
	is( $node->safe_psql($database,
			"SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'leased'"),
		'1', "$title: a leased message is acknowledged by the relay that has it");
	is( $node->safe_psql($database,
			"SELECT idem_outbox_requeue();
			 SELECT payload, attempt, message_id = (SELECT message_id FROM idem_outbox AS o WHERE o.id = t.id)
			 FROM idem_outbox_take(1, '1 hour', '{dead}') AS t"),
		"1\n\"dead\"|1|t", "$title: a dead message is put back");
	is( $node->safe_psql($database,
			"SELECT idem_publish('new', '\"new\"') IS NOT NULL;
			 SELECT count(*) FROM idem_outbox WHERE topic = 'new' AND id > $max_id"),
		"t\n1", "$title: ids keep increasing");
	return;
}

create_database('source');
$node->safe_psql('source', "CREATE EXTENSION idempotency; $fill");
is($node->safe_psql('source', $taken), $expected_taken, 'before');

# What is not committed is not in the dump.
my $open = session($node, 'source');
$open->run(
	"BEGIN;
	 SELECT idem_publish('free', '\"uncommitted\"', E'key\\t\\\\');
	 SELECT idem_once('form', 'never');
	 SELECT idem_try_append('cart 1', 'phone', 6)");
$node->command_ok([ 'pg_dump', '-f', "$dumps/script", $node->connstr('source') ],
	'dump as a script');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dumps/archive", $node->connstr('source') ],
	'dump as an archive');
$open->run('ROLLBACK');
$open->quit;

create_database('from_script');
$node->command_ok(
	[
		'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d',
		$node->connstr('from_script'), '-f', "$dumps/script"
	],
	'script restored without an error');
check_restored('script', 'from_script');

create_database('from_archive');
$node->command_ok(
	[
		'pg_restore', '--exit-on-error', '-j2', '-d',
		$node->connstr('from_archive'), "$dumps/archive"
	],
	'archive restored without an error');
check_restored('archive', 'from_archive');

$node->stop;
done_testing();
