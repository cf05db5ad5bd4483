"""The middleware, where test/http does not look."""

import asyncio
import os
import time
from contextlib import contextmanager

import psycopg
import pytest

from pg_idempotency import Idempotency, Response, new_key
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


async def ask(app, key, sent, extensions=()):
    """One request, as a server would hand it over."""
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(event):
        sent.append(event)

    await app({"type": "http", "method": "POST", "path": "/o", "raw_path": b"/o", "query_string": b"",
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
