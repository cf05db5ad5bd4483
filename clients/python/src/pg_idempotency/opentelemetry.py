"""
OpenTelemetry: spans and metrics of a client.

	Idempotency(pool, tracing=OpenTelemetry())

Spans idempotency.request (or .job, .transaction) with idempotency.wait, .claim, .handler and .commit in it;
that of a replay links to the one that did the work.  Metrics: idempotency.requests, by idempotency.outcome,
and idempotency.wait.duration.  They have no scope and no key: attributes(outcome) adds what you want.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import metrics, trace

from . import __version__
from .telemetry import Outcome

__all__ = ["OpenTelemetry"]

NAME = "pg_idempotency"
PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class OpenTelemetry:
    """What a client is made with: tracing=OpenTelemetry()."""

    def __init__(self, attributes: Callable[[Outcome], Mapping[str, Any]] | None = None) -> None:
        meter = metrics.get_meter(NAME, __version__)
        self._tracer = trace.get_tracer(NAME, __version__)
        self._requests = meter.create_counter("idempotency.requests", unit="{request}", description="Requests and jobs, by their outcome")
        self._waits = meter.create_histogram("idempotency.wait.duration", unit="s",
                                             description="How long calls that are allowed to wait took until they had their claim")
        self._attributes = attributes

    @contextmanager
    def span(self, name: str) -> Iterator[Any]:
        # The text of an error can have a part of the key.
        with self._tracer.start_as_current_span(f"idempotency.{name}", attributes={"db.system.name": "postgresql"},
                                                record_exception=False, set_status_on_exception=False) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(trace.StatusCode.ERROR)
                raise

    def traceparent(self) -> str | None:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def ended(self, outcome: Outcome, origin: str | None) -> None:
        attributes: dict[str, Any] = {"idempotency.outcome": outcome.outcome}
        self._requests.add(1, attributes)
        if outcome.waited:
            self._waits.record(outcome.waited / 1000, attributes)
        span = trace.get_current_span()
        span.set_attributes({**attributes, "idempotency.attempt": outcome.attempt,
                             **(self._attributes(outcome) if self._attributes else {})})
        parts = PARENT.fullmatch(origin or "")
        if parts and hasattr(span, "add_link"):             # from 1.24 on
            span.add_link(trace.SpanContext(int(parts[1], 16), int(parts[2], 16), True, trace.TraceFlags(int(parts[3], 16))))
