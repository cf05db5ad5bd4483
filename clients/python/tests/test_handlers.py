"""What handlers may not do while they hold a connection, and how long they may take."""

import asyncio
import inspect
import sys
import threading
import time
from datetime import timedelta

import anyio
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import AsyncIdempotency, Idempotency, Response, TimedOut, TransactionEnded, new_key
from pg_idempotency.handlers import in_handler
from pg_idempotency.memory import AsyncMemoryIdempotency, MemoryIdempotency


@pytest.fixture
def single(database):
    """A pool of one: who wants a second connection waits for ever."""
    with ConnectionPool("", min_size=1, max_size=1, timeout=5) as pool:
        yield pool


def in_handlers(idem, call):
    """In the handler of a request, and in the last step of a job."""
    def handler(tx):
        call(tx)
        return Response()

    idem.request("u", new_key(), handler)
    idem.job("u", new_key(), lambda job: job.finish(handler))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("instead, call", [
    (r"on\(tx\).once\(\)", lambda idem: idem.once("s", new_key())),
    (r"on\(tx\).publish_many\(\)", lambda idem: idem.publish_many(["t"], [1])),
    ("use tx", lambda idem: idem.request("u", new_key(), lambda tx: Response())),
    ("use tx", lambda idem: idem.job("u", new_key(), lambda job: Response())),
])
def test_no_second_connection(single, double, instead, call):
    idem = MemoryIdempotency() if double else Idempotency(single)
    other = MemoryIdempotency() if double else Idempotency("")

    def refused(tx):
        with pytest.raises(RuntimeError, match=instead):
            call(idem)
        # Another pool's, and within that.
        other.request("u", new_key(), lambda tx: (pytest.raises(RuntimeError, call, idem), Response())[1])
        assert idem.on(tx).once("s", new_key())

    in_handlers(idem, refused)
    idem.job("u", new_key(), lambda job: (job.step("free", lambda step: call(idem) and None), Response())[1])
    call(idem)


def test_another_client_of_the_pool_is_no_way_out(single):
    def refused(tx):
        with pytest.raises(RuntimeError, match="use on"):
            Idempotency(single).once("s", "token")

    in_handlers(Idempotency(single), refused)


@pytest.mark.parametrize("double", [False, True])
def test_no_second_connection_of_tasks(database, double):
    """Nor in a task or a thread of the handler's; work behind the transaction is free."""
    async def main():
        async with AsyncConnectionPool("", min_size=1, max_size=1, timeout=5, open=False) as pool:
            idem, behind, free = AsyncMemoryIdempotency() if double else AsyncIdempotency(pool), [], asyncio.Event()

            async def later():
                await free.wait()
                return await idem.once("s", key)

            async def handler(tx):
                behind.append(asyncio.create_task(later()))
                for call in (idem.once("s", key), asyncio.create_task(idem.once("s", key)),
                             idem.request("u", key, handler)):
                    with pytest.raises(RuntimeError, match="use "):
                        await call
                assert await idem.on(tx).once("s", key + "2")
                return Response()

            key = new_key()
            await idem.request("u", key, handler)
            free.set()
            assert await behind[0] is True

    asyncio.run(main())


# How long they may take


@pytest.mark.parametrize("way", ["statement", "python"])
def test_timeout(single, effects, way):
    idem, key, tries = Idempotency(single, timeout="20 s", max_waiters=1), new_key(), []
    began, free = time.monotonic(), threading.Event()

    def handler(tx):
        tries.append(1)
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        if way == "statement":
            tx.execute("SELECT pg_sleep(20)")
        else:
            assert free.wait(20)            # what no thread can be made to leave
        return Response()

    found = []

    def ask():
        with pytest.raises(TimedOut, match="timeout of 0.3 s") as raised:
            idem.request("u", key, handler, timeout_ms=300)
        found.append(raised.value)

    thread = threading.Thread(target=ask)
    thread.start()
    # The slot comes back, the handler or not.
    while not tries:
        time.sleep(0.01)
    with single.connection() as connection:
        assert connection.execute("SELECT count(*) FROM effects WHERE name = %s", (key,)).fetchone() == (0,)
    assert time.monotonic() - began < 15
    # Its server may not have ended the transaction yet.
    first = idem.request("u", key, lambda tx: (tx.execute("INSERT INTO effects VALUES (%s)", (key,)), Response())[1],
                         wait="5 s")
    assert first.stored and effects(key) == 1
    free.set()
    thread.join(20)
    assert len(found) == len(tries) == 1 and effects(key) == 1
    # And the pool's next connections are as they were.
    with single.connection() as connection:
        assert not connection.autocommit
        connection.commit()


def test_timeout_over_all_tries(single):
    idem, tries = Idempotency(single), []

    def handler(tx):
        tries.append(1)
        time.sleep(0.15)
        tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")

    with pytest.raises((TimedOut, psycopg.errors.SerializationFailure)) as raised:
        idem.request("u", new_key(), handler, timeout="200ms")
    assert raised.type is TimedOut and len(tries) < 5


