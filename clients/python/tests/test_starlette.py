"""Guards in Starlette, where test/http does not look."""

import asyncio
import gc
import threading
import time
import weakref
from datetime import timedelta

import psycopg
import pytest
from asgi import CopiesScope, ask
from starlette.applications import Starlette
from starlette.authentication import (AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser, requires)
from starlette.background import BackgroundTask
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, Router

from pg_idempotency import Idempotency
from pg_idempotency import Response as Stored
from pg_idempotency import TransactionEnded, new_key
from pg_idempotency.starlette import Guard, install


def shop(idem, order, *, methods=("POST",), middleware=(), handlers=None, **options):
    """One guarded endpoint; the middleware lies around it, the last one outside."""
    guard = Guard(**{"scope": lambda request: "u", **options})
    app = Starlette(routes=[Route("/o", guard(order), methods=list(methods))], exception_handlers=handlers)
    for one in middleware:
        app.add_middleware(one)
    install(app, idem)
    return app


class Passes(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return await call_next(request)


async def insert(request, name):
    await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (name,))


# Which requests are guarded


@pytest.mark.parametrize("path, root_path", [
    ("/o", ""), ("/o\n", ""), ("//o", ""), ("/o/", ""), ("/%6f", ""), ("/sub/o", ""), ("/sub/o\n", ""),
    ("/deep/sub/o", ""), ("/o", "/api"), ("/api/o", "/api"), ("/sub/o", "/api"), ("/api/sub/o", "/api"), ("/slow/o", "")])
def test_no_request_passes_the_guard_by_its_spelling(asynchronously, effects, path, root_path):
    """A path is the router's business: an endpoint that runs is guarded."""
    async def test(idem, pool):
        key, name = new_key(), new_key()

        async def order(request):
            await insert(request, name)
            return PlainTextResponse("ok", 201)

        routes = [Route("/o", Guard(scope=lambda request: "u")(order), methods=["POST"])]
        app = Starlette(routes=[*routes, Route("/o/", routes[0].endpoint, methods=["POST"]), Mount("/sub", routes=routes),
                                Mount("/deep", app=Starlette(routes=[Mount("/sub", app=Router(routes))])),
                                Mount("/slow", app=Passes(Starlette(routes=routes)))])
        install(app, idem)
        ran = 0
        for number in range(3):
            answer = await ask(app, key, path=path, root_path=root_path)
            assert answer.escaped is None and answer.status in (201, 404, 307)
            ran += answer.status == 201
            assert answer.replayed == (answer.status == 201 and number > 0)
        assert effects(name) == bool(ran)
        assert (await ask(app, path=path, root_path=root_path)).status == (400 if ran else answer.status)

    asynchronously(test)


def test_methods_of_a_class_are_endpoints(asynchronously, effects):
    async def test(idem, pool):
        key = new_key()

        class Orders(HTTPEndpoint):
            @Guard(scope=lambda request: "u")
            async def post(self, request):
                await insert(request, key)
                return PlainTextResponse("ok")

        app = Starlette(routes=[Route("/o", Orders)])
        install(app, idem)
        assert [(await ask(app, key)).replayed for _ in range(2)] == [False, True] and effects(key) == 1

    asynchronously(test)


def test_no_success_goes_out_if_a_mounted_application_has_a_client_too(asynchronously, effects):
    """As one that can also run alone."""
    async def test(idem, pool):
        key = new_key()

        async def order(request):
            await insert(request, key)
            if request.headers.get("fails"):
                raise HTTPException(409)
            return PlainTextResponse("ok", 201)

        class Answers(BaseHTTPMiddleware):
            async def dispatch(self, request, call_next):
                found = await call_next(request)
                return PlainTextResponse("fine", 200) if found.status_code == 409 else found

        inner = Starlette(routes=[Route("/o", Guard(scope=lambda request: "u")(order), methods=["POST"])])
        install(inner, idem)
        outer = Starlette(routes=[Mount("/sub", inner)])
        outer.add_middleware(Answers)
        install(outer, idem)
        answer = await ask(outer, key, path="/sub/o", headers=[("fails", "1")])
        assert answer.status == 500 and b"rolled-back" in answer.body and effects(key) == 0
        assert [(await ask(outer, key, path="/sub/o")).replayed for _ in range(2)] == [False, True] and effects(key) == 1

    asynchronously(test)


