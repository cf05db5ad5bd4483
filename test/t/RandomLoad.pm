# Random calls of every primitive, for pgbench: in one statement, in
# transactions, savepoints and prepared transactions that commit or roll back,
# beside cleanups, vacuums and checkpoints.  Few keys, so that the same rows and
# pages change again and again.

package RandomLoad;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';

our @EXPORT = qw($random_calls %random_load);

# SQL that makes random_call(SEED), a call of one primitive.  Being refused is a
# proper answer to it.
our $random_calls = <<'SQL';
CREATE FUNCTION random_text() RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(md5(random()::text), '') FROM generate_series(1, (power(random(), 6) * 200)::int)
$$;
CREATE FUNCTION handler(request jsonb) RETURNS idem_response LANGUAGE sql
AS $$ SELECT 200, '{"a":  1}'::json, random_text() $$;
CREATE TABLE calls (name text, ok boolean);

CREATE FUNCTION random_call(seed double precision) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	names text[] := '{claim,claim,claim,claim_complete,claim_complete,complete,complete_bytes,
		checkpoint,heartbeat,fail,release,forget,erase,run,advance,set,toggle,append,append_any,
		once,once_many,publish,publish,publish_many,take,ack,nack,requeue,
		extend,give_back}';
	name text;
	k text;
	held bigint;
	n int;
	message bigint;
	taken int;
	ttls interval[] := '{0,20 milliseconds,1 minute}';
	ttl interval;
	lease interval;
