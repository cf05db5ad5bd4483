"""shards=: the map of a router that is none.  See test/scale_out for a real one."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager

import psycopg
import pytest
from proxy import Proxy
from psycopg_pool import ConnectionPool, PoolTimeout

from pg_idempotency import AsyncIdempotency, Idempotency, NotInstalled, Response, ScopeMoving, TimedOut, core, new_key, shards
from pg_idempotency.functions import make, render, scope_of, with_pinned_scope
from pg_idempotency.http import Exchange, Guard, guarded
from pg_idempotency.memory import MemoryIdempotency
from pg_idempotency.shards import Server, Shards
from pg_idempotency.runtimes import AsyncRuntime, SyncRuntime, run


class Backend:
    """A router's connection, which gives the prepared answers."""

    size = None

    def __init__(self, answer):
        self.source, self.asked = self, []
        self.answer = answer

    @asynccontextmanager
    async def session(self):
        yield self

    async def abort(self):
        pass

    async def perform(self, statement):
        scope = statement.arguments[0].value
        self.asked.append(scope)
        found = self.answer(scope)
        if isinstance(found, Exception):
            raise found
        return found


def map_of(answer, connect=lambda conninfo: conninfo):
    """Its servers are named by what connect() returns."""
    def make_server(source):
        found = Server(Backend(None), 1)
        found.name = source
        return found

    return Shards(Backend(answer), connect, make_server, SyncRuntime())


def at(servers, scope, patience=10.0):
    return run(servers.server_of(scope, time.monotonic() + patience)).name


def test_it_remembers_so_many_and_drops_the_oldest():
    servers = map_of(lambda scope: f"shard{len(scope) % 4}")
    for number in range(shards.MAX_KNOWN_SCOPES + 10):
        assert at(servers, f"scope-{number}") == f"shard{len(f'scope-{number}') % 4}"
    assert shards.MAX_KNOWN_SCOPES == 10_000 == len(servers._known)
    before = len(servers.server.backend.asked)
    for number in range(10, shards.MAX_KNOWN_SCOPES + 10):
        at(servers, f"scope-{number}")
    assert len(servers.server.backend.asked) == before
    at(servers, "scope-9")
    assert servers.server.backend.asked[before:] == ["scope-9"]
    servers.forget("scope-9")
    servers.forget("unheard of")
    at(servers, "scope-9")
    assert servers.server.backend.asked[before:] == ["scope-9", "scope-9"]


