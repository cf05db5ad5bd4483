# Shared by the TAP tests: servers, sessions that can be left hanging, and
# background load.  Built on PostgreSQL::Test::Cluster of 15 to 19.

package IdempotencyTest;

use strict;
use warnings FATAL => 'all';

use Exporter;
use File::Basename qw(dirname);
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

our @EXPORT = qw(new_node new_standby start_with_clock set_clock configure eventually session wait_for_block asleep
  locks_of median_seconds sqlstate_of start_pgbench finish_pgbench injection_points until_stopped
  run_program operations_sql);

# A test that uses this module has strict, fatal warnings, and the functions of
# Test::More and PostgreSQL::Test, as well.
sub import
{
	my $caller = caller;

	strict->import;
	warnings->import(FATAL => 'all');
	eval "package $caller; use PostgreSQL::Test::Cluster; use PostgreSQL::Test::Utils; use Test::More; 1" or die $@;
	goto &Exporter::import;
}

# Of all servers that start_with_clock() starts.
my $clock_file;

# new_node(NAME, conf => TEXT, start => BOOLEAN, install_path => DIRECTORY,
# OPTIONS of init): a server, started unless that is false, of the installation
# that is tested unless there is a path to another.
#
# A fixed locale, so that nothing depends on the caller's.  No autovacuum:
# tests that need it say so.
sub new_node
{
	my ($name, %params) = @_;
	my $conf = delete $params{conf} || '';
	my $start = delete $params{start};
	my $install_path = delete $params{install_path};
	my $node = IdempotencyTest::Cluster->new($name,
		$install_path ? (install_path => $install_path) : ());
	my @extra = ('--locale=C', '--encoding=UTF8');

	# Since 18 checksums are the default, and they add WAL for hint bits.
	push @extra, '--no-data-checksums' if $node->pg_version >= 18;
	$node->init(extra => \@extra, %params);
	$node->append_conf('postgresql.conf', <<"CONF");
log_statement = none
autovacuum = off
max_connections = 100
$conf
CONF
	$node->start unless defined $start && !$start;
	return $node;
}

# new_standby(PRIMARY, name => NAME, conf => TEXT): a standby that streams from
# the primary, started.
sub new_standby
{
	my ($primary, %params) = @_;
	my $name = $params{name} || 'standby';
	my $standby = IdempotencyTest::Cluster->new($name);

	$primary->backup($name);
	$standby->init_from_backup($primary, $name, has_streaming => 1);
	$standby->append_conf('postgresql.conf', $params{conf} || '');
	$standby->start;
	return $standby;
}

# start_with_clock(NODE, SETTING): start a server whose clock set_clock() sets,
# as clock.c says.
sub start_with_clock
{
	my ($node, $setting) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir();

	set_clock($setting);
	system_or_bail('gcc', '-shared', '-fPIC', '-o', "$dir/clock.so", dirname(__FILE__) . '/clock.c', '-lm');

	local $ENV{LD_PRELOAD} = join(':', grep { defined } "$dir/clock.so", $ENV{LD_PRELOAD});
	local $ENV{CLOCK} = $clock_file;
	$node->start;
	return;
}

sub set_clock
{
	my ($setting) = @_;

	$clock_file ||= PostgreSQL::Test::Utils::tempdir() . '/clock';
	open my $file, -e $clock_file ? '+<' : '>', $clock_file or die "$clock_file: $!";
	printf $file '%-32s', $setting;
	close $file or die "$clock_file: $!";
	return;
}

# configure(NODE, NAME => VALUE, ...): set settings of the server, and wait
# until new sessions have them, and all others have been notified.
sub configure
{
	my ($node, %settings) = @_;
	my $loaded = $node->safe_psql('postgres', 'SELECT pg_conf_load_time()');

	$node->safe_psql('postgres', "ALTER SYSTEM SET $_ = '$settings{$_}'")
	  foreach sort keys %settings;
	$node->safe_psql('postgres', 'SELECT pg_reload_conf()');
	$node->poll_query_until('postgres', "SELECT pg_conf_load_time() > '$loaded'")
	  or die 'the settings do not arrive';
	return;
}

# eventually(NODE, DATABASE, QUERY, TITLE): a test that the query becomes true.
sub eventually
{
	my ($node, $database, $query, $title) = @_;

	return ok($node->poll_query_until($database, $query), $title);
}

# sqlstate_of(NODE, SQL, DATABASE): the SQLSTATE of the first error in the
# script, 00000 if there is none.
sub sqlstate_of
{
	my ($node, $sql, $database) = @_;
	my ($code, $stdout, $stderr) = $node->psql($database || 'postgres',
		"\\set VERBOSITY sqlstate\n$sql");

	return '00000' if $code == 0;
	return $stderr =~ /(?:ERROR|FATAL):\s+(\w{5})\b/ ? $1 : $stderr;
}

