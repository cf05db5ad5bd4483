"""
The servers of a test: four shards, a PgBouncer before them, and a router.

The router is the server that PGHOST and PGPORT point to, the shards are
started here, from the same installation and with the same settings.
"""

import copy
import os
import shutil
import signal
import subprocess
import tempfile
import time

from checks import Session, until

SHARDS = 4
HERE = os.path.dirname(os.path.abspath(__file__))
SCALE_OUT = os.path.join(HERE, '..', '..', 'scale-out')
APPLICATION = 'app'             # connects to shards
RELAY = 'relay'                 # consumes the outboxes of shards
WEB = 'web'                     # connects to the router

# The objects of a shard besides the extension.
SCHEMA = '''
CREATE TABLE effects (scope text, key text);
GRANT INSERT, SELECT ON effects TO app;
CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
	INSERT INTO effects VALUES (request->>'scope', request->>'key');
	SELECT request
$$;
CREATE FUNCTION fail(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effects VALUES (request->>'scope', request->>'key');
	RAISE 'no work today';
END $$;
'''


def program(name):
    bindir = subprocess.run([os.environ['PG_CONFIG'], '--bindir'], check=True,
                            capture_output=True, text=True).stdout.strip()
    return os.path.join(bindir, name)


def run(*command, **options):
    """Returns its output, or raises an error with the output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode:
        raise RuntimeError('%s: %s' % (' '.join(command), done.stdout))
    return done.stdout


class Server:

    def __init__(self, work, name, template):
        self.name, self.socket = name, os.path.join(work, name)
        self.data = os.path.join(work, name + '.data')
        self.log = os.path.join(work, name + '.log')
        shutil.copytree(template, self.data)
        os.chmod(self.data, 0o700)
        os.mkdir(self.socket)
        with open(os.path.join(self.data, 'postgresql.conf'), 'a') as conf:
            conf.write("include '%s'\nlisten_addresses = ''\n"
                       "unix_socket_directories = '%s'\nfsync = off\n"
                       'max_connections = 60\nshared_buffers = 16MB\n'
                       'wal_level = logical\n'
                       # Allow more than one move to a shard in 5 seconds.
                       'wal_retrieve_retry_interval = 100ms\n'
                       "timezone = 'UTC'\n"
                       % (os.environ['IDEMPOTENCY_CONF'], self.socket))

    def dsn(self, user='postgres'):
        return 'host=%s port=5432 dbname=postgres user=%s' % (self.socket, user)

    def session(self, user='postgres', search_path=None):
        session = Session(self.dsn(user), search_path)
        if user == 'postgres':      # who looks, and prepares
            session.run('SET idempotency.require_pinned_scope = off')
        return session

    def start(self):
        run(program('pg_ctl'), '-D', self.data, '-l', self.log, '-w', 'start')

    def kill(self):
        """Stops the server like a crash."""
        run(program('pg_ctl'), '-D', self.data, '-m', 'immediate', 'stop')

    def signal(self, number):
        """Sends a signal to the postmaster and all its processes."""
        with open(os.path.join(self.data, 'postmaster.pid')) as file:
            pid = int(file.readline())
        children = run('ps', '-o', 'pid=', '--ppid', str(pid)).split()
        for one in [pid] + [int(child) for child in children]:
            os.kill(one, number)

    def standby(self):
        """Returns an asynchronous standby, which runs."""
        standby = copy.copy(self)
        for name in 'name', 'socket', 'data', 'log':
            setattr(standby, name, getattr(self, name) + '-standby')
        os.mkdir(standby.socket)
        run(program('pg_basebackup'), '-h', self.socket, '-p', '5432', '-U', 'postgres',
            '-D', standby.data, '-R', '-c', 'fast', '--no-sync')
        with open(os.path.join(standby.data, 'postgresql.conf'), 'a') as conf:
            conf.write("unix_socket_directories = '%s'\n" % standby.socket)
        standby.start()
        return standby

    def stop(self):
        try:
            self.signal(signal.SIGCONT)
            self.kill()
        except (RuntimeError, OSError):
            pass                # it is down


class Bouncer:
    """PgBouncer before the shards, whose numbers are in the names of its databases."""

    def __init__(self, work, shards, name='bouncer', **settings):
        self.socket = os.path.join(work, name)
        os.mkdir(self.socket)
        self.file = os.path.join(self.socket, 'bouncer.ini')
        users = os.path.join(self.socket, 'users')
        with open(users, 'w') as file:
            file.write('"app" ""\n"relay" ""\n"postgres" ""\n')
        settings = {'pool_mode': 'transaction', 'default_pool_size': 20,
                    'server_login_retry': 0.2, 'query_wait_timeout': 5,
                    **settings}
        with open(self.file, 'w') as file:
            file.write('[databases]\n')
            for shard in shards:
                file.write('%s = host=%s port=5432 dbname=postgres\n'
                           % (shard.name, shard.socket))
            file.write('[pgbouncer]\nlisten_port = 6432\nlisten_addr =\n'
                       'auth_type = trust\nmax_client_conn = 500\n'
                       'unix_socket_dir = %s\nauth_file = %s\n'
                       'logfile = %s/log\npidfile = %s/pid\n' % (
                           self.socket, users, self.socket, self.socket))
            for setting in settings.items():
                file.write('%s = %s\n' % setting)
        self.process = subprocess.Popen(
            ['/usr/sbin/pgbouncer', '-q', self.file])
        deadline = time.monotonic() + 20
        while not os.path.exists(self.socket + '/.s.PGSQL.6432'):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError('pgbouncer does not start: see '
                                   + self.socket + '/log')
            time.sleep(0.05)

    def connection(self, name):
        return 'host=%s port=6432 dbname=%s' % (self.socket, name)

    def session(self, name, user=APPLICATION):
        return Session('%s user=%s' % (self.connection(name), user))

    def stop(self):
        # From 1.23 on, SIGTERM waits for connected clients.
        self.process.kill()
        self.process.wait()


def prepare(shard):
    """What a shard has before it is one."""
    session = shard.session()
    session.run('CREATE ROLE app LOGIN')
    session.run('CREATE ROLE relay LOGIN')
    session.run('CREATE EXTENSION idempotency')
    session.run("SELECT idem_grant_relay('relay')")
    session.run(SCHEMA)
    session.close()


class Servers:

    def __init__(self):
        self.work = tempfile.mkdtemp(prefix='shards.')
        template = os.path.join(self.work, 'template')
        run(program('initdb'), '-D', template, '-U', 'postgres', '-A', 'trust',
            '--no-sync', '--locale=C.UTF-8')
        self.shards = [Server(self.work, 's%d' % n, template)
                       for n in range(SHARDS)]
        self.bouncer = self.direct = None
        self.others = []        # that are no shards from the beginning

    def start(self):
        for shard in self.shards:
            shard.start()
            prepare(shard)
        self.bouncer = Bouncer(self.work, self.shards)
        connections = os.path.join(self.work, 'connections')
        with open(connections, 'w') as file:
            for shard in self.shards:
                file.write(self.bouncer.connection(shard.name)
                           + ' connect_timeout=5\n')
        # Connection strings without PgBouncer, for moves by replication
        self.direct = os.path.join(self.work, 'direct')
        with open(self.direct, 'w') as file:
            for shard in self.shards:
                file.write(shard.dsn() + '\n')
        session = Session('dbname=postgres')
        session.run('DROP DATABASE IF EXISTS router WITH (FORCE)')
        session.run('CREATE DATABASE router')
        for role in (WEB, 'idem_application', 'idem_router'):
            session.run('DROP ROLE IF EXISTS ' + role)
        session.close()
        run(os.path.join(SCALE_OUT, 'install'), APPLICATION, 'dbname=router',
            *(shard.dsn() for shard in self.shards),
            env={**os.environ, 'CONNECTIONS': connections})
        session = self.router('postgres')
        session.run('CREATE ROLE web LOGIN IN ROLE idem_application')
        session.run("ALTER ROLE web SET search_path = idempotency")
        session.run("ALTER ROLE web SET timezone = 'UTC'")
        session.close()

    def router(self, user=WEB):
        return Session('dbname=router user=' + user)

    def home(self, scope):
        """The number of the scope's shard."""
        session = self.router('postgres')
        number = session.one('SELECT idem_map.shard(%s)', scope)
        session.close()
        return number

    def move(self, *arguments):
        """Returns its exit status and what it said."""
        process = self.start_move(*arguments)
        output, _ = process.communicate()
        return process.returncode, output

    def online_move(self, *arguments):
        """Returns what it said."""
        status, output = self.move('--shards', self.direct, *arguments)
        if status:
            raise AssertionError(output)
        return output

    def gate(self, number, scope):
        """The state of a scope's gate on this shard."""
        session = self.shards[number].session()
        state = session.one('SELECT state FROM idem_guard.gate('
                            'idem_guard.slot(%s), %s)', scope, scope)
        session.close()
        return state

    def forget(self, scope):
        """Undo changes of its gates and of the map's row, so that it follows its slot
        again.  Otherwise a test that moves the slot finds an epoch that is too high."""
        for server in [shard.session() for shard in self.shards]:
            server.run('DELETE FROM idem_guard.places WHERE scope = %s', scope)
            server.close()
        router = self.router('postgres')
        router.run('DELETE FROM idem_map.scopes WHERE scope = %s', scope)
        router.close()

    def begun_move(self, scope, to, *arguments):
        """A move that has reserved the new shard, and waits for a transaction;
        that of the session that is returned, which commits."""
        user = self.shards[self.home(scope)].session(APPLICATION)
        user.run('BEGIN')
        user.run('SELECT idem_pin_scope(%s)', scope)
        process = self.start_move(*arguments, 'dbname=router', scope, to)
        until(lambda: self.gate(to, scope) == 'arriving', 'it does not begin')
        return process, user

    def closed_move(self, scope, to, *arguments):
        """A move that has closed the old shard's gate, of which the router's map
        knows, and that cannot copy until the session that is returned commits."""
        home = self.home(scope)
        process, user = self.begun_move(scope, to, *arguments)
        blocker = self.shards[to].session()
        blocker.run('BEGIN')
        blocker.run('LOCK TABLE idem_tokens IN SHARE MODE')
        user.run('COMMIT')
        user.close()
        until(lambda: self.gate(home, scope) == 'leaving', 'it does not close')
        # The map follows the gate.
        router = self.router('postgres')
        until(lambda: router.error('SELECT idem_map.shard(%s)', scope)[0] == '55P03',
              'the map does not change')
        router.close()
        return process, blocker

    def verify(self, *routers, shards=None):
        """What scale-out/verify says, if it finds something."""
        done = subprocess.run(
            [os.path.join(SCALE_OUT, 'verify'),
             *(['--shards', shards] if shards else []), 'dbname=router', *routers],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False)
        return done.stdout if done.returncode else ''

    def shards_command(self, *arguments):
        """Returns its exit status and what it said."""
        done = subprocess.run(
            [os.path.join(SCALE_OUT, 'shards'), '--shards', self.direct,
             *map(str, arguments)], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def start_move(self, *arguments):
        return subprocess.Popen(
            [os.path.join(SCALE_OUT, 'move'), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def another(self, name):
        """A server that is not yet a shard."""
        shard = Server(self.work, name, os.path.join(self.work, 'template'))
        shard.start()
        self.others.append(shard)
        prepare(shard)
        return shard

    def stop(self):
        if self.bouncer:
            self.bouncer.stop()
        for shard in self.shards + self.others:
            shard.stop()
        shutil.rmtree(self.work, ignore_errors=True)
