"""The middleware, where test/http does not look."""

import asyncio
import io
import os
import time
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest

from pg_idempotency import Idempotency, Response, TransactionEnded, new_key
from pg_idempotency.http import Guard, Routes
from pg_idempotency.starlette import IdempotencyMiddleware


@pytest.mark.parametrize("route, matched, not_matched", [
    ("POST /files/<path:p>", ["/files/a", "/files/a/b"], ["/files/", "/file/a"]),
    ("POST /files/{p:path}", ["/files/a", "/files/a/b"], ["/files/"]),
    ("POST /orders/<int:id>/x", ["/orders/1/x"], ["/orders/1/2/x"]),
    ("POST /orders/{id}", ["/orders/1"], ["/orders/1/2"]),
])
def test_routes(route, matched, not_matched):
    routes = Routes({route: Guard(scope=lambda request: "u")})
    assert all(routes.find("POST", path) for path in matched)
    assert not any(routes.find("POST", path) for path in not_matched)


def test_replays_after_a_fork(database):
    """The thread that gives connections back is not inherited."""
    opened = []

    @contextmanager
    def connection():
        with psycopg.connect("") as found:
            opened.append(found)
            yield found
            opened.remove(found)

    idem, key = Idempotency(connection), new_key()
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


async def ask(app, key, sent, extensions=(), method="POST"):
    """One request, as a server would hand it over."""
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(event):
        sent.append(event)

    await app({"type": "http", "method": method, "path": "/o", "raw_path": b"/o", "query_string": b"",
               "headers": [(b"idempotency-key", key.encode())], "extensions": dict.fromkeys(extensions, {})},
              receive, send)


def guard(app, idem, **options):
    return IdempotencyMiddleware(app, idem, {"POST /o": Guard(scope=lambda request: "u", **options)})


HEAD = {"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]}


@pytest.mark.parametrize("job", [False, True])
def test_background_tasks_run_behind_the_response(asynchronously, effects, job):
    """After COMMIT, after the response, with the connection given back; an error of theirs undoes nothing."""
    async def test(idem, pool):
        key, sent, seen = new_key(), [], []

        async def app(scope, receive, send):
            if not job:
                await scope["idempotency"].tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            await send(HEAD)
            await send({"type": "http.response.body", "body": b"ok"})
            held = [await pool.getconn(1) for _ in range(10)]
            for connection in held:
                await pool.putconn(connection)
            seen.append((effects(key), len(sent), (await idem.lookup("u", key)).state))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await ask(guard(app, idem, job=job), key, sent)
        assert seen == [(0 if job else 1, 2, "completed")] and sent[1]["body"] == b"ok"
        await ask(guard(app, idem, job=job), key, sent)
        assert len(seen) == 1 and (b"idempotent-replayed", b"true") in sent[2]["headers"]

    asynchronously(test)


def test_background_tasks_of_what_was_not_committed(asynchronously):
    """A COMMIT that fails cancels them; one that fails for good is an error."""
    async def test(idem, pool):
        tries, behind, ends = [], [], []

        async def app(scope, receive, send):
            tx = scope["idempotency"].tx
            tries.append(1)
            await tx.execute("CREATE TEMP TABLE IF NOT EXISTS deferred (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            if len(tries) < 3:
                await tx.execute("INSERT INTO deferred VALUES (1), (1)")
            await send(HEAD)
            try:
                await send({"type": "http.response.body", "body": b"ok"})
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise
            behind.append(len(tries))

        sent, key = [], new_key()
        for _ in range(2):
            with pytest.raises(psycopg.errors.UniqueViolation):
                await ask(guard(app, idem), key, sent)
        assert (sent, behind, ends) == ([], [], ["cancelled"] * 2)
        await ask(guard(app, idem), key, sent)
        assert behind == [3] and sent[0]["status"] == 201

    asynchronously(test)


def test_no_extensions_of_the_response(asynchronously):
    """A file that is sent by its name would be stored as an empty body."""
    async def test(idem, pool):
        async def app(scope, receive, send):
            assert list(scope["extensions"]) == ["tls"]
            await send(HEAD)
            await send({"type": "http.response.pathsend", "path": "/etc/hostname"})

        key, sent = new_key(), []
        with pytest.raises(RuntimeError, match="http.response.pathsend"):
            await ask(guard(app, idem), key, sent, ["http.response.pathsend", "tls"])
        assert not sent and (await idem.lookup("u", key)).state is None

    asynchronously(test)


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit, ValueError])
def test_an_answer_in_an_except_block(asynchronously, effects, error):
    """Of an error, which rolls back; of what is none, as one that was cancelled, an answer like others."""
    async def test(idem, pool):
        key, sent = new_key(), []

        async def app(scope, receive, send):
            await scope["idempotency"].tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            try:
                raise error
            except error:
                await send(HEAD)
                await send({"type": "http.response.body", "body": b"late"})

        await ask(guard(app, idem), key, sent)
        assert [event.get("status", event.get("body")) for event in sent] == [201, b"late"]
        assert effects(key) == (error is not ValueError)

    asynchronously(test)


