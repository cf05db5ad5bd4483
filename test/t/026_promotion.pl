# A standby is promoted while clients work on its primary, and the clients move
# there. With synchronous replication, no result that a client received is
# lost. With asynchronous replication, a record is lost together with its row
# and its message, so the retry does the work again. In both cases, no row
# exists twice, and nothing blocks.
#
#	ROUNDS=n				how often, instead of 2; every other round synchronously
#	IDEMPOTENCY_TEST_SEED=n	to make the same choices again

use Time::HiRes qw(sleep);
use IdempotencyTest;
use Clients;

my $rounds = $ENV{ROUNDS} || 2;
my $seed = $ENV{IDEMPOTENCY_TEST_SEED} || int(rand(1_000_000));
my $replay = "IDEMPOTENCY_TEST_SEED=$seed ROUNDS=$rounds";

srand($seed);
note("$replay repeats the choices");

my $primary = new_node('server_0', allows_streaming => 1,
	conf => "max_prepared_transactions = 700\nsynchronous_commit = on");

$primary->safe_psql('postgres', $client_schema);

# Each order sends a message, in the same transaction.
$primary->safe_psql('postgres', <<'SQL');
CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_publish('orders', to_jsonb(NEW.key));
	RETURN NULL;
END
$$;
CREATE TRIGGER announce AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION announce();
CREATE VIEW messages_apart AS
SELECT key, payload FROM orders FULL JOIN idem_outbox ON payload #>> '{}' = key
WHERE key IS NULL OR payload IS NULL;
SQL

# A standby of the primary, for which commits wait, or do not.
sub add_standby
{
	my ($name, $synchronous) = @_;
	my $standby = new_standby($primary, name => $name, conf => "synchronous_standby_names = ''");

	if ($synchronous)
	{
		$primary->append_conf('postgresql.conf', "synchronous_standby_names = '*'");
		$primary->reload;
	}
	$primary->poll_query_until('postgres',
		'SELECT sync_state FROM pg_stat_replication', $synchronous ? 'sync' : 'async')
	  or die 'no standby';
	return $standby;
}

my (%told, @wrong);
my %met = (done => 0, seen => 0, prepared => 0, token => 0, open => 0);
my $lost = 0;

foreach my $round (1 .. $rounds)
{
	my $synchronous = $round % 2;
	my $standby = add_standby("server_$round", $synchronous);
	my @keys = map { sprintf('random-round-%03d-%04d', $round, $_) } 1 .. 600;
	my @clients = start_clients($primary, "r${round}_before_", 8, @keys);
	my $how;

	until_busy($primary, 150, $round);
	sleep(rand(0.3));
	if (!$synchronous)
	{
		# Results from now on are lost, at least one of them.
		my @late = map { sprintf('random-round-%03d-%04d', $round, $_) } 601 .. 630;

		$how = 'asynchronous standby';
		$standby->stop;
		push @wrong, finish_clients(\%told, \%met, start_clients($primary, "r${round}_late_", 1, @late));
		push @keys, @late;
		$primary->stop('immediate');
		$standby->start;
		$standby->promote;
	}
	elsif (rand() < 0.5)
	{
		$how = 'primary stopped first';
		$primary->stop('immediate');
		$standby->promote;
	}
	else
	{
		# Clients go on at a primary that nobody listens to.
		$how = 'standby promoted first';
		$standby->promote;
		sleep(rand(0.3));
		$primary->stop('immediate');
	}

	push @wrong, finish_clients(\%told, \%met, @clients);
	push @wrong, end_prepared($standby, \%met);
	push @wrong, broken_promises($standby, \%told, $synchronous ? undef : \$lost);

	# As the operations guide says, where commits may have been lost.
	$standby->safe_psql('postgres', operations_sql('Failover', 1)) unless $synchronous;
	my $token = $standby->safe_psql('postgres',
		"SELECT claim_token FROM idem_claim('shop', 'token-after-round-$round')");
	push @wrong, "token $token is not above $met{token}, which a client held" if $token <= $met{token};

	# The clients move to the new primary, and send everything again.
	my $open = $standby->safe_psql('postgres',
		"SELECT count(*) FROM idem_keys WHERE state = 'started' AND key LIKE 'random-%'");
	$met{open} += $open;
	push @wrong, finish_clients(\%told, \%met,
		start_clients($standby, "r${round}_after_", 8, @keys));
	push @wrong, end_prepared($standby, \%met);
	push @wrong, broken_promises($standby, \%told);
	sleep(0.06);
	push @wrong, retry_all($standby);
	push @wrong, map { "message and order apart: $_" } split /\n/,
	  $standby->safe_psql('postgres', 'SELECT * FROM messages_apart');
	push @wrong, "only $_ orders" foreach grep { $_ < 500 * $round }
	  $standby->safe_psql('postgres', 'SELECT count(*) FROM orders');

	note("round $round, $how: " . keys(%told) . " keys told of, $lost lost so far, $open open claims");
	push @wrong, "round $round, $how" if @wrong;

	$primary->clean_node;
	$primary = $standby;
	last if @wrong;
}
is(join("\n", @wrong), '', "promotion: nothing lost, nothing twice, nothing stuck ($replay)");
note("clients were told $met{done} times done, $met{seen} times the response");
foreach my $what (sort keys %met)
{
	cmp_ok($met{$what}, '>', 0, "promotion: some $what");
}
cmp_ok($lost, '>', 0, 'promotion: what an asynchronous standby had not received was lost, whole')
  if $rounds > 1;

$primary->stop;
done_testing();
