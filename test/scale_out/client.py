#
# python3 test/scale_out/client.py
#
# The client for Python over the router, for clients.py, with threads or, with
# ASYNC=1, with asyncio: as client.mjs, which is the same for Node.  What is
# written here in coroutines never suspends with threads.
#

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

HERE = os.path.dirname(os.path.abspath(__file__))
CLIENT = os.path.join(HERE, '..', '..', 'clients', 'python')
sys.path[:0] = [os.path.join(CLIENT, 'src'), os.path.join(CLIENT, 'tests')]

from pg_idempotency import (AsyncIdempotency, Idempotency,  # noqa: E402
                            IdempotencyError, Response)
from pg_idempotency.runtimes import maybe_await, run        # noqa: E402
from proxy import Proxy                                     # noqa: E402

# Of shards that are down on purpose
logging.getLogger('psycopg.pool').setLevel(logging.CRITICAL)
ASYNC = bool(os.environ.get('ASYNC'))
SIZE = int(os.environ.get('POOL', 10))
POOL = AsyncConnectionPool if ASYNC else ConnectionPool
EVENT = asyncio.Event if ASYNC else threading.Event

questions = 0
asked, pools, proxies = [], [], []
runs = defaultdict(list)    # by scope and key, what has run
counting = threading.Lock()


def plain(function):
    """What the client calls: a coroutine of asyncio, or a function."""
    return function if ASYNC else lambda *given, **named: run(
        function(*given, **named))


class Pool(POOL):
    """Counts the connections that are lent."""

    lent = 0

    @plain
    async def getconn(self, timeout=None):
        found = await maybe_await(super().getconn(timeout))
        with counting:
            self.lent += 1
        return found

    @plain
    async def putconn(self, conn):
        try:
            await maybe_await(super().putconn(conn))
        finally:
            with counting:
                self.lent -= 1


class Router(Pool):
    """Counts how often a connection is taken."""

    def connection(self, *given):
        global questions
        questions += 1
        return super().connection(*given)


def made(conninfo, kind=Pool):
    if os.environ.get('COUNTED') and kind is Pool:
        there = conninfo_to_dict(conninfo)
        proxies.append(Proxy('%(host)s/.s.PGSQL.%(port)s' % there))
        conninfo = make_conninfo(conninfo, host='127.0.0.1',
                                 port=proxies[-1].port)
    # PgBouncer 1.18 knows no prepared statements.
    pool = kind(conninfo, kwargs={'prepare_threshold': None}, min_size=0,
                max_size=SIZE, timeout=10, open=False)
    pools.append(pool)
    return pool


async def opened(pool):
    await maybe_await(pool.open())
    return pool


@plain
async def shards(conninfo):
    asked.append(conninfo)
    return await opened(made(make_conninfo(conninfo, user='app')))


async def client():
    kind = AsyncIdempotency if ASYNC else Idempotency
    if one := os.environ.get('ONE_SERVER'):
        return kind(await opened(made(
            'host=%s port=5432 dbname=postgres user=app' % one)), schema='public')
    return kind(await opened(made('dbname=router user=web', Router)),
                schema='public', shards=shards)


@contextlib.asynccontextmanager
async def entered(manager):
    if ASYNC:
        async with manager as found:
            yield found
    else:
        with manager as found:
            yield found


async def pause(seconds):
    await maybe_await((asyncio if ASYNC else time).sleep(seconds))


class Stop:
    """A place where a handler stops until the test continues it."""

    def __init__(self):
        self.reached, self.gone = EVENT(), EVENT()


class Stops(dict):
    lock = threading.Lock()

    def __getitem__(self, name):
        with self.lock:
            return self.setdefault(name, Stop())


stops = Stops()


# The words of Node, and back

def snake(name):
    return re.sub('[A-Z]', lambda found: '_' + found[0].lower(), name)


def camel(name):
    return re.sub('_([a-z])', lambda found: found[1].upper(), name)


# complete() has its arguments in words of its own.
NAMED = {'body': 'response_body'}


async def called(functions, name, *given, named=None):
    named = {snake(NAMED.get(key, key)): one
             for key, one in (named or {}).items()}
    if name == 'canonicalJson':
        given = map(json.loads, given)      # takes a document
    return await maybe_await(getattr(functions, snake(name))(*given, **named))