@pytest.mark.parametrize("events", [[], ["start"], ["start", "body"]])
def test_a_response_that_has_no_end_is_not_stored(asynchronously, effects, events):
    async def test(idem, pool):
        key = new_key()

        async def response(scope, receive, send):
            if "start" in events:
                await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"2")]})
            if "body" in events:
                await send({"type": "http.response.body", "body": b"a", "more_body": True})

        async def order(request):
            await request.state.idempotency.tx.execute("INSERT INTO effects VALUES (%s)", (key,))
            return response

        app = shop(idem, order)
        assert [(await ask(app, key)).status for _ in range(2)] == [500, 500] and effects(key) == 0

    asynchronously(test)


def test_a_file_is_stored_whole(asynchronously, tmp_path):
    """Also if the first request asks for a range of it."""
    async def test(idem, pool):
        (tmp_path / "file").write_bytes(b"0123456789")

        async def order(request):
            return FileResponse(tmp_path / "file")

        app, key = shop(idem, order), new_key()
        answers = [await ask(app, key, headers=[("range", "bytes=2-4")]) for _ in range(2)]
        assert [(one.status, one.body, one.replayed) for one in answers] == [(200, b"0123456789", False), (200, b"0123456789", True)]

    asynchronously(test)


def test_a_guard_that_cannot_run_is_an_error(asynchronously):
    async def test(idem, pool):
        async def order(request):
            raise AssertionError

        async def plain(request):
            return Response()

        Guard(scope=lambda request: "u")(plain)
        # The application has no client.
        guarded = Guard(scope=lambda request: "u")(order)
        answer = await ask(Starlette(routes=[Route("/o", guarded, methods=["POST"])]), new_key())
        assert answer.status == 500 and "no install(app, idempotency)" in str(answer.escaped)
        # The route leads past the guard: known when install() is called, or at the start.
        for routes in ([Route("/o", order, methods=["POST"])], [Mount("/sub", routes=[Route("/o", order)])],
                       [Mount("/sub", app=CopiesScope(Starlette(routes=[Route("/o", order)])))]):
            with pytest.raises(RuntimeError, match="order has a guard, but its route bypasses the guard"):
                install(Starlette(routes=routes), idem)
        app = Starlette()
        install(app, idem)
        app.add_route("/o", order, methods=["POST"])
        for _ in range(2):
            assert "bypasses the guard" in str((await ask(app, new_key())).escaped)
        for middleware in ([], [Middleware(CopiesScope)]):
            app = Starlette(middleware=middleware)
            install(app, idem)
            assert (await ask(app)).status == 404
            app.add_route("/o", plain, methods=["POST"])       # since the start
            assert "bypasses the guard" in str((await ask(app, new_key())).escaped)
        # Too late.
        app = Starlette()
        await ask(app)
        with pytest.raises(RuntimeError, match="before the first request"):
            install(app, idem)
        with pytest.raises(TypeError, match="above a function"):
            Guard(scope=lambda request: "u")(HTTPEndpoint)
        with pytest.warns(UserWarning, match="decorators below the guard"):
            Guard(scope=lambda request: "u")(requires("authenticated")(order))
        app = Starlette()
        install(app, Idempotency(""))
        assert "needs an AsyncIdempotency" in str((await ask(app)).escaped)

    asynchronously(test)


@pytest.mark.parametrize("how", ["at once", "in a job"])
def test_two_guards_that_run_at_once_do_not_share_a_response(asynchronously, effects, how):
    async def test(idem, pool):
        key, name = new_key(), new_key()

        @Guard(scope=lambda request: "u", wait="5s")
        async def reserve(request):
            await insert(request, name)
            await asyncio.sleep(0.1)
            return PlainTextResponse("reserved", 201)

        @Guard(scope=lambda request: "u", wait="5s", job=True)
        async def job(request):
            await reserve(request)
            return PlainTextResponse("done", 201)

        async def both(request):
            for found in await asyncio.gather(reserve(request), reserve(request), return_exceptions=True):
                if isinstance(found, Exception):
                    raise found
            return PlainTextResponse("done", 201)

        app = Starlette(routes=[Route("/o", job if how == "in a job" else both, methods=["POST"])])
        install(app, idem)
        answer = await ask(app, key)
        assert answer.status == 500 and "POST /o calls two functions with a guard" in str(answer.escaped)
        assert effects(name) == (how == "at once")
        assert (await idem.lookup("u", key)).state == ("completed" if how == "at once" else "failed")

    asynchronously(test)


