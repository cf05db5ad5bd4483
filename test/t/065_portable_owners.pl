# The functions of the portable edition have the rights of their owner.  The owner of a
# database or of a schema, who is no superuser, does not become one through them, nor
# through the scripts that change the edition.

use IdempotencyTest;

my $node = new_node('owners');
my $script = 'portable/build/idempotency.sql';

$node->safe_psql('postgres', 'CREATE ROLE tenant LOGIN');

sub by
{
	my ($role, $sql, @options) = @_;
	my (undef, undef, $errors) = $node->psql('shop', $sql, on_error_stop => 0, connstr => $node->connstr('shop') . " user=$role", @options);

	return $errors;
}

# A new database of the tenant
sub new_database
{
	$node->safe_psql('postgres', 'DROP DATABASE IF EXISTS shop');
	$node->safe_psql('postgres', 'CREATE DATABASE shop OWNER tenant');
	by('tenant', 'CREATE FUNCTION public.attack() RETURNS void LANGUAGE plpgsql AS $$ BEGIN ALTER ROLE tenant SUPERUSER; EXCEPTION WHEN insufficient_privilege THEN END $$');
	return;
}

sub install
{
	my ($role, $home) = @_;

	$node->command_ok([ 'psql', '-X', '-q', '-d', $node->connstr('shop') . " user=$role", '-v', 'schema=' . ($home || 'idem'), '-f', $script ], "the script, by $role");
	return;
}

# The result of idem_health for the tables and the rights of their owner
sub reported
{
	my ($home) = @_;

	return $node->safe_psql('shop', "SELECT status || ': ' || detail FROM $home.idem_health() WHERE check_name = 'tables'");
}

sub is_closed
{
	my ($home, $name) = @_;

	is(reported($home), 'ok: all tables and sequences can be used', "$name: idem_health reports no role");
	return;
}

# A role can get the rights of the functions' owner, until the statement that idem_health names.
sub is_open
{
	my ($home, $role, $name) = @_;
	my $report = reported($home);
	my ($remedy) = $report =~ /^critical: \Q$role\E can get all rights of role "postgres", which owns the functions: ([^;]*); calls/;

	ok($remedy, "$name: idem_health reports it") or diag($report);
	by('postgres', $remedy);
	is_closed($home, $remedy);
	return;
}

sub is_harmless
{
	my ($name) = @_;

	is($node->safe_psql('postgres', q{SELECT rolsuper FROM pg_roles WHERE rolname = 'tenant'}), 'f', $name);
	$node->safe_psql('postgres', 'ALTER ROLE tenant NOSUPERUSER');
	return;
}

