# Waits where things are not as they should be: more sessions than there are places
# to wait in, no shared memory at all, relays that stand in front of others,
# transactions that are prepared, a server that crashes, stops or is replaced.  Who
# cannot be woken looks once a second, and nobody is forgotten.

use IdempotencyTest;

my $schema = <<'SQL';
CREATE EXTENSION idempotency;
CREATE TABLE answers (answer text);
CREATE FUNCTION use_up() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_advisory_xact_lock(n) FROM generate_series(1, 10000000) AS n;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
SQL
my $places = 256;
my $preload = "shared_preload_libraries = 'idempotency'\nidempotency.cleanup_interval = 0\nmax_prepared_transactions = 10\n";
my $node = new_node('bare', conf => "shared_preload_libraries = ''\nmax_connections = 320\nrestart_after_crash = on");
my $is_limited = $node->pg_version < 17;
my ($other, $waiter);

$node->safe_psql('postgres', $schema);

sub claim_sql
{
	my ($key, $options) = @_;

	return "SELECT outcome FROM idem_claim('shop', 'the-key-of-the-$key'" . ($options ? ", $options" : '') . ')';
}

sub complete_sql
{
	my ($key) = @_;

	return "SELECT idem_complete('shop', key, 200, claim_token => claim_token) FROM idem_keys WHERE key = 'the-key-of-the-$key'";
}

# Of one topic, a message.
sub take_sql
{
	my ($topic) = @_;

	return "SELECT payload FROM idem_outbox_take(1, topics => '{$topic}', wait => '5 minutes')";
}

# start_crowd(COUNT, SQL): COUNT sessions make this call, and sleep. Their
# results go into a table.
sub start_crowd
{
	my ($count, $sql) = @_;
	my $crowd = start_pgbench($node, 'postgres', { crowd => "INSERT INTO answers $sql" }, '-c', $count, '-t', 1);

	$node->poll_query_until('postgres',
		"SELECT count(*) = $count FROM pg_stat_activity WHERE query LIKE 'INSERT INTO answers%' AND wait_event_type = 'Extension'")
	  or die 'the crowd does not sleep';
	return $crowd;
}

# answers_of(CROWD): how many of each.
sub answers_of
{
	my ($crowd) = @_;

	finish_pgbench($crowd);
	return $node->safe_psql('postgres',
		"SELECT answer, count(*) FROM answers GROUP BY 1; DELETE FROM answers");
}

# In the middle of a few rounds, from completing, or publishing, to the answer.
my $round = 0;

sub claim_latency
{
	return median_seconds(5,
		sub {
			$round++;
			$other->run(claim_sql("round-$round"));
			$waiter->send(claim_sql("round-$round", "wait => '5 minutes'"));
			asleep($node, $waiter);
		},
		sub {
			$other->run(complete_sql("round-$round"));
			die 'no replay' if $waiter->result ne 'replay';
		});
}

sub take_latency
{
	return median_seconds(5,
		sub {
			$round++;
			$other->run("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'rounds'");
			$waiter->send(take_sql('rounds'));
			asleep($node, $waiter);
		},
		sub {
			$other->run("SELECT FROM idem_publish('rounds', '$round')");
			die 'another message' if $waiter->result ne $round;
		});
}

# is_answered(LATENCY, WOKEN, TITLE): either at once or by a look
sub is_answered
{
	my ($latency, $woken, $title) = @_;

	note("$title: $latency s");
	cmp_ok($latency, '<', $woken ? 0.5 : 3, $title);
	return;
}

#
# More than there are places
#
my $wait_for_crowd = claim_sql('crowd', "wait => '5 minutes'");

