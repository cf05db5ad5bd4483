# The portable edition, installed by psql: its exit status, two installations in one
# database, and dumps that are restored without privileges, or only with data.  What
# docs/portable.md says of pg_tle and PostgREST.

use IdempotencyTest;

my $node = new_node('portable');
my $script = 'portable/build/idempotency.sql';

$node->safe_psql('postgres', q{
	CREATE ROLE installer LOGIN;
	CREATE ROLE tenant LOGIN;
	CREATE DATABASE source OWNER installer;
	CREATE DATABASE two OWNER installer;
	CREATE DATABASE restored OWNER installer;
	CREATE DATABASE data_only OWNER installer;
	CREATE DATABASE managed OWNER installer;
});

# The exit status, output and errors of psql, called by the installer.
sub install
{
	my ($database, @arguments) = @_;
	my ($output, $errors) = ('', '');

	IPC::Run::run([ 'psql', '-X', '-q', '-d', $node->connstr($database) . ' user=installer', @arguments ],
		'>', \$output, '2>', \$errors);
	return ($? >> 8, $output, $errors);
}

sub by
{
	my ($role, $database, $sql) = @_;
	my ($code, $output, $errors) = $node->psql($database, "\\set VERBOSITY sqlstate\n$sql", connstr => $node->connstr($database) . " user=$role");

	return $code == 0 ? $output : $errors =~ /ERROR:\s+(\w{5})/ ? $1 : $errors;
}

#
# psql
#
my ($status, $output, $errors);
{
	local $ENV{PGOPTIONS} = '-c standard_conforming_strings=off';
	($status, $output, $errors) = install('source', '-v', 'schema=x', '-f', $script);
	is("$status $errors", '0 ', 'a session in which strings have escapes can run the script');
}
($status, $output, $errors) = install('source', '-v', 'schema=x', '-f', $script);
is($status, 3, 'a second installation fails, with an exit status');
like($errors, qr/already installed in schema "x"$/, 'and with a message that is not followed by the script');

($status) = install('two', '-v', 'schema=first', '-f', $script, '-c', '\unset schema', '-f', $script);
is("$status " . $node->safe_psql('two', q{SELECT string_agg(nspname, ',' ORDER BY nspname) FROM pg_namespace WHERE nspname IN ('first', 'idem')}),
	'0 first,idem', 'the schema of one run is not that of the next one in the same session');

#
# Two installations, whose tokens do not differ
#
is( by('installer', 'two', q{
		SELECT claim_token FROM first.idem_claim('s', 'two-installations-1');
		BEGIN;
		SELECT claim_token FROM idem.idem_claim('s', 'two-installations-2');
		SELECT first.idem_complete('s', 'two-installations-1', 200, 'x');
		COMMIT;}),
	'ID003', 'a claim in one installation is not taken for one in the other');

#
# A dump that is restored without privileges
#
is( by('installer', 'source', q{
		SELECT FROM x.idem_publish('t', '1');
		SELECT FROM x.idem_configure('key_format', 'uuid');
		SELECT FROM x.idem_configure('max_lease', '1 h');
		SELECT status FROM x.idem_health() WHERE check_name = 'tables';}),
	'ok', 'the source of the dumps');
my $dump = $node->basedir . '/source.dump';
$node->command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('source'), '-n', 'x', '-f', $dump ], 'it is dumped');
$node->command_ok([ 'pg_restore', '--no-owner', '--no-privileges', '-U', 'installer', '-d', $node->connstr('restored'), $dump ], 'and restored');
like( by('installer', 'restored', q{SELECT status, detail FROM x.idem_health() WHERE check_name = 'tables'}),
	qr/^critical\|PUBLIC can execute \d+ functions/, 'idem_health reports functions that PUBLIC can execute');
is(by('installer', 'restored', q{SELECT FROM x.idem_grant('tenant')}), '', 'a grant');
is( by('tenant', 'restored', $_->[0]), $_->[1], "after it: $_->[0]")
	foreach [ q{SELECT FROM x.idem_configure('key_format', 'token')}, 42501 ],
	[ q{SELECT FROM x.idem_outbox_take(10)}, 42501 ],
	[ q{SELECT FROM x.idem_forget('s', 'k')}, 42501 ],
	[ q{SELECT outcome FROM x.idem_claim('s', '6f9619ff-8b86-d011-b42d-00c04fc964ff')}, 'new' ];
is( by('installer', 'restored', q{SELECT status FROM x.idem_health() WHERE check_name = 'tables';
		SELECT status FROM x.idem_health() WHERE check_name = 'edition';}), "ok\nok", 'and idem_health reports none');

