"""
Deeds of a client with user actions, client sequences, tokens and messages.
"""

from client import LEVELS, Refused
from deeds import LEASES, TTLS, publish, publish_many

POOL = 2000                 # so many serials share their entities and lanes
BATCH = 20


def pooled_name(client, kind, count):
    return '%012d-%s%d' % (client.serial() // POOL * POOL, kind,
                           client.rng.randrange(count))


#
# User actions
#

def act(client):
    kind = client.rng.choice(('advance', 'set', 'toggle'))
    entity = pooled_name(client, 'entity', 12)
    action_id = client.serial()
    if client.chance(0.1):
        action_id -= client.rng.randrange(100)      # maybe used already
    active = client.rng.random() < 0.6
    action_type = client.rng.choice(('like', 'dislike')) if kind == 'set' \
        else 'like'
    client.until(act_once, kind, entity, action_type, action_id, active)


def act_once(client, kind, entity, action_type, action_id, active):
    other = 'dislike' if action_type == 'like' else 'like'
    client.begin(client.rng.choice(LEVELS))
    if kind == 'advance':
        # By itself, or in a batch of one.
        processed, last = client.query(client.rng.choice((
            "SELECT * FROM idem_try_advance('user', %s, %s, %s)",
            """SELECT should_process, last_action_id
               FROM idem_try_advance_many('{user}', ARRAY[%s], ARRAY[%s],
                    ARRAY[%s])""")), kind, entity, action_id)[0]
    elif kind == 'set':
        _, last, processed = client.query(
            "SELECT * FROM idem_set('user', %s, %s, %s, %s, %s, %s)",
            kind, entity, action_type, active, action_id, [other])[0]
    else:
        active, last, processed = client.query(
            "SELECT * FROM idem_toggle('user', %s, %s, %s, %s)",
            kind, entity, action_type, action_id)[0]
    if not processed:
        client.check(last >= action_id, entity, 'is not stale at', action_id,
                     'after', last)
        client.commit()
        client.tell('acted', kind, entity, last)
        return True
    client.check(last == action_id, entity, 'went to', last)
    client.query('''INSERT INTO actions (entity_type, entity_id, action_type,
                                         action_id, active)
                    VALUES (%s, %s, %s, %s, %s)''',
                 kind, entity, action_type, action_id, active)
    if client.chance(0.05):
        client.roll_back()
        return False
    client.commit()
    client.tell('acted', kind, entity, action_id)
    return True


def act_on_many(client):
    """On several entities at once, some of them twice."""
    entities = [pooled_name(client, 'entity', 12)
                for _ in range(client.rng.choice((1, 3, 6)))]
    ids = [client.serial() for _ in entities]
    actives = [client.rng.random() < 0.6 for _ in entities]
    client.until(act_on_many_once, 'user', 'many', entities, actives, ids)


def act_on_many_once(client, user, kind, entities, actives, ids):
    if user == 'user':
        client.begin(client.rng.choice(LEVELS))
    else:
        client.begin()
    results = client.query(
        '''SELECT is_active, last_action_id, processed FROM idem_set_many(
               ARRAY[%s], ARRAY[%s], %s::text[], '{like}', %s::boolean[],
               %s::bigint[]) ORDER BY ordinal''',
        user, kind, entities, actives, ids)
    expected = {}
    for entity, active, action_id, (now, last, processed) in zip(
            entities, actives, ids, results):
        client.check((now, last) == (active, action_id) if processed
                     else last >= action_id, entity, action_id, 'is', now,
                     last, processed)
        if processed:
            expected[entity] = entity, 'like', active, action_id
            client.query('''INSERT INTO actions (entity_type, entity_id,
                                action_type, action_id, active)
                            VALUES (%s, %s, 'like', %s, %s)''',
                         kind, entity, action_id, active)
    # What was cleared and never set has no row.
    found = client.query('SELECT * FROM idem_action_states(%s, %s, %s)',
                         user, kind, list(expected))
    client.check(all(row == expected[row[0]] for row in found) and
                 {row[0] for row in found} >=
                 {entity for entity in expected if expected[entity][2]},
                 user, 'has', found, 'and not', expected)
    if client.chance(0.05):
        client.roll_back()
        return False
    client.commit()
    if user == 'user':
        for entity, (_, last, processed) in zip(entities, results):
            client.tell('acted', kind, entity, last)
    return True


