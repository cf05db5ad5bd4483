"""
The client for Python over the router and its shards; see clients/python.

Each request, job and transaction is on the shard where its scope lives, with
its effect; the router is asked for the place, and for what concerns several.
"""

import asyncio
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import routed
from servers import APPLICATION, SHARDS

HERE = os.path.dirname(os.path.abspath(__file__))
CLIENT = os.path.join(HERE, '..', '..', 'clients', 'python')
sys.path[:0] = [os.path.join(CLIENT, 'src'), os.path.join(CLIENT, 'tests')]

from pg_idempotency import (AsyncIdempotency, ClaimLost,    # noqa: E402
                            ClaimNotFound, Idempotency, IdempotencyError,
                            InProgress, KeyReused, Response, ScopeMoving,
                            new_key)
from pg_idempotency.http import Guard, Request, guarded     # noqa: E402
from pg_idempotency.shells import run                       # noqa: E402
from proxy import Proxy                                     # noqa: E402

# Of shards that are down on purpose
logging.getLogger('psycopg.pool').setLevel(logging.CRITICAL)
ROUTER = 'dbname=router user=web'
WORKERS = 6
SECONDS = 10                    # of each load; the runner sets it
TESTS = []


def test(function):
    TESTS.append(function)
    return function


def equal(found, expected, *what):
    if found != expected:
        raise AssertionError('%s: found %r in place of %r' % (
            ' '.join(map(str, what)), found, expected))
    return 1


def error_of(call, *args, **named):
    try:
        found = call(*args, **named)
    except Exception as error:
        return error
    raise AssertionError('%r in place of an error' % (found,))


def refused(error, kind, sqlstate, *words):
    """Returns how much was looked at."""
    return equal((isinstance(error, kind), error.sqlstate,
                  [word for word in words if word not in str(error)]),
                 (True, sqlstate, []), repr(error))


# How PgBouncer 1.18 wants them
UNNAMED = {'prepare_threshold': None}


def shard_pool(conninfo, kind=ConnectionPool, size=WORKERS + 4):
    return kind(make_conninfo(conninfo, user=APPLICATION), kwargs=UNNAMED,
                min_size=0, max_size=size, timeout=5,
                open=kind is ConnectionPool)


class Shards:
    """What the client is given, and which connection strings it asks with."""

    def __init__(self, **options):
        self.asked, self.pools, self.options = [], [], options

    def __call__(self, conninfo):
        self.asked.append(conninfo)
        self.pools.append(shard_pool(conninfo, **self.options))
        return self.pools[-1]


class Router:
    """Its pool, which counts how often a connection is taken."""

    def __init__(self, pool):
        self.pool, self.taken = pool, 0

    def connection(self):
        self.taken += 1
        return self.pool.connection()


@contextmanager
def client(**options):
    shards = Shards(**options)
    with ConnectionPool(ROUTER, min_size=1, max_size=WORKERS) as pool:
        idem = Idempotency(Router(pool), shards=shards)
        idem.shards, idem.router = shards, idem.core.places.source
        try:
            yield idem
        finally:
            for one in shards.pools:
                one.close()


def scopes_of(servers, stem):
    """One on each shard, in their order."""
    admin = servers.router('postgres')
    found = admin.run(
        "SELECT DISTINCT ON (shard) scope FROM (SELECT scope, "
        "idem_map.shard(scope) FROM (SELECT %s || '-' || n FROM "
        'generate_series(1, 1000) AS n) AS s (scope)) AS s ORDER BY shard',
        stem)
    admin.close()
    equal(len(found), SHARDS, 'shards that have scopes')
    return [scope for scope, in found]


def where(servers, table, column, value):
    """Shards with such rows, and how many."""
    found = {}
    for number, shard in enumerate(servers.shards):
        session = shard.session()
        count = session.one('SELECT count(*) FROM %s WHERE %s = %%s' % (
            table, column), value)
        session.close()
        if count:
            found[number] = count
    return found


def wait_until(condition, what):
    until = time.monotonic() + 60
    while not condition():
        equal(time.monotonic() < until, True, what)
        time.sleep(0.02)


def move(servers, what, to, *options):
    status, output = servers.move(*options, 'dbname=router', what, to)
    return equal(status, 0, output)


def effect(scope, key):
    def handler(tx):
        tx.execute('INSERT INTO effects VALUES (%s, %s)', (scope, key))
        return Response(201, 'done ' + key)
    return handler


