"""
Reports on the calls of a client: to a log, to a hook, and to a tracing library.

The log is "pg_idempotency", at level INFO; its records have the fields of an Outcome but the scope, as idempotency_outcome
and so on.  A trace continues in duplicates and consumers: the traceparent (W3C Trace Context) of a request is stored with
its response, in a header that never goes out, and put into the headers of messages that are published.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from .errors import IdempotencyError, InProgress, KeyExpired, KeyReused
from .functions import Argument, JsonText, Statement

T = TypeVar("T")
LOG = logging.getLogger("pg_idempotency")
TRACEPARENT = "traceparent"
REFUSALS: dict[type[BaseException], str] = {InProgress: "in_progress", KeyReused: "hash_conflict", KeyExpired: "expired"}
_NO_SPAN = nullcontext()


@dataclass(frozen=True)
class Outcome:
    """The end of a call."""

    call: str
    """request, job, or transaction, which is a request without a key."""
    scope: str
    outcome: str
    """new, replay, erased, in_progress, hash_conflict, expired, or failed for any other error."""
    ms: float
    attempt: int
    """How often the handler ran; of a job, the number of the attempt."""
    waited: float
    """Milliseconds that a call which is allowed to wait took until it had the answer to its claim."""


@dataclass(eq=False)
class Progress:
    """The progress of a call that is running."""

    attempt: int = 0
    waited: float = 0.0
    """Seconds."""
    traceparent: str | None = None
    origin: str | None = None
    """The traceparent of the request that is replayed."""


class Tracing(Protocol):
    """A tracing library, such as pg_idempotency.opentelemetry.OpenTelemetry."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Around request, job, transaction and, in these, wait, claim, handler and commit, which is complete, too."""

    def traceparent(self) -> str | None:
        """Of the span that is open here."""

    def ended(self, outcome: Outcome, origin: str | None) -> None:
        """In the span of the call.  origin is the traceparent of the request that is replayed."""


class Telemetry:
    def __init__(self, on_outcome: Callable[[Outcome], Any] | None = None, tracing: Tracing | None = None) -> None:
        if inspect.iscoroutinefunction(on_outcome):
            raise TypeError("on_outcome is called, and not awaited: it must not be a coroutine function")
        self._on_outcome, self._tracing = on_outcome, tracing

    def span(self, name: str) -> AbstractContextManager[Any]:
        return _NO_SPAN if self._tracing is None else self._tracing.span(name)

    async def reported(self, call: str, scope: str, progress: Progress, work: Callable[[], Awaitable[T]]) -> T:
        """What the work returns, whose outcome is reported."""
        if self._tracing is None and self._on_outcome is None and not LOG.isEnabledFor(logging.INFO):
            return await work()
        began, outcome = time.monotonic(), "failed"
        with self.span(call):
            progress.traceparent = self._tracing.traceparent() if self._tracing else None
            try:
                result = await work()
                outcome = getattr(result, "outcome")
                return result
            except IdempotencyError as error:
                outcome = REFUSALS.get(type(error), "failed")
                raise
            finally:
                self._ended(Outcome(call, scope, outcome, (time.monotonic() - began) * 1000, progress.attempt,
                                    progress.waited * 1000), progress.origin)

    def _ended(self, outcome: Outcome, origin: str | None) -> None:
        try:
            if LOG.isEnabledFor(logging.INFO):
                fields = {f"idempotency_{name}": value for name, value in asdict(outcome).items() if name != "scope"}
                LOG.info("%s: %s in %.1f ms", outcome.call, outcome.outcome, outcome.ms, extra=fields)
            if self._tracing:
                self._tracing.ended(outcome, origin)
            if self._on_outcome:
                self._on_outcome(outcome)
        except Exception:
            with suppress(Exception):               # of the log itself
                LOG.exception("an outcome could not be reported")

    def traced(self, statement: Statement[T]) -> Statement[T]:
        """A statement that publishes messages, with the traceparent in their headers."""
        if self._tracing is None or statement.function not in ("idem_publish", "idem_publish_many"):
            return statement
        found = self._tracing.traceparent()
        return statement if found is None else statement._replace(
            arguments=tuple(_with(argument, statement, found) for argument in statement.arguments))


def _with(argument: Argument, statement: Statement[Any], traceparent: str) -> Argument:
    if argument.name != "headers":
        return argument
    if argument.type == "jsonb":
        return argument._replace(value=_header(argument.value, traceparent))
    headers = argument.value or [None] * len(statement.arguments[0].value or ())
    return argument._replace(value=[_header(one, traceparent) for one in headers])


def _header(headers: str | None, traceparent: str) -> JsonText | str:
    """Text of JSON, whose numbers stay as they are."""
    text = (headers or "{}").strip()
    if f'"{TRACEPARENT}"' in text or not text.endswith("}"):
        return text
    comma = "," if text[1:-1].strip() else ""
    return JsonText(f'{text[:-1]}{comma}"{TRACEPARENT}":"{traceparent}"}}')
