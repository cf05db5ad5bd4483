"""
Random steps.  Few keys and many sessions, so that calls meet; an episode uses
some of the primitives only, so that they meet more often.
"""

from primitives import HOUR, MAX_RAISE, SECOND
from world import LIMIT_MS

SHORT = LIMIT_MS * 1000
SETTINGS = [('reuse', 0, 'week')] * 3 + [
    ('reject', 0, 'week'), ('reject', HOUR, 'none'), ('reuse', HOUR, 'none')]

KEYS = [('shop', 'key-0000000000-%d' % n) for n in (1, 2)] + \
    [('bank', 'key-0000000000-1')]
HASHES = [None, None, b'\x01' * 32, b'\x01' * 32, b'\x01' * 32, b'\x02' * 32]
TTLS = [None] * 6 + [HOUR, HOUR, 0]
LEASES = [None, None, 0, 2 * HOUR, 600 * SECOND]
WAITS = [None, None, 0] + 3 * [600 * SECOND]
TOKENS = ['current'] * 8 + ['none'] * 3 + ['stale', 'never', 'foreign']
TYPES = ['like', 'dislike', 'share']
ENTITIES = [('ann', 'post', '1'), ('ann', 'post', '2'), ('bob', 'post', '1')]
RAISES = [-5, 0, 1, 1000, MAX_RAISE + 1]
TOPICS = ['orders', 'mails']


# What is likely to have an effect on a record in this state.
FITTING = {
    None: ('claim',),
    'started': ('complete', 'complete', 'checkpoint', 'checkpoint',
                'fail_claim', 'heartbeat', 'resume'),
    'failed': ('claim', 'claim', 'lookup', 'erase', 'resume', 'resume'),
    'completed': ('claim', 'claim', 'erase'),
    'erased': ('claim',),
}


def claims(rng, world, tx):
    key = rng.choice(KEYS)
    token = rng.choice(TOKENS)
    kind = rng.choices(
        ('claim', 'complete', 'checkpoint', 'heartbeat', 'fail_claim',
         'release', 'lookup', 'forget', 'erase', 'resume'),
        (34, 14, 5, 5, 7, 6, 8, 1, 3, 8))[0]
    if rng.random() < 0.5:
        row = tx and tx.writes.get(('keys',) + key) or \
            world.model.latest(('keys',) + key)[1]
        kind = rng.choice(FITTING[row and row['state']])
    if kind in ('claim', 'complete') and rng.random() < 0.15:
        keys = rng.choices([k for scope, k in KEYS if scope == key[0]],
                           k=rng.randint(1, 4))
        if kind == 'claim':
            return 'claim_many', (key[0], keys, rng.choices(
                HASHES, k=len(keys)), rng.choice((None, None, HOUR)),
                rng.choice(LEASES))
        return 'complete_many', (
            key[0], keys, rng.choices((200, 402), k=len(keys)),
            rng.choices((None, 'text \u00fc', ''), k=len(keys)),
            rng.choices(TOKENS, k=len(keys)) if rng.random() < 0.3
            else [token] * len(keys))
    if kind == 'claim':
        wait = SHORT if rng.random() < 0.03 else rng.choice(WAITS)
        args = (key, rng.choice(HASHES), rng.choice(TTLS),
                rng.choice(LEASES), wait)
        if rng.random() < 0.5:
            return 'claim_stored', args + ('{"n": %d}' % rng.randint(0, 99),)
        return kind, args
    if kind == 'resume':
        return kind, (rng.choice((1, 2, 100, 100)), rng.choice(LEASES),
                      rng.choice((None, None, ['shop'], ['shop', 'bank',
                                                         'shop'])),
                      rng.choice((None, None, None, SHORT)))
    if kind == 'complete':
        body = rng.choice((None, 'text \u00fc', '', b'', b'\x00\xff\\'))
        return kind, (key, rng.choice((200, 402)), body,
                      rng.choice((None, '{"a":  1, "a": 2}')), token)
    if kind == 'fail_claim':
        return kind, (key, rng.choice((None, 'no', "it's")), token)
    if kind == 'checkpoint':
        return kind, (key, rng.choice(('begun', 'charged')),
                      rng.choice((None, '{"b" :1}')), rng.choice(LEASES),
                      token)
    if kind == 'heartbeat':
        return kind, (key, rng.choice(LEASES), token)
    if kind == 'release':
        return kind, (key, token)
    return kind, (key,)


