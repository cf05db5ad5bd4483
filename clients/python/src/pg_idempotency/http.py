"""
The Idempotency-Key header, for any framework.

guard() takes a request whose body has been read, and a function that runs the
application, and returns what goes out.  What it answers is on the page
docs/http.md of the extension.  ASGI and WSGI are shells around it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import Defaults, refuse_no_ttl
from .core import Response, Result, problem, stores
from .errors import (ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyInvalid, KeyReused,
                     RateLimited, ScopeMoving, TimedOut)
from .functions import Interval
from .shells import value

STORED_HEADERS = ("Content-Type", "Content-Encoding", "Content-Language", "Content-Disposition", "Location", "ETag",
                  "Link", "Vary")
NEVER_STORED = {"set-cookie"}
BODILESS = {204, 304}
# A string of RFC 8941; without quotes, what can be taken for nothing else.
QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
# What takes several segments: Flask's <path:x>, Starlette's {x:path}.
PATH = re.compile(r"^<path(\(.*\))?:|:path\}$")
BARE = re.compile(r"[!#-+\--:<-~]+")


class StreamingRefused(IdempotencyError):
    """The handler writes its response in pieces, of which none can be stored."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the query, as it came in."""
    headers: Sequence[tuple[str, str]]
    body: bytes
    scope: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """ASGI's, with what the middleware around this one has put there: the user, the session."""
    environ: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """WSGI's."""

    def all(self, name: str) -> list[str]:
        return [v for n, v in self.headers if n.lower() == name.lower()]

    def header(self, name: str) -> str | None:
        found = self.all(name)
        return found[0] if found else None


