"""The layer around an application of ASGI: it hashes a body while the application reads it, and sends no success for
work that was rolled back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
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
    check_routes(list(_endpoints(app)))

    def built() -> App:
        check_routes(list(_endpoints(app)))
        return IdempotencyMiddleware(build(), idempotency)

    app.build_middleware_stack = built
    app.user_middleware.append(Middleware(IdempotencyMiddleware, idempotency=idempotency))


def _endpoints(app: Any) -> Iterator[Any]:
    """The endpoints of the routes of an application, also behind layers, each of which has the next one as app."""
    queue, seen = [app], {}
    while queue:
        found = queue.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            yield getattr(found, "endpoint", None)
            routes = getattr(found, "routes", None)
            layer = getattr(found, "__dict__", {})          # original_router: of an included router in newer versions of FastAPI
            queue += routes if routes and isinstance(routes, (list, tuple)) else [layer.get("app"), layer.get("original_router")]


class IdempotencyMiddleware:
    """The layer around an application of ASGI, the outermost one.  The innermost one notes the scope in which the router
    leaves the endpoint, because middleware in between can copy the scope."""

    def __init__(self, app: App, idempotency: AsyncIdempotency | Defaults) -> None:
        if not idempotency.core.runtime.asynchronous:
            raise TypeError("an ASGI application needs an AsyncIdempotency")
        self.app = app
        self._client = idempotency

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or KEY in scope:
            if KEY in scope:                        # the innermost one, or of an application that is mounted
                scope[KEY].client, scope[KEY].scope = self._client, scope
            await self.app(scope, receive, send)
            return
        lines = [text.decode("latin-1") for name, text in scope["headers"] if name.lower() == b"idempotency-key"]
        length = _header(scope, b"content-length")
        exchange = Exchange(self._client, scope["method"], _path(scope), lines, int(length) if length.isdecimal() else None,
                            _header(scope, b"content-type"), _header(scope, b"content-encoding") not in ("", "identity"))
        refused = False

        async def reading() -> Event:
            guard = getattr(exchange.scope.get("endpoint"), GUARD, None)
            if guard is not None and exchange.limit is None:        # FastAPI reads the body before the guard runs
                exchange.keep(guard.max_request_size)
                if exchange.exceeds(guard):
                    raise HTTPException(413, f"The body of this request is larger than {guard.max_request_size} bytes.")
            event = await receive()
            if event["type"] == "http.request":
                exchange.read(event.get("body", b""))
                exchange.whole = not event.get("more_body", False)
            return event

        async def sending(event: Event) -> None:
            nonlocal refused
            if event["type"] == "http.response.start":
                check_routes([exchange.scope.get("endpoint")])       # a route that was added since the start
            if event["type"] == "http.response.start" and exchange.refuses(event["status"]):
                refused = True
                await response_of(exchange.refusal(event["status"]))(scope, receive, send)
            elif not refused:
                await send(event)

        scope[KEY], exchange.scope = exchange, scope
        try:
            await self.app(scope, reading, sending)
        finally:
            exchange.scope = {}                     # a cycle would keep the body until a garbage collection


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
