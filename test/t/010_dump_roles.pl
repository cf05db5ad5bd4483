# Whichever roles dump, own and restore the database, a superuser can restore a
# dump with all its records and with the application's rights. And the fate of
# the extension when a role is dropped.

use IdempotencyTest;

my $node = new_node('roles', conf => "fsync = off\n");
my $dumps = $node->basedir;

# shop has a database, boss takes it over, admin is a second superuser, clerk
# may make backups, keeper stays when others leave.
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE shop LOGIN;
CREATE ROLE boss LOGIN;
CREATE ROLE admin LOGIN SUPERUSER;
CREATE ROLE clerk LOGIN IN ROLE pg_read_all_data;
CREATE ROLE app LOGIN;
CREATE ROLE reader LOGIN;
CREATE ROLE keeper LOGIN;
SQL

# A record of each kind; the highest claim token belongs to none.
my $fill = <<'SQL';
SELECT idem_grant('app');
SELECT idem_grant_relay('app');
SELECT idem_claim('shop', 'live-000000000000001', '\xab', lease => '1 hour');
SELECT idem_complete('shop', k, 201, 'done', claim_token => claim_token) FROM (VALUES ('done-000000000000001')) AS v (k), idem_claim('shop', k);
SELECT idem_release('shop', k, claim_token) FROM (VALUES ('released-00000000001')) AS v (k), idem_claim('shop', k);
SELECT idem_set('u', 'post', '1', 'like', true, 7);
SELECT idem_try_append('cart', 'phone', 1);
SELECT idem_once('form', 'used');
SELECT idem_publish('orders', '{"id": 1}', 'k');
SQL

# Everything there is, in a line.
my $content = "SELECT string_agg(line, ' ') FROM (\n"
  . join(" UNION ALL\n", map { "SELECT string_agg(t::text, E'\\n' ORDER BY t::text COLLATE \"C\") FROM $_ AS t" }
	  qw(idem_keys idem_action_versions idem_user_actions idem_aggregates idem_client_sequences idem_tokens idem_outbox))
  . " UNION ALL SELECT (last_value, is_called)::text FROM idem_claim_tokens UNION ALL SELECT (last_value, is_called)::text FROM idem_outbox_ids) AS l (line)";

# Whether the restored database works: the live claim is refused to others and
# completed by its holder, new tokens are higher than all earlier ones, and app
# may call the functions.
my $use = <<'SQL';
SET ROLE app;
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', '\xab');
SELECT response_body FROM idem_claim('shop', 'done-000000000000001');
SELECT idem_once('form', 'used'), idem_is_active('u', 'post', '1', 'like'), idem_last_client_seq('cart', 'phone');
RESET ROLE;
SELECT idem_complete('shop', 'live-000000000000001', 200, claim_token => claim_token) FROM idem_keys WHERE key = 'live-000000000000001';
SELECT claim_token > 3 FROM idem_claim('shop', 'new-0000000000000001');
SET ROLE app;
SELECT topic, attempt FROM idem_outbox_take();
SQL
my $used = "in_progress\ndone\nf|t|1\nt\nt\norders|1";

# Rights that the owner of the database, or its installer, has granted by hand:
# one for each kind of object.
my $by_hand = <<'SQL';
GRANT USAGE ON SCHEMA idem TO shop, reader;
SET ROLE shop;
GRANT EXECUTE ON FUNCTION idem_publish, idem_health TO reader;
GRANT EXECUTE ON FUNCTION idem_publish TO app;
GRANT SELECT ON idem_keys, idem_stats, idem_claim_tokens TO reader;
GRANT USAGE ON TYPE idem_response TO reader;
SQL
my $granted = <<'SQL';
SELECT has_function_privilege('reader', oid, 'EXECUTE') FROM pg_proc WHERE proname = 'idem_publish';
SELECT has_function_privilege('reader', 'idem_health()', 'EXECUTE'), has_table_privilege('reader', 'idem_keys', 'SELECT'), has_table_privilege('reader', 'idem_stats', 'SELECT'),
	has_sequence_privilege('reader', 'idem_claim_tokens', 'SELECT'), has_type_privilege('reader', 'idem_response', 'USAGE');
SET ROLE reader;
SELECT 'published' FROM idem_publish('orders', '{"id": 2}');
SQL

#
# The databases: who owns them, who owns the schema, who installs
#