# Starlette

def starlette_shop(idem, order, *, before=(), after=(), handlers=None, **options):
    """Middleware that is added before ours lies inside of it, what is added after it outside."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    app = Starlette(routes=[Route("/o", order, methods=["POST"])], exception_handlers=handlers)
    for middleware in before:
        app.add_middleware(middleware)
    app.add_middleware(IdempotencyMiddleware, idempotency=idem,
                       routes={"POST /o": Guard(**{"scope": lambda request: "u", **options})})
    for middleware in after:
        app.add_middleware(middleware)
    return app


async def ask_shop(app, key):
    """As ask(); the status, the body, the headers, and what came out of the application besides."""
    sent, escaped = [], None
    asked = asyncio.Event()

    async def receive():
        if asked.is_set():
            await asyncio.sleep(30)
        asked.set()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(event):
        sent.append(event)

    try:
        await app({"type": "http", "method": "POST", "path": "/o", "raw_path": b"/o", "query_string": b"",
                   "root_path": "", "server": ("h", 80), "scheme": "http", "http_version": "1.1",
                   "headers": [(b"idempotency-key", key.encode())] if key else []}, receive, send)
    except Exception as error:
        escaped = error
    return sent[0]["status"], b"".join(e.get("body", b"") for e in sent[1:]), dict(sent[0]["headers"]), escaped


def test_a_compressed_answer_is_replayed_as_one(asynchronously):
    """By a middleware inside of ours."""
    import gzip
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import PlainTextResponse

    async def test(idem, pool):
        async def order(request):
            return PlainTextResponse("x" * 1000, headers={"content-disposition": "attachment"})

        def compressing(app):
            inner = GZipMiddleware(app)

            async def called(scope, receive, send):
                await inner({**scope, "headers": [*scope["headers"], (b"accept-encoding", b"gzip")]}, receive, send)
            return called

        app, key = starlette_shop(idem, order, before=[compressing]), new_key()
        for _ in range(2):
            status, body, headers, _ = await ask_shop(app, key)
            assert (status, gzip.decompress(body)) == (200, b"x" * 1000)
            assert (headers[b"content-encoding"], headers[b"vary"], headers[b"content-disposition"]) == (
                b"gzip", b"Accept-Encoding", b"attachment")
        assert headers[b"idempotent-replayed"] == b"true"

    asynchronously(test)


@pytest.mark.parametrize("ends", [201, 503, "handled", "raised", "inside"])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("job", [False, True])
def test_starlette_background_tasks(asynchronously, effects, ends, base, job):
    """Behind COMMIT or the rollback, with the connection given back, also where BaseHTTPMiddleware lies around."""
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.errors import ServerErrorMiddleware
    from starlette.responses import PlainTextResponse

    class Passes(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            return await call_next(request)

    async def test(idem, pool):
        key, seen = new_key(), []

        async def later():
            held = [await pool.getconn(1) for _ in range(10)]
            for connection in held:
                await pool.putconn(connection)
            async with await psycopg.AsyncConnection.connect("") as other:
                seen.append((effects(key), (await idem.on(other).claim("u", key)).outcome))
                await other.rollback()

        async def order(request):
            if not job:
                await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            if ends in ("handled", "raised", "inside"):
                raise ZeroDivisionError
            return PlainTextResponse("ok", ends, background=BackgroundTask(later))

        def answer(request, error):
            return PlainTextResponse("sorry", 500, background=BackgroundTask(later))

        app = starlette_shop(idem, order, before=[ServerErrorMiddleware] if ends == "inside" else [],
                             after=[Passes] if base else [], job=job,
                             handlers={ZeroDivisionError if ends == "handled" else Exception: answer})
        status, _, _, escaped = await ask_shop(app, key)
        assert status == (ends if isinstance(ends, int) else 500)
        assert isinstance(escaped, ZeroDivisionError) == (ends in ("raised", "inside"))
        wanted = [(0 if job or ends != 201 else 1, "replay" if ends == 201 else "new")]
        assert seen == ([] if ends == "inside" else wanted)

    from starlette.background import BackgroundTask
    asynchronously(test)


@pytest.mark.parametrize("handled", [None, Exception, psycopg.Error])
def test_starlette_retries_what_the_application_answers(asynchronously, effects, handled):
    from starlette.responses import PlainTextResponse

    async def test(idem, pool):
        key, tries = new_key(), []

        async def order(request):
            tries.append(1)
            await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            if len(tries) < 3:
                await request.state.idempotency.tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
            return PlainTextResponse("ok")

        async def answer(request, error):
            return PlainTextResponse("sorry", 500)

        app = starlette_shop(idem, order, handlers={handled: answer} if handled else None)
        assert (await ask_shop(app, key))[:2] == (200, b"ok") and len(tries) == 3 and effects(key) == 1

    asynchronously(test)


@pytest.mark.parametrize("where", ["alone", "handler", "inside", "job", "no key"])
@pytest.mark.parametrize("status", [403, 200])
def test_starlette_rolls_back_what_is_raised(asynchronously, effects, where, status):
    """Whatever status the application makes of it; the answer goes out as it is, and the key is free."""
    from starlette.exceptions import HTTPException
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import PlainTextResponse

    class Passes(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            return await call_next(request)

    async def test(idem, pool):
        key, tries = new_key(), []

        async def order(request):
            tries.append(1)
            access = request.state.idempotency
            if where == "job":
                await access.job.step("one", write)
            else:
                await access.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            if len(tries) < 3:
                raise HTTPException(status, "no")
            return PlainTextResponse("yes")

        async def write(step):
            async with pool.connection() as other:
                await other.execute("INSERT INTO effects VALUES (%s)", (key,))

        async def answer(request, error):
            return PlainTextResponse("no", error.status_code)

        app = starlette_shop(idem, order, before=[Passes] if where == "inside" else [], job=where == "job",
                             required=where != "no key", handlers={HTTPException: answer} if where == "handler" else None)
        for _ in range(2):
            told, body, headers, escaped = await ask_shop(app, None if where == "no key" else key)
            assert (told, body, escaped) == (status, b"no", None) and b"idempotent-replayed" not in headers
            assert effects(key) == (where == "job")
            assert (await idem.lookup("u", key)).state == ("failed" if where == "job" else None)
        assert (await ask_shop(app, None if where == "no key" else key))[:2] == (200, b"yes")
        assert effects(key) == 1

    if where == "inside":
        with pytest.warns(UserWarning):
            asynchronously(test)
    else:
        asynchronously(test)


def test_starlette_answers_what_the_transaction_raises(asynchronously):
    """With the application's handler for errors, as those of any middleware."""
    from starlette.responses import PlainTextResponse

    async def test(idem, pool):
        async def order(request):
            await request.state.idempotency.tx.execute("ROLLBACK")
            return PlainTextResponse("ok")

        async def answer(request, error):
            return PlainTextResponse(type(error).__name__, 500)

        status, body, _, escaped = await ask_shop(starlette_shop(idem, order, handlers={Exception: answer}), new_key())
        assert (status, body, type(escaped)) == (500, b"TransactionEnded", TransactionEnded)

    asynchronously(test)