def unkeyed(idem, scope, handler):
    """What a route does that requires no key."""
    return run(idem.core.transaction(idem.call(scope, ''), handler))


@test
def python_requests(servers):
    """Python: a request runs and is replayed where its scope lives"""
    count = 0
    with client() as idem:
        for number, scope in enumerate(scopes_of(servers, 'py-request')):
            for _ in range(2):
                key = new_key()

                def ask(body=b'{}'):
                    return idem.request(scope, key, effect(scope, key),
                                        method='POST', path='/', body=body)

                first, again = ask(), ask()
                count += equal((first.outcome, again.outcome, again.body),
                               ('new', 'replay', 'done ' + key), scope)
                count += equal(type(error_of(ask, b'[]')), KeyReused, scope)
                for table in ('effects', 'idem_keys'):
                    count += equal(where(servers, table, 'key', key),
                                   {number: 1}, table)
            # Undone with its transaction
            key = new_key()
            error_of(idem.request, scope, key,
                     lambda tx: (effect(scope, key)(tx), 1 / 0))
            count += equal(where(servers, 'effects', 'key', key), {}, scope)
            count += equal(type(error_of(
                idem.request, scope, key, lambda tx: idem.once(scope, 't'))),
                RuntimeError, 'a second connection')
            # A str is hashed by the shard.
            count += equal(idem.request(scope, key, effect(scope, key),
                                        method='POST', path='/', body='{}'
                                        ).outcome, 'new', scope)
        # Each scope was asked for once, and each pool made once.
        count += equal(idem.router.taken, SHARDS, 'questions')
        count += equal((len(idem.shards.asked), len(set(idem.shards.asked))),
                       (SHARDS, SHARDS), idem.shards.asked)
        # Duplicates of two processes, one of which waits
        key, started = new_key(), threading.Event()
        with client() as other:
            found = []

            def slow(tx):
                started.set()
                time.sleep(0.3)
                return effect(scope, key)(tx)

            thread = threading.Thread(target=lambda: found.append(
                idem.request(scope, key, slow).outcome))
            thread.start()
            started.wait()
            count += equal(type(error_of(other.request, scope, key, slow)),
                           InProgress, key)
            found.append(other.request(scope, key, slow, wait='20s').outcome)
            thread.join()
            count += equal(sorted(found), ['new', 'replay'], key)
    return count


@test
def python_jobs(servers):
    """Python: a job's claim, checkpoints and last step are with its scope"""
    count = 0
    with client() as idem:
        for number, scope in enumerate(scopes_of(servers, 'py-job')):
            key, ran = new_key(), []

            def work(job):
                job.step('first', lambda step: ran.append('first'))
                if job.attempt == 1:
                    raise ZeroDivisionError
                # Longer than the lease
                job.step('second', lambda step: time.sleep(0.7))
                return job.finish(effect(scope, key))

            error_of(idem.job, scope, key, work)
            found = idem.lookup(scope, key)
            count += equal((found.state, found.recovery_point, found.attempt),
                           ('failed', 'first', 1), scope)
            count += equal(
                [idem.job(scope, key, work, lease_ms=500).outcome
                 for _ in range(2)], ['new', 'replay'], scope)
            count += equal(ran, ['first'], scope)
            # Without a last step
            count += equal(idem.job(scope, new_key(), lambda job: Response(
                200, b'\xff')).stored, True, scope)
            for table in ('effects', 'idem_keys'):
                count += equal(where(servers, table, 'key', key), {number: 1},
                               table)
        count += equal(idem.router.taken, SHARDS, 'questions')
    return count


