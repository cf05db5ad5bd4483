"""Clients that hang up, processes that are killed, connections that are cut,
servers that are restarted: each effect once, each answer byte for byte."""

import itertools
import os
import random
import subprocess
import threading
import time

import wire
from forms import submit, token_of
from duplicates import all_at_once, await_claim, await_holder
from proxy import Proxy
from world import Broken, Exchange, blob, get, job, new_key, payment, promise


def number(name, default):
    return int(os.environ.get(name, default))


def settle(world, requests, shop=None, seen=None):
    """The final answers to requests of which some might have run, which must be
    the same when repeated.  "seen" are whole answers of earlier requests."""
    for key, request in requests.items():
        final = world.insist(request, shop)
        final.unless(final.answer.status in (200, 201), 'success')
        world.ask(request, shop).replays(final)
        before = (seen or {}).get(key)
        if before is not None:
            Exchange(request, before).unless(
                before.status == final.answer.status and before.body == final.answer.body,
                'the answer that was given later\n%s' % final.answer)


@promise('clients that hang up half-way: each effect once, each answer byte for byte')
def hang_ups(world):
    chosen = random.Random(1)
    count = number('HANGUPS', 1000)
    payments, blobs = {}, {}
    data = os.urandom(300000)
    for turn in range(count):
        key = new_key()
        if turn % 10 == 9:
            request = blobs[key] = blob(key, data)
        else:
            request = payments[key] = payment(key)
        sent = request.bytes()
        connection = wire.Connection(world.shop.port)
        body_at = len(sent) - len(request.body)
        moment = turn % 3
        try:
            if moment == 0:             # in the body
                connection.send(sent[:chosen.randrange(body_at, len(sent))])
            elif moment == 1:           # before the answer
                connection.send(sent)
                time.sleep(chosen.choice((0, 0, 0.001, 0.003)))
            else:                       # during it
                connection.send(sent)
                connection.socket.recv(chosen.choice((1, 20, 100)))
        except OSError:
            pass                        # the server was quicker
        if chosen.random() < 0.5:
            connection.reset()
        else:
            connection.close()
    time.sleep(0.2)
    before = world.effects()
    settle(world, dict(payments, **blobs))
    after = world.effects()
    if not world.memory:
        once_each(world, payments)
    again = {**payments, **blobs}
    settle(world, dict(list(again.items())[:20]))
    if world.effects() != after or after['payments'] < before['payments']:
        raise Broken('expected no effects of replays: %r, %r' % (after, world.effects()))
    # All connections are in the pool again.
    for exchange in all_at_once(world, [payment(new_key()) for _ in range(30)]):
        exchange.is_first(201)


def once_each(world, keys):
    """Expect that each of these keys has one payment."""
    found = dict(world.sql('SELECT key, count(*) FROM payments WHERE key = ANY(%s) GROUP BY key', list(keys)))
    wrong = {key: found.get(key, 0) for key in keys if found.get(key, 0) != 1}
    if wrong:
        raise Broken('expected one payment for each key, found %r' % dict(list(wrong.items())[:5]))


@promise('a request whose body did not come whole has no effect')
def half_a_body(world):
    with world.adds():
        for cut, request in ((1, payment(new_key())), (20, payment(new_key())), (50, blob(new_key(), bytes(100)))):
            for waits in (True, False):
                connection = wire.Connection(world.shop.port)
                connection.send(request.bytes()[:-cut])
                if waits:               # the server's answer, or its end, comes after all effects
                    connection.finish()
                connection.close()
        time.sleep(0.3)


class Moment:
    """Happens after "count" messages, and blocks all later ones."""

    def __init__(self, proxy, count):
        self.come = threading.Event()
        self.left = itertools.count(count, -1)
        proxy.asked = proxy.done = self.passes

    def passes(self, link, message):
        if next(self.left) > 0:
            return True
        self.come.set()
        # The proxy holds the message, because the shop must notice nothing before it dies.
        time.sleep(0.6)
        return False


@promise('the process killed in mid-request: each effect once, each answer byte for byte', needs='database',
         why='the double ends with its process')
