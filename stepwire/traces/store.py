"""Spans of recent traces, in bounded memory."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from stepwire.telemetry import names

AttributeValue: TypeAlias = str | bool | int | float


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span; nanoseconds since the Unix epoch."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class Span:
    """A span as its process reported it. Ids are hexadecimal; `parent_id` is empty for a root.

    Times are nanoseconds since the Unix epoch by the clock of the span's own host: spans of
    different hosts may seem to overlap in ways that they did not.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    is_error: bool = False
    status_message: str = ""
    resource: Mapping[str, AttributeValue] = field(default_factory=dict)
    """Of its process; one mapping for all spans that came together."""

    @property
    def duration_ns(self) -> int:
        """Its length; 0 for one that ends before it starts."""
        return max(0, self.end_ns - self.start_ns)

    @property
    def place(self) -> tuple[tuple[str, str], ...]:
        """Of which epoch and rank it is, as ("epoch", "2") and ("rank", "1"), as far as it says so."""
        told = (("epoch", names.EPOCH), ("rank", names.RANK))
        return tuple((word, str(self.attributes[key])) for word, key in told if key in self.attributes)

    @property
    def label(self) -> str:
        """Its name, with its place: spans of several ranks and epochs have one name."""
        place = ", ".join(f"{word} {value}" for word, value in self.place)
        return f"{self.name} ({place})" if place else self.name

    @property
    def short_label(self) -> str:
        """The same in fewer characters, such as "attempt e2 r1"."""
        return self.name + "".join(f" {word[0]}{value}" for word, value in self.place)


@dataclass(frozen=True)
class Trace:
    """The spans of one trace that have arrived so far, by start; at least one."""

    trace_id: str
    spans: tuple[Span, ...]
    num_dropped: int = 0

    @cached_property
    def root(self) -> Span:
        """The span under which the others are; the first one without a known parent."""
        return self.tree[0][1]

    @cached_property
    def services(self) -> tuple[str, ...]:
        """Names of the services, in the order in which they appear in the tree."""
        return tuple(dict.fromkeys(span.service for _, span in self.tree))

    @cached_property
    def start_ns(self) -> int:
        """Start of the first span."""
        return min(span.start_ns for span in self.spans)

    @cached_property
    def end_ns(self) -> int:
        """End of the last span."""
        return max(max(span.end_ns, span.start_ns) for span in self.spans)

    @property
    def duration_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.start_ns

    @cached_property
    def num_errors(self) -> int:
        """Spans whose status is an error."""
        return sum(span.is_error for span in self.spans)

    @cached_property
    def searchable(self) -> str:
        """All that a search looks through, in lower case."""
        words = [self.trace_id]
        for span in self.spans:
            words.append(span.name)
            words += map(str, span.attributes.values())
        return "\n".join(words).lower()

    @cached_property
    def linked_ids(self) -> tuple[str, ...]:
        """Ids of the other traces that its spans link to, each once."""
        ids = dict.fromkeys(trace_id for span in self.spans for trace_id, _ in span.links)
        ids.pop(self.trace_id, None)
        return tuple(ids)

    def attribute(self, name: str) -> AttributeValue | None:
        """The value of an attribute in the first span that has it."""
        return next((span.attributes[name] for span in self.spans if name in span.attributes), None)

    @cached_property
    def tree(self) -> tuple[tuple[int, Span], ...]:
        """Every span once, with its depth, parents before children, siblings by start.

        A span whose parent is not there counts as a root, and so does one of those whose parents
        form a circle.
        """
        known = {span.span_id for span in self.spans}
        children: dict[str, list[Span]] = {}
        for span in reversed(self.spans):  # Reversed, for the stack.
            children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
        stack = [(0, span) for span in children.get("", [])]
        found: dict[str, tuple[int, Span]] = {}
        for start in (None, *self.spans):
            if start is not None and start.span_id not in found:
                stack.append((0, start))
            while stack:
                depth, span = stack.pop()
                if span.span_id not in found:
                    found[span.span_id] = (depth, span)
                    stack.extend((depth + 1, child) for child in children.get(span.span_id, ()))
        return tuple(found.values())


@dataclass(slots=True)
class _Entry:
    spans: dict[str, Span] = field(default_factory=dict)
    num_dropped: int = 0
    trace: Trace | None = None
    """Made from the others when first asked for."""


