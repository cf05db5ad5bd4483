# Transaction ids come again.  A frozen row keeps the number of the transaction
# that wrote it; when that number is given out again, the row is not that
# transaction's own, for all that.

use IdempotencyTest;

my $node = new_node('frozen', conf => <<'CONF');
autovacuum = off
idempotency.cleanup_interval = 0
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
SELECT FROM idem_claim('shop', 'order-0000000001', lease => '0');
SQL
my $xid = $node->safe_psql('postgres', 'SELECT xmin FROM idem_keys');
$node->safe_psql('postgres', 'VACUUM (FREEZE)');

# As if 2^32 transactions had come and gone: the claim's is the next one.
$node->stop;
command_ok([ 'pg_resetwal', '-x', $xid, $node->data_dir ], 'the number comes again');
$node->start;

is( $node->safe_psql('postgres', <<'SQL'), "$xid|t\nnew|2", 'a frozen claim is nobody\'s own: abandoned, it is taken over');
BEGIN;
SELECT xmin, xmin = pg_current_xact_id()::xid FROM idem_keys;
SELECT outcome, attempt FROM idem_claim('shop', 'order-0000000001');
COMMIT;
SQL
is($node->safe_psql('postgres', 'SELECT attempt, state FROM idem_keys'), '2|started', 'and that is there');

$node->stop;

done_testing();
