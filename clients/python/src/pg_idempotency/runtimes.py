"""
The two runtimes of the core: threads, and asyncio.

The core is written in coroutines.  The asynchronous runtime awaits them.  The synchronous one runs them without an event
loop.  Nothing that they await there suspends, because maybe_await() passes on what a synchronous driver returns.  So
everything but this file is written once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from .errors import TimedOut

T = TypeVar("T")
LOG = logging.getLogger("pg_idempotency")
THREAD = "pg_idempotency"
"""The name of each thread of this package."""


async def maybe_await(found: Any) -> Any:
    """The result of an awaitable, or the value itself."""
    return await found if hasattr(type(found), "__await__") else found


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise TypeError("a synchronous Idempotency cannot use an asynchronous function or pool; use AsyncIdempotency")


@contextmanager
def synchronous(manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """An asynchronous context manager that never suspends."""
    found = run(manager.__aenter__())
    try:
        yield found
    except BaseException as error:
        if not run(manager.__aexit__(type(error), error, error.__traceback__)):
            raise
    else:
        run(manager.__aexit__(None, None, None))


Work = Callable[[], Coroutine[Any, Any, Any]]
Abort = Work
"""Ends the work of another thread or task.  Its result is whether the task has to be cancelled once more: asyncpg's close() can
wait for ever for the end of a statement, even if the connection is closed."""


def started(work: Callable[..., Any], *arguments: Any) -> bool:
    """Run it in a thread of its own, unless the process can start no more threads."""
    try:
        threading.Thread(target=work, args=arguments, name=THREAD, daemon=True).start()
    except RuntimeError:
        return False
    return True


STOP_LIMIT = 1.0
"""Seconds that the end of a job waits for its heartbeat, which a silent server can keep."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks whether the server has ended a session."""
ABORT_DELAY = 3.0
"""Seconds after which a task is aborted that does not end when it is cancelled: a driver can wait for a silent server for ever."""


@dataclass(eq=False)
class _WatchedCall:
    until: float
    abort: Abort
    ended: Callable[[], bool] | None
    aborted: threading.Event | None = None


class _Watchdog:
    """A thread for the calls of all threads, none of which can be interrupted."""

    def __init__(self) -> None:
        self._watched: set[_WatchedCall] = set()
        """Who removes a call from it, the call's thread or the watchdog, decides how the call ends.  A set is changed
        without a lock, which each call would need several times."""
        self._changed = threading.Condition()
        self._runs = False

    def add(self, watched: _WatchedCall) -> None:
        if not self._runs:
            self._start()
        self._watched.add(watched)
        if watched.until < time.monotonic() + CHECK_INTERVAL:
            with self._changed:
                self._changed.notify()

    def remove(self, watched: _WatchedCall) -> None:
        """Wait for its abort(), if that has begun: it would end the session's next use."""
        try:
            self._watched.remove(watched)
        except KeyError:
            if watched.aborted is not None:
                watched.aborted.wait()

    def _start(self) -> None:
        with self._changed:
            if not self._runs:
                threading.Thread(target=self._run, name=THREAD, daemon=True).start()
                self._runs = True

    def _run(self) -> None:
        while True:
            with self._changed:
                first = min((watched.until for watched in list(self._watched)), default=float("inf"))
                # To wake it for each call would cost more than to look periodically.
                self._changed.wait(max(0.0, min(CHECK_INTERVAL, first - time.monotonic())))
            try:
                self._check()
            except Exception:                           # the timeouts of the other calls must go on
                LOG.exception("a call could not be ended")

    def _check(self) -> None:
        for watched in list(self._watched):
            if time.monotonic() >= watched.until or watched.ended and watched.ended():
                watched.aborted = threading.Event()
                try:
                    self._watched.remove(watched)
                except KeyError:
                    continue
                # In another thread: it can take seconds, and this one serves all calls.
                if not started(self._abort, watched):
                    self._abort(watched)

    @staticmethod
    def _abort(watched: _WatchedCall) -> None:
        assert watched.aborted is not None
        try:
            run(watched.abort())
        finally:
            watched.aborted.set()


MAX_DEFERRING = 10
"""Threads at most that do deferred work: one that a silent server keeps does not delay the others."""


