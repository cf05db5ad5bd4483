# Variables that the caller has set for other servers do not affect the servers
# of the tests and of the demo. They run with variables under which no
# connection would succeed, or results would differ.

use FindBin;
use IdempotencyTest;

my %hostile = (
	PGAPPNAME => 'somebody else',
	PGCHANNELBINDING => 'require',
	PGCLIENTENCODING => 'SJIS',
	PGCONNECT_TIMEOUT => 'soon',
	PGDATA => '/nonexistent',
	PGDATABASE => 'nowhere',
	PGDATESTYLE => 'German',
	PGGSSENCMODE => 'require',
	PGHOST => '/nonexistent',
	PGHOSTADDR => '192.0.2.1',
	PGMAXPROTOCOLVERSION => '1.0',
	PGMINPROTOCOLVERSION => '9.0',
	PGLOADBALANCEHOSTS => 'perhaps',
	PGOPTIONS => '-c default_transaction_read_only=on -c search_path=nowhere',
	PGPASSFILE => '/nonexistent',
	PGPASSWORD => 'wrong',
	PGPORT => 6021,
	PGREQUIREAUTH => 'scram-sha-256',
	PGREQUIREPEER => 'nobody',
	PGSERVICE => 'nowhere',
	PGSERVICEFILE => '/nonexistent',
	PGSSLMODE => 'verify-full',
	PGSSLNEGOTIATION => 'direct',
	PGSYSCONFDIR => '/nonexistent',
	PGTARGETSESSIONATTRS => 'standby',
	PGTZ => 'Asia/Kathmandu',
	PGUSER => 'nobody',
	PG_COLOR => 'always');
my $cluster = "$FindBin::Bin/../cluster";

# The objects that were built here are used again.
$ENV{OBJECTS} = 1;

my ($success, $output) = run_program(\%hostile, 300, $cluster, 'env');
ok($success, 'a server starts');
is_deeply([ sort $output =~ /^(PG[^=]*)=/mg ],
	[ sort qw(PGDATABASE PGHOST PGPORT PGUSER PG_CONFIG), grep { /^(?:PG_TEST_.*|PGISOLATIONTIMEOUT|PGCTLTIMEOUT)$/ } keys %ENV ],
	'of the variables only ours are there');

# A test of each suite that calls other programs.
($success, $output) = run_program(
	{
		%hostile,
		TESTS => 'once append-twin-is-in-flight settings 007_encoding'
	},
	300, $cluster, qw(test/check regress isolation pgtap tap));
ok($success, 'tests pass') or diag($output);
like($output, qr/^\d\d+ passed, 0 failed$/m, 'and have run');

($success, $output) = run_program(\%hostile, 600, $cluster, 'examples/demo');
ok($success, 'the demo runs') or diag($output);
like($output, qr/^(\d+) of \1 checks hold, /m, 'and every check of it holds');

done_testing();
