"""Metrics of one process: a registry of its own, an endpoint for Prometheus, and the lag of the event loop."""

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from stepwire.telemetry import names
from stepwire.telemetry.export import SpanExporter

# Boundaries in seconds. The first three are those that the GenAI conventions advise for the metrics of a server.
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
COUNT_BUCKETS = tuple(float(4**i) for i in range(11))

_LAG_EVERY_S = 0.25


class Metrics:
    """The registry of a process. Nothing is exported before `serve`."""

    def __init__(self) -> None:
        # When a series began is of no use to us, and would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._spans = _SpanCollector()
        self.registry.register(self._spans)
        self._lag = Histogram(
            names.METRIC_LOOP_LAG,
            "How late the event loop runs what is due, looked at four times a second.",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics from now on, on a thread of its own; returns the port. Raises OSError."""
        server, _thread = start_http_server(port, addr=host, registry=self.registry)
        return int(server.server_port)

    def watch_spans(self, exporter: SpanExporter | None) -> None:
        """Counts from now on the spans that an exporter sends and loses."""
        self._spans.exporter = exporter

    async def watch_loop(self) -> None:
        """Measures the running event loop for ever."""
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(0.0, time.monotonic() - due))


class _SpanCollector(Collector):
    """Reads an exporter's counts when Prometheus asks; there may be none."""

    exporter: SpanExporter | None = None

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        exporter = self.exporter
        sent, lost = (0, 0) if exporter is None else (exporter.num_exported, exporter.num_dropped)
        for name, text, value in (
            (names.METRIC_SPANS_EXPORTED, "Spans that the trace collector took.", sent),
            (names.METRIC_SPANS_DROPPED, "Spans that were lost: no room in the queue, or not taken.", lost),
        ):
            yield CounterMetricFamily(name.removesuffix("_total"), text, value)


def exemplar(traceparent: str) -> dict[str, str] | None:
    """What links an observation to its trace; None for one that is not sampled.

    `traceparent` is W3C's: version, trace id, span id and flags, joined by hyphens.
    """
    parts = traceparent.split("-")
    return {"trace_id": parts[1], "span_id": parts[2]} if len(parts) == 4 else None
