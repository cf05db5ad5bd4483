# A take with wait sleeps while there is nothing to take: until a message has
# been published, or becomes available, by whatever way.  As few relays as will
# do are woken for it, and none is forgotten.

use List::Util qw(min);
use Time::HiRes qw(time usleep);
use IdempotencyTest;

my $preload = "shared_preload_libraries = 'idempotency'\nidempotency.cleanup_interval = 0";
my $node = new_node('relays', conf => "max_prepared_transactions = 10\n$preload");
my $bare = new_node('bare', conf => "shared_preload_libraries = ''");

$_->safe_psql('postgres', 'CREATE EXTENSION idempotency') foreach $node, $bare;

my ($other, $relay) = map { session($node) } 1 .. 2;

# Messages carry their names, and a relay says them.
sub publish
{
	my ($name, $options) = @_;

	return "SELECT FROM idem_publish('t', '\"$name\"'" . ($options ? ", $options" : '') . ')';
}

sub take
{
	my ($options) = @_;

	return "SELECT payload #>> '{}' FROM idem_outbox_take(wait => '5 minutes'" . ($options ? ", $options" : '') . ')';
}

# ack(NAME): acknowledge the message with this name
sub ack
{
	my ($name) = @_;

	return "SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE payload #>> '{}' = '$name'";
}

# wakes(TITLE, NAME, SQL ...): a relay sleeps, these statements follow, and it has
# the message of that name.
sub wakes
{
	my ($title, $name, @statements) = @_;

	$relay->send(take());
	asleep($node, $relay);
	$other->run($_) foreach @statements;
	is($relay->result, $name, $title);
	$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
	return;
}

#
# Events that make a message available
#
wakes('published', 'a', publish('a'));
wakes('published in a transaction', 'a', 'BEGIN', publish('a'), 'COMMIT');
wakes('after one that was rolled back', 'b', 'BEGIN', publish('a'), 'ROLLBACK', publish('b'));
wakes('published by a prepared transaction', 'a', 'BEGIN', publish('a'), "PREPARE TRANSACTION 'a'", "COMMIT PREPARED 'a'");
wakes('a delay of less than a second is over', 'a', publish('a', "deliver_after => '0.3 s'"));
wakes('one of more than a second', 'a', publish('a', "deliver_after => '1.5 s'"));

$other->run(publish('a', "message_key => 'k'") . ';' . publish('b', "message_key => 'k'"));
is($other->run('SELECT count(*) FROM idem_outbox_take(1)'), 1, 'the first of a key is taken');
wakes('acknowledged, the next one follows', 'b', ack('a'));

$other->run(publish('a'));
$other->run('SELECT count(*) FROM idem_outbox_take(1)');
wakes('refused, after its pause', 'a', "SELECT idem_outbox_nack(id, retry_after => '0.2 s') FROM idem_outbox WHERE state = 'pending'");

$other->run(publish('a'));
$other->run('SELECT count(*) FROM idem_outbox_take(1)');
wakes('given back', 'a', "SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox WHERE state = 'pending'");

$other->run(publish('a'));
$other->run("SELECT count(*) FROM idem_outbox_take(1, '1.2 s')");
$relay->send(take());
is($relay->result, 'a', 'its lease is over');
$other->run(ack('a'));

$other->run(publish('a'));
$other->run('BEGIN; SELECT count(*) FROM idem_outbox_take()');
wakes('a take was rolled back', 'a', 'ROLLBACK');