def test_threads_share_it(monkeypatch):
    """Each connection string is used once, and a slow one delays no other."""
    monkeypatch.setattr(shards, "MAX_KNOWN_SCOPES", 20)
    asked, free = [], threading.Event()

    def connect(conninfo):
        asked.append(conninfo)
        assert conninfo != "shard0" or free.wait(20)
        return conninfo

    servers, found = map_of(lambda scope: f"shard{int(scope) % 4}", connect), []
    slow = [threading.Thread(target=lambda: found.append(at(servers, "0"))) for _ in range(3)]
    for thread in slow:
        thread.start()

    def work(number):
        for n in range(2000):
            scope = str((number * 7 + n) % 64 // 4 * 4 + 1 + n % 3)
            found.append(at(servers, scope) == f"shard{int(scope) % 4}")
            if n % 5 == 0:
                servers.forget(scope)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8000
    free.set()
    for thread in slow:
        thread.join()
    assert found[8000:] == ["shard0"] * 3
    assert sorted(asked) == ["shard0", "shard1", "shard2", "shard3"] and len(servers._known) <= 20


def test_a_pool_that_could_not_be_made_is_made_the_next_time():
    tries = []

    def connect(conninfo):
        tries.append(conninfo)
        if len(tries) == 1:
            raise ZeroDivisionError
        return conninfo

    servers = map_of(lambda scope: "shard", connect)
    with pytest.raises(ZeroDivisionError):
        at(servers, "u")
    assert at(servers, "u") == "shard" and len(tries) == 2


def test_a_router_that_was_restarted():
    """A pool may have kept three dead connections, but more is another fault."""
    errors = [psycopg.OperationalError("gone"), psycopg.errors.AdminShutdown("gone")]
    servers = map_of(lambda scope: errors.pop() if errors else "shard")
    assert at(servers, "u") == "shard" and len(servers.server.backend.asked) == 3
    for error, asked in ((psycopg.OperationalError("gone"), 3),
                         (psycopg.errors.ObjectNotInPrerequisiteState("no shard is known"), 1)):
        servers = map_of(lambda scope: error)
        with pytest.raises(psycopg.Error) as raised:
            at(servers, "u")
        assert raised.value is error and len(servers.server.backend.asked) == asked


def test_a_scope_that_is_being_moved():
    moving = psycopg.errors.LockNotAvailable('scope "u" is being moved to another shard')
    until = time.monotonic() + 0.6
    servers = map_of(lambda scope: moving if time.monotonic() < until else "shard")
    with pytest.raises(ScopeMoving, match="is being moved") as raised:
        at(servers, "u", 0.2)
    error = raised.value
    assert (error.sqlstate, error.retry_after, error.__cause__) == ("55P03", 1, moving)
    assert at(servers, "u") == "shard" and time.monotonic() >= until
    assert 3 <= len(servers.server.backend.asked) <= 20


def test_waiters_are_each_servers():
    idem = Idempotency("", shards=lambda conninfo: conninfo, max_waiters=1)
    one, other = (run(idem.core.servers._server_at(conninfo)) for conninfo in ("dbname=a", "dbname=b"))
    one.free.pop()
    assert (one.free, other.free) == ([], [True])


@pytest.fixture
def known(monkeypatch):
    """A client whose map has been filled in by hand."""
    def make(kind, connect):
        idem = kind("", shards=connect)
        monkeypatch.setattr(idem.core.servers.server, "backend", Backend(lambda scope: f"dbname=nowhere{scope}"))
        return idem
    return make


def test_what_shards_may_not_return(known):
    async def coroutine(conninfo):
        await asyncio.sleep(0)

    with pytest.raises(TypeError, match="use AsyncIdempotency"):
        known(Idempotency, coroutine).once("u", "token")
    with pytest.raises(TypeError, match="a pool, a function"):
        known(Idempotency, lambda conninfo: None).once("u", "token")


def test_tasks_share_what_is_awaited(known):
    made = []

    async def connect(conninfo):
        made.append(conninfo)
        await asyncio.sleep(0.05)
        return conninfo

    async def main():
        servers = known(AsyncIdempotency, connect).core.servers
        found = await asyncio.gather(*(servers.server_of(str(n % 3), 0) for n in range(30)))
        return len(set(map(id, found)))

    assert asyncio.run(main()) == 3 and sorted(made) == [f"dbname=nowhere{n}" for n in range(3)]


@pytest.mark.parametrize("call, kept", [
    (lambda: make["claim"].make(None, "u", "k"), "scope => S.idem_pin_scope(scope => CAST('u' AS text))"),
    (lambda: make["set"].make(None, "u", "e", "1", "like", True, 1), "user_id => S.idem_pin_scope(scope => CAST('u' AS text))"),
    (lambda: make["try_append"].make(None, "u", "c", 1), "aggregate => S.idem_pin_scope(scope => CAST('u' AS text))"),
    (lambda: make["try_advance_many"].make(None, ["u", "v"], ["e"], ["1"], [1]),
     "user_ids => S.idem_pin_scope(scopes => CAST(['u', 'v'] AS text[]))"),
    (lambda: make["publish"].make(None, "u", 1), None),
    (lambda: make["publish_many"].make(None, ["u"], [1]), None),
    (lambda: make["request_hash"].make(None, "GET", "/"), None),
    (lambda: make["stats"].make(None), None),
])
def test_what_is_kept_where_it_is(call, kept):
    statement = call()
    text = render(with_pinned_scope(statement), "S", repr)
    assert text.count("idem_pin_scope") == (kept is not None) and (kept or "") in text
    # By itself it goes to the shard if it is about one scope, and to the router if about none or several.
    assert scope_of(statement) == ("u" if kept and "scopes" not in kept else None)


def test_a_transaction_needs_its_scope():
    idem = Idempotency("", shards=lambda conninfo: conninfo)
    with pytest.raises(TypeError, match="needs a scope"), idem.transaction():
        pass


@pytest.mark.parametrize("job", [False, True])
@pytest.mark.parametrize("keyed", [True, False])
def test_over_http_a_scope_that_is_being_moved_is_503(known, monkeypatch, job, keyed):
    monkeypatch.setattr(core, "MOVE_WAIT", 0.05)
    idem = known(Idempotency, lambda conninfo: conninfo)
    idem.core.servers.server.backend.answer = lambda scope: psycopg.errors.LockNotAvailable("is being moved to another shard")
    exchange = Exchange(idem, "POST", "/", ["key-of-16-or-more"] if keyed else [], None)
    exchange.whole = True
    guard = Guard(scope=lambda request: "u", job=job, required=False)
    answer = run(guarded(exchange, guard, None, lambda: "u", lambda: None, lambda access, tries: 1 / 0))
    assert (answer.status, dict(answer.headers)["Retry-After"]) == (503, "1")
    found = json.loads(answer.body)
    assert (found["type"], found["title"]) == ("urn:pg-idempotency:scope-moving", "Scope is being moved")


def test_over_http_so_it_is_in_the_middle_of_a_job(idem):
    def respond(access, tries):
        raise ScopeMoving("it is being moved")

    exchange = Exchange(idem, "POST", "/", [new_key()], None)
    exchange.whole = True
    answer = run(guarded(exchange, Guard(scope=lambda request: "u", job=True), None, lambda: "u", lambda: None, respond))
    assert (answer.status, json.loads(answer.body)["type"]) == (503, "urn:pg-idempotency:scope-moving")


def test_a_cancelled_task_does_not_make_a_pool_twice():
    made = []

    async def shards(conninfo):
        made.append(conninfo)
        await asyncio.sleep(0.2)
        return "dbname=nowhere"

    async def main():
        servers = Shards(Backend(lambda scope: "one"), shards, lambda source: Server(Backend(None), 1), AsyncRuntime())
        until = time.monotonic() + 10
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(servers.server_of("a", until), 0.05)
        assert await servers.server_of("a", until) is await servers.server_of("b", until)

    asyncio.run(main())
    assert made == ["one"]


def test_several_loops_share_a_client():
    fails = [True, False]

    async def shards(conninfo):
        await asyncio.sleep(0.05)
        if fails.pop(0) if fails else False:
            raise ValueError("no password")
        return conninfo

    servers = Shards(Backend(lambda scope: "one"), shards, lambda source: Server(Backend(None), 1), AsyncRuntime())

    async def three():
        return await asyncio.gather(*(servers.server_of("a", time.monotonic() + 10) for _ in range(3)), return_exceptions=True)

    assert {type(one) for one in asyncio.run(three())} == {ValueError}
    found = []
    threads = [threading.Thread(target=lambda: found.extend(asyncio.run(three()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(one) for one in found] == [Server] * 9


def test_a_handler_holds_a_connection_of_router_and_shard(database):
    """A client over the shard would wait for that, too."""
    with ConnectionPool("", min_size=1, max_size=1) as pool:
        many, one = Idempotency("", shards=lambda conninfo: pool), Idempotency(pool)
        many.core.servers._known["a"] = run(many.core.servers._server_at("one"))
        many.core.servers.pin = lambda scope: None         # there is no guard
        with many.transaction("a"):
            for call in (one.stats, lambda: many.once("a", "x")):
                with pytest.raises(RuntimeError, match="second connection"):
                    call()


def test_a_router_that_does_not_answer_holds_no_request(database, monkeypatch):
    """Its connection is closed when the time limit is over, so that a pool of one continues."""
    monkeypatch.setattr(shards, "ROUTER_LIMIT", 1)
    monkeypatch.setattr("pg_idempotency.runtimes.ABORT_DELAY", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1) as pool:
        servers = Idempotency(pool, shards=lambda conninfo: None).core.servers
        proxy.silence, began = b"idem_shard", time.monotonic()
        end = threading.Timer(20, proxy.close)
        end.start()
        with pytest.raises(TimedOut, match="within 1 s"):
            run(servers.server_of("a", began + 10))
        with pytest.raises(NotInstalled):                   # the database is no router
            run(servers.server_of("a", began + 10))
        assert time.monotonic() - began < 9
    end.cancel()
    proxy.close()


def test_a_job_is_cancelled_at_once_while_its_scope_is_moving(asynchronously):
    async def test(idem, pool):
        servers, moving = idem.core.servers, False
        real = servers.server_of

        async def of(scope, until):
            if moving:
                await asyncio.sleep(max(0.0, until - time.monotonic()))
                raise ScopeMoving("it is being moved")
            return await real(scope, until)

        servers.server_of = of

        async def work(job):
            async def step(step):
                nonlocal moving
                moving = True
                await asyncio.sleep(30)
            await job.step("long", step)

        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(idem.job("cancelled", new_key(), work, lease="3 seconds"), 1.2)
        assert time.monotonic() - began < 2.5

    asynchronously(test)


def test_a_short_move_costs_no_lease(asynchronously):
    """A heartbeat that met it comes again soon, not a third of the lease later."""
    async def test(idem, pool):
        servers, began = idem.core.servers, time.monotonic()
        real = servers.server_of

        async def of(scope, until):
            if 0.5 < time.monotonic() - began < 2.3:
                raise ScopeMoving("it is being moved")
            return await real(scope, until)

        servers.server_of = of

        async def work(job):
            await job.step("long", lambda step: asyncio.sleep(4, True))
            return Response(200)

        return await idem.job("short", new_key(), work, lease="3 seconds")

    assert asynchronously(test).outcome == "new"


def test_only_what_cannot_be_reached_is_asked_for_again():
    faults = []

    class Shard(Backend):
        @asynccontextmanager
        async def session(self):
            if faults:
                raise faults.pop()
            yield self

        lost = False

        async def perform(self, statement):
            return True

        async def rollback(self):
            pass

    servers = Shards(Backend(lambda scope: "one"), lambda conninfo: conninfo, lambda source: Server(Shard(None), 1),
                     SyncRuntime())
    found = core.Core(servers, SyncRuntime())
    once = make["once"].make(None, "a", "x")
    for fault, asked in ((None, 1), (None, 1), (PoolTimeout("none in time"), 2), (psycopg.OperationalError("refused"), 3)):
        faults[:] = [fault] if fault else []
        try:
            run(found.perform(once))
        except psycopg.OperationalError:
            pass
        run(found.perform(once))
        assert len(servers.server.backend.asked) == asked


def test_a_router_that_cannot_be_reached_is_tried_once():
    class Router(Backend):
        def session(self):
            self.asked.append(1)
            raise psycopg.OperationalError("refused")

    router = Router(None)
    with pytest.raises(psycopg.OperationalError, match="refused"):
        run(Shards(router, None, None, SyncRuntime()).server_of("a", time.monotonic() + 5))
    assert len(router.asked) == 1


@pytest.mark.parametrize("where, error, unavailable", [
    ("claim", psycopg.errors.ReadOnlySqlTransaction("a standby"), True), ("claim", psycopg.errors.TooManyConnections("too many"), True),
    ("claim", psycopg.errors.AdminShutdown("it ends"), True), ("claim", psycopg.OperationalError("connection refused"), True),
    ("claim", PoolTimeout("no connection"), True), ("claim", psycopg.errors.InsufficientPrivilege("denied"), False),
    ("handler", psycopg.errors.SerializationFailure("again"), True), ("handler", psycopg.errors.DeadlockDetected("again"), True),
    ("handler", psycopg.errors.DiskFull("full"), False), ("handler", psycopg.OperationalError("of another server"), False)])
def test_over_http_a_database_that_is_not_available_is_503(known, where, error, unavailable):
    def respond(access, tries):
        raise error

    idem = known(Idempotency, lambda conninfo: conninfo) if where == "claim" else MemoryIdempotency()
    if where == "claim":
        idem.core.servers.server.backend.answer = lambda scope: error
    exchange = Exchange(idem, "POST", "/", [new_key()], None)
    exchange.whole = True
    try:
        answer = run(guarded(exchange, Guard(scope=lambda request: "u"), None, lambda: "u", lambda: None, respond))
    except psycopg.Error as raised:
        assert raised is error and not unavailable
    else:
        assert unavailable and (answer.status, dict(answer.headers)["Retry-After"]) == (503, "1")
        assert json.loads(answer.body)["type"] == "urn:pg-idempotency:unavailable"
