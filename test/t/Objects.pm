# The objects of an extension, to compare two installations of it.
#
# objects(NODE, DATABASE): by name, all that pg_dump knows of each object, in
# the form that it has for pg_upgrade, where an extension's members are written
# out: definitions, physical order of columns, owners, comments, parameters,
# privileges.  OIDs and transaction ids are left out.  And what pg_dump does not
# print: members, initial privileges, and what is marked to be dumped.
#
# differences(OBJECTS, OBJECTS): names of those that are not the same, with a
# sign: "-" if only the first has it, "+" if only the second, "!" otherwise.

package Objects;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Utils;

our @EXPORT = qw(objects differences);

my $catalogs = <<'SQL';
SELECT 'member ' || pg_describe_object(classid, objid, objsubid), refobjsubid::text
FROM pg_depend WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
UNION ALL
SELECT 'initial privileges of ' || pg_describe_object(classoid, objoid, objsubid),
	privtype::text || array(SELECT a::text FROM unnest(initprivs) AS a ORDER BY 1)::text
FROM pg_init_privs WHERE objoid >= 16384
UNION ALL
SELECT 'dumped: ' || t.oid::regclass, condition
FROM pg_extension, unnest(extconfig, extcondition) AS t (oid, condition) WHERE extname = 'idempotency'
UNION ALL
SELECT 'extension', concat_ws(' ', extowner::regrole, extnamespace::regnamespace, extrelocatable, extversion)
FROM pg_extension WHERE extname = 'idempotency'
SQL

sub objects
{
	my ($node, $database) = @_;
	my %objects;

	my ($dump, $errors) = run_command([
			$node->installed_command('pg_dump'), '--binary-upgrade', '--schema-only', '-d', $node->connstr($database) ]);
	die $errors unless $dump =~ /database dump complete/;
	# The extension itself is below; it is made with OIDs.
	$dump =~ s/^SELECT pg_catalog\.binary_upgrade_(?:set_next|create_empty_extension).*?;\n//msg;
	$dump =~ s/^UPDATE pg_catalog\.pg_class\nSET relfrozenxid.*?;\n//msg;
	$dump =~ s/^\\(?:un)?restrict .*\n//mg;
	my (undef, %entries) = split /^-- (Name: .*)\n/m, $dump;
	while (my ($name, $text) = each %entries)
	{
		# Privileges are in the order in which they were given.
		$text = join "\n", sort split /\n/, $text if $name =~ /Type: ACL/;
		$objects{$name} = $text;
	}
	foreach my $line (split /\n/, $node->safe_psql($database, $catalogs))
	{
		my ($name, $text) = $line =~ /^(.*)\|(.*)$/ or die $line;

		$objects{$name} = $text;
	}
	return \%objects;
}

sub differences
{
	my ($one, $other) = @_;
	my %names = (%$one, %$other);

	return map { !exists $other->{$_} ? "- $_" : !exists $one->{$_} ? "+ $_" : "! $_" }
	  grep { !defined $one->{$_} || !defined $other->{$_} || $one->{$_} ne $other->{$_} } sort keys %names;
}

1;
