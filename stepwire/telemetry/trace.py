"""Trace contexts in and out of metadata and fields, and spans with explicit times.

Only W3C `traceparent` and `tracestate` are understood. Baggage is dropped: nothing here needs it,
and it is a way to make a service carry a stranger's bytes.
"""

import time
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from stepwire.telemetry import names

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
INSTRUMENTATION_NAME = "stepwire"

_PROPAGATOR = TraceContextTextMapPropagator()

_SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span, at a wall-clock time in nanoseconds since the Unix epoch."""

    name: str
    time_ns: int
    attributes: Attributes = None


def get_tracer(provider: TracerProvider | None) -> Tracer:
    """Stepwire's tracer; of the process's global provider (a no-op unless the application set one) for None."""
    return trace.get_tracer(INSTRUMENTATION_NAME, tracer_provider=provider)


def current_span() -> Span:
    """The span the running task works under; inside an RPC handler its SERVER span."""
    return trace.get_current_span()


def current_span_context() -> SpanContext:
    """The context of `current_span()`; not `is_valid` when there is none."""
    return trace.get_current_span().get_span_context()


def started_ns(span: Span) -> int:
    """When a recorded span began, in nanoseconds since the Unix epoch; now for one that is not recorded."""
    return getattr(span, "start_time", None) or time.time_ns()


def traceparent(span: Span | SpanContext, *, if_sampled: bool = False) -> str:
    """The W3C form of a span's context; empty for none, and with `if_sampled` for one that is not recorded."""
    context = span.get_span_context() if isinstance(span, Span) else span
    if not context.is_valid or (if_sampled and not context.trace_flags.sampled):
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def context_from_traceparent(value: str) -> Context:
    """The context to start child spans in; an empty one for an empty or malformed value."""
    return _PROPAGATOR.extract({TRACEPARENT: value}, Context()) if value else Context()


def context_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's context, from the metadata of its call; an empty one when it sent none."""
    carrier = {
        key: value for key, value in metadata or () if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)
    }
    return _PROPAGATOR.extract(carrier, Context()) if carrier else Context()


def context_of(span: Span | SpanContext | None) -> Context:
    """The context to start children of a span in; of None, one to start a new trace in."""
    if span is None:
        return Context()
    if isinstance(span, SpanContext):
        span = trace.NonRecordingSpan(span)
    return trace.set_span_in_context(span, Context())


def inject(span: Span, metadata: MutableSequence[tuple[str, str]]) -> None:
    """Appends a span's context to the metadata of an outgoing call; nothing for a span that is no-op."""
    value = traceparent(span)
    if not value:
        return
    metadata.append((TRACEPARENT, value))
    state = span.get_span_context().trace_state
    if state:
        metadata.append((TRACESTATE, state.to_header()))


def record_span(
    tracer: Tracer,
    name: str,
    parent: Context,
    times_ns: tuple[int, int],
    *,
    attributes: Attributes = None,
    events: Sequence[SpanEvent] = (),
    links: Sequence[Link] = (),
) -> Span:
    """Records an INTERNAL span that is over.

    `times_ns` are wall-clock start and end, in nanoseconds since the Unix epoch. Returns the ended span.
    """
    start_ns, end_ns = times_ns
    span = tracer.start_span(
        name, parent, kind=SpanKind.INTERNAL, attributes=attributes, links=links, start_time=start_ns
    )
    for event in events:
        span.add_event(event.name, event.attributes, event.time_ns)
    span.end(max(start_ns, end_ns))
    return span


def end_rpc_span(span: Span, code: grpc.StatusCode, details: str = "") -> None:
    """Ends the span of a call with its status, by the rule of its side.

    On the client everything but OK is an error; on the server only what the server did wrong.
    """
    kind = getattr(span, "kind", SpanKind.SERVER)
    failed = code in _SERVER_ERRORS if kind is SpanKind.SERVER else code is not grpc.StatusCode.OK
    span.set_attribute(names.RPC_STATUS, code.name)
    if failed:
        span.set_attribute(names.ERROR_TYPE, code.name)
        span.set_status(Status(StatusCode.ERROR, details or code.name))
    span.end()
