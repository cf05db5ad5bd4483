"""
Flask: a decorator for views, and the layer around the application.

	@app.post("/payments")
	@login_required
	@Guard(scope=lambda request: current_user.id)
	def pay(): ...

	install(app, idempotency)

The guard runs at the view that the router has chosen, behind before_request and the decorators above it, for a replay, too.
The view finds its transaction as flask.g.idempotency.tx.  It runs to its end, also where the client has hung up: its work
is committed, and the response is there for the retry.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

from flask import abort, g, request
from flask.globals import request_ctx

from . import http
from .client import Defaults, Idempotency
from .http import BODILESS, Access, Answer, Exchange, check_routes, guarded, no_layer, rewind
from .runtimes import run
from .wsgi import PIECE, Input, exchange_of, forget_range

__all__ = ["Access", "Guard", "IdempotencyMiddleware", "install"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
View = TypeVar("View", bound=Callable[..., Any])
KEY = "pg_idempotency"


def install(app: Any, idempotency: Idempotency | Defaults) -> None:
    """Guards of the application's views use this client."""
    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, idempotency, app.view_functions)


class IdempotencyMiddleware:
    """The layer around an application of WSGI, the outermost one."""

    def __init__(self, app: App, idempotency: Idempotency | Defaults, views: Mapping[str, Any]) -> None:
        if idempotency.core.runtime.asynchronous:
            raise TypeError("a WSGI application needs an Idempotency, not an AsyncIdempotency")
        self.app = app
        self._client = idempotency
        self._views = views
        self._checked = False

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._checked:                       # there is no later view than at the first request
            check_routes(list(self._views.values()))
            self._checked = True
        if KEY in environ:                          # of an application that this one is mounted in
            environ[KEY].client = self._client
            return self.app(environ, start_response)
        exchange = exchange_of(self._client, environ, _path(environ))
        refused: list[bytes] = []
        is_started = False

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            nonlocal is_started
            is_started = True
            if not exchange.refuses(int(status.split()[0])):
                return start_response(status, headers, *more)
            answer = exchange.refusal(int(status.split()[0]))
            refused[:] = [answer.body]
            start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", list(answer.headers))
            return lambda data: None                # do not send what the application writes

        environ[KEY], environ["wsgi.input"] = exchange, Input(environ["wsgi.input"], exchange)
        found = self.app(environ, start)
        return _Answered(refused, found) if refused or not is_started else found


class _Answered:
    """What an application sends, or the body of the refusal that replaces it.  A generator starts its response late."""

    def __init__(self, refused: list[bytes], found: Iterable[bytes]) -> None:
        self._refused, self._found = refused, found
        self.close = getattr(found, "close", lambda: None)

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._found if not self._refused else ():
            if self._refused:
                break
            yield piece
        yield from self._refused


class Guard(http.Guard):
    """A decorator of a view; the last one above the function."""

    def __call__(self, view: View) -> View:
        self.check_endpoint(view)

        @functools.wraps(view)
        def called(*arguments: Any, **named: Any) -> Any:
            context = request_ctx._get_current_object()         # type: ignore[attr-defined]
            exchange = context.request.environ.get(KEY)
            if exchange is None:
                raise no_layer("install(app, idempotency)")
            if not self.guards(context.request.method):
                return context.app.ensure_sync(view)(*arguments, **named)
            return _guarded(self, exchange, context, view, arguments, named)

        return called                               # type: ignore[return-value]


def _guarded(guard: Guard, exchange: Exchange, context: Any, view: Callable[..., Any], arguments: Sequence[Any],
             named: Mapping[str, Any]) -> Any:
    app, native, after_request = context.app, context.request, context._after_request_functions
    before = len(after_request)
    forget_range(native.environ)
    for name in ("range", "if_range", "if_none_match", "if_modified_since"):
        native.__dict__.pop(name, None)             # made of environ, and kept
    last: list[Any] = []

    def attempt(access: Access, tries: int) -> Answer:
        _rewind(native, tries > 1)
        del after_request[before:]
        while last:
            last.pop().close()
        g.idempotency = access
        response = app.make_response(app.ensure_sync(view)(*arguments, **named))
        if response.is_streamed and response.content_length is None and response.status_code not in BODILESS:
            raise exchange.streaming_refused()
        response.direct_passthrough = False
        body = response.get_data()
        last.append(response)
        return Answer(response.status_code, list(response.headers), body, response)

    answer = run(guarded(exchange, guard, request, lambda: guard.ask_scope(request, named), lambda: _read(native, exchange), attempt))
    return _response(app, answer) if answer.native is None else answer.native


def _read(request: Any, exchange: Exchange) -> None:
    """Unless it was read before, and a form made of it."""
    length = request.content_length
    if request.max_content_length is not None:
        exchange.limit_body(min(request.max_content_length, exchange.limit or 0))
    request.get_data()
    if exchange.size < length if length is not None else request.environ.get("wsgi.input_terminated"):
        source = request.environ["wsgi.input"]      # behind the end of the form
        while source.read(PIECE if length is None else min(PIECE, length - exchange.size)):
            pass
    if length is not None and exchange.size < length:
        abort(400)
    exchange.whole = True


def _rewind(request: Any, again: bool) -> None:
    """A try reads the body from its beginning, and not what an earlier one has made of it."""
    found: dict[str, Any] = request.__dict__
    if again:
        found.pop("_cached_json", None)
    if "_cached_data" in found:
        found["stream"] = io.BytesIO(found["_cached_data"])
    for _, part in found["files"].items(multi=True) if "files" in found else ():
        rewind(part)


def _response(app: Any, answer: Answer) -> Any:
    response = app.response_class(answer.body, answer.status, list(answer.headers))
    if "content-type" not in {name.lower() for name, _ in answer.headers}:
        response.headers.pop("Content-Type", None)
    return response


def _path(environ: Environ) -> str:
    """As it came in, with the query, if the server passes it on."""
    for name in ("RAW_URI", "REQUEST_URI"):
        if str(environ.get(name, "")).startswith("/"):
            return f"{environ[name]}"
    path: str = quote((environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1"))
    query: str = environ.get("QUERY_STRING") or ""
    return f"{path}?{query}" if query else path
