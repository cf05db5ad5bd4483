# Clients that hang up while their call waits.  Nobody would hear what it is
# given, so it is given nothing: no claim for the length of a lease, no token,
# no number.  What ends work that is done is carried out all the same.

use IdempotencyTest;

my $node = new_node('lost_client', conf => 'client_connection_check_interval = 0');

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE TABLE orders (sku text);
CREATE FUNCTION place_order(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
	INSERT INTO orders VALUES (request ->> 'sku') RETURNING request
$$;
SQL

my $holder = session($node);

# lose(BEGINNING, CALL, END): the holder does the one thing; a client sends the
# call, which waits for that, and dies; the holder does the other.  Returns when
# the client's backend has gone.
sub lose
{
	my ($beginning, $call, $end) = @_;
	my $client = session($node);
	my $pid = $client->pid;
	my $run = $client->{psql}->{run};

	$holder->run($beginning);
	$client->send($call);
	$node->poll_query_until('postgres',
		"SELECT wait_event_type IN ('Lock', 'Extension') FROM pg_stat_activity WHERE pid = $pid")
	  or die "backend $pid does not wait";
	$run->signal('KILL');
	eval { $run->finish };
	$holder->run($end);
	$node->poll_query_until('postgres',
		"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)")
	  or die "backend $pid of a lost client stays";
	return;
}

# lost(HELD, CALL, NEXT, ANSWER, TITLE): the same with what is rolled back, and
# then what another client gets.
sub lost
{
	my ($held, $call, $next, $answer, $title) = @_;

	lose("BEGIN;\n$held", $call, 'ROLLBACK');
	is($node->safe_psql('postgres', $next), $answer, $title);
	return;
}

sub claim
{
	my ($number, @options) = @_;

	return 'SELECT outcome, attempt FROM idem_claim('
	  . join(', ', "'shop', 'order-000000000$number'", @options) . ");\n";
}

lost(claim(1), claim(1, "wait => '10 minutes'"), claim(1),
	'new|1', 'a claim goes to who can hear of it');

$node->safe_psql('postgres', claim(2, "lease => '0 seconds'"));
lost(claim(2), claim(2, "wait => '10 minutes'"), claim(2),
	'new|2', 'so does a dead one that is taken over');

lose(claim(6), claim(6, "wait => '10 minutes'"), "SELECT idem_fail('shop', 'order-0000000006', NULL, claim_token) FROM idem_keys WHERE key LIKE '%6';");
is($node->safe_psql('postgres', claim(6)), 'new|2', 'and one that is given up within its lease');

my $run = "SELECT outcome FROM idem_run('shop', 'order-0000000003', 'place_order(jsonb)', '{\"sku\": \"pot\"}'";

lost("$run);", "$run, wait => '10 minutes');", "SELECT count(*) FROM orders; $run)",
	"0\nnew", 'a handler is called for the retry');

lost("SELECT idem_once('form', 'token-1');", "SELECT idem_once('form', 'token-1');",
	"SELECT idem_once('form', 'token-1')", 't', 'a token is not used up');
lost("SELECT idem_once('form', 'token-2');", "SELECT idem_once_many('form', '{token-3,token-2}');",
	"SELECT idem_once_many('form', '{token-3,token-2}')", "token-3\ntoken-2", 'nor are many');

sub append
{
	my ($client, @options) = @_;

	return 'SELECT outcome, version FROM idem_try_append('
	  . join(', ', "'cart', '$client', 1", @options) . ");\n";
}

lost(append('phone'), append('phone', "wait => '10 minutes'"), append('phone'),
	'appended|1', 'an event does not count as appended');
lost(append('tablet'), append('watch'), append('watch'),
	'appended|2', 'nor does one that waited for another client of its aggregate');

# A client that is still there.
my $other = session($node);

$holder->run('BEGIN; ' . claim(4));
$other->send(claim(4, "wait => '10 minutes'"));
wait_for_block($node, $other->pid);
$holder->run('ROLLBACK');
is($other->result, 'new|1', 'who is still there gets what it has waited for');

# The work is done, and the record helps the client that retries.
my $token = $node->safe_psql('postgres', "SELECT claim_token FROM idem_claim('shop', 'order-0000000005')");

lose("BEGIN; SELECT idem_heartbeat('shop', 'order-0000000005', claim_token => $token);",
	"SELECT idem_complete('shop', 'order-0000000005', 201, 'done', claim_token => $token);", 'ROLLBACK');
is($node->safe_psql('postgres', "SELECT state FROM idem_lookup('shop', 'order-0000000005')"),
	'completed', 'a completion is carried out, whether or not its client hears of it');

$_->quit foreach $holder, $other;
$node->stop;
done_testing();
