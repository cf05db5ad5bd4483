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


class IdempotencyMiddleware:
    def __init__(self, app: App, idempotency: AsyncIdempotency | Defaults, routes: Mapping[str, Guard]) -> None:
        if not idempotency.core.shell.asynchronous:
            raise TypeError("ASGI wants an AsyncIdempotency")
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
        request = Request(scope["method"], _path(scope), headers, body)

        async def run(access: Access) -> Answer:
            return await _captured(self.app, scope, request, access)

        answer = await guarded(self._client, guard, request, run)
        await send({"type": "http.response.start", "status": answer.status,
                    "headers": [(name.lower().encode("latin-1"), text.encode("latin-1"))
                                for name, text in answer.headers]})
        await send({"type": "http.response.body", "body": answer.body})


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


async def _captured(app: App, scope: Scope, request: Request, access: Access) -> Answer:
    """Run the application, and keep what it sends."""
    asked = False
    start: Event = {}
    pieces: list[bytes] = []
    refused: list[StreamingRefused] = []

    async def receive() -> Event:
        nonlocal asked
        if asked:
            # The client may have hung up, but the handler goes on.
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(event: Event) -> None:
        if event["type"] == "http.response.start":
            start.update(event)
        elif event["type"] == "http.response.body":
            names = {name.lower() for name, _ in start["headers"]}
            if event.get("more_body", False) and b"content-length" not in names:
                refused.append(StreamingRefused(
                    f"{request.method} {request.path.split('?')[0]} answers in pieces: a response that is to be "
                    "stored has to be whole, with its length"))
                raise refused[0]
            pieces.append(event.get("body", b""))

    inner = {**scope, "idempotency": access,
             "state": {**scope.get("state", {}), "idempotency": access if access.scope else None}}
    try:
        await app(inner, receive, send)
    except Exception:
        if refused:
            raise refused[0] from None
        raise
    if refused:
        raise refused[0]
    if not start:
        raise RuntimeError("the application has sent no response")
    headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in start.get("headers", [])]
    return Answer(start["status"], headers, b"".join(pieces))
