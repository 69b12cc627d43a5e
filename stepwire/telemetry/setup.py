"""Builds and shuts down a process's tracing."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import unquote

from opentelemetry.trace import TracerProvider

from stepwire.telemetry.export import SpanExporter
from stepwire.telemetry.spans import SpanRecorder

_SHUTDOWN_S = 2.5


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A process's tracing: pass `tracer_provider` to whatever makes spans. No global is set."""

    tracer_provider: TracerProvider
    exporter: SpanExporter | None
    """What sends the spans; None where none are sent."""

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
        if otlp_endpoint is None:
            return cls(SpanRecorder(None), None)
        exporter = SpanExporter(otlp_endpoint, _resource(service_name, attributes or {}))
        return cls(SpanRecorder(exporter, sample_ratio), exporter)

    def shutdown(self) -> None:
        """Exports what is left and stops. Blocks, but for less than 3 s even when the collector is dead."""
        if self.exporter is not None:
            self.exporter.shutdown(_SHUTDOWN_S)


def _resource(service_name: str, attributes: Mapping[str, str]) -> dict[str, str | int]:
    """What names this process. OTEL_RESOURCE_ATTRIBUTES ("key=value,…", percent-encoded) adds to it."""
    try:
        service_version = version("stepwire")
    except PackageNotFoundError:
        service_version = "unknown"
    host = socket.gethostname()
    pairs = (entry.partition("=") for entry in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    return {
        **{key.strip(): unquote(value.strip()) for key, is_pair, value in pairs if is_pair and key.strip()},
        "service.name": service_name,
        "service.version": service_version,
        "service.instance.id": f"{host}:{os.getpid()}",
        "host.name": host,
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "stepwire",
        "telemetry.sdk.language": "python",
        **attributes,
    }