@test
def python_asynchronous(servers):
    """Python: the same with asyncio, and shards that are opened first"""
    scopes = scopes_of(servers, 'py-async')
    asked, pools, keys = [], [], {}

    async def shards(conninfo):
        asked.append(conninfo)
        await asyncio.sleep(0.05)
        pools.append(shard_pool(conninfo, AsyncConnectionPool))
        await pools[-1].open()
        return pools[-1]

    async def main(router):
        idem = AsyncIdempotency(router, shards=shards)

        def handler(scope, key):
            async def insert(tx):
                await tx.execute('INSERT INTO effects VALUES (%s, %s)',
                                 (scope, key))
                await idem.on(tx).once(scope, key)
                return Response(200, key)
            return insert

        def work(scope, key):
            async def steps(job):
                async def step(_):
                    return key
                await job.step('one', step)
                return await job.finish(handler(scope, key))
            return steps

        async def both(call, scope, make):
            key = keys[call, scope] = new_key()
            return [(await call(scope, key, make(scope, key))).outcome
                    for _ in range(2)]

        found = await asyncio.gather(*(
            both(call, scope, make) for scope in scopes
            for call, make in ((idem.request, handler), (idem.job, work),
                               (idem.request, handler))))
        count = equal(found, [['new', 'replay']] * len(found), 'outcomes')
        count += equal(sorted(asked), sorted(set(asked)), 'asked')
        count += equal([row.should_process for row in
                        await idem.try_advance_many(scopes, ['post'], ['a'],
                                                    [1, 2, 3, 4])],
                       [True] * SHARDS, 'batch')
        for scope in scopes:
            await idem.core.transaction(idem.call(scope, ''), handler(
                scope, keys.setdefault(('transaction', scope), new_key())))
            count += equal(await idem.once(scope, 'async'), True, scope)
        refusals = await asyncio.gather(
            idem.request(scopes[0], new_key(), handler(scopes[1], 'no')),
            return_exceptions=True)
        return count + equal(refusals[0].sqlstate, '55000', refusals)

    async def guarded_main():
        async with AsyncConnectionPool(ROUTER, open=False) as router:
            try:
                return await asyncio.wait_for(main(router), 60)
            finally:
                for pool in pools:
                    await pool.close()

    count = asyncio.run(guarded_main())
    for (_, scope), key in keys.items():
        count += equal(where(servers, 'effects', 'key', key),
                       {scopes.index(scope): 1}, scope)
    return count + equal(where(servers, 'effects', 'key', 'no'), {}, 'refused')


@test
def python_functions(servers):
    """Python: a function runs with its scope, and a batch on all shards"""
    scopes = a, b, c, d = scopes_of(servers, 'py-function')
    key, count = new_key(), 0
    with client() as idem:
        claim = idem.claim(a, key, idem.request_hash('GET', '/'))
        token = {'claim_token': claim.claim_token}
        for found, expected in (
                (claim.outcome, 'new'),
                (idem.checkpoint(a, key, 'half', {'n': 1}, **token) >
                 idem.heartbeat(a, key, lease='1s', **token), True),
                (idem.complete(a, key, 201, 'body', **token), True),
                (idem.lookup(a, key).response_body, 'body'),
                (idem.release(b, key, idem.claim(b, key).claim_token), True),
                (idem.fail(b, key, 'no', idem.claim(b, key).claim_token),
                 True),
                (idem.run(c, key, 'work(jsonb)', {'scope': c, 'key': key}
                          ).outcome, 'new'),
                ([one.outcome for one in idem.claim_many(d, [key, key])],
                 ['new', 'in_progress']),
                (idem.try_advance(a, 'post', '1', 5).should_process, True),
                (idem.toggle(b, 'post', '1', 'like', 5).is_active, True),
                (idem.set(c, 'post', '1', 'like', True, 5).processed, True),
                (idem.is_active(c, 'post', '1', 'like'), True),
                (len(idem.action_states(c, 'post', ['1', '2'])), 1),
                (idem.try_append(d, 'c', 1, 2).version, 2),
                (idem.last_client_seq(d, 'c'), 2),
                ([idem.once(a, 'form') for _ in range(2)], [True, False]),
                (idem.once_many(a, ['x', 'form', 'x']), ['x']),
                # By way of the router
                ([(one.ordinal, one.should_process) for one in
                  idem.try_advance_many([*scopes, a], ['post'], ['2'],
                                        [5, 6, 7, 8, 4])],
                 [(1, True), (2, True), (3, True), (4, True), (5, False)]),
                ([one.is_active for one in idem.set_many(
                    [d, c, b, a], ['post'], ['2'], ['like'],
                    [True, False, True, True], [9])],
                 [True, False, True, True]),
                (idem.canonical_json({'b': 1, 'a': 2}), '{"a":2,"b":1}'),
                (idem.key_is_valid('short'), False),
                (len(idem.publish_many(['py-%s' % s for s in scopes],
                                       [1, 2, 3, 4])), SHARDS)):
            count += equal(found, expected, count)
        idem.publish('py-topic', {'n': 1})
        count += equal(where(servers, 'idem_outbox', 'topic', 'py-topic'),
                       {servers.home('py-topic'): 1}, 'a message alone')
        for number, scope in enumerate(scopes):
            # A message is where its transaction is.
            def publish(tx):
                idem.on(tx).publish('py-topic-%d' % number, 1)
                return effect(scope, 'published-%d' % number)(tx)

            idem.request(scope, new_key(), publish)
            for table, column, value in (
                    ('idem_action_versions', 'user_id', scope),
                    ('idem_outbox', 'topic', 'py-topic-%d' % number),
                    ('effects', 'key', 'published-%d' % number)):
                count += equal(list(where(servers, table, column, value)),
                               [number], table, value)
        count += equal(where(servers, 'effects', 'key', key),
                       {servers.home(c): 1}, 'idem_run')
        for call in (idem.outbox_take, idem.cleanup, idem.stats, idem.health,
                     lambda: idem.outbox_ack([1]), idem.stats_reset,
                     lambda: idem.raise_claim_tokens(1)):
            error = error_of(call)
            count += equal(
                (isinstance(error, IdempotencyError),
                 "is each shard's own: use a client over that shard"
                 in str(error), isinstance(error.__cause__, psycopg.Error)),
                (True, True, True), repr(error))
        # Errors of the shard are as without a router.
        for call in (idem.forget, idem.erase):
            count += refused(error_of(call, a, key), psycopg.Error, '42501')
        count += refused(error_of(idem.claim, a, 'short'), IdempotencyError,
                         'ID001')
        count += refused(error_of(idem.once, None, 'x'), psycopg.Error,
                         '22004')
    for shard in servers.shards:
        shard.session().run('SELECT idem_outbox_ack(ARRAY('
                            'SELECT id FROM idem_outbox_take(100)))')
    return count


