"""Connections: they come back to where they came from, also when the server is silent."""

import asyncio
import os
import queue
import signal
import threading
import time
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from types import SimpleNamespace

import psycopg
import psycopg2
import pytest
from proxy import Proxy
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import AsyncIdempotency, Idempotency, Response, TimedOut, TransactionEnded, new_key, runtimes
from pg_idempotency.postgres import PsycopgSession, connection_lost


def test_a_connection_of_a_function_is_left_before_the_replay_returns(database, effects, asynchronously):
    """In the same thread or task: its owner writes on with it."""
    shared = psycopg.connect("", autocommit=True)
    where = []

    @contextmanager
    def lend():
        yield shared
        where.append(threading.current_thread())

    idem, key, name = Idempotency(lend), new_key(), new_key()
    idem.request("u", key, lambda tx: Response())
    for number in range(100):
        assert idem.request("u", key, lambda tx: Response()).replayed
        assert where == [threading.current_thread()] * (number + 2)
        shared.execute("INSERT INTO effects VALUES (%s)", (name,))
    shared.close()
    assert effects(name) == 100

    async def test(_, pool):
        tasks = []

        async with await psycopg.AsyncConnection.connect("", autocommit=True) as connection:
            @asynccontextmanager
            async def lend():
                yield connection
                tasks.append(asyncio.current_task())

            idem, key, name = AsyncIdempotency(lend), new_key(), new_key()

            async def handler(tx):
                return Response()

            for number in range(100):
                assert (await idem.request("u", key, handler)).replayed == bool(number)
                assert tasks == [asyncio.current_task()] * (number + 1)
                await connection.execute("INSERT INTO effects VALUES (%s)", (name,))
        assert effects(name) == 100

    asynchronously(test)


def test_connections_of_the_other_kind_are_refused(pool, asynchronously):
    """Those of threads would block the event loop, and wait for each other."""
    @contextmanager
    def lend():
        raise AssertionError
        yield

    @asynccontextmanager
    async def lend_async():
        raise AssertionError
        yield

    async def test(_, async_pool):
        for source in pool, lend:
            with pytest.raises(TypeError, match="an AsyncConnectionPool"):
                await AsyncIdempotency(source).request("u", new_key(), lambda tx: Response())
        for source in async_pool, lend_async:
            with pytest.raises(TypeError, match="a ConnectionPool"):
                Idempotency(source).request("u", new_key(), lambda tx: Response())

    asynchronously(test)
    with psycopg.connect("", autocommit=True) as connection:        # one for both kinds
        assert Idempotency(lambda: nullcontext(connection)).once("kinds", new_key())


def test_a_function_that_hides_errors(database, effects):
    """A failed COMMIT is an error, also if the manager of the connection ends it."""
    name, key = new_key(), new_key()
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute("CREATE TABLE checked_at_commit (name text UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @contextmanager
    def lend():
        with psycopg.connect("") as connection, suppress(psycopg.Error):
            yield connection

    def work(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (name,))
        tx.execute("INSERT INTO checked_at_commit VALUES ('a'), ('a')")
        return Response(201)

    def block():
        with idem.transaction() as tx:
            work(tx)

    idem = Idempotency(lend)
    for call in (lambda: idem.request("u", key, work), lambda: idem.job("u", key, lambda job: job.finish(work)), block):
        with pytest.raises(psycopg.errors.UniqueViolation):
            call()
    assert effects(name) == 0 and idem.lookup("u", key).state != "completed"


@pytest.mark.parametrize("job", [False, True])
def test_the_exception_of_a_signal_handler_ends_the_wait_of_a_claim(pool, job):
    """As Celery's soft time limit, which comes only once."""
    class SoftTimeLimit(Exception):
        pass

    def ring(*_):
        raise SoftTimeLimit

    idem, key, before = Idempotency(pool), new_key(), signal.signal(signal.SIGALRM, ring)
    with idem.transaction() as tx:
        idem.on(tx).claim("u", key)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(SoftTimeLimit):
                (Idempotency(pool.connection).job if job else Idempotency(pool.connection).request)("u", key, None, wait="20s")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_a_silent_server_costs_one_connection(database, monkeypatch):
    """Others go on at once, and the pool replaces the silent connection when the time limit is over."""
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 5)
    proxy, key = Proxy(), new_key()
    with ConnectionPool(proxy.conninfo, min_size=2, max_size=2, timeout=5) as pool:
        idem = Idempotency(pool)
        idem.request("u", key, lambda tx: Response())
        proxy.silence = b"ROLLBACK"
        began = time.monotonic()
        assert idem.request("u", key, lambda tx: Response()).replayed
        while proxy.silence:
            time.sleep(0.01)
        for _ in range(20):
            assert idem.request("u", key, lambda tx: Response()).replayed
        assert time.monotonic() - began < 4.5
        with pool.connection(10), pool.connection(10) as second:
            second.execute("SELECT 1")
    proxy.close()


