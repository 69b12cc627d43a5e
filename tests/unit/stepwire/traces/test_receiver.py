from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from stepwire.rpc.server import AddressInUse
from stepwire.telemetry.setup import Telemetry
from stepwire.telemetry.trace import SpanEvent, context_of, get_tracer, record_span
from stepwire.traces import Receiver, TraceStore, serve_receiver
from stepwire.traces.receiver import spans_of


@pytest.fixture
def store() -> TraceStore:
    return TraceStore()


@pytest.fixture
async def receiver(store: TraceStore) -> AsyncIterator[Receiver]:
    receiver = await serve_receiver(store, port=0)
    yield receiver
    await receiver.stop()


async def test_spans_of_two_services_become_one_trace(store: TraceStore, receiver: Receiver) -> None:
    client = Telemetry.start("stepwire-client", otlp_endpoint=receiver.endpoint)
    worker = Telemetry.start("stepwire-worker", otlp_endpoint=f"http://{receiver.endpoint}")
    parent = get_tracer(client.tracer_provider).start_span("call", attributes={"stepwire.request_id": "r-1"})
    record_span(
        get_tracer(worker.tracer_provider),
        "worker.decode",
        context_of(parent),
        (10**18, 10**18 + 5),
        attributes={"a": "x", "b": True, "c": 2, "d": 0.5, "e": ["x", "y"]},
        events=[SpanEvent("first_token", 10**18 + 1, {"f": 1})],
    )
    parent.end()
    trace = await store.wait_for(lambda trace: len(trace.spans) == 2, 5)
    client.shutdown()
    worker.shutdown()
    assert store.by_request_id("r-1") is trace
    assert set(trace.services) == {"stepwire-client", "stepwire-worker"}
    child = next(span for span in trace.spans if span.name == "worker.decode")
    assert child.parent_id == trace.root.span_id
    assert (child.kind, child.start_ns, child.end_ns) == ("internal", 10**18, 10**18 + 5)
    assert child.attributes == {"a": "x", "b": True, "c": 2, "d": 0.5, "e": "x, y"}
    assert [(event.name, event.time_ns, event.attributes) for event in child.events] == [
        ("first_token", 10**18 + 1, {"f": 1})
    ]


async def test_a_port_in_use_is_named(store: TraceStore, receiver: Receiver) -> None:
    with pytest.raises(AddressInUse, match=str(receiver.port)):
        await serve_receiver(store, port=receiver.port)


async def test_rubbish_is_refused_or_ignored_and_the_receiver_lives(store: TraceStore, receiver: Receiver) -> None:
    async with grpc.aio.insecure_channel(receiver.endpoint) as channel:
        method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(method)(b"\xff\xff\xff", timeout=5)
        stub: Any = trace_service_pb2_grpc.TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        await stub.Export(request_of(trace_pb2.Span(trace_id=b"short", span_id=b"1" * 8)), timeout=5)
        await stub.Export(request_of(trace_pb2.Span(trace_id=b"1" * 16, span_id=b"1" * 8)), timeout=5)
    assert store.num_spans == 1


def request_of(*spans: trace_pb2.Span, resource: Resource | None = None) -> trace_service_pb2.ExportTraceServiceRequest:
    scope = trace_pb2.ScopeSpans(spans=spans)
    return trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scope])]
    )


def test_what_one_span_may_hold_is_bounded() -> None:
    long = AnyValue(string_value="x" * 5_000)
    pairs = [KeyValue(key=f"{i}", value=long) for i in range(2_000)]
    nested = AnyValue(kvlist_value=KeyValueList(values=pairs))
    array = AnyValue(array_value=ArrayValue(values=[long] * 10))
    wire = trace_pb2.Span(
        trace_id=b"1" * 16,
        span_id=b"1" * 8,
        name="n" * 10_000,
        kind=77,  # type: ignore[arg-type]
        attributes=[KeyValue(key="nested", value=nested), KeyValue(key="array", value=array), *pairs],
        events=[trace_pb2.Span.Event(name="e")] * 5_000,
        status=trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message="m" * 10_000),
    )
    (span,) = spans_of(request_of(wire))
    assert span.service == "unknown" and span.kind == "unknown" and span.is_error
    assert len(span.name) == len(span.status_message) == 4096
    assert len(span.events) == 1024 and len(span.attributes) == 1024
    assert all(len(str(value)) <= 4096 for value in span.attributes.values())
    assert span.status_message.endswith("…")


def test_bytes_and_empty_values() -> None:
    pairs = [KeyValue(key="b", value=AnyValue(bytes_value=b"\x00\xff")), KeyValue(key="none", value=AnyValue())]
    wire = trace_pb2.Span(trace_id=b"1" * 16, span_id=b"1" * 8, attributes=pairs)
    (span,) = spans_of(request_of(wire))
    assert span.attributes == {"b": "00ff", "none": ""}
