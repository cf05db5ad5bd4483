# pg_upgrade with the extension in use, its library preloaded and not: every
# record answers the same afterwards, claim tokens and message ids keep
# increasing, privileges survive, and no worker runs meanwhile.
#
# From the server that is tested to itself, which takes the same steps as from
# another major.  For that:
#
#	OLD_SERVER=DIRECTORY	of the old installation, /usr/lib/postgresql/15 say
#	OLD_DESTDIR=DIRECTORY	that the extension was installed under, for it
#							(make install DESTDIR=...)
#
# "make matrix" does so for all majors.

use IdempotencyTest;
use Records;

$PostgreSQL::Test::Utils::timeout_default = 60;

my @sets = ($keys_and_actions, $streams);

# All that the extension owns, its signatures, and who may use it; but for
# MAINTAIN (m), which 17 adds to all the privileges of a table, and the types
# that come with a table or another type, which are members from 17 on.
my $members = <<'SQL';
SELECT pg_describe_object(classid, objid, objsubid),
	coalesce((SELECT proacl::text FROM pg_proc WHERE oid = objid AND classid = 'pg_proc'::regclass),
		(SELECT regexp_replace(relacl::text, '(=[a-zA-Z*]*)m', '\1', 'g') FROM pg_class WHERE oid = objid AND classid = 'pg_class'::regclass))
FROM pg_depend WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
	AND NOT (classid = 'pg_type'::regclass
		AND (SELECT typcategory = 'A' OR typrelid <> 0 AND relkind <> 'c'
			FROM pg_type LEFT JOIN pg_class ON pg_class.oid = typrelid WHERE pg_type.oid = objid))
ORDER BY 1;
SELECT extversion, extconfig::regclass[] FROM pg_extension WHERE extname = 'idempotency';
SQL
my $launchers = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'";
my $rows = 'SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) FROM idem_tokens)';
my $live = "'shop', 'live-000000000000001'";

# The settings of the old server: those that name the extension's place, which
# test/cluster tells of the new one.
sub old_conf
{
	my $destdir = $ENV{OLD_DESTDIR};
	my $file = PostgreSQL::Test::Utils::tempdir() . '/old.conf';
	my $sharedir = (run_command([ "$ENV{OLD_SERVER}/bin/pg_config", '--sharedir' ]))[0];
	my $settings = (run_command([ "$ENV{OLD_SERVER}/bin/postgres", '--describe-config' ]))[0];
	my $place = $settings =~ /^extension_control_path\t/m
	  ? "extension_control_path = '$destdir$sharedir:\$system'" : "extension_destdir = '$destdir'";

	append_to_file($file, <<"CONF");
$place
dynamic_library_path = '$destdir$ENV{OLD_SERVER}/lib:\$libdir'
max_prepared_transactions = 10
idempotency.cleanup_interval = 0
CONF
	return $file;
}

sub old_node
{
	my ($name, $conf) = @_;

	return new_node($name, conf => $conf) unless $ENV{OLD_SERVER};
	local $ENV{TEMP_CONFIG} = old_conf();
	return new_node($name, conf => $conf, install_path => $ENV{OLD_SERVER});
}

# A stopped server with all that OLD has.
sub upgrade
{
	my ($old, $name, $conf) = @_;
	my $new = new_node($name, conf => $conf, start => 0);
	my $directory = $new->basedir . '/upgrade';

	# The worker would be as eager as can be.
	$_->append_conf('postgresql.conf', "idempotency.cleanup_interval = '1s'")
	  foreach $old, $new;

	# Reports go to the working directory.
	mkdir $directory or die "$directory: $!";
	ok( run_log(
			[
				'sh', '-c', 'cd "$1" && shift && exec "$@"', 'sh', $directory,
				$new->installed_command('pg_upgrade'), '--no-sync',
				'-d', $old->data_dir, '-D', $new->data_dir,
				'-b', $old->config_data('--bindir'), '-B', $new->config_data('--bindir'),
				'-p', $old->port, '-P', $new->port, '-s', $new->host,
			]),
		"$name: pg_upgrade succeeds")
	  or diag(map { slurp_file($_) } glob($new->data_dir . '/pg_upgrade_output.d/*/{*.txt,log/pg_upgrade_dump_*.log}'));
	$new->append_conf('postgresql.conf', "idempotency.cleanup_interval = 0");
	return $new;
}

