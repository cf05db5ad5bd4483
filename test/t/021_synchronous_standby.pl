# Synchronous replication: while a commit waits for its standby, no caller
# learns of it; after the confirmation, all callers do.

use Time::HiRes qw(time);
use IdempotencyTest;

my $primary = new_node('primary', allows_streaming => 1);
my $standby = new_standby($primary);

$primary->safe_psql('postgres', 'CREATE EXTENSION idempotency');
$primary->safe_psql('postgres', "ALTER SYSTEM SET synchronous_standby_names = '*'");
$primary->reload;
wait_for_standby();

my $writer = session($primary);
my $twin = session($primary);
my $key = 'order-0000000000000001';
my $next_seq = 1;

sub wait_for_standby
{
	$primary->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
	  or die 'no synchronous standby';
	return;
}

# Do something in a transaction whose commit then waits for the standby.
sub commit_and_wait
{
	my ($session, $sql) = @_;
	my $result = $session->run("BEGIN;\n$sql");

	$session->send('COMMIT');
	$primary->poll_query_until('postgres',
		'SELECT wait_event = \'SyncRep\' FROM pg_stat_activity WHERE pid = ' . $session->pid)
	  or die 'the commit does not wait';
	return $result;
}

sub append
{
	my ($seq, $more) = @_;

	return "SELECT * FROM idem_try_append('cart', 'phone', $seq" . ($more || '') . ')';
}

#
# A standby that answers
#

my $answers = '';
my $expected = '';

foreach (1 .. 50)
{
	my $seq = $next_seq++;

	$answers .= $writer->run(append($seq)) . ' ' . $twin->run(append($seq)) . "\n";
	$expected .= "appended|$seq|$seq duplicate|$seq|$seq\n";
}
is($answers, $expected,
	'confirmed-append-is-duplicate: from the moment its writer knows, never in_flight');

#
# A standby that does not
#

my $confirmed = $next_seq - 1;
my $waiting = $next_seq++;
my $waiting_since;

$standby->stop;
is(commit_and_wait($writer, append($waiting)), "appended|$waiting|$waiting",
	'append, whose commit waits for the standby');
is($twin->run(append($waiting)), "in_flight|$confirmed|$confirmed",
	'unconfirmed-append-is-in-flight: at once');
$waiting_since = time;
is($twin->run(append($waiting, ", wait => '300ms'")), "in_flight|$confirmed|$confirmed",
	'unconfirmed-append-is-in-flight: after a wait');
cmp_ok(time - $waiting_since, '>=', 0.3, 'unconfirmed-append-is-in-flight: as long as asked');
is($twin->run(append($waiting + 1)), "in_flight|$confirmed|$confirmed",
	'unconfirmed-append-is-in-flight: the next one has to wait, too');
is($twin->run(append($confirmed)), "duplicate|$confirmed|$confirmed",
	'unconfirmed-append-is-in-flight: what was confirmed before is a duplicate all the same');
is($twin->run("SELECT idem_last_client_seq('cart', 'phone')"), $confirmed,
	'unconfirmed-append-is-in-flight: a restarted writer is not told of it');