@pytest.mark.parametrize("found", [None, "", 7, b"u"])
def test_nobody_is_no_scope(asynchronously, idem, found):
    """Silently unguarded would be worst."""
    from starlette.responses import PlainTextResponse

    guard = Guard(scope=lambda request: found)

    async def test(idem, pool):
        seen = []

        async def answer(request, error):
            seen.append(error)
            return PlainTextResponse("no", 500)

        app = starlette_shop(idem, lambda request: 1 / 0, handlers={Exception: answer}, scope=guard.scope)
        assert (await ask_shop(app, new_key()))[0] == 500
        assert isinstance(seen[0], TypeError) and repr(found) in str(seen[0])

    asynchronously(test)
    app, guarded = flask_shop(idem, scope=guard.scope)
    app.add_url_rule("/o", view_func=lambda: 1 / 0, methods=["POST"])
    guarded()
    seen = []
    app.register_error_handler(TypeError, lambda error: (seen.append(error), ("no", 500))[1])
    assert buy(app, new_key()).status_code == 500 and repr(found) in str(seen[0])


def test_a_scope_that_refuses_is_answered_by_the_application(asynchronously):
    from starlette.exceptions import HTTPException
    from starlette.responses import PlainTextResponse

    class Unknown(Exception):
        pass

    async def answer(request, error):
        return PlainTextResponse("handled", 403)

    async def test(idem, pool):
        for error, status, handlers in ((HTTPException(401, "who"), 401, None), (Unknown(), 403, {Unknown: answer}),
                                        (HTTPException(401), 403, {401: answer}), (HTTPException(401), 403, {HTTPException: answer}),
                                        (Unknown(), 403, {Exception: answer}), (Unknown(), 403, {500: answer})):
            def scope(request):
                raise error

            status_, _, _, escaped = await ask_shop(starlette_shop(idem, lambda request: 1 / 0, handlers=handlers, scope=scope),
                                                    new_key())
            assert status_ == status
            assert (escaped is error) == bool(handlers and {500, Exception} & set(handlers))

    asynchronously(test)


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_scope_from_the_login(asynchronously, coroutine):
    """Of a middleware outside, which tells by the ASGI scope."""
    from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
    from starlette.middleware.authentication import AuthenticationMiddleware
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    class Backend(AuthenticationBackend):
        async def authenticate(self, connection):
            return AuthCredentials(["authenticated"]), SimpleUser("ann")

    async def test(idem, pool):
        async def order(request):
            return PlainTextResponse(request.state.idempotency.scope)

        def name(request):
            return Request(request.scope).user.display_name

        async def later(request):
            await asyncio.sleep(0)
            return name(request)

        app = starlette_shop(idem, order, after=[lambda app: AuthenticationMiddleware(app, backend=Backend())],
                             scope=later if coroutine else name)
        status, body, _, escaped = await ask_shop(app, new_key())
        assert (status, body, escaped) == (200, b"ann", None)

    asynchronously(test)


