# Logical replication: the tables are written past the executor, yet every
# change arrives; and what could not be replicated is refused.

use IdempotencyTest;
use Records;

my $publisher = new_node('publisher', allows_streaming => 'logical');
my $subscriber = new_node('subscriber', allows_streaming => 'logical');
my $connection = $publisher->connstr . ' dbname=postgres';

$_->safe_psql('postgres', 'CREATE EXTENSION idempotency') foreach ($publisher, $subscriber);

my @tables = split /\n/, $publisher->safe_psql('postgres',
	"SELECT c.relname FROM pg_depend AS d
	 JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	 JOIN pg_class AS c ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
	 WHERE e.extname = 'idempotency' AND c.relkind = 'r' ORDER BY 1");

is( join(' ', @tables),
	'idem_action_versions idem_aggregates idem_client_sequences idem_keys idem_outbox idem_tokens idem_user_actions',
	'the tables');

# Every row, in an order that both sides share.
sub contents
{
	my ($node) = @_;

	return $node->safe_psql('postgres',
		join(";\n", map { "SELECT t::text FROM $_ AS t ORDER BY 1" } @tables));
}

sub is_replicated
{
	my ($title) = @_;

	$publisher->wait_for_catchup('replica');
	return is(contents($subscriber), contents($publisher), "replicated: $title");
}

# The token of a key's current claim.
sub token_of
{
	my ($key) = @_;

	return "(SELECT claim_token FROM idem_keys WHERE key = '$key')";
}

# The id of a topic's message.
sub message
{
	my ($topic) = @_;

	return "(SELECT id FROM idem_outbox WHERE topic = '$topic')";
}

#
# What is there when the subscription begins, and each kind of change after
#

my $key = 'order-0000000000000001';

$publisher->safe_psql('postgres', 'CREATE ROLE app');
$publisher->safe_psql('postgres', $_->{fill}) foreach $keys_and_actions, $streams;
$publisher->safe_psql('postgres',
	"SELECT idem_claim('shop', 'before-0000000000001', '\\xab', lease => '1 hour');
	 SELECT idem_set('v', 'post', 'before', 'like', true, 5);
	 CREATE PUBLICATION everything FOR TABLE " . join(', ', @tables));
$subscriber->safe_psql('postgres',
	"CREATE SUBSCRIPTION replica CONNECTION '$connection' PUBLICATION everything");
$subscriber->wait_for_subscription_sync($publisher, 'replica');
is_replicated('the initial contents');
foreach my $table (@tables)
{
	isnt($subscriber->safe_psql('postgres', "SELECT count(*) FROM $table"), '0',
		"the initial contents: $table");
}

# So that a row has values that an update leaves outside of it.
my $random = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 2000) AS i)";

