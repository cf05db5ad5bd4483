"""request(): one transaction, and only then the response."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import psycopg
import pytest
from proxy import Proxy
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pg_idempotency import (AsyncIdempotency, Idempotency, IdempotencyError, InProgress, KeyInvalid, KeyReused, RateLimited, Response,
                            TransactionEnded, new_key)
from pg_idempotency.http import Answer, Exchange, Guard, guarded
from pg_idempotency.runtimes import run


def effect(name, response=Response(201, "done", {"Link": ["a", "b"]})):
    def handler(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (name,))
        return response
    return handler


def test_work_after_a_commit_of_the_handler_is_no_success(idem, effects):
    """The first effect is committed with the claim, so a retry does not repeat it.  The second one is rolled back."""
    key = new_key()

    def handler(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        tx.execute("COMMIT")
        tx.execute("BEGIN")
        return effect(key)(tx)

    with pytest.raises(TransactionEnded, match="committed its transaction"):
        idem.request("u", key, handler)
    again = idem.request("u", key, handler)
    assert (again.outcome, again.status, again.body, effects(key)) == ("replay", 500, None, 1)


def test_replayed_as_it_was(idem, effects):
    key = new_key()
    for body in ("text with ü", b"\x00\xff", "", None, '{"n": 12345678901234567890.10}'):
        response = Response(201, body, {"Link": ["a", "b"], "Location": "/1"})
        key = new_key()
        first = idem.request("u", key, effect(key, response), method="POST", path="/a", body=b"{}")
        again = idem.request("u", key, effect(key, response), method="POST", path="/a", body=b"{}")
        assert (first.outcome, first.replayed, again.outcome, again.replayed) == ("new", False, "replay", True)
        assert (again.status, again.body, again.headers) == (201, body, response.headers)
        assert effects(key) == 1
    with pytest.raises(KeyReused):
        idem.request("u", key, effect(key), method="POST", path="/a", body=b"{ }")
    with pytest.raises(KeyInvalid) as raised:
        idem.request("u", "short", effect("short"))
    assert raised.value.sqlstate == "ID001" and isinstance(raised.value.__cause__, psycopg.Error)


def test_what_is_stored(idem, effects):
    key = new_key()
    with pytest.raises(ZeroDivisionError):
        idem.request("u", key, lambda tx: (effect(key)(tx), 1 / 0)[0])
    assert not idem.request("u", key, effect(key, Response(503))).stored
    assert not idem.request("u", key, effect(key, Response(404)), store=lambda status: status < 400).stored
    for status in (401, 403, 408, 425, 429):
        assert not idem.request("u", key, effect(key, Response(status))).stored
    assert effects(key) == 0
    for status in (403, 200):           # a success commits, whatever store() says of it
        assert idem.request("u", new_key(), effect(key, Response(status)), store=lambda found: found == 403).stored
    assert effects(key) == 2
    key = new_key()
    assert idem.request("u", key, effect(key, Response(422, "no"))).stored
    assert idem.request("u", key, effect(key)).body == "no"
    assert effects(key) == 1


def test_too_large_to_store(idem):
    key = new_key()
    large = b"x" * (1 << 20) + b"x"
    first = idem.request("u", key, lambda tx: Response(200, large))
    assert first.body == large and not first.stored
    again = idem.request("u", key, lambda tx: Response(200, large))
    assert (again.status, again.replayed) == (200, True)
    assert "urn:pg-idempotency:response-not-stored" in again.body


@pytest.mark.parametrize("last", [False, True])
def test_a_response_of_a_job_that_is_too_large_to_store(idem, last):
    for size, stored in ((1 << 20, True), ((1 << 20) + 1, False)):
        key, response = new_key(), Response(200, b"x" * size)
        made = idem.job("u", key, lambda job: job.finish(lambda tx: response) if last else response)
        assert made.body == response.body and made.stored == stored
        again = idem.job("u", key, lambda job: 1 / 0)
        assert again.stored and (again.body == response.body) == stored


def test_handler_that_swallows_an_error(idem, effects):
    key = new_key()

    def handler(tx):
        effect(key)(tx)
        try:
            tx.execute("SELECT 1 / 0")
        except psycopg.Error:
            pass
        return Response()

    with pytest.raises(TransactionEnded):
        idem.request("u", key, handler)
    assert effects(key) == 0
    assert idem.lookup("u", key).state is None


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_handler_that_ends_its_transaction(idem, effects, pool, end):
    key = new_key()
    with pytest.raises(TransactionEnded):
        idem.request("u", key, lambda tx: (effect(key)(tx), getattr(tx, end)())[0])
    assert effects(key) == 0
    # By hand: what was committed cannot be undone, but is not done again.
    with pytest.raises(TransactionEnded):
        idem.request("u", key, lambda tx: (effect(key)(tx), tx.execute(end))[0])
    committed = end == "commit"
    assert effects(key) == committed
    assert idem.request("u", key, effect(key)).replayed == committed
    assert effects(key) == 1
    # In another transaction than that of the claim.
    key = new_key()
    with pytest.raises(TransactionEnded):
        idem.request("u", key, lambda tx: (effect(key)(tx), tx.execute(end), tx.execute("BEGIN"))[0])
    assert idem.request("u", key, effect(key)).replayed == committed
    # And the pool's connections are as they were.
    for _ in range(12):
        with pool.connection() as connection:
            assert not connection.autocommit
            connection.commit()


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_a_handler_writes_behind_it(database, effects, raises):
    """The same connection is in somebody else's transaction then."""
    ann, bob, kept = new_key(), new_key(), {}

    def keeps(tx):
        assert isinstance(tx, psycopg.Connection) and not isinstance(tx, psycopg.AsyncConnection)
        effect(ann)(tx)
        kept.update(tx=tx, cursor=tx.cursor(), done=tx.execute("SELECT 1"), on=idem.on(tx), savepoint=tx.transaction())
        return Response(500) if raises else Response()

    def uses(tx):
        late = "INSERT INTO effects VALUES ('late')"
        for use in (lambda: kept["tx"].execute(late), lambda: kept["cursor"].execute(late), lambda: kept["tx"].cursor(),
                    lambda: kept["done"].connection.execute(late), lambda: kept["on"].once("late", new_key()),
                    lambda: kept["savepoint"].__enter__(), lambda: kept["tx"].cancel(), lambda: kept["tx"].close(),
                    lambda: kept["tx"].commit(), lambda: setattr(kept["tx"], "autocommit", True)):
            with pytest.raises(TransactionEnded):
                use()
        return effect(bob)(tx)

    with ConnectionPool("", min_size=1, max_size=1) as pool:
        idem = Idempotency(pool)
        idem.request("u", ann, keeps)
        assert idem.request("u", bob, uses).stored
        assert idem.request("u", bob, uses).replayed
        with pool.connection() as connection:       # nor is that one touched
            connection.execute("SELECT 1")
            connection.commit()
    assert (effects(ann), effects(bob), effects("late")) == (not raises, 1, 0)


