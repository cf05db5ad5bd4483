"""
Three machines with PostgreSQL, Patroni and etcd each, and HAProxy and PgBouncer
before them; and what can befall a machine.

A machine's processes are those whose working directory is in its own: Patroni
starts the server in a session of its own.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request

import psycopg2
import yaml

from checks import Broken

DATABASE = 'failover'
SUPERUSER = 'postgres'
HOSTS = (11, 12, 13)
PORTS = dict(server=25432, patroni=28008, etcd=22379, peer=22380,
             primary=25000, standby=25001, bouncer=26432)
PATIENCE = 120              # seconds, until all are well

# As short as etcd's leases and a busy machine allow: a leader that was not
# seen for this number of seconds has lost its lock.
TTL = 5
TIMING = dict(ttl=TTL, loop_wait=1, retry_timeout=2)

SERVER = '''
include '%(include)s'
fsync = off                         # the operating system survives
shared_buffers = 16MB
deadlock_timeout = 100ms
wal_retrieve_retry_interval = 500ms
wal_sender_timeout = 5s
wal_receiver_timeout = 5s
log_line_prefix = '%%m [%%p] %%q%%a '
log_checkpoints = off
checkpoint_timeout = 30s
min_wal_size = 32MB                 # pg_rewind copies all that there is
max_wal_size = 64MB
autovacuum_naptime = 5s
client_connection_check_interval = 1s
idempotency.databases = '%(database)s'
idempotency.cleanup_interval = 1s
idempotency.outbox_retention = 2s
idempotency.outbox_max_attempts = 1000
'''

# Patroni manages these itself.
MANAGED = dict(max_connections=60, max_prepared_transactions=60,
               max_wal_senders=8, max_replication_slots=8, wal_level='replica',
               wal_log_hints='on', wal_keep_size='64MB',
               synchronous_commit='on')

HAPROXY = '''
global
    maxconn 400
defaults
    mode tcp
    timeout connect 1s
    timeout client 1h
    timeout server 1h
    timeout check 1s
    option httpchk
    http-check expect status 200
    default-server inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
frontend primary
    bind %(address)s:%(primary)d
    default_backend primary
frontend standby
    bind %(address)s:%(standby)d
    default_backend standby
backend primary
    option httpchk OPTIONS /primary
%(servers)s
backend standby
    option httpchk OPTIONS /replica
%(servers)s
'''

PGBOUNCER = '''
[databases]
%(database)s = host=%(address)s port=%(primary)d
statements = host=%(address)s port=%(primary)d dbname=%(database)s pool_mode=statement
[pgbouncer]
listen_addr = %(address)s
listen_port = %(bouncer)d
unix_socket_dir =
auth_type = trust
auth_file = %(users)s
pool_mode = transaction
default_pool_size = 30
max_client_conn = 200
server_connect_timeout = 2
server_login_retry = 0.2
query_wait_timeout = 5
'''


class Machine:

    def __init__(self, servers, host):
        self.servers, self.host = servers, host
        self.name = 'm%d' % (host - HOSTS[0] + 1)
        self.directory = os.path.join(servers.directory, self.name)
        self.data = os.path.join(self.directory, 'data')
        self.children = []
        os.mkdir(self.directory)

    def address(self, network='cluster'):
        return self.servers.network.address(network, self.host)

    def start(self):
        self.start_program('etcd', self.etcd_command())
        self.start_program('patroni', [
            'patroni', os.path.join(self.directory, 'patroni.yml')])

    def start_program(self, name, command):
        with open(os.path.join(self.directory, name + '.log'), 'a') as log:
            self.children.append(subprocess.Popen(
                self.servers.network.command(self.host, *command),
                cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True))

    def etcd_command(self):
        peers = ['%s=http://%s:%d' % (m.name, m.address(), PORTS['peer'])
                 for m in self.servers.machines]
        url = 'http://%s:%d'
        return ['etcd', '--name', self.name, '--data-dir', 'etcd',
                '--enable-v2',
                '--listen-peer-urls', url % (self.address(), PORTS['peer']),
                '--listen-client-urls', url % (self.address(), PORTS['etcd']),
                '--initial-advertise-peer-urls',
                url % (self.address(), PORTS['peer']),
                '--advertise-client-urls',
                url % (self.address(), PORTS['etcd']),
                '--initial-cluster', ','.join(peers),
                '--heartbeat-interval', '100', '--election-timeout', '1000',
                # A member that rejoins does not start an election.
                '--pre-vote']

    def configure(self):
        with open(os.path.join(self.directory, 'server.conf'), 'w') as file:
            file.write(SERVER % dict(include=os.environ['IDEMPOTENCY_CONF'],
                                     database=DATABASE))
        anywhere = '0.0.0.0' if self.servers.network.separate \
            else self.address()
        settings = {
            'scope': 'failover', 'name': self.name,
            'restapi': {
                'listen': '%s:%d' % (anywhere, PORTS['patroni']),
                'connect_address': '%s:%d' % (self.address(),
                                              PORTS['patroni'])},
            # By etcd3, Patroni before 3.0.3 takes the leader's key back when it
            # was frozen.
            'etcd': {'hosts': ['%s:%d' % (m.address(), PORTS['etcd'])
                               for m in self.servers.machines]},
            'bootstrap': {
                'dcs': dict(
                    TIMING, maximum_lag_on_failover=1 << 30,
                    # A server that crashed is not waited for.
                    primary_start_timeout=0,
                    synchronous_mode=self.servers.synchronous,
                    synchronous_mode_strict=self.servers.synchronous,
                    postgresql=dict(use_pg_rewind=True, use_slots=True,
                                    parameters=MANAGED)),
                'initdb': ['no-sync', {'encoding': 'UTF8'}, {'locale': 'C'}]},
            'postgresql': {
                'listen': '%s:%d' % (anywhere, PORTS['server']),
                'connect_address': '%s:%d' % (self.address(),
                                              PORTS['server']),
                'data_dir': self.data, 'bin_dir': self.servers.programs,
                'custom_conf': os.path.join(self.directory, 'server.conf'),
                'pgpass': os.path.join(self.directory, 'pgpass'),
                'parameters': {'unix_socket_directories': self.directory},
                'use_unix_socket': True, 'use_unix_socket_repl': True,
                'pg_hba': ['%s %s all %strust' % words for words in (
                    ('local', 'all', ''), ('local', 'replication', ''),
                    ('host', 'all', '0.0.0.0/0 '),
                    ('host', 'replication', '0.0.0.0/0 '))],
                'basebackup': [{'checkpoint': 'fast'}, 'no-sync'],
                'remove_data_directory_on_rewind_failure': True,
                'remove_data_directory_on_diverged_timelines': True,
                'authentication': {
                    'superuser': {'username': SUPERUSER},
                    'replication': {'username': 'replicator'}}}}
        with open(os.path.join(self.directory, 'patroni.yml'), 'w') as file:
            yaml.safe_dump(settings, file)

    #
    # The faults
    #

    def processes(self):
        """pid -> title"""
        found = {}
        for pid in os.listdir('/proc'):
            if not pid.isdigit():
                continue
            try:
                place = os.readlink('/proc/%s/cwd' % pid)
                if (place + '/').startswith(self.directory + '/'):
                    with open('/proc/%s/cmdline' % pid) as file:
                        found[int(pid)] = file.read().replace('\0', ' ')
            except OSError:
                pass
        return found

    def signal(self, number, title=''):
        for pid, its in self.processes().items():
            if title in its:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass

    def freeze(self, title=''):
        self.signal(signal.SIGSTOP, title)

    def wake(self):
        self.signal(signal.SIGCONT)

    def lose_power(self):
        self.freeze()
        while self.processes():
            self.signal(signal.SIGKILL)
            for child in self.children:
                child.poll()
            time.sleep(0.01)
        for child in self.children:
            child.wait()
        self.children = []

    def crash_server(self):
        """The postmaster only."""
        with open(os.path.join(self.data, 'postmaster.pid')) as file:
            os.kill(int(file.readline()), signal.SIGKILL)

    def connect(self, database=DATABASE):
        """By its socket, whatever has befallen its networks."""
        connection = psycopg2.connect(
            host=self.directory, port=PORTS['server'], user=SUPERUSER,
            dbname=database, connect_timeout=5,
            options='-c timezone=UTC -c client_min_messages=error')
        connection.autocommit = True
        return connection


class Servers:

    def __init__(self, directory, network, synchronous):
        self.directory, self.network = directory, network
        self.synchronous = synchronous
        self.bindir = subprocess.check_output(
            [os.environ.get('PG_CONFIG', 'pg_config'), '--bindir'],
            text=True).strip()
        self.programs = self.make_programs()
        self.machines = [Machine(self, host) for host in HOSTS]
        # The clients' own end of their network.
        self.address = '127.0.0.1' if network.separate \
            else network.address('clients', 1)
        self.front = []

    def make_programs(self):
        """
        A directory of PostgreSQL's programs, for Patroni, which does not let
        pg_rewind do without syncing all files.
        """
        programs = os.path.join(self.directory, 'programs')
        os.mkdir(programs)
        for name in os.listdir(self.bindir):
            real = os.path.join(self.bindir, name)
            mine = os.path.join(programs, name)
            if name == 'pg_rewind':
                with open(mine, 'w') as file:
                    file.write('#!/bin/sh\nexec %s "$@" --no-sync\n' % real)
                os.chmod(mine, 0o755)
            else:
                os.symlink(real, mine)
        return programs

    def start(self):
        for machine in self.machines:
            self.network.add(machine.host)
            machine.configure()
        for machine in self.machines:
            machine.start()
        values = dict(
            PORTS, address=self.address, database=DATABASE,
            users=os.path.join(self.directory, 'users'),
            servers='\n'.join('    server %s %s:%d check port %d' % (
                m.name, m.address('clients'), PORTS['server'],
                PORTS['patroni']) for m in self.machines))
        for name, text in (('haproxy', HAPROXY), ('pgbouncer', PGBOUNCER),
                           ('users', '"%s" ""\n' % SUPERUSER)):
            with open(os.path.join(self.directory, name), 'w') as file:
                file.write(text % values)
        self.start_front('/usr/sbin/haproxy', '-db', '-f')
        self.start_front('/usr/sbin/pgbouncer')
        self.wait_until_well()

    def start_front(self, program, *options):
        path = os.path.join(self.directory, os.path.basename(program))
        with open(path + '.log', 'w') as log:
            self.front.append(subprocess.Popen(
                [program, *options, path], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True))

    def stop(self):
        for child in self.front:
            child.kill()
            child.wait()
        for machine in self.machines:
            machine.lose_power()
        for holder in self.network.holders.values():
            holder.kill()
            holder.wait()

    #
    # How they are
    #

    def members(self, asked=None):
        """What Patroni on this machine, or one of them, says of them all."""
        for machine in [asked] if asked else self.machines:
            try:
                with urllib.request.urlopen('http://%s:%d/cluster' % (
                        machine.address('clients'), PORTS['patroni']),
                        timeout=1) as answer:
                    return json.load(answer)['members']
            except (OSError, ValueError, KeyError):
                pass
        return []

    def leader(self, *but):
        """The machine that leads, as those say who are not left out."""
        for machine in self.machines:
            if machine in but:
                continue
            for member in self.members(machine):
                if member['role'] == 'leader' and \
                        member['state'] == 'running':
                    return self.machine(member['name'])
        return None

    def machine(self, name):
        return next(m for m in self.machines if m.name == name)

    def is_well(self):
        """One leads, the others follow, one of them synchronously."""
        leader = self.leader()
        if leader is None:
            return False
        try:
            connection = leader.connect('postgres')
        except psycopg2.Error:
            return False
        try:
            cursor = connection.cursor()
            cursor.execute(
                "SELECT count(*), count(*) FILTER (WHERE sync_state = 'sync'),"
                '       pg_is_in_recovery() '
                "FROM pg_stat_replication WHERE state = 'streaming' "
                '  AND application_name LIKE %s', ['m_'])
            count, synchronous, standby = cursor.fetchone()
        except psycopg2.Error:
            return False
        finally:
            connection.close()
        roles = sorted(member['role'] for member in self.members(leader))
        return (count, synchronous, standby) == (
            2, int(self.synchronous), False) and \
            roles == ['leader', 'replica', 'sync_standby'
                      if self.synchronous else 'replica']

    def wait_for(self, what, look, patience=PATIENCE):
        deadline = time.monotonic() + patience
        while True:
            found = look()
            if found:
                return found
            if time.monotonic() > deadline:
                raise Broken('%s: not within %d s; %s' % (
                    what, patience, self.members()))
            time.sleep(0.2)

    def wait_until_well(self):
        self.wait_for('a primary with its standbys', self.is_well)

    def switch_over(self, leader):
        done = subprocess.run(
            self.network.command(
                leader.host, 'patronictl', '-c',
                os.path.join(leader.directory, 'patroni.yml'), 'switchover',
                '--leader', leader.name, '--force'),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False)
        if 'Successfully switched over' not in done.stdout:
            raise Broken('switchover: ' + done.stdout)
