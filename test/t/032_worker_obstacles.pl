# If a worker cannot do something, it reports the reason once, changes nothing,
# and does it when the obstacle is gone. Other databases are not affected.

use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

# The table of workers has room for the launcher, the one for logical
# replication, and one more.
my $node = new_node('obstacles', conf => <<'CONF');
idempotency.cleanup_interval = 0
max_worker_processes = 3
log_line_prefix = '%m [%p] %b %e '
CONF

my $expire = "SELECT idem_once('form', 'expired', ttl => '0')";
my $cleaned = 'SELECT count(*) = 0 FROM idem_tokens';
my $not_cleaned = 'SELECT count(*) = 1 FROM idem_tokens';

# The matches in the log from this offset on.
sub in_log
{
	my ($pattern, $offset) = @_;
	my @found = slurp_file($node->logfile, $offset) =~ /$pattern/g;

	return \@found;
}

# With an interval of an hour there is one pass now, and no other.
sub one_pass
{
	configure($node, 'idempotency.cleanup_interval' => '1h');
	return;
}

# With a second, as many as it takes.
sub passes
{
	configure($node, 'idempotency.cleanup_interval' => '1s');
	return;
}

# No pass, and none under way.
sub no_passes
{
	configure($node, 'idempotency.cleanup_interval' => 0);
	$node->poll_query_until('postgres', <<'SQL') or die 'the launcher does not rest';
SELECT wait_event = 'Extension' FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'
SQL
	return;
}

foreach my $database ('one', 'two', 'three')
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql($database, 'CREATE EXTENSION idempotency');
}

#
# Full table of workers
#

# A parallel query whose worker sleeps takes the last place.
my $parallel = $node->pg_version >= 16 ? 'debug_parallel_query' : 'force_parallel_mode';
my $occupant = session($node);
$occupant->run("SET $parallel = on");
$occupant->send('SELECT pg_sleep(600)');
$node->poll_query_until('postgres',
	"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'parallel worker' AND wait_event = 'PgSleep')")
  or die 'no parallel worker';

$node->safe_psql($_, $expire) foreach 'one', 'two', 'three';
my $message = qr/LOG:  could not start a cleanup worker of extension "idempotency"/;
my $offset = -s $node->logfile;
one_pass();
$node->wait_for_log($message, $offset);
no_passes();
is(scalar @{ in_log($message, $offset) }, 1, 'full-worker-table: one line in the log at each interval');
is(scalar @{ in_log(qr/idempotency launcher 53400 $message/, $offset) },
	1, 'full-worker-table: with its SQLSTATE');
like(slurp_file($node->logfile, $offset), qr/HINT:  .*max_worker_processes/,
	'full-worker-table: and a hint');
is($node->safe_psql($_, $not_cleaned), 't', "full-worker-table: nothing is deleted in $_")
  foreach 'one', 'two', 'three';

# The same launcher continues when there is space again.
my $launcher = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'";
my $pid = $node->safe_psql('postgres', $launcher);
$node->safe_psql('postgres', 'SELECT pg_cancel_backend(' . $occupant->pid . ')');
is($occupant->result, 'ERROR 57014', 'a place is free again');
$occupant->quit;
$offset = -s $node->logfile;
one_pass();
eventually($node, $_, $cleaned, "full-worker-table: $_ is cleaned when there is room again")
  foreach 'one', 'two', 'three';
is($node->safe_psql('postgres', $launcher), $pid, 'full-worker-table: by the same launcher');
is_deeply(in_log($message, $offset), [], 'full-worker-table: and nothing is logged any more');

#
# Databases that cannot be connected to
#

no_passes();
$node->safe_psql($_, $expire) foreach 'one', 'two', 'three';
$node->safe_psql('postgres', <<'SQL');
ALTER DATABASE one ALLOW_CONNECTIONS false;
-- What a DROP DATABASE that was interrupted leaves behind.
UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'two';
SQL
$offset = -s $node->logfile;
passes();
eventually($node, 'three', $cleaned, 'no-connections-allowed: other databases are cleaned');
$node->safe_psql('three', $expire);
eventually($node, 'three', $cleaned, 'no-connections-allowed: again');
no_passes();
is_deeply(in_log(qr/(?:ERROR|FATAL): .*not currently accepting connections.*/, $offset),
	[], 'no-connections-allowed: the database is skipped without a word');
