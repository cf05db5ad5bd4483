# An old snapshot keeps vacuum from removing the index entries of rows that are
# deleted.  The worker does not go over them again at each visit, and yet finds
# everything.

use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('snapshot', conf => <<'CONF');
idempotency.cleanup_interval = 0
CONF
my $expired = 50_000;

# Until there have been that number of passes, each of which begins with a reload.
sub passes
{
	my ($count) = @_;
	my $passes = 'SELECT cleanup_passes FROM idem_stats WHERE datname = current_database()';
	my $before = $node->safe_psql('postgres', $passes);

	foreach my $pass (1 .. $count)
	{
		$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
		$node->poll_query_until('postgres', "SELECT ($passes) >= $before + $pass")
		  or die 'no pass';
	}
	return $node->safe_psql('postgres', $passes) - $before;
}

my $entries_read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'idem_tokens_expires_at'";
my $pages_read = "SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit
	FROM pg_statio_user_tables WHERE relname = 'idem_tokens'";
my $left = "SELECT count(*) FROM idem_tokens WHERE scope LIKE 'expired%'";

$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

#
# Where nothing is expired, hardly anything is read
#

$node->safe_psql('postgres', <<"SQL");
SELECT count(*) FROM idem_once_many('live', ARRAY(SELECT 'token ' || i FROM generate_series(1, $expired) AS i));
VACUUM idem_tokens;
SQL
configure($node, 'idempotency.cleanup_interval' => '1s');
passes(2);
my $before = $node->safe_psql('postgres', $pages_read);
my $passes = passes(20);
my $read = $node->safe_psql('postgres', $pages_read) - $before;
cmp_ok($read / $passes, '<', 10, 'nothing-to-do-nothing-read: pages at each visit');
configure($node, 'idempotency.cleanup_interval' => 0);

#
# While a snapshot is held, deleted rows are left behind once and for all
#

my $holder = session($node);
$holder->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem_tokens');
$node->safe_psql('postgres', <<"SQL");
SELECT count(*) FROM generate_series(1, $expired, 1000) AS n,
	idem_once_many('expired', ARRAY(SELECT 'token ' || n + i FROM generate_series(0, 999) AS i), ttl => '0');
SQL

# These cannot be deleted when the worker comes to them.
$node->safe_psql('postgres', "SELECT idem_once('expired early', 'locked', ttl => '0')");
my $locker = session($node);
$locker->run("BEGIN; SELECT FROM idem_tokens WHERE token = 'locked' FOR UPDATE");
my $late = session($node);
$late->run("BEGIN; SELECT idem_once('expired early', 'late', ttl => '0')");
$node->safe_psql('postgres', "SELECT idem_once('expired', 'last', ttl => '0')");

$before = $node->safe_psql('postgres', $entries_read);
configure($node, 'idempotency.cleanup_interval' => '1s');
ok($node->poll_query_until('postgres', "$left AND scope = 'expired'", '0'), 'all is deleted');
passes(2);
$read = $node->safe_psql('postgres', $entries_read) - $before;
cmp_ok($read, '<', 4 * $expired, 'entries-are-read-once: from batch to batch');

$before = $node->safe_psql('postgres', $entries_read);
$passes = passes(40);
$read = $node->safe_psql('postgres', $entries_read) - $before;
note("$passes passes read $read entries");
cmp_ok($read / $passes, '<', $expired / 5, 'entries-are-read-once: from visit to visit');

is($node->safe_psql('postgres', $left), '1', 'skipped-is-found-again: one is locked, one is not committed');
$_->run('COMMIT') foreach $locker, $late;
ok($node->poll_query_until('postgres', $left, '0'), 'skipped-is-found-again: when it can be deleted');

# A row that expired long ago, for example from a dump.
$node->safe_psql('postgres', "INSERT INTO idem_tokens (expires_at, used_at, scope, token) VALUES ('2000-01-01', '1999-12-25', 'expired long ago', 'token')");
ok($node->poll_query_until('postgres', $left, '0'), 'older-is-found: than all that was deleted before');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_tokens'), $expired, 'what is live is still there');

$_->quit foreach $holder, $locker, $late;
$node->stop;

done_testing();
