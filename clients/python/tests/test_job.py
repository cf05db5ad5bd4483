"""job(): the claim commits first, and the last step with the response."""

import asyncio
import json
import threading
import time

import anyio
import psycopg
import pytest
from proxy import Proxy
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pg_idempotency import (AsyncIdempotency, ClaimLost, ClaimNotFound, Idempotency, InProgress, NotFinished, Response,
                            TransactionEnded, core, new_key)


def finished(name):
    def finish(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (name,))
        return Response(200, "done")
    return finish


def test_steps_run_once_over_all_attempts(idem, effects):
    key, charged, keys = new_key(), [], []

    def job(job):
        def charge(step):
            keys.append(step.key)
            charged.append(job.attempt)
            return {"id": 12345678901234567890, "at": job.attempt}

        charge = job.step("charge", charge)
        assert charge == {"id": 12345678901234567890, "at": 1}
        keys.append(job.step("mail", lambda step: step.key))
        if job.attempt < 3:
            raise RuntimeError("the mail server is closed\0")
        return job.finish(finished(key))

    for attempt in (1, 2):
        with pytest.raises(RuntimeError):
            idem.job("u", key, job)
        found = idem.lookup("u", key)
        assert (found.state, found.attempt, found.recovery_point) == ("failed", attempt, "mail")
        assert "closed" in found.error and set(found.recovery_state) == {"charge", "mail"}
    first = idem.job("u", key, job)
    assert (first.status, first.body, first.replayed) == (200, "done", False)
    again = idem.job("u", key, job)
    assert (again.body, again.replayed) == ("done", True)
    assert charged == [1] and effects(key) == 1
    assert keys[0] != keys[1] and all(idem.key_is_valid(k) for k in keys) and len(set(keys)) == 2


def test_ways_out(idem):
    assert idem.job("u", new_key(), lambda job: Response(200, "returned")).stored
    key = new_key()
    with pytest.raises(NotFinished):
        idem.job("u", key, lambda job: None)
    assert idem.lookup("u", key).state == "failed"
    assert not idem.job("u", key, lambda job: Response(503)).stored
    assert idem.lookup("u", key).state == "failed"
    # The last step undone, the error out.
    with pytest.raises(ZeroDivisionError):
        idem.job("u", key, lambda job: job.finish(lambda tx: 1 / 0))
    assert idem.lookup("u", key).state == "failed"


def test_heartbeats_keep_it(idem, effects):
    """In a step, between steps, and in the last one, which take longer than the lease."""
    key, seen = new_key(), []

    def job(job):
        job.step("slow", lambda step: time.sleep(1.2))
        time.sleep(1.2)

        def finish(tx):
            time.sleep(1.2)
            try:
                Idempotency("").job("u", key, lambda other: None)
            except InProgress as error:
                seen.append(error)
            return finished(key)(tx)

        with pytest.raises(InProgress):
            idem.job("u", key, lambda other: None)
        return job.finish(finish)

    assert idem.job("u", key, job, lease_ms=900).stored
    assert len(seen) == 1 and effects(key) == 1 and idem.lookup("u", key).attempt == 1