# name => [owner of the database, schema, its owner, installer, afterwards]
my %sources = (
	granted_by_owner => [ 'shop', 'idem', 'postgres', 'postgres', $by_hand ],
	granted_by_installer => [ 'shop', 'idem', 'shop', 'shop', $by_hand ],
	superuser => [ 'postgres', 'public', undef, 'postgres' ],
	other_superuser => [ 'postgres', 'idem', 'admin', 'admin' ],
	owner => [ 'shop', 'public', undef, 'shop' ],
	owner_in_schema => [ 'shop', 'idem', 'shop', 'shop' ],
	owner_changed => [ 'shop', 'idem', 'shop', 'shop', 'ALTER DATABASE owner_changed OWNER TO boss' ],
	schema_changed => [ 'shop', 'idem', 'shop', 'shop', 'ALTER SCHEMA idem OWNER TO boss' ],
	creator => [ 'postgres', 'idem', 'shop', 'shop' ],
	guest => [ 'postgres', 'idem', 'boss', 'shop' ],
	superuser_for_owner => [ 'shop', 'idem', 'shop', 'postgres' ],
	superuser_in_public => [ 'shop', 'public', undef, 'postgres' ]);

# run_as(ROLE, PROGRAM, ARGUMENT ...): its exit status, and what it complained of
sub run_as
{
	my ($role, @command) = @_;
	my ($stdout, $stderr);

	local $ENV{PGUSER} = $role;
	local $ENV{PGHOST} = $node->host;
	local $ENV{PGPORT} = $node->port;
	$command[0] = $node->installed_command($command[0]);
	IPC::Run::run(\@command, '<', \'', '>', \$stdout, '2>', \$stderr);
	return ($? >> 8, $stderr);
}

# restored(ROLE, PROGRAM, ARGUMENT ...): "" if it went well
sub restored
{
	my ($status, $complaints) = run_as(@_);

	return $status == 0 ? '' : "$complaints (status $status)";
}

# dump_of(ROLE, DATABASE, FILE): a dump as a script, less its comments and the
# random words that newer programs put into it; or what was complained of
sub dump_of
{
	my ($role, $database, $file) = @_;
	my ($status, $complaints) = run_as($role, 'pg_dump', '-f', $file, $database);

	return $status == 0 && $complaints eq '' ? slurp_file($file) =~ s/^(--|\\(un)?restrict ).*\n//gmr : "$status $complaints";
}

# A new database with this owner, whose sessions find the extension.
sub create_database
{
	my ($owner, $name) = @_;

	$node->safe_psql('postgres',
		"CREATE DATABASE $name TEMPLATE template0 OWNER $owner; ALTER DATABASE $name SET search_path = idem, public");
	return $name;
}

# Ways to restore a source's dumps into a new database: what was wrong.
my %ways = (
	script => sub {
		my ($source, $role, $target) = @_;
		return restored($role, 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $target, '-f', "$dumps/$source.sql");
	},
	archive => sub {
		my ($source, $role, $target) = @_;
		return restored($role, 'pg_restore', '--exit-on-error', '-d', $target, "$dumps/$source.dump");
	},
	no_owner => sub {
		my ($source, $role, $target) = @_;
		return restored($role, 'pg_restore', '--exit-on-error', '--no-owner', '-d', $target, "$dumps/$source.dump");
	},
	one_transaction => sub {
		my ($source, $role, $target) = @_;
		return restored($role, 'pg_restore', '--single-transaction', '-d', $target, "$dumps/$source.dump");
	},
	sections => sub {
		my ($source, $role, $target) = @_;
		return join('', map { restored($role, 'pg_restore', '--exit-on-error', "--section=$_", '-d', $target, "$dumps/$source.dump") } 'pre-data', 'data', 'post-data');
	},
	data_later => sub {
		my ($source, $role, $target) = @_;
		return join('', map { restored($role, 'pg_restore', '--exit-on-error', $_, '-d', $target, "$dumps/$source.dump") } '--schema-only', '--data-only');
	},
	clean => sub {
		my ($source, $role, $target) = @_;
		return restored($role, 'pg_restore', '--exit-on-error', '-d', $target, "$dumps/$source.dump")
		  . restored($role, 'pg_restore', '--exit-on-error', '--clean', '--if-exists', '-d', $target, "$dumps/$source.dump");
	});

my @ways = sort keys %ways;
my $turn = 0;

