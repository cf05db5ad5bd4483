# The release recipe of CONTRIBUTING.md, to the letter, for an imagined 1.1 in a
# copy of the tree: each command of its blocks that changes files runs, and what
# it leaves is a tree that builds, whose pages and versions agree, and whose
# extension can be updated from the version before.

use File::Basename qw(dirname);
use IdempotencyTest;
use Objects;

my $tree = $ENV{TESTDIR};
my $copy = PostgreSQL::Test::Utils::tempdir() . '/release';
my $settings = (run_command([ 'postgres', '--describe-config' ]))[0];
my ($place) = $settings =~ /^(extension_control_path|extension_destdir)\t/m
  or plan skip_all => 'this server has extensions in one place only';

# Those of make check and the packages run elsewhere, and take too long.
my $left_out = qr/^(make (check|matrix|packages-check|dist|deb)|git tag)/;

# Without git, as in an unpacked release, its commands are left out, too.
my $git = system('git --version >/dev/null 2>&1') == 0;
@ENV{qw(GIT_AUTHOR_NAME GIT_AUTHOR_EMAIL GIT_COMMITTER_NAME GIT_COMMITTER_EMAIL)} = qw(author author@example.org author author@example.org);

sub in_copy
{
	my ($command) = @_;
	$command = '' if $command =~ /^git / && !$git;
	my $status = system("cd '$copy' && MAKEFLAGS= PG_CONFIG='$ENV{PG_CONFIG}' PYTHONDONTWRITEBYTECODE=1 sh -c '$command' >>'$copy.log' 2>&1");

	ok($status == 0, "release: $command") or diag(slurp_file("$copy.log"));
	return;
}

# commands(HEADING): those of the first block of sh below it
sub commands
{
	my ($heading) = @_;
	my ($block) = slurp_file("$tree/CONTRIBUTING.md") =~ /^### \Q$heading\E\n.*?^```sh\n(.*?)^```/ms
	  or die "CONTRIBUTING.md has no block of sh below $heading";

	return grep { $_ !~ $left_out } map { s/\s*#.*//r } split /\n/, $block;
}

sub script
{
	my ($version) = @_;
	return slurp_file("$copy/released/idempotency--$version.sql");
}

mkdir $copy;
system_or_bail('sh', '-c', "tar cf - --exclude=./tmp_check --exclude=./results --exclude=./.git -C '$tree' . | tar xf - -C '$copy'");
system_or_bail('rm', '-rf', "$copy/released", glob("$copy/idempotency--*.sql"));
PostgreSQL::Test::Utils::append_to_file("$copy.log", '');

# As if this tree were 1.0, and released.
in_copy('packages/release version 1.0.0');
in_copy("sed -i \"s/^LAST_RELEASE =.*/LAST_RELEASE =/\" Makefile");
in_copy('make -s clean');
in_copy('packages/release freeze');
in_copy('git init -q && git add --all && git commit -q -m "Release 1.0.0"');
like(script('1.0'), qr/CREATE FUNCTION \@extschema\@\.idem_claim\(/, 'the script of 1.0 is frozen');

# The next version, as the recipe begins it; then it gets a function.
my @begin = commands('Beginning the next version');
is(scalar(grep { /^packages\/release begin 1\.2\.0$/ } @begin), 1, 'the recipe begins 1.2.0 after 1.1.0');
in_copy(s/1\.2\.0/1.1.0/r) foreach @begin;
my $new = <<'SQL';
CREATE FUNCTION @extschema@.idem_imagined()
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 11;
REVOKE ALL ON FUNCTION @extschema@.idem_imagined() FROM PUBLIC;
COMMENT ON FUNCTION @extschema@.idem_imagined() IS
'Of the imagined version.';

SQL
PostgreSQL::Test::Utils::append_to_file("$copy/src/maintenance/recovery.sql", $new);
PostgreSQL::Test::Utils::append_to_file("$copy/src/install/upgrade.sql", $new);

# Its release, and the beginning of the one after it.
in_copy($_) foreach commands('Making the release');
is_deeply([ map { s/.*\///r } sort glob("$copy/released/*") ],
	[ 'idempotency--1.0--1.1.sql', 'idempotency--1.0.sql', 'idempotency--1.1.sql' ], '1.1 and its upgrade script are frozen');
unlike(script('1.0'), qr/idem_imagined/, '1.0 has not changed');
is(`git -C '$copy' status --porcelain`, '', 'everything is committed') if $git;
in_copy($_) foreach @begin;
in_copy('packages/release check');
like(slurp_file("$copy/idempotency.control"), qr/^default_version = '1\.2'$/m, 'the next version is 1.2');
like(slurp_file("$copy/Makefile"), qr/^LAST_RELEASE = 1\.1$/m, 'which comes from 1.1');

# The updates of users of 1.0 and 1.1.
my $destdir = PostgreSQL::Test::Utils::tempdir();
in_copy("make -s with_llvm=no install DESTDIR=$destdir");
# A directory to mount: only majors from 18 on can use it.
my ($major) = (run_command([ $ENV{PG_CONFIG}, '--version' ]))[0] =~ /^PostgreSQL (\d+)/;
my $made = system("cd '$copy' && MAKEFLAGS= make -s with_llvm=no PG_CONFIG='$ENV{PG_CONFIG}' volume VOLUME='$copy.volume' >>'$copy.log' 2>&1");
is($made == 0 ? 'made' : 'refused', $major >= 18 ? 'made' : 'refused', "make volume on $major");
my $sharedir = (run_command([ $ENV{PG_CONFIG}, '--sharedir' ]))[0];
my $libdir = (run_command([ $ENV{PG_CONFIG}, '--pkglibdir' ]))[0];
my $value = $place eq 'extension_destdir' ? $destdir : "$destdir$sharedir:\$system";
my $node = new_node('release', conf => "$place = '$value'\ndynamic_library_path = '$destdir$libdir:\$libdir'\nshared_preload_libraries = ''");
$node->safe_psql('postgres', "CREATE DATABASE $_") foreach qw(one two fresh);
my %version = (one => "VERSION '1.0'", two => "VERSION '1.1'", fresh => '');
foreach my $database (sort keys %version)
{
	$node->safe_psql($database, "CREATE SCHEMA idem; CREATE EXTENSION idempotency SCHEMA idem $version{$database};
		ALTER EXTENSION idempotency UPDATE");
	is($node->safe_psql($database, "SELECT extversion, idem.idem_imagined() FROM pg_extension WHERE extname = 'idempotency'"),
		'1.2|11', "$database is 1.2, with the function of 1.1");
}
my $fresh = objects($node, 'fresh');
is_deeply([ differences($fresh, objects($node, $_)) ], [], "$_ has the objects of a fresh install") foreach qw(one two);
$node->stop;

# A release whose script is missing is noticed.
unlink "$copy/released/idempotency--1.1.sql" or die;
isnt(system("cd '$copy' && MAKEFLAGS= make -s PG_CONFIG='$ENV{PG_CONFIG}' idempotency--1.2.sql >>'$copy.log' 2>&1"), 0,
	'without the script of LAST_RELEASE, nothing is built');

done_testing();