@test
def python_strays_are_refused(servers):
    """Python: a scope of another shard is refused in a transaction, once"""
    a, b = scopes_of(servers, 'py-stray')[:2]
    count = 0
    with client() as idem:
        for n, stray in enumerate((
                lambda on: on.once(b, 'stray'),
                lambda on: on.claim(b, 'stray-key-00000001'),
                lambda on: on.lookup(b, 'stray-key-00000001'),
                lambda on: on.is_active(b, 'post', '1', 'like'),
                lambda on: on.set(b, 'stray', '1', 'like', True, 9),
                lambda on: on.try_append(b, 'stray', 1),
                lambda on: on.try_advance_many([a, b], ['stray'], ['1'], [9]),
                lambda on: on.set_many([a, b], ['stray'], ['1'], ['like'],
                                       [True], [9]))):
            key, runs = 'stray-effect-%02d-x' % n, []

            def handler(tx):
                runs.append(1)
                effect(a, key)(tx)
                stray(idem.on(tx))
                return Response()

            for call in (lambda: idem.request(a, key, handler),
                         lambda: unkeyed(idem, a, handler)):
                count += refused(error_of(call), psycopg.Error, '55000',
                                 'does not live on this shard')
            # The handler's own error: it is not tried again.
            count += equal(len(runs), 2, key)
            count += equal(where(servers, 'effects', 'key', key), {}, key)
        for table, column, value in (
                ('idem_tokens', 'token', 'stray'),
                ('idem_keys', 'key', 'stray-key-00000001'),
                ('idem_action_versions', 'entity_type', 'stray'),
                ('idem_client_sequences', 'client_id', 'stray')):
            count += equal(where(servers, table, column, value), {}, table)

        def handler(tx):
            on = idem.on(tx)
            return Response.json([
                on.once(a, 'at home'),
                [one.should_process for one in on.try_advance_many(
                    [a, a], ['post'], ['1', '2'], [1])]])

        count += equal(unkeyed(idem, a, handler).body, '[true,[true,true]]')
    return count


