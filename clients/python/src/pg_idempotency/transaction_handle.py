"""
The connection as a handler gets it: usable until the handler's transaction ends.

After that the pool gives the connection to the next request.  A task, a thread
or a cursor that the handler has started or kept must not write into that
request's transaction.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import Any, NoReturn

import psycopg

from .errors import TransactionEnded


class Unawaited:
    """The calls of a handler that are not awaited yet: they have had no effect."""

    def __init__(self) -> None:
        self._names: dict[object, str] = {}

    def follow(self, name: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        token = object()
        self._names[token] = name

        async def begun() -> Any:
            self._names.pop(token, None)
            return await call()

        return begun()

    def check(self) -> None:
        for name in self._names.values():
            raise TypeError(f"{name}() was not awaited, so it did nothing: an asynchronous handler must await each call")


CONSTANT = {"pgconn", "lock"}
"""Attributes of a connection that never change: the handle keeps them until its end."""


class TransactionHandle:
    """A psycopg connection in all but its type, until end()."""

    def __init__(self, connection: Any) -> None:
        self.__dict__.update(_handle_connection=connection, _handle_ended=False, _handle_unawaited=Unawaited())

    @property                           # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """For isinstance()."""
        return type(self.__dict__["_handle_connection"])

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        connection = connection_of(self) if own["_handle_ended"] else own["_handle_connection"]
        found = getattr(connection, name)
        if name in CONSTANT:
            own[name] = found
            return found
        if type(found) is MethodType and found.__self__ is connection:
            # So that what it makes, as a cursor, sends its statements by here, too.
            return _followed(self, f"tx.{name}", MethodType(found.__func__, self))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(connection_of(self), name, value)

    def _refused(self, *_: Any) -> NoReturn:
        raise TransactionEnded("the client ends the transaction: return a response to commit, or raise an error to roll back")

    commit = rollback = __enter__ = __exit__ = __aenter__ = __aexit__ = _refused


def connection_of(handle: TransactionHandle) -> Any:
    """The connection of a handle.  Raises TransactionEnded after end()."""
    if handle.__dict__["_handle_ended"]:
        raise TransactionEnded("the handler's transaction has ended: do not use it after the handler has returned")
    return handle.__dict__["_handle_connection"]


def end(handle: TransactionHandle) -> None:
    """Refuse all later use of the handle."""
    for name in CONSTANT:
        handle.__dict__.pop(name, None)
    handle.__dict__["_handle_ended"] = True


def check_awaited(handle: TransactionHandle) -> None:
    """Raise TypeError if the handler forgot to await a call."""
    handle.__dict__["_handle_unawaited"].check()


_is_coroutine_function = functools.lru_cache(inspect.iscoroutinefunction)


def _followed(handle: TransactionHandle, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an asynchronous connection or cursor, whose calls are to be awaited."""
    if _is_coroutine_function(method.__func__ if isinstance(method, MethodType) else method):
        return lambda *arguments, **named: handle.__dict__["_handle_unawaited"].follow(
            name, functools.partial(method, *arguments, **named))
    if name != "tx.cursor":
        return method

    def cursor(*arguments: Any, **named: Any) -> Any:
        made = method(*arguments, **named)
        if isinstance(made, psycopg.AsyncCursor):
            made.__class__ = _cursor_class(type(made))      # type: ignore[arg-type]
        return made

    return cursor


@functools.lru_cache
def _cursor_class(kind: type[Any]) -> type[Any]:
    def execute(self: Any, *arguments: Any, **named: Any) -> Any:
        return _followed(self.connection, "cursor.execute", MethodType(kind.execute, self))(*arguments, **named)

    def executemany(self: Any, *arguments: Any, **named: Any) -> Any:
        return _followed(self.connection, "cursor.executemany", MethodType(kind.executemany, self))(*arguments, **named)

    return type(kind.__name__, (kind,), {"__slots__": (), "execute": execute, "executemany": executemany})