def test_the_guard_of_a_get_guards_its_head(asynchronously, idem, effects):
    """Frameworks hand it to the same handler, which finds its transaction, and its body is not sent."""
    from flask import Flask, g
    from pg_idempotency.flask import IdempotencyExtension
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    key, routes = new_key(), {"GET /o": Guard(scope=lambda request: "u")}
    flask_app = Flask(__name__)

    @flask_app.get("/o")
    def order():
        g.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        return "ok"

    IdempotencyExtension(flask_app, idem, routes=routes)
    for _ in range(2):
        answer = flask_app.test_client().head("/o", headers={"Idempotency-Key": key})
        assert (answer.status_code, answer.data) == (200, b"")
    assert answer.headers["Idempotent-Replayed"] == "true" and effects(key) == 1
    assert flask_app.test_client().head("/o").status_code == 400

    async def test(idem, pool):
        key, sent = new_key(), []

        async def order(request):
            await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            return PlainTextResponse("ok")

        app = Starlette(routes=[Route("/o", order, methods=["GET"])])
        app.add_middleware(IdempotencyMiddleware, idempotency=idem, routes=routes)
        for _ in range(2):
            await ask(app, key, sent, method="HEAD")
        assert [event.get("status", event.get("body")) for event in sent] == [200, b"", 200, b""]
        assert effects(key) == 1

    asynchronously(test)


def test_starlette_says_where_it_belongs(asynchronously):
    from starlette.middleware.base import BaseHTTPMiddleware

    async def test(idem, pool):
        app = starlette_shop(idem, lambda request: None, before=[BaseHTTPMiddleware])
        with pytest.warns(UserWarning, match="add IdempotencyMiddleware first"):
            app.build_middleware_stack()

    asynchronously(test)


