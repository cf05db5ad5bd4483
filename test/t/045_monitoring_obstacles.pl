# Monitoring where a table is locked, and what it says of tables that it cannot
# read as a whole.

use IdempotencyTest;

my $node = new_node('obstacles', conf => "fsync = off\nautovacuum = off\nidempotency.cleanup_interval = 0\n");
my $database = 'postgres';

$node->safe_psql($database, 'CREATE EXTENSION idempotency');

# health(CHECK, SQL BEFORE IT): status and detail
sub health
{
	my ($check, $before) = @_;

	return split /\|/, $node->safe_psql($database, ($before // '') . "; SELECT status, detail FROM idem_health() WHERE check_name = '$check'");
}

sub metrics
{
	my ($before) = @_;

	return $node->safe_psql($database, ($before // '') . '; SELECT idem_metrics()');
}

#
# Locked tables.  Without a limit of its own, a call would wait until the test
# is killed.
#

my $locker = session($node, $database);

foreach my $case (
	[ 'a table', 'LOCK TABLE idem_keys', 'idem_keys', 'stuck_leases' ],
	[ 'an index', 'REINDEX INDEX idem_tokens_expires_at', 'idem_tokens', 'cleanup_lag' ],
	[ 'a sequence', 'ALTER SEQUENCE idem_claim_tokens RESTART', 'idem_claim_tokens', undef ],
	[ 'a table of no other check', 'LOCK TABLE idem_aggregates', 'idem_aggregates', undef ])
{
	my ($title, $lock, $table, $check) = @$case;
	my $others = $check ? 'outbox_oldest' : 'cleanup_lag';

	$locker->run("BEGIN; $lock");
	is_deeply([ health('tables', q{SET statement_timeout = '60s'}) ], [ 'critical', qq("$table" is locked; calls that need it fail or wait) ],
		"$title is locked: idem_health says so");
	is_deeply([ (health($check))[0] ], ['critical'], "$title is locked: so does what rests on it") if $check;
	is((health($others))[0], 'ok', "$title is locked: and not what does not");

	my $metrics = metrics();
	like($metrics, qr/^idempotency_table_unusable\{[^}]*table="$table"\} 1$/m, "$title is locked: idem_metrics says so");
	is(() = $metrics =~ /^idempotency_table_unusable\{.*\} 1$/mg, 1, "$title is locked: of no other");
	like($metrics, qr/^idempotency_claims_total\{[^}]*outcome="new"\} \d+$/m, "$title is locked: counters come as ever");

	# Settings of the caller do not cause an error.
	foreach my $setting (q{SET lock_timeout = '10ms'}, 'SET exit_on_error = on', q{SET deadlock_timeout = '1ms'},
		'BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY')
	{
		is((health('tables', $setting))[0], 'critical', "$title is locked: after $setting");
	}
	$locker->run('ROLLBACK');
	is((health('tables'))[0], 'ok', "$title: free again");
	unlike(metrics(), qr/table_unusable\{.*\} 1$/m, "$title: and not unusable any more");
}
$locker->quit;

#
# Large tables: some 8000 pages, of which a call reads an eighth
#

$node->safe_psql($database, <<'SQL');
-- One in so many is abandoned.
CREATE FUNCTION fill(since timestamptz, n int, ttl interval, abandoned int) RETURNS void LANGUAGE sql AS $$
	INSERT INTO idem_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, error)
	SELECT nextval('idem_claim_tokens'), since, since, since + ttl, 1, CASE WHEN i % abandoned = 0 THEN 'started' ELSE 'failed' END,
		'm', n || '-0000000000000' || i, repeat('x', 900)
	FROM generate_series(1, n) AS i
$$;
CREATE FUNCTION judgements(name text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	found text[];
BEGIN
	FOR i IN 1 .. 25 LOOP
		found := found || (SELECT status FROM idem_health() WHERE check_name = name);
	END LOOP;
	RETURN (SELECT string_agg(DISTINCT status, ' ') FROM unnest(found) AS status);
END
$$;
SELECT fill(now() - interval '1 hour', 60000, '1 day', 100000);
SQL
my $pages = $node->safe_psql($database, q{SELECT pg_relation_size('idem_keys') / 8192});
ok($pages > 6000, "a table of $pages pages");

# judgements(CHECK): which ones 25 calls come to, each once
sub judgements
{
	my ($check) = @_;

	return $node->safe_psql($database, "SELECT judgements('$check')");
}

is(judgements('stuck_leases'), 'ok', 'no abandoned claim');
$node->safe_psql($database, q{TRUNCATE idem_keys; SELECT fill(now() - interval '1 hour', 60000, '1 day', 20000)});
is(judgements('stuck_leases'), 'ok', 'one of three that is found does not stand for many');
$node->safe_psql($database, q{TRUNCATE idem_keys; SELECT fill(now() - interval '1 hour', 60000, '1 day', 100)});
my $value = $node->safe_psql($database, q{SELECT value FROM idem_health() WHERE check_name = 'stuck_leases'});
ok($value > 200 && $value < 750, "an estimate of 600: $value");
is(judgements('stuck_leases'), 'critical', 'which is one every time');
like((health('stuck_leases'))[1], qr/estimated lower limit: \d+ were found in \d+\.\d\d % of the table$/, 'and says what it is');

# A clock that was ahead: the newest claims are found wherever they went.
is(judgements('clock'), 'ok', 'no claim comes from the future');
foreach my $case (
	[ 'at the end of the index', q{DELETE FROM idem_keys WHERE key LIKE '%1'; VACUUM idem_keys; SELECT fill(now() + interval '1 hour', 20, '1 day', 100)} ],
	[ 'at the end of the table', q{VACUUM FULL idem_keys; SELECT fill(now() + interval '1 hour', 20, '2 hours', 100)} ])
{
	my ($title, $sql) = @$case;

	$node->safe_psql($database, $_) foreach split /; /, $sql;
	is(judgements('clock'), 'critical', "claims from the future $title");
	$node->safe_psql($database, q{DELETE FROM idem_keys WHERE key LIKE '20-%'});
	is(judgements('clock'), 'ok', "claims $title: gone again");
}

#
# The worker, by a clock that nobody sets
#

$node->stop;
start_with_clock($node, 3600);
configure($node, 'idempotency.cleanup_interval' => '1s');
$node->poll_query_until($database, "SELECT last_cleanup > stats_reset FROM idem_stats WHERE datname = '$database'") or die 'no cleanup';
is((health('worker'))[0], 'ok', 'the worker comes');
$locker = session($node, $database);
$locker->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
set_clock(0);
ok($node->poll_query_until($database, q{SELECT value > 2.5 AND value < 3000 FROM idem_health() WHERE check_name = 'worker'}),
	'that it comes no more is seen, though it came last at a time that lies in the future');
$locker->run('ROLLBACK');
$locker->quit;
$node->stop;
done_testing();
