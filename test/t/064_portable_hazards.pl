# The portable edition where other roles, other sessions or a restore could stop it:
# default privileges, a dump without data, texts in another encoding, prepared
# transactions, and calls that are canceled.

use IdempotencyTest;

my $node = new_node('portable', conf => 'max_prepared_transactions = 5');
my $script = 'portable/build/idempotency.sql';

$node->safe_psql('postgres', q{
	CREATE ROLE installer LOGIN;
	CREATE ROLE tenant LOGIN;
	CREATE DATABASE shop OWNER installer;
	CREATE DATABASE restored OWNER installer;
	CREATE DATABASE latin OWNER installer ENCODING 'WIN1252' TEMPLATE template0;
});

sub install
{
	my ($database, $schema) = @_;

	$node->command_ok(
		[ 'psql', '-X', '-q', '-d', $node->connstr($database) . ' user=installer', '-v', "schema=$schema", '-f', $script ],
		"installation in $database");
	return;
}

# The output of SQL, or the SQLSTATE of its error.
sub by
{
	my ($role, $database, $sql) = @_;
	my ($code, $output, $errors) =
	  $node->psql($database, "\\set VERBOSITY sqlstate\nSET search_path = idem;\n$sql", connstr => $node->connstr($database) . " user=$role");

	return $code == 0 ? $output : $errors =~ /ERROR:\s+(\w{5})/ ? $1 : $errors;
}

#
# Default privileges
#
$node->safe_psql('shop', 'ALTER DEFAULT PRIVILEGES FOR ROLE installer GRANT ALL ON TABLES TO tenant, PUBLIC');
install('shop', 'idem');
by('installer', 'shop', q{SELECT FROM idem_grant('tenant')});
is(by('tenant', 'shop', $_), 42501, "default privileges do not allow: $_")
	foreach q{INSERT INTO idem_p_configuration VALUES ('key_min_length', '1')}, 'SELECT FROM idem_p_installation', 'SELECT FROM idem_p_lanes FOR UPDATE';
by('installer', 'shop', 'GRANT ALL ON idem_p_lanes TO tenant');
like( by('installer', 'shop', q{SELECT detail FROM idem_health() WHERE check_name = 'tables'}),
	qr/other roles have privileges on idem.idem_p_lanes/, 'idem_health reports such privileges');
by('installer', 'shop', q{SELECT FROM idem_grant('tenant')});
is(by('tenant', 'shop', 'SELECT FROM idem_p_lanes FOR UPDATE'), 42501, 'and the next grant revokes them');
by('installer', 'shop', 'GRANT ALL ON idem_keys, idem_claim_tokens TO PUBLIC');
like( by('installer', 'shop', q{SELECT detail FROM idem_health() WHERE check_name = 'tables'}),
	qr/PUBLIC or other roles have privileges on idem.idem_claim_tokens, idem.idem_keys/, 'and those that PUBLIC has after a restore');
by('installer', 'shop', q{SELECT FROM idem_grant('tenant')});
is(by('tenant', 'shop', $_), 42501, "and then not: $_") foreach 'SELECT FROM idem_keys', q{SELECT nextval('idem_claim_tokens')};

#
# Hints
#
my $claim = q{SELECT outcome FROM idem.idem_claim('s', 'lease-of-13-hours', lease => '13 h')};
my ($code, undef, $errors) = $node->psql('shop', $claim, connstr => $node->connstr('shop') . ' user=tenant');
like($errors, qr/HINT: .* let the owner call idem_configure\('max_lease', \.\.\.\)/, 'a hint names the call that raises a limit');
by('installer', 'shop', q{SELECT FROM idem_configure('max_lease', '13 h')});
is(by('tenant', 'shop', $claim), 'new', 'and after that call the limit is another one');

#
# A dump without data
#
my $dump = $node->basedir . '/schema.sql';
by('installer', 'shop', q{SELECT FROM idem_configure('max_attempts', '5')});
$node->command_ok([ 'pg_dump', '-s', '-n', 'idem', '-d', $node->connstr('shop'), '-f', $dump ], 'a dump of the schema');
$node->safe_psql('restored', join('', map { "ALTER DEFAULT PRIVILEGES GRANT ALL ON $_ TO tenant;\n" } qw(TABLES SEQUENCES FUNCTIONS)) . "\\i $dump");
is( by('installer', 'restored', q{SELECT count(*) FROM idem_table_faults() WHERE fault ~ 'have privileges on .*idem\.idem_keys' OR fault ~ 'role "tenant" can execute 1.*REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem FROM tenant'}),
	2, 'idem_health reports the default privileges of a named role after a restore');