is_deeply(in_log(qr/(?:ERROR|FATAL): .*invalid database.*/, $offset),
	[], 'invalid-database: it is skipped without a word');
$node->safe_psql('postgres', <<'SQL');
ALTER DATABASE one ALLOW_CONNECTIONS true;
UPDATE pg_database SET datconnlimit = -1 WHERE datname = 'two';
SQL
is($node->safe_psql($_, $not_cleaned), 't', "no-connections-allowed: nothing was deleted in $_")
  foreach 'one', 'two';
one_pass();
eventually($node, $_, $cleaned, "no-connections-allowed: $_ is cleaned when they are") foreach 'one', 'two';

# A limit for others is none for the worker.
no_passes();
$node->safe_psql('one', $expire);
$node->safe_psql('postgres', 'ALTER DATABASE one CONNECTION LIMIT 0');
one_pass();
eventually($node, 'one', $cleaned, 'connection-limit: the worker needs none of the connections');

# A database that somebody holds, here for a change of name that is not
# committed, lets no worker in; that must not hold up the others.
no_passes();
$node->safe_psql($_, $expire) foreach 'one', 'three';
my $holder = session($node);
$holder->run('BEGIN; ALTER DATABASE one RENAME TO renamed');
$offset = -s $node->logfile;
passes();
eventually($node, 'three', $cleaned, 'locked-database: other databases are cleaned');
$node->safe_psql('three', $expire);
eventually($node, 'three', $cleaned, 'locked-database: again, so in every pass');
like(slurp_file($node->logfile, $offset),
	qr/idempotency launcher 55000 LOG:  a cleanup worker of extension "idempotency" could not connect to database "one"/,
	'locked-database: the log says which');
is_deeply(in_log(qr/(?:ERROR|FATAL): .*/, $offset), [], 'locked-database: that is no error');
$holder->run('ROLLBACK');
$holder->quit;
eventually($node, 'one', $cleaned, 'locked-database: and this one afterwards');

#
# An altered table
#

no_passes();
$node->safe_psql('one', "$expire; " . <<'SQL');
CREATE TABLE trigger_runs (at timestamptz DEFAULT now());
CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO trigger_runs DEFAULT VALUES;
	RETURN old;
END
$$;
CREATE TRIGGER spy BEFORE DELETE ON idem_tokens FOR EACH ROW EXECUTE FUNCTION spy();
SET idempotency.default_ttl = 0;
SELECT outcome FROM idem_claim('shop', 'expired-key-00001');
SELECT idem_publish('mails', '{}');
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take();
UPDATE idem_outbox SET acked_at = acked_at - '8 days'::interval;
SELECT idem_stats_reset();
SQL
$node->safe_psql('two', $expire);
$offset = -s $node->logfile;
one_pass();
$node->wait_for_log(qr/idempotency cleanup 55000 ERROR:  table "idem_tokens" has been altered/, $offset);
like(slurp_file($node->logfile, $offset), qr/idempotency cleanup 55000 HINT:  .*DROP TRIGGER/,
	'altered-table-is-refused: with a hint');
like(slurp_file($node->logfile, $offset),
	qr/idempotency cleanup 55000 CONTEXT:  cleanup of expired tokens in database "one"/,
	'altered-table-is-refused: and the database');
eventually($node, 'one', 'SELECT (SELECT count(*) FROM idem_keys) + (SELECT count(*) FROM idem_outbox) = 0',
	'altered-table-is-refused: the other tables are cleaned');
is( $node->safe_psql('one', 'SELECT cleanup_passes, last_cleanup FROM idem_stats WHERE datname = current_database()'),
	'0|', 'altered-table-is-refused: that is no complete pass');
eventually($node, 'two', $cleaned, 'altered-table-is-refused: other databases are cleaned');
is($node->safe_psql('one', $not_cleaned), 't', 'altered-table-is-refused: nothing is deleted');
is($node->safe_psql('one', 'SELECT count(*) FROM trigger_runs'), '0',
	'no-trigger-with-rights-of-worker');

