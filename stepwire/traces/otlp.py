"""Traces as OTLP again, for other tools: what the receiver kept of them.

OTLP's JSON is protobuf's with ids in hexadecimal: "JSON Protobuf Encoding" in its specification.
"""

import base64
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from stepwire.traces.store import Span, Trace

_ID_KEYS = ("traceId", "spanId", "parentSpanId")
_KINDS = {
    name.removeprefix("SPAN_KIND_").lower(): trace_pb2.Span.SpanKind.Value(name)
    for name in trace_pb2.Span.SpanKind.keys()  # noqa: SIM118 - of an enum, not of a mapping
}


def otlp_request(trace: Trace) -> ExportTraceServiceRequest:
    """The trace as one export, its spans by the processes that they came from."""
    request = ExportTraceServiceRequest()
    by_resource: dict[tuple[tuple[str, Any], ...], Any] = {}
    for span in trace.spans:
        resource = {**span.resource, "service.name": span.service}
        key = tuple(sorted(resource.items()))
        scope = by_resource.get(key)
        if scope is None:
            group = request.resource_spans.add()
            _put(group.resource.attributes, resource)
            scope = by_resource[key] = group.scope_spans.add()
        _put_span(scope.spans.add(), span)
    return request


def otlp_json(trace: Trace) -> dict[str, Any]:
    """The same as OTLP's JSON."""
    value: dict[str, Any] = MessageToDict(otlp_request(trace), use_integers_for_enums=True)
    for group in value["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                for entry in (span, *span.get("links", ())):
                    _ids_to_hex(entry)
    return value


def _put_span(message: trace_pb2.Span, span: Span) -> None:
    message.trace_id = bytes.fromhex(span.trace_id)
    message.span_id = bytes.fromhex(span.span_id)
    message.parent_span_id = bytes.fromhex(span.parent_id)
    message.name = span.name
    message.kind = trace_pb2.Span.SpanKind.ValueType(_KINDS.get(span.kind, 0))
    message.start_time_unix_nano = span.start_ns
    message.end_time_unix_nano = span.end_ns
    _put(message.attributes, span.attributes)
    for event in span.events:
        put = message.events.add()
        put.name, put.time_unix_nano = event.name, event.time_ns
        _put(put.attributes, event.attributes)
    for trace_id, span_id in span.links:
        link = message.links.add()
        link.trace_id, link.span_id = bytes.fromhex(trace_id), bytes.fromhex(span_id)
    if span.is_error:
        message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        message.status.message = span.status_message


def _put(target: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        pair = target.add()
        pair.key = key
        kind = {bool: "bool_value", int: "int_value", float: "double_value"}.get(type(value), "string_value")
        setattr(pair.value, kind, value)


def _ids_to_hex(entry: dict[str, Any]) -> None:
    for key in _ID_KEYS:
        if key in entry:
            entry[key] = base64.b64decode(entry[key]).hex()