def plainly(found):
    """As JSON has it."""
    if isinstance(found, list):
        return [plainly(one) for one in found]
    if dataclasses.is_dataclass(found):
        if getattr(found, 'state', '') is None:
            return None                     # lookup() of nothing
        return {camel(field.name): plainly(getattr(found, field.name))
                for field in dataclasses.fields(found)}
    if found is None or isinstance(found, (bool, int, float, str, dict)):
        return found
    return str(found)


async def act(does, scope, key, tx=None):
    """Run the commands of a handler or a step.  Returns the results of its calls."""
    found = []
    for what, *given in does:
        if what == 'effect':
            await maybe_await(tx.execute('INSERT INTO effects VALUES (%s, %s)',
                                         (scope, key)))
        elif what == 'on':
            found.append(plainly(await called(idem.on(tx), *given)))
        elif what == 'own':
            found.append(plainly(await called(idem, *given)))
        elif what == 'sql':
            await maybe_await(tx.execute(*given))
        elif what == 'sleep':
            await pause(given[0] / 1000)
        elif what == 'stop':
            stops[given[0]].reached.set()
            await maybe_await(stops[given[0]].gone.wait())
        elif what == 'fail':
            raise Exception(given[0])
        else:
            raise KeyError(what)
    return found


EFFECT = [['effect']]


class Verbs:

    @staticmethod
    async def request(scope, key, body='', document=None, does=EFFECT,
                      **given):
        @plain
        async def handler(tx):
            runs[scope, key].append('handler')
            await act(does, scope, key, tx)
            return Response(201, 'done ' + key)

        return await maybe_await(idem.request(
            scope, key, handler, method='POST', path='/',
            body=body.encode() if document is None else document, **given))

    @staticmethod
    async def job(scope, key, steps=(), does=EFFECT, finish=True, **given):
        @plain
        async def work(job):
            for name, *within in steps:
                @plain
                async def step(*_):
                    if name:
                        runs[scope, key].append(name)
                    await act(*(within or [[]]), scope, key)
                    return name
                await maybe_await(job.step(name, step) if name else step())
            if not finish:
                return Response(201, 'done ' + key)

            @plain
            async def last(tx):
                runs[scope, key].append('last')
                await act(does, scope, key, tx)
                return Response(201, 'done ' + key)
            return await maybe_await(job.finish(last))

        return await maybe_await(idem.job(scope, key, work, **given))

    @staticmethod
    async def transaction(scope=None, key='', does=EFFECT):
        async with entered(idem.transaction(scope)) as tx:
            runs[scope, key].append('handler')
            return await act(does, scope, key, tx)

    @staticmethod
    async def route(scope, key, does=EFFECT):
        """As a route does that needs no key."""
        @plain
        async def handler(tx):
            runs[scope, key].append('handler')
            return Response.json(await act(does, scope, key, tx))

        result = await idem.core.transaction(idem.call(scope, ''), handler)
        return json.loads(result.body)

    @staticmethod
    async def call(name, given, named=None):
        return await called(idem, name, *given, named=named)

    @staticmethod
    async def ran(scope, key):
        return runs[scope, key]

    @staticmethod
    async def reached(stop):
        await maybe_await(stops[stop].reached.wait())

    @staticmethod
    async def go(stop):
        stops[stop].gone.set()

    @staticmethod
    async def counted():
        global questions
        while any(pool.lent for pool in pools):
            await pause(0.001)
        found = {'trips': sum(proxy.trips for proxy in proxies),
                 'questions': questions, 'asked': asked}
        questions = 0
        for proxy in proxies:
            proxy.trips = 0
        return found


def said(error):
    diag = getattr(error, 'diag', None)
    return {'name': type(error).__name__, 'message': str(error),
            'sqlstate': getattr(error, 'sqlstate', None),
            'hint': getattr(error, 'hint', None)
            or getattr(diag, 'message_hint', None),
            'own': isinstance(error, IdempotencyError)}


out = threading.Lock()


async def answered(line):
    given = json.loads(line)
    answer = {'id': given.pop('id')}
    try:
        answer['result'] = plainly(
            await getattr(Verbs, given.pop('verb'))(**given))
    except Exception as error:
        answer['error'] = said(error)
    with out:
        print(json.dumps(answer), flush=True)


async def lines():
    """With asyncio: a task each."""
    global idem
    idem = await client()
    tasks = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        tasks.add(task := asyncio.create_task(answered(line)))
        task.add_done_callback(tasks.discard)
    os._exit(0)


if ASYNC:
    asyncio.run(lines())
idem = run(client())
with ThreadPoolExecutor(64) as threads:
    for line in sys.stdin:
        threads.submit(lambda line=line: run(answered(line)))
    os._exit(0)
