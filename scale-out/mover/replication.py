"""
Copies the rows of a place by logical replication, while it is in use.

A publication and a replication slot on the old shard and a subscription on the
new one have one name, with the place, the epoch and the new shard of the move.
Two movers to different shards can have one epoch, and a subscription must never
continue with the other mover's replication slot, which begins later.  The
subscription exists only while the gate of the new shard is arriving at this epoch:
idem_guard.lock_gate() is held when it is made and when it is dropped.  As long as
it exists, the cleanup of the new shard deletes no keys and tokens, since a copied
row that is deleted would miss its next update.

The transaction that closes the old gate writes a marker into idem_guard.closed.
Transactions are applied in the order of their commits.  So once the new shard has
the marker, it has all rows.
"""

import hashlib
import time

from psycopg2.errors import ObjectInUse, QueryCanceled, UndefinedObject

from .places import full_name, quoted
from .servers import Failure, merged

# The maximal number of seconds for which calls are refused until the rest arrives
CUT_OVER = 10

NEEDS = (
    ("SELECT current_setting('wal_level') = 'logical'",
     'wal_level is not logical on %s'),
    ("SELECT current_setting('max_replication_slots')::int - count(*) >= 3 "
     'FROM pg_replication_slots', 'fewer than 3 replication slots are free on %s'),
    ("SELECT current_setting('max_wal_senders')::int - count(*) >= 3 "
     'FROM pg_stat_replication', 'fewer than 3 WAL senders are free on %s'),
)

TARGET_NEEDS = (
    ("SELECT current_setting('max_logical_replication_workers')::int - count(*) >= 3 "
     "FROM pg_stat_activity WHERE backend_type ~ '^logical replication .*worker$'",
     'fewer than 3 logical replication workers are free on %s'),
    ("SELECT current_setting('max_sync_workers_per_subscription')::int > 0",
     'max_sync_workers_per_subscription is 0 on %s'),
)

# Transactions that write
WRITERS = '''
SELECT coalesce('the prepared transaction ' || quote_literal(x.gid), 'process ' || l.pid)
FROM pg_locks AS l
LEFT JOIN pg_prepared_xacts AS x ON x.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
	AND l.pid IS DISTINCT FROM pg_backend_pid()
'''

# Replication slots of moves up to an epoch, and of subscriptions that do not exist
SLOTS = '''
SELECT slot_name, active_pid
FROM pg_replication_slots
WHERE database = current_database() AND (
	starts_with(slot_name, %(prefix)s)
		AND split_part(substr(slot_name, length(%(prefix)s) + 1), '_', 1)::bigint <= %(epoch)s
	OR slot_name ~ '^pg_[0-9]+_sync_[0-9]+_[0-9]+$'
		AND split_part(slot_name, '_', 5) = ANY (%(systems)s)
		AND split_part(slot_name, '_', 5) || '/' || split_part(slot_name, '_', 2) <> ALL (%(subscriptions)s))
'''


def obstacle(source, target):
    """The reason why rows cannot be replicated from one to the other, or None"""
    found = [why % server.name for server, needs in (
        (source, NEEDS), (target, TARGET_NEEDS))
        for question, why in needs if not server.one(question)]
    source.rollback()
    target.rollback()
    return found[0] if found else None


def prefix(slot, scope):
    """The beginning of all names of a place, before the epoch"""
    return 'idem_move_%d_%s_' % (
        slot, hashlib.sha256(scope.encode()).hexdigest()[:16])


def drop_subscriptions(shard, place):
    """Drop the subscriptions of the place, in the caller's transaction, which holds
    the lock of the gate.  Waits until their workers have ended."""
    for name, in shard.run(
            'SELECT subname FROM pg_subscription WHERE starts_with(subname, %s) '
            'AND subdbid = (SELECT oid FROM pg_database WHERE datname = '
            'current_database())', prefix(place.slot, place.scope)):
        shard.run('ALTER SUBSCRIPTION %s DISABLE' % name)
        shard.run('ALTER SUBSCRIPTION %s SET (slot_name = NONE)' % name)
        shard.run('DROP SUBSCRIPTION ' + name)


