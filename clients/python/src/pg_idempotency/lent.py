"""
The connection as a handler has it: for as long as its transaction lasts.

The pool lends the connection itself to the next request.  What a handler has
started or kept, a task, a thread, a cursor, must not write into whatever
transaction that one is in.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NoReturn

from .errors import TransactionEnded


class LentConnection:
    """A psycopg connection in all but its type, until end()."""

    def __init__(self, connection: Any) -> None:
        self.__dict__.update(_lent=connection, _over=False)

    @property                           # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """For isinstance()."""
        return type(self.__dict__["_lent"])

    def __getattr__(self, name: str) -> Any:
        connection = lent(self)
        found = getattr(connection, name)
        if isinstance(found, MethodType) and found.__self__ is connection:
            # So that what it makes, as a cursor, sends its statements by here, too.
            return MethodType(found.__func__, self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(lent(self), name, value)

    def _refused(self, *_: Any) -> NoReturn:
        raise TransactionEnded("the transaction is the request's: return a response to commit, raise to roll back")

    commit = rollback = __enter__ = __exit__ = __aenter__ = __aexit__ = _refused


def lent(handle: LentConnection) -> Any:
    """The connection behind it, while the transaction lasts."""
    if handle.__dict__["_over"]:
        raise TransactionEnded("the handler's transaction is over: what uses it has to end before the handler returns")
    return handle.__dict__["_lent"]


def end(handle: LentConnection) -> None:
    """What is sent by it from here on is refused."""
    handle.__dict__["_over"] = True
