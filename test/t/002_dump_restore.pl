# pg_dump and restore: every record answers the same afterwards, claim tokens
# keep increasing, privileges survive.

use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

my $node = new_node('dump');
my $dumps = $node->basedir;

$node->safe_psql('postgres',
	'CREATE ROLE shop LOGIN; CREATE ROLE app LOGIN; CREATE ROLE stranger LOGIN');

# Everything a caller can be told without changing anything.  idem_claim is
# rolled back, so that an answer of "new" leaves the records as they were; the
# token of such a claim is left out, since it is a different one each time.
my $answers = <<'SQL';
SET timezone = 'UTC';
SELECT * FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_lookup(scope, key) ORDER BY scope, key;
SELECT * FROM idem_keys ORDER BY scope, key;
SELECT * FROM idem_action_versions ORDER BY user_id, entity_type, entity_id;
SELECT * FROM idem_user_actions ORDER BY user_id, entity_type, entity_id, action_type;
SELECT user_id, entity_type, entity_id, action_type,
	idem_is_active(user_id, entity_type, entity_id, action_type)
FROM idem_user_actions ORDER BY 1, 2, 3, 4;
BEGIN;
SELECT k.scope, k.key, c.outcome, c.claim_token > 0, c.attempt, c.response_status,
	c.response_headers, c.response_body, c.response_bytes, c.recovery_point, c.recovery_state,
	CASE WHEN c.outcome <> 'new' THEN c.lease_expires_at END,
	CASE WHEN c.outcome <> 'new' THEN c.expires_at END
FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_claim(k.scope, k.key) AS c ORDER BY k.scope, k.key;
ROLLBACK;
SELECT outcome FROM idem_claim('shop', 'text-000000000000001', '\x01');
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', '\x01');
SET idempotency.expired_key_policy = reject;
SELECT outcome FROM idem_claim('shop', 'expired-000000000001');
SELECT * FROM idem_try_advance('u', 'post', '1', 99);
SELECT * FROM idem_set('u', 'post', '2', 'like', false, 6);
SELECT * FROM idem_toggle('u', 'post', '2', 'dislike', 7);
SQL

# One record of each kind, with values that text formats could spoil.
my $fill = <<'SQL';
SELECT idem_grant('app');
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', '\xab', ttl => '1 day', lease => '1 hour');
SELECT idem_checkpoint('shop', 'live-000000000000001', 'paid', '{"b":1,  "a":[1.0, "\\u00e9"]}',
	lease => '1 hour', claim_token => claim_token) IS NOT NULL
FROM idem_keys WHERE key = 'live-000000000000001';
SELECT outcome, idem_complete('shop', k, 201, E'tab\t backslash \\ quote '' \n\\.\n',
	'{"Content-Type": "text/plain",  "x": "\\u00e9"}', claim_token)