foreach my $library ('idempotency', '')
{
	my $name = $library ? 'with preload' : 'without preload';
	my $conf = "shared_preload_libraries = '$library'";
	my $old = old_node("old_$name" =~ s/ /_/gr, $conf);

	$old->safe_psql('postgres', <<'SQL');
CREATE ROLE app LOGIN;
CREATE SCHEMA idem;
ALTER DATABASE postgres SET search_path = public, idem;
SQL
	$old->safe_psql('postgres', 'CREATE EXTENSION idempotency SCHEMA idem');
	$old->safe_psql('postgres', $_->{fill}) foreach @sets;

	# Objects of users that depend on the extension's types and views.
	$old->safe_psql('postgres', <<'SQL');
CREATE TABLE responses OF idem_response;
INSERT INTO responses VALUES (200, '{"a":  1}', 'body');
CREATE VIEW live_keys AS SELECT scope, key FROM idem_keys WHERE expires_at > now();
CREATE FUNCTION handler(request jsonb) RETURNS idem_response LANGUAGE sql
AS $$ SELECT 200, NULL::json, 'handled' $$;
SQL
	my $before = join("\n", map { $old->safe_psql('postgres', $_->{answers}) } @sets);
	my $members_before = $old->safe_psql('postgres', $members);
	my $rows_before = $old->safe_psql('postgres', $rows);
	my ($max_token, $max_id, $live_token) = split /\|/, $old->safe_psql('postgres',
		"SELECT t.last_value, i.last_value, claim_token
		 FROM idem_claim_tokens AS t, idem_outbox_ids AS i, idem_keys WHERE key = 'live-000000000000001'");
	my $version = $old->safe_psql('postgres', "SELECT current_setting('server_version_num')::int / 10000");

	$old->stop;

	my $new = upgrade($old, "new_$name" =~ s/ /_/gr, $conf);
	$new->start;
	my $new_version = $new->safe_psql('postgres', "SELECT current_setting('server_version_num')::int / 10000");
	$name .= ", $version to $new_version";

	isnt($new_version, $version, "$name: another major") if $ENV{OLD_SERVER};
	is($new->safe_psql('postgres', $rows), $rows_before, "$name: nothing was deleted meanwhile");
	is(join("\n", map { $new->safe_psql('postgres', $_->{answers}) } @sets), $before,
		"$name: everything answers the same");
	is($new->safe_psql('postgres', $_->{brief}), $_->{expected}, "$name: namely right")
	  foreach @sets;
	is($new->safe_psql('postgres', $members), $members_before, "$name: the members and their privileges");
	is($new->safe_psql('postgres', $launchers), $library ? '1' : '0', "$name: launchers");

	is( $new->safe_psql('postgres',
			"SET ROLE app;
			 SELECT idem_complete($live, 200, 'carried over', claim_token => $live_token);
			 SELECT outcome, response_body FROM idem_claim($live, '\\xab');
			 SELECT outcome, claim_token > $max_token FROM idem_claim('shop', 'after-upgrade-000001');
			 SELECT outcome, attempt, claim_token > $max_token, recovery_point
			 FROM idem_claim('shop', 'failed-0000000000001')"),
		"t\nreplay|carried over\nnew|t\nnew|2|t|half", "$name: claims go on");
	is( $new->safe_psql('postgres',
			"SET ROLE app;
			 SELECT * FROM idem_try_advance('u', 'post', '1', 101);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 5);
			 SELECT * FROM idem_try_append('cart 1', 'phone', 6, expected_version => 6);
			 SELECT idem_once('form', 'used'), idem_once('form', 'never');
			 SELECT idem_publish('free', '4', E'key\\t\\\\') IS NOT NULL"),
		"t|101\nduplicate|5|6\nappended|6|7\nf|t\nt", "$name: so do the others");
	is( $new->safe_psql('postgres',
			"SELECT payload, id > $max_id FROM idem_outbox_take(100, '1 hour', '{free}')"),
		"1|f\n2|f\n3|f\n4|t", "$name: messages are handed out in order");
	is( $new->safe_psql('postgres',
			"SELECT * FROM responses;
			 SELECT outcome, response_body FROM idem_run('shop', 'a-run-after-upgrade', 'handler(jsonb)', '{}');
			 SELECT count(*) > 5 FROM live_keys;
			 SELECT idem_revoke('app');
			 SELECT has_function_privilege('app', 'idem_lookup(text, text)', 'EXECUTE')"),
		"200|{\"a\":  1}|body\nnew|handled\nt\n\nf", "$name: and what users have made");

	# Then the expired records go, by the worker if there is one.
	if ($library)
	{
		$new->append_conf('postgresql.conf', "idempotency.cleanup_interval = '1s'");
		$new->reload;
	}
	else
	{
		$new->safe_psql('postgres', 'SELECT idem_cleanup()');
	}
	ok( $new->poll_query_until('postgres',
			"SELECT NOT EXISTS (SELECT FROM idem_keys WHERE expires_at < now())
				AND NOT EXISTS (SELECT FROM idem_tokens WHERE expires_at < now())"),
		"$name: what has expired is cleaned up");
	unlike(slurp_file($new->logfile), qr/(WARNING|ERROR|PANIC): /, "$name: no error in the log");
	$new->stop;
}

done_testing();