by('installer', 'restored', q{GRANT SELECT ON idem_tokens TO pg_monitor; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem FROM tenant; SELECT FROM idem_grant('tenant')});
is(by('tenant', 'restored', $_), 42501, "and a revocation and the next grant close them: $_")
	foreach 'SELECT FROM idem_keys', 'DELETE FROM idem_outbox', 'SELECT FROM idem_p_installation',
  q{SELECT idem_configure('key_min_length', '1')}, 'SELECT FROM idem_outbox_take()', 'SELECT idem_p_complete_installation()';
my ($long, $short) = map { session($node, 'restored') } 1 .. 2;
is($long->run(q{BEGIN; SELECT outcome FROM idem.idem_claim('s', 'restored-00000-long')}), 'new', 'a grant makes the rows that a dump without data lacks,');
is($short->run(q{SET statement_timeout = '30 s'; SELECT outcome FROM idem.idem_claim('s', 'restored-0000-short')}), 'new', 'so that the first claim blocks no other one');
$_->quit foreach $long, $short;
is(by('tenant', 'restored', q{SELECT outcome FROM idem_claim('s', 'restored-by-tenant')}), 'new', 'but not what it grants');
is( by('tenant', 'restored', q{SELECT bool_or(has_table_privilege(c.oid, p)) FROM pg_class AS c, unnest('{INSERT,UPDATE,DELETE,TRUNCATE}'::text[]) AS p WHERE c.relname ~ '^idem_'}),
	'f', 'nor the right to write a view');
is(by('installer', 'restored', 'UPDATE idem_p_extension SET extowner = 0'), 55000, 'and not even the owner can write a catalog through a view');
is( by('installer', 'restored', q{SELECT has_table_privilege('pg_monitor', 'idem_tokens', 'SELECT')}),
	't', 'a role that can only read a table keeps that');
is( by('installer', 'restored', q{
		SELECT outcome FROM idem_claim('s', 'restored-0000000001');
		SELECT outcome FROM idem_try_append('a', 'c', 1);
		DELETE FROM idem_p_installation;
		SELECT outcome FROM idem_try_append('a', 'c', 2);
		DELETE FROM idem_p_lanes;
		SELECT count(idem_publish('t', '1', 'key')) FROM generate_series(1, 2);
		SELECT id FROM idem_outbox_take(1);
		SELECT idem_outbox_ack('{1}');
		SELECT count(*) FROM idem_p_lanes;}),
	"new\nappended\nappended\n2\n1\n1\n4096", 'the functions make the rows that it lacks');
like( by('installer', 'restored', q{SELECT detail FROM idem_health() WHERE check_name = 'tables'}),
	qr/settings differ from "idem_p_configuration"/, 'idem_health reports the settings that it lacks');
$node->safe_psql('restored', "DROP SCHEMA idem CASCADE;\n\\i $dump");
$node->command_ok(
	[ 'bash', '-c', 'set -o pipefail; pg_dump -a -n idem -d "$0" | psql -X -q -v ON_ERROR_STOP=1 -d "$1"', $node->connstr('shop'), $node->connstr('restored') ],
	'a dump of the data, restored after it');
my $seed = q{SELECT encode(seed, 'hex') FROM idem.idem_p_installation};
is($node->safe_psql('restored', $seed), $node->safe_psql('shop', $seed), 'has the rows');

#
# A subscription copies settings, with the triggers that are always enabled.
#
by('installer', 'restored', q{SELECT FROM idem_configure('max_wait', '3 min')});
$node->safe_psql('restored', q{SET session_replication_role = replica; INSERT INTO idem.idem_p_configuration VALUES ('max_wait', '4 min')});
is(by('installer', 'restored', q{SELECT idem_p_configured('max_wait')}), 240000, 'a setting that a subscription copies has an effect');

#
# The owner of the database can dump what another role has installed.
#
$node->safe_psql('restored', 'DROP SCHEMA idem CASCADE; CREATE ROLE guest LOGIN; GRANT CREATE ON DATABASE restored TO guest');
$node->command_ok([ 'psql', '-X', '-q', '-d', $node->connstr('restored') . ' user=guest', '-v', 'schema=idem', '-f', $script ], 'a guest installs');
$node->command_ok([ 'pg_dump', '-n', 'idem', '-d', $node->connstr('restored') . ' user=installer', '-f', $dump ], 'and the owner of the database can dump');