def test_a_last_step_that_never_ends_is_503(asynchronously, monkeypatch):
    from starlette.responses import PlainTextResponse

    async def test(idem, pool):
        key = new_key()

        async def never(tx):
            await asyncio.sleep(30)

        async def order(request):
            await request.state.idempotency.job.finish(never)
            return PlainTextResponse("ok")

        monkeypatch.setattr("pg_idempotency.client.DEFAULT_TIMEOUT", timedelta(milliseconds=200))
        status, body, headers, escaped = await ask_shop(starlette_shop(idem, order, job=True), key)
        assert (status, headers[b"retry-after"], escaped) == (503, b"1", None) and b":timeout" in body
        assert (await idem.lookup("u", key)).state == "failed"

    asynchronously(test)


@pytest.mark.parametrize("synchronous", [False, True])
def test_starlette_timeouts_are_503(asynchronously, effects, synchronous):
    """Also of endpoints that run in a thread, and cannot be cancelled."""
    import threading
    from starlette.responses import PlainTextResponse

    async def test(idem, pool):
        key, free, tries = new_key(), threading.Event(), []

        async def waits(request):
            await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            tries.append(1)
            await asyncio.sleep(20 if len(tries) == 1 else 0)
            return PlainTextResponse("ok")

        def stands(request):
            tries.append(1)
            assert len(tries) > 1 or free.wait(20)
            return PlainTextResponse("ok")

        app = starlette_shop(idem, stands if synchronous else waits, timeout_ms=300)
        began = time.monotonic()
        status, body, headers, escaped = await ask_shop(app, key)
        assert (status, escaped, headers[b"retry-after"]) == (503, None, b"1") and b"idempotency:timeout" in body
        while (again := (await ask_shop(app, key))[:2])[0] == 409:      # the server has not yet heard of it
            await asyncio.sleep(0.02)
        assert again == (200, b"ok") and time.monotonic() - began < 15
        assert effects(key) == (0 if synchronous else 1)
        free.set()

    asynchronously(test)


# Flask

def flask_shop(idem, **options):
    from flask import Flask
    from pg_idempotency.flask import IdempotencyExtension

    app = Flask(__name__)
    extension = dict(routes={"POST /o": Guard(**{"scope": lambda request: "u", **options})})
    return app, lambda: IdempotencyExtension(app, idem, **extension)


def buy(app, key):
    return app.test_client().post("/o", data=b"{}", headers={"Idempotency-Key": key})


@pytest.mark.parametrize("ends", ["committed", "5xx", "raised", "retried"])
@pytest.mark.parametrize("job", [False, True])
def test_flask_callbacks_are_behind_the_transaction(idem, effects, ends, job):
    """call_on_close, teardown of the request and of the application: after COMMIT, or after the rollback."""
    from flask import after_this_request, g

    app, guarded = flask_shop(idem, job=job)
    key, seen, tries = new_key(), [], []

    def note(name, error=None):
        # Another session sees what was committed, and no lock is held on the key.
        with psycopg.connect("") as other:
            state = Idempotency("").on(other).claim("u", key).outcome
            other.rollback()
        seen.append((name, len(tries), effects(key), state, type(error)))

    app.teardown_request(lambda error: note("request", error))
    app.teardown_appcontext(lambda error: note("context", error))

    @app.post("/o")
    def order():
        tries.append(1)
        if not job:
            g.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))

        @after_this_request
        def closes(response):
            response.call_on_close(lambda: note("closed"))
            return response

        if ends == "raised":
            raise ZeroDivisionError
        if ends == "retried" and len(tries) < 2 and not job:
            g.idempotency.tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
        return "ok", 503 if ends == "5xx" else 201

    guarded()
    response = buy(app, key)
    response.close()
    done = ends in ("committed", "retried")
    assert response.status_code == {"5xx": 503, "raised": 500}.get(ends, 201)
    error = ZeroDivisionError if ends == "raised" else type(None)
    assert seen.pop(0)[:2] == ("context", 0)        # the scope's
    wanted = [("request", 1, error), ("context", 1, error), ("closed", 1, type(None))]
    if ends == "retried" and not job:
        failed = psycopg.errors.SerializationFailure
        wanted = [("request", 1, failed), ("context", 1, failed), ("closed", 1, type(None))] + [
            ("request", 2, type(None)), ("context", 2, type(None)), ("closed", 2, type(None))]
    assert [(name, count, error) for name, count, _, _, error in seen] == wanted
    for name, count, found, state, _ in seen:
        assert found == (done and count == len(tries) and not job)
        # What was tried again is put away when the next try has claimed.
        assert state == ("in_progress" if count < len(tries) else "replay" if done else "new")
    assert tries == [1] * (2 if ends == "retried" and not job else 1)
    if done:
        del seen[:]
        assert buy(app, key).headers["Idempotent-Replayed"] == "true"
        assert [name for name, *_ in seen] == ["context", "request", "context"]


