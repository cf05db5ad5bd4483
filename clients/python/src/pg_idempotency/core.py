"""
request() and job(), once for both runtimes.

A request is one transaction: claim, handler, complete, COMMIT, and only then the response.  A job is several: the claim commits,
each step's value is committed as a checkpoint, and the last step commits together with the response.  Nothing here knows of HTTP.
"""

from __future__ import annotations

import functools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from . import functions
from .adapter import Session
from .errors import (ClaimLost, ClaimNotFound, IdempotencyError, InProgress, KeyExpired, KeyReused, NotFinished,
                     ScopeMoving, TimedOut, TransactionEnded, sqlstate)
from .functions import (Headers, HeldClaim, Interval, Statement, as_json, held, json_text, make, scope_of, without_defaults)
from .handlers import Deadline, in_handler, refuse_nested
from .intervals import seconds
from .keys import request_hash, step_key
from .postgres import DRIVERS, connection_lost, pool_exhausted, scope_is_elsewhere
from .shards import MOVE_WAIT, Server, Servers
from .runtimes import ABORT_DELAY, Runtime, Work, answered, maybe_await
from .telemetry import TRACEPARENT, Progress, Telemetry
from .transaction_handle import Unawaited

T = TypeVar("T")
Leave = Callable[..., Coroutine[Any, Any, Any]]
ATTEMPTS = 5
RETRIED = {"40001", "40P01"}
ENDED_WAITS = {"57014", "55P03"}
"""By statement_timeout, by lock_timeout."""
IN_DOUBT_WAIT = "5 seconds"
ANSWER_LIMIT = 30.0
"""Seconds until the client closes a connection whose server does not answer a statement that waits for no other transaction."""
SESSION_ENDED = "the server ended the session of the handler's transaction"
MAX_ERROR = 1000
MAX_STEP = 512
"""Bytes of the name of a step: the server's limit, checked before the step runs."""
SURROGATE = re.compile("[\ud800-\udfff]")
NO_LINE = re.compile(r"[\r\n\0]")
# In a text of JSON, behind no backslash that is itself escaped.
NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class Response:
    """The return value of a handler: a status, a body as it will be stored, headers."""

    status: int = 200
    body: str | bytes | None = None
    headers: Headers = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.status, bool) or not isinstance(self.status, int) or not 100 <= self.status <= 599:
            raise TypeError(f"the status of a response must be 100 to 599, not {self.status!r}")
        if self.body is not None and not isinstance(self.body, (str, bytes)):
            raise TypeError(f"the body of a response must be a str or bytes, not a {type(self.body).__name__}; "
                            "for a document, use Response.json()")
        if not isinstance(self.headers, Mapping):
            raise TypeError(f"the headers of a response must be a mapping, not a {type(self.headers).__name__}")

    @classmethod
    def json(cls, document: Any, status: int = 200, headers: Headers | None = None, *,
             default: Callable[[Any], Any] = as_json) -> Response:
        """default(value) converts a value that json.dumps() does not know: by default, it returns for Decimal
        and UUID their text, and of dates and times that of ISO 8601."""
        return cls(status, json_text(document, "the document of the response", default),
                   {"Content-Type": "application/json", **(headers or {})})


@dataclass(frozen=True)
class Result:
    """The return value of request() and job().

    outcome is "new", "replay" or "erased"; stored says whether a duplicate will get this response, which one that is too
    large is not; replayed whether this is one.
    """

    outcome: str
    status: int
    body: str | bytes | None
    headers: Headers
    replayed: bool
    stored: bool


NOT_STORED = {401, 403, 408, 425, 429}
"""These statuses depend on the sender or on the time, not on the request."""


def stores(status: int) -> bool:
    """Which responses are stored by default."""
    return status < 500 and status not in NOT_STORED


def problem(type: str, title: str, status: int, detail: str) -> Response:
    """A problem document of RFC 9457."""
    document = {"type": f"urn:pg-idempotency:{type}", "title": title, "status": status, "detail": detail}
    return Response(status, json_text(document, "problem"), {"Content-Type": "application/problem+json"})


