"""
The connection as a handler gets it: usable until the handler's transaction ends.

After that the pool gives the connection to the next request.  A task, a thread or a cursor that the handler has started or
kept must not write into that request's transaction.  So the handle is an object of its own, of a subclass of the
connection's class, which shares the attributes of the connection until end().
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
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


def handle_of(connection: Any) -> Any:
    if not issubclass(type(connection), psycopg.BaseConnection):
        connection = connection.connection          # a proxy's own
    kind: Any = type(connection)
    handle = object.__new__(_handle_class(kind))
    handle.__dict__ = connection.__dict__
    handle._unawaited = Unawaited()
    return handle


def end(handle: Any) -> None:
    """Refuse all later use of the handle."""
    handle.__dict__ = {}


def unawaited_of(handle: Any) -> Unawaited | None:
    """Of a handle, or a cursor of one."""
    if not isinstance(handle, (psycopg.AsyncConnection, psycopg.AsyncCursor)):
        return None
    return getattr(handle.connection, "_unawaited", None)


def _refused(*_: Any) -> NoReturn:
    raise TransactionEnded("the client ends the transaction: return a response to commit, or raise an error to roll back")


def _missing(handle: Any, name: str) -> NoReturn:
    """Of an attribute that the handle does not have."""
    if handle.__dict__:
        raise AttributeError(f"{type(handle).__name__!r} object has no attribute {name!r}")
    raise TransactionEnded("the handler's transaction has ended: do not use it after the handler has returned")


@functools.lru_cache
def _handle_class(kind: type[Any]) -> type[Any]:
    own: dict[str, Any] = dict.fromkeys(("commit", "rollback", "__enter__", "__exit__", "__aenter__", "__aexit__"), _refused)
    if issubclass(kind, psycopg.AsyncConnection):
        def cursor(self: Any, *arguments: Any, **named: Any) -> Any:
            made = kind.cursor(self, *arguments, **named)
            if isinstance(made, psycopg.AsyncCursor):
                made.__class__ = _cursor_class(type(made))      # type: ignore[arg-type]
            return made

        calls = inspect.getmembers(kind, lambda one: inspect.isfunction(one) and inspect.iscoroutinefunction(one))
        own = {**{name: _followed(one, f"tx.{name}") for name, one in calls if name != "wait"}, "cursor": cursor, **own}
    return type(kind.__name__, (kind,), {**own, "__slots__": ("_unawaited",), "__getattr__": _missing,
                                         "__del__": lambda self: None, "__repr__": object.__repr__})


@functools.lru_cache
def _cursor_class(kind: type[Any]) -> type[Any]:
    own: dict[str, Any] = {name: _followed(getattr(kind, name), f"cursor.{name}") for name in ("execute", "executemany")}
    return type(kind.__name__, (kind,), {**own, "__slots__": ()})


def _followed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A method of an asynchronous connection or cursor, whose calls are to be awaited."""
    @functools.wraps(method)
    def followed(self: Any, *arguments: Any, **named: Any) -> Any:
        # psycopg's connections, and its cursors, have this.
        unawaited: Unawaited = self.connection._unawaited
        return unawaited.follow(name, functools.partial(method, self, *arguments, **named))

    return followed