def test_a_silent_server_at_a_rollback_of_the_caller(database, monkeypatch, asynchronously):
    """Nor does a caller wait for it for ever."""
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.5)
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10) as pool:
        idem = Idempotency(pool)
        proxy.silence = b"ROLLBACK"
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            idem.request("u", new_key(), lambda tx: 1 / 0)
        assert 0.4 < time.monotonic() - began < 8
        assert idem.request("u", new_key(), lambda tx: Response()).stored

    async def test(_, pool):
        async with AsyncConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10, open=False) as pool:
            idem = AsyncIdempotency(pool)

            async def fails(tx):
                raise ZeroDivisionError

            async def handler(tx):
                return Response()

            proxy.silence = b"ROLLBACK"
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(idem.request("u", new_key(), fails), 8)
            key = new_key()
            assert (await asyncio.wait_for(idem.request("u", key, handler), 15)).stored
            proxy.silence = b"ROLLBACK"
            assert (await asyncio.wait_for(idem.request("u", key, handler), 8)).replayed
            assert (await asyncio.wait_for(idem.request("u", key, handler), 15)).replayed

    asynchronously(test)
    proxy.close()


def test_a_silent_server_at_a_cancellation(database, monkeypatch):
    """A handler whose statement gets no answer: after its timeout, the pool has its connection back."""
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.5)
    proxy = Proxy()
    with ConnectionPool(f"{proxy.conninfo} connect_timeout=2", min_size=1, max_size=1, timeout=20) as pool:
        idem = Idempotency(pool, timeout_ms=300)

        def handler(tx):
            proxy.silence, proxy.all_silent = b"SELECT 77", True
            tx.execute("SELECT 77")
            return Response()

        began = time.monotonic()
        with pytest.raises(TimedOut):
            idem.request("u", new_key(), handler)
        proxy.all_silent = False
        assert time.monotonic() - began < 8
        assert idem.request("u", new_key(), lambda tx: Response()).stored
    proxy.close()


def test_a_task_that_is_cancelled_at_its_timeout_gives_its_connection_back(database, monkeypatch, asynchronously):
    """At once, also if the program keeps the error, with its traceback."""
    proxy = Proxy()

    async def test(_, pool):
        async with AsyncConnectionPool(f"{proxy.conninfo} connect_timeout=2", min_size=1, max_size=1, timeout=20, open=False) as pool:
            idem = AsyncIdempotency(pool)

            async def silent(tx):
                proxy.silence, proxy.all_silent = b"SELECT 77", True
                await tx.execute("SELECT 77")

            async def handler(tx):
                return Response()

            request = asyncio.ensure_future(idem.request("u", new_key(), silent, timeout="500ms"))
            while not aborts:
                await asyncio.sleep(0.01)
            request.cancel()
            kept = await asyncio.gather(request, return_exceptions=True)
            proxy.all_silent = False
            assert isinstance(kept[0], asyncio.CancelledError)
            assert (await idem.request("u", new_key(), handler)).stored

    aborts = []
    abort = PsycopgSession.abort
    monkeypatch.setattr(PsycopgSession, "abort", lambda session: (aborts.append(session), abort(session))[1])
    asynchronously(test)
    proxy.close()


def test_a_timeout_when_no_thread_can_start(pool, monkeypatch):
    """As in a container with a limit of processes: that request ends, and later timeouts work."""
    def late(tx):
        stopped.append(1)
        tx.execute("SELECT pg_sleep(2)")
        return Response()

    stopped, start = [], threading.Thread.start

    def refuse(thread):
        if stopped and thread.name == "pg_idempotency":
            raise RuntimeError("can't start new thread")
        start(thread)

    idem = Idempotency(pool)
    assert idem.request("u", new_key(), lambda tx: Response()).stored
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TimedOut):
        idem.request("u", new_key(), late, timeout="300ms")
    monkeypatch.setattr(threading.Thread, "start", start)
    began = time.monotonic()
    with pytest.raises(TimedOut):
        idem.request("u", new_key(), lambda tx: tx.execute("SELECT pg_sleep(20)") and Response(), timeout="300ms")
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("silence", [b"idem_complete", b"idem_lookup"])
def test_a_server_that_falls_silent_after_a_job_s_commit(database, monkeypatch, silence):
    """The questions whether the last step was committed have a limit, and are asked again."""
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 2)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    proxy, runs = Proxy(), []
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10) as pool:
        def last(tx):
            runs.append(1)
            proxy.cut = "after"
            proxy.silence_after_cut = silence
            return Response()

        result = Idempotency(pool).job("u", new_key(), lambda job: job.finish(last), lease="1min")
        assert (result.status, len(runs), proxy.silence) == (200, 1, None)
    proxy.close()


