# idempotency.max_new_keys_per_minute between sessions and in time: the limit is
# exact under concurrent claims, the window slides, databases are apart, a flood
# of other scopes changes nothing, a lost race gives back what it has counted and
# nothing else, and it works without preloading.
#
# A window lasts a minute, so this test does; the parts in the middle run
# while it passes.

use POSIX qw(fmod);
use Time::HiRes qw(sleep time clock_gettime CLOCK_MONOTONIC);
use IdempotencyTest;

my $node = new_node(
	'limit', conf => <<'CONF');
idempotency.cleanup_interval = 0
max_wal_size = 4GB
CONF

# new_database(NAME): with a function that claims a new key, or says why not.
sub new_database
{
	my ($name) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $name");
	$node->safe_psql($name, <<'SQL');
CREATE EXTENSION idempotency;
CREATE FUNCTION claim_new(scope text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	hint text;
BEGIN
	RETURN (SELECT outcome FROM idem_claim(scope, gen_random_uuid()::text));
EXCEPTION WHEN SQLSTATE 'ID002' THEN
	GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
	RETURN hint;
END
$$;
-- Claims one key after the other, until that time or until one is admitted:
-- how many were refused, how many admitted, and whether before the time.
CREATE FUNCTION claims_until(scope text, until timestamptz, OUT refused int, OUT admitted int, OUT early boolean) LANGUAGE plpgsql AS $$
BEGIN
	refused := 0;
	admitted := 0;
	WHILE clock_timestamp() < until AND admitted = 0 LOOP
		IF claim_new(scope) = 'new' THEN
			early := clock_timestamp() < until;
			admitted := 1;
		ELSE
			refused := refused + 1;
			PERFORM pg_sleep(0.05);
		END IF;
	END LOOP;
END
$$;
SQL
	return;
}

# admitted(NUMBER OF CLAIMS, SCOPE, DATABASE): how many of them were new.
sub admitted
{
	my ($tries, $scope, $database) = @_;

	return $node->safe_psql($database || 'shop',
		"SELECT count(*) FROM generate_series(1, $tries) WHERE claim_new('$scope') = 'new'");
}

# 20 sessions at once, 1000 claims for four scopes: how many each was given.
sub concurrent_claims
{
	my ($prefix) = @_;
	my $load = start_pgbench($node, 'shop',
		{ claim => "\\set scope random(1, 4)\nSELECT claim_new('$prefix' || :scope);\n" },
		'-c', '20', '-j', '2', '-t', '50', '-M', 'prepared');

	is(finish_pgbench($load), 1000, "$prefix: all claims are answered");
	return $node->safe_psql('shop',
		"SELECT string_agg(n::text, ' ') FROM (SELECT count(*) AS n FROM idem_keys
		 WHERE scope LIKE '$prefix%' GROUP BY scope) AS s");
}

sub sleep_until
{
	my ($time) = @_;
	my $left = $time - time();

	sleep($left) if $left > 0;
	return;
}

new_database('shop');
new_database('other');
configure($node, 'idempotency.max_new_keys_per_minute' => 100);

#
# Two sessions that lose a race for a key, much later than they have counted it:
# each stops before the primary key, until its gate opens, and then finds another's
# row there.  Of one the window has slid by then; the other's has been forgotten for
# those of the flood, and begun again.
#

new_database('race');
$node->safe_psql('race', <<'SQL');
CREATE FUNCTION gate(key text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	IF current_setting('gate.at', true) <> '' THEN
		PERFORM pg_advisory_xact_lock_shared(current_setting('gate.at')::int);
	END IF;
	RETURN key;
END $$;
CREATE INDEX gate ON idem_keys (gate(key));
ALTER TABLE idem_keys DROP CONSTRAINT idem_keys_pkey, ADD CONSTRAINT idem_keys_pkey PRIMARY KEY (scope, key);
SQL
my @race = ('the-window-slides', 'the-window-is-forgotten');
my @losers = map { session($node, 'race') } @race;
my $gates = session($node, 'race');
my $lost_at;

# claims(SCOPE, COUNT): the number of COUNT claims that are admitted, if the
# limit is two per minute.
sub claims
{
	my ($scope, $count) = @_;

	return $node->safe_psql('race', "SET idempotency.max_new_keys_per_minute = 2;
		SELECT count(*) FROM generate_series(1, $count) WHERE claim_new('$scope') = 'new'");
}

# The session at this place loses its race.
sub lose
{
	my ($i) = @_;

	$gates->run("SELECT pg_advisory_unlock($i)");
	# Its limit of time began with its call, a minute ago.
	$losers[$i]->{psql}->{timeout}->start;
	is($losers[$i]->result, 'in_progress', "$race[$i]: another has the key");
	return;
}

foreach my $i (0 .. $#race)
{
	$gates->run("SELECT pg_advisory_lock($i)");
	$losers[$i]->run("SET gate.at = '$i'; SET idempotency.max_new_keys_per_minute = 2");
	$losers[$i]->send("SELECT outcome FROM idem_claim('$race[$i]', 'lost-key-0000000000')");
	wait_for_block($node, $losers[$i]->pid);
	$lost_at ||= time();
	$gates->run("INSERT INTO idem_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key)
		VALUES (0, now(), 'infinity', 'infinity', 1, 'started', '$race[$i]', 'lost-key-0000000000')");
	is(claims($race[$i], 1), 1, "$race[$i]: a claim that has not lost yet counts, and one more is admitted") if $i == 0;
}

#
# The window slides: 50 keys, and 50 more later
#

# All in one slot of 6 seconds of the server's clock (see rate_limit.c), so that
# they leave the window together
my $left = 6 - fmod(clock_gettime(CLOCK_MONOTONIC), 6);
sleep($left) if $left < 4;
my $before = time();
is(admitted(50, 'sliding'), 50, 'sliding: the first keys');
my $first = time();

#
# Many sessions, many databases
#

is(concurrent_claims('at-once-'), '100 100 100 100', 'exact-under-concurrency: to the key, in each scope');
is(admitted(150, 'at-once-1', 'other'), 100, 'databases-are-apart: the same scope has its limit in each');
is(admitted(1, 'at-once-1', 'other'), 0, 'databases-are-apart: and no more');

#
# A flood
#

# The claims of a million scopes, none of which is refused: 50 rounds of 20000.
# A round is rolled back, and counts all the same.
my $flood = session($node, 'shop');
my $memory = "SELECT sum(used_bytes) FROM pg_backend_memory_contexts WHERE name = 'TopMemoryContext'";
my $rounds = 0;
my $flooded = 0;

# flood(ROUNDS, TIME): up to ROUNDS rounds, but no longer than until TIME.
sub flood
{
	my ($until, $deadline) = @_;

	while ($rounds < $until && (!$deadline || time() < $deadline))
	{
		$rounds++;
		$flooded += $flood->run(<<"SQL");
BEGIN;
SELECT count(*) FROM generate_series(1, 20000) AS i,
	idem_claim('scope $rounds of a million ' || i, 'flood-of-scopes-1') WHERE outcome = 'new';
ROLLBACK;
TRUNCATE idem_keys;
SQL
	}
	return;
}

flood(1);
my $used = $flood->run($memory);
flood(25, $first + 25);
is(admitted(1, 'at-once-2'), 0, 'flood: a scope at its limit stays there, whoever else comes');
is(claims($race[1], 1), 1, "$race[1]: one in the new window");
lose(1);
is(claims($race[1], 2), 1, "$race[1]: and one more, for the lost race has nothing to give back there");
note(sprintf('%d rounds after %.1f s', $rounds, time() - $first));

sleep_until($first + 30);
is(admitted(60, 'sliding'), 50, 'sliding: up to the limit');
my $second = time();
# Both by the server's clock, in one moment
my ($wait, $asked) = $node->safe_psql('shop', "SELECT claim_new('sliding'), extract(epoch FROM clock_timestamp())") =~ /^Retry in (\d+) seconds\.\|([\d.]+)$/;
flood(50, $first + 50);

#
# The window has slid
#

cmp_ok($asked + $wait, '>=', $before + 60, 'sliding: a hint that waits for a minute from the first keys');
cmp_ok($asked + $wait, '<', $first + 68, 'sliding: and for a tenth more at most');
is(admitted(1, 'at-once-2', 'other'), 1, 'sliding: a claim in another database');
# The hint is in whole seconds.
sleep_until($asked + $wait - 3);
my ($refused, $admitted, $early) = split /\|/,
  $node->safe_psql('shop', "SELECT * FROM claims_until('sliding', to_timestamp($asked + $wait - 1))"), -1;
note("refused $refused times before the time in the hint");
isnt($early, 't', 'sliding: none before the time in the hint');
sleep_until($asked + $wait);
is($admitted + admitted(60, 'sliding'), 50, 'sliding: then as many as have passed');
cmp_ok(time(), '<', $second + 58, 'sliding: while the later ones are still counted');
note(sprintf('slid after %.1f s', time() - $first));

flood(50);
is($flooded, 1000000, 'flood: a million scopes, each of them admitted');
cmp_ok($flood->run($memory), '<', $used + 8192, 'flood: no memory is kept');
$flood->quit;

# As many slots later as a window has, so that the two share a place.
sleep_until($lost_at + 66.2);
is(claims($race[0], 2), 2, "$race[0]: two, a minute later");
lose(0);
is(claims($race[0], 2), 0, "$race[0]: and no more, for the lost race gives back to the window that it came from");
$_->quit foreach @losers, $gates;

#
# Without preloading
#

$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
is(admitted(120, 'sliding'), 100, 'restart: counting begins again');
is(concurrent_claims('not-preloaded-'), '100 100 100 100', 'not-preloaded: exact, too');
my ($code, $stdout, $stderr) = $node->psql('shop', "SELECT claim_new('sliding'); SELECT claim_new('quiet')");
like($stdout, qr/^Retry in \d+ seconds\.\nnew$/, 'not-preloaded: another session sees the same window');
is($stderr, '', 'not-preloaded: without a warning');
is( $node->safe_psql('shop',
		"SELECT coalesce(sum(allocated_size), 0) < 40000 FROM pg_shmem_allocations WHERE name = 'idempotency rate limits'"),
	't', 'not-preloaded: little is taken of what nobody has reserved');

#
# Without memory
#

# The table of locks grows until nothing is left.
$node->restart;
is( $node->safe_psql('shop', <<'SQL'), '53200', 'no-memory: it is used up');
CREATE FUNCTION use_up() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(n) FROM generate_series(1, 10000000) AS n;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
SELECT use_up();
SQL
($code, $stdout, $stderr) = $node->psql('shop',
	"SELECT count(*) FROM generate_series(1, 120) WHERE claim_new('sliding') = 'new'; SELECT claim_new('quiet')");
my $limited = $node->pg_version >= 17;
like($stdout, $limited ? qr/^100\nnew$/ : qr/^$/, 'no-memory: no new key; servers from 17 on have other memory');
like($stderr, $limited ? qr/^$/ : qr/ERROR:  could not count new idempotency keys/, 'no-memory: an error where the limit cannot be kept');

$node->stop;

done_testing();
