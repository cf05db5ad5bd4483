"""
SQLAlchemy: requests and jobs on the connections of an Engine or AsyncEngine.

	Idempotency(SQLAlchemy(engine))
	AsyncIdempotency(SQLAlchemy(engine, sessionmaker(class_=AsyncSession)))

The handler gets the Connection of the claim's transaction or, with a factory of
sessions, a Session that joins it.  session.commit() in the handler flushes, and
the transaction is committed together with the response; begin_nested() makes a
savepoint.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError       # type: ignore[import]

from .errors import TransactionEnded, sqlstate
from .functions import Statement
from .postgres import execute
from .runtimes import entered, maybe_await

__all__ = ["SQLAlchemy"]

T = TypeVar("T")
FAILED_TRANSACTION = "25P02"


class SQLAlchemy:
    """What a client is made with: an engine and, for handlers that get a Session, what makes one for a bind."""

    def __init__(self, engine: Any, session: Callable[..., Any] | None = None) -> None:
        self.engine = engine
        self.make_session = session

    def backend(self, schema: str, asynchronous: bool) -> SQLAlchemyBackend:
        if not callable(getattr(self.engine, "connect", None)) or not hasattr(self.engine, "dialect"):
            raise TypeError(f"an Engine or AsyncEngine is wanted, not a {type(self.engine).__name__}")
        if asynchronous != hasattr(self.engine, "sync_engine"):
            raise TypeError("an AsyncEngine belongs to an AsyncIdempotency, an Engine to an Idempotency")
        if self.engine.dialect.name != "postgresql":
            raise TypeError(f"the engine is one of {self.engine.dialect.name}, not of PostgreSQL")
        return SQLAlchemyBackend(self, schema)


class SQLAlchemyBackend:
    is_pool = False
    """Rolled back where they were begun: no thread of ours takes a connection of the engine."""

    def __init__(self, source: SQLAlchemy, schema: str) -> None:
        self.source = source
        self._schema = schema
        size = getattr(source.engine.pool, "size", None)
        self.size: int | None = size() if callable(size) else None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SQLAlchemySession]:
        async with entered(self.source.engine.connect()) as connection:
            session = SQLAlchemySession(connection, self.source, self._schema)
            try:
                yield session
            finally:
                await session.rollback()


class SQLAlchemySession:
    failed = stores_utf8 = False            # the server says so at the next statement; it is not asked before

    def __init__(self, connection: Any, source: SQLAlchemy, schema: str) -> None:
        self.handle: Any = None
        self.lost = False
        self._connection, self._source, self._schema = connection, source, schema
        self._transaction: Any = None

    @property
    def open(self) -> bool:
        return bool(self._transaction is not None and self._transaction.is_active and not self.lost)

    async def perform(self, statement: Statement[T]) -> T:
        await self.rollback()
        self._transaction = await self._sent(lambda: self._connection.begin())
        result: T = await self.commit(statement)
        return result

    async def begin(self, statement: Statement[T] | None) -> Any:
        self._transaction = await self._sent(lambda: self._connection.begin())
        result = await self._performed(statement) if statement else None
        make = self._source.make_session
        self.handle = make(bind=self._connection) if make else self._connection
        return result

    async def revoke_handle(self) -> None:
        """Objects that the handler has added to its session are written.  The session ends with the connection."""
        if self._source.make_session:
            await self._sent(lambda: self.handle.flush())

    async def commit(self, statement: Statement[T] | None) -> Any:
        if statement:
            result = await self._performed(statement)
        else:
            # COMMIT after an error that the handler has caught would be a rollback without an error.
            result = await self._sent(lambda: self._connection.exec_driver_sql("SELECT 1"))
        await self._sent(lambda: self._transaction.commit())
        return result

    async def rollback(self) -> None:
        session, self.handle = self.handle if self._source.make_session else None, None
        try:
            if session is not None:
                await maybe_await(session.close())
            if self._connection.in_transaction():
                await maybe_await(self._connection.rollback() if hasattr(self._connection, "rollback")
                                  else self._transaction.rollback())
        except Exception:
            await maybe_await(self._connection.invalidate())

    async def _performed(self, statement: Statement[T]) -> Any:
        return await self._sent(lambda: execute(self._connection, statement, self._schema))

    async def _sent(self, call: Callable[[], Any]) -> Any:
        """What the call returns.  Notes a connection that is lost, and an error that the handler has caught."""
        try:
            return await maybe_await(call())
        except Exception as error:
            cause = error if isinstance(error, DBAPIError) else error.__cause__
            self.lost = self.lost or bool(getattr(cause, "connection_invalidated", False))
            if sqlstate(error) == FAILED_TRANSACTION:
                raise TransactionEnded("the handler went on after an error of the database, which undid its "
                                       "work") from error
            raise

    def ended(self) -> bool:
        return False                        # the next statement fails

    async def abort(self) -> None:
        """The link is cut: a thread that waits for a statement finds its end, and the server rolls back."""
        if self._connection.closed or self._connection.invalidated or hasattr(self._connection, "sync_connection"):
            self.lost = True
            return
        driver = self._connection.connection
        try:
            driver.cancel()
            with socket.socket(fileno=os.dup(driver.fileno())) as link:
                link.shutdown(socket.SHUT_RDWR)
        except Exception:
            pass
        self.lost = True