def test_a_silent_server_at_the_begin_of_the_last_step(database, effects, monkeypatch):
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 1)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    proxy, key, began = Proxy(), new_key(), time.monotonic()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10) as pool:
        def job(job):
            proxy.silence = b"idem_heartbeat"
            return job.finish(lambda tx: tx.execute("INSERT INTO effects VALUES (%s)", (key,)) and Response())

        with pytest.raises(TimedOut):
            Idempotency(pool).job("u", key, job, lease="10 minutes")
    assert time.monotonic() - began < 20 and effects(key) == 0
    proxy.close()


def test_a_silent_server_after_a_handler_s_own_commit(database, monkeypatch):
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 1)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10) as pool:
        def handler(tx):
            tx.execute("COMMIT")
            proxy.silence = b"idem_complete"
            return Response()

        with pytest.raises(TimedOut):
            Idempotency(pool).request("u", new_key(), handler)
    proxy.close()


@pytest.mark.parametrize("opened", [True, False])
def test_a_pool_that_is_open_at_a_fork_is_refused(database, opened):
    """As with gunicorn --preload: the child has no thread of the pool, and would wait for ever."""
    pool = ConnectionPool("", min_size=1, open=opened)
    idem = Idempotency(pool)
    if opened:
        assert idem.once("fork", new_key())
    child = os.fork()
    if not child:
        try:
            if not opened:
                pool.open()
            idem.once("fork", new_key())
            os._exit(0)
        except RuntimeError as error:
            os._exit(1 if "open it after the fork" in str(error) else 2)
        except BaseException:
            os._exit(3)
    try:
        assert ends_within(child, 10) == (1 if opened else 0)
        assert not opened or idem.once("fork", new_key())
    finally:
        pool.close()


@pytest.mark.parametrize("shared", ["_watchdog", "_deferring"])
def test_a_fork_while_another_thread_holds_a_lock(database, shared):
    """The child waits for no thread of its parent."""
    held, release, key = threading.Event(), threading.Event(), new_key()
    found = getattr(runtimes, shared)()

    def hold():
        with found._changed if shared == "_watchdog" else found._lock:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        with suppress(BaseException), ConnectionPool("", min_size=1) as pool:
            idem = Idempotency(pool)
            idem.request("u", key, lambda tx: Response(201))
            os._exit(int(not idem.request("u", key, lambda tx: Response(201)).replayed))
        os._exit(2)
    try:
        assert ends_within(child, 10) == 0
    finally:
        release.set()
        thread.join()


def test_what_gevent_replaces_after_the_import_is_used(database):
    """As in a worker of gunicorn --preload: a lock or queue of real threads would block all greenlets."""
    replaced = {threading: "Condition", queue: "SimpleQueue"}
    child = os.fork()
    if not child:
        with suppress(BaseException), ConnectionPool("", min_size=1) as pool:
            for module, name in replaced.items():
                setattr(module, name, type(name, (getattr(module, name),), {}))
            idem, key = Idempotency(pool), new_key()
            for number in range(2):
                assert idem.request("u", key, lambda tx: Response(201)).replayed == bool(number)
            assert type(runtimes._watchdog()._changed) is threading.Condition
            assert type(runtimes._deferring()._queue) is queue.SimpleQueue
            os._exit(0)
        os._exit(2)
    assert ends_within(child, 10) == 0


def test_threads_that_begin_at_once_share_no_call(monkeypatch):
    """Each of them can make a watchdog: a call that has ended is watched by neither."""
    made, both = [], threading.Barrier(2)

    class Slow(runtimes._Watchdog):
        def __init__(self):
            super().__init__()
            made.append(self)
            both.wait(10)

    monkeypatch.setattr(runtimes, "_Watchdog", Slow)
    runtimes._watchdog.cache_clear()

    def call():
        async def abort():
            raise AssertionError
        assert runtimes.run(runtimes.SyncRuntime.bounded(lambda: 1, 60, abort)) == 1

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    runtimes._watchdog.cache_clear()
    assert len(made) == 2 and not any(one._watched for one in made)