class TraceStore:
    """Keeps the traces that were touched last; the oldest go first. May be used from any thread.

    `max_spans` bounds the spans of all traces together; a single trace may have a quarter of them.
    """

    def __init__(self, *, max_traces: int = 10_000, max_spans: int = 250_000) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._max_spans_of_trace = max(1, max_spans // 4)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_spans = 0
        self._lock = threading.Lock()
        self._listeners: set[Callable[[set[str]], None]] = set()

    @property
    def num_traces(self) -> int:
        """Traces held."""
        return len(self._entries)

    @property
    def num_spans(self) -> int:
        """Spans held."""
        return self._num_spans

    def add(self, spans: Iterable[Span]) -> None:
        """Takes spans; one that is there already replaces the former."""
        touched: set[str] = set()
        with self._lock:
            for span in spans:
                self._add_one(span)
                touched.add(span.trace_id)
            while len(self._entries) > self._max_traces or self._num_spans > self._max_spans:
                _, entry = self._entries.popitem(last=False)
                self._num_spans -= len(entry.spans)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(touched)

    def get(self, trace_id: str) -> Trace | None:
        """A trace by its id (32 hexadecimal digits)."""
        trace_id = trace_id.lower()
        with self._lock:
            entry = self._entries.get(trace_id)
            if entry is None:
                return None
            if entry.trace is None:
                spans = sorted(entry.spans.values(), key=lambda span: (span.start_ns, span.end_ns, span.span_id))
                entry.trace = Trace(trace_id, tuple(spans), entry.num_dropped)
            return entry.trace

    def recent(
        self, *, limit: int = 100, offset: int = 0, matches: Callable[[Trace], bool] | None = None
    ) -> Sequence[Trace]:
        """Traces for which `matches` holds, the one touched last first; `offset` skips so many of them."""
        with self._lock:
            newest_first = list(reversed(self._entries))
        found: list[Trace] = []
        for trace_id in newest_first:
            trace = self.get(trace_id)
            if trace is not None and (matches is None or matches(trace)):
                found.append(trace)
                if len(found) >= offset + limit:
                    break
        return found[offset:]

    def slowest(
        self, *, limit: int = 100, offset: int = 0, matches: Callable[[Trace], bool] | None = None
    ) -> Sequence[Trace]:
        """As `recent`, but the longest first."""
        found = list(self.recent(limit=self._max_traces, matches=matches))
        found.sort(key=lambda trace: trace.duration_ns, reverse=True)
        return found[offset : offset + limit]

    def by_attribute(self, name: str, value: AttributeValue) -> Trace | None:
        """The latest trace with a span whose attribute `name` is `value`."""
        found = self.recent(limit=1, matches=lambda trace: any(s.attributes.get(name) == value for s in trace.spans))
        return found[0] if found else None

    def by_request_id(self, request_id: str) -> Trace | None:
        """The latest trace of a request."""
        return self.by_attribute(names.REQUEST_ID, request_id)

    async def wait_for(self, predicate: Callable[[Trace], bool], timeout: float) -> Trace:
        """A trace for which `predicate` holds, as soon as there is one.

        Raises TimeoutError after `timeout` seconds.
        """
        loop, touched, arrived = asyncio.get_running_loop(), set[str](), asyncio.Event()

        def note(trace_ids: set[str]) -> None:
            touched.update(trace_ids)
            arrived.set()

        def listener(trace_ids: set[str]) -> None:
            loop.call_soon_threadsafe(note, trace_ids)

        with self._lock:
            self._listeners.add(listener)
        try:
            async with asyncio.timeout(timeout):
                found = next(iter(self.recent(limit=1, matches=predicate)), None)
                while found is None:
                    await arrived.wait()
                    arrived.clear()
                    traces = [trace for trace in map(self.get, touched) if trace is not None]
                    touched.clear()
                    found = next(filter(predicate, traces), None)
                return found
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def _add_one(self, span: Span) -> None:
        entry = self._entries.setdefault(span.trace_id, _Entry())
        self._entries.move_to_end(span.trace_id)
        if span.span_id not in entry.spans:
            if len(entry.spans) >= self._max_spans_of_trace:
                entry.num_dropped += 1
                entry.trace = None
                return
            self._num_spans += 1
        entry.spans[span.span_id] = span
        entry.trace = None