def test_flask_a_scope_from_the_login(idem):
    """In a context of Flask's, whose teardown is not that of a request."""
    from flask import abort, g, request, session

    torn, popped = [], []

    def scope(found):
        assert found.environ["PATH_INFO"] == request.path == "/o" and request.get_data() == b"{}"
        return session.get("user") or abort(401)

    app, extend = flask_shop(idem, scope=scope)
    app.secret_key = "secret"
    app.teardown_request(torn.append)
    app.teardown_appcontext(popped.append)

    @app.post("/o")
    def order():
        return f"{g.idempotency.scope} {request.get_data()}"

    @app.post("/login")
    def login():
        session["user"] = "ann"
        return ""

    extend()
    client = app.test_client()
    for logged_in, status, text in ((False, 401, None), (True, 200, "ann b'{}'")):
        if logged_in:
            assert client.post("/login").status_code == 200
        torn.clear(), popped.clear()
        answer = client.post("/o", data=b"{}", headers={"Idempotency-Key": new_key()})
        assert (answer.status_code, text or answer.text) == (status, answer.text)
        assert (len(torn), len(popped)) == (1, 2)


def test_flask_asks_before_and_adds_after_a_replay(idem):
    """before_request refuses it, and after_request adds its headers, and nothing of the body."""
    import gzip
    from flask import abort, g, request, session

    app, extend = flask_shop(idem)
    app.secret_key = "secret"
    banned, runs = [], []

    @app.before_request
    def before():
        g.began = time.monotonic()
        if banned:
            abort(403)

    @app.after_request
    def after(response):
        assert g.began
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Vary"] = "Origin"
        session["seen"] = 1
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.set_data(gzip.compress(response.get_data()))
            response.headers["Content-Encoding"] = "gzip"
        return response

    @app.post("/o")
    def order():
        runs.append(1)
        return "ok", 201, {"Location": "/o/1"}

    extend()
    key, client = new_key(), app.test_client()

    def ask(encoding, **headers):
        return client.post("/o", data=b"{}", headers={"Accept-Encoding": encoding, **headers})

    for encoding in ("gzip", "gzip", ""):           # as the first was
        again = ask(encoding, **{"Idempotency-Key": key})
        assert (again.status_code, gzip.decompress(again.data)) == (201, b"ok")
        assert again.headers.getlist("Content-Encoding") == ["gzip"]
        assert again.headers["Access-Control-Allow-Origin"] == "*" and again.headers["Vary"] == "Origin, Cookie"
        assert again.headers["Location"] == "/o/1" and again.content_length == len(again.data)
    assert again.headers["Idempotent-Replayed"] == "true" and "Set-Cookie" not in again.headers
    none = ask("gzip")
    assert (none.status_code, none.mimetype, none.json["status"]) == (400, "application/problem+json", 400)
    assert none.headers["Access-Control-Allow-Origin"] == "*" and "Content-Encoding" not in none.headers
    reused = client.post("/o", data=b"[]", headers={"Idempotency-Key": key})
    assert reused.status_code == 422 and reused.headers["Access-Control-Allow-Origin"] == "*"
    banned.append(1)
    refused = ask("", **{"Idempotency-Key": key})
    assert refused.status_code == 403 and "Idempotent-Replayed" not in refused.headers and refused.data != again.data
    assert len(runs) == 1


