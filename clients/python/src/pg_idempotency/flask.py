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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote
from http import HTTPStatus

from .client import Defaults, Idempotency
from .http import BODILESS, Access, Answer, Guard, Request, Routes, StreamingRefused, guarded
from .shells import run

__all__ = ["Access", "Guard", "IdempotencyExtension", "IdempotencyMiddleware", "Request"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
KEY = "idempotency"
RUN = "pg_idempotency.run"
SCOPE = "pg_idempotency.scope"
SHOWN = "pg_idempotency.shown"
FAILED = "pg_idempotency.failed"
PRESERVE = "werkzeug.debug.preserve_context"
OF_THE_BODY = {"accept-ranges", "content-disposition", "content-encoding", "content-language", "content-length",
               "content-range", "content-type", "etag", "last-modified", "set-cookie", "transfer-encoding"}
"""What nobody adds to a replay: it would be wrong of its body, or is of one visit."""


class IdempotencyMiddleware:
    def __init__(self, app: App, idempotency: Idempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        if idempotency.core.shell.asynchronous:
            raise TypeError("WSGI wants an Idempotency")
        self.app = app
        self._client = idempotency
        self._routes = Routes(routes)
        self._failed: Callable[[Environ, StartResponse, Exception], Iterable[bytes]] | None = None
        """What answers an error of the transaction, which the application has not seen."""
        self._within: Callable[[Environ], AbstractContextManager[object]] = lambda environ: nullcontext()
        """Where scopes are asked."""
        self._shows: Callable[[Environ, StartResponse, Answer], Iterable[bytes]] | None = None
        """How an answer goes out that is none of the application's: a replay or a refusal."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace")
        guard = self._routes.find(environ["REQUEST_METHOD"], path)
        if guard is None:
            return self.app(environ, start_response)
        body = _body(environ)
        if body is None:                    # hung up before it was whole
            start_response("400 Bad Request", [("Content-Length", "0")])
            return [b""]
        request = Request(environ["REQUEST_METHOD"], _path(environ), _headers(environ), body, environ=environ)
        asked = guard.scope

        def scope(request: Request) -> Any:
            with self._within({**environ, "wsgi.input": io.BytesIO(request.body)}):
                return asked(request)

        guard = replace(guard, scope=scope)
        runs: list[_Run] = []

        def once(access: Access) -> Answer:
            if runs:
                runs[-1].end(access.error)
                runs[-1].close()
            runs.append(_Run())
            return runs[-1].captured(self.app, environ, request, access)

        try:
            answer = run(guarded(self._client, guard, request, once))
        except BaseException as error:
            if runs:
                runs[-1].end(error)
                runs[-1].close()
            if self._failed is None or not isinstance(error, Exception) or runs and error is runs[-1].escaped:
                raise
            return self._failed({**environ, "wsgi.input": io.BytesIO(body)}, start_response, error)
        if self._shows is not None and not (runs and runs[-1].answer is answer):
            if runs:
                runs[-1].end(None)
                runs[-1].close()
            return self._shows({**environ, "wsgi.input": io.BytesIO(body)}, start_response, answer)
        start_response(_status(answer.status), list(answer.headers))
        if not runs:
            return [_sent(environ, answer)]
        runs[-1].end(None)
        return _Body(_sent(environ, answer), runs[-1].close)


def _status(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def _sent(environ: Environ, answer: Answer) -> bytes:
    return b"" if environ["REQUEST_METHOD"] == "HEAD" else answer.body


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


class _Body(list[bytes]):
    """What goes out, and then what the application does behind it."""

    def __init__(self, body: bytes, close: Callable[[], None]) -> None:
        super().__init__([body])
        self.close = close


@dataclass
class _Shown:
    """A replay or a refusal, on its way through the application."""

    answer: Answer
    got_there: bool = False
    """Nothing has refused the request before its handler."""

    def headers(self, found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Its own, and what the application adds to all answers."""
        own = {name.lower() for name, _ in self.answer.headers} | OF_THE_BODY
        return [*self.answer.headers, *((name, text) for name, text in found if name.lower() not in own)]


class _Run:
    """The application, once.  What it does behind its response waits for the
    end of the transaction: its iterable's close(), and the teardown of Flask's
    contexts, which Flask lets others hold for longer."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.escaped: BaseException | None = None
        self.unhandled: BaseException | None = None
        """What Flask has made a 500 of."""
        self._contexts = ExitStack()
        self._closes: Callable[[], object] | None = None

    def captured(self, app: App, environ: Environ, request: Request, access: Access) -> Answer:
        """Run the application, and keep what it answers."""
        start: list[Any] = []
        written: list[bytes] = []

        def start_response(status: str, headers: list[tuple[str, str]],
                           exc_info: Any = None) -> Callable[[bytes], None]:
            if exc_info:
                access.error = exc_info[1]
            start[:] = [int(status.split()[0]), list(headers)]
            return written.append

        others = environ.get(PRESERVE)

        def preserve(context: Any) -> None:
            self._contexts.enter_context(context)
            if others is not None:
                others(context)

        inner = {**environ, KEY: access, RUN: self, PRESERVE: preserve,
                 "wsgi.input": io.BytesIO(request.body), "CONTENT_LENGTH": str(len(request.body))}
        inner.pop("HTTP_TRANSFER_ENCODING", None)
        try:
            iterable = app(inner, start_response)
            self._closes = getattr(iterable, "close", None)
            if not isinstance(iterable, (list, tuple)) and not _whole(start):
                raise StreamingRefused(f"{request.method} {request.path.split('?')[0]} answers in pieces: a response "
                                       "that is to be stored has to be whole, with its length")
            pieces = written + list(iterable)
        except BaseException as error:
            self.escaped = error
            raise
        self.answer = Answer(start[0], start[1], b"".join(pieces))
        return self.answer

    def end(self, error: BaseException | None) -> None:
        """The transaction has ended."""
        error = self.unhandled or error
        self._contexts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def close(self) -> None:
        closes, self._closes = self._closes, None
        if closes is not None:
            closes()


def _whole(start: list[Any]) -> bool:
    return bool(start) and (start[0] in BODILESS or any(name.lower() == "content-length" for name, _ in start[1]))


class IdempotencyExtension:
    """The middleware around a Flask application, and g.idempotency in it."""

    def __init__(self, app: Any, idempotency: Idempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        from flask import g, request

        middleware = IdempotencyMiddleware(app.wsgi_app, idempotency, routes)
        handle, tear_down, dispatch = app.handle_user_exception, app.do_teardown_request, app.dispatch_request

        def put() -> None:
            if FAILED in request.environ:
                raise request.environ[FAILED]
            g.idempotency = request.environ.get(KEY)

        def caught(error: Exception) -> Any:
            access, run = request.environ.get(KEY), request.environ.get(RUN)
            if access is not None:
                access.error = error        # also where the application answers it: an error rolls back
            try:
                return handle(error)
            except Exception:
                if run is not None:
                    run.unhandled = error
                raise

        def failed(environ: Environ, start_response: StartResponse, error: Exception) -> Iterable[bytes]:
            """As if a handler had raised it."""
            return middleware.app({**environ, FAILED: error}, start_response)

        def within(environ: Environ) -> AbstractContextManager[object]:
            """With the session, and what else a context has."""
            context: AbstractContextManager[object] = app.request_context({**environ, SCOPE: True})
            return context

        def torn_down(*arguments: Any, **named: Any) -> None:
            """Once for each request, which the scope's context is not."""
            if SCOPE not in request.environ:
                tear_down(*arguments, **named)

        def shows(environ: Environ, start_response: StartResponse, answer: Answer) -> Iterable[bytes]:
            """As if a handler had returned it: before_request may refuse it, and after_request adds its headers."""
            shown = _Shown(answer)
            ours = False

            def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                nonlocal ours
                ours = shown.got_there and int(status.split()[0]) == answer.status
                return start_response(status, shown.headers(headers) if ours else headers, *more)

            found = middleware.app({**environ, SHOWN: shown}, start)
            return _Body(_sent(environ, answer), getattr(found, "close", lambda: None)) if ours else found

        def dispatched(*arguments: Any, **named: Any) -> Any:
            shown = request.environ.get(SHOWN)
            if shown is None:
                return dispatch(*arguments, **named)
            shown.got_there = True
            return app.response_class(shown.answer.body, shown.answer.status, list(shown.answer.headers))

        app.before_request_funcs.setdefault(None, []).insert(0, put)
        app.handle_user_exception = caught
        app.do_teardown_request = torn_down
        app.dispatch_request = dispatched
        middleware._failed, middleware._within, middleware._shows = failed, within, shows
        app.wsgi_app = middleware
