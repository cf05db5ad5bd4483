# From each released version to this one with ALTER EXTENSION UPDATE: the
# objects are those of a fresh install, and records, grants and sessions stay.
# Objects of the old version work with the new library.
#
# The scripts of released versions are frozen in released/.  With the directory
#
#	RELEASES=DIRECTORY		trees of releases, as test/cluster unpacks them from git's tags
#
# their libraries are tested, too.  The same test runs on the way from this
# version to a pretended next one, so that there is always one, and shows that
# differences between objects are found.

use File::Basename qw(basename dirname);
use IdempotencyTest;
use Objects;
use Records;

my $tree = $ENV{TESTDIR};
my @released = sort grep { -d } glob(($ENV{RELEASES} || '/nonexistent') . '/*');
my $settings = (run_command([ 'postgres', '--describe-config' ]))[0];
my ($place) = $settings =~ /^(extension_control_path|extension_destdir)\t/m
  or plan skip_all => 'this server has extensions in one place only';
my @make = ('make', '-s', '-j2', 'with_llvm=no', "PG_CONFIG=$ENV{PG_CONFIG}");

sub version_of
{
	my ($directory) = @_;

	return slurp_file("$directory/idempotency.control") =~ /^default_version = '(.*)'$/m ? $1 : die;
}

# Put a tree's extension where that of another version may lie, as a package does.
sub install
{
	my ($directory, $destdir) = @_;

	system_or_bail(@make, '-C', $directory, 'install', "DESTDIR=$destdir");
	return;
}

# A server that finds the extension in a directory of its own.
sub node_for
{
	my ($name, $destdir, $conf) = @_;
	my $sharedir = (run_command([ $ENV{PG_CONFIG}, '--sharedir' ]))[0];
	my $libdir = (run_command([ $ENV{PG_CONFIG}, '--pkglibdir' ]))[0];
	my $value = $place eq 'extension_destdir' ? $destdir : "$destdir$sharedir:\$system";

	my $node = new_node($name, conf => "$place = '$value'\ndynamic_library_path = '$destdir$libdir:\$libdir'\n$conf");
	$node->safe_psql('postgres', 'CREATE ROLE app LOGIN; CREATE ROLE shop LOGIN; CREATE ROLE stranger LOGIN');
	return $node;
}

# The databases before the extension is installed: the installer, and the
# schema; and default privileges, which must not matter.
my %databases = (
	superuser => { owner => 'postgres', schema => 'idem' },
	owner => { owner => 'shop', schema => 'idem' },
	public => { owner => 'shop', schema => 'public' });

sub create_database
{
	my ($node, $name, $kind, $version) = @_;
	my $database = $databases{$kind};
	my $clause = $version ? "VERSION '$version'" : '';

	$node->safe_psql('postgres', "CREATE DATABASE $name OWNER $database->{owner}");
	$node->safe_psql($name, <<"SQL");
SET ROLE $database->{owner};
CREATE SCHEMA IF NOT EXISTS $database->{schema};
ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO stranger;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO stranger;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO PUBLIC;
CREATE EXTENSION idempotency SCHEMA $database->{schema} $clause;
SQL
	$node->safe_psql('postgres', "ALTER DATABASE $name SET search_path = public, $database->{schema}");
	return;
}