#
# Texts that are not UTF-8
#
install('latin', 'idem');
is(by('installer', 'latin', "SET client_encoding = 'WIN1252'; $_"), '22P05', "refused: $_")
	foreach q{SELECT FROM idem_publish('t', to_jsonb(chr(129)))}, q{SELECT FROM idem_publish(chr(129), '1')},
	q{SELECT FROM idem_publish('t', '1', headers => jsonb_build_object('h', chr(129)))},
	q{SELECT FROM idem_publish_many('{t}', ARRAY[to_jsonb(chr(129))])},
	q{SELECT FROM idem_claim('s', 'latin-000000000000', request => to_jsonb(chr(129)))};

#
# Takes wait for nobody
#
by('installer', 'shop', q{
	SELECT FROM idem_configure('outbox_max_attempts', '2');
	SELECT FROM idem_publish_many('{t}', '{1,2}', '{k}');
	SELECT FROM idem_outbox_take(10, '0 s');
	SELECT FROM idem_outbox_take(10, '0 s');
	BEGIN;
	SELECT idem_outbox_extend('{2}', attempts => '{1}');
	PREPARE TRANSACTION 'holder';
	SELECT FROM idem_publish('t', '3', 'other');});
is( by('installer', 'shop', q{SET statement_timeout = '60 s'; SELECT payload FROM idem_outbox_take(1)}),
	3, 'a take passes a key whose next message a prepared transaction holds');
is( by('installer', 'shop', q{COMMIT PREPARED 'holder'; SELECT FROM idem_outbox_take(1); SELECT string_agg(state, ',' ORDER BY id) FROM idem_outbox}),
	'dead,pending,pending', 'and the message without attempts dies afterwards');

# A take that looks for messages without attempts reads the locks of keys.
by('installer', 'shop', q{
	DELETE FROM idem_outbox;
	SELECT FROM idem_configure('outbox_max_attempts', '1');
	SELECT FROM idem_publish('t', '4', 'k');
	SELECT FROM idem_outbox_take(10, '0 s');});
my $holder = session($node, 'shop');
my $taker = session($node, 'shop');
$_->run('SET search_path = idem') foreach $holder, $taker;
$holder->run('BEGIN; LOCK TABLE idem_p_lanes');
$taker->send('SELECT count(*) FROM idem_outbox_take(10)');
wait_for_block($node, $taker->pid);
is(by('installer', 'shop', q{SELECT idem_outbox_release(array_agg(id), '{1}') FROM idem_outbox}), 1, 'a message without attempts is released while a take looks at it');
$holder->run('COMMIT');
$taker->result;
is(by('installer', 'shop', q{SELECT state FROM idem_outbox}), 'pending', 'and does not die');
$_->quit foreach $holder, $taker;

# A message without attempts, one behind it that was taken with it, and one behind both that is parked
my $three = q{
	DELETE FROM idem_outbox;
	SELECT FROM idem_publish('t', '1', 'k');
	SELECT FROM idem_publish('t', '2', 'k');
	SELECT FROM idem_outbox_take(10, '1 h');
	SELECT FROM idem_publish('t', '3', 'k');
	SELECT FROM idem_outbox_extend(ARRAY(SELECT id FROM idem_outbox WHERE payload = '2'), '0 s', '{1}');
	SELECT FROM idem_outbox_take(10, '1 h');
	SELECT FROM idem_outbox_extend(ARRAY(SELECT id FROM idem_outbox WHERE payload = '1'), '0 s', '{1}');};
my $second = q{ARRAY(SELECT id FROM idem_outbox WHERE payload = '2')};
is( by('installer', 'shop', qq{$three
		BEGIN; SELECT FROM idem_outbox_release($second, '{1}'); PREPARE TRANSACTION 'holder';
		SELECT payload FROM idem_outbox_take(10);
		COMMIT PREPARED 'holder';
		SELECT payload FROM idem_outbox_take(10);}),
	"2\n3", 'a message without attempts, and one behind it that a prepared transaction holds: none is skipped');
by('installer', 'shop', qq{$three SELECT FROM idem_outbox_extend($second, '1 h', '{1}')});
($holder, $taker) = map { session($node, 'shop') } 1 .. 2;
$_->run('SET search_path = idem') foreach $holder, $taker;
$holder->run("BEGIN; LOCK TABLE idem_p_lanes; SELECT idem_outbox_ack($second)");
$taker->send('SELECT payload FROM idem_outbox_take(10)');
wait_for_block($node, $taker->pid);
$holder->run('COMMIT');
is($taker->result, 3, 'a message without attempts, and one behind it that is acknowledged meanwhile: none is skipped');
is(by('installer', 'shop', q{SELECT count(*) FROM idem_outbox_blocked() WHERE reason = 'lost'}), 0, 'or lost');
$_->quit foreach $holder, $taker;

