# Statistics have room for 64 databases.  Sets of dropped ones are given to
# others, one to each, however many sessions ask for it at once; and where there
# is no room, nothing is counted, nothing is judged, and nothing fails.

use Time::HiRes qw(sleep);
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('many', conf => 'idempotency.cleanup_interval = 0');
my $count = 'SELECT idem_try_advance(pg_backend_pid()::text, $$post$$, $$1$$, 1)';

$node->safe_psql('postgres', 'CREATE DATABASE template');
$node->safe_psql('template', 'CREATE EXTENSION idempotency');

# The counters of this database's sets, one per line.
sub counted
{
	my ($database) = @_;

	return $node->safe_psql($database,
		'SELECT advances + advances_stale FROM idem_stats WHERE datname = current_database()');
}

# The row of check "worker", by the strictest measure.
sub health
{
	my ($database) = @_;

	return split /\|/, $node->safe_psql($database,
		"SET idempotency.health_worker = '1ms'; SELECT status, value IS NULL, detail FROM idem_health() WHERE check_name = 'worker'");
}

# "template" has the first.
$node->safe_psql('template', $count);
foreach (2 .. 64)
{
	$node->safe_psql('postgres', 'CREATE DATABASE dropped TEMPLATE template');
	$node->safe_psql('dropped', $count);
	$node->safe_psql('postgres', 'DROP DATABASE dropped');
}
is($node->safe_psql('template', 'SELECT count(*) FROM idem_stats_data()'),
	'64', 'all sets are taken, most of them by databases that are gone');

# As if most of them were there.  It takes a session a while to find one that is
# not, and meanwhile others look, too.
$node->safe_psql('template', <<'SQL');
SET allow_system_table_mods = on;
INSERT INTO pg_database
SELECT (jsonb_populate_record(d, jsonb_build_object('oid', g.datid, 'datname', 'gone' || g.datid, 'datallowconn', false))).*
FROM pg_database AS d, (SELECT datid FROM idem_stats_data() EXCEPT SELECT oid FROM pg_database ORDER BY datid LIMIT 60) AS g
WHERE d.datname = 'template';
SQL

#
# The first calls of a new database, all at once
#

# Other slow work is done before.
my $first_call = <<'SQL';
SELECT idem_is_active('user', 'post', '1', 'like');
SELECT pg_advisory_lock_shared(1), idem_try_advance(pg_backend_pid()::text, 'post', '1', 1);
SQL

foreach my $round (1 .. 10)
{
	$node->safe_psql('postgres', 'CREATE DATABASE fresh TEMPLATE template');
	my $barrier = session($node, 'fresh');
	$barrier->run('SELECT pg_advisory_lock(1)');
	my $load = start_pgbench($node, 'fresh',
		{ first_call => $first_call },
		'-c', '24', '-t', '1');
	$node->poll_query_until('postgres',
		"SELECT count(*) = 24 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
	  or die 'not all sessions are there';
	$barrier->run('SELECT pg_advisory_unlock(1)');
	is(finish_pgbench($load), 24, "one-set-each: first calls at once, round $round");
	is(counted('fresh'), '24', "one-set-each: with all that was counted, round $round");
	my @samples = $node->safe_psql('fresh', 'SELECT idem_metrics()') =~ /^(idempotency_advances_total.*)$/mg;
	is(scalar @samples, 2, "one-set-each: metrics have each outcome once, round $round");
	is((health('fresh'))[0], 'ok', "one-set-each: idem_health works, round $round");
	$barrier->quit;
	$node->safe_psql('postgres', 'DROP DATABASE fresh');
}

#
# No room
#

# These take the last three.
foreach my $name ('a', 'b', 'c')
{
	$node->safe_psql('postgres', "CREATE DATABASE $name TEMPLATE template");
	$node->safe_psql($name, $count);
	is(counted($name), '1', "room for $name");
}
$node->safe_psql('postgres', 'CREATE DATABASE late TEMPLATE template');
my $session = session($node, 'late');
is($session->run($count), '(t,1)', 'no-room: a call does what it should');
is(counted('late'), '', 'no-room: for one more, which is not counted');
is(join("\n", $node->safe_psql('late', 'SELECT idem_metrics()') =~ /^idempotency_.*_total\{.*/mg), '',
	'no-room: metrics have no counters, which could not count');

# Not even where a worker should come.
$node->safe_psql('postgres', $_) foreach
  "ALTER SYSTEM SET idempotency.databases = 'late'",
  "ALTER SYSTEM SET idempotency.cleanup_interval = '1s'",
  'SELECT pg_reload_conf()';
$node->poll_query_until('late', "SELECT current_setting('idempotency.databases') = 'late'")
  or die 'no reload';
is_deeply([ health('late') ],
	[ 'ok', 't', 'not judged, because there is no space for the statistics of this database' ],
	'no-room: the worker is not judged');

# The session that found no free entry keeps looking for one.
$node->safe_psql('postgres', 'DROP DATABASE b');
ok($node->poll_query_until('late', q{SELECT count(*) = 1 FROM idem_stats WHERE datname = current_database()}),
	'room-again: as soon as a database is gone');
foreach (1 .. 600)
{
	$session->run($count);
	last if counted('late') > 0;
	sleep(0.1);
}
cmp_ok(counted('late'), '>', 0, 'room-again: a session that was there before counts, too');
my ($status, $unknown) = health('late');
is($unknown, 'f', 'room-again: and the worker is judged');
$session->quit;

$node->stop;

done_testing();