BEGIN
	PERFORM setseed(seed);
	name := names[1 + floor(random() * array_length(names, 1))];
	n := power(random(), 2) * 300;
	k := 'load-key-' || lpad(n::text, 10, '0');
	ttl := ttls[1 + floor(random() * 3)];
	lease := ttls[1 + floor(random() * 3)];
	CASE
		WHEN name IN ('complete', 'complete_bytes', 'checkpoint', 'heartbeat', 'fail', 'release') THEN
			SELECT claim_token INTO held FROM idem_keys WHERE state = 'started' OFFSET n / 20 LIMIT 1;
			SELECT key INTO k FROM idem_keys WHERE claim_token = held;
		WHEN name IN ('ack', 'nack', 'extend', 'give_back') THEN
			SELECT id, attempt INTO message, taken FROM idem_outbox WHERE state = 'pending' AND attempt > 0 OFFSET n / 20 LIMIT 1;
		ELSE NULL;
	END CASE;
	BEGIN
		CASE name
			WHEN 'claim' THEN
				PERFORM idem_claim('load', k, '\x01', ttl, lease, '10 milliseconds');
			WHEN 'claim_complete' THEN
				PERFORM CASE WHEN outcome = 'new' THEN
					idem_complete('load', k, 200, random_text(), '{"a":  1}') END
				FROM idem_claim('load', k, '\x01', ttl, lease);
			WHEN 'complete' THEN
				PERFORM idem_complete('load', k, 200, random_text(), claim_token => held);
			WHEN 'complete_bytes' THEN
				PERFORM idem_complete('load', k, 200, random_text()::bytea, claim_token => held);
			WHEN 'checkpoint' THEN
				PERFORM idem_checkpoint('load', k, 'point', to_json(random_text()), lease, held);
			WHEN 'heartbeat' THEN
				PERFORM idem_heartbeat('load', k, lease, held);
			WHEN 'fail' THEN
				PERFORM idem_fail('load', k, random_text(), held);
			WHEN 'release' THEN
				PERFORM idem_release('load', k, held);
			WHEN 'forget' THEN
				PERFORM idem_forget('load', k);
			WHEN 'erase' THEN
				PERFORM idem_erase('load', k);
			WHEN 'run' THEN
				PERFORM idem_run('load', 'run-' || k, 'handler(jsonb)', '{}', ttl, '10 milliseconds');
			WHEN 'advance' THEN
				PERFORM idem_try_advance('u', 'post', n::text, (random() * 1000000)::bigint);
			WHEN 'set' THEN
				PERFORM idem_set('u', 'post', n::text, 'like', random() < 0.6,
					(random() * 1000000)::bigint, '{dislike}');
			WHEN 'toggle' THEN
				PERFORM idem_toggle('u', 'post', n::text, 'dislike', (random() * 1000000)::bigint);
			WHEN 'append' THEN
				PERFORM idem_try_append('cart ' || n / 10, 'phone ' || n % 10,
					idem_last_client_seq('cart ' || n / 10, 'phone ' || n % 10) + 1, 1 + n % 5);
			WHEN 'append_any' THEN
				PERFORM idem_try_append('cart ' || n / 10, 'phone ' || n % 10, 1 + (random() * 100)::bigint);
			WHEN 'once' THEN
				PERFORM idem_once('form', k, ttl);
			WHEN 'once_many' THEN
				PERFORM idem_once_many('inbox', ARRAY(SELECT 'message ' || i FROM generate_series(n, n + 20) AS i), ttl);
			WHEN 'publish' THEN
				PERFORM idem_publish('topic ' || n % 3, to_jsonb(random_text()), 'key ' || n, '{"a": 1}');
			WHEN 'publish_many' THEN
				PERFORM idem_publish_many(ARRAY['topic ' || n % 3],
					ARRAY(SELECT to_jsonb(random_text()) FROM generate_series(1, 1 + n / 10)),
					ARRAY(SELECT CASE WHEN i % 3 > 0 THEN 'key ' || i % 5 END FROM generate_series(1, 1 + n / 10) AS i));
			WHEN 'take' THEN
				PERFORM idem_outbox_take(1 + n / 20, lease);
			WHEN 'ack' THEN
				PERFORM idem_outbox_ack(ARRAY[message]);
			WHEN 'nack' THEN
				PERFORM idem_outbox_nack(message, random_text(), '0');
			WHEN 'requeue' THEN
				PERFORM idem_outbox_requeue();
			WHEN 'extend' THEN
				PERFORM idem_outbox_extend(ARRAY[message], lease, ARRAY[taken]);
			WHEN 'give_back' THEN
				PERFORM idem_outbox_release(ARRAY[message], ARRAY[taken]);
		END CASE;
		INSERT INTO calls VALUES (name, true);
	EXCEPTION
		-- Lost claims, no claim or message there was, deadlocks.
		WHEN SQLSTATE 'ID001' OR SQLSTATE 'ID003' OR SQLSTATE 'ID004'
			OR null_value_not_allowed OR deadlock_detected THEN
			INSERT INTO calls VALUES (name, false);
	END;
END
$$;
SQL

my $call = "\\set seed random(1, 1000000000)\nSELECT random_call(:seed / 1000000000.0);\n";

# Scripts by their weights, for start_pgbench().  Needs max_prepared_transactions
# of as many as there are clients.
our %random_load = (
	'alone@120' => $call,
	'together@40' => "BEGIN;\n$call$call${call}COMMIT;\n",
	'aborted@20' => "BEGIN;\n$call${call}ROLLBACK;\n",
	'subaborted@20' => "BEGIN;\n${call}SAVEPOINT s;\n$call${call}ROLLBACK TO s;\n${call}COMMIT;\n",
	'prepared@10' => "BEGIN;\n$call${call}PREPARE TRANSACTION ':client_id';\nCOMMIT PREPARED ':client_id';\n",
	'withdrawn@10' => "BEGIN;\n$call${call}PREPARE TRANSACTION ':client_id';\nROLLBACK PREPARED ':client_id';\n",
	'cleanup@4' => "SELECT idem_cleanup(50);\n",
	'vacuum@2' => "VACUUM idem_keys, idem_tokens, idem_outbox, idem_action_versions, idem_user_actions,"
	  . " idem_client_sequences, idem_aggregates;\n",
	'freeze@1' => "VACUUM (FREEZE) idem_keys, idem_tokens, idem_outbox;\n",
	'checkpoint@1' => "CHECKPOINT;\n");

1;
