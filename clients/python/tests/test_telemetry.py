"""What a client says of its calls: the hook, the log, spans, and the trace of duplicates and consumers."""

import logging
import threading
import time

import opentelemetry_api
import psycopg
import pytest

from pg_idempotency import AsyncIdempotency, Idempotency, InProgress, KeyReused, Response, new_key

try:
    import opentelemetry.trace  # noqa: F401
except ImportError:
    opentelemetry_api.install()

from pg_idempotency.opentelemetry import OpenTelemetry  # noqa: E402


@pytest.fixture
def spans():
    opentelemetry_api.spans.clear()
    opentelemetry_api.measured.clear()
    return opentelemetry_api.spans


def names(spans):
    return [span.name.removeprefix("idempotency.") for span in spans]


def test_the_hook_hears_of_each_outcome(pool, database):
    heard, key = [], new_key()
    idem = Idempotency(pool, on_outcome=heard.append)
    with psycopg.connect("") as other:
        Idempotency("").on(other).claim("ann", key)
        for wait in None, "200 ms":
            with pytest.raises(InProgress):
                idem.request("ann", key, lambda tx: Response(), wait=wait)
        other.rollback()
    runs = []

    def place(tx):
        runs.append(1)
        if len(runs) == 1:
            tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
        return Response()

    for body in b"1", b"1", b"2":
        try:
            idem.request("ann", key, place, method="POST", path="/", body=body)
        except KeyReused:
            pass
    with pytest.raises(ZeroDivisionError):
        idem.request("ann", new_key(), lambda tx: 1 / 0)
    idem.erase("ann", key)
    idem.request("ann", key, place, method="POST", path="/", body=b"1")
    assert [(one.call, one.scope, one.outcome, one.attempt) for one in heard] == [("request", "ann", *found) for found in (
        ("in_progress", 0), ("in_progress", 0), ("new", 2), ("replay", 0), ("hash_conflict", 0), ("failed", 1), ("erased", 0))]
    assert all(one.ms > 0 for one in heard)
    assert heard[1].waited > 150 and not any(one.waited for one in heard if one is not heard[1])


def test_the_hook_hears_of_jobs_and_of_waits_in_the_process(pool, database):
    heard, key, begun = [], new_key(), threading.Event()
    idem = Idempotency(pool, on_outcome=heard.append, wait="20 seconds")

    def pay(job):
        begun.set()
        time.sleep(0.3)
        return Response()

    first = threading.Thread(target=lambda: idem.job("ann", key, pay))
    first.start()
    begun.wait(10)
    assert idem.job("ann", key, pay).replayed
    first.join()
    assert sorted((one.call, one.outcome, one.attempt) for one in heard) == [("job", "new", 1), ("job", "replay", 0)]
    assert next(one.waited for one in heard if one.outcome == "replay") > 100


def test_a_hook_that_fails_fails_no_request(pool, database, caplog):
    idem = Idempotency(pool, on_outcome=lambda outcome: 1 / 0)
    assert idem.request("ann", new_key(), lambda tx: Response()).stored
    assert "could not be reported" in caplog.text