def act_as_leaver(client):
    """A user who may leave at any time."""
    user = pooled_name(client, 'leaver', 3)
    entities = ['%s-%d' % (user, client.rng.randrange(4)) for _ in range(3)]
    client.until(act_on_many_once, user, 'leaver', entities,
                 [client.rng.random() < 0.6 for _ in entities],
                 [client.serial() for _ in entities])


def leave(client):
    client.until(leave_once, pooled_name(client, 'leaver', 3))


def leave_once(client, user):
    """A counter that is there afterwards is one that came meanwhile."""
    client.begin()
    deleted = client.value('SELECT idem_forget_user(%s)', user)
    gone = client.query(
        '''DELETE FROM actions AS a
           WHERE entity_type = 'leaver' AND entity_id LIKE %s || '-%%'
             AND NOT EXISTS (SELECT FROM idem_action_versions AS v
                             WHERE v.user_id = %s
                               AND v.entity_type = 'leaver'
                               AND v.entity_id = a.entity_id)
           RETURNING entity_id''', user, user)
    client.check(deleted >= len(set(gone)), user, 'had', gone,
                 'of which are deleted', deleted)
    if client.chance(0.1):
        client.roll_back()
        return False
    nonce = client.nonce()
    client.query('INSERT INTO leavers VALUES (%s, %s)', user, nonce)
    client.commit()
    client.tell('left', user, nonce)
    return True


#
# Client sequences
#

def append(client):
    """Some events of this client, of which a retry may send more."""
    aggregate = pooled_name(client, 'aggregate', 4)
    first = client.sequences.get(aggregate, 0) + 1
    batch = [first, client.rng.choice((1, 1, 2, 5))]

    def lost():
        if client.chance(0.3):
            batch[1] += 2
    client.until(append_once, aggregate, 'client%d' % client.number, batch,
                 lost=lost)


def append_as_twin(client):
    """Several writers of the same sequence, as after a failover."""
    aggregate = pooled_name(client, 'aggregate', 4)
    client.until(append_twin_once, aggregate)


def append_twin_once(client, aggregate):
    last = client.value("SELECT idem_last_client_seq(%s, 'twins')", aggregate)
    return append_once(client, aggregate, 'twins', [last + 1, 1])


def append_once(client, aggregate, client_id, batch):
    first, count = batch
    expected = None
    client.begin(client.rng.choice(LEVELS))
    if client.chance(0.2):
        found = client.query('SELECT version FROM idem_aggregates '
                             'WHERE aggregate = %s', aggregate)
        expected = found[0][0] if found else 0
    outcome, last, version = client.query(
        'SELECT * FROM idem_try_append(%s, %s, %s, %s, %s, false)',
        aggregate, client_id, first, count, expected)[0]
    if outcome == 'appended':
        client.check(last == first + count - 1, aggregate, client_id, batch,
                     'went to', last)
        client.query(
            '''INSERT INTO events
               SELECT %s, %s - %s + i, %s, %s + i - 1
               FROM generate_series(1, %s) AS i''',
            aggregate, version, count, client_id, first, count)
        if client.chance(0.05):
            client.roll_back()
            return False
    client.commit()
    if outcome == 'overlap':
        client.check(first <= last < first + count - 1,
                     aggregate, client_id, batch, 'overlaps with', last)
        batch[:] = [last + 1, count - (last + 1 - first)]
        return False
    if outcome in ('in_flight', 'version_conflict'):
        return False
    client.check(outcome in ('appended', 'duplicate') and
                 last >= first + count - 1, aggregate, client_id, batch,
                 outcome, last)
    client.tell('appended', aggregate, client_id, last)
    if client_id != 'twins':
        client.sequences[aggregate] = last
    return True


#
# Tokens
#

def do_once(client):
    tokens = [client.shared_name('token')]
    if client.chance(0.3):
        tokens += [client.shared_name('token'), tokens[0]]
    client.until(do_tokens_once, 'inbox', tokens, None)


