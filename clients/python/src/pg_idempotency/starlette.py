"""
The middleware for ASGI: Starlette, FastAPI and any other.

	app.add_middleware(IdempotencyMiddleware, idempotency=idem,
	                   routes={"POST /payments": Guard(scope=user)})

The handler finds its transaction as request.state.idempotency.tx.  It runs
to its end, also where the client has hung up: what it has done is committed,
and the response is there for the retry.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote

from .client import AsyncIdempotency, Defaults
from .http import Access, Answer, Guard, Request, Routes, StreamingRefused, guarded

__all__ = ["Access", "Guard", "IdempotencyMiddleware", "Request"]

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
GRACE = 0.5
"""How many seconds an application has to end that was cancelled."""


class IdempotencyMiddleware:
    def __init__(self, app: App, idempotency: AsyncIdempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        if not idempotency.core.shell.asynchronous:
            raise TypeError("ASGI wants an AsyncIdempotency")
        if _inner_base_middleware(app):
            warnings.warn("Starlette's BaseHTTPMiddleware, which is @app.middleware(\"http\"), lies inside of "
                          "IdempotencyMiddleware, and runs background tasks before COMMIT: add IdempotencyMiddleware "
                          "first, so that it lies inside", stacklevel=2)
        self.app = app
        self._client = idempotency
        self._routes = Routes(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard = self._routes.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if guard is None:
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return                          # hung up before it was whole
        headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"]]
        request = Request(scope["method"], _path(scope), headers, body, scope=scope)

        runs: list[_Run] = []

        async def run(access: Access) -> Answer:
            if runs:
                await runs[-1].cancel()
            runs.append(_Run(self.app, scope, request, access))
            return await runs[-1].whole()

        try:
            answer = await guarded(self._client, guard, request, run)
        except BaseException as error:
            if runs:
                await runs[-1].cancel()
            elif isinstance(error, Exception) and await _handled(scope, error, send):
                return
            raise
        if runs and runs[-1].answer is not answer:
            await runs[-1].cancel()
        await send({"type": "http.response.start", "status": answer.status,
                    "headers": [(name.lower().encode("latin-1"), text.encode("latin-1"))
                                for name, text in answer.headers]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})
        if runs and runs[-1].answer is answer:
            await runs[-1].go_on()


def _inner_base_middleware(app: Any) -> bool:
    """Whether one lies inside; what it has inside of it, in a task of its own, tells then what was raised there."""
    found = False
    while app is not None:
        if any(f"{base.__module__}.{base.__name__}" == "starlette.middleware.base.BaseHTTPMiddleware"
               for base in type(app).__mro__):
            found = True
            if not isinstance(app.app, _Telling):
                app.app = _Telling(app.app)
        app = getattr(app, "app", None)
    return found


def _handling() -> Exception | None:
    """The error that whoever calls is in an except block of."""
    found = sys.exc_info()[1]
    return found if isinstance(found, Exception) else None


class _Telling:
    """Notes the error that an answer is made of, where that is sent."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(event: Event) -> None:
            access = scope.get("idempotency")
            if isinstance(access, Access):
                access.error = access.error or _handling()
            await send(event)

        await self.app(scope, receive, telling)


async def _handled(scope: Scope, error: Exception, send: Send) -> bool:
    """Whether the application has answered an error that came before it, as one of its handlers'."""
    handlers = getattr(scope.get("app"), "exception_handlers", None)
    if not isinstance(handlers, Mapping):
        return False
    from starlette.middleware.exceptions import ExceptionMiddleware

    async def raises(*_: Any) -> None:
        raise error

    async def receive() -> Event:
        return {"type": "http.disconnect"}

    try:
        # Those two are ServerErrorMiddleware's, which lies outside.
        await ExceptionMiddleware(raises, {kind: handler for kind, handler in handlers.items()
                                           if kind not in (500, Exception)})(scope, receive, send)
    except Exception as found:
        if found is error:
            return False
        raise
    return True


def _path(scope: Scope) -> str:
    """As it came in, with the query."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string") or b""
    return str((raw.split(b"?")[0] + (b"?" + query if query else b"")).decode("latin-1"))


async def _body(receive: Receive) -> bytes | None:
    pieces = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            return None
        pieces.append(event.get("body", b""))
        if not event.get("more_body", False):
            return b"".join(pieces)


class _Run:
    """The application in a task of its own.  What it sends is kept.  After the
    last piece it is held until COMMIT or ROLLBACK; then it goes on, with what it
    does behind its response."""

    def __init__(self, app: App, scope: Scope, request: Request, access: Access) -> None:
        self.answer: Answer | None = None
        self._request, self._access = request, access
        self._asked = False
        self._start: Event = {}
        self._pieces: list[bytes] = []
        self._refused: StreamingRefused | None = None
        self._ended, self._sent = asyncio.Event(), asyncio.Event()
        # What is not kept is not offered: files by name, trailers, push.
        extensions = {name: found for name, found in (scope.get("extensions") or {}).items()
                      if not name.startswith("http.response.")}
        inner = {**scope, "idempotency": access, "extensions": extensions,
                 "state": {**scope.get("state", {}), "idempotency": access}}
        self._task = asyncio.ensure_future(app(inner, self._receive, self._send))

    async def _receive(self) -> Event:
        if self._asked:
            # The client may have hung up, but the handler goes on.
            await self._sent.wait()
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request", "body": self._request.body, "more_body": False}

    async def _send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self._start.update(event)
            return
        if event["type"] != "http.response.body":
            raise RuntimeError(f"{event['type']} cannot be stored: a response is its head and its body")
        more = event.get("more_body", False)
        if more and b"content-length" not in {name.lower() for name, _ in self._start.get("headers", [])}:
            self._refused = StreamingRefused(
                f"{self._request.method} {self._request.path.split('?')[0]} answers in pieces: a response that is to "
                "be stored has to be whole, with its length")
            raise self._refused
        self._pieces.append(event.get("body", b""))
        if not more:
            # What an error was made into is sent where that was caught.
            self._access.error = self._access.error or _handling()
            self._ended.set()
            await self._sent.wait()

    async def whole(self) -> Answer:
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({self._task, ended}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.cancel()
            raise
        finally:
            ended.cancel()
        if self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            if self._refused and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise self._refused from None
            self._task.result()
        if not self._start:
            raise RuntimeError("the application has sent no response")
        headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in self._start.get("headers", [])]
        self.answer = Answer(self._start["status"], headers, b"".join(self._pieces))
        return self.answer

    async def go_on(self) -> None:
        """The response is out."""
        self._sent.set()
        await self._task

    async def cancel(self) -> None:
        """Its transaction was not committed.  What cannot be cancelled, as a
        thread, is left to itself."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=GRACE)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
