# Servers on which no worker may run: standbys, those that pg_upgrade starts,
# single-user mode.  And those that have not preloaded the library, which work
# without one.

use strict;
use warnings FATAL => 'all';

use Time::HiRes qw(sleep);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $launchers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'";
my $fill = <<'SQL';
SELECT count(*) FROM idem_once('form', ARRAY(SELECT 'live ' || i FROM generate_series(1, 10) AS i));
SELECT count(*) FROM idem_once('form', ARRAY(SELECT 'expired ' || i FROM generate_series(1, 10) AS i), '0');
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

#
# Standby and promotion
#

my $primary = new_node('primary', allows_streaming => 1);
set_interval($primary, 0);
$primary->reload;
$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
set_interval($standby, '10ms');
$standby->start;
$primary->safe_psql('postgres', "CREATE EXTENSION idempotency; $fill");
$primary->wait_for_catchup($standby);
sleep(0.3);
is($standby->safe_psql('postgres', $launchers), '0', 'standby-has-no-worker');
is($standby->safe_psql('postgres', $rows), '2|20', 'standby-has-no-worker: nothing is deleted');
is($primary->safe_psql('postgres', $launchers), '1', 'the primary has one');
$standby->promote;
ok($standby->poll_query_until('postgres', $launchers, '1'), 'worker-starts-with-promotion');
ok($standby->poll_query_until('postgres', $rows, '1|10'), 'worker-starts-with-promotion: it deletes what is expired');
is($standby->safe_psql('postgres', $replay), 'replay|made', 'and nothing that is live');
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
set_interval($primary, '10ms');
like(single_user($primary, 'SELECT count(*) FROM idem_tokens'), qr/count = "20"/,
	'single-user-mode-has-no-worker');
like(single_user($primary, 'SELECT tokens_deleted FROM idem_cleanup(5)'), qr/tokens_deleted = "5"/,
	'single-user-mode-has-no-worker: a cleanup by hand works');
like(single_user($primary, 'SELECT count(*) FROM idem_tokens'), qr/count = "15"/,
	'single-user-mode-has-no-worker: and is all that was deleted');

#
# pg_upgrade, here from a version to itself, which takes the same steps
#

# A stopped server with all that OLD has, its worker as eager as OLD's.
sub upgrade
{
	my ($old, $name, $conf) = @_;
	my $new = PostgreSQL::Test::Cluster->new($name);
	my @extra = ('--locale=C', '--encoding=UTF8');
	my $directory = $new->basedir . '/upgrade';

	push @extra, '--no-data-checksums' if $new->pg_version >= 18;
	$new->init(extra => \@extra);
	$new->append_conf('postgresql.conf', $conf);
	set_interval($_, '10ms') foreach $old, $new;

	# Reports go to the working directory.
	mkdir $directory or die "$directory: $!";
	my $result = run_log(
		[
			'sh', '-c', 'cd "$1" && shift && exec "$@"', 'sh', $directory,
			$new->installed_command('pg_upgrade'), '--no-sync',
			'-d', $old->data_dir, '-D', $new->data_dir,
			'-b', $old->config_data('--bindir'), '-B', $new->config_data('--bindir'),
			'-p', $old->port, '-P', $new->port, '-s', $new->host,
		]);
	ok($result, "$name: pg_upgrade succeeds");
	return $new;
}

sub has_all
{
	my ($node, $name, $expected) = @_;

	set_interval($node, 0);
	$node->start;
	is($node->safe_psql('postgres', $rows), $expected, "$name: nothing was deleted meanwhile");
	is($node->safe_psql('postgres', $replay), 'replay|made', "$name: records are there");
	return;
}

my $upgraded = upgrade($primary, 'pg_upgrade-with-preload', '');
has_all($upgraded, 'pg_upgrade-with-preload', '1|15');
set_interval($upgraded, '10ms');
$upgraded->reload;
$upgraded->safe_psql('postgres', "SELECT idem_once('form', 'expired', '0')");
ok($upgraded->poll_query_until('postgres', $rows, '1|10'),
	'pg_upgrade-with-preload: then the worker deletes what is expired');

set_interval($upgraded, 0);
$upgraded->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$upgraded->restart;
$upgraded->safe_psql('postgres', <<'SQL');
SELECT count(*) FROM idem_once('form', ARRAY(SELECT 'expired ' || i FROM generate_series(1, 5) AS i), '0');
SELECT outcome FROM idem_claim('shop', 'expired-key-00001', ttl => '0');
SQL
$upgraded->stop;
my $again = upgrade($upgraded, 'pg_upgrade-without-preload', "shared_preload_libraries = ''");
has_all($again, 'pg_upgrade-without-preload', '2|15');

#
# Without preloading the library: no worker, all else works.
#

set_interval($again, '10ms');
$again->restart;
is($again->safe_psql('postgres', $launchers), '0', 'no-worker-without-preload');
is( $again->safe_psql('postgres', 'SELECT * FROM idem_cleanup()'),
	'1|5|0', 'no-worker-without-preload: a cleanup by hand works');
is($again->safe_psql('postgres', $rows), '1|10', 'no-worker-without-preload: and deletes what is expired');
$again->append_conf('postgresql.conf', "session_preload_libraries = 'idempotency'");
$again->restart;
is($again->safe_psql('postgres', "SHOW idempotency.cleanup_interval; $launchers"),
	"10ms\n0", 'no-worker-without-preload: nor when each session loads it');
unlike(slurp_file($again->logfile), qr/(WARNING|ERROR|PANIC): /, 'no-worker-without-preload: no error in the log');
$again->stop;

done_testing();