sub same_objects
{
	my ($node, $one, $other, $title) = @_;
	my ($first, $second) = (objects($node, $one), objects($node, $other));
	my @differences = differences($first, $second);

	cmp_ok(scalar(keys %$first), '>', 200, "$title: objects, privileges and comments");
	is_deeply(\@differences, [], "$title: all the same")
	  or diag(map { my $name = substr $_, 2; "$_\n" . ($first->{$name} // '') . "\n---\n" . ($second->{$name} // '') . "\n" }
			@differences[ 0 .. ($#differences > 4 ? 4 : $#differences) ]);
	return;
}

# The results of an application role's calls.
my $calls = <<'SQL';
SET ROLE app;
SELECT outcome FROM idem_claim('rights', 'key-of-rights-00001');
SELECT idem_forget('rights', 'key-of-rights-00001');
SELECT count(*) FROM idem_keys;
SELECT idem_grant('stranger');
SELECT has_function_privilege('stranger', 'idem_lookup(text, text)', 'EXECUTE');
SQL

sub rights
{
	my ($node, $database) = @_;
	my ($code, $stdout, $stderr) = $node->psql($database, "\\set VERBOSITY sqlstate\nBEGIN;\n"
		  . $calls =~ s/^(.*;)$/SAVEPOINT s; $1\nROLLBACK TO s;/mgr =~ s/SAVEPOINT s; (SET ROLE app;)\nROLLBACK TO s;/$1/r
		  . 'ROLLBACK', on_error_stop => 0);

	return join ' ', $stdout =~ s/\s+/ /gr, $stderr =~ /ERROR:\s+(\w{5})/g;
}
my $rights = 'new f 42501 42501 42501';

# upgrade(NAME, OLD, NEW): all that is asked of the way from the version in one
# tree to that of another, both built.
sub upgrade
{
	my ($name, $old, $new) = @_;
	my ($from, $to) = (version_of($old), version_of($new));
	my $destdir = PostgreSQL::Test::Utils::tempdir();
	my $title = "$from to $to ($name)";

	install($old, $destdir);
	my $node = node_for("upgrade_$name" =~ s/\W/_/gr, $destdir, "shared_preload_libraries = ''");

	# A database that is used, and sessions that are at it.
	create_database($node, 'lived_in', 'owner');
	$node->safe_psql('lived_in', $_->{fill}) foreach $keys_and_actions, $streams;
	# Objects that users have created depend on it, and do not prevent the
	# update.
	$node->safe_psql('lived_in', <<'SQL');
CREATE FUNCTION public.half(text) RETURNS text LANGUAGE sql IMMUTABLE RETURN left($1, length($1) / 2);
CREATE INDEX by_half ON idem_keys (public.half(key));
REVOKE USAGE ON SCHEMA idem FROM pg_database_owner;
SQL
	my $schema_rights = $node->safe_psql('lived_in', "SELECT nspacl FROM pg_namespace WHERE nspname = 'idem'");
	is(rights($node, 'lived_in'), $rights, "$title: what a role may do before");
	my %answers = (keys => $node->safe_psql('lived_in', $keys_and_actions->{answers}),
		streams => $node->safe_psql('lived_in', $streams->{answers}));
	my ($busy, $idle) = map { session($node, 'lived_in', extra_params => [ '-U', 'app' ]) } 1 .. 2;
	foreach my $session ($busy, $idle)
	{
		$session->run("PREPARE claim AS SELECT outcome FROM idem_claim('shop', 'open-00000000000001')");
		$session->run("SELECT idem_is_active('u', 'post', '1', 'like')");
	}
	is($busy->run('BEGIN; EXECUTE claim'), 'new', "$title: a claim is open");
	create_database($node, "${_}_updated", $_) foreach sort keys %databases;

	# The new version's package is installed.
	install($new, $destdir);
	is($node->safe_psql('lived_in', $keys_and_actions->{answers}), $answers{keys},
		"$title: with the new library, the old functions answer the same");
	is($node->safe_psql('lived_in', $streams->{answers}), $answers{streams}, "$title: for streams, too");
	is($node->safe_psql('lived_in', $_->{brief}), $_->{expected}, "$title: namely right")
	  foreach $keys_and_actions, $streams;
	is(rights($node, 'lived_in'), $rights, "$title: what a role may do with the new library");
	create_database($node, 'old_again', 'owner', $from);
	$node->safe_psql('old_again', $_->{fill}) foreach $keys_and_actions, $streams;
	is($node->safe_psql('old_again', $_->{brief}), $_->{expected}, "$title: CREATE EXTENSION VERSION '$from' still works")
	  foreach $keys_and_actions, $streams;
	is($busy->run("SELECT idem_complete('shop', 'open-00000000000001', 200, 'done')"), 't',
		"$title: the open claim is completed by the library that its session has");

	# It is taken into use, by those who have installed it.  What holds a lock that
	# this needs ends first.
	my $updater = session($node, 'lived_in', extra_params => [ '-U', 'shop' ]);
	$updater->send('ALTER EXTENSION idempotency UPDATE');
	$idle->run("SELECT outcome FROM idem_claim('shop', 'meanwhile-0000000001')");
	is($busy->run('COMMIT'), '', "$title: its transaction commits");
	is($updater->result, '', "$title: ALTER EXTENSION UPDATE");
	$updater->quit;
	is($node->safe_psql('lived_in', "SELECT extversion FROM pg_extension WHERE extname = 'idempotency'"), $to,
		"$title: it is $to");
	is($_->run('EXECUTE claim'), 'replay', "$title: a session that was there goes on") foreach $busy, $idle;
	is($busy->run("SELECT outcome FROM idem_claim('shop', 'after-the-update-001')"), 'new', "$title: and claims");
	is($node->safe_psql('lived_in', "SELECT outcome FROM idem_claim('shop', 'after-the-update-001')"), 'in_progress',
		"$title: which a session with the new library sees");
	is($idle->run("SELECT idem_publish('later', '1') IS NOT NULL"), 't', "$title: and publishes");
	$_->quit foreach $busy, $idle;

	$node->safe_psql('lived_in', "SELECT idem_forget('shop', k)
		FROM unnest('{open-00000000000001,meanwhile-0000000001,after-the-update-001}'::text[]) AS k");
	is($node->safe_psql('lived_in', "SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{later}')"), '1',
		"$title: which the new library takes");
	is($node->safe_psql('lived_in', $keys_and_actions->{answers}), $answers{keys}, "$title: everything answers the same");
	is($node->safe_psql('lived_in', $keys_and_actions->{brief}), $keys_and_actions->{expected}, "$title: and answer right");
	is(rights($node, 'lived_in'), $rights, "$title: what a role may do afterwards");
	is($node->safe_psql('lived_in', "SELECT nspacl FROM pg_namespace WHERE nspname = 'idem'"), $schema_rights,
		"$title: and with the schema");

	# The objects, for each way to install it.
	foreach my $kind (sort keys %databases)
	{
		create_database($node, "${kind}_fresh", $kind);
		$node->safe_psql("${kind}_updated", "SET ROLE $databases{$kind}{owner}; ALTER EXTENSION idempotency UPDATE");
		same_objects($node, "${kind}_fresh", "${kind}_updated", "$title, installed by $databases{$kind}{owner} in $kind");
	}

	# A dump of what has been updated.
	$node->safe_psql('postgres', 'CREATE DATABASE restored OWNER shop');
	$node->safe_psql('postgres', 'ALTER DATABASE restored SET search_path = public, idem');
	my $dump = $node->basedir . '/dump.sql';
	system_or_bail($node->installed_command('pg_dump'), '-f', $dump, '-d', $node->connstr('lived_in'));
	system_or_bail('psql', '-X', '-q', '-o', '/dev/null', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('restored'), '-f', $dump);
	is($node->safe_psql('restored', $keys_and_actions->{brief}), $keys_and_actions->{expected}, "$title: its dump can be restored");
	is(rights($node, 'restored'), $rights, "$title: with all grants");
	return $node;
}

#
# From what is released to what is here
#

my @scripts = map { basename($_) } glob("$tree/released/*.sql");
note('trees of released versions: ', @released ? join(', ', map { basename($_) } @released) : 'none',
	'; frozen scripts: ', @scripts ? "@scripts" : 'none');
my $this = version_of($tree);
my ($last) = slurp_file("$tree/Makefile") =~ /^LAST_RELEASE =[ ]*(.*?)[ ]*$/m;
ok(-e "$tree/released/idempotency--$last.sql", "the script of LAST_RELEASE, $last, is in released/") if $last ne '';

# A version whose script is frozen is released: its SQL does not change any more.
foreach my $script (grep { /--\Q$this\E\.sql$/ } @scripts)
{
	is(slurp_file("$tree/$script"), slurp_file("$tree/released/$script"),
		"$script is what has been released; the first change of SQL begins the next version");
}

# The frozen scripts with this library, and the way from each of them.
foreach my $from (map { /^idempotency--([\d.]+)\.sql$/ && $1 ne $this ? $1 : () } @scripts)
{
	my $destdir = PostgreSQL::Test::Utils::tempdir();
	install($tree, $destdir);
	my $node = node_for("from_$from" =~ s/\W/_/gr, $destdir, "shared_preload_libraries = ''");
	foreach my $kind (sort keys %databases)
	{
		create_database($node, "${kind}_updated", $kind, $from);
		create_database($node, "${kind}_fresh", $kind);
	}
	$node->safe_psql('owner_updated', $_->{fill}) foreach $keys_and_actions, $streams;
	$node->safe_psql("${_}_updated", "SET ROLE $databases{$_}{owner}; ALTER EXTENSION idempotency UPDATE") foreach sort keys %databases;
	is($node->safe_psql('owner_updated', $_->{brief}), $_->{expected}, "$from to $this (scripts): records answer right")
	  foreach $keys_and_actions, $streams;
	same_objects($node, "${_}_fresh", "${_}_updated", "$from to $this (scripts), in $_") foreach sort keys %databases;
	$node->stop;
}

foreach my $old (@released)
{
	my $version = version_of($old);

	system_or_bail(@make, '-C', $old);
	is(slurp_file(-e "$tree/released/idempotency--$version.sql"
			? "$tree/released/idempotency--$version.sql" : "$tree/idempotency--$version.sql"),
		slurp_file("$old/idempotency--$version.sql"), basename($old) . ": the script of $version has not changed");
	next if $version eq version_of($tree);
	upgrade(basename($old), $old, $tree)->stop;
}

#
# From here to a pretended next version
#

my $next = PostgreSQL::Test::Utils::tempdir() . '/next';
mkdir $next;
system_or_bail('cp', '-a', (grep { -e } map { "$tree/$_" } 'Makefile', 'META.json', 'debian', 'idempotency.control', 'released', 'src'), $next);
system_or_bail(dirname(__FILE__) . '/next_version', $next);
is(slurp_file("$next/released/idempotency--" . version_of($tree) . '.sql'),
	slurp_file("$tree/idempotency--" . version_of($tree) . '.sql'), 'the pretended release has the script of this version');
system_or_bail(@make, '-C', $next);

my $node = upgrade('pretended', $tree, $next);
is($node->safe_psql('lived_in', "SELECT idem_grant('app'); SET ROLE app; SELECT idem_next_version()"), "\n9.9",
	'what is new is there, and given to a role by granting again');

# Objects that are not the same are found.
my $fresh = objects($node, 'superuser_fresh');
my %faults = (
	"ALTER FUNCTION idem_next_version() STABLE" => qr/! Name: idem_next_version\(\); Type: FUNCTION/,
	"ALTER FUNCTION idem_next_version() COST 5" => qr/! Name: idem_next_version\(\); Type: FUNCTION/,
	"COMMENT ON FUNCTION idem_next_version() IS NULL" => qr/- Name: FUNCTION idem_next_version\(\); Type: COMMENT/,
	"REVOKE EXECUTE ON FUNCTION idem_next_version() FROM pg_database_owner" => qr/! Name: FUNCTION idem_next_version\(\); Type: ACL/,
	"GRANT SELECT ON idem_next TO PUBLIC" => qr/! Name: TABLE idem_next; Type: ACL/,
	"ALTER TABLE idem_next ADD COLUMN more text" => qr/! Name: idem_next; Type: TABLE/,
	"ALTER TABLE idem_next ADD COLUMN more text; ALTER TABLE idem_next DROP COLUMN more" => qr/! Name: idem_next; Type: TABLE/,
	"ALTER TABLE idem_next ALTER seen DROP DEFAULT" => qr/Name: idem_next seen; Type: DEFAULT|! Name: idem_next; Type: TABLE/,
	"ALTER TABLE idem_next ALTER scope SET STORAGE EXTERNAL" => qr/! Name: idem_next; Type: TABLE/,
	"ALTER TABLE idem_next OWNER TO shop" => qr/Name: idem_next; Type: TABLE/,
	"ALTER TABLE idem_keys SET (fillfactor = 33)" => qr/! Name: idem_keys; Type: TABLE/,
	"ALTER INDEX idem_next_seen RENAME TO idem_next_was_seen" => qr/- Name: idem_next_seen; Type: INDEX/,
	"DROP INDEX idem_tokens_next" => qr/- Name: idem_tokens_next; Type: INDEX/,
	"ALTER EXTENSION idempotency DROP VIEW idem_next_seen_ones" => qr/- member view idem_next_seen_ones/,
	"CREATE OR REPLACE VIEW idem_next_seen_ones AS SELECT id, scope FROM idem_next" => qr/! Name: idem_next_seen_ones; Type: VIEW/,
	"ALTER SEQUENCE idem_outbox_ids CACHE 7" => qr/! Name: idem_outbox_ids; Type: SEQUENCE/,
	"ALTER TYPE idem_next_result RENAME ATTRIBUTE a TO c" => qr/! Name: idem_next_result; Type: TYPE/,
	"DELETE FROM pg_init_privs WHERE objoid = 'idem_next'::regclass" => qr/- initial privileges of table idem_next/,
	"UPDATE pg_extension SET extconfig = extconfig[2:], extcondition = extcondition[2:] WHERE extname = 'idempotency'" => qr/- dumped: /);
foreach my $fault (sort keys %faults)
{
	$node->safe_psql('postgres', 'DROP DATABASE IF EXISTS faulty');
	$node->safe_psql('postgres', 'CREATE DATABASE faulty TEMPLATE superuser_updated');
	$node->safe_psql('faulty', "SET search_path = idem, public; SET allow_system_table_mods = on; $fault");
	like(join("\n", differences($fresh, objects($node, 'faulty'))), $faults{$fault}, "found: $fault");
}

# A server that has loaded the old library from the beginning has it until it is
# started again.  An update before fails whole.
my $preloaded_dir = PostgreSQL::Test::Utils::tempdir();
install($tree, $preloaded_dir);
my $preloaded = node_for('preloaded', $preloaded_dir, "shared_preload_libraries = 'idempotency'");
create_database($preloaded, 'lived_in', 'owner');
$preloaded->safe_psql('lived_in', $_->{fill}) foreach $keys_and_actions, $streams;
install($next, $preloaded_dir);
is(sqlstate_of($preloaded, 'ALTER EXTENSION idempotency UPDATE', 'lived_in'), '42883',
	'preloaded: an update before the restart is refused');
is($preloaded->safe_psql('lived_in', $keys_and_actions->{brief}), $keys_and_actions->{expected}, 'and all goes on as before');
$preloaded->restart;
$preloaded->safe_psql('lived_in', 'ALTER EXTENSION idempotency UPDATE');
is($preloaded->safe_psql('lived_in', $keys_and_actions->{brief}), $keys_and_actions->{expected}, 'preloaded: it works after the restart');
is($preloaded->safe_psql('lived_in', "SELECT idem_next_version()"), '9.9', 'with the new library');
unlike(slurp_file($preloaded->logfile), qr/(WARNING|PANIC): /, 'preloaded: nothing strange in the log');
$preloaded->stop;
$node->stop;

done_testing();
