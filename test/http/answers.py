"""First answers, replays, and refusals."""

import time

import wire
from world import Broken, get, job, blob, new_key, payment, post, promise


@promise('a payment is answered as the contract says, and replayed byte for byte')
def payment_replayed(world):
    key = new_key()
    with world.adds(payments=1):
        first = world.ask(payment(key)).is_first(201)
        paid = first.answer.json() or {}
        first.unless(paid == {'id': paid.get('id'), 'amount': 1200, 'currency': 'EUR'}, 'id, amount, currency')
        first.unless(first.answer.one('Location') == '/payments/%s' % paid['id'], 'Location of the payment')
        first.unless('application/json' in (first.answer.one('Content-Type') or ''), 'JSON')
        for _ in range(3):
            world.ask(payment(key)).replays(first)


@promise('what is not on the list of headers comes with the first answer only', needs='ours')
def headers_once(world):
    key = new_key()
    first = world.ask(payment(key)).is_first(201)
    first.unless(any('seen=1' in cookie for cookie in first.answer.all('Set-Cookie')), 'Set-Cookie: seen=1')
    first.unless(first.answer.all('X-Trace'), 'X-Trace')
    again = world.ask(payment(key)).replays(first)
    again.unless(not again.answer.all('X-Trace'), 'no X-Trace')


@promise('several values of one header are replayed as several lines, in their order')
def header_lines(world):
    key = new_key()
    first = world.ask(payment(key)).is_first(201)
    links = ['<%s>; rel="self"' % first.answer.one('Location'), '</payments>; rel="collection"']
    first.unless(first.answer.all('Link') == links, 'two lines of Link')
    again = world.ask(payment(key)).replays(first)
    again.unless(again.answer.all('Link') == links, 'the two lines of Link')


@promise('a refusal of the handler (422) is stored, and replayed byte for byte')
def refusal_stored(world):
    key = new_key()
    with world.adds():
        first = world.ask(payment(key, amount=-1)).is_first(422)
        world.ask(payment(key, amount=-1)).replays(first)


def undone(world, key, currency, status):
    """Expect that a payment in this currency gets that status and leaves nothing behind."""
    with world.adds():
        # More often than a pool has connections.
        for _ in range(12):
            world.ask(payment(key, currency=currency)).is_first(status)
        world.ask(get('/ping')).is_(204)
    if not world.memory and world.value('SELECT count(*) FROM idem_keys WHERE key = %s', key):
        raise Broken('expected no record of a request that was answered with %d' % status)


@promise('a handler that throws: 500, no effect, nothing stored, and a retry runs')
def throws(world):
    undone(world, new_key(), 'XXX', 500)


@promise('a refusal that is raised (403): sent as it is, no effect, nothing stored, and a retry runs')
def refusal_raised(world):
    key = new_key()
    undone(world, key, 'XTS', 403)
    # The key is free, also for another request.
    with world.adds(payments=1):
        first = world.ask(payment(key)).is_first(201)
        world.ask(payment(key)).replays(first)


@promise('a request that failed once succeeds when it is sent again', needs='database',
         why='a trigger makes it fail')
def fails_once(world):
    key = new_key()
    with world.adds(payments=1), world.failing('payments', 'P0001', 1):
        world.ask(payment(key)).is_first(500)
        first = world.ask(payment(key)).is_first(201)
        world.ask(payment(key)).replays(first)


@promise('a body that is not what the route takes: 400, and no effect')
def malformed_body(world):
    with world.adds():
        for body in ('{"amount": 12', '[]', '{}', '{"amount": "x", "currency": "EUR"}', ''):
            world.ask(post('/payments', body, new_key())).is_(400)


@promise('the same key of two users is two keys')
def scopes(world):
    key = new_key()
    with world.adds(payments=2):
        first = world.ask(payment(key, user='alice')).is_first(201)
        other = world.ask(payment(key, user='bob')).is_first(201)
        world.ask(payment(key, user='alice')).replays(first)
        world.ask(payment(key, user='bob')).replays(other)


@promise('a request of nobody: refused by the application (401), no effect, and nothing stored')
def nobody(world):
    key = new_key()
    with world.adds():
        for request in (payment(key), job(key), blob(key, b'abc')):
            for user in ([], [('X-User', '')]):
                headers = [line for line in request.headers if line[0] != 'X-User'] + user
                world.ask(wire.Request('POST', request.path, headers, request.body)).is_first(401)
    if not world.memory and world.value('SELECT count(*) FROM idem_keys WHERE key = %s', key):
        raise Broken('expected no record of a request of nobody')


