"""
FastAPI: a decorator for endpoints, and the layer around the application.

	@app.post("/payments")
	@Guard(scope=lambda request, user: user.id)
	async def pay(request: Request, payment: Payment, user: User = Depends(login)): ...

	install(app, idempotency)

As in Starlette.  The guard runs behind all dependencies, which have refused what they refuse, for a replay, too.  FastAPI's
own code makes the response of what the endpoint returns, within the transaction.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_type_hints

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.background import BackgroundTasks
from starlette.requests import Request
from starlette.responses import Response

from . import starlette
from .handlers import leads_to
from .starlette import Access, Endpoint, IdempotencyMiddleware, call, install

__all__ = ["Access", "Guard", "IdempotencyMiddleware", "install"]

REQUEST, RESPONSE, BACKGROUND = "pg_idempotency_request", "pg_idempotency_response", "pg_idempotency_background"
ASKED = {REQUEST: Request, RESPONSE: Response, BACKGROUND: BackgroundTasks}
"""A guard needs these, and asks FastAPI for them if the endpoint does not."""


class Guard(starlette.Guard):
    """A decorator of an endpoint; the last one above the function."""

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        called = super().__call__(endpoint)
        setattr(called, "__signature__", _signature(endpoint))
        own = inspect.signature(endpoint).parameters
        for one in list(inspect.signature(self.scope).parameters.values())[1:]:
            if one.name not in own and one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                raise TypeError(f"scope asks for {one.name!r}, which is no argument of {endpoint.__qualname__}")
        return called

    def _own(self, named: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: one for name, one in named.items() if name not in ASKED}

    def _attempt(self, called: Any, request: Request, endpoint: Callable[..., Any], arguments: Sequence[Any],
                 named: Mapping[str, Any]) -> Callable[[Request, int], Awaitable[Any]]:
        route: Any = request.scope.get("route")
        if not isinstance(route, APIRoute) or not leads_to(route.endpoint, called):
            raise RuntimeError(f"{called.__qualname__} has a guard for FastAPI, but is not the endpoint of its route")
        # Newer ones merge the options of include_router() into another object.
        merged = request.scope.get("fastapi", {}).get("effective_route_context")
        if merged is not None and merged.original_route is route:
            route = merged
        names = _names(inspect.signature(called))
        outer: Response = named[names[RESPONSE]]

        async def attempt(request: Request, tries: int) -> Any:
            async def with_arguments(**fresh: Any) -> Any:
                # A dependency may have set these for the response.
                fresh[names[RESPONSE]].status_code = outer.status_code
                fresh[names[RESPONSE]].headers.raw.extend(outer.headers.raw)
                return await call(endpoint, *arguments, **self._own({**named, **fresh}))

            inner = copy.copy(route)
            fields: Any = getattr(route.dependant, "__slots__", None) or vars(route.dependant)      # newer ones have slots
            kept = {name: getattr(route.dependant, name) for name in fields if name.endswith("_param_name")}
            if tries == 1 or not hasattr(request, "_body"):
                inner.body_field = None             # the arguments are there, and a form's can be read again
            else:                                   # the first try may have changed them
                kept |= {name: getattr(route.dependant, name) for name in fields if name.endswith("_params")}
            inner.dependant = Dependant(call=with_arguments, path=route.dependant.path, **kept)
            response = await APIRoute.get_route_handler(inner)(request)
            if isinstance(response.background, BackgroundTasks):
                response.background.tasks[:0] = named[names[BACKGROUND]].tasks
            return response

        return attempt


def _signature(endpoint: Callable[..., Any]) -> inspect.Signature:
    """The signature for FastAPI: the endpoint's, with all of ASKED."""
    signature, hints = inspect.signature(endpoint), {}
    with suppress(Exception):                       # of names that are not there yet
        hints = get_type_hints(endpoint, include_extras=True)
    signature = signature.replace(
        parameters=[one.replace(annotation=hints.get(one.name, one.annotation)) for one in signature.parameters.values()],
        return_annotation=hints.get("return", signature.return_annotation))
    names = _names(signature)
    return signature.replace(parameters=[
        *signature.parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in ASKED.items()
          if name not in names)])


def _names(signature: inspect.Signature) -> dict[str, str]:
    """The names of the endpoint's arguments that are ASKED."""
    return {asked: one.name for one in signature.parameters.values() for asked, kind in ASKED.items()
            if isinstance(one.annotation, type) and issubclass(one.annotation, kind)}
