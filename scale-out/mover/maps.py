"""A router's map, made from the gates."""

from .servers import say


def epochs(router):
    """The epochs of a map, by slot and scope"""
    found = {(slot, scope): epoch for slot, scope, epoch in router.run(
        "SELECT slot, '', epoch FROM idem_map.slots UNION ALL "
        'SELECT idem_map.slot(scope), scope, epoch FROM idem_map.scopes')}
    router.rollback()
    return found


def ahead(known, gates):
    """The entries of a map with an epoch above all gates of their places.  Each step
    of a move changes a gate before a map, so they are of moves that were lost."""
    states = {number: {(slot, scope): (state, epoch) for slot, scope, state, epoch
                       in rows} for number, rows in gates.items()}
    found = {}
    for (slot, scope), epoch in known.items():
        of_place = [of_shard.get((slot, scope), of_shard.get((slot, ''), ('away', 0)))
                    for of_shard in states.values()]
        if all(state == 'arriving' or other < epoch for state, other in of_place):
            found[slot, scope] = epoch
    return found


def refresh(router, gates, known):
    """Set the map's row of each place that is open, unless the map knows a later
    move, and delete those of scopes that follow their slot.  gates: of each shard,
    slot, scope, state and epoch.  known: the map's epochs before these were read."""
    opened, lost = {}, ahead(known, gates)
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
            'NULL, epoch = EXCLUDED.epoch WHERE (m.epoch <= EXCLUDED.epoch OR '
            'm.epoch = %s) AND (m.shard <> EXCLUDED.shard OR m.moving_to IS NOT '
            'NULL OR m.epoch <> EXCLUDED.epoch)'.format(table, column), key, number, epoch,
            lost.get((slot, scope)))
        changed += router.cursor.rowcount
    own = [scope for _, scope in opened if scope]
    router.run('DELETE FROM idem_map.scopes AS m USING idem_map.slots AS s '
               'WHERE s.slot = idem_map.slot(m.scope) AND m.scope <> ALL '
               '(%s::text[]) AND m.epoch <= s.epoch', own)
    changed += router.cursor.rowcount
    used = {scope for rows in gates.values() for _, scope, state, _ in rows
            if state in ('open', 'leaving')}
    for (_, scope), epoch in lost.items():
        if scope and scope not in used:
            router.run('DELETE FROM idem_map.scopes WHERE scope = %s AND epoch = %s',
                       scope, epoch)
            changed += router.cursor.rowcount
    router.commit()
    say('%s: %d entries changed' % (router.name, changed))
