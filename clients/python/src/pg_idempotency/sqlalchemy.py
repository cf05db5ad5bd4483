"""
SQLAlchemy: requests and jobs on the connections of an Engine or AsyncEngine.

	Idempotency(SQLAlchemy(engine))
	AsyncIdempotency(SQLAlchemy(engine, sessionmaker(class_=AsyncSession)))

The handler gets the Connection of the claim's transaction or, with a factory of sessions, a Session that joins it.
session.commit() in the handler flushes, and the transaction is committed together with the response; begin_nested() makes a
savepoint.  A Session that chooses another connection (binds, get_bind(), bind_arguments) is refused before its first statement.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import make_transient

from .adapter import AdapterSession
from .errors import TransactionEnded
from .postgres import OpenedSession
from .runtimes import maybe_await

__all__ = ["SQLAlchemy"]


class SQLAlchemy:
    """The source of a client: an engine and, for handlers that get a Session, a factory of sessions."""

    def __init__(self, engine: Any, session: Callable[..., Any] | None = None) -> None:
        self.engine = engine
        self.make_session = session

    def backend(self, schema: str, asynchronous: bool) -> SQLAlchemyBackend:
        if not callable(getattr(self.engine, "connect", None)) or not hasattr(self.engine, "dialect"):
            raise TypeError(f"an Engine or AsyncEngine is required, not a {type(self.engine).__name__}")
        if asynchronous != hasattr(self.engine, "sync_engine"):
            raise TypeError("use an AsyncEngine with AsyncIdempotency, and an Engine with Idempotency")
        if self.engine.dialect.name != "postgresql":
            raise TypeError(f"the engine is of {self.engine.dialect.name}, not of PostgreSQL")
        if hasattr(self.make_session, "registry"):
            raise TypeError("a scoped_session has one session for each thread, and each request needs its own: pass its session_factory")
        return SQLAlchemyBackend(self, schema)


_engines: WeakSet[Any] = WeakSet()


def _after_fork() -> None:
    """The connections are the parent's, and two processes would read each other's answers."""
    for engine in _engines:
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SQLAlchemyBackend:
    is_pool = False
    """A transaction is rolled back by the thread that began it: no background thread takes a connection of the engine."""

    def __init__(self, source: SQLAlchemy, schema: str) -> None:
        self._source, self._schema = source, schema
        _engines.add(getattr(source.engine, "sync_engine", source.engine))
        size = getattr(self.source, "size", None)
        self.size: int | None = size() if callable(size) else None

    @property
    def source(self) -> Any:
        return self._source.engine.pool         # another one after a fork

    def session(self) -> OpenedSession:
        return OpenedSession(self._source.engine.connect(), lambda connection: SQLAlchemySession(connection, self._source, self._schema))


class SQLAlchemySession(AdapterSession):
    def __init__(self, connection: Any, source: SQLAlchemy, schema: str) -> None:
        super().__init__(schema)
        self._connection, self._source = connection, source
        self.is_async = hasattr(connection, "sync_connection")
        self._transaction: Any = None
        self._link: Any = None
        self._flushed: list[Any] = []
        """New objects of the session."""
        self._commits = False

    @property
    def open(self) -> bool:                 # type: ignore[override]
        return bool(self._transaction is not None and self._transaction.is_active and not self.lost)

    async def _begin(self) -> Any:
        self._transaction = await maybe_await(self._connection.begin())
        own_connection = getattr(self._connection, "sync_connection", self._connection)
        driver = own_connection.connection.dbapi_connection
        if getattr(driver, "autocommit", False):
            raise TypeError("the engine's isolation level is AUTOCOMMIT: a request or job needs a transaction")
        self._commits = False
        event.listen(own_connection, "commit", self._check_commit)
        make = self._source.make_session
        if not make:
            return self._connection
        session = make(bind=self._connection)
        own = getattr(session, "sync_session", session)
        if own.in_transaction():
            raise TypeError("the factory has returned a session that has begun already: each request needs a new one")
        if getattr(own, "join_transaction_mode", "rollback_only") not in ("rollback_only", "conditional_savepoint"):
            raise TypeError(f"the session's join_transaction_mode is {own.join_transaction_mode!r}, in which a handler's rollback() "
                            "would undo its work and not its response: use the default mode")
        if getattr(own, "twophase", False):
            raise TypeError("the session's twophase is set, and the transaction has begun without it: use a factory without it")
        self._link = driver
        event.listen(own, "after_begin", self._check_connection)
        event.listen(own, "pending_to_persistent", lambda _, found: self._flushed.append(found))
        return session

    def _check_commit(self, connection: Any) -> None:
        if not self._commits:
            raise TransactionEnded("the client ends the transaction: return a response to commit, or raise an error to roll back")

    def _check_connection(self, session: Any, transaction: Any, connection: Any) -> None:
        if connection.connection.dbapi_connection is not self._link:
            raise TypeError("the session has chosen another connection than the transaction's, by binds, get_bind() or "
                            "bind_arguments: its work would not be committed with the response")

    def _flush(self) -> Any:
        """Objects that the handler has added to its session are written.  The session ends with the connection."""
        return self.handle.flush() if self._source.make_session else None

    def _statements(self) -> Any:
        return self._connection

    async def _commit(self) -> None:
        self._commits = True
        await maybe_await(self._transaction.commit())
        self._flushed.clear()

    async def _rollback(self) -> None:
        session = self.handle if self._source.make_session else None
        if session is not None:
            await maybe_await(session.close())
            while self._flushed:                # or they count as stored in another try
                make_transient(self._flushed.pop())
        # Also one that SQLAlchemy has ended, and not taken from the connection, because the handler's COMMIT was refused.
        transaction = self._connection.get_transaction()
        if transaction is not None:
            await maybe_await(transaction.rollback())
        # After an error before COMMIT was sent, as of a listener, SQLAlchemy takes the transaction for ended.
        driver = self._driver()
        if driver is not None and (driver.is_in_transaction() if hasattr(driver, "is_in_transaction") else driver.info.transaction_status):
            await maybe_await(self._discard())

    def _discard(self) -> Any:
        return None if self._connection.closed else self._connection.invalidate()

    def _is_gone(self, error: BaseException) -> bool:
        cause, driver = error if isinstance(error, DBAPIError) else error.__cause__, self._driver()
        return bool(getattr(cause, "connection_invalidated", False) or driver is not None and
                    (driver.is_closed() if hasattr(driver, "is_closed") else driver.closed))

    def _driver(self) -> Any:
        own = getattr(self._connection, "sync_connection", self._connection)
        return None if own is None or own.closed or own.invalidated else own.connection.driver_connection
