# The editions under load: a database changes from one to the other and back
# while clients claim, complete and publish, and each effect happens once.  And a
# dump of the portable edition is restored into the C edition.

use IdempotencyTest;

my $node = new_node('editions');
my $portable = '1.0-portable';
my $keys = 400;
my $clients = 4;

$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE TABLE effects (key text);
	CREATE TABLE failures (state text, message text);

	-- Each key is asked for many times.  An error rolls back all of an attempt, as
	-- in a client that tries again.
	CREATE PROCEDURE work(client int, keys int, seconds int) LANGUAGE plpgsql AS $$
	DECLARE
		until CONSTANT timestamptz := clock_timestamp() + seconds * interval '1 s';
		key text;
		claim record;
	BEGIN
		WHILE clock_timestamp() < until LOOP
			key := 'editions-under-load-' || floor(random() * keys);
			BEGIN
				SELECT * INTO claim FROM idem_claim('load', key);
				IF claim.outcome = 'new' THEN
					INSERT INTO effects VALUES (key);
					PERFORM idem_publish('load', to_jsonb(key), key);
					PERFORM idem_complete('load', key, 200, 'done');
				END IF;
				PERFORM idem_once('load', key), idem_set('user', 'key', key, 'like', true, 1);
				PERFORM idem_outbox_ack(array_agg(t.id)) FROM idem_outbox_take(1) AS t HAVING count(*) > 0;
			EXCEPTION WHEN OTHERS THEN
				INSERT INTO failures VALUES (SQLSTATE, SQLERRM);
			END;
			COMMIT;
		END LOOP;
	END
	$$;
});

my $seconds = 8;
my @load = map {
	IPC::Run::start(
		[ 'psql', '-X', '-d', $node->connstr('postgres'), '-c', "CALL work($_, $keys, $seconds)" ],
		'>', \my $out, '2>', \my $errors)
} 1 .. $clients;
my $switches = 0;
my $until = time + $seconds - 2;
while (time < $until || $switches < 3)
{
	my $to = $switches % 2 ? '1.0' : $portable;
	$node->safe_psql('postgres', "ALTER EXTENSION idempotency UPDATE TO '$to'");
	$switches++;
	$node->safe_psql('postgres', 'SELECT pg_sleep(0.3)');
}
ok($_->finish, 'a client works through all switches') foreach @load;
cmp_ok($switches, '>', 2, "several switches: $switches");
is( $node->safe_psql('postgres',
		q{SELECT count(*) - count(DISTINCT e.key), count(*) = (SELECT count(*) FROM idem_keys WHERE state = 'completed'),
			count(*) = (SELECT count(*) FROM idem_outbox) FROM effects AS e}),
	'0|t|t', 'each key that was completed has one effect and one message');
# A call of the portable edition that has begun before a switch can miss its helpers.
is( $node->safe_psql('postgres',
		q{SELECT DISTINCT state, message FROM failures
			WHERE state NOT IN ('ID003', '40001', '40P01') AND message !~ 'idem_p_\w+.* does not exist'}),
	'', 'clients meet no error but those after which they try again');

#
# A dump of the portable edition, restored into the C edition
#
$node->safe_psql('postgres', "ALTER EXTENSION idempotency UPDATE TO '$portable'")
  unless $switches % 2;
my $dump = $node->basedir . '/portable.sql';
my $count = q{SELECT (SELECT count(*) FROM idem_keys), (SELECT count(*) FROM idem_outbox), (SELECT count(*) FROM idem_tokens)};
my $before = $node->safe_psql('postgres', $count);
$node->command_ok([ 'pg_dump', '-d', $node->connstr('postgres'), '-f', $dump ], 'it can be dumped');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'psql', '-X', '-q', '-d', $node->connstr('restored'), '-f', $dump ], 'and restored');
is($node->safe_psql('restored', $count), $before, 'with all its rows');
is($node->safe_psql('restored', q{SELECT detail FROM idem_health() WHERE check_name = 'edition'}), 'C', 'into the C edition');
is( $node->safe_psql('restored', q{SELECT outcome FROM idem_claim('load', (SELECT key FROM idem_keys LIMIT 1))}),
	'replay', 'which replays its responses');

done_testing();
