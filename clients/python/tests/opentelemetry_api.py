"""A stand-in for what pg_idempotency.opentelemetry uses of OpenTelemetry's API, which Debian has not."""

import secrets
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType


class SpanContext:
    def __init__(self, trace_id, span_id, is_remote, trace_flags=0):
        self.trace_id, self.span_id, self.is_remote, self.trace_flags = trace_id, span_id, is_remote, trace_flags

    @property
    def is_valid(self):
        return self.trace_id != 0 and self.span_id != 0


class Span:
    def __init__(self, name, parent, attributes):
        self.name, self.parent, self.attributes = name, parent, dict(attributes)
        self.links, self.status, self.events = [], None, []
        self.context = SpanContext(parent.context.trace_id if parent else secrets.randbits(128) or 1, secrets.randbits(64) or 1,
                                   False, 1)

    def get_span_context(self):
        return self.context

    def set_attribute(self, name, value):
        self.attributes[name] = value

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def set_status(self, status):
        self.status = status

    def add_link(self, context):
        self.links.append((context.trace_id, context.span_id, context.is_remote))


NONE = Span("", None, {})
NONE.context = SpanContext(0, 0, False)
current = ContextVar("current", default=None)
spans, measured = [], []


class Tracer:
    @contextmanager
    def start_as_current_span(self, name, *, attributes, record_exception, set_status_on_exception):
        assert not record_exception and not set_status_on_exception
        span = Span(name, current.get(), attributes)
        spans.append(span)
        token = current.set(span)
        try:
            yield span
        finally:
            current.reset(token)


class Instrument:
    def __init__(self, name, unit, description):
        self.name = name

    def add(self, value, attributes):
        measured.append((self.name, value, attributes))

    record = add


class Meter:
    create_counter = create_histogram = staticmethod(lambda name, unit, description: Instrument(name, unit, description))


class StatusCode:
    ERROR = "ERROR"


def install():
    package, trace, metrics = map(ModuleType, ("opentelemetry", "opentelemetry.trace", "opentelemetry.metrics"))
    trace.get_tracer = lambda name, version: Tracer()
    trace.get_current_span = lambda: current.get() or NONE
    trace.SpanContext, trace.TraceFlags, trace.StatusCode = SpanContext, int, StatusCode
    metrics.get_meter = lambda name, version: Meter()
    package.trace, package.metrics = trace, metrics
    sys.modules.update({"opentelemetry": package, "opentelemetry.trace": trace, "opentelemetry.metrics": metrics})
