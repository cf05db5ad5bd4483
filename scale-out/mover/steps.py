"""
The protocol of a move, and of the way back.

Each step is a transaction on one shard, by a function of shard.sql that
compares the gate's state and epoch, and sets them.  test/models/gates.pml is
the model.  No step believes the map: the gates say where a place is.
"""

import time

import psycopg2

from .copying import copy, look, wait_for_messages
from .servers import DEAD_AFTER, Failure, say


class Deadline:

    def __init__(self, seconds):
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def is_over(self):
        return time.monotonic() > self.end

    @staticmethod
    def sleep(seconds):
        time.sleep(seconds)


class Move:

    def __init__(self, place, routers, shards, timeout):
        self.place, self.routers, self.shards = place, routers, shards
        self.timeout = timeout
        self.gates, self.silent = {}, {}

    def survey(self):
        """The gates on all shards that answer."""
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
        hint, _ = self.place.hint(self.routers[0])
        found = [(gate.epoch, number == hint, number)
                 for number, gate in self.gates.items() if gate.state == state]
        return max(found)[2] if found else None

    def interrupted(self):
        """The shard that it is leaving."""
        number = self.highest('leaving')
        if number is None:
            raise Failure(self.nowhere())
        if not self.gates[number].is_own:
            raise Failure('slot %d, which it is in, is being moved'
                          % self.place.slot)
        return number

    def home(self):
        """The shard whose gate is open, or None."""
        number = self.highest('open')
        hint, epoch = self.place.hint(self.routers[0])
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
    # There
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
                raise Failure('%s is being moved to shard %d: go on with that, '
                              'or use --back' % (self.place.name,
                                                 self.gates[origin].peer))
        source, target = self.shards[origin], self.shards[to]
        tables = look(source, target)
        self.check_scopes(origin, to)
        if is_new:
            # Nobody is refused while they are not delivered.
            wait_for_messages(source, self.place, Deadline(self.timeout), True)
        epoch = self.next_epoch(source, target)
        try:
            opened = self.reserve(target, epoch)
            self.close(source, origin, to, epoch, opened)
            wait_for_messages(source, self.place, Deadline(self.timeout))
            self.open(source, target, tables, epoch)
        except BaseException:
            self.undo(origin, to, epoch)
            raise
        self.place.set_hint(self.routers, to, None, epoch)
        say('%s lives on shard %d now.' % (self.place.name, to))
        self.clear(origin, epoch)

    def check_scopes(self, origin, to):
        """A slot waits for its scopes that are on the way."""
        if not self.place.is_slot:
            return
        for number, state in ((origin, 'leaving'), (to, 'arriving')):
            rows = self.shards[number].run(
                "SELECT scope, coalesce(peer, %s) FROM idem_guard.places WHERE "
                "slot = %s AND scope <> '' AND state = %s LIMIT 1", to,
                self.place.slot, state)
            self.shards[number].rollback()
            for scope, peer in rows:
                raise Failure('scope "%s", which is in it, is being moved to '
                              'shard %d: go on with that first, or use --back '
                              'for it' % (scope, peer))

    def next_epoch(self, source, target):
        """Above all that is known of this place."""
        epochs = [self.place.hint(self.routers[0])[1]]
        for shard in (source, target):
            epochs.append(shard.one('SELECT idem_guard.highest_epoch(%s)',
                                    self.place.slot))
            shard.rollback()
        return max(epochs) + 1

    def reserve(self, target, epoch):
        opened = self.place.step(target, 'reserve', epoch, timeout=self.timeout)
        self.place.delete_rows(target)      # what an earlier move has left
        target.commit()
        return opened

    def close(self, source, origin, to, epoch, opened):
        deadline = Deadline(self.timeout)
        self.place.lock_users_out(source, deadline)
        self.place.step(source, 'close', epoch, to, opened, timeout=1)
        # Routers ask to wait rather than to look elsewhere.  The slot is locked,
        # so a map that is locked is not waited for.
        self.place.set_hint(self.routers, origin, to, epoch, 5)
        source.commit()
        say('%s: gate of %s closed' % (self.place.name, source.name))

    def open(self, source, target, tables, epoch):
        gate = self.place.gate(source)
        if (gate.state, gate.epoch) != ('leaving', epoch):
            raise Failure('another move of %s came first' % self.place.name)
        total = copy(source, target, tables, self.place)
        self.place.step(target, 'open_here', epoch,
                        *([self.place.own_scopes(source)]
                          if self.place.is_slot else []), timeout=self.timeout)
        source.rollback()
        target.commit()
        say('%s: %d rows copied to %s' % (self.place.name, total, target.name))

    #
    # And back
    #

    def undo(self, origin, to, epoch):
        """After an error, of which the caller tells."""
        sessions = ['SELECT pg_terminate_backend(%d) on %s' % (
            server.pid, server.name) for server in self.shards.servers.values()]
        try:
            self.shards.disconnect()        # they may be dead, and not know it
            for router in self.routers:
                router.rollback()
            gate = self.place.gate(self.shards[origin])
            if gate.state == 'open':
                # Not closed yet: what was reserved is given up.
                if self.place.gate(self.shards[to]).epoch == epoch:
                    self.refuse(to, epoch)
                self.place.put_right(self.routers, self.shards[origin], origin)
                say('%s stays on shard %d.' % (self.place.name, origin))
            elif (gate.state, gate.epoch) == ('leaving', epoch):
                self.back(False)
        except (Failure, psycopg2.Error) as error:
            say('warning: it is not undone: %s\nSessions of this move that '
                'are cut off end, and let go their locks, within %d s. To end '
                'them at once, run %s.' % (
                    str(error).strip(), DEAD_AFTER + 2, ', '.join(sessions)))

    def back(self, is_lost):
        self.survey()
        home = self.home()
        if home is not None:
            origin = self.highest('leaving')
            if origin is not None and self.gates[origin].peer == home:
                say('%s has arrived on shard %d, and cannot go back but by a '
                    'move.' % (self.place.name, home))
            else:
                say('%s is not being moved: it lives on shard %d.'
                    % (self.place.name, home))
            self.settle(home, True)
            return
        origin = self.interrupted()
        epoch, peer = self.gates[origin].epoch, self.gates[origin].peer
        if not is_lost:
            self.refuse(peer, epoch)
        source = self.shards[origin]
        epoch = self.place.step(source, 'reopen', epoch, timeout=self.timeout)
        source.commit()
        self.place.set_hint(self.routers, origin, None, epoch)
        say('%s stays on shard %d.' % (self.place.name, origin))

    def refuse(self, number, epoch):
        """Nobody opens it there at this epoch any more."""
        target = self.shards[number]
        if self.place.step(target, 'refuse', epoch, timeout=self.timeout):
            self.place.delete_rows(target)
        target.commit()

    #
    # What has been left
    #

    def settle(self, home, is_back=False):
        """With an open gate: the maps, and what interrupted moves have left."""
        gate, failures = self.gates[home], list(self.silent.values())
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
                    if is_back:
                        self.refuse(number, other.epoch)
                elif self.place.has_gate(self.shards[number]):
                    self.clear(number, gate.epoch)
            except (Failure, psycopg2.Error) as failure:
                failures.append('rows may be left on shard %d: %s' % (
                    number, str(failure).strip()))
        if failures:
            raise Failure('\n'.join(failures))

    def clear(self, number, home_epoch):
        """Deletes its rows on a shard that it has left."""
        shard = self.shards[number]
        self.place.step(shard, 'clear', home_epoch, timeout=self.timeout)
        total = self.place.delete_rows(shard)
        shard.commit()
        if total:
            say('%d rows deleted on %s' % (total, shard.name))
