# Real concurrency: many sessions at one key, one row, one counter, and a mix
# of everything.

use List::Util qw(shuffle);
use Time::HiRes qw(usleep);
use IdempotencyTest;

my $node = new_node('concurrency', conf => 'deadlock_timeout = 200ms');
my $seed = $ENV{IDEMPOTENCY_TEST_SEED} || int(rand(1_000_000));

srand($seed);
note("seed $seed (set IDEMPOTENCY_TEST_SEED to repeat)");

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE TABLE orders (key text PRIMARY KEY, token bigint NOT NULL);
SQL

my $clients = 60;
my @sessions = map { session($node, 'postgres', wait => 0) } 1 .. $clients;
$_->connected foreach @sessions;

# Send each session its script, but let none begin before all have it.
my $gate = session($node);

sub start_together
{
	my (@scripts) = @_;

	$gate->run('SELECT pg_advisory_lock(1)');
	foreach my $i (0 .. $#scripts)
	{
		$sessions[$i]->send("DO 'BEGIN PERFORM pg_advisory_xact_lock_shared(1); END';\n$scripts[$i]");
	}
	wait_for_block($node, map { $_->pid } @sessions[ 0 .. $#scripts ]);
	$gate->run('SELECT pg_advisory_unlock(1)');
	return;
}

sub run_together
{
	my (@scripts) = @_;

	start_together(@scripts);
	return map { $sessions[$_]->result } 0 .. $#scripts;
}

# How often each line occurs.
sub tally
{
	my %count;

	$count{$_}++ foreach @_;
	return join(', ', map { "$count{$_} $_" } sort keys %count);
}

#
# One key
#

# As a client would: claim; work and complete if new; print what it answers.
# Of those that the claim makes "new", the first ABORTS roll back.
sub submit
{
	my ($key, $wait, $aborts) = @_;

	return <<"SQL";
BEGIN;
SELECT outcome, outcome = 'new' AS mine, coalesce(response_body, '-') AS body,
	coalesce(response_status, 0) AS status, coalesce(claim_token, 0) AS token
FROM idem_claim('shop', '$key', sha256('order'), wait => $wait) \\gset
\\if :mine
SELECT nextval('tries') <= $aborts AS rolls_back, pg_sleep(0.1) \\gset
INSERT INTO orders VALUES ('$key', :token);
SELECT idem_complete('shop', '$key', 201, 'order ' || :token) AS finished \\gset
\\if :rolls_back
ROLLBACK;
\\echo rolled back
\\else
COMMIT;
\\echo new
\\endif
\\else
COMMIT;
\\echo :outcome :status :body
\\endif
SQL
}

my $key = 'one-key-for-everybody';

$node->safe_psql('postgres', 'CREATE SEQUENCE tries');
my @answers = run_together(map { submit($key, "'1 minute'", 0) } @sessions);
my $token = $node->safe_psql('postgres', "SELECT token FROM orders WHERE key = '$key'");

is(tally(@answers), "1 new, " . ($clients - 1) . " replay 201 order $token",
	"same-key-with-wait: one of $clients runs, the others get its response");

$key = 'the-first-three-abort';
$node->safe_psql('postgres', 'ALTER SEQUENCE tries RESTART');
@answers = run_together(map { submit($key, "'1 minute'", 3) } @sessions);
$token = $node->safe_psql('postgres', "SELECT token FROM orders WHERE key = '$key'");
is( tally(@answers),
	"1 new, " . ($clients - 4) . " replay 201 order $token, 3 rolled back",
	'same-key-with-wait: after an abort another one runs');

# Nobody but the holder waits here, so everybody is done while it is open.
$key = 'nobody-waits-for-this';
$sessions[0]->run("BEGIN; SELECT outcome FROM idem_claim('shop', '$key')");
@answers = (map { $_->result } map { $_->send(submit($key, 'NULL', 0)) } @sessions[ 1 .. $#sessions ]);
is(tally(@answers), ($clients - 1) . ' in_progress 0 -',
	'same-key-without-wait: answered while the holder is open');
$sessions[0]->run('ROLLBACK');

@answers = run_together(map { submit('a-race-without-waiting', 'NULL', 0) } @sessions);
is(scalar(grep { $_ eq 'new' } @answers), 1, 'same-key-without-wait: one of a race runs');
is(scalar(grep { !/^(new|in_progress 0 -|replay 201 order \d+)$/ } @answers),
	0, 'same-key-without-wait: the others are told that it does, or the response');

#
# Two claimants that run into each other may both withdraw, but not both go
# away believing in the other.
#

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE answers (key text, outcome text);
CREATE FUNCTION race() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'race-for-' || (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('race', k);
	INSERT INTO answers VALUES (k, c.outcome);
END
$$;
SQL
my $transactions = finish_pgbench(start_pgbench($node, 'postgres',
		{ race => "SELECT race();\n" },
		'-c', '16', '-j', '2', '-t', '500', '-M', 'prepared'));
is($transactions, 8000, 'race: no error');
is( $node->safe_psql('postgres',
		"SELECT key, array_agg(outcome) FROM answers GROUP BY key
		 HAVING count(*) FILTER (WHERE outcome = 'new') <> 1
			OR count(*) FILTER (WHERE outcome = 'in_progress') <> count(*) - 1"),
	'', 'race: whoever is told "in_progress", somebody has the claim');
cmp_ok($node->safe_psql('postgres',
		"SELECT count(*) FROM (SELECT FROM answers GROUP BY key HAVING count(*) > 1) AS k"),
	'>', 50, 'race: with several claimants for many keys');

#
# Of the callers that see the same abandoned lease, one takes over
#

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE takeovers (n bigserial, key text, token bigint, attempt int);
CREATE FUNCTION take_over() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := 'dead-lease-number-' || (random() * 2)::int;
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('race', k, lease => '0');
	IF c.outcome = 'new' THEN
		INSERT INTO takeovers (key, token, attempt) VALUES (k, c.claim_token, c.attempt);
	ELSIF c.outcome <> 'in_progress' THEN
		RAISE 'wrong outcome: %', c;
	END IF;
END
$$;
SQL
$transactions = finish_pgbench(start_pgbench($node, 'postgres',
		{
			'takeover@5' => "SELECT take_over();\n",
			'takeover-aborted@1' => "BEGIN;\nSELECT take_over();\nROLLBACK;\n",
		},
		'-c', '16', '-j', '2', '-T', '2'));
cmp_ok($transactions, '>', 100, 'takeover: no error');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM (SELECT token, attempt,
			lag(token, 1, 0::bigint) OVER w AS previous_token, lag(attempt, 1, 0) OVER w AS previous_attempt
			FROM takeovers WINDOW w AS (PARTITION BY key ORDER BY n)) AS t
		 WHERE token <= previous_token OR attempt <> previous_attempt + 1"),
	'0', 'takeover: each is of the claim before it, and nobody else takes that');
is( $node->safe_psql('postgres',
		"SELECT key, claim_token, attempt FROM idem_keys WHERE key LIKE 'dead-lease%'
		 EXCEPT SELECT key, max(token), max(attempt) FROM takeovers GROUP BY key"),
	'', 'takeover: the last one holds the key');

#
# One event, fired by many at once
#

# All keep their transactions open, so a call that waits for the winner would
# wait until its lock_timeout. The aggregate exists; is new; or is locked by
# another session until all have called.
sub fire
{
	my ($aggregate, $seq, $wait) = @_;

	return <<"SQL";
SET lock_timeout = '10s';
BEGIN;
SELECT outcome FROM idem_try_append('$aggregate', 'phone', $seq, wait => $wait);
SQL
}

my $losers = $clients - 1;
$node->safe_psql('postgres', "SELECT idem_try_append('fired', 'tablet', 1)");
foreach my $round (1 .. 10)
{
	my $wait = $round % 2 ? 'NULL' : "'1 millisecond'";
	my $aggregate = $round > 8 ? "fired-new-$round" : 'fired';

	@answers = run_together(map { fire($aggregate, $round, $wait) } @sessions);
	is(tally(@answers), "1 appended, $losers in_flight",
		"event $round: one appends, and no other sleeps on it, wait $wait")
	  or last;
	$_->run('COMMIT') foreach @sessions;
}

my $other = session($node);
$other->run("BEGIN; SELECT idem_try_append('fired', 'tablet', 2)");
$_->send(fire('fired', 20, 'NULL')) foreach @sessions;
my $pids = join(',', map { $_->pid } @sessions);
$node->poll_query_until('postgres', "SELECT count(*) = $losers FROM pg_stat_activity
	 WHERE pid IN ($pids) AND state = 'idle in transaction' AND query ~ '^;'")
  or die 'more than one queue behind another client';
$other->run('COMMIT');
is(tally(map { $_->result } @sessions), "1 appended, $losers in_flight",
	'event: one queues behind another client, the others do not');
$_->run('COMMIT; RESET lock_timeout') foreach @sessions;
$other->quit;

#
# Intents that arrive in any order
#

# One session's calls: each prints whether it was processed, whether its answer
# is right, and whether what it found, before the call, was.
sub intents
{
	return join('', map {
			my ($entity, $id, $type, $active) = @$_;
			my $other = $type eq 'like' ? 'dislike' : 'like';

			"SELECT '$id', processed,
				last_action_id >= $id AND (NOT processed OR last_action_id = $id AND is_active = $active),
				idem_is_active('u', 'post', '$entity', 'like')
					AND idem_is_active('u', 'post', '$entity', 'dislike')
			 FROM idem_set('u', 'post', '$entity', '$type', $active, $id, '{$other}');\n"
	} @_);
}

# Shuffle, but no further than this many places, so that not all calls are stale.
sub shuffle_nearby
{
	my ($places, @list) = @_;
	my @shuffled;

	push @shuffled, shuffle(splice(@list, 0, $places)) while @list;
	return @shuffled;
}

my $hammers = 20;
my (@intents, %last);

# One row that all of them hammer, and ten more for the race to create a row.
foreach my $id (1 .. 1000)
{
	push @intents,
	  [ 'hammered', $id, rand() < 0.5 ? 'like' : 'dislike', rand() < 0.6 ? 'true' : 'false' ];
	$last{hammered} = $intents[-1];
}
@intents = shuffle_nearby(100, @intents);
my @calls = map { [] } 1 .. $hammers;
foreach my $entity (map { "created-$_" } 1 .. 10)
{
	my $id = 0;

	foreach my $i (shuffle(0 .. $hammers - 1))
	{
		my $intent = [ $entity, ++$id, 'like', rand() < 0.5 ? 'true' : 'false' ];

		push @{ $calls[$i] }, $intent;
		$last{$entity} = $intent;
	}
}
push @{ $calls[ $_ % $hammers ] }, $intents[$_] foreach 0 .. $#intents;

@answers = run_together(map { intents(@$_) } @calls);
my @verdicts = map { split /\n/ } @answers;
is(scalar(@verdicts), 1000 + 10 * $hammers, 'set: every call answers');
is(join(' ', grep { !/^\d+\|[tf]\|t\|/ } @verdicts), '', 'set: and rightly');
is(join(' ', grep { !/\|f$/ } @verdicts), '', 'set: excluded action types are never active together');
is( join(' ', map {
			$node->safe_psql('postgres',
				"SELECT idem_is_active('u', 'post', '$_->[0]', '$_->[2]') = $_->[3]
					AND last_action_id = $_->[1]
				 FROM idem_action_versions WHERE entity_id = '$_->[0]'")
	} map { $last{$_} } sort keys %last),
	join(' ', ('t') x 11), "set: the latest intent wins (seed $seed)");

# Toggles cannot keep the latest intent, but each one that counts flips.
my @ids = shuffle_nearby(40, 1 .. 400);
my @toggles = map { '' } 1 .. $hammers;
$toggles[ $_ % $hammers ] .=
  "SELECT processed FROM idem_toggle('u', 'post', 'toggled', 'like', $ids[$_]);\n"
  foreach 0 .. $#ids;
my $flips = () = join("\n", run_together(@toggles)) =~ /^t$/mg;
is( $node->safe_psql('postgres',
		"SELECT idem_is_active('u', 'post', 'toggled', 'like'), last_action_id
		 FROM idem_action_versions WHERE entity_id = 'toggled'"),
	($flips % 2 ? 't' : 'f') . '|400', "toggle: flipped once for each of $flips processed calls");

$_->quit foreach ($gate, @sessions);

#
# A counter never falls
#

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE advances (n bigserial, entity text, action_id bigint);
CREATE FUNCTION advance() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	e text := (random() * 2)::int;
	id bigint := extract(epoch FROM clock_timestamp()) * 1000000 - random() * 5000;
	a record;
BEGIN
	SELECT * INTO a FROM idem_try_advance('u', 'feed', e, id);
	IF a.last_action_id < id OR a.should_process AND a.last_action_id <> id THEN
		RAISE 'wrong answer to %: %', id, a;
	END IF;
	IF a.should_process THEN
		INSERT INTO advances (entity, action_id) VALUES (e, id);
	END IF;
END
$$;
SQL
$transactions = finish_pgbench(start_pgbench($node, 'postgres',
		{
			'advance@4' => "SELECT advance();\n",
			'aborted@1' => "BEGIN;\nSELECT advance();\nROLLBACK;\n",
			'subaborted@1' => "BEGIN;\nSAVEPOINT s;\nSELECT advance();\nROLLBACK TO s;\n"
			  . "SELECT advance();\nCOMMIT;\n",
		},
		'-c', '16', '-j', '2', '-T', '2'));
cmp_ok($transactions, '>', 100, 'advance: no error');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM (SELECT action_id,
			lag(action_id) OVER (PARTITION BY entity ORDER BY n) AS previous FROM advances) AS a
		 WHERE action_id <= previous"),
	'0', 'advance: each value is above the one before');
is( $node->safe_psql('postgres',
		"SELECT entity_id, last_action_id FROM idem_action_versions WHERE entity_type = 'feed'
		 EXCEPT SELECT entity, max(action_id) FROM advances GROUP BY entity"),
	'', 'advance: and what was rolled back has not happened');

#
# A stale call answers from one moment, and not from after its snapshot
#

# The action is active as long as the counter is even.
$node->safe_psql('postgres', <<'SQL');
CREATE SEQUENCE flips MINVALUE 0;
SELECT idem_set('u', 'post', 'flipped', 'like', true, nextval('flips'));

CREATE FUNCTION stale() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	found record;
	seen bigint;
BEGIN
	SELECT last_action_id INTO seen FROM idem_action_versions WHERE entity_id = 'flipped';
	SELECT * INTO found FROM idem_set('u', 'post', 'flipped', 'like', true, 0);
	IF found.processed OR found.is_active <> (found.last_action_id % 2 = 0) THEN
		RAISE 'they do not belong together: %', found;
	END IF;
	IF current_setting('transaction_isolation') <> 'read committed' AND found.last_action_id <> seen THEN
		RAISE 'after the snapshot, which sees %: %', seen, found;
	END IF;
EXCEPTION
	WHEN serialization_failure THEN
		IF current_setting('transaction_isolation') = 'read committed' THEN
			RAISE;
		END IF;
END
$$;
SQL
$transactions = finish_pgbench(start_pgbench($node, 'postgres',
		{
			'flip@2' => "SELECT nextval('flips') AS id \\gset\n"
			  . "SELECT FROM idem_set('u', 'post', 'flipped', 'like', :id % 2 = 0, :id);\n",
			'stale@4' => "SELECT stale();\n",
			'stale-repeatable@2' => "BEGIN ISOLATION LEVEL REPEATABLE READ;\nSELECT stale();\nCOMMIT;\n",
		},
		'-c', '16', '-j', '2', '-T', '3'));
cmp_ok($transactions, '>', 100, 'stale: an answer from one moment, and not from after the snapshot');

#
# Everything at once
#

$node->safe_psql('postgres', <<'SQL');
CREATE TABLE claims (n bigserial, key text, token bigint, attempt int);

CREATE FUNCTION mixed_key(slot bigint) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT 'mixed-key-' || slot $$;

-- Claim; returns the token, 0 where somebody else has the key.  Wrong answers
-- are errors.
CREATE FUNCTION mixed_claim(slot bigint, wait interval DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	k text := mixed_key(slot);
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('mixed', k, sha256(k::bytea), lease => '20 milliseconds', wait => wait);
	IF c.outcome = 'new' THEN
		INSERT INTO claims (key, token, attempt) VALUES (k, c.claim_token, c.attempt);
		RETURN c.claim_token;
	ELSIF c.outcome = 'replay' THEN
		PERFORM FROM orders WHERE key = k AND c.response_body = 'order ' || token;
		IF NOT FOUND THEN
			RAISE 'replay of an order that is not there: %', c;
		END IF;
	ELSIF c.outcome <> 'in_progress' THEN
		RAISE 'wrong outcome: %', c;
	END IF;
	RETURN 0;
END
$$;

-- What the claim's holder does at last.  It may have lost the claim.
CREATE FUNCTION mixed_end(slot bigint, held bigint, what int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	k text := mixed_key(slot);
BEGIN
	IF what <= 15 THEN
		PERFORM idem_fail('mixed', k, 'no', held);
	ELSIF what <= 30 THEN
		PERFORM idem_release('mixed', k, held);
	ELSIF what <= 40 THEN
		PERFORM idem_heartbeat('mixed', k, '20 milliseconds', held);
	ELSIF what <= 85 THEN
		PERFORM idem_checkpoint('mixed', k, 'point ' || held, NULL, '20 milliseconds', held);
		IF idem_complete('mixed', k, 201, 'order ' || held, claim_token => held) THEN
			INSERT INTO orders VALUES (k, held);
		END IF;
	END IF;
EXCEPTION
	WHEN SQLSTATE 'ID003' OR SQLSTATE 'ID004' THEN
		NULL;
END
$$;
SQL

# New keys all the time, each in demand for a tenth of a second.
my $slot = "SELECT (extract(epoch FROM clock_timestamp()) * 100)::bigint - (random() * 8)::int AS slot \\gset\n";
my $claim = "SELECT mixed_claim(:slot) AS token \\gset\n";
my $end = "\\if :token > 0\nSELECT mixed_end(:slot, :token, 50);\n\\endif\n";
my %scripts = (
	# One transaction, with and without waiting.
	'one@3' => "BEGIN;\n${claim}${end}COMMIT;\n",
	'waiting@1' => "BEGIN;\n" . $claim =~ s/:slot/:slot, '100 milliseconds'/r . "${end}COMMIT;\n",

	# Changes its mind.
	'aborted@3' => "BEGIN;\n${claim}${end}ROLLBACK;\n",
	'subaborted@2' => "BEGIN;\nSAVEPOINT s;\n${claim}ROLLBACK TO s;\n${claim}${end}COMMIT;\n",

	# Two transactions, sometimes longer apart than the lease.
	'two@6' => <<'PGBENCH');
SELECT mixed_claim(:slot) AS token \gset
\if :token > 0
\set what random(1, 100)
\set pause random(0, 30)
\sleep :pause ms
SELECT mixed_end(:slot, :token, :what);
\endif
PGBENCH
# Where that is too little on a busy machine, there are more rounds.
my $mixed = "SELECT count(*), count(*) FILTER (WHERE attempt > 1), count(DISTINCT key),
	(SELECT count(*) FROM orders WHERE key LIKE 'mixed-%') FROM claims";
my ($claims, $takeovers, $keys, $orders) = (0, 0, 0, 0);
foreach my $round (1 .. 20)
{
	$transactions = finish_pgbench(start_pgbench($node, 'postgres',
			{ map { $_ => $slot . $scripts{$_} } keys %scripts },
			'-c', '24', '-j', '2', '-T', '5'));
	($claims, $takeovers, $keys, $orders) = split /\|/, $node->safe_psql('postgres', $mixed);
	last if $transactions < 0 || $takeovers > 20 && $orders > 20;
}
cmp_ok($transactions, '>', 0, 'mixed: no error, no wrong answer');
is( $node->safe_psql('postgres',
		"SELECT o.key, o.token, k.key, k.claim_token, k.state
		 FROM (SELECT * FROM orders WHERE key LIKE 'mixed-%') AS o
		 FULL JOIN (SELECT * FROM idem_keys WHERE scope = 'mixed' AND state = 'completed') AS k
			ON k.key = o.key AND k.claim_token = o.token AND k.response_body = 'order ' || o.token
		 WHERE o.key IS NULL OR k.key IS NULL"),
	'', 'mixed: a completed record if and only if its business row');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM (SELECT token,
			lag(token) OVER (PARTITION BY key ORDER BY n) AS previous FROM claims) AS c
		 WHERE token <= previous"),
	'0', 'mixed: every new claim has a higher token');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM (SELECT attempt,
			lag(attempt, 1, 0) OVER (PARTITION BY key ORDER BY n) AS previous FROM claims) AS c
		 WHERE attempt NOT IN (1, previous + 1)"),
	'0', 'mixed: and is the first attempt, or the next');
is( $node->safe_psql('postgres',
		"SELECT count(*) FROM idem_keys AS k WHERE scope = 'mixed'
			AND NOT EXISTS (SELECT FROM claims AS c
				WHERE c.key = k.key AND c.token = k.claim_token AND c.attempt = k.attempt)"),
	'0', 'mixed: every record belongs to a claim that was granted');

note("$transactions transactions, $claims claims of $keys keys, $takeovers of them takeovers, $orders orders");
cmp_ok($takeovers, '>', 20, 'mixed: with many takeovers');
cmp_ok($orders, '>', 20, 'mixed: and many orders');

# Whatever is left over can be taken over at once.
is( $node->safe_psql('postgres',
		"SELECT pg_sleep(0.03);
		 SELECT count(*) FROM (SELECT key FROM idem_keys
			WHERE scope = 'mixed' AND state IN ('started', 'failed') OFFSET 0) AS k,
			idem_claim('mixed', k.key) AS c WHERE c.outcome <> 'new'"),
	"\n0", 'mixed: nothing is left that blocks');

#
# Two timeouts at once
#

# The server reports one of them only, and an idem_claim() that is over its
# wait must not take that for the whole.  The sleeper is stopped until both
# have come; where we are too slow to see it wait, it waits longer next time.
my $holder = session($node);
$holder->run("BEGIN; SELECT outcome FROM idem_claim('timeouts', 'key-of-the-holder')");
my $sleeper = session($node);
my $stopped = 'f';
for (my $ms = 100; $stopped eq 'f'; $ms *= 3)
{
	my $state = 'FROM pg_stat_activity WHERE pid = ' . $sleeper->pid;

	$sleeper->run('SET statement_timeout = ' . ($ms + 20));
	$sleeper->send("DO \$\$ BEGIN PERFORM idem_claim('timeouts', 'key-of-the-holder', wait => '$ms ms'); PERFORM pg_sleep(50); END \$\$");
	$node->poll_query_until('postgres',
		"SELECT query ~ '^DO' AND (state = 'idle' OR wait_event_type = 'Lock') $state")
	  or die 'the sleeper does not wait';
	kill 'STOP', $sleeper->pid;
	$stopped = $node->safe_psql('postgres', "SELECT wait_event_type = 'Lock' $state");
	usleep(1000 * ($ms + 200)) if $stopped eq 't';
	kill 'CONT', $sleeper->pid;
	is($sleeper->result, 'ERROR 57014',
		'statement_timeout is not lost when it comes with the end of the wait');
}
$holder->run('ROLLBACK');

$node->stop;
done_testing();