@promise('another body, path or query under the same key: 422, and no effect')
def reused(world):
    key = new_key()
    first = world.ask(payment(key)).is_first(201)
    with world.adds():
        for request in (payment(key, amount=1201), blob(key, payment(key).body), job(key),
                        post('/payments?currency=EUR', payment(key).body, key)):
            world.ask(request).is_problem(422, 'key-reused')
    world.ask(payment(key)).replays(first)


@promise('the query belongs to the request')
def query(world):
    key = new_key()
    with world.adds(payments=1):
        first = world.ask(post('/payments?a=1', payment(key).body, key)).is_first(201)
        world.ask(post('/payments?a=1', payment(key).body, key)).replays(first)
        world.ask(post('/payments?a=2', payment(key).body, key)).is_problem(422, 'key-reused')


@promise('too many new keys: 429 with Retry-After, replays go on, other users too', needs='database',
         why='the limit is a setting of the server')
def rate_limited(world):
    with world.settings(max_new_keys_per_minute=3), world.open() as shop:
        user = 'limited-' + new_key()
        key = new_key()
        first = world.ask(payment(key, user=user), shop).is_first(201)
        for _ in range(2):
            world.ask(payment(new_key(), user=user), shop).is_first(201)
        with world.adds(shop):
            refused = world.ask(payment(new_key(), user=user), shop).is_problem(429, 'rate-limited').waits()
            refused.unless(int(refused.answer.one('Retry-After')) <= 120, 'Retry-After of two minutes at most')
            world.ask(job(new_key(), user=user), shop).is_problem(429, 'rate-limited').waits()
        world.ask(payment(key, user=user), shop).replays(first)
        world.ask(payment(new_key(), user='un' + user), shop).is_first(201)


@promise('a key that is too old: 422, where expired keys are rejected', needs='database',
         why='the policy is a setting of the server')
def expired(world):
    with world.settings(default_ttl='1s', expired_key_policy='reject'), world.open() as shop:
        key = new_key()
        world.ask(payment(key), shop).is_first(201)
        time.sleep(1.1)
        with world.adds(shop):
            world.ask(payment(key), shop).is_problem(422, 'key-expired')


@promise('an erased response: its status, and a problem that says so', needs='database',
         why='an administrator erases with idem_erase')
def erased(world):
    key = new_key()
    world.ask(payment(key)).is_first(201)
    world.sql('SELECT idem_erase(%s, %s)', 'alice', key)
    with world.adds():
        again = world.ask(payment(key)).is_problem(201, 'response-erased')
        again.unless(again.answer.all('Idempotent-Replayed') == ['true'], 'Idempotent-Replayed: true')


@promise('a response too large to store goes out whole, and replays say so with its status', needs='ours')
def too_large(world):
    key = new_key()
    data = bytes(range(256)) * 4200            # 1,075,200 bytes
    with world.adds(blobs=1):
        first = world.ask(blob(key, data)).is_first(200)
        first.unless(first.answer.body == data[::-1], 'all bytes, reversed')
        for _ in range(2):
            again = world.ask(blob(key, data)).is_problem(200, 'response-not-stored')
            again.unless(again.answer.all('Idempotent-Replayed') == ['true'], 'Idempotent-Replayed: true')
        world.ask(blob(key, data[1:])).is_problem(422, 'key-reused')


@promise('a response in pieces is refused: 500, no effect, nothing stored', needs='ours')
def streams(world):
    key = new_key()
    with world.adds():
        for _ in range(2):
            refused = world.ask(post('/streams', '', key)).is_problem(500, 'streaming-refused')
            refused.unless(not refused.answer.all('Idempotent-Replayed'), 'no Idempotent-Replayed')
    if not world.memory and world.value('SELECT count(*) FROM idem_keys WHERE key = %s', key):
        raise Broken('expected no record of a response that was refused')


@promise('routes without a key answer as they would alone')
def unguarded(world):
    world.ask(get('/ping')).is_(204)
    world.ask(get('/thanks')).is_(200)
    ours = {'idempotency-key', 'idempotent-replayed', 'retry-after'}
    found = world.ask(get('/effects')).is_(200)
    found.unless(not ours & {name.lower() for name, _ in found.answer.headers}, 'none of our headers')


@promise('many requests come over one connection, refused ones among them')
def keep_alive(world):
    with world.adds(payments=3), wire.Connection(world.shop.port) as connection:
        for count in range(3):
            key = new_key()
            statuses = []
            for request in (payment(key), payment(key), payment(key, amount=7), post('/payments', '{}'),
                            get('/ping')):
                connection.send(request.bytes())
                statuses.append(connection.answer().status)
            if statuses != [201, 201, 422, 400, 204]:
                raise Broken('expected 201, 201, 422, 400, 204, found %r' % statuses)
