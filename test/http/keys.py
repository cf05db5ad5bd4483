"""The header Idempotency-Key."""

import wire
from world import Broken, get, new_key, payment, post, promise, quoted


def with_headers(values, body=b'{"amount": 5, "currency": "EUR"}'):
    """A payment with these unchanged lines of Idempotency-Key."""
    return wire.Request('POST', '/payments', [('X-User', 'alice'), ('Content-Type', 'application/json')] +
                        [('Idempotency-Key', value) for value in values], body)


@promise('no key where one is required: 400, and no effect')
def missing(world):
    with world.adds():
        for path in ('/payments', '/jobs', '/streams'):
            world.ask(post(path, '{"amount": 5, "currency": "EUR", "ms": 0}')).is_problem(400, 'key-required')


@promise('no key where none is required: each request runs')
def not_required(world):
    with world.adds(blobs=2):
        for _ in range(2):
            world.ask(post('/blobs', b'abc', content='application/octet-stream')).is_first(200)


@promise('a malformed key: 400, and no effect', needs='ours')
def malformed(world):
    long = 'k' * 129
    with world.adds():
        for value in ('"', '""', '"unterminated-key-0001', 'unopened-key-00000001"', '"short"', 'short',
                      quoted(long), long, '"a key with blanks 1"', 'a key with blanks 1',
                      '"key-with-\\escape-0001"', '"key-with-escape-0001\\"', '"key-one-0000000001", "key-two-0000000001"',
                      '"key-0000000000000001" trailing', '("key-0000000000000001")', '?1', ':a2V5LTAwMDAwMDAwMDAwMDAwMDE=:',
                      '"key-00000000000\u00e9-0001"', '"key-with-\ttab-000001"'):
            world.ask(with_headers([value])).is_problem(400, 'key-invalid')


@promise('a key that breaks the rules: the problem says what is wrong with it, and what a key is', needs='ours')
def explained(world):
    for value, wrong in (('short', 'too short'), ('k' * 129, 'too long'), ('key-with-a-slash/0001', 'a character')):
        refused = world.ask(with_headers([quoted(value)])).is_problem(400, 'key-invalid')
        said = refused.answer.json()['detail']
        refused.unless(wrong in said and '16 to 128 characters' in said, '%r and the rule in the detail' % wrong)


@promise('two lines of Idempotency-Key: 400, and no effect, be they equal', needs='ours')
def two_lines(world):
    with world.adds():
        for other in ('"key-0000000000000001"', '"key-0000000000000002"', 'key-0000000000000001'):
            world.ask(with_headers(['"key-0000000000000001"', other])).is_problem(400, 'key-invalid')


@promise('a key in quotes and the same one without are one key', needs='ours')
def bare(world):
    key = new_key()
    with world.adds(payments=1):
        first = world.ask(with_headers([quoted(key)])).is_first(201)
        world.ask(with_headers([key])).replays(first)
        world.ask(with_headers(['  ' + quoted(key) + ' '])).replays(first)
    if not world.memory and not world.value('SELECT count(*) FROM payments WHERE key = %s', key):
        raise Broken('expected the handler to see the key without its quotes')


@promise('parameters behind the quoted key are ignored', needs='ours')
def parameters(world):
    key = new_key()
    with world.adds(payments=1):
        first = world.ask(with_headers([quoted(key)])).is_first(201)
        for more in (';a=1', ';a;b=2', '; a=token'):
            world.ask(with_headers([quoted(key) + more])).replays(first)
        for more in (';', ';A=1', ' ;a=1'):
            world.ask(with_headers([quoted(key) + more])).is_problem(400, 'key-invalid')


@promise('header names come in any case')
def header_case(world):
    key = new_key()
    body = payment(key).body
    with world.adds(payments=1):
        first = world.ask(payment(key)).is_first(201)
        world.ask(wire.Request('POST', '/payments', [
            ('x-user', 'alice'), ('CONTENT-TYPE', 'application/json'), ('idempotency-KEY', quoted(key))],
            body)).replays(first)


@promise('escapes in the quoted string are undone', needs='database', why='the key format is a setting of the server')
def escapes(world):
    key = 'say \\"hi\\" \\\\ %s' % new_key()
    plain = key.replace('\\"', '"').replace('\\\\', '\\')
    with world.settings(key_format='printable'), world.open() as shop:
        with world.adds(shop, payments=1):
            first = world.ask(with_headers(['"%s"' % key]), shop).is_first(201)
            world.ask(with_headers(['"%s"' % key]), shop).replays(first)
            world.ask(with_headers(['"key-with-\\escape-0001"']), shop).is_problem(400, 'key-invalid')
            world.ask(with_headers(['"key-unterminated-0001\\"']), shop).is_problem(400, 'key-invalid')
    if world.sql('SELECT scope, key FROM idem_keys WHERE key = %s', plain) != [('alice', plain)]:
        raise Broken('expected a record of the key ' + plain)


@promise('GET needs no key, and one that comes with it does no harm')
def get_with_key(world):
    world.ask(wire.Request('GET', '/ping', [('Idempotency-Key', '"')])).is_(204)
    world.ask(get('/ping')).is_(204)
