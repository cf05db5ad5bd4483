"""A router's map, made from the gates."""

from .servers import say


def refresh(router, gates):
    """Set the map's row of each place that is open, unless the map knows a later
    move, and delete those of scopes that follow their slot.  gates: of each shard,
    slot, scope, state and epoch."""
    opened = {}
    for number, rows in gates.items():
        for slot, scope, state, epoch in rows:
            if state == 'open' and epoch > opened.get((slot, scope), (0, 0))[1]:
                opened[slot, scope] = number, epoch
    changed = 0
    # The rows of slots come first, as in idem_map.find().
    for (slot, scope), (number, epoch) in sorted(
            opened.items(), key=lambda item: (item[0][1], item[0][0])):
        table, column, key = ('idem_map.scopes', 'scope', scope) if scope else (
            'idem_map.slots', 'slot', slot)
        router.run(
            'INSERT INTO {0} AS m ({1}, shard, epoch) VALUES (%s, %s, %s) ON '
            'CONFLICT ({1}) DO UPDATE SET shard = EXCLUDED.shard, moving_to = '
            'NULL, epoch = EXCLUDED.epoch WHERE m.epoch <= EXCLUDED.epoch AND '
            '(m.shard <> EXCLUDED.shard OR m.moving_to IS NOT NULL OR m.epoch < '
            'EXCLUDED.epoch)'.format(table, column), key, number, epoch)
        changed += router.cursor.rowcount
    own = [scope for _, scope in opened if scope]
    router.run('DELETE FROM idem_map.scopes AS m USING idem_map.slots AS s '
               'WHERE s.slot = idem_map.slot(m.scope) AND m.scope <> ALL '
               '(%s::text[]) AND m.epoch <= s.epoch', own)
    changed += router.cursor.rowcount
    router.commit()
    say('%s: %d entries changed' % (router.name, changed))