def test_a_heartbeat_comes_each_third_of_the_lease(idem, monkeypatch):
    pauses, wait = [], idem.core.runtime.wait
    started = threading.Event()

    async def waited(event, seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            started.set()
        return await wait(event, seconds)

    monkeypatch.setattr(idem.core.runtime, "wait", waited)
    idem.job("u", new_key(), lambda job: started.wait(10) and Response(), lease="30 seconds")
    assert [round(seconds, -1) for seconds in sorted(pauses)] == [10, 30] and min(pauses) > 8


def test_lost(idem, effects):
    """Taken over meanwhile: the event, no effect, and the other's response stays."""
    key = new_key()

    def other(job):
        return job.finish(finished(key))

    def job(job):
        def stall(step):
            idem.fail("u", key, "an operator's", job.claim_token)
            assert idem.job("u", key, other).stored
            assert step.lost.wait(10)
        job.step("stall", stall)

    with pytest.raises(ClaimLost):
        idem.job("u", key, job, lease_ms=300)
    assert effects(key) == 1
    found = idem.lookup("u", key)
    assert (found.state, found.attempt, found.response_body) == ("completed", 2, "done")
    # Found out by the last step itself.
    key = new_key()

    def late(job):
        idem.fail("u", key, None, job.claim_token)
        idem.job("u", key, other)
        return job.finish(finished(key))

    with pytest.raises(ClaimLost):
        idem.job("u", key, late)
    assert effects(key) == 1


@pytest.mark.parametrize("cut", ["before", "after"])
def test_completion_without_an_answer(database, effects, cut):
    proxy, key = Proxy(), new_key()
    with ConnectionPool(proxy.conninfo, min_size=3, max_size=3) as pool:
        idem = Idempotency(pool)

        def job(job):
            def finish(tx):
                return finished(key)(tx)
            proxy.cut = cut
            return job.finish(finish)

        result = idem.job("u", key, job)
        assert (result.status, result.body, result.replayed) == (200, "done", False)
        assert idem.job("u", key, job).replayed
    assert effects(key) == 1
    proxy.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_another_attempts_response_is_not_the_own_one(idem, effects, monkeypatch, forgotten):
    """After a lost COMMIT, if the claim was taken over: behind its lease, or in a new record, whose attempts begin at 1."""
    proxy, key = Proxy(), new_key()
    resolve = core.Job._resolve_in_doubt

    async def meanwhile(job, function, cause):
        if forgotten:
            idem.forget("u", key)
        claim = idem.claim("u", key, wait="20 seconds")
        idem.complete("u", key, 200, "another attempt's", claim_token=claim.claim_token)
        return await resolve(job, function, cause)

    monkeypatch.setattr(core.Job, "_resolve_in_doubt", meanwhile)

    def last(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        proxy.cut = "before"
        return Response(200, "own")

    with ConnectionPool(proxy.conninfo, min_size=3, max_size=3) as pool:
        with pytest.raises((ClaimLost, ClaimNotFound)):
            Idempotency(pool).job("u", key, lambda job: job.finish(last), lease_ms=1500)
    proxy.close()
    assert effects(key) == 0 and idem.lookup("u", key).response_body == "another attempt's"


def test_retried(idem, effects):
    key, tries = new_key(), []

    def finish(tx):
        tries.append(1)
        finished(key)(tx)
        if len(tries) < 3:
            tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
        return Response()

    assert idem.job("u", key, lambda job: job.finish(finish)).stored
    assert (len(tries), effects(key)) == (3, 1)


def test_threads_end(idem):
    before = threading.active_count()
    for _ in range(5):
        idem.job("u", new_key(), lambda job: Response())
    assert threading.active_count() <= before + 1


def test_asynchronous(asynchronously, effects):
    async def test(idem, pool):
        key = new_key()

        async def job(job):
            async def charge(step):
                await asyncio.sleep(0.8)
                return step.key

            charge = await job.step("charge", charge)

            async def finish(tx):
                await tx.execute("INSERT INTO effects VALUES (%s)", (key,))
                return Response(200, charge)

            return await job.finish(finish)

        results = await asyncio.gather(*(idem.job("u", key, job, lease_ms=500, wait="20s") for _ in range(5)))
        assert len({r.body for r in results}) == 1 and sum(not r.replayed for r in results) == 1
        assert effects(key) == 1
        # Cancelled: failed at once, not after the lease.
        key, inside = new_key(), asyncio.Event()

        async def hang(job):
            async def forever(step):
                inside.set()
                await asyncio.sleep(60)
            await job.step("forever", forever)

        task = asyncio.create_task(idem.job("u", key, hang))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await idem.lookup("u", key)).state == "failed"
        assert len(asyncio.all_tasks()) <= 8        # the pool's own

    asynchronously(test)


def test_database_gone(database):
    """No heartbeat gets through: lost when the lease is over, by this clock."""
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=2, timeout=0.2) as pool:
        pool.wait(30)
        idem = Idempotency(pool)

        def job(job):
            proxy.close()
            assert job.lost.wait(15)
            job.step("never", lambda step: pytest.fail("a step after the claim was lost"))

        with pytest.raises(ClaimLost):
            idem.job("u", new_key(), job, lease_ms=600)