# A take parks a message, and another relay meanwhile acknowledges the one before
# it.  The end of the first transaction wakes at once: it need not wait for the
# look each second.
foreach my $end ('COMMIT', 'ROLLBACK')
{
	my $quickest = 1000;
	for (my $try = 0; $try < 5 && $quickest >= 0.2; $try++)
	{
		$other->run(publish('a', "message_key => 'k'") . ';' . publish('b', "message_key => 'k'"));
		$other->run("SELECT count(*) FROM idem_outbox_take(2, '0')");
		$other->run("SELECT count(*) FROM idem_outbox_take(1, '1 hour')");
		$other->run('BEGIN');
		$other->run('SELECT count(*) FROM idem_outbox_take()');
		$relay->send(take());
		asleep($node, $relay);
		$node->safe_psql('postgres', ack('a'));
		# It looks now, and sleeps again.
		usleep(100_000);
		asleep($node, $relay);
		my $begin = time;
		$other->run($end);
		is($relay->result, 'b', "$end of a take that has parked a message");
		$quickest = min($quickest, time - $begin);
		$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
	}
	cmp_ok($quickest, '<', 0.2, "$end wakes at once");
}

$other->run(publish('a') . '; SET idempotency.outbox_max_attempts = 1');
$other->run("SELECT count(*) FROM idem_outbox_take()");
$other->run("SELECT idem_outbox_nack(id) FROM idem_outbox WHERE state = 'pending'");
wakes('requeued', 'a', 'SELECT idem_outbox_requeue()');
$other->run('RESET idempotency.outbox_max_attempts');

#
# Topics
#
my @relays = map { session($node) } 1 .. 20;
$relays[0]->send(take("topics => '{x}'"));
$relays[1]->send(take("topics => '{y}'"));
$relays[2]->send(take("topics => '{x,z}'"));
asleep($node, @relays[ 0 .. 2 ]);
$other->run("SELECT FROM idem_publish('y', '\"for y\"')");
is($relays[1]->result, 'for y', 'who listens to the topic has the message');
asleep($node, @relays[ 0, 2 ]);
$other->run("SELECT FROM idem_publish('z', '\"for z\"')");
is($relays[2]->result, 'for z', 'also beside others');
asleep($node, $relays[0]);
$other->run("BEGIN; SELECT count(idem_publish('topic-' || i, '0')) FROM generate_series(1, 50) AS i; SELECT FROM idem_publish('x', '\"for x\"'); COMMIT");
is($relays[0]->result, 'for x', 'among fifty others');
is($relay->run(take("topics => '{}'") =~ s/5 minutes/50 ms/r), '', 'no topic: nothing, after the wait');
$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');

#
# Several relays
#
foreach my $case ([ 'one transaction', 'BEGIN;', 'COMMIT' ], [ 'each its own', '', '' ])
{
	$_->send(take('max_messages => 1')) foreach @relays;
	asleep($node, @relays);
	$other->run($case->[1] . join(';', map { publish("m$_") } 1 .. 20) . ';' . $case->[2]);
	is(join(' ', sort map { $_->result } @relays), join(' ', sort map { "m$_" } 1 .. 20),
		"twenty messages, $case->[0], for twenty relays that take one");
	$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
}

# The one that has been woken cannot go on, and is ended: another has the
# message.  All of them are stopped first, so that it does not matter which it
# is.
$_->send(take()) foreach @relays[ 0 .. 4 ];
asleep($node, @relays[ 0 .. 4 ]);
kill 'STOP', $_->pid foreach @relays[ 0 .. 4 ];
$other->run(publish('a'));
$other->run('SELECT pg_terminate_backend(' . $_->pid . ')') foreach @relays[ 1 .. 4 ];
kill 'CONT', $_->pid foreach @relays[ 1 .. 4 ];
$_->result foreach @relays[ 1 .. 4 ];
kill 'CONT', $relays[0]->pid;
my $heir = $other->run("SELECT attempt FROM idem_outbox WHERE state = 'pending'") ? 1 : 0;
$node->safe_psql('postgres', "UPDATE idem_outbox SET available_at = now() WHERE state = 'pending'") if $heir;
is($relays[0]->result, 'a', 'the others have been ended: the last one has the message');
$_->quit foreach @relays[ 1 .. 4 ];
@relays = @relays[ 0, 5 .. 19 ];
$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');

# No herd: for each message a few relays look, not all sixteen.  A look is two scans.
sub looks
{
	return $node->safe_psql('postgres',
		"SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'idem_outbox_due'");
}