# check_restored(TITLE, DATABASE, CONTENT): all is there and works, and what an
# application was granted can be taken back.
sub check_restored
{
	my ($title, $database, $before) = @_;

	is($node->safe_psql($database, $content), $before, "$title: all is there");
	is($node->safe_psql($database, $use), $used, "$title: and works");
	is($node->safe_psql($database, $granted), "t\nt|t|t|t|t\npublished", "$title: so does what was granted by hand") if $title =~ /^granted/;
	is($node->safe_psql($database, "SELECT idem_revoke('app'); SELECT has_function_privilege('app', 'idem_lookup(text, text)', 'EXECUTE')"),
		"\nf", "$title: grants can be taken back");
	return;
}

foreach my $name (sort keys %sources)
{
	my ($owner, $schema, $schema_owner, $installer, $afterwards) = @{ $sources{$name} };

	create_database($owner, $name);
	$node->safe_psql($name, "CREATE SCHEMA $schema AUTHORIZATION $schema_owner") if $schema_owner;
	$node->safe_psql('postgres', "GRANT CREATE ON DATABASE $name TO shop");
	$node->safe_psql($name, 'GRANT USAGE, CREATE ON SCHEMA idem TO shop; SET ROLE boss; GRANT USAGE ON SCHEMA idem TO app, shop') if $name eq 'guest';
	$node->safe_psql($name, "CREATE EXTENSION idempotency SCHEMA $schema", extra_params => [ '-U', $installer ]);
	$node->safe_psql($name, $fill, extra_params => [ '-U', $installer ]);
	$node->safe_psql($name, $afterwards) if $afterwards;

	my $before = $node->safe_psql($name, $content);

	like($before, qr/live-000000000000001.*orders/s, "$name: before");
	# Each role that may dump it gets the same dump, without complaints.
	my $dump = dump_of('postgres', $name, "$dumps/$name.sql");
	my %dumpers = map { $_ => 1 } 'admin', 'clerk', $name =~ /_changed$/ ? () : ($installer, $owner);
	my @different = grep { dump_of($_, $name, "$dumps/other.sql") ne $dump } sort keys %dumpers;

	like($dump, qr/^CREATE EXTENSION.*^COPY .*live-000000000000001.*^GRANT .* TO app/ms, "$name: dumped");
	is(join(' ', @different), '', "$name: the same dump by " . join(', ', sort keys %dumpers));
	is(restored('postgres', 'pg_dump', '-Fc', '-f', "$dumps/$name.dump", $name), '', "$name: an archive");

	# In two different ways each time, into databases of any owner. Without its
	# owner, the role cannot use the schema, and its grants cannot be restored.
	my @usable = grep { $name ne 'granted_by_installer' || $_ ne 'no_owner' } @ways;
	foreach (1 .. ($name =~ /^granted/ ? @usable : 2))
	{
		my $way = $usable[ $turn % @usable ];
		my $owner = ('postgres', 'shop', 'boss')[ $turn % 3 ];
		my $role = ('postgres', 'admin')[ $turn++ % 2 ];
		my $target = create_database($owner, 'restored');
		my $title = "$name: $way by $role, database of $owner";

		is($ways{$way}->($name, $role, $target), '', "$title: restored");
		check_restored($title, $target, $before);
		$node->safe_psql('postgres', "DROP DATABASE $target");
	}

	# With the database itself, and its owner.
	$node->safe_psql('postgres', "ALTER DATABASE $name RENAME TO before");
	is(restored('admin', 'pg_restore', '--exit-on-error', '-C', '-d', 'postgres', "$dumps/$name.dump"), '', "$name: -C: restored");
	ok(dump_of('postgres', $name, "$dumps/other.sql") eq $dump, "$name: -C: would be dumped as before");
	check_restored("$name: -C", $name, $before);

	# Without a superuser there is no writing to the tables.  That is said, and
	# the extension is as good as new.
	if ($name =~ /^(owner|owner_in_schema|superuser|creator)$/)
	{
		my $target = create_database('shop', 'restored');

		like(restored('shop', 'pg_restore', '--no-owner', '-d', $target, "$dumps/$name.dump"),
			qr/permission denied for table idem_keys.*\(status 1\)/s, "$name: restored by an ordinary role: refused");
		is($node->safe_psql($target, "SELECT count(*) FROM idem_keys; SELECT outcome FROM idem_claim('shop', 'live-000000000000001')", extra_params => [ '-U', 'shop' ]),
			"0\nnew", "$name: restored by an ordinary role: works, without the records");
		$node->safe_psql('postgres', "DROP DATABASE $target");
	}
	# Without the data it can do so, too.
	if ($name =~ /^(owner|superuser)/)
	{
		my $target = create_database('shop', 'restored');

		is(restored('shop', 'pg_restore', '--exit-on-error', '--no-owner', '--schema-only', '-d', $target, "$dumps/$name.dump"), '',
			"$name: restored by an ordinary role, without data");
		is($node->safe_psql($target, "SELECT idem_grant('clerk'); SET SESSION AUTHORIZATION app; SELECT outcome FROM idem_claim('shop', 'live-000000000000001')"),
			"\nnew", "$name: without data: grants survive");
		$node->safe_psql('postgres', "DROP DATABASE $target");
	}
	$node->safe_psql('postgres', "DROP DATABASE $name");
	$node->safe_psql('postgres', 'DROP DATABASE before');
}