@test
def python_moves(servers):
    """Python: a call waits for its scope while that moves, and not for ever"""
    router, admin = servers.router(), servers.router('postgres')
    scope, count = scopes_of(servers, 'py-move')[1], 0

    def begin(target):
        """A move that waits for a transaction."""
        user = servers.shards[servers.home(scope)].session(APPLICATION)
        user.run('BEGIN')
        user.run('SELECT idem_here(%s)', scope)
        process = servers.start_move('dbname=router', scope, target)
        wait_until(lambda: admin.run(
            'SELECT 1 FROM idem_map.scopes WHERE scope = %s AND moving_to = '
            '%s', scope, target), 'it does not begin')
        return user, process

    with client() as idem:
        key = new_key()
        idem.request(scope, key, effect(scope, key))
        # It has left since it was asked for, by a job, too.
        for target in (2, 3):
            def moved(job):
                job.step('one', lambda step: move(servers, scope, target))
                move(servers, scope, (target + 1) % SHARDS)
                return job.finish(effect(scope, 'py-moved-%d' % target))

            count += equal(idem.job(scope, new_key(), moved).outcome, 'new')
            count += equal(where(servers, 'effects', 'key',
                                 'py-moved-%d' % target),
                           {(target + 1) % SHARDS: 1})
            count += move(servers, scope, target)
            before, other = idem.router.taken, new_key()
            count += equal(
                [idem.request(scope, one, effect(scope, one)).outcome
                 for one in (key, other)], ['replay', 'new'])
            count += equal(idem.router.taken - before, 1, 'questions')
            count += equal(where(servers, 'effects', 'key', other),
                           {target: 1})
        slot = admin.one('SELECT idem_map.slot(%s)', 'py-in-a-slot')
        home = servers.home('py-in-a-slot')
        idem.once('py-in-a-slot', 'form')
        for target in ((home + 1) % SHARDS, home):
            count += move(servers, slot, target, '--slot')
            count += equal(idem.once('py-in-a-slot', 'form'), False)
            count += equal(idem.job('py-in-a-slot', new_key(), lambda job:
                                    job.finish(effect('slot', 'py-%d' % target)
                                               )).outcome, 'new')
            count += equal(where(servers, 'effects', 'key', 'py-%d' % target),
                           {target: 1})
        # While it moves: who does not know its place waits, and who does may
        # pass before the gate is closed.  A job is in its midst.
        stepped, go, found, threads = threading.Event(), threading.Event(), \
            {}, []

        def work(job):
            job.step('one', lambda step: stepped.set() or go.wait(30) and None)
            return job.finish(effect(scope, 'py-job-moved'))

        def start(name, call, *args):
            def keep():
                try:
                    found[name] = call(*args)
                except Exception as error:
                    found[name] = error
            threads.append(threading.Thread(target=keep))
            threads[-1].start()

        start('job', lambda: idem.job(scope, new_key(), work).outcome)
        stepped.wait(30)
        user, process = begin(0)
        with client() as other:
            for number, one in enumerate((idem, other)):
                name = 'py-moving-%d-%%s' % number
                start('request%d' % number, lambda one=one, name=name:
                      one.request(scope, new_key(), effect(
                          scope, name % 'request')).outcome)
                start('once%d' % number, one.once, scope, name % 'once')
                start('unkeyed%d' % number, lambda one=one, name=name:
                      unkeyed(one, scope, effect(scope, name % 'alone')
                              ).outcome)
            go.set()
            time.sleep(1)
            count += equal([name for name in found if name[-1] == '1'], [],
                           'those who have passed')
            user.run('COMMIT')
            output, _ = process.communicate()
            count += equal(process.returncode, 0, output)
            for thread in threads:
                thread.join()
        count += equal(found, {'job': 'new', **{
            name + n: True if name == 'once' else 'new' for n in '01'
            for name in ('request', 'once', 'unkeyed')}})
        for key in ('py-job-moved', *(
                'py-moving-%d-%s' % (n, what) for n in (0, 1)
                for what in ('request', 'alone'))):
            found = where(servers, 'effects', 'key', key)
            count += equal(found in ({0: 1}, {3: 1}) if '1' not in key
                           else found == {0: 1}, True, key, found)
        # One that does not end
        admin.run('UPDATE idem_map.scopes SET moving_to = 1 WHERE scope = %s',
                  scope)
        gate = servers.shards[0].session()
        gate.run('UPDATE idem_gate.places SET here = false WHERE scope = %s',
                 scope)
        began, http = time.monotonic(), []
        key = new_key()
        request = Request('POST', '/', [('Idempotency-Key', key)], b'{}')
        threads = [threading.Thread(target=lambda guard=guard: http.append(run(
            guarded(idem, guard, request, lambda access: 1 / 0))))
            for guard in (Guard(scope=lambda request: scope),
                          Guard(scope=lambda request: scope, job=True))]
        for thread in threads:
            thread.start()
        error = error_of(idem.once, scope, 'never')
        count += refused(error, ScopeMoving, '55P03', 'is being moved')
        count += equal('scale-out/move' in error.hint, True, error.hint)
        count += equal(10 <= time.monotonic() - began < 20, True, 'patience')
        for thread in threads:
            thread.join()
        for answer in http:
            count += equal(
                (answer.status, dict(answer.headers)['Retry-After'],
                 b'"urn:pg-idempotency:scope-moving","title":"Scope is being '
                 b'moved"' in answer.body), (503, '1', True), answer)
        count += equal(len(http), 2, http)
        began = time.monotonic()
        error = error_of(idem.request, scope, key, None, wait='12 s')
        count += refused(error, ScopeMoving, '55P03')
        count += equal(12 <= time.monotonic() - began < 22, True, 'its wait')
        gate.run('UPDATE idem_gate.places SET here = true WHERE scope = %s',
                 scope)
        admin.run('UPDATE idem_map.scopes SET moving_to = NULL WHERE scope = '
                  '%s', scope)
        count += equal(idem.request(scope, key, effect(scope, key)).outcome,
                       'new')
    router.close()
    return count


