"""
The protocol of a move, and of the way back

Each step is a transaction on one shard, by a function of shard.sql that
compares the gate's state and epoch, and sets them.  test/models/gates.pml and
scopes.pml are the models.  No step trusts the map: the gates say where a place is.
"""

import psycopg2

from .copying import copy, look, wait_for_messages
from .replication import (CUT_OVER, Replica, drop_subscriptions, first_line,
                          obstacle, publications, sweep)
from .servers import DEAD_AFTER, Failure, say

# The number of rows of a table that one transaction deletes after a move
BATCH = 20000


class Move:

    def __init__(self, place, routers, shards, timeout, must_copy=False):
        self.place, self.routers, self.shards = place, routers, shards
        self.timeout, self.must_copy = timeout, must_copy
        self.gates, self.silent = {}, {}

    def survey(self):
        """Read the gates of all shards that answer."""
        self.gates, self.silent = {}, {}
        for number in self.shards:
            try:
                shard = self.shards[number]
                shard.rollback()
                if shard.run("SELECT 1 WHERE to_regclass('idem_guard.places') "
                             'IS NOT NULL'):
                    self.gates[number] = self.place.gate(shard)
                shard.rollback()
            except (Failure, psycopg2.Error) as failure:
                self.silent[number] = str(failure).strip()

    def highest(self, state):
        """The shard whose gate is in this state, of the highest epoch."""
        hint, _ = self.hint()
        found = [(gate.epoch, number == hint, number)
                 for number, gate in self.gates.items() if gate.state == state]
        return max(found)[2] if found else None

    def hint(self):
        """Of the first router.  After an error, there can be none."""
        return self.place.hint(self.routers[0]) if self.routers else (None, 0)

    def interrupted(self):
        """The shard that the place is leaving.  Raises Failure if there is none."""
        number = self.highest('leaving')
        if number is None:
            raise Failure(self.nowhere())
        if not self.gates[number].is_own:
            raise Failure('its slot %d is being moved' % self.place.slot)
        return number

    def home(self):
        """The shard whose gate is open, or None.  Raises Failure if the shard that
        the map names does not answer, and can have it."""
        number = self.highest('open')
        hint, epoch = self.hint()
        if hint in self.silent and (
                number is None or self.gates[number].epoch < epoch):
            raise Failure(self.silent[hint])
        return number

    def nowhere(self):
        silent = '\n'.join(self.silent.values())
        return ('no shard has its gate open for %s%s' % (
            self.place.name, '\n' + silent if silent else
            ': was one of them restored from a backup?'))

    #
    # The move
    #

    def there(self, to):
        self.survey()
        origin = self.home()
        if origin is not None and origin == to:
            say('%s lives on shard %d.' % (self.place.name, to))
            self.settle(to)
            return
        if self.gates.get(to, (None,))[0] == 'open':
            raise Failure('the gate of shard %d is open, too: close it with '
                          '--back first' % to)
        is_new = origin is not None
        if not is_new:
            origin = self.interrupted()
            if self.gates[origin].peer != to:
                raise Failure('%s is being moved to shard %d: continue that move, '
                              'or use --back' % (self.place.name,
                                                 self.gates[origin].peer))
        source, target = self.shards[origin], self.shards[to]
        tables = look(source, target)
        self.place.look_at(source)
        self.check_scopes(origin, to)
        why_not = 'so it was asked' if self.must_copy else obstacle(
            source, target)
        if not is_new and not why_not:
            # So that calls are not refused while the rows are copied again.
            self.back(False)
            self.survey()
        if is_new or not why_not:
            # So that calls are not refused while they are not delivered.
            wait_for_messages(source, self.place, self.timeout, True)
        epoch = self.next_epoch()
        try:
            opened = self.reserve(target, epoch)
            self.sweep(origin, epoch, to)       # of other moves
            replica = None
            if not why_not:
                replica, why_not = self.replicate(origin, to, tables, epoch)
            if replica:
                # Messages that were published during the copy
                wait_for_messages(source, self.place, self.timeout, True)
            else:
                say('Calls of %s are refused while all its rows are copied: %s.'
                    % (self.place.name, why_not))
            self.close(source, origin, to, epoch, opened, replica)
            # And messages since then: the relays are at work.
            wait_for_messages(source, self.place, min(self.timeout, CUT_OVER))
            self.open(source, target, tables, epoch, replica)
        except BaseException:
            self.undo(origin, to, epoch)
            raise
        self.place.set_hint(self.routers, to, None, epoch)
        say('%s lives on shard %d now.' % (self.place.name, to))
        self.sweep(origin, epoch, to)
        self.clear(origin, to, epoch)

    def check_scopes(self, origin, to):
        """Raises Failure while a scope of the slot is being moved."""
        if not self.place.is_slot:
            return
        for number, state in ((origin, 'leaving'), (to, 'arriving')):
            rows = self.shards[number].run(
                "SELECT scope, coalesce(peer, %s) FROM idem_guard.places WHERE "
                "slot = %s AND scope <> '' AND state = %s LIMIT 1", to,
                self.place.slot, state)
            self.shards[number].rollback()
            for scope, peer in rows:
                raise Failure('scope "%s" of this slot is being moved to shard %d: '
                              'continue that move first, or use --back for it'
                              % (scope, peer))

    def next_epoch(self):
        """Above all epochs of this place."""
        epochs = [self.place.last_epoch(router) for router in self.routers]
        for number in self.gates:
            shard = self.shards[number]
            epochs.append(shard.one('SELECT idem_guard.highest_epoch(%s)',
                                    self.place.slot))
            shard.rollback()
        return max(epochs) + 1

    def reserve(self, target, epoch):
        opened = self.place.step(target, 'reserve', epoch, timeout=self.timeout)
        self.empty(target)              # rows of an earlier move
        target.commit()
        return opened

    def empty(self, shard):
        """Delete all rows, in a transaction that holds the lock of the gate."""
        drop_subscriptions(shard, self.place)
        self.place.delete_rows(shard)

    def replicate(self, origin, to, tables, epoch):
        """Returns the replica once it has nearly all rows of the source, or the
        reason why there is none."""
        source, target = self.shards[origin], self.shards[to]
        replica = Replica(source, target, self.place, tables, epoch, to)
        try:
            replica.start(self.shards.strings[origin], self.timeout)
        except psycopg2.OperationalError as error:
            target.rollback()
            self.sweep(origin, epoch, to)
            return None, '%s cannot replicate from %s (%s)' % (
                target.name, source.name, first_line(error))
        say('%s: copying while it is in use' % self.place.name)
        replica.wait_until_close(self.timeout)
        return replica, None

    def close(self, source, origin, to, epoch, opened, replica):
        for router in self.routers:         # Is it there?
            router.one('SELECT 1')
            router.rollback()
        source.wait_for_standbys(self.timeout)      # So that they have it at once.
        self.place.lock_users_out(source, self.timeout)
        self.place.step(source, 'close', epoch, to, opened, *self.place.own_of_slot(),
                        timeout=1)
        if replica:
            replica.check_slot()
            replica.mark()
        source.commit()
        # From now on, routers raise 55P03.  No map is ahead of the gates, and callers
        # of the slot do not wait for a router.
        self.place.set_hint(self.routers, origin, to, epoch, 5)
        say('%s: gate of %s closed' % (self.place.name, source.name))

    def open(self, source, target, tables, epoch, replica):
        gate = self.place.gate(source)
        if (gate.state, gate.epoch) != ('leaving', epoch):
            raise Failure('another move of %s has overtaken this one' % self.place.name)
        if replica:
            replica.wait_for_the_rest()
        else:
            total = copy(source, target, tables, self.place)
        # A standby that is promoted must not open the old gate again.
        source.wait_for_standbys(CUT_OVER)
        self.place.step(target, 'open_here', epoch, *self.place.own_of_slot(),
                        timeout=self.timeout)
        if replica:
            replica.finish()
        source.rollback()
        target.commit()
        if not replica:
            say('%s: %d rows copied to %s' % (self.place.name, total,
                                              target.name))

    #
    # The way back
    #

    def undo(self, origin, to, epoch):
        """After an error, which the caller reports."""
        sessions = ['SELECT pg_terminate_backend(%d) on %s' % (
            server.pid, server.name) for server in self.shards.servers.values()]
        try:
            self.shards.disconnect()        # Connections can be dead.
            self.routers = [router for router in self.routers if router.is_there()]
            gate = self.place.gate(self.shards[origin])
            # Another mover can have the same epoch, and another target.
            if (gate.state, gate.epoch, gate.peer) == ('leaving', epoch, to):
                self.back(False)
                return
            # This move has not closed the gate.  Give up what it has reserved.
            if self.place.gate(self.shards[to])[:2] == ('arriving', epoch):
                self.refuse(to, epoch)
            self.sweep(origin, epoch)
            if gate.state == 'open':
                self.place.put_right(self.routers, self.shards[origin], origin)
                say('%s stays on shard %d.' % (self.place.name, origin))
        except (Failure, psycopg2.Error) as error:
            say('warning: the move is not undone: %s\nSessions of this move that '
                'are cut off end, and release their locks, within %d s. To end '
                'them at once, run %s.' % (
                    str(error).strip(), DEAD_AFTER + 2, ', '.join(sessions)))

    def back(self, is_lost):
        self.survey()
        home = self.home()
        if home is not None:
            origin = self.highest('leaving')
            if origin is not None and self.gates[origin].peer == home:
                say('%s has arrived on shard %d: to return it, move it again.'
                    % (self.place.name, home))
            else:
                say('%s is not being moved: it lives on shard %d.'
                    % (self.place.name, home))
            self.settle(home, True)
            return
        origin = self.interrupted()
        epoch, peer = self.gates[origin].epoch, self.gates[origin].peer
        source = self.shards[origin]
        self.place.look_at(source)
        if not is_lost:
            self.refuse(peer, epoch)
        epoch = self.place.step(source, 'reopen', epoch, timeout=self.timeout)
        source.commit()
        self.place.put_right(self.routers, source, origin)
        say('%s stays on shard %d.' % (self.place.name, origin))
        self.sweep(origin, epoch)

    def refuse(self, number, epoch):
        """From now on, no mover opens the gate there at this epoch."""
        target = self.shards[number]
        if self.place.step(target, 'refuse', epoch, timeout=self.timeout):
            self.empty(target)
        target.commit()

    #
    # The remains of a move
    #

    def settle(self, home, is_back=False):
        """Of a place with an open gate, correct the maps, and remove what
        interrupted moves have left."""
        gate, failures = self.gates[home], list(self.silent.values())
        used = []               # epochs of moves that can be under way
        self.place.look_at(self.shards[home])
        self.place.put_right(self.routers, self.shards[home], home)
        for number, other in self.gates.items():
            if number == home:
                continue
            try:
                if other.state == 'open':
                    self.place.step(self.shards[number], 'force', False,
                                    max(gate.epoch, other.epoch + 1))
                    self.shards[number].commit()
                    say('the gate of shard %d was open, too: it is closed now, '
                        'and nothing was deleted there' % number)
                elif other.state == 'arriving' and other.epoch > gate.epoch:
                    used.append(other.epoch)
                    if is_back:
                        self.refuse(number, other.epoch)
                        used.pop()
                elif self.place.has_gate(self.shards[number]):
                    self.clear(number, home, gate.epoch)
            except (Failure, psycopg2.Error) as failure:
                failures.append('rows may be left on shard %d: %s' % (
                    number, str(failure).strip()))
        # On all shards: a way back that failed can have refused a move, and a scope
        # that was leaving can have moved with its slot.
        last = max(other.epoch for other in self.gates.values()
                   if not used or other.epoch < min(used))
        for number in self.gates:
            try:
                self.sweep(number, last)
            except (Failure, psycopg2.Error) as failure:
                failures.append(str(failure).strip())
        if failures:
            raise Failure('\n'.join(failures))

    def sweep(self, number, epoch, to=None):
        """Drop what replication up to an epoch has left on a shard.  First end the
        moves that lead to other shards than "to", because a subscription without
        its publication would copy the rows of all places."""
        source = self.shards[number]
        published = publications(source, self.place, epoch)
        others = [other for other in self.gates if other != number]
        for other in others:
            gate = self.place.gate(self.shards[other])
            self.shards[other].rollback()
            if other != to and gate.state == 'arriving' and gate.is_own \
                    and gate.epoch <= epoch:
                self.refuse(other, epoch)
        # A shard that does not answer can still have its subscription.
        sweep(source, [self.shards[other] for other in others], self.place, epoch,
              [name for name, target in published if target not in self.silent])

    def clear(self, number, home, home_epoch):
        """Delete its rows on a shard that it has left, unless it has returned since
        this epoch."""
        shard, total, count = self.shards[number], 0, 1
        # If a standby is promoted there, it must have the rows.
        self.shards[home].wait_for_standbys(self.timeout)
        while count:
            self.place.step(shard, 'clear', home_epoch, timeout=self.timeout)
            drop_subscriptions(shard, self.place)
            count = self.place.delete_rows(shard, BATCH)
            shard.commit()
            total += count
        if total:
            say('%d rows deleted on %s' % (total, shard.name))
