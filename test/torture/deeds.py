"""
Deeds of a client with request keys: the three ways to use them.

A deed is tried until it returns True: the client has its verdict.  Those of
client.wrong are mistakes that the oracles must find.
"""

import hashlib
import time

import psycopg2

from client import LEVELS, Lost, Refused, resolve

TTLS = ('300 ms', '700 ms', '1500 ms')
LEASES = ('30 ms', '60 ms', '150 ms')
CLAIM_IS_LOST = ('ID003', 'ID004')


#
# In one transaction: claim, order, completion
#

def pay(client):
    key = client.shared_name('pay')
    place = [key, key]              # the intent, and its key

    def lost():
        if client.wrong == 'new-key':
            place[1] = '%s-%s' % (key, client.nonce())
    client.until(pay_once, place, 'shop', lost=lost)


def pay_briefly(client):
    """A key that is soon forgotten, cleaned up and used again."""
    key = 'brief-key-%06d' % client.rng.randrange(150)
    client.until(pay_once, (key, key), 'brief')


def pay_once(client, place, scope):
    rng = client.rng
    intent, key = place
    client.begin(rng.choice(LEVELS))
    if client.chance(0.03):
        claim_in_savepoint(client, scope, key)
    claim = client.claim(
        scope, key, hashlib.sha256(key.encode()).digest(),
        ttl=rng.choice(TTLS) if scope == 'brief' else None,
        wait=rng.choice((None, '20 ms', '100 ms')))
    if claim.outcome == 'replay':
        client.commit()
        client.tell('response', key, claim.response)
        return True
    if claim.outcome == 'in_progress':
        client.roll_back()
        return False
    client.check(claim.outcome == 'new', key, claim)

    response = write_order(client, intent, scope, key, claim)
    if client.wrong == 'early-answer':
        client.tell('response', key, response)
    client.check(complete(client, scope, key, response) is True,
                 key, 'was not completed')
    message = publish(client, None, 0) if client.chance(0.2) else None
    if client.chance(0.03):
        client.prepare()
        return False
    if client.chance(0.04):
        client.roll_back()
        return False
    client.commit()
    client.tell('response', key, response)
    if message:
        client.tell('published', message)
    return True


def pay_many(client):
    """Several requests at once, until all of them have been answered."""
    keys = list({client.shared_name('many'): None for _ in
                 range(client.rng.choice((2, 3, 5)))})
    client.rng.shuffle(keys)
    client.until(pay_many_once, keys)


def pay_many_once(client, keys):
    client.begin(client.rng.choice(LEVELS))
    claims = dict(zip(keys, client.claim_many('shop', keys)))
    responses = {key: claim.response for key, claim in claims.items()
                 if claim.outcome == 'replay'}
    ours = [key for key in claims if claims[key].outcome == 'new']
    for key in ours:
        responses[key] = write_order(client, key, 'shop', key, claims[key])
    client.rng.shuffle(ours)
    client.check(client.query(
        '''SELECT key, completed FROM idem_complete_many('shop', %s::text[],
               '{201}', %s::text[], claim_tokens => %s::bigint[])
           ORDER BY ordinal''',
        ours, [responses[key] for key in ours],
        client.rng.choice((None, [claims[key].claim_token for key in ours]))
        if ours else None) == [(key, True) for key in ours],
        ours, 'were not completed')
    if client.chance(0.04):
        client.roll_back()
        return False
    client.commit()
    for key, response in responses.items():
        client.tell('response', key, response)
    return len(responses) == len(claims)


def raise_tokens(client):
    """As after a failover; the result stays true, whatever happens."""
    client.until(raise_once)


def raise_once(client):
    at_least = client.floor + client.rng.choice((0, 1, 100))
    last = client.value('SELECT idem_raise_claim_tokens(%s)', at_least)
    client.check(last >= at_least, 'raised to', last, 'only, not', at_least)
    client.floor = last
    client.tell('raised', last)
    return True


def claim_in_savepoint(client, scope, key):
    """A claim that is rolled back to a savepoint is as if never made."""
    client.query('SAVEPOINT before')
    claim = client.claim(scope, key)
    if claim.outcome == 'new':
        response = client.nonce()
        client.query('INSERT INTO orders (intent, scope, key, response) '
                     'VALUES (%s, %s, %s, %s)', key, scope, key, response)
    client.query('ROLLBACK TO before')
    if claim.outcome == 'new':
        client.tell('undone', response)