def test_a_fork_during_a_request(database):
    """A duplicate in the child does not wait for the request in its own copy of the parent's memory."""
    running, release, idem, key = threading.Event(), threading.Event(), Idempotency(""), new_key()

    def handler(tx):
        running.set()
        release.wait(30)
        return Response(201)

    thread = threading.Thread(target=idem.request, args=("u", key, handler), kwargs={"wait": "30s"})
    thread.start()
    running.wait()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os._exit(int(not idem.request("u", key, handler, wait="30s").replayed))
        os._exit(2)
    release.set()
    thread.join()
    assert ends_within(child, 15) == 0


def ends_within(child, seconds):
    """The exit code of a process, which is killed when the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize("option", ["", "connect_timeout=3"])
def test_a_server_that_accepts_no_connection(database, monkeypatch, asynchronously, option):
    """And says nothing: a connection string has a limit."""
    monkeypatch.setattr("pg_idempotency.postgres.CONNECT_LIMIT", 2)
    proxy, began = Proxy(), time.monotonic()
    proxy.all_silent, conninfo = True, f"{proxy.conninfo} {option}"

    async def test(_, pool):
        with pytest.raises(psycopg.OperationalError):
            await AsyncIdempotency(conninfo).once("s", new_key())

    with pytest.raises(psycopg.OperationalError):
        Idempotency(conninfo).once("s", new_key())
    asynchronously(test)
    assert time.monotonic() - began < 20
    proxy.close()


@pytest.mark.parametrize("silence", [b"idem_claim", b"idem_complete", b"COMMIT"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_silent_server_at_an_exchange(database, effects, monkeypatch, asynchronously, silence, synchronous):
    """No request waits for ever, and none runs twice: after a COMMIT without an answer, the next claim says what happened."""
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 3)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.5)
    proxy, key = Proxy(), new_key()
    insert = "INSERT INTO effects VALUES (%s)", (key,)

    def outcome(send):
        began = time.monotonic()
        try:
            return send().stored
        except TimedOut:
            assert silence == b"idem_claim"
            return False
        finally:
            assert time.monotonic() - began < 15

    if synchronous:
        with ConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10) as pool:
            idem = Idempotency(pool)
            proxy.silence = silence
            stored = outcome(lambda: idem.request("u", key, lambda tx: tx.execute(*insert) and Response()))
            assert stored == (silence != b"idem_claim") and effects(key) == stored
            assert idem.request("u", key, lambda tx: tx.execute(*insert) and Response()).replayed == stored
    else:
        async def test(_, pool):
            async with AsyncConnectionPool(proxy.conninfo, min_size=1, max_size=1, timeout=10, open=False) as pool:
                idem = AsyncIdempotency(pool)

                async def place(tx):
                    await tx.execute(*insert)
                    return Response()

                proxy.silence = silence
                try:
                    stored = (await asyncio.wait_for(idem.request("u", key, place), 15)).stored
                except TimedOut:
                    stored = False
                assert stored == (silence != b"idem_claim") and effects(key) == stored
                assert (await asyncio.wait_for(idem.request("u", key, place), 15)).replayed == stored

        asynchronously(test)
    assert effects(key) == 1
    proxy.close()


@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_rows_that_are_not_read_to_their_end_hold_no_connection_for_ever(database, monkeypatch, ends):
    """A generator of cursor.stream() holds psycopg's lock until it ends."""
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.2)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.2)
    kept, found = [], []

    def reads(tx):
        kept.append(tx.cursor().stream("SELECT pg_catalog.generate_series(1, 10)"))
        next(kept[0])
        if ends == "raises":
            raise ZeroDivisionError
        return Response()

    with ConnectionPool("", min_size=1, max_size=1) as pool:
        idem = Idempotency(pool)

        def request():
            with pytest.raises(ZeroDivisionError if ends == "raises" else TransactionEnded):
                idem.request("u", new_key(), reads)
            found.append(idem.request("u", new_key(), lambda tx: Response(204)).status)

        thread = threading.Thread(target=request, daemon=True)
        thread.start()
        thread.join(30)
        assert found == [204]


