"""Builds a gRPC server: options, interceptors, health, reflection, port."""

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import TracerProvider

from stepwire.rpc.interceptors import AuthInterceptor, ErrorInterceptor, TracingInterceptor
from stepwire.telemetry.metrics import Metrics

_NO_KEYS: Mapping[str, str] = MappingProxyType({})


class BindError(OSError):
    """A server cannot listen on the address asked for; the text names it, the cause and the remedy."""


class AddressInUse(BindError):
    """Another process listens on the address asked for."""


# What a probe asks for that only wants to know whether to restart the process: one that loads or recovers is alive.
LIVE = "live"


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 for a set of services, each NOT_SERVING at first, and LIVE, which is always SERVING."""

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__()
        # The base class starts as serving; there must be no moment at which a service that is not ready says it is.
        self._server_status = dict.fromkeys(["", *service_names], health_pb2.HealthCheckResponse.NOT_SERVING)
        self._server_status[LIVE] = health_pb2.HealthCheckResponse.SERVING

    async def forget(self, service: str) -> None:
        """A service that is there no more."""
        await self.set(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        del self._server_status[service]

    async def set_all(self, *, serving: bool) -> None:
        """Sets the status of every service, "" included, LIVE not."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in set(self._server_status) - {LIVE}:
            await self.set(name, status)


def create_server(
    *,
    tracer_provider: TracerProvider | None,
    max_message_bytes: int,
    key: str | None = None,
    service_keys: Mapping[str, str] = _NO_KEYS,
) -> grpc.aio.Server:
    """A server whose handlers may raise StepwireError and have a SERVER span each.

    `max_message_bytes` bounds messages in both directions. With `key` every call but health checks
    must carry it; with `service_keys` those of a service ("stepwire.v1.AdminService") its own. Needs a running event
    loop.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = [TracingInterceptor(tracer_provider)]
    if key is not None:
        interceptors.append(AuthInterceptor(key))
    interceptors.extend(AuthInterceptor(own, f"/{service}/") for service, own in service_keys.items())
    interceptors.append(ErrorInterceptor())
    return grpc.aio.server(interceptors=interceptors, options=_options(max_message_bytes))


def add_standard_services(server: grpc.aio.Server, service_names: Sequence[str]) -> HealthServicer:
    """Adds grpc.health.v1 and reflection.

    Every service of `service_names` ("stepwire.v1.InferenceService") and "" start as NOT_SERVING;
    `await servicer.set(name, status)` and `await servicer.set_all(serving=...)` change that.
    """
    servicer = HealthServicer(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return servicer


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Makes the server listen on an address, in the clear; port 0 takes a free one.

    Returns the port. Raises AddressInUse, or BindError for an address that cannot be listened on
    for another reason.
    """
    # The operating system is asked first: gRPC writes lines of its own to standard error when it fails.
    problem = _listen_problem(host, port)
    if problem is not None:
        raise problem
    try:
        bound = server.add_insecure_port(_address(host, port))
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise bind_error(host, port)
    return bound


def serve_metrics(metrics: Metrics, host: str, port: int) -> int:
    """Answers Prometheus on an address from now on; port 0 takes a free one. Returns the port. Raises BindError."""
    problem = _listen_problem(host, port, "--metrics-port")
    if problem is not None:
        raise problem
    return metrics.serve(host, port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two servers on one port would share its calls between them; the second must fail.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # How often a client may ping. The often-copied `min_recv_ping_interval_without_data_ms` is ignored by gRPC.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def bind_error(host: str, port: int) -> BindError:
    """Why a server could not listen on an address: gRPC does not say, the operating system does."""
    problem = _listen_problem(host, port)
    if problem is not None:
        return problem
    return BindError(0, f"cannot listen on {_address(host, port)}; choose another address with --host and --port")


def _listen_problem(host: str, port: int, flag: str = "--port") -> BindError | None:
    address = _address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name != "nt":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{address} is in use by another process: stop it, or choose another port with {flag}"
            return AddressInUse(errno.EADDRINUSE, text)
        text = f"cannot listen on {address}: {error.strerror or error}; choose another address with --host and {flag}"
        return BindError(error.errno or 0, text)
    return None