# Messages behind another one that cannot be parked
by('installer', 'shop', q{
	DELETE FROM idem_outbox;
	SELECT FROM idem_publish_many('{t}', array_fill('1'::jsonb, '{3000}'), '{k}');
	SELECT FROM idem_outbox_take(1, '1 h');
	SELECT FROM idem_publish('t', '5', 'other');});
is( by('installer', 'shop', q{BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT payload FROM idem_outbox_take(1)}),
	5, 'a take with an old snapshot finds a message behind those of a blocked key');

# An acknowledgement of a message that was not committed when the call began
my ($publisher, $blocker, $early) = map { session($node, 'shop') } 1 .. 3;
$_->run('SET search_path = idem') foreach $publisher, $blocker, $early;
by('installer', 'shop', q{
	DELETE FROM idem_outbox;
	SELECT FROM idem_configure('outbox_max_attempts', NULL);
	SELECT FROM idem_publish('t', '6', 'z');
	SELECT FROM idem_publish('t', '7', 'z');});
$publisher->run('BEGIN');
my $id = $publisher->run(q{WITH p AS MATERIALIZED (SELECT idem_publish('t', '8', 'k')) SELECT currval('idem_outbox_ids') FROM p});
$blocker->run('BEGIN; SELECT idem_outbox_ack(ARRAY(SELECT min(id) FROM idem_outbox))');
$early->send("SELECT idem_outbox_ack(array_append(ARRAY(SELECT max(id) FROM idem_outbox), $id))");
wait_for_block($node, $early->pid);
$publisher->run('COMMIT');
by('installer', 'shop', q{SELECT FROM idem_publish('t', '9', 'k'); SELECT FROM idem_outbox_take(1, topics => '{t}')});
$blocker->run('COMMIT');
is($early->result, 1, 'a message that is committed while its acknowledgement waits is not acknowledged');
is(by('installer', 'shop', q{SELECT count(*) FROM idem_outbox_blocked() WHERE reason = 'lost'}), 0, 'and none is lost');
$_->quit foreach $publisher, $blocker, $early;

#
# A large batch has no locks of its last keys.
#
my $batch = session($node, 'shop');
$batch->run(q{SET search_path = idem; BEGIN; SELECT count(*) FROM idem_claim_many('s', ARRAY(SELECT 'large-batch-' || n FROM generate_series(100001, 100500) AS g (n)))});
is( by('tenant', 'shop', q{SET statement_timeout = '30 s'; SELECT outcome FROM idem_claim('s', 'large-batch-100500')}),
	'in_progress', 'a claim of a key of a large batch that is not committed does not wait');
$batch->run('ROLLBACK');
is(by('tenant', 'shop', q{SELECT outcome FROM idem_claim('s', 'large-batch-100500')}), 'new', 'and gets the key after its rollback');

# Beside such a batch, only a wait for a transaction that has the key makes it in progress.
by('installer', 'shop', q{
	CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END';
	CREATE TRIGGER slow BEFORE INSERT ON idem_keys FOR EACH ROW EXECUTE FUNCTION slow();});
my ($locker, $claimant) = map { session($node, 'shop') } 1 .. 2;
$batch->run('SELECT pg_advisory_lock_shared(482, 0)');
$locker->run('BEGIN; SELECT pg_advisory_xact_lock(1)');
$claimant->send(q{SELECT outcome FROM idem.idem_claim('s', 'claim-with-another-wait')});
$locker->run('SELECT pg_sleep(0.2); COMMIT');
is($claimant->result, 'new', 'a claim that waits for something else is new');
my $limited = q{SET lock_timeout = '50 ms'; SET statement_timeout = '60 s'; SELECT outcome FROM idem_claim('s', 'claim-with-a-lock-timeout')};
$locker->run('BEGIN; SELECT pg_advisory_xact_lock(1)');
is(by('tenant', 'shop', $limited), '55P03', 'the lock_timeout of its session ends this wait');
is( by('tenant', 'shop', q{SET statement_timeout = '60 s'; SELECT outcome FROM idem_claim('s', 'claim-without-lock-timeout')}),
	'in_progress', 'and without a lock_timeout, the claim is in progress after half a second');