@pytest.mark.parametrize("block", ["transaction", "pipeline"])
@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_a_block_that_is_left_open_is_rolled_back_and_costs_its_connection(database, effects, block, ends):
    """psycopg refuses each later COMMIT on a connection with an open block."""
    key, kept = new_key(), []

    def leaves(tx):
        kept.append(getattr(tx, block)())
        kept[0].__enter__()
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        if ends == "raises":
            raise ZeroDivisionError
        return Response(201)

    with ConnectionPool("", min_size=1, max_size=1) as pool:
        idem = Idempotency(pool)
        with pytest.raises(ZeroDivisionError if ends == "raises" else TransactionEnded):
            idem.request("u", key, leaves)
        for _ in range(3):
            assert not idem.request("u", new_key(), lambda tx: Response(201)).replayed
        with suppress(TransactionEnded):
            kept[0].__exit__(None, None, None)
    assert effects(key) == 0


@pytest.mark.parametrize("open", ["COPY", "stream"])
def test_a_statement_that_is_left_open_is_rolled_back(database, effects, monkeypatch, open):
    """Also one that keeps psycopg's lock."""
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    monkeypatch.setattr("pg_idempotency.postgres.ROLLBACK_LIMIT", 0.5)
    key, kept = new_key(), []

    def leaves(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        if open == "COPY":
            kept.append(tx.cursor().copy("COPY effects FROM STDIN"))
            kept[0].__enter__()
        else:
            kept.append(tx.cursor().stream("SELECT generate_series(1, 100000)"))
            next(kept[0])
        return Response(201)

    with ConnectionPool("", min_size=1, max_size=1) as pool:
        idem = Idempotency(pool)
        with pytest.raises(TransactionEnded, match="left a statement, a COPY or a stream open"):
            idem.request("u", key, leaves)
        assert idem.request("u", new_key(), lambda tx: Response(201)).stored
        with suppress(Exception):
            kept[0].close() if open == "stream" else kept[0].__exit__(None, None, None)
    assert effects(key) == 0


def test_clients_share_their_threads(database):
    """A program may make one for each request."""
    with ConnectionPool("", min_size=1, max_size=1) as pool:
        key = new_key()
        Idempotency(pool).request("u", key, lambda tx: Response(201))
        before = threading.active_count()
        for _ in range(30):
            assert Idempotency(pool).request("u", key, lambda tx: Response(201)).replayed
        assert threading.active_count() < before + 15


def test_a_task_that_is_left_in_a_block_costs_its_connection(database, effects):
    async def test():
        async def leaves(tx):
            entered = asyncio.Event()

            async def inner():
                async with tx.transaction():
                    await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
                    entered.set()
                    await asyncio.sleep(60)

            kept.append(asyncio.ensure_future(inner()))
            await entered.wait()
            return Response(201)

        async def returns(tx):
            return Response(201)

        key, kept = new_key(), []
        async with AsyncConnectionPool("", min_size=1, max_size=1, open=False) as pool:
            idem = AsyncIdempotency(pool)
            with pytest.raises(TransactionEnded, match="block"):
                await idem.request("u", key, leaves)
            for _ in range(3):
                assert not (await idem.request("u", new_key(), returns)).replayed
            kept[0].cancel()
            await asyncio.gather(*kept, return_exceptions=True)
        assert effects(key) == 0

    asyncio.run(asyncio.wait_for(test(), 60))


def test_without_poll(database, monkeypatch, caplog):
    """eventlet removes select.poll()."""
    monkeypatch.setattr("pg_idempotency.postgres.select", SimpleNamespace())
    with ConnectionPool("", min_size=1, max_size=1) as pool:
        idem, key = Idempotency(pool), new_key()
        for again in (False, True, True):
            assert idem.request("u", key, lambda tx: Response()).replayed == again
        with pytest.raises(ZeroDivisionError):
            idem.request("u", new_key(), lambda tx: 1 / 0)
        with pool.connection() as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    assert "rolled back" not in caplog.text


@pytest.mark.parametrize(("error", "expected"), [
    (psycopg2.InterfaceError("connection already closed"), True),
    (psycopg2.OperationalError("server closed the connection unexpectedly"), True),
    (ConnectionRefusedError(), True),
    (psycopg2.InterfaceError("cannot perform operation: another operation is in progress"), False),
    (psycopg.errors.IdleSessionTimeout(), True),
    (psycopg.errors.UniqueViolation(), False),
    (Exception("connection already closed"), False),
])
def test_which_errors_mean_that_the_connection_is_lost(error, expected):
    assert connection_lost(error) == expected
