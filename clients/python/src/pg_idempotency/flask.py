"""
The middleware for WSGI, and what ties it to Flask.

	IdempotencyExtension(app, idem, routes={"POST /payments": Guard(scope=user)})

The handler finds its transaction as flask.g.idempotency.tx.  It runs to its
end, also where the client has hung up: what it has done is committed, and the
response is there for the retry.  IdempotencyMiddleware alone serves any other
WSGI application, which finds it in the environment, under "idempotency".
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote
from http import HTTPStatus

from .client import Defaults, Idempotency
from .errors import sqlstate
from .core import RETRIED
from .http import BODILESS, Access, Answer, Guard, Request, Routes, StreamingRefused, guarded
from .shells import run

__all__ = ["Access", "Guard", "IdempotencyExtension", "IdempotencyMiddleware", "Request"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
KEY = "idempotency"


class IdempotencyMiddleware:
    def __init__(self, app: App, idempotency: Idempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        if idempotency.core.shell.asynchronous:
            raise TypeError("WSGI wants an Idempotency")
        self.app = app
        self._client = idempotency
        self._routes = Routes(routes)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")
        guard = self._routes.find(environ["REQUEST_METHOD"], path)
        if guard is None:
            return self.app(environ, start_response)
        body = _body(environ)
        if body is None:                    # hung up before it was whole
            start_response("400 Bad Request", [("Content-Length", "0")])
            return [b""]
        request = Request(environ["REQUEST_METHOD"], _path(environ), _headers(environ), body)
        answer = run(guarded(self._client, guard, request,
                             lambda access: _captured(self.app, environ, request, access)))
        start_response(_status(answer.status), list(answer.headers))
        return [answer.body]


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def _headers(environ: Environ) -> list[tuple[str, str]]:
    headers = [(name[5:].replace("_", "-"), text) for name, text in environ.items() if name.startswith("HTTP_")]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-"), environ[name]))
    return headers


def _path(environ: Environ) -> str:
    """As it came in, with the query, where the server tells."""
    for name in ("RAW_URI", "REQUEST_URI"):
        if str(environ.get(name, "")).startswith("/"):
            return f"{environ[name]}"
    path: str = quote((environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1"))
    query: str = environ.get("QUERY_STRING") or ""
    return f"{path}?{query}" if query else path


def _body(environ: Environ) -> bytes | None:
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH")
    try:
        if length:
            body: bytes = source.read(int(length))
            return body if len(body) == int(length) else None
        return bytes(source.read()) if environ.get("wsgi.input_terminated") else b""
    except (OSError, ValueError):
        return None


def _captured(app: App, environ: Environ, request: Request, access: Access) -> Answer:
    """Run the application, and keep what it answers."""
    start: list[Any] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        start[:] = [int(status.split()[0]), list(headers)]
        return written.append

    inner = {**environ, KEY: access if access.scope else None, "wsgi.input": io.BytesIO(request.body),
             "CONTENT_LENGTH": str(len(request.body))}
    inner.pop("HTTP_TRANSFER_ENCODING", None)
    iterable = app(inner, start_response)
    try:
        pieces = None
        if isinstance(iterable, (list, tuple)) or _whole(start):
            pieces = written + list(iterable)
    finally:
        close = getattr(iterable, "close", None)
        if close is not None:
            close()
    if pieces is None:
        raise StreamingRefused(f"{request.method} {request.path.split('?')[0]} answers in pieces: a response that is "
                               "to be stored has to be whole, with its length")
    return Answer(start[0], start[1], b"".join(pieces))


def _whole(start: list[Any]) -> bool:
    return bool(start) and (start[0] in BODILESS or any(name.lower() == "content-length" for name, _ in start[1]))


class IdempotencyExtension:
    """The middleware around a Flask application, and g.idempotency in it."""

    def __init__(self, app: Any, idempotency: Idempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        from flask import g, request

        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, idempotency, routes)

        @app.before_request     # type: ignore[misc]
        def put() -> None:
            g.idempotency = request.environ.get(KEY)

        @app.teardown_request   # type: ignore[misc]
        def caught(error: BaseException | None) -> None:
            # Flask has made a 500 of it, but this one runs the request again.
            access = request.environ.get(KEY)
            if access is not None and error is not None and sqlstate(error) in RETRIED:
                access.error = error