def write_order(client, intent, scope, key, claim):
    response = client.nonce()
    order = ('''INSERT INTO orders (intent, scope, key, claim_token, response,
                                    expires_at)
                VALUES (%s, %s, %s, %s, %s, %s)''',
             intent, scope, key, claim.claim_token, response,
             claim.expires_at)
    if client.wrong == 'effect-outside':
        try:
            other = client.server.connect()
            other.cursor().execute(order[0], order[1:])
            other.close()
        except psycopg2.Error:
            client.hang_up()
            raise Lost()
    else:
        client.query(*order)
        client.writing.append(response)
    return response


def complete(client, scope, key, response, token=None):
    """As text, as bytes, with headers or without, or in a batch of one."""
    kind = client.rng.choice(('text', 'bytea', 'batch'))
    headers = client.rng.choice((None, '{"a": [1, 2]}'))
    if kind == 'batch':
        return client.value(
            """SELECT completed FROM idem_complete_many(%s, ARRAY[%s],
                   ARRAY[201], ARRAY[%s::text], ARRAY[%s::json],
                   ARRAY[%s::bigint])""",
            scope, key, response, headers, token)
    return client.value(
        'SELECT idem_complete(%s, %s, 201, %s::' + kind + ', %s, %s)',
        scope, key, response, headers, token)


#
# In one statement, with a handler
#

def run_handler(client):
    client.until(run_once, client.shared_name('run'))


def run_once(client, key):
    outcome, response = client.query(
        "SELECT outcome, response_body FROM idem_run('shop', %s, "
        "'place_order(jsonb)', jsonb_build_object('key', %s), wait => %s)",
        key, key, client.rng.choice((None, '50 ms')))[0]
    if outcome == 'in_progress':
        return False
    client.check(outcome in ('new', 'replay'), key, outcome)
    client.tell('response', key, response)
    return True


#
# In two transactions, with a lease
#

def job(client, key=None):
    client.until(job_once, key or client.shared_name('job', 4))


def job_once(client, key):
    """True: the response is known, or this worker has died."""
    claim = start_job(client, key)
    if claim.outcome == 'replay':
        client.tell('response', key, claim.response)
        return True
    token = claim.claim_token
    if claim.outcome == 'in_progress':
        if client.wrong == 'no-fence':
            token = client.value('SELECT max(claim_token) FROM claims '
                                 'WHERE key = %s', key)
        if token is None:
            return False
        claim = claim._replace(claim_token=token, expires_at='infinity')
    else:
        client.tell('claimed', key, token)
    try:
        for _ in range(client.rng.choice((0, 0, 1, 2))):
            hold_on(client, key, token)
        if client.chance(0.08):
            return True             # nobody completes it
        if client.chance(0.08):
            time.sleep(0.05 + client.rng.random() * 0.1)
        if client.chance(0.15):
            give_up(client, key, token)
            return False
        return finish_job(client, key, token, claim)
    except Refused as refused:
        client.roll_back_after_error()
        if refused.args[0] not in CLAIM_IS_LOST:
            raise
        return False


def start_job(client, key):
    """Claim, and commit.  What a successor gets is what was there before."""
    client.begin()
    claim = client.claim('shop', key, lease=client.rng.choice(LEASES),
                         wait=client.rng.choice((None, None, '100 ms')))
    if claim.outcome != 'new':
        client.check(claim.outcome in ('replay', 'in_progress'), key, claim)
        client.roll_back()
        return claim
    found = client.query('SELECT state FROM checkpoints WHERE key = %s '
                         'ORDER BY n DESC LIMIT 1', key)
    expected = ('half', found[0][0]) if found else (None, None)
    client.check((claim.recovery_point, claim.recovery_state) == expected,
                 key, 'resumes from', claim, 'and not from', expected)
    client.query('INSERT INTO claims (key, claim_token, attempt, '
                 'lease_expires_at) VALUES (%s, %s, %s, %s)', key,
                 claim.claim_token, claim.attempt, claim.lease_expires_at)
    client.commit()
    return claim