def test_a_plugin_that_has_its_application_is_no_layer(asynchronously):
    """It can be mounted there, so that the applications lead to each other."""
    class Plugin:
        routes = "of another kind"

        def __init__(self, app):
            self.app = app
            app.mount("/plugin", self)

        async def __call__(self, scope, receive, send):
            await Response("plugin")(scope, receive, send)

    async def test(idem, pool):
        app = Starlette()
        Plugin(app)
        install(app, idem)
        assert (await ask(app, path="/plugin/")).body == b"plugin"

    asynchronously(test)


# The sender


class Login(AuthenticationBackend):
    """By a token, which is the name."""

    async def authenticate(self, connection):
        token = connection.headers.get("authorization")
        if token == "bad":
            raise AuthenticationError("no such token")
        return (AuthCredentials(["authenticated"]), SimpleUser(token)) if token else None


def test_a_replay_is_for_those_who_have_logged_in(asynchronously):
    """Also where a decorator refuses the others."""
    async def test(idem, pool):
        @requires("authenticated", status_code=401)
        @Guard(scope=lambda request: request.user.username)
        async def order(request):
            return PlainTextResponse(request.user.username, 201)

        app = Starlette(routes=[Route("/o", order, methods=["POST"])])
        app.add_middleware(AuthenticationMiddleware, backend=Login())
        install(app, idem)
        key = new_key()
        assert (await ask(app, key)).status == 401
        assert (await ask(app, key, headers=[("authorization", "ann")])).status == 201
        assert (await ask(app, key)).status == 401
        assert (await ask(app, key, headers=[("authorization", "bad")])).status == 400
        again = await ask(app, key, headers=[("authorization", "ann")])
        assert (again.status, again.body, again.replayed) == (201, b"ann", True)
        other = await ask(app, key, headers=[("authorization", "bob")])
        assert (other.body, other.replayed) == (b"bob", False)

    asynchronously(test)


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_scope_from_the_login(asynchronously, coroutine):
    async def test(idem, pool):
        async def order(request):
            return PlainTextResponse(request.state.idempotency.scope)

        def name(request):
            return request.user.username

        async def later(request):
            await asyncio.sleep(0)
            return name(request)

        app = shop(idem, order, scope=later if coroutine else name,
                   middleware=[lambda app: AuthenticationMiddleware(app, backend=Login())])
        answer = await ask(app, new_key(), headers=[("authorization", "ann")])
        assert (answer.status, answer.body) == (200, b"ann")

    asynchronously(test)


def test_a_scope_that_refuses_is_answered_by_the_application(asynchronously):
    class Unknown(Exception):
        pass

    async def answer(request, error):
        return PlainTextResponse("handled", 403)

    async def order(request):
        raise AssertionError

    async def test(idem, pool):
        for error, status, handlers in ((HTTPException(401, "who"), 401, None), (Unknown(), 403, {Unknown: answer}),
                                        (HTTPException(401), 403, {401: answer}), (HTTPException(401), 403, {HTTPException: answer}),
                                        (Unknown(), 403, {Exception: answer}), (Unknown(), 403, {500: answer})):
            def scope(request):
                raise error

            found = await ask(shop(idem, order, handlers=handlers, scope=scope), new_key())
            assert found.status == status
            assert (found.escaped is error) == bool(handlers and {500, Exception} & set(handlers))

    asynchronously(test)


def test_the_guard_of_a_get_guards_its_head(asynchronously, effects):
    async def test(idem, pool):
        key = new_key()

        async def order(request):
            await insert(request, key)
            return PlainTextResponse("ok")

        app = shop(idem, order, methods=["GET"])
        assert [((found := await ask(app, key, method="HEAD")).status, found.replayed) for _ in range(2)] == [
            (200, False), (200, True)]
        assert effects(key) == 1

    asynchronously(test)