#
# Data that is restored into a new installation
#
($status) = install('data_only', '-v', 'schema=x', '-f', $script, '-c', q{SELECT FROM x.idem_configure('key_format', 'printable')});
is($status, 0, 'a new installation');
my $seed = q{SELECT encode(seed, 'hex') FROM x.idem_p_installation};
my $before = $node->safe_psql('data_only', $seed);
$node->command_ok([ 'pg_restore', '-a', '-U', 'installer', '-d', $node->connstr('data_only'), $dump ], 'data is restored into it');
is($node->safe_psql('data_only', $seed), $before, 'and it keeps its secret');
is( by('installer', 'data_only', q{SELECT count(*) > 0 FROM x.idem_metric_samples();
		SELECT payload FROM x.idem_outbox_take();
		SELECT x.idem_p_configured('key_format'), x.idem_p_configured('max_lease');}),
	"t\n1\nuuid|3600000", 'with the messages and the settings of the dump');
$node->safe_psql('data_only', q{
	ALTER TABLE x.idem_p_configuration DISABLE TRIGGER ALL;
	UPDATE x.idem_p_configuration SET value = 'token' WHERE name = 'key_format';
	ALTER TABLE x.idem_p_configuration ENABLE TRIGGER ALL;
});
like( by('installer', 'data_only', q{SELECT status, detail FROM x.idem_health() WHERE check_name = 'tables'}),
	qr/^critical\|settings differ from "idem_p_configuration"/, 'idem_health reports settings that were written without triggers');
is( by('installer', 'data_only', q{SELECT FROM x.idem_configure('max_lease', NULL); SELECT x.idem_p_configured('key_format')}),
	'token', 'and the next change puts all into effect');

#
# Settings, on the way to the C edition, which only a superuser's installation can go
#
$node->safe_psql('postgres', 'CREATE DATABASE superusers');
$node->command_ok([ 'psql', '-X', '-q', '-d', $node->connstr('superusers'), '-v', 'schema=x', '-f', $script ], 'an installation of a superuser');
(undef, undef, $errors) = $node->psql('superusers', q{
	SELECT FROM x.idem_configure('key_format', 'uuid');
	SELECT FROM x.idem_configure('max_lease', '1 h');
	CREATE EXTENSION idempotency SCHEMA x VERSION 'unpackaged';
	ALTER EXTENSION idempotency UPDATE TO '1.0-portable';
	ALTER EXTENSION idempotency UPDATE TO '1.0';});
like( $errors, qr/WARNING:.*ALTER DATABASE superusers SET idempotency\.key_format = 'uuid';\nALTER DATABASE superusers SET idempotency\.max_lease = '1 h';/s,
	'a change to the C edition warns of settings that end with it');
unlike($errors, qr/ERROR/, 'and happens');

#
# pg_tle gets the extension's script, and PostgREST a function of the page
#
install('managed', '-v', 'schema=idem', '-f', $script);
by('installer', 'managed', q{
	CREATE SCHEMA pgtle;
	CREATE TABLE installed (name text, version text, script text);
	CREATE FUNCTION pgtle.install_extension(name text, version text, description text, ext text, requires text[] DEFAULT NULL)
		RETURNS boolean LANGUAGE sql AS 'INSERT INTO installed VALUES (name, version, ext) RETURNING true'});
($status, $output, $errors) = install('managed', '-f', 'portable/build/idempotency-tle.sql');
is("$status $errors", '0 ', 'the file for pg_tle runs');
is(by('installer', 'managed', q{SELECT name || ' ' || version FROM installed}), 'idempotency 1.0-portable', 'and names the extension');
my $passed = by('installer', 'managed', 'SELECT script FROM installed');
my $expected = slurp_file('portable/build/idempotency--1.0-portable.sql') =~ s/^\\echo.*\n//mgr;
ok(join(' ', split(' ', $passed)) eq join(' ', split(' ', $expected)), 'and passes its script');

my ($recipe) = slurp_file('docs/portable.md') =~ /^(CREATE FUNCTION api\.place_order.*?^END \$\$;)$/ms;
by('installer', 'managed', qq{
	SELECT FROM idem.idem_grant('tenant');
	CREATE SCHEMA api;
	CREATE SCHEMA shop;
	GRANT USAGE ON SCHEMA api, shop TO tenant;
	CREATE FUNCTION shop.place_order(request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT request';
	$recipe});
is( by('tenant', 'managed', q{
		BEGIN;
		SET LOCAL request.jwt.claims = '{"sub": "alice"}';
		SET LOCAL request.headers = '{"idempotency-key": "order-00000000001"}';
		SELECT api.place_order('{"sku": 1}')::jsonb, current_setting('response.status');
		SELECT api.place_order('{"sku": 1}')::jsonb, current_setting('response.status');
		SELECT api.place_order('{"sku": 2}'), current_setting('response.status');
		COMMIT;}),
	qq({"sku": 1}|200\n{"sku": 1}|200\n"hash_conflict"|422), 'the function for PostgREST: the work, its replay, and a conflict');

done_testing();