def hold_on(client, key, token):
    """A heartbeat or a checkpoint."""
    lease = client.rng.choice(LEASES)
    client.begin()
    if client.rng.random() < 0.5:
        until = client.value('SELECT idem_heartbeat(%s, %s, %s, %s)',
                             'shop', key, lease, token)
    else:
        state = '{"at": "%s"}' % client.nonce()
        until = client.value(
            'SELECT idem_checkpoint(%s, %s, %s, %s, %s, %s)',
            'shop', key, 'half', state, lease, token)
        client.query('INSERT INTO checkpoints (key, state) VALUES (%s, %s)',
                     key, state)
    client.query('UPDATE claims SET lease_expires_at = %s '
                 'WHERE key = %s AND claim_token = %s', until, key, token)
    client.commit()


def give_up(client, key, token):
    """Fail, or release: then its checkpoints are forgotten, too.

    A claim that somebody else has taken over and released is no longer there
    to be released.
    """
    client.begin()
    if client.rng.choice((True, False)):
        how = 'failed'
        client.query('SELECT idem_fail(%s, %s, %s, %s)', 'shop', key,
                     'no luck', token)
    else:
        how = 'released'
        if not client.value('SELECT idem_release(%s, %s, %s)', 'shop', key,
                            token):
            client.roll_back()
            return
        client.query('DELETE FROM checkpoints WHERE key = %s', key)
    end_claim(client, key, token, how)
    client.commit()


def end_claim(client, key, token, how):
    client.query('UPDATE claims SET ended = %s '
                 'WHERE key = %s AND claim_token = %s', how, key, token)


def finish_job(client, key, token, claim):
    """Complete it; after a lost answer again, with the same token."""
    while client.alive():
        try:
            return finish_once(client, key, token, claim)
        except Lost:
            client.shared.lost[client.number] += 1
    return True


def finish_once(client, key, token, claim):
    # First the completion: nobody else can have the claim from then on.
    client.begin()
    if client.wrong == 'no-fence':
        response = write_order(client, key, 'shop', key, claim)
        client.commit()
        complete(client, 'shop', key, response, token)
        return True
    response = client.nonce()
    if not complete(client, 'shop', key, response, token):
        client.roll_back()          # it was there already
        client.tell('completed', key, token)
        return True
    client.query('''INSERT INTO orders (intent, scope, key, claim_token,
                                        response)
                    VALUES (%s, 'shop', %s, %s, %s)''',
                 key, key, token, response)
    client.writing.append(response)
    end_claim(client, key, token, 'completed')
    if client.chance(0.02):
        client.prepare()
        return False
    client.commit()
    client.tell('completed', key, token)
    client.tell('response', key, response)
    return True


#
# Messages; more of them in other_deeds.py
#

def publish_many(client, lane, seqs):
    """Likewise, many of one lane; returns their ids."""
    serials = [client.serial() for _ in seqs]
    messages = [message for message, in client.query(
        '''SELECT message_id::text FROM idem_publish_many('{orders}',
               ARRAY(SELECT jsonb_build_object('serial', serial, 'seq', seq)
                     FROM unnest(%s::bigint[], %s::bigint[]) WITH ORDINALITY
                         AS m (serial, seq, n) ORDER BY n), ARRAY[%s::text])
           ORDER BY ordinal''', serials, seqs, lane)]
    client.query('''INSERT INTO sent SELECT serial, message::uuid, %s, seq
                    FROM unnest(%s::bigint[], %s::text[], %s::bigint[])
                        AS m (serial, message, seq)''',
                 lane, serials, messages, seqs)
    client.writing += messages
    return messages


def publish(client, lane, seq):
    """In a transaction; returns the message's id."""
    serial = client.serial()
    message = client.value(client.rng.choice((
        '''SELECT idem_publish(%s, jsonb_build_object('serial', %s::bigint,
                'seq', %s::bigint), %s)::text''',
        '''SELECT message_id::text FROM idem_publish_many(ARRAY[%s],
                ARRAY[jsonb_build_object('serial', %s::bigint,
                'seq', %s::bigint)], ARRAY[%s::text])''')),
        'orders' if lane else 'news', serial, seq, lane)
    client.query('INSERT INTO sent VALUES (%s, %s, %s, %s)',
                 serial, message, lane, seq)
    client.writing.append(message)
    return message


DEEDS = {pay: 20, pay_many: 5, pay_briefly: 12, run_handler: 8, job: 20,
         raise_tokens: 1,
         lambda client: client.until(resolve): 4}