def killed(world):
    chosen = random.Random(2)
    payments, jobs, blobs, seen = {}, {}, {}, {}
    kills = number('KILLS', 200)
    before = world.effects()
    proxy = Proxy(world.pgbouncer and world.pgbouncer.port)
    spares = [world.open(proxy.port, LEASE_MS=1000) for _ in range(2)]
    try:
        for turn in range(kills):
            for shop in spares:
                shop.port
            shop = spares.pop(0)
            fresh = []
            for _ in range(3):
                key = new_key()
                payments[key] = payment(key)
                fresh.append(key)
            key = new_key()
            blobs[key] = blob(key, os.urandom(2000))
            fresh.append(key)
            if turn % 5 == 0:
                key = new_key()
                jobs[key] = job(key, 10)
                fresh.append(key)
            # Add requests during which another process was killed.
            old = chosen.sample(list(payments), min(2, len(payments)))
            requests = {**payments, **blobs, **jobs}
            # Kill after some messages to and from the database, or after some time.
            moment = Moment(proxy, chosen.randrange(1, 40)) if turn % 2 else None
            connections = {}
            for key in fresh + [key for key in old if key not in fresh]:
                connection = connections[key] = wire.Connection(shop.port, 10)
                connection.send(requests[key].bytes())
            if moment:
                moment.come.wait(0.5)
            else:
                time.sleep(chosen.uniform(0, 0.04))
            shop.kill()
            proxy.pass_all()
            spares.append(world.open(proxy.port, LEASE_MS=1000))
            for key, connection in connections.items():
                with connection:
                    try:
                        answer = connection.answer()
                    except (wire.HungUp, OSError):
                        continue
                    if answer.status in (200, 201):
                        seen[key] = answer
        shop = spares[0]
        settle(world, {**payments, **jobs, **blobs}, shop, seen)
        after = world.effects(shop)
    finally:
        for shop in spares:
            shop.kill()
        proxy.end()
    once_each(world, payments)
    added = {name: after[name] - before[name] for name in ('payments', 'blobs', 'charges')}
    if added != {'payments': len(payments), 'blobs': len(blobs), 'charges': len(jobs)}:
        raise Broken('expected %d payments, %d blobs, %d charges, found %r' % (
            len(payments), len(blobs), len(jobs), added))
    # Some answers must be sent before the kill, and some not. Otherwise the kills test nothing.
    if kills >= 50 and not 0 < len(seen) < len(payments) + len(jobs) + len(blobs):
        raise Broken('expected some of the requests to be answered before the kill, found %d' % len(seen))


def retried(sqlstate, deferred=False):
    def test(world):
        request = payment(new_key())
        with world.adds(payments=1), world.failing('payments', sqlstate, 2, deferred) as tries:
            first = world.ask(request).is_first(201)
            first.unless(tries() == 3, 'three tries, not %s' % tries())
            world.ask(request).replays(first)
    return test


for code in ('40001', '40P01'):
    promise('%s in a handler: the transaction runs again, unseen by the client' % code, needs='database',
            why='a trigger raises it')(retried(code))
promise('40001 at COMMIT: the transaction runs again, unseen by the client', needs='database',
        why='a trigger raises it')(retried('40001', deferred=True))


@promise('an error that stays ends in 5xx, and nothing is stored', needs='database', why='a trigger raises it')
def retries_end(world):
    request = payment(new_key())
    with world.adds(payments=1):
        with world.failing('payments', '40001', 1000000):
            refused = world.ask(request)
            refused.unless(500 <= refused.answer.status < 600, '5xx')
        with world.failing('payments', 'P0001', 1, deferred=True):
            refused = world.ask(request)
            refused.unless(500 <= refused.answer.status < 600, '5xx')
        first = world.ask(request).is_first(201)
        world.ask(request).replays(first)


def transactional(world):
    """One request of each kind that is one transaction, by name."""
    return [payment(new_key()), blob(new_key(), os.urandom(100)), submit(token_of(world))]


def commits(query):
    """Whether it is the only or the last of several statements."""
    return query.upper().rstrip('; \n').rpartition(';')[2].strip().startswith('COMMIT')


def cut(world, at_commit, count=1):
    """For each kind of request, cut the connection that commits a write: after
    the server has committed, or before it gets the COMMIT."""
    proxy = Proxy(world.pgbouncer and world.pgbouncer.port)
    try:
        with world.open(proxy.port) as shop:
            with world.adds(shop, payments=1, blobs=1, submissions=1):
                for request in transactional(world):
                    world.ask(get('/ping'), shop).is_(204)
                    left = [count]

                    def cuts(link):
                        if link.wrote and left[0]:
                            left[0] -= 1
                            return False
                        return True

                    if at_commit:
                        proxy.done = lambda link, tag: tag != 'COMMIT' or cuts(link)
                    else:
                        proxy.asked = lambda link, query: not commits(query) or cuts(link)
                    exchange = world.ask(request, shop)
                    if left[0]:
                        raise Broken('expected a COMMIT of a write in\n%s' % request)
                    proxy.pass_all()
                    yield request, exchange, shop
    finally:
        proxy.end()


@promise('a connection cut between COMMIT and its answer: the client gets the answer, and the effect is there once',
         needs='database', why='a proxy cuts the connection')
def commit_unanswered(world):
    for request, exchange, shop in cut(world, at_commit=True):
        if request.path == '/form':
            world.insist(request, shop).is_(303)
            continue
        exchange.unless(exchange.answer.status in (200, 201), 'the answer')
        again = world.ask(request, shop)
        again.is_(exchange.answer.status)
        again.unless(again.answer.body == exchange.answer.body and again.answer.all('Idempotent-Replayed'),
                     'a replay of\n%s' % exchange.answer)


@promise('a connection cut before COMMIT: the effect is there once, at the latest after a retry', needs='database',
         why='a proxy cuts the connection')
def commit_lost(world):
    for request, exchange, shop in cut(world, at_commit=False):
        final = exchange
        if exchange.answer.status >= 500:
            final = world.insist(request, shop)
        if request.path == '/form':
            final.is_(303)
            continue
        final.unless(final.answer.status in (200, 201), 'success')
        world.ask(request, shop).replays(final)


