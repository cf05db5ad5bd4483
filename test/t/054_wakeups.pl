# Who is woken, and when: promises that a waiter's look once a second would
# hide.  So each test here measures how long it takes from the cause until all
# who are meant have their answers, in the middle of some rounds.  The limit is
# 0.2 s, and on a busy machine twice the time of a plain wake-up more.

use strict;
use warnings FATAL => 'all';

use List::Util qw(max);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);
use IdempotencyTest;

my $node = new_node('wakeups', conf => "shared_preload_libraries = 'idempotency'\nidempotency.cleanup_interval = 0");

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;

-- Until all these processes sleep for a change, but not beyond that time.
CREATE FUNCTION asleep(until timestamptz, VARIADIC pids int[]) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	WHILE clock_timestamp() < until LOOP
		IF (SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (pids) AND wait_event_type = 'Extension') = cardinality(pids) THEN
			RETURN true;
		END IF;
		PERFORM pg_stat_clear_snapshot(), pg_sleep(0.002);
	END LOOP;
	RETURN false;
END
$$;

-- How many seconds after the end of the lease does a wait for the claim end?
CREATE FUNCTION claim_late(key text) RETURNS float8 LANGUAGE plpgsql AS $$
DECLARE
	lease_end timestamptz;
BEGIN
	SELECT k.lease_expires_at INTO lease_end FROM idem_keys AS k WHERE k.key = $1;
	PERFORM idem_claim('shop', $1, wait => '5 minutes');
	RETURN extract(epoch FROM clock_timestamp() - lease_end);
END
$$;

-- And after the end of a message's delay a wait for the message?
CREATE FUNCTION take_late(delay interval, topics text[]) RETURNS float8 LANGUAGE sql AS $$
	SELECT extract(epoch FROM clock_timestamp() - (created_at + delay))
	FROM idem_outbox_take(1, topics => topics, wait => '5 minutes')
$$;
SQL

my $other = session($node);
my @waiters = map { session($node) } 1 .. 4;
my $number = 0;
my $limit;

# until_asleep(SESSION ...): as asleep() does, but without a new process, so that
# a round is short.
sub until_asleep
{
	my (@sessions) = @_;

	die 'they do not sleep'
	  if $other->run("SELECT asleep('infinity', " . join(', ', map { $_->pid } @sessions) . ')') ne 't';
	return;
}

# is_woken(SECONDS, TITLE)
sub is_woken
{
	my ($seconds, $title) = @_;

	note(sprintf('%s: %.3f s', $title, $seconds));
	cmp_ok($seconds, '<', $limit, $title);
	return;
}

# all_woken(TITLE, WAITS, CAUSE): each waiter makes the call that WAITS, with its
# number, returns; then the statement that CAUSE returns is run.
sub all_woken
{
	my ($title, $waits, $cause) = @_;

	is_woken(
		median_seconds(7,
			sub {
				$number++;
				$waiters[$_]->send($waits->($_)) foreach 0 .. $#waiters;
				until_asleep(@waiters);
			},
			sub {
				$other->run($cause->());
				die 'no answer' if grep { $_->result eq '' } @waiters;
			}),
		$title);
	$other->run('SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox');
	return;
}

# middle(ROUNDS, ROUND): the median of the numbers that ROUNDS rounds return. A
# round that was not possible because the machine was busy returns nothing, and
# is repeated.
sub middle
{
	my ($rounds, $round) = @_;
	my @numbers;

	for (my $tries = 0; @numbers < $rounds && $tries < 100; $tries++)
	{
		push @numbers, $round->();
	}
	die 'the machine is too busy' if @numbers < $rounds;
	return (sort { $a <=> $b } @numbers)[ $rounds / 2 ];
}

sub take
{
	my ($topics) = @_;

	return "SELECT payload FROM idem_outbox_take(1, topics => '{$topics}', wait => '5 minutes')";
}

sub publish
{
	my ($topic, $options) = @_;

	return "SELECT FROM idem_publish('$topic', '0'" . ($options ? ", $options" : '') . ');';
}

sub claim
{
	my ($key, $options) = @_;

	return "SELECT outcome FROM idem_claim('shop', 'key-of-the-wakeups-$key'" . ($options ? ", $options" : '') . ')';
}

