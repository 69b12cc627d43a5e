"""What the page asks for, as JSON: lists of traces, and one with those that it links to.

Times are milliseconds: a browser's numbers have 53 bits.
"""

from collections.abc import Callable, Mapping
from typing import Any

from stepwire.telemetry import names
from stepwire.traces.store import Span, Trace, TraceStore

_MAX_LIMIT = 500
_MAX_SPANS_SHOWN = 5_000
_MAX_LINKED = 128

_STARTS = (names.SPAN_STARTUP, names.SPAN_GROUP_RECOVERY, names.SPAN_LOAD)
_STEP_PARTS = (names.SPAN_STEP_PREPARE, names.SPAN_STEP_FORWARD, names.SPAN_STEP_SAMPLE)


def list_traces(store: TraceStore, query: Mapping[str, list[str]]) -> dict[str, Any]:
    """A part of the list. Of the query: `text` is found anywhere in a trace; `errors` = 1 keeps the failed; `kind` is
    "requests", "steps", "starts" or anything else for all; `order` is "slowest" or anything else for the newest;
    `limit` and `offset`."""
    limit, offset = min(_number(query, "limit", 100), _MAX_LIMIT), _number(query, "offset", 0)
    listed = store.slowest if _word(query, "order") == "slowest" else store.recent
    found = listed(limit=limit + 1, offset=offset, matches=_filter(query))
    return {
        "traces": [summary(trace) for trace in found[:limit]],
        "has_more": len(found) > limit,
        "num_traces": store.num_traces,
    }


def summary(trace: Trace) -> dict[str, Any]:
    """What the list shows of a trace."""
    return {
        "trace_id": trace.trace_id,
        "name": trace.root.name,
        "kind": kind_of(trace),
        "services": trace.services,
        "start_ms": trace.start_ns / 1e6,
        "duration_ms": trace.duration_ns / 1e6,
        "num_spans": len(trace.spans),
        "num_errors": trace.num_errors,
        "num_dropped": trace.num_dropped,
        "request_id": trace.attribute(names.REQUEST_ID),
        "outcome": str(trace.attribute(names.ERROR_TYPE) or ""),
    }


def detail(trace: Trace, store: TraceStore) -> dict[str, Any]:
    """A whole trace, offsets from its start; with the traces in the store that it links to, on the same axis."""
    rows = trace.tree[:_MAX_SPANS_SHOWN]
    linked = [found for found in map(store.get, trace.linked_ids[:_MAX_LINKED]) if found is not None]
    return {
        **summary(trace),
        "num_hidden": len(trace.tree) - len(rows),
        "spans": [_span(span, depth, trace.start_ns) for depth, span in rows],
        "linked": [_linked(other, trace.start_ns) for other in linked],
    }


def kind_of(trace: Trace) -> str:
    """What the trace is of: "requests", "steps", "starts" or "other"."""
    if any(names.GEN_AI_OPERATION in span.attributes for span in trace.spans):
        return "requests"
    if trace.root.name == names.SPAN_STEP:
        return "steps"
    # Below an operator's call where one has brought a model, or a replica.
    if any(span.name.partition(".")[0] in _STARTS for span in trace.spans):
        return "starts"
    return "other"


def _filter(query: Mapping[str, list[str]]) -> Callable[[Trace], bool]:
    text, kind, only_errors = _word(query, "text").lower(), _word(query, "kind"), _word(query, "errors") == "1"

    def matches(trace: Trace) -> bool:
        if only_errors and not trace.num_errors:
            return False
        if kind in ("requests", "steps", "starts") and kind_of(trace) != kind:
            return False
        return not text or text in trace.searchable

    return matches


def _linked(trace: Trace, start_ns: int) -> dict[str, Any]:
    """A trace beside another one: of a step what each rank did."""
    parts = [span for span in trace.spans if span.name in _STEP_PARTS]
    ranks = {span.span_id: span.attributes.get(names.RANK, 0) for span in trace.spans}
    return {
        **summary(trace),
        "offset_ms": (trace.root.start_ns - start_ns) / 1e6,
        "duration_ms": trace.root.duration_ns / 1e6,
        "parts": [
            {
                "name": span.name.partition(".")[2],
                "rank": ranks.get(span.parent_id, 0),
                "offset_ms": (span.start_ns - start_ns) / 1e6,
                "duration_ms": span.duration_ns / 1e6,
            }
            for span in parts
        ],
    }


def _span(span: Span, depth: int, start_ns: int) -> dict[str, Any]:
    return {
        "span_id": span.span_id,
        "depth": depth,
        "name": span.name,
        "label": span.label,
        "kind": span.kind,
        "service": span.service,
        "rank": span.attributes.get(names.RANK),
        "offset_ms": (span.start_ns - start_ns) / 1e6,
        "duration_ms": span.duration_ns / 1e6,
        "is_error": span.is_error,
        "status_message": span.status_message,
        "attributes": _as_text(span.attributes),
        "events": [
            {"name": e.name, "offset_ms": (e.time_ns - start_ns) / 1e6, "attributes": _as_text(e.attributes)}
            for e in span.events
        ],
        "links": [trace_id for trace_id, _ in span.links],
    }


def _as_text(attributes: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in sorted(attributes.items())}


def _word(query: Mapping[str, list[str]], name: str) -> str:
    return query.get(name, [""])[0].strip()


def _number(query: Mapping[str, list[str]], name: str, default: int) -> int:
    value = query.get(name, [""])[0]
    return int(value) if value.isdecimal() and len(value) < 10 else default
