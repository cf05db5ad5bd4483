"""
The Idempotency-Key header, for any framework.

guarded() takes a request and a function that runs its handler, and returns what goes out.  Its answers are on the page docs/http.md
of the extension.  A framework's file has two parts on top of it: Guard, a decorator of endpoints that calls it, and a layer around
the application that hashes bodies while they are read and sends no success for work that was rolled back.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import re
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .client import Defaults, chosen
from .comparison import MAX_COMPARED, NO_JSON, Fingerprint, form_keys, hash_of_body, is_form, left_out
from .core import RETRIED, Call, Response, Result, problem, stores
from .errors import (ActionIdAhead, ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyInvalid,
                     KeyReused, RateLimited, ScopeMoving, TimedOut, from_error, sqlstate)
from .functions import Interval, Statement
from .handlers import timeout_seconds
from .keys import request_hash, request_hasher
from .postgres import DRIVERS, connection_lost, pool_exhausted
from .runtimes import maybe_await

STORED_HEADERS = ("Content-Type", "Content-Encoding", "Content-Language", "Content-Disposition", "Location", "ETag",
                  "Link", "Vary", "Cache-Control", "Content-Security-Policy", "Referrer-Policy", "X-Content-Type-Options")
NEVER_STORED = {"set-cookie"}
BODILESS = {204, 304}
# A string of RFC 8941; without quotes, what can be taken for nothing else.
STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
PARAMETER = rf";\x20*[a-z*][a-z0-9_.*-]*(?:=(?:-?\d{{1,12}}(?:\.\d{{1,3}})?|{STRING}|[A-Za-z*][!#$%&'*+.^_`|~\w:/-]*|:[\w+/=]*:|\?[01]))?"
QUOTED = re.compile(rf"({STRING})(?:{PARAMETER})*", re.ASCII)
BARE = re.compile(r"[!#-+\--:<-~]+")
DURATION = re.compile(r"^[^-]*\d[^-]*$")
MAX_KEY = 255
MAX_SCOPE = 512
"""Bytes that the server takes."""
UNAVAILABLE = re.compile("08|25006|53|57P0")
"""The SQLSTATEs of a lost connection, and of a server that is a standby, lacks resources, or is shutting down or starting."""
GUARD = "pg_idempotency_guard"
"""The guard of an endpoint; decorators above it pass the attribute on."""
BARE_ENDPOINT = "pg_idempotency_has_a_guard"
"""Marks a function that a guard has wrapped: a route leads to the guard, and never to the function itself."""


class StreamingRefused(IdempotencyError):
    """The handler writes its response in pieces, of which none can be stored."""


class ScopeInvalid(IdempotencyError):
    """The server does not accept this scope."""


class RequestTooLarge(IdempotencyError):
    """The body has more bytes than the guard allows."""


@dataclass(frozen=True)
class Answer:
    """A response as it is sent."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    native: Any = field(default=None, repr=False)
    """The framework's own response."""


