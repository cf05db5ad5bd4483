"""Concurrent duplicates, and their effects on other requests."""

import statistics
import threading
import time

import wire
import world as world_module
from world import Broken, Exchange, get, job, new_key, payment, promise


def all_at_once(world, requests, shop=None):
    """The answers to the requests, each on a connection of its own."""
    connections = []
    for request in requests:
        connections.append(wire.Connection((shop or world.shop).port))
    for connection, request in zip(connections, requests):
        connection.send(request.bytes())
    exchanges = []
    for connection, request in zip(connections, requests):
        with connection:
            exchanges.append(Exchange(request, connection.answer()))
    return exchanges


def judge(world, exchanges, status, may_refuse):
    """Expect one first answer; the others are its replays, or 409 if that is allowed."""
    firsts = [exchange for exchange in exchanges
              if exchange.answer.status != 409 and not exchange.answer.all('Idempotent-Replayed')]
    if not world_module.STRICT:
        firsts = firsts[:1]
    if len(firsts) != 1:
        raise Broken('expected one first answer, found %d\n%s' % (
            len(firsts), '\n'.join(str(exchange.answer) for exchange in firsts[:3])))
    firsts[0].is_first(status)
    for exchange in exchanges:
        if exchange is firsts[0]:
            continue
        if may_refuse and exchange.answer.status == 409:
            exchange.runs()
            exchange = world.insist(exchange.request)
        exchange.replays(firsts[0])


@promise('a duplicate of what is running: 409 with Retry-After, at once; a replay afterwards')
def in_progress(world):
    first, duplicate, other, took = meanwhile(world, world.shop, 1500)
    duplicate.runs()
    duplicate.unless(took < 0.8, 'an answer at once')
    if world_module.STRICT:
        other.is_problem(422, 'key-reused')
    world.ask(first.request).replays(first.is_first(200))


@promise('a duplicate of an open transaction: 409 with Retry-After, at once; a replay afterwards', needs='database',
         why='a lock on a table keeps the transaction open')
def in_transaction(world):
    request = payment(new_key())
    shop = world.shop
    with world.adds(payments=1), wire.Connection(shop.port) as running:
        with world.locked('payments'):
            running.send(request.bytes())
            await_holder(world)
            began = time.monotonic()
            duplicate = world.ask(request).runs()
            duplicate.unless(time.monotonic() - began < 0.8, 'an answer at once')
        first = Exchange(request, running.answer()).is_first(201)
        world.ask(request).replays(first)


def await_claim(world, key):
    """Wait until the job with this key has been claimed.  Without a database, wait
    for a time in which it should be claimed."""
    if world.memory:
        time.sleep(0.5)
        return
    deadline = time.monotonic() + min(20, wire.PATIENCE)
    while not world.value("SELECT count(*) FROM idem_keys WHERE key = %s AND state = 'started'", key):
        if time.monotonic() > deadline:
            raise Broken('expected a committed claim of the key %s' % key)
        time.sleep(0.02)


def meanwhile(world, shop, ms):
    """
    While a job runs for so long: a duplicate, and another request with its key.
    Returns the three exchanges, and the seconds that the duplicate took.  Where
    the machine was too slow for an answer before the job ended, begin again.
    """
    for _ in range(5):
        key = new_key()
        request = job(key, ms)
        with world.adds(shop, charges=1, bank_calls=1), wire.Connection(shop.port) as running:
            sent = time.monotonic()
            running.send(request.bytes())
            await_claim(world, key)
            began = time.monotonic()
            duplicate = world.ask(request, shop)
            took = time.monotonic() - began
            other = world.ask(job(key, 1), shop)
            in_time = time.monotonic() - sent < ms / 1000
            first = Exchange(request, running.answer())
        if in_time:
            return first, duplicate, other, took
    raise Broken('expected an answer to a duplicate before the job ended\n%s' % duplicate)


def await_holder(world, count=1):
    """Wait until "count" sessions wait for the locked table."""
    deadline = time.monotonic() + 20
    while world.value("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'payments'::regclass") < count:
        if time.monotonic() > deadline:
            raise Broken('expected %d handlers that wait for the locked table' % count)
        time.sleep(0.02)


