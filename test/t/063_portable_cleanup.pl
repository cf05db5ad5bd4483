# The cleanup of the portable edition by pg_cron, with the statement of docs/portable.md.
# Part of "make portable-check" only, because pg_cron runs jobs at full minutes.

use IdempotencyTest;

plan skip_all => 'the C edition has a worker' if ($ENV{EDITION} || '') ne 'portable';

my $node = new_node('portable_cleanup', start => 0);
plan skip_all => 'pg_cron is not installed'
  unless -e $node->config_data('--pkglibdir') . '/pg_cron.so';
$node->append_conf('postgresql.conf', <<'CONF');
shared_preload_libraries = 'pg_cron'
cron.use_background_workers = on
CONF
$node->start;

# The owner of the database, who is no superuser, installs with psql.  pg_cron has another database.
$node->safe_psql('postgres', 'CREATE ROLE shop_owner LOGIN; CREATE DATABASE shop OWNER shop_owner');
$node->safe_psql('postgres', 'CREATE EXTENSION pg_cron');

my $as_installer = $node->connstr('shop') . ' user=shop_owner';
command_ok([ 'psql', '-X', '-q', '-d', $as_installer, '-v', 'schema=idem', '-f', 'portable/build/idempotency.sql' ], 'the owner installs');

my ($statement) = slurp_file('docs/portable.md') =~ /^(SELECT cron\.schedule.*;)$/m;
ok($statement, 'the page has a statement for pg_cron');
$node->safe_psql('shop', <<"SQL", connstr => $as_installer);
SELECT count(idem.idem_claim('s', 'expired-00000000000' || i, ttl => '0')) FROM generate_series(1, 9) AS i;
SELECT idem.idem_claim('s', 'live-00000000000000');
SELECT idem.idem_once('s', 'expired', ttl => '0');
SQL
$node->safe_psql('postgres', $statement);

$node->poll_query_until('postgres', q{SELECT status = 'succeeded' FROM cron.job_run_details UNION ALL SELECT NULL LIMIT 1})
  or diag($node->safe_psql('postgres', 'SELECT status, return_message FROM cron.job_run_details'));
is( $node->safe_psql('postgres', 'SELECT username, status FROM cron.job_run_details ORDER BY runid LIMIT 1') . '|'
	  . $node->safe_psql('shop', q{SELECT (SELECT string_agg(key, ',') FROM idem.idem_keys), (SELECT count(*) FROM idem.idem_tokens)}),
	'shop_owner|succeeded|live-00000000000000|0',
	'pg_cron has called the cleanup as the owner, which deleted what had expired');

done_testing();
