# A session that is stopped in the middle of a step: between find and write,
# between a table and its indexes, between two tables. There it meets an error,
# alone and in a block that catches it, a cancel, a terminate or a kill; or it
# continues after another session has done the same. 005_overtaken.pl tests
# other actions of another session.
#
# Afterwards the record is there if and only if the effect is, nothing is left
# locked, and a retry gets what it should.
#
# Needs a server with injection points; see test/source_server.

use strict;
use warnings FATAL => 'all';

use List::Util qw(sum);
use Time::HiRes qw(sleep);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdempotencyTest;

# No wait below is longer than this.
$PostgreSQL::Test::Utils::timeout_default = 60;

my $node = new_node('sessions', conf => <<'CONF');
restart_after_crash = on
synchronous_commit = on
deadlock_timeout = 100ms
idempotency.cleanup_interval = 0
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE EXTENSION injection_points;
CREATE TABLE effects (kind text NOT NULL, name text NOT NULL);
CREATE TABLE doomed (name text NOT NULL, claim_token bigint NOT NULL);
CREATE TABLE leaving (name text NOT NULL);

-- What the extension holds for done; each has an effect of the same name.
CREATE VIEW done AS
SELECT 'key' AS kind, key AS name FROM idem_keys WHERE state IN ('completed', 'erased')
UNION ALL SELECT 'erased', key FROM idem_keys WHERE state = 'erased' AND response_body IS NULL
UNION ALL SELECT 'token', token FROM idem_tokens WHERE expires_at > clock_timestamp()
UNION ALL SELECT 'version', entity_id FROM idem_action_versions WHERE last_action_id = 7
UNION ALL SELECT 'action', entity_id FROM idem_user_actions WHERE action_type = 'like' AND is_active
UNION ALL SELECT 'excluded', entity_id FROM idem_user_actions WHERE action_type = 'dislike' AND NOT is_active
UNION ALL SELECT 'aggregate', aggregate FROM idem_aggregates WHERE version = 1
UNION ALL SELECT 'sequence', aggregate FROM idem_client_sequences WHERE last_client_seq = 1
UNION ALL SELECT 'published', topic FROM idem_outbox WHERE topic LIKE 'publish%'
UNION ALL SELECT 'taken', topic FROM idem_outbox WHERE topic LIKE 'take%' AND attempt = 1
UNION ALL SELECT 'acked', topic FROM idem_outbox WHERE topic LIKE 'ack%' AND state = 'acked'
UNION ALL SELECT 'requeued', topic FROM idem_outbox WHERE topic LIKE 'requeue%' AND state = 'pending'
UNION ALL SELECT 'extended', topic FROM idem_outbox WHERE topic LIKE 'extend%' AND available_at > created_at + interval '90 minutes'
UNION ALL SELECT 'untried', topic FROM idem_outbox WHERE topic LIKE 'give_back%' AND attempt = 1 AND awaiting_ack IS NULL
UNION ALL SELECT 'no counter', name FROM leaving WHERE NOT EXISTS (SELECT FROM idem_action_versions WHERE user_id = name)
UNION ALL SELECT 'no action', name FROM leaving WHERE NOT EXISTS (SELECT FROM idem_user_actions WHERE user_id = name)
UNION ALL SELECT 'resumed', scope FROM idem_keys WHERE scope LIKE 'resume%' AND attempt = 2
UNION ALL SELECT 'gone', name FROM doomed WHERE NOT EXISTS (SELECT FROM idem_keys WHERE key = name);

CREATE VIEW torn AS
(SELECT 'without effect' AS what, * FROM (TABLE done EXCEPT ALL TABLE effects) AS d)
UNION ALL
(SELECT 'only effect', * FROM (TABLE effects EXCEPT ALL TABLE done) AS e)
UNION ALL
SELECT 'left locked', locktype, pid::text FROM pg_locks
WHERE pid <> pg_backend_pid() AND locktype IN ('spectoken', 'transactionid', 'tuple', 'relation', 'advisory')
	AND (relation IS NULL OR relation >= 16384);