def actions(rng, world, tx):
    entity = rng.choice(ENTITIES)
    # Mostly increasing, in a range that is used up within an episode.
    action_id = rng.randint(-2, 40)
    if rng.random() < 0.02:
        action_id = 9 * 10 ** 15
    kind = rng.choices(('act', 'advance', 'is_active', 'states',
                        'advance_many', 'set_many', 'forget_user'),
                       (8, 4, 3, 2, 2, 3, 1))[0]
    if kind == 'forget_user':
        return kind, (entity[0],)
    if kind == 'states':
        ids = [id for user, type, id in ENTITIES
               if (user, type) == entity[:2] and rng.random() < 0.8]
        return kind, (entity[0], entity[1], ids + ids[:1] + ['none'])
    if kind in ('advance_many', 'set_many'):
        n = rng.randint(1, 4)
        entities = rng.choices(ENTITIES, k=n)
        ids = [action_id] + [rng.randint(-2, 40) for i in range(n - 1)]
        if kind == 'advance_many':
            return kind, (entities, ids)
        return kind, (entities, rng.choices(TYPES, k=n),
                      rng.choices((True, True, False), k=n), ids)
    if kind == 'advance':
        return kind, (entity, action_id)
    if kind == 'is_active':
        return kind, (entity, rng.choice(TYPES))
    action_type = rng.choice(TYPES)
    excludes = rng.choice((None, None, [
        t for t in TYPES if t != action_type]))
    wanted = rng.choice((True, True, False, None))      # None: toggle
    if wanted is None:
        excludes = None
    return kind, (entity, action_type, wanted, action_id, excludes)


def sequences(rng, world, tx):
    aggregate, client = rng.choice('xxy'), rng.choice('12')
    if rng.random() < 0.1:
        return 'last_client_seq', (aggregate, client)
    return 'append', (aggregate, client, rng.randint(1, 14),
                      rng.choice((1, 1, 2, 3)),
                      rng.choice((None, None, None, rng.randint(0, 12))),
                      rng.random() < 0.6,
                      SHORT if rng.random() < 0.03 else rng.choice(WAITS))


def tokens(rng, world, tx):
    scope, ttl = 'form', rng.choice((None, None, None, HOUR, 0))
    if rng.random() < 0.15:
        return 'once_at', (scope, rng.choice('abcde'))
    if rng.random() < 0.6:
        return 'once', (scope, rng.choice('abcde'), ttl)
    return 'once_many', (scope, rng.choices('abcde', k=rng.randint(0, 4)),
                         ttl)


