"""An OTLP/gRPC trace receiver that puts spans into a TraceStore."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from stepwire.rpc.server import bind, create_server
from stepwire.traces.store import AttributeValue, Span, SpanEvent, TraceStore

DEFAULT_PORT = 4317

_MAX_MESSAGE_BYTES = 16 << 20
_MAX_TEXT_CHARS = 4096
_MAX_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class Receiver:
    """A running receiver. `endpoint` is what services take as --otlp-endpoint."""

    endpoint: str
    port: int
    _server: grpc.aio.Server

    async def stop(self) -> None:
        """Takes no more spans."""
        await self._server.stop(1.0)


async def serve_receiver(store: TraceStore, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> Receiver:
    """Starts to receive; port 0 takes a free one. Raises AddressInUse or BindError."""
    server = create_server(tracer_provider=None, max_message_bytes=_MAX_MESSAGE_BYTES)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_TraceService(store), server)  # type: ignore[no-untyped-call]
    bound = bind(server, host, port)
    await server.start()
    shown = f"[{host}]" if ":" in host else host
    return Receiver(f"{shown}:{bound}", bound, server)


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, store: TraceStore) -> None:
        self._store = store

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: Any,  # noqa: ARG002 - gRPC passes it
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._store.add(spans_of(request))
        return trace_service_pb2.ExportTraceServiceResponse()


def spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[Span]:
    """The spans of an export; those without ids are left out, overlong texts and lists are cut."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        service = str(resource.get("service.name", "unknown"))
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield _span(span, service, resource)


def _span(span: trace_pb2.Span, service: str, resource: dict[str, AttributeValue]) -> Span:
    kind = trace_pb2.Span.SpanKind.Name(span.kind) if span.kind in trace_pb2.Span.SpanKind.values() else "UNKNOWN"
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=_cut(span.name),
        kind=kind.removeprefix("SPAN_KIND_").lower(),
        service=service,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(
            SpanEvent(_cut(event.name), event.time_unix_nano, _attributes(event.attributes))
            for event in span.events[:_MAX_ITEMS]
        ),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links[:_MAX_ITEMS]),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        status_message=_cut(span.status.message),
        resource=resource,
    )


def _attributes(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, AttributeValue]:
    return {_cut(pair.key): _value(pair.value) for pair, _ in zip(pairs, range(_MAX_ITEMS), strict=False)}


def _value(value: common_pb2.AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return _cut(value.string_value)
    if kind in ("bool_value", "int_value", "double_value"):
        scalar: AttributeValue = getattr(value, kind)
        return scalar
    if kind == "array_value":
        return _cut(", ".join(str(_value(item)) for item in value.array_value.values[:_MAX_ITEMS]))
    if kind == "kvlist_value":
        return _cut(", ".join(f"{key}={item}" for key, item in _attributes(value.kvlist_value.values).items()))
    if kind == "bytes_value":
        return _cut(value.bytes_value[:_MAX_TEXT_CHARS].hex())
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"