is( $twin->run(
		"SET lock_timeout = '100ms';
		 SELECT * FROM idem_try_append('cart', 'laptop', 1);
		 RESET lock_timeout"),
	'ERROR 55P03', 'another client queues behind it');

my $sleeper = session($primary);
$sleeper->send(append($waiting, ", wait => '1 minute'"));
wait_for_block($primary, $sleeper->pid);
$standby->start;
is($writer->result, '', 'the standby is back: the commit ends');
is($twin->run(append($waiting)), "duplicate|$waiting|$waiting",
	'confirmed-append-is-duplicate: after the standby came back');
is($sleeper->result, "duplicate|$waiting|$waiting",
	'confirmed-append-is-duplicate: a waiting twin is woken and told');
wait_for_standby();

#
# The other primitives
#

my $message = '{"order": 1}';

$standby->stop;
is( commit_and_wait(
		$writer,
		"SELECT outcome, idem_complete('shop', '$key', 201, 'made') FROM idem_claim('shop', '$key');
		 SELECT * FROM idem_try_advance('u', 'post', '1', 7);
		 SELECT idem_once('form', 'token');
		 SELECT idem_publish('orders', '$message') IS NOT NULL"),
	"new|t\nt|7\nt\nt", 'one of each, whose commit waits for the standby');

my $claim = "SELECT outcome, lease_expires_at, response_body FROM idem_claim('shop', '$key'";

is($twin->run("$claim)"), 'in_progress||', 'unconfirmed-claim-is-in-progress: at once');
is($twin->run("$claim, wait => '100ms')"), 'in_progress||',
	'unconfirmed-claim-is-in-progress: after a wait');
is($twin->run("SELECT state FROM idem_lookup('shop', '$key')"), '',
	'unconfirmed-claim-is-in-progress: no record to be looked up');
is($twin->run('SELECT payload FROM idem_outbox_take()'), '',
	'unconfirmed-message-is-not-handed-out');
is( $twin->run(
		"SET lock_timeout = '100ms';
		 SELECT * FROM idem_try_advance('u', 'post', '1', 7);
		 SELECT idem_once('form', 'token');
		 RESET lock_timeout"),
	"ERROR 55P03\nERROR 55P03", 'unconfirmed: its twins wait');
$sleeper->send("SELECT idem_once('form', 'token')");
wait_for_block($primary, $sleeper->pid);
$standby->start;
is($writer->result, '', 'the standby is back: the commit ends');
is($twin->run("$claim)"), 'replay||made', 'confirmed: the response is replayed');
is($twin->run("SELECT * FROM idem_try_advance('u', 'post', '1', 7)"), 'f|7', 'confirmed: stale');
is($twin->run('SELECT payload FROM idem_outbox_take()'), $message,
	'confirmed: the message is handed out');
is($sleeper->result, 'f', 'confirmed: the waiting twin is not the first');
wait_for_standby();

#
# A wait that is canceled. The transaction is committed here, but perhaps not
# on the standby, of which the server warns. Duplicates get the result of the
# commit.
#

my ($cancelled, $terminated, $timed_out) = ($next_seq++, $next_seq++, $next_seq++);

$standby->stop;
commit_and_wait($writer, append($cancelled));
is($twin->run(append($cancelled)), "in_flight|$waiting|$waiting", 'cancelled: not yet');
$twin->run('SELECT pg_cancel_backend(' . $writer->pid . ')');
is($writer->result, '', 'cancelled: the commit succeeds');
ok($primary->log_contains('canceling wait for synchronous replication'),
	'cancelled: with a warning');
is($twin->run(append($cancelled)), "duplicate|$cancelled|$cancelled",
	'cancelled-wait-is-committed: its twin is a duplicate');

commit_and_wait($writer, append($terminated));
$twin->run('SELECT pg_terminate_backend(' . $writer->pid . ')');
like($writer->result, qr/^(ERROR 57P01\n)?ERROR lost$/, 'terminated: the writer is told nothing');
$writer = session($primary);
is($writer->run(append($terminated)), "duplicate|$terminated|$terminated",
	'terminated-wait-is-committed: the writer tries again, and is a duplicate');

commit_and_wait($writer, append($timed_out) . "; SET statement_timeout = '100ms'");
$primary->poll_query_until('postgres',
	"SELECT clock_timestamp() - query_start > '400 ms' FROM pg_stat_activity
	 WHERE wait_event = 'SyncRep' AND pid = " . $writer->pid)
  or die 'the commit does not wait';
is($twin->run(append($timed_out)), "in_flight|$terminated|$terminated",
	'statement_timeout does not end the wait');
$twin->run('SELECT pg_cancel_backend(' . $writer->pid . ')');
is($writer->result, '', 'but a cancel does');

$standby->start;
wait_for_standby();
$primary->wait_for_catchup($standby);
is( $standby->safe_psql('postgres', "SELECT idem_last_client_seq('cart', 'phone')"),
	$timed_out, 'the standby gets it all in the end');

$_->quit foreach $writer, $twin, $sleeper;
$standby->stop;
$primary->stop;
done_testing();