# Responses


def test_middleware_compresses_each_answer(asynchronously):
    """What is stored is the endpoint's own response."""
    import gzip
    from starlette.middleware.gzip import GZipMiddleware

    async def test(idem, pool):
        async def order(request):
            return PlainTextResponse("x" * 1000, headers={"content-disposition": "attachment"})

        app, key = shop(idem, order, middleware=[GZipMiddleware]), new_key()
        for encoding in ("gzip", "gzip", ""):
            answer = await ask(app, key, headers=[("accept-encoding", encoding)])
            assert (gzip.decompress(answer.body) if encoding else answer.body) == b"x" * 1000
            assert answer.headers["content-disposition"] == "attachment"
        assert answer.replayed

    asynchronously(test)


def test_protective_headers_are_replayed(asynchronously):
    kept = {"cache-control": "private, no-store", "content-security-policy": "sandbox",
            "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    async def test(idem, pool):
        async def order(request):
            return PlainTextResponse("mine", headers=kept)

        app, key = shop(idem, order), new_key()
        for _ in range(2):
            answer = await ask(app, key)
            assert kept.items() <= answer.headers.items()
        assert answer.replayed

    asynchronously(test)


def test_no_extensions_of_the_response(asynchronously):
    """A file that is sent by its name would be stored as an empty body."""
    class ByName(Response):
        async def __call__(self, scope, receive, send):
            assert list(scope["extensions"]) == ["tls"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.pathsend", "path": "/etc/hostname"})

    async def test(idem, pool):
        async def order(request):
            return ByName()

        key = new_key()
        answer = await ask(shop(idem, order), key, extensions=["http.response.pathsend", "tls"])
        assert answer.status == 500 and "http.response.pathsend" in str(answer.escaped)
        assert (await idem.lookup("u", key)).state is None

    asynchronously(test)


def test_pieces_are_stored_where_their_length_is_known(asynchronously, effects):
    async def test(idem, pool):
        async def order(request):
            await insert(request, request.headers["idempotency-key"])
            return StreamingResponse(iter([b"a", b"b"]), headers={"content-length": "2"} if known else None)

        for known in (True, False):
            key = new_key()
            found = [await ask(shop(idem, order), key) for _ in range(2)]
            assert [answer.status for answer in found] == [200 if known else 500] * 2
            assert effects(key) == known == found[1].replayed
            assert found[1].body == b"ab" if known else b"streaming-refused" in found[1].body

    asynchronously(test)


@pytest.mark.parametrize("length", ["1", "3"])
def test_a_body_that_does_not_have_its_length_is_rolled_back(asynchronously, effects, length):
    async def test(idem, pool):
        async def order(request):
            await insert(request, key)
            return Response(b"ab", 201, headers={"content-length": length})

        key = new_key()
        answer = await ask(shop(idem, order), key)
        assert answer.status == 500 and "Content-Length" in str(answer.escaped) and effects(key) == 0

    asynchronously(test)


@pytest.mark.parametrize("second", ["http.response.start", "http.response.body"])
def test_a_second_response_is_rolled_back(asynchronously, effects, second):
    async def test(idem, pool):
        class Twice(Response):
            async def __call__(self, scope, receive, send):
                await send({"type": "http.response.start", "status": 402, "headers": []})
                await send({"type": "http.response.body", "body": b"first"})
                await send({"type": second, "status": 201, "headers": [], "body": b"second"})

        async def order(request):
            await insert(request, key)
            return Twice()

        key = new_key()
        answer = await ask(shop(idem, order), key)
        assert answer.status == 500 and "second response" in str(answer.escaped) and effects(key) == 0

    asynchronously(test)


# The order of things


@pytest.mark.parametrize("ends", [201, 503, "handled", "raised"])
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("job", [False, True])
def test_background_tasks(asynchronously, effects, ends, base, job):
    """Behind COMMIT or the rollback, with the connection given back, and behind the response."""
    async def test(idem, pool):
        key, seen, state = new_key(), [], []

        async def later():
            held = [await pool.getconn(1) for _ in range(10)]
            for connection in held:
                await pool.putconn(connection)
            async with await psycopg.AsyncConnection.connect("") as other:
                seen.append((effects(key), (await idem.on(other).claim("u", key)).outcome, base or state[0].events))
                await other.rollback()

        async def order(request):
            if not job:
                await insert(request, key)
            if ends in ("handled", "raised"):
                raise ZeroDivisionError
            return PlainTextResponse("ok", ends, background=BackgroundTask(later))

        def answer(request, error):
            return PlainTextResponse("sorry", 500, background=BackgroundTask(later))

        app = shop(idem, order, middleware=[Passes] if base else [], job=job,
                   handlers={ZeroDivisionError if ends == "handled" else Exception: answer})
        found = await ask(app, key, state=state)
        assert found.status == (ends if isinstance(ends, int) else 500)
        assert isinstance(found.escaped, ZeroDivisionError) == (ends == "raised")
        assert seen == [(0 if job or ends != 201 else 1, "replay" if ends == 201 else "new", base or 2)]
        if ends == 201:
            assert (await ask(app, key)).replayed and len(seen) == 1

    asynchronously(test)


def test_background_tasks_of_what_was_not_committed(asynchronously):
    """A COMMIT that fails takes them along; one that fails for good is an error."""
    async def test(idem, pool):
        tries, behind = [], []

        async def order(request):
            tx = request.state.idempotency.tx
            tries.append(1)
            await tx.execute("CREATE TEMP TABLE IF NOT EXISTS deferred (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            if len(tries) < 3:
                await tx.execute("INSERT INTO deferred VALUES (1), (1)")
            return PlainTextResponse("ok", 201, background=BackgroundTask(behind.append, len(tries)))

        key, app = new_key(), shop(idem, order)
        for _ in range(2):
            answer = await ask(app, key)
            assert answer.status == 500 and isinstance(answer.escaped, psycopg.errors.UniqueViolation)
        assert behind == []
        assert (await ask(app, key)).status == 201 and behind == [3]

    asynchronously(test)


@pytest.mark.parametrize("handled", [None, Exception, psycopg.Error])
def test_another_try_gets_what_the_first_one_got(asynchronously, effects, handled):
    """Before the application answers the error; and not what the first try has made of the request."""
    async def test(idem, pool):
        key, tries, behind = new_key(), [], []

        async def order(request):
            tries.append(await request.json())
            tries[-1]["seen"] = True
            await insert(request, key)
            if len(tries) < 3:
                await request.state.idempotency.tx.execute("DO $$BEGIN RAISE 'again' USING ERRCODE = '40001'; END$$")
            return PlainTextResponse("ok", background=BackgroundTask(behind.append, 1))

        async def answer(request, error):
            return PlainTextResponse("sorry", 500)

        app = shop(idem, order, handlers={handled: answer} if handled else None)
        found = await ask(app, key, body=b'{"a": 1}')
        assert (found.status, found.body, len(tries), effects(key), behind) == (200, b"ok", 3, 1, [1])
        assert tries == [{"a": 1, "seen": True}] * 3 and len({id(one) for one in tries}) == 3

    asynchronously(test)


@pytest.mark.parametrize("where", ["alone", "handler", "inside", "job", "no key"])
def test_what_is_raised_is_rolled_back(asynchronously, effects, where):
    """The application's answer to it goes out as it is, and the key is free."""
    async def test(idem, pool):
        key, tries = new_key(), []

        async def write(step):
            async with pool.connection() as other:
                await other.execute("INSERT INTO effects VALUES (%s)", (key,))

        async def order(request):
            tries.append(1)
            if where == "job":
                await request.state.idempotency.job.step("one", write)
            else:
                await insert(request, key)
            if len(tries) < 3:
                raise HTTPException(409, "no")
            return PlainTextResponse("yes")

        async def answer(request, error):
            return PlainTextResponse("no", error.status_code)

        app = shop(idem, order, middleware=[Passes] if where == "inside" else [], job=where == "job",
                   required=where != "no key", handlers={HTTPException: answer} if where == "handler" else None)
        sent = None if where == "no key" else key
        for _ in range(2):
            found = await ask(app, sent)
            assert (found.status, found.body, found.escaped, found.replayed) == (409, b"no", None, False)
            assert effects(key) == (where == "job")
            assert (await idem.lookup("u", key)).state == ("failed" if where == "job" else None)
        found = await ask(app, sent)
        assert (found.status, found.body) == (200, b"yes") and effects(key) == 1

    asynchronously(test)


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError])
def test_an_answer_in_an_except_block_is_one(asynchronously, effects, error):
    """What the endpoint returns is its answer, and is committed."""
    async def test(idem, pool):
        key = new_key()

        async def order(request):
            await insert(request, key)
            try:
                raise error
            except error:
                return PlainTextResponse("late", 201)

        app = shop(idem, order)
        assert [((found := await ask(app, key)).status, found.body, found.replayed) for _ in range(2)] == [
            (201, b"late", False), (201, b"late", True)]
        assert effects(key) == 1

    asynchronously(test)


@pytest.mark.parametrize("raised", ["HTTPException", "handler", "of all", "middleware"])
def test_a_success_for_what_was_rolled_back_is_500(asynchronously, effects, raised, caplog):
    class Hides(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            try:
                return await call_next(request)
            except LookupError:
                return PlainTextResponse("fine", 200)

    async def fine(request, error):
        return PlainTextResponse("fine", 202)

    async def test(idem, pool):
        key = new_key()

        async def order(request):
            await insert(request, key)
            raise HTTPException(200, "fine") if raised == "HTTPException" else LookupError

        handlers = {"handler": {LookupError: fine}, "of all": {Exception: fine}}.get(raised)
        app = shop(idem, order, handlers=handlers, middleware=[Hides] if raised == "middleware" else [])
        for _ in range(2):
            answer = await ask(app, key)
            assert answer.status == 500 and b"rolled-back" in answer.body and b"fine" not in answer.body
        assert effects(key) == 0 and "POST /o was rolled back, and the application answered 20" in caplog.text

    asynchronously(test)


def test_starlette_answers_what_the_transaction_raises(asynchronously):
    async def test(idem, pool):
        async def order(request):
            await request.state.idempotency.tx.execute("ROLLBACK")
            return PlainTextResponse("ok")

        async def answer(request, error):
            return PlainTextResponse(type(error).__name__, 500)

        found = await ask(shop(idem, order, handlers={Exception: answer}), new_key())
        assert (found.status, found.body, type(found.escaped)) == (500, b"TransactionEnded", TransactionEnded)

    asynchronously(test)


# Bodies


def test_a_body_is_read_behind_the_key_and_the_scope_and_up_to_a_limit(asynchronously):
    async def test(idem, pool):
        def scope(request):
            return request.headers.get("x-user") or refuse()

        def refuse():
            raise HTTPException(401)

        async def order(request):
            return JSONResponse(len(await request.body()))

        app = shop(idem, order, scope=scope, max_request_size=1000)

        async def found(key, *headers, size=2000, pieces=4):
            asked = []

            class Pieces(list):
                def pop(self, at):
                    asked.append(1)
                    return super().pop(at)

            answer = await ask(app, key, headers=headers, pieces=Pieces([b"x" * (size // pieces)] * pieces))
            return answer.status, len(asked)

        user, length = ("x-user", "u"), ("content-length", "2000")
        assert await found(None, user) == (400, 0)
        assert await found(new_key()) == (401, 0)
        assert await found(new_key(), user, length) == (413, 0)
        assert await found(new_key(), user) == (413, 3)
        assert await found(new_key(), user, size=1000) == (200, 4)

    asynchronously(test)


@pytest.mark.parametrize("ends", ["reused", "raised", "refused", "invalid"])
def test_a_request_is_freed_when_it_ends(asynchronously, ends):
    """With its body, by the last reference, and not by the garbage collector later."""
    async def test(idem, pool):
        requests = []

        async def order(request):
            if ends == "raised":
                raise HTTPException(409)
            return PlainTextResponse("ok")

        def scope(request):
            requests.append((weakref.ref(request), weakref.ref(request.scope["pg_idempotency"])))
            if ends == "refused":
                raise HTTPException(401)
            return "u"

        app, key = shop(idem, order, scope=scope), new_key() if ends != "invalid" else "k"
        await ask(app, key)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await ask(app, key, body=b"x")
            # asyncio may still have the last one.
            assert len(requests) == 6 and {one() for pair in requests[:-1] for one in pair} == {None}
        finally:
            gc.enable()

    asynchronously(test)


def test_a_body_that_was_read_in_part_before_the_guard_is_an_error(asynchronously):
    async def test(idem, pool):
        async def order(request):
            raise AssertionError

        guarded = Guard(scope=lambda request: "u")(order)

        async def peeks(request):
            async for _ in request.stream():
                break
            return await guarded(request)

        app = Starlette(routes=[Route("/o", peeks, methods=["POST"])])
        install(app, idem)
        answer = await ask(app, new_key(), pieces=[b"a", b"b"])
        assert answer.status in (400, 500)

    asynchronously(test)


# Time


def test_a_last_step_that_never_ends_is_503(asynchronously, monkeypatch):
    async def test(idem, pool):
        key = new_key()

        async def never(tx):
            await asyncio.sleep(30)

        async def order(request):
            await request.state.idempotency.job.finish(never)
            return PlainTextResponse("ok")

        monkeypatch.setattr("pg_idempotency.client.DEFAULT_TIMEOUT", timedelta(milliseconds=200))
        answer = await ask(shop(idem, order, job=True), key)
        assert (answer.status, answer.headers["retry-after"], answer.escaped) == (503, "1", None)
        assert b":timeout" in answer.body and (await idem.lookup("u", key)).state == "failed"

    asynchronously(test)


@pytest.mark.parametrize("synchronous", [False, True])
def test_timeouts_are_503(asynchronously, effects, synchronous):
    """Also of endpoints that run in a thread, and cannot be cancelled."""
    async def test(idem, pool):
        key, free, tries = new_key(), threading.Event(), []

        async def waits(request):
            await insert(request, key)
            tries.append(1)
            await asyncio.sleep(20 if len(tries) == 1 else 0)
            return PlainTextResponse("ok")

        def stands(request):
            tries.append(1)
            assert len(tries) > 1 or free.wait(20)
            return PlainTextResponse("ok")

        app = shop(idem, stands if synchronous else waits, timeout_ms=300)
        began = time.monotonic()
        answer = await ask(app, key)
        assert (answer.status, answer.escaped, answer.headers["retry-after"]) == (503, None, "1")
        assert b"idempotency:timeout" in answer.body
        while (again := await ask(app, key)).status == 409:      # the server has not yet heard of it
            await asyncio.sleep(0.02)
        assert (again.status, again.body) == (200, b"ok") and time.monotonic() - began < 15
        assert effects(key) == (0 if synchronous else 1)
        free.set()

    asynchronously(test)


def test_a_request_of_the_frameworks_own_class(asynchronously):
    """Arguments of an endpoint are found by what they are."""
    async def test(idem, pool):
        class Mine(Request):
            pass

        async def order(prefix, *, request):
            return PlainTextResponse(prefix + type(request).__name__)

        guarded = Guard(scope=lambda request, prefix=None: "u")(order)

        async def route(request):
            return await guarded("its ", request=Mine(request.scope, request.receive))

        app = Starlette(routes=[Route("/o", route, methods=["POST"])])
        install(app, idem)
        assert (await ask(app, new_key())).body == b"its Mine"

    asynchronously(test)


@pytest.mark.parametrize("finished, returned", [(201, 201), (404, 201), (201, 503), (503, 201)])
def test_a_job_sends_what_it_has_stored(asynchronously, finished, returned):
    """And not what the endpoint returns after the end of the job."""
    async def test(idem, pool):
        async def order(request):
            async def finish(tx):
                return Stored(finished, "stored")

            await request.state.idempotency.job.finish(finish)
            return PlainTextResponse("returned", returned)

        app, key = shop(idem, order, job=True), new_key()
        answers = [await ask(app, key) for _ in range(2)]
        assert [(one.status, one.body) for one in answers] == [(finished, b"stored")] * 2

    asynchronously(test)
