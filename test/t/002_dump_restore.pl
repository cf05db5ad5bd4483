# pg_dump and restore: every record answers the same afterwards, claim tokens
# keep increasing, privileges survive.

use IdempotencyTest;
use Records;

my $node = new_node('dump');
my $dumps = $node->basedir;

$node->safe_psql('postgres',
	'CREATE ROLE shop LOGIN; CREATE ROLE app LOGIN; CREATE ROLE stranger LOGIN');

# The results of calls by different roles.
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

	is($node->safe_psql($database, $keys_and_actions->{answers}), $node->safe_psql($source, $keys_and_actions->{answers}),
		"$title: everything answers the same");
	is($node->safe_psql($database, $keys_and_actions->{brief}), $keys_and_actions->{expected},
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

# Objects of users that depend on the functions and their result types.
my $users = <<'SQL';
CREATE SCHEMA users;
CREATE TABLE users.seen (claim idem_claim_result, records idem_lookup_result[], action idem_action_result);
INSERT INTO users.seen (records, action) VALUES (ARRAY[idem_lookup('shop', 'live-000000000000001')], (true, 1, true));
UPDATE users.seen SET claim.outcome = 'new', claim.attempt = 1;
CREATE VIEW users.record AS SELECT l, l.state FROM idem_lookup('shop', 'live-000000000000001') AS l;
CREATE VIEW users.records AS SELECT idem_lookup('shop', key) AS record, t.* FROM users.seen,
	(VALUES ('live-000000000000001')) AS k (key), LATERAL idem_once_many('users', ARRAY[key]) AS t (token);
CREATE FUNCTION users.claim(key text) RETURNS idem_claim_result LANGUAGE sql RETURN idem_claim('users', key);
CREATE FUNCTION users.append() RETURNS SETOF idem_append_result LANGUAGE sql
	BEGIN ATOMIC SELECT * FROM idem_try_append('users', 'c', 1); END;
SQL
my $users_answers = "BEGIN; SELECT (claim).outcome, (records[1]).state, (action).processed FROM users.seen;
	SELECT (l).state, state FROM users.record;
	SELECT (record).state, token FROM users.records;
	SELECT outcome FROM users.claim('key-of-users-000002'); SELECT outcome FROM users.append(); ROLLBACK";
my $users_expected = "new|started|t\ncompleted|completed\ncompleted|live-000000000000001\nnew\nappended";

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
	$node->safe_psql($source, $keys_and_actions->{fill});
	is($node->safe_psql($source, $keys_and_actions->{brief}), $keys_and_actions->{expected}, "$name schema: before");
	is(privileges($source, $schema), $expected_privileges, "$name schema: privileges before");
	$node->safe_psql($source, $users);

	my $max_token = $node->safe_psql($source,
		'SELECT last_value FROM idem_claim_tokens');

	# A claim that is not committed is not in the dump.
	my $open = session($node, $source);
	$open->run("BEGIN; SELECT outcome FROM idem_claim('shop', 'uncommitted-00000001')");

	$node->command_ok(
		[ 'pg_dump', '-f', "$dumps/$name.sql", $node->connstr($source) ],
		"$name schema: dump as a script");
	my @format = $name eq 'usual' ? ('-Fc') : ('-Fd', '-j2');
	$node->command_ok(
		[ 'pg_dump', @format, '-f', "$dumps/$name.dump", $node->connstr($source) ],
		"$name schema: dump as an archive (@format)");
	$open->run('ROLLBACK');
	$open->quit;

	create_database("${name}_plain", $schema);
	restore_plain("${name}_plain", "$dumps/$name.sql");
	check_restored("$name schema, script", "${name}_plain", $schema, $source, $max_token);
	is( $node->safe_psql("${name}_plain",
			"SELECT outcome FROM idem_claim('shop', 'uncommitted-00000001')"),
		'new', "$name schema: what was not committed is not there");
	is($node->safe_psql("${name}_plain", $users_answers), $users_expected,
		"$name schema, script: tables, views and functions of the users");

	create_database("${name}_archive", $schema);
	$node->command_ok(
		[
			'pg_restore', '--exit-on-error', '-j2', '-d',
			$node->connstr("${name}_archive"), "$dumps/$name.dump"
		],
		"$name schema: archive restored without an error");
	check_restored("$name schema, archive", "${name}_archive", $schema, $source, $max_token);
	is($node->safe_psql("${name}_archive", $users_answers), $users_expected,
		"$name schema, archive: tables, views and functions of the users");
}

#
# Into an install in another schema: only the data is taken along
#

my $max_token = $node->safe_psql('usual_source', 'SELECT last_value FROM idem_claim_tokens');

create_database('moved', 'elsewhere');
$node->safe_psql('moved',
	"CREATE SCHEMA elsewhere; CREATE EXTENSION idempotency SCHEMA elsewhere; SELECT idem_grant('app')");
$node->command_ok(
	[ 'pg_dump', '--data-only', '-N', 'users', '-f', "$dumps/data.sql", $node->connstr('usual_source') ],
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
	"CREATE EXTENSION idempotency;\n$keys_and_actions->{fill}", extra_params => [ '-U', 'shop' ]);
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
