"""
The interface between the core and an ORM: a session over one of its connections.

A subclass begins, sends, commits and rolls back as its ORM does.  This class keeps the promises that all of them share: no success
after an error that the handler has caught, and a connection that another thread can end.  PsycopgSession has the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from . import postgres
from .errors import TransactionEnded, sqlstate
from .functions import Statement
from .runtimes import AsyncRuntime, SyncRuntime, maybe_await

T = TypeVar("T")
FAILED_TRANSACTION = "25P02"
PROBE: Statement[Any] = Statement("pg_catalog.now", (), ("r",), lambda rows: None)


class AdapterSession:
    failed = stores_utf8 = False            # the server says so at the next statement; it is not asked before
    """In a transaction that can only be rolled back; any text can be stored as text."""
    open = False
    """In a transaction that may still commit."""
    is_async = False

    def __init__(self, schema: str) -> None:
        self.handle: Any = None
        """The argument of a handler."""
        self.lost = False
        """The connection is gone."""
        self._is_aborted = False
        self._schema = schema

    # The methods of a subclass.  Each can be a coroutine.

    def _begin(self) -> Any:
        """Begin a transaction, and return what the handler gets."""
        raise NotImplementedError

    def _flush(self) -> Any:
        """Write the pending changes of the ORM."""

    def _commit(self) -> Any:
        raise NotImplementedError

    def _rollback(self) -> Any:
        """Works if no transaction has begun.  After an error, the connection is discarded."""
        raise NotImplementedError

    def _discard(self) -> Any:
        """Close the connection, so that nothing uses it again."""
        raise NotImplementedError

    def _statements(self) -> Any:
        """The connection that execute() takes."""
        raise NotImplementedError

    def _is_gone(self, error: BaseException) -> bool:
        """Whether the error says that the connection is gone."""
        raise NotImplementedError

    def _driver(self) -> Any:
        """The connection of the driver, or None."""
        raise NotImplementedError

    # The methods that the core calls.

    async def perform(self, statement: Statement[T]) -> T:
        await self.rollback()
        await self._sent(self._begin)
        result: T = await self.commit(statement)
        return result

    async def begin(self, statement: Statement[Any] | None) -> Any:
        """BEGIN and the statement."""
        handle = await self._sent(self._begin)
        result = await self._performed(statement) if statement else None
        self.handle = handle
        return result

    async def revoke_handle(self) -> None:
        """Wait for the statement that the handle is in, and refuse all later ones."""
        await self._sent(self._flush)

    async def commit(self, statement: Statement[Any] | None) -> Any:
        """The statement and COMMIT."""
        # COMMIT after an error that the handler has caught would be a rollback without an error.
        result = await self._performed(PROBE if statement is None else statement)
        await self._sent(self._commit)
        return result

    async def rollback(self) -> None:
        try:
            await self._bounded(self._rollback)
        except Exception:
            await self._bounded(self._discard)
        # abort() can close the link after this ROLLBACK, when the connection is in other use.
        if self._is_aborted:
            await self._bounded(self._discard)
        self.handle = None

    async def _bounded(self, work: Callable[[], Any]) -> None:
        """Within ROLLBACK_LIMIT, because a driver waits for a silent server for ever."""
        driver = self._driver()

        async def cut() -> bool:
            self._is_aborted = True
            postgres.cut(driver)
            return self.is_async

        if driver is None:
            await maybe_await(work())
        else:
            bounded = AsyncRuntime.bounded if self.is_async else SyncRuntime.bounded
            await bounded(work, postgres.ROLLBACK_LIMIT, cut)

    async def _performed(self, statement: Statement[Any]) -> Any:
        return await self._sent(lambda: postgres.execute(self._statements(), statement, self._schema))

    async def _sent(self, call: Callable[[], Any]) -> Any:
        """The return value of the call.  Notes a connection that is lost, and an error that the handler has caught."""
        try:
            return await maybe_await(call())
        except Exception as error:
            self.lost = self.lost or self._is_gone(error)
            if sqlstate(error) == FAILED_TRANSACTION:
                raise TransactionEnded("the handler continued after an error of the database, which undid its work") from error
            raise

    def ended(self) -> bool:
        """The server has ended the session, even if no statement has failed yet."""
        return False                        # the next statement fails

    async def abort(self) -> bool:
        """Close the link: a thread that waits for a statement gets an error, and the server rolls back."""
        driver = None if self.lost else self._driver()
        self.lost = True
        if driver is None:
            return self.is_async
        self._is_aborted = True
        try:
            if not self.is_async:               # an asynchronous driver asks itself, when its task is cancelled
                await postgres.cancel_statement(driver)
        finally:
            postgres.cut(driver)
        return self.is_async


Session = AdapterSession | postgres.PsycopgSession