#
# A role that leaves
#

# The role's objects go to boss, and its rights are revoked. The database has
# another owner.
foreach my $installer ('leaver', 'leaving_superuser')
{
	$node->safe_psql('postgres', "CREATE ROLE $installer LOGIN " . ($installer =~ /super/ ? 'SUPERUSER' : ''));
	create_database('keeper', $installer);
	$node->safe_psql('postgres', "GRANT CREATE ON DATABASE $installer TO $installer");
	$node->safe_psql($installer, "CREATE SCHEMA idem; GRANT USAGE ON SCHEMA idem TO keeper; CREATE EXTENSION idempotency SCHEMA idem; $fill",
		extra_params => [ '-U', $installer ]);
	my $before = $node->safe_psql($installer, $content);

	is($node->safe_psql($installer, "SELECT idem_revoke('$installer'); SELECT has_function_privilege('$installer', 'idem_lookup(text, text)', 'EXECUTE WITH GRANT OPTION')",
			extra_params => [ '-U', 'keeper' ]),
		"\nt", "$installer: administrators do not take each other's rights");
	$node->safe_psql($installer, "REASSIGN OWNED BY $installer TO boss; DROP OWNED BY $installer");
	$node->safe_psql('postgres', "REVOKE ALL ON DATABASE $installer FROM $installer; DROP ROLE $installer");
	is($node->safe_psql($installer, $content), $before, "$installer: all is there when it has left");
	is($node->safe_psql($installer, $use), $used, "$installer: and works");

	# The owner of the database administers it, what the other has granted, too.
	# A superuser appoints the extension's new owner, and others.
	is( $node->safe_psql($installer, <<'SQL', extra_params => [ '-U', 'keeper' ]),
SELECT idem_revoke('app');
SELECT has_function_privilege('app', 'idem_lookup(text, text)', 'EXECUTE');
SELECT idem_grant('app');
SELECT has_function_privilege('app', 'idem_lookup(text, text)', 'EXECUTE');
SELECT idem_forget('shop', 'done-000000000000001');
SELECT status FROM idem_health() WHERE check_name = 'clock';
SQL
		"\nf\n\nt\nt\nok", "$installer: the owner of the database administers it");
	$node->safe_psql($installer, <<'SQL');
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem TO boss WITH GRANT OPTION;
GRANT SELECT ON ALL TABLES IN SCHEMA idem TO boss WITH GRANT OPTION;
GRANT SELECT ON ALL SEQUENCES IN SCHEMA idem TO boss WITH GRANT OPTION;
SQL
	is( $node->safe_psql($installer, <<'SQL', extra_params => [ '-U', 'boss' ]),
SELECT idem_revoke('app');
SELECT idem_grant('clerk');
SELECT count(*) > 0 FROM idem_keys;
SELECT has_function_privilege('app', 'idem_lookup(text, text)', 'EXECUTE'), has_function_privilege('clerk', 'idem_lookup(text, text)', 'EXECUTE');
SQL
		"\n\nt\nf|t", "$installer: so does its new owner, once appointed");
	# Before 17 the server notes for dumps what an extension's objects were granted by an owner that is no more.
	if ($installer eq 'leaver' || $node->pg_version >= 17)
	{
		my $before = $node->safe_psql($installer, $content);
		my $target = create_database('postgres', 'restored');

		dump_of('keeper', $installer, "$dumps/$installer.sql");
		is(restored('postgres', 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $target, '-f', "$dumps/$installer.sql"), '', "$installer: restored without it");
		is($node->safe_psql($target, $content), $before, "$installer: all is there");
		$node->safe_psql('postgres', "DROP DATABASE $target");
	}
	$node->safe_psql($installer, 'DROP EXTENSION idempotency', extra_params => [ '-U', 'boss' ]);
	is($node->safe_psql($installer, "SELECT count(*) FROM pg_class WHERE relname LIKE 'idem%'"), '0', "$installer: its new owner may drop it");
}

$node->stop;
done_testing();