($other, $waiter) = map { session($node) } 1 .. 2;
$other->run(claim_sql('crowd'));
my $crowd = start_crowd($places, $wait_for_crowd);
is_answered(claim_latency(), !$is_limited, "$places claims wait, and one more");
is_answered(take_latency(), !$is_limited, 'and a take');
$waiter->send(claim_sql('crowd', "wait => '0.1 s'"));
is($waiter->result, 'in_progress', 'which waits no longer than it should');
$other->run(claim_sql('a-lease', "lease => '1.5 s'"));
is($waiter->run(claim_sql('a-lease', "wait => '5 minutes'")), 'new', 'nor than the lease');
$other->run(complete_sql('crowd'));
is(answers_of($crowd), "replay|$places", 'the crowd has its answers');
is_answered(claim_latency(), 1, 'and its places are free');

$crowd = start_crowd($places, take_sql('crowd'));
is_answered(take_latency(), !$is_limited, "$places takes wait, and one more");
is_answered(claim_latency(), !$is_limited, 'and a claim');
$other->run("SELECT count(idem_publish('crowd', '0')) FROM generate_series(1, $places)");
is(answers_of($crowd), "0|$places", 'the crowd has its messages');
is_answered(take_latency(), 1, 'and its places are free');
$_->quit foreach $other, $waiter;

#
# No memory.  The table of locks grows until nothing is left.
#
$node->restart;
is($node->safe_psql('postgres', 'SELECT use_up()'), '53200', 'the server has no shared memory left');
($other, $waiter) = map { session($node) } 1 .. 2;
is_answered(claim_latency(), !$is_limited, 'without memory, a claim waits');
is_answered(take_latency(), !$is_limited, 'and a take');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_shmem_allocations WHERE name = 'idempotency waiters'"), 0, 'there was none');
$_->quit foreach $other, $waiter;

#
# Preloaded, there is a place for each.
#
$node->append_conf('postgresql.conf', $preload);
$node->restart;
($other, $waiter) = map { session($node) } 1 .. 2;
$other->run(claim_sql('crowd-of-all'));
$crowd = start_crowd(300, $wait_for_crowd =~ s/crowd/crowd-of-all/r);
is_answered(claim_latency(), 1, 'preloaded: 300 claims wait, and one more');
is_answered(take_latency(), 1, 'and a take');
$other->run(complete_sql('crowd-of-all'));
is(answers_of($crowd), 'replay|300', 'the crowd has its answers');

