# Clients that claim, work and complete while their server crashes or changes,
# and checks of the state afterwards: a business row exists if and only if its
# key is completed, and every result that a client received is true.
#
# Keys are named random-...  Lists of what is wrong are empty when all is well.

package Clients;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IPC::Run;
use List::Util qw(shuffle);
use PostgreSQL::Test::Utils;

our @EXPORT = qw($client_schema start_clients until_busy finish_clients end_prepared
  broken_promises retry_all);

our $client_schema = <<'SQL';
CREATE EXTENSION idempotency;
CREATE TABLE orders (key text PRIMARY KEY, made_by text NOT NULL);

-- Business rows without their completed record, and the other way round.
CREATE VIEW torn AS
SELECT o.key AS order_key, o.made_by, k.key, k.state, k.response_body
FROM orders AS o
FULL JOIN (SELECT * FROM idem_keys WHERE state = 'completed') AS k USING (key)
WHERE o.key IS NULL OR k.key IS NULL OR k.response_body <> o.made_by;

-- What a client does that never heard of the crash.
CREATE FUNCTION retry(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c record;
BEGIN
	SELECT * INTO c FROM idem_claim('shop', k);
	IF c.outcome = 'new' THEN
		INSERT INTO orders VALUES (k, 'retry');
		PERFORM idem_complete('shop', k, 201, 'retry');
		RETURN 'new ' || c.attempt;
	END IF;
	RETURN c.outcome || coalesce(' ' || c.response_body, '');
END
$$;
SQL

# A session's work on one key, as psql input.  It prints what the client now
# knows for good: "done KEY", "seen KEY response", "held KEY token".
sub work_on
{
	my ($key, $who) = @_;

	# A psql that has lost its connection continues with the next query. Its
	# output until then must not count as the result for the previous key.
	# Nothing else makes a claim fail.
	my $answer = "\\set mine f\n\\set seen f\n";
	my $failed = "\\if :ERROR\n\\echo failed $key :SQLSTATE\n\\endif\n";
	my $claim = "SELECT outcome = 'new' AS mine, outcome = 'replay' AS seen, coalesce(claim_token, 0) AS token,
		coalesce(response_body, '') AS body FROM idem_claim('shop', '$key'";
	my $insert = "INSERT INTO orders VALUES ('$key', '$who');";
	my $seen = "\\if :seen\n\\echo seen $key :body\n\\endif\n";
	my $done = "\\if :ERROR\n\\set finished f\n\\endif\n\\if :finished\n\\echo done $key $who\n\\endif\n";
	my $kind = rand();

	if ($kind < 0.6)
	{
		my $wait = rand() < 0.5 ? ", wait => '0.2 seconds'" : '';
		my $commit = rand() < 0.02 ? "PREPARE TRANSACTION '$key'" : 'COMMIT';

		return "BEGIN;\n$answer$claim$wait) \\gset\n$failed\\set finished f\n\\if :mine\n$insert\n"
		  . "SELECT idem_complete('shop', '$key', 201, '$who') AS finished \\gset\n"
		  . "$commit;\n"
		  . ($commit eq 'COMMIT' ? $done : '')
		  . "\\else\nROLLBACK;\n\\endif\n$seen";
	}

	# The lease may run out at any time, so it is by completing first that the
	# work is fenced: nobody else can have the claim from then on.
	my $end =
	    $kind < 0.65 ? "SELECT idem_fail('shop', '$key', 'no', :token);\n"
	  : $kind < 0.70 ? "SELECT idem_release('shop', '$key', :token);\n"
	  : $kind < 0.75 ? ''
	  : "BEGIN;\n\\set finished f\n"
	  . ($kind < 0.80 ? "SELECT pg_sleep(0.06);\n" : '')
	  . "SELECT idem_complete('shop', '$key', 201, '$who', claim_token => :token) AS finished \\gset\n"
	  . "\\if :finished\n$insert\n\\if :ERROR\n\\set finished f\n\\endif\n\\endif\nCOMMIT;\n$done";

	return "$answer$claim, lease => '0.05 seconds') \\gset\n$failed\\if :mine\n\\echo held $key :token\n$end\\endif\n$seen";
}

# start_clients(NODE, NAME, COUNT, KEY ...): clients NAME1, NAME2 ..., each of
# whom works through all the keys, a little out of step.
sub start_clients
{
	my ($node, $name, $count, @all_keys) = @_;
	my @clients;

	foreach my $who (map { "$name$_" } 1 .. $count)
	{
		my $file = $node->basedir . "/$who.sql";
		my %client = (stdout => '', stderr => '');
		my @keys = @all_keys;
		my @near;

		while (my @some = splice(@keys, 0, 5))
		{
			push @near, shuffle(@some);
		}
		open my $handle, '>', $file or die "$file: $!";

		# A holder waits for a prepared transaction that has taken its claim over.
		print $handle "SET lock_timeout = '1s';\n";
		print $handle work_on($_, $who) foreach @near;
		close $handle or die "$file: $!";
		$client{run} = IPC::Run::start(
			[
				$node->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=sqlstate',
				'-d', $node->connstr('postgres'), '-f', $file
			],
			'<', \'', '>', \$client{stdout}, '2>', \$client{stderr},
			IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
		push @clients, \%client;
	}
	return @clients;
}

# until_busy(NODE, COUNT, ROUND): wait until COUNT keys of a round exist.
sub until_busy
{
	my ($node, $count, $round) = @_;

	$node->poll_query_until('postgres',
		sprintf("SELECT count(*) >= %d FROM idem_keys WHERE key LIKE 'random-round-%03d-%%'", $count, $round))
	  or die 'the clients do nothing';
	return;
}

# finish_clients(TOLD, MET, CLIENT ...): wait for their ends. Adds to TOLD{KEY}
# the responses that they received, and to MET the number of these, and the
# highest token they held.
sub finish_clients
{
	my ($told, $met, @clients) = @_;
	my @wrong;

	foreach my $client (@clients)
	{
		eval { $client->{run}->finish; 1 } or push @wrong, "a client hangs: $@";
		foreach my $line (split /\n/, $client->{stdout})
		{
			push @wrong, "claim $line" if $line =~ /^failed \S+ \S/;
			next unless $line =~ /^(done|seen|held) (\S+) (\S+)$/;
			if ($1 eq 'held')
			{
				$met->{token} = $3 if $3 > ($met->{token} || 0);
				next;
			}
			$met->{$1}++;
			push @wrong, "$2: told $told->{$2}, then $3" if ($told->{$2} || $3) ne $3;
			$told->{$2} = $3;
		}

		# A claim may be lost to another, or in doubt; a duplicate row may not
		# happen.
		foreach my $line (split /\n/, $client->{stderr})
		{
			push @wrong, $line
			  if $line =~ /(?:ERROR|FATAL|PANIC):\s+(\w{5})\b/
			  && $1 !~ /^(ID003|ID004|55P03|57P0[0-9])$/;
		}
	}
	return @wrong;
}

# Prepared transactions are still there; some commit, some do not.
sub end_prepared
{
	my ($node, $met) = @_;
	my @wrong;

	foreach my $gid (split /\n/,
		$node->safe_psql('postgres', 'SELECT gid FROM pg_prepared_xacts'))
	{
		my $end = rand() < 0.5 ? 'COMMIT' : 'ROLLBACK';

		$met->{prepared}++;
		push @wrong, "$gid: not held by its prepared transaction"
		  if $node->safe_psql('postgres', "SELECT outcome FROM idem_claim('shop', '$gid')") ne
		  'in_progress';
		$node->safe_psql('postgres', "$end PREPARED '$gid'");
	}
	return @wrong;
}

# Torn records, and results that clients received and that are no longer true.
# With LOST, records that may be gone completely are counted there, and taken
# from TOLD.
sub broken_promises
{
	my ($node, $told, $lost) = @_;
	my @wrong = map { "torn: $_" } split /\n/,
	  $node->safe_psql('postgres', 'SELECT * FROM torn');
	my %completed = map { split /\|/ } split /\n/,
	  $node->safe_psql('postgres',
		"SELECT key, response_body FROM idem_keys WHERE state = 'completed'");

	if ($lost)
	{
		my @gone = grep { !$completed{$_} } keys %$told;

		$$lost += @gone;
		delete @$told{@gone};
	}
	return @wrong, map { "$_: told $told->{$_}, now " . ($completed{$_} || 'gone') }
	  grep { ($completed{$_} || '') ne $told->{$_} } sort keys %$told;
}

# Each client tries again, and gets the response, or may run the request.
sub retry_all
{
	my ($node) = @_;

	return (
		map { "retry: $_" } split /\n/,
		$node->safe_psql('postgres',
			"SELECT key, state, outcome
			 FROM (SELECT key, state FROM idem_keys WHERE key LIKE 'random-%' OFFSET 0) AS k,
				LATERAL retry(key) AS outcome
			 WHERE outcome !~ CASE WHEN state = 'completed' THEN '^replay ' ELSE '^new [0-9]+\$' END")),
	  map { "torn after the retry: $_" } split /\n/,
	  $node->safe_psql('postgres', 'SELECT * FROM torn');
}

1;
