"""The scheduler process: listens at once, makes its workers ready, serves, drains, ends."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from grpc_health.v1 import health_pb2
from opentelemetry.trace import Tracer

from scheduler_service.assembly import ServiceParts
from scheduler_service.engine.metrics import EngineMetricFamilies
from scheduler_service.engine.models import Models
from scheduler_service.engine.shares import Shares
from scheduler_service.engine.supervision import Supervision, Unsupervised
from scheduler_service.model_services import ModelServices
from scheduler_service.rpc.admin.roots import Roots
from scheduler_service.rpc.admin.servicer import ADMIN_SERVICE_NAME, AdminServicer
from scheduler_service.rpc.servicer import SERVICE_NAME, InferenceServicer
from scheduler_service.settings import SchedulerSettings
from stepwire.rpc.errors import StepwireError
from stepwire.rpc.run import settle_memory
from stepwire.rpc.server import BindError, HealthServicer, add_standard_services, bind, create_server, serve_metrics
from stepwire.telemetry import names
from stepwire.telemetry.logs import configure_logging
from stepwire.telemetry.metrics import Metrics
from stepwire.telemetry.setup import Telemetry
from stepwire.telemetry.trace import get_tracer
from stepwire.v1 import admin_pb2_grpc, inference_pb2_grpc

EXIT_OK = 0
EXIT_CANNOT_START = 1
EXIT_WORKER_FAILED = 3
EXIT_FENCED = 4
EXIT_INTERRUPTED = 130

# A prompt of a million tokens fits. Parsing one message holds up all others, so there is no room to spare.
MAX_MESSAGE_BYTES = 16 << 20
_HEALTH_EVERY_S = 0.25
_ERROR_GRACE_S = 1.0

_log = structlog.stdlib.get_logger(__name__)


async def serve(settings: SchedulerSettings, supervision: Supervision | None = None) -> int:
    """Runs the scheduler until it is told to stop; answers the process's exit status.

    0 after a drain, 1 when it could not start, 3 when its workers were lost and could not be got back, 4 when another
    scheduler has taken them, 130 when a second signal ended it. What ends it is one line on standard error.
    """
    began = time.monotonic()
    configure_logging(format=settings.log_format, level=settings.log_level, service=names.SERVICE_SCHEDULER)
    try:
        telemetry = Telemetry.start(
            names.SERVICE_SCHEDULER, otlp_endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio
        )
    except ValueError as error:
        return _cannot_start(str(error))
    try:
        return await _Service(settings, telemetry, began, supervision or Unsupervised()).run()
    finally:
        await asyncio.to_thread(telemetry.shutdown)


class _Service:
    """One run of the scheduler process."""

    def __init__(
        self, settings: SchedulerSettings, telemetry: Telemetry, began: float, supervision: Supervision
    ) -> None:
        self._settings = settings
        self._began = began
        self._tracer: Tracer = get_tracer(telemetry.tracer_provider)
        self._metrics = Metrics()
        self._metrics.watch_spans(telemetry.exporter)
        families = EngineMetricFamilies(self._metrics)
        self._models = Models(families)
        self._services = ModelServices(
            ServiceParts(settings, self._tracer, families, supervision, Shares(), self._models), self._models
        )
        admin_keys = {} if settings.admin_key is None else {ADMIN_SERVICE_NAME: settings.admin_key}
        self._server = create_server(
            tracer_provider=telemetry.tracer_provider, max_message_bytes=MAX_MESSAGE_BYTES, service_keys=admin_keys
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(self._models), self._server)
        if admin_keys:
            adapter_roots = Roots("adapter_roots", settings.adapter_roots, settings.host)
            model_roots = Roots("model_roots", settings.model_roots, settings.host)
            servicer = AdminServicer(self._models, self._services, adapter_roots, model_roots)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, self._server)
        self._health = Health(self._models, add_standard_services(self._server, [SERVICE_NAME, *admin_keys]))
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """Listens, starts, serves, ends."""
        try:
            port = bind(self._server, self._settings.host, self._settings.port)
            self._serve_metrics()
        except BindError as error:
            return _cannot_start(error.strerror or str(error))
        await self._server.start()
        if self._settings.admin_key is not None:
            await self._health.set_serving(ADMIN_SERVICE_NAME)
        _log.info(
            "listening", address=f"{self._settings.host}:{port}", models=[engine.model_name for engine in self._models]
        )
        watchers = (
            asyncio.create_task(self._health.follow(), name="health"),
            asyncio.create_task(self._metrics.watch_loop(), name="loop lag"),
        )
        try:
            with self._signals():
                return await self._start_and_serve()
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await self._server.stop(None)
            await self._services.close()

    def _serve_metrics(self) -> None:
        """Raises BindError."""
        host, port = self._settings.host, self._settings.metrics_port
        if port is None:
            return
        port = serve_metrics(self._metrics, host, port)
        _log.info("serving_metrics", address=f"http://{host}:{port}/metrics")

    async def _start_and_serve(self) -> int:
        start = asyncio.create_task(self._start(), name="start")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await _first_of(start, stop)
            if not start.done():
                # It may serve already, while what makes first requests quicker is still being started.
                return await self._drain() if self._models.is_healthy else EXIT_OK
            try:
                await start
            except StepwireError as error:
                _log.error("start_failed", reason=error.reason, error=error.message, **_log_fields(error))
                return _cannot_start(error.message)
            settle_memory()
            _log.info(
                "ready",
                seconds=round(time.monotonic() - self._began, 3),
                models=[engine.model_name for engine in self._models],
            )
            await _first_of(stop, self._models.failed)
            return await (self._fail() if self._models.failed.done() else self._drain())
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)

    async def _start(self) -> None:
        """All models serve, and the first requests will be quick. Raises StepwireError."""
        await self._services.start()
        self._health.has_started = True
        await self._health.update()
        await self._services.prepare()

    async def _drain(self) -> int:
        """SIGTERM: no new requests; running ones get their time, unless a second signal comes."""
        _log.info("draining", seconds=self._settings.shutdown_timeout)
        drain = asyncio.create_task(self._models.drain(self._settings.shutdown_timeout), name="drain")
        now = asyncio.create_task(self._stop_now.wait(), name="second signal")
        await asyncio.sleep(0)
        await self._health.update()
        await _first_of(drain, now, self._models.failed)
        is_drained = drain.done()
        for task in (drain, now):
            task.cancel()
        await asyncio.gather(drain, now, return_exceptions=True)
        if is_drained:
            await self._server.stop(_ERROR_GRACE_S)
            _log.info("stopped")
            return EXIT_OK
        if self._models.failed.done():
            return await self._fail()
        _log.warning("interrupted")
        return EXIT_INTERRUPTED

    async def _fail(self) -> int:
        """No model is left: clients get the cause, then the process ends so that its supervisor acts."""
        error = self._models.failed.result()
        await self._health.update()
        await self._server.stop(_ERROR_GRACE_S)
        sys.stderr.write(f"stepwire scheduler: {error.message}\n")
        sys.stderr.flush()
        return EXIT_FENCED if error.reason == "FENCED" else EXIT_WORKER_FAILED

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT asks for a drain, the second one for an end at once."""

        def stop() -> None:
            (self._stop_now if self._stop.is_set() else self._stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class Health:
    """Keeps grpc.health.v1 in step with the models: their states, their step loops, their workers.

    The whole serves once the start is over and while any model does; each model is a service of its own beside it.
    """

    def __init__(self, models: Models, servicer: HealthServicer) -> None:
        self.has_started = False
        self._models = models
        self._servicer = servicer
        self._told: dict[str, bool] = {}

    async def follow(self) -> None:
        """Looks again and again."""
        while True:
            await self.update()
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def set_serving(self, service: str) -> None:
        """A service that answers whatever the models' state is."""
        await self._servicer.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def update(self) -> None:
        """Looks once."""
        is_serving = self.has_started and self._models.is_healthy
        found = {"": is_serving, SERVICE_NAME: is_serving}
        found |= {f"{SERVICE_NAME}/{engine.model_name}": engine.is_healthy for engine in self._models}
        response = health_pb2.HealthCheckResponse
        told, self._told = self._told, found
        for service in told.keys() - found.keys():
            await self._servicer.forget(service)
        for service, is_healthy in found.items():
            if told.get(service) is not is_healthy:
                await self._servicer.set(service, response.SERVING if is_healthy else response.NOT_SERVING)


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    """Waits until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _log_fields(error: StepwireError) -> dict[str, str]:
    return {f"error_{key}": value for key, value in error.metadata.items()}


def _cannot_start(text: str) -> int:
    sys.stderr.write(f"stepwire scheduler: {text}\n")
    sys.stderr.flush()
    return EXIT_CANNOT_START
