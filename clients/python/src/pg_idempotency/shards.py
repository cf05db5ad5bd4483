"""
Where scopes live: on one server, or on the shards of a router.

The core asks for the server of a scope, and gets a session there.  The router is asked once for each scope, and its answer
is cached.  That may be old: so each transaction begins with idem_pin_scope(), in the statement that comes first anyhow, and
a shard that the scope has left refuses it before anything is done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import IdempotencyError, ScopeMoving, restated, sqlstate
from .functions import Statement, scalar, with_pinned_scope
from .postgres import Backend, connection_lost
from .runtimes import Runtime, answered, maybe_await

T = TypeVar("T")
ROUTER_SCHEMA = "idempotency"
DEFAULT_WAITERS = 5
MAX_KNOWN_SCOPES = 10_000
MOVE_WAIT = 10.0
"""How many seconds a call waits for the end of a move."""
ROUTER_LIMIT = 30.0
"""How many seconds the router has for an answer."""
TRIES = 3
UNDEFINED = {"42883", "42P01"}
"""undefined_function and undefined_table."""


class Server:
    """A server with the extension: its sessions, and how many of them may wait."""

    def __init__(self, backend: Backend, max_waiters: int | None) -> None:
        if max_waiters is None:
            max_waiters = backend.size // 2 if backend.size else DEFAULT_WAITERS
        self.backend = backend
        self.free = [True] * max_waiters
        """A place for each that may still wait.  Without a lock, which the exception of a signal handler could leave locked."""


class Servers:
    """One server: everything lives there, and nothing moves.  Shards overrides this."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def source(self) -> Any:
        """The pool whose connection a handler holds."""
        return self.server.backend.source

    async def server_of(self, scope: str | None, until: float) -> Server:
        """The server where the scope lives.  Waits until then while the scope is being moved."""
        return self.server

    def forget(self, scope: str | None, moved: bool = False) -> None:
        """Ask again: it may live elsewhere.  moved: its shard has said so."""

    async def perform_unscoped(self, statement: Statement[T]) -> T:
        """A function without a scope, in a transaction of its own."""
        async with self.server.backend.session() as session:
            result: T = await session.perform(statement)
            return result

    def pinned(self, statement: Statement[T]) -> Statement[T]:
        """The call, which also pins its scope to the server until the transaction ends."""
        return statement

    def pin(self, scope: str | None) -> Statement[Any] | None:
        """The statement that pins the scope in a transaction that begins without a call; None if there is one server."""
        return None


class Shards(Servers):
    """The user's connect(conninfo) returns a source, of which make_server(source) makes a Server."""

    def __init__(self, router: Backend, connect: Callable[[str], Any], make_server: Callable[[Any], Server], runtime: Runtime) -> None:
        super().__init__(Server(router, 0))
        self._connect, self._make_server, self._runtime = connect, make_server, runtime
        self._lock = threading.Lock()
        self._known: dict[str, Server] = {}             # by scope, the oldest first
        self._refused: set[str] = set()                 # by a shard: the router's map may be old
        self._servers: dict[str, Server] = {}           # by connection string

    async def server_of(self, scope: str | None, until: float) -> Server:
        if not isinstance(scope, str):
            raise TypeError("with several shards, a transaction needs a scope: transaction(scope)")
        server = self._known.get(scope)
        if server is None:
            server = await self._server_at(await self._ask_router(scope, until))
            with self._lock:
                self._known[scope] = server
                if len(self._known) > MAX_KNOWN_SCOPES:
                    del self._known[next(iter(self._known))]
        return server

    def forget(self, scope: str | None, moved: bool = False) -> None:
        with self._lock:
            self._known.pop(scope or "", None)
            if moved and scope:
                self._refused.add(scope)

    async def perform_unscoped(self, statement: Statement[T]) -> T:
        try:
            return await super().perform_unscoped(statement)
        except Exception as error:
            if sqlstate(error) not in UNDEFINED:
                raise
            missing = IdempotencyError(f"the router has no {statement.function.removeprefix('idem_')}(), which is each "
                                       "shard's own: use a client over that shard")
            missing.sqlstate = sqlstate(error)
            raise missing from error

    def pinned(self, statement: Statement[T]) -> Statement[T]:
        return with_pinned_scope(statement)

    def pin(self, scope: str | None) -> Statement[str] | None:
        return None if scope is None else scalar("idem_pin_scope", scope=scope)

    async def _ask_router(self, scope: str, until: float) -> str:
        """The connection string of the scope's shard."""
        lost = 0
        # After a refusal, the router asks all shards.
        question: Statement[str] = scalar("idem_find_shard" if scope in self._refused else "idem_shard", scope=scope)
        self._refused.discard(scope)
        while True:
            reached = False
            try:
                async with self.server.backend.session() as session:
                    reached = True
                    found: str = await answered(self._runtime, lambda: session.perform(question), ROUTER_LIMIT, session.abort)
                    return found
            except Exception as error:
                left = until - time.monotonic()
                if reached and connection_lost(error):  # a pool may have kept it since the router's restart
                    lost += 1
                    if lost == TRIES:
                        raise
                elif sqlstate(error) != ScopeMoving.sqlstate:
                    raise
                elif left <= 0:
                    raise restated(ScopeMoving, error)
            await self._runtime.sleep(min(random.uniform(0.05, 0.25), max(0.0, left)))

    async def _server_at(self, conninfo: str) -> Server:
        """Made once."""
        async def made() -> Server:
            if conninfo not in self._servers:
                self._servers[conninfo] = self._make_server(await maybe_await(self._connect(conninfo)))
            return self._servers[conninfo]

        server = self._servers.get(conninfo)
        return await self._runtime.shared(conninfo, made) if server is None else server