$locker->run('ROLLBACK; BEGIN; LOCK TABLE idem.idem_keys IN SHARE MODE');
is(by('tenant', 'shop', $limited), '55P03', 'the lock_timeout of its session also ends a wait for the table');
$claimant->send(q{SELECT outcome FROM idem.idem_claim('s', 'claim-waits-for-the-table')});
wait_for_block($node, $claimant->pid);
$locker->run('SELECT pg_sleep(1); COMMIT');
is($claimant->result, 'new', 'and without a lock_timeout, the claim waits for the table');
by('installer', 'shop', 'DROP FUNCTION slow CASCADE');
$_->quit foreach $locker, $batch;
my @batches = map { session($node, 'shop') } 1 .. 4;
$batches[$_]->send("SELECT outcome, count(*) FROM idem.idem_claim_many('s', ARRAY(SELECT 'beside-other-$_-' || n FROM generate_series(100001, 101200) AS g (n))) GROUP BY 1") foreach 0 .. 3;
my $count = grep { $claimant->run("SELECT outcome FROM idem.idem_claim('s', 'beside-batches-$_')") eq 'new' } 101 .. 150;
is($count, 50, 'claims beside large batches of other keys are new');
is(join(' ', map { $_->result } @batches), join(' ', ('new|1200') x 4), 'and so are all keys of the batches');
$_->quit foreach $claimant, @batches;
is( by('tenant', 'shop', q{BEGIN; SELECT outcome FROM idem_claim('s', 'first-of-its-session');
		SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 482 AND pid = pg_backend_pid()}),
	"new\n0", 'the first claim of a session does not take the lock of large batches');

# Another role takes the lock that stands for such batches.
my ($large, $stranger) = map { session($node, 'shop') } 1 .. 2;
$stranger->run('SET ROLE tenant; SELECT pg_advisory_lock(482, 0)');
$large->run(q{SET search_path = idem; BEGIN});
is( $large->run(q{SELECT outcome, count(*) FROM idem_claim_many('s', ARRAY(SELECT 'other-lock-' || n FROM generate_series(100001, 101500) AS g (n))) GROUP BY 1}),
	'new|1500', 'a large batch can do without that lock');
is( $large->run(q{SELECT count(*) < 1000 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()}), 't', 'and does not fill the lock table');
is( by('tenant', 'shop', q{SET statement_timeout = '30 s'; SELECT outcome FROM idem_claim('s', 'other-lock-101500')}), 'in_progress', 'a claim of its last key does not wait');
$_->quit foreach $large, $stranger;

# A call that waits returns nothing of the rows that it has seen meanwhile.
my ($first, $waiter) = map { session($node, 'shop') } 1 .. 2;
$first->run(q{BEGIN; SELECT FROM idem.idem_claim('s', 'waits-for-a-replay')});
$waiter->send(q{SELECT outcome, lease_expires_at FROM idem.idem_claim('s', 'waits-for-a-replay', wait => '1 min')});
wait_for_block($node, $waiter->pid);
$first->run('COMMIT');
$first->run(q{SELECT idem.idem_complete('s', 'waits-for-a-replay', 200, claim_token => claim_token) FROM idem.idem_keys WHERE key = 'waits-for-a-replay'});
is($waiter->result, 'replay|', 'a replay after a wait has no lease');

$first->run(q{SELECT FROM idem.idem_claim('s', 'waits-for-the-row-1', lease => '0')});
$first->run(q{BEGIN; SAVEPOINT a; SELECT outcome FROM idem.idem_claim('s', 'waits-for-the-row-1')});
$waiter->send(q{SELECT outcome, clock_timestamp() < statement_timestamp() + interval '9 s' FROM idem.idem_claim('s', 'waits-for-the-row-1', wait => '6 s')});
sleep 5;
$first->run('RELEASE a');
is($waiter->result, 'in_progress|t', 'a wait for a savepoint and then for its transaction has one limit');
$first->run('ROLLBACK');

# A wait that is over before the row is waited for has an end, too.
$first->run(q{SELECT FROM idem.idem_claim('s', 'waits-for-the-row-2', lease => '0')});
$first->run(q{BEGIN; SELECT outcome FROM idem.idem_claim('s', 'waits-for-the-row-2')});
foreach my $wait (1, 2, 3, 5, 8, 13)
{
	my $new = session($node, 'shop');

	is($new->run("SET statement_timeout = '20 s'; SELECT outcome FROM idem.idem_claim('s', 'waits-for-the-row-2', wait => '$wait ms')"),
		'in_progress', "a wait of $wait ms ends");
	$new->quit;
}
$waiter->send(q{SET lock_timeout = '2 s'; SELECT clock_timestamp() FROM idem.idem_claim('s', 'waits-for-the-row-2', wait => '10 s')});
is($waiter->result, 'ERROR 55P03', 'a wait for a row obeys lock_timeout');
$waiter->run('RESET lock_timeout');
$first->run('ROLLBACK');

