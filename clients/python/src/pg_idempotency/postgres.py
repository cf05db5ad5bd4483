"""
Statements over psycopg, and over what SQLAlchemy calls a connection.

Sessions are connections of the user's pool.  What opens or ends a transaction goes out together with the statement beside
it, as one query: one round trip, and a quarter of the system calls that psycopg's pipeline mode makes.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import waiting
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import tuple_row

from .errors import IdempotencyError, TransactionEnded, chain, field, from_call, from_error, sqlstate
from .functions import Statement, quoted, render, sql_of
from .literals import literals, rows_of
from .prepared import ASK, LIST, Prepared, prepared_of
from .transaction_handle import end, handle_of
from .runtimes import AsyncRuntime, SyncRuntime, maybe_await, started

T = TypeVar("T")
ROLLBACK_LIMIT = 5.0
"""Seconds until a connection that does not answer ROLLBACK, or that is still in use when the handler has returned, is closed."""
CANCEL_LIMIT = 2.0
"""Seconds until a connection is closed without waiting longer for the cancellation of its statement, or for the thread or
task that uses it."""

CONNECT_LIMIT = 10
"""Seconds that a server has for a new connection, by default."""

DRIVERS = "psycopg", "sqlalchemy", "django.db", "asyncpg"
"""The modules of errors that come from the database."""


def pool_exhausted(error: BaseException) -> bool:
    """The pool of psycopg or SQLAlchemy had no connection in time, or too many callers wait for one."""
    module = type(error).__module__
    return module.startswith("psycopg_pool") or module == "sqlalchemy.exc" and type(error).__name__ == "TimeoutError"


def connection_lost(error: BaseException) -> bool:
    """The connection broke or could not be made, or the server ended the session: also an error of another driver, and one
    that an ORM has wrapped."""
    state = sqlstate(error)
    if state is not None or isinstance(error, IdempotencyError) or pool_exhausted(error):
        return (state or "").startswith(("08", "57P0"))
    names = {kind.__name__ for one in chain(error) for kind in type(one).__mro__}
    # An InterfaceError can also be a wrong use of the driver.
    return bool(names & {"OperationalError", "OSError"}) or "InterfaceError" in names and "closed" in str(error)


def scope_is_elsewhere(error: BaseException) -> bool:
    """By idem_pin_scope(): the scope lives on another shard, and nothing has been done."""
    return sqlstate(error) == "55000" and field(error, "schema_name") == "idem_guard"


class Backend(Protocol):
    """Where sessions come from."""

    @property
    def source(self) -> Any:
        """Two backends of the same pool have the same source."""

    is_pool: bool
    """Takes connections back in any thread or task.  Otherwise they are left where they were entered."""

    def session(self) -> Any:
        """An asynchronous context manager."""

    @property
    def size(self) -> int | None:
        """How many there are at once, if that is known."""


def results_of(link: Any, query: bytes) -> Generator[Any, Any, list[Any]]:
    """The results of a query, with half of the calls into libpq that psycopg's own generator makes.  Notifications
    stay where psycopg finds them."""
    link.send_query(query)
    while link.flush():
        if (yield waiting.WAIT_RW) & waiting.READY_R:
            link.consume_input()
    results: list[Any] = []
    while True:
        while link.is_busy():
            if (yield waiting.WAIT_R):
                link.consume_input()
        result = link.get_result()
        if result is None:
            return results
        results.append(result)


class PsycopgSession:
    def __init__(self, connection: Any, schema: str) -> None:
        self.handle: Any = None
        self._is_over = False
        """The last transaction is committed."""
        self._connection = connection
        self._is_async = isinstance(connection, psycopg.AsyncConnection)
        self._schema = schema
        self._prepared = prepared_of(connection)

    @property
    def _status(self) -> int:
        status: int = self._connection.pgconn.transaction_status
        return status

    @property
    def _encoding(self) -> str:
        if self._connection.pgconn.parameter_status(b"client_encoding") == b"UTF8":
            return "utf-8"
        found: str = self._connection.info.encoding
        return found

    @property
    def open(self) -> bool:
        return self._status == TransactionStatus.INTRANS

    @property
    def failed(self) -> bool:
        return self._status == TransactionStatus.INERROR

    @property
    def lost(self) -> bool:
        return bool(self._connection.closed)

    @property
    def stores_utf8(self) -> bool:
        return bool(self._connection.pgconn.parameter_status(b"server_encoding") == b"UTF8")

    def _begin_command(self) -> str:
        """The command with which psycopg would begin a transaction."""
        connection, command = self._connection, "BEGIN"
        if connection.isolation_level is not None:
            command += " ISOLATION LEVEL " + psycopg.IsolationLevel(connection.isolation_level).name.replace("_", " ")
        if connection.read_only is not None:
            command += " READ ONLY" if connection.read_only else " READ WRITE"
        if connection.deferrable is not None:
            command += " DEFERRABLE" if connection.deferrable else " NOT DEFERRABLE"
        return command

    async def _batch(self, before: str | None, statement: Statement[T] | None, after: str | None) -> Any:
        """One round trip, and none of psycopg's cursors, which would begin a transaction in another one."""
        prepared = self._prepared
        try:
            return await self._sent(prepared, before, statement, after)
        except psycopg.Error as error:
            if not prepared.forget(error.sqlstate):
                raise
            if after:
                # The whole transaction runs again, now without names.
                raise psycopg.errors.SerializationFailure("the session has lost a named statement") from error
        # Nothing else has run in this transaction.
        if before:
            await self._sent(prepared, None, None, "ROLLBACK")
        return await self._sent(prepared, before, statement, after)

    async def _sent(self, prepared: Prepared, before: str | None, statement: Statement[T] | None, after: str | None) -> Any:
        commands = [before] if before else []
        text, encoding = "", self._encoding
        if statement:
            prepared.follow(self._connection)
            if prepared.is_in_doubt and prepared.is_allowed and not after:
                result, = await self._exchanged([LIST], None, encoding)
                prepared.found({name for name, in rows_of(result, encoding, self._connection, {})})
            text, values = sql_of(statement, self._schema)
            if prepare := prepared.to_prepare(text, len(values)):
                await self._exchanged([prepare], statement, encoding)
                prepared.made(text, len(values))
            commands.append(prepared.call(text, literals(values, self._connection)))
        asks = prepared.is_allowed is None and not after
        if asks:
            commands.append(ASK)
        if after:
            commands.append(after)
        results = await self._exchanged(commands, statement, encoding)
        if asks:
            prepared.is_allowed = int(results[-1].get_value(0, 0)) == self._connection.pgconn.backend_pid
        if after and results[-1].command_status != after.encode():
            raise TransactionEnded("the transaction was rolled back instead of committed")
        if statement is None or after:
            return None
        # A named statement keeps its types; a function that has other ones makes it STALE.
        types = prepared.types[text] if prepared.is_allowed else {}
        return statement.read(rows_of(results[1 if before else 0], encoding, self._connection, types))

    async def _exchanged(self, commands: list[str], statement: Statement[Any] | None, encoding: str) -> Any:
        """The results of the commands, one of which is that of the statement."""
        connection, query = self._connection, "; ".join(commands).encode(encoding)
        try:
            if self._is_async:
                async with connection.lock:
                    results = await self._results(query)
            else:
                with connection.lock:
                    results = await self._results(query)
        except psycopg.Error:
            raise
        except BaseException:
            # Cancelled: an answer may still be on its way.
            await maybe_await(connection.close())
            raise
        if results[-1].status == ExecStatus.FATAL_ERROR:
            raise self._error(psycopg.errors.error_from_result(results[-1], encoding), statement)
        return results

    def _error(self, error: psycopg.Error, statement: Statement[Any] | None) -> BaseException:
        """Not a local variable of the caller: with the traceback, it would keep the request until a garbage collection."""
        return (from_call(error, statement.function, self._schema) if statement else from_error(error)) or error

    async def _results(self, query: bytes) -> Any:
        """Without the connection's lock."""
        link = self._connection.pgconn
        if not self._is_async:
            return self._connection.wait(results_of(link, query))
        # psycopg 3.2's own wait() asks a silent server to cancel, and waits for that without an end.
        return await waiting.wait_async(results_of(link, query), link.socket)

    def _check_idle(self) -> None:
        if self._status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            raise psycopg.ProgrammingError("the connection is in a transaction, and a request or job begins its own")

    async def perform(self, statement: Statement[T]) -> T:
        """A transaction of its own."""
        self._check_idle()
        result: T = await self._batch(None, statement, None)
        self._is_over = True
        return result

    async def begin(self, statement: Statement[T] | None) -> T:
        self._check_idle()
        self._is_over = False
        result: T = await self._batch(self._begin_command(), statement, None)
        self.handle = handle_of(self._connection)
        return result

    async def commit(self, statement: Statement[Any] | None) -> None:
        await self._batch(None, statement, "COMMIT")
        self._is_over = True

    async def rollback(self) -> None:
        """Does nothing if no transaction has begun or the connection is gone.  A connection that does not answer within
        ROLLBACK_LIMIT is closed, and so is one with an open block."""
        if self._is_over and self.handle is None:
            return
        until = time.monotonic() + ROLLBACK_LIMIT
        try:
            await self.revoke_handle(until)
            if not self.lost and self._status != TransactionStatus.IDLE:
                bounded = AsyncRuntime.bounded if self._is_async else SyncRuntime.bounded
                # A generator that the handler has kept can hold the lock.
                await bounded(lambda: self._results(b"ROLLBACK"), until - time.monotonic(), self._cut)
                if self._status != TransactionStatus.IDLE:
                    raise TimeoutError
            if self._has_open_block:
                await self._close()
        except BaseException as error:
            await self._close()
            if not isinstance(error, (psycopg.Error, TimeoutError)):
                raise                       # cancelled: an answer may still be on its way

    async def _cut(self) -> None:
        cut(self._connection)

    async def revoke_handle(self, until: float | None = None) -> None:
        handle, self.handle = self.handle, None
        if handle is None:
            return
        lock = self._connection.lock
        try:
            if not self._is_async and lock.acquire(blocking=False):
                end(handle)
                lock.release()
            elif not self.lost and lock.locked():
                async with locked(self._connection, until or time.monotonic() + ROLLBACK_LIMIT):
                    end(handle)
        except TimeoutError:
            if until is None and not self.lost:
                raise TransactionEnded("the handler left a statement, a COPY or a stream open") from None
            raise
        finally:
            end(handle)
        if until is None:
            handle._unawaited.check()
            if self._has_open_block:
                raise TransactionEnded("the handler left a block of transaction() or pipeline() open")
            if self._status == TransactionStatus.ACTIVE:
                raise TransactionEnded("the handler left a statement, a COPY or a stream open")

    @property
    def _has_open_block(self) -> bool:
        """A block of transaction() or pipeline() has not ended.  psycopg refuses COMMIT on this connection from then on."""
        return bool(getattr(self._connection, "_num_transactions", 0) or not self.lost and self._connection.pgconn.pipeline_status)

    def ended(self) -> bool:
        if not hasattr(select, "poll"):     # eventlet removes it
            return False
        try:
            poll = select.poll()
            poll.register(self._connection.fileno(), getattr(select, "POLLRDHUP", 0))
            return bool(poll.poll(0))
        except (psycopg.Error, OSError, ValueError):
            return True

    async def abort(self) -> None:
        try:
            if not self.lost:
                await cancel_statement(self._connection)
        finally:
            await self._close()

    async def _close(self) -> None:
        """Safe while another thread or task reads from the connection: it gets the end of the stream before the connection is closed."""
        if self.lost:
            return
        cut(self._connection)
        try:
            # A generator that the handler has kept, as of cursor.stream(), never releases the lock.
            async with locked(self._connection, time.monotonic() + CANCEL_LIMIT):
                pass
        except TimeoutError:
            pass
        finally:
            await maybe_await(self._connection.close())


