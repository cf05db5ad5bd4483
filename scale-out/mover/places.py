"""A place: a slot or a scope, with its gates, its hints in maps, and its rows."""

import time
from collections import namedtuple

from psycopg2.errors import CheckViolation, LockNotAvailable, ObjectInUse

from .servers import DEAD_AFTER, Failure, say

# Locks of a slot: that of its users, as in shard.sql, "IDEM", and that of movers.
LOCK = 1229211981
MOVERS = LOCK + 1

Gate = namedtuple('Gate', 'state epoch opened peer is_own')

# The holders of a slot's lock.  A prepared transaction has no process.
HOLDERS = '''
SELECT coalesce('process ' || l.pid || coalesce(' (' || a.usename || ', ' || a.state || ')', ''), (
	SELECT 'the prepared transaction ' || quote_literal(x.gid)
	FROM pg_locks AS t
	JOIN pg_prepared_xacts AS x ON x.transaction = t.transactionid
	WHERE t.virtualtransaction = l.virtualtransaction AND t.pid IS NULL),
	'a prepared transaction'),
	coalesce(clock_timestamp() - a.xact_start < '200 ms', false), l.pid
FROM pg_locks AS l
JOIN pg_database AS d ON d.oid = l.database AND d.datname = current_database()
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid = %s AND l.granted
	AND l.pid IS DISTINCT FROM pg_backend_pid()
'''

# The extension's tables, the column of each that names the shard, which is the first
# argument of a function that writes, and all columns
TABLES = '''
SELECT DISTINCT n.nspname, c.relname, a.attname, (
	SELECT string_agg(format('%I', b.attname), ', ' ORDER BY b.attname)
	FROM pg_attribute AS b
	WHERE b.attrelid = c.oid AND b.attnum > 0 AND NOT b.attisdropped)
FROM pg_extension AS e
JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	AND d.classid = 'pg_class'::regclass AND d.deptype = 'e'
JOIN pg_index AS i ON i.indrelid = d.objid AND i.indisprimary
JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
JOIN pg_class AS c ON c.oid = i.indrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_proc AS p ON p.pronamespace = e.extnamespace AND p.provolatile = 'v'
	AND p.proargnames[1] = a.attname AND p.proargtypes[0] = 'text'::regtype
WHERE e.extname = 'idempotency' AND a.atttypid = 'text'::regtype
ORDER BY 1, 2
'''


def quoted(name):
    return '"%s"' % name.replace('"', '""')


def full_name(space, table):
    return quoted(space) + '.' + quoted(table)