@dataclass(frozen=True)
class Answer:
    """What goes out."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class Guard:
    """How a route is guarded.

    scope says who the key belongs to: the user that is logged in; of ASGI it may
    be a coroutine.  None and "" are errors.  What it raises is answered by the
    framework.  job makes it a job instead of one transaction.
    """

    scope: Callable[[Request], str | None | Awaitable[str | None]]
    required: bool = True
    job: bool = False
    wait: Interval = None
    wait_ms: float | None = None
    ttl: Interval = None
    lease: Interval = None
    lease_ms: float | None = None
    timeout: Interval = None
    timeout_ms: float | None = None
    conflict_status: int = 422
    headers: Collection[str] = STORED_HEADERS
    max_response_size: int | None = None
    store: Callable[[int], bool] = stores
    strict: bool = False
    """Only keys in quotes."""

    def __post_init__(self) -> None:
        refuse_no_ttl(self.ttl)


@dataclass
class Access:
    """What a guarded handler finds: tx, the connection of its transaction, or
    job in a route that is one; key, which is None where none is required."""

    scope: str
    key: str | None
    tx: Any = None
    job: Any = None
    error: BaseException | None = field(default=None, repr=False)
    """What the handler has raised, where the framework has made an answer of it."""


class Routes:
    """Guards by "METHOD /path"; {…} or <…> in a path stands for one segment."""

    def __init__(self, routes: Mapping[str, Guard]) -> None:
        self._routes = [(*self._split(route), guard) for route, guard in routes.items()]

    @staticmethod
    def _split(route: str) -> tuple[str, re.Pattern[str]]:
        method, _, path = route.partition(" ")
        if not method.isupper() or not path.startswith("/"):
            raise ValueError(f"{route!r} is not of the form 'POST /path'")
        parts = re.split(r"(\{[^{}/]*\}|<[^<>/]*>)", path)
        return method, re.compile("".join(
            re.escape(p) if n % 2 == 0 else ".+" if PATH.search(p) else "[^/]+" for n, p in enumerate(parts)))

    def find(self, method: str, path: str) -> Guard | None:
        """That of a GET guards its HEAD, too, which frameworks hand to the same handler."""
        for one in (method, "GET") if method == "HEAD" else (method,):
            for wanted, pattern, guard in self._routes:
                if wanted == one and pattern.fullmatch(path):
                    return guard
        return None


def parse_key(values: Sequence[str], strict: bool = False) -> str:
    """The key in the lines of the header.  What the key rules say of it, the
    server knows."""
    text = values[0].strip(" ") if len(values) == 1 else ""
    quoted = QUOTED.fullmatch(text)
    if quoted:
        return re.sub(r"\\(.)", r"\1", quoted[1])
    if strict or not BARE.fullmatch(text):
        raise KeyInvalid("the header Idempotency-Key is one string in double quotes")
    return text


def stored_headers(headers: Sequence[tuple[str, str]], allowed: Collection[str]) -> dict[str, str | list[str]]:
    """Of the headers those that are allowed; several values of one as a list."""
    names = {name.lower(): name for name in allowed if name.lower() not in NEVER_STORED}
    found: dict[str, list[str]] = {}
    for name, text in headers:
        if name.lower() in names:
            found.setdefault(names[name.lower()], []).append(text)
    return {name: texts[0] if len(texts) == 1 else texts for name, texts in found.items()}


def _answer(response: Response | Result, *more: tuple[str, str]) -> Answer:
    headers: list[tuple[str, str]] = []
    for name, texts in response.headers.items():
        headers += [(name, texts)] if isinstance(texts, str) else [(name, text) for text in texts]
    body = response.body.encode() if isinstance(response.body, str) else response.body or b""
    if response.status in BODILESS:
        return Answer(response.status, [*headers, *more], b"")
    return Answer(response.status, [*headers, *more, ("Content-Length", str(len(body)))], body)


def _replay(result: Result) -> Answer:
    response: Response | Result = result
    if result.outcome == "erased":
        response = problem("response-erased", "Response erased", result.status,
                           "The request has run, and its response was erased since.")
    return _answer(response, ("Idempotent-Replayed", "true"))


def _refusal(error: IdempotencyError, guard: Guard) -> Answer | None:
    """The problem that an error of the claim is, if it is one."""
    match error:
        case KeyInvalid():
            said = str(error)[:1].upper() + str(error)[1:]
            said = " ".join(filter(None, [said if said.endswith(".") else f"{said}.", error.detail, error.hint]))
            return _answer(problem("key-invalid", "Invalid Idempotency-Key", 400, said))
        case RateLimited():
            return _answer(problem("rate-limited", "Too many new keys", 429, "Too many new idempotency keys."),
                           ("Retry-After", str(error.retry_after)))
        case InProgress():
            return _answer(problem("in-progress", "Request in progress", 409,
                                   "The first request with this key is still running."),
                           ("Retry-After", str(error.retry_after)))
        case ClaimLost() | ClaimNotFound():
            return _answer(problem("in-progress", "Request in progress", 409,
                                   "Another worker has taken over the request with this key."), ("Retry-After", "1"))
        case KeyReused():
            return _answer(problem("key-reused", "Idempotency-Key reused", guard.conflict_status,
                                   "The key came with another request before."))
        case KeyExpired():
            return _answer(problem("key-expired", "Idempotency-Key expired", 422,
                                   "The key is too old: send the request with a new one."))
        case TimedOut():
            return _answer(problem("timeout", "Timed out", 503, "The request took too long, and was undone."),
                           ("Retry-After", "1"))
        case ScopeMoving():
            return _answer(problem("scope-moving", "Scope is being moved", 503,
                                   "What this request is about is being moved to another server. "
                                   "Retry with the same key."),
                           ("Retry-After", str(error.retry_after)))
        case StreamingRefused():
            return _answer(problem("streaming-refused", "Streaming refused", 500, str(error)))
    return None


async def guarded(client: Defaults, guard: Guard, request: Request, run: Callable[[Access], Any]) -> Answer:
    """Answer a request.  run(access) runs the application and returns an
    Answer, or a coroutine of one; it may run more than once, each time in a
    new transaction, when that was rolled back."""
    scope = ""
    answers: list[Answer] = []
    raised: list[BaseException] = []

    async def respond(access: Access) -> Response:
        answers.clear()
        raised.clear()
        try:
            answer: Answer = await value(run(access))
            if access.error is not None:
                # The framework's answer to an error, a 4xx, too, goes out behind the rollback.
                answers.append(answer)
                raise access.error
        except BaseException as error:
            raised.append(error)
            raise
        answers.append(answer)
        return Response(answer.status, answer.body, stored_headers(answer.headers, guard.headers))

    async def handler(tx: Any) -> Response:
        return await respond(Access(scope, key, tx))

    async def function(job: Any) -> Response:
        return await respond(Access(scope, key, job=job))

    key: str | None = None
    try:
        if values := request.all("Idempotency-Key"):
            key = parse_key(values, guard.strict)
        elif guard.required:
            return _answer(problem("key-required", "Idempotency-Key required", 400,
                                   "This request needs the header Idempotency-Key."))
        found = await value(guard.scope(request))
        if not isinstance(found, str) or not found:
            raise TypeError(f"the guard's scope returned {found!r}, which is no user or "
                            "tenant: return an id of the visitor's own where nobody has logged in, or raise what refuses him")
        scope = found
        call = client.call(scope, key or "", method=request.method, path=request.path, body=request.body,
                           wait=guard.wait, wait_ms=guard.wait_ms, ttl=guard.ttl, lease=guard.lease,
                           lease_ms=guard.lease_ms, timeout=guard.timeout, timeout_ms=guard.timeout_ms,
                           store=guard.store, max_response_size=guard.max_response_size,
                           as_text=True)
        if key is None:
            result = await client.core.transaction(call, handler)
        elif guard.job:
            result = await client.core.job(call, function, client.job_class)
        else:
            result = await client.core.request(call, handler)
    except Exception as error:
        refusal = None
        if isinstance(error, (StreamingRefused, ClaimLost, ClaimNotFound, ScopeMoving, TimedOut)) or error not in raised:
            refusal = _refusal(error, guard) if isinstance(error, IdempotencyError) else None
        if refusal is not None:
            return refusal
        if error in raised and answers:
            return answers[-1]
        raise
    return _replay(result) if result.replayed else answers[-1]
