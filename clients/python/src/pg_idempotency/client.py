"""Idempotency and AsyncIdempotency, the clients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .core import Call, Core, Job, Response, Result, Step, hash_of, stores
from .functions import AsyncFunctions, Interval, Statement, SyncFunctions, as_interval
from .handlers import DEFAULT_TIMEOUT, timeout_seconds
from .intervals import seconds
from .postgres import PsycopgBackend, execute
from .shards import ROUTER_SCHEMA, Server, Servers, Shards
from .runtimes import AsyncRuntime, Runtime, SyncRuntime, run, synchronous
from .telemetry import Outcome, Telemetry, Tracing
from .transaction_handle import unawaited_of

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])
JobFunction = TypeVar("JobFunction", bound=Callable[..., Any])
Ended = TypeVar("Ended")


class SyncJob(Job):
    def step(self, name: str, function: Callable[[Step], T]) -> T:
        """Run the function, unless an earlier attempt has.  Its value is stored as JSON."""
        return run(self._step(name, function))      # type: ignore[no-any-return]

    def finish(self, function: Callable[[Any], Response]) -> Result:
        """The last step: its writes and the response are committed together."""
        return run(self._finish(function))


class AsyncJob(Job):
    def step(self, name: str, function: Callable[[Step], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Run the function, unless an earlier attempt has.  Its value is stored as JSON."""
        return self._unawaited.follow("job.step", lambda: self._step(name, function))

    def finish(self, function: Callable[[Any], Awaitable[Response]]) -> Coroutine[Any, Any, Result]:
        """The last step: its writes and the response are committed together."""
        return self._unawaited.follow("job.finish", lambda: self._finish(function))


class OnHandle(SyncFunctions):
    """The functions on the user's connection, in its current transaction."""

    def __init__(self, handle: Any, schema: str, core: Core) -> None:
        if inspect.iscoroutinefunction(getattr(handle, "execute", None)):
            raise TypeError(f"{type(handle).__name__} is asynchronous: use AsyncIdempotency")
        self._handle, self._schema, self._core = handle, schema, core

    def _perform(self, statement: Statement[T]) -> T:
        return run(execute(self._handle, self._core.made(statement), self._schema))


class AsyncOnHandle(AsyncFunctions):
    def __init__(self, handle: Any, schema: str, core: Core) -> None:
        self._handle, self._schema, self._core = handle, schema, core

    def _perform(self, statement: Statement[T]) -> Coroutine[Any, Any, T]:
        def call() -> Coroutine[Any, Any, T]:
            return execute(self._handle, self._core.made(statement), self._schema)

        unawaited = unawaited_of(self._handle)
        return unawaited.follow(f"on(tx).{statement.function.removeprefix('idem_')}", call) if unawaited else call()


def servers_of(source: Any, schema: str, shards: Callable[[str], Any] | None, runtime: Runtime, max_waiters: int | None) -> Servers:
    """If there are shards, the source is their router."""
    def make_server(source: Any) -> Server:
        make_backend = getattr(source, "backend", None)
        return Server(make_backend(schema, runtime.asynchronous) if callable(make_backend)
                      else PsycopgBackend(source, schema, runtime.asynchronous), max_waiters)

    if shards is None:
        return Servers(make_server(source))
    return Shards(PsycopgBackend(source, ROUTER_SCHEMA, runtime.asynchronous), shards, make_server, runtime)


def chosen(name: str, interval: Interval, ms: float | None = None, default: Interval = None) -> Interval:
    """The interval of a call, or the client's.  Raises an error if it makes no sense for a request or a job."""
    if interval is None and ms is None:
        return default
    found = as_interval(name, interval, ms)
    if name == "ttl" and seconds(found) == 0:
        raise ValueError("ttl must not be 0, because the claim would expire before the response is stored: a duration is like "
                         "'24 hours'; omit ttl for the server's default")
    if name == "wait" and seconds(found) is None:       # the client has to know it, too
        raise ValueError(f"wait must be a duration such as '5s', not {interval!r}")
    return found


class Defaults:
    """The options of a client, and the code that both kinds share."""

    core: Core
    job_class: type[Job]
    runtime_class: type[SyncRuntime] | type[AsyncRuntime]

    def __init__(self, source: Any, *, schema: str = "idem", shards: Callable[[str], Any] | None = None,
                 max_waiters: int | None = None, wait: Interval = None, ttl: Interval = None, lease: Interval = None,
                 timeout: Interval = DEFAULT_TIMEOUT, timeout_ms: float | None = None,
                 on_outcome: Callable[[Outcome], Any] | None = None, tracing: Tracing | None = None) -> None:
        runtime = self.runtime_class()
        self.core = Core(servers_of(source, schema, shards, runtime, max_waiters), runtime, Telemetry(on_outcome, tracing))
        self.schema = schema
        self._wait, self._ttl, self._lease = chosen("wait", wait), chosen("ttl", ttl), chosen("lease", lease)
        # By default, of handlers that hold a connection alone.
        self._is_default = timeout is DEFAULT_TIMEOUT and timeout_ms is None
        self._timeout = timeout_seconds(None if timeout is DEFAULT_TIMEOUT else timeout, timeout_ms)

    def call(self, scope: str, key: str, *, request_hash: bytes | Statement[bytes] | None = None, method: str | None = None,
             path: str | None = None, body: str | bytes | None = None, ttl: Interval = None, ttl_ms: float | None = None,
             wait: Interval = None, wait_ms: float | None = None, lease: Interval = None, lease_ms: float | None = None,
             timeout: Interval = None, timeout_ms: float | None = None, store: Callable[[int], bool] = stores,
             max_response_size: int | None = None, as_text: bool = False) -> Call:
        """A request, with the client's defaults for the options that are None."""
        if not isinstance(scope, str) or not scope:
            raise TypeError(f"scope must be a str, the user or tenant that owns the key, not {scope!r}")
        if not isinstance(key, str):
            raise TypeError(f"key must be a str, the Idempotency-Key of the request, not {key!r}")
        bound = self._timeout if timeout is None and timeout_ms is None else timeout_seconds(timeout, timeout_ms)
        return Call(scope, key, hash_of(request_hash, method, path, body), chosen("ttl", ttl, ttl_ms, self._ttl),
                    chosen("wait", wait, wait_ms, self._wait), chosen("lease", lease, lease_ms, self._lease), bound,
                    DEFAULT_TIMEOUT.total_seconds() if bound is None and self._is_default else bound, store, max_response_size, as_text)


