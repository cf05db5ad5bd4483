"""Two transactions, and a call of the bank between them."""

import contextlib
import signal
import threading
import time

import wire
from duplicates import await_claim
from proxy import Proxy
from world import Broken, Exchange, job, new_key, promise


def result(exchange, attempt=None):
    """The key of the bank's call."""
    exchange.is_first(200)
    document = exchange.answer.json() or {}
    exchange.unless(set(document) == {'id', 'attempt'}, 'id and attempt')
    exchange.unless(isinstance(document['id'], str) and 16 <= len(document['id']) <= 128,
                    'an id of 16 to 128 characters')
    if attempt is not None:
        exchange.unless(document['attempt'] == attempt, 'attempt %d' % attempt)
    return document['id']


def calls(world, key):
    found = world.sql('SELECT calls FROM charges WHERE key = %s', key)
    return found[0][0] if found else 0


@promise('a job calls the bank once, and is replayed byte for byte')
def job_replayed(world):
    request = job(new_key(), 50)
    with world.adds(charges=1, bank_calls=1):
        first = world.ask(request)
        result(first, attempt=1)
        for _ in range(3):
            world.ask(request).replays(first)


@promise('the key for the bank is another in each job, and each scope')
def bank_keys(world):
    key = new_key()
    with world.adds(charges=3, bank_calls=3):
        ids = {result(world.ask(request)) for request in (job(key), job(key, user='bob'), job(new_key()))}
    if len(ids) != 3:
        raise Broken('expected three keys, found %r' % ids)
    if not world.memory and [calls(world, key) for key in ids] != [1, 1, 1]:
        raise Broken('expected the bank to be called with each of %r' % ids)


@promise('a worker killed in the bank call: attempt 2 after its lease, and one charge', needs='database',
         why='the double ends with its process')
def killed_in_call(world):
    key = new_key()
    request = job(key, 800)
    with world.adds(charges=1, bank_calls=1):
        with world.open(LEASE_MS=1500) as shop, world.open(LEASE_MS=1500) as other:
            other.port
            with wire.Connection(shop.port) as running:
                running.send(request.bytes())
                await_claim(world, key)
                shop.kill()
            world.ask(request, other).runs()
            first = world.insist(request, other)
            result(first, attempt=2)
            world.ask(request, other).replays(first)


@contextlib.contextmanager
def killed_at(world, request, hook, hold, what):
    """A shop that replaces a killed one.  The kill is at a round trip to the
    database: at the first call of the proxy's hook for which hold() is true."""
    proxy = Proxy(world.pgbouncer and world.pgbouncer.port)
    reached, dead = threading.Event(), threading.Event()

    def hold_it(link, said):
        if not hold(link, said):
            return True
        reached.set()
        dead.wait(10)
        return False

    try:
        with world.open(proxy.port, LEASE_MS=1000) as shop, wire.Connection(shop.port) as running:
            setattr(proxy, hook, hold_it)
            running.send(request.bytes())
            if not reached.wait(20):
                raise Broken('expected ' + what)
            shop.kill()
            dead.set()
        with world.open(LEASE_MS=1000) as shop:
            yield shop
    finally:
        proxy.end()


@promise('a worker killed after the charge, before it knew: the bank is called once more with the same key',
         needs='database', why='the double ends with its process')
def killed_after_call(world):
    request = job(new_key())
    banks = set()

    def charges(link, tag):
        if tag.startswith('INSERT') and 'charges' in link.query:
            banks.add(link)
        return link in banks and (tag == 'COMMIT' or not link.began)

    with world.adds(charges=1, bank_calls=2), \
            killed_at(world, request, 'done', charges, 'an INSERT INTO charges') as shop:
        first = world.insist(request, shop)
        key = result(first, attempt=2)
        if calls(world, key) != 2:
            raise Broken('expected two calls with the key %s, found %d' % (key, calls(world, key)))
        world.ask(request, shop).replays(first)


@promise('a step that is done is not done again by the next attempt', needs='database',
         why='the double ends with its process')
def step_kept(world):
    # The completion fails until the worker dies.  The step is in a checkpoint.
    request = job(new_key())

    def completes(link, query):
        return 'idem_complete' in query

    with world.adds(charges=1, bank_calls=1), \
            killed_at(world, request, 'asked', completes, 'a call of idem_complete') as shop:
        result(world.insist(request, shop), attempt=2)


@promise('heartbeats keep a job that takes longer than its lease', needs='process', why='the lease is an option')
def heartbeats(world):
    request = job(new_key(), 2600)
    with world.open(LEASE_MS=1000) as shop:
        with world.adds(shop, charges=1, bank_calls=1), wire.Connection(shop.port) as running:
            running.send(request.bytes())
            for _ in range(2):
                time.sleep(1.1)
                world.ask(request, shop).runs()
            first = Exchange(request, running.answer())
            result(first, attempt=1)
            world.ask(request, shop).replays(first)


@promise('a worker that stood still beyond its lease has lost the job: one answer for all', needs='database',
         why='two processes share a database')
def lease_lost(world):
    client_key = new_key()
    request = job(client_key, 700)
    with world.open(LEASE_MS=1000) as slow, world.open(LEASE_MS=1000) as other:
        with wire.Connection(slow.port) as running:
            other.port
            running.send(request.bytes())
            await_claim(world, client_key)
            slow.signal(signal.SIGSTOP)
            taken = world.insist(request, other)
            key = result(taken, attempt=2)
            slow.signal(signal.SIGCONT)
            late = Exchange(request, running.answer())
            if late.answer.status == 200:
                late.replays(taken)
            else:
                late.is_(409)
        world.ask(request, other).replays(taken)
        world.ask(request, slow).replays(taken)
    if world.value('SELECT count(*) FROM charges WHERE key = %s', key) != 1 or calls(world, key) > 2:
        raise Broken('expected one charge with the key %s, and two calls at most' % key)


@promise('a job whose bank call fails: 500, and a retry runs at once as attempt 2', needs='database',
         why='a trigger makes it fail')
def bank_fails(world):
    request = job(new_key())
    with world.adds(charges=1, bank_calls=1), world.failing('charges', 'P0001', 1):
        world.ask(request).is_first(500)
        first = world.ask(request)
        result(first, attempt=2)
        world.ask(request).replays(first)