foreach my $delay ('0', '0.05 s')
{
	my $count = 40;
	my $loop = <<"SQL";
DO \$\$
DECLARE
	ids bigint[];
BEGIN
	LOOP
		ids := array(SELECT id FROM idem_outbox_take(1, wait => '2 minutes'));
		PERFORM pg_stat_force_next_flush();
		COMMIT;
		EXIT WHEN EXISTS (SELECT FROM idem_outbox WHERE topic = 'stop');
		PERFORM idem_outbox_ack(ids);
		COMMIT;
	END LOOP;
END
\$\$
SQL
	$_->send($loop) foreach @relays;
	asleep($node, @relays);
	my ($before, $begin) = (looks(), time);
	foreach my $i (1 .. $count)
	{
		$other->run(publish("m$i", "deliver_after => '$delay'"));
		$node->poll_query_until('postgres', "SELECT count(*) = 0 FROM idem_outbox WHERE state = 'pending'")
		  or die 'not delivered';
	}
	asleep($node, @relays);
	my $seconds = time - $begin;
	$other->run("SELECT count(idem_publish('stop', '0')) FROM generate_series(1, 30)");
	is(join('', map { $_->result } @relays), '', "all messages are delivered, delay $delay");
	my $looks = looks() - $before;
	note("$looks looks of " . @relays . " relays for $count messages in $seconds s, delay $delay");
	cmp_ok($looks, '<', 2 * (9 * $count + @relays * (2 + $seconds)),
		"not all relays look for each, delay $delay");
	$node->safe_psql('postgres', 'TRUNCATE idem_outbox');
}

#
# Time limits, cancel requests, snapshots
#
is($relay->run(take() =~ s/5 minutes/50 ms/r), '', 'the wait is over');
is($relay->run("SET lock_timeout = '10 ms'; " . (take() =~ s/5 minutes/100 ms/r)), '', 'lock_timeout is for locks');
is($relay->run("SET statement_timeout = '50 ms'; " . take()), 'ERROR 57014', 'statement_timeout');
$relay->run('RESET lock_timeout; RESET statement_timeout');
$relay->send(take());
asleep($node, $relay);
$other->run('SELECT pg_cancel_backend(' . $relay->pid . ')');
is($relay->result, 'ERROR 57014', 'a cancel request');

$relay->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem_outbox');
$relay->send(take() =~ s/5 minutes/300 ms/r);
$other->run(publish('a'));
is($relay->result, '', 'REPEATABLE READ: what is newer than the snapshot is not taken');
$relay->run('COMMIT');
is($relay->run(take()), 'a', 'but by the next transaction');

# Behind a message that another transaction holds
$other->run(publish('a', "message_key => 'k'"));
$other->run('SELECT count(*) FROM idem_outbox_take(1)');
$other->run('BEGIN; ' . ack('a'));
$node->safe_psql('postgres', publish('b', "message_key => 'k'"));
is($relay->run(take() =~ s/5 minutes/50 ms/r), '', 'not while an earlier one of its key is being acknowledged');
$relay->send(take());
asleep($node, $relay);
is(locks_of($node, $relay), 0, 'it sleeps until then, without a lock');
$other->run('COMMIT');
is($relay->result, 'b', 'and then takes it');
$other->run(ack('b'));

# Locks of the wait
$relay->send(take());
asleep($node, $relay);
is(locks_of($node, $relay), 0, 'no lock');
is($other->run("SET lock_timeout = '1 min'; REINDEX TABLE idem_outbox; RESET lock_timeout; SELECT 1"), 1, 'no table');
is($other->run('VACUUM (FREEZE) idem_outbox; SELECT 1'), 1, 'no page that vacuum wants');
$other->run(publish('b'));
is($relay->result, 'b', 'and it goes on');