def test_a_timeout_is_not_tried_again(single):
    """Also if the handler ends with a serialization failure."""
    tries = []

    def handler(tx):
        tries.append(1)
        time.sleep(0.5)
        raise psycopg.errors.SerializationFailure("again")

    with pytest.raises(TimedOut):
        Idempotency(single).request("u", new_key(), handler, timeout="100ms")
    assert tries == [1]


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("way", ["statement", "python"])
def test_timeout_asynchronous(asynchronously, effects, way, swallows):
    async def test(idem, pool):
        key = new_key()

        async def handler(tx):
            await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            try:
                await (tx.execute("SELECT pg_sleep(20)") if way == "statement" else asyncio.sleep(20))
            except BaseException:
                if not swallows:
                    raise
            return Response()

        async def quick(tx):
            await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            return Response()

        began = time.monotonic()
        with pytest.raises(TimedOut):
            await idem.request("u", key, handler, timeout_ms=300)
        assert (await idem.request("u", key, quick, wait="5 s")).stored and effects(key) == 1
        assert time.monotonic() - began < 15
        held = [await pool.getconn(5) for _ in range(10)]
        for connection in held:
            await pool.putconn(connection)

    asynchronously(test, timeout="10 s")


@pytest.mark.parametrize("where", ["step", "function", "finish"])
@pytest.mark.parametrize("double", [False, True])
def test_timeout_of_a_job(single, where, double):
    """Failed at once, though its thread is where it was."""
    idem, key, free = MemoryIdempotency() if double else Idempotency(single), new_key(), threading.Event()

    def stand(*_):
        assert free.wait(20)
        return Response() if where == "finish" else None

    def function(job):
        if where == "step":
            job.step("stand", stand)
        elif where == "function":
            stand()
            assert job.lost.is_set()
        else:
            job.finish(stand)
        return Response()

    found = []

    def ask():
        with pytest.raises(TimedOut) as raised:
            idem.job("u", key, function, lease="1 hour", timeout_ms=300)
        found.append(raised.value)

    thread = threading.Thread(target=ask)
    thread.start()
    until = time.monotonic() + 15
    if where == "finish":                   # which its own thread has to fail
        time.sleep(1)
        free.set()
    while idem.lookup("u", key).state != "failed" and time.monotonic() < until:
        time.sleep(0.02)
    assert idem.job("u", key, lambda job: Response(200, str(job.attempt))).body == "2"
    free.set()
    thread.join(20)
    assert len(found) == 1
    assert idem.job("u", key, function).replayed


def test_timeout_of_a_job_asynchronous(asynchronously):
    async def test(idem, pool):
        key, lost = new_key(), []

        async def function(job):
            async def stand(step):
                try:
                    await asyncio.sleep(20)
                finally:
                    lost.append(job.attempt)
            await job.step("stand", stand)

        async def quick(job):
            return Response(200, str(job.attempt))

        with pytest.raises(TimedOut):
            await idem.job("u", key, function, lease="1 hour", timeout_ms=300)
        assert lost == [1] and (await idem.lookup("u", key)).state == "failed"
        assert (await idem.job("u", key, quick)).body == "2"

    asynchronously(test)


@pytest.mark.parametrize("options, error, text", [
    ({"timeout_ms": 0}, ValueError, "timeout must not be 0"),
    ({"timeout": "5 bananas"}, ValueError, "timeout must not be 5 bananas"),
    ({"timeout_ms": -1}, ValueError, "timeout_ms must not be negative"),
    ({"timeout": 5}, TypeError, "timeout must be a string such as"),
    ({"timeout": "1s", "timeout_ms": 1}, TypeError, "timeout and timeout_ms cannot both be set"),
    ({"wait": "5 bananas"}, ValueError, "wait must be a duration such as '5s', not '5 bananas'"),
    ({"wait": "-1s"}, ValueError, "wait must be a duration"),
    ({"ttl": "0s"}, ValueError, "ttl must not be 0"),
])
def test_durations_that_are_none(idem, options, error, text):
    with pytest.raises(error, match=text):
        idem.request("u", new_key(), lambda tx: pytest.fail("has run"), **options)
    with pytest.raises(error, match=text):
        Idempotency("", **options)


def ended(pid):
    with psycopg.connect("", autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", (pid,))


def test_a_session_that_the_server_ends(single, asynchronously):
    """While a handler does not ask it anything: noticed within seconds."""
    idem, free = Idempotency(single), threading.Event()

    def stands(tx):
        ended(tx.info.backend_pid)
        assert free.wait(20)
        return Response()

    def goes_on(tx):
        stands(tx)
        tx.execute("SELECT 1")

    # The error says what has happened, also where the handler meets it on its handle.
    for handler in stands, goes_on:
        errors = []

        def call():
            try:
                idem.request("u", new_key(), handler)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.5)
        with single.connection(timeout=15) as connection:
            connection.execute("SELECT 1")
        free.set()
        thread.join(20)
        free.clear()
        assert [(type(error), str(error)) for error in errors] == [
            (TransactionEnded, "the server ended the session of the handler's transaction")]

    async def test(idem, pool):
        async def handler(tx):
            await asyncio.to_thread(ended, tx.info.backend_pid)
            await asyncio.sleep(50)

        with pytest.raises(TransactionEnded, match="the server ended"):
            await asyncio.wait_for(idem.request("u", new_key(), handler), 20)

    asynchronously(test)


