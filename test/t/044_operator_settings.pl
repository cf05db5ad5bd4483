# The operator's settings for the server, a database or a role also apply if a
# session's first call loads the library; otherwise that call is refused.

use IdempotencyTest;

my $node = new_node('operator', conf => "shared_preload_libraries = ''\n");

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE ROLE app LOGIN;
SELECT idem_grant('app'), idem_grant_relay('app');
SQL
my @settings = split /\n/, $node->safe_psql('postgres',
	"SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND context = 'superuser'
		AND idem_key_is_valid('key-of-the-operator') ORDER BY name");
cmp_ok(scalar @settings, '>', 10, 'settings that protect the operator');

# ALTER SYSTEM takes no setting that it does not know.
my $load = "SELECT idem_key_is_valid('');";

# The operator's values, and those that an application would prefer.
my %wanted = ('idempotency.expired_key_policy' => 'reject', 'idempotency.key_format' => 'printable', 'idempotency.log_events' => 'on', 'idempotency.require_request_hash' => 'on', 'idempotency.require_pinned_scope' => 'off', 'idempotency.log_format' => 'json', 'idempotency.health_bloat' => '0.25');
my %lifted = ('idempotency.expired_key_policy' => 'reuse', 'idempotency.key_format' => 'token', 'idempotency.log_events' => 'off', 'idempotency.require_request_hash' => 'off', 'idempotency.require_pinned_scope' => 'on', 'idempotency.log_format' => 'logfmt', 'idempotency.key_max_length' => '255');

$wanted{$_} //= 20 foreach @settings;
$lifted{$_} //= 1 foreach @settings;

# Calls that write, or tell a limit, and what comes of each.
my @calls = (
	"idem_claim('operator ' || pg_backend_pid(), 'key-of-the-operator1', '\\x01')",
	"idem_once('operator', 'token ' || pg_backend_pid())",
	"idem_publish('operator', '{}')",
	"idem_try_append('operator', pg_backend_pid()::text, 1)",
	"idem_set('operator', 'session', pg_backend_pid()::text, 'x', true, 1)",
	"idem_outbox_ack('{0}')",
	"idem_key_is_valid('key-of-the-operator1')");
my $works = join(' ', ('1') x @calls);
my $refused = join(' ', ('42501') x @calls);

# effect(ROLE, OPTIONS, SQL, NAME): what comes of the calls in a session that
# begins with these options and statements, and the setting's value then.
sub effect
{
	my ($role, $options, $sql, $name) = @_;
	my ($stdout, $stderr);

	local $ENV{PGOPTIONS} = $options;
	$node->psql(
		'postgres',
		"$sql;\n"
		  . join('', map { "SELECT count(*) AS result FROM $_ \\gset\n\\if :ERROR\n\\echo :LAST_ERROR_SQLSTATE\n\\else\n\\echo :result\n\\endif\n" } @calls)
		  . "SELECT current_setting('$name')",
		connstr => $node->connstr('postgres') . " user=$role",
		on_error_stop => 0, stdout => \$stdout, stderr => \$stderr);
	return $stdout =~ s/\n/ /gr;
}

# With what a session may begin, before the library is loaded.
my %beginnings = (
	'SET' => "SET {name} = '{value}'",
	'SET, from within' => "BEGIN; SET {name} = '{value}'; SAVEPOINT s; SET LOCAL {name} = '{value}'",
	'set_config' => "SELECT FROM set_config('{name}', '{value}', false)",
	'RESET' => "SET {name} = '{value}'; RESET {name}",
	'DISCARD' => "SET {name} = '{value}'; DISCARD ALL");

foreach my $place ('ALTER SYSTEM', 'ALTER DATABASE postgres', 'ALTER ROLE app')
{
	$node->safe_psql('postgres', join("\n", $load, map({ "$place SET $_ = '$wanted{$_}';" } @settings), 'SELECT pg_reload_conf()'));
	# The server has read its configuration when a new session has its values.
	$node->poll_query_until('postgres', "SELECT current_setting('idempotency.key_min_length') = '20'")
	  if $place eq 'ALTER SYSTEM';

	my @kinds = sort keys %beginnings;
	my $shows = $load . join(' UNION ALL ', map { "SELECT '$_ ' || current_setting('$_')" } @settings);
	my %shown = map { /^(\S+) (.*)/ ? ($1, $2) : () } split /\n/, $node->safe_psql('postgres', $shows, extra_params => [ '-U', 'app' ]);
	my (@let_through, @not_refused);

	foreach my $n (0 .. $#settings)
	{
		my $name = $settings[$n];
		my $kind = $kinds[ $n % @kinds ];

		push @let_through, "$name by nobody: $shown{$name}" if $shown{$name} !~ /^$wanted{$name}(ms|B)?$/;
		# Each setting by one of the ways, those that matter most by all.
		foreach my $way ($name =~ /max_new_keys|action_id|key_min|policy/ ? @kinds : $kind)
		{
			my $sql = $beginnings{$way} =~ s/\{name\}/$name/gr =~ s/\{value\}/$lifted{$name}/gr;
			my $effect = effect('app', '', $sql, $name);

			push @let_through, "$name by $way: $effect" if $effect ne "$works $shown{$name}";
		}
		my $spelling = $n % 2 ? uc $name : $name;
		my $then = ('', 'DISCARD ALL', "RESET $name", "SET $name = '$wanted{$name}'")[ $n % 4 ];
		my $effect = effect('app', "-c $spelling=$lifted{$name}", $then, $name);

		push @not_refused, "$name: $effect" if $effect !~ /^$refused /;
	}
	is(join("\n", @let_through), '', "$place: holds against SET and the like");
	is(join("\n", @not_refused), '', "$place: where a value that came with the connection hides it, calls are refused");

	$node->safe_psql('postgres', join("\n", $load, map({ "$place RESET $_;" } @settings), 'SELECT pg_reload_conf()'));
	$node->poll_query_until('postgres', "SELECT coalesce(current_setting('idempotency.key_min_length', true), '') <> '20'")
	  if $place eq 'ALTER SYSTEM';
}

# And it is what the calls go by.
my $limit = 'idempotency.max_new_keys_per_minute';
my $claim_twice = join('', map { "SELECT outcome FROM idem_claim('limited ' || pg_backend_pid(), 'key-of-the-operator-$_');\n" } 1, 2);

# claims(OPTIONS, SQL): the outcomes of two claims in a scope of their own.
sub claims
{
	my ($options, $sql) = @_;
	my ($stdout, $stderr);

	local $ENV{PGOPTIONS} = $options;
	$node->psql('postgres', "\\set VERBOSITY sqlstate\n$sql;\n$claim_twice", connstr => $node->connstr('postgres') . ' user=app',
		on_error_stop => 0, stdout => \$stdout, stderr => \$stderr);
	return join(' ', split(/\n/, $stdout), $stderr =~ /ERROR:\s+(\w{5})/g);
}
$node->safe_psql('postgres', "ALTER DATABASE postgres SET $limit = 1");
is(claims('', ''), 'new ID002', 'the limit: as it is');
is(claims('', "SET $limit = 0"), 'new ID002', 'the limit: with SET');
is(claims("-c $limit=0", ''), '42501 42501', 'the limit: with PGOPTIONS');
is(claims("-c $limit=0", 'DISCARD ALL'), '42501 42501', 'the limit: with PGOPTIONS and DISCARD ALL');
is(claims("-c $limit=0 -c idempotency.default_ttl=1h", ''), '42501 42501', 'the limit: among others');
is(claims('-c idempotency.default_ttl=1h', ''), 'new ID002', 'what is for everybody may come with the connection');
is(claims('-c idempotency.no_such_setting=1', ''), 'new ID002', 'and what is none of ours');
$node->append_conf('postgresql.conf', "session_preload_libraries = 'idempotency'");
$node->reload;
$node->poll_query_until('postgres', "SELECT current_setting('$limit', true) = '1' AND current_setting('session_preload_libraries') <> ''");
is(claims('', ''), 'new ID002', 'loaded with the session');
is(claims("-c $limit=0", ''), '42501 42501', 'loaded with the session: no other way');
$node->append_conf('postgresql.conf', "session_preload_libraries = ''");
$node->reload;
$node->poll_query_until('postgres', "SELECT current_setting('session_preload_libraries') = ''");

# Who was granted SET may, and so may a superuser.
$node->safe_psql('postgres', "GRANT SET ON PARAMETER $limit TO app");
is(claims("-c $limit=0", ''), 'new new', 'who was granted SET may bring it along');
$node->safe_psql('postgres', "REVOKE SET ON PARAMETER $limit FROM app");
is(effect('postgres', "-c $limit=0", '', $limit), "$works 0", 'a superuser, too');

# A role cannot give itself another value, or take away the one that it has.
$node->safe_psql('postgres', "ALTER ROLE app SET $limit = 1; ALTER DATABASE postgres RESET $limit");
foreach my $statement ("SET $limit = 0", "RESET $limit", 'RESET ALL')
{
	is(claims('', "ALTER ROLE app $statement"), $statement eq 'RESET ALL' ? 'new ID002' : 'new 42501 ID002', "ALTER ROLE: $statement");
	is(claims('', ''), 'new ID002', "ALTER ROLE: $statement is without effect");
}
$node->safe_psql('postgres', "ALTER ROLE app RESET $limit");

# A mistyped setting of the operator hides the valid ones, and must not go
# unnoticed.
$node->safe_psql('postgres', "$load ALTER SYSTEM SET $limit = 1; SELECT pg_reload_conf()");
$node->poll_query_until('postgres', "SELECT current_setting('$limit', true) = '1'");
$node->safe_psql('postgres', "ALTER DATABASE postgres SET $limit = 'one'");
is(claims('', ''), '55000 55000', 'a value that makes no sense: 55000');
$node->safe_psql('postgres', "ALTER DATABASE postgres RESET $limit");
is(claims('', ''), 'new ID002', 'without it all is as before');

# The same applies to settings that others can set, too: with a shorter ttl
# than the operator intends, requests run again.
foreach my $place ('DATABASE postgres', 'ROLE app')
{
	$node->safe_psql('postgres', "ALTER $place SET idempotency.default_ttl = '36 hours'");
	is(claims('', ''), '55000 55000', "a value with a unit that is none, for the $place: 55000");
	is(claims('-c idempotency.default_ttl=36h', ''), 'new ID002', "unless the connection has one of its own for the $place");
	$node->safe_psql('postgres', "ALTER $place RESET idempotency.default_ttl");
}
is(claims('-c idempotency.default_ttl=36_hours', ''), 'new ID002', 'from the connection it is left out, with a warning to that');

$node->stop;
done_testing();