def test_nothing_is_sent_while_commit_is_under_way(asynchronously, effects):
    """It would be committed by itself behind that, also where the COMMIT fails."""
    async def test(idem, pool):
        key, late = new_key(), []

        async def later(tx):
            async with pool.connection() as connection:
                while not (await (await connection.execute(
                        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")).fetchone())[0]:
                    await asyncio.sleep(0.01)

            async def send():
                await tx.execute("INSERT INTO effects VALUES (%s)", (key,))

            sent = asyncio.ensure_future(send())
            await asyncio.sleep(0)
            await blocker.execute("SELECT pg_advisory_unlock(16)")
            await sent

        async def handler(tx):
            await tx.execute("INSERT INTO committed_late VALUES (1)")
            late.append(asyncio.create_task(later(tx)))
            return Response()

        async with pool.connection() as blocker:
            await blocker.set_autocommit(True)
            for action in ("PERFORM pg_advisory_xact_lock_shared(16)", "PERFORM pg_advisory_xact_lock_shared(16); RAISE 'no'"):
                await blocker.execute(f"""
                    DROP TABLE IF EXISTS committed_late;
                    CREATE TABLE committed_late (id int);
                    CREATE OR REPLACE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS
                        $$BEGIN {action}; RETURN NULL; END$$;
                    CREATE CONSTRAINT TRIGGER t AFTER INSERT ON committed_late DEFERRABLE INITIALLY DEFERRED
                        FOR EACH ROW EXECUTE FUNCTION at_commit();
                    SELECT pg_advisory_lock(16)""")
                failed = None
                try:
                    await idem.request("u", new_key(), handler)
                except psycopg.errors.RaiseException as error:
                    failed = error
                assert (failed is not None) == ("RAISE" in action)
                with pytest.raises(TransactionEnded):
                    await late[-1]
                assert effects(key) == 0
            await blocker.set_autocommit(False)

    asynchronously(test)


def test_what_is_under_way_when_the_handler_returns_is_part_of_it(asynchronously, effects):
    async def test(idem, pool):
        for status in (200, 500):
            key, started = new_key(), []

            async def handler(tx):
                started.append(asyncio.create_task(
                    tx.execute("INSERT INTO effects SELECT %s FROM pg_sleep(0.2)", (key,))))
                await asyncio.sleep(0)
                return Response(status)

            await idem.request("u", key, handler)
            await started[0]
            assert effects(key) == (status == 200)

    asynchronously(test)


def test_a_replay_is_the_last_thing_of_a_loop(database, caplog):
    """Its rollback is behind it, and is cancelled with the loop: in silence."""
    async def test(key):
        async with AsyncConnectionPool("", open=False) as pool:
            idem = AsyncIdempotency(pool)

            async def handler(tx):
                return Response()

            for _ in range(2):
                found = await idem.request("u", key, handler)
            return found

    for _ in range(5):
        assert asyncio.run(asyncio.wait_for(test(new_key()), 60)).replayed
    assert not [record for record in caplog.records if "error" in record.getMessage()]


def test_no_ttl_is_refused_where_it_is_given(idem, database, effects):
    key = new_key()
    for call in (lambda: idem.request("u", key, effect(key), ttl="0 seconds"),
                 lambda: idem.request("u", key, effect(key), ttl_ms=0),
                 lambda: idem.job("u", key, lambda job: effect(key), ttl=timedelta(0)),
                 lambda: Idempotency("", ttl="0s"), lambda: AsyncIdempotency("", ttl=timedelta(0)),
                 lambda: Guard(scope=lambda request: "u", ttl="0")):
        with pytest.raises(ValueError, match="ttl must not be 0"):
            call()
    # One that is over before the handler is.
    with pytest.raises(TransactionEnded, match="longer than the ttl"):
        idem.request("u", key, lambda tx: (effect(key)(tx), tx.execute("SELECT pg_sleep(0.1)"))[0], ttl_ms=50)
    assert effects(key) == 0 and idem.request("u", key, effect(key)).outcome == "new"


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout"])
def test_a_time_out_that_ends_the_wait_says_that_the_request_is_running(database, pool, setting):
    key = new_key()
    with ConnectionPool("", min_size=1, max_size=2, kwargs={"options": f"-c {setting}=100"}) as short:
        with psycopg.connect("") as other:
            Idempotency("").on(other).claim("u", key)
            for call in (lambda: Idempotency(short).request("u", key, lambda tx: 1 / 0, wait="30s"),
                         lambda: Idempotency(short).job("u", key, lambda job: 1 / 0, wait="30s")):
                with pytest.raises(InProgress) as raised:
                    call()
                assert raised.value.retry_after == 1 and isinstance(raised.value.__cause__, psycopg.Error)
            other.rollback()
    # That of the handler is one.
    with pytest.raises(psycopg.errors.QueryCanceled):
        Idempotency(pool).request("u", key, lambda tx: tx.execute(
            "SET LOCAL statement_timeout = 100; SELECT pg_sleep(30)"), wait="30s")


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_retried(idem, effects, code):
    key, tries = new_key(), []

    def handler(tx):
        effect(key)(tx)
        tries.append(1)
        if len(tries) < 3:
            tx.execute(f"DO $$BEGIN RAISE 'again' USING ERRCODE = '{code}'; END$$")
        return Response()

    assert idem.request("u", key, handler).stored
    assert (len(tries), effects(key)) == (3, 1)


def test_an_error_that_stays(idem, effects):
    key, tries = new_key(), []

    def handler(tx):
        tries.append(1)
        tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")

    with pytest.raises(psycopg.errors.SerializationFailure):
        idem.request("u", key, handler)
    assert len(tries) == 5
    with pytest.raises(TypeError):
        idem.request("u", key, lambda tx: "not a Response")


@pytest.mark.parametrize("isolation", [None, "SERIALIZABLE"])
@pytest.mark.parametrize("autocommit", [False, True])
def test_round_trips(database, isolation, autocommit):
    """One more than the handler's own transaction, and one for a replay."""
    proxy = Proxy()
    with psycopg.connect(proxy.conninfo, autocommit=autocommit) as connection:
        if isolation:
            connection.isolation_level = psycopg.IsolationLevel[isolation]

        class Source:
            def connection(self):
                return self

            def __enter__(self):
                return connection

            def __exit__(self, *error):
                done.set()

        idem, done = Idempotency(Source()), threading.Event()

        def handler(tx):
            assert tx.execute("SHOW transaction_isolation").fetchone()[0] == (isolation or "read committed").lower()
            return Response(201)

        for _ in range(3):          # the second one prepares the claim and complete
            key, before = new_key(), proxy.trips
            assert idem.request("u", key, handler).stored
        assert proxy.trips - before == 3            # BEGIN and claim; SHOW; complete and COMMIT
        assert connection.autocommit == autocommit
        before = proxy.trips
        done.clear()
        assert idem.request("u", key, handler).replayed
        assert proxy.trips - before <= 2            # the ROLLBACK is behind the answer
        assert done.wait(10)
        assert proxy.trips - before == 2
    proxy.close()


def test_a_replay_does_not_wait_for_its_rollback(idem, asynchronously):
    async def test(idem, pool):
        key = new_key()

        async def handler(tx):
            return Response()

        await idem.request("u", key, handler)
        rollback, left = asyncio.Event(), asyncio.Event()
        backend = idem.core.servers.server.backend
        session = backend.session

        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def slow():
            async with session() as found:
                yield found
                await rollback.wait()
            left.set()

        backend.session = slow
        assert (await asyncio.wait_for(idem.request("u", key, handler), 10)).replayed
        assert not left.is_set()
        rollback.set()
        await asyncio.wait_for(left.wait(), 10)

    asynchronously(test)


@pytest.mark.parametrize("ends", ["is lost", "does not come"])
def test_commit_without_an_answer_and_without_a_key_is_no_invitation_to_retry(database, monkeypatch, ends):
    """Nobody can find out whether it has succeeded."""
    monkeypatch.setattr("pg_idempotency.core.ANSWER_LIMIT", 1)
    monkeypatch.setattr("pg_idempotency.postgres.CANCEL_LIMIT", 0.5)
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1) as pool:
        exchange = Exchange(Idempotency(pool), "POST", "/", [], None)
        if ends == "is lost":
            proxy.cut = "after"
        else:
            proxy.silence = b"COMMIT"
        with pytest.raises(IdempotencyError, match="not known"):
            run(guarded(exchange, Guard(scope=lambda request: "u", required=False), None, lambda: "u", lambda: None,
                        lambda access, tries: Answer(201, [], b"")))
    proxy.close()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_commit_without_an_answer(database, effects, cut):
    """The next claim waits until the lost session has ended, even if no duplicate is allowed to wait."""
    proxy, key, runs = Proxy(), new_key(), []
    proxy.linger = 1
    with ConnectionPool(proxy.conninfo, min_size=2, max_size=2) as pool:
        idem = Idempotency(pool, max_waiters=0)

        def handler(tx):
            runs.append(1)
            return effect(key)(tx)

        proxy.cut = cut
        result = idem.request("u", key, handler)
        assert (result.status, result.body, result.headers) == (201, "done", {"Link": ["a", "b"]})
        assert len(runs) == (2 if cut == "before" else 1)
        assert result.replayed == (cut == "after")
        assert idem.request("u", key, handler).replayed
    assert effects(key) == 1
    proxy.close()


def test_connections_that_died_in_the_pool(database, effects):
    with ConnectionPool("", min_size=2, max_size=2, name="dying") as pool:
        idem, key = Idempotency(pool), new_key()
        with psycopg.connect("", autocommit=True) as admin, pool.connection() as one, pool.connection() as other:
            for connection in (one, other):
                admin.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        assert idem.request("u", key, effect(key)).stored
        # In the handler: an error, and nothing stored.
        key = new_key()

        def handler(tx):
            effect(key)(tx)
            tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")

        with pytest.raises(psycopg.OperationalError):
            idem.request("u", key, handler)
        assert idem.request("u", key, effect(key)).stored
        assert effects(key) == 1


def run_threads(count, function):
    found = []

    def one():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, found


def test_duplicates_wait_without_connections(database, effects):
    """More of them than the pool has, in the process of the first."""
    with ConnectionPool("", min_size=2, max_size=2) as pool:
        idem, key, go = Idempotency(pool, wait="20 seconds"), new_key(), threading.Event()

        def handler(tx):
            go.wait(20)
            return effect(key)(tx)

        threads, found = run_threads(20, lambda: idem.request("u", key, handler))
        time.sleep(0.2)
        with pool.connection(timeout=10) as free:
            free.execute("SELECT 1")
        go.set()
        for thread in threads:
            thread.join(20)
        assert sorted(result.replayed for result in found) == [False] + 19 * [True]
    assert effects(key) == 1


@pytest.mark.parametrize("max_waiters", [None, 2])
def test_waiters_have_an_end(database, effects, max_waiters):
    """Duplicates of another process's request: max_waiters sleep in the database, by default half of the pool; the others
    get their answer at once."""
    key = new_key()
    with ConnectionPool("", min_size=4, max_size=4) as pool, psycopg.connect("") as other:
        holder = Idempotency("").on(other)
        keys = [new_key() for _ in range(4)]
        for key in keys:
            assert holder.claim("u", key).outcome == "new"
        idem = Idempotency(pool, wait="20 seconds", max_waiters=max_waiters)
        rest = iter(keys)
        threads, found = run_threads(4, lambda: idem.request("u", next(rest), effect("waited")))
        deadline = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [type(error) for error in found] == [InProgress, InProgress]
        other.rollback()
        for thread in threads:
            thread.join(20)
        assert sum(getattr(result, "stored", False) for result in found) == 2
    # A wait that ends.
    with psycopg.connect("") as other:
        Idempotency("").on(other).claim("u", key + "-b")
        began = time.monotonic()
        with pytest.raises(InProgress):
            Idempotency("").request("u", key + "-b", effect("never"), wait_ms=200)
        assert time.monotonic() - began > 0.15


def test_rate_limited(database):
    with psycopg.connect("", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {database} SET idempotency.max_new_keys_per_minute = 1")
        try:
            idem = Idempotency("")
            idem.request("limited", new_key(), lambda tx: Response())
            with pytest.raises(RateLimited) as raised:
                idem.request("limited", new_key(), lambda tx: Response())
            assert 1 <= raised.value.retry_after <= 120
        finally:
            connection.execute(f"ALTER DATABASE {database} RESET idempotency.max_new_keys_per_minute")


def test_no_asynchronous_handler(idem):
    async def handler(tx):
        await asyncio.sleep(0)
        return Response()

    with pytest.raises(TypeError, match="AsyncIdempotency"):
        idem.request("u", new_key(), handler)


def test_cancelled(asynchronously, effects):
    """In the handler, in its statement, in the claim's wait: rolled back, and the pool is whole."""
    async def test(idem, pool):
        for sleeping in (lambda tx: asyncio.sleep(30), lambda tx: tx.execute("SELECT pg_sleep(3)")):
            key, inside = new_key(), asyncio.Event()

            async def handler(tx):
                await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
                inside.set()
                await sleeping(tx)
                return Response()

            async def quick(tx):
                await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
                return Response()

            task = asyncio.create_task(idem.request("u", key, handler))
            await inside.wait()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await idem.request("u", key, quick, wait="20s")).stored
            assert effects(key) == 1
        async with await psycopg.AsyncConnection.connect("") as other:
            key = new_key()
            await idem.on(other).claim("u", key)
            began = time.monotonic()
            task = asyncio.create_task(idem.request("u", key, quick, wait="20s"))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 10
            await other.rollback()
        for _ in range(20):
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")

    asynchronously(test)


def test_two_hundred_at_once(asynchronously, effects):
    async def test(idem, pool):
        key = new_key()

        async def handler(tx):
            await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            return Response(201, "done")

        results = await asyncio.gather(*(idem.request("u", key, handler) for _ in range(200)))
        assert {(r.status, r.body) for r in results} == {(201, "done")}
        assert sum(not r.replayed for r in results) == 1
        assert effects(key) == 1

    asynchronously(test, wait="30s")


@pytest.mark.parametrize("options, error, text", [
    ({"wait": 5}, TypeError, "wait must be a string such as '30s'"),
    ({"wait": "1s", "wait_ms": 5}, TypeError, "wait and wait_ms cannot both be set"),
    ({"wait_ms": -1}, ValueError, "wait_ms must not be negative or infinite: -1"),
    ({"ttl_ms": float("nan")}, ValueError, "ttl_ms must not be negative or infinite: nan"),
    ({"ttl_ms": "5"}, TypeError, "ttl_ms must be a number"),
    ({"wait": timedelta(seconds=-1)}, ValueError, "wait must not be negative"),
])
def test_durations(idem, options, error, text):
    with pytest.raises(error, match=text):
        idem.request("u", new_key(), lambda tx: pytest.fail("has run"), **options)


@pytest.mark.parametrize("headers", [{"X": "a\r\nb"}, {"X": ["a", "b\0"]}, {"X\n": "a"}, {"X": 5}])
def test_headers_that_cannot_be_sent(idem, headers):
    with pytest.raises((ValueError, TypeError)):
        idem.request("u", new_key(), lambda tx: Response(200, headers=headers))


def test_another_request_does_not_wait(asynchronously):
    """Under a key whose first request takes long: it hears at once that it is another one."""
    async def test(idem, pool):
        key, running = new_key(), asyncio.Event()

        async def slow(job):
            running.set()
            await asyncio.sleep(2)
            return Response()

        first = asyncio.create_task(idem.job("u", key, slow, request_hash=b"1" * 32, wait="5s"))
        await running.wait()
        before = time.monotonic()
        with pytest.raises(KeyReused):
            await idem.job("u", key, slow, request_hash=b"2" * 32, wait="5s")
        assert time.monotonic() - before < 1
        assert (await idem.job("u", key, slow, request_hash=b"1" * 32, wait="5s")).replayed
        await first

    asynchronously(test)


@pytest.mark.parametrize("options", ["-c standard_conforming_strings=off", "-c client_encoding=latin1",
                                     "-c default_transaction_isolation=serializable", "-c intervalstyle=iso_8601"])
def test_values_are_quoted_for_the_session(database, options):
    """BEGIN and the claim, the response and COMMIT are one query each, with the values in it."""
    idem = Idempotency(lambda: psycopg.connect("", options=options))
    for body in ("it's \\' \\\\ %s $1; COMMIT --", b"it's \\' \x00\xff\\", '{"a": "\\u00e9"}'):
        key, scope = new_key(), "o'\\brien%s:x;é"
        response = Response(201, body, {"Link": ["'a'", "\\b%"]})
        for replayed in (False, True):
            found = idem.request(scope, key, lambda tx: response, method="POST", path="/it's?\\=%s", body=b"'\\",
                                 ttl="1 hour", wait_ms=5)
            assert (found.status, found.body, found.headers, found.replayed) == (201, body, response.headers, replayed)


@pytest.mark.parametrize("forgets", ["execute", "cursor", "many", "task", "set_autocommit", "publish", "once", "nothing"])
def test_what_was_never_awaited_is_no_success(asynchronously, effects, forgets):
    """It has had no effect; also in transaction()."""
    async def test(idem, pool):
        key, insert = new_key(), "INSERT INTO effects VALUES (%s)"

        async def forget(tx):
            await tx.execute(insert, (key,))
            cursor = tx.cursor()
            assert isinstance(cursor, psycopg.AsyncCursor)
            await asyncio.gather(cursor.execute(insert, (key,)), asyncio.create_task(tx.execute("SELECT 1")))
            await tx.cursor().executemany(insert, [(key,)])
            async with tx.transaction(), tx.cursor() as other:
                await other.execute(insert, (key,))
                assert other.rowcount == 1
            left = {"execute": lambda: tx.execute(insert, (key,)), "cursor": lambda: cursor.execute(insert, (key,)),
                    "many": lambda: cursor.executemany(insert, [(key,)]),
                    "task": lambda: asyncio.create_task(tx.execute(insert, (key,))),
                    "set_autocommit": lambda: tx.set_autocommit(True), "nothing": lambda: None,
                    "publish": lambda: idem.on(tx).publish("orders", {"order": 1}),
                    "once": lambda: idem.on(cursor).once("s", "t")}[forgets]()
            if forgets not in ("task", "nothing"):
                left.close()            # or Python warns of it, too
            return Response(201)

        async def within(tx):
            async with idem.transaction() as tx:
                await forget(tx)

        for call in (lambda: idem.request("u", key, forget), lambda: within(None)):
            if forgets == "nothing":
                await call()
                continue
            with pytest.raises(TypeError, match=r"(execute|executemany|set_autocommit|on\(tx\).(publish|once))\(\) was not awaited"):
                await call()
            assert effects(key) == 0 and (await idem.lookup("u", key)).state is None
        assert effects(key) == (8 if forgets == "nothing" else 0)

    asynchronously(test)


def test_event_loops_share_a_client(database, effects):
    """Duplicates of another loop wait in the database, and those of one loop without a connection."""
    key, loops, errors, answers = new_key(), 3, [], []

    @asynccontextmanager
    async def lend():
        async with await psycopg.AsyncConnection.connect("") as connection:
            yield connection

    idem = AsyncIdempotency(lend, max_waiters=5, wait="20s")

    async def handler(tx):
        await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        await asyncio.sleep(0.7)
        return Response(201, "done")

    async def main():
        return await asyncio.gather(*(idem.request("u", key, handler) for _ in range(3)))

    def run():
        try:
            answers.extend(asyncio.run(asyncio.wait_for(main(), 30)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert errors == [] and [answer.body for answer in answers] == ["done"] * 9 and effects(key) == 1


def test_a_response_of_pythons_types():
    """Those with one exact text; others by default=."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, timezone.utc)
    document = {"price": Decimal("10.10"), "at": [moment, moment.date(), moment.time()], "id": UUID(int=7)}
    assert Response.json(document).body == (
        '{"price":"10.10","at":["2026-01-02T03:04:05.000678+00:00","2026-01-02","03:04:05.000678"],'
        '"id":"00000000-0000-0000-0000-000000000007"}')
    assert Response.json({"price": Decimal("10.10")}, 201, default=float).body == '{"price":10.1}'
    with pytest.raises(TypeError, match="the document of the response contains a value that JSON cannot represent: b is a set"):
        Response.json({"a": Decimal(1), "b": {1}})
    with pytest.raises(ZeroDivisionError):
        Response.json({1j}, default=lambda value: 1 / 0)