-- One function for each kind of call: what a client does with its answer.  Those
-- that are alike come below.
CREATE FUNCTION do_claim(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text := outcome FROM idem_claim('shop', n);
BEGIN
	IF answer = 'new' THEN
		INSERT INTO effects VALUES ('key', n);
		PERFORM idem_complete('shop', n, 201, 'made');
	END IF;
	RETURN answer;
END
$$;
CREATE FUNCTION do_wait(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text := outcome FROM idem_claim('shop', n, wait => '1 minute');
BEGIN
	IF answer = 'new' THEN
		INSERT INTO effects VALUES ('key', n);
		PERFORM idem_complete('shop', n, 201, 'made');
	END IF;
	RETURN answer;
END
$$;
CREATE FUNCTION handle(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effects VALUES ('key', request ->> 'name');
	RETURN '{}';
END
$$;
CREATE FUNCTION do_run(n text) RETURNS text LANGUAGE sql AS $$
	SELECT outcome FROM idem_run('shop', n, 'handle(jsonb)', jsonb_build_object('name', n));
$$;
CREATE FUNCTION do_batch(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text[] := array(SELECT idem_once_many('form', ARRAY[n || '-b', n || '-a', n || '-c']));
BEGIN
	INSERT INTO effects SELECT 'token', unnest(answer);
	RETURN cardinality(answer);
END
$$;
CREATE FUNCTION do_claims(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	mine text[] := array(SELECT key FROM idem_claim_many('shop', ARRAY[n || '-b', n || '-a', n || '-c'])
		WHERE outcome = 'new');
BEGIN
	INSERT INTO effects SELECT 'key', unnest(mine);
	PERFORM FROM idem_complete_many('shop', mine, '{201}', '{made}');
	RETURN cardinality(mine);
END
$$;
CREATE FUNCTION do_advances(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	names text[] := ARRAY[n || '-b', n || '-a', n || '-c'];
	mine text[] := array(SELECT names[ordinal] FROM idem_try_advance_many('{ann}', '{post}', names, '{7}')
		WHERE should_process);
BEGIN
	INSERT INTO effects SELECT 'version', unnest(mine);
	RETURN cardinality(mine);
END
$$;
CREATE FUNCTION do_sets(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	names text[] := ARRAY[n || '-b', n || '-a', n || '-c'];
	mine text[] := array(SELECT names[ordinal] FROM idem_set_many('{ann}', '{post}', names, '{like}', '{t}', '{7}')
		WHERE processed);
BEGIN
	INSERT INTO effects SELECT 'version', unnest(mine) UNION ALL SELECT 'action', unnest(mine);
	RETURN cardinality(mine);
END
$$;
CREATE FUNCTION do_append(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text := outcome FROM idem_try_append(n, 'phone', 1);
BEGIN
	IF answer = 'appended' THEN
		INSERT INTO effects VALUES ('aggregate', n), ('sequence', n);
	END IF;
	RETURN answer;
END
$$;
CREATE FUNCTION do_publish(n text, key text DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_publish(n, '1', key);
	INSERT INTO effects VALUES ('published', n);
	RETURN 'published';
END
$$;
CREATE FUNCTION do_park(n text) RETURNS text LANGUAGE sql AS $$
	SELECT do_publish(n, 'key');
$$;
CREATE FUNCTION do_publishes(n text, key text DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer int := count(*) FROM idem_publish_many(ARRAY[n], '{1,2,3}', ARRAY[key]);
BEGIN
	INSERT INTO effects SELECT 'published', n FROM generate_series(1, answer);
	RETURN answer;
END
$$;
CREATE FUNCTION do_parks(n text) RETURNS text LANGUAGE sql AS $$
	SELECT do_publishes(n, 'key');
$$;
-- Of several times it is there once.
CREATE FUNCTION do_extend(n text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer int := count(*) FROM idem_outbox_extend(array(SELECT id FROM idem_outbox WHERE topic = n), '2 hours', '{1}');
BEGIN
	INSERT INTO effects SELECT 'extended', n WHERE answer = 1 EXCEPT TABLE effects;
	RETURN answer;
END
$$;

-- Does it, and if it fails, again in the same transaction.
CREATE FUNCTION caught(kind text, n text, point text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	BEGIN
		EXECUTE format('SELECT do_%s(%L)', kind, n) INTO answer;
	EXCEPTION WHEN internal_error THEN
		PERFORM injection_points_detach(point);
		EXECUTE format('SELECT do_%s(%L)', kind, n) INTO answer;
		RETURN 'caught, ' || answer;
	END;
	RETURN answer;
END
$$;
SQL

# Most calls answer how often they have done something, or whether: so often
# they have these effects.
foreach my $function (
	[ 'finish', 'boolean', "idem_complete('shop', n, 201, 'made', claim_token => claim_token) FROM idem_keys WHERE key = n", 'key' ],
	[ 'once', 'boolean', "idem_once('form', n)", 'token' ],
	[ 'set', 'boolean', "processed FROM idem_set('ann', 'post', n, 'like', true, 7)", 'version,action' ],
	[ 'exclude', 'boolean', "processed FROM idem_set('ann', 'post', n, 'like', true, 7, '{dislike}')", 'version,action,excluded' ],
	[ 'take', 'bigint', "count(*) FROM idem_outbox_take(10, '1 hour', ARRAY[n])", 'taken' ],
	[ 'resume', 'bigint', "count(*) FROM idem_resume(10, '1 hour', ARRAY[n])", 'resumed' ],
	[ 'ack', 'int', "idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = n", 'acked' ],
	[ 'leave', 'int', "idem_outbox_ack(array_agg(id)) FROM idem_outbox WHERE topic = n AND payload = '1'", 'acked' ],
	[ 'requeue', 'int', "idem_outbox_requeue()", 'requeued' ],
	[ 'give_back', 'int', "idem_outbox_release(array_agg(id), '{1}') FROM idem_outbox WHERE topic = n", 'untried' ],
	[ 'cleanup', 'bigint', "keys_deleted FROM idem_cleanup()", 'gone' ],
	[ 'forget', 'boolean', "idem_forget('shop', n)", 'gone' ],
	[ 'forget_user', 'boolean', "idem_forget_user(n) = 2", 'no counter,no action' ],
	[ 'states', 'bigint', "count(*) FROM idem_action_states('ann', 'post', ARRAY[n])", '' ],
	[ 'release', 'boolean', "idem_release('shop', n, claim_token) FROM doomed WHERE name = n", 'gone' ],
	[ 'erase', 'boolean', "idem_erase('shop', n)", 'erased' ])
{
	my ($kind, $type, $call, $effects) = @$function;

	$node->safe_psql('postgres', <<"SQL");
CREATE FUNCTION do_$kind(n text) RETURNS text LANGUAGE plpgsql AS \$\$
DECLARE
	answer $type := $call;
BEGIN
	INSERT INTO effects SELECT unnest('{$effects}'::text[]), n FROM generate_series(1, answer::int);
	RETURN answer;
END
\$\$;
SQL
}

# What is there before, what a first call answers, and what a later one.
my %kinds = (
	claim => [ '', 'new', 'replay' ],
	takeover => [ "SELECT FROM idem_claim('shop', 'NAME', lease => '0')", 'new', 'replay', 'claim' ],
	expired => [ "SELECT FROM idem_claim('shop', 'NAME', ttl => '0')", 'new', 'replay', 'claim' ],
	wait => [ '', 'new', 'replay' ],
	finish => [ "SELECT FROM idem_claim('shop', 'NAME', lease => '1 hour')", 'true', 'false' ],
	run => [ '', 'new', 'replay' ],
	once => [ '', 'true', 'false' ],
	renew => [ "SELECT idem_once('form', 'NAME', ttl => '0')", 'true', 'false', 'once' ],
	batch => [ '', '3', '0' ],
	claims => [ '', '3', '0' ],
	advances => [ '', '3', '0' ],
	sets => [ '', '3', '0' ],
	set => [ '', 'true', 'false' ],
	exclude => [ "SELECT FROM idem_set('ann', 'post', 'NAME', 'dislike', true, 1)", 'true', 'false' ],
	stale => [ "SELECT FROM idem_set('ann', 'post', 'NAME', 'like', false, 9)", 'false', 'false', 'set' ],
	append => [ '', 'appended', 'duplicate' ],
	publish => [ '', 'published', 'published' ],
	park => [ "SELECT do_park('NAME')", 'published', 'published' ],
	publishes => [ '', '3', '3' ],
	parks => [ "SELECT do_park('NAME')", '3', '3' ],
	take => [ "SELECT idem_publish('NAME', '1')", '1', '0' ],
	lane => [ "SELECT idem_publish('NAME', '1', 'key')", '1', '0', 'take' ],
	resume => [ "SELECT FROM idem_claim('NAME', 'NAME', lease => '0', request => '1')", '1', '0' ],
	ack => [ "SELECT idem_publish('NAME', '1')", '1', '0' ],
	leave => [ "SELECT idem_publish('NAME', '1', 'key'), idem_publish('NAME', '2', 'key')", '1', '0' ],
	requeue => [
		"SELECT idem_publish('NAME', '1'); UPDATE idem_outbox SET state = 'dead' WHERE topic = 'NAME'",
		'1', '0'
	],
	extend => [ "SELECT idem_publish('NAME', '1'); SELECT FROM idem_outbox_take(1, '1 hour', '{NAME}')", '1', '1' ],
	give_back => [ "SELECT idem_publish('NAME', '1'); SELECT FROM idem_outbox_take(1, '1 hour', '{NAME}')", '1', '0' ],
	cleanup => [
		"INSERT INTO doomed SELECT 'NAME', claim_token FROM idem_claim('shop', 'NAME', ttl => '0')",
		'1', '0'
	],
	forget => [
		"INSERT INTO doomed SELECT 'NAME', claim_token FROM idem_claim('shop', 'NAME')",
		'true', 'false'
	],
	forget_user => [
		"INSERT INTO leaving VALUES ('NAME'); SELECT FROM idem_set('NAME', 'post', '1', 'save', true, 1)",
		'true', 'false'
	],
	states => [ "SELECT FROM idem_set('ann', 'post', 'NAME', 'save', true, 1)", '1', '1' ],
	release => [
		"INSERT INTO doomed SELECT 'NAME', claim_token FROM idem_claim('shop', 'NAME', lease => '1 hour')",
		'true', 'false'
	],
	erase => [ "SELECT do_claim('NAME')", 'true', 'false' ]);

# Where the names of outbox kinds differ from what "done" looks for.
my %prefix = (lane => 'take', park => 'publish', publishes => 'publish', parks => 'publish', leave => 'ack');

my @cases = map { my $kind = $_->[0]; map { [ $kind, $_ ] } @$_[ 1 .. $#$_ ] } (
	[ 'claim', qw(found claim-drawn insert-heap insert-index inserted found-latest update-heap) ],
	[ 'takeover', qw(found claim-drawn update-locked update-heap) ],
	[ 'expired', qw(update-locked update-heap) ],
	[ 'wait', qw(found-pending wait-begins wait-ends) ],
	[ 'finish', qw(found-latest update-heap) ],
	[ 'run', qw(run-claimed run-handled) ],
	[ 'once', qw(found insert-heap insert-index inserted) ],
	[ 'renew', qw(found update-locked update-heap) ],
	[ 'batch', qw(once-token insert-index) ],
	[ 'claims', qw(claim-element insert-heap complete-element) ],
	[ 'advances', qw(advance-element inserted) ],
	[ 'sets', qw(set-element advanced) ],
	[ 'set', qw(found inserted advanced) ],
	[ 'exclude', qw(inserted) ],
	[ 'stale', qw(found counter-read) ],
	[ 'append', qw(found inserted append-counted) ],
	[ 'publish', qw(publish-numbered append-heap) ],
	[ 'park', qw(append-heap lane-parked) ],
	[ 'take', qw(take-begun update-locked update-heap taken) ],
	[ 'lane', qw(take-begun update-heap taken) ],
	[ 'resume', qw(resume-begun update-locked update-heap resumed) ],
	[ 'ack', qw(found-latest update-locked update-heap) ],
	[ 'leave', qw(update-heap lane-left) ],
	[ 'requeue', qw(found-latest update-locked update-heap) ],
	[ 'publishes', qw(publish-numbered append-heap) ],
	[ 'parks', qw(append-heap lane-parked) ],
	[ 'extend', qw(found-latest update-locked update-heap) ],
	[ 'give_back', qw(found-latest update-locked update-heap) ],
	[ 'cleanup', qw(cleanup-found deleted) ],
	[ 'forget', qw(found-latest deleted) ],
	[ 'forget_user', qw(found-latest deleted pairs-forgotten) ],
	[ 'states', qw(action-read) ],
	[ 'release', qw(found-latest deleted) ],
	[ 'erase', qw(found-latest update-heap) ]);

my %stopped_at = map { $_->[1] => 1 } @cases;
is_deeply([ sort keys %stopped_at ], [ injection_points(grep { !/launcher|worker|shared_memory|commit_notify/ } glob('src/*/*.c')) ],
	'sessions stop at every point that there is');

sub sql
{
	my ($sql) = @_;

	return $node->safe_psql('postgres', "SET statement_timeout = '30s'; $sql");
}

# Kill a backend; the server ends all sessions and recovers.
sub kill_backend
{
	my ($pid) = @_;
	my $offset = -s $node->logfile;

	kill('KILL', $pid) == 1 or die "no process $pid";
	$node->wait_for_log(qr/database system is ready to accept connections/, $offset);
	return;
}

# Let one session meet its fate at one point, and see what is left of it.
sub meet
{
	my ($kind, $place, $fate) = @_;
	my ($before, $first, $again, $do) = @{ $kinds{$kind} };
	my $point = "idem-$place";
	my $name = ($prefix{$kind} || $kind) . "-$kind-at-$place-$fate";
	my $call = 'SELECT do_' . ($do || $kind) . "('$name')";
	my $victim = session($node);
	my $errs = $fate eq 'error' || $fate eq 'caught';
	my $committed = $fate eq 'resume' || $fate eq 'caught';
	my ($holder, $answer, @was);

	sql($before =~ s/NAME/$name/gr) if $before;
	if ($kind eq 'wait')
	{
		$holder = session($node);
		$holder->run("BEGIN; SELECT FROM idem_claim('shop', '$name')");
	}
	sql("SELECT injection_points_attach('$point', '" . ($errs ? 'error' : 'wait') . "')");
	$call = "SELECT caught('" . ($do || $kind) . "', '$name', '$point')" if $fate eq 'caught';
	$victim->send($call);

	# What is waited for ends when the victim sleeps, unless it stops before.
	if ($kind eq 'wait' && !($place ne 'wait-ends' && $fate ne 'caught'))
	{
		wait_for_block($node, $victim->pid);
		$holder->run('ROLLBACK');
	}
	until_stopped($node, $point, $victim) unless $errs;
	if ($kind eq 'wait' && $place ne 'wait-ends' && $fate ne 'caught')
	{
		$answer = $victim->result if $errs;
		$holder->run('ROLLBACK');
	}
	$holder->quit if $holder;

	if ($errs)
	{
		$answer = $victim->result unless defined $answer;
		sql("SELECT injection_points_detach('$point')") if $fate eq 'error';
		push @was, $answer, $fate eq 'error' ? 'ERROR XX000' : "caught, $first";
	}
	else
	{
		# Nobody else shall stop there.
		sql("SELECT injection_points_detach('$point')");
		if ($fate eq 'resume')
		{
			my $peer = session($node);

			# It is done, or sleeps because of the victim.
			$peer->send("SET statement_timeout = '30s'; $call");
			$node->poll_query_until('postgres',
				"SELECT query LIKE '%do_%' AND (state <> 'active' OR wait_event IS NOT NULL)
				 FROM pg_stat_activity WHERE pid = " . $peer->pid)
			  or die "$name: the other session is busy";
			sql("SELECT injection_points_wakeup('$point')");
			my @answers = ($victim->result, $peer->result);
			# Of many at once each may get some.
			my @counts = grep { /^\d+$/ } @answers;
			my $firsts = @counts ? sum(@counts) / $first : grep { $_ eq $first } @answers;
			my @errors = grep { /ERROR/ } @answers;

			push @was, "$firsts first, errors: @errors",
			  ($again eq $first ? 2 : 1) . ' first, errors: ';
			note("$name: @answers");
			$peer->quit;
		}
		elsif ($fate eq 'kill')
		{
			kill_backend($victim->pid);
			push @was, $victim->result, 'ERROR lost';
		}
		else
		{
			sql("SELECT pg_${fate}_backend(" . $victim->pid . ')');
			push @was, $victim->result,
			  $fate eq 'cancel' ? 'ERROR 57014' : "ERROR 57P01\nERROR lost";
			$node->poll_query_until('postgres',
				'SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ' . $victim->pid)
			  if $fate eq 'terminate';
		}
	}

	# A session that is still there may try again itself.
	my $torn = sql('SELECT * FROM torn');
	my $retry = 'SELECT do_' . ($do || $kind) . "('$name')";
	my $ask = $fate eq 'error' || $fate eq 'cancel' ? sub { $victim->run(@_) } : \&sql;
	my $retries = join(', ', map { $ask->($retry) } 1 .. 2);

	$victim->quit;
	return is(
		join("\n", $was[0], "torn: $torn", $retries, 'torn: ' . sql('SELECT * FROM torn')),
		join("\n", $was[1], 'torn: ', ($committed ? $again : $first) . ", $again", 'torn: '),
		$name);
}

# A session that ends at such a point leaves a trace in the module that made it
# wait, and there is room for eight: the kill comes last, and clears all.
my $n = 0;
foreach my $case (@cases)
{
	my ($kind, $place) = @$case;

	diag(sprintf('== %d/%d: %s, %s', ++$n, scalar @cases, $kind, $place));
	meet($kind, $place, $_) foreach qw(error caught resume cancel terminate kill);
}

$node->command_ok(
	[ 'pg_amcheck', '--install-missing', '--heapallindexed', '--rootdescend', 'postgres' ],
	'tables and indexes are sound');

$node->stop;
done_testing();