# session(NODE, DATABASE, OPTIONS of background_psql): a psql that stays.
sub session
{
	my ($node, $database, %params) = @_;

	return IdempotencyTest::Session->new($node, $database || 'postgres',
		%params);
}

# wait_for_block(NODE, PID, ...): until each of these backends waits for a lock.
sub wait_for_block
{
	my ($node, @pids) = @_;
	my $pids = join(',', @pids);
	my $count = @pids;

	$node->poll_query_until('postgres',
		"SELECT count(*) = $count FROM pg_stat_activity
		 WHERE pid IN ($pids) AND wait_event_type = 'Lock'")
	  or die "backends $pids do not wait for a lock";
	return;
}

# asleep(NODE, SESSION, ...): until each of these sleeps for a change, and not on a
# lock.
sub asleep
{
	my ($node, @sessions) = @_;
	my $pids = join ',', map { $_->pid } @sessions;

	$node->poll_query_until('postgres',
		'SELECT count(*) = ' . @sessions . " FROM pg_stat_activity
		 WHERE pid IN ($pids) AND wait_event_type = 'Extension'")
	  or die "backends $pids do not sleep";
	return;
}

# locks_of(NODE, SESSION): how many locks a session holds or waits for, but for the
# one of its virtual transaction, which each statement has.
sub locks_of
{
	my ($node, $session) = @_;

	return $node->safe_psql('postgres',
		'SELECT count(*) FROM pg_locks WHERE pid = ' . $session->pid . " AND locktype <> 'virtualxid'");
}

# median_seconds(ROUNDS, PREPARE, WORK): the median duration of the work over
# ROUNDS rounds, an odd number. Both functions get the number of the round.
sub median_seconds
{
	my ($rounds, $prepare, $work) = @_;
	my @seconds;

	foreach my $round (1 .. $rounds)
	{
		$prepare->($round);
		my $begin = time;
		$work->($round);
		push @seconds, time - $begin;
	}
	return (sort { $a <=> $b } @seconds)[ $rounds / 2 ];
}

# start_pgbench(NODE, DATABASE, {NAME => SCRIPT}, OPTION ...): in the background.
sub start_pgbench
{
	my ($node, $database, $scripts, @options) = @_;
	my %load = (stdout => '', stderr => '');
	my @files;

	foreach my $name (sort keys %$scripts)
	{
		my $file = $node->basedir . "/$name";

		open my $handle, '>', $file =~ s/@\d+$//r or die "$file: $!";
		print $handle $scripts->{$name};
		close $handle or die "$file: $!";
		push @files, '-f', $file;
	}
	$load{run} = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '-n', @files, @options,
			$node->connstr($database)
		],
		'<', \'', '>', \$load{stdout}, '2>', \$load{stderr},
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	return \%load;
}

# finish_pgbench(LOAD): wait for its end; how many transactions it made, or
# -1 if it met an error, which is then shown.
sub finish_pgbench
{
	my ($load) = @_;
	my $success = $load->{run}->finish;

	if (!$success || $load->{stderr} =~ /error|aborted/i)
	{
		diag($load->{stderr});
		return -1;
	}
	return $load->{stdout} =~ /actually processed: (\d+)/ ? $1 : -1;
}

# run_program(ENVIRONMENT, SECONDS, COMMAND ...): whether a program succeeded
# within that number of seconds, with these additional variables, and its
# output.
sub run_program
{
	my ($environment, $seconds, @command) = @_;
	local %ENV = (%ENV, %$environment);
	my $output = '';
	my $success = IPC::Run::run(\@command, '>', \$output, '2>&1', IPC::Run::timeout($seconds));

	note($output);
	return ($success, $output);
}

# injection_points(FILE ...): the names of those in C files, less "idem-".
sub injection_points
{
	my %points = map { $_ => 1 }
	  map { slurp_file($_) =~ /IDEM_INJECTION_POINT\("idem-([^"]+)"\)/g } @_;
	my @points = sort keys %points;

	return @points;
}

# until_stopped(NODE, POINT, SESSION): until the session is stopped at that point.
sub until_stopped
{
	my ($node, $point, $session) = @_;

	$node->poll_query_until('postgres',
		"SELECT wait_event = '$point' FROM pg_stat_activity WHERE pid = " . $session->pid)
	  or die $session->pid . " does not get to $point";
	return;
}

# operations_sql(HEADING, COUNT): the SQL of the last COUNT blocks of a section
# of docs/operations.md.
sub operations_sql
{
	my ($heading, $count) = @_;
	my ($section) = slurp_file('docs/operations.md') =~ /^## \Q$heading\E\n(.*?)(?=^## |\z)/ms;
	my @blocks = $section =~ /^```sql\n(.*?)^```/msg;

	return join '', @blocks[ -$count .. -1 ];
}

#
# A server whose psql() and poll_query_until() let psql read a file.  Those of the
# parent write the script into a pipe.  A psql whose connection is refused does
# not read it, and then the test dies of the broken pipe.
#
package IdempotencyTest::Cluster;

use strict;
use warnings FATAL => 'all';

use parent -norequire, 'PostgreSQL::Test::Cluster';
use Test::More;
use Time::HiRes qw(usleep);

sub psql
{
	my ($self, $database, $sql, %params) = @_;
	my $file = "$PostgreSQL::Test::Utils::tmp_check/script.$$.sql";
	my $list = wantarray;
	my @answer;

	open my $handle, '>', $file or die "$file: $!";
	print $handle $sql;
	close $handle or die "$file: $!";
	$params{extra_params} = [ @{ $params{extra_params} || [] }, '-f', $file ];
	eval {
		@answer = $list ? $self->SUPER::psql($database, '', %params)
		  : scalar $self->SUPER::psql($database, '', %params);
		1;
	} or die "$@\nThe script was:\n$sql\n";
	return $list ? @answer : $answer[0];
}

sub poll_query_until
{
	my ($self, $database, $query, $expected) = @_;
	my ($code, $stdout, $stderr);

	$expected = 't' unless defined $expected;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		($code, $stdout, $stderr) = $self->psql($database, $query, on_error_stop => 0);
		return 1 if $stdout eq $expected && $stderr eq '';
		usleep(100_000);
	}
	diag("timed out: $query\nexpected: $expected\nlast answer: $stdout\n$stderr");
	return 0;
}

