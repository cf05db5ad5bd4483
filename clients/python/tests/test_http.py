"""The middleware, where test/http does not look; of all frameworks."""

import os
import random
import time
from contextlib import contextmanager

import psycopg
import pytest
from asgi import ask

from pg_idempotency import Idempotency, KeyInvalid, Response, new_key
from pg_idempotency.http import Guard, parse_key


def test_replays_after_a_fork(database):
    """The thread that gives connections back is not inherited."""
    opened = []

    class Pool:
        @contextmanager
        def connection(self):
            with psycopg.connect("") as found:
                opened.append(found)
                yield found
                opened.remove(found)

    idem, key = Idempotency(Pool()), new_key()

    def settled():
        until = time.monotonic() + 5
        while opened and time.monotonic() < until:
            time.sleep(0.01)
        return not opened

    for _ in range(2):
        idem.request("u", key, lambda tx: Response())
    assert settled()
    if (child := os.fork()) == 0:
        try:
            for _ in range(5):
                idem.request("u", key, lambda tx: Response())
            os._exit(0 if settled() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("header, key", [
    ('"key-1"', "key-1"), ("key-1", "key-1"), ('  "key-1" ', "key-1"), (r'"a\"b\\c"', 'a"b\\c'), ('"key-1";a', "key-1"),
    ('"key-1";a=1;b=-2.5;  c="x\\";y";d=tok/en:1;*e=?0;f=:aGk=:', "key-1"), ('";a=1"', ";a=1"),
    ('"key-1" ;a', None), ('"key-1";', None), ('"key-1";A=1', None), ('"key-1";a="', None), ('"key-1";a=', None),
    ('"key-1";a=1, "key-2"', None), ('"key-1";a=1.', None), ('"key-1"; a = 1', None), ('key-1;a=1', None), ('"a\\b"', None)])
def test_a_key_is_a_string_of_structured_fields(header, key):
    """With parameters, which say nothing of it; without quotes where it can be taken for nothing else."""
    for strict in (False, True):
        if key is None or strict and '"' not in header:
            with pytest.raises(KeyInvalid):
                parse_key([header], strict)
        else:
            assert parse_key([header], strict) == key


# One endpoint in each framework: what it does, and the answers of its application to errors.

class Failure(Exception):
    pass


def starlette_app(idem, order, scope, answers):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.background import BackgroundTask
    from starlette.responses import PlainTextResponse, StreamingResponse
    from starlette.routing import Route
    from pg_idempotency.starlette import Guard, install

    def respond(status, text, way=None):
        if way == "pieces":
            return StreamingResponse(iter([text, text]), status)
        return PlainTextResponse(text, status, background=BackgroundTask(raises) if way == "background" else None)

    def raises():
        raise ZeroDivisionError

    async def endpoint(request):
        access = request.state.idempotency
        return await order(access.tx.execute, respond, lambda status: HTTPException(status, "raised"))

    async def answered(request, error):
        return respond(answers[type(error)], "answered")

    app = Starlette(routes=[Route("/o", Guard(scope=scope)(endpoint), methods=["POST"])],
                    exception_handlers=dict.fromkeys(answers, answered))
    install(app, idem)
    return app


def fastapi_app(idem, order, scope, answers):
    from fastapi import BackgroundTasks, FastAPI, HTTPException, Request
    from fastapi.responses import PlainTextResponse, StreamingResponse
    from pg_idempotency.fastapi import Guard, install

    app = FastAPI()

    def raises():
        raise ZeroDivisionError

    @app.post("/o")
    @Guard(scope=scope)
    async def endpoint(request: Request, tasks: BackgroundTasks):
        def respond(status, text, way=None):
            if way == "background":
                tasks.add_task(raises)
            return StreamingResponse(iter([text, text]), status) if way == "pieces" else PlainTextResponse(text, status)

        return await order(request.state.idempotency.tx.execute, respond, lambda status: HTTPException(status, "raised"))

    for kind, status in answers.items():
        app.add_exception_handler(kind, lambda request, error, status=status: PlainTextResponse("answered", status))
    install(app, idem)
    return app


def flask_app(idem, order, scope, answers):
    from flask import Flask, Response, g
    from werkzeug.exceptions import HTTPException
    from pg_idempotency.flask import Guard, install
    from pg_idempotency.runtimes import run

    app = Flask(__name__)
    app.logger.disabled = True

    def respond(status, text, way=None):
        response = Response(iter([text, text]) if way == "pieces" else text, status)
        if way == "background":
            response.call_on_close(lambda: closed.append(1))
        return response

    closed = []

    def endpoint():
        async def execute(*arguments):
            g.idempotency.tx.execute(*arguments)

        # A coroutine that never suspends.
        return run(order(execute, respond, lambda status: HTTPException(response=respond(status, "raised"))))

    app.add_url_rule("/o", "o", Guard(scope=scope)(endpoint), methods=["POST"])
    for kind, status in answers.items():
        app.register_error_handler(kind, lambda error, status=status: ("answered", status))
    install(app, idem)
    return app


@pytest.fixture(params=["starlette", "fastapi", "flask"])
def serve(request, idem, asynchronously):
    """serve(test): test(make) with make(order, scope, answers), which returns what sends a request and a key."""
    def serve(test):
        if request.param == "flask":
            def make(order, scope=lambda request: "u", answers={}):
                app = flask_app(idem, order, scope, answers)

                async def send(key):
                    answer = app.test_client().post("/o", data=b"{}", headers={"Idempotency-Key": key})
                    answer.close()
                    return answer.status_code, answer.data, "Idempotent-Replayed" in answer.headers
                return send

            from pg_idempotency.runtimes import run
            return run(test(make))

        async def asynchronous(idem, pool):
            def make(order, scope=lambda request: "u", answers={}):
                app = {"starlette": starlette_app, "fastapi": fastapi_app}[request.param](idem, order, scope, answers)

                async def send(key):
                    answer = await ask(app, key)
                    return answer.status, answer.body, answer.replayed
                return send

            await test(make)
        asynchronously(asynchronous)
    return serve


STATUSES = [200, 201, 204, 302, 400, 401, 403, 404, 408, 409, 422, 425, 429, 500, 503]


def test_no_success_goes_out_for_what_was_rolled_back(serve, effects):
    """Random handlers: an answer of 2xx has its effect, once, and is replayed; what has no effect has left its key free."""
    drawn = random.Random(29)

    async def test(make):
        for _ in range(150):
            key = new_key()
            does = drawn.choice(["returns", "returns", "raises", "aborts", "in except", "statement", "breaks", "again"])
            way, status = drawn.choice([None, None, "pieces", "background"]), drawn.choice(STATUSES)
            answers = {kind: drawn.choice(STATUSES) for kind in (Failure, psycopg.Error, Exception) if drawn.random() < 0.4}
            tries = []

            async def order(execute, respond, http_error):
                tries.append(1)
                await execute("INSERT INTO effects VALUES (%s)", (key,))
                try:
                    if does == "raises":
                        raise Failure
                    if does == "aborts":
                        raise http_error(status)
                    if does == "in except":
                        raise KeyError
                    if does == "statement" or does == "breaks":
                        await execute("SELECT 1/0")
                    if does == "again" and len(tries) % 3:
                        await execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
                except KeyError:
                    return respond(status, "caught", way)
                except psycopg.errors.DivisionByZero:
                    if does == "breaks":
                        return respond(status, "went on", way)
                    raise
                return respond(status, "returned", way)

            send = make(order, answers=answers)
            program = (does, way, status, answers)
            first, body, replayed = await send(key)
            count = effects(key)
            assert not replayed and count == (count == 1), program
            assert count == 1 or not 200 <= first < 300, program
            again, same, replayed = await send(key)
            assert replayed == (count == 1), program
            if replayed:
                assert (again, same) == (first, b"" if first == 204 else body) and effects(key) == 1, program
            assert not (replayed and first in (401, 403, 408, 425, 429)), program

    serve(test)


def test_a_status_below_200_is_not_stored(serve, idem, effects):
    """The client would wait for the final response for ever."""
    async def test(make):
        async def order(execute, respond, http_error):
            await execute("INSERT INTO effects VALUES (%s)", (key,))
            return respond(102, "")

        key = new_key()
        status, _, _ = await make(order)(key)
        assert status == 500 and effects(key) == 0 and idem.lookup("u", key).state is None

    serve(test)


def test_no_success_goes_out_if_the_guard_fails(serve, monkeypatch):
    """As if the pool had no connection; the application answers 200 to the error."""
    async def test(make):
        async def fails(*arguments):
            raise Failure("no connection")

        async def order(execute, respond, http_error):
            raise AssertionError

        send = make(order, answers={Failure: 200})
        monkeypatch.setattr("pg_idempotency.core.Core.request", fails)
        status, body, _ = await send(new_key())
        assert status == 500 and b"rolled-back" in body

    serve(test)


@pytest.mark.parametrize("found", [None, Failure])
def test_no_success_goes_out_without_a_scope(serve, found):
    """The application answers 200 to the error."""
    def scope(request):
        if found:
            raise found
        return None

    async def test(make):
        async def order(execute, respond, http_error):
            raise AssertionError

        # An error of the scope itself is the application's refusal of the visitor.
        assert (await make(order, scope, {Failure: 403, TypeError: 200})(new_key()))[0] == (403 if found else 500)

    serve(test)


@pytest.mark.parametrize("is_raised", [True, False])
def test_an_action_id_that_is_too_far_ahead_is_the_clients_mistake(serve, idem, effects, database, is_raised):
    """The guard answers it, as other errors of the extension; but not what the handler makes of it."""
    async def test(make):
        key = new_key()

        async def order(execute, respond, http_error):
            await execute("INSERT INTO effects VALUES (%s)", (key,))
            await execute("SET LOCAL idempotency.max_action_id_lead = '1min'")
            try:
                await execute("SELECT idem_set('u', 'e', '1', 'like', true, 9000000000000000)")
            except psycopg.Error as error:
                raise error if is_raised else http_error(409) from error

        status, body, replayed = await make(order, answers={psycopg.Error: 200})(key)
        if is_raised:
            assert status == 400 and b"urn:pg-idempotency:action-id-ahead" in body
        assert (status, replayed, effects(key)) == (400 if is_raised else 409, False, 0)
        assert idem.lookup("u", key).state is None

    serve(test)


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500])
def test_what_says_nothing_of_the_request_is_not_stored(serve, idem, effects, status):
    """By default: the sender logs in, or waits, and sends it again."""
    async def test(make):
        key, tries = new_key(), []

        async def order(execute, respond, http_error):
            tries.append(1)
            await execute("INSERT INTO effects VALUES (%s)", (key,))
            return respond(201 if len(tries) > 2 else status, "text")

        send = make(order)
        assert [((found := await send(key))[0], found[2]) for _ in range(4)] == [
            (status, False), (status, False), (201, False), (201, True)]
        assert effects(key) == 1

    serve(test)


