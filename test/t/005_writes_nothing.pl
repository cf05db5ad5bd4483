# An answer that changes nothing writes nothing: no transaction id, no WAL, no
# row lock, no new row version.

use IdempotencyTest;

# Nothing else may write meanwhile: no checkpoint, no autovacuum, no logging of
# hint bits; wal_level is minimal, so that no snapshots are logged either.
my $node = new_node('writes_nothing', conf => <<'CONF');
checkpoint_timeout = 1h
wal_log_hints = off
track_counts = off
idempotency.expired_key_policy = reject
CONF

$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE FUNCTION handler(request jsonb) RETURNS idem_response
	LANGUAGE sql AS $$ SELECT 200, NULL::json, 'handled' $$;

SELECT idem_complete('shop', k, 201, 'made', '{"X-Id": 7}', claim_token)
FROM (VALUES ('completed-0000000001')) AS v (k), idem_claim('shop', k, '\xcd');
SELECT idem_complete('shop', k, 200, repeat('long', 50000), claim_token => claim_token)
FROM (VALUES ('long-000000000000001')) AS v (k), idem_claim('shop', k);
SELECT idem_complete('shop', k, 200, 'secret', claim_token => claim_token), idem_erase('shop', k)
FROM (VALUES ('erased-0000000000001')) AS v (k), idem_claim('shop', k);
SELECT idem_claim('shop', 'live-000000000000001', '\xab', lease => '1 hour');
SELECT idem_claim('shop', 'expired-000000000001', ttl => '0');
SELECT idem_claim('shop', 'abandoned-0000000001', lease => '0');
SELECT idem_run('shop', 'handled-000000000001', 'handler(jsonb)', '{}');
SELECT idem_set('u', 'post', '1', 'like', true, 100);
SELECT idem_set('u', 'post', '2', 'like', true, 100);
SELECT idem_set('u', 'post', '2', 'like', false, 101);
SELECT idem_try_advance('u', 'post', '3', 100);
VACUUM (FREEZE) idem_keys, idem_action_versions, idem_user_actions;
SQL

# A transaction that is left open: one key it has inserted, one whose
# abandoned claim it is taking over, one that it is completing, and counters
# it has advanced.
my $writer = session($node);
$writer->run(<<'SQL');
SELECT idem_claim('shop', 'completing-000000001', lease => '1 hour');
BEGIN;
SELECT idem_claim('shop', 'uncommitted-00000001', '\x01');
SELECT idem_claim('shop', 'abandoned-0000000001');
SELECT idem_complete('shop', 'completing-000000001', 200, 'soon', claim_token => claim_token)
FROM idem_keys WHERE key = 'completing-000000001';
SELECT idem_try_advance('u', 'post', '3', 200);
SELECT idem_set('u', 'post', '2', 'like', true, 200);
SQL

# Signs of a write. The next transaction id and the end of WAL are those of the
# whole server.
my $traces = <<'SQL';
SELECT pg_snapshot_xmax(pg_current_snapshot()), pg_current_wal_insert_lsn();
SELECT ctid, xmin, xmax, cmax, key FROM idem_keys ORDER BY ctid;
SELECT ctid, xmin, xmax, cmax, * FROM idem_action_versions ORDER BY ctid;
SELECT ctid, xmin, xmax, cmax, * FROM idem_user_actions ORDER BY ctid;
SQL

# Locks of the transaction: an exclusive lock on a transaction id means that it
# has one. SERIALIZABLE records what was read; that blocks no session.
my $own_traces = <<'SQL';
SELECT pg_current_xact_id_if_assigned() IS NULL,
	(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()
		AND locktype = 'transactionid' AND mode = 'ExclusiveLock'),
	(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()
		AND locktype = 'tuple' AND mode <> 'SIReadLock');
SQL

