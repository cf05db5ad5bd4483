
# Work that outlives its client: a resume with wait sleeps until a claim fails or
# a lease ends; claims survive crashes of their holders and of the server, and
# each is completed once; a dump brings them along.

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

my $node = new_node('resume', conf => <<'CONF');
shared_preload_libraries = 'idempotency'
idempotency.cleanup_interval = 0
idempotency.max_attempts = 1000000
max_prepared_transactions = 10
restart_after_crash = on
CONF

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

my ($other, $worker) = map { session($node) } 1 .. 2;

# claim(NAME, OPTIONS): a claim that stores its name as the request
sub claim
{
	my ($name, $options) = @_;

	return "SELECT count(*) FROM idem_claim('shop', 'key-of-resumed-$name', request => '\"$name\"'" . ($options ? ", $options" : '') . ')';
}

sub fail_claim
{
	my ($name) = @_;

	return "SELECT count(idem_fail(scope, key, claim_token => claim_token)) FROM idem_keys WHERE key = 'key-of-resumed-$name'";
}

sub resume
{
	my ($options) = @_;

	return "SELECT request #>> '{}' FROM idem_resume(wait => '5 minutes'" . ($options ? ", $options" : '') . ')';
}

# wakes(TITLE, NAME, SQL ...): a worker sleeps, these statements follow, and it has
# the claim of that name.
sub wakes
{
	my ($title, $name, @statements) = @_;

	$worker->send(resume());
	asleep($node, $worker);
	$other->run($_) foreach @statements;
	is($worker->result, $name, $title);
	$node->safe_psql('postgres', 'DELETE FROM idem_keys');
	return;
}

#
# Waiting
#
$other->run(claim('a'));
wakes('failed', 'a', fail_claim('a'));
$other->run(claim('a'));
wakes('failed in a transaction', 'a', 'BEGIN', fail_claim('a'), 'COMMIT');
$other->run(claim('a') . ';' . claim('b'));
wakes('after one that was rolled back', 'b', 'BEGIN', fail_claim('a'), 'ROLLBACK', fail_claim('b'));
$other->run(claim('a'));
wakes('failed in a prepared transaction', 'a', 'BEGIN', fail_claim('a'), "PREPARE TRANSACTION 'a'", "COMMIT PREPARED 'a'");
wakes('a lease of less than a second has ended', 'a', claim('a', "lease => '0.3 s'"));
wakes('a lease of more than a second has ended', 'a', claim('a', "lease => '1.5 s'"));
$other->run(claim('a', "lease => '0'"));
$other->run('BEGIN; SELECT count(*) FROM idem_resume()');
wakes('a resume was rolled back', 'a', 'ROLLBACK');

$other->run(claim('a') . ';' . claim('b') . "; SELECT count(*) FROM idem_claim('shop', 'key-without-request')");
$worker->send(resume("scopes => '{shop}'"));
asleep($node, $worker);
is(locks_of($node, $worker), 0, 'a worker that sleeps holds no lock');
$other->run("SELECT count(idem_fail(scope, key, claim_token => claim_token)) FROM idem_keys WHERE key = 'key-without-request'");
$other->run("SELECT count(idem_complete(scope, key, 200, claim_token => claim_token)) FROM idem_keys WHERE key = 'key-of-resumed-b'");
$other->run("SELECT count(*) FROM idem_claim('bank', 'key-of-resumed-c', lease => '0', request => '\"c\"')");
asleep($node, $worker);
pass('it does not return for claims that it cannot resume');
$other->run(fail_claim('a'));
is($worker->result, 'a', 'and returns for one that it can');
$node->safe_psql('postgres', 'DELETE FROM idem_keys');

# A worker looks once a second by itself; a wake-up is faster.
cmp_ok(median_seconds(11,
		sub {
			$other->run('DELETE FROM idem_keys; ' . claim('a'));
			$worker->send(resume());
			asleep($node, $worker);
		},
		sub { $other->run(fail_claim('a')); $worker->result; }),
	'<', 0.3, 'a failure wakes a worker');
cmp_ok(median_seconds(11,
		sub { $other->run('DELETE FROM idem_keys; ' . claim('a', "lease => '0.1 s'")); },
		sub { $worker->run(resume()); }),
	'<', 0.4, 'a worker looks when a lease ends');
$node->safe_psql('postgres', 'DELETE FROM idem_keys');

# Workers of another scope neither delay a worker nor take its wake-up, though a
# lease in their scope ends just before.
my @others = map { session($node) } 1 .. 3;
my @late;
foreach (1 .. 5)
{
	my $of_other = "SELECT count(*) FROM idem_resume(1, scopes => '{bank}', wait => '5 s')";

	$other->run("SELECT count(*) FROM idem_claim('bank', 'key-of-resumed-b', lease => '1.95 s', request => '1')");
	my $end = $node->safe_psql('postgres',
		"SELECT lease_expires_at FROM idem_claim('shop', 'key-of-resumed-a', lease => '2 s', request => '1')");
	$others[0]->send($of_other);
	asleep($node, $others[0]);
	$worker->send("SELECT extract(epoch FROM clock_timestamp() - '$end') FROM idem_resume(wait => '5 minutes', scopes => '{shop}')");
	asleep($node, $worker);
	$_->send($of_other) foreach @others[1, 2];
	push @late, $worker->result;
	$_->result foreach @others;
	$node->safe_psql('postgres', 'DELETE FROM idem_keys');
}
cmp_ok((sort { $a <=> $b } @late)[2], '<', 0.4, 'a worker looks when a lease ends in its scope, whatever ends in others');
$_->quit foreach @others;

