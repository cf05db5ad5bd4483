# One record of each kind, and the results of calls for them: for the tests
# that move a database elsewhere (dump and restore, replication, pg_upgrade).
#
# Both $keys_and_actions and $streams (client sequences, once-only tokens,
# outbox) refer to
#
#	fill		SQL that makes the records, with values that text formats could
#				spoil.  What was given out last from a sequence belongs to no
#				record.  Needs a role app, for idem_grant.
#	answers		SQL that prints all the rows, and everything that a caller can
#				be told without changing anything, to be compared before and
#				after.  What would change something is rolled back; the token
#				of a new claim is left out, being a different one each time.
#	brief, expected		a shorter question, and its answer: what comes back must
#						be right, not only the same.

package Records;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';

our @EXPORT = qw($keys_and_actions $streams);
our ($keys_and_actions, $streams) = ({}, {});

$keys_and_actions->{fill} = <<'SQL';
SELECT idem_grant('app');
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', '\xab', ttl => '1 day', lease => '1 hour');
SELECT idem_checkpoint('shop', 'live-000000000000001', 'paid', '{"b":1,  "a":[1.0, "\\u00e9"]}',
	lease => '1 hour', claim_token => claim_token) IS NOT NULL
FROM idem_keys WHERE key = 'live-000000000000001';
SELECT outcome, idem_complete('shop', k, 201, E'tab\t backslash \\ quote '' \n\\.\n',
	'{"Content-Type": "text/plain",  "x": "\\u00e9"}', claim_token)