def publications(source, place, epoch):
    """The names of the publications of moves of this place, up to an epoch, and the
    shards to which these moves lead"""
    start = prefix(place.slot, place.scope)
    found = source.run(
        "SELECT pubname, split_part(rest, '_', 2)::int FROM (SELECT pubname, "
        'substr(pubname, %s) AS rest FROM pg_publication WHERE '
        "starts_with(pubname, %s)) AS p WHERE split_part(rest, '_', 1)::bigint <= %s",
        len(start) + 1, start, epoch)
    source.rollback()
    return found


def sweep(source, targets, place, epoch, names):
    """Drop these publications, and the replication slots that moves of this place,
    up to an epoch, have left on the old shard."""
    systems, subscriptions = [], []
    for target in targets:
        system = target.one('SELECT system_identifier::text FROM '
                            'pg_control_system()')
        systems.append(system)
        subscriptions += ['%s/%s' % (system, oid) for oid, in target.run(
            'SELECT oid FROM pg_subscription')]
        target.rollback()
    wanted = {'prefix': prefix(place.slot, place.scope), 'epoch': epoch,
              'systems': systems, 'subscriptions': subscriptions}
    deadline = time.monotonic() + CUT_OVER
    while True:
        source.cursor.execute(SLOTS, wanted)
        slots = source.cursor.fetchall()
        source.commit()
        if not slots:
            break
        if time.monotonic() > deadline:
            raise Failure('%s has replication slots that are in use: %s' % (
                source.name, ', '.join(name for name, _ in slots)))
        for name, pid in slots:
            try:
                source.run(*(('SELECT pg_terminate_backend(%s)', pid) if pid
                             else ('SELECT pg_drop_replication_slot(%s)', name)))
            except (ObjectInUse, UndefinedObject):
                pass            # Its state has changed in between.
            finally:
                source.rollback()
        time.sleep(0.02)
    for name in names:
        source.run('DROP PUBLICATION IF EXISTS ' + name)
    source.commit()