@test
def python_ended_by_hand(servers):
    """Python: a handler's own COMMIT lets its scope go: nothing is kept"""
    scope, count = scopes_of(servers, 'py-by-hand')[0], 0
    gate = servers.shards[0].session()
    gate.run('INSERT INTO idem_gate.places (slot, scope, here) '
             'VALUES (idem_gate.slot(%s), %s, true)', scope, scope)

    def is_here(here):
        gate.run('UPDATE idem_gate.places SET here = %s WHERE scope = %s',
                 here, scope)

    def leaves(*commands):
        def handler(tx):
            tx.execute('COMMIT')
            is_here(False)
            for command in commands:
                tx.execute(command)
            return Response()
        return handler

    with client() as idem:
        for call in (
                lambda key: idem.request(scope, key, leaves()),
                lambda key: idem.job(scope, key, lambda job: job.finish(
                    leaves('BEGIN')))):
            key = new_key()
            count += refused(error_of(call, key), psycopg.Error, '55000',
                             'does not live on this shard')
            is_here(True)
            count += equal(idem.lookup(scope, key).state, 'started')
    gate.run('DELETE FROM idem_gate.places WHERE scope = %s', scope)
    return count


@test
def python_wrong_maps(servers):
    """Python: a hole, a wrong shard, another address, a crash: no doubles"""
    admin, scope = servers.router('postgres'), 'py-without-a-place'
    slot, home = admin.one('SELECT idem_map.slot(%s)', scope), \
        servers.home(scope)
    key, count = new_key(), 0
    # One connection, which is dead or is not
    with client(size=1) as idem:
        calls = (lambda: idem.request(scope, key, effect(scope, key)),
                 lambda: idem.job(scope, key, lambda job: 1 / 0),
                 lambda: unkeyed(idem, scope, effect(scope, key)),
                 lambda: idem.once(scope, 'form'))
        admin.run('DELETE FROM idem_map.slots WHERE slot = %s', slot)
        for call in calls:
            before = idem.router.taken
            count += refused(error_of(call), psycopg.Error, '55000',
                             'no shard is known')
            count += equal(idem.router.taken - before, 1, 'questions')
        admin.run('INSERT INTO idem_map.slots VALUES (%s, %s)', slot,
                  (home + 1) % SHARDS)
        for call in calls:
            before = idem.router.taken
            count += refused(error_of(call), psycopg.Error, '55000',
                             'does not live on this shard')
            count += equal(idem.router.taken - before, 3, 'questions')
        admin.run('UPDATE idem_map.slots SET shard = %s WHERE slot = %s', home,
                  slot)
        count += equal(calls[0]().outcome, 'new')
        count += equal(where(servers, 'effects', 'key', key), {home: 1})
        # The shard is elsewhere, where nobody is at its old address; its
        # connections are not PgBouncer's, which would know that it crashed.
        shard, was = servers.shards[home], admin.one(
            'SELECT connection FROM idem_map.shards WHERE shard = %s', home)

        def crash():
            # Not before the ROLLBACK behind a replay: that would notice.
            pool = idem.shards.pools[-1]
            wait_until(lambda: pool.get_stats()['pool_available'] == 1,
                       'the pool does not get its connection back')
            restart()

        def restart():
            shard.kill()
            shard.start()

        def questions(call, number):
            before = idem.router.taken
            found = call()
            return equal(idem.router.taken - before, number, 'questions',
                         found)

        def lost(call):
            error = error_of(call)
            return equal(isinstance(error, psycopg.OperationalError), True,
                         repr(error))

        def address(host):
            admin.run("ALTER SERVER idempotency OPTIONS (SET p%d 'host=%s "
                      "port=5432 dbname=postgres')" % (home, host))

        alias = os.path.join(servers.work, 'alias')
        os.symlink(shard.socket, alias)
        address(alias)
        idem.core.places.forget(scope)
        count += questions(calls[3], 1)
        os.unlink(alias)
        address(shard.socket)
        count += questions(calls[3], 0)
        # Nothing has run: the same call goes on at the new one.
        crash()
        count += questions(calls[0], 1)
        for call in (calls[0], calls[2],
                     lambda: idem.job(scope, new_key(), lambda job: job.finish(
                         effect(scope, key + '-job')))):
            crash()
            count += questions(call, 1)
        # In the midst of a job, before its last step
        count += questions(lambda: idem.job(scope, new_key(), lambda job: (
            crash(), job.finish(effect(scope, key + '-last')))[1]), 1)
        count += equal(where(servers, 'effects', 'key', key + '-last'),
                       {home: 1})
        # What a function has done is unknown, so it is not repeated.
        crash()
        count += questions(lambda: lost(calls[3]), 0)
        count += questions(calls[3], 1)
        shard.kill()
        try:
            count += lost(calls[0])
        finally:
            shard.start()
        count += questions(lambda: equal(calls[0]().outcome, 'replay'), 1)
        # It is lost in a handler, whose error it is; the next one asks.
        other = os.path.join(servers.work, 'other')
        os.symlink(shard.socket, other)
        address(other)
        idem.core.places.forget(scope)
        runs = []

        def losing(tx):
            runs.append(1)
            os.unlink(other)
            address(shard.socket)
            restart()
            return effect(scope, key)(tx)

        count += questions(lambda: lost(lambda: idem.request(
            scope, new_key(), losing)), 1)
        count += equal(len(runs), 1, 'runs')
        # And once more, as the pool at the new address has a dead one.
        count += questions(lambda: equal(calls[0]().outcome, 'replay'), 2)
        # A pool that cannot connect
        address(alias)
        idem.core.places.forget(scope)
        count += lost(calls[3])
        admin.run("ALTER SERVER idempotency OPTIONS (SET p%d '%s')"
                  % (home, was))
        count += questions(calls[3], 1)
    # Another isolation level may see the scope where it was.
    scope = scopes_of(servers, 'py-isolation')[0]
    strict = Idempotency(ROUTER, shards=lambda conninfo: make_conninfo(
        servers.shards[0].dsn(APPLICATION),
        options='-c default_transaction_isolation=serializable'))
    count += refused(error_of(strict.once, scope, 'x'), psycopg.Error, '0A000',
                     'isolation level')
    return count