def test_a_heartbeat_without_an_answer_costs_no_lease(database):
    """The next one goes out on another connection, in time."""
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=2, max_size=2) as pool:
        def job(job):
            proxy.silence = b"idem_heartbeat"
            assert not job.lost.wait(11)
            return job.finish(lambda tx: Response())

        assert Idempotency(pool).job("u", new_key(), job, lease="9 seconds").stored
    assert proxy.silence is None
    proxy.close()


def test_a_finished_job_does_not_wait_for_a_silent_heartbeat(database):
    proxy, finished = Proxy(), []
    with ConnectionPool(proxy.conninfo, min_size=2, max_size=2) as pool:
        def job(job):
            proxy.silence = b"idem_heartbeat"
            while proxy.silence:
                time.sleep(0.01)
            finished.append(time.monotonic())
            return Response()

        assert Idempotency(pool).job("u", new_key(), job, lease="9 seconds").stored
        assert time.monotonic() - finished[0] < 8
    proxy.close()


def test_a_finished_job_does_not_wait_for_a_silent_heartbeat_asynchronous(asynchronously):
    async def test(_, pool):
        async with AsyncConnectionPool(proxy.conninfo, min_size=2, max_size=2, open=False) as pool:
            async def job(job):
                proxy.silence = b"idem_heartbeat"
                while proxy.silence:
                    await asyncio.sleep(0.01)
                finished.append(time.monotonic())
                return Response()

            assert (await AsyncIdempotency(pool).job("u", new_key(), job, lease="9 seconds")).stored
            assert time.monotonic() - finished[0] < 8

    proxy, finished = Proxy(), []
    asynchronously(test)
    proxy.close()


def test_no_connection_for_the_heartbeat(database):
    """It waits for one while the lease ends: another attempt runs, and the first hears of it."""
    key, seen = new_key(), []
    with (ConnectionPool("", min_size=1, max_size=1) as pool, ConnectionPool("", min_size=1, max_size=1) as others):
        idem, other = Idempotency(pool), Idempotency(others)

        def job(job):
            def stall(step):
                with pool.connection():
                    seen.append(step.lost.wait(5))
                    time.sleep(0.2)         # the server counts from a little later
                    seen.append(other.job("u", key, lambda job: Response(200, f"attempt {job.attempt}")).body)
            job.step("stall", stall)

        with pytest.raises(ClaimLost):
            idem.job("u", key, job, lease_ms=600)
    assert seen == [True, "attempt 2"]


def test_no_connection_asynchronous(asynchronously):
    async def test(idem, pool):
        key = new_key()

        async def job(job):
            async def stall(step):
                held = [await pool.getconn() for _ in range(10)]
                try:
                    await asyncio.wait_for(step.lost.wait(), 5)
                finally:
                    for connection in held:
                        await pool.putconn(connection)
            await job.step("stall", stall)

        with pytest.raises(ClaimLost):
            await idem.job("u", key, job, lease_ms=600)

    asynchronously(test)


def test_a_lease_that_ends_between_steps(database):
    """By the clock, where no thread has come to it."""
    proxy = Proxy()
    with ConnectionPool(proxy.conninfo, min_size=1, max_size=1) as pool:
        def job(job):
            job._until = time.monotonic()
            job.step("never", lambda step: pytest.fail("a step after the lease"))

        with pytest.raises(ClaimLost):
            Idempotency(pool).job("u", new_key(), job)
    proxy.close()


