# Monitoring: the text of idem_metrics read by an independent parser; each row
# of idem_health turned to warning and critical by what it is there to find;
# what both cost on large tables; a standby, and a server without preloading.

use IdempotencyTest;

# The longest wait is for a transaction to be a minute old.
$PostgreSQL::Test::Utils::timeout_default = 120;

my $node = new_node('monitored', allows_streaming => 1);

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

#
# Reading metrics
#

# One line a sample: type, unit, name, labels in order, value.  Debian's
# package is for Debian's interpreter.
my $parser = $node->basedir . '/parse_metrics.py';
append_to_file($parser, <<'PYTHON');
import json, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
for family in text_string_to_metric_families(sys.stdin.buffer.read().decode()):
    assert family.documentation, family.name
    for sample in family.samples:
        print(family.type, family.unit or "-", sample.name,
              json.dumps(sample.labels, sort_keys=True), repr(float(sample.value)), sep="|")
PYTHON

# Switch autovacuum on or off. It never finds work.
sub set_autovacuum
{
	my ($value) = @_;

	$node->safe_psql('postgres', "ALTER SYSTEM SET $_") for "autovacuum = $value", 'autovacuum_naptime = \'1d\'',
		'autovacuum_vacuum_threshold = 2000000000', 'autovacuum_analyze_threshold = 2000000000';
	$node->reload;
	$node->poll_query_until('postgres', "SELECT current_setting('autovacuum') = '$value'") or die 'no reload';
	return;
}

