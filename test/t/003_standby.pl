# On a hot standby, functions that only read work, and all others raise 25006.
# After promotion, everything continues from the same state.

use IdempotencyTest;

my $primary = new_node('primary', allows_streaming => 1);
my $standby = new_standby($primary);

$primary->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE FUNCTION handler(request jsonb) RETURNS idem_response
	LANGUAGE sql AS $$ SELECT 200, NULL::json, 'handled' $$;
SQL

my $fill = <<'SQL';
SELECT outcome, idem_complete('shop', k, 201, 'made', '{"X-Id": 7}', claim_token)
FROM (VALUES ('completed-0000000001')) AS v (k), idem_claim('shop', k, '\xcd');
SELECT outcome, idem_checkpoint('shop', k, 'half', '{"n": 1}', claim_token => claim_token) IS NOT NULL,
	idem_fail('shop', k, 'declined', claim_token)
FROM (VALUES ('failed-0000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete('shop', k, 200, 'secret', claim_token => claim_token), idem_erase('shop', k)
FROM (VALUES ('erased-0000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome FROM idem_claim('shop', 'expired-000000000001', ttl => '0');
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', lease => '1 hour');
SELECT outcome FROM idem_claim('shop', 'abandoned-0000000001', lease => '0');
SELECT * FROM idem_set('u', 'post', '1', 'like', true, 5);
SELECT * FROM idem_set('u', 'post', '2', 'like', true, 5);
SELECT * FROM idem_set('u', 'post', '2', 'like', false, 6);
SELECT idem_once('inbox', 'message');
BEGIN;
SELECT outcome, idem_complete('shop', k, 200, 'from a prepared transaction')
FROM (VALUES ('prepared-00000000001')) AS v (k), idem_claim('shop', k);
PREPARE TRANSACTION 'holds a claim';
SQL
$primary->safe_psql('postgres', $fill);
$primary->wait_for_catchup($standby);

my $readers = <<'SQL';
SELECT k, l.* FROM (VALUES ('completed-0000000001'), ('failed-0000000000001'),
	('erased-0000000000001'), ('expired-000000000001'), ('live-000000000000001'),
	('prepared-00000000001'), ('never-claimed-000001')) AS v (k), idem_lookup('shop', k) AS l;
SELECT idem_is_active('u', 'post', '1', 'like'), idem_is_active('u', 'post', '2', 'like'),
	idem_is_active('u', 'post', '3', 'like');
SELECT idem_request_hash('POST', '/orders', '{"b": 1.0, "a": null}'),
	idem_request_hash('POST', '/orders', '{"b": 1.0, "a": null}'::jsonb),
	idem_request_hash('POST', '/orders', '\x00'::bytea), idem_canonical_json('{"b": 1.0, "a": null}');
SELECT idem_once_at('inbox', 'message'), idem_once_at('inbox', 'unknown');
SELECT idem_key_is_valid('short'), idem_key_is_valid('long-enough-to-be-valid');
SQL
my $answers = $primary->safe_psql('postgres', $readers);
is($standby->safe_psql('postgres', $readers), $answers, 'readers answer as on the primary');
is($standby->safe_psql('postgres', "BEGIN ISOLATION LEVEL REPEATABLE READ; $readers"),
	$answers, 'under REPEATABLE READ, too');
is( $standby->safe_psql('postgres',
		"SELECT k, state FROM (VALUES ('completed-0000000001'), ('failed-0000000000001'),
			('erased-0000000000001'), ('expired-000000000001'), ('live-000000000000001'),
			('prepared-00000000001')) AS v (k), idem_lookup('shop', k);
		 SELECT idem_is_active('u', 'post', '1', 'like'), idem_is_active('u', 'post', '2', 'like')"),
	"completed-0000000001|completed\nfailed-0000000000001|failed\n"
	  . "erased-0000000000001|erased\nexpired-000000000001|\nlive-000000000000001|started\n"
	  . "prepared-00000000001|\nt|f",
	'and rightly');

# Also if there is nothing to do.
foreach my $call (
	"idem_claim('shop', 'never-claimed-000001')",
	"idem_claim('shop', 'completed-0000000001')",
	"idem_claim('shop', 'live-000000000000001', wait => '1 second')",
	"idem_complete('shop', 'live-000000000000001', 200, 'x', claim_token => 1)",
	"idem_complete('shop', 'live-000000000000001', 200, '\\x00'::bytea, claim_token => 1)",
	"idem_checkpoint('shop', 'live-000000000000001', 'p', claim_token => 1)",
	"idem_heartbeat('shop', 'live-000000000000001', claim_token => 1)",
	"idem_fail('shop', 'live-000000000000001', claim_token => 1)",
	"idem_release('shop', 'live-000000000000001', claim_token => 1)",
	"idem_forget('shop', 'never-claimed-000001')",
	"idem_erase('shop', 'never-claimed-000001')",
	"idem_run('shop', 'never-claimed-000001', 'handler(jsonb)', '{}')",
	"idem_run('shop', 'completed-0000000001', 'handler(jsonb)', '{}')",
	"idem_try_advance('u', 'post', '1', 4)",
	"idem_try_advance('u', 'post', '1', 9)",
	"idem_toggle('u', 'post', '1', 'like', 4)",
	"idem_set('u', 'post', '1', 'like', true, 4)",
	"idem_set('u', 'post', '1', 'like', false, 9)",
	"idem_forget_user('u')",
	"idem_raise_claim_tokens(0)",
	"idem_claim_many('shop', '{completed-0000000001}')",
	"idem_complete_many('shop', '{live-000000000000001}', '{200}', claim_tokens => '{1}')",
	"idem_try_advance_many('{u}', '{post}', '{1}', '{4}')",
	"idem_set_many('{u}', '{post}', '{1}', '{like}', '{t}', '{4}')",
	"idem_resume()",
	"idem_cleanup()",
	"idem_take_expired('keys')",
	"idem_grant('pg_monitor')",
	"idem_grant_monitor('pg_monitor')",
	"idem_revoke('pg_monitor')")
{
	is(sqlstate_of($standby, "SELECT * FROM $call"), '25006', "25006: $call");
}
foreach my $call ('idem_metric_samples()', 'idem_metrics()', 'idem_health()', 'idem_abandoned()',
	'idem_stats_reset()')
{
	is(sqlstate_of($standby, "SELECT count(*) FROM $call"), '00000', "works there: $call");
}

# A reader sees what has been replayed, statement by statement.
my $reader = session($standby);
my $state = "SELECT state, response_body FROM idem_lookup('shop', 'live-000000000000001')";
my $live_token = $primary->safe_psql('postgres',
	"SELECT claim_token FROM idem_keys WHERE key = 'live-000000000000001'");

is($reader->run($state), 'started|', 'a session on the standby');
$primary->safe_psql('postgres',
	"SELECT idem_try_advance('u', 'post', '1', 10);
	 SELECT idem_set('u', 'post', '2', 'like', true, 11);
	 SELECT idem_erase('shop', 'completed-0000000001');
	 SELECT idem_forget('shop', 'expired-000000000001')");
$primary->wait_for_catchup($standby);
is( $reader->run(
		"SELECT state, response_status FROM idem_lookup('shop', 'completed-0000000001');
		 SELECT idem_is_active('u', 'post', '2', 'like');
		 SELECT * FROM idem_action_states('u', 'post', '{2,9}')"),
	"erased|201\nt\n2|like|t|11", 'follows the primary');

# Changes of the tables arrive as well, and void what the session has cached.
$primary->safe_psql('postgres',
	'ALTER TABLE idem_user_actions RENAME CONSTRAINT idem_user_actions_pkey TO renamed;
	 REINDEX TABLE idem_user_actions; VACUUM FULL idem_user_actions');
$primary->wait_for_catchup($standby);
is($reader->run("SELECT idem_is_active('u', 'post', '2', 'like')"), 't',
	'through a rebuild of the table');

# The highest token so far belongs to no record any more.
my $max_token = $primary->safe_psql('postgres',
	"SELECT claim_token FROM idem_claim('shop', 'released-00000000001')");
$primary->safe_psql('postgres',
	"SELECT idem_release('shop', 'released-00000000001', $max_token)");

#
# Promotion
#

$primary->wait_for_catchup($standby);
$primary->stop('immediate');
$standby->promote;

is( $reader->run("SELECT outcome FROM idem_claim('shop', 'live-000000000000001')"),
	'in_progress', 'promoted: a live claim is still protected');
is( $reader->run("SELECT idem_heartbeat('shop', 'live-000000000000001', claim_token => $live_token) > now()"),
	't', 'promoted: its holder goes on');
is( $reader->run(
		"SELECT idem_complete('shop', 'live-000000000000001', 200, 'carried over', claim_token => $live_token);
		 SELECT outcome, response_body FROM idem_claim('shop', 'live-000000000000001')"),
	"t\nreplay|carried over", 'promoted: and completes');
is( $reader->run("SELECT outcome, claim_token > $max_token FROM idem_claim('shop', 'never-claimed-000001')"),
	'new|t', 'promoted: claim tokens keep increasing');
is( $reader->run("SELECT outcome, attempt, claim_token > $max_token FROM idem_claim('shop', 'abandoned-0000000001')"),
	'new|2|t', 'promoted: an abandoned claim is taken over');
is( $reader->run("SELECT outcome, attempt, recovery_point FROM idem_claim('shop', 'failed-0000000000001')"),
	'new|2|half', 'promoted: a failed one is resumed');
is( $reader->run("SELECT outcome, response_status FROM idem_claim('shop', 'completed-0000000001', '\\xcd')"),
	'erased|201', 'promoted: an erased one is remembered');
is( $reader->run("SELECT outcome FROM idem_claim('shop', 'prepared-00000000001')"),
	'in_progress', 'promoted: a prepared transaction holds its claim');
$standby->safe_psql('postgres', "COMMIT PREPARED 'holds a claim'");
is( $reader->run("SELECT outcome, response_body FROM idem_claim('shop', 'prepared-00000000001')"),
	'replay|from a prepared transaction', 'promoted: and can be committed');
is( $reader->run(
		"SELECT * FROM idem_try_advance('u', 'post', '1', 10);
		 SELECT * FROM idem_try_advance('u', 'post', '1', 12);
		 SELECT * FROM idem_toggle('u', 'post', '2', 'like', 12)"),
	"f|10\nt|12\nf|12|t", 'promoted: counters never fall');

$reader->quit;
$standby->stop;
done_testing();