@dataclass(frozen=True)
class Guard:
    """How an endpoint is guarded.

    scope returns the owner of the key, the user that is logged in.  It gets the framework's request and, by their names,
    arguments of the endpoint.  In Starlette and FastAPI it can be a coroutine function.  None and "" are errors.  The
    framework answers what it raises.  job makes the endpoint a job instead of one transaction.
    """

    scope: Callable[..., Any]
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
    max_request_size: int = 2 << 20
    """Bytes of a body."""
    max_response_size: int | None = None
    store: Callable[[int], bool] = stores
    strict: bool = False
    """Only keys in quotes."""
    any_key: bool = False
    """Accept any key of 1 to 255 characters, and store a hash of it that fits the key rules."""
    form_field: str | None = "_idempotency_key"
    """The field of a form that has the key if the header is missing; None: no field."""
    methods: Collection[str] | None = None
    """Requests with other methods run without the guard, and without a transaction of its own.  None: all are guarded."""
    fingerprint: Fingerprint | None = None
    """The part of the body that is compared.  A list of JSON pointers ('/meta/traceId') that are left out, or a function of the
    framework's request and the body's bytes, which returns bytes or text."""

    def __post_init__(self) -> None:
        if not callable(self.scope):
            raise TypeError(f"scope must be a function that takes the request, not {self.scope!r}")
        for name, found in (("methods", self.methods), ("headers", self.headers)):
            if isinstance(found, str) or found is not None and not all(isinstance(one, str) for one in found):
                raise TypeError(f"{name} must be a list of names, not {found!r}")
        if self.methods is not None and (not self.methods or any(one != one.upper() for one in self.methods)):
            raise ValueError(f"methods must be a list of names such as 'POST', in upper case: {self.methods!r} guards no request")
        if self.conflict_status not in (409, 422):
            raise ValueError(f"conflict_status must be 409 or 422, not {self.conflict_status!r}")
        if not callable(self.store) or not (self.form_field is None or isinstance(self.form_field, str)):
            raise TypeError("store must be a function, and form_field a name or None")
        if self.max_request_size < 0 or (self.max_response_size or 0) < 0:
            raise ValueError("a limit of bytes must not be negative")
        for name, interval, ms in (("wait", self.wait, self.wait_ms), ("lease", self.lease, self.lease_ms), ("ttl", self.ttl, None)):
            if isinstance(interval, str) and not DURATION.search(interval):
                raise ValueError(f"{name} must be a duration such as '30s', not {interval!r}")
            chosen(name, interval, ms)
        timeout_seconds(self.timeout, self.timeout_ms)
        left_out(self.fingerprint)

    @staticmethod
    def check_endpoint(endpoint: Any) -> None:
        """Mark a function that is guarded.  Its other decorators do not run for a replay."""
        if not inspect.isroutine(endpoint):
            raise TypeError(f"a guard must be above a function, not above {endpoint!r}")
        if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
            raise TypeError(f"{endpoint.__qualname__} is a generator, so it answers in pieces, of which none can be stored")
        warn_of_decorators(endpoint)
        while inspect.isroutine(endpoint):          # a route can also lead to a function that it wraps
            getattr(endpoint, "__dict__", {})[BARE_ENDPOINT] = endpoint
            endpoint = getattr(endpoint, "__wrapped__", None)

    def guards(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    def ask_scope(self, request: Any, arguments: Mapping[str, Any]) -> Any:
        return self.scope(request, **{name: arguments[name] for name in self._scope_arguments if name in arguments})

    @functools.cached_property
    def _scope_arguments(self) -> Sequence[str]:
        return list(inspect.signature(self.scope).parameters)[1:]

    @functools.cached_property
    def _stored_names(self) -> Mapping[str, str]:
        """In lower case, and as they are stored."""
        return {name.lower(): name for name in self.headers if name.lower() not in NEVER_STORED}

    def stored_headers(self, headers: Sequence[tuple[str, str]]) -> dict[str, str | list[str]]:
        """The headers that are stored; several values of one are a list."""
        found: dict[str, list[str]] = {}
        for name, text in headers:
            stored = self._stored_names.get(name.lower())
            if stored is not None:
                found.setdefault(stored, []).append(text)
        return {name: texts[0] if len(texts) == 1 else texts for name, texts in found.items()}


@dataclass
class Access:
    """The state of a guarded handler: tx, the connection of its transaction, or
    job in a route that is one; key, which is None where none is required."""

    scope: str
    key: str | None
    tx: Any = None
    job: Any = None


class Exchange:
    """A request, from its first byte to the end of its response: what the layer around the application and a guard within it share."""

    def __init__(self, client: Defaults, method: str, path: str, keys: Sequence[str], length: int | None,
                 content_type: str = "", is_encoded: bool = False) -> None:
        """The path has the query, as it came in; keys are the values of Idempotency-Key; a body is encoded as by gzip."""
        self.client = client
        self.scope: Any = None
        """Of ASGI, as the router has it."""
        self.keys = keys
        self.content_type = "" if is_encoded else content_type
        self.limit: int | None = None
        """The limit of the bytes that are read."""
        self.size = 0
        self.most_kept = MAX_COMPARED
        """The bytes that are kept, to be compared or to find a key in a form."""
        self.whole = False
        """The body was read to its end."""
        self.undone = False
        """A guard has begun, and has neither committed nor replayed a response."""
        self.claimed: set[tuple[str, str] | None] = set()
        """The scopes and keys of guards that run, or have committed or replayed a response."""
        self._request = (method, path)
        self._name = f"{method} {path.split('?')[0]}"
        self.length = length or 0
        self._hasher = request_hasher(method, path)
        self._kept = bytearray() if keys or is_form(self.content_type) else None

    def read(self, piece: bytes) -> bytes:
        """Note a piece of the body when the application reads it."""
        self.size += len(piece)
        if self._kept is not None:
            self._hasher.update(piece)
            if self.size <= self.most_kept:
                self._kept += piece
            else:
                self._kept.clear()
        if self.limit is not None and self.size > self.limit:
            raise RequestTooLarge(f"The body of this request is larger than {self.limit} bytes.")
        return piece

    def keep(self, limit: int) -> None:
        """Before it is read: a form is kept whole, for its key, and because each try has another boundary."""
        if is_form(self.content_type):
            self.most_kept = max(self.most_kept, limit)

    def limit_body(self, limit: int) -> None:
        """Before it is read, as far as it has not been."""
        self.limit = limit
        self.keep(limit)
        if self._known_size > limit:
            raise RequestTooLarge(f"The body of this request is larger than {limit} bytes.")

    @property
    def _known_size(self) -> int:
        return max(self.size, self.length)

    def exceeds(self, guard: Guard) -> bool:
        """The guard, once it runs, will answer 413, or has no key."""
        return (guard.required or bool(self.keys)) and guard.guards(self._request[0]) and self._known_size > guard.max_request_size

    @property
    def may_have_form_key(self) -> bool:
        return not self.keys and is_form(self.content_type)

    def form_key(self, field: str) -> str | None:
        """When the body was read.  Raises KeyInvalid if the key can be outside of what is kept, because an optional
        guard would be off without a message."""
        body = self._kept or b""
        if len(body) < self.size:
            raise KeyInvalid(f"a form that was read before its guard has its key within {self.most_kept} bytes")
        found = form_keys(self.content_type, body, field)
        if len(found) > 1:
            raise KeyInvalid(f"the form has more than one field {field}")
        return found[0] if found else None

    def hash_of_bytes(self) -> bytes:
        """When the body was read."""
        return self._hasher.digest()

    def request_hash(self, guard: Guard, request: Any) -> bytes | Statement[bytes]:
        """When the body was read: the hash of what is compared."""
        if self._kept is None or len(self._kept) < self.size:
            return self.hash_of_bytes()
        if callable(guard.fingerprint):
            compared = guard.fingerprint(request, bytes(self._kept))
            return request_hash(*self._request, compared.encode() if isinstance(compared, str) else compared)
        return hash_of_body(*self._request, self.content_type, self._kept, left_out(guard.fingerprint))

    def claim(self, scope: str, key: str) -> tuple[str, str]:
        """Raises RuntimeError if a guard of this request has claimed them before: this one would replay its response."""
        if (scope, key) in self.claimed:
            raise RuntimeError(f"{self._name} calls two functions with a guard, or one of them twice, and the second call would replay "
                               "the first one's response: write one guard, above the endpoint of the route, and call functions without one")
        self.claimed.add((scope, key))
        return scope, key

    def refuses(self, status: int) -> bool:
        return self.undone and 200 <= status < 300

    def refusal(self, status: int) -> Answer:
        """The response that replaces a success for work that was rolled back."""
        logging.getLogger("pg_idempotency").error("%s was rolled back, and the application answered %d: 500 was sent", self._name, status)
        return _answer(problem("rolled-back", "Rolled back", 500, "The request failed, and its work was rolled back."))

    def check_length(self, status: int, length: str | None, body: bytes) -> None:
        """Refuse a response that would be sent broken, and replayed whole.  One to HEAD has the length of another body."""
        if length not in (None, str(len(body))) and status not in BODILESS and self._request[0] != "HEAD":
            raise ValueError(f"{self._name} has a body of {len(body)} bytes, and Content-Length says {length}")

    def streaming_refused(self) -> StreamingRefused:
        return StreamingRefused(f"{self._name} answers in pieces: a response that is to be stored has to be whole, with its length")


def rewind(file: Any) -> None:
    """An uploaded file, for another try."""
    try:
        file.seek(0)
    except ValueError:
        raise RuntimeError("the handler has closed an uploaded file, so it cannot run again after a serialization failure or "
                           "a deadlock") from None


def warn_of_decorators(endpoint: Any) -> None:
    if hasattr(endpoint, "__wrapped__"):
        warnings.warn(f"the decorators below the guard of {endpoint.__qualname__} do not run for a replay: if one of them checks "
                      "the login, anyone who has the key gets the response; write the guard as the last decorator above the "
                      "function", stacklevel=4)


def check_routes(endpoints: Sequence[Any]) -> None:
    """Refuse functions with a guard that a route leads to without it."""
    for endpoint in endpoints:
        bare = getattr(endpoint, "__dict__", {}).get(BARE_ENDPOINT)
        if bare is not None and bare is endpoint:
            raise RuntimeError(f"{bare.__qualname__} has a guard, but its route bypasses the guard: write the guard "
                               "below the decorator of the route, as the last one above the function")


def no_layer(install: str) -> RuntimeError:
    return RuntimeError(f"the endpoint has a guard, and its application has no {install}, without which it does not run")


def parse_key(values: Sequence[str], strict: bool = False) -> str:
    """The key in the lines of the header.  What the key rules say of it, the server knows."""
    text = values[0].strip(" ") if len(values) == 1 else ""
    quoted = QUOTED.fullmatch(text)
    if quoted:
        return re.sub(r"\\(.)", r"\1", quoted[1][1:-1])
    if strict or not BARE.fullmatch(text):
        raise KeyInvalid("the header Idempotency-Key must be one string in double quotes")
    return text


def stored_key(key: str, is_hashed: bool) -> str:
    """The key, or a UUID of version 8 made of its SHA-256, which every format of keys accepts."""
    if not is_hashed:
        return key
    if not 1 <= len(key) <= MAX_KEY:
        raise KeyInvalid(f"the key has {len(key)} characters, not 1 to {MAX_KEY}")
    bits = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big")
    return str(uuid.UUID(int=bits & ~(0xf << 76 | 3 << 62) | 8 << 76 | 2 << 62))


def _answer(response: Response | Result, *more: tuple[str, str]) -> Answer:
    headers = [(name, text) for name, texts in response.headers.items() for text in ([texts] if isinstance(texts, str) else texts)]
    if response.status in BODILESS:
        return Answer(response.status, [*headers, *more], b"")
    body = response.body.encode() if isinstance(response.body, str) else response.body or b""
    return Answer(response.status, [*headers, *more, ("Content-Length", str(len(body)))], body)


def _key_required() -> Answer:
    return _answer(problem("key-required", "Idempotency-Key required", 400, "This request needs the header Idempotency-Key."))


def _replay(result: Result) -> Answer:
    response: Response | Result = result
    if result.outcome == "erased":
        response = problem("response-erased", "Response erased", result.status, "The request has run, and its response was erased since.")
    return _answer(response, ("Idempotent-Replayed", "true"))


PROBLEMS: dict[type[IdempotencyError], tuple[str, str, int, str | None]] = {
    RateLimited: ("rate-limited", "Too many new keys", 429, "Too many new idempotency keys."),
    InProgress: ("in-progress", "Request in progress", 409, "The first request with this key is still running."),
    ClaimLost: ("in-progress", "Request in progress", 409, "Another worker has taken over the request with this key."),
    ClaimNotFound: ("in-progress", "Request in progress", 409, "Another worker has taken over the request with this key."),
    KeyReused: ("key-reused", "Idempotency-Key reused", 422, "The key came with another request before."),
    KeyExpired: ("key-expired", "Idempotency-Key expired", 422, "The key is too old: send the request with a new one."),
    TimedOut: ("timeout", "Timed out", 503, "The request took too long. Retry with the same key."),
    ScopeMoving: ("scope-moving", "Scope is being moved", 503, "What this request is about is being moved to another server. "
                  "Retry with the same key."),
    ActionIdAhead: ("action-id-ahead", "Action id too far ahead", 400, "The action id is too far ahead of the server's clock."),
    StreamingRefused: ("streaming-refused", "Streaming refused", 500, None),
    ScopeInvalid: ("scope-invalid", "Invalid scope", 400, None),
    RequestTooLarge: ("request-too-large", "Request too large", 413, None)}
"""The problem that an error is, with its detail; None is the text of the error."""


def _refusal(error: IdempotencyError, guard: Guard) -> Answer | None:
    """The problem that an error of the claim is, if it is one."""
    if isinstance(error, KeyInvalid):
        said = str(error)[:1].upper() + str(error)[1:]
        said = " ".join(filter(None, [said if said.endswith(".") else f"{said}.", error.detail, error.hint]))
        return _answer(problem("key-invalid", "Invalid Idempotency-Key", 400, said))
    for kind in type(error).__mro__:
        if kind in PROBLEMS:
            name, title, status, detail = PROBLEMS[kind]
            # The client can repeat the request with the same key.
            later = [("Retry-After", str(getattr(error, "retry_after", 1)))] if status in (409, 429, 503) else []
            status = guard.conflict_status if kind is KeyReused else status
            return _answer(problem(name, title, status, detail or str(error)), *later)
    return None


def _scope(found: Any) -> str:
    if not isinstance(found, str) or not found:
        raise TypeError(f"the guard's scope returned {found!r}, which is not a user or tenant: for a visitor who has "
                        "not logged in, return the id of a stored session, or raise an error that refuses the visitor")
    try:
        if len(found.encode()) <= MAX_SCOPE and "\0" not in found:
            return found
    except UnicodeEncodeError:
        pass
    raise ScopeInvalid(f"The user of this request must have 1 to {MAX_SCOPE} bytes of text.")


ANSWERED = (StreamingRefused, ActionIdAhead, ClaimLost, ClaimNotFound, ScopeMoving, TimedOut)
"""The guard answers these, also if the handler has raised them."""


def _refused(error: BaseException, was_raised: bool, has_begun: bool, guard: Guard) -> Answer | None:
    """The guard's answer to an error, also of a statement that the handler has sent through its driver or ORM, which was_raised.
    The framework answers what the scope function raises, before the call has_begun."""
    if isinstance(error, IdempotencyError):
        return None if was_raised and not isinstance(error, ANSWERED) else _refusal(error, guard)
    found = from_error(error) if type(error).__module__.startswith(DRIVERS) else None
    if isinstance(found, ActionIdAhead):
        return _refusal(found, guard)
    state = sqlstate(error)
    if has_begun and (state in RETRIED or not was_raised and (
            UNAVAILABLE.match(state or "") or connection_lost(error) or pool_exhausted(error))):
        logging.getLogger("pg_idempotency").error("the database is not available: 503 was sent", exc_info=error)
        return _answer(problem("unavailable", "Service unavailable", 503, "The database is not available. Retry with the same key."),
                       ("Retry-After", "1"))
    return None


async def guarded(exchange: Exchange, guard: Guard, request: Any, ask_scope: Callable[[], Any],
                  read_body: Callable[[], Any], run: Callable[[Access, int], Any]) -> Answer:
    """Answer a request.  read_body() reads what is left of the body.  run(access, tries) runs the handler and returns
    an Answer, or a coroutine of one.  It may run more than once, each time in a new transaction, when that was rolled
    back; tries counts them from 1.  Raises what the handler has raised, after the rollback."""
    client = exchange.client
    scope, key = "", None
    tries = 0
    call: Call | None = None
    claimed: tuple[str, str] | None = None
    answers: list[Answer] = []
    raised: list[BaseException] = []

    async def respond(access: Access) -> Response:
        nonlocal tries
        tries += 1
        answers.clear()
        raised.clear()
        try:
            answer: Answer = await maybe_await(run(access, tries))
        except BaseException as error:
            raised.append(error)
            raise
        if answer.status < 200:
            raise ValueError(f"the endpoint answered {answer.status}, which is not a final response")
        answers.append(answer)
        return Response(answer.status, answer.body, guard.stored_headers(answer.headers))

    try:
        in_form = guard.form_field is not None and exchange.may_have_form_key
        if exchange.keys:
            key = parse_key(exchange.keys, guard.strict)
        elif guard.required and not in_form:
            return _key_required()
        found = await maybe_await(ask_scope())
        exchange.undone = True
        scope = _scope(found)
        if key is not None or in_form:
            exchange.limit_body(guard.max_request_size)
            await maybe_await(read_body())
            if not exchange.whole:
                raise RuntimeError("only a part of the body was read before the guard")
        if in_form:
            key = exchange.form_key(guard.form_field or "")
            if key is None and guard.required:
                return _key_required()
        call = client.call(scope, stored_key(key or "", guard.any_key and key is not None), wait=guard.wait,
                           request_hash=None if key is None else exchange.request_hash(guard, request),
                           wait_ms=guard.wait_ms, ttl=guard.ttl, lease=guard.lease, lease_ms=guard.lease_ms,
                           timeout=guard.timeout, timeout_ms=guard.timeout_ms, store=guard.store,
                           max_response_size=guard.max_response_size, as_text=True)
        if key is not None:
            claimed = exchange.claim(scope, call.key)

        async def perform(call: Any) -> Result:
            if key is None:
                return await client.core.transaction(call, lambda tx: respond(Access(scope, key, tx)))
            if guard.job:
                return await client.core.job(call, lambda job: respond(Access(scope, key, job=job)), client.job_class)
            return await client.core.request(call, lambda tx: respond(Access(scope, key, tx)))

        try:
            result = await perform(call)
        except Exception as error:
            if tries or not isinstance(call.request_hash, Statement) or sqlstate(error) not in NO_JSON:
                raise
            call = replace(call, request_hash=exchange.hash_of_bytes())
            result = await perform(call)
        exchange.undone = not result.replayed and not call.commits(result.status)
    except Exception as error:
        refusal = _refused(error, error in raised, call is not None, guard)
        if refusal is None:
            raise
        return refusal
    finally:
        raised.clear()                      # or it is kept, by way of its traceback, with the body
        if exchange.undone:                 # middleware can try again
            exchange.claimed.discard(claimed)
    if result.replayed:
        return _replay(result)
    # After job.finish(), the stored response goes out.  The endpoint's own one can have cookies beside it.
    stored = result.body.encode() if isinstance(result.body, str) else result.body or b""
    return answers[-1] if (answers[-1].status, answers[-1].body) == (result.status, stored) else _answer(result)
