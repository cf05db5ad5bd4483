"""
The context of a handler: the calls that it must not make while its transaction holds a connection, and its time limit.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

from .errors import TimedOut
from .functions import Interval, as_interval
from .intervals import seconds


class in_handler:
    """A handler runs here.  A task or thread that it has started, and that continues after it, sees that the handler is closed."""

    outer: in_handler | None
    open = True

    def __init__(self, *sources: object) -> None:
        """sources: the pools of which it holds a connection, and the router that named the shard."""
        outer = _current_handler.get()
        while outer is not None and not outer.open:
            outer = outer.outer
        self.sources, self.outer = sources, outer

    def __enter__(self) -> None:
        self._token = _current_handler.set(self)

    def __exit__(self, *error: object) -> None:
        self.close()
        try:
            _current_handler.reset(self._token)
        except ValueError:                      # ended in another context than it began in
            pass

    def close(self) -> None:
        """Also if the exception of a signal handler has kept __enter__() or __exit__() from its end."""
        self.open = False


_current_handler: ContextVar[in_handler | None] = ContextVar("pg_idempotency_handler", default=None)


def refuse_nested(source: object, what: str, instead: str) -> None:
    """Refuse a call that would take a second connection of the pool while its handler holds one."""
    handler = _current_handler.get()
    while handler is not None:
        if handler.open and any(one is source for one in handler.sources):
            raise RuntimeError(f"{what} in a handler would take a second connection of the pool while the handler "
                               "holds one, so several handlers could wait for each other forever, and its work would not "
                               f"be part of the handler's transaction: use {instead}")
        handler = handler.outer


def leads_to(called: Any, function: Any) -> bool:
    """Whether it is the function, a method of it, or a wrapper around it."""
    while called is not None and getattr(called, "__func__", called) is not function:
        called = getattr(called, "__wrapped__", None)
    return called is not None


DEFAULT_TIMEOUT: Final = timedelta(minutes=1)
"""Of a handler that holds a connection: one that never answers would hold it for ever."""


def timeout_seconds(timeout: Interval, ms: float | None) -> float | None:
    """The time limit of handlers; None is no limit."""
    as_interval("timeout", timeout, ms)             # or an error that names it
    if timeout is None and ms is None:
        return None
    found = seconds(timeout, ms)
    if not found:
        raise ValueError(f"timeout must not be {timeout if ms is None else f'{ms} ms'}: a duration is like '30s'; "
                         "pass None to a client for no timeout")
    return found


class Deadline:
    """The time limit of a handler with all its tries; it begins with the first try."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at: float | None = None

    def left(self) -> float | None:
        if self._seconds is None:
            return None
        if self._at is None:
            self._at = time.monotonic() + self._seconds
        return max(0.0, self._at - time.monotonic())

    def error(self) -> TimedOut:
        return TimedOut(f"the handler took longer than its timeout of {self._seconds:g} s")
