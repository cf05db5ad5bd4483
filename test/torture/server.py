"""
The server that is tortured: how to start it, and three ways to crash it.

Its processes are found in /proc, which works on Linux only.  All of them have
the data directory as their working directory, also when they are orphans.
"""

import os
import re
import signal
import subprocess
import time

import psycopg2

from checks import Broken

DATABASE = 'torture'
PATIENCE = 60               # seconds, for a start and for orphans to leave

DAMAGE = re.compile(
    'PANIC|TRAP:|by signal (?!9)|verification failed|invalid page|'
    'could not (read|write|open|access|find)|corrupt')

CONFIGURATION = '''
include '%(include)s'
listen_addresses = ''
unix_socket_directories = '%(directory)s'
fsync = off                         # the operating system survives
synchronous_commit = on
restart_after_crash = on
shared_buffers = 4MB                # so that dirty pages are written early
max_connections = 40
max_wal_size = 64MB
checkpoint_timeout = 30s
checkpoint_completion_target = 0.1
autovacuum_naptime = 1s
deadlock_timeout = 100ms
log_checkpoints = off
idempotency.databases = '%(database)s'
idempotency.cleanup_interval = 1s
idempotency.cleanup_batch_size = 5  # many short transactions
idempotency.outbox_retention = 2s
idempotency.outbox_max_attempts = 1000
'''


