"""
Starlette: a decorator for endpoints, and the layer around the application.

	@requires("authenticated")
	@Guard(scope=lambda request: request.user.username)
	async def pay(request): ...

	install(app, idempotency)

The guard runs at the endpoint that the router has chosen, behind the application's middleware and the decorators above it,
for a replay, too.  The handler finds its transaction as request.state.idempotency.tx.  It runs to its end, also where the
client has hung up: its work is committed, and the response is there for the retry.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from . import http
from .asgi import KEY, Event, IdempotencyMiddleware, install, response_of
from .http import GUARD, Access, Answer, Exchange, guarded, no_layer, rewind

__all__ = ["Access", "Guard", "IdempotencyMiddleware", "install"]

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
ABANDON = "abandon_on_cancel" if "abandon_on_cancel" in inspect.signature(anyio.to_thread.run_sync).parameters else "cancellable"


class Guard(http.Guard):
    """A decorator of an endpoint; the last one above the function."""

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        self.check_endpoint(endpoint)

        @functools.wraps(endpoint)
        async def called(*arguments: Any, **named: Any) -> Any:
            request = next((one for one in (*arguments, *named.values()) if isinstance(one, Request)), None)
            exchange = None if request is None else request.scope.get(KEY)
            if request is None or exchange is None:
                raise no_layer("install(app, idempotency)")
            if not self.guards(request.method):
                return await call(endpoint, *arguments, **self._own(named))
            return await _guarded(self, exchange, request, named, self._attempt(called, request, endpoint, arguments, named))

        called.__dict__[GUARD] = self
        return called                               # type: ignore[return-value]

    def _own(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments that the endpoint has asked for."""
        return named

    def _attempt(self, called: Any, request: Request, endpoint: Callable[..., Any], arguments: Sequence[Any],
                 named: Mapping[str, Any]) -> Callable[[Request, int], Awaitable[Any]]:
        """The function that runs the endpoint with a request, and the number of the try."""
        async def attempt(request: Request, tries: int) -> Any:
            def own(one: Any) -> Any:
                return request if isinstance(one, Request) else one

            return await call(endpoint, *map(own, arguments), **{name: own(one) for name, one in named.items()})

        return attempt


async def _guarded(guard: Guard, exchange: Exchange, request: Request, named: Mapping[str, Any],
                   attempt: Callable[[Request, int], Awaitable[Any]]) -> Response:
    async def run(access: Access, tries: int) -> Answer:
        again = request if tries == 1 else await _again(request)
        again.state.idempotency = access
        return await _whole(await attempt(again, tries), again, exchange)

    async def read() -> None:
        """Unless FastAPI has, which may have made a form of it."""
        try:
            if not exchange.whole:
                await request.body()
        except ClientDisconnect:
            raise HTTPException(400, "the body is incomplete") from None

    answer = await guarded(exchange, guard, request, lambda: guard.ask_scope(request, named), read, run)
    return answer.native if isinstance(answer.native, Response) else response_of(answer)


async def _again(request: Request) -> Request:
    """The request for another try, as the first one got it."""
    fresh = type(request)(request.scope, request.receive)
    if hasattr(request, "_body"):
        fresh._body = request._body
    elif form := getattr(request, "_form", None):
        fresh._form = form
        for _, part in form.multi_items():
            if not isinstance(part, str):
                rewind(part.file)
    return fresh


async def call(endpoint: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if inspect.iscoroutinefunction(endpoint):
        return await endpoint(*arguments, **named)
    # A timeout leaves the thread to itself, and the transaction is over for it.
    bound = functools.partial(endpoint, *arguments, **named)
    return await anyio.to_thread.run_sync(bound, **{ABANDON: True})      # type: ignore[arg-type]


async def _whole(response: Any, request: Request, exchange: Exchange) -> Answer:
    """The response of an endpoint, collected, and a response that sends it later, with the background tasks."""
    start: Event = {}
    pieces: list[bytes] = []
    refused: Exception | None = None
    is_whole = False

    async def receive() -> Event:
        return await asyncio.Event().wait()         # type: ignore[return-value]

    async def send(event: Event) -> None:
        nonlocal refused, is_whole
        if is_whole or start and event["type"] == "http.response.start":
            raise RuntimeError("the endpoint sends a second response")
        if event["type"] == "http.response.start":
            start.update(event)
            return
        if event["type"] != "http.response.body":
            raise RuntimeError(f"{event['type']} cannot be stored: a response consists of its head and its body")
        is_whole = not event.get("more_body", False)
        if event.get("more_body", False) and b"content-length" not in {name.lower() for name, _ in start["headers"]}:
            refused = exchange.streaming_refused()
            raise refused
        pieces.append(event.get("body", b""))

    background, response.background = getattr(response, "background", None), None
    # Extensions that cannot be stored are not offered: files by name, trailers, push.
    extensions = {name: found for name, found in (request.scope.get("extensions") or {}).items() if not name.startswith("http.response.")}
    # The whole file is stored, and not the range of the first request.
    headers = [one for one in request.scope["headers"] if one[0].lower() not in (b"range", b"if-range")]
    try:
        await response({**request.scope, "headers": headers, "extensions": extensions}, receive, send)
    except Exception:
        if refused is None:
            raise
        raise refused from None
    if not is_whole:
        raise RuntimeError("the endpoint's response has not been sent to its end")
    headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in start["headers"]]
    answer = Answer(start["status"], headers, b"".join(pieces))
    exchange.check_length(answer.status, {name.lower(): text for name, text in headers}.get("content-length"), answer.body)
    return Answer(answer.status, headers, answer.body, response_of(answer, background))