foreach my $step (
	[ 'claim', "outcome FROM idem_claim('shop', '$key', '\\x01', lease => '1 hour')", 'new' ],
	[ 'checkpoint', "idem_checkpoint('shop', '$key', 'half', to_json($random), claim_token => "
		  . token_of($key) . ') > now()', 't' ],
	[ 'heartbeat', "idem_heartbeat('shop', '$key', '2 hours', " . token_of($key) . ') > now()', 't' ],
	[ 'fail', "idem_fail('shop', '$key', 'no', " . token_of($key) . ')', 't' ],
	[ 'claim of a failed key', "attempt FROM idem_claim('shop', '$key')", '2' ],
	[ 'complete', "idem_complete('shop', '$key', 201, $random, '{\"a\":  1}', " . token_of($key) . ')',
		't' ],
	[ 'erase', "idem_erase('shop', '$key')", 't' ],
	[ 'forget', "idem_forget('shop', '$key')", 't' ],
	[ 'claim of a forgotten key', "outcome FROM idem_claim('shop', '$key')", 'new' ],
	[ 'complete with bytes',
		"idem_complete('shop', '$key', 200, '\\x00ff'::bytea, claim_token => " . token_of($key) . ')',
		't' ],
	[ 'claim, to be released', "outcome FROM idem_claim('shop', '$key-2', lease => '0')", 'new' ],
	[ 'takeover', "attempt FROM idem_claim('shop', '$key-2')", '2' ],
	[ 'release', "idem_release('shop', '$key-2', " . token_of("$key-2") . ')', 't' ],
	[ 'advance', "* FROM idem_try_advance('v', 'post', '1', 1)", 't|1' ],
	[ 'advance again', "* FROM idem_try_advance('v', 'post', '1', 2)", 't|2' ],
	[ 'set', "* FROM idem_set('v', 'post', '1', 'like', true, 3)", 't|3|t' ],
	[ 'set with excludes', "* FROM idem_set('v', 'post', '1', 'dislike', true, 4, '{like}')", 't|4|t' ],
	[ 'toggle', "* FROM idem_toggle('v', 'post', '1', 'dislike', 5)", 'f|5|t' ],
	[ 'append', "* FROM idem_try_append('cart', 'phone', 1)", 'appended|1|1' ],
	[ 'append again', "* FROM idem_try_append('cart', 'phone', 2, 3)", 'appended|4|4' ],
	[ 'append of another client', "* FROM idem_try_append('cart', 'laptop', 1)", 'appended|1|5' ],
	[ 'once', "idem_once('form', 'step', '0')", 't' ],
	[ 'once, of an expired token', "idem_once('form', 'step')", 't' ],
	[ 'once, several', "count(*) FROM idem_once_many('form', '{a,b,step}'::text[])", '2' ],
	[ 'publish', "idem_publish('step', to_jsonb($random), 'key', '{\"a\": 1}') IS NOT NULL", 't' ],
	[ 'publish many', "count(*) FROM idem_publish_many('{many}', ARRAY['1', to_jsonb($random), '3'], '{k,NULL,k}')", '3' ],
	[ 'take', "attempt FROM idem_outbox_take(1, '1 hour', '{step}')", '1' ],
	[ 'nack', 'idem_outbox_nack(' . message('step') . ", 'busy', '0')", 'pending' ],
	[ 'take', "attempt FROM idem_outbox_take(1, '1 hour', '{step}')", '2' ],
	[ 'extend', 'idem_outbox_extend(ARRAY[' . message('step') . "], '2 hours', '{2}') > 0", 't' ],
	[ 'give back', 'idem_outbox_release(ARRAY[' . message('step') . "], '{2}')", '1' ],
	[ 'take again', "attempt FROM idem_outbox_take(1, '1 hour', '{step}')", '3' ],
	[ 'acknowledge', 'idem_outbox_ack(ARRAY[' . message('step') . '])', '1' ],
	[ 'requeue', "idem_outbox_requeue()", '1' ],
	[ 'take what was dead', "attempt FROM idem_outbox_take(1, '1 hour', '{dead}')", '2' ],
	[ 'cleanup', 'keys_deleted, tokens_deleted, messages_deleted FROM idem_cleanup()', '1|1|0' ])
{
	my ($title, $sql, $answer) = @$step;

	is($publisher->safe_psql('postgres', "SELECT $sql"), $answer, "$title: answer");
	is_replicated($title);
}
$publisher->safe_psql('postgres',
	"BEGIN;
	 SELECT idem_complete('shop', '$key-3', 200, outcome) FROM idem_claim('shop', '$key-3');
	 SAVEPOINT s;
	 SELECT idem_set('v', 'post', '1', 'like', true, 6);
	 SELECT idem_claim('shop', '$key-4');
	 ROLLBACK TO s;
	 SELECT idem_set('v', 'post', '1', 'like', true, 7);
	 COMMIT");
is_replicated('one transaction, in part rolled back');

#
# Replica identity
#

foreach my $identity ('FULL', 'USING INDEX replica_identity', 'DEFAULT')
{
	$publisher->safe_psql('postgres',
		"CREATE UNIQUE INDEX IF NOT EXISTS replica_identity ON idem_keys (scope, key);
		 ALTER TABLE idem_keys REPLICA IDENTITY $identity");
	$subscriber->safe_psql('postgres',
		"CREATE UNIQUE INDEX IF NOT EXISTS replica_identity ON idem_keys (scope, key);
		 ALTER TABLE idem_keys REPLICA IDENTITY $identity");
	$publisher->safe_psql('postgres',
		"SELECT idem_claim('shop', '$key-identity', lease => '0');
		 SELECT idem_claim('shop', '$key-identity');
		 SELECT idem_complete('shop', '$key-identity', 200, $random, claim_token => "
		  . token_of("$key-identity") . ');');
	is_replicated("update, replica identity $identity");
	$publisher->safe_psql('postgres', "SELECT idem_forget('shop', '$key-identity')");
	is_replicated("delete, replica identity $identity");
}

# Without one, an UPDATE of a published table is an error, and so is ours.
my $live = "'shop', 'before-0000000000001'";
my $live_token = token_of('before-0000000000001');

$publisher->safe_psql('postgres',
	"SELECT idem_publish('unidentified', '1');
	 SELECT idem_once('form', 'unidentified', '0')");
$publisher->safe_psql('postgres',
	join(";\n", map { "ALTER TABLE $_ REPLICA IDENTITY NOTHING" } @tables));

my $before = contents($publisher);
foreach my $call (
	"idem_complete($live, 200, 'x', claim_token => $live_token)",
	"idem_checkpoint($live, 'p', claim_token => $live_token)",
	"idem_heartbeat($live, claim_token => $live_token)",
	"idem_fail($live, claim_token => $live_token)",
	"idem_release($live, $live_token)",
	"idem_forget($live)",
	"idem_erase('shop', '$key-3')",
	"idem_try_advance('v', 'post', '1', 100)",
	"idem_set('v', 'post', '1', 'like', false, 100)",
	"idem_toggle('v', 'post', 'before', 'like', 100)",
	"idem_try_append('cart', 'phone', 5)",
	"idem_try_append('cart', 'tablet', 1)",
	"idem_once('form', 'unidentified')",
	"idem_outbox_take(1, '1 hour', '{unidentified}')",
	"idem_outbox_ack(ARRAY[" . message('leased') . '])',
	"idem_outbox_nack(" . message('unidentified') . ')',
	"idem_cleanup()")
{
	my (undef, undef, $stderr) = $publisher->psql('postgres',
		"\\set VERBOSITY verbose\nSELECT $call");

	like($stderr,
		qr/ERROR:  55000: cannot (update|delete from) table .* does not have a replica identity/,
		"no replica identity: $call");
}
is(contents($publisher), $before, 'no replica identity: nothing has changed');
is(sqlstate_of($publisher, "UPDATE idem_keys SET attempt = attempt"), '55000',
	'no replica identity: as for any UPDATE');
is( $publisher->safe_psql('postgres',
		"SELECT outcome FROM idem_claim('shop', '$key-inserted');
		 SELECT outcome FROM idem_claim('shop', '$key-3');
		 SELECT * FROM idem_try_advance('v', 'post', '1', 1);
		 SELECT outcome FROM idem_try_append('another cart', 'phone', 1);
		 SELECT outcome FROM idem_try_append('cart', 'phone', 4);
		 SELECT idem_once('form', 'identified'), idem_once('form', 'a');
		 SELECT idem_publish('identified', '1') IS NOT NULL"),
	"new\nreplay\nf|7\nappended\nduplicate\nt|f\nt", 'no replica identity: what needs none works');
is( $publisher->safe_psql('postgres',
		"BEGIN;
		 DO \$\$ BEGIN
			PERFORM idem_complete($live, 200, 'x', claim_token => $live_token);
		 EXCEPTION WHEN object_not_in_prerequisite_state THEN NULL;
		 END \$\$;
		 SELECT outcome FROM idem_claim('shop', '$key-inserted-2');
		 COMMIT;
		 SELECT state FROM idem_lookup('shop', '$key-inserted-2')"),
	"new\nstarted", 'no replica identity: the error can be caught');

# A publication of inserts only does not need one.
$publisher->safe_psql('postgres',
	"ALTER PUBLICATION everything SET (publish = 'insert')");
is( $publisher->safe_psql('postgres',
		"SELECT * FROM idem_try_advance('v', 'post', '1', 100)"),
	't|100', 'no replica identity: nor does a publication of inserts');
$publisher->safe_psql('postgres',
	"ALTER PUBLICATION everything SET (publish = 'insert, update, delete, truncate')");

$publisher->safe_psql('postgres',
	join(";\n", map { "ALTER TABLE $_ REPLICA IDENTITY DEFAULT" } @tables));
is( $publisher->safe_psql('postgres',
		"SELECT idem_heartbeat($live, '1 hour', claim_token => $live_token) > now();
		 SELECT * FROM idem_try_advance('v', 'post', '1', 101)"),
	"t\nt|101", 'replica identity again: works at once');
is_replicated('after it');

#
# The subscriber takes over.  Tokens and ids of the publisher are far ahead.
#

$publisher->safe_psql('postgres',
	"SELECT setval('idem_claim_tokens', 5000000), setval('idem_outbox_ids', 5000000);
	 SELECT idem_claim('shop', '$key-far');
	 SELECT idem_publish('far', '1', 'key'), idem_publish('far', '2', 'key')");
is_replicated('tokens and ids that are far ahead');
$subscriber->safe_psql('postgres', 'ALTER SUBSCRIPTION replica DISABLE');

my $far_token = $publisher->safe_psql('postgres', 'SELECT ' . token_of("$key-far"));
my ($token, $until) = split /\|/, $publisher->safe_psql('postgres',
	"SELECT claim_token, lease_expires_at FROM idem_keys WHERE key = 'before-0000000000001'");

is( $subscriber->safe_psql('postgres',
		"SELECT outcome, response_body FROM idem_claim('shop', '$key-3');
		 SELECT outcome, lease_expires_at FROM idem_claim($live);
		 SELECT outcome FROM idem_claim($live, '\\xcd');
		 SELECT * FROM idem_try_advance('v', 'post', '1', 101)"),
	"replay|new\nin_progress|$until\nhash_conflict\nf|101",
	'the subscriber answers as the publisher');

# Sequences are not replicated: the token must grow all the same.
is( $subscriber->safe_psql('postgres',
		"SELECT idem_fail($live, claim_token => $token);
		 SELECT outcome, claim_token > $token FROM idem_claim($live)"),
	"t\nnew|t", 'and a takeover there has a higher token');
is( sqlstate_of($subscriber, "SELECT idem_complete($live, 200, 'late', claim_token => $token)"),
	'ID003', 'so that the former holder is refused');

is( $subscriber->safe_psql('postgres',
		"SELECT * FROM idem_try_append('cart', 'phone', 4);
		 SELECT * FROM idem_try_append('cart', 'phone', 5);
		 SELECT idem_once('form', 'a'), idem_once('form', 'c')"),
	"duplicate|4|5\nappended|5|6\nf|t", 'client sequences and tokens go on');

# For the ids of messages, and the tokens of keys that were deleted, there is
# nothing to go by but the sequences, which have to be moved, as the operations
# guide says.
is( $subscriber->safe_psql('postgres', operations_sql('Failover', 1)),
	't', 'the recipe for tokens and ids');
is( $subscriber->safe_psql('postgres',
		"SELECT idem_publish('free', '4', E'key\\t\\\\') IS NOT NULL, idem_publish('far', '3', 'key') IS NOT NULL;
		 SELECT payload FROM idem_outbox_take(100, '1 hour', '{free}');
		 SELECT payload FROM idem_outbox_take(100, '1 hour', '{far}')"),
	"t|t\n1\n2\n3\n4\n1\n2\n3", 'and new messages are handed out behind those before them');
is( $subscriber->safe_psql('postgres',
		"SELECT idem_forget('shop', '$key-far');
		 SELECT claim_token > $far_token FROM idem_claim('shop', '$key-far')"),
	"t\nt", 'and a key that was deleted gets a higher token');

$subscriber->safe_psql('postgres',
	'ALTER SUBSCRIPTION replica SET (slot_name = NONE); DROP SUBSCRIPTION replica');
$_->stop foreach ($subscriber, $publisher);
done_testing();
