# Every byte and every class of character in scopes, keys and all other names,
# in three encodings; and settings that a role without rights tries to have.

use IdempotencyTest;

$ENV{PGCLIENTENCODING} = 'UTF8';
my $node = new_node('input', conf => <<'CONF');
log_line_prefix = '<%b> '
log_min_error_statement = panic
CONF

#
# Names
#

# wrong(): what does not behave, of all that is made of one character each.
my $functions = <<'SQL';
CREATE EXTENSION idempotency;
CREATE FUNCTION code_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'none';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
-- Every function that takes a key
CREATE FUNCTION key_calls(k text) RETURNS SETOF text LANGUAGE sql AS $$
	SELECT format(call, k) FROM unnest(ARRAY['idem_claim(%L, %%L)', 'idem_complete(%L, %%L, 200)', 'idem_complete(%L, %%L, 200, %L::bytea)', 'idem_checkpoint(%L, %%L, %L)',
		'idem_heartbeat(%L, %%L)', 'idem_fail(%L, %%L)', 'idem_release(%L, %%L)', 'idem_lookup(%L, %%L)', 'idem_forget(%L, %%L)', 'idem_erase(%L, %%L)']) AS c,
		format(c, 's', 'x') AS call
$$;
CREATE FUNCTION wrong(c text, n int) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
	k text := 'key-' || n || '-0123456789';
	bad text := 'key-' || c || '-0123456789';
	longest text := repeat(c, 512 / octet_length(c)) || repeat('x', 512 % octet_length(c));
	m record;
	call text;