#
# Woken, not polled: half of the rounds are faster than a look each second
# could be.  Likewise without preloading.
#
sub median_latency
{
	my ($at, $publisher, $waits) = @_;

	return median_seconds(21,
		sub {
			$waits->send("SELECT payload FROM idem_outbox_take(wait => '5 minutes')");
			asleep($at, $waits);
		},
		sub {
			$publisher->run("SELECT FROM idem_publish('latency', '$_[0]')");
			die 'another message' if $waits->result ne $_[0];
		});
}

my $latency = median_latency($node, $other, $relay);
note("median from publishing to the relay's row: $latency s");
cmp_ok($latency, '<', 0.2, 'a relay is woken');

# Likewise by a take that is rolled back to a savepoint, and at once.
$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
$latency = median_seconds(11,
	sub {
		$other->run('COMMIT; ' . ack('a')) if $_[0] > 1;
		$other->run(publish('a'));
		is($other->run('BEGIN; SAVEPOINT s; SELECT count(*) FROM idem_outbox_take()'), 1, 'one is taken, in a savepoint');
		$relay->send(take());
		asleep($node, $relay);
	},
	sub {
		$other->run('ROLLBACK TO s');
		is($relay->result, 'a', 'and given back');
	});
$other->run('COMMIT; ' . ack('a'));
note("median from rolling back to a savepoint to the relay's row: $latency s");
cmp_ok($latency, '<', 0.2, 'a relay is woken by a take that is undone in a savepoint');

# Likewise if the one that is woken finds that its client is gone, instead of
# another's look, which would come later.
$node->safe_psql('postgres', 'SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
$latency = median_seconds(7,
	sub {
		my $lost = session($node);

		$other->run(ack('a'));
		$relay->send(take());
		asleep($node, $relay);
		$lost->send(take());
		asleep($node, $relay, $lost);
		$lost->{psql}->{run}->signal('KILL');
		eval { $lost->{psql}->{run}->finish };
	},
	sub {
		$other->run(publish('a'));
		is($relay->result, 'a', 'a relay whose client is gone has nothing');
	});
note("median from publishing to the row of who is woken instead: $latency s");
cmp_ok($latency, '<', 0.2, 'a relay is woken instead of one whose client is gone');

# A relay that waits looks once a second, also at what it can do nothing with, and
# keeps no memory of that.
sub memory_of
{
	my ($session) = @_;
	my $offset = -s $node->logfile;

	$node->safe_psql('postgres', 'SELECT pg_log_backend_memory_contexts(' . $session->pid . ')');
	$node->wait_for_log(qr/Grand total: .* used/, $offset);
	return (slurp_file($node->logfile, $offset) =~ /Grand total: .* (\d+) used/)[0];
}

my $publish_all = q{SELECT count(*) FROM idem_publish_many('{t}', '{1}', ARRAY(SELECT 'key ' || i FROM generate_series(1, 4000) AS i))};

$other->run($publish_all);
$other->run("SELECT count(*) FROM idem_outbox_take(4000, '1 hour')");
$other->run("BEGIN; $publish_all; PREPARE TRANSACTION 'all'");
$other->run("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE state = 'pending'");
$relay->run('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
$relay->send('SELECT count(*) FROM idem_outbox_take(wait => \'10 s\')');
asleep($node, $relay);
my $memory = memory_of($relay);
sleep 4;
# The least of several, because a look that has not ended needs memory.
my $grown;
for my $try (1 .. 8)
{
	my $now = memory_of($relay) - $memory;
	$grown = $now if !defined $grown || $now < $grown;
	last if $grown < 50_000;
	usleep(200_000);
}
note("its memory has grown by $grown bytes in four seconds");
cmp_ok($grown, '<', 50_000, 'a relay that waits keeps no memory of what it has looked at');
is($relay->result, 0, 'and finds nothing');
$relay->run('COMMIT');
$other->run("ROLLBACK PREPARED 'all'");

my ($bare_other, $bare_relay) = map { session($bare) } 1 .. 2;
$latency = median_latency($bare, $bare_other, $bare_relay);
note("the same without preloading: $latency s");
cmp_ok($latency, '<', 0.2, 'likewise without preloading');

done_testing();
