"""Spans for tests of the trace viewer."""

from typing import Any

from stepwire.traces import Span

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
MS = 1_000_000


def span(span_id: str, parent_id: str = "", *, trace_id: str = TRACE_ID, **fields: Any) -> Span:
    """A span of 10 ms from time 0, named by its id, of service "a"."""
    values: dict[str, Any] = {
        "name": span_id,
        "kind": "internal",
        "service": "a",
        "start_ns": 0,
        "end_ns": 10 * MS,
        "attributes": {},
    }
    return Span(trace_id=trace_id, span_id=span_id, parent_id=parent_id, **(values | fields))
