"""Celery: a task is a job whose key is the id of the task."""

import threading

import pytest

from pg_idempotency import AsyncIdempotency, InProgress, Response, new_key

celery = pytest.importorskip("celery")
from celery.contrib.testing.worker import start_worker  # noqa: E402

from pg_idempotency.celery import Job  # noqa: E402


@pytest.fixture(scope="module")
def app():
    app = celery.Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(worker_hijack_root_logger=False, task_default_retry_delay=0, broker_connection_retry_on_startup=False)
    return app


def test_a_task_that_is_delivered_again_does_not_run_again(app, idem, effects):
    name, charged = new_key(), []

    @app.task(name=f"charge-{name}")
    @Job(idem)
    def charge(job, invoice, *, amount):
        charged.append(job.step("charge", lambda step: {"invoice": invoice, "amount": amount, "key": step.key}))

        def finish(tx):
            tx.execute("INSERT INTO effects VALUES (%s)", (name,))
            return Response.json({"paid": amount})

        return job.finish(finish)

    with pytest.raises(TypeError):              # before it is sent
        charge.delay(1, 2, 3)
    with pytest.raises(RuntimeError, match="delay"):
        charge(1, amount=2)
    with start_worker(app, perform_ping_check=False, pool="threads", concurrency=2):
        first = charge.apply_async((1,), {"amount": 2}, task_id=new_key())
        assert first.get(timeout=30) == {"paid": 2}
        assert charge.apply_async((1,), {"amount": 2}, task_id=first.id).get(timeout=30) == {"paid": 2}
        assert charge.apply_async((1,), {"amount": 2}).get(timeout=30) == {"paid": 2}
    assert effects(name) == 2 and len(charged) == 2 and charged[0]["key"] != charged[1]["key"]


def test_a_task_that_fails_goes_on_where_it_was(app, idem):
    steps, name = [], new_key()

    @app.task(name=f"fails-{name}", autoretry_for=(ZeroDivisionError,), retry_backoff=False, default_retry_delay=0)
    @Job(idem, scope=name)
    def fails(job):
        job.step("first", lambda step: steps.append(job.attempt))
        return {"attempt": 1 / (job.attempt - 1) + 1}

    with start_worker(app, perform_ping_check=False, pool="threads", concurrency=1):
        sent = fails.delay()
        assert sent.get(timeout=30) == {"attempt": 2.0} and steps == [1]
    assert idem.lookup(name, sent.id).response_body == '{"attempt":2.0}'


def test_a_task_that_another_worker_runs_is_retried(app, idem, effects):
    name, runs, begun, ends = new_key(), [], threading.Event(), threading.Event()

    @app.task(name=f"slow-{name}", max_retries=0)
    @Job(idem, lease="1 minute")
    def slow(job):
        runs.append(1)
        begun.set()
        assert ends.wait(30)
        return "done"

    with start_worker(app, perform_ping_check=False, pool="threads", concurrency=2):
        sent = slow.delay()
        assert begun.wait(30)
        task = threading.Thread(target=lambda: ends.wait(1) or ends.set())
        task.start()
        again = slow.apply_async(task_id=sent.id)
        assert again.get(timeout=30) == sent.get(timeout=30) == "done"
        task.join()
    assert len(runs) == 1


def test_an_eager_duplicate_of_a_running_task_fails_at_once(app, idem):
    """Celery ignores the delay of an eager retry."""
    name, claims = new_key(), []

    @app.task(name=f"eager-{name}", throws=InProgress)
    @Job(idem, lease="1 minute")
    def slow(job):
        claims.append(1)
        duplicate = threading.Thread(target=lambda: claims.append(slow.apply(task_id=name, throw=False)))
        duplicate.start()
        duplicate.join()
        return "done"

    assert slow.apply(task_id=name).get() == "done"
    assert claims[0] == 1 and isinstance(claims[1].result, InProgress)


def test_a_task_that_is_bound(app, idem):
    name, tries = new_key(), []

    @app.task(bind=True, name=f"bound-{name}", default_retry_delay=0)
    @Job(idem)
    def bound(self, job, amount):
        tries.append(job.step("once", lambda step: self.request.id))
        if not self.request.retries:
            raise self.retry()
        return amount

    with pytest.raises(TypeError):              # before it is sent
        bound.delay(1, 2)
    assert bound.apply((3,), task_id=name).get() == 3 and tries == [name, name]


def test_what_is_no_success_is_an_error(app, idem, effects):
    name = new_key()

    @app.task(name=f"refused-{name}")
    @Job(idem)
    def refused(job):
        def finish(tx):
            tx.execute("INSERT INTO effects VALUES (%s)", (name,))
            return Response.json({}, 503)

        return job.finish(finish)

    with pytest.raises(RuntimeError, match="503"):
        refused.apply(throw=True)
    assert effects(name) == 0


def test_what_cannot_be_a_job_is_refused(app, idem):
    with pytest.raises(TypeError, match="synchronous"):
        Job(AsyncIdempotency(""))
    with pytest.raises(TypeError, match="leese"):           # before a task runs
        Job(idem, leese="1 minute")

    @app.task
    def task():
        pass

    with pytest.raises(TypeError, match="below"):
        Job(idem)(task)


def test_a_function_that_another_task_calls_does_not_take_its_id(app, idem):
    """The second call would be the replay of the first one."""
    name = new_key()

    @app.task(name=f"charge-{name}", autoretry_for=(KeyError,))
    @Job(idem)
    def charge(job, amount):
        return amount

    @app.task(name=f"outer-{name}")
    def outer():
        return [charge.run(1), charge.run(2)]

    with pytest.raises(RuntimeError, match="would run under the id of the task outer-"):
        outer.apply().get()
    assert charge.apply((3,)).get() == 3


def test_a_value_that_is_not_stored_is_returned_once(app, idem):
    name, task_id, forgotten = new_key(), new_key(), new_key()

    @app.task(name=f"large-{name}")
    @Job(idem)
    def large(job, size):
        return "x" * size

    assert large.apply((3_000_000,), task_id=task_id).get() == "x" * 3_000_000
    with pytest.raises(RuntimeError, match="too large to be stored"):
        large.apply((3_000_000,), task_id=task_id).get()
    assert large.apply((1,), task_id=forgotten).get() == "x"
    assert idem.erase(f"large-{name}", forgotten)
    with pytest.raises(RuntimeError, match="erased"):
        large.apply((1,), task_id=forgotten).get()
