"""Spans as OTLP messages: opentelemetry/proto/trace/v1/trace.proto of opentelemetry-proto 1.10."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.trace import SpanKind, StatusCode

from stepwire.telemetry.spans import RecordedSpan

MAX_TEXT_CHARS = 4096
_SPANS_BETWEEN_PAUSES = 16

_KINDS = {
    SpanKind.INTERNAL: trace_pb2.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: trace_pb2.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: trace_pb2.Span.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: trace_pb2.Span.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: trace_pb2.Span.SPAN_KIND_CONSUMER,
}


def encode_spans(
    resource: Mapping[str, Any],
    scope: str,
    spans: Iterable[RecordedSpan],
    *,
    pause: Callable[[], None] = lambda: None,
) -> ExportTraceServiceRequest:
    """One export of spans of one process. Texts are cut at `MAX_TEXT_CHARS`.

    `pause` is called after every few spans: encoding keeps the interpreter from the threads that serve.
    """
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    _put_attributes(of_resource.resource.attributes, resource)
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = scope
    for number, span in enumerate(spans, 1):
        _put_span(of_scope.spans.add(), span)
        if number % _SPANS_BETWEEN_PAUSES == 0:
            pause()
    return request


def _put_span(message: trace_pb2.Span, span: RecordedSpan) -> None:
    trace_id, span_id, _is_remote, flags, state, _is_valid = span.context
    message.trace_id = trace_id.to_bytes(16, "big")
    message.span_id = span_id.to_bytes(8, "big")
    if span.parent_id:
        message.parent_span_id = span.parent_id.to_bytes(8, "big")
    if state:
        message.trace_state = state.to_header()
    message.flags = flags
    message.name = _utf8(span.name)
    message.kind = _KINDS[span.kind]
    message.start_time_unix_nano = span.start_ns
    message.end_time_unix_nano = span.end_ns
    _put_attributes(message.attributes, span.attributes)
    for name, time_ns, attributes in span.events:
        event = message.events.add()
        event.name, event.time_unix_nano = name, time_ns
        if attributes:
            _put_attributes(event.attributes, attributes)
    for link in span.links:
        put = message.links.add()
        put.trace_id = link.context.trace_id.to_bytes(16, "big")
        put.span_id = link.context.span_id.to_bytes(8, "big")
        if link.attributes:
            _put_attributes(put.attributes, link.attributes)
    message.dropped_events_count = span.num_dropped_events
    message.dropped_links_count = span.num_dropped_links
    if span.status is not StatusCode.UNSET:
        # The codes of the API are those of the wire: 1 for OK, 2 for ERROR.
        message.status.code = trace_pb2.Status.StatusCode.ValueType(span.status.value)
        message.status.message = _utf8(span.status_message)


def _put_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        pair = target.add()
        pair.key = key
        _put_value(pair.value, value)


def _put_value(target: AnyValue, value: Any) -> None:
    """Texts, bools, integers that fit 64 bits, floats, and lists of them; all else as text."""
    if isinstance(value, str):
        target.string_value = _utf8(value)
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, (list, tuple)):
        for item in value:
            _put_value(target.array_value.values.add(), item)
        target.array_value.SetInParent()
    else:
        target.string_value = _utf8(str(value))


def _utf8(text: str) -> str:
    """The text cut, and without lone surrogates, which protobuf refuses."""
    text = text[:MAX_TEXT_CHARS]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