@dataclass(eq=False)
class Call:
    """The names and the time limits of a request."""

    scope: str
    key: str
    request_hash: bytes | Statement[bytes] | None
    ttl: Interval
    wait: Interval
    lease: Interval
    timeout: float | None = None
    """Of the handler, in seconds."""
    timeout_in_transaction: float | None = None
    """Of one that holds a connection."""
    store: Callable[[int], bool] = stores
    max_response_size: int | None = None
    as_text: bool = False
    """Store bytes as text where they are text, for those who read the table."""
    in_doubt: bool = False
    """Claims again after a COMMIT whose answer was lost."""
    progress: Progress = field(default_factory=Progress)

    @property
    def claim_limit(self) -> float:
        """Seconds that the server has for the answer to the claim."""
        return ANSWER_LIMIT + (seconds(self.wait) or 0.0)

    def commits(self, status: int) -> bool:
        """Whether a response with this status commits, or rolls back and is not stored.  A success always commits, as
        its client continues from there; an error of the server never commits."""
        return status < 300 or status < 500 and self.store(status)

    def claim(self, wait: bool) -> Statement[HeldClaim]:
        return held(make["claim"].make(None, self.scope, self.key, self.request_hash, ttl=self.ttl, lease=self.lease,
                                       wait=self.wait if wait else None))

    def complete(self, session: Session, response: Response, token: int | None, limit: int) -> tuple[Statement[bool], bool]:
        """The statement that stores the response, and whether it stores all of it: a document replaces a response that is too large."""
        body, headers = response.body, self._stored_headers(response)
        size = len(body.encode() if isinstance(body, str) else body or b"")
        if self.as_text and isinstance(body, bytes) and session.stores_utf8 and b"\0" not in body:
            with suppress(UnicodeDecodeError):
                body = body.decode()
        limit = limit if self.max_response_size is None else min(limit, self.max_response_size)
        whole = max(size, len(headers or "")) <= limit
        if not whole:
            response = problem("response-not-stored", "Response not stored", response.status,
                               f"The response to this request was larger than the {limit} bytes that may be stored.")
            body, headers = response.body, self._stored_headers(response)
        return without_defaults(make["complete"].make(
            None, self.scope, self.key, response.status, body,
            None if headers is None else functions.JsonText(headers), token)), whole

    def _stored_headers(self, response: Response) -> str | None:
        trace = () if self.progress.traceparent is None else ((TRACEPARENT, self.progress.traceparent),)
        # The headers of an endpoint are often the same.
        return headers_text((*[(name, texts if isinstance(texts, str) else tuple(texts)) for name, texts in response.headers.items()],
                             *trace))


@functools.lru_cache(maxsize=200)
def headers_text(headers: tuple[tuple[str, str | tuple[str, ...]], ...]) -> str | None:
    for name, texts in headers:
        for text in (name, *((texts,) if isinstance(texts, str) else texts)):
            if not isinstance(text, str) or NO_LINE.search(text):
                raise ValueError(f"the header {name!r} must be text of one line")
    return json_text(dict(headers) or None, "headers")


def hash_of(given: bytes | Statement[bytes] | None, method: str | None, path: str | None, body: str | bytes | None) -> Any:
    """Bytes are hashed here, as they are; a str is JSON, and is hashed by the server."""
    if given is not None or (method is None and path is None and body is None):
        return given
    if method is None or path is None:
        raise TypeError("pass both method and path, or neither")
    if body is not None and not isinstance(body, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"the body of the request must be the bytes that were received, or a str of JSON, not a {type(body).__name__}")
    if isinstance(body, str):
        return make["request_hash"].make(None, method, path, body)
    return request_hash(method, path, body or b"")


def stored_response(outcome: str, found: HeldClaim | functions.Lookup, progress: Progress, replayed: bool) -> Result:
    """The response of a record."""
    body = found.response_body if found.response_bytes is None else found.response_bytes
    headers = dict(found.response_headers or {})
    progress.origin = headers.pop(TRACEPARENT, None)
    return Result(outcome, found.response_status or 0, body, headers, replayed, True)


def in_progress(lease_seconds: float | None) -> InProgress:
    error = InProgress("the request is running")
    if lease_seconds is not None:
        # Most jobs are over long before their lease.
        error.retry_after = max(1, min(5, round(lease_seconds)))
    return error


