"""Builds and shuts down a process's tracing."""

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

_log = logging.getLogger(__name__)

# A step has a link for each request in it; the SDK's 128 would drop the first ones.
_LIMITS = SpanLimits(max_links=1024, max_events=1024, max_attribute_length=4096)

_QUEUE_SPANS = 8192
_BATCH_SPANS = 512
_SCHEDULE_DELAY_MS = 500
_EXPORT_TIMEOUT_S = 1.5
_SHUTDOWN_S = 2.5


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A process's tracing: pass `tracer_provider` to whatever makes spans. No global is set."""

    tracer_provider: TracerProvider
    _exporter: "OtlpExporter | None"

    @classmethod
    def start(
        cls,
        service_name: str,
        *,
        otlp_endpoint: str | None,
        sample_ratio: float = 1.0,
        attributes: Mapping[str, str] | None = None,
    ) -> "Telemetry":
        """Starts tracing as `service_name`.

        `otlp_endpoint` is an OTLP/gRPC collector: "host:port" or "http://host:port" in the clear,
        "https://host:port" by TLS. Without one no span is exported, but trace ids are still taken
        over, passed on and logged. `sample_ratio` (0 to 1) decides for traces that begin here;
        otherwise the caller has decided. Raises ValueError for an endpoint that is not one.
        """
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio if otlp_endpoint else 0.0),
            resource=_resource(service_name, attributes or {}),
            span_limits=_LIMITS,
            shutdown_on_exit=False,
        )
        exporter = OtlpExporter(otlp_endpoint) if otlp_endpoint else None
        if exporter is not None:
            provider.add_span_processor(
                BatchSpanProcessor(
                    exporter,
                    max_queue_size=_QUEUE_SPANS,
                    max_export_batch_size=_BATCH_SPANS,
                    schedule_delay_millis=_SCHEDULE_DELAY_MS,
                )
            )
        return cls(provider, exporter)

    def shutdown(self) -> None:
        """Exports what is left and stops. Blocks, but for less than 3 s even when the collector is dead."""
        if self._exporter is not None:
            self._exporter.begin_shutdown(_SHUTDOWN_S)
        self.tracer_provider.shutdown()


class OtlpExporter(SpanExporter):
    """Sends spans to an OTLP/gRPC collector, from the span processor's thread.

    A batch that is not taken within its time is dropped: tracing must not hold a service up. The
    stock exporter retries for minutes and writes a log record for each try; this one writes one
    when the collector is lost and one when it is back.
    """

    def __init__(self, endpoint: str, timeout_s: float = _EXPORT_TIMEOUT_S) -> None:
        self._target, is_secure = parse_endpoint(endpoint)
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        self._channel = (
            grpc.secure_channel(self._target, grpc.ssl_channel_credentials(), options)
            if is_secure
            else grpc.insecure_channel(self._target, options)
        )
        self._stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s
        self._shutdown_at: float | None = None
        self._num_dropped = 0
        self._lock = threading.Lock()

    @property
    def num_dropped(self) -> int:
        """Spans that the collector did not take."""
        return self._num_dropped

    def begin_shutdown(self, within_s: float) -> None:
        """From now on all exports together take no more than `within_s` seconds."""
        with self._lock:
            self._shutdown_at = time.monotonic() + within_s

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends one batch; blocks for the export timeout at most."""
        timeout_s = self._remaining_s()
        if timeout_s <= 0:
            return self._dropped(spans, "the process ends")
        try:
            self._stub.Export(encode_spans(spans), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            return self._dropped(spans, error.details() or error.code().name)
        except ValueError as error:  # The channel was closed by another thread.
            return self._dropped(spans, str(error))
        if self._num_dropped:
            _log.info("trace collector at %s is back; %d spans were lost", self._target, self._num_dropped)
            self._num_dropped = 0
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _remaining_s(self) -> float:
        with self._lock:
            if self._shutdown_at is None:
                return self._timeout_s
            if self._num_dropped:  # Dead already: do not hold the process up for it.
                return 0.0
            return min(self._timeout_s, self._shutdown_at - time.monotonic())

    def _dropped(self, spans: Sequence[ReadableSpan], why: str) -> SpanExportResult:
        if not self._num_dropped:
            _log.warning(
                "trace collector at %s cannot be reached (%s); spans are dropped until it can", self._target, why
            )
        self._num_dropped += len(spans)
        return SpanExportResult.FAILURE


def parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """The gRPC target and whether it wants TLS. Raises ValueError for what is neither host:port nor a URL."""
    has_scheme = "://" in endpoint
    parts = urlsplit(endpoint if has_scheme else f"http://{endpoint}")
    problem = ValueError(f"OTLP endpoint {endpoint!r} is neither host:port nor http(s)://host:port")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise problem
    try:
        port = parts.port or 4317
    except ValueError as error:  # no number, or beyond 65535, which names no endpoint
        raise problem from error
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.scheme == "https"


def _resource(service_name: str, attributes: Mapping[str, str]) -> Resource:
    try:
        service_version = version("stepwire")
    except PackageNotFoundError:
        service_version = "unknown"
    host = socket.gethostname()
    return Resource.create(
        {
            "service.name": service_name,
            "service.version": service_version,
            "service.instance.id": f"{host}:{os.getpid()}",
            "host.name": host,
            "process.pid": os.getpid(),
            **attributes,
        }
    )
