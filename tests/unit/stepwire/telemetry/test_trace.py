import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, Tracer

from stepwire.telemetry import names
from stepwire.telemetry.trace import (
    SpanEvent,
    context_from_metadata,
    context_from_traceparent,
    context_of,
    end_rpc_span,
    get_tracer,
    inject,
    record_span,
    traceparent,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return get_tracer(provider)


def test_a_traceparent_goes_there_and_back(tracer: Tracer) -> None:
    child = tracer.start_span("child", context_from_traceparent(TRACEPARENT))
    assert isinstance(child, Span) and child.parent is not None
    assert traceparent(child.parent) == TRACEPARENT
    remote = trace.get_current_span(context_from_traceparent(traceparent(child))).get_span_context()
    assert (remote.trace_id, remote.span_id) == (child.parent.trace_id, child.get_span_context().span_id)


@pytest.mark.parametrize(
    "value", ["", "00-zz-11-01", TRACEPARENT[:-3], f"00-{'0' * 32}-{'0' * 16}-01", "x" * 9000, "é"]
)
def test_a_malformed_traceparent_starts_a_new_trace(tracer: Tracer, value: str) -> None:
    assert not context_from_traceparent(value)
    assert not context_from_metadata([("traceparent", value)])
    span = tracer.start_span("root", context_from_traceparent(value))
    assert isinstance(span, Span) and span.parent is None


def test_metadata_other_than_the_trace_context_is_ignored() -> None:
    metadata = [("traceparent", TRACEPARENT), ("baggage", "a=b"), ("x-bin", b"\x00")]
    context = context_from_metadata(metadata)
    assert traceparent(trace.get_current_span(context)) == TRACEPARENT
    assert len(context) == 1
    assert not context_from_metadata([("traceparent", b"bytes")])
    assert not context_from_metadata(None)


def test_injection_keeps_the_trace_state(tracer: Tracer) -> None:
    context = context_from_metadata([("traceparent", TRACEPARENT), ("tracestate", "vendor=1")])
    span = tracer.start_span("x", context)
    metadata: list[tuple[str, str]] = []
    inject(span, metadata)
    assert metadata == [("traceparent", traceparent(span)), ("tracestate", "vendor=1")]


def test_a_no_op_span_injects_nothing() -> None:
    metadata: list[tuple[str, str]] = []
    inject(trace.INVALID_SPAN, metadata)
    assert metadata == []


def test_an_unsampled_span_has_ids_but_no_sampled_traceparent() -> None:
    span = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("t").start_span("x")
    assert len(traceparent(span)) == len(TRACEPARENT)
    assert traceparent(span, if_sampled=True) == ""


def test_recorded_spans_have_the_times_given(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    parent = tracer.start_span("parent")
    record_span(
        tracer,
        names.SPAN_PREFILL,
        context_of(parent),
        (1_000, 5_000),
        attributes={names.NUM_TOKENS: 7},
        events=[SpanEvent(names.EVENT_FIRST_TOKEN, 4_000)],
    )
    record_span(tracer, "backwards", context_of(parent.get_span_context()), (5_000, 4_000))
    span, backwards = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1_000, 5_000)
    assert span.parent == parent.get_span_context()
    assert span.attributes == {names.NUM_TOKENS: 7}
    assert [(event.name, event.timestamp) for event in span.events] == [(names.EVENT_FIRST_TOKEN, 4_000)]
    assert (backwards.start_time, backwards.end_time) == (5_000, 5_000)
    assert backwards.parent is not None and backwards.parent.span_id == parent.get_span_context().span_id


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_statuses_follow_the_side_of_the_span(
    tracer: Tracer, exporter: InMemorySpanExporter, code: grpc.StatusCode
) -> None:
    for kind in (SpanKind.SERVER, SpanKind.CLIENT):
        end_rpc_span(tracer.start_span("x", kind=kind), code, "why")
    server, client = exporter.get_finished_spans()
    server_failed = code.name in {
        "UNKNOWN",
        "DEADLINE_EXCEEDED",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
    assert server.status.status_code is (StatusCode.ERROR if server_failed else StatusCode.UNSET)
    assert client.status.status_code is (StatusCode.UNSET if code is grpc.StatusCode.OK else StatusCode.ERROR)
    assert server.attributes is not None and server.attributes[names.RPC_STATUS] == code.name
