"""The middleware, where test/http does not look."""

import os
import time
from contextlib import contextmanager

import psycopg
import pytest

from pg_idempotency import Idempotency, Response, new_key
from pg_idempotency.http import Guard, Routes


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