# The samples of a text, by name and labels without the database; undef if it
# is not valid.
sub parse
{
	my ($text, $datname) = @_;
	my %samples;
	my ($out, $err);

	IPC::Run::run([ '/usr/bin/python3', $parser ], '<', \$text, '>', \$out,
		'2>', \$err)
	  or do { diag($err); return; };
	foreach my $line (split /\n/, $out)
	{
		my ($type, $unit, $name, $labels, $value) = split /\|/, $line, 5;

		# JSON escapes as this test's names need it.
		my $json = $datname =~ s/(["\\])/\\$1/gr =~ s/\n/\\n/gr;
		$labels =~ s/"datname": "\Q$json\E"(, )?// or do
		{
			diag("another database: $labels");
			return;
		};
		($value) = $value =~ /^(.*)$/;
		$value =~ s/\.0$//;
		$samples{ $name . $labels } =
		  { value => $value, type => $type, unit => $unit };
	}
	return \%samples;
}

sub metrics
{
	my ($server, $database) = @_;

	return parse($server->safe_psql($database, 'SELECT idem_metrics()'),
		$database);
}

# From 19 on no name of a database has a line feed.
my $line_feed = sqlstate_of($node, "CREATE DATABASE \"a\nb\"") eq '00000' ? "\n" : ' ';
my $hostile = "say \"hi\" \\n back\\slash,x=\"1\"} 1${line_feed}new # EOF line";
my $quoted = $hostile =~ s/"/""/gr;

$node->safe_psql('postgres', qq(CREATE DATABASE "$quoted"));
$node->safe_psql($hostile, 'CREATE EXTENSION idempotency');

my $valid = "# TYPE idempotency_x gauge\n# HELP idempotency_x X.\nidempotency_x{datname=\"d\"} 1\n# EOF\n";
ok(defined parse($valid, 'd'), 'the parser takes OpenMetrics');
ok(!defined parse($valid =~ s/# EOF\n//r, 'd'), 'and nothing else');
ok(!exists metrics($node, 'postgres')->{'idempotency_last_cleanup_timestamp_seconds{}'},
	'no last cleanup before the first');

# A batch that was full may have left something.
$node->safe_psql('postgres', "SELECT idem_once('m', 'unfinished ' || i, '0') FROM generate_series(1, 2) AS i");
is( join(' ', map { $node->safe_psql('postgres', 'SELECT tokens_deleted FROM idem_cleanup(1)') . ':'
			  . $node->safe_psql('postgres', 'SELECT cleanup_passes FROM idem_stats WHERE datname = current_database()') } 1 .. 3),
	'1:0 1:0 0:1', 'a cleanup has ended when nothing is left');

# A different number for each counter.
my %stats = (
	claims_new => '_claims_total{"outcome": "new"}',
	claims_replay => '_claims_total{"outcome": "replay"}',
	claims_erased => '_claims_total{"outcome": "erased"}',
	claims_in_progress => '_claims_total{"outcome": "in_progress"}',
	claims_hash_conflict => '_claims_total{"outcome": "hash_conflict"}',
	claims_expired => '_claims_total{"outcome": "expired"}',
	takeovers => '_takeovers_total{}',
	completions => '_completions_total{}',
	failures => '_failures_total{}',
	rate_limited => '_rate_limited_total{}',
	advances => '_advances_total{"outcome": "advanced"}',
	advances_stale => '_advances_total{"outcome": "stale"}',
	appends_appended => '_appends_total{"outcome": "appended"}',
	appends_duplicate => '_appends_total{"outcome": "duplicate"}',
	appends_overlap => '_appends_total{"outcome": "overlap"}',
	appends_gap => '_appends_total{"outcome": "gap"}',
	appends_in_flight => '_appends_total{"outcome": "in_flight"}',
	appends_version_conflict => '_appends_total{"outcome": "version_conflict"}',
	once_first => '_once_total{"outcome": "first"}',
	once_seen => '_once_total{"outcome": "seen"}',
	messages_published => '_messages_published_total{}',
	messages_taken => '_messages_taken_total{}',
	messages_acked => '_messages_acked_total{}',
	messages_nacked => '_messages_nacked_total{}',
	messages_dead => '_messages_dead_total{}',
	keys_deleted => '_rows_deleted_total{"table": "idem_keys"}',
	tokens_deleted => '_rows_deleted_total{"table": "idem_tokens"}',
	messages_deleted => '_rows_deleted_total{"table": "idem_outbox"}',
	cleanup_passes => '_cleanup_passes_total{}');
my $calls = <<'SQL';
SELECT count(idem_claim('m', 'new-00000000000' || i)) FROM generate_series(100, 140) AS i;
SELECT count(idem_complete('m', 'new-00000000000' || i, 200)) FROM (SELECT i FROM generate_series(100, 117) AS i) AS s,
	LATERAL (SELECT idem_forget('m', 'new-00000000000' || i), idem_claim('m', 'new-00000000000' || i)) AS c;
SELECT count(idem_claim('m', 'new-00000000000100')) FROM generate_series(1, 3);
SELECT idem_erase('m', 'new-00000000000101');
SELECT count(idem_claim('m', 'new-00000000000101')) FROM generate_series(1, 5);
SELECT count(idem_claim('m', 'new-00000000000140')) FROM generate_series(1, 7);
SELECT count(idem_claim('m', 'hashed-000000000001', '\x01'));
SELECT count(idem_claim('m', 'hashed-000000000001', '\x02')) FROM generate_series(1, 9);
SET idempotency.expired_key_policy = reject;
SELECT count(idem_claim('m', 'expired-00000000001', ttl => '0')) FROM generate_series(1, 13);
RESET idempotency.expired_key_policy;
SET idempotency.max_new_keys_per_minute = 1;
SELECT count(idem_claim('limited', 'limited-00000000001'));
DO $$
BEGIN
	FOR i IN 1 .. 43 LOOP
		BEGIN
			PERFORM idem_claim('limited', 'limited-00000000002');
		EXCEPTION WHEN SQLSTATE 'ID002' THEN
		END;
	END LOOP;
END
$$;
RESET idempotency.max_new_keys_per_minute;
SELECT count(idem_claim('m', 'stuck-000000000001', lease => '0')) FROM generate_series(1, 14);
SELECT count(CASE WHEN (idem_claim('m', 'failed-00000000000' || i)).outcome = 'new' THEN idem_fail('m', 'failed-00000000000' || i) END)
FROM generate_series(100, 114) AS i;
SELECT count(idem_claim('m', 'failed-00000000000' || i)) FROM generate_series(100, 103) AS i;
SELECT count(idem_try_advance('m', 'post', '1', 10 + i)) FROM generate_series(1, 16) AS i;
SELECT count(idem_try_advance('m', 'post', '1', 10)) FROM generate_series(1, 17);
SELECT count(idem_try_append('m', 'c', 2 * i - 1, 2)) FROM generate_series(1, 21) AS i;
SELECT count(idem_try_append('m', 'c', 1)) FROM generate_series(1, 32);
SELECT count(idem_try_append('m', 'c', 41, 5)) FROM generate_series(1, 23);
SELECT count(idem_try_append('m', 'c', 99, allow_gaps => false)) FROM generate_series(1, 24);
SELECT count(idem_try_append('m', 'c', 43, expected_version => 7)) FROM generate_series(1, 25);
SELECT count(idem_once('m', 't' || i, '0')) FROM generate_series(1, 26) AS i;
SELECT count(idem_once('m', 'once')) FROM generate_series(1, 31);
SELECT count(idem_publish('m', '{}')) FROM generate_series(1, 35);
SELECT count(*) FROM idem_outbox_take(34, '1 hour');
SELECT idem_outbox_ack(array_agg(id)) FROM (SELECT id FROM idem_outbox ORDER BY id LIMIT 11) AS o;
SELECT count(idem_outbox_nack(id, retry_after => '1 hour')) FROM (SELECT id FROM idem_outbox WHERE state = 'pending' AND attempt = 1 ORDER BY id LIMIT 13) AS o;
SET idempotency.outbox_max_attempts = 1;
SELECT count(idem_outbox_nack(id)) FROM (SELECT id FROM idem_outbox WHERE state = 'pending' AND attempt = 1 ORDER BY id LIMIT 6) AS o;
SET idempotency.outbox_retention = 0;
SELECT idem_cleanup();
SELECT idem_cleanup();
SELECT idem_outbox_ack(array_agg(id)) FROM (SELECT id FROM idem_outbox WHERE state = 'pending' AND attempt = 1 ORDER BY id LIMIT 3) AS o;
SQL
$node->safe_psql($hostile, $calls);
# A twin that is in flight
my $writer = session($node, $hostile);
$writer->run("BEGIN; SELECT idem_try_append('m', 'other', 1)");
$node->safe_psql($hostile,
	"SELECT idem_try_append('m', 'other', 1) FROM generate_series(1, 8)");
$writer->run('COMMIT');
$writer->quit;

# Statistics come when a session has ended.
$node->poll_query_until($hostile,
	"SELECT bool_and(n_live_tup = CASE relname WHEN 'idem_keys' THEN (SELECT count(*) FROM idem_keys)
		ELSE (SELECT count(*) FROM idem_tokens) END)
	 FROM pg_stat_user_tables WHERE relname IN ('idem_keys', 'idem_tokens')")
  or die 'statistics do not come';

my $samples = metrics($node, $hostile);
ok(defined $samples, 'an independent parser reads the metrics of a database with a hostile name');
is_deeply(
	[ sort map { $_->{type} eq 'counter' ? $_->{value} : () } values %$samples ],
	[ sort split /\|/, $node->safe_psql($hostile,
			'SELECT ' . join(', ', keys %stats) . ' FROM idem_stats WHERE datname = current_database()') ],
	'its counters are those of idem_stats');
my %values;
foreach my $stat (sort keys %stats)
{
	my $value = $node->safe_psql($hostile,
		"SELECT $stat FROM idem_stats WHERE datname = current_database()");
	my $sample = $samples->{"idempotency$stats{$stat}"};

	ok($value > 0 && defined $sample && $sample->{type} eq 'counter'
		  && $sample->{value} == $value, "$stat is $value");
	push @{ $values{$value} }, $stat;
}
# So a mix-up would be seen.
is(join(', ', map { "@$_" } grep { @$_ > 1 } values %values), '', 'all are different');

my %expected = (
	'_outbox_messages{"state": "due"}' => 1,
	'_outbox_messages{"state": "waiting"}' => 14,
	'_outbox_messages{"state": "dead"}' => 6,
	'_records{"state": "expired", "table": "idem_keys"}' => 0,
	'_records{"state": "expired", "table": "idem_tokens"}' => 0,
	'_cleanup_lag_seconds{"table": "idem_keys"}' => 0,
	'_cleanup_lag_seconds{"table": "idem_tokens"}' => 0);
foreach my $name (sort keys %expected)
{
	is($samples->{"idempotency$name"}{value}, $expected{$name}, $name);
	is($samples->{"idempotency$name"}{type}, 'gauge', "$name is a gauge");
}
# The age of the message that nobody has taken
my $age = $samples->{'idempotency_outbox_oldest_age_seconds{}'}{value};
ok($age > 0 && $age < 60, "the oldest message is $age seconds old");
# Estimates of the statistics
is($samples->{'idempotency_records{"state": "live", "table": "idem_keys"}'}{value},
	$node->safe_psql($hostile, 'SELECT count(*) FROM idem_keys'), 'live keys');
is($samples->{'idempotency_records{"state": "live", "table": "idem_tokens"}'}{value},
	1, 'live tokens');
is($samples->{"idempotency_${_}{}"}{unit}, 'seconds', "$_ has a unit")
  foreach 'stats_reset_timestamp_seconds', 'last_cleanup_timestamp_seconds', 'outbox_oldest_age_seconds';
is( $node->safe_psql($hostile,
		'SELECT abs(' . $samples->{'idempotency_last_cleanup_timestamp_seconds{}'}{value}
		  . ' - extract(epoch FROM last_cleanup)) < 0.001
		 FROM idem_stats WHERE datname = current_database()'),
	't', 'the last cleanup');
is(metrics($node, 'postgres')->{'idempotency_claims_total{"outcome": "new"}'}{value},
	0, 'each database has its own');
$node->safe_psql('postgres', qq(DROP DATABASE "$quoted"));

# The alert rules speak of metrics that there are, or of the health that the
# exporters ask for, of which there are these checks.
my $metrics = $node->safe_psql('postgres', 'SELECT idem_metrics()');
my @rules = grep { /expr:/ } split /\n/, slurp_file('monitoring/alerts.yml');
my %alerted = map { $_ => 1 } map { /\b(idempotency_\w+)/g } @rules;
ok(delete $alerted{'idempotency_health_status'}, 'alert rules: health is among them');
my %checks = map { $_ => 1 } map { /\bcheck="(\w+)"/g } @rules;
ok(delete $checks{moves}, 'alert rules: moves, which only shards have, are among them');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM idem_health() WHERE check_name IN ('" . join("', '", keys %checks) . "')"),
	scalar keys %checks, 'alert rules: the checks are there');
cmp_ok(scalar keys %checks, '>=', 3, 'alert rules: some checks are');
cmp_ok(scalar keys %alerted, '>=', 4, 'alert rules: some are there');
like($metrics, qr/^$_\{/m, "alert rules: $_ is a metric") foreach sort keys %alerted;

#
# A transaction that prevents vacuum is named after a minute, so begin here
#

my $database = 'health';
$node->safe_psql('postgres', "CREATE DATABASE $database");
$node->safe_psql($database, 'CREATE EXTENSION idempotency');
my $holder = session($node, $database);
$holder->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
$node->safe_psql($database, 'SELECT pg_current_xact_id()');
$node->safe_psql($database, q{BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'held "back"'});
# A session that reads since then holds back as much, and is not the cause.
my $reader = session($node, $database);
$reader->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');

#
# Health
#

# A row, as "status" and "detail", with settings.
sub health
{
	my ($check, %settings) = @_;
	my $set = join '', map { "SET idempotency.$_ = '$settings{$_}';" } sort keys %settings;

	return split /\|/, $node->safe_psql($database,
		"$set SELECT status, detail FROM idem_health() WHERE check_name = '$check'"), 2;
}

# Its status after some statements that are rolled back; by a statement, since
# a session may end later than its psql does.
sub status_after
{
	my ($check, $sql) = @_;

	return (split /\n/, $node->safe_psql($database,
			"BEGIN; $sql; SELECT status FROM idem_health() WHERE check_name = '$check'; ROLLBACK"))[-1];
}

is($node->safe_psql($database, q{SELECT string_agg(check_name || ' ' || status, ', ') FROM idem_health()}),
	'worker ok, cleanup_lag ok, outbox_oldest ok, outbox_blocked ok, dead_letters ok, stuck_leases ok, bloat ok, clock ok, tables ok, sequences ok, edition ok',
	'nothing to complain about');

my $late = "SELECT idem_%s; UPDATE %s SET %s = clock_timestamp() - interval '%s seconds'";
foreach my $case (
	[ 590, 'ok' ], [ 601, 'warning' ], [ 2900, 'warning' ], [ 3001, 'critical' ])
{
	my ($seconds, $status) = @$case;

	is(status_after('cleanup_lag', sprintf($late, "claim('m', 'expired-000000000001')", 'idem_keys', 'expires_at', $seconds)),
		$status, "cleanup_lag: a key expired $seconds seconds ago: $status");
	is(status_after('cleanup_lag', sprintf($late, "once('m', 'expired')", 'idem_tokens', 'expires_at', $seconds)),
		$status, "cleanup_lag: a token expired $seconds seconds ago: $status");
	is(status_after('cleanup_lag', sprintf($late, "publish('m', '{}')", 'idem_outbox', "state = 'acked', acked_at", 7 * 86400 + $seconds)),
		$status, "cleanup_lag: a message's retention was over $seconds seconds ago: $status");
}
foreach my $case (
	[ 290, 'ok' ], [ 301, 'warning' ], [ 1490, 'warning' ], [ 1501, 'critical' ])
{
	my ($seconds, $status) = @$case;

	foreach my $key ('NULL', "'key'")
	{
		is(status_after('outbox_oldest', sprintf($late, "publish('m', '{}', $key)", 'idem_outbox', 'available_at', $seconds)),
			$status, "outbox_oldest: due for $seconds seconds, key $key: $status");
	}
}
is(status_after('outbox_oldest', sprintf($late, "publish('m', '{}')", 'idem_outbox', 'created_at', 86400)
		  . ", available_at = clock_timestamp() + interval '1 second'"),
	'ok', 'outbox_oldest: a delayed message is not late');
foreach my $case ([ 0, 'ok' ], [ 1, 'warning' ], [ 4, 'warning' ], [ 5, 'critical' ])
{
	my ($count, $status) = @$case;

	is(status_after('dead_letters', "SELECT idem_publish('m', '{}') FROM generate_series(1, $count);
			UPDATE idem_outbox SET state = 'dead'"),
		$status, "dead_letters: $count: $status");
}
foreach my $case ([ 9, 'ok' ], [ 10, 'warning' ], [ 49, 'warning' ], [ 50, 'critical' ])
{
	my ($count, $status) = @$case;
	my $claims = "SELECT idem_claim('m', 'abandoned-00000000' || i, lease => '0') FROM generate_series(100, 99 + $count) AS i;";

	is(status_after('stuck_leases', "$claims UPDATE idem_keys SET lease_expires_at = clock_timestamp() - interval '61 seconds'"),
		$status, "stuck_leases: $count: $status");
	is(status_after('stuck_leases', "$claims UPDATE idem_keys SET lease_expires_at = clock_timestamp() - interval '30 seconds'"),
		'ok', "stuck_leases: $count within a minute: ok");
}
foreach my $case ([ '0.5 s', 'ok', '1s' ], [ '3 min', 'warning', '1min' ], [ '1 min', 'critical', '1s' ])
{
	my ($lead, $status, $threshold) = @$case;
	my $set = "SET LOCAL idempotency.health_clock = '$threshold'";

	is(status_after('clock', "$set; SELECT idem_publish('m', '{}'); UPDATE idem_outbox SET created_at = clock_timestamp() + interval '$lead'"),
		$status, "clock: a message from the future, $lead: $status");
	is(status_after('clock', "$set; SELECT idem_claim('m', 'of-the-present-00'), idem_claim('m', 'from-the-future-0');
			UPDATE idem_keys SET created_at = clock_timestamp() + interval '$lead' WHERE key LIKE 'from%'"),
		$status, "clock: a claim from the future, $lead: $status");
}

#
# The worker
#

my ($status, $detail) = health('worker', health_worker => '1ms');
is("$status|$detail",
	'ok|no cleanup has ended yet; not judged, because no worker visits this database: idempotency.cleanup_interval is zero',
	'worker: with an interval of zero nobody is missed');

configure($node, 'idempotency.cleanup_interval' => '1s');
$node->poll_query_until($database, 'SELECT last_cleanup IS NOT NULL FROM idem_stats WHERE datname = current_database()')
  or die 'no cleanup';
is_deeply([ health('worker', health_worker => '5min') ], [ 'ok', 'since the last cleanup ended' ], 'worker: it comes');

my $locker = session($node, $database);
$locker->run('BEGIN; LOCK TABLE idem_tokens IN SHARE MODE');
$node->poll_query_until($database, q{SELECT value > 2.5 FROM idem_health() WHERE check_name = 'worker'})
  or die 'the worker cannot be held up';
is($node->safe_psql($database, q{SET idempotency.health_worker = '2s';
		SELECT status = CASE WHEN value < 10 THEN 'warning' ELSE 'critical' END FROM idem_health() WHERE check_name = 'worker'}),
	't', 'worker: no cleanup ends while a table is locked: warning');
$node->poll_query_until($database, q{SELECT value > 10 FROM idem_health() WHERE check_name = 'worker'}) or die 'a cleanup has ended';
is((health('worker', health_worker => '500ms'))[0], 'critical', 'worker: and critical, after five times two intervals');
is((health('worker', health_worker => '0'))[0], 'ok', 'worker: unless it is switched off');
configure($node, 'idempotency.cleanup_interval' => '1h');
is( $node->safe_psql($database, q{SET idempotency.health_worker = '1s'; SET idempotency.health_cleanup_lag = '1s';
		SELECT check_name, status, threshold FROM idem_health() WHERE check_name IN ('worker', 'cleanup_lag')}),
	"worker|ok|7200\ncleanup_lag|ok|7200", 'within two intervals nothing is late');
$locker->run('ROLLBACK');
$locker->quit;
configure($node, 'idempotency.databases' => 'postgres, other');
($status, $detail) = health('worker');
like($detail, qr/not judged.*idempotency.databases does not name this database/, 'worker: nor where it does not come');
configure($node, 'idempotency.databases' => "postgres, $database", 'idempotency.cleanup_interval' => '1s');
$node->poll_query_until($database, q{SELECT status = 'ok' AND detail !~ 'judged' AND value < 2 FROM idem_health() WHERE check_name = 'worker'})
  or die 'the worker does not come back';
pass('worker: it is back');
configure($node, 'idempotency.cleanup_interval' => '0');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency cleanup'})
  or die 'the worker does not rest';

#
# Large tables
#

$node->safe_psql($database, 'VACUUM');
$node->safe_psql($database, <<'SQL');
-- About 8000 pages.  One in five is abandoned, all were to expire a year from now.
INSERT INTO idem_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, error)
SELECT i, now(), now() - interval '1 hour', now() + interval '1 year', 1, CASE i % 5 WHEN 0 THEN 'started' ELSE 'failed' END,
	'm', 'big-00000000000' || i, repeat('x', 900)
FROM generate_series(1, 60000) AS i;
INSERT INTO idem_tokens SELECT now() - i * interval '10 ms', now() - interval '1 day', 'm', 'old' || i FROM generate_series(1, 150000) AS i;
INSERT INTO idem_tokens SELECT now() + interval '1 year', now(), 'm', 'new' || i FROM generate_series(1, 50000) AS i;
INSERT INTO idem_outbox (id, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, payload)
SELECT nextval('idem_outbox_ids'), now(), now() - interval '2 s', 0, 0, i % 30 <> 0, gen_random_uuid(), CASE WHEN i % 30 = 0 THEN 'dead' ELSE 'pending' END, 'm', '{}'
FROM generate_series(1, 150000) AS i;
SQL
my $pages = $node->safe_psql($database, q{SELECT pg_relation_size('idem_keys') / 8192});
ok($pages > 6000, "a table of $pages pages");

my $scans = q{SELECT sum(seq_scan), sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname LIKE 'idem%'};
my $scanned = $node->safe_psql($database, $scans);
my $read = q{SELECT heap_blks_read + heap_blks_hit FROM pg_statio_user_tables WHERE relname = 'idem_keys'};
my $blocks = $node->safe_psql($database, $read);

$samples = metrics($node, $database);
# All statistics of the session that wrote them are there, or none.
my %estimated = map { $_ => $samples->{qq(idempotency_records{"state": "$_", "table": "idem_tokens"})}{value} } 'live', 'expired';
ok($estimated{expired} > 140000 && $estimated{expired} < 160000, "expired tokens are estimated: $estimated{expired} of 150000");
ok($estimated{live} > 40000 && $estimated{live} < 60000, "and so are live ones: $estimated{live} of 50000");
my $due = $samples->{'idempotency_outbox_messages{"state": "due"}'}{value};
ok($due > 20000 && $due < 50000, "the count of messages ends, at $due");
is($samples->{'idempotency_outbox_messages{"state": "dead"}'}{value}, 5000, 'a smaller number is exact');
my $lag = $samples->{'idempotency_cleanup_lag_seconds{"table": "idem_tokens"}'}{value};
ok($lag > 1499 && $lag < 1800, "the lag is that of the oldest: $lag");
is($node->safe_psql($database, $scans) =~ s/\|.*//r, $scanned =~ s/\|.*//r, 'idem_metrics reads no table from end to end');
is($node->safe_psql($database, $read), $blocks, 'idem_metrics reads nothing of idem_keys where nothing has expired');

$node->safe_psql($database, 'SELECT FROM idem_health()');
my $sampled = $node->safe_psql($database, $read) - $blocks;
ok($sampled >= 1000 && $sampled < 2150, "idem_health reads a sample, and the newest: $sampled pages");
is($node->safe_psql($database, $scans) =~ s/\|.*//r, $scanned =~ s/\|.*//r, 'idem_health reads no table from end to end');
my $stuck = $node->safe_psql($database, q{SELECT value FROM idem_health() WHERE check_name = 'stuck_leases'});
ok($stuck > 10000 && $stuck < 14000, "an estimate of 12000 abandoned claims: $stuck");
is((health('stuck_leases'))[1] =~ s/\d+(?= were)|\d+\.\d+(?= %)/N/gr,
	'claims whose lease expired more than a minute ago, see idem_abandoned(); estimated lower limit: N were found in N % of the table',
	'which is called an estimate');
is($node->safe_psql($database, 'SELECT count(*) FROM idem_abandoned()'), 12000, 'idem_abandoned finds them all');
like((health('dead_letters'))[1], qr/makes them pending again$/, 'dead messages were all counted');
like((health('outbox_oldest'))[1], qr/undelivered: \d{5} or more$/, 'the others were not');
like($node->safe_psql($database, <<'SQL'),
BEGIN;
INSERT INTO idem_outbox (id, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, payload)
SELECT nextval('idem_outbox_ids'), now(), now() + interval '1 day', 0, 0, true, gen_random_uuid(), 'pending', 'a', '{}'
FROM generate_series(1, 100000) AS i;
SELECT value, detail FROM idem_health() WHERE check_name = 'outbox_oldest';
ROLLBACK;
SQL
	qr/^\d+\.\d+\|since a message became due; undelivered: \d{5} or more$/m,
	'those that are due are found behind as many that are delayed');

# Dead entries that cannot be removed before the end of the transaction hide
# whether a message is due.
my $oldest = q{SELECT coalesce(value::text, 'unknown'), status, detail FROM idem_health() WHERE check_name = 'outbox_oldest'};
my $sample = q{SELECT CASE count(*) WHEN 0 THEN 'none' ELSE 'some' END FROM idem_metric_samples() WHERE name ~ 'outbox_oldest'};
like($node->safe_psql($database, "BEGIN; DELETE FROM idem_outbox; $oldest; $sample; ROLLBACK"),
	qr/^unknown\|warning\|not known, because vacuum could not remove .*\nnone$/, 'an age that is not known is not called 0');
is($node->safe_psql($database, "BEGIN; DELETE FROM idem_outbox; SET LOCAL idempotency.health_outbox_oldest = 0; SELECT status FROM idem_health() WHERE check_name = 'outbox_oldest'; ROLLBACK"),
	'ok', 'unless the check is switched off');
my $publish = q{INSERT INTO idem_outbox (id, created_at, available_at, attempt, uncounted_attempts, in_due_index, message_id, state, topic, payload)
	SELECT nextval('idem_outbox_ids'), now(), now() - i * interval '1 ms', 0, 0, true, gen_random_uuid(), 'pending', 'm', '{}' FROM generate_series(1, 1000) AS i};
like($node->safe_psql($database, "BEGIN; DELETE FROM idem_outbox; $publish; $oldest; $sample; ROLLBACK"),
	qr/^\d[.\d]+\|ok\|since a message became due; undelivered: 1000 or more\nsome$/, 'messages that are due behind so many are found');
$node->safe_psql($database, 'VACUUM idem_outbox');

#
# A snapshot that is held keeps dead rows in the way
#

$node->safe_psql($database, "DELETE FROM idem_tokens WHERE token <> ALL (SELECT 'old' || i FROM generate_series(1, 100) AS i);
	VACUUM idem_tokens");
my $since = 'SELECT extract(epoch FROM clock_timestamp() - min(expires_at)) FROM idem_tokens';
my $before = $node->safe_psql($database, $since);
$samples = metrics($node, $database);
is($samples->{'idempotency_records{"state": "expired", "table": "idem_tokens"}'}{value}, 100, 'rows behind 200000 dead ones are found');
my $after = $node->safe_psql($database, $since);
$lag = $samples->{'idempotency_cleanup_lag_seconds{"table": "idem_tokens"}'}{value};
# Dead ones may hide which is the oldest of a second.
ok($lag > $before - 1 && $lag <= $after, "and so is their lag: $lag, really between $before and $after");
like((health('cleanup_lag'))[1], qr/estimated/, 'which is called an estimate');
$node->safe_psql($database, 'DELETE FROM idem_tokens');
$samples = metrics($node, $database);
is($samples->{'idempotency_records{"state": "expired", "table": "idem_tokens"}'}{value}, 0, 'dead rows do not count');
is($samples->{'idempotency_cleanup_lag_seconds{"table": "idem_tokens"}'}{value}, 0, 'nor are they late');

# The entries that a call looks at, of all indexes together, are bounded.
my $entries = q{SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname LIKE 'idem%'};
$before = $node->safe_psql($database, $entries);
foreach my $function ('idem_health()', 'idem_metrics()')
{
	$node->safe_psql($database, "BEGIN; DELETE FROM idem_outbox; SELECT FROM $function; ROLLBACK; SELECT pg_stat_force_next_flush()");
	$node->poll_query_until($database, "SELECT ($entries) > $before") or die 'nothing is read';
	$after = $node->safe_psql($database, $entries);
	my $entries_read = $after - $before;
	ok($entries_read < 100_000, "$function looks at $entries_read entries where 350000 are dead");
	$before = $after;
}

# idem_tokens is all dead by now: 200000 of 200000.
($status, $detail) = health('bloat');
is($status, 'critical', 'bloat: critical');
like($detail, qr/^idem_tokens has 200000 dead and 0 live rows/, 'bloat: and where');

ok($node->poll_query_until($database, q{SELECT detail ~ 'held back' FROM idem_health() WHERE check_name = 'bloat'}),
	'bloat: something holds vacuum back');
my $holder_pid = $holder->pid;
like((health('bloat'))[1], qr/vacuum is held back by the transaction of session $holder_pid, for \d+ transactions, 00:0\d:\d\d$/,
	'bloat: a transaction in a session');
$holder->run('ROLLBACK');
$holder->quit;
# It was prepared a moment later.
$node->poll_query_until($database, q{SELECT detail ~ 'prepared' FROM idem_health() WHERE check_name = 'bloat'})
  or die 'the prepared transaction is not found';
$node->poll_query_until($database, 'SELECT xact_start < clock_timestamp() - interval $$1 minute$$ FROM pg_stat_activity WHERE pid = ' . $reader->pid)
  or die 'the reader is too young';
like((health('bloat'))[1], qr/vacuum is held back by prepared transaction "held "back"", for \d+ transactions, 00:0\d:\d\d$/,
	'bloat: a prepared transaction, and not the session that began to read after it');
$reader->run('ROLLBACK');
$reader->quit;
$node->safe_psql($database, q{ROLLBACK PREPARED 'held "back"'});
unlike((health('bloat'))[1], qr/held back/, 'bloat: and now nobody');
set_autovacuum('on');
is_deeply([ health('bloat') ], [ 'critical', 'idem_tokens has 200000 dead and 0 live rows' ], 'bloat: autovacuum is late');
$node->safe_psql($database, 'VACUUM idem_tokens');
is_deeply([ health('bloat') ], [ 'ok', 'no table has 16 MB of dead rows' ], 'bloat: vacuum has worked');
set_autovacuum('off');
is_deeply([ health('bloat') ], [ 'ok', 'no table has 1000 dead rows; autovacuum is off' ], 'bloat: without autovacuum');

# 1200 dead for each 1000 live ones, and 6000
$node->safe_psql($database, "INSERT INTO idem_tokens SELECT now() + interval '1 day', now(), 'm', 'bloat' || i FROM generate_series(1, 7000) AS i");
my ($live, $dead) = (7000, 0);
foreach my $case ([ 3000, 'ok' ], [ 4000, 'warning' ], [ 5700, 'warning' ], [ 6000, 'critical' ])
{
	my ($count, $expect) = @$case;

	$node->safe_psql($database, "DELETE FROM idem_tokens WHERE substr(token, 6)::int <= $count");
	($status, $detail) = health('bloat');
	is("$status|$detail", "$expect|idem_tokens has $count dead and " . (7000 - $count) . ' live rows; autovacuum is off',
		"bloat: $count of 7000 dead: $expect");
}

# Autovacuum removes them soon, even if the table has many empty pages, unless something prevents it: see the slot below.
set_autovacuum('on');
$node->safe_psql($database, q(UPDATE pg_class SET relpages = 1000000 WHERE oid = 'idem_tokens'::regclass));
is_deeply([ health('bloat') ], [ 'ok', 'no table has 16 MB of dead rows' ], 'bloat: a cleanup has just ended');

#
# Standby
#

$node->safe_psql($database, 'ANALYZE idem_tokens');
$node->safe_psql($database, q{SELECT pg_create_physical_replication_slot('feedback')});
my $standby = new_standby($node, conf => "primary_slot_name = 'feedback'\nhot_standby_feedback = on\n");
$node->wait_for_catchup($standby);

is($standby->safe_psql($database, 'SELECT count(*) FROM idem_abandoned()'), 12000, 'standby: idem_abandoned');
$samples = metrics($standby, $database);
ok(defined $samples, 'standby: idem_metrics');
is($samples->{'idempotency_outbox_messages{"state": "dead"}'}{value}, 5000, 'standby: with what is in the tables');
is($samples->{'idempotency_records{"state": "live", "table": "idem_tokens"}'}{value},
	1000, 'standby: live records as the catalog has them');
is( $standby->safe_psql($database, q{SELECT check_name, status, detail FROM idem_health() WHERE check_name IN ('worker', 'bloat')}),
	'worker|ok|no cleanup has ended yet; not judged, because no worker visits this database: this server is a standby' . "\n"
	  . 'bloat|ok|not known on a standby', 'standby: what only the primary knows');
is( $standby->safe_psql($database, q{SELECT check_name, status FROM idem_health() WHERE check_name IN ('dead_letters', 'stuck_leases', 'clock')}),
	"dead_letters|critical\nstuck_leases|critical\nclock|ok", 'standby: what it can tell');

# A standby that has gone away, and its slot
$node->poll_query_until('postgres', 'SELECT xmin IS NOT NULL FROM pg_replication_slots')
  or die 'no feedback from the standby';
$standby->stop;
is_deeply([ health('bloat') ], [ 'ok', 'no table has 16 MB of dead rows' ], 'bloat: a slot is no matter yet');
$node->safe_psql('postgres', 'DO $$ BEGIN FOR i IN 1 .. 10001 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$');
like(join('|', health('bloat')),
	qr/^critical\|idem_tokens has 6000 dead and 1000 live rows; vacuum is held back by replication slot "feedback", for \d+ transactions$/,
	'bloat: but after 10000 transactions, and few rows matter then');

#
# Without preloading: the first call of a session must know the settings
#

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->restart;
($status, $detail) = health('worker');
like($detail, qr/not judged.*idempotency is not in shared_preload_libraries/, 'not preloaded: no worker is missed');
is( $node->safe_psql($database, 'SELECT count(*), count(threshold), count(*) FILTER (WHERE threshold > 0) FROM idem_health()'),
	'11|10|10', 'not preloaded: with thresholds in the first call, but for the edition');
# A value that a session sets before the library is loaded has no effect, if
# the session may not set it.
$node->safe_psql($database, 'CREATE ROLE watch LOGIN; GRANT pg_monitor TO watch; GRANT USAGE ON SCHEMA public TO watch');
is( $node->safe_psql($database, q{SET client_min_messages = error; SET idempotency.health_dead_letters = 1000000;
		SELECT threshold FROM idem_health() WHERE check_name = 'dead_letters'}, extra_params => [ '-U', 'watch' ]),
	'1', 'not preloaded: a threshold cannot be lifted beforehand');
ok(defined metrics($node, $database), 'not preloaded: idem_metrics');

$node->stop;
done_testing();