@promise('200 duplicates at once: one effect; each gets the answer, or 409 and the answer later')
def two_hundred(world):
    key = new_key()
    with world.adds(payments=1):
        judge(world, all_at_once(world, [payment(key)] * 200), 201, may_refuse=True)


@promise('200 duplicates of a job at once: the bank is called once')
def two_hundred_jobs(world):
    key = new_key()
    with world.adds(charges=1, bank_calls=1):
        judge(world, all_at_once(world, [job(key, 300)] * 200), 200, may_refuse=True)


@promise('200 requests at once, each key twice: 100 effects')
def pairs(world):
    keys = [new_key() for _ in range(100)]
    with world.adds(payments=100):
        exchanges = all_at_once(world, [payment(key) for key in keys] * 2)
        for number in range(100):
            judge(world, [exchanges[number], exchanges[number + 100]], 201, may_refuse=True)


@promise('duplicates that may wait get the answer when the first has it', needs='process', why='the wait is an option')
def waiting(world):
    key = new_key()
    with world.open(WAIT_MS=10000) as shop:
        with world.adds(shop, charges=1, bank_calls=1):
            # So few that all can wait, whatever else is refused.
            exchanges = all_at_once(world, [job(key, 700)] * 4, shop)
            judge(world, exchanges, 200, may_refuse=False)


@promise('waiting is bounded: 409 with Retry-After when the time is over', needs='process', why='the wait is an option')
def bounded(world):
    with world.open(WAIT_MS=400) as shop:
        first, duplicate, _, took = meanwhile(world, shop, 2500)
        duplicate.runs()
        duplicate.unless(0.3 < took < 1.5, 'an answer after about 400 ms, not %.0f' % (took * 1000))
        first.is_first(200)


class Waiters:
    """Clients that want one answer, wait for it, and ask again when refused."""

    def __init__(self, shop, request, count):
        self.shop, self.request = shop, request
        self.answers = []
        self.threads = [threading.Thread(target=self.wait, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def wait(self):
        while True:
            try:
                answer = wire.send(self.shop.port, self.request)
            except (wire.HungUp, OSError) as error:
                answer = error
            if not isinstance(answer, wire.Answer) or answer.status != 409:
                self.answers.append(answer)
                return
            time.sleep(int(answer.one('Retry-After') or 1))


def pings(shop, seconds):
    """99th percentile of the time of a ping, in seconds."""
    took = []
    deadline = time.monotonic() + seconds
    with wire.Connection(shop.port) as connection:
        while time.monotonic() < deadline or len(took) < 100:
            began = time.perf_counter()
            connection.send(get('/ping').bytes())
            answer = connection.answer()
            took.append(time.perf_counter() - began)
            if answer.status != 204:
                raise Broken('expected 204\n%s' % answer)
            time.sleep(0.001)
    return statistics.quantiles(took, n=100)[98]


# Less is the noise of a busy machine.  An exhausted pool takes seconds.
FLOOR = 0.02


@promise('a pool of 10 with 50 waiting duplicates serves others: the p99 of /ping within 3 times of an idle pool\'s',
         needs='database', why='there is no pool')
def pool_not_drained(world):
    rounds = []
    with world.open(POOL_SIZE=10, WAIT_MS=30000) as shop:
        pings(shop, 0.3)
        for _ in range(3):
            request = payment(new_key())
            idle = pings(shop, 1)
            with world.locked('payments'):
                waiters = Waiters(shop, request, 51)
                await_holder(world)
                # The others are running, too.
                time.sleep(0.3)
                rounds.append((pings(shop, 1), idle))
            for thread in waiters.threads:
                thread.join(wire.PATIENCE)
            answers = waiters.answers
            if len(answers) != 51 or any(not isinstance(answer, wire.Answer) or answer.status != 201
                                         for answer in answers):
                raise Broken('expected 51 answers of 201, found %r' % [
                    getattr(answer, 'status', answer) for answer in answers])
            if len({answer.body for answer in answers}) != 1:
                raise Broken('expected one body in all answers')
            if rounds[-1][0] <= max(3 * idle, FLOOR):
                return
    raise Broken('expected a p99 within 3 times of an idle one in one round of three, found (with waiters, idle) in ms: '
                 + ', '.join('%.1f, %.1f' % (busy * 1000, idle * 1000) for busy, idle in rounds))