BEGIN
	-- As a scope, alone and the longest; one byte more is refused.
	IF (SELECT outcome FROM idem_claim(c, k)) <> 'new' OR (SELECT outcome FROM idem_claim(c, k)) <> 'in_progress'
			OR NOT idem_complete(c, k, 200, c, to_json(c)) OR (SELECT response_body FROM idem_claim(c, k)) <> c THEN
		RETURN NEXT n || ': scope';
	END IF;
	IF (SELECT response_headers #>> '{}' FROM idem_lookup(c, k)) IS DISTINCT FROM c THEN
		RETURN NEXT n || ': scope, looked up';
	END IF;
	IF (SELECT outcome FROM idem_claim(longest, k)) <> 'new' OR code_of(format('SELECT idem_claim(%L, %L)', longest || 'x', k)) <> '22023' THEN
		RETURN NEXT n || ': longest scope';
	END IF;
	-- In a key it is allowed or not, and all functions agree.
	FOR call IN SELECT key_calls(bad) LOOP
		IF (code_of('SELECT ' || call) = 'ID001') <> (bad !~ '^[A-Za-z0-9_.:-]*$') OR idem_key_is_valid(bad) <> (bad ~ '^[A-Za-z0-9_.:-]*$') THEN
			RETURN NEXT n || ': ' || call;
		END IF;
	END LOOP;
	-- Everywhere else
	PERFORM idem_set(c, c, c, c, true, 1);
	IF NOT idem_is_active(c, c, c, c) OR (SELECT should_process FROM idem_try_advance(c, c, c, 1)) THEN
		RETURN NEXT n || ': action';
	END IF;
	PERFORM idem_try_append(c, c, 1);
	IF idem_last_client_seq(c, c) <> 1 OR (SELECT outcome FROM idem_try_append(c, c, 1)) <> 'duplicate' THEN
		RETURN NEXT n || ': sequence';
	END IF;
	IF NOT idem_once(c, c) OR idem_once(c, c) OR (SELECT array_agg(t) FROM idem_once_many('s', ARRAY[c, c]) AS t) <> ARRAY[c] THEN
		RETURN NEXT n || ': token';
	END IF;
	-- A relay's client, which uses UTF-8, could not be sent such bytes.
	IF n > 127 AND pg_char_to_encoding(getdatabaseencoding()) = 0 THEN
		IF code_of(format('SELECT idem_publish(%L, ''1'')', c)) <> '22021' THEN
			RETURN NEXT n || ': not UTF-8';
		END IF;
		RETURN;
	END IF;
	PERFORM idem_publish(c, to_jsonb(n), c, jsonb_build_object('n', n));
	SELECT * INTO m FROM idem_outbox_take(topics => ARRAY[c]);
	IF m.topic <> c OR m.message_key <> c OR m.payload <> to_jsonb(n) OR idem_outbox_ack(ARRAY[m.id]) <> 1 THEN
		RETURN NEXT n || ': message';
	END IF;
END
$$;
SQL

# Everything that a client sends is in the line as logfmt has it: a value is
# bare, or between quotes with its quotes and backslashes escaped.
my $value = qr/(?:[!#-<>-\[\]-~]+|"(?:[ -!#-\[\]-~]|\\["\\]|\\x[0-9a-f]{2})*")/;
my $line = qr/^<client backend> LOG:  idempotency event=[a-z_]+(?: [a-z_]+=$value)*$/;

foreach my $database ('sql_ascii', 'latin1', 'utf8')
{
	# In UTF-8: the ends of what 1 to 4 bytes can hold and of the surrogates,
	# a mark of byte order, non-characters, separators, directions, a joiner.
	my $characters = $database eq 'utf8' ? <<'SQL' : 'SELECT generate_series(1, 255)';
SELECT generate_series(1, 767) UNION SELECT unnest(ARRAY[769, 2047, 2048, 8203, 8205, 8232, 8233, 8238, 55295, 57344,
	65279, 65533, 65534, 65535, 65536, 128512, 1114110, 1114111])
SQL
	my $count = $database eq 'utf8' ? 785 : 255;
	my $offset;

	$node->safe_psql('postgres',
		"CREATE DATABASE $database ENCODING '$database' LOCALE 'C' TEMPLATE template0");
	$node->safe_psql($database, $functions);
	$offset = -s $node->logfile;
	is( $node->safe_psql($database,
			"SET idempotency.log_events = on;
			 SELECT wrong(chr(n), n) FROM ($characters) AS c (n) ORDER BY n"),
		'', "$database: every character, in every name");
	is( $node->safe_psql($database,
			"SELECT count(DISTINCT scope), (SELECT count(*) FROM idem_tokens WHERE scope = token), (SELECT count(*) FROM idem_aggregates), (SELECT count(DISTINCT topic) FROM idem_outbox)
			 FROM idem_keys WHERE octet_length(scope) < 5"),
		join('|', ($count) x 3, $database eq 'sql_ascii' ? 127 : $count), "$database: all are different");
	my @lines = split /\n/, slurp_file($node->logfile, $offset);
	my @events = grep { /event=/ } @lines;
	cmp_ok(scalar @events, '>', 5 * $count, "$database: events in the log");
	is(join("\n", grep { $_ !~ $line } @events), '', "$database: whose lines nobody can forge");
	is(scalar @lines, scalar @events, "$database: nor break in two");
}

# Surrogates are no characters.
is(sqlstate_of($node, "SELECT idem_claim(U&'\\D800', 'key-of-a-surrogate')", 'utf8'), '42601', 'utf8: half a surrogate pair');
is(sqlstate_of($node, "SELECT idem_claim('a' || chr(0), 'key-of-a-zero-byte')", 'utf8'), '54000', 'utf8: the zero character');

# Limits of length, to the character.
my $lengths = "SELECT n, string_agg(DISTINCT replace(code_of('SELECT ' || format(c, repeat('k', n))), 'ID004', 'none'), ' '), idem_key_is_valid(repeat('k', n))
	FROM unnest('{%s}'::int[]) AS n, key_calls('%%s') AS c GROUP BY n ORDER BY n";
is($node->safe_psql('utf8', sprintf($lengths, '16,128')), "16|none|t\n128|none|t", 'keys of 16 to 128 characters, in every function');
is($node->safe_psql('utf8', sprintf($lengths, '0,1,15,129,255,256,100000')), join("\n", map { "$_|ID001|f" } 0, 1, 15, 129, 255, 256, 100000),
	'and no others');

# What is refused is shown in a message, but forges no line of the log.
my $offset = -s $node->logfile;
sqlstate_of($node, "SELECT idem_claim('s', E'\\n<x> LOG:  forged, and long enough')", 'utf8');
sqlstate_of($node, "SET idempotency.max_new_keys_per_minute = 1;
	SELECT idem_claim(E's\\n<x> LOG:  forged', 'key-of-the-limit-' || i) FROM generate_series(1, 2) AS i", 'utf8');
my $log = slurp_file($node->logfile, $offset);
is(scalar(() = $log =~ /^<client backend> ERROR: /mg), 2, 'two errors');
unlike($log, qr/^(?!<client backend> |\t)/m, 'no line but those of the server');

#
# Settings
#

$node->safe_psql('utf8', <<'SQL');
CREATE ROLE app LOGIN;
SELECT idem_grant('app');
CREATE ROLE owner LOGIN;
GRANT CREATE ON SCHEMA public TO app;
SQL
$node->safe_psql('postgres', 'ALTER DATABASE utf8 OWNER TO owner');
my @operator = split /\n/, $node->safe_psql('utf8',
	"SELECT idem_key_is_valid('');
	 SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND context = 'superuser'") =~ s/^f\n//r;
my @worker = split /\n/, $node->safe_psql('utf8',
	"SELECT idem_key_is_valid('');
	 SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND context = 'sighup'") =~ s/^f\n//r;
cmp_ok(scalar @operator, '>', 10, 'settings of the operator');
cmp_ok(scalar @worker, '>', 2, 'settings of the worker');

# A value that is not the default, for any of them.
my %other = ('idempotency.expired_key_policy' => 'reject', 'idempotency.log_events' => 'on', 'idempotency.log_format' => 'json',
	'idempotency.health_bloat' => '0.125', 'idempotency.databases' => 'x');

# Some of the sessions below are not let in, which is an answer like others: a
# script that is longer than a pipe holds shows that no test dies of it.
my ($refused) = $node->psql('utf8', 'SELECT 1;' x 50000, connstr => $node->connstr('utf8') . ' user=nobody');
is($refused, 2, 'refused: no harm comes of a script that psql does not read');

# changed(ROLE, OPTIONS, SQL): the settings that a session of the role has
# otherwise than the server, once it has used the library.
sub changed
{
	my ($role, $options, $sql) = @_;
	my ($stdout, $stderr);

	local $ENV{PGOPTIONS} = $options;
	$node->psql('utf8',
		"$sql;
		 SELECT idem_key_is_valid('') AS loaded \\gset
		 SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%'
		 AND setting IS DISTINCT FROM reset_val UNION
		 SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND source NOT IN ('default', 'configuration file') ORDER BY 1",
		connstr => $node->connstr('utf8') . " user=$role",
		on_error_stop => 0, stdout => \$stdout, stderr => \$stderr);
	return $stdout;
}

foreach my $preloaded (1, 0)
{
	my $title = $preloaded ? 'preloaded' : 'loaded late';

	$node->append_conf('postgresql.conf', "shared_preload_libraries = ''") if !$preloaded;
	$node->restart if !$preloaded;
	foreach my $role ('app', 'owner')
	{
		my @wrong;

		foreach my $name (@operator, @worker)
		{
			my $set = $other{$name} // 7;

			push @wrong, "$name as an option" if changed($role, "-c $name=$set", '') ne '';
			push @wrong, "$name by SET" if changed($role, '', "SET $name = '$set'") ne '';
			push @wrong, "$name by SET LOCAL" if changed($role, '', "BEGIN; SET LOCAL $name = '$set'") ne '';
			push @wrong, "$name by set_config" if changed($role, '', "SELECT set_config('$name', '$set', false)") =~ /idem/;
			push @wrong, "$name of the role" if changed($role, '', "ALTER ROLE $role SET $name = '$set'") ne ''
			  || changed($role, '', '') ne '';
			push @wrong, "$name of the database" if $role eq 'owner' && (changed($role, '', "ALTER DATABASE utf8 SET $name = '$set'") ne ''
				  || changed('app', '', '') ne '');
			push @wrong, "$name of a function" if changed($role, '', "CREATE FUNCTION pg_temp.f() RETURNS text LANGUAGE sql SET $name = '$set' AS 'SELECT current_setting(''$name'')';
				SELECT 'kept' WHERE pg_temp.f() = '$set'") =~ /kept/;
		}
		is(join(', ', @wrong), '', "$title: $role cannot change what is the operator's, before or after the library is loaded");
	}
	is(changed('app', '-c idempotency.default_ttl=1h', ''), 'idempotency.default_ttl', "$title: what is for everybody, it can");
}

# A handler cannot become another role than its caller may.
$node->safe_psql('utf8', <<'SQL');
CREATE ROLE boss SUPERUSER;
CREATE FUNCTION becomes(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE request->>0;
	RETURN to_jsonb(current_user);
END
$$;
SQL
foreach my $statement ('SET ROLE boss', 'SET SESSION AUTHORIZATION boss', 'SET ROLE owner', 'SET LOCAL ROLE pg_monitor')
{
	my ($code, $stdout, $stderr) = $node->psql('utf8',
		"\\set VERBOSITY sqlstate\nSELECT idem_run('app', 'key-of-a-handler-1', 'becomes(jsonb)', '[\"$statement\"]');\nSELECT current_user, session_user",
		connstr => $node->connstr('utf8') . ' user=app', on_error_stop => 0);

	like("$stdout $stderr", qr/^app\|app \S+ ERROR:  42501$/, "handler: $statement");
}

# Whatever everybody may set, calls work.
foreach my $ttl ('0', '36525d')
{
	foreach my $lease ('0', '36525d')
	{
		is( $node->safe_psql('utf8',
				"SET idempotency.default_ttl = '$ttl'; SET idempotency.default_lease = '$lease'; SET idempotency.token_ttl = '$ttl';
				 SELECT outcome, lease_expires_at <= expires_at, idem_once('ends', 'ttl $ttl, lease $lease') FROM idem_claim('ends', 'key-of-the-ends-$ttl-$lease')"),
			'new|t|t', "extremes: ttl $ttl, lease $lease");
	}
}

$node->stop;
done_testing();
