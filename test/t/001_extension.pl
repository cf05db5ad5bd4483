# The extension's life cycle: DROP and CREATE EXTENSION under cached OIDs, with
# and without preloading, and maintenance commands on its tables under load.

use File::Basename;
use Time::HiRes qw(time);
use IdempotencyTest;

my $node = new_node('extension');
my $key = 'order-0000000000000001';

# Calls that are valid in whichever schema the search path leads to.
my $claim = "SELECT outcome FROM idem_claim('shop', '$key')";
my $claim_and_complete =
  "SELECT idem_complete('shop', '$key', 201, 'done', claim_token => claim_token)
   FROM idem_claim('shop', '$key')";
my $advance = "SELECT should_process FROM idem_try_advance('u', 'post', '1', 1)";
my $set = "SELECT is_active FROM idem_set('u', 'post', '2', 'like', true, 1)";

#
# DROP and CREATE EXTENSION
#

$node->safe_psql('postgres', 'CREATE SCHEMA one; CREATE SCHEMA two');
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency SCHEMA one');

my $first = session($node);
my $other = session($node);
foreach my $session ($first, $other)
{
	$session->run('SET search_path = one, two');
	$session->run('PREPARE claim AS ' . $claim);
}
is($first->run($claim_and_complete), 't', 'first install: completed');
is($other->run('EXECUTE claim'), 'replay', 'first install: the other session replays');
is($first->run($advance), 't', 'first install: advanced');
is($other->run($advance), 'f', 'first install: stale in the other session');
is($other->run($set), 't', 'first install: set');

$first->run('DROP EXTENSION idempotency');
is($other->run($claim), 'ERROR 42883', 'after DROP EXTENSION the functions are gone');
is($other->run('EXECUTE claim'), 'ERROR 42883', 'for a prepared statement, too');

is($first->run('CREATE EXTENSION idempotency SCHEMA two'), '', 'create again, elsewhere');
is($first->run('EXECUTE claim'), 'new',
	'create-again-in-one-session: nothing is left of the first install');
$first->run("SELECT idem_forget('shop', '$key')");
is($other->run('EXECUTE claim'), 'new', 'another session that has cached OIDs finds the new tables');
is($first->run($claim), 'in_progress', 'and both see the same ones');
is($other->run($advance), 't', 'new counters');
is($first->run($advance), 'f', 'the same counters in both');
is($other->run($set), 't', 'new actions');
is($other->run("SELECT count(*) FROM two.idem_keys"), '1', 'the record is in the new schema');