@test
def python_round_trips(servers):
    """Python: as many round trips as with one server, and no question more"""
    scope, count = scopes_of(servers, 'py-trips')[0], 0
    proxy = Proxy(os.path.join(servers.shards[0].socket, '.s.PGSQL.5432'))
    connection = psycopg.connect(proxy.conninfo + ' dbname=postgres user=app',
                                 **UNNAMED)

    class Source:
        """Of one connection"""

        lock = threading.Lock()

        def connection(self):
            return self

        def __enter__(self):
            self.lock.acquire()
            return connection

        def __exit__(self, *error):
            self.lock.release()

    source = Source()

    def trips(idem):
        found, key = [], new_key()
        for call in (
                lambda: idem.request(scope, key, effect(scope, key)),
                lambda: idem.request(scope, key, effect(scope, key)),
                lambda: idem.job(scope, new_key(), lambda job: (
                    job.step('one', lambda step: 1),
                    job.finish(effect(scope, key)))[1]),
                lambda: idem.job(scope, key, None),
                lambda: unkeyed(idem, scope, effect(scope, key)),
                lambda: idem.once(scope, key),
                lambda: unkeyed(idem, scope, lambda tx: Response.json(
                    idem.on(tx).once(scope, key + '2')))):
            before = proxy.trips
            call()
            # The ROLLBACK of a replay is behind the answer.
            time.sleep(0.2)
            with source.lock:
                found.append(proxy.trips - before)
        return found

    try:
        one = trips(Idempotency(source))
        with client() as idem:
            idem = Idempotency(idem.router, shards=lambda conninfo: source)
            idem.once(scope, 'warm')
            before = idem.core.places.source.taken
            many = trips(idem)
            count += equal(idem.core.places.source.taken, before, 'questions')
        # Only BEGIN and idem_here in place of BEGIN
        count += equal(many, one, 'round trips') + len(one)
        print('# round trips of a request, a replay, a job, its replay, a '
              'transaction, a function, one in a transaction: %s' % many,
              flush=True)
    finally:
        connection.close()
        proxy.close()
    return count


