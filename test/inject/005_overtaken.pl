# A session that is stopped in the middle of a call, while another one makes a
# different call, and ends it or waits.  Both answer as if one had come after the
# other, and what is left is what they have answered.
#
# Needs a server with injection points; see test/source_server.

use strict;
use warnings FATAL => 'all';

use Time::HiRes qw(sleep);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('overtaken', conf => <<'CONF');
deadlock_timeout = 100ms
idempotency.cleanup_interval = 0
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE EXTENSION injection_points;

-- What there is of a user, and of a topic's messages.
CREATE FUNCTION records(n text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(r, ' ' ORDER BY r) FROM (
		SELECT concat_ws('|', entity_id, last_action_id) FROM idem_action_versions WHERE user_id = n
		UNION ALL SELECT concat_ws('|', entity_id, action_type, is_active, last_action_id)
		FROM idem_user_actions WHERE user_id = n) AS t (r);
$$;
CREATE FUNCTION messages(n text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(concat_ws('|', state, attempt, uncounted_attempts, coalesce(awaiting_ack::text, 'free'),
		CASE WHEN available_at <= clock_timestamp() THEN 'now'
			WHEN available_at <= clock_timestamp() + '3 hours' THEN '3 hours' ELSE '5 hours' END), ' ' ORDER BY id)
	FROM idem_outbox WHERE topic = n;
$$;
SQL

sub sql
{
	my ($sql) = @_;

	return $node->safe_psql('postgres', "SET statement_timeout = '30s'; $sql");
}

# A session that is stopped at a point of a call, in a transaction.
sub stopped_at
{
	my ($point, $call, $level) = @_;
	my $session = session($node);

	sql("SELECT injection_points_attach('$point', 'wait')");
	$session->run('BEGIN ISOLATION LEVEL ' . ($level || 'READ COMMITTED'));
	$session->send("SELECT $call");
	until_stopped($node, $point, $session);
	# Nobody else shall stop there.
	sql("SELECT injection_points_detach('$point')");
	return $session;
}

# The final result of its call.
sub goes_on
{
	my ($session, $point) = @_;

	sql("SELECT injection_points_wakeup('$point')");
	return $session->result;
}

# The result of a call if another call is made and ends while the first one is
# at a point.
sub overtaken
{
	my ($call, $other, $answer, $title, $point, $level) = @_;

	return overtaken_at($point || 'idem-found', $call, sub { sql("SELECT FROM $other") },
		$answer, $title, $level);
}

sub overtaken_at
{
	my ($point, $call, $other, $answer, $title, $level) = @_;
	my $session = stopped_at($point, $call, $level);

	$other->();
	is(goes_on($session, $point), $answer, $title);
	$session->run('COMMIT');
	return $session->quit;
}

# A counter and a state that belong together
sql("SELECT FROM idem_set('ann', 'post', 'answer', 'like', true, 10)");
overtaken("* FROM idem_set('ann', 'post', 'answer', 'like', true, 5)",
	"idem_set('ann', 'post', 'answer', 'like', false, 20)",
	'f|20|f', 'a stale call that is overtaken answers from one snapshot');
overtaken("* FROM idem_set('ann', 'post', 'answer', 'like', true, 5)",
	"idem_set('ann', 'post', 'answer', 'like', true, 30)",
	'f|20|f', '... also where that is between the counter and the state',
	'idem-counter-read');
overtaken("* FROM idem_set('ann', 'post', 'answer', 'like', true, 5)",
	"idem_set('ann', 'post', 'answer', 'like', false, 40)",
	'ERROR 40001', '... and fails where it must not see what has overtaken it',
	'idem-found', 'REPEATABLE READ');
overtaken("* FROM idem_set('ann', 'post', 'answer', 'like', true, 5)",
	"idem_forget('ann', 'no-such-key-at-all')",
	'f|40|f', '... not where nothing has', 'idem-found', 'REPEATABLE READ');

# A sequence number and a version that belong together
sql("SELECT FROM idem_try_append('answer', 'c', 1)");
overtaken("* FROM idem_try_append('answer', 'c', 3, 1, 0)",
	"idem_try_append('answer', 'c', 2)",
	'version_conflict|2|2', 'a refused append that is overtaken looks again');

# A record that exists all the time: the search reached the new version before
# it was committed, and the old one after that.
sql("SELECT FROM idem_claim('shop', 'answer-0123456789', lease => '1 hour')");
sql("SELECT idem_complete('shop', 'answer-0123456789', 201, 'made', claim_token => claim_token) FROM idem_keys");
my $writer = session($node);
$writer->run("BEGIN; UPDATE idem_keys SET expires_at = expires_at + '1 hour' WHERE key = 'answer-0123456789'");
overtaken_at('idem-found-pending', "outcome FROM idem_claim('shop', 'answer-0123456789')",
	sub { $writer->run('COMMIT') },
	'replay', 'a record is not taken for one that is being inserted');
$writer->quit;

# A twin that is stopped between its two writes, on an aggregate that is there,
# and on a new one.  Nobody waits for it who was not told to, nor for longer.
sql("SELECT FROM idem_try_append('fired', 'tablet', 1)");
foreach my $aggregate ('fired', 'fired at first')
{
	my $event = "idem_try_append('$aggregate', 'phone', 1";
	my $twin = stopped_at('idem-append-counted', "outcome FROM $event)");
	my $waiter = session($node);
	my $queue = session($node);

	is(sql("SELECT outcome FROM $event)"), 'in_flight', "$aggregate: a twin between its writes is in flight");
	is(sql("SELECT outcome FROM $event, wait => '1 ms')"), 'in_flight', '... also when the wait is over');
	$queue->send("SELECT outcome FROM idem_try_append('$aggregate', 'desk', 1)");
	$waiter->send("SELECT outcome FROM $event, wait => '10 minutes')");
	wait_for_block($node, $queue->pid, $waiter->pid);
	is(goes_on($twin, 'idem-append-counted'), 'appended', '... and appends');
	wait_for_block($node, $queue->pid, $waiter->pid);
	is(sql("SELECT outcome FROM $event)"), 'in_flight', '... and is in flight until its transaction ends');
	$twin->run('COMMIT');
	is($waiter->result, 'duplicate', '... for which the patient wait');
	is($queue->result, 'appended', '... and other clients');
	$_->quit foreach ($twin, $waiter, $queue);
}

# A user is forgotten while the user's calls run. A call that has written a
# counter before the deletion is deleted with the rest, and a later call starts
# with a new counter.
sql("SELECT FROM idem_set('bob', 'post', '1', 'like', true, 10)");
overtaken("idem_forget_user('bob')", "idem_set('bob', 'post', '1', 'save', true, 20)",
	'3', 'forgetting: a counter that is advanced meanwhile goes with what has come with it',
	'idem-found-latest');
is(sql("SELECT records('bob')"), '', '... and nothing is left');

sql("SELECT FROM idem_set('cyd', 'post', '1', 'like', true, 10)");
my $setter = session($node);
overtaken_at('idem-deleted', "idem_forget_user('cyd')",
	sub {
		$setter->send("SELECT * FROM idem_set('cyd', 'post', '1', 'save', true, 20)");
		wait_for_block($node, $setter->pid);
	},
	'2', 'forgetting: between a counter and its actions nobody sets one');
is($setter->result, 't|20|t', '... and who wanted to begins anew');
is(sql("SELECT records('cyd')"), '1|20 1|save|t|20', '... with nothing of what was before');
$setter->quit;

sql("SELECT FROM idem_set('dee', 'post', '1', 'like', true, 10)");
overtaken("idem_forget_user('dee')", "idem_set('dee', 'post', '2', 'like', true, 10)",
	'2', 'forgetting: what is new when the counters have gone stays', 'idem-pairs-forgotten');
is(sql("SELECT records('dee')"), '2|10 2|like|t|10', '... whole');

sql("SELECT FROM idem_set('eve', 'post', '1', 'like', true, 10)");
sql("DELETE FROM idem_action_versions WHERE user_id = 'eve'");
overtaken("idem_forget_user('eve')", "idem_set('eve', 'post', '1', 'like', false, 20)",
	'0', 'forgetting: an action that gets a counter meanwhile stays', 'idem-found-latest');
is(sql("SELECT records('eve')"), '1|20 1|like|f|20', '... with that');

# A page of states, of one instant
foreach my $level ('READ COMMITTED', 'REPEATABLE READ')
{
	foreach my $other ("idem_set_many('{fay}', '{post}', '{1,2}', '{like}', '{f}', '{20}')", "idem_forget_user('fay')")
	{
		sql("SELECT idem_forget_user('fay'); SELECT FROM idem_set_many('{fay}', '{post}', '{1,2}', '{like}', '{t}', '{10}')");
		overtaken("string_agg(s::text, ' ' ORDER BY s) FROM idem_action_states('fay', 'post', '{1,2}') AS s", $other,
			'(1,like,t,10) (2,like,t,10)', "states: none is of a call that came in between, $level",
			'idem-action-read', $level);
	}
}

# A relay that extends or releases a message after another relay has answered
# for it or taken it gets that result, and changes nothing.
my %answers = (
	extended => "count(*) FROM idem_outbox_extend(array(SELECT id FROM idem_outbox WHERE topic = 'NAME'), '5 hours', '{1}')",
	'given back' => "idem_outbox_release(array_agg(id), '{1}') FROM idem_outbox WHERE topic = 'NAME'");
my %rivals = (
	acknowledged => [ "idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = 'NAME'", '1', 'acked|1|0|true|now' ],
	refused => [ "idem_outbox_nack(id, 'no', '2 hours') FROM idem_outbox WHERE topic = 'NAME'", 'pending', 'pending|1|0|false|3 hours' ],
	'taken over' => [ "attempt FROM idem_outbox_take(1, '2 hours', '{NAME}')", '2', 'pending|2|0|true|3 hours' ]);

foreach my $answer (sort keys %answers)
{
	foreach my $rival (sort keys %rivals)
	{
		my $name = "$answer-$rival";
		my ($other, $told, $left) = @{ $rivals{$rival} };

		# The lease is over, but the message still its relay's.
		sql("SELECT idem_publish('$name', '1'); SELECT FROM idem_outbox_take(1, '0', ARRAY['$name'])");
		overtaken_at('idem-found-latest', $answers{$answer} =~ s/NAME/$name/r,
			sub { is(sql('SELECT ' . $other =~ s/NAME/$name/r), $told, "$answer, $rival in mid-call: the other has it") },
			'0', "$answer, $rival in mid-call: it is not");
		is(sql("SELECT messages('$name')"), $left, '... and the message is as the other has left it');
	}
}

# The other way round, when it has the row, but has not written it yet: a take
# passes by, and who answers waits, and then answers for what is there.
my %kept = (
	extended => [ 'pending|1|0|true|5 hours', 'acked|1|0|true|5 hours' ],
	'given back' => [ 'pending|1|1|free|now', 'acked|1|1|free|now' ]);
foreach my $answer (sort keys %answers)
{
	my ($was, $acked) = @{ $kept{$answer} };
	my $acknowledger = session($node);
	my $name = "$answer at first";

	sql("SELECT idem_publish('$name', '1'); SELECT FROM idem_outbox_take(1, '0', ARRAY['$name'])");
	overtaken_at('idem-update-locked', $answers{$answer} =~ s/NAME/$name/r,
		sub { is(sql("SELECT count(*) FROM idem_outbox_take(1, '2 hours', ARRAY['$name'])"), '0', "$answer at first: a take passes by") },
		'1', "$answer at first: it is");
	is(sql("SELECT messages('$name')"), $was, '... and the message is as it should be');

	$name = "$answer before";
	sql("SELECT idem_publish('$name', '1'); SELECT FROM idem_outbox_take(1, '0', ARRAY['$name'])");
	overtaken_at('idem-update-locked', $answers{$answer} =~ s/NAME/$name/r,
		sub {
			$acknowledger->send("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = '$name'");
			wait_for_block($node, $acknowledger->pid);
		},
		'1', "$answer before it is acknowledged: it is");
	is($acknowledger->result, '1', '... and the other waits');
	is(sql("SELECT messages('$name')"), $acked, '... and has acknowledged what has come of it');
	$acknowledger->quit;
}

# Many messages, of which some or all have been written: nobody gets one before
# they are committed, nor waits for them, and then all, in order.
sub take
{
	my ($topic, $level) = @_;

	return sql('BEGIN ISOLATION LEVEL ' . ($level || 'READ COMMITTED') . ";
		SELECT string_agg(payload::text, ' ') FROM idem_outbox_take(10, '1 hour', ARRAY['$topic']); COMMIT");
}

foreach my $key ('NULL', "'key'")
{
	foreach my $point ('idem-publish-numbered', 'idem-append-heap')
	{
		my $topic = "many-$key-$point" =~ s/'//gr;
		my $publisher = stopped_at($point, "count(*) FROM idem_publish_many(ARRAY['$topic'], '{1,2,3}', ARRAY[$key])");

		is(take($topic), '', "$topic: there is nothing yet");
		is(goes_on($publisher, $point), '3', '... but then');
		is(take($topic), '', '... nor before they are committed');
		$publisher->run('COMMIT');
		is(take($topic), '1 2 3', '... and now, all of them');
		$publisher->quit;
	}
}

# The message before them departs from their lane while they are in no index
# yet, so that the acknowledging call does not see them.
sql("SELECT idem_publish('head', '0', 'key'); SELECT FROM idem_outbox_take(1, '1 hour', '{head}')");
overtaken("count(*) FROM idem_publish_many('{head}', '{1,2,3}', '{key}')",
	"idem_outbox_ack(array(SELECT id FROM idem_outbox WHERE topic = 'head'))",
	'3', 'behind a head that leaves meanwhile', 'idem-append-heap');
# A take with an old snapshot does not repair a lane.
is(take('head', 'REPEATABLE READ'), '1 2 3', '... many messages are found');

# A relay that has long found nothing looks from a time on that lies behind
# theirs.  Its next look finds them all the same.
my $relay = session($node);
my $idle = "SELECT string_agg(payload::text, ' ') FROM idem_outbox_take(10, '1 hour', '{idle}')";
my $publisher = stopped_at('idem-append-heap', "count(*) FROM idem_publish_many('{idle}', '{1,2,3}')");
foreach (1 .. 5)
{
	is($relay->run($idle), '', 'idle: there is nothing yet') if $_ == 5;
	sleep(0.5);
}
is(goes_on($publisher, 'idem-append-heap'), '3', 'idle: messages that are older than they seem');
$publisher->run('COMMIT');
$publisher->quit;
is($relay->run($idle), '1 2 3', '... are found');
$relay->quit;

# A publisher who has drawn an id, and nothing more, when a relay notes from where
# on the key has pending messages: what comes of that id is before those.
sql("SELECT count(*) FROM idem_publish_many('{late}', array_fill('0'::jsonb, ARRAY[3000]), '{key}')");
sql("SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(3000, '0', '{late}')");
$relay = session($node);
my $late = "SELECT string_agg(payload::text, ' ') FROM idem_outbox_take(10, '1 hour', '{late}')";
$publisher = stopped_at('idem-publish-numbered',
	"count(*) FROM idem_publish_many('{late}', '{1}', '{key}', deliver_after => '1 hour')");
sql("SELECT FROM idem_publish_many('{late}', '{2,3}', '{key}')");
foreach (1 .. 2)
{
	is($relay->run($late), '2 3', 'late: whoever has committed is not kept waiting');
	$relay->run("SELECT idem_outbox_release(array_agg(id)) FROM idem_outbox WHERE topic = 'late' AND awaiting_ack");
}
is(goes_on($publisher, 'idem-publish-numbered'), '1', '... the one before is published');
$publisher->run('COMMIT');
is($relay->run($late), '', '... and keeps the later ones');
$_->quit foreach ($publisher, $relay);

$node->command_ok(
	[ 'pg_amcheck', '--install-missing', '--heapallindexed', '--rootdescend', 'postgres' ],
	'tables and indexes are sound');

$node->stop;
done_testing();