#
# The time of a plain wake-up here
#
my $plain = median_seconds(7,
	sub {
		$waiters[0]->send(take('plain'));
		until_asleep($waiters[0]);
	},
	sub {
		$other->run(publish('plain'));
		$waiters[0]->result;
	});
note(sprintf('a plain wake-up: %.3f s', $plain));
$limit = 0.2 + 2 * $plain;

#
# Relays
#
all_woken('four relays that take one, and four messages in one commit: each wakes the next',
	sub { take('chain') },
	sub { 'BEGIN; ' . publish('chain') x 4 . 'COMMIT' });

all_woken('likewise where each listens to another topic, too',
	sub { take("chain,$_[0]") },
	sub { 'BEGIN; ' . publish('chain') x 4 . 'COMMIT' });

# A transaction notes sixteen topics one by one.
all_woken('relays of the first and of the last of fifty topics of a transaction',
	sub { take((1, 17, 33, 50)[ $_[0] ] . '-of-fifty') },
	sub { 'BEGIN; ' . join('', map { publish("$_-of-fifty") } 1 .. 50) . 'COMMIT' });

# Of several topics, each
foreach my $topic (qw(x y z))
{
	is_woken(
		median_seconds(5,
			sub {
				$waiters[0]->send(take('x,y,z'));
				until_asleep($waiters[0]);
			},
			sub {
				$other->run(publish($topic));
				$waiters[0]->result;
			}),
		"a relay of topics x, y and z, and a message of $topic");
	is_woken(
		middle(5,
			sub {
				$waiters[0]->send("SELECT take_late('0.3 s', '{x,y,z}')");
				until_asleep($waiters[0]);
				$other->run(publish($topic, "deliver_after => '0.3 s'"));
				return $waiters[0]->result;
			}),
		"a relay of topics x, y and z, and a delayed message of $topic");
}

# Not those of other topics: these have their bits in common with the topic.
my $topics = $node->safe_psql('postgres', <<'SQL');
WITH topics AS (SELECT name, hashtextextended(name, oid::int8) >> 58 AS bit
	FROM pg_database, generate_series(1, 10000) AS i, LATERAL (SELECT 'topic-' || i) AS t (name) WHERE datname = current_database())
SELECT name FROM topics WHERE bit = (SELECT bit FROM topics WHERE name = 'topic-1') ORDER BY name = 'topic-1' DESC, name LIMIT 21
SQL
my ($topic, @others) = split /\n/, $topics;
my @bystanders = map { session($node) } @others;

sub looks
{
	$_->run('SELECT pg_stat_force_next_flush()') foreach @waiters, @bystanders;
	return $node->safe_psql('postgres',
		"SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'idem_outbox_topics'");
}

my ($before, $begin, $count) = (looks(), time, 30);
$bystanders[$_]->send(take($others[$_])) foreach 0 .. $#others;
foreach (1 .. $count)
{
	$waiters[0]->send(take($topic));
	until_asleep($waiters[0], @bystanders);
	$other->run(publish($topic));
	$waiters[0]->result;
}
my $seconds = time - $begin;
$other->run(publish($_)) foreach @others;
$_->result foreach @bystanders;
my $looks = looks() - $before;
# A look is two scans: for messages, and for the time of the next one.
note("$looks scans for $count messages, in $seconds s");
cmp_ok($looks, '<', 2 * (6 * $count + @others * (4 + $seconds)), 'a message wakes no relay of another topic');
$_->quit foreach @bystanders;

# Of two that wait for the end of a delay one keeps the time.  It is not known
# which; each is cancelled once.
is_woken(
	middle(5,
		sub {
			my @late;

			foreach my $order ([ 0, 1 ], [ 1, 0 ])
			{
				my ($victim, $successor) = @waiters[@$order];

				$_->send("SELECT take_late('0.4 s', '{delayed}')") foreach @waiters[ 0, 1 ];
				until_asleep(@waiters[ 0, 1 ]);
				$other->run(publish('delayed', "deliver_after => '0.4 s'"));
				my $in_time = $other->run("SELECT asleep((SELECT max(created_at) + '0.3 s' FROM idem_outbox WHERE topic = 'delayed'), "
					  . join(', ', map { $_->pid } @waiters[ 0, 1 ]) . ')') eq 't';
				$other->run('SELECT pg_cancel_backend(' . $victim->pid . ')');
				my $cancelled = $victim->result =~ /^ERROR/;
				if (!$cancelled)
				{
					$other->run(publish('delayed'));
					$successor->result;
					return;
				}
				push @late, $successor->result;
				return unless $in_time;
			}
			return max(@late);
		}),
	'of two relays that wait for a delayed message one is cancelled: the other has it in time');