# Of two appends at once, the later one changes nothing and keeps nothing.
$first->run(q{SELECT FROM idem.idem_try_append('rivals', 'one', 1)});
$first->run(q{BEGIN; SELECT FROM idem.idem_try_append('rivals', 'one', 2)});
$waiter->send(q{BEGIN; SELECT outcome FROM idem.idem_try_append('rivals', 'two', 1, expected_version => 1)});
wait_for_block($node, $waiter->pid);
$first->run('COMMIT');
is($waiter->result, 'version_conflict', 'an append that comes later is a conflict,');
is($first->run(q{SET statement_timeout = '20 s'; SELECT outcome FROM idem.idem_try_append('rivals', 'one', 3)}), 'appended', 'and blocks no other one');
$waiter->run('ROLLBACK');

# Waiting duplicates of a retry do not delay the calls of its holder.
my @duplicates = map { session($node, 'shop') } 1 .. 10;
my $holder_waits = 0;
foreach my $n (1 .. 5)
{
	my $key = "retry-with-waiters-$n";

	$node->safe_psql('shop', "SELECT idem.idem_fail('s', '$key', NULL, claim_token) FROM idem.idem_claim('s', '$key')");
	my $token = $first->run("BEGIN; SELECT claim_token FROM idem.idem_claim('s', '$key', lease => '10 s')");
	$_->send("SELECT outcome FROM idem.idem_claim('s', '$key', wait => '30 s')") foreach @duplicates;
	wait_for_block($node, map { $_->pid } @duplicates);
	$holder_waits++
	  if $first->run("COMMIT; SELECT pg_sleep(0.002 * $n); SELECT idem.idem_complete('s', '$key', 200, claim_token => $token), clock_timestamp() < statement_timestamp() + interval '5 s'") !~ /t\|t$/;
	$holder_waits++ if join(' ', map { $_->result } @duplicates) ne join(' ', ('replay') x 10);
}
is($holder_waits, 0, 'waiting duplicates do not delay the calls of the holder');
$_->quit foreach $first, $waiter, @duplicates;

# A message is held by any other transaction that is writing or locking it, and not by the caller.
by('installer', 'shop', q{SELECT idem_publish('held', '1')});
my ($older, $rival) = map { session($node, 'shop') } 1 .. 2;
my $held_ones = q{SELECT count(*) FROM idem.idem_outbox_blocked() WHERE topic = 'held' AND reason = 'held'};
$older->run('BEGIN; SELECT pg_current_xact_id()');
$rival->run(q{BEGIN; SELECT FROM idem.idem_outbox WHERE topic = 'held' FOR UPDATE});
is($older->run($held_ones), 1, 'a message is held by a transaction with a higher id');
$rival->run('ROLLBACK');
$older->run(q{SAVEPOINT a; SELECT FROM idem.idem_outbox WHERE topic = 'held' FOR UPDATE});
is($older->run($held_ones), 0, 'but not by the transaction that asks');
$_->quit foreach $older, $rival;

#
# A session that began while the tables had one page does not read them as a whole later.
#
$node->safe_psql('restored', "DROP SCHEMA idem CASCADE");
install('restored', 'idem');
my $calls = q{
	SELECT outcome FROM idem_claim('s', 'plans-000000000' || :n, lease => '1 h', request => '1');
	SELECT idem_checkpoint('s', 'plans-000000000' || :n, 'a') > idem_heartbeat('s', 'plans-000000000' || :n, '1 min');
	SELECT idem_fail('s', 'plans-000000000' || :n);
	SELECT outcome FROM idem_claim('s', 'plans-000000000' || :n);
	SELECT idem_complete('s', 'plans-000000000' || :n, 200);
	SELECT state FROM idem_lookup('s', 'plans-000000000' || :n);
	SELECT idem_erase('s', 'plans-000000000' || :n);
	SELECT idem_forget('s', 'plans-000000000' || :n);
	SELECT outcome FROM idem_claim_many('s', ARRAY['plans-000000000' || :n]);
	SELECT idem_release('s', 'plans-000000000' || :n);
	SELECT count(*) FROM idem_resume();
	SELECT idem_once('s', 't' || :n), count(idem_once_at('s', 't' || :n)) FROM idem_once_many('s', '{a,b}');
	SELECT outcome FROM idem_try_append('a', 'c', :n);
	SELECT idem_last_client_seq('a', 'c');
	SELECT is_active FROM idem_set('u', 'post', 'e', 'like', true, 2 * :n, '{dislike}');
	SELECT is_active FROM idem_toggle('u', 'post', 'e', 'like', 2 * :n + 1);
	SELECT idem_is_active('u', 'post', 'e', 'like'), count(*) FROM idem_action_states('u', 'post', '{e}');
	SELECT idem_forget_user('u');
	SELECT count(idem_publish('t', '1', k)) FROM unnest('{k,k,NULL}'::text[]) AS k;
	SELECT count(*) FROM idem_publish_many('{t}', '{1}');
	SELECT array_agg(id) AS ids FROM idem_outbox_take() \\gset
	SELECT idem_outbox_extend(:'ids'), idem_outbox_release(:'ids');
	SELECT array_agg(id) AS ids, min(id) AS first, max(id) AS last FROM idem_outbox_take() \\gset
	SELECT idem_outbox_nack(:first, 'no'), idem_outbox_fail(:last, 2, 'no'), idem_outbox_ack(:'ids');
	SELECT idem_outbox_requeue('{1}');
	SELECT keys_deleted FROM idem_cleanup();};
