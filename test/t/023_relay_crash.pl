# Relays, consumers, publishers and servers that are killed with signal 9: no
# message is lost, none overtakes another of its key, and whatever was applied
# is recognised.

use Time::HiRes qw(sleep);
use IdempotencyTest;

my $lease = '1 second';
my $node = new_node('crash', conf => 'restart_after_crash = on');

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE TABLE effects (n bigserial, message text);
-- The consumer: apply a message, once.
CREATE FUNCTION receive(message_id uuid, payload jsonb) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
	IF NOT idem_once('consumer', message_id::text) THEN
		RETURN 'seen';
	END IF;
	INSERT INTO effects (message) VALUES (payload #>> '{}');
	RETURN 'applied';
END
$$;
SQL

# Take up to that number of messages of a topic: their payloads and attempts,
# in order.
sub take
{
	my ($topic, $count, $time) = @_;

	$time ||= $lease;
	return "SELECT payload #>> '{}', attempt FROM idem_outbox_take($count, '$time', '{$topic}')";
}

# Deliver what is taken to the consumer, in the same breath.
sub take_and_deliver
{
	my ($topic, $count) = @_;

	return "SELECT payload #>> '{}', attempt, receive(message_id, payload)
		FROM idem_outbox_take($count, '$lease', '{$topic}')";
}

sub ack
{
	my ($topic, @payloads) = @_;
	my $payloads = join ', ', map { "'\"$_\"'" } @payloads;

	return "SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox
		WHERE topic = '$topic' AND payload IN ($payloads)";
}

# Publish messages of one key, each in a transaction of its own.
sub publish
{
	my ($topic, @payloads) = @_;

	$node->safe_psql('postgres',
		join ';', map { "SELECT idem_publish('$topic', '\"$_\"', 'key')" } @payloads);
	return;
}

# Kill the session's backend, which makes the server restart, or the server.
# Returns a new session.
sub crash
{
	my ($victim, $session) = @_;
	my $offset = -s $node->logfile;

	if ($victim eq 'backend')
	{
		kill('KILL', $session->pid) == 1 or die 'no such process';
		$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
	}
	else
	{
		# Its children may take a moment to notice.
		$node->kill9;
		foreach (1 .. 100)
		{
			sleep 0.1;
			last if $node->start(fail_ok => 1);
			$node->stop('fast', fail_ok => 1);
		}
	}
	$session->quit;
	return session($node);
}

# Wait until all leases are over, but for those of an hour.
sub let_leases_run_out
{
	$node->poll_query_until('postgres',
		"SELECT NOT EXISTS (SELECT FROM idem_outbox
			WHERE state = 'pending' AND available_at > clock_timestamp()
				AND available_at < clock_timestamp() + interval '1 minute')")
	  or die 'a lease does not end';
	return;
}

foreach my $victim ('backend', 'server')
{
	my $relay = session($node);
	my $topic;

	#
	# Between the steps of a relay
	#

	$topic = "$victim-take";
	publish($topic, 1 .. 4);
	is($relay->run('BEGIN; ' . take($topic, 2)), "1|1\n2|1", "$victim killed before take has committed");
	$relay = crash($victim, $relay);
	is($relay->run(take($topic, 1)), '1|1', 'take-rolled-back: handed out at once, attempt 1');

	is($relay->run(take($topic, 1)), '', "$victim killed between take and ack");
	publish("$topic-held", 1, 2);
	is($relay->run(take("$topic-held", 1, '1 hour')), '1|1', '... of another key, too');
	$relay = crash($victim, $relay);
	is($relay->run(take("$topic-held", 10)), '',
		'lease-survives-crash: nothing of its key is handed out');
	let_leases_run_out();
	is($relay->run(take($topic, 1)), '1|2',
		'dead-relay-loses-nothing: handed out again after the lease, attempt 2');
	is($relay->run(ack($topic, 1) . ';' . take($topic, 10)), "1\n2|1\n3|1\n4|1",
		'dead-relay-loses-nothing: and then the rest, in order');

	is($relay->run('BEGIN; ' . ack($topic, 2, 3)), '2', "$victim killed before ack has committed");
	$relay = crash($victim, $relay);
	let_leases_run_out();
	is($relay->run(take($topic, 1)), '2|2', 'ack-rolled-back: handed out again, in order');

	is($relay->run(ack($topic, 2, 3)), '2', "$victim killed after ack has committed");
	$relay = crash($victim, $relay);
	let_leases_run_out();
	is($relay->run(take($topic, 10)), '4|2', 'ack-survives-crash: only the rest');

	is( $relay->run(
			"BEGIN; SELECT idem_outbox_nack(id, 'no', '0', attempt) FROM idem_outbox
			 WHERE topic = '$topic' AND state = 'pending' ORDER BY id LIMIT 1"),
		'pending', "$victim killed before nack has committed");
	$relay = crash($victim, $relay);
	let_leases_run_out();
	is( $relay->run(
			"SELECT payload, last_error FROM idem_outbox WHERE topic = '$topic' AND state = 'pending'
			 ORDER BY id"),
		'"4"|', 'nack-rolled-back');

	#
	# After the delivery, before the acknowledgement: the consumer gets the
	# messages again
	#

	$topic = "$victim-deliver";
	publish($topic, map { "$topic-$_" } 1 .. 3);
	is( $relay->run(take_and_deliver($topic, 2)),
		"$topic-1|1|applied\n$topic-2|1|applied",
		"$victim killed between delivery and ack");
	$relay = crash($victim, $relay);
	let_leases_run_out();
	is( $relay->run(
			join ';',
			map { (take_and_deliver($topic, 1), ack($topic, "$topic-$_")) } 1 .. 3),
		"$topic-1|2|seen\n1\n$topic-2|2|seen\n1\n$topic-3|1|applied\n1",
		'delivered-twice-applied-once');

	#
	# A consumer that dies with its transaction open has not applied anything
	#

	$topic = "$victim-consume";
	publish($topic, "$topic-1");
	is($relay->run('BEGIN; ' . take_and_deliver($topic, 1)), "$topic-1|1|applied",
		"$victim killed before the consumer has committed");
	$relay = crash($victim, $relay);
	is($relay->run(take_and_deliver($topic, 1)), "$topic-1|1|applied",
		'killed-consumer-applies-again');
	is( $node->safe_psql('postgres',
			"SELECT string_agg(message, ' ' ORDER BY n) FROM effects WHERE message LIKE '$victim%'"),
		"$victim-deliver-1 $victim-deliver-2 $victim-deliver-3 $victim-consume-1",
		'every message applied once, in order');

	#
	# Publishers
	#

	$topic = "$victim-publish";
	publish($topic, 1);
	is($relay->run("BEGIN; SELECT idem_publish('$topic', '\"2\"', 'key') IS NOT NULL"), 't',
		"$victim killed before publish has committed");
	$relay = crash($victim, $relay);
	publish($topic, 3);
	is($relay->run(take($topic, 10)), "1|1\n3|1", 'killed-publisher-publishes-nothing');
	is( $node->safe_psql('postgres', "SELECT count(DISTINCT id) = count(*) FROM idem_outbox"),
		't', 'ids are not given twice');

	$relay->quit;
}

#
# A relay that dies again and again with the same message
#

my $relay = session($node);

$node->safe_psql('postgres', 'ALTER SYSTEM SET idempotency.outbox_max_attempts = 3');
$node->reload;
publish('poison', 1, 2);
foreach my $attempt (1 .. 3)
{
	is($relay->run(take('poison', 1)), "1|$attempt", "relay killed by a message: attempt $attempt");
	$relay = crash('backend', $relay);
	let_leases_run_out();
}
is($relay->run(take('poison', 10)), '2|1', 'poison-message-dies: and its key goes on');
is( $relay->run("SELECT payload, state, attempt, last_error FROM idem_outbox WHERE topic = 'poison' ORDER BY id"),
	"\"1\"|dead|3|The last lease expired.\n\"2\"|pending|1|", 'poison-message-dies');

#
# A relay that only sleeps: it comes back when its lease is over, and must not
# spoil what its successor does
#

my $successor = session($node);

publish('sleepy', 1, 2);
is($relay->run(take('sleepy', 2)), "1|1\n2|1", 'a relay falls asleep');
let_leases_run_out();
is($successor->run(take('sleepy', 1, '1 hour')), '1|2', 'another takes over');
is( $relay->run(
		"SELECT payload, idem_outbox_nack(id, 'late', '0', attempt => 1)
		 FROM idem_outbox WHERE topic = 'sleepy' ORDER BY id"),
	"\"1\"|lost\n\"2\"|pending", 'late-nack-is-lost: of what was taken since');
is($relay->run(take('sleepy', 10)), '', 'late-nack-is-lost: the key stays with its new relay');
is($successor->run(ack('sleepy', 1)), '1', 'which acknowledges it');
is($relay->run(take('sleepy', 10)), '2|2', 'and the next one follows');

$_->quit foreach $relay, $successor;
$node->stop;
done_testing();