@promise('a job whose completion is committed and not answered: one charge, one answer', needs='database',
         why='a proxy cuts the connection')
def job_cut(world):
    request = job(new_key())
    proxy = Proxy(world.pgbouncer and world.pgbouncer.port)
    try:
        with world.open(proxy.port, LEASE_MS=1000) as shop, world.adds(shop, charges=1, bank_calls=1):
            world.ask(get('/ping'), shop).is_(204)
            completed = []

            def cut_the_completion(link, query):
                if 'idem_complete' in query:
                    completed.append(link)
                return True

            def cut_its_answer(link, tag):
                # Its COMMIT, or the statement itself if it is a transaction of its own.
                last = link in completed and tag != 'BEGIN' and (tag == 'COMMIT' or not link.began)
                if last:
                    completed.clear()
                    proxy.pass_all()
                return not last

            proxy.asked, proxy.done = cut_the_completion, cut_its_answer
            exchange = world.ask(request, shop)
            if proxy.done is cut_its_answer:
                raise Broken('expected a call of idem_complete')
            final = exchange if exchange.answer.status == 200 else world.insist(request, shop)
            again = world.ask(request, shop).is_(200)
            again.unless(again.answer.body == final.answer.body, 'the body ' + wire.shown(final.answer.body))
    finally:
        proxy.end()


@promise('sessions ended by an administrator in mid-handler: 5xx or the answer, each effect once', needs='database',
         why='sessions of a server are ended')
def terminated(world):
    requests = {key: payment(key) for key in [new_key() for _ in range(5)]}
    with world.adds(payments=5):
        connections = []
        with world.locked('payments'):
            for request in requests.values():
                connection = wire.Connection(world.shop.port)
                connection.send(request.bytes())
                connections.append(connection)
            await_holder(world, 5)
            world.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                      "WHERE usename = 'shop' AND datname = %s", world.database)
        for connection in connections:
            with connection:
                connection.answer()
        settle(world, requests)
        once_each(world, requests)


@promise('the database restarted under load: each effect once, each answer byte for byte', needs='database',
         why='the server is restarted')
def restarted(world):
    bindir = subprocess.run([os.environ.get('PG_CONFIG', 'pg_config'), '--bindir'], check=True,
                            stdout=subprocess.PIPE, text=True).stdout.strip()
    data = world.value('SHOW data_directory')
    requests, seen = {}, {}
    over = threading.Event()

    def client():
        while not over.is_set():
            key = new_key()
            requests[key] = payment(key)
            try:
                answer = wire.send(world.shop.port, requests[key], 30)
                if answer.status == 201:
                    seen[key] = answer
            except (wire.HungUp, OSError):
                pass
            time.sleep(0.01)

    before = world.effects()['payments']
    clients = [threading.Thread(target=client, daemon=True) for _ in range(8)]
    for thread in clients:
        thread.start()
    for mode in ('fast', 'immediate'):
        time.sleep(0.5)
        subprocess.run([os.path.join(bindir, 'pg_ctl'), '-D', data, '-m', mode, '-w', '-l',
                        os.path.join(os.path.dirname(data), 'server.log'), 'restart'],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    over.set()
    for thread in clients:
        thread.join(40)
    if not seen or world.shop.process.poll() is not None:
        raise Broken('expected the shop to go on')
    settle(world, requests, seen=seen)
    once_each(world, requests)
    if world.effects()['payments'] - before != len(requests):
        raise Broken('expected %d payments, found %d' % (len(requests), world.effects()['payments'] - before))


@promise('no database: 5xx at once or after a while, and the shop recovers with it', needs='database',
         why='there is no database')
def unreachable(world):
    proxy = Proxy(world.pgbouncer and world.pgbouncer.port)
    try:
        with world.open(proxy.port) as shop, world.adds(payments=1):
            world.ask(get('/ping'), shop).is_(204)
            proxy.asked = lambda link, query: False
            request = payment(new_key())
            refused = world.ask(request, shop)
            refused.unless(500 <= refused.answer.status < 600, '5xx')
            proxy.pass_all()
            first = world.insist(request, shop).is_(201)
            world.ask(request, shop).replays(first)
    finally:
        proxy.end()


@promise('SIGTERM ends the shop: what is running gets its answer, or is run by the next', needs='process',
         why='the suite ends the process')
def sigterm(world):
    key = new_key()
    request = job(key, 700)
    shop = world.open(LEASE_MS=1000)
    with shop, wire.Connection(shop.port) as running:
        running.send(request.bytes())
        await_claim(world, key)
        took, status = shop.end()
        if status is None or took > 15:
            raise Broken('expected it to end within 15 seconds of SIGTERM')
        try:
            first = running.answer()
        except wire.HungUp:
            first = None
    if world.memory:
        return
    with world.open(LEASE_MS=1000) as shop:
        final = world.insist(request, shop).is_(200)
        if first is not None and first.status == 200:
            final.replays(first)
