# A page is pruned when half of its fill factor's reserve is used up: not after
# each update, nor so late that a row has to leave it.

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# A snapshot of somebody else would keep old versions.
my $node = new_node('pruning', conf => <<'CONF');
autovacuum = off
idempotency.cleanup_interval = 0
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
SELECT count(idem_try_advance('user', 'post', 'entity-' || i, 1)) FROM generate_series(1000, 1999) AS i;
SQL

# advance FROM, TO: one counter of the first page, a transaction each
sub advance
{
	my ($from, $to) = @_;

	$node->safe_psql('postgres',
		join("\n", map { "SELECT FROM idem_try_advance('user', 'post', 'entity-1005', $_);" } $from .. $to));
}

my $place = "FROM idem_action_versions WHERE entity_id = 'entity-1005'";
my $rows = $node->safe_psql('postgres',
	"SELECT count(*) FROM idem_action_versions WHERE ctid >= '(0,0)' AND ctid < '(1,0)'");
cmp_ok($rows, '>', 50, 'the first page is full, but for the reserve');

# To look at the row from here would prune the page, so only in the end.
advance(2, 6);
SKIP:
{
	skip 'the server prunes as it likes', 1
	  if $node->safe_psql('postgres', 'SHOW server_version_num') >= 190000;

	is($node->safe_psql('postgres', "SELECT ctid $place"),
		'(0,' . ($rows + 5) . ')', 'five updates prune nothing: each takes a new place');
}

advance(7, 500);
is($node->safe_psql('postgres', "SELECT last_action_id, ctid >= '(0,0)' AND ctid < '(0," . ($rows + 30) . ")' $place"),
	'500|t', 'of five hundred, all stay on the page');
ok($node->poll_query_until('postgres',
		"SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'idem_action_versions'", '499'),
	'and so none is entered into an index');

$node->stop;

done_testing();