def answer(claim: HeldClaim, progress: Progress) -> Result:
    """The result of a claim that is not new, or the error that it is."""
    match claim.outcome:
        case "replay":
            return stored_response("replay", claim, progress, True)
        case "erased":
            return Result("erased", claim.response_status or 0, None, {}, True, True)
        case "in_progress":
            raise in_progress(claim.lease_seconds)
        case "hash_conflict":
            raise KeyReused("the key was used for another request")
        case "expired":
            raise KeyExpired("the key has expired")
    raise AssertionError(claim.outcome)


class _CommitInDoubt(Exception):
    """COMMIT was sent, and the connection broke before its answer."""


@dataclass(eq=False)
class Flight:
    """A request that runs in this process.  Its duplicates in this process wait for it."""

    over: Any
    stored: bool = False


class SessionLease:
    """A session that the pool has lent.  The first caller that releases it gives it back, and only that one."""

    def __init__(self, session: Session, server: Server, manager: Any) -> None:
        self.session = session
        self.server = server
        self.was_aborted = False
        self._managers = [manager]

    def detach(self) -> Leave | None:
        """Return what gives the session back, as __aexit__, unless another caller has it already."""
        try:
            leave: Leave = self._managers.pop().__aexit__
            return leave
        except IndexError:
            return None

    async def __aenter__(self) -> Session:
        return self.session

    async def __aexit__(self, *error: Any) -> None:
        if leave := self.detach():
            await leave(*error)

    async def abort(self) -> bool | None:
        """End the session of a handler that does not return, or whose session is gone, so that a pool gets it back.
        Of another source, the handler's thread or task gives it back when the handler returns."""
        self.was_aborted = True
        leave = self.detach() if self.server.backend.is_pool else None
        try:
            return await self.session.abort()
        finally:                                # also if the task is cancelled now
            if leave:
                await leave(None, None, None)