def cut(driver: Any) -> None:
    """Close the link of a driver's connection, so that a wait for the server ends."""
    try:
        if hasattr(driver, "terminate"):        # asyncpg's, which does nothing while its close() waits
            driver.terminate()
            driver._transport.abort()
            return
        with socket.socket(fileno=os.dup(driver.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
    except Exception:
        pass


async def cancel_statement(connection: Any) -> None:
    """Ask the server to end the statement, so that it rolls back at once.  A thread asks, because a silent server blocks the request."""
    is_async = isinstance(connection, psycopg.AsyncConnection)
    loop = asyncio.get_running_loop() if is_async else None
    done: Any = asyncio.Event() if is_async else threading.Event()

    def cancel() -> None:
        try:
            _cancel(connection)
        except Exception:
            pass                                # the connection is closed next
        if loop is None:
            done.set()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    if not started(cancel):
        return
    if loop is None:
        done.wait(CANCEL_LIMIT)
    else:
        await asyncio.wait({asyncio.ensure_future(done.wait())}, timeout=CANCEL_LIMIT)


def _cancel(connection: Any) -> None:
    """Without cancel() of psycopg2, and of psycopg's C implementation: it keeps Python's lock, so that a silent server would
    stop all threads."""
    if not isinstance(connection, psycopg.BaseConnection):
        info = connection.info
        server: dict[str, Any] = {**info.dsn_parameters, "host": info.host, "port": info.port, "password": info.password}
        server["connect_timeout"] = 2
        with psycopg.connect(**server) as other:
            other.execute("SELECT pg_catalog.pg_cancel_backend(%s)", (info.backend_pid,))
        return
    safely = getattr(connection, "cancel_safe", None)
    if safely is None:
        connection.cancel()
    elif isinstance(connection, psycopg.AsyncConnection):
        asyncio.run(safely(timeout=CANCEL_LIMIT))
    else:
        safely(timeout=CANCEL_LIMIT)


@asynccontextmanager
async def locked(connection: Any, until: float | None) -> AsyncIterator[None]:
    """The connection's lock.  Raises TimeoutError at that time, or when another thread has closed the connection."""
    lock, last = connection.lock, float("inf") if until is None else until
    if isinstance(lock, asyncio.Lock):
        await asyncio.wait_for(lock.acquire(), None if until is None else max(0.0, last - time.monotonic()))
    else:
        while not lock.acquire(timeout=max(0.0, min(1.0, last - time.monotonic()))):
            if connection.closed or time.monotonic() >= last:
                raise TimeoutError
    try:
        yield
    finally:
        lock.release()


class OpenedSession:
    """The context manager of a session: it opens a connection by a context manager of either kind."""

    def __init__(self, manager: Any, make: Callable[[Any], Any]) -> None:
        self._manager, self._make = manager, make

    async def __aenter__(self) -> Any:
        enter = getattr(self._manager, "__aenter__", None)
        self._session = self._make(self._manager.__enter__() if enter is None else await enter())
        return self._session

    async def __aexit__(self, *error: Any) -> None:
        """The manager gets the error, but cannot end it: a caller would take a failed COMMIT for a success."""
        try:
            await self._session.rollback()
        except BaseException as failure:
            error = (type(failure), failure, failure.__traceback__)
            raise
        finally:
            leave = getattr(self._manager, "__aexit__", None)
            self._manager.__exit__(*error) if leave is None else await leave(*error)


_pools: WeakSet[PsycopgBackend] = WeakSet()


def _after_fork() -> None:
    for backend in _pools:
        backend.is_forked = not backend.source.closed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class PsycopgBackend:
    """Connections from a pool, a function that returns a context manager, or
    a connection string.  Of the last, each is opened for its use."""

    def __init__(self, source: Any, schema: str, asynchronous: bool) -> None:
        self._schema = schema
        self.source = source
        self.size: int | None = None
        self.is_pool = False
        self.is_forked = False
        """The pool was open when this process was forked: its threads are missing, and its connections are the parent's."""
        self._connect: Callable[[], Any]
        self._enter = "__aenter__" if asynchronous else "__enter__"
        if isinstance(source, str):
            self._connect = lambda: _connected(source) if asynchronous else psycopg.connect(source, **_options(source))
        elif callable(getattr(source, "connection", None)):
            size = getattr(source, "max_size", None)
            self.size = size if isinstance(size, int) else None
            self.is_pool = True
            self._connect = source.connection
            if type(source).__module__.startswith("psycopg_pool"):
                _pools.add(self)
        elif callable(source):
            self._connect = source
        else:
            raise TypeError("Idempotency needs a pool, a function that returns a connection's context manager, or a connection string")

    def session(self) -> OpenedSession:
        """Raises RuntimeError if the pool was open at a fork: it would wait for ever."""
        if self.is_forked:
            raise RuntimeError("the pool was opened before this process was forked, as with gunicorn --preload: "
                               "open it after the fork, in each process")
        manager = self._connect()
        if not hasattr(manager, self._enter):       # or it would block the event loop
            raise TypeError("use an AsyncConnectionPool, or a function that returns an asynchronous context manager, with AsyncIdempotency, "
                            "and a ConnectionPool, or a function that returns a synchronous one, with Idempotency")
        return OpenedSession(manager, lambda connection: PsycopgSession(connection, self._schema))


def _options(conninfo: str) -> dict[str, Any]:
    """PgBouncer may be in between, which knows no prepared statements; and a server may accept and stay silent."""
    limit = psycopg.conninfo.conninfo_to_dict(conninfo).get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT") or CONNECT_LIMIT
    return {"prepare_threshold": None, "connect_timeout": limit}


@asynccontextmanager
async def _connected(conninfo: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(conninfo, **_options(conninfo)) as connection:
        yield connection


async def execute(handle: Any, statement: Statement[T], schema: str) -> T:
    """Perform a statement on the user's handle, in its current transaction."""
    try:
        if isinstance(handle, (psycopg.BaseConnection, psycopg.Cursor, psycopg.AsyncCursor)):
            # A cursor's results are its owner's: use another one.
            connection = getattr(handle, "connection", handle)
            query, values = sql_of(statement, schema)
            kind = psycopg.AsyncCursor if isinstance(connection, psycopg.AsyncConnection) else psycopg.Cursor
            cursor: Any = kind(connection, row_factory=tuple_row)
            await maybe_await(cursor.execute(query, values))
            return statement.read(await maybe_await(cursor.fetchall()))
        if hasattr(handle, "perform_statement"):    # the double's
            return await handle.perform_statement(statement)    # type: ignore[no-any-return]
        if type(handle).__module__.startswith("sqlalchemy"):
            return await _sqlalchemy(handle, statement, schema)
        if getattr(handle, "vendor", None) == "postgresql":     # Django's
            query, values = sql_of(statement, schema)
            with handle.cursor() as cursor:
                cursor.execute(query, values)
                return statement.read(cursor.fetchall())
    except Exception as error:
        known = from_call(error, statement.function, schema)
        if known is not None and known is not error:
            raise known from error
        raise
    raise TypeError(f"{type(handle).__name__} is not a connection of psycopg, SQLAlchemy or Django")


async def _sqlalchemy(handle: Any, statement: Statement[T], schema: str) -> T:
    from sqlalchemy import text

    values: dict[str, Any] = {}

    def placeholder(found: Any) -> str:
        values[f"p{len(values)}"] = found
        return f":p{len(values) - 1}"

    if not hasattr(handle, "in_transaction"):
        raise TypeError(f"{type(handle).__name__} is no connection and no session: pass one that is in a transaction")
    query = render(statement, quoted(schema).replace(":", "\\:"), placeholder)
    result = await maybe_await(handle.execute(text(query), values))
    if not handle.in_transaction():         # SQLAlchemy 1.4 does not commit a SELECT by itself
        raise RuntimeError("the connection is in no transaction, so nothing of this call will stay: call begin() before")
    return statement.read([tuple(row) for row in result.fetchall()])