class _Deferring:
    """The threads that do deferred work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._threads = self._deferred = 0

    def add(self, work: Work) -> None:
        with self._lock:
            self._queue.put(work)
            self._deferred += 1
            if self._threads < min(self._deferred, MAX_DEFERRING) and started(self._run):
                self._threads += 1
            has_thread = bool(self._threads)
        if not has_thread:
            self._do_one()

    def _run(self) -> None:
        while True:
            self._do_one()

    def _do_one(self) -> None:
        try:
            run(self._queue.get()())
        except Exception:
            LOG.exception("a transaction could not be rolled back")
        with self._lock:
            self._deferred -= 1


# Of the process: a program can make many clients.  Made at the first use, when gevent has replaced the classes of threading and queue.
@functools.lru_cache(maxsize=None)
def _watchdog() -> _Watchdog:
    return _Watchdog()


@functools.lru_cache(maxsize=None)
def _deferring() -> _Deferring:
    return _Deferring()


def _after_fork() -> None:
    """A child has none of its parent's threads, one of which may have held a lock."""
    _watchdog.cache_clear()
    _deferring.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SyncRuntime:
    """For threads."""

    asynchronous = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, threading.Lock] = {}

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def place(self) -> object:
        """Where waiters can be woken: in this process; of several event loops, in the one that runs."""
        return os.getpid()

    def event(self) -> Any:
        return threading.Event()

    async def shared(self, name: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Callers that ask for the same name at once share one result, or make it one after
        the other.  The cancellation of one caller does not end the work for the others."""
        with self._lock:
            one_by_one = self._names.setdefault(name, threading.Lock())
        with one_by_one:
            return await make()

    async def wait(self, event: Any, seconds: float) -> bool:
        """Until the event is set, which is True, or the time is over."""
        return bool(event.wait(seconds))

    def start(self, work: Work) -> Work:
        """Run it beside the caller.  Returns a function that waits for its end, but not longer than STOP_LIMIT."""
        thread = threading.Thread(target=lambda: run(work()), name=THREAD, daemon=True)
        thread.start()

        async def stop() -> None:
            thread.join(STOP_LIMIT)

        return stop

    async def defer(self, work: Work) -> None:
        """Run it later; the caller does not wait for it."""
        _deferring().add(work)

    async def finish(self, work: Work) -> None:
        """Run it to its end, also if the caller is cancelled."""
        await work()

    @staticmethod
    async def bounded(work: Callable[[], Any], left: float | None, abort: Abort, ended: Callable[[], bool] | None = None) -> Any:
        """The result of the work.  When the time that is left is over, or ended() is true, which is asked every second:
        abort(), and after its end None or any error.  A thread cannot be interrupted: it waits until the work returns."""
        watched = _WatchedCall(time.monotonic() + left if left is not None else float("inf"), abort, ended)
        watchdog = _watchdog()                  # asked once: at the first use, two threads can make one each
        try:
            watchdog.add(watched)
            return await maybe_await(work())
        finally:
            watchdog.remove(watched)


class AsyncRuntime:
    """For asyncio; see SyncRuntime."""

    asynchronous = True

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[Any]] = {}

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def place(self) -> object:
        return asyncio.get_running_loop()

    def event(self) -> Any:
        return asyncio.Event()

    async def shared(self, name: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        loop = asyncio.get_running_loop()
        task = self._shared.get((loop, name))
        if task is None:
            task = self._shared[loop, name] = loop.create_task(make())
            task.add_done_callback(lambda _: self._shared.pop((loop, name)))
        result: T = await asyncio.shield(task)
        return result

    async def wait(self, event: Any, seconds: float) -> bool:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def start(self, work: Work) -> Work:
        task = asyncio.ensure_future(work())
        return lambda: asyncio.wait({task}, timeout=STOP_LIMIT)

    async def defer(self, work: Work) -> None:
        self._started(work)

    async def finish(self, work: Work) -> None:
        await asyncio.shield(self._started(work))

    def _started(self, work: Work) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    async def bounded(work: Callable[[], Any], left: float | None, abort: Abort, ended: Callable[[], bool] | None = None) -> Any:
        loop, task = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())
        scope = asyncio.timeout(left)
        works, is_cancelled_again = True, False
        aborting: asyncio.Task[None] | None = None
        timers: dict[str, asyncio.TimerHandle] = {}

        async def aborted() -> None:
            nonlocal is_cancelled_again
            if await abort() and works:
                is_cancelled_again = task.cancel()

        def abort_now() -> None:
            nonlocal aborting
            aborting = aborting or loop.create_task(aborted())

        def ask() -> None:
            if ended and ended():
                scope.reschedule(loop.time())
                timers["ended"] = loop.call_later(ABORT_DELAY, abort_now)
            else:
                timers["ask"] = loop.call_later(CHECK_INTERVAL, ask)

        if ended:
            timers["ask"] = loop.call_later(CHECK_INTERVAL, ask)
        if left is not None:
            timers["abort"] = loop.call_later(left + ABORT_DELAY, abort_now)
        try:
            async with scope:
                try:
                    return await maybe_await(work())
                finally:
                    works = False
                    if is_cancelled_again:
                        task.uncancel()
        except (TimeoutError, asyncio.CancelledError) as error:
            # CancelledError: also where anyio 3 has cancelled the task before, which it leaves counted.  But of two, one is another's.
            if not scope.expired() or isinstance(error, asyncio.CancelledError) and isinstance(error.__context__, asyncio.CancelledError):
                raise
        finally:
            for timer in timers.values():
                timer.cancel()
            if scope.expired():
                await (aborting or aborted())


Runtime = SyncRuntime | AsyncRuntime


async def answered(runtime: Runtime, send: Callable[[], Any], limit: float | None, abort: Abort) -> Any:
    """The server's answer.  If there is none within the limit, close the connection with abort() and raise TimedOut."""
    silent = False

    async def end() -> Any:
        nonlocal silent
        silent = True
        return await abort()

    try:
        found = await runtime.bounded(send, limit, end)
        if silent:
            raise TimeoutError
        return found
    except Exception as error:
        if silent:
            raise TimedOut(f"the server did not answer within {limit:g} s") from error
        raise