my @calls = (
	[ 'replay', "outcome, response_status, response_body FROM idem_claim('shop', 'completed-0000000001', '\\xcd')",
		'replay|201|made' ],
	[ 'replay of a long response',
		"outcome, md5(response_body) = md5(repeat('long', 50000)) FROM idem_claim('shop', 'long-000000000000001')",
		'replay|t' ],
	[ 'replay with wait', "outcome FROM idem_claim('shop', 'completed-0000000001', wait => '1 minute')",
		'replay' ],
	[ 'erased', "outcome, response_status FROM idem_claim('shop', 'erased-0000000000001')",
		'erased|200' ],
	[ 'in_progress within a lease', "outcome FROM idem_claim('shop', 'live-000000000000001')",
		'in_progress' ],
	[ 'in_progress within a lease, after a wait',
		"outcome FROM idem_claim('shop', 'live-000000000000001', wait => '50 milliseconds')",
		'in_progress' ],
	[ 'in_progress, uncommitted', "outcome FROM idem_claim('shop', 'uncommitted-00000001')",
		'in_progress' ],
	[ 'in_progress, uncommitted, after a wait',
		"outcome FROM idem_claim('shop', 'uncommitted-00000001', wait => '50 milliseconds')",
		'in_progress' ],
	[ 'in_progress, being taken over', "outcome FROM idem_claim('shop', 'abandoned-0000000001')",
		'in_progress' ],
	[ 'in_progress, being taken over, after a wait',
		"outcome FROM idem_claim('shop', 'abandoned-0000000001', wait => '50 milliseconds')",
		'in_progress' ],
	[ 'in_progress, being completed', "outcome FROM idem_claim('shop', 'completing-000000001')",
		'in_progress' ],
	[ 'hash_conflict with a completed key',
		"outcome, response_body FROM idem_claim('shop', 'completed-0000000001', '\\x00')",
		'hash_conflict|' ],
	[ 'hash_conflict with a live claim',
		"outcome FROM idem_claim('shop', 'live-000000000000001', '\\x00', wait => '1 minute')",
		'hash_conflict' ],
	[ 'expired', "outcome FROM idem_claim('shop', 'expired-000000000001')", 'expired' ],
	[ 'completed again with its token',
		"idem_complete('shop', key, 201, 'again', claim_token => claim_token)
		 FROM idem_keys WHERE key = 'completed-0000000001'",
		'f' ],
	[ 'replay of idem_run',
		"outcome, response_body FROM idem_run('shop', 'handled-000000000001', 'handler(jsonb)', '{}')",
		'replay|handled' ],
	[ 'lookup', "state FROM idem_lookup('shop', 'live-000000000000001')", 'started' ],
	[ 'lookup of nothing', "state FROM idem_lookup('shop', 'never-claimed-000001')", '' ],
	[ 'key rules', "idem_key_is_valid('never-claimed-000001')", 't' ],
	[ 'request hash', "length(idem_request_hash('POST', '/', '{}'))", '32' ],
	[ 'stale advance', "* FROM idem_try_advance('u', 'post', '1', 99)", 'f|100' ],
	[ 'stale advance, the same action again', "* FROM idem_try_advance('u', 'post', '1', 100)",
		'f|100' ],
	[ 'stale advance under a concurrent one', "* FROM idem_try_advance('u', 'post', '3', 100)",
		'f|100' ],
	[ 'stale set', "* FROM idem_set('u', 'post', '1', 'like', false, 99)", 't|100|f' ],
	[ 'stale set with excludes',
		"* FROM idem_set('u', 'post', '1', 'dislike', true, 100, '{like}')", 'f|100|f' ],
	[ 'stale set under a concurrent one', "* FROM idem_set('u', 'post', '2', 'like', true, 101)",
		'f|101|f' ],
	[ 'stale toggle', "* FROM idem_toggle('u', 'post', '1', 'like', 100)", 't|100|f' ],
	[ 'is_active', "idem_is_active('u', 'post', '1', 'like')", 't' ]);

my $session = session($node);
my $observer = session($node);

# Warm-up: caches, hint bits, and whatever the first read of a page does.
foreach my $round (1 .. 2)
{
	$session->run("SELECT $_->[1]") foreach @calls;
	$observer->run($traces);
	$session->run($own_traces);
}

foreach my $isolation ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
{
	foreach my $call (@calls)
	{
		my ($title, $sql, $answer) = @$call;
		my $before = $observer->run($traces);

		# The portable edition locks the row of these answers for a moment.
		next if ($ENV{EDITION} || '') eq 'portable' && $isolation ne 'READ COMMITTED'
		  && $title =~ /^(in_progress|hash_conflict)/;

		is($session->run("BEGIN ISOLATION LEVEL $isolation; SELECT $sql"),
			$answer, "$isolation, $title: answer");
		is($session->run($own_traces), 't|0|0', "$isolation, $title: no transaction id, no row lock");
		is($observer->run($traces), $before, "$isolation, $title: no WAL, no change");
		$session->run('COMMIT');
	}
}

# The same through a whole session's load: not one transaction id, not a byte.
my $before = $observer->run($traces);
my $count = finish_pgbench(start_pgbench($node, 'postgres',
		{
			'unchanged' => join('', map { s/\s*\n\s*/ /gr } map { "SELECT $_->[1];\n" }
				grep { $_->[0] !~ /after a wait/ } @calls)
		},
		'-c', '4', '-t', '25', '-M', 'prepared'));
is($count, '100', 'load: no error');
is($observer->run($traces), $before, 'load: no transaction id, no WAL, no change');

# Proof that these traces tell: each of the writing calls leaves them all.
foreach my $call (
	[ 'new', "outcome FROM idem_claim('shop', 'never-claimed-000001')", 'new' ],
	[ 'heartbeat',
		"idem_heartbeat('shop', key, claim_token => claim_token) > now()
		 FROM idem_keys WHERE key = 'live-000000000000001'", 't' ],
	[ 'advance', "* FROM idem_try_advance('u', 'post', '1', 101)", 't|101' ])
{
	my ($title, $sql, $answer) = @$call;

	$before = $observer->run($traces);
	is($session->run("BEGIN; SELECT $sql"), $answer, "$title: answer");
	is($session->run($own_traces), 'f|1|0', "$title: a transaction id");
	$session->run('COMMIT');

	my @was = split /\||\n/, $before;
	my @is = split /\||\n/, $observer->run($traces);

	cmp_ok($is[0], '>', $was[0], "$title: which others notice");
	isnt($is[1], $was[1], "$title: WAL");
	isnt("@is[2 .. $#is]", "@was[2 .. $#was]", "$title: a new row version");
}

$_->quit foreach ($writer, $session, $observer);
$node->stop;
done_testing();
