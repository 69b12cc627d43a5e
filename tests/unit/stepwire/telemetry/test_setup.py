import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from stepwire.telemetry.export import _BATCH_SPANS, QUEUE_SPANS, parse_endpoint
from stepwire.telemetry.setup import Telemetry
from stepwire.telemetry.trace import context_from_traceparent, traceparent

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.received = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.received.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def start(collector: Collector, port: int = 0) -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # Bound but not listening: connections are refused.
        yield held.getsockname()[1]


@pytest.fixture
def black_hole() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(1)  # Accepts connections, and never says a word.
        yield held.getsockname()[1]


def test_spans_reach_the_collector_with_their_resource() -> None:
    collector = Collector()
    server, port = start(collector)
    telemetry = Telemetry.start("stepwire-test", otlp_endpoint=f"127.0.0.1:{port}", attributes={"stepwire.rank": "0"})
    telemetry.tracer_provider.get_tracer("t").start_span("x").end()
    assert collector.received.wait(5), "what no other span follows is sent within three seconds"
    telemetry.tracer_provider.get_tracer("t").start_span("y").end()
    telemetry.shutdown()
    assert [span.name for span in collector.spans()] == ["x", "y"]
    resource = {item.key: item.value for item in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "stepwire-test"
    assert resource["stepwire.rank"].string_value == "0"
    assert resource["process.pid"].int_value > 0
    server.stop(0)


def test_spans_that_keep_coming_are_sent_together_and_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwire.telemetry.export._TICK_S", 0.1)
    collector = Collector()
    server, port = start(collector)
    telemetry = Telemetry.start("stepwire-test", otlp_endpoint=f"127.0.0.1:{port}")
    tracer = telemetry.tracer_provider.get_tracer("t")
    began, num = time.monotonic(), 0
    while not collector.received.is_set() and time.monotonic() - began < 5:
        tracer.start_span("x").end()
        num += 1
        time.sleep(0.02)
    assert len(collector.spans()) <= num and time.monotonic() - began >= 0.4
    collector.received.clear()
    monkeypatch.setattr("stepwire.telemetry.export._TICK_S", 60.0)
    time.sleep(0.2)  # the tick in hand
    for _ in range(_BATCH_SPANS + 10):
        tracer.start_span("y").end()
    assert collector.received.wait(5)
    telemetry.shutdown()
    server.stop(0)


@pytest.mark.parametrize("collector", ["free_port", "black_hole"])
def test_a_dead_collector_costs_a_line_and_little_time(
    collector: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    port = request.getfixturevalue(collector)
    telemetry = Telemetry.start("s", otlp_endpoint=f"http://127.0.0.1:{port}")
    tracer = telemetry.tracer_provider.get_tracer("t")
    started = time.monotonic()
    for _ in range(2000):
        tracer.start_span("x").end()
    assert time.monotonic() - started < 1.0
    with caplog.at_level(logging.INFO):
        telemetry.shutdown()
    assert time.monotonic() - started < 3.0 + 1.0
    (record,) = caplog.records
    assert f"127.0.0.1:{port}" in record.getMessage()
    assert record.exc_info is None


def test_a_collector_that_comes_back_is_used(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    telemetry = Telemetry.start("s", otlp_endpoint=f"127.0.0.1:{port}")
    telemetry.tracer_provider.get_tracer("t").start_span("early").end()
    collector = Collector()
    server, _ = start(collector, port)
    assert collector.received.wait(10)
    telemetry.shutdown()
    server.stop(0)
    assert [span.name for span in collector.spans()] == ["early"]
    assert not caplog.records


def test_memory_is_bounded_and_what_is_lost_is_counted(free_port: int) -> None:
    telemetry = Telemetry.start("s", otlp_endpoint=f"127.0.0.1:{free_port}")
    exporter, tracer = telemetry.exporter, telemetry.tracer_provider.get_tracer("t")
    assert exporter is not None
    num_spans = 3 * QUEUE_SPANS
    for _ in range(num_spans):
        tracer.start_span("x").end()
        assert exporter.num_queued <= QUEUE_SPANS
    assert exporter.num_dropped >= num_spans - 2 * QUEUE_SPANS
    telemetry.shutdown()
    tracer.start_span("late").end()
    assert (exporter.num_dropped, exporter.num_exported, exporter.num_queued) == (num_spans + 1, 0, 0)


def test_what_the_collector_refuses_is_lost_too() -> None:
    class Refusing(Collector):
        def Export(self, request: Any, context: Any) -> Any:
            super().Export(request, context)
            partial = trace_service_pb2.ExportTracePartialSuccess(rejected_spans=2)
            return trace_service_pb2.ExportTraceServiceResponse(partial_success=partial)

    server, port = start(Refusing())
    telemetry = Telemetry.start("s", otlp_endpoint=f"127.0.0.1:{port}")
    for _ in range(5):
        telemetry.tracer_provider.get_tracer("t").start_span("x").end()
    telemetry.shutdown()
    server.stop(0)
    assert telemetry.exporter is not None
    assert (telemetry.exporter.num_dropped, telemetry.exporter.num_exported) == (2, 3)


def test_without_a_collector_ids_are_passed_on_and_nothing_is_recorded() -> None:
    telemetry = Telemetry.start("s", otlp_endpoint=None)
    tracer = telemetry.tracer_provider.get_tracer("t")
    root = tracer.start_span("root")
    assert root.get_span_context().is_valid and not root.is_recording()
    child = tracer.start_span("child", context_from_traceparent(TRACEPARENT))
    assert traceparent(child).split("-")[1] == TRACEPARENT.split("-")[1]
    assert traceparent(child, if_sampled=True), "the caller wants this trace recorded further on"
    telemetry.shutdown()


def test_the_ratio_decides_only_for_traces_that_begin_here() -> None:
    telemetry = Telemetry.start("s", otlp_endpoint="127.0.0.1:1", sample_ratio=0.0)
    tracer = telemetry.tracer_provider.get_tracer("t")
    assert not tracer.start_span("root").is_recording()
    assert tracer.start_span("child", context_from_traceparent(TRACEPARENT)).is_recording()
    telemetry.shutdown()


def test_a_span_can_link_a_whole_batch() -> None:
    telemetry = Telemetry.start("s", otlp_endpoint="127.0.0.1:1")
    tracer = telemetry.tracer_provider.get_tracer("t")
    links = [trace.Link(tracer.start_span("request").get_span_context()) for _ in range(300)]
    span: Any = tracer.start_span("step", links=links)
    assert len(span.links) == 300
    telemetry.shutdown()


def test_no_global_provider_is_set() -> None:
    telemetry = Telemetry.start("s", otlp_endpoint=None)
    assert trace.get_tracer_provider() is not telemetry.tracer_provider
    telemetry.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "target", "is_secure"),
    [
        ("localhost:4317", "localhost:4317", False),
        ("http://collector", "collector:4317", False),
        ("https://collector:443/", "collector:443", True),
        ("[::1]:9", "[::1]:9", False),
    ],
)
def test_endpoints(endpoint: str, target: str, is_secure: bool) -> None:
    assert parse_endpoint(endpoint) == (target, is_secure)


@pytest.mark.parametrize("endpoint", ["", "ftp://x:1", "http://x:1/v1/traces", "http://:4317", "host:port", "x:99999"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"OTLP endpoint .* is neither"):
        parse_endpoint(endpoint)