FROM (VALUES ('text-000000000000001')) AS v (k), idem_claim('shop', k, '\xcd');
SELECT outcome, idem_complete('shop', k, 200, decode('00ff5c27', 'hex'), claim_token => claim_token)
FROM (VALUES ('bytes-00000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete('shop', k, 200, repeat('long ', 50000), claim_token => claim_token)
FROM (VALUES ('long-000000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete(s, k, 204, claim_token => claim_token)
FROM (VALUES (E'tab\t and \\back "quoted"', 'empty-00000000000001')) AS v (s, k), idem_claim(s, k);
SELECT outcome, idem_checkpoint('shop', k, 'half', '{"n": 1}', claim_token => claim_token) IS NOT NULL,
	idem_fail('shop', k, 'card declined', claim_token)
FROM (VALUES ('failed-0000000000001')) AS v (k), idem_claim('shop', k, '\xef');
SELECT outcome, idem_complete('shop', k, 200, 'personal data', claim_token => claim_token), idem_erase('shop', k)
FROM (VALUES ('erased-0000000000001')) AS v (k), idem_claim('shop', k);
SELECT outcome, idem_complete('shop', k, 200, 'gone', claim_token => claim_token)
FROM (VALUES ('expired-000000000001')) AS v (k), idem_claim('shop', k, ttl => '0.2 seconds');
SELECT outcome FROM idem_claim('shop', 'abandoned-0000000001', '\xaa', lease => '0');
SELECT * FROM idem_try_advance('u', 'post', '1', 100);
SELECT * FROM idem_set('u', 'post', '2', 'like', true, 7, '{dislike}');
SELECT * FROM idem_set('u', 'post', '3', 'like', true, 8);
SELECT * FROM idem_set('u', 'post', '3', 'like', false, 9);
-- The highest token belongs to no record.
SELECT outcome, idem_release('shop', k, claim_token)
FROM (VALUES ('released-00000000001')) AS v (k), idem_claim('shop', k);
SELECT pg_sleep(0.25);
SQL

$keys_and_actions->{answers} = <<'SQL';
SET timezone = 'UTC';
SELECT * FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_lookup(scope, key) ORDER BY scope, key;
SELECT * FROM idem_keys ORDER BY scope, key;
SELECT * FROM idem_action_versions ORDER BY user_id, entity_type, entity_id;
SELECT * FROM idem_user_actions ORDER BY user_id, entity_type, entity_id, action_type;
SELECT user_id, entity_type, entity_id, action_type,
	idem_is_active(user_id, entity_type, entity_id, action_type)
FROM idem_user_actions ORDER BY 1, 2, 3, 4;
BEGIN;
SELECT k.scope, k.key, c.outcome, c.claim_token > 0, c.attempt, c.response_status,
	c.response_headers, c.response_body, c.response_bytes, c.recovery_point, c.recovery_state,
	CASE WHEN c.outcome <> 'new' THEN c.lease_expires_at END,
	CASE WHEN c.outcome <> 'new' THEN c.expires_at END
FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_claim(k.scope, k.key) AS c ORDER BY k.scope, k.key;
ROLLBACK;
SELECT outcome FROM idem_claim('shop', 'text-000000000000001', '\x01');
SELECT outcome FROM idem_claim('shop', 'live-000000000000001', '\x01');
SET idempotency.expired_key_policy = reject;
SELECT outcome FROM idem_claim('shop', 'expired-000000000001');
SELECT * FROM idem_try_advance('u', 'post', '1', 99);
SELECT * FROM idem_set('u', 'post', '2', 'like', false, 6);
SELECT * FROM idem_toggle('u', 'post', '2', 'dislike', 7);
SQL

$keys_and_actions->{brief} = <<'SQL';
BEGIN;
SAVEPOINT before;
SELECT k.key || ' ' || c.outcome || coalesce(' ' || c.attempt, '')
FROM (SELECT DISTINCT scope, key FROM idem_keys) AS k,
	idem_claim(k.scope, k.key) AS c ORDER BY 1;
ROLLBACK TO before;
SET LOCAL idempotency.expired_key_policy = reject;
SELECT 'tombstone: ' || outcome FROM idem_claim('shop', 'expired-000000000001');
ROLLBACK;
SQL

$keys_and_actions->{expected} = <<'TEXT';
abandoned-0000000001 new 2
bytes-00000000000001 replay
empty-00000000000001 replay
erased-0000000000001 erased
expired-000000000001 new 1
failed-0000000000001 new 2
live-000000000000001 in_progress
long-000000000000001 replay
text-000000000000001 replay
tombstone: expired
TEXT

# One message in each state, a key whose head is leased, a key that is due.
$streams->{fill} = <<'SQL';
SELECT * FROM idem_try_append('cart 1', 'phone', 1, 5);
SELECT * FROM idem_try_append('cart 1', 'laptop', 1);
SELECT * FROM idem_try_append(E'cart\t2 \\ "x"', 'phone', 7);
SELECT idem_once('form', 'used');
SELECT idem_once('form', 'expired', ttl => '0');
SELECT count(*) FROM idem_once_many('inbox', ARRAY['m1', 'm2', E'tab\t\\.']);

SET idempotency.outbox_max_attempts = 1;
SELECT idem_publish('dead', '"dead"') IS NOT NULL;
SELECT idem_outbox_nack(id, E'no\tsuch \\ host\n', attempt => attempt) FROM idem_outbox_take(1, '1 hour', '{dead}');
RESET idempotency.outbox_max_attempts;
SELECT idem_publish('acked', '"acked"') IS NOT NULL;
SELECT idem_outbox_ack(array_agg(id)) FROM idem_outbox_take(1, '1 hour', '{acked}');
SELECT idem_publish('leased', '"leased"') IS NOT NULL;
SELECT count(*) FROM idem_outbox_take(1, '1 hour', '{leased}');
SELECT idem_publish('abandoned', '"abandoned"', headers => '{"a": [1.50, "\u00e9"]}') IS NOT NULL;
SELECT count(*) FROM idem_outbox_take(1, '0', '{abandoned}');
SELECT idem_publish('pausing', '"pausing"') IS NOT NULL;
SELECT idem_outbox_nack(id, 'busy', '1 hour') FROM idem_outbox_take(1, '1 hour', '{pausing}');
SELECT idem_publish('delayed', '"delayed"', deliver_after => '1 hour') IS NOT NULL;
SELECT idem_publish('pending', '"pending"') IS NOT NULL;

SELECT idem_publish('held', to_jsonb(n), 'k') IS NOT NULL FROM generate_series(1, 4) AS n;
SELECT count(*) FROM idem_outbox_take(2, '1 hour', '{held}');
SELECT idem_publish('free', to_jsonb(n), E'key\t\\') IS NOT NULL FROM generate_series(1, 3) AS n;

BEGIN;
SELECT idem_publish('free', '"never"', E'key\t\\') IS NOT NULL;
SELECT idem_once('form', 'never');
ROLLBACK;
SQL

$streams->{answers} = <<'SQL';
SET timezone = 'UTC';
SELECT * FROM idem_outbox ORDER BY id;
SELECT * FROM idem_tokens ORDER BY scope, token;
SELECT * FROM idem_aggregates ORDER BY aggregate;
SELECT *, idem_last_client_seq(aggregate, client_id) FROM idem_client_sequences ORDER BY aggregate, client_id;
SELECT last_value, is_called FROM idem_outbox_ids;
BEGIN;
SELECT * FROM idem_outbox_take() ORDER BY id;
SELECT idem_outbox_requeue();
SELECT * FROM idem_outbox_take() ORDER BY id;
ROLLBACK;
SQL

$streams->{brief} = <<'SQL';
BEGIN;
SELECT topic, payload, headers, attempt FROM idem_outbox_take() ORDER BY id;
ROLLBACK;
SELECT state, count(*) FROM idem_outbox GROUP BY state ORDER BY state;
SQL

$streams->{expected} = <<'TEXT';
abandoned|"abandoned"|{"a": [1.50, "é"]}|2
pending|"pending"||1
free|1||1
free|2||1
free|3||1
acked|1
dead|1
pending|12
TEXT

chomp($_->{expected}) foreach $keys_and_actions, $streams;

1;
