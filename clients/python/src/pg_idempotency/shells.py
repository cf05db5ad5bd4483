"""
The two shells around one core.

The core is written in coroutines.  The asynchronous shell awaits them.  The
synchronous one runs them without an event loop: nothing that they await there
ever suspends, because value() takes what a synchronous driver returns as it
is.  So everything but this file is written once.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


async def value(found: Any) -> Any:
    """What an awaitable brings, or the value itself."""
    return await found if inspect.isawaitable(found) else found


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """A context manager of either kind."""
    if hasattr(manager, "__aenter__"):
        async with manager as found:
            yield found
    else:
        with manager as found:
            yield found


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError("something asynchronous was given to a synchronous Idempotency; use AsyncIdempotency")


class Background(Protocol):
    """Something that runs beside the caller: stop() ends it and waits for that."""

    async def stop(self) -> None: ...


class Shell(Protocol):
    asynchronous: bool

    async def sleep(self, seconds: float) -> None: ...

    def event(self) -> Any:
        """A threading.Event or an asyncio.Event."""

    async def wait(self, event: Any, seconds: float) -> bool:
        """Until the event is set, which is True, or the time is over."""

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Background:
        """Run it in a thread or a task of its own."""

    async def later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it behind the caller, who does not wait for it."""


class _Thread:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._thread = threading.Thread(target=lambda: run(work()), name="pg_idempotency", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._thread.join()


class SyncShell:
    asynchronous = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], Coroutine[Any, Any, None]]] | None = None
        self._process = 0

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> threading.Event:
        return threading.Event()

    async def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Background:
        return _Thread(work)

    async def later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with self._lock:
            if self._queue is None or self._process != os.getpid():     # a fork has no threads but its own
                self._process = os.getpid()
                self._queue = queue.SimpleQueue()
                threading.Thread(target=self._behind, name="pg_idempotency", daemon=True).start()
            self._queue.put(work)

    def _behind(self) -> None:
        assert self._queue is not None
        work = self._queue
        while True:
            run(work.get()())


class _Task:
    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.ensure_future(work())

    async def stop(self) -> None:
        await asyncio.shield(asyncio.gather(self._task, return_exceptions=True))


class AsyncShell:
    asynchronous = True

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def event(self) -> asyncio.Event:
        return asyncio.Event()

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Background:
        return _Task(work)

    async def later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