# With more to delete in other tables than one visit can, there are more visits
# than one, and still one message.
no_passes();
configure($node, 'idempotency.cleanup_batch_size' => 1);
$node->safe_psql('one', "SELECT count(*) FROM generate_series(1, 100000) AS n, idem_claim('shop', 'expired-key-' || n + 100000, ttl => '0')");
$offset = -s $node->logfile;
one_pass();
my $worker = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency cleanup' AND datname = 'one'";
my %workers;
until ($node->safe_psql('one', 'SELECT count(*) FROM idem_keys') eq '0')
{
	$workers{$_} = 1 foreach split /\n/, $node->safe_psql('postgres', $worker);
}
cmp_ok(scalar keys %workers, '>', 1, 'altered-table-is-logged-once: several visits');
is(scalar @{ in_log(qr/ERROR: .*/, $offset) }, 1, 'altered-table-is-logged-once: in an interval');
configure($node, 'idempotency.cleanup_batch_size' => 10000);

# Anybody's DROP DATABASE wakes all processes.  That begins no interval.
sub passes_in_two
{
	return $node->safe_psql('two', 'SELECT cleanup_passes FROM idem_stats WHERE datname = current_database()');
}

no_passes();
$offset = -s $node->logfile;
my $before = passes_in_two();
one_pass();
$node->poll_query_until('two', "SELECT cleanup_passes > $before FROM idem_stats WHERE datname = current_database()")
  or die 'no pass';
$node->wait_for_log(qr/ERROR:  table "idem_tokens" has been altered/, $offset);
foreach (1 .. 4)
{
	$node->safe_psql('postgres', 'CREATE DATABASE short_lived');
	$node->safe_psql('postgres', 'DROP DATABASE short_lived');
}
no_passes();
is(passes_in_two(), $before + 1, 'latch-begins-no-pass: one in an interval');
is(scalar @{ in_log(qr/ERROR: .*/, $offset) }, 1, 'latch-begins-no-pass: nor is a failed table tried again');
one_pass();

$node->safe_psql('one', 'DROP TRIGGER spy ON idem_tokens');
$offset = -s $node->logfile;
$node->reload;
eventually($node, 'one', $cleaned, 'altered-table-is-refused: cleaned when it is as it was');
is_deeply(in_log(qr/ERROR: .*/, $offset), [], 'altered-table-is-refused: and no more errors');

#
# Code of other roles
#

# An index may call anybody's function.  It must not run with the worker's
# rights, who is a superuser, but with those of the table's owner.
no_passes();
$node->safe_psql('two', <<'SQL');
CREATE ROLE keeper;
CREATE ROLE author;
CREATE SCHEMA lent AUTHORIZATION author;
GRANT USAGE ON SCHEMA lent TO PUBLIC;
SET ROLE author;
CREATE FUNCTION lent.spy(topic text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	IF current_setting('application_name') = '' THEN
		RAISE LOG 'the index function runs as %', current_user;
		PERFORM set_config('role', session_user, false);
	END IF;
	RETURN topic;
EXCEPTION WHEN OTHERS THEN
	RAISE LOG 'the index function is refused: %', SQLERRM;
	RETURN topic;
END
$$;
RESET ROLE;
CREATE INDEX ON idem_outbox (lent.spy(topic));
ALTER TABLE idem_outbox OWNER TO keeper;
SQL
# An acknowledged message that stands for a message behind it, which was not
# committed when it was acknowledged: its deletion writes to that one.
$node->safe_psql('two', "SELECT idem_publish('spied', '1', 'key')");
my $publisher = session($node, 'two');
my $id = $node->safe_psql('two', 'SELECT id FROM idem_outbox_take()');
$publisher->run("BEGIN; SELECT idem_publish('spied', '2', 'key')");
$node->safe_psql('two', "SELECT idem_outbox_ack('{$id}')");
$publisher->run('COMMIT');
$publisher->quit;
$node->safe_psql('two', "UPDATE idem_outbox SET acked_at = acked_at - '8 days'::interval");
$offset = -s $node->logfile;
one_pass();
eventually($node, 'two', "SELECT count(*) = 0 FROM idem_outbox WHERE state = 'acked'",
	'index-function: the message is deleted');
like(slurp_file($node->logfile, $offset), qr/the index function runs as keeper/,
	'index-function: it runs with the rights of the table\'s owner');
like(slurp_file($node->logfile, $offset), qr/the index function is refused: cannot set parameter "role" within security-restricted operation/,
	'index-function: and cannot get others');

$node->stop;

done_testing();