class _Client(Defaults, Generic[Handler, JobFunction, Ended]):
    """The methods that differ only in their types: Ended is a Result, or a coroutine of one."""

    def _ended(self, work: Coroutine[Any, Any, Result]) -> Ended:
        raise NotImplementedError

    def request(self, scope: str, key: str, handler: Handler, *, request_hash: bytes | None = None, method: str | None = None,
                path: str | None = None, body: str | bytes | None = None, ttl: Interval = None, ttl_ms: float | None = None,
                wait: Interval = None, wait_ms: float | None = None, timeout: Interval = None, timeout_ms: float | None = None,
                store: Callable[[int], bool] = stores) -> Ended:
        """Claim, handler(transaction's connection), complete and COMMIT, in one transaction.

        Serialization failures and deadlocks run it again.  Raises InProgress, KeyReused, KeyExpired, KeyInvalid,
        RateLimited, TimedOut, and what the handler raises, after the transaction was rolled back."""
        return self._ended(self.core.request(self._call(locals()), handler))

    def job(self, scope: str, key: str, function: JobFunction, *, request_hash: bytes | None = None, method: str | None = None,
            path: str | None = None, body: str | bytes | None = None, ttl: Interval = None, ttl_ms: float | None = None,
            wait: Interval = None, wait_ms: float | None = None, lease: Interval = None, lease_ms: float | None = None,
            timeout: Interval = None, timeout_ms: float | None = None, store: Callable[[int], bool] = stores) -> Ended:
        """A claim that commits, steps, and a last one that completes.

        Raises as request() does, and ClaimLost when another claimant has taken over."""
        return self._ended(self.core.job(self._call(locals()), function, self.job_class))

    def _call(self, given: Mapping[str, Any]) -> Call:
        """given: the arguments of a method, as locals() has them."""
        return self.call(**{name: one for name, one in given.items() if name not in ("self", "handler", "function")})


class Idempotency(_Client[Callable[[Any], Response], Callable[[SyncJob], Any], Result], SyncFunctions):
    """The client for synchronous programs.

    source is a pool with .connection(), a function that returns a connection in a context manager, a connection string, or an adapter
    such as pg_idempotency.sqlalchemy.SQLAlchemy.  Each method is a transaction of its own; on(handle) has the same methods for your
    transaction.

    With several servers, source is the router's.  shards(conninfo) is called once for each connection string that the router names,
    which has no user and no password, and returns what source may be.  schema is the extension's there, and max_waiters each server's.

    on_outcome is called after each request and job, with its Outcome; tracing is an object such as
    pg_idempotency.opentelemetry.OpenTelemetry().
    """

    job_class, runtime_class = SyncJob, SyncRuntime

    def _perform(self, statement: Statement[T]) -> T:
        return run(self.core.perform(statement))

    def _ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        return run(work)

    def on(self, handle: Any) -> SyncFunctions:
        """The functions on a psycopg connection or cursor, or an SQLAlchemy Connection or Session, in the transaction that it is in."""
        return OnHandle(handle, self.schema, self.core)

    def transaction(self, scope: str | None = None) -> AbstractContextManager[Any]:
        """A connection in a transaction, which is committed at the end and rolled back after an error.

        With several servers it is where the scope lives, and the scope is needed.  It has no timeout, and nothing runs it again."""
        return synchronous(self.core.open_transaction(scope))


def _coroutine(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a coroutine function: frameworks run any other function in a thread."""
    @functools.wraps(method)
    async def called(*arguments: Any, **named: Any) -> Any:
        return await method(*arguments, **named)
    return called


class AsyncIdempotency(_Client[Callable[[Any], Awaitable[Response]], Callable[[AsyncJob], Awaitable[Any]],
                               Coroutine[Any, Any, Result]], AsyncFunctions):
    """The client for asyncio: as Idempotency, with coroutines.  shards may be one, too."""

    job_class, runtime_class = AsyncJob, AsyncRuntime
    if not TYPE_CHECKING:
        request, job = _coroutine(_Client.request), _coroutine(_Client.job)

    async def _perform(self, statement: Statement[T]) -> T:
        return await self.core.perform(statement)

    def _ended(self, work: Coroutine[Any, Any, Result]) -> Coroutine[Any, Any, Result]:
        return work

    def on(self, handle: Any) -> AsyncFunctions:
        """The functions on a psycopg AsyncConnection or AsyncCursor, or an
        SQLAlchemy AsyncConnection or AsyncSession, in the transaction that it is in."""
        return AsyncOnHandle(handle, self.schema, self.core)

    def transaction(self, scope: str | None = None) -> AbstractAsyncContextManager[Any]:
        """See Idempotency.transaction()."""
        return self.core.open_transaction(scope)