class Replica:
    """The replication of one move, at its epoch"""

    def __init__(self, source, target, place, tables, epoch, to):
        self.source, self.target, self.place = source, target, place
        self.tables, self.epoch = tables, epoch
        self.name = prefix(place.slot, place.scope) + '%d_%d' % (epoch, to)

    def row_filter(self, column):
        """Like Place.condition(), but only with built-in functions."""
        column = quoted(column)
        if not self.place.is_slot:
            return '%s = %s' % (column, self.source.literal('%s', self.place.scope))
        return ' AND '.join([
            '(hashtextextended(%s, 0) & 255) = %d' % (column, self.place.slot)] + [
                '%s <> %s' % (column, self.source.literal('%s', scope)) for scope in self.place.own])

    def start(self, string, timeout):
        """Begin the copy, with a connection string that leads to the source."""
        published = ['TABLE %s WHERE (%s)' % (
            full_name(space, table), self.row_filter(column))
            for space, table, column, _ in self.tables]
        published.append(
            'TABLE idem_guard.closed WHERE (slot = %d AND scope = %s AND epoch = %d)'
            % (self.place.slot, self.source.literal('%s', self.place.scope),
               self.epoch))
        # A TRUNCATE has no row filter: it would empty the tables of the target.
        self.source.run("CREATE PUBLICATION %s FOR %s WITH (publish = 'insert, "
                        "update, delete')" % (self.name, ', '.join(published)))
        self.source.commit()
        try:
            self.source.run("SELECT set_config('statement_timeout', %s, true)",
                            '%dms' % max(1000, timeout * 1000))
            self.source.run("SELECT pg_create_logical_replication_slot(%s, "
                            "'pgoutput')", self.name)
            self.source.commit()
        except QueryCanceled as error:
            self.source.rollback()
            raise Failure(
                'no replication slot could be created on %s within %d s, because '
                'these transactions write: %s' % (self.source.name, timeout, ', '.join(
                    name for name, in self.source.run(WRITERS)))) from error
        gate = self.target.run('SELECT state, epoch FROM idem_guard.lock_gate('
                               '%s, %s)', self.place.slot, self.place.scope)[0]
        if gate != ('arriving', self.epoch):
            raise Failure('another move of %s has overtaken this one' % self.place.name)
        self.target.run('CREATE SUBSCRIPTION %s CONNECTION %s PUBLICATION %s '
                        'WITH (create_slot = false)' % (
                            self.name, self.source.literal('%s', merged(
                                string, 'application_name=' + self.name)),
                            self.name))
        self.target.commit()

    def wait_until_close(self, timeout):
        """Until the target is less than a second behind.  Raises Failure if there is
        no progress for this number of seconds, because the source retains WAL."""
        last, until = None, 0
        while True:
            states = [state for state, in self.target.run(
                'SELECT r.srsubstate FROM pg_subscription AS s JOIN '
                'pg_subscription_rel AS r ON r.srsubid = s.oid WHERE '
                's.subname = %s', self.name)]
            failed = self.target.run(
                'SELECT 1 FROM pg_stat_subscription_stats WHERE subname = %s '
                'AND apply_error_count + sync_error_count > 0', self.name)
            self.target.rollback()
            if not states:
                raise Failure('another move of %s has overtaken this one' % self.place.name)
            self.check_slot()
            progress = sorted(states), self.source.run(
                'SELECT (SELECT sum(tuples_processed) FROM pg_stat_progress_copy), '
                '(SELECT array_agg(confirmed_flush_lsn ORDER BY slot_name) FROM '
                "pg_replication_slots WHERE slot_name ~ '^pg_[0-9]+_sync_' OR "
                'slot_name = %s)', self.name if set(states) == {'r'} else '')
            self.source.rollback()
            if progress != last:
                last, until = progress, time.monotonic() + timeout
            elif time.monotonic() > until:
                raise Failure('the copy of %s has made no progress for %d s: the '
                              'server log of %s can say why' % (
                                  self.place.name, timeout, self.target.name))
            if failed:
                raise Failure('rows of %s cannot be applied on %s: its server '
                              'log says why' % (self.place.name,
                                                self.target.name))
            began = time.monotonic()
            if set(states) == {'r'} and self.has_confirmed(began + 1):
                return
            time.sleep(0.05)

    def check_slot(self):
        """Raises Failure if another mover has dropped the replication slot."""
        if not self.source.run('SELECT 1 FROM pg_replication_slots WHERE '
                               'slot_name = %s', self.name):
            raise Failure('another move of %s has overtaken this one' % self.place.name)

    def has_confirmed(self, until):
        """Returns whether the target confirms all current changes by that time."""
        now = self.source.one('SELECT pg_current_wal_insert_lsn()')
        while time.monotonic() < until:
            is_there = self.source.run(
                'SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND '
                'confirmed_flush_lsn >= %s', self.name, now)
            self.source.rollback()
            if is_there:
                return True
            time.sleep(0.01)
        return False

    def mark(self):
        """Write the marker, in the transaction that closes the gate of the source."""
        self.source.run(
            'INSERT INTO idem_guard.closed (slot, scope, epoch, claim_token) '
            'SELECT %%s, %%s, %%s, last_value FROM %s.idem_claim_tokens'
            % quoted(self.tables[0][0]), self.place.slot, self.place.scope,
            self.epoch)

    def wait_for_the_rest(self):
        """Until the target has the marker."""
        until = time.monotonic() + CUT_OVER
        while not self.target.run(
                'SELECT 1 FROM idem_guard.closed WHERE slot = %s AND scope = %s '
                'AND epoch = %s', self.place.slot, self.place.scope, self.epoch):
            self.target.rollback()
            if time.monotonic() > until:
                raise Failure('the last rows of %s do not arrive on %s within '
                              '%d s' % (self.place.name, self.target.name,
                                        CUT_OVER))
            time.sleep(0.002)
        self.target.rollback()

    def finish(self):
        """End it, in the transaction that opens the gate of the target."""
        drop_subscriptions(self.target, self.place)
        self.target.run(
            'SELECT %s.idem_raise_claim_tokens(claim_token) FROM '
            'idem_guard.closed WHERE slot = %%s AND scope = %%s AND epoch = %%s'
            % quoted(self.tables[0][0]), self.place.slot, self.place.scope,
            self.epoch)


def first_line(error):
    return str(error).strip().split('\n')[0]
