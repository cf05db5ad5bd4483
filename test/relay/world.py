# The world of a relay's test: a database with an outbox, relays, and a
# directory of their own.

import contextlib
import os
import random
import signal
import socket
import subprocess
import time

import psycopg2

PROGRAM = os.environ.get('RELAY', os.path.join(os.getcwd(), 'relay', 'idem-relay'))


class Broken(Exception):
    """A promise was broken; the text says which."""


def expect(what, condition):
    if not condition:
        raise Broken(what)


def equal(what, found, wanted):
    if found != wanted:
        raise Broken('%s: found %r, expected %r' % (what, found, wanted))


def until(what, condition, seconds=20):
    """Wait until the condition is true, and return its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Broken('not within %s s: %s' % (seconds, what))
        time.sleep(0.02)


def free_port():
    """A port outside the range from which the system chooses.  Otherwise a client
    that tries to reach an absent server could connect to itself.  Other jobs choose
    other ports, because a test can leave its port closed for a while."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(('127.0.0.1', random.randrange(20000 + int(os.environ.get('JOB', '0')), 32000, 8)))
                return probe.getsockname()[1]
            except OSError:
                pass


@contextlib.contextmanager
def deaf_port():
    """A port on which nothing answers, as if packets were lost, because its queue
    of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(('127.0.0.1', 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        time.sleep(0.1)
        yield listener.getsockname()[1]


def server_program(name):
    return os.path.join(subprocess.check_output([os.environ['PG_CONFIG'], '--bindir'], text=True).strip(), name)


def make_server(data):
    """Start a new server that can load the extension.  Its directory has its socket, too."""
    subprocess.run([server_program('initdb'), '-D', data, '-A', 'trust', '-U', 'postgres', '--no-sync', '--locale=C.UTF-8'],
                   check=True, stdout=subprocess.DEVNULL)
    with open(os.path.join(data, 'postgresql.conf'), 'a') as file:
        file.write("include '%s'\nlisten_addresses = ''\nunix_socket_directories = '%s'\nport = 5432\nmax_connections = 350\n"
                   'fsync = off\n' % (os.environ['IDEMPOTENCY_CONF'], data))
    start_server(data)


def start_server(data):
    subprocess.run([server_program('pg_ctl'), '-D', data, '-l', data + '.log', '-w', 'start'], check=True, stdout=subprocess.DEVNULL)


def stop_server(data):
    subprocess.run([server_program('pg_ctl'), '-D', data, '-m', 'immediate', 'stop'], stdout=subprocess.DEVNULL)


class Relay:
    """A running relay; "out" and "log" are files."""

    def __init__(self, world, *options, environment=None, descriptors=(), output=None, before=None):
        world.relays.append(self)
        name = os.path.join(world.directory, 'relay.%d' % len(world.relays))
        self.out, self.log = name + '.out', name + '.log'
        with open(self.out, 'wb') as out, open(self.log, 'wb') as log:
            self.process = subprocess.Popen([PROGRAM, *options], stdout=output or out, stderr=log, preexec_fn=before,
                                            env={**os.environ, **(environment or {})}, pass_fds=descriptors)

    def started(self, seconds=20):
        until('the relay has started', lambda: 'started' in self.said() or self.process.poll() is not None, seconds)
        if self.process.poll() is not None:
            raise Broken('the relay has ended: ' + self.said())
        return self

    def said(self):
        with open(self.log, errors='replace') as log:
            return log.read()

    def lines(self):
        with open(self.out) as out:
            return out.read().splitlines()

    def cpu(self):
        """The seconds of processor time that it has used."""
        with open('/proc/%d/stat' % self.process.pid) as file:
            fields = file.read().rsplit(')', 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def status(self, seconds=30):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Broken('the relay has not ended: ' + self.said())

    def stop(self):
        """Its exit status after SIGTERM."""
        self.signal(signal.SIGTERM)
        return self.status()


class World:
    def __init__(self, directory, where=''):
        self.directory = directory
        self.where = where
        self.relays = []
        self.connection = None
        self.data = self.query('SHOW data_directory')[0][0]

    def query(self, text, *values):
        """The rows of a query, on a connection that is made again after a loss."""
        if self.connection is None or self.connection.closed:
            self.connection = psycopg2.connect(self.where)
            self.connection.autocommit = True
            # A test that waits for ever would not fail.
            with self.connection.cursor() as cursor:
                cursor.execute("SET statement_timeout = '2min'")
        with self.connection.cursor() as cursor:
            cursor.execute(text, values or None)
            return cursor.fetchall() if cursor.description else None

    def begin(self):
        """Empty tables, for the next test."""
        self.query('CREATE EXTENSION IF NOT EXISTS idempotency')
        self.query('TRUNCATE idem_outbox, idem_tokens')
        self.query('DROP TABLE IF EXISTS applied')

    def end(self):
        for relay in self.relays:
            if relay.process.poll() is None:
                relay.kill()

    @contextlib.contextmanager
    def database(self, name, encoding):
        """A world in another database, which exists for this time."""
        self.query("CREATE DATABASE %s TEMPLATE template0 ENCODING '%s' LOCALE 'C'" % (name, encoding))
        try:
            world = World(self.directory, 'dbname=' + name)
            world.query('CREATE EXTENSION idempotency')
            yield world
        finally:
            self.query('DROP DATABASE %s WITH (FORCE)' % name)

    def relay(self, *options, **more):
        return Relay(self, *options, **more)

    @contextlib.contextmanager
    def setting(self, name, value):
        """A setting of the extension for this time."""
        def configure(value):
            if os.environ.get('EDITION') == 'portable':
                self.query('SELECT idem_configure(%s, %s)', name, value)
            else:
                self.query('ALTER SYSTEM SET idempotency.%s = %s' % (name, value or 'DEFAULT'))
                self.query('SELECT pg_reload_conf()')

        configure(str(value))
        try:
            yield
        finally:
            configure(None)

    def preload(self, *names):
        """The environment of a relay that loads these mocks, which are beside this file."""
        mocks = [os.path.join(self.directory, name + '.so') for name in names]
        for name, mock in zip(names, mocks):
            source = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + '.c')
            subprocess.run(['cc', '-shared', '-fPIC', '-o', mock, source], check=True)
        return {'LD_PRELOAD': ':'.join(mocks), 'ASAN_OPTIONS': 'verify_asan_link_order=0'}

    def publish(self, topic, payload='{}', key=None, headers=None):
        return self.query('SELECT idem_publish(%s, %s, %s, %s)::text', topic, payload, key, headers)[0][0]

    def states(self):
        return dict(self.query('SELECT state, count(*) FROM idem_outbox GROUP BY 1'))

    def all_acked(self, count, seconds=20):
        until('%d messages are acknowledged' % count, lambda: self.states() == {'acked': count}, seconds)

    def outbox(self, message_id):
        """State, attempt, leased and last error, without its time, of a message."""
        return self.query("SELECT state, attempt, awaiting_ack, substr(split_part(last_error, E'\\n', 1), 22) "
                          'FROM idem_outbox WHERE message_id = %s', message_id)[0]

    def leased(self):
        return self.query("SELECT count(*) FROM idem_outbox WHERE state = 'pending' AND awaiting_ack")[0][0]

    def crash_database(self):
        self.stop_database()
        self.start_database()

    def stop_database(self):
        self.control('-m', 'immediate', 'stop')
        self.connection = None

    def start_database(self):
        self.control('-l', os.path.join(self.directory, 'server.log'), '-w', 'start')

    def control(self, *command):
        subprocess.run([server_program('pg_ctl'), '-D', self.data, *command], check=True, stdout=subprocess.DEVNULL)
