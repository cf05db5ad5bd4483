"""Where all places are, and the load of each."""

import time

from .places import LOCK, TABLES, full_name, quoted
from .servers import Failure

# Tables with more rows are sampled.
COUNTED = 1000000

ROWS = '''
SELECT idem_guard.slot(t.{column}), coalesce(p.scope, ''), count(*)
FROM {table} AS t {sample}
LEFT JOIN idem_guard.places AS p
	ON p.slot = idem_guard.slot(t.{column}) AND p.scope = t.{column}
GROUP BY 1, 2
'''


class Census:
    """The gates of all shards, at one time.  A shard that does not answer is an
    error, because a place can be there."""

    def __init__(self, shards):
        self.shards, self.gates = shards, {}
        for number in shards:
            self.gates[number] = {
                (slot, scope): state for slot, scope, state in
                shards[number].run('SELECT slot, scope, state FROM '
                                   'idem_guard.places')}
            shards[number].rollback()

    def homes(self):
        """The shard of each place that has an open gate."""
        return {place: number for number, gates in self.gates.items()
                for place, state in gates.items() if state == 'open'}

    def unfinished(self):
        """The places whose moves have not ended."""
        return sorted({place for gates in self.gates.values()
                       for place, state in gates.items()
                       if state in ('leaving', 'arriving')})

    def rows(self):
        """The number of rows of each place, estimated for large tables."""
        found = dict.fromkeys(self.homes(), 0)
        for number in self.shards:
            shard = self.shards[number]
            for space, table, column, _ in shard.run(TABLES):
                name = full_name(space, table)
                size = shard.one('SELECT reltuples FROM pg_class WHERE oid = '
                                 '%s::regclass', name)
                share = min(1, COUNTED / max(size, 1))
                for slot, scope, count in shard.run(ROWS.format(
                        table=name, column=quoted(column),
                        sample='' if share == 1 else
                        'TABLESAMPLE SYSTEM (%f)' % (100 * share))):
                    if self.gates[number].get((slot, scope)) == 'open':
                        found[slot, scope] += int(count / share)
            shard.rollback()
        return found

    def calls(self, seconds):
        """How often a call had pinned each slot, in samples over some seconds.  A
        scope with a place of its own shares the figure of its slot."""
        homes, seen = self.homes(), {}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for number in self.shards:
                for slot, count in self.shards[number].run(
                        'SELECT l.objid, count(*) FROM pg_locks AS l WHERE '
                        "l.locktype = 'advisory' AND l.classid = %s AND "
                        "l.mode = 'ShareLock' GROUP BY 1", LOCK):
                    key = number, int(slot)
                    seen[key] = seen.get(key, 0) + count
                self.shards[number].rollback()
            time.sleep(0.02)
        if not seen:
            raise Failure('no calls were made within %d s: use --by rows' % seconds)
        found = {}
        for (slot, scope), number in homes.items():
            near = [place for place in homes
                    if place[0] == slot and homes[place] == number]
            found[slot, scope] = seen.get((number, slot), 0) / len(near)
        return found
