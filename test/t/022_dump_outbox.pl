# pg_dump and restore of client sequences, once-only tokens and the outbox:
# everything continues from the same state.

use IdempotencyTest;
use Records;

my $node = new_node('dump');
my $dumps = $node->basedir;

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

	is($node->safe_psql($database, $streams->{answers}), $node->safe_psql('source', $streams->{answers}),
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
			 SELECT * FROM idem_once_many('inbox', ARRAY['m3', E'tab\\t\\\\.', 'm1'])"),
		"f|t|t\nm3", "$title: tokens are remembered");

	# Outbox
	is($node->safe_psql($database, $streams->{brief}), $streams->{expected}, "$title: what is due is handed out");
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
		"1\n\"dead\"|2|t", "$title: a dead message is put back");
	is( $node->safe_psql($database,
			"SELECT idem_publish('new', '\"new\"') IS NOT NULL;
			 SELECT count(*) FROM idem_outbox WHERE topic = 'new' AND id > $max_id"),
		"t\n1", "$title: ids keep increasing");
	return;
}

create_database('source');
$node->safe_psql('source', "CREATE EXTENSION idempotency; $streams->{fill}");
is($node->safe_psql('source', $streams->{brief}), $streams->{expected}, 'before');

# What is not committed is not in the dump.
my $open = session($node, 'source');
$open->run(
	"BEGIN;
	 SELECT idem_publish('free', '\"uncommitted\"', E'key\\t\\\\');
	 SELECT idem_once('form', 'never');
	 SELECT idem_try_append('cart 1', 'phone', 6)");
foreach my $dump ([ 'script', '-Fp' ], [ 'archive', '-Fc' ], [ 'directory', '-Fd', '-j2' ],
	[ 'data', '--data-only' ])
{
	my ($name, @options) = @$dump;

	$node->command_ok(
		[ 'pg_dump', @options, '-f', "$dumps/$name", $node->connstr('source') ],
		"dump as $name (@options)");
}
$open->run('ROLLBACK');
$open->quit;

# Restore a dump with this command into a database.
sub restored_ok
{
	my ($title, $database, @command) = @_;

	$node->command_ok([ @command, '-d', $node->connstr($database) ],
		"$title restored without an error");
	check_restored($title, $database);
	return;
}

my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f');
my @pg_restore = ('pg_restore', '--exit-on-error');

create_database("from_$_") foreach 'script', 'archive', 'directory', 'data';
$node->safe_psql('from_data', 'CREATE EXTENSION idempotency');
restored_ok('script', 'from_script', @psql, "$dumps/script");
restored_ok('archive', 'from_archive', @pg_restore, '-j2', "$dumps/archive");
restored_ok('directory', 'from_directory', @pg_restore, '-j2', "$dumps/directory");
restored_ok('data only, into a new install', 'from_data', @psql, "$dumps/data");

# check_restored has used that database, so that it is not empty.
restored_ok('archive in place of what is there', 'from_archive', @pg_restore,
	'--clean', '--if-exists', "$dumps/archive");

$node->stop;
done_testing();