my $extension = q{CREATE EXTENSION idempotency SCHEMA %s VERSION '1.0-portable'};
my $schema = 'CREATE SCHEMA idem; ';
my @ways = (
	[ 'an extension of the owner', 'idem', sub { by('tenant', $schema . sprintf($extension, 'idem')) } ],
	[ q{a superuser's extension in the owner's schema}, 'idem', sub { by('tenant', $schema); by('postgres', sprintf($extension, 'idem')) } ],
	[ q{the owner's extension in schema public}, 'public', sub { by('tenant', sprintf($extension, 'public')) } ],
	[ q{a superuser's extension in schema public}, 'public', sub { by('postgres', sprintf($extension, 'public')) } ]);

foreach (@ways)
{
	my ($way, $home, $install) = @$_;

	# A row of another table has types with casts.
	new_database();
	$install->();
	is_closed($home, $way);
	by('tenant', qq{
		CREATE SCHEMA m;
		CREATE TYPE m.trick AS (a int);
		CREATE FUNCTION m.cast(m.trick) RETURNS text LANGUAGE sql AS 'SELECT public.attack(); SELECT ''x''';
		CREATE CAST (m.trick AS text) WITH FUNCTION m.cast(m.trick) AS IMPLICIT;
		CREATE TABLE m.t (name m.trick, value text);
		CREATE TRIGGER t BEFORE INSERT ON m.t FOR EACH ROW EXECUTE FUNCTION $home.idem_p_replace_setting();
		SELECT FROM $home.idem_configure('max_attempts', '9');
		INSERT INTO m.t VALUES (ROW(1), 'x');});
	is_harmless("$way: the triggers of settings do not read another table's row");

	# The bodies call functions by the name of the schema.
	my $answer = $node->safe_psql('shop', "SELECT $home.idem_last_client_seq('a', 'c')", connstr => $node->connstr('shop') . ' user=tenant');
	is($answer, '0', "$way: the database's owner calls functions");
	by('tenant', qq{
		ALTER SCHEMA $home RENAME TO elsewhere;
		CREATE SCHEMA $home;
		CREATE TABLE $home.idem_client_sequences (aggregate text, client_id text, last_client_seq bigint);
		CREATE FUNCTION $home.idem_p_check_name(text, text) RETURNS void LANGUAGE sql AS 'SELECT public.attack()';
		CREATE OR REPLACE FUNCTION public.attack() RETURNS void LANGUAGE plpgsql AS \$\$ BEGIN ALTER ROLE tenant SUPERUSER; END \$\$;
		SELECT elsewhere.idem_last_client_seq('a', 'c');});
	is_harmless("$way: the functions in another schema of this name have the owner's rights only");
}

# The owner of a database gives it away.
new_database();
by('tenant', sprintf($extension, 'public'));
is($node->safe_psql('shop', q{SELECT DISTINCT proowner::regrole FROM pg_proc WHERE starts_with(proname, 'idem_')}), 'pg_database_owner', q{the owner's extension in schema public is that of the next owner});

# A superuser's own database
new_database();
$node->safe_psql('postgres', 'ALTER DATABASE shop OWNER TO postgres');
$node->safe_psql('postgres', 'GRANT CREATE ON DATABASE shop TO tenant');
by('postgres', 'CREATE ROLE lead; CREATE SCHEMA idem AUTHORIZATION lead; GRANT USAGE, CREATE ON SCHEMA idem TO tenant');
like(by('tenant', sprintf($extension, 'idem')), qr/ERROR:  the schema belongs to role lead/, q{no installation in another role's schema});
by('postgres', 'DROP SCHEMA idem; DROP ROLE lead');
by('postgres', sprintf($extension, 'public'));
is($node->safe_psql('shop', q{SELECT DISTINCT proowner::regrole FROM pg_proc WHERE starts_with(proname, 'idem_')}), 'pg_database_owner', q{in schema public, all belongs to the database's owner});

# The database gets another owner later.
$node->safe_psql('postgres', 'ALTER DATABASE shop OWNER TO tenant');
by('tenant', q{
	ALTER SCHEMA public RENAME TO elsewhere;
	CREATE SCHEMA public;
	CREATE TABLE public.idem_client_sequences (aggregate text, client_id text, last_client_seq bigint);
	CREATE FUNCTION public.idem_p_check_name(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN ALTER ROLE tenant SUPERUSER; END $$;
	SELECT elsewhere.idem_last_client_seq('a', 'c');});
is_harmless('the next owner of the database gets its own rights only');

# The database's owner can create functions in a superuser's schema.
new_database();
by('postgres', 'CREATE SCHEMA idem; GRANT USAGE, CREATE ON SCHEMA idem TO tenant');
like(by('postgres', sprintf($extension, 'idem')), qr/ERROR:  schema "idem" is not safe/, 'no installation where another role can capture calls');

new_database();
by('postgres', 'CREATE SCHEMA idem; GRANT USAGE, CREATE ON SCHEMA idem TO tenant');
by('tenant', sprintf($extension, 'idem') =~ s/-portable//r);
like(by('postgres', q{ALTER EXTENSION idempotency UPDATE TO '1.0-portable'}), qr/ERROR:  schema "idem" is not safe/, 'nor a change of the edition, if that role has installed it');

# The view of the members belongs to the installer.
new_database();
install('tenant');
by('tenant', q{
	DO $$ BEGIN
		EXECUTE 'CREATE OR REPLACE VIEW idem.idem_p_member AS SELECT m.* FROM (' || rtrim(pg_get_viewdef('idem.idem_p_member'), ';') || ') AS m, public.attack()';
	END $$;
	CREATE EXTENSION idempotency SCHEMA idem VERSION 'unpackaged';
	ALTER EXTENSION idempotency UPDATE TO '1.0-portable';});
is_harmless('an installation becomes an extension with its owner\'s rights');

# Only a superuser's tables become those of the C edition: others can have triggers and rules.
new_database();
install('tenant');
by('postgres', q{
	CREATE EXTENSION idempotency SCHEMA idem VERSION 'unpackaged';
	ALTER EXTENSION idempotency UPDATE TO '1.0-portable';});
like(by('postgres', q{ALTER EXTENSION idempotency UPDATE TO '1.0'}),
	qr/ERROR:  the installation of role tenant cannot become the C edition/, q{the owner's installation stays in its edition});
new_database();
$node->safe_psql('postgres', 'ALTER DATABASE shop OWNER TO postgres');
by('postgres', sprintf($extension, 'public') . q{; ALTER EXTENSION idempotency UPDATE TO '1.0'});
is($node->safe_psql('shop', q{SELECT extversion, array_agg(DISTINCT proowner::regrole) FROM pg_extension, pg_proc WHERE extname = 'idempotency' AND starts_with(proname, 'idem_') GROUP BY 1}),
	'1.0|{postgres}', q{the functions of the C edition are a superuser's});
$node->safe_psql('postgres', 'ALTER DATABASE shop OWNER TO tenant');
is(by('tenant', q{SELECT FROM idem_health(); SELECT FROM idem_cleanup(); SELECT FROM idem_grant('tenant')}), '', q{and the database's owner is an administrator});

# A superuser takes a database over, in which its former owner has left a trigger.
new_database();
by('postgres', sprintf($extension, 'public'));
by('tenant', q{
	CREATE FUNCTION attack_of_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM public.attack(); RETURN NULL; END $$;
	CREATE TRIGGER attack AFTER UPDATE ON idem_outbox FOR EACH STATEMENT EXECUTE FUNCTION attack_of_trigger();});
$node->safe_psql('postgres', 'ALTER DATABASE shop OWNER TO postgres');
like(by('postgres', q{ALTER EXTENSION idempotency UPDATE TO '1.0'}),
	qr/ERROR:  the installation of role tenant cannot become the C edition/, 'nor does one with a trigger of another role');

# An extension without members, whose names are those of other objects
new_database();
by('tenant', q{
	CREATE SCHEMA idem;
	CREATE EXTENSION idempotency SCHEMA idem VERSION '1.0-portable';
	DO $$ DECLARE d record; BEGIN
		FOR d IN SELECT (pg_identify_object(classid, objid, 0)).* FROM pg_depend WHERE deptype = 'e' AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
		LOOP EXECUTE format('ALTER EXTENSION idempotency DROP %s %s', CASE WHEN d.type = 'composite type' THEN 'TYPE' ELSE d.type END, d.identity); END LOOP;
	END $$;
	ALTER TABLE idem.idem_p_configuration RENAME TO c;
	CREATE VIEW idem.idem_p_configuration AS SELECT 'x' AS name, public.attack()::text AS value;});
like(by($_, q{ALTER EXTENSION idempotency UPDATE TO '1.0'}),
	qr/ERROR:  the installation of role tenant cannot become the C edition/, "an extension without members stays in its edition, for $_") foreach 'tenant', 'postgres';

# An extension without objects needs no privilege.
new_database();
install('tenant');
$node->safe_psql('postgres', 'CREATE ROLE guest LOGIN');
like(by('guest', q{CREATE EXTENSION idempotency SCHEMA public VERSION 'unpackaged'}), qr/ERROR:  schema public has no installation of this role/, 'no extension without an installation');

# The owner of the database can set search_path for the role that runs the script.
new_database();
by('tenant', q{
	CREATE SCHEMA evil;
	GRANT USAGE ON SCHEMA evil TO PUBLIC;
	CREATE FUNCTION evil.eq(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM public.attack(); RETURN false; END $$;
	CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
	CREATE OPERATOR evil.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
	ALTER DATABASE shop SET search_path = evil, pg_catalog;});
install('postgres');
is_harmless('the script uses no operators of search_path');

# The script makes nothing where another role could replace its functions.
foreach my $state ('CREATE SCHEMA idem AUTHORIZATION tenant', 'CREATE SCHEMA idem; GRANT CREATE ON SCHEMA idem TO tenant',
	'ALTER SCHEMA public RENAME TO idem', 'ALTER SCHEMA public RENAME TO idem; ALTER DATABASE shop OWNER TO postgres')
{
	new_database();
	by('postgres', $state);
	$node->command_fails_like([ 'psql', '-X', '-q', '-d', $node->connstr('shop') . ' user=postgres', '-v', 'schema=idem', '-f', $script ],
		qr/schema "idem" is not safe/, "no installation by a superuser after $state");
}

# The rights of the functions' owner
foreach ('postgres', 'tenant')
{
	new_database();
	install($_);
	is_closed('idem', "the script, by $_");
}
my $dump = $node->basedir . '/idem.dump';
$node->command_ok([ 'pg_dump', '-Fc', '-d', $node->connstr('shop'), '-n', 'idem', '-f', $dump ], q{the owner's installation is dumped});
new_database();
by('tenant', $schema);
$node->command_ok([ 'pg_restore', '--no-owner', '-n', 'idem', '-d', $node->connstr('shop'), $dump ], 'and restored by a superuser');
is_open('idem', 'role "tenant"', q{a superuser's functions in the owner's schema});

new_database();
by('postgres', 'CREATE SCHEMA idem; ' . sprintf($extension, 'idem'));
is_closed('idem', q{a superuser's extension in its own schema});
foreach (
	[ 'PUBLIC', 'GRANT CREATE ON SCHEMA idem TO PUBLIC' ],
	[ 'role "tenant"', 'GRANT CREATE ON SCHEMA idem TO tenant' ],
	[ 'role "tenant"', 'GRANT CREATE ON SCHEMA idem TO pg_database_owner' ],
	[ 'role "tenant"', 'ALTER SCHEMA idem OWNER TO tenant' ],
	[ 'role "tenant"', q{CREATE FUNCTION public.t() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; ALTER FUNCTION public.t() OWNER TO tenant;
		CREATE TRIGGER t BEFORE INSERT ON idem.idem_tokens FOR EACH ROW EXECUTE FUNCTION public.t()} ])
{
	by('postgres', $_->[1]);
	is_open('idem', $_->[0], $_->[1]);
}
by('postgres', 'GRANT CREATE ON SCHEMA idem TO tenant, PUBLIC');
is($node->safe_psql('shop', 'SELECT count(*) - count(DISTINCT (name, labels)) FROM idem.idem_metric_samples()'), '0', 'two reports are one sample');

# Other functions in the schema
new_database();
by('tenant', $schema . q{CREATE EXTENSION idempotency SCHEMA idem VERSION '1.0';
	CREATE FUNCTION idem.idem_attack() RETURNS void LANGUAGE sql SECURITY DEFINER AS 'SELECT public.attack()';});
by($_, q{ALTER EXTENSION idempotency UPDATE TO '1.0-portable'}) foreach 'tenant', 'postgres';
is($node->safe_psql('shop', 'SELECT extversion FROM pg_extension WHERE extname = $$idempotency$$'), '1.0-portable', q{a superuser changes the owner's extension to the portable edition});
by('tenant', 'SELECT idem.idem_attack()');
is_harmless('functions that are no members keep their owner');
is($node->safe_psql('shop', 'SELECT idem.idem_last_client_seq($$a$$, $$c$$)', connstr => $node->connstr('shop') . ' user=tenant'), '0', 'who owns the others, too');

done_testing();
