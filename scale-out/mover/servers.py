"""Connections to the router and the shards, as a superuser."""

import os
import sys
import time

import psycopg2
from psycopg2.extensions import (ISOLATION_LEVEL_READ_COMMITTED, make_dsn,
                                 parse_dsn)

# The mover and the server notice within this number of seconds that the network
# loses packets.  Until then the server's session holds its locks.
DEAD_AFTER = 10
LIBPQ = ('connect_timeout=10 keepalives_idle=4 keepalives_interval=2 '
         'keepalives_count=3 tcp_user_timeout=%d000 client_encoding=UTF8 '
         'application_name=scale-out/move' % DEAD_AFTER)

# These override the settings of the server, the role and the database: commits
# survive a crash, no time-out ends a step, and the server notices a lost client.
SETTINGS = '''
SELECT set_config(name, value, false)
FROM (VALUES ('synchronous_commit', 'on'), ('idle_session_timeout', '0'),
	('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
	('idle_in_transaction_session_timeout', '0'),
	('tcp_keepalives_idle', '4'), ('tcp_keepalives_interval', '2'),
	('tcp_keepalives_count', '3'), ('tcp_user_timeout', '%d000'),
	('client_connection_check_interval', '2s')) AS wanted (name, value)
JOIN pg_settings AS s USING (name)
WHERE s.setting <> 'remote_apply'
''' % DEAD_AFTER


# Standbys that do not have all WAL up to a position.  pg_receivewal replays nothing.
STANDBYS = '''
SELECT r.application_name
FROM pg_stat_replication AS r
WHERE r.replay_lsn IS NOT NULL AND coalesce(r.flush_lsn < %s, true)
	AND NOT EXISTS (SELECT FROM pg_replication_slots AS s
		WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
'''


class Failure(Exception):
    pass


def say(text):
    """Print it.  A full disk or a closed terminal does not stop the move."""
    try:
        print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')


def clock_lead(first, second):
    """The number of seconds that the second server's clock is at least ahead;
    negative if it is behind.  Each clock is read between a query and its answer."""
    bounds = []
    for server in first, second:
        asked = time.time()
        clock = float(server.one('SELECT extract(epoch FROM clock_timestamp())'))
        bounds.append((clock - time.time(), clock - asked))
        server.rollback()
    (low, high), (other_low, other_high) = bounds
    return max(0, other_low - high) - max(0, low - other_high)


def merged(*strings):
    """One connection string, in which options of later strings win."""
    options = {}
    for string in strings:
        options.update(parse_dsn(string))
    return make_dsn(**options)


def public(string):
    """A connection string without the options that only superusers are allowed to
    read, and not as a URI, which PL/Proxy does not understand"""
    return make_dsn(**{name: value for name, value in parse_dsn(string).items()
                       if name not in ('user', 'password', 'sslpassword')})


class Server:
    """A connection.  run() begins a transaction unless there is one."""

    def __init__(self, dsn, name):
        self.dsn, self.name = dsn, name
        self.connect()

    def connect(self):
        try:
            self.connection = psycopg2.connect(merged(LIBPQ, self.dsn))
            # A query after a lock sees what the lock's holders have committed.
            self.connection.set_session(ISOLATION_LEVEL_READ_COMMITTED,
                                        readonly=False)
            self.cursor = self.connection.cursor()
            # First, because a database's owner can define functions that an
            # unqualified name would find.
            self.run('SET search_path = pg_catalog, pg_temp')
            self.run(SETTINGS)
            self.pid, = self.run('SELECT pg_backend_pid()')[0]
            self.commit()
        except psycopg2.Error as error:     # also of a pooler whose server is down
            raise Failure('cannot connect to %s: %s' % (
                self.name, str(error).strip())) from error

    def is_there(self):
        """Rolls back, and connects again if the connection is dead."""
        try:
            self.rollback()
            self.one('SELECT 1')
            self.rollback()
        except psycopg2.Error:
            try:
                self.connect()
            except Failure as failure:
                say('warning: the map of %s is not corrected: %s' % (
                    self.name, failure))
                return False
        return True

    def run(self, text, *args):
        self.cursor.execute(text, args or None)
        return self.cursor.fetchall() if self.cursor.description else []

    def one(self, text, *args):
        return self.run(text, *args)[0][0]

    def wait_for_standbys(self, seconds):
        """Until each standby that is connected has all commits, also an asynchronous
        one: if it is promoted, it has this step of the move."""
        until = time.monotonic() + seconds
        last = self.one('SELECT pg_current_wal_flush_lsn()')
        while True:
            late = self.run(STANDBYS, last)
            self.rollback()
            if not late:
                return
            if time.monotonic() > until:
                raise Failure('%s of %s is behind by more than %d s: wait for this '
                              'standby, or stop it' % (late[0][0], self.name, seconds))
            time.sleep(0.002)

    def literal(self, text, *args):
        return self.cursor.mogrify(text, args).decode()

    def commit(self):
        self.connection.commit()

    def rollback(self):
        self.connection.rollback()


def read_map(router):
    """The connection strings of a map, by shard"""
    return dict(router.run('SELECT shard, connection FROM idem_map.shards'))


class Shards:
    """The shards of a map, which are connected to when they are needed."""

    def __init__(self, router, options, file=None):
        """A file has a connection string for each shard, one in each line.  Without a
        file, the strings are those of the map with these options."""
        self.servers, self.map = {}, read_map(router)
        self.strings = {number: merged(string, options)
                        for number, string in self.map.items()}
        self.removed = {number for number, in router.run(
            'SELECT shard FROM idem_map.removed')}
        router.rollback()
        if file:
            with open(file) as lines:
                lines = [line.strip() for line in lines]
            if len(lines) != len(self.strings):
                raise Failure('%s has %d lines, and the map has %d shards' % (
                    file, len(lines), len(self.strings)))
            self.strings = dict(zip(sorted(self.strings), lines))

    def __getitem__(self, number):
        if number not in self.servers or \
                self.servers[number].connection.closed:
            self.check(number)
            self.servers[number] = Server(self.strings[number],
                                          'shard %d' % number)
        return self.servers[number]

    def __iter__(self):
        return iter(sorted(self.strings))

    def check(self, number):
        """Raises Failure if there is no shard of this number."""
        if number not in self.strings:
            raise Failure('the map has no shard %s%s' % (
                number, ': it was removed' if number in self.removed else ''))

    def disconnect(self):
        """Close the connections, which can be dead."""
        for server in self.servers.values():
            server.connection.close()