FROM (VALUES ('text-000000000000001')) AS v (k), idem_claim('shop', k, '\xcd');
SELECT outcome, idem_complete('shop', k, 200, decode('00ff5c27', 'hex'), claim_token => claim_token)
FROM (VALUES ('bytes-00000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete('shop', k, 200, repeat('long ', 50000), claim_token => claim_token)
FROM (VALUES ('long-000000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete(s, k, 204, claim_token => claim_token)
FROM (VALUES (E'tab\t and \\back "quoted"', 'empty-00000000000001')) AS v (s, k), idem_claim(s, k);
SELECT outcome, idem_checkpoint('shop', k, 'half', '{"n": 1}', claim_token => claim_token) IS NOT NULL,
	idem_fail('shop', k, 'card declined', claim_token)
FROM (VALUES ('failed-0000000000001')) AS v (k), idem_claim('shop', k, '\xef');
SELECT outcome, idem_complete('shop', k, 200, 'personal data', claim_token => claim_token), idem_erase('shop', k)
FROM (VALUES ('erased-0000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete('shop', k, 200, 'gone', claim_token => claim_token)
FROM (VALUES ('expired-000000000001')) AS v (k), idem_claim('shop', k, ttl => '0.2 seconds');
SELECT outcome FROM idem_claim('shop', 'abandoned-0000000001', '\xaa', lease => '0');
SELECT * FROM idem_try_advance('u', 'post', '1', 100);
SELECT * FROM idem_set('u', 'post', '2', 'like', true, 7, '{dislike}');
SELECT * FROM idem_set('u', 'post', '3', 'like', true, 8);
SELECT * FROM idem_set('u', 'post', '3', 'like', false, 9);
-- The highest token belongs to no record.
SELECT outcome, idem_release('shop', k, claim_token)
FROM (VALUES ('released-00000000001')) AS v (k), idem_claim('shop', k);
SELECT pg_sleep(0.25);
SQL

# The values that come back must be the right ones, not only the same ones.
my $expected_outcomes = <<'OUTCOMES';
abandoned-0000000001 new 2
bytes-00000000000001 replay
empty-00000000000001 replay
erased-0000000000001 erased
expired-000000000001 new 1
failed-0000000000001 new 2
live-000000000000001 in_progress
long-000000000000001 replay
text-000000000000001 replay
OUTCOMES
my $outcomes = <<'SQL';
BEGIN;
SELECT k.key || ' ' || c.outcome || coalesce(' ' || c.attempt, '')
FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_claim(k.scope, k.key) AS c ORDER BY 1;
ROLLBACK;
SQL
chomp $expected_outcomes;

# What roles may do, as their calls end.
sub privileges
{
	my ($database, $schema) = @_;
	my $result = '';

	foreach my $call (
		"SELECT * FROM $schema.idem_claim('shop', 'text-000000000000001')",
		"SELECT * FROM $schema.idem_set('u', 'post', '1', 'like', true, 1)",
		"CREATE FUNCTION pg_temp.handler(jsonb) RETURNS $schema.idem_response
			LANGUAGE sql AS 'SELECT NULL::$schema.idem_response'",
		"SELECT $schema.idem_forget('shop', 'no-such-key-00000001')",
		"SELECT * FROM $schema.idem_keys",
		"DELETE FROM $schema.idem_keys",
		"SELECT nextval('$schema.idem_claim_tokens')",
		"SELECT $schema.idem_grant('stranger')")
	{
		foreach my $role ('app', 'stranger')
		{
			my ($code, undef, $stderr) = $node->psql(
				$database, "\\set VERBOSITY sqlstate\n$call",
				extra_params => [ '-U', $role ]);

			$result .= $code == 0 ? 'ok ' : $stderr =~ /ERROR:\s+(\w{5})/ ? "$1 " : $stderr;
		}
	}
	chop $result;
	return $result;
}

# app has what idem_grant gives, and nothing else; strangers have nothing.
my $expected_privileges =
  'ok 42501 ok 42501 ok 42501 42501 42501 42501 42501 42501 42501 42501 42501 42501 42501';

# Make a database whose search path leads to the extension's schema.
sub create_database
{
	my ($database, $schema, $owner) = @_;

	$owner = $owner ? "OWNER $owner" : '';
	$node->safe_psql('postgres',
		"CREATE DATABASE $database TEMPLATE template0 $owner;
		 ALTER DATABASE $database SET search_path = $schema, public");
	return;
}

# Fill factors, and what autovacuum goes by.
my $options = "SELECT relname, reloptions FROM pg_class WHERE relname LIKE 'idem\\_%' AND relkind = 'r' ORDER BY relname";

# All the tests of one restored database.
sub check_restored
{
	my ($title, $database, $schema, $source, $max_token, $granter) = @_;

	$granter = 'NONE' unless defined $granter;

	my $live = "'shop', 'live-000000000000001'";

	is($node->safe_psql($database, $answers), $node->safe_psql($source, $answers),
		"$title: everything answers the same");
	is($node->safe_psql($database, $outcomes), $expected_outcomes,
		"$title: namely right");
	is(privileges($database, $schema), $expected_privileges, "$title: grants survive, and no others are made");
	is( $node->safe_psql($database, $options), $node->safe_psql($source, $options),
		"$title: the tables have their storage parameters");

	is( sqlstate_of($node,
			"SELECT idem_complete($live, 200, 'x', claim_token => $max_token)", $database),
		'ID003', "$title: a live claim is refused to others");
	is( $node->safe_psql($database,
			"SELECT idem_complete($live, 200, 'carried over', claim_token => claim_token)
			 FROM idem_keys WHERE key = 'live-000000000000001';
			 SELECT outcome, response_body FROM idem_claim($live, '\\xab')"),
		"t\nreplay|carried over", "$title: its holder completes it");

	my $token = $node->safe_psql($database,
		"SELECT claim_token FROM idem_claim('shop', 'after-restore-000001')");
	cmp_ok($token, '>', $max_token, "$title: a new claim's token is above all that were given");
	is( $node->safe_psql($database,
			"SELECT outcome, claim_token > $token, recovery_point, recovery_state
			 FROM idem_claim('shop', 'failed-0000000000001')"),
		'new|t|half|{"n": 1}', "$title: a takeover's, too; and it resumes");
	is( $node->safe_psql($database,
			"SELECT * FROM idem_try_advance('u', 'post', '1', 101);
			 SELECT * FROM idem_toggle('u', 'post', '2', 'like', 8)"),
		"t|101\nf|8|t", "$title: actions go on");
	is( $node->safe_psql($database,
			"SET ROLE $granter;
			 SELECT idem_revoke('app');
			 SET ROLE app;
			 SELECT has_function_privilege('idem_lookup(text, text)', 'EXECUTE')"),
		"\nf", "$title: and grants can be taken back");
	return;
}

sub restore_plain
{
	my ($database, $file) = @_;
	my $status = system_log('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1',
		'-d', $node->connstr($database), '-f', $file);

	return is($status, 0, "$database: restored without an error");
}

#
# From and into the usual schema, and one of its own
#

foreach my $schema ('public', '"Idem Potency"')
{
	my $name = $schema eq 'public' ? 'usual' : 'own';
	my $source = "${name}_source";

	create_database($source, $schema);
	$node->safe_psql($source, "CREATE SCHEMA $schema") if $name eq 'own';
	$node->safe_psql($source, "CREATE EXTENSION idempotency SCHEMA $schema");
	$node->safe_psql($source, $fill);
	is($node->safe_psql($source, $outcomes), $expected_outcomes, "$name schema: before");
	is(privileges($source, $schema), $expected_privileges, "$name schema: privileges before");

	my $max_token = $node->safe_psql($source,
		'SELECT last_value FROM idem_claim_tokens');

	# A claim that is not committed is not in the dump.
	my $open = session($node, $source);
	$open->run("BEGIN; SELECT outcome FROM idem_claim('shop', 'uncommitted-00000001')");

	$node->command_ok(
		[ 'pg_dump', '-f', "$dumps/$name.sql", $node->connstr($source) ],
		"$name schema: dump as a script");
	$node->command_ok(
		[ 'pg_dump', '-Fc', '-f', "$dumps/$name.dump", $node->connstr($source) ],
		"$name schema: dump as an archive");
	$open->run('ROLLBACK');
	$open->quit;

	create_database("${name}_plain", $schema);
	restore_plain("${name}_plain", "$dumps/$name.sql");
	check_restored("$name schema, script", "${name}_plain", $schema, $source, $max_token);
	is( $node->safe_psql("${name}_plain",
			"SELECT outcome FROM idem_claim('shop', 'uncommitted-00000001')"),
		'new', "$name schema: what was not committed is not there");

	create_database("${name}_custom", $schema);
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', '-j2', '-d',
			$node->connstr("${name}_custom"), "$dumps/$name.dump"
		],
		"$name schema: archive restored without an error");
	check_restored("$name schema, archive", "${name}_custom", $schema, $source, $max_token);
}

#
# Into an install in another schema: only the data is taken along
#

my $max_token = $node->safe_psql('usual_source', 'SELECT last_value FROM idem_claim_tokens');

create_database('moved', 'elsewhere');
$node->safe_psql('moved',
	"CREATE SCHEMA elsewhere; CREATE EXTENSION idempotency SCHEMA elsewhere; SELECT idem_grant('app')");
$node->command_ok(
	[ 'pg_dump', '--data-only', '-f', "$dumps/data.sql", $node->connstr('usual_source') ],
	'moved: dump the data');

my $data = slurp_file("$dumps/data.sql");
$data =~ s/^(COPY |SELECT pg_catalog\.setval\(')public\./$1elsewhere./mg;
open my $handle, '>', "$dumps/moved.sql" or die $!;
print $handle $data;
close $handle or die $!;
restore_plain('moved', "$dumps/moved.sql");
check_restored('moved to another schema', 'moved', 'elsewhere', 'usual_source', $max_token);

#
# A database whose owner, no superuser, has installed the extension and
# granted.  The owner may dump it; a restore needs a superuser, because nobody
# else may write to the tables.
#

create_database('owned_source', 'public', 'shop');
$node->safe_psql('owned_source',
	"CREATE EXTENSION idempotency;\n$fill", extra_params => [ '-U', 'shop' ]);
is(privileges('owned_source', 'public'), $expected_privileges, 'owned: privileges before');
$max_token = $node->safe_psql('owned_source', 'SELECT last_value FROM idem_claim_tokens');
$node->command_ok(
	[
		'pg_dump', '-f', "$dumps/owned.sql",
		$node->connstr('owned_source') . ' user=shop'
	],
	'owned: dumped by the owner');

foreach my $name ('owned_directly', 'owned_prepared')
{
	create_database($name, 'public', 'shop');
	$node->safe_psql($name, 'CREATE EXTENSION idempotency',
		extra_params => [ '-U', 'shop' ])
	  if $name eq 'owned_prepared';
	restore_plain($name, "$dumps/owned.sql") or next;
	check_restored($name, $name, 'public', 'owned_source', $max_token, 'shop');
}

$node->stop;
done_testing();