@pytest.mark.parametrize("double", [False, True])
def test_a_handler_that_never_answers_holds_no_connection_for_ever(pool, asynchronously, monkeypatch, double):
    """A minute by default, of what is in a transaction; a job may take as long as its function does."""
    idem = MemoryIdempotency() if double else Idempotency(pool)
    unbounded = MemoryIdempotency(timeout=None) if double else Idempotency(pool, timeout=None)
    stated = MemoryIdempotency(timeout="9s") if double else Idempotency(pool, timeout="9s")
    for client, job, transaction in ((idem, None, 60), (unbounded, None, None), (stated, 9, 9)):
        call = client.call("u", new_key())
        assert (call.timeout, call.timeout_in_transaction) == (job, transaction)
        call = client.call("u", new_key(), timeout_ms=500)
        assert (call.timeout, call.timeout_in_transaction) == (0.5, 0.5)

    monkeypatch.setattr("pg_idempotency.client.DEFAULT_TIMEOUT", timedelta(milliseconds=200))
    never = (lambda tx: time.sleep(0.4) or Response()) if double else (lambda tx: tx.execute("SELECT pg_sleep(30)"))
    with pytest.raises(TimedOut):
        idem.request("u", new_key(), never)
    with pytest.raises(TimedOut):
        idem.job("u", new_key(), lambda job: job.finish(never))
    assert idem.job("u", new_key(), lambda job: time.sleep(0.4) or Response(204)).status == 204
    assert unbounded.request("u", new_key(), lambda tx: time.sleep(0.4) or Response(204)).status == 204
    if double:
        return

    async def test(_, pool):
        monkeypatch.undo()
        idem = AsyncIdempotency(pool)
        monkeypatch.setattr("pg_idempotency.client.DEFAULT_TIMEOUT", timedelta(milliseconds=200))

        async def never(tx):
            await asyncio.sleep(30)

        async def last(job):
            return await job.finish(never)

        for run in (lambda: idem.request("u", new_key(), never), lambda: idem.job("u", new_key(), last)):
            with pytest.raises(TimedOut):
                await run()

    asynchronously(test)


def test_an_exception_of_a_signal_handler_leaves_no_handler_open(pool):
    """As Celery's soft time limit raises one, at any moment of the client's own code."""
    class Interrupted(Exception):
        pass

    def interrupt(frame, event, argument):
        if event == "return" and frame.f_code is in_handler.__enter__.__code__ and frame.f_locals["self"] not in seen:
            seen.append(frame.f_locals["self"])
            raise Interrupted

    idem, seen = Idempotency(pool), []
    sys.setprofile(interrupt)
    try:
        with pytest.raises(Interrupted):
            idem.request("u", new_key(), lambda tx: Response())
    finally:
        sys.setprofile(None)
    assert len(seen) == 1
    assert idem.request("u", new_key(), lambda tx: Response()).stored


def test_frameworks_see_coroutine_functions():
    """They run any other function in a thread, as Starlette's BackgroundTask does."""
    assert all(map(inspect.iscoroutinefunction, (AsyncIdempotency.request, AsyncIdempotency.job)))


def test_a_timeout_after_a_time_limit_of_the_handler(asynchronously):
    """anyio 3 counts its own cancellations for ever."""
    async def handler(tx):
        with anyio.move_on_after(0.05):
            await asyncio.sleep(30)
        await asyncio.sleep(30)

    async def test(idem, pool):
        for _ in range(2):
            with pytest.raises(TimedOut):
                await asyncio.create_task(idem.request("u", new_key(), handler, timeout="300 ms"))

    asynchronously(test)


@pytest.mark.parametrize("first", ["timeout", "cancellation"])
def test_a_cancellation_is_not_lost_in_a_timeout(asynchronously, first):
    """Also one that arrives while the handler cleans up."""
    async def test(idem, pool):
        works, cleans_up = asyncio.Event(), asyncio.Event()

        async def handler(tx):
            works.set()
            try:
                await asyncio.sleep(30)
            finally:
                cleans_up.set()
                await asyncio.sleep(30 if first == "timeout" else 1.5)

        task = asyncio.create_task(idem.request("u", new_key(), handler, timeout="1 s"))
        await (cleans_up if first == "timeout" else works).wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asynchronously(test)


def test_a_serialization_failure_in_a_task_group_runs_again(asynchronously):
    runs = []

    async def handler(tx):
        runs.append(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(tx) if len(runs) == 1 else asyncio.sleep(0))
        return Response(201)

    async def fail(tx):
        await tx.execute("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$")

    assert asynchronously(lambda idem, pool: idem.request("u", new_key(), handler)).status == 201 and len(runs) == 2