my @workers = map { session($node) } 1 .. 8;
$other->run(join ';', map { claim("m$_") } 1 .. 8);
$_->send(resume('max_claims => 1')) foreach @workers;
asleep($node, @workers);
$other->run('SELECT count(idem_fail(scope, key, claim_token => claim_token)) FROM idem_keys');
is(join(' ', sort map { $_->result } @workers), join(' ', map { "m$_" } 1 .. 8), 'eight claims fail, and eight workers have one each');
$node->safe_psql('postgres', 'DELETE FROM idem_keys');
$_->quit foreach @workers;

#
# Crashes
#
sub kill_backend
{
	my ($pid) = @_;
	my $offset = -s $node->logfile;

	kill('KILL', $pid) == 1 or die "no process $pid";
	$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
	return;
}

my $show = "SELECT attempt, claim_token > 1 FROM idem_resume(lease => '1 hour')";

$node->safe_psql('postgres', claim('a', "lease => '0'"));
$worker->run('BEGIN');
is($worker->run('SELECT attempt FROM idem_resume()'), 2, 'a worker resumes a claim');
kill_backend($worker->pid);
is($node->safe_psql('postgres', $show), '2|t', 'killed before its commit, another has the same attempt at once');
my $token = $node->safe_psql('postgres', 'SELECT claim_token FROM idem_keys');
$node->stop('immediate');
$node->start;
is($node->safe_psql('postgres', $show), '', 'committed, a crash of the server does not end its lease');
$node->safe_psql('postgres', "SELECT idem_heartbeat('shop', 'key-of-resumed-a', '0', $token)");
is($node->safe_psql('postgres', $show), '3|t', 'when that has ended, there is a next attempt');
is(sqlstate_of($node, "SELECT idem_complete('shop', 'key-of-resumed-a', 200, claim_token => $token);"), 'ID003',
	'and the worker before the crash is fenced');
$node->safe_psql('postgres', 'DELETE FROM idem_keys');

#
# Workers that fail, die, and are too slow, and servers that crash: in the end each
# claim has been completed once, with its effect.
#
my $claims = 200;
$node->safe_psql('postgres', <<"SQL");
CREATE TABLE effects (key text PRIMARY KEY, request jsonb);
CREATE FUNCTION finish(mine text, token bigint, request jsonb) RETURNS text LANGUAGE plpgsql AS \$\$
DECLARE
	chance float8 := random();
BEGIN
	IF mine = '' OR chance < 0.2 THEN
		RETURN 'left alone';
	ELSIF chance < 0.4 THEN
		PERFORM idem_fail('shop', mine, 'no luck', token);
		RETURN 'failed';
	END IF;
	INSERT INTO effects VALUES (mine, request);
	PERFORM idem_complete('shop', mine, 200, 'done', claim_token => token);
	RETURN 'done';
EXCEPTION WHEN SQLSTATE 'ID003' OR SQLSTATE 'ID004' OR unique_violation THEN
	RETURN SQLSTATE;
END
\$\$;
SELECT count(idem_claim('shop', 'key-of-crash-' || to_char(n, 'FM0000'), lease => '0', request => to_jsonb(n)))
	FROM generate_series(1, $claims) AS n;
SQL
my $script = <<'SQL';
BEGIN;
SELECT coalesce(max(key), '') AS key, coalesce(max(claim_token), 0) AS token, coalesce(max(request::text), '0') AS request
	FROM idem_resume(1, '20 ms', wait => '0.1 s') \gset
COMMIT;
\sleep 2 ms
SELECT finish(':key', :token, ':request');
SQL

foreach my $round (1 .. 5)
{
	my $load = start_pgbench($node, 'postgres', { resume => $script }, '-c', 4, '-T', 60);

	$node->poll_query_until('postgres', 'SELECT count(*) > ' . $round * 10 . ' FROM effects') or die 'nothing is done';
	if ($round % 2)
	{
		kill_backend($node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() LIMIT 1"));
	}
	else
	{
		$node->stop('immediate');
		$node->start;
	}
	IPC::Run::finish($load->{run});
	unlike($load->{stderr}, qr/ERROR/, "round $round: no call fails but for the crash");
}
my $load = start_pgbench($node, 'postgres', { resume => $script }, '-c', 4, '-T', 60);
eventually($node, 'postgres', "SELECT count(*) = $claims FROM idem_keys WHERE state = 'completed'", 'all claims are completed in the end');
IPC::Run::kill_kill($load->{run});
is($node->safe_psql('postgres', "SELECT count(*) FROM effects AS e FULL JOIN idem_keys AS k USING (key)
	WHERE e.key IS NULL OR k.key IS NULL OR k.request IS NOT NULL OR e.request <> to_jsonb(right(k.key, 4)::int)"),
	0, 'each has had its effect, once, with its own request');
cmp_ok($node->safe_psql('postgres', 'SELECT max(attempt) FROM idem_keys'), '>', 2, 'and some took several attempts');

#
# A dump
#
$node->safe_psql('postgres', "DELETE FROM idem_keys; " . claim('a') . ';' . fail_claim('a') . ';' . claim('b', "lease => '0'"));
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->run_log([ 'pg_dump', '-f', $node->basedir . '/dump', '--extension', 'idempotency', $node->connstr('postgres') ]);
$node->psql('restored', slurp_file($node->basedir . '/dump'));
is($node->safe_psql('restored', "SELECT request #>> '{}', attempt FROM idem_resume()"), "a|2\nb|2", 'a restored claim can be resumed');

$other->quit;
done_testing();