def test_a_claim_that_waited_longer_than_its_lease(idem, pool):
    """The lease counts from when the claim was had."""
    key, other, held = new_key(), Idempotency(pool), threading.Event()

    def first(job):
        held.set()
        time.sleep(1.5)
        raise ZeroDivisionError

    def run():
        with pytest.raises(ZeroDivisionError):
            other.job("u", key, first, lease="20s")

    thread = threading.Thread(target=run)
    thread.start()
    held.wait(5)
    assert idem.job("u", key, lambda job: Response(200, job.step("one", lambda step: "run")), wait="10s",
                    lease_ms=600).body == "run"
    thread.join()


def test_names_of_steps(idem):
    """A loop that gives all the same name would charge only the first."""
    key, charged = new_key(), []

    def job(job):
        for item in "abc":
            job.step("charge", lambda step: charged.append(item))

    for _ in range(2):
        with pytest.raises(TypeError, match="'charge' has already run in this attempt: each step needs its own name"):
            idem.job("u", key, job)
    assert charged == ["a"]

    def again(job):
        with pytest.raises(ZeroDivisionError):
            job.step("mail", lambda step: 1 / 0)
        return Response(200, job.step("mail", lambda step: "sent"))

    assert idem.job("u", new_key(), again).body == "sent"


@pytest.mark.parametrize("found, kind", [(float("nan"), "float"), (b"x", "bytes"), ({1, 2}, "set"),
                                         (["a\0b"], "list"), ("\ud800", "str")])
def test_what_is_no_json(idem, found, kind):
    with pytest.raises(TypeError, match=f"the step 'quote' returned a {kind} that cannot be stored as JSON"):
        idem.job("u", new_key(), lambda job: job.step("quote", lambda step: found))


@pytest.mark.parametrize("name", ["", "ü" * 257, "a\0b", "\ud800", 7])
def test_a_step_whose_name_cannot_be_stored_does_not_run(idem, name):
    """Otherwise each attempt would run it again."""
    ran = []
    with pytest.raises(TypeError, match="the name of a step must be"):
        idem.job("u", new_key(), lambda job: job.step(name, lambda step: ran.append(1)))
    assert ran == []


def test_json_that_looks_like_none(idem):
    for found in ("\\u0000", ["\\\\u0000"], 2 ** 70, {"a": None}, None):
        assert idem.job("u", new_key(), lambda job: Response.json([job.step("s", lambda step: found) == found])).body \
            == "[true]"


@pytest.mark.parametrize("error", [PoolTimeout("none in time"), psycopg.OperationalError("refused")])
def test_a_pool_that_gives_no_connection_is_asked_once(pool, error):
    """Each time costs its whole time-out; but a step that has run is worth three."""
    asked, runs, refused = [], [], set()

    def connection():
        asked.append(1)
        if len(asked) in refused:
            raise error
        return pool.connection()

    def job(job):
        refused.update(range(len(asked) + 1, len(asked) + 3))
        job.step("effect", lambda step: runs.append(1))
        refused.update(range(len(asked) + 1, len(asked) + 99))
        raise ZeroDivisionError

    idem = Idempotency(connection)
    refused.add(1)
    with pytest.raises(type(error)):
        idem.job("u", new_key(), job, lease="1 hour")
    assert (len(asked), runs) == (1, [])
    with pytest.raises(ZeroDivisionError):
        idem.job("u", new_key(), job, lease="1 hour")
    assert (len(asked), runs) == (1 + 1 + 3 + 1, [1])       # the claim, the step, and to say that it has failed


