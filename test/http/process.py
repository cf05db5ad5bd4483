"""Shops and PgBouncer as separate processes."""

import glob
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
READY_IN = 60


class NotStarted(Exception):
    pass


def command_of(name):
    """The program of a shop, and its environment."""
    directory = os.environ.get('SHOPS', os.path.join(HERE, 'shops'))
    version = re.fullmatch(r'([a-z]+)(\d+)', name)
    if version and version[1] == 'express':
        command, _ = command_of(version[1])
        return command, {'EXPRESS': version[2]}
    for pattern, runtime in (('%s.mjs', 'node'), ('%s_shop.py', '/usr/bin/python3'), ('%s.py', '/usr/bin/python3')):
        for file in glob.glob(os.path.join(directory, pattern % name)):
            return [runtime, file], {}
    raise SystemExit('no shop %s in %s' % (name, directory))


class Shop:
    """A running shop, as a context manager that ends it."""

    def __init__(self, name, url, **variables):
        self.command, more = command_of(name)
        self.environment = dict(os.environ, PORT='0', DATABASE_URL=url, PYTHONDONTWRITEBYTECODE='1',
                                **more, **{key: str(value) for key, value in variables.items()})
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(self.command, env=self.environment, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)
        self._port = None

    @property
    def port(self):
        """Waits until it listens.  Several shops can start at the same time."""
        if self._port is None:
            self._port = self._await_port()
        return self._port

    def _await_port(self):
        deadline = time.monotonic() + READY_IN
        said = b''
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                part = os.read(self.process.stdout.fileno(), 4096)
                if not part:
                    break
                said += part
                ready = re.search(rb'^listening on (\d+)$', said, re.M)
                if ready:
                    return int(ready[1])
        raise NotStarted('%s did not say "listening on PORT": %r\n%s' % (self.command[-1], said, self.log_end()))

    def log_end(self):
        self.log.seek(0)
        return self.log.read()[-3000:].decode('utf-8', 'replace')

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def end(self):
        """Sends SIGTERM.  Returns how long the shop took to end, and its status."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        return time.monotonic() - began, status

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.signal(signal.SIGCONT)
        self.kill()


def free_port():
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        return taken.getsockname()[1]


class PgBouncer:
    """A PgBouncer in transaction mode, before the server that PGHOST and PGPORT name."""

    def __init__(self, database):
        self.port = free_port()
        self.directory = tempfile.TemporaryDirectory()
        users = os.path.join(self.directory.name, 'users')
        settings = os.path.join(self.directory.name, 'pgbouncer.ini')
        with open(users, 'w') as file:
            file.write('"shop" ""\n"postgres" ""\n')
        with open(settings, 'w') as file:
            file.write('\n'.join([
                '[databases]',
                '%s = host=%s port=%s' % (database, os.environ['PGHOST'], os.environ['PGPORT']),
                '[pgbouncer]', 'listen_addr = 127.0.0.1', 'listen_port = %d' % self.port,
                'unix_socket_dir =', 'auth_type = trust', 'auth_file = ' + users, 'admin_users = postgres',
                'pool_mode = transaction', 'default_pool_size = 20', 'max_client_conn = 500',
                'server_login_retry = 1', '']))
        self.log = open(os.path.join(self.directory.name, 'log'), 'w+')
        self.process = subprocess.Popen(['/usr/sbin/pgbouncer', settings], stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(('127.0.0.1', self.port)).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.log.seek(0)
                    raise NotStarted('pgbouncer: ' + self.log.read())
                time.sleep(0.05)

    def reconnect(self):
        """Makes new sessions on the server, which have new settings."""
        subprocess.run(['psql', '-X', '-q', '-h', '127.0.0.1', '-p', str(self.port), '-U', 'postgres',
                        'pgbouncer', '-c', 'RECONNECT'], check=True, stdout=subprocess.DEVNULL)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.directory.cleanup()
