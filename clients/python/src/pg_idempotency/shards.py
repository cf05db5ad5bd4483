"""
Where scopes live: on one server, or on the shards of a router.

The core asks for a scope's place, and gets a session there.  The router is asked
once for each scope, and what it says is remembered.  That may be old: so each
transaction begins with idem_here(), in the statement that comes first anyhow,
and a shard that the scope has left refuses it before anything is done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .errors import IdempotencyError, ScopeMoving, restated, sqlstate
from .functions import Statement, here, kept_here, shard_of
from .postgres import Backend, connection_lost
from .shells import Shell, value

T = TypeVar("T")
ROUTER_SCHEMA = "idempotency"
DEFAULT_WAITERS = 5
KNOWN = 10_000
PATIENCE = 10.0
"""How many seconds a scope may take to be moved."""
TRIES = 3
UNKNOWN_THERE = {"42883", "42P01"}
"""No such function, no such view."""


class Waiters:
    """At most so many of a pool's connections sleep in the database at once."""

    def __init__(self, limit: int) -> None:
        self._free = threading.BoundedSemaphore(limit) if limit > 0 else None

    def enter(self) -> bool:
        return self._free is not None and self._free.acquire(blocking=False)

    def leave(self) -> None:
        if self._free is not None:
            self._free.release()


class Place:
    """A server with the extension: its sessions, and how many of them may wait."""

    def __init__(self, backend: Backend, max_waiters: int | None) -> None:
        if max_waiters is None:
            max_waiters = backend.size // 2 if backend.size else DEFAULT_WAITERS
        self.backend = backend
        self.waiters = Waiters(max_waiters)


class Places(Protocol):
    source: Any
    """Names what handlers hold a connection of."""

    async def of(self, scope: str | None, until: float) -> Place:
        """Where it lives.  Waits until then while it is being moved."""

    def forget(self, scope: str | None) -> None:
        """Ask again: it may live elsewhere."""

    async def anywhere(self, statement: Statement[T]) -> T:
        """A function that is about no scope, in a transaction of its own."""

    def kept(self, statement: Statement[T]) -> Statement[T]:
        """A call that keeps its scope where it is until the transaction ends."""

    def beginning(self, scope: str | None) -> Statement[Any] | None:
        """What does so in a transaction that begins with no call."""


class OneServer:
    """Everything lives there, and nothing moves."""

    def __init__(self, place: Place) -> None:
        self.source = place.backend.source
        self.place = place

    async def of(self, scope: str | None, until: float) -> Place:
        return self.place

    def forget(self, scope: str | None) -> None:
        pass

    async def anywhere(self, statement: Statement[T]) -> T:
        async with self.place.backend.session() as session:
            result: T = await session.perform(statement)
            return result

    def kept(self, statement: Statement[T]) -> Statement[T]:
        return statement

    def beginning(self, scope: str | None) -> None:
        return None


class Shards:
    """connect(conninfo) is the user's, and place(what it returns) ours."""

    def __init__(self, router: Backend, connect: Callable[[str], Any], place: Callable[[Any], Place],
                 shell: Shell) -> None:
        self.source = router.source
        self._router, self._connect, self._place, self._shell = router, connect, place, shell
        self._lock = threading.Lock()
        self._known: dict[str, Place] = {}              # by scope, the oldest first
        self._places: dict[str, Place] = {}             # by connection string

    async def of(self, scope: str | None, until: float) -> Place:
        if not isinstance(scope, str):
            raise TypeError("with several shards the scope says on which a transaction runs: transaction(scope)")
        place = self._known.get(scope)
        if place is None:
            place = await self._at(await self._asked(scope, until))
            with self._lock:
                self._known[scope] = place
                if len(self._known) > KNOWN:
                    del self._known[next(iter(self._known))]
        return place

    def forget(self, scope: str | None) -> None:
        with self._lock:
            self._known.pop(scope or "", None)

    async def anywhere(self, statement: Statement[T]) -> T:
        try:
            async with self._router.session() as session:
                result: T = await session.perform(statement)
                return result
        except Exception as error:
            if sqlstate(error) not in UNKNOWN_THERE:
                raise
            missing = IdempotencyError(f"the router has no {statement.function.removeprefix('idem_')}(), which is each "
                                       "shard's own: use a client over that shard")
            missing.sqlstate = sqlstate(error)
            raise missing from error

    def kept(self, statement: Statement[T]) -> Statement[T]:
        return kept_here(statement)

    def beginning(self, scope: str | None) -> Statement[str] | None:
        return None if scope is None else here(scope)

    async def _asked(self, scope: str, until: float) -> str:
        """The connection string of the scope's shard."""
        lost = 0
        while True:
            try:
                async with self._router.session() as session:
                    found: str = await session.perform(shard_of(scope))
                    return found
            except Exception as error:
                left = until - time.monotonic()
                if connection_lost(error):              # a pool may have kept it since the router's restart
                    lost += 1
                    if lost == TRIES:
                        raise
                elif sqlstate(error) != ScopeMoving.sqlstate:
                    raise
                elif left <= 0:
                    raise restated(ScopeMoving, error)
            await self._shell.sleep(min(random.uniform(0.05, 0.25), max(0.0, left)))

    async def _at(self, conninfo: str) -> Place:
        """Made once."""
        async def made() -> Place:
            if conninfo not in self._places:
                self._places[conninfo] = self._place(await value(self._connect(conninfo)))
            return self._places[conninfo]

        place = self._places.get(conninfo)
        return await self._shell.shared(conninfo, made) if place is None else place