def do_once_briefly(client):
    token = 'brief-token-%06d' % client.rng.randrange(150)
    client.until(do_tokens_once, 'brief', [token], client.rng.choice(TTLS))


def do_tokens_once(client, scope, tokens, ttl):
    client.begin()
    if len(tokens) == 1:
        first = tokens if client.value(
            'SELECT idem_once(%s, %s::text, %s)', scope, tokens[0], ttl) \
            else []
    else:
        first = [token for token, in client.query(
            'SELECT idem_once_many(%s, %s::text[], %s)', scope, tokens, ttl)]
    client.query('''INSERT INTO effects (scope, token, expires_at)
                    SELECT scope, token, expires_at FROM idem_tokens
                    WHERE scope = %s AND token = ANY (%s::text[])''',
                 scope, first)
    if first and client.chance(0.03):
        client.prepare()
        return False
    if client.chance(0.05):
        client.roll_back()
        return False
    client.commit()
    for token in tokens:
        client.tell('effect', scope, token)
    return True


#
# Messages
#

def send(client):
    client.until(send_once, pooled_name(client, 'lane', 8))


def send_once(client, lane):
    # The lane's row is locked, so that seq is the order of the commits.
    client.begin()
    count = client.rng.choice((1, 1, 4))
    seq = client.value('''INSERT INTO lanes VALUES (%s, %s)
                          ON CONFLICT (lane) DO UPDATE
                          SET seq = lanes.seq + EXCLUDED.seq
                          RETURNING seq''', lane, count)
    if count == 1:
        messages = [publish(client, lane, seq)]
    else:
        messages = publish_many(client, lane,
                                list(range(seq - count + 1, seq + 1)))
    if client.chance(0.1):
        client.roll_back()
        return False
    client.commit()
    for message in messages:
        client.tell('published', message)
    return True


def relay(client):
    client.until(relay_once)


def relay_once(client):
    """Take, deliver, acknowledge; but never deliver beyond a failure."""
    messages = client.query(
        '''SELECT id, message_id::text, message_key,
                  (payload ->> 'serial')::bigint, (payload ->> 'seq')::bigint,
                  attempt
           FROM idem_outbox_take(%s, %s, wait => %s)''',
        client.rng.choice((1, 5, BATCH)), client.rng.choice(LEASES),
        client.rng.choice((None, None, '50 ms')))
    done = [message[0] for message in messages]
    if client.wrong == 'ack-first':
        client.query('SELECT idem_outbox_ack(%s)', done)
    for number, message in enumerate(messages):
        rest = [m[0] for m in messages[number:]]
        attempts = [m[-1] for m in messages[number:]]
        if client.chance(0.02):
            # Not this one, nor what comes after it.
            client.query("SELECT idem_outbox_nack(%s, 'no', '20 ms', %s)",
                         message[0], message[-1])
            client.query('SELECT idem_outbox_release(%s, %s)', rest[1:],
                         attempts[1:])
            done = done[:number]
            break
        if client.chance(0.05) and client.query(
                'SELECT idem_outbox_extend(%s, %s, %s)', rest,
                client.rng.choice(LEASES), attempts) != [(n,) for n in rest]:
            # Another relay has some of them.
            done = done[:number]
            break
        if client.chance(0.01):
            return True             # the relay dies
        deliver(client, message)
    if done:
        client.query('SELECT idem_outbox_ack(%s)', done)
        client.tell('acked', *done)
    return True


def deliver(client, message):
    """To the consumer, who applies each message once."""
    while True:
        try:
            client.begin()
            if client.value("SELECT idem_once('consumer', %s::text)",
                            message[1]):
                client.query('''INSERT INTO applied (message_id, lane, serial,
                                                     seq)
                                VALUES (%s, %s, %s, %s)''', *message[1:5])
            client.commit()
            return
        except Refused as refused:
            client.roll_back_after_error()
            if refused.args[0] != '55P03':
                raise


OTHER_DEEDS = {act: 15, act_on_many: 4, act_as_leaver: 4, leave: 3,
               append: 7, append_as_twin: 7, do_once: 10, do_once_briefly: 6,
               send: 12, relay: 14}