#
# Relays that came later stand before the others in the list, and each of these
# listens to many topics, so any message could be for it. So the relay that
# a message is for comes behind more relays than one step wakes. The last relay
# to sleep gets its message first. If the relay depended on its look once per
# second, it would always have just looked.
#
my @relays = map { session($node) } 1 .. 9;
foreach my $i (0 .. $#relays)
{
	$relays[$i]->send(take_sql("far-$i"));
	asleep($node, $relays[$i]);
}
$crowd = start_crowd(40,
	"SELECT payload FROM idem_outbox_take(1, wait => '5 minutes', "
	  . "topics => (SELECT array_agg(:client_id || '-near-' || i) FROM generate_series(1, 600) AS i))");
my $latency = median_seconds(scalar(@relays), sub { },
	sub {
		my $i = @relays - $_[0];

		$other->run("SELECT FROM idem_publish('far-$i', '$i')");
		die 'another message' if $relays[$i]->result ne $i;
	});
is_answered($latency, 1, 'a relay behind forty others');
$other->run("SELECT count(idem_publish(i || '-near-1', '0')) FROM generate_series(0, 39) AS i");
is(answers_of($crowd), '0|40', 'and these have theirs');
$_->quit foreach @relays;

#
# Prepared transactions
#
# prepared(BEGIN, WAIT, END, ANSWER, TITLE, NEXT): prepare a transaction that
# runs BEGIN, let the waiter wait, end the transaction, and, if NEXT is given,
# check that the waiter sleeps again, and run NEXT.
sub prepared
{
	my ($begin, $waits, $end, $answer, $title, $next) = @_;

	$other->run("BEGIN; $begin; PREPARE TRANSACTION 'p'");
	$waiter->send($waits);
	$waits =~ /claim/ ? wait_for_block($node, $waiter->pid) : asleep($node, $waiter);
	$other->run("$end PREPARED 'p'");
	if ($next)
	{
		asleep($node, $waiter);
		$other->run($next);
	}
	is($waiter->result, $answer, $title);
	return;
}

my $wait = "wait => '5 minutes'";

prepared(claim_sql('p-1'), claim_sql('p-1', $wait), 'COMMIT', 'replay',
	'a prepared claim is committed, and completed then', complete_sql('p-1'));
prepared(claim_sql('p-2'), claim_sql('p-2', $wait), 'ROLLBACK', 'new', 'a prepared claim is rolled back');
$other->run("SELECT idem_publish('p', '1', 'key'), idem_publish('p', '2', 'key')");
prepared("SELECT id FROM idem_outbox_take(1, topics => '{p}')", take_sql('p'), 'ROLLBACK', 1, 'a prepared take is rolled back');
prepared("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'p' AND attempt > 0",
	take_sql('p'), 'COMMIT', 2, 'a prepared acknowledgement is committed: the next of the key');

#
# A crash: who waits is lost, and nothing else.
#
sub begin_waits
{
	my ($at, $name) = @_;
	my @sessions = map { session($at) } 1 .. 4;

	$at->safe_psql('postgres', claim_sql($name, "lease => '1 hour'"));
	$sessions[0]->run('BEGIN; ' . claim_sql("$name-open"));
	$sessions[1]->send(claim_sql("$name-open", $wait));
	$sessions[2]->send(claim_sql($name, $wait));
	$sessions[3]->send(take_sql($name));
	wait_for_block($at, $sessions[1]->pid);
	asleep($at, @sessions[ 2, 3 ]);
	return @sessions;
}

my @sessions = begin_waits($node, 'crash');
kill 'KILL', $sessions[2]->pid;
like($_->result, qr/ERROR lost$/, 'crash: a wait is lost') foreach @sessions[ 1 .. 3 ];
$_->quit foreach @sessions, $other, $waiter;
$node->poll_query_until('postgres', 'SELECT true') or die 'the server does not come back';
($other, $waiter) = map { session($node) } 1 .. 2;
is($waiter->run(claim_sql('crash-open', $wait)), 'new', 'crash: an open claim is gone');
is($waiter->run(claim_sql('crash', "wait => '0.1 s'")), 'in_progress', 'crash: a lease is not');
is_answered(claim_latency(), 1, 'crash: and a claim is woken');
is_answered(take_latency(), 1, 'crash: and a take');
$_->quit foreach $other, $waiter;
$node->stop;

#
# Promotion.  A session of the standby waits when that is the primary.
#
my $primary = new_node('primary', allows_streaming => 1, conf => $preload);

$primary->safe_psql('postgres', $schema);
$node = new_standby($primary);

@sessions = begin_waits($primary, 'promotion');
$primary->wait_for_catchup($node, 'replay', $primary->lsn('flush'));
($other, $waiter) = map { session($node) } 1 .. 2;
is($waiter->run(claim_sql('promotion', $wait)), 'ERROR 25006', 'a claim does not wait on a standby');
is($waiter->run(take_sql('promotion')), 'ERROR 25006', 'nor does a take');
$primary->stop('fast');
is($_->result, "ERROR 57P01\nERROR lost", 'the primary stops: a wait is over') foreach @sessions[ 1 .. 3 ];
$_->quit foreach @sessions;
$node->promote;
is($waiter->run(claim_sql('promotion-open', $wait)), 'new', 'promoted: an open claim is gone');
$waiter->send(claim_sql('promotion', $wait));
asleep($node, $waiter);
$other->run(complete_sql('promotion'));
is($waiter->result, 'replay', 'promoted: a lease is waited for, and completed');
is_answered(claim_latency(), 1, 'promoted: a claim is woken');
is_answered(take_latency(), 1, 'promoted: and a take');
$node->stop;

done_testing();