#
# A session in a background psql.  Errors are reported in the output, as
# "ERROR" and their SQLSTATE; a connection that broke is "ERROR lost".
#
package IdempotencyTest::Session;

use strict;
use warnings FATAL => 'all';

sub new
{
	my ($class, $node, $database, %params) = @_;
	my $extra = delete $params{extra_params} || [];
	my $psql = $node->background_psql(
		$database,
		on_error_stop => 0,
		extra_params => [ '-v', 'VERBOSITY=sqlstate', @$extra ],
		%params);

	my $self = bless { psql => $psql, count => 0 }, $class;

	return defined $params{wait} && !$params{wait} ? $self : $self->_greet;
}

# Ask for the process id now, since later the session may be busy.
sub _greet
{
	my ($self) = @_;

	$self->{pid} = $self->run('SELECT pg_backend_pid()');
	return $self;
}

# Wait for the connection, where the session was made with wait => 0.
sub connected
{
	my ($self) = @_;

	$self->{psql}->wait_connect;
	return $self->_greet;
}

# Send statements, or psql commands, and return at once.  The limit of time is
# theirs, not the session's.
sub send
{
	my ($self, $sql) = @_;
	my $psql = $self->{psql};

	$psql->{timeout}->start;
	$self->{count}++;
	$psql->{stdin} .= "$sql\n;\n\\echo end $self->{count}\n"
	  . "\\warn end $self->{count}\n";
	eval { $psql->{run}->pump_nb };
	return $self;
}

# The output of what was sent last.
sub result
{
	my ($self) = @_;
	my $psql = $self->{psql};
	my $end = qr/^end $self->{count}\n/m;
	my $lost = 0;
	my ($output, $errors);

	until ($psql->{stdout} =~ $end && $psql->{stderr} =~ $end)
	{
		die "psql timed out" if $psql->{timeout}->is_expired;
		if (!eval { $psql->{run}->pump })
		{
			$lost = 1;
			last;
		}
	}
	($output, $errors) = ($psql->{stdout}, $psql->{stderr});
	$psql->{stdout} = $psql->{stderr} = '';
	$output =~ s/$end//;
	foreach my $line (split /\n/, $errors)
	{
		$output .= "ERROR $1\n"
		  if $line =~ /(?:ERROR|FATAL|PANIC):\s+(\w{5})\b/;
	}
	$output .= "ERROR lost\n" if $lost;
	chomp $output;
	return $output;
}

# Both.
sub run
{
	my ($self, $sql) = @_;

	return $self->send($sql)->result;
}

# The process id of its backend.
sub pid
{
	my ($self) = @_;

	return $self->{pid};
}

# End the session, whether or not its server is still there.
sub quit
{
	my ($self) = @_;

	eval { $self->{psql}->quit };
	return;
}

1;
