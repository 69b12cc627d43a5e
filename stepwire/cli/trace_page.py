"""Reads traces back from the page of a running `stepwire traces`."""

import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlencode

from stepwire.cli.errors import CommandError
from stepwire.traces.store import Span, SpanEvent, Trace

_TIMEOUT_S = 10.0
# What `stepwire traces export` offers, and where the page has it.
EXPORTS = {"json": "", "otlp-json": "/otlp.json", "otlp": "/otlp"}


def fetch_trace(page: tuple[str, int], wanted: str) -> Trace:
    """The latest trace that `wanted`, an id or a request id, matches; of all traces when it is empty.

    Raises CommandError when there is none, or nobody answers.
    """
    base = _base(page)
    return trace_from_json(_get(f"{base}/api/traces/{_find(base, wanted)}"))


def fetch_list(page: tuple[str, int], **query: str | int) -> list[dict[str, Any]]:
    """Summaries of traces, by a query as stepwire.traces.api.list_traces takes it. Raises CommandError."""
    found: list[dict[str, Any]] = _get(f"{_base(page)}/api/traces?{urlencode(query)}")["traces"]
    return found


def fetch_export(page: tuple[str, int], wanted: str, form: str) -> bytes:
    """A trace as the page exports it: `form` is "json", "otlp-json" or "otlp". Raises CommandError."""
    base = _base(page)
    return _read(f"{base}/api/traces/{_find(base, wanted)}{EXPORTS[form]}")


def _find(base: str, wanted: str) -> str:
    """The id of the latest trace that `wanted` matches."""
    found = _get(f"{base}/api/traces?limit=1&text={quote(wanted)}")["traces"]
    if not found:
        what = f"no trace matches {wanted!r}" if wanted else "no trace has arrived yet"
        raise CommandError(f"{what} on {base}; was the request sent with --otlp-endpoint?")
    return str(found[0]["trace_id"])


def _base(page: tuple[str, int]) -> str:
    host, port = page
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def trace_from_json(value: dict[str, Any]) -> Trace:
    """A trace from what the page says of it: parents by depth, times in nanoseconds from milliseconds."""
    trace_id, start_ms = str(value["trace_id"]), float(value["start_ms"])
    path: list[str] = []
    spans = []
    for row in value["spans"]:
        del path[row["depth"] :]
        spans.append(_span(row, trace_id, path[-1] if path else "", start_ms))
        path.append(row["span_id"])
    return Trace(trace_id, tuple(sorted(spans, key=lambda span: span.start_ns)), value["num_dropped"])


def _span(row: dict[str, Any], trace_id: str, parent_id: str, start_ms: float) -> Span:
    start_ns = _ns(start_ms) + _ns(row["offset_ms"])
    return Span(
        trace_id=trace_id,
        span_id=row["span_id"],
        parent_id=parent_id,
        name=row["name"],
        kind=row["kind"],
        service=row["service"],
        start_ns=start_ns,
        end_ns=start_ns + _ns(row["duration_ms"]),
        attributes=row["attributes"],
        events=tuple(
            SpanEvent(event["name"], _ns(start_ms) + _ns(event["offset_ms"]), event["attributes"])
            for event in row["events"]
        ),
        is_error=row["is_error"],
        status_message=row["status_message"],
    )


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def _read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body
    except (urllib.error.URLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", error)
        text = f"{url.partition('/api')[0]} does not answer ({reason}): start `stepwire traces`, or name its --page"
        raise CommandError(text) from error


def _get(url: str) -> dict[str, Any]:
    try:
        value = json.loads(_read(url))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CommandError(f"{url} is not a page of `stepwire traces`")
    return value
