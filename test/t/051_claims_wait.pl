# A claim with wait, where another's, committed, is within its lease: it sleeps
# until that is completed, failed, released or forgotten, by whatever kind of
# commit, or until its lease ends; and it is woken, not told by a look that it
# takes once a second.

use IdempotencyTest;

my $node = new_node('waits', conf => 'max_prepared_transactions = 10');
my $bare = new_node('bare', conf => 'max_connections = 20');

$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idempotency'\nidempotency.cleanup_interval = 0");
$node->restart;
$bare->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$bare->restart;

my $schema = <<'SQL';
CREATE EXTENSION idempotency;
-- Does it end when the lease does, and not when it looks the next time, a second after it began?
CREATE FUNCTION ends_with_the_lease(key text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz := clock_timestamp();
	lease_end timestamptz;
BEGIN
	SELECT k.lease_expires_at INTO lease_end FROM idem_keys AS k WHERE k.key = $1;
	PERFORM idem_claim('shop', $1, wait => '5 minutes');
	RETURN lease_end > began + interval '0.1 s' AND clock_timestamp() < began + interval '0.9 s';
END
$$;
CREATE FUNCTION charge(request jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"by the run"'::jsonb $$;
SQL
$_->safe_psql('postgres', $schema) foreach $node, $bare;

my ($holder, $waiter, $other) = map { session($node) } 1 .. 3;
my $number = 0;
my $token;

sub key
{
	return "key-of-the-waits-$number";
}

# A new key, claimed by the holder.
sub claimed
{
	my ($lease) = @_;

	$number++;
	$token = $holder->run("SELECT claim_token FROM idem_claim('shop', '${\key()}', lease => '" . ($lease || '1 hour') . "')");
	return;
}

sub claim_sql
{
	my ($options) = @_;

	return "SELECT outcome, attempt, response_body FROM idem_claim('shop', '${\key()}', wait => '5 minutes'" . ($options || '') . ')';
}

sub complete_sql { return "SELECT idem_complete('shop', '${\key()}', 201, 'done', claim_token => $token)"; }
sub fail_sql { return "SELECT idem_fail('shop', '${\key()}', 'declined', $token)"; }
sub release_sql { return "SELECT idem_release('shop', '${\key()}', $token)"; }

#
# Events that end the claim
#
my $complete = sub { $holder->run(complete_sql()) };

sub wakes
{
	my ($answer, $title, @steps) = @_;

	claimed();
	$waiter->send(claim_sql());
	asleep($node, $waiter);
	ref $_ ? $_->() : $holder->run($_) foreach map { ref $_ && ref $_ eq 'ARRAY' ? $_->[0]->() : $_ } @steps;
	is($waiter->result, $answer, $title);
	return;
}

wakes('replay||done', 'completed', $complete);
wakes('new|2|', 'failed', [ \&fail_sql ]);
wakes('new|1|', 'released', [ \&release_sql ]);
wakes('new|1|', 'forgotten', [ sub { "SELECT idem_forget('shop', '${\key()}')" } ]);
wakes('replay||done', 'completed in a transaction', 'BEGIN', $complete, 'COMMIT');
wakes('new|2|', 'failed in a transaction', 'BEGIN', [ \&fail_sql ], 'COMMIT');
wakes('replay||done', 'released, which was undone', 'BEGIN', [ \&release_sql ], 'ROLLBACK', $complete);
wakes('replay||done', 'failed in a savepoint, which was undone',
	'BEGIN', 'SAVEPOINT a', [ \&fail_sql ], 'ROLLBACK TO a', 'COMMIT', $complete);
wakes('replay||done', 'completed by a prepared transaction',
	'BEGIN', $complete, "PREPARE TRANSACTION 'a'", "COMMIT PREPARED 'a'");
wakes('replay||done', 'failed by a prepared transaction, which was undone',
	'BEGIN', [ \&fail_sql ], "PREPARE TRANSACTION 'a'", "ROLLBACK PREPARED 'a'", $complete);
wakes('replay||done', 'a heartbeat and an erasure end nothing',
	[ sub { "SELECT idem_heartbeat('shop', '${\key()}', '2 hours', $token), idem_erase('shop', '${\key()}')" } ], $complete);
wakes('new|1|', 'deleted by no function of ours', 'DELETE FROM idem_keys');

# Many at once: more than a transaction notes one by one.
claimed();
$holder->run("SELECT idem_claim('many', 'one-of-many-keys-' || i) FROM generate_series(1, 100) AS i");
$waiter->send(claim_sql());
asleep($node, $waiter);
$holder->run("BEGIN; SELECT count(idem_complete('many', key, 200, claim_token => claim_token)) FROM idem_keys WHERE scope = 'many'; "
	  . complete_sql() . '; COMMIT');
is($waiter->result, 'replay||done', 'completed after a hundred others');

# The lease ends by itself; so does one that the first look did not see.
claimed('0.3 s');
is($waiter->run(claim_sql()), 'new|2|', 'the lease ends');
# On a busy machine it may take some tries.
my $in_time = 'f';
for (my $tries = 0; $in_time eq 'f' && $tries < 30; $tries++)
{
	claimed('0.5 s');
	$in_time = $waiter->run("SELECT ends_with_the_lease('${\key()}')");
}
is($in_time, 't', 'and with it the wait');
claimed();
$waiter->send(claim_sql());
asleep($node, $waiter);
$holder->run("SELECT idem_heartbeat('shop', '${\key()}', '0.3 s', $token) IS NOT NULL");
is($waiter->result, 'new|2|', 'the lease ends earlier than it did');

# The holder is killed: its claim is committed, so only the lease ends it.
claimed('2 s');
my $victim = session($node);
$victim->run('BEGIN; ' . complete_sql());
$waiter->send(claim_sql());
wait_for_block($node, $waiter->pid);
$holder->run('SELECT pg_terminate_backend(' . $victim->pid . ')');
is($waiter->result, 'new|2|', 'the holder is gone, and its lease ends');
$victim->quit;

# First a transaction, then a lease.
$number++;
$holder->run("BEGIN; SELECT FROM idem_claim('shop', '${\key()}')");
$waiter->send(claim_sql());
wait_for_block($node, $waiter->pid);
$holder->run('COMMIT');
asleep($node, $waiter);
$token = $holder->run("SELECT claim_token FROM idem_keys WHERE key = '${\key()}'");
$complete->();
is($waiter->result, 'replay||done', 'the holder commits its claim, and completes it then');

#
# Calls that have nothing to wait for
#
$number++;
$holder->run("SELECT FROM idem_claim('shop', '${\key()}', '\\x01')");
is($waiter->run(claim_sql(", request_hash => '\\x02'")), 'hash_conflict||', 'a hash conflict is told at once');
$number++;
is($waiter->run("BEGIN; SELECT outcome FROM idem_claim('shop', '${\key()}'); SELECT outcome FROM idem_claim('shop', '${\key()}', wait => '10 minutes'); ROLLBACK"),
	"new\nin_progress", 'so is a claim of one\'s own');

#
# idem_run
#
claimed();
$waiter->send("SELECT outcome, response_body FROM idem_run('shop', '${\key()}', 'charge(jsonb)', 'null')");
asleep($node, $waiter);
$complete->();
is($waiter->result, 'replay|done', 'idem_run: completed');
claimed();
$waiter->send("SELECT outcome, response_body FROM idem_run('shop', '${\key()}', 'charge(jsonb)', 'null')");
asleep($node, $waiter);
$holder->run(release_sql());
is($waiter->result, 'new|"by the run"', 'idem_run: released');

#
# Snapshots, cancel requests, time limits
#
foreach my $level ('REPEATABLE READ', 'SERIALIZABLE')
{
	claimed();
	$waiter->run("BEGIN ISOLATION LEVEL $level; SELECT count(*) FROM idem_keys");
	$waiter->send(claim_sql());
	asleep($node, $waiter);
	$complete->();
	is($waiter->result, 'ERROR 40001', "$level: the answer would rest on a newer record");
	$waiter->run('ROLLBACK');
}

claimed();
$waiter->send(claim_sql());
asleep($node, $waiter);
$holder->run('SELECT pg_cancel_backend(' . $waiter->pid . ')');
is($waiter->result, 'ERROR 57014', 'a cancel request');

$waiter->send("DO \$\$ BEGIN PERFORM idem_claim('shop', '${\key()}', wait => '5 minutes'); EXCEPTION WHEN query_canceled THEN NULL; END \$\$");
asleep($node, $waiter);
$holder->run('SELECT pg_cancel_backend(' . $waiter->pid . ')');
is($waiter->result, '', 'one that is caught');
$waiter->send(claim_sql());
asleep($node, $waiter);
$complete->();
is($waiter->result, 'replay||done', 'and the session waits again');

claimed();
$waiter->run("SET statement_timeout = '50ms'");
is($waiter->run(claim_sql()), 'ERROR 57014', 'statement_timeout');
$waiter->run("RESET statement_timeout; SET lock_timeout = '50ms'");
is($waiter->run(claim_sql()), 'ERROR 55P03', 'lock_timeout');
$waiter->run('RESET lock_timeout');

my $doomed = session($node);
$doomed->send(claim_sql());
asleep($node, $doomed);
$holder->run('SELECT pg_terminate_backend(' . $doomed->pid . ')');
is($doomed->result, "ERROR 57P01\nERROR lost", 'pg_terminate_backend');
$doomed->quit;

#
# A wait holds no row, no page that vacuum would wait for, and no table. So a
# session that waits for all writers of a table does not wait for the waiting
# call, with the holder queued behind it. The same applies in a session's first
# call.
#
$other->run("SET lock_timeout = '1 min'");
foreach my $case ([ 'a session', $waiter ], [ 'a first call', session($node) ])
{
	my ($title, $sleeper) = @$case;

	claimed();
	$sleeper->send(claim_sql());
	asleep($node, $sleeper);
	is($other->run("SELECT count(*) FROM idem_keys WHERE key = '${\key()}' AND xmax = 0"), 1, "$title: no row is locked");
	is(locks_of($node, $sleeper), 0, "$title: nor anything else");
	is($other->run('VACUUM (FREEZE) idem_keys; SELECT 1'), 1, "$title: vacuum has every page");
	is($other->run('REINDEX TABLE idem_keys; SELECT 1'), 1, "$title: another waits for no writer of the table");
	is($holder->run("SELECT outcome FROM idem_claim('shop', 'another-of-${\key()}')"), 'new', "$title: nor others for him");
	is($holder->run("SELECT idem_heartbeat('shop', '${\key()}', '1 hour', $token) > now()"), 't', "$title: nor the holder");
	is($other->run('VACUUM FULL idem_keys; SELECT 1'), 1, "$title: the table may be replaced");
	$complete->();
	is($sleeper->result, 'replay||done', "$title: and the wait goes on");
}

# A lock that it had before, the transaction keeps; and the wait one that it
# begins with, as long as it sleeps on a transaction, which the deadlock detector
# knows of.
claimed();
$waiter->run("BEGIN; SELECT FROM idem_claim('shop', 'before-${\key()}')");
my $locks = locks_of($node, $waiter);
$waiter->send(claim_sql());
asleep($node, $waiter);
is(locks_of($node, $waiter), $locks, 'what the transaction has locked, it keeps');
$complete->();
is($waiter->result, 'replay||done', 'and goes on');
$waiter->run('ROLLBACK');

$number++;
$holder->run("BEGIN; SELECT FROM idem_claim('shop', '${\key()}')");
$waiter->send(claim_sql());
wait_for_block($node, $waiter->pid);
$other->send('REINDEX TABLE idem_keys; SELECT 1');
wait_for_block($node, $waiter->pid, $other->pid);
$holder->run('COMMIT');
is($other->result, 1, 'asleep on a transaction first, then on its lease: likewise');
asleep($node, $waiter);
is(locks_of($node, $waiter), 0, 'and no lock is left');
$holder->run("SELECT idem_release('shop', '${\key()}', claim_token) FROM idem_keys WHERE key = '${\key()}'");
is($waiter->result, 'new|1|', 'nor the wait');

# Nothing is left to wait for.
claimed();
$waiter->send(claim_sql());
asleep($node, $waiter);
$other->run('DROP EXTENSION idempotency');
is($waiter->result, 'ERROR 42704', 'the extension is dropped meanwhile');
$other->run('CREATE EXTENSION idempotency; RESET lock_timeout');

#
# Several wait for a key: all have an answer; a claim is one's.
#
my $submit = <<'SQL';
CREATE FUNCTION submit(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	claim record;
BEGIN
	SELECT * INTO claim FROM idem_claim('shop', k, wait => '5 minutes');
	IF claim.outcome = 'new' THEN
		PERFORM idem_complete('shop', k, 201, 'done');
	END IF;
	RETURN claim.outcome;
END
$$;
SQL
$_->safe_psql('postgres', $submit) foreach $node, $bare;

my @crowd = map { session($node) } 1 .. 40;
foreach my $case ([ 'completed', \&complete_sql, 0 ], [ 'failed', \&fail_sql, 1 ],
	[ 'released', \&release_sql, 1 ])
{
	claimed();
	$_->send("SELECT submit('${\key()}')") foreach @crowd;
	asleep($node, @crowd);
	$holder->run($case->[1]->());
	my @answers = map { $_->result } @crowd;
	is(scalar(grep { $_ eq 'new' } @answers), $case->[2], "$case->[0], and forty wait: who has the claim");
	is(scalar(grep { $_ eq 'replay' } @answers), 40 - $case->[2], 'and who its response');
}

# The one that would look when the lease ends is cancelled; another does.
claimed('3 s');
$waiter->send(claim_sql());
asleep($node, $waiter);
$_->send("SELECT submit('${\key()}')") foreach @crowd;
$holder->run('SELECT pg_cancel_backend(' . $waiter->pid . ')');
is($waiter->result, 'ERROR 57014', 'the first of many that wait for a lease is cancelled');
my @answers = map { $_->result } @crowd;
is(scalar(grep { $_ eq 'new' } @answers), 1, 'one has it when it ends');

#
# Woken, not polled: half of the rounds are faster than a look each second
# could be.  Likewise without preloading.
#
sub median_latency
{
	my ($at, $ends, $waits) = @_;
	my $held;

	return median_seconds(21,
		sub {
			my $key = "key-of-round-${\$at->name}-$_[0]";

			$held = $ends->run("SELECT claim_token FROM idem_claim('shop', '$key')");
			$waits->send("SELECT outcome FROM idem_claim('shop', '$key', wait => '5 minutes')");
			asleep($at, $waits);
		},
		sub {
			$ends->run("SELECT idem_complete('shop', 'key-of-round-${\$at->name}-$_[0]', 201, claim_token => $held)");
			die 'no replay' if $waits->result ne 'replay';
		});
}

my $latency = median_latency($node, $holder, $waiter);
note("median from completing to the waiter's row: $latency s");
cmp_ok($latency, '<', 0.2, 'a waiter is woken');

my ($bare_holder, $bare_waiter) = map { session($bare) } 1 .. 2;
$latency = median_latency($bare, $bare_holder, $bare_waiter);
note("the same without preloading: $latency s");
cmp_ok($latency, '<', 0.2, 'likewise without preloading');

done_testing();
