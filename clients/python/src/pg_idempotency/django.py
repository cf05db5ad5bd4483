"""
Django: a middleware, a decorator for views, and requests and jobs on its own connection.

	MIDDLEWARE = ["pg_idempotency.django.IdempotencyMiddleware", ...]		# the first one
	PG_IDEMPOTENCY = {"using": "default"}		# and options of Idempotency

	@login_required
	@Guard(scope=lambda request: request.user.get_username())
	def pay(request): ...

The view's models write in the transaction of the claim; transaction.atomic() in it is a savepoint, and on_commit() runs after COMMIT.
The guard runs behind the decorators above it and, in REST framework, behind authentication and permissions, for a replay, too.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import BadRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse

from . import http
from .client import Idempotency
from .django_orm import Django
from .http import Access, Answer, Exchange, guarded, no_layer, rewind, warn_of_decorators
from .runtimes import run
from .wsgi import PIECE, Input, exchange_of, forget_range

__all__ = ["Access", "Django", "Guard", "IdempotencyMiddleware", "client"]

View = TypeVar("View", bound=Callable[..., Any])
KEY = "_pg_idempotency"
DISPATCH = re.compile(r"[^>]\.dispatch$")
"""The method of a class, and not a function in another."""
REST_FRAMEWORK = "the guard would run before the authentication of REST framework: write it above a method, or below @api_view"


@functools.lru_cache(maxsize=None)
def client() -> Idempotency:
    """The client of settings.PG_IDEMPOTENCY."""
    options = dict(getattr(settings, "PG_IDEMPOTENCY", {}))
    return Idempotency(Django(options.pop("using", "default")), **options)


class IdempotencyMiddleware:
    """The first in settings.MIDDLEWARE."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._client = client()

    def __call__(self, request: Any) -> Any:
        exchange = exchange_of(self._client, request.META, request.get_full_path())
        if hasattr(request, "_body"):
            exchange.read(request.body)
        request._stream = Input(request._stream, exchange)
        setattr(request, KEY, exchange)
        response = self.get_response(request)
        if not exchange.refuses(response.status_code):
            return response
        refusal = _response(exchange.refusal(response.status_code))
        refusal._resource_closers += response._resource_closers
        return refusal


class Guard(http.Guard):
    """A decorator of a view; the last one above the function.  For a class, method_decorator(Guard(...), name="post")."""

    def __call__(self, view: View) -> View:
        if not callable(view) or inspect.isclass(view):
            raise TypeError(f"a guard must be above a function, not above {view!r}")
        if inspect.iscoroutinefunction(view):
            raise TypeError("Django's transactions are synchronous: a view with a guard must not be a coroutine function")
        if hasattr(view, "cls"):
            raise TypeError(REST_FRAMEWORK)
        if hasattr(view, "view_class") or DISPATCH.search(getattr(getattr(view, "func", view), "__qualname__", "")):
            raise TypeError("the guard would run before what the class checks in dispatch(), such as LoginRequiredMixin: write "
                            '@method_decorator(Guard(...), name="post") above the class')
        if not isinstance(view, functools.partial):         # method_decorator's
            warn_of_decorators(view)

        @functools.wraps(view)
        def called(*arguments: Any, **named: Any) -> Any:
            # REST framework's request is a wrapper.
            request = next(one for one in (*arguments, *named.values()) if isinstance(_native(one), HttpRequest))
            exchange = getattr(_native(request), KEY, None)
            if exchange is None:
                raise no_layer("IdempotencyMiddleware in settings.MIDDLEWARE")
            if request is _native(request) and hasattr(getattr(request.resolver_match, "func", None), "cls"):
                raise RuntimeError(REST_FRAMEWORK)
            if not self.guards(request.method):
                return view(*arguments, **named)
            _refuse_atomic_requests(request, exchange)
            return _guarded(self, exchange, request, view, arguments, named)

        return transaction.non_atomic_requests(using=client().core.servers.source.using)(called)   # type: ignore


def _native(request: Any) -> Any:
    return getattr(request, "_request", request)


def _refuse_atomic_requests(request: Any, exchange: Exchange) -> None:
    """Of other databases: their transaction would be around all tries of the view, and end after the response was stored."""
    own = exchange.client.core.servers.source.using
    for alias in connections if request.resolver_match else ():
        if alias != own and connections[alias].settings_dict["ATOMIC_REQUESTS"] and \
                alias not in getattr(request.resolver_match.func, "_non_atomic_requests", ()):
            raise RuntimeError(f"ATOMIC_REQUESTS of the database {alias!r} would commit apart from the response: add "
                               f"transaction.non_atomic_requests(using={alias!r}) to the view")


def _guarded(guard: Guard, exchange: Exchange, request: Any, view: Callable[..., Any], arguments: Sequence[Any],
             named: Mapping[str, Any]) -> Any:
    forget_range(_native(request).META)
    _native(request).__dict__.pop("headers", None)          # which are made of META

    def attempt(access: Access, tries: int) -> Answer:
        if tries > 1:
            if hasattr(_native(request), "_body"):
                _native(request)._stream = BytesIO(_native(request)._body)
                if hasattr(request, "_full_data"):          # REST framework's, which parses it again
                    from rest_framework.request import Empty
                    request._stream = request._data = request._files = request._full_data = Empty
            for _, files in _native(request).FILES.lists() if hasattr(_native(request), "_files") else ():
                for part in files:
                    rewind(part)
        request.idempotency = access
        return _whole(request, view(*arguments, **named), exchange)

    answer = run(guarded(exchange, guard, request, lambda: guard.ask_scope(request, named),
                         lambda: _read(_native(request), exchange), attempt))
    return _response(answer) if answer.native is None else answer.native


def _read(request: Any, exchange: Exchange) -> None:
    """Unless it was read before, and a form made of it."""
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if not request._read_started and request.content_type == "multipart/form-data" and limit is not None and exchange.length > limit:
        request.POST                                # Django keeps no larger body in memory
    if not request._read_started:
        request.body
    if not hasattr(request, "_body"):
        while request.read(PIECE):
            pass
    if exchange.size < exchange.length:
        raise BadRequest("the body is incomplete")
    exchange.whole = True


def _whole(request: Any, response: Any, exchange: Exchange) -> Answer:
    """The view's response, rendered within the transaction."""
    if view := getattr(request, "parser_context", {}).get("view"):
        response = view.finalize_response(request, response, *view.args, **view.kwargs)
    if callable(getattr(response, "render", None)):
        response = response.render()
    if response.streaming:
        if not response.has_header("Content-Length"):
            raise exchange.streaming_refused()
        body = b"".join(response.streaming_content)
        response.streaming_content = [body]
    else:
        body = response.content
    exchange.check_length(response.status_code, response.get("Content-Length"), body)
    return Answer(response.status_code, list(response.items()), body, response)


def _response(answer: Answer) -> Any:
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]
    for name, text in answer.headers:
        response[name] = f"{response[name]}, {text}" if response.has_header(name) else text
    return response