# One is woken and fails before it has looked: a lock is in its way, longer than
# it waits for one.
is_woken(
	middle(5,
		sub {
			my ($successor, $victim, $locker) = @waiters;

			$victim->run("SET lock_timeout = '20 ms'");
			$_->send(take('locked')), until_asleep($_) foreach $successor, $victim;
			$other->run('BEGIN; ' . publish('locked'));
			$locker->send('BEGIN; LOCK TABLE idem_outbox; SELECT 1');
			wait_for_block($node, $locker->pid);
			$other->run('COMMIT');
			$locker->result;
			my $failed = $victim->result =~ /^ERROR/;
			my $released = time;
			$locker->run('COMMIT');
			if (!$failed)
			{
				$other->run(publish('locked'));
			}
			$successor->result;
			my $late = time - $released;
			$victim->run('RESET lock_timeout');
			return $failed ? $late : ();
		}),
	'of two relays one is woken and fails at a lock: the other has the message when the lock is gone');

#
# Claims
#
# A transaction notes sixty-four one by one.
$node->safe_psql('postgres',
	"SELECT count(idem_claim('many', 'one-of-many-keys-' || i, lease => '1 hour')) FROM generate_series(1, 100) AS i");
is_woken(
	median_seconds(7,
		sub {
			my ($round) = @_;

			foreach my $i (0 .. $#waiters)
			{
				$other->run(claim("many-$round-$i", "lease => '1 hour'"));
				$waiters[$i]->send(claim("many-$round-$i", "wait => '5 minutes'"));
			}
			until_asleep(@waiters);
		},
		sub {
			my ($round) = @_;
			my $fail = 'SELECT count(idem_fail(scope, key, NULL, claim_token)) FROM idem_keys WHERE';

			# The first one before the others, the rest after them
			$other->run("BEGIN; $fail key = 'key-of-the-wakeups-many-$round-0'; $fail scope = 'many';"
				  . "$fail key LIKE 'key-of-the-wakeups-many-$round-%'; COMMIT");
			die 'no claim' if grep { $_->result ne 'new' } @waiters;
			$other->run("SELECT count(idem_claim('many', key, lease => '1 hour')) FROM idem_keys WHERE scope = 'many'");
		}),
	'a hundred claims end with one transaction, and among them those of all that wait');

# Two wait for the end of a lease.  The first keeps the time, and is cancelled.
is_woken(
	middle(5,
		sub {
			my $key = 'lease-' . ++$number;
			my $in_time = sub {
				return $other->run("SELECT asleep((SELECT lease_expires_at - interval '0.1 s' FROM idem_keys WHERE key = 'key-of-the-wakeups-$key'), "
					  . join(', ', map { $_->pid } @_) . ')') eq 't';
			};
			my $waits = "SELECT claim_late('key-of-the-wakeups-$key')";

			$other->run(claim($key, "lease => '0.4 s'"));
			$waiters[0]->send($waits);
			my $kept = $in_time->($waiters[0]);
			$waiters[1]->send($waits);
			$kept = $in_time->(@waiters[ 0, 1 ]) && $kept;
			$other->run('SELECT pg_cancel_backend(' . $waiters[0]->pid . ')');
			my $cancelled = $waiters[0]->result =~ /^ERROR/;
			my $late = $cancelled ? $waiters[1]->result : undef;

			# Or else the first one has it.
			if (!$cancelled)
			{
				$other->run("SELECT idem_fail('shop', key, NULL, claim_token) FROM idem_keys WHERE key = 'key-of-the-wakeups-$key'");
				$waiters[1]->result;
			}
			return $cancelled && $kept ? $late : ();
		}),
	'of two that wait for the end of a lease the first is cancelled: the other has it in time');

$node->stop;
done_testing();