# A DROP EXTENSION that is rolled back has never happened.
is( $first->run(
		"BEGIN;
		 DROP EXTENSION idempotency;
		 CREATE EXTENSION idempotency SCHEMA one;
		 $claim;
		 ROLLBACK;
		 $claim"),
	"new\nin_progress",
	'drop-and-create-rolled-back: the record of the old install answers');
is( $first->run(
		"BEGIN;
		 $claim;
		 SAVEPOINT s;
		 DROP EXTENSION idempotency;
		 CREATE EXTENSION idempotency SCHEMA one;
		 $claim;
		 ROLLBACK TO s;
		 $claim;
		 SELECT outcome FROM idem_claim('shop', 'order-0000000000000002');
		 COMMIT;
		 SELECT state FROM idem_lookup('shop', 'order-0000000000000002')"),
	"in_progress\nnew\nin_progress\nnew\nstarted",
	'drop-and-create-rolled-back-to-savepoint: likewise');
is( $first->run(
		"BEGIN;
		 DROP EXTENSION idempotency;
		 CREATE EXTENSION idempotency SCHEMA one;
		 $claim_and_complete;
		 COMMIT;
		 $claim"),
	"t\nreplay",
	'drop-and-create-committed: in one transaction');
is($other->run($claim), 'replay', 'the other session follows');

is( sqlstate_of($node, 'ALTER EXTENSION idempotency SET SCHEMA two'),
	'0A000', 'not relocatable');

# DROP EXTENSION while others are at it.
my $open_key = 'order-open-0000000001';

$other->run("BEGIN; SELECT outcome FROM idem_claim('shop', '$open_key')");
$first->send('DROP EXTENSION idempotency');
wait_for_block($node, $first->pid);
is($other->run("SELECT idem_complete('shop', '$open_key', 200); COMMIT"), 't',
	'drop-waits-for-open-claim: its transaction can finish');
is($first->result, '', 'then the extension is dropped');

$first->run('CREATE EXTENSION idempotency SCHEMA one');
is($other->run($claim), 'new', 'installed again');
$first->run('BEGIN; DROP EXTENSION idempotency');
$other->send($claim);
wait_for_block($node, $other->pid);
$first->run('ROLLBACK');
is($other->result, 'in_progress', 'drop-rolled-back-meanwhile: a waiting claim goes on');

$first->run('BEGIN; DROP EXTENSION idempotency');
$other->send($claim);
wait_for_block($node, $other->pid);
$first->run('COMMIT');
like($other->result, qr/^ERROR 42(883|704)$/,
	'drop-committed-meanwhile: a waiting claim gets a clear error');
is($other->run('SELECT 1'), '1', 'and its session is fine');

$first->run('CREATE EXTENSION idempotency SCHEMA one');
is($other->run($claim_and_complete), 't', 'installed again');
$first->run("BEGIN; DROP EXTENSION idempotency; CREATE EXTENSION idempotency SCHEMA one");
$other->send($claim);
wait_for_block($node, $other->pid);
$first->run('COMMIT');

# Its function was dropped under it, but it may find the new tables; it must
# neither answer from the old ones nor claim a key that nobody can see.
my $answer = $other->result;
like($answer, qr/^(new|ERROR 42(883|704))$/,
	'replaced-meanwhile: a waiting claim does not replay from the dropped table');
is( $other->run("SELECT count(*) FROM one.idem_keys"),
	$answer eq 'new' ? '1' : '0', 'replaced-meanwhile: and what it answers is true');

#
# Additional indexes
#

$first->run("SELECT idem_forget('shop', '$key')");
is( $first->run(
		"CREATE INDEX by_state ON one.idem_keys (state);
		 CREATE INDEX failed_only ON one.idem_keys (upper(scope)) WHERE state = 'failed';
		 CREATE UNIQUE INDEX once_more ON one.idem_keys (scope, key) INCLUDE (state);
		 CREATE UNIQUE INDEX one_point ON one.idem_keys (recovery_point);
		 ANALYZE one.idem_keys"),
	'', 'indexes of other people');
is($other->run($claim), 'new', 'extra-index-is-maintained: claim');
is( $other->run(
		"SELECT outcome FROM idem_claim('shop', '$key-failed');
		 SELECT idem_fail('shop', '$key-failed', 'no', claim_token)
		 FROM one.idem_keys WHERE key = '$key-failed'"),
	"new\nt", 'extra-index-is-maintained: fail');
is( $other->run(
		"SET enable_seqscan = off;
		 SELECT key FROM one.idem_keys WHERE state = 'started';
		 SELECT key FROM one.idem_keys WHERE upper(scope) = 'SHOP' AND state = 'failed';
		 RESET enable_seqscan"),
	"$key\n$key-failed", 'extra-index-is-maintained: each finds its row');
is( $other->run(
		"BEGIN;
		 SELECT idem_checkpoint('shop', k, 'only-one')::text <> ''
		 FROM (SELECT '$key-point-1' AS k, outcome FROM idem_claim('shop', '$key-point-1')) AS c;
		 COMMIT;
		 BEGIN;
		 SELECT idem_checkpoint('shop', k, 'only-one')::text <> ''
		 FROM (SELECT '$key-point-2' AS k, outcome FROM idem_claim('shop', '$key-point-2')) AS c;
		 COMMIT"),
	"t\nERROR 23505", 'extra-index-is-enforced: a unique index of another column');
is($other->run("SELECT state FROM idem_lookup('shop', '$key-point-2')"), '',
	'extra-index-is-enforced: and the claim is rolled back');
$first->run('DROP INDEX one.one_point');

#
# Maintenance under load
#

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION amcheck;
ALTER DATABASE postgres SET search_path = public, one;
CREATE TABLE orders (key text PRIMARY KEY, token bigint NOT NULL);
CREATE TABLE intents (entity text, action_id bigint, active boolean,
	PRIMARY KEY (entity, action_id));

-- One request; whatever is not a right answer is an error.
CREATE FUNCTION submit() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'order-slot-' || (extract(epoch FROM clock_timestamp()) * 400)::bigint;
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('load', k, sha256(k::bytea),
		wait => CASE WHEN random() < 0.5 THEN interval '1 second' END);
	IF c.outcome = 'new' THEN
		INSERT INTO orders VALUES (k, c.claim_token);
		IF NOT idem_complete('load', k, 201, 'body of ' || k) THEN
			RAISE 'not the first to complete';
		END IF;
	ELSIF c.outcome = 'replay' THEN
		IF c.response_body <> 'body of ' || k OR c.response_status <> 201 THEN
			RAISE 'wrong response: %', c;
		END IF;
		PERFORM 1 FROM orders WHERE key = k;
		IF NOT FOUND THEN
			RAISE 'replay without an order: %', k;
		END IF;
	ELSIF c.outcome <> 'in_progress' THEN
		RAISE 'wrong outcome: %', c;
	END IF;
END
$$;

CREATE FUNCTION like_it() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	e text := 'post ' || (random() * 3)::int;
	id bigint := extract(epoch FROM clock_timestamp()) * 1000000 - random() * 20000;
	wanted boolean := random() < 0.5;
	s record;
BEGIN
	SELECT * INTO s FROM idem_set('reader', 'post', e, 'like', wanted, id);
	IF s.last_action_id < id OR s.processed AND s.is_active <> wanted THEN
		RAISE 'wrong state: %', s;
	END IF;
	IF s.processed THEN
		INSERT INTO intents VALUES (e, id, wanted);
	END IF;
END
$$;
SQL

my $seconds = 5;
my $load = start_pgbench(
	$node,
	'postgres',
	{
		'submit@2' => "SELECT submit();\n",
		'like@1' => "SELECT like_it();\n",
	},
	'-c', '8', '-j', '2', '-T', $seconds, '-M', 'prepared');
my @maintenance = (
	'REINDEX TABLE CONCURRENTLY one.idem_keys',
	'REINDEX TABLE CONCURRENTLY one.idem_action_versions',
	'REINDEX TABLE CONCURRENTLY one.idem_user_actions',
	'VACUUM FULL one.idem_keys',
	'VACUUM FULL one.idem_action_versions, one.idem_user_actions',
	'CLUSTER one.idem_keys USING idem_keys_pkey',
	'CLUSTER one.idem_user_actions USING idem_user_actions_pkey',
	'CREATE UNIQUE INDEX CONCURRENTLY twin ON one.idem_keys (scope, key)',
	'VACUUM (FREEZE, ANALYZE) one.idem_keys',
	'DROP INDEX CONCURRENTLY one.twin',
	'REINDEX TABLE one.idem_keys');
my $end = time() + $seconds - 0.5;
my $commands = 0;
my $failed = '';

while ($failed eq '' && (time() < $end || $commands % @maintenance))
{
	my $command = $maintenance[ $commands++ % @maintenance ];
	my ($code, undef, $stderr) = $node->psql('postgres', $command);

	$failed = "$command: $stderr" if $code != 0;
}
is($failed, '', 'maintenance-under-load: every command succeeds');
cmp_ok($commands, '>=', scalar @maintenance, 'maintenance-under-load: each at least once');

my $transactions = finish_pgbench($load);
cmp_ok($transactions, '>', 100, 'maintenance-under-load: no error, no wrong answer');
note("$transactions transactions, $commands maintenance commands");

is( $node->safe_psql('postgres',
		"SELECT count(*) FROM orders AS o
		 FULL JOIN (SELECT * FROM one.idem_keys WHERE scope = 'load') AS k
		 ON k.key = o.key AND k.claim_token = o.token AND k.state = 'completed'
		 WHERE o.key IS NULL OR k.key IS NULL"),
	'0', 'maintenance-under-load: a completed record if and only if its order');
cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM orders'),
	'>', 20, 'maintenance-under-load: of many');
is( $node->safe_psql('postgres',
		"SELECT count(*)
		 FROM (SELECT DISTINCT ON (entity) * FROM intents ORDER BY entity, action_id DESC) AS i
		 WHERE idem_is_active('reader', 'post', entity, 'like') <> active
			OR action_id <> (SELECT last_action_id FROM one.idem_action_versions
				WHERE user_id = 'reader' AND entity_id = entity)"),
	'0', 'maintenance-under-load: the latest intent won');
is( $node->safe_psql('postgres',
		"SELECT count(bt_index_check(indexrelid, true)) > 6 FROM pg_index
		 WHERE indrelid IN ('one.idem_keys'::regclass,
			'one.idem_action_versions'::regclass, 'one.idem_user_actions'::regclass)
			AND indislive"),
	't', 'maintenance-under-load: every row is in every index');

$first->quit;
$other->quit;

#
# Modules that watch access to objects
#

my $hook = PostgreSQL::Test::Utils::tempdir() . '/access_hook.so';
system_or_bail('gcc', '-shared', '-fPIC', '-I' . `$ENV{PG_CONFIG} --includedir-server` =~ s/\s+$//r,
	'-o', $hook, dirname(__FILE__) . '/access_hook.c');
my (undef, $said, $notices) = $node->psql('postgres', <<"SQL");
SET search_path = public, one, two;
CREATE FUNCTION watched(jsonb) RETURNS jsonb LANGUAGE sql RETURN \$1;
LOAD '$hook';
SELECT outcome FROM idem_run('watched', 'key-of-watched-001', 'watched(jsonb)', '{}');
SELECT outcome FROM idem_run('watched', 'key-of-watched-001', 'watched(jsonb)', '{}');
SQL
is($said, "new\nreplay", 'idem_run with a module that watches');
is(scalar(() = $notices =~ /execution of watched\(jsonb\)/g), 2, 'which is asked about the handler');

#
# Without preloading
#

is($node->safe_psql('postgres', "SELECT current_setting('idempotency.key_min_length')"),
	'16', 'preloaded: settings are there before the first call');

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
$node->safe_psql('postgres', "DROP EXTENSION idempotency; DROP SCHEMA one");
is( $node->safe_psql('postgres',
		"CREATE EXTENSION idempotency;
		 SELECT outcome FROM idem_claim('shop', '$key');
		 SELECT outcome FROM idem_claim('shop', '$key');"),
	"new\nin_progress", 'not-preloaded: works');
is( sqlstate_of($node,
		"SET idempotency.default_lease = '5min';
		 SET idempotency.key_min_length = 4;
		 SELECT * FROM idem_claim('shop', 'short')"),
	'00000', 'not-preloaded: settings made before the library is loaded count');

# Before the library is loaded anybody may give such a setting a value, which
# must not survive that.
$node->safe_psql('postgres', "CREATE ROLE app LOGIN; SELECT idem_grant('app')");
my ($code, $stdout, $stderr) = $node->psql(
	'postgres',
	"\\set VERBOSITY sqlstate
	 SET idempotency.key_min_length = 4;
	 SELECT * FROM idem_claim('shop', 'shorter')",
	extra_params => [ '-U', 'app' ]);
like($stderr, qr/ERROR:  ID001/, 'not-preloaded: an application role cannot lift a limit');

$node->stop;
done_testing();
