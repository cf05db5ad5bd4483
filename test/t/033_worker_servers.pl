# Servers on which no worker may run: standbys, single-user mode (and those that
# pg_upgrade starts, see 009_pg_upgrade.pl).  And those that have not preloaded
# the library, which work without one.

use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $launchers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'";
my $fill = <<'SQL';
SELECT count(*) FROM idem_once_many('form', ARRAY(SELECT 'live ' || i FROM generate_series(1, 10) AS i));
SELECT count(*) FROM idem_once_many('form', ARRAY(SELECT 'expired ' || i FROM generate_series(1, 10) AS i), '0');
SELECT outcome, idem_complete('shop', k, 201, 'made', claim_token => claim_token)
FROM (VALUES ('completed-key-0001')) AS v (k), idem_claim('shop', k);
SELECT outcome FROM idem_claim('shop', 'expired-key-00001', ttl => '0');
SQL
my $rows = 'SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) FROM idem_tokens)';
my $replay = "SELECT outcome, response_body FROM idem_claim('shop', 'completed-key-0001')";

sub set_interval
{
	my ($node, $interval) = @_;

	$node->append_conf('postgresql.conf', "idempotency.cleanup_interval = $interval");
	return;
}

# The postmaster says at this level which workers it starts, so its log tells
# of every moment.
my $started = qr/starting background worker process "idempotency/;

#
# Standby and promotion
#

my $primary = new_node('primary', allows_streaming => 1, conf => 'log_min_messages = debug1');
set_interval($primary, 0);
$primary->reload;
my $standby = new_standby($primary, conf => 'idempotency.cleanup_interval = 1s');
$primary->safe_psql('postgres', "CREATE EXTENSION idempotency; $fill");
$primary->wait_for_catchup($standby);
is($standby->safe_psql('postgres', $launchers), '0', 'standby-has-no-worker');
is($standby->safe_psql('postgres', $rows), '2|20', 'standby-has-no-worker: nothing is deleted');
is($primary->safe_psql('postgres', $launchers), '1', 'the primary has one');
unlike(slurp_file($standby->logfile), $started, 'standby-has-no-worker: and had none');
$standby->promote;
ok($standby->poll_query_until('postgres', $launchers, '1'), 'worker-starts-with-promotion');
ok($standby->poll_query_until('postgres', $rows, '1|10'), 'worker-starts-with-promotion: it deletes what is expired');
is($standby->safe_psql('postgres', $replay), 'replay|made', 'and nothing that is live');
like(slurp_file($standby->logfile), qr/received promote request.*$started/s, 'the launcher has started, and not before');
unlike(slurp_file($standby->logfile), qr/(ERROR|FATAL|PANIC): .*(?<!terminating walreceiver process)(?<!due to administrator command)$/m,
	'no error in the log of the standby');
$standby->stop;

#
# Single-user mode
#

sub single_user
{
	my ($node, $statement) = @_;
	my ($stdout, $stderr) = ('', '');

	IPC::Run::run([ $node->installed_command('postgres'), '--single', '-D', $node->data_dir, 'postgres' ],
		'<', \"$statement\n", '>', \$stdout, '2>', \$stderr,
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default))
	  or diag($stderr);
	return $stdout;
}

$primary->stop;
set_interval($primary, '1s');
like(single_user($primary, 'SELECT count(*) FROM idem_tokens'), qr/count = "20"/,
	'single-user-mode-has-no-worker');
like(single_user($primary, 'SELECT tokens_deleted FROM idem_cleanup(5)'), qr/tokens_deleted = "5"/,
	'single-user-mode-has-no-worker: a cleanup by hand works');
like(single_user($primary, 'SELECT count(*) FROM idem_tokens'), qr/count = "15"/,
	'single-user-mode-has-no-worker: and is all that was deleted');

#
# Without preloading the library: no worker, all else works.
#

$primary->append_conf('postgresql.conf', "shared_preload_libraries = ''");
my $offset = -s $primary->logfile;
$primary->start;
$primary->safe_psql('postgres', "SELECT outcome FROM idem_claim('shop', 'expired-key-00001', ttl => '0')");
is($primary->safe_psql('postgres', $launchers), '0', 'no-worker-without-preload');
is( $primary->safe_psql('postgres', 'SELECT * FROM idem_cleanup()'),
	'1|5|0', 'no-worker-without-preload: a cleanup by hand works');
is($primary->safe_psql('postgres', $rows), '1|10', 'no-worker-without-preload: and deletes what is expired');
$primary->append_conf('postgresql.conf', "session_preload_libraries = 'idempotency'");
$primary->restart;
is($primary->safe_psql('postgres', "SHOW idempotency.cleanup_interval; $launchers"),
	"1s\n0", 'no-worker-without-preload: nor when each session loads it');
unlike(slurp_file($primary->logfile, $offset), $started, 'no-worker-without-preload: none has started');
unlike(slurp_file($primary->logfile), qr/(WARNING|ERROR|PANIC): /, 'no-worker-without-preload: no error in the log');
$primary->stop;

done_testing();