def outbox(rng, world, tx, published=8):
    kind = rng.choices(('publish', 'publish_many', 'take', 'ack', 'nack',
                        'requeue', 'extend', 'give_back'),
                       (5, 2, 9, 4, 6, 1, 4, 4))[0]
    number = rng.randrange(published)
    if kind == 'publish':
        return kind, (rng.choice(TOPICS), '{"n": %d}' % rng.randint(0, 99),
                      rng.choice((None, 'k', 'k', 'l')),
                      rng.choice((None, '{"h": true}')),
                      rng.choice((None, None, None, None, 0, HOUR)))
    if kind == 'publish_many':
        count = rng.choice((0, 1, 2, 3, 4))
        return kind, (rng.choice(([rng.choice(TOPICS)],
                                  rng.choices(TOPICS, k=count))),
                      ['{"n": %d}' % rng.randint(0, 99)
                       for n in range(count)],
                      rng.choice((None, rng.choices((None, 'k', 'k', 'l'),
                                                    k=count))),
                      rng.choice((None, rng.choices((None, '{"h": true}'),
                                                    k=count))),
                      rng.choice((None, None, None, None, 0, HOUR)))
    if kind == 'take':
        return kind, (rng.choice((1, 2, 100, 100)),
                      rng.choice((0, 0, HOUR)),
                      rng.choice((None, ['orders'], ['mails', 'orders',
                                                     'mails'])),
                      rng.choice((None, None, None, SHORT)))
    if kind == 'nack':
        return kind, (number, rng.choice((None, 'refused')),
                      rng.choice((None, 0, 0, 0, HOUR)),
                      rng.choice((None, None, 0, -1, 1)))
    idents = [rng.randrange(published) for n in range(rng.randint(1, 4))]
    if kind in ('extend', 'give_back'):
        attempts = rng.choice((None, [0], [0] * len(idents), rng.choices(
            (0, 0, -1, 1), k=len(idents))))
        lease = rng.choice((0, HOUR, 2 * HOUR)),
        return kind, (idents,) + lease * (kind == 'extend') + (attempts,)
    if kind == 'requeue' and rng.random() < 0.5:
        idents = None
    return kind, (idents,)


PRIMITIVES = [claims, claims, claims, actions, sequences, tokens, outbox]
AGES = {claims: (('keys', 'expires_at', (0, 2 * HOUR)),
                 ('keys', 'lease_expires_at', (0,)),
                 ('keys', 'lease_expires_at', (0,))),
        tokens: (('tokens', 'expires_at', (0,)),),
        outbox: (('outbox', 'available_at', (0,)),)}


def random_step(rng, world, primitives):
    """A step for the world as it is; it may yet make no sense."""
    if rng.random() < 0.05:
        kind = rng.choice(primitives)
        if kind in AGES:
            table, column, how_far = rng.choice(AGES[kind])
            return 'age', table, rng.randrange(4), column, rng.choice(how_far)
    chance = rng.random()
    if world.prepared and chance < 0.06:
        return rng.choice(('commit prepared', 'rollback prepared')),
    blocked = [n for n, s in enumerate(world.sessions) if s.blocked]
    if blocked and chance < 0.1:
        return 'cancel', rng.choice(blocked)
    if chance > 0.998:
        return 'terminate', rng.randrange(len(world.sessions))
    free = [n for n, s in enumerate(world.sessions) if not s.blocked]
    if not free:
        return 'commit prepared',
    number = rng.choice(free)
    tx = world.sessions[number].tx
    chance = rng.random()
    if tx is None and chance < 0.4:
        return ('begin', number,
                rng.choices(('rc', 'rr', 'ser'), (6, 3, 1))[0],
                rng.random() < 0.06)
    if tx is not None:
        name = rng.choice('ab')
        bounds = ((0.12, 'commit'), (0.17, 'rollback'), (0.20, 'prepare'),
                  (0.28, 'savepoint'), (0.34, 'rollback to'),
                  (0.37, 'release'))
        if tx.failed and chance < 0.9:
            return rng.choice((('commit', number), ('rollback', number),
                               ('rollback to', number, name)))
        for bound, kind in bounds:
            if chance < bound:
                return (kind, number, name) if kind in (
                    'savepoint', 'rollback to', 'release') else (kind, number)
    kind = rng.choice(primitives)
    chance = rng.random()
    name, args = ('cleanup', ()) if chance < 0.01 else \
        ('take_expired', ()) if chance < 0.02 else \
        ('raise_tokens', (rng.choice(RAISES),)) if chance < 0.025 else \
        kind(rng, world, tx)
    limit = rng.choice((None,) * 30 + ('lock_timeout', 'statement_timeout'))
    return 'call', number, name, args, limit