class Place:

    def __init__(self, router, what, is_slot):
        self.is_slot = is_slot
        self.own = []       # scopes of a slot that do not move with it
        if is_slot:
            if not what.isdecimal():
                raise Failure('"%s" is not the number of a slot' % what)
            self.slot, self.scope, self.name = int(what), '', 'slot ' + what
            self.table, self.key = 'idem_map.slots', ('slot', self.slot)
        else:
            try:
                length = len(what.encode())
            except UnicodeEncodeError as error:
                raise Failure('the scope is not text in the encoding of this '
                              'locale') from error
            if not 1 <= length <= 255:
                raise Failure('a scope has 1 to 255 bytes, but this one has %d' % length)
            self.slot, self.scope = router.one('SELECT idem_map.slot(%s)',
                                               what), what
            self.name = 'scope "%s"' % what
            self.table, self.key = 'idem_map.scopes', ('scope', what)

    # The map: a hint only

    def hint(self, router):
        """The shard and the epoch of the map's row."""
        for table, column, value in ((self.table, *self.key), (
                'idem_map.slots', 'slot', self.slot)):
            rows = router.run('SELECT shard, epoch FROM %s WHERE %s = %%s'
                              % (table, column), value)
            if rows:
                router.rollback()
                return rows[0]
        raise Failure('the map has no row for slot %d' % self.slot)

    def last_epoch(self, router):
        """The highest epoch of the map's rows of the slot and its scopes.  It is above
        all gates if the shards were restored from a backup, and the map was not."""
        epoch = router.one(
            'SELECT coalesce(max(epoch), 0) FROM (SELECT epoch FROM idem_map.slots '
            'WHERE slot = %s UNION ALL SELECT epoch FROM idem_map.scopes WHERE '
            'idem_map.slot(scope) = %s) AS rows', self.slot, self.slot)
        router.rollback()
        return epoch

    def set_hint(self, routers, shard, moving_to, epoch, timeout=0):
        """Write where the place is, unless a map knows a later move."""
        for router in routers:
            router.run("SELECT set_config('lock_timeout', %s, true)",
                       '%ds' % timeout)
            router.run(
                'INSERT INTO {0} AS m ({1}, shard, moving_to, epoch) '
                'VALUES (%s, %s, %s, %s) ON CONFLICT ({1}) DO UPDATE SET '
                'shard = EXCLUDED.shard, moving_to = EXCLUDED.moving_to, '
                'epoch = EXCLUDED.epoch WHERE m.epoch <= EXCLUDED.epoch'.format(
                    self.table, self.key[0]),
                self.key[1], shard, moving_to, epoch)
            if self.is_slot and moving_to is None:
                # Scopes that had a place of their own, and follow the slot now
                router.run('DELETE FROM idem_map.scopes WHERE idem_map.slot(scope) '
                           '= %s AND scope <> ALL (%s::text[]) AND '
                           'epoch <= %s', self.slot,
                           self.own, epoch)
            router.commit()

    def put_right(self, routers, home, number):
        """Correct the maps' rows of a place that is open on its home.  A scope that
        has no gate of its own there follows its slot."""
        gate, follows = self.gate(home), not self.has_gate(home)
        home.rollback()
        for router in routers:
            epoch = max(gate.epoch, self.hint(router)[1])
            if follows:
                # The slot's row comes first, as in idem_map.find().
                router.run('UPDATE idem_map.slots SET shard = %s, epoch = %s '
                           'WHERE slot = %s AND epoch <= %s', number,
                           gate.epoch, self.slot, gate.epoch)
                router.run('DELETE FROM idem_map.scopes WHERE scope = %s AND '
                           'epoch <= %s', self.scope, epoch)
                router.commit()
            else:
                self.set_hint([router], number, None, epoch)

    # The gates: the truth

    def gate(self, shard):
        return Gate(*shard.run('SELECT * FROM idem_guard.gate(%s, %s)',
                               self.slot, self.scope)[0])

    def has_gate(self, shard):
        """Returns whether the place has a gate of its own there, in any state."""
        return bool(shard.run('SELECT 1 FROM idem_guard.places WHERE '
                              'slot = %s AND scope = %s', self.slot, self.scope))

    def step(self, shard, function, *args, timeout=60):
        """One compare-and-set of shard.sql.  The caller commits."""
        shard.run("SELECT set_config('lock_timeout', %s, true)",
                  '%dms' % max(1000, timeout * 1000))
        try:
            found = shard.one(
                'SELECT idem_guard.%s(%%s, %%s%s)' % (
                    function, ', %s' * len(args)),
                self.slot, self.scope, *args)
        except ObjectInUse as error:
            shard.rollback()
            raise Failure('%s on %s: %s' % (
                self.name, shard.name, str(error).strip())) from error
        except CheckViolation as error:
            shard.rollback()
            raise Failure('%s was removed by scale-out/shards remove' % shard.name) \
                from error
        except LockNotAvailable as error:
            shard.rollback()
            raise Failure(in_use(shard, self, MOVERS)) from error
        shard.run("SELECT set_config('lock_timeout', '0', true)")
        return found

    def lock_users_out(self, shard, timeout):
        """Until the transaction ends.  Calls wait behind a waiter.  So this waits
        for 50 ms at a time, and not at all behind a transaction that lasts."""
        told, until = None, time.monotonic() + timeout
        while True:
            users = shard.run(HOLDERS, LOCK, self.slot)
            # Do not wait for another mover while callers wait behind this one.
            if all(is_young for _, is_young, _ in users) and shard.one(
                    'SELECT pg_try_advisory_xact_lock(%s, %s)', MOVERS,
                    self.slot):
                try:
                    shard.run("SET LOCAL lock_timeout = '50ms'")
                    shard.run('SELECT pg_advisory_xact_lock(%s, %s)', LOCK,
                              self.slot)
                    shard.run('SET LOCAL lock_timeout = 0')
                    # If this mover is suspended now, all callers of the slot wait.
                    shard.run("SET LOCAL idle_in_transaction_session_timeout = '%ds'"
                              % DEAD_AFTER)
                    return
                except LockNotAvailable:
                    pass
            shard.rollback()
            if time.monotonic() > until:
                raise Failure(in_use(shard, self, LOCK))
            names = [name for name, is_young, _ in users if not is_young]
            if names and names != told:
                say('waiting for %s on %s' % (', '.join(names), shard.name))
                told = names
            time.sleep(0.1)

    # The rows

    def condition(self, shard, column):
        """The condition for its rows, in a table with this column."""
        column = quoted(column)
        if not self.is_slot:
            return column + shard.literal(' = %s', self.scope)
        return shard.literal('idem_guard.slot({0}) = %s AND {0} <> ALL '
                             '(%s::text[])'.format(column), self.slot, self.own)

    def delete_rows(self, shard, limit=None):
        """Delete up to a limit of rows from each table.  Returns their number.  The
        caller holds the lock of the gate.  Since own_scopes() was called, another
        mover can have moved a scope of the slot here, whose rows remain."""
        total = 0
        for space, table, column, _ in shard.run(TABLES):
            name, condition = full_name(space, table), self.condition(
                shard, column)
            if self.is_slot:
                condition += ' AND %s NOT IN (SELECT scope FROM idem_guard.places ' \
                    "WHERE slot = %d AND state <> 'away')" % (
                        quoted(column), self.slot)
            if limit:
                condition = 'ctid = ANY (ARRAY(SELECT ctid FROM %s WHERE %s ' \
                    'LIMIT %d))' % (name, condition, limit)
            shard.run('DELETE FROM %s WHERE %s' % (name, condition))
            total += shard.cursor.rowcount
        return total

    def own_scopes(self, home):
        """The scopes of a slot that do not move with it, according to its home.
        Another shard can have a gate of a scope that follows its slot again."""
        return [scope for scope, in home.run(
            "SELECT scope FROM idem_guard.places WHERE slot = %s AND "
            "scope <> '' ORDER BY scope", self.slot)] if self.is_slot else []

    def own_of_slot(self):
        """The last argument of steps that compare or change the scopes of a slot"""
        return [self.own] if self.is_slot else []

    def look_at(self, home):
        self.own = self.own_scopes(home)
        home.rollback()


def in_use(shard, place, lock):
    holders = shard.run(HOLDERS, lock, place.slot)
    shard.rollback()
    ends = ['SELECT pg_terminate_backend(%d)' % pid
            for *_, pid in holders if pid]
    return '%s is still used on %s by %s%s' % (
        place.name, shard.name,
        ', '.join(name for name, *_ in holders) or 'a transaction that has ended',
        '\nIf it must end, run there: ' + '; '.join(ends) if ends else '')