class Server:

    def __init__(self, directory):
        self.directory = directory
        self.data = os.path.join(directory, 'data')
        self.log = os.path.join(directory, 'server.log')
        pg_config = os.environ.get('PG_CONFIG', 'pg_config')
        self.bindir = subprocess.check_output(
            [pg_config, '--bindir'], text=True).strip()
        self.postmaster = None
        self.slowest_orphans = 0
        self.log_read = 0

    def program(self, name, *arguments):
        done = subprocess.run(
            [os.path.join(self.bindir, name), *arguments], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            raise Broken('%s failed:\n%s' % (name, done.stdout))
        return done.stdout

    def create(self, settings=''):
        self.program('initdb', '-D', self.data, '-U', 'postgres', '-A',
                     'trust', '--no-sync', '--locale=C', '--encoding=UTF8',
                     '--data-checksums')
        with open(self.data + '/postgresql.conf', 'a') as file:
            file.write(CONFIGURATION % dict(
                include=os.environ['IDEMPOTENCY_CONF'], database=DATABASE,
                directory=self.directory) + settings)

    def connect(self, database=DATABASE, options=''):
        connection = psycopg2.connect(
            host=self.directory, port=5432, user='postgres', dbname=database,
            options='-c timezone=UTC -c client_min_messages=error ' + options)
        connection.autocommit = True
        return connection

    def start(self, database=DATABASE):
        """Start it; returns a connection."""
        log = open(self.log, 'a')
        self.postmaster = subprocess.Popen(
            [os.path.join(self.bindir, 'postgres'), '-D', self.data, '-p',
             '5432'], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True)
        log.close()
        return self.wait_until_ready(database)

    def wait_until_ready(self, database=DATABASE):
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.connect(database)
            except psycopg2.OperationalError as error:
                if self.postmaster.poll() is not None:
                    raise Broken('the server does not start; its log ends '
                                 'with:\n' + self.end_of_log())
                if time.monotonic() > deadline:
                    raise Broken('the server is not ready after %d s: %s' % (
                        PATIENCE, error))
            time.sleep(0.005)

    def stop(self, how=signal.SIGINT):
        """As pg_ctl stop does, which would look for the end less often."""
        if self.postmaster and self.postmaster.poll() is None:
            self.postmaster.send_signal(how)
            self.postmaster.wait(PATIENCE)

    def news_of_damage(self):
        """What the log says, since last asked, that no crash explains."""
        with open(self.log, errors='replace') as file:
            file.seek(self.log_read)
            lines = file.readlines()
            self.log_read = file.tell()
        return ['the server log: ' + line.strip() for line in lines
                if DAMAGE.search(line)]

    def end_of_log(self, lines=20):
        with open(self.log, errors='replace') as file:
            return ''.join(file.readlines()[-lines:])

    #
    # Its processes
    #

    def processes(self):
        """Those with the data directory as theirs: pid -> title."""
        found = {}
        for pid in os.listdir('/proc'):
            if not pid.isdigit():
                continue
            try:
                if os.readlink('/proc/%s/cwd' % pid) == self.data:
                    with open('/proc/%s/cmdline' % pid) as file:
                        found[int(pid)] = file.read().strip('\0 ')
            except OSError:
                pass
        return found

    def children(self):
        """Those of a living postmaster, by kind: kind -> pids."""
        kinds = {'backend': [], 'worker': [], 'checkpointer': [], 'other': []}
        pid = self.postmaster.pid
        with open('/proc/%d/task/%d/children' % (pid, pid)) as file:
            pids = [int(pid) for pid in file.read().split()]
        for pid in pids:
            try:
                with open('/proc/%d/cmdline' % pid) as file:
                    title = file.read()
            except OSError:
                continue
            if 'idempotency ' in title:
                kinds['worker'].append(pid)
            elif '[local]' in title:
                kinds['backend'].append(pid)
            elif 'checkpointer' in title:
                kinds['checkpointer'].append(pid)
            elif re.search('autovacuum|writer', title):
                kinds['other'].append(pid)
        return kinds

    #
    # Crashes
    #

    def kill(self, pids):
        """
        Kill these with signal 9, all at once.  Returns how many there were:
        a process that had left by itself is not counted, so each is stopped
        before, and found to be.
        """
        stopped = [pid for pid in pids if send(pid, signal.SIGSTOP)]
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and \
                any(state(pid) not in 'TZ' for pid in stopped):
            time.sleep(0.0005)
        killed = sum(state(pid) == 'T' for pid in stopped)
        for pid in stopped:
            send(pid, signal.SIGKILL)
        return killed

    def kill_some(self, kind, rng):
        """
        Kill some processes; the server restarts.  Returns how many were of
        which kind.
        """
        deadline = time.monotonic() + 0.2
        while True:
            children = self.children()
            # The launcher always runs, its worker only at times.
            if children['checkpointer'] and children[kind] and \
                    (kind != 'worker' or len(children[kind]) > 1 or
                     time.monotonic() > deadline):
                break
            if time.monotonic() > deadline + PATIENCE:
                raise Broken('there is no %s to kill' % kind)
            time.sleep(0.0005)
        if kind == 'backend':
            number = min(len(children[kind]), rng.choice((1, 3, 4, 4, 4)))
            victims = rng.sample(children[kind], number)
        else:
            # Launcher, worker, or both.
            victims = children[kind][-rng.choice((1, 1, 2)):]
        killed = self.kill(victims)
        if killed:
            self.wait_until_gone(children['checkpointer'])
        return killed

    def wait_until_gone(self, pids):
        deadline = time.monotonic() + PATIENCE
        while any(state(pid) not in 'Z' for pid in pids):
            if time.monotonic() > deadline:
                raise Broken('the server does not restart after a crash')
            time.sleep(0.001)

    def kill_postmaster(self):
        """
        Its children must leave by themselves.  Returns what must be gone when
        the next postmaster has started.
        """
        remains = self.shared_memory()
        self.postmaster.kill()
        self.postmaster.wait()
        began = time.monotonic()
        while True:
            orphans = self.processes()
            took = time.monotonic() - began
            if not orphans:
                break
            if took > PATIENCE:
                raise Broken('processes outlive their postmaster: %s' %
                             list(orphans.values()))
            time.sleep(0.002)
        self.slowest_orphans = max(self.slowest_orphans, took)
        return remains

    def shared_memory(self):
        """What this postmaster holds, as strings."""
        with open(self.data + '/postmaster.pid') as file:
            held = {'SysV ' + file.read().split('\n')[6].split()[1]}
        with open('/proc/%d/maps' % self.postmaster.pid) as file:
            held.update(re.findall(r'/dev/shm/PostgreSQL\.\d+', file.read()))
        return held

    def check_cleaned(self, remains):
        with open('/proc/sysvipc/shm') as file:
            there = {'SysV ' + line.split()[1] for line in file}
        left = [name for name in remains
                if name in there or os.path.exists(name)]
        if left:
            raise Broken('shared memory outlives its postmaster: %s' % left)


def send(pid, number):
    try:
        os.kill(pid, number)
        return True
    except ProcessLookupError:
        return False


def state(pid):
    """One letter; Z also where there is no such process any more."""
    try:
        with open('/proc/%d/stat' % pid) as file:
            return file.read().rpartition(')')[2].split()[0]
    except OSError:
        return 'Z'