my $session = session($node, 'restored');
$session->run("SET search_path = idem;\nBEGIN;\n\\set n 1\n$calls COMMIT");
$node->safe_psql('restored', 'VACUUM ANALYZE');
$session->run("BEGIN;\n\\set n $_\n$calls COMMIT") foreach 2 .. 9;
$session->run("BEGIN;\n\\set n 10\n$calls");
is( $session->run(q{SELECT string_agg(relname, ' ') FROM pg_stat_xact_user_tables WHERE schemaname = 'idem' AND relname !~ 'installation' AND seq_scan > 0}),
	'', 'sequential scans of a session that began while the tables had one page');
$session->quit;

#
# Many calls wait for a transaction that rolls back.  Each of them gets its answer
# in turn, and none passes the lock on before it has looked.
#
my @waiting = map { session($node, 'shop') } 1 .. 20;
foreach (
	[ q{SELECT outcome FROM idem_claim('s', 'many-wait-for-this-one')},
		q{WITH c AS MATERIALIZED (SELECT * FROM idem_claim('s', 'many-wait-for-this-one', wait => '60 s'))
			SELECT outcome FROM c WHERE outcome <> 'new' OR idem_complete('s', 'many-wait-for-this-one', 200)},
		'new' . ' replay' x 19 ],
	[ q{SELECT outcome FROM idem_try_append('waited for', 'c', 1)}, q{SELECT outcome FROM idem_try_append('waited for', 'c', 1, wait => '60 s')}, 'appended' . ' duplicate' x 19 ])
{
	my ($call, $waiting_call, $answers) = @$_;
	my $first = session($node, 'shop');
	$first->run("SET search_path = idem; BEGIN; $call");
	$_->run('SET search_path = idem') foreach @waiting;
	$_->send($waiting_call) foreach @waiting;
	wait_for_block($node, map { $_->pid } @waiting);
	$first->run('ROLLBACK');
	is(join(' ', sort map { $_->result } @waiting), $answers, "20 sessions wait: $call");
	$first->quit;
}
$_->quit foreach @waiting;

#
# A large request that another transaction holds
#
by('installer', 'shop', q{
	INSERT INTO idem_keys (claim_token, created_at, lease_expires_at, resume_at, expires_at, attempt, state, scope, key, request)
		SELECT n, now(), now(), now() + n * '1 us'::interval, now() + '1 h', 1, 'started', 'resumed', n, to_jsonb(repeat('x', CASE n WHEN 2 THEN 5000000 ELSE 1 END))
			FROM generate_series(1, 3) AS n;});
my $worker = session($node, 'shop');
$worker->run(q{BEGIN; SELECT FROM idem.idem_keys WHERE scope = 'resumed' AND key = '2' FOR UPDATE});
is(by('installer', 'shop', q{SELECT string_agg(key, ',') FROM idem_resume(scopes => '{resumed}')}), '1,3', 'its size does not limit what idem_resume returns');
$worker->quit;

#
# Canceled claims
#
$node->psql('shop', join('', map { "SET statement_timeout = '@{[ 5 + 2 * $_ ]} ms';\nSELECT count(*) FROM idem_claim_many('s', ARRAY(SELECT 'canceled-$_-' || n FROM generate_series(100001, 100500) AS g (n)));\n" } 1 .. 30)
	  . "RESET statement_timeout; SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();",
	stdout => \my $output, on_error_stop => 0, connstr => $node->connstr('shop') . " options='-c search_path=idem'");