@pytest.mark.parametrize("found", [None, "", 7, b"u"])
def test_nobody_is_no_scope(serve, found):
    """Silently unguarded would be worst."""
    async def test(make):
        async def order(*_):
            raise AssertionError

        assert (await make(order, lambda request: found)(new_key()))[0] == 500

    serve(test)


@pytest.mark.parametrize("found", ["u" * 513, "ü" * 257, "a\0b", "\udc80"])
def test_a_scope_that_the_server_does_not_take_is_refused(serve, found):
    async def test(make):
        async def order(execute, respond, http_error):
            return respond(200, "text")

        status, body, _ = await make(order, lambda request: found)(new_key())
        assert status == 400 and b"urn:pg-idempotency:scope-invalid" in body
        assert (await make(order, lambda request: "ü" * 256)(new_key()))[0] == 200

    serve(test)


@pytest.mark.parametrize("options", [
    {"methods": ["post"]}, {"methods": "POST"}, {"methods": []}, {"headers": "Location"}, {"scope": "u"}, {"ttl": "0"}, {"wait": 5},
    {"lease": 5}, {"timeout": "0s"}, {"fingerprint": "/a"}], ids=str)
def test_options_that_would_guard_nothing_are_an_error(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        Guard(**{"scope": lambda request: "u", **options})