class Worker:
    """Sends requests and jobs until it is told that they have been done."""

    def __init__(self, idem, scopes, number, until):
        self.idem, self.scopes, self.until = idem, scopes, until
        self.rng = random.Random(number)
        self.number, self.done, self.errors = number, [], Counter()

    def run(self):
        while time.monotonic() < self.until:
            scope = self.rng.choice(self.scopes)
            key = 'python-effect-%d-%06d' % (self.number, len(self.done))
            call = self.rng.choice((self.request, self.request, self.job))
            patience = time.monotonic() + 60
            while not self.attempt(call, scope, key):
                equal(time.monotonic() < patience, True, 'no answer for', key)
            self.done.append((scope, key))

    def request(self, scope, key):
        return self.idem.request(scope, key, self.pausing(scope, key),
                                 wait='2 s')

    def job(self, scope, key):
        def work(job):
            job.step('one', lambda step: time.sleep(self.pause()))
            return job.finish(self.pausing(scope, key))
        return self.idem.job(scope, key, work, lease='1 s', wait='2 s')

    def pause(self):
        return self.rng.choice((0, 0, 0.02))

    def pausing(self, scope, key):
        def handler(tx):
            time.sleep(self.pause())
            self.idem.on(tx).once(scope, key)
            return effect(scope, key)(tx)
        return handler

    def attempt(self, call, scope, key):
        try:
            if self.rng.random() < 0.3:
                call(scope, key)
            return equal(call(scope, key).body, 'done ' + key)
        except (ScopeMoving, InProgress, ClaimLost, ClaimNotFound,
                psycopg.OperationalError) as error:
            self.errors[type(error).__name__] += 1
        except psycopg.Error as error:
            # Three times it had left: moves are one a moment here.
            equal(error.sqlstate, '55000', repr(error))
            self.errors[error.sqlstate] += 1
        time.sleep(0.01)
        return False


def once_each(servers, idem, scopes, crashes):
    """Requests and jobs amid moves, and then what came of them."""
    until = time.monotonic() + SECONDS
    workers = [Worker(idem, scopes, n, until) for n in range(WORKERS)]
    trouble = routed.Trouble(servers, random.Random(1), scopes)
    if not crashes:
        trouble.crash = lambda until: None
    trouble.run(until, lambda: routed.histories.in_parallel(
        workers, lambda worker: worker.run()))
    effects, tokens, places = Counter(), Counter(), {}
    for number, shard in enumerate(servers.shards):
        session = shard.session()
        for table, column, counts in (('effects', 'key', effects),
                                      ('idem_tokens', 'token', tokens)):
            for pair in session.run(
                    "SELECT scope, %s FROM %s WHERE %s LIKE 'python-effect-%%'"
                    % (column, table, column)):
                counts[pair] += 1
        for pair in session.run("SELECT scope, key FROM idem_keys WHERE key "
                                "LIKE 'python-effect-%'"):
            places.setdefault(pair, []).append(number)
        for table, column in (('effects', 'key'), ('idem_tokens', 'token'),
                              ('idem_keys', 'key')):
            session.run("DELETE FROM %s WHERE %s LIKE 'python-effect-%%'" % (
                table, column))
        session.close()
    done = {pair: 1 for worker in workers for pair in worker.done}
    for counts in (effects, tokens):
        equal({pair: n for pair, n in counts.items() if n != done.get(pair)},
              {}, 'doubled, or nobody was told')
        equal(set(done) - set(counts), set(), 'lost')
    equal({pair: found for pair, found in places.items() if len(found) != 1},
          {}, 'on several shards')
    errors = sum((worker.errors for worker in workers), Counter())
    print('# %d requests and jobs; %d moves (%d cut off), %d crashes; %s' % (
        len(done), trouble.moves, trouble.cut_off, trouble.crashes,
        dict(errors) or 'no errors'), flush=True)
    equal((trouble.moves > 0, trouble.crashes > 0, bool(done)),
          (True, crashes, True), 'what has happened')
    return len(done), errors


@test
def python_effects_happen_once(servers):
    """Python: requests and jobs amid moves, and crashes: each effect once"""
    scopes = scopes_of(servers, 'py-once') + ['py-once']
    with client() as idem:
        moved, errors = once_each(servers, idem, scopes, False)
        # A move that was cut off goes on, or back, within the patience.
        equal(set(errors) - {'InProgress', 'ScopeMoving'}, set(),
              'errors that no move may bring')
    with client() as idem:
        crashed, _ = once_each(servers, idem, scopes, True)
    return moved + crashed