class Core:
    def __init__(self, servers: Servers, runtime: Runtime, telemetry: Telemetry = Telemetry()) -> None:
        self.servers = servers
        self.runtime = runtime
        self.telemetry = telemetry
        self._in_flight: dict[tuple[object, str, str, str], Flight] = {}

    def made(self, statement: Statement[T]) -> Statement[T]:
        """A statement on the user's handle, as it is sent."""
        return self.servers.pinned(self.telemetry.traced(statement))

    async def perform(self, statement: Statement[T]) -> T:
        """Call a function of the extension in a transaction of its own."""
        statement = self.telemetry.traced(statement)
        name = statement.function.removeprefix("idem_") + "()"
        refuse_nested(self.servers.source, name, f"on(tx).{name}")
        scope = scope_of(statement)
        if scope is None:
            return await self.servers.perform_unscoped(statement)
        return await self.perform_for_scope(scope, lambda session: statement)

    async def perform_for_scope(self, scope: str, make: Callable[[Session], Statement[T]], wait_for_move: bool = True,
                                limit: float | None = None, repeats: bool = False) -> T:
        """Perform it on the server of the scope.  With repeats, also where the server may have executed it already."""
        session_lease, found = await self._open(
            scope, lambda server, session: session.perform(self.servers.pinned(make(session))), limit, repeats, wait_for_move)
        async with session_lease:
            return found

    async def _answered(self, session: Session, send: Callable[[], Any], limit: float | None) -> Any:
        return await answered(self.runtime, send, limit, session.abort)

    async def _open(self, scope: str | None, first: Callable[[Server, Session], Awaitable[T]], limit: float | None,
                    repeats: bool = True, wait_for_move: bool = True) -> tuple[SessionLease, T]:
        """A session where the scope lives, and the result of the first statement in it.

        Nothing else has run then.  So it is sent again where the scope has moved away, and with repeats also where the
        connection was dead: a pool may have kept it since the server's restart.  A server that cannot be reached is tried
        once, because that can take minutes."""
        until = time.monotonic() + (MOVE_WAIT if wait_for_move else 0)
        for last in (False, False, True):
            server = await self.servers.server_of(scope, until)
            reached = dead = False
            try:
                manager = server.backend.session()
                session = await manager.__aenter__()
                reached = True
                try:
                    return SessionLease(session, server, manager), await self._answered(session, lambda: first(server, session), limit)
                except BaseException as error:
                    # The exception of a signal handler closes a connection, too.
                    dead = connection_lost(error) or session.lost and type(error).__module__.startswith(DRIVERS)
                    await manager.__aexit__(type(error), error, error.__traceback__)
                    raise
            except Exception as error:
                moved = scope_is_elsewhere(error)
                # A listener of SQLAlchemy can use a connection before it is lent.
                dead = dead or getattr(error, "connection_invalidated", False)
                if moved or not reached:
                    # The map may have another address now: if no server listens at this one, the pool reports that it is exhausted.
                    self.servers.forget(scope, moved)
                if last or isinstance(error, TimedOut) or not (moved or dead and repeats):
                    raise
        raise AssertionError

    async def _handled(self, session_lease: SessionLease, deadline: Deadline, handler: Callable[[Any], Any],
                       what: str = "handler") -> Response:
        """The response of the handler, within its time limit."""
        session = session_lease.session

        async def returned() -> Any:
            found = await maybe_await(handler(session.handle))
            await session.revoke_handle()
            return found

        context = in_handler(self.servers.source, session_lease.server.backend.source)
        try:
            with context, self.telemetry.span("handler"):
                found = await self.runtime.bounded(returned, deadline.left(), session_lease.abort, session.ended)
        except Exception as error:
            if session_lease.was_aborted and deadline.left() == 0:
                raise deadline.error() from error
            if session_lease.was_aborted and isinstance(error, TransactionEnded):
                raise TransactionEnded(SESSION_ENDED) from error    # the handle knows only that it was taken away
            raise
        finally:
            context.close()
        if session_lease.was_aborted:
            raise deadline.error() if deadline.left() == 0 else TransactionEnded(SESSION_ENDED)
        if not isinstance(found, Response):
            raise TypeError(f"the {what} returned {type(found).__name__}, not a Response")
        return found

    async def transaction(self, call: Call, handler: Callable[[Any], Any]) -> Result:
        """A handler without a key: its transaction, and nothing stored."""
        refuse_nested(self.servers.source, "a transaction", "tx")
        deadline = Deadline(call.timeout_in_transaction)

        pin = self.servers.pin(call.scope)

        async def attempt() -> Result:
            session_lease, _ = await self._open(call.scope, lambda server, session: session.begin(pin), ANSWER_LIMIT)
            async with session_lease as session:
                call.progress.attempt += 1
                response = await self._handled(session_lease, deadline, handler)
                if call.commits(response.status):
                    if not session.open:
                        raise TransactionEnded("the handler ended its transaction, or continued after an error in it")
                    try:
                        await self._commit(session, None)
                    except _CommitInDoubt as in_doubt:
                        raise IdempotencyError("the answer to COMMIT was lost: without a key, it is not known whether the request "
                                               "was committed") from in_doubt.__cause__
                return Result("new", response.status, response.body, response.headers, False, False)

        return await self.telemetry.reported("transaction", call.scope, call.progress, lambda: self._retried(attempt))

    @asynccontextmanager
    async def open_transaction(self, scope: str | None) -> AsyncIterator[Any]:
        """The handle of a transaction where the scope lives: COMMIT at the end, ROLLBACK after an error."""
        refuse_nested(self.servers.source, "transaction()", "tx, and savepoints")
        pin = self.servers.pin(scope)
        session_lease, _ = await self._open(scope, lambda server, session: session.begin(pin), ANSWER_LIMIT)
        async with session_lease as session:
            with in_handler(self.servers.source, session_lease.server.backend.source):
                yield session.handle
            await session.revoke_handle()
            if not session.open:
                raise TransactionEnded("the block ended the transaction, or continued after an error in it")
            await self._answered(session, lambda: session.commit(None), ANSWER_LIMIT)

    @asynccontextmanager
    async def _single_flight(self, call: Call) -> AsyncIterator[tuple[Call, Flight]]:
        """Of the duplicates in this process that are allowed to wait, one runs at
        a time.  The others wait here, without a connection."""
        # Another request under the key does not wait, to hear that it is one.
        known = call.request_hash
        name = (self.runtime.place(), call.scope, call.key, repr(known.arguments if isinstance(known, Statement) else known))
        until = time.monotonic() + (seconds(call.wait) or 0.0)
        mine = Flight(self.runtime.event())
        while True:
            other = self._in_flight.setdefault(name, mine)      # one step, also for threads
            if other is mine:
                break
            before = time.monotonic()
            with self.telemetry.span("wait"):
                is_over = await self.runtime.wait(other.over, max(0.0, until - before))
            call.progress.waited += time.monotonic() - before
            if not is_over or other.stored:
                break
        try:
            yield replace(call, wait=timedelta(seconds=max(0.0, until - time.monotonic()))), mine
        finally:
            if other is mine:
                del self._in_flight[name]
                mine.over.set()

    async def _claim(self, server: Server, call: Call, send: Callable[[Statement[HeldClaim]], Awaitable[HeldClaim]]) -> HeldClaim:
        """Waits in the database if there is room, and not at all if there is none.  A claim in doubt always waits: for the end
        of a session that is lost, which takes no connection from a handler."""
        wait = call.in_doubt
        is_waiter = False
        before = time.monotonic()
        try:
            if not wait and seconds(call.wait):
                with suppress(IndexError):
                    wait = is_waiter = server.free.pop()
            with self.telemetry.span("claim"):
                return await send(self.servers.pinned(call.claim(wait)))
        except Exception as error:
            if wait and sqlstate(error) in ENDED_WAITS:
                raise InProgress("the request is running, and waiting for it took too long") from error
            raise
        finally:
            if is_waiter:
                server.free.append(True)
            if wait:
                call.progress.waited += time.monotonic() - before

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Serialization failures and deadlocks, with jitter."""
        for number in range(1, ATTEMPTS):
            try:
                return await attempt()
            except Exception as error:
                if isinstance(error, TimedOut) or sqlstate(error) not in RETRIED:       # which can be the cause of the other
                    raise
            await self.runtime.sleep(random.uniform(0, 0.02 * 2 ** number))
        return await attempt()

    # request()

    async def request(self, call: Call, handler: Callable[[Any], Any]) -> Result:
        refuse_nested(self.servers.source, "request()", "tx, and the functions of on(tx)")
        return await self._flown("request", call, lambda mine: self._request(mine, handler))

    async def _flown(self, name: str, call: Call, work: Callable[[Call], Awaitable[Result]]) -> Result:
        async def flown() -> Result:
            if not seconds(call.wait):
                return await work(call)
            async with self._single_flight(call) as (mine, flight):
                result = await work(mine)
                flight.stored = result.stored
                return result

        return await self.telemetry.reported(name, call.scope, call.progress, flown)

    async def _request(self, call: Call, handler: Callable[[Any], Any]) -> Result:
        deadline = Deadline(call.timeout_in_transaction)

        async def attempt() -> Result:
            now = call
            for last in (False, False, True):
                try:
                    return await self._request_once(now, deadline, handler)
                except _CommitInDoubt as in_doubt:
                    # It has committed, or it will not, or it has not yet ended: claim again to learn.
                    if last:
                        raise in_doubt.__cause__ or in_doubt
                    now = replace(call, wait=IN_DOUBT_WAIT, in_doubt=True)
            raise AssertionError

        return await self._retried(attempt)

    async def _request_once(self, call: Call, deadline: Deadline, handler: Callable[[Any], Any]) -> Result:
        session_lease, claim = await self._open(
            call.scope, lambda server, session: self._claim(server, call, session.begin), call.claim_limit)
        async with session_lease:
            if claim.outcome == "new":
                return await self._run(call, session_lease, claim, deadline, handler)
            if session_lease.server.backend.is_pool and (leave := session_lease.detach()):
                # Rolled back after the answer, so that a replay does not wait for it.
                await self.runtime.defer(functools.partial(leave, None, None, None))
        return answer(claim, call.progress)

    async def _run(self, call: Call, session_lease: SessionLease, claim: HeldClaim, deadline: Deadline,
                   handler: Callable[[Any], Any]) -> Result:
        session = session_lease.session
        call.progress.attempt += 1
        response = await self._handled(session_lease, deadline, handler)
        if not call.commits(response.status):
            return Result("new", response.status, response.body, response.headers, False, False)
        is_open = session.open
        if not is_open and session.failed:
            raise TransactionEnded("the handler continued after an error of the database, which undid its work")
        complete, whole = call.complete(session, response, None, claim.max_response_size)
        if not is_open:
            await self._ended(call, session, claim, response)
        try:
            await self._commit(session, complete)
        except Exception as error:
            if isinstance(error, (ClaimLost, ClaimNotFound)):
                # Another transaction than that of the claim.  Its work is rolled back, so a retry gets no success.
                await session.rollback()
                await self._ended(call, session, claim, Response(500))
            raise
        return Result("new", response.status, response.body, response.headers, False, whole)

    async def _commit(self, session: Session, complete: Statement[bool] | None) -> None:
        try:
            with self.telemetry.span("commit"):
                await self._answered(session, lambda: session.commit(complete), ANSWER_LIMIT)
        except Exception as error:
            if session.lost:
                raise _CommitInDoubt() from error
            raise

    async def _ended(self, call: Call, session: Session, claim: HeldClaim, response: Response) -> None:
        """The handler has ended the transaction by hand.  If it was committed,
        so was the claim: store the response, so that no retry runs the handler again."""
        if session.lost:
            raise TransactionEnded("the connection was lost in the handler, which hid the error")
        try:
            complete, _ = call.complete(session, response, claim.claim_token, claim.max_response_size)
            await self._answered(session, lambda: session.perform(self.servers.pinned(complete)), ANSWER_LIMIT)
        except TimedOut:
            raise
        except IdempotencyError:
            raise TransactionEnded("the handler rolled its transaction back, or took longer than the ttl of its claim") from None
        raise TransactionEnded("the handler committed its transaction; the key was completed in another one")

    # job()

    async def job(self, call: Call, function: Callable[[Any], Any], job_class: type[Job]) -> Result:
        refuse_nested(self.servers.source, "job()", "tx, and the functions of on(tx)")
        return await self._flown("job", call, lambda mine: self._job(mine, function, job_class))

    async def _job(self, call: Call, function: Callable[[Any], Any], job_class: type[Job]) -> Result:
        async def attempt() -> HeldClaim:
            # If one was committed whose answer was lost, the next is in progress until the lease ends.
            session_lease, found = await self._open(
                call.scope, lambda server, session: self._claim(server, call, session.perform), call.claim_limit)
            async with session_lease:
                return found

        started = time.monotonic()
        claim = await self._retried(attempt)
        if claim.outcome != "new":
            return answer(claim, call.progress)
        call.progress.attempt = claim.attempt or 1
        job = job_class(self, call, claim, started)
        stops: list[Work] = []
        deadline = job._deadline
        try:
            if time.monotonic() - started > job._lease / 3:
                # The claim has waited for an unknown time: count the lease from here.
                await job._renewed("heartbeat")
            stops = [self.runtime.start(job._heartbeat_loop), self.runtime.start(job._watch_lease)]
            with self.telemetry.span("handler"):
                returned = await self.runtime.bounded(lambda: function(job), deadline.left(), job._abort)
            if job._timed_out and job.result is None:
                raise deadline.error()
            job._unawaited.check()
            if job.result is None:
                if not isinstance(returned, Response):
                    raise NotFinished("the function of a job must call job.finish() or return a Response")
                await job._complete(returned)
            assert job.result is not None
            return job.result
        except BaseException as error:
            if job.result is None:
                await job._fail(error)
                if job._timed_out and isinstance(error, (ClaimLost, ScopeMoving)):
                    raise deadline.error() from error
            raise
        finally:
            job._done.set()
            for stop in stops:
                await stop()


def _as_json(name: str, found: Any) -> Any:
    """The value of a step, as it will be read again."""
    try:
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()                       # no half of a surrogate pair
        if NUL.search(text):
            raise ValueError("PostgreSQL cannot store NUL in text")
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"the step {name!r} returned a {type(found).__name__} that cannot be stored as JSON: {error}") from error
    return json.loads(text)


class Step:
    """The argument of a step's function: key, the same in all attempts, to
    send to the other side; lost, an event that is set when the claim is lost."""

    def __init__(self, key: str, lost: Any) -> None:
        self.key = key
        self.lost = lost


class Job:
    """The core of a job; SyncJob and AsyncJob are what users see."""

    def __init__(self, core: Core, call: Call, claim: HeldClaim, started: float) -> None:
        self.scope, self.key = call.scope, call.key
        self.attempt = claim.attempt or 1
        self.claim_token = claim.claim_token
        self.lost = core.runtime.event()
        """Set when another claimant has taken over, or the lease ran out."""
        self.result: Result | None = None
        self._core, self._call, self._claim = core, call, claim
        self._lease = claim.lease_seconds or 0.0
        self._until = started + self._lease
        self._done = core.runtime.event()
        state = claim.recovery_state
        self._values: dict[str, Any] = dict(state) if isinstance(state, Mapping) else {}
        self._seen: set[str] = set()        # in this attempt
        self._running = self._finishing = False
        self._undone = False
        """The last step was rolled back."""
        self._deadline = Deadline(call.timeout)
        # The others hold no connection.
        self._deadline_of_last = self._deadline if call.timeout is not None else Deadline(call.timeout_in_transaction)
        self._timed_out = self._failed = False
        self._unawaited = Unawaited()

    def _statement(self, name: str, *arguments: Any, **named: Any) -> Any:
        return make[name].make(None, self.scope, self.key, *arguments, claim_token=self.claim_token, **named)

    async def _perform(self, make: Callable[[Session], Statement[T]], limit: float | None = None) -> T:
        """With a limit, it waits neither for the move of a scope nor, after that, for a silent server."""
        async def attempt() -> T:
            for last in (False, False, True):
                try:
                    # A call with its token can be sent again.
                    return await self._core.perform_for_scope(self.scope, make, limit is None, limit or ANSWER_LIMIT, True)
                except Exception as error:
                    # Do not lose the work of a step for one server that is silent or cannot be reached.
                    if last or limit is not None or not (isinstance(error, TimedOut) or self._running and (
                            connection_lost(error) or pool_exhausted(error))):
                        raise
            raise AssertionError

        try:
            return await (self._while_held(attempt) if limit is None else self._core._retried(attempt))
        except (ClaimLost, ClaimNotFound):
            if not self._finishing and self.result is None:
                self.lost.set()
            raise

    async def _while_held(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry while the scope is being moved, until the lease ends, so that the work of a step is not lost."""
        until = self._until
        while True:
            try:
                return await self._core._retried(attempt)
            except ScopeMoving:
                if self._timed_out or time.monotonic() >= until:
                    raise

    async def _abort(self) -> None:
        """The time is over, and the function has not returned."""
        self._timed_out = True
        self.lost.set()
        if not self._finishing:
            await self._fail(self._deadline.error())

    def _check(self) -> None:
        if self._timed_out:
            raise self._deadline.error()
        if time.monotonic() >= self._until:
            self.lost.set()
        if self.lost.is_set():
            raise ClaimLost("the claim was lost: its lease ended, or another claimant took over")
        if self._running:
            raise TypeError("steps must not run at the same time: one is running")
        if self.result is not None:
            raise TypeError("the job is finished")

    async def _step(self, name: str, function: Callable[[Step], Any]) -> Any:
        self._check()
        if not isinstance(name, str) or "\0" in name or not 1 <= len(name.encode(errors="replace")) <= MAX_STEP or SURROGATE.search(name):
            raise TypeError(f"the name of a step must be a str of 1 to {MAX_STEP} bytes, without NUL, not {name!r}")
        if name in self._seen:
            raise TypeError(f"the step {name!r} has already run in this attempt: each step needs its own name")
        if name in self._values:
            self._seen.add(name)
            return json.loads(json.dumps(self._values[name]))
        self._running = True
        try:
            found = await maybe_await(function(Step(step_key(self.scope, self.key, name), self.lost)))
            values = {**self._values, name: _as_json(name, found)}
            if not self.lost.is_set():
                await self._renewed("checkpoint", name, values)
        finally:
            self._running = False
        self._check()
        self._values = values
        self._seen.add(name)
        return json.loads(json.dumps(values[name]))     # the next checkpoint stores it again

    async def _finish(self, function: Callable[[Any], Any]) -> Result:
        self._check()
        self._running = True
        self._finishing = self._undone = True
        try:
            async def attempt() -> Result:
                try:
                    return await self._finish_once(function)
                except _CommitInDoubt as in_doubt:
                    return await self._resolve_in_doubt(function, in_doubt.__cause__)

            self.result = await self._while_held(attempt)
            self._undone = False
        except (ClaimLost, ClaimNotFound):
            self.lost.set()
            raise
        finally:
            self._running = self._finishing = False
        assert self.result is not None
        if not self._call.commits(self.result.status):
            await self._fail(None, f"status {self.result.status}")
        return self.result

    async def _finish_once(self, function: Callable[[Any], Any]) -> Result:
        core, call = self._core, self._call
        # Check that this attempt still holds the claim.  From here to the end no other attempt can take over.
        heartbeat = core.servers.pinned(self._statement("heartbeat", lease=call.lease))
        session_lease, _ = await core._open(call.scope, lambda server, session: session.begin(heartbeat), ANSWER_LIMIT)
        async with session_lease as session:
            response = await core._handled(session_lease, self._deadline_of_last, function, "last step")
            if not call.commits(response.status):
                return Result("new", response.status, response.body, response.headers, False, False)
            if not session.open:
                raise TransactionEnded("the last step ended its transaction, or continued after an error in it")
            complete, whole = call.complete(session, response, self.claim_token, self._claim.max_response_size)
            # With its token it would succeed in another transaction, too, that the function has begun by hand.
            await core._commit(session, core.servers.pinned(complete))
        return Result("new", response.status, response.body, response.headers, False, whole)

    async def _resolve_in_doubt(self, function: Callable[[Any], Any], cause: BaseException | None) -> Result:
        """After a COMMIT whose answer was lost.  The last step runs again if it has not committed: it waits until that is known."""
        try:
            return await self._finish_once(function)
        except (ClaimLost, ClaimNotFound):
            # It was committed if the record was completed with this token; an attempt that took over has another.
            complete: Statement[bool] = self._statement("complete", 200)
            lookup: Statement[functions.Lookup] = make["lookup"].make(None, self.scope, self.key)
            if await self._perform(lambda session: complete):
                raise
            found = await self._perform(lambda session: lookup)
            return stored_response("new", found, self._call.progress, False)
        except _CommitInDoubt as in_doubt:
            raise in_doubt.__cause__ or in_doubt

    async def _complete(self, response: Response) -> None:
        """Without a business write."""
        self._check()
        if self._undone and 200 <= response.status < 300:
            raise TransactionEnded(f"the last step was rolled back, and the job returned {response.status}")
        if not self._call.commits(response.status):
            await self._fail(None, f"status {response.status}")
            self.result = Result("new", response.status, response.body, response.headers, False, False)
            return
        whole = False

        def complete(session: Session) -> Statement[bool]:
            nonlocal whole
            statement, whole = self._call.complete(session, response, self.claim_token, self._claim.max_response_size)
            return statement

        await self._perform(complete)
        self.result = Result("new", response.status, response.body, response.headers, False, whole)

    async def _fail(self, error: BaseException | None, text: str | None = None) -> None:
        """So that the next attempt need not wait for the lease."""
        if self._failed or self.lost.is_set() and not self._timed_out or isinstance(error, (ClaimLost, ClaimNotFound)):
            return
        self._failed = True
        text = text or f"{type(error).__name__}: {error}"
        try:
            failed: Statement[bool] = self._statement("fail", text.replace("\0", "")[:MAX_ERROR])
            await self._core.runtime.finish(functools.partial(self._perform, lambda session: failed, ANSWER_LIMIT))
        except Exception as failure:
            if error is not None:
                error.add_note(f"the claim could not be failed, its lease will end: {failure}")

    async def _renewed(self, name: str, *arguments: Any, limit: float | None = None) -> None:
        before = time.monotonic()
        renewed: Statement[Any] = self._statement(name, *arguments, lease=self._call.lease)
        await self._perform(lambda session: renewed, limit)
        self._until = before + self._lease

    async def _heartbeat_loop(self) -> None:
        """Renews the lease every third of it, until the job is done or lost."""
        pause = self._lease / 3
        while not await self._core.runtime.wait(self._done, max(0.01, min(pause, self._until - time.monotonic()))):
            pause = self._lease / 3
            if self._finishing:             # which holds the record itself
                self._until = time.monotonic() + self._lease
                continue
            if self.lost.is_set():
                return
            try:
                # If the connection is silent, there is time for another.
                left = self._until - time.monotonic() - ABORT_DELAY
                await self._renewed("heartbeat", limit=max(1.0, min(ANSWER_LIMIT, left / 3)))
            except (ClaimLost, ClaimNotFound):
                return
            except Exception:
                # The database cannot be reached: try again, as long as the lease lasts.
                if time.monotonic() >= self._until:
                    self.lost.set()
                    return
                pause = 0.1

    async def _watch_lease(self) -> None:
        """The end of the lease, by the clock: a heartbeat that gets no connection neither succeeds nor fails."""
        while not await self._core.runtime.wait(self._done, max(0.01, self._until - time.monotonic())):
            if time.monotonic() >= self._until and not self._finishing:
                self.lost.set()
                return