def test_a_value_that_the_job_changes_is_stored_as_the_step_returned_it(idem):
    key, found = new_key(), []

    def job(job):
        value = job.step("one", lambda step: {"items": [1]})
        found.append(value["items"].pop())
        job.step("two", lambda step: None)
        found.append(job.step("three", lambda step: [3]).pop())
        job.step("deep", lambda step: json.loads("[" * 600 + "]" * 600))
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            idem.job("u", key, job)
    assert found == [1, 3] * 2


@pytest.mark.parametrize("forgets", ["step", "finish"])
def test_a_step_that_was_never_awaited_is_no_success(asynchronously, forgets):
    async def test(idem, pool):
        key = new_key()

        async def work(job):
            (job.step("one", job) if forgets == "step" else job.finish(job)).close()
            return Response(201)

        with pytest.raises(TypeError, match=rf"job\.{forgets}\(\) was not awaited"):
            await idem.job("u", key, work)
        assert (await idem.lookup("u", key)).state == "failed"

    asynchronously(test)


@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_last_step_whose_response_is_not_stored_is_rolled_back(idem, effects, status):
    key = new_key()

    def finish(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        return Response(status)

    for attempt in (1, 2):
        result = idem.job("u", key, lambda job: job.finish(finish))
        assert (result.status, result.stored, effects(key)) == (status, False, 0)
        assert (found := idem.lookup("u", key)).state == "failed" and found.attempt == attempt


@pytest.mark.parametrize("status, stored", [(201, False), (402, True)])
def test_a_job_reports_no_success_after_a_last_step_that_was_rolled_back(idem, effects, status, stored):
    key = new_key()

    def finish(tx):
        tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        raise ZeroDivisionError

    def work(job):
        try:
            return job.finish(finish)
        except ZeroDivisionError:
            return Response(status)

    if stored:
        assert idem.job("u", key, work).status == status
    else:
        with pytest.raises(TransactionEnded, match="the last step was rolled back"):
            idem.job("u", key, work)
    assert effects(key) == 0 and idem.lookup("u", key).state == ("completed" if stored else "failed")


def test_a_duplicate_of_a_running_job_learns_when_to_come_again(idem):
    """The rest of the lease, from 1 to 5 seconds: most jobs end long before it."""
    for lease, seconds in (("60s", {5}), ("3s", {2, 3}), ("500 ms", {1})):
        key, found = new_key(), []

        def work(job):
            with pytest.raises(InProgress) as raised:
                idem.job("u", key, work)
            found.append(raised.value.retry_after)
            return Response()

        idem.job("u", key, work, lease=lease)
        assert set(found) <= seconds and found


def test_a_job_that_is_cancelled_while_its_claim_is_failed_can_run_again_at_once(asynchronously):
    key = new_key()

    async def refused(job):
        return Response(503)

    async def done(tx):
        return Response(201)

    async def test(idem, pool):
        async with await psycopg.AsyncConnection.connect("", autocommit=True) as other:
            async def claimed(job):
                await other.execute("BEGIN")
                await other.execute("SELECT FROM idem_keys WHERE key = %s FOR UPDATE", (key,))
                return await refused(job)

            task = asyncio.create_task(idem.job("u", key, claimed))
            waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%_fail%'"
            async with await psycopg.AsyncConnection.connect("", autocommit=True) as observer:
                while not await (await observer.execute(waits)).fetchone():
                    await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await other.execute("COMMIT")
        return (await idem.job("u", key, lambda job: job.finish(done), wait="5s")).status

    assert asynchronously(test) == 201


def test_a_job_that_a_cancel_scope_ends_can_run_again_at_once(asynchronously):
    """anyio cancels each await of the task again."""
    key = new_key()

    async def test(idem, pool):
        with anyio.CancelScope() as scope:
            async def slow(job):
                scope.cancel()
                await anyio.sleep(30)

            await idem.job("u", key, slow)
        return (await idem.job("u", key, lambda job: job.finish(done), wait="5s")).status

    async def done(tx):
        return Response(201)

    assert asynchronously(test) == 201
