"""
Django's connections: requests and jobs in the transaction that models write in.

	Idempotency(Django("default"))

The handler gets the connection.  transaction.atomic() in it is a savepoint, and on_commit() runs after COMMIT.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from django.db import connections, transaction

from .adapter import AdapterSession
from .errors import IdempotencyError, sqlstate
from .postgres import connection_lost, pool_exhausted
from .runtimes import THREAD

__all__ = ["Django"]


class Django:
    """The source of a client: the alias of one of settings.DATABASES."""

    def __init__(self, using: str = "default") -> None:
        self.using = using

    def backend(self, schema: str, asynchronous: bool) -> DjangoBackend:
        if asynchronous:
            raise TypeError("Django's transactions are synchronous: use Idempotency")
        return DjangoBackend(self, schema)


_aliases: set[str] = set()


def _after_fork() -> None:
    """The connection is the parent's, and two processes would read each other's answers.  Not close(), which would end the parent's session."""
    for alias in _aliases:
        connections[alias].connection = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class DjangoBackend:
    is_pool = False
    size = None

    def __init__(self, source: Django, schema: str) -> None:
        self.source, self._schema = source, schema
        _aliases.add(source.using)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[DjangoSession]:
        connection = connections[self.source.using]
        if connection.vendor != "postgresql":
            raise TypeError(f"the database {self.source.using!r} is of {connection.vendor}, not of PostgreSQL")
        session = DjangoSession(connection, self._schema)
        try:
            session.connect()
            yield session
        finally:
            await session.rollback()
            if threading.current_thread().name == THREAD:       # no other code closes its connection
                connection.close()
        session.run_hooks()


class DjangoSession(AdapterSession):
    def __init__(self, connection: Any, schema: str) -> None:
        super().__init__(schema)
        self._connection = connection
        self._atomic: Any = None
        self._link: Any = None
        """The driver's connection: Django replaces one that is lost."""
        self._depth = 0
        """Of savepoints, when the transaction has begun."""
        self._hooks: list[Any] = []
        """Those of on_commit(), when COMMIT has succeeded."""

    def connect(self) -> None:
        try:
            self._connection.ensure_connection()
        except Exception:
            self._connection.close()            # one that Django has half made
            raise

    @property
    def open(self) -> bool:                 # type: ignore[override]
        return bool(self._atomic and not self.lost and self._driver() is self._link and not self._connection.needs_rollback
                    and len(self._connection.savepoint_ids) == self._depth)

    def _begin(self) -> Any:
        connection = self._connection
        self._depth = len(connection.savepoint_ids) + connection.in_atomic_block
        self._atomic = transaction.atomic(using=connection.alias, durable=True)
        try:
            commits = connection.in_atomic_block or connection.get_autocommit()
            if commits:
                self._atomic.__enter__()
        except RuntimeError as error:
            raise RuntimeError("a request or job has its own transaction, and cannot run in transaction.atomic(): in a "
                               "view with ATOMIC_REQUESTS, use transaction.non_atomic_requests") from error
        except Exception:
            if not connection.in_atomic_block:
                connection.close()              # one that is known to be lost
            raise
        if not commits:
            raise TypeError(f"autocommit of the database {connection.alias!r} is off, so Django would not commit the request")
        self._link = self._driver()
        return connection

    def _statements(self) -> Any:
        return self._connection

    def _commit(self) -> None:
        hooks: list[Any] = []
        if self._depth == 0:                    # otherwise they wait for the transaction of a test
            hooks, self._connection.run_on_commit = self._connection.run_on_commit, hooks
        self._atomic.__exit__(None, None, None)
        self._atomic, self._hooks = None, hooks

    def run_hooks(self) -> None:
        """After COMMIT, and outside of its limit.  An error is raised, as Django does.  The cores must not take it for an error
        of the transaction, which they would retry."""
        if not self._hooks:
            return
        self._connection.run_on_commit, self._hooks = self._hooks, []
        try:
            self._connection.run_and_clear_commit_hooks()
        except Exception as error:
            if sqlstate(error) is None and not isinstance(error, IdempotencyError) and not connection_lost(error) and not pool_exhausted(error):
                raise
            # Not "from error", by which they would judge this error, too.
            raise RuntimeError(f"the transaction was committed, but a hook of on_commit() failed: {error}")

    def _rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is None or not self._connection.in_atomic_block or len(self._connection.savepoint_ids) < self._depth:
            return                              # not entered, or left
        while len(self._connection.savepoint_ids) > self._depth:        # blocks that the handler has left open
            transaction.atomic(using=self._connection.alias).__exit__(RuntimeError, None, None)
        try:
            if self._depth == 0:
                self._driver().rollback()
        except Exception:
            self._connection.close()            # in the block: Django's own rollback would connect again, without a limit
        atomic.__exit__(RuntimeError, None, None)

    def _discard(self) -> None:
        self._connection.close()

    def _is_gone(self, error: BaseException) -> bool:
        return self._link is None or self._driver() is not self._link or bool(self._link.closed)

    def _driver(self) -> Any:
        return self._connection.connection