is($output =~ s/.*\n//sr, 0, 'a batch that is canceled keeps no lock');

# Beside a transaction with 500 keys, which does not keep the lock of each
my ($crowd, $claimer, $canceler) = map { session($node, 'shop') } 1 .. 3;
my $claimer_pid = $claimer->pid;
my %outcomes;

$_->run('SET search_path = idem') foreach $crowd, $claimer;
$crowd->run(q{BEGIN; SELECT count(*) FROM idem_claim_many('s', ARRAY(SELECT 'large-crowd-' || n FROM generate_series(100001, 100500) AS g (n)))});
$canceler->send(qq{DO \$\$
	BEGIN
		FOR n IN 1 .. 2200 LOOP
			PERFORM pg_cancel_backend($claimer_pid), pg_sleep(random() * 0.004);
		END LOOP;
	END \$\$});
$outcomes{ $claimer->run(q{SELECT outcome FROM idem_claim('s', 'large-crowd-100500')}) }++ foreach 1 .. 900;
$canceler->result;
note(join(', ', map { "$outcomes{$_} times $_" } sort keys %outcomes));
is($claimer->run(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()}),
	0, 'claims that are canceled beside a large batch keep no lock');
$crowd->run('ROLLBACK');
is($node->safe_psql('shop', q{SET search_path = idem; SELECT outcome FROM idem_claim('s', 'large-crowd-100500')}), 'new', 'and hold no key');

# A trigger stands for what other sessions do between the steps of such a claim.
by('installer', 'shop', q{
	CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('idem.idem_claim_tokens') WHERE NEW.key ~ 'another-draws';
		PERFORM pg_sleep(2) WHERE NEW.key ~ 'another-locks';
		RETURN NEW;
	END $$;
	CREATE TRIGGER pause BEFORE INSERT ON idem_keys FOR EACH ROW WHEN (NEW.key ~ '^another') EXECUTE FUNCTION pause();});
my $lock_of = q{FROM (SELECT 478, idem.idem_p_lock_number(seed, 's', 'another-locks-0001') AS number FROM idem.idem_p_installation) AS i (class, number)};
$crowd->run(q{BEGIN; SELECT count(*) FROM idem_claim_many('s', ARRAY(SELECT 'large-crowd-' || n FROM generate_series(100001, 100500) AS g (n)))});
my $token = $crowd->run(q{SELECT claim_token FROM idem_claim('s', 'another-draws-0001')});
is($crowd->run(q{SELECT claim_token, last_value FROM idem_keys, idem_claim_tokens WHERE key = 'another-draws-0001'}),
	"$token|$token", 'a token that another claim draws before the insertion is lower');
$crowd->send(q{SELECT outcome FROM idem_claim('s', 'another-locks-0001')});
$node->poll_query_until('shop', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'});
$claimer->run("SELECT pg_advisory_lock(class, number) $lock_of");
is($crowd->result, 'in_progress', 'if a claim has the lock of the key after the insertion, it has the key');
is($crowd->run(q{SELECT count(*) FROM idem_keys WHERE key = 'another-locks-0001'}), 0, 'and nothing is inserted');
my $drawn = $crowd->run('SELECT last_value FROM idem_claim_tokens');
is($crowd->run(q{SELECT outcome FROM idem_claim('s', 'another-locks-0001')}), 'in_progress', 'the same before the insertion');
is($crowd->run('SELECT last_value FROM idem_claim_tokens'), $drawn, 'which then does not begin');
$claimer->run("SELECT pg_advisory_unlock(class, number) $lock_of");
is($crowd->run(q{SELECT outcome FROM idem_claim('s', 'another-locks-0001')}), 'new', 'and when it has ended, not any more');
$crowd->run('ROLLBACK');
by('installer', 'shop', 'DROP TRIGGER pause ON idem_keys; DROP FUNCTION pause()');
$_->quit foreach $crowd, $claimer, $canceler;

#
# An extension, made by a superuser that is not the owner
#
$node->safe_psql('shop', q{CREATE EXTENSION idempotency SCHEMA idem VERSION 'unpackaged'; ALTER EXTENSION idempotency UPDATE TO '1.0-portable'});
is( by('installer', 'shop', q{
		DELETE FROM idem_outbox;
		SELECT FROM idem_configure('max_lease', '14 h');
		SELECT FROM idem_publish('t', '1', 'k');
		SELECT FROM idem_publish('t', '2', 'k');
		SELECT count(*) FROM idem_outbox_take(1);
		SELECT count(*) FROM idem_outbox_take(1);
		SELECT idem_outbox_ack(ARRAY(SELECT min(id) FROM idem_outbox));
		SELECT payload FROM idem_outbox_take(1);}),
	"1\n0\n1\n2", 'as an extension, the functions can use what the script has created');
is(by('tenant', 'shop', q{SELECT outcome FROM idem_claim('s', 'as-an-extension-1', lease => '14 h')}), 'new', 'for other roles, too');

done_testing();
