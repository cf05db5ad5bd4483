"""The layer around an application of ASGI: it hashes a body while the application reads it, and sends no success for
work that was rolled back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response

from .client import AsyncIdempotency, Defaults
from .http import GUARD, Answer, Exchange, check_routes

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
KEY = "pg_idempotency"


def install(app: Any, idempotency: AsyncIdempotency | Defaults) -> None:
    """Guards in the application, and in applications that are mounted in it, use this client."""
    if getattr(app, "middleware_stack", None) is not None:
        raise RuntimeError("the application is already running: call install() before the first request")
    build = app.build_middleware_stack
    check_routes(list(_endpoints(app.routes)))

    def built() -> App:
        check_routes(list(_endpoints(app.routes)))
        return IdempotencyMiddleware(build(), idempotency)

    app.build_middleware_stack = built


def _endpoints(routes: Sequence[Any]) -> Iterator[Any]:
    for route in routes:
        yield getattr(route, "endpoint", None)
        yield from _endpoints(getattr(route, "routes", None) or ())


class IdempotencyMiddleware:
    """The layer around an application of ASGI, the outermost one."""

    def __init__(self, app: App, idempotency: AsyncIdempotency | Defaults) -> None:
        if not idempotency.core.runtime.asynchronous:
            raise TypeError("an ASGI application needs an AsyncIdempotency")
        self.app = app
        self._client = idempotency

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or KEY in scope:
            if KEY in scope:                        # of an application that this one is mounted in
                scope[KEY].client = self._client
            await self.app(scope, receive, send)
            return
        lines = [text.decode("latin-1") for name, text in scope["headers"] if name.lower() == b"idempotency-key"]
        length = _header(scope, b"content-length")
        exchange = Exchange(self._client, scope["method"], _path(scope), lines, int(length) if length.isdecimal() else None,
                            _header(scope, b"content-type"), _header(scope, b"content-encoding") not in ("", "identity"))
        refused = False

        async def reading() -> Event:
            guard = getattr(scope.get("endpoint"), GUARD, None)
            if guard is not None and exchange.limit is None:        # FastAPI reads the body before the guard runs
                exchange.most_kept = max(exchange.most_kept, guard.max_request_size if exchange.may_have_form_key else 0)
            if guard is not None and exchange.limit is None and exchange.exceeds(guard):
                raise HTTPException(413, f"The body of this request is larger than {guard.max_request_size} bytes.")
            event = await receive()
            if event["type"] == "http.request":
                exchange.read(event.get("body", b""))
                exchange.whole = not event.get("more_body", False)
            return event

        async def sending(event: Event) -> None:
            nonlocal refused
            if event["type"] == "http.response.start":
                check_routes([scope.get("endpoint")])       # a route that was added since the start
            if event["type"] == "http.response.start" and exchange.refuses(event["status"]):
                refused = True
                await response_of(exchange.refusal(event["status"]))(scope, receive, send)
            elif not refused:
                await send(event)

        scope[KEY] = exchange
        await self.app(scope, reading, sending)


def response_of(answer: Answer, background: Any = None) -> Response:
    response = Response(status_code=answer.status, background=background)
    response.body = answer.body
    response.raw_headers = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in answer.headers]
    return response


def _header(scope: Mapping[str, Any], wanted: bytes) -> str:
    return next((text.decode("latin-1") for name, text in scope["headers"] if name.lower() == wanted), "")


def _path(scope: Mapping[str, Any]) -> str:
    """As it came in, with the query."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string") or b""
    return str((raw.split(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1"))