def test_a_log_that_fails_fails_no_request(idem, caplog):
    caplog.set_level(logging.INFO, "pg_idempotency")

    class Fails(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError

    failing = Fails()
    logging.getLogger("pg_idempotency").addHandler(failing)
    try:
        assert idem.request("u", new_key(), lambda tx: Response(201)).status == 201
    finally:
        logging.getLogger("pg_idempotency").removeHandler(failing)


def test_a_hook_that_would_never_run_is_refused(pool):
    async def report(outcome):
        raise AssertionError

    with pytest.raises(TypeError, match="must not be a coroutine function"):
        Idempotency(pool, on_outcome=report)


def test_the_log_has_fields_and_no_scope_or_key(idem, caplog):
    key = new_key()
    with caplog.at_level(logging.INFO, "pg_idempotency"):
        idem.request("ann-the-user", key, lambda tx: Response())
    record, = caplog.records
    assert (record.name, record.idempotency_call, record.idempotency_outcome, record.idempotency_attempt) == (
        "pg_idempotency", "request", "new", 1)
    assert record.idempotency_ms > 0 and not hasattr(record, "idempotency_scope")
    assert "ann-the-user" not in str(vars(record)) and key not in str(vars(record))


def test_spans(pool, database, spans):
    idem, key = Idempotency(pool, tracing=OpenTelemetry()), new_key()
    idem.request("ann", key, lambda tx: Response())
    assert names(spans) == ["request", "claim", "handler", "commit"]
    request = spans[0]
    assert {span.parent for span in spans[1:]} == {request} and {span.get_span_context().trace_id for span in spans} == {
        request.get_span_context().trace_id}
    assert request.attributes == {"db.system.name": "postgresql", "idempotency.outcome": "new", "idempotency.attempt": 1}
    spans.clear()
    answer = idem.request("ann", key, lambda tx: Response(), wait="1 second")
    assert answer.replayed and answer.headers == {} and names(spans) == ["request", "claim"]
    context = request.get_span_context()
    assert spans[0].links == [(context.trace_id, context.span_id, True)]
    outcomes = [(name, attributes["idempotency.outcome"]) for name, _, attributes in opentelemetry_api.measured]
    assert outcomes == [("idempotency.requests", "new"), ("idempotency.requests", "replay"), ("idempotency.wait.duration", "replay")]
    spans.clear()
    with pytest.raises(ZeroDivisionError):
        idem.request("ann", new_key(), lambda tx: 1 / 0)
    assert [(span.name.removeprefix("idempotency."), span.status, span.attributes.get("error.type")) for span in spans] == [
        ("request", "ERROR", "ZeroDivisionError"), ("claim", None, None), ("handler", "ERROR", "ZeroDivisionError")]
    spans.clear()
    Idempotency(pool, tracing=OpenTelemetry(lambda outcome: {"user": outcome.scope})).job("ann", new_key(), lambda job: Response())
    assert names(spans)[:3] == ["job", "claim", "handler"] and spans[0].attributes["user"] == "ann"


@pytest.mark.parametrize("synchronous", [True, False])
def test_one_trace_from_the_request_to_the_message(pool, asynchronously, spans, synchronous):
    key, topic = new_key(), new_key()
    headers = [None, {}, {"n": 1.10}, {"traceparent": "mine"}]
    if synchronous:
        idem = Idempotency(pool, tracing=OpenTelemetry())

        def place(tx):
            for one in headers:
                idem.on(tx).publish(topic, {}, headers=one)
            idem.on(tx).publish_many([topic, topic], [1, 2])
            idem.on(tx).publish_many([topic, topic], [1, 2], headers=headers[2:])
            return Response.json({}, headers={"X-Mine": "1"})

        for _ in range(2):
            answer = idem.request("ann", key, place)
    else:
        async def test(_, pool):
            idem = AsyncIdempotency(pool, tracing=OpenTelemetry())

            async def place(tx):
                for one in headers:
                    await idem.on(tx).publish(topic, {}, headers=one)
                await idem.on(tx).publish_many([topic, topic], [1, 2])
                await idem.on(tx).publish_many([topic, topic], [1, 2], headers=headers[2:])
                return Response.json({}, headers={"X-Mine": "1"})

            for _ in range(2):
                answer = await idem.request("ann", key, place)
            return answer

        answer = asynchronously(test)
    assert answer.replayed and answer.headers == {"Content-Type": "application/json", "X-Mine": "1"}
    trace = f"00-{spans[0].get_span_context().trace_id:032x}-"
    found = [message.headers for message in Idempotency(pool).outbox_take(10, topics=[topic])]
    assert len(found) == 8 and [sorted(one) for one in found] == [["traceparent"]] * 2 + [["n", "traceparent"], ["traceparent"]] + [
        ["traceparent"]] * 2 + [["n", "traceparent"], ["traceparent"]]
    assert [one["traceparent"].startswith(trace) for one in found] == [True, True, True, False, True, True, True, False]
    stored = Idempotency(pool).lookup("ann", key).response_headers
    assert stored["traceparent"].startswith(trace)


def test_without_tracing_nothing_is_added(idem):
    key, topic = new_key(), new_key()

    def place(tx):
        idem.on(tx).publish(topic, {})
        return Response()

    idem.request("ann", key, place)
    assert idem.outbox_take(10, topics=[topic])[0].headers is None and idem.lookup("ann", key).response_headers is None