def test_flask_answers_what_the_transaction_raises(idem, pool):
    """With the error handlers of the application, for what happens before and behind its handler, too."""
    from flask import g
    from psycopg_pool import PoolTimeout

    class Dry:
        def connection(self):
            raise PoolTimeout("no connection")

    for source, handled, status in ((idem, TransactionEnded, 409), (idem, Exception, 418),
                                    (Idempotency(Dry()), PoolTimeout, 429), (idem, None, 500)):
        app, guarded = flask_shop(source)
        runs, tears = [], []
        app.teardown_request(tears.append)

        @app.post("/o")
        def order():
            runs.append(1)
            g.idempotency.tx.execute("ROLLBACK")
            return "ok"

        if handled is not None:
            @app.errorhandler(handled)
            def answer(error):
                assert type(error) in (TransactionEnded, PoolTimeout)
                return f"refused: {error}", status

        guarded()
        response = buy(app, new_key())
        assert response.status_code == status and "Idempotent-Replayed" not in response.headers
        assert handled is None or response.text.startswith("refused: ")
        assert runs == ([] if handled is PoolTimeout else [1])
        assert len(tears) == len(runs) + 1


def test_flask_retries_what_the_application_answers(idem, effects):
    """An error handler for everything does not hide what shall run again."""
    from flask import g

    app, guarded = flask_shop(idem)
    key, tries = new_key(), []
    app.register_error_handler(Exception, lambda error: ("sorry", 500))

    @app.post("/o")
    def order():
        tries.append(1)
        g.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        if len(tries) < 3:
            g.idempotency.tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40P01'; END$$")
        return "ok"

    guarded()
    assert buy(app, key).text == "ok" and len(tries) == 3 and effects(key) == 1


@pytest.mark.parametrize("handled", [None, 403, Exception])
@pytest.mark.parametrize("job", [False, True])
def test_flask_rolls_back_what_is_raised(idem, pool, effects, handled, job):
    """abort(), too, and whatever the application makes of it; the key is free."""
    from flask import abort, g

    app, guarded = flask_shop(idem, job=job)
    key, tries = new_key(), []
    if handled is not None:
        app.register_error_handler(handled, lambda error: ("no", 403))

    @app.post("/o")
    def order():
        tries.append(1)
        if not job:
            g.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        if len(tries) < 3:
            abort(403)
        return "yes"

    guarded()
    for _ in range(2):
        response = buy(app, key)
        assert response.status_code == 403 and "Idempotent-Replayed" not in response.headers
        assert effects(key) == 0 and idem.lookup("u", key).state == ("failed" if job else None)
    assert buy(app, key).text == "yes" and effects(key) == (0 if job else 1)


def test_wsgi_rolls_back_what_start_response_is_told_of(idem, effects):
    import sys
    from pg_idempotency.flask import IdempotencyMiddleware as Wsgi

    key = new_key()

    def app(environ, start_response):
        environ["idempotency"].tx.execute("INSERT INTO effects VALUES (%s)", (key,))
        try:
            raise PermissionError
        except PermissionError:
            start_response("403 Forbidden", [("Content-Length", "2")], sys.exc_info())
        return [b"no"]

    said = []
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/o", "wsgi.input": io.BytesIO(), "HTTP_IDEMPOTENCY_KEY": key}
    made = Wsgi(app, idem, {"POST /o": Guard(scope=lambda request: "u")})
    assert b"".join(made(environ, lambda status, headers: said.append(status))) == b"no"
    assert said == ["403 Forbidden"] and effects(key) == 0 and idem.lookup("u", key).state is None


def test_flask_clients_that_keep_the_context(idem):
    from flask import g, request

    app, guarded = flask_shop(idem)
    app.add_url_rule("/o", view_func=lambda: "ok", methods=["POST"])
    guarded()
    with app.test_client() as client:
        for replayed in (False, True):
            client.post("/o", data=b"{}", headers={"Idempotency-Key": "a-key-of-the-client"})
            assert replayed or (request.path, g.idempotency.scope) == ("/o", "u")


def test_timeouts_are_503(pool):
    from flask import g

    app, guarded = flask_shop(Idempotency(pool), timeout_ms=300)
    key, sleeps = new_key(), [20, 0]
    app.add_url_rule("/o", view_func=lambda: (g.idempotency.tx.execute("SELECT pg_sleep(%s)", (sleeps.pop(0),)),
                                              "ok")[1], methods=["POST"])
    guarded()
    began = time.monotonic()
    response = buy(app, key)
    assert (response.status_code, response.json["type"], response.headers["Retry-After"]) == (
        503, "urn:pg-idempotency:timeout", "1")
    while (again := buy(app, key)).status_code == 409:      # the server has not yet heard of it
        time.sleep(0.02)
    assert again.text == "ok" and time.monotonic() - began < 15
