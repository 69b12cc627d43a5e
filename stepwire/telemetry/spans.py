"""Spans that cost little: OpenTelemetry's API over a record of plain values.

The SDK's span, encoded, takes about 80 microseconds of processor time where this one takes about a tenth of it
(docs/adr/0023). A span that is over goes to a `SpanSink` as it is, and is encoded on another thread.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import Attributes, AttributeValue

from stepwire.telemetry import names

MAX_EVENTS = 1024
MAX_LINKS = 1024

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
# A trace id's lower half decides, as in OpenTelemetry's own sampler, so that services with one ratio agree.
_LOWER_HALF = (1 << 64) - 1


class SpanSink(Protocol):
    """Who takes spans that are over."""

    def put(self, span: "RecordedSpan") -> None:
        """Takes one, from any thread; must not block."""


class RecordedSpan(Span):
    """A span that is recorded. Times are wall-clock nanoseconds since the Unix epoch.

    Events are (name, time, attributes); past `MAX_EVENTS` of them, and `MAX_LINKS` links, they are counted only.
    Used from one thread at a time; what is set after its end is ignored.
    """

    __slots__ = (
        "_sink",
        "attributes",
        "context",
        "end_ns",
        "events",
        "kind",
        "links",
        "name",
        "num_dropped_events",
        "num_dropped_links",
        "parent_id",
        "start_ns",
        "status",
        "status_message",
    )

    def __init__(self, sink: SpanSink, name: str, context: SpanContext, parent_id: int, kind: SpanKind) -> None:
        """`parent_id` is 0 for a root."""
        self._sink = sink
        self.name = name
        self.context = context
        self.parent_id = parent_id
        self.kind = kind
        self.attributes: dict[str, AttributeValue] = {}
        self.events: list[tuple[str, int, Attributes]] = []
        self.links: list[Link] = []
        self.num_dropped_events = 0
        self.num_dropped_links = 0
        self.start_ns = 0
        self.end_ns = 0
        self.status = StatusCode.UNSET
        self.status_message = ""

    @property
    def start_time(self) -> int:
        """When it began, as the SDK's spans have it."""
        return self.start_ns

    def get_span_context(self) -> SpanContext:
        """See the API."""
        return self.context

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self.end_ns == 0

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See the API."""
        if self.end_ns == 0:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """See the API."""
        if self.end_ns == 0:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """See the API."""
        if self.end_ns:
            return
        if len(self.events) >= MAX_EVENTS:
            self.num_dropped_events += 1
        else:
            self.events.append((name, timestamp or time.time_ns(), attributes))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """See the API."""
        if self.end_ns:
            return
        if len(self.links) >= MAX_LINKS:
            self.num_dropped_links += 1
        else:
            self.links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        """See the API."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See the API."""
        if self.end_ns:
            return
        told = status if isinstance(status, Status) else Status(status, description)
        self.status, self.status_message = told.status_code, told.description or ""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: ARG002 - deprecated by the conventions, and passed by the API
    ) -> None:
        """Adds an event with the exception's type and text; its traceback is the log's."""
        told = {"exception.type": type(exception).__qualname__, "exception.message": str(exception)}
        self.add_event("exception", {**told, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Hands it to the sink, the first time."""
        if self.end_ns == 0:
            self.end_ns = end_time or time.time_ns()
            self._sink.put(self)


class SpanRecorder(TracerProvider, Tracer):
    """A tracer provider, and its one tracer.

    A span is sampled as its parent is; a root by `sample_ratio`, or always when its attributes have
    `names.KEEP`. Without a sink nothing is recorded: children pass their parent's context on as it is, so that no
    other service's spans hang from one that nobody sent.
    """

    def __init__(self, sink: SpanSink | None, sample_ratio: float = 1.0) -> None:
        self._sink = sink
        self._bound = round(sample_ratio * (1 << 64)) if sink is not None else 0

    def get_tracer(self, *_args: Any, **_kwargs: Any) -> Tracer:
        """Itself: there is one scope, whatever it is called."""
        return self

    def start_span(  # noqa: PLR0913 - the API's
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,  # noqa: ARG002 - of a span as a context manager, which this one is not
        set_status_on_exception: bool = True,  # noqa: ARG002
    ) -> Span:
        """See the API."""
        parent = trace.get_current_span(context).get_span_context()
        if not parent[5]:  # is_valid
            return self._root(name, kind, attributes, links, start_time)
        if self._sink is None or not parent[3] & 1:
            return NonRecordingSpan(parent)
        own = SpanContext(parent[0], random.getrandbits(64) or 1, False, parent[3], parent[4])
        span = RecordedSpan(self._sink, name, own, parent[1], kind)
        return _begun(span, attributes, links, start_time)

    @contextmanager
    def _as_current(self, span: Span, **how: bool) -> Iterator[Span]:
        with trace.use_span(span, **how):
            yield span

    def start_as_current_span(  # noqa: PLR0913 - the API's
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Any:
        """See the API."""
        span = self.start_span(name, context, kind, attributes, links, start_time)
        return self._as_current(
            span,
            end_on_exit=end_on_exit,
            record_exception=record_exception,
            set_status_on_exception=set_status_on_exception,
        )

    def _root(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link] | None,
        start_time: int | None,
    ) -> Span:
        trace_id = random.getrandbits(128) or 1
        is_sampled = self._sink is not None and (
            trace_id & _LOWER_HALF < self._bound or (attributes is not None and names.KEEP in attributes)
        )
        flags = _SAMPLED if is_sampled else _NOT_SAMPLED
        own = SpanContext(trace_id, random.getrandbits(64) or 1, False, flags)
        if not is_sampled:
            return NonRecordingSpan(own)
        return _begun(RecordedSpan(cast(SpanSink, self._sink), name, own, 0, kind), attributes, links, start_time)


def _begun(
    span: RecordedSpan, attributes: Attributes, links: Sequence[Link] | None, start_time: int | None
) -> RecordedSpan:
    span.start_ns = start_time or time.time_ns()
    if attributes:
        span.attributes.update(attributes)
    for link in links or ():
        span.add_link(link.context, link.attributes)
    return span
